"""Starts a script or a function on several ranks with a real launcher, for multi-rank tests.

    @pytest.mark.parametrize(("launcher", "ranks"), launches())
    def sums_test(launcher: Launcher, ranks: int) -> None:
        results = run_ranks("tests.parallel.sums_ranks:total", ranks, launcher, {"elements": 3})
        assert results == [...]                       # one JSON value per rank, in rank order

``launch`` is the part below it: a whole script with arguments, as users start theirs. By default
both raise LaunchFailedError unless the launcher *and every rank* ended with 0; a test of a failure
passes ``check=False`` and looks at the LaunchResult.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.parallel.rank_main import RANK_VARIABLES, RECORD_DIRECTORY_VARIABLE

Launcher = Literal["mpirun", "horovodrun-gloo", "horovodrun-mpi"]
BOTH_LAUNCHERS: tuple[Launcher, ...] = ("mpirun", "horovodrun-gloo")
REPOSITORY = Path(__file__).resolve().parents[2]

_TOKEN_VARIABLE = "TEST_LAUNCH_TOKEN"
_TERMINATE_SECONDS = 5.0
_LINGER_SECONDS = 15.0
# What an outer launcher has left in the environment would be taken for our own.
_FOREIGN_PREFIXES = ("OMPI_COMM_WORLD", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HOROVOD_")


class LaunchFailedError(AssertionError):
    """The launcher, or a rank, did not end with 0; carries everybody's output."""

    def __init__(self, message: str, result: LaunchResult | None = None) -> None:
        super().__init__(message)
        self.result = result


class LaunchTimeoutError(LaunchFailedError):
    """The launch was still running after ``timeout_seconds`` and has been killed."""


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. ``exit_code`` is None when it was killed or never started."""

    rank: int
    pid: int | None
    state: Literal["missing", "started", "ended"]
    exit_code: int | None
    result: Any
    traceback: str
    stdout: str
    stderr: str


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended: the launcher's own status and output, and each rank's."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    ranks: tuple[RankResult, ...]
    seconds: float
    survivors: tuple[int, ...]  # processes that outlived the launcher and had to be killed

    @property
    def ok(self) -> bool:
        """The launcher and every rank ended with 0 and no process stayed behind."""
        return (
            self.returncode == 0
            and not self.survivors
            and all(rank.exit_code == 0 for rank in self.ranks)
        )

    @property
    def output(self) -> str:
        """All that the launcher and its ranks printed."""
        return self.stdout + self.stderr

    def describe(self) -> str:
        """A text for a person: what ended how, with tracebacks and the last output."""
        lines = [f"{' '.join(self.command)}", f"launcher: exit {self.returncode}"]
        if self.survivors:
            lines.append(f"processes left behind: {self.survivors}")
        for rank in self.ranks:
            lines.append(f"rank {rank.rank}: {rank.state}, exit {rank.exit_code}")
            if rank.traceback:
                lines.append(rank.traceback)
        lines += ["--- stdout", self.stdout[-8000:], "--- stderr", self.stderr[-8000:]]
        return "\n".join(lines)

    def check(self) -> LaunchResult:
        """Return self, or raise LaunchFailedError with all outputs."""
        if not self.ok:
            raise LaunchFailedError(self.describe(), self)
        return self


def launches(
    ranks: Sequence[int] = (1, 2, 4), launchers: Sequence[Launcher] = BOTH_LAUNCHERS
) -> list[Any]:
    """Parameters ``(launcher, ranks)`` with ids such as ``mpirun-2``, ``horovodrun_gloo-4``."""
    return [
        pytest.param(launcher, count, id=f"{launcher.replace('-', '_')}-{count}")
        for launcher in launchers
        for count in ranks
    ]


def launch(
    script: Path | str,
    ranks: int,
    *,
    launcher: Launcher,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
    check: bool = True,
) -> LaunchResult:
    """Run ``script`` as ``__main__`` on ``ranks`` processes.

    Raises LaunchTimeoutError when it does not end, LaunchFailedError when ``check`` and not ok.
    """
    request = {"script": str(Path(script).resolve()), "args": list(args)}
    return _start(request, ranks, launcher, env, timeout_seconds, check)


def run_ranks(
    function: str,
    ranks: int,
    launcher: Launcher,
    kwargs: Mapping[str, Any] | None = None,
    *,
    script: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call ``"module:function"`` (or ``function`` of ``script``) on every rank with ``kwargs``.

    Returns each rank's result in rank order; arguments and results are JSON values. Raises
    LaunchFailedError unless all ranks ended well.
    """
    result = start_ranks(
        function,
        ranks,
        launcher,
        kwargs,
        script=script,
        env=env,
        timeout_seconds=timeout_seconds,
        check=True,
    )
    return [rank.result for rank in result.ranks]


def start_ranks(
    function: str,
    ranks: int,
    launcher: Launcher,
    kwargs: Mapping[str, Any] | None = None,
    *,
    script: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
    check: bool = False,
) -> LaunchResult:
    """As ``run_ranks``, but returns the whole LaunchResult and, by default, lets ranks fail."""
    request: dict[str, Any] = {"kwargs": dict(kwargs or {})}
    if script is None:
        request["module"], request["function"] = function.split(":")
    else:
        request.update(script=str(Path(script).resolve()), function=function)
    return _start(request, ranks, launcher, env, timeout_seconds, check)


