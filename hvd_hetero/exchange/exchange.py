"""What every exchange of one bucket offers, whatever travels."""

from __future__ import annotations

from typing import Protocol

import torch


class Exchange(Protocol):
    """The sum of one bucket over all ranks, under way.

    Building one launches its first collective. All ranks build the exchanges of a step in the
    same order and call ``advance`` for the same stages in the same order.
    """

    @property
    def strategy(self) -> str:
        """ "dense", "allgather" or "shared-index"."""
        ...

    @property
    def sent_bytes(self) -> float:
        """Bytes this exchange puts on the wire of one rank, in its busier direction."""
        ...

    @property
    def nonfinite(self) -> bool:
        """After ``finish``: whether some rank's own gradient was not finite.

        Always False for a dense exchange, whose sum shows it.
        """
        ...

    def advance(self) -> bool:
        """Launch the next stage if the one before is done; never blocks.

        Returns True once the last collective is launched.
        """
        ...

    def done(self) -> bool:
        """Return True when ``finish`` would not block; advances by itself."""
        ...

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks [d], in ``output`` or in a tensor of the exchange's own."""
        ...
