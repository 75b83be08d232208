"""Axes that grow to sizes which are no multiples: the function, what the new positions hold, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import families_encoders
import families_llama
import families_older
import gguf_families
import models
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Kind
from gguf_oracle import read
from llama_cpp import log_probabilities
from models import VARIANTS, Variant
from safetensors.numpy import load_file
from test_gguf_families import PROMPTS
from test_gguf_lossless import Tiny, write_tiny

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.dimensions import Copies, Fill
from widen_cli.draws import Draws
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.plan import filling, partial
from widen_cli.scales import ONE
from widen_cli.writing import run

EXACT = 1e-12  # relative to the largest output, in float64
CLEAR = 1e-5

KNOWN: dict[str, Variant] = {
    **VARIANTS,
    **{
        name: variant
        for module in (families_encoders, families_llama, families_older)
        for family in module.FAMILIES
        for name, variant in family.variants.items()
    },
}

GROUPS = "heads=5/3,hidden=5/3"
WIDER = "hidden=4/3,heads=4/3,kv_heads=4/3,intermediate=71/50"

# variant, growth, scaling, what fills.
CASES = [
    ("llama", WIDER, "copy", "copy"),
    ("llama", WIDER, "orthogonal", "random"),
    ("llama", WIDER, "sum", "zero"),
    ("llama", WIDER, "quiet", "copy"),
    ("llama", "hidden=5/2,intermediate=111/50", "orthogonal", "copy"),  # two copies of each, and half of them once more
    ("llama_gqa", GROUPS, "copy", "copy"),  # 10 heads over 2 keys: 5 for each where there were 3
    ("llama_gqa", "heads=8/3,kv_heads=2x,hidden=8/3", "sum", "random"),
    ("llama_tied", "hidden=7/6", "orthogonal", "random"),
    ("llama", "head_dim=4/3", "copy", "copy"),  # rotary pairs: the base is raised to the power of 4/3
    ("llama", "head_dim=5/3", "orthogonal", "random"),
    ("qwen3", "hidden=8/5,heads=8/3,kv_heads=4/3", "copy", "zero"),  # one epsilon for the stream and for q and k
    ("qwen3", "head_dim=7/5,hidden=6/5", "orthogonal", "copy"),  # copies under a norm, made even
    ("gemma3_text", "head_dim=9/5", "copy", "random"),
    ("gemma2", WIDER, "orthogonal", "copy"),  # norms behind the branches, gains 1 + w, embeddings times a root
    ("gemma3_text", WIDER, "quiet", "random"),
    ("gemma3_text_untied", "hidden=7/6", "sum", "copy"),
    ("qwen2_moe", "hidden=4/3", "copy", "copy"),
    ("deepseek_v3", "hidden=4/3", "copy", "copy"),
    ("jamba", "hidden=4/3", "copy", "random"),
    ("gpt2", "hidden=4/3", "orthogonal", "copy"),  # heads follow, and a FFN of four times hidden
    ("gpt2", "hidden=5/4", "copy", "random"),  # 45 is no multiple of the head size, so that grows: 12 to 15
    ("gpt2_untied", "hidden=7/3", "sum", "copy"),
    ("gpt_neox", "hidden=4/3,intermediate=71/50", "copy", "random"),
    ("opt", "hidden=4/3", "copy", "copy"),  # an epsilon in the code, so that the stream is scaled
    ("pegasus", "hidden=4/3", "copy", "copy"),  # two streams, sums of words and positions
    ("pegasus_scaled", "hidden=4/3", "copy", "copy"),  # words times the root of a size, which is no space
    ("pegasus_decoder", "hidden=5/2", "quiet", "copy"),
    ("cohere2", "hidden=4/3,heads=4/3,kv_heads=4/3", "copy", "copy"),  # LayerNorms without biases
    ("bert_mlm", "intermediate=71/50", "copy", "copy"),
    ("bert_mlm", "hidden=2,heads=4/3", "copy", "random"),  # head sizes 12 to 18, without rotary positions
    ("opt_350m", "embed=31/24", "copy", "copy"),  # a tied embedding that no norm reads
]


class Narrow:
    """Narrow models and what they say, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[str, models.Outputs] = {}

    def path(self, variant: str) -> Path:
        path = self.folder / variant
        return path if path.exists() else models.save(KNOWN[variant], path, torch.float64)  # type: ignore[arg-type]

    def error(self, variant: str, wide: Path) -> float:
        """The largest relative error over the outputs that keep their shape."""
        inputs = KNOWN[variant].inputs
        if variant not in self.said:
            self.said[variant] = models.outputs(self.path(variant), torch.float64, inputs=inputs)
        before, after = self.said[variant], models.outputs(wide, torch.float64, inputs=inputs)
        found = [
            float(np.abs(after[name] - old).max() / np.abs(old).max())
            for name, old in before.items()
            if after[name].shape == old.shape
        ]
        assert found
        return max(found)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    return Narrow(tmp_path_factory.mktemp("narrow"))


