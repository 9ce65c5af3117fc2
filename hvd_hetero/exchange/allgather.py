"""Sparse exchange of one bucket: every rank gathers every rank's top-k."""

from __future__ import annotations

import torch

from hvd_hetero.compression.topk import SparseGradient
from hvd_hetero.compression.wire import pack, unpack
from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.planning.cost_model import allgather_bytes


class AllgatherExchange:
    """Sum over ranks of sparse gradients that keep the same number of elements each.

    The contributions are added in rank order, one rank after the other: a single indexed add over
    all of them has no fixed order on GPUs, and replicas would drift apart. Every rank decodes its
    own packet too, so that all add the same numbers.

    Args:
        collectives: of this rank.
        sparse: this rank's entries; k and d are equal on all ranks.
        name: of the bucket; the collective is ``{name}.allgather``.
        values_as: one of ``wire.VALUE_FORMATS``.

    ``sent_values`` [k] is what the ranks receive of ``sparse.values``, or None if it is the same.
    """

    strategy = "allgather"

    def __init__(
        self, collectives: Collectives, sparse: SparseGradient, name: str, values_as: str
    ) -> None:
        self._k, self._elements, self._dtype = sparse.k, sparse.elements, sparse.values.dtype
        self._values_as = values_as
        self._ranks = collectives.size
        packed = pack(sparse, values_as)
        self.sent_values = packed.sent
        self._packet_bytes = packed.data.numel()
        self.sent_bytes = allgather_bytes(collectives.size, self._packet_bytes)
        self._nonfinite: list[torch.Tensor] = []
        self._handle = collectives.allgather_async(packed.data, f"{name}.allgather")

    @property
    def nonfinite(self) -> bool:
        """After ``finish``: some rank's gradient was not finite. Waits for a GPU when read."""
        return any(bool(flag) for flag in self._nonfinite)

    def advance(self) -> bool:
        """Return True: there is one stage only."""
        return True

    def done(self) -> bool:
        """Return True when ``finish`` would not block."""
        return self._handle.done()

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Write the sum over ranks into ``output`` (Tensor[d]) and return it."""
        gathered = self._handle.result()
        output.zero_()
        self._nonfinite.clear()
        for packet in torch.split(gathered, self._packet_bytes):
            sparse, nonfinite = unpack(
                packet, self._k, self._elements, self._dtype, self._values_as
            )
            output.index_add_(0, sparse.indices, sparse.values)
            self._nonfinite.append(nonfinite)
        return output
