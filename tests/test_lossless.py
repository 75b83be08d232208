"""The promise: a written wide checkpoint computes what the narrow one does, seen through transformers in float64.

Two bounds are used. Where the tool says that no value was rounded, only the float64 arithmetic of the two runs differs
(EXACT). Where values were rounded, the wide model is the narrow one with every stored value off by at most one rounding
of its type; `Narrow.noise` measures what such an error does to the outputs of this very checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import models
import numpy as np
import pytest
import reference
import safetensors
import torch
from families import note

import widen_cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.writing import run

EXACT = 1e-12
# A worst of three draws stands for the tail of one more draw: maxima over thousands of outputs hardly vary.
DRAWS, SAFETY = 3, 2

MODES = ("auto", "orthogonal", "copy", "sum", "quiet")
TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Half a unit in the last place, relative; and half the spacing of the subnormals, absolute.
ROUNDOFF = {
    "F64": (2.0**-53, 0.0),
    "F32": (2.0**-24, 0.0),
    "BF16": (2.0**-8, 0.0),
    "F16": (2.0**-11, 2.0**-25),
}

# Factors of 2, of 3, and different ones on every axis that has its own.
HEADS_SHARE_HIDDEN = (
    "factor=2",
    "factor=3",
    "hidden=2,intermediate=3,heads=2",
    "hidden=4,intermediate=3,heads=2",
    "hidden=3,intermediate=2,head_dim=3",
    "intermediate=3",
)
HEADS_ARE_FREE = (
    "factor=2",
    "factor=3",
    "hidden=2,intermediate=3,heads=2,kv_heads=1",
    "hidden=3,intermediate=2,heads=2,kv_heads=2",
    "hidden=2,intermediate=3,heads=1",
    "heads=2",
    "intermediate=3",
)
# Key and value heads alone, where they still divide the query heads.
KV_ALONE = {"llama": "kv_heads=2", "llama_gqa": "kv_heads=3", "qwen2": "kv_heads=3", "mistral": "kv_heads=2"}

# Everything doubled without any root: a larger head size would need 2**(-1/4) in query and key.
DOUBLED_BY_HEADS = {
    "bert": "hidden=2,intermediate=2,heads=2",
    "gpt2": "hidden=2,intermediate=2,heads=2",
    "llama": "factor=2",
}

# One layer_norm_eps serves the stream and, behind a GELU, the head of a masked model: the stream's scale has to be 1.
SHARED_EPS = ("bert_mlm", "bert_mlm_untied", "bert_pretraining")


def family(variant: str) -> str:
    return next(name for name in ("bert", "gpt2", "llama", "mistral", "qwen2") if variant.startswith(name))


def growths(variant: str) -> tuple[str, ...]:
    if family(variant) in ("bert", "gpt2"):
        return HEADS_SHARE_HIDDEN
    return HEADS_ARE_FREE + ((KV_ALONE[variant],) if variant in KV_ALONE else ())


def refused(variant: str, mode: str, growth: str) -> bool:
    """Whether the mode has to give up: it would scale a stream that shared eps holds at 1."""
    return variant in SHARED_EPS and mode in ("orthogonal", "sum") and growth != "intermediate=3"


def convert(source: Path | str, target: Path | str, growth: str, **options: Any) -> Report:
    """Runs the tool in this process; `growth` is `factor=N` or what --grow takes."""
    if growth.startswith("factor="):
        options["factor"] = int(growth.removeprefix("factor="))
    else:
        options["grow"] = models.by_factors(growth)
    return run(prepare(Options(input=str(source), output=str(target), **options)), lambda nbytes: None)


def asked(growth: dict[str, int]) -> str:
    return ",".join(f"{axis}={factor}" for axis, factor in growth.items())


class Narrow:
    """The narrow checkpoints; each is saved, run and disturbed once a session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = cache(self._folder)
        self.outputs = cache(self._outputs)
        self.noise = cache(self._noise)

    def _folder(self, variant: str, dtype: str) -> Path:
        return models.save(variant, self.root / f"{variant}-{dtype}", TORCH[dtype])

    def _outputs(self, variant: str, dtype: str) -> models.Outputs:
        return models.outputs(self.folder(variant, dtype), torch.float64)

    def _noise(self, variant: str, dtype: str, relative: float, absolute: float) -> float:
        """How far the outputs move when every stored value is off by up to so much, at random."""
        tensors, config = stored(self.folder(variant, dtype))
        errors = []
        for seed in range(DRAWS):
            rng = np.random.default_rng(seed)
            disturbed = {
                name: array + rng.uniform(-1, 1, array.shape) * np.maximum(np.abs(array) * relative, absolute)
                for name, array in tensors.items()
            }
            folder = reference.write(self.root / f"{variant}-{dtype}-{relative}-{absolute}-{seed}", disturbed, config)
            errors.append(models.relative_error(self.outputs(variant, dtype), models.outputs(folder, torch.float64)))
        return max(errors)

    def bound(self, variant: str, dtype: str, report: Report) -> float:
        """EXACT where the report says that nothing was rounded, else what one rounding of the written type does.

        Where the plan promises exact factors, only subnormals can have been rounded.
        """
        plan = report.job.plan
        if report.total.rounded == 0 and plan.exact:
            return EXACT
        (written,) = {tensor.dtype.name for tensor in plan.tensors}
        relative, absolute = ROUNDOFF[written]
        return EXACT + SAFETY * self.noise(variant, dtype, 0.0 if plan.exact else relative, absolute)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    return Narrow(tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, float]]:
    """The worst error of each family, type and mode, written where the environment variable WIDEN_FIGURES says."""
    worst: dict[str, float] = defaultdict(float)
    yield worst
    if target := os.environ.get("WIDEN_FIGURES"):
        Path(target).write_text(json.dumps(dict(sorted(worst.items())), indent=2) + "\n")


NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def arrays(file: Path) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file in their own types; the library's numpy loader knows no F8."""
    entries = safetensors.deserialize(file.read_bytes())
    return {
        name: np.frombuffer(entry["data"], NUMPY[entry["dtype"]]).reshape(entry["shape"]) for name, entry in entries
    }


def stored(folder: Path) -> tuple[reference.Arrays, reference.Config]:
    """All tensors of a folder in float64, and its config."""
    found: reference.Arrays = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: array.astype(np.float64) for name, array in arrays(file).items()}
    return found, json.loads((folder / "config.json").read_text())


def folded(outputs: models.Outputs, report: Report) -> models.Outputs:
    """The wide outputs with `last_hidden_state` divided by the plan's scale of the space it is in.

    That is the final norm's output for a decoder and the stream for BERT; logits and what a tanh made have scale 1.
    """
    scales = report.job.plan.scales
    scale = float(scales["final"] if "final" in scales else scales["hidden"])
    return {name: value / scale if name == "last_hidden_state" else value for name, value in outputs.items()}


def compare(
    narrow: Narrow, figures: dict[str, float], variant: str, dtype: str, report: Report, folder: Path | None = None
) -> float:
    """The error of a written folder (the report's own, unless given), noted among the figures."""
    wide = models.outputs(folder or report.job.options.output, torch.float64)
    error = models.relative_error(narrow.outputs(variant, dtype), folded(wide, report))
    cast = report.job.options.dtype
    key = f"{family(variant)} {dtype}{f'->{cast}' if cast else ''} {report.job.plan.mode}"
    figures[key] = max(figures[key], error)
    if cast is None and dtype in ("F64", "F32"):
        growth = ",".join(f"{axis}={factor}" for axis, factor in report.job.plan.factors.items())
        note(family(variant), variant, report.job.plan.mode, growth, f"float{dtype[1:]}", error)
    return error


def check_refusal(source: Path, target: Path, growth: str, mode: str) -> None:
    with pytest.raises(WidenError) as caught:
        convert(source, target, growth, scaling=mode)
    assert f"--scaling {mode}: not function-exact" in str(caught.value)
    assert "layer_norm_eps" in str(caught.value)
    assert not target.exists()


def chosen_growths(variant: str, mode: str) -> list[str]:
    """All growths for one variant of each family; for the others the factor 2 and one of the rest, in turn."""
    if mode == "auto":
        return ["factor=2", "factor=3"]
    known = growths(variant)
    if variant in ("bert", "gpt2", "llama", "mistral", "qwen2"):
        return list(known)
    turn = list(models.VARIANTS).index(variant) + MODES.index(mode)
    alone = [KV_ALONE[variant]] if variant in KV_ALONE else []
    return ["factor=2", known[1 + turn % (len(known) - 1)], *alone]


