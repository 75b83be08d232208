"""Models whose layers differ by lists in their configs: OpenELM (GGUF and Hugging Face), Nemotron-NAS, Gemma 3n; grown by layers too.

The Hugging Face classes of OpenELM and Nemotron-NAS come with the models, not with transformers. So a directory is written as
a GGUF by the rules of their own code (sizes from the config alone), and llama.cpp runs that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from click.testing import CliRunner
from families_llama import GEMMA3N
from gguf_families import CONTEXT, EPS, RMS, VOCAB, drawn, write_arrays
from llama_cpp import difference, log_probabilities
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from transformers.models.llama import modeling_llama

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

PROMPTS = [[5, 9, 44], [7, 80, 3, 3, 61, 12, 99, 40, 23], [int(token) for token in np.arange(3, 43)]]
BOUND = 2e-4
HIDDEN, HEAD, DIVISOR = 40, 10, 8
Arrays = dict[str, npt.NDArray[np.float32]]


# OpenELM: three layers of which no two are alike.

HEADS, KV_HEADS, FACTORS = [2, 4, 4], [1, 2, 2], [0.5, 0.73, 1.3]
ELM: dict[str, Any] = {
    "architectures": ["OpenELMForCausalLM"], "model_type": "openelm", "vocab_size": VOCAB, "max_context_length": CONTEXT,
    "num_transformer_layers": 3, "model_dim": HIDDEN, "head_dim": HEAD, "qkv_multipliers": [0.5, 1.0], "num_query_heads": HEADS,
    "num_kv_heads": KV_HEADS, "num_gqa_groups": 2, "ffn_multipliers": FACTORS, "ffn_with_glu": True, "ffn_dim_divisor": DIVISOR,
    "activation_fn_name": "swish", "normalize_qk_projections": True, "share_input_output_layers": True,
    "rope_freq_constant": 10000,
}  # fmt: skip


def divisible(size: float, divisor: int) -> int:
    """How OpenELM's config rounds a width."""
    near = max(divisor, int(size + divisor / 2) // divisor * divisor)
    return near + divisor if near < 0.9 * size else near


def elm_inner(config: dict[str, Any]) -> list[int]:
    return [divisible(factor * config["model_dim"], config["ffn_dim_divisor"]) for factor in config["ffn_multipliers"]]


def elm_heads(config: dict[str, Any]) -> list[int]:
    """The heads of each layer as OpenELM's config makes them of its multipliers, whatever lists it holds."""
    low, high = config["qkv_multipliers"]
    factors = [round(float(one), 2) for one in np.linspace(low, high, config["num_transformer_layers"])]
    step = config["head_dim"] * config["num_gqa_groups"]
    return [divisible(factor * config["model_dim"], step) // config["head_dim"] for factor in factors]


def elm_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for n, (heads, kv_heads, inner) in enumerate(zip(HEADS, KV_HEADS, elm_inner(ELM), strict=True)):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,),
            "attn_qkv": ((heads + 2 * kv_heads) * HEAD, HIDDEN), "attn_output": (HIDDEN, heads * HEAD),
            "ffn_gate": (inner, HIDDEN), "ffn_up": (inner, HIDDEN), "ffn_down": (HIDDEN, inner),
        }  # fmt: skip
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in block.items()}
    return shapes


ELM_NAMES = {
    "token_embd": "transformer.token_embeddings", "output_norm": "transformer.norm", "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm", "attn_qkv": "attn.qkv_proj",
    "attn_output": "attn.out_proj", "ffn_down": "ffn.proj_2",
}  # fmt: skip


def elm_metadata(config: dict[str, Any], epsilon: float) -> dict[str, Any]:
    return {
        "context_length": CONTEXT, "embedding_length": config["model_dim"], "block_count": config["num_transformer_layers"],
        "attention.head_count": config["num_query_heads"], "attention.head_count_kv": config["num_kv_heads"],
        "feed_forward_length": elm_inner(config), "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(config["rope_freq_constant"]), "vocab_size": VOCAB, RMS: epsilon,
    }  # fmt: skip


def elm_drawn() -> Arrays:
    return {name: drawn(name, shape) for name, shape in elm_shapes().items()}


def elm_folder(folder: Path) -> Path:
    """The same model as a directory: gate and up in one weight."""
    tensors = elm_drawn()
    stored: Arrays = {}
    for name, values in tensors.items():
        *block, part, _ = name.split(".")
        where = f"transformer.layers.{block[1]}." if block else ""
        if part == "ffn_gate":
            stored[f"{where}ffn.proj_1.weight"] = np.concatenate([values, tensors[name.replace("gate", "up")]])
        elif part != "ffn_up":
            stored[f"{where}{ELM_NAMES[part]}.weight"] = values
    return write_folder(folder, ELM, stored)


