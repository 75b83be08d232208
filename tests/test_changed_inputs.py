"""An input that somebody writes to while it is read gives no output: what was read may be of two kinds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from widen_cli.collapse import collapse
from widen_cli.convert import prepare
from widen_cli.demo import make_checkpoint
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run


def change_while_read(path: Path) -> Callable[[int], None]:
    """Progress that writes to a file in the middle of it."""
    calls: list[int] = []

    def progress(nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 3:
            found = os.stat(path)
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))

    return progress


CASES = [(command, kind) for command in ("widen", "verify") for kind in ("safetensors", "bin", "strided bin")]
CASES += [("verify wide", "safetensors"), ("collapse", "safetensors")]


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_any_input_that_is_written_to_while_it_is_read_is_refused(command: str, kind: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "narrow")
    file = tmp_path / "narrow" / "model.safetensors"
    if kind != "safetensors":
        tensors = load_file(file)
        if kind == "strided bin":
            tensors = {
                name: each.t().contiguous().t() if each.ndim == 2 else torch.stack([each, each], 1)[:, 0]
                for name, each in tensors.items()
            }
        torch.save(tensors, tmp_path / "narrow" / "pytorch_model.bin")
        file.unlink()
        file = tmp_path / "narrow" / "pytorch_model.bin"
    given, wide = Options(str(tmp_path / "narrow"), str(tmp_path / "wide")), tmp_path / "wide" / "model.safetensors"
    if command != "widen":
        run(prepare(given), lambda nbytes: None)
    changed = wide if command in ("verify wide", "collapse") else file
    progress = change_while_read(changed)
    with pytest.raises(WidenError) as caught:
        {
            "widen": lambda: run(prepare(given), progress),
            "verify": lambda: verify(given, progress),
            "verify wide": lambda: verify(given, progress),
            "collapse": lambda: collapse(Options(str(wide.parent), str(tmp_path / "back")), None, progress, print),
        }[command]()
    assert caught.value.faults == (
        f"{changed}: was changed while it was read; run this again when nothing writes to it",
    )
    assert not (tmp_path / "back").exists()
    assert (tmp_path / "wide").exists() == (command != "widen")
