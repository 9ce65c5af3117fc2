"""Packed indices: exact, of a known size, small."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_hetero.compression import indices as module
from hvd_hetero.compression.indices import index_bytes, pack_indices, unpack_indices
from hvd_hetero.errors import ConfigurationError

LENGTHS = [1, 2, 3, 15, 16, 17, 255, 256, 257, 1000, 65535, 65536, 65537, 3 * 65536 + 1]


def _random(seed: int, k: int, elements: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(elements, generator=generator)[:k].sort().values


@given(
    seed=st.integers(0, 2**31),
    elements=st.sampled_from(LENGTHS),
    share=st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0]),
)
@settings(deadline=None, max_examples=200)
def test_unpack_undoes_pack_and_both_ways_write_the_same(
    seed: int, elements: int, share: float
) -> None:
    """numpy on the CPU, torch elsewhere: one format."""
    k = min(elements, round(share * elements) or 1)
    indices = _random(seed, k, elements)
    packed = pack_indices(indices, elements)
    assert packed.dtype == torch.uint8 and packed.shape == (index_bytes(k, elements),)
    assert torch.equal(unpack_indices(packed, k, elements), indices)
    if 0 < k < elements:
        assert torch.equal(module._pack_with_torch(indices, elements), packed)
        assert torch.equal(module._unpack_with_torch(packed, k, elements), indices)
        shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])[3:]
        assert torch.equal(unpack_indices(shifted, k, elements), indices)


@pytest.mark.parametrize("elements", LENGTHS)
def test_first_last_and_crowded_ends(elements: int) -> None:
    """S19 and blocks that are full: no count overflows, whatever lies where."""
    everything = torch.arange(elements)
    for indices in (
        everything[:0],
        everything[:1],
        everything[-1:],
        everything[: elements // 2],
        everything[-(elements // 2) :],
        everything[1:],
        everything,
    ):
        packed = pack_indices(indices, elements)
        assert torch.equal(unpack_indices(packed, len(indices), elements), indices)


@pytest.mark.parametrize("k", [0, 10])
def test_nothing_is_sent_for_nothing_and_for_all(k: int) -> None:
    assert index_bytes(k, 10) == 0
    assert pack_indices(torch.arange(k), 10).shape == (0,)


def test_an_empty_gradient() -> None:
    assert unpack_indices(pack_indices(torch.arange(0), 0), 0, 0).shape == (0,)


@pytest.mark.parametrize(("cf", "bits"), [(2, 3), (10, 5.7), (100, 9.4), (1000, 13), (10**5, 19.3)])
def test_bits_an_index(cf: int, bits: float) -> None:
    """Within three bits of the entropy of a random choice."""
    elements = 10**6
    k = elements // cf
    share = k / elements
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
    used = 8 * index_bytes(k, elements) / k
    assert entropy <= used <= bits
    assert used <= entropy + 3 or cf > 10**4


@given(st.integers(1, 2**33), st.integers(1, 2**33))
@settings(deadline=None)
def test_never_more_than_a_bitmap_or_two_bytes_and_a_little(first: int, second: int) -> None:
    k, elements = min(first, second), max(first, second)
    assert index_bytes(k, elements) <= min((k + elements) / 8, 17 * k / 8 + elements / 2**19) + 3


def test_indices_beyond_int32() -> None:
    """S32: nothing passes through int32 or a float."""
    elements = 2**31 + 10
    indices = torch.tensor([0, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 9])
    packed = pack_indices(indices, elements)
    assert torch.equal(unpack_indices(packed, 5, elements), indices)
    assert torch.equal(module._unpack_with_torch(packed, 5, elements), indices)
    assert torch.equal(module._pack_with_torch(indices, elements), packed)


def test_what_does_not_fit_is_refused() -> None:
    packed = pack_indices(torch.tensor([1, 5]), 100)
    with pytest.raises(ConfigurationError, match="expected"):
        unpack_indices(packed[:-1], 2, 100)
    with pytest.raises(ConfigurationError, match="expected"):
        unpack_indices(packed.to(torch.int16), 2, 100)
    with pytest.raises(ConfigurationError, match="damaged"):
        unpack_indices(torch.zeros_like(packed), 2, 100)
    with pytest.raises(ConfigurationError, match="k=3"):
        pack_indices(torch.arange(3), 2)
    for wrong in (torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones((1, 2)).long()):
        with pytest.raises(ConfigurationError, match="int64"):
            pack_indices(wrong, 10)
