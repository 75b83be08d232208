"""Writes the seeds of the mutation loop: `python tests/corpus/make_seeds.py`. They are kept, so this is how they were made.

Each is a folder of inputs with a `case.json`: the command's arguments, and the files that are changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save

from widen_cli.convert import prepare
from widen_cli.options import Options
from widen_cli.writing import run

SEEDS = Path(__file__).parent / "seeds"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": [1, 2],
}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "torch_dtype": "float16",
}
MAP = """\
# A model of two tables.
architecture: tiny
match: {model_type: [tiny]}
repeats: {layers.*: depth}
config: {eps: 1e-5, act: silu, tie: false}
axes:
  vocab:  {key: vocab_size, fixed: true}
  hidden: {key: hidden_size}
  inner:  {key: inner_size, else: 4 * hidden}
growth: {width: [hidden, inner]}
requires: [inner % hidden == 0]
output: final
spaces:
  normed: norm(hidden, eps)
  gate:   inner
  unit:   act(gate)
  final:  norm(hidden, eps)
tensors:
  embed.weight:         vocab -> hidden
  layers.*.norm.weight: -> normed
  layers.*.up.weight:   gate <- normed
  layers.*.up.bias?:    {shape: -> gate, when: has("layers.*.up.bias")}
  layers.*.down.weight: hidden <- unit
  norm.weight:          -> final
  head.weight:          vocab <- final
tied:
  - {tensor: head.weight, to: embed.weight, when: tie}
