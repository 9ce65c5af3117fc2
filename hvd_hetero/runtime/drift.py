"""A cheap check that ranks still train the same model with the same settings."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from hvd_hetero.runtime.agreement import Channel, Message, verify_alike

_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_drift(channel: Channel, optimizer: Any, step: int) -> None:
    """Compare learning rates, other options and parameters bit by bit between all ranks.

    Raises RankMismatchError, on all ranks, naming the first option or parameter that differs.
    """
    verify_alike(channel.allgather(_fingerprint(optimizer, step), "drift"))


def _fingerprint(optimizer: Any, step: int) -> Message:
    fingerprint: Message = {}
    for index, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, bool | str | numbers.Real):
                key = f"{option} of parameter group {index} after step {step}"
                fingerprint[key] = value if isinstance(value, bool | str) else float(value)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = optimizer._parameter_names[parameter]
            fingerprint[f"parameter {name!r} after step {step} (checksum)"] = _checksum(parameter)
    return fingerprint


def _checksum(parameter: torch.Tensor) -> int:
    """Sum of the parameter's bits as integers, modulo 2^64."""
    data = parameter.detach().contiguous()
    as_integers = data.view(_INTEGER_OF_BYTES[data.element_size()])
    return int(as_integers.sum(dtype=torch.int64).item())
