"""Error feedback: nothing is lost, only late."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_hetero.compression.feedback import ErrorFeedback
from hvd_hetero.compression.topk import k_for
from hvd_hetero.compression.wire import pack
from hvd_hetero.errors import ConfigurationError, HeteroError

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def _sparse_step(feedback: ErrorFeedback, gradient: Tensor, k: int) -> Tensor:
    """Do one step and return what was applied."""
    feedback.work.copy_(gradient)
    sparse = feedback.select(k)
    applied = sparse.to_dense()
    feedback.sent(sparse.indices)
    feedback.commit()
    return applied


def _topk(values: Tensor, k: int) -> Tensor:
    return torch.topk(values.abs(), k).indices.sort().values


class _Ledger:
    """Sums in float64 of what went in and what came out."""

    def __init__(self, elements: int) -> None:
        self.true = torch.zeros(elements, dtype=torch.float64)
        self.applied = torch.zeros(elements, dtype=torch.float64)
        self.largest = 1.0

    def check(self, feedback: ErrorFeedback, tolerance: float) -> None:
        error = (self.applied + feedback.residual.double() - self.true).abs().max().item()
        assert error <= tolerance * self.largest, error


_STEP = st.tuples(
    st.sampled_from(["fused", "rounded", "sparse", "dense", "fraction", "partial", "drop"]),
    st.floats(0.0, 1.0),  # share of entries, or fraction of the residual
    st.booleans(),  # freeze a segment
)


@given(
    seed=st.integers(0, 2**31),
    elements=st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    steps=st.lists(_STEP, min_size=1, max_size=30),
)
@settings(deadline=None, max_examples=120)
def test_applied_plus_residual_is_the_sum_of_the_gradients(
    seed: int, elements: int, dtype: torch.dtype, steps: list[tuple[str, float, bool]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(elements, dtype)
    ledger = _Ledger(elements)
    frozen = slice(elements // 3, elements // 2)
    for kind, share, freeze in steps:
        gradient = torch.randn(elements, generator=generator, dtype=dtype)
        keep = [frozen] if freeze else []
        if freeze:
            gradient[frozen] = 0.0
        before = feedback.residual.clone()
        feedback.work.fill_(1e30)  # what lies there is of no account
        feedback.work.copy_(gradient)
        if freeze:
            feedback.work[frozen] = 1e30
        k = max(1, round(share * elements))
        indices, received = None, None
        if kind in ("fused", "rounded"):
            sparse = feedback.select(k, keep)
            compensated, indices = feedback.work, sparse.indices
            assert torch.equal(sparse.values, compensated[indices])
            if kind == "rounded":
                received = pack(sparse, "float16").sent
        elif kind in ("fraction", "partial"):
            compensated = feedback.compensate_fraction(share, keep)
        else:
            compensated = feedback.compensate(keep)
        assert not compensated[frozen].any() or not freeze
        if kind in ("sparse", "partial", "drop"):
            indices = _topk(compensated, k)
        feedback.sent(indices, received)
        if kind == "drop":
            feedback.drop()
            assert torch.equal(feedback.residual, before)
        else:
            ledger.true += gradient.double()
            sent = torch.arange(elements) if indices is None else indices
            values = compensated[sent] if received is None else received
            ledger.applied[sent] += values.double()
            feedback.commit()
            if freeze:
                assert torch.equal(feedback.residual[frozen], before[frozen])
        ledger.largest = max(ledger.largest, ledger.true.abs().max().item())
        ledger.check(feedback, TOLERANCE[dtype])
        assert not feedback.is_empty or not feedback.residual.any()


def test_fused_selection_is_compensation_and_selection() -> None:
    """Bit for bit: the same work, entries and residual, over several blocks and steps."""
    generator = torch.Generator().manual_seed(5)
    elements = 150_000
    fused, apart = (ErrorFeedback(elements, torch.float32) for _ in range(2))
    for _ in range(4):
        gradient = torch.randn(elements, generator=generator)
        fused.work.copy_(gradient)
        apart.work.copy_(gradient)
        sparse = fused.select(1500)
        compensated = apart.compensate()
        assert torch.equal(fused.work, compensated)
        assert torch.equal(sparse.indices, _topk(compensated, 1500))
        for feedback in (fused, apart):
            feedback.sent(sparse.indices.clone() if feedback is apart else sparse.indices)
            feedback.commit()
        assert torch.equal(fused.residual, apart.residual)


@pytest.mark.parametrize("own_indices", [True, False])
def test_rounding_on_the_wire_stays_in_the_residual_exactly(own_indices: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    feedback = ErrorFeedback(1000, torch.float32)
    feedback.work.copy_(torch.randn(1000, generator=generator) ** 5)
    sparse = feedback.select(100)
    before = feedback.work.clone()
    received = pack(sparse, "float16").sent
    assert received is not None and not torch.equal(received, sparse.values)
    feedback.sent(sparse.indices if own_indices else sparse.indices.clone(), received)
    feedback.commit()
    total = feedback.residual.double()
    total[sparse.indices] += received.double()
    assert torch.equal(total, before.double())


def test_everything_sent_in_rounded_form_leaves_a_residual() -> None:
    feedback = ErrorFeedback(2, torch.float32)
    feedback.work.copy_(torch.tensor([1.0, 2.0]))
    sparse = feedback.select(2)
    feedback.sent(sparse.indices, torch.tensor([0.75, 2.0]))
    feedback.commit()
    assert not feedback.is_empty
    assert feedback.residual.tolist() == [0.25, 0.0]


def _constant_gradients(feedback_on: bool) -> float:
    """Return the largest error of the law after 50 steps at ratio 0.1."""
    gradient = torch.linspace(-1.0, 1.0, 100)
    feedback = ErrorFeedback(100, gradient.dtype)
    applied = torch.zeros(100)
    for _ in range(50):
        applied += _sparse_step(feedback, gradient, k_for(100, 10.0))
        if not feedback_on:
            feedback.load(torch.zeros(100))
    return (applied + feedback.residual - 50 * gradient).abs().max().item() / 50


def test_constant_gradients_arrive_in_full() -> None:
    """S26: applied + residual = true sum."""
    assert _constant_gradients(feedback_on=True) <= 1e-5


def test_without_feedback_the_law_breaks() -> None:
    """S26: the same sum must be wrong when the residual is thrown away."""
    assert _constant_gradients(feedback_on=False) > 0.1


def test_two_ranks_with_weights() -> None:
    """Weighted units: the law holds when the ranks' weights change from step to step."""
    generator = torch.Generator().manual_seed(3)
    ranks = [ErrorFeedback(50, torch.float64) for _ in range(2)]
    applied = torch.zeros(50, dtype=torch.float64)
    true = torch.zeros(50, dtype=torch.float64)
    for step in range(20):
        weights = (0.9, 0.1) if step % 3 else (0.5, 0.5)
        for feedback, weight in zip(ranks, weights, strict=True):
            gradient = weight * torch.randn(50, generator=generator, dtype=torch.float64)
            true += gradient
            applied += _sparse_step(feedback, gradient, 5)
    torch.testing.assert_close(
        applied + sum(feedback.residual for feedback in ranks), true, rtol=0, atol=1e-12
    )


