"""OptPerf over real batches: no whole split, of any granule, has a shorter step.

The problem of ``optperf`` (Cannikin: Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302,
section 4.3) without whole samples, as the paper states it:

    minimise T = max( max_i done_i(b_i),  max_i ready_i(b_i) + T_o ) + T_u
    subject to sum_i b_i = B,  lower_i <= b_i <= upper_i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_hetero.balance.bounds import Bounds, check_total
from hvd_hetero.balance.lines import RankModel
from hvd_hetero.balance.units import Floats, RankLines, check_models
from hvd_hetero.errors import check_int

__all__ = ["RealSolution", "level", "solve_real"]


@dataclass(frozen=True)
class RealSolution:
    """Real samples of each rank, in rank order, and the step they are predicted to take."""

    local_batches: tuple[float, ...]
    step_seconds: float


def solve_real(
    models: Sequence[RankModel],
    global_batch_size: int,
    *,
    bounds: Bounds,
    overlapped_seconds: float = 0.0,
    final_seconds: float = 0.0,
) -> RealSolution:
    """Return a real split of ``global_batch_size`` samples with the smallest T, in seconds.

    f_i(b) = max(done_i(b), ready_i(b) + T_o) never falls, so what all ranks finish by tau, each
    within its bounds, is monotone in tau and linear between break points, which are f_i at both
    bounds and where its lines cross. The answer lies on the piece that reaches the global batch,
    and on it is closed form. Where a flat line makes the sum jump there, the ranks that jump take
    the same share of their jumps. Ranks that cannot finish their lower bound by then take it all
    the same, so the others stay balanced. O(n log n); exact up to rounding.

    bounds: in samples; overlapped_seconds: T_o; final_seconds: T_u. Raises InfeasibleBatchError
    with the numbers when the bounds leave no split, ConfigurationError for malformed arguments.
    """
    check_models(models, bounds.ranks, overlapped_seconds, final_seconds)
    total = check_int("global_batch_size", global_batch_size, minimum=1)
    check_total("global_batch_size", total, bounds.lower, bounds.upper)
    lines = RankLines(models, overlapped_seconds)
    lower = np.asarray(bounds.lower, dtype=np.float64)
    upper = np.asarray(bounds.upper, dtype=np.float64)
    start, end = _piece(lines, lower, upper, total)
    from_, to = _samples(lines, lower, upper, start), _samples(lines, lower, upper, end)
    jumps = ((lines.slopes == 0.0) & (lines.intercepts == end)).any(axis=0)
    before = np.where(jumps, from_, to)  # just before ``end``
    if before.sum() >= total:
        batches = _between(from_, before, total)
    elif to.sum() >= total:
        batches = _between(before, to, total)
    else:  # rounding, at the last break point: only then is less than the batch finished
        batches = _between(to, upper, total)
    return RealSolution(
        tuple(batches.tolist()), float(lines.seconds(batches).max()) + final_seconds
    )


def level(lines: RankLines, lower: Floats, upper: Floats, total: float) -> float:
    """Return about the smallest tau by which the ranks finish ``total`` samples, in seconds.

    Each within its bounds, lower bounds taken at any tau. A jump is told exactly.
    """
    start, end = _piece(lines, lower, upper, total)
    if start == -np.inf:
        return end
    reached = _samples(lines, lower, upper, start).sum(), _samples(lines, lower, upper, end).sum()
    jumps = ((lines.slopes == 0.0) & (lines.intercepts == end)).any()
    if jumps or reached[1] <= reached[0]:
        return end
    return start + (end - start) * float((total - reached[0]) / (reached[1] - reached[0]))


def _samples(lines: RankLines, lower: Floats, upper: Floats, seconds: float) -> Floats:
    samples: Floats = np.minimum(np.maximum(lines.samples(seconds), lower), upper)
    return samples


def _piece(lines: RankLines, lower: Floats, upper: Floats, total: float) -> tuple[float, float]:
    """Return neighbouring break points: ``total`` is not reached by the first but by the second.

    The first is -inf where the very first break point reaches it.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        cross = (lines.intercepts[1] - lines.intercepts[0]) / (lines.slopes[0] - lines.slopes[1])
    # Clipping makes a crossing out of bounds, or none, one of the other break points again.
    cross = np.clip(np.nan_to_num(cross, nan=0.0), lower, upper)
    points = np.concatenate([lines.seconds(at) for at in (lower, cross, upper)])
    points.sort()
    first, last = 0, len(points) - 1  # at the last one all are at their upper bounds
    while first < last:
        middle = (first + last) // 2
        if _samples(lines, lower, upper, float(points[middle])).sum() >= total:
            last = middle
        else:
            first = middle + 1
    return (float(points[first - 1]) if first else -np.inf), float(points[first])


def _between(small: Floats, large: Floats, total: float) -> Floats:
    """Return the mix of ``small`` and ``large`` that sums to ``total``."""
    room = float((large - small).sum())
    share = min(max((total - float(small.sum())) / room, 0.0), 1.0) if room > 0.0 else 0.0
    return small + share * (large - small)
