"""What the ranks of mismatch_test.py do: rank 1 differs from the others in one thing at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import RandomSampler, TensorDataset

TIMEOUT_SECONDS = 30.0


def _layers(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return torch.nn.Sequential(*(torch.nn.Linear(a, b, dtype=dtype) for a, b in pairs))


def _wrap(
    model: torch.nn.Module | None = None,
    *,
    names: list[tuple[str, torch.nn.Parameter]] | None = None,
    **options: Any,
) -> None:
    import hvd_hetero as het

    model = _layers(16, 8, 1) if model is None else model
    if options.pop("balanced", False):
        options["balancer"] = het.Balancer(8, exchange_timeout_seconds=TIMEOUT_SECONDS)
    het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=names or model.named_parameters(),
        exchange_timeout_seconds=TIMEOUT_SECONDS,
        **options,
    )


def _balance(**options: Any) -> None:
    import hvd_hetero as het

    options.setdefault("global_batch_size", 8)
    het.Balancer(exchange_timeout_seconds=TIMEOUT_SECONDS, **options)


def _load(samples: int = 32, seed: int = 0, **options: Any) -> None:
    import hvd_hetero as het

    balancer = het.Balancer(8, seed=seed, exchange_timeout_seconds=TIMEOUT_SECONDS)
    balancer.data_loader(TensorDataset(torch.zeros(samples)), **options)


def _topk(cf: float) -> Any:
    import hvd_hetero as het

    return het.Compression.topk(cf)


def _adaptive(**options: Any) -> Any:
    import hvd_hetero as het

    return het.Compression.adaptive(**options)


def _none() -> Any:
    import hvd_hetero as het

    return het.Compression.none


def _fp16() -> Any:
    import hvd_hetero as het

    return het.Compression.fp16


def _frozen(model: torch.nn.Sequential) -> torch.nn.Sequential:
    next(model.parameters()).requires_grad_(False)
    return model


def _swapped() -> None:
    model = _layers(16, 16, 16)
    _wrap(model, names=[(f"{1 - int(n[0])}{n[1:]}", p) for n, p in model.named_parameters()])


def _reordered() -> None:
    model = _layers(16, 8, 1)
    names = {parameter: name for name, parameter in model.named_parameters()}

    class Backwards(torch.nn.Module):
        """The same parameters, handed to the optimizer in the other order."""

        def parameters(self, recurse: bool = True) -> Any:
            return reversed(list(model.parameters()))

    _wrap(Backwards(), names=[(name, parameter) for parameter, name in names.items()])


# What all other ranks do, and what rank 1 does.
SCENARIOS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "compression": (lambda: _wrap(compression=_topk(10)), lambda: _wrap(compression=_none())),
    "compression policy": (
        lambda: _wrap(compression=_topk(10)),
        lambda: _wrap(compression=_adaptive()),
    ),
    "horovod compression": (lambda: _wrap(compression=_none()), lambda: _wrap(compression=_fp16())),
    "cf": (lambda: _wrap(compression=_topk(10)), lambda: _wrap(compression=_topk(100))),
    "eps": (
        lambda: _wrap(compression=_adaptive()),
        lambda: _wrap(compression=_adaptive(eps=0.4)),
    ),
    "flush_steps": (
        lambda: _wrap(compression=_adaptive()),
        lambda: _wrap(compression=_adaptive(flush_steps=20)),
    ),
    "bucket_bytes": (
        lambda: _wrap(compression=_topk(10)),
        lambda: _wrap(compression=_topk(10), bucket_bytes=4096),
    ),
    "backward_passes_per_step": (lambda: _wrap(), lambda: _wrap(backward_passes_per_step=2)),
    "op": (lambda: _wrap(), lambda: _wrap(op=1)),
    "sparse_as_dense": (lambda: _wrap(), lambda: _wrap(sparse_as_dense=True)),
    "loss_reduction": (
        lambda: _wrap(balanced=True),
        lambda: _wrap(balanced=True, loss_reduction="sum"),
    ),
    "loss_weighted": (
        lambda: _wrap(balanced=True),
        lambda: _wrap(balanced=True, loss_weighted=True),
    ),
    "local_clip_norm": (lambda: _wrap(), lambda: _wrap(local_clip_norm=2.0)),
    "drift_check_steps": (lambda: _wrap(drift_check_steps=5), lambda: _wrap(drift_check_steps=7)),
    "replay": (
        lambda: _wrap(compression=_topk(10), replay="log"),
        lambda: _wrap(compression=_topk(10)),
    ),
    "number of parameters": (lambda: _wrap(), lambda: _wrap(_layers(16, 8, 8, 1))),
    "shape": (lambda: _wrap(), lambda: _wrap(_layers(16, 9, 1))),
    "dtype": (lambda: _wrap(), lambda: _wrap(_layers(16, 8, 1, dtype=torch.float64))),
    "name": (lambda: _wrap(_layers(16, 16, 16)), _swapped),
    "order": (lambda: _wrap(), _reordered),
    "frozen": (lambda: _wrap(), lambda: _wrap(_frozen(_layers(16, 8, 1)))),
    "frozen with compression": (
        lambda: _wrap(compression=_topk(10)),
        lambda: _wrap(_frozen(_layers(16, 8, 1)), compression=_topk(10)),
    ),
    "global_batch_size": (_balance, lambda: _balance(global_batch_size=16)),
    "min_local_batch": (_balance, lambda: _balance(min_local_batch=3)),
    # None may give way at the end of an epoch, a number may not.
    "min_local_batch by default": (_balance, lambda: _balance(min_local_batch=2)),
    "max_local_batch": (lambda: _balance(max_local_batch=7), lambda: _balance(max_local_batch=6)),
    "granule": (_balance, lambda: _balance(granule=2)),
    "fixed_local_batches": (
        lambda: _balance(fixed_local_batches=[6, 2]),
        lambda: _balance(fixed_local_batches=[2, 6]),
    ),
    "window_steps": (_balance, lambda: _balance(window_steps=20)),
    "min_gain": (_balance, lambda: _balance(min_gain=0.25)),
    "seed": (_load, lambda: _load(seed=3)),
    "data set size": (_load, lambda: _load(samples=31)),
    "shuffle": (_load, lambda: _load(shuffle=True)),
    "drop_last": (_load, lambda: _load(drop_last=True)),
    "sampler": (_load, lambda: _load(sampler=RandomSampler(range(32)))),
    "length of the sampler": (
        lambda: _load(sampler=RandomSampler(range(32))),
        lambda: _load(sampler=RandomSampler(range(31))),
    ),
    "weigh": (_load, lambda: _load(weigh=len)),
}


def differ() -> dict[str, Any]:
    """Run all scenarios one after the other; return the error of each as (type, message)."""
    import horovod.torch as hvd

    from hvd_hetero.errors import RankMismatchError

    hvd.init()
    results: dict[str, Any] = {}
    for name, (usual, other) in SCENARIOS.items():
        try:
            (other if hvd.rank() == 1 else usual)()
            results[name] = None
        except RankMismatchError as error:
            results[name] = str(error)
        hvd.barrier()
    results["log"] = _log_on_one_rank()
    return results


def _log_on_one_rank() -> int:
    """HVD_HETERO_LOG is set on rank 0 only; return the lines it has after a few steps."""
    import horovod.torch as hvd

    import hvd_hetero as het

    path = os.environ.pop("LOG_OF_RANK_ZERO")
    if hvd.rank() == 0:
        os.environ["HVD_HETERO_LOG"] = path
    model = _layers(16, 8, 1)
    balancer = het.Balancer(8, window_steps=2, exchange_timeout_seconds=TIMEOUT_SECONDS)
    loader = balancer.data_loader(TensorDataset(torch.randn(32, 16)))
    optimizer = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=het.Compression.adaptive(window=4),
        balancer=balancer,
        exchange_timeout_seconds=TIMEOUT_SECONDS,
    )
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    hvd.barrier()
    with open(path, encoding="utf-8") as file:
        return len(file.readlines())


def stop_at_mismatch() -> None:
    """What a script does: the error is nobody's to catch."""
    import horovod.torch as hvd

    hvd.init()
    _wrap(compression=_topk(100 if hvd.rank() == 1 else 10))
