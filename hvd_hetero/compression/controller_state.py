"""What the search for a compression factor sees, decides and remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvd_hetero.compression.gain import Curves


@dataclass(frozen=True)
class Observation:
    """What one window showed.

    Args:
        curves: of the window's samples, over all ranks; None where none were taken.
        step_seconds: seconds a step took.
        samples_per_step: samples of all ranks together in a step.
    """

    curves: Curves | None
    step_seconds: float
    samples_per_step: float


@dataclass(frozen=True)
class Decision:
    """What to do in the next window.

    Args:
        cf: compression factor, or None to send dense gradients.
        measure: whether samples are to be taken in that window.
        reason: why, with the numbers.
        changed: whether ``cf`` differs from the window before.
    """

    cf: float | None
    measure: bool
    reason: str
    changed: bool


@dataclass(frozen=True)
class ControllerState:
    """All that is remembered between windows; JSON-able.

    Args:
        rung: index into ``Adaptive.ladder()`` of the current factor; None without compression.
        ceiling: highest rung that may be tried.
        searching: whether higher rungs are still tried.
        throughput_below: T_c of the rung from which the current one was reached, in samples per
            second, until the comparison is made.
        raw_energy: smoothed raw gradient energy per measurement, the base of rule 2.
        dense_windows_left: windows still to wait without compression, the measured one included.
        dense_wait_windows: length of the next wait.
        windows_compressed: windows since compression was last switched on.
        windows: windows seen.
    """

    rung: int | None
    ceiling: int
    searching: bool
    throughput_below: float | None
    raw_energy: float | None
    dense_windows_left: int
    dense_wait_windows: int
    windows_compressed: int
    windows: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; ``from_dict`` undoes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ControllerState:
        """Build from what ``to_dict`` returned."""
        return cls(**values)
