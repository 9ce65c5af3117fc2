from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.telemetry.records import (
    SCHEMA,
    BucketLayout,
    ConfigurationRecord,
    RecordError,
    WindowRecord,
    parse_line,
)

WINDOW = WindowRecord(
    step=20,
    step_seconds=0.25,
    compute_seconds=(0.2, 0.1),
    wait_seconds=(0.0, 0.1),
    local_batches=(6, 2),
    global_batch_size=8,
    cf=100.0,
    gain=0.75,
    strategy="allgather",
    bytes_per_step=4000.0,
    plan_version=2,
    plan_reason="predicted 12 % faster",
    compression_reason="gain 0.75 of at least 0.75",
    changed=("plan",),
    input_seconds=(0.1, 0.0),
    forward_seconds=(0.05, 0.04),
    backward_seconds=(0.05, 0.06),
    compress_seconds=(0.0, 0.0),
    slow_ranks=({"rank": 0, "ratio": 2.0, "part": "input"},),
    predicted_step_seconds=0.24,
    step_seconds_before=0.3,
    overhead_seconds=0.001,
)
CONFIGURATION = ConfigurationRecord(
    versions={"torch": "2.13.0", "horovod": "0.28.1"},
    ranks=2,
    options={"global_batch_size": 8, "compression": {"min_cf": 10}},
    buckets=(BucketLayout("float32", "cpu", 30, ("b", "a")),),
)

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def windows(draw: st.DrawFn) -> WindowRecord:
    ranks = draw(st.integers(1, 4))
    per_rank = st.lists(finite, min_size=ranks, max_size=ranks).map(tuple)
    sizes = draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    return WindowRecord(
        step=draw(st.integers(0, 2**40)),
        step_seconds=draw(finite),
        compute_seconds=draw(per_rank),
        wait_seconds=draw(per_rank),
        local_batches=draw(st.sampled_from([(), tuple(sizes)])),
        global_batch_size=draw(st.sampled_from([None, sum(sizes)])),
        cf=draw(st.none() | finite),
        gain=draw(st.none() | finite),
        strategy=draw(st.sampled_from(["dense", "allgather"])),
        bytes_per_step=draw(finite),
        plan_version=draw(st.integers(0, 100)),
        plan_reason=draw(st.text()),
        compression_reason=draw(st.text()),
        changed=draw(st.lists(st.text()).map(tuple)),
    )


@settings(max_examples=150, deadline=None)
@given(windows())
def test_a_window_survives_the_file(window: WindowRecord) -> None:
    line = window.to_json()
    assert "\n" not in line
    assert parse_line(line) == window


def test_a_configuration_survives_the_file() -> None:
    assert parse_line(CONFIGURATION.to_json()) == CONFIGURATION


@pytest.mark.parametrize(("record", "kind"), [(WINDOW, "window"), (CONFIGURATION, "configuration")])
def test_every_line_tells_its_kind_and_schema(record: Any, kind: str) -> None:
    content = json.loads(record.to_json())
    assert (content["kind"], content["schema"]) == (kind, SCHEMA)


def test_names_and_types_of_a_window_line() -> None:
    """The format is a contract with other programs: a change here needs a new schema version."""
    assert json.loads(WINDOW.to_json()) == {
        "kind": "window",
        "schema": 1,
        "step": 20,
        "step_seconds": 0.25,
        "compute_seconds": [0.2, 0.1],
        "wait_seconds": [0.0, 0.1],
        "local_batches": [6, 2],
        "global_batch_size": 8,
        "cf": 100.0,
        "gain": 0.75,
        "strategy": "allgather",
        "bytes_per_step": 4000.0,
        "plan_version": 2,
        "plan_reason": "predicted 12 % faster",
        "compression_reason": "gain 0.75 of at least 0.75",
        "changed": ["plan"],
        "rho": None,
        "nonfinite_steps": 0,
        "input_seconds": [0.1, 0.0],
        "forward_seconds": [0.05, 0.04],
        "backward_seconds": [0.05, 0.06],
        "compress_seconds": [0.0, 0.0],
        "slow_ranks": [{"rank": 0, "ratio": 2.0, "part": "input"}],
        "predicted_step_seconds": 0.24,
        "step_seconds_before": 0.3,
        "overhead_seconds": 0.001,
    }