def elm_gguf(folder: Path) -> Path:
    """A directory as a GGUF, as OpenELM's own code reads it."""
    config = json.loads((folder / "config.json").read_text())
    assert config["num_query_heads"] == elm_heads(config)
    stored, inner = load_file(folder / "model.safetensors"), elm_inner(config)
    names = {hf: part for part, hf in ELM_NAMES.items()}
    tensors: Arrays = {}
    for name, values in stored.items():
        if ".layers." not in name:
            tensors[f"{names[name.removesuffix('.weight')]}.weight"] = values
            continue
        number, _, part = name.removeprefix("transformer.layers.").removesuffix(".weight").partition(".")
        if part == "ffn.proj_1":
            assert len(values) == 2 * inner[int(number)]
            tensors[f"blk.{number}.ffn_gate.weight"], tensors[f"blk.{number}.ffn_up.weight"] = np.split(values, 2)
        else:
            tensors[f"blk.{number}.{names[part]}.weight"] = values
    return write_arrays(folder.with_suffix(".gguf"), "openelm", elm_metadata(config, 1e-6), tensors)


def write_folder(folder: Path, config: dict[str, Any], tensors: Arrays) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Nemotron-NAS: the second layer has no FFN, the third no attention.

NAS_HEADS, NAS_HEAD, GROUPS, MULTIPLES = 6, 6, [2, 3, None, 6], [5.25, None, 10.5, 24.0]
NAS: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "vocab_size": VOCAB, "hidden_size": 36,
    "num_hidden_layers": 4, "num_attention_heads": NAS_HEADS, "rms_norm_eps": EPS, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": CONTEXT,
    "block_configs": [
        {
            "attention": {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False},
            "ffn": {"ffn_mult": multiple, "no_op": multiple is None, "replace_with_linear": False},
        }
        for group, multiple in zip(GROUPS, MULTIPLES, strict=True)
    ],
}  # fmt: skip


