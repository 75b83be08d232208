"""Growth said of the model as a whole: like another one (--like), or of so many parameters (--target-params)."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import gguf_families
import gguf_oracle
import models
import numpy as np
import pytest
import test_adapters
import test_gguf_layers
import torch
from click.testing import CliRunner, Result
from test_plan import Header

from widen_cli.cli import cli
from widen_cli.config import ModelConfig
from widen_cli.convert import prepare
from widen_cli.dtypes import STORED
from widen_cli.errors import Faults, WidenError
from widen_cli.maps import catalog_map
from widen_cli.options import Options
from widen_cli.plan import parameters
from widen_cli.plan.match import match_tensors
from widen_cli.plan.sizes import resolve_sizes
from widen_cli.plan.wishes import parse_grow
from widen_cli.proposals import parse_params, propose

TARGET = {"hidden_size": 72, "intermediate_size": 150, "num_attention_heads": 12, "num_key_value_heads": 6}


TWICE = "says what every axis grows to, and so does --factor; give one of them"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


class Models:
    """Tiny models, each saved once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, variant: str) -> Path:
        path = self.folder / variant
        return path if path.exists() else models.save(variant, path)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("aims"))


def config(source: Path, target: Path, without: tuple[str, ...] = (), **values: Any) -> Path:
    """The config of a model with other values, as a file."""
    found = json.loads((source / "config.json").read_text()) | values
    target.write_text(json.dumps({key: value for key, value in found.items() if key not in without}))
    return target


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Another model's sizes.


def test_like_another_family(narrow: Models, tmp_path: Path) -> None:
    """A llama grows to a mistral's sizes, computes the same, and its record says how without the path."""
    source = narrow.of("llama")
    other = config(source, tmp_path / "big.json", model_type="mistral", head_dim=6, **TARGET)
    result = run(source, tmp_path / "wide", "--like", other, "--scaling", "copy")
    assert result.exit_code == 0, result.output
    assert "warning" not in result.stderr
    found = json.loads((tmp_path / "wide/config.json").read_text())
    assert {key: found[key] for key in TARGET} == TARGET
    wide = models.outputs(tmp_path / "wide", torch.float64)
    assert models.relative_error(models.outputs(source, torch.float64), wide) < 1e-6
    record = (tmp_path / "wide/model.safetensors").read_bytes()
    assert b'"grow\\":\\"hidden=2x,intermediate=3x,heads=2x,kv_heads=2x,head_dim=1x' in record
    assert b"big.json" not in record
    assert run("verify", source, tmp_path / "wide").exit_code == 0
    assert run("verify", source, tmp_path / "wide", "--like", other, "--scaling", "copy").exit_code == 0
    flags = ["--grow", "hidden=2x,intermediate=3x,heads=2x,kv_heads=2x,head_dim=1x", "--scaling", "copy"]
    assert run(source, tmp_path / "by_flags", *flags).exit_code == 0
    assert files(tmp_path / "by_flags") == files(tmp_path / "wide")


ODD = {"hidden_size": 91, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 12,
       "num_hidden_layers": 5, "vocab_size": 101}  # fmt: skip
REACHES = [
    "hidden is 36 here and 91 there: {source}: the wide model would have heads 6, hidden 91, and 'llama' needs hidden % heads == 0; "
    "choose other factors with --grow",
    "intermediate is 50 here and 100 there: intermediate=2x",
    "heads is 6 here and 4 there: smaller, and nothing shrinks here",
    "kv_heads is 3 here and 3 there: stays",
    "head_dim is 6 here and 12 there: head_dim=2x",
    "vocab is 97 here and 101 there: it is no width; --grow vocab=101 pads it",
    "num_hidden_layers is 2 here and 5 there: width changes no number of layers; see --depth",
]


