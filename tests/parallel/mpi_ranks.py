"""What the ranks of mpi_test.py do: mpi4py and loader workers beside Horovod."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

TIMEOUT_SECONDS = 60.0
EPOCH_SAMPLES = 80
GLOBAL_BATCH = 8
WORKERS, PREFETCH = 2, 2


class Indices(Dataset[Any]):
    """Every sample is its own index, and an input to train on."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((16,), 0.01 * index)


class Messages(logging.Handler):
    """Collects what the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(imported: str, scenarios: list[str]) -> dict[str, Any]:
    """Import mpi4py "before" or "after" ``hvd.init()``, "single" (before, and without threads) or
    not at all ("absent"); return each scenario's result, or the traceback as {"error": ...}."""
    if imported == "single":
        import mpi4py

        mpi4py.rc.thread_level = "single"
    if imported in ("before", "single"):
        import mpi4py.MPI  # initialises MPI
    import horovod.torch as hvd

    hvd.init()
    if imported == "after":
        import mpi4py.MPI
    results = {}
    for name in scenarios:
        try:
            results[name] = SCENARIOS[name]()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    return results


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def _wrap(model: torch.nn.Module, balancer: Any) -> Any:
    import hvd_hetero as het

    return het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=het.Compression.topk(10),
        balancer=balancer,
        exchange_timeout_seconds=TIMEOUT_SECONDS,
    )


def _step(optimizer: Any, model: torch.nn.Module, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def channel() -> dict[str, Any]:
    """Train over a few agreements; return which channel they took and what was logged."""
    import horovod.torch as hvd

    import hvd_hetero as het

    logger, messages = logging.getLogger("hvd_hetero"), Messages()
    level = logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    try:
        model = _model()
        balancer = het.Balancer(
            GLOBAL_BATCH, window_steps=2, exchange_timeout_seconds=TIMEOUT_SECONDS
        )
        loader = balancer.data_loader(Indices(EPOCH_SAMPLES))
        optimizer = _wrap(model, balancer)
        for _, x in loader:
            _step(optimizer, model, x)
    finally:
        logger.removeHandler(messages)
        logger.setLevel(level)
    return {
        "channel": type(optimizer._hetero._coordinator._channel).__name__,
        "steps": optimizer._hetero._coordinator.steps,
        "messages": messages.texts,
        "parameters": [p.double().sum().item() for p in model.parameters()],
        "threads": hvd.mpi_enabled() and hvd.mpi_threads_supported(),
    }


def barriers() -> list[float]:
    """A hundred times a barrier of mpi4py and an allreduce of Horovod."""
    import horovod.torch as hvd
    from mpi4py import MPI

    sums = []
    for number in range(100):
        MPI.COMM_WORLD.Barrier()
        own = torch.tensor([float(number * (hvd.rank() + 1))])
        sums.append(hvd.allreduce(own, op=hvd.Sum, name="between_barriers").item())
    return sums


def allreduces() -> list[float]:
    """The same without mpi4py's barrier, which an MPI without threads does not allow."""
    import horovod.torch as hvd

    return [
        hvd.allreduce(
            torch.tensor([float(number * (hvd.rank() + 1))]), op=hvd.Sum, name="alone"
        ).item()
        for number in range(100)
    ]


# ---- loaders ------------------------------------------------------------------------------------


def _script(balancer: Any, plans: dict[int, list[int]]) -> None:
    """Let rank 0 decide for these sizes at the n-th window, and keep the plan at all others."""
    from hvd_hetero.planning.plan import Plan

    windows, current = [0], [balancer.plan]

    def decide(_windows: Any, reports: Any, *_: Any) -> dict[str, Any]:
        windows[0] += 1
        sizes = plans.get(windows[0])
        if sizes is not None:
            current[0] = Plan(current[0].version + 1, tuple(sizes), "scripted")
        return {
            "plan": current[0].to_dict(),
            "effective": list(max(tuple(one["drawn"]) for one in reports)),
            "reason": "scripted",
        }

    balancer.decide = decide


def _epochs(
    samples: int,
    balancer: Any,
    epochs: int,
    plans: dict[int, list[int]],
    **options: Any,
) -> dict[str, Any]:
    """Train; return the indices of every batch by epoch, and a digest of the parameters."""
    model = _model()
    loader = balancer.data_loader(Indices(samples), **options)
    optimizer = _wrap(model, balancer)
    _script(balancer, plans)
    read = []
    for epoch in range(epochs):
        balancer.set_epoch(epoch)
        batches = []
        for indices, x in loader:
            batches.append(indices.tolist())
            _step(optimizer, model, x)
        read.append(batches)
    del loader
    return {
        "read": read,
        "parameters": [p.double().sum().item() for p in model.parameters()],
    }


def _workers(method: str | None, workers: int) -> dict[str, Any]:
    import hvd_hetero as het

    options: dict[str, Any] = {}
    if workers:
        options = {"prefetch_factor": PREFETCH, "persistent_workers": True}
        if method is not None:
            options["multiprocessing_context"] = method
    balancer = het.Balancer(GLOBAL_BATCH, window_steps=4, exchange_timeout_seconds=TIMEOUT_SECONDS)
    # Ten steps an epoch: the plans are agreed after steps 4 and 12.
    plans = {1: [6, 2], 3: [2, 6]}
    return _epochs(EPOCH_SAMPLES, balancer, 2, plans, shuffle=True, num_workers=workers, **options)


def _thirteen(first: list[int], drop_last: bool) -> dict[str, Any]:
    """S37: 13 samples; the sizes change from 4:1 to 3:2, or the other way, after two steps."""
    import hvd_hetero as het

    balancer = het.Balancer(
        5, min_local_batch=1, window_steps=1, exchange_timeout_seconds=TIMEOUT_SECONDS
    )
    second = [3, 2] if first == [4, 1] else [4, 1]
    # The even plan that comes before any agreement is replaced before anything is read.
    from hvd_hetero.planning.plan import Plan

    with balancer.schedule.agreement() as schedule:
        schedule.install(Plan(1, tuple(first), "scripted"), (0, 0))
    return _epochs(13, balancer, 2, {2: second}, shuffle=True, drop_last=drop_last)


SCENARIOS: dict[str, Callable[[], Any]] = {
    "channel": channel,
    "barriers": barriers,
    "allreduces": allreduces,
    "workers none": lambda: _workers(None, 0),
    "workers fork": lambda: _workers("fork", WORKERS),
    "workers forkserver": lambda: _workers(None, WORKERS),
    "13 samples 4:1": lambda: _thirteen([4, 1], drop_last=False),
    "13 samples 3:2": lambda: _thirteen([3, 2], drop_last=False),
    "13 samples 4:1 drop": lambda: _thirteen([4, 1], drop_last=True),
    "13 samples 3:2 drop": lambda: _thirteen([3, 2], drop_last=True),
}
