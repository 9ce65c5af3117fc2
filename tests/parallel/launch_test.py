"""The launch helper itself: real launchers, every rank's end is seen, nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launch import (
    BOTH_LAUNCHERS,
    Launcher,
    LaunchFailedError,
    LaunchTimeoutError,
    launch,
    launch_command,
    launch_environment,
    launches,
    run_ranks,
    start_ranks,
)

RANKS = "tests.parallel.launch_ranks"


@pytest.mark.parametrize(("launcher", "ranks"), launches())
def test_allreduce(launcher: Launcher, ranks: int) -> None:
    """S52: the Horovod that was built exchanges tensors under both of its controllers."""
    results = run_ranks(f"{RANKS}:total", ranks, launcher, {"elements": 3})
    expected = [ranks * (ranks + 1) / 2] * 3
    assert [result["rank"] for result in results] == list(range(ranks))
    assert all(result["size"] == ranks for result in results)
    assert all(result["total"] == expected for result in results)
    assert all(result["threads"] == 1 for result in results)
    assert all(result["mpi"] == (launcher == "mpirun") for result in results)


def test_allreduce_horovodrun_mpi() -> None:
    """The third way to start: Horovod's launcher over MPI, which Open MPI 5 needs help with."""
    results = run_ranks(f"{RANKS}:total", 2, "horovodrun-mpi", {"elements": 1})
    assert [(result["total"], result["mpi"]) for result in results] == [([3.0], True)] * 2


@pytest.mark.parametrize("launcher", BOTH_LAUNCHERS)
def test_one_failing_rank_fails_the_launch(launcher: Launcher) -> None:
    """S49: a rank that raises ends all within seconds, with its traceback in sight."""
    result = start_ranks(f"{RANKS}:fail_on", 2, launcher, {"rank": 1}, timeout_seconds=60)
    assert not result.ok
    assert result.returncode != 0
    assert not result.survivors
    assert "ValueError: rank 1 was told to fail" in result.ranks[1].traceback
    assert "ValueError: rank 1 was told to fail" in result.output
    with pytest.raises(LaunchFailedError, match="rank 1 was told to fail"):
        result.check()


@pytest.mark.parametrize("launcher", BOTH_LAUNCHERS)
def test_every_rank_must_end_with_zero(launcher: Launcher) -> None:
    """A status other than 0 on any rank counts, not only that of rank 0."""
    with pytest.raises(LaunchFailedError, match="rank 1: ended, exit 3"):
        run_ranks(f"{RANKS}:exit_quietly_on", 2, launcher, {"rank": 1})


def test_a_rank_without_a_record_is_a_failure(tmp_path: Path) -> None:
    """A rank that vanishes, with status 0 even, has not done its work."""
    script = tmp_path / "vanish.py"
    script.write_text("import os\nos._exit(0)\n")
    result = launch(script, 2, launcher="mpirun", check=False)
    assert [rank.exit_code for rank in result.ranks] == [None, None]
    assert not result.ok


def test_script_sees_arguments_and_environment(tmp_path: Path) -> None:
    """A script runs as __main__ with its own arguments; each rank's output is kept apart."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "if __name__ == '__main__':\n"
        "    print('rank', os.environ['OMPI_COMM_WORLD_RANK'], sys.argv[1:], os.environ['WORD'])\n"
    )
    result = launch(script, 2, launcher="mpirun", args=["--a", "b c"], env={"WORD": "bird"})
    assert [rank.stdout for rank in result.ranks] == [
        f"rank {rank} ['--a', 'b c'] bird\n" for rank in range(2)
    ]
    assert "bird" in result.stdout


@pytest.mark.parametrize("launcher", BOTH_LAUNCHERS)
def test_timeout_kills_everything(launcher: Launcher) -> None:
    """S49: a launch that hangs is killed with all its processes, and says so."""
    with pytest.raises(LaunchTimeoutError, match="still running after 8 s") as caught:
        run_ranks(f"{RANKS}:sleep", 2, launcher, {"seconds": 300}, timeout_seconds=8)
    assert caught.value.result is not None
    pids = [rank.pid for rank in caught.value.result.ranks]
    assert None not in pids
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int | None) -> bool:
    """Whether the process exists and is no zombie, which its new parent has yet to reap."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_environment_drops_outer_launchers() -> None:
    """A test run that itself sits under a launcher must not hand its rank to ours."""
    outer = {"OMPI_COMM_WORLD_RANK": "7", "SLURM_NTASKS": "9", "HOROVOD_RANK": "3", "HOME": "/h"}
    environment = launch_environment(outer, {"HOROVOD_CYCLE_TIME": "5"})
    assert not {"OMPI_COMM_WORLD_RANK", "SLURM_NTASKS", "HOROVOD_RANK"} & set(environment)
    assert environment["HOME"] == "/h"
    assert environment["HOROVOD_CYCLE_TIME"] == "5"


def test_mpich_has_no_open_mpi_options() -> None:
    """Hydra refuses --oversubscribe."""
    assert "--oversubscribe" in launch_command("mpirun", 2, "mpirun (Open MPI) 5.0.11")
    assert "--oversubscribe" not in launch_command("mpirun", 2, "HYDRA build details:")
