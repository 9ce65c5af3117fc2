"""Sparse exchange of one bucket: every rank gathers every rank's top-k."""

from __future__ import annotations

import torch

from hvd_hetero.compression.topk import SparseGradient
from hvd_hetero.compression.wire import pack, packed_bytes, unpack
from hvd_hetero.exchange.collectives import Collectives, Handle
from hvd_hetero.planning.cost_model import allgather_bytes, dense_bytes


class AllgatherExchange:
    """Sum over ranks of sparse gradients that keep the same number of elements each.

    The contributions are added in rank order, one rank after the other: a single indexed add over
    all of them has no fixed order on GPUs, and replicas would drift apart.
    """

    strategy = "allgather"

    def __init__(self, collectives: Collectives, gradient: SparseGradient, name: str) -> None:
        self._elements = gradient.elements
        self._dtype = gradient.values.dtype
        self._ranks = collectives.size
        packet = pack(gradient)
        self._packet_bytes = packet.numel()
        self.sent_bytes = allgather_bytes(collectives.size, self._packet_bytes)
        self.handle: Handle = collectives.allgather_async(packet, f"{name}.allgather")

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Write the sum over ranks into ``output`` (Tensor[d]), return it; the handle is done."""
        gathered = self.handle.result()
        output.zero_()
        for rank in range(self._ranks):
            packet = gathered.narrow(0, rank * self._packet_bytes, self._packet_bytes)
            part = unpack(packet, self._elements, self._dtype)
            output.index_add_(0, part.indices, part.values)
        return output


def sparse_saves_bytes(ranks: int, k: int, elements: int, dtype: torch.dtype) -> bool:
    """Return True when gathering top-k packets sends fewer bytes than a dense allreduce."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    packed = packed_bytes(k, elements, dtype)
    return allgather_bytes(ranks, packed) < dense_bytes(ranks, elements, itemsize)
