"""The planner: windows of timings in, the next plan out; a pure function over a frozen state.

Window 0 runs the even split, window 1 a split in proportion to speed, from then on OptPerf with
the learnt models (Cannikin; Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.balance.optperf import Bounds, Solution, solve, step_seconds
from hvd_hetero.balance.perf_model import RankModelFit
from hvd_hetero.balance.timing import WindowTiming, exchange_times
from hvd_hetero.errors import (
    ConfigurationError,
    InfeasibleBatchError,
    RankMismatchError,
    check_float,
    check_int,
)
from hvd_hetero.planning.plan import Plan

GAIN_DEVIATIONS = 4.0  # a gain must also be this many standard errors of the slowest rank
EXCHANGE_SMOOTHING = 0.5  # share of the newest window in T_o and T_u


@dataclass(frozen=True)
class PlannerConfig:
    """What a plan must obey.

    global_batch_size: samples of a step over all ranks. bounds: of each rank's local batch.
    granule: local batches are multiples of it (but for one rank, see ``optperf.solve``).
    min_gain: least predicted relative gain of step time that justifies a change, in [0, 1).
    fixed_local_batches: when given, the only plan there will be.

    Raises ConfigurationError, or InfeasibleBatchError with the numbers when no plan can obey.
    """

    global_batch_size: int
    bounds: Bounds
    granule: int = 1
    min_gain: float = 0.05
    fixed_local_batches: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_int("global_batch_size", self.global_batch_size, minimum=1)
        check_int("granule", self.granule, minimum=1)
        if check_float("min_gain", self.min_gain, minimum=0.0) >= 1.0:
            raise ConfigurationError(f"min_gain={self.min_gain!r}: a relative gain is below 1")
        if self.fixed_local_batches is None:
            _even(self)
            return
        fixed = tuple(
            check_int(f"fixed_local_batches[{rank}]", batch, minimum=1)
            for rank, batch in enumerate(self.fixed_local_batches)
        )
        object.__setattr__(self, "fixed_local_batches", fixed)
        if len(fixed) != self.bounds.ranks:
            raise ConfigurationError(
                f"fixed_local_batches={fixed}: {len(fixed)} numbers for {self.bounds.ranks} ranks"
            )
        for rank, batch in enumerate(fixed):
            low, high = self.bounds.lower[rank], self.bounds.upper[rank]
            if not low <= batch <= high:
                raise InfeasibleBatchError(
                    f"fixed_local_batches[{rank}]={batch}: outside the bounds {low}..{high}; "
                    "change the number or the bounds"
                )
        if sum(fixed) != self.global_batch_size:
            raise InfeasibleBatchError(
                f"fixed_local_batches={fixed}: they sum to {sum(fixed)}, but "
                f"global_batch_size={self.global_batch_size}; make the two equal"
            )


@dataclass(frozen=True)
class PlannerState:
    """All the planner remembers.

    plan: the plan in force. windows: windows seen. fits: one per rank (empty: nothing seen).
    reason: of the last decision, also when nothing changed. windows_since_change: windows seen
    since the plan was made. exchange_seconds: smoothed (T_o, T_u), None before the first window.
    """

    plan: Plan
    windows: int = 0
    fits: tuple[RankModelFit, ...] = ()
    reason: str = ""
    windows_since_change: int = 0
    exchange_seconds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.fits:
            object.__setattr__(self, "fits", (RankModelFit(),) * self.plan.ranks)
        if not self.reason:
            object.__setattr__(self, "reason", self.plan.reason)
        if len(self.fits) != self.plan.ranks:
            raise ConfigurationError(f"{len(self.fits)} fits for {self.plan.ranks} ranks")

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "plan": self.plan.to_dict(),
            "windows": self.windows,
            "fits": [fit.to_dict() for fit in self.fits],
            "reason": self.reason,
            "windows_since_change": self.windows_since_change,
            "exchange_seconds": self.exchange_seconds and list(self.exchange_seconds),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlannerState:
        """Build a state from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            times = data["exchange_seconds"]
            return cls(
                plan=Plan.from_dict(data["plan"]),
                windows=int(data["windows"]),
                fits=tuple(RankModelFit.from_dict(fit) for fit in data["fits"]),
                reason=str(data["reason"]),
                windows_since_change=int(data["windows_since_change"]),
                exchange_seconds=None if times is None else (float(times[0]), float(times[1])),
            )
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"planner state={str(data)[:200]}: not a saved one ({error!r}); pass the dict "
                "PlannerState.to_dict() gave"
            ) from error


def first_plan(config: PlannerConfig, ranks: int) -> Plan:
    """Return version 0: the fixed split, or the most even one within the bounds.

    Raises ConfigurationError when ``ranks`` differs from the bounds.
    """
    if check_int("ranks", ranks, minimum=1) != config.bounds.ranks:
        raise ConfigurationError(f"ranks={ranks}: the bounds are for {config.bounds.ranks} ranks")
    if config.fixed_local_batches is not None:
        return Plan(0, config.fixed_local_batches, "fixed by fixed_local_batches")
    return Plan(0, _even(config), "even split: no rank has been timed yet")


