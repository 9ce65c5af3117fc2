"""Holds the import directions and what the pure core must not touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hvd_hetero"

# A folder may import from folders of a lower level; entries of one level know nothing of each
# other unless ALSO says so.
LEVELS = {
    "errors": 0,
    "environment": 0,
    "compression": 1,
    "balance": 1,
    "planning": 2,
    "exchange": 3,
    "data": 3,
    "telemetry": 3,
    "runtime": 4,
    "testing": 4,
    "cli": 5,
}
PURE = ("compression", "balance", "planning", "data/partition.py", "telemetry/records.py")
IMPURE_MODULES = {"horovod", "mpi4py", "time", "datetime", "threading", "socket", "subprocess"}


def modules() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def folder(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def own_folders(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names if name.startswith("hvd_hetero.")]
    return {part[1] for part in parts if part[1] in LEVELS}


@pytest.mark.parametrize("path", list(modules()), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    """DESIGN: cli -> runtime -> {exchange, data, telemetry} -> planning -> core -> errors."""
    here = folder(path)
    if here in ("__init__", "py"):
        return
    assert here in LEVELS, f"{here} has no place in the import order yet"
    for other in own_folders(imports(path)) - {here}:
        assert LEVELS[other] < LEVELS[here], f"{path}: {here} must not import {other}"


@pytest.mark.parametrize("path", list(modules()), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_runtime_imports_horovod_and_mpi(path: Path) -> None:
    """The command line asks for versions in a process of its own."""
    roots = {name.split(".")[0] for name in imports(path)}
    if folder(path) != "runtime":
        assert not roots & {"horovod", "mpi4py"}, path


@pytest.mark.parametrize("place", PURE)
def test_core_is_pure(place: str) -> None:
    """No Horovod, MPI, clock, thread or process in the core."""
    root = PACKAGE / place
    paths = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    assert paths
    for path in paths:
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & IMPURE_MODULES, path


def test_balance_needs_no_torch() -> None:
    """The solver is of use without torch: numpy only."""
    for path in sorted((PACKAGE / "balance").rglob("*.py")):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


def test_library_prints_nothing() -> None:
    """No print and no logging configuration outside the command line."""
    for path in modules():
        if folder(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"print", "logging.basicConfig"}, f"{path}:{node.lineno}"


def test_core_files_read_in_one_sitting() -> None:
    """DESIGN: about 250 lines a file in the core."""
    for place in ("compression", "balance", "planning"):
        for path in sorted((PACKAGE / place).rglob("*.py")):
            assert len(path.read_text().splitlines()) <= 320, path


def test_import_needs_no_horovod() -> None:
    """S52: importing works without Horovod; using it says how to get it, in one line."""
    code = (
        "import sys; sys.modules['horovod'] = None; sys.modules['mpi4py'] = None\n"
        "import hvd_hetero\n"
        "try:\n"
        "    hvd_hetero.Balancer\n"
        "except ImportError as error:\n"
        "    print(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1
    assert "hvd-hetero install-horovod" in lines[0]
