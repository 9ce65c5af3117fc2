"""Curves and energies: sums in float64, numbers that are not finite, JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from hvd_hetero.compression.gain import Curves, energy
from hvd_hetero.errors import ConfigurationError

CURVES = Curves(
    cfs=(10.0, 100.0),
    gain={10.0: 0.8, 100.0: 0.2},
    momentary={10.0: 0.9, 100.0: 0.5},
    rho={10.0: 0.6, 100.0: 2.5},
    coherence={10.0: 0.25, 100.0: 0.5},
    residual_ratio=0.5,
    raw_energy=1.0,
    total_energy=2.0,
    measurements=10,
    bucket_entries={10.0: (3.0, 4.0), 100.0: (0.5, 0.2)},
)


def test_sums_are_made_in_float64() -> None:
    """One large entry and many small ones: a float32 sum would swallow the small."""
    values = torch.full((2_000_001,), 1e-4)
    values[0] = 1.0
    assert energy(values) == pytest.approx(1.0 + 2_000_000 * 1e-8, rel=1e-6)


@pytest.mark.parametrize("elements", [0, 1, 65535, 65536, 65537, 3 * 65536 + 1])
def test_energy_of_every_length(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    expected = values.double().square().sum().item()
    assert energy(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_energy_of_other_types(dtype: torch.dtype) -> None:
    assert energy(torch.tensor([3.0, -4.0, 0.0], dtype=dtype)) == pytest.approx(25.0)


def test_a_factor_that_was_not_measured_is_refused() -> None:
    assert CURVES.at(10.0) == (0.8, 0.6, 0.25)
    with pytest.raises(ConfigurationError, match="cf=20 was not measured"):
        CURVES.at(20.0)


def test_nan_and_infinity_are_seen() -> None:
    assert CURVES.is_finite()
    for bad in (math.nan, math.inf):
        assert not replace(CURVES, raw_energy=bad).is_finite()
        assert not replace(CURVES, total_energy=bad).is_finite()
        assert not replace(CURVES, rho={10.0: bad, 100.0: 1.0}).is_finite()
        assert not replace(CURVES, residual_ratio=bad).is_finite()


def test_curves_become_json() -> None:
    values = json.loads(json.dumps(CURVES.to_dict()))
    assert values["cfs"] == [10.0, 100.0] and values["gain"] == [0.8, 0.2]
    assert values["bucket_entries"] == [[3.0, 4.0], [0.5, 0.2]]
