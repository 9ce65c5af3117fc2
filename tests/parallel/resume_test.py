"""A job that is killed in mid-epoch goes on, also on other ranks, and sees every sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.launch import LaunchFailedError, run_ranks
from tests.parallel.resume_ranks import SAMPLES, path

TRAIN = "tests.parallel.resume_ranks:train"


@pytest.mark.parametrize(
    ("ranks", "later_ranks", "workers", "stop_after"),
    [(2, 2, 2, 3), (2, 3, 0, 2), (3, 1, 0, 1)],
)
def test_every_sample_once_over_both_jobs(
    tmp_path: Path, ranks: int, later_ranks: int, workers: int, stop_after: int
) -> None:
    """A28: save, kill and resume; loader workers had drawn further than training had come."""
    first: dict[str, Any] = {
        "folder": str(tmp_path),
        "workers": workers,
        "stop_after": stop_after,
        "saved_by": None,
    }
    # Every rank kills itself; its loader workers may stay until the launch is cleaned up.
    with pytest.raises(LaunchFailedError):
        run_ranks(TRAIN, ranks, "mpirun", first, timeout_seconds=60)
    saved = [torch.load(path(str(tmp_path), rank), weights_only=True) for rank in range(ranks)]
    used = [index for one in saved for index in one["used"]]
    assert 0 < len(used) < SAMPLES and len(set(used)) == len(used)
    later = first | {"stop_after": None, "saved_by": ranks}
    results = run_ranks(TRAIN, later_ranks, "mpirun", later, timeout_seconds=100)
    used += [index for own in results for index in own]
    assert sorted(used) == list(range(SAMPLES))
