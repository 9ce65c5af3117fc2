"""What every rank of ``benchmarks/exchange.py`` runs: the model, then the cases in turn."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402

from hvd_hetero.compression.topk import Selector, SparseGradient, k_for  # noqa: E402
from hvd_hetero.exchange.allgather import AllgatherExchange  # noqa: E402
from hvd_hetero.exchange.collectives import Collectives, Handle  # noqa: E402
from hvd_hetero.exchange.dense import DenseExchange  # noqa: E402
from hvd_hetero.exchange.exchange import Exchange  # noqa: E402
from hvd_hetero.exchange.shared_index import SharedIndexExchange  # noqa: E402
from hvd_hetero.planning.cost_model import (  # noqa: E402
    CollectiveCall,
    CostModel,
    LocalCosts,
)
from hvd_hetero.planning.refine import ExchangeTiming, refined_by_steps  # noqa: E402
from hvd_hetero.planning.step_time import collective_calls  # noqa: E402
from hvd_hetero.runtime.agreement import CollectivesChannel  # noqa: E402
from hvd_hetero.runtime.clock import wait_until  # noqa: E402
from hvd_hetero.runtime.collectives import connect  # noqa: E402
from hvd_hetero.runtime.probe import measure_collectives, measure_local  # noqa: E402

TIMEOUT_SECONDS = 120.0
Case = tuple[str, int, float | None]  # strategy, elements, CF
COUNTED_COPIES = 32  # buckets under way at once while bytes are counted
CONTROL = "dense again"  # dense against itself: how far the machine's noise reaches
# Of the same case, one after the other; the first begins after a barrier, and is left out.
DENSE_STEPS, SPARSE_STEPS = 2, 6
PAUSE_SECONDS = (2e-3, 4e-3)  # in place of a forward and backward pass
REFINING_ROUNDS = 3  # as many steps as refine the model


def predict(
    strategy: str, elements: int, cf: float | None, values_as: str, model: CostModel
) -> float:
    """Return the seconds from the first launch until all that is needed has arrived."""
    return model.seconds(calls_of(strategy, model.ranks, elements, cf, values_as))


def calls_of(
    strategy: str, ranks: int, elements: int, cf: float | None, values_as: str
) -> tuple[CollectiveCall, ...]:
    """Return the collectives of a case."""
    k = 0 if cf is None else k_for(elements, cf)
    strategy = "dense" if cf is None else strategy
    return collective_calls(strategy, ranks, k, elements, torch.float32, values_as)


class TimedCollectives:
    """Collectives whose first launch calls ``begin``."""

    def __init__(self, inner: Collectives, begin: Callable[[], None]) -> None:
        self._inner = inner
        self._begin: Callable[[], None] | None = begin
        self.rank, self.size = inner.rank, inner.size

    def _launched(self) -> Collectives:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()
        return self._inner

    def allreduce_async(self, tensor: torch.Tensor, name: str, average: bool = False) -> Handle:
        return self._launched().allreduce_async(tensor, name, average)

    def allgather_async(self, tensor: torch.Tensor, name: str) -> Handle:
        return self._launched().allgather_async(tensor, name)

    def broadcast_async(self, tensor: torch.Tensor, root_rank: int, name: str) -> Handle:
        return self._launched().broadcast_async(tensor, root_rank, name)


class Rank:
    """Runs cases on this rank: ``(strategy, elements, cf)``, all ranks in the same order."""

    def __init__(self, collectives: Collectives, interface: str, values_as: str) -> None:
        self._collectives = collectives
        self._interface = interface
        self._values_as = values_as
        self._turns = 0
        self._pauses = random.Random(0)  # alike on all ranks
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._selections: dict[tuple[int, int], SparseGradient] = {}

    def run(self, strategy: str, elements: int, cf: float | None) -> list[dict[str, float]]:
        """Do some exchanges, as steps of training follow each other; what the later ones took."""
        self._barrier()
        many = DENSE_STEPS if cf is None else SPARSE_STEPS
        steps = [self._step(strategy, elements, cf) for _ in range(many)]
        return steps[1:]

    def _step(self, strategy: str, elements: int, cf: float | None) -> dict[str, float]:
        values, output = self._tensors_of(elements)
        start = 0.0

        def begin() -> None:
            nonlocal start
            # Horovod looks for work every ms; backward ends at any moment in between.
            time.sleep(self._pauses.uniform(*PAUSE_SECONDS))
            start = time.perf_counter()

        timed = TimedCollectives(self._collectives, begin)
        exchange = self._launch(timed, strategy, values, cf, self._next_leader(), "")
        wait_until(exchange.done, TIMEOUT_SECONDS, lambda: f"{strategy} of {elements}")
        exchanged = time.perf_counter()
        exchange.finish(output)
        return {
            "seconds": exchanged - start,
            "decode_seconds": time.perf_counter() - exchanged,
            "accounted_bytes": exchange.sent_bytes,
        }

    def count(self, strategy: str, elements: int, cf: float | None) -> list[dict[str, float]]:
        """Do some exchanges of the same kind at once; the bytes of this rank for each of them."""
        values, output = self._tensors_of(elements)
        copies = COUNTED_COPIES if cf is not None else 1
        leader = self._next_leader()
        self._barrier()
        before = self._traffic()
        exchanges = [
            self._launch(self._collectives, strategy, values, cf, leader, str(copy))
            for copy in range(copies)
        ]
        wait_until(
            # A list: every one of them is to launch its second stage.
            lambda: all([exchange.done() for exchange in exchanges]),
            TIMEOUT_SECONDS,
            lambda: f"{copies} times {strategy} of {elements}",
        )
        after = self._traffic()
        for exchange in exchanges:
            exchange.finish(output)
        return [
            {
                "received_bytes": (after[0] - before[0]) / copies,
                "sent_bytes": (after[1] - before[1]) / copies,
            }
        ]

    def _tensors_of(self, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        if elements not in self._tensors:
            generator = torch.Generator().manual_seed(self._collectives.rank)
            values = torch.randn(elements, generator=generator)
            self._tensors[elements] = values, torch.empty(elements)
        return self._tensors[elements]

    def _next_leader(self) -> int:
        self._turns += 1
        return self._turns % self._collectives.size

    def _launch(
        self,
        collectives: Collectives,
        strategy: str,
        values: torch.Tensor,
        cf: float | None,
        leader: int,
        copy: str,
    ) -> Exchange:
        name = f"{strategy}.{values.numel()}.{cf}.{copy}"
        if cf is None:
            return DenseExchange(collectives, values.clone(), name)  # the sum takes its place
        k = k_for(values.numel(), cf)
        sparse = self._selection(values, k)
        if strategy == "allgather":
            return AllgatherExchange(collectives, sparse, name, self._values_as)
        indices = sparse.indices if leader == collectives.rank else None
        return SharedIndexExchange(collectives, values, k, name, leader, indices, self._values_as)

    def _selection(self, values: torch.Tensor, k: int) -> SparseGradient:
        key = values.numel(), k
        if key not in self._selections:
            self._selections[key] = Selector().select(values, k)
        return self._selections[key]

    def _barrier(self) -> None:
        handle = self._collectives.allreduce_async(torch.zeros(1), "barrier")
        wait_until(handle.done, TIMEOUT_SECONDS, lambda: "barrier")
        handle.result()

    def _traffic(self) -> tuple[int, int]:
        """Return the bytes received and sent so far on the interface; zeros without one."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self._interface:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
        return 0, 0

    def idle_bytes_per_second(self) -> float:
        """Return what the interface receives while nothing is exchanged."""
        self._barrier()
        before, start = self._traffic()[0], time.perf_counter()
        time.sleep(0.3)
        return (self._traffic()[0] - before) / (time.perf_counter() - start)


