"""What is made of a checkpoint before it is widened: another one, of other tensors with the same sources, and another config."""

from widen_cli.rebuild.anew import Anew, made_anew
from widen_cli.rebuild.depth import deepened, refuse_depth
from widen_cli.rebuild.wish import refuse_experts

__all__ = ["Anew", "deepened", "made_anew", "refuse_depth", "refuse_experts"]
