"""Models whose layers may differ: which formats have them, and what becomes one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from widen_cli.checkpoint import Checkpoint
from widen_cli.config import parse_settings
from widen_cli.errors import WidenError, did_you_mean, printable
from widen_cli.gguf.checkpoint import metadata_config
from widen_cli.map_file import map_names
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import catalog_map, map_from_text
from widen_cli.options import Options
from widen_cli.plan.growth import growing_axes
from widen_cli.plan.layer_growth import LayerGrowth
from widen_cli.rebuild.metadata import renamed


def with_layers(
    options: Options, checkpoint: Checkpoint, source: ArchitectureMap, asked: Sequence[LayerGrowth]
) -> tuple[Checkpoint, ArchitectureMap]:
    """The checkpoint as one whose layers may differ in the axes asked for, and its map: itself, or a kind that it becomes.

    Raises WidenError where there is none, naming the formats that there are.
    """
    growing = growing_axes(source)
    unknown = [one for one in asked if one.axis not in source.axes]
    if unknown:
        raise WidenError(
            *(
                f"--grow {one}: map '{source.architecture}' has no such axis{did_you_mean(one.axis, growing)}; "
                f"it has {', '.join(growing)}"
                for one in unknown
            )
        )
    target = _target(options, checkpoint, source)
    axes = target.layered_axes if target is not None else ()
    faults = [f"--grow {one}: {_why(one, checkpoint, source, axes)}" for one in asked if one.axis not in axes]
    if faults:
        raise WidenError(*faults)
    assert target is not None
    if target.architecture == source.architecture:
        return checkpoint, source
    assert checkpoint.gguf is not None
    model = renamed(checkpoint.gguf, printable(checkpoint.name), target.gguf_architectures[0])
    found = metadata_config(model, printable(checkpoint.name))
    config = found.with_values(parse_settings(options.settings))
    return replace(checkpoint, gguf=model, found_config=found, config=config), target


def _target(options: Options, checkpoint: Checkpoint, source: ArchitectureMap) -> ArchitectureMap | None:
    """The map that has layers of different sizes: the source's own, the recorded one, or the first it can become."""
    if options.recorded_target is not None:
        return map_from_text(options.recorded_target, "the recorded map")
    if source.layered is not None or checkpoint.gguf is None:
        return source if source.layered is not None else None
    if checkpoint.config.get("expert_count"):
        return None
    return next((found for found in _maps() if source.architecture in found.layered_from), None)


def _maps() -> list[ArchitectureMap]:
    """The maps of models whose layers may differ."""
    return [found for name in map_names() if (found := catalog_map(name)).layered is not None]


def _why(one: LayerGrowth, checkpoint: Checkpoint, source: ArchitectureMap, axes: Sequence[str]) -> str:
    """Why an axis has one size in all layers, and where it has not."""
    elsewhere = _others(one.axis if axes else None)
    if axes:
        which = f"; models in which '{one.axis}' may: {elsewhere}" if elsewhere else ""
        return f"'{one.axis}' has one size in all layers; these may differ: {', '.join(axes)}{which}"
    form = "GGUF" if checkpoint.gguf is not None else "config"
    experts = " with experts" if checkpoint.config.get("expert_count") else ""
    return (
        f"the {form} of a '{source.architecture}'{experts} has one {one.axis} for all layers; models with one for each: "
        f"{elsewhere}"
    )


def _others(axis: str | None) -> str:
    """The models whose layers may differ, by format, with the axes in which; of an axis those that differ in it."""
    told: dict[str, list[str]] = {"GGUF": [], "Hugging Face": []}
    for found in _maps():
        if axis is None or axis in found.layered_axes:
            becomes = f", which a {' or '.join(found.layered_from)} becomes" if found.layered_from else ""
            text = f"{found.architecture} ({', '.join(found.layered_axes)}{becomes})"
            told["GGUF" if found.gguf_architectures else "Hugging Face"].append(text)
    return "; ".join(f"{form}: {', '.join(found)}" for form, found in told.items() if found)
