"""How a wide model was made: by its record, by that of the model it was trained from, or as the options say."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from widen_cli.checkpoint import Checkpoint, open_checkpoint
from widen_cli.config import parse_settings
from widen_cli.dtypes import STORED
from widen_cli.errors import WidenError, first_of, printable
from widen_cli.gguf.checkpoint import DESCRIBED, FILE_TYPE
from widen_cli.options import Options
from widen_cli.plan import Plan, PlanRequest
from widen_cli.plan.layer_growth import parse_growth
from widen_cli.plan.narrowing import Known
from widen_cli.plan.splits import Asked
from widen_cli.records import Record, Was, read_record

DTYPE_KEYS = ("dtype", "torch_dtype")
# What a conversion changes that speaks of the model as a whole: of its types, and of its number of parameters.
WHOLE_KEYS = (*DTYPE_KEYS, *DESCRIBED)


@dataclass(frozen=True)
class Making:
    """How the wide model was made: the options of it, the record that tells them, what that knows of the narrow model."""

    asked: Options
    record: Record | None
    was: Was | None

    @property
    def request(self) -> PlanRequest:
        """What the plan is asked for."""
        options = self.asked
        grow, layers = parse_growth(options.grow) if options.grow is not None else ({}, ())
        return PlanRequest(
            options.input,
            options.factor,
            grow,
            options.scaling,
            settings=parse_settings(options.settings),
            layout=options.layout,
            rope=options.rope,
            layers=layers,
            fill=options.fill,
            seed=options.seed,
            split=Asked(options.split, options.noise, options.seed),
            approximate=options.allow_approximate,
            back=True,
            scalars=None if self.was is None else frozenset((*self.was.made, *self.was.scaled)),
        )

    def doubts(self, plan: Plan, wide: Checkpoint, by_types: bool = False) -> tuple[str, ...]:
        """What is taken for true though nothing tells it; `by_types`: the stored types decided how attention grew."""
        doubts: list[str] = []
        if self.record is None and self.asked.scaling == "auto":
            doubts.append(
                f"{printable(wide.name)}: nothing records its scaling, taken as {plan.mode}; say --scaling if it was another"
            )
        if by_types and self.asked.factor is not None:
            doubts.append(
                f"{printable(wide.name)}: nothing records what --factor made of its heads; by the types stored now, taken as "
                f"{plan.grown}; say --grow if it was otherwise"
            )
        if self.asked.layout == "auto" and plan.layout == "tile":
            doubts.append(
                f"{printable(wide.name)}: nothing records how its copies are laid; by the types stored now, taken as axis after axis "
                "(tile); say --layout interleave if they stand side by side"
            )
        if self.asked.untie:
            doubts.append(
                f"{printable(wide.name)}: its weights were untied by --untie, and those of the narrow model stay so"
            )
        return tuple(doubts)


def making_of(options: Options, wide: Checkpoint, told: str | None) -> Making:
    """How a wide model was made: as `options` say, and for the rest by its record or that of the model `told`.

    Raises WidenError where nothing tells it.
    """
    record = _record(options, wide, told)
    asked = replace(options, named=False)
    if record is None:
        return Making(asked, None, None)
    asked = record.again(replace(asked, dtype=None, dequantize=None))
    if options.says_growth:
        return Making(asked, record, None)
    if record.factors:
        # A factor alone leaves it to the stored types whether heads become more or larger, and training changes those.
        asked = replace(asked, factor=None, grow=record.grown)
    return Making(asked, record, record.was)


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


def known(was: Was | None, kept: bool, untied: Sequence[str]) -> Known | None:
    """What is recorded of the narrow model; of its types only where they come back too, of its ties nothing: weights that
    --untie wrote apart are two weights since."""
    if was is None:
        return None
    gone = {*untied, *(() if kept else (*DTYPE_KEYS, FILE_TYPE))}
    added = [key for key in was.added if key not in untied]
    return Known({key: value for key, value in was.config.items() if key not in gone}, added, was.made)


def refuse_foreign(wide: Checkpoint, was: Was, plan: Plan, others: Set[str]) -> None:
    """Raises WidenError for a record that speaks of what no widening changes: it was not written by this tool, and what it says
    of the config would be written as if it had been. `others` are keys that conversions change beside those of the plan."""
    known = {change.key for change in plan.config} | {*WHOLE_KEYS, *others}
    made = {tensor.source.name for tensor in plan.tensors if tensor.made}
    foreign = [f"config key '{printable(key)}'" for key in (*was.config, *was.added) if key not in known]
    foreign += [f"tensor '{printable(name)}'" for name in was.made if name not in made]
    if foreign:
        raise WidenError(
            f"{printable(wide.name)}: its record speaks of {first_of(foreign, 4)}, which widening a model of '{plan.architecture}' does "
            "not change or make; say how it was made, such as --factor 2, or give --record with the model as it was written then"
        )


def kept_types(was: Was | None, options: Options) -> bool:
    """Whether all types are those of the narrow model again: blocks that were made numbers stay numbers."""
    asked = options.dtype or options.dequantize
    return was is not None and not asked and all(name in STORED for name in was.types.values())
