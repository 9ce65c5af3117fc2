"""OptPerf against brute force, and its laws."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.optperf import Bounds, solve, step_seconds
from hvd_hetero.balance.perf_model import Line, RankModel
from hvd_hetero.balance.units import RankLines, RankUnits
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError


def brute_force(
    models: list[RankModel], total: int, bounds: Bounds, granule: int, exchange: tuple[float, float]
) -> float | None:
    """Smallest step over the feasible set of solve's docstring, written down directly."""
    rest = total % granule
    choices = [
        [b for b in range(low, high + 1) if b % granule == 0]
        for low, high in zip(bounds.lower, bounds.upper, strict=True)
    ]
    best = None
    for multiples in itertools.product(*choices):
        if sum(multiples) != total - rest:
            continue
        splits = [multiples]
        if rest:
            splits = [
                (*multiples[:k], multiples[k] + rest, *multiples[k + 1 :])
                for k in range(len(models))
                if multiples[k] + rest <= bounds.upper[k]
            ]
        for split in splits:
            ends = [
                max(model.done(b), model.ready(b) + exchange[0])
                for model, b in zip(models, split, strict=True)
            ]
            seconds = max(ends) + exchange[1]
            best = seconds if best is None else min(best, seconds)
    return best


def random_line(rng: np.random.Generator) -> Line:
    slope = rng.choice([0.0, rng.integers(1, 4) * 1e-3, rng.random() * 1e-2])
    return Line(float(slope), float(rng.choice([0.0, rng.random() * 2e-2])))


def test_equals_brute_force_on_1000_random_instances() -> None:
    """Bounds, granules, flat lines, ties and infeasible cases."""
    rng = np.random.default_rng(20240402)
    infeasible = 0
    for _ in range(1000):
        ranks, granule = int(rng.integers(1, 5)), int(rng.choice([1, 1, 2, 3, 4]))
        lower = rng.integers(1, 6, ranks)
        upper = lower + rng.integers(0, 9, ranks)
        total = int(rng.integers(lower.sum(), upper.sum() + 1))
        bounds = Bounds(tuple(lower.tolist()), tuple(upper.tolist()))
        models = [RankModel(random_line(rng), random_line(rng)) for _ in range(ranks)]
        exchange = float(rng.choice([0.0, rng.random() * 0.02])), float(rng.choice([0.0, 0.01]))
        expected = brute_force(models, total, bounds, granule, exchange)
        arguments = {"overlapped_seconds": exchange[0], "final_seconds": exchange[1]}
        if expected is None:
            infeasible += 1
            with pytest.raises(InfeasibleBatchError, match=f"global_batch_size={total}, granule="):
                solve(models, total, bounds=bounds, granule=granule, **arguments)
            continue
        found = solve(models, total, bounds=bounds, granule=granule, **arguments)
        assert found.step_seconds == pytest.approx(expected, rel=1e-12)
        assert found.step_seconds == pytest.approx(
            step_seconds(models, found.local_batches, *exchange), rel=1e-12
        )
        check_feasible(found.local_batches, total, bounds, granule)
    assert 50 < infeasible < 500  # both kinds were really tried


def check_feasible(split: tuple[int, ...], total: int, bounds: Bounds, granule: int = 1) -> None:
    assert sum(split) == total
    limits = zip(bounds.lower, split, bounds.upper, strict=True)
    assert all(low <= b <= high for low, b, high in limits)
    odd = [b % granule for b in split if b % granule]
    assert odd == ([total % granule] if total % granule else [])


lines = st.builds(
    Line,
    st.one_of(st.just(0.0), st.floats(1e-6, 1e-1)),
    st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
)
rank_models = st.builds(RankModel, lines, lines)


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[RankModel], int, Bounds, float]:
    models = draw(st.lists(rank_models, min_size=1, max_size=12))
    lower = [draw(st.integers(1, 20)) for _ in models]
    upper = [low + draw(st.integers(0, 200)) for low in lower]
    total = draw(st.integers(sum(lower), sum(upper)))
    return models, total, Bounds(tuple(lower), tuple(upper)), draw(st.floats(0.0, 1.0))


@settings(max_examples=150, deadline=None)
@given(instances())
def test_sums_to_the_batch_within_bounds_and_is_monotone(
    instance: tuple[list[RankModel], int, Bounds, float],
) -> None:
    models, total, bounds, overlapped = instance
    found = solve(models, total, bounds=bounds, overlapped_seconds=overlapped)
    check_feasible(found.local_batches, total, bounds)
    if total < sum(bounds.upper):
        more = solve(models, total + 1, bounds=bounds, overlapped_seconds=overlapped)
        assert more.step_seconds >= found.step_seconds


