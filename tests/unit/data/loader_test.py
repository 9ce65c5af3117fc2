from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.data.loader import HeteroBatchSampler, HeteroDataLoader, dataset_length
from hvd_hetero.data.partition import LocalBatch
from hvd_hetero.data.sampler import Place
from hvd_hetero.data.schedule import PlanSchedule
from hvd_hetero.errors import BatchAccountingError, ConfigurationError, InfeasibleBatchError
from hvd_hetero.planning.plan import Plan


def dataset(samples: int) -> TensorDataset:
    """Sample i is the number i, so that a batch shows which samples it holds."""
    return TensorDataset(torch.arange(samples))


def make_sampler(
    samples: int, sizes: tuple[int, ...], rank: int = 0, minimum: int = 1, **options: Any
) -> HeteroBatchSampler:
    bounds = Bounds.build(len(sizes), sum(sizes), minimum)
    schedule = PlanSchedule(Plan(0, sizes, "made up"))
    return HeteroBatchSampler(samples, schedule, bounds, rank, **options)


def make_loader(
    samples: int, sizes: tuple[int, ...], rank: int = 0, workers: int = 0, **options: Any
) -> tuple[HeteroDataLoader[Any], list[LocalBatch | None]]:
    told: list[LocalBatch | None] = []
    sampler = make_sampler(samples, sizes, rank, shuffle=options.pop("shuffle", False))
    loader = HeteroDataLoader(
        dataset(samples), sampler, on_yield=told.append, num_workers=workers, **options
    )
    return loader, told


@st.composite
def splits(draw: st.DrawFn, ranks: int, total: int, minimum: int) -> tuple[int, ...]:
    """Local batches of at least ``minimum`` that add up to ``total``."""
    rest, sizes = total - ranks * minimum, []
    for _ in range(ranks - 1):
        sizes.append(draw(st.integers(0, rest)))
        rest -= sizes[-1]
    return tuple(minimum + size for size in [*sizes, rest])


