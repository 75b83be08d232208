"""Proof by running: narrow and wide in an independent runtime, on the same inputs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from widen_cli.adapters import open_adapter
from widen_cli.checkpoint import open_checkpoint
from widen_cli.errors import WidenError, printable
from widen_cli.gguf.header import GGUF_MAGIC
from widen_cli.options import Options
from widen_cli.running.child import need
from widen_cli.running.result import Asked, Known, RunResult
from widen_cli.running.with_llama_cpp import run_in_llama_cpp
from widen_cli.running.with_transformers import run_in_transformers


def check_runnable(options: Options, asked: Asked) -> None:
    """Raises WidenError where it is plain before any work that the models cannot be run: without a runtime, or a base."""
    if options.base is not None and asked.wide_base is None:
        raise WidenError(
            f"{printable(options.output)}: an adapter runs on its base; name the wide one with --wide-base"
        )
    gguf = _is_gguf(options.input)
    if gguf != _is_gguf(options.output):
        raise WidenError(
            f"{printable(options.output)}: --run compares two models of a kind, and one of these is a GGUF and the other is not"
        )
    if gguf:
        need("llama.cpp", "xllamacpp")
    else:
        need("transformers", "torch", "transformers", *(["peft"] if options.base else []))


def run_both(options: Options, asked: Asked, known: Known | None) -> RunResult:
    """Runs `options.input` and `options.output`, GGUFs in llama.cpp and others in transformers, and compares what they put out.

    `known` is what is known of the wide model's making; without it every value may have been rounded. Raises WidenError
    where `check_runnable` does, or a runtime does not run one of them.
    """
    check_runnable(options, asked)
    run = run_in_llama_cpp if _is_gguf(options.input) else run_in_transformers
    try:
        with tempfile.TemporaryDirectory(prefix="widen-run-") as folder:
            return run(options, asked, known or _unknown(options), Path(folder))
    except OSError as error:
        raise WidenError(
            f"--run: its files in {printable(tempfile.gettempdir())} cannot be written: {error.strerror}; TMPDIR names another folder"
        ) from None


def _is_gguf(given: str) -> bool:
    if not os.path.isfile(given):
        return False
    with open(given, "rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _unknown(options: Options) -> Known:
    """Of a model of which nothing says how it was made: any value may be rounded to its type."""
    wide = options.output
    opened = open_adapter(wide, options.base) if options.base else open_checkpoint(wide, options.config_out, {})
    opened.close()
    return Known(
        tuple({tensor.dtype.name for tensor in opened.tensors if tensor.dtype.kind in ("float", "blocks")}), {}
    )
