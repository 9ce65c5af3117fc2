"""What the exchanges of training steps tell about the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hvd_hetero.planning.cost_model import CostModel
from hvd_hetero.planning.step_time import collective_calls


@dataclass(frozen=True)
class ExchangeTiming:
    """How long a rank saw a bucket's exchange take, alone, from its own launch on.

    step: equal on all ranks. entries: k, 0 for "dense". seconds: of this rank, waiting for ranks
    that launched later included.
    """

    step: int
    bucket: int
    strategy: str
    entries: int
    seconds: float

    def to_list(self) -> list[Any]:
        """Return JSON-able values; ``ExchangeTiming(*values)`` undoes it."""
        return [self.step, self.bucket, self.strategy, self.entries, self.seconds]


def refined_by_steps(
    model: CostModel,
    timings: Sequence[Sequence[ExchangeTiming]],
    buckets: Sequence[tuple[int, torch.dtype]],
    values_as: str,
) -> CostModel:
    """Return the model corrected by a window of steps.

    The last rank to launch sees the exchange itself and no waiting: of every exchange that all
    ranks have timed the least counts (Cannikin, section 4.2, does so with whole steps), and of all
    steps of a window the median.

    Args:
        model: of as many ranks as there are timings.
        timings: of every rank.
        buckets: elements, and the dtype in which they travel dense, by index.
        values_as: as in ``wire.pack``.
    """
    by_rank = [
        {(t.step, t.bucket, t.strategy, t.entries): t.seconds for t in own} for own in timings
    ]
    if not by_rank:
        return model
    seen: dict[tuple[int, str, int], list[float]] = {}
    for exchange in sorted(set(by_rank[0]).intersection(*by_rank[1:])):
        _, bucket, strategy, entries = exchange
        least = min(own[exchange] for own in by_rank)
        seen.setdefault((bucket, strategy, entries), []).append(least)
    for (bucket, strategy, entries), seconds in sorted(seen.items()):
        if bucket >= len(buckets):
            continue
        elements, dtype = buckets[bucket]
        calls = collective_calls(strategy, model.ranks, entries, elements, dtype, values_as)
        model = model.refined(calls, median(seconds))
    return model
