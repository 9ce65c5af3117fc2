"""``hvd-hetero simulate``, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_hetero.cli import main
from hvd_hetero.cli.simulate import PAPER


def test_the_paper_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to 4096 ranks; the optimal split is the shorter step at each; assumptions are told."""
    out = tmp_path / "result.json"
    assert main(["simulate", "--cluster", "paper", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "4 A100, 4 V100, 8 RTX 6000 (paper)" in text
    assert "Assumptions" in text
    assert "samples/s" in text
    content = json.loads(out.read_text())
    assert content["speeds_are_assumptions"] is True
    scales = content["scales"]
    assert [point["ranks"] for point in scales] == [16 << power for power in range(9)]
    for point in scales:
        assert point["optimal_step_seconds"] < point["even_step_seconds"]
        assert point["speed_up"] > 1.0
        assert point["optimal_samples_per_second"] == pytest.approx(
            point["global_batch_size"] / point["optimal_step_seconds"]
        )
        assert f"x{point['scale']} " in text


def test_help_shows_the_file_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --help prints can be saved, changed and given back."""
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert PAPER in shown
    file = tmp_path / "mine.toml"
    file.write_text(shown[shown.index("global_batch_size") :].replace('"V100"', '"L40"'))
    assert main(["simulate", str(file), "--scale", "3"]) == 0
    text = capsys.readouterr().out
    assert "4 L40" in text
    assert "Assumptions" not in text
    assert [line.split()[0] for line in text.splitlines() if line[:1] == "x"] == ["x1", "x2", "x3"]


def test_json_on_standard_output_is_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without [network] the exchange takes no time."""
    file = tmp_path / "bare.toml"
    file.write_text("global_batch_size = 30\n[[ranks]]\ncount = 3\nseconds_per_sample = 0.01\n")
    assert main(["simulate", str(file), "--scale", "1", "--json", "-"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["scales"]
    assert point["even_step_seconds"] == point["optimal_step_seconds"] == pytest.approx(0.1)
    assert point["final_seconds"] == 0.0


RANKS = "global_batch_size = 64\n[[ranks]]\nseconds_per_sample = 0.01\n"


@pytest.mark.parametrize(
    ("text", "arguments", "parts"),
    [
        (None, [], ["no cluster is given", "--cluster paper"]),
        (RANKS, ["--cluster", "paper"], ["both given"]),
        (RANKS, ["--scale", "0"], ["--scale=0", "whole number"]),
        (None, ["--cluster", "paper", "--scale", "99999999"], ["--scale=99999999"]),
        (RANKS.split("\n", 1)[1], [], ["global_batch_size: missing"]),
        (RANKS + "[network]\nfinal_seconds = 0.1\n", [], ["final_seconds", "gradient_bytes"]),
        (
            RANKS + "[network]\ngradient_bytes = 1e6\n",
            [],
            ["network.bandwidth_bits_per_second: missing"],
        ),
        (
            RANKS + "[network]\ngradient_bytes = 1e6\nbandwith_bits_per_second = 1e9\n",
            [],
            ["network.bandwith_bits_per_second", "did you mean 'bandwidth_bits_per_second'"],
        ),
        (
            RANKS + "[network]\ngradient_bytes = 1e6\nbandwidth_bits_per_second = 0\n",
            [],
            ["network.bandwidth_bits_per_second=0", "above 0"],
        ),
        ('{"kind": "window"}', [], ["neither records of a run nor TOML"]),
    ],
)
def test_errors_are_one_sentence(
    text: str | None,
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The option or key, its value, and what to do; status 1, as of the other commands."""
    file = tmp_path / "cluster.toml"
    if text is not None:
        file.write_text(text)
        arguments = [str(file), *arguments]
    assert main(["simulate", *arguments]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    for part in parts:
        assert part in told.err
