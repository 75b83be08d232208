"""Opens a wide checkpoint, plans the narrow one that it was made of, and writes that."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from widen_cli.adapters import open_adapter, plan_with_base, refuse_alone
from widen_cli.checkpoint import GGUF_RECORD, RECORD, Checkpoint, open_checkpoint
from widen_cli.collapse.average import Distance
from widen_cli.collapse.stream import Fold, FoldStream
from widen_cli.companions import companions_of
from widen_cli.config import ModelConfig, parse_settings
from widen_cli.convert import chosen_map
from widen_cli.dtypes import CONFIG_NAMES, STORED, DType
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.gguf.checkpoint import DESCRIBED, FILE_TYPE, described_anew
from widen_cli.jobs import Job
from widen_cli.map_choice import check_settings
from widen_cli.options import Options
from widen_cli.plan import Plan, PlanRequest, TensorPlan, make_plan
from widen_cli.plan.layer_growth import parse_growth
from widen_cli.plan.match import GRID
from widen_cli.plan.narrowing import Header, Known, config_changes, narrow_model, settled
from widen_cli.plan.result import DEPENDS, ROUNDS
from widen_cli.plan.splits import Asked
from widen_cli.plan.trees import block_reasons
from widen_cli.plan.wishes import parse_grow
from widen_cli.records import Record, Was, read_record
from widen_cli.shards import output_shards
from widen_cli.targets import check_parts, check_room, check_targets, config_target_of, unsaved
from widen_cli.tied import check_equal
from widen_cli.transform import Counts
from widen_cli.writing import run

FAULTS_SHOWN = 8
DTYPE_KEYS = ("dtype", "torch_dtype")
# What a conversion changes that speaks of the model as a whole: of its types, and of its number of parameters.
WHOLE_KEYS = (*DTYPE_KEYS, *DESCRIBED)
BLOCKS_REMEDY = "give --dequantize f32 (or f16), which folds the numbers"
GRID_REMEDY = "dequantise the model first"
INTEGERS_REMEDY = "correct the file"


@dataclass(frozen=True)
class Folded:
    """What a run did: for each narrow tensor that has copies how far these are apart, and what was rounded on the way back.

    `plan` is the one that widens the narrow model; `recorded`: its making was read from a record. `inexact` are the tensors
    whose values the conversion had to round, so that their last places cannot come back for certain, `uncertain` those in
    whose type of small range it may have lost small values.
    """

    options: Options
    plan: Plan
    recorded: bool
    distances: dict[str, Distance]
    counts: dict[str, Counts]
    inexact: tuple[str, ...]
    uncertain: tuple[str, ...]

    @property
    def moved(self) -> list[tuple[str, Distance]]:
        """The tensors whose copies have moved apart, the most moved first."""
        found = [(name, distance) for name, distance in self.distances.items() if distance.apart]
        return sorted(found, key=lambda item: -item[1].relative)

    @property
    def rounded(self) -> int:
        """How many narrow values are not the exact mean over the factor."""
        return sum(counts.rounded for counts in self.counts.values())


def collapse(
    options: Options, told: str | None, progress: Callable[[int], None], warn: Callable[[str], None]
) -> Folded:
    """Folds `options.input`, a wide checkpoint, and writes the narrow one to `options.output`.

    How it was widened is what `options` says, and for the rest its record, or that of the model `told`. `dtype` and
    `dequantize` are the types written. Raises WidenError with all that speaks against it; nothing is written then.
    """
    fold = _prepared(options, told)
    for text in fold.job.warnings:
        warn(text)
    stream = FoldStream(fold.folds, options.threads)
    report = run(fold.job, progress, stream)
    distances = stream.distances
    kept = {name: one.exactness for name, one in fold.folds.items()}
    return Folded(
        options,
        fold.plan,
        fold.recorded,
        {name: distances[name] for name, one in fold.folds.items() if one.copies},
        report.counts,
        tuple(name for name, exactness in kept.items() if exactness == ROUNDS),
        tuple(name for name, exactness in kept.items() if exactness == DEPENDS),
    )


@dataclass(frozen=True)
class _Prepared:
    job: Job
    plan: Plan
    folds: dict[str, Fold]
    recorded: bool


def _prepared(options: Options, told: str | None) -> _Prepared:
    if options.input == "-":
        raise WidenError("standard input: a pipe cannot be read in any order; name a file or a folder")
    with ExitStack() as refused, Faults() as faults:
        wide = _opened(options)
        refused.callback(wide.close)
        if wide.sequential:
            raise WidenError(f"{printable(wide.name)}: a pipe cannot be read in any order; name a file or a folder")
        if wide.faults:
            raise WidenError(*wide.faults)
        record = _record(options, wide, told)
        _refuse_experts(options, wide, record)
        asked = replace(options, named=False)
        if record:
            asked = record.again(replace(asked, dtype=None, dequantize=None))
        if asked.grow is not None and parse_growth(asked.grow)[1]:
            raise WidenError(
                f"{printable(wide.name)}: grew differently from layer to layer (--grow {printable(asked.grow)}), which is "
                "not folded back; go on with the narrow model"
            )
        told_by_record = record is not None and not options.says_growth
        if record and told_by_record:
            # A factor alone leaves it to the stored types whether heads become more or larger, and training changes those.
            asked = replace(asked, factor=None, grow=record.grown) if record.factors else asked
        making = _Making(asked, record, record.was if record and told_by_record else None)
        prepared = (_planned_adapter if wide.adapter else _planned)(options, wide, making, faults)
        if not faults.texts:
            refused.pop_all()
    return prepared


def _opened(options: Options) -> Checkpoint:
    if options.base is not None:
        return open_adapter(options.input, options.base)
    # Settings tell the narrow model and are no part of this one; but what is recorded may do without a config.
    wide = open_checkpoint(options.input, options.config, {"model_type": None}, options.strip_prefix)
    try:
        refuse_alone(wide)
    except WidenError:
        wide.close()
        raise
    return replace(wide, config=wide.found_config)


@dataclass(frozen=True)
class _Making:
    """How the wide model was made: the options of it, the record that tells them, what that knows of the narrow model."""

    asked: Options
    record: Record | None
    was: Was | None

    @property
    def request(self) -> PlanRequest:
        """What the plan is asked for."""
        options = self.asked
        asked = parse_grow(options.grow) if options.grow is not None else {}
        return PlanRequest(
            options.input,
            options.factor,
            asked,
            options.scaling,
            settings=parse_settings(options.settings),
            layout=options.layout,
            rope=options.rope,
            split=Asked(options.split, options.noise, options.seed),
            approximate=options.allow_approximate,
            back=True,
            scalars=None if self.was is None else frozenset((*self.was.made, *self.was.scaled)),
        )


def _planned(options: Options, wide: Checkpoint, making: _Making, faults: Faults) -> _Prepared:
    asked, was = making.asked, making.was
    if asked.depth:
        raise WidenError(
            f"{printable(wide.name)}: was made with --depth {' --depth '.join(asked.depth)}, and layers are not taken back by folding; "
            "widen-ckpt with --depth drop:... --allow-approximate leaves the new ones out"
        )
    choice = chosen_map(asked, wide)
    wide = replace(wide, config=wide.config.within(choice.section))
    check_settings(choice.architecture, wide.found_config, parse_settings(options.settings))
    kept = _kept_types(was, options)
    request = replace(making.request, root=choice.root)
    untied = choice.architecture.untie if asked.untie else ()
    narrow = narrow_model(choice.architecture, wide.tensors, wide.config, request, _known(was, kept, untied))
    plan = make_plan(choice.architecture, narrow.headers, narrow.told, narrow.request)
    if was is not None:
        _refuse_foreign(wide, was, plan, {*parse_settings(asked.settings), *choice.architecture.untie, *WHOLE_KEYS})
    folds = _folds(wide, plan, options, was if kept else None, faults)
    if not faults.texts:
        check_equal(wide, plan)
    config, warnings = settled(narrow, plan, wide.config, recorded=was is not None)
    config = _described(config, wide, folds, options, was)
    # The planner tells the sizes that a wide model needs, which is what lies here.
    told_by_plan = [text for text in plan.warnings if wide.config.present or "no config was found" not in text]
    texts = (*choice.warnings, *_doubts(making, plan, wide, narrow.by_types), *warnings, *told_by_plan)
    return _resolved(options, wide, making, plan, folds, config, texts, faults)


def _planned_adapter(options: Options, wide: Checkpoint, making: _Making, faults: Faults) -> _Prepared:
    """An adapter by its narrow base."""
    assert options.base is not None
    asked, was = making.asked, making.was
    plan, texts = plan_with_base(
        wide,
        options.base,
        asked.config,
        asked.map,
        asked.strip_prefix,
        replace(making.request, untie=asked.untie),
        back=True,
    )
    folds = _folds(wide, plan, options, was if _kept_types(was, options) else None, faults)
    return _resolved(options, wide, making, plan, folds, wide.config, (*texts, *_doubts(making, plan, wide)), faults)


def _resolved(
    options: Options,
    wide: Checkpoint,
    making: _Making,
    plan: Plan,
    folds: dict[str, Fold],
    config: ModelConfig,
    warnings: tuple[str, ...],
    faults: Faults,
) -> _Prepared:
    """The files that are written, with a fault for whatever speaks against them."""
    source = _recorded(wide, making.record, making.was)
    written = _written(plan, folds, wide.config, config, making.was)
    directory = options.output.endswith("/") or os.path.isdir(options.input)
    target = config_target_of(options, wide, directory)
    check_targets(options, wide, target, directory, faults)
    sidecars = {file: {key: Fraction(1, by) for key, by in keys.items()} for file, keys in plan.sidecars.items()}
    numbered = {file: {key: each.folded for key, each in keys.items()} for file, keys in plan.numbered.items()}
    companions = companions_of(wide, options.input, options.output, sidecars, numbered)
    shards = output_shards(written, source, options.input, options.output, options.max_shard_size, directory)
    with faults.collecting():
        check_parts(options, source, shards, directory)
        check_room(options, shards, companions, None)
    texts = (*wide.warnings, *warnings, *unsaved(written, wide, target, options, directory))
    job = Job(options, source, written, shards, config, target, directory, companions, texts)
    return _Prepared(job, plan, folds, making.record is not None)


# How it was widened.


def _record(options: Options, wide: Checkpoint, told: str | None) -> Record | None:
    """The record to go by: that of the model `told`, else the wide model's own; None where the options say how."""
    if told is not None:
        other = open_checkpoint(told, None, {"model_type": None})
        text = other.record
        other.close()
        if text is None:
            raise WidenError(f"--record {printable(told)}: does not record how it was made; give its options instead")
        return read_record(text, told)
    if wide.record is None:
        if not options.says_growth:
            raise WidenError(
                f"{printable(wide.name)}: does not record how it was widened; say how, as for the conversion, such as "
                "--factor 2, or give --record with the model as it was written then"
            )
        return None
    try:
        return read_record(wide.record, wide.name)
    except WidenError:
        if options.says_growth:
            return None
        raise


