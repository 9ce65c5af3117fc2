"""Bytes an exchange puts on the wire, per rank and step, in one direction."""

from __future__ import annotations

from hvd_hetero.errors import check_int


def dense_bytes(ranks: int, elements: int, itemsize: int = 4) -> float:
    """Return the bytes a rank sends in a ring allreduce of ``elements`` values.

    2 (n-1)/n * itemsize * d: reduce-scatter and allgather, each (n-1) chunks of d/n values.
    Raises ConfigurationError for ranks < 1, elements < 0 or itemsize < 1.
    """
    ranks = check_int("ranks", ranks, minimum=1)
    elements = check_int("elements", elements, minimum=0)
    itemsize = check_int("itemsize", itemsize, minimum=1)
    return 2 * (ranks - 1) * elements * itemsize / ranks


def allgather_bytes(ranks: int, packed_bytes: int) -> float:
    """Return the bytes a rank receives in an allgather of ``packed_bytes`` from each rank.

    (n-1) * packed_bytes, headers included when ``packed_bytes`` includes them.
    Raises ConfigurationError for ranks < 1 or packed_bytes < 0.
    """
    ranks = check_int("ranks", ranks, minimum=1)
    packed_bytes = check_int("packed_bytes", packed_bytes, minimum=0)
    return float((ranks - 1) * packed_bytes)
