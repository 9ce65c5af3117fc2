"""Policies in a toy world: what they settle on, how fast, and every rule by itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression import controller
from hvd_hetero.compression.gain import Worth
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.policy import Decision, PolicyState, advance, resume, start
from hvd_hetero.planning.runaway import DRAIN_WINDOWS, QUIET_WINDOWS
from hvd_hetero.planning.step_time import DENSE, Option
from hvd_hetero.planning.worth import (
    CHANGED,
    cost,
    gain_and_rho,
    learn,
    seconds,
    shared_worth,
)
from tests.unit.planning.policy_world import MEGABIT, World, run

MODEL = Adaptive(policy="model", max_cf=1000)
GRAVAC = Adaptive(policy="gravac", max_cf=1000, eps=0.5)
FIXED = Adaptive(policy="fixed", min_cf=100, max_cf=100)
WRONG_MODELS = ((1.0, 1.0, 1.0), (1.2, 0.9, 1.2), (0.85, 1.15, 0.85), (1.2, 1.2, 1.0))

# ---- "model" ------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["gain", "residual"])
@pytest.mark.parametrize("megabits", [20, 200, 1000, 10_000, 40_000])
@pytest.mark.parametrize("compute_seconds", [0.01, 0.1, 0.5])
def test_settles_within_two_windows_on_the_best_option(
    objective: str, megabits: float, compute_seconds: float
) -> None:
    """Its true J is within 5 % of that of the best option, static over all of them."""
    spec = replace(MODEL, objective=objective)
    for seed in range(5):
        world = World(
            spec, megabits * MEGABIT, compute_seconds=compute_seconds, noise=0.02, seed=seed
        )
        _, decisions = run(world, 8)
        costs = world.costs()
        for decision in decisions[2:]:
            assert costs[decision.option] <= 1.05 * min(costs.values()) * 1.02


def test_settles_in_most_worlds_although_its_model_is_wrong() -> None:
    """Predictions up to 20 % off, of every collective another way, and 3 % noise."""
    ratios = []
    for megabits, errors, seed, compute_seconds in product(
        (20, 200, 1000, 10_000), WRONG_MODELS, range(3), (0.01, 0.1)
    ):
        world = World(
            MODEL,
            megabits * MEGABIT,
            compute_seconds=compute_seconds,
            model_error=errors,
            noise=0.03,
            seed=seed,
        )
        _, decisions = run(world, 8)
        costs = world.costs()
        ratios.append(costs[decisions[-1].option] / min(costs.values()))
    assert sum(ratio <= 1.05 for ratio in ratios) >= 0.9 * len(ratios)
    assert max(ratios) < 1.2


@pytest.mark.parametrize("megabits", [200, 1000, 10_000])
def test_changes_rarely_once_settled(megabits: float) -> None:
    world = World(MODEL, megabits * MEGABIT, noise=0.03, seed=3)
    _, decisions = run(world, 100)
    changes = sum(a.option != b.option for a, b in pairwise(decisions[2:]))
    assert changes <= 8


def test_goes_back_when_the_change_measured_worse() -> None:
    """Compression predicted three times as fast as it is: one window, and not again soon."""
    world = World(replace(MODEL, exchange="allgather"), 20_000 * MEGABIT, compute_seconds=0.3)
    predicted = {
        option: time if option == DENSE else time / 3
        for option, time in world.step_seconds().items()
    }
    state, decision = start(world.spec)
    assert decision == Decision(
        None, "dense", "one window without compression, to measure", False, True
    )
    seen = replace(world.observe(decision), predicted=predicted)
    state, decision = advance(world.spec, state, seen)
    assert decision.cf is not None and decision.changed and decision.measure
    assert decision.reason.startswith("compressing with CF ")
    seen = replace(world.observe(decision), predicted=predicted)
    state, back = advance(world.spec, state, seen)
    assert back.cf is None and "J was measured as" in back.reason
    assert state.dense_wait == 2 * MODEL.dense_wait_windows
    again = 0
    for _ in range(40):
        seen = replace(world.observe(back), predicted=predicted)
        state, back = advance(world.spec, state, seen)
        again += back.cf is not None
    assert again == 0


def test_uses_dense_only_if_it_may() -> None:
    world = World(replace(MODEL, do_no_harm=False), 1e6 * MEGABIT)
    _, decisions = run(world, 10)
    assert decisions[0].cf == 10.0
    assert all(decision.cf is not None for decision in decisions)


# ---- do no harm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["gravac", "model"])
@pytest.mark.parametrize("errors", WRONG_MODELS)
@pytest.mark.parametrize("megabits", [20_000, 100_000])
def test_dense_within_fifty_steps_and_back_when_the_network_slows(
    policy: str, errors: tuple[float, float, float], megabits: float
) -> None:
    spec = replace(GRAVAC, policy=policy)
    for seed in range(4):
        world = World(
            spec,
            megabits * MEGABIT,
            compute_seconds=0.3,
            compress_scale=2.0,
            model_error=errors,
            noise=0.03,
            rho_at_10=0.2,
            seed=seed,
        )
        costs = world.costs()
        assert min(value for option, value in costs.items() if option.cf) > 1.1 * costs[DENSE]
        state, decisions = run(world, 5)
        assert 5 * spec.window == 50
        assert decisions[5].option == DENSE
        state, more = run(world, 60, state, decisions[-1])
        compressed = sum(decision.cf is not None for decision in more)
        sampled = sum(decision.measure for decision in more)
        assert compressed <= 3 and sampled <= 8  # looked at rarely
        world.bandwidth = 50 * MEGABIT
        _, slow = run(world, 12, state, more[-1])
        assert slow[-1].cf is not None


def test_where_compute_hides_the_exchange_nobody_looks_again() -> None:
    world = World(MODEL, 1e6 * MEGABIT, compute_seconds=0.5, noise=0.03)
    _, decisions = run(world, 100)
    assert {decision.option for decision in decisions} == {DENSE}
    assert [decision.measure for decision in decisions[1:]] == [False] * 100


def test_gravac_tries_dense_for_a_window_and_measures_both() -> None:
    """Dense predicted 20 % worse was never measured: one window decides, then it is known."""
    world = World(GRAVAC, 6500 * MEGABIT, rho_at_10=0.2, compute_seconds=0.01)
    costs = world.costs()
    here = min(costs[Option(10.0, how)] for how in world.strategies)
    assert 1.0 < costs[DENSE] / here < 1.3
    _, decisions = run(world, 12)
    assert [decision.cf for decision in decisions[:3]] == [10.0, None, 10.0]
    assert "to compare" in decisions[1].reason and decisions[1].measure
    assert decisions[2].reason.startswith("compressing with")
    assert all(decision.cf is not None for decision in decisions[2:])


@pytest.mark.parametrize(("dense_seconds", "stays"), [(0.97, True), (1.0, True), (1.03, False)])
def test_after_a_trial_the_measured_decide_without_a_margin(
    dense_seconds: float, stays: bool
) -> None:
    world = World(replace(GRAVAC, objective="gain", exchange="allgather"), 1e9)
    ten = Option(10.0, "allgather")
    predicted = {DENSE: 1.0, ten: world.gain(10.0)}  # J is 1 for both
    state, decision = start(world.spec)
    seen = replace(world.observe(decision), predicted=predicted, step_seconds=predicted[ten])
    state, decision = advance(world.spec, state, seen)
    assert decision.option == DENSE
    seen = replace(world.observe(decision), predicted=predicted, step_seconds=dense_seconds)
    _, decision = advance(world.spec, state, seen)
    assert decision.option == (DENSE if stays else ten)


@pytest.mark.parametrize(("other_seconds", "changes"), [(0.97, False), (0.9, True)])
def test_a_small_win_is_not_worth_a_change(other_seconds: float, changes: bool) -> None:
    spec = replace(MODEL, objective="gain", exchange="allgather")
    world = World(spec, 1e9)
    ten, twenty = Option(10.0, "allgather"), Option(20.0, "allgather")
    state = replace(start(spec)[0], option=ten)
    seen = replace(
        world.observe(start(spec)[1]),
        option=ten,
        step_seconds=world.gain(10.0),
        predicted={
            DENSE: 9.0,
            ten: world.gain(10.0),
            twenty: other_seconds * world.gain(20.0),
        },
    )
    _, decision = advance(spec, state, seen)
    assert decision.option == (twenty if changes else ten)
    assert ("less than 5% to win" in decision.reason) != changes


def test_fixed_is_never_dense() -> None:
    world = World(FIXED, 1e6 * MEGABIT, compress_scale=10.0)
    _, decisions = run(world, 10)
    assert {decision.cf for decision in decisions} == {100.0}
    assert all(decision.measure for decision in decisions)


# ---- "gravac" -----------------------------------------------------------------------------------


def test_gravac_obeys_its_own_rules() -> None:
    """Without do-no-harm and below all caps, the decisions are the controller's."""
    spec = replace(GRAVAC, do_no_harm=False, exchange="allgather", eps=0.3)
    world = World(spec, 200 * MEGABIT)
    state, decisions = run(world, 10)
    search, choice = controller.start(spec)
    for before, decision in pairwise(decisions):
        seen = world.observe(before)
        search, choice = controller.advance(
            spec,
            search,
            controller.Observation(seen.curves, seen.step_seconds, seen.samples_per_step),
        )
        assert (decision.cf, decision.reason) == (choice.cf, choice.reason)
    assert state.controller == search
    assert decisions[-1].cf == 40.0  # the last whose gain exceeds eps, by 0.4 * 4**0.75


