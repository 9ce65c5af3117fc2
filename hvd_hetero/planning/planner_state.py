"""What the planner is asked for and what it remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.balance.memory import MemoryFit
from hvd_hetero.balance.optperf import Bounds, solve
from hvd_hetero.balance.perf_model import RankModelFit
from hvd_hetero.errors import (
    ConfigurationError,
    InfeasibleBatchError,
    check_float,
    check_int,
)
from hvd_hetero.planning.plan import Plan

LEARNING_WINDOWS = 3  # after the start, and after a rank or the exchange has changed


@dataclass(frozen=True)
class PlannerConfig:
    """What a plan must obey.

    global_batch_size: samples of a step over all ranks. bounds: of each rank's local batch.
    granule: local batches are multiples of it (but for one rank, see ``optperf.solve``).
    min_gain: least predicted relative gain of step time that justifies a change, in [0, 1).
    min_interval_windows: windows a plan stays at least, but for the LEARNING_WINDOWS after the
    start and after a real change.
    fixed_local_batches: when given, the only plan there will be.

    Raises ConfigurationError, or InfeasibleBatchError with the numbers when no plan can obey.
    """

    global_batch_size: int
    bounds: Bounds
    granule: int = 1
    min_gain: float = 0.05
    min_interval_windows: int = 3
    fixed_local_batches: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_int("global_batch_size", self.global_batch_size, minimum=1)
        check_int("granule", self.granule, minimum=1)
        if check_float("min_gain", self.min_gain, minimum=0.0) >= 1.0:
            raise ConfigurationError(f"min_gain={self.min_gain!r}: a relative gain is below 1")
        check_int("min_interval_windows", self.min_interval_windows, minimum=0)
        if self.fixed_local_batches is None:
            even_split(self)
            return
        fixed = tuple(
            check_int(f"fixed_local_batches[{rank}]", batch, minimum=1)
            for rank, batch in enumerate(self.fixed_local_batches)
        )
        object.__setattr__(self, "fixed_local_batches", fixed)
        if len(fixed) != self.bounds.ranks:
            raise ConfigurationError(
                f"fixed_local_batches={fixed}: {len(fixed)} numbers for {self.bounds.ranks} ranks"
            )
        for rank, batch in enumerate(fixed):
            low, high = self.bounds.lower[rank], self.bounds.upper[rank]
            if not low <= batch <= high:
                raise InfeasibleBatchError(
                    f"fixed_local_batches[{rank}]={batch}: outside the bounds {low}..{high}; "
                    "change the number or the bounds"
                )
        if sum(fixed) != self.global_batch_size:
            raise InfeasibleBatchError(
                f"fixed_local_batches={fixed}: they sum to {sum(fixed)}, but "
                f"global_batch_size={self.global_batch_size}; make the two equal"
            )


@dataclass(frozen=True)
class PlanEffect:
    """What a plan was made for and what came of it, in seconds of a step.

    before_seconds: under the plan before it, in the window it was made after.
    predicted_seconds: None when nothing was known. measured_seconds: of the first whole window
    under the plan, None until then. before_local_batches: of the plan before it.
    """

    version: int
    before_seconds: float
    predicted_seconds: float | None
    measured_seconds: float | None = None
    before_local_batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "before_local_batches", tuple(self.before_local_batches))

    def __str__(self) -> str:
        def ms(seconds: float | None) -> str:
            return "unknown" if seconds is None else f"{seconds * 1e3:.4g} ms"

        return (
            f"plan {self.version}: a step took {ms(self.before_seconds)} before, "
            f"{ms(self.predicted_seconds)} predicted, {ms(self.measured_seconds)} measured"
        )


@dataclass(frozen=True)
class PlannerState:
    """All the planner remembers.

    plan: the plan in force. windows: windows seen. fits: one per rank (empty: nothing seen).
    reason: of the last decision, also when nothing changed. windows_since_change: windows seen
    since the plan was made. exchange_seconds: smoothed (T_o, T_u) of the exchange named
    ``exchange``, None before the first window. bucket: the one whose being ready counts, see
    ``timing.critical_bucket``. memory: one per rank. learning: windows left in
    which plans may follow each other. asking: windows in a row in which a change was predicted to
    pay. effect: of the newest plan that replaced another. bias: what steps took over what was
    expected of them. rejected: a split that proved slower than the one before it, and is not taken
    for ``rejected_windows`` more. expected_seconds: of a step in the next window; None: not known
    yet.
    """

    plan: Plan
    windows: int = 0
    fits: tuple[RankModelFit, ...] = ()
    reason: str = ""
    windows_since_change: int = 0
    exchange_seconds: tuple[float, float] | None = None
    exchange: str = ""
    bucket: int = 0
    memory: tuple[MemoryFit, ...] = ()
    learning: int = LEARNING_WINDOWS
    asking: int = 0
    effect: PlanEffect | None = None
    bias: float = 1.0
    rejected: tuple[int, ...] = ()
    rejected_windows: int = 0
    expected_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.fits:
            object.__setattr__(self, "fits", (RankModelFit(),) * self.plan.ranks)
        if not self.memory:
            object.__setattr__(self, "memory", (MemoryFit(),) * self.plan.ranks)
        if not self.reason:
            object.__setattr__(self, "reason", self.plan.reason)
        if not len(self.fits) == len(self.memory) == self.plan.ranks:
            raise ConfigurationError(
                f"{len(self.fits)} fits and {len(self.memory)} of memory for "
                f"{self.plan.ranks} ranks"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "plan": self.plan.to_dict(),
            "windows": self.windows,
            "fits": [fit.to_dict() for fit in self.fits],
            "reason": self.reason,
            "windows_since_change": self.windows_since_change,
            "exchange_seconds": self.exchange_seconds and list(self.exchange_seconds),
            "exchange": self.exchange,
            "bucket": self.bucket,
            "memory": [fit.to_dict() for fit in self.memory],
            "learning": self.learning,
            "asking": self.asking,
            "effect": None if self.effect is None else asdict(self.effect),
            "bias": self.bias,
            "rejected": list(self.rejected),
            "rejected_windows": self.rejected_windows,
            "expected_seconds": self.expected_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlannerState:
        """Build a state from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            times, effect = data["exchange_seconds"], data["effect"]
            return cls(
                plan=Plan.from_dict(data["plan"]),
                windows=int(data["windows"]),
                fits=tuple(RankModelFit.from_dict(fit) for fit in data["fits"]),
                reason=str(data["reason"]),
                windows_since_change=int(data["windows_since_change"]),
                exchange_seconds=None if times is None else (float(times[0]), float(times[1])),
                exchange=str(data["exchange"]),
                bucket=int(data["bucket"]),
                memory=tuple(MemoryFit.from_dict(fit) for fit in data["memory"]),
                learning=int(data["learning"]),
                asking=int(data["asking"]),
                effect=None if effect is None else PlanEffect(**effect),
                bias=float(data["bias"]),
                rejected=tuple(data["rejected"]),
                rejected_windows=int(data["rejected_windows"]),
                expected_seconds=data["expected_seconds"],
            )
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"planner state={str(data)[:200]}: not a saved one ({error!r}); pass the dict "
                "PlannerState.to_dict() gave"
            ) from error


def even_split(config: PlannerConfig) -> tuple[int, ...]:
    """Return the most even local batches that ``config`` allows."""
    same = RankModel(Line(1.0, 0.0), Line(1.0, 0.0))
    return solve(
        [same] * config.bounds.ranks,
        config.global_batch_size,
        bounds=config.bounds,
        granule=config.granule,
    ).local_batches


def first_plan(config: PlannerConfig, ranks: int) -> Plan:
    """Return version 0: the fixed split, or the most even one within the bounds.

    Raises ConfigurationError when ``ranks`` differs from the bounds.
    """
    if check_int("ranks", ranks, minimum=1) != config.bounds.ranks:
        raise ConfigurationError(f"ranks={ranks}: the bounds are for {config.bounds.ranks} ranks")
    if config.fixed_local_batches is not None:
        return Plan(0, config.fixed_local_batches, "fixed by fixed_local_batches")
    return Plan(0, even_split(config), "even split: no rank has been timed yet")
