"""The block formats of ggml, described bit by bit: one short description a type, from which all else follows.

Source: the structs of ggml/src/ggml-common.h and dequantize_row_* of ggml-quants.c (ggml 0.25.3). No arrays here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from widen_cli.errors import WidenError, did_you_mean


class BlockLayoutError(WidenError):
    """A quantised tensor cannot be changed as asked without dequantising it; the text says why and what to do."""


@dataclass(frozen=True)
class Plane:
    """Where equally wide codes stand in a block.

    From byte `at` on lie little-endian words of `word` bytes. A word holds `per` codes of `width` bits (0: as many as
    fit), the first of them at bit `shift`. With one lane the codes fill word after word; with more, `lanes` words
    side by side take one code each before any of them takes its second. These codes are the bits from `to` on of the
    units from `first` on.
    """

    at: int
    units: int
    width: int
    lanes: int = 1
    word: int = 1
    per: int = 0
    shift: int = 0
    first: int = 0
    to: int = 0

    @property
    def in_word(self) -> int:
        return self.per or (8 * self.word - self.shift) // self.width

    @property
    def nbytes(self) -> int:
        return self.units // self.in_word * self.word

    @property
    def fills_words(self) -> bool:
        """Whether its words hold nothing else."""
        return self.in_word * self.width == 8 * self.word


@dataclass(frozen=True)
class Trits:
    """Base-3 digits, `in_word` to a byte: the digits after the point of byte/256. Laid out in lanes, as in a plane."""

    at: int
    units: int
    lanes: int
    in_word: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        return self.units // self.in_word


@dataclass(frozen=True)
class Codes:
    """What a block stores once for every `size` of its values: a scale, a quant, an index into a codebook.

    Taken out of its planes it is one or more units of a byte. `zero` is the unit that makes those values 0 whatever
    else the block holds, None where there is none.
    """

    size: int
    planes: tuple[Plane | Trits, ...]
    zero: int | None = None

    @cached_property
    def units(self) -> int:
        """Units in a block."""
        return max(plane.first + plane.units for plane in self.planes)


@dataclass(frozen=True)
class ScaleField:
    """`count` neighbouring numbers from byte `at` on that values of the block are proportional to.

    `kind`: F16, F32, E8M0 (a power of two), UE4M3 (unsigned, without infinity), or F16_NIBBLES: one float16 with a
    quarter in the top bits of each of four 16-bit words.
    """

    at: int
    kind: str = "F16"
    count: int = 1


@dataclass(frozen=True)
class Sums:
    """Sums of `of` quants each, which a block keeps beside them: int16, or one float16 of scale times sum."""

    at: int
    of: int
    scaled: bool = False


@dataclass(frozen=True, eq=False)
class BlockType:
    """One block format: `size` values in `nbytes` bytes. `name` is ggml's; `scales` multiply every value."""

    name: str
    size: int
    nbytes: int
    scales: tuple[ScaleField, ...]
    codes: tuple[Codes, ...]
    sums: Sums | None = None

    def __repr__(self) -> str:
        return f"BlockType({self.name})"

    @cached_property
    def atom(self) -> int:
        """How many values one code stands for together; they cannot be copied apart."""
        return min(codes.size for codes in self.codes)

    @cached_property
    def zero_run(self) -> int:
        """Zeros can stand beside other values in aligned runs of this many; `size` where only in whole blocks."""
        return min((codes.size for codes in self.codes if codes.zero is not None), default=self.size)

    @cached_property
    def begun(self) -> frozenset[Plane | Trits]:
        """The planes that share bytes with a plane before them."""
        taken: set[int] = set()
        found = set()
        for plane in (plane for codes in self.codes for plane in codes.planes):
            span = set(range(plane.at, plane.at + plane.nbytes))
            if span & taken:
                found.add(plane)
            taken |= span
        return frozenset(found)


def _each(size: int, *planes: Plane | Trits, zero: int | None = None) -> Codes:
    return Codes(size, planes, zero)


def _once(at: int, nbytes: int) -> Codes:
    """Bytes that a block holds once; size 0 stands for the block's own."""
    return Codes(0, (Plane(at, nbytes, 8),))


