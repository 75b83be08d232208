"""The outputs of a run with several inputs: each under its input's own name, in one folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

from widen_cli.errors import WidenError, printable


def targets_in(folder: str, inputs: Sequence[str]) -> list[str]:
    """The output of each input. Raises WidenError where there is no folder, or an input has no name of its own."""
    if not folder or (os.path.lexists(folder) and not os.path.isdir(folder)):
        what = f"'{printable(folder)}' is no folder" if folder else "an empty name is no folder"
        raise WidenError(f"--into: {what}; name one, which is made where it does not exist")
    faults: list[str] = []
    targets: dict[str, str] = {}
    for given in inputs:
        name = "" if given == "-" else _name(given)
        target = os.path.join(folder, name)
        if not name:
            faults.append(f"--into: '{printable(given)}' has no name for its output; name a file or a folder")
        elif target in targets:
            faults.append(
                f"--into: '{printable(targets[target])}' and '{printable(given)}' would both be {printable(target)}; "
                "widen one of them into another folder"
            )
        targets.setdefault(target, given)
    if faults:
        raise WidenError(*faults)
    return list(targets)


def _name(path: str) -> str:
    """The last part of a path; of one that ends in dots that of the folder it means."""
    name = os.path.basename(path.rstrip("/"))
    return os.path.basename(os.path.realpath(path)) if name in (".", "..") else name
