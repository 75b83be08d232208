"""How many parameters a model has, as its library counts them, and would have with other sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from widen_cli.plan.match import Match, Matched
from widen_cli.plan.sizes import Sizes
from widen_cli.shapes import Shape

ONE = Fraction(1)


class Parameters:
    """The parameters of a matched checkpoint. A weight that is tied and stored twice counts once, unless `untied`."""

    def __init__(self, match: Match, sizes: Sizes, untied: bool = False) -> None:
        self.sizes = sizes
        stored = {item.tensor.name: item for item in match.matched}
        counted = list(stored.values())
        for tie in match.ties:
            item, other = match.by_name(tie.tensor), match.by_name(tie.to)
            if item is not None and other is not None and not untied:
                counted = [one for one in counted if one is not item]
            elif item is None and other is not None and untied:
                counted.append(other)
        self.kinds = Counter(map(self._kind, counted))
        self.scalars = sum(tensor.shape == () and tensor.dtype.kind == "float" for tensor in match.carried)

    def _kind(self, item: Matched) -> tuple[Shape, tuple[int, ...], int | None, tuple[str, ...]]:
        """What tensors of one size share: the rule's shape, the stored one, the layer where layers differ, counted axes."""
        layer = item.layer(self.sizes.architecture) if self.sizes.layered else None
        return item.rule.shape, item.tensor.shape, layer, tuple(item.numbers)

    def count(self, ratios: Mapping[str, Fraction]) -> int:
        """How many there are where axes grow by these ratios; a size that no key holds follows."""
        wide = self.sizes.grown(ratios)
        total = Fraction(self.scalars)
        for (shape, stored, layer, numbered), times in self.kinds.items():
            sizes = wide.at(layer)
            known = [sizes.total(dimension.term) for dimension in shape.dimensions]
            # A size that nothing tells, such as the number of labels, is the stored one.
            held = math.prod(old if new is None else new for old, new in zip(stored, known, strict=True))
            total += held * times * math.prod((ratios.get(axis, ONE) for axis in numbered), start=ONE)
        return int(total)
