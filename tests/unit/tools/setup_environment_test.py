"""The set-up's memory: when it does nothing, when it goes on, when it starts anew."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "setup_environment.py"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, its .venv in a folder of this test, ``venv`` itself faked."""
    spec = importlib.util.spec_from_file_location("setup_environment", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "STATE", venv / "setup.json")
    monkeypatch.setattr(module, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(module, "works", lambda command: True)
    monkeypatch.setattr(module, "run", lambda command, step, environment=None: (0, ""))
    return module


def _leftover(setup: Any, state: str | None) -> Path:
    """A .venv that an earlier call left behind in ``state``, with a file in it."""
    setup.VENV.mkdir()
    if state is not None:
        setup.write_state(state)
    leftover = Path(setup.VENV) / "leftover"
    leftover.touch()
    return leftover


@pytest.mark.parametrize(
    ("state", "kept"), [("made", True), ("ready", True), (None, True), ("changing", False)]
)
def test_only_a_whole_venv_is_kept(setup: Any, state: str | None, kept: bool) -> None:
    """A set-up that was cut short while files were put in place starts anew."""
    leftover = _leftover(setup, state)
    setup.prepare_venv()
    assert leftover.exists() == kept
    assert setup.read_state().get("state") in (state, "made")


def test_a_broken_venv_is_made_anew(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python was removed or upgraded away, or the folder came from elsewhere."""
    leftover = _leftover(setup, "ready")
    monkeypatch.setattr(setup, "works", lambda command: False)
    setup.prepare_venv()
    assert not leftover.exists()
    leftover.touch()
    monkeypatch.setattr(setup, "works", lambda command: True)
    setup.STATE.write_text(json.dumps({"state": "ready", "key": "", "folder": "/elsewhere/.venv"}))
    setup.prepare_venv()
    assert not leftover.exists()


def test_a_python_without_venv_leaves_nothing(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and the next call is not misled by a half-made folder."""
    failed = (1, "ensurepip is not available")
    monkeypatch.setattr(setup, "run", lambda command, step, environment=None: failed)
    with pytest.raises(setup.SetupError, match="apt-get install python3-venv"):
        setup.prepare_venv()
    assert not setup.VENV.exists()


@pytest.mark.parametrize(
    ("status", "output", "state"),
    [
        (0, "Installing collected packages: torch\n", "made"),
        (1, "ERROR: No matching distribution found for torch==9\n", "made"),
        (1, "Installing collected packages: torch\nERROR: No space left on device\n", "changing"),
    ],
)
def test_failed_pip_is_redone_only_where_it_wrote(
    setup: Any, monkeypatch: pytest.MonkeyPatch, status: int, output: str, state: str
) -> None:
    """No network keeps .venv; a full disk in the middle of an installation does not."""
    _leftover(setup, "made")
    during = []

    def run(*arguments: Any) -> tuple[int, str]:
        during.append(setup.read_state()["state"])
        return status, output

    monkeypatch.setattr(setup, "run", run)
    if status:
        with pytest.raises(setup.SetupError):
            setup.pip_install("installing", ["torch"])
    else:
        setup.pip_install("installing", ["torch"])
    assert during == ["changing"]
    assert setup.read_state()["state"] == state


def test_ready_only_for_the_same_wishes(setup: Any) -> None:
    """Another torch or MPI sets up again; the same does nothing."""
    key = setup.setup_key("torch==2.13.0", "None")
    setup.VENV.mkdir()
    setup.write_state("ready", key)
    assert setup.is_ready(key)
    assert not setup.is_ready(setup.setup_key("torch==2.12.0", "None"))
    assert not setup.is_ready(setup.setup_key("torch==2.13.0", "Open MPI 4.1.4"))
    setup.write_state("changing", key)
    assert not setup.is_ready(key)


def test_venv_is_not_taken_for_the_system(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With .venv active, PyPI's mpirun inside it is not the system's MPI."""
    monkeypatch.setenv("PATH", f"{setup.VENV}/bin:/usr/bin")
    assert setup.path_without_venv() == "/usr/bin"


def test_missing_compiler(setup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said before anything is made or downloaded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(setup.SetupError, match=r"apt-get install g\+\+ make"):
        setup.check_compiler()
