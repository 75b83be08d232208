"""The way back: what was widened comes back bit for bit, and what was trained since is folded by least squares.

Nothing here takes the tool's word for where copies stand: files are compared with those that were widened, folds with
numpy's lstsq on matrices built from the law, and with gradients that PyTorch makes of both models.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_families
import gguf_oracle
import models
import numpy as np
import numpy.typing as npt
import pytest
import test_adapters
import test_fp8
import test_gguf_families
import test_gguf_rotary
import torch
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_families import FAMILIES
from test_gguf_lossless import Tiny, write_tiny

import widen_cli
from widen_cli.cli import cli
from widen_cli.collapse import Folded, collapse
from widen_cli.collapse.average import folded as folded_values
from widen_cli.collapse.average import mean_of_copies
from widen_cli.convert import prepare
from widen_cli.demo import make_checkpoint
from widen_cli.dimensions import Copies, Growth, Laid, inverted
from widen_cli.dtypes import STORED
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.places import places
from widen_cli.scales import Scale
from widen_cli.transform import Cast, Counts, widened_rows
from widen_cli.writing import run

Array = npt.NDArray[Any]
UP = "model.layers.1.mlp.up_proj.weight"


def widened(narrow: Path, wide: Path, **options: Any) -> Report:
    if "grow" not in options:
        options.setdefault("factor", 2)
    else:
        options["grow"] = models.by_factors(options["grow"])
    return run(prepare(Options(str(narrow), str(wide), **options)), lambda nbytes: None)


def back(wide: Path, narrow: Path, record: str | None = None, **options: Any) -> Folded:
    """Folds without a warning."""
    warnings: list[str] = []
    folded = collapse(Options(str(wide), str(narrow), **options), record, lambda nbytes: None, warnings.append)
    assert [
        text
        for text in warnings
        if not re.search("left out|copied unchanged|tokenizer|what --factor made of its heads", text)
    ] == []
    return folded


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


def tensors(model: Path) -> dict[str, torch.Tensor]:
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def differing(one: Path, other: Path) -> list[str]:
    """The tensors that are not the same to the last bit, and the config values that are not equal."""
    old, new = tensors(one), tensors(other)
    names = [
        name
        for name in sorted(old.keys() | new.keys())
        if name not in old
        or name not in new
        or (old[name].dtype, old[name].shape) != (new[name].dtype, new[name].shape)
        or bits(old[name]) != bits(new[name])
    ]
    before, after = config(one), config(other)
    return names + [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "narrow")
    return tmp_path / "narrow"


def edited(model: Path, change: Callable[[dict[str, torch.Tensor]], None], record: bool = True) -> None:
    """Changes tensors in a model's file; without its record if that is said, as training does."""
    file = model / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() if record else {"format": "pt"}
    changed = load_file(file)
    change(changed)
    save_file(changed, file, metadata)


# Bit for bit.

# Variants that have something of their own: packed and numbered heads, experts, ties, offsets, latents, sections, added and
# dropped config keys, list-valued keys; each with a growth and a mode.
ROUND_TRIPS = {
    "bert": ("copy", "hidden=2,intermediate=3,heads=2", None),
    "bert_mlm": ("copy", "factor=2", None),
    "gpt2": ("quiet", "factor=2", None),
    "gpt2_inner": ("sum", "factor=4", None),
    "llama": ("orthogonal", "factor=4", None),
    "llama_tied": ("orthogonal", "factor=2", None),
    "llama_headdim": ("quiet", "hidden=2,intermediate=3,heads=4,kv_heads=2", None),
    "llama3_rope": ("copy", "head_dim=2", "theta"),
    "mistral": ("sum", "hidden=2,head_dim=4", "spread"),
}


def cases() -> Iterator[Any]:
    """For every family one of its variants in turn, in a mode that it has."""
    modes = ("copy", "sum", "quiet", "orthogonal")
    for number, family in enumerate(FAMILIES[::2]):
        # A tie rules out modes that are written down only where test_families meets them.
        variants = [name for name in family.variants if not name.endswith("_tied")]
        variant = variants[number % len(variants)]
        # What a mode refuses is written down for what test_families runs.
        growth = family.growths[0] if variant == variants[0] and family.growths else "factor=2"
        exact = [mode for mode in modes if family.refusal(variant, mode, growth) is None]
        if exact:
            mode = exact[number % len(exact)] if variant == variants[0] else exact[0]
            yield pytest.param(family.variants[variant], mode, growth, None, id=f"{variant}-{mode}-{growth}")
    for name, (mode, growth, rope) in ROUND_TRIPS.items():
        yield pytest.param(models.VARIANTS[name], mode, growth, rope, id=f"{name}-{mode}-{growth}-{rope}")


@pytest.mark.parametrize(("variant", "mode", "growth", "rope"), list(cases()))
def test_what_was_widened_comes_back(
    variant: models.Variant, mode: str, growth: str, rope: str | None, tmp_path: Path
) -> None:
    source = tmp_path / "narrow"
    models.build(variant, torch.float32).save_pretrained(source)
    asked = {"factor": int(growth[7:])} if growth.startswith("factor=") else {"grow": growth}
    report = widened(source, tmp_path / "wide", scaling=mode, rope=rope, **asked)
    folded = back(tmp_path / "wide", tmp_path / "back")
    rounded = {tensor.source.name for tensor in report.job.plan.tensors if tensor.exactness == "rounds"}
    assert set(folded.inexact) == rounded
    assert set(differing(source, tmp_path / "back")) <= rounded | set(report.job.plan.dropped)
    assert folded.moved == []
    old, new = tensors(source), tensors(tmp_path / "back")
    for name in rounded:
        torch.testing.assert_close(new[name], old[name], rtol=3e-7, atol=0)
    # Powers of two are exact everywhere, but for the root that goes into larger heads' keys.
    assert len(rounded) < len(new) / 2 or mode == "orthogonal" or "=3" in growth
    assert len(folded.distances) > 0


MODES = ("copy", "sum", "quiet")


