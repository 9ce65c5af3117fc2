"""Window summaries and the exchange times taken from them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.timing import (
    StepTiming,
    WindowTiming,
    critical_bucket,
    exchange_times,
    summarise,
)
from hvd_hetero.errors import ConfigurationError


def test_medians_per_batch_size_and_single_steps_left_out() -> None:
    steps = [
        StepTiming(8, 1.0, 2.0, 4.0),
        StepTiming(4, 0.5, 1.0, 4.0),
        StepTiming(8, 1.2, 2.2, 5.0),
        StepTiming(4, 0.7, 1.4, 5.0),
        StepTiming(8, 9.0, 99.0, 99.0),  # an outlier
        StepTiming(3, 0.1, 0.2, 0.3),  # the tail of an epoch
    ]
    window = summarise(steps)
    assert [(p.batch, p.steps) for p in window.points] == [(4, 2), (8, 3)]
    assert window.points[1].ready_seconds == 1.2
    assert window.points[1].done_seconds == 2.2
    assert window.points[1].variance == pytest.approx((1.4826 * 3 / 2.2 * 0.2) ** 2)
    assert window.step_seconds == 5.0
    assert window.wait_seconds == pytest.approx(2.8)


def test_only_single_steps_are_all_used() -> None:
    window = summarise([StepTiming(b, 0.1 * b, 0.2 * b, 1.0) for b in (3, 1, 2)])
    assert [p.batch for p in window.points] == [1, 2, 3]


def test_waiting_is_not_work() -> None:
    """A slow peer lengthens the step and the waiting, not the points of the models."""
    alone = summarise([StepTiming(8, 1.0, 2.0, 2.5)] * 5)
    beside_slow = summarise([StepTiming(8, 1.0, 2.0, 9.5)] * 5)
    assert alone.points == beside_slow.points
    assert beside_slow.wait_seconds == 7.5
    assert beside_slow.after_ready_seconds == 8.5


def test_order_of_events_may_be_unusual() -> None:
    """An exchange that ends before backward does, or a bucket ready after it, is no error."""
    window = summarise([StepTiming(8, 2.5, 2.0, 1.9)] * 2)
    assert window.wait_seconds == window.after_ready_seconds == 0.0
    assert window.points[0].ready_seconds == 2.0
    assert window.step_seconds == 2.0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
    st.floats(0.01, 1.0),
)
def test_exchange_times_of_noiseless_ranks_are_exact(
    done: list[float], ready_part: float, total: float, share: float
) -> None:
    """Whatever the bottleneck, unless the exchange hides behind backward completely.

    The formula's step, with T_o + T_u = total: when the slowest rank computes longest, its waiting
    is T_u; when the exchange limits the step, the rank whose bucket comes last sees T_o + T_u.
    """
    final = share * total
    overlapped = total - final
    ready = [ready_part * d for d in done]
    end = max(max(done), max(ready) + overlapped) + final
    windows = [summarise([StepTiming(4, r, d, end)] * 3) for r, d in zip(ready, done, strict=True)]
    found = exchange_times(windows, [1.0 - share, share] if share < 1.0 else [1.0])
    assert found[0] == pytest.approx(overlapped, rel=1e-6, abs=1e-9 / share)
    assert found[1] == pytest.approx(final, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_share_out_of_range(share: float) -> None:
    with pytest.raises(ConfigurationError, match="bucket_shares"):
        exchange_times([summarise([StepTiming(1, 0.0, 1.0, 1.0)])], [0.5, share])


def test_malformed() -> None:
    with pytest.raises(ConfigurationError, match="at least one timed step"):
        summarise([])
    with pytest.raises(ConfigurationError, match="windows"):
        exchange_times([], [0.5, 0.5])
    with pytest.raises(ConfigurationError, match="batch=0"):
        StepTiming(0, 0.0, 1.0, 1.0)
    with pytest.raises(ConfigurationError, match="ready_seconds"):
        StepTiming(1, -1.0, 1.0, 1.0)
    with pytest.raises(ConfigurationError, match="not a saved window"):
        WindowTiming.from_dict({"points": []} | {"wait_seconds": 1.0})


def test_round_trip_through_json() -> None:
    window = summarise([StepTiming(8, 0.1, 0.3, 0.5), StepTiming(4, 0.1, 0.2, 0.4)] * 3)
    assert WindowTiming.from_dict(json.loads(json.dumps(window.to_dict()))) == window


def general_step(
    ready: list[list[float]], exchange: list[float], last: list[float]
) -> list[WindowTiming]:
    """Ranks whose buckets become ready at ``ready``; exchanges run one after the other."""
    end = 0.0
    for moments, seconds in zip(zip(*ready, strict=True), exchange, strict=True):
        end = max(end, *moments) + seconds
    return [
        summarise([StepTiming(4, own[0], done, end, bucket_seconds=tuple(own))] * 3)
        for own, done in zip(ready, last, strict=True)
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), min_size=1, max_size=4),
    st.lists(st.floats(0.1, 1.0), min_size=4, max_size=4),
    st.floats(0.01, 20.0),
)
def test_the_step_is_explained_at_least_as_well_as_by_two_points(
    steps: list[list[float]], weights: list[float], total: float
) -> None:
    """Law: with the chosen bucket the prediction is no worse than with the first, and no exchange
    is ever taken for longer than it was."""
    ready = [[sum(own[: j + 1]) for j in range(4)] for own in steps]
    shares = [weight / sum(weights) for weight in weights]
    done = [own[-1] for own in ready]
    windows = general_step(ready, [share * total for share in shares], done)
    measured = windows[0].step_seconds

    def predicted(bucket: int) -> float:
        overlapped, final = exchange_times(windows, shares, bucket)
        latest = max(own[bucket] for own in ready)
        return max(max(done), latest + overlapped) + final

    chosen = critical_bucket(windows, shares)
    assert abs(predicted(chosen) - measured) <= abs(predicted(0) - measured) + 1e-9
    assert sum(exchange_times(windows, shares)) == pytest.approx(total)


def test_a_bucket_in_between_is_found() -> None:
    """Most of backward lies before the second bucket, most of the bytes in it."""
    ready = [[0.1, 1.0, 1.1], [0.1, 0.8, 0.9]]
    windows = general_step(ready, [0.1, 2.0, 0.1], [1.1, 0.9])
    shares = [0.1 / 2.2, 2.0 / 2.2, 0.1 / 2.2]
    assert critical_bucket(windows, shares) == 1
    overlapped, final = exchange_times(windows, shares, 1)
    assert 1.0 + overlapped + final == pytest.approx(windows[0].step_seconds)
    first = general_step(ready, [2.0, 0.1, 0.1], [1.1, 0.9])
    assert critical_bucket(first, [2.0 / 2.2, 0.1 / 2.2, 0.1 / 2.2]) == 0
    # Without the moments of buckets there is nothing to choose by.
    plain = [summarise([StepTiming(4, 0.1, 1.1, 3.1)])]
    assert critical_bucket(plain, shares) == 0
