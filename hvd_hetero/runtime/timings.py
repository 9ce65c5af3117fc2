"""Step timing of one rank that does not count waiting as work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvd_hetero.balance.timing import StepTiming
from hvd_hetero.runtime.clock import now_seconds


class StepTimer:
    """Durations of a step, all from the end of the previous exchange on this rank.

    Blocking agreements between two exchanges are taken out; what the exchange itself makes this
    rank wait lies behind ``backward_ended`` and so is no part of its compute seconds.
    """

    def __init__(self) -> None:
        self._start: float | None = None
        self._ready: float | None = None
        self._backward_end: float | None = None
        self._waited_seconds = 0.0
        self._discard = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for other ranks that is not the gradient exchange."""
        start = now_seconds()
        try:
            yield
        finally:
            self._waited_seconds += now_seconds() - start

    def bucket_ready(self) -> None:
        """A bucket of gradients is ready; only the first of a step counts."""
        if self._ready is None:
            self._ready = now_seconds()

    def backward_ended(self) -> None:
        """A backward pass ended; only the last of a step counts."""
        self._backward_end = now_seconds()

    def synchronize_begins(self) -> None:
        """The wait for the exchange begins; ends backward where no hook has seen it end."""
        if self._backward_end is None:
            self._backward_end = now_seconds()

    def discard(self) -> None:
        """The step under way is not typical (start of an epoch, new plan, thrown away)."""
        self._discard = True

    def exchange_ended(self, local_batch: int) -> StepTiming | None:
        """Close the step; return its timing unless it is to be left out."""
        end = now_seconds()
        backward_end = self._backward_end if self._backward_end is not None else end
        ready = self._ready if self._ready is not None else backward_end
        timing = None
        if self._start is not None and not self._discard and local_batch > 0:
            start = self._start + self._waited_seconds
            timing = StepTiming(
                batch=local_batch,
                ready_seconds=max(min(ready, backward_end) - start, 0.0),
                done_seconds=max(backward_end - start, 0.0),
                end_seconds=max(end - start, 0.0),
            )
        self._start, self._ready, self._backward_end = end, None, None
        self._waited_seconds, self._discard = 0.0, False
        return timing
