"""Model folders: which weights are taken, what is refused, and which files go along."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from widen_cli.errors import WidenError
from widen_cli.hf_directory import HfDirectory, open_directory
from widen_cli.sharding import index_bytes, parse_size, plan_shards, shard_names

WILD = Path(__file__).parents[2] / "shared" / "wild"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def weights(path: Path, *names: str, fill: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.full(4, fill, np.float32) for name in names}
    safetensors.numpy.save_file(arrays, path, {"format": "pt", "file": path.name})


def index(folder: Path, weight_map: object, total_size: object = 48) -> None:
    text = json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model in two shards with an index."""
    weights(tmp_path / ONE, "a", "b")
    weights(tmp_path / TWO, "c")
    index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def faults(folder: Path) -> list[str]:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WidenError) as caught:
        open_directory(folder)
    assert len(os.listdir("/proc/self/fd")) == before, "a refused folder leaves files open"
    return list(caught.value.faults)


def shard_faults(folder: Path) -> tuple[list[str], list[str]]:
    """The faults of single shards, which do not keep the folder from being looked at; and the tensors of the others."""
    before = len(os.listdir("/proc/self/fd"))
    found = open_directory(folder)
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before, "a folder with faults leaves files open"
    return list(found.faults), [tensor.name for tensor in found.tensors]


def summary(found: HfDirectory) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    found.close()
    assert found.faults == ()
    return [tensor.name for tensor in found.tensors], found.shards, found.warnings


def test_sharded(folder: Path) -> None:
    found = open_directory(folder)
    assert found.config_path == folder / "config.json"
    assert found.metadata["file"] == ONE
    assert found.companions == ()
    assert [tensor.source.name for tensor in found.tensors] == [f"{folder}/{ONE}"] * 2 + [f"{folder}/{TWO}"]
    assert summary(found) == (["a", "b", "c"], (ONE, TWO), ())


def test_single_without_config(tmp_path: Path) -> None:
    weights(tmp_path / "model.safetensors", "a")
    found = open_directory(tmp_path)
    assert found.config_path is None
    assert summary(found) == (["a"], ("model.safetensors",), ())


def test_one_file_of_another_name(tmp_path: Path) -> None:
    weights(tmp_path / "consolidated.safetensors", "a")
    assert summary(open_directory(tmp_path))[1] == ("consolidated.safetensors",)


def test_index_of_another_name(folder: Path) -> None:
    (folder / INDEX).rename(folder / "x.safetensors.index.json")
    assert summary(open_directory(folder)) == (["a", "b", "c"], (ONE, TWO), ())


def test_several_indexes(folder: Path) -> None:
    shutil.copy(folder / INDEX, folder / "x.safetensors.index.json")
    assert summary(open_directory(folder))[2] == (f"{folder}/x.safetensors.index.json: not used, {INDEX} was taken",)
    (folder / INDEX).rename(folder / "y.safetensors.index.json")
    listed = "x.safetensors.index.json, y.safetensors.index.json"
    assert faults(folder) == [f"{folder}: several indexes and none is {INDEX}: {listed}; keep one"]


def test_all_missing_shards_at_once(folder: Path) -> None:
    (folder / ONE).unlink()
    (folder / TWO).unlink()
    texts = [f"{folder}/{s}: missing, {INDEX} names it; download it again" for s in (ONE, TWO)]
    assert shard_faults(folder) == (texts, [])


def test_a_missing_shard_leaves_the_others_to_be_looked_at(folder: Path) -> None:
    (folder / ONE).unlink()
    assert shard_faults(folder) == ([f"{folder}/{ONE}: missing, {INDEX} names it; download it again"], ["c"])


def test_a_damaged_shard_leaves_the_others_to_be_looked_at(folder: Path) -> None:
    (folder / TWO).write_bytes(b"<html>no model</html>")
    (text,), names = shard_faults(folder)
    assert text.startswith(f"{folder}/{TWO}: ")
    assert names == ["a", "b"]


def test_faults_of_the_folder_itself_still_refuse_it(folder: Path) -> None:
    """What is asked of the index does not hang on the shards that are there."""
    index(folder, {"a": ONE, "b": "../b", "c": TWO})
    (folder / ONE).unlink()
    (text,) = faults(folder)
    assert text.startswith(f"{folder}/{INDEX}: weight_map leads out of the folder with '../b'")


def test_many_missing_shards_are_counted(tmp_path: Path) -> None:
    index(tmp_path, {str(n): f"m-{n:02}.safetensors" for n in range(40)})
    texts, names = shard_faults(tmp_path)
    assert (len(texts), names) == (11, [])
    assert texts[0] == f"{tmp_path}/m-00.safetensors: missing, {INDEX} names it; download it again"
    assert texts[-1] == f"{tmp_path}: ... and 30 more"


