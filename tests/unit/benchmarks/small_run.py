"""A benchmark run as its users run it, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]


def run_benchmark(
    name: str, folder: Path, *options: str, timeout_seconds: float
) -> tuple[str, list[dict[str, Any]]]:
    """Return what ``benchmarks/<name>`` prints and the cases it writes to a file in ``folder``."""
    path = folder / "cases.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}", "--json", str(path), *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases: list[dict[str, Any]] = json.loads(path.read_text())
    return done.stdout, cases
