"""Error feedback loses nothing: what was applied and what waits are the true gradients.

One launch for each launcher and number of ranks runs all courses; each test looks at one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.feedback_ranks import COURSES
from tests.parallel.launch import launches, run_ranks
from tests.parallel.scenarios import GLOBAL_BATCH, fixture_params, outcome

TOLERANCE = {"torch.float32": 1e-5, "torch.float64": 1e-12}
KEEPING = [name for name, course in COURSES.items() if not course.forget_residuals]
FORGETTING = [name for name, course in COURSES.items() if course.forget_residuals]


@pytest.fixture(
    scope="module", params=fixture_params([*launches((2,)), *launches((4,), ("mpirun",))])
)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every rank's outcomes of all courses."""
    launcher, ranks = request.param
    return run_ranks("tests.parallel.feedback_ranks:run", ranks, launcher, timeout_seconds=270)


def _series(results: list[dict[str, Any]], name: str, key: str) -> list[list[Any]]:
    """One list a step with every rank's value."""
    journals = [value["journal"] for value in outcome(results, name)]
    return [[entry[key] for entry in step] for step in zip(*journals, strict=True)]


@pytest.mark.parametrize("name", KEEPING)
def test_applied_and_residuals_are_the_true_gradients(
    results: list[dict[str, Any]], name: str
) -> None:
    """DESIGN section 4, feedback: at every step, while CF and batches change, to 1e-5 (fp32)."""
    tolerance = TOLERANCE[str(COURSES[name].dtype)]
    for step, errors in enumerate(_series(results, name, "error")):
        assert max(errors) <= tolerance, f"step {step}"

    # There was something to keep: residuals far above the tolerance, and gradients too.
    residuals = [max(one) for one in _series(results, name, "residual")]
    assert sum(residual > 1e-2 for residual in residuals) >= 4
    assert max(_series(results, name, "truth")[-1]) > 0.1


@pytest.mark.parametrize("name", FORGETTING)
def test_without_feedback_the_law_breaks(results: list[dict[str, Any]], name: str) -> None:
    """The same measurement with residuals thrown away after each step must see the loss."""
    errors = _series(results, name, "error")
    assert max(errors[3]) > 1e-2
    assert max(errors[-1]) > 1e-2


@pytest.mark.parametrize("name", COURSES)
def test_replicas_are_bit_equal_at_every_step(results: list[dict[str, Any]], name: str) -> None:
    """DESIGN section 4: contributions are added in rank order, so that replicas cannot drift."""
    digests = _series(results, name, "digest")
    for step, ranks in enumerate(digests):
        assert len(set(ranks)) == 1, f"step {step}"
    assert len({ranks[0] for ranks in digests}) == len(digests)  # every step moved something


@pytest.mark.parametrize("name", COURSES)
def test_batches_were_unequal_and_changed(results: list[dict[str, Any]], name: str) -> None:
    """The law was looked at under several plans, short last batches included."""
    steps = _series(results, name, "sizes")
    passes = [one_pass for step in steps for one_pass in zip(*step, strict=True)]
    full = {sizes for sizes in passes if sum(sizes) == GLOBAL_BATCH}
    assert len(full) >= 5
    assert any(max(sizes) > 4 * min(sizes) for sizes in full)
    assert any(sum(sizes) < GLOBAL_BATCH for sizes in passes)


@pytest.mark.parametrize("name", COURSES)
def test_all_ranks_used_the_same_factor_and_exchange(
    results: list[dict[str, Any]], name: str
) -> None:
    """DESIGN section 3, rule 12: decided once, applied by all at the same step."""
    for key in ("cf", "strategy"):
        for step, ranks in enumerate(_series(results, name, key)):
            assert len(set(ranks)) == 1, f"step {step}"


def test_the_factor_changed_as_forced(results: list[dict[str, Any]]) -> None:
    """Several factors, a dense fallback that is flushed over four steps, and back."""
    values = outcome(results, "changing")
    journal = values[0]["journal"]
    expected = [8.0] * 4 + [20.0] * 4 + [2000.0] * 4 + [None] * 6 + [6.0] * 4 + [None] * 2
    assert [entry["cf"] for entry in journal] == expected
    strategies = [entry["strategy"] for entry in journal]
    assert strategies == ["dense" if cf is None else "allgather" for cf in expected]
    waiting = [entry["residual"] for entry in journal]
    assert all(residual > 0 for residual in waiting[:15])
    assert waiting[15:18] == [0, 0, 0]  # flushed by the fourth dense step
    assert waiting[22:] == [0, 0]  # flushed at once
    assert all(value["buckets"] > 1 for value in values)


def test_a_flush_takes_equal_parts(results: list[dict[str, Any]]) -> None:
    """DESIGN section 4: a fallback to dense is spread over steps, residual times 3/4, 1/2, 1/4."""
    for value in outcome(results, "changing_float64"):
        before, *after = [entry["residual"] for entry in value["journal"][11:16]]
        assert [one / before for one in after] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_dropped_gradients_leave_residuals_alone(results: list[dict[str, Any]]) -> None:
    """S04, S05: gradients thrown away, exchanged or not, change no bit of a residual."""
    for name in ("changing", "changing_float64"):
        for value in outcome(results, name):
            assert value["restored"] == [True, True, True]


def test_adaptive_changed_the_factor(results: list[dict[str, Any]]) -> None:
    """GraVAC raised the CF, and another run went dense and sent its residual in three steps."""
    for value in outcome(results, "adaptive"):
        factors = [entry["cf"] for entry in value["journal"]]
        assert factors[:2] == [4.0, 4.0]
        assert factors[2:4] == [8.0, 8.0]
    for value in outcome(results, "adaptive_to_dense"):
        # A window without a typical step, as plans change so often here, decides nothing.
        factors = [entry["cf"] for entry in value["journal"]]
        first = factors.index(None)
        assert first in (4, 8, 12)
        assert factors == [8.0] * first + [None] * (len(factors) - first)
        residuals = [entry["residual"] for entry in value["journal"]]
        assert all(residual > 0 for residual in residuals[: first + 2])
        assert not any(residuals[first + 2 :])
