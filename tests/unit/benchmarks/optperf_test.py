"""The benchmark of the best split: its table and its cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.optperf import main


def test_a_small_run_prints_a_table_and_writes_its_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy.optimize", reason="the linear program is solved by scipy")
    path = tmp_path / "cases.json"
    main(["--ranks", "3,50", "--instances", "2", "--repeats", "3", "--json", str(path)])
    assert "integer gap" in capsys.readouterr().out
    cases = json.loads(path.read_text())
    assert [case["ranks"] for case in cases] == [3, 50]
    for case in cases:
        assert min(case[f"{part}seconds"] for part in ("", "control_", "real_", "lp_")) > 0
        assert case["gap"] < 1e-9 and 0 <= case["integer_gap"] < 0.1
