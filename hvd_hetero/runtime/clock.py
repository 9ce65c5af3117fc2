"""Reading the clock, and waits that end."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from hvd_hetero.errors import ExchangeTimeoutError

# Horovod's own waits offer the core to others again and again, and never sleep: who wakes from a
# sleep is late. So do ours at first; a long wait, for a slow rank, is to leave the core alone.
_YIELDING_SECONDS = 20e-3
_SLEEP_SECONDS = 1e-3


# Python's own os.sched_yield keeps its lock, and with it other threads, as those of data loaders.
_offer_core: Callable[[], object] = ctypes.CDLL(None).sched_yield


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
    while not done():
        waited_seconds = now_seconds() - start
        if waited_seconds > timeout_seconds:
            raise ExchangeTimeoutError(
                f"{describe()}: not finished after {timeout_seconds:g} s "
                "(exchange_timeout_seconds). Another rank did not take part: look for a rank that "
                "raised, skipped a step or ran out of batches; a rank that is only slow needs a "
                "larger exchange_timeout_seconds"
            )
        if waited_seconds < _YIELDING_SECONDS:
            _offer_core()
        else:
            time.sleep(_SLEEP_SECONDS)
