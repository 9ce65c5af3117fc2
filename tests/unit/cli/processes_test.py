"""Child processes: their lines, their end with us, and what pip's failures mean."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_hetero.cli.processes import explain_pip_failure, run_lines


def test_run_lines_joins_both_streams_and_tells_the_status() -> None:
    """Lines arrive one by one, as they are printed."""
    seen: list[str] = []
    code = "import sys; print('a', flush=True); print('b', file=sys.stderr); sys.exit(3)"
    status, lines = run_lines([sys.executable, "-c", code], on_line=seen.append)
    assert (status, lines) == (3, ["a\n", "b\n"])
    assert seen == lines


def test_an_interrupted_run_ends_its_children(tmp_path: Path) -> None:
    """No compiler goes on in the background after Ctrl-C."""
    note = tmp_path / "pid"
    code = f"echo go; sleep 60 & echo $! > {note}; wait"

    def interrupt(line: str) -> None:
        deadline = time.monotonic() + 10
        while not (note.exists() and note.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_lines(["sh", "-c", code], on_line=interrupt)
    grandchild = note.read_text().strip()
    deadline = time.monotonic() + 10
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(grandchild)


def _runs(pid: str) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    return done.returncode == 0 and not done.stdout.strip().startswith("Z")


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "index cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==9.9\n", "has torch==9.9 for this"),
        ("error: externally-managed-environment", "virtual environment"),
        ("noise\nERROR: something else\n", "ERROR: something else"),
        ("", "pip gave no reason"),
    ],
)
def test_pip_failures_are_explained(output: str, part: str) -> None:
    """No network, a full disk, a version that does not exist: told apart, with the remedy."""
    sentence = explain_pip_failure(output.splitlines(keepends=True))
    assert part in sentence
    assert "\n" not in sentence