def widen(source: Path, target: Path, grow: str, **options: Any) -> Report:
    return run(prepare(Options(str(source), str(target), grow=grow, **options)), lambda nbytes: None)


def refusal(source: Path, grow: str, **options: Any) -> str:
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), str(source.with_name("refused")), grow=grow, **options))
    return str(caught.value)


@pytest.mark.parametrize(("variant", "grow", "mode", "fill"), CASES)
def test_the_function_is_kept(variant: str, grow: str, mode: str, fill: str, narrow: Narrow, tmp_path: Path) -> None:
    widen(narrow.path(variant), tmp_path / "wide", grow, scaling=mode, fill=fill)
    assert narrow.error(variant, tmp_path / "wide") < EXACT


def _ones(self: Any, rule: Any) -> Any:
    return ONE


FAULTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "gains left": ("llama", "hidden=7/6", lambda patch: patch.setattr(filling.Filling, "gain", _ones)),
    "epsilon left": ("gpt2", "hidden=4/3", lambda patch: patch.setattr(partial.Partial, "spread", ONE)),
    "zeros under LayerNorm": ("gpt2", "hidden=4/3", lambda patch: patch.setattr(filling, "LAYER", "other")),
    "copies of heads not shared out": (
        "llama_gqa",
        GROUPS,
        lambda patch: patch.setattr(partial, "times", lambda g, s: g),
    ),
    "copies under a norm not made even": (
        "qwen3",
        "head_dim=7/5",
        lambda patch: patch.setattr(filling.Filling, "evening", lambda *arguments: ONE),
    ),
    "heads read others' keys": (
        "llama_gqa",
        GROUPS,
        lambda patch: patch.setattr(partial, "_grouped", lambda *a: {}),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, narrow: Narrow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, grow, break_it = FAULTS[fault]
    source = narrow.path(variant)
    break_it(monkeypatch)
    widen(source, tmp_path / "wide", grow, scaling="copy")
    assert narrow.error(variant, tmp_path / "wide") > CLEAR


# What stands where.


def test_hidden_states_begin_with_the_old_ones(narrow: Narrow, tmp_path: Path) -> None:
    report = widen(narrow.path("llama_base"), tmp_path / "wide", "hidden=4/3,heads=4/3,kv_heads=4/3", scaling="copy")
    before, after = (
        models.outputs(path, torch.float64)["last_hidden_state"]
        for path in (narrow.path("llama_base"), tmp_path / "wide")
    )
    assert np.abs(after[..., :36] - before).max() < EXACT
    assert not after[..., 36:].any()
    note = "hidden states, where they are the output, begin with the old ones; 12 places hold zero"
    assert note in report.job.plan.notes
    assert report.job.plan.named_factors["hidden"] == "4/3"
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["hidden_size"] == 48


def test_what_new_positions_hold(narrow: Narrow, tmp_path: Path) -> None:
    """Writers zeros, gains and readers copies. Under LayerNorm writers the mean of theirs, which is rounded and counted."""
    widen(narrow.path("llama"), tmp_path / "llama", "hidden=7/6", scaling="copy")
    stored = load_file(tmp_path / "llama" / "model.safetensors")
    assert not stored["model.layers.0.mlp.down_proj.weight"][36:].any()
    reader = stored["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(reader[:, 36:], reader[:, 30:36])
    gain = stored["model.norm.weight"]
    assert np.array_equal(gain[36:], gain[30:36])
    report = widen(narrow.path("gpt2"), tmp_path / "gpt2", "hidden=4/3", scaling="copy", dtype="F32")
    stored = load_file(tmp_path / "gpt2" / "model.safetensors")
    table, writer = stored["transformer.wte.weight"], stored["transformer.h.1.mlp.c_proj.weight"]
    for matrix in (table, writer):
        assert np.array_equal(
            matrix[:, 36:], np.repeat(matrix[:, :36].astype(np.float64).mean(axis=1).astype(np.float32)[:, None], 12, 1)
        )
    assert not stored["transformer.ln_f.bias"][36:].any()
    (plan,) = (plan for plan in report.job.plan.tensors if plan.source.name == "transformer.h.1.mlp.c_proj.weight")
    assert plan.exactness == "rounds"
    assert report.counts[plan.source.name].rounded > 0


def test_new_units(narrow: Narrow, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.{}_proj.weight"
    found = {}
    for fill, seed in (("copy", 0), ("zero", 0), ("random", 0), ("random", 7)):
        out = tmp_path / f"{fill}{seed}"
        widen(narrow.path("llama"), out, "intermediate=71/50", scaling="copy", fill=fill, seed=seed)
        stored = load_file(out / "model.safetensors")
        found[fill, seed] = stored[name.format("up")], stored[name.format("down")]
    old_up, old_down = (load_file(narrow.path("llama") / "model.safetensors")[name.format(n)] for n in ("up", "down"))
    # 29 units stand once, the last 21 twice, side by side.
    for key, (up, down) in found.items():
        assert np.array_equal(up[29::2], old_up[29:]), key
        assert np.array_equal(up[30::2], old_up[29:]) == (key[0] != "random")
        assert np.array_equal(down[:, :29], old_down[:, :29])
        halves = old_down[:, 29:] / 2 if key[0] == "copy" else old_down[:, 29:]
        assert np.array_equal(down[:, 29::2], halves)
        assert np.array_equal(down[:, 30::2], halves if key[0] == "copy" else 0 * halves)
    drawn = found["random", 0][0][30::2]
    assert np.isin(np.abs(drawn), np.abs(old_up)).all()
    assert 0.9 < drawn.std() / old_up.std() < 1.1
    assert not np.array_equal(drawn, found["random", 7][0][30::2])


def test_new_positions_learn(narrow: Narrow, tmp_path: Path) -> None:
    """What is zero on one side is not on the other, so that it gets a gradient; with --fill zero the stream's does not."""
    for fill in ("copy", "zero"):
        widen(narrow.path("qwen3"), tmp_path / fill, "hidden=8/5,head_dim=7/5", scaling="copy", fill=fill)
        model = models.load(tmp_path / fill, torch.float64)
        tokens = models.fixed_inputs(model.config)["input_ids"]
        model(tokens, labels=tokens).loss.backward()
        layer = model.model.layers[0]
        assert bool(layer.mlp.down_proj.weight.grad[40:].abs().min() > 0) == (fill == "copy")
        # Pairs 3 and 4 of 5 stand twice, and of keys the second time as zero: 5 and 6 of 7 in either half of a head.
        new = torch.tensor([5, 6, 12, 13])
        assert not layer.self_attn.k_norm.weight[new].any()
        assert layer.self_attn.k_norm.weight.grad[new].abs().min() > 0
        assert layer.self_attn.q_norm.weight[new].all()


def test_draws_do_not_depend_on_where_a_block_begins() -> None:
    bits = np.arange(600, dtype=np.uint16).reshape(6, 100)
    draws = Draws.of(3, "a")
    whole = draws.of_rows(bits, 40)
    assert np.array_equal(whole[4:], draws.from_row(4).of_rows(bits[4:], 40))
    assert not np.array_equal(whole, Draws.of(3, "b").of_rows(bits, 40))
    assert np.array_equal(whole & 0x7FFF, np.take_along_axis(bits, (whole & 0x7FFF) % 100, 1))


@pytest.mark.parametrize(("variant", "fill"), [("gpt_neox", "random"), ("llama", "copy")])
def test_the_same_bytes_by_any_road(variant: str, fill: str, narrow: Narrow, tmp_path: Path) -> None:
    """Threads, a pipe, which cannot be read twice, and `verify`, which goes by the record."""
    source = narrow.path(variant)
    grow = "hidden=4/3,intermediate=71/50" if variant == "gpt_neox" else WIDER
    for threads in (1, 3):
        widen(source, tmp_path / str(threads), grow, fill=fill, threads=threads)
    one, three = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "3"))
    assert one == three
    piped = subprocess.run(
        [sys.executable, "-m", "widen_cli", "-", "-", "--config", str(source / "config.json"), "--grow", grow, "--fill", fill],
        input=(source / "model.safetensors").read_bytes(), capture_output=True, check=True,
    ).stdout  # fmt: skip
    (tmp_path / "piped.safetensors").write_bytes(piped)
    found, wanted = load_file(tmp_path / "piped.safetensors"), load_file(tmp_path / "1" / "model.safetensors")
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    result = CliRunner().invoke(cli, ["verify", str(source), str(tmp_path / "3")])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("variant", ["llama_tied", "gpt2_untied", "bert_mlm", "bart", "mixtral"])
def test_a_padded_vocabulary(variant: str, narrow: Narrow, tmp_path: Path) -> None:
    """Old logits stay, new ones are their mean, which no token's logit that wins is below."""
    report = widen(narrow.path(variant), tmp_path / "wide", "vocab=128/97,hidden=3", scaling="copy")
    described = KNOWN[variant]
    tokens = (described.inputs or models.fixed_inputs)(described.make_config())
    before, after = (
        models.outputs(path, torch.float64, inputs=lambda config: tokens)["logits"]
        for path in (narrow.path(variant), tmp_path / "wide")
    )
    assert after.shape[-1] == 128
    assert np.abs(after[..., :97] - before).max() < EXACT * np.abs(before).max()
    assert np.abs(after[..., 97:] - before.mean(-1, keepdims=True)).max() < EXACT * np.abs(before).max()
    assert after.argmax(-1).max() < 97
    assert report.job.plan.named_factors["vocab"] == "128/97"


# GGUF.


@pytest.mark.parametrize(
    ("name", "grow", "mode"),
    [
        ("qwen3", "hidden=4/3,heads=3/2,kv_heads=3/2,intermediate=71/50", "copy"),
        ("gemma3", "hidden=4/3", "sum"),
        ("gemma3", "head_dim=8/5", "copy"),  # pairs are neighbours in GGUF, and of q and k normed
        ("gpt2", "hidden=4/3", "orthogonal"),
        ("falcon-40b", "hidden=4/3,heads=4/3,kv_heads=4/3", "copy"),  # keys, values and groups of queries in one tensor
        ("phi3", "hidden=4/3,heads=4/3,kv_heads=4/3,intermediate=71/50", "quiet"),
        ("qwen2moe", "hidden=4/3", "copy"),  # a vector that meets what a norm makes: no key, whose copies would be zero
    ],
)
def test_llama_cpp_says_the_same(name: str, grow: str, mode: str, tmp_path: Path) -> None:
    source, wide = gguf_families.write(name, tmp_path / "narrow.gguf"), tmp_path / "wide.gguf"
    widen(source, wide, grow, scaling=mode)
    assert np.abs(log_probabilities(source, PROMPTS) - log_probabilities(wide, PROMPTS)).max() < 2e-4


@pytest.mark.parametrize("name", ["qwen2", "phi2", "gpt2-untied"])
def test_a_padded_vocabulary_in_llama_cpp(name: str, tmp_path: Path) -> None:
    source, wide = gguf_families.write(name, tmp_path / "narrow.gguf"), tmp_path / "wide.gguf"
    before = log_probabilities(source, PROMPTS)
    size = before.shape[1]
    widen(source, wide, f"vocab={Fraction(size + 31, size)},hidden=4/3", scaling="copy")
    after = log_probabilities(wide, PROMPTS)
    assert after.shape == (len(PROMPTS), size + 31)
    # Log-probabilities share what the new tokens take, so they are compared with that of one token.
    assert np.abs((after[:, :size] - after[:, :1]) - (before - before[:, :1])).max() < 2e-4
    assert np.abs(after[:, size:] - after[:, :size].mean(1, keepdims=True)).max() < 2e-4
    result = CliRunner().invoke(cli, ["verify", str(source), str(wide)])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.IQ4_NL], ids=lambda kind: kind.name)
