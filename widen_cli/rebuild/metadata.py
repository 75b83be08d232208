"""A GGUF's metadata under another architecture's name."""

from __future__ import annotations

from dataclasses import replace

from widen_cli.gguf.checkpoint import ARCHITECTURE, gguf_architecture
from widen_cli.gguf.model import GgufModel
from widen_cli.gguf.values import GgufValue, ValueType


def renamed(model: GgufModel, name: str, architecture: str) -> GgufModel:
    """The model with every key of its architecture as one of another; `name` is the file's in messages."""
    old, new = gguf_architecture(model, name) + ".", architecture + "."
    values = {
        (new + key.removeprefix(old) if key.startswith(old) else key): value
        for key, value in model.header.values.items()
    }
    values[ARCHITECTURE] = GgufValue.of(ValueType.STRING, architecture)
    return replace(model, header=replace(model.header, values=values))
