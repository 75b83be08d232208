"""What is made of a checkpoint before it is widened: another one, of other tensors with the same sources, and another config."""

from widen_cli.rebuild.depth import deepened, refuse_depth
from widen_cli.rebuild.layers import with_layers
from widen_cli.rebuild.upcycle import Upcycled, upcycled
from widen_cli.rebuild.wish import refuse_experts

__all__ = ["Upcycled", "deepened", "refuse_depth", "refuse_experts", "upcycled", "with_layers"]