def test_gravac_dense_by_eps_is_its_own_dense() -> None:
    """No factor passes: its waits and its margin, not those of do-no-harm."""
    world = World(replace(GRAVAC, eps=0.99), 20 * MEGABIT)
    state, decisions = run(world, 20)
    assert all(decision.cf is None for decision in decisions[1:])
    assert [decision.measure for decision in decisions[1:6]] == [False] * 3 + [True, False]
    assert state.controller is not None and state.controller.rung is None


# ---- run-away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [MODEL, replace(GRAVAC, eps=0.01)])
def test_a_residual_that_runs_away_lowers_the_factor_rung_by_rung(spec: Adaptive) -> None:
    """Above CF 40 the residual grows: steps down with a wait between, and says so."""
    world = World(spec, 5 * MEGABIT)
    state, decisions = run(world, 8)
    high = decisions[-1].cf
    assert high is not None and high > 80
    world.runaway_rho = lambda cf: 200.0 if (cf or 0.0) > 40 else 5.0
    state, decisions = run(world, 40, state, decisions[-1])
    factors = [decision.cf or 0.0 for decision in decisions]
    lowered = [decision for decision in decisions if "exceeds max_rho 50" in decision.reason]
    assert [decision.cf for decision in lowered][-1] == 40.0
    ladder = spec.ladder()
    for before, after in pairwise(factors):
        assert ladder.index(after) >= ladder.index(before) - 1
    places = [index for index, decision in enumerate(decisions) if decision in lowered]
    assert all(b - a > DRAIN_WINDOWS for a, b in pairwise(places))
    assert max(factors[places[-1] :]) <= 80  # the cap is lifted, one rung at a time


