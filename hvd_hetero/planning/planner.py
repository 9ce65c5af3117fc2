"""The planner: windows of timings in, the next plan out; a pure function over a frozen state.

Window 0 runs the even split, window 1 a split in proportion to speed, from then on OptPerf with
the learnt models (Cannikin; Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hvd_hetero.balance.lines import RankModel, TimingPoint
from hvd_hetero.balance.memory import MemoryUse, within_memory
from hvd_hetero.balance.optperf import Bounds, Solution, solve
from hvd_hetero.balance.perf_model import FORGETTING, RankModelFit
from hvd_hetero.balance.timing import WindowTiming, critical_bucket
from hvd_hetero.errors import (
    InfeasibleBatchError,
    RankMismatchError,
)
from hvd_hetero.planning.exchange_view import ExchangeView, smoothing
from hvd_hetero.planning.plan import Plan
from hvd_hetero.planning.planner_state import (
    LEARNING_WINDOWS,
    PlanEffect,
    PlannerConfig,
    PlannerState,
    even_split,
    first_plan,
)
from hvd_hetero.planning.prediction import expected_seconds, models_of, step_of
from hvd_hetero.planning.setback import REJECTED_WINDOWS, is_rejected, proved_slower

__all__ = [
    "PlanEffect",
    "PlannerConfig",
    "PlannerState",
    "advance",
    "best_split",
    "first_plan",
]

GAIN_DEVIATIONS = 4.0  # a gain must also be this many standard errors of the slowest rank
BIAS_SMOOTHING = 0.5  # share of the newest window in the bias of predictions, ...
BIAS_RANGE = (0.8, 1.25)  # ... which stays within these
LEARNING_GAIN = 0.5  # of min_gain that is enough in the first windows, and after real changes


def advance(
    config: PlannerConfig,
    state: PlannerState,
    windows: Sequence[WindowTiming],
    bucket_shares: Sequence[float],
    *,
    exchange: ExchangeView | None = None,
    memory: Sequence[MemoryUse | None] = (),
) -> PlannerState:
    """Return the state after one window; its plan is a new one only when a change pays.

    1. The timings enter every rank's fit, and T_o, T_u; peaks of memory enter the bounds.
    2. A plan that breaks the (new) bounds or global batch size is replaced at once.
    3. A plan some rank has not been timed with yet is given one more window.
    4. A better split replaces the plan if its predicted relative gain of step time is at least
       min_gain and GAIN_DEVIATIONS standard errors of the slowest rank's seconds (fewer the
       longer it has been predicted), and the plan is min_interval_windows old; right after the
       start or a real change plans may follow each other.

    windows: one per rank, in rank order. bucket_shares: see ``timing.exchange_times``.
    exchange: how gradients travel; None: always alike. memory: of each rank, empty for no limits.
    Raises RankMismatchError when the number of windows is not the number of ranks.
    """
    if not len(windows) == state.plan.ranks == config.bounds.ranks:
        raise RankMismatchError(
            f"{len(windows)} windows and bounds for {config.bounds.ranks} ranks, but the plan has "
            f"{state.plan.ranks}: pass one window of every rank, in rank order"
        )
    exchange = exchange or ExchangeView()
    judged = state.effect
    state = _observe(state, windows, bucket_shares, exchange, memory)
    models, basis = models_of(state)
    times = exchange.expected(state.exchange_seconds or (0.0, 0.0), state.bucket)
    if models is not None:
        state = _corrected(state, windows, models)
    newly_measured = state.effect != judged
    state = _next(config, state, windows, models, basis, times, newly_measured)
    if models is None:
        return replace(state, expected_seconds=None)
    expected = expected_seconds(state, models, state.plan.local_batches, times)
    return replace(state, expected_seconds=expected)


def _next(
    config: PlannerConfig,
    state: PlannerState,
    windows: Sequence[WindowTiming],
    models: Sequence[RankModel] | None,
    basis: str,
    times: tuple[float, float],
    newly_measured: bool,
) -> PlannerState:
    """Return the state with the plan for the next window."""
    if config.fixed_local_batches is not None:
        return _keep(state, "fixed_local_batches")
    must = _broken(config, state.plan)
    if not must and state.plan.ranks == 1:
        return _keep(state, "one rank takes the whole batch")
    if not must and state.windows_since_change == 1 and not _measured(state.plan, windows):
        return _keep(state, f"plan {state.plan.version} has not been timed on every rank yet")
    if models is None:
        if not must:
            return _keep(state, "a rank has no usable timing yet")
        return _change(state, Solution(even_split(config), 0.0), f"even split: {must}", None)
    if newly_measured and not must:
        _, slowest = step_of(models, state.plan.local_batches, state.exchange_seconds or (0.0, 0.0))
        noise = GAIN_DEVIATIONS * state.fits[slowest].relative_error()
        if proved_slower(config, state, noise):
            return _take_back(state)
    bounds = within_memory(config.bounds, state.memory)
    try:
        best = best_split(config, models, times, bounds)
    except InfeasibleBatchError:
        if not must:
            return _keep(state, "no other split fits the memory of all ranks")
        bounds = config.bounds
        best = best_split(config, models, times)
    full = [
        rank
        for rank, batch in enumerate(best.local_batches)
        if batch == bounds.upper[rank] < config.bounds.upper[rank]
    ]
    if full:
        basis += f", memory limits rank {', '.join(map(str, full[:8]))}"
    old = state.plan
    state = _decide(config, state, models, basis, best, times, must)
    if state.windows_since_change == 0:  # a new plan
        before = max(window.step_seconds for window in windows)
        plan = state.plan
        effect = PlanEffect(
            plan.version,
            before,
            plan.predicted_step_seconds,
            before_local_batches=old.local_batches,
        )
        state = replace(state, effect=effect)
    return state


def _observe(
    state: PlannerState,
    windows: Sequence[WindowTiming],
    bucket_shares: Sequence[float],
    exchange: ExchangeView,
    memory: Sequence[MemoryUse | None],
) -> PlannerState:
    """Take a window into what is known."""
    bucket = critical_bucket(windows, exchange.shares(bucket_shares))
    measured = exchange.measured(windows, bucket_shares, bucket)
    known = state.exchange_seconds
    other = known is not None and state.exchange != exchange.now
    past = measured if known is None or other or bucket != state.bucket else known
    share = smoothing(sum(measured), sum(past))
    overlapped, final = (old + share * (new - old) for old, new in zip(past, measured, strict=True))
    fits = tuple(
        _seen_until(bucket, fit, window.typical, state.bucket).observe(
            [point.until(bucket) for point in window.points]
        )
        for fit, window in zip(state.fits, windows, strict=True)
    )
    upset = other or any(fit.changed for fit in fits)
    effect = state.effect
    if effect is not None and effect.measured_seconds is None and _measured(state.plan, windows):
        seconds = max(window.step_seconds for window in windows)
        effect = replace(effect, measured_seconds=seconds)
    uses = tuple(memory) or (None,) * len(windows)
    return replace(
        state,
        windows=state.windows + 1,
        windows_since_change=state.windows_since_change + 1,
        fits=fits,
        exchange_seconds=(overlapped, final),
        exchange=exchange.now,
        bucket=bucket,
        memory=tuple(
            fit.observe(max(point.batch for point in window.points), use)
            for fit, window, use in zip(state.memory, windows, uses, strict=True)
        ),
        learning=LEARNING_WINDOWS if upset else max(state.learning - 1, 0),
        rejected_windows=0 if upset else max(state.rejected_windows - 1, 0),
        effect=effect,
    )


def _corrected(
    state: PlannerState, windows: Sequence[WindowTiming], models: Sequence[RankModel]
) -> PlannerState:
    """Return the state with the bias of what was expected of this window."""
    if not _measured(state.plan, windows):
        return state
    times = state.exchange_seconds or (0.0, 0.0)
    expected = expected_seconds(state, models, state.plan.local_batches, times)
    found = state.bias * max(window.step_seconds for window in windows) / expected
    bias = state.bias + BIAS_SMOOTHING * (found - state.bias)
    return replace(state, bias=min(max(bias, BIAS_RANGE[0]), BIAS_RANGE[1]))


def _seen_until(bucket: int, fit: RankModelFit, point: TimingPoint, before: int) -> RankModelFit:
    """Return what was learnt of another bucket's being ready, as of this one."""
    old, new = point.until(before).ready_seconds, point.until(bucket).ready_seconds
    return fit.with_ready_scaled(new / old) if bucket != before and old > 0.0 else fit