def test_lines_from_before_a_field_was_added_are_read() -> None:
    """Adding a field is no new schema: these were not there from the start."""
    content = json.loads(replace(WINDOW, rho=2.5, nonfinite_steps=3).to_json())
    first = list(content)[: list(content).index("rho")]
    old = parse_line(json.dumps({name: content[name] for name in first}))
    assert isinstance(old, WindowRecord)
    assert (old.rho, old.nonfinite_steps, old.input_seconds, old.slow_ranks) == (None, 0, (), ())
    assert old.compute_seconds == WINDOW.compute_seconds


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_becomes_null(value: float) -> None:
    window = replace(WINDOW, step_seconds=value, wait_seconds=(value, 1.0), gain=value)
    content = json.loads(window.to_json(), parse_constant=pytest.fail)
    assert content["step_seconds"] is None
    assert content["wait_seconds"] == [None, 1.0]
    assert content["gain"] is None
    read = parse_line(window.to_json())
    assert isinstance(read, WindowRecord)
    assert math.isnan(read.step_seconds) and math.isnan(read.wait_seconds[0])
    assert read.gain is None


def test_numpy_values_and_lists_are_taken() -> None:
    window = replace(
        WINDOW,
        step=np.int64(20),
        compute_seconds=np.array([0.2, 0.1]),
        local_batches=[np.int32(6), 2],
        cf=np.float32(100),
    )
    assert window == WINDOW
    assert window.to_json() == WINDOW.to_json()


def test_options_are_copied_as_json_values() -> None:
    options = {
        "dtype": torch.float16,
        "path": PurePath("a/b"),
        "nan": math.nan,
        "sizes": (1, 2),
        "names": {"b", "a"},
        3: True,
    }
    record = replace(CONFIGURATION, options=options)
    options.clear()
    assert record.options == {
        "dtype": "torch.float16",
        "path": "a/b",
        "nan": None,
        "sizes": [1, 2],
        "names": ["a", "b"],
        "3": True,
    }
    assert parse_line(record.to_json()) == record


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "20"},
        {"step": True},
        {"step": None},
        {"step_seconds": "fast"},
        {"compute_seconds": 0.1},
        {"local_batches": (6.5, 1.5)},
        {"strategy": None},
        {"changed": "plan"},
        {"cf": "dense"},
    ],
)
def test_a_wrong_type_is_named(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(RecordError, match=f"{name}=.*must be"):
        replace(WINDOW, **wrong)
    content = {**json.loads(WINDOW.to_json()), **wrong}
    with pytest.raises(RecordError, match=f"{name}="):
        parse_line(json.dumps(content))


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(RecordError, match="compute_seconds and wait_seconds have 2 and 3"):
        replace(WINDOW, wait_seconds=(0.0, 0.0, 0.0))
    with pytest.raises(RecordError, match="compute_seconds and local_batches have 2 and 1"):
        replace(WINDOW, local_batches=(8,))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not a line of JSON"),
        (WINDOW.to_json()[:-3], "not a line of JSON"),
        ("[1]", "a JSON object was expected"),
        ('{"kind": "window"}', "schema=None: this version reads schema 1"),
        ('{"kind": "window", "schema": 2}', "schema=2"),
        ('{"kind": "song", "schema": 1}', "kind='song': must be one of 'configuration', 'window'"),
        ('{"kind": "window", "schema": 1, "step": 3}', "without step_seconds, compute_seconds"),
        (
            '{"kind":"configuration","schema":1,"versions":{},"ranks":1,"options":[],"buckets":[]}',
            "options=",
        ),
        (
            '{"kind":"configuration","schema":1,"versions":{},"ranks":1,"options":{},"buckets":[3]}',
            "buckets=.*dtype, device, elements, parameters",
        ),
    ],
)
def test_what_is_no_record_is_explained(line: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse_line(line)


def test_fields_of_a_later_version_are_ignored() -> None:
    content = {**json.loads(WINDOW.to_json()), "mood": "good"}
    assert parse_line(json.dumps(content)) == WINDOW
