"""What all ranks must agree on: gathers of small messages, and checks that ranks are alike.

Messages are JSON objects. They travel over mpi4py where every rank can use it next to Horovod,
otherwise over Horovod's own collectives. All calls block, on the main thread, outside hooks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvd_hetero.errors import ExchangeFailedError, RankMismatchError
from hvd_hetero.exchange.collectives import Collectives, Handle
from hvd_hetero.runtime.clock import wait_until

Message = dict[str, Any]


class Channel(Protocol):
    """Blocking exchange of JSON messages between all ranks; every rank calls alike."""

    def allgather(self, message: Message, purpose: str) -> list[Message]:
        """Return every rank's message, in rank order."""
        ...

    def broadcast(self, message: Message | None, purpose: str) -> Message:
        """Return rank 0's message; other ranks pass None."""
        ...


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _decode(data: bytes) -> Message:
    result: Message = json.loads(data)
    return result


class CollectivesChannel:
    """Messages over the exchange's collectives: one allgather, lines apart by newlines."""

    def __init__(self, collectives: Collectives, prefix: str, timeout_seconds: float) -> None:
        self._collectives = collectives
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds

    def allgather(self, message: Message, purpose: str) -> list[Message]:
        name = f"{self._prefix}.{purpose}.allgather"
        gathered = self._wait(
            self._collectives.allgather_async(_tensor(_encode(message)), name), name
        )
        return [_decode(line) for line in bytes(gathered.numpy()).splitlines()]

    def broadcast(self, message: Message | None, purpose: str) -> Message:
        # An allgather in which the others send nothing: its size is not known to them before.
        name = f"{self._prefix}.{purpose}.broadcast"
        data = b"" if message is None else _encode(message)
        gathered = self._wait(self._collectives.allgather_async(_tensor(data), name), name)
        return _decode(bytes(gathered.numpy()))

    def _wait(self, handle: Handle, name: str) -> torch.Tensor:
        wait_until(
            handle.done,
            self._timeout_seconds,
            lambda: f"rank {self._collectives.rank}: agreement {name!r}",
        )
        return handle.result()


def _tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


class MpiChannel:
    """Messages over a private duplicate of MPI's COMM_WORLD, so that they meet no other traffic."""

    def __init__(
        self,
        communicator: Any,
        prefix: str,
        timeout_seconds: float,
        running: Callable[[], bool] = lambda: True,
    ) -> None:
        self._running = running
        self._communicator = communicator
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds

    def allgather(self, message: Message, purpose: str) -> list[Message]:
        data = np.frombuffer(_encode(message), dtype=np.uint8)
        sizes = np.zeros(self._communicator.Get_size(), dtype=np.int64)
        own_size = np.array([data.size], dtype=np.int64)
        self._wait(self._communicator.Iallgather(own_size, sizes), purpose)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        gathered = np.empty(int(starts[-1]), dtype=np.uint8)
        request = self._communicator.Iallgatherv(data, [gathered, sizes, starts[:-1], _byte_type()])
        self._wait(request, purpose)
        self._part(purpose)
        return [_decode(gathered[a:b].tobytes()) for a, b in itertools.pairwise(starts)]

    def broadcast(self, message: Message | None, purpose: str) -> Message:
        data = np.frombuffer(b"" if message is None else _encode(message), dtype=np.uint8)
        size = np.array([data.size], dtype=np.int64)
        self._wait(self._communicator.Ibcast(size, root=0), purpose)
        buffer = data.copy() if message is not None else np.empty(int(size[0]), dtype=np.uint8)
        self._wait(self._communicator.Ibcast(buffer, root=0), purpose)
        self._part(purpose)
        return _decode(buffer.tobytes())

    def _part(self, purpose: str) -> None:
        """Leave only once every rank has its message: a rank that ends takes MPI with it.

        Who is still here when that happens has the message already, and goes on without an error.
        """
        request = self._communicator.Ibarrier()
        wait_until(
            lambda: not self._running() or bool(request.Test()),
            self._timeout_seconds,
            lambda: self._where(purpose),
        )

    def _wait(self, request: Any, purpose: str) -> None:
        where = self._where(purpose)

        def done() -> bool:
            # A rank that ends shuts Horovod down on all, and MPI with it: then asking would crash.
            if not self._running():
                raise ExchangeFailedError(
                    f"{where}: Horovod has been shut down, as another rank has ended; the reason "
                    "is in that rank's output"
                )
            return bool(request.Test())

        wait_until(done, self._timeout_seconds, lambda: where)

    def _where(self, purpose: str) -> str:
        rank = self._communicator.Get_rank()
        return f"rank {rank}: agreement '{self._prefix}.{purpose}' over mpi4py"


def _byte_type() -> Any:
    from mpi4py import MPI

    return MPI.BYTE


_SAME_START = (
    "Start every rank with the same code, options and environment (with mpirun, pass variables by "
    "-x NAME)"
)


def verify_alike(messages: Sequence[Mapping[str, Any]], remedy: str = _SAME_START) -> None:
    """Raise RankMismatchError naming the first key whose value differs between ranks, and both.

    ``messages``: every rank's values by name, in rank order; the same list on every rank, so that
    all of them raise.
    """
    for rank, other in enumerate(messages[1:], start=1):
        difference = _first_difference(messages[0], other)
        if difference is not None:
            key, mine, theirs = difference
            raise RankMismatchError(
                f"{key} differs between ranks: rank 0 has {_short(mine)}, rank {rank} has "
                f"{_short(theirs)}. {remedy}"
            )


def _first_difference(
    first: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return (key, value, other value), the key with dots where values are mappings themselves."""
    for key in [*first, *(key for key in other if key not in first)]:
        mine, theirs = first.get(key, "(absent)"), other.get(key, "(absent)")
        if mine == theirs:
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            inner = _first_difference(mine, theirs)
            if inner is not None:
                return f"{key}.{inner[0]}", inner[1], inner[2]
        return key, mine, theirs
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
