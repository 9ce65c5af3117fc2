"""How long the exchange of each bucket takes, where that can be seen without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hvd_hetero.planning.refine import Exchanged, ExchangeTiming
from hvd_hetero.runtime.clock import now_seconds

_MOST_TIMINGS = 128  # of the newest steps; an agreement must stay small


class ExchangeClock:
    """Times exchanges from launch, or from the end of the one before, to their end.

    An exchange has a time when its beginning and its end were seen: nothing before it was under
    way at its launch, or this rank was waiting when that ended; and this rank was waiting when it
    ended itself. Several that end at the same moment have one time together.
    """

    def __init__(self) -> None:
        self._timings: deque[ExchangeTiming] = deque(maxlen=_MOST_TIMINGS)
        self._launched: dict[int, tuple[float, bool, Exchanged]] = {}
        self._last_end: float | None = None

    def launched(self, exchanged: Exchanged, clear: bool) -> None:
        """An exchange begins. clear: none before it is under way."""
        self._launched[exchanged[0]] = now_seconds(), clear, exchanged

    def ended(self, step: int, bucket: int, others: Sequence[int]) -> None:
        """The exchange of ``bucket`` has ended just now, and those of ``others`` with it."""
        end = now_seconds()
        first, *more = (self._launched.pop(one, None) for one in (bucket, *others))
        if first is None:  # it ended with one before it
            return
        launch, clear, exchanged = first
        begin = launch if clear else self._last_end
        self._last_end = end
        exchanges = [exchanged]
        for one in more:
            if one is None or one[1]:  # nothing was under way at its launch: another time
                return
            exchanges.append(one[2])
        if begin is not None:
            seconds = end - max(begin, launch)
            self._timings.append(ExchangeTiming(step, tuple(exchanges), seconds))

    def had_ended(self, bucket: int) -> None:
        """The exchange of ``bucket`` has ended before this rank looked."""
        if self._launched.pop(bucket, None) is not None:
            self._last_end = None

    def end_step(self) -> None:
        """Forget what was launched; the next step begins."""
        self._launched.clear()
        self._last_end = None

    def take(self) -> list[ExchangeTiming]:
        """Return the timings since the last call, oldest first."""
        timings = list(self._timings)
        self._timings.clear()
        return timings
