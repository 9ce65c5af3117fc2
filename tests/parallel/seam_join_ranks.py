"""What the ranks of the join test do: one that ends its data early and calls ``hvd.join()``."""

from __future__ import annotations

import horovod.torch as hvd
import torch

import hvd_hetero as het


def join_early() -> None:
    """Rank 1 takes two steps and joins, rank 0 takes four."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=het.Compression.topk(8),
        exchange_timeout_seconds=30,
    )
    for _ in range(4 if hvd.rank() == 0 else 2):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    hvd.join()
