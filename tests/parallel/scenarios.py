"""Building blocks for multi-rank tests: toy data, scripted plan changes, training twice.

``train_on_ranks`` trains as a script with the plugin does and reports which samples each rank used
in which backward pass; ``train_alone`` trains the same recipe in one process without Horovod, on
the joined batches. Torch only at the top: Horovod is imported on the ranks, inside functions.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hvd_hetero.planning.plan import Plan

GLOBAL_BATCH = 16
WINDOW_STEPS = 3
TIMEOUT_SECONDS = 60.0  # of one exchange: a scenario that fails on one rank ends on the others
FEATURES, CLASSES = 6, 3


# ---- data and model -----------------------------------------------------------------------------


def toy_data(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """(index, x[FEATURES], label) for each sample; always the same ones."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    return TensorDataset(torch.arange(samples), x, labels)


def toy_model(
    seed: int = 0, hidden: int = 8, dtype: torch.dtype = torch.float64
) -> torch.nn.Sequential:
    """A small perceptron; ranks give different seeds, so that a missing broadcast shows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, CLASSES)
        ).to(dtype)


def values(model: torch.nn.Module) -> list[float]:
    """All parameters as one list; JSON keeps every bit of them."""
    flat: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return flat


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest absolute difference; infinite for other lengths and for NaN."""
    if len(first) != len(second) or not first:
        return float("inf")
    left, right = (torch.tensor(list(one), dtype=torch.float64) for one in (first, second))
    return float(torch.nan_to_num((left - right).abs(), nan=float("inf")).max())


# ---- plans --------------------------------------------------------------------------------------