@pytest.mark.parametrize("number", range(len(gguf_families.FAMILIES)), ids=list(gguf_families.FAMILIES))
def test_every_gguf_map_gives_the_same_file(number: int, tmp_path: Path) -> None:
    name = list(gguf_families.FAMILIES)[number]
    source, mode = gguf_families.write(name, tmp_path / "in.gguf"), MODES[number % 3]
    grow = {"grow": test_gguf_families.MIXED.get(name, "hidden=2,intermediate=2,heads=2")} if number % 2 else {}
    report = widened(source, tmp_path / "wide.gguf", scaling=mode, **grow)
    folded = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert folded.moved == []
    same_gguf(source, tmp_path / "back.gguf", {name for name, counts in report.counts.items() if counts.rounded})


def same_gguf(one: Path, other: Path, rounded: set[str]) -> None:
    """Whole files are compared, where nothing was rounded; else everything but the values that were."""
    if not rounded:
        assert one.read_bytes() == other.read_bytes()
        return
    old, new = gguf_oracle.read(one), gguf_oracle.read(other)
    assert list(old.pairs.items()) == list(new.pairs.items())
    assert list(old.tensors) == list(new.tensors)
    for name, tensor in old.tensors.items():
        found = new.tensors[name]
        assert (found.kind, found.shape) == (tensor.kind, tensor.shape)
        if name in rounded:
            np.testing.assert_allclose(found.values(), tensor.values(), rtol=2e-3)
        else:
            assert np.array_equal(found.rows, tensor.rows), name


@pytest.mark.parametrize("way", ["spread", "theta", "frequencies"])
@pytest.mark.parametrize("name", ["llama", "llama-freqs", "llama-scales"])
def test_tensors_that_the_conversion_made_go_again(name: str, way: str, tmp_path: Path) -> None:
    """Divisors of frequencies, and scalars that take what blocks would round: made, or multiplied where they were stored."""
    family = replace(test_gguf_rotary.OWN[name], sizes=replace(test_gguf_rotary.LLAMA.sizes, hidden=64, inner=96))
    source = test_gguf_rotary.write(tmp_path / "in.gguf", family, {r"attn_[qk]\.weight": Kind.Q4_0})
    report = widened(source, tmp_path / "wide.gguf", grow="head_dim=2", rope=way, scaling="copy")
    made = {tensor.source.name for tensor in report.job.plan.tensors if tensor.made}
    assert ("rope_freqs.weight" in made) == (way == "frequencies" and name != "llama-freqs")
    assert any(made_name.endswith("attn_k.scale") for made_name in made) == (name != "llama-scales")
    folded = back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert not made & folded.counts.keys()
    same_gguf(source, tmp_path / "back.gguf", set(folded.inexact))
    # What was multiplied by a root comes back but for its last place: biases, and scalars that were there before.
    assert all(re.search(r"attn_k\.(bias|scale)|rope_freqs", name) for name in folded.inexact)
    for key in folded.inexact:
        old, new = (gguf_oracle.read(tmp_path / file).tensors[key].values() for file in ("in.gguf", "back.gguf"))
        np.testing.assert_allclose(new, old, rtol=2e-7)


QUANTISED = [
    kind for kind in Kind if kind.name in widen_cli.blocks.BLOCK_TYPES and kind.name not in ("Q8_K", "Q8_1", "Q1_0")
]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_block_type_gives_the_same_file(kind: Kind, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(kind,), layers=1))
    for scaling in ("sum", "quiet"):
        report = widened(source, tmp_path / f"{scaling}.gguf", scaling=scaling)
        back(tmp_path / f"{scaling}.gguf", tmp_path / f"{scaling}-back.gguf")
        rounded = {name for name, counts in report.counts.items() if counts.rounded}
        same_gguf(source, tmp_path / f"{scaling}-back.gguf", rounded)


HEADS_OF_24 = Tiny(hidden=96, ffn=96, heads=4, kv_heads=2, head=24, layers=1)


