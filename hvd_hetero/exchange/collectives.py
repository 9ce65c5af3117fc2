"""The collectives an exchange may use, as a protocol, and its twin for one process."""

from __future__ import annotations

from typing import Protocol

import torch


class Handle(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Return True when ``result`` would not block."""
        ...

    def result(self) -> torch.Tensor:
        """Return the result; may block when ``done`` is not True yet.

        Raises ExchangeFailedError when the collective ended with an error.
        """
        ...


class Collectives(Protocol):
    """Named, asynchronous collectives over all ranks.

    A name belongs to one purpose: it is used by one kind of collective, once at a time, in the
    same order of uses on every rank. Tensors must not be changed while the handle is open.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allreduce_async(self, tensor: torch.Tensor, name: str, average: bool = False) -> Handle:
        """Sum ``tensor`` over ranks in place, or average it; the result is ``tensor`` itself."""
        ...

    def allgather_async(self, tensor: torch.Tensor, name: str) -> Handle:
        """Concatenate the ranks' tensors along the first dimension, in rank order.

        First dimensions may differ; the tensor is contiguous and has at least one dimension.
        """
        ...

    def broadcast_async(self, tensor: torch.Tensor, root_rank: int, name: str) -> Handle:
        """Overwrite ``tensor`` in place with the root's; the result is ``tensor`` itself."""
        ...


class FinishedHandle:
    """A handle whose result is known already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def done(self) -> bool:
        return True

    def result(self) -> torch.Tensor:
        return self._tensor


class SingleProcess:
    """Collectives of a world of one rank: every result is the input."""

    rank = 0
    size = 1

    def allreduce_async(self, tensor: torch.Tensor, name: str, average: bool = False) -> Handle:
        return FinishedHandle(tensor)

    def allgather_async(self, tensor: torch.Tensor, name: str) -> Handle:
        return FinishedHandle(tensor.clone())

    def broadcast_async(self, tensor: torch.Tensor, root_rank: int, name: str) -> Handle:
        return FinishedHandle(tensor)