class Job:
    """All ranks of a job in one process: they train in step, but draw ahead differently far."""

    def __init__(self, samplers: list[HeteroBatchSampler], ahead: list[int]) -> None:
        self.samplers, self.ahead = samplers, ahead
        self.trained: list[list[list[int]]] = [[] for _ in samplers]
        self.tickets: list[list[LocalBatch]] = [[] for _ in samplers]
        self.effective: list[tuple[tuple[int, int], Plan]] = [((0, 0), samplers[0].schedule.latest)]

    def agree(self, plan: Plan) -> None:
        cursor = max(sampler.schedule.drawn for sampler in self.samplers)
        for sampler in self.samplers:
            with sampler.schedule.agreement():
                sampler.schedule.install(plan, cursor)
        self.effective.append((cursor, plan))

    def run_pass(self, changes: dict[int, Plan], stop: int | None = None) -> None:
        """Train a pass, ending after ``stop`` steps; ``changes`` are agreed after a step."""
        waiting: list[deque[list[int]]] = [deque() for _ in self.samplers]
        tickets: list[deque[LocalBatch]] = [deque() for _ in self.samplers]
        iterators: list[Iterator[list[int]]] = []
        for sampler, mine in zip(self.samplers, tickets, strict=True):
            with sampler.opened_pass(mine):
                iterators.append(iter(sampler))
        step = 0
        while stop is None or step < stop:
            for rank, iterator in enumerate(iterators):
                while len(waiting[rank]) <= self.ahead[rank]:
                    batch = next(iterator, None)
                    if batch is None:
                        break
                    waiting[rank].append(batch)
            if not all(waiting):
                break
            for rank in range(len(iterators)):
                self.trained[rank].append(waiting[rank].popleft())
                self.tickets[rank].append(tickets[rank].popleft())
            step += 1
            if step in changes:
                self.agree(changes[step])
        if stop is None:
            assert not any(waiting), "ranks have different numbers of steps"
            assert all(next(iterator, None) is None for iterator in iterators)

    def check(self) -> None:
        """Ranks agree about every step, and nobody is without samples."""
        for pieces in zip(*self.tickets, strict=True):
            assert len({(p.epoch_pass, p.step, p.global_samples) for p in pieces}) == 1
            assert sum(p.samples for p in pieces) == pieces[0].global_samples
            assert all(p.samples >= 1 for p in pieces)
            cursor = (pieces[0].epoch_pass, pieces[0].step)
            plan = [p for effective, p in self.effective if effective <= cursor][-1]
            if pieces[0].global_samples == plan.global_batch_size:
                assert tuple(p.samples for p in pieces) == plan.local_batches
        for rank, batches in enumerate(self.trained):
            assert [len(b) for b in batches] == [t.samples for t in self.tickets[rank]]

    def used(self) -> list[int]:
        return [i for batches in self.trained for batch in batches for i in batch]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sample_exactly_once_whatever_the_plans(data: st.DataObject) -> None:
    """S48, A28: plans change at random moments while ranks have drawn differently far."""
    ranks = data.draw(st.integers(1, 4), label="ranks")
    minimum = data.draw(st.integers(1, 3), label="minimum")
    total = data.draw(st.integers(2 * ranks * minimum, 30), label="global_batch_size")
    samples = data.draw(st.integers(total, 150), label="samples")
    options = {
        "shuffle": data.draw(st.booleans(), label="shuffle"),
        "seed": data.draw(st.integers(0, 2**40), label="seed"),
        "drop_last": data.draw(st.booleans(), label="drop_last"),
    }
    plans = [
        Plan(version, data.draw(splits(ranks, total, minimum)), "made up") for version in range(5)
    ]
    moments = data.draw(st.lists(st.integers(1, 12), max_size=4, unique=True), label="moments")
    changes = dict(zip(sorted(moments), plans[1:], strict=False))
    job = Job(
        [
            make_sampler(samples, plans[0].local_batches, rank, minimum, **options)
            for rank in range(ranks)
        ],
        [data.draw(st.integers(0, 5), label="ahead") for _ in range(ranks)],
    )
    expected_steps = len(job.samplers[0])
    if data.draw(st.booleans(), label="a pass left early before"):
        job.run_pass(changes, stop=data.draw(st.integers(0, 3), label="stop"))
        changes = {}
        job.check()
        assert len(set(job.used())) == len(job.used())
        job.trained = [[] for _ in range(ranks)]
        job.tickets = [[] for _ in range(ranks)]
    job.run_pass(changes)
    job.check()
    used = job.used()
    assert [len(batches) for batches in job.trained] == [expected_steps] * ranks
    assert len(set(used)) == len(used)
    if options["drop_last"]:
        assert len(used) == samples - samples % total
    else:
        assert sorted(used) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_global_batch_size_may_change_too(data: st.DataObject) -> None:
    """Also at the very end of a pass: ranks that are behind end it where the others have."""
    ranks = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(2 * ranks, 20), min_size=4, max_size=4))
    drop_last = data.draw(st.booleans())
    samples = data.draw(st.integers(20, 90))
    plans = [
        Plan(version, data.draw(splits(ranks, size, 1)), "made up")
        for version, size in enumerate(sizes)
    ]
    bounds = Bounds((1,) * ranks, (60,) * ranks)
    job = Job(
        [
            HeteroBatchSampler(samples, PlanSchedule(plans[0]), bounds, rank, drop_last=drop_last)
            for rank in range(ranks)
        ],
        [data.draw(st.integers(0, 6)) for _ in range(ranks)],
    )
    moments = data.draw(st.lists(st.integers(1, 12), min_size=3, max_size=3, unique=True))
    job.run_pass(dict(zip(sorted(moments), plans[1:], strict=True)))
    job.check()
    used = job.used()
    assert len(set(used)) == len(used)
    assert drop_last or len(used) == samples


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sizes", [(4, 1), (3, 2)])
def test_13_samples_on_2_unequal_ranks(sizes: tuple[int, ...], drop_last: bool) -> None:
    """S37, A03: the ranks end every epoch together, and use every sample once."""
    job = Job([make_sampler(13, sizes, r, drop_last=drop_last) for r in range(2)], [0, 3])
    for epoch in range(2):
        job.run_pass({})
        job.check()
        used = sorted(job.used())
        once = list(range(10 if drop_last else 13))
        assert used == sorted(once * (epoch + 1))
        assert len(job.trained[0]) == len(job.trained[1]) == (epoch + 1) * len(job.samplers[0])


@pytest.mark.parametrize("samples", [9, 10, 11, 12, 13])
def test_ranks_forward_equally_often_in_every_epoch_tail(samples: int) -> None:
    """S40: whatever is left at the end, no rank skips a forward."""
    job = Job([make_sampler(samples, (2, 1, 1), r, shuffle=True) for r in range(3)], [2, 0, 1])
    job.run_pass({})
    job.check()
    assert {len(batches) for batches in job.trained} == {len(job.samplers[0])}


