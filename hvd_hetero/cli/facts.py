"""What ``doctor`` looks at: the facts, and how they are collected.

Horovod, mpi4py and torch are imported in child processes, so that one that crashes or hangs is a
finding and not the end of the report.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hvd_hetero
from hvd_hetero.cli.mpi import Mpi, find_mpi
from hvd_hetero.environment import PREFIX

# Each launcher's own variables for the number of ranks, and for those on this host.
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_PROBE_SECONDS = 90.0

_LIBRARY = """
import json, sys
def library():
    try:
        with open("/proc/self/maps") as maps:
            names = {line.split()[-1] for line in maps if "/libmpi" in line}
    except OSError:
        return []
    return sorted(n for n in names if n.rsplit("/", 1)[1].startswith(("libmpi.so", "libmpich.so")))
def tell(**facts):
    print("FACTS " + json.dumps(facts), flush=True)
"""
_TORCH = """
import torch
tell(threads=torch.get_num_threads(), cuda=torch.version.cuda,
     gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""
# What is known is told before the next risky step is taken.
_HOROVOD = """
import os, socket
import horovod.torch as hvd
tell(mpi_built=bool(hvd.mpi_built()), gloo_built=bool(hvd.gloo_built()),
     nccl_built=bool(hvd.nccl_built()), libmpi=library())
hvd.init()
tell(size=hvd.size(), rank=hvd.rank(), local_size=hvd.local_size(),
     controller="MPI" if hvd.mpi_enabled() else "Gloo",
     threads_supported=bool(hvd.mpi_threads_supported()) if hvd.mpi_enabled() else None)
if hvd.size() > 1:
    own = {"host": socket.gethostname(), "cores": sorted(os.sched_getaffinity(0)),
           "threads": int(os.environ.get("HVD_DOCTOR_THREADS", "1"))}
    tell(peers=hvd.allgather_object(own, name="doctor"))
hvd.shutdown()
"""
_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
tell(library=MPI.Get_library_version().strip("\\0").split(",")[0].strip(), libmpi=library())
"""


@dataclass(frozen=True)
class Probe:
    """What a child process told, and how it ended: ``error`` is None when all went well."""

    told: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that the diagnosis goes by. Versions are None for what is not installed."""

    python: tuple[int, int, int]
    executable: str
    versions: Mapping[str, str | None]
    torch: Probe
    horovod: Probe
    mpi4py: Probe
    mpi: Mpi | None
    cores: tuple[int, ...]
    environment: Mapping[str, str]
    is_root: bool

    @property
    def threads(self) -> int:
        """Threads that each rank's arithmetic uses."""
        told = int(self.torch.told.get("threads", 1))
        asked = self.environment.get("OMP_NUM_THREADS", "")
        return max(told, int(asked)) if asked.isdigit() else told

    @property
    def launched_size(self) -> int | None:
        """The number of ranks that a launcher's variables speak of; None without a launcher."""
        return _launched(self.environment, SIZE_VARIABLES)

    @property
    def launched_rank(self) -> int | None:
        """This process's rank by a launcher's variables."""
        return _launched(self.environment, RANK_VARIABLES)

    @property
    def same_mpi(self) -> bool | None:
        """Whether Horovod and mpi4py load one and the same MPI; None when that is not known."""
        own, other = self.horovod.told.get("libmpi"), self.mpi4py.told.get("libmpi")
        if not own or self.versions.get("mpi4py") is None:
            return None
        if self.mpi4py.error or not other:
            return False
        return [os.path.realpath(name) for name in own] == [os.path.realpath(n) for n in other]

    def to_dict(self) -> dict[str, Any]:
        """A JSON value of everything."""
        probes = {"torch": self.torch, "horovod": self.horovod, "mpi4py": self.mpi4py}
        return {
            "python": ".".join(map(str, self.python)),
            "executable": self.executable,
            "versions": dict(self.versions),
            **{name: {**probe.told, "error": probe.error} for name, probe in probes.items()},
            "mpi": None if self.mpi is None else vars(self.mpi),
            "same_mpi": self.same_mpi,
            "cores": list(self.cores),
            "threads": self.threads,
            "launched_size": self.launched_size,
            "launched_rank": self.launched_rank,
            "environment": dict(self.environment),
        }


def collect() -> Facts:
    """Look at this machine, this Python and the launcher that started it."""
    names = ("torch", "numpy", "horovod", "mpi4py")
    versions = {name: _version(name) for name in names}
    versions["hvd_hetero"] = hvd_hetero.__version__
    torch = _probe(_TORCH, versions["torch"])
    threads = str(torch.told.get("threads", 1))
    path = os.environ.get("PATH", "") + os.pathsep + str(Path(sys.executable).parent)
    prefixes = (PREFIX, "HOROVOD_", "OMPI_COMM_WORLD_", "PMI_", "SLURM_NTASKS")
    more = {
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OMPI_ALLOW_RUN_AS_ROOT",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
    }
    return Facts(
        python=sys.version_info[:3],
        executable=sys.executable,
        versions=versions,
        torch=torch,
        horovod=_probe(_HOROVOD, versions["horovod"], HVD_DOCTOR_THREADS=threads),
        mpi4py=_probe(_MPI4PY, versions["mpi4py"]),
        mpi=find_mpi(path),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(prefixes) or name in more
        },
        is_root=os.geteuid() == 0,
    )


def read_probe(output: str, errors: str, status: int | None) -> Probe:
    """A Probe from a child's output; ``status`` None means that it did not end in time."""
    told: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("FACTS "):
            told.update(json.loads(line[6:]))
    if status == 0:
        return Probe(told)
    if status is None:
        return Probe(told, f"no answer within {_PROBE_SECONDS:g} s")
    if status < 0:
        return Probe(told, f"crashed by signal {-status}")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # A traceback's last line is the reason; libraries may print more after it.
    reasons = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return Probe(told, (reasons or lines or [f"ended with status {status}"])[-1])


def _probe(code: str, version: str | None, **variables: str) -> Probe:
    if version is None:
        return Probe(error="not installed")
    command = [sys.executable, "-c", _LIBRARY + code]
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return read_probe(_text(error.stdout), _text(error.stderr), None)
    return read_probe(done.stdout, done.stderr, done.returncode)


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _launched(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    # Slurm's variables also stand in a batch script, which is no rank; a step has an id.
    in_step = "SLURM_STEP_ID" in environment
    numbers = (
        int(environment[name])
        for name in names
        if environment.get(name, "").isdigit() and (in_step or not name.startswith("SLURM_"))
    )
    return next(numbers, None)
