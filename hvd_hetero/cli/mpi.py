"""Finds the MPI to build with and to launch with. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.errors import ConfigurationError

CXX_NAMES = ("mpicxx", "mpic++", "mpiCC", "mpicxx.openmpi", "mpicxx.mpich")
_PATTERNS = (
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\)\s+(\S+)|Open MPI:?\s+v?(\d[\w.]*)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\S+)", re.S)),
    ("MPICH", re.compile(r"(?:HYDRA build details|MPICH Version).*?(\d+\.\d[\w.]*)", re.S)),
)


@dataclass(frozen=True)
class Mpi:
    """One MPI installation: its C++ compiler, its launcher, and what it says it is."""

    compiler: str
    launcher: str | None
    flavour: str
    version: str

    def __str__(self) -> str:
        return f"{self.flavour} {self.version} ({Path(self.compiler).parent})"


def is_open_mpi(mpi: Mpi) -> bool:
    """Whether the launcher takes Open MPI's options."""
    return mpi.flavour == "Open MPI"


def parse_flavour(text: str) -> tuple[str, str]:
    """Flavour and version in the output of ``mpirun --version`` (or of a compiler wrapper)."""
    for flavour, pattern in _PATTERNS:
        match = pattern.search(text)
        if match:
            return flavour, next(group for group in match.groups() if group)
    return "unknown MPI", "of unknown version"


def find_mpi(search_path: str, *, compiler: str | None = None) -> Mpi | None:
    """The MPI whose C++ compiler lies on ``search_path`` (folders, joined as in PATH).

    With ``compiler`` it is that one. Its launcher is the one beside it, so that the two belong
    together. None when there is no compiler; ConfigurationError when ``compiler`` is no program.
    """
    if compiler is not None:
        found = shutil.which(compiler, path=search_path)
        if found is None:
            raise ConfigurationError(
                f"--mpi-cxx={compiler!r}: no such program; give the path of an MPI C++ compiler, "
                "usually called mpicxx"
            )
    else:
        found = next(
            filter(None, (shutil.which(name, path=search_path) for name in CXX_NAMES)), None
        )
        if found is None:
            return None
    launcher = next(
        (
            path
            for name in ("mpirun", "mpiexec")
            if (path := shutil.which(name, path=str(Path(found).parent)))
        ),
        None,
    )
    text = _output([launcher, "--version"]) if launcher else ""
    if parse_flavour(text)[0] == "unknown MPI":
        text = _output([found, "--showme:version"]) + _output([found, "-v"])
    flavour, version = parse_flavour(text)
    return Mpi(os.path.abspath(found), launcher, flavour, version)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