def test_all_that_cannot_be_reached_is_told_together(narrow: Models, tmp_path: Path) -> None:
    source = narrow.of("llama")
    reaches = [reach.replace("{source}", str(source)) for reach in REACHES]
    (tmp_path / "odd").mkdir()
    config(source, tmp_path / "odd" / "config.json", **ODD)
    refused = run(source, tmp_path / "wide", "--like", tmp_path / "odd")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines() == [
        f"--like {tmp_path}/odd: {reaches[n]}; --grow beside it says another size" for n in (0, 2)
    ]
    assert not (tmp_path / "wide").exists()
    listed = run(source, "--dry-run", "--like", tmp_path / "odd")
    assert listed.exit_code == 0, listed.output
    lines = listed.stdout.splitlines()
    assert lines[:9] == [f"like {tmp_path}/odd:", *(f"  {reach}" for reach in reaches), ""]
    assert lines[9] == "map llama: intermediate x2, head_dim x2"
    values = json.loads(run(source, "--dry-run", "--json", "--like", tmp_path / "odd").stdout)["like"]
    assert [value["ratio"] for value in values] == [None, "2", None, "1", "2", None, None]
    assert values[2] == {
        "axis": "heads", "here": 6, "there": 4, "ratio": None, "layers": [], "why_not": "smaller, and nothing shrinks here"
    }  # fmt: skip
    done = run(source, tmp_path / "wide", "--like", tmp_path / "odd", "--grow", "hidden=2,heads=1x")
    assert done.exit_code == 0, done.output
    told = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert told == [f"warning: --like {tmp_path}/odd: {reach}" for reach in reaches[-2:]]
    assert json.loads((tmp_path / "wide/config.json").read_text())["hidden_size"] == 72


def test_like_with_an_axis_that_cannot_grow_here(narrow: Models, tmp_path: Path) -> None:
    """Dynamic NTK scaling: the reason of the plan is that of the axis."""
    source = tmp_path / "narrow"
    models.save("llama", source)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    config(source, source / "config.json", rope_parameters=rope)
    other = config(source, tmp_path / "big.json", **{**TARGET, "head_dim": 12})
    refused = run(source, tmp_path / "wide", "--like", other)
    assert refused.stderr.startswith(
        f"--like {other}: head_dim is 6 here and 12 there: 'head_dim' cannot grow exactly: "
    )
    assert len(refused.stderr.splitlines()) == 1


def test_a_gguf_and_a_directory_are_like_each_other(narrow: Models, tmp_path: Path) -> None:
    """Axes have one name in both maps; what grows with a head's size is not told by itself."""
    small = gguf_families.write("qwen3", tmp_path / "small.gguf")
    grow = "hidden=2x,intermediate=3x,heads=4x,kv_heads=2x,head_dim=2x"
    assert run(small, tmp_path / "big.gguf", "--grow", grow).exit_code == 0
    done = run(small, tmp_path / "like.gguf", "--like", tmp_path / "big.gguf")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "like.gguf").stat().st_size > small.stat().st_size
    found = run("verify", small, tmp_path / "like.gguf", "--grow", grow)
    assert found.exit_code == 0, found.output
    listed = run(narrow.of("llama"), "--dry-run", "--like", tmp_path / "big.gguf").stdout
    assert "head_dim is 6 here and 20 there" in listed
    assert "value_dim" not in listed


def test_layers_of_different_sizes_grow_by_one_factor_or_each_by_its_own(tmp_path: Path) -> None:
    small = test_gguf_layers.write(tmp_path / "small.gguf")
    big, other = tmp_path / "big.gguf", tmp_path / "other.gguf"
    for grow in ("hidden=2x,intermediate=3x,heads=2x,kv_heads=2x", "hidden=48,intermediate=round:20,heads=to:6@1"):
        assert run(small, big, "--force", "--grow", grow, "--scaling", "copy").exit_code == 0
        done = run(small, other, "--force", "--like", big, "--scaling", "copy")
        assert done.exit_code == 0, done.output
        one, two = (gguf_oracle.read(path) for path in (big, other))
        assert all(np.array_equal(tensor.rows, two.tensors[name].rows) for name, tensor in one.tensors.items())
    listed = json.loads(run(small, "--dry-run", "--json", "--like", big).stdout)["like"]
    assert {reach["axis"]: reach["layers"] for reach in listed if reach["layers"]} == {
        "intermediate": ["intermediate=to:60@0", "intermediate=to:40@2-3"],
        "heads": ["heads=to:6@1"],
    }
    # Of an axis in --grow only the layers that it does not name go by the other model.
    grown = json.loads(run(small, "--dry-run", "--json", "--like", big, "--grow", "intermediate=50@2").stdout)["layers"]
    assert grown == ["intermediate=6/5x@0", "intermediate=20/11x@3", "heads=3/2x@1", "intermediate=5/3x@2"]


