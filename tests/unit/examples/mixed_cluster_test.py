"""The demo's options, and the layer that makes a rank slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from demo_data import load
from demo_training import Slow
from mixed_cluster import OptionError, introduction, make_settings, parse

import hvd_hetero as het


@pytest.mark.parametrize(
    ("arguments", "ranks", "words"),
    [
        (["--slowdown", "1,2,2"], 4, "3 factors for 4 ranks"),
        ([], 2, "4 factors for 2 ranks"),
        (["--slowdown", "1,x,2,4"], 4, "must be numbers"),
        (["--slowdown", "1,0,2,4"], 4, "must be above 0"),
        (["--slowdown", "1,inf,2,4"], 4, "must be above 0"),
        (["--global-batch-size", "130"], 4, "multiple of the 4 ranks"),
        (["--global-batch-size", "0"], 4, "multiple of the 4 ranks"),
        (["--steps", "15"], 4, "multiple of 10"),
        (["--seeds", "0"], 4, "at least 1"),
        (["--target", "1.5"], 4, "at most 1"),
        (["--learning-rate", "0"], 4, "must be above 0"),
        (["--momentum", "1"], 4, "at least 0 and below 1"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], ranks: int, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_settings(parse(arguments), ranks)


def test_eps_is_refused_in_the_words_of_the_library() -> None:
    with pytest.raises(het.ConfigurationError, match="eps"):
        make_settings(parse(["--eps", "1.5"]), 4)


@pytest.mark.parametrize("arguments", [["--steps", "many"], ["--unknown"], ["--progress", "loud"]])
def test_unreadable_command_lines(arguments: list[str]) -> None:
    with pytest.raises(OptionError):
        parse(arguments)


@pytest.mark.parametrize(
    ("slowdown", "total"), [("1,2,2,4", 128), ("1,2,2,4", 16), ("1,1", 64), ("0.5,0.5", 512)]
)
def test_sleep_is_long_enough(slowdown: str, total: int) -> None:
    """At least 1 ms times the factor a sample, and an even step of at least 100 ms."""
    ranks = slowdown.count(",") + 1
    arguments = ["--slowdown", slowdown, "--global-batch-size", str(total)]
    settings = make_settings(parse(arguments), ranks)
    assert settings.seconds_per_sample >= 1e-3
    even_seconds = settings.seconds_per_sample * max(settings.slowdown) * total / ranks
    assert even_seconds >= 0.1 - 1e-12


def test_introduction_says_what_is_emulated() -> None:
    text = introduction(make_settings(parse([]), 4), load("digits"))
    assert "sleep 1.5, 3, 3, 6 ms a sample" in text
    assert "192 ms with even batches, 85 ms with the best split" in text


def test_records_lie_in_the_output_folder(tmp_path: Path) -> None:
    settings = make_settings(parse(["--output", str(tmp_path)]), 4)
    assert settings.records == tmp_path / "records.jsonl"


def test_slow_layer_sleeps_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layer = Slow(0.003)
    x = torch.randn(5, 2, requires_grad=True)
    y = layer(x)
    assert slept == pytest.approx([5 * 0.001])
    (y * torch.arange(2.0)).sum().backward()
    assert slept == pytest.approx([5 * 0.001, 5 * 0.002])
    assert torch.equal(y, x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([[0.0, 1.0]] * 5))
    layer.eval()
    layer(x)
    assert len(slept) == 2
