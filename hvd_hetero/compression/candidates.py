"""One pass over the bits of a flat gradient that keeps the entries which may be in its top-k."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Large enough to hide numpy's calls, small enough for a core's second-level cache.
BLOCK_ELEMENTS = 1 << 16


class Candidates:
    """The entries of one scan that may be among the k largest, in ascending order of index.

    Args:
        dtype: unsigned integer type as wide as the floats whose bits are scanned.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._without_sign = dtype.type(np.iinfo(dtype).max >> 1)
        self._count = 0
        self._indices = np.empty(0, np.int64)
        self._raw = np.empty(0, dtype)
        self._magnitudes = np.empty(BLOCK_ELEMENTS, dtype)
        self._flags = np.empty(BLOCK_ELEMENTS, np.bool_)

    def scan(
        self,
        bits: NDArray[Any],
        k: int,
        guess: int,
        addition: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ) -> bool:
        """Collect what is at least ``guess``, a lower bound of the threshold if it is right.

        Memory and time stay bounded for every input: with more than about 1.5 k candidates all
        but the best k are dropped, and only a larger magnitude than theirs is collected from
        there on. An equal one would lose against k entries that lie before it.

        Args:
            bits: [d], the floats' memory as unsigned integers.
            k: in [1, d].
            guess: magnitude in bits; 0 collects everything that may count.
            addition: (floats, more), floats being the memory behind ``bits``: block by block,
                ``floats += more`` just before the block is looked at.

        Returns:
            False when fewer than k entries reach ``guess``. The addition was done all the same.
        """
        most = k + max(k // 2, BLOCK_ELEMENTS)
        self._reserve(min(most + BLOCK_ELEMENTS, len(bits)))
        self._count = 0
        limit = self.dtype.type(guess)
        for start in range(0, len(bits), BLOCK_ELEMENTS):
            block = slice(start, min(start + BLOCK_ELEMENTS, len(bits)))
            if addition is not None:
                np.add(addition[0][block], addition[1][block], out=addition[0][block])
            size = block.stop - start
            magnitudes, flags = self._magnitudes[:size], self._flags[:size]
            np.bitwise_and(bits[block], self._without_sign, out=magnitudes)
            np.greater_equal(magnitudes, limit, out=flags)
            self._append(flags.nonzero()[0], start, bits[block])
            if self._count > most:
                indices, raw, threshold = self.best(k)
                self._indices[:k], self._raw[:k], self._count = indices, raw, k
                limit = self.dtype.type(threshold + 1)
        return self._count >= k

    def best(self, k: int) -> tuple[NDArray[np.int64], NDArray[Any], int]:
        """Return indices [k], bits with their sign [k], and the smallest magnitude, of the best k.

        Of equal magnitudes at the threshold the first ones are taken.
        """
        indices, raw = self._indices[: self._count], self._raw[: self._count]
        magnitudes = raw & self._without_sign
        place = self._count - k
        threshold = np.partition(magnitudes, place)[place]
        keep = magnitudes > threshold
        missing = k - np.count_nonzero(keep)
        keep[np.flatnonzero(magnitudes == threshold)[:missing]] = True
        positions = np.flatnonzero(keep)  # numpy would work it out anew for each mask used
        return indices[positions], raw[positions], int(threshold)

    def guess(self, sample: NDArray[Any], k: int, elements: int) -> int:
        """Return what is likely a lower bound of the threshold of k out of ``elements`` entries.

        Args:
            sample: [any length], bits of some of the entries.
        """
        expected = len(sample) * k / elements
        place = len(sample) - int(expected + 4 * expected**0.5 + 8)
        magnitudes = sample & self._without_sign
        return int(np.partition(magnitudes, place)[place]) if place > 0 else 0

    def _append(self, found: NDArray[np.int64], start: int, bits: NDArray[Any]) -> None:
        end = self._count + len(found)
        np.add(found, start, out=self._indices[self._count : end])
        # The indices are in range; any other mode would go through a buffer.
        np.take(bits, found, out=self._raw[self._count : end], mode="clip")
        self._count = end

    def _reserve(self, entries: int) -> None:
        if len(self._indices) < entries:
            self._indices = np.empty(entries, np.int64)
            self._raw = np.empty(entries, self.dtype)
