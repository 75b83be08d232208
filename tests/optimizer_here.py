"""What the child process of --optimizer does, done in this one, which has the libraries loaded already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widen_cli.running import optimizer_child


def answer(module: str, request: dict[str, Any], folder: Path, name: str) -> Path:
    """Stands for `widen_cli.moments.attach.answer_of`: the file that holds the child's answer to the request."""
    done = optimizer_child.orders(request) if "configs" in request else optimizer_child.written(request)
    (folder / "answer").write_text(json.dumps(done))
    return folder / "answer"
