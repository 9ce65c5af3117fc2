"""Batches under real launchers: minimum, weights, samplers, layers that talk across ranks.

All scenarios for one launcher and number of ranks run in one launch.
"""

from __future__ import annotations

import pytest

from tests.parallel.launch import Launcher
from tests.parallel.seam_data_ranks import SCENARIOS
from tests.parallel.seam_launch import check_scenario, parameters

RANKS = "tests.parallel.seam_data_ranks:run"


@pytest.mark.parametrize(("launcher", "ranks", "name"), parameters(SCENARIOS))
def test_batches(launcher: Launcher, ranks: int, name: str) -> None:
    """S36, S39, S40, S42; A02, A03, A19: see the scenario's docstring."""
    check_scenario(RANKS, launcher, ranks, name)
