"""--depth: the same model with more layers, or others, as a view of its tensors under new numbers."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from widen_cli.checkpoint import Checkpoint
from widen_cli.dtypes import DType
from widen_cli.errors import WidenError, did_you_mean, first_of, printable
from widen_cli.map_rules import ArchitectureMap, TensorRule, name_pattern
from widen_cli.options import Options
from widen_cli.plan.match import Match, Matched, layer_counts, match_tensors
from widen_cli.plan.result import EXACT, ConfigChange
from widen_cli.rebuild.layers_wished import Wish, parse_depth
from widen_cli.rebuild.named_layers import renamed_layers, unsaid_lists
from widen_cli.rebuild.schedules import Schedules, refusal
from widen_cli.rebuild.silence import silenced
from widen_cli.rebuild.view import Piece, Restacked, View

ALLOW = "--allow-approximate"
# -1 as stored, the value of a gain w that is used as 1 + w and has to make nothing.
_MINUS_ONE = {
    "F64": struct.pack("<d", -1.0),
    "F32": struct.pack("<f", -1.0),
    "F16": struct.pack("<e", -1.0),
    "BF16": struct.pack("<f", -1.0)[2:],
}


def deepened(
    checkpoint: Checkpoint, architecture: ArchitectureMap, root: str, asked: Sequence[str], allowed: bool
) -> View | None:
    """The view that --depth asks for, None where it asks for nothing.

    `root` stands in front of all names that the map knows, `allowed` says that another function may come of it. Raises
    WidenError where the family cannot have such layers, and says why.
    """
    wishes = parse_depth(asked)
    if not wishes:
        return None
    match = match_tensors(architecture, checkpoint.tensors, checkpoint.config, root)
    stacks = _stacks(architecture, match, checkpoint)
    chosen = {_chosen(wish, stacks, checkpoint, architecture).pattern: wish for wish in wishes}
    built = [
        _Deep(checkpoint, architecture, match, stack, chosen[stack.pattern])
        for stack in stacks
        if stack.pattern in chosen
    ]
    approximate = "; ".join(deep.wish.said for deep in built if not deep.wish.keeps)
    if approximate and not allowed:
        raise WidenError(
            f"{approximate}: copies of layers, and missing ones, change the function; {ALLOW} takes that, "
            "and 2x, +N or a larger total keep it"
        )
    pieces = [Piece(tensor.name, tensor) for tensor in checkpoint.tensors]
    for deep in built:
        pieces = [new for piece in pieces for new in deep.pieces(piece)]
    counted = list(_counts(stacks, built, checkpoint, architecture))
    changes = [
        change for change in (*counted, *(each for deep in built for each in deep.changes)) if change.old != change.new
    ]
    warnings: list[str] = []
    if not checkpoint.config.present and changes:
        listed = ", ".join(f"{change.key} = {change.new}" for change in changes)
        warnings.append(
            f"{printable(checkpoint.name)}: no config was found, so none is written; whatever loads the result needs {listed}"
        )
    return View(
        pieces=tuple(pieces),
        config=tuple(changes),
        told=", ".join(deep.told for deep in built),
        notes=tuple(note for deep in built for note in deep.notes),
        warnings=(*warnings, *(text for deep in built for text in deep.doubts())),
        approximate=approximate,
        stacks={deep.stack.pattern: deep.restacked for deep in built},
    )


def refuse_depth(options: Options) -> None:
    """Raises WidenError for what does not go together with --depth in one run."""
    if not options.depth:
        return
    said = f"--depth {printable(options.depth[0])}"
    if options.base is not None:
        raise WidenError(
            f"{said}: an adapter's layers are those of its base; a deeper base takes one that is trained on it, "
            "or merge the adapter into its base first"
        )


@dataclass(frozen=True)
class _Stack:
    """Layers that a map repeats: the pattern of their names, the config keys that count them, and how many there are.

    `behind`: how many of those that the keys count stand behind the last one, so that `count` leaves them out.
    """

    pattern: str
    keys: tuple[str, ...]
    count: int
    behind: int = 0

    @property
    def word(self) -> str:
        """What tells it from other stacks: `encoder` of `model.encoder.layers.*`."""
        return self.pattern.removesuffix(".*")


def _stacks(architecture: ArchitectureMap, match: Match, checkpoint: Checkpoint) -> list[_Stack]:
    counts = layer_counts(architecture, match, checkpoint.config)
    names = [tensor.name for tensor in checkpoint.tensors]
    behind = _behind(architecture, checkpoint)
    stacks = [
        _Stack(pattern, keys, counts[pattern] - behind, behind)
        for pattern, keys in architecture.repeats.items()
        if pattern.count("*") == 1 and any(_number(match, pattern, name) for name in names)
    ]
    return [stack for stack in stacks if stack.count > 0]


FURTHER = "nextn_predict_layers"  # a GGUF's key for layers that predict further tokens; its block_count has them too


def _behind(architecture: ArchitectureMap, checkpoint: Checkpoint) -> int:
    """How many of the layers that are counted stand behind the last one. Raises WidenError where the map does not say it."""
    key = architecture.depth.behind
    found = checkpoint.config.get(key or FURTHER, 0)
    number = found if isinstance(found, int) else 0
    if number > 0 and key is None:
        raise WidenError(
            f"{printable(checkpoint.name)}: {FURTHER} is {number}: that many of its layers predict further tokens and stay behind "
            f"the others, of which map '{architecture.architecture}' says nothing; say there 'depth: {{behind: {FURTHER}}}'"
        )
    return max(0, number)


def _number(match: Match, pattern: str, name: str) -> tuple[int, int] | None:
    """Where in a tensor's name the layer's number stands, None for one outside of the stack."""
    found = _number_pattern(match, pattern).match(name)
    # The number is the last group: a name may have others before it.
    span = found.span(found.re.groups) if found else None
    return span if span and name[slice(*span)].isdigit() else None


def _number_pattern(match: Match, pattern: str) -> re.Pattern[str]:
    return re.compile(name_pattern(match.written(pattern)).pattern + r"(?=\.|$)")


def _chosen(wish: Wish, stacks: Sequence[_Stack], checkpoint: Checkpoint, architecture: ArchitectureMap) -> _Stack:
    fitting = [stack for stack in stacks if wish.stack is None or wish.stack in stack.pattern]
    if len(fitting) == 1:
        return fitting[0]
    words = [stack.word for stack in stacks]
    if not words:
        raise WidenError(
            f"{wish.said}: map '{architecture.architecture}' counts no layers by 'repeats'; say there what they are"
        )
    if wish.stack is None:
        raise WidenError(
            f"{wish.said}: {printable(checkpoint.name)} has {len(words)} stacks of layers, {' and '.join(words)}; "
            f"name one, as in --depth {_short(words)}:{wish.text}"
        )
    raise WidenError(
        f"{wish.said}: '{wish.stack}' is {'in the names of several stacks' if fitting else 'in the name of no stack'} of layers"
        f"{did_you_mean(wish.stack, words)}; there are {', '.join(words)}"
    )


def _short(words: Sequence[str]) -> str:
    """A part of the last stack's name that no other has."""
    return next((part for part in words[-1].split(".") if not any(part in word for word in words[:-1])), words[-1])


