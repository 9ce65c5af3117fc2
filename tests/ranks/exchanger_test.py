"""The exchange of gradients between ranks that are threads of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.errors import ExchangeFailedError, ExchangeTimeoutError, UnsupportedError
from hvd_hetero.exchange.collectives import Collectives, SingleProcess
from hvd_hetero.planning.cost_model import dense_bytes
from hvd_hetero.runtime.exchanger import GradientExchanger, PassWeight, SparsityMode
from hvd_hetero.testing.threads import Fault, ThreadCollectives, ThreadWorld

SHAPES = ((3,), (40, 5), (7,), (), (64,))


def build(
    collectives: Collectives, *, dtype: torch.dtype = torch.float64, **options: Any
) -> GradientExchanger:
    parameters = [
        (f"layer{index}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for index, shape in enumerate(SHAPES)
    ]
    defaults: dict[str, Any] = {
        "prefix": "hvd_hetero.0",
        "bucket_bytes": 1000,
        "timeout_seconds": 20.0,
        "describe_step": lambda: f"rank {collectives.rank}, step 7",
    }
    return GradientExchanger(collectives, parameters, **(defaults | options))


def parameters_of(exchanger: GradientExchanger) -> list[torch.nn.Parameter]:
    return [member.parameter for bucket in exchanger.buckets for member in bucket.members]


def gradient(rank: int, step: int, parameter: torch.nn.Parameter, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + index)
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def weighted(exchanger: GradientExchanger, weight: float) -> PassWeight:
    return PassWeight(weight, own=weight, in_place=weight * exchanger._collectives.size)


def backward(exchanger: GradientExchanger, rank: int, step: int, weight: float) -> torch.Tensor:
    """One pass; returns this rank's weighted gradient, flat over all buckets."""
    exchanger.begin_pass(weighted(exchanger, weight))
    flat = []
    for index, parameter in enumerate(parameters_of(exchanger)):
        parameter.grad = gradient(rank, step, parameter, index)
        flat.append(weight * parameter.grad.flatten().clone())
        exchanger.add(parameter)
        exchanger.mark_ready(parameter)
    return torch.cat(flat)


def applied(exchanger: GradientExchanger) -> torch.Tensor:
    grads = [p.grad for p in parameters_of(exchanger)]
    assert all(grad is not None for grad in grads)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def residual(exchanger: GradientExchanger) -> torch.Tensor:
    return torch.cat([bucket.feedback.residual for bucket in exchanger.buckets])


