"""Stored names as patterns: which numbers in them count layers or experts, and which are names of their own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from widen_cli.map_file import map_names
from widen_cli.maps import catalog_map
from widen_cli.plan.match import StoredHeader

Numbered = dict[str, int]
_NUMBERED = re.compile(r"(?P<word>(?:.*[^0-9])?)(?P<number>0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Pattern:
    """Tensors of one name but for counted numbers. `shape` is the first one's; `even` says that all have it.

    `everywhere`: there is one for every number that is counted.
    """

    name: str
    shape: tuple[int, ...]
    even: bool
    everywhere: bool

    @property
    def module(self) -> str:
        """The name without its last part: the module that holds the tensor."""
        return self.name.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """The last part of the name, such as weight or bias."""
        return self.name.rpartition(".")[2]

    @property
    def layered(self) -> bool:
        return "*" in self.name


def patterns(tensors: Sequence[StoredHeader]) -> tuple[list[Pattern], Numbered]:
    """The patterns in the order of their first tensors, and how many there are of each repeated part (`h.*`: 12)."""
    counts = _repeated([tensor.name for tensor in tensors], {tensor.name: tensor.shape for tensor in tensors})
    members: dict[str, list[StoredHeader]] = defaultdict(list)
    for tensor in tensors:
        members[_starred(tensor.name, counts)].append(tensor)
    found = []
    for name, stored in members.items():
        expected = 1
        for prefix, count in counts.items():
            expected *= count if name.startswith(prefix + ".") or name == prefix else 1
        shapes = [tensor.shape for tensor in stored]
        found.append(Pattern(name, shapes[0], len(set(shapes)) == 1, len(stored) == expected))
    return found, counts


def _repeated(names: Sequence[str], shapes: dict[str, tuple[int, ...]]) -> Numbered:
    """The parts that are counted, from the outside in: those that have 0, 1, ... with mostly the same tensors in each.

    The number may stand behind a word (`layer_0`, `h0`), where it counts what has several modules in it: `fc0` has one weight.
    """
    counts: Numbered = {}
    literal: set[str] = set()
    while True:
        children: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(set))
        for name in names:
            parts = _starred(name, counts).split(".")
            numbered = (
                (place, _with_star(parts, place), _NUMBERED.fullmatch(part)) for place, part in enumerate(parts)
            )
            found = next(((at, head, hit) for at, head, hit in numbered if hit and head not in literal), None)
            if found is not None:
                at, head, hit = found
                children[head][int(hit["number"])].add((".".join(parts[at + 1 :]), shapes[name]))
        if not children:
            return counts
        counted = {head: len(inner) for head, inner in children.items() if _alike(head, inner)}
        counts |= counted
        literal |= children.keys() - counted.keys()


def _alike(head: str, inner: dict[int, set[tuple[str, tuple[int, ...]]]]) -> bool:
    """Whether numbers count things of one kind: 0, 1, ... in a row, whose tensors are mostly the same."""
    if sorted(inner) != list(range(len(inner))):
        return False
    word = head.removesuffix("*").removesuffix(".").rpartition(".")[2]
    glued = not head.endswith(".*") and head != "*"
    if glued and any(len({rest.rpartition(".")[0] for rest, _ in one}) < 2 for one in inner.values()):
        return False
    if len(inner) == 1:
        return word.rstrip("_-") in _listed_parts()
    every = set().union(*inner.values())
    shared = sum(sum(entry in one for one in inner.values()) > 1 for entry in every)
    return 2 * shared > len(every)


def _listed_parts() -> set[str]:
    """What stands in front of the number of a layer in the maps that come with the tool, and what is like it."""
    known = {
        pattern.removesuffix(".*").rpartition(".")[2] for name in map_names() for pattern in catalog_map(name).repeats
    }
    return known | {"blocks", "block", "layers", "layer", "h", "resblocks"}


def _starred(name: str, counts: Iterable[str]) -> str:
    """A name with `*` for the numbers that are counted."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        starred = _with_star(parts, place)
        if _NUMBERED.fullmatch(part) and starred in counts:
            parts[place] = starred.rpartition(".")[2]
    return ".".join(parts)


def _with_star(parts: Sequence[str], place: int) -> str:
    """A name up to a part, with `*` for the number in that."""
    hit = _NUMBERED.fullmatch(parts[place])
    return ".".join([*parts[:place], f"{hit['word']}*" if hit else parts[place]])
