"""What training steps tell the cost model: laws, with a network whose costs are known."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.planning.cost_curve import CostCurve
from hvd_hetero.planning.cost_model import CostModel
from hvd_hetero.planning.refine import ExchangeTiming, refined_by_steps
from hvd_hetero.planning.step_time import STRATEGIES, collective_calls

BUCKETS = [(1_000_000, torch.float32), (200_000, torch.float32)]


def network(slower: float = 1.0) -> CostModel:
    line = CostCurve((1e3, 1e7), (slower * 1e-3, slower * 1.0))
    return CostModel(3, line, line, line)


def seconds_in(model: CostModel, bucket: int, strategy: str, entries: int) -> float:
    elements, dtype = BUCKETS[bucket]
    return model.seconds(collective_calls(strategy, 3, entries, elements, dtype, "float16"))


@given(
    strategy=st.sampled_from(STRATEGIES),
    slower=st.floats(0.2, 5.0),
    late=st.lists(st.tuples(*[st.floats(0.0, 1.0)] * 3), min_size=3, max_size=6),
)
def test_waiting_for_a_late_rank_does_not_count(
    strategy: str, slower: float, late: list[tuple[float, float, float]]
) -> None:
    """Whoever is late, and however late: the last one to launch has seen the exchange alone."""
    entries = 0 if strategy == "dense" else 10_000
    truth = seconds_in(network(slower), 0, strategy, entries)
    timings: list[list[ExchangeTiming]] = [[], [], []]
    for step, launches in enumerate(late):
        for rank, launch in enumerate(launches):
            seconds = truth + max(launches) - launch
            timings[rank].append(ExchangeTiming(step, ((0, strategy, entries),), seconds))
    refined = refined_by_steps(network(), timings, BUCKETS, "float16")
    assert seconds_in(refined, 0, strategy, entries) == pytest.approx(truth)


def test_only_what_all_ranks_have_seen_counts() -> None:
    first = [ExchangeTiming(step, ((0, "dense", 0),), 2.0) for step in range(3)]
    seen = [*first, *(ExchangeTiming(step, ((1, "dense", 0),), 2.0) for step in range(3, 6))]
    for timings in ([seen, first, []], [seen, [], seen], [seen, first[:2], seen], [], [[], [], []]):
        assert refined_by_steps(network(), timings, BUCKETS, "float16") == network()
    refined = refined_by_steps(network(), [seen, first, seen], BUCKETS, "float16")
    assert seconds_in(refined, 0, "dense", 0) == pytest.approx(2.0)


def test_a_bucket_that_is_gone_is_left_out() -> None:
    gone = [[ExchangeTiming(1, ((0, "dense", 0), (7, "dense", 0)), 2.0)]] * 3
    assert refined_by_steps(network(), gone, BUCKETS, "float16") == network()


def test_timings_travel() -> None:
    one = ExchangeTiming(3, ((1, "allgather", 10), (2, "dense", 0)), 0.25)
    assert ExchangeTiming.from_list(json.loads(json.dumps(one.to_list()))) == one


def test_what_ended_as_one_is_corrected_as_one() -> None:
    """A small bucket that was fused with a large one has not taken as long as that."""
    both = ((0, "dense", 0), (1, "dense", 0))
    before = [seconds_in(network(), bucket, "dense", 0) for bucket in (0, 1)]
    timings = [ExchangeTiming(step, both, 0.5 * sum(before)) for step in range(3)]
    refined = refined_by_steps(network(), [timings] * 3, BUCKETS, "float16")
    after = [seconds_in(refined, bucket, "dense", 0) for bucket in (0, 1)]
    assert after == pytest.approx([0.5 * one for one in before])
