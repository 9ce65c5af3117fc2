"""Step timing of one rank that does not count waiting as work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvd_hetero.balance.timing import StepTiming
from hvd_hetero.runtime.clock import now_seconds
from hvd_hetero.runtime.marks import HostMarks, Marks

_MOST_OPEN_STEPS = 64  # closed by the host and not yet by the device; beyond, the oldest is dropped
_CALIBRATION_MARKS = 100

Span = tuple[Any, Any]


@dataclass
class _Step:
    """Moments of one step; those of spans are (first, last)."""

    start: Any = None
    buckets: dict[int, Any] = field(default_factory=dict)
    backward_begin: Any = None
    backward_end: Any = None
    end: Any = None
    backward: list[Span] = field(default_factory=list)  # of passes before the last
    inputs: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    compress: list[Span] = field(default_factory=list)
    batch: int = 0


class StepTimer:
    """Durations of a step, all from the end of the previous exchange on this rank.

    Blocking agreements between two exchanges are taken out; what the exchange itself makes this
    rank wait lies behind ``backward_ended`` and so is no part of its own seconds. Nothing here
    waits for a device: a step whose moments have not passed is reported with a later one.

    own_seconds: what keeping this account has cost so far.
    """

    def __init__(self) -> None:
        self._marks: Marks = HostMarks()
        self._step = _Step()
        self._discard = False
        self._closed: deque[_Step] = deque(maxlen=_MOST_OPEN_STEPS)
        self.own_seconds = 0.0
        self._mark_seconds = 0.0
        self.use(self._marks)

    def use(self, marks: Marks) -> None:
        """Take moments from ``marks`` from now on; between two steps."""
        self._marks = marks
        self._step, self._discard = _Step(), False
        self._closed.clear()
        begin = now_seconds()
        for _ in range(_CALIBRATION_MARKS):
            marks.mark()
        self._mark_seconds = (now_seconds() - begin) / _CALIBRATION_MARKS

    def waiting(self) -> AbstractContextManager[None]:
        """Mark a wait for other ranks that is not the gradient exchange."""
        return self._marked("waits")

    def loading(self) -> AbstractContextManager[None]:
        """Mark a wait for the input of a step."""
        return self._marked("inputs")

    def compressing(self) -> AbstractContextManager[None]:
        """Mark the work of compression, between two moments of backward or after it."""
        return self._marked("compress")

    @contextmanager
    def _marked(self, kind: str) -> Iterator[None]:
        first = self._mark()
        try:
            yield
        finally:
            getattr(self._step, kind).append((first, self._mark()))

    def backward_begins(self) -> None:
        """The first gradient of a backward pass is there."""
        step = self._step
        if step.backward_begin is not None and step.backward_end is not None:
            step.backward.append((step.backward_begin, step.backward_end))
        step.backward_begin, step.backward_end = self._mark(), None

    def bucket_ready(self, index: int) -> None:
        """A bucket of gradients is ready, or the first gradient of one that is sent piece by
        piece; only the first time in a step counts. index: in the order of launch."""
        if index not in self._step.buckets:
            self._step.buckets[index] = self._mark()

    def backward_ended(self) -> None:
        """A backward pass ended; only the last of a step counts."""
        self._step.backward_end = self._mark()

    def synchronize_begins(self) -> None:
        """The wait for the exchange begins; ends backward where no hook has seen it end."""
        if self._step.backward_end is None:
            self._step.backward_end = self._mark()

    def discard(self) -> None:
        """The step under way is not typical (start of an epoch, new plan, thrown away)."""
        self._discard = True

    def exchange_ended(self, local_batch: int) -> list[StepTiming]:
        """Close the step; return the timings that are known now, oldest first.

        local_batch: samples of this rank in it, 0 to leave it out.
        """
        end = self._mark()
        begin = now_seconds()
        step, self._step = self._step, _Step(start=end)
        discarded, self._discard = self._discard, False
        if step.start is not None and not discarded and local_batch > 0:
            step.end, step.batch = end, local_batch
            self._closed.append(step)
        timings = []
        while self._closed and self._marks.passed(self._closed[0].end):
            timings.append(self._timing(self._closed.popleft()))
        self.own_seconds += now_seconds() - begin
        return timings

    def _mark(self) -> Any:
        self.own_seconds += self._mark_seconds
        return self._marks.mark()

    def _timing(self, step: _Step) -> StepTiming:
        def span(first: Any, last: Any) -> float:
            return max(self._marks.seconds(first, last), 0.0)

        def total(spans: list[Span]) -> float:
            return sum(span(first, last) for first, last in spans)

        backward_end = step.end if step.backward_end is None else step.backward_end

        others = [(span(*pair), pair[1]) for pair in (*step.waits, *step.compress)]

        def own(moment: Any) -> float:
            """Seconds of own work until then: without waits and compression that lie before."""
            seconds = span(step.start, moment)
            for taken, end in others:
                if self._marks.seconds(end, moment) >= 0.0:
                    seconds -= taken
            return max(seconds, 0.0)

        done = own(backward_end)
        buckets = tuple(min(own(step.buckets[index]), done) for index in sorted(step.buckets))
        backward = total(step.backward)
        if step.backward_begin is not None:
            backward += max(done - own(step.backward_begin), 0.0)
        inputs = min(total(step.inputs), done)
        return StepTiming(
            batch=step.batch,
            ready_seconds=buckets[0] if buckets else done,
            done_seconds=done,
            end_seconds=max(span(step.start, step.end) - total(step.waits), 0.0),
            compress_seconds=total(step.compress),
            input_seconds=inputs,
            backward_seconds=min(backward, done - inputs),
            bucket_seconds=buckets,
        )
