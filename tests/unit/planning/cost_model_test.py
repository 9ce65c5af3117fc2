"""Bytes and seconds of an exchange."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.cost_curve import CostCurve
from hvd_hetero.planning.cost_model import (
    COLLECTIVES,
    CollectiveCall,
    CostModel,
    LocalCosts,
    allgather_bytes,
    dense_bytes,
    shared_index_bytes,
    shared_value_bytes,
)

SECONDS = st.floats(0.0, 1e3)


@st.composite
def curves(draw: st.DrawFn) -> CostCurve:
    sizes = draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8, unique=True).map(sorted))
    times = draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes)))
    return CostCurve(tuple(sizes), tuple(times))


def ideal(ranks: int, alpha: float, beta: float) -> CostModel:
    """The formulas themselves, sampled at a few sizes."""
    sizes = (0, 1000, 10**6)
    depth = {2: 1, 4: 2, 5: 3, 8: 3, 64: 6, 4096: 12}[ranks]
    n = ranks
    return CostModel(
        n,
        CostCurve(sizes, tuple(2 * (n - 1) * alpha + 2 * (n - 1) / n * s * beta for s in sizes)),
        CostCurve(sizes, tuple((n - 1) * (alpha + s * beta) for s in sizes)),
        CostCurve(sizes, tuple(depth * (alpha + s * beta) for s in sizes)),
    )


def test_formulas() -> None:
    assert dense_bytes(4, 1000) == 6000.0
    assert dense_bytes(4, 1000, itemsize=2) == 3000.0
    assert dense_bytes(1, 1000) == 0.0
    assert allgather_bytes(4, 600) == 1800.0
    assert allgather_bytes(1, 600) == 0.0
    assert shared_index_bytes(4, 200, 100) == 200 + 600
    assert shared_index_bytes(4, 200, 100, itemsize=8) == 200 + 1200
    assert shared_index_bytes(1, 200, 100) == 0.0


def test_allgather_loses_to_dense_below_n_w_over_8() -> None:
    """w bytes a packed element: break-even at CF = n w / 8."""
    ranks, elements, width = 16, 10**6, 6
    for cf, wins in ((11, False), (13, True)):
        packed = width * round(elements / cf)
        assert (allgather_bytes(ranks, packed) < dense_bytes(ranks, elements)) is wins


@given(st.integers(2, 5000), st.integers(0, 10**6), st.integers(0, 10**6))
def test_shared_index_bytes_hardly_grow(ranks: int, index_bytes: int, k: int) -> None:
    """Never twice those of two ranks, where an allgather's grow with every rank."""
    two = shared_index_bytes(2, index_bytes, k)
    assert two <= shared_index_bytes(ranks, index_bytes, k) <= 2 * two


def test_bytes_of_shared_values() -> None:
    """Fixed point for float32 gradients on request, while sums over the ranks fit."""
    assert shared_value_bytes(4, 4, "float16") == 8 / 5
    assert shared_value_bytes(8, 4, "float16") == 8 / 6
    assert shared_value_bytes(4096, 4, "float16") == 8 / 3
    assert shared_value_bytes(20000, 4, "float16") == 4.0
    assert shared_value_bytes(8, 4, "float32") == 4.0
    assert shared_value_bytes(8, 8, "float16") == 8.0


@given(curves(), st.floats(0, 1e10), st.floats(0, 1e10))
def test_more_bytes_never_take_less_time(curve: CostCurve, a: float, b: float) -> None:
    low, high = sorted((curve.seconds_for(a), curve.seconds_for(b)))
    assert curve.seconds_for(min(a, b)) <= curve.seconds_for(max(a, b)) * (1 + 1e-9)
    assert 0.0 <= low <= high


@given(curves())
def test_goes_through_its_knots(curve: CostCurve) -> None:
    for size, seconds in zip(curve.bytes, curve.seconds, strict=True):
        assert curve.seconds_for(size) == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_between_below_and_beyond_the_knots() -> None:
    curve = CostCurve((100, 200, 400), (1.0, 2.0, 3.0))
    assert curve.seconds_for(0) == curve.seconds_for(100) == 1.0
    assert curve.seconds_for(150) == 1.5
    assert curve.seconds_for(300) == 2.5
    assert curve.seconds_for(800) == 5.0  # the last slope goes on
    assert CostCurve((100,), (1.0,)).seconds_for(10**9) == 1.0


