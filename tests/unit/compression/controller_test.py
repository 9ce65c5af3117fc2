"""The search for a factor: build a state, take one step, look at every field; then the laws."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.controller import (
    MAX_WAIT_FACTOR,
    ControllerState,
    Decision,
    Observation,
    advance,
    resume,
    start,
)
from hvd_hetero.compression.gain import Curves
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError

SPEC = Adaptive(min_cf=10, max_cf=80, eps=0.75, omega=0.05, dense_wait_windows=4, dense_margin=0.1)
AT_20 = ControllerState(
    rung=1,
    ceiling=3,
    searching=True,
    throughput_below=100.0,
    raw_energy=8.0,
    dense_windows_left=0,
    dense_wait_windows=4,
    windows_compressed=1,
    windows=5,
)
DENSE = replace(AT_20, rung=None, throughput_below=None, dense_windows_left=1, dense_wait_windows=8)


def _curves(
    gains: Mapping[float, float], raw: float = 8.0, total: float = 1000.0, measurements: int = 10
) -> Curves:
    momentary = {cf: 0.0 for cf in SPEC.ladder()} | {float(cf): x for cf, x in gains.items()}
    cfs = tuple(sorted(momentary))
    # The search goes by the gains of the moment, never by those of the steady state.
    steady = {cf: 0.5 for cf in cfs}
    return Curves(
        cfs,
        steady,
        momentary,
        steady,
        steady,
        0.5,
        raw,
        total,
        measurements,
        {cf: (1.0,) for cf in cfs},
    )


def _seen(
    gains: Mapping[float, float],
    *,
    raw: float = 8.0,
    step_seconds: float = 0.5,
    samples: float = 100.0,
) -> Observation:
    return Observation(_curves(gains, raw), step_seconds, samples)


def test_start() -> None:
    state, decision = start(SPEC)
    assert state == ControllerState(0, 3, True, None, None, 0, 4, 0, 0)
    assert decision == Decision(10.0, True, "search starts at min_cf 10", False)


def test_raise() -> None:
    seen = _seen({10: 0.99, 20: 0.9, 40: 0.8})
    state, decision = advance(SPEC, AT_20, seen)
    assert state == replace(AT_20, rung=2, throughput_below=180.0, windows_compressed=2, windows=6)
    assert decision == Decision(
        40.0,
        True,
        "raised from cf 20: cf 40 gain 0.8000 >= eps 0.7500",
        True,
    )


def test_candidate_fails() -> None:
    state, decision = advance(SPEC, AT_20, _seen({10: 0.99, 20: 0.9, 40: 0.7}))
    assert state == replace(AT_20, throughput_below=None, windows_compressed=2, windows=6)
    assert decision == Decision(
        20.0,
        True,
        "kept: cf 20 gain 0.9000 >= eps 0.7500, cf 40 gain 0.7000 < eps 0.7500",
        False,
    )


def test_throughput_no_longer_rises() -> None:
    """T_c = 100 / 0.9 * 0.94 = 104.4 against 100: within omega, so the search stops here."""
    seen = _seen({10: 0.99, 20: 0.94, 40: 0.9}, step_seconds=0.9)
    state, decision = advance(SPEC, AT_20, seen)
    assert state == replace(
        AT_20,
        searching=False,
        throughput_below=None,
        windows_compressed=2,
        windows=6,
    )
    assert decision == Decision(
        20.0,
        True,
        "search ends at cf 20: throughput 104.4 against 100 one rung below, "
        "+4.4% is within omega 5.0%",
        False,
    )
    state, decision = advance(SPEC, state, _seen({10: 0.99, 20: 0.94}))
    assert (decision.cf, decision.changed) == (20.0, False)
    assert decision.reason == "kept: cf 20 gain 0.9400 >= eps 0.7500, search has ended"


def test_a_large_fall_of_throughput_does_not_end_the_search() -> None:
    """GraVAC stops when T_c changes by less than omega; what bounds the loss is eps."""
    seen = _seen({10: 0.99, 20: 0.9, 40: 0.8}, step_seconds=1.0)
    state, decision = advance(SPEC, AT_20, seen)
    assert (decision.cf, state.searching) == (40.0, True)
    slight = _seen({10: 0.99, 20: 0.96, 40: 0.8}, step_seconds=1.0)
    state, decision = advance(SPEC, AT_20, slight)
    assert (decision.cf, state.searching) == (20.0, False)


def test_current_fails_and_becomes_a_ceiling() -> None:
    at_40 = replace(AT_20, rung=2)
    state, decision = advance(SPEC, at_40, _seen({10: 0.9, 20: 0.8, 40: 0.7, 80: 0.6}))
    assert state == replace(
        at_40, rung=1, ceiling=1, throughput_below=None, windows_compressed=2, windows=6
    )
    assert decision == Decision(
        20.0,
        True,
        "lowered to cf 20, gain 0.8000 >= eps 0.7500: cf 40 gain 0.7000 < eps 0.7500",
        True,
    )
    state, decision = advance(SPEC, state, _seen({10: 0.9, 20: 0.8}))
    assert state.rung == 1
    assert "its ceiling is reached" in decision.reason


def test_min_cf_when_only_that_passes() -> None:
    at_40 = replace(AT_20, rung=2)
    state, decision = advance(SPEC, at_40, _seen({10: 0.8, 20: 0.7, 40: 0.6, 80: 0.5}))
    assert (state.rung, state.ceiling, decision.cf) == (0, 1, 10.0)


def test_dense_when_none_passes() -> None:
    at_40 = replace(AT_20, rung=2)
    state, decision = advance(SPEC, at_40, _seen({10: 0.7, 20: 0.6, 40: 0.5, 80: 0.4}))
    assert state == replace(
        at_40,
        rung=None,
        ceiling=1,
        throughput_below=None,
        dense_windows_left=4,
        dense_wait_windows=8,
        windows_compressed=2,
        windows=6,
    )
    assert decision == Decision(
        None, False, "dense for at least 4 windows: even min_cf 10 gain 0.7000 < eps 0.7500", True
    )


def test_a_failure_of_min_cf_is_no_ceiling() -> None:
    """After the return from dense the search may climb again."""
    state, decision = advance(SPEC, replace(AT_20, rung=0), _seen({10: 0.7, 20: 0.6}))
    assert (state.rung, state.ceiling, decision.cf) == (None, 3, None)
    back = replace(state, rung=0, dense_windows_left=0)
    _, decision = advance(SPEC, back, _seen({10: 0.9, 20: 0.8}))
    assert decision.cf == 20.0


@pytest.mark.parametrize("wait", [1, 2, 5])
def test_dense_lasts_exactly_the_windows_asked_for(wait: int) -> None:
    """S28: no off-by-one; the gain of min_cf is measured only in the last of them."""
    spec = replace(SPEC, dense_wait_windows=wait)
    state, _ = start(spec)
    state, decision = advance(spec, state, _seen({10: 0.5, 20: 0.4}))
    measured = []
    while decision.cf is None:
        measured.append(decision.measure)
        seen = _seen({10: 1.0}) if decision.measure else Observation(None, 0.5, 100.0)
        state, decision = advance(spec, state, seen)
    assert measured == [False] * (wait - 1) + [True]
    assert decision.cf == 10.0


def test_back_from_dense_only_with_a_margin() -> None:
    """A dense step empties the residual, which flatters the gain: eps alone is not enough."""
    state, decision = advance(SPEC, DENSE, _seen({10: 0.80}))
    assert state == replace(DENSE, dense_windows_left=8, dense_wait_windows=16, windows=6)
    assert decision == Decision(
        None,
        False,
        "dense: at min_cf 10 gain 0.8000 < eps + margin 0.8250, next look in 8 windows",
        False,
    )
    state, decision = advance(SPEC, DENSE, _seen({10: 0.83}))
    assert state == replace(DENSE, rung=0, dense_windows_left=0, windows_compressed=0, windows=6)
    assert decision == Decision(
        10.0,
        True,
        "back from dense to min_cf 10: gain 0.8300 >= eps + margin 0.8250",
        True,
    )


def test_the_wait_doubles_up_to_a_cap_and_is_forgotten_after_success() -> None:
    state, waits = DENSE, []
    for _ in range(200):
        state, decision = advance(SPEC, state, _seen({10: 0.5}))
        if "next look" in decision.reason:
            waits.append(state.dense_windows_left)
    cap = MAX_WAIT_FACTOR * 4
    assert waits[:4] == [8, 16, 32, cap] and max(waits) == cap
    long = replace(AT_20, throughput_below=None, dense_wait_windows=8, windows_compressed=6)
    state, _ = advance(SPEC, long, _seen({10: 0.9, 20: 0.8, 40: 0.5}))
    assert state.dense_wait_windows == 8
    state, _ = advance(SPEC, state, _seen({10: 0.9, 20: 0.8, 40: 0.5}))
    assert state.dense_wait_windows == 4


def test_critical_period_restarts_the_search_and_lifts_ceilings() -> None:
    stuck = replace(AT_20, ceiling=1, searching=False, throughput_below=None)
    state, decision = advance(SPEC, stuck, _seen({10: 0.9, 20: 0.8}, raw=2.0))
    assert state == replace(
        stuck,
        rung=0,
        ceiling=3,
        searching=True,
        raw_energy=2.0,
        windows_compressed=2,
        windows=6,
    )
    assert decision == Decision(
        10.0,
        True,
        "critical period (gradient norm 2.83 -> 1.41, -50%): "
        "search restarts at min_cf 10, gain 0.9000 >= eps 0.7500",
        True,
    )


def test_critical_period_without_a_passing_factor_is_dense() -> None:
    state, decision = advance(SPEC, AT_20, _seen({10: 0.7, 20: 0.6, 40: 0.5}, raw=80.0))
    assert state.rung is None and state.ceiling == 3
    assert decision.cf is None and "+216%" in decision.reason


def test_a_fall_of_the_gain_alone_is_not_critical() -> None:
    """The gain falls by itself after the factor was raised."""
    state, decision = advance(SPEC, AT_20, _seen({10: 0.9, 20: 0.76, 40: 0.3}))
    assert state.rung == 1 and "critical" not in decision.reason


def test_raw_energy_is_smoothed() -> None:
    state, decision = advance(SPEC, AT_20, _seen({10: 0.9, 20: 0.8, 40: 0.5}, raw=10.0))
    assert "critical" not in decision.reason
    assert state.raw_energy == 9.0


def test_critical_period_while_dense_shortens_the_wait_but_does_not_end_it() -> None:
    waiting = replace(DENSE, ceiling=1, dense_windows_left=30, dense_wait_windows=64)
    state, decision = advance(SPEC, waiting, _seen({}, raw=80.0))
    assert state == replace(
        waiting, ceiling=3, raw_energy=80.0, dense_windows_left=3, dense_wait_windows=4, windows=6
    )
    assert decision.cf is None and "critical" in decision.reason


@pytest.mark.parametrize("state", [AT_20, DENSE])
@pytest.mark.parametrize(
    ("observation", "why"),
    [
        (Observation(_curves({}, 0.0, 0.0), 0.5, 100.0), "no gradient"),
        (Observation(_curves({10: 1.0}, 0.0, 1.0), 0.5, 100.0), "gradients 0"),
        (Observation(_curves({}, 0.0, 0.0, 0), 0.5, 100.0), "0 measurements"),
        (Observation(_curves({10: 1.0}, 1.0, math.nan), 0.5, 100.0), "(nan"),
        (Observation(_curves({10: 1.0}, math.inf), 0.5, 100.0), "gradients inf"),
        (Observation(_curves({10: math.nan}), 0.5, 100.0), "not finite"),
        (Observation(_curves({10: 1.0}), 0.0, 100.0), "0 seconds"),
        (Observation(_curves({10: 1.0}), math.nan, 100.0), "nan seconds"),
        (Observation(_curves({10: 1.0}), 1.0, 0.0), "0 samples"),
    ],
)
def test_a_window_that_says_nothing_changes_nothing(
    state: ControllerState, observation: Observation, why: str
) -> None:
    after, decision = advance(SPEC, state, observation)
    assert after == replace(state, windows=6)
    expected = resume(SPEC, state)
    assert (decision.cf, decision.measure) == (expected.cf, expected.measure)
    assert not decision.changed and decision.reason.startswith("kept: ") and why in decision.reason


def test_a_window_without_samples_only_shortens_the_wait() -> None:
    nothing = Observation(None, 0.5, 100.0)
    state, decision = advance(SPEC, AT_20, nothing)
    assert state == replace(AT_20, windows=6)
    assert decision == Decision(20.0, True, "kept: no samples were taken", False)
    state, decision = advance(SPEC, replace(DENSE, dense_windows_left=2), nothing)
    assert state == replace(DENSE, dense_windows_left=1, windows=6)
    assert decision == Decision(None, True, "dense, windows to wait: 1", False)
    state, _ = advance(SPEC, state, nothing)
    assert state.dense_windows_left == 1


def test_curves_of_other_factors_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cf 160 .*not measured"):
        advance(replace(SPEC, max_cf=160.0), AT_20, _seen({10: 0.9, 20: 0.8}))


def test_a_state_of_other_options_is_refused() -> None:
    for call in (resume, lambda s, x: advance(s, x, _seen({10: 1.0}))):
        with pytest.raises(ConfigurationError, match="ladder of 1 factors"):
            call(replace(SPEC, max_cf=10.0), AT_20)


def test_ladders() -> None:
    assert Adaptive(max_cf=100).ladder() == (10.0, 20.0, 40.0, 80.0, 100.0)
    assert Adaptive(max_cf=80).ladder() == (10.0, 20.0, 40.0, 80.0)
    exponential = Adaptive(max_cf=10000, scaling="exponential")
    assert exponential.ladder() == (10.0, 20.0, 80.0, 1280.0, 10000.0)
    assert Adaptive(min_cf=1, max_cf=1).ladder() == (1.0,)
    assert Adaptive(min_cf=1, max_cf=1e12, scaling="exponential").ladder()[-1] == 1e12


_SPECS = st.builds(
    lambda low, high, eps, scaling, factor, wait: Adaptive(
        min_cf=low,
        max_cf=low * high,
        eps=eps,
        scaling=scaling,
        scaling_factor=factor,
        dense_wait_windows=wait,
    ),
    st.sampled_from([1.0, 1.5, 10.0]),
    st.sampled_from([1.0, 1.3, 64.0, 1000.0]),
    st.sampled_from([0.01, 0.5, 0.75, 1.0]),
    st.sampled_from(["geometric", "exponential"]),
    st.sampled_from([1.5, 2.0, 10.0]),
    st.integers(1, 5),
)


def _run(
    spec: Adaptive,
    windows: int,
    gain: Callable[[float, Decision], float],
    step_seconds: Callable[[float | None], float],
) -> list[Decision]:
    """Return the decisions; ``gain(cf, decision in force)`` and ``step_seconds(cf)`` answer."""
    state, decision = start(spec)
    decisions = [decision]
    for _ in range(windows):
        seen = Observation(
            _curves({cf: gain(cf, decision) for cf in spec.ladder()}) if decision.measure else None,
            step_seconds(decision.cf),
            100.0,
        )
        state, decision = advance(spec, state, seen)
        decisions.append(decision)
    return decisions


@given(_SPECS, st.data())
@settings(deadline=None, max_examples=80)
def test_whatever_is_seen_the_factor_stays_in_bounds(spec: Adaptive, data: st.DataObject) -> None:
    number = st.one_of(
        st.floats(0.0, 1.0), st.just(1.0), st.sampled_from([math.nan, math.inf, 0.0])
    )
    state, decision = start(spec)
    for window in range(25):
        assert decision.cf is None or spec.min_cf <= decision.cf <= spec.max_cf
        assert decision.cf is None or (decision.cf in spec.ladder() and decision.measure)
        assert any(character.isdigit() for character in decision.reason)
        assert resume(spec, state).measure == decision.measure
        gains = {cf: data.draw(number) for cf in spec.ladder()}
        seen = _seen(gains, raw=data.draw(number) * 10, step_seconds=data.draw(number))
        restored = ControllerState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert restored == state
        previous = decision.cf
        state, decision = advance(spec, state, seen)
        assert (state, decision) == advance(spec, restored, seen)
        assert decision.changed == (decision.cf != previous)
        assert state.windows == window + 1


@given(_SPECS, st.floats(0.001, 3.0))
@settings(deadline=None, max_examples=120)
def test_settles_on_the_largest_factor_that_passes(spec: Adaptive, fall: float) -> None:
    """With throughput rising all the way, only eps and max_cf limit the factor."""
    ladder = spec.ladder()

    def gain(cf: float, decision: Decision) -> float:
        return float(cf ** (-fall))

    def step_seconds(cf: float | None) -> float:
        if cf is None:
            return 1.0
        return gain(cf, start(spec)[1]) / 2.0 ** ladder.index(cf)  # T_c doubles per rung

    decisions = _run(spec, len(ladder) + 2, gain, step_seconds)
    passing = [cf for cf in ladder if cf ** (-fall) >= spec.eps]
    assert decisions[-1].cf == decisions[-2].cf == (passing[-1] if passing else None)


@pytest.mark.parametrize("scaling", ["geometric", "exponential"])
def test_both_scalings_climb_rung_by_rung(scaling: str) -> None:
    spec = Adaptive(min_cf=10, max_cf=1000, scaling=scaling)
    ladder = spec.ladder()
    decisions = _run(spec, len(ladder), lambda cf, _: 0.9, lambda cf: 1.0 / (cf or 1.0))
    assert tuple(decision.cf for decision in decisions) == (*ladder, ladder[-1])


@given(_SPECS, st.floats(1.0, 3.0), st.floats(0.01, 1.0), st.floats(0.05, 2.0))
@settings(deadline=None, max_examples=120)
def test_does_not_flip_between_dense_and_compressed(
    spec: Adaptive, flattery: float, at_min: float, fall: float
) -> None:
    """The gain looks better after dense than it is under compression: the trap of section 4."""

    def gain(cf: float, decision: Decision) -> float:
        true = float(at_min * (cf / spec.min_cf) ** (-fall))
        return min(1.0, true * flattery) if decision.cf is None else true

    decisions = _run(spec, 300, gain, lambda cf: 1.0 / (cf or 1.0))
    flips = sum((before.cf is None) != (after.cf is None) for before, after in pairwise(decisions))
    # Waits of w, 2w, 4w, 8w, 16w, 16w, ... windows between the tries.
    assert flips <= 2 * (5 + 300 // (MAX_WAIT_FACTOR * spec.dense_wait_windows))
    run = 0
    for before, after in pairwise(decisions):
        run = run + 1 if before.cf is None else 0
        assert before.cf is not None or after.cf is None or run >= spec.dense_wait_windows


def test_a_gain_that_sinks_after_the_raise_settles_below() -> None:
    """Each raised rung fails once it is in force: the ceiling ends the climbing."""

    def gain(cf: float, decision: Decision) -> float:
        return 0.9 if cf < 40 or decision.cf != cf else 0.6

    decisions = _run(SPEC, 30, gain, lambda cf: 1.0 / (cf or 1.0))
    assert [decision.cf for decision in decisions[:5]] == [10.0, 20.0, 40.0, 20.0, 20.0]
    assert {decision.cf for decision in decisions[3:]} == {20.0}


def test_everything_must_be_sent() -> None:
    """eps = 1 with min_cf = 1 keeps sending all; with min_cf = 10 it ends dense."""
    exact = Adaptive(min_cf=1, max_cf=100, eps=1.0)
    decisions = _run(exact, 10, lambda cf, _: 1.0 if cf == 1 else 0.99, lambda cf: 1.0)
    assert {decision.cf for decision in decisions} == {1.0}
    lossy = Adaptive(min_cf=10, max_cf=100, eps=1.0)
    decisions = _run(lossy, 50, lambda cf, _: 0.99, lambda cf: 1.0)
    assert {decision.cf for decision in decisions[1:]} == {None}


def test_one_factor_only() -> None:
    spec = Adaptive(min_cf=10, max_cf=10)
    decisions = _run(spec, 10, lambda cf, _: 0.9, lambda cf: 1.0)
    assert {(decision.cf, decision.measure) for decision in decisions} == {(10.0, True)}


def test_rounding_of_sums_does_not_fail_an_exact_gain() -> None:
    """Kept and total are summed over ranks apart; a last bit must not count as loss."""
    spec = Adaptive(min_cf=1, max_cf=1, eps=1.0)
    _, decision = advance(spec, start(spec)[0], _seen({1: 1.0 - 1e-15}))
    assert decision.cf == 1.0
