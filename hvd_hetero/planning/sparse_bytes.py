"""Bytes of the sparse exchanges, and where they are fewer than those of a dense one."""

from __future__ import annotations

import math

import torch

from hvd_hetero.compression.fixed_point import words_for
from hvd_hetero.compression.topk import value_dtype
from hvd_hetero.compression.wire import index_bytes, packed_bytes
from hvd_hetero.errors import check_choice
from hvd_hetero.planning.cost_model import (
    allgather_bytes,
    dense_bytes,
    shared_index_bytes,
    shared_value_bytes,
)

STEP_BYTES = 4  # of the fixed-point step that travels with the indices

# An allgather carries every rank's own largest entries, so its residual is smaller at equal k.
_WORTH_OF_OWN_CHOICE = 2.0


def sparse_bytes(
    ranks: int, k: int, elements: int, dtype: torch.dtype, values_as: str, strategy: str
) -> float:
    """Return the bytes that a rank receives of one bucket, headers included.

    Args:
        ranks: number of ranks.
        k: entries kept out of ``elements``.
        elements: d, the length of the bucket.
        dtype: of the gradients.
        values_as: one of ``wire.VALUE_FORMATS``.
        strategy: "allgather" or "shared-index".

    Raises:
        ConfigurationError: an argument is out of range.
        UnsupportedError: ``dtype`` is not real floating point.
    """
    check_choice("strategy", strategy, ("allgather", "shared-index"))
    if strategy == "allgather":
        return allgather_bytes(ranks, packed_bytes(k, elements, dtype, values_as))
    itemsize = value_dtype(dtype).itemsize
    first_bytes, words, word_bytes = index_bytes(k, elements), k, itemsize
    if shared_value_bytes(ranks, itemsize, values_as) < itemsize:  # as fixed-point numbers
        first_bytes, words, word_bytes = first_bytes + STEP_BYTES, words_for(k, ranks), 8
    # One word more: the count of ranks that are not finite.
    return shared_index_bytes(ranks, first_bytes, words + 1, word_bytes)


def sparse_saves_bytes(
    ranks: int, k: int, elements: int, dtype: torch.dtype, values_as: str, strategy: str
) -> bool:
    """Return True when ``strategy`` puts fewer bytes on the wire than a dense allreduce.

    Never for k = elements: who sends everything wants it unrounded. Arguments and errors as of
    ``sparse_bytes``; a dense allreduce would send the gradients in ``dtype``.
    """
    sparse = sparse_bytes(ranks, k, elements, dtype, values_as, strategy)
    return k < elements and sparse < dense_bytes(ranks, elements, dtype.itemsize)


def repeatable_exchange(ranks: int, cf: float, values_as: str) -> str:
    """Return the exchange for a factor that is fixed, so that a run repeats whatever its timing.

    An allgather, unless a rank receives more than twice the bytes of a shared-index exchange.

    Args:
        ranks: number of ranks.
        cf: compression factor, at least 1.
        values_as: one of ``wire.VALUE_FORMATS``.
    """
    k = 10_000  # headers do not matter
    own, shared = (
        sparse_bytes(ranks, k, math.ceil(k * cf), torch.float32, values_as, strategy)
        for strategy in ("allgather", "shared-index")
    )
    return "allgather" if own <= _WORTH_OF_OWN_CHOICE * shared else "shared-index"
