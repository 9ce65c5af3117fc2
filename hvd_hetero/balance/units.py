"""Seconds over whole granules of samples for all ranks at once, and the way back; numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.balance.lines import RankModel
from hvd_hetero.errors import ConfigurationError, check_float

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


class RankLines:
    """The 2 n lines as arrays; float operations in one fixed order, so results compare equal."""

    def __init__(self, models: Sequence[RankModel], overlapped_seconds: float) -> None:
        # Flat lists of floats: numpy reads 10,000 models so in half the time of a list of tuples.
        lines = [model.ready for model in models]
        lines += [model.done for model in models]
        shape, size = (2, len(models)), 2 * len(models)  # [ready, done] x n
        slopes = np.fromiter([line.slope_seconds for line in lines], np.float64, size)
        intercepts = np.fromiter([line.intercept_seconds for line in lines], np.float64, size)
        self.slopes: Floats = slopes.reshape(shape) + 0.0  # no -0.0: samples() divides by it
        self.intercepts: Floats = intercepts.reshape(shape)
        self.intercepts[0] += overlapped_seconds
        self._any_flat = bool((self.slopes == 0.0).any())

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
        inverse[np.isnan(inverse)] = np.inf  # 0 / 0: a flat line at its own height
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
        units: Ints = np.clip(np.floor(real), self.low - 1, self.high).astype(np.int64)
        # Rounding may put the inverse off: what counts is seconds() itself. Mostly by one unit.
        for _ in range(3):
            over = (units >= self.low) & (self.seconds(units) > seconds)
            under = (units < self.high) & (self.seconds(units + 1) <= seconds)
            if not (over | under).any():
                return units
            units = units - over + under
        return self._finished_by_bisection(seconds)

    def _finished_by_bisection(self, seconds: float) -> Ints:
        """As ``finished``, where a line is so nearly flat that its inverse says nothing."""
        units, most = np.minimum(self.low - 1, self.high), self.high
        while (open_ := units < most).any():
            middle = units + (most - units + 1) // 2
            done = open_ & (self.seconds(middle) <= seconds)
            units, most = np.where(done, middle, units), np.where(open_ & ~done, middle - 1, most)
        return units

    def taken(self, seconds: float) -> Ints:
        """As ``finished``, but ranks that cannot do their minimum by ``seconds`` take it."""
        return np.maximum(self.finished(seconds), self.low)

    def reached(self, below: Ints, above: Ints) -> Floats:
        """Seconds of every unit from ``below`` (excluded) to ``above`` of every rank."""
        counts = np.maximum(above - below, 0)
        ranks = np.repeat(np.arange(len(counts)), counts)
        units = np.arange(len(ranks)) - (np.cumsum(counts) - counts - below - 1)[ranks]
        samples = (units * self.granule + self.offset[ranks]).astype(np.float64)
        times: Floats = (
            self.lines.slopes[:, ranks] * samples + self.lines.intercepts[:, ranks]
        ).max(axis=0)
        return times


def check_models(
    models: Sequence[RankModel], ranks: int, overlapped_seconds: float, final_seconds: float
) -> None:
    """Raise ConfigurationError unless there is a model for each rank and no time is negative."""
    if not models or len(models) != ranks:
        raise ConfigurationError(
            f"{len(models)} rank models for {ranks} ranks: give one for each rank"
        )
    check_float("overlapped_seconds", overlapped_seconds, minimum=0.0)
    check_float("final_seconds", final_seconds, minimum=0.0)
