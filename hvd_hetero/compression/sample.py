"""Gain and residual ratio of every compression factor (CF), from a sample of coordinates.

The same random coordinates on all ranks, of every bucket its share. Their gradient is read off
the buckets and fed to a shadow residual for every CF; at every fourth step gradient plus residual
is read too, for the gain of the moment. Once a window the sums of all ranks are added by one small
allreduce, and ``read`` turns them into ``Curves``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_hetero.compression.gain import Curves
from hvd_hetero.compression.shadow import Floats, Shadows, largest
from hvd_hetero.compression.sketch import SKETCH_SUMS, Sketch
from hvd_hetero.compression.topk import k_for
from hvd_hetero.errors import ConfigurationError, check_float, check_int

# Measured (benchmarks/shadow.py, 0.9 and 4.1 million parameters): 16,384 coordinates tell every
# gain up to CF 1000 within 5 %. Higher factors take less than ten of them a step, so large models,
# where it costs nothing to speak of, get more. From 2 million on it is a quarter of compression's
# own time at most; below, about a millisecond.
_LEAST_SAMPLE, _LARGEST_SAMPLE, _MODEL_SHARE = 1 << 14, 1 << 16, 256
_SAFE_ENERGY = 1e-30
_MOMENTARY_STEPS = 4
_NUMBERS = ("_steps", "_looks", "_raw", "_raw_looked_at", "_total", "_turn", "_threshold")


class GradientSample:
    """What one rank knows of its gradients, at a fraction of the cost of compressing them.

    Args:
        bucket_elements: length of every bucket.
        cfs: compression factors to measure.
        device: where the buckets lie, or most of them.
        sample_elements: size of the sample, the whole model where that is smaller; None: a 256th
            of the model, between 16,384 and 65,536.
        seed: of coordinates and signs; equal on all ranks.

    Raises:
        ConfigurationError: a factor is below 1, or a number is out of range.
    """

    def __init__(
        self,
        bucket_elements: Sequence[int],
        cfs: Sequence[float],
        *,
        device: torch.device | str = "cpu",
        sample_elements: int | None = None,
        seed: int = 0,
    ) -> None:
        elements = [check_int("bucket_elements", one, minimum=0) for one in bucket_elements]
        self.cfs = tuple(sorted({check_float("cfs", cf, minimum=1.0) for cf in cfs}))
        self.bucket_elements = tuple(elements)
        total = sum(elements)
        if sample_elements is None:
            sample_elements = min(max(total // _MODEL_SHARE, _LEAST_SAMPLE), _LARGEST_SAMPLE)
        wanted = min(total, check_int("sample_elements", sample_elements, minimum=1))
        counts = [min(d, math.ceil(d * wanted / total)) if total else 0 for d in elements]
        random = np.random.default_rng(check_int("seed", seed, minimum=0))
        self._indices = [
            torch.from_numpy(_one_in_each_run(d, count, random)).to(device) if count < d else None
            for d, count in zip(elements, counts, strict=True)
        ]
        self._offsets = np.cumsum([0, *counts], dtype=np.int64)
        self.size = int(self._offsets[-1])
        self._scale = total / self.size if self.size else 1.0
        takes = [k_for(total, cf) / self._scale for cf in self.cfs]
        self._takes = takes
        self._shadows = Shadows(self.cfs, takes, self._offsets)
        self._gradient = torch.zeros(self.size, device=device)
        self._compensated = torch.zeros(self.size, device=device)
        self._has_compensated = [False] * len(elements)
        self._sketch = Sketch(self.size, random)
        self._threshold = 0.0
        self._turn = 0
        self._clear()

    # ---- one step -------------------------------------------------------------------------------

    def take_gradient(self, bucket: int, work: Tensor) -> None:
        """Read the weighted gradient of a bucket, [d] before its residual is added."""
        self._take(bucket, work, self._gradient)

    def take_compensated(self, bucket: int, a: Tensor) -> None:
        """Read gradient plus residual of a bucket, [d].

        To be left out where there is no residual: the gradient counts then.
        """
        if self._momentary_due:
            self._take(bucket, a, self._compensated)
            self._has_compensated[bucket] = True

    def end_step(self) -> None:
        """Measure what was taken; a step with a non-finite entry counts as dropped."""
        gradient = self._gradient.cpu().numpy()
        raw = _energy(gradient)
        if not math.isfinite(raw) or (self._momentary_due and not self._measure(gradient, raw)):
            self.drop_step()
            return
        self.drop_step()
        self._steps += 1
        self._raw += raw
        self._shadows.step(gradient)

    def drop_step(self) -> None:
        """Forget what was taken in this step."""
        self._has_compensated = [False] * len(self._has_compensated)

    @property
    def _momentary_due(self) -> bool:
        return self._steps % _MOMENTARY_STEPS == 0

    def _measure(self, gradient: Floats, raw: float) -> bool:
        """Take the gain of the moment and the gradient's sketches; False if not finite."""
        for bucket, present in enumerate(self._has_compensated):
            if not present:
                place = slice(int(self._offsets[bucket]), int(self._offsets[bucket + 1]))
                self._compensated[place] = self._gradient[place]
        compensated = self._compensated.cpu().numpy()
        total = _energy(compensated)
        if not math.isfinite(total):
            return False
        self._turn += 1
        self._looks += 1
        self._raw_looked_at += raw
        self._total += total
        magnitudes = np.abs(compensated)
        most = math.ceil(max(self._takes, default=0.0))
        indices, self._threshold = largest(magnitudes, most, self._threshold)
        descending = np.sort(magnitudes[indices])[::-1].astype(np.float64)
        kept = np.concatenate([[0.0], np.cumsum(descending * descending)])
        self._momentary += np.interp(self._takes, np.arange(kept.size), kept)
        for stride in self._shadows.offsets:
            self._gradient_sketches[stride] += self._sketch.of(gradient[::stride], self._turn)
        self._left = self._sketch.of(compensated - gradient)
        return True

    def _take(self, bucket: int, values: Tensor, into: Tensor) -> None:
        begin, end = int(self._offsets[bucket]), int(self._offsets[bucket + 1])
        indices, place, values = self._indices[bucket], into[begin:end], values.detach()
        if indices is None:
            place.copy_(values)
            return
        if indices.device != values.device:  # buckets may lie on several devices
            self._indices[bucket] = indices = indices.to(values.device)
        if (values.dtype, values.device) == (place.dtype, place.device):
            torch.index_select(values, 0, indices, out=place)
        else:
            place.copy_(values.index_select(0, indices))

    # ---- one window -----------------------------------------------------------------------------

    def sums(self) -> Tensor:
        """Return what was measured since the last call, float64 [fixed length], and start anew.

        Additive over ranks; hand the sum over ranks to ``read``.
        """
        self._shadows.end_window()
        shadows = self._shadows.shadows
        parts: list[Any] = [
            [1.0, self._steps, self._looks, self._raw, self._raw_looked_at, self._total],
            self._momentary,
            *([shadow.kept, shadow.total] for shadow in shadows),
            *(shadow.entries for shadow in shadows),
            *(self._sketch.of(shadow.offset) for shadow in shadows),
            *(self._gradient_sketches[stride] for stride in self._shadows.offsets),
            self._left,
        ]
        self._clear()
        return torch.from_numpy(np.concatenate([np.asarray(part, np.float64) for part in parts]))

    def read(self, sums_over_ranks: Tensor) -> Curves:
        """Return the curves of a window from the sum of all ranks' ``sums()``.

        Raises:
            ConfigurationError: the length is not that of ``sums()``.
        """
        numbers = sums_over_ranks.cpu().numpy()
        factors, buckets = len(self.cfs), len(self.bucket_elements)
        levels = list(self._shadows.offsets)
        lengths = [6, factors, 2 * factors, factors * buckets]
        lengths += [many * SKETCH_SUMS for many in (factors, len(levels), 1)]
        if numbers.shape != (sum(lengths),):
            raise ConfigurationError(
                f"sums of shape {numbers.shape}: expected [{sum(lengths)}]; ranks must measure the "
                "same buckets at the same factors"
            )
        head, kept, energies, entries, residuals, gradients, left = np.split(
            numbers, np.cumsum(lengths)[:-1]
        )
        ranks, steps, looks, raw, raw_looked_at, total = (float(number) for number in head)
        energies, entries = energies.reshape(factors, 2), entries.reshape(factors, buckets)
        residuals = residuals.reshape(factors, SKETCH_SUMS)
        # Sketches know of some steps only; how much these stand out is known of each rank's own.
        per_step = ranks * raw / (steps * raw_looked_at) if steps and raw_looked_at else 0.0
        energy = {
            stride: float(np.dot(sketch, sketch)) * per_step
            for stride, sketch in zip(levels, gradients.reshape(-1, SKETCH_SUMS), strict=True)
        }
        strides = self._shadows.strides
        return Curves(
            cfs=self.cfs,
            gain={cf: _share(*energies[i]) for i, cf in enumerate(self.cfs)},
            momentary={cf: _share(kept[i], total) for i, cf in enumerate(self.cfs)},
            rho={cf: _ratio(residuals[i], energy[strides[i]]) for i, cf in enumerate(self.cfs)},
            coherence={
                cf: _coherence(residuals[i], energies[i], ranks, steps)
                for i, cf in enumerate(self.cfs)
            },
            residual_ratio=_ratio(left, energy[1]),
            raw_energy=raw * self._scale / max(steps, 1.0),
            total_energy=total * self._scale / max(looks, 1.0),
            measurements=round(steps),
            bucket_entries={
                cf: self._whole(entries[i] / max(steps, 1.0), strides[i])
                for i, cf in enumerate(self.cfs)
            },
        )

    def _whole(self, entries: NDArray[np.float64], stride: int) -> tuple[float, ...]:
        """Scale entries of each bucket's sample up to the whole bucket."""
        sampled = np.diff(self._shadows.offsets[stride])
        return tuple((entries * self.bucket_elements / np.maximum(sampled, 1)).tolist())

    def _clear(self) -> None:
        self._steps = self._looks = 0
        self._raw = self._raw_looked_at = self._total = 0.0
        self._momentary = np.zeros(len(self.cfs))
        self._gradient_sketches = {
            stride: np.zeros(SKETCH_SUMS) for stride in self._shadows.offsets
        }
        self._left = np.zeros(SKETCH_SUMS)
        for shadow in self._shadows.shadows:
            shadow.clear()

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that was seen, as tensors and plain values."""
        arrays = [self._momentary, self._left, *self._gradient_sketches.values()]
        return {
            "cfs": list(self.cfs),
            "size": self.size,
            "numbers": [getattr(self, name) for name in _NUMBERS],
            "arrays": [torch.from_numpy(one.copy()) for one in arrays],
            "shadows": self._shadows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``, of a sample with the same buckets and factors.

        Raises:
            ConfigurationError: it belongs to other buckets or factors.
        """
        if list(state["cfs"]) != list(self.cfs) or state["size"] != self.size:
            raise ConfigurationError(
                f"state of {state['size']} coordinates at factors {list(state['cfs'])} does not "
                f"fit {self.size} coordinates at {list(self.cfs)}: the model or the compression "
                "options have changed since it was saved; start the sample anew"
            )
        for name, value in zip(_NUMBERS, state["numbers"], strict=True):
            setattr(self, name, value)
        arrays = [self._momentary, self._left, *self._gradient_sketches.values()]
        for array, saved in zip(arrays, state["arrays"], strict=True):
            array[:] = saved.numpy()
        self._shadows.load_state_dict(state["shadows"])


