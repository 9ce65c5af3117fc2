from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.data.order import SamplerOrder, checksum
from hvd_hetero.data.sampler import HeteroBatchSampler, Place
from hvd_hetero.data.schedule import PlanSchedule
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError
from hvd_hetero.planning.plan import Plan


class Given:
    """Gives what it was told to, and announces ``length``."""

    def __init__(self, numbers: Callable[[], Any], length: int) -> None:
        self.numbers, self.length = numbers, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers())


RANDOM: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: RandomSampler(range(40)),
    "with replacement": lambda: RandomSampler(range(40), replacement=True, num_samples=90),
    "weighted": lambda: WeightedRandomSampler([1.0] * 40, 53),
    "subset": lambda: SubsetRandomSampler(range(5, 30)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_an_order_follows_from_seed_and_epoch_alone(name: str) -> None:
    make = RANDOM[name]
    orders = {}
    for seed, epoch in itertools.product(range(2), range(2)):
        torch.manual_seed(7 * seed + epoch)
        before = torch.get_rng_state()
        order = SamplerOrder(make(), 40, seed).draw(epoch)
        assert torch.equal(torch.get_rng_state(), before)
        assert order.dtype == torch.int64 and len(order) == len(make())
        torch.manual_seed(1000)
        assert torch.equal(SamplerOrder(make(), 40, seed).draw(epoch), order)
        orders[checksum(order)] = order
    assert len(orders) == 4
    assert len(set(tuple(order.tolist()) for order in orders.values())) == 4


def test_indices_may_be_numbers_of_any_kind() -> None:
    for kind in (int, np.int32, torch.tensor):
        drawn = SamplerOrder(Given(lambda: [kind(3), kind(0)], 2), 4, 0).draw(0)  # noqa: B023
        assert drawn.tolist() == [3, 0]


def test_the_sampler_is_told_the_epoch() -> None:
    sampler = Given(lambda: [sampler.epoch], 1)
    sampler.set_epoch = lambda epoch: setattr(sampler, "epoch", epoch)  # type: ignore[attr-defined]
    order = SamplerOrder(sampler, 40, 0)
    assert [order.draw(epoch).tolist() for epoch in (5, 2)] == [[5], [2]]


@pytest.mark.parametrize(
    ("numbers", "length", "words"),
    [
        (lambda: range(4), 5, ["gave 4 indices in epoch 2", "length was 5"]),
        (lambda: itertools.cycle([0]), 5, ["more than 5"]),
        (lambda: [0, 1.0], 2, ["1.0", "whole numbers"]),
        (lambda: [0, "1"], 2, ["'1'"]),
        (lambda: [True], 1, ["True"]),
        (lambda: [None], 1, ["None"]),
        (lambda: [[0, 1], [2, 3]], 2, ["[0, 1]", "sampler of batches"]),
        (lambda: BatchSampler(range(6), 2, False), 3, ["[0, 1]", "sampler of batches"]),
        (lambda: [0, 9], 2, ["index 9", "8 samples"]),
        (lambda: [-1], 1, ["index -1"]),
    ],
)
def test_what_is_no_order_is_refused(numbers: Any, length: int, words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="sampler=Given") as caught:
        SamplerOrder(Given(numbers, length), 8, 0).draw(2)
    assert all(word in str(caught.value) for word in words), caught.value


class Lengthless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Replicas:
    num_replicas = 2

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("sampler", "word"),
    [
        (Lengthless(), "__len__"),
        (iter([1]), "__len__"),
        (5, "__len__"),
        (DistributedSampler(range(8), num_replicas=2, rank=0), "already divides"),  # type: ignore[arg-type]
        (Replicas(), "already divides"),
    ],
)
def test_what_is_no_sampler_is_refused(sampler: Any, word: str) -> None:
    with pytest.raises(ConfigurationError, match="sampler=") as caught:
        SamplerOrder(sampler, 8, 0)
    assert word in str(caught.value)


def batch_sampler(sampler: Any, rank: int = 0, **options: Any) -> HeteroBatchSampler:
    schedule = PlanSchedule(Plan(0, (5, 3), "made up"))
    order = SamplerOrder(sampler, 40, 0)
    return HeteroBatchSampler(40, schedule, Bounds.build(2, 8, None), rank, order=order, **options)


def test_the_ranks_pieces_of_an_order() -> None:
    """The epoch is as long as the sampler, whatever the size of the data set."""
    for length, drop_last in ((53, False), (53, True), (9, False), (3, False)):
        make = lambda n=length: WeightedRandomSampler([1.0] * 40, n)  # noqa: E731
        pieces = [list(batch_sampler(make(), rank, drop_last=drop_last)) for rank in range(2)]
        joined = [a + b for a, b in zip(*pieces, strict=True)]
        order = SamplerOrder(make(), 40, 0).draw(0).tolist()
        assert list(itertools.chain(*joined)) == order[: 48 if drop_last else length]
        assert len(joined) == len(batch_sampler(make(), drop_last=drop_last))
    with pytest.raises(InfeasibleBatchError, match="1 samples"):
        batch_sampler([0])


def test_a_sampler_and_shuffle_are_two_orders() -> None:
    with pytest.raises(ConfigurationError, match=r"shuffle=True.*sampler=list"):
        batch_sampler([0, 1], shuffle=True)


def test_an_epoch_goes_on_in_the_same_order() -> None:
    def make() -> Any:
        return WeightedRandomSampler([1.0] * 40, 53)

    sampler = batch_sampler(make())
    sampler.set_epoch(3)
    whole = list(sampler)
    assert sampler.drawn_order is not None
    later = batch_sampler(make())
    later.resume(Place(3, 16, order_checksum=sampler.drawn_order[2]))
    later.set_epoch(3)
    assert list(later) == whole[2:]
    other = batch_sampler(make())
    other.resume(Place(3, 16, order_checksum=sampler.drawn_order[2] ^ 1))
    other.set_epoch(3)
    with pytest.raises(ConfigurationError, match="another order of epoch 3"):
        next(iter(other))
    other = batch_sampler(make())
    other.resume(Place(3, 16, order_checksum=sampler.drawn_order[2] ^ 1))
    other.set_epoch(4)
    assert len(list(other)) == len(whole)  # of another epoch nothing was used
    with pytest.raises(ConfigurationError, match="used_samples=54"):
        batch_sampler(make()).resume(Place(3, 54))


def test_the_order_is_drawn_with_the_first_batch_of_a_pass() -> None:
    """torch calls iter() twice where it has workers: an order must not be drawn for nothing."""
    drawn = []
    sampler = batch_sampler(Given(lambda: drawn.append(0) or range(8), 8))
    with sampler.opened_pass(deque()):
        first, second = iter(sampler), iter(sampler)
    assert not drawn
    next(second)
    assert len(drawn) == 1
    del first
