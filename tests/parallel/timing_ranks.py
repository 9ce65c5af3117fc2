"""What the ranks of timing_test.py do: train with one rank slow in some part of the step."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import Dataset

import hvd_hetero as het
from hvd_hetero.telemetry.records import WindowRecord
from hvd_hetero.telemetry.report import read_records

SLOW_RANK = 1
GLOBAL_BATCH = 16
USUAL_SECONDS = 0.3e-3  # of a sample in each part


class Samples(Dataset[Any]):
    """Takes its time for every sample."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._seconds)
        return torch.full((16,), index / 4096), torch.ones(1)


class Slow(torch.autograd.Function):
    """The identity, which takes its time for every sample in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward * len(x)
        time.sleep(forward * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Net(torch.nn.Module):
    """Buckets that become ready before the slow part of backward, and after it."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(16, 400)
        self.middle = torch.nn.Linear(400, 400)
        self.last = torch.nn.Linear(400, 1)
        self._seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Slow.apply(torch.relu(self.first(x)), *self._seconds)
        out: torch.Tensor = self.last(torch.relu(self.middle(hidden)))
        return out


def train(part: str, slow_seconds: float, workers: int, folder: str) -> dict[str, Any]:
    """Train 20 steps; rank 1 needs ``slow_seconds`` a sample in ``part``.

    Returns what the last record says, on rank 0.
    """
    hvd.init()
    torch.set_num_threads(1)
    mine = hvd.rank() == SLOW_RANK

    def seconds(of: str) -> float:
        return slow_seconds if mine and part == of else USUAL_SECONDS

    log = Path(folder) / "log.jsonl"
    model = Net(seconds("forward"), seconds("backward"))
    balancer = het.Balancer(GLOBAL_BATCH, window_steps=10, fixed_local_batches=[8, 8])
    loader = balancer.data_loader(Samples(seconds("input")), num_workers=workers)
    optimizer: Any = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        balancer=balancer,
        compression=het.Compression.topk(100),
        bucket_bytes=100_000,
        log=log,
    )
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 20:
            break
    hvd.barrier()
    if hvd.rank() != 0:
        return {}
    last = [record for record in read_records(log) if isinstance(record, WindowRecord)][-1]
    return {
        "slow_ranks": [dict(slow) for slow in last.slow_ranks],
        "parts": {
            name: list(getattr(last, f"{name}_seconds"))
            for name in ("input", "forward", "backward", "compress", "compute", "wait")
        },
        "step_seconds": last.step_seconds,
        "overhead_seconds": last.overhead_seconds,
        "exchanges_in_backward": optimizer._hetero.exchanger.launched_in_backward,
    }
