"""Damaged and odd checkpoints of shared/wild, each run as a person would run it (collected where the folder exists)."""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401 - numpy learns bfloat16
import numpy as np
import pytest
from click.testing import CliRunner
from gguf.quants import dequantize
from safetensors import safe_open

import widen_cli
from widen_cli.cli import cli

WILD = Path(__file__).parents[2] / "shared" / "wild"
MEMORY = 2 << 30
SECONDS = 10
LINES = 20
DOUBLED = [
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
]
# What the table calls an error "until" something is supported, "then ok": now it is.
SUPPORTED = ("st_f8_block_scaled.safetensors", "dir_config_nested")
PICKLE_RAN = "wild_pickle_was_run"


@dataclass(frozen=True)
class Row:
    """A line of EXPECT.tsv."""

    file: str
    must: str
    mention: str


def _rows() -> list[Row]:
    if not (WILD / "EXPECT.tsv").exists():
        return []
    with (WILD / "EXPECT.tsv").open(newline="") as lines:
        rows = [
            Row(line["file"], line["must"], line["mention"] or "") for line in csv.DictReader(lines, delimiter="\t")
        ]
    rows = [Row(row.file, "ok", "") if row.file in SUPPORTED else row for row in rows]
    return [row for row in rows if row.file.startswith(("st_", "dir_", "gg_"))]