def test_all_shards_are_checked(folder: Path) -> None:
    for shard, cut in ((ONE, 5), (TWO, 7)):
        os.truncate(folder / shard, (folder / shard).stat().st_size - cut)
    (first, second), names = shard_faults(folder)
    assert names == []
    assert first.startswith(f"{folder}/{ONE}: truncated: 5 bytes missing of ")
    assert second.startswith(f"{folder}/{TWO}: truncated: 7 bytes missing of ")


def test_total_size(folder: Path) -> None:
    index(folder, {"a": ONE, "b": ONE, "c": TWO}, 3)
    assert summary(open_directory(folder))[2] == (f"{folder}/{INDEX}: total_size is 3, the tensors take 48 bytes",)
    index(folder, {"a": ONE, "b": ONE, "c": TWO}, 48.0)
    assert summary(open_directory(folder))[2] == ()


def test_ghost(folder: Path) -> None:
    index(folder, {"a": ONE, "b": ONE, "c": TWO, "g": TWO})
    text = f"{folder}/{INDEX}: no shard holds 'g', which '{TWO}' should; download the model again"
    assert faults(folder) == [text]


def test_tensor_in_two_shards(folder: Path) -> None:
    weights(folder / TWO, "a", "c", fill=9)
    found = open_directory(folder)
    taken = found.tensors[0]
    assert taken.source.read(taken.offset, taken.nbytes) == bytes(16)
    text = f"{folder}/{INDEX}: 'a' is in {ONE} and {TWO}, taken from {ONE}"
    assert summary(found) == (["a", "b", "c"], (ONE, TWO), (text,))


def test_tensor_in_the_other_shard(folder: Path) -> None:
    index(folder, {"a": TWO, "b": ONE, "c": TWO})
    text = f"{folder}/{INDEX}: 'a' is not in {TWO}, taken from {ONE}"
    assert summary(open_directory(folder)) == (["a", "b", "c"], (ONE, TWO), (text,))


def test_tensor_not_listed(folder: Path) -> None:
    index(folder, {"a": ONE, "c": TWO})
    assert summary(open_directory(folder))[2] == (f"{folder}/{INDEX}: does not list 'b', taken from {ONE}",)
    weights(folder / TWO, "b", "c")
    text = f"{folder}/{INDEX}: 'b' is in {ONE} and {TWO} and nothing says which counts; keep one"
    assert faults(folder) == [text]


@pytest.mark.parametrize("shard", ["../x.safetensors", "a/../../x", "/x.safetensors", "..\\x", "", "a\0b"])
def test_index_that_leads_out(folder: Path, shard: str) -> None:
    weights(folder.parent / "x.safetensors", "b")
    index(folder, {"a": ONE, "b": shard, "c": TWO})
    (text,) = faults(folder)
    shown = {"": ".", "a\0b": "a\\x00b"}.get(shard, shard)
    assert text == f"{folder}/{INDEX}: weight_map leads out of the folder with '{shown}'; name a file in it"


def test_shard_in_a_sub_folder(folder: Path) -> None:
    weights(folder / "sub" / "x.safetensors", "c")
    index(folder, {"a": f"./{ONE}", "b": ONE, "c": "sub/x.safetensors"})
    names, shards, _ = summary(open_directory(folder))
    assert (names, shards) == (["a", "b", "c"], (ONE, "sub/x.safetensors"))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'])
