"""What the ranks of resume_test.py do: train, save in mid-epoch, end; and go on from there."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_hetero as het
from tests.parallel.scenarios import loss_of, script_plans, toy_data, toy_model, uneven_splits

SAMPLES, GLOBAL_BATCH, EPOCH = 61, 12, 3


def train(folder: str, workers: int, stop_after: int | None, saved_by: int | None) -> list[int]:
    """Return the samples this rank has trained on; from a saved state if there is one.

    stop_after: steps after which all ranks save, train one more step and kill themselves; None: to
    the end of the epoch.
    """
    hvd.init()
    torch.set_num_threads(1)
    model = toy_model()
    balancer = het.Balancer(GLOBAL_BATCH, min_local_batch=1, window_steps=2, seed=5)
    loader = balancer.data_loader(toy_data(SAMPLES), shuffle=True, num_workers=workers)
    optimizer: Any = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        balancer=balancer,
        compression=het.Compression.topk(4),
    )
    if saved_by is not None:
        saved = [torch.load(path(folder, rank), weights_only=True) for rank in range(saved_by)]
        model.load_state_dict(saved[0]["model"])
        states = [one["hetero"] for one in saved]
        optimizer.load_hetero_state_dict(states[hvd.rank()] if saved_by == hvd.size() else states)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.size() > 1:
        script_plans(balancer, uneven_splits(hvd.size(), GLOBAL_BATCH))
    balancer.set_epoch(EPOCH)
    used: list[int] = []
    for step, (index, x, labels) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss_of(model, x, labels).backward()
        optimizer.step()
        if stop_after is not None and step > stop_after:
            hvd.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        used += index.tolist()
        if step == stop_after:
            state = {
                "model": model.state_dict(),
                "hetero": optimizer.hetero_state_dict(),
                "used": used,
            }
            torch.save(state, path(folder, hvd.rank()))
    return used


def path(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"
