"""LoRA adapters: from a base model's plan and an adapter's headers to the adapter's own plan.

A widened weight is T_out(W) T_in, with trees and factors that act on rows and columns on their own, so what is added to it,
B A, is widened by giving A the trees and factors of what W reads and B those of what W writes. Rank, alpha and every other
value of adapter_config.json stay. Source: PEFT, tuners/lora (Linear and Conv1D hold A [rank, in] and B [out, rank],
whatever way W is stored; Embedding holds A [rank, vocab] and B [hidden, rank]).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.dimensions import Copies, Growth, Laid, leaf_scales, scaled
from widen_cli.dtypes import DType
from widen_cli.errors import WidenError, did_you_mean, printable
from widen_cli.map_rules import ArchitectureMap, TensorRule
from widen_cli.plan.adapter_kinds import OTHER_KINDS, check_config
from widen_cli.plan.adapter_names import bare, spellings
from widen_cli.plan.match import GRID, StoredHeader, applying_rule, match_tensors
from widen_cli.plan.planner import make_plan
from widen_cli.plan.request import PlanRequest
from widen_cli.plan.result import Plan, TensorPlan
from widen_cli.plan.untie import untied
from widen_cli.scales import Scale

FAULTS_SHOWN = 8
LORA_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<table>embedding_)?)(?P<side>[AB])(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?P<end>\.weight|\.bias)?"
)

_TASK_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": "ForCausalLM",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter's headers, the values of its adapter_config.json, and its name in messages."""

    file: str
    tensors: Sequence[StoredHeader]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Base:
    """The narrow base model as the planner sees it; `request.file` is its name in messages."""

    architecture: ArchitectureMap
    tensors: Sequence[StoredHeader]
    config: ModelConfig
    request: PlanRequest


def is_lora(name: str) -> bool:
    return LORA_NAME.fullmatch(name) is not None


def plan_adapter(adapter: Adapter, base: Base) -> Plan:
    """The plan for an adapter of `base`, by the plan that `base` itself would get.

    Raises WidenError with every fault of the base, the request and the adapter.
    """
    file = printable(adapter.file)
    check_config(adapter.config, file)
    if not any(is_lora(tensor.name) for tensor in adapter.tensors):
        raise WidenError(
            f"{file}: --base is for LoRA adapters, and no tensor here is named lora_A or lora_B; leave it out"
        )
    return AdapterPlanner(adapter, base, file).plan()


