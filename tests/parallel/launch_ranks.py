"""What the ranks of launch_test.py do."""

from __future__ import annotations

import time
from typing import Any

import torch


def total(elements: int) -> dict[str, Any]:
    """Sum 1 + rank over the ranks with one named allreduce of Horovod."""
    import horovod.torch as hvd

    hvd.init()
    own = torch.full((elements,), 1.0 + hvd.rank())
    summed = hvd.allreduce(own, op=hvd.Sum, name="total")
    print(f"hello from {hvd.rank()}")
    result = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "total": summed.tolist(),
        "mpi": hvd.mpi_enabled(),
        "threads": torch.get_num_threads(),
    }
    hvd.shutdown()
    return result


def fail_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == rank:
        raise ValueError(f"rank {rank} was told to fail")
    time.sleep(300)


def exit_quietly_on(rank: int) -> None:
    """End one rank with status 3; launchers may or may not report it."""
    import horovod.torch as hvd

    hvd.init()
    me = hvd.rank()
    hvd.shutdown()
    if me == rank:
        raise SystemExit(3)


def sleep(seconds: float) -> None:
    """Do nothing for a time."""
    time.sleep(seconds)
