"""When mpi4py may be used beside Horovod, and how an uncaught exception ends the job."""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from hvd_hetero.runtime import mpi


class World:
    """A communicator that remembers whether the job was aborted."""

    def __init__(self, rank: int = 1, size: int = 2) -> None:
        self._place = (rank, size)
        self.aborted: list[int] = []

    def Get_rank(self) -> int:
        return self._place[0]

    def Get_size(self) -> int:
        return self._place[1]

    def Abort(self, code: int) -> None:
        self.aborted.append(code)


def set_up(monkeypatch: pytest.MonkeyPatch, world: World | None = None, **changes: Any) -> None:
    """Rank 1 of 2 under MPI with threads, but for ``changes``."""

    def refuse() -> bool:
        raise ValueError("Horovod MPI is not enabled")

    state = {"size": 2, "enabled": True, "threads": True, **changes}
    threads = (lambda: state["threads"]) if state["enabled"] else refuse
    fake = SimpleNamespace(
        rank=lambda: 1,
        size=lambda: state["size"],
        mpi_enabled=lambda: state["enabled"],
        mpi_threads_supported=threads,
    )
    module: Any = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(COMM_WORLD=world or World())
    monkeypatch.setattr(mpi, "hvd", fake)
    monkeypatch.setitem(sys.modules, "mpi4py", None if changes.get("missing") else module)


def test_mpi4py_is_used_where_all_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 3: MPI on, threads supported, rank and size equal to Horovod's."""
    world = World()
    set_up(monkeypatch, world)
    assert mpi.world_communicator() == (world, "mpi4py")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 1}, "one rank"),
        ({"enabled": False}, "Horovod runs without MPI"),  # and threads must not be asked for
        ({"threads": False}, "without multi-threading"),
        ({"missing": True}, "mpi4py cannot be imported"),
        ({"world": World(0, 1)}, "mpi4py sees rank 0 of 1, Horovod rank 1 of 2"),
        ({"world": World(0, 2)}, "built against different MPIs"),
    ],
)
def test_mpi4py_is_left_out(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S47: each condition that fails has its reason for the log."""
    set_up(monkeypatch, **changes)
    world, text = mpi.world_communicator()
    assert world is None
    assert reason in text


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[str]]:
    """An abort hook in place of Python's own, which only notes what it gets."""
    seen: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(str(error)))
    monkeypatch.setattr(mpi, "_abort_hook_installed", False)
    world = World()
    mpi.install_abort_hook(world)
    mpi.install_abort_hook(world)  # a second optimizer changes nothing
    return world, seen


def test_uncaught_exception_aborts_after_it_was_printed(hook: tuple[World, list[str]]) -> None:
    """S49: the user's own hook first, once, then the end of all ranks."""
    world, seen = hook
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert seen == ["boom"]
    assert world.aborted == [1]


def test_a_failing_hook_does_not_hide_the_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S49: a broken hook of the user's costs neither the traceback nor the end."""

    def broken(*_: Any) -> None:
        raise KeyError("hook")

    monkeypatch.setattr(sys, "excepthook", broken)
    monkeypatch.setattr(mpi, "_abort_hook_installed", False)
    world = World()
    mpi.install_abort_hook(world)
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert "ValueError: boom" in capsys.readouterr().err
    assert world.aborted == [1]


def test_forked_children_do_not_abort(
    hook: tuple[World, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child inherits the hook, but its failure is no rank's."""
    world, seen = hook
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert seen == ["boom"]
    assert world.aborted == []


@pytest.mark.parametrize("failing", [False, True])
def test_exit_within_a_step_aborts(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """S49: a step that raised is not done, whoever caught it; a later one that ends well is."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(mpi, "_abort_hook_installed", False)
    monkeypatch.setattr(mpi, "_step_open", False)
    world = World()
    mpi.install_abort_hook(world)
    with pytest.raises(ValueError, match="within"), mpi.open_step():
        raise ValueError("within")
    if not failing:
        with mpi.open_step():
            pass
    (exit_function,) = at_exit
    exit_function()
    assert world.aborted == ([1] if failing else [])
