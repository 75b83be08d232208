"""The planner: sizes, growth, ties, modes and the words it finds for exactness, from headers and configs alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from widen_cli.config import ModelConfig
from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError
from widen_cli.maps import catalog_map, load_map
from widen_cli.plan import Plan, PlanRequest, make_plan
from widen_cli.plan.text import plan_json, plan_text
from widen_cli.plan.wishes import parse_grow
from widen_cli.plan.written import WrittenTypes

GOLDEN = Path(__file__).parent / "golden"
Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 4e-3,
    "tie_word_embeddings": False,
}
GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 11,
    "n_positions": 8,
    "n_embd": 12,
    "n_layer": 1,
    "n_head": 3,
    "layer_norm_epsilon": 4e-3,
}
BERT: Config = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 11,
    "max_position_embeddings": 8,
    "type_vocab_size": 2,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 0,
    "num_attention_heads": 3,
    "layer_norm_eps": 4e-3,
}


def llama(head_dim: int = 2, layers: int = 2, head: bool = True) -> Shapes:
    """The tensors of the LLAMA config."""
    shapes: Shapes = {"model.embed_tokens.weight": (11, 12)}
    for layer in range(layers):
        part = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{part}{norm}.weight"] = (12,)
        for name, heads in (("q", 6), ("k", 3), ("v", 3)):
            shapes[f"{part}self_attn.{name}_proj.weight"] = (heads * head_dim, 12)
        shapes[f"{part}self_attn.o_proj.weight"] = (12, 6 * head_dim)
        for name, shape in (("gate", (10, 12)), ("up", (10, 12)), ("down", (12, 10))):
            shapes[f"{part}mlp.{name}_proj.weight"] = shape
    shapes["model.norm.weight"] = (12,)
    return shapes | ({"lm_head.weight": (11, 12)} if head else {})


def gpt2(inner: int = 48) -> Shapes:
    """The tensors of the GPT2 config."""
    part = "transformer.h.0."
    shapes: Shapes = {"transformer.wte.weight": (11, 12), "transformer.wpe.weight": (8, 12)}
    for norm in (f"{part}ln_1", f"{part}ln_2", "transformer.ln_f"):
        shapes |= {f"{norm}.weight": (12,), f"{norm}.bias": (12,)}
    matrices = {"attn.c_attn": (12, 36), "attn.c_proj": (12, 12), "mlp.c_fc": (12, inner), "mlp.c_proj": (inner, 12)}
    for name, shape in matrices.items():
        shapes |= {f"{part}{name}.weight": shape, f"{part}{name}.bias": shape[1:]}
    return shapes


def bert() -> Shapes:
    """The tensors of the BERT config, whose encoder has no layers."""
    embeddings = {"word": 11, "position": 8, "token_type": 2}
    shapes: Shapes = {f"bert.embeddings.{name}_embeddings.weight": (size, 12) for name, size in embeddings.items()}
    shapes |= {f"bert.embeddings.LayerNorm.{part}": (12,) for part in ("weight", "bias")}
    shapes |= {f"cls.predictions.transform.LayerNorm.{part}": (12,) for part in ("weight", "bias")}
    shapes |= {"cls.predictions.transform.dense.weight": (12, 12), "cls.predictions.transform.dense.bias": (12,)}
    return shapes | {"cls.predictions.bias": (11,)}


@dataclass(frozen=True)
class Header:
    name: str
    dtype: DType
    shape: tuple[int, ...]


def planned(
    shapes: Shapes,
    config: Config,
    grow: str = "",
    factor: int | None = None,
    scaling: str = "auto",
    dtype: str = "F32",
    to: str | None = None,
    family: str | None = None,
) -> Plan:
    """The plan for tensors of one type. `family` is the map of a checkpoint without a config; `config` is then `--set`."""
    headers = [Header(name, STORED[dtype], shape) for name, shape in shapes.items()]
    model = ModelConfig(config, "config.json", present=family is None)
    request = PlanRequest(
        "in", factor, parse_grow(grow) if grow else {}, scaling, WrittenTypes(STORED[to] if to else None)
    )
    return make_plan(catalog_map(family or config["model_type"]), headers, model, request)


def faults(*args: Any, **named: Any) -> list[str]:
    with pytest.raises(WidenError) as caught:
        planned(*args, **named)
    return list(caught.value.faults)


def grown(plan: Plan) -> dict[str, int]:
    return {axis: factor for axis, factor in plan.factors.items() if factor != 1}


def changes(plan: Plan) -> dict[str, Any]:
    return {change.key: change.new for change in plan.config}


def scales(plan: Plan) -> dict[str, str]:
    return {space: str(scale) for space, scale in plan.scales.items() if not scale.is_one}


def factors(plan: Plan) -> dict[str, str]:
    return {tensor.source.name: " | ".join(map(str, tensor.scales)) for tensor in plan.tensors}


# Growth: what is asked for, the family's default, and what a config ties together.


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
@pytest.mark.parametrize("factor", [2, 3])
def test_rotary_attention_grows_by_heads(dtype: str, factor: int) -> None:
    plan = planned(llama(), LLAMA, factor=factor, dtype=dtype)
    assert grown(plan) == dict.fromkeys(["hidden", "intermediate", "heads", "kv_heads"], factor)


@pytest.mark.parametrize(
    ("dtype", "to", "attention"),
    [
        ("F64", None, "head_dim"),
        ("F32", None, "head_dim"),
        ("BF16", None, "heads"),
        ("F16", None, "heads"),
        ("F32", "BF16", "heads"),
        ("F64", "F16", "heads"),
        ("BF16", "F32", "head_dim"),
        ("F8_E4M3", "F64", "head_dim"),
    ],
)
def test_attention_without_rotary_positions_grows_by_head_size_unless_that_would_round(
    dtype: str, to: str | None, attention: str
) -> None:
    """The head size's factor 2^(-1/4) is no number of a half-precision type; the type that is written counts."""
    plan = planned(gpt2(), GPT2, factor=2, dtype=dtype, to=to)
    assert grown(plan) == {"hidden": 2, "intermediate": 2, attention: 2}


@pytest.mark.parametrize(
    ("grow", "expected"),
    [
        ("hidden=3", {"hidden": 3, "intermediate": 2, "heads": 2, "kv_heads": 2}),
        ("intermediate=1", {"hidden": 2, "heads": 2, "kv_heads": 2}),
        ("kv_heads=4x", {"hidden": 2, "intermediate": 2, "heads": 2, "kv_heads": 4}),
        ("heads=2,kv_heads=1", {"hidden": 2, "intermediate": 2, "heads": 2}),
    ],
)
def test_single_axes_beside_a_factor(grow: str, expected: dict[str, int]) -> None:
    assert grown(planned(llama(), LLAMA, grow, factor=2)) == expected


