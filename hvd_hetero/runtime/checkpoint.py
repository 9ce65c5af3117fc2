"""What a checkpoint must hold besides model and optimizer: residuals, by parameter name.

A state is a dict of plain values and tensors, loadable with ``torch.load(weights_only=True)``.
Every rank has its own, since every rank holds back other parts of the gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.runtime.exchanger import GradientExchanger

logger = logging.getLogger("hvd_hetero")

VERSION = 1

State = dict[str, Any]


def residuals_by_name(exchanger: GradientExchanger) -> dict[str, torch.Tensor]:
    """Return copies of the residuals in the shapes of their parameters; {} if all are empty."""
    if all(bucket.feedback.is_empty for bucket in exchanger.buckets):
        return {}
    return {
        member.name: bucket.feedback.residual[member.span].view(member.parameter.shape).clone()
        for bucket in exchanger.buckets
        for member in bucket.members
    }


def put_residuals(exchanger: GradientExchanger, residuals: Mapping[str, torch.Tensor]) -> None:
    """Put residuals where their parameters lie now, whatever the buckets were when saved.

    A parameter without a residual in ``residuals`` gets zeros.

    Raises:
        ConfigurationError: a residual has another shape than its parameter, or no parameter has
            its name: what it holds back would be lost.
    """
    members = {m.name: m for bucket in exchanger.buckets for m in bucket.members}
    for name, residual in residuals.items():
        if name not in members:
            raise ConfigurationError(
                f"the state has a residual of {name!r}, but no compressed parameter has this name; "
                "what it holds back would be lost: use the names of the run that saved it, or take "
                "it out of state['residuals'] to give it up"
            )
        shape = tuple(members[name].parameter.shape)
        if tuple(residual.shape) != shape:
            raise ConfigurationError(
                f"the residual of parameter {name!r} has shape {tuple(residual.shape)}, the "
                f"parameter has {shape}: the state belongs to another model"
            )
    missing = [name for name in members if name not in residuals]
    if residuals and missing:
        logger.warning(
            "the state has no residual for %d parameters (%s%s); they start with nothing held back",
            len(missing),
            ", ".join(missing[:3]),
            ", ..." if len(missing) > 3 else "",
        )
    for bucket in exchanger.buckets:
        flat = torch.zeros_like(bucket.feedback.work)
        for member in bucket.members:
            if member.name in residuals:
                flat[member.span].copy_(residuals[member.name].flatten())
        bucket.feedback.load(flat)


def state_for(
    states: State | Sequence[State], rank: int, ranks: int
) -> tuple[State, dict[str, torch.Tensor]]:
    """Return the state to go on from and this rank's residuals, out of what was saved.

    Saved by as many ranks as run now, every rank takes its own. Otherwise all states are needed:
    rank r takes the sum of the residuals of the old ranks r, r + ranks, r + 2 ranks, ..., so that
    the sum over ranks, which is what counts, stays the same.

    Args:
        states: this rank's state, or those of all ranks that saved, in any order.

    Raises:
        ConfigurationError: it is no such state, states are missing or given twice, or a single
            state is not this rank's.
    """
    given = [states] if isinstance(states, Mapping) else list(states)
    for one in given:
        if not isinstance(one, Mapping) or one.get("version") != VERSION:
            raise ConfigurationError(
                f"not a state of hetero_state_dict() (version {VERSION} expected): {_short(one)}"
            )
    by_rank = {int(one["rank"]): dict(one) for one in given}
    saved_ranks = int(given[0]["ranks"]) if given else 0
    if len(given) == 1 and saved_ranks == ranks:
        own = by_rank.get(rank)
        if own is None:
            raise ConfigurationError(
                f"the state of rank {given[0]['rank']} was given to rank {rank}: every rank loads "
                "the state that it saved, or a list of all of them"
            )
        return own, dict(own["residuals"])
    if not given or len(by_rank) != len(given) or sorted(by_rank) != list(range(saved_ranks)):
        raise ConfigurationError(
            f"states of ranks {sorted(int(one['rank']) for one in given)} were given, saved by a "
            f"job of {saved_ranks} ranks, to a job of {ranks}: give the list of the states of all "
            f"{saved_ranks} ranks, each once"
        )
    steps = {int(one["steps"]) for one in given}
    if len(steps) > 1:
        raise ConfigurationError(
            f"the states were saved after {sorted(steps)} steps: give states of one checkpoint"
        )
    if saved_ranks == ranks:
        return by_rank[rank], dict(by_rank[rank]["residuals"])
    residuals: dict[str, torch.Tensor] = {}
    for old in range(rank, saved_ranks, ranks):
        for name, residual in by_rank[old]["residuals"].items():
            residuals[name] = residuals[name] + residual if name in residuals else residual
    return by_rank[0], residuals


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
