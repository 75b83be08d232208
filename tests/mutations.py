"""Random changes of a file: of its bytes, and of what its format makes of them (JSON values, pickle opcodes, YAML words)."""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SIZES = [0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 255, 256, 65535, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
SIZES += [1 << 32, (1 << 40) + 1, (1 << 61) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TEXTS = ["", " ", ".", "..", "../x", "/etc/passwd", "a\\b", "a/b", "\0", "\n", "\x1b[31m", "é模", "\u202e", "\ufeff"]
TEXTS += [
    "x" * 300,
    "nan",
    "true",
    "F32",
    "I64",
    "F8_E4M3",
    "U8",
    "%s{}",
    "*",
    "a" * 5000,
    "\ud800",
    "q_proj",
    "0",
    "-1",
]
WORDS = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ": ",
    ",",
    "-",
    "- ",
    "|",
    ">",
    "*",
    "&a",
    "*a",
    "!!python/object:os.system",
    "<-",
    "->",
    "?",
]
WORDS += [
    "null",
    "~",
    "1e9",
    ".inf",
    "hidden",
    "vocab",
    "norm(hidden, eps)",
    "(",
    ")",
    "\t",
    "#",
    "%YAML 9",
    "---",
    "...",
    "**",
]
WORDS += [
    "9" * 400,
    "2 ** 9999",
    "hidden *",
    "'",
    '"',
    "<<: *a",
    "has(",
    "extends: llama",
    "extends: mine.yaml",
    "x: {y: {z: 1}}",
]


class Pairs(list[list[Any]]):
    """A JSON object as its pairs, so that a key may stand there twice."""


def mutate(random: random.Random, name: str, data: bytes) -> bytes:
    """The file's bytes after one to four changes that suit its kind."""
    ending = name.rpartition(".")[2]
    change = BY_ENDING.get(ending, changed_bytes)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        # A change of a structure that is no longer one becomes a change of bytes.
        with suppress(Exception):
            data = change(random, data) if random.random() < 0.75 else changed_bytes(random, data)
    return data


def changed_bytes(random: random.Random, data: bytes, end: int | None = None) -> bytes:
    """One change of bytes, before `end`: a bit, a number, a piece taken out, doubled, put in, cut off."""
    end = min(len(data), end or len(data))
    if end == 0:
        return random.randbytes(random.randrange(20))
    at, length = random.randrange(end), min(random.choice((1, 1, 2, 4, 8, 16, 64, 500)), len(data))
    kind = random.randrange(8)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([random.choice((0, 1, 127, 128, 255, random.randrange(256)))]) + data[at + 1 :]
    if kind == 2:
        number = (random.choice(SIZES) + random.choice((-1, 0, 0, 1))) % (1 << 64)
        packed = struct.pack("<Q", number)[: random.choice((1, 2, 4, 8))]
        return data[:at] + packed + data[at + len(packed) :]
    if kind == 3:
        return data[:at] + data[at + length :]
    if kind == 4:
        to = random.randrange(end)
        return data[:to] + data[at : at + length] * random.choice((1, 1, 2, 50)) + data[to:]
    if kind == 5:
        return data[:at] + random.randbytes(length) + data[at:]
    if kind == 6:
        return data[:at]
    return data + random.choice((b"\0", b"\0" * 4096, data[:length], random.randbytes(length)))


def changed_json(random: random.Random, data: bytes) -> bytes:
    """One change of a value, a key or the form of a JSON text."""
    tree = json.loads(data, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))
    if random.random() < 0.04:
        return random.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"[" * 30_000, b'{"a":' * 3000, b"1" * 5000)) + data
    return dumped(_changed_tree(random, tree)).encode("utf-8", "surrogatepass")


def dumped(value: object) -> str:
    """JSON in which an object may have a key twice."""
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


def _changed_tree(random: random.Random, tree: Any) -> Any:
    """The tree with one place of it changed."""
    places: list[tuple[Any, int]] = []

    def visit(holder: Any, at: int) -> None:
        places.append((holder, at))
        value = holder[at]
        for number, inner in enumerate(value if isinstance(value, list) else ()):
            visit(inner, 1) if isinstance(value, Pairs) else visit(value, number)

    top = [tree]
    visit(top, 0)
    holder, at = random.choice(places)
    texts = [str(key) for key in re.findall(r'"([^"]{1,80})"', json.dumps(tree))]
    if isinstance(holder[at], Pairs) and random.random() < 0.8:
        _change_object(random, holder[at], places, texts)
    else:
        holder[at] = _other_value(random, holder[at], places, texts)
    return top[0]


