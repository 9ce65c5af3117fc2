"""Packets: exact or rounded as told, of known size, and safe one behind the other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.topk import Selector, SparseGradient, k_for, value_dtype
from hvd_hetero.compression.wire import VALUE_FORMATS, index_bytes, pack, packed_bytes, unpack
from hvd_hetero.errors import ConfigurationError, UnsupportedError

LENGTHS = [1, 2, 3, 1000, 65535, 65536, 65537, 65536 * 3 + 1]


def _random(
    seed: int, elements: int, k: int, dtype: torch.dtype, exponent: int = 0
) -> SparseGradient:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(elements, generator=generator)[:k].sort().values
    values = torch.randn(k, generator=generator, dtype=torch.float64) * 2.0**exponent
    return SparseGradient(values.to(dtype), indices, elements)


def _assert_equal(left: SparseGradient, right: SparseGradient) -> None:
    assert left.elements == right.elements
    assert left.values.dtype == right.values.dtype
    assert left.indices.dtype == torch.int64
    assert torch.equal(left.values, right.values)
    assert torch.equal(left.indices, right.indices)


def _sent(sparse: SparseGradient, values_as: str) -> tuple[torch.Tensor, SparseGradient]:
    """Pack and give the packet and what must come out of it."""
    data, sent = pack(sparse, values_as)
    values = sparse.values if sent is None else sent
    return data, SparseGradient(values, sparse.indices, sparse.elements)


@given(
    seed=st.integers(0, 2**31),
    elements=st.sampled_from(LENGTHS),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    values_as=st.sampled_from(VALUE_FORMATS),
)
@settings(deadline=None, max_examples=150)
def test_receivers_get_what_the_sender_was_told(
    seed: int, elements: int, share: float, dtype: torch.dtype, values_as: str
) -> None:
    sparse = _random(seed, elements, max(1, int(share * elements)), dtype)
    data, expected = _sent(sparse, values_as)
    assert data.dtype == torch.uint8 and data.is_contiguous()
    assert data.numel() == packed_bytes(sparse.k, elements, dtype, values_as)
    unpacked = unpack(data, sparse.k, elements, dtype, values_as)
    _assert_equal(unpacked.sparse, expected)
    assert not unpacked.nonfinite
    exact = dtype == torch.float64 or values_as == "float32"
    assert (pack(sparse, values_as).sent is None) == exact


@given(
    values=st.lists(
        st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20
    )
)
@settings(deadline=None, max_examples=500)
def test_rounding_loses_nothing(values: list[float]) -> None:
    """From the largest float32 to denormals: no overflow, zeros stay, the rest is a float32."""
    sparse = SparseGradient(torch.tensor(values), torch.arange(len(values)), 10**6)
    sent = pack(sparse, "float16").sent
    assert sent is not None and bool(torch.isfinite(sent).all())
    assert not sent[sparse.values == 0].any()
    left = sparse.values - sent
    assert torch.equal(left.double(), sparse.values.double() - sent.double())
    largest = sparse.values.abs().max()
    wide = sparse.values.abs().double() >= largest.double() * 2.0**-28
    error = left.abs().double()
    assert bool((error <= sparse.values.abs().double() * 2.0**-11)[wide].all())
    assert bool((error <= largest.double() * 2.0**-38).logical_or(wide).all())


@pytest.mark.parametrize("exponent", [-140, -60, 0, 60, 126])
def test_the_scale_follows_the_values(exponent: int) -> None:
    sparse = _random(1, 1000, 100, torch.float64, exponent)
    sparse = SparseGradient(sparse.values.clamp(-3e38, 3e38).float(), sparse.indices, 1000)
    data, expected = _sent(sparse, "float16")
    torch.testing.assert_close(expected.values, sparse.values, rtol=2**-10, atol=1e-45)
    _assert_equal(unpack(data, 100, 1000, torch.float32, "float16").sparse, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values_as", VALUE_FORMATS)
def test_a_value_that_is_not_finite_sets_the_flag(
    bad: float, dtype: torch.dtype, values_as: str
) -> None:
    for place in (0, 1, 2):
        values = torch.tensor([1.0, -2.0, 1e30], dtype=dtype)
        values[place] = bad
        sparse = SparseGradient(values, torch.arange(3), 30)
        data = pack(sparse, values_as).data
        assert bool(unpack(data, 3, 30, dtype, values_as).nonfinite)


def test_exact_values_travel_bit_for_bit() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    data, sent = pack(SparseGradient(values, torch.arange(4), 4), "float32")
    back = unpack(data, 4, 4, torch.float32, "float32").sparse.values
    assert sent is None and torch.equal(back.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("values_as", VALUE_FORMATS)
def test_all_zero(values_as: str) -> None:
    sparse = SparseGradient(torch.zeros(5), torch.arange(5), 100)
    data, expected = _sent(sparse, values_as)
    _assert_equal(expected, sparse)
    _assert_equal(unpack(data, 5, 100, torch.float32, values_as).sparse, sparse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_packed_from_float32(dtype: torch.dtype) -> None:
    """Buckets of half types select and keep their residual in float32."""
    sparse = _random(1, 1000, 10, torch.float32)
    data, expected = _sent(sparse, "float16")
    assert packed_bytes(10, 1000, dtype, "float16") == data.numel()
    _assert_equal(unpack(data, 10, 1000, dtype, "float16").sparse, expected)
    with pytest.raises(ConfigurationError, match="float32 or float64"):
        pack(_random(1, 1000, 10, dtype), "float16")


@given(
    seed=st.integers(0, 2**31),
    ranks=st.integers(1, 5),
    k=st.integers(0, 40),
    elements=st.sampled_from([40, 70000, 65536 * 2]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    values_as=st.sampled_from(VALUE_FORMATS),
)
@settings(deadline=None, max_examples=60)
def test_packets_of_ranks_can_be_gathered_and_split(
    seed: int, ranks: int, k: int, elements: int, dtype: torch.dtype, values_as: str
) -> None:
    sent = [_sent(_random(seed + rank, elements, k, dtype), values_as) for rank in range(ranks)]
    gathered = torch.cat([data for data, _ in sent])
    size = packed_bytes(k, elements, dtype, values_as)
    assert size % 8 == 0
    for packet, (_, expected) in zip(torch.split(gathered, size), sent, strict=True):
        _assert_equal(unpack(packet, k, elements, dtype, values_as).sparse, expected)


def test_a_slice_at_an_odd_offset_is_read_all_the_same() -> None:
    data, expected = _sent(_random(0, 1000, 7, torch.float32), "float16")
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    _assert_equal(unpack(shifted, 7, 1000, torch.float32, "float16").sparse, expected)


@pytest.mark.parametrize("k", [0, 7])
def test_no_byte_is_left_to_chance(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to lie in fresh memory never travels."""
    sparse = _random(0, 1000, k, torch.float32)
    packets = []
    for fill in (0, 255):
        monkeypatch.setattr(torch, "empty", lambda *size, f=fill, **kw: torch.full(size, f, **kw))
        packets.append(pack(sparse, "float16").data)
    assert torch.equal(*packets)


