"""The planner against simulated ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.balance.timing import StepTiming, WindowTiming, summarise
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError, RankMismatchError
from hvd_hetero.planning.planner import PlannerConfig, PlannerState, advance, first_plan

WINDOW_STEPS = 10


class Cluster:
    """Simulated ranks: seconds per sample, fixed seconds, relative noise of every step."""

    def __init__(
        self, slopes: list[float], *, fixed: float = 0.01, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.slopes, self.fixed, self.noise = np.array(slopes), fixed, noise
        self.rng = np.random.default_rng(seed)
        self.exchange = (0.01, 0.005)

    @property
    def share(self) -> float:
        return self.exchange[1] / sum(self.exchange)

    def windows(self, batches: tuple[int, ...]) -> list[WindowTiming]:
        steps: list[list[StepTiming]] = [[] for _ in batches]
        for _ in range(WINDOW_STEPS):
            noise = 1 + self.rng.uniform(-self.noise, self.noise, len(batches))
            done = (self.slopes * batches + self.fixed) * noise
            ready = done / 2
            end = max(done.max(), ready.max() + self.exchange[0]) + self.exchange[1]
            for rank, batch in enumerate(batches):
                steps[rank].append(StepTiming(batch, ready[rank], done[rank], end))
        return [summarise(each) for each in steps]

    def run(
        self, config: PlannerConfig, windows: int, state: PlannerState | None = None
    ) -> list[PlannerState]:
        """States before, and after each of ``windows`` windows."""
        states = [state or PlannerState(first_plan(config, len(self.slopes)))]
        for _ in range(windows):
            batches = states[-1].plan.local_batches
            states.append(advance(config, states[-1], self.windows(batches), self.share))
        return states


def config(ranks: int, total: int, **options: object) -> PlannerConfig:
    bounds = options.pop("bounds", None) or Bounds.build(ranks, total)
    return PlannerConfig(total, bounds, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_speeds_1_2_2_4_are_found_in_three_windows(seed: int) -> None:
    cluster = Cluster([1e-3, 2e-3, 2e-3, 4e-3], fixed=5e-3, noise=0.05, seed=seed)
    states = cluster.run(config(4, 512), 3)
    for batch, part in zip(states[-1].plan.local_batches, (4, 2, 2, 1), strict=True):
        assert batch == pytest.approx(512 * part / 9, rel=0.15)
    assert states[0].plan.local_batches == (128,) * 4
    assert states[1].reason.startswith("in proportion to speed: predicted")


def test_equal_speeds_and_noise_change_nothing() -> None:
    """S41: +-10 % noise around equal speed for 200 steps: at most one change of plan."""
    changes = []
    for seed in range(40):
        cluster = Cluster([1e-3] * 4, noise=0.1, seed=seed)
        states = cluster.run(config(4, 256), 200 // WINDOW_STEPS)
        changes.append(states[-1].plan.version)
        assert all(state.reason.startswith("kept: ") for state in states[1:] if not changes[-1])
    assert max(changes) <= 1
    assert np.mean(changes) < 0.2


@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("balanced", [False, True])
def test_a_real_slowdown_is_acted_on_in_the_next_window(
    factor: float, seed: int, balanced: bool
) -> None:
    """S41: one rank gets slower, in a cluster that stood still and in one that was balanced."""
    slopes = [1e-3, 2e-3, 2e-3, 4e-3] if balanced else [1e-3] * 4
    cluster = Cluster(slopes, noise=0.1, seed=seed)
    before = cluster.run(config(4, 256), 10)[-1]
    cluster.slopes[1] *= factor
    after = cluster.run(config(4, 256), 1, before)[-1]
    assert after.plan.version == before.plan.version + 1
    assert "speed changed on rank 1" in after.reason
    ratio = after.plan.local_batches[1] / before.plan.local_batches[1]
    assert 0.6 / factor < ratio < 1.5 / factor  # ideal near 1.2 / factor
    settled = cluster.run(config(4, 256), 5, after)[-1]
    assert settled.plan.version <= after.plan.version + 2


def test_mixed_clusters_settle() -> None:
    """S41, A17: after the search the plan stays, in spite of noise."""
    for seed in range(10):
        cluster = Cluster([1e-3, 2e-3, 2e-3, 4e-3], fixed=0.02, noise=0.1, seed=seed)
        states = cluster.run(config(4, 256), 25)
        assert states[-1].plan.version <= 3


def test_optperf_beats_proportional_where_costs_are_fixed() -> None:
    """Half of the slow ranks' time is fixed: the step comes within 3 % of the optimum."""
    cluster = Cluster([1e-3, 1e-3, 4e-3], fixed=0.1)
    batches = cluster.run(config(3, 240), 6)[-1].plan.local_batches
    done = cluster.slopes * batches + cluster.fixed
    assert done.max() <= 1.05 * (240 / (1e3 + 1e3 + 250) + 0.1)


def test_predictions_match_what_is_measured() -> None:
    cluster = Cluster([1e-3, 2e-3, 2e-3, 4e-3], noise=0.0)
    state = cluster.run(config(4, 512), 6)[-1]
    measured = cluster.windows(state.plan.local_batches)[0].step_seconds
    assert state.plan.predicted_step_seconds == pytest.approx(measured, rel=0.07)


