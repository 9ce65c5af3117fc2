"""Horovod's collectives behind the exchange protocol, and what Horovod must offer."""

from __future__ import annotations

import logging
import os

import torch

from hvd_hetero.environment import KNOWN_VARIABLES, unknown_variables
from hvd_hetero.errors import (
    ConfigurationError,
    ExchangeFailedError,
    HorovodUnavailableError,
    UnsupportedError,
)
from hvd_hetero.exchange.collectives import Collectives, Handle, SingleProcess

try:
    import horovod
    import horovod.torch as hvd
    from horovod.torch.mpi_ops import HorovodInternalError
except Exception as error:  # a build against another torch fails with errors of many kinds
    raise HorovodUnavailableError(
        f"horovod.torch cannot be imported ({type(error).__name__}: {error}); "
        "build Horovod for the installed torch with `hvd-hetero install-horovod`"
    ) from error

logger = logging.getLogger("hvd_hetero")

__all__ = ["HorovodCollectives", "HorovodHandle", "check_environment", "connect", "hvd"]

SUPPORTED_HOROVOD = "0.28"

_RELIED_ON = (
    "_allreduce_grad_async",
    "_make_hook",
    "_register_hooks",
    "load_state_dict",
    "skip_synchronize",
    "step",
    "synchronize",
    "zero_grad",
)


_warned_of: set[str] = set()


class HorovodHandle:
    """A Horovod handle; its tensors stay referenced until the result was taken."""

    def __init__(self, handle: int, name: str) -> None:
        self._handle = handle
        self._name = name

    def done(self) -> bool:
        return bool(hvd.poll(self._handle))

    def result(self) -> torch.Tensor:
        try:
            result: torch.Tensor = hvd.synchronize(self._handle)
        except HorovodInternalError as error:
            raise _exchange_failed(self._name, error) from error
        return result


class HorovodCollectives:
    """Collectives over all ranks of an initialised Horovod."""

    @property
    def rank(self) -> int:
        return int(hvd.rank())

    @property
    def size(self) -> int:
        return int(hvd.size())

    def allreduce_async(self, tensor: torch.Tensor, name: str, average: bool = False) -> Handle:
        op = hvd.Average if average else hvd.Sum
        try:
            return HorovodHandle(hvd.allreduce_async_(tensor, name=name, op=op), name)
        except HorovodInternalError as error:
            raise _exchange_failed(name, error) from error

    def allgather_async(self, tensor: torch.Tensor, name: str) -> Handle:
        try:
            return HorovodHandle(hvd.allgather_async(tensor, name=name), name)
        except HorovodInternalError as error:
            raise _exchange_failed(name, error) from error

    def broadcast_async(self, tensor: torch.Tensor, root_rank: int, name: str) -> Handle:
        try:
            return HorovodHandle(hvd.broadcast_async_(tensor, root_rank, name=name), name)
        except HorovodInternalError as error:
            raise _exchange_failed(name, error) from error


def _exchange_failed(name: str, error: Exception) -> ExchangeFailedError:
    message = f"rank {hvd.rank()}: collective {name!r} failed: {error}"
    if "join" in str(error).lower():
        message += (
            ". hvd.join() cannot be combined with gathered gradients; use "
            "hvd_hetero.Balancer(...).data_loader(...), which gives every rank the same number "
            "of batches, so that no join is needed"
        )
    return ExchangeFailedError(message)


def connect() -> Collectives:
    """Return the collectives of the running job.

    Raises ConfigurationError before ``hvd.init()``, HorovodUnavailableError for a Horovod this
    package was not written for, UnsupportedError in elastic mode.
    """
    check_horovod()
    check_environment()
    if not hvd.is_initialized():
        raise ConfigurationError(
            "Horovod is not initialised: call hvd.init() before hvd_hetero is used"
        )
    if int(hvd.size()) == 1:
        return SingleProcess()
    return HorovodCollectives()


def check_horovod() -> None:
    """Raise when the installed Horovod lacks what this package relies on."""
    version = str(horovod.__version__)
    if not version.startswith(SUPPORTED_HOROVOD + "."):
        raise HorovodUnavailableError(
            f"Horovod {version} is installed; hvd_hetero works with {SUPPORTED_HOROVOD}.x. "
            "Install it with `hvd-hetero install-horovod`"
        )
    stock = getattr(horovod.torch.optimizer, "_DistributedOptimizer", None)
    missing = [name for name in _RELIED_ON if not hasattr(stock, name)]
    if missing:
        raise HorovodUnavailableError(
            f"Horovod {version} has no {', '.join(missing)} in its DistributedOptimizer; "
            "install an unchanged one with `hvd-hetero install-horovod`"
        )


def check_environment() -> None:
    """Refuse elastic mode, and warn, once for each, of variables nobody reads.

    Raises UnsupportedError when HOROVOD_ELASTIC is set.
    """
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise UnsupportedError(
            "Horovod's elastic mode (HOROVOD_ELASTIC=1) is not supported by hvd_hetero: "
            "launch with a fixed number of ranks"
        )
    for name in unknown_variables(os.environ):
        if name not in _warned_of:
            _warned_of.add(name)
            logger.warning(
                "%s is set, but hvd_hetero has no such variable and ignores it; it knows %s",
                name,
                ", ".join(KNOWN_VARIABLES),
            )


# At import already: an older Horovod lacks names that other modules use when they are loaded.
check_horovod()
