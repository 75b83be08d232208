"""The way back from sizes that are no multiples, and from layers that grew each by a factor of its own.

What was widened comes back bit for bit; what was moved is compared with numpy's least squares over matrices written down here,
and what fills new places with means and draws made here or by another run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_oracle
import models
import numpy as np
import pytest
import test_adapters
import test_gguf_layers
import test_layer_growth
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_any_size import KNOWN
from test_collapse import back, command, config, differing, edited, shaken, tensors, tiny, widened
from test_gguf_lossless import Tiny, write_tiny

import widen_cli
from widen_cli.dimensions import Copies

WIDER = "hidden=4/3,heads=4/3,kv_heads=4/3,intermediate=71/50"
PAIRED = "heads=5/3,hidden=5/3"

# Variant, type, growth, scaling, fill: both norms, heads of all kinds, epsilons and gains that change, draws, padding.
CASES = [
    ("llama", torch.float32, WIDER, "copy", "copy"),
    ("llama", torch.bfloat16, WIDER, "quiet", "random"),
    ("llama_gqa", torch.float32, PAIRED, "sum", "zero"),
    ("llama", torch.bfloat16, "head_dim=4/3,vocab=128/97", "copy", "copy"),
    ("qwen3", torch.float32, "head_dim=7/5,hidden=6/5", "orthogonal", "copy"),
    ("qwen3", torch.bfloat16, "hidden=8/5,heads=8/3,kv_heads=4/3", "copy", "random"),
    ("gemma3_text", torch.float32, WIDER, "quiet", "random"),
    ("gpt2", torch.bfloat16, "hidden=4/3", "orthogonal", "copy"),  # new positions hold means
    ("gpt2_untied", torch.float32, "hidden=7/3,vocab=128/97", "sum", "copy"),
    ("gpt_neox", torch.float32, "hidden=4/3,intermediate=71/50", "copy", "random"),
    ("bert_mlm", torch.float32, "intermediate=71/50,vocab=128/97", "copy", "copy"),
    ("mixtral", torch.float32, "hidden=4/3", "copy", "copy"),
    ("glm_base", torch.float32, "head_dim=4/3", "copy", "copy"),  # sizes that are made of sizes that are made
]


@pytest.mark.parametrize(("variant", "dtype", "grow", "scaling", "fill"), CASES)
def test_sizes_that_are_no_multiples_come_back(
    variant: str, dtype: torch.dtype, grow: str, scaling: str, fill: str, tmp_path: Path
) -> None:
    source = models.save(KNOWN[variant], tmp_path / "narrow", dtype)  # type: ignore[arg-type]
    report = widened(source, tmp_path / "wide", grow=grow, scaling=scaling, fill=fill)
    folded = back(tmp_path / "wide", tmp_path / "back")
    assert folded.moved == []
    # A mean that fills new rows may be rounded; the rows that it is the mean of are not.
    rounded = {plan.source.name for plan in report.job.plan.tensors if plan.exactness_of_copies == "rounds"}
    assert set(folded.inexact) == rounded
    assert set(differing(source, tmp_path / "back")) <= rounded
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    old, new = tensors(source), tensors(tmp_path / "back")
    for name in rounded:
        torch.testing.assert_close(new[name], old[name], rtol=2**-7 if dtype == torch.bfloat16 else 3e-7, atol=0)
    assert len(rounded) < len(new)


def test_means_alone_round_nothing_that_comes_back(tmp_path: Path) -> None:
    """LayerNorms: GPT-2's new positions are means, and its 4/3 is in the quiet scaling in the norms and epsilons alone."""
    source = models.save(KNOWN["gpt2"], tmp_path / "narrow")
    report = widened(source, tmp_path / "wide", grow="hidden=4/3,vocab=128/97", scaling="quiet")
    means = [plan for plan in report.job.plan.tensors if plan.exactness_of_copies != plan.exactness]
    assert (
        sum(counts.rounded > 0 for name, counts in report.counts.items() if name in {p.source.name for p in means}) > 3
    )
    back(tmp_path / "wide", tmp_path / "back")
    old, new = tensors(source), tensors(tmp_path / "back")
    assert all(torch.equal(old[plan.source.name], new[plan.source.name]) for plan in means)


# Least squares, and the distance of what fills.

LATER = np.eye(4)[[0, 1, 2, 3, 2, 3]]  # hidden 4 to 6: two new positions, empty, or read like the last two
INNER = np.eye(3)[[0, 1, 2, 2]]  # 3 to 4: the last unit twice
HALVES = INNER * np.array([[1, 1, 0.5, 0.5]]).T
HEADS = np.kron(np.eye(2)[[0, 1, 1]], np.eye(2))  # 2 to 3 heads of 2
HALF_HEADS = HEADS * np.repeat([1, 0.5, 0.5], 2)[:, None]
STREAM = np.vstack([np.eye(4), np.zeros((2, 4))])


