"""Which batch a backward pass is taken to belong to."""

from __future__ import annotations

import logging

import pytest

from hvd_hetero.data.partition import LocalBatch
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.runtime.batches import BatchBook
from hvd_hetero.runtime.timings import StepTimer
from hvd_hetero.testing.threads import ThreadCollectives, ThreadWorld


def ticket(samples: int) -> LocalBatch:
    return LocalBatch(epoch_pass=0, step=0, start=0, stop=samples, global_samples=2 * samples)


def book(collectives: ThreadCollectives) -> BatchBook:
    return BatchBook(collectives, "book", 10.0, StepTimer())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if "second batch was drawn" in one.message]


@pytest.mark.parametrize("stated", [False, True])
def test_a_loop_that_fetches_ahead_is_told_once(
    stated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(collectives: ThreadCollectives) -> None:
        batches = book(collectives)
        batches.yielded(None)
        batches.yielded(ticket(4))
        for _ in range(3):
            batches.yielded(ticket(5))
            if stated:
                batches.state(4, None)
            batches.pass_begins()
            batches.step_done()

    with caplog.at_level(logging.WARNING, logger="hvd_hetero"):
        ThreadWorld(1).run(loop)
    assert len(warnings(caplog)) == (0 if stated else 1)


def test_usual_loops_and_evaluations_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def loop(collectives: ThreadCollectives) -> None:
        batches = book(collectives)
        for trains in (True, False, True):  # in between all batches are only looked at
            batches.yielded(None)
            for _ in range(3):
                batches.yielded(ticket(4))
                if trains:
                    batches.pass_begins()
                    batches.pass_begins()  # of a second loss
                    batches.step_done()
            batches.yielded(None)

    with caplog.at_level(logging.WARNING, logger="hvd_hetero"):
        ThreadWorld(1).run(loop)
    assert warnings(caplog) == []


@pytest.mark.parametrize("samples", [0, -1, float("nan"), None, "three"])
def test_a_wrong_number_on_one_rank_is_told_on_all(samples: object) -> None:
    """At once, and not when the others have waited for as long as they may."""

    def state(collectives: ThreadCollectives) -> str:
        batches = book(collectives)
        with pytest.raises(ConfigurationError) as raised:
            batches.state(samples if collectives.rank == 1 else 4, None)
        return str(raised.value)

    first, second = ThreadWorld(2).run(state)
    assert first == "rank 0: set_batch failed on another rank, see its error"
    assert f"samples={samples!r}" in second
