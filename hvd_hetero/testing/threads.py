"""In-process ranks: every rank is a thread, collectives meet in memory.

What a collective does to data is what Horovod's does, so code behind the ``Collectives`` protocol
can be tested without a launcher, and delayed or failing ranks can be placed to the step.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from hvd_hetero.errors import ExchangeFailedError

R = TypeVar("R")


@dataclass(frozen=True)
class Fault:
    """What goes wrong: on ``rank``, at the ``occurrence``-th use (from 0) of a matching name.

    name: part of the collective's name. delay_seconds: this rank joins late. fails: the collective
    ends with an error on all ranks.
    """

    rank: int
    name: str
    occurrence: int = 0
    delay_seconds: float = 0.0
    fails: bool = False


class _Meeting:
    """One use of one collective: what each rank brought, and when it did."""

    def __init__(self, size: int) -> None:
        self.brought: dict[int, torch.Tensor] = {}
        self.kinds: set[str] = set()
        self.size = size
        self.ready_at = 0.0
        self.failed = False
        self.lock = threading.Lock()

    def bring(self, rank: int, kind: str, tensor: torch.Tensor, delay_seconds: float) -> None:
        with self.lock:
            self.kinds.add(kind)
            self.brought[rank] = tensor.clone()
            self.ready_at = max(self.ready_at, time.perf_counter() + delay_seconds)

    def done(self) -> bool:
        with self.lock:
            return len(self.brought) == self.size and time.perf_counter() >= self.ready_at

    def tensors(self) -> list[torch.Tensor]:
        return [self.brought[rank] for rank in range(self.size)]


class ThreadWorld:
    """A world of ``size`` ranks; ``names`` lists every (rank, kind, name) in order of launch."""

    def __init__(self, size: int, faults: Sequence[Fault] = ()) -> None:
        self.size = size
        self.names: list[tuple[int, str, str]] = []
        self._faults = faults
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._lock = threading.Lock()

    def run(self, work: Callable[[ThreadCollectives], R], timeout_seconds: float = 60.0) -> list[R]:
        """Run ``work`` on every rank and return the results in rank order.

        Raises the error of the lowest rank that failed, or TimeoutError.
        """
        results: dict[int, R] = {}
        errors: dict[int, BaseException] = {}

        def rank_main(rank: int) -> None:
            try:
                results[rank] = work(ThreadCollectives(self, rank))
            except BaseException as error:
                errors[rank] = error

        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.perf_counter() + timeout_seconds
        for thread in threads:
            thread.join(max(deadline - time.perf_counter(), 0.0))
        if errors:
            raise errors[min(errors)]
        missing = [rank for rank in range(self.size) if rank not in results]
        if missing:
            raise TimeoutError(f"ranks {missing} still run after {timeout_seconds:g} s")
        return [results[rank] for rank in range(self.size)]

    def meet(self, rank: int, kind: str, name: str, use: int, tensor: torch.Tensor) -> _Meeting:
        """Bring ``tensor`` to the ``use``-th meeting of that name."""
        with self._lock:
            self.names.append((rank, kind, name))
            meeting = self._meetings.setdefault((name, use), _Meeting(self.size))
        delay_seconds = 0.0
        for fault in self._faults:
            if fault.rank == rank and fault.name in name and fault.occurrence == use:
                delay_seconds += fault.delay_seconds
                meeting.failed = meeting.failed or fault.fails
        meeting.bring(rank, kind, tensor, delay_seconds)
        return meeting


class _ThreadHandle:
    def __init__(
        self,
        meeting: _Meeting,
        name: str,
        combine: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._meeting = meeting
        self._name = name
        self._combine = combine

    def done(self) -> bool:
        return self._meeting.done()

    def result(self) -> torch.Tensor:
        while not self.done():
            time.sleep(1e-4)
        if self._meeting.failed or len(self._meeting.kinds) > 1:
            raise ExchangeFailedError(f"collective {self._name!r} failed: {self._meeting.kinds}")
        return self._combine(self._meeting.tensors())


class ThreadCollectives:
    """One rank's view of a :class:`ThreadWorld`; implements ``exchange.Collectives``."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self._uses: Counter[str] = Counter()

    def allreduce_async(
        self, tensor: torch.Tensor, name: str, average: bool = False
    ) -> _ThreadHandle:
        def combine(tensors: list[torch.Tensor]) -> torch.Tensor:
            total = torch.zeros_like(tensor)
            for one in tensors:
                total += one
            return tensor.copy_(total / self.size if average else total)

        return self._start("allreduce", tensor, name, combine)

    def allgather_async(self, tensor: torch.Tensor, name: str) -> _ThreadHandle:
        return self._start("allgather", tensor, name, torch.cat)

    def broadcast_async(self, tensor: torch.Tensor, root_rank: int, name: str) -> _ThreadHandle:
        return self._start(
            "broadcast", tensor, name, lambda tensors: tensor.copy_(tensors[root_rank])
        )

    def _start(
        self,
        kind: str,
        tensor: torch.Tensor,
        name: str,
        combine: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> _ThreadHandle:
        use = self._uses[name]
        self._uses[name] += 1
        return _ThreadHandle(self._world.meet(self.rank, kind, name, use, tensor), name, combine)