FACTORS = st.sampled_from([None, 1.0, 3.0, 20.0, 1e6])
STRATEGIES = st.sampled_from(["allgather", "shared-index"])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(FACTORS, STRATEGIES), min_size=2, max_size=8),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(["float16", "float32"]),
    st.randoms(use_true_random=False),
)
def test_applied_plus_residuals_is_the_weighted_gradient(
    ranks: int,
    factors: list[tuple[float | None, str]],
    dtype: torch.dtype,
    values_as: str,
    random: Any,
) -> None:
    """S26: at every step, while CF, exchange and weights change, with dense and flushing steps,
    rounded values and thrown away steps."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    parts = [[0.01 + random.random() for _ in range(ranks)] for _ in factors]
    weights = [[part / sum(of_step) for part in of_step] for of_step in parts]
    thrown_away = [random.random() < 0.2 for _ in factors]

    def work(collectives: ThreadCollectives) -> list[tuple[torch.Tensor, ...]]:
        exchanger = build(collectives, dtype=dtype, values_as=values_as)
        history = []
        for step, (cf, strategy) in enumerate(factors):
            exchanger.set_mode(SparsityMode(cf, strategy), flush_steps=3)
            if step % 5 == 4:
                exchanger.flush(2)
            own = backward(exchanger, collectives.rank, step, weights[step][collectives.rank])
            exchanger.synchronize()
            if thrown_away[step]:
                before = residual(exchanger)
                exchanger.abandon()
                assert torch.equal(residual(exchanger), before)
                continue
            total = applied(exchanger)
            exchanger.commit()
            history.append((own, total, residual(exchanger).clone()))
        return history

    histories = ThreadWorld(ranks).run(work)
    true_sum = torch.zeros(1, dtype=torch.float64)
    applied_sum = torch.zeros(1, dtype=torch.float64)
    for step in range(len(histories[0])):
        true_sum = true_sum + sum(history[step][0] for history in histories)
        applied_sum = applied_sum + histories[0][step][1]
        for history in histories[1:]:
            assert torch.equal(history[step][1], histories[0][step][1]), "replicas differ"
        left = sum(history[step][2] for history in histories)
        torch.testing.assert_close(
            applied_sum + left, true_sum, rtol=tolerance, atol=tolerance, check_dtype=False
        )


def test_without_feedback_the_sum_is_wrong() -> None:
    """S26: the law above is the residual's doing; emptying it must break the law."""

    def work(collectives: ThreadCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        exchanger = build(collectives)
        exchanger.set_mode(SparsityMode(20.0), flush_steps=1)
        true_sum, applied_sum = [], []
        for step in range(4):
            true_sum.append(backward(exchanger, collectives.rank, step, 0.5))
            exchanger.synchronize()
            applied_sum.append(applied(exchanger))
            exchanger.commit()
            exchanger.forget_residuals()
        return sum(true_sum, torch.zeros(1)), sum(applied_sum, torch.zeros(1))

    results = ThreadWorld(2).run(work)
    total = results[0][0] + results[1][0]
    assert float((total - results[0][1]).norm()) > 0.1 * float(total.norm())


def test_flush_spreads_the_residual_over_steps() -> None:
    """Going dense sends the residual in equal parts, and then none is left."""

    def work(collectives: ThreadCollectives) -> list[float]:
        exchanger = build(collectives)
        exchanger.set_mode(SparsityMode(50.0), flush_steps=1)
        for step in range(6):
            backward(exchanger, collectives.rank, step, 0.5)
            exchanger.synchronize()
            exchanger.commit()
        exchanger.set_mode(SparsityMode(None), flush_steps=4)
        norms = [float(residual(exchanger).norm())]
        for step in range(4):
            backward(exchanger, collectives.rank, 10 + step, 0.5)
            exchanger.synchronize()
            exchanger.commit()
            norms.append(float(residual(exchanger).norm()))
        return norms

    start, *after = ThreadWorld(2).run(work)[0]
    assert start > 0
    assert after == pytest.approx([start * 3 / 4, start / 2, start / 4, 0.0], abs=1e-12 * start)


def test_buckets_launch_in_order_during_backward() -> None:
    """DESIGN 3.5: the order of launches is the buckets', whatever order gradients come in."""

    def work(collectives: ThreadCollectives) -> int:
        exchanger = build(collectives, bucket_bytes=64)
        exchanger.set_mode(SparsityMode(1.0), flush_steps=1)
        assert len(exchanger.buckets) > 2
        members = parameters_of(exchanger)
        exchanger.begin_pass(PassWeight(1.0))
        for parameter in members if collectives.rank == 0 else reversed(members):
            parameter.grad = torch.ones_like(parameter)
            exchanger.add(parameter)
            exchanger.mark_ready(parameter)
        early = exchanger.launched_in_backward
        exchanger.synchronize()
        return early

    world = ThreadWorld(2)
    early = world.run(work)
    assert early[0] > 0
    for rank in range(2):
        names = [name for r, _, name in world.names if r == rank]
        assert names == sorted(names, key=lambda name: int(name.split("bucket ")[1].split(" ")[0]))
        assert len(set(names)) == len(names)


def test_bytes_are_those_of_the_messages() -> None:
    """S21, S28: sparse where it saves bytes, dense where it would not; counted as sent."""

    def work(collectives: ThreadCollectives) -> tuple[float, float]:
        sent = []
        for cf in (1.0, 4.0):
            exchanger = build(collectives, bucket_bytes=10**6)
            exchanger.set_mode(SparsityMode(cf), flush_steps=1)
            backward(exchanger, collectives.rank, 0, 1.0)
            exchanger.synchronize()
            sent.append(exchanger.sent_bytes)
        return sent[0], sent[1]

    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    all_dense, sparse = ThreadWorld(2).run(work)[0]
    assert all_dense == dense_bytes(2, elements, 8)
    assert sparse < all_dense


def test_a_late_rank_is_waited_for() -> None:
    """A slow rank delays the step, and changes nothing else."""

    def work(collectives: ThreadCollectives) -> torch.Tensor:
        exchanger = build(collectives)
        backward(exchanger, collectives.rank, 0, 0.5)
        exchanger.synchronize()
        return applied(exchanger)

    on_time = ThreadWorld(3).run(work)
    late = ThreadWorld(3, [Fault(rank=1, name="layer0", delay_seconds=0.3)]).run(work)
    assert torch.equal(on_time[0], late[2])


def test_a_missing_rank_ends_in_an_error_with_names() -> None:
    """DESIGN 3.11: the error names tensor, rank and step, within exchange_timeout_seconds."""

    def work(collectives: ThreadCollectives) -> None:
        exchanger = build(collectives, timeout_seconds=0.3)
        if collectives.rank == 1:
            return
        backward(exchanger, collectives.rank, 0, 1.0)
        exchanger.synchronize()

    with pytest.raises(ExchangeTimeoutError) as raised:
        ThreadWorld(2).run(work)
    for part in ("rank 0", "step 7", "layer", "bucket 0", "exchange_timeout_seconds"):
        assert part in str(raised.value)


def test_a_failed_collective_is_an_error_on_all_ranks() -> None:
    """An error of the transport ends the step, it is not taken for data."""

    def work(collectives: ThreadCollectives) -> str:
        exchanger = build(collectives)
        exchanger.set_mode(SparsityMode(2.0), flush_steps=1)
        backward(exchanger, collectives.rank, 0, 1.0)
        with pytest.raises(ExchangeFailedError) as raised:
            exchanger.synchronize()
        return str(raised.value)

    world = ThreadWorld(2, [Fault(rank=1, name="bucket 1", fails=True)])
    assert all("bucket 1" in message for message in world.run(work))


def test_missing_gradients_count_as_zero() -> None:
    """S13: a parameter unused on one rank gets the other rank's weighted gradient."""

    def work(collectives: ThreadCollectives) -> list[torch.Tensor]:
        exchanger = build(collectives)
        exchanger.begin_pass(weighted(exchanger, 0.5))
        for index, parameter in enumerate(parameters_of(exchanger)):
            if index % 2 == collectives.rank:
                parameter.grad = torch.full_like(parameter, 4.0)
                exchanger.add(parameter)
                exchanger.mark_ready(parameter)
        exchanger.synchronize()
        return [p.grad for p in parameters_of(exchanger) if p.grad is not None]

    for grads in ThreadWorld(2).run(work):
        assert len(grads) == len(SHAPES)
        assert all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in grads)


