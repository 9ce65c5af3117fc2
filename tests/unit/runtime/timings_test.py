"""The account of a step, on a clock that is moved by hand and may lag behind."""

from __future__ import annotations

import pytest
import torch

from hvd_hetero.balance.timing import StepTiming
from hvd_hetero.runtime.marks import CudaMarks, HostMarks, marks_for
from hvd_hetero.runtime.timings import StepTimer


class LaggingMarks:
    """A device: its moments pass ``lag_seconds`` after the host has issued the work."""

    def __init__(self, lag_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.lag_seconds = lag_seconds

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return mark + self.lag_seconds <= self.now

    def seconds(self, first: float, last: float) -> float:
        assert self.passed(first), "asked before the moment had passed"
        assert self.passed(last), "asked before the moment had passed"
        return last - first


def timer_on(marks: LaggingMarks) -> StepTimer:
    timer = StepTimer()
    timer.use(marks)
    timer.exchange_ended(8)  # where the first step begins
    return timer


def one_step(timer: StepTimer, marks: LaggingMarks, batch: int = 8) -> list[StepTiming]:
    """Load 1 s, wait 16 s for ranks, forward 2 s, backward 4 s with 0.5 s of compression in it and
    0.25 s behind it, and 8 s until the exchange has ended."""
    with timer.loading():
        marks.now += 1.0
    with timer.waiting():
        marks.now += 16.0
    marks.now += 2.0
    timer.backward_begins()
    marks.now += 3.0
    timer.bucket_ready(0)
    with timer.compressing():
        marks.now += 0.5
    timer.bucket_ready(0)
    timer.bucket_ready(1)
    marks.now += 1.0
    timer.backward_ended()
    timer.synchronize_begins()
    timer.bucket_ready(2)
    with timer.compressing():
        marks.now += 0.25
    marks.now += 8.0
    return timer.exchange_ended(batch)


def test_the_parts_of_a_step() -> None:
    marks = LaggingMarks()
    timer = timer_on(marks)
    for _ in range(3):
        (timing,) = one_step(timer, marks)
        assert timing == StepTiming(
            batch=8,
            ready_seconds=6.0,
            done_seconds=7.0,
            end_seconds=15.75,
            compress_seconds=0.75,
            input_seconds=1.0,
            backward_seconds=4.0,
            bucket_seconds=(6.0, 6.0, 7.0),
        )


def test_a_wait_within_backward_takes_nothing_from_before() -> None:
    """Layers that talk across ranks wait between two buckets."""
    marks = LaggingMarks()
    timer = timer_on(marks)
    marks.now += 1.0
    timer.backward_begins()
    marks.now += 2.0
    timer.bucket_ready(0)
    with timer.waiting():
        marks.now += 16.0
    marks.now += 4.0
    timer.bucket_ready(1)
    timer.backward_ended()
    (timing,) = timer.exchange_ended(8)
    assert timing.bucket_seconds == (3.0, 7.0)
    assert (timing.done_seconds, timing.backward_seconds, timing.end_seconds) == (7.0, 6.0, 7.0)


def test_passes_add_up() -> None:
    marks = LaggingMarks()
    timer = timer_on(marks)
    for forward, backward in ((1.0, 2.0), (0.5, 4.0)):
        marks.now += forward
        timer.backward_begins()
        marks.now += backward
        timer.backward_ended()
    (timing,) = timer.exchange_ended(8)
    assert (timing.done_seconds, timing.backward_seconds) == (7.5, 6.0)
    assert timing.ready_seconds == 7.5  # no bucket was ready before


def test_a_device_behind_the_host_is_never_waited_for() -> None:
    """Each step is reported once, in order, when its moments have passed."""
    marks = LaggingMarks(lag_seconds=60.0)
    timer = timer_on(marks)
    reported = [timing.batch for batch in range(1, 7) for timing in one_step(timer, marks, batch)]
    assert reported == [1, 2, 3, 4]
    marks.lag_seconds = 0.0
    assert [timing.batch for timing in one_step(timer, marks, 7)] == [5, 6, 7]


def test_untypical_steps_are_left_out() -> None:
    marks = LaggingMarks()
    timer = StepTimer()
    timer.use(marks)
    assert one_step(timer, marks) == []  # nobody knows when the first step began
    timer.discard()
    assert one_step(timer, marks) == []
    assert one_step(timer, marks, batch=0) == []
    assert len(one_step(timer, marks)) == 1


def test_backward_without_a_hook_ends_where_the_wait_begins() -> None:
    marks = LaggingMarks()
    timer = timer_on(marks)
    marks.now += 2.0
    timer.synchronize_begins()
    marks.now += 1.0
    (timing,) = timer.exchange_ended(8)
    assert (timing.done_seconds, timing.end_seconds, timing.backward_seconds) == (2.0, 3.0, 0.0)


def test_an_error_in_the_loader_leaves_the_account_in_order() -> None:
    marks = LaggingMarks()
    timer = timer_on(marks)
    with pytest.raises(StopIteration), timer.loading():
        marks.now += 1.0
        raise StopIteration
    (timing,) = timer.exchange_ended(8)
    assert timing.input_seconds == 1.0


def test_the_account_has_its_own_cost() -> None:
    timer = StepTimer()
    timer.exchange_ended(8)
    before = timer.own_seconds
    timer.backward_begins()
    timer.exchange_ended(8)
    assert 0.0 < timer.own_seconds - before < 0.1


def test_marks_by_device() -> None:
    marks = marks_for(torch.device("cpu"))
    assert isinstance(marks, HostMarks)
    first = marks.mark()
    assert marks.passed(first)
    assert marks.seconds(first, marks.mark()) >= 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_events_tell_the_device_s_seconds() -> None:
    device = torch.device("cuda")
    marks = marks_for(device)
    assert isinstance(marks, CudaMarks)
    first = marks.mark()
    torch.cuda._sleep(100_000_000)
    last = marks.mark()
    assert not marks.passed(last)
    torch.cuda.synchronize()
    assert marks.passed(last)
    assert marks.seconds(first, last) > 0.01
