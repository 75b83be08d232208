"""A model made anew before it is widened: of more layers, of experts, of a kind whose layers may differ, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widen_cli.checkpoint import Checkpoint
from widen_cli.map_choice import Choice
from widen_cli.map_rules import ArchitectureMap
from widen_cli.options import Options
from widen_cli.plan.layer_growth import LayerGrowth
from widen_cli.rebuild.depth import deepened
from widen_cli.rebuild.layers import with_layers
from widen_cli.rebuild.upcycle import Upcycled, upcycled
from widen_cli.rebuild.view import View


@dataclass(frozen=True)
class Anew:
    """The checkpoint that is widened, and its map; where its layers come from, and what its experts are made of, if they were made."""

    checkpoint: Checkpoint
    architecture: ArchitectureMap
    view: View | None
    experts: Upcycled | None


def made_anew(options: Options, checkpoint: Checkpoint, choice: Choice, layers: Sequence[LayerGrowth]) -> Anew:
    """What the options make of a checkpoint before it is widened, itself where they make nothing; `layers` are to differ.

    Raises WidenError with what speaks against it.
    """
    architecture, experts = choice.architecture, None
    view = deepened(checkpoint, architecture, choice.root, options.depth, options.allow_approximate)
    checkpoint = view.of(checkpoint) if view is not None else checkpoint
    if options.experts is not None:
        experts = upcycled(options, checkpoint, choice)
        checkpoint, architecture = experts.checkpoint, experts.architecture
        checkpoint = view.counted(checkpoint) if view is not None else checkpoint
    if layers:
        checkpoint, architecture = with_layers(options, checkpoint, architecture, layers)
        checkpoint = view.counted(checkpoint) if view is not None else checkpoint
    return Anew(checkpoint, architecture, view, experts)