@pytest.mark.parametrize(
    ("variant", "mode", "growth"),
    [
        pytest.param(variant, mode, growth, id=f"{variant}-{mode}-{growth}")
        for variant in models.VARIANTS
        for mode in MODES
        for growth in dict.fromkeys(chosen_growths(variant, mode))
    ],
)
def test_float64_is_exact(
    variant: str, mode: str, growth: str, narrow: Narrow, figures: dict[str, float], tmp_path: Path
) -> None:
    """A rounding of float64 is too small to see here, so every law has to hold to the last digits."""
    source, target = narrow.folder(variant, "F64"), tmp_path / "wide"
    if refused(variant, mode, growth):
        check_refusal(source, target, growth, mode)
        note(family(variant), variant, mode, growth, "float64", None)
        return
    report = convert(source, target, growth, scaling=mode)
    if mode == "auto":
        assert (report.job.plan.mode == "orthogonal") == (variant not in SHARED_EPS)
    assert compare(narrow, figures, variant, "F64", report) <= EXACT


def has_roots(mode: str, variant: str, dtype: str) -> bool:
    """Whether doubling everything needs the square root of 2: in the stream, or in q.k where the head size doubles.

    Without being told, only float32 without rotary positions doubles the head size instead of the heads.
    """
    return mode == "orthogonal" or (dtype == "F32" and family(variant) in ("bert", "gpt2"))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("variant", ["bert", "bert_mlm", "gpt2", "llama_tied", "mistral", "qwen2"])
def test_narrower_types(
    variant: str, mode: str, dtype: str, narrow: Narrow, figures: dict[str, float], tmp_path: Path
) -> None:
    """Factor 2 rounds nothing unless roots or float16's subnormals come in; other factors round within the bound."""
    for number, growth in enumerate(("factor=2", growths(variant)[2])):
        source, target = narrow.folder(variant, dtype), tmp_path / str(number)
        if refused(variant, mode, growth):
            check_refusal(source, target, growth, mode)
            continue
        report = convert(source, target, growth, scaling=mode)
        error = compare(narrow, figures, variant, dtype, report)
        assert error <= narrow.bound(variant, dtype, report)
        if growth == "factor=2" and dtype != "F16" and not has_roots(report.job.plan.mode, variant, dtype):
            assert report.total.rounded == 0
            assert error <= EXACT


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("variant", ["bert", "bert_mlm", "gpt2", "llama_tied", "qwen2"])
def test_auto_in_half_precision(variant: str, dtype: str, narrow: Narrow, tmp_path: Path) -> None:
    """Factor 2 takes `copy`, and factor 3 what rounds the fewest values of all modes that are exact."""
    source = narrow.folder(variant, dtype)
    assert convert(source, tmp_path / "two", "factor=2").job.plan.mode == "copy"
    chosen = convert(source, tmp_path / "auto", "factor=3")
    exact = [mode for mode in ("copy", "sum", "quiet") if not refused(variant, mode, "factor=3")]
    rounded = {mode: convert(source, tmp_path / mode, "factor=3", scaling=mode).total.rounded for mode in exact}
    assert chosen.total.rounded == min(rounded.values())
    assert chosen.job.plan.mode == min(rounded, key=lambda mode: rounded[mode])


def test_key_heads_that_no_longer_divide_are_refused(narrow: Narrow, tmp_path: Path) -> None:
    with pytest.raises(WidenError, match="heads % kv_heads == 0"):
        convert(narrow.folder("llama_mha", "F64"), tmp_path / "wide", "kv_heads=2")
    assert not (tmp_path / "wide").exists()


CASTS = [
    ("F32", "F64"),
    ("BF16", "F32"),
    ("F16", "F32"),
    ("F64", "F32"),
    ("F32", "BF16"),
    ("F32", "F16"),
    ("F16", "BF16"),
    ("BF16", "F16"),
]


