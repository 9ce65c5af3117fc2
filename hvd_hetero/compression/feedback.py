"""Error feedback: what was not sent is added to the next gradient (Stich et al., arXiv 1809.07599).

The life of one step::

    feedback.work[segment] = weight * gradient      # every segment: work holds anything before
    sparse = feedback.select(k)                     # the best of a = weighted gradient + residual
    packed = pack(sparse, "float16")
    feedback.sent(sparse.indices, packed.sent)      # rounding stays in the residual
    feedback.commit()                               # or drop(), when the step was not applied

Or ``compensate()`` in place of ``select``, to send something else of a.

The law it keeps: what was applied + residual = sum of the weighted gradients of applied steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_hetero.compression.gain import energy
from hvd_hetero.compression.topk import Selector, SparseGradient, value_dtype
from hvd_hetero.errors import ConfigurationError, HeteroError, check_float, check_int


@dataclass(eq=False)
class _Pending:
    """A step between ``compensate`` or ``select`` and ``commit`` or ``drop``."""

    fraction: float
    keep: tuple[slice, ...]
    recorded: bool = False
    indices: Tensor | None = None
    values: Tensor | None = None


class ErrorFeedback:
    """The residual of one flat bucket, and the buffer in which the next gradient is built.

    Two buffers of d elements change roles at ``commit``, so take ``work`` and ``residual`` anew
    at every step and never hold on to them.

    Args:
        elements: d, the length of the bucket.
        dtype: dtype of the gradients; the buffers are float64 for float64 and float32 otherwise
            (``value_dtype``). Adding a half gradient to ``work`` in place converts it first.
        device: where both buffers lie.

    Raises:
        ConfigurationError: ``elements`` is negative.
        UnsupportedError: ``dtype`` is not real floating point.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.elements = check_int("elements", elements, minimum=0)
        self.dtype = value_dtype(dtype)
        self._work = torch.zeros(self.elements, dtype=self.dtype, device=device)
        self._selector = Selector()
        # None until something stays behind: dense training needs one buffer, not two.
        self._residual_or_none: Tensor | None = None
        self._empty = True
        self._pending: _Pending | None = None

    @property
    def work(self) -> Tensor:
        """[d], undefined at the start of a step: write the weighted gradients here, all of them.

        Only segments that ``keep`` names in this step need no writing.
        """
        return self._work

    @property
    def residual(self) -> Tensor:
        """[d], what has not been sent yet, in weighted units. Read only; see ``load``."""
        return self._residual

    @property
    def _residual(self) -> Tensor:
        if self._residual_or_none is None:
            self._residual_or_none = torch.zeros_like(self._work)
        return self._residual_or_none

    @property
    def is_empty(self) -> bool:
        """True when the residual is known to be zero everywhere, without looking at it."""
        return self._empty

    @property
    def pending(self) -> bool:
        """True between ``compensate`` or ``select`` and ``commit`` or ``drop``."""
        return self._pending is not None

    def compensate(self, keep: Sequence[slice] = ()) -> Tensor:
        """Add the residual to ``work`` in place and return ``work``, the a_i to send from.

        Args:
            keep: segments of parameters without a gradient in this step. They send nothing: a_i is
                zero there, and their residual is the same after ``commit``.

        Raises:
            HeteroError: the previous step was neither committed nor dropped.
        """
        return self.compensate_fraction(1.0, keep)

    def compensate_fraction(self, fraction: float, keep: Sequence[slice] = ()) -> Tensor:
        """Add only ``fraction`` of the residual to ``work``; the rest stays for later steps.

        For emptying the residual over n dense steps instead of sending many gradient norms at
        once: fractions 1/n, 1/(n-1), ..., 1 send equal parts of what was there.

        Args:
            fraction: in [0, 1]; 1 is ``compensate``.
            keep: as in ``compensate``.

        Raises:
            ConfigurationError: ``fraction`` is out of range.
            HeteroError: the previous step was neither committed nor dropped.
        """
        fraction = check_float("fraction", fraction, minimum=0.0, maximum=1.0)
        self._refuse_open_step("compensate")
        if not self._empty and fraction > 0.0:
            self._work.add_(self._residual, alpha=fraction)
        for segment in keep:
            self._work[segment].zero_()
        self._pending = _Pending(fraction, tuple(keep))
        return self._work

    def select(self, k: int, keep: Sequence[slice] = ()) -> SparseGradient:
        """Compensate and return the k entries of a_i of largest magnitude (``Selector.select``).

        Without segments to keep both are done in one pass over memory.

        Args:
            k: number of entries, clipped to [0, d].
            keep: as in ``compensate``.

        Raises:
            ConfigurationError: ``k`` is negative.
            HeteroError: the previous step was neither committed nor dropped.
        """
        k = check_int("k", k, minimum=0)
        self._refuse_open_step("select")
        if keep:
            selected = self._selector.select(self.compensate(keep), k)
        else:
            residual = None if self._empty else self._residual
            selected = self._selector.select(self._work, k, add=residual)
        self._pending = _Pending(1.0, tuple(keep))
        return selected

    def sent(self, indices: Tensor | None, values: Tensor | None = None) -> None:
        """Record which entries of a_i go out, and as what.

        Args:
            indices: flat int64, distinct; None for all entries.
            values: [k], what the receivers decode at ``indices``; the difference to a_i stays in
                the residual. None when a_i itself arrives.

        Raises:
            ConfigurationError: the indices are not a flat int64 tensor, or values come without
                indices or in another shape.
            HeteroError: there is no open step.
        """
        step = self._pending
        if step is None:
            raise HeteroError("sent: no step is open: call compensate() or select() first")
        if indices is not None and (indices.dtype != torch.int64 or indices.dim() != 1):
            raise ConfigurationError(
                f"indices of dtype {indices.dtype} and shape {tuple(indices.shape)}: "
                "must be a flat torch.int64 tensor"
            )
        if values is not None and (indices is None or values.shape != indices.shape):
            raise ConfigurationError(
                f"values of shape {tuple(values.shape)}: need indices of the same shape"
            )
        step.indices, step.values, step.recorded = indices, values, True

    def commit(self) -> None:
        """The step was applied: keep what was not sent.

        Does nothing when no step is open.

        Raises:
            HeteroError: ``sent`` was not called in this step.
        """
        step = self._pending
        if step is None:
            return
        if not step.recorded:
            raise HeteroError("commit: what was sent is not known: call sent() first")
        self._pending = None
        if step.indices is None:
            self._commit_all(step)
        else:
            self._commit_some(step, step.indices)

    def drop(self) -> None:
        """The step never happened: the residual is as it was, bit for bit."""
        self._pending = None

    def load(self, residual: Tensor) -> None:
        """Copy ``residual`` [d] in (from a checkpoint), and forget any open step.

        Raises:
            ConfigurationError: the shape differs from [elements].
        """
        if residual.shape != self._work.shape:
            raise ConfigurationError(
                f"residual of shape {tuple(residual.shape)}: expected [{self.elements}]; the "
                "bucket has changed since it was saved"
            )
        self.drop()
        self._residual.copy_(residual)
        self._empty = not bool(self._residual.any())

    def residual_norm2(self) -> float:
        """Return the sum of squares of the residual, added up in float64."""
        return 0.0 if self._empty else energy(self._residual)

    def _refuse_open_step(self, call: str) -> None:
        if self._pending is not None:
            raise HeteroError(
                f"{call}: the previous step is still open, its residual would be added twice: "
                "call commit() or drop() first"
            )

    def _commit_all(self, step: _Pending) -> None:
        # The residual loses what was sent of it; the segments kept lose nothing.
        if self._empty or step.fraction == 0.0:
            return
        kept = [(segment, self._residual[segment].clone()) for segment in step.keep]
        if step.fraction == 1.0:
            self._residual.zero_()  # not a product: 0 * inf would stay for ever
            self._empty = not kept
        else:
            self._residual.mul_(1.0 - step.fraction)
        for segment, values in kept:
            self._residual[segment].copy_(values)

    def _commit_some(self, step: _Pending, indices: Tensor) -> None:
        # Of several ways to write single entries the fastest on CPUs, by half.
        if step.values is None:
            self._work[indices] = 0.0  # not a difference: inf - inf would stay for ever
        else:
            self._work.index_add_(0, indices, step.values, alpha=-1.0)
        if not self._empty:
            if step.fraction < 1.0:
                self._work.add_(self._residual, alpha=1.0 - step.fraction)
            for segment in step.keep:
                self._work[segment].copy_(self._residual[segment])
        sent_everything = (
            indices.numel() == self.elements and step.values is None and step.fraction == 1.0
        )
        # With segments kept the old state still matters: an empty residual stays empty there.
        empty = sent_everything and (self._empty or not step.keep)
        self._work, self._residual_or_none = self._residual, self._work
        self._empty = empty
