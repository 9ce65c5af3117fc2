from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.plan import Plan
from hvd_hetero.telemetry.records import (
    BucketLayout,
    CompressionChoice,
    ConfigurationRecord,
    DecisionRecord,
    Record,
    RecordError,
    WindowRecord,
    parse_line,
)
from hvd_hetero.telemetry.replay import Recording, recorded_run
from hvd_hetero.telemetry.report import format_summary, summarise

BALANCER = {
    "global_batch_size": 16,
    "min_local_batch": [1, 1],
    "max_local_batch": [16, 16],
    "fixed_local_batches": None,
    "seed": 0,
    "window_steps": 10,
}
COMPRESSION = {"policy": "gravac", "eps": 0.75, "values": "float16"}
OPTIONS = {
    "balancer": BALANCER,
    "compression": COMPRESSION,
    "op": "Average",
    "bucket_bytes": 8,
    "replay": None,
}
BUCKET = BucketLayout("torch.float32", "cuda:0", 8, ("weight", "bias"))
COMPRESSED = {
    "cf": 20.0,
    "strategy": "allgather",
    "entries": [3, 4],
    "sample": True,
    "flush_steps": 10,
    "reason": "made up",
}
HERE = ConfigurationRecord({}, 2, OPTIONS, (BUCKET,))
WINDOW = WindowRecord(40, 0.1, (0.1, 0.1), (0.0, 0.0), (8, 8), 16, 0.1 + 0.2, None, "dense", 0.0)


def choice(cf: float | None) -> CompressionChoice:
    return CompressionChoice(cf, "allgather", (3, 4), True, 10, "made up")


def decision(
    step: int,
    version: int | None = None,
    effective: tuple[int, int] | None = None,
    cf: float | None = None,
    **fields: Any,
) -> DecisionRecord:
    """A plan where there is a version, a choice where there is a factor."""
    plan = None if version is None else Plan(version, (8 + version, 8 - version), "made up", 0.1)
    chosen = None if cf is None else choice(cf)
    start = {"optimizer": "one", "begins": step == 0, **fields}
    return DecisionRecord(step, start["optimizer"], start["begins"], plan, effective, chosen)


START = decision(0, 0, (0, 0), 10.0)
RUN: list[Record] = [
    HERE,
    START,
    decision(10, 1, (0, 14)),
    decision(20, None, None, 0.1 + 0.2),
    decision(30, 2, (1, 3), 20.0),
    WINDOW,
]


# ---- records ------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [one for one in RUN if isinstance(one, DecisionRecord)])
def test_a_decision_survives_the_file(record: DecisionRecord) -> None:
    """Every bit of a float, and every whole number as such."""
    assert parse_line(record.to_json()) == record


def test_names_and_types_of_a_decision_line() -> None:
    """The format is a contract: a change here needs a new schema version."""
    assert json.loads(decision(30, 1, (1, 3), 20.0).to_json()) == {
        "kind": "decision",
        "schema": 1,
        "step": 30,
        "optimizer": "one",
        "begins": False,
        "plan": {
            "version": 1,
            "local_batches": [9, 7],
            "reason": "made up",
            "predicted_step_seconds": 0.1,
        },
        "effective": [1, 3],
        "compression": COMPRESSED,
    }
    bare = json.loads(decision(3, None, None, 2.0).to_json())
    assert (bare["plan"], bare["effective"]) == (None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "3"},
        {"begins": 1},
        {"plan": 3},
        {"plan": {"version": -1, "local_batches": [1], "reason": "x"}},
        {"plan": {"version": 1}},
        {"effective": [1]},
        {"effective": [0, -1]},
        {"effective": None},
        {"compression": []},
        {"compression": {"cf": 1.0}},
        {"compression": {**COMPRESSED, "strategy": "carrier pigeon"}},
        {"compression": {**COMPRESSED, "entries": [-1]}},
        {"compression": {**COMPRESSED, "sample": None}},
        {"optimizer": None},
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    if name == "compression" and len(value) == len(COMPRESSED):
        name = next(one for one in value if value[one] != COMPRESSED[one])
    content = {**json.loads(decision(30, 1, (1, 3), 20.0).to_json()), **wrong}
    with pytest.raises(RecordError, match=name):
        parse_line(json.dumps(content))


def test_a_summary_is_that_of_the_windows() -> None:
    """Readers of windows do not mind decisions between them."""
    without = [one for one in RUN if not isinstance(one, DecisionRecord)]
    assert format_summary(summarise(RUN)) == format_summary(summarise(without))


# ---- schedule -----------------------------------------------------------------------------------


def test_what_was_decided_when() -> None:
    recording = recorded_run(RUN, HERE)
    assert (recording.begins, recording.ends) == (0, 40)
    assert [(cursor, plan.version) for cursor, plan in recording.plans] == [
        ((0, 0), 0),
        ((0, 14), 1),
        ((1, 3), 2),
    ]
    decided = {step for step in range(50) if recording.after(step)}
    assert decided == {10, 20, 30}
    chosen = [recording.choice_at(step) for step in (0, 19, 20, 29, 30, 999)]
    assert [one and one.cf for one in chosen] == [10.0, 10.0, 0.1 + 0.2, 0.1 + 0.2, 20.0, 20.0]
    assert [one.step for one in recording.until(20)] == [0, 10, 20]
    assert Recording.from_message(json.loads(json.dumps(recording.to_message()))) == recording


