"""Errors raised by the package, and the argument checks that raise them.

Every message names the option or parameter, the value seen and the remedy.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any


class HeteroError(RuntimeError):
    """Base of every error this package raises by itself."""


class ConfigurationError(HeteroError, ValueError):
    """An option has a value that cannot be used."""


class InfeasibleBatchError(ConfigurationError):
    """No local batch sizes within the bounds add up to the global batch size."""


class UnsupportedError(HeteroError, NotImplementedError):
    """A Horovod or PyTorch feature that cannot be combined with this package."""


class RankMismatchError(HeteroError):
    """Ranks disagree about something that must be equal on all of them."""


class ExchangeTimeoutError(HeteroError, TimeoutError):
    """A collective did not finish within ``exchange_timeout_seconds``."""


class ExchangeFailedError(HeteroError):
    """A collective ended with an error of Horovod or MPI."""


class BatchAccountingError(HeteroError):
    """The number of samples behind a backward pass is not known."""


class HorovodUnavailableError(HeteroError, ImportError):
    """Horovod, or its PyTorch part, is not installed or has another version."""


def check_int(
    name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return ``value`` as an int, or raise ConfigurationError that names the option."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigurationError(
            f"{name}={value!r}: expected a whole number{_range(minimum, maximum)}"
        )
    result = int(value)
    if (minimum is not None and result < minimum) or (maximum is not None and result > maximum):
        raise ConfigurationError(
            f"{name}={value!r}: must be a whole number{_range(minimum, maximum)}"
        )
    return result


def check_float(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive_minimum: bool = False,
) -> float:
    """Return ``value`` as a finite float, or raise ConfigurationError that names the option."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigurationError(f"{name}={value!r}: expected a number{_range(minimum, maximum)}")
    result = float(value)
    too_low = minimum is not None and (result <= minimum if exclusive_minimum else result < minimum)
    if not math.isfinite(result) or too_low or (maximum is not None and result > maximum):
        limits = _range(minimum, maximum, exclusive_minimum)
        raise ConfigurationError(f"{name}={value!r}: must be a finite number{limits}")
    return result


def check_bool(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool, or raise ConfigurationError that names the option."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: expected True or False")
    return value


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return ``value`` if it is one of ``choices``, or raise ConfigurationError."""
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(f"{name}={value!r}: must be one of {allowed}")
    return value


def _range(minimum: float | None, maximum: float | None, exclusive_minimum: bool = False) -> str:
    if minimum is not None and maximum is not None:
        bracket = "(" if exclusive_minimum else "["
        return f" in {bracket}{minimum}, {maximum}]"
    if minimum is not None:
        return f" {'above' if exclusive_minimum else 'of at least'} {minimum}"
    if maximum is not None:
        return f" of at most {maximum}"
    return ""
