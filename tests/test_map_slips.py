"""A slip in any key of a map is told with its place: in each word of the language, and in each name that the map gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from widen_cli.errors import WidenError
from widen_cli.map_file import Keys, parse_map_data
from widen_cli.map_schema import MapDocument
from widen_cli.maps import load_map

EVERY = """\
architecture: every
extends: parent
match: {model_type: [every], gguf: [every], by_names: true}
section: text_config
carried: [tower.]
prefixes: {model.: [""]}
synonyms: {norm.gain: norm.weight}
repeats: {model.layers.*: num_layers}
parts: {model.layers.: true}
config: {eps: 1e-5, theta: 10000.0, tied_words: true, scale: 1.0, short: null, counted: null, num_layers: 12, num_behind: 0}
places: {theta: [rope.theta]}
axes:
  vocab: {key: vocab_size, fixed: true, padded: true}
  hidden: {key: [hidden_size, width], first: true}
  inner: {key: inner_size, means: value * 2, whole: so it is}
  experts: {key: num_experts, else: 2, grouped: tied_words}
  heads: {key: num_heads}
  head_dim: {size: hidden / heads}
  rotary: {size: head_dim / 2}
growth: {width: [hidden, inner], heads: [heads], head_dim: head_dim}
requires: [hidden % heads == 0]
supports: [tied_words]
norms: {hidden: rms}
output: final
outputs: {pooler_output: final}
spaces:
  normed: norm(hidden, eps)
  query: rotary
  kept: rotary
  value: head_dim
  scores: softmax(rope(query) @ rope(kept) * scale)
  acted: gelu(inner)
  final: norm(hidden, eps)
tensors:
  model.embed.weight: {shape: vocab -> hidden, times: sqrt(hidden)}
  model.layers.*.norm.weight: {shape: -> normed, offset: 1}
  model.layers.*.q.weight: {shape: (heads 2 query) <- normed, if: tied_words}
  model.layers.*.k.weight: (heads 2 kept) <- normed
  model.layers.*.v.weight: (heads value) <- normed
  model.layers.*.o.weight: hidden <- (heads value)
  model.layers.*.gate.weight: experts <- normed
  model.layers.*.up.weight: {shape: "experts: inner <- normed", packed: "experts: inner <- normed"}
  model.layers.*.down.weight: "experts: hidden <- acted"
  model.layers.*.q.scale?: "1"
  model.norm.weight: -> final
  head.weight: {shape: vocab <- final, when: not tied_words}
  freqs.weight?: rotary
tied: [{tensor: head.weight, to: model.embed.weight, when: tied_words}]
untie: [tied_words]
drop: [model.buffer]
sidecars: {pooling.json: {dimension: hidden, aligned: {layers: model.layers.*, heads: heads}}}
rope:
  keys: [theta]
  lists: [short]
  sections: [rope]
  shares: {counted: last}
  tensor: freqs.weight
  methods: {spread: true, frequencies: tied_words}
  reasons: [{if: tied_words, why: so it is}]
depth:
  behind: num_behind
  zero: [model.layers.*.o.weight]
  per_layer: [kinds]
  numbers: [some_layers]
  runs: [kinds_runs]
  roots: [scale_depth]
  schedules: [{stack: model.layers.*, kind: layer, key: kinds, values: [a, b], weights: true, why: so it is}]
  reasons: [{stack: model.layers.*, if: tied_words, why: so it is}]
  fixed: [{stack: model.layers.*, if: tied_words, why: so it is}]
upcycle:
  from: {llama: {}}
  axis: inner
  sizes: {num_experts: experts, top: top_k, inner_size: slice}
  config: {}
  classes: {}
  weights: {mlp.*.up: model.layers.*.up.weight}
  shared: {mlp.*.up: model.layers.*.k.weight}
  routers: [model.layers.*.gate.weight]
  gates: []
  without: []
  needs: []
  refuses: [{if: tied_words, why: so it is}]
  normalised: true
layered: {axes: [inner], from: [every], whole: {inner: {if: tied_words, why: so it is}}}
multipliers: [scale]
scalars: {model.layers.*.q.weight: model.layers.*.q.scale}
modules: {model.layers.*.query: model.layers.*.q}
todo: []
"""
DATA = parse_map_data(EVERY, "every.yaml")
# Names that a map takes from elsewhere, or that are new words of its own: a slip makes another one of them.
ELSEWHERE = ("synonyms", "modules", "outputs", "sidecars", "tensors", "upcycle")
# A space that nothing reads says a law all the same, whatever it is called.
ITSELF = {("spaces", "scores")}


def sections(kind: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Every section of the language with the path at which it stands, * for a name or a number."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield path, kind
        for name, field in kind.model_fields.items():
            yield from sections(field.annotation, (*path, field.alias or name))
    else:
        for inner in get_args(kind):
            yield from sections(inner, path if isinstance(kind, UnionType) else (*path, "*"))


WORDS = {
    (*path, field.alias or name)
    for path, section in sections(MapDocument, ())
    for name, field in section.model_fields.items()
}


def language(path: Keys) -> tuple[str, ...] | None:
    """The word of the language that a key is, None for a name; the rules of a tensor may stand without a list."""
    full = (*path[:2], 0, *path[2:]) if path[0] == "tensors" and len(path) == 3 else path
    fitting = (word for word in WORDS if len(word) == len(full))
    return next((word for word in fitting if all(at in ("*", one) for at, one in zip(word, full, strict=True))), None)


KEYS = {path: language(path) for path in DATA.keys}


def slipped(word: str) -> str:
    """Without a letter from its middle, or with one more where that leaves no likeness."""
    middle = len(word) // 2
    return word[:middle] + word[middle + 1 :] if len(word) > 3 else word + word[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slips")
    (path / "parent.yaml").write_text("architecture: parent\n")
    return path


def faults(folder: Path, path: Keys, slip: str) -> tuple[str, ...]:
    """What is told of the map in which the key at a path is spelt otherwise."""
    place, lines = DATA.keys[path], EVERY.splitlines()
    line, start = lines[place.line - 1], place.column - 1
    assert line[start:].startswith(str(path[-1]))
    lines[place.line - 1] = line[:start] + slip + line[start + len(str(path[-1])) :]
    (folder / "every.yaml").write_text("\n".join(lines))
    try:
        load_map(folder / "every.yaml")
    except WidenError as error:
        return error.faults
    return ()


def test_the_map_is_right_and_says_every_word(folder: Path) -> None:
    (folder / "every.yaml").write_text(EVERY)
    load_map(folder / "every.yaml")
    assert {word for word in KEYS.values() if word} == WORDS


def test_a_slip_in_a_word_is_told_at_every_level(folder: Path) -> None:
    for path in (path for path, word in KEYS.items() if word):
        key, slip = str(path[-1]), slipped(str(path[-1]))
        assert f"{DATA.keys[path]}: unknown key '{slip}' (did you mean '{key}'?)" in faults(folder, path, slip), path


@pytest.mark.parametrize(
    "cut", [slipped, lambda word: word[:-1], lambda word: word + word[-1]], ids=["middle", "end", "twice"]
)
def test_a_slip_in_a_name_is_told(folder: Path, cut: Any) -> None:
    for path in (path for path, word in KEYS.items() if not word):
        slip = cut(str(path[-1]))
        if path[0] in ELSEWHERE or path in ITSELF:
            continue
        told = faults(folder, path, slip)
        assert any(f"'{slip}'" in fault for fault in told), (path, slip, told)