def _f16(*offsets: int) -> tuple[ScaleField, ...]:
    return tuple(ScaleField(at) for at in offsets)


def _block(
    name: str, size: int, nbytes: int, scales: tuple[ScaleField, ...], *codes: Codes, sums: Sums | None = None
) -> BlockType:
    return BlockType(name, size, nbytes, scales, tuple(replace(code, size=code.size or size) for code in codes), sums)


# Six bits each for eight scales and eight minimums (get_scale_min_k4): the first four of each in the low bits of twice
# four bytes, the last four half in the nibbles of four more bytes and half in the two top bits of those eight.
SIX_BITS = (
    _each(
        *(32, Plane(4, 4, 6, lanes=4, per=1), Plane(12, 4, 4, lanes=4, per=1, first=4)),
        Plane(4, 4, 2, lanes=4, per=1, shift=6, first=4, to=4),
        zero=0,
    ),
    _each(
        *(32, Plane(8, 4, 6, lanes=4, per=1), Plane(12, 4, 4, lanes=4, per=1, shift=4, first=4)),
        Plane(8, 4, 2, lanes=4, per=1, shift=6, first=4, to=4),
        zero=0,
    ),
)
_TRITS = (Trits(0, 160, 32, 5), Trits(32, 80, 16, 5, first=160), Trits(48, 16, 4, 4, first=240))

