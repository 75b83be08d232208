"""The child process that knows an optimizer's parameters: it lists them in transformers' order, and writes a grown state.

`python -m widen_cli.running.optimizer_child REQUEST ANSWER`: REQUEST is JSON. No weight is loaded and no code that comes with a
model is run; what is loaded of a state is loaded with `weights_only`.
Source: https://github.com/huggingface/transformers, trainer.py (`create_optimizer`, `get_decay_parameter_names`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from widen_cli.running.stored_parts import stored_parts

# Names that the Trainer exempts from weight decay: those of transformers 5, and of transformers 4, which knew biases alone
# and told norms by their classes.
NEWER = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
OLDER = [r"bias"]


def orders(request: dict[str, Any]) -> list[dict[str, Any]]:
    """For each config the model's class, its parameters in order with their shapes, which of them decay, other names of each, and
    the tensors of a checkpoint that it is made of."""
    return [_order(config) for config in request["configs"]]


def _order(values: dict[str, Any]) -> dict[str, Any]:
    from transformers.trainer_pt_utils import get_parameter_names

    stated = values.get("architectures") or []
    kind: Any = getattr(transformers, str(stated[0]), None) if stated else None
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        told = f"no class {stated[0]}" if stated else "no class for a config without architectures"
        return {"fault": f"transformers {transformers.__version__} has {told}"}
    try:
        with torch.device("meta"):
            model: Any = kind(_config(kind, values))
            model.tie_weights()
    except Exception as error:
        return {"fault": f"transformers does not make a {kind.__name__} of it: {str(error).splitlines()[0][:300]}"}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(names[id(parameter)], []).append(name)
    decays = [get_parameter_names(model, [torch.nn.LayerNorm], patterns) for patterns in (NEWER, OLDER)]
    return {
        "class": kind.__name__,
        "names": aliases,
        "shapes": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "decays": [[name for name in aliases if name in set(decay)] for decay in decays],
        "stored": stored_parts(model),
    }


def _config(kind: Any, values: dict[str, Any]) -> Any:
    """The config as the class reads it from a file, which knows how infinities are written there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(values))
        return kind.config_class.from_json_file(file)


def written(request: dict[str, Any]) -> dict[str, Any]:
    """Writes the state: every parameter's own entry with its grown moments, none for one that begins anew."""
    found = torch.load(
        request["state"],
        map_location="cpu",
        weights_only=True,
        mmap=True if zipfile.is_zipfile(request["state"]) else None,
    )
    state: dict[int, dict[str, Any]] = {}
    with safe_open(request["moments"], framework="pt") as moments:
        for name in moments.keys():  # noqa: SIM118
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = moments.get_tensor(name)
    for number, kept in state.items():
        state[number] = {**found["state"][request["origins"][str(number)]], **kept}
    groups = []
    for group, (numbers, names) in zip(found["param_groups"], request["groups"], strict=True):
        named = {"param_names": names} if "param_names" in group else {}
        groups.append({**group, "params": numbers, **named})
    torch.save({"state": state, "param_groups": groups}, request["output"])
    return {}


def main() -> None:
    asked, answer = map(Path, sys.argv[1:])
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    request = json.loads(asked.read_text(encoding="utf-8"))
    done = orders(request) if "configs" in request else written(request)
    answer.write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main()
