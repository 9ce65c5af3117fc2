"""``hvd-hetero plan``, through the command line, from profiles and from records."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_hetero.cli import main
from hvd_hetero.telemetry.records import ConfigurationRecord, WindowRecord

PROFILE = """
global_batch_size = 512
[[ranks]]
count = 4
name = "A100"
seconds_per_sample = 0.0011
fixed_seconds = 0.004
first_bucket_share = 0.5
max_local_batch = 256
[[ranks]]
count = 4
name = "T4"
seconds_per_sample = 0.0055
[network]
overlapped_seconds = 0.010
final_seconds = 0.002
"""
SPEEDS = (0.001, 0.002, 0.002, 0.004)  # seconds per sample of the recorded ranks
FIXED_SECONDS = 0.01
WAIT_SECONDS = 0.003


def configuration(**balancer: Any) -> ConfigurationRecord:
    options = {
        "global_batch_size": 128,
        "min_local_batch": [1] * 4,
        "max_local_batch": [128] * 4,
        "granule": 1,
        "window_steps": 10,
    }
    return ConfigurationRecord({}, 4, {"balancer": {**options, **balancer}})


def window(
    step: int, ran: tuple[int, ...], after: tuple[int, ...], *, scale: float = 1.0
) -> WindowRecord:
    """A window with ``ran`` in force, whose end decided for ``after``."""
    compute = [scale * (s * b + FIXED_SECONDS) for s, b in zip(SPEEDS, ran, strict=True)]
    return WindowRecord(
        step=step,
        step_seconds=max(compute) + WAIT_SECONDS,
        compute_seconds=tuple(compute),
        wait_seconds=tuple(max(compute) - one + WAIT_SECONDS for one in compute),
        local_batches=after,
        global_batch_size=sum(after),
        cf=None,
        gain=None,
        strategy="dense",
        bytes_per_step=1.0,
        plan_version=int(after != EVEN),
        changed=("plan",) if after != ran else (),
    )


EVEN, UNEVEN = (32, 32, 32, 32), (56, 29, 29, 14)


def write(path: Path, *records: ConfigurationRecord | WindowRecord) -> str:
    path.write_text("".join(record.to_json() + "\n" for record in records))
    return str(path)


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json", "-"]) == 0, capsys.readouterr().err
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def split(content: dict[str, Any]) -> list[int]:
    return [rank["optimal_local_batch"] for rank in content["ranks"]]


# ---- profiles -----------------------------------------------------------------------------------


def test_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Split, step, loss of the even split, and one more of each class; the same as JSON."""
    file, out = tmp_path / "speeds.toml", tmp_path / "out.json"
    file.write_text(PROFILE)
    assert main(["plan", str(file), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    content = json.loads(out.read_text())
    assert sum(split(content)) == 512
    # Without a first_bucket_share, as here on the slowest, nothing overlaps.
    assert content["even_step_seconds"] == pytest.approx(64 * 0.0055 + 0.010 + 0.002)
    assert content["lost_seconds"] == pytest.approx(
        content["even_step_seconds"] - content["optimal_step_seconds"]
    )
    assert f"{content['optimal_step_seconds'] * 1e3:.1f} ms" in text
    assert f"{content['lost_share']:.1%}" in text
    assert [one["speed_class"] for one in content["one_more"]] == ["A100", "T4"]
    assert content["one_more"][0]["saved_seconds"] > content["one_more"][1]["saved_seconds"] > 0
    assert sum(line.startswith(tuple("01234567")) for line in text.splitlines()) == 8


def test_many_ranks_are_grouped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each class, with the ranks and the least and the most of their batches."""
    file = tmp_path / "speeds.toml"
    file.write_text(PROFILE.replace("count = 4", "count = 400"))
    assert main(["plan", str(file), "--global-batch-size", "51201"]) == 0
    text = capsys.readouterr().out
    assert "0-399 " in text and "400-799 " in text
    assert len(text.splitlines()) < 20


def test_options_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line comes before the file; bounds and granule are obeyed."""
    file = tmp_path / "speeds.toml"
    file.write_text(PROFILE)
    found = result(capsys, str(file), "--global-batch-size", "1024", "--granule", "8")
    assert sum(split(found)) == 1024
    assert all(batch % 8 == 0 for batch in split(found))
    found = result(capsys, str(file), "--max-local-batch", "80", "--min-local-batch", "40")
    assert set(split(found)) <= set(range(40, 81))
    found = result(capsys, str(file), "--max-local-batch", "200,200,200,200,20,20,20,9")
    assert split(found)[7] <= 9


@pytest.mark.parametrize(
    ("change", "arguments", "parts"),
    [
        (("count", "cuont"), [], ["ranks[0].cuont=4", "did you mean 'count'"]),
        (("[network]", "[netwrok]"), [], ["netwrok=", "did you mean 'network'"]),
        (("final_seconds", "finale_seconds"), [], ["network.finale_seconds", "'final_seconds'"]),
        (("= 0.0011", "= -1"), [], ["ranks[0].seconds_per_sample=-1", "above 0"]),
        (("= 0.0011", '= "fast"'), [], ["ranks[0].seconds_per_sample='fast'", "a number"]),
        (("seconds_per_sample = 0.0011", ""), [], ["seconds_per_sample: missing"]),
        (("= 0.5", "= 1.5"), [], ["ranks[0].first_bucket_share=1.5"]),
        (("count = 4", "count = 0"), [], ["ranks[0].count=0"]),
        (('"T4"', '"A100"'), [], ["ranks[1].name='A100'"]),
        (("final_seconds", "gradient_bytes"), [], ["network.overlapped_seconds", "either"]),
        (("[[ranks]]", "[[ranks"), [], ["neither records", "line 3"]),
        (("global_batch_size = 512", ""), [], ["global_batch_size: missing"]),
        (("", ""), ["--global-batch-size", "4"], ["global_batch_size=4", "at least 8"]),
        (("", ""), ["--global-batch-size", "0"], ["--global-batch-size=0"]),
        (("", ""), ["--granule", "0"], ["--granule=0"]),
        (("", ""), ["--granule", "100"], ["granule=100", "change the bounds"]),
        (("", ""), ["--max-local-batch", "8"], ["global_batch_size=512", "at most 64"]),
        (("", ""), ["--max-local-batch", "many"], ["--max-local-batch='many'", "whole number"]),
        (("", ""), ["--min-local-batch", "1,2"], ["--min-local-batch='1,2'", "8 ranks"]),
        (("", ""), ["--min-local-batch", "300"], ["--min-local-batch='300'", "at most 256"]),
        (("", ""), ["--json", "/no/folder/x"], ["--json='/no/folder/x'", "cannot be written"]),
    ],
)
def test_errors_are_one_sentence(
    change: tuple[str, str],
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The option or key, its value, and what to do; status 1, as of the other commands."""
    file = tmp_path / "speeds.toml"
    file.write_text(PROFILE.replace(*change, 1))
    assert main(["plan", str(file), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is missing, a folder, an empty file."""
    (tmp_path / "empty").write_text("\n")
    for name, part in (("none", "No such file"), (".", "Is a directory"), ("empty", "is empty")):
        assert main(["plan", str(tmp_path / name)]) == 1
        assert part in capsys.readouterr().err


# ---- records ------------------------------------------------------------------------------------


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines over two sizes; the first window ran the even split, which no record names."""
    file = write(
        tmp_path / "run.jsonl",
        configuration(),
        window(10, EVEN, UNEVEN),
        window(20, UNEVEN, UNEVEN, scale=3.0),  # mixed: must not be believed
        window(30, UNEVEN, UNEVEN),
        window(40, UNEVEN, UNEVEN),
    )
    assert main(["plan", file]) == 0
    text = capsys.readouterr().out
    assert "3 of 4 used" in text
    assert "plan changed just before: 1" in text
    assert "for 4 of 4 ranks" in text
    content = result(capsys, file)
    assert content["final_seconds"] == pytest.approx(WAIT_SECONDS)
    assert content["even_step_seconds"] == pytest.approx(0.004 * 32 + 0.013, rel=0.05)
    assert content["optimal_step_seconds"] == pytest.approx(0.067 + 0.003, rel=0.1)
    assert [rank["speed_class"] for rank in content["ranks"]] == [
        "class 1",
        "class 2",
        "class 2",
        "class 3",
    ]
    # 128 is no bound of the user's: without one the balancer writes down its global batch.
    larger = result(capsys, file, "--global-batch-size", "1024")
    assert split(larger)[0] > 128


def test_records_of_one_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed sizes, say: seconds per sample through the origin, and that is said."""
    windows = [window(step, EVEN, EVEN) for step in (10, 20)]
    file = write(tmp_path / "run.jsonl", configuration(), *windows)
    assert main(["plan", file]) == 0
    assert "through the origin" in capsys.readouterr().out
    content = result(capsys, file)
    assert [rank["done"][1] for rank in content["ranks"]] == [0.0] * 4


def test_bounds_of_the_run_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the run's balancer was told holds, unless the command line says otherwise."""
    told = configuration(max_local_batch=[40] * 4, granule=4)
    windows = [window(step, EVEN, EVEN) for step in (10, 20)]
    file = write(tmp_path / "run.jsonl", told, *windows)
    assert max(split(result(capsys, file))) == 40
    assert split(result(capsys, file, "--max-local-batch", "128"))[0] > 40
    assert all(batch % 4 == 0 for batch in split(result(capsys, file)))


def test_only_the_last_run_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs append to one file; a last line that was cut short is left out."""
    path = tmp_path / "run.jsonl"
    old = [window(step, EVEN, EVEN, scale=7.0) for step in (10, 20)]
    new = [window(step, EVEN, EVEN) for step in (10, 20)]
    file = write(path, configuration(), *old, configuration(), *new)
    with path.open("a") as more:
        more.write('{"kind": "win')
    content = result(capsys, file)
    assert content["even_step_seconds"] == pytest.approx(0.004 * 32 + 0.013)


def test_a_change_within_a_window_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records every 10 steps, plans every 15: at step 20 both splits have run."""
    file = write(
        tmp_path / "run.jsonl",
        configuration(window_steps=15),
        window(10, EVEN, EVEN),
        window(20, EVEN, UNEVEN, scale=3.0),
        window(30, UNEVEN, UNEVEN, scale=3.0),
        window(40, UNEVEN, UNEVEN),
    )
    assert main(["plan", file]) == 0
    text = capsys.readouterr().out
    assert "2 of 4 used" in text and "plan changed within: 1" in text


def test_a_resumed_run_has_no_even_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ran before a later plan than the second is not known in the first window."""
    first = dataclasses.replace(window(10, EVEN, UNEVEN), plan_version=5)
    rest = [window(step, UNEVEN, UNEVEN) for step in (20, 30)]
    assert main(["plan", write(tmp_path / "run.jsonl", configuration(), first, *rest)]) == 0
    text = capsys.readouterr().out
    assert "1 of 3 used" in text and "local batches not known: 1" in text


def test_records_that_tell_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No windows, no balancer, no seconds: named, with what to do."""
    bare = WindowRecord(10, 0.1, (0.1,), (0.0,), (), None, None, None, "dense", 1.0)
    dumb = WindowRecord(10, 0.1, (float("nan"),), (0.0,), (8,), 8, None, None, "dense", 1.0)
    for records, part in (
        ([configuration()], "no window"),
        ([configuration(), bare], "no local batches, as without a balancer: 1"),
        ([configuration(), dumb], "a rank without compute seconds: 1"),
    ):
        assert main(["plan", write(tmp_path / "run.jsonl", *records)]) == 1
        error = capsys.readouterr().err
        assert part in error and "balancer=" in error
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "window", "schema": 9}\n')
    assert main(["plan", str(path)]) == 1
    assert "line 1: schema=9" in capsys.readouterr().err


def test_planning_needs_no_horovod_and_no_torch(tmp_path: Path) -> None:
    """A plan can be made where nothing can be trained."""
    profile, records = tmp_path / "speeds.toml", tmp_path / "run.jsonl"
    profile.write_text(PROFILE)
    write(records, configuration(), window(10, EVEN, UNEVEN), window(20, UNEVEN, UNEVEN))
    code = (
        "import sys\n"
        "for name in ('torch', 'horovod', 'mpi4py'): sys.modules[name] = None\n"
        "from hvd_hetero.cli import main\n"
        f"assert main(['plan', {str(profile)!r}]) == main(['plan', {str(records)!r}]) == 0\n"
        "assert main(['simulate', '--cluster', 'paper', '--scale', '2']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
