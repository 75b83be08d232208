"""The headers that a wide LoRA adapter had before it was widened, by the plan of its narrow base.

Folding A and B by themselves folds what they make: the nearest narrow matrix to B A is made of B folded along what the weight
writes and of A folded along what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from widen_cli.errors import printable
from widen_cli.plan.adapter_names import bare
from widen_cli.plan.adapters import LORA_NAME, Adapter, AdapterPlanner, Base, UnfitError
from widen_cli.plan.factors import Factor
from widen_cli.plan.match import StoredHeader
from widen_cli.plan.narrowing import Header, divided_shapes


def narrow_adapter(adapter: Adapter, base: Base) -> tuple[Header, ...]:
    """The narrow headers of a wide adapter, in its order; those that do not fit are left to `plan_adapter` to tell.

    Raises WidenError with the faults of the base and of shapes that are no multiples.
    """
    planner = AdapterPlanner(adapter, base, printable(adapter.file))
    shapes: dict[str, tuple[int, ...]] = {}
    foreign: dict[str, Header] = {}
    for tensor in adapter.tensors:
        try:
            shapes[tensor.name] = _shape(planner, tensor)
        except UnfitError:
            # A head that the base lacks: its rule in the map says what it reads.
            name = bare(tensor.name)
            foreign[tensor.name] = Header(name, tensor.dtype, tensor.shape)
    shapes |= _foreign(base, foreign, planner.base_plan.factors)
    return tuple(Header(tensor.name, tensor.dtype, shapes.get(tensor.name, tensor.shape)) for tensor in adapter.tensors)


def _shape(planner: AdapterPlanner, tensor: StoredHeader) -> tuple[int, ...]:
    hit = LORA_NAME.fullmatch(tensor.name)
    if hit is None:
        plan = planner.weight(bare(tensor.name)).plan
        return plan.source.shape if tensor.shape == plan.shape else tensor.shape
    reads, writes = planner.sides(planner.weight(bare(hit["module"]) + ".weight"), hit["table"] is not None)
    if hit["end"] == ".bias":
        return (writes.old,)
    if hit["side"] == "A":
        old, new = (tuple(getattr(tree, size) for tree in reads) for size in ("old", "new"))
        return (*tensor.shape[:1], *old) if tensor.shape[1:] == new else tensor.shape
    return (writes.old, *tensor.shape[1:]) if tensor.shape[:1] == (writes.new,) else tensor.shape


def _foreign(base: Base, headers: Mapping[str, Header], factors: Mapping[str, Factor]) -> dict[str, tuple[int, ...]]:
    found: Sequence[tuple[int, ...]] = divided_shapes(
        base.architecture, tuple(headers.values()), base.config, factors, base.request
    )
    return dict(zip(headers, found, strict=True))
