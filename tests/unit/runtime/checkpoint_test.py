"""Residuals out of checkpoints of any number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.runtime.checkpoint import State, state_for


def saved(rank: int, ranks: int, **changed: Any) -> State:
    generator = torch.Generator().manual_seed(rank)
    names = ["a", "b"] if rank % 3 else ["a"]  # a rank may hold nothing back of a parameter
    residuals = {name: torch.randn(4, generator=generator, dtype=torch.float64) for name in names}
    state = {"version": 1, "rank": rank, "ranks": ranks, "steps": 7, "residuals": residuals}
    return {**state, "exchange": {}, "compression": None, **changed}


def total(residuals: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    zero = torch.zeros(4, dtype=torch.float64)
    return sum((one[name] for one in residuals if name in one), zero)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_sum_over_ranks_stays(before: int, after: int, random: Any) -> None:
    """S33: whatever the two numbers of ranks, what is held back is neither lost nor doubled."""
    states = [saved(rank, before) for rank in range(before)]
    random.shuffle(states)
    loaded = [state_for(states, rank, after)[1] for rank in range(after)]
    for name in ("a", "b"):
        old = total([state["residuals"] for state in states], name)
        torch.testing.assert_close(total(loaded, name), old)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 8))
def test_equal_ranks_keep_their_own(ranks: int, rank: int) -> None:
    """Bit-equal resume: alone or picked out of the list, a rank goes on from its own state."""
    rank %= ranks
    states = [saved(other, ranks) for other in range(ranks)]
    for given_states in (states, states[::-1], states[rank]):
        state, residuals = state_for(given_states, rank, ranks)
        assert state["rank"] == rank
        assert residuals.keys() == states[rank]["residuals"].keys()
        assert all(torch.equal(r, states[rank]["residuals"][n]) for n, r in residuals.items())


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([], "states of ranks []"),
        ({}, "version 1 expected"),
        ([1], "version 1 expected"),
        (saved(0, 3), "saved by a job of 3 ranks, to a job of 2"),
        (saved(1, 2), "state of rank 1 was given to rank 0"),
        (saved(0, 2, version=9), "version 1 expected"),
        ([saved(0, 3), saved(1, 3)], "each once"),
        ([saved(0, 3), saved(1, 3), saved(1, 3)], "each once"),
        ([saved(0, 2), saved(1, 2, steps=8)], "[7, 8] steps"),
    ],
)
def test_what_does_not_fit_is_refused(states: Any, words: str) -> None:
    """Nothing is guessed from states that are missing, doubled or of two checkpoints."""
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        state_for(states, 0, 2)
