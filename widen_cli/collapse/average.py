"""Folds blocks of widened values back: the mean of the copies, and how far they are apart. Sees arrays, never a file.

A wide tensor is y = A x, where every copy of a value of x stands times one factor and some places hold zero. The x whose A x
is nearest to a given y (least squares) is the mean of each value's copies, divided by the factor; the zeros say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.dimensions import Growth
from widen_cli.dtypes import STORED, DType
from widen_cli.places import Places, selector
from widen_cli.scales import Scale
from widen_cli.transform import Cast, Counts, scaled_values

Array = npt.NDArray[Any]

# Means of values of 32 bits or fewer: float64 numbers, to be computed with as such and not in a longer float.
_MEANS = DType("means", 32, "float", "<f8")


@dataclass(frozen=True)
class Distance:
    """How far copies are from A x: the sum of squares of y - A x and the largest, beside that of y, of `values` values.

    Of a gain that is stored as w and used as c + w, y is c + w.
    """

    apart: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    values: int = 0

    @staticmethod
    def sum(parts: Sequence[Distance]) -> Distance:
        """Parts together: the same whatever their order."""
        return Distance(
            math.fsum(part.apart for part in parts) if all(math.isfinite(part.apart) for part in parts) else math.inf,
            math.fsum(part.total for part in parts) if all(math.isfinite(part.total) for part in parts) else math.inf,
            max((part.largest for part in parts), default=0.0),
            sum(part.values for part in parts),
        )

    @property
    def relative(self) -> float:
        """|y - A x| / |y|; infinite where one of them is no finite number."""
        if not math.isfinite(self.apart):
            return math.inf
        return (
            math.sqrt(self.apart / self.total) if self.apart and math.isfinite(self.total) else float(bool(self.apart))
        )


@dataclass(frozen=True)
class Mean:
    """The copies of a block folded: the first of each, whose type they have, or their means in float64 where any two differ."""

    first: Array
    means: Array | None
    distance: Distance

    @property
    def alike(self) -> bool:
        """Whether all copies are the same, bit by bit."""
        return self.means is None


def mean_of_copies(wide: Array, dimensions: Sequence[Places], offset: int, zeros: bool = True) -> Mean:
    """The mean over the copies of every old position of all dimensions, in float64 and exact where they are the same.

    `zeros`: what stands beside the copies is zero in A x, and counts in the distance.
    """
    first, *others = _copies(wide, dimensions)
    first = np.ascontiguousarray(first)
    empty = _zeros(wide, dimensions, offset) if zeros else None
    equal = [_same_bits(first, other) for other in others]
    if all(bool(same.all()) for same in equal):
        counted = math.prod(int(places.counts.sum()) for places in dimensions)
        total = sum(_square(first, offset, mask) for mask in _held(dimensions))
        alike = Distance(0.0, total, 0.0, counted)
        return Mean(first, None, alike if empty is None else Distance.sum([alike, empty]))
    number, always, held = first.astype(np.float64), np.logical_and.reduce(equal), list(_held(dimensions))
    with np.errstate(invalid="ignore", over="ignore"):
        # From the first copy on, so that the mean of equal ones is that number whatever their count.
        moved = np.zeros_like(number)
        for other, same, mask in zip(others, equal, held[1:], strict=True):
            moved += np.where(same if mask is None else same | ~mask, 0.0, other.astype(np.float64) - number)
        means = np.where(always, number, number + moved / _counts(dimensions))
        apart = [_apart(copy, means, always, mask, offset) for copy, mask in zip((first, *others), held, strict=True)]
    return Mean(first, means, Distance.sum([*apart, *([empty] if empty else [])]))


def sum_of_parts(wide: Array, dimensions: Sequence[Places], axis: int) -> Array:
    """The sums of the copies along one dimension, in float64: of parts that nothing has moved exact, in every type."""
    read, total = dimensions[axis], np.zeros(())
    with np.errstate(invalid="ignore", over="ignore"):
        for number, selected in enumerate(read.selectors):
            part = wide[(slice(None),) * axis + (selected,)].astype(np.float64)
            held = read.has(number).reshape(-1, *(1 for _ in range(wide.ndim - axis - 1)))
            # Not to begin with zero keeps the sign of a zero.
            total = part if number == 0 else np.where(held, total + part, total)
    return total


def values_apart(wide: Array, wanted: Array, offset: int = 0) -> Distance:
    """How far wide values are from those that stand for them in A x, number by number."""
    number = wide.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return _measured(np.where(_same_bits(wide, wanted), 0.0, number - wanted.astype(np.float64)), number + offset)


def folded(
    mean: Mean, trailing: tuple[Growth, ...], scale: Scale, held: DType, target: DType, offset: int, counts: Counts
) -> Array:
    """The old values, as the target's bits: the mean over the factor, rounded once. `trailing` holds inverse scales."""
    if mean.means is None:
        return scaled_values(mean.first, trailing, scale, Cast(held, target, offset), counts)
    source = STORED["F64"] if held.bits > 32 else _MEANS
    return scaled_values(mean.means, trailing, scale, Cast(source, target, offset), counts)


