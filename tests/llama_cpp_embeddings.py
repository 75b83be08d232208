"""What an encoder's GGUF makes of tokens in llama.cpp: the hidden states as they are, not pooled and not normalised."""

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
from llama_cpp import CONTEXT, SECONDS, THREADS, LlamaCppError


def hidden_states(model: Path, prompts: Sequence[list[int]]) -> npt.NDArray[np.float64]:
    """The last hidden states of all prompts' tokens, [tokens, hidden]. Raises LlamaCppError where the model does not run."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.npy")
        done = subprocess.run(
            [sys.executable, __file__, str(model), str(answer)],
            input=json.dumps(list(prompts)), capture_output=True, text=True, errors="replace", timeout=SECONDS,
        )  # fmt: skip
        if done.returncode != 0 or not answer.exists():
            raise LlamaCppError(f"{model.name}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        states: npt.NDArray[np.float64] = np.load(answer)
        return states


def _serve(model: str, answer: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.warmup = params.fit_params = False
    params.verbosity = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    server = xllamacpp.Server(params)  # it stops when nothing refers to it
    address = urlsplit(server.listening_address).netloc
    rows = []
    for prompt in json.load(sys.stdin):
        connection = http.client.HTTPConnection(address, timeout=SECONDS)
        request = json.dumps({"content": prompt, "embd_normalize": -1})
        connection.request("POST", "/embeddings", request, {"Content-Type": "application/json"})
        reply = json.loads(connection.getresponse().read())
        if not isinstance(reply, list):
            raise SystemExit(f"no embeddings: {json.dumps(reply)[:1000]}")
        rows += reply[0]["embedding"]
    np.save(answer, np.array(rows, np.float64))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