def test_a_larger_message_measured_faster_is_noise() -> None:
    assert CostCurve((1, 2, 3), (2.0, 1.0, 4.0)).seconds == (2.0, 2.0, 4.0)


def test_seconds_of_the_strategies() -> None:
    model = ideal(4, alpha=1e-3, beta=1e-8)
    allreduce, allgather, broadcast = (
        CollectiveCall("allreduce", 4 * 10**5),
        CollectiveCall("allgather", 5000),
        CollectiveCall("broadcast", 2000),
    )
    assert model.seconds([allreduce]) == pytest.approx(6e-3 + 6e5 * 1e-8)
    assert model.seconds([allgather]) == pytest.approx(3e-3 + 15000e-8)
    assert model.seconds([broadcast, allreduce]) == pytest.approx(
        2 * (1e-3 + 2000e-8) + 6e-3 + 6e5 * 1e-8
    )


@pytest.mark.parametrize("measured", [2, 4, 5, 8])
@pytest.mark.parametrize("wanted", [2, 4, 5, 8, 64, 4096])
def test_other_ranks_follow_the_formulas(measured: int, wanted: int) -> None:
    alpha, beta = 2e-4, 4e-8
    continued = ideal(measured, alpha, beta).at_ranks(wanted)
    expected = ideal(wanted, alpha, beta)
    assert continued.ranks == wanted
    for kind in COLLECTIVES:
        assert getattr(continued, kind).seconds == pytest.approx(getattr(expected, kind).seconds)


def test_one_rank() -> None:
    assert ideal(4, 1e-3, 1e-8).at_ranks(1).seconds([CollectiveCall("allreduce", 10**9)]) == 0.0
    assert CostModel.free().at_ranks(1) == CostModel.free()
    with pytest.raises(ConfigurationError, match="one rank says nothing"):
        CostModel.free().at_ranks(2)


def test_steps_refine_the_collectives_they_used() -> None:
    model = ideal(4, 1e-3, 1e-8)
    calls = (CollectiveCall("broadcast", 10**5), CollectiveCall("allreduce", 10**6))
    refined = model.refined(calls, 3.0 * model.seconds(calls))
    assert refined.seconds(calls) == pytest.approx(3.0 * model.seconds(calls))
    for call in calls:
        assert refined.seconds([call]) == pytest.approx(3.0 * model.seconds([call]))
    assert refined.allgather == model.allgather
    assert CostModel.free(4).refined(calls, 1.0) == CostModel.free(4)
    with pytest.raises(ConfigurationError, match="seconds"):
        model.refined(calls, -1.0)


def test_calls_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="kind='gossip'"):
        CollectiveCall("gossip", 1)
    with pytest.raises(ConfigurationError, match="bytes"):
        CollectiveCall("allreduce", -1)


@given(st.integers(1, 5000), curves(), curves(), curves())
def test_saved_model(ranks: int, one: CostCurve, two: CostCurve, three: CostCurve) -> None:
    model = CostModel(ranks, one, two, three)
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_local_costs() -> None:
    costs = LocalCosts(1e-9, 1e-8, 2e-8, 3e-10)
    assert costs.compress_seconds(1000, 10) == pytest.approx(1e-6 + 1e-7)
    assert costs.decode_seconds(1000, 80) == pytest.approx(3e-7 + 16e-7)
    assert LocalCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_malformed() -> None:
    with pytest.raises(ConfigurationError, match="ranks=0"):
        dense_bytes(0, 1)
    with pytest.raises(ConfigurationError, match="packed_bytes=-1"):
        allgather_bytes(2, -1)
    with pytest.raises(ConfigurationError, match="index_bytes=-1"):
        shared_index_bytes(2, -1, 5)
    with pytest.raises(ConfigurationError, match="2 sizes and 1 times"):
        CostCurve((1, 2), (1.0,))
    with pytest.raises(ConfigurationError, match="must ascend"):
        CostCurve((2, 2), (1.0, 1.0))
    with pytest.raises(ConfigurationError, match=r"seconds=nan"):
        CostCurve((1,), (float("nan"),))
    with pytest.raises(ConfigurationError, match="not a saved cost model"):
        CostModel.from_dict({"ranks": 2})
    with pytest.raises(ConfigurationError, match="not saved local costs"):
        LocalCosts.from_dict({})
    with pytest.raises(ConfigurationError, match="decode_seconds_per_entry=-1"):
        LocalCosts(0.0, 0.0, -1.0, 0.0)
