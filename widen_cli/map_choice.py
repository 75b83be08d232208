"""Which map a model goes by: the one asked for, the one its config names, or the one that its tensor names fit."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from widen_cli.checkpoint import Checkpoint
from widen_cli.config import ModelConfig, is_number
from widen_cli.errors import WidenError, did_you_mean, printable
from widen_cli.gguf.checkpoint import gguf_architecture
from widen_cli.gguf.model import GgufModel
from widen_cli.map_file import map_names
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import catalog_map, load_map, map_for_gguf, map_for_model_type
from widen_cli.nearest import Fit, known_names, name_ends, nearest, told
from widen_cli.plan.match import common_prefix, match_tensors, missing_tensors
from widen_cli.safetensors_file import StoredTensor


def check_settings(
    architecture: ArchitectureMap, config: ModelConfig, settings: Mapping[str, Any], stated: bool = False
) -> None:
    """Raises WidenError for a `--set` that neither the map nor the config knows, so that a slip is not taken for an answer.

    And for one that says another value than the config, where what that says counts (`stated`), as in a GGUF.
    """
    known = {key for axis in architecture.axes.values() for key in axis.keys}
    known |= {*architecture.defaults, *(key for keys in architecture.repeats.values() for key in keys)}
    known |= {"architectures", "model_type"}
    faults = [
        f"--set {key}: '{architecture.architecture}' has no such config key{did_you_mean(key, known)}; it reads {', '.join(sorted(known))}"
        for key in settings
        if key not in known and key not in config.values
    ]
    faults += [
        f"--set {key}={json.dumps(value)}: the file itself says {json.dumps(config.values[key])}, and a runtime goes by that; leave it out"
        for key, value in settings.items()
        if stated and key in config.values and not _same(value, config.values[key])
    ]
    if faults:
        raise WidenError(*faults)


def _same(said: Any, stated: Any) -> bool:
    """Whether two values are one, as far as a float32 tells."""
    if is_number(said) and is_number(stated):
        return math.isclose(float(said), float(stated), rel_tol=1e-6)
    return bool(said == stated)


@dataclass(frozen=True)
class Choice:
    """The map to go by; where the model is a part of another, the section of its config and what its names begin with.

    `warnings`: names alone may fit several maps.
    """

    architecture: ArchitectureMap
    warnings: tuple[str, ...] = ()
    section: str = ""
    root: str = ""

    @classmethod
    def of(cls, architecture: ArchitectureMap) -> Choice:
        """The choice of a map as it stands, with the section of the config that it speaks of."""
        return cls(architecture, section=architecture.section)


def choose_map(checkpoint: Checkpoint, option: str | None) -> Choice:
    """The map asked for, the one of the config's model_type (or of its text_config's), or the one that the tensor names fit.

    Raises WidenError where none fits, naming the nearest.
    """
    if option is not None:
        named = option.endswith((".yaml", ".yml")) or Path(option).is_file()
        return Choice.of(load_map(Path(option), option) if named else catalog_map(option))
    if checkpoint.gguf is not None:
        return Choice(_map_of_gguf(checkpoint, checkpoint.gguf))
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str):
        found = map_for_model_type(model_type)
        choice = Choice.of(found) if found else _nested(checkpoint)
        if choice is None:
            raise WidenError(_unknown_type(checkpoint, model_type))
        return choice
    return _map_by_names(checkpoint)


SECTION = "text_config"
PREFIX_PARTS = 4  # such as module._orig_mod.


def _nested(checkpoint: Checkpoint) -> Choice | None:
    """Of a model that holds a known one and nothing else, the choice for that part; None for every other."""
    model_type = checkpoint.config.get(f"{SECTION}.model_type")
    found = map_for_model_type(model_type) if isinstance(model_type, str) else None
    root = common_prefix(found, checkpoint.tensors) if found else None
    return Choice(found, (), SECTION, root) if found and root else None


def _map_of_gguf(checkpoint: Checkpoint, model: GgufModel) -> ArchitectureMap:
    architecture = gguf_architecture(model, printable(checkpoint.name))
    found = map_for_gguf(architecture)
    if found is None:
        known = [name.removesuffix(".gguf") for name in map_names() if name.endswith(".gguf")]
        head = (
            f"{printable(checkpoint.name)}: general.architecture '{printable(architecture)}' has no map"
            f"{did_you_mean(architecture, known)}; `widen-ckpt maps` lists those there are, and --map takes one of your own"
        )
        raise WidenError("\n".join([head, *_offer(checkpoint)]))
    return found


def _unknown_type(checkpoint: Checkpoint, model_type: str) -> str:
    config = printable(checkpoint.config.name)
    nested = (
        "; its sizes stand in text_config, and what its other parts are takes a map that knows them"
        if "text_config" in checkpoint.config
        else ""
    )
    head = (
        f"{config}: model_type '{printable(model_type)}' has no map{did_you_mean(model_type, map_names())}{nested}; "
        "`widen-ckpt maps` lists those there are, and --map takes one of your own"
    )
    return "\n".join([head, *_offer(checkpoint)])


def nearest_map(checkpoint: Checkpoint, among: Sequence[str] = ()) -> Fit | None:
    """The map that comes closest to a model by names and shapes; None where no map knows any of its tensors."""
    called = [checkpoint.config.get("general.architecture" if checkpoint.gguf else "model_type")]
    classes = checkpoint.config.get("architectures")
    called += classes if isinstance(classes, list) else []
    names = [name for name in called if isinstance(name, str)]
    return nearest(checkpoint.tensors, checkpoint.config, names, checkpoint.gguf is not None, among)


def _offer(checkpoint: Checkpoint) -> list[str]:
    """Of a model without a map, what to say of the closest one; nothing where its tensors could not all be read."""
    given = "MODEL" if checkpoint.name == "standard input" else shlex.quote(printable(checkpoint.name))
    return [] if checkpoint.faults or not checkpoint.tensors else told(nearest_map(checkpoint), given)


def _fitting(tensors: Sequence[StoredTensor], config: ModelConfig) -> list[str]:
    """The maps under which the fewest weights are unknown and missing; none where half of all are unknown."""
    scores: dict[str, tuple[int, int]] = {}
    ends = name_ends(tensors)
    for name in (name for name in map_names() if not name.endswith(".gguf") and known_names(catalog_map(name), ends)):
        match = match_tensors(catalog_map(name), tensors, config)
        if match.matched:
            scores[name] = (len(match.strangers), len(missing_tensors(catalog_map(name), match, config)))
    best = min(scores.values(), default=(0, 0))
    return [name for name, score in scores.items() if score == best] if best[0] <= len(tensors) // 2 else []


def _prefixed(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """A prefix of all names, such as that of torch.compile, and a map that knows them without it; None where there is none."""
    first = next((tensor.name for tensor in checkpoint.tensors), "")
    ends = [place + 1 for place, letter in enumerate(first) if letter == "."]
    for prefix in (first[:end] for end in ends[:PREFIX_PARTS]):
        if not all(tensor.name.startswith(prefix) for tensor in checkpoint.tensors):
            return None
        bare = [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in checkpoint.tensors]
        if fitting := _fitting(bare, checkpoint.config):
            return prefix, next((name for name in fitting if catalog_map(name).by_names), fitting[0])
    return None


def _map_by_names(checkpoint: Checkpoint) -> Choice:
    """The map under which no weight is unknown and the fewest are missing; of equals the one that may be taken by names."""
    fitting = _fitting(checkpoint.tensors, checkpoint.config)
    if not fitting:
        if found := _prefixed(checkpoint):
            raise WidenError(
                f"{printable(checkpoint.name)}: every tensor name starts with '{printable(found[0])}', and without it the names fit "
                f"the map '{found[1]}': give --strip-prefix {printable(found[0])}"
            )
        nested = "; its sizes stand in text_config" if "text_config" in checkpoint.config else ""
        head = (
            f"{printable(checkpoint.name)}: no config says what model this is, and its tensor names fit no map{nested}; "
            "give --config, or --map with one of `widen-ckpt maps` or of your own"
        )
        raise WidenError("\n".join([head, *_offer(checkpoint)]))
    if len(fitting) == 1:
        return Choice(catalog_map(fitting[0]))
    told = f"{printable(checkpoint.name)}: no config says what model this is, and its tensor names fit {', '.join(fitting)}"
    taken = next((name for name in fitting if catalog_map(name).by_names), None)
    if taken is None:
        raise WidenError(f"{told}; give --config, or --map with one of them")
    return Choice(catalog_map(taken), (f"{told}; taken as {taken}: give --config, or --map if it is another",))
