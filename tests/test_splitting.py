"""Parts instead of copies: their sum is the value, bit for bit; the function stays; the fold gives back what was widened; and
training moves copies apart that it cannot move apart otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import pytest
import test_gguf_lossless
import torch
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Kind
from gguf_oracle import read
from llama_cpp import difference, log_probabilities
from safetensors.torch import load_file, save_file
from test_families import FAMILIES

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.dimensions import Copies, Growth, Laid, Split
from widen_cli.dtypes import STORED
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.splitting import Parting
from widen_cli.writing import run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import symmetry

Array = npt.NDArray[Any]

WAYS: dict[str, dict[str, Any]] = {"even": {"split": "even"}, "uneven": {"split": "uneven"}, "noise": {"noise": -20.0}}
VARIANTS = {name: variant for family in FAMILIES for name, variant in family.variants.items()} | models.VARIANTS


def convert(source: Path, target: Path, **asked: Any) -> Report:
    options = Options(input=str(source), output=str(target), **asked)
    return run(prepare(options), lambda nbytes: None)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@cache
def narrow(variant: str, dtype: torch.dtype, root: Path) -> Path:
    folder = root / f"{variant}-{str(dtype)[6:]}"
    models.build(VARIANTS[variant], dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


# Numbers.


def split(bits: Array, dtype: str, way: str, growth: Growth, axis: int = 1, seed: int = 0, level: float = 0.1) -> Array:
    """Rows of values, [n, m], split along one of the two dimensions, in float64."""
    kind = STORED[dtype]
    trees = (Copies(len(bits)), growth) if axis else (growth, Copies(bits.shape[1]))
    parting = Parting(Split(way, axis, seed, "tensor", level), kind, trees, axis)
    wide = parting.wide(bits, 0, np.arange(trees[0].new))
    assert kind.numpy is not None
    return wide.view(kind.numpy).astype(np.float64)


def patterns(dtype: str) -> Array:
    """All bit patterns of a small type; of a large one random ones, with as many subnormal numbers and the ends of its range."""
    size = STORED[dtype].bits
    if size <= 16:
        return np.arange(1 << size).astype(f"u{size // 8}").reshape(-1, 64)
    draw = np.random.default_rng(3)
    words = draw.integers(0, 1 << 64, 6400, dtype=np.uint64).astype(f"u{size // 8}")
    digits = {32: 23, 64: 52}[size]
    subnormal = words & words.dtype.type((1 << digits) - 1 | 1 << size - 1)
    kind = {32: np.float32, 64: np.float64}[size]
    ends = np.array([0, -0.0, np.finfo(kind).max, np.finfo(kind).tiny, np.finfo(kind).smallest_subnormal], kind)
    return np.concatenate([words, subnormal, np.tile(ends.view(words.dtype), 64)]).reshape(-1, 64)


@pytest.mark.parametrize("copies", [2, 3, 5, 7])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F32", "F64"])
def test_parts_sum_to_every_value_of_a_type(dtype: str, copies: int) -> None:
    bits = patterns(dtype)
    kind = STORED[dtype].numpy
    assert kind is not None
    with np.errstate(invalid="ignore", over="ignore"):
        values = bits.view(kind).astype(np.float64)
        for way in WAYS:
            parts = split(bits, dtype, way, Copies(bits.shape[1], copies)).reshape(*bits.shape, copies)
            finite = np.isfinite(values)
            # Each part is at most the value, so float64 adds them without rounding.
            assert (parts.sum(axis=-1) == values)[finite].all()
            assert (np.signbit(parts) == np.signbit(values)[..., None])[finite].all()
            assert (np.abs(parts) <= np.abs(values)[..., None])[finite].all()
            assert (np.isnan(parts) == np.isnan(values)[..., None]).all()
            assert (parts == values[..., None])[np.isinf(values)].all()


@pytest.mark.parametrize("copies", [2, 3, 7])
def test_uneven_parts_are_no_two_equal(copies: int) -> None:
    values = np.random.default_rng(1).standard_normal((40, 50)).astype(np.float16)
    parts = np.sort(
        np.abs(split(values.view("u2"), "F16", "uneven", Copies(50, copies)).reshape(40, 50, copies)), axis=-1
    )
    assert (np.diff(parts, axis=-1) > 0).all()
    assert 1.3 < np.median(parts[..., -1] / parts[..., 0]) < 3


def test_even_parts_differ_by_the_last_place_at_most() -> None:
    values = np.random.default_rng(1).standard_normal((40, 50)).astype(np.float32)
    parts = split(values.view("u4"), "F32", "even", Copies(50, 3)).reshape(40, 50, 3)
    apart = parts.max(axis=-1) - parts.min(axis=-1)
    assert (apart <= np.spacing(np.abs(values))).all()
    assert apart.any()


@pytest.mark.parametrize("decibels", [-30, -40, -60])
def test_noise_has_the_level_that_was_asked_for(decibels: int) -> None:
    """Of the copies of each row: what is small takes no more than itself, which is little of the whole."""
    values = (np.random.default_rng(1).standard_normal((30, 2000)) * np.geomspace(1e-3, 1e3, 30)[:, None]).astype(
        np.float32
    )
    parts = split(values.view("u4"), "F32", "noise", Copies(2000, 3), level=10 ** (decibels / 20)).reshape(30, 2000, 3)
    noise = parts - values[..., None] / 3
    root = np.sqrt(np.square(noise).mean(axis=(1, 2))) / np.sqrt(np.square(values / 3).mean(axis=1))
    assert np.abs(20 * np.log10(root) - decibels).max() < 0.5
    assert abs(noise.mean() / np.abs(noise).mean()) < 1e-3


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "growth",
    [
        Copies(12, 3),
        Copies(1, 3, inner=Copies(12)),
        Copies(4, 2, inner=Copies(3, 2)),
        Copies(6, 2, inner=Copies(2, 3, first_only=True)),
        Laid((Copies(5, 2), Copies(4, 1), Copies(1, 3, inner=Copies(3)))),
    ],
    ids=["interleaved", "tiled", "heads and within", "first only", "laid"],
)
def test_parts_lie_where_copies_would(growth: Growth, axis: int) -> None:
    """Whatever the tree: the parts of each value, which stand where its copies stood, sum to it."""
    values = np.random.default_rng(2).standard_normal((12, 12))
    wide = split(values.view("u8"), "F64", "uneven", growth, axis)
    marks = origins(growth)
    along = wide if axis == 0 else wide.T
    whole = values if axis == 0 else values.T
    for old in range(12):
        np.testing.assert_array_equal(along[[new for new, at in enumerate(marks) if at == old]].sum(axis=0), whole[old])
    np.testing.assert_array_equal(along[[new for new, at in enumerate(marks) if at is None]], 0)


def origins(growth: Growth, start: int = 0) -> list[int | None]:
    """The old position of each new one, None where it holds zero: what the tree says, read out by hand."""
    if isinstance(growth, Laid):
        found: list[int | None] = []
        for part in growth.parts:
            found += origins(part, start)
            start += part.old
        return found
    found = []
    for position in range(growth.size):
        step = growth.inner.old if growth.inner else 1
        own = origins(growth.inner, start + position * step) if growth.inner else [start + position]
        for copy in range(growth.copies):
            found += [None] * len(own) if copy and growth.first_only else own
    return found


# Files.


@pytest.mark.parametrize(
    ("variant", "way", "mode", "growth"),
    [
        ("llama", "uneven", "copy", "hidden=2,intermediate=3,heads=2,kv_heads=2"),
        ("llama", "noise", "sum", "hidden=3,intermediate=2,heads=2,kv_heads=1"),
        ("qwen3", "uneven", "orthogonal", "hidden=2,intermediate=3,heads=2,kv_heads=2,head_dim=2"),
        ("gemma3_text", "noise", "copy", "hidden=3,intermediate=2,heads=2,kv_heads=2"),
        ("gemma3_text_untied", "even", "quiet", "hidden=2,intermediate=2,heads=2,kv_heads=2"),
        ("gpt2", "uneven", "orthogonal", "hidden=2,intermediate=2,head_dim=2"),
        ("gpt2_untied", "noise", "copy", "hidden=4,heads=2"),
        ("bert_mlm", "uneven", "copy", "hidden=3,intermediate=2,heads=3x"),
        ("bert", "noise", "orthogonal", "hidden=2,intermediate=2,head_dim=2"),
    ],
)
def test_the_function_is_kept_and_the_fold_goes_back(
    variant: str, way: str, mode: str, growth: str, root: Path, tmp_path: Path
) -> None:
    source, described = narrow(variant, torch.float64, root), VARIANTS[variant]
    wide, plain, back = tmp_path / "wide", tmp_path / "plain", tmp_path / "back"
    report = convert(source, wide, grow=growth, scaling=mode, **WAYS[way])
    convert(source, plain, grow=growth, scaling=mode)
    split, copied = load_file(wide / "model.safetensors"), load_file(plain / "model.safetensors")
    changed = {name for name in split if not torch.equal(split[name], copied[name])}
    assert changed == {tensor.source.name for tensor in report.job.plan.tensors if tensor.split}
    found = [models.outputs(folder, torch.float64, inputs=described.inputs) for folder in (source, wide)]
    plan = report.job.plan
    scale = float(plan.scales[plan.output]) if plan.output in plan.scales else 1.0
    assert (
        models.relative_error(*found, {name: scale for name in found[0] if name.endswith("last_hidden_state")}) < 1e-13
    )
    assert command("verify", source, wide).exit_code == 0
    folded = command("collapse", wide, back, "--json")
    assert json.loads(folded.stdout)["alike"] is True
    old, new = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert all(torch.allclose(old[name], new[name], rtol=1e-15, atol=0) for name in old)


@pytest.mark.parametrize(
    ("variant", "way", "asked"),
    [
        ("llama", "uneven", {"grow": "hidden=4/3,intermediate=3/2,heads=2"}),
        ("llama", "noise", {"grow": "hidden=5/3,intermediate=5/2,heads=2", "fill": "random"}),
        ("gpt2", "uneven", {"grow": "intermediate=5/2", "fill": "zero"}),
        ("llama", "even", {"grow": "hidden=3", "depth": ("2x",)}),
        ("llama", "uneven", {"factor": 2, "experts": 4}),
    ],
    ids=["fractions", "random fill", "zeros", "depth", "experts"],
)
def test_parts_beside_other_growth(variant: str, way: str, asked: dict[str, Any], root: Path, tmp_path: Path) -> None:
    source, wide = narrow(variant, torch.float64, root), tmp_path / "wide"
    plan = convert(source, wide, **asked, **WAYS[way]).job.plan
    assert any(tensor.split for tensor in plan.tensors)
    found = [models.outputs(folder, torch.float64, inputs=VARIANTS[variant].inputs) for folder in (source, wide)]
    assert models.relative_error(*found, {}) < 1e-13
    assert command("verify", source, wide).exit_code == 0


def test_llama_cpp_runs_what_was_split(tmp_path: Path) -> None:
    source = test_gguf_lossless.write_tiny(
        tmp_path / "in.gguf", test_gguf_lossless.Tiny(64, 96, 3, 1, 32, 2, kinds=(Kind.F32,))
    )
    told = command(
        source, tmp_path / "wide.gguf", "--grow", "hidden=2,intermediate=3,heads=2,kv_heads=2", "--split", "uneven"
    )
    assert told.exit_code == 0, told.stderr
    prompts = [[5, 9, 14], [7, 20, 3, 3, 21, 12, 29, 10, 23]]
    old, new = (log_probabilities(path, prompts) for path in (source, tmp_path / "wide.gguf"))
    assert difference(old, new) < 2e-4


def test_a_part_that_is_not_in_the_sum_shows(root: Path, tmp_path: Path) -> None:
    """The guard: one weight's parts moved along by one, and the function is another."""
    source, wide = narrow("llama", torch.float64, root), tmp_path / "wide"
    convert(source, wide, grow="intermediate=2", split="uneven")
    tensors, name = load_file(wide / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].roll(1, dims=1).contiguous()
    save_file(tensors, wide / "model.safetensors")
    assert models.relative_error(models.outputs(source, torch.float64), models.outputs(wide, torch.float64)) > 1e-3
    made = ("--grow", "intermediate=2", "--scaling", "orthogonal", "--split", "uneven")
    moved = json.loads(command("collapse", wide, tmp_path / "back", "--json", *made).stdout)["tensors"]
    assert [each for each, told in moved.items() if told["distance"]] == [name]
    assert 0.1 < moved[name]["distance"] < 2