def test_a_trained_model_of_other_sizes_is_folded_by_least_squares(tmp_path: Path) -> None:
    source, wide = tiny(tmp_path / "narrow"), tmp_path / "wide"
    widened(source, wide, grow="hidden=3/2,intermediate=4/3,heads=3/2", scaling="copy")
    layer = "model.layers.0"
    sides = {
        "model.embed_tokens.weight": (np.eye(5), STREAM),
        f"{layer}.self_attn.q_proj.weight": (HEADS, LATER),
        f"{layer}.self_attn.k_proj.weight": (np.eye(2), LATER),
        f"{layer}.self_attn.v_proj.weight": (np.eye(2), LATER),
        f"{layer}.self_attn.o_proj.weight": (STREAM, HALF_HEADS),
        f"{layer}.mlp.gate_proj.weight": (INNER, LATER),
        f"{layer}.mlp.up_proj.weight": (INNER, LATER),
        f"{layer}.mlp.down_proj.weight": (STREAM, HALVES),
        "lm_head.weight": (np.eye(5), LATER),
    }
    matrices = {name: np.kron(*pair) for name, pair in sides.items()}
    norms = (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight", "model.norm.weight")
    matrices |= dict.fromkeys(norms, LATER)
    old, made = tensors(source), tensors(wide)
    assert matrices.keys() == old.keys()
    for name in matrices:
        # One factor a tensor is the tool's: what the norm over more places makes of scales.
        by = float(np.linalg.norm(made[name])) / float(np.linalg.norm(matrices[name] @ old[name].numpy().reshape(-1)))
        matrices[name] = matrices[name] * by
        np.testing.assert_allclose(matrices[name] @ old[name].numpy().reshape(-1), made[name].reshape(-1), rtol=1e-12)
    edited(wide, shaken)
    folded, given = back(wide, tmp_path / "back"), tensors(wide)
    for name, tensor in tensors(tmp_path / "back").items():
        y = given[name].numpy().reshape(-1)
        expected, *_ = np.linalg.lstsq(matrices[name], y, rcond=None)
        np.testing.assert_allclose(tensor.reshape(-1), expected, rtol=1e-11, atol=1e-13)
        apart = np.linalg.norm(y - matrices[name] @ expected) / np.linalg.norm(y)
        assert folded.distances[name].relative == pytest.approx(apart, rel=1e-9)
        assert folded.distances[name].values == y.size


EMBEDDING, HEAD = "transformer.wte.weight", "transformer.h.0.mlp.c_proj.weight"


def test_what_fills_is_measured_by_what_belongs_there(tmp_path: Path) -> None:
    """Means over hidden and over the vocabulary: of the means of copies, not of what training left in their places."""
    source = models.save(KNOWN["gpt2_untied"], tmp_path / "narrow", torch.float64)
    widened(source, tmp_path / "wide", grow="hidden=4/3,vocab=128/97", scaling="copy")
    edited(tmp_path / "wide", shaken)
    folded, given, found = (
        back(tmp_path / "wide", tmp_path / "back"),
        tensors(tmp_path / "wide"),
        tensors(tmp_path / "back"),
    )
    y, x = given[EMBEDDING].numpy(), found[EMBEDDING].numpy()
    assert (y.shape, x.shape) == ((128, 48), (97, 36))
    # Nothing grew to a second copy, so the old places are the fold but for their factor.
    by = y[:97, :36] / x
    np.testing.assert_allclose(by, by[0, 0], rtol=1e-12)
    wanted = y[:97, :36]
    wanted = np.concatenate([wanted, np.repeat(wanted.mean(1, keepdims=True), 12, 1)], 1)
    wanted = np.concatenate([wanted, np.repeat(wanted.mean(0, keepdims=True), 31, 0)], 0)
    apart = np.linalg.norm(y - wanted) / np.linalg.norm(y)
    assert folded.distances[EMBEDDING].relative == pytest.approx(apart, rel=1e-9)
    assert folded.distances[EMBEDDING].largest == pytest.approx(np.abs(y - wanted).max(), rel=1e-9)
    assert folded.distances[EMBEDDING].values == y.size


def test_draws_are_drawn_again(tmp_path: Path) -> None:
    """By another seed they are other numbers, which the distance shows; the fold does not read them."""
    source = models.save(KNOWN["llama"], tmp_path / "narrow")
    widened(source, tmp_path / "wide", grow=WIDER, fill="random", seed=5, scaling="copy")
    edited(tmp_path / "wide", lambda values: None, record=False)
    made: dict[str, Any] = {"grow": models.by_factors(WIDER), "fill": "random", "scaling": "copy"}
    assert back(tmp_path / "wide", tmp_path / "back", seed=5, **made).moved == []
    folded = back(tmp_path / "wide", tmp_path / "other", seed=6, **made)
    assert len(folded.moved) > 5
    assert differing(tmp_path / "back", tmp_path / "other") == []
    assert config(tmp_path / "back")["hidden_size"] == config(source)["hidden_size"]


def test_a_mean_of_all_rows_shows_every_one_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard: a mean row that was moved, or one that is looked for where none is, is told of."""
    source = models.save(KNOWN["gpt2_untied"], tmp_path / "narrow")
    widened(source, tmp_path / "wide", grow="vocab=128/97", scaling="copy")

    def change(values: dict[str, torch.Tensor]) -> None:
        values[EMBEDDING][127, 35] += 1

    edited(tmp_path / "wide", change)
    (moved,) = back(tmp_path / "wide", tmp_path / "back").moved
    assert (moved[0], moved[1].largest) == (EMBEDDING, pytest.approx(1, rel=1e-6))
    assert differing(source, tmp_path / "back") == []
    edited(tmp_path / "wide", lambda values: values[EMBEDDING][127].copy_(values[EMBEDDING][126]))
    assert back(tmp_path / "wide", tmp_path / "again").moved == []
    real = widen_cli.collapse.filled.places
    monkeypatch.setattr(widen_cli.collapse.filled, "places", lambda growth: real(Copies(growth.new)))
    edited(tmp_path / "wide", change)
    assert back(tmp_path / "wide", tmp_path / "blind").moved == []


def test_the_same_bytes_and_distances_with_threads_and_parts(tmp_path: Path) -> None:
    source = models.save(KNOWN["gpt_neox"], tmp_path / "narrow")
    widened(source, tmp_path / "wide", grow="hidden=4/3,intermediate=71/50", fill="random", max_shard_size="60KB")
    for file in (tmp_path / "wide").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        values = load_file(file)
        shaken(values)
        save_file(values, file, metadata)
    found = [back(tmp_path / "wide", tmp_path / str(threads), threads=threads) for threads in (1, 4)]
    one, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "4"))
    assert (one, found[0].distances) == (four, found[1].distances)
    assert len(found[0].moved) == len(found[0].distances)


@pytest.mark.parametrize("grow", ["hidden=4/3", "hidden=2,intermediate=71/50"])
def test_an_adapter_of_another_size(grow: str, tmp_path: Path) -> None:
    source = models.save(KNOWN["llama"], tmp_path / "base", torch.float64)
    more = {"target_modules": test_adapters.ALL["llama"]}
    adapter = test_adapters.make_adapter(source, tmp_path / "adapter", **more)
    widened(adapter, tmp_path / "wide", base=str(source), scaling="copy", grow=grow)
    folded = back(tmp_path / "wide", tmp_path / "back", base=str(source))
    assert folded.moved == []
    old, new = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "back"))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor, rtol=1e-15, atol=0)


def test_the_summary_and_what_a_size_does_not_tell(tmp_path: Path) -> None:
    source = models.save(KNOWN["llama"], tmp_path / "narrow")
    widened(source, tmp_path / "wide", grow="hidden=4/3,intermediate=2", scaling="sum")
    result = command("collapse", tmp_path / "wide", tmp_path / "back")
    assert result.exit_code == 0
    assert f"{tmp_path}/back: llama, hidden x3/4, intermediate /2, sum, as recorded; copies are alike" in result.stderr
    edited(tmp_path / "wide", lambda values: None, record=False)
    refused = command("collapse", tmp_path / "wide", tmp_path / "no", "--grow", "hidden=48", "--scaling", "sum")
    assert refused.stderr == (
        "--grow hidden=48: tells what 'hidden' grew to, and the way back needs by how much; write hidden=2x\n"
    )
    refused = command("collapse", tmp_path / "wide", tmp_path / "no", "--grow", "hidden=7/5", "--scaling", "sum")
    assert refused.stderr == (
        f"{tmp_path}/wide/config.json: hidden_size is 48, no multiple of the 7/5 that hidden grows by; this model was not "
        "widened so\n"
    )


# GGUF.


def test_blocks_of_other_sizes(tmp_path: Path) -> None:
    """Codes stand where they stood; a new block that is no zero is no fold's to average."""
    source = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1))
    report = widened(source, tmp_path / "wide.gguf", scaling="quiet", grow="hidden=3/2,intermediate=3/2")
    folded = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    old, new = (gguf_oracle.read(tmp_path / name) for name in ("in.gguf", "back.gguf"))
    assert list(old.pairs.items()) == list(new.pairs.items())
    blocks = {name for name, tensor in old.tensors.items() if tensor.kind is Kind.Q8_0}
    kept = blocks - {name for name, counts in report.counts.items() if counts.rounded}
    assert len(kept) > 5
    assert all(np.array_equal(old.tensors[name].rows, new.tensors[name].rows) for name in kept)
    assert folded.moved == []