@dataclass(frozen=True)
class _Named:
    """An adapter's tensor under the name that its base has for it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Weight:
    """A base weight: its plan with its factors in it, and the roles of its dimensions."""

    plan: TensorPlan
    roles: tuple[str, ...]
    stored: bool = True


class UnfitError(Exception):
    """A tensor that cannot be widened; the text says why and what to do."""


class OtherBaseError(UnfitError):
    """A tensor that does not fit a weight of the base, as those of an adapter of another base do not; the text says why."""


class AdapterPlanner:
    def __init__(self, adapter: Adapter, base: Base, file: str) -> None:
        if base.request.untie:
            match = match_tensors(base.architecture, base.tensors, base.config, base.request.root)
            loose = untied(base.architecture, match, base.tensors, base.config, base.request.file)
            request = replace(base.request, untie=False)
            base = replace(base, tensors=loose.tensors, config=loose.config, request=request)
        self.adapter = adapter
        self.base = base
        self.file = file
        self.base_file = printable(base.request.file)
        self.match = match_tensors(base.architecture, base.tensors, base.config, base.request.root)
        self.base_plan = make_plan(base.architecture, base.tensors, base.config, base.request)
        self.plans = {plan.source.name: plan for plan in self.base_plan.tensors}
        self.roles = {item.tensor.name: _roles(item.rule) for item in self.match.matched}
        self.undecided: set[str] = set()
        self.faults: list[str] = []
        self.others: list[str] = []

    def plan(self) -> Plan:
        added = self.added()
        pairs = self.pairs()
        tensors: list[TensorPlan] = []
        dropped: list[str] = []
        for tensor in self.adapter.tensors:
            try:
                if tensor.dtype.kind != "float":
                    raise UnfitError(f"holds {tensor.dtype.name}, and a weight holds floating-point numbers")
                if hit := LORA_NAME.fullmatch(tensor.name):
                    tensors.append(self.lora(tensor, hit, pairs))
                elif self.dropped(tensor.name):
                    dropped.append(tensor.name)
                else:
                    tensors.append(self.full(tensor, added))
            except UnfitError as error:
                faults = self.others if isinstance(error, OtherBaseError) else self.faults
                faults.append(f"tensor '{printable(tensor.name)}' {list(tensor.shape)}: {error}")
        if self.others or self.faults:
            raise WidenError(*self.of_another_base(), *self.shown())
        return replace(
            self.base_plan,
            why=f"as for the base: {self.base_plan.why}",
            tensors=tuple(tensors),
            dropped=tuple(dropped),
            config=(),
            sidecars={},
            numbered={},
            notes=(f"goes with {self.base_file}, widened with the same options", *self.base_plan.notes),
            warnings=(),
            equal_pairs=(),
            output=None,
            outputs={},
        )

    def of_another_base(self) -> list[str]:
        """The one fault of all tensors that do not fit the base's."""
        if not self.others:
            return []
        count, first = len(self.others), self.others[0]
        told = first if count == 1 else f"{count} of {len(self.adapter.tensors)} tensors do not fit; the first: {first}"
        return [f"{self.file}: {told}; it belongs to another base than {self.base_file}: give that with --base"]

    def shown(self) -> list[str]:
        """The other faults, as many as can be read."""
        more = len(self.faults) - FAULTS_SHOWN
        rest = [f"... and {more} more tensors"] if more > 0 else []
        return [f"{self.file}: {fault}" for fault in (*self.faults[:FAULTS_SHOWN], *rest)]

    # Names.

    def spellings(self, name: str) -> Iterable[tuple[str, int | None]]:
        return spellings(self.base.architecture, self.base.request.root, name)

    def dropped(self, name: str) -> bool:
        """Whether it is one of the buffers that are computed anew when the model loads."""
        return any(spelt in self.base_plan.dropped for spelt, _ in self.spellings(bare(name)))

    def weight(self, name: str) -> _Weight:
        """The base's weight of this name; of a tied head that is not stored, its table's."""
        for spelt, part in self.spellings(name):
            if spelt in self.plans and spelt in self.roles:
                whole = _Weight(self.factored(spelt), self.roles[spelt])
                return whole if part is None else _part(whole, name, part)
            for tie in self.match.ties:
                table = self.match.by_name(tie.to)
                if spelt == self.match.written(tie.tensor) and table is not None:
                    rule = applying_rule(self.base.architecture, self.match, self.base.config, tie.tensor)
                    return _Weight(self.factored(table.tensor.name), _roles(rule), stored=False)
        raise OtherBaseError(f"the base has no '{printable(name)}'{did_you_mean(name, self.plans)}")

    def factored(self, name: str) -> TensorPlan:
        """A weight's plan with all of its factors in it, also where those of a block-scaled weight stand in its grid."""
        plan, grid = self.plans[name], self.plans.get(name + GRID)
        if grid is None or name not in self.match.grids:
            return plan
        factors = [set(leaf_scales(growth)) for growth in grid.growth or ()]
        if any(len(found) != 1 for found in factors):
            raise UnfitError(
                f"the base's '{printable(name)}' is packed of parts with factors of their own, which its block-scaled FP8 keeps apart "
                "from them; give the dequantised base with --base"
            )
        growth = tuple(scaled(tree, found.pop()) for tree, found in zip(plan.growth or (), factors, strict=True))
        return replace(plan, growth=growth, scale=grid.scale)

    # LoRA.

    def pairs(self) -> dict[tuple[str, str, str], dict[str, StoredHeader]]:
        """A and B of each module and adapter."""
        found: dict[tuple[str, str, str], dict[str, StoredHeader]] = {}
        for tensor in self.adapter.tensors:
            if (hit := LORA_NAME.fullmatch(tensor.name)) and hit["end"] != ".bias":
                found.setdefault(_pair(hit), {})[hit["side"]] = tensor
        return found

    def lora(
        self, tensor: StoredHeader, hit: re.Match[str], pairs: dict[tuple[str, str, str], dict[str, StoredHeader]]
    ) -> TensorPlan:
        """The plan of an A, a B, or the bias beside a B."""
        weight = self.weight(bare(hit["module"]) + ".weight")
        if len(weight.plan.names) != 1 or not weight.plan.growth:
            raise UnfitError("LoRA on a weight that is no matrix of the map; merge the adapter into its base first")
        reads, writes = self.sides(weight, hit["table"] is not None)
        if hit["end"] == ".bias":
            return self.bias(tensor, weight, writes)
        pair = pairs[_pair(hit)]
        other = pair.get("B" if hit["side"] == "A" else "A")
        if other is None:
            raise UnfitError(
                f"its lora_{'B' if hit['side'] == 'A' else 'A'} is missing; the file is incomplete, save the adapter anew"
            )
        rank = pair["A"].shape[0] if pair["A"].shape else 0
        ones = tuple(Copies(1) for _ in reads[1:]) if len(reads) > 1 else ()
        growth = (Copies(rank), *reads) if hit["side"] == "A" else (writes, Copies(rank), *ones)
        expected = tuple(tree.old for tree in growth)
        if rank == 0 or tensor.shape != expected:
            shown = f"rank {rank}" if rank else "a rank of 1 or more"
            raise OtherBaseError(
                f"with {shown} the base's '{printable(weight.plan.source.name)}' {list(weight.plan.source.shape)} needs "
                f"{list(expected)}"
            )
        # Factors that stand with the whole weight, as those of a run-time multiplier, go with what it writes.
        return self.planned(
            tensor, weight.plan, growth, weight.plan.scale if hit["side"] == "B" else Scale(), _pattern(tensor.name)
        )

    def sides(self, weight: _Weight, table: bool = False) -> tuple[tuple[Growth, ...], Growth]:
        """The trees of the dimensions that a weight reads and of the one that it writes; a `table` is read by its rows."""
        growth = weight.plan.growth or ()
        roles = weight.roles
        if {*roles} == {"carried"} and len(roles) > 1:
            roles = _carried_roles(growth, table)
        named = list(zip(roles, growth, strict=True))
        reads = tuple(tree for role, tree in named if role == "in")
        writes = [tree for role, tree in named if role == "out"]
        plain = len(named) == 2 or roles[0] == "out"
        if not reads or len(writes) != 1 or len(named) != len(reads) + 1 or not plain:
            raise UnfitError(
                f"LoRA on '{printable(weight.plan.source.name)}' {list(weight.plan.source.shape)}, which is no matrix from what it reads "
                "to what it writes; merge the adapter into its base first"
            )
        return reads, writes[0]

    def bias(self, tensor: StoredHeader, weight: _Weight, writes: Growth) -> TensorPlan:
        """The bias beside a B (lora_bias): it is added to what the weight makes."""
        if not weight.stored:
            raise UnfitError("a bias beside B on a tied head; merge the adapter into its base first")
        if tensor.shape != (writes.old,):
            raise OtherBaseError(f"needs {[writes.old]}")
        return self.planned(tensor, weight.plan, (writes,), weight.plan.scale, _pattern(tensor.name))

    # Full tensors.

    def full(self, tensor: StoredHeader, added: Mapping[str, TensorPlan]) -> TensorPlan:
        """The plan of a whole tensor that stands in the place of the base's (modules_to_save, biases, saved embeddings)."""
        name = bare(tensor.name)
        for mark, what in OTHER_KINDS.items():
            if mark in tensor.name:
                raise UnfitError(what)
        if name in self.undecided:
            raise UnfitError(
                "the base lacks it, and what it reads depends on the model's class; say task_type in adapter_config.json "
                f"({', '.join(_TASK_CLASSES)}), or save the base with it and give that with --base"
            )
        plan = added[name] if name in added else self.weight(name).plan
        if len(plan.names) != 1:
            raise UnfitError("is numbered by heads in its name; merge the adapter into its base first")
        if tensor.shape != plan.source.shape:
            raise OtherBaseError(
                f"the base's '{printable(plan.source.name)}' is {list(plan.source.shape)} (was its vocabulary resized?)"
            )
        whole = self.planned(tensor, plan, plan.growth, plan.scale, _pattern(tensor.name))
        return replace(whole, offset=plan.offset)

    def added(self) -> dict[str, TensorPlan]:
        """The plans of whole tensors that the map knows and the base lacks, as the head of a new task.

        They are planned together with the base, and only where that leaves the base's own plan as it is.
        """
        foreign: dict[str, _Named] = {}
        for tensor in self.adapter.tensors:
            name = bare(tensor.name)
            if is_lora(tensor.name) or tensor.dtype.kind != "float" or self.dropped(tensor.name):
                continue
            try:
                self.weight(name)
            except UnfitError:
                foreign[name] = _Named(name, tensor.dtype, tensor.shape)
        if not foreign:
            return {}
        base = self.base
        together = (*base.tensors, *foreign.values())
        match = match_tensors(base.architecture, together, base.config, base.request.root)
        patterns = {item.tensor.name: item.rule.pattern for item in match.matched if item.tensor.name in foreign}
        known = [tensor for tensor in together if tensor.name in patterns or tensor.name not in foreign]
        # What a head reads may depend on the class, which the base's config does not tell.
        config = base.config
        rules = [rule.pattern for rule in base.architecture.tensors]
        if any(rules.count(pattern) > 1 for pattern in patterns.values()):
            ending = _TASK_CLASSES.get(str(self.adapter.config.get("task_type")))
            if ending is None:
                self.undecided = set(patterns)
                return {}
            config = config.with_values({"architectures": [f"Base{ending}"]})
        try:
            plan = make_plan(base.architecture, known, config, base.request)
        except WidenError:
            return {}
        plans = {tensor.source.name: tensor for tensor in plan.tensors}
        if any(plans.get(name) != tensor for name, tensor in self.plans.items()):
            self.faults.append(
                f"tensor '{printable(next(iter(foreign)))}' is none of the base's, and with it the base would be widened in "
                "another way; save the base with that head, and give it with --base"
            )
        return {name: plans[name] for name in patterns}

    def planned(
        self, tensor: StoredHeader, base: TensorPlan, growth: tuple[Growth, ...] | None, scale: Scale, pattern: str
    ) -> TensorPlan:
        target = self.base.request.types.dtype or tensor.dtype
        return TensorPlan(tensor, (tensor.name,), pattern, target, growth, scale)