def test_frozen_parameters_send_nothing_and_keep_their_residual() -> None:
    """DESIGN 3.2: its residual waits until the parameter is trained again."""

    def work(collectives: ThreadCollectives) -> None:
        exchanger = build(collectives)
        exchanger.set_mode(SparsityMode(10.0), flush_steps=1)
        backward(exchanger, collectives.rank, 0, 1.0)
        exchanger.synchronize()
        exchanger.commit()
        bucket = next(b for b in exchanger.buckets for m in b.members if m.name == "layer1")
        member = next(m for m in bucket.members if m.name == "layer1")
        before = bucket.feedback.residual[member.span].clone()
        assert before.any()
        member.parameter.requires_grad_(False)
        member.parameter.grad = None
        for cf in (10.0, None):
            exchanger.set_mode(SparsityMode(cf), flush_steps=1)
            exchanger.begin_pass(PassWeight(1.0))
            exchanger.synchronize()
            exchanger.commit()
            assert member.parameter.grad is None
            assert torch.equal(bucket.feedback.residual[member.span], before)

    ThreadWorld(2).run(work)


def test_one_process_leaves_gradients_alone() -> None:
    """World of one rank: what comes out is what went in."""
    exchanger = build(SingleProcess())
    own = backward(exchanger, 0, 0, 1.0)
    exchanger.synchronize()
    assert torch.equal(applied(exchanger), own)