def _decide(
    config: PlannerConfig,
    state: PlannerState,
    models: Sequence[RankModel],
    basis: str,
    best: Solution,
    times: tuple[float, float],
    must: str,
) -> PlannerState:
    """Weigh the best split against the plan in force."""
    if must:
        predicted = expected_seconds(state, models, best.local_batches, times)
        return _change(state, best, f"{basis}: {must}", predicted)
    now, slowest = step_of(models, state.plan.local_batches, times)
    gain = 1.0 - best.step_seconds / now if now > 0.0 else 0.0
    # Windows that all say the same say more than the newest, of which the fit keeps a few.
    evidence = math.sqrt(1.0 + (1.0 - FORGETTING) * state.asking)
    noise = GAIN_DEVIATIONS * state.fits[slowest].relative_error() / evidence
    if best.local_batches == state.plan.local_batches or gain <= 0.0:
        return _keep(state, f"already the best split by {basis}, {now * 1e3:.4g} ms a step")
    least = config.min_gain * (LEARNING_GAIN if state.learning else 1.0)
    if gain < least:
        return _keep(state, f"predicted gain {gain:.1%} below min_gain {least:.1%} ({basis})")
    if gain < noise:
        return _keep(
            state,
            f"predicted gain {gain:.1%} below the noise {noise:.1%} ({basis})",
            asking=state.asking + 1,
        )
    if not state.learning and state.windows_since_change < config.min_interval_windows:
        return _keep(
            state,
            f"predicted gain {gain:.1%} ({basis}), but the plan is only "
            f"{state.windows_since_change} windows old (min_interval_windows "
            f"{config.min_interval_windows})",
            asking=state.asking + 1,
        )
    if is_rejected(state, best.local_batches):
        return _keep(state, f"predicted gain {gain:.1%} ({basis}), but it proved slower before")
    changed = [rank for rank, fit in enumerate(state.fits) if fit.changed]
    cause = f"; speed changed on rank {', '.join(map(str, changed[:8]))}" if changed else ""
    predicted = expected_seconds(state, models, best.local_batches, times)
    return _change(
        state,
        best,
        f"{basis}: predicted {now * 1e3:.4g} -> {best.step_seconds * 1e3:.4g} ms a step "
        f"(gain {gain:.1%}), limited by rank {slowest}{cause}",
        predicted,
    )