def _pattern(name: str) -> str:
    """A name with its numbers as a map writes them."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _pair(hit: re.Match[str]) -> tuple[str, str, str]:
    return hit["module"], hit["adapter"] or "", hit["table"] or ""


def _part(weight: _Weight, name: str, number: int) -> _Weight:
    """One part of a weight that is packed of several along what it writes, under the name that it has by itself."""
    plan, growth = weight.plan, []
    for role, tree in zip(weight.roles, plan.growth or (), strict=True):
        growth.append(tree.parts[number] if role == "out" and isinstance(tree, Laid) else tree)
    source = _Named(name, plan.source.dtype, tuple(tree.old for tree in growth))
    return replace(weight, plan=replace(plan, source=source, names=(name,), growth=tuple(growth)))


def _carried_roles(growth: Sequence[Growth], table: bool) -> tuple[str, ...]:
    """What a weight that is only carried along reads and writes: its copies have no factors, and most have no copies."""
    if table and len(growth) == 2:
        return "in", "out"
    if all(tree.old == tree.new for tree in growth):
        return "out", *["in"] * (len(growth) - 1)
    return ("carried",) * len(growth)


def _roles(rule: TensorRule) -> tuple[str, ...]:
    return tuple(dimension.role for dimension in rule.shape.dimensions)
