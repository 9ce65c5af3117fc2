"""What a user asks for when asking for compression: frozen, validated descriptions.

A compression factor (CF) says that about one gradient element in CF is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from hvd_hetero.errors import (
    ConfigurationError,
    UnsupportedError,
    check_choice,
    check_float,
    check_int,
)

POLICIES = ("gravac",)
SCALINGS = ("geometric", "exponential")


class _NotACompressor:
    """Refuses Horovod's ``Compressor`` interface with a sentence instead of wrong results.

    Horovod's compressors see one tensor and their result is allreduced; a sparse gradient with
    error feedback needs its own exchange.
    """

    def compress(self, tensor: object) -> NoReturn:
        """Raise UnsupportedError: Horovod's own optimizer cannot use this object."""
        raise self._refusal()

    def decompress(self, tensor: object, ctx: object = None) -> NoReturn:
        """Raise UnsupportedError: Horovod's own optimizer cannot use this object."""
        raise self._refusal()

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"compression={self!r} was handed to Horovod's own DistributedOptimizer, whose "
            "compressors cannot send sparse gradients: pass it to "
            "hvd_hetero.DistributedOptimizer(compression=...) instead"
        )


@dataclass(frozen=True)
class TopK(_NotACompressor):
    """Send the largest ``elements / cf`` entries of every bucket, at every step.

    Args:
        cf: compression factor, at least 1 (1 sends everything).

    Raises:
        ConfigurationError: ``cf`` is not a finite number of at least 1.
    """

    cf: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "cf", check_float("cf", self.cf, minimum=1.0))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-able values; ``from_dict`` undoes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TopK:
        """Build from what ``to_dict`` returned."""
        return cls(**values)


@dataclass(frozen=True)
class Adaptive(_NotACompressor):
    """Search the compression factor while training (GraVAC, arXiv 2305.12201).

    Args:
        policy: how the factor is chosen; only ``"gravac"``.
        cf_min: lowest compression factor, at least 1.
        cf_max: highest compression factor, at least ``cf_min``.
        eps: share of the gradient's energy that must be sent, in (0, 1].
        omega: relative change of compression throughput below which the search stops.
        window: steps between two decisions.
        scaling: ``"geometric"`` multiplies by ``scaling_factor`` each time; ``"exponential"``
            doubles the exponent of ``scaling_factor`` each time (see ``ladder``).
        scaling_factor: at least 1.01.
        critical_change: relative change of the norm of the raw gradient, between windows, from
            which a period counts as critical and the search starts again from ``cf_min``.
        dense_wait_windows: windows without compression before ``cf_min`` is tried again; doubles
            each time the try fails.
        dense_margin: how far gain(``cf_min``) must exceed ``eps`` to leave dense, relative.
        flush_steps: steps over which a residual is sent after a change to dense.

    Raises:
        ConfigurationError: an option is out of range or ``cf_min`` exceeds ``cf_max``.
    """

    policy: str = "gravac"
    cf_min: float = 10.0
    cf_max: float = 10000.0
    eps: float = 0.75
    omega: float = 0.05
    window: int = 10
    scaling: str = "geometric"
    scaling_factor: float = 2.0
    critical_change: float = 0.5
    dense_wait_windows: int = 4
    dense_margin: float = 0.05
    flush_steps: int = 10

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("policy", check_choice("policy", self.policy, POLICIES))
        put("cf_min", check_float("cf_min", self.cf_min, minimum=1.0))
        put("cf_max", check_float("cf_max", self.cf_max, minimum=1.0))
        if self.cf_max < self.cf_min:
            raise ConfigurationError(
                f"cf_max={self.cf_max:g} is below cf_min={self.cf_min:g}: "
                "raise cf_max or lower cf_min"
            )
        put("eps", check_float("eps", self.eps, minimum=0.0, maximum=1.0, exclusive_minimum=True))
        put("omega", check_float("omega", self.omega, minimum=0.0))
        put("window", check_int("window", self.window, minimum=1))
        put("scaling", check_choice("scaling", self.scaling, SCALINGS))
        # A factor barely above 1 would need thousands of windows; 1.01 is already unreasonable.
        put("scaling_factor", check_float("scaling_factor", self.scaling_factor, minimum=1.01))
        put(
            "critical_change",
            check_float(
                "critical_change", self.critical_change, minimum=0.0, exclusive_minimum=True
            ),
        )
        put(
            "dense_wait_windows",
            check_int("dense_wait_windows", self.dense_wait_windows, minimum=1),
        )
        put("dense_margin", check_float("dense_margin", self.dense_margin, minimum=0.0))
        put("flush_steps", check_int("flush_steps", self.flush_steps, minimum=1))

    def ladder(self) -> tuple[float, ...]:
        """Return the factors that may be used, ascending from ``cf_min`` to ``cf_max``.

        With s = ``scaling_factor`` and j = 0, 1, 2, ...:

        - geometric: cf_min * s**j                 (10, 20, 40, 80, ...)
        - exponential: cf_min * s**(2**j - 1)      (10, 20, 80, 1280, ...), each quotient the
          square of the one before: a reading of the paper's "exponential" policy, whose exact
          rule the authors' code does not contain.

        ``cf_max`` is always the last rung.
        """
        rungs = [self.cf_min]
        quotient = self.scaling_factor
        while rungs[-1] * quotient < self.cf_max * (1 - 1e-9):
            rungs.append(rungs[-1] * quotient)
            if self.scaling == "exponential":
                quotient *= quotient
        return (*rungs, self.cf_max) if self.cf_max > self.cf_min else tuple(rungs)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-able values; ``from_dict`` undoes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adaptive:
        """Build from what ``to_dict`` returned."""
        return cls(**values)
