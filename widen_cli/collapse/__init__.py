"""The way back: a widened checkpoint folded into the narrow one it came from, copies averaged."""

from widen_cli.collapse.run import Folded, collapse

__all__ = ["Folded", "collapse"]
