"""Count-sketches: short sums of a long vector that keep its norm, and add up over ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SKETCH_SUMS = 512
_TURN = 7919  # a prime, so that turns come round late


class Sketch:
    """m sums of the coordinates of vectors of up to ``size``, each under a random sign.

    The sketch of a sum over ranks is the sum of the ranks' sketches, and its squared norm is that
    of the vector within sqrt(2 / m), 6 %. The signs come from ``random``: equal on all ranks.
    """

    def __init__(self, size: int, random: np.random.Generator) -> None:
        self._size = max(size, 1)
        self._signs = random.choice(np.asarray([-1.0, 1.0], np.float32), 2 * self._size)

    def of(self, values: NDArray[np.float32], turn: int = 0) -> NDArray[np.float64]:
        """Return [m].

        Another ``turn`` has other signs: sketches of several steps, each with its own turn, add
        up to the square root of the sum of their squared norms.
        """
        begin = turn * _TURN % self._size
        padded = np.zeros(-(-values.size // SKETCH_SUMS) * SKETCH_SUMS, np.float32)
        np.multiply(values, self._signs[begin : begin + values.size], out=padded[: values.size])
        sums: NDArray[np.float64] = padded.reshape(-1, SKETCH_SUMS).sum(axis=0, dtype=np.float64)
        return sums
