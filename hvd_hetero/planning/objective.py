"""What a step is worth: the seconds it takes, times what compression costs in progress.

With error feedback nothing is lost, only late (Stich and Karimireddy, arXiv 1909.05350), so harm
grows with the residual ratio rho = ||sum_i e_i|| / ||sum_i r_i g_i|| and the learning rate:

    J = step seconds * (1 + kappa * rho**p)         objective "residual"
    J = step seconds / gain                         objective "gain", what GraVAC maximises

The second is the first with kappa = 1 and p = 2 where noise dominates: 1 / gain = 1 + rho**2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_hetero.errors import check_choice, check_float

FAMILIES = ("sgd", "adam", "other")

# Least squares in logarithms through kappa 0.002, 0.03, 0.12 measured at learning rates 0.005,
# 0.06, 0.12 of plain SGD on a small MLP: within a factor of 1.4 of each.
_SGD_KAPPA, _SGD_POWER = 1.31, 1.24
# Measured: about 0.2 * rho**0.7 whatever the rate, since Adam divides by the gradient's size.
_ADAM_KAPPA, _ADAM_EXPONENT = 0.2, 0.7


@dataclass(frozen=True)
class Penalty:
    """How much a residual slows training: 1 + kappa * rho**exponent.

    Raises:
        ConfigurationError: a number is negative or not finite.
    """

    kappa: float
    exponent: float

    def __post_init__(self) -> None:
        check_float("kappa", self.kappa, minimum=0.0)
        check_float("exponent", self.exponent, minimum=0.0)

    def factor(self, rho: float) -> float:
        """Return by how much more steps are needed at residual ratio ``rho``; 1 at 0."""
        if rho <= 0.0:
            return 1.0
        try:
            return 1.0 + self.kappa * float(rho**self.exponent)
        except OverflowError:
            return math.inf


def default_penalty(family: str, learning_rate: float, momentum: float = 0.0) -> Penalty:
    """Return the penalty of an optimizer's family.

    Args:
        family: ``"sgd"``: p = 1 and kappa = 1.31 * (lr / (1 - momentum))**1.24, since momentum m
            multiplies what a gradient does in the long run by 1 / (1 - m); ``"adam"`` (all that
            divide by a running size of the gradient): 0.2 * rho**0.7 at any rate; ``"other"``:
            as ``"adam"``, the more careful of the two at usual rates.
        learning_rate: the largest over parameter groups, at least 0.
        momentum: SGD's, in [0, 1).

    Raises:
        ConfigurationError: a value is out of range.
    """
    check_choice("family", family, FAMILIES)
    learning_rate = check_float("learning_rate", learning_rate, minimum=0.0)
    if family != "sgd":
        return Penalty(_ADAM_KAPPA, _ADAM_EXPONENT)
    momentum = check_float("momentum", momentum, minimum=0.0, maximum=0.9999)
    return Penalty(_SGD_KAPPA * (learning_rate / (1.0 - momentum)) ** _SGD_POWER, 1.0)


def objective_seconds(
    step_seconds: float, objective: str, gain: float, rho: float, penalty: Penalty
) -> float:
    """Return J, the seconds of a step as if nothing were delayed; smaller is better.

    Args:
        step_seconds: T, measured or predicted.
        objective: ``"gain"`` or ``"residual"``; see the module docstring.
        gain: in [0, 1]; 1 without compression. A gain of 0 is worth nothing: infinity.
        rho: residual ratio; 0 without compression. Infinity is worth nothing too.
        penalty: used by ``"residual"``.

    Raises:
        ConfigurationError: ``objective`` is neither.
    """
    check_choice("objective", objective, ("gain", "residual"))
    if objective == "gain":
        return step_seconds / gain if gain > 0.0 else math.inf
    return step_seconds * penalty.factor(rho)
