"""Maps: every mistake is told with its place, inheritance, and all that the language has to be able to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from widen_cli.config import ModelConfig
from widen_cli.dimensions import Growth, runs
from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError
from widen_cli.maps import catalog_map, load_map, map_for_gguf, map_for_model_type, map_names
from widen_cli.plan import Plan, PlanRequest, TensorPlan, make_plan

TINY = """\
architecture: tiny
axes:
  hidden: {key: hidden_size}
  vocab: {key: vocab_size, fixed: true}
growth: {width: [hidden]}
spaces:
  final: norm(hidden, eps)
config: {eps: 1e-5}
tensors:
  embed: vocab -> hidden
  head: vocab <- final
"""
WHAT_AXIS = "is no axis or space of this map"
WHAT_NAME = "is no axis, space or config key of this map"
WHAT_LONE = (
    "lies on no axis: its formula names no other space; a norm that a whole stream passes is that of its axis, as in "
    "hidden: norm(hidden, eps)"
)
WHAT_CALL = "is no function or config key of this map"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a map, by default tiny.yaml, and gives its path."""

    def written(text: str, name: str = "tiny") -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def changed(old: str, new: str) -> str:
    assert TINY.count(old) == 1, f"'{old}' has to stand in the tiny map once"
    return TINY.replace(old, new)


def faults(path: Path) -> list[str]:
    with pytest.raises(WidenError) as caught:
        load_map(path)
    return list(caught.value.faults)


