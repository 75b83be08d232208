"""Widens blocks of values: scales, rounds once, repeats. Sees arrays and growth trees, never a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.dimensions import Copies, Fill, Growth, Laid, leaf_scales
from widen_cli.draws import Draws
from widen_cli.dtypes import DType
from widen_cli.scales import ONE, Scale

Array = npt.NDArray[Any]

# Bits are moved as unsigned integers: fast, and a NaN's payload stays what it was.
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass
class Counts:
    """What happened to the stored values of a tensor, each counted once and not once a copy.

    `rounded`: the result is not the exact product; `overflowed`: a finite value became infinite or NaN.
    """

    values: int = 0
    rounded: int = 0
    overflowed: int = 0

    def add(self, other: Counts) -> None:
        self.values += other.values
        self.rounded += other.rounded
        self.overflowed += other.overflowed


@dataclass(frozen=True)
class Cast:
    """From one element type to another, with the offset of a gain that is stored as w and used as `offset + w`."""

    source: DType
    target: DType
    offset: int = 0

    def scaled(self, values: Array, scale: Scale, counts: Counts) -> Array:
        """`values` (any shape) times the scale, rounded once to nearest even, as the target's bits."""
        counts.values += values.size
        if scale.is_one and self.source == self.target:
            return values.view(_BITS[values.dtype.itemsize])
        if self.source.bits <= 16:
            power = scale.power_of_two if self.source == self.target and not self.offset else None
            if power is None or self.source.exponent is None:
                return self.looked_up(values, scale, counts)
            return self.exponents_moved(values, power, self.source.exponent, scale, counts)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self.source == self.target and scale.is_power_of_two and not self.offset:
                rounded = self.shifted(values, scale, counts)
            else:
                rounded = rounded_once(self.product(values, scale), _array_type(self.target))
                changed, overflowed = self.faults(values, rounded, scale)
                counts.rounded += int(np.count_nonzero(changed))
                counts.overflowed += int(np.count_nonzero(overflowed))
        return rounded.view(_BITS[rounded.dtype.itemsize])

    def looked_up(self, values: Array, scale: Scale, counts: Counts) -> Array:
        """The product of small types: there are at most 65536 of them, so each is computed once."""
        bits = values.view(_BITS[values.dtype.itemsize])
        table = _table(self, scale)
        found = table.results.take(bits, mode="wrap")
        if table.faulty:
            faults = table.faults.take(bits, mode="wrap")
            counts.rounded += int(np.count_nonzero(faults == _ROUNDED))
            counts.overflowed += int(np.count_nonzero(faults == _OVERFLOWED))
        return np.asarray(found)

    def exponents_moved(self, values: Array, power: int, exponent: int, scale: Scale, counts: Counts) -> Array:
        """Small floats times 2**power: `power` added to the exponents, whose bits `exponent` are, wherever both are normal.

        Several times as fast as looking all of them up; zeros, subnormal numbers, infinities and NaNs are still looked up.
        """
        bits = np.ascontiguousarray(values.view(_BITS[values.dtype.itemsize]))
        kind, one = bits.dtype.type, exponent & -exponent
        lowest, highest = one * max(1, 1 - power), exponent - one * max(1, 1 + power)
        if lowest > highest:
            return self.looked_up(values, scale, counts)
        moved = bits + kind(power * one % (1 << 8 * bits.itemsize))
        # Below the lowest the unsigned difference wraps to the largest numbers, so one comparison tells both ends.
        others = np.flatnonzero((bits & kind(exponent)) - kind(lowest) > kind(highest - lowest))
        if others.size:
            moved.reshape(-1)[others] = self.looked_up(values.reshape(-1)[others], scale, counts)
        return np.asarray(moved)

    def shifted(self, values: Array, scale: Scale, counts: Counts) -> Array:
        """A power of two times float32 or float64: one multiplication, exact unless undoing it shows otherwise."""
        factor = float(scale)
        product = values * values.dtype.type(factor)
        lost = product * values.dtype.type(1 / factor) != values
        if lost.any():
            lost &= np.isfinite(values)
            overflowed = int(np.count_nonzero(lost & ~np.isfinite(product)))
            counts.overflowed += overflowed
            counts.rounded += int(np.count_nonzero(lost)) - overflowed
        return np.asarray(product)

    @property
    def silent(self) -> int:
        """The bits of a copy that is to be used as zero: those of 0, or of -1 where 1 is added."""
        if not self.offset:
            return 0
        value = np.array(-self.offset, _array_type(self.target))
        return int(value.view(_BITS[value.dtype.itemsize]))

    @property
    def wide(self) -> Any:
        """The type to compute in: float64, for float64 itself the longest float that the machine has."""
        return np.longdouble if max(self.source.bits, self.target.bits) > 32 else np.float64

    def product(self, values: Array, scale: Scale) -> Array:
        """The product before it is rounded. A fraction is a product and a quotient, the first of them exact."""
        wide, fraction = self.wide, scale.fraction
        if fraction is not None:
            numerator, denominator = wide(fraction.numerator), wide(fraction.denominator)
            product = values.astype(wide) * numerator
            if self.offset:
                product = product + (numerator - denominator) * wide(self.offset)
            return np.asarray(product / denominator)
        factor = wide(scale.digits())
        product = values.astype(wide) * factor
        return np.asarray(product + (factor - 1) * wide(self.offset) if self.offset else product)

    def faults(self, values: Array, rounded: Array, scale: Scale) -> tuple[Array, Array]:
        """Where a finite value's result is not the true product, and where it became infinite."""
        finite = np.isfinite(values)
        overflowed = finite & ~np.isfinite(rounded)
        return np.asarray(self.changed(values, rounded, scale) & finite & ~overflowed), np.asarray(overflowed)

    def changed(self, values: Array, rounded: Array, scale: Scale) -> Array:
        """Where the result times the denominator is not the value times the numerator, both of which are exact."""
        wide, fraction = self.wide, scale.fraction
        if fraction is None:
            return np.asarray((values != 0) | bool(self.offset))
        numerator, denominator = wide(fraction.numerator), wide(fraction.denominator)
        product = values.astype(wide) * numerator
        back = rounded.astype(wide) * denominator
        if not self.offset:
            return np.asarray(product != back)
        added = (numerator - denominator) * wide(self.offset)
        total = product + added
        # What the sum itself lost (Knuth's two-sum): a gain far below 1 vanishes beside the offset.
        part = total - product
        lost = (product - (total - part)) + (added - part)
        return np.asarray((total != back) | (lost != 0))


