"""Tensor-parallel degrees that the new sizes do not divide by."""

from __future__ import annotations

from collections.abc import Iterator

from widen_cli.plan.growth import growing_axes
from widen_cli.plan.sizes import Sizes

DEGREES = (2, 4, 8)


def undivided(old: Sizes, new: Sizes) -> Iterator[str]:
    """A warning for each axis whose new size, no multiple of the old one, such degrees do not divide; of one that differs from
    layer to layer, of the first such layer.

    Multiples divide by all that the old size did, so nothing that the model could do is lost there.
    """
    told: set[str] = set()
    for layer in (None, *range(min((len(each) for each in new.layered.values()), default=0))):
        for axis, text in _undivided(old.at(layer), new.at(layer), layer):
            if (axis in new.layered) == (layer is not None) and axis not in told:
                told.add(axis)
                yield text


def _undivided(old: Sizes, new: Sizes, layer: int | None) -> Iterator[tuple[str, str]]:
    where, at = ("", "") if layer is None else (f" in layer {layer}", f"@{layer}")
    for axis, here, there, degrees in _unfit(old, new):
        if there % here:
            lost = " any more" if all(_divides(old, axis, degree) for degree in degrees) else ""
            yield (
                axis,
                (
                    f"{axis} grows from {here} to {there}{where}, which tensor-parallel degrees of {_listed(degrees)} do not divide{lost}; "
                    f"{axis}=round:{degrees[-1]}{at} in --grow gives a size that they do"
                ),
            )


def _unfit(old: Sizes, new: Sizes) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """The axes that a model is split along with their old and new sizes, and the degrees that do not divide the new ones."""
    architecture = old.architecture
    split = [axis for axis in (*growing_axes(architecture), "vocab") if axis != architecture.growth.head_dim]
    for axis in dict.fromkeys(split):
        here, there = old.known.get(axis), new.known.get(axis)
        degrees = tuple(degree for degree in DEGREES if there is not None and not _divides(new, axis, degree))
        if here and there and degrees:
            yield axis, here, there, degrees


def _divides(sizes: Sizes, axis: str, degree: int) -> bool:
    size = sizes.known[axis]
    shared = axis in sizes.architecture.growth.heads[1:]  # runtimes give several ranks one key head
    return size % degree == 0 or (shared and 0 < size < degree and degree % size == 0)


def _listed(degrees: tuple[int, ...]) -> str:
    return " and ".join(map(str, degrees))
