"""A model rebuilt of its own tensors before it is widened: other layers, other names, the same stored bytes."""

from widen_cli.rebuild.depth import deepened
from widen_cli.rebuild.view import Piece, View

__all__ = ["Piece", "View", "deepened"]
