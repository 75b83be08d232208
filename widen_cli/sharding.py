"""How a model is cut into shards, by size and by name, as transformers writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from widen_cli.errors import WidenError
from widen_cli.safetensors_file import shown

WEIGHTS = "model.safetensors"
_UNITS = (
    {"": 1} | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)} | {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}
)


def plan_shards(entries: Sequence[tuple[str, int]], max_shard_size: int) -> list[list[int]]:
    """The indexes of `entries` (name, bytes) shard by shard, in order; at least one shard.

    A shard ends where the next tensor would pass the limit; a tensor above the limit has a shard of its own.
    """
    shards: list[list[int]] = [[]]
    filled = 0
    for number, (_, nbytes) in enumerate(entries):
        if shards[-1] and filled + nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(number)
        filled += nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """The file names that transformers gives `count` shards."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The text of model.safetensors.index.json; `total_size` is the sum of the tensors' bytes."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def parse_size(text: str, option: str = "--max-shard-size") -> int:
    """Bytes of a size as transformers reads it (GB = 10**9, GiB = 2**30); WidenError that names the option."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([KMGT]I?B|)", text.strip().upper())
    size = int(Fraction(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise WidenError(f"{option} {shown(text)}: is no size; write for example 5GB, 500MB, 2GiB or 1000 (bytes)")
    return size