def _refuse_experts(options: Options, wide: Checkpoint, record: Record | None) -> None:
    """Experts have no way back: once they are trained no one of them, nor their mean, is the dense layer."""
    if options.experts is not None or (record is not None and record.said.experts is not None):
        raise WidenError(
            f"{printable(wide.name)}: was made a mixture of experts (--experts), of which no dense model is folded: "
            "experts that were trained are no copies, and those that were not stand in the dense model still"
        )


def _known(was: Was | None, kept: bool, untied: Sequence[str]) -> Known | None:
    """What is recorded of the narrow model; of its types only where they come back too, of its ties nothing: weights that
    --untie wrote apart are two weights since."""
    if was is None:
        return None
    gone = {*untied, *(() if kept else (*DTYPE_KEYS, FILE_TYPE))}
    added = [key for key in was.added if key not in untied]
    return Known({key: value for key, value in was.config.items() if key not in gone}, added, was.made)


def _refuse_foreign(wide: Checkpoint, was: Was, plan: Plan, others: Set[str]) -> None:
    """Raises WidenError for a record that speaks of what no widening changes: it was not written by this tool, and what it says
    of the config would be written as if it had been. `others` are keys that conversions change beside those of the plan."""
    known = {change.key for change in plan.config} | others
    made = {tensor.source.name for tensor in plan.tensors if tensor.made}
    foreign = [f"config key '{printable(key)}'" for key in (*was.config, *was.added) if key not in known]
    foreign += [f"tensor '{printable(name)}'" for name in was.made if name not in made]
    if foreign:
        raise WidenError(
            f"{printable(wide.name)}: its record speaks of {_some(foreign)}, which widening a model of '{plan.architecture}' does not "
            "change or make; say how it was made, such as --factor 2, or give --record with the model as it was written then"
        )


