"""How large a local batch may become before the device's memory is full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_hetero.balance.bounds import Bounds
from hvd_hetero.errors import ConfigurationError, check_int

USABLE_SHARE = 0.9  # of the memory; the rest is for what fragments and for what peaks rarely
GROWTH = 1.5  # of the largest batch that has run, per plan: the line may be wrong further out


@dataclass(frozen=True)
class MemoryUse:
    """Of one rank's device: the most this process ever had, and what it could have, in bytes."""

    peak_bytes: int
    limit_bytes: int

    def __post_init__(self) -> None:
        check_int("peak_bytes", self.peak_bytes, minimum=0)
        check_int("limit_bytes", self.limit_bytes, minimum=1)


@dataclass(frozen=True)
class MemoryFit:
    """Peak bytes m_0 + m_1 b by the largest batch b that had run; starts empty, for no limit.

    smaller, largest: (batch, peak bytes) before the largest batch grew last, and now.
    """

    limit_bytes: int = 0
    smaller: tuple[int, int] = (0, 0)
    largest: tuple[int, int] = (0, 0)

    def observe(self, batch: int, use: MemoryUse | None) -> MemoryFit:
        """Return the fit after steps with ``batch`` samples; ``use`` None: no limit is known."""
        if use is None:
            return self
        before, peak = self.largest
        if batch > before:
            smaller = self.largest if use.peak_bytes >= peak else self.smaller
            largest = (batch, max(peak, use.peak_bytes))
            return MemoryFit(use.limit_bytes, smaller, largest)
        return replace(
            self, limit_bytes=use.limit_bytes, largest=(before, max(peak, use.peak_bytes))
        )

    def largest_batch(self) -> int | None:
        """Return the largest batch the next plan may have; None when no limit is known.

        What has run may run again. Without a second size the whole peak is taken to grow with the
        batch, which errs to the safe side.
        """
        batch, peak = self.largest
        if not batch or not self.limit_bytes:
            return None
        grown = max(batch + 1, math.floor(GROWTH * batch))
        low, low_peak = self.smaller
        per_sample_bytes = (peak - low_peak) / (batch - low)
        room_bytes = USABLE_SHARE * self.limit_bytes - peak
        if room_bytes <= 0:
            return batch
        if per_sample_bytes <= 0:
            return grown
        return max(batch, min(grown, batch + math.floor(room_bytes / per_sample_bytes)))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryFit:
        """Build a fit from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            return cls(int(data["limit_bytes"]), tuple(data["smaller"]), tuple(data["largest"]))
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"memory fit={data!r}: not a saved fit ({error}); "
                "pass the dict MemoryFit.to_dict() gave"
            ) from error


def within_memory(bounds: Bounds, fits: Sequence[MemoryFit]) -> Bounds:
    """Return ``bounds`` with each maximum lowered to what the rank's memory allows.

    A minimum stays, also where it does not fit the memory: it was asked for.
    """
    caps = [fit.largest_batch() for fit in fits]
    upper = tuple(
        high if cap is None else max(low, min(high, cap))
        for low, high, cap in zip(bounds.lower, bounds.upper, caps, strict=True)
    )
    return replace(bounds, upper=upper)
