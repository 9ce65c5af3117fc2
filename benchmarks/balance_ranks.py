"""What every rank of ``benchmarks/balance.py`` runs: measured alone, then all methods in turn."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import hvd_hetero as het  # noqa: E402
from benchmarks.balance_rules import (  # noqa: E402
    Batches,
    lb_bsp_settled,
    rank_model,
    sizes_to_measure,
)
from benchmarks.lab.network import limit_cpu  # noqa: E402
from hvd_hetero.balance.optperf import Bounds, solve, step_seconds  # noqa: E402
from hvd_hetero.telemetry.records import WindowRecord, parse_line  # noqa: E402

ALONE_STEPS, SETTLE_STEPS = 5, 4  # the first of each is left out
EXCHANGES = 7
UNITS_PER_SECOND = 100_000  # of work, about what one core does; speeds are measured, not set by it


class Work:
    """The seconds of one rank: slept, or worked off within a share of the CPU."""

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        cluster = options["cluster"]
        self._layers = options["layers"]
        self._sample_seconds = options["sample_seconds"] / cluster["speeds"][rank]
        self._fixed_seconds = options["fixed_seconds"]
        self._forward_share = cluster["forward_shares"][rank]
        self._cpu_group = options["cpu_groups"][rank] if options["cpu_groups"] else None
        self._cpu_share = options["cpu_shares"][rank] if options["cpu_groups"] else 0.0
        self._slowness = 1.0
        self._matrix = torch.eye(64)
        self._product = torch.empty(64, 64)

    def slow_down(self, slowness: float) -> None:
        """Take ``slowness`` times as long from now on."""
        if self._cpu_group is None:
            self._slowness = slowness
        else:
            limit_cpu(self._cpu_group, self._cpu_share / slowness)

    def forward(self, samples: int) -> None:
        seconds = self._sample_seconds * self._forward_share * samples + self._fixed_seconds
        self._spend(seconds / self._layers)

    def backward(self, samples: int) -> None:
        seconds = self._sample_seconds * (1.0 - self._forward_share) * samples
        self._spend(seconds / self._layers)

    def _spend(self, seconds: float) -> None:
        if self._cpu_group is None:
            time.sleep(seconds * self._slowness)
            return
        for _ in range(round(seconds * self._cpu_share * UNITS_PER_SECOND)):
            torch.mm(self._matrix, self._matrix, out=self._product)


class Spend(torch.autograd.Function):
    """Takes time forward and backward, and gives its weight a gradient that costs nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, work: Work) -> torch.Tensor:
        work.forward(len(x))
        ctx.work, ctx.samples, ctx.shape = work, len(x), weight.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.work.backward(ctx.samples)
        return gradient, torch.full(ctx.shape, 1e-6), None


class Layer(torch.nn.Module):
    def __init__(self, elements: int, work: Work) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements))
        self._work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spend.apply(x, self.weight, self._work)


def network(options: dict[str, Any], work: Work) -> torch.nn.Sequential:
    layers = [Layer(options["layer_elements"], work) for _ in range(options["layers"])]
    return torch.nn.Sequential(*layers)


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(torch.zeros(samples, 1))


class Training:
    """One method's training; a turn is one pass over its loader, and the first step is left out."""

    def __init__(
        self,
        method: str,
        options: dict[str, Any],
        work: Work,
        *,
        fixed: Batches | None,
        steps: int,
        log: str | None = None,
    ) -> None:
        self.method = method
        self.seconds: list[float] = []  # of a step, by turn
        self.predicted_seconds: list[float | None] = []  # before the turn, by turn; rank 0
        self.steps = 0
        samples = options["global_batch_size"]
        self.balancer = het.Balancer(samples, fixed_local_batches=fixed)
        self._loader = self.balancer.data_loader(dataset(samples * steps))
        self._model = network(options, work)
        self._optimizer = het.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), lr=1e-3),
            named_parameters=self._model.named_parameters(),
            balancer=self.balancer,
            bucket_bytes=options["bucket_bytes"],
            log=log,
        )

    def turn(self) -> None:
        """Do one pass and keep the median of its steps' seconds."""
        self.predicted_seconds.append(self.balancer.expected_seconds)
        ends = []
        for (x,) in self._loader:
            self._optimizer.zero_grad()
            self._model(x).mean().backward()
            self._optimizer.step()
            ends.append(time.perf_counter())
        steps = [b - a for a, b in itertools.pairwise(ends)]
        self.seconds.append(statistics.median(steps))
        self.steps += len(ends)

    def forget(self) -> None:
        """Start measuring anew; what the Balancer has learnt stays."""
        self.seconds, self.predicted_seconds = [], []


class Alone:
    """This rank's own seconds, without any exchange."""

    def __init__(self, options: dict[str, Any], work: Work) -> None:
        self._model = network(options, work)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._ready = 0.0
        for parameter in self._model.parameters():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._ready = self._ready or time.perf_counter()

    def measure(self, samples: int, steps: int) -> tuple[float, float]:
        """Return median (ready_seconds, done_seconds) of steps with ``samples`` each."""
        readys, dones = [], []
        start = 0.0
        for (x,) in DataLoader(dataset(samples * steps), batch_size=samples):
            self._optimizer.zero_grad()
            self._ready = 0.0
            self._model(x).mean().backward()
            end = time.perf_counter()
            if start:
                readys.append(self._ready - start)
                dones.append(end - start)
            start = end  # where an exchange would have ended: the update is part of the next step
            self._optimizer.step()
        return statistics.median(readys), statistics.median(dones)


