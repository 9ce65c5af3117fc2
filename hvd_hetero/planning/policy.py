"""Which compression factor (CF) and exchange come next: a pure state machine over windows.

Once a window rank 0 hands in what all ranks measured and gets the option, a CF with an exchange,
for the next window, with the reason. Options are compared by J (``objective``) over predictions
corrected by measurement (``worth``). The rules, in the order in which they are tried:

1. A window without a step time decides nothing.
2. ``"fixed"``: the CF stays; only its exchange may change (rule 8).
3. Run-away: a residual ratio above ``max_rho``, or a gradient whose energy is ten times its
   smoothed value, lowers the CF by one rung, at most every fourth window as a residual takes time
   to drain. No higher CF is used until twenty windows have lifted that cap by a rung. Nor is one
   chosen whose rho exceeds ``max_rho``.
4. Dense by rules 5 and 6: keep it, without sampling, for ``dense_wait_windows``; sample in the
   last of them, and compress again only if that is predicted to win 5 %. The wait doubles each
   time, up to 16 times, and is reset once compression has lasted as long. Look at once when the
   exposed exchange changes by 30 %. Never look where removing all of it would not win 5 %. An
   exchange that was never measured is given one window even if predicted to lose up to 15 %.
5. Do no harm (``"gravac"``; the options of ``"model"`` include dense): dense that is predicted to
   be better is tried for one window, also when it is up to 30 % worse but was never tried. Then
   measured J decides; equal means dense.
6. ``"model"``: begins with one window of dense, which shows the gradients' curves and the pure
   step time; then takes the option with the least J. Changes only for a win of 5 %; goes back if
   the first window after a change measures a J above the option it left.
7. ``"gravac"``: ``compression.controller`` chooses the CF.
8. The exchange of a CF, where it is ``"auto"`` and not the model's choice, is the one with the
   fewer predicted seconds; changed only for 10 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hvd_hetero.compression import controller
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.policy_state import Decision, Observation, PolicyState
from hvd_hetero.planning.step_time import DENSE, Option
from hvd_hetero.planning.worth import CHANGED, cost, gain_and_rho, learn, least_loss

__all__ = ["Decision", "Observation", "PolicyState", "advance", "resume", "start"]

MIN_WIN = 0.05  # predicted, of J, that justifies a change
_EXCHANGE_WIN = 0.1  # of seconds, that justifies another exchange for the same CF
# How much worse what was never measured may be predicted to be and still be tried for a window:
_FIRST_LOOK, _LATER_LOOK = 1.3, 1.15  # dense against compression, compression after a wait
_RUNAWAY = 10.0  # of ||g||^2 over its smoothed value
_DRAIN_WINDOWS, _QUIET_WINDOWS = 4, 20
_MAX_WAIT_FACTOR = 16


def start(
    spec: Adaptive, predicted: Mapping[Option, float] | None = None
) -> tuple[PolicyState, Decision]:
    """Return the first state and decision.

    predicted: step seconds from the cost model alone, to choose the first exchange by where that
    is ``"auto"``; without them it is an allgather.
    """
    search = controller.start(spec)[0] if spec.policy == "gravac" else None
    first = _exchange(spec, spec.min_cf, None, predicted or {})
    reason = f"fixed at CF {spec.min_cf:g}"
    if spec.policy == "gravac":
        reason = f"search starts at min_cf {spec.min_cf:g}"
    elif spec.policy == "model":
        reason = f"starts at min_cf {spec.min_cf:g}"
        if spec.do_no_harm:
            first, reason = DENSE, "one window without compression, to measure"
    state = PolicyState(
        option=first,
        controller=search,
        corrections={},
        worth={},
        raw_energy=None,
        cap=len(spec.ladder()) - 1,
        cap_windows=_DRAIN_WINDOWS,
        previous=None,
        on_trial=False,
        dense_left=1,
        dense_wait=spec.dense_wait_windows,
        exposed_seconds=None,
        compressed_windows=0,
        windows=0,
    )
    return state, _decide(state, state, reason)


def resume(spec: Adaptive, state: PolicyState) -> Decision:
    """Return the decision in force for a state that was loaded.

    Raises:
        ConfigurationError: ``state`` belongs to other options.
    """
    _check(spec, state)
    return _decide(state, state, f"resumed after {state.windows} windows")


def advance(
    spec: Adaptive, state: PolicyState, observation: Observation
) -> tuple[PolicyState, Decision]:
    """Return the state and decision that follow one window; the rules are in the docstring above.

    Raises:
        ConfigurationError: ``state`` belongs to other options.
    """
    _check(spec, state)
    before, state = state, replace(state, windows=state.windows + 1)
    if not 0.0 < observation.step_seconds < math.inf:  # rule 1
        return state, _decide(before, state, "kept: no step was timed")
    state = learn(state, observation)
    if spec.policy == "fixed":  # rule 2
        option = _exchange(spec, spec.min_cf, state.option, observation.predicted)
        state = replace(state, option=option)
        return state, _decide(before, state, f"fixed at CF {spec.min_cf:g}, by {option.strategy}")
    state, alarm = _guard(spec, state, observation)  # rule 3
    if state.option.cf is not None:
        state = replace(state, compressed_windows=state.compressed_windows + 1)
        if state.compressed_windows >= state.dense_wait:
            state = replace(state, dense_wait=spec.dense_wait_windows)
    if _is_held_dense(state):
        state, reason = _while_dense(spec, state, observation)
    elif alarm:
        state, reason = _lower(spec, state, observation, alarm)
    elif spec.policy == "model":
        state, reason = _model(spec, state, observation)
    else:
        state, reason = _gravac(spec, state, observation)
    return state, _decide(before, state, reason)


# ---- rule 3 -------------------------------------------------------------------------------------


def _guard(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    """Return the state with smoothed energy and cap, and what is running away, if anything."""
    alarm, curves = "", seen.curves
    if curves is not None and curves.raw_energy > 0.0 and curves.is_finite():
        now, base = curves.raw_energy, state.raw_energy
        if base is not None and now >= _RUNAWAY * base:
            alarm = f"the gradient's norm ran from {math.sqrt(base):.3g} to {math.sqrt(now):.3g}"
        elif seen.option.cf is not None and curves.residual_ratio > spec.max_rho:
            alarm = f"rho {curves.residual_ratio:.3g} exceeds max_rho {spec.max_rho:g}"
        state = replace(state, raw_energy=now if base is None else 0.5 * (base + now))
    since, cap = state.cap_windows + 1, state.cap
    if since >= _QUIET_WINDOWS and not alarm and cap < len(spec.ladder()) - 1:
        since, cap = 0, cap + 1
    return replace(state, cap=cap, cap_windows=since), alarm if since > _DRAIN_WINDOWS else ""


def _lower(
    spec: Adaptive, state: PolicyState, seen: Observation, alarm: str
) -> tuple[PolicyState, str]:
    rungs = spec.ladder()
    rung = rungs.index(state.option.cf) if state.option.cf in rungs else 0
    if state.option.cf is None or rung == 0:
        return state, f"kept: {alarm}, but there is no lower factor than {state.option}"
    if state.controller is not None:
        search = replace(state.controller, rung=rung - 1, throughput_below=None)
        state = replace(state, controller=search)
    state = replace(state, cap=rung - 1, cap_windows=0)
    lower = _exchange(spec, rungs[rung - 1], state.option, seen.predicted)
    return replace(_take(state, lower), previous=None), f"lowered to {lower}: {alarm}"


def _highest_rung(spec: Adaptive, state: PolicyState, seen: Observation, strategy: str) -> int:
    """Return the highest rung within cap and max_rho; the lowest is always allowed."""
    best = 0
    for rung, cf in enumerate(spec.ladder()[: state.cap + 1]):
        worth = gain_and_rho(state, Option(cf, strategy), seen.ranks)
        if worth is None or worth[1] <= spec.max_rho:
            best = rung
    return best


# ---- rule 4 -------------------------------------------------------------------------------------


def _is_held_dense(state: PolicyState) -> bool:
    """Whether dense is a choice of this module, not of GraVAC's search."""
    searching_dense = state.controller is not None and state.controller.rung is None
    return state.option.cf is None and not searching_dense


