"""benchmarks/exchange.py: its cases, measured on loopback and simulated from a saved model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_hetero.planning.cost_curve import CostCurve
from hvd_hetero.planning.cost_model import CostModel, LocalCosts

REPOSITORY = Path(__file__).resolve().parents[3]
STRATEGIES = {"dense", "allgather", "shared-index"}


def run(tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    script = REPOSITORY / "benchmarks" / "exchange.py"
    output = tmp_path / "cases.json"
    done = subprocess.run(
        [sys.executable, str(script), *arguments, "--json", str(output)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text()), done.stdout


@pytest.fixture
def saved_model(tmp_path: Path) -> str:
    curve = CostCurve((1000, 1_000_000), (1e-3, 50e-3))
    model, local = CostModel(8, curve, curve, curve), LocalCosts(1e-9, 1e-8, 1e-8, 1e-9)
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model": model.to_dict(), "local": local.to_dict()}))
    return str(path)


def test_simulation_up_to_4096_ranks(tmp_path: Path, saved_model: str) -> None:
    """DESIGN: an allgather grows with the ranks and loses to dense; shared indices hardly grow."""
    arguments = ("--simulate", "--model", saved_model, "--elements", "1000000", "--cfs", "10,100")
    cases, text = run(tmp_path, *arguments)
    assert "measured with 8 ranks" in text
    by_key = {(c["strategy"], c["ranks"], c["cf"]): c for c in cases}
    assert {strategy for strategy, _, _ in by_key} == STRATEGIES
    assert max(ranks for _, ranks, _ in by_key) == 4096
    dense = by_key["dense", 4096, None]
    assert by_key["allgather", 4096, 100.0]["bytes_per_rank"] > dense["bytes_per_rank"]
    assert by_key["allgather", 4096, 100.0]["predicted_seconds"] > dense["predicted_seconds"]
    shared = [by_key["shared-index", ranks, 100.0]["bytes_per_rank"] for ranks in (64, 512)]
    assert shared[1] < 1.2 * shared[0]
    assert all(case["simulated"] for case in cases)


@pytest.mark.parallel
def test_cases_on_loopback(tmp_path: Path) -> None:
    """Where there are no shaped links it says so, and bytes are accounted."""
    arguments = ["--loopback", "--ranks", "2", "--elements", "20000", "--cfs", "10,100"]
    model = tmp_path / "model.json"
    cases, text = run(tmp_path, *arguments, "--rounds", "2", "--save-model", str(model))
    assert "on loopback, without shaped links" in text
    assert "dense again" in text
    assert {case["strategy"] for case in cases} == STRATEGIES | {"dense again"}
    for case in cases:
        assert case["ranks"] == 2
        assert case["seconds"] > 0
        assert case["predicted_seconds"] > 0
        assert case["bytes_per_rank"] == case["accounted_bytes_per_rank"] > 0
        assert case["bytes_from"] == "accounted"
    assert CostModel.from_dict(json.loads(model.read_text())["model"]).ranks == 2
