"""What the exchange of each bucket costs: measured at start-up, refined by training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.planning.cost_model import CollectiveCall, CostModel
from hvd_hetero.planning.refine import ExchangeTiming, refined_by_steps
from hvd_hetero.planning.step_time import bucket_seconds
from hvd_hetero.runtime.agreement import Message
from hvd_hetero.runtime.exchanger import GradientExchanger, SparsityMode
from hvd_hetero.runtime.probe import measure_collectives


class ExchangeCosts:
    """The cost model of one optimizer's exchanges; alike on all ranks at first, then rank 0's.

    Built on all ranks at the same place: it measures real collectives for about a second.
    """

    def __init__(
        self,
        exchanger: GradientExchanger,
        collectives: Collectives,
        values_as: str,
        timeout_seconds: float,
    ) -> None:
        self._exchanger = exchanger
        self._ranks = collectives.size
        self._values_as = values_as
        self.model = measure_collectives(collectives, timeout_seconds, prefix=exchanger.prefix)

    def report(self) -> Message:
        """Return what this rank has seen of exchanges since the last report."""
        return {"exchanges": [timing.to_list() for timing in self._exchanger.clock.take()]}

    def refine(self, reports: Sequence[Message]) -> None:
        """Rank 0: take in what all ranks reported."""
        self.model = refined_by_steps(
            self.model,
            [[ExchangeTiming.from_list(one) for one in report["exchanges"]] for report in reports],
            [(bucket.elements, bucket.feedback.dtype) for bucket in self._exchanger.buckets],
            self._values_as,
        )

    def launch_seconds(self, mode: SparsityMode) -> list[float]:
        """Return the seconds of each piece that is launched under ``mode``, in that order."""
        buckets = self._exchanger.buckets
        shares = self._exchanger.launch_shares(mode)
        seconds = bucket_seconds(
            mode.option,
            [bucket.elements for bucket in buckets],
            [bucket.dense_dtype for bucket in buckets],
            [mode.k_of(bucket.index, bucket.elements) for bucket in buckets],
            self._ranks,
            self.model,
            self._values_as,
        )
        if mode.cf is not None or not buckets:
            return seconds or [0.0]
        # Horovod fuses dense pieces as they come; the last one alone has the latency to itself.
        total_bytes = sum(bucket.elements * bucket.dense_dtype.itemsize for bucket in buckets)
        last = CollectiveCall("allreduce", max(int(shares[-1] * total_bytes), 1))
        pieces = [sum(seconds) * share for share in shares]
        return [*pieces[:-1], max(pieces[-1], self.model.seconds((last,)))]

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``model.to_dict()`` of as many ranks."""
        self.model = CostModel.from_dict(state)
