"""Dense exchange of one bucket: an allreduce, through a Horovod compressor where one is given."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hvd_hetero.exchange.collectives import Collectives, Handle
from hvd_hetero.planning.cost_model import dense_bytes


class Compressor(Protocol):
    """The interface of ``horovod.torch.Compression.none`` and ``.fp16``."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class DenseExchange:
    """Sum of a flat tensor over ranks.

    ``values``: Tensor[d], the weighted gradient of this rank; it is overwritten with the sum, or
    left alone where a compressor sends a copy.
    """

    strategy = "dense"
    nonfinite = False  # the sum shows it

    def __init__(
        self,
        collectives: Collectives,
        values: torch.Tensor,
        name: str,
        compressor: Compressor | None = None,
    ) -> None:
        self._compressor = compressor
        self._context: Any = None
        message = values
        if compressor is not None:
            message, self._context = compressor.compress(values)
        self.sent_bytes = dense_bytes(collectives.size, message.numel(), message.element_size())
        self._handle: Handle = collectives.allreduce_async(message, f"{name}.allreduce")

    def advance(self) -> bool:
        """Return True: there is one stage, and it is launched."""
        return True

    def done(self) -> bool:
        """Return True when ``finish`` would not block."""
        return self._handle.done()

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks (Tensor[d]); ``output`` is not needed."""
        result = self._handle.result()
        if self._compressor is not None:
            result = self._compressor.decompress(result, self._context)
        return result
