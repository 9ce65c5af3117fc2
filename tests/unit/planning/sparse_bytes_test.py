"""Bytes of sparse exchanges, and where they are worth it."""

from __future__ import annotations

import pytest
import torch

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.sparse_bytes import repeatable_exchange, sparse_saves_bytes


@pytest.mark.parametrize("strategy", ["allgather", "shared-index"])
def test_tiny_gradients_are_known_not_to_pay(strategy: str) -> None:
    """S28: a bias of 3 elements must not cost more bytes than sending it dense."""

    def saves(ranks: int, k: int, elements: int) -> bool:
        return sparse_saves_bytes(ranks, k, elements, torch.float32, "float16", strategy)

    assert not saves(2, 0, 0)
    assert not saves(1, 1, 10**6)
    assert saves(2, 10**5, 10**6)
    if strategy == "allgather":
        assert not saves(2, 1, 3) and not saves(2, 1, 1)
        assert saves(2, 10**4, 10**6) and not saves(64, 10**5, 10**6)


def test_half_gradients_pay_less_often() -> None:
    """Two bytes a value dense; sparse ones carry their index besides."""
    for dtype, saves in ((torch.float32, True), (torch.bfloat16, False)):
        assert sparse_saves_bytes(2, 500, 1000, dtype, "float32", "allgather") == saves


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="strategy='ring'"):
        sparse_saves_bytes(2, 1, 10, torch.float32, "float16", "ring")


def test_everything_travels_dense() -> None:
    """CF 1 asks for the whole gradient: it comes unrounded, whatever the bytes."""
    for strategy in ("allgather", "shared-index"):
        assert not sparse_saves_bytes(2, 1000, 1000, torch.float32, "float16", strategy)


def test_a_fixed_factor_has_an_exchange_that_does_not_depend_on_timing() -> None:
    """Few ranks gather their own choice; among many that would cost several times the bytes."""
    for cf in (2.0, 10.0, 100.0, 1e6):
        chosen = [repeatable_exchange(ranks, cf, "float16") for ranks in range(2, 65)]
        assert chosen[0] == "allgather" and chosen[-1] == "shared-index"
        assert chosen == sorted(chosen)  # it changes once
