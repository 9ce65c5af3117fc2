"""Launches scenarios of the seam, once for each launcher and number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parallel.launch import Launcher, LaunchFailedError, run_ranks
from tests.parallel.seam_tools import Scenario

_LAUNCHES: tuple[tuple[Launcher, int], ...] = (("mpirun", 1), ("mpirun", 2), ("horovodrun-gloo", 2))


def parameters(scenarios: dict[str, Scenario]) -> list[Any]:
    """Parameters ``(launcher, ranks, name)``: every scenario under every launch it is made for."""
    return [
        pytest.param(launcher, ranks, name, id=f"{launcher.replace('-', '_')}-{ranks}-{name}")
        for launcher, ranks in _LAUNCHES
        for name, one in scenarios.items()
        if ranks in one.ranks
    ]


@functools.cache
def _outcomes(function: str, launcher: Launcher, ranks: int) -> list[dict[str, str]] | Exception:
    try:
        return run_ranks(
            function,
            ranks,
            launcher,
            env={"HVD_HETERO_LOG": ""},
            timeout_seconds=240,
        )
    except LaunchFailedError as error:
        return error  # every scenario of the launch fails, but it is not tried again for each


def check_scenario(function: str, launcher: Launcher, ranks: int, name: str) -> None:
    """Fail with every rank's traceback unless the scenario passed on all ranks."""
    outcomes = _outcomes(function, launcher, ranks)
    if isinstance(outcomes, Exception):
        raise outcomes
    failed = [
        f"rank {rank}:\n{outcome[name]}" for rank, outcome in enumerate(outcomes) if outcome[name]
    ]
    assert not failed, "\n".join(failed)
