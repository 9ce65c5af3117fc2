"""Reading the clock, and waits that end."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvd_hetero.errors import ExchangeTimeoutError

_SHORTEST_SLEEP_SECONDS = 20e-6
_LONGEST_SLEEP_SECONDS = 1e-3


def now_seconds() -> float:
    """Seconds of a monotonic clock; only differences on one rank mean anything."""
    return time.perf_counter()


def wait_until(
    done: Callable[[], bool], timeout_seconds: float, describe: Callable[[], str]
) -> None:
    """Return once ``done()`` is True.

    Raises ExchangeTimeoutError with ``describe()`` after ``timeout_seconds``.
    """
    start = now_seconds()
    sleep_seconds = _SHORTEST_SLEEP_SECONDS
    while not done():
        if now_seconds() - start > timeout_seconds:
            raise ExchangeTimeoutError(
                f"{describe()}: not finished after {timeout_seconds:g} s "
                "(exchange_timeout_seconds). Another rank did not take part: look for a rank that "
                "raised, skipped a step or ran out of batches; a rank that is only slow needs a "
                "larger exchange_timeout_seconds"
            )
        time.sleep(sleep_seconds)
        sleep_seconds = min(sleep_seconds * 1.5, _LONGEST_SLEEP_SECONDS)
