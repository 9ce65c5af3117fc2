"""One leader's indices, everybody's values: the sum, the bytes, the flag, the two stages."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_hetero.compression.wire import index_bytes
from hvd_hetero.errors import ConfigurationError, ExchangeFailedError
from hvd_hetero.exchange.collectives import SingleProcess
from hvd_hetero.exchange.shared_index import SharedIndexExchange
from hvd_hetero.planning.cost_model import shared_index_bytes
from hvd_hetero.testing.threads import Fault, ThreadCollectives, ThreadWorld

FORMATS = ("float32", "float16")


def gradient(rank: int, elements: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(elements, generator=generator, dtype=dtype)


def selection(values: Tensor, k: int) -> Tensor:
    return torch.topk(values.abs(), k).indices.sort().values


def start(
    collectives: Any, values: Tensor, k: int, leader: int = 0, values_as: str = "float32"
) -> SharedIndexExchange:
    indices = selection(values, k) if collectives.rank == leader else None
    return SharedIndexExchange(collectives, values, k, "bucket", leader, indices, values_as)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.floats(0.0, 1.0),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(FORMATS),
    st.integers(0, 100),
)
def test_what_is_applied_and_what_is_left_are_the_gradients(
    ranks: int, elements: int, share: float, dtype: torch.dtype, values_as: str, seed: int
) -> None:
    """S26 for this strategy: sum + every rank's rest = sum of gradients; equal on all ranks."""
    k = round(share * elements)
    leader = seed % ranks

    def work(collectives: ThreadCollectives) -> tuple[Tensor, Tensor, Tensor]:
        values = gradient(collectives.rank, elements, seed, dtype)
        before = values.clone()
        exchange = start(collectives, values, k, leader, values_as)
        while not exchange.done():
            time.sleep(1e-4)
        total = exchange.finish(torch.full_like(values, float("nan")))
        assert torch.equal(values, before)
        assert not exchange.nonfinite
        assert exchange.indices is not None
        sent = exchange.sent_values
        rest = values.clone()
        rest[exchange.indices] -= values[exchange.indices] if sent is None else sent
        return total, rest, exchange.indices

    results = ThreadWorld(ranks).run(work)
    expected = sum((gradient(r, elements, seed, dtype) for r in range(ranks)), torch.zeros(1))
    led = selection(gradient(leader, elements, seed, dtype), k)
    for total, _, indices in results:
        assert torch.equal(total, results[0][0])
        assert torch.equal(indices, led)
    applied = results[0][0]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    left = sum((rest for _, rest, _ in results), torch.zeros(1))
    torch.testing.assert_close(applied + left, expected, rtol=tolerance, atol=tolerance)
    outside = torch.ones(elements, dtype=torch.bool).index_fill_(0, led, False)
    assert torch.equal(applied[outside], torch.zeros_like(applied[outside]))


def test_fixed_point_rounds_but_float64_and_float32_do_not() -> None:
    def work(collectives: ThreadCollectives) -> list[Tensor | None]:
        sent = []
        for dtype, values_as in (
            (torch.float32, "float32"),
            (torch.float64, "float16"),
            (torch.float32, "float16"),
        ):
            exchange = start(collectives, gradient(0, 50, dtype=dtype), 9, values_as=values_as)
            exchange.finish(torch.empty(50, dtype=dtype))
            sent.append(exchange.sent_values)
        return sent

    for exact, exact_double, rounded in ThreadWorld(2).run(work):
        assert exact is None
        assert exact_double is None
        assert rounded is not None
        values = gradient(0, 50)
        assert not torch.equal(rounded, values[selection(values, 9)])
        torch.testing.assert_close(rounded, values[selection(values, 9)], rtol=0, atol=1e-2)


@pytest.mark.parametrize("values_as", FORMATS)
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_gradient_is_seen_by_all(values_as: str, culprit: int, bad: float) -> None:
    """Wherever it lies; and what the others send stays finite."""

    def work(collectives: ThreadCollectives) -> tuple[bool, bool]:
        values = gradient(collectives.rank, 100)
        if collectives.rank == culprit:
            values[7] = bad
        indices = None
        if collectives.rank == 1:
            # A selector takes non-finite entries first, so a leader's are among its indices.
            indices = torch.tensor([5, 7]) if culprit == 1 else torch.tensor([5, 60])
        exchange = SharedIndexExchange(collectives, values, 2, "bucket", 1, indices, values_as)
        total = exchange.finish(torch.empty(100))
        return exchange.nonfinite, bool(torch.isfinite(total).all())

    assert ThreadWorld(3).run(work) == [(True, True)] * 3