def launch_command(launcher: Launcher, ranks: int, mpi_version: str) -> list[str]:
    """The launcher's part of the command line; ``mpi_version`` as ``mpirun --version`` says it."""
    open_mpi = "open mpi" in mpi_version.lower() or "openrte" in mpi_version.lower()
    if launcher == "mpirun":
        options = ["--oversubscribe", "--bind-to", "none"] if open_mpi else ["-bind-to", "none"]
        if open_mpi and os.geteuid() == 0:
            options.append("--allow-run-as-root")
        return [_tool("mpirun"), "-np", str(ranks), *options]
    command = [_tool("horovodrun"), "--disable-cache", "-np", str(ranks)]
    command += ["-H", f"localhost:{ranks}"]
    if launcher == "horovodrun-gloo":
        return [*command, "--gloo"]
    # Horovod's own default (-bind-to none -map-by slot) is refused by Open MPI 5.
    return [*command, "--mpi", "--binding-args=--bind-to none --map-by slot"]


def launch_environment(
    inherited: Mapping[str, str], added: Mapping[str, str] | None
) -> dict[str, str]:
    """The ranks' environment: few threads, no stray launcher's variables, ``added`` on top."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in RANK_VARIABLES and not name.startswith(_FOREIGN_PREFIXES)
    }
    paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    environment.update(
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}",
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS="1",
        # Ranks outnumber cores here: let them run, and let waiting ones step aside.
        OMPI_MCA_rmaps_base_oversubscribe="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        OMPI_MCA_mpi_yield_when_idle="1",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        # A stall is named in the output well before the launch is killed for its time.
        HOROVOD_STALL_CHECK_TIME_SECONDS="10",
        HOROVOD_GLOO_TIMEOUT_SECONDS="60",
    )
    environment.update(added or {})
    return environment


def _start(
    request: dict[str, Any],
    ranks: int,
    launcher: Launcher,
    env: Mapping[str, str] | None,
    timeout_seconds: float,
    check: bool,
) -> LaunchResult:
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        directory = Path(folder)
        (directory / "request.json").write_text(json.dumps(request))
        environment = launch_environment(os.environ, env)
        environment.update({RECORD_DIRECTORY_VARIABLE: folder, _TOKEN_VARIABLE: token})
        version = "" if launcher == "horovodrun-gloo" else _mpi_version(_tool("mpirun"))
        command = launch_command(launcher, ranks, version)
        command += [sys.executable, str(Path(__file__).with_name("rank_main.py"))]
        command.append(str(directory / "request.json"))

        began = time.monotonic()
        returncode, timed_out = _run(command, environment, directory, timeout_seconds)
        survivors = () if timed_out else _wait_for_leftovers(token, _LINGER_SECONDS)
        _kill(token)
        result = LaunchResult(
            command=tuple(command),
            returncode=returncode,
            stdout=_read(directory / "launcher.stdout"),
            stderr=_read(directory / "launcher.stderr"),
            ranks=tuple(_rank_result(directory, rank) for rank in range(ranks)),
            seconds=time.monotonic() - began,
            survivors=survivors,
        )
    if timed_out:
        message = f"still running after {timeout_seconds:g} s, killed\n{result.describe()}"
        raise LaunchTimeoutError(message, result)
    return result.check() if check else result


def _run(
    command: list[str], environment: dict[str, str], directory: Path, timeout_seconds: float
) -> tuple[int, bool]:
    # Output goes to files: a pipe would stay open for as long as any grandchild holds it.
    with (
        open(directory / "launcher.stdout", "wb") as stdout,
        open(directory / "launcher.stderr", "wb") as stderr,
    ):
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_seconds), False
        except subprocess.TimeoutExpired:
            return _stop(process, environment[_TOKEN_VARIABLE]), True
        except BaseException:  # an interrupted test run leaves nothing behind
            _stop(process, environment[_TOKEN_VARIABLE])
            raise


def _stop(process: subprocess.Popen[bytes], token: str) -> int:
    """End the launcher's process group, then all that carries the token."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    _kill(token)
    return process.wait()


def _members(token: str) -> Iterator[int]:
    """Processes of this launch. Launchers put ranks into groups and sessions of their own, so
    the inherited environment is what tells them."""
    mark = f"{_TOKEN_VARIABLE}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # ended meanwhile, or another user's
            continue


def _wait_for_leftovers(token: str, patience_seconds: float) -> tuple[int, ...]:
    deadline = time.monotonic() + patience_seconds
    while (left := tuple(_members(token))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _kill(token: str) -> None:
    """Kill what is left of this launch, and wait until it is gone."""
    for pid in _members(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_for_leftovers(token, _TERMINATE_SECONDS)


def _rank_result(directory: Path, rank: int) -> RankResult:
    record = directory / f"rank-{rank}.json"
    fields: dict[str, Any] = {"state": "missing"}
    if record.exists():
        fields = json.loads(record.read_text())
    return RankResult(
        rank=rank,
        pid=fields.get("pid"),
        state=fields["state"],
        exit_code=fields.get("exit_code"),
        result=fields.get("result"),
        traceback=fields.get("traceback", ""),
        stdout=_read(directory / f"rank-{rank}.stdout"),
        stderr=_read(directory / f"rank-{rank}.stderr"),
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _tool(name: str) -> str:
    """The launcher next to this Python, else the system's."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise LaunchFailedError(f"{name} is not installed: run `make install` first")
    return found


@functools.cache
def _mpi_version(mpirun: str) -> str:
    return subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