def uneven_splits(ranks: int, total: int = GLOBAL_BATCH) -> list[tuple[int, ...]]:
    """Five unequal splits of ``total``, each with another rank as the largest, then an even one."""
    splits = []
    for number in range(5):
        sizes = [1 + (rank + number) % 3 for rank in range(ranks)]
        largest = number % ranks
        sizes[largest] = total - sum(sizes) + sizes[largest]
        splits.append(tuple(sizes))
    return [*splits, tuple(total // ranks for _ in range(ranks))]


def script_plans(balancer: Any, splits: Sequence[Sequence[int]], draws_later: int = 0) -> None:
    """Have rank 0 decide for these splits, one a window, whatever the timings say.

    ``draws_later``: how many draws after the earliest possible one a plan takes effect. Everything
    after the decision (agreement, hand-over, weights) is the library's own.
    """
    waiting = list(splits)
    current = [balancer.plan]

    def decide(windows: object, reports: Sequence[Any], *_: Any) -> dict[str, Any]:
        reason = "kept: the script has ended"
        if waiting:
            reason = "scripted"
            current[0] = Plan(current[0].version + 1, tuple(waiting.pop(0)), reason)
        first, second = max(tuple(one["drawn"]) for one in reports)
        return {
            "plan": current[0].to_dict(),
            "effective": [first, second + draws_later],
            "reason": reason,
        }

    balancer.decide = decide


# ---- one training, on ranks or alone ------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """One training. The defaults are an epoch of 53 samples: three full batches and a short one.

    ``leftover``: what happens to the backward passes of an incomplete step at an epoch's end:
    "step" takes a step with fewer passes, "carry" completes it in the next epoch, "drop" throws
    them away. ``source``: where batches come from; "iterable" has no epochs and no plan but sizes
    that follow ``balancer.local_batch_size``.
    """

    optimizer: Literal["sgd", "adamw"] = "sgd"
    scheduler: Literal["step", "one_cycle"] | None = None
    clip_norm: float | None = None
    passes: int = 1
    loss_divided_by_passes: bool | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"
    leftover: Literal["step", "carry", "drop"] = "step"
    cf: float | None = None
    force_sparse: bool = False
    workers: int = 0
    source: Literal["loader", "batch_sampler", "iterable"] = "loader"
    samples: int = 53
    drop_last: bool = False
    draws_later: int = 0
    steps: int = 20


def build_optimizer(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The user's own optimizer, before wrapping."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.05)


def build_scheduler(recipe: Recipe, optimizer: Any) -> Any:
    """The recipe's scheduler, stepped once per optimizer step; OneCycleLR moves momentum too."""
    if recipe.scheduler == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
    if recipe.scheduler == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=recipe.steps + 1
        )
    return None


def loss_of(model: torch.nn.Module, x: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of one batch."""
    return torch.nn.functional.cross_entropy(model(x), labels, reduction=reduction)


def train_alone(recipe: Recipe, steps: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train in this process on one batch a step, given as sample indices; clips like the ranks.

    Returns the parameters and in how many steps the gradient was clipped.
    """
    _, x, labels = toy_data(recipe.samples).tensors
    model = toy_model()
    optimizer = build_optimizer(recipe, model)
    # Horovod's broadcast of a fresh optimizer's state takes one step with zero gradients, and
    # weight decay makes that step count.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    scheduler = build_scheduler(recipe, optimizer)
    clipped = 0
    for indices in steps:
        optimizer.zero_grad()
        chosen = torch.tensor(list(indices))
        loss_of(model, x[chosen], labels[chosen]).backward()  # type: ignore[no-untyped-call]
        if recipe.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            clipped += int(norm > recipe.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {"parameters": values(model), "clipped": clipped}


def train_on_ranks(recipe: Recipe) -> dict[str, Any]:
    """Train as a user's script would, with plans that change every WINDOW_STEPS steps.

    Returns, for this rank: ``parameters``; ``steps``, the sample indices of every backward pass of
    every applied step; ``epochs``, the indices of every complete epoch; ``strategy``, the exchanges
    that ran; ``plan``, the version of the last plan.
    """
    import horovod.torch as hvd

    import hvd_hetero as het

    balancer = het.Balancer(
        GLOBAL_BATCH,
        min_local_batch=1,
        window_steps=WINDOW_STEPS,
        exchange_timeout_seconds=TIMEOUT_SECONDS,
    )
    script_plans(balancer, uneven_splits(hvd.size()), recipe.draws_later)
    model = toy_model(seed=hvd.rank())
    optimizer = het.DistributedOptimizer(
        build_optimizer(recipe, model),
        model.named_parameters(),
        het.Compression.none if recipe.cf is None else het.Compression.topk(recipe.cf),
        recipe.passes,
        balancer=balancer,
        loss_reduction=recipe.loss_reduction,
        loss_divided_by_passes=recipe.loss_divided_by_passes,
        bucket_bytes=256,
        exchange_timeout_seconds=TIMEOUT_SECONDS,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = build_scheduler(recipe, optimizer)

    steps: list[list[list[int]]] = []
    epochs: list[list[int]] = []
    taken: list[list[int]] = []  # by the step under way

    def step() -> None:
        if recipe.clip_norm is not None:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        steps.append(list(taken))
        taken.clear()
        optimizer.zero_grad()

    batches = _source(recipe, balancer, hvd.rank())
    optimizer.zero_grad()
    with forced_sparse(recipe.force_sparse):
        while len(steps) < recipe.steps:
            balancer.set_epoch(len(epochs))
            seen: list[int] = []
            for indices, x, labels in batches:
                seen += indices.tolist()
                taken.append(indices.tolist())
                if recipe.source != "loader":
                    balancer.set_batch(samples=len(x))
                loss = loss_of(model, x, labels, recipe.loss_reduction)
                if recipe.loss_divided_by_passes:
                    loss = loss / recipe.passes
                loss.backward()  # type: ignore[no-untyped-call]
                if len(taken) == recipe.passes:
                    step()
                if len(steps) == recipe.steps:
                    break
            else:
                epochs.append(seen)
                if taken and recipe.leftover == "step" and len(steps) < recipe.steps:
                    step()
                elif taken and recipe.leftover == "drop":
                    taken.clear()
                    optimizer.zero_grad()
    return {
        "parameters": values(model),
        "steps": steps,
        "epochs": epochs,
        "strategy": optimizer._hetero.exchanger.take_strategy(),
        "plan": balancer.plan.version,
    }


class _Stream(IterableDataset[tuple[Tensor, ...]]):
    """This rank's own endless stream of samples, in batches of the size the plan says now."""

    def __init__(self, data: TensorDataset, balancer: Any, rank: int) -> None:
        self._data = data
        self._balancer = balancer
        self._generator = torch.Generator().manual_seed(100 + rank)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while True:
            indices = torch.randint(
                len(self._data), (self._balancer.local_batch_size,), generator=self._generator
            )
            yield self._data[indices]


def _source(recipe: Recipe, balancer: Any, rank: int) -> Any:
    data = toy_data(recipe.samples)
    options: dict[str, Any] = {"num_workers": recipe.workers}
    if recipe.workers:
        # The server that worker processes are forked from imports torch once, not each of them.
        multiprocessing.set_forkserver_preload(["torch", __name__])
        options.update(persistent_workers=True, multiprocessing_context="forkserver")
    if recipe.source == "loader":
        return balancer.data_loader(data, shuffle=True, drop_last=recipe.drop_last, **options)
    if recipe.source == "batch_sampler":
        sampler = balancer.batch_sampler(data, shuffle=True, drop_last=recipe.drop_last)
        return DataLoader(data, batch_sampler=sampler, **options)
    return DataLoader(_Stream(data, balancer, rank), batch_size=None)


@contextmanager
def forced_sparse(force: bool) -> Iterator[None]:
    """Use the sparse exchange even where a dense one sends fewer bytes, as it does at CF 1."""
    if not force:
        yield
        return
    with mock.patch("hvd_hetero.runtime.exchanger.sparse_saves_bytes", lambda *_: True):
        yield


# ---- many scenarios in one launch ---------------------------------------------------------------


def run_scenarios(scenarios: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """On a rank: run them all, in order; {name: {"value": ...} or {"traceback": text}}."""
    import horovod.torch as hvd

    hvd.init()
    outcomes: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            outcomes[name] = {"value": scenario()}
        except Exception:
            outcomes[name] = {"traceback": traceback.format_exc()}
    hvd.shutdown()
    return outcomes


def outcome(results: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """In the test: this scenario's value on every rank, in rank order; fails with tracebacks."""
    failures = [
        f"rank {rank}:\n{result[name]['traceback']}"
        for rank, result in enumerate(results)
        if "traceback" in result[name]
    ]
    if failures:
        pytest.fail(f"{name} failed\n" + "\n".join(failures), pytrace=False)
    return [result[name]["value"] for result in results]


def fixture_params(launches: Sequence[Any]) -> list[Any]:
    """What ``launch.launches`` returns, for a fixture: one (launcher, ranks) pair each."""
    return [pytest.param(one.values, id=one.id) for one in launches]
