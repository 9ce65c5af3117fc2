"""Top-k selection: how many, which, and in what form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.candidates import BLOCK_ELEMENTS, Candidates
from hvd_hetero.compression.topk import Selector, SparseGradient, k_for, value_dtype
from hvd_hetero.compression.wire import pack, packed_bytes
from hvd_hetero.errors import ConfigurationError, UnsupportedError


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.0, 1000), (0.5, 500), (0.1, 100), (0.001, 1), (1e-6, 1)]
)
def test_k_and_bytes_follow_the_ratio_asked_for(ratio: float, expected: int) -> None:
    """S25: k sent, and the bytes that are logged, equal what is really sent."""
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    k = k_for(1000, 1 / ratio)
    packet = pack(Selector().select(gradient, k), "float16").data
    assert k == expected
    assert packet.numel() == packed_bytes(k, 1000, gradient.dtype, "float16")


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


def _reference(values: torch.Tensor, k: int) -> list[int]:
    """The k largest magnitudes, among equal ones the first, by a plain sort."""
    magnitudes = values.double().abs().nan_to_num(nan=math.inf, posinf=1e308)
    order = sorted(range(values.numel()), key=lambda i: (-magnitudes[i].item(), i))
    return sorted(order[:k])


@given(
    seed=st.integers(0, 2**31),
    elements=st.integers(1, 400),
    share=st.floats(0.0, 1.0),
    levels=st.sampled_from([0, 1, 3, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    exponent=st.sampled_from([0, -16]),
)
@settings(deadline=None, max_examples=200)
def test_selects_the_largest_and_of_equal_ones_the_first(
    seed: int, elements: int, share: float, levels: int, dtype: torch.dtype, exponent: int
) -> None:
    """Whatever the selector saw before: the hint decides about speed only."""
    generator = torch.Generator().manual_seed(seed)
    selector = Selector()
    for scale in (1.0, 1.0, 0.1, 30.0):
        values = torch.randint(-levels, levels + 1, (elements,), generator=generator)
        values = (values * scale * 2.0**exponent).to(dtype)
        k = max(1, round(share * elements))
        sparse = selector.select(values, k)
        assert sparse.indices.dtype == torch.int64 and sparse.values.dtype == dtype
        assert sparse.indices.tolist() == _reference(values, k)
        assert torch.equal(sparse.values, values[sparse.indices])


def _awkward(kind: str, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(elements, generator=generator)
    tensors = {
        "normal": noise,
        "equal": torch.full((elements,), -2.5),
        "zero": torch.zeros(elements),
        "minus zero": torch.zeros(elements).neg_(),
        "denormal": noise * 1e-41,
        "rising": torch.arange(elements, dtype=torch.float32),
        "falling": -torch.arange(elements, 0, -1, dtype=torch.float32),
        "few levels": torch.randint(-2, 3, (elements,), generator=generator).float(),
        "mostly zero": noise * (noise > 2.5),
        "heavy tail": noise**9,
        "one block": torch.cat([torch.ones(1000), torch.zeros(elements - 1000)]),
        "not finite": torch.where(noise > 2.0, math.inf, noise).masked_fill(noise < -2.5, math.nan),
    }
    return tensors[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "equal",
        "zero",
        "minus zero",
        "denormal",
        "rising",
        "falling",
        "few levels",
        "mostly zero",
        "heavy tail",
        "one block",
        "not finite",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_blocks_of_awkward_values(kind: str, dtype: torch.dtype) -> None:
    """Exact as torch.topk, with and without a hint, right or wrong, at k = 1 and k = d too."""
    elements = 3 * BLOCK_ELEMENTS + 17
    values = _awkward(kind, elements).to(dtype)
    wrong_hint = Selector()
    for k in (1, 2, 200, 20_000, 150_000, elements - 1, elements):
        wrong_hint.select(1e3 * torch.ones(elements, dtype=dtype), k)
        warm = Selector()
        choices = [one.select(values, k) for one in (Selector(), warm, warm, wrong_hint)]
        expected = torch.topk(values.abs(), k).values
        magnitudes = choices[0].values.abs().sort(descending=True).values
        # Sorted apart, as NaN differs from itself.
        assert torch.equal(magnitudes.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        assert bool((choices[0].indices.diff() > 0).all())
        threshold = expected.min()
        ties = torch.nonzero(values.abs() == threshold).flatten()
        chosen_ties = choices[0].indices[choices[0].values.abs() == threshold]
        assert torch.equal(chosen_ties, ties[: len(chosen_ties)])
        for other in choices[1:]:
            assert torch.equal(other.indices, choices[0].indices)


@pytest.mark.parametrize(
    ("kind", "most_prunings"), [("equal", 3), ("zero", 3), ("few levels", 5), ("rising", 42)]
)
def test_no_input_costs_lists_as_long_as_itself(
    kind: str, most_prunings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties are dropped once k entries as large lie before them; only rising values fill lists."""
    elements, k, prunings = 40 * BLOCK_ELEMENTS, 100, [0]
    best = Candidates.best

    def counted(candidates: Candidates, k: int) -> Any:
        prunings[0] += 1
        return best(candidates, k)

    monkeypatch.setattr(Candidates, "best", counted)
    selector = Selector()
    selector.select(_awkward(kind, elements), k)
    assert prunings[0] <= most_prunings
    candidates = selector._candidates
    assert candidates is not None and len(candidates._indices) <= k + 2 * BLOCK_ELEMENTS


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("k", [0, 5, 3000, 2 * BLOCK_ELEMENTS + 9])
def test_adding_on_the_way_is_adding_first(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    selector = Selector()
    for step in range(4):
        shape = (2 * BLOCK_ELEMENTS + 9,)
        gradient = torch.randn(shape, generator=generator).to(dtype)
        # The third step finds too few at the hint: what was added must not be added again.
        residual = torch.randn(shape, generator=generator).to(dtype)
        if step == 2:
            gradient, residual = gradient * 1e-3, residual * 1e-3
        expected = gradient + residual
        before = residual.clone()
        sparse = selector.select(gradient, k, add=residual)
        assert torch.equal(gradient, expected) and torch.equal(residual, before)
        assert torch.equal(sparse.indices, Selector().select(expected, k).indices)
        assert torch.equal(sparse.values, expected[sparse.indices])


def test_the_result_is_the_callers() -> None:
    """The buffers kept between steps are never handed out."""
    selector = Selector()
    first = selector.select(torch.tensor([1.0, 5.0, 3.0, 2.0]), 2)
    selector.select(torch.tensor([9.0, 5.0, 3.0, 8.0]), 2)
    assert first.indices.tolist() == [1, 2] and first.values.tolist() == [5.0, 3.0]


def test_a_falling_threshold_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that shrink by a fifth at each step soon need a single pass again."""
    scans: list[int] = []
    scan = Candidates.scan

    def counted(candidates: Candidates, *arguments: Any) -> bool:
        scans[-1] += 1
        return scan(candidates, *arguments)

    monkeypatch.setattr(Candidates, "scan", counted)
    generator = torch.Generator().manual_seed(3)
    selector = Selector()
    for step in range(10):
        scans.append(0)
        selector.select(torch.randn(50_000, generator=generator) * 0.8**step, 500)
    assert max(scans) == 2 and scans[4:] == [1] * 6


def test_the_way_of_other_devices_selects_the_same() -> None:
    """Torch operations alone, tried on the CPU; the scratch serves again."""
    values = torch.randn(5000, generator=torch.Generator().manual_seed(4))
    selector = Selector()
    for scale in (1.0, 0.1):
        expected = Selector().select(scale * values, 40).indices
        assert torch.equal(selector._topk_indices(scale * values, 40), expected)


def test_an_empty_gradient_selects_nothing() -> None:
    """S19: topk of an empty tensor raises; a parameter of shape (0, 4) must not."""
    sparse = Selector().select(torch.empty(0), k_for(0, 10.0))
    assert sparse.indices.shape == (0,) and sparse.elements == 0


def test_zero_entries_and_more_than_there_are() -> None:
    assert Selector().select(torch.ones(3), 0).k == 0
    assert Selector().select(torch.ones(3), 99).indices.tolist() == [0, 1, 2]


def test_nan_and_infinity_are_sent_first() -> None:
    """A NaN left in the residual would come back at every step."""
    values = torch.tensor([1.0, math.nan, 5.0, -math.inf, 3.0])
    assert Selector().select(values, 1).indices.tolist() == [1]
    assert Selector().select(values, 2).indices.tolist() == [1, 3]
    assert Selector().select(values, 3).indices.tolist() == [1, 2, 3]


def test_selection_leaves_no_trace_in_autograd() -> None:
    values = torch.randn(10, requires_grad=True)
    assert not Selector().select(values, 3).values.requires_grad


@pytest.mark.parametrize(
    ("values", "add", "message"),
    [
        (torch.ones(2, 2), None, "flat"),
        (torch.ones(4)[::2], None, "contiguous"),
        (torch.ones(4, dtype=torch.int64), None, "floating"),
        (torch.ones(4), torch.ones(3), "agree"),
        (torch.ones(4), torch.ones(4, dtype=torch.float64), "agree"),
        (torch.ones(4), torch.ones(8)[::2], "contiguous"),
    ],
)
def test_tensors_that_cannot_be_scanned_are_refused(
    values: torch.Tensor, add: torch.Tensor | None, message: str
) -> None:
    before = values.clone()
    with pytest.raises(ConfigurationError, match=message):
        Selector().select(values, 1, add=add)
    assert torch.equal(values, before)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="k=-1"):
        Selector().select(torch.ones(3), -1)


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
