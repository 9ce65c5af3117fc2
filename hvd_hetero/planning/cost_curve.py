"""Seconds of one collective by the bytes of its message: measured at start-up, refined by steps."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvd_hetero.errors import ConfigurationError, check_float

# Sizes within this factor are one size; how much of a correction is the newest observation's; over
# which factor of size it fades; and its bounds.
_SAME_SIZE = 1.25
_NEW_SHARE = 0.5
_REACH = 32.0
_LARGEST_CORRECTION = 64.0
# Beyond the last knot its slope counts within this factor of that from the first knot to the last:
# one message delayed by chance must not make bytes free, nor ten times as dear.
_SLOPE_BOUND = 2.0


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a collective by message bytes: straight lines between measured knots.

    bytes: ascending, at least one. seconds: as many; made non-decreasing when built, as a larger
    message that was measured faster is noise. Below the first knot the time is the first knot's
    (latency does not shrink with the message), beyond the last one the last slope continues, but
    at least half and at most twice that of all knots.

    corrections: (bytes, factor), ascending: by what steps show these lines to be wrong. Between
    two of them, and to 1 at 32 times more or less bytes than were seen, the logarithm of the
    factor goes straight in that of the bytes. Where bytes take more than latency, the last factor
    holds for all more bytes too.

    Raises ConfigurationError for no knots, unequal lengths, bytes that do not ascend, and numbers
    that are negative or not finite.
    """

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    corrections: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.bytes or len(self.bytes) != len(self.seconds):
            raise ConfigurationError(
                f"{len(self.bytes)} sizes and {len(self.seconds)} times: give a time for each size"
            )
        sizes: list[float] = []
        times: list[float] = []
        for size, time in zip(self.bytes, self.seconds, strict=True):
            sizes.append(check_float("bytes", size, minimum=0.0))
            time = check_float("seconds", time, minimum=0.0)
            times.append(max(time, times[-1]) if times else time)
        corrections = tuple(
            (
                check_float("corrected bytes", size, minimum=0.0, exclusive_minimum=True),
                check_float("correction", factor, minimum=0.0, exclusive_minimum=True),
            )
            for size, factor in self.corrections
        )
        for ascending in (sizes, [size for size, _ in corrections]):
            if any(a >= b for a, b in itertools.pairwise(ascending)):
                raise ConfigurationError(f"bytes={tuple(ascending)}: must ascend")
        object.__setattr__(self, "bytes", tuple(sizes))
        object.__setattr__(self, "seconds", tuple(times))
        object.__setattr__(self, "corrections", corrections)

    def seconds_for(self, bytes: float) -> float:
        """Return the predicted seconds for a message of ``bytes``."""
        return self._uncorrected(bytes) * self._correction(bytes)

    def refined(self, bytes: float, seconds: float) -> CostCurve:
        """Return the curve after a message of ``bytes`` was seen to take ``seconds``.

        The first observation of a size counts fully, later ones half; sizes within a quarter of
        each other are one. Raises ConfigurationError for numbers that are negative or not finite.
        """
        bytes = max(check_float("bytes", bytes, minimum=0.0), 1.0)
        seconds = check_float("seconds", seconds, minimum=0.0)
        expected = self._uncorrected(bytes)
        if expected <= 0.0 or seconds <= 0.0:
            return self
        factor = min(max(seconds / expected, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
        kept: list[tuple[float, float]] = []
        same: list[float] = []
        for size, known in self.corrections:
            if max(size, bytes) <= _SAME_SIZE * min(size, bytes):
                same.append(math.log(known))
            else:
                kept.append((size, known))
        if same:
            before = sum(same) / len(same)
            factor = math.exp(before + _NEW_SHARE * (math.log(factor) - before))
        return replace(self, corrections=tuple(sorted([*kept, (bytes, factor)])))

    def reshaped(self, latency_factor: float, byte_factor: float) -> CostCurve:
        """Return the curve with its latency, and what comes on top of it, scaled apart."""
        latency = self.seconds[0]
        times = (latency * latency_factor + (t - latency) * byte_factor for t in self.seconds)
        return replace(self, seconds=tuple(times))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "bytes": list(self.bytes),
            "seconds": list(self.seconds),
            "corrections": [list(one) for one in self.corrections],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostCurve:
        """Build a curve from ``to_dict``'s result. Raises KeyError or TypeError if it is none."""
        corrections = tuple((size, factor) for size, factor in data.get("corrections", ()))
        return cls(tuple(data["bytes"]), tuple(data["seconds"]), corrections)

    def _uncorrected(self, bytes: float) -> float:
        sizes, times = self.bytes, self.seconds
        if bytes <= sizes[0] or len(sizes) == 1:
            return times[0]
        if bytes >= sizes[-1]:
            overall = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            slope = min(max(slope, overall / _SLOPE_BOUND), overall * _SLOPE_BOUND)
            return times[-1] + slope * (bytes - sizes[-1])
        right = bisect_right(sizes, bytes)
        left = right - 1
        slope = (times[right] - times[left]) / (sizes[right] - sizes[left])
        return times[left] + slope * (bytes - sizes[left])

    def _correction(self, bytes: float) -> float:
        if not self.corrections:
            return 1.0
        bytes = max(bytes, 1.0)
        (first, _), (last, at_last) = self.corrections[0], self.corrections[-1]
        if bytes >= last and self._uncorrected(last) > 2 * self.seconds[0]:
            return at_last
        points = [(first / _REACH, 1.0), *self.corrections, (last * _REACH, 1.0)]
        if not points[0][0] < bytes < points[-1][0]:
            return 1.0
        right = bisect_right([size for size, _ in points], bytes)
        (a, before), (b, after) = points[right - 1], points[right]
        share = math.log(bytes / a) / math.log(b / a)
        return math.exp((1 - share) * math.log(before) + share * math.log(after))
