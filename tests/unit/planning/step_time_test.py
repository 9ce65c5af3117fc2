"""Predicted steps: the formula against a simulation, and dense where bytes are not saved."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.compression.wire import packed_bytes
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.cost_curve import CostCurve
from hvd_hetero.planning.cost_model import CostModel, LocalCosts
from hvd_hetero.planning.step_time import (
    DENSE,
    Option,
    RankTimes,
    predict_options,
    predict_step_seconds,
)

_SECONDS = st.floats(0.0, 10.0)
FREE = LocalCosts(0.0, 0.0, 0.0, 0.0)


def per_byte(seconds: float) -> CostCurve:
    return CostCurve((0.0, 1e9), (0.0, 1e9 * seconds))


MODEL = CostModel(4, per_byte(1.5e-9), per_byte(3e-9), per_byte(2e-9))


@given(
    st.lists(st.tuples(_SECONDS, _SECONDS), min_size=1, max_size=4),
    st.lists(_SECONDS, min_size=1, max_size=5),
    _SECONDS,
    _SECONDS,
)
def test_equals_a_simulation_of_one_step(
    ranks: list[tuple[float, float]], exchanges: list[float], compress: float, decode: float
) -> None:
    """Early buckets are exchanged in turn from the moment the last rank is ready; the last bucket
    when the last rank is done with backward and compression, and the wire is free."""
    times = [RankTimes(ready, ready + rest) for ready, rest in ranks]
    wire_free = max(one.ready_seconds for one in times)
    for seconds in exchanges[:-1]:
        wire_free += seconds
    started = max(wire_free, max(one.done_seconds + compress for one in times))
    expected = started + exchanges[-1] + decode
    assert predict_step_seconds(times, exchanges, compress, decode) == pytest.approx(expected)


def test_every_option_is_predicted() -> None:
    ks = {10.0: (100_000, 1), 100.0: (10_000, 1)}
    ranks = [RankTimes(0.0, 0.001)] * 4
    predicted = predict_options(
        [10.0, 100.0], ["allgather"], [1_000_000, 8], 4, ks, MODEL, FREE, "float16", ranks
    )
    assert set(predicted) == {DENSE, Option(10.0, "allgather"), Option(100.0, "allgather")}
    # The bucket of 8 elements takes fewer bytes dense, under every option.
    packet = packed_bytes(10_000, 1_000_000, torch.float32, "float16")
    expected = max(0.001, packet * 3e-9) + 8 * 4 * 1.5e-9
    assert predicted[Option(100.0, "allgather")] == pytest.approx(expected)
    assert predicted[DENSE] == pytest.approx(max(0.001, 4e6 * 1.5e-9) + 8 * 4 * 1.5e-9)


def test_own_work_counts_before_and_after() -> None:
    costs = LocalCosts(1e-6, 0.0, 1e-5, 0.0)
    ks = {100.0: (1000,)}
    arguments = ([100.0], ["allgather", "shared-index"], [100_000], 4, ks, MODEL)
    without = predict_options(*arguments, FREE, "float32", [RankTimes(0.0, 1.0)])
    own = predict_options(*arguments, costs, "float32", [RankTimes(0.0, 1.0)])
    gathered, shared = Option(100.0, "allgather"), Option(100.0, "shared-index")
    assert own[DENSE] == without[DENSE]
    assert own[gathered] - without[gathered] == pytest.approx(0.1 + 4 * 0.01)
    assert own[shared] - without[shared] == pytest.approx(0.1 + 0.01)


def test_where_no_bytes_are_saved_an_option_is_dense() -> None:
    """An allgather among many ranks at a low factor, and everything on one rank."""
    many = [RankTimes(0.0, 0.0)] * 64
    ks = {4.0: (250_000,)}
    model = CostModel(64, per_byte(1e-9), per_byte(1e-12), per_byte(1e-12))
    predicted = predict_options(
        [4.0], ["allgather"], [1_000_000], 64, ks, model, FREE, "float16", many
    )
    assert predicted[Option(4.0, "allgather")] == predicted[DENSE]
    alone = predict_options(
        [4.0], ["shared-index"], [1_000_000], 1, ks, CostModel.free(), FREE, "float16", many[:1]
    )
    assert alone[Option(4.0, "shared-index")] == alone[DENSE] == 0.0


def test_other_types_travel_in_other_widths() -> None:
    arguments = ([10.0], ["allgather"], [1_000_000], 4, {10.0: (100_000,)}, MODEL, FREE, "float16")
    ranks = [RankTimes(0.0, 0.0)]
    narrow = predict_options(*arguments, ranks)
    wide = predict_options(*arguments, ranks, dtypes=[torch.float64])
    assert wide[DENSE] == 2 * narrow[DENSE]
    assert wide[Option(10.0, "allgather")] > 2 * narrow[Option(10.0, "allgather")]
    half = predict_options(*arguments, ranks, dtypes=[torch.bfloat16])
    assert half[DENSE] == 0.5 * narrow[DENSE]  # dense as they are, compressed as float32
    assert half[Option(10.0, "allgather")] == narrow[Option(10.0, "allgather")]


def test_options_survive_json_and_name_themselves() -> None:
    for option, name in ((DENSE, "dense"), (Option(10, "shared-index"), "CF 10 shared-index")):
        assert Option(*json.loads(json.dumps(option.to_list()))) == option
        assert str(option) == name


@pytest.mark.parametrize(
    ("cf", "strategy"), [(None, "allgather"), (10.0, "dense"), (10.0, "ring"), (0.5, "allgather")]
)
def test_an_option_that_makes_no_sense(cf: float | None, strategy: str) -> None:
    with pytest.raises(ConfigurationError):
        Option(cf, strategy)


def test_no_ranks_and_negative_times_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one rank"):
        predict_step_seconds([], [1.0], 0.0, 0.0)
    with pytest.raises(ConfigurationError, match="ready_seconds"):
        RankTimes(-1.0, 0.0)
