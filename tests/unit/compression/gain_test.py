"""Energies and gains: ratios of sums, nested selections equal to selections from all."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.gain import Energies, energy, measure
from hvd_hetero.compression.topk import k_for, select
from hvd_hetero.errors import ConfigurationError

FACTORS = (1.0, 2.0, 10.0, 37.5, 1000.0)


@given(
    seed=st.integers(0, 2**31),
    elements=st.integers(0, 500),
    selected_cf=st.sampled_from([None, *FACTORS]),
    cfs=st.lists(st.sampled_from(FACTORS), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=150)
def test_equals_a_selection_from_all_for_every_factor(
    seed: int, elements: int, selected_cf: float | None, cfs: list[float]
) -> None:
    """Multi-level selection is exact, also where a factor needs more than was selected."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    selected = None if selected_cf is None else select(values, k_for(elements, selected_cf))
    measured = measure(values, selected, cfs, raw=3.0)
    assert set(measured.kept) == set(cfs)
    assert measured.raw == 3.0 and measured.measurements == 1
    assert measured.total == pytest.approx(values.double().square().sum().item())
    for cf in cfs:
        top = torch.topk(values.abs(), k_for(elements, cf)).values.double()
        assert measured.kept[cf] == pytest.approx(top.square().sum().item(), rel=1e-12)
        assert 0.0 <= measured.gain(cf) <= 1.0


def test_gain_falls_as_the_factor_rises_and_is_one_when_all_is_sent() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    measured = measure(values, None, FACTORS, raw=0.0)
    gains = [measured.gain(cf) for cf in FACTORS]
    assert gains[0] == 1.0
    assert gains == sorted(gains, reverse=True) and gains[-1] < gains[0]


def test_sums_are_made_in_float64() -> None:
    """One large entry and many small ones: a float32 sum would swallow the small."""
    values = torch.full((2_000_001,), 1e-4)
    values[0] = 1.0
    assert energy(values) == pytest.approx(1.0 + 2_000_000 * 1e-8, rel=1e-6)
    assert measure(values, None, [1e6], raw=0.0).kept[1e6] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("elements", [0, 1, 65535, 65536, 65537, 3 * 65536 + 1])
def test_energy_of_every_length(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    expected = values.double().square().sum().item()
    assert energy(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    values = torch.tensor([3.0, -4.0, 0.0], dtype=dtype)
    measured = measure(values, None, [3.0], raw=25.0)
    assert [measured.total, measured.kept[3.0]] == pytest.approx([25.0, 16.0])


def test_ratio_of_sums_not_mean_of_ratios() -> None:
    small = Energies(1.0, 1.0, {10.0: 0.0})
    large = Energies(99.0, 49.0, {10.0: 99.0})
    both = small + large
    assert both == Energies(100.0, 50.0, {10.0: 99.0}, 2)
    assert both.gain(10.0) == 0.99
    assert both.raw_per_measurement == 25.0


def test_the_empty_sum_is_neutral() -> None:
    one = Energies(2.0, 1.0, {10.0: 1.5})
    assert Energies.sum([]) == Energies.zero()
    assert Energies.sum([one]) == one == one + Energies.zero()
    assert Energies.zero().raw_per_measurement == 0.0


def test_sums_of_different_factors_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\[10.0\].*\[20.0\]"):
        Energies(1.0, 1.0, {10.0: 1.0}) + Energies(1.0, 1.0, {20.0: 1.0})


def test_gain_of_nothing_and_of_the_unmeasured() -> None:
    assert measure(torch.zeros(5), None, [10.0], raw=0.0).gain(10.0) == 1.0
    with pytest.raises(ConfigurationError, match="cf=20 was not measured"):
        Energies(1.0, 1.0, {10.0: 1.0}).gain(20.0)


def test_rounding_never_gives_a_gain_above_one() -> None:
    assert Energies(1.0, 1.0, {10.0: 1.0 + 1e-12}).gain(10.0) == 1.0


def test_nan_and_infinity_are_seen() -> None:
    for bad in (math.nan, math.inf):
        measured = measure(torch.tensor([1.0, bad, 2.0]), None, [3.0], raw=5.0)
        assert not measured.is_finite()
    assert measure(torch.ones(3), None, [3.0], raw=3.0).is_finite()
    assert not Energies(1.0, math.nan, {10.0: 1.0}).is_finite()


def test_energies_survive_json() -> None:
    measured = Energies(1.5, 0.1, {10.0: 0.5, 10.0 * 1.1**7: 0.25}, 12)
    assert Energies.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
