"""Watching for training that runs away: how high the compression factor (CF) may be."""

from __future__ import annotations

import math
from dataclasses import replace

from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.planning.policy_state import Observation, PolicyState
from hvd_hetero.planning.step_time import Option
from hvd_hetero.planning.worth import gain_and_rho

RUNAWAY = 10.0  # of ||g||^2 over its smoothed value
DRAIN_WINDOWS, QUIET_WINDOWS = 4, 20
_ENERGY_SHARE = 0.5  # of the newest window in the smoothed value


def watch(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    """Return the state with smoothed energy and cap, and why the CF is to be lowered, if it is.

    Nothing is said where no lower factor exists, and for DRAIN_WINDOWS after the cap was changed:
    a residual takes time to drain. After QUIET_WINDOWS the cap is lifted by one rung.
    """
    alarm, curves, cf = "", seen.curves, seen.option.cf
    if curves is not None and curves.raw_energy > 0.0 and curves.is_finite():
        now, base = curves.raw_energy, state.raw_energy
        if base is not None and now >= RUNAWAY * base:
            alarm = f"the gradient's norm ran from {math.sqrt(base):.3g} to {math.sqrt(now):.3g}"
        elif cf is not None and curves.residual_ratio > spec.max_rho:
            alarm = f"rho {curves.residual_ratio:.3g} exceeds max_rho {spec.max_rho:g}"
        smoothed = now if base is None else base + _ENERGY_SHARE * (now - base)
        state = replace(state, raw_energy=smoothed)
    since, cap = state.cap_windows + 1, state.cap
    if since >= QUIET_WINDOWS and not alarm and cap < len(spec.ladder()) - 1:
        since, cap = 0, cap + 1
    lowest = cf is None or cf == spec.min_cf
    state = replace(state, cap=cap, cap_windows=since)
    return state, "" if lowest or since <= DRAIN_WINDOWS else alarm


def highest_rung(spec: Adaptive, state: PolicyState, seen: Observation, strategy: str) -> int:
    """Return the highest rung within the cap and ``max_rho``; the lowest is always allowed."""
    best = 0
    for rung, cf in enumerate(spec.ladder()[: state.cap + 1]):
        worth = gain_and_rho(state, Option(cf, strategy))
        if worth is None or worth[1] <= spec.max_rho:
            best = rung
    return best
