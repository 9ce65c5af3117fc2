"""Steps of a wrapped optimizer under real launchers; each scenario names its rule or report.

All scenarios for one launcher and number of ranks run in one launch.
"""

from __future__ import annotations

import pytest

from tests.parallel.launch import Launcher
from tests.parallel.seam_launch import check_scenario, parameters
from tests.parallel.seam_steps_ranks import SCENARIOS

RANKS = "tests.parallel.seam_steps_ranks:run"


@pytest.mark.parametrize(("launcher", "ranks", "name"), parameters(SCENARIOS))
def test_steps(launcher: Launcher, ranks: int, name: str) -> None:
    """S01 to S05, S08, S13, S16, S34; rules 2 to 6, 8, 9, 11, 12: see the scenario's docstring."""
    check_scenario(RANKS, launcher, ranks, name)
