"""Dense exchange of gradients where they lie, as Horovod itself does it."""

from __future__ import annotations

import torch

from hvd_hetero.exchange.collectives import Collectives, Handle
from hvd_hetero.planning.cost_model import dense_bytes


class InPlaceExchange:
    """Allreduces of the gradients of one bucket's parameters, each started by itself.

    No flat copy is made: where nothing is compressed, nothing may cost more than stock Horovod.

    Args:
        elements: of all gradients of the bucket. itemsize: bytes of each.
        average: divide the sum by the number of ranks, in Horovod's own way.
    """

    strategy = "dense"

    def __init__(
        self, collectives: Collectives, elements: int, itemsize: int, *, average: bool
    ) -> None:
        self._collectives = collectives
        self._average = average
        self._handles: list[Handle] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent_bytes = dense_bytes(collectives.size, elements, itemsize)

    def start(self, gradient: torch.Tensor, factor: float, name: str) -> None:
        """Start the allreduce of ``factor * gradient``, which is overwritten with the result.

        Runs in a hook for every parameter of every step: nothing here but what must be.
        """
        message = gradient
        if gradient.is_sparse:
            message = gradient.to_dense()
        if not message.is_contiguous():
            message = message.contiguous()
        if factor == 0.0:
            message.zero_()  # of a mean over nothing, NaN as a rule: 0 * NaN would be NaN
        elif factor != 1.0:
            message.mul_(factor)
        if message is not gradient:
            self._copies.append((gradient, message))
        self._handles.append(
            self._collectives.allreduce_async(message, f"{name}.in-place", self._average)
        )

    def done(self) -> bool:
        """Return True when ``wait`` would not block."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        """Wait until every gradient given to ``start`` holds its result."""
        for handle in self._handles:
            handle.result()
        for gradient, message in self._copies:
            if gradient.is_sparse:
                aggregated = message.to_sparse(gradient.sparse_dim())
                gradient.zero_().add_(aggregated)
            else:
                gradient.copy_(message)
