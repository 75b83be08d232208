"""The element types a safetensors file can hold, and how numpy sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """One stored element type.

    `name` is the safetensors name, `bits` the size of one element, `code` what numpy or ml_dtypes calls the type (None
    where an element is no whole byte or they have no such type), `kind` one of `float`, `integer`, `opaque`, `blocks`.
    Opaque elements can only be carried unchanged. Of quantised blocks `block` elements of a row share `block_bytes`
    bytes, and `bits` is what an element takes, rounded down. `exponent` masks the exponent's bits in the 16-bit floats.
    `carrier` is the type that a safetensors file has for blocks, which it knows as an axis of bytes.
    """

    name: str
    bits: int
    kind: str
    code: str | None = None
    block: int = 1
    block_bytes: int = 0
    exponent: int | None = None
    carrier: str | None = None

    @cached_property
    def numpy(self) -> np.dtype[Any] | None:
        """The array type that views the stored bytes."""
        if self.code is None:
            return None
        if self.code.startswith("<"):
            return np.dtype(self.code)
        import ml_dtypes  # imported when used: making its types known to numpy takes most of a short run

        kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.code))
        return kind

    def entry(self, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The type and the shape that a file's header has for a tensor."""
        if self.carrier is None:
            return self.name, shape
        *outer, row = shape
        return self.carrier, (*outer, row // self.block, self.block_bytes) if self.block > 1 else shape

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Stored bytes of a tensor of this type, in Python integers, so no product can wrap.

        Raises ValueError when the elements do not fill whole bytes, or the rows whole blocks.
        """
        if self.kind == "blocks":
            *outer, row = shape
            if row % self.block:
                raise ValueError(f"rows of {row} are no whole number of blocks of {self.block}")
            return math.prod(outer) * (row // self.block) * self.block_bytes
        bits = self.bits
        for size in shape:
            bits *= size
        if bits % 8:
            raise ValueError(f"{bits} bits are no whole number of bytes")
        return bits // 8


# https://github.com/huggingface/safetensors, safetensors/src/tensor.rs: the names and their sizes.
STORED: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("F64", 64, "float", "<f8"),
        DType("F32", 32, "float", "<f4"),
        DType("F16", 16, "float", "<f2", exponent=0x7C00),
        DType("BF16", 16, "float", "bfloat16", exponent=0x7F80),
        DType("F8_E4M3", 8, "float", "float8_e4m3fn"),
        DType("F8_E5M2", 8, "float", "float8_e5m2"),
        DType("I64", 64, "integer", "<i8"),
        DType("U64", 64, "integer", "<u8"),
        DType("I32", 32, "integer", "<i4"),
        DType("U32", 32, "integer", "<u4"),
        DType("I16", 16, "integer", "<i2"),
        DType("U16", 16, "integer", "<u2"),
        DType("I8", 8, "integer", "<i1"),
        DType("U8", 8, "integer", "<u1"),
        DType("BOOL", 8, "integer", "<u1"),
        DType("C64", 64, "opaque"),
        DType("F8_E8M0", 8, "opaque"),
        DType("F8_E4M3FNUZ", 8, "opaque"),
        DType("F8_E5M2FNUZ", 8, "opaque"),
        DType("F6_E2M3", 6, "opaque"),
        DType("F6_E3M2", 6, "opaque"),
        DType("F4", 4, "opaque"),
    )
}

# What a config's `torch_dtype` or `dtype` calls the types that `--dtype` can cast to.
CONFIG_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
