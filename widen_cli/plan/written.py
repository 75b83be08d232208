"""Which element type each tensor is written in, by what was asked."""

from __future__ import annotations

from dataclasses import dataclass

from widen_cli.dtypes import DType
from widen_cli.map_rules import ArchitectureMap, TensorRule
from widen_cli.plan.match import Matched
from widen_cli.plan.spaces import paths


@dataclass(frozen=True)
class WrittenTypes:
    """The types asked for; a tensor that none of them speaks of keeps its own.

    `dtype` is for all floating-point weights. `dequantize` is for quantised blocks, and for matrices of narrower floats,
    so that a model comes out in one type; `embedding` is the same for embedding tables alone, and outranks it.
    """

    dtype: DType | None = None
    dequantize: DType | None = None
    embedding: DType | None = None

    def cast(self, stored: DType) -> DType:
        """The type that `dtype` alone makes of a stored one; blocks it leaves as they are."""
        return stored if self.dtype is None or stored.kind == "blocks" else self.dtype

    def of(self, architecture: ArchitectureMap, item: Matched) -> DType:
        """The type that a matched tensor is written in."""
        stored = item.tensor.dtype
        if self.dtype is not None and stored.kind == "float":
            return self.dtype
        asked = self.dequantize
        if self.embedding is not None and is_embedding(architecture, item.rule):
            asked = self.embedding
        if asked is None or len(item.tensor.shape) < 2 or stored.kind not in ("blocks", "float"):
            return stored
        return asked if stored.kind == "blocks" or stored.bits < asked.bits else stored


def is_embedding(architecture: ArchitectureMap, rule: TensorRule) -> bool:
    """Whether a rule is of a table that is looked up: `vocab -> hidden`, read by numbers and written to the stream."""
    if [dimension.role for dimension in rule.shape.dimensions] != ["in", "out"]:
        return False
    read, written = (
        {name for path in paths(dimension.term) for name in path if not name.isdigit()}
        for dimension in rule.shape.dimensions
    )
    fixed = {name for name, axis in architecture.axes.items() if axis.fixed}
    return bool(read) and read <= fixed and not written <= fixed
