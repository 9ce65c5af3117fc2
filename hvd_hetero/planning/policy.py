"""Which compression factor (CF) and exchange come next: a pure state machine over windows.

Once a window rank 0 hands in what all ranks measured and gets the option, a CF with an exchange,
for the next window, with the reason. Options are compared by J (``objective``) over predictions
corrected by measurement (``worth``). The rules, in the order in which they are tried:

1. A window without a step time decides nothing.
2. ``"fixed"``: factor and exchange stay, so that a run repeats whatever its timing.
3. Run-away: a residual ratio above ``max_rho``, or a gradient whose energy is ten times its
   smoothed value, lowers the CF by one rung, at most every fourth window as a residual takes time
   to drain. No higher CF is used until twenty windows have lifted that cap by a rung. Nor is one
   chosen whose rho exceeds ``max_rho``.
4. Dense by rules 5 and 6: keep it, without sampling, for ``dense_wait_windows``; sample in the
   last of them, and compress again only if that is predicted to win 5 %. The wait doubles each
   time, up to 16 times, and is reset once compression has lasted as long. Look at once when the
   exposed exchange grows by half. Never look where removing all of it would not win 5 %; nor,
   short of the longest wait, where by what was measured last compression would lose 30 %. An
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
from collections.abc import Mapping
from dataclasses import replace

from hvd_hetero.compression import controller
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.choice import best as best_option
from hvd_hetero.planning.choice import compressed, exchange, take
from hvd_hetero.planning.choice import milliseconds as ms
from hvd_hetero.planning.dense import MIN_WIN, stay_dense, while_dense
from hvd_hetero.planning.policy_state import Decision, Observation, PolicyState
from hvd_hetero.planning.runaway import DRAIN_WINDOWS, highest_rung, watch
from hvd_hetero.planning.step_time import DENSE, Option
from hvd_hetero.planning.worth import cost, learn

__all__ = ["Decision", "Observation", "PolicyState", "advance", "resume", "start"]

# How much worse dense may be predicted to be and still be tried, if it was never measured:
_FIRST_LOOK = 1.3


def start(
    spec: Adaptive, predicted: Mapping[Option, float] | None = None
) -> tuple[PolicyState, Decision]:
    """Return the first state and decision.

    predicted: step seconds from the cost model alone, to choose the first exchange by where that
    is ``"auto"``; without them it is an allgather.
    """
    search = controller.start(spec)[0] if spec.policy == "gravac" else None
    first = exchange(spec, spec.min_cf, None, predicted or {})
    reason = f"fixed at {first}"
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
        cap_windows=DRAIN_WINDOWS,
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
        return state, _decide(before, state, f"fixed at {state.option}")
    state, alarm = watch(spec, state, observation)  # rule 3
    if state.option.cf is not None:
        state = replace(state, compressed_windows=state.compressed_windows + 1)
        if state.compressed_windows >= state.dense_wait:
            state = replace(state, dense_wait=spec.dense_wait_windows)
    if _is_held_dense(state):
        state, reason = while_dense(spec, state, observation)
    elif alarm:
        state, reason = _lower(spec, state, observation, alarm)
    elif spec.policy == "model":
        state, reason = _model(spec, state, observation)
    else:
        state, reason = _gravac(spec, state, observation)
    return state, _decide(before, state, reason)


def _lower(
    spec: Adaptive, state: PolicyState, seen: Observation, alarm: str
) -> tuple[PolicyState, str]:
    rung = spec.ladder().index(state.option.cf or spec.min_cf) - 1
    if state.controller is not None:
        search = replace(state.controller, rung=rung, throughput_below=None)
        state = replace(state, controller=search)
    lower = exchange(spec, spec.ladder()[rung], state.option, seen.predicted)
    state = replace(take(state, lower), previous=None, cap=rung, cap_windows=0)
    return state, f"lowered to {lower}: {alarm}"


# ---- rules 4 to 7 -------------------------------------------------------------------------------


def _model(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    current, left = state.option, state.previous
    state = replace(state, previous=None)
    here = cost(spec, state, seen, current)
    options = compressed(spec, state, seen) + ([DENSE] if spec.do_no_harm else [])
    best = best_option(spec, state, seen, options)
    if best is None or math.isinf(here):
        return state, f"kept: too little is known of {current}"
    before = math.inf if left is None else cost(spec, state, seen, left)
    if left is not None and before < here:
        reason = f"J was measured as {ms(here)} with {current}, {ms(before)} with {left}"
        if left == DENSE:
            return stay_dense(spec, state, reason)
        return replace(take(state, left), previous=None), f"back to {left}: {reason}"
    there = cost(spec, state, seen, best)
    numbers = f"J {ms(there)} with {best}, {ms(here)} with {current}"
    if best == current:
        return state, f"kept: {current} has the least J, {ms(here)}"
    if there >= here * (1.0 - MIN_WIN):
        return state, f"kept: less than {MIN_WIN:.0%} to win: {numbers}"
    if best == DENSE:
        return stay_dense(spec, state, numbers)
    return take(state, best), f"changed to {best}: {numbers}"


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
            f"one window without compression, to compare: J {ms(dense)} is predicted against "
            f"{ms(here)} with {state.option}"
        )
    search, choice = controller.advance(
        spec,
        search,
        controller.Observation(seen.curves, seen.step_seconds, seen.samples_per_step),
    )
    reason = choice.reason
    if search.rung is None:
        return replace(state, controller=search, option=DENSE, compressed_windows=0), reason
    option = exchange(spec, spec.ladder()[search.rung], state.option, seen.predicted)
    highest = highest_rung(spec, state, seen, option.strategy)
    if search.rung > highest:
        search = replace(search, rung=highest, throughput_below=None)
        option = exchange(spec, spec.ladder()[highest], state.option, seen.predicted)
        reason = f"held at {option}, the highest factor that did not run away ({reason})"
    return replace(take(state, option), controller=search, previous=None), reason


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


def _is_held_dense(state: PolicyState) -> bool:
    """Whether dense is a choice of this module, not of GraVAC's search."""
    searching_dense = state.controller is not None and state.controller.rung is None
    return state.option.cf is None and not searching_dense
