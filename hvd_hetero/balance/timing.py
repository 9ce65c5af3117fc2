"""From the timings of single steps to the summary of a window, on one rank and over all ranks.

All seconds are durations since the end of the previous exchange on the same rank, of the rank's
own work: time spent waiting for others is left out, and clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from hvd_hetero.balance.lines import TimingPoint
from hvd_hetero.errors import ConfigurationError, check_float, check_int

MAD_TO_STANDARD_DEVIATION = 1.4826  # for normally distributed values
LEAST_SHARE = 0.1  # of a window's steps that may wait less than what is called least
_WINDOW_SECONDS = ("step_seconds", "wait_seconds", "least_wait_seconds", "after_ready_seconds")
_STEP_SECONDS = (
    "ready_seconds",
    "done_seconds",
    "end_seconds",
    "compress_seconds",
    "input_seconds",
    "backward_seconds",
)


@dataclass(frozen=True)
class StepTiming:
    """One step of one rank.

    batch: samples of this rank in the step. ready_seconds: until the first gradient bucket could
    be sent; done_seconds: until the end of backward; both of own work, without waiting and without
    compression. end_seconds: until the last exchange of the step had finished, both included.
    compress_seconds: of compression. input_seconds: waiting for the loader, and backward_seconds:
    of all backward passes; both are parts of done_seconds, whose rest is forward and update.
    bucket_seconds: as ready_seconds, of every bucket in the order of launch; empty: not known.
    Raises ConfigurationError for a batch below 1, and for times that are negative or not finite.
    """

    batch: int
    ready_seconds: float
    done_seconds: float
    end_seconds: float
    compress_seconds: float = 0.0
    input_seconds: float = 0.0
    backward_seconds: float = 0.0
    bucket_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_int("batch", self.batch, minimum=1)
        for name in _STEP_SECONDS:
            check_float(name, getattr(self, name), minimum=0.0)


@dataclass(frozen=True)
class WindowTiming:
    """What one rank reports of a window.

    points: one per local batch size, ascending by size. step_seconds: median step.
    wait_seconds: median time between the end of the own work, compression included, and the end of
    the exchange.
    The rest is of the steps that waited least, as jitter of the ranks only ever adds to a wait:
    least_wait_seconds: of the same time. after_ready_seconds: between the first bucket being ready
    and that end. after_bucket_seconds: the same of every bucket, in the order of launch; empty: not
    known.
    """

    points: tuple[TimingPoint, ...]
    step_seconds: float
    wait_seconds: float
    least_wait_seconds: float
    after_ready_seconds: float
    after_bucket_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigurationError("points=(): a window needs at least one timed step")
        for name in _WINDOW_SECONDS:
            check_float(name, getattr(self, name), minimum=0.0)

    @property
    def typical(self) -> TimingPoint:
        """The point most steps were measured for; of equals that of the larger batch."""
        return max(self.points, key=lambda point: (point.steps, point.batch))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "points": [point.to_dict() for point in self.points],
            "step_seconds": self.step_seconds,
            "wait_seconds": self.wait_seconds,
            "least_wait_seconds": self.least_wait_seconds,
            "after_ready_seconds": self.after_ready_seconds,
            "after_bucket_seconds": list(self.after_bucket_seconds),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WindowTiming:
        """Build a window from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            return cls(
                points=tuple(TimingPoint.from_dict(point) for point in data["points"]),
                step_seconds=data["step_seconds"],
                wait_seconds=data["wait_seconds"],
                least_wait_seconds=data["least_wait_seconds"],
                after_ready_seconds=data["after_ready_seconds"],
                after_bucket_seconds=tuple(data["after_bucket_seconds"]),
            )
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"window={data!r}: not a saved window ({error}); "
                "pass the dict WindowTiming.to_dict() gave"
            ) from error


def summarise(steps: Sequence[StepTiming]) -> WindowTiming:
    """Return the robust summary of a window's steps on one rank.

    Steps are grouped by local batch size; groups of a single step (tails of an epoch) are left
    out unless all groups are that small. Each group gives the medians of its seconds and the
    variance of one step's done_seconds, (1.4826 n/(n-0.8) MAD)^2. A ready time after done counts
    as done, an exchange that ended before the own work as no waiting.
    Raises ConfigurationError when there is no step.
    """
    if not steps:
        raise ConfigurationError("steps=(): a window needs at least one timed step")
    groups: dict[int, list[StepTiming]] = {}
    for step in steps:
        groups.setdefault(step.batch, []).append(step)
    if any(len(group) > 1 for group in groups.values()):
        groups = {batch: group for batch, group in groups.items() if len(group) > 1}
    used = [step for group in groups.values() for step in group]
    return WindowTiming(
        points=tuple(_point(batch, groups[batch]) for batch in sorted(groups)),
        step_seconds=median(max(step.end_seconds, _own(step)) for step in used),
        wait_seconds=median(max(0.0, step.end_seconds - _own(step)) for step in used),
        least_wait_seconds=_least([max(0.0, step.end_seconds - _own(step)) for step in used]),
        after_ready_seconds=_least([max(0.0, step.end_seconds - _ready(step)) for step in used]),
        after_bucket_seconds=_columns(
            _least,
            [
                tuple(max(0.0, step.end_seconds - ready) for ready in step.bucket_seconds)
                for step in used
            ],
        ),
    )


