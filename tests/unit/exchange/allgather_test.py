"""The allgather exchange: equal sums on all ranks, known bytes, flags."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_hetero.compression.topk import Selector, SparseGradient
from hvd_hetero.compression.wire import VALUE_FORMATS, packed_bytes
from hvd_hetero.exchange.allgather import AllgatherExchange
from hvd_hetero.exchange.collectives import SingleProcess
from hvd_hetero.exchange.exchange import Exchange
from hvd_hetero.testing.threads import Fault, ThreadCollectives, ThreadWorld

ELEMENTS = 70_000


def _sparse(rank: int, k: int, dtype: torch.dtype) -> SparseGradient:
    generator = torch.Generator().manual_seed(rank)
    return Selector().select(torch.randn(ELEMENTS, generator=generator, dtype=dtype), k)


def _wait(exchange: Exchange, output: torch.Tensor) -> torch.Tensor:
    assert exchange.advance()
    while not exchange.done():
        pass
    return exchange.finish(output)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("values_as", VALUE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_of_what_each_rank_says_it_sent(ranks: int, values_as: str, dtype: torch.dtype) -> None:
    """Bit for bit alike on all ranks, added in rank order; ``output`` may hold anything."""
    k = 700

    def work(collectives: ThreadCollectives) -> tuple[torch.Tensor, torch.Tensor, float]:
        sparse = _sparse(collectives.rank, k, dtype)
        exchange = AllgatherExchange(collectives, sparse, "bucket", values_as)
        values = sparse.values if exchange.sent_values is None else exchange.sent_values
        sent = SparseGradient(values, sparse.indices, ELEMENTS).to_dense()
        total = _wait(exchange, torch.full((ELEMENTS,), math.nan, dtype=dtype))
        assert not exchange.nonfinite
        return total, sent, exchange.sent_bytes

    world = ThreadWorld(ranks)
    results = world.run(work)
    expected = torch.zeros(ELEMENTS, dtype=dtype)
    for _, sent, _ in results:
        expected += sent
    for total, _, sent_bytes in results:
        assert torch.equal(total, expected)
        assert sent_bytes == (ranks - 1) * packed_bytes(k, ELEMENTS, dtype, values_as)
    assert {name for _, _, name in world.names} == {"bucket.allgather"}


def test_every_rank_learns_that_one_was_not_finite() -> None:
    def work(collectives: ThreadCollectives) -> bool:
        values = torch.randn(100)
        if collectives.rank == 1:
            values[17] = math.nan
        sparse = Selector().select(values, 5)
        exchange = AllgatherExchange(collectives, sparse, "bucket", "float16")
        _wait(exchange, torch.empty(100))
        return exchange.nonfinite

    assert ThreadWorld(3).run(work) == [True, True, True]


def test_nothing_blocks_before_the_last_rank_is_there() -> None:
    def work(collectives: ThreadCollectives) -> bool:
        sparse = SparseGradient(torch.ones(1), torch.tensor([3]), 10)
        exchange = AllgatherExchange(collectives, sparse, "bucket", "float32")
        early = exchange.done()
        assert _wait(exchange, torch.empty(10)).tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0]
        return early

    world = ThreadWorld(2, [Fault(rank=1, name="bucket", delay_seconds=0.1)])
    assert world.run(work) == [False, False]


def test_nothing_selected_by_any_rank() -> None:
    """S19: no gradient at all, as of a parameter of shape (0, 4)."""
    for elements in (0, 10):
        sparse = SparseGradient(torch.empty(0), torch.empty(0, dtype=torch.int64), elements)
        exchange = AllgatherExchange(SingleProcess(), sparse, "bucket", "float16")
        assert exchange.finish(torch.ones(elements)).tolist() == [0.0] * elements
        assert not exchange.nonfinite
