"""A run resolved: opened, planned and checked. Everything that will be written is known before a byte moves."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from widen_cli.adapters import open_adapter, plan_with_base, refuse_alone
from widen_cli.aims import aimed
from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.companions import companions_of
from widen_cli.complete import expect_complete, may_be_complete
from widen_cli.config import ModelConfig, parse_settings
from widen_cli.dtypes import STORED
from widen_cli.errors import Faults, WidenError
from widen_cli.gguf.checkpoint import described_anew
from widen_cli.jobs import Job
from widen_cli.journal import Leftover
from widen_cli.map_choice import Choice, check_settings, choose_map
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import map_from_text
from widen_cli.options import Options
from widen_cli.output_checks import check_output
from widen_cli.plan import Plan, PlanRequest, check_names, make_plan, unread_epsilons
from widen_cli.plan.layer_growth import parse_growth
from widen_cli.plan.result import EXACT, ConfigChange
from widen_cli.plan.splits import Asked
from widen_cli.plan.written import WrittenTypes
from widen_cli.rebuild import made_anew, refuse_depth, refuse_experts
from widen_cli.records import Built, Record, Was
from widen_cli.resuming import identity_of, to_resume
from widen_cli.shards import output_shards
from widen_cli.targets import check_parts, check_room, check_targets, config_target_of, unsaved
from widen_cli.tied import check_equal


def prepare(options: Options) -> Job:
    """Opens and plans, and checks input, request and output. Raises WidenError with all faults of the run together.

    What speaks only against the output does not stop a dry run: it becomes a warning.
    """
    directory = options.output.endswith("/") or (options.input != "-" and os.path.isdir(options.input))
    with ExitStack() as refused, Faults() as faults:
        request = _request(options)
        checkpoint = _opened(options, request.settings, faults)
        refused.callback(checkpoint.close)
        options, aim = aimed(options, checkpoint, request)
        request = _request(options)
        config_target = config_target_of(options, checkpoint, directory)
        doubts = Faults() if options.dry_run else faults
        standing = may_be_complete(options, directory)
        check_targets(replace(options, force=options.force or standing), checkpoint, config_target, directory, doubts)
        checkpoint, plan, doubtful = _planned(options, checkpoint, request, faults)
        companions = companions_of(checkpoint, options.input, options.output, plan.sidecars, plan.numbered)
        shards = output_shards(plan, checkpoint, options.input, options.output, options.max_shard_size, directory)
        identity = identity_of(plan, checkpoint, shards, options)
        leftover: Leftover | None = None
        told: tuple[str, ...] = ()
        with doubts.collecting():
            leftover, told = to_resume(options, identity, directory) if not standing else (None, ())
        with doubts.collecting():
            if not standing:
                check_parts(options, checkpoint, shards, directory)
                check_room(options, shards, companions, leftover)
        if not faults.texts:
            refused.pop_all()
    config = _changed_config(checkpoint.config, plan)
    warnings = (*checkpoint.warnings, *(aim.doubts if aim and not options.dry_run else ()), *doubtful, *plan.warnings)
    if options.named:
        warnings += told
        warnings += unsaved(plan, checkpoint, config_target, options, directory)
        warnings += tuple(doubts.texts) if options.dry_run else ()
    job = Job(
        options,
        checkpoint,
        plan,
        shards,
        config,
        config_target,
        directory,
        companions,
        warnings,
        identity,
        leftover,
        aim,
    )
    if not standing:
        return job
    with ExitStack() as refused:
        refused.callback(checkpoint.close)
        expect_complete(job)
        refused.pop_all()
    return replace(job, complete=True)


def _planned(
    options: Options, checkpoint: Checkpoint, request: PlanRequest, faults: Faults
) -> tuple[Checkpoint, Plan, tuple[str, ...]]:
    """The input with its map's part of the config, its plan, and what is doubtful about either."""
    refuse_experts(options)
    refuse_depth(options)
    if options.base is not None:
        plan, told = plan_with_base(
            checkpoint, options.base, options.config, options.map, options.strip_prefix, request
        )
        return _recorded(options, checkpoint, plan, None), plan, told
    refuse_alone(checkpoint)
    choice = chosen_map(options, checkpoint)
    architecture, request = choice.architecture, replace(request, root=choice.root)
    checkpoint = replace(checkpoint, config=checkpoint.config.within(choice.section))
    with faults.collecting():
        check_settings(architecture, checkpoint.found_config, request.settings, checkpoint.gguf is not None)
    if checkpoint.faults:
        check_names(architecture, checkpoint.tensors, checkpoint.config, checkpoint.name, choice.root)
        raise WidenError(*checkpoint.faults)
    anew = made_anew(options, checkpoint, choice, request.layers)
    source, found = architecture, checkpoint.found_config
    checkpoint, architecture, view, made = anew.checkpoint, anew.architecture, anew.view, anew.experts
    request = replace(request, times=made.times) if made is not None else request
    target = architecture if made is not None or architecture is not source else None
    unread = () if options.map is None else unread_epsilons(source, checkpoint.config, options.map)
    plan = make_plan(architecture, checkpoint.tensors, checkpoint.config, request)
    if made is not None:
        gradients = {name: made.gradient(name, gradient) for name, gradient in plan.gradients.items()}
        plan = replace(plan, made_of=made.kind, notes=(made.note, *plan.notes), gradients=gradients)
    plan = _described(plan, checkpoint, options)
    rebuilt = view is not None or target is not None
    built = Built.of(found.within(checkpoint.config.inside), _found(checkpoint), view) if rebuilt else None
    recorded = _recorded(options, checkpoint, plan, source, target, built)
    plan = view.planned(plan) if view is not None else plan
    check_equal(checkpoint, plan)
    return (
        recorded,
        plan,
        (*choice.warnings, *unread),
    )


