"""Fixed point that is summed on its way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_hetero.compression.fixed_point import (
    field_bits,
    limit,
    pack_fields,
    quantize,
    step_for,
    unpack_fields,
    words_for,
)
from hvd_hetero.errors import ConfigurationError

RANKS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 32, 33, 512, 513, 16384])
MAGNITUDES = st.floats(2.0**-80, 2.0**80)


def half_of(ranks: int) -> int:
    """The largest integer of a field."""
    bits = field_bits(ranks)
    assert bits is not None
    return (1 << (bits - 1)) - 1


def random_values(k: int, scale: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, generator=generator) * scale


@settings(deadline=None)
@given(RANKS, st.integers(0, 40), st.data())
def test_sums_of_fields_are_fields_of_sums(ranks: int, k: int, data: st.DataObject) -> None:
    """At the ends of the range too: no carry between the integers of a word, no overflow."""
    most = limit(ranks)
    integer = st.one_of(st.just(most), st.just(-most), st.integers(-most, most))
    rows = [
        torch.tensor(data.draw(st.lists(integer, min_size=k, max_size=k)), dtype=torch.int64)
        for _ in range(ranks)
    ]
    total = torch.zeros(words_for(k, ranks), dtype=torch.int64)
    for row in rows:
        total += pack_fields(row, ranks)
    expected = torch.stack(rows).sum(dim=0)
    assert torch.equal(unpack_fields(total, k, ranks), expected)


@given(st.integers(1, 512), st.data())
def test_all_limits_together_fit_into_a_field(ranks: int, data: st.DataObject) -> None:
    weights = data.draw(
        st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=ranks, max_size=ranks)
    )
    total = sum(weights) or 1.0
    limits = [limit(ranks, weight / total) for weight in weights]
    assert min(limits) >= 1
    assert sum(limits) <= half_of(ranks)
    assert ranks * limit(ranks) <= half_of(ranks)


@settings(deadline=None)
@given(RANKS.filter(lambda ranks: ranks > 1), st.floats(1.0, 100.0), st.booleans())
def test_a_heavier_rank_is_not_clipped(ranks: int, ratio: float, heavy_leads: bool) -> None:
    """Values that go by weight fit, whoever leads, and where one rank counts for far more."""
    heavy, light = (weight / (ratio + ranks - 1) for weight in (ratio, 1.0))
    leader = heavy if heavy_leads else light
    step = step_for(torch.tensor(leader), ranks, leader)
    for share in (heavy, light):
        _, meant = quantize(torch.tensor([share]), step, ranks, share)
        assert abs(meant.item() - share) <= step / 2 * (1 + 1e-6)


@settings(deadline=None)
@given(RANKS, MAGNITUDES, st.integers(0, 1000))
def test_quantized_and_the_rest_are_the_value(ranks: int, scale: float, seed: int) -> None:
    values = random_values(100, scale, seed)
    step = step_for(values.abs().max(), ranks)
    integers, meant = quantize(values, step, ranks)
    assert integers.abs().max() <= limit(ranks)
    assert torch.equal(meant, integers * step)
    rest = values - meant
    assert torch.equal(meant.double() + rest.double(), values.double())
    assert rest.abs().max() <= step / 2


@settings(deadline=None)
@given(RANKS, MAGNITUDES)
def test_room_for_ranks_with_larger_values(ranks: int, largest: float) -> None:
    """About twice the leader's largest is not clipped; a fine step all the same."""
    step = step_for(torch.tensor(largest), ranks)
    _, meant = quantize(torch.tensor([1.96 * largest]), step, ranks)
    assert abs(meant.item() - 1.96 * largest) <= step / 2
    assert largest / step >= limit(ranks) / 8


@given(RANKS, st.floats(-(2.0**100), 2.0**100, width=32))
def test_what_is_clipped_is_left(ranks: int, value: float) -> None:
    step = step_for(torch.tensor(1.0), ranks)
    integers, meant = quantize(torch.tensor([value]), step, ranks)
    assert integers.abs() <= limit(ranks)
    assert meant.abs() <= abs(value) + step / 2


@pytest.mark.parametrize("ranks", [1, 2, 8, 9])
@pytest.mark.parametrize("value", [3.4028234663852886e38, 3.399e38, -3.4e38])
def test_the_largest_numbers_stay_finite(ranks: int, value: float) -> None:
    values = torch.tensor([value, 1e38])
    _, meant = quantize(values, step_for(values.abs().max(), ranks), ranks)
    assert meant.isfinite().all() and (values - meant).isfinite().all()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 3e38, float("inf"), float("nan")])
def test_steps_are_powers_of_two_that_can_be_used(largest: float) -> None:
    step = step_for(torch.tensor(largest), 8)
    assert torch.isfinite(step)
    assert step > 0
    assert torch.frexp(step).mantissa == 0.5
    assert torch.equal(quantize(torch.zeros(3), step, 8)[1], torch.zeros(3))


def test_every_rank_has_some_levels() -> None:
    words = {2: 20, 4: 20, 5: 17, 8: 17, 9: 20, 32: 20, 33: 25, 512: 25, 16384: 34}
    assert {ranks: words_for(100, ranks) for ranks in words} == words
    assert all(limit(ranks) >= 63 for ranks in range(1, 16385))
    assert field_bits(16385) is None


@pytest.mark.parametrize("ranks", [0, 16385])
def test_malformed(ranks: int) -> None:
    with pytest.raises(ConfigurationError, match=f"ranks={ranks}"):
        step_for(torch.tensor(1.0), ranks)
    with pytest.raises(ConfigurationError, match=f"ranks={ranks}"):
        words_for(5, ranks)
