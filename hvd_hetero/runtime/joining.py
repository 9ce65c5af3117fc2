"""``hvd.join()`` beside our exchange: refused where it is called.

A rank that has joined takes part in allreduces only. At the first cached gather of another rank
Horovod's background thread dies on it ("unordered_map::at"), a weighted sum lacks its share, and
an agreement over mpi4py waits for ever. None of this names the cause, so the call itself does.
"""

from __future__ import annotations

from typing import Any, NoReturn

from hvd_hetero.errors import UnsupportedError
from hvd_hetero.runtime.collectives import hvd

_REMEDY = (
    "hvd.join() cannot be combined with compression, a balancer or local_clip_norm of "
    "hvd_hetero.DistributedOptimizer: draw batches from hvd_hetero.Balancer(...).data_loader(...), "
    "which gives every rank the same number of batches, so that no join is needed (hvd.barrier() "
    "waits for all ranks)"
)


def refuse_join() -> None:
    """From now on ``hvd.join()`` raises UnsupportedError in this process.

    For good: autograd keeps the hooks of a wrapped optimizer, so nobody can tell when it is done.
    """

    def join(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"rank {hvd.rank()}: {_REMEDY}")

    hvd.join = join