def _some(names: Sequence[str]) -> str:
    """A few of several names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _kept_types(was: Was | None, options: Options) -> bool:
    """Whether all types are those of the narrow model again: blocks that were made numbers stay numbers."""
    asked = options.dtype or options.dequantize
    return was is not None and not asked and all(name in STORED for name in was.types.values())


def _doubts(making: _Making, plan: Plan, wide: Checkpoint, by_types: bool = False) -> tuple[str, ...]:
    doubts: list[str] = []
    if making.record is None and making.asked.scaling == "auto":
        doubts.append(
            f"{printable(wide.name)}: nothing records its scaling, taken as {plan.mode}; say --scaling if it was another"
        )
    if by_types and making.asked.factor is not None:
        doubts.append(
            f"{printable(wide.name)}: nothing records what --factor made of its heads; by the types stored now, taken as "
            f"{plan.grown}; say --grow if it was otherwise"
        )
    if making.asked.layout == "auto" and plan.layout == "tile":
        doubts.append(
            f"{printable(wide.name)}: nothing records how its copies are laid; by the types stored now, taken as axis after axis "
            "(tile); say --layout interleave if they stand side by side"
        )
    if making.asked.untie:
        doubts.append(
            f"{printable(wide.name)}: its weights were untied by --untie, and those of the narrow model stay so"
        )
    return tuple(doubts)


# What is written.


def _folds(wide: Checkpoint, plan: Plan, options: Options, was: Was | None, faults: Faults) -> dict[str, Fold]:
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


def _described(
    config: ModelConfig, wide: Checkpoint, folds: Mapping[str, Fold], options: Options, was: Was | None
) -> ModelConfig:
    """The config with the type asked for, and what a GGUF's metadata say of the model as a whole where nothing recorded it."""
    if options.dtype and config.present and wide.gguf is None:
        values: dict[str, Any] = {key: CONFIG_NAMES[options.dtype] for key in DTYPE_KEYS if key in config}
        return config.with_values(values)
    if wide.gguf is None:
        return config
    shapes = [(name, fold.plan.source.shape) for name, fold in folds.items()]
    retyped = any(fold.plan.dtype.kind == "blocks" and fold.target.kind != "blocks" for fold in folds.values())
    changes = described_anew(config, shapes, options.dequantize if retyped else None)
    return config.with_values({key: new for key, _, new in changes if was is None or key == FILE_TYPE})


