"""A16: which rank is slow, and in what, from real steps over real collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.timing_ranks import SLOW_RANK, USUAL_SECONDS

TRAIN = "tests.parallel.timing_ranks:train"


@pytest.mark.parametrize(
    ("part", "slow_seconds", "workers"),
    [
        ("input", 15e-3, 0),
        ("input", 100e-3, 2),  # what workers do beside training is no wait
        ("forward", 15e-3, 0),
        ("backward", 15e-3, 0),
    ],
)
def test_a_slow_rank_and_its_part_are_named(
    tmp_path: Path, part: str, slow_seconds: float, workers: int
) -> None:
    """Also where exchanges begin within backward: the fast rank's waiting is not its work."""
    seen = run_ranks(
        TRAIN,
        2,
        "mpirun",
        {
            "part": part,
            "slow_seconds": slow_seconds,
            "workers": workers,
            "folder": str(tmp_path),
        },
        timeout_seconds=100,
    )[0]
    parts = seen["parts"]
    # 8 samples each; of two loader workers each is asked for every other batch.
    extra = 8 * (slow_seconds - USUAL_SECONDS) / (workers or 1)
    own = [seconds[SLOW_RANK] - seconds[1 - SLOW_RANK] for seconds in (parts[part], parts["wait"])]
    assert own[0] > 0.3 * extra, seen
    assert own[1] < -0.3 * extra, seen  # the other one waits for it
    assert seen["exchanges_in_backward"] > 0
    assert [(slow["rank"], slow["part"]) for slow in seen["slow_ranks"]] == [(SLOW_RANK, part)], (
        seen
    )
    for rank in (0, 1):
        named = sum(parts[name][rank] for name in ("input", "forward", "backward", "compress"))
        assert named == pytest.approx(parts["compute"][rank], rel=0.1)
    assert 0.0 < seen["overhead_seconds"] < seen["step_seconds"]
