"""OptPerf: the split of a global batch whose step is shortest, exactly and in whole samples.

Cannikin (Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302), section 4.3. A step takes

    T(b_1..b_n) = max( max_i done_i(b_i),  max_i ready_i(b_i) + T_o ) + T_u

with T_o the exchange of all gradient buckets but the last, T_u that of the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_hetero.balance.bounds import Bounds, apportion, check_total
from hvd_hetero.balance.lines import RankModel
from hvd_hetero.balance.real_optimum import level
from hvd_hetero.balance.units import Floats, Ints, RankLines, RankUnits, check_models
from hvd_hetero.errors import InfeasibleBatchError, check_int

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
    check_models(models, len(batches), overlapped_seconds, final_seconds)
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
    evenly, first ranks first. About 10 passes over n-vectors; some 100 at worst.

    overlapped_seconds: T_o; final_seconds: T_u. Raises InfeasibleBatchError with the numbers when
    no split is feasible, ConfigurationError for malformed arguments.
    """
    check_models(models, bounds.ranks, overlapped_seconds, final_seconds)
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
    tau = _smallest([problem], lambda counts: int(np.maximum(counts[0], problem.low).sum()) - total)
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

    def surplus(counts: Sequence[Ints]) -> int:
        loss, spare = lost(counts)
        return spare - int(loss.min())

    tau = _smallest([plain, carry], surplus)
    rank = int(lost([plain.finished(tau), carry.finished(tau)])[0].argmin())
    offset, high = plain.offset.copy(), plain.high.copy()
    offset[rank], high[rank] = carry.offset[rank], carry.high[rank]
    return RankUnits(plain.lines, plain.granule, offset, plain.low, high)


def _smallest(problems: Sequence[RankUnits], surplus: Callable[[Sequence[Ints]], int]) -> float:
    """Return the smallest value reached by any seconds() at which ``surplus`` is not negative.

    ``surplus`` judges the units finished by then of each problem, as units more than needed. Its
    sign is monotone: negative at first, not negative at the largest value. The search is over the
    reals until few reachable values are left, then over those. Guesses from the real optimum come
    first and most often do, then bisection, down to neighbouring floats where it must.
    """
    below = [p.low - 1 for p in problems]
    above = [np.maximum(p.high, p.low - 1) for p in problems]
    high = max(
        float(p.seconds(units)[units >= p.low].max(initial=0.0))
        for p, units in zip(problems, above, strict=True)
    )
    low = -1.0 - high
    few = 64 + sum(len(p.low) for p in problems)
    guess, units_per_second = _real_guess(problems[0], -surplus([problems[0].low] * len(problems)))
    turn = 0
    while sum(int((a - b).sum()) for a, b in zip(above, below, strict=True)) > few:
        middle = guess if turn < 6 and low < guess < high else low + (high - low) / 2
        if not low < middle < high:
            return high
        counts = [p.finished(middle) for p in problems]
        found = surplus(counts)
        if found >= 0:
            high, above = middle, counts
        else:
            low, below = middle, counts
        if turn == 0 and found >= 0:  # whole units lag behind: this is where a flat line jumps
            guess = float(np.nextafter(middle, -np.inf))
        else:  # to the other side of the answer, but near
            aim = -(few // 8) if found >= 0 else few // 8
            guess = middle + (aim - found) / units_per_second
        turn += 1
    values = np.sort(
        np.concatenate([p.reached(b, a) for p, b, a in zip(problems, below, above, strict=True)])
    )
    return _smallest_of(values, problems, surplus, -surplus(below))


def _smallest_of(
    values: Floats,
    problems: Sequence[RankUnits],
    surplus: Callable[[Sequence[Ints]], int],
    lacking: int,
) -> float:
    """As ``_smallest``, of sorted ``values``; before the first ``lacking`` units are lacking."""
    first, last = 0, len(values) - 1
    found, turn = -lacking, 0
    while first < last:
        # Each value is one unit, but for low bounds: two guesses most often enclose the answer.
        # Of several problems a unit is about one value each; a bit more reaches the other side.
        steps = len(problems) * abs(found)
        steps += math.isqrt(steps) if len(problems) > 1 else 0
        index = first - 1 + steps if found < 0 else last - 1 - steps
        index = min(max(index, first), last - 1) if turn < 5 else (first + last) // 2
        found = surplus([p.finished(float(values[index])) for p in problems])
        if found >= 0:
            last = int(values.searchsorted(values[index]))
        else:
            # The last is known to do, even where rounding of a nearly flat line hides it.
            first = min(int(values.searchsorted(values[index], side="right")), last)
        turn += 1
    return float(values[first])


def _real_guess(problem: RankUnits, units: int) -> tuple[float, float]:
    """Return about when the ranks finish ``units`` above their low, and units a second there."""
    lines = problem.lines
    lower, upper = (problem.samples(x).astype(np.float64) for x in (problem.low, problem.high))
    seconds = level(lines, lower, upper, float(lower.sum()) + units * problem.granule)
    shift = 1e-3 * seconds
    ends = [np.clip(lines.samples(t), lower, upper).sum() for t in (seconds, seconds + shift)]
    rate = float(ends[1] - ends[0]) / problem.granule / shift if shift > 0.0 else 0.0
    return seconds, rate if 0.0 < rate < np.inf else 1.0


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
