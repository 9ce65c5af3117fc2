"""What every option is expected to cost per step's worth of progress, from all that was measured.

Predictions are corrected by measurement: an option that was in force has its own correction,
measured over predicted step seconds; another takes that of the nearest factor with the same
exchange, or the mean of all. So the model's order of options stands until it is seen to be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hvd_hetero.compression.gain import Worth
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.planning.objective import objective_seconds
from hvd_hetero.planning.policy_state import Observation, PolicyState
from hvd_hetero.planning.step_time import Option

CHANGED = 1.3  # a factor by which times differ when something has changed, not just noise
_NEW_SHARE = 0.5  # of the newest window in all that is remembered
_FADE = 0.02  # a window: one bad measurement must not bar an option for ever
# What one rank's indices for all cost against everybody's own, by L = log(1 / coherence): rho is
# exp(_RHO * L) times as large, the odds 1 / gain - 1 exp((_ODDS + _ODDS_GAIN * gain) * L) times.
# Least squares over simulated gradients, within a tenth on average (benchmarks/coherence.py).
_RHO = 0.38
_ODDS, _ODDS_GAIN = 0.46, 0.43


def learn(state: PolicyState, seen: Observation) -> PolicyState:
    """Return the state with what a window tells of step seconds, gain and rho."""
    known = dict(state.corrections)
    predicted = seen.predicted.get(seen.option, 0.0)
    if predicted > 0.0:
        now = math.log(seen.step_seconds / predicted)
        before = math.log(known[seen.option]) if seen.option in known else now
        if abs(now - before) > math.log(CHANGED):
            known, before = {}, now  # network or load changed: what was measured before is void
        middle = _mean(known)
        known = {
            option: math.exp((1 - _FADE) * math.log(value) + _FADE * middle)
            for option, value in known.items()
        }
        known[seen.option] = math.exp(before + _NEW_SHARE * (now - before))
    state = replace(state, corrections=known)
    curves = seen.curves
    if curves is None or not curves.is_finite() or curves.measurements == 0:
        return state
    worth: dict[float, Worth] = {}
    for cf in curves.cfs:
        new = curves.at(cf)
        old = state.worth.get(cf, new)
        worth[cf] = Worth(*(x + _NEW_SHARE * (y - x) for x, y in zip(old, new, strict=True)))
    return replace(state, worth=worth)


def gain_and_rho(state: PolicyState, option: Option) -> tuple[float, float] | None:
    """Return steady-state gain and rho of an option; None while they are not known."""
    if option.cf is None:
        return 1.0, 0.0
    if option.cf not in state.worth:
        return None
    known = state.worth[option.cf]
    return shared_worth(known) if option.strategy == "shared-index" else (known.gain, known.rho)


def shared_worth(own: Worth) -> tuple[float, float]:
    """Return gain and rho with one rank's indices for all, of what they are with everybody's own.

    What ranks hold back together, any of them finds; what each holds back by itself, only it does.
    """
    different = -math.log(own.coherence)
    rho = own.rho * math.exp(_RHO * different)
    if own.gain <= 0.0:
        return own.gain, rho
    odds = (1.0 / own.gain - 1.0) * math.exp((_ODDS + _ODDS_GAIN * own.gain) * different)
    return 1.0 / (1.0 + odds), rho


def seconds(state: PolicyState, seen: Observation, option: Option) -> float:
    """Return the corrected step seconds of an option; infinity if they were not predicted."""
    if option not in seen.predicted:
        return math.inf
    return seen.predicted[option] * _correction(state.corrections, option)


def cost(spec: Adaptive, state: PolicyState, seen: Observation, option: Option) -> float:
    """Return J of an option in seconds; infinity while it is not known."""
    worth = gain_and_rho(state, option)
    if worth is None:
        return math.inf
    return objective_seconds(seconds(state, seen, option), spec.objective, *worth, seen.penalty)


def least_loss(spec: Adaptive, state: PolicyState, seen: Observation) -> float:
    """Return the least factor by which compression is known to multiply steps; 1 if unknown."""
    losses = [
        objective_seconds(1.0, spec.objective, worth.gain, worth.rho, seen.penalty)
        for worth in state.worth.values()
    ]
    return min(losses, default=1.0)


def _correction(known: Mapping[Option, float], option: Option) -> float:
    if option in known:
        return known[option]
    if option.cf is not None:
        near = [
            (abs(math.log(one.cf / option.cf)), value)
            for one, value in known.items()
            if one.cf is not None and one.strategy == option.strategy
        ]
        if near:
            return min(near)[1]
    return math.exp(_mean(known))


def _mean(known: Mapping[Option, float]) -> float:
    """Mean logarithm of the corrections."""
    return sum(math.log(value) for value in known.values()) / len(known) if known else 0.0
