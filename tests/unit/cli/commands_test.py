"""The command line as a whole, and the cache of wheels, without building anything."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_hetero.cli import build_recipe as recipe
from hvd_hetero.cli import doctor, horovod_build, install_horovod, main
from hvd_hetero.cli.facts import Facts, Probe
from hvd_hetero.cli.processes import InstallError
from hvd_hetero.errors import ConfigurationError

TARGET = recipe.BuildTarget("2.13.0", "cpython-311", 20, recipe.BuildOptions(True), None)
BARE = Facts(
    python=(3, 11, 7),
    executable="/v/bin/python",
    versions={"torch": None, "horovod": None, "mpi4py": None, "hvd_hetero": "0.1.0"},
    torch=Probe(error="not installed"),
    horovod=Probe(error="not installed"),
    mpi4py=Probe(error="not installed"),
    mpi=None,
    cores=(0,),
    environment={},
    is_root=False,
)


@pytest.fixture
def paths(tmp_path: Path) -> horovod_build.Paths:
    return horovod_build.Paths(tmp_path / "cache" / "wheels", tmp_path / "cache" / "log")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"wheel")
    return path


def test_stored_wheel_is_found_again(paths: horovod_build.Paths, wheel: Path) -> None:
    """The second build for the same target takes no compiler, and storing twice is no error."""
    assert horovod_build.cached_wheel(paths, TARGET) is None
    for _ in range(2):
        stored = horovod_build.store_wheel(paths, TARGET, wheel)
        assert horovod_build.cached_wheel(paths, TARGET) == stored
    assert stored.read_bytes() == b"wheel"
    assert [entry.name for entry in paths.wheels.iterdir()] == [TARGET.key()]


def test_full_disk_leaves_no_half_wheel(
    paths: horovod_build.Paths, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that was cut short must not be found by the next call."""

    def half(source: Path, folder: Path) -> None:
        (folder / source.name).write_bytes(b"wh")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", half)
    with pytest.raises(OSError, match="No space left"):
        horovod_build.store_wheel(paths, TARGET, wheel)
    assert horovod_build.cached_wheel(paths, TARGET) is None
    assert list(paths.wheels.iterdir()) == []


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Per user, where the user keeps caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert horovod_build.Paths.of_user().wheels == tmp_path / "hvd_hetero" / "wheels"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing compiler is told before anything is downloaded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InstallError, match=r"no C\+\+ compiler is on PATH.*apt-get install"):
        horovod_build.check_tools(TARGET)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InstallError, match="CXX=no-such-compiler is no program"):
        horovod_build.check_tools(TARGET)


def test_compiler_too_old_for_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that does not know the standard is named, with torch and the standard."""
    compiler = tmp_path / "old-cxx"
    compiler.write_text("#!/bin/sh\necho \"error: unrecognized option '$1'\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(InstallError, match=r"-std=c\+\+20, which torch 2\.13\.0 asks for"):
        horovod_build.check_tools(TARGET)


def test_no_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without an MPI the three ways out are told; Gloo alone needs none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InstallError, match="--gloo-only"):
        install_horovod.choose_mpi(gloo_only=False, compiler=None)
    assert install_horovod.choose_mpi(gloo_only=True, compiler=None) is None
    with pytest.raises(ConfigurationError, match="--mpi-cxx"):
        install_horovod.choose_mpi(gloo_only=True, compiler="mpicxx")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["install-horovod", "--jobs", "0"], "--jobs=0"),
        (["install-horovod", "--mpi-cxx", "/no/mpicxx"], "--mpi-cxx='/no/mpicxx'"),
    ],
)
def test_bad_options_end_with_one_sentence(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, exit status 1, the option named."""
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_progress_goes_on_in_silence() -> None:
    """Elapsed seconds and the percentage are said though the compiler prints nothing."""
    stream = io.StringIO()
    with install_horovod.Progress("building", stream, interval_seconds=0.02) as progress:
        progress.line("[ 42%] Building CXX object a.o\n")
        progress.line("[  7%] Building CXX object of a part of it\n")
        deadline = time.monotonic() + 10
        while stream.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3
    assert lines[-1] == "building:  42 %, 0 s"


def test_doctor_without_horovod_and_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ends with 1, names both, and prints the same as JSON."""
    monkeypatch.setattr(doctor, "collect", lambda: BARE)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "error: torch is not installed" in text
    assert "hvd-hetero install-horovod" in text
    assert "Training can start" not in text
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {finding["severity"] for finding in report["findings"]} == {"error"}
    assert report["facts"]["same_mpi"] is None


def test_doctor_for_real() -> None:
    """S52: as a module, in a process of its own, on the installation that runs the tests."""
    command = [sys.executable, "-m", "hvd_hetero.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]
    assert report["facts"]["versions"]["horovod"] == recipe.HOROVOD_VERSION
    assert report["facts"]["horovod"]["gloo_built"]
    assert report["facts"]["horovod"]["size"] == 1


def test_command_line_needs_neither_torch_nor_horovod() -> None:
    """S52: what installs them must start without them."""
    code = (
        "import sys; from hvd_hetero.cli import parser; parser(); "
        "print([m for m in ('torch', 'numpy', 'horovod', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
