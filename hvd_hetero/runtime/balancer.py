"""The Balancer: local batch sizes that follow the plan, and the samples behind a backward pass."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from hvd_hetero.balance.memory import MemoryUse
from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.balance.timing import WindowTiming
from hvd_hetero.data.loader import HeteroBatchSampler, HeteroDataLoader, dataset_length
from hvd_hetero.data.order import ONE_ORDER, SamplerOrder
from hvd_hetero.data.partition import LocalBatch
from hvd_hetero.data.sampler import Place
from hvd_hetero.data.schedule import Cursor, PlanSchedule
from hvd_hetero.errors import ConfigurationError, check_float, check_int
from hvd_hetero.planning.exchange_view import ExchangeView
from hvd_hetero.planning.plan import Plan
from hvd_hetero.planning.planner import (
    PlanEffect,
    PlannerConfig,
    PlannerState,
    advance,
    first_plan,
)
from hvd_hetero.planning.prediction import Prediction, predict
from hvd_hetero.runtime.agreement import CollectivesChannel, Message, verify_alike
from hvd_hetero.runtime.batches import Batch, BatchBook
from hvd_hetero.runtime.collectives import connect
from hvd_hetero.runtime.memory import explain_out_of_memory, memory_use
from hvd_hetero.runtime.profile_file import ProfileFile
from hvd_hetero.runtime.timings import StepTimer

logger = logging.getLogger("hvd_hetero")

_counter = itertools.count()


class Balancer:
    """Gives every rank the local batch that makes all ranks finish together (Cannikin).

    Pass it to ``hvd_hetero.DistributedOptimizer(balancer=...)`` and draw the training data from
    :meth:`data_loader`. Create it after ``hvd.init()``, on all ranks with the same arguments.

    Args:
        global_batch_size: samples of one backward pass over all ranks; stays constant.
        min_local_batch: lower bound of a rank's samples, for all ranks or one for each, at least 1.
            None: 2 on more than one rank, as batch normalisation in training refuses a single
            sample; 1 where the global batch has no two samples for each rank, where
            ``max_local_batch`` or ``fixed_local_batches`` say so, and in a last batch of an epoch
            with fewer.
        max_local_batch: upper bound likewise; None for no bound.
        granule: local batch sizes are multiples of it, but for one rank that takes the rest.
        fixed_local_batches: fixed sizes, one for each rank, instead of learnt ones.
        window_steps: optimizer steps between two looks at the timings.
        min_gain: relative gain in predicted step time below which a plan is kept.
        min_interval_windows: windows a plan stays at least; not in the first three windows, nor in
            the three after the speed of a rank or the exchange has changed.
        seed: of the order in which a shuffled epoch is read.
        profile: file in which rank 0 keeps what was learnt of the ranks' speed. A later job on the
            same hosts begins with it, and with a plan by it, instead of an even split. One file
            for each model that is trained. None: no file.
        exchange_timeout_seconds: how long to wait for other ranks before an error.

    Raises:
        ConfigurationError: a value that cannot be used, or ``hvd.init()`` was not called.
        InfeasibleBatchError: bounds that cannot meet ``global_batch_size``.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        min_local_batch: int | Sequence[int] | None = None,
        max_local_batch: int | Sequence[int] | None = None,
        granule: int = 1,
        fixed_local_batches: Sequence[int] | None = None,
        window_steps: int = 10,
        min_gain: float = 0.05,
        min_interval_windows: int = 3,
        seed: int = 0,
        profile: str | os.PathLike[str] | None = None,
        exchange_timeout_seconds: float = 600.0,
    ) -> None:
        self._collectives = connect()
        ranks = self._collectives.size
        self.window_steps = check_int("window_steps", window_steps, minimum=1)
        self.seed = check_int("seed", seed, minimum=0)
        self._timeout_seconds = check_float(
            "exchange_timeout_seconds", exchange_timeout_seconds, minimum=0, exclusive_minimum=True
        )
        total = check_int("global_batch_size", global_batch_size, minimum=1)
        fixed = None
        if fixed_local_batches is not None:
            fixed = _sizes("fixed_local_batches", fixed_local_batches, ranks)
        self._config = PlannerConfig(
            global_batch_size=total,
            bounds=_bounds(ranks, total, min_local_batch, max_local_batch, fixed),
            granule=granule,
            min_gain=min_gain,
            min_interval_windows=min_interval_windows,
            fixed_local_batches=fixed,
        )
        self._name = f"hvd_hetero.balancer.{next(_counter)}"
        self._channel = CollectivesChannel(self._collectives, self._name, self._timeout_seconds)
        if not isinstance(profile, (str, os.PathLike, type(None))) or profile == "":
            raise ConfigurationError(f"profile={profile!r}: expected the path of a file, or None")
        self._profile_given = profile is not None
        verify_alike(self._channel.allgather(self.describe(), "options"))
        self._state = PlannerState(first_plan(self._config, ranks))
        self._profile: ProfileFile | None = None
        if profile is not None:
            self._profile = ProfileFile(profile, self._channel, self._collectives.rank)
            self._state = self._profile.first_state(self._config)
        self._schedule = PlanSchedule(self._state.plan)
        self._sampler: HeteroBatchSampler | None = None
        self._optimizer_name: str | None = None
        self._device = torch.device("cpu")
        self._follows = False
        self.timer = StepTimer()
        self._batches = BatchBook(self._collectives, self._name, self._timeout_seconds, self.timer)
        self.position: list[int] | None = None  # (pass, step) of the batch yielded last
        self._at: Place | None = None  # with that batch
        self._at_before: Place | None = None  # with the batch before it
        self._trained: Place | None = None  # the same after the last step
        self._steps = 0

    # ---- what scripts use -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The newest agreed plan; batches drawn before it keep their sizes."""
        return self._schedule.latest

    @property
    def planned_share(self) -> float:
        """This rank's part of the newest plan's samples; over all ranks they add up to 1."""
        plan = self.plan
        return plan.local_batches[self._collectives.rank] / sum(plan.local_batches)

    def predict(self, local_batches: Sequence[int]) -> Prediction | None:
        """Return the seconds of a step under any split; None: not known yet.

        By what was known at the last window; known once every rank has been timed. Only rank 0
        learns and plans, so only it can answer.

        local_batches: samples of each rank, in rank order; they need not sum to the global batch.
        Raises ConfigurationError on other ranks, and for other than one size of at least 1 a rank.
        """
        if self._collectives.rank != 0:
            raise ConfigurationError(
                f"predict() on rank {self._collectives.rank}: only rank 0 learns the ranks' "
                "speeds: ask there"
            )
        return predict(self._state, _sizes("local_batches", local_batches, self._collectives.size))

    @property
    def effect(self) -> PlanEffect | None:
        """What the newest change of plan promised and what it brought; on rank 0, else None."""
        return self._state.effect

    @property
    def expected_seconds(self) -> float | None:
        """Seconds of a step that rank 0 expects in the window under way; None: not known yet."""
        return self._state.expected_seconds

    @property
    def global_batch_size(self) -> int:
        """Samples of one backward pass over all ranks."""
        return self._config.global_batch_size

    @property
    def local_batch_size(self) -> int:
        """Samples of the next batch this rank draws; for loaders and iterables of your own."""
        plan = self._schedule.plan_at(self._schedule.drawn)
        return plan.local_batches[self._collectives.rank]

    def data_loader(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        weigh: Callable[[Any], float] | None = None,
        **dataloader_options: Any,
    ) -> HeteroDataLoader[Any]:
        """Return a ``torch.utils.data.DataLoader`` over this rank's share of a map-style data set.

        Every sample of an epoch is seen exactly once over all ranks (``drop_last`` leaves out what
        does not fill a last global batch). Call it on all ranks, with the same data set.

        Args:
            sampler: a ``torch.utils.data.Sampler`` (or any iterable with a length) that gives the
                order of an epoch over all ranks, with weights, as a subset, with repeats; every
                global batch is cut from it. It runs with torch's default generator seeded by the
                Balancer's ``seed`` and the epoch, alike on all ranks, and its ``set_epoch`` is
                called if it has one. Ranks whose orders differ are told so after a step.
            weigh: called with every batch on the main thread, says what its mean is taken over
                where that is not its samples: valid tokens, labelled pixels; 0 on some ranks is
                fine (their gradient then counts exactly 0, also where 0/0 made it NaN). Costs a
                small allreduce for each batch.
            dataloader_options: those of ``DataLoader``.

        Raises:
            ConfigurationError: options that cannot be combined with it, or a second loader.
            RankMismatchError: ranks gave different data set sizes or options.
        """
        if weigh is not None and not callable(weigh):
            raise ConfigurationError(
                f"weigh={weigh!r}: expected a function of a batch that returns what its mean is "
                "taken over, as lambda batch: (batch[1] >= 0).sum()"
            )
        own = self._new_sampler(dataset_length(dataset), shuffle, drop_last, sampler)
        loader = HeteroDataLoader(
            dataset,
            own,
            on_yield=self._on_yield,
            loading=self.timer.loading,
            on_batch=None if weigh is None else partial(self._batches.weigh_yielded, weigh),
            **dataloader_options,
        )
        self._agree_on_data(own, weigh is not None)
        return loader

    def batch_sampler(
        self,
        dataset: Dataset[Any] | int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
    ) -> HeteroBatchSampler:
        """Return the batch sampler alone, for a ``DataLoader`` of your own.

        Such a loader does not say which batch it yields: call :meth:`set_batch` before every
        backward pass. ``dataset``: a map-style data set, or its number of samples; ``sampler`` as
        in :meth:`data_loader`.
        """
        samples = dataset if isinstance(dataset, int) else dataset_length(dataset)
        own = self._new_sampler(samples, shuffle, drop_last, sampler)
        self._agree_on_data(own, False)
        return own

    def _new_sampler(
        self, samples: int, shuffle: bool, drop_last: bool, sampler: Iterable[int] | None
    ) -> HeteroBatchSampler:
        if self._sampler is not None:
            raise ConfigurationError(
                "this Balancer already has a loader, and one optimizer listens to one loader: "
                "create another Balancer, or use set_batch with loaders of your own"
            )
        return HeteroBatchSampler(
            samples,
            self._schedule,
            self._config.bounds,
            self._collectives.rank,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
            order=None if sampler is None else SamplerOrder(sampler, samples, self.seed),
        )

    def _agree_on_data(self, sampler: HeteroBatchSampler, weighed: bool) -> None:
        options = {
            "samples of the data set": sampler.dataset_samples,
            "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last,
            "sampler": sampler.order and sampler.order.kind,
            "length of the sampler": sampler.epoch_samples,
            "weigh": weighed,
        }
        verify_alike(self._channel.allgather(options, "data"))
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that is read next, as ``DistributedSampler`` does."""
        check_int("epoch", epoch, minimum=0)
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def set_batch(self, samples: float, weight: float | None = None) -> None:
        """Say how many samples the next backward pass works on, and what its mean is taken over.

        Overrides what :meth:`data_loader` knows, until the next ``optimizer.step()``. Waits for
        all ranks, each of which must call it: the sum of the weights over ranks is the divisor.

        Args:
            samples: of this rank's batch; the plan and the timings behind it are in samples.
            weight: what the loss of the batch is a mean over where that is not its samples (valid
                tokens, labelled pixels); None: the samples. 0 on some ranks is fine: their gradient
                counts exactly 0, also where a mean over nothing made it NaN.

        Raises:
            ConfigurationError: a value that cannot be used, or a weight of 0 on all ranks.
        """
        self._batches.state(samples, weight)

    def weigh_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the batch in hand times this rank's share of the global batch.

        For ``DistributedOptimizer(..., loss_weighted=True)``, before every backward pass:
        ``balancer.weigh_loss(loss).backward()``. The losses of all ranks then add up to that of
        the joined batch, and so do their gradients, also through layers that talk across ranks in
        forward. A loss that is a sum (``loss_reduction="sum"``) is divided by the size of the
        global batch instead.

        Raises:
            BatchAccountingError: the batch is not known, or was weighed already.
            ConfigurationError: no such optimizer, or a loss that is not finite with weight 0.
        """
        return self._batches.weigh_loss(loss)

    def loading(self) -> AbstractContextManager[None]:
        """Mark the wait for a batch of your own loader: ``with balancer.loading(): next(it)``.

        It is then told apart from compute. :meth:`data_loader` does that by itself.
        """
        return self.timer.loading()

    # ---- what the optimizer uses ----------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether plans follow from timings."""
        return self._config.fixed_local_batches is None

    def check_free(self) -> None:
        """Raise ConfigurationError when an optimizer listens already."""
        if self._optimizer_name is not None:
            raise ConfigurationError(
                f"this Balancer already serves the optimizer {self._optimizer_name}; one "
                "optimizer listens to one loader: create another Balancer for this one"
            )

    def attach(
        self, optimizer_name: str, device: torch.device, weighed_reduction: str | None = None
    ) -> None:
        """Bind to one optimizer, whose parameters lie on ``device``.

        ``weighed_reduction``: "mean" or "sum" where losses are weighed before backward.
        """
        self.check_free()
        self._optimizer_name = optimizer_name
        self._device = device
        if weighed_reduction is not None:
            self._batches.expect_weighed_losses(weighed_reduction)
        explain_out_of_memory(self._describe_memory)

    def batch_of_pass(self) -> Batch:
        """Return the batch behind the pass that begins now.

        The same object as long as it is the same batch. Raises BatchAccountingError when unknown.
        """
        return self._batches.current()

    def pass_begins(self) -> None:
        """Raise BatchAccountingError when the loss of this pass should have been weighed."""
        self._batches.pass_begins()

    def step_done(self) -> None:
        """Forget what ``set_batch`` said: it is needed anew for the next step."""
        self._trained = self._at_before if self._batches.is_ahead else self._at
        self._batches.step_done()
        self._steps += 1
        if self._steps % self.window_steps == 0 or self._steps == 1:
            self._check_order()

    def _check_order(self) -> None:
        """Raise RankMismatchError when a sampler of the user's gives ranks different orders."""
        sampler = self._sampler
        if sampler is None or sampler.order is None or self._collectives.size == 1:
            return
        names = ("pass", "epoch", "checksum")
        drawn = dict(zip(names, sampler.drawn_order or (None,) * 3, strict=True))
        with self.timer.waiting():
            verify_alike(
                self._channel.allgather({f"order by sampler={sampler.order.kind}": drawn}, "order"),
                f"{ONE_ORDER}. Where the pass differs, a rank has begun one that others have not",
            )

    def report(self) -> Message:
        """Return what rank 0 needs of this rank besides its timings."""
        use = memory_use(self._device)
        return {
            "drawn": list(self._schedule.drawn),
            "memory": None if use is None else [use.peak_bytes, use.limit_bytes],
        }

    def decide(
        self,
        windows: Sequence[WindowTiming | None],
        reports: Sequence[Message],
        bucket_shares: Sequence[float],
        exchange: ExchangeView | None,
    ) -> Message:
        """Rank 0: turn all ranks' timings into the plan and the cursor from which it applies.

        ``windows``: in rank order, None where a rank saw no typical step. ``reports``: of all
        ranks. ``exchange``: how gradients travel, None: always alike.
        """
        known = [window for window in windows if window is not None]
        reason = "kept: a rank saw no typical step in this window"
        if len(known) == len(windows):
            before = self._state.effect
            self._state = advance(
                self._config,
                self._state,
                known,
                bucket_shares,
                exchange=exchange,
                memory=[
                    None if report["memory"] is None else MemoryUse(*report["memory"])
                    for report in reports
                ],
            )
            reason = self._state.reason
            measured = self._state.effect
            if before != measured and measured is not None and measured.measured_seconds:
                logger.info("%s", measured)
            if self._profile is not None:
                self._profile.write(self._state)
        first, second = max((int(x), int(y)) for x, y in (one["drawn"] for one in reports))
        return {
            "plan": self._state.plan.to_dict(),
            "effective": [first, second],
            "reason": reason,
        }

    def follow(self, plans: Sequence[tuple[Cursor, Plan]]) -> None:
        """All ranks: draw by ``plans``, each to be given to ``apply`` later; learn none.

        Raises:
            ConfigurationError: batches were drawn under another plan.
        """
        (effective, first), drawn = plans[0], self._schedule.drawn
        if effective < drawn and first.local_batches != self.plan.local_batches:
            raise ConfigurationError(
                f"batches were drawn with local batches {list(self.plan.local_batches)} before "
                f"the recorded {list(first.local_batches)} were known: create the optimizer "
                "before the first pass over the loader"
            )
        self._schedule.foresee(plans)
        self._follows = True

    def apply(self, decision: Message) -> bool:
        """All ranks: install the agreed plan; return True when it is new. The schedule is held."""
        plan = Plan.from_dict(decision["plan"])
        if plan.version == self._schedule.latest.version and not self._follows:
            return False
        first, second = decision["effective"]
        self._schedule.install(plan, (first, second))
        self._state = replace(self._state, plan=plan)  # also where it was not planned here
        logger.info("plan %d: %s (%s)", plan.version, plan.local_batches, decision["reason"])
        self.timer.discard()
        return True

    # ---- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, what the planner has learnt (rank 0), and the position in the data.

        Plain values. The position is that after the last ``optimizer.step()``, however far loader
        workers have run ahead. Part of ``optimizer.hetero_state_dict()``.
        """
        sampler, data = self._sampler, None
        if sampler is not None:
            place = self._trained or Place()
            data = _data_options(sampler) | {
                "epoch": place.epoch,
                "used_samples": place.used_samples,
                "cursor": list(place.cursor),
                "order": place.order_checksum,
            }
        first = self._collectives.rank == 0
        return {
            "ranks": self._collectives.size,
            "data": data,
            "plan": self.plan.to_dict(),
            "planner": self._state.to_dict() if first else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``; on all ranks, before the first pass over the loader.

        The epoch goes on where it was left, so that over both jobs every sample of it comes once,
        also with another number of ranks; plan and models are those of as many ranks as saved them.

        Raises:
            ConfigurationError: the data set or the options of the loader have changed, or batches
                were drawn already.
            InfeasibleBatchError: fewer samples of the epoch are left than the ranks need.
        """
        config, data = self._config, state["data"]
        if data is not None:
            if self._sampler is None:
                raise ConfigurationError(
                    "the state holds a position in the data: call balancer.data_loader(...) or "
                    "batch_sampler(...) before it is loaded"
                )
            options = _data_options(self._sampler)
            changed = [
                f"{n} {data.get(n)!r} -> {options.get(n)!r}"
                for n in dict.fromkeys([*options, *data])
                if n not in _PLACE and data.get(n) != options.get(n)
            ]
            if changed:
                raise ConfigurationError(
                    f"the state was saved with other data: {', '.join(changed)}; its position in "
                    "the epoch means nothing here: use the same data and seed, or take "
                    "state['balancer'] out to begin an epoch"
                )
            first, second = data.get("cursor", (0, 0))
            place = Place(
                int(data["epoch"]),
                int(data["used_samples"]),
                (int(first), int(second)),
                data.get("order"),
            )
            self._sampler.resume(place)
            self._at = self._trained = place
        if self._follows:
            return
        plan = Plan.from_dict(state["plan"])
        fits = plan.ranks == self._collectives.size and all(
            low <= size <= high
            for low, size, high in zip(
                config.bounds.lower, plan.local_batches, config.bounds.upper, strict=True
            )
        )
        if not fits or plan.global_batch_size != config.global_batch_size:
            logger.info("plan and models were saved for other ranks or batches: learnt anew")
            return
        if config.fixed_local_batches is None:
            self._schedule.install(plan, self._schedule.drawn)
            if state["planner"] is not None:
                self._state = PlannerState.from_dict(state["planner"])

    @property
    def schedule(self) -> PlanSchedule:
        """The plans by the draw from which they apply."""
        return self._schedule

    def describe(self) -> Message:
        """Return the options, to be logged and compared between ranks."""
        config = self._config
        return {
            "global_batch_size": config.global_batch_size,
            "min_local_batch": list(config.bounds.lower),
            "min_local_batch at the end of an epoch": list(config.bounds.floor),
            "max_local_batch": list(config.bounds.upper),
            "granule": config.granule,
            "fixed_local_batches": config.fixed_local_batches and list(config.fixed_local_batches),
            "window_steps": self.window_steps,
            "min_gain": config.min_gain,
            "min_interval_windows": config.min_interval_windows,
            "seed": self.seed,
            "profile": self._profile_given,
        }

    def _describe_memory(self) -> str:
        rank, plan = self._collectives.rank, self.plan
        samples = self._batches.yielded_samples or plan.local_batches[rank]
        return (
            f"rank {rank} ran out of memory with a local batch of {samples} samples (plan "
            f"{plan.version}: {plan.local_batches}): give the Balancer max_local_batch, one number "
            f"or one for each rank, below {samples} for this rank, or a smaller global_batch_size"
        )

    def _on_yield(self, batch: LocalBatch | None) -> None:
        self.position = None if batch is None else [batch.epoch_pass, batch.step]
        if batch is not None:
            self._at_before = self._at
            drawn = None if self._sampler is None else self._sampler.drawn_order
            self._at = Place(
                batch.epoch,
                batch.epoch_samples,
                (batch.epoch_pass, batch.step + 1),
                drawn and drawn[2],
            )
        self._batches.yielded(batch)
        if batch is None or batch.step == 0:
            self.timer.discard()  # evaluation and loader start-up lie between two epochs