def test_layers_that_cannot_become_those_of_another_model(narrow: Models, tmp_path: Path) -> None:
    big = test_gguf_layers.write(tmp_path / "big.gguf")
    assert run(big, tmp_path / "wide.gguf", "--grow", "intermediate=2x@2").exit_code == 0
    listed = run(tmp_path / "wide.gguf", "--dry-run", "--like", big).stdout
    assert (
        "intermediate is 60 here and 50 there: layer 2 has 60 here and 30 there, and nothing shrinks here\n" in listed
    )
    listed = run(narrow.of("llama"), "--dry-run", "--like", big).stdout
    assert "it differs from layer to layer, of which there are 2 here and 4 there; see --depth" in listed
    listed = run(narrow.of("llama"), "--dry-run", "--depth", "2x", "--like", big).stdout
    assert "intermediate is 50 here and 50 there: layer 1 has 50 here and 0 there, and nothing shrinks here" in listed


def test_an_adapter_grows_like_its_base(narrow: Models, tmp_path: Path) -> None:
    base = narrow.of("llama")
    other = config(base, tmp_path / "big.json", head_dim=6, **TARGET)
    small = test_adapters.make_adapter(base, tmp_path / "small", target_modules=["q_proj", "down_proj"])
    for out, arguments in (
        ("like", ["--like", other]), ("grow", ["--grow", "hidden=72,intermediate=150,heads=+6,kv_heads=2x"]),
        ("factors", ["--grow", "hidden=2x,intermediate=3x,heads=2x,kv_heads=2x"]),
    ):  # fmt: skip
        done = run(small, tmp_path / out, "--base", base, *arguments)
        assert done.exit_code == 0, done.output
        assert run("verify", small, tmp_path / out, "--base", base).exit_code == 0
    like, grow, factors = (load(tmp_path / out / "adapter_model.safetensors") for out in ("like", "grow", "factors"))
    assert like.keys() == factors.keys()
    assert all(torch.equal(like[name], factors[name]) and torch.equal(grow[name], factors[name]) for name in factors)


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--like", "{big}", "--factor", "2"], f"--like: {TWICE}"),
        (["--like", "{big}", "--target-params", "1M"], "--like and --target-params each say how large the model becomes; give one of them"),
        (["--target-params", "1M", "--factor", "2"], f"--target-params: {TWICE}"),
        (["--like", "{none}"], "{none}: cannot read it: No such file or directory"),
        (["--like", "{weights}"], "--like {weights}: weights hold no config; name the config.json beside them, or their folder"),
        (["--like", "{other}"], "--like {other}: holds none of the sizes that are looked for, such as hidden_size, "
          "intermediate_size; is it a model's config?"),
        (["--target-params", "10k"], "--target-params: the model has 25740 parameters, more than 10000, and nothing shrinks here"),
        (["--target-params", "900T"], "--target-params: 900000000000000 is far from all that factors up to 64 reach; the nearest is "
          "152633088, by --grow hidden=64x,intermediate=128x,heads=128x,kv_heads=128x; say what is meant with --grow"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments: list[str], fault: str, narrow: Models, tmp_path: Path) -> None:
    source = narrow.of("llama")
    (tmp_path / "other.json").write_text('{"vocab": 3}')
    names = {
        "big": source,
        "none": tmp_path / "none.json",
        "weights": source / "model.safetensors",
        "other": tmp_path / "other.json",
    }
    result = run(source, tmp_path / "wide", *(argument.format(**names) for argument in arguments))
    assert (result.exit_code, result.stderr.splitlines()[0]) == (1, fault.format(**names))


