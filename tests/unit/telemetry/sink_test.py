from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.telemetry.records import ConfigurationRecord, WindowRecord
from hvd_hetero.telemetry.report import read_records
from hvd_hetero.telemetry.sink import JsonLinesSink

CONFIGURATION = ConfigurationRecord(versions={}, ranks=1, options={})
WINDOW = WindowRecord(1, 0.1, (0.1,), (0.0,), (4,), 4, None, None, "dense", 0.0)


def test_parents_are_made_and_each_record_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "log.jsonl"
    sink = JsonLinesSink(path)
    sink.write(CONFIGURATION)
    assert read_records(path) == [CONFIGURATION]
    sink.write(WINDOW)
    assert read_records(path) == [CONFIGURATION, WINDOW]
    assert path.read_bytes().count(b"\n") == 2
    sink.close()
    sink.close()
    sink.write(WINDOW)
    assert len(read_records(path)) == 2


def test_an_older_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with JsonLinesSink(str(path)) as sink:
            sink.write(CONFIGURATION)
    assert read_records(path) == [CONFIGURATION] * 2


def test_a_file_that_ends_within_a_line_is_continued_on_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(CONFIGURATION.to_json() + "\n" + WINDOW.to_json()[:40])
    with JsonLinesSink(path) as sink:
        sink.write(CONFIGURATION)
        sink.write(WINDOW)
    assert read_records(path) == [CONFIGURATION, CONFIGURATION, WINDOW]


def test_utf8_whatever_the_text(tmp_path: Path) -> None:
    window = replace(WINDOW, plan_reason="größer \u2028 \n x", compression_reason="\udc80")
    with JsonLinesSink(tmp_path / "log") as sink:
        sink.write(window)
    assert "größer".encode() in (tmp_path / "log").read_bytes()
    assert read_records(tmp_path / "log") == [window]


@pytest.mark.parametrize("path", ["", None, 3, Path("file/below/a/file"), Path("."), "nul\0"])
def test_a_path_that_cannot_be_written_is_refused(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(ConfigurationError, match=r"log=.*option log.*HVD_HETERO_LOG"):
        JsonLinesSink(path)


def test_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    JsonLinesSink("~/log").close()
    assert (tmp_path / "log").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonLinesSink("/dev/full")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            sink.write(WINDOW)
        sink.close()
    assert 1 <= len(caplog.records) <= 2
    assert "/dev/full" in caplog.text and "ends here" in caplog.text
