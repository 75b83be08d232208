"""The tensor types of GGUF: how many elements a block holds and how many bytes it takes.

Source: ggml/include/ggml.h (enum ggml_type) and ggml/src/ggml-common.h (the block structs) of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """One tensor type: `block` neighbouring elements of a row are stored together in `nbytes_per_block` bytes.

    `number` is ggml's. The types that are no blocks (F32, BF16, I8 ...) have the name that `dtypes.STORED` has for them.
    """

    name: str
    number: int
    block: int
    nbytes_per_block: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Stored bytes of a tensor of this type (the last size is a row's), in Python integers, so no product can wrap.

        Raises ValueError when a row does not fill whole blocks.
        """
        row = shape[-1] if shape else 1
        if row % self.block:
            raise ValueError(f"{row} elements per row, not a multiple of the block size {self.block}")
        count = 1
        for size in shape:
            count *= size
        return count // self.block * self.nbytes_per_block


# Q8_1 takes 36 bytes in ggml (two halves and 32 codes); gguf-py 0.19 says 40, the size of two floats that it had in 2023.
# It is a type of intermediate results and not met in files.
GGUF_TYPES: dict[str, GgufType] = {
    name: GgufType(name, number, block, nbytes)
    for name, number, block, nbytes in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q8_1", 9, 32, 36),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("Q8_K", 15, 256, 292),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110),
        ("IQ2_S", 22, 256, 82),
        ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1),
        ("I16", 25, 1, 2),
        ("I32", 26, 1, 4),
        ("I64", 27, 1, 8),
        ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56),
        ("BF16", 30, 1, 2),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
        ("NVFP4", 40, 64, 36),
        ("Q1_0", 41, 128, 18),
        ("Q2_0", 42, 64, 18),
    )
}

TYPE_NUMBERS: dict[int, GgufType] = {kind.number: kind for kind in GGUF_TYPES.values()}

# Numbers that ggml gave out once and reads no more.
REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