def test_a_fixed_plan_never_changes() -> None:
    fixed = config(2, 16, fixed_local_batches=(12, 4))
    states = Cluster([1e-3, 9e-3], noise=0.1).run(fixed, 10)
    assert {state.plan for state in states} == {first_plan(fixed, 2)}
    assert states[-1].plan.local_batches == (12, 4)
    assert states[-1].reason == "kept: fixed_local_batches"
    assert states[-1].windows == 10


def test_equal_bounds_and_one_rank() -> None:
    """S42: bounds (8, 8), and world size 1: they run and stay at 8."""
    states = Cluster([1e-3, 9e-3], noise=0.1).run(config(2, 16, bounds=Bounds((8, 8), (8, 8))), 6)
    assert [state.plan.local_batches for state in states] == [(8, 8)] * 7
    for one in (config(1, 8), config(1, 8, bounds=Bounds((8,), (64,)))):
        states = Cluster([1e-3], noise=0.1).run(one, 6)
        assert [state.plan.local_batches for state in states] == [(8,)] * 7


def test_minimum_holds() -> None:
    """S39: a rank 31 times slower still gets the configured minimum."""
    states = Cluster([1e-3, 31e-3], fixed=0.0).run(
        config(2, 32, bounds=Bounds((2, 2), (32, 32))), 5
    )
    assert states[-1].plan.local_batches == (30, 2)


def test_granule() -> None:
    states = Cluster([1e-3, 3e-3], fixed=0.0).run(config(2, 66, granule=8), 5)
    for state in states:
        assert sorted(b % 8 for b in state.plan.local_batches) == [0, 2]
        assert sum(state.plan.local_batches) == 66
    assert states[-1].plan.local_batches[0] in (48, 50)


def test_small_gains_are_not_worth_a_change() -> None:
    cluster = Cluster([1.00e-3, 1.05e-3], fixed=0.0)
    state = cluster.run(config(2, 400), 3)[-1]
    assert state.plan.version == 0
    assert state.reason.startswith("kept: predicted gain 2.") and "min_gain 5.0%" in state.reason
    assert cluster.run(config(2, 400, min_gain=0.0), 1)[-1].reason.endswith("speed)")
    assert cluster.run(config(2, 400, min_gain=0.02), 20)[-1].plan.version >= 1


def test_new_bounds_replace_a_plan_that_breaks_them() -> None:
    """S43: a cap that is learnt later is obeyed at once, whatever the gain."""
    cluster = Cluster([1e-3] * 2)
    before = cluster.run(config(2, 40), 2)[-1]
    capped = config(2, 40, bounds=Bounds((1, 1), (40, 15)))
    after = cluster.run(capped, 1, before)[-1]
    assert after.plan.local_batches == (25, 15)
    assert "local batch 20 of rank 1 is outside its bounds 1..15" in after.reason
    grown = cluster.run(config(2, 50), 1, before)[-1]
    assert grown.plan.global_batch_size == 50 and "global batch 40 -> 50" in grown.reason


def test_a_plan_not_timed_yet_is_given_one_window() -> None:
    """Loader workers run ahead: the window after a change may still hold the old sizes."""
    cluster, spec = Cluster([1e-3, 3e-3]), config(2, 64)
    changed = cluster.run(spec, 1)[-1]
    assert changed.plan.version == 1
    old = cluster.windows((32, 32))
    waiting = advance(spec, changed, old, cluster.share)
    assert waiting.plan == changed.plan and "has not been timed" in waiting.reason
    assert "has not been timed" not in advance(spec, waiting, old, cluster.share).reason


def test_advance_is_pure() -> None:
    cluster, spec = Cluster([1e-3, 3e-3]), config(2, 64)
    state = PlannerState(first_plan(spec, 2))
    copy = dataclasses.replace(state)
    windows = cluster.windows((32, 32))
    first = advance(spec, state, windows, 0.3)
    assert state == copy and advance(spec, state, windows, 0.3) == first


def test_malformed() -> None:
    with pytest.raises(InfeasibleBatchError, match="sum to 15, but global_batch_size=16"):
        config(2, 16, fixed_local_batches=(12, 3))
    with pytest.raises(InfeasibleBatchError, match=r"fixed_local_batches\[0\]=12.*1..10"):
        config(2, 16, bounds=Bounds((1, 1), (10, 10)), fixed_local_batches=(12, 4))
    with pytest.raises(ConfigurationError, match="3 numbers for 2 ranks"):
        config(2, 16, fixed_local_batches=(12, 3, 1))
    with pytest.raises(InfeasibleBatchError, match="granule=8"):
        config(2, 16, bounds=Bounds((9, 1), (15, 15)), granule=8)
    with pytest.raises(ConfigurationError, match=r"min_gain=1\.0"):
        config(2, 16, min_gain=1.0)
    with pytest.raises(ConfigurationError, match="ranks=3"):
        first_plan(config(2, 16), 3)
    with pytest.raises(RankMismatchError, match="1 windows and bounds for 2 ranks"):
        spec = config(2, 16)
        windows = Cluster([1e-3, 1e-3]).windows((8, 8))
        advance(spec, PlannerState(first_plan(spec, 2)), windows[:1], 0.5)
