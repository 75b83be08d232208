"""What lies beside the weights of a Hugging Face directory and goes along with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any

from widen_cli.checkpoint import Checkpoint
from widen_cli.config import ModelConfig, read_json
from widen_cli.errors import Faults, WidenError, brief, printable
from widen_cli.plan.numbered import Numbered


def companions_of(
    checkpoint: Checkpoint,
    given: str,
    output: str,
    sidecars: Mapping[str, Mapping[str, int | Fraction]],
    numbered: Mapping[str, Mapping[str, Numbered]],
) -> dict[str, Path | bytes]:
    """What lies beside the weights: files to copy, and sidecars that state a width, or heads by number, with the new ones.

    `sidecars` gives for a file pattern the factors of the widths it states, fractions on the way back, `numbered` where the
    heads go. An output folder inside the input's is no part of the model. Raises WidenError for what would not fit the wide
    model.
    """
    if checkpoint.directory is None:
        return {}
    source, target = Path(given), Path(os.path.realpath(output.rstrip("/")))
    _refuse_weighted_modules(source)
    _refuse_unreadable(source, checkpoint.directory.companions)
    found: dict[str, Path | bytes] = {}
    for relative in checkpoint.directory.companions:
        name = relative.as_posix()
        if Path(os.path.realpath(source / relative)).is_relative_to(target):
            continue
        grown = next((keys for pattern, keys in sidecars.items() if fnmatchcase(name, pattern)), None)
        moved = {key: each for key, each in numbered.get(name, {}).items() if each.moves}
        found[name] = source / relative
        if grown is not None:
            found[name] = _grown_sidecar(source / relative, grown)
        elif moved and (new := _renumbered_sidecar(source / relative, moved)) is not None:
            found[name] = new
    return found


def _refuse_unreadable(source: Path, companions: Iterable[Path]) -> None:
    """They are copied at the end, which is late to learn of it."""
    with Faults() as faults:
        for relative in companions:
            if not os.access(source / relative, os.R_OK):
                faults.add(
                    f"{printable(str(source / relative))}: permission denied; make it readable for you (chmod u+r)"
                )


def _refuse_weighted_modules(folder: Path) -> None:
    """A sentence-transformers module with weights of its own (Dense) reads what grows, and would not fit any more."""
    if not (folder / "modules.json").is_file():
        return
    modules = read_json(folder / "modules.json", "a list of modules")
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    with Faults() as faults:
        for path in [path for path in paths if isinstance(path, str) and path]:
            if _holds_weights(folder / path):
                faults.add(
                    f"{printable(str(folder / path))}: a module of sentence-transformers whose own weights read the model's "
                    "output, which grows; only the transformer is widened: take the module out of modules.json first"
                )


def _holds_weights(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):
        # Not there, no folder, or no name that a folder can have.
        return False
    return any(name.endswith(".safetensors") or name == "pytorch_model.bin" for name in names)


def _grown_sidecar(path: Path, grown: Mapping[str, int | Fraction]) -> bytes:
    values = _sidecar(path)
    widths = {key: values[key] * factor for key, factor in grown.items() if type(values.get(key)) is int}
    for key, width in widths.items():
        if not 0 < values[key] < 1 << 63:
            raise WidenError(f"{printable(str(path))}: {key} is {brief(values[key])}, which is no width")
        if width != int(width):
            raise WidenError(f"{printable(str(path))}: {key} is {values[key]}, no multiple of what it grows by")
    widths = {key: int(width) for key, width in widths.items()}
    return ModelConfig({**values, **widths}, str(path)).to_bytes()


def _renumbered_sidecar(path: Path, moved: Mapping[str, Numbered]) -> bytes | None:
    """The file with the heads that it names under their new numbers; None where it names none."""
    values = _sidecar(path)
    held = {key: each for key, each in moved.items() if values.get(key) is not None}
    for key, each in held.items():
        named = values[key]
        try:
            values[key] = each.renumbered(named)
        except ValueError as error:
            raise WidenError(
                f"{printable(str(path))}: {key} holds {brief(error.args[0])}, which is no [layer, head] of the model; correct it, "
                "or take it out"
            ) from None
        if named and not values[key]:
            raise WidenError(
                f"{printable(str(path))}: {key} names heads of layers alone that would be gone; keep one of these, or take it out"
            )
    return ModelConfig(values, str(path)).to_bytes() if held else None


def _sidecar(path: Path) -> dict[str, Any]:
    values = read_json(path, "a sidecar config")
    if not isinstance(values, dict):
        raise WidenError(
            f"{printable(str(path))}: a sidecar config is a JSON object, this is a {type(values).__name__}"
        )
    return values
