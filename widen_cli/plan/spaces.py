"""The spaces that one checkpoint has, what they are, and their scales under a mode."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType

from widen_cli.config import ModelConfig
from widen_cli.errors import WidenError, printable
from widen_cli.formulas import Formula, UnknownValueError, dotted, evaluate
from widen_cli.map_checks import HOMOGENEOUS, NOT_HOMOGENEOUS
from widen_cli.map_rules import ArchitectureMap, TensorRule, Tie
from widen_cli.plan.factors import Factor
from widen_cli.plan.laws import FormulaReader, Law, Power, epsilon_laws, taken, width_power
from widen_cli.plan.lookup import config_lookup
from widen_cli.plan.match import Match, applying_rule
from widen_cli.plan.modes import Mode, Roles, solve
from widen_cli.plan.partial import Partials
from widen_cli.plan.rotary import Rotary
from widen_cli.scales import ONE, ContradictionError, Scale
from widen_cli.shapes import Parts, Product, Term

NO_PARTIALS: Partials = MappingProxyType({})


def paths(term: Term) -> Iterator[tuple[str, ...]]:
    """The names on the way to each leaf of a dimension: one tuple for each part."""
    yield from _paths((term,), ())


def _paths(terms: tuple[Term, ...], before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not terms:
        yield before
        return
    head, rest = terms[0], terms[1:]
    if isinstance(head, Product):
        yield from _paths(head.items + rest, before)
    elif isinstance(head, Parts):
        for part in head.parts:
            yield from _paths((part, *rest), before)
    else:
        yield from _paths(rest, (*before, head.text))


def carrier(architecture: ArchitectureMap, path: tuple[str, ...]) -> str:
    """The name on a path that carries the scale: the space in it, or the last axis; the others count."""
    return next((name for name in path if name in architecture.spaces), path[-1])


def config_condition(architecture: ArchitectureMap, config: ModelConfig, node: ast.expr) -> bool:
    """Whether the condition of an `x if c else y` holds for a config; WidenError where its values do not fit."""
    try:
        return bool(evaluate(Formula(ast.unparse(node), node), config_lookup(architecture, config)))
    except UnknownValueError as error:
        return bool(architecture.defaults.get(error.name, True))
    except ValueError as error:
        raise WidenError(f"{printable(config.name)}: its values do not fit what the map asks: {error}") from None


class SpaceScales:
    """Solves for the scales of the spaces that a matched checkpoint has."""

    def __init__(
        self,
        architecture: ArchitectureMap,
        match: Match,
        factors: Mapping[str, Factor],
        config: ModelConfig,
        rotary: Rotary | None = None,
        partials: Partials = NO_PARTIALS,
    ) -> None:
        self.architecture = architecture
        self.match = match
        self.factors = factors
        self.partials = partials
        self.config = config
        self.rules = list({id(item.rule): item.rule for item in match.matched}.values())
        self.tied_reads: frozenset[str] = frozenset()
        self.ties = [tie for tie in match.ties if self.applies(tie)]
        self.tied_reads = frozenset(name for tie in self.ties for name in self.read_by(tie))
        self.once = rotary.once if rotary else frozenset()
        self.multipliers = frozenset(key for key in architecture.multipliers if self.config.get(key) is not None)
        reader = FormulaReader(
            architecture,
            self.factor,
            self.condition,
            self.function,
            self.once,
            self.multipliers,
            copies=self.copies,
            spread=self.spread,
        )
        self.reading = reader.read(self.present(), self.written())
        self.roles = self.find_roles()
        self.laws = (
            self.reading.laws + list(epsilon_laws(self.reading.norms)) + [self.tie_law(tie) for tie in self.ties]
        )

    def factor(self, name: str) -> Factor:
        """The growth of the axis that a space, an axis or a structural number stands for."""
        axis = None if name.isdigit() else self.architecture.axis_of(name)
        return 1 if axis is None else self.factors[axis.name]

    def copies(self, name: str) -> int:
        """How many copies of every position of that axis there are at least."""
        return int(self.factor(name))

    def spread(self, node: ast.expr) -> Scale:
        """What becomes of the root mean square that a norm takes of an expression, where its axis is filled up."""
        for name in (dotted(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)):
            axis = (
                self.architecture.axis_of(name)
                if name in {*self.architecture.spaces, *self.architecture.axes}
                else None
            )
            if axis is not None and axis.name in self.partials and axis.name not in self.evened:
                return self.partials[axis.name].spread
        return ONE

    @cached_property
    def evened(self) -> frozenset[str]:
        """The axes along which q.k is summed: a norm over them meets copies of all positions, made even, and no zeros.

        Not those of the stream, where a stored vector meets what a norm makes (Qwen2-MoE's shared expert): all of it is filled.
        """
        found: set[str] = set()
        streams = self.architecture.growth.width
        for space in self.architecture.spaces.values():
            for node in taken(space.formula.tree, self.condition) if space.formula else ():
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                    sides = (part for part in ast.walk(node) if isinstance(part, ast.Name))
                    axes = (self.architecture.axis_of(part.id) for part in sides if part.id in self.architecture.spaces)
                    found |= {
                        axis.name
                        for axis in axes
                        if axis is not None and axis.name in self.partials and axis.name not in streams
                    }
        return frozenset(found)

    def total_copies(self, path: tuple[str, ...]) -> int:
        product = 1
        for name in path:
            product *= self.copies(name)
        return product

    def condition(self, node: ast.expr) -> bool:
        return config_condition(self.architecture, self.config, node)

    def function(self, name: str) -> str:
        """The function a formula calls: itself, or what the config key of that name says."""
        if name in HOMOGENEOUS or name in NOT_HOMOGENEOUS:
            return name
        value = self.config.get(name)
        return str(value if value is not None else self.architecture.defaults.get(name))

    def carriers(self, rule: TensorRule, role: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        for dimension in rule.shape.dimensions:
            if dimension.role == role:
                for path in paths(dimension.term):
                    yield carrier(self.architecture, path), path

    def written(self) -> set[str]:
        return {name for rule in self.rules for name, _ in self.carriers(rule, "out")}

    def present(self) -> set[str]:
        """Spaces in some stored tensor's shape or read by a tied head, what they come out of, and those that formulas make
        of them alone. A law that no tensor of the map can call on holds always."""
        present = self.written() | {name for rule in self.rules for name, _ in self.carriers(rule, "in")}
        present |= self.tied_reads
        present |= {name for name in self.uncalled() if present & {*self.words(name)}}
        waiting = list(present)
        while waiting:
            found = self.comes_out_of(waiting.pop()) - present
            present |= found
            waiting += found
        while True:
            derived = {
                name
                for name, space in self.architecture.spaces.items()
                if space.formula
                and (inner := {word for word in space.formula.words if word in self.architecture.spaces} - {name})
                and inner <= present
            }
            if derived <= present:
                return present
            present |= derived

    def comes_out_of(self, name: str) -> set[str]:
        """The spaces in the formula of a space, but for those in branches that are not taken."""
        space = self.architecture.spaces.get(name)
        if space is None or space.formula is None:
            return set()
        nodes = taken(space.formula.tree, self.condition)
        words = {dotted(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
        return {word for word in words if word in self.architecture.spaces} - {name}

    def uncalled(self) -> set[str]:
        """Spaces made of axes alone, such as a norm of the stream, of which no tensor of the map tells whether they are there:
        none names them, nor what comes out of them. The model's output is there too."""
        spaces = self.architecture.spaces
        called = {name.text for rule in self.architecture.tensors for name, _ in rule.shape.names()}
        waiting = [*called]
        while waiting:
            found = {word for word in self.words(waiting.pop()) if word in spaces} - called
            called |= found
            waiting += found
        return {
            name
            for name, space in spaces.items()
            if space.formula
            and not any(word in spaces for word in self.words(name) if word != name)
            and (name not in called or name in self.architecture.output[:1])
        }

    def words(self, name: str) -> tuple[str, ...]:
        """The names in the formula of a space, none where it has no formula."""
        space = self.architecture.spaces.get(name)
        return space.formula.words if space and space.formula else ()

    def unmade(self) -> list[tuple[str, str]]:
        """Stored tensors' patterns with what they read and no stored tensor makes: they follow another rule than was taken."""
        reads = {(rule.pattern, name) for rule in self.rules for name, _ in self.carriers(rule, "in")}
        comes_out = {name for name, space in self.architecture.spaces.items() if space.formula is not None}
        return sorted((pattern, name) for pattern, name in reads if name in comes_out and not self.made(name))

    def made(self, name: str) -> bool:
        """Whether a tensor writes a space, or all that it comes out of; the streams that axes name always flow."""
        if name in self.architecture.axes or name in self.written():
            return True
        inner = self.comes_out_of(name)
        words = {word for word in self.words(name) if word in self.architecture.axes}
        return bool(inner | words) and all(self.made(word) for word in inner)

    def find_roles(self) -> Roles:
        present = sorted(self.present())
        # A space on an axis that never grows still takes a scale where a law asks for one: one epsilon serves two norms.
        lawful = {name for power in self.reading.powers() for name in power.spaces}
        free = [
            name
            for name in present
            if not name.isdigit() and (axis := self.architecture.axis_of(name)) and (not axis.fixed or name in lawful)
        ]
        matrices = {
            name for rule in self.rules if len(rule.shape.dimensions) > 1 for name, _ in self.carriers(rule, "out")
        }
        normed = {name for norm in self.reading.norms for name in norm.power.spaces}
        width = self.architecture.growth.width
        streams = tuple(
            n for n in free if n in normed & matrices and (axis := self.architecture.axis_of(n)) and axis.name in width
        )
        read_growth: dict[str, int] = defaultdict(lambda: 1)
        writers_growth: dict[str, int] = defaultdict(lambda: 1)
        for rule in self.rules:
            for name, path in self.carriers(rule, "in"):
                read_growth[name] = max(read_growth[name], self.total_copies(path))
                for written, _ in self.carriers(rule, "out"):
                    writers_growth[written] = max(writers_growth[written], self.total_copies(path))
        return Roles(
            streams=streams,
            norm_outputs=frozenset(name for name in self.reading.norm_outputs if name in free),
            contractions=tuple(self.reading.contractions),
            others=tuple(free),
            growth={name: self.copies(name) for name in free},
            filled=frozenset(name for name in free if self.factor(name) != self.copies(name)),
            read_growth=dict(read_growth),
            writers_growth=dict(writers_growth),
            multipliers=tuple(sorted(self.multipliers)),
        )

    def first_copies(self) -> frozenset[str]:
        """The spaces of which only the first copies are written: one side of every q.k that counts old pairs once."""
        chosen: set[str] = set()
        for query, key in self.reading.contractions:
            axis = self.architecture.axis_of(query)
            if axis is not None and (axis.name in self.once or axis.name in self.partials):
                side = next((name for name in (key, query) if name in self.written()), None)
                if side is None:
                    raise WidenError(
                        f"map '{self.architecture.file}': no tensor writes {query} or {key}, so no pair of either can be zero"
                    )
                chosen.add(side)
        return frozenset(chosen)

    def applies(self, tie: Tie) -> bool:
        """A tie binds where the weight is stored and what its head reads is there; rows of a vocabulary always are."""
        return self.match.by_name(tie.to) is not None and all(
            self.is_there(name) or (name in self.architecture.axes and self.architecture.axes[name].fixed)
            for name in self.read_by(tie)
        )

    def read_by(self, tie: Tie) -> set[str]:
        return {name for name, _ in self.carriers(self.rule(tie.tensor), "in")}

    def written_by(self, tie: Tie) -> set[str]:
        return {name for name, _ in self.carriers(self.rule(tie.to), "out")}

    def is_there(self, name: str) -> bool:
        """Whether a tensor writes a space, or it comes out of others that are there, as of a norm without a gain."""
        if name in self.written():
            return True
        space = self.architecture.spaces.get(name)
        if space is None or space.formula is None:
            return False
        known = {*self.architecture.spaces, *self.architecture.axes}
        inner = {word for word in space.formula.words if word in known} - {name}
        return bool(inner) and inner <= self.present()

    def rule(self, pattern: str) -> TensorRule:
        return applying_rule(self.architecture, self.match, self.config, pattern)

    def stored_ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of stored tensors that are one weight; they have to hold the same bytes."""
        pairs = [(self.match.by_name(tie.tensor), self.match.by_name(tie.to)) for tie in self.ties]
        return tuple((head.tensor.name, table.tensor.name) for head, table in pairs if head and table)

    def tied_names(self) -> frozenset[str]:
        """The stored tensors that bind two weights: both write and read, or have to hold the same bytes."""
        found = (self.match.by_name(name) for tie in self.ties for name in (tie.tensor, tie.to))
        return frozenset(item.tensor.name for item in found if item is not None)

    def tie_law(self, tie: Tie) -> Law:
        """One stored weight serves both, so both factors are equal."""
        power = self.weight_power(self.rule(tie.tensor)) * self.weight_power(self.rule(tie.to)) ** -1
        return Law(power, f"{tie.tensor} is tied to {tie.to}: one factor serves both")

    def weight_power(self, rule: TensorRule) -> Power:
        """The factor on a weight: s of what it writes, 1/(r s) of what it reads, over its run-time multiplier."""
        power = Power(known=self.multiplier(rule) ** -1)
        for role, sign in (("out", 1), ("in", -1)):
            for name, path in self.carriers(rule, role):
                axis = self.architecture.axis_of(name)
                if axis is not None and not axis.fixed:
                    power = (
                        power
                        * Power({name: Fraction(sign)})
                        * Power(known=Scale.of(self.total_copies(path) if role == "in" else 1) ** -1)
                    )
        return power

    def multiplier(self, rule: TensorRule) -> Scale:
        return ONE if rule.times is None else width_power(rule.times.tree, self.factor)

    def solve(self, mode: Mode) -> dict[str, Scale]:
        """The scale of every space. Raises ContradictionError naming the laws that rule the mode out."""
        return solve(mode, self.laws, self.reading, self.roles)

    def solves(self, mode: Mode) -> bool:
        """Whether a mode keeps the function."""
        try:
            self.solve(mode)
        except ContradictionError:
            return False
        return True

    def freed(self, mode: Mode) -> list[str]:
        """The names of tied weights without whose ties a mode would keep the function; none where they do not matter."""
        ties = [self.tie_law(tie).text for tie in self.ties]
        try:
            solve(mode, [law for law in self.laws if law.text not in ties], self.reading, self.roles)
        except ContradictionError:
            return []
        return list(dict.fromkeys(self.match.written(tie.tensor) for tie in self.ties))

    def silent(self, mode: Mode) -> frozenset[str]:
        """The spaces of which only the first copies are read."""
        return frozenset(
            name for name in self.present() if mode.silent_copies and name not in self.reading.norm_outputs
        )

    def epsilon_scales(self, scales: dict[str, Scale]) -> dict[str, Scale]:
        """By how much each epsilon key of the config grows: the square of the scale that its norms read."""
        grown: dict[str, Scale] = {}
        for norm in self.reading.norms:
            if isinstance(norm.epsilon, str):
                scale = ONE
                for name, power in norm.power.spaces.items():
                    scale = scale * scales.get(name, ONE) ** power
                grown[norm.epsilon] = (scale * norm.power.known) ** 2
        return grown
