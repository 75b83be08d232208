"""The way back from more layers and from experts: what was only added goes again, and the dense model is there bit for bit.

What was trained is folded in numpy here, from the wide files alone: the mean of the copies of each slice, experts and all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_families
import gguf_oracle
import models
import numpy as np
import numpy.typing as npt
import pytest
import test_layer_growth
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_any_size import KNOWN
from test_collapse import command, config, differing, edited, shaken, tensors
from test_gguf_lossless import Tiny, write_tiny

from widen_cli.collapse import Folded, collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

Array = npt.NDArray[Any]
DOWN = "model.layers.{}.mlp.down_proj.weight"


def made(narrow: Path, wide: Path, **options: Any) -> Report:
    asked = {"scaling": "copy", "allow_approximate": True} | options
    asked["grow"] = models.by_factors(asked.get("grow"))
    return run(prepare(Options(str(narrow), str(wide), **asked)), lambda nbytes: None)


def back(wide: Path, narrow: Path, record: str | None = None, **options: Any) -> tuple[Folded, list[str]]:
    warnings: list[str] = []
    return collapse(Options(str(wide), str(narrow), **options), record, lambda nbytes: None, warnings.append), warnings


def saved(variant: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    return models.save(KNOWN[variant], folder, dtype)  # type: ignore[arg-type]


# Variant, type and options; with 2x no value is rounded, so that whole folders are compared.
LAYERS = [
    ("llama", torch.float32, {"depth": ("2x",), "factor": 2}),
    ("qwen3", torch.bfloat16, {"depth": ("+1@0",), "grow": "intermediate=2,heads=2,hidden=2,kv_heads=2"}),
    ("gemma3_text", torch.float32, {"depth": ("+1@end",)}),
    ("gpt2", torch.bfloat16, {"depth": ("+3",), "grow": "intermediate=145/144"}),
    ("t5", torch.float32, {"depth": ("encoder:+1", "decoder:2x")}),
    ("deepseek_v3", torch.float32, {"depth": ("+1@end",), "factor": 2}),
    ("llama", torch.float32, {"depth": ("0-1,0-1",), "factor": 2, "split": "uneven", "seed": 4}),
    ("llama", torch.bfloat16, {"depth": ("2x",), "grow": "intermediate=26/25", "fill": "random"}),
]
EXPERTS = [
    ("llama", torch.float32, {"experts": 4, "depth": ("+1@0",), "grow": "hidden=2"}),
    ("llama", torch.bfloat16, {"experts": 4, "slices": 2, "factor": 2, "layout": "tile"}),
    ("llama", torch.float32, {"experts": 6, "slices": 2, "factor": 2, "noise": -30.0, "seed": 3, "top_k": 4}),
    ("llama", torch.float32, {"experts": 4, "slices": 2, "grow": "hidden=2,intermediate=26/25", "fill": "random"}),
    ("qwen3", torch.bfloat16, {"experts": 4, "grow": "intermediate=2,hidden=2"}),
    ("qwen2", torch.float32, {"experts": 4, "slices": 2, "factor": 2, "dtype": "F64"}),  # a shared expert too
]


@pytest.mark.parametrize(("variant", "dtype", "options"), [*LAYERS, *EXPERTS])
def test_what_was_added_goes_again(variant: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    source = saved(variant, tmp_path / "narrow", dtype)
    report = made(source, tmp_path / "wide", **options)
    assert not verify(Options(str(source), str(tmp_path / "wide")), lambda nbytes: None).differences
    folded, warnings = back(tmp_path / "wide", tmp_path / "back", threads=2)
    assert (folded.moved, folded.inexact, folded.losses, warnings) == ([], (), (), [])
    assert differing(source, tmp_path / "back") == sorted(report.job.plan.dropped)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert list(tensors(source)) == list(tensors(tmp_path / "back"))
    dense = [name for name in tensors(source) if "mlp" in name and "norm" not in name]
    assert folded.experts == (frozenset(dense) if "experts" in options else frozenset())


def test_pieces_of_a_folder_and_a_pipe_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
    """Slices that stand side by side are written in order too, to a place that takes nothing else."""
    source = saved("llama", tmp_path / "narrow")
    made(source, tmp_path / "wide", experts=4, slices=2, factor=2, max_shard_size="100KB")
    back(tmp_path / "wide", tmp_path / "back", max_shard_size="30KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert differing(source, tmp_path / "back") == []
    made(source / "model.safetensors", tmp_path / "wide.safetensors", experts=4, slices=2, factor=2)
    back(tmp_path / "wide.safetensors", Path("-"))
    (tmp_path / "piped.safetensors").write_bytes(capfdbinary.readouterr().out)
    found, old = load_file(tmp_path / "piped.safetensors"), tensors(source)
    assert found.keys() == old.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in old.items())


# Trained.


def trained(model: Path, to: Path) -> dict[str, torch.Tensor]:
    """A few steps of AdamW in transformers, saved by it: without the record, as training loops leave it."""
    one = models.load(model, torch.float64)
    one.config._experts_implementation = "eager"
    optimizer = torch.optim.AdamW(one.parameters(), lr=3e-3)
    tokens = torch.arange(48).reshape(4, 12) * 7 % models.VOCAB
    for _ in range(3):
        optimizer.zero_grad()
        one(tokens, labels=tokens).loss.backward()
        optimizer.step()
    one.save_pretrained(to)
    with safe_open(to / "model.safetensors", "pt") as opened:
        assert "widen_ckpt" not in (opened.metadata() or {})
    return tensors(to)


@pytest.mark.parametrize("slices", [1, 2])
def test_trained_experts_are_folded_by_least_squares(slices: int, tmp_path: Path) -> None:
    """Each number of a slice is the mean of its copies over experts, rows and columns, times what a copy had been divided by."""
    source = saved("llama", tmp_path / "narrow", torch.float64)
    made(source, tmp_path / "wide", experts=4, slices=slices, factor=2)
    given = trained(tmp_path / "wide", tmp_path / "trained")
    folded, warnings = back(tmp_path / "trained", tmp_path / "back", record=str(tmp_path / "wide"))
    assert [text for text in warnings if "experts have moved apart in 6 tensors: the mean of trained experts" in text]
    found = tensors(tmp_path / "back")
    assert found.keys() == tensors(source).keys()
    # transformers writes what a Mixtral is trained with, which no LLaMA reads.
    assert config(tmp_path / "back").items() >= config(source).items()
    for layer in range(2):
        for number, part in ((1, "gate"), (3, "up"), (2, "down")):
            name = f"model.layers.{layer}.mlp.{part}_proj.weight"
            experts = [
                given[f"model.layers.{layer}.block_sparse_moe.experts.{one}.w{number}.weight"].numpy()
                for one in range(4)
            ]
            expected, apart, total = by_hand(experts, slices, down=number == 2)
            np.testing.assert_allclose(found[name], expected, rtol=1e-12, atol=1e-14 * np.abs(expected).max())
            assert apart > 0
            assert folded.distances[name].relative == pytest.approx((apart / total) ** 0.5, rel=1e-9)
            assert folded.distances[name].values == sum(one.size for one in experts)


def by_hand(experts: list[Array], slices: int, down: bool) -> tuple[Array, float, float]:
    """The dense weight; how far the experts are from what it makes of them, and all of them, as sums of squares."""
    # hidden and intermediate grow 2x; what reads two copies takes a half of each, and a slice's down projection G times that.
    factor = (slices if down else 1) / 2
    parts, apart = [], 0.0
    for number in range(slices):
        copies = np.stack(experts[number::slices])
        rows, columns = copies.shape[1] // 2, copies.shape[2] // 2
        mean = copies.reshape(-1, rows, 2, columns, 2).mean(axis=(0, 2, 4))
        apart += float(np.square(copies - mean.repeat(2, 0).repeat(2, 1)).sum())
        parts.append(mean / factor)
    return np.concatenate(parts, axis=1 if down else 0), apart, float(sum(np.square(one).sum() for one in experts))


def test_layers_that_have_learnt_to_write(tmp_path: Path) -> None:
    """They are left out, and the report says by how much that is wrong: the new weights beside those they were made of."""
    source, wide = saved("llama", tmp_path / "narrow", torch.float64), tmp_path / "wide"
    made(source, wide, depth=("2x",), factor=2)
    edited(wide, shaken)
    given = tensors(wide)
    folded, warnings = back(wide, tmp_path / "back")
    written = {
        name for layer in (1, 3) for name in (DOWN.format(layer), f"model.layers.{layer}.self_attn.o_proj.weight")
    }
    assert folded.silent.keys() == written
    for name, distance in folded.silent.items():
        new, old = given[name], given[name.replace("layers.1.", "layers.0.").replace("layers.3.", "layers.2.")]
        assert distance.relative == pytest.approx(float(new.norm() / old.norm()), rel=1e-9)
        assert distance.largest == pytest.approx(float(new.abs().max()), rel=1e-9)
    assert warnings == [
        f"4 weights that were added to write nothing write something now, such as '{min(written)}'; they are left out with all "
        "that was added with them"
    ]
    result = command("collapse", wide, tmp_path / "back", "--force", "--json")
    told = json.loads(result.stdout)
    assert told["undone"] == ["layers 4 -> 2"]
    assert told["added_to_write_nothing"].keys() == written
    assert "back: llama, layers 4 -> 2, hidden /2, " in result.stderr
    shown = command("collapse", wide, tmp_path / "back", "--force").stdout.splitlines()
    assert (
        "how far added weights are from writing nothing: |w| / |the weight they were made of|, and the largest" in shown
    )
    # What is left is folded as ever.
    up = given["model.layers.2.mlp.up_proj.weight"].numpy()
    mean = up.reshape(up.shape[0] // 2, 2, -1, 2).mean(axis=(1, 3)) * 2
    np.testing.assert_allclose(tensors(tmp_path / "back")["model.layers.1.mlp.up_proj.weight"], mean, rtol=1e-12)


def test_layers_that_stand_twice_are_averaged(tmp_path: Path) -> None:
    """As any copies, though the model of both never computed what that of one does."""
    source, wide = saved("llama", tmp_path / "narrow", torch.float64), tmp_path / "wide"
    made(source, wide, depth=("0-1,1",))
    edited(wide, shaken)
    folded, _ = back(wide, tmp_path / "back")
    given, found = tensors(wide), tensors(tmp_path / "back")
    one, two = (given[DOWN.format(layer)] for layer in (1, 2))
    torch.testing.assert_close(found[DOWN.format(1)], (one + two) / 2, rtol=1e-14, atol=0)
    apart = (one - two).norm() / 2**0.5 / torch.cat([one, two]).norm()
    assert folded.distances[DOWN.format(1)].relative == pytest.approx(float(apart), rel=1e-9)
    assert torch.equal(found[DOWN.format(0)], given[DOWN.format(0)])


# What cannot be.


def test_layers_that_are_gone(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "narrow")
    made(source, tmp_path / "wide", depth=("drop:0",))
    result = command("collapse", tmp_path / "wide", tmp_path / "back")
    assert (result.exit_code, result.stderr) == (
        1,
        f"{tmp_path}/wide: was made with --depth drop:0, which left out layers 0 of model.layers.*: nothing brings these back; go "
        "on with the model that it was made of\n",
    )
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("asked", [("--depth", "2x"), ("--experts", "4")])
def test_only_the_record_tells(asked: tuple[str, str], tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "narrow")
    made(source, tmp_path / "wide", factor=2, **{asked[0][2:]: ("2x",) if asked[1] == "2x" else 4})
    edited(tmp_path / "wide", lambda values: None, record=False)
    result = command("collapse", tmp_path / "wide", tmp_path / "back", "--factor", "2", *asked)
    assert result.stderr.splitlines()[-1] == (
        f"{tmp_path}/wide: was made with {' '.join(asked)}, and only its record tells what was made of what; give --record with the "
        "model as it was written then"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"config": {"auto_map": {"AutoModel": "other.Model"}}}, "config key 'auto_map'"),
        ({"added": ["vocab_size"]}, "config key 'vocab_size'"),
        ({"stacks": {"model.layers.*": {"layers": [0, 1, -1, -2]}}}, "the layers of model.layers.*"),
    ],
)
def test_a_record_of_what_nothing_makes(said: dict[str, Any], told: str, tmp_path: Path) -> None:
    """The narrow model is made anew once more, so that what was written by hand is not written on."""
    source, wide = saved("llama", tmp_path / "narrow"), tmp_path / "wide"
    made(source, wide, depth=("2x",), factor=2)
    file = wide / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    record = json.loads(metadata["widen_ckpt"])
    built = record["was"]["built"]
    for key, value in said.items():
        if key == "stacks":
            built[key]["model.layers.*"] |= value["model.layers.*"]
        else:
            built[key] = value if isinstance(value, list) else built[key] | value
    save_file(load_file(file), file, {**metadata, "widen_ckpt": json.dumps(record)})
    with pytest.raises(WidenError) as caught:
        back(wide, tmp_path / "back")
    assert str(caught.value) == (
        f"{wide}: its record speaks of {told}, which making it anew (--depth 2x) does not change so; give --record with the model as "
        "it was written then"
    )
    assert not (tmp_path / "back").exists()


# The guards.


def test_one_expert_that_is_off_shows(tmp_path: Path) -> None:
    """Every expert counts, also the last slice of the last copy."""
    source = saved("llama", tmp_path / "narrow", torch.float64)
    made(source, tmp_path / "wide", experts=4, slices=2)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edited(tmp_path / "wide", lambda values: values[name].view(-1)[-1:].add_(1.0))
    ((moved, distance),) = back(tmp_path / "wide", tmp_path / "back")[0].moved
    # One of two copies is 1 off: each is 1/2 from their mean.
    assert (moved, distance.largest) == (DOWN.format(1), pytest.approx(0.5, rel=1e-9))
    off = tensors(tmp_path / "back")[DOWN.format(1)] - tensors(source)[DOWN.format(1)]
    # A slice's down projection holds G = 2 times the weight.
    assert float(off[-1, -1]) == pytest.approx(0.25, rel=1e-9)
    assert int((off != 0).sum()) == 1


# GGUF.


@pytest.mark.parametrize(
    "options",
    [
        {"depth": ("2x",), "grow": "hidden=2x,intermediate=2x@1-2,heads=2x,kv_heads=2x"},
        {"depth": ("0-2,1-2",)},
        {"depth": ("+1@0",), "experts": 4},
        {"experts": 4, "factor": 2},
        {"experts": 4, "slices": 2, "factor": 2, "split": "uneven", "top_k": 4},
        {"experts": 4, "slices": 2, "top_k": 4, "grow": "hidden=2,intermediate=26/25", "fill": "random"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_ggufs_give_the_same_file(options: dict[str, Any], tmp_path: Path) -> None:
    source = gguf_families.write_family(test_layer_growth._llama(), tmp_path / "in.gguf")
    made(source, tmp_path / "wide.gguf", **options)
    folded, warnings = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert (folded.moved, folded.inexact, warnings) == ([], (), [])
    assert source.read_bytes() == (tmp_path / "back.gguf").read_bytes()


@pytest.mark.parametrize("slices", [1, 2])
def test_quantised_experts(slices: int, tmp_path: Path) -> None:
    """Their blocks come back as long as they are alike, and as numbers ever after."""
    source, wide = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1)), tmp_path / "wide.gguf"
    made(source, wide, experts=4, slices=slices, top_k=4, factor=2, scaling="sum")
    back(wide, tmp_path / "back.gguf")
    assert source.read_bytes() == (tmp_path / "back.gguf").read_bytes()
    stored = gguf_oracle.read(wide, "r+")
    stored.tensors["blk.0.ffn_down_exps.weight"].rows[..., -2:] ^= 1
    stored.data.flush()
    back(wide, tmp_path / "again.gguf")
    stored.tensors["blk.0.ffn_down_exps.weight"].rows[0, -1] ^= 1
    stored.data.flush()
    with pytest.raises(WidenError) as caught:
        back(wide, tmp_path / "moved.gguf")
    assert str(caught.value) == (
        "tensor 'blk.0.ffn_down_exps.weight': its copies have moved apart, and Q8_0 as it is stored has no mean; "
        "give --dequantize f32 (or f16), which folds the numbers"
    )
    folded, _ = back(wide, tmp_path / "numbers.gguf", dequantize="F32")
    assert [name for name, _ in folded.moved] == ["blk.0.ffn_down.weight"]
    old, new = (gguf_oracle.read(tmp_path / name).tensors for name in ("in.gguf", "numbers.gguf"))
    np.testing.assert_array_equal(new["blk.0.ffn_up.weight"].values(), old["blk.0.ffn_up.weight"].values())


def test_a_head_that_was_untied_beside_shared_experts(tmp_path: Path) -> None:
    """A qwen2 with a tied head becomes a qwen2moe with --untie, and stays untied."""
    source = gguf_families.write("qwen2", tmp_path / "in.gguf")
    made(source, tmp_path / "wide.gguf", experts=4, slices=2, top_k=4, factor=2, untie=True)
    folded, warnings = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert len(folded.silent) == 2
    assert not any(distance.apart for distance in folded.silent.values())
    assert len(warnings) == 1
    old, new = (gguf_oracle.read(tmp_path / name) for name in ("in.gguf", "back.gguf"))
    assert list(old.pairs.items()) == list(new.pairs.items())
    assert new.tensors.keys() - old.tensors.keys() == {"output.weight"}
    assert all(np.array_equal(tensor.rows, new.tensors[name].rows) for name, tensor in old.tensors.items())