HEADS = {"hidden": 2, "heads": 2}
HEAD_SIZE = {"hidden": 2, "head_dim": 2}
BOTH = {"hidden": 4, "heads": 2, "head_dim": 2}


@pytest.mark.parametrize(
    ("grow", "float32", "bfloat16", "note"),
    [
        ("hidden=2", HEAD_SIZE, HEADS, "{} grows 2x, since head_dim = hidden / heads"),
        ("heads=2", HEADS, HEADS, "hidden grows 2x, since head_dim = hidden / heads"),
        ("head_dim=2", HEAD_SIZE, HEAD_SIZE, "hidden grows 2x, since head_dim = hidden / heads"),
        ("hidden=2,heads=2", HEADS, HEADS, None),
        ("hidden=2,heads=1", HEAD_SIZE, HEAD_SIZE, "head_dim grows 2x, since head_dim = hidden / heads"),
        ("hidden=2,head_dim=2", HEAD_SIZE, HEAD_SIZE, None),
        ("hidden=2,head_dim=1", HEADS, HEADS, "heads grows 2x, since head_dim = hidden / heads"),
        ("hidden=4,heads=2", BOTH, BOTH, "head_dim grows 2x, since head_dim = hidden / heads"),
        ("hidden=4,head_dim=2", BOTH, BOTH, "heads grows 2x, since head_dim = hidden / heads"),
        ("heads=2,head_dim=2", BOTH, BOTH, "hidden grows 4x, since head_dim = hidden / heads"),
        ("hidden=4,heads=2,head_dim=2", BOTH, BOTH, None),
        ("intermediate=3", {"intermediate": 3}, {"intermediate": 3}, None),
        ("hidden=1,intermediate=3", {"intermediate": 3}, {"intermediate": 3}, None),
    ],
)
def test_hidden_is_heads_times_head_size(
    grow: str, float32: dict[str, int], bfloat16: dict[str, int], note: str | None
) -> None:
    for dtype, expected in (("F32", float32), ("BF16", bfloat16)):
        plan = planned(gpt2(), GPT2, grow, dtype=dtype)
        assert grown(plan) == expected
        ties = [text for text in plan.notes if not text.startswith("hidden states")]
        assert ties == ([note.format("head_dim" if dtype == "F32" else "heads")] if note else [])


@pytest.mark.parametrize(
    "grow",
    [
        "hidden=2,heads=2,head_dim=2",
        "hidden=3,heads=2",
        "hidden=1,heads=2",
        "hidden=1,head_dim=2",
        "hidden=4,heads=2,head_dim=1",
    ],
)
def test_what_a_config_ties_together_cannot_be_torn_apart(grow: str) -> None:
    assert faults(gpt2(), GPT2, grow) == [
        f"--grow {grow}: does not go with head_dim = hidden / heads, which the config of 'gpt2' fixes; no axis may shrink, "
        "and every size has to be a whole number"
    ]


@pytest.mark.parametrize(
    ("grow", "expected"),
    [
        (
            "hiden=2",
            "--grow hiden: map 'llama' has no such axis (did you mean 'hidden'?); it has hidden, intermediate, heads, "
            "kv_heads, head_dim",
        ),
        (
            "num_attention_heads=12",
            "--grow num_attention_heads: map 'llama' has no such axis (did you mean 'heads'?); it has hidden, intermediate, "
            "heads, kv_heads, head_dim",
        ),
        (
            "vocab=2",
            "--grow vocab: 'vocab' is only padded, to less than twice its size; these can grow: hidden, intermediate, heads, "
            "kv_heads, head_dim",
        ),
        (
            "rotary=2",
            "--grow rotary: 'rotary' cannot grow; these can grow: hidden, intermediate, heads, kv_heads, head_dim",
        ),
        (
            "hidden=2,heads=3",
            "in: the wide model would have heads 18, hidden 24, and 'llama' needs hidden % heads == 0; choose other "
            "factors with --grow",
        ),
        (
            "hidden=4,heads=4x,kv_heads=3x",
            "in: the wide model would have heads 24, kv_heads 9, and 'llama' needs heads % kv_heads == 0; choose other "
            "factors with --grow",
        ),
    ],
)
def test_refused_growth(grow: str, expected: str) -> None:
    assert faults(llama(), LLAMA, grow) == [expected]


def test_all_refused_axes_are_named() -> None:
    assert [fault.split(":")[0] for fault in faults(llama(), LLAMA, "hiden=2,vocab=2,heads=2")] == [
        "--grow hiden",
        "--grow vocab",
    ]


# Sizes: from the config, from shapes, from --set.


def test_sizes_that_the_config_lacks_come_from_the_shapes() -> None:
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        config = {name: value for name, value in LLAMA.items() if name != key}
        plan = planned(llama(), config, factor=2)
        wanted = planned(llama(), LLAMA, factor=2)
        assert factors(plan) == factors(wanted)
        assert [tensor.growth for tensor in plan.tensors] == [tensor.growth for tensor in wanted.tensors]


# Keys of real configs that are no slips for hidden_size, num_attention_heads and the like.
@pytest.mark.parametrize("other", ["hidden_act", "attention_bias", "attention_dropout", "tie_word_embeddings"])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_key_that_is_merely_similar_is_no_slip(key: str, other: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key} | {other: False}
    assert factors(planned(llama(), config, factor=2)) == factors(planned(llama(), LLAMA, factor=2))


@pytest.mark.parametrize(
    ("key", "slip", "axis"),
    [
        ("hidden_size", "hiden_size", "hidden"),
        ("intermediate_size", "intermediatesize", "intermediate"),
        ("num_attention_heads", "num_atention_heads", "heads"),
    ],
)
def test_a_slip_in_a_key_is_told(key: str, slip: str, axis: str) -> None:
    config = {slip if name == key else name: value for name, value in LLAMA.items()}
    assert faults(llama(), config, factor=2) == [
        f"in: config.json: there is no '{key}', which the map says holds {axis} (did you mean '{slip}'?)"
    ]