def test_a_tokenizer_that_was_padded(tmp_path: Path) -> None:
    """The unused tokens go again, and every byte is the first file's."""
    source = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(Kind.F32,), layers=1))
    count = len(gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents())
    widened(source, tmp_path / "wide.gguf", grow=f"vocab={(count // 64 + 1) * 64}/{count}", scaling="copy")
    assert len(gguf.GGUFReader(tmp_path / "wide.gguf").fields["tokenizer.ggml.tokens"].contents()) > count
    back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert source.read_bytes() == (tmp_path / "back.gguf").read_bytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("narrow")
    family = test_layer_growth._llama()
    return cache(
        lambda name: (
            test_gguf_layers.write(folder / "deci.gguf")
            if name == "deci"
            else test_layer_growth.gguf_families.write_family(family, folder / "llama.gguf")
        )
    )


@pytest.mark.parametrize(
    ("name", "grow"),
    [
        ("llama", "intermediate=2@1"),
        ("llama", "hidden=2,heads=2@0,kv_heads=2@0,intermediate=4@1-2"),
        ("deci", "hidden=2,intermediate=2@2-3"),
    ],
)
def test_layers_that_grew_apart(name: str, grow: str, files: Callable[[str], Path], tmp_path: Path) -> None:
    """A llama that became a deci is a llama again, its lists the numbers that they were; one that was a deci keeps its lists."""
    source = files(name)
    report = test_gguf_layers.widened(source, tmp_path / "wide.gguf", grow=grow, scaling="copy")
    assert "deci" in str(gguf_oracle.read(tmp_path / "wide.gguf").pairs["general.architecture"])
    folded = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert folded.moved == []
    assert not folded.inexact
    assert report.total.rounded == 0
    assert source.read_bytes() == (tmp_path / "back.gguf").read_bytes()
    result = command("collapse", tmp_path / "wide.gguf", tmp_path / "again.gguf")
    assert f"again.gguf: {name}, " in result.stderr
    assert "intermediate /" in result.stderr