def test_the_cap_is_lifted_after_quiet_windows() -> None:
    world = World(MODEL, 5 * MEGABIT)
    state, decisions = run(world, 4)
    rung = MODEL.ladder().index(decisions[-1].cf)
    state = replace(state, cap=rung - 1, cap_windows=0)
    state, decisions = run(world, QUIET_WINDOWS + 2, state, decisions[-1])
    assert state.cap == rung


def test_a_gradient_that_explodes_lowers_the_factor() -> None:
    world = World(MODEL, 5 * MEGABIT)
    state, decisions = run(world, 4)
    before = decisions[-1].cf
    world.raw_energy = 100.0
    state, decision = advance(MODEL, state, world.observe(decisions[-1]))
    assert decision.cf is not None and before is not None and decision.cf < before
    assert "norm ran from 1 to 10" in decision.reason


def test_no_factor_above_max_rho_is_chosen() -> None:
    world = World(replace(MODEL, max_rho=1.0, exchange="allgather"), 5 * MEGABIT)
    _, decisions = run(world, 5)
    assert decisions[-1].cf == 20.0  # rho 0.67; at CF 40 it is 1.13
    shared = World(replace(MODEL, max_rho=1.0, exchange="shared-index"), 5 * MEGABIT)
    _, decisions = run(shared, 5)
    assert decisions[-1].cf == 10.0  # rho is 4**(1/3) times as large


