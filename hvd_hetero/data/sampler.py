"""The batch sampler of one rank: its piece of every global batch, drawn under the plan in force."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.data.order import ONE_ORDER, SamplerOrder, checksum
from hvd_hetero.data.partition import (
    LocalBatch,
    check_feasible,
    count_batches,
    epoch_order,
    local_batch,
    next_global_batch,
)
from hvd_hetero.data.schedule import Cursor, PlanSchedule
from hvd_hetero.errors import ConfigurationError, check_bool, check_int


class Place(NamedTuple):
    """Where training stands in the data.

    epoch: and of it, used_samples. cursor: of the next draw, (pass, step). order_checksum: of the
    order in which those samples were taken, where a sampler of the user's gave it.
    """

    epoch: int = 0
    used_samples: int = 0
    cursor: Cursor = (0, 0)
    order_checksum: int | None = None


@dataclass(frozen=True)
class _Pass:
    """One pass over the data: its number, its first step and the samples before that, which earlier
    jobs have used, with the checksum of the order they came in, its epoch, and where its tickets go
    (None: nowhere)."""

    number: int
    first_step: int
    epoch: int
    used_samples: int
    used_checksum: int | None
    tickets: deque[LocalBatch] | None


class HeteroBatchSampler(Sampler[list[int]]):
    """Batch sampler of one rank: yields the indices of its piece of every global batch.

    All ranks build it with the same arguments but ``rank``, and a schedule that holds the same
    plans. It also works as ``batch_sampler`` of a stock ``DataLoader``; sizes are then known to
    nobody but the sampler, and the training loop has to call ``Balancer.set_batch``.

    The order of a shuffled epoch follows from ``seed`` and the epoch given to :meth:`set_epoch`;
    until that is called, every pass over the data counts as the next epoch. ``order``: a sampler of
    the user's, which gives the order of an epoch in place of that.

    Raises ConfigurationError for wrong values, InfeasibleBatchError (one of these) when the data
    set cannot be cut into batches within ``bounds``.
    """

    def __init__(
        self,
        dataset_samples: int,
        schedule: PlanSchedule,
        bounds: Bounds,
        rank: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        order: SamplerOrder | None = None,
    ) -> None:
        self.dataset_samples = check_int("dataset_samples", dataset_samples, minimum=0)
        self.rank = check_int("rank", rank, minimum=0, maximum=len(bounds.lower) - 1)
        self.shuffle = check_bool("shuffle", shuffle)
        self.seed = check_int("seed", seed, minimum=0)
        self.drop_last = check_bool("drop_last", drop_last)
        if order is not None and self.shuffle:
            raise ConfigurationError(
                f"shuffle=True together with sampler={order.kind}: the sampler gives the order; "
                "leave one of the two out"
            )
        self.schedule = schedule
        self.bounds = bounds
        self.order = order
        self.epoch_samples = self.dataset_samples if order is None else order.samples
        self.drawn_order: tuple[int, int, int] | None = None  # (pass, epoch, checksum) with order
        self._epoch: int | None = None
        self._first_epoch = 0
        self._first_pass = 0
        self._resumed: Place | None = None
        self._opened: _Pass | None = None
        plan = schedule.latest
        if len(plan.local_batches) != len(bounds.lower):
            raise ConfigurationError(
                f"the plan has {len(plan.local_batches)} ranks, the bounds have "
                f"{len(bounds.lower)}: build both for the same ranks"
            )
        check_feasible(self.epoch_samples, plan.global_batch_size, bounds, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the passes that begin from now on; the same on every rank."""
        self._epoch = check_int("epoch", epoch, minimum=0)

    def resume(self, place: Place) -> None:
        """Go on in an epoch after the samples of it that were used, with the pass that begins next.

        A pass over another epoch, chosen by :meth:`set_epoch`, begins at its start. The order of
        an epoch does not depend on the ranks, so their number may have changed. Passes and batches
        are counted on from the cursor.

        Raises:
            ConfigurationError: passes have begun already, or a value is out of range.
            InfeasibleBatchError: fewer samples are left than all ranks need at least.
        """
        check_int("epoch", place.epoch, minimum=0)
        used = check_int("used_samples", place.used_samples, minimum=0, maximum=self.epoch_samples)
        size = self.schedule.latest.global_batch_size
        next_global_batch(self.epoch_samples - used, size, self.bounds, self.drop_last)
        self.schedule.go_on_from(place.cursor)
        self._first_epoch, self._first_pass = place.epoch, place.cursor[0]
        self._resumed = place

    def __len__(self) -> int:
        """Global batches, hence steps, of one epoch under the newest plan's global batch size."""
        size = self.schedule.latest.global_batch_size
        return count_batches(self.epoch_samples, size, self.bounds, self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # torch's loader calls iter() twice when it has workers, and draws from one of the two:
        # a pass begins when its loader opens it, or at the first draw, never here.
        return self._draw(self._opened)

    @contextmanager
    def opened_pass(self, tickets: deque[LocalBatch]) -> Iterator[int]:
        """Begin a pass; iterators made in the block belong to it and push its ``tickets``."""
        self._opened = self._begin(tickets)
        try:
            yield self._opened.number
        finally:
            self._opened = None

    def _begin(self, tickets: deque[LocalBatch] | None) -> _Pass:
        place, self._resumed = self._resumed, None
        goes_on = place is not None and self._epoch in (None, place.epoch)
        number, first_step = self.schedule.begin_pass(goes_on=goes_on)
        epoch = self._first_epoch + number - self._first_pass
        if self._epoch is not None:
            epoch = self._epoch
        if place is None or not goes_on:
            return _Pass(number, first_step, epoch, 0, None, tickets)
        return _Pass(number, first_step, epoch, place.used_samples, place.order_checksum, tickets)

    def _order_of(self, this: _Pass) -> torch.Tensor | range:
        if self.order is None:
            return epoch_order(self.dataset_samples, self.seed, this.epoch, self.shuffle)
        order = self.order.draw(this.epoch)
        found = checksum(order)
        if this.used_checksum not in (None, found):
            raise ConfigurationError(
                f"sampler={self.order.kind}: it gives another order of epoch {this.epoch} than in "
                "the job that was saved in the middle of it, as its order follows from more than "
                f"the epoch. {ONE_ORDER}; or begin the next epoch"
            )
        self.drawn_order = this.number, this.epoch, found
        return order

    def _draw(self, opened: _Pass | None) -> Iterator[list[int]]:
        this = opened or self._begin(None)
        order = self._order_of(this)
        step, position = this.first_step, this.used_samples
        while True:
            # Drawn also where the epoch ends: that there is no further batch is decided under this
            # plan, and a later plan must not reverse it on a rank that is behind.
            plan = self.schedule.draw((this.number, step))
            samples = next_global_batch(
                self.epoch_samples - position,
                plan.global_batch_size,
                self.bounds,
                self.drop_last,
            )
            if samples == 0:
                return
            ticket = local_batch(
                plan,
                self.bounds,
                self.rank,
                epoch_pass=this.number,
                step=step,
                start=position,
                global_samples=samples,
                epoch=this.epoch,
            )
            if this.tickets is not None:
                this.tickets.append(ticket)
            step += 1
            position += samples
            piece = order[ticket.start : ticket.stop]
            yield list(piece) if isinstance(piece, range) else piece.tolist()
