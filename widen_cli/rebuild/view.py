"""A checkpoint seen as another: a list of new names, each with the stored tensor whose bytes it takes or one value throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from widen_cli.checkpoint import Checkpoint
from widen_cli.plan import Plan
from widen_cli.plan.result import ConfigChange, Gradient
from widen_cli.safetensors_file import StoredTensor
from widen_cli.views import FilledSource, Shared, ViewSource, Window

NEW_LAYERS = "layers that pass the stream on as it is are new"


@dataclass(frozen=True)
class Piece:
    """A tensor of the rebuilt model: its name, and the stored tensor whose type, shape and bytes it has.

    `item`: it holds these bytes over and over in place of the stored ones. `new`: it stands in a layer that there was not.
    """

    name: str
    stored: StoredTensor
    item: bytes | None = None
    new: bool = False

    def tensor(self, shared: Shared) -> StoredTensor:
        """The piece as if it had been stored; `shared` are the stored bytes, for as many pieces as take them."""
        stored = replace(self.stored, name=self.name)
        if self.item is not None:
            return replace(stored, offset=0, source=FilledSource(self.name, stored.nbytes, self.item))
        if not stored.source.sequential:
            return stored
        return replace(stored, offset=0, source=ViewSource(shared, [Window(0, stored.nbytes, stored.nbytes, 1)]))


@dataclass(frozen=True)
class Restacked:
    """Where the layers of a stack of `count` come from: for each new one the old one, ~n where it passes the stream on and was
    made of layer n. `written` is the pattern of their names, `silent` are those of what is zero in such a layer, `fixed` tensors
    that keep their names."""

    written: str
    count: int
    layers: tuple[int, ...]
    silent: tuple[str, ...]
    fixed: tuple[str, ...]

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The new numbers of each old layer, without those of layers that only take its weights."""
        return tuple(
            tuple(number for number, source in enumerate(self.layers) if source == old) for old in range(self.count)
        )


@dataclass(frozen=True)
class View:
    """What a rebuilt model is made of: pieces in the order of the bytes they take, so that a pipe can give them.

    `config` are the values that change with it, `told` says in few words what was done, `notes` and `warnings` say more.
    `approximate` says why the function is another, and is empty where it is the same. `stacks` says by the map's
    pattern where layers come from.
    """

    pieces: tuple[Piece, ...]
    config: tuple[ConfigChange, ...]
    told: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    approximate: str = ""
    stacks: Mapping[str, Restacked] = field(default_factory=dict)

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as the view sees it."""
        uses = Counter(piece.stored.name for piece in self.pieces if piece.item is None)
        shared = {tensor.name: Shared(tensor, uses[tensor.name]) for tensor in checkpoint.tensors}
        tensors = tuple(piece.tensor(shared[piece.stored.name]) for piece in self.pieces)
        stored = checkpoint.stored or checkpoint.tensors
        return self.counted(replace(checkpoint, tensors=tensors, stored=stored))

    def counted(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the new values of its config, as where it became another kind by the old ones."""
        values = {change.key: change.new for change in self.config}
        config = checkpoint.config
        found = checkpoint.found_config.within(config.inside).with_values(values)
        return replace(checkpoint, config=config.with_values(values), found_config=found)

    def numbers(self, stack: str) -> tuple[tuple[int, ...], ...] | None:
        """The new numbers of each old layer of a stack; None where all keep theirs."""
        return self.stacks[stack].numbers if stack in self.stacks else None

    def planned(self, plan: Plan) -> Plan:
        """The plan made of such a checkpoint, with what the view did before."""
        return replace(
            plan,
            config=_joined(self.config, plan.config),
            rebuilt=self.told,
            approximate="; ".join(filter(None, (self.approximate, plan.approximate))),
            numbered={
                file: {key: replace(each, layers=self.numbers(each.stack)) for key, each in keys.items()}
                for file, keys in plan.numbered.items()
            },
            notes=(*self.notes, *plan.notes),
            warnings=(*self.warnings, *plan.warnings),
            gradients={name: self.gradient(name, gradient) for name, gradient in plan.gradients.items()},
        )

    def gradient(self, name: str, gradient: Gradient) -> Gradient:
        """What becomes of a tensor's gradient: an old layer's is that of the layer it was, since the stream stays as it is."""
        piece = self.named.get(name)
        if piece is None:
            return gradient
        reason = NEW_LAYERS if piece.new else gradient.reason
        return replace(gradient, reason=reason, origin=piece.stored.name)

    @cached_property
    def named(self) -> Mapping[str, Piece]:
        return {piece.name: piece for piece in self.pieces}


def _joined(first: Sequence[ConfigChange], then: Sequence[ConfigChange]) -> tuple[ConfigChange, ...]:
    """The changes in one step; of a key that changes twice, from the first value to the last."""
    before = {change.key: change for change in first}
    later = {
        change.key: replace(change, old=before[change.key].old) if change.key in before else change for change in then
    }
    return (*(change for change in first if change.key not in later), *later.values())