class _Deep:
    """One stack and what is asked of it: its new layers, and the pieces that they are made of."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: ArchitectureMap, match: Match, stack: _Stack, wish: Wish
    ) -> None:
        self.match = match
        self.stack = stack
        self.wish = wish
        self.file = checkpoint.name
        self.schedules = Schedules(architecture, checkpoint.config, stack.pattern, stack.count, wish)
        self.refuse(architecture)
        self.slots = self.schedules.fitted(wish.slots(stack.count))
        self.changes = [
            *self.schedules.changes(self.slots),
            *renamed_layers(checkpoint.config, match.written(stack.pattern), stack.count, self.slots),
        ]
        self.rules = {item.tensor.name: item.rule for item in match.matched}
        self.fixed = self.standing()
        self.silent = self.silenced(architecture) if any(slot.passes for slot in self.slots) else {}
        self.unsaid = unsaid_lists(architecture, checkpoint.config, stack.count)

    def refuse(self, architecture: ArchitectureMap) -> None:
        """Raises WidenError where the family's layers cannot be numbered anew, or cannot pass the stream on as it is."""
        depth = architecture.depth
        why = refusal(depth.fixed, self.stack.pattern, self.schedules.value)
        if why:
            raise WidenError(f"{self.wish.said}: {why}")
        why = refusal(depth.reasons, self.stack.pattern, self.schedules.value) if self.wish.keeps else None
        if why:
            raise WidenError(
                f"{self.wish.said}: no layer of '{architecture.architecture}' passes the stream on as it is: {why}; "
                f"copies of layers, such as --depth 0-{self.stack.count - 1},0-{self.stack.count - 1}, change the function and need {ALLOW}"
            )

    def standing(self) -> set[str]:
        """The tensors that keep their layer's number: those that a rule names with it, and buffers that are left out."""
        dropped = {tensor.name for tensor in self.match.dropped}
        moving = self.match.written(self.stack.pattern)
        last = tuple(self.match.last.values())
        return dropped | {
            name
            for name, rule in self.rules.items()
            if not self.match.written(rule.pattern).startswith(moving) and not name.startswith(last or ("\0",))
        }

    def silenced(self, architecture: ArchitectureMap) -> dict[str, bytes | None]:
        """The bytes of which a tensor is made in a layer that passes the stream on, by its name in the old layers."""
        inside: list[Matched] = []
        outside: list[Matched] = []
        for item in self.match.matched:
            span = _number(self.match, self.stack.pattern, item.tensor.name)
            moves = span is not None and item.tensor.name not in self.fixed
            if moves and span is not None and int(item.tensor.name[slice(*span)]) >= self.stack.count:
                continue
            (inside if moves else outside).append(item)
        patterns = silenced(architecture, inside, outside, self.file)
        found: dict[str, bytes | None] = {}
        for item in inside:
            if item.rule.pattern in patterns:
                found[item.tensor.name] = self.nothing(item.tensor.name, item.tensor.dtype, item.rule)
        return found

    def nothing(self, name: str, dtype: DType, rule: TensorRule) -> bytes:
        """What a weight that makes nothing is stored as; of quantised blocks all bytes are zero, scales included."""
        if not rule.offset:
            return bytes(1)
        if dtype.name not in _MINUS_ONE:
            raise WidenError(
                f"{printable(self.file)}: '{printable(name)}' holds 1 + w as {dtype.name}, which has no -1 here; convert it to F32"
            )
        return _MINUS_ONE[dtype.name]

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """A tensor in all new layers that take it; one outside of the stack as it is."""
        name = piece.name
        span = None if name in self.fixed else _number(self.match, self.stack.pattern, name)
        if span is None:
            yield piece
            return
        start, stop = span
        layer = int(name[start:stop])
        if layer >= self.stack.count:
            behind = layer - self.stack.count + len(self.slots)
            yield Piece(f"{name[:start]}{behind}{name[stop:]}", piece.stored)
            return
        for number, slot in enumerate(self.slots):
            if slot.source == layer:
                item = self.silent.get(name) if slot.passes else None
                yield Piece(f"{name[:start]}{number}{name[stop:]}", piece.stored, item, slot.passes)

    @property
    def restacked(self) -> Restacked:
        """Where the new layers come from."""
        layers = tuple(~slot.source if slot.passes else slot.source for slot in self.slots)
        silent = dict.fromkeys(self.match.written(self.rules[name].pattern) for name in self.silent)
        fixed = sorted(self.fixed - {tensor.name for tensor in self.match.dropped})
        numbered = [name for name in fixed if _number(self.match, self.stack.pattern, name)]
        return Restacked(
            self.match.written(self.stack.pattern), self.stack.count, layers, tuple(silent), tuple(numbered)
        )

    @property
    def told(self) -> str:
        return f"layers {self.stack.count} -> {len(self.slots)}"

    @property
    def notes(self) -> Iterator[str]:
        """Which layer takes whose weights, and what is zero."""
        new = [f"{number} (of {slot.source})" for number, slot in enumerate(self.slots) if slot.passes]
        if new:
            shown = first_of(new, 16)
            start = len(self.match.written(self.stack.pattern)) - 1
            zeroed = dict.fromkeys(name[start:].partition(".")[2] for name in self.silent)
            yield f"{self.stack.word}: new layers {shown} pass the stream on as it is: of what they copy, {', '.join(zeroed)} make nothing"
        if not self.wish.keeps:
            yield f"{self.stack.word}: layers {_runs([slot.source for slot in self.slots])} one after the other; another function"

    def doubts(self) -> Iterator[str]:
        for key in self.unsaid:
            yield (
                f"'{printable(key)}' holds as many values as there were layers, and no map says that it goes by them; "
                "it is left as it is: correct it if it does"
            )


def _runs(layers: Sequence[int]) -> str:
    """`0-23,8-31`: the layers, neighbours together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _counts(
    stacks: Sequence[_Stack], built: Sequence[_Deep], checkpoint: Checkpoint, architecture: ArchitectureMap
) -> Iterator[ConfigChange]:
    """The keys that count layers, with what they hold now; one that another stack went by is given to that."""
    config = checkpoint.config
    first = {stack.pattern: stack.keys[0] for stack in stacks}
    totals = {deep.stack.pattern: len(deep.slots) + deep.stack.behind for deep in built}
    changed: dict[str, int] = {}
    for stack in stacks:
        if stack.pattern in totals:
            others = {key for pattern, key in first.items() if pattern != stack.pattern}
            present = [key for key in stack.keys if key in config and key not in others]
            changed |= dict.fromkeys(present or [stack.keys[0]], totals[stack.pattern])
    for stack in stacks:
        used = next((key for key in stack.keys if key in config), None)
        if stack.pattern not in totals and used in changed:
            changed[stack.keys[0]] = stack.count + stack.behind
    for key, new in changed.items():
        yield ConfigChange(key, config.get(key), new, EXACT)
