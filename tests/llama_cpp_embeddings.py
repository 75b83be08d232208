"""What an encoder's GGUF makes of tokens in llama.cpp: the hidden states as they are, not pooled and not normalised."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp import in_child, leave, posted, started


def hidden_states(model: Path, prompts: Sequence[list[int]]) -> npt.NDArray[np.float64]:
    """The last hidden states of all prompts' tokens, [tokens, hidden]. Raises LlamaCppError where the model does not run."""
    return in_child(__file__, model, prompts)["states"]


def _serve(model: str, answer: str) -> None:
    import xllamacpp

    server = started(model, embedding=True, pooling_type=xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE)
    rows = []
    for prompt in json.load(sys.stdin):
        reply = posted(server, "/embeddings", {"content": prompt, "embd_normalize": -1})
        if not isinstance(reply, list):
            raise SystemExit(f"no embeddings: {json.dumps(reply)[:1000]}")
        rows += reply[0]["embedding"]
    leave(answer, states=np.array(rows, np.float64))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
