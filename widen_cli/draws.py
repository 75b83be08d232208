"""Numbers drawn from those that a matrix holds: the same for the same seed, name and place, whatever thread asks for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draws:
    """Draws for one tensor; `row` is the number of the first row that is asked for."""

    key: int
    row: int = 0

    @staticmethod
    def of(seed: int, tensor: str) -> Draws:
        """The draws of a tensor, by its name."""
        return Draws(
            int.from_bytes(hashlib.sha256(f"{seed} {tensor}".encode("utf-8", "surrogatepass")).digest()[:8], "little")
        )

    def from_row(self, row: int) -> Draws:
        """The same draws, of the rows from `row` on."""
        return replace(self, row=row)

    def of_rows(self, bits: Array, count: int, at: int = 0) -> Array:
        """`count` values for each row of bits [n, values], drawn from that row, each with a sign of its own: [n, count].

        `at` tells draws for several places of one row apart. The sign is the first bit, as in every float.
        """
        words = self.words(np.arange(len(bits)) + self.row, count, at)
        drawn = np.take_along_axis(bits, (words >> np.uint64(1)).astype(np.int64) % bits.shape[1], axis=1)
        signs = (words & np.uint64(1)).astype(bits.dtype) << bits.dtype.type(8 * bits.dtype.itemsize - 1)
        return np.asarray(drawn ^ signs)

    def words(self, rows: Numbers, count: int, at: int = 0) -> Words:
        """`count` words of 64 random bits for each of the rows of these numbers, [rows, count]."""
        row = _mixed(rows.astype(np.uint64) + np.uint64(self.key))
        return _mixed(row[:, None] + (np.arange(count) + at).astype(np.uint64))


def _mixed(words: Words) -> Words:
    """Words of which each bit depends on every bit of the old ones (Steele, Lea and Flood, 2014: SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
