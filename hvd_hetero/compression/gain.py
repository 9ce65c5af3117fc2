"""Compression gain and residual ratio: what every compression factor (CF) keeps and delays.

gain(CF) = ||top_k(a)||^2 / ||a||^2 with a the gradient plus residual (GraVAC, arXiv 2305.12201,
section III). Energies are summed over coordinates, steps and ranks first and divided last: a mean
of ratios would give a step or rank with hardly any gradient the weight of a large one.

rho(CF) = ||sum_i e_i|| / ||sum_i r_i g_i||, over ranks i: how many gradients wait in residuals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_hetero.errors import ConfigurationError

_PIECE_ELEMENTS = 1 << 16


class Worth(NamedTuple):
    """Of a factor in steady state: gain; rho; and the coherence of the ranks' residuals.

    coherence: ||sum_i e_i||^2 / (n sum_i ||e_i||^2) over n ranks, 1 where all hold the same back
    and 1/n where what they hold back has nothing in common.
    """

    gain: float
    rho: float
    coherence: float = 1.0


@dataclass(frozen=True)
class Curves:
    """What one window's samples of all ranks say; see ``sample.GradientSample``.

    Args:
        cfs: the compression factors, ascending.
        gain: of each factor, as if it had been in force for long (shadow residuals).
        momentary: gain of each factor on gradient plus residual as they are now. The residual is
            that of the factor in force, which flatters every higher one.
        rho: residual ratio of each factor as if it had been in force for long.
        coherence: of each factor, likewise; see ``Worth``.
        residual_ratio: of the residual that really is there, at the window's end.
        raw_energy: mean over steps and ranks of ||r_i g_i||^2, for the whole model. It does not
            depend on the factor, so it tells whether training itself is changing.
        total_energy: mean over steps and ranks of ||a_i||^2, for the whole model.
        measurements: steps times ranks behind the means; 0 when nothing was sampled.
        bucket_entries: for each factor, how many entries of each bucket a top-k of the whole
            model would take, per step and rank; feed to ``allocation.allocate``.
    """

    cfs: tuple[float, ...]
    gain: Mapping[float, float]
    momentary: Mapping[float, float]
    rho: Mapping[float, float]
    coherence: Mapping[float, float]
    residual_ratio: float
    raw_energy: float
    total_energy: float
    measurements: int
    bucket_entries: Mapping[float, tuple[float, ...]]

    def is_finite(self) -> bool:
        """Return whether no number is infinite or NaN."""
        by_factor = (self.gain, self.momentary, self.rho, self.coherence)
        curves = [number for one in by_factor for number in one.values()]
        numbers = (self.raw_energy, self.total_energy, self.residual_ratio, *curves)
        return all(math.isfinite(number) for number in numbers)

    def at(self, cf: float) -> Worth:
        """Return what ``cf`` is worth in steady state.

        Raises:
            ConfigurationError: ``cf`` was not measured.
        """
        if cf not in self.gain:
            raise ConfigurationError(f"cf={cf:g} was not measured: known are only {list(self.cfs)}")
        return Worth(self.gain[cf], self.rho[cf], self.coherence[cf])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values, one list per field in the order of ``cfs``."""
        return {
            "cfs": list(self.cfs),
            "gain": [self.gain[cf] for cf in self.cfs],
            "momentary": [self.momentary[cf] for cf in self.cfs],
            "rho": [self.rho[cf] for cf in self.cfs],
            "coherence": [self.coherence[cf] for cf in self.cfs],
            "residual_ratio": self.residual_ratio,
            "raw_energy": self.raw_energy,
            "total_energy": self.total_energy,
            "measurements": self.measurements,
            "bucket_entries": [list(self.bucket_entries[cf]) for cf in self.cfs],
        }


def energy(values: Tensor) -> float:
    """Return the sum of squares of the flat ``values`` [d], added up in float64.

    Never holds a float64 copy of all of them.
    """
    values = values.detach()
    if values.is_cuda:
        return float(torch.linalg.vector_norm(values, dtype=torch.float64) ** 2)
    # Pieces that stay in a core's cache: 10 M floats take a fifth of vector_norm's time.
    result = 0.0
    for piece in torch.split(values, _PIECE_ELEMENTS):
        wide = piece.to(torch.float64)
        result += float(torch.dot(wide, wide))
    return result