# What a loader has to notice: each row changes one thing in the tiny map.


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("spaces:", "space:", ["6:1: unknown key 'space' (did you mean 'spaces'?)"]),
        ("spaces:", "zzz:", ["6:1: unknown key 'zzz'"]),
        ("architecture: tiny\n", "", ["1:1: 'architecture' is missing"]),
        ("axes:\n  hidden: {key: hidden_size}\n  vocab: {key: vocab_size, fixed: true}\n", "", ["1:1: 'axes' is missing"]),
        ("growth: {width: [hidden]}\n", "", ["1:1: 'growth' is missing"]),
        ("{key: hidden_size}", "{keys: hidden_size}", ["3:12: unknown key 'keys' (did you mean 'key'?)"]),
        ("{width: [hidden]}", "{width: [hidden], head: []}", ["5:27: unknown key 'head' (did you mean 'heads'?)"]),
        ("{width: [hidden]}", "{}", ["5:1: 'width' is missing here"]),
        ("vocab -> hidden", "{shape: -> hidden, whn: eps}", ["10:29: unknown key 'whn' (did you mean 'when'?)"]),
        ("vocab -> hidden", "{when: eps}", ["10:3: 'shape' is missing here"]),
        ("tensors:", "tied: [{tensor: head, to: embed, wenn: true}]\ntensors:", ["9:34: unknown key 'wenn' (did you mean 'when'?)"]),
        ("tensors:", "tied: [{tensor: head}]\ntensors:", ["9:8: 'to' is missing here"]),
        ("tensors:", "match: {model_types: [x]}\ntensors:", ["9:9: unknown key 'model_types' (did you mean 'model_type'?)"]),
        ("tensors:", "tensors:\n  embed: -> hidden", ["11:3: 'embed' stands twice; the first is at tiny.yaml:10:3"]),
        ("config:", "axes: {}\nconfig:", ["8:1: 'axes' stands twice; the first is at tiny.yaml:2:1"]),
        ("{key: hidden_size}", "{}", ["3:11: axis 'hidden' needs a 'key', a 'size' or 'fixed: true'"]),
        (
            "{key: hidden_size}",
            "{key: hidden_size, size: 3}",
            ["3:11: axis 'hidden' has a 'key' and a 'size'; say 'else' for what an absent key means"],
        ),
        ("embed:", "embed???:", ["10:3: a name ends with at most two question marks"]),
        ("{key: hidden_size}", "{key: hidden_size, fixed: 1}", ["3:30: 'axes.hidden.fixed' has to be true or false"]),
        ("[hidden]", "hidden", ["5:10: 'growth.width' has to be a list"]),
        ("architecture: tiny", "architecture: 3", ["1:1: 'architecture' has to be a text"]),
        ("spaces:", "ropes: {}\nspaces:", ["6:1: unknown key 'ropes' (did you mean 'rope'?)"]),
        ("spaces:", "multiplier: []\nspaces:", ["6:1: unknown key 'multiplier' (did you mean 'multipliers'?)"]),
        ("spaces:", "scalar: {}\nspaces:", ["6:1: unknown key 'scalar' (did you mean 'scalars'?)"]),
        ("spaces:", "rope: [theta]\nspaces:", ["6:1: 'rope' has to be a mapping"]),
        ("spaces:", "rope: {keys: [eps]}\nspaces:", ["6:1: 'methods' is missing here"]),
        (
            "spaces:",
            "rope: {keys: [eps], method: {theta: true}}\nspaces:",
            ["6:1: 'methods' is missing here", "6:21: unknown key 'method' (did you mean 'methods'?)"],
        ),
        ("spaces:", "rope: {methods: [theta]}\nspaces:", ["6:8: 'rope.methods' has to be a mapping"]),
        (
            "spaces:",
            "rope: {keys: [eps], methods: {theta: 3}}\nspaces:",
            ["6:31: 'rope.methods.theta' has to be a text or true or false"],
        ),
        ("spaces:", "rope: {keys: eps, methods: {spread: true}}\nspaces:", ["6:8: 'rope.keys' has to be a list"]),
        ("spaces:", "rope: {tensor: 3, methods: {spread: true}}\nspaces:", ["6:8: 'rope.tensor' has to be a text"]),
        ("spaces:", "multipliers: eps\nspaces:", ["6:1: 'multipliers' has to be a list"]),
        ("spaces:", "scalars: [embed]\nspaces:", ["6:1: 'scalars' has to be a mapping"]),
        ("spaces:", "module: {}\nspaces:", ["6:1: unknown key 'module' (did you mean 'modules'?)"]),
        ("[hidden]}", "[hidden], head_dim: {a: b}}", ["5:27: 'growth.head_dim' has to be a text or a list"]),
    ],
)  # fmt: skip
def test_form(write: Callable[..., Path], old: str, new: str, expected: list[str]) -> None:
    assert faults(write(changed(old, new))) == [f"tiny.yaml:{text}" for text in expected]


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("vocab -> hidden", "vocab -> hiden", "10:19", f"'hiden' {WHAT_AXIS} (did you mean 'hidden'?)"),
        ("vocab -> hidden", "'vocab -> hiden'", "10:20", f"'hiden' {WHAT_AXIS} (did you mean 'hidden'?)"),
        ("vocab -> hidden", '"vocab -> hiden"', "10:20", f"'hiden' {WHAT_AXIS} (did you mean 'hidden'?)"),
        ("vocab -> hidden", "{shape: vocab -> hiden}", "10:27", f"'hiden' {WHAT_AXIS} (did you mean 'hidden'?)"),
        ("vocab -> hidden", "[{shape: vocab -> hiden}]", "10:28", f"'hiden' {WHAT_AXIS} (did you mean 'hidden'?)"),
        ("vocab -> hidden", "\n    - vocab -> hiden", "11:16", f"'hiden' {WHAT_AXIS} (did you mean 'hidden'?)"),
        ("vocab -> hidden", "(zzz vocab) -> hidden", "10:11", f"'zzz' {WHAT_AXIS}"),
        ("vocab -> hidden", "vocab -> -> hidden", "10:19", "unexpected '->' in shape 'vocab -> -> hidden'"),
        ("vocab -> hidden", "vocab -> (hidden", "10:26", "expected ')' in shape 'vocab -> (hidden'"),
        ("vocab -> hidden", "vocab = hidden", "10:16", "unexpected character '=' in shape 'vocab = hidden'"),
        ("norm(hidden, eps)", "norm(hiden, eps)", "7:15", f"'hiden' {WHAT_NAME} (did you mean 'hidden'?)"),
        ("norm(hidden, eps)", "'norm(hiden, eps)'", "7:16", f"'hiden' {WHAT_NAME} (did you mean 'hidden'?)"),
        ("norm(hidden, eps)", "norm(hidden, esp)", "7:23", f"'esp' {WHAT_NAME} (did you mean 'eps'?)"),
        ("norm(hidden, eps)", "nrom(hidden, eps)", "7:10", f"'nrom' {WHAT_CALL} (did you mean 'norm'?)"),
        ("norm(hidden, eps)", "hiden", "7:10", f"'hiden' {WHAT_NAME} (did you mean 'hidden'?)"),
        ("norm(hidden, eps)", "norm(hidden,, eps)", "7:22", "cannot read the formula 'norm(hidden,, eps)'"),
        ("norm(hidden, eps)", "hidden[0]", "7:10", "'hidden[0]' has no meaning in a formula"),
        ("norm(hidden, eps)", "norm(final, eps)", "7:10", f"space 'final' {WHAT_LONE}"),
        ("norm(hidden, eps)", "tanh(3)", "7:10", f"space 'final' {WHAT_LONE}"),
        ("norm(hidden, eps)", "norm(hidden, eps)\n  told: eps * 2", "8:9", f"space 'told' {WHAT_LONE}"),
        ("norm(hidden, eps)", "norm(hidden, eps)\n  told: os.system(final)", "8:9", f"'os.system' {WHAT_CALL}"),
        ("{key: hidden_size}", "{key: hidden_size, else: 4 * hiden}", "3:40", f"'hiden' {WHAT_NAME} (did you mean 'hidden'?)"),
        ("{key: hidden_size}", "{key: hidden_size, else: 4 * * 3}", "3:40", "cannot read the formula '4 * * 3'"),
        ("{key: hidden_size}", "'3 * vcab'", "3:16", f"'vcab' {WHAT_NAME} (did you mean 'vocab'?)"),
        ("{key: hidden_size}", "3 * vcab", "3:15", f"'vcab' {WHAT_NAME} (did you mean 'vocab'?)"),
        ("vocab -> hidden", "{shape: vocab -> hidden, when: epx}", "10:41", f"'epx' {WHAT_NAME} (did you mean 'eps'?)"),
        ("vocab -> hidden", "{shape: vocab -> hidden, if: hsa('x')}", "10:39", f"'hsa' {WHAT_CALL} (did you mean 'has'?)"),
        ("vocab -> hidden", "{shape: vocab -> hidden, times: sqrt(hiden)}", "10:47", f"'hiden' {WHAT_NAME} (did you mean 'hidden'?)"),
        ("vocab -> hidden", "{shape: vocab -> hidden, times: gelu(hidden)}", "10:42", f"'gelu' {WHAT_CALL}"),
        ("tensors:", "requires: [hiden % 3 == 0]\ntensors:", "9:12", f"'hiden' {WHAT_NAME} (did you mean 'hidden'?)"),
        ("tensors:", "requires: [hidden %% 3]\ntensors:", "9:20", "cannot read the formula 'hidden %% 3'"),
        ("tensors:", "tied: [{tensor: head, to: embed, when: esp}]\ntensors:", "9:40", f"'esp' {WHAT_NAME} (did you mean 'eps'?)"),
        ("tensors:", "tied: [{tensor: heid, to: embed}]\ntensors:", "9:17", "'heid' is no tensor of this map (did you mean 'head'?)"),
        ("tensors:", "tied: [{tensor: head, to: embd}]\ntensors:", "9:27", "'embd' is no tensor of this map (did you mean 'embed'?)"),
        ("[hidden]", "[hiden]", "5:18", "'hiden' is no axis of this map (did you mean 'hidden'?)"),
        ("[hidden]}", "[hidden], heads: [vocb]}", "5:35", "'vocb' is no axis of this map (did you mean 'vocab'?)"),
        ("[hidden]}", "[hidden], head_dim: hd}", "5:37", "'hd' is no axis of this map"),
        ("tensors:", "sidecars: {x.json: {a: hiden}}\ntensors:", "9:24", "'hiden' is no axis of this map (did you mean 'hidden'?)"),
        ("[hidden]}", "[hidden], head_dim: [hiden]}", "5:38", "'hiden' is no axis of this map (did you mean 'hidden'?)"),
        ("[hidden]}", "[hidden], head_dim: [hidden, vocb]}", "5:46", "'vocb' is no axis of this map (did you mean 'vocab'?)"),
        ("tensors:", "multipliers: [esp]\ntensors:", "9:15", "'esp' is no config key of this map (did you mean 'eps'?)"),
        ("tensors:", "multipliers: [eps, hidden]\ntensors:", "9:20", "'hidden' is no config key of this map"),
        ("tensors:", "scalars: {embed: hed}\ntensors:", "9:18", "'hed' is no tensor of this map (did you mean 'head'?)"),
        *(
            ("tensors:", f"modules: {{{module}}}\ntensors:\n  out.*.weight: (hidden | hidden) <- final", place, message)
            for module, place, message in (
                ("in.*: uot.*", "9:17", "no tensor of this map stands in 'uot.*' (did you mean 'out.*'?)"),
                ("in.*: 'out.*[2]'", "9:18", "'out.*' is no packed weight with a part 2; it has 2, counted from 0"),
                ("in: out.*", "9:15", "'out.*' and 'in' have to count the same layers"),
            )
        ),
        *(
            ("tensors:", f"rope: {{methods: {{{methods}}}}}\ntensors:", place, message)
            for methods, place, message in (
                ("spred: true", "9:18", "'spred' is no way to grow (did you mean 'spread'?)"),
                ("zzz: true", "9:18", "'zzz' is no way to grow"),
                ("spread: esp == 0", "9:26", f"'esp' {WHAT_NAME} (did you mean 'eps'?)"),
                ("spread: esp === 0", "9:32", "cannot read the formula 'esp === 0'"),
                ("spread: has('hed')", "9:30", "'hed' is no tensor of this map (did you mean 'head'?)"),
                ("theta: true", "9:1", "theta needs 'keys', the config keys of the angles' base"),
            )
        ),
        (
            "tensors:",
            "rope: {keys: [esp], methods: {theta: true}}\ntensors:",
            "9:15",
            "'esp' is no config key of this map (did you mean 'eps'?)",
        ),
        (
            "tensors:",
            "rope: {lists: [esp], methods: {spread: true}}\ntensors:",
            "9:16",
            "'esp' is no config key of this map (did you mean 'eps'?)",
        ),
        (
            "tensors:",
            "rope: {methods: {spread: true}, reasons: [{if: esp == 0, why: so}]}\ntensors:",
            "9:48",
            f"'esp' {WHAT_NAME} (did you mean 'eps'?)",
        ),
        (
            "tensors:",
            "rope: {keys: [eps], methods: {frequencies: true}}\ntensors:",
            "9:1",
            "frequencies needs a 'tensor' or 'lists' of numbers that divide them",
        ),
        (
            "tensors:",
            "rope: {keys: [eps], methods: {frequencies: true}, tensor: hed}\ntensors:",
            "9:59",
            "'hed' is no tensor of this map (did you mean 'head'?)",
        ),
        ("tensors:", "places: {esp: [a.eps]}\ntensors:", "9:10", "'esp' is no config key of this map (did you mean 'eps'?)"),
        (
            "tensors:",
            "synonyms: {gamma: hed}\ntensors:",
            "9:19",
            "'hed' is no end of a tensor's name of this map (did you mean 'head'?)",
        ),
        ("{key: hidden_size}", "{key: hidden_size, first: true}", "3:11", "axis 'hidden' has 'first', which goes with several keys"),
        ("{key: hidden_size}", "{size: 2 * hidden}", "3:3", "the size of axis 'hidden' comes out of itself"),
        ("norm(hidden, eps)", "norm(hidden, vocab)", "7:23", "an epsilon is a config key or a number, not 'vocab'"),
        pytest.param(
            "tensors:",
            "scalars: {embd: head}\ntensors:",
            "9:11",
            "'embd' is no tensor of this map (did you mean 'embed'?)",
        ),
    ],
)  # fmt: skip
def test_words(write: Callable[..., Path], old: str, new: str, place: str, message: str) -> None:
    assert faults(write(changed(old, new))) == [f"tiny.yaml:{place}: {message}"]