def test_5_samples_on_4_ranks_are_5() -> None:
    """S44: nothing is repeated to fill up the ranks."""
    job = Job([make_sampler(5, (8, 8, 8, 8), rank) for rank in range(4)], [0] * 4)
    job.run_pass({})
    assert sorted(job.used()) == [0, 1, 2, 3, 4]
    assert [len(batches[0]) for batches in job.trained] == [2, 1, 1, 1]


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(InfeasibleBatchError, match="3 samples, 4 ranks"):
        make_sampler(3, (8, 8, 8, 8))


def test_the_order_follows_the_epoch_that_was_set() -> None:
    sampler = make_sampler(40, (8,), shuffle=True, seed=5)
    sampler.set_epoch(3)
    third = list(sampler)
    assert list(sampler) == third
    sampler.set_epoch(4)
    assert list(sampler) != third
    sampler.set_epoch(3)
    assert list(sampler) == third
    assert list(make_sampler(40, (8,), shuffle=True, seed=6)) != third


def test_without_set_epoch_every_pass_has_a_new_order() -> None:
    sampler = make_sampler(40, (8,), shuffle=True)
    passes = [[i for batch in sampler for i in batch] for _ in range(3)]
    assert len({tuple(order) for order in passes}) == 3
    again = make_sampler(40, (8,), shuffle=True)
    again.set_epoch(1)
    assert [i for batch in again for i in batch] == passes[1]


@pytest.mark.parametrize("value", [-1, 1.5, "2", None])
def test_a_wrong_epoch_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="epoch="):
        make_sampler(10, (4,)).set_epoch(value)


@pytest.mark.parametrize(
    "options", [{"shuffle": 1}, {"seed": -1}, {"drop_last": None}, {"rank": 2}, {"rank": -1}]
)
def test_wrong_sampler_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        make_sampler(10, (4, 4), **options)