@pytest.mark.parametrize(("dtype", "cast"), CASTS)
@pytest.mark.parametrize("variant", ["bert", "gpt2", "llama_tied"])
def test_casts(variant: str, dtype: str, cast: str, narrow: Narrow, figures: dict[str, float], tmp_path: Path) -> None:
    """--dtype rounds once to the type that is written; one that holds every value and factor loses nothing."""
    for mode, growth in (("orthogonal", "factor=2"), ("copy", DOUBLED_BY_HEADS[family(variant)])):
        report = convert(narrow.folder(variant, dtype), tmp_path / mode, growth, scaling=mode, dtype=cast)
        error = compare(narrow, figures, variant, dtype, report)
        assert error <= narrow.bound(variant, dtype, report)
        assert {str(array.dtype) for array in arrays(tmp_path / mode / "model.safetensors").values()} == {
            np.dtype(NUMPY[cast]).name
        }
        assert json.loads((tmp_path / mode / "config.json").read_text())["dtype"] == str(TORCH[cast])[6:]
        if cast == "F64" or (cast == "F32" and dtype != "F64" and mode == "copy"):
            assert error <= EXACT


def nearest(exact: np.ndarray, dtype: str) -> np.ndarray:
    """`exact` (float64) rounded once to nearest even, by looking at all values of a type of 8 or 16 bits."""
    kind = np.dtype(NUMPY[dtype])
    if kind.itemsize > 2:
        return exact.astype(kind)
    codes = np.arange(2 ** (8 * kind.itemsize - 1), dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):
        values = codes.view(kind).astype(np.float64)
    values = values[np.isfinite(values)]
    above = np.clip(np.searchsorted(values, np.abs(exact)), 1, len(values) - 1)
    low, high = np.abs(exact) - values[above - 1], values[above] - np.abs(exact)
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return np.copysign(values[code], exact).astype(kind)


def cast_by_hand(source: Path, target: Path, dtype: str) -> Path:
    """The folder with its weights in a type that transformers does not save."""
    tensors, config = stored(source)
    return reference.write(target, {name: nearest(array, dtype) for name, array in tensors.items()}, config)


# Where spaces are free the tool and the reference may choose differently, both rightly: `copy` gives the key all of a
# larger head size's root, `orthogonal` scales the linear half of a gated FFN. These growths leave no such choice.
WRITTEN = {
    ("bert", "copy"): {"hidden": 2, "intermediate": 3, "heads": 2},
    ("bert", "orthogonal"): {"hidden": 4, "intermediate": 3, "heads": 2, "head_dim": 2},
    ("gpt2", "copy"): {"hidden": 3, "intermediate": 2, "heads": 3},
    ("gpt2", "orthogonal"): {"hidden": 2, "intermediate": 3, "head_dim": 2, "heads": 1},
    ("llama_tied", "copy"): {"hidden": 2, "intermediate": 3, "heads": 4, "kv_heads": 2},
    ("llama_tied", "orthogonal"): {"hidden": 3, "intermediate": 1, "heads": 2, "kv_heads": 2},
}


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize(("variant", "mode"), WRITTEN)
def test_written_values_are_rounded_once(variant: str, mode: str, dtype: str, narrow: Narrow, tmp_path: Path) -> None:
    """Every stored value is the independent reference's product, rounded to nearest even, and the roundings are counted."""
    source = cast_by_hand(narrow.folder(variant, "F64"), tmp_path / "narrow", dtype)
    growth = WRITTEN[variant, mode]
    report = convert(source, tmp_path / "wide", asked(growth), scaling=mode)
    tensors, config = stored(source)
    wanted, wanted_config = reference.widen(tensors, config, growth, mode)
    written, written_config = arrays(tmp_path / "wide" / "model.safetensors"), stored(tmp_path / "wide")[1]
    assert written.keys() == wanted.keys()
    rounded = 0
    for name, exact in wanted.items():
        assert written[name].dtype == NUMPY[dtype]
        if dtype == "F64":
            np.testing.assert_allclose(written[name], exact, rtol=4e-16, atol=0, err_msg=name)
            continue
        np.testing.assert_array_equal(written[name], nearest(exact, dtype), err_msg=name)
        copies = exact.size // tensors[name].size
        rounded += np.count_nonzero(written[name].astype(np.float64) != exact) // copies
    if dtype != "F64":
        assert report.total.rounded == rounded
    changed = {key for key in wanted_config if wanted_config[key] != config.get(key)}
    assert {key: written_config[key] for key in changed} == pytest.approx({key: wanted_config[key] for key in changed})


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("variant", ["bert", "gpt2", "llama_tied"])
def test_float8_computes_the_same(
    variant: str, dtype: str, narrow: Narrow, figures: dict[str, float], tmp_path: Path
) -> None:
    """transformers loads no F8, so the narrow values are decoded by hand and the wide ones cast by the tool."""
    source = cast_by_hand(narrow.folder(variant, "F64"), tmp_path / "narrow", dtype)
    decoded = models.outputs(reference.write(tmp_path / "decoded", *stored(source)), torch.float64)
    for mode in ("copy", "sum", "quiet"):
        growth = DOUBLED_BY_HEADS[family(variant)]
        report = convert(source, tmp_path / mode, growth, scaling=mode, dtype="F32")
        error = models.relative_error(decoded, folded(models.outputs(tmp_path / mode, torch.float64), report))
        figures[f"{family(variant)} {dtype}->F32 {mode}"] = error
        assert report.total.rounded == 0
        assert error <= EXACT


