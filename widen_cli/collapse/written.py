"""What a fold writes: each narrow tensor in its type, the narrow config, and the metadata that were there before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widen_cli.checkpoint import GGUF_RECORD, RECORD, Checkpoint
from widen_cli.collapse.fold import Fold
from widen_cli.collapse.making import DTYPE_KEYS
from widen_cli.config import ModelConfig
from widen_cli.dtypes import CONFIG_NAMES, STORED, DType
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.gguf.checkpoint import ARCHITECTURE, FILE_TYPE, described_anew, shorter_tokenizer
from widen_cli.options import Options
from widen_cli.plan import Plan, TensorPlan
from widen_cli.plan.factors import Factor
from widen_cli.plan.match import GRID
from widen_cli.plan.narrowing import Header, config_changes
from widen_cli.plan.trees import block_reasons
from widen_cli.rebuild.metadata import renamed
from widen_cli.records import Record, Was

BLOCKS_REMEDY = "give --dequantize f32 (or f16), which folds the numbers"
FAULTS_SHOWN = 8
GRID_REMEDY = "dequantise the model first"
INTEGERS_REMEDY = "correct the file"


def folds(wide: Checkpoint, plan: Plan, options: Options, was: Was | None, faults: Faults) -> dict[str, Fold]:
    """For each narrow tensor the wide ones it is folded from; with a fault for each that is not as the plan has it."""
    stored = {tensor.name: tensor for tensor in wide.tensors}
    sources = {tensor.source.name for tensor in plan.tensors}
    folds: dict[str, Fold] = {}
    for tensor in plan.tensors:
        if tensor.made:
            continue
        found = [stored.get(name) for name in tensor.names]
        for name, one in zip(tensor.names, found, strict=True):
            if one is None or one.shape != tensor.shape or one.dtype != tensor.source.dtype:
                has = "is missing" if one is None else f"is {one.dtype.name} {list(one.shape)}"
                faults.add(
                    f"{printable(wide.name)}: tensor '{printable(name)}' {has}, where the conversion makes "
                    f"{tensor.dtype.name} {list(tensor.shape)}; it was not widened so"
                )
        name = tensor.source.name
        gridded = name + GRID in sources or (name.endswith(GRID) and name.removesuffix(GRID) in sources)
        target = tensor.dtype if gridded else _target(tensor, options, was)
        remedy = _remedy(tensor, target, gridded)
        folds[name] = Fold(tensor, tuple(one for one in found if one is not None), target, remedy)
    # Blocks of another type than those that were widened may have no narrow form at all, so nothing more can be planned.
    if reasons := block_reasons(fold.plan for fold in folds.values() if fold.target.kind == "blocks"):
        texts = [f"{printable(wide.name)}: {reason.partition('; ')[0]}; {BLOCKS_REMEDY}" for reason in reasons]
        raise WidenError(*texts[:FAULTS_SHOWN])
    return folds


def _target(tensor: TensorPlan, options: Options, was: Was | None) -> DType:
    """The type that a narrow tensor is written in: the one asked for, else its old one, else that of the wide tensor."""
    kind = tensor.dtype
    if tensor.growth is None:
        return kind
    if kind.kind == "blocks":
        return STORED[options.dequantize] if options.dequantize else kind
    if kind.kind != "float":
        return kind
    if options.dtype:
        return STORED[options.dtype]
    old = was.type_of(tensor.source.name, tensor.pattern) if was else None
    found = STORED.get(old or "", kind)
    return found if found.kind == "float" else kind


def _remedy(tensor: TensorPlan, target: DType, gridded: bool) -> str | None:
    if gridded:
        return GRID_REMEDY
    if target.kind == "blocks":
        return BLOCKS_REMEDY
    return None if target.kind == "float" else INTEGERS_REMEDY


def described(
    config: ModelConfig, wide: Checkpoint, folds: Mapping[str, Fold], options: Options, was: Was | None
) -> ModelConfig:
    """The config with the type asked for, and what a GGUF's metadata say of the model as a whole where nothing recorded it."""
    if options.dtype and config.present and wide.gguf is None:
        values: dict[str, Any] = {key: CONFIG_NAMES[options.dtype] for key in DTYPE_KEYS if key in config}
        return config.with_values(values)
    if wide.gguf is None:
        return config
    shapes = [(name, fold.shape) for name, fold in folds.items()]
    retyped = any(fold.plan.dtype.kind == "blocks" and fold.target.kind != "blocks" for fold in folds.values())
    changes = described_anew(config, shapes, options.dequantize if retyped else None)
    return config.with_values({key: new for key, _, new in changes if was is None or key == FILE_TYPE})


def recorded(
    wide: Checkpoint, padding: Factor, folds: Mapping[str, Fold], record: Record | None, was: Was | None
) -> Checkpoint:
    """The wide checkpoint under the narrow tensors' names, with the narrow one's metadata: its record, if it had one, no keys
    that are new, and the kind of model that it was; `padding` is by what its vocabulary was padded."""
    tensors = tuple(replace(fold.wide[0], name=name) for name, fold in folds.items())
    wide = replace(wide, tensors=tensors, stored=wide.stored or wide.tensors)
    if record is not None and record.before is not None:
        wide = wide.with_record(record.before.text)
    else:
        wide = replace(wide, metadata={key: value for key, value in wide.metadata.items() if key != RECORD})
    if wide.gguf is None:
        return wide
    header = wide.gguf.header
    architecture = str(header.values[ARCHITECTURE].value)
    built = was.built if was else None
    added = [*(was.added if was else ()), *(built.added if built else ())]
    new = {key if key.startswith("general.") else f"{architecture}.{key}" for key in added}
    if record is None or record.before is None:
        new.add(GGUF_RECORD)
    values = {key: value for key, value in header.values.items() if key not in new}
    if padding != 1:
        values |= shorter_tokenizer(values, padding)
    model = replace(wide.gguf, header=replace(header, values=values))
    if built and ARCHITECTURE in built.config:
        model = renamed(model, printable(wide.name), str(built.config[ARCHITECTURE]))
    return replace(wide, gguf=model)


def written(plan: Plan, folds: Mapping[str, Fold], wide: ModelConfig, narrow: ModelConfig, was: Was | None) -> Plan:
    """The narrow tensors as they are written, and what changes in the config."""
    tensors = []
    for name, fold in folds.items():
        header = Header(name, fold.target, fold.shape)
        tensors.append(TensorPlan(header, (name,), fold.plan.pattern, fold.target))
    before = {**was.config, **(was.built.config if was.built else {})} if was else {}
    keys = [*wide.values, *(change.key for change in plan.config), *before]
    changes = config_changes(wide, narrow, keys)
    return replace(plan, tensors=tuple(tensors), config=changes, sidecars={}, numbered={}, equal_pairs=())