def chosen_map(options: Options, checkpoint: Checkpoint) -> Choice:
    """The map to go by; where an output is derived again, the one that it was made by."""
    if options.recorded_map is None:
        return choose_map(checkpoint, options.map)
    recorded = map_from_text(options.recorded_map, "the recorded map")
    if options.recorded_map_alone or recorded.section:
        return Choice.of(recorded)
    return replace(choose_map(checkpoint, None), architecture=recorded)


def _recorded(
    options: Options,
    checkpoint: Checkpoint,
    plan: Plan,
    architecture: ArchitectureMap | None,
    target: ArchitectureMap | None = None,
    built: Built | None = None,
) -> Checkpoint:
    """The input with the record of this run in the metadata that is carried over."""
    # A GGUF's metadata take no settings.
    settings = () if checkpoint.gguf else parse_settings(options.settings)
    was = Was.of(plan, _found(checkpoint), _changed_config(checkpoint.config, plan), settings, built)
    record = Record.of(options, plan, architecture, checkpoint.record, was, target)
    return checkpoint.with_record(record.text)


def _found(checkpoint: Checkpoint) -> ModelConfig:
    """The config without what --set says, its keys looked for where the model's are."""
    return checkpoint.found_config.within(checkpoint.config.inside)


def _opened(options: Options, settings: dict[str, Any], faults: Faults) -> Checkpoint:
    """The input; where it cannot be opened, the output is looked at all the same, so that all faults come together."""
    if options.output == "-" and sys.stdout is None and not options.dry_run:
        raise WidenError("standard output: is closed; send it somewhere, or name a file")
    try:
        if options.base is not None:
            checkpoint = open_adapter(options.input, options.base)
        else:
            checkpoint = open_checkpoint(options.input, options.config, settings, options.strip_prefix)
    except WidenError:
        known = tuple(Path(path) for path in (options.input, options.config) if path and path != "-")
        directory = options.output.endswith("/") or os.path.isdir(options.input)
        # What the output has to be is told by the input, so of one that is not there no more is said.
        if not options.dry_run and (options.input == "-" or os.path.lexists(options.input)):
            with faults.collecting():
                check_output(options.output, known, options.force, directory)
        raise
    for text in checkpoint.faults:
        faults.add(text)
    return checkpoint


def _request(options: Options) -> PlanRequest:
    grow, layers = parse_growth(options.grow) if options.grow is not None else ({}, ())
    factor = 2 if options.grows_by_default else options.factor
    asked = (options.dtype, options.dequantize, options.embedding_type)
    types = WrittenTypes(*(STORED[name] if name else None for name in asked))
    name = "standard input" if options.input == "-" else options.input
    settings = parse_settings(options.settings)
    asked_of = (options.scaling, types, settings, options.layout, options.rope)
    return PlanRequest(
        name,
        factor,
        grow,
        *asked_of,
        approximate=options.allow_approximate,
        untie=options.untie,
        layers=layers,
        fill=options.fill,
        seed=options.seed,
        split=Asked(options.split, options.noise, options.seed),
        gradients=options.optimizer is not None,
    )


def _described(plan: Plan, checkpoint: Checkpoint, options: Options) -> Plan:
    """The plan with what a GGUF's metadata says of the model as a whole."""
    if checkpoint.gguf is None:
        return plan
    shapes = [(name, tensor.shape) for tensor in plan.tensors for name in tensor.names]
    retyped = any(tensor.source.dtype != tensor.dtype for tensor in plan.tensors)
    changes = described_anew(checkpoint.found_config, shapes, options.dequantize if retyped else None)
    asked = {"--dequantize": options.dequantize, "--embedding-type": options.embedding_type}
    warnings = [
        f"{option} {value.lower()}: no tensor it is for holds quantised blocks or narrower numbers, so it has no effect"
        for option, value in asked.items()
        if value and not retyped
    ]
    config = (*plan.config, *(ConfigChange(key, old, new, EXACT) for key, old, new in changes))
    return replace(plan, config=config, warnings=(*plan.warnings, *warnings))


def _changed_config(config: ModelConfig, plan: Plan) -> ModelConfig:
    return config.with_values({change.key: change.new for change in plan.config})