@pytest.mark.parametrize("way", WAYS)
def test_thirds_are_bit_exact_in_half_precision(way: str, root: Path, tmp_path: Path) -> None:
    """Copies of thirds round in bfloat16; parts do not, and `auto` takes the mode in which they do not."""
    source, wide, back = narrow("llama", torch.bfloat16, root), tmp_path / "wide", tmp_path / "back"
    told = command(
        source, wide, "--factor", 3, *(word for key, value in WAYS[way].items() for word in (f"--{key}", value))
    )
    assert "copy; function-exact and bit-exact; none of" in told.stderr
    command("collapse", wide, back)
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert "copy; function-exact and bit-exact" not in command(source, tmp_path / "plain", "--factor", 3).stderr


def test_bytes_depend_on_the_seed_alone(root: Path, tmp_path: Path) -> None:
    """Not on threads, blocks or files; the record holds the seed."""
    source = narrow("gpt2", torch.float32, root)
    made = [
        convert(source, tmp_path / str(number), factor=2, split="uneven", **more).job.options.output
        for number, more in enumerate(
            [{"threads": 1}, {"threads": 3}, {"seed": 1}, {"threads": 1, "max_shard_size": "100KB"}]
        )
    ]
    found = [dict(sorted(_all(Path(folder)))) for folder in made]
    assert all(
        torch.equal(found[0][name], found[1][name]) and torch.equal(found[0][name], found[3][name]) for name in found[0]
    )
    assert any(not torch.equal(found[0][name], found[2][name]) for name in found[0])
    assert len([*Path(made[3]).glob("*.safetensors")]) > 1
    assert all(command("verify", source, folder).exit_code == 0 for folder in made)


