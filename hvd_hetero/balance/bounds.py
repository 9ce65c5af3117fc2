"""Bounds of the local batches, and fair shares within them, in whole samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError, check_int

DEFAULT_MINIMUM = 2  # batch normalisation in training refuses a single sample


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest local batch of each rank, in samples, in rank order.

    ``floor``: the smallest where there are too few samples for ``lower``, as at the end of an
    epoch; () where ``lower`` must hold there too.

    Raises ConfigurationError if the lengths differ, there is no rank, a lower bound is below 1
    (no rank may ever be without samples), or a lower bound is above its upper bound.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    floor: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lower = tuple(check_int(f"lower[{i}]", x, minimum=1) for i, x in enumerate(self.lower))
        upper = tuple(check_int(f"upper[{i}]", x, minimum=1) for i, x in enumerate(self.upper))
        if not lower or len(lower) != len(upper):
            raise ConfigurationError(
                f"bounds for {len(lower)} lower and {len(upper)} upper local batches: "
                "give one of each for every rank"
            )
        for rank, (low, high) in enumerate(zip(lower, upper, strict=True)):
            if low > high:
                raise ConfigurationError(
                    f"rank {rank}: minimum local batch {low} is above its maximum {high}; "
                    "lower the minimum or raise the maximum"
                )
        floor = tuple(check_int(f"floor[{i}]", x, minimum=1) for i, x in enumerate(self.floor))
        floor = floor or lower
        if len(floor) != len(lower) or any(a > b for a, b in zip(floor, lower, strict=True)):
            raise ConfigurationError(
                f"floor={floor}: give one number for each rank, none above its minimum {lower}"
            )
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)
        object.__setattr__(self, "floor", floor)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.lower)

    @classmethod
    def build(
        cls,
        ranks: int,
        global_batch_size: int,
        minimum: int | Sequence[int] | None = 1,
        maximum: int | Sequence[int] | None = None,
    ) -> Bounds:
        """Return the bounds of ``ranks`` ranks that share ``global_batch_size`` samples.

        minimum, maximum: one number for all ranks, or one for each in rank order; without a
        maximum a rank may take the whole global batch. Minimum None: 2 where there are several
        ranks and two samples for each, and where the maximum allows it, else 1; 1 too in batches
        that have too few samples.
        Raises ConfigurationError for malformed values, InfeasibleBatchError when no split fits.
        """
        ranks = check_int("ranks", ranks, minimum=1)
        global_batch_size = check_int("global_batch_size", global_batch_size, minimum=1)
        upper = _per_rank("max_local_batch", maximum, ranks) if maximum is not None else None
        floor: tuple[int, ...] = ()
        if minimum is None:
            enough = ranks > 1 and global_batch_size >= DEFAULT_MINIMUM * ranks
            least = DEFAULT_MINIMUM if enough else 1
            lower = tuple(min(least, most) for most in upper or (least,) * ranks)
            floor = (1,) * ranks
        else:
            lower = _per_rank("min_local_batch", minimum, ranks)
        if upper is None:
            upper = tuple(max(low, global_batch_size) for low in lower)
        bounds = cls(lower, upper, floor)
        check_total("global_batch_size", global_batch_size, bounds.lower, bounds.upper)
        return bounds


def apportion(
    total: int, shares: Sequence[int], lower: Sequence[int], upper: Sequence[int]
) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``shares``, within bounds; the result sums to ``total``.

    The ideal is x_i = clamp(lambda * share_i, lower_i, upper_i) with the lambda at which the x_i
    add up to total; every result is the ideal rounded down or up, up where the remainders are
    largest, the first ranks when they are equal (largest remainder method). Ranks with share 0
    stay at their lower bound until the others are at their upper; then they share equally.
    Integer arithmetic throughout: the same on every machine. Bounds of 0 are allowed.

    Raises ConfigurationError for malformed arguments, InfeasibleBatchError when ``total`` is
    outside the sum of the bounds.
    """
    total = check_int("total", total, minimum=0)
    weights = [check_int(f"shares[{i}]", x, minimum=0) for i, x in enumerate(shares)]
    low = [check_int(f"lower[{i}]", x, minimum=0) for i, x in enumerate(lower)]
    high = [check_int(f"upper[{i}]", x, minimum=0) for i, x in enumerate(upper)]
    if not weights or not len(weights) == len(low) == len(high):
        raise ConfigurationError(
            f"{len(weights)} shares, {len(low)} lower and {len(high)} upper bounds: "
            "give one of each for every rank"
        )
    check_total("total", total, low, high)
    for rank, (small, large) in enumerate(zip(low, high, strict=True)):
        if small > large:
            raise ConfigurationError(f"rank {rank}: lower bound {small} is above upper {large}")
    result = list(low)
    active = [i for i, weight in enumerate(weights) if weight]
    idle = [i for i, weight in enumerate(weights) if not weight]
    room = sum(high[i] for i in active) + sum(low[i] for i in idle)
    _fill(min(total, room), weights, low, high, result, active)
    if total > room:
        _fill(total, [1] * len(weights), low, high, result, idle)
    return tuple(result)