def test_a_gradient_changed_before_its_exchange_is_refused() -> None:
    """S01, S05: clipping or unscaling before synchronize() would be lost without a word."""
    for change in ("scale", "replace", "drop"):
        exchanger = build(SingleProcess())
        backward(exchanger, 0, 0, 1.0)
        parameter = parameters_of(exchanger)[2]
        assert parameter.grad is not None
        if change == "scale":
            parameter.grad.mul_(0.5)
        else:
            parameter.grad = parameter.grad.clone() if change == "replace" else None
        with pytest.raises(UnsupportedError, match=r"synchronize\(\)"):
            exchanger.synchronize()


def test_dense_gradients_stay_where_they_lie() -> None:
    """Without compression nothing is copied, and equal weights are not even multiplied."""

    def work(collectives: ThreadCollectives) -> list[bool]:
        same = []
        for weight in (1.0 / collectives.size, 0.1 + collectives.rank):
            exchanger = build(collectives)
            backward(exchanger, collectives.rank, 0, weight)
            assert exchanger.where_it_lies
            before = [p.grad for p in parameters_of(exchanger)]
            exchanger.synchronize()
            after = [p.grad for p in parameters_of(exchanger)]
            same += [a is b for a, b in zip(before, after, strict=True)]
            weights = [1.0 / collectives.size] * collectives.size
            if weight != weights[0]:
                weights = [0.1 + rank for rank in range(collectives.size)]
            for index, parameter in enumerate(parameters_of(exchanger)):
                expected = sum(
                    (w * gradient(rank, 0, parameter, index) for rank, w in enumerate(weights)),
                    torch.zeros(()),
                )
                torch.testing.assert_close(parameter.grad, expected)
            exchanger.commit()
        return same

    assert all(all(same) for same in ThreadWorld(3).run(work))


def test_after_a_flush_gradients_stay_where_they_lie_again() -> None:
    """Do no harm: once the residual is sent, dense steps are as cheap as Horovod's own."""

    def work(collectives: ThreadCollectives) -> list[bool]:
        exchanger = build(collectives)
        seen = []
        for step, cf in enumerate([10.0, 10.0, None, None, None, None]):
            exchanger.set_mode(SparsityMode(cf), flush_steps=2)
            backward(exchanger, collectives.rank, step, 0.5)
            seen.append(exchanger.where_it_lies)
            exchanger.synchronize()
            exchanger.commit()
        return seen

    assert ThreadWorld(2).run(work)[0] == [False, False, False, False, True, True]


