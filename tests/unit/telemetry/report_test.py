from __future__ import annotations

import math
from pathlib import Path

import pytest

from hvd_hetero.telemetry.records import ConfigurationRecord, Record, RecordError, WindowRecord
from hvd_hetero.telemetry.report import (
    Change,
    format_summary,
    last_run,
    parse_lines,
    read_records,
    summarise,
)

START = ConfigurationRecord(versions={"torch": "2"}, ranks=2, options={})


def window(
    step: int,
    seconds: float,
    sent: float = 100.0,
    cf: float | None = None,
    changed: tuple[str, ...] = (),
) -> WindowRecord:
    return WindowRecord(
        step=step,
        step_seconds=seconds,
        compute_seconds=(seconds, seconds),
        wait_seconds=(0.0, 0.0),
        local_batches=(step, 1),
        global_batch_size=step + 1,
        cf=cf,
        gain=None,
        strategy="dense" if cf is None else "allgather",
        bytes_per_step=sent,
        plan_reason=f"plan after {step}",
        compression_reason=f"cf after {step}",
        changed=changed,
    )


RUN: list[Record] = [
    START,
    window(10, 1.0, 100.0, changed=("plan",)),
    window(20, 3.0, 300.0),
    window(30, 9.0, 500.0, cf=10.0, changed=("cf", "plan")),
]


def test_a_run_in_numbers() -> None:
    summary = summarise(RUN)
    assert summary.windows == 3
    assert summary.median_step_seconds == 3.0
    assert summary.mean_bytes_per_step == 300.0
    assert summary.final_cf == 10.0
    assert summary.final_local_batches == (30, 1)
    assert summary.changes == (
        Change(10, ("plan",), "plan after 10", "cf after 10"),
        Change(30, ("cf", "plan"), "plan after 30", "cf after 30"),
    )


def test_windows_of_warming_up_can_be_left_out() -> None:
    summary = summarise(RUN, skip_windows=1)
    assert (summary.windows, summary.median_step_seconds) == (2, 6.0)
    assert summary.mean_bytes_per_step == 400.0
    assert len(summary.changes) == 2
    assert summarise(RUN, skip_windows=5).final_cf == 10.0


def test_only_the_last_run_of_a_file_counts() -> None:
    records = [*RUN, START, window(5, 0.5)]
    assert last_run(records) == [START, window(5, 0.5)]
    assert summarise(records) == summarise([START, window(5, 0.5)])
    assert summarise(records).final_cf is None


def test_what_was_not_measured_counts_for_nothing() -> None:
    records = [window(1, math.nan, math.nan), window(2, 2.0, 20.0)]
    summary = summarise(records)
    assert (summary.median_step_seconds, summary.mean_bytes_per_step) == (2.0, 20.0)


@pytest.mark.parametrize("records", [[], [START]])
def test_a_run_without_windows(records: list[Record]) -> None:
    summary = summarise(records)
    assert summary.windows == 0
    assert summary.median_step_seconds is None
    assert summary.mean_bytes_per_step is None
    assert "step, median      -" in format_summary(summary)


def test_the_summary_as_text() -> None:
    assert format_summary(summarise(RUN)).splitlines() == [
        "windows           3",
        "step, median      3000.0 ms",
        "sent per step     0.000 MB",
        "compression       CF 10",
        "local batches     30, 1",
        "step 10: plan (plan after 10; cf after 10)",
        "step 30: cf, plan (plan after 30; cf after 30)",
    ]


def test_a_line_cut_short_at_the_end_is_left_out(tmp_path: Path) -> None:
    text = "".join(record.to_json() + "\n" for record in RUN)
    last = RUN[-1].to_json()
    for cut in range(1, len(last) + 1):
        (tmp_path / "log").write_text(text[: len(text) - 1 - cut])
        assert read_records(tmp_path / "log") == RUN[:-1]
    (tmp_path / "log").write_text(text[:-1])
    assert read_records(tmp_path / "log") == RUN


def test_a_line_cut_short_before_the_next_run_is_left_out() -> None:
    lines = [START.to_json(), RUN[1].to_json()[:30], "", START.to_json(), RUN[2].to_json()]
    assert parse_lines(lines) == [START, START, RUN[2]]


def test_a_broken_line_within_a_run_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join([START.to_json(), "{broken", RUN[1].to_json()]))
    with pytest.raises(RecordError, match=r"log, line 2: not a line of JSON.*{broken"):
        read_records(path)
    path.write_text("\n".join(["{broken", "{broken too", START.to_json()]))
    with pytest.raises(RecordError, match="line 1: "):
        read_records(path)


def test_a_last_line_that_is_whole_but_wrong_is_an_error() -> None:
    with pytest.raises(RecordError, match="line 2: schema=7"):
        parse_lines([START.to_json(), '{"kind": "window", "schema": 7}'])


def test_bytes_cut_within_a_letter(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(START.to_json().encode() + b'\n{"kind": "gr\xc3')
    assert read_records(path) == [START]


def test_a_missing_file_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "log")