def test_drop_restores_bit_for_bit_and_forgets_the_gradient() -> None:
    feedback = ErrorFeedback(5, torch.float32)
    _sparse_step(feedback, torch.tensor([0.1, 0.7, -0.3, 1e-9, 3.0]), 2)
    before = feedback.residual.clone()
    for fraction in (1.0, 0.3):
        feedback.work.fill_(1e8)
        feedback.compensate_fraction(fraction)
        feedback.sent(None)
        feedback.drop()
        assert torch.equal(feedback.residual.view(torch.int32), before.view(torch.int32))
        assert not feedback.pending


def test_a_gradient_that_is_not_finite_leaves_with_the_dropped_step() -> None:
    feedback = ErrorFeedback(3, torch.float32)
    _sparse_step(feedback, torch.tensor([1.0, 2.0, 3.0]), 1)
    feedback.work.copy_(torch.tensor([float("nan"), float("inf"), 0.0]))
    feedback.compensate()
    feedback.sent(torch.tensor([0]))
    feedback.drop()
    assert feedback.residual.tolist() == [1.0, 2.0, 0.0]


def test_buffers_change_roles_without_a_copy() -> None:
    feedback = ErrorFeedback(4, torch.float32)
    work, residual = feedback.work.data_ptr(), feedback.residual.data_ptr()
    _sparse_step(feedback, torch.ones(4), 1)
    assert (feedback.work.data_ptr(), feedback.residual.data_ptr()) == (residual, work)


