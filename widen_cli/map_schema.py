"""What a map may say, as a pydantic schema; faults come back with the line and column they stand at."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from widen_cli.errors import WidenError, did_you_mean
from widen_cli.map_file import Keys, MapData


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class MatchSection(_Section):
    model_type: list[str] = []
    gguf: list[str] = []
    by_names: bool = False


class AxisSection(_Section):
    key: str | list[str] | None = None
    size: str | int | None = None
    otherwise: str | int | None = Field(default=None, alias="else")
    fixed: bool = False
    padded: bool = False
    first: bool = False
    means: str | None = None
    grouped: str | bool | None = None
    whole: str = ""


class TensorSection(_Section):
    shape: str
    condition: str | None = Field(default=None, alias="if")
    when: str | bool | None = None
    times: str | None = None
    offset: int = 0
    packed: str | None = None


class TieSection(_Section):
    tensor: str
    to: str
    when: str | bool = True


class GrowthSection(_Section):
    width: list[str]
    heads: list[str] = []
    head_dim: str | list[str] | None = None

    @property
    def named(self) -> list[str]:
        """The axes of a head's size, the first of all that others follow."""
        return [self.head_dim] if isinstance(self.head_dim, str) else self.head_dim or []

    @property
    def head_dims(self) -> tuple[str | None, tuple[str, ...]]:
        """The axis of a head's size, and those that grow with it."""
        return next(iter(self.named), None), tuple(self.named[1:])


class ReasonSection(_Section):
    condition: str | bool = Field(alias="if")
    why: str


class RopeSection(_Section):
    keys: list[str] = []
    lists: list[str] = []
    tensor: str | None = None
    sections: list[str] = []
    shares: dict[str, Literal["first", "last"]] = {}
    methods: dict[str, str | bool]
    reasons: list[ReasonSection] = []


class DepthReasonSection(ReasonSection):
    stack: str | None = None


class ScheduleSection(_Section):
    stack: str | None = None
    kind: str
    key: str | None = None
    values: list[Any] = Field(default=[], max_length=2)
    weights: bool = False
    why: str | None = None


class DepthSection(_Section):
    behind: str | None = None
    zero: list[str] = []
    per_layer: list[str] = []
    numbers: list[str] = []
    runs: list[str] = []
    roots: list[str] = []
    schedules: list[ScheduleSection] = []
    reasons: list[DepthReasonSection] = []
    fixed: list[DepthReasonSection] = []


class NumberedSection(_Section):
    layers: str
    heads: str


class UpcycleSection(_Section):
    sources: dict[str, dict[str, Any]] = Field(alias="from")
    axis: str
    sizes: dict[str, str]
    config: dict[str, Any] = {}
    classes: dict[str, str] = {}
    weights: dict[str, str]
    shared: dict[str, str] = {}
    routers: list[str]
    gates: list[str] = []
    without: list[str] = []
    needs: list[str] = []
    refuses: list[ReasonSection] = []
    normalised: bool = True


class LayeredSection(_Section):
    axes: list[str]
    sources: list[str] = Field(default=[], alias="from")
    whole: dict[str, ReasonSection] = {}


class MapDocument(_Section):
    architecture: str
    extends: str | None = None
    match: MatchSection = MatchSection()
    section: str = ""
    prefixes: dict[str, list[str]] = {}
    carried: list[str] = []
    synonyms: dict[str, str] = {}
    repeats: dict[str, str | list[str]] = {}
    parts: dict[str, str | bool] = {}
    config: dict[str, Any] = {}
    places: dict[str, list[str]] = {}
    axes: dict[str, AxisSection]
    growth: GrowthSection
    requires: list[str] = []
    supports: list[str] = []
    spaces: dict[str, str] = {}
    norms: str | dict[str, str] | None = None
    tensors: dict[str, list[TensorSection]]
    tied: list[TieSection] = []
    untie: list[str] = []
    drop: list[str] = []
    output: str | list[str] = []
    outputs: dict[str, str | list[str]] = {}
    sidecars: dict[str, dict[str, str | NumberedSection]] = {}
    rope: RopeSection | None = None
    depth: DepthSection = DepthSection()
    upcycle: UpcycleSection | None = None
    layered: LayeredSection | None = None
    multipliers: list[str] = []
    scalars: dict[str, str] = {}
    modules: dict[str, str] = {}
    todo: list[str] = []