def _energy(values: Floats) -> float:
    """Return the sum of squares, in float64 where squares leave the range of float32."""
    energy = float(np.dot(values, values))
    if not _SAFE_ENERGY < energy < math.inf:
        wide = values.astype(np.float64)
        energy = float(np.dot(wide, wide))
    return energy


def _one_in_each_run(elements: int, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return ``count`` ascending coordinates: a random one out of each of as many equal runs.

    Rows of a weight differ most in energy, and lie together: each gets its share of the sample.
    """
    edges = np.arange(count + 1) * elements // max(count, 1)
    return edges[:-1] + (random.random(count) * np.diff(edges)).astype(np.int64)


def _share(kept: float, total: float) -> float:
    """Gain: 1 where there is nothing to lose. Sums in another order may exceed 1 by a last bit."""
    return min(1.0, float(kept) / float(total)) if total != 0.0 else 1.0


def _coherence(
    sketch: NDArray[np.float64], energies: NDArray[np.float64], ranks: float, steps: float
) -> float:
    """Coherence of residuals, from their sum's sketch and energies kept and in total.

    ranks, steps: numbers of ranks, and of steps over all ranks. 1 without any residual.
    """
    kept, total = (float(one) for one in energies)
    if steps <= 0.0 or total <= kept:
        return 1.0
    apart = (total - kept) * ranks / steps  # sum over ranks of ||e_i||^2, mean over steps
    together = float(np.dot(sketch, sketch))
    return min(max(together / (ranks * apart), 1.0 / ranks), 1.0)


def _ratio(sketch: NDArray[np.float64], energy: float) -> float:
    return math.sqrt(float(np.dot(sketch, sketch)) / energy) if energy > 0.0 else 0.0