def exchange_times(
    windows: Iterable[WindowTiming], bucket_shares: Sequence[float], first: int = 0
) -> tuple[float, float]:
    """Return (T_o, T_u): seconds of the exchange of buckets ``first`` to the last but one, and of
    the last.

    Every rank sees the exchange end after its own waiting for the slowest, so the least over ranks
    is the exchange itself (Cannikin, section 4.2, takes the same minimum): after the last rank's
    bucket j all buckets from j on are left. With X_j the least after_bucket_seconds, Y the least
    least_wait_seconds and S_j the share of the buckets from j on, all exchanges together take
    min(min_j X_j / S_j, Y / S_last); T_o and T_u are shares of that. What lies hidden within
    backward may have taken less.

    bucket_shares: each bucket's part of the exchange, in the order of launch. Raises
    ConfigurationError for shares that do not add up to 1, or without windows.
    """
    windows = tuple(windows)
    if not windows:
        raise ConfigurationError("windows=(): give the window of every rank")
    left = shares_left(bucket_shares)
    total = min(
        min(window.after_ready_seconds for window in windows),
        min(window.least_wait_seconds for window in windows) / left[-1],
    )
    for window in windows:
        if len(window.after_bucket_seconds) == len(left):
            pairs = zip(window.after_bucket_seconds, left, strict=True)
            total = min(total, *(seconds / share for seconds, share in pairs))
    return (left[first] - left[-1]) * total, left[-1] * total


def shares_left(bucket_shares: Sequence[float]) -> tuple[float, ...]:
    """Return for each bucket the share of it and of all after it; each in (0, 1], the first 1.

    Raises ConfigurationError for shares that are not above 0 or do not add up to 1.
    """
    for share in bucket_shares:
        check_float("bucket_shares", share, minimum=0.0, maximum=1.0, exclusive_minimum=True)
    left = tuple(reversed(tuple(accumulate(reversed(bucket_shares)))))
    if not left or abs(left[0] - 1.0) > 1e-6:
        raise ConfigurationError(f"bucket_shares={bucket_shares!r}: they have to add up to 1")
    return (1.0, *left[1:])


def critical_bucket(windows: Sequence[WindowTiming], bucket_shares: Sequence[float]) -> int:
    """Return the bucket, 0 or a later one, from which the exchange holds up the step.

    With r_ij when bucket j is ready on rank i, all exchanges from j on end no earlier than
    max_i r_ij + S_j E. Most often the first bucket or the last is the latest of these, which is
    Cannikin's two-point model. A bucket in between is returned where it predicts the measured
    step better: where much computing lies before it in backward and many bytes from it on.
    """
    left = shares_left(bucket_shares)
    typical = [window.typical for window in windows]
    if len(left) < 3 or any(len(point.bucket_seconds) != len(left) for point in typical):
        return 0
    overlapped, final = exchange_times(windows, bucket_shares)
    total = overlapped + final
    ends = [
        max(point.bucket_seconds[j] for point in typical) + share * total
        for j, share in enumerate(left)
    ]
    latest = max(point.done_seconds + point.compress_seconds for point in typical) + final
    best = max(range(len(left) - 1), key=lambda j: ends[j])
    measured = max(window.step_seconds for window in windows)
    two_points, between = max(ends[0], latest), max(ends[best], latest)
    return best if abs(between - measured) < abs(two_points - measured) else 0


def _least(values: Sequence[float]) -> float:
    """The smallest but for LEAST_SHARE of them."""
    return sorted(values)[int(LEAST_SHARE * len(values))]


def _columns(
    of: Callable[[Sequence[float]], float], rows: Sequence[tuple[float, ...]]
) -> tuple[float, ...]:
    """``of`` each column; empty where the rows differ in length."""
    if len({len(row) for row in rows}) != 1:
        return ()
    return tuple(of(column) for column in zip(*rows, strict=True))


def _own(step: StepTiming) -> float:
    return step.done_seconds + step.compress_seconds


def _ready(step: StepTiming) -> float:
    return min(step.ready_seconds, step.done_seconds)


def _point(batch: int, group: Sequence[StepTiming]) -> TimingPoint:
    done = median(step.done_seconds for step in group)
    # n / (n - 0.8): small samples understate (Croux, Rousseeuw 1992).
    scale = MAD_TO_STANDARD_DEVIATION * len(group) / (len(group) - 0.8)
    spread = scale * median(abs(step.done_seconds - done) for step in group)
    return TimingPoint(
        batch=batch,
        ready_seconds=min(done, median(_ready(step) for step in group)),
        done_seconds=done,
        variance=spread**2,
        steps=len(group),
        compress_seconds=median(step.compress_seconds for step in group),
        input_seconds=min(done, median(step.input_seconds for step in group)),
        backward_seconds=min(done, median(step.backward_seconds for step in group)),
        bucket_seconds=_columns(median, [step.bucket_seconds for step in group]),
    )