@pytest.mark.parametrize(
    ("tiny", "kind", "layout", "new"),
    [
        (HEADS_OF_24, Kind.F32, "interleave", Kind.Q8_0),  # blocks of 32, in which heads of 24 are laid axis after axis
        (HEADS_OF_24, Kind.F32, "interleave", Kind.TQ2_0),  # blocks of 256, which narrow rows of 96 do not fill
        (Tiny(layers=1), Kind.IQ2_XS, "tile", Kind.F32),  # in numbers copies stand side by side
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_copies_are_where_they_were_put_whatever_the_types_are_since(
    tiny: Tiny, kind: Kind, layout: str, new: Kind, tmp_path: Path
) -> None:
    if new is Kind.TQ2_0:
        tiny = replace(tiny, hidden=128, ffn=128, head=32)
    source = write_tiny(tmp_path / "in.gguf", replace(tiny, kinds=(kind,)))
    report = widened(source, tmp_path / "wide.gguf", scaling="sum")
    assert report.job.plan.layout == layout
    wide = gguf_oracle.retyped(tmp_path / "wide.gguf", tmp_path / "new.gguf", new)
    if new is not Kind.F32:
        with pytest.raises(
            WidenError, match=f"'.*': {new.name}: .*; give --dequantize f32 .or f16., which folds the n"
        ):
            back(wide, tmp_path / "back.gguf")
    folded = back(wide, tmp_path / "back.gguf", dequantize="F32")
    old, found = gguf_oracle.read(source), gguf_oracle.read(tmp_path / "back.gguf")
    for name, tensor in old.tensors.items():
        values = found.tensors[name].values().astype(np.float64)
        if new is Kind.TQ2_0:
            # Three values for all of 256 numbers: their signs are left.
            assert np.vdot(values, tensor.values()) > 0.5 * np.linalg.norm(values) * np.linalg.norm(tensor.values())
        else:
            np.testing.assert_allclose(values, tensor.values(), atol=0 if new is Kind.F32 else 0.03)
    assert new is not Kind.F32 or folded.moved == []
    # What nothing records is taken by the types, and told.
    plain = tmp_path / "plain.gguf"
    data = wide.read_bytes()
    plain.write_bytes(data.replace(b"widen_ckpt.record", b"another_k.record_"))
    result = command(
        "collapse", plain, tmp_path / "told.gguf", "--factor", "2", "--scaling", "sum", "--dequantize", "f32"
    )
    assert ("nothing records how its copies are laid; by the types stored now" in result.stderr) == (new is Kind.Q8_0)


@pytest.mark.parametrize("name", ["llama", "llama-scales"])
@pytest.mark.parametrize("before", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_factors_are_where_they_were_put_whatever_the_types_are_since(name: str, before: Kind, tmp_path: Path) -> None:
    """Blocks leave a root to a scalar, numbers take it themselves."""
    family = replace(test_gguf_rotary.OWN[name], sizes=replace(test_gguf_rotary.LLAMA.sizes, hidden=64, inner=96))
    kinds = {} if before is Kind.F32 else {r"attn_[qk]\.weight": before}
    source = test_gguf_rotary.write(tmp_path / "in.gguf", family, kinds)
    report = widened(source, tmp_path / "wide.gguf", grow="head_dim=2", scaling="copy")
    assert bool(report.job.plan.scalars) == (before is not Kind.F32)
    new = Kind.Q8_0 if before is Kind.F32 else Kind.F32
    wide = gguf_oracle.retyped(tmp_path / "wide.gguf", tmp_path / "new.gguf", new)
    back(wide, tmp_path / "back.gguf", dequantize="F32")
    old, found = gguf_oracle.read(source), gguf_oracle.read(tmp_path / "back.gguf")
    assert old.tensors.keys() == found.tensors.keys()
    for each, tensor in old.tensors.items():
        values = tensor.values().reshape(tensor.shape)
        np.testing.assert_allclose(found.tensors[each].values().reshape(tensor.shape), values, rtol=2e-7, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_element_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Zeros of both signs, infinities and subnormal numbers among them; where bits were lost in widening, it was told of."""
    make_checkpoint(tmp_path / "narrow")

    def cast(values: dict[str, torch.Tensor]) -> None:
        for name in values:
            values[name] = values[name].to(dtype)
        odd = torch.tensor([0.0, -0.0, 2.0**-9, -(2.0**-7)])
        odd = torch.cat([odd, *([torch.tensor([float("inf"), -float("inf")])] if dtype.itemsize > 1 else [])])
        values[UP].view(-1)[: len(odd)] = odd.to(dtype)

    edited(tmp_path / "narrow", cast)
    for number, mode in enumerate(("copy", "sum")):
        report = widened(tmp_path / "narrow", tmp_path / f"wide{number}", scaling=mode)
        folded = back(tmp_path / f"wide{number}", tmp_path / f"back{number}")
        lost = {name for name, counts in report.counts.items() if counts.rounded}
        assert set(differing(tmp_path / "narrow", tmp_path / f"back{number}")) <= lost
        assert folded.moved == []
        assert lost <= set(folded.uncertain)
        # Half of the smallest number of a type is none of its numbers; sum halves no matrix.
        assert bool(lost) == (mode == "copy" and dtype in (torch.float16, torch.float8_e4m3fn))


def test_block_scaled_fp8(tmp_path: Path) -> None:
    source = test_fp8.quantised(tmp_path / "narrow")
    for scaling in ("copy", "sum"):
        test_fp8.widened(source, tmp_path / scaling, "hidden=2,intermediate=2,heads=2,kv_heads=2", scaling=scaling)
        back(tmp_path / scaling, tmp_path / f"{scaling}-back")
        assert differing(source, tmp_path / f"{scaling}-back") == []
    name = "model.layers.0.mlp.up_proj.weight"
    for spoiled in (name, f"{name}_scale_inv"):
        edited(tmp_path / "copy", lambda values, spoiled=spoiled: values[spoiled].view(-1)[3:4].fill_(0.75))  # type: ignore[misc]
        with pytest.raises(WidenError) as caught:
            back(tmp_path / "copy", tmp_path / "moved")
        assert re.fullmatch(
            f"tensor '{name}(_scale_inv)?': its copies have moved apart, and F(8_E4M3|32) as it is stored has no mean; "
            "dequantise the model first",
            str(caught.value),
        )
        assert not (tmp_path / "moved").exists()


def test_the_types_of_the_narrow_model_come_back(narrow: Path, tmp_path: Path) -> None:
    """A conversion to a type that holds every value is undone, and a factor rounded there does not matter here."""
    edited(narrow, lambda values: values.update({UP: values[UP].to(torch.bfloat16)}))
    widened(narrow, tmp_path / "wide", dtype="F64", factor=3, scaling="orthogonal")
    back(tmp_path / "wide", tmp_path / "back")
    assert differing(narrow, tmp_path / "back") == []
    back(tmp_path / "wide", tmp_path / "asked", dtype="F32")
    assert {tensor.dtype for tensor in tensors(tmp_path / "asked").values()} == {torch.float32}
    assert tensors(tmp_path / "asked")[UP].equal(tensors(narrow)[UP].float())


def test_parts_single_files_and_a_model_widened_twice(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", max_shard_size="150KB", scaling="copy")
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 2
    back(tmp_path / "wide", tmp_path / "back", max_shard_size="60KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert differing(narrow, tmp_path / "back") == []
    widened(tmp_path / "wide", tmp_path / "wider", factor=4, scaling="copy")
    back(tmp_path / "wider", tmp_path / "again")
    assert differing(tmp_path / "wide", tmp_path / "again") == []
    back(tmp_path / "again", tmp_path / "first")
    assert differing(narrow, tmp_path / "first") == []
    file = tmp_path / "wide.safetensors"
    widened(narrow / "model.safetensors", file, scaling="copy")
    back(file, tmp_path / "back.safetensors")
    assert tensors(tmp_path / "back.safetensors").keys() == tensors(narrow).keys()
    assert json.loads((tmp_path / "back.config.json").read_text()) == config(narrow)
    with safe_open(tmp_path / "back.safetensors", "np") as opened:
        assert "widen_ckpt" not in opened.metadata()


def test_the_same_bytes_with_any_number_of_threads(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide")
    edited(tmp_path / "wide", shaken)
    found = []
    for threads in (1, 4):
        folded = back(tmp_path / "wide", tmp_path / str(threads), threads=threads)
        found.append(((tmp_path / str(threads) / "model.safetensors").read_bytes(), folded.distances))
    assert found[0] == found[1]
    assert len(folded.moved) == len(folded.distances)


def shaken(values: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    for value in values.values():
        value += torch.randn(value.shape, generator=generator, dtype=torch.float64) * 1e-3


# Least squares.


def repeats(size: int, copies: int, once: bool = False) -> Array:
    """Where the copies of an axis stand: side by side, or the first of them alone."""
    return np.kron(np.eye(size), np.eye(copies)[:, :1] if once else np.ones((copies, 1)))


def tiny(folder: Path) -> Path:
    """A llama in float64 whose matrices are small enough to be written out as systems of equations."""
    h, q, kv, inner = 4, 4, 2, 3
    shapes = {
        "model.embed_tokens.weight": (5, h),
        "model.layers.0.input_layernorm.weight": (h,),
        "model.layers.0.self_attn.q_proj.weight": (q, h),
        "model.layers.0.self_attn.k_proj.weight": (kv, h),
        "model.layers.0.self_attn.v_proj.weight": (kv, h),
        "model.layers.0.self_attn.o_proj.weight": (h, q),
        "model.layers.0.post_attention_layernorm.weight": (h,),
        "model.layers.0.mlp.gate_proj.weight": (inner, h),
        "model.layers.0.mlp.up_proj.weight": (inner, h),
        "model.layers.0.mlp.down_proj.weight": (h, inner),
        "model.norm.weight": (h,),
        "lm_head.weight": (5, h),
    }
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})
    values = {
        "model_type": "llama",
        "hidden_size": h,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 5,
    }
    values |= {"intermediate_size": inner, "num_hidden_layers": 1, "rms_norm_eps": 1e-3, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(values | {"head_dim": 2}))
    return folder


def systems(quiet: bool, head_dim: int) -> dict[str, Array]:
    """A of y = A x for each tensor, where hidden grows 2x, the FFN 3x, 2 heads and 1 kv head 2x, the head size of 2 as said.

    Activations keep their scale, so what reads r copies takes 1/r (copy), or their first alone (quiet, which also halves what
    norms put out). New rotary pairs of the keys are zero and old ones move apart. The root that larger heads put into
    queries and keys is left out here.
    """
    hidden, inner = repeats(4, 2), repeats(3, 3)
    normed = hidden * (1 if quiet else 0.5)
    # A head of 2 has one rotary pair, of a first and a second half.
    query = np.kron(repeats(2, 2), repeats(2, head_dim))
    key = np.kron(repeats(1, 2), repeats(2, head_dim, once=True))
    value = np.kron(repeats(1, 2), repeats(2, head_dim))
    attended = np.kron(repeats(2, 2, once=quiet), repeats(2, head_dim, once=quiet)) / (1 if quiet else 2 * head_dim)
    acted = repeats(3, 3, once=quiet) / (1 if quiet else 3)
    layer = "model.layers.0"
    matrices = {
        "model.embed_tokens.weight": (np.eye(5), hidden),
        f"{layer}.self_attn.q_proj.weight": (query, normed),
        f"{layer}.self_attn.k_proj.weight": (key, normed),
        f"{layer}.self_attn.v_proj.weight": (value, normed),
        f"{layer}.self_attn.o_proj.weight": (hidden, attended),
        f"{layer}.mlp.gate_proj.weight": (inner, normed),
        f"{layer}.mlp.up_proj.weight": (inner, normed),
        f"{layer}.mlp.down_proj.weight": (hidden, acted),
        "lm_head.weight": (np.eye(5), normed),
    }
    found = {name: np.kron(rows, columns) for name, (rows, columns) in matrices.items()}
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
    return found | {f"{name}.weight": hidden * (0.5 if quiet else 1) for name in norms}


@pytest.mark.parametrize("head_dim", [1, 2])
@pytest.mark.parametrize("mode", ["copy", "quiet"])
def test_a_trained_model_is_folded_by_least_squares(mode: str, head_dim: int, tmp_path: Path) -> None:
    source, wide = tiny(tmp_path / "narrow"), tmp_path / "wide"
    widened(source, wide, grow=f"hidden=2,intermediate=3,heads=2,kv_heads=2,head_dim={head_dim}", scaling=mode)
    matrices, old, made = systems(mode == "quiet", head_dim), tensors(source), tensors(wide)
    assert matrices.keys() == old.keys()
    for name in matrices:
        # One factor is the tool's: the root that grown heads put into queries and keys.
        by = float(np.linalg.norm(made[name])) / float(np.linalg.norm(matrices[name] @ old[name].numpy().reshape(-1)))
        matrices[name] *= by
        np.testing.assert_allclose(matrices[name] @ old[name].numpy().reshape(-1), made[name].reshape(-1), rtol=1e-12)
        assert by == pytest.approx(1) or (head_dim == 2 and ("q_proj" in name or "k_proj" in name))
    edited(wide, shaken)
    folded, given = back(wide, tmp_path / "back"), tensors(wide)
    for name, tensor in tensors(tmp_path / "back").items():
        y = given[name].numpy().reshape(-1)
        expected, *_ = np.linalg.lstsq(matrices[name], y, rcond=None)
        np.testing.assert_allclose(tensor.reshape(-1), expected, rtol=1e-11, atol=1e-13)
        apart = y - matrices[name] @ expected
        assert folded.distances[name].relative == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(y), rel=1e-9)
        assert folded.distances[name].largest == pytest.approx(np.abs(apart).max(), rel=1e-9)
        assert folded.distances[name].values == y.size


def random_growth(draw: np.random.Generator, depth: int = 2) -> Growth:
    """A tree of repeats, zeros, parts and factors."""
    if depth and draw.random() < 0.4:
        return Laid(tuple(random_growth(draw, depth - 1) for _ in range(int(draw.integers(1, 4)))))
    inner = random_growth(draw, depth - 1) if depth and draw.random() < 0.6 else None
    scale = Scale.of(int(draw.integers(1, 4))) ** int(draw.choice([-1, 1])) if inner is None else Scale()
    copies = int(draw.integers(1, 4))
    kept = int(draw.integers(0, copies))
    return Copies(int(draw.integers(1, 4)), copies, bool(draw.random() < 0.3), scale, inner, kept)


@pytest.mark.parametrize("seed", range(12))
def test_any_growth_is_folded_by_least_squares(seed: int) -> None:
    """Trees that no map makes too; offsets, and parts with different numbers of copies in both dimensions."""
    draw, wide = np.random.default_rng(seed), STORED["F64"]
    trees, offset = (random_growth(draw), random_growth(draw)), seed % 2
    shape = tuple(tree.old for tree in trees)

    def forward(values: Array, offset: int) -> Array:
        bits = widened_rows(values[None], trees, Scale(), Cast(wide, wide, offset), Counts())
        return bits.view(np.float64)[0]

    # Without an offset it is linear, so the images of unit vectors are the columns of A.
    columns = [forward(unit.reshape(shape), 0).reshape(-1) for unit in np.eye(shape[0] * shape[1])]
    matrix = np.stack(columns, axis=1)
    given = forward(draw.normal(size=shape), offset)
    given += draw.normal(size=given.shape) * 0.1
    mean = mean_of_copies(given, tuple(map(places, trees)), offset)
    rows = replace(mean, first=mean.first[None], means=None if mean.means is None else mean.means[None])
    inverse = tuple(map(inverted, trees))
    mine = folded_values(rows, inverse, Scale(), wide, wide, offset, Counts()).view(np.float64)
    expected, *_ = np.linalg.lstsq(matrix, given.reshape(-1) + offset, rcond=None)
    np.testing.assert_allclose(mine.reshape(-1), expected - offset, rtol=1e-10, atol=1e-12)
    apart = given.reshape(-1) + offset - matrix @ expected
    assert np.sqrt(mean.distance.apart) == pytest.approx(np.linalg.norm(apart), abs=1e-12)
    assert mean.distance.values == given.size


def test_a_step_of_training_is_the_narrow_gradient(tmp_path: Path) -> None:
    """With y = A x and one function, the narrow gradient is the transpose of A times the wide one, so a step of -g in the wide
    model is one of -g / (n a**2) in the fold, of n copies with factor a."""
    source = tmp_path / "narrow"
    models.build("llama", torch.float64).save_pretrained(source)
    report = widened(source, tmp_path / "wide", scaling="copy", grow="hidden=2,intermediate=3,heads=2,kv_heads=2")
    rate, gradients = 1e-2, {}
    for name in ("narrow", "wide"):
        model = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64).eval()
        tokens = torch.arange(24).reshape(2, 12) % models.VOCAB
        model(tokens, labels=tokens).loss.backward()
        gradients[name] = {key: value.grad for key, value in model.named_parameters()}

    def step(values: dict[str, torch.Tensor]) -> None:
        for key, value in values.items():
            value -= rate * gradients["wide"][key]

    edited(tmp_path / "wide", step, record=False)
    folded = collapse(
        Options(str(tmp_path / "wide"), str(tmp_path / "back"), scaling="copy", grow=report_growth(report)),
        None,
        lambda nbytes: None,
        lambda text: None,
    )
    assert not folded.recorded
    old, new = tensors(source), tensors(tmp_path / "back")
    plans = {plan.source.name: plan for plan in report.job.plan.tensors}
    for name, tensor in new.items():
        plan = plans[name]
        (scale,) = plan.scales
        copies = np.prod([growth.new // growth.old for growth in plan.growth or ()])
        expected = old[name] - rate * gradients["narrow"][name] / (float(scale) ** 2 * float(copies))
        moved = (expected - old[name]).abs().max()
        assert moved > 1e-9, name
        torch.testing.assert_close(tensor, expected, rtol=0, atol=float(moved) * 1e-4)  # norms run in float32
    # By symmetry copies have one gradient, but those of a kv head, each of which serves another of the old heads.
    apart = {name for name, distance in folded.moved if distance.relative > 1e-9}
    assert apart == {name for name in new if "k_proj" in name or "v_proj" in name}


def report_growth(report: Report) -> str:
    plan = report.job.plan
    return ",".join(f"{axis}={plan.factors[axis]}x" for axis in plan.axes)


# What nothing records.


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("llama", {"factor": 2, "scaling": "copy"}),
        ("llama3_rope", {"grow": "head_dim=2", "scaling": "copy", "rope": "theta"}),
        ("gpt2", {"factor": 4, "scaling": "sum"}),
        ("bert_classification", {"factor": 2, "scaling": "copy"}),
    ],
)
def test_without_a_record(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    """As training leaves it: the config is divided, epsilons and bases taken back by the plan."""
    source = tmp_path / "narrow"
    models.build(variant, torch.float32).save_pretrained(source)
    report = widened(source, tmp_path / "wide", **options)
    edited(tmp_path / "wide", lambda values: None, record=False)
    # Of GPT-2 and BERT a factor alone is told with a doubt (test_a_model_that_was_trained_in_another_type).
    told = options if variant.startswith("llama") else {"grow": report_growth(report), "scaling": options["scaling"]}
    folded = back(tmp_path / "wide", tmp_path / "back", **told)
    found = set(differing(source, tmp_path / "back"))
    # Keys that the conversion added stay: nothing says that they were not there.
    assert found <= {*folded.inexact, *(config(tmp_path / "wide").keys() - config(source).keys())}
    before = models.outputs(source, torch.float64)
    assert models.relative_error(before, models.outputs(tmp_path / "back", torch.float64)) < 1e-6


def test_a_base_that_two_ways_may_have_left(tmp_path: Path) -> None:
    """10000 to the fourth may be one that was raised, or one that was left since its own fourth power leaves float32."""
    source, wide = tmp_path / "narrow", tmp_path / "wide"
    models.build("llama", torch.float64).save_pretrained(source)
    widened(source, wide, grow="head_dim=4x", scaling="copy")
    edited(wide, lambda values: None, record=False)
    with pytest.raises(WidenError) as refused:
        back(wide, tmp_path / "back", grow="head_dim=4x", scaling="copy")
    doubt = (
        "rope_parameters.rope_theta is 1e+16, which --rope theta may have made, or --rope spread left; say which it was"
    )
    assert str(refused.value) == f"{wide / 'config.json'}: {doubt}"
    folded = back(wide, tmp_path / "back", grow="head_dim=4x", scaling="copy", rope="theta")
    assert not folded.moved
    assert set(differing(source, tmp_path / "back")) <= {*folded.inexact, "head_dim"}


def test_what_torch_saved(narrow: Path, tmp_path: Path) -> None:
    """A state dict of a training loop, transposed views and all."""
    widened(narrow, tmp_path / "wide", scaling="sum")
    state = {
        name: value.t().contiguous().t() if value.dim() == 2 else value
        for name, value in tensors(tmp_path / "wide").items()
    }
    (tmp_path / "wide" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "wide" / "pytorch_model.bin")
    back(tmp_path / "wide", tmp_path / "back", factor=2, scaling="sum")
    assert differing(narrow, tmp_path / "back") == []


def test_the_record_of_the_model_as_it_was(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", scaling="sum")
    (tmp_path / "trained").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "trained" / name).write_bytes((tmp_path / "wide" / name).read_bytes())
    edited(tmp_path / "trained", lambda values: None, record=False)
    result = command("collapse", tmp_path / "trained", tmp_path / "back")
    assert (result.exit_code, result.stderr) == (
        1,
        f"{tmp_path}/trained: does not record how it was widened; say how, as for the conversion, such as --factor 2, "
        "or give --record with the model as it was written then\n",
    )
    back(tmp_path / "trained", tmp_path / "back", record=str(tmp_path / "wide"))
    assert differing(narrow, tmp_path / "back") == []
    result = command("collapse", tmp_path / "trained", tmp_path / "other", "--record", narrow)
    assert result.stderr == f"--record {narrow}: does not record how it was made; give its options instead\n"
    warned = command("collapse", tmp_path / "trained", tmp_path / "guessed", "--factor", "2")
    assert (
        f"warning: {tmp_path}/trained: nothing records its scaling, taken as orthogonal; say --scaling if it was another\n"
        in warned.stderr
    )


def test_a_model_that_was_trained_in_another_type(tmp_path: Path) -> None:
    """In 32 bits a factor makes BERT's heads larger, in fewer more; the record knows what it was."""
    narrow, wide, trained = tmp_path / "narrow", tmp_path / "wide", tmp_path / "trained"
    models.save("bert", narrow)
    widened(narrow, wide)
    shutil.copytree(wide, trained)
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in tensors(wide).items()}
    save_file(halved, trained / "model.safetensors", {"format": "pt"})
    back(trained, tmp_path / "back", record=str(wide), dtype="F32")
    assert config(tmp_path / "back") == config(narrow)
    found = tensors(tmp_path / "back")
    for name, tensor in tensors(narrow).items():
        torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=0)

    refused = command("collapse", trained, tmp_path / "guessed", "--factor", "2")
    assert (refused.exit_code, refused.stderr) == (
        1,
        f"{trained}/config.json: num_attention_heads is 3, no multiple of the 2 that heads grows by; this model was not "
        "widened so, or stored in other types: then say --grow instead of --factor\n",
    )
    edited(wide, lambda values: None, record=False)
    warned = command("collapse", wide, tmp_path / "guessed", "--factor", "2", "--scaling", "orthogonal")
    assert (
        f"warning: {wide}: nothing records what --factor made of its heads; by the types stored now, taken as hidden x2, "
        "intermediate x2, head_dim x2; say --grow if it was otherwise\n" in warned.stderr
    )
    assert config(tmp_path / "guessed") == config(narrow)
    back(wide, tmp_path / "said", grow="hidden=2,intermediate=2,head_dim=2", scaling="orthogonal")
    assert differing(tmp_path / "said", tmp_path / "guessed") == []


def test_a_count_that_does_not_divide_is_no_narrow_one(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide")
    values = config(tmp_path / "wide")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(values | {"num_attention_heads": 3}))
    result = command("collapse", tmp_path / "wide", tmp_path / "back")
    assert (result.exit_code, result.stderr) == (
        1,
        f"{tmp_path}/wide/config.json: num_attention_heads is 3, where the conversion makes 12; correct the config\n",
    )


def test_a_config_that_was_changed_since(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", scaling="orthogonal")
    values = config(tmp_path / "wide")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(values | {"rms_norm_eps": values["rms_norm_eps"] * 4}))
    result = command("collapse", tmp_path / "wide", tmp_path / "back")
    assert (
        "config.json: rms_norm_eps is 0.002, where the recorded conversion made 0.0005; the narrow model gets 0.004"
        in (result.stderr)
    )
    assert config(tmp_path / "back") == config(narrow) | {"rms_norm_eps": 0.004}


def test_settings_and_sidecars(narrow: Path, tmp_path: Path) -> None:
    """What --set said is recorded too: it goes out of a config again, or stands in for one; a stated width is divided."""
    values = config(narrow)
    widened(narrow, tmp_path / "wide", settings=("tie_word_embeddings=true", "rms_norm_eps=0.01"), scaling="sum")
    assert config(tmp_path / "wide")["rms_norm_eps"] == 0.04
    back(tmp_path / "wide", tmp_path / "back")
    assert config(tmp_path / "back") == values
    (narrow / "config.json").unlink()
    said = tuple(f"{key}={values[key]}" for key in ("num_attention_heads", "num_key_value_heads"))
    grow = "hidden=2,intermediate=4,heads=2,kv_heads=1"
    widened(narrow, tmp_path / "bare", settings=said, grow=grow, map="llama", scaling="copy")
    folded = collapse(
        Options(str(tmp_path / "bare"), str(tmp_path / "b")), None, lambda nbytes: None, lambda text: None
    )
    old, new = tensors(narrow), tensors(tmp_path / "b")
    assert folded.inexact == ()
    assert all(bits(old[name]) == bits(new[name]) for name in old)
    source = tmp_path / "encoder"
    models.build("bert", torch.float32).save_pretrained(source)
    (source / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 36, "pooling_mode_mean_tokens": True}
    (source / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (source / "README.md").write_text("mine\n")
    widened(source, tmp_path / "encoder-wide", scaling="copy")
    back(tmp_path / "encoder-wide", tmp_path / "encoder-back")
    assert json.loads((tmp_path / "encoder-back" / "1_Pooling" / "config.json").read_text()) == pooling
    assert (tmp_path / "encoder-back" / "README.md").read_text() == "mine\n"


# Refusals.


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"config": {"tokenizer_class": "Other", "hidden_size": 48}}, "config key 'tokenizer_class'"),
        ({"added": ["vocab_size"]}, "config key 'vocab_size'"),
        ({"made": ["lm_head.weight"]}, "tensor 'lm_head.weight'"),
    ],
)
def test_a_record_of_what_no_widening_changes(narrow: Path, tmp_path: Path, said: dict[str, Any], told: str) -> None:
    """What is written by hand is not written into the narrow config."""
    wide = tmp_path / "wide"
    widened(narrow, wide)
    if "made" in said:
        edited(wide, lambda values: values.update({"lm_head.weight": values["model.embed_tokens.weight"].clone()}))
    file = wide / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    record = json.loads(metadata["widen_ckpt"])
    for key, value in said.items():
        was = record["was"].get(key, {} if isinstance(value, dict) else [])
        record["was"][key] = {**was, **value} if isinstance(value, dict) else [*was, *value]
    save_file(load_file(file), file, {**metadata, "widen_ckpt": json.dumps(record)})
    with pytest.raises(WidenError) as caught:
        back(wide, tmp_path / "back")
    assert caught.value.faults == (
        f"{wide}: its record speaks of {told}, which widening a model of 'llama' does not change or make; "
        "say how it was made, such as --factor 2, or give --record with the model as it was written then",
    )
    assert not (tmp_path / "back").exists()


