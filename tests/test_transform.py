"""Widening of blocks: every position against a slow gather, every rounding against exact rational arithmetic."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli.dimensions import Copies, Growth, Laid
from widen_cli.dtypes import STORED, DType
from widen_cli.scales import ONE, Scale
from widen_cli.transform import Cast, Counts, rounded_once, widened_rows

HALF = Scale.of(Fraction(1, 2))
ROOT = Scale.of(2) ** Fraction(-1, 2)
FLOATS = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]
SMALL = ["F16", "BF16", "F8_E4M3", "F8_E5M2"]
INTEGERS = ["I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL"]
BITS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
EXACT_SCALES = (ONE, HALF, Scale.of(2))


def array_type(dtype: DType) -> np.dtype:
    assert dtype.numpy is not None
    return dtype.numpy


def bits_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(BITS[array.dtype.itemsize])


# A slow gather: where each new position comes from, its scale, and whether it is silent.


def origins(growth: Growth) -> Iterator[tuple[int, Scale, bool]]:
    """(old position, scale, zero) of every new position, written down from the docstring of Copies and Laid."""
    if isinstance(growth, Laid):
        start = 0
        for part in growth.parts:
            yield from ((start + old, scale, zero) for old, scale, zero in origins(part))
            start += size(part)
        return
    for position, copy in product(range(growth.size), range(growth.copies)):
        silent = growth.first_only and copy > 0
        if growth.inner is None:
            yield position, growth.scale, silent
        else:
            for old, scale, zero in origins(growth.inner):
                yield position * size(growth.inner) + old, scale, zero or silent


def size(growth: Growth) -> int:
    if isinstance(growth, Laid):
        return sum(map(size, growth.parts))
    return growth.size * (size(growth.inner) if growth.inner else 1)


def gathered(rows: np.ndarray, trailing: tuple[Growth, ...], scale: Scale, target: DType) -> np.ndarray:
    """The widened rows one value at a time; all products are exact by choice of values and scales."""
    axes = [list(origins(growth)) for growth in trailing]
    result = np.zeros((len(rows), *map(len, axes)), array_type(target))
    for place in np.ndindex(*result.shape):
        found = [axis[at] for axis, at in zip(axes, place[1:], strict=True)]
        if not any(zero for _, _, zero in found):
            factor = math.prod((float(leaf) for _, leaf, _ in found), start=float(scale))
            value = rows[(place[0], *(old for old, _, _ in found))]
            result[place] = value if factor == 1 else array_type(target).type(float(value) * factor)
    return result


def trees(scales: tuple[Scale, ...]) -> st.SearchStrategy[Growth]:
    sizes, copies = st.integers(1, 3), st.sampled_from([1, 1, 2, 3, 4])
    leaves = st.builds(Copies, sizes, copies, st.booleans(), st.sampled_from(scales))

    def deeper(inner: st.SearchStrategy[Growth]) -> st.SearchStrategy[Growth]:
        nested = st.builds(Copies, sizes, copies, st.booleans(), st.just(ONE), inner)
        return nested | st.lists(inner, min_size=1, max_size=3).map(lambda parts: Laid(tuple(parts)))

    return st.recursive(leaves, deeper, max_leaves=4)


def small(growths: list[Growth]) -> bool:
    return math.prod(growth.new for growth in growths) <= 1500


@pytest.mark.parametrize("name", FLOATS)
@settings(deadline=None, max_examples=60)
@given(
    trailing=st.lists(trees(EXACT_SCALES), max_size=3).filter(small),
    scale=st.sampled_from(EXACT_SCALES),
    n=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_every_value_stands_where_the_tree_says(
    name: str, trailing: list[Growth], scale: Scale, n: int, seed: int
) -> None:
    dtype, counts = STORED[name], Counts()
    whole = np.random.default_rng(seed).integers(-7, 8, (n, *map(size, trailing)))
    rows = (whole / 4).astype(array_type(dtype))
    wide = widened_rows(rows, tuple(trailing), scale, Cast(dtype, dtype), counts)
    np.testing.assert_array_equal(wide, bits_of(gathered(rows, tuple(trailing), scale, dtype)))
    assert (counts.values, counts.rounded, counts.overflowed) == (rows.size, 0, 0)


@pytest.mark.parametrize("name", INTEGERS)
@settings(deadline=None, max_examples=20)
@given(trailing=st.lists(trees((ONE,)), min_size=1, max_size=2).filter(small))
def test_integers_are_moved_as_they_are(name: str, trailing: list[Growth]) -> None:
    dtype = STORED[name]
    numbers = np.random.default_rng(0).integers(0, 256, (2, *map(size, trailing), array_type(dtype).itemsize), np.uint8)
    rows = numbers.view(array_type(dtype))[..., 0]
    wide = widened_rows(rows, tuple(trailing), ONE, Cast(dtype, dtype), Counts())
    np.testing.assert_array_equal(wide, bits_of(gathered(rows, tuple(trailing), ONE, dtype)))


@settings(deadline=None, max_examples=60)
@given(trailing=st.lists(trees((ONE,)), min_size=1, max_size=2).filter(small), seed=st.integers(0, 9))
def test_scale_one_carries_every_bit(trailing: list[Growth], seed: int) -> None:
    """NaN payloads, signalling NaNs, infinities and signed zeros included."""
    for name in FLOATS:
        dtype, counts = STORED[name], Counts()
        raw = np.random.default_rng(seed).integers(
            0, 256, (2, *map(size, trailing), array_type(dtype).itemsize), np.uint8
        )
        bits = raw.view(BITS[array_type(dtype).itemsize])[..., 0]
        as_integers = STORED[{1: "U8", 2: "U16", 4: "U32", 8: "U64"}[array_type(dtype).itemsize]]
        wide = widened_rows(bits.view(array_type(dtype)), tuple(trailing), ONE, Cast(dtype, dtype), counts)
        np.testing.assert_array_equal(wide, bits_of(gathered(bits, tuple(trailing), ONE, as_integers)))
        assert (counts.rounded, counts.overflowed) == (0, 0)


def test_parts_of_one_dimension_have_scales_of_their_own() -> None:
    growth = Copies(2, 2, inner=Laid((Copies(1, 1, scale=HALF), Copies(2, 2, scale=Scale.of(3)))))
    rows = np.arange(1, 7, dtype=np.float32)[None]
    wide = widened_rows(rows, (growth,), Scale.of(2), Cast(STORED["F32"], STORED["F32"]), Counts())
    first, second = [1, 12, 12, 18, 18], [4, 30, 30, 36, 36]
    assert wide.view(np.float32).tolist() == [first + first + second + second]


def test_scales_of_two_dimensions_multiply() -> None:
    rows = np.array([[[1.0, 10.0], [100.0, 1000.0]]])
    split = Laid((Copies(1, 1, scale=HALF), Copies(1, 2, scale=Scale.of(3))))
    wide = widened_rows(rows, (split, split), ONE, Cast(STORED["F64"], STORED["F64"]), Counts())
    assert wide.view(np.float64).tolist() == [[[0.25, 15.0, 15.0], [150.0, 9000.0, 9000.0], [150.0, 9000.0, 9000.0]]]


def test_only_the_first_copies_hold_values() -> None:
    rows = np.array([[1.0, 2.0]], np.float16)
    for copies in (2, 3, 4, 5):
        wide = widened_rows(rows, (Copies(2, copies, True),), ONE, Cast(STORED["F16"], STORED["F16"]), Counts())
        silent = [0.0] * (copies - 1)
        assert wide.view(np.float16).tolist() == [[1.0, *silent, 2.0, *silent]]


def test_each_value_is_counted_once() -> None:
    rows = np.array([[1.0, 3.0, 65504.0, np.inf, 2.0**-24]], np.float16)
    counts = Counts()
    widened_rows(rows, (Copies(5, 7),), HALF, Cast(STORED["F16"], STORED["F16"]), counts)
    assert (counts.values, counts.rounded, counts.overflowed) == (5, 1, 0)
    widened_rows(rows, (Copies(5, 7),), Scale.of(2), Cast(STORED["F16"], STORED["F16"]), counts)
    assert (counts.values, counts.rounded, counts.overflowed) == (10, 1, 1)


# Rounding, against exact arithmetic on fractions.


class Grid:
    """The non-negative numbers of a small type in the order of their bits, and one more beyond the last."""

    def __init__(self, dtype: DType) -> None:
        self.sign = 1 << (dtype.bits - 1)
        with np.errstate(invalid="ignore"):
            values = np.arange(self.sign, dtype=BITS[dtype.bits // 8]).view(array_type(dtype)).astype(np.float64)
        self.last = int(np.flatnonzero(np.isfinite(values))[-1])
        self.floats = values[: self.last + 1].tolist()
        self.floats.append(2 * self.floats[-1] - self.floats[-2])

    def nearest(self, value: Fraction, scale: Scale) -> tuple[int, bool]:
        """The index of |value| * scale rounded to nearest even, and whether it was hit exactly.

        Roots are never taken: both sides are raised to the power that makes the scale a fraction.
        """
        root = math.lcm(*(power.denominator for _, power in scale.powers))
        ratio = (scale**root).fraction
        assert ratio is not None
        target = abs(value) ** root * ratio
        low = min(bisect.bisect_right(self.floats, abs(float(value)) * float(scale)), self.last + 1) - 1
        while low and Fraction(self.floats[low]) ** root > target:
            low -= 1
        while low < self.last and Fraction(self.floats[low + 1]) ** root <= target:
            low += 1
        middle = ((Fraction(self.floats[low]) + Fraction(self.floats[low + 1])) / 2) ** root
        above = target > middle or (target == middle and low % 2 == 1)
        return low + above, Fraction(self.floats[low + above]) ** root == target


GRIDS = {name: Grid(STORED[name]) for name in SMALL}
SCALES = {
    "half": HALF,
    "double": Scale.of(2),
    "2^-9": HALF**9,
    "2^12": Scale.of(2) ** 12,
    "2^-30": HALF**30,
    "2^29": Scale.of(2) ** 29,
    "2^300": Scale.of(2) ** 300,
    "third": Scale.of(Fraction(1, 3)),
    "3": Scale.of(3),
    "2/3": Scale.of(Fraction(2, 3)),
    "root": ROOT,
    "fourth root": Scale.of(2) ** Fraction(-3, 4),
    "root of 3": Scale.of(3) ** Fraction(1, 2),
}


def sampled(dtype: DType) -> np.ndarray:
    """Finite values of a type: all of an 8-bit type, of larger ones the ends, and a spread of 1500."""
    bits = np.arange(1 << min(dtype.bits, 16), dtype=np.uint64)
    if dtype.bits == 16:
        ends = np.concatenate([bits[:40], bits[0x3C00 - 20 : 0x3C00 + 20], bits[0x7BE0:0x7C00], bits[0x7F60:0x7F80]])
        bits = np.unique(np.concatenate([ends, ends + 0x8000, np.random.default_rng(5).choice(bits, 1500)]))
    values = bits.astype(BITS[dtype.bits // 8]).view(array_type(dtype))
    with np.errstate(invalid="ignore"):
        return values[np.isfinite(values)]


def check_rounding(values: np.ndarray, source: DType, target: DType, scale: Scale) -> None:
    grid, counts = GRIDS[target.name], Counts()
    found = Cast(source, target).scaled(values, scale, counts)
    rounded = overflowed = 0
    for value, bits in zip(values.astype(np.float64).tolist(), found.tolist(), strict=True):
        index, hit = grid.nearest(Fraction(value), scale)
        beyond = index > grid.last
        negative = math.copysign(1.0, value) < 0
        if beyond:
            assert not np.isfinite(np.array(bits, found.dtype).view(array_type(target))), value
        else:
            assert bits == index + (grid.sign if negative else 0), (value, scale, bits, index)
        overflowed += beyond
        rounded += not hit and not beyond
    assert (counts.values, counts.rounded, counts.overflowed) == (len(values), rounded, overflowed)


@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("name", SMALL)
def test_small_types_round_once_to_nearest_even(name: str, scale: str) -> None:
    check_rounding(sampled(STORED[name]), STORED[name], STORED[name], SCALES[scale])


def ties(target: DType, source: DType) -> np.ndarray:
    """Numbers at, just below and just above the middles between neighbours of a small type, and the far ends."""
    grid = GRIDS[target.name]
    picked = np.unique(np.linspace(0, grid.last, 120).astype(int).tolist() + list(range(5)) + [grid.last - 1])
    middles = [(grid.floats[at] + grid.floats[at + 1]) / 2 for at in picked]
    values = np.array([*middles, *(grid.floats[at] for at in picked)], np.float64)
    kind = array_type(source)
    near = values[values <= np.finfo(kind).max].astype(kind)
    smallest = np.finfo(kind).smallest_subnormal if source.name == "F32" else 1e-300
    tiny = np.array([smallest, 4 * smallest, np.finfo(kind).max], kind)
    near = np.concatenate([near, np.nextafter(near, kind.type(0)), np.nextafter(near, kind.type(np.inf)), tiny])
    near = near[np.isfinite(near) & ((near == 0) | (near >= smallest))]
    return np.concatenate([near, -near])


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize(
    ("source", "scale"),
    [("F32", "one"), ("F32", "half"), ("F32", "third"), ("F32", "root"), ("F64", "one"), ("F64", "half")],
)
def test_casts_to_small_types_round_once(source: str, target: str, scale: str) -> None:
    """A value a hair beside a middle goes to its own side, though float32 would call it the middle."""
    values = ties(STORED[target], STORED[source])
    check_rounding(values, STORED[source], STORED[target], SCALES.get(scale, ONE))


@pytest.mark.parametrize("target", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_a_hair_beside_a_middle(target: str) -> None:
    step = {"BF16": 2.0**-7, "F8_E4M3": 2.0**-3, "F8_E5M2": 2.0**-2}[target]
    hair = 2.0**-40
    exact = np.array(
        [1 + step / 2 + hair, 1 + step / 2, 1 + step / 2 - hair, 1 + 3 * step / 2 - hair, 1 + 3 * step / 2]
    )
    rounded = rounded_once(np.concatenate([exact, -exact]), array_type(STORED[target])).astype(np.float64)
    expected = [1 + step, 1, 1, 1 + step, 1 + 2 * step]
    assert rounded.tolist() == [*expected, *(-value for value in expected)]


@pytest.mark.parametrize("target", SMALL)
def test_what_is_too_small_becomes_a_signed_zero(target: str) -> None:
    exact = np.array([1e-60, -1e-60, 1e-46, -1e-46, 0.0, -0.0])
    with np.errstate(all="ignore"):
        rounded = rounded_once(exact, array_type(STORED[target])).astype(np.float64)
    assert rounded.tolist() == [0.0] * 6
    assert np.signbit(rounded).tolist() == [False, True] * 3


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("scale", ["half", "third", "root"])
def test_zeros_keep_their_sign_and_infinities_stay(name: str, scale: str) -> None:
    dtype, counts = STORED[name], Counts()
    specials = [0.0, -0.0, math.nan] if name == "F8_E4M3" else [0.0, -0.0, math.nan, math.inf, -math.inf]
    values = np.array(specials).astype(array_type(dtype))
    found = Cast(dtype, dtype).scaled(values, SCALES[scale], counts).view(array_type(dtype)).astype(np.float64)
    np.testing.assert_array_equal(found, specials)
    assert np.signbit(found[:2]).tolist() == [False, True]
    assert (counts.rounded, counts.overflowed) == (0, 0)


def wide_neighbours(y: float, kind: np.dtype) -> tuple[Fraction, Fraction]:
    below, above = np.nextafter(kind.type(y), kind.type(-np.inf)), np.nextafter(kind.type(y), kind.type(np.inf))
    return (Fraction(float(below)) + Fraction(y)) / 2, (Fraction(float(above)) + Fraction(y)) / 2


@pytest.mark.parametrize("name", ["F32", "F64"])
@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(1, 3), Fraction(2, 3), Fraction(3), Fraction(1, 7)])
def test_wide_types_round_once_by_fractions(name: str, scale: Fraction) -> None:
    dtype, counts = STORED[name], Counts()
    kind = array_type(dtype)
    values = np.random.default_rng(3).standard_normal(2000).astype(kind)
    values = np.concatenate([values, kind.type([1, 3, 7, 0.1]), np.array([np.finfo(kind).smallest_subnormal]) * 5])
    found = Cast(dtype, dtype).scaled(values.astype(kind), Scale.of(scale), counts).view(kind)
    rounded = 0
    for value, y in zip(values.tolist(), found.tolist(), strict=True):
        low, high = wide_neighbours(y, kind)
        exact = Fraction(value) * scale
        assert low <= exact <= high, (value, y)
        rounded += exact != Fraction(y)
    assert counts.rounded == rounded


@pytest.mark.parametrize("name", ["F32", "F64"])
def test_wide_types_by_roots_are_right_to_the_last_places(name: str) -> None:
    dtype = STORED[name]
    kind = array_type(dtype)
    values = np.random.default_rng(3).standard_normal(2000).astype(kind)
    found = Cast(dtype, dtype).scaled(values, ROOT, Counts()).view(kind)
    for value, y in zip(values.tolist(), np.abs(found).tolist(), strict=True):
        step = Fraction(float(np.spacing(kind.type(y)))) * (1 if name == "F32" else 2)
        assert (Fraction(y) - step) ** 2 < Fraction(value) ** 2 / 2 < (Fraction(y) + step) ** 2


def test_a_cast_to_a_wider_type_is_exact() -> None:
    for name, target in (("BF16", "F32"), ("F16", "F64"), ("F8_E5M2", "F16"), ("F32", "F64")):
        counts = Counts()
        values = np.random.default_rng(1).standard_normal(500).astype(array_type(STORED[name]))
        found = Cast(STORED[name], STORED[target]).scaled(values, ONE, counts).view(array_type(STORED[target]))
        np.testing.assert_array_equal(found.astype(np.float64), values.astype(np.float64))
        assert counts == Counts(values=500)


# A gain that is stored as w and used as 1 + w becomes s (1 + w) - 1.


@pytest.mark.parametrize("name", ["BF16", "F16"])
@pytest.mark.parametrize("scale", ["half", "third", "2/3"])
def test_offset_gains(name: str, scale: str) -> None:
    dtype, counts, factor = STORED[name], Counts(), SCALES[scale].fraction
    assert factor is not None
    values = sampled(dtype)
    values = values[np.abs(values.astype(np.float64)) < 8]
    found = Cast(dtype, dtype, 1).scaled(values, SCALES[scale], counts)
    grid, rounded = GRIDS[name], 0
    for value, bits in zip(values.astype(np.float64).tolist(), found.tolist(), strict=True):
        exact = factor * (1 + Fraction(value)) - 1
        index, hit = grid.nearest(exact, ONE)
        assert bits % grid.sign == index, (value, float(exact))
        assert not index or bits == index + (grid.sign if exact < 0 else 0)
        rounded += not hit
    assert counts.rounded == rounded


def test_offset_gains_with_scale_one_are_untouched() -> None:
    values = np.array([0.1, -0.3, 5.0], np.float32)
    found = Cast(STORED["F32"], STORED["F32"], 1).scaled(values, ONE, Counts())
    np.testing.assert_array_equal(found, values.view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "BF16", "F8_E4M3"])
@pytest.mark.parametrize("growth", [Copies(4, 2, True), Copies(1, 2, True, inner=Copies(4))], ids=["beside", "behind"])
def test_a_silent_copy_of_an_offset_gain_is_minus_one(name: str, growth: Copies) -> None:
    """So that 1 + w is zero; without an offset it is zero itself."""
    dtype = STORED[name]
    values = np.array([[0.5, -0.25, 0.0, 2.0]], array_type(dtype))
    for offset, silent in ((1, -1.0), (0, 0.0)):
        found = widened_rows(values, (growth,), ONE, Cast(dtype, dtype, offset), Counts()).view(array_type(dtype))
        copies = found.reshape(4, 2).T if growth.inner is None else found.reshape(2, 4)
        np.testing.assert_array_equal(copies[0], values[0])
        np.testing.assert_array_equal(copies[1].astype(np.float64), silent)
