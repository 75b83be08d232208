"""A model's config.json: read as it is found, changed key by key, written in the style it came in."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from widen_cli.errors import WidenError, is_text, printable

MISSING = object()
EACH = "*"  # in a dotted key, every object of a list
# The largest configs list some ten thousand labels.
JSON_LIMIT = 20_000_000


class ModelConfig:
    """The values of a config.json and the name to call it by in messages.

    Dotted keys reach into nested objects, and `*` into every object of a list: `blocks.*.width` is the list of their widths,
    null where one has none; one that begins with a dot stands outside of `inside`. `present` is False for a
    model that came without one; then only values given by `--set` are known, and no config is written. `per_layer`: a size
    may be a list, one for each layer, as GGUF's may. `inside`: the section that is looked into first, such as `text_config`.
    """

    def __init__(
        self, values: dict[str, Any], name: str, present: bool = True, per_layer: bool = False, inside: str = ""
    ) -> None:
        self.values = values
        self.name = name
        self.present = present
        self.per_layer = per_layer
        self.inside = inside

    def within(self, section: str) -> ModelConfig:
        """The same config, whose keys are looked for in a section first, and changed there; itself where it has none such."""
        inside = section if isinstance(self.values.get(section), dict) else ""
        return ModelConfig(self.values, self.name, self.present, self.per_layer, inside)

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, or the default where any part of the way is absent.

        A key that is there with its dots, as GGUF's are, counts as it stands.
        """
        own = _reached(self.values.get(self.inside), key) if self.inside else MISSING
        found = _reached(self.values, key.removeprefix(".")) if own is MISSING else own
        return default if found is MISSING else found

    def __contains__(self, key: str) -> bool:
        return self.get(key, MISSING) is not MISSING

    def with_values(self, values: dict[str, Any]) -> ModelConfig:
        """A copy with dotted keys set; keys keep their place, new ones come last."""
        changed = copy.deepcopy(self.values)
        for key, value in values.items():
            self._put(changed, self._path(changed, key), key, value)
        return ModelConfig(changed, self.name, self.present, self.per_layer, self.inside)

    def _put(self, inner: dict[str, Any], path: list[str], key: str, value: Any) -> None:
        *before, last = path
        for n, part in enumerate(before):
            if part == EACH:
                raise WidenError(
                    f"{printable(self.name)}: '{printable(key)}' is looked for in a list that is not there"
                )
            found = inner.setdefault(part, {})
            if isinstance(found, list) and before[n + 1 : n + 2] == [EACH]:
                for item, one in zip(found, value, strict=True):
                    # What an object does not have it is not given.
                    if one is not None:
                        self._put(item, path[n + 2 :], key, one)
                return
            if not isinstance(found, dict):
                raise WidenError(
                    f"{printable(self.name)}: '{part}' is no object, so there is no '{printable(key)}' in it"
                )
            inner = found
        inner[last] = value

    def without(self, keys: Iterable[str]) -> ModelConfig:
        """A copy without these dotted keys, and without a section that held nothing else."""
        changed = copy.deepcopy(self.values)
        for key in keys:
            path = self._path(changed, key)
            while path and isinstance(section := _reached(changed, ".".join(path[:-1])) if path[1:] else changed, dict):
                section.pop(path[-1], None)
                path = [] if section else path[:-1]
        return ModelConfig(changed, self.name, self.present, self.per_layer, self.inside)

    def _path(self, values: dict[str, Any], key: str) -> list[str]:
        """Where a key stands, or would: the names on the way to it."""
        if key.startswith("."):
            return key[1:].split(".")
        path = [key] if key in values and not self.inside else key.split(".")
        section = values.get(self.inside) if self.inside else None
        there, outside = _reached(section, key) is not MISSING, _reached(values, key) is not MISSING
        return [self.inside, *path] if self.inside and (there or not outside) else path

    def to_bytes(self) -> bytes:
        """The JSON file: two spaces, keys in the order found, `Infinity` and `NaN` as Python and transformers write them."""
        try:
            return (json.dumps(self.values, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
        except UnicodeEncodeError:
            # Half of a surrogate pair has no UTF-8; escaped it reads back as what it was.
            return (json.dumps(self.values, indent=2) + "\n").encode("ascii")


def _reached(values: Any, key: str) -> Any:
    """The value at a dotted key, which may stand there with its dots; MISSING where any part of the way is absent."""
    if isinstance(values, dict) and key in values:
        return values[key]
    parts = key.split(".")
    for n, part in enumerate(parts):
        if part == EACH and isinstance(values, list):
            found = [_reached(item, ".".join(parts[n + 1 :])) for item in values]
            each = [None if value is MISSING else value for value in found]
            return each if any(value is not None for value in each) else MISSING
        if not isinstance(values, dict) or part not in values:
            return MISSING
        values = values[part]
    return values


def is_number(value: Any) -> bool:
    """Whether a config value is a finite number, one that float64 holds."""
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def read_config(path: Path) -> ModelConfig:
    """The config in a file. Raises WidenError naming the file where it is no JSON object."""
    values = read_json(path, "a model config")
    if not isinstance(values, dict):
        raise WidenError(f"{printable(str(path))}: a model config is a JSON object, this is a {type(values).__name__}")
    return ModelConfig(values, str(path))


class _TwiceError(Exception):
    """A key that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; of a key with two values readers take different ones."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if repr(value) != repr(found[key]):
                raise _TwiceError(key)
    return found


def read_json(path: Path, what: str) -> Any:
    """The JSON value in a small file. Raises WidenError naming the file and what it should have held."""
    shown = printable(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(JSON_LIMIT + 1)
        text = "" if len(data) > JSON_LIMIT else data.decode("utf-8-sig")
    except OSError as error:
        raise WidenError(f"{shown}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WidenError(f"{shown}: not UTF-8 text, so not {what}; fetch the file again") from None
    if len(data) > JSON_LIMIT:
        raise WidenError(f"{shown}: has more than {JSON_LIMIT} bytes, too many for {what}; fetch the file again")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _TwiceError as error:
        key = printable(str(error))
        raise WidenError(f"{shown}: '{key}' stands twice with different values, so not {what}; keep one") from None
    except json.JSONDecodeError as error:
        at = f"{shown}:{error.lineno}:{error.colno}"
        raise WidenError(f"{at}: not valid JSON ({error.msg}), so not {what}; fetch the file again") from None
    except (RecursionError, ValueError) as error:
        # Python reads no integer of more than 4300 digits.
        deep = isinstance(error, RecursionError)
        why = f"nested too deeply to be {what}" if deep else f"it holds a number too long to be {what}"
        raise WidenError(f"{shown}: {why}") from None


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """The values of `--set key=value` options; a value that reads as JSON is that value, else it is text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise WidenError(f"--set {printable(setting)}: expected key=value, such as --set num_attention_heads=12")
        if not is_text(setting):
            raise WidenError(f"--set {printable(setting)}: is no UTF-8 text")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
        except (RecursionError, ValueError):
            raise WidenError(f"--set {printable(key)}: its value is too long or nested too deeply") from None
    return values
