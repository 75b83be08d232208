"""Sizes that differ from layer to layer: lists in a GGUF's metadata, run in llama.cpp's deci graph, which goes by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_families import CONTEXT, EPS, RMS, VOCAB, drawn, write_arrays
from llama_cpp import difference, log_probabilities

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.writing import run

HEADS, KV_HEADS, FFN = (6, 4, 0, 2), (3, 1, 0, 2), (50, 0, 30, 22)
HIDDEN, HEAD = 36, 10
PROMPTS = [[5, 9, 44], [7, 80, 3, 3, 61, 12, 99, 40, 23], [int(token) for token in np.arange(3, 43)]]
BOUND = 2e-4


def write(path: Path, changed: dict[str, Any] | None = None, stated: bool = True) -> Path:
    """A model of four layers of which no two are alike: the second has no FFN, the third no attention.

    Where it is not `stated`, a head has the size that hidden and the first layer's heads make.
    """
    values: dict[str, Any] = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": len(HEADS), "vocab_size": VOCAB,
        "attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD, RMS: EPS,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "feed_forward_length": FFN, **(changed or {}),
    }  # fmt: skip
    for key in () if stated else ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        del values[key]
    found = shapes(HEAD if stated else HIDDEN // HEADS[0])
    return write_arrays(path, "deci", values, {name: drawn(name, shape) for name, shape in found.items()})


def shapes(head: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer, (heads, kv_heads, ffn) in enumerate(zip(HEADS, KV_HEADS, FFN, strict=True)):
        block: dict[str, tuple[int, ...]] = {}
        if heads:
            block |= {"attn_norm": (HIDDEN,), "attn_q": (heads * head, HIDDEN), "attn_output": (HIDDEN, heads * head)}
            block |= {"attn_k": (kv_heads * head, HIDDEN), "attn_v": (kv_heads * head, HIDDEN)}
        if ffn:
            block |= {
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (ffn, HIDDEN),
                "ffn_up": (ffn, HIDDEN),
                "ffn_down": (HIDDEN, ffn),
            }
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found


def widened(path: Path, out: Path, **options: Any) -> Report:
    return run(prepare(Options(str(path), str(out), **options)), lambda nbytes: None)


@pytest.mark.parametrize("mode", ["orthogonal", "copy", "sum", "quiet"])
@pytest.mark.parametrize(
    "grow", [None, "hidden=2,intermediate=3,heads=2,kv_heads=2", "hidden=3,heads=2,kv_heads=1", "head_dim=2"]
)
def test_every_layer_grows_from_its_own_size(tmp_path: Path, mode: str, grow: str | None) -> None:
    narrow, wide = write(tmp_path / "narrow.gguf"), tmp_path / "wide.gguf"
    factors = widened(narrow, wide, grow=grow, scaling=mode).job.plan.factors
    assert difference(log_probabilities(narrow, PROMPTS), log_probabilities(wide, PROMPTS)) <= BOUND
    fields = gguf.GGUFReader(wide).fields
    for key, old, axis in (
        ("attention.head_count", HEADS, "heads"),
        ("attention.head_count_kv", KV_HEADS, "kv_heads"),
        ("feed_forward_length", FFN, "intermediate"),
    ):
        assert fields[f"deci.{key}"].contents() == [size * factors[axis] for size in old]


@pytest.mark.parametrize(
    "grow", ["hidden=2,intermediate=3,heads=2,kv_heads=2", "heads=3", "hidden=3,heads=1,head_dim=3"]
)
def test_heads_whose_size_the_first_layer_tells(tmp_path: Path, grow: str) -> None:
    narrow, wide = write(tmp_path / "narrow.gguf", stated=False), tmp_path / "wide.gguf"
    widened(narrow, wide, grow=grow)
    assert difference(log_probabilities(narrow, PROMPTS), log_probabilities(wide, PROMPTS)) <= BOUND


def test_heads_of_one_layer_that_the_kv_heads_no_longer_divide(tmp_path: Path) -> None:
    """6 and 3, 4 and 1 go on with kv heads doubled; 2 and 2 do not."""
    narrow = write(tmp_path / "narrow.gguf")
    with pytest.raises(WidenError) as caught:
        widened(narrow, tmp_path / "wide.gguf", grow="kv_heads=2")
    assert list(caught.value.faults) == [
        f"{narrow}: the wide model would have heads 2, kv_heads 4 in layer 3, and 'deci' needs heads % kv_heads == 0; "
        "choose other factors with --grow"
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"feed_forward_length": (50, 0, 30)}, "feed_forward_length has 3 values for 4 layers"),
        ({"attention.head_count": (6, 4, -1, 2)}, "attention.head_count is a list of something else than whole numbers from 0 up"),
        ({"feed_forward_length": (50, 0, 31, 22)}, "tensor 'blk.2.ffn_gate.weight' has shape [30, 36], but gate <- normed needs 31"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    narrow = write(tmp_path / "narrow.gguf", changed)
    with pytest.raises(WidenError) as caught:
        widened(narrow, tmp_path / "wide.gguf")
    assert message in str(caught.value)
    assert not (tmp_path / "wide.gguf").exists()