_PLACE = ("epoch", "used_samples", "cursor", "order")  # of saved data, what is no option of it


def _data_options(sampler: HeteroBatchSampler) -> dict[str, Any]:
    """Return what the order of an epoch and its last batches follow from."""
    names = ("dataset_samples", "shuffle", "seed", "drop_last")
    options = {name: getattr(sampler, name) for name in names}
    if sampler.order is not None:
        options |= {"sampler": sampler.order.kind, "epoch_samples": sampler.epoch_samples}
    return options


def _bounds(
    ranks: int,
    total: int,
    minimum: int | Sequence[int] | None,
    maximum: int | Sequence[int] | None,
    fixed: tuple[int, ...] | None,
) -> Bounds:
    bounds = Bounds.build(ranks, total, minimum, maximum)
    if minimum is None and fixed is not None:  # the user's own split may give a rank one sample
        lower = tuple(min(pair) for pair in zip(bounds.lower, fixed, strict=True))
        bounds = replace(bounds, lower=lower)
    return bounds


def _sizes(name: str, sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ConfigurationError(f"{name}={sizes!r}: expected a list with one size for each rank")
    checked = tuple(check_int(name, size, minimum=1) for size in sizes)
    if len(checked) != ranks:
        raise ConfigurationError(
            f"{name}={list(sizes)!r}: {len(checked)} sizes for {ranks} ranks; "
            "give one for each rank"
        )
    return checked
