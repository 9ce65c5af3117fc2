"""Shadows: equal to textbook error feedback where nothing is thinned, close to it elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvd_hetero.compression.shadow import Shadows, largest

Floats = NDArray[np.float32]


def gradients(size: int, steps: int, seed: int = 0, signal: float = 0.0) -> Iterator[Floats]:
    """Noise of very different sizes per coordinate, and a constant direction."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.standard_normal(size)).astype(np.float32)
    direction = signal * scale * random.standard_normal(size).astype(np.float32)
    for _ in range(steps):
        yield direction + scale * random.standard_normal(size).astype(np.float32)


def textbook(steps: list[Floats], k: int) -> tuple[NDArray[np.float64], Floats]:
    """Return kept and total energy of every step [steps, 2], and the last residual."""
    residual, energies = np.zeros_like(steps[0]), []
    for gradient in steps:
        residual = residual + gradient
        top = np.argsort(-np.abs(residual), kind="stable")[:k]
        energies.append((np.sum(residual[top] ** 2), np.sum(residual**2)))
        residual[top] = 0.0
    return np.asarray(energies, np.float64), residual


def unprimed(cfs: list[float], size: int, buckets: int = 1) -> Shadows:
    shadows = Shadows(cfs, [size / cf for cf in cfs], np.linspace(0, size, buckets + 1).astype(int))
    shadows.seen = None
    return shadows


@given(
    values=st.lists(st.sampled_from([0.0, 1e-40, 0.5, 1.0, 3.0]), min_size=1, max_size=60),
    k=st.integers(1, 60),
    threshold=st.sampled_from([0.0, 1e-40, 0.4, 1.0, 3.0, 100.0]),
)
@settings(deadline=None, max_examples=300)
def test_largest_is_exact_whatever_was_guessed(
    values: list[float], k: int, threshold: float
) -> None:
    magnitudes = np.asarray(values, np.float32)
    indices, least = largest(magnitudes, k, threshold)
    expected = np.sort(np.argsort(-magnitudes, kind="stable")[:k])
    assert indices.tolist() == expected.tolist()
    if k < magnitudes.size:
        assert least == magnitudes[expected].min()


def test_equals_textbook_error_feedback() -> None:
    steps = list(gradients(1000, 45, signal=0.1))
    shadows = unprimed([10.0, 100.0], 1000)
    for index, gradient in enumerate(steps):
        shadows.step(gradient)
        if index % 7 == 0:
            shadows.end_window()  # a window's end changes nothing but the sums' start
    shadows.end_window()
    for shadow, k in zip(shadows.shadows, (100, 10), strict=True):
        energies, residual = textbook(steps, k)
        assert shadow.kept / shadow.total == pytest.approx(
            energies[:, 0].sum() / energies[:, 1].sum(), rel=1e-4
        )
        assert shadow.offset == pytest.approx(residual, abs=1e-4)


def test_a_high_factor_that_waits_several_steps_shows_much_the_same_gain() -> None:
    steps = list(gradients(16_000, 1600))
    shadows = unprimed([3200.0], 16_000)
    assert shadows.shadows[0].every == 3
    for index, gradient in enumerate(steps):
        if index == 600:
            shadows.end_window()
            shadows.shadows[0].clear()
        shadows.step(gradient)
    shadows.end_window()
    shadow = shadows.shadows[0]
    energies = textbook(steps, 5)[0][600:]
    expected = energies[:, 0].sum() / energies[:, 1].sum()
    assert shadow.kept / shadow.total == pytest.approx(expected, rel=0.05)
    assert shadow.entries.sum() == pytest.approx(5 * 1000, abs=15)


def test_energy_over_several_steps_is_that_of_a_steady_rise() -> None:
    """Before the entries of three steps are taken out it stood at 1/3, 2/3 and all of the rise."""
    shadow = unprimed([2.0], 4).shadows[0]
    shadow.take = 1.0 / 3.0
    shadow.take_out(np.asarray([3.0, 1.0, 0.0, 0.0], np.float32), 3, np.empty(4, np.float32))
    assert (shadow.kept, shadow.total) == (9.0, (1 + 3) + (1 + 6) + (1 + 9))


def test_thinning_keeps_the_gain_of_low_factors() -> None:
    size, cf = 40_000, 10.0
    steps = list(gradients(size, 60))
    shadows = unprimed([cf], size)
    assert shadows.strides == [2]
    for gradient in steps:
        shadows.step(gradient)
    energies, _ = textbook(steps, 4000)
    shadow = shadows.shadows[0]
    expected = energies[:, 0].sum() / energies[:, 1].sum()
    assert shadow.kept / shadow.total == pytest.approx(expected, rel=0.05)


def test_fractions_of_an_entry_add_up() -> None:
    """A factor above the size of the sample takes nothing in most steps, but not nothing ever."""
    shadows = Shadows([30.0], [7 / 30], np.asarray([0, 3, 7]))
    shadows.seen = None
    for gradient in gradients(7, 300):
        shadows.step(gradient)
    shadows.end_window()
    assert shadows.shadows[0].entries.sum() == pytest.approx(300 * 7 / 30, abs=1)


@pytest.mark.parametrize("signal", [0.0, 0.05])
def test_priming_finds_the_steady_state_from_one_window(signal: float) -> None:
    """Unprimed, ten steps say a gain at CF 100 and 400 that is many times too high."""
    cfs, size = [10.0, 100.0, 400.0], 8000
    steps = list(gradients(size, 1200, signal=signal))
    primed, unready = (
        Shadows(cfs, [size / cf for cf in cfs], np.asarray([0, size])),
        unprimed(cfs, size),
    )
    for gradient in steps[:10]:
        primed.step(gradient)
        unready.step(gradient)
    primed.end_window()
    unready.end_window()
    for cf, early, naive in zip(cfs, primed.shadows, unready.shadows, strict=True):
        energies = textbook(steps, round(size / cf))[0][800:]
        truth = energies[:, 0].sum() / energies[:, 1].sum()
        assert early.kept / early.total == pytest.approx(truth, rel=0.4)
        if cf >= 100:
            assert naive.kept / naive.total > 1.5 * truth


def test_priming_differs_between_ranks_and_repeats() -> None:
    """Residuals of ranks must not be drawn alike: their sum would be too large."""

    def primed(seed: int) -> Floats:
        shadows = Shadows([100.0], [10.0], np.asarray([0, 1000]))
        for gradient in gradients(1000, 10, seed):
            shadows.step(gradient)
        shadows.end_window()
        return shadows.shadows[0].offset

    assert (primed(1) == primed(1)).all()
    assert abs(np.corrcoef(primed(1), primed(2))[0, 1]) < 0.2


@pytest.mark.parametrize("saved_at", [4, 23])
def test_goes_on_bit_for_bit_from_a_saved_state(saved_at: int) -> None:
    """Before priming, and in the middle of a window."""
    steps = list(gradients(2000, 40))
    cfs = [10.0, 300.0]

    def build() -> Shadows:
        return Shadows(cfs, [2000 / cf for cf in cfs], np.asarray([0, 700, 2000]))

    whole, first = build(), build()
    for index, gradient in enumerate(steps):
        if index == saved_at:
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            first = build()
            first.load_state_dict(torch.load(file, weights_only=True))
        for shadows in (whole, first):
            shadows.step(gradient)
            if index % 10 == 9:
                shadows.end_window()
    for one, other in zip(whole.shadows, first.shadows, strict=True):
        assert (one.offset == other.offset).all() and (one.entries == other.entries).all()
        assert (one.kept, one.total, one.owed) == (other.kept, other.total, other.owed)