def nas_sizes(config: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """The heads, kv heads and FFN of each layer, as Nemotron-NAS's own code makes them."""
    heads, hidden, blocks = config["num_attention_heads"], config["hidden_size"], config["block_configs"]
    groups = [block["attention"]["n_heads_in_group"] for block in blocks]
    multiples = [round(block["ffn"]["ffn_mult"] or 0, 6) for block in blocks]
    inner = [-(-int(2 * multiple * hidden / 3) // 256) * 256 for multiple in multiples]
    return [heads if group else 0 for group in groups], [heads // group if group else 0 for group in groups], inner


def nas_shapes() -> dict[str, tuple[int, ...]]:
    hidden = NAS["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,), "output.weight": (VOCAB, hidden),
    }  # fmt: skip
    for n, (heads, kv_heads, inner) in enumerate(zip(*nas_sizes(NAS), strict=True)):
        block: dict[str, tuple[int, ...]] = {}
        if heads:
            block |= {
                "attn_norm": (hidden,),
                "attn_q": (heads * NAS_HEAD, hidden),
                "attn_k": (kv_heads * NAS_HEAD, hidden),
            }
            block |= {"attn_v": (kv_heads * NAS_HEAD, hidden), "attn_output": (hidden, heads * NAS_HEAD)}
        if inner:
            block |= {
                "ffn_norm": (hidden,),
                "ffn_gate": (inner, hidden),
                "ffn_up": (inner, hidden),
                "ffn_down": (hidden, inner),
            }
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in block.items()}
    return shapes


NAS_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def nas_folder(folder: Path) -> Path:
    stored: Arrays = {}
    for name, shape in nas_shapes().items():
        *block, part, _ = name.split(".")
        stored[(f"model.layers.{block[1]}." if block else "") + f"{NAS_NAMES[part]}.weight"] = drawn(name, shape)
    return write_folder(folder, NAS, stored)


def nas_gguf(folder: Path) -> Path:
    """A directory as a GGUF, as Nemotron-NAS's own code reads it; rotary pairs become neighbours."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, inner = nas_sizes(config)
    head = config["hidden_size"] // config["num_attention_heads"]
    names = {hf: part for part, hf in NAS_NAMES.items()}
    tensors: Arrays = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.startswith("model.layers."):
            tensors[f"{names[name.removesuffix('.weight')]}.weight"] = values
            continue
        number, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        if names[part] in ("attn_q", "attn_k"):
            count = (heads if names[part] == "attn_q" else kv_heads)[int(number)]
            values = values.reshape(count, 2, head // 2, -1).swapaxes(1, 2).reshape(values.shape)
        tensors[f"blk.{number}.{names[part]}.weight"] = values
    metadata = {
        "context_length": CONTEXT, "embedding_length": config["hidden_size"], "block_count": 4, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "feed_forward_length": inner, "attention.key_length": head,
        "attention.value_length": head, "rope.dimension_count": head, "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": VOCAB, RMS: float(config["rms_norm_eps"]),
    }  # fmt: skip
    return write_arrays(folder.with_suffix(".gguf"), "deci", metadata, tensors)


# The runs.

READ: dict[str, Callable[[Path], Path]] = {"elm.gguf": lambda path: path, "elm": elm_gguf, "nas": nas_gguf}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("narrow")

    @cache
    def made(name: str) -> Path:
        if name == "elm.gguf":
            return write_arrays(root / name, "openelm", elm_metadata(ELM, EPS), elm_drawn())
        if name == "gemma3n":
            models.build(GEMMA3N, torch.float64).save_pretrained(root / name)
            return root / name
        # Its GGUF is written beside a folder, and elm.gguf is another model.
        return elm_folder(root / "folder-elm") if name == "elm" else nas_folder(root / name)

    return made


@pytest.fixture(scope="module")
def spoken(narrow: Callable[[str], Path]) -> Callable[[str], Any]:
    return cache(lambda name: log_probabilities(READ[name](narrow(name)), PROMPTS))


def widened(source: Path, target: Path, grow: str | None, mode: str = "copy") -> Job:
    job = prepare(Options(str(source), str(target), factor=None if grow else 2, grow=grow, scaling=mode))
    run(job, lambda nbytes: None)
    return job


@pytest.mark.parametrize(
    ("name", "grow", "mode"),
    [
        ("elm.gguf", None, "orthogonal"),
        ("elm.gguf", "hidden=2x,intermediate=3x,heads=3x,kv_heads=1x", "sum"),
        ("elm.gguf", "hidden=2x,intermediate=2x@0-1,heads=2x@2", "quiet"),
        ("elm.gguf", "heads=2x@0-1,kv_heads=2x@1,intermediate=3x@2", "orthogonal"),
        ("elm.gguf", "head_dim=2x,kv_heads=2x", "copy"),
        ("elm", None, "copy"),
        ("elm", "hidden=3x,intermediate=2x@0-1", "quiet"),
        ("elm", "hidden=2x,head_dim=2x", "copy"),
        ("nas", None, "orthogonal"),
        ("nas", "hidden=3x,intermediate=2x@2-3", "sum"),
        ("nas", "kv_heads=3x@1,intermediate=3x@0", "orthogonal"),
        ("elm.gguf", "intermediate=round:9,heads=to:4@0,kv_heads=to:3@1,heads=+2@1", "quiet"),
        ("elm", "hidden=3/2x,intermediate=+8@1,intermediate=64@2", "copy"),
    ],
)
def test_layers_keep_the_function(
    name: str, grow: str | None, mode: str, narrow: Callable[[str], Path], spoken: Callable[[str], Any], tmp_path: Path
) -> None:
    wide = tmp_path / f"wide{narrow(name).suffix}"
    widened(narrow(name), wide, grow, mode)
    assert difference(spoken(name), log_probabilities(READ[name](wide), PROMPTS)) <= BOUND
    assert not verify(Options(str(narrow(name)), str(wide)), lambda nbytes: None).differences


def nas_logits(folder: Path) -> models.Outputs:
    """Nemotron-NAS run by transformers in float64: LLaMA's own modules, of each layer's sizes, or none in their place."""
    config = json.loads((folder / "config.json").read_text())
    same = {key: config[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "rms_norm_eps")}
    head = config["hidden_size"] // config["num_attention_heads"]
    of = partial(
        transformers.LlamaConfig,
        head_dim=head,
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        attn_implementation="eager",
        **same,
    )
    stored = {name: values.to(torch.float64) for name, values in load_torch(folder / "model.safetensors").items()}
    with models.Float64Throughout():
        model = transformers.LlamaForCausalLM(of(num_hidden_layers=0)).to(torch.float64)
        for number, (heads, kv_heads, inner) in enumerate(zip(*nas_sizes(config), strict=True)):
            own = of(
                num_hidden_layers=len(config["block_configs"]),
                num_key_value_heads=kv_heads or 1,
                intermediate_size=inner or 1,
            )
            own._attn_implementation = "eager"
            layer = modeling_llama.LlamaDecoderLayer(own, number).to(torch.float64)
            layer.self_attn = layer.self_attn if heads else Nothing(pair=True)
            layer.mlp = layer.mlp if inner else Nothing()
            model.model.layers.append(layer)
        left_out = model.load_state_dict(stored, strict=False)
        assert not left_out.unexpected_keys
        assert all("norm" in name for name in left_out.missing_keys)
        model.config.num_hidden_layers = len(model.model.layers)
        logits = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in PROMPTS]
    return {"logits": torch.cat(logits).detach().numpy()}


class Nothing(torch.nn.Module):
    """In the place of an attention, which returns a pair, or of an FFN."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.pair else nothing


@pytest.fixture(scope="module")
def nas64(narrow: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in float64."""
    folder = tmp_path_factory.mktemp("nas64") / "narrow"
    tensors = load_file(narrow("nas") / "model.safetensors")
    folder.mkdir()
    save_file({name: values.astype(np.float64) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(NAS))
    return folder


@pytest.mark.parametrize(
    ("grow", "mode", "fill"),
    [
        ("intermediate=+256@2,intermediate=to:1024@3,hidden=2x,heads=2x", "orthogonal", "copy"),
        ("intermediate=round:512,kv_heads=to:6@0", "copy", "zero"),
        ("intermediate=4/3x@3,kv_heads=3x@1,intermediate=512@0", "sum", "random"),
        ("hidden=4/3x,heads=4/3x,kv_heads=4/3x@0,kv_heads=2x@1,intermediate=5/3x@3", "quiet", "copy"),
    ],
)
def test_sizes_of_layers_are_exact(grow: str, mode: str, fill: str, nas64: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"grow": grow, "scaling": mode, "fill": fill}
    run(prepare(Options(str(nas64), str(tmp_path / "wide"), **asked)), lambda nbytes: None)
    before = nas_logits(nas64)
    assert models.relative_error(before, nas_logits(tmp_path / "wide")) <= 1e-13
    assert not verify(Options(str(nas64), str(tmp_path / "wide")), lambda nbytes: None).differences
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    weight = "model.layers.3.mlp.down_proj.weight"
    # Without the share of one copy of the last unit another function comes of it.
    tensors[weight][:, -1] *= 2
    tensors[weight][:, 0] *= 1 + 1e-6
    save_file(tensors, tmp_path / "wide" / "model.safetensors")
    assert models.relative_error(before, nas_logits(tmp_path / "wide")) > 1e-10
    back = tmp_path / "back"
    run(prepare(Options(str(nas64), str(tmp_path / "again"), **asked)), lambda nbytes: None)
    assert CliRunner().invoke(cli, ["collapse", str(tmp_path / "again"), str(back)]).exit_code == 0
    assert read(back) == NAS
    assert models.relative_error(before, nas_logits(back)) <= 1e-13


@pytest.mark.parametrize("way", ["spread", "theta"])
def test_larger_heads_of_layers_that_differ(
    way: str, narrow: Callable[[str], Path], spoken: Callable[[str], Any], tmp_path: Path
) -> None:
    wide = tmp_path / "wide.gguf"
    job = prepare(Options(str(narrow("elm.gguf")), str(wide), grow="hidden=2x,head_dim=3x,intermediate=2x@1", rope=way))
    run(job, lambda nbytes: None)
    assert difference(spoken("elm.gguf"), log_probabilities(wide, PROMPTS)) <= BOUND


def test_a_layer_that_reads_another_factor_shows(
    narrow: Callable[[str], Path], spoken: Callable[[str], Any], tmp_path: Path
) -> None:
    """Only layer 1 of OpenELM and layer 2 of Nemotron-NAS have twice the units: the others' halving would be seen."""
    for name, grow, weight in (
        ("elm", "intermediate=2x@1", "transformer.layers.1.ffn.proj_2.weight"),
        ("nas", "intermediate=2x@2", "model.layers.2.mlp.down_proj.weight"),
    ):
        wide = tmp_path / name
        widened(narrow(name), wide, grow)
        tensors = load_file(wide / "model.safetensors")
        save_file(tensors | {weight: 2 * tensors[weight]}, wide / "model.safetensors")
        assert difference(spoken(name), log_probabilities(READ[name](wide), PROMPTS)) > 5 * BOUND


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_values_that_mean_the_new_sizes(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    widened(narrow("elm"), tmp_path / "elm", "hidden=2x,intermediate=2x@0-1")
    config = read(tmp_path / "elm")
    assert elm_inner(config) == [48, 64, 56]
    assert [config[key] for key in ("num_query_heads", "num_kv_heads", "num_gqa_groups")] == [[4, 8, 8], [1, 2, 2], 4]
    widened(narrow("nas"), tmp_path / "nas", "hidden=2x,heads=2x,kv_heads=3x@1,intermediate=3x@3")
    assert nas_sizes(read(tmp_path / "nas")) == ([12, 12, 0, 12], [3, 6, 0, 1], [256, 0, 256, 2304])
    blocks = read(tmp_path / "nas")["block_configs"]
    assert blocks[1] == {
        "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
        "ffn": {"ffn_mult": None, "no_op": True, "replace_with_linear": False},
    }


def test_layers_that_stand_twice_have_values_of_their_own(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    """A doubled layer and its first grow apart by ranges, and so do their values."""
    asked: dict[str, Any] = {"depth": ("2x",), "grow": "intermediate=2x@1", "scaling": "copy"}
    run(prepare(Options(str(narrow("nas")), str(tmp_path / "wide"), **asked)), lambda nbytes: None)
    inner = [size for size in nas_sizes(NAS)[2] for _ in range(2)]
    inner[1] *= 2
    assert nas_sizes(read(tmp_path / "wide"))[2] == inner
    back = folded_back(tmp_path / "wide", narrow("nas"))
    assert read(back) == NAS


def folded_back(wide: Path, narrow: Path, *said: str) -> Path:
    """The wide model folded by the command; every tensor is the narrow one's."""
    back = wide.with_name("back")
    outcome = CliRunner().invoke(cli, ["collapse", str(wide), str(back), *said])
    assert outcome.exit_code == 0, outcome.stderr
    old, new = (load_file(folder / "model.safetensors") for folder in (narrow, back))
    assert all(np.array_equal(tensor, new[name]) for name, tensor in old.items())
    return back


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("name", "grow"),
    [
        ("nas", "hidden=2x,heads=2x,intermediate=2x"),
        ("nas", "hidden=2x,heads=2x,kv_heads=2x@1,intermediate=4x@3"),
        ("elm", "hidden=2x,intermediate=2x@0-1"),
        ("gemma3n", "laurel=2x,intermediate=4x@0-2"),
        ("gemma3n", "intermediate=4x@0-2,intermediate=3/2x@3-4"),
    ],
)
def test_the_way_back(recorded: bool, name: str, grow: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    """Values of the config come back as they were recorded; without a record, ones that mean the same sizes do."""
    wide, first = tmp_path / "wide", read(narrow(name))
    widened(narrow(name), wide, grow)
    if not recorded:
        save_file(load_file(wide / "model.safetensors"), wide / "model.safetensors")
    back = read(folded_back(wide, narrow(name), *(() if recorded else ("--grow", grow, "--scaling", "copy"))))
    if recorded:
        assert back == first
    sizes = {"nas": nas_sizes, "elm": elm_inner, "gemma3n": lambda config: config["intermediate_size"]}[name]
    assert sizes(back) == sizes(first)


# Gemma 3n, run by transformers.


@pytest.mark.parametrize(
    ("grow", "mode", "expected"),
    [
        ("intermediate=2x@0-2", "orthogonal", [100, 60, 100, 22, 26]),
        ("hidden=2x,heads=2x,intermediate=3x@3", "quiet", [50, 30, 50, 66, 26]),
        ("hidden=4/3,per_layer=2x,laurel=3x,intermediate=2x@4", "copy", [50, 30, 50, 22, 52]),
        ("intermediate=+3@1,intermediate=round:16@3-4", "orthogonal", [50, 33, 50, 32, 32]),
        ("intermediate=2x,intermediate=to:40@1,intermediate=3/2x@3", "quiet", [100, 40, 100, 33, 52]),
    ],
)
def test_gemma3n_by_layers(
    grow: str, mode: str, expected: list[int], narrow: Callable[[str], Path], tmp_path: Path
) -> None:
    source, wide = narrow("gemma3n"), tmp_path / "wide"
    widened(source, wide, grow, mode)
    assert models.relative_error(models.outputs(source, torch.float64), models.outputs(wide, torch.float64)) <= 1e-13
    assert read(wide)["intermediate_size"] == expected
    assert not verify(Options(str(source), str(wide)), lambda nbytes: None).differences


def test_one_size_for_all_layers_becomes_a_list(tmp_path: Path) -> None:
    config = {**GEMMA3N.config, "intermediate_size": 50}
    models.build(replace(GEMMA3N, config=config), torch.float64).save_pretrained(tmp_path / "narrow")
    values = read(tmp_path / "narrow") | {"intermediate_size": 50}
    (tmp_path / "narrow" / "config.json").write_text(json.dumps(values))
    widened(tmp_path / "narrow", tmp_path / "wide", "intermediate=2x@1")
    assert read(tmp_path / "wide")["intermediate_size"] == [50, 100, 50, 50, 50]
    models.load(tmp_path / "wide", torch.float64)


# What is refused.


def refusal(path: Path, **asked: Any) -> list[str]:
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(path), f"{path}-refused", **asked))
    return [fault.replace(str(path), "IN") for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        (
            "gemma3n",
            {"grow": "heads=2x@1"},
            "--grow heads=2x@1: 'heads' has one size in all layers; these may differ: intermediate; models in which 'heads' may: "
            "GGUF: deci (intermediate, heads, kv_heads, which a llama becomes), openelm (intermediate, heads, kv_heads)",
        ),
        (
            "nas",
            {"grow": "heads=2x@1"},
            "--grow heads=2x@1: 'heads' has one size in all layers; these may differ: intermediate, kv_heads; models in which 'heads' "
            "may: GGUF: deci (intermediate, heads, kv_heads, which a llama becomes), openelm (intermediate, heads, kv_heads)",
        ),
        ("nas", {"grow": "intermediate=2x@4"}, "--grow intermediate=2x@4: the model has 4 layers, counted from 0"),
        (
            "nas",
            {"grow": "kv_heads=2x@1-3"},
            "IN: the wide model would have heads 6, kv_heads 4 in layer 1, and 'nemotron-nas' needs heads % kv_heads == 0; choose other "
            "factors with --grow",
        ),
    ],
)
def test_what_a_config_cannot_say(
    name: str, asked: dict[str, Any], expected: str, narrow: Callable[[str], Path]
) -> None:
    assert expected in refusal(narrow(name), **asked)


def test_units_of_sparse_layers_grow_by_whole_factors(narrow: Callable[[str], Path]) -> None:
    why = "sparse layers cut a gate off by its mean and deviation over all units, which stay only if all of them stand as often"
    assert refusal(narrow("gemma3n"), grow="hidden=2x,intermediate=3/2x", scaling="copy") == [
        f"IN: --grow intermediate=3/2: layers 0, 2: {why}; give a whole factor there"
    ]
    assert refusal(narrow("gemma3n"), grow="intermediate=+7@0-1") == [
        f"IN: --grow intermediate=57/50: layer 0: {why}; give a whole factor there"
    ]


def test_heads_are_not_laid_apart_from_the_keys_that_they_read(narrow: Callable[[str], Path]) -> None:
    assert refusal(narrow("elm"), grow="hidden=2x", layout="tile") == [
        "IN: layout tile, as asked: heads and kv_heads have to grow by one factor, or heads would read others' keys"
    ]


def test_a_value_that_means_no_size(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    (tmp_path / "nas" / "model.safetensors").symlink_to(narrow("nas") / "model.safetensors")
    blocks = json.loads(json.dumps(NAS["block_configs"]))
    blocks[0]["attention"]["n_heads_in_group"] = 4
    (tmp_path / "nas" / "config.json").write_text(json.dumps({**NAS, "block_configs": blocks}))
    assert refusal(tmp_path / "nas", factor=2)[0] == (
        "IN: IN/config.json: block_configs.*.attention.n_heads_in_group is [4, 3, None, 6], which means no size: "
        "heads / value = 6 / 4 is no whole number"
    )


def test_ranges_stay_beside_the_sizes_of_another_model(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    """--like takes the layers that are not named; those of layer 2 get more by the same multiple of a larger hidden."""
    config = {**NAS, "hidden_size": 72, "num_attention_heads": 12}
    (tmp_path / "like.json").write_text(json.dumps(config))
    options = Options(
        str(narrow("nas")),
        str(tmp_path / "wide"),
        like=str(tmp_path / "like.json"),
        grow="intermediate=2x@3",
        dry_run=True,
    )
    assert prepare(options).plan.layers == ("intermediate=2x@2", "intermediate=2x@3")
