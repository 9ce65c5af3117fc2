"""S47, S48, S37: mpi4py, loader workers and uneven data beside a running Horovod."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parallel.launch import Launcher, run_ranks
from tests.parallel.mpi_ranks import (
    EPOCH_SAMPLES,
    GLOBAL_BATCH,
    PREFETCH,
    SCENARIOS,
    WORKERS,
)

RANKS = "tests.parallel.mpi_ranks"

LOADERS = [name for name in SCENARIOS if name.startswith(("workers", "13"))]
LAUNCHES: dict[str, tuple[Launcher, str, list[str]]] = {
    "mpirun, before": ("mpirun", "before", ["channel", "barriers", *LOADERS]),
    "mpirun, after": ("mpirun", "after", ["channel", "barriers"]),
    "mpirun, absent": ("mpirun", "absent", ["channel", "allreduces"]),
    "mpirun, single": ("mpirun", "single", ["channel", "allreduces"]),
    "gloo, before": ("horovodrun-gloo", "before", ["channel", "barriers", *LOADERS]),
}
SUMS = [3.0 * number for number in range(100)]


@functools.cache
def launched(name: str) -> list[dict[str, Any]]:
    """Results of one launch by rank; made when a test first asks for it."""
    launcher, imported, scenarios = LAUNCHES[name]
    arguments = {"imported": imported, "scenarios": scenarios}
    return run_ranks(f"{RANKS}:run", 2, launcher, arguments, timeout_seconds=240)


def of(launch: str, scenario: str) -> list[Any]:
    """A scenario's result on every rank; fails with the traceback where there is one."""
    found = [result[scenario] for result in launched(launch)]
    for one in found:
        assert not (isinstance(one, dict) and "error" in one), one["error"]
    return found


# ---- mpi4py -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "channel", "reason"),
    [
        ("mpirun, before", "MpiChannel", "agreements travel over mpi4py"),
        ("mpirun, after", "MpiChannel", "agreements travel over mpi4py"),
        ("mpirun, absent", "MpiChannel", "agreements travel over mpi4py"),
        ("mpirun, single", "CollectivesChannel", "MPI was initialised without multi-threading"),
        ("gloo, before", "CollectivesChannel", "Horovod runs without MPI"),
    ],
)
def test_channel_and_its_reason(launch: str, channel: str, reason: str) -> None:
    """S47, DESIGN 3: mpi4py where it can be used, else Horovod; the log says which and why."""
    for rank in of(launch, "channel"):
        assert rank["channel"] == channel
        assert sum(reason in text for text in rank["messages"]) == 1
        assert rank["steps"] == EPOCH_SAMPLES // GLOBAL_BATCH
        assert rank["threads"] == (channel == "MpiChannel")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_replicas_agree_whatever_the_channel(launch: str) -> None:
    """S47: training under every combination ends with the same parameters on both ranks."""
    first, second = of(launch, "channel")
    assert first["parameters"] == second["parameters"]


@pytest.mark.parametrize(
    ("launch", "scenario"),
    [
        (name, one)
        for name, (_, _, s) in LAUNCHES.items()
        for one in s
        if one in ("barriers", "allreduces")
    ],
)
def test_horovod_and_mpi4py_in_turn(launch: str, scenario: str) -> None:
    """S47: a hundred times barrier and allreduce, each right."""
    assert of(launch, scenario) == [SUMS, SUMS]


# ---- loaders ------------------------------------------------------------------------------------


def sizes_of(ranks: list[Any]) -> list[list[int]]:
    """Local batches by step over both epochs: [rank 0's, rank 1's]."""
    by_rank = [[len(batch) for epoch in rank["read"] for batch in epoch] for rank in ranks]
    return [list(step) for step in zip(*by_rank, strict=True)]


def read_in(ranks: list[Any], epoch: int) -> list[int]:
    """All indices that any rank read in an epoch."""
    return sorted(index for rank in ranks for batch in rank["read"][epoch] for index in batch)


@pytest.mark.parametrize("launch", ["mpirun, before", "gloo, before"])
@pytest.mark.parametrize("workers", ["none", "fork", "forkserver"])
def test_sizes_follow_the_plan(launch: str, workers: str) -> None:
    """S48: persistent workers, two epochs, plans agreed after steps 4 and 12: they apply late by
    what workers had drawn ahead, at most num_workers * prefetch_factor batches."""
    ranks = of(launch, f"workers {workers}")
    ahead = 0 if workers == "none" else WORKERS * PREFETCH
    expected = [[4, 4]] * (4 + ahead) + [[6, 2]] * 8 + [[2, 6]] * (8 - ahead)
    assert sizes_of(ranks) == expected
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@pytest.mark.parametrize("launch", ["mpirun, before", "gloo, before"])
@pytest.mark.parametrize("workers", ["none", "fork", "forkserver"])
def test_samples_exactly_once(launch: str, workers: str) -> None:
    """S48: plan changes lose no sample and repeat none; epochs differ in their order."""
    ranks = of(launch, f"workers {workers}")
    for epoch in range(2):
        assert read_in(ranks, epoch) == list(range(EPOCH_SAMPLES))
    assert ranks[0]["read"][0] != ranks[0]["read"][1]


@pytest.mark.parametrize("launch", ["mpirun, before", "gloo, before"])
@pytest.mark.parametrize("first", ["4:1", "3:2"])
def test_thirteen_samples(launch: str, first: str) -> None:
    """S37: two full batches and a tail of three; each sample once in each of two epochs."""
    ranks = of(launch, f"13 samples {first}")
    sizes = sizes_of(ranks)
    one, two = ([4, 1], [3, 2]) if first == "4:1" else ([3, 2], [4, 1])
    assert sizes[:2] == [one, one]
    assert sizes[3:5] == [two, two]
    assert [sum(step) for step in sizes] == [5, 5, 3, 5, 5, 3]
    assert min(min(step) for step in sizes) == 1
    for epoch in range(2):
        assert read_in(ranks, epoch) == list(range(13))
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@pytest.mark.parametrize("launch", ["mpirun, before", "gloo, before"])
@pytest.mark.parametrize("first", ["4:1", "3:2"])
def test_thirteen_samples_without_the_last(launch: str, first: str) -> None:
    """S37: drop_last leaves out the tail of three, which is another one in each epoch."""
    ranks = of(launch, f"13 samples {first} drop")
    one, two = ([4, 1], [3, 2]) if first == "4:1" else ([3, 2], [4, 1])
    assert sizes_of(ranks) == [one, one, two, two]
    for epoch in range(2):
        indices = read_in(ranks, epoch)
        assert len(set(indices)) == len(indices) == 10
        assert set(indices) < set(range(13))
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
