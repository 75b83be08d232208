"""The layer of DeepSeek-V3 that predicts the token after next, which transformers leaves out: run here by the paper's equations.

DeepSeek-V3 Technical Report, section 2.2: the stream of the model and the embedding of the next token are each normed, met in
one projection, and go through a layer like the others and the shared head. Its layer is transformers' own.
"""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
import transformers
from families_llama import FAMILIES
from safetensors.torch import load_file, save_file

from widen_cli.convert import prepare
from widen_cli.options import Options
from widen_cli.writing import run

LAYERS = 2
MTP = f"model.layers.{LAYERS}."
EXACT = 1e-12


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and one that predicts further, under the names of the published files."""
    folder = tmp_path_factory.mktemp("mtp")
    family = next(family for family in FAMILIES if family.name == "deepseek_v3")
    variant = family.variants["deepseek_v3"]
    model = models.build(variant, torch.float64)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS - 1}."
    draw = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=draw, dtype=torch.float64)

    tensors |= {
        name.replace(last, MTP): tensor + drawn(*tensor.shape) for name, tensor in tensors.items() if last in name
    }
    tensors |= {
        f"{MTP}embed_tokens.weight": drawn(vocab, hidden),
        f"{MTP}enorm.weight": 1 + drawn(hidden),
        f"{MTP}hnorm.weight": 1 + drawn(hidden),
        f"{MTP}eh_proj.weight": drawn(hidden, 2 * hidden),
        f"{MTP}shared_head.norm.weight": 1 + drawn(hidden),
        f"{MTP}shared_head.head.weight": drawn(vocab, hidden),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def predicted(folder: Path, behind_the_norm: bool) -> torch.Tensor:
    """The logits of the token after next, [tokens - 1, vocab], in float64."""
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = LAYERS + 1
    with models.Float64Throughout(), torch.no_grad():
        model, found = transformers.DeepseekV3ForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        assert not found["missing_keys"]
        model.eval().set_experts_implementation("eager")
        body, tokens = model.model, torch.arange(12)[None] * 31 % config.vocab_size
        states = body(tokens, output_hidden_states=True).hidden_states[LAYERS]
        states = norm(states, tensors["model.norm.weight"], config) if behind_the_norm else states
        words = tensors[f"{MTP}embed_tokens.weight"][tokens[:, 1:]]
        met = [
            norm(words, tensors[f"{MTP}enorm.weight"], config),
            norm(states[:, :-1], tensors[f"{MTP}hnorm.weight"], config),
        ]
        stream = torch.cat(met, dim=-1) @ tensors[f"{MTP}eh_proj.weight"].T
        places = torch.arange(stream.shape[1])[None]
        mask = torch.full((stream.shape[1],) * 2, -1e30, dtype=torch.float64).triu(1)[None, None]
        angles = body.rotary_emb(stream, places)
        stream = body.layers[LAYERS](stream, attention_mask=mask, position_ids=places, position_embeddings=angles)
        stream = stream[0] if isinstance(stream, tuple) else stream
        stream = norm(stream, tensors[f"{MTP}shared_head.norm.weight"], config)
        return (stream @ tensors[f"{MTP}shared_head.head.weight"].T)[0]


def norm(x: torch.Tensor, gain: torch.Tensor, config: transformers.PreTrainedConfig) -> torch.Tensor:
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)


def error(narrow: Path, wide: Path, behind_the_norm: bool) -> float:
    before, after = (predicted(folder, behind_the_norm) for folder in (narrow, wide))
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("behind_the_norm", [False, True])
@pytest.mark.parametrize(
    ("mode", "grow"),
    [
        ("auto", "hidden=2,intermediate=3,expert_intermediate=5,heads=4,query_rank=3"),
        ("copy", "hidden=3"),
        ("sum", "hidden=2"),
        ("quiet", "hidden=3,heads=2"),
        ("auto", "heads=2"),
    ],
)
def test_the_token_after_next(narrow: Path, tmp_path: Path, mode: str, grow: str, behind_the_norm: bool) -> None:
    job = prepare(Options(str(narrow), str(tmp_path / "wide"), grow=models.by_factors(grow), scaling=mode))
    assert any("more than the config counts, widened all the same: model.layers.2" in text for text in job.warnings)
    run(job, lambda nbytes: None)
    assert error(narrow, tmp_path / "wide", behind_the_norm) < EXACT


def test_a_wrong_half_shows(narrow: Path, tmp_path: Path) -> None:
    run(prepare(Options(str(narrow), str(tmp_path / "wide"), grow="hidden=2")), lambda nbytes: None)
    file = tmp_path / "wide" / "model.safetensors"
    tensors = load_file(file)
    words, state = tensors[f"{MTP}eh_proj.weight"].chunk(2, dim=1)
    tensors[f"{MTP}eh_proj.weight"] = torch.cat([state, words], dim=1)
    save_file(tensors, file, metadata={"format": "pt"})
    assert error(narrow, tmp_path / "wide", False) > 1e-2
