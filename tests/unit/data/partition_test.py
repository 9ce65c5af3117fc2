from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.data.partition import (
    LocalBatch,
    check_feasible,
    count_batches,
    epoch_order,
    evaluation_share,
    local_batch,
    local_sizes,
    next_global_batch,
)
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError
from hvd_hetero.planning.plan import Plan


def at_least(min_total: int) -> Bounds:
    """Bounds of one rank without a maximum."""
    return Bounds((min_total,), (10**6,))


def cut(dataset_samples: int, size: int, bounds: Bounds | int, drop_last: bool) -> list[int]:
    """The global batches of an epoch, drawn one by one."""
    bounds = at_least(bounds) if isinstance(bounds, int) else bounds
    batches = []
    while samples := next_global_batch(dataset_samples - sum(batches), size, bounds, drop_last):
        batches.append(samples)
    return batches


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int]:
    """(dataset_samples, global_batch_size, min_total) with min_total the smallest of the three."""
    size = draw(st.integers(1, 40))
    min_total = draw(st.integers(1, size))
    return draw(st.integers(min_total, 200)), size, min_total


@settings(max_examples=300, deadline=None)
@given(epochs())
def test_all_samples_are_used_and_no_batch_is_too_small(epoch: tuple[int, int, int]) -> None:
    samples, size, min_total = epoch
    batches = cut(samples, size, min_total, drop_last=False)
    assert sum(batches) == samples
    assert min(batches) >= min_total
    assert max(batches) < size + min_total
    assert len(batches) == count_batches(samples, size, at_least(min_total), False)
    # Only the last two batches may differ from a full one.
    assert set(batches[:-2]) <= {size}


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_a_batch_larger_than_asked_for_is_the_last_resort(epoch: tuple[int, int, int]) -> None:
    samples, size, min_total = epoch
    batches = cut(samples, size, min_total, drop_last=False)
    if max(batches) > size:
        assert batches[-1] == max(batches)
        assert batches[-1] // 2 < min_total
    elif len(batches) > 1 and batches[-2] < size:
        assert batches[-2] - batches[-1] in (0, 1)
        assert (batches[-2] + batches[-1]) % size < min_total


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_drop_last_leaves_full_batches_only(epoch: tuple[int, int, int]) -> None:
    samples, size, min_total = epoch
    batches = cut(samples, size, min_total, drop_last=True)
    assert batches == [size] * (samples // size)
    assert len(batches) == count_batches(samples, size, at_least(min_total), True)


@pytest.mark.parametrize(
    ("samples", "size", "min_total", "expected"),
    [
        (13, 5, 2, [5, 5, 3]),
        (11, 5, 2, [5, 3, 3]),  # one left is too few: 6 split evenly
        (12, 5, 3, [5, 4, 3]),
        (11, 5, 4, [5, 6]),  # 3 and 3 would be too few: all in one
        (10, 5, 4, [5, 5]),
        (3, 5, 2, [3]),
    ],
)
def test_the_tail(samples: int, size: int, min_total: int, expected: list[int]) -> None:
    assert cut(samples, size, min_total, drop_last=False) == expected


def test_too_few_samples_left_is_an_error_with_the_numbers() -> None:
    with pytest.raises(InfeasibleBatchError, match=r"3 samples.*need 4.*drop_last"):
        next_global_batch(3, 5, at_least(4), drop_last=False)


@settings(max_examples=300, deadline=None)
@given(epochs(), st.integers(1, 4), st.booleans(), st.data())
def test_what_is_feasible_can_be_cut_within_the_bounds(
    epoch: tuple[int, int, int], ranks: int, drop_last: bool, data: st.DataObject
) -> None:
    samples, size, _ = epoch
    size = max(size, ranks)
    minimum = data.draw(st.integers(1, size // ranks))
    maximum = data.draw(st.integers(-(-size // ranks), size))
    bounds = Bounds.build(ranks, size, minimum, maximum)
    try:
        check_feasible(samples, size, bounds, drop_last)
    except InfeasibleBatchError:
        batches = (
            [] if samples < minimum * ranks else cut(samples, size, minimum * ranks, drop_last)
        )
        assert not batches or max(batches) > maximum * ranks
        return
    batches = cut(samples, size, minimum * ranks, drop_last)
    assert batches
    plan = Plan(0, local_sizes(Plan(0, (1,) * ranks, "even"), bounds, size), "even")
    for batch in batches:
        sizes = local_sizes(plan, bounds, batch)
        assert sum(sizes) == batch
        assert all(minimum <= each <= maximum for each in sizes)


@settings(max_examples=300, deadline=None)
@given(epochs(), st.integers(1, 4), st.booleans(), st.data())
def test_the_default_minimum_refuses_nothing_that_one_sample_allows(
    epoch: tuple[int, int, int], ranks: int, drop_last: bool, data: st.DataObject
) -> None:
    """S39: two samples for every rank where the numbers allow it, and never an error for them."""
    samples, size, _ = epoch
    size = max(size, ranks)
    maximum = data.draw(st.none() | st.integers(-(-size // ranks), size))
    one, default = (Bounds.build(ranks, size, least, maximum) for least in (1, None))
    try:
        check_feasible(samples, size, one, drop_last)
    except InfeasibleBatchError:
        with pytest.raises(InfeasibleBatchError):
            check_feasible(samples, size, default, drop_last)
        return
    check_feasible(samples, size, default, drop_last)
    batches = cut(samples, size, default, drop_last)
    assert len(batches) == count_batches(samples, size, default, drop_last)
    assert sum(batches) == (samples - samples % size if drop_last else samples)
    even = Plan(0, local_sizes(Plan(0, (1,) * ranks, "even"), default, size), "even")
    for batch in batches:
        sizes = local_sizes(even, default, batch)
        assert sum(sizes) == batch
        assert all(1 <= each <= (maximum or batch) for each in sizes)
        assert min(sizes) >= default.lower[0] or batch < sum(default.lower)
    if maximum is None and samples >= sum(default.lower):
        assert min(batches) >= sum(default.lower)


@pytest.mark.parametrize(
    ("samples", "maximum", "expected"),
    [
        (19, 8, [8, 6, 5]),  # 3 are too few for two each: split evenly with the batch before
        (3, 8, [3]),  # a data set that small
        (11, 4, [6, 5]),
    ],
)
def test_a_tail_with_the_default_minimum(samples: int, maximum: int, expected: list[int]) -> None:
    bounds = Bounds.build(2, 8, None, maximum)
    assert cut(samples, 8, bounds, drop_last=False) == expected


def test_a_tail_for_which_there_is_no_room() -> None:
    """7 = 4 + 3: in halves or in one it would be too few or too many; so ranks get one sample."""
    bounds = Bounds.build(2, 4, None, 2)
    assert cut(7, 4, bounds, drop_last=False) == [4, 3]
    assert cut(5, 4, bounds, drop_last=False) == [3, 2]
    assert cut(7, 4, Bounds.build(2, 4, None), drop_last=False) == [7]


def test_an_explicit_minimum_is_kept_or_refused() -> None:
    with pytest.raises(InfeasibleBatchError, match="3 samples"):
        check_feasible(3, 8, Bounds.build(2, 8, 2), drop_last=False)
    with pytest.raises(InfeasibleBatchError, match="3 samples are left"):
        next_global_batch(3, 8, Bounds.build(2, 8, 2), drop_last=False)
    assert next_global_batch(3, 8, Bounds.build(2, 8, None), drop_last=False) == 3
    with pytest.raises(InfeasibleBatchError, match="1 samples are left"):
        next_global_batch(1, 8, Bounds.build(2, 8, None), drop_last=False)


@pytest.mark.parametrize(
    ("samples", "drop_last", "bounds", "words"),
    [
        (3, False, Bounds((1,) * 4, (9,) * 4), ["3 samples", "4 ranks", "at least 4"]),
        (7, True, Bounds((1, 1), (8, 8)), ["drop_last=True", "7 samples", "global_batch_size=8"]),
        (17, False, Bounds((4, 4), (4, 4)), ["last 1 of 17", "17", "need", "drop_last=True", "9"]),
    ],
)
def test_infeasible_epochs_are_refused_with_numbers_and_remedies(
    samples: int, drop_last: bool, bounds: Bounds, words: list[str]
) -> None:
    with pytest.raises(InfeasibleBatchError) as error:
        check_feasible(samples, 8, bounds, drop_last)
    for word in words[:-1]:
        assert word in str(error.value)
    assert isinstance(error.value, ConfigurationError)


def test_a_joined_last_batch_within_the_bounds_is_accepted() -> None:
    check_feasible(17, 8, Bounds((4, 4), (5, 5)), drop_last=False)
    assert cut(17, 8, 8, drop_last=False) == [8, 9]


def test_a_full_batch_follows_the_plan_and_a_short_one_its_shares() -> None:
    plan, bounds = Plan(3, (6, 3, 1), "made up"), Bounds.build(3, 10)
    assert local_sizes(plan, bounds, 10) == (6, 3, 1)
    assert local_sizes(plan, bounds, 3) == (1, 1, 1)
    assert local_sizes(plan, bounds, 20) == (10, 8, 2)  # rank 0 at its upper bound


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 50), st.integers(0, 30))
def test_the_ranks_pieces_lie_side_by_side(sizes: list[int], start: int, less: int) -> None:
    plan = Plan(0, tuple(sizes), "made up")
    samples = max(len(sizes), sum(sizes) - less)
    bounds = Bounds.build(len(sizes), samples)
    pieces = [
        local_batch(plan, bounds, r, epoch_pass=1, step=2, start=start, global_samples=samples)
        for r in range(len(sizes))
    ]
    assert pieces[0].start == start
    assert pieces[-1].stop == start + samples
    assert all(left.stop == right.start for left, right in pairwise(pieces))
    assert all(p.samples >= 1 and p.global_samples == samples for p in pieces)
    assert all((p.epoch_pass, p.step) == (1, 2) for p in pieces)


@pytest.mark.parametrize("values", [(0, 0, 3, 3, 8), (0, 0, 0, 9, 8), (-1, 0, 0, 1, 8)])
def test_an_impossible_local_batch_is_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        LocalBatch(*values)


def test_orders_differ_by_seed_and_epoch_and_repeat() -> None:
    orders = {
        (seed, epoch): tuple(epoch_order(50, seed, epoch, True).tolist())  # type: ignore[union-attr]
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert tuple(epoch_order(50, 2, 1, True).tolist()) == orders[2, 1]  # type: ignore[union-attr]


def test_no_shuffle_is_the_data_sets_own_order() -> None:
    assert list(epoch_order(5, 7, 3, False)) == [0, 1, 2, 3, 4]


def test_the_scripts_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = epoch_order(20, 0, 0, True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(torch.as_tensor(epoch_order(20, 0, 0, True)), torch.as_tensor(first))


@given(st.integers(0, 500), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_every_sample_is_evaluated_once(samples: int, shares: list[int]) -> None:
    """S44: nothing is repeated to make parts equal, and fast ranks take more."""
    parts = [evaluation_share(samples, shares, rank) for rank in range(len(shares))]
    assert [index for part in parts for index in part] == list(range(samples))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - samples * share / sum(shares)) < 1.0