def test_quantised_blocks(kind: Kind, tmp_path: Path) -> None:
    """Every value of the wide file is one of the narrow file, or zero: block scales stay, new blocks have scale 0."""
    tiny = Tiny(hidden=192, ffn=192, heads=3, kv_heads=3, kinds=(kind,), layers=1)
    source, wide = write_tiny(tmp_path / "narrow.gguf", tiny), tmp_path / "wide.gguf"
    report = widen(source, wide, "hidden=4/3,intermediate=3/2,heads=4/3,kv_heads=4/3")
    assert report.total.rounded <= 3 * 192  # the gains
    old, new = (read(path).tensors for path in (source, wide))
    for name, lead, columns in (("ffn_down", 64, 96), ("attn_output", 64, 64)):
        before, after = (tensors[f"blk.0.{name}.weight"] for tensors in (old, new))
        assert after.kind == kind
        kept = after.values()[:192]
        assert not after.values()[192:].any()
        assert after.shape == (192 + lead, 192 + columns)
        places = [at for at in range(kept.shape[1]) if kept[:, at].any()]
        assert np.array_equal(kept[:, places], before.values())
    assert np.array_equal(new["blk.0.ffn_up.weight"].values()[:96, :192], old["blk.0.ffn_up.weight"].values()[:96])


