"""MXFP4 as gpt-oss stores it: a weight in two tensors, which the planner sees as one of quantised blocks.

`X_blocks` U8 [..., n, 16] holds n blocks of 32 codes (E2M1), two in a byte, the first in its low bits; `X_scales` U8 [..., n]
holds of each block e, where 2**(e - 127) multiplies its values. Source: transformers 5.24, integrations/mxfp4.py,
convert_moe_packed_tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from widen_cli.dtypes import DType
from widen_cli.errors import printable
from widen_cli.map_rules import BLOCKS, SCALES

if TYPE_CHECKING:
    from widen_cli.plan.match import StoredHeader

SIZE, BYTES = 32, 16
MXFP4 = DType("MXFP4", 4, "blocks", block=SIZE, block_bytes=BYTES + 1)
# The two halves of it, each in a tensor of its own, which safetensors knows as bytes.
CODES = DType("MXFP4_CODES", 4, "blocks", block=SIZE, block_bytes=BYTES, carrier="U8")
POWERS = DType("MXFP4_SCALES", 8, "blocks", block=1, block_bytes=1, carrier="U8")

AGAIN = "the file is incomplete, fetch it again"
NUMBERS = "save the model as numbers from transformers (Mxfp4Config(dequantize=True)) first"


@dataclass(frozen=True)
class Half:
    """The header of one of the two tensors, its last size counted in what it holds: codes or scales."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PackedWeight:
    """The header of both as that of one weight, under the name of the first. `called` is the weight's own."""

    name: str
    shape: tuple[int, ...]
    called: str
    dtype: DType = MXFP4

    @property
    def codes(self) -> Half:
        return Half(self.name, CODES, self.shape)

    @property
    def scales(self) -> Half:
        *outer, row = self.shape
        return Half(self.called + SCALES, POWERS, (*outer, row // SIZE))


def packed_weight(called: str, stored: Mapping[str, StoredHeader]) -> PackedWeight | str:
    """The weight of this name that `stored` holds in two tensors; where they are none, what is wrong and what to do."""
    blocks, scales = stored.get(called + BLOCKS), stored.get(called + SCALES)
    if blocks is None and scales is not None:
        return f"tensor {_told(scales)} holds the scales of MXFP4 blocks, and '{printable(called + BLOCKS)}' is missing; {AGAIN}"
    assert blocks is not None
    if scales is None:
        return f"tensor {_told(blocks)} holds MXFP4 blocks, and '{printable(called + SCALES)}' with their scales is missing; {AGAIN}"
    if called in stored:
        return (
            f"tensor '{printable(called)}' is stored beside {_told(blocks)}, which is the same weight in MXFP4, and loaders disagree "
            "on which counts; take one of the two out"
        )
    *outer, numbers = blocks.shape or (0,)
    if {blocks.dtype.name, scales.dtype.name} != {"U8"} or numbers != BYTES or not outer or scales.shape != (*outer,):
        return (
            f"tensors {_told(blocks)} and {_told(scales)} are no MXFP4, which is U8 [..., n, {BYTES}] and U8 [..., n]; "
            f"fetch the file again, or {NUMBERS}"
        )
    return PackedWeight(blocks.name, (*outer[:-1], SIZE * outer[-1]), called)


def _told(tensor: StoredHeader) -> str:
    return f"'{printable(tensor.name)}' {tensor.dtype.name} {list(tensor.shape)}"