@pytest.mark.parametrize("variant", ["bert", "gpt2_untied", "llama_tied"])
def test_sharded_directories(variant: str, narrow: Narrow, figures: dict[str, float], tmp_path: Path) -> None:
    """Shards in and out hold the tensors of the one file, and every shard is one that transformers finds."""
    sharded = models.save(variant, tmp_path / "narrow", torch.float64, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    growth = growths(variant)[2]
    report = convert(sharded, tmp_path / "wide", growth, max_shard_size="100KB")
    whole = convert(narrow.folder(variant, "F64"), tmp_path / "whole", growth)
    assert [shard.name for shard in whole.job.shards] == ["model.safetensors"]
    names = sorted(file.name for file in (tmp_path / "wide").glob("*.safetensors"))
    assert names == [f"model-{n:05}-of-{len(names):05}.safetensors" for n in range(1, len(names) + 1)]
    assert len(names) > 2
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    found = {name: arrays(tmp_path / "wide" / shard)[name] for name, shard in index["weight_map"].items()}
    wanted = arrays(tmp_path / "whole" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in wanted.values())
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])
    assert compare(narrow, figures, variant, "F64", report) <= EXACT


@pytest.fixture
def single(narrow: Narrow, tmp_path: Path) -> Path:
    """A lone file with its config beside it, under the name the tool looks for first."""
    folder = narrow.folder("qwen2", "F64")
    (tmp_path / "small.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "small.config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "of something else"}')
    return tmp_path / "small.safetensors"


def test_file_to_file(single: Path, narrow: Narrow, figures: dict[str, float], tmp_path: Path) -> None:
    """The config goes beside the file under the file's stem, and together they are a loadable model."""
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report = convert(single, tmp_path / "big.safetensors", "hidden=2,intermediate=3,heads=2,kv_heads=1")
    assert {path.name for path in tmp_path.iterdir()} == before.keys() | {"big.safetensors", "big.config.json"}
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    (tmp_path / "loadable").mkdir()
    (tmp_path / "big.safetensors").rename(tmp_path / "loadable" / "model.safetensors")
    (tmp_path / "big.config.json").rename(tmp_path / "loadable" / "config.json")
    assert compare(narrow, figures, "qwen2", "F64", report, tmp_path / "loadable") <= EXACT


def test_file_to_folder(single: Path, narrow: Narrow, figures: dict[str, float], tmp_path: Path) -> None:
    """A target ending in / is ready for from_pretrained, and holds what a directory's conversion writes."""
    report = convert(single, f"{tmp_path}/big/", "factor=2")
    assert {path.name for path in (tmp_path / "big").iterdir()} == {"model.safetensors", "config.json"}
    assert compare(narrow, figures, "qwen2", "F64", report) <= EXACT
    convert(narrow.folder("qwen2", "F64"), tmp_path / "from_folder", "factor=2")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "big" / name).read_bytes() == (tmp_path / "from_folder" / name).read_bytes()


def as_transformers_4(config: reference.Config) -> reference.Config:
    """The config as transformers 4 wrote it: rotary keys at the top, torch_dtype instead of dtype."""
    rope = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config["dtype"], "transformers_version": "4.45.0"}
    return old | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


@pytest.mark.parametrize("variant", ["llama", "llama3_rope", "mistral", "qwen2_tied"])
def test_config_of_transformers_4(variant: str, narrow: Narrow, figures: dict[str, float], tmp_path: Path) -> None:
    tensors, config = reference.read(narrow.folder(variant, "F64"))
    old = as_transformers_4(config)
    source = reference.write(tmp_path / "narrow", tensors, old)
    report = convert(source, tmp_path / "wide", growths(variant)[2], dtype="F64")
    written = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert list(written) == list(old)
    sizes = {"hidden_size", "intermediate_size", "num_attention_heads"}
    assert {key for key in old if written[key] != old[key]} == sizes | {"rms_norm_eps"}
    assert compare(narrow, figures, variant, "F64", report) <= EXACT


