"""Inputs of the kinds that shared/wild shows, and others: each is refused in words or widened, within memory and time.

A case makes its files in the working folder and gives the command's arguments, the exit code and a part of what is told.
The mutation loop (test_mutations.py) changes files; here are what no change of a file's bytes makes: pipes, links, sizes.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import fuzzing
import pytest
from click.testing import CliRunner, Result

import widen_cli
from widen_cli.cli import cli
from widen_cli.errors import WidenError
from widen_cli.hf_directory import open_directory
from widen_cli.safetensors_file import read_header
from widen_cli.sources import FileSource

SEEDS = fuzzing.CORPUS / "seeds"
IN_OUT = ["in", "out"]
FILE = ["model.safetensors", "out.safetensors"]
Made = tuple[Sequence[str], int, str]


def seed(name: str = "sharded") -> Path:
    shutil.copytree(SEEDS / name, ".", dirs_exist_ok=True)
    return Path("in")


def changed(file: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def replaced(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


def sparse(size: int) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        file.touch()
        os.truncate(file, size)

    return make


def zipped(data: bytes, method: int = zipfile.ZIP_STORED) -> Made:
    with zipfile.ZipFile("m.bin", "w", method) as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", b"3")
    return ["m.bin", "out.safetensors"], 1, "m.bin: "


def safetensors(header: bytes, size: int | None = None) -> Made:
    Path("x.safetensors").write_bytes(struct.pack("<Q", size or len(header)) + header)
    os.truncate("x.safetensors", 8 + (size or len(header)))
    return ["x.safetensors", "out.safetensors"], 1, "x.safetensors: "


def shard_named(name: str) -> Made:
    index = seed() / "model.safetensors.index.json"
    changed(index, lambda value: value["weight_map"].update({"model.norm.weight": name}))
    return IN_OUT, 1, ""


def own_map(text: str | bytes, told: str) -> Made:
    seed("single")
    Path("m.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return [*FILE, "--map", "m.yaml"], 1, told


SHARD = "model-00002-of-00002.safetensors"
CASES: dict[str, Callable[[], Made]] = {}


def case(make: Callable[[], Made]) -> Callable[[], Made]:
    CASES[make.__name__] = make
    return make


# The config.


@case
def a_config_that_is_a_pipe() -> Made:
    seed("single")
    replaced(Path("config.json"), os.mkfifo)
    return FILE, 1, "config.json: is a pipe; where it is meant, name it with --config"


@case
def a_config_that_is_a_pipe_in_a_folder() -> Made:
    replaced(seed() / "config.json", os.mkfifo)
    return IN_OUT, 1, "in: no config.json; "


@case
def a_config_that_is_a_folder() -> Made:
    seed("single")
    replaced(Path("config.json"), Path.mkdir)
    return FILE, 1, "config.json: cannot read it: Is a directory"


@case
def a_config_of_five_gigabytes() -> Made:
    replaced(seed() / "config.json", sparse(5 << 30))
    return IN_OUT, 1, "in/config.json: has more than 20000000 bytes, too many for a model config; "


@case
def a_config_without_an_end() -> Made:
    seed("single")
    return [*FILE, "--config", "/dev/zero"], 1, "/dev/zero: has more than 20000000 bytes, "


@case
def a_config_with_a_byte_order_mark() -> Made:
    config = seed() / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    return IN_OUT, 0, "out: llama, "


@case
def a_config_in_utf_16() -> Made:
    config = seed() / "config.json"
    config.write_bytes(config.read_text().encode("utf-16"))
    return IN_OUT, 1, "in/config.json: not UTF-8 text, "


@case
def a_key_with_two_values() -> Made:
    config = seed() / "config.json"
    config.write_text(config.read_text().rstrip()[:-1] + ', "rms_norm_eps": 1e-5}')
    return IN_OUT, 1, "in/config.json: 'rms_norm_eps' stands twice with different values, so not a model config; "


@case
def a_key_with_one_value_twice() -> Made:
    config = seed() / "config.json"
    config.write_text(config.read_text().rstrip()[:-1] + ', "rms_norm_eps": 0.001}')
    return IN_OUT, 0, "out: llama, "


@case
def an_epsilon_that_is_no_number() -> Made:
    changed(seed() / "config.json", lambda config: config.update(rms_norm_eps=float("nan")))
    return [*IN_OUT, "--scaling", "orthogonal"], 1, "in/config.json: rms_norm_eps is nan, where a number is needed; "


@case
def sizes_beyond_all_numbers() -> Made:
    changed(seed() / "config.json", lambda config: config.update(vocab_size=10**4000, hidden_size=1 << 63))
    return IN_OUT, 1, "in: in/config.json: vocab_size is 1000"


@case
def a_config_nested_without_end() -> Made:
    (seed() / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    return IN_OUT, 1, "in/config.json: nested too deeply to be a model config"


@case
def a_quantisation_of_an_unprintable_name() -> Made:
    changed(seed() / "config.json", lambda config: config.update(quantization_config={"quant_method": "\ufeff\x1b"}))
    return IN_OUT, 1, "in/config.json: quantization_config says the weights are packed by \\ufeff\\x1b; "


# The index and the shards.


@case
def an_index_that_is_a_pipe() -> Made:
    replaced(seed() / "model.safetensors.index.json", os.mkfifo)
    return IN_OUT, 1, "in/model.safetensors.index.json: is a pipe or a device; "


@case
def a_shard_that_is_a_pipe() -> Made:
    replaced(seed() / SHARD, os.mkfifo)
    return IN_OUT, 1, f"in/{SHARD}: is a pipe or a device; "


@case
def a_shard_that_is_a_folder() -> Made:
    replaced(seed() / SHARD, Path.mkdir)
    return IN_OUT, 1, f"in/{SHARD}: is a folder, not a file"


@case
def a_shard_that_links_to_itself() -> Made:
    replaced(seed() / SHARD, lambda file: file.symlink_to(file.name))
    return IN_OUT, 1, f"in/{SHARD}: cannot be opened: Too many levels of symbolic links"


@case
def a_shard_that_is_half_a_letter() -> Made:
    arguments, code, _ = shard_named("\ud800")
    return arguments, code, "in/model.safetensors.index.json: weight_map leads out of the folder with '\\ud800'; "


@case
def a_shard_by_a_way_round() -> Made:
    arguments, code, _ = shard_named(f"sub/../{SHARD}")
    return (
        arguments,
        code,
        f"in/model.safetensors.index.json: weight_map leads out of the folder with 'sub/../{SHARD}'; ",
    )


@case
def a_shard_of_an_endless_name() -> Made:
    arguments, code, _ = shard_named("x" * 5000)
    return arguments, code, "in/xxx"


@case
def an_index_of_endless_shards() -> Made:
    index = seed() / "model.safetensors.index.json"
    more = {f"t{number}": f"s{number}.safetensors" for number in range(200_000)}
    changed(index, lambda value: value["weight_map"].update(more))
    return IN_OUT, 1, "in/model.safetensors.index.json: names 200002 files, more than 99999; "


# What lies beside.


@case
def a_tokenizer_that_is_a_pipe() -> Made:
    os.mkfifo(seed() / "tokenizer.json")
    return IN_OUT, 0, "warning: in/tokenizer.json: not copied, is a pipe or a device"


@case
def a_companion_that_links_to_a_device() -> Made:
    (seed() / "notes.txt").symlink_to("/dev/zero")
    return IN_OUT, 0, "warning: in/notes.txt: not copied, is a pipe or a device"


@case
def a_generation_config_that_is_broken() -> Made:
    """It is copied as it is."""
    (seed() / "generation_config.json").write_text("{nonsense")
    return IN_OUT, 0, "out: llama, "


@case
def a_companion_whose_name_is_no_text() -> Made:
    Path(os.fsdecode(bytes(seed()) + b"/tok\xff.json")).write_text("{}")
    return IN_OUT, 0, "out: llama, "


@case
def folders_that_link_in_a_circle() -> Made:
    (seed() / "sub").mkdir()
    Path("in/sub/up").symlink_to("..")
    return IN_OUT, 0, "out: llama, "


@case
def a_pooling_width_beyond_all_numbers() -> Made:
    seed("sentence")
    Path("in/1_Pooling/config.json").write_text('{"word_embedding_dimension": ' + "9" * 4300 + "}")
    return IN_OUT, 1, "in/1_Pooling/config.json: word_embedding_dimension is 99999"


@case
def modules_without_sense() -> Made:
    seed("sentence")
    Path("in/modules.json").write_text(json.dumps([None, 1, {"path": {}}, {"path": "x" * 5000}, {"path": "a\0b"}]))
    return IN_OUT, 0, "out: bert, "


# Names.


@case
def a_folder_named_as_a_file() -> Made:
    Path("x.safetensors").mkdir()
    return ["x.safetensors", "out.safetensors"], 1, "x.safetensors: no *.safetensors file in the folder"


@case
def a_name_that_is_no_text() -> Made:
    seed("single")
    os.rename("model.safetensors", b"m\xff.safetensors")
    return [os.fsdecode(b"m\xff.safetensors"), os.fsdecode(b"out\xff")], 0, "out\\udcff: llama, "


@case
def a_name_of_control_characters() -> Made:
    seed("single")
    os.rename("model.safetensors", "a\n\x1b[31m.safetensors")
    return ["a\n\x1b[31m.safetensors", "out", "--set", "hidden_size=9"], 1, "a\\n\\x1b[31m.safetensors: "


@case
def a_link_to_itself() -> Made:
    Path("in").symlink_to("in")
    return IN_OUT, 1, "in: cannot be opened: Too many levels of symbolic links"


@case
def a_device() -> Made:
    return ["/dev/zero", "out.safetensors"], 1, "/dev/zero: is a pipe or a device; "


# Headers, zips and pickles.


@case
def a_header_of_zeros() -> Made:
    return safetensors(b"", 99_000_000)


@case
def a_header_of_spaces() -> Made:
    return safetensors(b"{" + b" " * 20_000_000 + b"}")


@case
def a_header_of_lists() -> Made:
    arguments, code, _ = safetensors(b'{"a":[' + b"{}," * 32_000_000 + b"[]]}")
    return arguments, code, "x.safetensors: the header is JSON of nothing but brackets; "


@case
def a_header_nested_without_end() -> Made:
    return safetensors(b'{"a":' * 200_000)


@case
def a_tensor_of_a_million_axes() -> Made:
    return safetensors(json.dumps({"t": {"dtype": "F32", "shape": [1] * 10**6, "data_offsets": [0, 0]}}).encode())


@case
def endless_tensors_of_no_size() -> Made:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return safetensors(json.dumps(dict.fromkeys(map(str, range(20_000)), entry)).encode())


@case
def a_zip_bomb() -> Made:
    return zipped(bytes(1 << 26), zipfile.ZIP_DEFLATED)


@case
def a_pickle_in_a_pickle() -> Made:
    class Loads:
        def __reduce__(self) -> tuple[Any, ...]:
            return pickle.loads, (pickle.dumps({}),)

    return zipped(pickle.dumps({"x": Loads()}, 2))


@case
def a_pickle_of_dicts_that_double() -> Made:
    data = b"\x80\x02}q\x00"
    for number in range(60):
        inner = b"h" + bytes([number])
        data += b"}q" + bytes([number + 1]) + b"(X\x01\0\0\0a" + inner + b"X\x01\0\0\0b" + inner + b"u"
    return zipped(data + b".")


@case
def a_pickle_nested_without_end() -> Made:
    return zipped(b"\x80\x02" + b"}X\x01\0\0\0a" * 100_000 + b"}" + b"s" * 100_000 + b".")


@case
def a_pickle_that_holds_itself() -> Made:
    own: dict[str, Any] = {}
    own["own"] = own
    return zipped(pickle.dumps(own, 2))


@case
def a_pickle_that_promises_a_text() -> Made:
    return zipped(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.")


# Maps.


@case
def a_map_of_three_gigabytes() -> Made:
    made = own_map("", "m.yaml: the map has more than 1000000 bytes; ")
    sparse(3 << 30)(Path("m.yaml"))
    return made


@case
def a_map_that_unfolds() -> Made:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    return own_map("\n".join(lines), "m.yaml:1:26: the YAML unfolds to more than 100000 values; ")


@case
def a_map_with_a_character_that_yaml_forbids() -> Made:
    return own_map("extends: llama\nx: a\0b\n", "m.yaml:2:5: a character that YAML does not allow, U+0000")


@case
def a_formula_that_explodes() -> Made:
    text = "extends: llama\naxes:\n  rotary: {size: 9**9**9**9}\n"
    return own_map(text, "model.safetensors: config.json: rotary: 9 ** 9 ** 9 has an exponent above 64")


# These are run as a person would run them, under the limits that shared/wild names, but with the processor's time.
LARGE = [
    name for name in CASES if re.search("gigabytes|endless|without_an_end|unfolds|bomb|promises|double|header", name)
]


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))


def limited(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    root = Path(widen_cli.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "widen_cli", *arguments], capture_output=True, text=True, preexec_fn=_limit,
        env=os.environ | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_odd(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, code, told = CASES[name]()
    done = limited(arguments) if name in LARGE else CliRunner().invoke(cli, arguments, color=True)
    exit_code = done.exit_code if isinstance(done, Result) else done.returncode
    assert (exit_code, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert told in done.stderr
    assert code == 0 or done.stderr.startswith(told)
    assert 1 <= len(done.stderr.splitlines()) <= 20
    assert done.stderr.replace("\n", "").isprintable()
    assert max(map(len, done.stderr.splitlines())) < 2000
    out = tmp_path / arguments[1]
    assert out.exists() == (code == 0)
    if code == 0:
        for path in fuzzing._written(out):
            fuzzing._read(path)


# Files that change while they are read.


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shutil.copyfile(SEEDS / "single" / "model.safetensors", path)
    with closing(FileSource(path, "x")) as source:
        first, *_, last = read_header(source).tensors
        os.truncate(path, last.offset + 10)
        assert len(first.source.read(first.offset, first.nbytes)) == first.nbytes
        with pytest.raises(WidenError, match=rf"^x: truncated: {last.nbytes - 10} bytes missing; "):
            last.source.read(last.offset, last.nbytes)


def test_a_header_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*arguments: Any, **more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("json.loads", loads)
    with (
        closing(FileSource(SEEDS / "single" / "model.safetensors", "x")) as source,
        pytest.raises(WidenError, match=r"^x: the header is JSON of more values than there is memory for; "),
    ):
        read_header(source)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    """What counts is what stood there when it was opened."""
    path = tmp_path / "model.safetensors"
    shutil.copyfile(SEEDS / "single" / "model.safetensors", path)
    whole = path.read_bytes()
    with closing(FileSource(path, "x")) as source:
        with path.open("ab") as file:
            file.write(b"more")
        last = read_header(source).tensors[-1]
        assert bytes(last.source.read(last.offset, last.nbytes)) == whole[last.offset : last.offset + last.nbytes]


def test_unreadable_companions_are_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's answers are made up."""
    monkeypatch.chdir(tmp_path)
    (seed() / "tokenizer.json").write_text("{}")
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *more, **rest: "token" not in str(path) and real(path, *more, **rest)
    )
    result = CliRunner().invoke(cli, IN_OUT)
    told = "in/tokenizer.json: permission denied; make it readable for you (chmod u+r)\n"
    assert (result.exit_code, result.stderr) == (1, told)
    assert not Path("out").exists()


def test_a_sub_folder_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (seed() / "sub").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with closing(open_directory(Path("in"))) as found:
        assert found.warnings == ("in/sub: not copied, cannot be read: Permission denied",)
