"""Which weights of a layer are zero where it is to pass the stream on as it is.

In a layer that norms what it reads, whatever writes the stream is added to it: these matrices and their biases. Where gains of
norms write the stream too, they stand behind a branch (Gemma 2) or behind the sum (BERT), which the map has to tell.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from widen_cli.errors import WidenError, printable
from widen_cli.formulas import dotted
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.match import Matched
from widen_cli.plan.spaces import carrier, paths


def silenced(
    architecture: ArchitectureMap, inside: Sequence[Matched], outside: Sequence[Matched], file: str
) -> set[str]:
    """The name patterns of the weights that are zero, of a stack's tensors `inside` and all others `outside`.

    Raises WidenError where neither the map nor its shapes tell.
    """
    if architecture.depth.zero:
        return set(architecture.depth.zero)
    streams = _streams(architecture, inside, outside)
    writers = {item.rule.pattern: item for item in inside if _written(architecture, item) & streams}
    matrices = {_module(pattern) for pattern, item in writers.items() if _is_matrix(item)}
    gains = [pattern for pattern, item in writers.items() if not _is_matrix(item) and _module(pattern) not in matrices]
    if gains:
        raise WidenError(
            f"{printable(file)}: '{gains[0]}' is a norm that writes the stream. Behind a sum, as BERT's, it lets no layer pass the "
            "stream on as it is; if it stands behind a branch, as Gemma 2's, say in the map "
            f"('{architecture.architecture}') by 'depth: {{zero: [...]}}' which weights are zero in such a layer"
        )
    if not writers:
        raise WidenError(
            f"{printable(file)}: no weight of a layer writes what map '{architecture.architecture}' calls the stream; "
            "say by 'depth: {zero: [...]}' which weights are zero in a layer that passes the stream on as it is"
        )
    return {*writers}


def _streams(architecture: ArchitectureMap, inside: Sequence[Matched], outside: Sequence[Matched]) -> set[str]:
    """The spaces that norms read and that matrices of the layers write, together with others outside of them or in them."""
    normed: set[str] = set()
    for space in architecture.spaces.values():
        for node in ast.walk(space.formula.tree) if space.formula else ():
            if isinstance(node, ast.Call) and dotted(node.func) == "norm":
                names = [inner for inner in ast.walk(node.args[0]) if isinstance(inner, ast.Name | ast.Attribute)]
                normed |= {dotted(name) for name in names}
    without = {name for item in outside for name in _written(architecture, item)}
    modules: dict[str, set[str]] = {}
    for item in inside:
        for name in _written(architecture, item) & normed if _is_matrix(item) else ():
            modules.setdefault(name, set()).add(_module(item.rule.pattern))
    return {name for name, found in modules.items() if name in without or len(found) > 1}


def _written(architecture: ArchitectureMap, item: Matched) -> set[str]:
    written = [dimension.term for dimension in item.rule.shape.dimensions if dimension.role == "out"]
    return {carrier(architecture, path) for term in written for path in paths(term)}


def _is_matrix(item: Matched) -> bool:
    """Whether a weight reads a space: a bias and a gain do not."""
    return any(dimension.role == "in" for dimension in item.rule.shape.dimensions)


def _module(pattern: str) -> str:
    """What a weight and its bias have in common: `mlp.fc2` of `mlp.fc2.weight`, `experts.down_proj` of `experts.down_proj_bias`."""
    for end in (".weight", ".bias", "_bias"):
        pattern = pattern.removesuffix(end)
    return pattern
