"""Bytes of an exchange."""

from __future__ import annotations

import pytest

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.cost_model import allgather_bytes, dense_bytes


def test_formulas() -> None:
    assert dense_bytes(4, 1000) == 6000.0
    assert dense_bytes(4, 1000, itemsize=2) == 3000.0
    assert dense_bytes(1, 1000) == 0.0
    assert allgather_bytes(4, 600) == 1800.0
    assert allgather_bytes(1, 600) == 0.0


def test_allgather_loses_to_dense_below_n_w_over_8() -> None:
    """w bytes a packed element: break-even at CF = n w / 8."""
    ranks, elements, width = 16, 10**6, 6
    for cf, wins in ((11, False), (13, True)):
        packed = width * round(elements / cf)
        assert (allgather_bytes(ranks, packed) < dense_bytes(ranks, elements)) is wins


def test_malformed() -> None:
    with pytest.raises(ConfigurationError, match="ranks=0"):
        dense_bytes(0, 1)
    with pytest.raises(ConfigurationError, match="packed_bytes=-1"):
        allgather_bytes(2, -1)
