"""The plan: how many samples of a global batch each rank works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_hetero.errors import ConfigurationError, check_float, check_int


@dataclass(frozen=True)
class Plan:
    """One agreed split of the global batch; equal on all ranks.

    version: counts plans from 0; a higher version replaces a lower one.
    local_batches: samples per step of each rank, in rank order, each at least 1.
    reason: why this plan was made, with the numbers that led to it.
    predicted_step_seconds: what the performance model expects, None when nothing is known yet.

    Raises ConfigurationError for a negative version, no ranks, a rank without samples, an
    empty reason or a negative prediction.
    """

    version: int
    local_batches: tuple[int, ...]
    reason: str
    predicted_step_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", check_int("version", self.version, minimum=0))
        batches = tuple(
            check_int(f"local_batches[{rank}]", batch, minimum=1)
            for rank, batch in enumerate(self.local_batches)
        )
        if not batches:
            raise ConfigurationError("local_batches=(): give one batch size for each rank")
        object.__setattr__(self, "local_batches", batches)
        if not isinstance(self.reason, str) or not self.reason:
            raise ConfigurationError(f"reason={self.reason!r}: say in words why the plan was made")
        if self.predicted_step_seconds is not None:
            seconds = check_float(
                "predicted_step_seconds", self.predicted_step_seconds, minimum=0.0
            )
            object.__setattr__(self, "predicted_step_seconds", seconds)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.local_batches)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return sum(self.local_batches)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "version": self.version,
            "local_batches": list(self.local_batches),
            "reason": self.reason,
            "predicted_step_seconds": self.predicted_step_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Build a plan from ``to_dict``'s result. Raises ConfigurationError if a key is missing."""
        try:
            return cls(
                version=data["version"],
                local_batches=tuple(data["local_batches"]),
                reason=data["reason"],
                predicted_step_seconds=data.get("predicted_step_seconds"),
            )
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"plan={data!r}: not a saved plan ({error}); pass the dict Plan.to_dict() gave"
            ) from error
