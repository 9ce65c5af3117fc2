"""What the choice of compression sees, decides and remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvd_hetero.compression.controller_state import ControllerState
from hvd_hetero.compression.gain import Curves, Worth
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.objective import Penalty
from hvd_hetero.planning.step_time import Option


@dataclass(frozen=True)
class Observation:
    """What one window showed, over all ranks.

    Args:
        option: in force during the window.
        step_seconds: median step, the maximum over ranks.
        exposed_seconds: of these, the exchange that compute did not hide: ``step_seconds`` minus
            the largest ``done_seconds`` of a rank (compression's own included), at least 0.
        samples_per_step: over all ranks.
        curves: of the window; None where nothing was sampled.
        predicted: step seconds of every option (``step_time.predict_options``).
        penalty: for ``objective="residual"``, of the learning rate in force.
    """

    option: Option
    step_seconds: float
    exposed_seconds: float
    samples_per_step: float
    curves: Curves | None
    predicted: Mapping[Option, float]
    penalty: Penalty


@dataclass(frozen=True)
class Decision:
    """What all ranks do in the next window.

    Args:
        cf: compression factor, or None to send dense gradients.
        strategy: "dense", "allgather" or "shared-index".
        reason: why, with the numbers.
        changed: whether the option differs from the window before.
        measure: whether gradient samples are to be taken in the window.
    """

    cf: float | None
    strategy: str
    reason: str
    changed: bool
    measure: bool

    @property
    def option(self) -> Option:
        """Factor and strategy."""
        return Option(self.cf, self.strategy)


@dataclass(frozen=True)
class PolicyState:
    """All that is remembered between windows; JSON-able.

    Args:
        option: in force.
        controller: of GraVAC's search; None with other policies.
        corrections: for each option that was in force, measured over predicted step seconds.
        worth: for each factor, smoothed, with an allgather.
        raw_energy: smoothed energy of the gradient alone; None before the first.
        cap: highest rung of the ladder that may be used. cap_windows: since it last changed.
        previous: the option before the last change, until that has been judged.
        on_trial: whether dense was chosen to measure it.
        dense_left: windows of dense training still to wait. dense_wait: length of the next wait.
        exposed_seconds: exchange that compute did not hide in the first window after dense was
            settled for; None before it and while compressing.
        compressed_windows: since compression was last switched on.
        windows: seen.
    """

    option: Option
    controller: ControllerState | None
    corrections: Mapping[Option, float]
    worth: Mapping[float, Worth]
    raw_energy: float | None
    cap: int
    cap_windows: int
    previous: Option | None
    on_trial: bool
    dense_left: int
    dense_wait: int
    exposed_seconds: float | None
    compressed_windows: int
    windows: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; ``from_dict`` undoes it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {
            "option": self.option.to_list(),
            "controller": None if self.controller is None else self.controller.to_dict(),
            "corrections": [[*option.to_list(), x] for option, x in self.corrections.items()],
            "worth": [[cf, *worth] for cf, worth in self.worth.items()],
            "previous": None if self.previous is None else self.previous.to_list(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PolicyState:
        """Build from what ``to_dict`` returned; ConfigurationError if it is none."""
        try:
            return cls._from_dict(values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the state of the compression policy cannot be read ({error!r}): it was saved by "
                "another version; take state['compression'] out to keep the residuals alone"
            ) from error

    @classmethod
    def _from_dict(cls, values: Mapping[str, Any]) -> PolicyState:
        controller, previous = values["controller"], values["previous"]
        return cls(
            **dict(values)
            | {
                "option": Option(*values["option"]),
                "controller": None if controller is None else ControllerState.from_dict(controller),
                "corrections": {Option(cf, how): x for cf, how, x in values["corrections"]},
                "worth": {float(cf): Worth(*worth) for cf, *worth in values["worth"]},
                "previous": None if previous is None else Option(*previous),
            }
        )