def test_all_mistakes_come_together(write: Callable[..., Path]) -> None:
    text = (
        TINY.replace("vocab -> hidden", "vocab -> hiden")
        .replace("norm(hidden", "nrom(hidden")
        .replace("[hidden]", "[hid]")
    )
    assert faults(write(text)) == [
        f"tiny.yaml:7:10: 'nrom' {WHAT_CALL} (did you mean 'norm'?)",
        f"tiny.yaml:10:19: 'hiden' {WHAT_AXIS} (did you mean 'hidden'?)",
        "tiny.yaml:5:18: 'hid' is no axis of this map (did you mean 'hidden'?)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "1:1: a map is a YAML mapping of sections; see `widen-ckpt maps llama` for one"),
        ("", "1:1: a map is a YAML mapping of sections; see `widen-ckpt maps llama` for one"),
        ("just words", "1:1: a map is a YAML mapping of sections; see `widen-ckpt maps llama` for one"),
        ("architecture: [tiny\nb: 3\n", "2:2: did not find expected ',' or ']'"),
        ("architecture: tiny\n\tx: 3", "2:1: found a tab character that violates indentation"),
        ("architecture: *a", "1:15: found undefined alias"),
        ("architecture: &a [*a]", "1:15: an alias may not contain itself"),
        ("axes: &a {hidden: *a}", "1:7: an alias may not contain itself"),
        ("architecture: 2020-13-45", "1:15: cannot read '2020-13-45': month must be in 1..12"),
        ("? [a]\n: b", "1:3: a key is a plain word"),
        ("a: 1\n---\nb: 2", "2:1: but found another document"),
    ],
)
def test_yaml(write: Callable[..., Path], text: str, expected: str) -> None:
    assert faults(write(text)) == [f"tiny.yaml:{expected}"]


def test_a_python_object_is_not_made(write: Callable[..., Path]) -> None:
    (fault,) = faults(write(changed("architecture: tiny", "architecture: !!python/object/apply:os.system echo")))
    assert fault.startswith("tiny.yaml:1:15: ")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x02\xff\xfe")
    assert faults(path) == ["model.safetensors: the map is not UTF-8 text; is it the right file for --map?"]


def test_a_map_that_is_not_there(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.yaml") == ["none.yaml: cannot read the map: No such file or directory"]


def test_a_file_name_is_shown_safely(write: Callable[..., Path]) -> None:
    (fault,) = faults(write("- a", "evil\x1b[31m"))
    assert fault.startswith("evil\\x1b[31m.yaml:1:1: ")


def test_endless_nesting_is_refused(write: Callable[..., Path]) -> None:
    deep = changed("vocab -> hidden", "vocab -> " + "(" * 5000 + "hidden" + ")" * 5000)
    assert faults(write(deep))[0].startswith("tiny.yaml:10:51: more than 32 nested parentheses in shape ")
    assert faults(write("{a: " * 100_000))[0].startswith("tiny.yaml")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{key: hidden_size}", "[a]"),
        ("{key: hidden_size}", "null"),
        ("{key: hidden_size}", "1.5"),
        ("{key: hidden_size}", "{key: 3}"),
        ("vocab -> hidden", "3"),
        ("vocab -> hidden", "null"),
    ],
)
def test_a_wrong_type_is_told_once_and_in_words_of_the_map(write: Callable[..., Path], old: str, new: str) -> None:
    found = faults(write(changed(old, new)))
    assert len(found) == 1
    assert "Section" not in found[0], "a class of the loader means nothing to a reader"
    assert ".str" not in found[0], "a type of the loader means nothing to a reader"


