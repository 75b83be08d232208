"""Widened blocks dequantise, bit for bit, to the widened values: every type of ggml against gguf-py and its structs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli import blocks as blocks_module
from widen_cli.blocks import (
    BLOCK_TYPES,
    BlockLayoutError,
    BlockType,
    block_type,
    can_scale,
    can_widen,
    scale_blocks,
    widen_row_blocks,
)
from widen_cli.blocks.codes import PlaneAccess, coders
from widen_cli.blocks.types import Plane, Trits
from widen_cli.dimensions import Copies, Growth, Laid
from widen_cli.scales import ONE, Scale

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

NAMES = sorted(BLOCK_TYPES)
ROW = 512  # two blocks of every type or more

# From ggml-common.h: values in a block, values under one scale, values under one code, and the aligned runs of zeros that
# can stand beside other values (the block where there is no such zero).
STRUCTURE = {
    "Q1_0": (128, 128, 1, 128),
    "Q2_0": (64, 64, 1, 1),
    "Q4_0": (32, 32, 1, 1),
    "Q4_1": (32, 32, 1, 32),
    "Q5_0": (32, 32, 1, 1),
    "Q5_1": (32, 32, 1, 32),
    "Q8_0": (32, 32, 1, 1),
    "Q8_1": (32, 32, 1, 1),
    "Q8_K": (256, 256, 1, 1),
    "IQ4_NL": (32, 32, 1, 32),
    "TQ1_0": (256, 256, 1, 1),
    "TQ2_0": (256, 256, 1, 1),
    "MXFP4": (32, 32, 1, 1),
    "Q2_K": (256, 16, 1, 16),
    "Q3_K": (256, 16, 1, 1),
    "Q4_K": (256, 32, 1, 32),
    "Q5_K": (256, 32, 1, 32),
    "Q6_K": (256, 16, 1, 1),
    "IQ4_XS": (256, 32, 1, 32),
    "NVFP4": (64, 16, 1, 1),
    "IQ1_S": (256, 32, 8, 256),
    "IQ1_M": (256, 16, 8, 256),
    "IQ2_XXS": (256, 32, 8, 256),
    "IQ2_XS": (256, 16, 8, 256),
    "IQ2_S": (256, 16, 8, 256),
    "IQ3_XXS": (256, 32, 8, 256),
    "IQ3_S": (256, 32, 4, 256),
}
# Where float16 scales stand in a block.
HALVES = {
    **dict.fromkeys(["Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"], (0,)),
    **dict.fromkeys(["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q8_1", "Q4_K", "Q5_K"], (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


# The types that gguf-py does not dequantise, straight from their structs.


def half(stored: Bytes) -> Values:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def q1_0(stored: Bytes) -> Values:
    return half(stored[:, :2]) * np.where(np.unpackbits(stored[:, 2:], axis=1, bitorder="little"), 1, -1)


def q2_0(stored: Bytes) -> Values:
    codes = [stored[:, 2 + value // 4] >> (2 * (value % 4)) & 3 for value in range(64)]
    return half(stored[:, :2]) * (np.stack(codes, axis=1).astype(np.float32) - 1)


def q8_1(stored: Bytes) -> Values:
    return half(stored[:, :2]) * stored[:, 4:].view(np.int8)


def q8_k(stored: Bytes) -> Values:
    return np.ascontiguousarray(stored[:, :4]).view("<f4") * stored[:, 4:260].view(np.int8)


OWN: dict[str, Callable[[Bytes], Values]] = {"Q1_0": q1_0, "Q2_0": q2_0, "Q8_1": q8_1, "Q8_K": q8_k}


def values(stored: Bytes, name: str) -> Values:
    """Rows of blocks [rows, bytes], dequantised."""
    flat = np.ascontiguousarray(stored).reshape(-1, BLOCK_TYPES[name].nbytes)
    with np.errstate(all="ignore"):
        found = OWN[name](flat) if name in OWN else dequantize(flat, gguf.GGMLQuantizationType[name])
    return found.astype(np.float32).reshape(len(stored), -1)


def bits(array: Values) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(array).view(np.uint32)


def random_blocks(name: str, row: int, seed: int, rows: int = 3) -> Bytes:
    """Rows of random bytes, drawn again where a block holds NaN or infinity: those have no bits of their own to compare."""
    kind, draw = BLOCK_TYPES[name], np.random.default_rng(seed)
    stored = draw.integers(0, 256, (rows * row // kind.size, kind.nbytes), np.uint8)
    while True:
        scales = [half(stored[:, at : at + 2]) for at in HALVES.get(name, ())]
        finite = np.isfinite(np.concatenate([values(stored, name), *scales], axis=1)).all(axis=1)
        if finite.all():
            return stored.reshape(rows, -1)
        stored[~finite] = draw.integers(0, 256, stored[~finite].shape, np.uint8)


@cache
def places(growth: Growth, start: int = 0) -> list[int | None]:
    """The old place of each new value, None for a zero: the tree read aloud."""
    if isinstance(growth, Laid):
        found: list[int | None] = []
        for part in growth.parts:
            found += places(part, start)
            start += part.old
        return found
    found = []
    for position in range(growth.size):
        inner = places(growth.inner, start + position * growth.inner.old) if growth.inner else [start + position]
        for copy in range(growth.copies):
            found += [None] * len(inner) if growth.first_only and copy else inner
    return found


def fits(name: str, found: list[int | None]) -> bool:
    """Whether blocks of the type can hold values from these places, by the structure of the type alone."""
    size, sub, atom, zeros = STRUCTURE[name]

    def units(length: int) -> list[list[int | None]]:
        return [found[at : at + length] for at in range(0, len(found), length)]

    # A block of NVFP4 has no scale of its own.
    for length in (sub,) if name == "NVFP4" else (size, sub):
        if any(len({place // length for place in unit if place is not None}) > 1 for unit in units(length)):
            return False
    for at, unit in enumerate(units(zeros)):
        block = at * zeros // size * size
        if None in unit and set(unit) != {None} and set(found[block : block + size]) != {None}:
            return False
    codes = [unit for unit in units(atom) if unit[0] is not None]
    return all(unit == list(range(unit[0] // atom * atom, unit[0] // atom * atom + atom)) for unit in codes)


def assert_promise(name: str, stored: Bytes, growth: Growth) -> None:
    """can_widen says what the structure says, and where it can, every value is the one of its place."""
    kind, found = BLOCK_TYPES[name], places(growth)
    assert (can_widen(kind, growth) is None) == fits(name, found), (name, growth, can_widen(kind, growth))
    if can_widen(kind, growth) is not None:
        with pytest.raises(BlockLayoutError) as refused:
            widen_row_blocks(stored, kind, growth)
        assert str(refused.value) == can_widen(kind, growth)
        return
    wide = values(widen_row_blocks(stored, kind, growth), name)
    zero = np.array([place is None for place in found])
    expected = values(stored, name)[:, [place or 0 for place in found]]
    assert wide.shape == expected.shape
    assert np.array_equal(bits(wide[:, ~zero]), bits(expected[:, ~zero])), (name, growth)
    assert not wide[:, zero].any(), (name, growth)


def interleaved(group: int, copies: int, first_only: bool = False) -> Growth:
    return Copies(math.lcm(ROW, group) // group, copies, first_only, inner=Copies(group) if group > 1 else None)


def tiled(copies: int, first_only: bool = False) -> Growth:
    return Copies(1, copies, first_only, inner=Copies(ROW))


# The promise.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("copies", [2, 3, 4, 5])
def test_interleaved_groups_of_any_size(name: str, copies: int) -> None:
    for group in (1, 2, 4, 8, 16, 32, 64, 80, 128, 256, 512):
        growth = interleaved(group, copies)
        assert_promise(name, random_blocks(name, growth.old, copies), growth)


@pytest.mark.parametrize("name", NAMES)
def test_every_type_can_be_tiled(name: str) -> None:
    stored = random_blocks(name, ROW, 1)
    for copies, first_only in product((2, 3, 4), (False, True)):
        assert can_widen(BLOCK_TYPES[name], tiled(copies, first_only)) is None
        assert_promise(name, stored, tiled(copies, first_only))


@pytest.mark.parametrize("name", NAMES)
def test_copies_that_are_zero(name: str) -> None:
    stored = random_blocks(name, ROW, 2)
    for group, copies in product((1, 8, 16, 32, 64, 256, 512), (2, 3)):
        assert_promise(name, stored, interleaved(group, copies, first_only=True))


@pytest.mark.parametrize("name", [name for name in NAMES if STRUCTURE[name][2] == 1])
def test_single_values_can_be_interleaved_by_any_number(name: str) -> None:
    for copies in (6, 7, 8, 9, 16, 32, 64):
        assert can_widen(BLOCK_TYPES[name], interleaved(1, copies)) is None
        assert_promise(name, random_blocks(name, ROW, copies, rows=1), interleaved(1, copies))


def trees(total: int) -> st.SearchStrategy[Growth]:
    def copies(size: int) -> st.SearchStrategy[Growth]:
        def with_inner(step: int) -> st.SearchStrategy[Growth]:
            inner = st.none() if step == 1 else st.builds(Copies, st.just(step), st.integers(1, 3), st.booleans())
            return st.builds(
                lambda count, first, tree: Copies(size // step, count, first, inner=tree),
                st.integers(1, 4),
                st.booleans(),
                inner,
            )

        return st.sampled_from([step for step in range(1, size + 1) if size % step == 0]).flatmap(with_inner)

    cuts = st.lists(st.sampled_from(range(16, total, 16)), max_size=3, unique=True).map(sorted)
    return cuts.flatmap(
        lambda at: st.tuples(*(copies(b - a) for a, b in zip([0, *at], [*at, total], strict=True))).map(
            lambda parts: Laid(parts) if len(parts) > 1 else parts[0]
        )
    )


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMES), trees(512), st.integers(0, 99))
def test_any_tree_is_carried_out_or_refused(name: str, growth: Growth, seed: int) -> None:
    kind = BLOCK_TYPES[name]
    if growth.new % kind.size:
        assert f"rows of {growth.new} values do not fill blocks" in str(can_widen(kind, growth))
    else:
        assert_promise(name, random_blocks(name, 512, seed, rows=2), growth)


@pytest.mark.parametrize("name", NAMES)
def test_steps_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, stored = BLOCK_TYPES[name], random_blocks(name, 512, 3, rows=7)
    growths = (
        Copies(1, 2, inner=Copies(512)),
        Copies(16, 3, inner=Copies(32)),
        Copies(512, 2),
        Copies(16, 2, True, inner=Copies(32)),
    )
    possible = [growth for growth in growths if can_widen(kind, growth) is None]
    expected = [widen_row_blocks(stored, kind, growth) for growth in possible]
    monkeypatch.setattr(blocks_module, "_STEP", 5000)
    monkeypatch.setattr(blocks_module, "_CODES", 2500)
    for growth, wide in zip(possible, expected, strict=True):
        assert np.array_equal(widen_row_blocks(stored, kind, growth), wide)
        parts = [widen_row_blocks(stored[at : at + 1], kind, growth) for at in range(7)]
        assert np.array_equal(np.concatenate(parts), wide)


@pytest.mark.parametrize("name", NAMES)
def test_codes_moved_as_they_lie_are_those_taken_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, stored = BLOCK_TYPES[name], random_blocks(name, 512, 16)
    growths = [
        Copies(512 // group, copies, inner=Copies(group)) for group, copies in product((1, 2, 8, 64, 128), (2, 3, 4, 8))
    ]
    possible = [growth for growth in growths if can_widen(kind, growth) is None]
    moved = [widen_row_blocks(stored, kind, growth) for growth in possible]
    monkeypatch.setattr(PlaneAccess, "move", lambda *_: False)
    for growth, wide in zip(possible, moved, strict=True):
        assert np.array_equal(widen_row_blocks(stored, kind, growth), wide), growth


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_lie_anywhere_and_are_left_alone(name: str) -> None:
    kind, stored = BLOCK_TYPES[name], random_blocks(name, 512, 4)
    room = np.zeros((5, stored.shape[1] + 3), np.uint8)
    room[1:4, 1:-2] = stored
    room.flags.writeable = False
    growth = Copies(512, 2) if can_widen(kind, Copies(512, 2)) is None else Copies(64, 2, inner=Copies(8))
    assert np.array_equal(widen_row_blocks(room[1:4, 1:-2], kind, growth), widen_row_blocks(stored, kind, growth))
    odd = np.frombuffer(b"\0" + stored.tobytes(), np.uint8)[1:].reshape(stored.shape)
    assert np.array_equal(widen_row_blocks(odd, kind, growth), widen_row_blocks(stored, kind, growth))
    assert widen_row_blocks(stored[:0], kind, growth).shape == (0, 2 * stored.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_grown_is_nothing_changed(name: str) -> None:
    stored = random_blocks(name, 512, 5)
    assert np.array_equal(widen_row_blocks(stored, BLOCK_TYPES[name], Copies(512)), stored)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_zeros_is_zero_bytes(name: str) -> None:
    kind = BLOCK_TYPES[name]
    wide = widen_row_blocks(random_blocks(name, 512, 6), kind, Copies(1, 2, True, inner=Copies(512)))
    assert not wide[:, wide.shape[1] // 2 :].any()


@pytest.mark.parametrize("name", ["Q8_K", "Q8_1"])
def test_sums_follow_the_quants(name: str) -> None:
    kind = BLOCK_TYPES[name]
    for growth in (Copies(512, 2), Copies(64, 3, inner=Copies(8)), Copies(512, 2, True)):
        stored = random_blocks(name, 512, 7)
        wide = widen_row_blocks(stored, kind, growth).reshape(-1, kind.nbytes)
        if name == "Q8_K":
            sums = wide[:, 4:260].view(np.int8).reshape(len(wide), 16, 16).sum(axis=2)
            assert np.array_equal(np.ascontiguousarray(wide[:, 260:]).view("<i2"), sums)
        else:
            sums = half(wide[:, :2])[:, 0] * wide[:, 4:].view(np.int8).sum(axis=1)
            with np.errstate(over="ignore"):
                assert np.array_equal(half(wide[:, 2:4])[:, 0], sums.astype(np.float16))


def test_values_of_real_quantisers_survive() -> None:
    weights = np.random.default_rng(8).normal(0, 0.04, (4, 512)).astype(np.float32)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"):
        stored = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
        assert_promise(name, stored, Copies(512, 2))
        whole = Copies(512 // BLOCK_TYPES[name].size, 2, inner=Copies(BLOCK_TYPES[name].size))
        again = gguf.quants.quantize(
            weights[:, [place or 0 for place in places(whole)]], gguf.GGMLQuantizationType[name]
        )
        assert np.array_equal(widen_row_blocks(stored, BLOCK_TYPES[name], whole), again)


def test_trits_are_written_as_ggml_writes_them() -> None:
    trits = np.random.default_rng(9).integers(-1, 2, (2, 512)).astype(np.float32)
    trits[:, ::16] = 1
    quantize: Any = gguf.quants.quantize
    kind = gguf.GGMLQuantizationType.TQ1_0
    wide = widen_row_blocks(quantize(trits, kind), BLOCK_TYPES["TQ1_0"], Copies(512, 3))
    assert np.array_equal(wide, quantize(np.repeat(trits, 3, axis=1), kind))


# The descriptions.


def test_every_block_type_is_described() -> None:
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items() if size[0] > 1}
    # gguf-py keeps two float32 in Q8_1, where ggml has had two float16 since 2023; Q2_0 is younger than gguf-py 0.19.
    expected = sizes | {"Q8_1": (32, 36), "Q2_0": (64, 18)}
    assert {kind.name: (kind.size, kind.nbytes) for kind in BLOCK_TYPES.values()} == expected
    assert {name: (kind.size, kind.zero_run, kind.atom) for name, kind in BLOCK_TYPES.items()} == {
        name: (size, zeros, atom) for name, (size, _, atom, zeros) in STRUCTURE.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_a_block_is_described_once(name: str) -> None:
    kind = BLOCK_TYPES[name]
    taken = [0] * (8 * kind.nbytes)
    for plane in (plane for codes in kind.codes for plane in codes.planes):
        for unit in range(plane.units):
            lane, turn = unit % plane.lanes, unit // plane.lanes % plane.in_word
            word = unit // (plane.lanes * plane.in_word) * plane.lanes + lane
            if isinstance(plane, Trits):
                taken[8 * (plane.at + word)] += turn == 0
                continue
            first = 8 * (plane.at + word * plane.word) + plane.shift + plane.width * turn
            for bit in range(first, first + plane.width):
                taken[bit] += 1
    if kind.sums is not None:
        for bit in range(8 * kind.sums.at, 8 * (kind.sums.at + 2 * (kind.size // kind.sums.of))):
            taken[bit] += 1
    if name == "TQ1_0":
        taken[: 8 * 52] = [taken[bit // 8 * 8] for bit in range(8 * 52)]
    assert set(taken) == {1}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "TQ1_0"])
def test_taken_apart_and_put_together_is_the_same_block(name: str) -> None:
    kind = BLOCK_TYPES[name]
    stored = np.random.default_rng(10).integers(0, 256, (100, kind.nbytes), np.uint8)
    again = np.full_like(stored, 0xAA)
    for coder in coders(kind):
        units = coder.unpacked(stored)
        for plane in coder.planes:
            plane.pack(units.copy(), again)
    if kind.sums is not None:
        kept = slice(kind.sums.at, kind.sums.at + 2 * (kind.size // kind.sums.of))
        again[:, kept] = stored[:, kept]
    assert np.array_equal(again, stored)


def mutated(kind: BlockType, change: Callable[[Plane], Plane]) -> BlockType:
    """The type with every plane of its finest codes described wrongly."""
    codes = tuple(
        replace(codes, planes=tuple(change(plane) for plane in codes.planes if isinstance(plane, Plane)))
        if codes.size == kind.atom
        else codes
        for codes in kind.codes
    )
    return BlockType(kind.name, kind.size, kind.nbytes, kind.scales, codes)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Q6_K", lambda plane: replace(plane, lanes=32)),
        ("Q4_K", lambda plane: replace(plane, lanes=16)),
        ("IQ4_NL", lambda plane: replace(plane, lanes=1)),
        ("Q2_0", lambda plane: replace(plane, lanes=16)),
        ("Q8_0", lambda plane: replace(plane, at=0)),
    ],
)
def test_a_wrong_description_is_noticed(name: str, change: Callable[[Plane], Plane]) -> None:
    stored, growth = random_blocks(name, 512, 11), Copies(512, 2)
    wide = widen_row_blocks(stored, mutated(BLOCK_TYPES[name], change), growth)
    assert not np.array_equal(bits(values(wide, name)), bits(np.repeat(values(stored, name), 2, axis=1)))


# What cannot be.


@pytest.mark.parametrize(
    ("name", "growth", "reason"),
    [
        (
            "Q4_0",
            Copies(32, 2, inner=Copies(80)),
            "Q4_0: copies of runs of 80 values would bring values of two blocks, each with a scale of its own, "
            "into one block of 32; use --layout tile",
        ),
        (
            "NVFP4",
            Copies(32, 2, inner=Copies(8)),
            None,
        ),
        (
            "NVFP4",
            Copies(16, 2, inner=Copies(24)),
            "NVFP4: copies of runs of 24 values would bring values of two sub-blocks, each with a scale of its own, "
            "into one sub-block of 16; use --layout tile",
        ),
        (
            "IQ2_XS",
            Copies(256, 2),
            "IQ2_XS: one code stands for 8 values together, so single values cannot be copied; use --layout tile",
        ),
        (
            "IQ3_S",
            Copies(128, 2, inner=Copies(2)),
            "IQ3_S: one code stands for 4 values together, so runs of 2 values cannot be copied; use --layout tile",
        ),
        (
            "Q4_1",
            Copies(64, 2, True),
            "Q4_1: zeros cannot stand beside values in a block of 32, since none of its codes is 0; use --layout tile",
        ),
        (
            "Q4_K",
            Copies(256, 2, True),
            "Q4_K: zeros can stand beside values of a block only in whole sub-blocks of 32; use --layout tile",
        ),
        (
            "Q8_0",
            Copies(80, 2),
            "Q8_0: stored rows of 80 values do not fill blocks of 32; store this tensor in an unquantised type",
        ),
        (
            "Q8_0",
            Laid((Copies(16, 2), Copies(16))),
            "Q8_0: widened rows of 48 values do not fill blocks of 32; store this tensor in an unquantised type",
        ),
        (
            "Q8_0",
            Laid((Copies(1, 2, inner=Copies(48)), Copies(1, 2, inner=Copies(48)))),
            "Q8_0: copies of runs of 48 values would bring values of two blocks, each with a scale of its own, "
            "into one block of 32; store this tensor in an unquantised type",
        ),
        (
            "Q8_0",
            Copies(0, 2),
            "Q8_0: stored rows of 0 values do not fill blocks of 32; store this tensor in an unquantised type",
        ),
    ],
)
def test_what_cannot_be_done_says_why_and_what_to_do(name: str, growth: Growth, reason: str | None) -> None:
    assert can_widen(BLOCK_TYPES[name], growth) == reason


def test_rows_of_another_size_are_a_mistake_of_the_caller() -> None:
    kind = block_type("Q8_0")
    for wrong in (np.zeros((2, 35), np.uint8), np.zeros(34, np.uint8), np.zeros((2, 34), np.int8)):
        with pytest.raises(ValueError, match=r"Q8_0: .* are no rows of 32 values"):
            widen_row_blocks(wrong, kind, Copies(32, 2))


def test_an_unknown_type_is_named_with_the_nearest() -> None:
    with pytest.raises(BlockLayoutError) as refused:
        block_type("Q4K")
    assert str(refused.value) == "Q4K is no block type of ggml that can be widened (did you mean 'Q4_K'?)"


# Scales.

TWO, HALF, THIRD, ROOT = Scale.of(2), Scale.of(Fraction(1, 2)), Scale.of(Fraction(1, 3)), Scale.of(2) ** Fraction(1, 2)


def halves(stored: Bytes, name: str) -> npt.NDArray[np.float16]:
    """The float16 scales of blocks, [blocks, scales]."""
    flat = stored.reshape(-1, BLOCK_TYPES[name].nbytes)
    if name == "IQ1_M":
        words = np.ascontiguousarray(flat[:, 48:56]).view("<u2").astype(np.uint32) >> 12
        whole = words[:, 0] | words[:, 1] << 4 | words[:, 2] << 8 | words[:, 3] << 12
        return whole.astype("<u2").view("<f2")[:, None]
    return np.concatenate([np.ascontiguousarray(flat[:, at : at + 2]).view("<f2") for at in HALVES[name]], axis=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [ONE, TWO, HALF, Scale.of(Fraction(1, 8))])
def test_a_power_of_two_multiplies_every_value_unless_counted(name: str, factor: Scale) -> None:
    stored = random_blocks(name, 512, 12, rows=20).reshape(-1, BLOCK_TYPES[name].nbytes)
    exact = 0
    for block in stored:
        scaled, counts = scale_blocks(block[None], BLOCK_TYPES[name], factor)
        if counts.rounded or counts.overflowed:
            continue
        exact += 1
        assert np.array_equal(values(scaled, name), values(block[None], name) * np.float32(float(factor)))
    assert exact > len(stored) / (2 if factor is ONE else 4)


@pytest.mark.parametrize("name", [*HALVES, "IQ1_M"])
@pytest.mark.parametrize("factor", [TWO, HALF, THIRD, ROOT])
def test_float16_scales_are_rounded_once_and_counted(name: str, factor: Scale) -> None:
    stored = random_blocks(name, 2560, 13, rows=20)
    scaled, counts = scale_blocks(stored, BLOCK_TYPES[name], factor)
    old, new = halves(stored, name), halves(scaled, name)
    with np.errstate(over="ignore"):
        expected = (old.astype(np.float64) * float(factor)).astype(np.float16)
    assert np.array_equal(new, expected)
    assert counts.values == old.size
    assert counts.overflowed == np.isinf(expected).sum()
    products = [Fraction(float(number)) * (factor.fraction or 1) for number in old.flat]
    rounded = [
        number != 0 if factor.fraction is None else not np.isinf(result) and Fraction(float(result)) != exact
        for number, result, exact in zip(old.flat, expected.flat, products, strict=True)
    ]
    assert counts.rounded == sum(rounded) - (np.isinf(expected).sum() if factor.fraction is None else 0)
    assert np.array_equal(widen_back(scaled, stored, name), stored)


def widen_back(scaled: Bytes, stored: Bytes, name: str) -> Bytes:
    """The scaled blocks with the old scales put back: nothing else may have changed."""
    kind = BLOCK_TYPES[name]
    flat, old = scaled.reshape(-1, kind.nbytes).copy(), stored.reshape(-1, kind.nbytes)
    if name == "IQ1_M":
        flat[:, 49:56:2] = flat[:, 49:56:2] & 15 | old[:, 49:56:2] & 0xF0
    for at in HALVES.get(name, ()):
        flat[:, at : at + 2] = old[:, at : at + 2]
    return flat.reshape(stored.shape)


def test_float32_scales_of_q8_k() -> None:
    kind, stored = BLOCK_TYPES["Q8_K"], random_blocks("Q8_K", 2560, 14)
    scaled, counts = scale_blocks(stored, kind, THIRD)
    old, new = (np.ascontiguousarray(rows.reshape(-1, 292)[:, :4]).view("<f4") for rows in (stored, scaled))
    assert np.array_equal(new, (old.astype(np.float64) / 3).astype(np.float32))
    assert counts.values == old.size
    assert 0 < counts.rounded <= old.size


def test_mxfp4_can_be_multiplied_by_powers_of_two_only() -> None:
    kind = BLOCK_TYPES["MXFP4"]
    assert can_scale(kind, TWO) is None
    stored = np.zeros((256, 17), np.uint8)
    stored[:, 0], stored[:, 1:] = np.arange(256), 0x21
    scaled, counts = scale_blocks(stored, kind, Scale.of(8))
    assert scaled[:, 0].tolist() == [*range(3, 255), 254, 254, 254, 255]
    assert (counts.values, counts.rounded, counts.overflowed) == (256, 0, 3)
    scaled, counts = scale_blocks(stored, kind, HALF)
    assert scaled[:, 0].tolist() == [0, *range(254), 255]
    assert (counts.values, counts.rounded, counts.overflowed) == (256, 1, 0)
    reason = (
        "MXFP4: its scales are powers of two, so it cannot be multiplied by 1/sqrt(2); "
        "use a scaling that puts no factor here, or store this tensor in an unquantised type"
    )
    assert can_scale(kind, ROOT**-1) == reason
    with pytest.raises(BlockLayoutError) as refused:
        scale_blocks(stored, kind, ROOT**-1)
    assert str(refused.value) == reason


@pytest.mark.parametrize("factor", [TWO, HALF, THIRD, ROOT, Scale.of(Fraction(1, 4096)), Scale.of(4096)])
def test_nvfp4_scales_go_to_the_nearest(factor: Scale) -> None:
    stored = np.zeros((64, 36), np.uint8)
    stored[:, :4] = np.arange(256).reshape(64, 4)
    scaled, counts = scale_blocks(stored, BLOCK_TYPES["NVFP4"], factor)
    numbers: Any = gguf.quants.NVFP4
    old = numbers.ue4m3_to_fp32(stored[:, :4]).astype(np.float64).reshape(-1) * 2
    new = numbers.ue4m3_to_fp32(scaled[:, :4]).astype(np.float64).reshape(-1) * 2
    representable = numbers.ue4m3_to_fp32(np.arange(127, dtype=np.uint8)).astype(np.float64) * 2
    nearest = np.abs(old[:, None] * float(factor) - representable).min(axis=1)
    assert np.array_equal(np.abs(new - old * float(factor)), nearest)
    over = old * float(factor) > 448
    assert counts.overflowed == over.sum()
    assert counts.rounded == ((nearest > 0) & ~over).sum()
    assert counts.values == 256


def test_scaling_by_one_changes_nothing_and_copies() -> None:
    for name in NAMES:
        stored = random_blocks(name, 512, 15)
        scaled, counts = scale_blocks(stored, BLOCK_TYPES[name], ONE)
        assert not np.shares_memory(scaled, stored)
        assert counts.rounded == counts.overflowed == 0
        changed = values(scaled, name) != values(stored, name)
        assert not changed.any()
