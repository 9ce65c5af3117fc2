"""The examples under real launchers, with settings small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_hetero.planning.cost_model import dense_bytes
from hvd_hetero.telemetry.records import WindowRecord
from hvd_hetero.telemetry.report import read_records
from tests.parallel.launch import REPOSITORY, launch, launch_environment

DEMO = REPOSITORY / "examples" / "mixed_cluster.py"
MINIMAL = REPOSITORY / "examples" / "minimal.py"
RUNS = ["horovod", "balance", "compression", "both"]
FIELDS = {
    "step_seconds",
    "bytes_per_step",
    "seconds_to_target",
    "accuracy",
    "local_batches",
    "cf",
}


def test_demo_trains_four_times_and_writes_its_files(tmp_path: Path) -> None:
    """A rank that is three times slower gets the smaller batch, and bytes shrink."""
    steps = 40
    arguments = ["--slowdown", "1,3", "--global-batch-size", "32", "--steps", str(steps)]
    arguments += ["--seeds", "1", "--target", "0.5", "--output", str(tmp_path)]
    result = launch(DEMO, 2, launcher="horovodrun-gloo", args=arguments, timeout_seconds=200)

    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == RUNS
    assert all(entry.keys() >= FIELDS for entry in summary.values())
    assert summary["horovod"]["local_batches"] == [16, 16]
    for name in ("balance", "both"):
        fast, slow = summary[name]["local_batches"]
        assert fast + slow == 32
        assert fast > slow
    assert summary["balance"]["step_seconds"] < summary["horovod"]["step_seconds"]

    elements = 64 * 256 + 256 + 256 * 512 + 512 + 512 * 10 + 10
    dense = dense_bytes(2, elements)
    assert summary["horovod"]["bytes_per_step"] == dense
    assert summary["balance"]["bytes_per_step"] == pytest.approx(dense)
    assert summary["both"]["bytes_per_step"] < dense
    assert summary["horovod"]["cf"] is None
    assert all(0.3 < entry["accuracy"] <= 1 for entry in summary.values())

    windows = [r for r in read_records(tmp_path / "records.jsonl") if isinstance(r, WindowRecord)]
    assert [window.step for window in windows] == [10, 20, 30, 40] * 4
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    output = result.ranks[0].stdout
    for words in ("ranks sleep", "stock Horovod", "compression only", f"step {steps}/{steps}"):
        assert words in output
    assert result.ranks[1].stdout == ""


def test_demo_refuses_a_slowdown_of_another_length(tmp_path: Path) -> None:
    """One sentence, and no rank goes on."""
    arguments = ["--slowdown", "1,2,3", "--output", str(tmp_path)]
    result = launch(DEMO, 2, launcher="mpirun", args=arguments, check=False)
    assert result.returncode != 0
    assert [rank.exit_code for rank in result.ranks] == [2, 2]
    assert result.output.count("--slowdown 1,2,3: 3 factors for 2 ranks") == 1
    assert "Traceback" not in result.output


def test_minimal_example_alone() -> None:
    """Without a launcher it is plain training on one process."""
    done = subprocess.run(
        [sys.executable, str(MINIMAL)],
        env=launch_environment(os.environ, None),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert _final_accuracy(done.stdout) > 0.8


def test_minimal_example_on_two_ranks() -> None:
    result = launch(MINIMAL, 2, launcher="mpirun", timeout_seconds=200)
    assert _final_accuracy(result.ranks[0].stdout) > 0.8
    assert result.ranks[1].stdout == ""


def _final_accuracy(output: str) -> float:
    last = output.strip().splitlines()[-1]
    assert last.startswith("epoch 9: test accuracy ")
    return float(last.split()[4].rstrip(","))
