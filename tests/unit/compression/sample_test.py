"""Samples: exact when they are everything, alike on all ranks, additive over them."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.gain import Curves
from hvd_hetero.compression.sample import GradientSample
from hvd_hetero.compression.sketch import SKETCH_SUMS
from hvd_hetero.compression.topk import k_for
from hvd_hetero.errors import ConfigurationError

CFS = (10.0, 20.0, 100.0)


def feed(
    sample: GradientSample, gradients: Sequence[torch.Tensor], residual: float | None = None
) -> None:
    """One step of buckets; each bucket's residual is ``residual`` times its gradient."""
    for bucket, gradient in enumerate(gradients):
        sample.take_gradient(bucket, gradient)
        if residual is not None:
            sample.take_compensated(bucket, gradient * (1 + residual))
    sample.end_step()


def noise(*elements: int, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(d, generator=random) for d in elements]


def read(*samples: GradientSample) -> Curves:
    return samples[0].read(torch.stack([sample.sums() for sample in samples]).sum(dim=0))


@given(
    elements=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    cfs=st.lists(st.floats(1.0, 500.0), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_everything_sampled_is_exact(elements: list[int], seed: int, cfs: list[float]) -> None:
    """Gains of the moment are those of one top-k over all buckets, energies are exact."""
    sample = GradientSample(elements, cfs)
    assert sample.size == sum(elements)
    random = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(d, generator=random) for d in elements]
    feed(sample, gradients, residual=0.5)
    curves = read(sample)
    flat = torch.cat(gradients).double()
    assert curves.cfs == tuple(sorted({float(cf) for cf in cfs}))
    assert curves.raw_energy == pytest.approx(float(flat.square().sum()), rel=1e-5)
    assert curves.total_energy == pytest.approx(2.25 * float(flat.square().sum()), rel=1e-5)
    for cf in curves.cfs:
        top = torch.topk(flat.abs(), k_for(sum(elements), cf)).values.square().sum()
        expected = float(top / flat.square().sum()) if sum(elements) else 1.0
        assert curves.momentary[cf] == pytest.approx(expected, rel=1e-5)
    assert curves.is_finite()


def test_a_sample_tells_the_whole_model() -> None:
    """Gains, energies and each bucket's entries, from a sixteenth of three unequal buckets."""
    elements, scales = (60_000, 30_000, 10_000), (1.0, 3.0, 0.1)
    sample = GradientSample(elements, CFS, sample_elements=6250)
    assert sample.size == pytest.approx(6250, abs=3)
    flats = []
    for step in range(30):
        gradients = [
            scale * one for scale, one in zip(scales, noise(*elements, seed=step), strict=True)
        ]
        feed(sample, gradients)
        flats.append(torch.cat(gradients).double())
    curves = read(sample)
    raw = float(torch.stack(flats).square().sum()) / 30
    assert curves.raw_energy == pytest.approx(raw, rel=0.05)
    for cf in CFS:
        top = torch.topk(flats[0].abs(), k_for(100_000, cf))
        share = float(top.values.square().sum() / flats[0].square().sum())
        assert curves.momentary[cf] == pytest.approx(share, rel=0.1)
        assert sum(curves.bucket_entries[cf]) == pytest.approx(100_000 / cf, rel=0.05)
        assert curves.bucket_entries[cf][1] > curves.bucket_entries[cf][0]
    assert curves.gain[10.0] > curves.gain[20.0] > curves.gain[100.0]
    assert curves.rho[10.0] < curves.rho[20.0] < curves.rho[100.0]
    assert curves.measurements == 30


def test_rho_is_that_of_the_sum_over_ranks() -> None:
    """Four ranks: noise in the gradients adds up by squares, a common residual does not."""
    ranks = [GradientSample([50_000], CFS, sample_elements=20_000) for _ in range(4)]
    common = noise(50_000, seed=99)[0]
    for step in range(8):
        for rank, sample in enumerate(ranks):
            gradient = noise(50_000, seed=10 * step + rank)[0]
            sample.take_gradient(0, gradient)
            sample.take_compensated(0, gradient + common)
            sample.end_step()
    curves = read(*ranks)
    # || 4 common || / || sum of 4 independent || = 4 / 2, within a sketch's 6 %.
    assert curves.residual_ratio == pytest.approx(2.0, rel=0.15)
    assert curves.measurements == 32


def test_rho_of_a_gradient_that_stays_the_same() -> None:
    """Sketches of several steps add up by their squares, also where the steps are alike."""
    sample = GradientSample([5000], CFS)
    for _ in range(12):
        feed(sample, noise(5000), residual=1.0)
    assert read(sample).residual_ratio == pytest.approx(1.0, rel=0.15)


def test_rho_of_noise_follows_the_gain() -> None:
    """Under independent noise rho = sqrt((1 - gain) / gain), whatever the number of ranks."""
    ranks = [GradientSample([30_000], CFS, sample_elements=30_000) for _ in range(3)]
    for step in range(240):
        for rank, sample in enumerate(ranks):
            feed(sample, noise(30_000, seed=10 * step + rank))
        if step % 10 == 9:
            curves = read(*ranks)
    for cf in CFS:
        gain = curves.gain[cf]
        assert curves.rho[cf] == pytest.approx(math.sqrt((1 - gain) / gain), rel=0.15)


def test_where_there_is_no_residual_the_gradient_counts() -> None:
    with_residual, without = (GradientSample([500, 200], CFS) for _ in range(2))
    feed(with_residual, noise(500, 200), residual=0.0)
    feed(without, noise(500, 200))
    one, other = read(with_residual), read(without)
    assert one == other and one.residual_ratio == 0.0


def test_the_same_coordinates_on_all_ranks() -> None:
    values = torch.arange(100_000.0)
    samples = [GradientSample([100_000], CFS, sample_elements=1000, seed=s) for s in (1, 1, 2)]
    taken = []
    for sample in samples:
        sample.take_gradient(0, values)
        taken.append(sample._gradient.clone())
    assert torch.equal(taken[0], taken[1]) and not torch.equal(taken[0], taken[2])
    # One in each run of 100: sorted, without repetition, spread evenly.
    assert torch.equal((taken[0] // 100).long(), torch.arange(1000))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    sample, other = (GradientSample([300], CFS) for _ in range(2))
    for step in range(6):
        gradients = noise(300, seed=step)
        if step == 2:
            broken = gradients[0].clone()
            broken[7] = bad
            feed(sample, [broken])
            feed(sample, gradients, residual=bad)  # the residual broken, not the gradient
            continue
        feed(sample, gradients)
        feed(other, gradients)
    curves = read(sample)
    assert curves.is_finite() and curves.measurements in (5, 6)
    assert curves.gain[10.0] == pytest.approx(read(other).gain[10.0], rel=0.1)


def test_a_dropped_step_leaves_no_trace() -> None:
    sample, other = (GradientSample([300], CFS) for _ in range(2))
    sample.take_gradient(0, torch.full((300,), 1e9))
    sample.take_compensated(0, torch.full((300,), 1e9))
    sample.drop_step()
    for one in (sample, other):
        feed(one, noise(300))
    assert read(sample) == read(other)


def test_the_size_follows_the_model_between_bounds() -> None:
    sizes = [GradientSample([d], CFS).size for d in (1000, 100_000, 8_000_000, 20_000_000)]
    assert sizes == [1000, 16_384, 31_250, 65_536]


def test_the_length_of_the_sums_is_fixed_and_small() -> None:
    sample = GradientSample([300_000, 5], CFS)
    empty = sample.sums()
    feed(sample, noise(300_000, 5))
    assert sample.sums().shape == empty.shape and empty.dtype == torch.float64
    assert empty.numel() < 8 * SKETCH_SUMS
    curves = sample.read(empty)
    assert curves.measurements == 0 and curves.raw_energy == 0.0
    with pytest.raises(ConfigurationError, match="same buckets"):
        sample.read(empty[:-1])


def test_float64_buckets_and_buckets_of_one_element() -> None:
    sample = GradientSample([1, 400], CFS)
    feed(sample, [one.double() for one in noise(1, 400)], residual=0.1)
    assert read(sample).is_finite()


@pytest.mark.parametrize("saved_at", [5, 26])
def test_goes_on_from_a_saved_state_as_if_nothing_had_happened(saved_at: int) -> None:
    def build() -> GradientSample:
        return GradientSample([3000, 500], (10.0, 300.0), sample_elements=1000)

    whole, part = build(), build()
    for step in range(40):
        if step == saved_at:
            file = io.BytesIO()
            torch.save(part.state_dict(), file)
            file.seek(0)
            part = build()
            part.load_state_dict(torch.load(file, weights_only=True))
        for sample in (whole, part):
            feed(sample, noise(3000, 500, seed=step), residual=0.3)
        if step % 10 == 9:
            assert torch.equal(whole.sums(), part.sums())


def test_a_state_of_other_buckets_is_refused() -> None:
    state = GradientSample([300], CFS).state_dict()
    for other in (GradientSample([301], CFS), GradientSample([300], (10.0,))):
        with pytest.raises(ConfigurationError, match="does not fit"):
            other.load_state_dict(state)
