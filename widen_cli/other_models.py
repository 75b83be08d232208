"""The sizes of another model, of which a config is enough: a config.json, a model's folder, or a GGUF file."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from widen_cli.config import ModelConfig, read_config
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.gguf.checkpoint import gguf_architecture, metadata_config
from widen_cli.gguf.header import GGUF_MAGIC
from widen_cli.gguf.model import open_gguf
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import map_for_gguf, map_for_model_type
from widen_cli.plan.match import Match
from widen_cli.plan.sizes import Sizes, resolve_sizes

SECTION = "text_config"


@dataclass(frozen=True)
class OtherModel:
    """A model to be like: the path it was named by, the kind that its config says, and its sizes."""

    name: str
    kind: str
    sizes: Sizes


def other_model(given: str, architecture: ArchitectureMap, gguf: bool) -> OtherModel:
    """The model at a path, by its own map; by `architecture`, that of the model that grows, where none knows its kind.

    `gguf`: the model that grows is one. Raises WidenError where the sizes cannot be read.
    """
    config, own, kind = _gguf(given) if _is_gguf(given) else _config(given)
    if own is None and config.per_layer == gguf:
        own = architecture
    if own is None:
        raise WidenError(
            f"--like {printable(given)}: no map knows a model of kind '{printable(kind)}', so its sizes cannot be read"
        )
    with Faults() as faults:
        sizes = resolve_sizes(own, config, Match(), faults)
    if not any(name in sizes.known for name in architecture.growth.width):
        keys = ", ".join(key for name in architecture.growth.width for key in architecture.axes[name].keys)
        raise WidenError(
            f"--like {printable(given)}: holds none of the sizes that are looked for, such as {keys}; is it a model's config?"
        )
    return OtherModel(given, kind, sizes)


def _is_gguf(given: str) -> bool:
    # A pipe, such as a shell's <(...), passes once: it is a config's.
    if not os.path.isfile(given):
        return False
    with suppress(OSError), open(given, "rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    return False


def _gguf(given: str) -> tuple[ModelConfig, ArchitectureMap | None, str]:
    model = open_gguf(Path(given))
    try:
        kind = gguf_architecture(model, printable(given))
        return metadata_config(model, given), map_for_gguf(kind), kind
    finally:
        model.close()


def _config(given: str) -> tuple[ModelConfig, ArchitectureMap | None, str]:
    if given.endswith((".safetensors", ".bin", ".pt", ".pth")):
        raise WidenError(
            f"--like {printable(given)}: weights hold no config; name the config.json beside them, or their folder"
        )
    config = read_config(Path(given, "config.json") if os.path.isdir(given) else Path(given))
    kind = config.get("model_type")
    found = map_for_model_type(kind) if isinstance(kind, str) else None
    inner = config.get(f"{SECTION}.model_type")
    if found is None and isinstance(inner, str) and (nested := map_for_model_type(inner)):
        return config.within(SECTION), nested, inner
    return config.within(found.section) if found else config, found, str(kind)
