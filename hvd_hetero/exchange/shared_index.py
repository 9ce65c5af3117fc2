"""Sparse exchange of one bucket in two stages: a leader's indices, then everybody's values there.

ScaleCom (Chen et al., NeurIPS 2020, arXiv 2104.11125): the bytes of a rank hardly grow with the
number of ranks, since contributions to the same entries are added on their way.
"""

from __future__ import annotations

import torch

from hvd_hetero.compression.fixed_point import (
    pack_fields,
    quantize,
    step_for,
    unpack_fields,
)
from hvd_hetero.compression.topk import value_dtype
from hvd_hetero.compression.wire import (
    VALUE_FORMATS,
    index_bytes,
    pack_indices,
    unpack_indices,
)
from hvd_hetero.errors import ConfigurationError, check_choice, check_int
from hvd_hetero.exchange.collectives import Collectives, Handle
from hvd_hetero.planning.cost_model import shared_value_bytes
from hvd_hetero.planning.sparse_bytes import STEP_BYTES, sparse_bytes


class SharedIndexExchange:
    """Sum over ranks of the entries that one rank, the leader, has selected.

    1. The leader broadcasts its packed indices (and the step of fixed-point values).
    2. ``advance``: all ranks sum their values at these indices, and the number of ranks whose
       gradient is not finite; such a rank sends zeros, so that the sum stays readable.
    3. ``finish`` writes the sums at the indices, zeros elsewhere.

    Args:
        values: a_i, Tensor[d], contiguous, float32 or float64; not changed here, and not to be
            changed by others before ``finish``.
        k: number of entries, equal on all ranks.
        leader: the rank that has selected; equal on all ranks.
        indices: int64 [k], ascending: the leader's selection; None on the other ranks. Among its
            entries are its non-finite ones, if there are any (as ``Selector`` selects).
        weight_share: of this rank in the sum of all ranks' weights; None: all weigh the same. The
            shares of all ranks add up to 1 at most. Fixed point goes by it.
        values_as: "float32": values are added as they are. "float16": as fixed point of 10 to 21
            bits where ``shared_value_bytes`` says so. A sum of float16 would be rounded on its way
            with no rank to keep the error; fixed point is rounded by its owner alone.

    Attributes:
        indices: int64 [k] once the first stage is done; on the leader at once.
        sent_values: float32 [k], what of a_i is in the sum, once the first stage is done; None
            when that is a_i exactly.
        nonfinite: after ``finish``, True on all ranks when some rank's a_i is not finite.

    Raises ConfigurationError for a leader that is no rank, indices that are missing on the leader,
    given on another rank or not k, an unknown ``values_as``.
    """

    strategy = "shared-index"

    def __init__(
        self,
        collectives: Collectives,
        values: torch.Tensor,
        k: int,
        name: str,
        leader: int,
        indices: torch.Tensor | None,
        values_as: str = "float32",
        weight_share: float | None = None,
    ) -> None:
        ranks = collectives.size
        check_int("leader", leader, minimum=0, maximum=ranks - 1)
        check_choice("values_as", values_as, VALUE_FORMATS)
        self._k = check_int("k", k, minimum=0, maximum=values.numel())
        if (indices is not None) != (collectives.rank == leader):
            raise ConfigurationError(
                f"rank {collectives.rank}, leader={leader}: the leader, and no other rank, gives "
                "indices"
            )
        if indices is not None and indices.numel() != k:
            raise ConfigurationError(f"k={k}: the leader gives {indices.numel()} indices")
        self._collectives = collectives
        self._values = values
        self._name = name
        self._weight_share = weight_share
        self.indices = indices
        self.sent_values: torch.Tensor | None = None
        self.nonfinite = False
        self._wire_dtype = value_dtype(values.dtype)
        itemsize = self._wire_dtype.itemsize
        self._fixed_point = shared_value_bytes(ranks, itemsize, values_as) < itemsize
        self._index_bytes = index_bytes(k, values.numel())
        first_bytes = self._index_bytes + (STEP_BYTES if self._fixed_point else 0)
        self.sent_bytes = sparse_bytes(
            ranks, k, values.numel(), values.dtype, values_as, self.strategy
        )
        self._sums: Handle | None = None
        packet = self._pack_first(first_bytes)
        self._first: Handle = collectives.broadcast_async(packet, leader, f"{name}.shared.indices")
        # While the indices travel. A sum is the cheapest look at every entry: NaN and infinities
        # survive in it. A leader's are among the entries that it has selected.
        seen = values if indices is None else values.index_select(0, indices)
        self._flag = ~torch.isfinite(seen.sum())

    def advance(self) -> bool:
        """Launch the second stage if the first is done; never blocks. True once launched."""
        if self._sums is None and self._first.done():
            self._sums = self._launch_second()
        return self._sums is not None

    def done(self) -> bool:
        """Return True when ``finish`` would not block."""
        return self.advance() and self._sums is not None and self._sums.done()

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Write the sum over ranks into ``output`` (Tensor[d]) and return it."""
        if self._sums is None:
            self._sums = self._launch_second()  # blocks until the first stage is done
        message = self._sums.result()
        self.nonfinite = bool(message[-1] > 0)
        sums = message[:-1]
        if self._fixed_point:
            sums = unpack_fields(sums, self._k, self._collectives.size) * self._step
        output.zero_()
        if self.indices is not None:
            output.index_copy_(0, self.indices, sums.to(output.dtype))
        return output

    def _pack_first(self, first_bytes: int) -> torch.Tensor:
        packet = torch.empty(first_bytes, dtype=torch.uint8, device=self._values.device)
        if self.indices is None:
            return packet
        packet[: self._index_bytes] = pack_indices(self.indices, self._values.numel())
        if self._fixed_point:
            selected = self._values.index_select(0, self.indices).abs()
            largest = selected.max() if self._k else selected.new_zeros(())
            step = step_for(largest, self._collectives.size, self._weight_share)
            packet[self._index_bytes :] = step.reshape(1).view(torch.uint8)
        return packet

    def _launch_second(self) -> Handle:
        packet = self._first.result()
        if self.indices is None:
            indices = packet[: self._index_bytes]
            self.indices = unpack_indices(indices, self._k, self._values.numel())
        selected = self._values.index_select(0, self.indices).to(self._wire_dtype)
        selected.masked_fill_(self._flag, 0.0)
        if self._fixed_point:
            self._step = packet[self._index_bytes :].clone().view(torch.float32)
            integers, self.sent_values = quantize(
                selected, self._step, self._collectives.size, self._weight_share
            )
            selected = pack_fields(integers, self._collectives.size)
        message = torch.cat((selected, self._flag.to(selected.dtype).reshape(1)))
        return self._collectives.allreduce_async(message, f"{self._name}.shared.values")
