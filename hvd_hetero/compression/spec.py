"""What a user asks for when asking for compression: one frozen, validated description.

A compression factor (CF) says that about one gradient element in CF is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from hvd_hetero.errors import (
    ConfigurationError,
    UnsupportedError,
    check_bool,
    check_choice,
    check_float,
    check_int,
)

POLICIES = ("gravac", "model", "fixed")
SCALINGS = ("geometric", "exponential")
VALUES = ("float16", "float32")
EXCHANGES = ("auto", "allgather", "shared-index")
OBJECTIVES = ("gain", "residual")
LARGEST_CF = 1e12  # no gradient has more elements


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
class Adaptive(_NotACompressor):
    """How gradients are compressed: top-k with error feedback, and who chooses the factor.

    Most scripts need only the first group.

    Args:
        policy: ``"gravac"`` searches the factor while training (GraVAC, arXiv 2305.12201);
            ``"model"`` takes the factor and exchange with the least objective, predicted from
            what was measured and checked by measurement; ``"fixed"`` keeps ``min_cf``, which
            must equal ``max_cf`` (``Compression.topk(cf)`` builds this).
        min_cf: lowest compression factor, at least 1 (1 sends everything).
        max_cf: highest compression factor, at least ``min_cf``.
        window: steps between two decisions.
        dense_steps: exactly this many steps without compression come first.
        values: how kept values travel, ``"float16"`` (rounding errors stay in the residual, so
            nothing is lost) or ``"float32"``. float64 gradients always travel as float64.
        exchange: ``"allgather"``, ``"shared-index"``, or ``"auto"``: the least objective with
            ``policy="model"``, the fewer predicted seconds with ``"gravac"``, and with
            ``"fixed"``, whose runs repeat, an allgather unless it takes twice the bytes.
        do_no_harm: train without compression where that is measured to be no worse by
            ``objective``. Has no meaning for ``policy="fixed"``.

        objective: what a step is worth. ``"residual"``: seconds * (1 + kappa * rho**p), with rho
            the residual ratio, since delayed gradients are late and not lost; ``"gain"``:
            seconds / gain, as if what is not sent were lost. Used by ``policy="model"`` and
            ``do_no_harm``.
        kappa: weight of the residual; None: by the optimizer's family (``planning.objective``).
        rho_exponent: p; None: by the optimizer's family.
        max_rho: residual ratio from which the factor is lowered, rung by rung. Far above what
            was seen to train well (about 10 at CF 1000), and where it does run away it passes
            any bound.

        eps: gravac: share of the gradient's energy that must be sent, in (0, 1].
        omega: gravac: relative change of compression throughput below which the search stops.
        scaling: ``"geometric"`` multiplies by ``scaling_factor`` each time; ``"exponential"``
            doubles the exponent of ``scaling_factor`` each time (see ``ladder``).
        scaling_factor: at least 1.01.
        critical_change: gravac: relative change of the norm of the raw gradient, between
            windows, from which a period counts as critical and the search starts again from
            ``min_cf``.
        dense_wait_windows: windows without compression before it is looked at again; doubles
            each time the look or try fails.
        dense_margin: gravac: how far gain(``min_cf``) must exceed ``eps`` to leave dense,
            relative.
        flush_steps: steps over which a residual is sent after a change to dense.

    Raises:
        ConfigurationError: an option is out of range, ``min_cf`` exceeds ``max_cf``, or they
            differ with ``policy="fixed"``.
    """

    policy: str = "gravac"
    min_cf: float = 10.0
    max_cf: float = 10000.0
    window: int = 10
    dense_steps: int = 0
    values: str = "float16"
    exchange: str = "auto"
    do_no_harm: bool = True

    objective: str = "residual"
    kappa: float | None = None
    rho_exponent: float | None = None
    max_rho: float = 50.0

    eps: float = 0.75
    omega: float = 0.05
    scaling: str = "geometric"
    scaling_factor: float = 2.0
    critical_change: float = 0.5
    dense_wait_windows: int = 4
    dense_margin: float = 0.05
    flush_steps: int = 10

    def __post_init__(self) -> None:
        for name, choices in (
            ("policy", POLICIES),
            ("values", VALUES),
            ("exchange", EXCHANGES),
            ("objective", OBJECTIVES),
            ("scaling", SCALINGS),
        ):
            check_choice(name, getattr(self, name), choices)
        check_bool("do_no_harm", self.do_no_harm)
        for name, least in (
            ("window", 1),
            ("dense_steps", 0),
            ("dense_wait_windows", 1),
            ("flush_steps", 1),
        ):
            self._put(name, check_int(name, getattr(self, name), minimum=least))
        # A scaling factor barely above 1 would need thousands of windows; 1.01 already is odd.
        for name in ("min_cf", "max_cf"):
            value = check_float(name, getattr(self, name), minimum=1.0, maximum=LARGEST_CF)
            self._put(name, value)
        for name, minimum in (
            ("omega", 0.0),
            ("dense_margin", 0.0),
            ("scaling_factor", 1.01),
        ):
            self._put(name, check_float(name, getattr(self, name), minimum=minimum))
        for name, maximum in (("eps", 1.0), ("critical_change", None), ("max_rho", None)):
            value = check_float(
                name, getattr(self, name), minimum=0.0, maximum=maximum, exclusive_minimum=True
            )
            self._put(name, value)
        for name in ("kappa", "rho_exponent"):
            if getattr(self, name) is not None:
                self._put(name, check_float(name, getattr(self, name), minimum=0.0))
        if self.max_cf < self.min_cf:
            raise ConfigurationError(
                f"max_cf={self.max_cf:g} is below min_cf={self.min_cf:g}: "
                "raise max_cf or lower min_cf"
            )
        if self.policy == "fixed" and self.max_cf != self.min_cf:
            raise ConfigurationError(
                f"policy='fixed' with min_cf={self.min_cf:g} and max_cf={self.max_cf:g}: a fixed "
                "factor is one number; make them equal, or use Compression.topk(cf)"
            )

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def ladder(self) -> tuple[float, ...]:
        """Return the factors that may be used, ascending from ``min_cf`` to ``max_cf``.

        With s = ``scaling_factor`` and j = 0, 1, 2, ...:

        - geometric: min_cf * s**j                 (10, 20, 40, 80, ...)
        - exponential: min_cf * s**(2**j - 1)      (10, 20, 80, 1280, ...), each quotient the
          square of the one before: a reading of the paper's "exponential" policy, whose exact
          rule the authors' code does not contain.

        ``max_cf`` is always the last rung.
        """
        rungs = [self.min_cf]
        quotient = self.scaling_factor
        while rungs[-1] * quotient < self.max_cf * (1 - 1e-9):
            rungs.append(rungs[-1] * quotient)
            if self.scaling == "exponential":
                quotient *= quotient
        return (*rungs, self.max_cf) if self.max_cf > self.min_cf else tuple(rungs)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-able values; ``from_dict`` undoes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adaptive:
        """Build from what ``to_dict`` returned."""
        return cls(**values)
