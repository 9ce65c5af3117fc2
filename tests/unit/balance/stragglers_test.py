"""Who is slow, and in what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.lines import TimingPoint
from hvd_hetero.balance.stragglers import PARTS, SlowRank, slow_ranks


def point(
    batch: int, *, input: float = 0.01, forward: float = 0.1, backward: float = 0.2
) -> TimingPoint:
    done = input + forward + backward
    return TimingPoint(
        batch, done / 2, done, 0.0, 10, input_seconds=input, backward_seconds=backward
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_slow_part_is_named(part: str, ranks: int) -> None:
    """A16: a rank slow in its loader, in forward or in backward is named as such."""
    points = [point(8) for _ in range(ranks)]
    points[1] = point(8, **{part: 0.4})  # type: ignore[arg-type]
    (slow,) = slow_ranks(points)
    assert (slow.rank, slow.part) == (1, part)
    assert slow.ratio == pytest.approx(points[1].done_seconds / points[0].done_seconds)
    assert f"rank 1 is slow in its {part}" in str(slow)


@given(
    st.integers(1, 64),
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
    st.floats(0.6, 1.0),
)
@settings(max_examples=100, deadline=None)
def test_more_to_do_is_not_slow(first: int, others: list[int], grows: float) -> None:
    """Equal ranks with unequal batches, most of whose seconds grow with the batch."""
    sizes = [first, *(min(max(size, first // 2), 2 * first) for size in others)]

    def equal(batch: int) -> TimingPoint:
        scale = grows * batch / first + 1.0 - grows
        return point(batch, input=0.0, forward=0.1 * scale, backward=0.2 * scale)

    assert slow_ranks([equal(max(size, 1)) for size in sizes]) == ()


def test_the_slowest_comes_first_and_unknown_ranks_are_skipped() -> None:
    points = [point(8), None, point(8, backward=0.6), point(8), point(8, forward=2.0), point(8)]
    assert [(slow.rank, slow.part) for slow in slow_ranks(points)] == [
        (4, "forward"),
        (2, "backward"),
    ]
    assert slow_ranks([None, point(8, input=9.0), None]) == ()
    assert slow_ranks([]) == ()
    assert SlowRank(1, 2.0, "input") == SlowRank(1, 2.0, "input")