def best_split(
    config: PlannerConfig,
    models: Sequence[RankModel],
    exchange_seconds: tuple[float, float] | None,
    bounds: Bounds | None = None,
) -> Solution:
    """Return the split that OptPerf finds for ``models`` and (T_o, T_u), None: no exchange.

    bounds: instead of the configuration's.
    """
    overlapped, final = exchange_seconds or (0.0, 0.0)
    return solve(
        models,
        config.global_batch_size,
        bounds=config.bounds if bounds is None else bounds,
        granule=config.granule,
        overlapped_seconds=overlapped,
        final_seconds=final,
    )


def _broken(config: PlannerConfig, plan: Plan) -> str:
    """Say which of the configuration's limits ``plan`` breaks; empty if none."""
    if plan.global_batch_size != config.global_batch_size:
        return f"global batch {plan.global_batch_size} -> {config.global_batch_size}"
    limits = zip(plan.local_batches, config.bounds.lower, config.bounds.upper, strict=True)
    for rank, (batch, low, high) in enumerate(limits):
        if not low <= batch <= high:
            return f"local batch {batch} of rank {rank} is outside its bounds {low}..{high}"
    return ""


def _measured(plan: Plan, windows: Sequence[WindowTiming]) -> bool:
    return all(
        any(point.batch == batch for point in window.points)
        for batch, window in zip(plan.local_batches, windows, strict=True)
    )


def _take_back(state: PlannerState) -> PlannerState:
    """Return to the split before the plan in force."""
    effect, rejected = state.effect, state.plan.local_batches
    assert effect is not None
    best = Solution(effect.before_local_batches, effect.before_seconds)
    state = replace(state, effect=None, rejected=rejected, rejected_windows=REJECTED_WINDOWS)
    return _change(state, best, f"taken back: {effect}", effect.before_seconds)


def _keep(state: PlannerState, why: str, asking: int = 0) -> PlannerState:
    return replace(state, reason=f"kept: {why}", asking=asking)


def _change(
    state: PlannerState, best: Solution, why: str, predicted_seconds: float | None
) -> PlannerState:
    plan = Plan(state.plan.version + 1, best.local_batches, why, predicted_seconds)
    return replace(state, plan=plan, reason=why, windows_since_change=0, asking=0)