def run_cases(
    run: Callable[..., list[dict[str, float]]], cases: list[Case], rounds: int
) -> list[list[dict[str, float]]]:
    """Run every case once to warm up and then once a round, in another order each round."""
    records: list[list[dict[str, float]]] = [[] for _ in cases]
    for turn in range(rounds + 1):
        order = list(range(len(cases)))
        random.Random(turn).shuffle(order)  # the same on all ranks
        for index in order:
            steps = run(*cases[index])
            if turn > 0:
                records[index] += steps
    return records


def steps_of_training(
    rank: Rank, model: CostModel, channel: CollectivesChannel, options: dict[str, Any]
) -> CostModel:
    """Return the model after some steps with buckets half as long."""
    cases: list[Case] = []
    for elements in options["elements"]:
        cases.append(("dense", elements // 2, None))
        for cf in options["cfs"]:
            cases += [(how, elements // 2, cf) for how in ("allgather", "shared-index")]
    records = run_cases(rank.run, cases, REFINING_ROUNDS)
    own = [
        ExchangeTiming(
            step,
            ((index, strategy, 0 if cf is None else k_for(elements, cf)),),
            record["seconds"],
        )
        for index, (strategy, elements, cf) in enumerate(cases)
        for step, record in enumerate(records[index])
    ]
    reports = channel.allgather({"timings": [one.to_list() for one in own]}, "steps")
    return refined_by_steps(
        model,
        [[ExchangeTiming.from_list(one) for one in report["timings"]] for report in reports],
        [(elements, torch.float32) for _, elements, _ in cases],
        options["values_as"],
    )


def over_ranks(records: list[tuple[dict[str, float], ...]]) -> dict[str, list[float]]:
    """Return lists by step; records: of all ranks, by step.

    Who launches last has seen the exchange and no waiting: the least of the seconds counts.
    """
    over = {key: min if key == "seconds" else max for key in records[0][0]}
    return {
        key: [choose(one[key] for one in ranks) for ranks in records]
        for key, choose in over.items()
    }


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    collectives = connect()
    channel = CollectivesChannel(collectives, "exchange-benchmark", TIMEOUT_SECONDS)
    result: dict[str, Any] = {}
    if options["predict"]:
        start = time.perf_counter()
        model = measure_collectives(collectives, TIMEOUT_SECONDS)
        result["model_seconds"] = time.perf_counter() - start
        own = measure_local(max(options["elements"]), torch.float32, "cpu").to_dict()
        costs = channel.allgather(own, "local")
        local = LocalCosts(**{key: statistics.median(one[key] for one in costs) for key in own})
    rank = Rank(collectives, options["interface"], options["values_as"])
    if options["predict"]:
        first = model
        model = steps_of_training(rank, first, channel, options)
        result |= {"model": model.to_dict(), "local": local.to_dict()}
    cases: list[Case] = []
    for elements in options["elements"]:
        cases += [("dense", elements, None), (CONTROL, elements, None)]
        for cf in options["cfs"]:
            cases += [("allgather", elements, cf), ("shared-index", elements, cf)]
    run = rank.run if options["predict"] else rank.count
    records = run_cases(run, cases, options["rounds"]) if options["rounds"] else []
    idle = channel.allgather({"idle": rank.idle_bytes_per_second()}, "idle")
    result["idle_bytes_per_second"] = max(one["idle"] for one in idle)
    by_rank = [one["records"] for one in channel.allgather({"records": records}, "records")]
    result["cases"] = [
        {
            "strategy": strategy,
            "ranks": collectives.size,
            "elements": elements,
            "cf": cf,
            "steps": over_ranks(list(zip(*(one[index] for one in by_rank), strict=True))),
        }
        for index, (strategy, elements, cf) in enumerate(cases if records else [])
    ]
    if options["predict"]:
        for case in result["cases"]:
            strategy, elements, cf = case["strategy"], case["elements"], case["cf"]
            what = strategy, elements, cf, options["values_as"]
            case["predicted_seconds"] = predict(*what, model)
            case["predicted_at_start_seconds"] = predict(*what, first)
            entries = 0 if cf is None else k_for(elements, cf)
            if strategy == "allgather":
                entries *= collectives.size
            case["predicted_decode_seconds"] = (
                0.0 if cf is None else local.decode_seconds(elements, entries)
            )
    if hvd.rank() == 0:
        Path(options["output"]).write_text(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    main()
