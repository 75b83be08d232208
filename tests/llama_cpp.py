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
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.npy")
        done = subprocess.run(
            [sys.executable, __file__, str(model), str(answer)],
            input=json.dumps(list(prompts)), capture_output=True, text=True, errors="replace", timeout=SECONDS,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # it would call gdb, which hides the message
        )  # fmt: skip
        if done.returncode != 0 or not answer.exists():
            raise LlamaCppError(f"{model.name}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return np.load(answer)


def difference(one: LogProbabilities, other: LogProbabilities) -> float:
    """The largest difference of two log-probabilities; NaN where one is NaN, which no bound holds."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


def _serve(model: str, answer: str) -> None:
    """The child: loads the model, asks for every prompt of standard input, and leaves without tearing llama.cpp down."""
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
    server = xllamacpp.Server(params)
    rows = [_next_token(server.listening_address, prompt) for prompt in json.load(sys.stdin)]
    np.save(answer, np.stack(rows))
    sys.stderr.flush()
    os._exit(0)


def _next_token(address: str, prompt: Prompt) -> LogProbabilities:
    # `samplers` cuts nothing off: the probabilities are those before sampling.
    request = {
        "prompt": prompt, "n_predict": 1, "n_probs": EVERY_TOKEN,
        "temperature": 0, "samplers": ["temperature"], "cache_prompt": False,
    }  # fmt: skip
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=SECONDS)
    connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
    reply = json.loads(connection.getresponse().read())
    if "completion_probabilities" not in reply:
        raise SystemExit(f"no probabilities: {json.dumps(reply)[:1000]}")
    tokens = reply["completion_probabilities"][0]["top_logprobs"]
    row = np.full(len(tokens), np.nan)
    for token in tokens:
        # JSON has no NaN: llama.cpp writes null.
        row[token["id"]] = np.nan if token["logprob"] is None else token["logprob"]
    return row


if __name__ == "__main__":
    _serve(*sys.argv[1:])
