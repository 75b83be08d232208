"""Multiplies quantised blocks by a factor through the scales they store, and counts the scales that had to be rounded."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.codes import Field
from widen_cli.blocks.types import BlockLayoutError, BlockType, ScaleField
from widen_cli.dtypes import STORED
from widen_cli.scales import Scale
from widen_cli.transform import Cast, Counts

Bytes = npt.NDArray[np.uint8]


def can_scale(kind: BlockType, factor: Scale) -> str | None:
    """None where blocks of this type can be multiplied by the factor (rounded or not), else the reason and what to do."""
    if factor.is_power_of_two or all(field.kind != "E8M0" for field in kind.scales):
        return None
    return (
        f"{kind.name}: its scales are powers of two, so it cannot be multiplied by {factor}; "
        "use a scaling that puts no factor here, or store this tensor in an unquantised type"
    )


def scale_blocks(blocks: Bytes, kind: BlockType, factor: Scale) -> tuple[Bytes, Counts]:
    """Blocks with their scales (and minimums) times the factor, rounded to nearest even: a copy, of the same shape.

    `blocks` is uint8, its last axis whole blocks. Every value of a block is exactly multiplied if its scales are; the
    counts are of scales: all of them, those that are not the exact product, those that became infinite or NaN (or had to
    stay at the largest there is, in a type without infinity).
    Raises BlockLayoutError where can_scale gives a reason.
    """
    reason = can_scale(kind, factor)
    if reason is not None:
        raise BlockLayoutError(reason)
    result, counts = np.array(blocks, order="C"), Counts()
    rows = result.reshape(-1, kind.nbytes)
    for field in kind.scales:
        _scale(rows, field, factor, counts)
    return result, counts


def _scale(rows: Bytes, field: ScaleField, factor: Scale, counts: Counts) -> None:
    if field.kind in ("E8M0", "UE4M3"):
        bits = Field(field.at, field.count)
        bits.write(rows, _looked_up(bits.read(rows), field.kind, factor, counts))
    elif field.kind == "F16_NIBBLES":
        words = Field(field.at, 8)
        stored = words.read(rows).view("<u2")
        scaled = _cast(_from_nibbles(stored), "F16", factor, counts)
        words.write(rows, _with_nibbles(stored, scaled).view(np.uint8))
    else:
        number = STORED[field.kind]
        bits = Field(field.at, number.bits // 8)
        bits.write(rows, _cast(bits.read(rows), field.kind, factor, counts))


def _cast(bits: npt.NDArray[np.uint8], name: str, factor: Scale, counts: Counts) -> Bytes:
    number = STORED[name]
    assert number.numpy is not None
    return Cast(number, number).scaled(bits.view(number.numpy), factor, counts).view(np.uint8)


# The quarters of IQ1_M's float16, the lowest first, are the four top bits of its four words.
_QUARTERS = np.array([0, 4, 8, 12], "<u2")


def _from_nibbles(words: npt.NDArray[np.uint16]) -> Bytes:
    whole = np.bitwise_or.reduce(words >> np.uint16(12) << _QUARTERS, axis=1, keepdims=True)
    return whole.astype("<u2", copy=False).view(np.uint8)


def _with_nibbles(words: npt.NDArray[np.uint16], scaled: Bytes) -> npt.NDArray[np.uint16]:
    top = (scaled.view("<u2") >> _QUARTERS & np.uint16(15)) << np.uint16(12)
    return np.asarray(words & np.uint16(0x0FFF) | top, "<u2")


# Scales of one byte: there are 256 of them, so each is computed once.

_ROUNDED, _OVERFLOWED = 1, 2


def _looked_up(scales: Bytes, kind: str, factor: Scale, counts: Counts) -> Bytes:
    results, faults = (_powers_of_two if kind == "E8M0" else _unsigned_floats)(factor)
    counts.values += scales.size
    found = np.bincount(faults[scales].reshape(-1), minlength=3)
    counts.rounded += int(found[_ROUNDED])
    counts.overflowed += int(found[_OVERFLOWED])
    return results[scales]


@lru_cache(maxsize=16)
def _powers_of_two(factor: Scale) -> tuple[Bytes, Bytes]:
    """For every E8M0 the one times a power of two, and its fault. 255 is NaN and stays; 0 is the smallest, not zero."""
    fraction = factor.fraction
    assert fraction is not None
    exponents = np.arange(256) + (fraction.numerator.bit_length() - fraction.denominator.bit_length())
    faults = np.where(exponents < 0, _ROUNDED, np.where(exponents > 254, _OVERFLOWED, 0))
    results, faults[255] = exponents.clip(0, 254), 0
    results[255] = 255
    return results.astype(np.uint8), faults.astype(np.uint8)


@lru_cache(maxsize=16)
def _unsigned_floats(factor: Scale) -> tuple[Bytes, Bytes]:
    """For every UE4M3 the nearest to it times the factor, and its fault."""
    results, faults = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    finite = [_ue4m3(bits) for bits in range(127)]
    for bits in range(256):
        fraction = factor.fraction
        product = _ue4m3(bits) * (Fraction(float(factor)) if fraction is None else fraction)
        nearest = min(range(127), key=lambda code: (abs(finite[code] - product), code % 2))
        results[bits] = nearest
        if product > finite[-1]:
            faults[bits] = _OVERFLOWED
        elif finite[nearest] != product or (fraction is None and product):
            faults[bits] = _ROUNDED
    return results, faults


def _ue4m3(bits: int) -> Fraction:
    """The value of a scale byte, as ggml_ue4m3_to_fp32 has it but for its half: NaN counts as 0, the top bit as nothing."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if bits == 127:
        return Fraction(0)
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
