"""How an output was made, recorded in it: what it takes to derive every byte of it again from the narrow checkpoint.

It stands in a safetensors file's `__metadata__` and among a GGUF's keys. No time and no path is in it, so the same run
twice gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from widen_cli import __version__
from widen_cli.config import ModelConfig, parse_settings
from widen_cli.dtypes import CONFIG_NAMES
from widen_cli.errors import WidenError, printable
from widen_cli.map_checks import ROPE_METHODS
from widen_cli.map_file import document_text
from widen_cli.map_rules import ArchitectureMap
from widen_cli.options import Options
from widen_cli.plan import Plan
from widen_cli.plan.filling import FILLS
from widen_cli.plan.growth import FACTOR_LIMIT
from widen_cli.plan.layer_growth import parse_growth
from widen_cli.plan.layouts import LAYOUTS
from widen_cli.plan.modes import MODES
from widen_cli.plan.splits import WAYS
from widen_cli.rebuild.layers_wished import parse_depth
from widen_cli.rebuild.view import View

NUMBERS = ("F32", "F16")  # what quantised blocks are written as, where they are not kept


def _one_of(*words: str) -> AfterValidator:
    """Refuses what is none of the words: a choice that this version does not know."""

    def known(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return AfterValidator(known)


def _read_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Refuses what the parser of an option does not read."""

    def readable(value: Any) -> Any:
        try:
            parse(value)
        except WidenError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(readable)


def _growth(factor: int | str) -> int | str:
    """Refuses a factor that is none, or makes an axis smaller."""
    if Fraction(factor) < 1:
        raise ValueError(factor)
    return factor


class Said(BaseModel):
    """The options that say what is written; the others say where, and how fast."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    factor: int | None = Field(default=None, ge=2, le=FACTOR_LIMIT)
    grow: Annotated[str, _read_by(parse_growth)] | None = None
    depth: Annotated[list[str], _read_by(parse_depth)] = []
    allow_approximate: bool = False
    scaling: Annotated[str, _one_of("auto", *MODES)] = "auto"
    dtype: Annotated[str, _one_of(*CONFIG_NAMES)] | None = None
    dequantize: Annotated[str, _one_of(*NUMBERS)] | None = None
    embedding_type: Annotated[str, _one_of(*NUMBERS)] | None = None
    settings: Annotated[list[str], _read_by(parse_settings)] = []
    strip_prefix: str | None = None
    layout: Annotated[str, _one_of(*LAYOUTS)] = "auto"
    rope: Annotated[str, _one_of(*ROPE_METHODS)] | None = None
    untie: bool = False
    experts: int | None = Field(default=None, ge=2)
    top_k: int | None = None
    slices: int = Field(default=1, ge=1)
    router: Annotated[str, _one_of("random", "zero")] = "random"
    upcycle: str | None = None
    fill: Annotated[str, _one_of(*FILLS)] = "copy"
    split: Annotated[str, _one_of(*WAYS)] | None = None
    noise: float | None = Field(default=None, ge=-200, le=20)
    seed: int = Field(default=0, ge=0)


class Stack(BaseModel):
    """What became of the layers of one stack, of which there were `count`.

    `written` is the pattern of their names as the model spells it. `layers` has for each new layer the old one that it is, or ~n
    (-1, -2 ...) where it was made of layer n and passes the stream on. `silent` are the name patterns of the weights that are zero
    in such a layer, `fixed` tensors that kept their names.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    written: str
    count: int = Field(ge=1)
    layers: list[int]
    silent: list[str] = []
    fixed: list[str] = []


