"""Compression on real ranks, with real launchers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.compression_ranks import SCENARIOS
from tests.parallel.launch import BOTH_LAUNCHERS, Launcher, run_ranks
from tests.parallel.seam_launch import check_scenario, parameters

RANKS = "tests.parallel.compression_ranks"

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(("launcher", "ranks", "name"), parameters(SCENARIOS))
def test_compression(launcher: Launcher, ranks: int, name: str) -> None:
    """One test a scenario; its docstring says what it holds."""
    check_scenario(f"{RANKS}:run", launcher, ranks, name)


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("mpirun", {"cf": 20}),
        ("horovodrun-gloo", {"cf": 20, "exchange": "shared-index"}),
        ("horovodrun-gloo", {"cf": 50, "values": "float32"}),
    ],
)
def test_resume_is_bit_equal(launcher: Launcher, options: dict[str, Any], tmp_path: Path) -> None:
    """S33, A14: ten steps are five, new processes and five more, bit by bit, residuals too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    function = f"{RANKS}:train_and_save"

    def run(folder: Path, first: int, last: int) -> None:
        kwargs = {"folder": str(folder), "first": first, "last": last, "options": options}
        run_ranks(function, 2, launcher, kwargs)

    run(whole, 0, 26)
    run(parts, 0, 13)  # in the middle of a window
    run(parts, 13, 26)
    for rank in range(2):
        one = torch.load(whole / f"26.{rank}.pt", weights_only=True)
        two = torch.load(parts / f"26.{rank}.pt", weights_only=True)
        for name, tensor in one["model"].items():
            assert torch.equal(tensor, two["model"][name]), name
        assert one["hetero"]["residuals"].keys() == two["hetero"]["residuals"].keys()
        for name, tensor in one["hetero"]["residuals"].items():
            assert tensor.any() and torch.equal(tensor, two["hetero"]["residuals"][name]), name


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_ranks_loses_nothing(before: int, after: int, tmp_path: Path) -> None:
    """S33: residuals are shared out; their sum over ranks, which counts, stays what it was."""
    function = f"{RANKS}:train_and_save"

    def run(ranks: int, first: int, last: int) -> list[Any]:
        kwargs = {"folder": str(tmp_path), "first": first, "last": last, "options": {"cf": 20}}
        return run_ranks(function, ranks, BOTH_LAUNCHERS[0], kwargs)

    run(before, 0, 5)
    files = [torch.load(file, weights_only=True) for file in sorted(tmp_path.glob("5.*.pt"))]
    assert len(files) == before
    saved = sum(
        torch.cat([r.double().flatten() for r in file["hetero"]["residuals"].values()])
        for file in files
    )
    starts = run(after, 5, 8)
    for norm, total in starts:
        assert norm == pytest.approx(float(saved.norm()), rel=1e-6)
        assert total == pytest.approx(float(saved.sum()), rel=1e-4, abs=1e-6)


def test_alternating_exchanges_do_not_mix_in_horovods_cache() -> None:
    """S29: dense, allgather, dense, shared-index, ... with Horovod's response cache and without."""
    kwargs = {"steps": 20}
    cached = run_ranks(f"{RANKS}:alternate", 2, "mpirun", kwargs)
    uncached = run_ranks(
        f"{RANKS}:alternate", 2, "mpirun", kwargs, env={"HOROVOD_CACHE_CAPACITY": "0"}
    )
    assert cached == uncached
    assert cached[0] == cached[1]