def test_the_lowest_factor_stays_whatever_runs_away() -> None:
    world = World(replace(GRAVAC, do_no_harm=False, eps=0.8), 20 * MEGABIT)
    world.runaway_rho = lambda cf: 1e6
    _, decisions = run(world, 10)
    assert {decision.cf for decision in decisions} == {10.0}


# ---- exchange, memory, state --------------------------------------------------------------------


def test_the_exchange_follows_the_seconds_with_hysteresis() -> None:
    spec = replace(GRAVAC, min_cf=100, max_cf=100, eps=0.001, do_no_harm=False)
    world = World(spec, 100 * MEGABIT)
    gathered, shared = Option(100.0, "allgather"), Option(100.0, "shared-index")
    state, decision = start(spec, world.step_seconds() | {gathered: 1.0, shared: 0.5})
    assert decision.option == shared and not decision.changed
    for slower, expected in ((1.05, shared), (1.2, gathered)):
        seen = replace(world.observe(decision), predicted={gathered: 1.0, shared: slower})
        _, then = advance(spec, state, seen)
        assert then.option == expected
    assert start(spec)[1].option == gathered
    forced = replace(spec, exchange="shared-index")
    assert start(forced, {gathered: 0.1, shared: 9.0})[1].option == shared


def test_fixed_keeps_its_exchange_whatever_the_seconds() -> None:
    """Else a run at a fixed factor would not repeat."""
    world = World(FIXED, 100 * MEGABIT)
    gathered, shared = Option(100.0, "allgather"), Option(100.0, "shared-index")
    state, decision = start(FIXED)
    seen = replace(world.observe(decision), predicted={gathered: 9.0, shared: 0.1})
    assert advance(FIXED, state, seen)[1].option == decision.option == gathered


def test_what_was_measured_corrects_what_is_predicted() -> None:
    world = World(MODEL, 100 * MEGABIT)
    state, decision = start(MODEL)
    seen = world.observe(decision)
    slow = replace(seen, step_seconds=1.5 * seen.predicted[DENSE])
    state = learn(state, slow)
    ten, twenty = Option(10.0, "allgather"), Option(20.0, "allgather")
    shared = Option(10.0, "shared-index")
    assert seconds(state, slow, DENSE) == pytest.approx(slow.step_seconds)
    assert seconds(state, slow, ten) == pytest.approx(1.5 * slow.predicted[ten])
    state = learn(state, replace(seen, option=ten, step_seconds=1.2 * seen.predicted[ten]))
    assert seconds(state, seen, twenty) == pytest.approx(1.2 * seen.predicted[twenty])
    middle = math.sqrt(1.5**0.98 * 1.2 * 1.5**0.02)
    assert seconds(state, seen, shared) == pytest.approx(middle * seen.predicted[shared], rel=0.01)
    # A jump beyond noise voids what was measured before.
    jump = replace(seen, option=ten, step_seconds=1.2 * CHANGED * 1.1 * seen.predicted[ten])
    assert set(learn(state, jump).corrections) == {ten}


@given(
    gain=st.floats(0.01, 1.0),
    rho=st.floats(0.0, 100.0),
    coherence=st.floats(1 / 64, 1.0),
    less=st.floats(0.1, 1.0),
)
def test_shared_indices_delay_more_the_more_ranks_differ(
    gain: float, rho: float, coherence: float, less: float
) -> None:
    same = shared_worth(Worth(gain, rho, 1.0))
    assert same == pytest.approx((gain, rho))
    near = shared_worth(Worth(gain, rho, coherence))
    far = shared_worth(Worth(gain, rho, coherence * less))
    assert far[0] <= near[0] + 1e-12 and near[0] <= gain + 1e-12
    assert far[1] >= near[1] - 1e-12 and near[1] >= rho - 1e-12


def test_what_options_are_worth() -> None:
    world = World(MODEL, 100 * MEGABIT, ranks=8)
    state = learn(start(MODEL)[0], world.observe(start(MODEL)[1]))
    known = state.worth[80.0]
    assert known.coherence == 1 / 8
    assert gain_and_rho(state, Option(80.0, "allgather")) == known[:2]
    assert gain_and_rho(state, Option(80.0, "shared-index")) == shared_worth(known)
    assert gain_and_rho(state, DENSE) == (1.0, 0.0)
    assert gain_and_rho(state, Option(15.0, "allgather")) is None