def test_the_last_run_counts_and_of_it_what_follows_a_loaded_state() -> None:
    """Of the plans of a state some may not have been in effect when it was saved."""
    loaded = [
        decision(30, 1, (0, 14), 20.0, begins=True),
        decision(30, 2, (0, 40)),
        decision(33, 3, (0, 41)),
    ]
    recording = recorded_run([*RUN, *RUN, *loaded], HERE)
    assert (recording.begins, recording.ends) == (30, 33)
    assert list(recording.decisions) == loaded
    assert recorded_run([*RUN, *loaded, *RUN], HERE) == recorded_run(RUN, HERE)


def test_options_that_change_no_bit_may_differ() -> None:
    other = {**OPTIONS, "replay": "log", "drift_check_steps": 3, "bucket_bytes": 9}
    other["balancer"] = {**BALANCER, "window_steps": 3, "min_gain": 0.1}
    here = replace(HERE, options=other, buckets=(replace(BUCKET, device="cuda:1"),))
    assert recorded_run(RUN, here) == recorded_run(RUN, HERE)


NO_BALANCER = {**OPTIONS, "balancer": None}


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (replace(HERE, ranks=3), "recorded with 2 ranks, this job has 3"),
        (
            replace(HERE, options={**OPTIONS, "balancer": {**BALANCER, "global_batch_size": 8}}),
            "global_batch_size was recorded as 16, here it is 8",
        ),
        (
            replace(HERE, options={**OPTIONS, "balancer": {**BALANCER, "seed": 1}}),
            "seed was recorded as 0, here it is 1",
        ),
        (replace(HERE, options=NO_BALANCER), "balancer was recorded as 'one', here it is 'none'"),
        (
            replace(HERE, options={**OPTIONS, "compression": {**COMPRESSION, "eps": 0.5}}),
            "compression: eps was recorded as 0.75, here it is 0.5",
        ),
        (
            replace(HERE, options={**OPTIONS, "compression": "NoneCompressor"}),
            "compression was recorded as .*gravac.*here it is 'no compression'",
        ),
        (
            replace(HERE, options={**OPTIONS, "op": "Sum"}),
            "op was recorded as 'Average', here it is 'Sum'",
        ),
        (replace(HERE, buckets=()), "recorded with 1 buckets, here there are 0.*bucket_bytes=8"),
        (
            replace(HERE, buckets=(replace(BUCKET, elements=9),)),
            "bucket 0 was recorded as 8 x .*here it is 9 x .*bucket_bytes=8",
        ),
        (replace(HERE, buckets=(replace(BUCKET, device="cpu"),)), "bucket 0 .*cuda:0.*cpu"),
        (
            replace(HERE, buckets=(replace(BUCKET, parameters=("bias", "weight")),)),
            "bucket 0 .*'weight', 'bias'.*'bias', 'weight'",
        ),
    ],
)
def test_another_configuration_is_refused(here: ConfigurationRecord, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        recorded_run(RUN, here)


def test_compression_recorded_without_is_refused() -> None:
    plain = replace(HERE, options={**OPTIONS, "compression": "NoneCompressor"})
    with pytest.raises(ConfigurationError, match=r"recorded as 'no compression'.*grav"):
        recorded_run([plain, decision(0, 0, (0, 0))], HERE)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "holds no decisions.*log=FILE"),
        ([HERE, WINDOW], "holds no decisions"),
        ([START], "holds no decisions"),
        ([HERE, *RUN[2:]], "do not begin where the run does"),
        ([*RUN, decision(40, 3, (1, 4), optimizer="two")], "2 optimizers"),
        ([*RUN, decision(30, 3, (1, 4))], r"no single run: after the steps \[0, 10, 20, 30, 30\]"),
        ([*RUN, decision(40, 2, (1, 4))], r"no single run: .* plans \[0, 1, 2, 2\]"),
        ([*RUN, decision(40, 3, (1, 2))], "not in this order"),
        ([HERE, decision(0, None, None, 3.0)], "a balancer without plans"),
        ([HERE, decision(0, 0, (0, 0))], "compression without choices"),
        ([HERE, replace(START, plan=Plan(0, (3, 3), "x"))], r"\[3, 3\].*global_batch_size=16"),
        ([HERE, replace(START, plan=Plan(0, (16,), "x"))], r"\[16\].*2 ranks"),
        (
            [HERE, replace(START, compression=replace(choice(3.0), entries=(9,)))],
            "9 entries of bucket 0, which has 8",
        ),
        (
            [HERE, replace(START, compression=replace(choice(3.0), entries=(0,)))],
            "0 entries of bucket 0",
        ),
        (
            [replace(HERE, options=OPTIONS | {"balancer": [3]}), *RUN[1:]],
            "balancer=.3. was recorded",
        ),
    ],
)
def test_what_is_no_recorded_run_is_refused(records: list[Record], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        recorded_run(records, HERE)
