"""Which rank is slow, and in what: its input, its forward or its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hvd_hetero.balance.lines import TimingPoint
from hvd_hetero.balance.perf_model import PRIOR_SHARE

PARTS = ("input", "forward", "backward")
SLOW_RATIO = 1.25  # of the median, from which a rank is called slow ...
SLOPE_SHARES = (0.5, 1.0)  # ... whatever share of its seconds within these grows with its batch


@dataclass(frozen=True)
class SlowRank:
    """A rank that needs ``ratio`` times the median seconds of all ranks for the same batch.

    part: one of PARTS, in which most of the difference lies. Forward includes the update.
    """

    rank: int
    ratio: float
    part: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in its {self.part}: it needs {self.ratio:.2g} times the "
            "seconds of the median rank for the same batch"
        )


def slow_ranks(points: Sequence[TimingPoint | None]) -> tuple[SlowRank, ...]:
    """Return the ranks whose own work is slow, the slowest first.

    Seconds are compared at one batch, the median of all, taking PRIOR_SHARE of them to grow with
    the batch: a rank is not slow for having more to do, nor for the fixed costs of a small batch.

    points: of each rank in rank order, None where a rank has none.
    """
    known = {rank: p for rank, p in enumerate(points) if p is not None and p.done_seconds > 0.0}
    if len(known) < 2:
        return ()
    batch = median(point.batch for point in known.values())
    scaled = {
        rank: [
            (PRIOR_SHARE * batch / point.batch + 1.0 - PRIOR_SHARE) * seconds
            for seconds in (point.done_seconds, *(_seconds(point, part) for part in PARTS))
        ]
        for rank, point in known.items()
    }
    usual = [median(column) for column in zip(*scaled.values(), strict=True)]
    found = []
    for rank, seconds in scaled.items():
        # Of two ranks the other one is the measure, not the middle.
        base = usual if len(scaled) > 2 else next(s for r, s in scaled.items() if r != rank)
        kindest = min(
            known[rank].done_seconds * (share * batch / known[rank].batch + 1.0 - share)
            for share in SLOPE_SHARES
        )
        if kindest < SLOW_RATIO * base[0]:
            continue
        ratio = seconds[0] / base[0]
        excess = [own - other for own, other in zip(seconds[1:], base[1:], strict=True)]
        found.append(SlowRank(rank, ratio, PARTS[excess.index(max(excess))]))
    return tuple(sorted(found, key=lambda slow: (-slow.ratio, slow.rank)))


def _seconds(point: TimingPoint, part: str) -> float:
    return float(getattr(point, f"{part}_seconds"))