def _all(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in folder.glob("*.safetensors"):
        yield from load_file(file).items()


def test_blocks_of_rows_are_drawn_as_one(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    source = narrow("gpt2", torch.float32, root)
    convert(source, tmp_path / "one", factor=2, noise=-30.0)
    monkeypatch.setattr("widen_cli.stream.SPLIT_BYTES", 700)
    convert(source, tmp_path / "many", factor=2, noise=-30.0)
    one, many = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "many"))
    assert one == many


# Warnings and refusals.


def test_noise_as_loud_as_the_weights_is_warned_of(tmp_path: Path) -> None:
    source = models.save("llama_mha", tmp_path / "in", torch.float32)
    told = command(source, tmp_path / "wide", "--noise", "0.01")
    assert told.exit_code == 0
    assert (
        "warning: --noise 0.01: is counted in decibels, and from 0 on it is as loud as what it is added to; -30 is a thirtieth "
        "of that\n" in told.stderr
    )
    assert "decibels" not in command(source, tmp_path / "other", "--noise", "-30").stderr


def test_quantised_blocks_cannot_be_split(tmp_path: Path) -> None:
    source = test_gguf_lossless.write_tiny(
        tmp_path / "in.gguf", test_gguf_lossless.Tiny(64, 64, 2, 1, 32, 1, kinds=(Kind.Q8_0,))
    )
    told = command(source, tmp_path / "wide.gguf", "--split", "uneven")
    assert told.exit_code == 1
    assert (
        "tensor 'blk.0.attn_q.weight' and 6 more hold Q8_0 blocks, whose numbers share a scale, so --split uneven cannot split them "
        "one by one; give --dequantize f32 or leave it out" in told.stderr
    )
    wide, back = tmp_path / "wide.gguf", tmp_path / "back.gguf"
    told = command(source, wide, "--split", "uneven", "--dequantize", "f32")
    assert told.exit_code == 0, told.stderr
    assert command("verify", source, wide).exit_code == 0
    assert command("collapse", wide, back).exit_code == 0
    plain = command(source, tmp_path / "plain.gguf", "--grow", "hidden=1", "--dequantize", "f32")
    assert plain.exit_code == 0, plain.stderr
    old, new = read(tmp_path / "plain.gguf").tensors, read(back).tensors
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[name].rows, new[name].rows) for name in old)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--split", "uneven", "--noise", "-30"], 2, "--split and --noise are two ways to one end; give one of them"),
        (
            ["--grow", "kv_heads=2", "--noise", "-30"],
            0,
            "--noise -30: no weight reads an axis that grows, so it has no effect",
        ),
    ],
)
def test_what_is_said_of_the_options(arguments: list[str], code: int, word: str, root: Path, tmp_path: Path) -> None:
    told = command(narrow("llama", torch.float32, root), tmp_path / "wide", *arguments)
    assert told.exit_code == code
    assert word in told.stderr