@pytest.mark.parametrize(
    ("key", "slip", "what"),
    [
        ("num_hidden_layers", "num_hiden_layers", "counts model.layers.*"),
        ("num_key_value_heads", "num_key_values_heads", "holds kv_heads"),
    ],
)
def test_a_slip_in_a_key_that_may_be_absent_is_told(key: str, slip: str, what: str) -> None:
    """Layers would be counted by their names, kv_heads be as many as heads; the wide config would have the key twice."""
    config = {slip if name == key else name: value for name, value in LLAMA.items()} | {"num_hidden_layer_types": 2}
    told = f"in: config.json: there is no '{key}', which the map says {what} (did you mean '{slip}'?)"
    assert told in faults(llama(), config, factor=2)


@pytest.mark.parametrize("value", ["12", 0, -3, 12.0, True, [12]])
def test_a_size_is_a_whole_number(value: Any) -> None:
    assert faults(llama(), LLAMA | {"hidden_size": value}, factor=2)[0] == (
        f"in: config.json: hidden_size is {value!r}, where a whole number from 1 up is needed"
    )


def test_a_size_that_lies_is_told_with_both_numbers() -> None:
    found = faults(llama(), LLAMA | {"intermediate_size": 16, "vocab_size": 13}, factor=2)
    end = "; the config belongs to another model, or the file is damaged"
    assert found == [
        f"in: vocab_size says vocab = 13, but tensor 'model.embed_tokens.weight' and 1 more has 11{end}",
        f"in: intermediate_size says intermediate = 16, but tensor 'model.layers.0.mlp.gate_proj.weight' and 5 more has 10{end}",
    ]


def test_the_cause_comes_before_its_many_effects() -> None:
    """Every attention tensor of every layer contradicts a wrong hidden size, but only so many lines are shown."""
    found = faults(llama(layers=8), LLAMA | {"hidden_size": 24, "num_hidden_layers": 8}, factor=2)
    assert any("hidden_size says hidden = 24" in fault for fault in found[:8])


def test_heads_that_do_not_divide_are_refused() -> None:
    assert faults(llama(), LLAMA | {"num_attention_heads": 5}, factor=2)[0] == (
        "in: config.json: head_dim: hidden / heads = 12 / 5 is no whole number"
    )


TWO_HEADS = "config.json: n_head is 3 and num_attention_heads is 6, which both hold 'heads'"


@pytest.mark.parametrize(
    ("changes_of", "text"),
    [
        ({"num_attention_heads": 6}, f"{TWO_HEADS}; the model's library reads one of them: let both say what it is"),
        ({"num_attention_heads": 3, "hidden_size": 12}, None),
        ({"num_attention_heads": None}, None),
        ({"n_ctx": 1024}, None),  # positions never grow, and their table says how many there are
    ],
)
def test_keys_of_one_axis_agree(changes_of: Config, text: str | None) -> None:
    if text is None:
        assert changes(planned(gpt2(), GPT2 | changes_of, factor=2)).keys() >= {"n_embd"}
    else:
        assert faults(gpt2(), GPT2 | changes_of, factor=2) == [f"in: {text}"]


def test_a_missing_layer_is_named() -> None:
    shapes = {name: shape for name, shape in llama(layers=3).items() if "layers.1.mlp" not in name}
    assert faults(shapes, LLAMA | {"num_hidden_layers": 3}, factor=2) == [
        f"in: tensor 'model.layers.1.mlp.{name}_proj.weight' is missing; the file is incomplete, or the config belongs to "
        "another model"
        for name in ("gate", "up", "down")
    ]


def test_rank_that_the_map_does_not_know() -> None:
    shapes = llama() | {"model.norm.weight": (12, 1)}
    assert faults(shapes, LLAMA, factor=2) == [
        "in: tensor 'model.norm.weight' has shape [12, 1], but the map says 1 dimension(s): -> final"
    ]


