"""Evaluation on all ranks that counts every sample once, whatever their number."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hvd_hetero.data.loader import dataset_length
from hvd_hetero.data.partition import evaluation_share
from hvd_hetero.errors import ConfigurationError, check_float, check_int
from hvd_hetero.exchange.collectives import SingleProcess
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.clock import wait_until
from hvd_hetero.runtime.collectives import connect

_REFUSED = ("sampler", "batch_sampler", "shuffle", "drop_last")
_NAME = "hvd_hetero.evaluation.mean"


def evaluation_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    balancer: Balancer | None = None,
    **dataloader_options: Any,
) -> DataLoader[Any]:
    """Return a ``DataLoader`` over this rank's part of a map-style data set, in order.

    Over all ranks every sample comes exactly once: none is repeated to make parts equal, as
    ``DistributedSampler`` does. So ranks may have different numbers of batches, or none: layers
    that talk across ranks in forward must not do so in evaluation mode. Put a ``SampleMean``
    behind it.

    Args:
        dataset: with ``__len__`` and ``__getitem__``, the same on all ranks.
        batch_size: samples of a batch on this rank.
        balancer: parts in proportion to its plan, so that fast ranks take more; None: even parts.
        dataloader_options: those of ``DataLoader`` but for samplers, ``shuffle``, ``drop_last``.

    Raises:
        ConfigurationError: such an option, or a data set without length.
    """
    for name in _REFUSED:
        if name in dataloader_options:
            raise ConfigurationError(
                f"{name}={dataloader_options[name]!r}: evaluation reads every sample once and in "
                "order; leave it out"
            )
    check_int("batch_size", batch_size, minimum=1)
    collectives = connect()
    shares = (1,) * collectives.size if balancer is None else balancer.plan.local_batches
    part = evaluation_share(dataset_length(dataset), shares, collectives.rank)
    if balancer is not None:
        balancer.timer.discard()  # a step with an evaluation in front of it is not typical
    return DataLoader(Subset(dataset, part), batch_size=batch_size, **dataloader_options)


class SampleMean:
    """Mean over the samples of all ranks, each counted once.

    A mean of the ranks' means is wrong where ranks have different numbers of samples, and a rank
    without any would have none to give.

    Args:
        timeout_seconds: how long ``result`` waits for other ranks.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._timeout_seconds = check_float(
            "timeout_seconds", timeout_seconds, minimum=0.0, exclusive_minimum=True
        )
        self._sum = 0.0
        self._samples = 0.0

    def add(self, mean: float | torch.Tensor, samples: float) -> None:
        """Add a batch.

        Args:
            mean: of the batch: a number, or a tensor with one element.
            samples: that it is a mean over, or whatever else counts (tokens, valid pixels).

        Raises:
            ConfigurationError: ``samples`` is negative or not finite, or ``mean`` not one number.
        """
        if isinstance(mean, torch.Tensor):
            if mean.numel() != 1:
                raise ConfigurationError(
                    f"mean of shape {tuple(mean.shape)}: expected one number, the mean of a batch"
                )
            mean = float(mean.detach())
        count = check_float("samples", samples, minimum=0.0)
        if count > 0.0:
            self._sum += float(mean) * count
            self._samples += count

    def result(self) -> float:
        """Return the mean over all samples of all ranks, the same on every rank; blocks.

        Every rank calls it, also one that added nothing.

        Raises:
            ConfigurationError: no rank has added a sample.
            ExchangeTimeoutError: a rank did not call it.
        """
        sums = torch.tensor([self._sum, self._samples], dtype=torch.float64)
        collectives = connect()
        if not isinstance(collectives, SingleProcess):
            handle = collectives.allreduce_async(sums, _NAME)
            wait_until(
                handle.done,
                self._timeout_seconds,
                lambda: f"rank {collectives.rank}: SampleMean.result(), {_NAME!r}",
            )
            sums = handle.result()
        total, samples = sums.tolist()
        if samples == 0.0:
            raise ConfigurationError(
                "SampleMean.result(): no rank has added a sample; the mean of nothing is unknown"
            )
        return float(total / samples)