ROWS = _rows()
# Without the folder nothing is collected, so that a clone has no skipped tests.
__test__ = bool(ROWS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder in which links are links again: some checkouts hold them as texts such as `../../blobs/x`."""
    copy = tmp_path_factory.mktemp("wild")
    shutil.copyfile(WILD / "config.json", copy / "config.json")
    for path in sorted((WILD / "files").rglob("*")):
        target = copy / "files" / path.relative_to(WILD / "files")
        if path.is_dir():
            target.mkdir(parents=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        link = os.readlink(path) if path.is_symlink() else path.read_bytes().decode("ascii", "replace")
        if path.is_symlink() or (link.startswith("../") and len(link) < 256):
            target.symlink_to(link)
        else:
            shutil.copyfile(path, target)
    return copy / "files"


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def start(
    cwd: Path, path: Path, out: str, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A run under `ulimit -v` of 2 GB."""
    # Thread pools of the BLAS inside numpy reserve address space by the core, which says nothing about this tool.
    known = {"PYTHONPATH": str(Path(widen_cli.__file__).parents[1]), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "widen_cli", str(path), out, *config_options(path), *options],
        cwd=cwd, env={**os.environ, **known, **(env or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_limited,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """What a run gave. Its 10 seconds are the processor's; by the clock a busy machine may take longer, but not for ever."""
    try:
        stdout, stderr = process.communicate(timeout=6 * SECONDS)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def widen(cwd: Path, path: Path, out: str, *options: str) -> subprocess.CompletedProcess[str]:
    return finish(start(cwd, path, out, *options))


def stored(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """What the safetensors library reads in a folder; every value is touched."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as opened:
            assert opened.metadata()["format"] == "pt"
            for name in opened.keys():  # noqa: SIM118 - no mapping
                view = opened.get_slice(name)
                found[name] = (view.get_dtype(), view.get_shape())
                # numpy has no FP8 of its own.
                assert view.get_dtype() == "F8_E4M3" or opened.get_tensor(name).nbytes >= 0
    return found


def output_of(row: Row) -> str:
    """What is asked for: a folder, or a GGUF, which is one file."""
    return "out.gguf" if row.file.endswith(".gguf") else "out/"


def check_gguf(path: Path, out: Path) -> None:
    """gguf-py reads the result: each key has the type that it had, sizes have doubled, every value is finite."""
    read, parts = gguf.GGUFReader(out), sorted(path.parent.glob(path.name.replace("00001-of", "*-of")))
    fields = {
        key: field for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith(("GGUF.", "split."))
    }
    for key, field in fields.items():
        assert read.fields[key].types == field.types
        if key in DOUBLED:
            assert read.fields[key].contents() == 2 * field.contents()
        elif "epsilon" not in key and field.data:
            assert read.fields[key].contents() == field.contents()
    narrow = [tensor for part in parts for tensor in gguf.GGUFReader(part).tensors]
    assert [tensor.name for tensor in read.tensors] == [tensor.name for tensor in narrow]
    for tensor, old in zip(read.tensors, narrow, strict=True):
        assert all(new in (size, 2 * size) for new, size in zip(tensor.shape, old.shape, strict=True))
        assert np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all()


def config_options(path: Path) -> list[str]:
    """A lone file goes with the config of the folder."""
    lone = not path.is_dir() and path.name.startswith("st_")
    return ["--config", str(path.parents[1] / "config.json")] if lone else []


def check_verified(path: Path, out: Path) -> None:
    """The tool derives every byte of the result again."""
    result = CliRunner().invoke(cli, ["verify", str(path), str(out), *config_options(path)])
    assert result.exit_code == 0, result.output
    assert ": verified: " in result.stderr


def check_output(path: Path, out: Path) -> None:
    """The library reads the result, sizes have doubled, and index and config say so."""
    if path.suffix == ".gguf":
        check_gguf(path, out)
        return
    tensors = stored(out)
    config = json.loads((out / "config.json").read_text())
    narrow = json.loads(((path if path.is_dir() else path.parents[1]) / "config.json").read_text())
    config, narrow = (found.get("text_config", found) for found in (config, narrow))
    assert config["hidden_size"] == 2 * narrow["hidden_size"]
    table = next(shape for name, (_, shape) in tensors.items() if name.endswith("embed_tokens.weight"))
    assert table == [narrow["vocab_size"], config["hidden_size"]]
    index = out / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(weight_map) == set(tensors)
        assert set(weight_map.values()) == {path.name for path in out.glob("*.safetensors")}
    assert not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.parametrize("row", [row for row in ROWS if row.must != "error"], ids=lambda row: row.file)
def test_what_works(row: Row, files: Path, tmp_path: Path) -> None:
    done = widen(tmp_path, files / row.file, output_of(row))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    if row.must == "warn":
        warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
        assert any(row.mention in line for line in warnings), done.stderr
    check_output(files / row.file, tmp_path / output_of(row))
    check_verified(files / row.file, tmp_path / output_of(row))
    assert not (tmp_path / PICKLE_RAN).exists()


@pytest.mark.parametrize("row", [row for row in ROWS if row.must == "error"], ids=lambda row: row.file)
def test_what_is_refused(row: Row, files: Path, tmp_path: Path) -> None:
    """The same in a dry run, and under `python -O`, which removes every assert."""
    real = start(tmp_path, files / row.file, output_of(row))
    dry = start(tmp_path, files / row.file, output_of(row), "--dry-run", env={"PYTHONOPTIMIZE": "1"})
    done, again = finish(real), finish(dry)
    assert (done.returncode, done.stdout) == (1, "")
    assert (again.returncode, again.stdout, again.stderr) == (1, "", done.stderr)
    assert "Traceback" not in done.stderr
    assert row.mention in done.stderr
    assert 1 <= len(done.stderr.splitlines()) <= LINES
    # Of a model in parts the one at fault is named, as in a folder.
    named = (files / row.file).parent if row.file.startswith("gg_split_") else files / row.file
    assert done.stderr.startswith(str(named)), "the message begins with the file's name"
    assert done.stderr.replace("\n", "").isprintable()
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert not ((files / row.file).parent / PICKLE_RAN).exists()


def of(name: str) -> list[Row]:
    return [row for row in ROWS if row.file == name]


@pytest.mark.parametrize("row", of("st_prefix_orig_mod.safetensors"), ids=lambda row: row.file)
def test_a_prefix_is_stripped_when_asked(row: Row, files: Path, tmp_path: Path) -> None:
    done = widen(tmp_path, files / row.file, "out/", "--strip-prefix", "_orig_mod.")
    assert done.returncode == 0
    check_output(files / row.file, tmp_path / "out")
    assert not any("_orig_mod" in name for name in stored(tmp_path / "out"))


@pytest.mark.parametrize("row", of("st_f16_near_max.safetensors"), ids=lambda row: row.file)
def test_no_new_infinity_is_silent(row: Row, files: Path, tmp_path: Path) -> None:
    """Values near 65504 leave the range of F8_E4M3, which ends at 448."""
    done = widen(tmp_path, files / row.file, "out/", "--dtype", "F8_E4M3")
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if "became infinite" in line)
    assert "q_proj" in line


@pytest.mark.parametrize("row", of("dir_hf_cache/models--a--tiny/snapshots/0123abcd"), ids=lambda row: row.file)
def test_a_cache_is_only_read(row: Row, files: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in (files / row.file).iterdir()}
    assert widen(tmp_path, files / row.file, "out").returncode == 0
    assert {path.name: path.read_bytes() for path in (files / row.file).iterdir()} == before


@pytest.mark.parametrize("row", of("dir_stray_single"), ids=lambda row: row.file)
def test_the_sharded_model_counts_and_not_the_stray_zeros(row: Row, files: Path, tmp_path: Path) -> None:
    assert widen(tmp_path, files / row.file, "out").returncode == 0
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "np") as opened:
        assert np.any(opened.get_tensor("model.embed_tokens.weight"))


@pytest.mark.parametrize("row", of("dir_config_infinity"), ids=lambda row: row.file)
def test_infinity_in_a_config_is_kept(row: Row, files: Path, tmp_path: Path) -> None:
    assert widen(tmp_path, files / row.file, "out").returncode == 0
    old, new = (path / "config.json" for path in (files / row.file, tmp_path / "out"))
    assert old.read_text().count("Infinity") == new.read_text().count("Infinity") > 0
