"""Parts instead of equal copies, along the axis that a weight reads. Sees arrays and growth trees, never a file.

The copies of an activation are equal, so a weight that reads them may hold any numbers in their places that have one sum. A
value is M units of its own last place; M is split into whole numbers whose sum is M. Each is no larger than M, so the type
holds it, and nothing is rounded but the value itself, once, before it is split: that holds for every finite value, its sign
and subnormal numbers included. Zeros stay zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.dimensions import Growth, Split
from widen_cli.draws import Draws
from widen_cli.dtypes import DType
from widen_cli.places import Numbers, Places, places

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

# Of each type the bits of a significand, and the power of two that is its smallest number.
_UNITS = {
    "F64": (53, -1074),
    "F32": (24, -149),
    "F16": (11, -24),
    "BF16": (8, -133),
    "F8_E4M3": (4, -9),
    "F8_E5M2": (3, -16),
}


@dataclass(frozen=True)
class Parting:
    """How rows of one tensor are split: `dimensions` are the trees of its rows and of what each row holds, `axis` is the one
    that is read. What is drawn for a value depends on its place in the tensor, all of whose other dimensions are widened."""

    split: Split
    dtype: DType
    dimensions: tuple[Growth, ...]
    axis: int

    @cached_property
    def places(self) -> tuple[Places, ...]:
        return tuple(map(places, self.dimensions))

    def wide(self, bits: Array, old: int, new: Numbers) -> Array:
        """The rows `new` of the widened tensor, as bits; all are made of `bits` [n, *old sizes], the values times their factors
        of the rows from `old` on."""
        rows, read = self.places[0], self.places[self.axis]
        held = rows.origins[new] - old
        bits = self.spread(bits)
        if self.axis == 0:
            among = self.parts(bits, old + np.arange(len(bits)), rows.counts[old : old + len(bits)])
            wide = among[rows.numbers[new], np.clip(held, 0, None)]
        else:
            among = self.parts(bits[np.clip(held, 0, None)], new, read.counts)
            among = np.moveaxis(among, 0, self.axis + 1)
            flat = among.reshape(*among.shape[: self.axis], -1, *among.shape[self.axis + 2 :])
            wide = flat.take(read.origins * among.shape[self.axis + 1] + read.numbers, axis=self.axis)
        for axis, each in enumerate(self.places):
            empty = np.flatnonzero(np.isin(new, each.zeros)) if axis == 0 else each.zeros
            wide[(slice(None),) * axis + (empty,)] = 0
        return np.asarray(wide)

    def spread(self, bits: Array) -> Array:
        """Rows with every dimension of them widened but the one that is read."""
        for axis, each in enumerate(self.places):
            if axis not in (0, self.axis):
                bits = bits.take(each.origins, axis=axis)
        return bits

    def parts(self, bits: Array, rows: Numbers, counts: Numbers) -> Array:
        """All parts of `bits` [n, *sizes], whose rows have the numbers `rows`: [parts, n, *sizes], the last ones zero where
        `counts`, along the dimension that is read, says that there are fewer."""
        kind = self.dtype.numpy
        assert kind is not None
        values = bits.view(kind).astype(np.float64)
        most = int(counts.max(initial=1))
        drawn = self.drawn(rows, values.shape[1:], most)
        finite = np.isfinite(values)
        units, exponents = _units(np.where(finite, np.abs(values), 0.0), self.dtype)
        level = self.noise(values)
        if level is not None:
            with np.errstate(over="ignore"):
                # No noise is larger than its value; beside a tiny one the row's is endless.
                level = np.minimum(np.ldexp(level, -exponents), 2.0**100)
        whole = np.zeros((most, *values.shape))
        for count in np.unique(counts):
            own = (slice(None),) * self.axis + (np.flatnonzero(counts == count),)
            every = (slice(None), *own)
            own_level = level[own] if level is not None else None
            whole[(slice(0, count), *own)] = _whole(self.split.way, units[own], int(count), drawn[every], own_level)
        numbers = np.copysign(np.ldexp(whole, exponents), values)
        parts = np.ascontiguousarray(numbers.astype(kind)).view(bits.dtype)
        return np.where(finite, parts, bits)

    def noise(self, values: Floats) -> Floats | None:
        """The root mean square that the noise on each copy of a value is to have: of the row it stands in, over its copies."""
        if self.split.way != "noise":
            return None
        finite = np.where(np.isfinite(values), values, 0.0)
        peak = np.abs(finite).max(axis=-1, keepdims=True, initial=0.0)
        scaled = finite / np.where(peak == 0, 1.0, peak)
        root = peak * np.sqrt(np.square(np.ascontiguousarray(scaled)).mean(axis=-1, keepdims=True))
        return np.broadcast_to(root * self.split.level, values.shape)

    def drawn(self, rows: Numbers, sizes: Sequence[int], parts: int) -> Floats:
        """One number for each part of each value and one more, [parts + 1, n, *sizes], all from 0 to below 1."""
        if self.split.way == "even":
            return np.broadcast_to(np.zeros(()), (parts + 1, len(rows), *sizes))
        words = Draws.of(self.split.seed, self.split.name).words(rows, math.prod(sizes) * (parts + 1)) >> np.uint64(11)
        return np.moveaxis(words.astype(np.float64).reshape(len(rows), *sizes, parts + 1), -1, 0) * 2.0**-53


def _units(values: Floats, dtype: DType) -> tuple[Floats, npt.NDArray[np.int32]]:
    """Numbers of a type, none of them negative, as whole numbers of their last place, and its exponent."""
    digits, lowest = _UNITS[dtype.name]
    exponents = np.maximum(np.frexp(values)[1] - digits, lowest).astype(np.int32)
    return np.ldexp(values, -exponents), exponents


def _whole(way: str, units: Floats, count: int, drawn: Floats, level: Floats | None) -> Floats:
    """Whole numbers whose sum is `units`, [count, ...], none of them negative."""
    if way == "even":
        left = np.fmod(units, count)
        number = np.arange(count).reshape(-1, *(1 for _ in units.shape))
        return np.asarray((units - left) / count + (number < left))
    if level is not None:
        return _noisy(units, count, drawn, level)
    return _unequal(units, count, drawn[:count])


def _unequal(units: Floats, count: int, drawn: Floats) -> Floats:
    """Parts no two of which are equal, where there are units enough; they are to each other as 1/2 and 3/2 at most, nearly."""
    shares = drawn + 0.5
    steps = np.arange(count, dtype=np.float64).reshape(-1, *(1 for _ in units.shape))
    apart = np.where(units >= count * (count - 1) / 2, steps, 0.0)
    upto = np.cumsum(np.sort(shares, axis=0), axis=0)
    rest = units - apart.sum(axis=0)
    parts = np.sort(_between(rest, np.floor(rest * (upto / upto[-1]))), axis=0) + apart
    # A stable order: the same on every machine, whatever its sort does with equals.
    ranks = np.argsort(np.argsort(shares, axis=0, kind="stable"), axis=0, kind="stable")
    return np.take_along_axis(parts, ranks, axis=0)


def _noisy(units: Floats, count: int, drawn: Floats, level: Floats) -> Floats:
    """Equal shares with noise of the root mean square `level` over `count` on each, whose sum is zero; it is no larger than
    the share that it is added to."""
    share = units / count
    noise = (2 * drawn[:count] - 1) * (math.sqrt(3 * count / max(1, count - 1)) / count) * level
    noise = noise - noise.sum(axis=0) / count
    largest = np.abs(noise).max(axis=0)
    noise *= np.minimum(1.0, np.divide(share, largest, out=np.ones_like(share), where=largest > 0))
    upto = np.arange(1, count + 1).reshape(-1, *(1 for _ in units.shape)) * share + np.cumsum(noise, axis=0)
    # One number decides for all of a value's sums whether they are rounded up, so that a part's mean is what it should be.
    return _between(units, np.floor(upto + drawn[count]))


def _between(units: Floats, upto: Floats) -> Floats:
    """The parts between sums that begin at zero and are to end at `units`."""
    sums = np.clip(np.maximum.accumulate(upto, axis=0), 0.0, units)
    sums[-1] = units
    return np.diff(sums, axis=0, prepend=0.0)
