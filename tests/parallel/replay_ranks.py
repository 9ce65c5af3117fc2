"""What the ranks of replay_test.py do: train with real timings, one rank slowed down; and replay.

The slow rank makes plan and compression depend on timing, so that another slow rank would lead to
other parameters.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_hetero as het
from tests.parallel.scenarios import loss_of, values

SAMPLES, GLOBAL_BATCH, STEPS, WINDOW = 325, 16, 36, 3
SECONDS_A_SAMPLE = 10e-3  # clear of the noise of a busy machine


class Samples(torch.utils.data.Dataset[Any]):
    """(index, x, label); at the top of the module, as workers import it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(6, generator=generator), index % 3


def compression_of(kind: str | None) -> Any:
    """Return the compression of a run."""
    search = {"window": WINDOW, "min_cf": 4, "max_cf": 300, "eps": 0.05, "flush_steps": 4}
    search["omega"] = 1e-6  # else it may end at once where throughputs are noisy
    if kind == "gravac":
        return het.Compression.adaptive(do_no_harm=False, **search)
    if kind == "no harm":
        return het.Compression.adaptive(dense_steps=4, dense_wait_windows=1, **search)
    if kind == "model":
        return het.Compression.adaptive(policy="model", dense_steps=4, do_no_harm=False, **search)
    return het.Compression.none


def train(
    kind: str | None,
    slow: int,
    workers: int = 0,
    log: str | None = None,
    replay: str | None = None,
    save: str | None = None,
    load: str | None = None,
    steps: int = STEPS,
    **options: Any,
) -> dict[str, Any]:
    """Train up to ``steps`` steps; ``save`` after a third of them, go on from where ``load`` was
    saved. Returns parameters, the samples of every step, and how it was exchanged."""
    if not hvd.is_initialized():
        hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 200), torch.nn.Tanh(), torch.nn.Linear(200, 200), torch.nn.Linear(200, 3)
    )
    balancer = het.Balancer(
        options.pop("global_batch_size", GLOBAL_BATCH),
        window_steps=WINDOW,
        min_gain=0.0,
        seed=3,
        exchange_timeout_seconds=60,
    )
    worker_options: dict[str, Any] = {}
    if workers:  # their server imports torch once, not each of them
        multiprocessing.set_forkserver_preload(["torch", __name__])
        worker_options = {"num_workers": workers, "persistent_workers": True}
    loader = balancer.data_loader(Samples(), shuffle=True, **worker_options)
    optimizer: Any = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        options.pop("compression", None) or compression_of(kind),
        balancer=balancer,
        log=log,
        replay=replay,
        exchange_timeout_seconds=60,
        **{"bucket_bytes": 50_000, **options},
    )
    done = epoch = 0
    if load is not None:
        saved = torch.load(Path(load) / f"rank{hvd.rank()}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.load_hetero_state_dict(saved["hetero"])
        done, epoch = saved["done"], saved["epoch"]
    used: list[list[int]] = []
    ways: list[Any] = []
    plans: list[Sequence[int]] = []
    while done < steps:
        balancer.set_epoch(epoch)
        for index, x, labels in loader:
            if hvd.rank() == slow:
                time.sleep(SECONDS_A_SAMPLE * len(x))
            optimizer.zero_grad()
            loss_of(model, x, labels).backward()
            exchanger = optimizer._hetero.exchanger
            mode = exchanger.mode
            ways.append([mode.cf, mode.strategy, list(mode.entries), exchanger.where_it_lies])
            plans.append(balancer.plan.local_batches)
            optimizer.step()
            used.append(index.tolist())
            done += 1
            if save is not None and done == STEPS // 3:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "hetero": optimizer.hetero_state_dict(),
                    "done": done,
                    "epoch": epoch,
                }
                torch.save(state, Path(save) / f"rank{hvd.rank()}.pt")
            if done == steps:
                break
        epoch += 1
    return {"parameters": values(model), "used": used, "ways": ways, "plans": plans}


def several(runs: Sequence[dict[str, Any]]) -> list[Any]:
    """Train several times in one job; of a run that is refused, the message."""
    results: list[Any] = []
    for run in runs:
        try:
            results.append(train(**run))
        except het.ConfigurationError as error:
            results.append(str(error))
    return results
