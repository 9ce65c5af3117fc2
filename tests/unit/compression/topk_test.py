"""Top-k selection: how many, which, and in what form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.topk import SparseGradient, k_for, select, value_dtype
from hvd_hetero.compression.wire import pack, packed_bytes
from hvd_hetero.errors import ConfigurationError, UnsupportedError


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.0, 1000), (0.5, 500), (0.1, 100), (0.001, 1), (1e-6, 1)]
)
def test_k_and_bytes_follow_the_ratio_asked_for(ratio: float, expected: int) -> None:
    """S25: k sent, and the bytes that are logged, equal what is really sent."""
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    k = k_for(1000, 1 / ratio)
    packet = pack(SparseGradient.gather(gradient, select(gradient, k)))
    assert k == expected
    assert packet.numel() == packed_bytes(k, 1000, gradient.dtype)


@given(st.integers(0, 2**40), st.floats(1.0, 1e12))
@settings(deadline=None, max_examples=200)
def test_k_stays_between_one_and_all(elements: int, cf: float) -> None:
    k = k_for(elements, cf)
    assert min(elements, 1) <= k <= elements
    assert k in (1, elements) or abs(k - elements / cf) <= 0.5


@pytest.mark.parametrize("cf", [0.5, 0.0, -1.0, math.nan, math.inf, True, "10"])
def test_impossible_factors_are_refused(cf: float) -> None:
    with pytest.raises(ConfigurationError, match="cf="):
        k_for(10, cf)


@given(
    seed=st.integers(0, 2**31),
    elements=st.integers(1, 400),
    share=st.floats(0.0, 1.0),
    levels=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
@settings(deadline=None, max_examples=150)
def test_selects_the_magnitudes_of_torch_topk(
    seed: int, elements: int, share: float, levels: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels + 1, (elements,), generator=generator).to(dtype)
    k = max(1, round(share * elements))
    indices = select(values, k)
    expected = torch.topk(values.abs(), k).values
    assert torch.equal(values[indices].abs().sort(descending=True).values, expected)
    assert indices.dtype == torch.int64
    assert bool((indices.diff() > 0).all())
    assert torch.equal(indices, select(values.clone(), k))


def test_an_empty_gradient_selects_nothing() -> None:
    """S19: topk of an empty tensor raises; a parameter of shape (0, 4) must not."""
    indices = select(torch.empty(0), k_for(0, 10.0))
    assert indices.shape == (0,) and indices.dtype == torch.int64


def test_zero_entries_and_more_than_there_are() -> None:
    assert select(torch.ones(3), 0).tolist() == []
    assert select(torch.ones(3), 99).tolist() == [0, 1, 2]


def test_nan_and_infinity_are_sent_first() -> None:
    """A NaN left in the residual would come back at every step."""
    values = torch.tensor([1.0, math.nan, 5.0, -math.inf, 3.0])
    assert select(values, 1).tolist() == [1]
    assert select(values, 2).tolist() == [1, 3]
    assert select(values, 3).tolist() == [1, 2, 3]


def test_selection_leaves_no_trace_in_autograd() -> None:
    values = torch.randn(10, requires_grad=True)
    assert not select(values, 3).requires_grad


def test_flat_tensors_only() -> None:
    with pytest.raises(ConfigurationError, match="flat"):
        select(torch.ones(2, 2), 1)


def test_dense_form_is_zero_elsewhere() -> None:
    sparse = SparseGradient.gather(torch.tensor([1.0, -4.0, 2.0]), torch.tensor([1, 2]))
    assert sparse.k == 2 and sparse.elements == 3
    assert sparse.to_dense().tolist() == [0.0, -4.0, 2.0]


def test_indices_must_be_int64() -> None:
    """S32: index 2**24 + 1 held as a float becomes 2**24; never accept such a tensor."""
    assert int(torch.tensor(2**24 + 1, dtype=torch.float32)) == 2**24
    for dtype in (torch.float32, torch.float64, torch.int32):
        with pytest.raises(ConfigurationError, match="int64"):
            SparseGradient(torch.ones(1), torch.ones(1, dtype=dtype), 10)
    index = torch.tensor([2**24 + 1])
    assert SparseGradient(torch.ones(1), index, 2**25).indices.item() == 2**24 + 1


@pytest.mark.parametrize(
    ("values", "indices", "elements", "message"),
    [
        (torch.ones(2), torch.arange(3), 9, "equally long"),
        (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int64), 9, "flat"),
        (torch.ones(3), torch.arange(3), 2, "elements=2"),
        (torch.ones(3, dtype=torch.int32), torch.arange(3), 9, "floating"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    values: torch.Tensor, indices: torch.Tensor, elements: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SparseGradient(values, indices, elements)


def test_half_types_are_worked_on_in_float32() -> None:
    assert value_dtype(torch.float16) == value_dtype(torch.bfloat16) == torch.float32
    assert value_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    """S24: complex gradients end with a sentence, not at step 1000."""
    with pytest.raises(UnsupportedError, match="real floating point"):
        value_dtype(dtype)
