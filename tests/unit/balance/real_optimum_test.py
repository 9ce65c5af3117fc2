"""OptPerf over real batches against linear programs, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.optperf import Instance, LinearProgram
from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.balance.optperf import Bounds, solve
from hvd_hetero.balance.real_optimum import RealSolution, solve_real
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError


def random_line(rng: np.random.Generator) -> Line:
    slope = rng.choice([0.0, rng.integers(1, 4) * 1e-3, rng.random() * 1e-2])
    return Line(float(slope), float(rng.choice([0.0, rng.random() * 2e-2, 1e-2])))


def random_instance(rng: np.random.Generator) -> Instance:
    ranks = int(rng.integers(1, 13))
    lower = rng.integers(1, 20, ranks)
    upper = lower + rng.integers(0, int(rng.choice([4, 40, 400])), ranks)
    return Instance(
        [RankModel(random_line(rng), random_line(rng)) for _ in range(ranks)],
        int(rng.integers(lower.sum(), upper.sum() + 1)),
        Bounds(tuple(lower.tolist()), tuple(upper.tolist())),
        float(rng.choice([0.0, rng.random() * 0.1])),
        float(rng.choice([1e-3, 1e-2])),
    )


def formula(instance: Instance, batches: tuple[float, ...]) -> float:
    ends = [
        max(model.done(b), model.ready(b) + instance.overlapped_seconds)
        for model, b in zip(instance.models, batches, strict=True)
    ]
    return max(ends) + instance.final_seconds


def check(instance: Instance, found: RealSolution) -> None:
    assert sum(found.local_batches) == pytest.approx(instance.total, rel=1e-12)
    limits = zip(instance.bounds.lower, found.local_batches, instance.bounds.upper, strict=True)
    assert all(low <= b <= high for low, b, high in limits)
    assert found.step_seconds == pytest.approx(formula(instance, found.local_batches), rel=1e-12)


def test_equals_the_linear_program_on_200_random_instances() -> None:
    """Bounds, flat lines and ties."""
    pytest.importorskip("scipy.optimize", reason="the linear program is solved by scipy")
    rng = np.random.default_rng(20240402)
    for _ in range(200):
        instance = random_instance(rng)
        found = instance.run(solve_real)
        check(instance, found)
        assert found.step_seconds == pytest.approx(LinearProgram(instance).solve(), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_whole_samples_are_never_better_and_at_most_one_sample_worse(seed: int) -> None:
    instance = random_instance(np.random.default_rng(seed))
    real, whole = instance.run(solve_real), instance.run(solve)
    check(instance, real)
    assert real.step_seconds <= whole.step_seconds * (1 + 1e-12)
    steepest = max(max(m.ready.slope_seconds, m.done.slope_seconds) for m in instance.models)
    assert whole.step_seconds <= (real.step_seconds + steepest) * (1 + 1e-12)


def test_known_answers() -> None:
    slow, fast = (RankModel(Line(c, 0.0), Line(c, 0.0)) for c in (3.0, 1.0))
    found = solve_real([slow, fast], 10, bounds=Bounds.build(2, 10), final_seconds=0.5)
    assert found.local_batches == pytest.approx((2.5, 7.5))
    assert found.step_seconds == pytest.approx(8.0)
    # Bound by the exchange: ready + T_o is later than done on both.
    model = RankModel(Line(1.0, 2.0), Line(2.0, 2.0))
    found = solve_real([model] * 2, 6, bounds=Bounds.build(2, 6), overlapped_seconds=9.0)
    assert found.local_batches == pytest.approx((3.0, 3.0))
    assert found.step_seconds == pytest.approx(14.0)


def test_flat_lines_jump() -> None:
    """Ranks that end at the same time whatever they take share what the others leave."""
    flat, rising = RankModel(Line(0.0, 0.1), Line(0.0, 4.0)), RankModel(Line(1, 0), Line(1, 0))
    found = solve_real([flat, rising, flat], 24, bounds=Bounds.build(3, 24))
    assert found.local_batches == pytest.approx((10.0, 4.0, 10.0))
    assert found.step_seconds == 4.0
    # Held at its lower bound, a rank sets the step; the others are balanced below it.
    found = solve_real([rising, flat, flat], 30, bounds=Bounds((10, 1, 1), (99, 99, 99)))
    assert found.local_batches == pytest.approx((10.0, 10.0, 10.0))
    assert found.step_seconds == 10.0


def test_bounds_that_leave_no_choice_and_one_rank() -> None:
    model = RankModel(Line(1e-3, 0.0), Line(2e-3, 0.0))
    assert solve_real([model] * 2, 16, bounds=Bounds((8, 8), (8, 8))).local_batches == (8, 8)
    assert solve_real([model], 9, bounds=Bounds((8,), (10,))).local_batches == pytest.approx((9,))


def test_infeasible_tells_the_numbers() -> None:
    model = RankModel(Line(1e-3, 0.0), Line(2e-3, 0.0))
    with pytest.raises(InfeasibleBatchError, match=r"global_batch_size=17: .* at most 16"):
        solve_real([model] * 2, 17, bounds=Bounds((1, 1), (8, 8)))
    with pytest.raises(ConfigurationError, match="1 rank models for 2 ranks"):
        solve_real([model], 14, bounds=Bounds((1, 1), (15, 15)))
    with pytest.raises(ConfigurationError, match="final_seconds"):
        solve_real([model], 4, bounds=Bounds((1,), (15,)), final_seconds=-1.0)
