"""A GGUF model as the planner and the engine see it: tensors with element types, and its metadata as a config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError, is_text
from widen_cli.gguf.model import GgufModel
from widen_cli.gguf.types import GGUF_TYPES, GgufType
from widen_cli.gguf.values import GgufValue, ValueType
from widen_cli.safetensors_file import AGAIN, StoredTensor, shown

ARCHITECTURE = "general.architecture"
# llama.cpp's longest has about 20 characters; a key has room for some more.
ARCHITECTURE_LIMIT = 200


def element_type(kind: GgufType) -> DType:
    """The element type of a tensor type; quantised blocks have one of kind `blocks`."""
    if kind.name in STORED:
        return STORED[kind.name]
    bits = 8 * kind.nbytes_per_block // kind.block
    return DType(kind.name, bits, "blocks", None, kind.block, kind.nbytes_per_block)


def tensor_type(dtype: DType) -> GgufType:
    """The tensor type of an element type."""
    return GGUF_TYPES[dtype.name]


def stored_tensors(model: GgufModel) -> tuple[StoredTensor, ...]:
    """The tensors of all parts, in the order of their data."""
    return tuple(
        StoredTensor(tensor.name, element_type(tensor.type), tensor.shape, tensor.offset, tensor.nbytes, tensor.source)
        for tensor in model.header.tensors
    )


def gguf_architecture(model: GgufModel, name: str) -> str:
    """The `general.architecture`; WidenError where there is none, or one that could not stand in front of a key."""
    value = model.header.values.get(ARCHITECTURE)
    if value is None or not isinstance(value.value, str):
        raise WidenError(f"{name}: no {ARCHITECTURE} says what model this is; is it a vocabulary or an adapter?")
    if not is_text(value.value) or len(value.value) > ARCHITECTURE_LIMIT:
        raise WidenError(f"{name}: {ARCHITECTURE} {shown(value.value)} is no name; {AGAIN}")
    return value.value


def metadata_config(model: GgufModel, name: str) -> ModelConfig:
    """The metadata as a config: keys of the architecture without its name in front. The tokenizer is left out."""
    prefix = gguf_architecture(model, name) + "."
    values: dict[str, Any] = {
        key.removeprefix(prefix): value.value
        for key, value in model.header.values.items()
        if key.startswith((prefix, "general."))
    }
    return ModelConfig(values, name, per_layer=True)


FILE_TYPE = "general.file_type"
SIZE_LABEL = "general.size_label"
COUNTS = ("general.parameter_count", "general.parameter-count", "parameter_count")
# llama_ftype of llama.cpp: all tensors F32; F16 but for the one-dimensional.
FILE_TYPES = {"F32": 0, "F16": 1}
DESCRIBED = (*COUNTS, SIZE_LABEL, FILE_TYPE)  # what is said of a model as a whole


def described_anew(
    config: ModelConfig, tensors: Sequence[tuple[str, tuple[int, ...]]], dequantized: str | None
) -> list[tuple[str, object, object]]:
    """What the metadata says of the model as a whole and is not true of the wide one: (key, old, new).

    That is the number of parameters, the label made of it, and the file's type where it is dequantised. Keys that are
    absent stay so. `tensors` are those of the wide model, names and shapes.
    """
    found = [(key, config.get(key)) for key in DESCRIBED]
    new: dict[str, object] = {FILE_TYPE: FILE_TYPES[dequantized]} if dequantized else {}
    total = sum(math.prod(shape) for _, shape in tensors)
    new |= dict.fromkeys(COUNTS, total)
    if config.get(SIZE_LABEL) is not None:
        new[SIZE_LABEL] = _size_label(tensors, total)
    return [(key, old, new[key]) for key, old in found if old is not None and key in new and old != new[key]]


def _size_label(tensors: Sequence[tuple[str, tuple[int, ...]]], total: int) -> str:
    """The label as gguf-py makes it, `135M` or `8x7B`, the parameters of experts counted once."""
    from gguf.utility import size_label  # imported when used: it costs a plain run more than all else

    experts = [shape for name, shape in tensors if "_exps." in name and len(shape) == 3]
    each = sum(math.prod(shape) // shape[0] for shape in experts)
    shared = total - sum(map(math.prod, experts))
    count = sum(shape[0] for shape in experts) // len(experts) if experts else 0
    return str(size_label(total, shared, each, count))


VOCABULARY = "vocab_size"
TOKENS, SCORES, TOKEN_TYPES = (f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))
# What llama.cpp's converter gives tokens that a model has rows for and its tokenizer no words.
UNUSED, UNUSED_SCORE = 5, -1000.0


def _padded_tokenizer(values: Mapping[str, GgufValue], name: str, size: int) -> dict[str, GgufValue]:
    """The tokenizer's lists for `size` tokens, new ones being unused: llama.cpp wants a token for each row of the embedding."""
    tokens = values.get(TOKENS)
    if tokens is None or tokens.count is None:
        return {}
    more = range(tokens.count, size)
    if not more:
        raise WidenError(
            f"{name}: {TOKENS} lists {tokens.count} tokens, and the padded model has rows for {size}; {AGAIN}"
        )
    entries: dict[str, list[object]] = {
        TOKENS: [f"[PAD{token}]" for token in more],
        SCORES: [UNUSED_SCORE] * len(more),
        TOKEN_TYPES: [UNUSED] * len(more),
    }
    return {key: values[key].longer(new) for key, new in entries.items() if key in values}


def shorter_tokenizer(values: Mapping[str, GgufValue], factor: int | Fraction) -> dict[str, GgufValue]:
    """The tokenizer's lists without what was put behind them where the vocabulary was padded by a factor."""
    found = {key: values[key] for key in (TOKENS, SCORES, TOKEN_TYPES) if key in values}
    tokens = found.get(TOKENS)
    if tokens is None or not tokens.count:
        return {}
    size = int(tokens.count / Fraction(factor))
    return {key: value.like(value.value[:size]) for key, value in found.items() if isinstance(value.value, list)}


def changed_metadata(model: GgufModel, name: str, changes: Iterable[tuple[str, Any]]) -> dict[str, GgufValue]:
    """The metadata with changed or added values, each in the type that it has; everything else verbatim and in order."""
    prefix = gguf_architecture(model, name) + "."
    values = dict(model.header.values)
    for key, new in changes:
        if key == VOCABULARY and not (prefix + key in values and new <= values[prefix + key].value):
            values |= _padded_tokenizer(values, name, new)
        full = key if key.startswith("general.") else prefix + key
        if full in values:
            found = values[full]
            try:
                # What was one number for all layers may become one for each, and one for all again.
                listed = isinstance(new, list) and found.element is None
                if found.element is not None and not isinstance(new, list):
                    values[full] = GgufValue.of(found.element, new)
                else:
                    values[full] = GgufValue.of(ValueType.ARRAY, new, found.type) if listed else found.like(new)
            except ValueError as error:
                raise WidenError(f"{name}: {full}: {error}; correct its type in the file's metadata") from None
        else:
            kind = ValueType.F32 if isinstance(new, float) else ValueType.U32
            listed = isinstance(new, list)
            values[full] = GgufValue.of(ValueType.ARRAY if listed else kind, new, kind if listed else None)
    return values
