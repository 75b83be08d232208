"""Runs a runtime in a process of its own: this one never imports torch, and lives on where the other crashes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import widen_cli
from widen_cli.errors import WidenError, printable

INSTALL = "pip install 'widen-ckpt[verify]'"
# Nothing is fetched; with a backtrace llama.cpp would call gdb, which hides the message.
ALONE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GGML_NO_BACKTRACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def need(runtime: str, *packages: str) -> None:
    """Raises WidenError where one of the packages that a runtime is made of is not installed."""
    require(f"--run: runs the models in {runtime}", *packages)


def require(told: str, *packages: str) -> None:
    """Raises WidenError where one of the packages is missing that an option asks for; `told` is what it does with them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise WidenError(
            f"{told}, and {' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed; {INSTALL}"
        )


def answer_of(module: str, request: dict[str, Any], folder: Path, name: str) -> Path:
    """The file with which a module of this room answers a request; WidenError where it ends without one.

    `name` is what is run, for the message.
    """
    asked, answer, said = (folder / part for part in ("request.json", "answer", "said"))
    answer.unlink(missing_ok=True)
    asked.write_text(json.dumps(request), encoding="utf-8")
    root = str(Path(widen_cli.__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    environment = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join([root, known] if known else [root])}
    # -P: what lies in the folder that one happens to be in is not imported.
    command = [sys.executable, "-P", "-m", f"widen_cli.running.{module}", str(asked), str(answer)]
    with said.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0 or not answer.exists():
        raise WidenError(f"{printable(name)}: {_ended(code)}: {_last_words(said)}")
    return answer


def _ended(code: int) -> str:
    if code >= 0:
        return f"could not be run (exit code {code})"
    try:
        return f"crashed its runtime ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed its runtime (signal {-code})"


def _last_words(said: Path) -> str:
    """The lines that speak of an error, or the last ones, of bearable length."""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "assert" in line.lower()]
    return printable(" / ".join((errors or lines)[-3:])[-600:]) or "it said nothing"
