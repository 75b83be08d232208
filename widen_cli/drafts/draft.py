"""The draft for an opened model: extending the closest map where most tensors fit it, else a whole one."""

from __future__ import annotations

from dataclasses import dataclass

from widen_cli.checkpoint import Checkpoint
from widen_cli.drafts.close import close_draft
from widen_cli.drafts.document import Document, comment
from widen_cli.drafts.whole import whole_draft
from widen_cli.errors import WidenError, printable
from widen_cli.map_choice import choose_map, nearest_map

PROOF = (
    "Next: `widen-ckpt MODEL OUT --map mine.yaml --dry-run` reports what does not fit; then prove the map by running narrow and",
    "wide model, as the end of docs/maps.md shows. The language stands there too.",
)


@dataclass(frozen=True)
class Draft:
    """The YAML of a drafted map, and what to say of it beside it."""

    text: str
    note: str


def draft(checkpoint: Checkpoint, name: str | None = None) -> Draft:
    """The draft of a map for a model, which extends the map called `name`, or else the closest.

    Raises WidenError where not all of the model's headers can be read, or there is no such map.
    """
    if checkpoint.faults:
        raise WidenError(*checkpoint.faults)
    if not checkpoint.tensors:
        raise WidenError(f"{printable(checkpoint.name)}: holds no tensors, so there is nothing to draft a map from")
    file, kind = printable(checkpoint.name), _kind(checkpoint)
    chosen = _chosen(checkpoint) if name is None else None
    wanted = [one for one in (name, chosen) if one]
    fit = nearest_map(checkpoint, wanted) if wanted else None
    if fit is None and name:
        raise WidenError(
            f"{file}: map '{name}' knows none of its tensors; leave its name out, for the closest map or a whole draft"
        )
    if fit is None or not (fit.near or name):
        fit = nearest_map(checkpoint)
    if fit is not None and (fit.near or name):
        document = close_draft(fit, checkpoint.config, kind)
        fitting = f"all {fit.total}" if fit.complete else f"{fit.fitting} of {fit.total}"
        about = f"It extends '{fit.name}', which {fitting} tensors fit by name and shape."
    else:
        document = whole_draft(checkpoint.tensors, checkpoint.config, kind, checkpoint.gguf is not None)
        about = "No map is near, so all of it comes from names, shapes and the config."
    note = f"{file}: {about[0].lower()}{about[1:]} {_left(document)}"
    if chosen and fit is not None and fit.name == chosen and fit.complete:
        document.open.clear()
        note = f"{file}: map '{chosen}' fits it as it is; it needs no map of its own"
    document.head = [
        f"A map for {comment(kind or file)}, drafted by `widen-ckpt maps --draft` from the headers of {file}."
    ]
    document.head += [about, *_marks(document), *PROOF]
    return Draft(document.text(), note)


def _marks(document: Document) -> list[str]:
    if not document.open:
        return ["Nothing is left to decide."]
    return [
        "What is guessed is marked TODO, and listed under `todo` at the end: nothing is converted before that list is empty."
    ]


def _left(document: Document) -> str:
    count = len(document.open)
    return (
        f"{count} thing{'s' if count > 1 else ''} to decide stand{'' if count > 1 else 's'} under `todo`"
        if count
        else "Nothing is left to decide"
    )


def _kind(checkpoint: Checkpoint) -> str | None:
    """What the model calls its architecture."""
    kind = checkpoint.config.get("general.architecture" if checkpoint.gguf else "model_type")
    return kind if isinstance(kind, str) and kind else None


def _chosen(checkpoint: Checkpoint) -> str | None:
    """The name of the map that a conversion would go by, if there is one.

    Raises WidenError for a model of which that is a part: no map of one's own is looked for in a part.
    """
    try:
        choice = choose_map(checkpoint, None)
    except WidenError:
        return None
    name = choice.architecture.file.removesuffix(".yaml")
    if choice.section:
        raise WidenError(
            f"{printable(checkpoint.name)}: map '{name}' fits its {choice.section} as it is; it needs no map of its own"
        )
    return name
