"""How an output was made, recorded in it: what it takes to derive every byte of it again from the narrow checkpoint.

It stands in a safetensors file's `__metadata__` and among a GGUF's keys. No time and no path is in it, so the same run
twice gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from widen_cli import __version__
from widen_cli.config import ModelConfig
from widen_cli.errors import WidenError, printable
from widen_cli.map_file import document_text
from widen_cli.map_rules import ArchitectureMap
from widen_cli.options import Options
from widen_cli.plan import Plan
from widen_cli.plan.growth import FACTOR_LIMIT


class Said(BaseModel):
    """The options that say what is written; the others say where, and how fast."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    factor: int | None = Field(default=None, ge=2, le=FACTOR_LIMIT)
    grow: str | None = None
    scaling: str = "auto"
    dtype: str | None = None
    dequantize: str | None = None
    embedding_type: str | None = None
    settings: list[str] = []
    strip_prefix: str | None = None
    layout: str = "auto"
    rope: str | None = None
    untie: bool = False
    split: Literal["even", "uneven"] | None = None
    noise: float | None = None
    seed: int = 0


class Was(BaseModel):
    """What of the narrow model the wide one does not tell any more, for the way back.

    `config` holds the old values of config keys that changed, `added` the keys that are new, `types` the old types of
    tensors that are written in another, by the pattern of their names or by their name, `made` tensors that are new.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    config: dict[str, Any] = {}
    added: list[str] = []
    types: dict[str, str] = {}
    made: list[str] = []

    @classmethod
    def of(cls, plan: Plan, old: ModelConfig, new: ModelConfig, settings: Iterable[str] = ()) -> Self:
        """What a plan changes in a model whose config is `old`, and what the `settings` did; `new` is the config with both."""
        keys = dict.fromkeys([*settings, *(change.key for change in plan.config)]) if old.present else {}
        changed = {key: old.get(key) for key in keys if key in old and old.get(key) != new.get(key)}
        return cls(
            config={key: value for key, value in changed.items() if _storable(value)},
            added=[key for key in keys if key not in old],
            types=_types(plan),
            made=[tensor.source.name for tensor in plan.tensors if tensor.made],
        )

    def type_of(self, name: str, pattern: str) -> str | None:
        """The old type of a tensor, None where it was the one it has."""
        return self.types.get(name, self.types.get(pattern))


def _storable(value: Any) -> bool:
    """Whether JSON holds a value: no NaN, no half of a surrogate pair."""
    try:
        return bool(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        return False


def _types(plan: Plan) -> dict[str, str]:
    """The old types of tensors that change theirs: by pattern where all of a pattern are alike."""
    found: dict[str, dict[str, str]] = {}
    for tensor in plan.tensors:
        if not tensor.made:
            found.setdefault(tensor.pattern, {})[tensor.source.name] = tensor.source.dtype.name
    retyped = {tensor.source.name for tensor in plan.tensors if not tensor.made and tensor.source.dtype != tensor.dtype}
    types: dict[str, str] = {}
    for pattern, old in found.items():
        if retyped >= old.keys() and len({*old.values()}) == 1:
            types[pattern] = next(iter(old.values()))
        else:
            types |= {name: kind for name, kind in old.items() if name in retyped}
    return types


class Record(BaseModel):
    """A conversion: the tool's version, what was said, what every axis grew by, and the map's whole text.

    `own_map`: the map was given with --map. `before` is the record of the input, where that was widened too; `was` is what
    the way back needs, None in records of versions that knew no way back.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tool: str
    said: Said
    factors: dict[str, int]
    map: str | None = None
    own_map: bool = False
    before: Record | None = None
    was: Was | None = None

    @classmethod
    def of(
        cls, options: Options, plan: Plan, architecture: ArchitectureMap | None, before: str | None, was: Was
    ) -> Self:
        """The record of a planned run; `before` is the text of the input's."""
        said: dict[str, Any] = {name: getattr(options, name) for name in Said.model_fields}
        said |= {"scaling": plan.mode, "settings": list(options.settings)}
        if options.factor is None and options.grow is None:
            said["factor"] = 2
        return cls(
            tool=__version__,
            said=Said(**said),
            factors={axis: plan.factors[axis] for axis in plan.axes},
            map=document_text(architecture.merged) if architecture else None,
            own_map=options.map is not None,
            before=None if before is None else _parsed(before),
            was=was,
        )

    @property
    def text(self) -> str:
        """The record as one line of JSON, without what was not said."""
        return self.model_dump_json(exclude_defaults=True)

    def again(self, options: Options) -> Options:
        """The options of a run that makes the same once more; what `options` says itself counts before the record."""
        plain = Options(options.input, options.output)
        said: dict[str, Any] = {**dict(self.said), "settings": tuple(self.said.settings)}
        if options.factor is not None or options.grow is not None:
            said |= {"factor": None, "grow": None}
        given = {name: value for name, value in said.items() if getattr(options, name) == getattr(plain, name)}
        if options.map is None and self.map is not None:
            given |= {"recorded_map": self.map, "recorded_map_alone": self.own_map}
        return replace(options, **given)


def read_record(text: str, file: str) -> Record:
    """The record in a text. Raises WidenError where it is none, or one of a form that is not known."""
    record = _parsed(text)
    if record is None:
        raise WidenError(
            f"{printable(file)}: what it records of how it was made cannot be read by this version ({__version__}); "
            "give the options of the conversion, such as --factor 2"
        )
    return record


def _parsed(text: str) -> Record | None:
    try:
        return Record.model_validate_json(text)
    except (ValidationError, RecursionError):
        return None
