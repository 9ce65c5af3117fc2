"""Finding the MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_hetero.cli.mpi import find_mpi, is_open_mpi, parse_flavour
from hvd_hetero.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to\n", ("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4\n", ("Open MPI", "4.1.4")),
        ("mpiexec (OpenRTE) 2.1.1\n", ("Open MPI", "2.1.1")),
        ("mpicxx: Open MPI 4.1.4 (Language: C++)\n", ("Open MPI", "4.1.4")),
        ("HYDRA build details:\n    Version:                4.0.2\n", ("MPICH", "4.0.2")),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619\n",
            ("Intel MPI", "2021.10"),
        ),
        ("something\n", ("unknown MPI", "of unknown version")),
    ],
)
def test_flavours(text: str, expected: tuple[str, str]) -> None:
    """Each launcher says in its own words what it is."""
    assert parse_flavour(text) == expected


def _program(path: Path, says: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


def test_compiler_and_launcher_belong_together(tmp_path: Path) -> None:
    """The launcher is the one beside the compiler, wherever another mpirun stands in PATH."""
    _program(tmp_path / "other" / "mpirun", "HYDRA build details: Version: 3.4")
    _program(tmp_path / "mine" / "mpicxx", "")
    _program(tmp_path / "mine" / "mpirun", "mpirun (Open MPI) 4.1.4")
    path = f"{tmp_path}/other:{tmp_path}/mine"
    found = find_mpi(path)
    assert found is not None
    assert is_open_mpi(found)
    assert found.launcher == f"{tmp_path}/mine/mpirun"
    assert find_mpi(f"{tmp_path}/other") is None
    named = find_mpi("", compiler=f"{tmp_path}/mine/mpicxx")
    assert named == found


def test_named_compiler_must_exist() -> None:
    """--mpi-cxx with a wrong path is an error that names the option."""
    with pytest.raises(ConfigurationError, match=r"--mpi-cxx='/no/mpicxx'"):
        find_mpi("/usr/bin", compiler="/no/mpicxx")
