"""How far apart the outputs of two models are: differences, divergence and agreement, measured with numpy alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Outputs = dict[str, Array]

# What llama.cpp is asked for.
LOGITS, EMBEDDINGS = "log_probabilities", "embeddings"
ROWS = 16  # of a large vocabulary, in float64 at once


@dataclass(frozen=True)
class Measured:
    """One output of the narrow model against the wide one's.

    `difference` is the largest of all values, `relative` that over the narrow output's largest. `copies` is 1 for what keeps
    its size; what grew is compared copy by copy, after `scale` is taken off. `kl` (mean and largest, over positions) and
    `top1` are told of what a softmax reads.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    scale: float
    difference: float
    relative: float
    kl: tuple[float, float] | None = None
    top1: float | None = None


def measured(name: str, narrow: Array, wide: Array, scale: float | None = None) -> Measured | None:
    """The comparison of one output; None where the shapes are no widening.

    `scale` is that of an output that grew; where it is None, the one that fits best is taken and told. Copies may stand side
    by side or one output after the other.
    """
    copies = _copies(narrow.shape, wide.shape)
    if copies is None:
        return None
    if copies == 1:
        apart = _largest(narrow, wide)
        read = ("logits" in name or name == LOGITS) and narrow.ndim > 0 and narrow.shape[-1] > 1
        kl, top1 = _divergence(narrow, wide) if read else (None, None)
        return Measured(name, narrow.shape, 1, 1.0, apart, _over(apart, narrow), kl, top1)
    found = [_repeated(name, narrow, parts, scale) for parts in _laid(wide, copies)]
    return min(found, key=lambda one: one.difference if one.difference == one.difference else math.inf)


def _copies(narrow: tuple[int, ...], wide: tuple[int, ...]) -> int | None:
    if narrow == wide:
        return 1
    if not narrow or len(narrow) != len(wide) or narrow[:-1] != wide[:-1] or not narrow[-1]:
        return None
    copies, left = divmod(wide[-1], narrow[-1])
    return None if left else copies


def _laid(wide: Array, copies: int) -> tuple[Array, Array]:
    """The copies of a wide output on a first axis, where they stand side by side and where they are tiled."""
    *lead, size = wide.shape
    beside = wide.reshape(*lead, size // copies, copies)
    return np.moveaxis(beside, -1, 0), np.moveaxis(wide.reshape(*lead, copies, size // copies), -2, 0)


def _repeated(name: str, narrow: Array, parts: Array, scale: float | None) -> Measured:
    if scale is None:
        old, new = narrow.astype(np.float64), parts.mean(axis=0, dtype=np.float64)
        square = float(np.vdot(old, old))
        scale = float(np.vdot(new, old)) / square if square else 1.0
    apart = float(np.max([_largest(narrow, part / scale) for part in parts])) if scale else math.inf
    return Measured(name, narrow.shape, len(parts), scale, apart, _over(apart, narrow))


def _largest(one: Array, other: Array) -> float:
    """The largest difference; infinities that are the same do not differ, and a NaN makes a NaN, which no bound holds."""
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, 0, np.abs(one - other))
    return float(apart.max(initial=0))


def _over(apart: float, narrow: Array) -> float:
    largest = float(np.abs(narrow[np.isfinite(narrow)]).max(initial=0))
    return apart / largest if largest else (0.0 if apart == 0 else math.inf)


def _divergence(narrow: Array, wide: Array) -> tuple[tuple[float, float], float]:
    """Kullback-Leibler of the narrow model's distributions from the wide one's, and how often both have the same first."""
    rows = narrow.reshape(-1, narrow.shape[-1]), wide.reshape(-1, wide.shape[-1])
    found, same = [], 0
    for start in range(0, len(rows[0]), ROWS):
        one, other = (part[start : start + ROWS].astype(np.float64) for part in rows)
        p, q = _log_softmax(one), _log_softmax(other)
        with np.errstate(invalid="ignore"):
            # No term is negative, so that the rounding of the logarithms does not add up.
            terms = np.where(np.isneginf(p), np.exp(q), np.exp(p) * (p - q) - np.exp(p) + np.exp(q))
        found.append(terms.sum(axis=-1))
        same += int((one.argmax(axis=-1) == other.argmax(axis=-1)).sum())
    divergences = np.concatenate(found)
    return (float(divergences.mean()), float(divergences.max())), same / len(rows[0])


def _log_softmax(logits: Array) -> Array:
    """Of infinite logits the limit: the largest share everything, so that equal infinities make equal distributions."""
    with np.errstate(invalid="ignore"):
        largest = logits.max(axis=-1, keepdims=True)
        below = np.where(logits == largest, 0, logits - largest)
        return np.asarray(below - np.log(np.exp(below).sum(axis=-1, keepdims=True)))
