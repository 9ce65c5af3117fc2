"""Which batch a backward pass belongs to, what it weighs, and whether its loss was weighed."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvd_hetero.data.partition import LocalBatch
from hvd_hetero.errors import BatchAccountingError, ConfigurationError, check_float
from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.runtime.clock import wait_until
from hvd_hetero.runtime.timings import StepTimer

logger = logging.getLogger("hvd_hetero")

_ONE_WEIGHT_PER_PASS = (
    "call it once for every backward pass, on the whole loss (add up the parts of a loss before), "
    "after the batch was drawn or set_batch was called"
)


@dataclass(frozen=True, eq=False)  # the same object as long as it is the same batch
class Batch:
    """The batch of a backward pass.

    own, total: what the mean is taken over, of this rank and of all ranks: samples, or what was
    stated in their place. samples: of this rank, by which steps are timed.
    """

    own: float
    total: float
    samples: int


class BatchBook:
    """The batch in hand: as the loader yielded it, or as the script has stated it.

    ``name`` is the prefix of the collectives, ``timer`` is told of waits for other ranks.
    """

    def __init__(
        self, collectives: Collectives, name: str, timeout_seconds: float, timer: StepTimer
    ) -> None:
        self._collectives = collectives
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._timer = timer
        self._yielded: Batch | None = None
        self._stated: Batch | None = None
        self._weighed: Batch | None = None  # its loss was weighed, its backward has not begun
        self._loss_reduction: str | None = None
        self._used = False  # the batch in hand, by a backward pass
        self._passed_over = False  # a batch was replaced by the next one before it was used
        self._warned = False

    def expect_weighed_losses(self, loss_reduction: str) -> None:
        """From now on every backward pass must come from ``weigh_loss``."""
        self._loss_reduction = loss_reduction

    def yielded(self, ticket: LocalBatch | None) -> None:
        """The loader hands out this batch; None where a pass over it begins or ends."""
        if ticket is None:
            self._passed_over = False
        elif self._yielded is not None and not self._used:
            self._passed_over = True
        self._yielded, self._used = None, False
        if ticket is not None:
            own = ticket.samples
            self._yielded = Batch(float(own), float(ticket.global_samples), own)

    def weigh_yielded(self, weigh: Callable[[Any], Any], batch: Any) -> None:
        """Let the batch just yielded count for ``weigh(batch)``; blocks."""
        where = f"rank {self._collectives.rank}: weigh(batch)"
        own, total = self._agreed("weigh", lambda: _checked_weight(where, weigh(batch)))
        self._check_total("weigh(batch)=0", total)
        samples = 0 if self._yielded is None else self._yielded.samples
        self._yielded = Batch(own, total, samples)

    def state(self, samples: Any, weight: Any) -> None:
        """Take what ``Balancer.set_batch`` was told; blocks."""

        def checked() -> float:
            size = _checked_samples(samples)
            return size if weight is None else _checked_weight("weight", weight)

        own, total = self._agreed("set_batch", checked)
        self._check_total("weight=0", total)
        # A loader of ours knows the samples, also where a script states tokens as such.
        known = None if self._passed_over else self._yielded
        timed = round(float(samples)) if known is None else known.samples
        self._stated = Batch(own, total, timed)

    def current(self) -> Batch:
        """Return the batch in hand; BatchAccountingError when it is not known."""
        batch = self._stated or self._yielded
        if batch is not None:
            return batch
        raise BatchAccountingError(
            "a backward pass came from a batch the Balancer does not know: draw batches from "
            "balancer.data_loader(...), or call balancer.set_batch(samples=...) before backward "
            "(a plain DataLoader over balancer.batch_sampler() needs it for every batch, and so "
            "does a loop that fetches the next batch before it trains on this one)"
        )

    def weigh_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times what it counts for in the mean over all ranks."""
        rank = self._collectives.rank
        if self._loss_reduction is None:
            raise ConfigurationError(
                f"rank {rank}: balancer.weigh_loss() needs an optimizer made by "
                "DistributedOptimizer(..., balancer=balancer, loss_weighted=True); without it "
                "gradients are weighted after backward, and a weighed loss would count twice"
            )
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            raise ConfigurationError(f"loss={loss!r}: expected the loss, a floating-point tensor")
        batch = self.current()
        if self._weighed is batch:
            raise BatchAccountingError(
                f"rank {rank}: balancer.weigh_loss() was called twice before the backward pass of "
                f"one batch: {_ONE_WEIGHT_PER_PASS}"
            )
        if batch.own == 0.0 and not bool(loss.detach().isfinite().all()):
            # Unlike an ordinary gradient it cannot be dropped: other ranks' losses are in it.
            raise ConfigurationError(
                f"rank {rank}: the loss is {loss.detach()} and its batch has weight 0: with "
                "loss_weighted=True a mean over nothing must be a finite number; divide the sum "
                "by max(weight, 1)"
            )
        self._weighed = batch
        return loss * ((batch.own if self._loss_reduction == "mean" else 1.0) / batch.total)

    @property
    def yielded_samples(self) -> int | None:
        """Samples of the batch that the loader has yielded last; None without any."""
        return None if self._yielded is None else self._yielded.samples

    @property
    def is_ahead(self) -> bool:
        """Whether the script has stated a batch while the loader had yielded the next one."""
        return self._passed_over and self._stated is not None

    def pass_begins(self) -> None:
        """A backward pass begins; BatchAccountingError when its loss should have been weighed."""
        self._used = True
        if self._passed_over and self._stated is None and not self._warned:
            self._warned = True
            logger.warning(
                "rank %d: a second batch was drawn before the backward pass of the first, and "
                "gradients are weighted by the second. That is right where the first was left "
                "out; a loop that fetches the next batch before it trains on this one has to call "
                "balancer.set_batch(samples=...) before each backward",
                self._collectives.rank,
            )
        if self._loss_reduction is None:
            return
        if self._weighed is not self.current():
            raise BatchAccountingError(
                f"rank {self._collectives.rank}: loss_weighted=True, and backward began from a "
                "loss that was not weighed: balancer.weigh_loss(loss).backward(); "
                f"{_ONE_WEIGHT_PER_PASS}"
            )
        self._weighed = None

    def step_done(self) -> None:
        """What was stated is needed anew for the next step."""
        self._stated = None
        self._weighed = None

    def _agreed(self, purpose: str, weight: Callable[[], float]) -> tuple[float, float]:
        """Return this rank's weight and that of all ranks; what one raises is told on all.

        An error before the sum would leave the other ranks waiting in it.
        """
        failure: Exception | None = None
        own = 0.0
        try:
            own = weight()
        except Exception as error:
            failure = error
        total, failures = self._sum((own, float(failure is not None)), purpose)
        if failure is not None:
            raise failure
        if failures:
            raise ConfigurationError(
                f"rank {self._collectives.rank}: {purpose} failed on another rank, see its error"
            )
        return own, total

    def _sum(self, values: tuple[float, ...], purpose: str) -> list[float]:
        message = torch.tensor(values, dtype=torch.float64)
        with self._timer.waiting():
            handle = self._collectives.allreduce_async(message, f"{self._name}.{purpose}.allreduce")
            wait_until(
                handle.done,
                self._timeout_seconds,
                lambda: f"rank {self._collectives.rank}: {purpose} {values} of {self._name}",
            )
        sums: list[float] = handle.result().tolist()
        return sums

    def _check_total(self, what: str, total: float) -> None:
        if total <= 0.0:
            raise ConfigurationError(
                f"rank {self._collectives.rank}: {what} on all ranks: a mean over nothing is "
                "unknown; leave such batches out on all ranks"
            )


def _checked_samples(samples: Any) -> float:
    if isinstance(samples, bool) or not isinstance(samples, numbers.Real):
        raise ConfigurationError(f"samples={samples!r}: expected a number above 0")
    return check_float("samples", samples, minimum=0, exclusive_minimum=True)


def _checked_weight(name: str, value: Any) -> float:
    """Return a weight as a number; also from a tensor of one element, as a count often is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigurationError(f"{name}={value!r}: expected a number of at least 0")
    return check_float(name, value, minimum=0.0)