_ROUNDED, _OVERFLOWED = 1, 2


@dataclass(frozen=True)
class _Table:
    """The results for every bit pattern of a small type, and which of them are rounded or overflow."""

    results: Array
    faults: Array
    faulty: bool


@lru_cache(maxsize=64)
def _table(cast: Cast, scale: Scale) -> _Table:
    size = _array_type(cast.source).itemsize
    values = np.arange(1 << (8 * size), dtype=_BITS[size]).view(_array_type(cast.source))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = rounded_once(cast.product(values, scale), _array_type(cast.target))
        changed, overflowed = cast.faults(values, rounded, scale)
    faults = (changed * _ROUNDED + overflowed * _OVERFLOWED).astype(np.uint8)
    return _Table(rounded.view(_BITS[rounded.dtype.itemsize]), faults, bool(faults.any()))


def _array_type(dtype: DType) -> np.dtype[Any]:
    if dtype.numpy is None:
        raise ValueError(f"{dtype.name} has no array type")
    return dtype.numpy


def rounded_once(exact: Array, target: np.dtype[Any]) -> Array:
    """`exact` (float64 or longer) rounded to nearest even in the target type.

    The longer float reaches float16, and every float the types of ml_dtypes, only by way of a float between, which would
    round twice. Rounding to odd on the way keeps the sticky bit, so that the last rounding decides as one would.
    """
    if target.type in (np.float64, np.float32) or (target.type is np.float16 and exact.dtype == np.float64):
        return exact.astype(target)
    if exact.dtype != np.float64:
        exact = _rounded_to_odd(exact, np.float64, np.int64)
    if target.type is np.float16:
        return exact.astype(target)
    return _rounded_to_odd(exact, np.float32, np.int32).astype(target)