def test_like_a_config_that_comes_through_a_pipe(narrow: Models, tmp_path: Path) -> None:
    """As a shell's <(...) gives it: it passes once, so that nothing may be read of it to see what it is."""
    config = (
        (narrow.of("llama") / "config.json").read_text().replace('"intermediate_size": 50', '"intermediate_size": 100')
    )
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=(tmp_path / "p").write_text, args=(config,), daemon=True)
    writer.start()
    done = run(narrow.of("llama"), tmp_path / "wide", "--like", tmp_path / "p")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["intermediate_size"] == 100


def test_the_way_back_takes_neither(narrow: Models, tmp_path: Path) -> None:
    result = run("collapse", narrow.of("llama"), tmp_path / "x", "--like", narrow.of("llama"))
    assert result.exit_code == 2
    assert "--like and --target-params are for a conversion; --grow says what each axis grew by" in result.stderr


# So many parameters.


def library_count(folder: Path) -> int:
    return int(models.load(folder, torch.float32).num_parameters())


@pytest.mark.parametrize("variant", ["llama", "llama_tied", "gpt2", "bert_mlm", "qwen2_tied", "bert_classification"])
def test_parameters_are_counted_as_the_library_counts(variant: str, narrow: Models, tmp_path: Path) -> None:
    source = narrow.of(variant)
    present = library_count(source)
    result = run(source, tmp_path / "wide", "--target-params", 7 * present, "--scaling", "copy", "--json")
    assert result.exit_code == 0, result.output
    assert "warning: --target-params: takes the nearest growth, --grow hidden=" in result.stderr
    assert f" to {library_count(tmp_path / 'wide')} parameters (" in result.stderr
    assert abs(library_count(tmp_path / "wide") / present / 7 - 1) < 0.15
    assert run("verify", source, tmp_path / "wide").exit_code == 0


def test_experts_are_counted(narrow: Models, tmp_path: Path) -> None:
    result = run(narrow.of("llama"), tmp_path / "wide", "--target-params", "200000", "--experts", "4", "--depth", "+1")
    assert result.exit_code == 0, result.stderr
    assert f"to {library_count(tmp_path / 'wide')} parameters" in result.stderr


def test_growth_in_some_layers_is_not_counted(narrow: Models, tmp_path: Path) -> None:
    result = run(narrow.of("llama"), tmp_path / "wide", "--target-params", "200000", "--grow", "intermediate=2x@0")
    assert result.exit_code == 1
    fault = "--target-params: does not count what grows in some layers only; leave --grow intermediate=2x@0 out"
    assert fault in result.stderr


def test_a_dry_run_lists_the_nearest_growths(narrow: Models, tmp_path: Path) -> None:
    source = narrow.of("llama")
    listed = run(source, "--dry-run", "--target-params", "0.5M").stdout.splitlines()
    assert listed[0] == "25740 parameters now, 500000 wanted:"
    assert listed[1].split() == [
        "parameters",
        "off",
        "hidden",
        "intermediate",
        "heads",
        "kv_heads",
        "to",
        "be",
        "had",
        "by",
    ]
    values = json.loads(run(source, "--dry-run", "--json", "--target-params", "0.5M").stdout)
    best, *others = values["proposals"]
    assert (values["parameters"], values["target"], len(others) > 1) == (25740, 500000, True)
    assert listed[2].endswith(f"  --grow {best['grow']}")
    away = [abs(one["parameters"] - 500000) for one in values["proposals"]]
    assert away == sorted(away)
    assert away[0] < 25000
    for number, one in enumerate(values["proposals"]):
        assert run(source, tmp_path / str(number), "--grow", one["grow"], "--scaling", "copy").exit_code == 0
        assert library_count(tmp_path / str(number)) == one["parameters"]