def mean_of_divisors(wide: Array, factors: tuple[float, ...]) -> Mean:
    """Of vectors of float32 whose copies, side by side, each have a factor of their own, the first being 1."""
    copies = wide.reshape(*wide.shape[:-1], -1, len(factors))
    first, known = np.ascontiguousarray(copies[..., 0]), np.array(factors)
    number = copies.astype(np.float64)
    if np.array_equal((first[..., None].astype(np.float64) * known).astype(np.float32), copies):
        return Mean(first, None, Distance(0.0, float(np.square(number).sum()), 0.0, copies.size))
    means = (number * known).sum(axis=-1) / np.square(known).sum()
    return Mean(first, means, _measured(number - means[..., None] * known, number))


def _copies(wide: Array, dimensions: Sequence[Places]) -> Iterator[Array]:
    """One array of old positions for each combination of copies."""
    for chosen in product(*(places.selectors for places in dimensions)):
        picked = wide
        for axis, numbers in enumerate(chosen):
            if numbers != slice(0, wide.shape[axis], 1) if isinstance(numbers, slice) else True:
                picked = picked[(slice(None),) * axis + (numbers,)]
        yield picked


def _held(dimensions: Sequence[Places]) -> Iterator[Array | None]:
    """For each combination of copies which positions have one; None for all of them."""
    for chosen in product(*(range(len(places.copies)) for places in dimensions)):
        if all(places.even for places in dimensions):
            yield None
        else:
            yield _outer([places.has(copy) for places, copy in zip(dimensions, chosen, strict=True)])


def _counts(dimensions: Sequence[Places]) -> Array:
    return _outer([places.counts for places in dimensions])


def _outer(factors: Sequence[Array]) -> Array:
    result = factors[0]
    for factor in factors[1:]:
        result = result[..., None] * factor
    return result


def _same_bits(one: Array, other: Array) -> Array:
    bits = np.dtype(f"u{one.dtype.itemsize}")
    return np.asarray(one.view(bits) == np.ascontiguousarray(other).view(bits))


def _square(values: Array, offset: int, mask: Array | None) -> float:
    number = values.astype(np.float64) + offset
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(number if mask is None else number[mask]).sum())


def _apart(copy: Array, means: Array, always: Array, mask: Array | None, offset: int) -> Distance:
    number = copy.astype(np.float64)
    apart = number - means
    if not np.isfinite(apart).all():
        # Of the same infinities and NaNs the difference is no number.
        apart = np.where(always, 0.0, apart)
    return _measured(*((apart, number + offset) if mask is None else (apart[mask], number[mask] + offset)))


def _measured(apart: Array, number: Array) -> Distance:
    return Distance(
        float(np.square(apart).sum()),
        float(np.square(number).sum()),
        float(np.abs(apart).max(initial=0.0)),
        apart.size,
    )


def _zeros(wide: Array, dimensions: Sequence[Places], offset: int) -> Distance | None:
    """What stands in the places that are zero in A x; None where there are none."""
    parts = []
    for axis, places in enumerate(dimensions):
        if len(places.zeros):
            parts.append(zeros_apart(wide[(slice(None),) * axis + (selector(places.zeros),)], offset))
            held = np.delete(np.arange(wide.shape[axis]), places.zeros)
            wide = wide[(slice(None),) * axis + (selector(held),)]
    return Distance.sum(parts) if parts else None


def zeros_apart(values: Array, offset: int) -> Distance:
    """The distance of values that are zero in A x."""
    with np.errstate(over="ignore", invalid="ignore"):
        number = values.astype(np.float64) + offset
        return _measured(number, number)
