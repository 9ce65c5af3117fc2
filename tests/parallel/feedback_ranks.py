"""What the ranks of feedback_test.py do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.parallel.scenarios import (
    GLOBAL_BATCH,
    TIMEOUT_SECONDS,
    WINDOW_STEPS,
    loss_of,
    run_scenarios,
    script_plans,
    toy_data,
    toy_model,
    uneven_splits,
)

SAMPLES = 53
HIDDEN = 96
LEARNING_RATE = 0.25


@dataclass(frozen=True)
class Course:
    """A compressed training; plans change every WINDOW_STEPS steps.

    ``compression``: a CF, or the options of ``Compression.adaptive``. ``forced``: before which step
    to change to which (CF or None for dense, flush steps). ``dropped_before``: before these steps
    gradients are computed and thrown away by ``zero_grad``, once exchanged and once not.
    ``forget_residuals``: what training without error feedback would do.
    """

    compression: float | Mapping[str, Any]
    forced: Mapping[int, tuple[float | None, int]] = field(default_factory=dict)
    dropped_before: tuple[int, ...] = ()
    passes: int = 1
    forget_residuals: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 24
    exchange: str = "allgather"


_CHANGES = {4: (20.0, 1), 8: (2000.0, 1), 12: (None, 4), 18: (6.0, 1), 22: (None, 1)}

COURSES: dict[str, Course] = {
    "topk": Course(10.0),
    "changing": Course(8.0, _CHANGES, dropped_before=(6, 10, 14)),
    "changing_float64": Course(8.0, _CHANGES, dropped_before=(6, 10, 14), dtype=torch.float64),
    "shared_index": Course(8.0, _CHANGES, dropped_before=(6, 10, 14), exchange="shared-index"),
    "flush_interrupted": Course(30.0, {5: (None, 6), 8: (30.0, 1), 14: (None, 3)}),
    "passes": Course(8.0, {7: (100.0, 1), 15: (None, 2), 20: (5.0, 1)}, passes=2),
    # Gains are far above eps, so the first decision raises the CF.
    "adaptive": Course(
        {"min_cf": 4.0, "max_cf": 300.0, "window": 2, "eps": 0.01, "do_no_harm": False}
    ),
    # The gain at min_cf cannot reach eps = 1: dense after the first window, over three steps.
    "adaptive_to_dense": Course(
        {
            "min_cf": 8.0,
            "window": 4,
            "eps": 1.0,
            "flush_steps": 3,
            "dense_wait_windows": 9,
            "do_no_harm": False,
        }
    ),
    "topk_forgetting": Course(10.0, forget_residuals=True),
    "changing_forgetting": Course(8.0, _CHANGES, forget_residuals=True),
}


def run() -> dict[str, Any]:
    """All courses, one after the other."""
    scenarios: dict[str, Callable[[], Any]] = {
        name: partial(follow, course) for name, course in COURSES.items()
    }
    return run_scenarios(scenarios)


def follow(course: Course) -> dict[str, Any]:
    """Train plain SGD, then look at the law after every step, parameter by parameter:

        (start - now) / learning rate + sum over ranks of residuals = sum of true gradients

    where a step's true gradient is that of a float64 twin with the same parameters, on the joined
    batch of all ranks. Returns ``journal``, one entry a step of: ``error``, the largest absolute
    difference; ``residual`` and ``truth``, the largest absolute entries; ``cf``, ``strategy``,
    ``sizes`` (this rank's batches), ``digest`` (of the parameters' bits). And ``restored``, whether
    residuals were the same bits after each dropped gradient.
    """
    import horovod.torch as hvd

    import hvd_hetero as het
    from hvd_hetero.runtime.exchanger import SparsityMode

    balancer = het.Balancer(
        GLOBAL_BATCH, window_steps=WINDOW_STEPS, exchange_timeout_seconds=TIMEOUT_SECONDS
    )
    script_plans(balancer, uneven_splits(hvd.size()))
    model = toy_model(seed=hvd.rank(), hidden=HIDDEN, dtype=course.dtype)
    compression = (
        het.Compression.adaptive(**course.compression)
        if isinstance(course.compression, Mapping)
        else het.Compression.topk(course.compression, exchange=course.exchange, window=1000)
    )
    optimizer = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        model.named_parameters(),
        compression,
        course.passes,
        balancer=balancer,
        loss_divided_by_passes=True,
        bucket_bytes=2048,
        exchange_timeout_seconds=TIMEOUT_SECONDS,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    exchanger = optimizer._hetero.exchanger
    batches = _endless(
        balancer.data_loader(toy_data(SAMPLES, course.dtype), shuffle=True), balancer
    )

    def backward(x: Tensor, labels: Tensor) -> None:
        (loss_of(model, x, labels) / course.passes).backward()  # type: ignore[no-untyped-call]

    journal: list[dict[str, Any]] = []
    restored: list[bool] = []
    positions = [_flat(model.parameters())]  # before the first step, and after each
    waiting: list[Tensor] = []  # this rank's residuals after each step
    used: list[list[int]] = []  # this rank's samples of each step
    for step in range(course.steps):
        if step in course.forced:
            cf, flush_steps = course.forced[step]
            exchanger.set_mode(SparsityMode(cf, course.exchange), flush_steps)
        entry: dict[str, Any] = {"cf": exchanger.mode.cf, "sizes": []}
        optimizer.zero_grad()
        used.append([])
        for number in range(course.passes):
            indices, x, labels = next(batches)
            if step in course.dropped_before and number == 0:
                before = _digest(_residuals(exchanger, model))
                backward(x, labels)
                optimizer.zero_grad()
                backward(x, labels)
                optimizer.synchronize()
                optimizer.zero_grad()
                restored.append(before == _digest(_residuals(exchanger, model)))
            backward(x, labels)
            used[-1] += indices.tolist()
            entry["sizes"].append(len(indices))
        optimizer.step()
        if course.forget_residuals:
            for bucket in exchanger.buckets:
                bucket.feedback.load(torch.zeros_like(bucket.feedback.residual))
        positions.append(_flat(model.parameters()))
        waiting.append(_flat(_residuals(exchanger, model)))
        entry["strategy"] = exchanger.take_strategy()
        entry["digest"] = _digest(model.parameters())
        journal.append(entry)

    # Only now, so that measuring does not come between the steps.
    residuals = hvd.allreduce(torch.stack(waiting), op=hvd.Sum, name="residuals")
    of_ranks: list[list[list[int]]] = hvd.allgather_object(used)
    joined = [[index for part in step for index in part] for step in zip(*of_ranks, strict=True)]
    truth = torch.zeros_like(positions[0])
    for number, entry in enumerate(journal):
        truth += _true_gradient(positions[number], joined[number], course.dtype)
        applied = (positions[0] - positions[number + 1]) / LEARNING_RATE
        entry["error"] = float((applied + residuals[number] - truth).abs().max())
        entry["residual"] = float(residuals[number].abs().max())
        entry["truth"] = float(truth.abs().max())
    return {"journal": journal, "restored": restored, "buckets": len(exchanger.buckets)}


def _endless(loader: Any, balancer: Any) -> Iterator[tuple[Tensor, ...]]:
    epoch = 0
    while True:
        balancer.set_epoch(epoch)
        yield from loader
        epoch += 1


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def _true_gradient(position: Tensor, indices: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The float64 gradient of the mean loss over these samples, at these parameters."""
    twin = toy_model(hidden=HIDDEN)
    torch.nn.utils.vector_to_parameters(position, twin.parameters())
    # In the data's own precision first: both models see the same numbers.
    _, x, labels = toy_data(SAMPLES, dtype)[torch.tensor(indices)]
    loss_of(twin, x.double(), labels).backward()  # type: ignore[no-untyped-call]
    return _flat(p.grad for p in twin.parameters() if p.grad is not None)


def _residuals(exchanger: Any, model: torch.nn.Module) -> list[Tensor]:
    """This rank's residual of every parameter, in the order of ``model.parameters()``."""
    found: dict[int, Tensor] = {}
    for bucket in exchanger.buckets:
        for member in bucket.members:
            found[id(member.parameter)] = bucket.feedback.residual[member.span]
    return [found[id(p)] for p in model.parameters()]


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