def exchange_seconds(options: dict[str, Any]) -> tuple[float, float]:
    """Return (T_o, T_u): of all layers but the last to be ready, and of the last."""
    gradients = [torch.zeros(options["layer_elements"]) for _ in range(options["layers"])]

    def timed(count: int) -> float:
        hvd.allreduce(torch.zeros(1), name="balance.barrier")
        start = time.perf_counter()
        handles = [
            hvd.allreduce_async_(gradient, name=f"balance.exchange.{index}")
            for index, gradient in enumerate(gradients[:count])
        ]
        for handle in handles:
            hvd.synchronize(handle)
        return time.perf_counter() - start

    def median(count: int) -> float:
        own = [timed(count) for _ in range(EXCHANGES)][1:]
        by_rank = hvd.allgather_object(own, name=f"balance.exchanges.{count}")
        return statistics.median(min(turn) for turn in zip(*by_rank, strict=True))

    whole, last = median(len(gradients)), median(1)
    final = min(last, whole)
    return whole - final, final


def run_phase(
    options: dict[str, Any], phase: dict[str, Any], work: Work, alone: Alone, ours: Training
) -> list[dict[str, Any]]:
    """Measure one phase; return its rows, alike on all ranks."""
    rank, ranks, total = hvd.rank(), hvd.size(), options["global_batch_size"]
    work.slow_down(phase["slowness"][rank])
    even = tuple(total // ranks + (one < total % ranks) for one in range(ranks))

    own = [(size, *alone.measure(size, ALONE_STEPS)) for size in sizes_to_measure(max(even))]
    models = [rank_model(points) for points in hvd.allgather_object(own, name="balance.alone")]
    overlapped, final = exchange_seconds(options)
    ideal = solve(
        models,
        total,
        bounds=Bounds.build(ranks, total),
        overlapped_seconds=overlapped,
        final_seconds=final,
    ).local_batches

    def compute_seconds(batches: Batches) -> list[float]:
        _, done = alone.measure(batches[rank], SETTLE_STEPS)
        seconds: list[float] = hvd.allgather_object(done, name="balance.compute")
        return seconds

    lb_bsp, lb_bsp_windows = lb_bsp_settled(compute_seconds, even, options["delta_samples"])

    def fixed(method: str, batches: Batches) -> Training:
        return Training(method, options, work, fixed=batches, steps=options["turn_steps"])

    trainings = [
        fixed("even", even),
        fixed("even again", even),
        fixed("lb-bsp", lb_bsp),
        ours,
        fixed("ideal", ideal),
    ]
    ours.forget()
    first_step = ours.steps
    for _ in range(options["windows"]):
        ours.turn()
    learning_seconds = list(ours.seconds)
    ours.forget()
    for number in range(options["rounds"] if phase["measured"] else 0):
        start = number % len(trainings)
        for training in trainings[start:] + trainings[:start]:
            training.turn()
    rows = []
    for training in trainings:
        by_rank = hvd.allgather_object(training.seconds, name="balance.seconds")
        batches = training.balancer.plan.local_batches
        predicted = list(training.predicted_seconds)  # ours goes on in the next phase
        if training is not ours:
            expected = step_seconds(models, batches, overlapped, final)
            predicted = [expected] * len(training.seconds)
        rows.append(
            {
                "case": phase["case"],
                "method": training.method,
                "local_batches": list(batches),
                "turns": [max(turn) for turn in zip(*by_rank, strict=True)],
                "predicted": predicted,
                "windows": {"lb-bsp": lb_bsp_windows, "ours": options["windows"]}.get(
                    training.method, 0
                ),
                "learning_seconds": learning_seconds if training is ours else [],
                "steps": [first_step, ours.steps],
                "expected_seconds": step_seconds(models, batches, overlapped, final),
                "overlapped_seconds": overlapped,
                "final_seconds": final,
                "models": [model.to_dict() for model in models],
            }
        )
    return rows if phase["measured"] else []


def windows_of(log: str) -> list[dict[str, Any]]:
    """Return what the records say of every window of ours."""
    records = [parse_line(line) for line in Path(log).read_text().splitlines()]
    return [
        {
            "step": record.step,
            "local_batches": list(record.local_batches),
            "step_seconds": record.step_seconds,
            "compute_seconds": list(record.compute_seconds),
            "wait_seconds": list(record.wait_seconds),
            "reason": record.plan_reason,
        }
        for record in records
        if isinstance(record, WindowRecord)
    ]


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    work = Work(options, hvd.rank())
    ours = Training(
        "ours", options, work, fixed=None, steps=options["window_steps"], log=options["log"]
    )
    alone = Alone(options, work)
    rows = []
    for phase in options["phases"]:
        rows += run_phase(options, phase, work, alone, ours)
    if hvd.rank() == 0:
        result = {"rows": rows, "windows": windows_of(options["log"])}
        Path(options["output"]).write_text(json.dumps(result))
    hvd.allreduce(torch.zeros(1), name="balance.end")
    hvd.shutdown()


if __name__ == "__main__":
    main()
