"""The compression benchmark: its cases, and that it notices a wrong selection."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.compress import Textbook, is_exact
from benchmarks.tables import format_table
from hvd_hetero.compression.topk import Selector, SparseGradient
from tests.unit.benchmarks.small_run import run_benchmark


def test_a_small_run_prints_a_table_and_writes_its_cases(tmp_path: Path) -> None:
    printed, cases = run_benchmark(
        "compress.py",
        tmp_path,
        *("--elements", "100000", "--repeats", "3", "--warm-up", "2"),
        timeout_seconds=120,
    )
    assert "times faster" in printed
    assert [case["cf"] for case in cases] == [10, 100, 1000]
    for case in cases:
        assert case["exact"] is True and case["elements"] == 100_000
        assert min(case[f"{part}seconds"] for part in ("", "memcpy_", "reference_")) > 0
        assert 2.5 < case["bytes_per_element"] < 4.2


def test_a_wrong_selection_is_noticed() -> None:
    a = torch.tensor([1.0, -5.0, 3.0, 3.0, 2.0])
    right = Selector().select(a, 2)
    assert is_exact(right, a)
    assert is_exact(SparseGradient.gather(a, torch.tensor([1, 3])), a), "another of two equal ones"
    assert not is_exact(SparseGradient.gather(a, torch.tensor([1, 4])), a)
    assert not is_exact(SparseGradient(right.values + 1, right.indices, 5), a)


def test_the_textbook_keeps_what_it_does_not_send() -> None:
    textbook = Textbook(3)
    assert textbook.step(torch.tensor([1.0, 2.0, 3.0]), 1).to_dense().tolist() == [0, 0, 3]
    assert textbook.step(torch.tensor([0.0, 2.0, 3.0]), 1).to_dense().tolist() == [0, 4, 0]
    assert textbook.residual.tolist() == [1, 0, 3]


@pytest.mark.parametrize("rows", [[], [["a", "1"], ["long", "2.50"]]])
def test_tables_are_aligned(rows: list[list[str]]) -> None:
    lines = format_table(["name", "value"], rows).splitlines()
    assert len(lines) == 2 + len(rows) and len({len(line) for line in lines}) == 1