def _rounded_to_odd(exact: Array, kind: Any, integer: Any) -> Array:
    """`exact` in a shorter float; what is not exact there becomes its neighbour with an odd last bit (Boldo and Melquiond, 2008)."""
    nearest = exact.astype(kind)
    bits = nearest.view(integer)
    inexact = (nearest != exact) & np.isfinite(nearest) & ((bits & 1) == 0)
    # Beside zero there is only the smallest number, of the value's own sign.
    at_zero = nearest == 0
    too_large = (np.abs(nearest) > np.abs(exact)) & ~at_zero
    sign = np.where(np.signbit(exact), integer(np.iinfo(integer).min), integer(0))
    neighbour = np.where(at_zero, sign + integer(1), np.where(too_large, bits - 1, bits + 1))
    return np.asarray(np.where(inexact, neighbour, bits).astype(integer).view(kind))


def widened_rows(
    rows: Array,
    trailing: tuple[Growth, ...],
    scale: Scale,
    cast: Cast,
    counts: Counts,
    draws: Draws | None = None,
) -> Array:
    """Rows with their trailing dimensions widened.

    `rows` is [n, *old sizes of trailing]; the result holds the target's bits, [n, *new sizes of trailing].
    `scale` is the factor that belongs to the rows themselves. `draws` are for dimensions that are filled at random.
    """
    bits = scaled_values(rows, trailing, scale, cast, counts)
    if all(growth.old == growth.new for growth in trailing):
        return bits
    for axis, growth in enumerate(trailing, start=1):
        if growth.old != growth.new:
            bits = _spread(bits, axis, growth, _Filling(cast, counts, draws, len(bits)))
    return bits


def valued(bits: Array, target: DType) -> Array:
    """Bits as the numbers of their type."""
    return bits.view(_array_type(target))


def mean_bits(bits: Array, target: DType, axis: int, counts: Counts) -> Array:
    """The mean of values along an axis, computed in 64 bits (or longer) and rounded to the bits of their type."""
    wide = np.longdouble if target.bits > 32 else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        mean = valued(bits, target).astype(wide).mean(axis=axis)
    return rounded_mean(mean, target, counts)


