"""Of which tensors of a checkpoint each parameter of a model in memory is made, and where each of them lies in it.

transformers 5 holds what it computes at once as one parameter (all experts of a layer, gate and up side by side) and takes it
apart again to save it. Its own operations are run here on tensors without values: those that take apart give views, whose
strides and offsets say where they lie.
Source: https://github.com/huggingface/transformers, core_model_loading.py (`revert_weight_conversion`), conversion_mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Part = dict[str, Any]


def stored_parts(model: Any) -> dict[str, list[Part]]:
    """For each parameter of a model, by its name, the tensors that `save_pretrained` makes of it, in order.

    A part has its `name` and `shape` in the checkpoint, the place `at` which it begins in the parameter, and the dimension of
    the parameter `along` which each of its own lies. Parameters of which values are moved in other ways are left out.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())
    probes = {name: _probe(parameter.shape) for name, parameter in parameters.items()}
    owners = {_storage(probe): name for name, probe in probes.items()}
    with _ViewsStay():
        stored: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(probes))
    parts: dict[str, list[Part]] = {}
    for name, view in stored.items():
        owner = owners.get(_storage(view))
        if owner is not None:
            parts.setdefault(owner, []).append(_part(name, view, probes[owner].stride()))
    whole = {name: sum(math.prod(part["shape"]) for part in found) for name, found in parts.items()}
    return {
        name: sorted(found, key=lambda part: part["at"])
        for name, found in parts.items()
        if whole[name] == parameters[name].numel()
    }


class _ViewsStay(TorchFunctionMode):
    """Within this context a view is not copied to be contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _probe(shape: Sequence[int]) -> torch.Tensor:
    """A tensor without values, each dimension of which has a stride of its own, those of size 1 too."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size + 1
    return torch.empty_strided(tuple(shape), strides, device="meta")


def _part(name: str, view: torch.Tensor, strides: Sequence[int]) -> Part:
    """Where a view lies in a probe of these strides."""
    at, rest = [], view.storage_offset()
    for stride in strides:
        at.append(rest // stride)
        rest %= stride
    along = [strides.index(stride) for stride in view.stride()]
    return {"name": name, "shape": list(view.shape), "at": at, "along": along}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
