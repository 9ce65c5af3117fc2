"""One flat uint8 tensor for a sparse gradient, and back.

Layout, in this order, little-endian as torch holds it in memory:

    counts   int32  [ceil(d / 65536)]   entries in each block of 65536 elements
    indices  int16  [k]                 index within the block, minus 32768
    padding  zeros                      up to a multiple of the value's size
    values   float32 or float64 [k]     exact

The size is a multiple of the value's size, so packets of equal k can lie one behind the other in a
gathered tensor and each can still be viewed in place. Six bytes an entry for float32, against
twelve for an int64 index and a float32 value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_hetero.compression.topk import SparseGradient, value_dtype
from hvd_hetero.errors import ConfigurationError, check_int

BLOCK_ELEMENTS = 1 << 16
_BLOCK_BITS = 16
_HALF_BLOCK = BLOCK_ELEMENTS // 2
_COUNT_BYTES = 4
_INDEX_BYTES = 2


def packed_bytes(k: int, elements: int, dtype: torch.dtype) -> int:
    """Return the exact size of a packet of ``k`` out of ``elements`` entries, padding included.

    Args:
        k: number of entries, in [0, elements].
        elements: d, the length of the dense gradient; may exceed 2**31.
        dtype: dtype of the gradient; half types travel as float32.

    Raises:
        ConfigurationError: ``k`` or ``elements`` is out of range.
        UnsupportedError: ``dtype`` is not real floating point.
    """
    elements = check_int("elements", elements, minimum=0)
    k = check_int("k", k, minimum=0, maximum=elements)
    return _values_at(k, elements, dtype) + k * value_dtype(dtype).itemsize


def pack(sparse: SparseGradient) -> Tensor:
    """Return ``sparse`` as one contiguous uint8 tensor [packed_bytes] on the same device.

    The indices must be ascending. Nothing is rounded, and a GPU need not wait for anything.
    """
    k, elements, dtype = sparse.k, sparse.elements, sparse.values.dtype
    indices = sparse.indices
    packed = torch.zeros(packed_bytes(k, elements, dtype), dtype=torch.uint8, device=indices.device)
    counts_bytes = _blocks(elements) * _COUNT_BYTES
    values_at = _values_at(k, elements, dtype)
    # Ascending indices: a binary search for the block ends replaces a pass over all entries.
    block_ends = torch.arange(1, _blocks(elements) + 1, device=indices.device) << _BLOCK_BITS
    entries_up_to = torch.searchsorted(indices, block_ends)
    counts = torch.diff(entries_up_to, prepend=entries_up_to.new_zeros(1))
    packed[:counts_bytes].view(torch.int32).copy_(counts)
    in_block = (indices & (BLOCK_ELEMENTS - 1)) - _HALF_BLOCK
    indices_end = counts_bytes + k * _INDEX_BYTES
    packed[counts_bytes:indices_end].view(torch.int16).copy_(in_block)
    packed[values_at:].view(value_dtype(dtype)).copy_(sparse.values)
    return packed


def unpack(packed: Tensor, elements: int, dtype: torch.dtype) -> SparseGradient:
    """Return the sparse gradient in ``packed``, which may be a slice of a gathered tensor.

    Args:
        packed: uint8 [packed_bytes(k, elements, dtype)] of one rank.
        elements: d, the length of the dense gradient.
        dtype: dtype of the gradient, and of the values returned.

    Raises:
        ConfigurationError: no k gives a packet of this size, so it was packed for another length
            or dtype.
    """
    k = _entries(packed, elements, dtype)
    wire_dtype = value_dtype(dtype)
    if packed.storage_offset() % wire_dtype.itemsize:
        packed = packed.clone()  # a view of another dtype needs an aligned start
    counts_bytes = _blocks(elements) * _COUNT_BYTES
    counts = packed[:counts_bytes].view(torch.int32).to(torch.int64)
    blocks = torch.arange(_blocks(elements), dtype=torch.int64, device=packed.device)
    starts = torch.repeat_interleave(blocks << _BLOCK_BITS, counts, output_size=k)
    in_block = packed[counts_bytes : counts_bytes + k * _INDEX_BYTES].view(torch.int16)
    indices = starts.add_(in_block).add_(_HALF_BLOCK)
    values = packed[_values_at(k, elements, dtype) :].view(wire_dtype).to(dtype, copy=True)
    return SparseGradient(values, indices, elements)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK_ELEMENTS)


def _values_at(k: int, elements: int, dtype: torch.dtype) -> int:
    """Return the offset of the values: behind counts and indices, rounded up to their size."""
    value_bytes = value_dtype(dtype).itemsize
    used = _blocks(elements) * _COUNT_BYTES + k * _INDEX_BYTES
    return -(-used // value_bytes) * value_bytes


def _entries(packed: Tensor, elements: int, dtype: torch.dtype) -> int:
    """Return k. The padding is shorter than an entry, so the size alone determines it."""
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ConfigurationError(
            f"packed of dtype {packed.dtype} and shape {tuple(packed.shape)}: "
            "must be a flat torch.uint8 tensor"
        )
    body = packed.numel() - _blocks(elements) * _COUNT_BYTES
    k = body // (value_dtype(dtype).itemsize + _INDEX_BYTES)
    if not 0 <= k <= elements or packed_bytes(k, elements, dtype) != packed.numel():
        raise ConfigurationError(
            f"packed has {packed.numel()} bytes, which no number of entries out of {elements} of "
            f"{dtype} gives: pack and unpack must be told the same length and dtype"
        )
    return k
