"""Ranks that differ: the message names what, and both values."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from hvd_hetero.errors import RankMismatchError
from hvd_hetero.runtime.agreement import verify_alike


def message_of(*values: dict[str, Any]) -> str:
    with pytest.raises(RankMismatchError) as caught:
        verify_alike(values)
    return str(caught.value)


def test_equal_values_pass() -> None:
    verify_alike([{"cf": 10.0, "more": {"a": [1, 2]}}] * 3)
    verify_alike([{}])


def test_names_option_ranks_and_both_values() -> None:
    """S46: option, both values, which ranks, and the usual cause."""
    text = message_of({"a": 1, "cf": 10.0}, {"a": 1, "cf": 10.0}, {"a": 1, "cf": 100.0})
    assert text.startswith("cf differs between ranks: rank 0 has 10.0, rank 2 has 100.0.")
    assert "-x NAME" in text


def test_absent_values_are_named() -> None:
    assert "b differs between ranks: rank 0 has '(absent)', rank 1 has 2" in message_of(
        {"a": 1}, {"a": 1, "b": 2}
    )
    assert "rank 0 has 2, rank 1 has '(absent)'" in message_of({"b": 2}, {})


def test_options_within_options_are_named() -> None:
    """Only the one that differs is shown, however many there are."""
    many = {f"option_{number}": "x" * 50 for number in range(20)}
    text = message_of({"balancer": {**many, "seed": 1}}, {"balancer": {**many, "seed": 2}})
    assert text.startswith("balancer.seed differs between ranks: rank 0 has 1, rank 1 has 2.")
    assert "balancer differs between ranks: rank 0 has None" in message_of(
        {"balancer": None}, {"balancer": many}
    )


def test_long_values_are_cut() -> None:
    assert len(message_of({"a": "x" * 1000}, {"a": "y" * 1000})) < 700