def rounded_mean(mean: Array, target: DType, counts: Counts) -> Array:
    """Means as the bits of a type, those that it does not hold counted as rounded."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = rounded_once(np.asarray(mean), _array_type(target))
    counts.values += rounded.size
    counts.rounded += int(np.count_nonzero((rounded.astype(mean.dtype) != mean) & np.isfinite(mean)))
    return rounded.view(_BITS[rounded.dtype.itemsize])


def times_copies(bits: Array, factors: tuple[float, ...], counts: Counts) -> Array:
    """Rows of float32 bits, [n, copies * values] with copies side by side, each copy times its own factor."""
    values = bits.view(np.float32).reshape(len(bits), -1, len(factors)).astype(np.float64)
    counts.rounded += sum(factor != 1 for factor in factors) * values[..., 0].size
    counts.values += (len(factors) - 1) * values[..., 0].size
    return np.asarray((values * np.array(factors)).astype(np.float32).view(bits.dtype).reshape(bits.shape))


def scaled_values(rows: Array, trailing: tuple[Growth, ...], scale: Scale, cast: Cast, counts: Counts) -> Array:
    """The rows' values times the product of all their leaves' scales."""
    leaves = [list(_leaves(growth)) for growth in trailing]
    if all(len({leaf.scale for leaf in axis}) <= 1 for axis in leaves):
        for axis in leaves:
            scale = scale * (axis[0].scale if axis else ONE)
        return cast.scaled(rows, scale, counts)
    result = np.empty(rows.shape, _BITS[_array_type(cast.target).itemsize])
    _scale_parts(rows, result, trailing, 1, scale, cast, counts)
    return result


def _leaves(growth: Growth) -> list[Copies]:
    if isinstance(growth, Laid):
        return [leaf for part in growth.parts for leaf in _leaves(part)]
    return _leaves(growth.inner) if growth.inner else [growth]


def _scale_parts(
    rows: Array, result: Array, trailing: tuple[Growth, ...], axis: int, scale: Scale, cast: Cast, counts: Counts
) -> None:
    """Scales part by part along the first of the trailing dimensions that is left, then along the rest."""
    if not trailing:
        result[...] = cast.scaled(np.ascontiguousarray(rows), scale, counts)
        return
    growth, rest = trailing[0], trailing[1:]
    same = list(dict.fromkeys(leaf_scales(growth)))
    if len(same) == 1:
        _scale_parts(rows, result, rest, axis + 1, scale * same[0], cast, counts)
    elif isinstance(growth, Laid):
        start = 0
        for part in growth.parts:
            cut = (slice(None),) * axis + (slice(start, start + part.old),)
            _scale_parts(rows[cut], result[cut], (part, *rest), axis, scale, cast, counts)
            start += part.old
    elif growth.inner is not None:
        inner = growth.inner
        split = (*rows.shape[:axis], growth.size, inner.old, *rows.shape[axis + 1 :])
        _scale_parts(rows.reshape(split), result.reshape(split), (inner, *rest), axis + 1, scale, cast, counts)


@dataclass(frozen=True)
class _Filling:
    """What fills the places of a dimension where no copy stands."""

    cast: Cast
    counts: Counts
    draws: Draws | None
    rows: int

    def of(self, fill: Fill, source: Array, shape: tuple[int, ...], at: int) -> Array | int:
        """Bits for `shape` = [n, ..., m] new places from the place `at` on, of all old ones `source` [n, old, m]."""
        if fill is Fill.MEAN:
            mean = mean_bits(source, self.cast.target, 1, self.counts)
            return mean.reshape(len(source), *(1,) * (len(shape) - 2), source.shape[2])
        if fill is Fill.RANDOM:
            assert self.draws is not None
            draws = self.draws.from_row(self.draws.row * (len(source) // max(1, self.rows)))
            return draws.of_rows(source.reshape(len(source), -1), math.prod(shape[1:]), at).reshape(shape)
        return self.cast.silent


def _spread(bits: Array, axis: int, growth: Growth, filling: _Filling) -> Array:
    """Repeats along one axis as the tree says; `filling` makes what stands where no copy does."""
    silent = filling.cast.silent
    plain = isinstance(growth, Copies) and growth.inner is None and growth.fill is Fill.ZERO and not silent
    if plain and axis == bits.ndim - 1 and isinstance(growth, Copies):
        wide = bits.dtype.itemsize * growth.copies
        if wide in _BITS:
            return _multiplied(bits, growth, _BITS[wide])
    before, after = bits.shape[:axis], bits.shape[axis + 1 :]
    result = np.empty((*before, growth.new, *after), bits.dtype)
    new, old = ((math.prod(before), size, math.prod(after)) for size in (growth.new, growth.old))
    source = bits.reshape(old)
    _fill(result.reshape(new), source, growth, filling, source, 0)
    return result


def _multiplied(bits: Array, growth: Copies, wide: np.dtype[Any]) -> Array:
    """Neighbouring copies as one wider integer: the bits times 0x...00010001, without the places of copies that are zero."""
    shift = 8 * bits.dtype.itemsize
    pattern = sum(1 << (shift * copy) for copy in range(growth.live))
    return np.asarray((np.ascontiguousarray(bits).astype(wide) * wide.type(pattern)).view(bits.dtype))


def _fill(out: Array, source: Array, growth: Growth, filling: _Filling, entire: Array, at: int) -> None:
    """Writes the widened middle axis of `source` [n, old, m] into `out` [n, new, m].

    `entire` is the axis that `source` is a part of, or all of it, and `at` its first place in the new one.
    """
    if isinstance(growth, Laid):
        old, new = 0, 0
        for part in growth.parts:
            _fill(out[:, new : new + part.new], source[:, old : old + part.old], part, filling, entire, at + new)
            old, new = old + part.old, new + part.new
        return
    inner = growth.inner
    step_new, step_old = (inner.new, inner.old) if inner else (1, 1)
    n, _, m = source.shape
    spread = out.reshape(n, growth.size, growth.copies, step_new, m)
    blocks = source.reshape(n, growth.size, step_old, m)
    for copy in range(growth.live):
        if inner is None:
            spread[:, :, copy] = blocks
        else:
            _fill_each(spread[:, :, copy], blocks, inner, filling, entire, at)
    if growth.live < growth.copies:
        rest = spread[:, :, growth.live :]
        rest[...] = filling.of(growth.fill, entire, rest.shape, at * m)


def _fill_each(out: Array, blocks: Array, inner: Growth, filling: _Filling, entire: Array, at: int) -> None:
    """The inner tree for every outer position: `blocks` [n, outer, old, m] into `out` [n, outer, new, m]."""
    for outer in range(blocks.shape[1]):
        _fill(out[:, outer], blocks[:, outer], inner, filling, entire, at + outer * inner.new)
