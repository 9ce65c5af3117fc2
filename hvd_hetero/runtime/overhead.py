"""The account of what measuring, agreeing and planning cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvd_hetero.runtime.clock import now_seconds


class Overhead:
    """Seconds of one rank since the last ``take``: of its own, and until others had answered."""

    def __init__(self) -> None:
        self._own = self._waiting = 0.0
        self._timer_seconds = 0.0

    @contextmanager
    def own(self) -> Iterator[None]:
        """Count what this rank does itself."""
        begin = now_seconds()
        try:
            yield
        finally:
            self._own += now_seconds() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count an agreement, which also waits for slower ranks."""
        begin = now_seconds()
        try:
            yield
        finally:
            self._waiting += now_seconds() - begin

    def take(self, timer_seconds: float) -> list[float]:
        """Return [own, waiting] and begin anew. timer_seconds: the StepTimer's, from the start."""
        own = self._own + timer_seconds - self._timer_seconds
        taken = [own, self._waiting]
        self._own = self._waiting = 0.0
        self._timer_seconds = timer_seconds
        return taken


def overhead_of(accounts: Sequence[Sequence[float]]) -> float:
    """Return what ``take`` of all ranks comes to, in seconds: the slowest rank's own, and the
    agreements themselves, seen by the rank that waited least; the others would have waited for the
    slow rank in the next exchange."""
    return max(own for own, _ in accounts) + min(waiting for _, waiting in accounts)