def test_a_flush_in_equal_parts_empties_the_residual() -> None:
    feedback = ErrorFeedback(4, torch.float64)
    start = torch.tensor([4.0, -8.0, 12.0, 16.0], dtype=torch.float64)
    feedback.load(start)
    for left in (4, 3, 2, 1):
        feedback.work.zero_()
        part = feedback.compensate_fraction(1.0 / left).clone()
        feedback.sent(None)
        feedback.commit()
        torch.testing.assert_close(part, start / 4)
    assert feedback.is_empty and feedback.residual_norm2() == 0.0
    assert not feedback.residual.any()


def test_a_flush_of_nothing_sends_only_the_gradient() -> None:
    feedback = ErrorFeedback(2, torch.float32)
    feedback.load(torch.tensor([5.0, 6.0]))
    feedback.work.fill_(1.0)
    assert feedback.compensate_fraction(0.0).tolist() == [1.0, 1.0]
    feedback.sent(None)
    feedback.commit()
    assert feedback.residual.tolist() == [5.0, 6.0]


def test_a_frozen_segment_sends_nothing_and_keeps_its_residual() -> None:
    feedback = ErrorFeedback(4, torch.float32)
    feedback.load(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    feedback.work[2:].fill_(10.0)
    assert feedback.compensate([slice(0, 2)]).tolist() == [0.0, 0.0, 13.0, 14.0]
    feedback.sent(None)
    feedback.commit()
    assert feedback.residual.tolist() == [1.0, 2.0, 0.0, 0.0]
    assert not feedback.is_empty


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_keep_a_float32_residual(dtype: torch.dtype) -> None:
    """A residual in the gradient's own type would lose small parts for ever."""
    feedback = ErrorFeedback(2, dtype)
    assert feedback.work.dtype == feedback.residual.dtype == torch.float32
    small = torch.tensor([0.0, 2.0**-12], dtype=dtype)
    for _ in range(64):
        feedback.work.zero_().add_(small, alpha=0.5)
        feedback.work[0] += 100.0
        feedback.compensate()
        feedback.sent(torch.tensor([0]))
        feedback.commit()
    assert feedback.residual.tolist() == [0.0, 64 * 2.0**-13]


def test_without_a_step_commit_and_drop_leave_the_residual_alone() -> None:
    feedback = ErrorFeedback(2, torch.float32)
    feedback.load(torch.tensor([1.0, 2.0]))
    feedback.work.fill_(7.0)
    feedback.commit()
    assert feedback.work.tolist() == [7.0, 7.0]
    feedback.drop()
    assert feedback.residual.tolist() == [1.0, 2.0]


def test_the_order_of_calls_is_checked() -> None:
    feedback = ErrorFeedback(2, torch.float32)
    with pytest.raises(HeteroError, match="no step is open"):
        feedback.sent(None)
    feedback.compensate()
    with pytest.raises(HeteroError, match="sent"):
        feedback.commit()
    for reopen in (feedback.compensate, lambda: feedback.select(1)):
        with pytest.raises(HeteroError, match="still open"):
            reopen()
    with pytest.raises(ConfigurationError, match="int64"):
        feedback.sent(torch.tensor([0], dtype=torch.int32))
    for indices in (None, torch.tensor([0])):
        with pytest.raises(ConfigurationError, match="values of shape"):
            feedback.sent(indices, torch.ones(2))


def test_wrong_values_are_refused() -> None:
    feedback = ErrorFeedback(2, torch.float32)
    with pytest.raises(ConfigurationError, match="fraction="):
        feedback.compensate_fraction(1.5)
    with pytest.raises(ConfigurationError, match="k=-1"):
        feedback.select(-1)
    assert not feedback.pending
    with pytest.raises(ConfigurationError, match="residual of shape"):
        feedback.load(torch.zeros(3))


def test_empty_bucket() -> None:
    feedback = ErrorFeedback(0, torch.float32)
    assert _sparse_step(feedback, torch.empty(0), k_for(0, 10.0)).shape == (0,)
    assert feedback.residual_norm2() == 0.0


def test_residual_energy() -> None:
    feedback = ErrorFeedback(3, torch.float32)
    assert feedback.is_empty and feedback.residual_norm2() == 0.0
    _sparse_step(feedback, torch.tensor([1.0, 2.0, 3.0]), 1)
    assert not feedback.is_empty
    assert feedback.residual_norm2() == pytest.approx(5.0)
