"""Make transformer checkpoints wider without changing the function they compute."""

__version__ = "0.1.0"
