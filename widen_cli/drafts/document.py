"""The text of a drafted map: sections in the order of the maps that come with the tool, comments, and what is to be decided."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import yaml

from widen_cli.errors import printable

SECTIONS = (
    "extends",
    "architecture",
    "match",
    "prefixes",
    "repeats",
    "config",
    "axes",
    "growth",
    "requires",
    "output",
    "spaces",
    "tensors",
    "tied",
)
_PLAIN = re.compile(r"[A-Za-z_][\w.*?{}/+-]*")
WIDEST = 60  # a longer key pushes no other line's value to the right


@dataclass
class Entry:
    """The YAML text of one value; `before` are comment lines above it, `note` a comment behind it."""

    value: str
    note: str = ""
    before: tuple[str, ...] = ()


@dataclass
class Document:
    """A map in the making. `plain` sections are a value on the section's own line, `sections` have entries by key.

    `open` is what the user has to decide: while one of its lines stands, the map widens nothing.
    """

    head: list[str] = field(default_factory=list)
    plain: dict[str, Entry] = field(default_factory=dict)
    sections: dict[str, dict[str, Entry]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    def put(self, section: str, key: str, value: str, note: str = "", before: tuple[str, ...] = ()) -> None:
        """Sets an entry of a section; `value` is YAML text."""
        self.sections.setdefault(section, {})[key] = Entry(value, note, before)

    def decide(self, text: str) -> None:
        """Adds what is to be decided."""
        if text not in self.open:
            self.open.append(text)

    def text(self) -> str:
        """The whole map."""
        lines = [f"# {line}".rstrip() for line in self.head]
        for name in SECTIONS:
            if name in self.plain:
                entry = self.plain[name]
                lines += [f"# {line}" for line in entry.before]
                lines.append(_line(f"{name}: {entry.value}", entry.note))
            if self.sections.get(name):
                lines += ["", f"{name}:", *_entries(self.sections[name])]
        if self.open:
            lines += [
                "",
                "# While a line stands here nothing is converted: decide, correct the map, take the line out.",
            ]
            lines += ["todo:", *(f"  - {quoted(text)}" for text in self.open)]
        return "\n".join(lines) + "\n"


def _entries(entries: dict[str, Entry]) -> list[str]:
    names = {key: f"{scalar(key)}:" for key in entries}
    width = max((len(name) for name in names.values() if len(name) <= WIDEST), default=0)
    texts = {key: f"  {names[key]:{width}} {entry.value}" for key, entry in entries.items()}
    noted = [len(texts[key]) for key, entry in entries.items() if entry.note]
    column = max((length for length in noted if length <= WIDEST + 40), default=0)
    lines = []
    for key, entry in entries.items():
        lines += [f"  # {line}" for line in entry.before]
        lines.append(_line(f"{texts[key]:{column}}" if entry.note else texts[key], entry.note))
    return lines


def _line(text: str, note: str) -> str:
    return f"{text}  # {note}" if note else text


def scalar(text: str) -> str:
    """A text as YAML: plain where that reads as the same text, else in quotes."""
    return text if _PLAIN.fullmatch(text) and _reads_as_itself(text) else quoted(text)


def quoted(text: str) -> str:
    """A text in double quotes."""
    return json.dumps(text)


def flow_list(texts: list[str] | tuple[str, ...]) -> str:
    """Texts as `[a, b]`."""
    return f"[{', '.join(quoted(text) if re.search('[{}]', text) else scalar(text) for text in texts)}]"


def shape_value(shape: str) -> str:
    """A shape as YAML: in quotes where its `: ` would begin a mapping or it is a number."""
    return quoted(shape) if ": " in shape or shape.isdigit() else shape


def _reads_as_itself(text: str) -> bool:
    try:
        return bool(yaml.safe_load(text) == text)
    except yaml.YAMLError:
        return False


def comment(text: str) -> str:
    """A text of the model's that goes into a comment, on one line and in ASCII."""
    return printable(text)