def test_plan_and_bounds_of_different_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"2 ranks.*3"):
        HeteroBatchSampler(10, PlanSchedule(Plan(0, (2, 2), "x")), Bounds.build(3, 4), 0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tickets_tell_the_size_of_the_batch_in_hand(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    total = data.draw(st.integers(2 * ranks, 12))
    samples = data.draw(st.integers(ranks, 60))
    rank = data.draw(st.integers(0, ranks - 1))
    plans = [Plan(v, data.draw(splits(ranks, total, 1)), "made up") for v in range(4)]
    loader, told = make_loader(samples, plans[0].local_batches, rank, shuffle=True)
    schedule = loader._hetero_sampler.schedule
    steps = 0
    for (batch,) in loader:
        ticket = told[-1]
        assert ticket is not None and ticket.samples == len(batch)
        assert ticket.step == steps
        steps += 1
        if steps % 2 == 0 and steps // 2 < 4:
            schedule.install(plans[steps // 2], schedule.drawn)
    assert steps == len(loader)
    assert told[0] is None and told[-1] is None and len(told) == steps + 2


@pytest.mark.parametrize(("method", "persistent"), [("forkserver", True), ("fork", False)])
def test_workers_that_run_ahead_follow_the_plan_by_the_documented_delay(
    method: str, persistent: bool
) -> None:
    """S48, A27: 2 workers, 2 epochs, the local batch changed in between, a pass left early."""
    options = {"persistent_workers": persistent, "multiprocessing_context": method}
    loader, told = make_loader(120, (4, 4), workers=2, shuffle=True, prefetch_factor=2, **options)
    schedule = loader._hetero_sampler.schedule
    sizes: list[int] = []
    for (batch,) in loader:
        assert told[-1] is not None and told[-1].samples == len(batch)
        sizes.append(len(batch))
        if len(sizes) == 5:
            schedule.install(Plan(1, (6, 2), "made up"), schedule.drawn)
    delay = 2 * 2
    assert sizes == [4] * (5 + delay) + [6] * (10 - delay)

    for number, (batch,) in enumerate(loader):
        assert told[-1] is not None and told[-1].samples == len(batch) == 6
        if number == 2:
            break
    schedule.install(Plan(2, (1, 7), "made up"), schedule.drawn)
    seen: list[torch.Tensor] = []
    for (batch,) in loader:
        assert told[-1] is not None and told[-1].samples == len(batch) == 1
        assert told[-1].epoch_pass == 2
        seen.append(batch)
    assert len(seen) == len(loader) == 15
    assert len(set(torch.cat(seen).tolist())) == 15


def test_workers_are_not_forked_unless_asked_for() -> None:
    """S48, A27: a forked copy of a process that runs MPI may crash or hang."""
    loader, _ = make_loader(20, (3, 2), workers=2)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    loader, _ = make_loader(20, (3, 2), workers=2, multiprocessing_context="spawn")
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_the_number_of_workers_does_not_change_which_pass_it_is() -> None:
    """Ranks with different numbers of workers count passes alike, also those never used."""
    told = []
    for options in ({}, {"workers": 2, "multiprocessing_context": "fork"}):
        loader, tickets = make_loader(20, (4,), **options)
        iter(loader)
        next(iter(loader))
        assert len(list(loader)) == 5
        told.append([t for t in tickets if t is not None][-1])
    assert told[0] == told[1]
    assert told[0].epoch_pass == 2


def test_leaving_early_and_starting_again() -> None:
    loader, told = make_loader(20, (3, 1))
    for _ in loader:
        break
    assert [told[-1].samples == len(b) for (b,) in loader] == [True] * 5  # type: ignore[union-attr]
    assert told[-2] == LocalBatch(1, 4, 16, 19, 4, epoch=1, epoch_samples=20)


def test_an_older_iterator_cannot_be_continued() -> None:
    loader, _ = make_loader(20, (4,))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(BatchAccountingError, match=r"pass 0 .* pass 1 .*newest iterator"):
        next(older)
    assert len(list(newer)) == 5


def test_an_older_iterator_cannot_be_continued_with_persistent_workers() -> None:
    loader, _ = make_loader(
        20, (4,), workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(BatchAccountingError, match="newest iterator"):
        next(older)
    assert len(list(newer)) == 5


class Faulty(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("sample 5")
        return index


def test_after_a_failure_batches_are_not_miscounted() -> None:
    told: list[LocalBatch | None] = []
    loader = HeteroDataLoader(Faulty(), make_sampler(12, (4,)), on_yield=told.append)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError, match="sample 5"):
        next(iterator)
    with pytest.raises(BatchAccountingError, match="sample 5"):
        next(iterator)


def test_a_stock_loader_over_the_sampler() -> None:
    """Nobody collects tickets then, so none are kept."""
    sampler = make_sampler(13, (3, 2), rank=1)
    stock: DataLoader[Any] = DataLoader(dataset(13), batch_sampler=sampler)
    for _ in range(2):
        assert [batch.tolist() for (batch,) in stock] == [[3, 4], [8, 9], [12]]
    assert len(stock) == 3
    assert sampler.schedule.drawn[0] == 1
    workers: DataLoader[Any] = DataLoader(
        dataset(13), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    assert [batch.tolist() for (batch,) in workers] == [[3, 4], [8, 9], [12]]
    assert sampler.schedule.drawn[0] == 2


def test_a_stock_loader_after_ours_begins_a_pass_of_its_own() -> None:
    loader, _ = make_loader(12, (4,))
    assert len(list(loader)) == 3
    assert len(list(loader._hetero_sampler)) == 3
    assert loader._hetero_sampler.schedule.drawn[0] == 1


def test_two_iterators_of_a_stock_loader() -> None:
    sampler = make_sampler(12, (4,))
    older, newer = iter(sampler), iter(sampler)
    next(older)
    next(newer)
    with pytest.raises(BatchAccountingError, match="newest iterator"):
        next(older)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("data", [Stream(), Unsized()])
def test_a_data_set_without_a_length_is_refused(data: Dataset[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"local_batch_size.*set_batch"):
        HeteroDataLoader(data, make_sampler(3, (1,)), on_yield=print)
    with pytest.raises(ConfigurationError, match=type(data).__name__):
        dataset_length(data)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": None},
        {"shuffle": True},
        {"sampler": [1, 2]},
        {"batch_sampler": [[1, 2]]},
        {"drop_last": True},
        {"in_order": False},
    ],
)
def test_options_that_cannot_be_combined_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        HeteroDataLoader(dataset(8), make_sampler(8, (4,)), on_yield=print, **options)


def test_another_data_set_than_the_samplers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"9 samples.* 8"):
        HeteroDataLoader(dataset(9), make_sampler(8, (4,)), on_yield=print)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_sent_to_workers_is_explained() -> None:
    loader, _ = make_loader(8, (4,), workers=1, collate_fn=lambda samples: samples)
    with pytest.raises(ConfigurationError, match=r"num_workers=1.*lambda"):
        iter(loader)


def test_torch_options_pass_through() -> None:
    loader, _ = make_loader(8, (4,), collate_fn=len, in_order=True)
    assert list(loader) == [4, 4]
    assert loader.batch_size is None
    assert loader.num_workers == 0


class Carrier(Dataset[int]):
    """A data set that refers to the sampler of its own loader."""

    def __init__(self, sampler: HeteroBatchSampler) -> None:
        self.sampler = sampler


def test_a_sampler_on_its_way_to_a_worker_takes_no_lock_along() -> None:
    sampler = make_sampler(8, (4,))
    copy = pickle.loads(pickle.dumps(Carrier(sampler))).sampler
    assert list(copy) == list(sampler)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_saved_epoch_goes_on_where_it_was_left(data: st.DataObject) -> None:
    """A28: on any number of ranks later, every sample of the epoch once over both jobs."""
    samples = data.draw(st.integers(12, 120), label="samples")
    options = {
        "shuffle": data.draw(st.booleans(), label="shuffle"),
        "seed": data.draw(st.integers(0, 99), label="seed"),
    }
    epoch = data.draw(st.integers(0, 3), label="epoch")

    def job(label: str) -> Job:
        ranks = data.draw(st.integers(1, 4), label=f"ranks {label}")
        total = data.draw(st.integers(2 * ranks, 12), label=f"global_batch_size {label}")
        sizes = data.draw(splits(ranks, total, 1), label=f"plan {label}")
        ahead = [data.draw(st.integers(0, 3)) for _ in range(ranks)]
        return Job([make_sampler(samples, sizes, r, **options) for r in range(ranks)], ahead)

    before, after = job("before"), job("after")
    for sampler in before.samplers:
        sampler.set_epoch(epoch)
    steps = data.draw(st.integers(1, len(before.samplers[0])), label="steps")
    before.run_pass({}, stop=steps)
    last = before.tickets[0][-1]
    assert last.epoch == epoch
    left = samples - last.epoch_samples
    if 0 < left < len(after.samplers):
        with pytest.raises(InfeasibleBatchError, match=f"{left} samples are left"):
            after.samplers[0].resume(Place(epoch, last.epoch_samples))
        return
    for sampler in after.samplers:
        sampler.resume(Place(epoch, last.epoch_samples))
        if data.draw(st.booleans(), label="set_epoch"):
            sampler.set_epoch(epoch)
    after.run_pass({})
    assert sorted(before.used() + after.used()) == list(range(samples))
    after.trained = [[] for _ in after.samplers]
    for sampler in after.samplers:
        sampler.set_epoch(epoch + 1)
    after.run_pass({})  # a whole one again
    assert sorted(after.used()) == list(range(samples))


def test_a_position_is_loaded_before_the_first_batch() -> None:
    sampler = make_sampler(20, (3, 1))
    next(iter(sampler))
    with pytest.raises(ConfigurationError, match="before the first pass"):
        sampler.resume(Place(0, 4))


def test_another_epoch_than_the_saved_one_begins_at_its_start() -> None:
    sampler = make_sampler(20, (3, 1))
    sampler.resume(Place(2, 8))
    sampler.set_epoch(5)
    assert len(list(sampler)) == 5
    sampler.set_epoch(2)
    assert len(list(sampler)) == 5


@pytest.mark.parametrize("same_epoch", [True, False])
def test_passes_and_batches_are_counted_on_from_the_saved_cursor(same_epoch: bool) -> None:
    """A recorded plan applies from the same cursor on in a job that goes on from a checkpoint."""
    sampler = make_sampler(20, (3, 1))
    sampler.resume(Place(2, 8, (7, 2)))
    if not same_epoch:
        sampler.set_epoch(3)
    cursors = []
    for _ in range(2):
        tickets: deque[LocalBatch] = deque()
        with sampler.opened_pass(tickets):
            batches = iter(sampler)
        assert len(list(batches)) == len(tickets)
        cursors.append([(one.epoch_pass, one.step) for one in tickets])
    number = 7 if same_epoch else 8
    assert cursors[0] == [(number, step) for step in range(2 if same_epoch else 0, 5)]
    assert cursors[1] == [(number + 1, step) for step in range(5)]
