"""When the exchange of a bucket has a time, and which."""

from __future__ import annotations

import pytest

from hvd_hetero.planning.refine import Exchanged
from hvd_hetero.runtime import exchange_clock
from hvd_hetero.runtime.exchange_clock import ExchangeClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(exchange_clock, "now_seconds", lambda: time[0])
    return time


def taken(clock: ExchangeClock) -> list[tuple[int, tuple[Exchanged, ...], float]]:
    return [(one.step, one.exchanges, one.seconds) for one in clock.take()]


def test_one_after_the_other(now: list[float]) -> None:
    """Launched together, each takes from the end of the one before."""
    clock = ExchangeClock()
    clock.launched((0, "dense", 0), clear=True)
    now[0] = 1.0
    clock.launched((1, "allgather", 7), clear=False)
    now[0] = 3.0
    clock.ended(5, 0, [])
    now[0] = 4.5
    clock.ended(5, 1, [])
    assert taken(clock) == [(5, ((0, "dense", 0),), 3.0), (5, ((1, "allgather", 7),), 1.5)]
    assert clock.take() == []


def test_fused(now: list[float]) -> None:
    """What ended at one moment has one time, and is not asked for again."""
    clock = ExchangeClock()
    clock.launched((0, "dense", 0), clear=True)
    now[0] = 1.0
    clock.launched((1, "dense", 0), clear=False)
    clock.launched((2, "dense", 0), clear=False)
    now[0] = 3.0
    clock.ended(5, 0, [1])
    clock.had_ended(1)
    now[0] = 4.0
    clock.ended(5, 2, [])
    assert taken(clock) == [
        (5, ((0, "dense", 0), (1, "dense", 0)), 3.0),
        (5, ((2, "dense", 0),), 1.0),
    ]


def test_an_idle_network_between(now: list[float]) -> None:
    clock = ExchangeClock()
    clock.launched((0, "dense", 0), clear=True)
    now[0] = 2.0
    clock.launched((1, "dense", 0), clear=True)
    clock.had_ended(0)
    now[0] = 2.5
    clock.ended(1, 1, [])
    assert taken(clock) == [(1, ((1, "dense", 0),), 0.5)]


def test_ended_before_anybody_looked(now: list[float]) -> None:
    """The wait for the first shows two to have ended, of which the second began alone."""
    clock = ExchangeClock()
    clock.launched((0, "dense", 0), clear=True)
    now[0] = 2.0
    clock.launched((1, "dense", 0), clear=True)
    clock.ended(1, 0, [1])
    assert clock.take() == []


def test_what_was_not_seen_has_no_time(now: list[float]) -> None:
    clock = ExchangeClock()
    clock.launched((0, "dense", 0), clear=True)
    clock.launched((1, "dense", 0), clear=False)
    now[0] = 2.0
    clock.had_ended(0)
    now[0] = 3.0
    clock.ended(1, 1, [])  # begun when the other ended: unknown
    clock.end_step()
    clock.ended(2, 0, [])  # never launched
    assert clock.take() == []


def test_memory_is_bounded(now: list[float]) -> None:
    clock = ExchangeClock()
    for step in range(1000):
        clock.launched((0, "dense", 0), clear=True)
        clock.ended(step, 0, [])
    kept = clock.take()
    assert len(kept) == 128 and kept[-1].step == 999
