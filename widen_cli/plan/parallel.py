"""Tensor-parallel degrees that the old sizes divide by and the new ones do not."""

from __future__ import annotations

from collections.abc import Iterator

from widen_cli.plan.growth import growing_axes
from widen_cli.plan.sizes import Sizes

DEGREES = (2, 4, 8)


def lost_degrees(old: Sizes, new: Sizes) -> Iterator[str]:
    """A warning for each axis that a model was split along and cannot be any more. Whole factors lose nothing."""
    architecture = old.architecture
    split = [axis for axis in (*growing_axes(architecture), "vocab") if axis != architecture.growth.head_dim]
    shared = architecture.growth.heads[1:]  # runtimes give several ranks one key head
    for axis in dict.fromkeys(split):
        here, there = old.known.get(axis), new.known.get(axis)
        if here is None or there is None or axis in old.layered:
            continue
        lost = [
            str(degree)
            for degree in DEGREES
            if _divides(here, degree, axis in shared) and not _divides(there, degree, axis in shared)
        ]
        if lost:
            yield (
                f"{axis} grows from {here} to {there}, which tensor-parallel degrees of {' and '.join(lost)} do not divide any more; "
                f"{axis}=round:{lost[-1]} in --grow keeps them"
            )


def _divides(size: int, degree: int, shared: bool) -> bool:
    return size % degree == 0 or (shared and 0 < size < degree and degree % size == 0)
