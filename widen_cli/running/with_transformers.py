"""Both models of a pair in transformers: which folders it loads, and what it is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.errors import WidenError, printable
from widen_cli.options import Options
from widen_cli.running.child import answer_of
from widen_cli.running.result import Asked, Known, Outcome, RunResult, roundoff_of

PICKLED = (".bin", ".pt", ".pth")


def run_in_transformers(options: Options, asked: Asked, known: Known, folder: Path) -> RunResult:
    """Runs narrow and wide one after the other and compares them. Raises WidenError where one of them does not run."""
    kinds = set[str]()
    narrow = _place(options.base or options.input, options.config, folder / "narrow", kinds)
    if options.base is not None:
        narrow |= _adapter(options.input, folder / "narrow")
        wide = _place(str(asked.wide_base), options.config_out, folder / "wide", kinds)
        wide |= _adapter(options.output, folder / "wide")
    else:
        wide = _place(options.output, options.config_out, folder / "wide", kinds)
    request = {
        "narrow": narrow,
        "wide": wide,
        "text": asked.text,
        "seed": asked.seed,
        "dtype": asked.dtype or ("float64" if "F64" in kinds else "float32"),
        "roundoff": roundoff_of(known.rounded),
        "scales": dict(known.scales),
        "tolerance": asked.tolerance,
    }
    answer = json.loads(answer_of("torch_child", request, folder, f"{narrow['name']}, {wide['name']}").read_text())
    if "fault" in answer:
        raise WidenError(printable(answer["fault"]))
    outputs = tuple(Outcome(one["same"], one["told"], one["figures"]) for one in answer["outputs"])
    return RunResult(answer["runtime"], answer["inputs"], outputs, tuple(answer["notes"]))


def _place(given: str, config: str | None, links: Path, kinds: set[str]) -> dict[str, Any]:
    """A model as the child is told of it: a folder with a config.json and weights under the names that transformers looks for."""
    checkpoint = open_checkpoint(given, config, {})
    checkpoint.close()
    if checkpoint.faults:
        raise WidenError(*checkpoint.faults)
    kinds |= {tensor.dtype.name for tensor in checkpoint.tensors}
    if checkpoint.config_path is None:
        raise WidenError(f"{printable(given)}: transformers runs no model without its config; name it with --config")
    beside = given if checkpoint.directory is not None else str(Path(given).parent)
    return {"name": given, "folder": _folder(given, checkpoint, links), "adapter": None, "tokenizer": beside}


def _folder(given: str, checkpoint: Checkpoint, links: Path) -> str:
    """The model's own folder, or one of links to its files."""
    config = Path(str(checkpoint.config_path)).absolute()
    if checkpoint.directory is not None and config == Path(given, "config.json").absolute():
        return given
    links.mkdir()
    if checkpoint.directory is not None:
        for path in Path(given).absolute().iterdir():
            if path.name != "config.json":
                (links / path.name).symlink_to(path)
    else:
        name = "pytorch_model.bin" if given.endswith(PICKLED) else "model.safetensors"
        (links / name).symlink_to(Path(given).absolute())
    (links / "config.json").symlink_to(config)
    return str(links)


def _adapter(given: str, links: Path) -> dict[str, Any]:
    """An adapter's folder under the names that PEFT looks for, and its name as the user gave it."""
    if os.path.isdir(given):
        return {"adapter": given, "name": given}
    folder = links.with_name(f"{links.name}_adapter")
    folder.mkdir()
    (folder / "adapter_model.safetensors").symlink_to(Path(given).absolute())
    (folder / "adapter_config.json").symlink_to(Path(given).absolute().with_name("adapter_config.json"))
    return {"adapter": str(folder), "name": given}
