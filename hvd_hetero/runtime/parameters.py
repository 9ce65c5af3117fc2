"""Names of an optimizer's parameters: checked, complete, and comparable between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_hetero.errors import ConfigurationError, UnsupportedError


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """Return a unique name for every parameter of the optimizer, in the order of its groups.

    ``named_parameters`` may name more than the optimizer has, and a parameter twice (tied
    weights); the first name counts. None: names are made from the groups.

    Raises:
        ConfigurationError: not (name, parameter) pairs, a name given to two parameters, or a
            parameter without a name.
        UnsupportedError: a complex parameter.
    """
    grouped = [
        (f"group.{group_index}.{index}", parameter)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
    if named_parameters is not None and not isinstance(named_parameters, Iterable):
        raise ConfigurationError(
            f"named_parameters={named_parameters!r}: expected pairs (name, parameter), as "
            "model.named_parameters() gives them, or None"
        )
    pairs = grouped if named_parameters is None else list(named_parameters)
    names: dict[torch.Tensor, str] = {}
    owners: dict[str, torch.Tensor] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigurationError(
                f"named_parameters holds {_kind(pair)}: expected pairs (name, parameter), as "
                "model.named_parameters() gives them"
            )
        name, parameter = pair
        if owners.setdefault(name, parameter) is not parameter:
            raise ConfigurationError(
                f"named_parameters gives the name {name!r} to two parameters: with several models "
                "put a prefix before the names of each"
            )
        names.setdefault(parameter, name)
    for place, parameter in grouped:
        if parameter not in names:
            raise ConfigurationError(
                f"named_parameters has no name for the parameter of shape "
                f"{tuple(parameter.shape)} in parameter group {place.split('.')[1]}, position "
                f"{place.split('.')[2]}: name all parameters of the optimizer, or leave "
                "named_parameters out"
            )
        if parameter.is_complex():
            raise UnsupportedError(
                f"parameter {names[parameter]!r} is complex ({parameter.dtype}), which Horovod "
                "cannot exchange: keep it as a real tensor with a last dimension of 2 "
                "(torch.view_as_real)"
            )
    in_optimizer = {parameter for _, parameter in grouped}
    extra = {p: name for p, name in names.items() if p not in in_optimizer}
    return {p: names[p] for _, p in grouped} | extra


def parameter_signature(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> dict[str, Any]:
    """Describe every parameter in order, to be compared between ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    signature: dict[str, Any] = {"number of parameters": len(parameters)}
    for index, parameter in enumerate(parameters):
        frozen = "" if parameter.requires_grad else ", frozen"
        signature[f"parameter {index}"] = (
            f"{names[parameter]}: shape {tuple(parameter.shape)}, {parameter.dtype}{frozen}"
        )
    return signature


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a bare tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:100]
