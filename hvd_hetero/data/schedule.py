"""Which plan applies to which draw, while data loader workers run ahead of training.

Every rank draws global batches in the same order, but workers prefetch, so at a given moment the
ranks have drawn differently far. A new plan may only apply to batches that no rank has drawn yet:

1. every rank holds its schedule (``with schedule.agreement()``), so that nobody draws;
2. the ranks exchange ``schedule.drawn`` and take the maximum;
3. every rank calls ``schedule.install(plan, maximum)`` and lets go.

A plan therefore takes effect late by the number of batches in the queues of the rank that ran
ahead most: at most ``num_workers * prefetch_factor`` with the default loader.

In a replay the plans to come are known from the start (``foresee``). Draws follow them, however far
workers run ahead; as ``latest`` a plan counts once it is installed, as in the recorded run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
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
        self._foreseen: list[tuple[Cursor, Plan]] = []
        self._drawn: Cursor = (0, 0)
        self._passes = 0
        self._begun = False

    @property
    def drawn(self) -> Cursor:
        """Cursor of the next draw: all before it is drawn and cannot change any more."""
        with self._lock:
            return self._drawn

    @property
    def passes(self) -> int:
        """Passes begun so far, those of the jobs before this one included."""
        with self._lock:
            return self._passes

    @property
    def begun(self) -> bool:
        """Whether a pass was begun here."""
        with self._lock:
            return self._begun

    @property
    def latest(self) -> Plan:
        """The plan installed last, which may not have taken effect yet."""
        with self._lock:
            return self._entries[-1][1]

    @property
    def entries(self) -> list[tuple[Cursor, Plan]]:
        """Installed plans with their cursors: the one the next draw is under, and all later."""
        with self._lock:
            return list(self._entries)

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
        ``effective`` lies before that of an earlier plan; not for the plan that was foreseen next.
        """
        with self._lock:
            last = self._entries[-1][0]
            if self._foreseen[:1] == [(effective, plan)]:
                del self._foreseen[0]
            elif effective < self._drawn or effective < last:
                raise ConfigurationError(
                    f"plan {plan.version} cannot apply from {effective}: this rank has drawn up to "
                    f"{self._drawn} and the plan before applies from {last}; take the maximum of "
                    "`drawn` over all ranks while every rank holds its schedule"
                )
            if effective == last:
                self._entries.pop()
            self._entries.append((effective, plan))
            self._forget()

    def foresee(self, plans: Sequence[tuple[Cursor, Plan]]) -> None:
        """Let draws follow ``plans``, in the order in which they will be installed.

        Plans that apply from the first draw on were made where nothing is drawn by a sampler: they
        count once they are installed.

        Raises ConfigurationError when this rank has drawn a batch to which one of them applies, or
        they are not in the order of their cursors.
        """
        with self._lock:
            cursors = [self._entries[-1][0], *(effective for effective, _ in plans)]
            if any(later < earlier for earlier, later in itertools.pairwise(cursors)):
                raise ConfigurationError(f"plans from {cursors}: give them in the order of these")
            missed = [one for one in cursors[1:] if (0, 0) < one < self._drawn]
            if missed:
                raise ConfigurationError(
                    f"a plan that applies from {missed[0]} is foreseen, but this rank has drawn up "
                    f"to {self._drawn}: draw no batch before"
                )
            self._foreseen = list(plans)

    def go_on_from(self, cursor: Cursor) -> None:
        """Count on from ``cursor``, the next draw of an earlier job; before the first pass.

        Raises ConfigurationError when a pass has begun.
        """
        with self._lock:
            if self._begun:
                raise ConfigurationError(
                    "a saved position was loaded after batches had been drawn: load it before the "
                    "first pass over the loader"
                )
            self._passes, self._drawn = cursor[0], cursor

    def begin_pass(self, *, goes_on: bool = False) -> Cursor:
        """Start the next pass over the data and return its first cursor; older passes end here.

        goes_on: it is the pass in which an earlier job has come as far as ``go_on_from`` said.
        """
        with self._lock:
            left_in_mid_pass = not self._begun and self._drawn[1] > 0
            number = self._passes + int(left_in_mid_pass and not goes_on)
            step = self._drawn[1] if left_in_mid_pass and goes_on else 0
            self._passes, self._begun = number + 1, True
            self._drawn = (number, step)
            self._forget()
            return self._drawn

    def draw(self, cursor: Cursor) -> Plan:
        """Mark ``cursor`` as drawn and return the plan that applies to it.

        Raises BatchAccountingError when ``cursor`` is not the next draw, as happens when an older
        iterator is continued after a newer one was started.
        """
        with self._lock:
            if cursor != self._drawn:
                raise BatchAccountingError(stale_pass(cursor[0], self._drawn[0]))
            plan = self.plan_at(cursor)
            for effective, foreseen in self._foreseen:
                if (0, 0) < effective <= cursor:
                    plan = foreseen
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
