"""One training of the demo: model, slowed-down ranks, optimizer, stopwatch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from demo_data import Images
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import hvd_hetero as het
from hvd_hetero.planning.cost_model import dense_bytes
from hvd_hetero.telemetry.records import ConfigurationRecord, WindowRecord
from hvd_hetero.telemetry.sink import JsonLinesSink

RUNS = ("horovod", "balance", "compression", "both")
WINDOW_STEPS = 10  # between two decisions, and between two evaluations
FORWARD_SHARE = 1 / 3  # of the sleeping; backward takes about twice as long as forward


@dataclass(frozen=True)
class Settings:
    """What all trainings have in common. ``slowdown``: a factor for each rank."""

    slowdown: tuple[float, ...]
    seconds_per_sample: float
    global_batch_size: int
    steps: int
    eps: float
    target_accuracy: float
    learning_rate: float
    momentum: float
    records: Path


@dataclass
class Run:
    """What one training came to, as seen by this rank.

    ``step_seconds`` is the time of each step from asking for the batch to the updated model.
    ``evaluations`` holds (step, seconds of training so far, accuracy on the test set).
    """

    name: str
    seed: int
    elements: int = 0
    step_seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    local_batches: tuple[int, ...] = ()


class Progress(Protocol):
    """Who is told how a training goes on."""

    def step(self, run: Run) -> None: ...


class _Sleep(torch.autograd.Function):
    """Passes a batch on unchanged, and sleeps for each of its samples in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward * len(x)
        time.sleep(forward * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Slow(nn.Module):
    """Makes this rank a slow machine while it trains: a layer that sleeps per sample."""

    def __init__(self, seconds_per_sample: float) -> None:
        super().__init__()
        self.forward_seconds = seconds_per_sample * FORWARD_SHARE
        self.backward_seconds = seconds_per_sample - self.forward_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        sleep: Any = _Sleep
        result: torch.Tensor = sleep.apply(x, self.forward_seconds, self.backward_seconds)
        return result


def build_model(pixels: int, classes: int, seconds_per_sample: float) -> nn.Sequential:
    """A perceptron with two hidden layers; the sleep is shared out between its layers."""
    return nn.Sequential(
        nn.Linear(pixels, 256),
        nn.ReLU(),
        Slow(seconds_per_sample / 2),
        nn.Linear(256, 512),
        nn.ReLU(),
        Slow(seconds_per_sample / 2),
        nn.Linear(512, classes),
    )


def warm_up() -> None:
    """Load what torch loads at its first step, seconds that would count against the first run."""
    model = build_model(pixels=4, classes=2, seconds_per_sample=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss: Any = F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(name: str, seed: int, data: Images, settings: Settings, progress: Progress) -> Run:
    """Train once: stock Horovod ("horovod"), "balance" or "compression" alone, or "both"."""
    _mark(name, seed, settings)
    torch.manual_seed(seed)
    slowness = settings.seconds_per_sample * settings.slowdown[hvd.rank()]
    model = build_model(data.pixels, data.classes, slowness)
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=settings.momentum
    )
    log = str(settings.records)
    balancer = None
    if name in ("balance", "both"):
        balancer = het.Balancer(settings.global_batch_size, seed=seed)
    if name == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    elif name == "balance":
        optimizer = het.DistributedOptimizer(
            optimizer, model.named_parameters(), balancer=balancer, log=log
        )
    else:
        # On one machine the network is memory, and doing no harm would mean to send dense; the demo
        # is to show what compression does.
        compression = het.Compression.adaptive(eps=settings.eps, do_no_harm=False)
        optimizer = het.DistributedOptimizer(
            optimizer, model.named_parameters(), compression, balancer=balancer, log=log
        )
    # The rate falls to 0, so that the accuracy at the end is no matter of the last few batches.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    run = Run(name, seed, elements=sum(p.numel() for p in model.parameters()))
    batches = _batches(data, settings.global_batch_size, seed, balancer)
    hvd.barrier()
    for step in range(1, settings.steps + 1):
        began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        run.step_seconds.append(time.perf_counter() - began)
        if step % WINDOW_STEPS == 0:
            run.local_batches = _local_batches(balancer, settings.global_batch_size)
            run.evaluations.append((step, sum(run.step_seconds), _accuracy(model, data)))
        progress.step(run)
    if name == "horovod":
        _record_stock(run, settings.records)
    return run


def _batches(
    data: Images, global_batch_size: int, seed: int, balancer: het.Balancer | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of this rank, epoch after epoch; without a balancer the even ones of Horovod."""
    sampler: Any = balancer
    loader: DataLoader[Any]
    if balancer is not None:
        loader = balancer.data_loader(data.train, shuffle=True)
    else:
        sampler = DistributedSampler(data.train, hvd.size(), hvd.rank(), seed=seed)
        loader = DataLoader(data.train, global_batch_size // hvd.size(), sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _accuracy(model: nn.Module, data: Images) -> float:
    """Share of the test set that is right. Every rank looks at its part; all wait for all."""
    mine = slice(hvd.rank(), None, hvd.size())
    model.eval()
    with torch.no_grad():
        right = (model(data.test_x[mine]).argmax(dim=1) == data.test_y[mine]).sum()
    model.train()
    total = hvd.allreduce(right.double(), op=hvd.Sum, name="demo.accuracy")
    return float(total) / len(data.test_y)


def _local_batches(balancer: Any, global_batch_size: int) -> tuple[int, ...]:
    if balancer is not None:
        return tuple(balancer.plan.local_batches)
    ranks: int = hvd.size()
    return (global_batch_size // ranks,) * ranks


# ---- records ------------------------------------------------------------------------------------


def _mark(name: str, seed: int, settings: Settings) -> None:
    """Write which training the next records belong to."""
    if hvd.rank() == 0:
        options = {"run": name, "seed": seed, "slowdown": list(settings.slowdown)}
        with JsonLinesSink(settings.records) as sink:
            sink.write(ConfigurationRecord({"hvd-hetero": het.__version__}, hvd.size(), options))


def _record_stock(run: Run, path: Path) -> None:
    """Write for stock Horovod what our optimizer writes for itself, as far as it can be known."""
    if hvd.rank() != 0:
        return
    unknown = (float("nan"),) * hvd.size()
    with JsonLinesSink(path) as sink:
        for stop in range(WINDOW_STEPS, len(run.step_seconds) + 1, WINDOW_STEPS):
            seconds = sorted(run.step_seconds[stop - WINDOW_STEPS : stop])
            sink.write(
                WindowRecord(
                    step=stop,
                    step_seconds=seconds[len(seconds) // 2],
                    compute_seconds=unknown,
                    wait_seconds=unknown,
                    local_batches=run.local_batches,
                    global_batch_size=sum(run.local_batches),
                    cf=None,
                    gain=None,
                    strategy="dense",
                    bytes_per_step=dense_bytes(hvd.size(), run.elements),
                    plan_reason="stock Horovod: even split",
                )
            )
