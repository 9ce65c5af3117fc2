"""The search for a compression factor (CF): GraVAC (arXiv 2305.12201) as a pure state machine.

Once per window of steps the caller hands in what was measured and gets the factor for the next
window, with the reason. The gains are those of the moment, all factors' of the same gradient plus
residual, so the entries of a factor are among those of every lower one (the paper's multi-level
compression). The rules, in the order in which they are tried:

1. A window without energy, or with numbers that are not finite, decides nothing; one without
   samples only shortens the wait of rule 3.
2. A critical period, seen as a jump of the norm of the raw gradient, lifts every ceiling and
   starts the search again at ``min_cf``. The gain cannot serve as the sign: it falls by itself
   after the factor was raised.
3. Without compression: wait ``dense_wait_windows``, then measure gain(``min_cf``) for one window
   and leave only if it reaches eps * (1 + dense_margin). A dense step empties the residual, which
   flatters the gain. The wait doubles with each failure, up to 16 times, and is reset once
   compression has lasted as long as the wait.
4. The current factor no longer reaches eps: it becomes a ceiling, and the next lower rung is used
   if that reaches eps, else ``min_cf`` if only that does, else no compression.
5. The current factor changed compression throughput T_c = samples per second * gain by less than
   omega over the rung below: stop here. A larger fall does not end the search: as published, only
   eps bounds the loss.
6. The candidate, one rung up, reaches eps: take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hvd_hetero.compression.controller_state import ControllerState, Decision, Observation
from hvd_hetero.compression.gain import Curves
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError

__all__ = ["ControllerState", "Decision", "Observation", "advance", "resume", "start"]

MAX_WAIT_FACTOR = 16
# Sums over ranks may be added in another order for kept than for total.
_GAIN_TOLERANCE = 1e-9  # relative


def start(spec: Adaptive) -> tuple[ControllerState, Decision]:
    """Return the first state and decision: search from ``min_cf``."""
    state = ControllerState(
        rung=0,
        ceiling=len(spec.ladder()) - 1,
        searching=True,
        throughput_below=None,
        raw_energy=None,
        dense_windows_left=0,
        dense_wait_windows=spec.dense_wait_windows,
        windows_compressed=0,
        windows=0,
    )
    return state, _decide(spec, state, state, f"search starts at min_cf {spec.min_cf:g}")


def resume(spec: Adaptive, state: ControllerState) -> Decision:
    """Return the decision in force for a state that was loaded.

    Raises:
        ConfigurationError: ``state`` belongs to other options.
    """
    _check_rung(spec, state)
    return _decide(spec, state, state, f"resumed after {state.windows} windows")


def advance(
    spec: Adaptive, state: ControllerState, observation: Observation
) -> tuple[ControllerState, Decision]:
    """Return the state and decision that follow one window; the rules are in the module docstring.

    Raises:
        ConfigurationError: ``state`` belongs to other options, or a factor of the ladder is not in
            the curves.
    """
    _check_rung(spec, state)
    if observation.curves is not None:
        for cf in spec.ladder():
            if cf not in observation.curves.momentary:
                raise ConfigurationError(f"the gain at cf {cf:g} of the ladder was not measured")
    before = replace(state, windows=state.windows + 1)
    unusable = _unusable(observation)
    if unusable is not None:
        return before, _decide(spec, state, before, f"kept: {unusable}")
    if observation.curves is None:
        state_after, reason = _without_samples(before)
    else:
        state_after, reason = _rules(spec, before, observation, observation.curves)
    return state_after, _decide(spec, state, state_after, reason)


def _without_samples(state: ControllerState) -> tuple[ControllerState, str]:
    if state.rung is not None:
        return state, "kept: no samples were taken"
    left = max(state.dense_windows_left - 1, 1)
    return replace(state, dense_windows_left=left), f"dense, windows to wait: {left}"


def _rules(
    spec: Adaptive, state: ControllerState, observation: Observation, curves: Curves
) -> tuple[ControllerState, str]:
    now = curves.raw_energy
    base = state.raw_energy
    change = 0.0 if base is None else math.sqrt(now / base) - 1.0  # of the norm
    critical = abs(change) >= spec.critical_change
    smoothed = now if base is None or critical else 0.5 * (base + now)
    state = replace(state, raw_energy=smoothed)
    note = ""
    if critical:
        norm = 0.0 if base is None else math.sqrt(base)
        note = (
            f"critical period (gradient norm {norm:.3g} -> {math.sqrt(now):.3g}, {change:+.0%}): "
        )
        state = replace(
            state, ceiling=len(spec.ladder()) - 1, searching=True, throughput_below=None
        )
    if state.rung is None:
        state, reason = _while_dense(spec, state, curves, critical)
    elif critical:
        state = replace(state, rung=0, windows_compressed=state.windows_compressed + 1)
        gain = curves.momentary[spec.min_cf]
        if _passes(gain, spec.eps):
            reason = f"search restarts at min_cf {spec.min_cf:g}, {_against(gain, spec.eps)}"
        else:
            state, reason = _to_dense(spec, state, gain)
    else:
        state, reason = _while_compressed(spec, state, observation, curves)
    return state, note + reason


def _while_dense(
    spec: Adaptive, state: ControllerState, curves: Curves, critical: bool
) -> tuple[ControllerState, str]:
    wait, left = state.dense_wait_windows, state.dense_windows_left
    if critical:  # the failures that made the wait long belong to another period
        wait, left = spec.dense_wait_windows, min(left, spec.dense_wait_windows)
    measured = state.dense_windows_left <= 1  # as the last decision asked
    left -= 1
    if left > 0 or not measured:
        left = max(left, 1)
        state = replace(state, dense_wait_windows=wait, dense_windows_left=left)
        return state, f"dense, windows to wait: {left}"
    gain = curves.momentary[spec.min_cf]
    needed = min(1.0, spec.eps * (1 + spec.dense_margin))
    if _passes(gain, needed):
        state = replace(
            state,
            rung=0,
            searching=True,
            throughput_below=None,
            dense_windows_left=0,
            dense_wait_windows=wait,
            windows_compressed=0,
        )
        return state, (
            f"back from dense to min_cf {spec.min_cf:g}: {_against(gain, needed, 'eps + margin')}"
        )
    state = replace(state, dense_windows_left=wait, dense_wait_windows=_longer(spec, wait))
    return state, (
        f"dense: at min_cf {spec.min_cf:g} {_against(gain, needed, 'eps + margin')}, "
        f"next look in {wait} windows"
    )


def _while_compressed(
    spec: Adaptive, state: ControllerState, observation: Observation, curves: Curves
) -> tuple[ControllerState, str]:
    rungs, gains, rung = spec.ladder(), curves.momentary, state.rung or 0
    cf, gain = rungs[rung], gains[rungs[rung]]
    held = state.windows_compressed + 1
    state = replace(state, windows_compressed=held)
    if not _passes(gain, spec.eps):
        return _step_down(spec, state, gains, rung)
    if held >= state.dense_wait_windows:
        state = replace(state, dense_wait_windows=spec.dense_wait_windows)
    here = f"cf {cf:g} {_against(gain, spec.eps)}"
    if not state.searching:
        return state, f"kept: {here}, search has ended"

    throughput = observation.samples_per_step / observation.step_seconds * gain
    below = state.throughput_below
    if below is not None:
        rise = (throughput - below) / below
        state = replace(state, throughput_below=None)
        if abs(rise) < spec.omega:
            return replace(state, searching=False), (
                f"search ends at cf {cf:g}: throughput {throughput:.4g} against {below:.4g} one "
                f"rung below, {rise:+.1%} is within omega {spec.omega:.1%}"
            )
    if rung >= state.ceiling:
        limit = "max_cf" if rung == len(rungs) - 1 else "its ceiling"
        return state, f"kept: {here}, {limit} is reached"
    candidate, candidate_gain = rungs[rung + 1], gains[rungs[rung + 1]]
    there = f"cf {candidate:g} {_against(candidate_gain, spec.eps)}"
    if not _passes(candidate_gain, spec.eps):
        return state, f"kept: {here}, {there}"
    state = replace(state, rung=rung + 1, throughput_below=throughput)
    return state, f"raised from cf {cf:g}: {there}"


def _step_down(
    spec: Adaptive, state: ControllerState, gains: Mapping[float, float], rung: int
) -> tuple[ControllerState, str]:
    rungs = spec.ladder()
    failed = f"cf {rungs[rung]:g} {_against(gains[rungs[rung]], spec.eps)}"
    # When min_cf itself fails there is nothing below it to be a ceiling.
    ceiling = rung - 1 if rung > 0 else state.ceiling
    state = replace(state, ceiling=ceiling, throughput_below=None)
    for lower in sorted({max(0, rung - 1), 0}, reverse=True):
        gain = gains[rungs[lower]]
        if lower < rung and _passes(gain, spec.eps):
            return replace(state, rung=lower), (
                f"lowered to cf {rungs[lower]:g}, {_against(gain, spec.eps)}: {failed}"
            )
    return _to_dense(spec, state, gains[spec.min_cf])


def _to_dense(spec: Adaptive, state: ControllerState, gain: float) -> tuple[ControllerState, str]:
    wait = state.dense_wait_windows
    state = replace(
        state,
        rung=None,
        throughput_below=None,
        dense_windows_left=wait,
        dense_wait_windows=_longer(spec, wait),
    )
    return state, (
        f"dense for at least {wait} windows: even min_cf {spec.min_cf:g} {_against(gain, spec.eps)}"
    )


def _decide(
    spec: Adaptive, before: ControllerState, after: ControllerState, reason: str
) -> Decision:
    rungs = spec.ladder()
    return Decision(
        cf=None if after.rung is None else rungs[after.rung],
        # Without compression samples are taken only in the window that decides.
        measure=after.rung is not None or after.dense_windows_left <= 1,
        reason=reason,
        changed=after.rung != before.rung,
    )


def _unusable(observation: Observation) -> str | None:
    """Return why a window decides nothing, or None."""
    curves = observation.curves
    if curves is not None and not curves.is_finite():
        return f"energy is not finite ({curves.total_energy:g}, of gradients {curves.raw_energy:g})"
    if curves is not None and not (curves.total_energy > 0.0 and curves.raw_energy > 0.0):
        return (
            f"no gradient energy ({curves.total_energy:g}, of gradients {curves.raw_energy:g}, "
            f"{curves.measurements} measurements)"
        )
    seconds, samples = observation.step_seconds, observation.samples_per_step
    if not (0.0 < seconds < math.inf and 0.0 < samples < math.inf):
        return f"no throughput ({samples:g} samples in {seconds:g} seconds)"
    return None


def _longer(spec: Adaptive, wait: int) -> int:
    return min(2 * wait, MAX_WAIT_FACTOR * spec.dense_wait_windows)


def _passes(gain: float, needed: float) -> bool:
    return gain >= needed * (1 - _GAIN_TOLERANCE)


def _against(gain: float, needed: float, name: str = "eps") -> str:
    relation = ">=" if _passes(gain, needed) else "<"
    return f"gain {gain:.4f} {relation} {name} {needed:.4f}"


def _check_rung(spec: Adaptive, state: ControllerState) -> None:
    top = len(spec.ladder()) - 1
    if state.ceiling > top or (state.rung is not None and state.rung > top):
        raise ConfigurationError(
            f"state with rung {state.rung} and ceiling {state.ceiling} does not fit the ladder of "
            f"{top + 1} factors: it was saved under other compression options; start anew"
        )
