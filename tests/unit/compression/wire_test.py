"""Packets: exact, of known size, and safe one behind the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.topk import SparseGradient, select
from hvd_hetero.compression.wire import (
    BLOCK_ELEMENTS,
    pack,
    packed_bytes,
    unpack,
)
from hvd_hetero.errors import ConfigurationError, UnsupportedError
from hvd_hetero.exchange.allgather import sparse_saves_bytes

LENGTHS = [1, 2, 3, 1000, 65535, 65536, 65537, 2 * 65536, 65536 * 3 + 1]


def _random(seed: int, elements: int, k: int, dtype: torch.dtype) -> SparseGradient:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(elements, generator=generator)[:k].sort().values
    values = torch.randn(k, generator=generator, dtype=torch.float64).to(dtype)
    return SparseGradient(values, indices, elements)


def _assert_equal(left: SparseGradient, right: SparseGradient) -> None:
    assert left.elements == right.elements
    assert left.values.dtype == right.values.dtype
    assert left.indices.dtype == torch.int64
    assert torch.equal(left.values, right.values)
    assert torch.equal(left.indices, right.indices)


@given(
    seed=st.integers(0, 2**31),
    elements=st.sampled_from(LENGTHS),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
@settings(deadline=None, max_examples=120)
def test_unpack_undoes_pack(seed: int, elements: int, share: float, dtype: torch.dtype) -> None:
    sparse = _random(seed, elements, max(1, int(share * elements)), dtype)
    packed = pack(sparse)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.numel() == packed_bytes(sparse.k, elements, dtype)
    _assert_equal(unpack(packed, elements, dtype), sparse)


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_and_last_element_alone_and_everything(elements: int, dtype: torch.dtype) -> None:
    for indices in (
        torch.tensor([0]),
        torch.tensor([elements - 1]),
        torch.arange(elements),
    ):
        sparse = SparseGradient(torch.randn(len(indices), dtype=dtype), indices, elements)
        _assert_equal(unpack(pack(sparse), elements, dtype), sparse)


@given(
    seed=st.integers(0, 2**31),
    ranks=st.integers(1, 5),
    k=st.integers(0, 40),
    elements=st.sampled_from([40, 70000, 65536 * 2]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=60)
def test_packets_of_ranks_can_be_gathered_and_split(
    seed: int, ranks: int, k: int, elements: int, dtype: torch.dtype
) -> None:
    sent = [_random(seed + rank, elements, k, dtype) for rank in range(ranks)]
    gathered = torch.cat([pack(sparse) for sparse in sent])
    for rank, packed in enumerate(torch.split(gathered, packed_bytes(k, elements, dtype))):
        _assert_equal(unpack(packed, elements, dtype), sent[rank])


def test_a_slice_at_an_odd_offset_is_read_all_the_same() -> None:
    sparse = _random(0, 1000, 7, torch.float32)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), pack(sparse)])[3:]
    _assert_equal(unpack(shifted, 1000, torch.float32), sparse)


def test_special_values_travel_unchanged() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    back = unpack(pack(SparseGradient(values, torch.arange(4), 4)), 4, torch.float32).values
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("elements", [0, 5, 70000])
def test_nothing_selected(elements: int) -> None:
    """S19: a rank that selects nothing, or has nothing, still sends a well-formed packet."""
    sparse = SparseGradient(torch.empty(0), torch.empty(0, dtype=torch.int64), elements)
    packed = pack(sparse)
    assert packed.numel() == packed_bytes(0, elements, torch.float32)
    _assert_equal(unpack(packed, elements, torch.float32), sparse)


def test_six_bytes_an_entry_and_a_small_header() -> None:
    assert packed_bytes(1000, 10**6, torch.float32) == 16 * 4 + 6 * 1000
    assert packed_bytes(3, 10, torch.float32) == 4 + 3 * 2 + 2 + 3 * 4
    assert packed_bytes(3, 10, torch.float64) == 4 + 3 * 2 + 6 + 3 * 8
    assert packed_bytes(3, 10, torch.float16) == packed_bytes(3, 10, torch.float32)


def test_sizes_beyond_int32() -> None:
    """S32: sizes and indices past 2**31 are exact; nothing passes through int32 or a float."""
    elements = 2**31 + 10
    blocks = 2**15 + 1
    k = 2**31 + 1
    assert packed_bytes(k, elements, torch.float32) == blocks * 4 + k * 6 + 2
    indices = torch.tensor([0, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 9])
    sparse = SparseGradient(torch.randn(5), indices, elements)
    _assert_equal(unpack(pack(sparse), elements, torch.float32), sparse)


def test_tiny_gradients_are_known_not_to_pay() -> None:
    """S28: a bias of 3 elements must not cost more bytes than sending it dense."""
    assert not sparse_saves_bytes(2, 1, 3, torch.float32)
    assert not sparse_saves_bytes(2, 1, 1, torch.float32)
    assert not sparse_saves_bytes(2, 0, 0, torch.float32)
    assert not sparse_saves_bytes(2, 10**6, 10**6, torch.float32)
    assert sparse_saves_bytes(2, 10**5, 10**6, torch.float32)
    assert not sparse_saves_bytes(
        2, 400, 1000, torch.float16
    )  # float32 on the wire against two bytes


@pytest.mark.parametrize("wrong", [1, 3, -1])
def test_a_packet_of_another_size_is_refused(wrong: int) -> None:
    packed = pack(_random(1, 1000, 9, torch.float32))
    packed = torch.cat([packed, packed])[: packed.numel() + wrong]
    with pytest.raises(ConfigurationError, match="bytes"):
        unpack(packed, 1000, torch.float32)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="k=11"):
        packed_bytes(11, 10, torch.float32)
    with pytest.raises(UnsupportedError):
        packed_bytes(1, 10, torch.complex64)
    with pytest.raises(ConfigurationError, match="uint8"):
        unpack(torch.zeros(8), 10, torch.float32)


def test_selection_to_packet_to_dense() -> None:
    gradient = torch.randn(2 * BLOCK_ELEMENTS + 5, generator=torch.Generator().manual_seed(2))
    indices = select(gradient, 77)
    back = unpack(pack(SparseGradient.gather(gradient, indices)), gradient.numel(), gradient.dtype)
    expected = torch.zeros_like(gradient)
    expected[indices] = gradient[indices]
    assert torch.equal(back.to_dense(), expected)
