"""The exchange as the planner sees it: two numbers of seconds, by how gradients travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_hetero.balance.timing import WindowTiming, exchange_times

SLACK_SECONDS = 1e-3  # by which a wait may exceed T_u without a meaning, ...
SLACK_SHARE = 0.02  # ... or by this share of the work it follows
# Share of the newest window in T_o and T_u, where they are shorter than before, and longer: what
# disturbs a step only ever makes the exchange look longer.
EXCHANGE_SMOOTHING = (0.7, 0.3)
LARGEST_CORRECTION = 2.0  # of the cost model of an exchange by what another one showed


@dataclass(frozen=True)
class ExchangeView:
    """How gradients travelled in a window, and how they will in the next.

    now, then: names of the exchanges, equal where nothing changes. modelled: seconds of each bucket
    in the order of launch, by the name of the exchange, from a cost model; may be empty.
    """

    now: str = ""
    then: str = ""
    modelled: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def shares(self, bucket_shares: Sequence[float]) -> Sequence[float]:
        """Return each bucket's part of the seconds; without a model that of the bytes."""
        seconds = self.modelled.get(self.now, ())
        if len(seconds) != len(bucket_shares) or not all(one > 0.0 for one in seconds):
            return bucket_shares
        total = sum(seconds)
        return [one / total for one in seconds]

    def measured(
        self, windows: Sequence[WindowTiming], bucket_shares: Sequence[float], first: int
    ) -> tuple[float, float]:
        """Return (T_o, T_u) from bucket ``first`` on, by the cost model as far as steps agree.

        Steps alone only bound them: an exchange that ends within backward may have taken any time
        until then. So the model counts where it is below that bound; and the longer the last rank
        waits than the model explains, the more time is given to the exchange, up to the bound,
        which is exact where communication limits the step.
        """
        bound = exchange_times(windows, self.shares(bucket_shares), first)
        seconds = self.modelled.get(self.now, ())
        if len(seconds) != len(bucket_shares) or not sum(seconds) > 0.0:
            return bound
        slack = max(
            SLACK_SECONDS,
            SLACK_SHARE * max(window.typical.done_seconds for window in windows),
        )
        least_wait = min(window.least_wait_seconds for window in windows)
        stretch = max(1.0, (least_wait - slack) / seconds[-1]) if seconds[-1] > 0.0 else 1.0
        overlapped, final = sum(seconds[first:-1]) * stretch, seconds[-1] * stretch
        scale = min(1.0, sum(bound) / (overlapped + final)) if overlapped + final > 0.0 else 1.0
        return overlapped * scale, final * scale

    def expected(self, measured: tuple[float, float], first: int) -> tuple[float, float]:
        """Return (T_o, T_u) of ``then``, given those measured of ``now``.

        The cost model's ratio between the two is taken; without one they are taken to be alike.
        """
        old, new = self.modelled.get(self.now, ()), self.modelled.get(self.then, ())
        if self.now == self.then or not old or not new:
            return measured
        before = sum(old[first:])
        correction = 1.0
        if before > 0.0 and sum(measured) > 0.0:
            correction = sum(measured) / before
        limit = LARGEST_CORRECTION
        correction = min(max(correction, 1.0 / limit), limit)
        return sum(new[first:-1]) * correction, new[-1] * correction


def smoothing(seconds: float, before: float) -> float:
    """Return the share that newly measured exchange seconds get."""
    return EXCHANGE_SMOOTHING[0 if seconds < before else 1]
