"""mpi4py beside Horovod: when it may be used, and how a failing rank ends the job."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import horovod.torch as hvd


def mpi_is_running() -> bool:
    """False once Horovod, and with it MPI, was shut down, by this rank or by another one's end."""
    from mpi4py import MPI

    return bool(hvd.is_initialized()) and not MPI.Is_finalized()


ONE_RANK = "one rank"
NO_MPI = "Horovod runs without MPI"
EXPECTED_WITHOUT_MPI = (ONE_RANK, NO_MPI)
"""Reasons for doing without mpi4py that nobody needs to be warned of."""

_abort_hook_installed = False
_step_open = False


def world_communicator() -> tuple[Any | None, str]:
    """Return mpi4py's COMM_WORLD if it may be used next to Horovod, else None, and the reason.

    The order of questions matters: Horovod raises when asked for MPI's threads under Gloo, and
    importing mpi4py.MPI initialises MPI.
    """
    if int(hvd.size()) == 1:
        return None, ONE_RANK
    if not hvd.mpi_enabled():
        return None, NO_MPI
    if not hvd.mpi_threads_supported():
        return None, "MPI was initialised without multi-threading (MPI_THREAD_MULTIPLE)"
    try:
        from mpi4py import MPI
    except Exception as error:  # a build against another MPI fails with errors of many kinds
        return None, f"mpi4py cannot be imported ({type(error).__name__}: {error})"
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (int(hvd.rank()), int(hvd.size())):
        return None, (
            f"mpi4py sees rank {world.Get_rank()} of {world.Get_size()}, Horovod rank "
            f"{hvd.rank()} of {hvd.size()}: they were built against different MPIs"
        )
    return world, "mpi4py"


def install_abort_hook(world: Any) -> None:
    """Make an uncaught exception of this rank end the whole MPI job, once it was printed.

    Without it Python's exit waits in MPI_Finalize for ranks that wait for this one. A script that
    catches what a step raised and then exits ends the job too: the others are within that step.
    """
    global _abort_hook_installed
    if _abort_hook_installed:
        return
    _abort_hook_installed = True
    previous, rank_process = sys.excepthook, os.getpid()

    def print_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            previous(kind, error, trace)
        except Exception:
            traceback.print_exception(kind, error, trace)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if os.getpid() == rank_process:  # a forked child has the hook, but is no rank
                world.Abort(1)

    def abort_within_step() -> None:
        if _step_open and os.getpid() == rank_process:
            sys.stderr.flush()
            world.Abort(1)

    sys.excepthook = print_and_abort
    atexit.register(abort_within_step)  # runs before what Horovod and mpi4py registered


@contextmanager
def open_step() -> Iterator[None]:
    """Mark an optimizer step; one that raises stays open until another one is done."""
    global _step_open
    _step_open = True
    yield
    _step_open = False
