"""The last agreement of a run: a rank that ends right after it takes MPI with it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hvd_hetero.errors import ExchangeFailedError
from hvd_hetero.runtime.agreement import MpiChannel

MESSAGE = json.dumps({"decision": 7}).encode() + b"\n"


class Request:
    def __init__(self, done: bool) -> None:
        self._done = done

    def Test(self) -> bool:
        return self._done


class RankOneOfTwo:
    """What rank 1 sees when rank 0 ends after its own part of the agreement's ``last`` call."""

    def __init__(self, last: str) -> None:
        self.last = last
        self.running = True

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 2

    def _request(self, call: str) -> Request:
        self.running = self.running and call != self.last
        return Request(call != self.last)

    def Ibcast(self, buffer: Any, root: int) -> Request:
        if buffer.dtype == np.int64:
            buffer[0] = len(MESSAGE)
            return Request(True)
        buffer[:] = np.frombuffer(MESSAGE, dtype=np.uint8)
        return self._request("data")

    def Ibarrier(self) -> Request:
        return self._request("parting")


def test_who_has_its_message_goes_on_without_an_error() -> None:
    """Rank 0 has ended while rank 1 waited for the others to have theirs: nothing is missing."""
    world = RankOneOfTwo(last="parting")
    channel = MpiChannel(world, "run", 5.0, lambda: world.running)
    assert channel.broadcast(None, "decision") == {"decision": 7}


def test_who_lacks_its_message_gets_an_error() -> None:
    """Rank 0 has ended before rank 1 had its message."""
    world = RankOneOfTwo(last="data")
    channel = MpiChannel(world, "run", 5.0, lambda: world.running)
    with pytest.raises(ExchangeFailedError, match="another rank has ended"):
        channel.broadcast(None, "decision")
