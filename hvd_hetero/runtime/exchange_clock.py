"""How long the exchange of each bucket takes, where that can be seen without waiting for it."""

from __future__ import annotations

from collections import deque

from hvd_hetero.planning.refine import ExchangeTiming
from hvd_hetero.runtime.clock import now_seconds

_MOST_TIMINGS = 128  # of the newest steps; an agreement must stay small


class ExchangeClock:
    """Times exchanges from launch, or from the end of the one before, to their end.

    An exchange has a time when its beginning and its end were seen: nothing before it was under
    way at its launch, or this rank was waiting when that ended; and this rank was waiting when it
    ended itself.
    """

    def __init__(self) -> None:
        self._timings: deque[ExchangeTiming] = deque(maxlen=_MOST_TIMINGS)
        self._launched: dict[int, tuple[float, bool]] = {}
        self._last_end: float | None = None

    def launched(self, bucket: int, clear: bool) -> None:
        """The exchange of ``bucket`` begins. clear: none before it is under way."""
        self._launched[bucket] = now_seconds(), clear

    def finished(self, step: int, bucket: int, strategy: str, entries: int, waited: bool) -> None:
        """It has ended, just now if this rank ``waited`` for it."""
        end = now_seconds()
        launch, clear = self._launched.pop(bucket, (end, False))
        begin = launch if clear else self._last_end
        if waited and begin is not None:
            seconds = end - max(begin, launch)
            self._timings.append(ExchangeTiming(step, bucket, strategy, entries, seconds))
        self._last_end = end if waited else None

    def end_step(self) -> None:
        """Forget what was launched; the next step begins."""
        self._launched.clear()
        self._last_end = None

    def take(self) -> list[ExchangeTiming]:
        """Return the timings since the last call, oldest first."""
        timings = list(self._timings)
        self._timings.clear()
        return timings
