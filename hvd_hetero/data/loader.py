"""A torch ``DataLoader`` whose local batch follows the plan and is known for every batch yielded.

The loader yields only data, and its workers run ahead, so the size of a batch cannot be read from
the sampler when the batch arrives. The batch sampler therefore pushes a ticket (a
:class:`~hvd_hetero.data.partition.LocalBatch`) to a queue as it draws, and the loader's iterator
pops one as it yields: workers return batches in the order in which they were drawn.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvd_hetero.data.main_guard import starts_horovod_on_import
from hvd_hetero.data.partition import LocalBatch
from hvd_hetero.data.sampler import HeteroBatchSampler
from hvd_hetero.data.schedule import PlanSchedule, stale_pass
from hvd_hetero.errors import BatchAccountingError, ConfigurationError

__all__ = ["HeteroBatchSampler", "HeteroDataLoader", "OnYield", "dataset_length"]

T_co = TypeVar("T_co", covariant=True)
OnYield = Callable[[LocalBatch | None], None]
Loading = Callable[[], AbstractContextManager[None]]

_REFUSED = {
    "batch_size": "local batch sizes come from the plan: set global_batch_size of the Balancer",
    "sampler": "it belongs to the batch sampler: pass it to Balancer.data_loader",
    "batch_sampler": "the loader has its own batch sampler; to use another one, build a plain "
    "DataLoader and call Balancer.set_batch for every batch",
    "shuffle": "it belongs to the batch sampler: pass it to Balancer.data_loader",
    "drop_last": "it belongs to the batch sampler: pass it to Balancer.data_loader",
}


def dataset_length(dataset: object) -> int:
    """Return the number of samples of a map-style data set.

    Raises ConfigurationError for an ``IterableDataset`` and for a data set without a length.
    """
    kind = type(dataset).__name__
    remedy = (
        "have it yield batches of balancer.local_batch_size samples, a number to be read for each, "
        "give it to a plain DataLoader with batch_size=None, and call "
        "balancer.set_batch(samples=...) for every batch (README, Data)"
    )
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"dataset={kind}: an IterableDataset has no indices to divide among ranks: {remedy}"
        )
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigurationError(
            f"dataset={kind}: a data set with __len__ and __getitem__ is needed ({error}): either "
            f"add them, or {remedy}"
        ) from error


class HeteroDataLoader(DataLoader[T_co]):
    """``DataLoader`` over a map-style data set whose local batch sizes follow the plan.

    Before a batch is handed out, ``on_yield`` gets its :class:`LocalBatch`; it gets None when a
    pass begins and when it ends, as then there is no current batch. ``on_batch`` gets the batch
    itself, after its ticket. Waiting for a batch happens in the context ``loading()``. The
    remaining arguments are
    those of ``DataLoader`` without ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler`` and
    ``drop_last``. Two differences: with workers the default ``multiprocessing_context`` is
    "forkserver", as a forked copy of a process that runs MPI may hang or crash; and
    ``in_order=False`` is refused. A ``collate_fn`` that leaves samples out makes the ticket wrong:
    then call ``Balancer.set_batch``.

    Raises ConfigurationError for arguments that cannot be combined with it.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_sampler: HeteroBatchSampler,
        /,  # a user's batch_sampler=... is one of the options, to be refused with a reason
        *,
        on_yield: OnYield,
        on_batch: Callable[[Any], None] | None = None,
        loading: Loading = nullcontext,
        **dataloader_options: Any,
    ) -> None:
        samples = dataset_length(dataset)
        if samples != batch_sampler.dataset_samples:
            raise ConfigurationError(
                f"the data set has {samples} samples, its batch sampler was built for "
                f"{batch_sampler.dataset_samples}: build both from the same data set"
            )
        options = _checked_options(dataloader_options)
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self._hetero_sampler = batch_sampler
        self._on_yield = on_yield
        self._on_batch = on_batch
        self._loading = loading

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the passes that begin from now on; the same on every rank."""
        self._hetero_sampler.set_epoch(epoch)

    def __iter__(self) -> _TicketIterator[T_co]:  # type: ignore[override]
        tickets: deque[LocalBatch] = deque()
        self._on_yield(None)
        with self._hetero_sampler.opened_pass(tickets) as number:
            try:
                batches: Iterator[T_co] = super().__iter__()
            except Exception as error:
                if self.num_workers and "pickle" in f"{type(error).__name__} {error}".lower():
                    raise ConfigurationError(
                        f"num_workers={self.num_workers}: the data set, collate_fn or "
                        f"worker_init_fn cannot be sent to worker processes ({error}): replace "
                        "lambdas and local functions by functions of a module, or set "
                        "num_workers=0"
                    ) from error
                raise
        return _TicketIterator(
            batches,
            self._hetero_sampler.schedule,
            number,
            tickets,
            self._on_yield,
            self._on_batch,
            self._loading,
        )


class _TicketIterator(Generic[T_co]):
    """Yields the batches of one pass, and before each of them its ticket to ``on_yield``."""

    def __init__(
        self,
        batches: Iterator[T_co],
        schedule: PlanSchedule,
        number: int,
        tickets: deque[LocalBatch],
        on_yield: OnYield,
        on_batch: Callable[[Any], None] | None,
        loading: Loading,
    ) -> None:
        self._batches = batches
        self._schedule = schedule
        self._pass = number
        self._tickets = tickets
        self._on_yield = on_yield
        self._on_batch = on_batch
        self._loading = loading
        self._failure: str | None = None

    def __iter__(self) -> _TicketIterator[T_co]:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> T_co:
        current = self._schedule.drawn[0]
        if current != self._pass:
            raise BatchAccountingError(stale_pass(self._pass, current))
        if self._failure is not None:
            raise BatchAccountingError(
                f"this iterator failed before ({self._failure}), so its batches can no longer be "
                "counted and the ranks may have different numbers of steps left: begin a new pass "
                "on every rank, or handle bad samples in the data set"
            )
        try:
            with self._loading():
                batch = next(self._batches)
        except StopIteration:
            self._on_yield(None)
            raise
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._on_yield(self._tickets.popleft())
        if self._on_batch is not None:
            try:
                self._on_batch(batch)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise
        return batch


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """DataLoader's arguments with our default worker context; raises for those refused."""
    for name, remedy in _REFUSED.items():
        if name in options:
            raise ConfigurationError(f"{name}={options[name]!r} cannot be used here: {remedy}")
    if not options.get("in_order", True):
        raise ConfigurationError(
            "in_order=False: batches must arrive in the order in which they were drawn, else their "
            "sizes are unknown: leave it out"
        )
    if not options.get("num_workers"):
        return options
    if options.get("multiprocessing_context") is None:
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        options = {**options, "multiprocessing_context": method}
    _check_main_guard(options["num_workers"], options["multiprocessing_context"])
    return options


def _check_main_guard(workers: Any, context: Any) -> None:
    """Refuse a script that would start Horovod again in every worker, and crash there."""
    method = context if isinstance(context, str) else context.get_start_method()
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if method == "fork" or path is None:
        return
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    if starts_horovod_on_import(source):
        raise ConfigurationError(
            f"num_workers={workers}: workers started by {method} import {path} again, which would "
            "call hvd.init() in them: put what the script does into a function and call it under "
            '`if __name__ == "__main__":`, or set num_workers=0'
        )
