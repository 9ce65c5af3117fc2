"""What one job leaves to the next."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.balance.lines import TimingPoint
from hvd_hetero.balance.optperf import Bounds
from hvd_hetero.balance.perf_model import RankModelFit
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.planner import PlannerConfig, PlannerState
from hvd_hetero.planning.profile import Profile, first_state


def fit_of(seconds_per_sample: float) -> RankModelFit:
    """A rank that was seen at two sizes."""
    fit = RankModelFit()
    for batch in (8, 24):
        done = 1e-3 + seconds_per_sample * batch
        fit = fit.observe([TimingPoint(batch, done / 2, done, (0.01 * done) ** 2, 10)])
    return fit


def config(ranks: int, total: int = 64) -> PlannerConfig:
    return PlannerConfig(global_batch_size=total, bounds=Bounds.build(ranks, total))


def test_the_next_job_begins_balanced() -> None:
    profile = Profile(("a", "b"), (fit_of(1e-3), fit_of(3e-3)), (0.0, 0.001))
    state = first_state(config(2), Profile.from_dict(json.loads(json.dumps(profile.to_dict()))))
    fast, slow = state.plan.local_batches
    assert fast + slow == 64 and 2.5 < fast / slow < 3.5
    assert state.plan.version == 0 and "earlier job" in state.plan.reason
    assert state.plan.predicted_step_seconds is not None
    assert state.fits == profile.fits
    assert PlannerState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_without_a_profile_or_with_an_empty_one_it_begins_even() -> None:
    for profile in (None, Profile(("a", "b"), (RankModelFit(), RankModelFit()))):
        assert first_state(config(2), profile).plan.local_batches == (32, 32)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.randoms())
def test_models_follow_their_hosts(hosts: list[str], random: object) -> None:
    """However the ranks are numbered now: nobody gets the model of another kind of machine."""
    speeds = {"a": 1e-3, "b": 2e-3, "c": 3e-3}
    profile = Profile(tuple(hosts), tuple(fit_of(speeds[host]) for host in hosts))
    later = list(hosts)
    random.shuffle(later)  # type: ignore[attr-defined]
    own = profile.on(later)
    assert own is not None and own.fits == tuple(fit_of(speeds[host]) for host in later)
    fewer = profile.on(later[:-1])
    assert fewer is not None and fewer.exchange_seconds is None
    assert profile.on([*later, "a"]) is None and profile.on(["new"]) is None


@pytest.mark.parametrize("data", [{}, {"version": 2}, {"version": 1, "hosts": ["a"], "fits": 3}])
def test_what_is_no_profile_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="delete the file"):
        Profile.from_dict(data)
