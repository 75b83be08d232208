"""What a plan warns of: what was asked for and has no effect or another one, and what was taken for something on thin evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from widen_cli.config import ModelConfig
from widen_cli.errors import first_of, printable
from widen_cli.plan.changes import wide_sizes
from widen_cli.plan.factors import Factor
from widen_cli.plan.match import Match, StoredHeader, surplus_layers
from widen_cli.plan.packed import NUMBERS, PackedWeight
from widen_cli.plan.parallel import undivided
from widen_cli.plan.request import PlanRequest
from widen_cli.plan.rotary import Rotary
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.spaces import SpaceScales
from widen_cli.plan.undecided import by_class


@dataclass(frozen=True)
class Doubts:
    """The warnings of one plan, as lines."""

    match: Match
    sizes: Sizes
    spaces: SpaceScales
    factors: Mapping[str, Factor]
    layered: Mapping[str, Sequence[Factor]]
    rotary: Rotary
    config: ModelConfig
    request: PlanRequest

    def lines(self) -> list[str]:
        """All of them: of what was asked for first, then of the file, by its name."""
        file = printable(self.request.file)
        return [*self.of_request(), *(f"{file}: {text}" for text in (*self.of_tensors(), *self.without_config()))]

    def of_request(self) -> Iterator[str]:
        axes, request = self.sizes.architecture.axes, self.request
        if request.gradients and any(axes[axis].padded and by != 1 for axis, by in self.factors.items()):
            yield "--optimizer: a larger vocabulary adds to the sum under the softmax, so the gradients are those of another loss"
        yield from undivided(self.sizes, wide_sizes(self.sizes, self.factors, self.layered))
        noise = request.split.noise
        if noise is not None and noise >= 0:
            yield (
                f"--noise {noise:g}: is counted in decibels, and from 0 on it is as loud as what it is added to; "
                "-30 is a thirtieth of that"
            )
        if request.rope and self.rotary.factor == 1:
            yield f"--rope {request.rope}: no head grows, so it has no effect; --grow head_dim=N grows them"

    def of_tensors(self) -> Iterator[str]:
        match = self.match
        odd = [tensor for tensor in match.carried if tensor.shape and 0 not in tensor.shape]
        plain = [tensor for tensor in match.carried if tensor not in odd]
        for tensors, what in ((odd, "integers"), (plain, "scalars or empty")):
            if tensors:
                yield f"not in the map, copied unchanged ({what}): {_names(tensors)}"
        dtype = self.request.types.dtype
        if dtype and any(isinstance(item.tensor, PackedWeight) for item in match.matched):
            yield f"--dtype {dtype.name} leaves weights in MXFP4 blocks as they are; for numbers, {NUMBERS}"
        if surplus := surplus_layers(self.sizes.architecture, match, self.config):
            shown = ", ".join(printable(name) for name in surplus[:6]) + (" ..." if len(surplus) > 6 else "")
            yield f"more than the config counts, widened all the same: {shown}"
        if match.dropped:
            yield f"buffers that are computed anew when the model loads, left out: {_names(match.dropped)}"

    def without_config(self) -> Iterator[str]:
        for item in by_class(self.sizes.architecture, self.match, self.config):
            yield f"no config says the model's class, and '{printable(item.tensor.name)}' is taken as {item.rule.shape.text}"
        for tie in self.spaces.ties if not self.config.present else ():
            if self.match.by_name(tie.tensor) is None and self.spaces.tie_law(tie).power.spaces:
                yield f"no config says so, but '{tie.tensor}' is not stored and is taken as tied to '{tie.to}'"


def _names(tensors: Sequence[StoredHeader], limit: int = 6) -> str:
    return first_of([printable(tensor.name) for tensor in tensors], limit)