def test_index_without_a_map(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    reason = "has no weight_map from tensor names to file names; download it again"
    assert faults(folder) == [f"{folder}/{INDEX}: {reason}"]


def test_index_that_is_no_json_or_says_twice(folder: Path) -> None:
    (folder / INDEX).write_text("<html>")
    assert faults(folder)[0].startswith(f"{folder}/{INDEX}: the index is not valid JSON (Expecting value")
    (folder / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    assert faults(folder) == [f"{folder}/{INDEX}: weight_map names 'a' twice; download it again"]


def test_stray_single_beside_an_index(folder: Path) -> None:
    weights(folder / "model.safetensors", "a", "b", "c", fill=7)
    text = f"{folder}/model.safetensors: not used, the shards that {INDEX} names were taken"
    assert summary(open_directory(folder)) == (["a", "b", "c"], (ONE, TWO), (text,))


def test_numbered_without_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    text = f"{folder}: no {INDEX}; the shards were taken by the numbers in their names"
    assert summary(open_directory(folder)) == (["a", "b", "c"], (ONE, TWO), (text,))
    weights(folder / TWO, "a", "c")
    assert faults(folder) == [f"{folder}: 'a' is in {ONE} and {TWO} and nothing says which counts; keep one"]


def test_numbered_with_gaps(tmp_path: Path) -> None:
    weights(tmp_path / "model-00003-of-00004.safetensors", "a")
    missing = [f"{tmp_path}/model-0000{n}-of-00004.safetensors" for n in (1, 2, 4)]
    assert faults(tmp_path) == [f"{m}: missing, the others of its set are there; download it again" for m in missing]


def test_numbered_of_two_sets(folder: Path) -> None:
    (folder / INDEX).unlink()
    weights(folder / "model-00001-of-00003.safetensors", "a")
    sets = "model-*-of-00002, model-*-of-00003"
    assert faults(folder) == [f"{folder}: shards of several sets ({sets}) and no index; keep one set"]


def test_single_beside_numbered_without_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    weights(folder / "model.safetensors", "z")
    names, shards, warnings = summary(open_directory(folder))
    assert (names, shards) == (["z"], ("model.safetensors",))
    assert warnings == tuple(f"{folder}/{s}: not used, model.safetensors was taken" for s in (ONE, TWO))


def test_several_singles(tmp_path: Path) -> None:
    weights(tmp_path / "x.safetensors", "a")
    weights(tmp_path / "y.safetensors", "a")
    text = "several weight files and none is model.safetensors: x.safetensors, y.safetensors; give the file itself"
    assert faults(tmp_path) == [f"{tmp_path}: {text}"]


def test_a_folder_of_pytorch_files(tmp_path: Path) -> None:
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    torch.save({"a": torch.ones(4), "step": 1}, tmp_path / one)
    torch.save({"b": torch.ones(4).to(torch.bfloat16)}, tmp_path / two)
    torch.save({"x": torch.ones(1)}, tmp_path / "training_args.bin")
    table = {"metadata": {"total_size": 24}, "weight_map": {"a": one, "b": two}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(table))
    opened = open_directory(tmp_path)
    assert [tensor.name for tensor in opened.tensors] == ["a", "b"]
    assert opened.shards == (one, two)
    assert opened.warnings == (f"{tmp_path}/{one}: left out, being no tensors of the model: 'step'",)
    assert opened.companions == ()
    opened.close()
    weights(tmp_path / "model.safetensors", "c")
    assert [tensor.name for tensor in open_directory(tmp_path).tensors] == ["c"], "safetensors count where they are"


def test_a_pickle_of_another_name_is_named_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "args.bin")  # opening it would wait for ever
    text = "the folder has no *.safetensors and no pytorch_model*.bin; give the file itself"
    assert faults(tmp_path) == [f"{tmp_path}/args.bin: {text}"]


def test_folders_without_weights(tmp_path: Path) -> None:
    assert faults(tmp_path) == [f"{tmp_path}: no *.safetensors file in the folder"]
    (tmp_path / "m.gguf").touch()
    assert faults(tmp_path) == [f"{tmp_path}/m.gguf: the folder holds GGUF files; give the file itself"]
    assert faults(tmp_path / "x") == [f"{tmp_path}/x: cannot be read as a folder: No such file or directory"]
    (tmp_path / "l").symlink_to("gone")
    text = f"{tmp_path}/l (a link to {tmp_path}/gone): cannot be read as a folder: No such file or directory"
    assert faults(tmp_path / "l") == [text]


def cached(tmp_path: Path) -> Path:
    """A snapshot of a Hugging Face cache: links to blobs."""
    snapshot = tmp_path / "models--a" / "snapshots" / "01"
    weights(tmp_path / "models--a" / "blobs" / "w", "a")
    (tmp_path / "models--a" / "blobs" / "c").write_text("{}")
    snapshot.mkdir(parents=True)
    for name, blob in (("model.safetensors", "w"), ("config.json", "c"), ("tokenizer.json", "c")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_cache_links_are_read_through(tmp_path: Path) -> None:
    found = open_directory(cached(tmp_path))
    assert found.companions == (Path("tokenizer.json"),)
    assert found.config_path is not None
    assert summary(found)[0] == ["a"]


def test_dangling_links_are_named_with_their_targets(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    blobs = tmp_path / "models--a" / "blobs"
    for blob in blobs.iterdir():
        blob.unlink()
    tail = "which is missing; download it again or mend the link"
    texts = [
        f"{snapshot}/config.json: is a link to {blobs}/c, {tail}",
        f"{snapshot}/model.safetensors: is a link to {blobs}/w, {tail}",
    ]
    assert shard_faults(snapshot) == (texts, [])
    (snapshot / "config.json").unlink()
    weights(blobs / "w", "a")
    text = f"{snapshot}/tokenizer.json: not copied, is a link to {blobs}/c, which is missing"
    assert summary(open_directory(snapshot))[2] == (text,)


GOES_ALONG = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "USE_POLICY.txt",
    "chat_template.jinja",
    "modeling_x.py",
    "modules.json",
    "1_Pooling/config.json",
    "spiece.model",
    "qwen.tiktoken",
    "additional_chat_templates/tool.jinja",
]
STAYS = [
    "model.onnx",
    "x.bin",
    "x.pt",
    "x.pth",
    "x.h5",
    "x.msgpack",
    "x.ot",
    "x.gguf",
    "x.npz",
    "pytorch_model.bin.index.json",
    "onnx/config.json",
    "openvino/a.json",
    "original/params.json",
    ".git/config.json",
    ".cache/a.json",
    ".gitattributes",
    "checkpoint-500/tokenizer.json",
    "training.log",
    "__pycache__/x.py",
]


def test_companions(folder: Path) -> None:
    for name in [*GOES_ALONG, *STAYS]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    found = open_directory(folder)
    assert found.companions == tuple(sorted(map(Path, GOES_ALONG)))
    assert summary(found)[2] == ()


def test_weights_in_a_sub_folder_are_said(folder: Path) -> None:
    weights(folder / "2_Dense" / "model.safetensors", "linear.weight")
    text = f"{folder}/2_Dense/model.safetensors: weights in a sub-folder are not widened and not copied"
    assert summary(open_directory(folder))[2] == (text,)


def test_plan_shards() -> None:
    sizes = [("a", 4), ("b", 6), ("c", 1), ("d", 20), ("e", 0), ("f", 10)]
    assert plan_shards(sizes, 10) == [[0, 1], [2], [3], [4, 5]]
    assert plan_shards(sizes, 1000) == [[0, 1, 2, 3, 4, 5]]
    assert plan_shards([], 10) == [[]]


def test_shard_names_and_index() -> None:
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == [ONE, TWO]
    text = '{\n  "metadata": {\n    "total_size": 7\n  },\n  "weight_map": {\n    "a": "y",\n    "b": "x"\n  }\n}\n'
    assert index_bytes({"b": "x", "a": "y"}, 7) == text.encode()


SIZES = {
    "5GB": 5 * 10**9,
    "500MB": 5 * 10**8,
    "2GiB": 2**31,
    "1000": 1000,
    "1.5 kb": 1500,
    "1TB": 10**12,
    "3mib": 3 << 20,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5XB", "0", "0.1", "1e3", "5 G B", "1" * 5000, "\uff15GB"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(WidenError) as caught:
        parse_size(text, "--max-shard-size")
    assert str(caught.value).startswith("--max-shard-size '")
    assert str(caught.value).endswith("': is no size; write for example 5GB, 500MB, 2GiB or 1000 (bytes)")


# What the files alone decide; in the other rows the fault is one of config or plan.
REFUSED = {"dir_index_ghost_tensor", "dir_index_traversal", "dir_no_index_gap"}
FAULTY_SHARDS = {"dir_missing_shard", "dir_shard_truncated", "dir_hf_cache_dangling", "dir_only_pickle"}


def _wild_rows() -> list[tuple[str, str, str]]:
    if not WILD.is_dir():
        return []
    with open(WILD / "EXPECT.tsv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["file"].startswith("dir_")]
    kinds = {"error": "sound", "ok": "sound", "warn": "warn"}
    special = dict.fromkeys(REFUSED, "refused") | dict.fromkeys(FAULTY_SHARDS, "faulty shards")
    return [(r["file"], special.get(r["file"].split("/")[0], kinds[r["must"]]), r["mention"]) for r in rows]


def _with_links(source: Path, copy: Path) -> None:
    """Copies a wild folder; where a checkout turned its links into texts (`../../blobs/x`), they are links again."""
    shutil.copytree(source, copy, symlinks=True)
    for file in [file for file in copy.rglob("*") if file.is_file() and not file.is_symlink()]:
        content = file.read_bytes()
        if content.startswith(b"../") and len(content) < 256:
            file.chmod(0o600)
            file.parent.chmod(0o700)
            file.unlink()
            file.symlink_to(os.fsdecode(content))


def check_wild(tmp_path: Path, file: str, kind: str, mention: str) -> None:
    top = file.split("/")[0]
    for path in WILD.glob("files/st_ok_f32.safetensors"):  # where dir_index_traversal leads to
        shutil.copy(path, tmp_path)
    _with_links(WILD / "files" / top, tmp_path / top)
    if kind == "refused":
        assert mention in "\n".join(faults(tmp_path / file))
        return
    if kind == "faulty shards":
        assert mention in "\n".join(shard_faults(tmp_path / file)[0])
        return
    _, _, warnings = summary(open_directory(tmp_path / file))
    assert kind == "sound" or mention in "\n".join(warnings)


# Without the folder nothing is collected, so that a clone has no skipped tests.
test_wild: Callable[..., None] | None = None
if _wild_rows():
    test_wild = pytest.mark.parametrize(("file", "kind", "mention"), _wild_rows())(check_wild)
