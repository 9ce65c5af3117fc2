"""What is known of the ranks, and what a step takes by it under any split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.balance.optperf import step_seconds
from hvd_hetero.planning.planner_state import PlannerState

_GRID = 129


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step under some plan, and their relative standard error."""

    seconds: float
    relative_error: float


def models_of(state: PlannerState) -> tuple[list[RankModel] | None, str]:
    """Models of all ranks and what they rest on; None when a rank has no timing at all.

    Done seconds are with the compression's own, as in the newest window.
    """
    estimates = [fit.estimate() for fit in state.fits]
    known = [estimate for estimate in estimates if estimate is not None]
    if len(known) < len(estimates):
        return None, ""
    extra = [0.0 if fit.latest is None else fit.latest.compress_seconds for fit in state.fits]
    if any(fit.model() is not None for fit in state.fits):
        return [
            RankModel(model.ready, Line(model.done.slope_seconds, model.done.intercept_seconds + c))
            for model, c in zip(known, extra, strict=True)
        ], "OptPerf"
    # One size each says nothing of fixed costs: straight through the origin.
    through = []
    for fit, compress in zip(state.fits, extra, strict=True):
        point = fit.points[0]
        ready, done = point.ready_seconds / point.batch, point.done_seconds / point.batch
        through.append(RankModel(Line(ready, 0.0), Line(done, compress)))
    return through, "in proportion to speed"


def step_of(
    models: Sequence[RankModel], batches: Sequence[int], times: tuple[float, float]
) -> tuple[float, int]:
    """Return the seconds of a step, and the rank that it waits for."""
    overlapped, final = times
    pairs = list(zip(models, batches, strict=True))
    slowest = max(
        range(len(pairs)),
        key=lambda rank: max(
            pairs[rank][0].done(pairs[rank][1]), pairs[rank][0].ready(pairs[rank][1]) + overlapped
        ),
    )
    return step_seconds(models, batches, overlapped, final), slowest


def expected_seconds(
    state: PlannerState,
    models: Sequence[RankModel],
    batches: Sequence[int],
    times: tuple[float, float],
) -> float:
    """Return the mean of a step: every step waits for the rank that is last in it.

    The mean of the largest of independent normal variables, with each rank's seconds as its mean
    and its noise as its deviation; more than the seconds of the slowest rank by far where many are
    alike. Then corrected by what steps took more or less than that.
    """
    overlapped, final = times
    means, deviations = [], []
    for model, fit, batch in zip(models, state.fits, batches, strict=True):
        done = model.done(batch)
        means.append(max(done, model.ready(batch) + overlapped))
        deviations.append(math.sqrt(fit.noise) * done)
    return (_mean_of_largest(means, deviations) + final) * state.bias


def _mean_of_largest(means: Sequence[float], deviations: Sequence[float]) -> float:
    center = np.asarray(means, dtype=np.float64)
    width = np.maximum(np.asarray(deviations, dtype=np.float64), 1e-9)
    low = float((center - 4.0 * width).max())  # below this it hardly ever is
    high = float((center + 5.0 * width).max())
    near = center + 5.0 * width > low
    grid = np.linspace(low, high, _GRID)
    x = (grid[:, None] - center[near]) / width[near]
    # The normal distribution function, to 3e-4 (as in the usual approximation of GELU).
    below = 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    above = 1.0 - below.prod(axis=1)
    return low + float(((above[1:] + above[:-1]) / 2.0 * np.diff(grid)).sum())


def predict(state: PlannerState, local_batches: Sequence[int]) -> Prediction | None:
    """Return what a step would take under any plan; None: not known yet.

    Known is a step once every rank has been timed, with its batch of today or any other.
    local_batches: samples of each rank, in rank order. The error is that of the rank waited for.
    """
    models, _ = models_of(state)
    if models is None or state.exchange_seconds is None:
        return None
    _, slowest = step_of(models, local_batches, state.exchange_seconds)
    seconds = expected_seconds(state, models, local_batches, state.exchange_seconds)
    error = state.fits[slowest].relative_error(local_batches[slowest])
    return Prediction(seconds, error)
