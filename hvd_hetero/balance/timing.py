"""From the timings of single steps to the summary of a window, on one rank and over all ranks.

All seconds are durations since the end of the previous exchange on the same rank, of the rank's
own work: time spent waiting for others is left out, and clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvd_hetero.balance.lines import TimingPoint
from hvd_hetero.errors import ConfigurationError, check_float, check_int

MAD_TO_STANDARD_DEVIATION = 1.4826  # for normally distributed values
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
    Raises ConfigurationError for a batch below 1, and for times that are negative or not finite.
    """

    batch: int
    ready_seconds: float
    done_seconds: float
    end_seconds: float
    compress_seconds: float = 0.0
    input_seconds: float = 0.0
    backward_seconds: float = 0.0

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
    after_ready_seconds: median time between the first bucket being ready and that end.
    """

    points: tuple[TimingPoint, ...]
    step_seconds: float
    wait_seconds: float
    after_ready_seconds: float

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigurationError("points=(): a window needs at least one timed step")
        for name in ("step_seconds", "wait_seconds", "after_ready_seconds"):
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
            "after_ready_seconds": self.after_ready_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WindowTiming:
        """Build a window from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            return cls(
                points=tuple(TimingPoint.from_dict(point) for point in data["points"]),
                step_seconds=data["step_seconds"],
                wait_seconds=data["wait_seconds"],
                after_ready_seconds=data["after_ready_seconds"],
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
        after_ready_seconds=median(max(0.0, step.end_seconds - _ready(step)) for step in used),
    )


def exchange_times(
    windows: Iterable[WindowTiming], last_bucket_share: float
) -> tuple[float, float]:
    """Return (T_o, T_u): seconds of the exchange of all buckets but the last, and of the last.

    Every rank sees the exchange end after its own waiting for the slowest, so the least over ranks
    is the exchange itself: after the last rank's backward T_u is left, after the last rank's
    first bucket T_o + T_u (Cannikin, section 4.2, takes the same minimum). With X and Y the least
    after_ready_seconds and wait_seconds: T_o + T_u = min(X, Y / share), T_u = share of that.

    last_bucket_share: the last bucket's part of all bytes, in (0, 1]. Raises ConfigurationError
    for a share out of range or no windows.
    """
    share = check_float(
        "last_bucket_share", last_bucket_share, minimum=0.0, maximum=1.0, exclusive_minimum=True
    )
    windows = tuple(windows)
    if not windows:
        raise ConfigurationError("windows=(): give the window of every rank")
    least_after_ready = min(window.after_ready_seconds for window in windows)
    least_wait = min(window.wait_seconds for window in windows)
    total = min(least_after_ready, least_wait / share)
    final = share * total
    return total - final, final


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
    )
