"""Exact top-k selection and the sparse gradient it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_hetero.compression.candidates import Candidates
from hvd_hetero.errors import ConfigurationError, UnsupportedError, check_float, check_int

# The integer types as wide as a floating point type of so many bytes.
_INTEGERS: dict[int, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    1: (torch.int8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}
# By how much the threshold may fall from step to step before the first pass finds too few, in
# octaves of magnitude; it adapts between the two bounds.
_FIRST_MARGIN = 0.2
_LEAST_MARGIN = 0.01
_LARGEST_MARGIN = 1.0
_SAMPLE_ELEMENTS = 1 << 14


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


class Selector:
    """Exact top-k of one bucket, step after step.

    Last step's threshold, lowered a little, sorts out most entries in one pass over blocks that
    stay in a core's cache; a partition of the few candidates settles the rest. The hint decides
    about speed only: what is selected is a function of ``values`` and ``k``.

    Magnitudes are compared as the integers that their bits are without the sign. That order is
    the order of the magnitudes for every finite value, denormals and zeros included, with
    infinities above and NaN above those, so a non-finite entry is always selected. That is
    wanted: it shows in what is sent, where a residual would bring it back at every later step.

    Keeps a buffer of about 1.5 k entries between steps. Not for use by two threads at once.
    """

    def __init__(self) -> None:
        self._hint: int | None = None
        self._margin = _FIRST_MARGIN
        self._scratch: Tensor | None = None
        self._candidates: Candidates | None = None

    def select(self, values: Tensor, k: int, *, add: Tensor | None = None) -> SparseGradient:
        """Return the k entries of largest magnitude.

        Among equal magnitudes at the threshold the lowest indices win on CPU tensors; elsewhere
        the device's topk decides. Other devices are never waited for.

        Args:
            values: [d], floating point, contiguous.
            k: number of entries, clipped to [0, d] so that an empty gradient selects nothing.
            add: [d] of the same dtype and device; ``values += add`` in place first, in the same
                pass over memory where the dtype is float32 or float64.

        Raises:
            ConfigurationError: ``values`` or ``add`` is not flat and contiguous, they do not fit
                together, or ``k`` is negative. Nothing has been added then.
        """
        values = values.detach()
        k = min(check_int("k", k, minimum=0), values.numel())
        _check_flat("values", values)
        if add is not None:
            add = add.detach()
            _check_flat("add", add)
            if (add.shape, add.dtype, add.device) != (values.shape, values.dtype, values.device):
                raise ConfigurationError(
                    f"add: {add.dtype} of shape {tuple(add.shape)} on {add.device}, but values: "
                    f"{values.dtype} of shape {tuple(values.shape)} on {values.device}: must agree"
                )
        if values.device.type == "cpu" and 0 < k < values.numel():
            return self._select_on_cpu(values, k, add)
        if add is not None:
            values.add_(add)
        if k in (0, values.numel()):
            indices = torch.arange(k, dtype=torch.int64, device=values.device)
        else:
            indices = self._topk_indices(values, k)
        return SparseGradient.gather(values, indices)

    def _topk_indices(self, values: Tensor, k: int) -> Tensor:
        if self._scratch is None or self._scratch.shape != values.shape:
            self._scratch = torch.empty_like(values)
        torch.abs(values, out=self._scratch)
        return torch.topk(self._scratch, k, sorted=False).indices.sort().values

    def _select_on_cpu(self, values: Tensor, k: int, add: Tensor | None) -> SparseGradient:
        if add is not None and values.dtype not in (torch.float32, torch.float64):
            values.add_(add)  # numpy adds half types slowly or, bfloat16, not at all
            add = None
        bits = _bits(values)
        if self._candidates is None or self._candidates.dtype != bits.dtype:
            self._candidates, self._hint = Candidates(bits.dtype), None
        candidates, hint = self._candidates, self._hint
        octave = 1 / torch.finfo(values.dtype).eps
        if hint is None:
            guess = candidates.guess(_sample(values, add), k, len(bits))
        else:
            guess = max(0, hint - int(self._margin * octave))
        addition = None if add is None else (values.numpy(), add.numpy())
        if not candidates.scan(bits, k, guess, addition):
            guess = candidates.guess(_sample(values), k, len(bits))
            if not candidates.scan(bits, k, guess):
                candidates.scan(bits, k, 0)
        indices, raw, threshold = candidates.best(k)
        if hint is not None:
            # As wide as the threshold has fallen lately, half as much again.
            fall = 1.5 * (hint - threshold) / octave
            self._margin = min(max(fall, 0.9 * self._margin, _LEAST_MARGIN), _LARGEST_MARGIN)
        self._hint = threshold
        selected = torch.from_numpy(raw.view(f"i{raw.itemsize}")).view(values.dtype)
        return SparseGradient(selected, torch.from_numpy(indices), values.numel())


def _bits(values: Tensor) -> NDArray[Any]:
    """Return the memory of ``values`` as unsigned integers."""
    integer, unsigned = _INTEGERS[values.element_size()]
    return values.view(integer).numpy().view(unsigned)


def _sample(values: Tensor, add: Tensor | None = None) -> NDArray[Any]:
    """Return the bits of some entries of ``values + add``."""
    # An odd distance, so as not to walk down one column of a matrix.
    some = slice(None, None, values.numel() // _SAMPLE_ELEMENTS | 1)
    return _bits(values[some] if add is None else values[some] + add[some])


def _check_flat(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
        raise ConfigurationError(
            f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: must be flat, contiguous and floating point"
        )
