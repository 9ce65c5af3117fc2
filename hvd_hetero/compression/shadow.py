"""Error feedback on a sample of coordinates, for every compression factor (CF) at once.

A shadow is the residual a CF would have left, had it been in force for long: the sample's
gradients are added up and the largest entries, the CF's share of them, are taken out. It shows
the steady-state gain and residual of a CF that was never used. Three things make it cheap:

1. Low CFs work on every second, fourth, ... coordinate of the sample, as long as they still take
   ``_LEAST_TAKEN`` entries a step: the size of the sample is decided by the high ones.
2. A residual hardly moves in cf / ``_STEPS_SHARE`` steps, so a CF above 2,000 takes the entries
   of several steps at once, at most ``_MOST_STEPS``.
3. Gradients are added up once for all CFs: residual = sum + offset, and where entries are taken
   the offset becomes minus the sum.

A steady state takes about CF steps, so ``prime`` gets there from the first window alone: it goes
on in strides of cf / ``_STRIDES`` steps with gradients drawn from the mean and the covariance of
those that were seen.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_LEAST_TAKEN = 1024
_STEPS_SHARE = 1024  # 256 was 4 % off at CF 1000
_MOST_STEPS = 8
_SLACK = 0.93  # candidates start this far below the last threshold
_MOST_SEEN = 16  # steps that priming rests on
# Priming takes strides of a quarter of CF steps, so many of them, then as many of half the length
# and so on down to one step: what long strides leave above a single step's threshold must go.
_LONGEST_STRIDE, _STRIDES = 0.25, 20
_NUMBERS = ("threshold", "owed", "pending", "kept", "total")


class Shadow:
    """The residual of one CF on some of the sample's coordinates.

    cf: the factor. take: entries taken per step, on average; need not be whole. offsets: [B + 1],
    where each bucket's coordinates begin; the last is their number.
    """

    def __init__(self, cf: float, take: float, offsets: NDArray[np.int64]) -> None:
        self.cf, self.take = cf, take
        self.offset: Floats = np.zeros(int(offsets[-1]), np.float32)
        self.threshold = 0.0
        self.owed = 0.0  # entries, a fraction: rounding every step would favour some factors
        self.every = max(1, min(_MOST_STEPS, int(cf) // _STEPS_SHARE))
        self.pending = 0  # steps
        self._buckets = offsets
        self.clear()

    def clear(self) -> None:
        """Forget the energies and counts, not the residual."""
        self.kept = 0.0
        self.total = 0.0
        self.entries: NDArray[np.float64] = np.zeros(len(self._buckets) - 1)

    def take_out(self, summed: Floats, steps: float, scratch: Floats) -> None:
        """Take the entries of ``steps`` steps whose gradients ``summed`` now includes."""
        magnitudes = scratch[: self.offset.size]
        self.pending = 0
        np.add(summed, self.offset, out=magnitudes)
        np.abs(magnitudes, out=magnitudes)
        self.owed += steps * self.take
        due = int(self.owed + 1e-6)
        self.owed -= due
        before, kept = float(np.dot(magnitudes, magnitudes)), 0.0
        if due:
            indices, self.threshold = largest(magnitudes, due, self.threshold)
            taken = magnitudes.take(indices)
            kept = float(np.dot(taken, taken))
            ends = indices.searchsorted(self._buckets)
            self.entries += ends[1:] - ends[:-1]
            self.offset[indices] = -summed.take(indices)
        # Over the steps the energy rose from before - kept to before.
        self.kept += kept
        self.total += steps * (before - kept) + kept * (steps + 1) / 2


class Shadows:
    """Shadows of several factors on one sample.

    cfs: ascending. takes: entries a step of the whole sample, for each. offsets: [B + 1], where
    each bucket's coordinates begin; the last is the size of the sample.
    """

    def __init__(
        self, cfs: Sequence[float], takes: Sequence[float], offsets: NDArray[np.int64]
    ) -> None:
        size = int(offsets[-1])
        self.strides = [_stride(size, take) for take in takes]
        self.offsets = {stride: -(-offsets // stride) for stride in sorted({1, *self.strides})}
        self.shadows = [
            Shadow(cf, take / stride, self.offsets[stride])
            for cf, take, stride in zip(cfs, takes, self.strides, strict=True)
        ]
        self.seen: list[Floats] | None = []  # gradients of the first window; None once primed
        self._summed: dict[int, Floats] = {
            stride: np.zeros(int(offsets[-1]), np.float32)
            for stride, offsets in self.offsets.items()
        }
        self._scratch = np.empty(size, np.float32)

    def step(self, gradient: Floats) -> None:
        """Feed one step's gradient [size]."""
        if self.seen is not None:
            self.seen.append(gradient.copy())
            if len(self.seen) == _MOST_SEEN:
                self.prime()
            return
        for stride, summed in self._summed.items():
            summed += gradient[::stride]
        for shadow, stride in zip(self.shadows, self.strides, strict=True):
            shadow.pending += 1
            if shadow.pending >= shadow.every:
                shadow.take_out(self._summed[stride], shadow.pending, self._scratch)

    def end_window(self) -> None:
        """Bring every shadow up to date; afterwards its residual is its ``offset``."""
        if self.seen:
            self.prime()
        for shadow, stride in zip(self.shadows, self.strides, strict=True):
            if shadow.pending:
                shadow.take_out(self._summed[stride], shadow.pending, self._scratch)
            shadow.offset += self._summed[stride]
        for summed in self._summed.values():
            summed[:] = 0.0  # sums over a whole training would lose bits

    def prime(self) -> None:
        """Go to the steady state with gradients like those seen, then feed these."""
        seen, self.seen = np.stack(self.seen or []), None
        mean = seen.mean(axis=0)
        spread = (seen - mean) / np.float32(math.sqrt(max(len(seen) - 1, 1)))
        noise = float(np.vdot(spread, spread))
        # What the mean has of noise is no signal: it would pile up in the residual.
        energy = float(np.dot(mean, mean))
        signal = max(0.0, 1.0 - noise / len(seen) / energy) if energy > 0.0 else 0.0
        mean *= np.float32(math.sqrt(signal))
        zeros = np.zeros(seen.shape[1], np.float32)
        # Seeded by the data: equal when repeated, independent between ranks.
        random = np.random.default_rng(zlib.crc32(seen.tobytes()))
        for shadow, stride in zip(self.shadows, self.strides, strict=True):
            drift, deviations = mean[::stride], np.ascontiguousarray(spread[:, ::stride])
            steps = shadow.cf * _LONGEST_STRIDE
            while steps > 0.5:
                for _ in range(_STRIDES):
                    drawn = random.standard_normal(len(seen), np.float32) @ deviations
                    shadow.offset += np.float32(steps) * drift
                    shadow.offset += np.float32(math.sqrt(steps)) * drawn
                    shadow.take_out(zeros[: drawn.size], steps, self._scratch)
                steps /= 2
            shadow.clear()
        for gradient in seen:
            self.step(gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is remembered, as tensors and plain values."""
        return {
            "seen": None if self.seen is None else [_tensor(one) for one in self.seen],
            "summed": [_tensor(one) for one in self._summed.values()],
            "offset": [_tensor(shadow.offset) for shadow in self.shadows],
            "entries": [_tensor(shadow.entries) for shadow in self.shadows],
            "numbers": [[getattr(shadow, name) for name in _NUMBERS] for shadow in self.shadows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of shadows of the same factors on the same sample."""
        seen = state["seen"]
        self.seen = None if seen is None else [one.numpy().copy() for one in seen]
        for summed, saved in zip(self._summed.values(), state["summed"], strict=True):
            summed[:] = saved.numpy()
        for index, shadow in enumerate(self.shadows):
            shadow.offset[:] = state["offset"][index].numpy()
            shadow.entries[:] = state["entries"][index].numpy()
            for name, value in zip(_NUMBERS, state["numbers"][index], strict=True):
                setattr(shadow, name, value)


def largest(magnitudes: Floats, k: int, threshold: float) -> tuple[NDArray[np.int64], float]:
    """Return the ascending indices of the k largest magnitudes [s], and the smallest of those.

    Exact whatever the ``threshold``, a guess of the k-th largest. Ties: lowest index first.
    """
    if k >= magnitudes.size:
        return np.arange(magnitudes.size), 0.0
    # Methods of arrays: numpy's functions of the same names cost as much as what they do here.
    indices = (magnitudes >= np.float32(threshold * _SLACK)).nonzero()[0]
    if not k <= indices.size <= magnitudes.size // 2:
        indices = np.arange(magnitudes.size)
    candidates = magnitudes.take(indices)
    place, ordered = candidates.size - k, candidates.copy()
    ordered.partition(place)
    kth = ordered[place]
    chosen = (candidates >= kth).nonzero()[0]
    if chosen.size > k:
        ties = (candidates.take(chosen) == kth).nonzero()[0]
        chosen = np.delete(chosen, ties[k - chosen.size :])
    return indices.take(chosen), float(kth)


def _stride(size: int, take: float) -> int:
    """Return the power of two by which the sample is thinned for a CF that takes ``take``."""
    stride = 1
    while take / (2 * stride) >= _LEAST_TAKEN and size > 2 * stride:
        stride *= 2
    return stride


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.copy())
