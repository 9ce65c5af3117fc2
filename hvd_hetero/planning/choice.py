"""Which options there are, which is best, and how one is put in force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.planning.policy_state import Observation, PolicyState
from hvd_hetero.planning.runaway import highest_rung
from hvd_hetero.planning.step_time import Option
from hvd_hetero.planning.worth import cost

_EXCHANGE_WIN = 0.1  # of seconds, that justifies another exchange for the same factor


def compressed(spec: Adaptive, state: PolicyState, seen: Observation) -> list[Option]:
    """Return the options that may follow dense, or the option in force."""
    search = state.controller
    if search is not None:
        cf = spec.ladder()[search.rung or 0]
        return [exchange(spec, cf, state.option, seen.predicted)]
    rungs = spec.ladder()
    return [
        option
        for option in seen.predicted
        if option.cf in rungs
        and rungs.index(option.cf) <= highest_rung(spec, state, seen, option.strategy)
    ]


def best(
    spec: Adaptive, state: PolicyState, seen: Observation, options: Iterable[Option]
) -> Option | None:
    """Return the option of least J; None while none is known."""
    costs = {option: cost(spec, state, seen, option) for option in options}
    first = min(costs, key=costs.__getitem__, default=None)
    return None if first is None or math.isinf(costs[first]) else first


def exchange(
    spec: Adaptive, cf: float, current: Option | None, predicted: Mapping[Option, float]
) -> Option:
    """Return the factor with the exchange that carries it: the fastest where it is "auto"."""
    if spec.exchange != "auto":
        return Option(cf, spec.exchange)
    options = [option for option in predicted if option.cf == cf]
    kept = None if current is None or current.cf is None else Option(cf, current.strategy)
    if not options:
        return kept or Option(cf, "allgather")
    fastest = min(options, key=predicted.__getitem__)
    if kept in options and predicted[fastest] >= predicted[kept] * (1.0 - _EXCHANGE_WIN):
        return kept
    return fastest


def take(state: PolicyState, option: Option) -> PolicyState:
    """Return the state in which compression by ``option`` is in force."""
    was_dense = state.option.cf is None
    return replace(
        state,
        option=option,
        previous=state.option,
        on_trial=False,
        exposed_seconds=None,
        compressed_windows=0 if was_dense else state.compressed_windows,
    )


def milliseconds(seconds: float) -> str:
    """Return seconds for a reason."""
    return f"{seconds * 1e3:.4g} ms"
