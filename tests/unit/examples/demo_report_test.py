"""The demo's end: medians over seeds, a table and a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_report import compare, draw, format_table, summarise, windows_by_run
from demo_training import RUNS, Run

from hvd_hetero.telemetry.records import ConfigurationRecord, Record, WindowRecord

TARGET = 0.9


def _window(step: int, sent: float, cf: float | None) -> WindowRecord:
    return WindowRecord(
        step=step,
        step_seconds=0.1,
        compute_seconds=(0.1, 0.1),
        wait_seconds=(0.0, 0.0),
        local_batches=(6, 2),
        global_batch_size=8,
        cf=cf,
        gain=None if cf is None else 0.8,
        strategy="dense",
        bytes_per_step=sent,
    )


def _records(seeds: int) -> list[Record]:
    records: list[Record] = []
    for seed in range(seeds):
        for name in RUNS:
            # As written: the demo's mark, the library's own configuration, its windows.
            records.append(ConfigurationRecord({}, 2, {"run": name, "seed": seed}))
            records.append(ConfigurationRecord({}, 2, {"bucket_bytes": 1}))
            records += [_window(10, 100.0 + seed, None), _window(20, 300.0 + seed, 10.0)]
    return records


def _run(name: str, seed: int, accuracies: tuple[float, float]) -> Run:
    step = 0.1 if name == "horovod" else 0.05
    seconds = [step + seed * 0.001] * 20
    evaluations = [(10, sum(seconds[:10]), accuracies[0]), (20, sum(seconds), accuracies[1])]
    return Run(name, seed, 30, seconds, evaluations, (6, 2))


def test_windows_belong_to_the_mark_before_them() -> None:
    windows = windows_by_run(_records(2))
    assert set(windows) == {(name, seed) for name in RUNS for seed in (0, 1)}
    assert [window.bytes_per_step for window in windows["both", 1]] == [101.0, 301.0]


def test_medians_over_seeds() -> None:
    accuracies = [(0.95, 0.97), (0.5, 0.92), (0.5, 0.6)]  # the third never reaches the target
    runs = [_run(name, seed, accuracies[seed]) for seed in range(3) for name in RUNS]
    summary = summarise(runs, windows_by_run(_records(3)), TARGET)
    assert list(summary) == list(RUNS)
    stock = summary["horovod"]
    assert stock["step_seconds"] == pytest.approx(0.101)
    assert stock["bytes_per_step"] == 201.0  # 200, 201, 202: means over all windows
    assert stock["accuracy"] == 0.92
    assert stock["seconds_to_target"] == pytest.approx(20 * 0.101)  # 1.0, 2.02, never
    assert (stock["local_batches"], stock["cf"]) == ([6, 2], 10.0)
    assert [one["seconds_to_target"] for one in stock["runs"]][2] is None
    json.dumps(summary, allow_nan=False)


def test_target_that_most_seeds_miss_is_null() -> None:
    runs = [_run(name, seed, (0.5, 0.95 if seed == 0 else 0.6)) for seed in (0, 1) for name in RUNS]
    summary = summarise(runs, windows_by_run(_records(2)), TARGET)
    assert summary["both"]["seconds_to_target"] is None
    assert "not reached" in format_table(summary, TARGET)


def test_table_and_comparison() -> None:
    runs = [_run(name, 0, (0.95, 0.97)) for name in RUNS]
    summary = summarise(runs, windows_by_run(_records(1)), TARGET)
    table = format_table(summary, TARGET)
    rows = table.splitlines()
    assert len(rows) == 2 + len(RUNS)
    assert len({len(row) for row in rows}) == 1
    for cell in ("50 ms", "0.5 s", "97.0%", "6 2", "10"):
        assert cell in rows[-1]
    assert "0.50 of the step time, 1.00 of the bytes" in compare(summary)


def test_one_rank_alone_sends_nothing() -> None:
    entry = {"step_seconds": 0.1, "bytes_per_step": 0.0}
    assert compare({"both": entry, "horovod": entry}).endswith("1.00 of the step time.")


def test_figure_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    runs = [_run(name, 0, (0.95, 0.97)) for name in RUNS]
    draw(path, runs, windows_by_run(_records(1)), TARGET, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
