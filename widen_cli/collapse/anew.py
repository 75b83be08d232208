"""That what a record says of how a model was made anew is what this tool makes of the narrow one: it is made so once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from widen_cli.checkpoint import Checkpoint
from widen_cli.collapse.fold import Fold
from widen_cli.config import ModelConfig, parse_settings
from widen_cli.errors import WidenError, first_of, printable
from widen_cli.gguf.checkpoint import changed_metadata
from widen_cli.map_choice import Choice
from widen_cli.options import Options
from widen_cli.plan.layer_growth import LayerGrowth
from widen_cli.rebuild import made_anew
from widen_cli.records import Built

SHOWN = 4


def refuse_unmade(
    narrow: Checkpoint,
    folds: Mapping[str, Fold],
    config: ModelConfig,
    asked: Options,
    choice: Choice,
    layers: Sequence[LayerGrowth],
    built: Built,
) -> None:
    """Raises WidenError for a record of changes that none of the options makes: what it says of the config would be written as if
    this tool had changed it. `narrow` is the wide checkpoint under the narrow one's names."""
    if not config.present:
        return
    settings = parse_settings(asked.settings)
    tensors = tuple(
        replace(stored, dtype=fold.target, shape=fold.shape, nbytes=fold.target.nbytes(fold.shape))
        for stored, fold in zip(narrow.tensors, folds.values(), strict=True)
    )
    narrow = replace(narrow, tensors=tensors, found_config=config, config=config.with_values(settings))
    if narrow.gguf is not None:
        values = changed_metadata(narrow.gguf, printable(narrow.name), config.values.items())
        narrow = replace(narrow, gguf=replace(narrow.gguf, header=replace(narrow.gguf.header, values=values)))
    again = made_anew(replace(asked, allow_approximate=True), narrow, choice, layers)
    found = again.checkpoint.found_config.within(again.checkpoint.config.inside)
    made = Built.of(config, found, again.view)
    foreign = [
        f"config key '{printable(key)}'"
        for key in (*built.config, *built.added)
        if key not in made.config and key not in made.added
    ]
    foreign += [
        f"the layers of {printable(pattern)}"
        for pattern, stack in built.stacks.items()
        if made.stacks.get(pattern) != stack
    ]
    if foreign:
        raise WidenError(
            f"{printable(narrow.name)}: its record speaks of {first_of(foreign, SHOWN)}, which making it anew "
            f"({_said(asked, layers)}) does not change so; give --record with the model as it was written then"
        )


def _said(asked: Options, layers: Sequence[LayerGrowth]) -> str:
    said = [f"--depth {printable(text)}" for text in asked.depth]
    said += [f"--experts {asked.experts}"] if asked.experts is not None else []
    return " ".join([*said, *(f"--grow {one}" for one in layers)])
