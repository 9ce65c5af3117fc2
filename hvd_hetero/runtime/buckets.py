"""Flat buckets of gradients, exchanged as soon as they are full.

A bucket holds whole parameters of one dtype and device, in reverse parameter order, which is about
the order in which backward finishes them. Buckets are launched in their own order, whatever order
the hooks fire in, and hold exactly the parameters that have hooks: one without would never fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hvd_hetero.compression.feedback import ErrorFeedback
from hvd_hetero.compression.topk import value_dtype

PARTS = 8  # in which exchanges are timed that are not by buckets


@dataclass(frozen=True)
class Member:
    """One parameter's place in a bucket: elements ``[start, stop)`` of the flat tensor."""

    name: str
    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


class Bucket:
    """Weighted gradients of some parameters as one flat tensor, with their residual."""

    def __init__(self, index: int, members: Sequence[Member]) -> None:
        parameter = members[0].parameter
        self.index = index
        self.members = tuple(members)
        self.elements = members[-1].stop
        self._parameter_dtype = parameter.dtype
        self.dtype = value_dtype(parameter.dtype)
        self.feedback = ErrorFeedback(self.elements, self.dtype, parameter.device)
        self._waiting_for = {id(member.parameter) for member in members}
        self._seen: dict[str, tuple[torch.Tensor | None, int]] = {}
        self._added: set[int] = set()
        self._complete = False

    @property
    def full(self) -> bool:
        return not self._waiting_for

    @property
    def waiting(self) -> list[Member]:
        """Members whose gradient is not complete yet."""
        return [member for member in self.members if id(member.parameter) in self._waiting_for]

    def note(self, member: Member) -> bool:
        """Take note of the member's gradient; return whether it is the first of this step."""
        first = id(member.parameter) not in self._added
        self._added.add(id(member.parameter))
        return first

    def add(self, member: Member, weight: float) -> None:
        """Add ``weight`` times the member's gradient to what is to be exchanged."""
        gradient = member.parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        view = self.feedback.work[member.span].view(member.parameter.shape)
        if weight == 0.0:  # of a mean over nothing, NaN as a rule: 0 * NaN would be NaN
            if self.note(member):
                view.zero_()
        elif not self.note(member):
            view.add_(gradient, alpha=weight)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, weight, out=view)
        else:
            view.copy_(gradient).mul_(weight)

    def complete(self, divisor: float) -> torch.Tensor:
        """Return the weighted gradient, ``work``, with zeros where there was none."""
        work = self.feedback.work
        if not self._complete:
            for member in self.members:
                if id(member.parameter) not in self._added:
                    work[member.span].zero_()
            if divisor != 1.0:
                work.mul_(1.0 / divisor)
            self._complete = True
        return work

    def mark_ready(self, member: Member) -> None:
        """The member's gradient is complete; from now on ``p.grad`` must not be changed."""
        self._waiting_for.discard(id(member.parameter))
        gradient = member.parameter.grad
        self._seen[member.name] = (gradient, 0 if gradient is None else gradient._version)

    def changed_member(self) -> Member | None:
        """Return a member whose ``p.grad`` was changed since it was taken, or None."""
        for member in self.members:
            gradient = member.parameter.grad
            seen, version = self._seen.get(member.name, (gradient, -1))
            if gradient is not seen or (
                gradient is not None and version >= 0 and gradient._version != version
            ):
                return member
        return None

    def reset(self) -> None:
        """Wait for all members again."""
        self._waiting_for = {id(member.parameter) for member in self.members}
        self._seen.clear()
        self._added.clear()
        self._complete = False

    def overlooked(self) -> list[Member]:
        """Members with a gradient no hook has seen: set by hand, or from before the hook."""
        return [
            member
            for member in self.members
            if id(member.parameter) not in self._added and _has_gradient(member.parameter)
        ]

    @property
    def can_stay(self) -> bool:
        """Whether Horovod can exchange these gradients in ``p.grad`` itself: it has no bfloat16."""
        return self._parameter_dtype in (torch.float16, torch.float32, torch.float64)

    @property
    def dense_dtype(self) -> torch.dtype:
        """The type in which gradients travel without compression."""
        return self._parameter_dtype if self.can_stay else self.dtype

    def gradient_or_zeros(self, member: Member) -> torch.Tensor:
        """Return ``p.grad``, made of zeros where there is none; frozen ones keep theirs."""
        parameter = member.parameter
        if not parameter.requires_grad:
            return torch.zeros_like(parameter)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def frozen_spans(self) -> list[slice]:
        """Spans of parameters frozen since they got their hook; they send nothing."""
        return [m.span for m in self.members if not m.parameter.requires_grad]

    def write_gradients(self, total: torch.Tensor, gradient_scale: float) -> None:
        """Write the exchanged gradient into ``p.grad`` of every member that is not frozen.

        ``gradient_scale``: of mixed precision, back in which ``p.grad`` is expected.
        """
        if gradient_scale != 1.0:
            total = total * gradient_scale
        for member in self.members:
            parameter = member.parameter
            if not parameter.requires_grad:
                continue
            part = total[member.span].view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                sparse = part.to_sparse(parameter.grad.sparse_dim()).to(parameter.dtype)
                parameter.grad.zero_().add_(sparse)
            else:
                parameter.grad.copy_(part)

    def describe(self) -> str:
        """Name the bucket by its parameters, as error messages and stall reports show it."""
        names = [member.name for member in self.members]
        listed = ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... , {names[-1]}"
        return f"bucket {self.index} ({listed})"


def _has_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return False
    return gradient.is_sparse or bool(gradient.any())


def build_buckets(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    first_index: int = 0,
) -> list[Bucket]:
    """Pack parameters, given in the order of the optimizer's groups, into buckets.

    A bucket is closed when the next parameter would take it over ``bucket_bytes`` or has another
    dtype or device. Depends on names, shapes, dtypes and order only.
    """
    groups: list[list[Member]] = []
    open_key: tuple[torch.dtype, torch.device] | None = None
    for name, parameter in reversed(list(named_parameters)):
        key = (parameter.dtype, parameter.device)
        itemsize = torch.empty((), dtype=value_dtype(parameter.dtype)).element_size()
        start = groups[-1][-1].stop if groups else 0
        if key != open_key or (start + parameter.numel()) * itemsize > bucket_bytes:
            groups.append([])
            open_key, start = key, 0
        groups[-1].append(Member(name, parameter, start, start + parameter.numel()))
    return [Bucket(first_index + number, members) for number, members in enumerate(groups)]


def parts_of(buckets: Sequence[Bucket]) -> tuple[dict[int, int], list[float]]:
    """Cut the parameters, in the order of launch, into about PARTS parts, for what goes piecewise.

    Returns by the id of a parameter its part, and each part's share of all elements.
    """
    members = [member for bucket in buckets for member in bucket.members]
    total = max(sum(member.parameter.numel() for member in members), 1)
    part_of: dict[int, int] = {}
    shares: list[float] = []
    before, last = 0, -1
    for member in members:
        place = PARTS * before // total
        if place != last:
            shares.append(0.0)
            last = place
        part_of[id(member.parameter)] = len(shares) - 1
        shares[-1] += member.parameter.numel() / total
        before += member.parameter.numel()
    return part_of, shares
