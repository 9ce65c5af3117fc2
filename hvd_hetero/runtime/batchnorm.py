"""Running statistics of batch normalisation, which every rank has of its own samples only."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_hetero.errors import check_float
from hvd_hetero.exchange.collectives import SingleProcess
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.clock import wait_until
from hvd_hetero.runtime.collectives import connect

_NAME = "hvd_hetero.batchnorm.statistics"


def merge_batchnorm_statistics(
    model: nn.Module, balancer: Balancer | None = None, *, timeout_seconds: float = 600.0
) -> int:
    """Give all ranks the running mean and variance over the samples of all of them; blocks.

    Before evaluation or saving, on all ranks. With the ranks' shares w_i of the plan (without a
    balancer all the same)::

        mean = sum_i w_i mean_i        var = sum_i w_i (var_i + mean_i^2) - mean^2

    A broadcast of rank 0's statistics, the usual way, throws away what the others have seen.

    Args:
        model: any module; layers without running statistics are left alone.
        balancer: whose newest plan weighs the ranks.
        timeout_seconds: how long to wait for other ranks.

    Returns:
        How many layers were merged, the same on all ranks.

    Raises:
        ExchangeTimeoutError: a rank did not call it.
    """
    check_float("timeout_seconds", timeout_seconds, minimum=0.0, exclusive_minimum=True)
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    pairs = [
        (layer.running_mean, layer.running_var)
        for layer in layers
        if layer.running_mean is not None and layer.running_var is not None
    ]
    collectives = connect()
    if not pairs or isinstance(collectives, SingleProcess):
        return len(pairs)
    weight = 1.0 / collectives.size if balancer is None else balancer.planned_share
    means = torch.cat([mean.detach().double().cpu().flatten() for mean, _ in pairs])
    variances = torch.cat([var.detach().double().cpu().flatten() for _, var in pairs])
    message = weight * torch.cat((means, variances + means.square()))
    handle = collectives.allreduce_async(message, _NAME)
    wait_until(
        handle.done,
        timeout_seconds,
        lambda: f"rank {collectives.rank}: merge_batchnorm_statistics, {_NAME!r}",
    )
    means, squares = handle.result().chunk(2)
    variances = (squares - means.square()).clamp_(min=0.0)  # rounding alone could go below
    start = 0
    for mean, var in pairs:
        part = slice(start, start + mean.numel())
        start += mean.numel()
        mean.copy_(means[part].view_as(mean))
        var.copy_(variances[part].view_as(var))
    return len(pairs)