def _fill(
    total: int,
    weights: Sequence[int],
    low: Sequence[int],
    high: Sequence[int],
    result: list[int],
    group: Sequence[int],
) -> None:
    """Set ``result`` of the ranks in ``group`` so that all of ``result`` sums to ``total``."""
    if not group:
        return
    target = total - sum(result) + sum(result[i] for i in group)
    # Break points of lambda as fixed-point integers: distinct ratios of numbers below 2**bits
    # differ by more than 2**(-2 bits), so their order is exact.
    shift = 2 * max(weights[i] for i in group).bit_length()
    points = sorted(
        {((bound[i] << shift) // weights[i], bound[i], weights[i]) for i in group
         for bound in (low, high)}
    )  # fmt: skip

    def reached(index: int) -> int:
        """Ideal sum at break point ``index``, compared with the target: a signed integer."""
        _, top, bottom = points[index]
        filled = sum(min(max(weights[i] * top, low[i] * bottom), high[i] * bottom) for i in group)
        return filled - target * bottom

    first, last = 0, len(points) - 1  # the ideal sum is at least the target at the last point
    while first < last:
        middle = (first + last) // 2
        if reached(middle) >= 0:
            last = middle
        else:
            first = middle + 1
    end = points[first][0]
    free = []
    for i in group:
        if (low[i] << shift) // weights[i] >= end:
            result[i] = low[i]
        elif (high[i] << shift) // weights[i] < end:
            result[i] = high[i]
        else:
            free.append(i)
    if not free:
        return
    rest = target - sum(result[i] for i in group) + sum(result[i] for i in free)
    weight = sum(weights[i] for i in free)
    for i in free:
        result[i] = rest * weights[i] // weight
    missing = rest - sum(result[i] for i in free)
    for i in sorted(free, key=lambda i: (-(rest * weights[i] % weight), i))[:missing]:
        result[i] += 1


def _per_rank(name: str, value: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple(check_int(f"{name}[{i}]", x, minimum=1) for i, x in enumerate(value))
        if len(values) != ranks:
            raise ConfigurationError(
                f"{name}={value!r}: {len(values)} numbers for {ranks} ranks; "
                "give one number, or one for each rank"
            )
        return values
    return (check_int(name, value, minimum=1),) * ranks


def check_total(name: str, total: int, lower: Sequence[int], upper: Sequence[int]) -> None:
    """Raise InfeasibleBatchError, with the numbers, unless ``total`` fits between the bounds."""
    if not sum(lower) <= total <= sum(upper):
        raise InfeasibleBatchError(
            f"{name}={total}: the {len(lower)} ranks take at least {sum(lower)} and at most "
            f"{sum(upper)} samples together (minimum {_brief(lower)}, maximum {_brief(upper)}); "
            f"change {name} or the bounds of the local batches"
        )


def _brief(values: Sequence[int]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]} each"
    return f"{min(values)}..{max(values)}" if len(values) > 8 else str(list(values))