def test_the_plan_says_which_copies_part(root: Path, tmp_path: Path) -> None:
    told = command(narrow("llama", torch.float32, root), "--dry-run", "--split", "uneven").stdout
    assert (
        "note: --split uneven: the copies of hidden and intermediate and heads part, since weights that read them hold unequal parts "
        "of one sum; no such weight reads kv_heads" in told
    )
    assert "split (uneven)" in told
    told = command(narrow("t5", torch.float32, root), "--dry-run", "--grow", "head_dim=2", "--split", "uneven").stdout
    assert "note: --split uneven: the copies of head_dim part" in told
    assert "the copies of query and key along head_dim stay equal, since no weight that writes them is split" in told


# Training.


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_training_parts_what_was_split_and_nothing_else(architecture: str, tmp_path: Path) -> None:
    source = symmetry.narrow_model(architecture, tmp_path / "narrow")
    (first, *_), _ = symmetry.train(source, 0)
    plain = symmetry.train(symmetry.widen(architecture, source, tmp_path / "plain"), 4)
    split = symmetry.train(symmetry.widen(architecture, source, tmp_path / "split", split="uneven"), 4)
    assert plain[0][0] == pytest.approx(first, rel=1e-6)
    assert split[0][0] == pytest.approx(first, rel=1e-6)
    for axis, far in symmetry.apart(architecture, plain[1]):
        # Copies of key and value heads serve other heads, so nothing ties them.
        assert (far > 0) == (axis == "kv_heads"), axis
    assert all(far > 1e-7 for _, far in symmetry.apart(architecture, split[1]))
