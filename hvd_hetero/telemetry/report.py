"""What a run comes to, from its records. Examples, benchmarks and the command line all use this.

Apart from :func:`read_records`, which reads a file, everything here is pure.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.telemetry.records import (
    ConfigurationRecord,
    Record,
    RecordError,
    WindowRecord,
    parse_line,
)


@dataclass(frozen=True)
class Change:
    """What changed after the window that ended at ``step``, and the reasons given there."""

    step: int
    changed: tuple[str, ...]
    plan_reason: str
    compression_reason: str


@dataclass(frozen=True)
class Summary:
    """One run in numbers; every window counts the same.

    ``median_step_seconds`` and ``mean_bytes_per_step`` (sent by a rank) are None when no window
    measured them, ``final_cf`` is None when the run ended dense, ``final_local_batches`` is empty
    when there was no balancer.
    """

    windows: int
    median_step_seconds: float | None
    mean_bytes_per_step: float | None
    final_cf: float | None
    final_local_batches: tuple[int, ...]
    changes: tuple[Change, ...]


def summarise(records: Iterable[Record], *, skip_windows: int = 0) -> Summary:
    """Sum up the last run in ``records``: those after the last configuration record.

    The first ``skip_windows`` windows, of warming up for instance, count for no number but the
    final ones; their changes are listed.
    """
    run = last_run(records)
    windows = [record for record in run if isinstance(record, WindowRecord)]
    counted = windows[skip_windows:]
    seconds = [w.step_seconds for w in counted if math.isfinite(w.step_seconds)]
    sent = [w.bytes_per_step for w in counted if math.isfinite(w.bytes_per_step)]
    final = windows[-1] if windows else None
    return Summary(
        windows=len(counted),
        median_step_seconds=statistics.median(seconds) if seconds else None,
        mean_bytes_per_step=statistics.fmean(sent) if sent else None,
        final_cf=final.cf if final else None,
        final_local_batches=final.local_batches if final else (),
        changes=tuple(
            Change(w.step, w.changed, w.plan_reason, w.compression_reason)
            for w in windows
            if w.changed
        ),
    )


def last_run(records: Iterable[Record]) -> list[Record]:
    """Return the records of the last run in a file that several runs have appended to."""
    run: list[Record] = []
    for record in records:
        if isinstance(record, ConfigurationRecord):
            run = []
        run.append(record)
    return run


def format_summary(summary: Summary) -> str:
    """Return the summary as a few lines of text."""
    seconds, sent = summary.median_step_seconds, summary.mean_bytes_per_step
    batches = ", ".join(str(batch) for batch in summary.final_local_batches)
    lines = [
        f"windows           {summary.windows}",
        f"step, median      {'-' if seconds is None else f'{seconds * 1e3:.1f} ms'}",
        f"sent per step     {'-' if sent is None else f'{sent / 1e6:.3f} MB'}",
        f"compression       {'dense' if summary.final_cf is None else f'CF {summary.final_cf:g}'}",
        f"local batches     {batches or '-'}",
    ]
    for change in summary.changes:
        reasons = "; ".join(r for r in (change.plan_reason, change.compression_reason) if r)
        lines.append(f"step {change.step}: {', '.join(change.changed)} ({reasons})")
    return "\n".join(lines)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Return all records of a file.

    A line that a killed run left unfinished, at the end of the file or before the next run's
    first line, is left out. Raises RecordError, with the line's number, for any other line that
    is no record, and OSError when the file cannot be read.
    """
    with Path(path).open(encoding="utf-8", errors="replace", newline="\n") as file:
        return parse_lines(file.readlines(), name=str(path))


def parse_lines(lines: Sequence[str], *, name: str = "records") -> list[Record]:
    """Return the records on ``lines``; see :func:`read_records`, ``name`` is for messages."""
    records: list[Record] = []
    unfinished: RecordError | None = None  # the error of the line before, if it was cut short
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_line(line)
        except RecordError as error:
            if unfinished is not None:
                raise unfinished from error
            unfinished = RecordError(f"{name}, line {number}: {error}")
            if not _cut_short(line):
                raise unfinished from error
            continue
        if unfinished is not None and not isinstance(record, ConfigurationRecord):
            raise unfinished
        unfinished = None
        records.append(record)
    return records


def _cut_short(line: str) -> bool:
    """True for the beginning of a record: what is not JSON at all."""
    try:
        json.loads(line)
    except ValueError:
        return True
    return False
