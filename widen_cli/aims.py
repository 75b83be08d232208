"""What is said of the wide model as a whole, by another model (`--like`) or by its size (`--target-params`): the growth it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.errors import Faults, WidenError
from widen_cli.likeness import Likeness, likeness
from widen_cli.map_choice import Choice, choose_map
from widen_cli.options import Options
from widen_cli.other_models import other_model
from widen_cli.plan import PlanRequest, make_plan
from widen_cli.plan.layer_growth import LayerGrowth, by_range, parse_growth
from widen_cli.plan.match import match_tensors
from widen_cli.plan.parameters import Parameters
from widen_cli.plan.sizes import resolve_sizes
from widen_cli.plan.wishes import wished
from widen_cli.proposals import Proposals, parse_params, propose
from widen_cli.rebuild import Anew, made_anew, refuse_depth, refuse_experts


@dataclass(frozen=True)
class Aim:
    """What was worked out: `lines` for people, `values` for programs, `doubts` for both."""

    lines: tuple[str, ...]
    values: dict[str, Any]
    doubts: tuple[str, ...] = ()


def aimed(options: Options, checkpoint: Checkpoint, request: PlanRequest) -> tuple[Options, Aim | None]:
    """The options with the growth that --like or --target-params means in `grow`, and how it was found.

    Raises WidenError with every axis that cannot be what the other model has; in a dry run it stays out.
    """
    if options.like is None and options.target_params is None:
        return options, None
    _check_said(options)
    if checkpoint.faults:
        raise WidenError(*checkpoint.faults)
    with ExitStack() as opened:
        model = checkpoint
        if options.base is not None:
            model = open_checkpoint(options.base, options.config, request.settings, options.strip_prefix)
            opened.callback(model.close)
        narrow = _rebuilt(options, model, choose_map(model, options.map), request)
        grow, layers = parse_growth(options.grow) if options.grow is not None else ({}, ())
        if layers and options.target_params is not None:
            told = ",".join(map(str, layers))
            raise WidenError(f"--target-params: does not count what grows in some layers only; leave --grow {told} out")
        plain, ranges = by_range(narrow.architecture, narrow.sizes, grow, layers)
        asked = wished(narrow.architecture, narrow.sizes, plain)
        fixed = {axis: Fraction(ratio) for axis, ratio in asked.items()}
        like = _like(options, narrow, fixed, ranges) if options.like is not None else None
        found = like or _sized(options, narrow, fixed)
        said = [f"{axis}={ratio}x" for axis, ratio in found.ratios.items()]
        said += [str(one) for one in (*(like.layers if like else ()), *grow.values(), *layers)]
        aim = Aim(found.lines, found.values, found.doubts)
        return replace(options, like=None, target_params=None, grow=",".join(said)), aim


def _rebuilt(options: Options, model: Checkpoint, choice: Choice, request: PlanRequest) -> _Narrow:
    """The model with the layers and the experts that it is given, whose axes grow and whose parameters are counted."""
    refuse_experts(options)
    refuse_depth(options)
    model = replace(model, config=model.config.within(choice.section))

    def made(layers: Sequence[LayerGrowth]) -> Anew:
        return made_anew(options, model, choice, layers)

    anew = made(())
    if anew.experts is not None:
        choice, request = replace(choice, architecture=anew.architecture), replace(request, times=anew.experts.times)
    return _Narrow(anew.checkpoint, choice, request, made)


def _check_said(options: Options) -> None:
    said = "--like" if options.like is not None else "--target-params"
    with Faults() as faults:
        if options.like is not None and options.target_params is not None:
            faults.add("--like and --target-params each say how large the model becomes; give one of them")
        if options.factor is not None:
            faults.add(f"{said}: says what every axis grows to, and so does --factor; give one of them")


class _Narrow:
    """The model that grows: its sizes, its parameters, and what speaks against a growth."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        choice: Choice,
        request: PlanRequest,
        made: Callable[[Sequence[LayerGrowth]], Anew],
    ) -> None:
        self.architecture = choice.architecture
        self.tensors = checkpoint.tensors
        self.config = checkpoint.config.within(choice.section)
        self.made = made
        self.request = replace(request, root=choice.root, factor=None, grow={})
        match = match_tensors(self.architecture, self.tensors, self.config, choice.root)
        self.sizes = resolve_sizes(self.architecture, self.config, match, Faults())
        self.parameters = Parameters(match, self.sizes, request.untie)

    def refusal(
        self, fixed: Mapping[str, Fraction], named: Sequence[LayerGrowth] = ()
    ) -> Callable[[Mapping[str, Fraction], Sequence[LayerGrowth]], tuple[str, ...]]:
        """What speaks against a growth beside what was said of single axes and layers; nothing where it can be planned."""

        def refusal(ratios: Mapping[str, Fraction], ranges: Sequence[LayerGrowth]) -> tuple[str, ...]:
            layers = (*ranges, *named)
            try:
                architecture, tensors, config = self.architecture, self.tensors, self.config
                if layers:
                    anew = self.made(layers)
                    architecture, tensors, config = anew.architecture, anew.checkpoint.tensors, anew.checkpoint.config
                request = replace(self.request, grow={**ratios, **fixed}, layers=layers)
                make_plan(architecture, tensors, config, request)
            except WidenError as error:
                return error.faults
            return ()

        return refusal


def _like(options: Options, narrow: _Narrow, fixed: Mapping[str, Fraction], layers: Sequence[LayerGrowth]) -> Likeness:
    assert options.like is not None
    other = other_model(options.like, narrow.architecture, narrow.config.per_layer)
    found = likeness(narrow.sizes, other, fixed, layers, narrow.refusal(fixed, layers))
    if found.faults and not options.dry_run:
        raise WidenError(*found.faults)
    return found


def _sized(options: Options, narrow: _Narrow, fixed: Mapping[str, Fraction]) -> Proposals:
    assert options.target_params is not None
    target = parse_params(options.target_params)
    refusal = narrow.refusal(fixed)
    return propose(target, narrow.sizes, narrow.parameters, fixed, lambda ratios: refusal(ratios, ()))