def test_head_size_larger_than_hidden_over_heads() -> None:
    plan = planned(llama(head_dim=8), LLAMA | {"head_dim": 8}, factor=2)
    assert grown(plan)["heads"] == 2
    shapes = {tensor.source.name: tensor.shape for tensor in plan.tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (96, 24)
    assert "head_dim" not in changes(plan)


def test_without_a_config_the_family_needs_what_shapes_do_not_tell() -> None:
    (fault,) = faults(llama(), {}, factor=2, family="llama")
    assert fault.startswith("in: the tensors alone do not tell heads, ")
    assert "'model.layers.0.self_attn.q_proj.weight'" in fault
    assert "--set num_attention_heads=N" in fault
    for told in ({"num_attention_heads": 6}, {"head_dim": 2}, {"num_key_value_heads": 3}):
        plan = planned(llama(), dict(told), factor=2, family="llama")
        with_config = planned(llama(), LLAMA, factor=2, scaling=plan.mode)
        assert [tensor.growth for tensor in plan.tensors] == [tensor.growth for tensor in with_config.tensors]


def test_the_scheme_of_the_source_needs_no_head_count() -> None:
    """Doubling the head size repeats rows in place, however many heads there are."""
    plan = planned(gpt2(), {}, factor=2, scaling="copy", family="gpt2")
    known = planned(gpt2(), GPT2, factor=2, scaling="copy")
    assert grown(plan) == {"hidden": 2, "intermediate": 2, "head_dim": 2}
    assert [(tensor.shape, tensor.scales) for tensor in plan.tensors] == [
        (tensor.shape, tensor.scales) for tensor in known.tensors
    ]


def test_half_precision_without_a_config_needs_the_head_count() -> None:
    """The default there is to grow by heads, which needs their number; the error says how to give it."""
    (fault,) = faults(gpt2(), {}, factor=2, dtype="BF16", family="gpt2")
    assert fault.endswith("give --config, or --set n_head=N")
    assert grown(planned(gpt2(), {"n_head": 3}, factor=2, dtype="BF16", family="gpt2"))["heads"] == 2


def test_without_a_config_what_a_loader_needs_is_said() -> None:
    plan = planned(llama(), {"num_attention_heads": 6}, factor=2, family="llama")
    assert plan.warnings == (
        "in: no config was found, so none is written; whatever loads the result needs hidden_size = 24, "
        "intermediate_size = 20, num_attention_heads = 12, num_key_value_heads = 6",
    )
    asked = planned(llama(), {"num_attention_heads": 6}, factor=2, scaling="orthogonal", family="llama")
    assert asked.warnings[0].endswith("rms_norm_eps = 1/2 of what it was")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_a_config_a_missing_head_is_spoken_of(family: str) -> None:
    """Tied or a bare model: the tensors cannot tell, and the final norm's factor hangs on it."""
    shapes = gpt2() if family == "gpt2" else llama(head=False)
    settings = {} if family == "gpt2" else {"num_attention_heads": 6}
    plan = planned(shapes, settings, factor=2, scaling="copy", family=family)
    assert any("'lm_head.weight' is not stored" in warning for warning in plan.warnings)


# What changes in the config.


@pytest.mark.parametrize(
    ("extra", "grow", "head_dim"),
    [
        ({}, "hidden=2,heads=2,kv_heads=2", None),
        ({}, "hidden=2", 2),
        ({}, "heads=2,kv_heads=2", 2),
        ({"head_dim": None}, "hidden=2", 2),
        ({"head_dim": 2}, "hidden=2", None),
        ({"head_dim": 2}, "hidden=2,heads=2,kv_heads=2", None),
        ({}, "intermediate=3", None),
    ],
)
def test_head_dim_is_written_when_hidden_over_heads_is_no_longer_it(
    extra: Config, grow: str, head_dim: int | None
) -> None:
    assert changes(planned(llama(), LLAMA | extra, grow)).get("head_dim") == head_dim


@pytest.mark.parametrize(
    ("extra", "grow", "n_inner"),
    [
        ({}, "hidden=2,intermediate=2", None),
        ({"n_inner": None}, "hidden=2,intermediate=2", None),
        ({}, "hidden=2", 48),
        ({"n_inner": None}, "hidden=2", 48),
        ({"n_inner": None}, "hidden=2,intermediate=3", 144),
        ({"n_inner": 48}, "hidden=2,intermediate=2", 96),
        ({"n_inner": 48}, "hidden=2", None),
    ],
)
def test_n_inner_is_written_when_null_no_longer_means_it(extra: Config, grow: str, n_inner: int | None) -> None:
    assert changes(planned(gpt2(), GPT2 | extra, grow)).get("n_inner") == n_inner


def test_key_value_heads_are_written_when_they_no_longer_follow() -> None:
    shapes = {name: (12, 12) if "k_proj" in name or "v_proj" in name else shape for name, shape in llama().items()}
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert "num_key_value_heads" not in changes(planned(shapes, config, "hidden=2,heads=2,kv_heads=2"))
    assert changes(planned(shapes, config, "hidden=2,heads=2"))["num_key_value_heads"] == 6


def test_old_names_of_a_key_follow(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_text(
        "architecture: aliases\naxes: {hidden: {key: [d_model, n_embd]}, vocab: {fixed: true}}\n"
        "growth: {width: [hidden]}\ntensors: {embed: vocab -> hidden}\n"
    )
    headers = [Header("embed", STORED["F32"], (5, 4))]
    expected: dict[str, dict[str, int]] = {
        "d_model": {"d_model": 8},
        "n_embd": {"n_embd": 8},
        "d_model n_embd": {"d_model": 8, "n_embd": 8},
        "": {"d_model": 8},
    }
    for keys, changed in expected.items():
        config = ModelConfig(dict.fromkeys(keys.split(), 4), "config.json")
        assert changes(make_plan(load_map(path), headers, config, PlanRequest("in", 2))) == changed


def test_gpt2_takes_the_names_that_other_families_give_its_sizes() -> None:
    """transformers reads them as aliases (attribute_map of GPT2Config)."""
    names = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    config = {names.get(key, key): value for key, value in GPT2.items()}
    plan, usual = planned(gpt2(), config, factor=2), planned(gpt2(), GPT2, factor=2)
    assert [tensor.growth for tensor in plan.tensors] == [tensor.growth for tensor in usual.tensors]
    assert changes(plan) == {names.get(key, key): value for key, value in changes(usual).items()}
    assert changes(planned(gpt2(), config, "hidden=2,heads=2"))["num_attention_heads"] == 6
    assert "tensor 'transformer.h.1.ln_1.weight' is missing" in faults(gpt2(), config | {"num_hidden_layers": 2})[0]


def test_fixed_sizes_stay_under_both_their_names() -> None:
    plan = planned(gpt2(), GPT2 | {"n_ctx": 8}, factor=2)
    assert set(changes(plan)) == {"n_embd", "layer_norm_epsilon"}


@pytest.mark.parametrize(
    ("scaling", "factor", "epsilon", "word"),
    [
        ("orthogonal", 2, 2e-3, "exact"),
        ("orthogonal", 3, 4e-3 / 3, "rounds"),
        ("sum", 2, 16e-3, "exact"),
        ("sum", 3, 36e-3, "rounds"),
        ("copy", 2, None, None),
        ("quiet", 3, None, None),
    ],
)
def test_epsilon_grows_by_the_square_of_the_stream(
    scaling: str, factor: int, epsilon: float | None, word: str | None
) -> None:
    plan = planned(llama(), LLAMA, factor=factor, scaling=scaling)
    found = {change.key: change for change in plan.config}.get("rms_norm_eps")
    assert (found is None) == (epsilon is None)
    if found is not None:
        assert (found.new, found.exactness) == (pytest.approx(epsilon, rel=1e-15), word)


def test_an_absent_epsilon_is_the_default_of_the_map() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    assert changes(planned(llama(), config, factor=2))["rms_norm_eps"] == 5e-7


@pytest.mark.parametrize("value", [None, "1e-5", True])
def test_an_epsilon_is_a_number(value: Any) -> None:
    assert faults(llama(), LLAMA | {"rms_norm_eps": value}, factor=2) == [
        f"config.json: rms_norm_eps is {value!r}, where a number is needed; its norms' epsilon has to be scaled by 1/2"
    ]
    assert "rms_norm_eps" not in changes(planned(llama(), LLAMA | {"rms_norm_eps": value}, factor=2, scaling="copy"))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_cast_is_told_to_the_config_in_the_key_it_has(key: str) -> None:
    config = LLAMA | {key: "float32"}
    assert changes(planned(llama(), config, "intermediate=2", to="BF16")) == {"intermediate_size": 20, key: "bfloat16"}
    assert key not in changes(planned(llama(), config, "intermediate=2", to="F32"))


# Modes.

MODES = {
    # r = 2 on every axis; the stream s, norm outputs n, value and up v, final f: writers s/(2v), readers v/(2n).
    "orthogonal": {
        "embed_tokens": "1/sqrt(2)", "input_layernorm": "1/sqrt(2)", "q_proj": "1/sqrt(2)", "k_proj": "1/sqrt(2)",
        "v_proj": "1/2", "o_proj": "1/2", "gate_proj": "1/sqrt(2)", "up_proj": "1/2", "down_proj": "1/2",
        "norm": "1/sqrt(2)", "lm_head": "1/sqrt(2)",
    },
    "copy": {
        "embed_tokens": "1", "input_layernorm": "1", "q_proj": "1/2", "k_proj": "1/2", "v_proj": "1/2", "o_proj": "1/2",
        "gate_proj": "1/2", "up_proj": "1/2", "down_proj": "1/2", "norm": "1", "lm_head": "1/2",
    },
    "sum": {
        "embed_tokens": "2", "input_layernorm": "1/2", "q_proj": "1", "k_proj": "1", "v_proj": "1", "o_proj": "1",
        "gate_proj": "1", "up_proj": "1", "down_proj": "1", "norm": "1/2", "lm_head": "1",
    },
    "quiet": {
        "embed_tokens": "1", "input_layernorm": "1/2", "q_proj": "1", "k_proj": "1", "v_proj": "1", "o_proj": "1",
        "gate_proj": "1", "up_proj": "1", "down_proj": "1", "norm": "1/2", "lm_head": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize("scaling", list(MODES))
def test_factors_of_each_mode(scaling: str) -> None:
    found = factors(planned(llama(), LLAMA, factor=2, scaling=scaling))
    for part, factor in MODES[scaling].items():
        names = [name for name in found if name.split(".")[-2] == part]
        assert names, part
        assert {found[name] for name in names} == {factor}


def test_quiet_reads_only_the_first_copies() -> None:
    """New heads and units are computed, and their output weights are zero."""
    plan = planned(llama(), LLAMA, factor=3, scaling="quiet")
    silent = {
        tensor.source.name.split(".")[-2]
        for tensor in plan.tensors
        for tree in tensor.growth or ()
        if getattr(tree, "first_only", False)
    }
    assert silent == {"o_proj", "down_proj"}


@pytest.mark.parametrize(
    ("tied", "final"),
    [
        # 1/(r * s_embedding): with 1/sqrt(2) nothing changes, with 1 the final gain is halved, with 2 it is quartered.
        (True, {"orthogonal": "1/sqrt(2)", "copy": "1/2", "sum": "1/4", "quiet": "1/2"}),
        (False, {"orthogonal": "1/sqrt(2)", "copy": "1", "sum": "1/2", "quiet": "1/2"}),
    ],
)
def test_a_tied_head_fixes_the_final_norm(tied: bool, final: dict[str, str]) -> None:
    for scaling, factor in final.items():
        plan = planned(llama(head=not tied), LLAMA | {"tie_word_embeddings": tied}, factor=2, scaling=scaling)
        assert factors(plan)["model.norm.weight"] == factor


def test_a_tied_head_that_is_stored_has_the_factor_of_its_embedding() -> None:
    for scaling in MODES:
        plan = planned(llama(), LLAMA | {"tie_word_embeddings": True}, factor=3, scaling=scaling)
        found = factors(plan)
        assert found["lm_head.weight"] == found["model.embed_tokens.weight"]
        assert plan.equal_pairs == (("lm_head.weight", "model.embed_tokens.weight"),)


@pytest.mark.parametrize(
    ("architectures", "tied"),
    [
        (["LlamaForCausalLM"], True),
        (["SomebodysForCausalLM"], True),
        (["SomebodysChatModelWithAHead"], True),
        ([], True),
        (None, True),
        (["LlamaModel"], False),
        (["LlamaForSequenceClassification"], False),
        (["LlamaForTokenClassification"], False),
        (["LlamaForQuestionAnswering"], False),
    ],
)
def test_a_missing_head_is_tied_unless_the_class_has_none(architectures: list[str] | None, tied: bool) -> None:
    """Only for a tied head the final norm has to take what the embedding does not."""
    config = LLAMA | {"tie_word_embeddings": True, "architectures": architectures}
    plan = planned(llama(head=False), config, factor=2, scaling="copy")
    assert factors(plan)["model.norm.weight"] == ("1/2" if tied else "1")


def test_sum_scales_a_matrix_where_attention_and_feed_forward_grow_differently() -> None:
    plan = planned(llama(), LLAMA, "hidden=2,heads=2,kv_heads=2,intermediate=3", scaling="sum")
    found = {name.split(".")[-2]: factor for name, factor in factors(plan).items()}
    # The stream is 3, the larger of the two sums: o_proj = 3/2, down_proj = 3/3.
    assert (found["embed_tokens"], found["o_proj"], found["down_proj"], found["up_proj"]) == ("3", "3/2", "1", "1")
    assert changes(plan)["rms_norm_eps"] == pytest.approx(36e-3)


def test_sum_leaves_a_stream_alone_that_does_not_grow() -> None:
    """A bare model's output of unchanged shape has to be the old one, so the second layer is divided instead."""
    plan = planned(llama(), LLAMA, "intermediate=3", scaling="sum")
    assert scales(plan) == {}
    scaled = {name.split(".")[-2] for name, factor in factors(plan).items() if factor != "1"}
    assert scaled == {"down_proj"}
    assert factors(plan)["model.layers.0.mlp.down_proj.weight"] == "1/3"
    assert "rms_norm_eps" not in changes(plan)


@pytest.mark.parametrize(
    ("architecture", "factor"), [("BertForTokenClassification", "1/sqrt(2)"), ("BertForSequenceClassification", "1/2")]
)
def test_what_a_classifier_of_bert_reads(architecture: str, factor: str) -> None:
    """Of tokens the stream, whose scale is 1/sqrt(2), though a pooler is stored; of sequences what a tanh made."""
    shapes = {name: shape for name, shape in bert().items() if not name.startswith("cls.")}
    shapes |= {"bert.pooler.dense.weight": (12, 12), "bert.pooler.dense.bias": (12,)}
    shapes |= {"classifier.weight": (5, 12), "classifier.bias": (5,)}
    plan = planned(shapes, BERT | {"architectures": [architecture]}, "hidden=2", scaling="orthogonal")
    assert (scales(plan)["hidden"], factors(plan)["classifier.weight"]) == ("1/sqrt(2)", factor)


def weights(shapes: Mapping[str, tuple[int, ...]], kinds: tuple[str, ...] = ("",)) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if any(kind in name for kind in kinds))


def test_auto_takes_copy_for_bfloat16_doubled() -> None:
    plan = planned(llama(), LLAMA, factor=2, dtype="BF16")
    assert (plan.mode, plan.why) == (
        "copy",
        "it rounds the fewest stored values for certain (copy 0, sum 0, quiet 0; of equals the first)",
    )
    assert {tensor.exactness for tensor in plan.tensors} == {"exact"}
    assert plan.exact


def test_auto_counts_what_is_rounded() -> None:
    """Tripled, copy divides every matrix but the embedding by 3, sum the gains and times 3 the embedding, quiet the gains."""
    shapes = llama()
    copied, gains = weights(shapes, ("_proj", "lm_head")), weights(shapes, ("norm",))
    added = gains + weights(shapes, ("embed",))
    plan = planned(shapes, LLAMA, factor=3, dtype="BF16")
    assert (plan.mode, plan.why) == (
        "quiet",
        f"it rounds the fewest stored values for certain (copy {copied}, sum {added}, quiet {gains}; of equals the first)",
    )
    assert not plan.exact


@pytest.mark.parametrize(("dtype", "to"), [("F32", None), ("F64", None), ("BF16", "F32"), ("F16", "F64")])
def test_auto_takes_orthogonal_where_wide_types_are_written(dtype: str, to: str | None) -> None:
    plan = planned(llama(), LLAMA, factor=2, dtype=dtype, to=to)
    assert (plan.mode, plan.why) == ("orthogonal", "32 bits or wider are written, and every law holds")


@pytest.mark.parametrize(("dtype", "to"), [("F32", "BF16"), ("F64", "F16")])
def test_auto_takes_no_roots_where_a_narrow_type_is_written(dtype: str, to: str) -> None:
    """The cast rounds every tensor, under any mode, so the first one is taken."""
    plan, number = planned(llama(), LLAMA, factor=2, dtype=dtype, to=to), weights(llama())
    assert (plan.mode, plan.why) == (
        "copy",
        f"it rounds the fewest stored values for certain (copy {number}, sum {number}, quiet {number}; of equals the first)",
    )


def test_auto_without_a_config_leaves_epsilon_alone() -> None:
    plan = planned(llama(), {"num_attention_heads": 6}, factor=2, family="llama")
    assert plan.mode == "copy"
    assert plan.why == (
        "orthogonal would change an epsilon, and there is no config to write it to; "
        "it rounds the fewest stored values for certain (copy 0, sum 0, quiet 0; of equals the first)"
    )
    assert planned(llama(), {}, "intermediate=3", family="llama").mode == "orthogonal"


def test_a_mode_that_contradicts_the_laws_is_refused_with_the_laws() -> None:
    """A GELU stands before the head's norm, whose epsilon is the stream's too."""
    assert faults(bert(), BERT, "hidden=2", scaling="orthogonal") == [
        "--scaling orthogonal: not function-exact for this checkpoint, because "
        "transformed is hidden_act(transform): s(transformed) = 1, and "
        "one layer_norm_eps serves the norms of hidden and transformed: s(hidden) = s(transformed), and "
        "orthogonal sets s(hidden) = 1/sqrt(2); --scaling auto takes a mode that is"
    ]


def test_auto_says_why_orthogonal_is_not_taken() -> None:
    plan = planned(bert(), BERT, "hidden=2")
    assert plan.mode == "copy"
    assert plan.why.startswith("orthogonal is not function-exact here, because ")
    assert plan.why.endswith(
        "; it rounds the fewest stored values for certain (copy 0, sum 0, quiet 0; of equals the first)"
    )


# Words of exactness: from the types and factors alone.


@pytest.mark.parametrize(
    ("dtype", "to", "scaling", "factor", "word"),
    [
        ("F32", None, "copy", 2, "exact"),
        ("F64", None, "copy", 2, "exact"),
        ("BF16", None, "copy", 2, "exact"),
        ("F16", None, "copy", 2, "depends on values"),  # halving a subnormal may round
        ("F8_E4M3", None, "copy", 2, "depends on values"),
        ("F8_E5M2", None, "copy", 2, "depends on values"),
        ("F32", None, "copy", 3, "rounds"),
        ("F32", None, "orthogonal", 2, "rounds"),
        ("F16", None, "orthogonal", 2, "rounds"),
        ("F32", "F64", "copy", 2, "exact"),
        ("BF16", "F32", "copy", 2, "exact"),
        ("F16", "F32", "copy", 2, "exact"),
        ("F32", "BF16", "copy", 2, "rounds"),
        ("F64", "F32", "copy", 2, "rounds"),
        ("F16", "BF16", "copy", 2, "rounds"),
        ("BF16", "F16", "copy", 2, "rounds"),
        ("F8_E5M2", "F16", "copy", 2, "exact"),
    ],
)
def test_exactness_of_a_scaled_matrix(dtype: str, to: str | None, scaling: str, factor: int, word: str) -> None:
    plan = planned(llama(), LLAMA, factor=factor, scaling=scaling, dtype=dtype, to=to)
    assert next(t.exactness for t in plan.tensors if "gate_proj" in t.source.name) == word


@pytest.mark.parametrize(
    ("dtype", "to", "word"),
    [("F16", None, "exact"), ("F8_E4M3", None, "exact"), ("F32", "F16", "rounds"), ("F16", "F32", "exact")],
)
def test_exactness_of_a_copied_embedding(dtype: str, to: str | None, word: str) -> None:
    plan = planned(llama(), LLAMA, factor=2, scaling="copy", dtype=dtype, to=to)
    assert next(t.exactness for t in plan.tensors if "embed" in t.source.name) == word


@pytest.mark.parametrize(
    ("dtype", "scaling", "word"),
    [("BF16", "copy", "yes"), ("F16", "copy", "depends on values"), ("F32", "orthogonal", "no")],
)
def test_bit_exactness_of_the_whole(dtype: str, scaling: str, word: str) -> None:
    assert plan_json(planned(llama(), LLAMA, factor=2, dtype=dtype, scaling=scaling))["bit_exact"] == word


@pytest.mark.parametrize(
    ("scaling", "scale", "stream"),
    [("orthogonal", "1/sqrt(2)", ""), ("copy", "1", ""), ("sum", "1/2", ", times 2"), ("quiet", "1/2", "")],
)
def test_the_scale_of_hidden_states_that_are_the_output_is_told(scaling: str, scale: str, stream: str) -> None:
    """Those of LLaMA come out of the last norm, those of BERT are the stream; so are those of its layers."""
    stand = "stand 2x side by side (x0 x0 x1 x1)"
    text = f"hidden states, where they are the output, {stand}" + ("" if scale == "1" else f", times {scale}")
    layers = f"hidden states of layers, where they are an output (hidden_states), but for the last, {stand}{stream}"
    told = (text,) if scaling in ("orthogonal", "copy") else (text, layers)
    assert planned(llama(), LLAMA, factor=2, scaling=scaling).notes == told
    assert planned(llama(), LLAMA, "intermediate=3", scaling=scaling).notes == ()


def test_what_was_taken_on_the_users_word_is_told() -> None:
    headers = [Header(name, STORED["F32"], shape) for name, shape in llama().items()]
    request = PlanRequest("in", grow={"intermediate": 3}, settings={"num_attention_heads": 6, "rms_norm_eps": 1e-5})
    plan = make_plan(catalog_map("llama"), headers, ModelConfig(LLAMA, "config.json"), request)
    assert plan.notes == ("taken from --set: num_attention_heads = 6, rms_norm_eps = 1e-05",)


# Tensors that no rule names.


def test_integers_scalars_and_empty_tensors_are_carried_with_a_warning() -> None:
    headers = [Header(name, STORED["F32"], shape) for name, shape in llama().items()]
    headers += [
        Header("a.ids", STORED["I64"], (1, 8)),
        Header("a.scale", STORED["F32"], ()),
        Header("a.none", STORED["F32"], (0, 3)),
    ]
    plan = make_plan(catalog_map("llama"), headers, ModelConfig(LLAMA, "config.json"), PlanRequest("in", 2))
    carried = {tensor.source.name: tensor for tensor in plan.tensors if tensor.growth is None}
    assert list(carried) == ["a.ids", "a.scale", "a.none"]
    assert all(
        (t.names, t.shape, t.dtype) == ((t.source.name,), t.source.shape, t.source.dtype) for t in carried.values()
    )
    assert plan.warnings == (
        "in: not in the map, copied unchanged (integers): a.ids",
        "in: not in the map, copied unchanged (scalars or empty): a.scale, a.none",
    )


@pytest.mark.parametrize("dtype", ["I8", "U8", "BOOL", "I32", "F8_E8M0", "F8_E4M3FNUZ", "C64", "F4"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_hold_no_numbers_to_scale_are_refused(name: str, dtype: str) -> None:
    kinds = {other: STORED[dtype if other == name else "F32"] for other in llama()}
    headers = [Header(other, kinds[other], shape) for other, shape in llama().items()]
    for scaling in ("auto", "copy", "quiet"):
        with pytest.raises(WidenError) as caught:
            make_plan(
                catalog_map("llama"), headers, ModelConfig(LLAMA, "config.json"), PlanRequest("in", 2, scaling=scaling)
            )
        assert caught.value.faults == (
            f"in: tensor '{name}' is a weight in the map and holds {dtype}, which cannot be widened; use a checkpoint with "
            "floating-point weights (F64, F32, F16, BF16, F8_E4M3, F8_E5M2)",
        )


def test_all_weights_that_hold_no_numbers_are_named() -> None:
    headers = [
        Header(name, STORED["I8" if "proj" in name else "F32"], shape) for name, shape in llama(layers=1).items()
    ]
    config = ModelConfig(LLAMA | {"num_hidden_layers": 1}, "config.json")
    with pytest.raises(WidenError) as caught:
        make_plan(catalog_map("llama"), headers, config, PlanRequest("in", 2))
    assert [fault.split("'")[1] for fault in caught.value.faults] == [h.name for h in headers if "proj" in h.name]


def test_unknown_weights_are_refused_with_the_nearest_name() -> None:
    shapes = llama() | {"model.layers.1.mlp.gate_project.weight": (10, 12), "evil\x1b[31m\n": (3,)}
    first, second = faults(shapes, LLAMA, factor=2)
    assert first.startswith(
        "in: unknown tensor 'model.layers.1.mlp.gate_project.weight' [10, 12]: map 'llama' does not know this weight "
        "(did you mean 'model.layers.*.mlp.gate_proj.weight'?), and copying it unwidened would break the model"
    )
    assert second.startswith("in: unknown tensor 'evil\\x1b[31m\\n' [3]: map 'llama' does not know this weight")


def test_many_unknown_weights_are_counted() -> None:
    shapes = llama() | {f"strange.{number}": (3,) for number in range(len(llama()))}
    found = faults(shapes, LLAMA, factor=2)
    assert len(found) == 9
    assert all(fault.startswith(f"in: unknown tensor 'strange.{number}'") for number, fault in enumerate(found[:8]))
    assert found[-1] == f"in: ... and {len(llama()) - 8} more unknown tensors"


def test_where_most_weights_are_unknown_the_family_is_another() -> None:
    known = len(llama())
    shapes = llama() | {f"strange.{number}": (3,) for number in range(known + 1)}
    assert faults(shapes, LLAMA, factor=2) == [
        f"in: {known + 1} of {2 * known + 1} tensors are none that map 'llama' knows, 'strange.0' for one; the config or the "
        "map is that of another family"
    ]


def test_a_few_unknown_weights_are_named_even_where_they_are_most() -> None:
    """A cut-out of a model: what is strange is told one by one, and what is missing too."""
    shapes = {"model.norm.weight": (12,)} | {f"strange.{number}": (3,) for number in range(8)}
    found = faults(shapes, LLAMA, factor=2)
    assert [fault.split("'")[1] for fault in found if "unknown tensor" in fault] == list(shapes)[1:]
    assert any("tensor 'model.embed_tokens.weight' is missing" in fault for fault in found)


def test_a_foreign_prefix_is_recognised() -> None:
    shapes = {f"_orig_mod.{name}": shape for name, shape in llama().items()}
    assert faults(shapes, LLAMA, factor=2) == [
        "in: every tensor name starts with '_orig_mod.', which 'llama' does not have; the names match without it: "
        "give --strip-prefix _orig_mod."
    ]


# The plan as text and as JSON.

TYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[Shapes, Config, str], Path]:
    def written(shapes: Shapes, config: Config, dtype: str) -> Path:
        path = tmp_path / "in.safetensors"
        save_file({name: np.ones(shape, TYPES[dtype]) for name, shape in shapes.items()}, path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return path

    return written


GOLDEN_PLANS = {
    "llama": (llama(), LLAMA | {"torch_dtype": "bfloat16"}, "BF16", ["--factor", "2"]),
    "llama_sum": (llama(), LLAMA, "BF16", ["--grow", "hidden=2,intermediate=3,heads=2", "--scaling", "sum"]),
    "llama_quiet": (llama(), LLAMA, "BF16", ["--factor", "3", "--scaling", "quiet"]),
    "gpt2": (gpt2(), GPT2 | {"n_inner": None}, "F32", ["--factor", "2"]),
    "gpt2_cast": (gpt2(), GPT2, "F32", ["--grow", "hidden=2", "--dtype", "BF16", "--set", "n_inner=48"]),
}


@pytest.mark.parametrize("name", list(GOLDEN_PLANS))
def test_dry_run_prints_the_golden_plan(name: str, checkpoint: Callable[[Shapes, Config, str], Path]) -> None:
    shapes, config, dtype, options = GOLDEN_PLANS[name]
    path = checkpoint(shapes, config, dtype)
    command = [sys.executable, "-m", "widen_cli", path.name, "out.safetensors", "--dry-run", *options]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    plan, size = done.stdout.rstrip("\n").rsplit("\n", 1)
    assert plan + "\n" == (GOLDEN / f"plan_{name}.txt").read_text()
    subprocess.run(command[: -len(options) - 1] + options, cwd=path.parent, check=True, capture_output=True)
    assert size == f"{(path.parent / 'out.safetensors').stat().st_size} bytes in 1 file"


def test_the_text_is_one_line_a_pattern() -> None:
    lines = plan_text(planned(llama(layers=2), LLAMA, factor=2)).splitlines()
    rows = [line for line in lines if " -> " in line and not line.startswith("config")]
    assert len(rows) == 12
    assert sum(int(row.split()[-2]) for row in rows) == len(llama(layers=2))


def test_json_has_an_object_for_each_tensor() -> None:
    plan = planned(llama(), LLAMA, "hidden=2,intermediate=3,heads=2,kv_heads=2", scaling="orthogonal")
    found = json.loads(json.dumps(plan_json(plan)))
    assert [tensor["source"] for tensor in found["tensors"]] == list(llama())
    by_name = {tensor["source"]: tensor for tensor in found["tensors"]}
    # The value's rows: (1/sqrt(2)) / (2/sqrt(2)) = 1/2; down: (1/sqrt(2)) / (3/sqrt(3)) = 1/sqrt(6).
    assert by_name["model.layers.1.self_attn.v_proj.weight"] == {
        "source": "model.layers.1.self_attn.v_proj.weight",
        "names": ["model.layers.1.self_attn.v_proj.weight"],
        "pattern": "model.layers.*.self_attn.v_proj.weight",
        "shape": [6, 12],
        "new_shape": [12, 24],
        "factors": [{"text": "1/2", "value": 0.5}],
        "copies_are_zero": False,
        "filled": [],
        "split": None,
        "dtype": "F32",
        "new_dtype": "F32",
        "exactness": "exact",
        "rounding": None,
    }
    assert by_name["model.layers.0.mlp.down_proj.weight"]["rounding"] == {"numbers": 12 * 10, "relative": 2.0**-24}
    assert by_name["model.layers.0.mlp.down_proj.weight"]["factors"] == [
        {"text": "1/sqrt(6)", "value": pytest.approx(6**-0.5, rel=1e-15)}
    ]
    assert {
        key: found[key] for key in ("architecture", "scaling", "why", "function_exact", "bit_exact", "left_out")
    } == {
        "architecture": "llama",
        "scaling": "orthogonal",
        "why": "as asked",
        "function_exact": True,
        "bit_exact": "no",
        "left_out": [],
    }
    assert found["factors"] == {"hidden": 2, "intermediate": 3, "heads": 2, "kv_heads": 2, "head_dim": 1}
    assert found["scales"]["up"] == {"text": "1/sqrt(3)", "value": pytest.approx(3**-0.5, rel=1e-15)}
    assert {"key": "hidden_size", "old": 12, "new": 24, "exactness": "exact"} in found["config"]


def test_json_has_the_factors_of_packed_parts_in_their_order() -> None:
    """Query and key share 2^(-1/4), for a head size doubled; the value's rows take the stream's 1/sqrt(2)."""
    found = {tensor["source"]: tensor for tensor in plan_json(planned(gpt2(), GPT2, factor=2))["tensors"]}
    packed = found["transformer.h.0.attn.c_attn.bias"]["factors"]
    assert [part["text"] for part in packed] == ["2^(-1/4)", "2^(-1/4)", "1/sqrt(2)"]
    assert [part["value"] for part in packed] == pytest.approx([2**-0.25, 2**-0.25, 2**-0.5], rel=1e-15)
    assert [part["text"] for part in found["transformer.h.0.mlp.c_fc.bias"]["factors"]] == ["1"]
    by_heads = plan_json(planned(gpt2(), GPT2, "hidden=2,heads=2"))["tensors"]
    (bias,) = (tensor for tensor in by_heads if tensor["source"] == "transformer.h.0.attn.c_attn.bias")
    assert [part["text"] for part in bias["factors"]] == ["1", "1", "1/sqrt(2)"]


def test_json_tells_where_copies_are_zero() -> None:
    found = plan_json(planned(llama(), LLAMA, factor=2, scaling="quiet"))["tensors"]
    silent = {tensor["pattern"].split(".")[-2] for tensor in found if tensor["copies_are_zero"]}
    assert silent == {"o_proj", "down_proj"}


RANK = """\
architecture: ranked
config: {eps: 1e-3}
axes:
  hidden: {key: hidden_size}
  rank:   {key: rank, fixed: true}
growth: {width: [hidden]}
spaces:
  normed: norm(hidden, eps)
  latent: rank
  flat:   norm(latent, eps)
tensors:
  gain: -> normed
  down: latent <- normed
  flat: -> flat
  up:   hidden <- flat
"""


def test_a_space_that_never_grows_takes_the_scale_that_a_law_asks_for(tmp_path: Path) -> None:
    """One epsilon serves the stream's norm and the latent one, so the latent has the stream's scale, 1/sqrt(2)."""
    (tmp_path / "ranked.yaml").write_text(RANK)
    shapes = {"gain": (6,), "down": (4, 6), "flat": (4,), "up": (6, 4)}
    headers = [Header(name, STORED["F32"], shape) for name, shape in shapes.items()]
    config = ModelConfig({"hidden_size": 6, "rank": 4, "eps": 1e-3}, "config.json")
    request = PlanRequest("in", factor=2, scaling="orthogonal")
    plan = make_plan(load_map(tmp_path / "ranked.yaml"), headers, config, request)
    assert str(plan.scales["latent"]) == "1/sqrt(2)"
    assert [str(tensor.scales[0]) for tensor in plan.tensors] == ["1/sqrt(2)", "1/2", "1", "1/sqrt(2)"]
    assert {change.key: change.new for change in plan.config} == {"hidden_size": 12, "eps": 5e-4}
