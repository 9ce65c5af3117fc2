"""Compression gain: the share of a gradient's energy that a compression factor would send.

gain(CF) = ||top_k(a)||^2 / ||a||^2 with a the gradient plus residual (GraVAC, arXiv 2305.12201,
section III). Energies are summed over buckets, steps and ranks first and divided last: a mean of
ratios would give a bucket of three elements the weight of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_hetero.compression.topk import k_for
from hvd_hetero.errors import ConfigurationError

_PIECE_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Energies:
    """Sums of squares, in float64, of one measurement or of many added up.

    Args:
        total: of a = gradient + residual.
        raw: of the gradient alone. It does not depend on the compression factor, so it tells
            whether training itself is changing.
        kept: for each compression factor measured, of the entries it would send.
        measurements: how many were added; ``raw / measurements`` compares sums of different
            numbers of steps. 0 only for the empty sum, ``Energies.zero()``.
    """

    total: float
    raw: float
    kept: Mapping[float, float]
    measurements: int = 1

    def __add__(self, other: Energies) -> Energies:
        """Add energies of the same factors.

        Raises:
            ConfigurationError: the factors differ, so that some ratio would be wrong.
        """
        if not isinstance(other, Energies):
            return NotImplemented
        if self.measurements and other.measurements and self.kept.keys() != other.kept.keys():
            raise ConfigurationError(
                f"energies measured at compression factors {sorted(self.kept)} and "
                f"{sorted(other.kept)}: only those of equal factors can be added"
            )
        factors = self.kept if self.measurements else other.kept
        return Energies(
            self.total + other.total,
            self.raw + other.raw,
            {cf: self.kept.get(cf, 0.0) + other.kept.get(cf, 0.0) for cf in factors},
            self.measurements + other.measurements,
        )

    @classmethod
    def zero(cls) -> Energies:
        """Return the empty sum."""
        return cls(0.0, 0.0, {}, 0)

    @classmethod
    def sum(cls, parts: Iterable[Energies]) -> Energies:
        """Add ``parts`` in their order; of nothing, ``zero()``."""
        result = cls.zero()
        for part in parts:
            result = result + part
        return result

    @property
    def raw_per_measurement(self) -> float:
        """Mean energy of the gradient alone; 0 for the empty sum."""
        return self.raw / self.measurements if self.measurements else 0.0

    def is_finite(self) -> bool:
        """Return whether no energy is infinite or NaN."""
        return all(math.isfinite(x) for x in (self.total, self.raw, *self.kept.values()))

    def gain(self, cf: float) -> float:
        """Return the share of the energy sent at ``cf``, in [0, 1]; 1 when there is none to lose.

        Raises:
            ConfigurationError: ``cf`` was not measured.
        """
        if cf not in self.kept:
            raise ConfigurationError(
                f"cf={cf:g} was not measured: its gain is known only for {sorted(self.kept)}"
            )
        if self.total == 0.0:
            return 1.0
        return min(1.0, self.kept[cf] / self.total)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; factors become strings that give back the same float."""
        return {
            "total": self.total,
            "raw": self.raw,
            "kept": {repr(float(cf)): energy for cf, energy in self.kept.items()},
            "measurements": self.measurements,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Energies:
        """Build from what ``to_dict`` returned."""
        kept = {float(cf): float(energy) for cf, energy in values["kept"].items()}
        return cls(float(values["total"]), float(values["raw"]), kept, int(values["measurements"]))


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


def measure(
    values: Tensor, indices_selected: Tensor | None, cfs: Sequence[float], *, raw: float
) -> Energies:
    """Return the energies of one bucket in one step, for every factor in ``cfs``.

    Multi-level (GraVAC, section III): the k largest of all are also the k largest of any larger
    top-k that contains them, so each factor is selected inside what the next lower one selected,
    and the first inside ``indices_selected`` if that is large enough.

    Args:
        values: [d], the a_i: gradient plus residual.
        indices_selected: int64 indices of an exact top-k of ``values``, best of the lowest factor
            in ``cfs``; None to select from all.
        cfs: compression factors, each at least 1.
        raw: energy of the gradient before the residual was added (``energy`` of ``work``).

    Raises:
        ConfigurationError: a factor is below 1 or not finite.
    """
    elements = values.numel()
    total = energy(values)
    pool = values.detach()
    selected = None if indices_selected is None else pool.index_select(0, indices_selected)
    kept: dict[float, float] = {}
    for cf in sorted(set(cfs)):  # k falls as the factor rises
        k = k_for(elements, cf)
        if selected is not None and k <= selected.numel() < pool.numel():
            pool = selected
        if k < pool.numel():
            pool = torch.topk(pool.abs(), k, sorted=False).values
        kept[float(cf)] = energy(pool)
    return Energies(total, raw, kept)
