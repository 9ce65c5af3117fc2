"""S46: code or options that differ on one rank are found at construction, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import BOTH_LAUNCHERS, Launcher, run_ranks, start_ranks
from tests.parallel.mismatch_ranks import SCENARIOS

RANKS = "tests.parallel.mismatch_ranks"

# What the message must name: the option or parameter, the value of rank 0, that of rank 1.
NAMED = {
    "compression": ("compression", "'policy': 'fixed', 'min_cf': 10.0", "'NoneCompressor'"),
    "compression policy": ("compression.policy", "'fixed'", "'gravac'"),
    "horovod compression": ("compression", "'NoneCompressor'", "'FP16Compressor'"),
    "cf": ("compression.min_cf", "10.0", "100.0"),
    "eps": ("compression.eps", "0.75", "0.4"),
    "flush_steps": ("compression.flush_steps", "10", "20"),
    "bucket_bytes": ("bucket_bytes", "8388608", "4096"),
    "backward_passes_per_step": ("backward_passes_per_step", "1", "2"),
    "op": ("op", "'0'", "'1'"),
    "sparse_as_dense": ("sparse_as_dense", "False", "True"),
    "loss_reduction": ("loss_reduction", "'mean'", "'sum'"),
    "loss_weighted": ("loss_weighted", "False", "True"),
    "local_clip_norm": ("local_clip_norm", "None", "2.0"),
    "drift_check_steps": ("drift_check_steps", "5", "7"),
    "replay": ("replay", "'log'", "None"),
    "number of parameters": ("number of parameters", "4", "6"),
    "shape": ("parameter 0", "0.weight: shape (8, 16)", "0.weight: shape (9, 16)"),
    "dtype": ("parameter 0", "torch.float32", "torch.float64"),
    "name": ("parameter 0", "0.weight: shape (16, 16)", "1.weight: shape (16, 16)"),
    "order": ("parameter 0", "0.weight", "1.bias"),
    "frozen": ("parameter 0", "torch.float32'", "torch.float32, frozen'"),
    "frozen with compression": ("parameter 0", "torch.float32'", "torch.float32, frozen'"),
    "global_batch_size": ("global_batch_size", "8", "16"),
    "min_local_batch": ("min_local_batch", "[2, 2]", "[3, 3]"),
    "min_local_batch by default": ("min_local_batch at the end of an epoch", "[1, 1]", "[2, 2]"),
    "max_local_batch": ("max_local_batch", "[7, 7]", "[6, 6]"),
    "granule": ("granule", "1", "2"),
    "fixed_local_batches": ("fixed_local_batches", "[6, 2]", "[2, 6]"),
    "window_steps": ("window_steps", "10", "20"),
    "min_gain": ("min_gain", "0.05", "0.25"),
    "seed": ("seed", "0", "3"),
    "data set size": ("samples of the data set", "32", "31"),
    "shuffle": ("shuffle", "False", "True"),
    "drop_last": ("drop_last", "False", "True"),
    "sampler": ("sampler", "None", "'RandomSampler'"),
    "length of the sampler": ("length of the sampler", "32", "31"),
    "weigh": ("weigh", "False", "True"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every scenario's message, or None where nothing was found, by rank; one launch for all."""
    log: Path = tmp_path_factory.mktemp("log") / "records.jsonl"
    return run_ranks(
        f"{RANKS}:differ", 2, "mpirun", env={"LOG_OF_RANK_ZERO": str(log)}, timeout_seconds=240
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_ranks_name_the_difference(scenario: str, results: list[dict[str, Any]]) -> None:
    """S46: RankMismatchError on every rank, naming what differs and both values."""
    messages = [result[scenario] for result in results]
    assert messages[0] is not None
    assert messages[0] == messages[1]
    what, first, second = NAMED[scenario]
    assert messages[0].startswith(f"{what} differs between ranks: rank 0 has ")
    values, _, remedy = messages[0].partition(". Start every rank with the same")
    zero, _, one = values.partition(", rank 1 has ")
    assert first in zero
    assert second in one
    assert remedy


def test_every_scenario_has_its_words() -> None:
    assert set(NAMED) == set(SCENARIOS)


def test_log_on_rank_zero_only(results: list[dict[str, Any]]) -> None:
    """S46: mpirun hands out no variables by itself; only rank 0 writes, so only rank 0 needs it."""
    assert results[0]["log"] == results[1]["log"]
    assert results[0]["log"] >= 3  # the configuration and two windows


@pytest.mark.parametrize("launcher", BOTH_LAUNCHERS)
def test_all_ranks_end_with_an_error(launcher: Launcher) -> None:
    """S46: non-zero on all ranks, soon, and the reason in the output."""
    result = start_ranks(f"{RANKS}:stop_at_mismatch", 2, launcher, timeout_seconds=60)
    assert result.returncode != 0
    assert not result.survivors
    # A launcher may kill a rank that is about to end by itself.
    assert all(rank.exit_code in (1, None) for rank in result.ranks)
    assert "RankMismatchError: compression.min_cf differs between ranks" in result.output
    assert "rank 0 has 10.0, rank 1 has 100.0" in result.output