def test_what_blocks_cannot_hold(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1))
    said = refusal(source, "intermediate=3/2", fill="random")
    assert (
        "holds no numbers to take a mean of or to draw from; make numbers of it (of a GGUF, --dequantize F32)" in said
    )
    assert "do not fill blocks of 32" in refusal(source, "intermediate=17/16")
    widen(source, tmp_path / "wide.gguf", "intermediate=3/2", fill="random", dequantize="F32")


# Refusals.


@pytest.mark.parametrize(
    ("variant", "grow", "options", "text"),
    [
        ("bert_mlm", "hidden=4/3", {}, "a LayerNorm writes 'hidden', over which another LayerNorm runs"),
        ("clip_vision", "hidden=4/3", {}, "a LayerNorm writes 'hidden', over which another LayerNorm runs"),
        ("olmo2", "heads=4/3,kv_heads=4/3", {}, "norm of 'model.layers.*.self_attn.q_norm.weight' runs over all of them at once"),
        ("llama", "hidden=5/7", {}, "is less than 1, and nothing shrinks here"),
        ("llama", "hidden=7/5", {}, "--grow hidden=7/5: 1.4 times 36 is 50.4, no whole number; write hidden=51"),
        ("llama", "hidden=37/36", {}, "needs hidden % heads == 0"),
        ("llama", "heads=7/6,hidden=7/6", {}, "7 heads over 3 kv_heads are not as many for each"),
        ("llama_gqa", "heads=1,kv_heads=3/2", {}, "leave some of the old 3 heads of a group without a place"),
        ("qwen3", "head_dim=3/2", {}, "--grow head_dim=3/2: rotary = head_dim / 2 would be 15/2, which is no whole size"),
        ("llama", "head_dim=4/3", {"rope": "spread"}, "--rope spread: cannot grow head_dim by 4/3; --rope theta can"),
        ("llama", "vocab=2", {}, "--grow vocab: 'vocab' is only padded, to less than twice its size"),
        ("mamba2", "heads=4/3", {}, "runs over all of them at once"),
    ],
)  # fmt: skip
def test_what_cannot_be(variant: str, grow: str, options: dict[str, Any], text: str, narrow: Narrow) -> None:
    assert text in refusal(narrow.path(variant), grow, **options)