def _recorded(wide: Checkpoint, record: Record | None, was: Was | None) -> Checkpoint:
    """The wide checkpoint with the narrow one's metadata: its record, if it had one, and no keys that are new."""
    if record is not None and record.before is not None:
        wide = wide.with_record(record.before.text)
    else:
        wide = replace(wide, metadata={key: value for key, value in wide.metadata.items() if key != RECORD})
    if wide.gguf is None:
        return wide
    header = wide.gguf.header
    architecture = str(header.values["general.architecture"].value)
    new = {key if key.startswith("general.") else f"{architecture}.{key}" for key in (was.added if was else ())}
    if record is None or record.before is None:
        new.add(GGUF_RECORD)
    values = {key: value for key, value in header.values.items() if key not in new}
    return replace(wide, gguf=replace(wide.gguf, header=replace(header, values=values)))


def _written(plan: Plan, folds: Mapping[str, Fold], wide: ModelConfig, narrow: ModelConfig, was: Was | None) -> Plan:
    """The narrow tensors as they are written, and what changes in the config."""
    tensors = []
    for name, fold in folds.items():
        header = Header(name, fold.target, fold.plan.source.shape)
        tensors.append(TensorPlan(header, (name,), fold.plan.pattern, fold.target))
    keys = [*wide.values, *(change.key for change in plan.config), *(was.config if was else ())]
    changes = config_changes(wide, narrow, keys)
    return replace(plan, tensors=tuple(tensors), config=changes, sidecars={}, numbered={}, equal_pairs=())
