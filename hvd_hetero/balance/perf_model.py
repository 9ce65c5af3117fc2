"""Performance model of one rank, learnt while training: windows in, two lines out.

Cannikin (Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302), section 4, fits the lines; the
prior, the forgetting and the reaction to real changes are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hvd_hetero.balance.lines import Line, RankModel, TimingPoint
from hvd_hetero.errors import ConfigurationError

__all__ = ["FitPoint", "Line", "RankModel", "RankModelFit", "TimingPoint"]

FORGETTING = 0.7  # weight a window's points keep when the next window arrives
PRIOR_SHARE = 0.8  # of done seconds that grow with the batch, before two sizes were seen
PRIOR_SHARE_DEVIATION = 0.2  # how far the prior may be off
SLOPE_SHARES = (0.05, 1.0)  # a slope is kept within these shares of seconds / batch
NOISE_PRIOR = 0.05  # relative deviation of one step, worth NOISE_PRIOR_STEPS measurements
NOISE_FLOOR, NOISE_CAP = 0.005, 0.3  # limits of that deviation
NOISE_PRIOR_STEPS = 3.0
SURPRISE = 0.2  # relative change of the seconds that can count as a real change of the rank ...
SURPRISE_DEVIATIONS = 4.0  # ... if it is also this many standard deviations away
SURPRISE_KEEP = 0.1  # weight that points from before a real change keep
MOST_SIZES = 16  # batch sizes remembered
BETWEEN_FORGETTING = 0.8  # of the noise between windows
LEAST_WEIGHT = 1e-6  # relative to the heaviest point; lighter ones are dropped


@dataclass(frozen=True)
class FitPoint:
    """All that is remembered of one batch size; weight: 1 / variance of the seconds."""

    batch: int
    ready_seconds: float
    done_seconds: float
    weight: float


@dataclass(frozen=True)
class RankModelFit:
    """What is known of one rank: exponentially forgotten points. Immutable; starts empty.

    points: ascending by batch size. latest: the point with most steps of the last window.
    changed: the last window contradicted the model, see ``observe``. noise: relative variance of
    one step's seconds, pooled over windows; noise_steps: measurements it rests on. between:
    relative variance of a window's median beyond what its steps explain, as where other work
    comes and goes on the machine; it may be below 0 by chance, and then counts as none.
    """

    points: tuple[FitPoint, ...] = ()
    latest: TimingPoint | None = None
    changed: bool = False
    noise: float = NOISE_PRIOR**2
    noise_steps: float = NOISE_PRIOR_STEPS
    between: float = 0.0

    def observe(self, points: Sequence[TimingPoint]) -> RankModelFit:
        """Return the state after a window's ``points``; without points, the state itself.

        Old weights are multiplied by FORGETTING, new ones are 1 / variance of the median (of the
        pooled noise, or of the point's own where that is larger, as in a window in which the
        speed changed), and points of one size are merged. When the new points differ from the
        model by more than SURPRISE and SURPRISE_DEVIATIONS, all in the same direction, the rank
        itself has changed: the old points are scaled to the new speed, so the share of the slope
        survives, and keep only SURPRISE_KEEP of their weight.
        """
        points = [point for point in points if point.done_seconds > 0.0]
        if not points:
            return self
        noise, noise_steps = self._pooled(points)
        within = [_median_variance(point, noise) for point in points]
        variances = [
            variance + max(self.between, 0.0) * point.done_seconds**2
            for point, variance in zip(points, within, strict=True)
        ]
        ratio = self._surprise(points, variances)
        scale, keep = (1.0, FORGETTING) if ratio is None else (ratio, SURPRISE_KEEP)
        merged = {
            old.batch: FitPoint(
                old.batch, old.ready_seconds * scale, old.done_seconds * scale, old.weight * keep
            )
            for old in self.points
        }
        for new, variance in zip(points, variances, strict=True):
            fresh = FitPoint(new.batch, new.ready_seconds, new.done_seconds, 1.0 / variance)
            merged[new.batch] = _merge(merged.get(new.batch), fresh)
        least = LEAST_WEIGHT * max(point.weight for point in merged.values())
        heaviest = sorted(merged.values(), key=lambda point: -point.weight)[:MOST_SIZES]
        kept = [point for point in heaviest if point.weight >= least]
        return RankModelFit(
            points=tuple(sorted(kept, key=lambda point: point.batch)),
            latest=max(points, key=lambda point: point.steps),
            changed=ratio is not None,
            noise=noise,
            noise_steps=noise_steps,
            between=self._between(points, within) if ratio is None else self.between,
        )

    def with_ready_scaled(self, factor: float) -> RankModelFit:
        """Return the fit with all ready seconds times ``factor``, at most done seconds."""
        points = tuple(
            replace(p, ready_seconds=min(p.ready_seconds * factor, p.done_seconds))
            for p in self.points
        )
        return replace(self, points=points)

    def model(self) -> RankModel | None:
        """Return the fitted lines, or None before two different batch sizes were seen."""
        return self.estimate() if len(self.points) > 1 else None

    def estimate(self) -> RankModel | None:
        """Return the fitted lines, from the prior slope after a single size; None before any.

        Weighted least squares under c >= alpha > 0 and d >= beta >= 0, with each slope drawn to
        0.8 t/b as if that had been measured with a deviation of 0.2 t/b: sizes that are nearly
        equal, whose noise gives nonsense slopes, leave it there; sizes far apart overrule it.
        Slopes stay within 0.05 to 1 t/b. Here t/b is the least over the weighted mean and all
        known sizes: with d >= 0 no slope can be above any of them, and a rank that once got a
        batch of 1 is not taken to need its whole fixed cost for every further sample.
        """
        return self._estimate

    @cached_property
    def _estimate(self) -> RankModel | None:
        if not self.points:
            return None
        _, batch, ready, done, spread = self._moments
        precision = self._precision(done, batch)

        def slope(mean: float, values: Sequence[float]) -> float:
            level = self._least(mean / batch, values)
            moment = math.fsum(
                point.weight * (point.batch - batch) * (value - mean)
                for point, value in zip(self.points, values, strict=True)
            )
            drawn = (moment + precision * PRIOR_SHARE * level) / (spread + precision)
            return min(max(drawn, SLOPE_SHARES[0] * level), SLOPE_SHARES[1] * level)

        c = slope(done, [point.done_seconds for point in self.points])
        alpha = slope(ready, [point.ready_seconds for point in self.points])
        # Both lines pass through the mean point, so alpha in this interval is equivalent to
        # alpha <= c and 0 <= beta <= d. It is never empty, since c <= done / batch.
        alpha = min(max(alpha, c - (done - ready) / batch), c, ready / batch)
        d = max(0.0, done - c * batch)
        beta = min(max(0.0, ready - alpha * batch), d)
        return RankModel(ready=Line(alpha, beta), done=Line(c, d))

    def relative_error(self, batch: float | None = None) -> float:
        """Relative standard error of the model's done seconds; 1.0 when nothing is known.

        batch: of that size; None: at the mean of the known sizes, where it is least.
        """
        if not self.points:
            return 1.0
        total, mean_batch, _, done, spread = self._moments
        variance = 1.0 / total
        if batch is not None:
            away = batch - mean_batch
            variance += away**2 / (spread + self._precision(done, mean_batch))
            model = self.estimate()
            done = done if model is None else model.done(batch)
        return math.sqrt(variance) / done if done > 0.0 else 1.0

    @cached_property
    def _moments(self) -> tuple[float, float, float, float, float]:
        """Weight, means of batch, ready and done, and the weighted spread of the batches."""
        total = math.fsum(point.weight for point in self.points)
        batch = math.fsum(point.weight * point.batch for point in self.points) / total
        ready = math.fsum(point.weight * point.ready_seconds for point in self.points) / total
        done = math.fsum(point.weight * point.done_seconds for point in self.points) / total
        spread = math.fsum(point.weight * (point.batch - batch) ** 2 for point in self.points)
        return total, batch, ready, done, spread

    def _least(self, mean: float, values: Sequence[float]) -> float:
        each = (value / point.batch for point, value in zip(self.points, values, strict=True))
        return min(mean, *each)

    def _precision(self, done: float, batch: float) -> float:
        """Weight of the prior slope, as of a spread of batches."""
        level = self._least(done / batch, [point.done_seconds for point in self.points])
        return 1.0 / (PRIOR_SHARE_DEVIATION * level) ** 2

    def _between(self, points: Sequence[TimingPoint], within: Sequence[float]) -> float:
        """Return ``between`` after ``points``, whose medians have the variances ``within``."""
        model = self.estimate()
        if model is None:
            return self.between
        between = self.between
        for point, variance in zip(points, within, strict=True):
            # A size far from all known ones tests the slope, not the machine.
            if _distance(point.batch, self.points) > PRIOR_SHARE_DEVIATION:
                continue
            expected = model.done(point.batch)
            gap = min((point.done_seconds / expected - 1.0) ** 2, NOISE_CAP**2)
            known = variance / expected**2 + self.relative_error(point.batch) ** 2
            between += (1.0 - BETWEEN_FORGETTING) * (gap - known - between)
        return between

    def _pooled(self, points: Sequence[TimingPoint]) -> tuple[float, float]:
        """Return noise and noise_steps after ``points``.

        A single step shows no spread, which is not the same as having none: it does not count.
        """
        points = [point for point in points if point.steps > 1]
        if not points:
            return self.noise, self.noise_steps
        total, steps = self.noise * self.noise_steps * FORGETTING, self.noise_steps * FORGETTING
        for point in points:
            # Cap: a bimodal window is no measure of the usual noise.
            relative = min(point.variance / point.done_seconds**2, NOISE_CAP**2)
            total, steps = total + point.steps * relative, steps + point.steps
        return max(total / steps, NOISE_FLOOR**2), steps

    def _surprise(self, points: Sequence[TimingPoint], variances: Sequence[float]) -> float | None:
        """Return measured / expected seconds where the rank has really changed, else None."""
        model = self.estimate()
        if model is None:
            return None
        ratios = []
        for point, variance in zip(points, variances, strict=True):
            expected = model.done(point.batch)
            deviation = math.sqrt(variance) + self.relative_error() * expected
            gap = abs(point.done_seconds - expected)
            # A size far from all known ones tests the slope, not the rank.
            doubt = _distance(point.batch, self.points) * PRIOR_SHARE_DEVIATION * expected
            if gap <= SURPRISE * expected + doubt or gap <= SURPRISE_DEVIATIONS * deviation:
                return None
            ratios.append(point.done_seconds / expected)
        if min(ratios) < 1.0 < max(ratios):
            return None
        return sorted(ratios)[len(ratios) // 2]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "points": [asdict(point) for point in self.points],
            "latest": None if self.latest is None else self.latest.to_dict(),
            "changed": self.changed,
            "noise": self.noise,
            "noise_steps": self.noise_steps,
            "between": self.between,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankModelFit:
        """Build a fit from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            latest = data["latest"]
            return cls(
                points=tuple(FitPoint(**point) for point in data["points"]),
                latest=None if latest is None else TimingPoint.from_dict(latest),
                changed=bool(data["changed"]),
                noise=float(data["noise"]),
                noise_steps=float(data["noise_steps"]),
                between=float(data.get("between", 0.0)),
            )
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"rank model fit={data!r}: not a saved fit ({error}); "
                "pass the dict RankModelFit.to_dict() gave"
            ) from error


def _median_variance(point: TimingPoint, noise: float) -> float:
    """Variance of the window's median, in seconds squared."""
    one_step = max(noise * point.done_seconds**2, point.variance)
    return one_step * math.pi / 2 / point.steps


def _merge(old: FitPoint | None, new: FitPoint) -> FitPoint:
    if old is None:
        return new
    weight = old.weight + new.weight
    share = new.weight / weight
    return FitPoint(
        new.batch,
        old.ready_seconds + share * (new.ready_seconds - old.ready_seconds),
        old.done_seconds + share * (new.done_seconds - old.done_seconds),
        weight,
    )


def _distance(batch: int, points: Sequence[FitPoint]) -> float:
    """Relative distance of ``batch`` to the nearest known size."""
    return min(abs(batch - point.batch) for point in points) / batch
