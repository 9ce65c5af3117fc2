"""Training on several ranks equals training in one process, or with stock Horovod.

One launch for each launcher and number of ranks runs all scenarios; each test looks at one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.equality_ranks import RECIPES, STOCK_RECIPES
from tests.parallel.launch import launches, run_ranks
from tests.parallel.scenarios import (
    GLOBAL_BATCH,
    Recipe,
    fixture_params,
    largest_difference,
    outcome,
    train_alone,
)

TOLERANCE = 1e-10
LAUNCHES = [*launches((1,), ("mpirun",)), *launches((2,)), *launches((4,), ("horovodrun-gloo",))]


@pytest.fixture(scope="module", params=fixture_params(LAUNCHES))
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every rank's outcomes of all scenarios."""
    launcher, ranks = request.param
    # Where more than two numbers are added their order counts, and what Horovod fuses depends on
    # timing: without fusion two runs of stock Horovod are bit-equal as well.
    env = {"HOROVOD_FUSION_THRESHOLD": "0"} if ranks > 2 else {}
    return run_ranks(
        "tests.parallel.equality_ranks:run", ranks, launcher, env=env, timeout_seconds=270
    )


def _joined(values: list[Any]) -> list[list[int]]:
    """The samples of every step, over all its passes and all ranks."""
    assert len({len(value["steps"]) for value in values}) == 1
    return [
        [index for rank_passes in step for indices in rank_passes for index in indices]
        for step in zip(*(value["steps"] for value in values), strict=True)
    ]


def _splits(values: list[Any]) -> set[tuple[int, ...]]:
    """The ranks' local batches of every backward pass of a full global batch."""
    return {
        sizes
        for step in zip(*(value["steps"] for value in values), strict=True)
        for one_pass in zip(*step, strict=True)
        if sum(sizes := tuple(len(indices) for indices in one_pass)) == GLOBAL_BATCH
    }


@pytest.mark.parametrize("name", RECIPES)
def test_equals_one_process_on_the_joined_batch(results: list[dict[str, Any]], name: str) -> None:
    """A01, A02, A11, S01, S15, S35: unequal, changing batches give one process's parameters.

    DESIGN section 3 (rule 6, seam) and 6 (micro-batches, set_batch): float64, 20 steps, 1e-10.
    """
    recipe: Recipe = RECIPES[name]
    values = outcome(results, name)
    joined = _joined(values)
    assert len(joined) == recipe.steps

    alone = train_alone(recipe, joined)
    for value in values:
        assert largest_difference(value["parameters"], alone["parameters"]) <= TOLERANCE
        assert value["parameters"] == values[0]["parameters"]  # replicas, bit by bit
    if recipe.clip_norm is not None:
        assert alone["clipped"] >= 3

    # The scenario was what it says: batches were unequal and changed several times.
    assert {value["plan"] for value in values} == {6}
    if len(values) > 1:
        splits = _splits(values)
        assert len(splits) >= 4
        assert any(max(sizes) > 4 * min(sizes) for sizes in splits)
        sparse = ("allgather", "shared-index")  # by the number of ranks
        assert values[0]["strategy"] in (sparse if recipe.force_sparse else ("dense",))


@pytest.mark.parametrize(
    "name", [name for name, recipe in RECIPES.items() if recipe.source != "iterable"]
)
def test_each_sample_of_an_epoch_exactly_once(results: list[dict[str, Any]], name: str) -> None:
    """S37: over all ranks, whatever the plans, workers and tails; drop_last drops only the tail."""
    recipe = RECIPES[name]
    values = outcome(results, name)
    assert values[0]["epochs"]
    for epoch in zip(*(value["epochs"] for value in values), strict=True):
        seen = sorted(index for indices in epoch for index in indices)
        if recipe.drop_last:
            assert len(seen) == len(set(seen)) == recipe.samples // GLOBAL_BATCH * GLOBAL_BATCH
        else:
            assert seen == list(range(recipe.samples))


@pytest.mark.parametrize(("cf_1", "dense"), [("cf_1", "sgd_momentum"), ("cf_1_sparse", "cf_1")])
def test_cf_1_equals_dense(results: list[dict[str, Any]], cf_1: str, dense: str) -> None:
    """S35: at CF 1 everything is sent, by the dense exchange or by the sparse one."""
    for first, second in zip(outcome(results, cf_1), outcome(results, dense), strict=True):
        assert first["steps"] == second["steps"]
        assert largest_difference(first["parameters"], second["parameters"]) <= TOLERANCE


def test_a_plan_took_effect_within_a_step(results: list[dict[str, Any]]) -> None:
    """DESIGN section 3, rule 6: the passes of one step belonged to different plans."""
    for name in ("plan_within_step", "plan_within_step_undivided", "leftover_carried"):
        values = outcome(results, name)
        pairs = [
            [tuple(len(indices) for indices in one_pass) for one_pass in zip(*step, strict=True)]
            for step in zip(*(value["steps"] for value in values), strict=True)
        ]
        mixed = [pair for pair in pairs if len(pair) == 2 and pair[0] != pair[1]]
        full = [pair for pair in mixed if all(sum(sizes) == GLOBAL_BATCH for sizes in pair)]
        assert len(values) == 1 or len(full) >= 2


def test_leftover_passes_were_there(results: list[dict[str, Any]]) -> None:
    """A11: an epoch of three batches and two passes a step leaves one pass over."""
    for name in ("leftover_step_undivided", "leftover_step_divided", "leftover_step_sum"):
        for value in outcome(results, name):
            assert [len(step) for step in value["steps"]] == [2, 1] * 10
    for name in ("leftover_carried", "leftover_dropped"):
        for value in outcome(results, name):
            assert {len(step) for step in value["steps"]} == {2}


@pytest.mark.parametrize("name", STOCK_RECIPES)
def test_everything_off_is_stock_horovod(results: list[dict[str, Any]], name: str) -> None:
    """DESIGN section 3, rule 13; S17: without options every bit is Horovod's."""
    for value in outcome(results, name):
        assert value["hvd_hetero"] == value["horovod"]
        assert not value["own_exchange"]  # the bits of halves and quarters would agree anyway


@pytest.mark.parametrize("name", ["cf_none", "cf_1.0", "cf_1.0_sparse"])
def test_unequal_batches_are_not_averaged_plainly(results: list[dict[str, Any]], name: str) -> None:
    """S35: batches 3 and 1, mean gradients 1 and 5 give 2.0; a plain mean gives 3.0."""
    values = outcome(results, f"biased_mean_{name}")
    expected = [(2.0, 4)] if len(values) == 1 else [(1.0, 3), (5.0, 1)] * (len(values) // 2)
    assert [(value["own"], value["samples"]) for value in values] == expected
    for value in values:
        assert value["reduced"] == pytest.approx(2.0, abs=1e-12)
        assert value["moved"] == pytest.approx(2.0, abs=1e-12)