def space(formula: str) -> tuple[str, str]:
    return ("norm(hidden, eps)", f"norm(hidden, eps)\n  made: {formula}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        space("norm()"),
        space("silu()"),
        space("silu(final, 2)"),
        space("rope(final + 1)"),
        space("rope(3)"),
        space("sqrt(hidden * 2) * final"),
        space("sqrt(final)"),
        space("norm(final, 'x')"),
        space("norm(final, eps) * 2"),
        space("silu(norm(final, eps))"),
        space("relu(final) % 2"),
        space("final == 1"),
        space("final and hidden"),
        space("made"),
        space("silu(other)\n  other: silu(made)"),
        pytest.param(
            "tensors:",
            "rope: {methods: {frequencies: true}, tensor: head}\ntensors:",
        ),
        pytest.param(
            "tensors:",
            "scalars: {embed: 'blk.*.s'}\ntensors:\n  blk.*.s: '1'",
        ),
        ("[hidden]", "[]"),
        ("vocab -> hidden", "[]"),
        ("embed:", "embed.{hiden}.w:"),
        ("vocab -> hidden", "{shape: vocab -> hidden, if: has('heed')}"),
        ("{key: hidden_size}", "{size: 3, else: 4}"),
        ("tensors:", "prefixes: {modle.: ['']}\ntensors:"),
        ("tensors:", "repeats: {layrs.*: n_layers}\ntensors:"),
        ("vocab -> hidden", "null"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_map_is_read(write: Callable[..., Path], old: str, new: str) -> None:
    """The planner would fail on each of these, or worse, go on with a wrong scale."""
    assert all(fault.startswith("tiny.yaml:") for fault in faults(write(changed(old, new))))


# Short and long forms, and inheritance.


def test_short_forms_are_the_long_ones(write: Callable[..., Path]) -> None:
    short = load_map(write(TINY.replace("axes:", "axes:\n  four: 4\n  twice: 2 * hidden")))
    long = load_map(
        write(
            TINY.replace("axes:", "axes:\n  four: {size: 4}\n  twice: {size: 2 * hidden}")
            .replace("vocab -> hidden", "{shape: vocab -> hidden}")
            .replace("vocab <- final", "\n    - {shape: vocab <- final}")
        )
    )
    assert short.axes == long.axes
    assert [rule.shape for rule in short.tensors] == [rule.shape for rule in long.tensors]


def test_a_map_needs_few_sections(write: Callable[..., Path]) -> None:
    small = load_map(write("architecture: a\naxes: {h: {key: k}}\ngrowth: {width: [h]}\ntensors: {w: -> h}\n"))
    assert (small.architecture, small.model_types, small.tied, small.drop) == ("a", (), (), ())
    (rule,) = small.tensors
    assert (rule.pattern, rule.need, rule.offset, str(rule.place)) == ("w", "each", 0, "tiny.yaml:4:11")


def test_question_marks_say_who_needs_a_tensor(write: Callable[..., Path]) -> None:
    text = TINY.replace("embed:", "embed?:").replace("head:", "head??:")
    assert [(rule.pattern, rule.need) for rule in load_map(write(text)).tensors] == [
        ("embed", "all-or-none"),
        ("head", "any"),
    ]


def test_numbers_are_read_as_people_write_them(write: Callable[..., Path]) -> None:
    defaults = load_map(
        write(changed("{eps: 1e-5}", "{eps: 1e-5, a: 1.e3, b: '1e-5', c: 5, d: null, e: true}"))
    ).defaults
    assert defaults == {"eps": 1e-5, "a": 1000.0, "b": "1e-5", "c": 5, "d": None, "e": True}


CHILD = """\
extends: tiny
architecture: child
axes: {hidden: {key: d_model}, extra: {size: 3}}
tensors:
  head: null
  bias: -> hidden
"""


def test_a_child_replaces_adds_and_removes(write: Callable[..., Path]) -> None:
    write(TINY)
    child = load_map(write(CHILD, "child"))
    assert child.architecture == "child"
    assert child.file == "child.yaml"
    assert child.axes["hidden"].keys == ("d_model",)
    assert list(child.axes) == ["hidden", "vocab", "extra"]
    assert [(rule.pattern, rule.place.file) for rule in child.tensors] == [
        ("embed", "tiny.yaml"),
        ("bias", "child.yaml"),
    ]


def test_a_child_may_remove_a_section(write: Callable[..., Path]) -> None:
    write(TINY + "tied: [{tensor: head, to: embed}]\ndrop: [x]\n")
    child = load_map(write("extends: tiny\narchitecture: child\ntied: null\ndrop: []\n", "child"))
    assert (child.tied, child.drop) == ((), ())


HEADS = """\
architecture: tiny
axes: {hidden: {key: h}, head_dim: {key: d}, value_dim: {key: v}, rotary: {size: head_dim / 2}}
growth: {width: [hidden], head_dim: [head_dim, value_dim]}
config: {base: 10000.0, other_base: 500.0, scale: 0, scaling: none}
multipliers: [scale]
scalars: {q.weight: q.scale}
rope:
  keys: [base, other_base]
  lists: [shorts]
  tensor: freqs
  methods: {theta: true, spread: scaling != "yarn"}
  reasons: [{if: scaling == "dynamic", why: its base moves}]
places: {other_base: [scales.base, local_base], shorts: [scales.shorts]}
tensors:
  q.weight: head_dim <- hidden
  q.scale?: "1"
  freqs?:   rotary
"""


def test_what_a_map_says_of_heads_and_factors(write: Callable[..., Path]) -> None:
    """The ways stand in the order in which they are taken."""
    found = load_map(write(HEADS))
    assert (found.growth.head_dim, found.growth.with_head_dim) == ("head_dim", ("value_dim",))
    assert (found.multipliers, found.scalars) == (("scale",), {"q.weight": "q.scale"})
    assert found.rope is not None
    assert (found.rope.keys, found.rope.lists, found.rope.tensor) == (("base", "other_base"), ("shorts",), "freqs")
    assert found.places == {"other_base": ("scales.base", "local_base"), "shorts": ("scales.shorts",)}
    assert {formula.text: why for formula, why in found.rope.reasons} == {'scaling == "dynamic"': "its base moves"}
    assert {name: formula.text for name, formula in found.rope.methods.items()} == {
        "theta": "True",
        "spread": 'scaling != "yarn"',
    }
    assert list(found.rope.methods) == ["theta", "spread"]


def test_one_axis_or_none_of_heads(write: Callable[..., Path]) -> None:
    for text, expected in (("head_dim", "head_dim"), ("[head_dim]", "head_dim"), ("[]", None), ("null", None)):
        growth = load_map(write(HEADS.replace("[head_dim, value_dim]", text))).growth
        assert (growth.head_dim, growth.with_head_dim) == (expected, ())


def test_a_child_changes_what_its_parent_says_of_heads(write: Callable[..., Path]) -> None:
    """Key by key in a section; the ways are one key."""
    write(HEADS)
    child = load_map(
        write(
            "extends: tiny\narchitecture: child\nscalars: null\nrope: {methods: {theta: true}, tensor: null}\n",
            "child",
        )
    )
    assert child.scalars == {}
    assert child.rope is not None
    assert (child.rope.tensor, list(child.rope.methods), child.rope.keys[0]) == (None, ["theta"], "base")


def test_removing_what_is_not_there_is_a_mistake(write: Callable[..., Path]) -> None:
    write(TINY)
    (fault,) = faults(write(CHILD.replace("head: null", "haed: null"), "child"))
    assert fault.startswith("child.yaml:5:3: ")


def test_faults_stand_in_the_file_they_come_from(write: Callable[..., Path]) -> None:
    write(changed("vocab <- final", "vocab <- finel"))
    child = write(CHILD.replace("head: null", "more: -> hiden"), "child")
    assert faults(child) == [
        f"tiny.yaml:11:18: 'finel' {WHAT_AXIS} (did you mean 'final'?)",
        f"child.yaml:5:12: 'hiden' {WHAT_AXIS} (did you mean 'hidden'?)",
    ]


def test_a_child_that_removes_an_axis_is_told_who_needs_it(write: Callable[..., Path]) -> None:
    write(TINY)
    child = write("extends: tiny\narchitecture: child\naxes: {vocab: null}\n", "child")
    assert faults(child) == [f"tiny.yaml:10:10: 'vocab' {WHAT_AXIS}", f"tiny.yaml:11:9: 'vocab' {WHAT_AXIS}"]


def test_grandparents(write: Callable[..., Path]) -> None:
    write(TINY)
    write(CHILD, "child")
    grandchild = load_map(
        write("extends: child\narchitecture: grandchild\nspaces: {final: null, last: 'hidden'}\n", "g")
    )
    assert list(grandchild.spaces) == ["last"]
    assert [rule.pattern for rule in grandchild.tensors] == ["embed", "bias"]


def test_extends_needs_a_map(write: Callable[..., Path]) -> None:
    assert faults(write("extends: lama\n", "child")) == [
        "child.yaml:1:10: there is no map 'lama' to extend (did you mean 'llama'?)"
    ]
    assert faults(write("extends: [llama]\n" + TINY, "child")) == ["child.yaml:1:1: 'extends' has to be a text"]


def test_extends_may_not_go_in_circles(write: Callable[..., Path]) -> None:
    assert faults(write("extends: tiny\n")) == ["tiny.yaml:1:10: 'tiny' extends itself"]
    write("extends: two\n", "one")
    assert faults(write("extends: one\n", "two")) == ["one.yaml:1:10: 'two' extends itself"]


def test_the_shipped_maps_may_be_extended(write: Callable[..., Path]) -> None:
    mine = load_map(write("extends: llama\narchitecture: mine\nmatch: {model_type: [mine]}\n", "mine"))
    assert mine.model_types == ("mine",)
    assert mine.axes == catalog_map("llama").axes


# The maps that come with the tool.


@pytest.mark.parametrize("name", map_names())
def test_every_shipped_map_loads_and_is_found(name: str) -> None:
    shipped = catalog_map(name)
    assert shipped.architecture == name.removesuffix(".gguf")
    asked, find = (
        (shipped.gguf_architectures, map_for_gguf)
        if name.endswith(".gguf")
        else (shipped.model_types, map_for_model_type)
    )
    assert asked
    for kind in asked:
        assert find(kind) is shipped


def test_unknown_maps() -> None:
    assert map_for_model_type("no_such_model") is None
    assert map_for_gguf("no_such_model") is None
    with pytest.raises(WidenError) as caught:
        catalog_map("lama")
    assert caught.value.faults == (
        "map 'lama': there is no such map (did you mean 'llama'?); `widen-ckpt maps` lists them",
    )


# What the language has to be able to say. Factors are derived by hand from design section 2.


@dataclass(frozen=True)
class Header:
    name: str
    dtype: DType
    shape: tuple[int, ...]


AXES = """\
architecture: spoken
axes:
  vocab:    {key: vocab, fixed: true}
  experts:  {key: experts, fixed: true}
  labels:   {fixed: true}
  hidden:   {key: hidden}
  inner:    {key: inner}
  heads:    {key: heads}
  kv_heads: {key: kv_heads, else: heads}
  head_dim: {key: head_dim}
  group:    {size: heads / kv_heads}
  share:    {size: heads / 2}
  rotary:   {size: head_dim / 2}
  one:      {size: 1}
growth: {width: [hidden, inner], heads: [heads, kv_heads], head_dim: head_dim}
"""
SIZES = {"vocab": 7, "hidden": 6, "inner": 5, "heads": 4, "kv_heads": 2, "head_dim": 2, "experts": 3}


@pytest.fixture
def planned(write: Callable[..., Path]) -> Callable[..., Plan]:
    """Plans the checkpoint `tensors` (name: shape) under a map written in the test."""

    def plan(
        text: str,
        tensors: Mapping[str, Sequence[int]],
        grow: Mapping[str, int],
        scaling: str = "orthogonal",
        config: Mapping[str, Any] | None = None,
        dtype: str = "F32",
    ) -> Plan:
        headers = [Header(name, STORED[dtype], tuple(shape)) for name, shape in tensors.items()]
        model = ModelConfig({**SIZES, **(config or {})}, "config.json")
        return make_plan(
            load_map(write(AXES + text, "spoken")), headers, model, PlanRequest("in", None, dict(grow), scaling)
        )

    return plan


def factors(plan: Plan) -> dict[str, str]:
    """The factors of each tensor as one text, the parts' in stored order."""
    return {tensor.source.name: " | ".join(map(str, tensor.scales)) for tensor in plan.tensors}


def tensor(plan: Plan, name: str) -> TensorPlan:
    return next(found for found in plan.tensors if found.source.name == name)


def positions(growth: Growth) -> list[int]:
    """The old position that stands at each new one."""
    return [old for run in runs(growth) for old in range(run.start, run.stop) for _ in range(run.each)]


def repeated(shape: Sequence[int], copies: Sequence[int]) -> list[int]:
    """Positions of a row-major product whose factors are each repeated in place."""
    array = np.arange(np.prod(shape)).reshape(shape)
    for axis, number in enumerate(copies):
        array = array.repeat(number, axis)
    return array.ravel().tolist()


ATTENTION = """\
config: {eps: 1e-5}
spaces:
  normed: norm(hidden, eps)
  query:  head_dim
  key:    head_dim
  value:  head_dim
  scores: softmax(query @ key / sqrt(head_dim))
tensors:
  gain: -> normed
  out:  hidden <- (heads value)
"""
ATTENTION_SHAPES = {"gain": [6], "out": [6, 8]}
# hidden x3: stream and gain 1/sqrt(3), reading normed 1/(3/sqrt(3)) = 1/sqrt(3). heads x2: value 1/sqrt(2), so its rows
# 1/sqrt(6); out = (1/sqrt(3)) / (2/sqrt(2)) = 1/sqrt(6). The head size stays, so query and key have scale 1.
PACKED = {"gain": "1/sqrt(3)", "out": "1/sqrt(6)", "qkv": "1/sqrt(3) | 1/sqrt(6)", "bias": "1 | 1/sqrt(2)"}


def test_three_blocks(planned: Callable[..., Plan]) -> None:
    text = ATTENTION + "  qkv: normed -> (heads query | heads key | heads value)\n"
    text += "  bias: -> (heads query | heads key | heads value)\n"
    plan = planned(text, {**ATTENTION_SHAPES, "qkv": [6, 24], "bias": [24]}, {"hidden": 3, "heads": 2})
    assert factors(plan) == PACKED
    one = repeated([4, 2], [2, 1])
    blocks = one + [8 + at for at in one] + [16 + at for at in one]
    assert positions(tensor(plan, "qkv").growth[1]) == positions(tensor(plan, "bias").growth[0]) == blocks
    assert positions(tensor(plan, "qkv").growth[0]) == repeated([6], [3])


def test_parts_inside_each_head(planned: Callable[..., Plan]) -> None:
    text = ATTENTION + "  qkv: (heads (query | key | value)) <- normed\n  bias: -> (heads (query | key | value))\n"
    plan = planned(text, {**ATTENTION_SHAPES, "qkv": [24, 6], "bias": [24]}, {"hidden": 3, "heads": 2})
    assert factors(plan) == PACKED
    assert positions(tensor(plan, "qkv").growth[0]) == repeated([4, 6], [2, 1])


def test_parts_inside_each_head_when_the_head_grows(planned: Callable[..., Plan]) -> None:
    text = ATTENTION + "  qkv: (heads (query | key | value)) <- normed\n"
    plan = planned(text, {**ATTENTION_SHAPES, "qkv": [24, 6]}, {"head_dim": 2})
    # q.k sums 2 copies under sqrt(2 d): 2 s s / sqrt(2) = 1, so 2^(-1/4) each; value 1/sqrt(2), out 1/(2/sqrt(2)).
    assert factors(plan) == {"gain": "1", "out": "1/sqrt(2)", "qkv": "2^(-1/4) | 1/sqrt(2)"}
    assert positions(tensor(plan, "qkv").growth[0]) == repeated([4, 3, 2], [1, 1, 2])


def test_blocks_of_other_sizes(planned: Callable[..., Plan]) -> None:
    text = ATTENTION + "  qkv: (heads query | kv_heads key | kv_heads value) <- normed\n"
    plan = planned(text, {**ATTENTION_SHAPES, "qkv": [16, 6]}, {"hidden": 3, "heads": 4, "kv_heads": 2})
    # A value is read 4 times, whatever kv_heads did: scale 1/2, rows (1/2)/sqrt(3), out (1/sqrt(3))/(4/2).
    assert factors(plan) == {"gain": "1/sqrt(3)", "out": "1/(2 sqrt(3))", "qkv": "1/sqrt(3) | 1/(2 sqrt(3))"}
    query, key = repeated([4, 2], [4, 1]), repeated([2, 2], [2, 1])
    assert positions(tensor(plan, "qkv").growth[0]) == query + [8 + at for at in key] + [12 + at for at in key]


def test_groups_of_queries_with_their_key_and_value(planned: Callable[..., Plan]) -> None:
    """Falcon: (query heads of a group | key | value) for each key head; the output follows the groups' order."""
    text = ATTENTION.replace("hidden <- (heads value)", "hidden <- (kv_heads group value)")
    text += "  qkv: (kv_heads (group query | key | value)) <- normed\n"
    shapes = {**ATTENTION_SHAPES, "qkv": [16, 6]}
    by_both = planned(text, shapes, {"hidden": 3, "heads": 2, "kv_heads": 2})
    assert factors(by_both) == {"gain": "1/sqrt(3)", "out": "1/sqrt(6)", "qkv": "1/sqrt(3) | 1/sqrt(6)"}
    assert positions(tensor(by_both, "qkv").growth[0]) == repeated([2, 8], [2, 1])
    assert positions(tensor(by_both, "out").growth[1]) == repeated([2, 4], [2, 1])
    by_group = planned(text, shapes, {"heads": 2})
    packed = [*repeated([2, 2], [2, 1]), 4, 5, 6, 7]
    assert positions(tensor(by_group, "qkv").growth[0]) == packed + [8 + at for at in packed]
    assert positions(tensor(by_group, "out").growth[1]) == repeated([2, 2, 2], [1, 2, 1])


def test_shards_of_parts(planned: Callable[..., Plan]) -> None:
    """CodeGen: in each of 2 model-parallel shards the queries, then the values, then the keys of its heads."""
    text = ATTENTION + "  qkv: (2 (share query | share value | share key)) <- normed\n"
    plan = planned(text, {**ATTENTION_SHAPES, "qkv": [24, 6]}, {"hidden": 3, "heads": 2})
    assert factors(plan)["qkv"] == "1/sqrt(3) | 1/sqrt(6)"
    assert positions(tensor(plan, "qkv").growth[0]) == repeated([2, 3, 2, 2], [1, 1, 2, 1])


@pytest.mark.parametrize(
    ("logits", "query"),
    [
        ("query @ key / sqrt(head_dim)", "1/sqrt(2)"),
        ("query @ key", "1/2"),
        ("query @ key * scale", "1/2"),
        ("query @ key / head_dim", "1"),
        ("query @ key / sqrt(head_dim) if by_size else query @ key", "1/2"),
    ],
)
def test_attention_multipliers(planned: Callable[..., Plan], logits: str, query: str) -> None:
    """The head size grows by 4, so q.k has 4 s(query) s(key): over 2, over 1 (a constant), over 4 it has to be 1."""
    text = ATTENTION.replace("query @ key / sqrt(head_dim)", logits).replace("1e-5", "1e-5, scale: 0.5, by_size: false")
    text += "  q: (heads query) <- normed\n  k: (heads key) <- normed\n"
    plan = planned(text, {**ATTENTION_SHAPES, "q": [8, 6], "k": [8, 6]}, {"head_dim": 4})
    assert factors(plan) == {"gain": "1", "out": "1/2", "q": query, "k": query}


FEED_FORWARD = """\
config: {eps: 1e-5, act: gelu}
spaces:
  normed: norm(hidden, eps)
  unit:   inner
  acted:  act(unit)
tensors:
  gain:      -> normed
  up:        unit <- normed
  up_bias:   -> unit
  down:      hidden <- acted
  down_bias: -> hidden
"""
FEED_FORWARD_SHAPES = {"gain": [6], "up": [5, 6], "up_bias": [5], "down": [6, 5], "down_bias": [6]}


@pytest.mark.parametrize(
    ("activation", "up", "up_bias", "down", "down_bias"),
    [
        # The source's tables for r = 2: GELU keeps 1, a ReLU lets 1/sqrt(2) through.
        ("gelu", "1/sqrt(2)", "1", "1/(2 sqrt(2))", "1/sqrt(2)"),
        ("relu", "1/2", "1/sqrt(2)", "1/2", "1/sqrt(2)"),
        # A squared ReLU squares: 1/sqrt(2) behind it is 2^(-1/4) before it; up = 2^(-1/4)/sqrt(2).
        ("relu2", "2^(-3/4)", "2^(-1/4)", "1/2", "1/sqrt(2)"),
        # What is not known to be homogeneous keeps 1.
        ("some_new_activation", "1/sqrt(2)", "1", "1/(2 sqrt(2))", "1/sqrt(2)"),
    ],
)
def test_activation_named_by_the_config(
    planned: Callable[..., Plan], activation: str, up: str, up_bias: str, down: str, down_bias: str
) -> None:
    plan = planned(FEED_FORWARD, FEED_FORWARD_SHAPES, {"hidden": 2, "inner": 2}, config={"act": activation})
    assert factors(plan) == {
        "gain": "1/sqrt(2)", "up": up, "up_bias": up_bias, "down": down, "down_bias": down_bias
    }  # fmt: skip


@pytest.mark.parametrize(
    ("formula", "degree"),
    [
        ("relu(unit)", 1),
        ("relu2(unit)", 2),
        ("relu(unit) * relu(unit)", 2),
        ("relu(unit) * 3", 1),
        ("unit + relu(unit)", 1),
    ],
)
def test_homogeneous_formulas(planned: Callable[..., Plan], formula: str, degree: int) -> None:
    plan = planned(FEED_FORWARD.replace("act(unit)", formula), FEED_FORWARD_SHAPES, {"hidden": 2, "inner": 3})
    assert plan.scales["acted"] == plan.scales["unit"] ** degree
    assert not plan.scales["acted"].is_one


@pytest.mark.parametrize(("formula", "degree"), [("relu(unit) ** 2", 2), ("-relu(unit)", 1), ("+relu(unit)", 1)])
def test_a_formula_is_understood_or_refused(planned: Callable[..., Plan], formula: str, degree: int) -> None:
    """Either is fine; going on with a scale that the formula does not have is not."""
    text = FEED_FORWARD.replace("act(unit)", formula)
    try:
        plan = planned(text, FEED_FORWARD_SHAPES, {"hidden": 2, "inner": 3})
    except WidenError as error:
        fault = error.faults[0]
    else:
        fault = ""
        assert plan.scales["acted"] == plan.scales["unit"] ** degree
    assert not fault or fault.startswith("spoken.yaml:")


def test_gate_and_up_take_their_scales_from_the_activation(planned: Callable[..., Plan]) -> None:
    text = """\
config: {eps: 1e-5}
spaces:
  normed:  norm(hidden, eps)
  gate:    inner
  up:      inner
  product: silu(gate) * up
tensors:
  gain: -> normed
  both: (gate | up) <- normed
  down: hidden <- product
"""
    plan = planned(text, {"gain": [6], "both": [10, 6], "down": [6, 5]}, {"hidden": 2, "inner": 3})
    # SiLU keeps the gate at 1: 1/(2/sqrt(2)). The product has the scale of up, 1/sqrt(3): down = (1/sqrt(2))/(3/sqrt(3)).
    assert factors(plan) == {"gain": "1/sqrt(2)", "both": "1/sqrt(2) | 1/sqrt(6)", "down": "1/sqrt(6)"}
    unit = repeated([5], [3])
    assert positions(tensor(plan, "both").growth[0]) == unit + [5 + at for at in unit]


def test_gate_and_up_that_alternate_for_each_expert(planned: Callable[..., Plan]) -> None:
    """gpt-oss: [experts, hidden, inner * (gate up)]."""
    text = """\
config: {eps: 1e-5}
spaces:
  normed:  norm(hidden, eps)
  gate:    one
  up:      one
  product: silu(gate) * up
tensors:
  gain:   -> normed
  router: experts <- normed
  both:   'experts: normed -> (inner (gate | up))'
  bias:   'experts: -> (inner (gate | up))'
  down:   'experts: (inner product) -> hidden'
"""
    shapes = {"gain": [6], "router": [3, 6], "both": [3, 6, 10], "bias": [3, 10], "down": [3, 5, 6]}
    plan = planned(text, shapes, {"hidden": 2, "inner": 3})
    # As above; the router writes logits, which keep 1, so it is 1/(2/sqrt(2)); nothing happens along the experts.
    assert factors(plan) == {
        "gain": "1/sqrt(2)", "router": "1/sqrt(2)", "both": "1/sqrt(2) | 1/sqrt(6)", "bias": "1 | 1/sqrt(3)",
        "down": "1/sqrt(6)",
    }  # fmt: skip
    assert positions(tensor(plan, "both").growth[2]) == repeated([5, 2], [3, 1])
    assert [tensor(plan, name).shape for name in ("router", "both", "down")] == [(3, 12), (3, 12, 30), (3, 15, 12)]


def test_experts_as_names(planned: Callable[..., Plan]) -> None:
    text = FEED_FORWARD.replace("  up:  ", "  layers.*.experts.*.up:").replace(
        "  down:  ", "  layers.*.experts.*.down:"
    )
    shapes = {f"layers.{layer}.experts.{expert}.up": [5, 6] for layer in range(2) for expert in range(3)}
    shapes |= {name.replace("up", "down"): [6, 5] for name in shapes}
    rest = {name: FEED_FORWARD_SHAPES[name] for name in ("gain", "up_bias", "down_bias")}
    plan = planned(text, {**rest, **shapes}, {"hidden": 2, "inner": 2})
    found = factors(plan)
    assert {found[name] for name in shapes if name.endswith("up")} == {"1/sqrt(2)"}
    assert {found[name] for name in shapes if name.endswith("down")} == {"1/(2 sqrt(2))"}


def test_an_expert_that_is_missing_is_named(planned: Callable[..., Plan]) -> None:
    text = FEED_FORWARD.replace("  up:  ", "  layers.*.experts.*.up:")
    text += "repeats: {layers.*: layers, layers.*.experts.*: experts}\n"
    shapes = {f"layers.{layer}.experts.{expert}.up": [5, 6] for layer in range(2) for expert in range(3)}
    shapes |= {name: FEED_FORWARD_SHAPES[name] for name in ("gain", "up_bias", "down", "down_bias")}
    del shapes["layers.1.experts.2.up"]
    with pytest.raises(WidenError, match=r"tensor 'layers\.1\.experts\.2\.up' is missing"):
        planned(text, shapes, {"hidden": 2}, config={"layers": 2})


BLOCK = """\
config: {eps: 1e-5, tied: true}
spaces:
  normed: norm(hidden, eps)
  final:  norm(hidden, eps)
tensors:
  embed:      vocab -> hidden
  gain:       -> normed
  mix:        hidden <- normed
  final_gain: -> final
"""
BLOCK_SHAPES = {"embed": [7, 6], "gain": [6], "mix": [6, 6], "final_gain": [6]}


@pytest.mark.parametrize(
    ("shape", "stored", "new", "factor"),
    [
        ("hidden", [6], (12,), "1"),  # a vector that multiplies each channel lets every scale through
        ("heads", [4], (12,), "1"),  # per-head scalars and sinks
        ("vocab heads", [7, 4], (7, 12), "1"),  # a relative-position table
        ("one one hidden", [1, 1, 6], (1, 1, 12), "1"),
        ("hidden 1 4", [6, 1, 4], (12, 1, 4), "1"),  # depthwise kernel: each channel by itself
        ("hidden <- 3 2 2", [6, 3, 2, 2], (12, 3, 2, 2), "1/sqrt(2)"),  # patches of an image into the stream
        ("hidden <- normed 3", [6, 6, 3], (12, 12, 3), "1/2"),  # full kernel, stream to stream
        ("normed 3 -> hidden", [6, 3, 6], (12, 3, 12), "1/2"),
        ("vocab <- (normed | normed)", [7, 12], (7, 24), "1/sqrt(2)"),  # reads two vectors laid side by side
        ("vocab <- normed normed", [7, 6, 6], (7, 12, 12), "1/2"),  # bilinear: each side 1/(2/sqrt(2))
        ("labels <- normed", [9, 6], (9, 12), "1/sqrt(2)"),
    ],
)
def test_one_tensor(
    planned: Callable[..., Plan], shape: str, stored: list[int], new: tuple[int, ...], factor: str
) -> None:
    plan = planned(f"{BLOCK}  x: {shape}\n", {**BLOCK_SHAPES, "x": stored}, {"hidden": 2, "heads": 3})
    assert tensor(plan, "x").shape == new
    assert factors(plan)["x"] == factor


@pytest.mark.parametrize(
    ("scaling", "tied", "expected"),
    [
        # r = 3. final: 1/(r * s_embed) where tied; orthogonal has 1/sqrt(3) all over, which agrees.
        ("orthogonal", True, {"embed": "1/sqrt(3)", "gain": "1/sqrt(3)", "mix": "1/3", "final_gain": "1/sqrt(3)"}),
        ("copy", True, {"embed": "1", "gain": "1", "mix": "1/3", "final_gain": "1/3"}),
        ("copy", False, {"embed": "1", "gain": "1", "mix": "1/3", "final_gain": "1", "head": "1/3"}),
        # Norm outputs at 1/3: what reads 3 copies of them is left alone; a tied final is 1/(3 * 1).
        ("quiet", True, {"embed": "1", "gain": "1/3", "mix": "1", "final_gain": "1/3"}),
        ("quiet", False, {"embed": "1", "gain": "1/3", "mix": "1", "final_gain": "1/3", "head": "1"}),
    ],
)
def test_several_scales_on_one_size_and_a_tie(
    planned: Callable[..., Plan], scaling: str, tied: bool, expected: dict[str, str]
) -> None:
    text = BLOCK + "  head: vocab <- final\ntied: [{tensor: head, to: embed, when: tied}]\n"
    shapes = BLOCK_SHAPES if tied else {**BLOCK_SHAPES, "head": [7, 6]}
    plan = planned(text, shapes, {"hidden": 3}, scaling, config={"tied": tied})
    assert factors(plan) == expected


@pytest.mark.parametrize(
    ("embed", "head", "scaling", "expected"),
    [
        # Gemma: the stored embedding is s/sqrt(2). Tied, it equals 1/(2 final): final = 1/(2 * s/sqrt(2)).
        ("sqrt(hidden)", None, "orthogonal", {"embed": "1/2", "final_gain": "1"}),
        ("sqrt(hidden)", None, "copy", {"embed": "1/sqrt(2)", "final_gain": "1/sqrt(2)"}),
        # T5: logits times hidden**-1/2, so the head's factor is sqrt(2)/(2 final) = s: final = 1/(sqrt(2) s).
        (None, "1 / sqrt(hidden)", "orthogonal", {"embed": "1/sqrt(2)", "final_gain": "1"}),
        (None, "1 / sqrt(hidden)", "copy", {"embed": "1", "final_gain": "1/sqrt(2)"}),
        # Both cancel.
        ("sqrt(hidden)", "sqrt(hidden)", "copy", {"embed": "1/sqrt(2)", "final_gain": "1/2"}),
        ("hidden", None, "copy", {"embed": "1/2", "final_gain": "1"}),
    ],
)
def test_run_time_multipliers(
    planned: Callable[..., Plan], embed: str | None, head: str | None, scaling: str, expected: dict[str, str]
) -> None:
    def rule(shape: str, times: str | None) -> str:
        return f"{{shape: {shape}, times: {times}}}" if times else shape

    text = BLOCK.replace("vocab -> hidden", rule("vocab -> hidden", embed))
    text += f"  head: {rule('vocab <- final', head)}\ntied: [{{tensor: head, to: embed, when: tied}}]\n"
    found = factors(planned(text, BLOCK_SHAPES, {"hidden": 2}, scaling))
    assert {name: found[name] for name in expected} == expected


def test_gain_stored_as_difference_from_one(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("-> normed", "{shape: -> normed, offset: 1}")
    plan = planned(text, BLOCK_SHAPES, {"hidden": 2})
    assert (tensor(plan, "gain").offset, factors(plan)["gain"]) == (1, "1/sqrt(2)")
    assert tensor(plan, "gain").exactness == "rounds"
    copied = tensor(planned(text, BLOCK_SHAPES, {"hidden": 2}, "copy"), "gain")
    assert (copied.offset, copied.exactness) == (1, "exact")


def test_norm_without_a_gain_hands_on_scale_1(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("  gain:       -> normed\n", "")
    shapes = {name: shape for name, shape in BLOCK_SHAPES.items() if name != "gain"}
    # mix reads 2 copies of scale 1 into the stream at 1/sqrt(2).
    assert factors(planned(text, shapes, {"hidden": 2})) == {
        "embed": "1/sqrt(2)", "mix": "1/(2 sqrt(2))", "final_gain": "1/sqrt(2)"
    }  # fmt: skip


def test_epsilon_in_the_code_keeps_the_stream(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("normed: norm(hidden, eps)", "normed: norm(hidden, 1e-5)")
    with pytest.raises(WidenError) as caught:
        planned(text, BLOCK_SHAPES, {"hidden": 2})
    assert caught.value.faults == (
        "--scaling orthogonal: not function-exact for this checkpoint, because the norm of hidden has its epsilon 1e-05 in "
        "the code: s(hidden) = 1, and orthogonal sets s(hidden) = 1/sqrt(2); --scaling auto takes a mode that is",
    )
    plan = planned(text, BLOCK_SHAPES, {"hidden": 2}, "copy")
    assert factors(plan) == {"embed": "1", "gain": "1", "mix": "1/2", "final_gain": "1"}
    assert planned(text, BLOCK_SHAPES, {"hidden": 2}, "auto").mode == "copy"


def test_one_epsilon_for_two_spaces_makes_their_scales_equal(planned: Callable[..., Plan]) -> None:
    """Qwen3: the hidden norm and the per-head query norm share a key, so the query's rows follow the stream."""
    text = BLOCK.replace("spaces:", "spaces:\n  query: head_dim\n  even: norm(query, eps)")
    text += "  q: (heads query) <- normed\n  q_gain: -> even\n"
    plan = planned(text, {**BLOCK_SHAPES, "q": [8, 6], "q_gain": [2]}, {"hidden": 2, "heads": 3})
    assert plan.scales["query"] == plan.scales["hidden"]
    assert factors(plan)["q"] == "1/2"
    (epsilon,) = [change for change in plan.config if change.key == "eps"]
    assert (epsilon.old, epsilon.new) == (None, pytest.approx(5e-6))


def test_two_epsilons_are_scaled_each_by_its_own_norms(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("spaces:", "spaces:\n  unit: inner\n  even: norm(unit, inner_eps)")
    text = text.replace("eps: 1e-5,", "eps: 1e-5, inner_eps: 1e-3,")
    text += "  up: unit <- normed\n  up_gain: -> even\n  down: hidden <- even\n"
    shapes = {**BLOCK_SHAPES, "up": [5, 6], "up_gain": [5], "down": [6, 5]}
    plan = planned(text, shapes, {"hidden": 2, "inner": 4}, config={"eps": 1e-6})
    assert {change.key: change.new for change in plan.config if "eps" in change.key} == {
        "eps": pytest.approx(5e-7), "inner_eps": pytest.approx(2.5e-4)
    }  # fmt: skip


def test_heads_numbered_in_the_name(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("spaces:", "spaces:\n  query: head_dim") + "  layers.*.head{heads}.q: query <- normed\n"
    shapes = {f"layers.{layer}.head{head}.q": [2, 6] for layer in (3, 13) for head in (0, 3, 13)}
    plan = planned(text, {**BLOCK_SHAPES, **shapes}, {"hidden": 2, "heads": 2}, config={"heads": 14})
    assert tensor(plan, "layers.3.head3.q").names == ("layers.3.head6.q", "layers.3.head7.q")
    assert tensor(plan, "layers.13.head13.q").names == ("layers.13.head26.q", "layers.13.head27.q")
    assert tensor(plan, "layers.3.head0.q").names == ("layers.3.head0.q", "layers.3.head1.q")
    assert {factors(plan)[name] for name in shapes} == {"1/sqrt(2)"}
    assert tensor(plan, "layers.3.head3.q").shape == (2, 12)


def test_heads_numbered_before_another_number(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("spaces:", "spaces:\n  query: head_dim") + "  heads.{heads}.layers.*.q: query <- normed\n"
    shapes = {"heads.1.layers.10.q": [2, 6], "heads.1.layers.1.q": [2, 6]}
    plan = planned(text, {**BLOCK_SHAPES, **shapes}, {"heads": 2})
    assert tensor(plan, "heads.1.layers.10.q").names == ("heads.2.layers.10.q", "heads.3.layers.10.q")
    assert tensor(plan, "heads.1.layers.1.q").names == ("heads.2.layers.1.q", "heads.3.layers.1.q")


def test_a_numbered_head_that_is_missing_is_named(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("spaces:", "spaces:\n  query: head_dim") + "  head{heads}.q: query <- normed\n"
    shapes = {f"head{head}.q": [2, 6] for head in (0, 1, 3)}
    with pytest.raises(WidenError, match=r"tensor 'head2\.q' is missing"):
        planned(text, {**BLOCK_SHAPES, **shapes}, {"heads": 2})


def test_optional_tensors(planned: Callable[..., Plan]) -> None:
    text = BLOCK + "  layers.*.w: hidden <- normed\n  layers.*.all?: -> hidden\n  layers.*.some??: -> hidden\n"
    text += "repeats: {layers.*: layers}\n"
    shapes = {**BLOCK_SHAPES, "layers.0.w": [6, 6], "layers.1.w": [6, 6]}
    config = {"layers": 2}
    assert "layers.0.all" not in factors(planned(text, shapes, {"hidden": 2}, config=config))
    both = {**shapes, "layers.0.all": [6], "layers.1.all": [6], "layers.1.some": [6]}
    found = factors(planned(text, both, {"hidden": 2}, config=config))
    assert found["layers.1.all"] == found["layers.1.some"] == "1/sqrt(2)"
    with pytest.raises(WidenError) as caught:
        planned(text, {**shapes, "layers.1.all": [6]}, {"hidden": 2}, config=config)
    assert caught.value.faults == (
        "in: tensor 'layers.0.all' is missing; the file is incomplete, or the config belongs to another model",
    )


@pytest.mark.parametrize(
    ("condition", "applies"),
    [
        ("tied", True),
        ("not tied", False),
        ("size > 3", True),
        ("size == 3 or tied", True),
        ('has("embed")', True),
        ('not has("embed")', False),
        ('is_class("*ForCausalLM")', True),
        ('is_class("*Model")', False),
        ("hidden > 3", True),
        ("hidden % heads == 0", False),
    ],
)
def test_conditions(planned: Callable[..., Plan], condition: str, applies: bool) -> None:
    """Two rules for one name; the second repeats and does not scale."""
    text = BLOCK.replace("tied: true", "tied: true, size: 4") + (
        f"  x:\n    - {{shape: -> hidden, if: '{condition}'}}\n    - {{shape: hidden}}\n"
    )
    plan = planned(
        text, {**BLOCK_SHAPES, "x": [6]}, {"hidden": 2}, config={"architectures": ["SomeForCausalLM", "SomeModel"]}
    )
    assert factors(plan)["x"] == ("1/sqrt(2)" if applies else "1")


@pytest.mark.parametrize(
    "condition", ["size > 3", "size + 1 == 2", "'a' in size", "size // zero == 1", "4 % zero == 0"]
)
def test_a_condition_that_its_values_do_not_fit_is_no_crash(planned: Callable[..., Plan], condition: str) -> None:
    """A config may hold null, or anything, where the map expects a number."""
    text = BLOCK.replace("tied: true", "tied: true, size: null, zero: 0")
    text += f'  x: {{shape: -> hidden, when: "{condition}"}}\n'
    with pytest.raises(WidenError) as caught:
        planned(text, BLOCK_SHAPES, {"hidden": 2})
    assert all(fault.startswith(("config.json", "in", "spoken.yaml")) for fault in caught.value.faults)


def test_required_when(planned: Callable[..., Plan]) -> None:
    text = BLOCK + "  head: {shape: vocab <- final, when: not tied}\n"
    assert "head" not in factors(planned(text, BLOCK_SHAPES, {"hidden": 2}))
    with pytest.raises(WidenError, match="tensor 'head' is missing"):
        planned(text, BLOCK_SHAPES, {"hidden": 2}, config={"tied": False})


@pytest.mark.parametrize(
    ("condition", "asked"),
    [
        ("wide > 3", True),
        ("wide > 7", False),
        ("told", True),
        ("double == 12 and both == 18", True),
        ("open == 4", True),
    ],
)
def test_a_condition_over_axes_goes_by_their_sizes(
    planned: Callable[..., Plan], write: Callable[..., Path], condition: str, asked: bool
) -> None:
    """By what the config says of them, what follows from that, or what shapes tell; once the head was silently not asked for."""
    axes = AXES.replace("  one:", "  told: {key: [no_such, hidden]}\n  one:")
    axes = axes.replace(
        "  one:", "  wide: {key: hidden}\n  double: {size: 2 * wide}\n  both: {key: none, else: double + wide}\n  one:"
    )
    text = BLOCK + "  table: labels -> open\n" + f"  head: {{shape: vocab <- final, when: {condition}}}\n"
    path = write(axes.replace("  one:", "  open: {key: no_such_key}\n  one:") + text)
    shapes = {**BLOCK_SHAPES, "table": [3, 4]}
    headers = [Header(name, STORED["F32"], tuple(shape)) for name, shape in shapes.items()]
    arguments = (load_map(path), headers, ModelConfig(SIZES, "config.json"), PlanRequest("in", None, {"inner": 2}))
    if not asked:
        make_plan(*arguments)
        return
    with pytest.raises(WidenError, match="tensor 'head' is missing"):
        make_plan(*arguments)


def test_a_condition_is_over_no_space(write: Callable[..., Path]) -> None:
    text = TINY.replace("  final: norm(hidden, eps)", "  final: norm(hidden, eps)\n  one: final if final else hidden")
    assert faults(write(text)) == ["tiny.yaml:8:17: 'final' is a space; a condition is over config keys and axes"]


@pytest.mark.parametrize("prefix", ["model.", "", "model.language_model."])
def test_prefixes(planned: Callable[..., Plan], prefix: str) -> None:
    text = BLOCK + "prefixes: {model.: ['', model.language_model.]}\n"
    for name in BLOCK_SHAPES:
        text = text.replace(f"  {name}:", f"  model.{name}:")
    shapes = {prefix + name: shape for name, shape in BLOCK_SHAPES.items()}
    assert list(factors(planned(text, shapes, {"hidden": 2}))) == list(shapes)
    del shapes[f"{prefix}mix"]
    with pytest.raises(WidenError, match=f"tensor '{prefix}mix' is missing"):
        planned(text, shapes, {"hidden": 2})


def test_synonyms_keep_the_name_they_are_stored_under(planned: Callable[..., Plan]) -> None:
    text = BLOCK.replace("  gain: ", "  ln.weight: ") + "synonyms: {ln.gamma: ln.weight}\n"
    shapes = {"ln.gamma": [6], **{name: shape for name, shape in BLOCK_SHAPES.items() if name != "gain"}}
    plan = planned(text, shapes, {"hidden": 2})
    assert (tensor(plan, "ln.gamma").names, factors(plan)["ln.gamma"]) == (("ln.gamma",), "1/sqrt(2)")


def test_buffers_are_dropped(planned: Callable[..., Plan]) -> None:
    text = BLOCK + "drop: ['layers.*.inv_freq', mask]\n"
    plan = planned(text, {"mask": [4, 4], "layers.0.inv_freq": [2], **BLOCK_SHAPES}, {"hidden": 2})
    assert plan.dropped == ("mask", "layers.0.inv_freq")
    assert list(factors(plan)) == list(BLOCK_SHAPES)
    assert plan.warnings == (
        "in: buffers that are computed anew when the model loads, left out: mask, layers.0.inv_freq",
    )


def test_positions_that_do_not_follow_a_repeat(planned: Callable[..., Plan]) -> None:
    text = ATTENTION + "  q: (heads query) <- normed\n  k: (heads key) <- normed\n"
    shapes = {**ATTENTION_SHAPES, "q": [8, 6], "k": [8, 6]}
    rope = text.replace("query @ key", "rope(query) @ rope(key)")
    alibi = text.replace("sqrt(head_dim))", "sqrt(head_dim) + alibi(heads))")
    sinusoid = text.replace("spaces:", "spaces:\n  placed: hidden + sinusoid(hidden)")
    reasons = {
        "head_dim": "its rotary angles depend on the head size, and a plain repeat gives the copies other angles; grow heads instead",
        "heads": "ALiBi's slopes depend on the number of heads; grow head_dim instead",
        "hidden": "its positions are sinusoids computed at run time, which do not follow a repeat; grow inner instead",
    }
    for which, axis in ((rope, "head_dim"), (alibi, "heads"), (sinusoid, "hidden")):
        with pytest.raises(WidenError) as caught:
            planned(which, shapes, {axis: 2})
        assert caught.value.faults == (f"--grow {axis}=2: '{axis}' cannot grow exactly: {reasons[axis]}",)
    assert factors(planned(rope, shapes, {"heads": 2}))["q"] == "1"
    assert factors(planned(alibi, shapes, {"head_dim": 2}))["q"] == "2^(-1/4)"


@pytest.mark.parametrize("rows", ["(heads 2 query)", "(heads query 2)"])
def test_rotary_layouts_grow_by_heads(planned: Callable[..., Plan], rows: str) -> None:
    """Pairs as halves of a head or as neighbours; only whole heads are repeated."""
    text = ATTENTION.replace("query @ key", "rope(query) @ rope(key)").replace("query:  head_dim", "query: rotary")
    text = text.replace("key:    head_dim", "key: rotary")
    text += f"  q: {rows} <- normed\n  k: {rows.replace('query', 'key')} <- normed\n"
    shapes = {"gain": [6], "q": [16, 6], "k": [16, 6], "out": [6, 16]}
    plan = planned(text, shapes, {"hidden": 2, "heads": 3}, config={"head_dim": 4})
    assert positions(tensor(plan, "q").growth[0]) == repeated([4, 4], [3, 1])
    assert factors(plan)["q"] == factors(plan)["k"] == "1/sqrt(2)"


def test_the_whole_of_what_is_unknown_is_refused_together(planned: Callable[..., Plan]) -> None:
    with pytest.raises(WidenError) as caught:
        planned(BLOCK, {"gain": [6], "mix": [6, 7], "strange": [3], "final_gain": [6]}, {"hidden": 2})
    assert [fault.split("'")[1] for fault in caught.value.faults] == ["strange", "embed", "mix"]