def _change_object(random: random.Random, pairs: Pairs, places: list[tuple[Any, int]], texts: list[str]) -> None:
    number, kind = random.randrange(len(pairs) + 1), random.randrange(5)
    pair = list(pairs[number]) if number < len(pairs) else ["x", 0]
    if kind == 0 and number < len(pairs):
        del pairs[number]
    elif kind == 1:
        pairs.insert(random.randrange(len(pairs) + 1), pair)
    elif kind == 2 and number < len(pairs):
        pairs[number][0] = random.choice((*TEXTS, *texts, pair[0] + random.choice(TEXTS), pair[0][:-1]))
    elif kind == 3 and number < len(pairs):
        pairs[number][1] = _other_value(random, pair[1], places, texts)
    else:
        pairs.append([random.choice((*TEXTS, *texts)), _other_value(random, 0, places, texts)])


def _other_value(random: random.Random, value: Any, places: list[tuple[Any, int]], texts: list[str]) -> Any:
    """A value in place of another: near it, from elsewhere in the text, or of any other kind."""
    kind = random.randrange(6)
    if kind == 0 and isinstance(value, int | float):
        return random.choice(
            (value + 1, value - 1, value * 2, value * 3, -value, value + 0.5, value // 2, float(value))
        )
    if kind == 0 and isinstance(value, str):
        return random.choice((value + random.choice(TEXTS), value[:-1], value.upper(), f"model.{value}", value * 2))
    if kind == 1:
        holder, at = random.choice(places)
        return json.loads(dumped(holder[at]), object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))
    if kind == 2:
        return random.choice((*TEXTS, *texts))
    if kind == 3:
        return random.choice((*SIZES, -1, -(1 << 63), 10**30, 10**400, 0.5, 1e308, 1e-320, 1e-45, -0.0))
    if kind == 4:
        return random.choice((None, True, False, float("nan"), float("inf"), [], Pairs(), [value], [value] * 3))
    deep: Any = value
    for _ in range(random.choice((1, 3, 60, 900))):
        deep = [deep] if random.random() < 0.5 else Pairs([["x", deep]])
    return deep


def changed_safetensors(random: random.Random, data: bytes) -> bytes:
    """A change of the header, whose length mostly follows, or of the bytes."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.15:
        return changed_bytes(random, data, 8 + length)
    change = changed_json if random.random() < 0.7 else changed_bytes
    header = change(random, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def changed_gguf(random: random.Random, data: bytes) -> bytes:
    """A change before the tensors' data, of a number or a text that the format puts there, or of any byte."""
    end = max(data.rfind(b"output_norm.weight"), 24) + 60
    if random.random() < 0.3:
        return changed_bytes(random, data, end)
    texts = list(re.finditer(rb"[a-z][a-z0-9_.]{3,60}", data[:end]))
    if texts and random.random() < 0.4:
        return _changed_text(random, data, random.choice(texts), texts)
    at = random.randrange(4, end)
    if texts and random.random() < 0.7:
        # Behind a key stand its type and value, behind a tensor's name its sizes, type and offset; before a text its length.
        found = random.choice(texts)
        at = random.choice((found.start() - 8, found.end(), found.end() + 4, found.end() + 12, found.end() + 20))
    width = random.choice((4, 4, 8))
    near = int.from_bytes(data[at : at + width], "little") + random.choice((-32, -1, 1, 32))
    number = random.choice((near, near, random.choice(SIZES), random.randrange(45)))
    return data[:at] + struct.pack("<Q", number % (1 << 64))[:width] + data[at + width :]


def _changed_text(random: random.Random, data: bytes, found: re.Match[bytes], texts: list[re.Match[bytes]]) -> bytes:
    """Another text with its length, in the place of one."""
    other = random.choice(
        (random.choice(texts)[0], found[0] + b"x", found[0][:-1], b"\xff\xfe", b"a\0b", b"\x1b[31m", b"x" * 70)
    )
    start = data[: found.start() - 8] + struct.pack("<Q", len(other)) + other
    return start + data[found.end() :]


