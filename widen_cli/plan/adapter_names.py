"""The names that a base's checkpoint has for what an adapter names: PEFT writes those of modules in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from widen_cli.map_rules import ArchitectureMap, name_pattern

PREFIX = "base_model.model."
# What stands in the names of modules that PEFT has wrapped. With all biases it saves those of modules that others replace.
_WRAPPED = re.compile(r"\.base_layer(?=\.|$)|\.(modules_to_save(\.[^.]+)?|original_module)(?=\.(weight|bias)$)")


def bare(name: str) -> str:
    """A tensor's name without what PEFT puts into it."""
    return _WRAPPED.sub("", name.removeprefix(PREFIX))


def spellings(architecture: ArchitectureMap, root: str, name: str) -> Iterator[tuple[str, int | None]]:
    """A name as the base may have it, with the number of the part where it is one of a packed weight.

    As it is, or with another of the map's prefixes or older words; and then the same of what the checkpoint calls the module.
    """
    inner = name.removeprefix(root)
    plain = [inner, *_respelt(architecture, inner)]
    stored = [found for spelt in plain for found in _stored(architecture, spelt)]
    for spelt, part in [(spelt, None) for spelt in plain] + stored:
        yield root + spelt, part
        for other, word in architecture.synonyms.items():
            if spelt.endswith("." + word):
                yield root + spelt.removesuffix(word) + other, part


def _stored(architecture: ArchitectureMap, name: str) -> Iterator[tuple[str, int | None]]:
    """The names of a tensor whose module has another name in memory, with each of the prefixes, and the part that it is."""
    module, dot, end = name.rpartition(".")
    for called, known in architecture.modules.items():
        if hit := name_pattern(called).fullmatch(module):
            spelt = known.name
            for number in hit.groups():
                spelt = spelt.replace("*", number, 1)
            spelt += dot + end
            yield from ((one, known.part) for one in (spelt, *_respelt(architecture, spelt)))


def _respelt(architecture: ArchitectureMap, name: str) -> Iterator[str]:
    """A name with each of a map's prefixes in another of its spellings, and with another beginning of what is only carried."""
    begins = [(prefix, *others) for prefix, others in architecture.prefixes.items()]
    for spellings in (*begins, tuple(begin for begin, _ in architecture.carried)):
        for here in spellings:
            if name.startswith(here):
                yield from (there + name[len(here) :] for there in spellings if there != here)
