"""How one stored dimension grows: a tree that says which old positions stand where, and with what factor.

The plan makes these trees, the transform carries them out; neither needs to know the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from widen_cli.scales import ONE, Scale


class Fill(Enum):
    """What stands where no copy does: zeros, the mean of the values along the dimension, or values drawn from their row."""

    ZERO = "zero"
    MEAN = "mean"
    RANDOM = "random"


@dataclass(frozen=True)
class Copies:
    """`size` old positions, each standing `copies` times in a row, each followed by what `inner` makes of it.

    `first_only`: only the first of the copies holds the values, the others are used as zero. `kept`: so many of the copies
    hold them (0: all), and what the others hold says `fill`.
    `scale` multiplies every value; it is read at the leaves, where `inner` is None.
    """

    size: int
    copies: int = 1
    first_only: bool = False
    scale: Scale = ONE
    inner: Growth | None = None
    kept: int = 0
    fill: Fill = Fill.ZERO

    @property
    def live(self) -> int:
        """How many of the copies hold the values."""
        return 1 if self.first_only else self.kept or self.copies

    @property
    def old(self) -> int:
        return self.size * (self.inner.old if self.inner else 1)

    @property
    def new(self) -> int:
        return self.size * self.copies * (self.inner.new if self.inner else 1)


@dataclass(frozen=True)
class Laid:
    """Parts laid one after the other."""

    parts: tuple[Growth, ...]

    @property
    def old(self) -> int:
        return sum(part.old for part in self.parts)

    @property
    def new(self) -> int:
        return sum(part.new for part in self.parts)


Growth = Copies | Laid


@dataclass(frozen=True)
class Run:
    """Old positions [start, stop) in order, each `each` times in a row, times `scale`.

    `live`: how many of the copies hold the values; with `filled` none does. The others hold what `fill` says.
    `again`: these positions came before, in an earlier copy of what lies around them.
    """

    start: int
    stop: int
    each: int
    scale: Scale
    live: int = 1
    filled: bool = False
    again: bool = False
    fill: Fill = Fill.ZERO


@dataclass(frozen=True)
class Split:
    """What the copies along dimension number `dimension`, which a weight reads, hold instead of equal shares: parts whose sum is
    the value times its factor.

    `way` is `even`, `uneven` or `noise`, the last with `level`, the noise over the root mean square of a row. What is drawn is
    told by `seed` and the tensor's `name`.
    """

    way: str
    dimension: int
    seed: int
    name: str
    level: float = 0.0


def leaf_scales(growth: Growth) -> Iterator[Scale]:
    """The scale of each leaf, in stored order."""
    if isinstance(growth, Laid):
        for part in growth.parts:
            yield from leaf_scales(part)
    elif growth.inner is not None:
        yield from leaf_scales(growth.inner)
    else:
        yield growth.scale


def scaled(growth: Growth, scale: Scale) -> Growth:
    """The same growth with one scale on every leaf."""
    if isinstance(growth, Laid):
        return Laid(tuple(scaled(part, scale) for part in growth.parts))
    if growth.inner is not None:
        return replace(growth, inner=scaled(growth.inner, scale))
    return replace(growth, scale=scale)


def inverted(growth: Growth) -> Growth:
    """The same growth with the inverse of every scale."""
    return raised(growth, -1)


def raised(growth: Growth, power: int) -> Growth:
    """The same growth with every scale to a power."""
    if isinstance(growth, Laid):
        return Laid(tuple(raised(part, power) for part in growth.parts))
    if growth.inner is not None:
        return replace(growth, inner=raised(growth.inner, power))
    return replace(growth, scale=growth.scale**power)


def fills(growth: Growth) -> set[Fill]:
    """What stands where no copy does; empty where all are copies."""
    if isinstance(growth, Laid):
        return set().union(*(fills(part) for part in growth.parts))
    own = {growth.fill} if growth.live < growth.copies else set()
    return own | (fills(growth.inner) if growth.inner is not None else set())


def runs(growth: Growth) -> list[Run]:
    """The new positions in order, as runs of old ones."""
    return list(_runs(growth))


def _runs(growth: Growth) -> Iterator[Run]:
    if isinstance(growth, Laid):
        at = 0
        for part in growth.parts:
            yield from (_shifted(run, at) for run in _runs(part))
            at += part.old
    elif growth.inner is None:
        yield Run(0, growth.size, growth.copies, growth.scale, growth.live, fill=growth.fill)
    else:
        yield from _outer_runs(growth, runs(growth.inner), growth.inner.old)


def _outer_runs(growth: Copies, inner: list[Run], step: int) -> Iterator[Run]:
    if growth.copies == 1 and len(inner) == 1:
        yield replace(inner[0], stop=growth.size * step)
        return
    for position in range(growth.size):
        for copy in range(growth.copies):
            for run in inner:
                moved = replace(_shifted(run, position * step), again=run.again or copy > 0)
                yield moved if copy < growth.live else replace(moved, filled=True, fill=growth.fill)


def _shifted(run: Run, by: int) -> Run:
    return replace(run, start=run.start + by, stop=run.stop + by)


def nested(outer: Growth, inner: Growth) -> Growth:
    """One tree for two neighbouring dimensions seen as one: each old position of `outer` holds all of `inner`."""
    if isinstance(outer, Laid):
        return Laid(tuple(nested(part, inner) for part in outer.parts))
    if outer.inner is not None:
        return replace(outer, inner=nested(outer.inner, inner))
    return replace(outer, scale=ONE, inner=times(inner, outer.scale))


def times(growth: Growth, scale: Scale) -> Growth:
    """The same growth with every leaf's scale multiplied."""
    if isinstance(growth, Laid):
        return Laid(tuple(times(part, scale) for part in growth.parts))
    if growth.inner is not None:
        return replace(growth, inner=times(growth.inner, scale))
    return replace(growth, scale=growth.scale * scale)
