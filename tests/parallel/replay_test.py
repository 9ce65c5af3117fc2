"""A recorded run is run again bit for bit, whatever the timings of the second one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_hetero.telemetry.records import DecisionRecord, WindowRecord
from hvd_hetero.telemetry.report import format_summary, read_records, summarise
from tests.parallel.launch import Launcher, run_ranks
from tests.parallel.replay_ranks import GLOBAL_BATCH, STEPS

TRAIN = "tests.parallel.replay_ranks:train"
SEVERAL = "tests.parallel.replay_ranks:several"
NO_FUSION = {"HOROVOD_FUSION_THRESHOLD": "0"}


def decisions(log: Path) -> list[DecisionRecord]:
    return [one for one in read_records(log) if isinstance(one, DecisionRecord)]


def check_changes(log: Path, dense: bool) -> None:
    """The recorded run had what makes a replay worth a test: plans and factors that changed."""
    assert sum(one.plan is not None for one in decisions(log)) >= 2
    choices = [one.compression for one in decisions(log) if one.compression is not None]
    assert len({(one.cf, one.strategy) for one in choices}) >= (3 if not dense else 2)


@pytest.mark.parametrize(
    ("kind", "ranks", "launcher", "workers", "env"),
    [
        ("gravac", 2, "mpirun", (0, 2), {}),
        ("no harm", 2, "horovodrun-gloo", (2, 0), {}),
        ("model", 3, "mpirun", (0, 0), NO_FUSION),
    ],
)
def test_a_replay_is_bit_equal(
    kind: str,
    ranks: int,
    launcher: Launcher,
    workers: tuple[int, int],
    env: dict[str, str],
    tmp_path: Path,
) -> None:
    """Another rank is slow, loader workers run ahead otherwise: the same samples, sent alike."""
    first, second = tmp_path / "first", tmp_path / "second"
    recorded, replayed = (
        run_ranks(TRAIN, ranks, launcher, {"kind": kind, **options}, env=env, timeout_seconds=120)
        for options in (
            {"slow": ranks - 1, "workers": workers[0], "log": str(first)},
            {"slow": 0, "workers": workers[1], "log": str(second), "replay": str(first)},
        )
    )
    check_changes(first, dense=kind != "gravac")
    for one, other in zip(recorded, replayed, strict=True):
        assert one["ways"] == other["ways"]
        assert one["plans"] == other["plans"]
        assert one["used"] == other["used"]
        assert one["parameters"] == other["parameters"]
    # What was replayed says so, and can be replayed itself.
    for one, other in zip(decisions(first), decisions(second), strict=True):
        assert (one.step, one.plan, one.effective) == (other.step, other.plan, other.effective)
    windows = [one for one in read_records(second) if isinstance(one, WindowRecord)]
    assert len(windows) == STEPS // 3
    for window in windows:
        assert window.plan_reason.startswith("replayed: ")
        assert window.compression_reason.startswith("replayed: ")
    assert "replayed: " in format_summary(summarise(read_records(second)))


def test_replays_and_checkpoints(tmp_path: Path) -> None:
    """From a checkpoint of the recorded run; of a run that went on from one; and of a replay."""
    logs = {name: str(tmp_path / name) for name in ("whole", "rest", "replay")}
    folders = {name: tmp_path / f"state of {name}" for name in ("whole", "replay")}
    for folder in folders.values():
        folder.mkdir()
    saved, saved_in_replay = (str(folder) for folder in folders.values())
    common: dict[str, Any] = {"kind": "gravac", "slow": 0}
    whole, rest, *replays = _several(
        {"kind": "gravac", "slow": 1, "log": logs["whole"], "save": saved},
        {"kind": "gravac", "slow": 1, "log": logs["rest"], "load": saved, "workers": 2},
        {**common, "replay": logs["whole"], "load": saved},
        {**common, "replay": logs["rest"], "load": saved, "log": logs["replay"]},
        {**common, "replay": logs["replay"], "load": saved},
        {**common, "replay": logs["whole"], "save": saved_in_replay},
        {**common, "replay": logs["whole"], "load": saved_in_replay},
    )
    check_changes(Path(logs["whole"]), dense=False)
    for number, original in enumerate((whole, rest, rest, whole, whole)):
        for one, other in zip(original, replays[number], strict=True):
            steps = len(other["used"])
            assert one["ways"][-steps:] == other["ways"], number
            assert one["plans"][-steps:] == other["plans"], number
            assert one["used"][-steps:] == other["used"], number
            assert one["parameters"] == other["parameters"], number


def test_a_state_of_a_replay_goes_on_without_one(tmp_path: Path) -> None:
    """Policy and models of speed begin anew there; a recording that has ended stays as it is."""
    log, longer = str(tmp_path / "log"), STEPS + 12
    recorded, replayed, later = _several(
        {"kind": "no harm", "slow": 1, "log": log},
        {"kind": "no harm", "slow": 0, "replay": log, "save": str(tmp_path), "steps": longer},
        {"kind": "no harm", "slow": 0, "load": str(tmp_path), "log": str(tmp_path / "later")},
    )
    for one, other in zip(recorded, replayed, strict=True):
        assert one["used"] == other["used"][:STEPS]
        last = other["ways"][STEPS + 1 :]
        assert last == last[:1] * len(last)
    assert later[0]["parameters"] == later[1]["parameters"]
    assert len(decisions(tmp_path / "later")) > 2


def test_what_cannot_be_replayed_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """A sentence on every rank, soon, that names the option and what to do."""
    log, rest, plain = (str(tmp_path / name) for name in ("log", "rest", "plain"))
    (tmp_path / "song").write_text("la la la\nla la\n")
    common: dict[str, Any] = {"kind": "gravac", "slow": -1, "steps": STEPS // 3 + 1}
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"replay": str(tmp_path / "none")}, ["none", "No such file", "log=FILE"]),
        ({"replay": str(tmp_path)}, ["Is a directory"]),
        ({"replay": str(tmp_path / "song")}, ["song", "line 1", "not a line of JSON"]),
        (
            {"replay": log, "global_batch_size": GLOBAL_BATCH + 1},
            ["global_batch_size was recorded as 16, here it is 17", "same options"],
        ),
        ({"replay": log, "kind": None}, ["compression was recorded as", "'no compression'"]),
        ({"replay": plain}, ["compression was recorded as 'no compression'", "here it is"]),
        ({"replay": log, "kind": "model"}, ["compression: policy", "'gravac'", "'model'"]),
        ({"replay": log, "bucket_bytes": 1000}, ["buckets", "bucket_bytes=50000"]),
        ({"replay": rest}, ["went on from a state saved after step 12", "load_hetero_state_dict"]),
    ]
    results = _several(
        {**common, "log": log, "save": str(tmp_path)},
        {**common, "log": rest, "load": str(tmp_path), "steps": STEPS // 3 + 4},
        {**common, "log": plain, "kind": None, "steps": 2},
        *({**common, **options} for options, _ in refused),
    )
    for (options, words), messages in zip(refused, results[3:], strict=True):
        assert isinstance(messages[0], str), options
        assert messages[0] == messages[1]
        assert messages[0].startswith("replay="), messages[0]
        assert all(word in messages[0] for word in words), (words, messages[0])


def _several(*runs: dict[str, Any]) -> list[list[Any]]:
    """Train in one job of two ranks; of each run what every rank has returned."""
    results = run_ranks(SEVERAL, 2, "mpirun", {"runs": list(runs)}, timeout_seconds=200)
    return [list(one) for one in zip(*results, strict=True)]
