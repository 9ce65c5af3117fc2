"""When the exchange of a bucket has a time, and which."""

from __future__ import annotations

import pytest

from hvd_hetero.runtime import exchange_clock
from hvd_hetero.runtime.exchange_clock import ExchangeClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(exchange_clock, "now_seconds", lambda: time[0])
    return time


def test_one_after_the_other(now: list[float]) -> None:
    """Launched together, each takes from the end of the one before."""
    clock = ExchangeClock()
    clock.launched(0, clear=True)
    now[0] = 1.0
    clock.launched(1, clear=False)
    now[0] = 3.0
    clock.finished(5, 0, "dense", 0, waited=True)
    now[0] = 4.5
    clock.finished(5, 1, "allgather", 7, waited=True)
    assert [one.to_list() for one in clock.take()] == [
        [5, 0, "dense", 0, 3.0],
        [5, 1, "allgather", 7, 1.5],
    ]
    assert clock.take() == []


def test_an_idle_network_between(now: list[float]) -> None:
    clock = ExchangeClock()
    clock.launched(0, clear=True)
    now[0] = 2.0
    clock.launched(1, clear=True)
    clock.finished(1, 0, "dense", 0, waited=False)  # ended some time ago
    now[0] = 2.5
    clock.finished(1, 1, "dense", 0, waited=True)
    assert [one.to_list() for one in clock.take()] == [[1, 1, "dense", 0, 0.5]]


def test_what_was_not_seen_has_no_time(now: list[float]) -> None:
    clock = ExchangeClock()
    clock.launched(0, clear=True)
    clock.launched(1, clear=False)
    now[0] = 2.0
    clock.finished(1, 0, "dense", 0, waited=False)
    now[0] = 3.0
    clock.finished(1, 1, "dense", 0, waited=True)  # begun when the other ended: unknown
    clock.end_step()
    clock.finished(2, 0, "dense", 0, waited=True)  # never launched
    assert clock.take() == []


def test_memory_is_bounded(now: list[float]) -> None:
    clock = ExchangeClock()
    for step in range(1000):
        clock.launched(0, clear=True)
        clock.finished(step, 0, "dense", 0, waited=True)
    kept = clock.take()
    assert len(kept) == 128 and kept[-1].step == 999
