"""Seconds over whole granules of samples for all ranks at once, and the way back; numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.balance.lines import RankModel

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


class RankLines:
    """The 2 n lines as arrays; float operations in one fixed order, so results compare equal."""

    def __init__(self, models: Sequence[RankModel], overlapped_seconds: float) -> None:
        table = np.array(
            [
                (
                    model.ready.slope_seconds,
                    model.ready.intercept_seconds,
                    model.done.slope_seconds,
                    model.done.intercept_seconds,
                )
                for model in models
            ]
        )
        self.slopes: Floats = np.ascontiguousarray(table[:, ::2].T)  # [ready, done] x n
        self.intercepts: Floats = np.ascontiguousarray(table[:, 1::2].T)
        self.intercepts[0] += overlapped_seconds
        self._flat = self.slopes == 0.0
        self._any_flat = bool(self._flat.any())

    def seconds(self, samples: Floats) -> Floats:
        """f_i of ``samples`` [n]."""
        times: Floats = (self.slopes * samples + self.intercepts).max(axis=0)
        return times

    def samples(self, seconds: float) -> Floats:
        """Largest real b_i with f_i(b_i) <= ``seconds``, before rounding errors; may be +-inf."""
        slack = seconds - self.intercepts
        if not self._any_flat:
            with np.errstate(over="ignore"):
                return np.asarray((slack / self.slopes).min(axis=0))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            inverse = slack / self.slopes
        inverse[self._flat] = np.where(slack[self._flat] >= 0.0, np.inf, -np.inf)
        return np.asarray(inverse.min(axis=0))


class RankUnits:
    """Rank i takes u_i * granule + offset_i samples, low_i <= u_i <= high_i. All arrays [n]."""

    def __init__(self, lines: RankLines, granule: int, offset: Ints, low: Ints, high: Ints) -> None:
        self.lines, self.granule, self.offset, self.low, self.high = (
            lines, granule, offset, low, high
        )  # fmt: skip

    def samples(self, units: Ints) -> Ints:
        return units * self.granule + self.offset

    def seconds(self, units: Ints) -> Floats:
        return self.lines.seconds(self.samples(units).astype(np.float64))

    def finished(self, seconds: float) -> Ints:
        """Most units each rank finishes by ``seconds``; low - 1 where it cannot do its minimum."""
        real = (self.lines.samples(seconds) - self.offset) / self.granule
        # Rounding may put the inverse one unit off: what counts is seconds() itself.
        units: Ints = np.clip(np.floor(real), self.low - 1, self.high).astype(np.int64)
        units -= (self.seconds(units) > seconds) & (units >= self.low)
        units += (units < self.high) & (self.seconds(units + 1) <= seconds)
        return units

    def taken(self, seconds: float) -> Ints:
        """As ``finished``, but ranks that cannot do their minimum by ``seconds`` take it."""
        return np.maximum(self.finished(seconds), self.low)

    def reached(self, below: Ints, above: Ints) -> Floats:
        """Seconds of every unit from ``below`` (excluded) to ``above`` of every rank."""
        values = [np.empty(0)]
        units = below + 1
        while (left := units <= above).any():
            values.append(self.seconds(units)[left])
            units = units + 1
        return np.concatenate(values)
