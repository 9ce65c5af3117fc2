"""Laws of the refinement of cost curves; their lines are tested with the cost model."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.cost_curve import CostCurve

LINE = CostCurve((1e3, 1e6), (1e-3, 11e-3))
SIZES = st.floats(1.0, 1e9)
FACTORS = st.floats(0.1, 10.0)


@given(SIZES, FACTORS)
def test_what_was_seen_is_predicted(size: float, factor: float) -> None:
    seen = factor * LINE.seconds_for(size)
    refined = LINE.refined(size, seen)
    assert refined.seconds_for(size) == pytest.approx(seen)
    assert LINE.corrections == ()


@given(SIZES, FACTORS, SIZES)
def test_a_correction_fades_with_the_distance_in_size(
    size: float, factor: float, other: float
) -> None:
    refined = LINE.refined(size, factor * LINE.seconds_for(size))
    applied = refined.seconds_for(other) / LINE.seconds_for(other)
    assert min(1.0, factor) - 1e-9 <= applied <= max(1.0, factor) + 1e-9
    dear = LINE.seconds_for(size) > 2 * LINE.seconds_for(0)  # bytes take more than latency
    if other <= size / 32 or (other >= size * 32 and not dear):
        assert applied == pytest.approx(1.0)
    if other >= size and dear:
        assert applied == pytest.approx(factor)


@given(st.lists(st.tuples(SIZES, FACTORS), min_size=1, max_size=8))
def test_a_new_size_counts_fully_and_a_known_one_half(seen: list[tuple[float, float]]) -> None:
    curve = LINE
    for size, factor in seen:
        near = [
            math.log(known)
            for other, known in curve.corrections
            if max(other, size) <= 1.25 * min(other, size)
        ]
        curve = curve.refined(size, factor * LINE.seconds_for(size))
        expected = math.log(factor)
        if near:
            expected = (expected + sum(near) / len(near)) / 2
        assert math.log(dict(curve.corrections)[size]) == pytest.approx(expected, abs=1e-9)
    sizes = [size for size, _ in curve.corrections]
    assert sizes == sorted(sizes) and len(sizes) <= len(seen)
    assert CostCurve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


def test_the_same_size_again_meets_half_way() -> None:
    once = LINE.refined(1e5, 4.0 * LINE.seconds_for(1e5))
    twice = once.refined(1.1e5, 1.0 * LINE.seconds_for(1.1e5))
    assert twice.corrections == ((1.1e5, pytest.approx(2.0)),)


@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=6))
def test_no_single_knot_makes_bytes_free_or_dear(seconds: list[float]) -> None:
    sizes = [10.0 ** (3 + index) for index in range(len(seconds))]
    curve = CostCurve(tuple(sizes), tuple(seconds))
    first, last = curve.seconds[0], curve.seconds[-1]
    per_byte = (last - first) / (sizes[-1] - sizes[0])
    more = curve.seconds_for(3 * sizes[-1]) - last
    tiny = 1e-9
    assert 0.5 * per_byte * 2 * sizes[-1] - tiny <= more <= 2 * per_byte * 2 * sizes[-1] + tiny


def test_nonsense_is_bounded_and_refused() -> None:
    assert LINE.refined(1e4, 1e6).seconds_for(1e4) == pytest.approx(64 * LINE.seconds_for(1e4))
    assert LINE.refined(1e4, 0.0) == LINE
    with pytest.raises(ConfigurationError, match="seconds"):
        LINE.refined(1e4, math.nan)
    with pytest.raises(ConfigurationError, match="ascend"):
        CostCurve((1.0,), (1.0,), ((2.0, 1.0), (2.0, 1.0)))
    with pytest.raises(ConfigurationError, match="correction"):
        CostCurve((1.0,), (1.0,), ((2.0, 0.0),))
