"""Laws of Bounds and apportion."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.optperf import Bounds, apportion
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int]]:
    ranks = draw(st.integers(1, 8))
    lower = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    room = draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks))
    upper = [low + more for low, more in zip(lower, room, strict=True)]
    share = st.one_of(st.integers(0, 5), st.integers(0, 10**12))
    shares = draw(st.lists(share, min_size=ranks, max_size=ranks))
    return draw(st.integers(sum(lower), sum(upper))), shares, lower, upper


@settings(max_examples=300, deadline=None)
@given(cases())
def test_apportion_is_the_clamped_ideal_rounded(
    case: tuple[int, list[int], list[int], list[int]],
) -> None:
    """Some lambda explains every result to less than one sample, in exact arithmetic."""
    total, shares, lower, upper = case
    result = apportion(total, shares, lower, upper)
    assert sum(result) == total
    assert all(a <= x <= b for a, x, b in zip(lower, result, upper, strict=True))
    least, most = Fraction(-1), None  # the lambdas in question: least < lambda < most
    for x, share, low, high in zip(result, shares, lower, upper, strict=True):
        if not share:
            continue
        if x > low:  # the ideal is above x - 1
            least = max(least, Fraction(x - 1, share))
        if x < high:  # the ideal is below x + 1
            most = Fraction(x + 1, share) if most is None else min(most, Fraction(x + 1, share))
    assert most is None or least < most


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(0, 500), st.integers(1, 9))
def test_equal_shares_differ_by_at_most_one_first_ranks_get_more(
    ranks: int, total: int, share: int
) -> None:
    result = apportion(total, [share] * ranks, [0] * ranks, [500] * ranks)
    assert max(result) - min(result) <= 1
    assert list(result) == sorted(result, reverse=True)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 10**9))
def test_apportion_depends_only_on_the_ratio_of_shares(
    case: tuple[int, list[int], list[int], list[int]], factor: int
) -> None:
    total, shares, lower, upper = case
    assert apportion(total, shares, lower, upper) == apportion(
        total, [share * factor for share in shares], lower, upper
    )


def test_apportion_examples() -> None:
    assert apportion(13, [4, 1], [1, 1], [13, 13]) == (10, 3)
    assert apportion(9, [4, 2, 2, 1], [1] * 4, [9] * 4) == (4, 2, 2, 1)
    assert apportion(10, [9, 1], [1, 4], [10, 10]) == (6, 4)
    assert apportion(10, [9, 1], [1, 1], [5, 10]) == (5, 5)
    assert apportion(30, [0, 0, 5], [1, 1, 1], [20, 20, 4]) == (13, 13, 4)
    assert apportion(0, [1, 1], [0, 0], [5, 5]) == (0, 0)
    # Floats could not tell these two shares apart.
    assert apportion(1, [10**17, 10**17 + 1], [0, 0], [1, 1]) == (0, 1)


@pytest.mark.parametrize("total", [3, 21])
def test_apportion_out_of_reach_tells_the_numbers(total: int) -> None:
    with pytest.raises(InfeasibleBatchError, match=rf"total={total}: .*at least 4 and at most 20"):
        apportion(total, [1, 1], [2, 2], [10, 10])


def test_bounds_build() -> None:
    assert Bounds.build(2, 10) == Bounds((1, 1), (10, 10))
    assert Bounds.build(2, 10, 2, [6, 8]) == Bounds((2, 2), (6, 8))
    assert Bounds.build(1, 8, 8, 8) == Bounds((8,), (8,))


def test_the_default_minimum() -> None:
    """S39: two samples, where the numbers allow it."""
    assert Bounds.build(2, 32, None) == Bounds((2, 2), (32, 32), (1, 1))
    assert Bounds.build(2, 32, None, [1, 31]) == Bounds((1, 2), (1, 31), (1, 1))
    assert Bounds.build(2, 3, None) == Bounds((1, 1), (3, 3))
    assert Bounds.build(1, 32, None) == Bounds((1,), (32,))
    with pytest.raises(ConfigurationError, match="floor="):
        Bounds((1, 1), (8, 8), (2, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 3), "global_batch_size=3: the 4 ranks take at least 4"),
        ((2, 30, 1, 8), "at most 16"),
        ((2, 9, [5, 5]), "at least 10"),
    ],
)
def test_bounds_infeasible(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InfeasibleBatchError, match=message):
        Bounds.build(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 8, 0), "min_local_batch=0"),
        ((2, 8, [1, 1, 1]), "3 numbers for 2 ranks"),
        ((2, 8, 3, 2), "minimum local batch 3 is above its maximum 2"),
        ((0, 8), "ranks=0"),
        ((2, 8, 1.5), "min_local_batch=1.5"),
    ],
)
def test_bounds_malformed(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Bounds.build(*arguments)
