"""What the ranks of faults_test.py do: train a little, until one of them fails."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from typing import Any

import torch
from torch.utils.data import Dataset

FAILING_RANK = 1
FAILING_STEP = 3
SAMPLES = 64
FAILS_AT = "fails at "


class Samples(Dataset[Any]):
    """A small data set; one of its samples cannot be read where ``broken``."""

    def __init__(self, broken: bool = False) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._broken and index > SAMPLES // 4:
            _say_when()
            raise OSError(f"rank {FAILING_RANK} failed in loader")
        return torch.full((16,), 0.1 + index / SAMPLES), torch.ones(1)


class Net(torch.nn.Module):
    """Two layers; forward or backward raises once ``broken`` names it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 1)
        self.broken = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to much")
        if self.broken == "forward":
            raise RuntimeError(f"rank {FAILING_RANK} failed in forward")
        hidden = torch.relu(self.first(x))
        if self.broken == "backward":
            hidden.register_hook(self._fail)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.second(hidden)
        return out

    def _fail(self, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"rank {FAILING_RANK} failed in backward")


def train(place: str, *, mpi4py: str, workers: int = 0, timeout_seconds: float = 600.0) -> None:
    """Train with compression and balancing; rank 1 fails at ``place``, mostly in step 3.

    At "construction" it fails between the balancer and the optimizer, at "loader" where the data
    set is read, at "gather" and "step" after the optimizer's step; at "caught" the script catches
    what the gather raised, and exits. ``mpi4py``: "absent", or imported before Horovod starts:
    "early".
    """
    if mpi4py == "early":
        from mpi4py import MPI  # noqa: F401  imported for its effect: it initialises MPI

    import horovod.torch as hvd

    import hvd_hetero as het

    hvd.init()
    mine = hvd.rank() == FAILING_RANK
    model = Net()
    balancer = het.Balancer(8, window_steps=2)
    if mine and place == "construction":
        _say_when()
        raise RuntimeError(f"rank {FAILING_RANK} failed in construction")
    loader = balancer.data_loader(
        Samples(broken=mine and place == "loader"), shuffle=True, num_workers=workers
    )
    optimizer = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=het.Compression.topk(10),
        balancer=balancer,
    )
    optimizer._hetero.exchanger._timeout_seconds = timeout_seconds  # not of the construction
    hvd.barrier()
    steps = 0
    for _ in range(1000):
        for x, y in loader:
            steps += 1
            failing = mine and steps == FAILING_STEP
            if failing:
                _say_when()
                model.broken = place
                _end(place)
                if place in ("gather", "caught"):
                    optimizer._hetero._coordinator._report = _fail_in_report
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(x), y))
            try:
                optimizer.step()
            except RuntimeError:
                if place != "caught":
                    raise
                traceback.print_exc()
                sys.exit(3)
            if failing and place == "step":
                raise RuntimeError(f"rank {FAILING_RANK} failed in step")


def _end(place: str) -> None:
    """End, or stay away, without an exception that Python would print."""
    if place == "exit":
        sys.exit(3)
    if place == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if place == "late":
        time.sleep(300)
    if place == "join":
        import horovod.torch as hvd

        hvd.join()


def _fail_in_report(due: Any) -> None:
    raise RuntimeError(f"rank {FAILING_RANK} failed in gather")


def _say_when() -> None:
    print(f"{FAILS_AT}{time.time()}", flush=True)