@pytest.mark.parametrize("elements", [0, 5, 70000])
@pytest.mark.parametrize("values_as", VALUE_FORMATS)
def test_nothing_selected(elements: int, values_as: str) -> None:
    """S19: a rank that selects nothing, or has nothing, still sends a well-formed packet."""
    sparse = SparseGradient(torch.empty(0), torch.empty(0, dtype=torch.int64), elements)
    data = pack(sparse, values_as).data
    assert data.numel() == packed_bytes(0, elements, torch.float32, values_as) == 8
    unpacked = unpack(data, 0, elements, torch.float32, values_as)
    _assert_equal(unpacked.sparse, sparse)
    assert not unpacked.nonfinite


@pytest.mark.parametrize("elements", [10**6, 10**7])
@pytest.mark.parametrize(("cf", "most"), [(10, 2.71), (100, 3.2), (1000, 3.63)])
def test_bytes_an_entry_headers_included(elements: int, cf: int, most: float) -> None:
    k = k_for(elements, cf)
    assert packed_bytes(k, elements, torch.float32, "float16") / k <= most
    assert packed_bytes(k, elements, torch.float32, "float32") / k <= most + 2


def test_sizes() -> None:
    assert packed_bytes(3, 10, torch.float32, "float16") == 8 + 6 + 2
    assert packed_bytes(3, 10, torch.float32, "float32") == 8 + 12 + 2 + 2
    assert packed_bytes(3, 10, torch.float64, "float16") == 8 + 24 + 2 + 6
    assert packed_bytes(10, 10, torch.float32, "float32") == 48
    elements, k = 2**31 + 10, 2**31 + 1  # S32: past int32
    assert packed_bytes(k, elements, torch.float32, "float16") == (
        8 + 2 * k + index_bytes(k, elements) + 4
    )


@pytest.mark.parametrize("wrong", [1, 8, -1])
def test_a_packet_of_another_size_is_refused(wrong: int) -> None:
    data = pack(_random(1, 1000, 9, torch.float32), "float16").data
    data = torch.cat([data, data])[: data.numel() + wrong]
    with pytest.raises(ConfigurationError, match="must be told the same"):
        unpack(data, 9, 1000, torch.float32, "float16")


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="k=11"):
        packed_bytes(11, 10, torch.float32, "float16")
    with pytest.raises(ConfigurationError, match="values_as='int8'"):
        packed_bytes(1, 10, torch.float32, "int8")
    with pytest.raises(UnsupportedError):
        packed_bytes(1, 10, torch.complex64, "float16")
    with pytest.raises(ConfigurationError, match="uint8"):
        unpack(torch.zeros(8), 0, 10, torch.float32, "float16")


def test_selection_to_packet_to_dense() -> None:
    gradient = torch.randn(2 * 65536 + 5, generator=torch.Generator().manual_seed(2))
    sparse = Selector().select(gradient, 77)
    data = pack(sparse, "float32").data
    back = unpack(data, 77, gradient.numel(), value_dtype(gradient.dtype), "float32").sparse
    assert torch.equal(back.to_dense(), sparse.to_dense())
