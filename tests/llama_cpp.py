"""Runs a GGUF in llama.cpp (xllamacpp), in a process of its own: where llama.cpp crashes, a test fails and pytest lives.

A float check wants an F32 KV cache and no flash attention: llama.cpp's defaults round keys and values to halves.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

Prompt = str | list[int]
LogProbabilities = npt.NDArray[np.float64]

CONTEXT = 256
THREADS = 1  # more of them wait for each other, spinning, where cores are shared
SECONDS = 120
EVERY_TOKEN = 1 << 20  # more than any vocabulary has


class LlamaCppError(Exception):
    """llama.cpp refused the model, crashed or answered nonsense; the text is the end of what it said."""


def log_probabilities(model: Path, prompts: Sequence[Prompt]) -> LogProbabilities:
    """The log-probabilities of the next token after each prompt (text or token numbers), [prompts, vocabulary].

    Raises LlamaCppError where the model does not run.
    """
    return in_child(__file__, model, prompts)["logs"]


def in_child(
    script: str, model: Path, prompts: Sequence[Prompt], seconds: int = SECONDS
) -> dict[str, npt.NDArray[Any]]:
    """The arrays that `script` saves when it is run with a model and an answer file, the prompts on its standard input.

    Raises LlamaCppError where it ends without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.npz")
        done = subprocess.run(
            [sys.executable, script, str(model), str(answer)],
            input=json.dumps(list(prompts)), capture_output=True, text=True, errors="replace", timeout=seconds,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # it would call gdb, which hides the message
        )  # fmt: skip
        if done.returncode != 0 or not answer.exists():
            raise LlamaCppError(f"{model.name}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        with np.load(answer) as saved:
            return dict(saved)


def difference(one: LogProbabilities, other: LogProbabilities) -> float:
    """The largest difference of two log-probabilities; NaN where one is NaN, which no bound holds."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


def started(model: str, **settings: Any) -> Any:
    """In the child: llama.cpp's server with a model loaded. It stops when nothing refers to it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.warmup = params.fit_params = False
    params.verbosity = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for name, value in settings.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def posted(server: Any, path: str, request: dict[str, Any], seconds: int = SECONDS) -> Any:
    """In the child: what the server answers to a request, both JSON."""
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc, timeout=seconds)
    connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def completed(server: Any, request: dict[str, Any], seconds: int = SECONDS) -> dict[str, Any]:
    """In the child: a completion of temperature 0 with probabilities.

    `samplers` cuts nothing off: the probabilities are those before sampling.
    """
    settled = {"temperature": 0, "samplers": ["temperature"], **request}
    reply: dict[str, Any] = posted(server, "/completion", settled, seconds)
    if "completion_probabilities" not in reply:
        raise SystemExit(f"no probabilities: {json.dumps(reply)[:1000]}")
    return reply


def leave(answer: str, **arrays: npt.ArrayLike) -> NoReturn:
    """In the child: saves the answer and ends without tearing llama.cpp down."""
    np.savez(answer, **arrays)
    sys.stderr.flush()
    os._exit(0)


def _serve(model: str, answer: str) -> None:
    server = started(model)
    leave(answer, logs=np.stack([_next_token(server, prompt) for prompt in json.load(sys.stdin)]))


def _next_token(server: Any, prompt: Prompt) -> LogProbabilities:
    request = {"prompt": prompt, "n_predict": 1, "n_probs": EVERY_TOKEN, "cache_prompt": False}
    tokens = completed(server, request)["completion_probabilities"][0]["top_logprobs"]
    row = np.full(len(tokens), np.nan)
    for token in tokens:
        # JSON has no NaN: llama.cpp writes null.
        row[token["id"]] = np.nan if token["logprob"] is None else token["logprob"]
    return row


if __name__ == "__main__":
    _serve(*sys.argv[1:])
