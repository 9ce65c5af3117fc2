"""What the exchanges of training steps tell about the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hvd_hetero.planning.cost_model import CostModel
from hvd_hetero.planning.step_time import collective_calls

_LEAST_STEPS = 3  # of a kind of exchange: a single late one says nothing

Exchanged = tuple[int, str, int]  # bucket, strategy, entries (0 for "dense")


@dataclass(frozen=True)
class ExchangeTiming:
    """How long a rank saw one or more exchanges take, from its own launch of the first on.

    step: equal on all ranks. exchanges: more than one where they ended as one, as Horovod fuses
    small collectives. seconds: of this rank, waiting for ranks that launched later included.
    """

    step: int
    exchanges: tuple[Exchanged, ...]
    seconds: float

    def to_list(self) -> list[Any]:
        """Return JSON-able values; ``from_list`` undoes it."""
        return [self.step, [list(one) for one in self.exchanges], self.seconds]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> ExchangeTiming:
        """Build from what ``to_list`` returned."""
        step, exchanges, seconds = values
        return cls(step, tuple((index, how, k) for index, how, k in exchanges), seconds)


def refined_by_steps(
    model: CostModel,
    timings: Sequence[Sequence[ExchangeTiming]],
    buckets: Sequence[tuple[int, torch.dtype]],
    values_as: str,
) -> CostModel:
    """Return the model corrected by a window of steps.

    The last rank to launch sees the exchange itself and no waiting: of every exchange that all
    ranks have timed the least counts (Cannikin, section 4.2, does so with whole steps), and of all
    steps of a window, of which there must be three, the median.

    Args:
        model: of as many ranks as there are timings.
        timings: of every rank.
        buckets: elements, and the dtype in which they travel dense, by index.
        values_as: as in ``wire.pack``.
    """
    by_rank = [{(one.step, one.exchanges): one.seconds for one in own} for own in timings]
    if not by_rank:
        return model
    seen: dict[tuple[Exchanged, ...], list[float]] = {}
    for step, exchanges in sorted(set(by_rank[0]).intersection(*by_rank[1:])):
        least = min(own[step, exchanges] for own in by_rank)
        seen.setdefault(exchanges, []).append(least)
    for exchanges, seconds in sorted(seen.items()):
        gone = any(bucket >= len(buckets) for bucket, _, _ in exchanges)
        if gone or len(seconds) < _LEAST_STEPS:
            continue
        calls = [
            call
            for bucket, strategy, entries in exchanges
            for call in collective_calls(
                strategy, model.ranks, entries, *buckets[bucket], values_as
            )
        ]
        model = model.refined(calls, median(seconds))
    return model