class Built(BaseModel):
    """What a run made of the narrow model before it widened it, of more layers, of experts, or of another kind: the old values
    of config keys that changed, the keys that are new, and by the map's pattern the stacks of layers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    config: dict[str, Any] = {}
    added: list[str] = []
    stacks: dict[str, Stack] = {}

    @classmethod
    def of(cls, old: ModelConfig, new: ModelConfig, view: View | None) -> Self:
        """What lies between the config `old` and that of the model which was widened; `view` is where its layers come from."""
        said = [change.key for change in view.config] if view is not None else []
        others = [key for key, value in new.values.items() if not isinstance(value, dict)]
        keys = dict.fromkeys([*said, *others]) if old.present else {}
        changed = {key: old.get(key) for key in keys if key in old and old.get(key) != new.get(key)}
        stacks = {
            pattern: Stack(
                written=each.written,
                count=each.count,
                layers=[*each.layers],
                silent=[*each.silent],
                fixed=[*each.fixed],
            )
            for pattern, each in (view.stacks.items() if view is not None else ())
        }
        return cls(
            config={key: value for key, value in changed.items() if _storable(value)},
            added=[key for key in keys if key not in old],
            stacks=stacks,
        )


class Was(BaseModel):
    """What of the narrow model the wide one does not tell any more, for the way back.

    `config` holds the old values of config keys that changed, `added` the keys that are new, `types` the old types of
    tensors that are written in another, by the pattern of their names or by their name, `made` tensors that are new, `scaled`
    those that were there and took the factors of others. Where the model was made anew before it was widened, all of them speak
    of that one, and `built` of what was before.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    config: dict[str, Any] = {}
    added: list[str] = []
    types: dict[str, str] = {}
    made: list[str] = []
    built: Built | None = None
    scaled: list[str] = []

    @classmethod
    def of(
        cls,
        plan: Plan,
        old: ModelConfig,
        new: ModelConfig,
        settings: Iterable[str] = (),
        built: Built | None = None,
    ) -> Self:
        """What a plan changes in a model whose config is `old`, and what the `settings` did; `new` is the config with both."""
        keys = dict.fromkeys([*settings, *(change.key for change in plan.config)]) if old.present else {}
        changed = {key: old.get(key) for key in keys if key in old and old.get(key) != new.get(key)}
        made = [tensor.source.name for tensor in plan.tensors if tensor.made]
        return cls(
            config={key: value for key, value in changed.items() if _storable(value)},
            added=[key for key in keys if key not in old],
            types=_types(plan),
            made=made,
            scaled=[name for name in plan.scalars if name not in made],
            built=built,
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

    `factors` are those of layers that are not among `layers`, which have the others, as `--grow` takes them.
    `laid` is the layout that was taken, which the types decide where none was said: they may be others since. `own_map`: the
    map was given with --map. `target` is the map of what a model of `map` became.
    `before` is the record of the input, where that was widened too; `was` is what
    the way back needs, None in records of versions that knew no way back.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tool: str
    said: Said
    factors: dict[str, Annotated[int | str, AfterValidator(_growth)]]
    layers: list[Annotated[str, _read_by(parse_growth)]] = []
    laid: Annotated[str, _one_of(*LAYOUTS[1:])] | None = None
    map: str | None = None
    own_map: bool = False
    target: str | None = None
    before: Record | None = None
    was: Was | None = None

    @classmethod
    def of(
        cls,
        options: Options,
        plan: Plan,
        architecture: ArchitectureMap | None,
        before: str | None,
        was: Was,
        target: ArchitectureMap | None = None,
    ) -> Self:
        """The record of a planned run; `before` is the text of the input's, `target` the map of what it became first."""
        said: dict[str, Any] = {name: getattr(options, name) for name in Said.model_fields}
        said |= {"scaling": plan.mode, "settings": list(options.settings), "depth": list(options.depth)}
        if options.grows_by_default:
            said["factor"] = 2
        return cls(
            tool=__version__,
            said=Said(**said),
            factors=plan.named_factors,
            layers=[*plan.layers],
            laid=plan.layout,
            map=document_text(architecture.merged) if architecture else None,
            own_map=options.map is not None,
            target=document_text(target.merged) if target else None,
            before=None if before is None else _parsed(before),
            was=was,
        )

    @property
    def text(self) -> str:
        """The record as one line of JSON, without what was not said."""
        return self.model_dump_json(exclude_defaults=True)

    @property
    def grown(self) -> str:
        """What every axis grew by, and some layers beside, as `--grow` takes it: sizes that were said tell nothing of a wide model."""
        return ",".join([*(f"{axis}={factor}x" for axis, factor in self.factors.items()), *self.layers])

    def again(self, options: Options) -> Options:
        """The options of a run that makes the same once more; what `options` says itself counts before the record."""
        plain = Options(options.input, options.output)
        said: dict[str, Any] = dict(self.said)
        said |= {"settings": tuple(self.said.settings), "depth": tuple(self.said.depth)}
        if options.says_growth:
            said |= {"factor": None, "grow": None, "depth": ()}
        said["layout"] = self.laid or self.said.layout
        given = {name: value for name, value in said.items() if getattr(options, name) == getattr(plain, name)}
        if options.map is None and self.map is not None:
            given |= {"recorded_map": self.map, "recorded_map_alone": self.own_map}
        if self.target is not None and options.upcycle is None:
            given["recorded_target"] = self.target
        return replace(options, **given)


def read_record(text: str, file: str) -> Record:
    """The record in a text. Raises WidenError where it is none, or one of a form that is not known."""
    record = _parsed(text)
    if record is None:
        by = _version(text)
        raise WidenError(
            f"{printable(file)}: what it records of how it was made{by} cannot be read by this version ({__version__}); "
            "give the options of the conversion, such as --factor 2"
        )
    return record


def _version(text: str) -> str:
    """By which other version a record says to be made, if it does; to go into a sentence."""
    try:
        tool = json.loads(text)["tool"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""
    return f", by version {printable(tool[:40])}," if isinstance(tool, str) and tool != __version__ else ""


def _parsed(text: str) -> Record | None:
    try:
        return Record.model_validate_json(text)
    except (ValidationError, RecursionError):
        return None