def _while_dense(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    dense = cost(spec, state, seen, DENSE)
    if state.dense_left <= 1 and seen.curves is not None:
        best = _best(spec, state, seen, _compressed(spec, state, seen))
        there = math.inf if best is None else cost(spec, state, seen, best)
        numbers = f"J {_ms(there)} with {best}, {_ms(dense)} dense"
        if best is not None and there < dense * _needed(state, best):
            return _take(state, best), f"compressing with {best}: {numbers}"
        return _stay_dense(spec, state, seen, numbers)
    exposed = seen.exposed_seconds
    reference = exposed if state.exposed_seconds is None else state.exposed_seconds
    changed = max(exposed, reference) > CHANGED * min(exposed, reference)
    hopeless = _is_hopeless(spec, state, seen)
    if changed and not hopeless:
        state = replace(state, dense_left=1, exposed_seconds=exposed)
        return state, (
            f"dense: the exchange that compute does not hide went from {_ms(reference)} to "
            f"{_ms(exposed)}, measured in the next window"
        )
    left = max(state.dense_left - 1, 1)
    if left == 1 and hopeless:
        return _stay_dense(spec, state, seen, f"only {_ms(exposed)} of exchange are not hidden")
    return replace(state, dense_left=left), f"dense: {left} windows of waiting left"


def _needed(state: PolicyState, best: Option) -> float:
    """Return below which share of dense's J ``best`` must be to be used instead."""
    if state.on_trial:
        return 1.0  # both were measured
    settled = state.exposed_seconds is not None
    tried = any(option.strategy == best.strategy for option in state.corrections)
    return _LATER_LOOK if settled and not tried else 1.0 - MIN_WIN


def _stay_dense(
    spec: Adaptive, state: PolicyState, seen: Observation, why: str
) -> tuple[PolicyState, str]:
    wait = state.dense_wait
    longer = min(2 * wait, _MAX_WAIT_FACTOR * spec.dense_wait_windows)
    state = replace(
        state,
        option=DENSE,
        on_trial=False,
        previous=None,
        dense_left=wait,
        dense_wait=longer,
        exposed_seconds=seen.exposed_seconds,
        compressed_windows=0,
    )
    return state, f"dense for at least {wait} windows: {why}"


def _is_hopeless(spec: Adaptive, state: PolicyState, seen: Observation) -> bool:
    """Whether even a step without any exposed exchange would not be worth compression."""
    bound = (seen.step_seconds - seen.exposed_seconds) * least_loss(spec, state, seen)
    return bound >= seen.step_seconds * (1.0 - MIN_WIN)


# ---- rules 5 to 8 -------------------------------------------------------------------------------


def _model(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    current, left = state.option, state.previous
    state = replace(state, previous=None)
    here = cost(spec, state, seen, current)
    options = _compressed(spec, state, seen) + ([DENSE] if spec.do_no_harm else [])
    best = _best(spec, state, seen, options)
    if best is None or math.isinf(here):
        return state, f"kept: too little is known of {current}"
    before = math.inf if left is None else cost(spec, state, seen, left)
    if left is not None and before < here:
        reason = f"J was measured as {_ms(here)} with {current}, {_ms(before)} with {left}"
        if left == DENSE:
            return _stay_dense(spec, state, seen, reason)
        return replace(_take(state, left), previous=None), f"back to {left}: {reason}"
    there = cost(spec, state, seen, best)
    numbers = f"J {_ms(there)} with {best}, {_ms(here)} with {current}"
    if best == current:
        return state, f"kept: {current} has the least J, {_ms(here)}"
    if there >= here * (1.0 - MIN_WIN):
        return state, f"kept: less than {MIN_WIN:.0%} to win: {numbers}"
    if best == DENSE:
        return _stay_dense(spec, state, seen, numbers)
    return _take(state, best), f"changed to {best}: {numbers}"


def _gravac(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    search = state.controller
    if search is None:
        raise ConfigurationError("state without a search: it was saved under another policy")
    here, dense = (cost(spec, state, seen, one) for one in (state.option, DENSE))
    needed = 1.0 - MIN_WIN if DENSE in state.corrections else _FIRST_LOOK
    if spec.do_no_harm and state.option != DENSE and dense < here * needed and here < math.inf:
        tried = replace(
            state, option=DENSE, previous=None, on_trial=True, dense_left=1, compressed_windows=0
        )
        return tried, (
            f"one window without compression, to compare: J {_ms(dense)} is predicted against "
            f"{_ms(here)} with {state.option}"
        )
    search, choice = controller.advance(
        spec,
        search,
        controller.Observation(seen.curves, seen.step_seconds, seen.samples_per_step),
    )
    reason = choice.reason
    if search.rung is None:
        return replace(state, controller=search, option=DENSE, compressed_windows=0), reason
    option = _exchange(spec, spec.ladder()[search.rung], state.option, seen.predicted)
    highest = _highest_rung(spec, state, seen, option.strategy)
    if search.rung > highest:
        search = replace(search, rung=highest, throughput_below=None)
        option = _exchange(spec, spec.ladder()[highest], state.option, seen.predicted)
        reason = f"held at {option}, the highest factor that did not run away ({reason})"
    return replace(_take(state, option), controller=search, previous=None), reason


def _compressed(spec: Adaptive, state: PolicyState, seen: Observation) -> list[Option]:
    """Return the options that may follow dense, or the option in force."""
    search = state.controller
    if search is not None:
        cf = spec.ladder()[search.rung or 0]
        return [_exchange(spec, cf, state.option, seen.predicted)]
    rungs = spec.ladder()
    return [
        option
        for option in seen.predicted
        if option.cf in rungs
        and rungs.index(option.cf) <= _highest_rung(spec, state, seen, option.strategy)
    ]


def _best(
    spec: Adaptive, state: PolicyState, seen: Observation, options: Iterable[Option]
) -> Option | None:
    costs = {option: cost(spec, state, seen, option) for option in options}
    best = min(costs, key=costs.__getitem__, default=None)
    return None if best is None or math.isinf(costs[best]) else best


def _exchange(
    spec: Adaptive, cf: float, current: Option | None, predicted: Mapping[Option, float]
) -> Option:
    """Return the factor with the exchange that carries it (rule 8)."""
    if spec.exchange != "auto":
        return Option(cf, spec.exchange)
    options = [option for option in predicted if option.cf == cf]
    kept = None if current is None or current.cf is None else Option(cf, current.strategy)
    if not options:
        return kept or Option(cf, "allgather")
    best = min(options, key=predicted.__getitem__)
    if kept in options and predicted[best] >= predicted[kept] * (1.0 - _EXCHANGE_WIN):
        return kept
    return best


def _take(state: PolicyState, option: Option) -> PolicyState:
    was_dense = state.option.cf is None
    return replace(
        state,
        option=option,
        previous=state.option,
        on_trial=False,
        exposed_seconds=None,
        compressed_windows=0 if was_dense else state.compressed_windows,
    )


def _decide(before: PolicyState, after: PolicyState, reason: str) -> Decision:
    search = after.controller
    if after.option.cf is not None:
        measure = True
    elif _is_held_dense(after):
        measure = after.dense_left <= 1
    else:
        measure = search is not None and search.dense_windows_left <= 1
    option = after.option
    return Decision(option.cf, option.strategy, reason, option != before.option, measure)


def _check(spec: Adaptive, state: PolicyState) -> None:
    cf = state.option.cf
    if (cf is not None and cf not in spec.ladder()) or (spec.policy == "gravac") != (
        state.controller is not None
    ):
        raise ConfigurationError(
            f"state with {state.option} does not fit policy {spec.policy!r} and its factors "
            f"{list(spec.ladder())}: it was saved under other compression options; start anew"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
