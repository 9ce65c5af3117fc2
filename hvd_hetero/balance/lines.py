"""What is said of one rank's speed: a window's measurement, and two lines over the local batch.

Cannikin (Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302), section 4: computation is linear
in the local batch. ``ready(b)`` runs to the moment the first gradient bucket can be sent,
``done(b)`` to the end of backward; both from the end of the previous exchange, own work only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_hetero.errors import ConfigurationError, check_float, check_int


@dataclass(frozen=True)
class Line:
    """seconds(batch) = slope_seconds * batch + intercept_seconds; both finite and not negative."""

    slope_seconds: float
    intercept_seconds: float

    def __post_init__(self) -> None:
        for name in ("slope_seconds", "intercept_seconds"):
            object.__setattr__(self, name, check_float(name, getattr(self, name), minimum=0.0))

    def __call__(self, batch: float) -> float:
        """Return the seconds for ``batch`` samples."""
        return self.slope_seconds * batch + self.intercept_seconds


@dataclass(frozen=True)
class RankModel:
    """Seconds of one rank for a local batch: to the first bucket, and to the end of backward."""

    ready: Line
    done: Line

    def to_dict(self) -> dict[str, list[float]]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "ready": [self.ready.slope_seconds, self.ready.intercept_seconds],
            "done": [self.done.slope_seconds, self.done.intercept_seconds],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankModel:
        """Build a model from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            return cls(Line(*data["ready"]), Line(*data["done"]))
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"rank model={data!r}: not a saved model ({error}); "
                "pass the dict RankModel.to_dict() gave"
            ) from error


@dataclass(frozen=True)
class TimingPoint:
    """One window's summary of one rank at one local batch size.

    batch: samples. ready_seconds <= done_seconds: medians over the window's steps.
    variance: of one step's done_seconds, in seconds squared; steps: how many were measured.
    compress_seconds, input_seconds, backward_seconds, bucket_seconds: medians, see
    ``timing.StepTiming``.
    """

    batch: int
    ready_seconds: float
    done_seconds: float
    variance: float
    steps: int
    compress_seconds: float = 0.0
    input_seconds: float = 0.0
    backward_seconds: float = 0.0
    bucket_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket_seconds", tuple(self.bucket_seconds))
        check_int("batch", self.batch, minimum=1)
        check_int("steps", self.steps, minimum=1)
        check_float("done_seconds", self.done_seconds, minimum=0.0)
        check_float("ready_seconds", self.ready_seconds, minimum=0.0, maximum=self.done_seconds)
        check_float("variance", self.variance, minimum=0.0)
        check_float("compress_seconds", self.compress_seconds, minimum=0.0)
        for name in ("input_seconds", "backward_seconds"):
            check_float(name, getattr(self, name), minimum=0.0, maximum=self.done_seconds)

    @property
    def forward_seconds(self) -> float:
        """What is left of done_seconds beside input and backward: forward and update."""
        return max(self.done_seconds - self.input_seconds - self.backward_seconds, 0.0)

    def until(self, bucket: int) -> TimingPoint:
        """Return the point with ``bucket`` in the place of the first; itself where unknown."""
        if not 0 < bucket < len(self.bucket_seconds):
            return self
        return replace(self, ready_seconds=min(self.bucket_seconds[bucket], self.done_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TimingPoint:
        """Build a point from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ConfigurationError(
                f"timing point={data!r}: not a saved point ({error}); "
                "pass the dict TimingPoint.to_dict() gave"
            ) from error
