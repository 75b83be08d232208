"""The child process that runs one GGUF in llama.cpp, by the server in xllamacpp, and saves what it puts out.

`python -m widen_cli.running.llama_child REQUEST ANSWER`: a JSON file and one of numpy. The KV cache is float32 and there is no
flash attention, since llama.cpp's defaults round keys and values to halves.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import xllamacpp

from widen_cli.running.comparison import EMBEDDINGS, LOGITS

EVERY_TOKEN = 1 << 24  # more than any vocabulary has
POSITIONS = 8  # in a text
TEXT_LENGTH = 256  # tokens that a text is cut to
SURE = 1e6  # outweighs every logit
# llama.cpp takes the logarithm of a float32, which at about e**-87 begins to be none, and writes its lowest number for 0.
FLOOR = -80.0


def started(request: dict[str, Any]) -> Any:
    """The server with the request's model loaded. It stops when nothing refers to it."""
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = max(TEXT_LENGTH, *(len(prompt) for prompt in request["prompts"] or [[]])) + 16
    params.n_parallel = 1
    params.warmup = params.fit_params = False
    params.verbosity = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if request["encoder"]:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    return xllamacpp.Server(params)


def posted(server: Any, path: str, request: dict[str, Any]) -> Any:
    """What the server answers to a request, both JSON."""
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)
    connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def prompts_of(server: Any, text: str, longest: int) -> list[list[int]]:
    """The tokens of a text's beginnings, evenly spaced."""
    reply = posted(server, "/tokenize", {"content": text, "add_special": True})
    tokens = reply.get("tokens", [])[: min(TEXT_LENGTH, longest)]
    if not tokens:
        raise SystemExit(f"error: the text has no tokens: {json.dumps(reply)[:300]}")
    ends = sorted({-(-len(tokens) * part // POSITIONS) for part in range(1, POSITIONS + 1)})
    return [tokens[:end] for end in ends]


def next_tokens(server: Any, prompts: list[list[int]]) -> npt.NDArray[np.float64]:
    """The log-probabilities of the next token after each prompt, [prompts, vocabulary]; none is below FLOOR."""
    # A reply that ends within a letter comes without probabilities, so the token that follows is given; they are those before.
    letter = posted(server, "/tokenize", {"content": "a", "add_special": False}).get("tokens", [])[-1:]
    given = {"logit_bias": [[token, SURE] for token in letter], "temperature": 0, "samplers": ["temperature"]}
    rows = []
    for prompt in prompts:
        asked = {"prompt": prompt, "n_predict": 1, "n_probs": EVERY_TOKEN, "cache_prompt": False}
        reply = posted(server, "/completion", {**given, **asked})
        if not reply.get("completion_probabilities"):
            raise SystemExit(f"error: no probabilities: {json.dumps(reply)[:300]}")
        tokens = reply["completion_probabilities"][0]["top_logprobs"]
        row = np.full(max(token["id"] for token in tokens) + 1, np.nan)
        for token in tokens:
            # JSON has no NaN: llama.cpp writes null.
            row[token["id"]] = np.nan if token["logprob"] is None else token["logprob"]
        rows.append(np.maximum(row, FLOOR))
    return np.stack(rows)


def embeddings(server: Any, prompts: list[list[int]]) -> npt.NDArray[np.float64]:
    """Every token's embedding as it is, not pooled and not normalised, [tokens, hidden]."""
    rows: list[list[float]] = []
    for prompt in prompts:
        reply = posted(server, "/embeddings", {"content": prompt, "embd_normalize": -1})
        if not isinstance(reply, list):
            raise SystemExit(f"error: no embeddings: {json.dumps(reply)[:300]}")
        rows += reply[0]["embedding"]
    return np.array(rows, np.float64)


def main(asked: str, target: str) -> None:
    """Answers a request's file in another, and ends without tearing llama.cpp down."""
    request = json.loads(Path(asked).read_text(encoding="utf-8"))
    server = started(request)
    prompts = request["prompts"]
    if prompts is None:
        prompts = prompts_of(server, request["text"], request["longest"])
    name, ask = (EMBEDDINGS, embeddings) if request["encoder"] else (LOGITS, next_tokens)
    found: dict[str, Any] = {name: ask(server, prompts)}
    tokens = [token for prompt in prompts for token in prompt]
    with open(target, "wb") as file:
        np.savez(file, tokens=np.array(tokens), ends=np.cumsum([len(prompt) for prompt in prompts]), **found)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