@pytest.mark.parametrize(
    ("growth", "head_dim"), [("factor=2", None), ("hidden=2,intermediate=3,heads=2", None), ("hidden=3,heads=2", 12)]
)
def test_config_of_the_first_llama(
    growth: str, head_dim: int | None, narrow: Narrow, figures: dict[str, float], tmp_path: Path
) -> None:
    """It had no keys for the head size and the key heads; they are written only where they no longer follow."""
    tensors, config = reference.read(narrow.folder("llama_mha", "F64"))
    old = {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")}
    source = reference.write(tmp_path / "narrow", tensors, old)
    report = convert(source, tmp_path / "wide", growth)
    written = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert written.get("head_dim") == head_dim
    assert compare(narrow, figures, "llama_mha", "F64", report) <= EXACT


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "widen_cli", *arguments]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(widen_cli.__file__).parents[1])}


@pytest.mark.parametrize("mode", ["copy", "orthogonal"])
def test_pipes_give_the_bytes_of_the_file(mode: str, single: Path, tmp_path: Path) -> None:
    options = ("--grow", "hidden=2x,intermediate=3x,heads=2x,kv_heads=1x", "--scaling", mode)
    convert(single, tmp_path / "big.safetensors", options[1], scaling=mode)
    config = ("--config", str(tmp_path / "small.config.json"), "--config-out", str(tmp_path / "piped.json"))
    # The pipe's reading end is left to the tool alone, so that cat ends when the tool does.
    with subprocess.Popen(["cat", str(single)], stdout=subprocess.PIPE) as cat:
        tool = subprocess.Popen(
            command(*options, *config, "-", "-"),
            stdin=cat.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        cat.stdout.close()
        piped, messages = tool.communicate()
    assert (cat.returncode, tool.returncode) == (0, 0), messages.decode()
    assert piped == (tmp_path / "big.safetensors").read_bytes()
    assert (tmp_path / "piped.json").read_bytes() == (tmp_path / "big.config.json").read_bytes()


def test_a_pipe_on_one_side_only(single: Path, tmp_path: Path) -> None:
    convert(single, tmp_path / "big.safetensors", "factor=2")
    wanted = (tmp_path / "big.safetensors").read_bytes()
    out = subprocess.run(command(str(single), "-"), capture_output=True, check=True, env=ENVIRONMENT)
    assert out.stdout == wanted
    target, config = str(tmp_path / "from_pipe.safetensors"), str(tmp_path / "small.config.json")
    with single.open("rb") as file:
        subprocess.run(command("--config", config, "-", target), stdin=file, check=True, env=ENVIRONMENT)
    assert Path(target).read_bytes() == wanted
    assert (tmp_path / "from_pipe.config.json").read_bytes() == (tmp_path / "big.config.json").read_bytes()


@pytest.mark.parametrize("mode", ["orthogonal", "copy"])
def test_threads_change_no_byte(mode: str, narrow: Narrow, tmp_path: Path) -> None:
    """The embedding and the head are of many blocks, the first repeated along its rows' entries, the other too."""
    tensors, config = stored(narrow.folder("llama", "F32"))
    rng = np.random.default_rng(5)
    vocab, growth = 60_000, {"hidden": 2, "intermediate": 1, "heads": 2, "kv_heads": 2}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.normal(size=(vocab, config["hidden_size"]))
    weights = {name: array.astype(np.float32) for name, array in tensors.items()}
    source = reference.write(tmp_path / "narrow", weights, config | {"vocab_size": vocab})
    for threads in (1, 4):
        convert(source, tmp_path / f"{threads}", asked(growth), scaling=mode, threads=threads)
    one, four = (tmp_path / threads / "model.safetensors" for threads in ("1", "4"))
    assert one.read_bytes() == four.read_bytes()
    wanted, _ = reference.widen(weights, config | {"vocab_size": vocab}, growth, mode)
    for name, array in arrays(four).items():
        np.testing.assert_array_equal(array, wanted[name].astype(np.float32), err_msg=name)
