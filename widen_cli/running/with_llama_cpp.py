"""Both GGUFs of a pair in llama.cpp: what it is asked, and the narrow one disturbed, which tells the tolerance."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.convert import prepare
from widen_cli.errors import WidenError, printable
from widen_cli.gguf.header import read_gguf_header
from widen_cli.gguf.model import part_names
from widen_cli.options import Options
from widen_cli.plan.result import HIDDEN_STATES
from widen_cli.running.child import answer_of
from widen_cli.running.comparison import EMBEDDINGS, Outputs
from widen_cli.running.judgement import bounds, disturbances, judged
from widen_cli.running.result import ROUNDOFF, Asked, Known, Outcome, RunResult, roundoff_of
from widen_cli.sources import FileSource
from widen_cli.writing import run

LENGTHS = (1, 2, 4, 8, 16, 24, 32, 48)  # of the seeded prompts, after each of which the next token is asked for
CHUNK = 1 << 22  # of a tensor's values, disturbed at once
# ggml rounds what a matrix is multiplied by to halves for F16, to BF16 for that, and to 8 bits for quantised blocks.
# Floats it leaves, but some functions it looks up in tables of halves: too few values change places there at a last bit.
BLOCKS, FLOATS = 2.0**-8, 2.0**-20


def run_in_llama_cpp(options: Options, asked: Asked, known: Known, folder: Path) -> RunResult:
    """Runs narrow and wide one after the other and compares them. Raises WidenError where one of them does not run."""
    if asked.dtype not in (None, "float32"):
        raise WidenError(f"--run-dtype {asked.dtype}: llama.cpp runs a GGUF as it is stored, or its numbers in float32")
    narrow, wide = Path(options.input), Path(options.output)
    if asked.dtype == "float32":
        narrow, wide = (_numbers(path, folder / name) for path, name in ((narrow, "narrow"), (wide, "wide")))
    opened = open_checkpoint(str(narrow), None, {})
    opened.close()
    request = _request(opened, asked, options.threads)
    first, request["prompts"] = _answer(narrow, request, options.input, folder)
    disturbed = []
    roundings = disturbances(_roundoff(opened), roundoff_of(known.rounded))
    for draw, (times, roundoff) in enumerate(roundings if asked.tolerance is None else ()):
        copy = _disturbed(opened, folder, roundoff, draw)
        disturbed.append((times, _answer(copy, request, options.input, folder)[0]))
    other, _ = _answer(wide, request, options.output, folder)
    allowed = bounds(first, disturbed, FLOATS, asked.tolerance)
    scales = {EMBEDDINGS: known.scales[HIDDEN_STATES]} if HIDDEN_STATES in known.scales else {}
    outputs = tuple(Outcome(one.same, str(one), one.as_json()) for one in judged(first, other, allowed, scales))
    return RunResult(_runtime(asked), _told(request["prompts"], asked), outputs, ())


def _runtime(asked: Asked) -> str:
    from importlib.metadata import version  # imported when used: it takes a tenth of a short run

    return f"llama.cpp (xllamacpp {version('xllamacpp')}, {'as stored' if asked.dtype is None else 'dequantised'})"


def _told(prompts: list[list[int]], asked: Asked) -> str:
    """The inputs in words."""
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    return (
        f"the text's first {lengths} tokens"
        if asked.text is not None
        else f"{lengths} random tokens (seed {asked.seed})"
    )


def _numbers(path: Path, folder: Path) -> Path:
    """The model with its quantised blocks written as float32."""
    folder.mkdir()
    made = folder / "numbers.gguf"
    run(prepare(Options(str(path), str(made), grow="hidden=1", dequantize="F32")), lambda nbytes: None)
    return made


def _request(opened: Checkpoint, asked: Asked, threads: int) -> dict[str, Any]:
    """What the child is asked: of a decoder for the next token after each prompt, of an encoder for every token's embedding."""
    model, name = opened.gguf, printable(opened.name)
    if model is None:
        raise WidenError(f"{name}: is no GGUF, and the other model is one; give two of a kind")
    longest = int(opened.config.get("context_length") or LENGTHS[-1])
    prompts = None
    if asked.text is None:
        vocabulary = model.header.values.get("tokenizer.ggml.tokens")
        if vocabulary is None or not isinstance(vocabulary.value, Sequence):
            raise WidenError(f"{name}: has no tokenizer, without which llama.cpp loads no model")
        draw = random.Random(asked.seed)
        tokens = [draw.randrange(len(vocabulary.value)) for _ in range(min(LENGTHS[-1], longest))]
        prompts = [tokens[:length] for length in LENGTHS if length <= len(tokens)]
    encoder = opened.config.get("attention.causal") is False
    return {"encoder": encoder, "prompts": prompts, "text": asked.text, "longest": longest, "threads": threads}


def _answer(model: Path, request: dict[str, Any], name: str, folder: Path) -> tuple[Outputs, list[list[int]]]:
    """What a model puts out, and the prompts' tokens."""
    path = answer_of("llama_child", {**request, "model": str(model)}, folder, name)
    with np.load(path, allow_pickle=False) as saved:
        found = dict(saved)
    tokens, ends = found.pop("tokens").tolist(), found.pop("ends").tolist()
    return found, [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _roundoff(opened: Checkpoint) -> float:
    """The coarsest rounding in llama.cpp's products, by the types of the matrices."""
    kinds = [tensor.dtype for tensor in opened.tensors if len(tensor.shape) > 1]
    return max([FLOATS, *(BLOCKS if kind.kind == "blocks" else ROUNDOFF.get(kind.name, 0.0) for kind in kinds)])


def _disturbed(opened: Checkpoint, folder: Path, roundoff: float, draw: int) -> Path:
    """A copy in which every float32 number is off by up to one rounding: of a quantised model the gains and biases, which
    moves what its matrices are multiplied by."""
    files = opened.gguf.files if opened.gguf else ()
    names = part_names("disturbed.gguf", len(files)) if len(files) > 1 else ["disturbed.gguf"]
    random_numbers, changed = np.random.default_rng(draw), 0
    for file, name in zip(files, names, strict=True):
        shutil.copyfile(file, folder / name)
        source = FileSource(folder / name)
        tensors = [tensor for tensor in read_gguf_header(source).tensors if tensor.type.name == "F32"]
        source.close()
        for tensor in tensors:
            values = np.memmap(folder / name, "<f4", "r+", tensor.offset, (tensor.nbytes // 4,))
            for start in range(0, len(values), CHUNK):
                part = values[start : start + CHUNK]
                part *= 1 + random_numbers.uniform(-roundoff, roundoff, len(part))
            values.flush()
            changed += len(values)
    if not changed:
        raise WidenError(
            f"{printable(opened.name)}: holds no float32 numbers, by whose disturbance the tolerance is measured; give --tolerance"
        )
    return folder / names[0]
