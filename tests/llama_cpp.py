"""Runs a GGUF in llama.cpp (xllamacpp), in a process of its own: where llama.cpp crashes, a test fails and pytest lives.

A float check wants an F32 KV cache and no flash attention: llama.cpp's defaults round keys and values to halves.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
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
        answer, asked, said = (Path(folder, name) for name in ("answer.npz", "prompts", "said"))
        asked.write_text(json.dumps(list(prompts)))
        job = {"argv": [script, str(model), str(answer)], "stdin": str(asked), "said": str(said)}
        code = _nursery().run(job, seconds)
        if code != 0 or not answer.exists():
            raise LlamaCppError(f"{model.name}: exit code {code}: {said.read_text(errors='replace')[-2000:]}")
        with np.load(answer) as saved:
            return dict(saved)


class _Nursery:
    """A process that has imported llama.cpp and forks a child for every run: importing takes longer than running a tiny model."""

    def __init__(self) -> None:
        # With a backtrace llama.cpp would call gdb, which hides the message.
        alone = {"GGML_NO_BACKTRACE": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **alone}, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        # Not select(): it takes no descriptor above 1023.
        self._answers = select.poll()
        self._answers.register(self._process.stdout, select.POLLIN)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: dict[str, Any], seconds: int) -> int:
        """The exit code of a job's child, negative for a signal. LlamaCppError after `seconds`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not self._answers.poll(1000 * seconds):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise LlamaCppError(f"{job['argv'][1]}: no answer after {seconds} s")
        return int(self._process.stdout.readline())


_own = threading.local()  # one for each thread: a nursery has one job at a time


def _nursery() -> _Nursery:
    found: _Nursery | None = getattr(_own, "nursery", None)
    if found is None or not found.alive:
        found = _own.nursery = _Nursery()
    return found


def _fork_for_every_job() -> None:
    import xllamacpp  # noqa: F401 - what the children need is imported once

    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _be_child(job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _be_child(job: dict[str, Any]) -> NoReturn:
    """Runs the job's script as if Python had been started with it."""
    os.dup2(os.open(job["stdin"], os.O_RDONLY), 0)
    said = os.open(job["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdin, sys.argv = open(0, closefd=False), job["argv"]  # noqa: SIM115
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # an answer ends the child before


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
    _serve(*sys.argv[1:]) if sys.argv[1:] else _fork_for_every_job()