def map_document(data: MapData) -> MapDocument:
    """The checked document. Raises WidenError with every fault of form, each with its place."""
    try:
        return MapDocument.model_validate(_spelled_out(data.value))
    except ValidationError as error:
        raise WidenError(*_faults(data, error.errors())) from None


def _spelled_out(value: dict[str, Any]) -> dict[str, Any]:
    """The short forms of the language in their long form: a shape alone, an axis that is a size alone."""
    spelled = dict(value)
    tensors = value.get("tensors")
    if isinstance(tensors, dict):
        spelled["tensors"] = {name: _tensor_rules(rule) for name, rule in tensors.items()}
    axes = value.get("axes")
    if isinstance(axes, dict):
        spelled["axes"] = {name: {"size": rule} if isinstance(rule, int | str) else rule for name, rule in axes.items()}
    return spelled


def _tensor_rules(rule: Any) -> Any:
    rules = rule if isinstance(rule, list) else [rule]
    return [{"shape": one} if isinstance(one, str) else one for one in rules]


# What pydantic calls a type, and what a person who writes a map calls it.
_WORDS = {
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _faults(data: MapData, found: Sequence[Any]) -> list[str]:
    """One text a fault: the several types that a value might have been are said together, unless one was taken for it."""
    texts: list[str] = []
    wanted: dict[Keys, list[str]] = {}
    taken: set[Keys] = set()
    for fault in found:
        path, kind = tuple(fault["loc"]), fault["type"]
        real = real_path(data, path)
        if kind == "missing" or real[-1:] == path[-1:]:
            taken.add(real_path(data, path[:-1]))
        if kind in _WORDS:
            words = wanted.setdefault(real, [])
            words += [_WORDS[kind]] if _WORDS[kind] not in words else []
            continue
        place, word = data.key_place(real), str(path[-1]) if path else ""
        if kind == "extra_forbidden":
            texts.append(f"{place}: unknown key '{word}'{did_you_mean(word, _known_keys(path))}")
        elif kind == "missing":
            texts.append(f"{place}: '{word}' is missing{'' if len(path) == 1 else ' here'}")
        else:
            texts.append(f"{place}: {fault['msg'][0].lower()}{fault['msg'][1:]}, in '{'.'.join(map(str, real))}'")
    texts += [
        f"{data.key_place(real)}: '{'.'.join(map(str, real))}' has to be {' or '.join(words)}"
        for real, words in wanted.items()
        if real not in taken
    ]
    return texts


def real_path(data: MapData, path: Keys) -> Keys:
    """The path as it stands in the file: the short forms have no list index and no inner key."""
    real: Keys = ()
    for part in path:
        if (*real, part) in data.places:
            real = (*real, part)
    return real


def _known_keys(path: Keys) -> list[str]:
    """The keys that may stand beside the last of a path."""
    section = _section(path[:-1])
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def _section(path: Keys) -> type[BaseModel] | None:
    """The section that stands at a path, None where a value does."""
    kind: Any = MapDocument
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if part == kind.__name__:  # one of the kinds that might stand there
                continue
            fields = {field.alias or name: field for name, field in kind.model_fields.items()}
            kind = fields[str(part)].annotation if part in fields else None
        else:
            kind = next(reversed(get_args(kind)), None)
        if isinstance(kind, UnionType):  # a section that may be absent
            kind = next((one for one in get_args(kind) if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