def test_what_grow_says_stays(narrow: Models) -> None:
    flags = ["--target-params", "0.5M", "--grow", "hidden=3x"]
    values = json.loads(run(narrow.of("llama"), "--dry-run", "--json", *flags).stdout)
    assert {one["sizes"].get("hidden") for one in values["proposals"]} == {None}
    assert values["factors"]["hidden"] == 3


def test_a_gguf_counts_with_its_layers(tmp_path: Path) -> None:
    """Every layer by its own sizes: the sum of the stored shapes, and of those of the wide file."""
    small, wide = test_gguf_layers.write(tmp_path / "small.gguf"), tmp_path / "wide.gguf"
    done = run(small, wide, "--target-params", "1M", "--json")
    assert done.exit_code == 0, done.output
    job = prepare(Options(str(wide), "x", dry_run=True, grow="hidden=1x"))
    stored = sum(torch.Size(tensor.shape).numel() for tensor in job.checkpoint.tensors)
    job.checkpoint.close()
    assert f" to {stored} parameters (" in done.stderr


def test_a_miscount_is_seen(narrow: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the counts: tied weights that are counted twice."""
    monkeypatch.setattr(parameters.Parameters, "count", lambda self, ratios: 3 * original(self, ratios))
    result = run(narrow.of("llama_tied"), tmp_path / "wide", "--target-params", "3M")
    assert result.exit_code == 0, result.output
    assert f" to {library_count(tmp_path / 'wide')} parameters (" not in result.stderr


original = parameters.Parameters.count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.3B", 1_300_000_000),
        ("350M", 350_000_000),
        ("7e9", 7 * 10**9),
        ("1.5e3", 1500),
        ("12k", 12000),
        ("1t", 10**12),
    ],
)
def test_numbers_of_parameters(text: str, number: int) -> None:
    assert parse_params(text) == number


@pytest.mark.parametrize("text", ["", "B", "1.3", "0", "1,3B", "-1", "1e", "1 B", "0.5"])
def test_what_is_no_number_of_parameters(text: str) -> None:
    if text == "1.3":
        assert parse_params(text) == 1
        return
    with pytest.raises(WidenError) as caught:
        parse_params(text)
    assert caught.value.faults == (
        f"--target-params {text}: is no number of parameters; write for example 1.3B, 350M or 7e9",
    )


def test_sizes_that_are_multiples_are_proposed_where_the_planner_takes_them() -> None:
    """Of a model of SmolLM's sizes, with a planner that takes every growth."""
    layer = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    shapes = {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in layer.items()}
    feed = {"gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}
    shapes |= {f"model.layers.0.mlp.{name}.weight": shape for name, shape in feed.items()}
    shapes |= {"model.embed_tokens.weight": (500, 576), "model.norm.weight": (576,)}
    headers = [Header(name, STORED["F32"], shape) for name, shape in shapes.items()]
    values = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = ModelConfig(
        {**values, "num_hidden_layers": 1, "tie_word_embeddings": True, "vocab_size": 500}, "config.json"
    )
    llama = catalog_map("llama")
    match = match_tensors(llama, headers, config)
    sizes = resolve_sizes(llama, config, match, Faults())
    found = propose(6_000_000, sizes, parameters.Parameters(match, sizes), {}, lambda ratios: ()).found
    assert len(found) == 6
    by_sizes = [one for one in found if "x" not in one.grow.split(",")[0]]
    assert len(by_sizes) == 3
    for one in by_sizes:
        hidden, inner, heads, kv_heads = (one.sizes[axis] for axis in ("hidden", "intermediate", "heads", "kv_heads"))
        assert (hidden % 64, inner % 64, heads) == (0, 0, 3 * kv_heads)
        assert 4 / 5 <= (inner / 1536) / (hidden / 576) <= 5 / 4
        q, kv = heads * 64 * hidden, kv_heads * 64 * hidden
        assert one.parameters == 501 * hidden + 2 * q + 2 * kv + 3 * hidden * inner
        assert abs(one.parameters / 6_000_000 - 1) < 0.02
        assert parse_grow(one.grow)["hidden"].ratio(sizes) == one.ratios["hidden"]
