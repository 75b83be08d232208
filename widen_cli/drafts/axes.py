"""The axes of a model that no map knows: sizes that its config names, and sizes that its shapes show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from widen_cli.config import ModelConfig
from widen_cli.drafts.document import scalar
from widen_cli.drafts.patterns import Pattern
from widen_cli.map_checks import HOMOGENEOUS, NOT_HOMOGENEOUS
from widen_cli.nearest import axis_keys, flat_values, is_size, likely_axis

LAYERS = re.compile(r"layers?$|blocks?$|block_count$|depth$|n_layer")
FIXED = ("vocab", "positions", "token_types", "experts")
FUNCTIONS = {
    *HOMOGENEOUS,
    *NOT_HOMOGENEOUS,
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "swish",
    "mish",
}


class Axes:
    """The sizes of a model by axis name, and the config key that holds each, if one does."""

    def __init__(self, config: ModelConfig, patterns: Sequence[Pattern], gguf: bool) -> None:
        self.values = flat_values(config)
        self.roles = _roles(gguf)
        self.sizes: dict[str, int] = {}
        self.keys: dict[str, str] = {}
        self.guessed: dict[str, str] = {}
        for key, value in self.values.items():
            axis = self.roles.get(key.rpartition(".")[2], self.roles.get(key)) if is_size(value) else None
            if axis is not None and isinstance(value, int):
                self.hold(axis, key, value)
        for key, value in self.values.items():
            axis = likely_axis(key) if is_size(value) else None
            if axis is not None and isinstance(value, int) and axis not in self.sizes:
                self.hold(axis, key, value)
                self.guessed[axis] = "by the key's name"
        self.find_hidden(patterns)
        self.find_intermediate(patterns)

    def named(self, axis: str) -> list[str]:
        """The config's keys that hold such an axis in maps that come with the tool."""
        return [key for key in self.values if self.roles.get(key) == axis]

    def hold(self, axis: str, key: str, value: int) -> None:
        """Takes a key for an axis that has none yet; a key holds one axis."""
        if axis not in self.sizes and key not in self.keys.values():
            self.sizes[axis], self.keys[axis] = value, key

    def find_hidden(self, patterns: Sequence[Pattern]) -> None:
        """The stream's width: by its key, if that is a size which the tensors have, else the most frequent size."""
        counted = Counter(size for pattern in patterns for size in pattern.shape if size > 1)
        if counted[self.sizes.get("hidden", 0)] > 1 or not counted:
            return
        others = {size for axis, size in self.sizes.items() if axis in FIXED}
        best = max(counted, key=lambda size: (counted[size], size not in others))
        self.sizes["hidden"] = best
        self.keys.pop("hidden", None)
        self.guessed["hidden"] = "the most frequent size"
        self.by_value("hidden")

    def by_value(self, axis: str) -> None:
        """Looks for a key of the axis's value that holds no other axis."""
        keys = [key for key, value in self.values.items() if value == self.sizes[axis] and is_size(value)]
        free = [key for key in keys if key not in self.keys.values()]
        if free:
            self.keys[axis] = free[0]
            self.guessed[axis] = "a key of its value"

    def find_intermediate(self, patterns: Sequence[Pattern]) -> None:
        """The FFN's size: by its key, else what stands in a layer as often in front of hidden as behind it."""
        hidden = self.sizes.get("hidden", 0)
        matrices = [pattern.shape for pattern in patterns if pattern.layered and len(pattern.shape) == 2]
        if any(self.sizes.get("intermediate") in shape for shape in matrices):
            return
        self.sizes.pop("intermediate", None)
        self.keys.pop("intermediate", None)
        wider = [first for first, second in matrices if second == hidden and (hidden, first) in matrices]
        wider = [size for size in wider if size > hidden]
        if wider:
            self.sizes["intermediate"] = max(wider)
            self.guessed["intermediate"] = "from the shapes"
            self.by_value("intermediate")

    def declared(self, axis: str) -> str:
        """An axis as YAML: by its key, as a multiple of hidden, or as a size that never grows."""
        size, hidden = self.sizes[axis], self.sizes.get("hidden", 0)
        if axis in self.keys:
            fixed = ", fixed: true" if axis in FIXED else ""
            return f"{{key: {scalar(self.keys[axis])}{fixed}}}"
        if axis == "intermediate" and hidden and size % hidden == 0:
            empty = next((key for key in self.named("intermediate") if self.values.get(key, 0) is None), None)
            return f"{{{f'key: {scalar(empty)}, else' if empty else 'size'}: {size // hidden} * hidden}}"
        return "{key: hidden_size}" if axis == "hidden" else "{fixed: true}"

    def layers_key(self, count: int) -> str | None:
        """The config key that says how many layers there are."""
        keys = [key for key, value in self.values.items() if value == count and is_size(value)]
        return next((key for key in keys if LAYERS.search(key)), None)

    def epsilon(self) -> tuple[str, object] | None:
        """The key of the norms' epsilon and its value."""
        found = [(key, value) for key, value in self.values.items() if "eps" in key and isinstance(value, float)]
        return next((one for one in found if _is_name(one[0])), None)

    def activation(self) -> str | None:
        """The key that names the activation."""
        named = ((key, value) for key, value in self.values.items() if isinstance(value, str) and key.isidentifier())
        return next((key for key, value in named if value in FUNCTIONS), None)

    def tie(self) -> tuple[str, bool] | None:
        """The key that says whether the head is the embedding, and its value."""
        found = [(key, value) for key, value in self.values.items() if re.search(r"\btie|_tie|shared?_emb", key)]
        return next(((key, value) for key, value in found if isinstance(value, bool) and _is_name(key)), None)


def _is_name(key: str) -> bool:
    return all(part.isidentifier() for part in key.split("."))


def _roles(gguf: bool) -> dict[str, str]:
    """Which axis a config key holds in most of the maps that come with the tool."""
    counted: dict[str, Counter[str]] = {}
    for axis, keys in axis_keys(gguf).items():
        for key, count in keys.items():
            counted.setdefault(key, Counter())[axis] += count
    return {key: axes.most_common(1)[0][0] for key, axes in counted.items()}
