"""What the command line asks of a conversion."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """What the command line said. `output` is a path, a path ending in `/` for a directory, or `-`.

    `named`: False for a dry run without OUT, of which there is nothing to say about an output. `recorded_map` is the text
    of the map that an output was made by; unless it was one of the user's own, the tool still has to find its own for the
    input, and takes the text in its place. `recorded_target` is that of the map of experts that a dense model became.
    """

    input: str
    output: str
    factor: int | None = None
    grow: str | None = None
    depth: tuple[str, ...] = ()
    allow_approximate: bool = False
    like: str | None = None
    target_params: str | None = None
    scaling: str = "auto"
    dtype: str | None = None
    dequantize: str | None = None
    embedding_type: str | None = None
    map: str | None = None
    config: str | None = None
    settings: tuple[str, ...] = ()
    base: str | None = None
    config_out: str | None = None
    strip_prefix: str | None = None
    max_shard_size: str | None = None
    layout: str = "auto"
    rope: str | None = None
    untie: bool = False
    experts: int | None = None
    top_k: int | None = None
    slices: int = 1
    router: str = "random"
    upcycle: str | None = None
    fill: str = "copy"
    split: str | None = None
    noise: float | None = None
    seed: int = 0
    optimizer: str | None = None
    new_parameters: str | None = None
    recorded_map: str | None = None
    recorded_map_alone: bool = False
    recorded_target: str | None = None
    force: bool = False
    resume: bool = False
    dry_run: bool = False
    named: bool = True
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))

    @property
    def says_growth(self) -> bool:
        """Whether it is said how the model is made."""
        said = (self.factor, self.grow, self.like, self.target_params, self.experts)
        return any(each is not None for each in said) or bool(self.depth)

    @property
    def grows_by_default(self) -> bool:
        """Whether the width grows by 2 because nothing else is asked for."""
        return not self.says_growth