def test_both_infinities_do_not_cancel() -> None:
    def work(collectives: ThreadCollectives) -> bool:
        values = torch.zeros(10)
        if collectives.rank == 1:
            values[3], values[4] = float("inf"), float("-inf")
        exchange = start(collectives, values, 1)
        exchange.finish(torch.empty(10))
        return exchange.nonfinite

    assert ThreadWorld(2).run(work) == [True, True]


def test_advance_never_blocks_and_launches_each_stage_once() -> None:
    world = ThreadWorld(2, [Fault(rank=1, name="shared.indices", delay_seconds=0.2)])

    def work(collectives: ThreadCollectives) -> tuple[bool, float]:
        begin = time.perf_counter()
        exchange = start(collectives, gradient(collectives.rank, 50), 5)
        first = exchange.advance()
        seconds = time.perf_counter() - begin
        while not exchange.done():
            time.sleep(1e-3)
        assert exchange.advance()
        exchange.finish(torch.empty(50))
        return first, seconds

    for first, seconds in world.run(work):
        assert not first
        assert seconds < 0.1
    assert sorted(world.names) == [
        (0, "allreduce", "bucket.shared.values"),
        (0, "broadcast", "bucket.shared.indices"),
        (1, "allreduce", "bucket.shared.values"),
        (1, "broadcast", "bucket.shared.indices"),
    ]


@pytest.mark.parametrize("stage", ["shared.indices", "shared.values"])
def test_a_failing_stage_raises_everywhere(stage: str) -> None:
    def work(collectives: ThreadCollectives) -> str:
        exchange = start(collectives, gradient(collectives.rank, 50), 5)
        try:
            exchange.finish(torch.empty(50))
        except ExchangeFailedError as error:
            return str(error)
        return ""

    for message in ThreadWorld(2, [Fault(rank=0, name=stage, fails=True)]).run(work):
        assert stage in message


def test_bytes() -> None:
    """The formula's, with what rides along: the flag, and the step of fixed point."""
    elements, k = 10_000, 100

    def work(collectives: ThreadCollectives) -> list[float]:
        exact, fixed = (start(collectives, gradient(0, elements), k, 0, how) for how in FORMATS)
        for exchange in (exact, fixed):
            exchange.finish(torch.empty(elements))
        return [exact.sent_bytes, fixed.sent_bytes]

    packed = index_bytes(k, elements)
    for ranks in (2, 4):
        expected = [
            shared_index_bytes(ranks, packed, k + 1),
            shared_index_bytes(ranks, packed + 4, k // 5 + 1, itemsize=8),
        ]
        assert ThreadWorld(ranks).run(work)[0] == expected
    assert start(SingleProcess(), gradient(0, elements), k).sent_bytes == 0.0


def test_one_rank_and_no_entries() -> None:
    exchange = start(SingleProcess(), torch.arange(5.0), 2)
    assert torch.equal(exchange.finish(torch.empty(5)), torch.tensor([0.0, 0, 0, 3, 4]))
    for values_as in FORMATS:
        nothing = start(SingleProcess(), torch.empty(0), 0, values_as=values_as)
        assert nothing.finish(torch.empty(0)).numel() == 0


def test_half_output() -> None:
    """Half-type parameters: a_i is float32, what the optimizer gets is not."""
    total = start(SingleProcess(), torch.arange(5.0), 1).finish(
        torch.empty(5, dtype=torch.bfloat16)
    )
    assert total.dtype == torch.bfloat16
    assert total[4] == 4


def test_malformed() -> None:
    values, indices = torch.ones(4), torch.tensor([1])
    with pytest.raises(ConfigurationError, match="leader=1"):
        SharedIndexExchange(SingleProcess(), values, 1, "bucket", 1, indices)
    with pytest.raises(ConfigurationError, match="gives indices"):
        SharedIndexExchange(SingleProcess(), values, 1, "bucket", 0, None)
    with pytest.raises(ConfigurationError, match="k=2: the leader gives 1"):
        SharedIndexExchange(SingleProcess(), values, 2, "bucket", 0, indices)
    with pytest.raises(ConfigurationError, match="k=5"):
        SharedIndexExchange(SingleProcess(), values, 5, "bucket", 0, indices)
    with pytest.raises(ConfigurationError, match="values_as='int8'"):
        SharedIndexExchange(SingleProcess(), values, 1, "bucket", 0, indices, "int8")