drop: [layers.*.cache]
"""

Arrays = dict[str, np.ndarray]


def drawn(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> Arrays:
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def llama(dtype: Any = np.float32) -> Arrays:
    hidden, inner, layer = CONFIG["hidden_size"], CONFIG["intermediate_size"], "model.layers.0."
    return drawn(
        {
            "model.embed_tokens.weight": (11, hidden),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}self_attn.k_proj.weight": (4, hidden),
            f"{layer}self_attn.v_proj.weight": (4, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (11, hidden),
        },
        dtype,
    )


def bert() -> Arrays:
    hidden, inner, layer = BERT["hidden_size"], BERT["intermediate_size"], "encoder.layer.0."
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (11, hidden),
        "embeddings.position_embeddings.weight": (9, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    pairs = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden)}
    pairs |= {"attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden)}
    pairs |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    for name, shape in pairs.items():
        shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for name in ("embeddings.", f"{layer}attention.output.", f"{layer}output."):
        shapes |= {f"{name}LayerNorm.weight": (hidden,), f"{name}LayerNorm.bias": (hidden,)}
    return drawn(shapes, np.float16)


def tiny() -> Arrays:
    return drawn(
        {
            "embed.weight": (5, 4),
            "layers.0.norm.weight": (4,),
            "layers.0.up.weight": (8, 4),
            "layers.0.down.weight": (4, 8),
            "norm.weight": (4,),
            "head.weight": (5, 4),
        }
    )


def case(name: str, arguments: list[str], targets: list[str]) -> Path:
    folder = SEEDS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps({"arguments": arguments, "targets": targets}, indent=2) + "\n")
    return folder


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def single() -> None:
    folder = case("single", ["model.safetensors", "out.safetensors"], ["model.safetensors", "config.json"])
    save_file(llama(), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", CONFIG)


def sharded() -> None:
    shard = "in/model-00002-of-00002.safetensors"
    folder = case("sharded", ["in", "out"], ["in/model.safetensors.index.json", "in/config.json", shard])
    (folder / "in").mkdir(exist_ok=True)
    tensors = llama(ml_dtypes.bfloat16)
    names = list(tensors)
    weight_map = {}
    for number, part in ((1, names[:6]), (2, names[6:])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / "in" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in tensors.values())
    write_json(
        folder / "in/model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    write_json(folder / "in/config.json", CONFIG | {"torch_dtype": "bfloat16"})
    write_json(folder / "in/generation_config.json", {"eos_token_id": 1})


def sentence() -> None:
    files = ["modules.json", "1_Pooling/config.json", "config.json", "model.safetensors"]
    folder = case("sentence", ["in", "out"], [f"in/{file}" for file in files])
    (folder / "in").mkdir(exist_ok=True)
    save_file(bert(), folder / "in/model.safetensors")
    write_json(folder / "in/config.json", BERT)
    write_json(folder / "in/1_Pooling/config.json", {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True})
    write_json(
        folder / "in/modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
    )


def torch_files() -> None:
    for name, old in (("zip", False), ("legacy", True)):
        folder = case(name, ["model.bin", "out.safetensors"], ["model.bin"])
        state = {key: torch.from_numpy(array).half() for key, array in llama().items()}
        torch.save(state, folder / "model.bin", _use_new_zipfile_serialization=not old)
        write_json(folder / "config.json", CONFIG)


def own_map() -> None:
    folder = case("map", ["--map", "mine.yaml", "model.safetensors", "out.safetensors"], ["mine.yaml"])
    save_file(tiny(), folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "tiny", "vocab_size": 5, "hidden_size": 4, "inner_size": 8})
    (folder / "mine.yaml").write_text(MAP)


def draft() -> None:
    folder = case("draft", ["maps", "--draft", "model.safetensors"], ["model.safetensors", "config.json"])
    names = {"embed": "wte", "norm": "ln", "up": "fc1", "down": "fc2", "head": "lm_head"}
    tensors = {}
    for name, array in tiny().items():
        tensors[".".join(names.get(part, part) for part in name.split("."))] = array
    save_file(tensors, folder / "model.safetensors")
    write_json(
        folder / "config.json", {"model_type": "other", "vocab_size": 5, "n_embd": 4, "n_inner": 8, "n_layer": 1}
    )


def adapter() -> None:
    files = ["adapter/adapter_model.safetensors", "adapter/adapter_config.json"]
    folder = case("adapter", ["adapter", "out", "--base", "base"], files)
    (folder / "base").mkdir(exist_ok=True)
    (folder / "adapter").mkdir(exist_ok=True)
    save_file(llama(), folder / "base/model.safetensors", metadata={"format": "pt"})
    write_json(folder / "base/config.json", CONFIG)
    layer = "base_model.model.model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}self_attn.q_proj.lora_A.weight": (2, 8),
        f"{layer}self_attn.q_proj.lora_B.weight": (8, 2),
        f"{layer}mlp.down_proj.lora_A.weight": (2, 6),
        f"{layer}mlp.down_proj.lora_B.weight": (8, 2),
    }
    save_file(drawn(shapes), folder / files[0], metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "fan_in_fan_out": False}
    config |= {"bias": "none", "target_modules": ["q_proj", "down_proj"], "base_model_name_or_path": "base"}
    write_json(folder / files[1], config | {"rank_pattern": {}, "alpha_pattern": {"q_proj": 8}, "use_rslora": False})


def fp8() -> None:
    folder = case("fp8", ["in", "out"], ["in/config.json", "in/model.safetensors"])
    (folder / "in").mkdir(exist_ok=True)
    tensors = llama(ml_dtypes.bfloat16)
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        grid = (-(-rows // 4), -(-columns // 4))
        tensors[f"{name}_scale_inv"] = drawn({name: grid})[name]
    loaded = {name: torch.from_numpy(array.astype(np.float32)) for name, array in tensors.items()}
    for name in loaded:
        kind = torch.float32 if name.endswith("_scale_inv") else torch.bfloat16
        loaded[name] = loaded[name].to(torch.float8_e4m3fn if f"{name}_scale_inv" in loaded else kind)
    torch_save(loaded, folder / "in/model.safetensors", metadata={"format": "pt"})
    write_json(
        folder / "in/config.json",
        CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4], "fmt": "e4m3"}},
    )


def _gguf(path: Path, types: dict[str, str], hidden: int, inner: int, heads: int, split: int = 0) -> None:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_name("tiny")
    writer.add_size_label("1K")
    writer.add_block_count(1)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_context_length(32)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b", "c", "d", "e"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([1, 1, 1, 1, 1])
    key = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (5, hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (key, hidden),
        "blk.0.attn_v.weight": (key, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
        "output_norm.weight": (hidden,),
    }
    for name, array in drawn(shapes).items():
        kind = gguf.GGMLQuantizationType[types.get(name, types[""]) if array.ndim == 2 else "F32"]
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ggufs() -> None:
    folder = case("gguf", ["model.gguf", "out.gguf"], ["model.gguf"])
    _gguf(folder / "model.gguf", {"": "F16", "token_embd.weight": "F32"}, 8, 6, 2)
    folder = case("quantised", ["model.gguf", "out.gguf"], ["model.gguf"])
    types = {"": "Q4_0", "token_embd.weight": "Q8_0", "blk.0.attn_v.weight": "Q4_1", "blk.0.ffn_down.weight": "Q5_1"}
    _gguf(folder / "model.gguf", types, 32, 32, 2)
    parts = [f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    folder = case("split", [parts[0], "out.gguf"], parts)
    _gguf(folder / "model.gguf", {"": "F16"}, 8, 6, 2, split=6)


def wide() -> None:
    """An output and its record, to be verified."""
    for name, given, made in (
        ("verify", SEEDS / "single" / "model.safetensors", "wide.safetensors"),
        ("verify_gguf", SEEDS / "gguf" / "model.gguf", "wide.gguf"),
    ):
        targets = [made] if made.endswith("gguf") else [made, "wide.config.json"]
        folder = case(name, ["verify", given.name, made], targets)
        (folder / given.name).write_bytes(given.read_bytes())
        if made.endswith("safetensors"):
            (folder / "model.config.json").write_bytes((SEEDS / "single" / "config.json").read_bytes())
        run(prepare(Options(str(folder / given.name), str(folder / made), factor=2, force=True)), lambda nbytes: None)


if __name__ == "__main__":
    for make in (single, sharded, sentence, torch_files, own_map, draft, adapter, fp8, ggufs, wide):
        make()
