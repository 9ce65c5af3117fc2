"""Wrapping an optimizer under real launchers; each scenario names its rule or report.

All scenarios for one launcher and number of ranks run in one launch.
"""

from __future__ import annotations

import pytest

from tests.parallel.launch import Launcher, start_ranks
from tests.parallel.seam_launch import check_scenario, parameters
from tests.parallel.seam_wrapping_ranks import SCENARIOS

RANKS = "tests.parallel.seam_wrapping_ranks:run"


@pytest.mark.parametrize(("launcher", "ranks", "name"), parameters(SCENARIOS))
def test_wrapping(launcher: Launcher, ranks: int, name: str) -> None:
    """S06 to S12, S14, S15, S17 to S20, S22 to S24; rules 1, 2, 7, 8, 10, 13: see the scenario."""
    check_scenario(RANKS, launcher, ranks, name)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo"])
def test_join_is_refused(launcher: Launcher) -> None:
    """A04, S38, rule 8: where one rank calls hvd.join() while another steps compressed, the call
    raises a sentence that names what to use instead, and the job ends."""
    result = start_ranks(
        "tests.parallel.seam_join_ranks:join_early", 2, launcher, timeout_seconds=90
    )
    assert not result.ok
    assert not result.survivors
    assert "UnsupportedError: rank 1: hvd.join()" in result.ranks[1].traceback, result.describe()
    assert "data_loader" in result.ranks[1].traceback
    assert "hvd.join()" in result.output  # and is what the user sees
    assert result.seconds < 60
