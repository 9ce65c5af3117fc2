"""Exact top-k selection and the sparse gradient it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_hetero.errors import ConfigurationError, UnsupportedError, check_float, check_int


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are accumulated, selected and sent.

    float64 stays float64, every other real floating point type becomes float32: a residual in a
    half type would lose what it is there to keep.

    Raises:
        UnsupportedError: complex, integer and boolean gradients.
    """
    if not dtype.is_floating_point:
        raise UnsupportedError(
            f"dtype={dtype}: only real floating point gradients can be compressed; leave such "
            "parameters out of the compressed optimizer"
        )
    return torch.float64 if dtype == torch.float64 else torch.float32


def k_for(elements: int, cf: float) -> int:
    """Return how many of ``elements`` are sent at compression factor ``cf``.

    ``min(elements, max(1, round(elements / cf)))``; 0 when there are no elements. Every caller
    that selects, logs or counts bytes takes k from here, so that they cannot disagree.

    Raises:
        ConfigurationError: ``cf`` is below 1 or not finite, or ``elements`` is negative.
    """
    elements = check_int("elements", elements, minimum=0)
    cf = check_float("cf", cf, minimum=1.0)
    return min(elements, max(1, round(elements / cf)))


@dataclass(frozen=True, eq=False)
class SparseGradient:
    """Some entries of a flat gradient.

    Args:
        values: [k], floating point.
        indices: [k], int64, strictly ascending, each in [0, elements). The order and range are the
            caller's promise: checking them would make a GPU wait at every step.
        elements: d, the length of the dense gradient.

    Raises:
        ConfigurationError: shapes, dtypes or devices do not fit together. An int32 or floating
            point index would silently be wrong for large gradients, hence int64 only.
    """

    values: Tensor
    indices: Tensor
    elements: int

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int64:
            raise ConfigurationError(
                f"indices.dtype={self.indices.dtype}: must be torch.int64 (narrower or floating "
                "point types cannot name every element): convert them before any arithmetic"
            )
        if not self.values.is_floating_point():
            raise ConfigurationError(
                f"values.dtype={self.values.dtype}: must be a real floating point type"
            )
        if self.values.dim() != 1 or self.values.shape != self.indices.shape:
            raise ConfigurationError(
                f"values of shape {tuple(self.values.shape)} and indices of shape "
                f"{tuple(self.indices.shape)}: both must be flat and equally long"
            )
        if self.values.device != self.indices.device:
            raise ConfigurationError(
                f"values on {self.values.device} and indices on {self.indices.device}: "
                "must be on one device"
            )
        if self.k > self.elements:
            raise ConfigurationError(
                f"elements={self.elements}: cannot hold the {self.k} entries given"
            )

    @property
    def k(self) -> int:
        """Number of entries."""
        return self.values.numel()

    @classmethod
    def gather(cls, values: Tensor, indices: Tensor) -> SparseGradient:
        """Take the entries at ``indices`` (int64, ascending) out of the flat ``values`` [d]."""
        return cls(values.index_select(0, indices), indices, values.numel())

    def to_dense(self) -> Tensor:
        """Return the flat gradient [elements] with zeros where nothing was selected."""
        dense = torch.zeros(self.elements, dtype=self.values.dtype, device=self.values.device)
        return dense.index_copy_(0, self.indices, self.values)


def select(values: Tensor, k: int) -> Tensor:
    """Return the ascending int64 indices of the k entries of largest magnitude.

    Exact: the magnitudes selected are those of ``torch.topk(values.abs(), k)``. Among equal
    magnitudes at the threshold the choice is torch's: the same for the same tensor on the same
    device and build, but not by position. Ranks send their own indices, so nothing depends on it.

    NaN counts as larger than infinity (torch's order), so it is always selected. That is wanted: a
    NaN that stayed in the residual would come back at every later step, whereas one that is sent
    shows in the gradients, where GradScaler or the user looks for it, and ``drop`` removes it.

    Args:
        values: [d], floating point, any device.
        k: number of entries, clipped to [0, d] so that an empty gradient selects nothing.

    Raises:
        ConfigurationError: ``values`` is not flat, or ``k`` is negative.
    """
    if values.dim() != 1:
        raise ConfigurationError(f"values of shape {tuple(values.shape)}: must be flat")
    elements = values.numel()
    k = min(check_int("k", k, minimum=0), elements)
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if k == elements:
        return torch.arange(elements, dtype=torch.int64, device=values.device)
    indices = torch.topk(values.detach().abs(), k, sorted=False).indices
    return indices.sort().values
