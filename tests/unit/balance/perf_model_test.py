"""The fit of a rank's two lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.optperf import Bounds, solve, step_seconds
from hvd_hetero.balance.perf_model import Line, RankModel, RankModelFit, TimingPoint
from hvd_hetero.errors import ConfigurationError

TRUTH = RankModel(ready=Line(1e-3, 0.01), done=Line(3e-3, 0.05))


def point(
    batch: int, truth: RankModel = TRUTH, factor: float = 1.0, steps: int = 10
) -> TimingPoint:
    ready, done = factor * truth.ready(batch), factor * truth.done(batch)
    return TimingPoint(batch, ready, done, (0.02 * done) ** 2, steps)


def test_unknown_until_two_sizes_were_seen() -> None:
    fit = RankModelFit()
    assert fit.model() is None and fit.estimate() is None and fit.latest is None
    fit = fit.observe([point(32)])
    assert fit.model() is None and fit.latest == point(32)
    fit = fit.observe([point(32)])
    assert fit.model() is None
    assert fit.observe([point(64)]).model() is not None


def test_prior_before_a_second_size() -> None:
    model = RankModelFit().observe([point(50)]).estimate()
    assert model is not None
    assert model.done.slope_seconds == pytest.approx(0.8 * TRUTH.done(50) / 50)
    assert model.done(50) == pytest.approx(TRUTH.done(50))
    assert model.ready(50) == pytest.approx(TRUTH.ready(50))


def test_recovers_the_lines_from_sizes_far_apart() -> None:
    fit = RankModelFit()
    for batch in (16, 64, 128, 32, 96):
        fit = fit.observe([point(batch)])
    model = fit.model()
    assert model is not None
    assert model.done.slope_seconds == pytest.approx(3e-3, rel=0.03)
    assert model.ready.slope_seconds == pytest.approx(1e-3, rel=0.1)
    for batch in (16, 64, 128):
        assert model.done(batch) == pytest.approx(TRUTH.done(batch), rel=0.05)


def test_nearly_equal_sizes_do_not_give_nonsense_slopes() -> None:
    """Two sizes 3 % apart, 10 % noise: plain least squares misses the slope by 300 % and more."""
    rng = np.random.default_rng(5)
    worst_plain, worst = 0.0, 0.0
    for _ in range(200):
        fit, seconds = RankModelFit(), []
        for batch in (64, 66):
            factor = float(np.median(1 + rng.normal(0, 0.1, 10)))
            done = factor * TRUTH.done(batch)
            seconds.append(done)
            fit = fit.observe([TimingPoint(batch, done / 3, done, (0.1 * done) ** 2, 10)])
        model = fit.model()
        assert model is not None
        worst_plain = max(worst_plain, abs((seconds[1] - seconds[0]) / 2 / 3e-3 - 1))
        worst = max(worst, abs(model.done.slope_seconds / 3e-3 - 1))
    assert worst_plain > 3.0
    assert worst < 0.3


def test_plans_from_nearly_equal_sizes_stay_close_to_the_ideal() -> None:
    """Speeds 1, 1, 1.5, 2, timed at two sizes 3 % apart with 10 % noise."""
    rng = np.random.default_rng(6)
    truth = [RankModel(Line(0.5e-3 * s, 5e-3), Line(1e-3 * s, 1e-2)) for s in (1, 1, 1.5, 2)]
    bounds = Bounds.build(4, 256)
    ideal = solve(truth, 256, bounds=bounds).step_seconds
    ratios = []
    for _ in range(100):
        models = []
        for rank in truth:
            fit = RankModelFit()
            for batch in (63, 65):
                factor = float(np.median(1 + rng.normal(0, 0.1, 20)))
                done = factor * rank.done(batch)
                new = TimingPoint(batch, factor * rank.ready(batch), done, (0.1 * done) ** 2, 20)
                fit = fit.observe([new])
            models.append(fit.model())
        plan = solve([m for m in models if m is not None], 256, bounds=bounds).local_batches
        ratios.append(step_seconds(truth, plan, 0.0, 0.0) / ideal)
    assert np.median(ratios) < 1.05
    assert max(ratios) < 1.15


@st.composite
def histories(draw: st.DrawFn) -> list[list[TimingPoint]]:
    def one() -> TimingPoint:
        done = draw(st.floats(1e-4, 10.0))
        return TimingPoint(
            batch=draw(st.integers(1, 300)),
            ready_seconds=done * draw(st.floats(0.0, 1.0)),
            done_seconds=done,
            variance=(done * draw(st.floats(0.0, 0.5))) ** 2,
            steps=draw(st.integers(1, 50)),
        )

    return [[one() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 6)))]


@settings(max_examples=200, deadline=None)
@given(histories())
def test_constraints_hold_for_any_history(history: list[list[TimingPoint]]) -> None:
    """c >= alpha > 0 and d >= beta >= 0, c within 0.05 to 1 of the least seconds per sample."""
    fit = RankModelFit()
    for points in history:
        fit = fit.observe(points)
    model = fit.estimate()
    assert model is not None
    slack = 1 + 1e-9
    assert 0.0 <= model.ready.slope_seconds <= model.done.slope_seconds * slack
    assert 0.0 <= model.ready.intercept_seconds <= model.done.intercept_seconds * slack + 1e-12
    weight = sum(p.weight for p in fit.points)
    batch = sum(p.weight * p.batch for p in fit.points) / weight
    done = sum(p.weight * p.done_seconds for p in fit.points) / weight
    least = min(done / batch, *(p.done_seconds / p.batch for p in fit.points))
    assert 0.05 / slack <= model.done.slope_seconds / least <= slack
    assert model.done(batch) == pytest.approx(done, rel=1e-6)
    assert RankModelFit.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit


def test_a_batch_of_one_does_not_make_samples_look_dear() -> None:
    """3 ms a step whatever the batch: a rank that was once given one sample can come back."""
    fit = RankModelFit()
    for batch in (64, 40, *[1] * 20):
        seconds = 3e-3 + 2e-5 * batch
        fit = fit.observe([TimingPoint(batch, seconds / 2, seconds, (1e-4) ** 2, 10)])
    model = fit.estimate()
    assert model is not None
    assert model.done(64) < 2 * (3e-3 + 2e-5 * 64)


def test_a_single_step_is_no_measure_of_the_noise() -> None:
    """One step has no spread; windows of one step must not make the noise look small."""
    fit = RankModelFit()
    for _ in range(30):
        fit = fit.observe([TimingPoint(8, 0.5, 1.0, 0.0, 1)])
    assert fit.noise == RankModelFit().noise


def test_a_real_slowdown_replaces_what_was_known_at_once() -> None:
    fit = RankModelFit()
    for batch in (32, 64, 96, 64):
        fit = fit.observe([point(batch)])
    assert not fit.changed
    slow = fit.observe([point(64, factor=3.0)])
    assert slow.changed
    model = slow.model()
    assert model is not None
    for batch in (32, 64, 128):  # the share of the fixed cost survives
        assert model.done(batch) == pytest.approx(3 * TRUTH.done(batch), rel=0.1)


def test_noise_is_no_slowdown() -> None:
    rng = np.random.default_rng(1)
    fit = RankModelFit()
    for _ in range(200):
        factor = float(np.median(1 + rng.uniform(-0.1, 0.1, 10)))
        fit = fit.observe([point(64, factor=factor)])
        assert not fit.changed
    assert fit.relative_error() < 0.02


def test_a_drift_is_followed() -> None:
    fit = RankModelFit()
    for step in range(30):
        fit = fit.observe([point(64, factor=1 + 0.02 * step)])
    model = fit.estimate()
    assert model is not None
    assert model.done(64) == pytest.approx(1.58 * TRUTH.done(64), rel=0.05)


def test_malformed() -> None:
    with pytest.raises(ConfigurationError, match="slope_seconds"):
        Line(-1.0, 0.0)
    with pytest.raises(ConfigurationError, match="intercept_seconds"):
        Line(1.0, float("nan"))
    with pytest.raises(ConfigurationError, match="ready_seconds"):
        TimingPoint(1, 2.0, 1.0, 0.0, 1)
    with pytest.raises(ConfigurationError, match="not a saved model"):
        RankModel.from_dict({})
    assert RankModel.from_dict(TRUTH.to_dict()) == TRUTH