def test_without_predictions_nothing_is_changed() -> None:
    for spec in (MODEL, GRAVAC, FIXED):
        state, decision = start(spec)
        seen = replace(World(spec, 1e5).observe(decision), predicted={})
        after, then = advance(spec, state, seen)
        assert then.option in (decision.option, Option(20.0, "allgather"))
        assert after.corrections == {}


@pytest.mark.parametrize("step_seconds", [0.0, math.nan, math.inf, -1.0])
def test_a_window_without_a_step_time_decides_nothing(step_seconds: float) -> None:
    state, decision = start(MODEL)
    seen = replace(World(MODEL, 1e7).observe(decision), step_seconds=step_seconds)
    after, then = advance(MODEL, state, seen)
    assert after == replace(state, windows=1)
    assert then.option == decision.option and then.reason.startswith("kept: no step")


@given(
    spec=st.builds(
        Adaptive,
        policy=st.sampled_from(["gravac", "model"]),
        max_cf=st.sampled_from([10.0, 80.0, 5000.0]),
        objective=st.sampled_from(["gain", "residual"]),
        exchange=st.sampled_from(["auto", "allgather", "shared-index"]),
        eps=st.sampled_from([0.1, 0.5, 0.9]),
        max_rho=st.sampled_from([0.5, 5.0, 50.0]),
        do_no_harm=st.booleans(),
    ),
    bandwidth=st.floats(1e5, 1e11),
    noise=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 100),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_whatever_is_seen_the_laws_hold(
    spec: Adaptive, bandwidth: float, noise: float, seed: int, data: st.DataObject
) -> None:
    """Options stay legal, states survive JSON, the same input gives the same output."""
    world = World(spec, bandwidth, noise=noise, seed=seed)
    state, decision = start(spec, world.step_seconds())
    for _ in range(30):
        assert decision.cf is None or decision.cf in spec.ladder()
        assert decision.cf is None or decision.measure
        assert decision.cf is not None or spec.do_no_harm or spec.policy == "gravac"
        assert decision.strategy in ("dense", *world.strategies)
        assert decision.reason
        assert resume(spec, state) == replace(
            decision, reason=resume(spec, state).reason, changed=False
        )
        seen = world.observe(decision)
        wild = data.draw(st.sampled_from([None, math.nan, 1e9, 1e-9]))
        if wild is not None and seen.curves is not None:
            seen = replace(seen, curves=replace(seen.curves, raw_energy=wild))
        if data.draw(st.sampled_from([False, False, False, True])):
            world.bandwidth *= data.draw(st.sampled_from([0.01, 0.5, 100.0]))
        restored = PolicyState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert restored == state
        before = decision
        state, decision = advance(spec, state, seen)
        assert (state, decision) == advance(spec, restored, seen)
        assert decision.changed == (decision.option != before.option)
        assert state.option == decision.option


def test_a_state_of_other_options_is_refused() -> None:
    state, _ = start(GRAVAC)
    with pytest.raises(ConfigurationError, match="other compression options"):
        resume(MODEL, state)
    with pytest.raises(ConfigurationError, match="other compression options"):
        resume(replace(GRAVAC, min_cf=7.0), state)


def test_costs_of_the_unknown_are_infinite() -> None:
    world = World(MODEL, 1e7)
    state, decision = start(MODEL)
    seen = replace(world.observe(decision), curves=None)
    assert cost(MODEL, state, seen, Option(10.0, "allgather")) == math.inf
    assert cost(MODEL, state, seen, DENSE) == pytest.approx(seen.predicted[DENSE])


def test_a_state_of_an_earlier_version() -> None:
    """What was added later may be missing; what cannot be read is an error with a remedy."""
    world = World(MODEL, 100 * MEGABIT)
    state = learn(start(MODEL)[0], world.observe(start(MODEL)[1]))
    saved = json.loads(json.dumps(state.to_dict()))
    assert PolicyState.from_dict(saved) == state
    saved["worth"] = [one[:3] for one in saved["worth"]]  # without coherence
    assert PolicyState.from_dict(saved).worth[80.0][:2] == state.worth[80.0][:2]
    for broken in ({}, saved | {"worth": [[80.0]]}, saved | {"surprise": 1}):
        with pytest.raises(ConfigurationError, match="take state"):
            PolicyState.from_dict(broken)