# The formatter would give each number a line of its own; as a table it can be read against ggml-common.h.
# fmt: off
_TYPES = (
    # One scale a block.
    _block("Q1_0", 128, 18, _f16(0), _once(0, 2), _each(1, Plane(2, 128, 1))),
    _block("Q2_0", 64, 18, _f16(0), _once(0, 2), _each(1, Plane(2, 64, 2), zero=1)),
    _block("Q4_0", 32, 18, _f16(0), _once(0, 2), _each(1, Plane(2, 32, 4, lanes=16), zero=8)),
    _block("Q4_1", 32, 20, _f16(0, 2), _once(0, 4), _each(1, Plane(4, 32, 4, lanes=16))),
    _block("Q5_0", 32, 22, _f16(0), _once(0, 2), _each(1, Plane(6, 32, 4, lanes=16), Plane(2, 32, 1, to=4), zero=16)),
    _block("Q5_1", 32, 24, _f16(0, 2), _once(0, 4), _each(1, Plane(8, 32, 4, lanes=16), Plane(4, 32, 1, to=4))),
    _block("Q8_0", 32, 34, _f16(0), _once(0, 2), _each(1, Plane(2, 32, 8), zero=0)),
    _block("Q8_1", 32, 36, _f16(0, 2), _once(0, 2), _each(1, Plane(4, 32, 8), zero=0), sums=Sums(2, 32, scaled=True)),
    _block("Q8_K", 256, 292, (ScaleField(0, "F32"),), _once(0, 4), _each(1, Plane(4, 256, 8), zero=0), sums=Sums(260, 16)),
    _block("IQ4_NL", 32, 18, _f16(0), _once(0, 2), _each(1, Plane(2, 32, 4, lanes=16))),
    _block("TQ1_0", 256, 54, _f16(52), _each(1, *_TRITS, zero=1), _once(52, 2)),
    _block("TQ2_0", 256, 66, _f16(64), _each(1, Plane(0, 256, 2, lanes=32), zero=1), _once(64, 2)),
    _block("MXFP4", 32, 17, (ScaleField(0, "E8M0"),), _once(0, 1), _each(1, Plane(1, 32, 4, lanes=16), zero=0)),

    # Sub-blocks of 16 or 32 values with a scale each. NVFP4 has none for the block: its sub-blocks may come from several.
    _block("Q2_K", 256, 84, _f16(80, 82), _each(16, Plane(0, 16, 8), zero=0), _each(1, Plane(16, 256, 2, lanes=32)), _once(80, 4)),
    _block("Q3_K", 256, 110, _f16(108), _each(1, Plane(32, 256, 2, lanes=32), Plane(0, 256, 1, lanes=32, to=2), zero=4),
           _each(16, Plane(96, 16, 4, lanes=8), Plane(104, 16, 2, lanes=4, to=4)), _once(108, 2)),
    _block("Q4_K", 256, 144, _f16(0, 2), _once(0, 4), *SIX_BITS, _each(1, Plane(16, 256, 4, lanes=32))),
    _block("Q5_K", 256, 176, _f16(0, 2), _once(0, 4), *SIX_BITS, _each(1, Plane(48, 256, 4, lanes=32), Plane(16, 256, 1, lanes=32, to=4))),
    _block("Q6_K", 256, 210, _f16(208), _each(1, Plane(0, 256, 4, lanes=64), Plane(128, 256, 2, lanes=32, to=4), zero=32),
           _each(16, Plane(192, 16, 8)), _once(208, 2)),
    _block("IQ4_XS", 256, 136, _f16(0), _once(0, 2), _each(32, Plane(4, 8, 4), Plane(2, 8, 2, to=4), zero=32),
           _each(1, Plane(8, 256, 4, lanes=16))),
    _block("NVFP4", 64, 36, (ScaleField(0, "UE4M3", 4),), _each(16, Plane(0, 4, 8)), _each(1, Plane(4, 64, 4, lanes=8), zero=0)),

    # Codebooks: an index and signs (or a shift) for 8 or 4 values together.
    _block("IQ1_S", 256, 50, _f16(0), _once(0, 2), _each(8, Plane(2, 32, 8)), _each(8, Plane(34, 32, 3, word=2, per=4)),
           _each(32, Plane(34, 8, 4, word=2, shift=12))),
    _block("IQ1_M", 256, 56, (ScaleField(48, "F16_NIBBLES"),), _each(8, Plane(0, 32, 8)), _each(8, Plane(32, 32, 4)),
           _each(16, Plane(48, 16, 3, word=2, per=4)), _each(256, Plane(48, 4, 4, word=2, shift=12))),
    _block("IQ2_XXS", 256, 66, _f16(0), _once(0, 2), _each(8, Plane(2, 32, 8, word=8, per=4)),
           _each(8, Plane(2, 32, 7, word=8, per=4, shift=32)), _each(32, Plane(2, 8, 4, word=8, shift=60))),
    _block("IQ2_XS", 256, 74, _f16(0), _once(0, 2), _each(8, Plane(2, 64, 8)), _each(16, Plane(66, 16, 4))),
    _block("IQ2_S", 256, 82, _f16(0), _once(0, 2), _each(8, Plane(2, 32, 8)), _each(8, Plane(34, 32, 8)), _each(8, Plane(66, 32, 2)),
           _each(16, Plane(74, 16, 4))),
    _block("IQ3_XXS", 256, 98, _f16(0), _once(0, 2), _each(8, Plane(2, 64, 8)), _each(8, Plane(66, 32, 7, word=4)),
           _each(32, Plane(66, 8, 4, word=4, shift=28))),
    _block("IQ3_S", 256, 110, _f16(0), _once(0, 2), _each(4, Plane(2, 64, 8)), _each(4, Plane(74, 64, 4), Plane(66, 64, 1, to=4)),
           _each(32, Plane(106, 8, 4))),
)
# fmt: on

BLOCK_TYPES: dict[str, BlockType] = {kind.name: kind for kind in _TYPES}

# MXFP4 as gpt-oss stores it, the codes in one tensor and the scales in another; no types of ggml. What a row of codes can
# become is for MXFP4 itself to judge.
_HALVES = (
    _block("MXFP4_CODES", 32, 16, (), _each(1, Plane(0, 32, 4), zero=0)),
    _block("MXFP4_SCALES", 1, 1, (ScaleField(0, "E8M0"),), _once(0, 1)),
)
_KNOWN = BLOCK_TYPES | {kind.name: kind for kind in _HALVES}


def block_type(name: str) -> BlockType:
    """The block type of that ggml name, or a half of one. Raises BlockLayoutError, with the near miss, for one that is not known."""
    if name not in _KNOWN:
        raise BlockLayoutError(f"{name} is no block type of ggml that can be widened{did_you_mean(name, BLOCK_TYPES)}")
    return _KNOWN[name]
