"""What the ranks of equality_test.py do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.parallel.scenarios import (
    CLASSES,
    FEATURES,
    TIMEOUT_SECONDS,
    Recipe,
    build_optimizer,
    build_scheduler,
    forced_sparse,
    loss_of,
    run_scenarios,
    toy_model,
    train_on_ranks,
    values,
)

RECIPES: dict[str, Recipe] = {
    "sgd_momentum": Recipe(),
    "sgd_step_lr": Recipe(scheduler="step"),
    "sgd_one_cycle_lr": Recipe(scheduler="one_cycle"),
    "sgd_clipping": Recipe(clip_norm=0.2),
    "sgd_workers": Recipe(workers=2),
    "adamw": Recipe("adamw"),
    "adamw_one_cycle_lr_clipping": Recipe("adamw", "one_cycle", clip_norm=0.2),
    "adamw_workers_step_lr": Recipe("adamw", "step", workers=2),
    "loss_sum": Recipe(loss_reduction="sum"),
    # 49 = 3 * 16 + 1: too few for all ranks, so the last full batch and the rest are split evenly.
    "tail_below_minimum": Recipe(samples=49),
    "drop_last": Recipe(drop_last=True),
    # Two passes a step. 53 samples are 4 batches an epoch: no leftover, but a step that joins a
    # full and a short batch. 37 samples are 3 batches, 101
    # are 7: one leftover pass.
    "passes_undivided": Recipe(passes=2, loss_divided_by_passes=False),
    "passes_divided": Recipe("adamw", passes=2, loss_divided_by_passes=True),
    "passes_divided_workers": Recipe(passes=2, loss_divided_by_passes=True, workers=2),
    "passes_sum_undivided": Recipe(passes=2, loss_divided_by_passes=False, loss_reduction="sum"),
    "passes_sum_divided": Recipe(passes=2, loss_divided_by_passes=True, loss_reduction="sum"),
    "passes_clipping_step_lr": Recipe(
        scheduler="step", clip_norm=0.2, passes=2, loss_divided_by_passes=False
    ),
    # The plan changes between the two passes of a step.
    "plan_within_step": Recipe(passes=2, loss_divided_by_passes=True, samples=117, draws_later=1),
    "plan_within_step_undivided": Recipe(
        "adamw", passes=2, loss_divided_by_passes=False, samples=117, draws_later=1
    ),
    "leftover_step_undivided": Recipe(passes=2, loss_divided_by_passes=False, samples=37),
    "leftover_step_divided": Recipe(passes=2, loss_divided_by_passes=True, samples=37),
    "leftover_step_sum": Recipe(
        passes=2, loss_divided_by_passes=True, loss_reduction="sum", samples=37
    ),
    "leftover_carried": Recipe(
        passes=2, loss_divided_by_passes=True, samples=101, leftover="carry", draws_later=1
    ),
    "leftover_dropped": Recipe(passes=2, loss_divided_by_passes=False, samples=37, leftover="drop"),
    "cf_1": Recipe(cf=1.0),
    "cf_1_sparse": Recipe(cf=1.0, force_sparse=True),
    "cf_1_sparse_adamw_passes": Recipe(
        "adamw", passes=2, loss_divided_by_passes=True, cf=1.0, force_sparse=True
    ),
    "set_batch_plain_loader": Recipe(source="batch_sampler"),
    "set_batch_plain_loader_workers": Recipe("adamw", source="batch_sampler", workers=2),
    "set_batch_plain_loader_passes": Recipe(
        passes=2, loss_divided_by_passes=True, source="batch_sampler", draws_later=1
    ),
    "set_batch_iterable": Recipe(source="iterable"),
}

STOCK_RECIPES: dict[str, Recipe] = {
    "stock_sgd": Recipe(scheduler="step", steps=10),
    "stock_adamw_clipping": Recipe("adamw", clip_norm=0.2, steps=10),
    "stock_passes": Recipe(passes=2, loss_divided_by_passes=True, steps=10),
    "stock_fp16": Recipe(steps=10),
}


def run() -> dict[str, Any]:
    """All scenarios, one after the other."""
    scenarios: dict[str, Callable[[], Any]] = {
        name: partial(train_on_ranks, recipe) for name, recipe in RECIPES.items()
    }
    for name, recipe in STOCK_RECIPES.items():
        scenarios[name] = partial(train_as_stock, recipe, fp16=name == "stock_fp16")
    for cf, force in ((None, False), (1.0, False), (1.0, True)):
        name = f"biased_mean_cf_{cf or 'none'}{'_sparse' if force else ''}"
        scenarios[name] = partial(biased_mean, cf, force)
    return run_scenarios(scenarios)


def train_as_stock(recipe: Recipe, fp16: bool) -> dict[str, Any]:
    """Equal batches, no option of ours: with Horovod's wrapper, and with ours in its place."""
    import horovod.torch as hvd

    import hvd_hetero as het

    parameters: dict[str, Any] = {}
    for module in (hvd, het):
        model = toy_model(seed=hvd.rank(), hidden=32, dtype=torch.float32)
        compression = module.Compression.fp16 if fp16 else module.Compression.none
        optimizer = module.DistributedOptimizer(
            build_optimizer(recipe, model), model.named_parameters(), compression, recipe.passes
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        scheduler = build_scheduler(recipe, optimizer)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(recipe.steps):
            optimizer.zero_grad()
            for _ in range(recipe.passes):
                x = torch.randn(4, FEATURES, generator=generator)
                labels = torch.randint(0, CLASSES, (4,), generator=generator)
                (loss_of(model, x, labels) / recipe.passes).backward()  # type: ignore[no-untyped-call]
            if recipe.clip_norm is not None:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
        parameters[module.__name__.split(".")[0]] = values(model)
        parameters["own_exchange"] = hasattr(optimizer, "_hetero")
    return parameters


def biased_mean(cf: float | None, force_sparse: bool) -> dict[str, Any]:
    """Batches 3, 1, (3, 1) with mean gradients 1, 5, (1, 5): the reduced gradient of ``w``."""
    import horovod.torch as hvd

    import hvd_hetero as het

    ranks = hvd.size()
    sizes = [4] if ranks == 1 else [3, 1] * (ranks // 2)
    data = torch.utils.data.TensorDataset(
        torch.tensor([1.0, 1.0, 1.0, 5.0] * (sum(sizes) // 4), dtype=torch.float64)
    )
    balancer = het.Balancer(
        sum(sizes), fixed_local_batches=sizes, exchange_timeout_seconds=TIMEOUT_SECONDS
    )
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = het.DistributedOptimizer(
        torch.optim.SGD([w], lr=1.0),
        [("w", w)],
        het.Compression.none if cf is None else het.Compression.topk(cf),
        balancer=balancer,
        exchange_timeout_seconds=TIMEOUT_SECONDS,
    )
    own = float("nan")
    with forced_sparse(force_sparse):
        for (x,) in balancer.data_loader(data):
            optimizer.zero_grad()
            (w * x).mean().backward()
            own = float(x.mean())  # the gradient; w.grad may be under way already
            optimizer.step()
    assert w.grad is not None
    return {"own": own, "reduced": float(w.grad), "moved": -float(w), "samples": len(x)}
