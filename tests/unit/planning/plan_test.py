"""Plan: validation and round trip."""

from __future__ import annotations

import json

import pytest

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.plan import Plan


def test_round_trip_through_json() -> None:
    for predicted in (None, 0.25):
        plan = Plan(3, (5, 3), "because", predicted)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert plan.global_batch_size == 8 and plan.ranks == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, (1,), "x"), "version=-1"),
        ((0, (), "x"), "local_batches"),
        ((0, (4, 0), "x"), r"local_batches\[1\]=0"),
        ((0, (4,), ""), "reason"),
        ((0, (4,), "x", -1.0), "predicted_step_seconds"),
    ],
)
def test_malformed(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Plan(*arguments)  # type: ignore[arg-type]


def test_from_dict_of_something_else() -> None:
    with pytest.raises(ConfigurationError, match="not a saved plan"):
        Plan.from_dict({"version": 1})