def test_a_model_that_was_not_widened_so(narrow: Path, tmp_path: Path) -> None:
    result = command("collapse", narrow, tmp_path / "back", "--factor", "7")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == (
        f"{narrow}/config.json: hidden_size is 48, no multiple of the 7 that hidden grows by; this model was not widened so"
    )
    assert not (tmp_path / "back").exists()


def test_blocks_that_have_moved_apart(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(Kind.Q4_K,), layers=1))
    widened(source, tmp_path / "wide.gguf", scaling="sum")
    name = "blk.0.ffn_up.weight"
    stored = gguf_oracle.read(tmp_path / "wide.gguf", "r+")
    stored.tensors[name].rows[3, 150] ^= 1
    stored.data.flush()
    with pytest.raises(WidenError) as caught:
        back(tmp_path / "wide.gguf", tmp_path / "back.gguf")
    assert str(caught.value) == (
        f"tensor '{name}': its copies have moved apart, and Q4_K as it is stored has no mean; "
        "give --dequantize f32 (or f16), which folds the numbers"
    )
    assert not (tmp_path / "back.gguf").exists()
    folded = back(tmp_path / "wide.gguf", tmp_path / "back.gguf", dequantize="F32")
    assert [moved for moved, _ in folded.moved] == [name]
    old, new = gguf_oracle.read(source), gguf_oracle.read(tmp_path / "back.gguf")
    wide = gguf_oracle.read(tmp_path / "wide.gguf").tensors[name].values()
    for other, tensor in old.tensors.items():
        if other != name:
            np.testing.assert_array_equal(new.tensors[other].values(), tensor.values())
    found = new.tensors[name].values()
    assert new.tensors[name].kind is Kind.F32
    pairs = wide.astype(np.float64).reshape(found.shape[0], 2, found.shape[1], 2)
    np.testing.assert_allclose(found, pairs.mean(axis=(1, 3)), rtol=1e-7)
    assert not np.array_equal(found, old.tensors[name].values())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("-", "OUT"), 1, "standard input: a pipe cannot be read in any order; name a file or a folder"),
        (("WIDE", "OUT", "--embedding-type", "f32"), 2, "--dequantize folds quantised weights as numbers"),
        (("WIDE", "OUT", "--dequantize", "f32"), 1, "--dequantize f32: is for a GGUF; --dtype sets the type"),
        (("WIDE", "-", "--json"), 2, "--json prints on stdout, where NARROW goes too"),
        (("WIDE", "WIDE"), 1, "is the input"),
        (("WIDE", "OUT", "--set", "hiden=1"), 1, "--set hiden: 'llama' has no such config key"),
    ],
)
def test_what_does_not_go(narrow: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str) -> None:
    widened(narrow, tmp_path / "wide", scaling="copy")
    places = {"WIDE": str(tmp_path / "wide"), "OUT": str(tmp_path / "out")}
    result = command("collapse", *(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == code
    assert text in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone(narrow: Path, tmp_path: Path) -> None:
    adapter = test_adapters.make_adapter(narrow, tmp_path / "adapter", target_modules=["q_proj"])
    result = command("collapse", adapter, tmp_path / "out", "--factor", "2")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "a LoRA adapter and no model; merge it into its base first, or give its base with --base\n"
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "classification"])
def test_an_adapter_with_its_base(kind: str, tmp_path: Path) -> None:
    """Linear, Conv1D, and a task head that the base lacks; then what A and B make is folded by least squares."""
    source = tmp_path / "base"
    models.build("gpt2" if kind == "gpt2" else "llama", torch.float64).save_pretrained(source)
    more: dict[str, Any] = {"target_modules": test_adapters.ALL[kind if kind in test_adapters.ALL else "llama"]}
    if kind == "classification":
        more |= {"task_type": "SEQ_CLS", "model_class": "LlamaForSequenceClassification"}
    more |= test_adapters.FAN if kind == "gpt2" else {}
    adapter = test_adapters.make_adapter(source, tmp_path / "adapter", **more)
    widened(adapter, tmp_path / "wide", base=str(source), scaling="copy", factor=4)
    folded = back(tmp_path / "wide", tmp_path / "back", base=str(source))
    old, new = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "back"))
    assert old.keys() == new.keys()
    assert all(bits(old[name]) == bits(new[name]) for name in old)
    assert (tmp_path / "back" / "adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()
    assert len(folded.distances) > 10
    file = tmp_path / "wide" / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    moved = load_file(file)
    shaken(moved)
    save_file(moved, file, metadata)
    back(tmp_path / "wide", tmp_path / "moved", base=str(source))
    given, found = load_file(file), load_file(tmp_path / "moved" / "adapter_model.safetensors")
    part = "transformer.h.0.mlp.c_fc" if kind == "gpt2" else "model.layers.0.mlp.up_proj"
    one, two = (
        side[f"base_model.model.{part}.lora_B.weight"] @ side[f"base_model.model.{part}.lora_A.weight"]
        for side in (found, given)
    )
    # Four copies each way, and what reads them takes a quarter of each: the nearest is four times the mean.
    rows, columns = one.shape
    torch.testing.assert_close(one, 4 * two.reshape(rows, 4, columns, 4).mean(dim=(1, 3)), rtol=1e-10, atol=1e-13)


# The command line.


def test_the_report(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", scaling="copy")
    result = command("collapse", tmp_path / "wide", tmp_path / "back")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        f"{tmp_path}/back: llama, hidden /2, intermediate /2, heads /2, kv_heads /2, copy, as recorded; "
        "copies are alike in all 20 tensors that have any; no mean was rounded\n"
    )

    def change(values: dict[str, torch.Tensor]) -> None:
        values[UP][2, 5] += 3
        values["model.norm.weight"][3] *= 1.5

    edited(tmp_path / "wide", change)
    result = command("collapse", tmp_path / "wide", tmp_path / "back", "--force", "--json")
    found, given = json.loads(result.stdout), tensors(tmp_path / "wide")
    assert (found["alike"], len(found["tensors"])) == (False, 20)
    # One of four copies is 3 off: its mean moves by 3/4.
    distance = (3**2 * 3 / 4) ** 0.5 / float(given[UP].norm())
    assert found["tensors"][UP]["distance"] == pytest.approx(distance, rel=1e-6)
    assert found["tensors"][UP]["largest"] == pytest.approx(2.25, rel=1e-6)
    assert found["tensors"]["model.embed_tokens.weight"]["distance"] == 0
    result = command("collapse", tmp_path / "wide", tmp_path / "back", "--force", "-q")
    head, *lines = result.stdout.splitlines()
    assert (
        head == "how far the copies are from what the narrow model widened would hold: |y - A x| / |y|, and the largest"
    )
    assert [line.split()[2] for line in lines] == [UP, "model.norm.weight"]
    assert lines[0].split()[:2] == [f"{distance:.3g}", "2.25"]
    assert result.stderr == ""
    run_as = [sys.executable, "-m", "widen_cli", "collapse", tmp_path / "wide" / "model.safetensors", "-"]
    piped = subprocess.run(run_as, capture_output=True, check=True)
    assert piped.stdout == (tmp_path / "back" / "model.safetensors").read_bytes()
    assert b"standard output: llama, " in piped.stderr
    assert b"copies have moved apart in 2 of 20 tensors, by " in piped.stderr


def test_values_that_are_no_numbers(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", scaling="copy")
    edited(tmp_path / "wide", lambda values: values[UP].view(-1)[7:8].fill_(float("nan")))
    result = command("collapse", tmp_path / "wide", tmp_path / "back", "--json")
    found = json.loads(result.stdout)
    assert (found["tensors"][UP]["distance"], found["distance"]) == (None, None)
    assert tensors(tmp_path / "back")[UP].isnan().sum() == 1


# The guards: what the comparisons above are worth.


def test_a_wrong_factor_shows(narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widened(narrow, tmp_path / "wide", scaling="copy")
    monkeypatch.setattr(widen_cli.collapse.rows, "inverted", lambda growth: growth)
    back(tmp_path / "wide", tmp_path / "back")
    assert UP in differing(narrow, tmp_path / "back")


def test_a_wrong_order_of_copies_shows(narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles taken for neighbours: other values are averaged, and nothing of it is alike."""
    widened(narrow, tmp_path / "wide", scaling="copy", layout="tile")
    real = widen_cli.collapse.rows.places

    def beside(growth: Growth) -> Any:
        return real(Copies(growth.old, growth.new // growth.old))

    monkeypatch.setattr(widen_cli.collapse.rows, "places", beside)
    folded = back(tmp_path / "wide", tmp_path / "back")
    assert {UP, "model.norm.weight"} <= set(differing(narrow, tmp_path / "back"))
    assert len(folded.moved) == len(folded.distances)


def test_a_copy_that_is_not_read_shows(narrow: Path, tmp_path: Path) -> None:
    """Every copy counts: any one of them that is off moves the fold and is told of."""
    widened(narrow, tmp_path / "wide", scaling="copy")
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        edited(tmp_path / "wide", lambda values, at=(row, column): values[UP].__setitem__(at, values[UP][at] + 1))  # type: ignore[misc]
        folded = back(tmp_path / "wide", tmp_path / "back", force=True)
        assert folded.distances[UP].apart > 0 or (row, column) == (1, 1)
    # All four are off by one now: alike again, and twice as much narrow, since what reads two copies takes a half of each.
    moved = tensors(tmp_path / "back")[UP] - tensors(narrow)[UP]
    assert float(moved[0, 0]) == pytest.approx(2, rel=1e-6)
    assert int((moved != 0).sum()) == 1
