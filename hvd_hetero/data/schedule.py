"""Which plan applies to which draw, while data loader workers run ahead of training.

Every rank draws global batches in the same order, but workers prefetch, so at a given moment the
ranks have drawn differently far. A new plan may only apply to batches that no rank has drawn yet:

1. every rank holds its schedule (``with schedule.agreement()``), so that nobody draws;
2. the ranks exchange ``schedule.drawn`` and take the maximum;
3. every rank calls ``schedule.install(plan, maximum)`` and lets go.

A plan therefore takes effect late by the number of batches in the queues of the rank that ran
ahead most: at most ``num_workers * prefetch_factor`` with the default loader.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvd_hetero.errors import BatchAccountingError, ConfigurationError
from hvd_hetero.planning.plan import Plan

Cursor = tuple[int, int]
"""(pass, step): the pass over the loader and the global batch within it, both from 0."""


class PlanSchedule:
    """The plans of one loader by the cursor from which each applies. Thread safe."""

    def __init__(self, plan: Plan) -> None:
        self._lock = threading.RLock()
        self._entries: list[tuple[Cursor, Plan]] = [((0, 0), plan)]
        self._drawn: Cursor = (0, 0)
        self._passes = 0

    @property
    def drawn(self) -> Cursor:
        """Cursor of the next draw: all before it is drawn and cannot change any more."""
        with self._lock:
            return self._drawn

    @property
    def passes(self) -> int:
        """Passes begun so far."""
        with self._lock:
            return self._passes

    @property
    def latest(self) -> Plan:
        """The plan installed last, which may not have taken effect yet."""
        with self._lock:
            return self._entries[-1][1]

    def plan_at(self, cursor: Cursor) -> Plan:
        """Return the plan that applies at ``cursor``; meant for those not drawn yet.

        Raises LookupError for a cursor so old that its plan has been forgotten.
        """
        with self._lock:
            for effective, plan in reversed(self._entries):
                if effective <= cursor:
                    return plan
        raise LookupError(f"the plan at cursor {cursor} is forgotten: draws stand at {self.drawn}")

    @contextmanager
    def agreement(self) -> Iterator[PlanSchedule]:
        """Hold the schedule: no batch is drawn until the block ends."""
        with self._lock:
            yield self

    def install(self, plan: Plan, effective: Cursor) -> None:
        """Let ``plan`` apply from ``effective`` on: the maximum of ``drawn`` over all ranks.

        Raises ConfigurationError when this rank has already drawn beyond ``effective``, or when
        ``effective`` lies before that of an earlier plan.
        """
        with self._lock:
            last = self._entries[-1][0]
            if effective < self._drawn or effective < last:
                raise ConfigurationError(
                    f"plan {plan.version} cannot apply from {effective}: this rank has drawn up to "
                    f"{self._drawn} and the plan before applies from {last}; take the maximum of "
                    "`drawn` over all ranks while every rank holds its schedule"
                )
            if effective == last:
                self._entries.pop()
            self._entries.append((effective, plan))
            self._forget()

    def begin_pass(self) -> int:
        """Start the next pass over the data and return its number; older passes end here."""
        with self._lock:
            number = self._passes
            self._passes += 1
            self._drawn = (number, 0)
            self._forget()
            return number

    def draw(self, cursor: Cursor) -> Plan:
        """Mark ``cursor`` as drawn and return the plan that applies to it.

        Raises BatchAccountingError when ``cursor`` is not the next draw, as happens when an older
        iterator is continued after a newer one was started.
        """
        with self._lock:
            if cursor != self._drawn:
                raise BatchAccountingError(stale_pass(cursor[0], self._drawn[0]))
            plan = self.plan_at(cursor)
            self._drawn = (cursor[0], cursor[1] + 1)
            self._forget()
            return plan

    def _forget(self) -> None:
        while len(self._entries) > 1 and self._entries[1][0] <= self._drawn:
            del self._entries[0]

    # A data set that refers to its loader travels to worker processes; a lock cannot.
    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {
                **{name: value for name, value in self.__dict__.items() if name != "_lock"},
                "_entries": list(self._entries),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


def stale_pass(number: int, current: int) -> str:
    """The message for an iterator of pass ``number`` that is continued in pass ``current``."""
    return (
        f"an iterator of pass {number} was continued after pass {current} over the same loader had "
        "begun: ranks count their batches pass by pass, so only the newest iterator may be used; "
        "make a second loader for a second, interleaved iteration"
    )