@settings(max_examples=100, deadline=None)
@given(instances(), st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(
    instance: tuple[list[RankModel], int, Bounds, float], random: object
) -> None:
    models, total, bounds, overlapped = instance
    order = list(range(len(models)))
    random.shuffle(order)  # type: ignore[attr-defined]
    found = solve(models, total, bounds=bounds, overlapped_seconds=overlapped)
    again = solve(
        [models[i] for i in order],
        total,
        bounds=Bounds(tuple(bounds.lower[i] for i in order), tuple(bounds.upper[i] for i in order)),
        overlapped_seconds=overlapped,
    )
    assert again.step_seconds == found.step_seconds


@settings(max_examples=100, deadline=None)
@given(instances())
def test_no_single_move_is_better(instance: tuple[list[RankModel], int, Bounds, float]) -> None:
    models, total, bounds, overlapped = instance
    found = solve(models, total, bounds=bounds, overlapped_seconds=overlapped)
    for giver, taker in itertools.permutations(range(len(models)), 2):
        moved = list(found.local_batches)
        moved[giver] -= 1
        moved[taker] += 1
        if moved[giver] >= bounds.lower[giver] and moved[taker] <= bounds.upper[taker]:
            assert step_seconds(models, moved, overlapped, 0.0) >= found.step_seconds


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-4, 1e-1), st.floats(0.0, 1.0), st.integers(1, 9), st.integers(0, 8), st.data())
def test_units_finished_by_a_time_invert_the_seconds_exactly(
    slope: float, intercept: float, granule: int, offset: int, data: st.DataObject
) -> None:
    """To the last bit, also at, just below and just above the values that are reached."""
    line = Line(slope, intercept)
    low, high = np.array([2]), np.array([400])
    units = RankUnits(
        RankLines([RankModel(line, line)], 0.0), granule, np.array([offset]), low, high
    )
    at = float(units.seconds(np.array([data.draw(st.integers(2, 400))]))[0])
    for seconds in (at, np.nextafter(at, 0.0), np.nextafter(at, 9e9)):
        found = units.finished(float(seconds))
        assert found == low - 1 or units.seconds(found) <= seconds
        assert found == high or units.seconds(found + 1) > seconds


def test_step_seconds_is_the_formula() -> None:
    models = [
        RankModel(Line(1.0, 2.0), Line(3.0, 4.0)),  # ready 3, done 7
        RankModel(Line(1.0, 0.0), Line(2.0, 0.0)),  # ready 2, done 4
    ]
    assert step_seconds(models, (1, 2), 0.5, 0.25) == 7.25
    assert step_seconds(models, (1, 2), 6.0, 0.25) == 9.25


def test_same_ranks_share_evenly_even_where_lines_are_flat() -> None:
    for line in (Line(0.0, 0.1), Line(1e-3, 0.1)):
        found = solve([RankModel(line, line)] * 4, 10, bounds=Bounds.build(4, 10))
        assert found.local_batches == (3, 3, 2, 2)
    same = RankModel(Line(1.0, 0.0), Line(1.0, 0.0))
    found = solve([same] * 3, 26, bounds=Bounds.build(3, 26), granule=4)
    assert sorted(found.local_batches) == [8, 8, 10]


def test_ranks_held_at_their_bounds_leave_the_others_balanced() -> None:
    slow, fast = (RankModel(Line(c, 0.0), Line(c, 0.0)) for c in (1.0, 0.01))
    found = solve([slow, fast, fast], 110, bounds=Bounds((10, 1, 1), (99, 99, 99)))
    assert found.local_batches == (10, 50, 50)
    assert found.step_seconds == 10.0


def test_bounds_that_leave_no_choice() -> None:
    """S42: min = max."""
    model = RankModel(Line(1e-3, 0.0), Line(2e-3, 0.0))
    assert solve([model] * 2, 16, bounds=Bounds((8, 8), (8, 8))).local_batches == (8, 8)
    assert solve([model], 8, bounds=Bounds((8,), (8,))).local_batches == (8,)


def test_infeasible_tells_the_numbers() -> None:
    model = RankModel(Line(1e-3, 0.0), Line(2e-3, 0.0))
    with pytest.raises(InfeasibleBatchError, match=r"global_batch_size=17: .* at most 16"):
        solve([model] * 2, 17, bounds=Bounds((1, 1), (8, 8)))
    with pytest.raises(InfeasibleBatchError, match="=14, granule=8: 1 granules and 6 samples"):
        solve([model] * 2, 14, bounds=Bounds((1, 1), (15, 15)), granule=8)
    with pytest.raises(ConfigurationError, match="1 rank models for 2 ranks"):
        solve([model], 14, bounds=Bounds((1, 1), (15, 15)))


def test_10000_ranks_in_milliseconds() -> None:
    """5 ms on an idle core; CPU time, and a bar with room, since machines are loaded."""
    rng = np.random.default_rng(0)
    models = [
        RankModel(Line(0.3 * c, 0.01), Line(c, 0.02)) for c in rng.random(10_000) * 1e-2 + 1e-4
    ]
    bounds = Bounds.build(10_000, 10**6, 1, 2_000)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        found = solve(models, 10**6, bounds=bounds, overlapped_seconds=0.01)
        seconds.append(time.process_time() - start)
    check_feasible(found.local_batches, 10**6, bounds)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("granule", [1, 7])
def test_one_look_decides_many_units_that_end_at_once(granule: int) -> None:
    """Many equal ranks, and flat lines over very many samples: still no split is better."""
    same = RankModel(Line(1e-3, 0.1), Line(2e-3, 0.1))
    found = solve([same] * 999, 64_000, bounds=Bounds.build(999, 64_000), granule=granule)
    check_feasible(found.local_batches, 64_000, Bounds.build(999, 64_000), granule)
    assert max(found.local_batches) - min(found.local_batches) <= granule
    flat = RankModel(Line(0.0, 0.1), Line(0.0, 0.2))
    models, bounds = [flat, same, flat], Bounds((1, 1, 1), (10**9,) * 3)
    found = solve(models, 10**9, bounds=bounds, granule=granule)
    check_feasible(found.local_batches, 10**9, bounds, granule)
    assert found.step_seconds == 0.2
    # So nearly flat that no time tells the samples.
    nearly = RankModel(Line(1e-310, 0.0), Line(1e-200, 0.2))
    found = solve([nearly, same, nearly], 10**9, bounds=bounds, granule=granule)
    check_feasible(found.local_batches, 10**9, bounds, granule)
    assert found.step_seconds == 0.2