@pytest.mark.parametrize("strategy", ["allgather", "shared-index"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_is_everybodys_and_stays_nowhere(strategy: str, bad: float) -> None:
    """All ranks see NaN in that step and keep their residuals; the next step is as if it had not
    been."""

    def work(collectives: ThreadCollectives) -> None:
        exchanger = build(collectives, dtype=torch.float32)
        exchanger.set_mode(SparsityMode(5.0, strategy), flush_steps=1)
        for step in range(3):
            backward(exchanger, collectives.rank, step, 0.5)
            exchanger.synchronize()
            exchanger.commit()
        before = residual(exchanger)
        exchanger.begin_pass(weighted(exchanger, 0.5))
        for index, parameter in enumerate(parameters_of(exchanger)):
            parameter.grad = gradient(collectives.rank, 9, parameter, index)
            if collectives.rank == 1 and index == 1:
                parameter.grad.view(-1)[-1] = bad
            exchanger.add(parameter)
            exchanger.mark_ready(parameter)
        exchanger.synchronize()
        assert not applied(exchanger).isfinite().all()
        exchanger.commit()
        assert exchanger.nonfinite_steps == 1
        assert torch.equal(residual(exchanger), before)
        assert residual(exchanger).isfinite().all()
        backward(exchanger, collectives.rank, 10, 0.5)
        exchanger.synchronize()
        assert applied(exchanger).isfinite().all()

    ThreadWorld(3).run(work)


def test_entries_decide_how_much_each_bucket_sends() -> None:
    """k of every bucket is what was agreed, not what its own size says."""

    def work(collectives: ThreadCollectives) -> None:
        exchanger = build(collectives, bucket_bytes=64)
        many = [min(bucket.elements, 3 * bucket.index + 1) for bucket in exchanger.buckets]
        exchanger.set_mode(SparsityMode(2.0, "allgather", tuple(many)), flush_steps=1)
        backward(exchanger, collectives.rank, 0, 0.5)
        exchanger.synchronize()
        exchanger.commit()
        left = [int((bucket.feedback.residual != 0).sum()) for bucket in exchanger.buckets]
        for bucket, k, held_back in zip(exchanger.buckets, many, left, strict=True):
            assert held_back in (0, bucket.elements - k)  # 0 where dense sends fewer bytes
        assert any(left)

    ThreadWorld(2).run(work)


@pytest.mark.parametrize("asked", [False, True])
def test_a_change_of_mode_ends_only_a_flush_of_its_own(asked: bool) -> None:
    """Back to compression before the residual is sent: at once, unless the user asked for it."""

    def work(collectives: ThreadCollectives) -> list[str]:
        exchanger = build(collectives)
        kinds = []
        for step, cf in enumerate([10.0, 10.0, None, 10.0, 10.0, 10.0]):
            if step == 2 and asked:
                exchanger.flush(3)
            exchanger.set_mode(SparsityMode(cf), flush_steps=5)
            backward(exchanger, collectives.rank, step, 0.5)
            exchanger.synchronize()
            exchanger.commit()
            kinds.append(exchanger.take_strategy())
        return kinds

    dense_steps = 3 if asked else 1
    kinds = ThreadWorld(2).run(work)[0]
    assert ["allgather" not in kind for kind in kinds] == [
        2 <= step < 2 + dense_steps for step in range(6)
    ]


@pytest.mark.parametrize("strategy", ["allgather", "shared-index"])
def test_a_rank_without_a_backward_pass_sends_of_its_residual_only(strategy: str) -> None:
    """S26: as where a rank skips a batch; its weight in that step is 0."""

    def work(collectives: ThreadCollectives) -> tuple[torch.Tensor, ...]:
        exchanger = build(collectives)
        exchanger.set_mode(SparsityMode(20.0, strategy), flush_steps=1)
        own, total = torch.zeros(1), torch.zeros(1)
        for step in range(6):
            if step % 2 == 0 or collectives.rank == 0:
                weight = 0.5 if step % 2 == 0 else 1.0
                own = own + backward(exchanger, collectives.rank, step, weight)
            exchanger.synchronize()
            total = total + applied(exchanger)
            exchanger.commit()
        return own, total, residual(exchanger)

    histories = ThreadWorld(2).run(work)
    true_sum = sum(own for own, _, _ in histories)
    left = sum(rest for _, _, rest in histories)
    assert torch.equal(histories[0][1], histories[1][1])
    torch.testing.assert_close(histories[0][1] + left, true_sum, rtol=1e-5, atol=1e-5)
