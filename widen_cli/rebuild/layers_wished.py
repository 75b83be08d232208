"""What --depth asks for, and the layers that come of it.

`2x`, `+4`, `+4@end`, `+4@7` and a new total put identity layers between the old ones, `0-23,8-31` lays old layers one after the
other as mergekit's passthrough does, `drop:5,7-9` leaves some out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from widen_cli.errors import WidenError, printable

LAYER_LIMIT = 10_000
FORMS = "2x, +4, +4@end, +4@7, a new total such as 48, layers such as 0-23,8-31, or drop:5,7-9"
_RANGES = r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*"


@dataclass(frozen=True)
class Slot:
    """One layer of the new stack: the old one whose weights it takes; `passes`: it is made to pass the stream on as it is."""

    source: int
    passes: bool = False


@dataclass(frozen=True)
class Wish:
    """One --depth: the stack it speaks of, None where the model has one alone, and what it asks, as it was written."""

    stack: str | None
    text: str

    @property
    def said(self) -> str:
        """The option as it was given."""
        return f"--depth {self.stack + ':' if self.stack else ''}{self.text}"

    @property
    def keeps(self) -> bool:
        """Whether every old layer stays, in order, and nothing but identity layers comes in between."""
        return re.fullmatch(r"\d{1,5}x|\+.*|\d{1,5}", self.text) is not None

    def slots(self, count: int) -> tuple[Slot, ...]:
        """The new stack of a model that has `count` layers. Raises WidenError for what cannot be made of them."""
        text = self.text
        if text.endswith("x"):
            return self._checked(_spread(count, count * (int(text[:-1]) - 1)))
        if text.startswith("+"):
            number, at, place = text[1:].partition("@")
            return self._checked(_spread(count, int(number)) if not at else self._at(count, int(number), place))
        if text.isdigit():
            return self._checked(self._total(count, int(text)))
        listed = text.removeprefix("drop:")
        chosen = list(self._layers(listed, count))
        if listed != text:
            chosen = [layer for layer in range(count) if layer not in chosen]
        if not chosen:
            raise WidenError(f"{self.said}: no layer would be left of {count}; name fewer")
        return self._checked(Slot(layer) for layer in chosen)

    def _checked(self, slots: Iterable[Slot]) -> tuple[Slot, ...]:
        found: list[Slot] = []
        for slot in slots:
            found.append(slot)
            if len(found) > LAYER_LIMIT:
                raise WidenError(f"{self.said}: more than {LAYER_LIMIT} layers; name a smaller number")
        return tuple(found)

    def _total(self, count: int, total: int) -> Iterator[Slot]:
        if total <= count:
            less = "has as many already" if total == count else f"has {count}, and layers are left out by name"
            raise WidenError(f"{self.said}: the model {less}; give a larger total, or drop:{count - 1} and the like")
        return _spread(count, total - count)

    def _at(self, count: int, number: int, place: str) -> Iterator[Slot]:
        behind = count - 1 if place == "end" else int(place)
        if behind >= count:
            raise WidenError(
                f"{self.said}: there is no layer {behind} to put others behind; the last one is {count - 1}"
            )
        for layer in range(count):
            yield Slot(layer)
            if layer == behind:
                yield from [Slot(layer, passes=True)] * min(number, LAYER_LIMIT)

    def _layers(self, text: str, count: int) -> Iterator[int]:
        for part in text.split(","):
            first, _, last = part.partition("-")
            start, stop = int(first), int(last or first)
            if start > stop:
                raise WidenError(f"{self.said}: {part} runs backwards; say {stop}-{start}")
            if stop >= count:
                raise WidenError(
                    f"{self.said}: there is no layer {stop}; they are numbered 0 to {count - 1}, and {part} includes both ends"
                )
            yield from range(start, stop + 1)


def _spread(count: int, new: int) -> Iterator[Slot]:
    """`new` identity layers, spread evenly: the last of them behind the last layer, as LLaMA Pro does it."""
    done = 0
    for layer in range(count):
        yield Slot(layer)
        due = new * (layer + 1) // count
        yield from [Slot(layer, passes=True)] * min(due - done, LAYER_LIMIT)
        done = due


def parse_depth(texts: Sequence[str]) -> tuple[Wish, ...]:
    """The wishes of all --depth options. Raises WidenError for one that cannot be read, or two for one stack."""
    wishes = tuple(map(_parsed, texts))
    for number, wish in enumerate(wishes):
        if any(wish.stack == other.stack for other in wishes[:number]):
            raise WidenError(f"{wish.said}: one --depth a stack; an earlier one speaks of the same")
    return wishes


def _parsed(text: str) -> Wish:
    stack, colon, rest = text.rpartition(":")
    if stack == "drop" or stack.endswith(":drop"):
        stack, rest = stack.removesuffix("drop").removesuffix(":"), f"drop:{rest}"
    read = re.fullmatch(rf"(\d{{1,5}})x|\+(\d{{1,5}})(?:@(?:end|\d{{1,5}}))?|(\d{{1,5}})|(?:drop:)?{_RANGES}", rest)
    if not read or (colon and not stack and not rest.startswith("drop:")) or not re.fullmatch(r"[\w.]*", stack):
        raise WidenError(
            f"--depth {printable(text)}: cannot be read; expected {FORMS}, with STACK: before it where there are two"
        )
    if any(group is not None and int(group) < least for group, least in zip(read.groups(), (2, 1, 1), strict=True)):
        raise WidenError(f"--depth {printable(text)}: adds no layer; expected {FORMS}")
    return Wish(stack or None, rest)