def _out_or_twice(kind: int, items: list[Any], at: int, other: int) -> None:
    """An item taken out (0), or put in once more elsewhere."""
    if kind == 0:
        del items[at]
    else:
        items.insert(other, items[at])


def changed_pickle(random: random.Random, data: bytes) -> bytes:
    """One opcode taken out, doubled, moved, put in or with another argument."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    ends = [*starts[1:], data.index(b".", starts[-1]) + 1]
    ops = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    at, other = random.randrange(len(ops)), random.randrange(len(ops))
    kind = random.randrange(6)
    if kind < 2:
        _out_or_twice(kind, ops, at, other)
    elif kind == 2:
        ops[at], ops[other] = ops[other], ops[at]
    elif kind == 3:
        new = random.choice(pickletools.opcodes)
        ops.insert(at, new.code.encode("latin-1") + random.randbytes(random.choice((0, 0, 1, 4))))
    elif kind == 4:
        ops[at] = changed_bytes(random, ops[at])
    else:
        made = random.choice(
            (
                b"cposix\nsystem\n",
                b"K\xff",
                b"J\xff\xff\xff\xff",
                b"2" * 500,
                b"(" * 500,
                b"]" * 99,
                b"a" * 9,
                b"I99999999999\n",
            )
        )
        ops.insert(at, made)
    return b"".join(ops) + data[ends[-1] :]


def changed_torch(random: random.Random, data: bytes) -> bytes:
    """A change of the pickle in a zip, which is put together anew, or of the pickles of an old file."""
    if not data.startswith(b"PK"):
        return changed_pickle(random, data) if random.random() < 0.5 else _changed_second_pickle(random, data)
    with zipfile.ZipFile(io.BytesIO(data)) as given:
        entries = [(info.filename, given.read(info)) for info in given.infolist()]
    number = random.randrange(len(entries)) if random.random() < 0.3 else 0
    name, content = entries[number]
    kind = random.random()
    if name.endswith(".pkl") and kind < 0.8:
        entries[number] = (name, changed_pickle(random, content))
    elif kind < 0.9:
        entries[number] = (random.choice((*TEXTS, name + "x", entries[-1][0])), content)
    else:
        entries[number] = (name, changed_bytes(random, content))
    return zipped(entries, random.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,)))


def zipped(entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name.encode("utf-8", "replace").decode() or "x"), content, method)
    return made.getvalue()


def _changed_second_pickle(random: random.Random, data: bytes) -> bytes:
    """Of the pickles that follow each other in an old file (magic, protocol, system, state, keys) a later one."""
    start = 0
    for _ in range(random.choice((2, 3, 3, 3, 4))):
        start += len(data[start:]) - len(_behind_pickle(data[start:]))
    return data[:start] + changed_pickle(random, data[start:])


def _behind_pickle(data: bytes) -> bytes:
    stream = io.BytesIO(data)
    for _ in pickletools.genops(stream):
        pass
    return data[stream.tell() :]


def changed_yaml(random: random.Random, data: bytes) -> bytes:
    """A line or a word taken out, doubled, moved, put in or replaced."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.randrange(7)
    if kind < 2:
        _out_or_twice(kind, lines, at, other)
    elif kind == 2:
        lines[at] = random.choice(("  ", " ", "\t", "- ")) + lines[at]
    elif kind == 3:
        lines[at] = lines[at].strip()
    else:
        parts = re.split(r"(\W+)", lines[at])
        words = re.findall(r"\w+|\W+", random.choice((lines[other], random.choice(WORDS)))) or [""]
        where = random.randrange(len(parts))
        parts[where : where + random.choice((0, 1, 1, 1, 2))] = [random.choice((*words, random.choice(WORDS)))]
        lines[at] = "".join(parts)
    return "\n".join(lines).encode("utf-8", "surrogateescape")


BY_ENDING: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "json": changed_json,
    "safetensors": changed_safetensors,
    "gguf": changed_gguf,
    "bin": changed_torch,
    "yaml": changed_yaml,
}
