"""Makes of a dense checkpoint one of experts, which is widened like any other: the same bytes under other names, a new config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from widen_cli.checkpoint import Checkpoint
from widen_cli.config import ModelConfig, is_number, parse_settings
from widen_cli.dtypes import STORED
from widen_cli.errors import Faults, WidenError, did_you_mean, printable
from widen_cli.gguf.checkpoint import changed_metadata, metadata_config
from widen_cli.map_choice import Choice
from widen_cli.map_file import map_names
from widen_cli.map_rules import ArchitectureMap, Upcycle
from widen_cli.maps import catalog_map, load_map, map_from_text
from widen_cli.options import Options
from widen_cli.plan.checks import check_input
from widen_cli.plan.match import match_tensors
from widen_cli.plan.result import NEW_EXPERTS, Gradient
from widen_cli.plan.sizes import Sizes
from widen_cli.rebuild.dense_config import changed_values, refused
from widen_cli.rebuild.experts import ExpertTensors
from widen_cli.rebuild.metadata import renamed
from widen_cli.rebuild.wish import Wish, wish
from widen_cli.scales import Scale

DEVIATION = 0.02  # of a router's weights, where the config has no initializer_range


@dataclass(frozen=True)
class Upcycled:
    """A checkpoint of experts, the map it goes by, the factors on slices, what is to be said of it, and the names that were dense."""

    checkpoint: Checkpoint
    architecture: ArchitectureMap
    times: dict[str, Scale]
    kind: str
    note: str
    kept: frozenset[str]

    def gradient(self, name: str, gradient: Gradient) -> Gradient:
        """What becomes of a tensor's gradient. Tokens choose between experts, so those of experts do not follow from the dense
        layer's; what is around them has the gradients that it had: the router's weights sum to 1 over experts that are alike."""
        return gradient if name in self.kept else Gradient(reason=NEW_EXPERTS)


def upcycled(options: Options, checkpoint: Checkpoint, choice: Choice) -> Upcycled:
    """The dense checkpoint as one of experts. Raises WidenError with all that speaks against it."""
    source, file = choice.architecture, printable(checkpoint.name)
    _check_kind(checkpoint, choice, file)
    target = _target(options, source, checkpoint.gguf is not None, file)
    rules = target.upcycle
    assert rules is not None
    faults = Faults()
    with faults:
        asked = None
        with faults.collecting():
            asked = wish(options, target, rules)
        for text in refused(source, rules, target.architecture, checkpoint.config):
            faults.add(text)
        match = match_tensors(source, checkpoint.tensors, checkpoint.config)
        sizes = check_input(source, match, checkpoint.tensors, checkpoint.config, file, faults)
        stored = {item.rule.pattern for item in match.matched}
        if rules.axis in sizes.layered:
            faults.add(
                f"{file}: its feed-forward layers have different sizes, and experts of '{target.architecture}' have one"
            )
        for name in rules.needs if not options.untie else ():
            if name not in stored:
                faults.add(
                    f"{file}: '{target.architecture}' needs a tensor '{name}', which this model has tied; give --untie"
                )
    assert asked is not None
    deviation = checkpoint.config.get("initializer_range")
    makes = ExpertTensors(
        source, target, rules, match, asked,
        float(deviation) if is_number(deviation) and deviation > 0 else DEVIATION,
        STORED["F32"] if checkpoint.gguf else None,
    )  # fmt: skip
    experts = makes.of(checkpoint.tensors, file)
    new = _with_config(checkpoint, source, target, rules, asked, sizes, options)
    kind = f"{asked.experts} experts made of a dense {source.architecture}"
    note = (
        f"{kind}, {asked.top_k} of them for a token, "
        f"{'each a copy' if asked.slices == 1 else f'each a slice of {asked.slices} of {asked.copies} copies'} of its "
        f"feed-forward layer; {asked.exact_for}"
    )
    stored_tensors = checkpoint.stored or checkpoint.tensors
    new = replace(new, tensors=experts.tensors, stored=stored_tensors)
    kept = frozenset(tensor.name for tensor in checkpoint.tensors)
    return Upcycled(new, target, experts.times, kind, note, kept)


def _check_kind(checkpoint: Checkpoint, choice: Choice, file: str) -> None:
    """Raises WidenError for what cannot be upcycled as it is stored or described."""
    if choice.section or choice.root:
        raise WidenError(
            f"{file}: --experts is for a model alone, not for one that is a part of another; take it out first"
        )
    if not checkpoint.config.present:
        raise WidenError(f"{file}: --experts needs the model's config, which is rewritten; give it with --config")
    if "quantization_config" in checkpoint.config:
        raise WidenError(
            f"{printable(checkpoint.config.name)}: quantization_config speaks of the dense weights by name; "
            "dequantise the model first, then give --experts"
        )


def _target(options: Options, source: ArchitectureMap, gguf: bool, file: str) -> ArchitectureMap:
    """The map of the new model: the one recorded, the one asked for, or the first that takes the dense family."""
    if options.recorded_target is not None:
        return map_from_text(options.recorded_target, "the recorded map")
    if options.upcycle is not None and options.upcycle.endswith((".yaml", ".yml")):
        own = load_map(Path(options.upcycle), options.upcycle)
        if own.upcycle is not None and source.architecture in own.upcycle.sources:
            return own
        raise WidenError(
            f"{printable(options.upcycle)}: does not say that a dense '{source.architecture}' becomes this ('upcycle', docs/maps.md)"
        )
    fitting = [name for name, rules in _rules(gguf) if source.architecture in rules.sources]
    ending = ".gguf" if gguf else ""
    if options.upcycle is None and fitting:
        return catalog_map(fitting[0])
    asked = f"{(options.upcycle or '').removesuffix('.gguf')}{ending}"
    if asked in fitting:
        return catalog_map(asked)
    can = f"; it can become {', '.join(name.removesuffix('.gguf') for name in fitting)}" if fitting else ""
    if options.upcycle is None:
        families = sorted({family for _, rules in _rules(gguf) for family in rules.sources})
        raise WidenError(
            f"{file}: --experts: no map says what a dense '{source.architecture}' becomes; those of {', '.join(families)} can "
            "be upcycled, and a map of your own can say it for others ('upcycle', docs/maps.md)"
        )
    near = did_you_mean(options.upcycle, [name.removesuffix(".gguf") for name in fitting])
    raise WidenError(
        f"--upcycle {printable(options.upcycle)}: is nothing that a dense '{source.architecture}' can become{near}{can}"
    )


def _rules(gguf: bool) -> Iterator[tuple[str, Upcycle]]:
    """The maps that dense models become, with what they say of it."""
    for name in map_names():
        if name.endswith(".gguf") == gguf and (rules := catalog_map(name).upcycle) is not None:
            yield name, rules


def _with_config(
    checkpoint: Checkpoint,
    source: ArchitectureMap,
    target: ArchitectureMap,
    rules: Upcycle,
    asked: Wish,
    sizes: Sizes,
    options: Options,
) -> Checkpoint:
    """The checkpoint with the new model's config, or metadata."""
    whole = sizes.known[rules.axis]
    held = {"experts": asked.experts, "top_k": asked.top_k, "slice": whole // asked.slices, "whole": whole}
    values: dict[str, Any] = {key: held[what] for key, what in rules.sizes.items()}
    settings = parse_settings(options.settings)
    if checkpoint.gguf is not None:
        model = renamed(checkpoint.gguf, printable(checkpoint.name), target.gguf_architectures[0])
        changed = changed_metadata(model, printable(checkpoint.name), [*values.items(), *rules.config.items()])
        model = replace(model, header=replace(model.header, values=changed))
        found = metadata_config(model, printable(checkpoint.name))
        return replace(checkpoint, gguf=model, found_config=found, config=found.with_values(settings))
    values = changed_values(source, target, rules, checkpoint.config, sizes) | values
    both: tuple[ModelConfig, ModelConfig] = (
        checkpoint.found_config.with_values(values),
        checkpoint.config.with_values(values),
    )
    return replace(checkpoint, found_config=both[0], config=both[1])
