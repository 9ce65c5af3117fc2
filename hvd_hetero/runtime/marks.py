"""Moments in the work of a rank, on the host's clock or in the stream of its device."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hvd_hetero.runtime.clock import now_seconds


class Marks(Protocol):
    """Moments whose distances are known at once, or a little later, and never waited for."""

    def mark(self) -> Any:
        """Return the moment up to which the work issued so far is done."""

    def passed(self, mark: Any) -> bool:
        """Whether the moment lies in the past, so that its distances are known."""

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds from one moment to another; both have passed."""


class HostMarks:
    """Moments of the host's clock, for work that is done when the call returns."""

    def mark(self) -> float:
        return now_seconds()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


class CudaMarks:
    """Events in the current stream of a CUDA device, which works behind the host.

    An event in an idle stream passes when it is recorded, so what the host makes the device wait
    for (a loader, an agreement) shows between two of them as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1e3


def marks_for(device: torch.device) -> Marks:
    """Return the moments that tell when work on ``device`` is done."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()