def test_a_map_that_does_not_say_which_norm(narrow: Narrow, tmp_path: Path) -> None:
    text = "extends: llama\narchitecture: mine\nmatch: {model_type: [mine]}\nnorms: "
    own = tmp_path / "mine.yaml"
    own.write_text(text + "null\n")
    said = refusal(narrow.path("llama"), "hidden=7/6", map=str(own))
    assert (
        "a norm runs over 'hidden', and map 'mine' does not say whether it subtracts the mean ('norms', docs/maps.md)"
        in said
    )
    own.write_text(text + "rsm\n")
    assert "mine.yaml:4:8: 'rsm' is no norm; it is rms or layer (did you mean 'rms'?)" in refusal(
        narrow.path("llama"), "hidden=7/6", map=str(own)
    )
    own.write_text(text + "{hidden: rms, hiden: rms}\n")
    assert "'hiden' is no axis of this map (did you mean 'hidden'?)" in refusal(
        narrow.path("llama"), "hidden=7/6", map=str(own)
    )


def test_counts() -> None:
    spread = partial.Partial("axis", Fraction(8, 5), (partial.Segment(2, 1, 1), partial.Segment(3, 2, 1)))
    assert [list(spread.places(at)) for at in range(5)] == [[0], [1], [2, 3], [4, 5], [6, 7]]
    assert (spread.old, spread.whole, str(spread.spread)) == (5, 1, "sqrt(5)/(2 sqrt(2))")
    assert Copies(3, 4, kept=2, fill=Fill.MEAN).live == 2
