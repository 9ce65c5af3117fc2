"""OptPerf: the split of a global batch whose step is shortest, exactly and in whole samples.

Cannikin (Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302), section 4.3. A step takes

    T(b_1..b_n) = max( max_i done_i(b_i),  max_i ready_i(b_i) + T_o ) + T_u

with T_o the exchange of all gradient buckets but the last, T_u that of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_hetero.balance.bounds import Bounds, apportion, check_total
from hvd_hetero.balance.lines import RankModel
from hvd_hetero.balance.units import Ints, RankLines, RankUnits
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError, check_float, check_int

__all__ = ["Bounds", "Solution", "apportion", "solve", "step_seconds"]


@dataclass(frozen=True)
class Solution:
    """Samples of each rank, in rank order, and the step they are predicted to take."""

    local_batches: tuple[int, ...]
    step_seconds: float


def step_seconds(
    models: Sequence[RankModel],
    batches: Sequence[int],
    overlapped_seconds: float,
    final_seconds: float,
) -> float:
    """Return T of the module's formula, in seconds, for the local ``batches`` (samples).

    overlapped_seconds: T_o; final_seconds: T_u. Raises ConfigurationError if the lengths differ,
    there is no rank or a time is negative.
    """
    _check(models, len(batches), overlapped_seconds, final_seconds)
    lines = RankLines(models, overlapped_seconds)
    return float(lines.seconds(np.asarray(batches, dtype=np.float64)).max()) + final_seconds


def solve(
    models: Sequence[RankModel],
    global_batch_size: int,
    *,
    bounds: Bounds,
    granule: int = 1,
    overlapped_seconds: float = 0.0,
    final_seconds: float = 0.0,
) -> Solution:
    """Return a split with the smallest T of all splits of ``global_batch_size`` samples.

    Feasible splits: with g = granule and rest = global_batch_size mod g, every rank takes a
    multiple of g between lower rounded up and upper rounded down to multiples of g; if rest > 0,
    exactly one rank takes ``rest`` samples on top of its multiple, still within its upper bound.
    The optimum is over the multiples and the choice of that rank together.

    f_i(b) = max(done_i(b), ready_i(b) + T_o) never falls, so the units a rank finishes by tau,
    n_i(tau), is closed form and the sum over ranks is monotone in tau: the answer is the smallest
    tau, among the values the f_i reach, at which the n_i reach the global batch. Ranks that
    cannot finish their lower bound by tau take it all the same, so the others stay balanced. Units
    too many belong to ranks that all finish at exactly tau (a flat line jumps): those share
    evenly, first ranks first. About 25 passes over n-vectors; 64 at worst.

    overlapped_seconds: T_o; final_seconds: T_u. Raises InfeasibleBatchError with the numbers when
    no split is feasible, ConfigurationError for malformed arguments.
    """
    _check(models, bounds.ranks, overlapped_seconds, final_seconds)
    granule = check_int("granule", granule, minimum=1)
    total = check_int("global_batch_size", global_batch_size, minimum=1)
    check_total("global_batch_size", total, bounds.lower, bounds.upper)
    lines = RankLines(models, overlapped_seconds)
    upper = np.asarray(bounds.upper, dtype=np.int64)
    low = -(-np.asarray(bounds.lower, dtype=np.int64) // granule)
    plain = RankUnits(lines, granule, np.zeros_like(low), low, upper // granule)
    units, rest = divmod(total, granule)
    carry = RankUnits(lines, granule, np.full_like(low, rest), low, (upper - rest) // granule)
    _check_granules(total, granule, plain, carry, bounds)
    if rest:
        plain = _with_carrier(plain, carry, units)
    best = _split(plain, units)
    seconds = float(plain.seconds(best).max()) + final_seconds
    return Solution(tuple(plain.samples(best).tolist()), seconds)


def _split(problem: RankUnits, total: int) -> Ints:
    """Units of each rank, summing to ``total``, with the smallest maximum of seconds()."""
    if int(problem.low.sum()) == total:
        return problem.low
    tau = _smallest(
        [problem], lambda counts: int(np.maximum(counts[0], problem.low).sum()) >= total
    )
    most = problem.taken(tau)
    least = problem.taken(float(np.nextafter(tau, -np.inf)))
    missing = total - int(least.sum())
    if missing < 0:  # only where rounding blurs neighbouring floats
        least, missing = problem.low, total - int(problem.low.sum())
    jumps = np.flatnonzero(most > least)
    if int((most - least).max(initial=0)) <= 1:
        least[jumps[:missing]] += 1
        return least
    floor, ceiling = least[jumps].tolist(), most[jumps].tolist()
    least[jumps] = apportion(missing + sum(floor), [1] * len(jumps), floor, ceiling)
    return least


def _with_carrier(plain: RankUnits, carry: RankUnits, total: int) -> RankUnits:
    """Return the problem in which the best rank has taken the rest as its offset."""

    def lost(counts: Sequence[Ints]) -> tuple[Ints, int]:
        """Units each rank gives up when it carries the rest, and how many may be given up."""
        taken, carrying = np.maximum(counts[0], plain.low), counts[1]
        loss = np.where(carrying >= carry.low, taken - carrying, np.iinfo(np.int64).max)
        return loss, int(taken.sum()) - total

    def feasible(counts: Sequence[Ints]) -> bool:
        loss, spare = lost(counts)
        return int(loss.min()) <= spare

    tau = _smallest([plain, carry], feasible)
    rank = int(lost([plain.finished(tau), carry.finished(tau)])[0].argmin())
    offset, high = plain.offset.copy(), plain.high.copy()
    offset[rank], high[rank] = carry.offset[rank], carry.high[rank]
    return RankUnits(plain.lines, plain.granule, offset, plain.low, high)


def _smallest(problems: Sequence[RankUnits], feasible: Callable[[Sequence[Ints]], bool]) -> float:
    """Return the smallest value reached by any seconds() at which ``feasible`` holds.

    ``feasible`` judges the units finished by then of each problem, is monotone, and holds at the
    largest value. Bisection over the reals until few reachable values are left, then over those;
    down to neighbouring floats where a flat line reaches one value with very many units.
    """
    below = [p.low - 1 for p in problems]
    above = [np.maximum(p.high, p.low - 1) for p in problems]
    high = max(
        float(p.seconds(units)[units >= p.low].max(initial=0.0))
        for p, units in zip(problems, above, strict=True)
    )
    low = -1.0 - high
    few = 64 + len(problems[0].low) // 4
    while sum(int((a - b).sum()) for a, b in zip(above, below, strict=True)) > few:
        middle = low + (high - low) / 2
        if not low < middle < high:
            return high
        counts = [p.finished(middle) for p in problems]
        if feasible(counts):
            high, above = middle, counts
        else:
            low, below = middle, counts
    values = np.unique(
        np.concatenate([p.reached(b, a) for p, b, a in zip(problems, below, above, strict=True)])
    )
    first, last = 0, len(values) - 1
    while first < last:
        index = (first + last) // 2
        if feasible([p.finished(float(values[index])) for p in problems]):
            last = index
        else:
            first = index + 1
    return float(values[first])


def _check(
    models: Sequence[RankModel], ranks: int, overlapped_seconds: float, final_seconds: float
) -> None:
    if not models or len(models) != ranks:
        raise ConfigurationError(
            f"{len(models)} rank models for {ranks} ranks: give one for each rank"
        )
    check_float("overlapped_seconds", overlapped_seconds, minimum=0.0)
    check_float("final_seconds", final_seconds, minimum=0.0)


def _check_granules(
    total: int, granule: int, plain: RankUnits, carry: RankUnits, bounds: Bounds
) -> None:
    units, rest = divmod(total, granule)
    least, most = int(plain.low.sum()), int(plain.high.sum())
    fits = bool((plain.low <= plain.high).all()) and least <= units <= most
    if fits and rest:
        able = carry.high >= carry.low
        room = most - (plain.high - carry.high)[able]  # units left when that rank carries
        fits = bool((room >= units).any())
    if not fits:
        raise InfeasibleBatchError(
            f"global_batch_size={total}, granule={granule}: {units} granules and {rest} samples do "
            f"not fit {bounds.ranks} ranks that take {least} to {most} whole granules within "
            f"their bounds (minimum {min(bounds.lower)}..{max(bounds.lower)}, maximum "
            f"{min(bounds.upper)}..{max(bounds.upper)} samples); change the bounds to multiples "
            "of the granule, or the global batch size"
        )
