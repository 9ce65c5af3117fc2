"""Starts a Horovod job, one rank on each host of a lab, or all ranks on this machine."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.lab.network import AGENT, Lab

LAUNCHERS = ("gloo", "mpi")
_PR_SET_PDEATHSIG = 1


class LaunchError(RuntimeError):
    """A rank failed or did not end; carries the end of the output."""


def run_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    lab: Lab | None = None,
    launcher: str = "gloo",
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 600.0,
) -> str:
    """Run ``command`` on every rank and return what they printed, rank by rank under Gloo.

    Without a lab the ranks share this machine's loopback. Whatever happens, no rank is left.
    Raises LaunchError.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
    if launcher == "mpi":
        return _run([(_mpirun(command, ranks, lab, env or {}), environment)], timeout_seconds)
    # Horovod's own launcher reaches other hosts by ssh only; what it does beyond that is this.
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    addresses = [lab.address(rank + 1) for rank in range(ranks)] if lab else []
    hosts = ",".join(f"{address}:1" for address in addresses) or f"localhost:{ranks}"
    slots = get_host_assignments(parse_hosts(hosts), ranks)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    common = environment | {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth0" if lab else "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": lab.gateway if lab else "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
    jobs = []
    for slot in slots:
        whole = list(command)
        if lab is not None:
            whole = [str(AGENT), lab.name, str(slot.rank + 1), f"exec {shlex.join(command)}"]
        jobs.append((whole, common | create_slot_env_vars(slot)))
    try:
        return _run(jobs, timeout_seconds)
    finally:
        server.stop()


def _mpirun(
    command: Sequence[str], ranks: int, lab: Lab | None, passed: Mapping[str, str]
) -> list[str]:
    from hvd_hetero.cli.mpi import find_mpi, is_open_mpi

    beside = str(Path(sys.executable).parent)
    mpi = find_mpi(os.environ.get("PATH", "") + os.pathsep + beside)
    if mpi is None or mpi.launcher is None:
        raise LaunchError("mpirun is missing: run `make install`")
    whole = [mpi.launcher, "-n", str(ranks)]
    if is_open_mpi(mpi):
        whole += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        if os.geteuid() == 0:
            whole.append("--allow-run-as-root")
        for name in ("PATH", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", *passed):
            whole += ["-x", name]
    elif lab is not None:
        raise LaunchError(f"{mpi} cannot be sent into a lab: only Open MPI can")
    if lab is not None:
        hosts = ",".join(f"{lab.address(rank + 1)}:1" for rank in range(ranks))
        whole += ["--mca", "plm_rsh_agent", f"{AGENT} {lab.name}", "-H", hosts]
        for what in ("btl_tcp_if_include", "oob_tcp_if_include"):
            whole += ["--mca", what, f"{lab.subnet}.0/24"]
        whole += ["--mca", "btl", "tcp,self"]
    return [*whole, *command]


def _run(jobs: Sequence[tuple[list[str], dict[str, str]]], timeout_seconds: float) -> str:
    end = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as folder:
        processes, paths = [], []
        try:
            for number, (command, environment) in enumerate(jobs):
                paths.append(Path(folder) / str(number))
                with paths[-1].open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                            preexec_fn=_die_with_parent,
                        )
                    )
            failed = _wait(processes, end)
        finally:
            for process in processes:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        outputs = [path.read_text(errors="replace") for path in paths]
    if failed is not None:
        number, why = failed
        raise LaunchError(f"{why}; the end of its output:\n{outputs[number][-4000:]}")
    return "".join(outputs)


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float) -> tuple[int, str] | None:
    """Wait for all; return the first that failed, and how."""
    while True:
        codes = [process.poll() for process in processes]
        for number, code in enumerate(codes):
            if code:
                return number, f"process {number} of {len(codes)} ended with {code}"
        if None not in codes:
            return None
        if time.monotonic() > end:
            return codes.index(None), f"process {codes.index(None)} did not end in time"
        time.sleep(0.02)


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends, killed or not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
