"""An epoch cut into global batches, and a global batch cut into the ranks' slices.

Pure: the same numbers give the same answer on every rank, so no communication is needed. An epoch
is an order of the data set's indices. Global batches take it from front to back, and within a
global batch rank 0 takes the first piece, rank 1 the next, and so on: every sample of the epoch is
used exactly once over all ranks, however often the plan changes in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvd_hetero.balance.optperf import Bounds, apportion
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError, check_int
from hvd_hetero.planning.plan import Plan


@dataclass(frozen=True)
class LocalBatch:
    """One rank's piece of one global batch.

    ``epoch_pass`` counts the passes over the loader from 0, ``step`` the global batches of that
    pass. ``start`` and ``stop`` index the epoch's order. ``global_samples`` is the number of
    samples of the global batch over all ranks: ``samples / global_samples`` is this rank's weight.
    ``epoch`` is the one whose order it is, ``epoch_samples`` how much of it this and all earlier
    global batches take.
    """

    epoch_pass: int
    step: int
    start: int
    stop: int
    global_samples: int
    epoch: int = 0
    epoch_samples: int = 0

    def __post_init__(self) -> None:
        if self.epoch_pass < 0 or self.step < 0 or self.start < 0:
            raise ConfigurationError(f"{self}: pass, step and start must not be negative")
        if not 1 <= self.samples <= self.global_samples:
            raise ConfigurationError(
                f"{self}: a local batch needs 1 to global_samples={self.global_samples} samples, "
                f"this one has {self.samples}"
            )

    @property
    def samples(self) -> int:
        """Samples of this rank in the global batch, at least 1."""
        return self.stop - self.start


def next_global_batch(
    remaining: int, global_batch_size: int, bounds: Bounds, drop_last: bool
) -> int:
    """Samples of the next global batch when ``remaining`` samples of the epoch are left.

    0 ends the epoch. A global batch below the sum of the lower bounds would leave some rank
    without its minimum. When the samples left after a full batch would be too few, the full batch
    and the rest are split evenly in two; when the halves would be too small as well, everything
    goes into one batch. Where the lower bounds cannot be met so, ``bounds.floor`` takes their
    place.

    Raises InfeasibleBatchError when ``remaining`` itself is above 0 and too small, which
    :func:`check_feasible` rules out for a whole epoch.
    """
    if drop_last:
        return global_batch_size if remaining >= global_batch_size else 0
    if remaining <= 0:
        return 0
    floor, largest = sum(bounds.floor), max(global_batch_size, sum(bounds.upper))
    if remaining < floor:
        raise InfeasibleBatchError(
            f"{remaining} samples are left in the epoch, the ranks' minimum batches need "
            f"{floor}: set drop_last=True or lower the minimum local batch"
        )
    samples = _next_above(remaining, global_batch_size, sum(bounds.lower))
    if samples > largest:
        samples = _next_above(remaining, global_batch_size, floor)
    return samples


def _next_above(remaining: int, global_batch_size: int, min_total: int) -> int:
    """The next global batch such that neither it nor what is left is below ``min_total``."""
    if remaining < global_batch_size:
        return remaining
    left = remaining - global_batch_size
    if left == 0 or left >= min_total:
        return global_batch_size
    return remaining - remaining // 2 if remaining // 2 >= min_total else remaining


def count_batches(
    dataset_samples: int, global_batch_size: int, bounds: Bounds, drop_last: bool
) -> int:
    """Global batches of one epoch, the same on every rank."""
    # While two full batches or more are left, the next one is full.
    count = max(0, dataset_samples // global_batch_size - 1)
    remaining = dataset_samples - count * global_batch_size
    while samples := next_global_batch(remaining, global_batch_size, bounds, drop_last):
        count += 1
        remaining -= samples
    return count


def check_feasible(
    dataset_samples: int, global_batch_size: int, bounds: Bounds, drop_last: bool
) -> None:
    """Raise InfeasibleBatchError unless an epoch can be cut into batches within ``bounds``.

    Raised when the data set has fewer samples than the ranks' minimum batches need, when
    ``drop_last`` would drop all of it, and when the last batch would exceed the upper bounds.
    """
    min_total, max_total = sum(bounds.floor), sum(bounds.upper)
    ranks = len(bounds.lower)
    if dataset_samples < min_total:
        raise InfeasibleBatchError(
            f"the data set has {dataset_samples} samples, {ranks} ranks need at least {min_total} "
            f"in a step (minimum local batches {_short(bounds.floor)}): use a larger data set, "
            "fewer ranks or a smaller minimum local batch"
        )
    if drop_last and dataset_samples < global_batch_size:
        raise InfeasibleBatchError(
            f"drop_last=True: the data set has {dataset_samples} samples, fewer than "
            f"global_batch_size={global_batch_size}, so every epoch would be empty: set "
            f"drop_last=False or global_batch_size to at most {dataset_samples}"
        )
    rest = dataset_samples % global_batch_size
    if drop_last or dataset_samples < global_batch_size or rest == 0:
        return
    last = next_global_batch(global_batch_size + rest, global_batch_size, bounds, drop_last)
    if last > max_total:
        raise InfeasibleBatchError(
            f"the last {rest} of {dataset_samples} samples are fewer than the {min_total} that "
            f"{ranks} ranks need in a step; joined with the batch before them they are {last}, "
            f"more than the maximum local batches {_short(bounds.upper)} allow ({max_total}): "
            f"set drop_last=True, another global_batch_size than {global_batch_size}, a larger "
            "maximum or a smaller minimum local batch"
        )


def local_sizes(plan: Plan, bounds: Bounds, global_samples: int) -> tuple[int, ...]:
    """Samples of each rank, in rank order, in a global batch of ``global_samples``.

    The plan's own sizes for a full batch, its shares within ``bounds`` for any other. Raises
    InfeasibleBatchError when the bounds cannot be met.
    """
    if global_samples == plan.global_batch_size:
        return plan.local_batches
    least = bounds.lower if global_samples >= sum(bounds.lower) else bounds.floor
    return apportion(global_samples, plan.local_batches, least, bounds.upper)


def local_batch(
    plan: Plan,
    bounds: Bounds,
    rank: int,
    *,
    epoch_pass: int,
    step: int,
    start: int,
    global_samples: int,
    epoch: int = 0,
) -> LocalBatch:
    """Return the piece of ``rank`` of the global batch that starts at ``start`` of the order."""
    sizes = local_sizes(plan, bounds, global_samples)
    first = start + sum(sizes[:rank])
    stop = first + sizes[rank]
    after = start + global_samples
    return LocalBatch(epoch_pass, step, first, stop, global_samples, epoch, after)


def epoch_order(dataset_samples: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor | range:
    """Return the order of the data set's indices in ``epoch``: int64 [dataset_samples], or a range.

    A shuffled order depends on ``dataset_samples``, ``seed`` and ``epoch`` only. It has its own
    generator: the random state of the training script is neither read nor changed.
    """
    if not shuffle:
        return range(dataset_samples)
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(dataset_samples, generator=generator)


def mixed_seed(seed: int, epoch: int) -> int:
    """Return a seed for ``epoch``: mixed, not added, so that (0, 1) and (1, 0) are different."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def evaluation_share(dataset_samples: int, shares: Sequence[int], rank: int) -> range:
    """Return the samples that ``rank`` evaluates: runs in proportion to ``shares``, in rank order.

    Over all ranks every sample comes once. A rank may get none.
    Raises ConfigurationError for malformed arguments.
    """
    samples = check_int("dataset_samples", dataset_samples, minimum=0)
    rank = check_int("rank", rank, minimum=0, maximum=len(shares) - 1)
    counts = apportion(samples, shares, [0] * len(shares), [samples] * len(shares))
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


def _short(bounds: Sequence[int]) -> str:
    """The bounds for a message: one number when all ranks have the same."""
    return str(bounds[0]) if len(set(bounds)) == 1 else str(tuple(bounds))
