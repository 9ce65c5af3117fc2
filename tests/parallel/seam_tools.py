"""What the seam scenarios share: their registry, toy training, references and recorders.

A scenario is a function that runs on every rank and raises when something is wrong. One launch
runs many of them, one after the other, in the same processes.
"""

# torch has no types for backward(), and says "Tensor | Module" for what a module holds.
# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, misc"

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from torch import Tensor, nn

import hvd_hetero as het
from hvd_hetero.runtime import balancer as balancer_module
from hvd_hetero.runtime import optimizer as optimizer_module

EXCHANGE_TIMEOUT_SECONDS = 30.0
Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


# ---- registry -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A function for all ranks, and the numbers of ranks for which it makes sense."""

    function: Callable[[], None]
    ranks: tuple[int, ...]


def registrar(
    scenarios: dict[str, Scenario],
) -> Callable[..., Callable[[Callable[[], None]], Callable[[], None]]]:
    """Return the decorator ``@scenario(ranks, ...)`` that fills ``scenarios`` by function name."""

    def scenario(*ranks: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def register(function: Callable[[], None]) -> Callable[[], None]:
            scenarios[function.__name__] = Scenario(function, ranks)
            return function

        return register

    return scenario


def run_scenarios(scenarios: dict[str, Scenario], only: Sequence[str] = ()) -> dict[str, str]:
    """Run those made for this number of ranks; return each one's traceback, "" when it passed."""
    hvd.init()
    outcomes = {}
    for index, (name, one) in enumerate(scenarios.items()):
        if hvd.size() not in one.ranks or (only and name not in only):
            continue
        print(f"scenario {name}", flush=True)  # the last one seen tells where a launch hung
        # One that failed on one rank only must not shift the names of all that follow.
        for module in (optimizer_module, balancer_module):
            vars(module)["_counter"] = itertools.count(100 * (index + 1))
        try:
            with warnings.catch_warnings():
                one.function()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    hvd.shutdown()
    return outcomes


# ---- toy training -------------------------------------------------------------------------------


def classifier(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two layers, equal on all ranks; parameters 0.weight, 0.bias, 2.weight, 2.bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch_of(rank: int, step: int, samples: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    """The batch of a rank and step; anybody can compute anybody's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (samples,), generator=generator)


def own_batch(step: int, samples: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    return batch_of(hvd.rank(), step, samples, dtype)


def joined_batch(
    step: int, sizes: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> Batch:
    """All ranks' batches of a step as one."""
    sizes = [4] * hvd.size() if sizes is None else sizes
    parts = [batch_of(rank, step, size, dtype) for rank, size in enumerate(sizes)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Wrap as scripts do, with a time-out that fits a test."""
    options.setdefault("exchange_timeout_seconds", EXCHANGE_TIMEOUT_SECONDS)
    options.setdefault("named_parameters", model.named_parameters())
    return het.DistributedOptimizer(optimizer, **options)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int],
    batch: Callable[[int], Batch] = own_batch,
) -> None:
    """The usual loop."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()


def one_process(make_optimizer: MakeOptimizer, steps: Iterable[int]) -> nn.Module:
    """The reference: one process that trains the classifier on the joined batches."""
    model = classifier()
    train(model, make_optimizer(model), steps, joined_batch)
    return model


def exchanger_of(optimizer: Any) -> Any:
    return optimizer._hetero.exchanger


def steps_counted(optimizer: Any) -> int:
    return int(optimizer._hetero._coordinator.steps)


def residuals(optimizer: Any) -> list[Tensor]:
    """Copies of the residuals of all buckets."""
    return [bucket.feedback.residual.clone() for bucket in exchanger_of(optimizer).buckets]


# ---- checks -------------------------------------------------------------------------------------


def tensors_of(values: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    found = values.parameters() if isinstance(values, nn.Module) else values
    return [tensor.detach().clone() for tensor in found]


def check_close(
    actual: nn.Module | Iterable[Tensor],
    expected: nn.Module | Iterable[Tensor],
    tolerance: float = 1e-12,
) -> None:
    """Equal within ``tolerance``, absolutely and relatively; 0 means bit by bit."""
    for one, other in zip(tensors_of(actual), tensors_of(expected), strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def check_differ(one: nn.Module | Iterable[Tensor], other: nn.Module | Iterable[Tensor]) -> None:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs), "all tensors are equal"


def check_same_on_all_ranks(values: nn.Module | Iterable[Tensor]) -> None:
    """Bit by bit."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors_of(values)])
    assert flat.isfinite().all(), flat
    for row in hvd.allgather(flat.reshape(1, -1), name="test.same"):
        assert torch.equal(row, flat), (row - flat).abs().max()


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    return list(hvd.allgather_object(value, name="test.gather"))


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block must raise ``kind`` with a message that has all the words."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised ({words})")


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- recorders ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One call into Horovod's library. ``name`` is None when the caller gave none."""

    kind: str
    name: str | None
    elements: int
    dtype: str


_KINDS = {
    "_allreduce_async": "allreduce",
    "_allgather_async": "allgather",
    "_broadcast_async": "broadcast",
    "_grouped_allreduce_async": "grouped allreduce",
}


@contextmanager
def recorded() -> Iterator[list[Collective]]:
    """Everything handed to Horovod in the block, whoever called, in order; agreements over
    mpi4py are no part of it."""
    seen: list[Collective] = []

    def recording(function_name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, output: Any, *args: Any) -> Any:
            name = args[1] if function_name == "_broadcast_async" else args[0]
            first = tensor[0] if isinstance(tensor, (list, tuple)) else tensor
            seen.append(Collective(_KINDS[function_name], name, first.numel(), str(first.dtype)))
            return original(tensor, output, *args)

        return call

    recorders: dict[str, Any] = {name: recording(name, getattr(mpi_ops, name)) for name in _KINDS}
    with mock.patch.multiple(mpi_ops, **recorders):
        yield seen


def exchanges(seen: Iterable[Collective]) -> list[Collective]:
    """Those that carry gradients of our buckets."""
    return [one for one in seen if one.name is not None and ".bucket " in one.name]


def scripted_plans(balancer: Any, plans: Sequence[Sequence[int]], delay: int = 0) -> None:
    """Let rank 0 decide these local batches, one after the other, at the ends of windows.

    ``delay``: global batches between what any rank has drawn and the first one of the new plan.
    """
    remaining = list(plans)

    def decide(windows: Any, reports: Sequence[Any], *_: Any) -> Any:
        first, second = max((int(x), int(y)) for x, y in (one["drawn"] for one in reports))
        latest = balancer.plan
        plan = latest
        if remaining:
            sizes = tuple(remaining.pop(0))
            plan = het.Plan(latest.version + 1, sizes, "scripted")
        return {
            "plan": plan.to_dict(),
            "effective": [first, second + delay],
            "reason": "scripted",
        }

    balancer.decide = decide
