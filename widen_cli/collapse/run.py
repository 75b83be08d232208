"""Opens a wide checkpoint, plans the narrow one that it was made of, and writes that."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction

from widen_cli.adapters import open_adapter, plan_with_base, refuse_alone
from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.collapse.anew import refuse_unmade
from widen_cli.collapse.average import Distance
from widen_cli.collapse.fold import Fold
from widen_cli.collapse.making import Making, kept_types, known, making_of, refuse_foreign
from widen_cli.collapse.stream import FoldStream
from widen_cli.collapse.unbuilt import Upcycling, refuse_lost, without_new_layers
from widen_cli.collapse.written import described, folds, recorded, written
from widen_cli.companions import companions_of
from widen_cli.config import ModelConfig, parse_settings
from widen_cli.convert import chosen_map
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.jobs import Job
from widen_cli.map_choice import check_settings
from widen_cli.maps import map_from_text
from widen_cli.options import Options
from widen_cli.plan import Plan, make_plan
from widen_cli.plan.factors import Factor
from widen_cli.plan.match import match_tensors
from widen_cli.plan.narrowing import narrow_model, settled
from widen_cli.plan.result import DEPENDS, ROUNDS
from widen_cli.plan.untie import tie_places
from widen_cli.records import Built, Was
from widen_cli.shards import output_shards
from widen_cli.targets import check_parts, check_room, check_targets, config_target_of, unsaved
from widen_cli.tied import check_equal
from widen_cli.transform import Counts
from widen_cli.writing import run


@dataclass(frozen=True)
class Folded:
    """What a run did: for each narrow tensor that has copies how far these are apart, and what was rounded on the way back.

    `plan` is the one that widens the narrow model, of the family `architecture`, or what was made of it (`undone` says in words
    what); `recorded`: its making was read from a record. `inexact` are the tensors
    whose values the conversion had to round, so that their last places cannot come back for certain, `uncertain` those in
    whose type of small range it may have lost small values. `silent` are the weights that were added to write nothing, each with
    its distance from that; `experts` the tensors that are means of experts.
    """

    options: Options
    plan: Plan
    recorded: bool
    distances: dict[str, Distance]
    counts: dict[str, Counts]
    inexact: tuple[str, ...]
    uncertain: tuple[str, ...]
    silent: dict[str, Distance]
    experts: frozenset[str]
    architecture: str
    undone: tuple[str, ...]

    @property
    def moved(self) -> list[tuple[str, Distance]]:
        """The tensors whose copies have moved apart, the most moved first."""
        found = [(name, distance) for name, distance in self.distances.items() if distance.apart]
        return sorted(found, key=lambda item: -item[1].relative)

    @property
    def losses(self) -> tuple[str, ...]:
        """What the narrow model has not of what training made, beside the difference between copies."""
        texts = []
        if apart := [name for name in self.experts if self.distances[name].apart]:
            texts.append(
                f"experts have moved apart in {len(apart)} tensors: the mean of trained experts is the nearest dense layer by its "
                "weights, and does not compute what they do"
            )
        if moved := [name for name, distance in self.silent.items() if distance.apart]:
            texts.append(
                f"{len(moved)} weights that were added to write nothing write something now, such as '{printable(moved[0])}'; they are "
                "left out with all that was added with them"
            )
        return tuple(texts)

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
    result = Folded(
        options,
        fold.plan,
        fold.recorded,
        {name: distances[name] for name, one in fold.folds.items() if one.copies},
        report.counts,
        tuple(name for name, exactness in kept.items() if exactness == ROUNDS),
        tuple(name for name, exactness in kept.items() if exactness == DEPENDS),
        stream.silent,
        frozenset(name for name, one in fold.folds.items() if one.of_experts),
        fold.architecture,
        fold.undone,
    )
    for text in result.losses:
        warn(text)
    return result


@dataclass(frozen=True)
class _Prepared:
    job: Job
    plan: Plan
    folds: dict[str, Fold]
    recorded: bool
    architecture: str
    undone: tuple[str, ...] = ()


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
        making = making_of(options, wide, told)
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


def _planned(options: Options, wide: Checkpoint, making: Making, faults: Faults) -> _Prepared:
    asked, was = making.asked, making.was
    built = was.built if was else None
    refuse_lost(wide.name, asked, built)
    choice = chosen_map(asked, wide)
    wide = replace(wide, config=wide.config.within(choice.section))
    architecture = (
        map_from_text(asked.recorded_target, "the recorded map") if asked.recorded_target else choice.architecture
    )
    check_settings(architecture, wide.found_config, parse_settings(options.settings))
    kept = kept_types(was, options)
    request = replace(making.request, root=choice.root)
    upcycling = None
    if asked.experts is not None:
        upcycling = Upcycling(choice.architecture, architecture, asked.experts, asked.slices)
        match = match_tensors(architecture, wide.tensors, wide.config, choice.root)
        request = replace(request, times=upcycling.times(wide.tensors, match))
    untied = tie_places(architecture) if asked.untie else ()
    narrow = narrow_model(architecture, wide.tensors, wide.config, request, known(was, kept, untied))
    plan = make_plan(architecture, narrow.headers, narrow.told, narrow.request)
    if was is not None:
        refuse_foreign(wide, was, plan, {*parse_settings(asked.settings), *tie_places(architecture)})
    found = folds(wide, plan, options, was if kept else None, faults)
    if not faults.texts:
        check_equal(wide, plan)
    config, warnings = settled(narrow, plan, wide.config, recorded=was is not None)
    if built is not None and not faults.texts:
        config = config.without(built.added).with_values(dict(built.config)) if config.present else config
        found = upcycling.dense(found, narrow, choice.root) if upcycling is not None else found
        found = without_new_layers(found, built.stacks)
        narrowed = recorded(wide, 1, found, making.record, was)
        refuse_unmade(narrowed, found, config, asked, choice, request.layers, built)
    config = described(config, wide, found, options, was)
    told_by_plan = [text for text in plan.warnings if not _of_growth(text, wide)]
    texts = (*choice.warnings, *making.doubts(plan, wide, narrow.by_types), *warnings, *told_by_plan)
    padded = [plan.factors[name] for name, axis in architecture.axes.items() if axis.padded]
    prepared = _resolved(options, wide, making, plan, found, config, texts, faults, max(padded, default=1))
    return replace(prepared, architecture=choice.architecture.architecture, undone=_undone(built, asked))


def _undone(built: Built | None, asked: Options) -> tuple[str, ...]:
    """What was made of the narrow model before it was widened, and goes again, in words."""
    layers = [f"layers {len(stack.layers)} -> {stack.count}" for stack in (built.stacks.values() if built else ())]
    return (*layers, *([f"{asked.experts} experts -> dense"] if asked.experts is not None else []))


def _of_growth(text: str, wide: Checkpoint) -> bool:
    """Whether a plan warns of what a wide model needs or loses, which is what lies here."""
    return "tensor-parallel degrees" in text or ("no config was found" in text and not wide.config.present)


def _layers(was: Was | None, stack: str) -> list[int] | None:
    """Which old layer each of a stack is, None where all keep their numbers."""
    stacks = was.built.stacks if was and was.built else {}
    return stacks[stack].layers if stack in stacks else None


def _planned_adapter(options: Options, wide: Checkpoint, making: Making, faults: Faults) -> _Prepared:
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
    found = folds(wide, plan, options, was if kept_types(was, options) else None, faults)
    return _resolved(options, wide, making, plan, found, wide.config, (*texts, *making.doubts(plan, wide)), faults)


def _resolved(
    options: Options,
    wide: Checkpoint,
    making: Making,
    plan: Plan,
    found: dict[str, Fold],
    config: ModelConfig,
    warnings: tuple[str, ...],
    faults: Faults,
    padding: Factor = 1,
) -> _Prepared:
    """The files that are written, with a fault for whatever speaks against them."""
    source = recorded(wide, padding, found, making.record, making.was)
    to_write = written(plan, found, wide.config, config, making.was)
    directory = options.output.endswith("/") or os.path.isdir(options.input)
    target = config_target_of(options, wide, directory)
    check_targets(options, wide, target, directory, faults)
    sidecars = {file: {key: 1 / Fraction(by) for key, by in keys.items()} for file, keys in plan.sidecars.items()}
    numbered = {
        file: {key: each.folded(_layers(making.was, each.stack)) for key, each in keys.items()}
        for file, keys in plan.numbered.items()
    }
    companions = companions_of(wide, options.input, options.output, sidecars, numbered)
    shards = output_shards(to_write, source, options.input, options.output, options.max_shard_size, directory)
    with faults.collecting():
        check_parts(options, source, shards, directory)
        check_room(options, shards, companions, None)
    texts = (*wide.warnings, *warnings, *unsaved(to_write, wide, target, options, directory))
    job = Job(options, source, to_write, shards, config, target, directory, companions, texts)
    return _Prepared(job, plan, found, making.record is not None, plan.architecture)
