"""LoRA adapters on disk: opened without a model's config, planned by the base that they belong to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.config import ModelConfig, read_json
from widen_cli.errors import WidenError, printable
from widen_cli.hf_directory import open_directory
from widen_cli.map_choice import check_settings, choose_map
from widen_cli.plan import Plan, PlanRequest
from widen_cli.plan.adapter_names import PREFIX
from widen_cli.plan.adapters import Adapter, Base, is_lora, plan_adapter
from widen_cli.plan.match import LORA
from widen_cli.plan.narrow_adapters import narrow_adapter
from widen_cli.safetensors_file import read_header
from widen_cli.sources import FileSource

CONFIG = "adapter_config.json"


def open_adapter(given: str, base: str) -> Checkpoint:
    """An adapter's folder or file, its headers checked. Raises WidenError with every fault found."""
    none = ModelConfig({}, "no config", present=False)
    if given == "-":
        raise WidenError("standard input: --base takes an adapter's folder or file; name it")
    if not os.path.isdir(given):
        source = FileSource(Path(given))
        try:
            header = read_header(source)
        except WidenError:
            source.close()
            raise
        files = (Path(given), Path(base))
        return _no_model(
            Checkpoint(given, header.tensors, header.metadata, none, none, None, None, files, (), adapter=True)
        )
    directory = open_directory(Path(given))
    shards = (Path(given), *(Path(given, shard) for shard in directory.shards), Path(base))
    warnings = directory.warnings
    if directory.config_path is not None:
        warnings += (
            f"{printable(str(directory.config_path))}: not copied, the config of a model is no part of an adapter",
        )
    return _no_model(Checkpoint(
        given, directory.tensors, directory.metadata, none, none, None, directory, shards, warnings, directory.faults,
        adapter=True,
    ))  # fmt: skip


def _no_model(adapter: Checkpoint) -> Checkpoint:
    """The adapter. Raises WidenError for a model that is given as one."""
    names = [tensor.name for tensor in adapter.tensors]
    if names and not any(is_lora(name) or name.startswith(PREFIX) for name in names):
        raise WidenError(
            f"{printable(adapter.name)}: is a model, not a LoRA adapter (it has '{printable(names[0])}'); leave --base out"
        )
    return adapter


def refuse_alone(checkpoint: Checkpoint) -> None:
    """Raises WidenError for an adapter that is given as if it were a model."""
    found = [tensor.name for tensor in checkpoint.tensors if is_lora(tensor.name)]
    if found and all(is_lora(tensor.name) or tensor.name.startswith(PREFIX) for tensor in checkpoint.tensors):
        raise WidenError(f"{printable(checkpoint.name)}: '{printable(found[0])}' and others: {LORA}")


def plan_with_base(
    adapter: Checkpoint,
    given: str,
    config: str | None,
    map_option: str | None,
    prefix: str | None,
    request: PlanRequest,
    back: bool = False,
) -> tuple[Plan, tuple[str, ...]]:
    """An adapter's plan by that of its base, the model `given`, and warnings; the other options are those of the base.

    `back`: the adapter is a wide one, and the plan is that of the narrow one that it was made of.
    Raises WidenError with every fault of either.
    """
    if adapter.faults:
        raise WidenError(*adapter.faults)
    if request.split:
        raise WidenError(
            f"{printable(adapter.name)}: {request.split}: is for models; an adapter fits a base that was split as it is, since copies of "
            "activations stay equal; leave it out, and name the --scaling that the base was widened with"
        )
    values, told = _adapter_config(adapter)
    base = open_checkpoint(given, config, request.settings, prefix)
    try:
        if base.gguf is not None:
            raise WidenError(
                f"{printable(given)}: is a GGUF, whose tensors an adapter of PEFT does not name; give the safetensors model with --base"
            )
        choice = choose_map(base, map_option)
        check_settings(choice.architecture, base.found_config, request.settings)
        if base.faults:
            raise WidenError(*base.faults)
        request = replace(request, file=base.name, root=choice.root)
        narrow = Base(choice.architecture, base.tensors, base.config.within(choice.section), request)
        wanted = Adapter(adapter.name, adapter.tensors, values)
        plan = plan_adapter(replace(wanted, tensors=narrow_adapter(wanted, narrow)) if back else wanted, narrow)
    finally:
        base.close()
    if back:
        return plan, (*base.warnings, *choice.warnings)
    pointed = (
        f" names '{printable(str(values['base_model_name_or_path']))}' and"
        if values.get("base_model_name_or_path")
        else ""
    )
    warnings: tuple[str, ...] = (
        f"{printable(adapter.name)}: fits {printable(given)} widened with the same options (scaling {plan.mode}) and no other model",
    )
    if values:
        warnings += (
            f"{told}: copied as it is; base_model_name_or_path{pointed} has to point to the wide base where the adapter is loaded by it",
        )
    return plan, (*base.warnings, *choice.warnings, *warnings)


def _adapter_config(adapter: Checkpoint) -> tuple[dict[str, Any], str]:
    """The values of the adapter_config.json in the folder or beside the file, none where there is no such file, and its name."""
    path = Path(adapter.name) / CONFIG if adapter.directory is not None else Path(adapter.name).with_name(CONFIG)
    told = printable(str(path))
    if not path.is_file():
        if adapter.directory is not None:
            raise WidenError(f"{told}: missing, and PEFT loads no adapter without it; fetch it")
        return {}, told
    values = read_json(path, "an adapter's config")
    if not isinstance(values, dict):
        raise WidenError(f"{told}: an adapter's config is a JSON object, this is a {type(values).__name__}")
    return values, told
