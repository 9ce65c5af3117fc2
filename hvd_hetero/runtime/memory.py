"""What this rank's device has of memory, and errors when it is full."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from types import TracebackType

import torch

from hvd_hetero.balance.memory import MemoryUse

logger = logging.getLogger("hvd_hetero")

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def memory_use(device: torch.device) -> MemoryUse | None:
    """Return what this process uses of the device's memory; None where nothing limits it."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return MemoryUse(
        peak_bytes=int(torch.cuda.max_memory_allocated(device)),
        limit_bytes=max(int(free_bytes) + int(torch.cuda.memory_reserved(device)), 1),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of a device or the host, is full."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def explain_out_of_memory(describe: Callable[[], str]) -> None:
    """Say ``describe()`` when an uncaught error of this process is that memory is full.

    A step that ran out of memory cannot be tried again with a smaller batch: the others are within
    the same step. So the job ends, and this is the place to name rank, batch and remedy.
    describe: a bound method; it is forgotten with its object.
    """
    method, previous = weakref.WeakMethod(describe), sys.excepthook

    def print_and_explain(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        alive = method()
        if alive is not None and is_out_of_memory(error):
            logger.critical("%s", alive())
        previous(kind, error, trace)  # may end the process

    sys.excepthook = print_and_explain