def test_ranges_without_a_record(files: Callable[[str], Path], tmp_path: Path) -> None:
    """A deci's lists are divided layer by layer, as said."""
    grow = "hidden=2,intermediate=2@2-3"
    test_gguf_layers.widened(files("deci"), tmp_path / "wide.gguf", grow=grow, scaling="copy")
    known = back(tmp_path / "wide.gguf", tmp_path / "known.gguf")
    said = back(tmp_path / "wide.gguf", tmp_path / "said.gguf", grow=grow, scaling="copy")
    one, other = (gguf_oracle.read(tmp_path / name) for name in ("known.gguf", "said.gguf"))
    lists = "deci.feed_forward_length"
    assert one.pairs[lists] == other.pairs[lists]
    assert known.distances == said.distances
    assert all(np.array_equal(tensor.rows, other.tensors[name].rows) for name, tensor in one.tensors.items())


def test_a_layer_that_moved(files: Callable[[str], Path], tmp_path: Path) -> None:
    """The copies of one layer are averaged by its own factor."""
    test_gguf_layers.widened(files("llama"), tmp_path / "wide.gguf", grow="intermediate=2@1", scaling="copy")
    stored = gguf_oracle.read(tmp_path / "wide.gguf", "r+")
    name = "blk.1.ffn_down.weight"
    first = stored.tensors[name].values().astype(np.float64)
    value = stored.tensors[name].rows[0, :4].view("<f4")
    value += 1
    stored.data.flush()
    first[0, 0] = float(value[0])
    folded = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    ((moved, distance),) = folded.moved
    assert (moved, distance.largest) == (name, pytest.approx(0.5, rel=1e-5))
    found = gguf_oracle.read(tmp_path / "back.gguf").tensors[name].values()
    np.testing.assert_allclose(found, 2 * first.reshape(first.shape[0], -1, 2).mean(-1), rtol=1e-6)
