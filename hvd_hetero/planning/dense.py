"""Training without compression: how long it is kept, and when to look again."""

from __future__ import annotations

import math
from dataclasses import replace

from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.planning.choice import best, compressed, take
from hvd_hetero.planning.choice import milliseconds as ms
from hvd_hetero.planning.policy_state import Observation, PolicyState
from hvd_hetero.planning.step_time import DENSE, Option
from hvd_hetero.planning.worth import cost, least_loss

MIN_WIN = 0.05  # predicted, of J, that justifies a change
# How much worse what was never measured may be predicted to be and still be tried for a window:
_LATER_LOOK = 1.15
_MAX_WAIT_FACTOR = 16
# How much worse compression may be predicted, by what was measured last, for a window of samples,
# which slows its steps, to be spent on it:
_WORTH_A_LOOK = 1.3
# Growth of the exposed exchange that is no noise: what was measured on another network is void.
_GROWN = 1.5


def while_dense(spec: Adaptive, state: PolicyState, seen: Observation) -> tuple[PolicyState, str]:
    """Return the state after a window without compression, and the reason.

    Waits; looks earlier when the exposed exchange grows. Does not look where removing all of it
    would not pay, nor, short of the longest wait, where what is known promises nothing. After a
    window with samples, decides.
    """
    dense = cost(spec, state, seen, DENSE)
    option = best(spec, state, seen, compressed(spec, state, seen))
    there = math.inf if option is None else cost(spec, state, seen, option)
    numbers = f"J {ms(there)} with {option}, {ms(dense)} dense"
    if state.dense_left <= 1 and seen.curves is not None:
        if option is not None and there < dense * _needed(spec, state, option):
            return take(state, option), f"compressing with {option}: {numbers}"
        return stay_dense(spec, state, numbers)
    exposed, before = seen.exposed_seconds, state.exposed_seconds
    if before is None:  # the first window like those to come
        state, before = replace(state, exposed_seconds=exposed), exposed
    grown = exposed > _GROWN * before
    left = max(state.dense_left - 1, 1)
    if left > 1 and not grown:
        return replace(state, dense_left=left), f"dense, windows to wait: {left}"
    if _is_hopeless(spec, state, seen):
        return stay_dense(spec, state, f"only {ms(exposed)} of exchange are not hidden")
    if not grown:
        longest = state.dense_wait >= _longest_wait(spec)
        if option is not None and there > dense * _WORTH_A_LOOK and not longest:
            return stay_dense(spec, state, numbers)
        return replace(state, dense_left=1), "dense: measured in the next window"
    state = replace(state, dense_left=1, exposed_seconds=exposed)
    return state, (
        f"dense: the exchange that compute does not hide grew from {ms(before)} to "
        f"{ms(exposed)}, measured in the next window"
    )


def _needed(spec: Adaptive, state: PolicyState, option: Option) -> float:
    """Return below which share of dense's J that of ``option`` must be to be used instead."""
    if state.on_trial:
        return 1.0  # both were measured
    settled = state.dense_wait > spec.dense_wait_windows
    tried = any(one.strategy == option.strategy for one in state.corrections)
    return _LATER_LOOK if settled and not tried else 1.0 - MIN_WIN


def _longest_wait(spec: Adaptive) -> int:
    return _MAX_WAIT_FACTOR * spec.dense_wait_windows


def stay_dense(spec: Adaptive, state: PolicyState, why: str) -> tuple[PolicyState, str]:
    """Return the state in which dense is kept for the next wait, and the reason."""
    wait = state.dense_wait
    longer = min(2 * wait, _longest_wait(spec))
    state = replace(
        state,
        option=DENSE,
        on_trial=False,
        previous=None,
        dense_left=wait,
        dense_wait=longer,
        compressed_windows=0,
    )
    return state, f"dense for at least {wait} windows: {why}"


def _is_hopeless(spec: Adaptive, state: PolicyState, seen: Observation) -> bool:
    """Whether even a step without any exposed exchange would not be worth compression."""
    bound = (seen.step_seconds - seen.exposed_seconds) * least_loss(spec, state, seen)
    return bound >= seen.step_seconds * (1.0 - MIN_WIN)
