"""Start-up measurements: alike on all ranks, within their budget, near what things take."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("horovod.torch")  # runtime/ needs it

from hvd_hetero.errors import ConfigurationError, ExchangeFailedError, ExchangeTimeoutError
from hvd_hetero.exchange.collectives import SingleProcess
from hvd_hetero.planning.cost_model import COLLECTIVES, CostModel
from hvd_hetero.runtime.probe import measure_collectives, measure_local
from hvd_hetero.testing.threads import Fault, ThreadCollectives, ThreadWorld

ALPHA_SECONDS, SECONDS_PER_BYTE = 2e-3, 2e-8


class _Slow:
    """A handle that is done some seconds after all ranks have joined."""

    def __init__(self, handle: Any, seconds: float) -> None:
        self._handle, self._seconds = handle, seconds
        self._joined_at: float | None = None

    def done(self) -> bool:
        if self._joined_at is None and self._handle.done():
            self._joined_at = time.perf_counter()
        joined_at = self._joined_at
        return joined_at is not None and time.perf_counter() >= joined_at + self._seconds

    def result(self) -> torch.Tensor:
        result: torch.Tensor = self._handle.result()
        return result


class Link:
    """Collectives that take ALPHA_SECONDS and SECONDS_PER_BYTE; a broadcast's root leaves early."""

    def __init__(self, inner: ThreadCollectives) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def _slow(self, handle: Any, tensor: torch.Tensor) -> _Slow:
        bytes = tensor.numel() * tensor.element_size()
        return _Slow(handle, ALPHA_SECONDS + SECONDS_PER_BYTE * bytes)

    def allreduce_async(self, tensor: torch.Tensor, name: str, average: bool = False) -> _Slow:
        return self._slow(self._inner.allreduce_async(tensor, name, average), tensor)

    def allgather_async(self, tensor: torch.Tensor, name: str) -> _Slow:
        return self._slow(self._inner.allgather_async(tensor, name), tensor)

    def broadcast_async(self, tensor: torch.Tensor, root_rank: int, name: str) -> Any:
        handle = self._inner.broadcast_async(tensor, root_rank, name)
        return handle if self.rank == root_rank else self._slow(handle, tensor)


def test_the_model_is_the_links_and_alike_on_all_ranks() -> None:
    """The head start of a broadcast's root does not show in the collective after it."""

    def work(inner: ThreadCollectives) -> CostModel:
        return measure_collectives(Link(inner), 20.0, budget_seconds=1.0)

    models = ThreadWorld(3).run(work)
    assert models[0] == models[1] == models[2]
    model = models[0]
    assert model.ranks == 3
    for kind in COLLECTIVES:
        curve = getattr(model, kind)
        assert len(curve.bytes) >= 2
        for bytes in (curve.bytes[0], curve.bytes[-1]):
            expected = ALPHA_SECONDS + SECONDS_PER_BYTE * bytes
            measured = curve.seconds_for(bytes)
            assert 0.9 * expected < measured < 2 * expected + 0.01, (kind, bytes)
    assert model.allreduce.bytes[-1] > ALPHA_SECONDS / SECONDS_PER_BYTE, "latency alone was seen"


def test_all_ranks_run_the_same_collectives() -> None:
    world = ThreadWorld(2)
    world.run(lambda inner: measure_collectives(Link(inner), 20.0, budget_seconds=0.3))
    launched = [
        [(kind, name) for rank, kind, name in world.names if rank == wanted] for wanted in (0, 1)
    ]
    assert launched[0] == launched[1]
    assert all(name.startswith("hvd_hetero.probe.") for _, name in launched[0])
    kinds = {name: kind for kind, name in launched[0]}
    assert len(kinds) == len(set(launched[0])), "one name, two kinds of collective"
    assert len(kinds) < 60, "names fill Horovod's response cache"


def test_budget_is_kept_and_used() -> None:
    def work(inner: ThreadCollectives) -> float:
        start = time.perf_counter()
        measure_collectives(Link(inner), 20.0, budget_seconds=0.5)
        return time.perf_counter() - start

    for seconds in ThreadWorld(2).run(work):
        assert 0.2 < seconds < 1.0


def test_sizes_are_repeated() -> None:
    world = ThreadWorld(2)
    world.run(lambda inner: measure_collectives(Link(inner), 20.0, budget_seconds=0.4))
    uses = Counter(name for rank, _, name in world.names if rank == 0 and "agree" not in name)
    for kind in COLLECTIVES:
        ours = [count for name, count in uses.items() if f".{kind}." in name]
        assert sorted(ours)[-2:] >= [3, 3], "a warm-up and two timed uses of the first sizes"


def test_one_rank_costs_nothing() -> None:
    assert measure_collectives(SingleProcess(), 1.0) == CostModel.free()


def test_a_rank_that_stays_away_ends_in_an_error() -> None:
    late = ThreadWorld(2, [Fault(rank=1, name="probe.allgather.", delay_seconds=5.0)])
    with pytest.raises(ExchangeTimeoutError, match=r"rank \d: start-up measurement"):
        late.run(lambda inner: measure_collectives(inner, timeout_seconds=0.1))
    failing = ThreadWorld(2, [Fault(rank=1, name="probe.broadcast.", fails=True)])
    with pytest.raises(ExchangeFailedError):
        failing.run(lambda inner: measure_collectives(inner, timeout_seconds=5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("elements", [0, 1, 1000, 200_000])
def test_local_costs_are_those_of_the_work(dtype: torch.dtype, elements: int) -> None:
    start = time.perf_counter()
    costs = measure_local(elements, dtype, "cpu", budget_seconds=0.05)
    assert time.perf_counter() - start < 1.0
    if elements >= 1000:
        assert 0.0 < costs.compress_seconds(elements, elements // 100) < 0.5
        assert 0.0 < costs.decode_seconds(elements, elements // 100) < 0.5
        more = costs.decode_seconds(elements, elements // 10)
        assert more >= costs.decode_seconds(elements, elements // 1000)


def test_malformed() -> None:
    with pytest.raises(ConfigurationError, match="budget_seconds=0"):
        measure_collectives(SingleProcess(), 1.0, budget_seconds=0)
    with pytest.raises(ConfigurationError, match="budget_seconds=-1"):
        measure_local(10, torch.float32, "cpu", budget_seconds=-1)
