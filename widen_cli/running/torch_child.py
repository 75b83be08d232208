"""The child process that runs two models in transformers, one after the other, and compares what they put out.

`python -m widen_cli.running.torch_child REQUEST ANSWER`: both are JSON. Code that comes with a model is never run, and nothing
is fetched.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch.overrides import TorchFunctionMode

from widen_cli.running.comparison import Outputs
from widen_cli.running.judgement import Judged, bounds, disturbances, judged
from widen_cli.running.torch_inputs import Inputs, RefusedError, of_text, seeded

DRAWS = 2  # disturbances of the weights
CHUNK = 1 << 22  # of a weight's values, disturbed at once
TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a request's two models, or the fault that kept one of them from running."""
    _quiet()
    try:
        return _compared(request)
    except RefusedError as error:
        return {"fault": str(error)}


def _compared(request: dict[str, Any]) -> dict[str, Any]:
    dtype = request["dtype"]
    notes: list[str] = []
    with Float64Throughout() if dtype == "float64" else nullcontext():
        model = _load(request["narrow"], TYPES[dtype], notes)
        inputs = _inputs(model, request)
        kind, narrow = type(model).__name__, _run(model, inputs, request["narrow"])
        disturbed = []
        roundings = disturbances(ROUNDOFF[dtype], request["roundoff"]) if request["tolerance"] is None else []
        for times, roundoff in roundings:
            for draw in range(DRAWS):
                _disturb(model, roundoff, draw)
                disturbed.append((times, _run(model, inputs, request["narrow"])))
        allowed = bounds(narrow, disturbed, ROUNDOFF[dtype], request["tolerance"])
        del model, disturbed
        gc.collect()
        model = _load(request["wide"], TYPES[dtype], notes)
        wide = _run(model, inputs, request["wide"])
    verdicts = judged(narrow, wide, allowed, request["scales"])
    return {
        "runtime": f"transformers {transformers.__version__} ({kind}, {dtype})",
        "inputs": inputs.told,
        "outputs": [_figures(verdict) for verdict in verdicts],
        "notes": notes,
    }


def _figures(verdict: Judged) -> dict[str, Any]:
    return {"same": verdict.same, "told": str(verdict), "figures": verdict.as_json()}


def _inputs(model: Any, request: dict[str, Any]) -> Inputs:
    where = request["narrow"]
    try:
        if request["text"] is not None:
            return of_text(model, request["text"], where["tokenizer"])
        return seeded(model, request["seed"])
    except RefusedError as error:
        raise RefusedError(f"{where['name']}: {error}") from None


def _load(where: dict[str, Any], dtype: torch.dtype, notes: list[str]) -> Any:
    """The model in a folder, with its adapter, as transformers' own class for it."""
    config = json.loads(Path(where["folder"], "config.json").read_text(encoding="utf-8"))
    kind = _kind(where["name"], config)
    try:
        model, info = kind.from_pretrained(
            where["folder"], dtype=dtype, attn_implementation="eager", output_loading_info=True,
            local_files_only=True, trust_remote_code=False,
        )  # fmt: skip
    except Exception as error:
        why = _said(error)
        if (part := _ends_within_a_block(where["folder"])) is not None:
            why = f"it makes numbers of FP8 blocks only where whole blocks fill a weight, and '{part}' ends within one"
        raise RefusedError(f"{where['name']}: transformers does not load it: {why}") from error
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        raise RefusedError(
            f"{where['name']}: {type(model).__name__} has {len(missing)} weights that are not in the file, such as "
            f"'{missing[0]}', and would draw them at random; correct architectures in the config"
        )
    if unused:
        notes.append(
            f"{where['name']}: {type(model).__name__} does not use {len(unused)} weights, such as '{unused[0]}'"
        )
    # Experts one by one in plain torch: the grouped product knows no float64.
    model.config._experts_implementation = "eager"
    return _adapted(model, where).eval()


def _kind(name: str, config: dict[str, Any]) -> Any:
    """The class of the config's first architecture."""
    stated = config.get("architectures") or []
    if not stated:
        return transformers.AutoModel
    kind = getattr(transformers, str(stated[0]), None)
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    own = ", and the code that comes with a model is not run" if "auto_map" in config else ""
    raise RefusedError(f"{name}: transformers {transformers.__version__} has no class {stated[0]}{own}")


def _adapted(model: Any, where: dict[str, Any]) -> Any:
    if where["adapter"] is None:
        return model
    try:
        import peft

        adapted = peft.PeftModel.from_pretrained(model, where["adapter"], autocast_adapter_dtype=False)
    except ImportError:
        raise RefusedError(
            f"{where['name']}: an adapter is run by peft, which is not installed: pip install peft"
        ) from None
    except Exception as error:
        raise RefusedError(f"{where['name']}: peft does not load it: {_said(error)}") from error
    # The base itself computes with the adapter from now on, and says what it takes.
    return adapted.get_base_model()


def _run(model: Any, inputs: Inputs, where: dict[str, Any]) -> Outputs:
    """All outputs that are tensors of numbers."""
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            found = model(**inputs.arguments)
    except Exception as error:
        raise RefusedError(f"{where['name']}: transformers does not run it: {_said(error)}") from error
    floats = {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
    }
    if not floats:
        raise RefusedError(f"{where['name']}: {type(model).__name__} puts out no tensors to compare")
    return {name: (value if value.dtype == torch.float64 else value.float()).numpy() for name, value in floats.items()}


def _disturb(model: Any, roundoff: float, draw: int) -> None:
    """Every weight is off by up to one rounding, at random."""
    generator = torch.Generator().manual_seed(1 + draw)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dtype not in TYPES.values():
                continue
            whole = weight.data
            for part in whole.view(-1).split(CHUNK) if whole.is_contiguous() else (whole,):
                noise = torch.rand(part.shape, generator=generator, dtype=torch.float64) * 2 - 1
                part.copy_(part * (1 + noise * roundoff))


def _ends_within_a_block(folder: str) -> str | None:
    """The first weight of which a block of scales covers a part alone."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as tensors:
            sizes: dict[str, list[int]] = {
                name: tensors.get_slice(name).get_shape()
                for name in tensors.keys()  # noqa: SIM118
            }
        for name, shape in sorted(sizes.items()):
            if any(
                size % blocks for size, blocks in zip(shape, sizes.get(f"{name}_scale_inv", ()), strict=False) if blocks
            ):
                return name
    return None


def _said(error: Exception) -> str:
    """The first line of what went wrong."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:400]


def _quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class Float64Throughout(TorchFunctionMode):
    """Within this context every request for float32 is one for float64.

    transformers computes RMSNorm, softmax and the rotary tables in float32 even inside a float64 model, which hides everything
    below 1e-7.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*widened, **named)


def main(request: str, target: str) -> None:
    """Answers a request's file in another."""
    found = answer(json.loads(Path(request).read_text(encoding="utf-8")))
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
