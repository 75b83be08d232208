"""A written model is derived again and compared: what is right passes, and any bit that is not is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_families
import gguf_oracle
import models
import numpy as np
import pytest
import test_adapters
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Kind
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_gguf_lossless import Tiny, write_tiny

import widen_cli
from widen_cli.cli import cli
from widen_cli.demo import make_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


def widened(narrow: Path, wide: Path | str, *options: str) -> None:
    result = command("convert", narrow, wide, *options)
    assert result.exit_code == 0, result.stderr


def check(narrow: Path | str, wide: Path | str, *options: str) -> None:
    result = command("verify", narrow, wide, *options)
    assert result.exit_code == 0, result.stderr
    assert "verified" in result.stderr
    assert result.stdout == ""


def told(narrow: Path, wide: Path, *options: str, code: int = 3) -> list[str]:
    """What `verify` says against the wide model, without its name."""
    result = command("verify", narrow, wide, *options)
    assert result.exit_code == code, result.stderr
    return [line.removeprefix(f"{wide}: ") for line in result.stderr.splitlines()]


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "narrow")
    return tmp_path / "narrow"


@pytest.fixture
def wide(narrow: Path) -> Path:
    widened(narrow, narrow.with_name("wide"))
    return narrow.with_name("wide")


def edited(model: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Changes tensors in a model's file and keeps its metadata."""
    file = model / "model.safetensors"
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    tensors = {name: array.copy() for name, array in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def record(file: Path) -> dict[str, Any]:
    with safe_open(file, "np") as opened:
        found: dict[str, Any] = json.loads(opened.metadata()["widen_ckpt"])
    return found


OPTIONS = [
    ["--factor", "3"],
    ["--grow", "hidden=2,intermediate=3,heads=2"],
    ["--scaling", "sum"],
    ["--scaling", "quiet", "--layout", "tile"],
    ["--dtype", "bf16"],
    ["--max-shard-size", "200KB"],
    ["--set", "tie_word_embeddings=true"],
    ["--map", "mistral"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_what_was_written_is_what_is_derived(narrow: Path, options: list[str], tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", *options)
    check(narrow, tmp_path / "wide")


@pytest.mark.parametrize("family", list(gguf_families.FAMILIES))
def test_every_gguf_family(family: str, tmp_path: Path) -> None:
    model = gguf_families.write(family, tmp_path / "in.gguf")
    widened(model, tmp_path / "out.gguf", "-qq")
    check(model, tmp_path / "out.gguf")


def test_quantised_blocks_and_parts(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(Kind.Q4_K, Kind.Q6_K)))
    widened(model, tmp_path / "out.gguf", "--layout", "tile", "--max-shard-size", "500KB")
    parts = sorted(tmp_path.glob("out-*.gguf"))
    assert len(parts) > 2
    check(model, parts[0])


def test_an_adapter_with_its_base(narrow: Path, tmp_path: Path) -> None:
    adapter = test_adapters.make_adapter(narrow, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    widened(adapter, tmp_path / "out", "--base", str(narrow))
    check(adapter, tmp_path / "out", "--base", str(narrow))


def test_a_pipe_and_a_single_file(narrow: Path, tmp_path: Path) -> None:
    file = narrow / "model.safetensors"
    widened(file, tmp_path / "wide.safetensors", "--config-out", str(tmp_path / "wide.config.json"))
    check(file, tmp_path / "wide.safetensors")
    run = [sys.executable, "-m", "widen_cli", "verify", "-", tmp_path / "wide.safetensors"]
    done = subprocess.run([*run, "--config", narrow / "config.json"], input=file.read_bytes(), capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


def test_convert_verifies_what_it_wrote(narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = command("convert", narrow, tmp_path / "wide", "--verify", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verification"]["same"] is True
    real = widen_cli.commands.convert.run

    def spoiled(*arguments: Any) -> Any:
        report = real(*arguments)
        edited(tmp_path / "again", lambda tensors: tensors[UP].__setitem__((3, 4), 7))
        return report

    monkeypatch.setattr(widen_cli.commands.convert, "run", spoiled)
    result = command("convert", narrow, tmp_path / "again", "--verify")
    assert result.exit_code == 3
    assert "1 of 15360 values differ, the first at [3, 4]: should be" in result.stderr


@pytest.mark.parametrize(("old", "new"), [(0.0, -0.0), (1.5, np.nextafter(np.float32(1.5), 2))])
def test_a_single_bit_is_seen(narrow: Path, tmp_path: Path, old: float, new: float) -> None:
    edited(narrow, lambda tensors: tensors[UP].__setitem__((5, 6), old))
    widened(narrow, tmp_path / "wide", "--scaling", "copy")
    scale = load_file(tmp_path / "wide" / "model.safetensors")[UP][10, 12] / old if old else 1
    edited(tmp_path / "wide", lambda tensors: tensors[UP].__setitem__((slice(10, 12), 12), np.float32(new) * scale))
    (line,) = told(narrow, tmp_path / "wide")
    wanted, found = np.float32(old * scale), np.float32(np.float32(new) * scale)
    assert line == f"{UP}: 2 of 15360 values differ, the first at [10, 12]: should be {wanted!s}, is {found!s}"


def test_every_fault_is_named(narrow: Path, wide: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors["extra"] = np.zeros(3, np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.ones(95, np.float32)
        tensors[UP] = tensors[UP].astype(bfloat16)

    edited(wide, change)
    config = json.loads((wide / "config.json").read_text())
    config["rms_norm_eps"] *= 2
    del config["hidden_size"]
    (wide / "config.json").write_text(json.dumps(config))
    assert sorted(told(narrow, wide)) == [
        "extra: should not be there",
        "hidden_size: should be 96, is missing",
        "model.layers.0.input_layernorm.weight: should be F32 [96], is F32 [95]",
        f"{UP}: should be F32 [160, 96], is BF16 [160, 96]",
        "model.norm.weight: is missing",
        "rms_norm_eps: should be 0.0005, is 0.001",
    ]
    result = json.loads(command("verify", narrow, wide, "--json").stdout)
    assert (result["same"], len(result["differences"])) == (False, 6)


def test_a_value_in_a_section_of_the_config_is_named_by_its_place(narrow: Path, tmp_path: Path) -> None:
    config = json.loads((narrow / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 500.0, "deep": {"list": [1, 2], "none": None}}
    (narrow / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    wide = tmp_path / "wide"
    widened(narrow, wide)
    config = json.loads((wide / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 501.0, "deep": {"list": [1, 3], "none": None, "more": 1}}
    (wide / "config.json").write_text(json.dumps(config | {"beside": 1}))
    assert told(narrow, wide) == [
        'rope_parameters.rope_type: should be "default", is missing',
        "rope_parameters.rope_theta: should be 500.0, is 501.0",
        "rope_parameters.deep.list: should be [1, 2], is [1, 3]",
        "rope_parameters.deep.more: should not be there",
    ]


def test_a_gguf_block_and_key_are_named(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "in.gguf", Tiny(kinds=(Kind.Q4_K,), layers=1))
    wide = tmp_path / "out.gguf"
    widened(narrow, wide)
    stored = gguf_oracle.read(wide, "r+")
    rows = stored.tensors["blk.0.ffn_up.weight"].rows
    block = bytes(rows[3, 144:288])
    rows[3, 150] ^= 1
    stored.data[stored.places["llama.rope.freq_base"]] ^= 1
    stored.data.flush()
    spoiled = bytearray(block)
    spoiled[6] ^= 1
    base, value = told(narrow, wide)[::-1]
    assert value == (
        f"blk.0.ffn_up.weight: 1 of {512 * 4} blocks differ, the first at [3, 1]: "
        f"should be 0x{block.hex()}, is 0x{spoiled.hex()}"
    )
    assert base.startswith("llama.rope.freq_base: should be 10000.0, is 10000.0")


def test_what_is_said_counts_before_the_record(narrow: Path, wide: Path) -> None:
    check(narrow, wide, "--factor", "2")
    assert "should be F32 [97, 144], is F32 [97, 96]" in "\n".join(told(narrow, wide, "--factor", "3"))


def test_without_a_record(narrow: Path, wide: Path) -> None:
    file = wide / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})
    assert told(narrow, wide, code=1) == [
        "does not record how it was made; give the options of the conversion, such as --factor 2"
    ]
    check(narrow, wide, "--factor", "2", "--scaling", "orthogonal")


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("", ""),
        ("[]", ""),
        ("{", ""),
        ('{"tool": 1}', ""),
        ('{"tool":"0.1.0","said":{"later":1},"factors":{}}', ""),
        ('{"tool":"9","said":{"later":1},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2,"scaling":"later"},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2,"dtype":"F2"},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2,"embedding_type":"F2"},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2,"layout":"later"},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2,"rope":"later"},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"grow":"hidden=x"},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2,"settings":["x"]},"factors":{}}', ", by version 9,"),
        ('{"tool":"9","said":{"factor":2},"factors":{"hidden":0}}', ", by version 9,"),
    ],
)
def test_a_record_that_cannot_be_read(narrow: Path, wide: Path, text: str, by: str) -> None:
    file = wide / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "widen_ckpt": text})
    assert told(narrow, wide, code=1) == [
        f"what it records of how it was made{by} cannot be read by this version (0.1.0); "
        "give the options of the conversion, such as --factor 2"
    ]
    check(narrow, wide, "--factor", "2", "--scaling", "orthogonal")


def test_the_map_is_recorded_whole(narrow: Path, tmp_path: Path) -> None:
    """A map of one's own, gone afterwards, and the tool's map as it was then."""
    (tmp_path / "mine.yaml").write_text("extends: llama\narchitecture: mine\nmatch: {model_type: [llama]}\n")
    widened(narrow, tmp_path / "wide", "--map", str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").unlink()
    check(narrow, tmp_path / "wide")
    found = record(tmp_path / "wide" / "model.safetensors")
    assert found["own_map"] is True
    assert found["map"].startswith("architecture: mine\n")
    assert "extends" not in found["map"]


def test_the_record_holds_no_time_and_no_path(narrow: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (narrow / "copy").mkdir()
    for name in ("model.safetensors", "config.json"):
        (narrow / "copy" / name).write_bytes((narrow / name).read_bytes())
    widened(narrow, tmp_path / "wide")
    widened(narrow / "copy", tmp_path / "elsewhere" / "out", "--threads", "1")
    one, other = (tmp_path / at / "model.safetensors" for at in ("wide", "elsewhere/out"))
    assert one.read_bytes() == other.read_bytes()
    assert record(one)["said"] == {"factor": 2, "scaling": "orthogonal"}


def test_what_was_widened_twice_tells_both(narrow: Path, wide: Path, tmp_path: Path) -> None:
    widened(wide, tmp_path / "wider", "--factor", "3")
    check(wide, tmp_path / "wider")
    found = record(tmp_path / "wider" / "model.safetensors")
    assert (found["said"]["factor"], found["before"]["said"]["factor"]) == (3, 2)


@pytest.mark.parametrize("more", [["--dry-run"], ["--json", "--dry-run"]])
def test_verify_needs_files(narrow: Path, tmp_path: Path, more: list[str]) -> None:
    result = command("convert", narrow, tmp_path / "wide", "--verify", *more)
    assert result.exit_code == 2
    assert "--verify reads IN and OUT again; name files for both, and leave --dry-run out" in result.stderr


# Models that are mixed up.


def test_narrow_and_wide_swapped(narrow: Path, wide: Path) -> None:
    assert told(wide, narrow, code=1) == [
        f"does not record how it was made, and {wide} does: are the two swapped (verify NARROW WIDE)? "
        "If not, give the options of the conversion, such as --factor 2"
    ]
    assert told(wide, narrow, "--factor", "2")[0] == (
        f"none of its 15 matrices has the name and shape that widening {wide} gives: the two are likely swapped (verify NARROW "
        "WIDE), or it was made of another model"
    )
    widened(wide, wide.with_name("wider"))
    assert told(wide.with_name("wider"), wide)[0].startswith(
        "none of its 15 matrices has the name and shape that widening "
    )


def test_other_options_than_the_conversion_had(narrow: Path, wide: Path) -> None:
    assert told(narrow, wide, "--factor", "3")[0] == (
        f"none of its 15 matrices has the name and shape that widening {narrow} gives: it was widened by other options "
        "(leave out those given, if it records its own), or it was made of another model"
    )


def test_a_wide_model_of_another_narrow_one(narrow: Path, wide: Path, tmp_path: Path) -> None:
    edited(narrow, lambda tensors: tensors.update({name: 2 * array for name, array in tensors.items()}))
    likely = (
        f"none of its 15 matrices is what widening {narrow} gives, as of a model that was trained since or stored in other types; "
        "or it was made of another model"
    )
    assert told(narrow, wide)[0] == likely
    result = json.loads(command("verify", narrow, wide, "--json").stdout)
    assert (result["likely"], result["same"]) == (likely, False)
    other = tmp_path / "other"
    models.build(models.VARIANTS["bert"], models.torch.float32).save_pretrained(other)
    lines = told(other, wide, code=1)
    assert lines[0] == (
        f"records a widening (hidden x2, intermediate x2, heads x2, kv_heads x2) that {other} does not take, so that is not the model "
        "it was made of, or the two are swapped (verify NARROW WIDE); what it does not fit:"
    )
    assert len(lines) > 1
    # What cannot be read at all says nothing of the other.
    (other / "model.safetensors").write_bytes(b"12345678")
    assert not any("records a widening" in line for line in told(other, wide, code=1))


def test_a_prefix_that_a_trainer_put_before_the_names_of_the_wide_model(narrow: Path, wide: Path) -> None:
    def prefixed(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[f"_orig_mod.{name}"] = tensors.pop(name)

    edited(wide, prefixed)
    assert told(narrow, wide)[0] == (
        f"every tensor name starts with '_orig_mod.', which those of {narrow} do not; --strip-prefix _orig_mod. compares without it"
    )
    check(narrow, wide, "--strip-prefix", "_orig_mod.")
    edited(narrow, prefixed)
    check(narrow, wide, "--strip-prefix", "_orig_mod.")


def test_the_summary_counts_what_was_compared(narrow: Path, wide: Path, tmp_path: Path) -> None:
    result = command("verify", narrow, wide)
    assert re.search(r"verified: \d+ tensors of \d+ bytes and \d+ config values are what widening", result.stderr)
    adapter = test_adapters.make_adapter(narrow, tmp_path / "adapter", target_modules=["q_proj"])
    widened(adapter, tmp_path / "out", "--base", str(narrow))
    result = command("verify", adapter, tmp_path / "out", "--base", narrow)
    assert re.search(r"verified: \d+ tensors of \d+ bytes are what widening", result.stderr)
