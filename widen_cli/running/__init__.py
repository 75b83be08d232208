"""Proof by running: narrow and wide in a runtime that knows nothing of the tool, in a process of its own."""

from widen_cli.running.result import Asked, Known, RunResult

__all__ = ["Asked", "Known", "RunResult"]
