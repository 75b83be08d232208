"""What speaks against an input, or against new sizes, before anything is planned."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from widen_cli.config import ModelConfig, is_number
from widen_cli.errors import Faults, WidenError, brief, printable
from widen_cli.formulas import Formula, UnknownValueError, dotted, evaluate
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.changes import wide_sizes
from widen_cli.plan.factors import Factor
from widen_cli.plan.laws import is_norm
from widen_cli.plan.lookup import config_lookup
from widen_cli.plan.match import (
    MISSING_SHOWN,
    Match,
    StoredHeader,
    common_prefix,
    match_tensors,
    missing_tensors,
    report_strangers,
)
from widen_cli.plan.packed import NUMBERS
from widen_cli.plan.sizes import Sizes, resolve_sizes


def check_names(
    architecture: ArchitectureMap, tensors: Sequence[StoredHeader], config: ModelConfig, file: str, root: str = ""
) -> None:
    """Raises WidenError for weights that no rule of the map names; of an incomplete model that is all that can be asked.

    `root` stands in front of all names that the map knows.
    """
    with Faults() as faults:
        report_strangers(faults, printable(file), architecture, match_tensors(architecture, tensors, config, root))


def check_input(
    architecture: ArchitectureMap,
    match: Match,
    tensors: Sequence[StoredHeader],
    config: ModelConfig,
    file: str,
    faults: Faults,
) -> Sizes:
    """The sizes of the axes, with a fault for whatever of the input does not fit the map; `file` is its name in messages."""
    _check_supported(architecture, config)
    if config.get("quantization_config.quant_method") == "mxfp4" and not any(
        rule.packed for rule in architecture.tensors
    ):
        raise WidenError(
            f"{printable(config.name)}: quantization_config says that weights are packed in MXFP4, and map "
            f"'{architecture.architecture}' does not say which and how ('packed', docs/maps.md); {NUMBERS}"
        )
    if match.strangers and not match.matched and (prefix := common_prefix(architecture, tensors)):
        raise WidenError(
            f"{file}: every tensor name starts with '{printable(prefix)}', which '{architecture.architecture}' does not have; "
            f"the names match without it: give --strip-prefix {printable(prefix)}"
        )
    report_strangers(faults, file, architecture, match)
    for text in list(match.torn.values())[:MISSING_SHOWN]:
        faults.add(f"{file}: {text}")
    if len(match.torn) > MISSING_SHOWN:
        faults.add(f"{file}: ... and {len(match.torn) - MISSING_SHOWN} more weights in MXFP4 blocks")
    shape_faults = Faults()
    sizes = resolve_sizes(architecture, config, match, shape_faults)
    missing = missing_tensors(architecture, match, config, sizes.known)
    for name in missing[:MISSING_SHOWN]:
        faults.add(
            f"{file}: tensor '{printable(name)}' is missing; the file is incomplete, or the config belongs to another model"
        )
    if len(missing) > MISSING_SHOWN:
        faults.add(f"{file}: ... and {len(missing) - MISSING_SHOWN} more tensors are missing")
    for text in shape_faults.texts:
        faults.add(f"{file}: {text}")
    for text, place in architecture.todo:
        faults.add(f"{place}: to decide, and then to take out of 'todo': {text}")
    return sizes


def _check_supported(architecture: ArchitectureMap, config: ModelConfig) -> None:
    """Raises WidenError where a config value says that the model is of a kind which the map does not speak of."""
    lookup = config_lookup(architecture, config)
    for formula in architecture.supports:
        try:
            if evaluate(formula, lookup):
                continue
        except UnknownValueError:
            continue
        except ValueError as error:
            raise WidenError(f"{printable(config.name)}: its values do not fit what the map asks: {error}") from None
        told = ", ".join(f"{name} is {brief(config.get(name))}" for name in formula.words)
        raise WidenError(
            f"{printable(config.name)}: {told}, which map '{architecture.architecture}' does not cover: it needs {formula.text}; "
            "give --map with a map of your own"
        )


def check_requirements(
    architecture: ArchitectureMap,
    sizes: Sizes,
    factors: Mapping[str, Factor],
    file: str,
    layered: Mapping[str, Sequence[Factor]] | None = None,
) -> None:
    """Refuses new sizes that the model's own library would refuse; `layered` as in `wide_sizes`."""
    faults: dict[tuple[str, str], str] = {}
    wide = wide_sizes(sizes, factors, layered)
    pairs: dict[tuple[int, int], tuple[Sizes, Sizes, int]] = {}
    for layer in range(max((len(each) for each in wide.layered.values()), default=1)):
        old, new = sizes.at(layer), wide.at(layer)
        pairs.setdefault((id(old), id(new)), (old, new, layer))
    for formula in architecture.requires:
        for old, new, layer in pairs.values():
            try:
                kept = _lacks(new, formula) or new.evaluate(formula) or not old.evaluate(formula)
            except UnknownValueError:
                continue
            except ValueError as error:
                raise WidenError(f"{file}: the map's requirement {formula.text} cannot be decided: {error}") from None
            if not kept:
                told = ", ".join(f"{name} {new.known[name]}" for name in sorted(formula.words) if name in new.known)
                where = f" in layer {layer}" if wide.layered.keys() & formula.words else ""
                text = (
                    f"{file}: the wide model would have {told}{where}, and '{architecture.architecture}' needs "
                    f"{formula.text}; choose other factors with --grow"
                )
                faults.setdefault((formula.text, told), text)
    if faults:
        raise WidenError(*faults.values())


def _lacks(sizes: Sizes, formula: Formula) -> bool:
    """Whether a layer has none of what a requirement speaks of, such as heads."""
    return any(sizes.known.get(name) == 0 for name in formula.words)


def unread_epsilons(architecture: ArchitectureMap, config: ModelConfig, file: str) -> list[str]:
    """Warnings of epsilons in the config that no norm of a map reads, for a map that nobody has proved yet.

    `file` is the map's name in messages. Raises WidenError where its norms read none at all: what is behind a norm that a
    map does not tell gets wrong factors.
    """
    norms = (space.formula.tree for space in architecture.spaces.values() if space.formula)
    given = [epsilon for tree in norms if is_norm(tree) for epsilon in tree.args[1:]]
    read = {dotted(epsilon).rpartition(".")[2] for epsilon in given if not isinstance(epsilon, ast.Constant)}
    section = config.values.get(config.inside)
    stated = {**config.values, **(section if isinstance(section, dict) else {})}
    keys = [key for key, value in stated.items() if key.endswith(("eps", "epsilon")) and is_number(value)]
    unread = [key for key in keys if key.rpartition(".")[2] not in read]
    advice = "give the output of each norm that does a space, such as normed: norm(hidden, {key})"
    if unread and not given:
        key = unread[0]
        raise WidenError(
            f"{printable(file)}: no norm of this map reads an epsilon, and {printable(config.name)} has '{printable(key)}'; "
            + advice.format(key=printable(key))
        )
    return [
        f"{printable(file)}: no norm of this map reads '{printable(key)}' of {printable(config.name)}; {advice.format(key=printable(key))}"
        for key in unread
    ]