def advance(
    config: PlannerConfig,
    state: PlannerState,
    windows: Sequence[WindowTiming],
    last_bucket_share: float,
) -> PlannerState:
    """Return the state after one window; its plan is a new one only when a change pays.

    1. The timings enter every rank's fit, and T_o, T_u.
    2. A plan that breaks the (new) bounds or global batch size is replaced at once.
    3. A plan some rank has not been timed with yet is given one more window.
    4. A better split replaces the plan if its predicted relative gain of step time is at least
       min_gain and GAIN_DEVIATIONS standard errors of the slowest rank's seconds.

    windows: one per rank, in rank order. last_bucket_share: see ``timing.exchange_times``.
    Raises RankMismatchError when the number of windows is not the number of ranks.
    """
    if not len(windows) == state.plan.ranks == config.bounds.ranks:
        raise RankMismatchError(
            f"{len(windows)} windows and bounds for {config.bounds.ranks} ranks, but the plan has "
            f"{state.plan.ranks}: pass one window of every rank, in rank order"
        )
    measured = exchange_times(windows, last_bucket_share)
    past = state.exchange_seconds or measured
    overlapped, final = (
        old + EXCHANGE_SMOOTHING * (new - old) for old, new in zip(past, measured, strict=True)
    )
    state = replace(
        state,
        windows=state.windows + 1,
        windows_since_change=state.windows_since_change + 1,
        fits=tuple(
            fit.observe(window.points) for fit, window in zip(state.fits, windows, strict=True)
        ),
        exchange_seconds=(overlapped, final),
    )
    if config.fixed_local_batches is not None:
        return _keep(state, "fixed_local_batches")
    must = _broken(config, state.plan)
    if not must and state.plan.ranks == 1:
        return _keep(state, "one rank takes the whole batch")
    if not must and state.windows_since_change == 1 and not _measured(state.plan, windows):
        return _keep(state, f"plan {state.plan.version} has not been timed on every rank yet")
    models, basis = models_of(state)
    if models is None:
        if not must:
            return _keep(state, "a rank has no usable timing yet")
        return _change(state, Solution(_even(config), 0.0), f"even split: {must}", None)
    best = best_split(config, models, (overlapped, final))
    return _decide(config, state, models, basis, best, must)


def _decide(
    config: PlannerConfig,
    state: PlannerState,
    models: Sequence[RankModel],
    basis: str,
    best: Solution,
    must: str,
) -> PlannerState:
    """Weigh the best split against the plan in force."""
    overlapped, final = state.exchange_seconds or (0.0, 0.0)
    if must:
        return _change(state, best, f"{basis}: {must}", best.step_seconds)
    now = step_seconds(models, state.plan.local_batches, overlapped, final)
    gain = 1.0 - best.step_seconds / now if now > 0.0 else 0.0
    slowest = max(
        range(len(models)),
        key=lambda rank: max(
            models[rank].done(state.plan.local_batches[rank]),
            models[rank].ready(state.plan.local_batches[rank]) + overlapped,
        ),
    )
    noise = GAIN_DEVIATIONS * state.fits[slowest].relative_error()
    if best.local_batches == state.plan.local_batches or gain <= 0.0:
        return _keep(state, f"already the best split by {basis}, {now * 1e3:.4g} ms a step")
    if gain < config.min_gain:
        return _keep(
            state, f"predicted gain {gain:.1%} below min_gain {config.min_gain:.1%} ({basis})"
        )
    if gain < noise:
        return _keep(state, f"predicted gain {gain:.1%} below the noise {noise:.1%} ({basis})")
    changed = [rank for rank, fit in enumerate(state.fits) if fit.changed]
    cause = f"; speed changed on rank {', '.join(map(str, changed[:8]))}" if changed else ""
    return _change(
        state,
        best,
        f"{basis}: predicted {now * 1e3:.4g} -> {best.step_seconds * 1e3:.4g} ms a step "
        f"(gain {gain:.1%}), limited by rank {slowest}{cause}",
        best.step_seconds,
    )


def best_split(
    config: PlannerConfig,
    models: Sequence[RankModel],
    exchange_seconds: tuple[float, float] | None,
) -> Solution:
    """Return the split that OptPerf finds for ``models`` and (T_o, T_u), None: no exchange."""
    overlapped, final = exchange_seconds or (0.0, 0.0)
    return solve(
        models,
        config.global_batch_size,
        bounds=config.bounds,
        granule=config.granule,
        overlapped_seconds=overlapped,
        final_seconds=final,
    )


def models_of(state: PlannerState) -> tuple[list[RankModel] | None, str]:
    """Models of all ranks and what they rest on; None when a rank has no timing at all."""
    estimates = [fit.estimate() for fit in state.fits]
    known = [estimate for estimate in estimates if estimate is not None]
    if len(known) < len(estimates):
        return None, ""
    if any(fit.model() is not None for fit in state.fits):
        return known, "OptPerf"
    # One size each says nothing of fixed costs: straight through the origin.
    through = []
    for fit in state.fits:
        point = fit.points[0]
        ready, done = point.ready_seconds / point.batch, point.done_seconds / point.batch
        through.append(RankModel(Line(ready, 0.0), Line(done, 0.0)))
    return through, "in proportion to speed"


def _even(config: PlannerConfig) -> tuple[int, ...]:
    same = RankModel(Line(1.0, 0.0), Line(1.0, 0.0))
    return solve(
        [same] * config.bounds.ranks,
        config.global_batch_size,
        bounds=config.bounds,
        granule=config.granule,
    ).local_batches


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


def _keep(state: PlannerState, why: str) -> PlannerState:
    return replace(state, reason=f"kept: {why}")


def _change(
    state: PlannerState, best: Solution, why: str, predicted_seconds: float | None
) -> PlannerState:
    plan = Plan(state.plan.version + 1, best.local_batches, why, predicted_seconds)
    return replace(state, plan=plan, reason=why, windows_since_change=0)
