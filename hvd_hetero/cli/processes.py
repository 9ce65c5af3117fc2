"""Child processes of the command line: their output, their end, and what a failure means."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from hvd_hetero.errors import HeteroError

_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|ConnectTimeout"
    r"|Connection (?:refused|reset)|Network is unreachable|ProxyError|ReadTimeout"
    r"|Max retries exceeded"
)
_NOT_FOUND = re.compile(r"No matching distribution found for (.+)")


class InstallError(HeteroError):
    """Something could not be installed; the message says what and how to mend it."""


def run_lines(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> tuple[int, list[str]]:
    """Run ``command``; returns its exit status and its output (both streams) as lines.

    When this process is interrupted the child's whole process group is ended first, so that no
    compiler goes on in the background.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            on_line(line)
        return process.wait(), lines
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise


def pip(
    arguments: Sequence[str],
    *,
    purpose: str,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run this Python's pip; InstallError, naming ``purpose``, when it fails."""
    if importlib.util.find_spec("pip") is None:
        raise InstallError(
            f"{purpose} needs pip, and {sys.executable} has none: run "
            f"`{sys.executable} -m ensurepip` or use a virtual environment"
        )
    command = [sys.executable, "-m", "pip", *arguments]
    status, lines = run_lines(command, on_line=on_line, environment=environment)
    if status != 0:
        raise InstallError(f"{purpose} failed: {explain_pip_failure(lines)}")
    return lines


def explain_pip_failure(lines: Sequence[str]) -> str:
    """What pip's output says about its failure, with the remedy, as the end of a sentence."""
    text = "".join(lines)
    if "No space left on device" in text or "Errno 28" in text or "Disk quota exceeded" in text:
        return "the disk is full; free some space (a full set-up takes 3 GB) and try again"
    missing = _NOT_FOUND.search(text)
    if _NO_NETWORK.search(text):
        return (
            "the package index cannot be reached; check the network, or pip's index and proxy "
            "settings (`pip config list`), and try again"
        )
    if missing:
        return (
            f"no package index that pip is set to has {missing[1].strip()} for this Python; "
            "check the name and version, and PIP_INDEX_URL or PIP_NO_INDEX"
        )
    if "externally-managed-environment" in text:
        return "this Python belongs to the system; use a virtual environment (python3 -m venv)"
    if "Permission denied" in text:
        return "its files may not be written; use a virtual environment of your own"
    errors = [line.strip() for line in lines if line.lstrip().startswith("ERROR")]
    return errors[-1] if errors else "".join(lines[-5:]).strip() or "pip gave no reason"
