"""What a transformers model is fed: seeded tokens, pictures and sounds of the sizes its config states, or a text's tokens.

Part of the child process: it imports torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

ROWS, LENGTH = 2, 32  # tokens of an input
TEXT_LENGTH = 512  # tokens that a text is cut to
# Config keys of the number of positions, the first that is there.
POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "n_positions")
RESERVED = 2  # RoBERTa's first positions are no token's


class RefusedError(Exception):
    """What a model cannot be run with, in words for the user."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's forward, and what they are in words."""

    arguments: dict[str, Any]
    told: str


def seeded(model: Any, seed: int) -> Inputs:
    """Inputs of the kinds that the model's forward takes, drawn at random. Raises RefusedError where none is known."""
    maker = _Maker(model, torch.Generator().manual_seed(seed))
    arguments = maker.pixels() | maker.sounds()
    kinds = ["pictures"] * ("pixel_values" in arguments) + ["sounds"] * ("input_features" in arguments)
    if "input_ids" in maker.taken:
        arguments |= maker.tokens(arguments)
        kinds.append(f"{' x '.join(str(size) for size in arguments['input_ids'].shape)} tokens")
    if "decoder_input_ids" in maker.taken:
        arguments["decoder_input_ids"] = maker.ids(maker.rows, maker.length)
        if "input_ids" not in arguments:
            kinds.append(f"{maker.rows} x {maker.length} tokens")
    if not arguments:
        raise RefusedError(f"{type(model).__name__} takes {model.main_input_name}, which is not made here")
    return Inputs(maker.settled(arguments), f"random {' and '.join(kinds)} (seed {seed}){maker.unmade}")


def of_text(model: Any, text: str, folder: str) -> Inputs:
    """A text's tokens by the tokenizer in the model's folder. Raises RefusedError where there is none, or the model takes no text."""
    from transformers import AutoTokenizer

    maker = _Maker(model, torch.Generator().manual_seed(0))
    name = next((name for name in ("input_ids", "decoder_input_ids") if name in maker.taken), None)
    if name is None or (name == "decoder_input_ids" and model.main_input_name != name):
        raise RefusedError(f"{type(model).__name__} takes {model.main_input_name} and no text alone; leave --text out")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise RefusedError(f"has no tokenizer that transformers reads ({_line(error)}); leave --text out") from error
    every = tokenizer(text)["input_ids"]
    tokens = every[: min(TEXT_LENGTH, maker.positions)]
    if not tokens:
        raise RefusedError("the text has no tokens")
    if max(tokens) >= maker.vocabulary:
        raise RefusedError(f"its tokenizer makes a token {max(tokens)} of {maker.vocabulary} that the model knows")
    ids, maker.rows = torch.tensor([tokens]), 1
    # Where pictures are tokens of the text, one without them is a text too.
    beside = maker.pixels() if maker.image is None else {}
    arguments: dict[str, Any] = {**beside, name: ids} | (
        {"decoder_input_ids": ids} if "decoder_input_ids" in maker.taken else {}
    )
    return Inputs(maker.settled(arguments), f"the first {len(tokens)} of the text's {len(every)} tokens{maker.unmade}")


class _Maker:
    """Sizes as the config states them, and random tensors of such."""

    def __init__(self, model: Any, generator: torch.Generator) -> None:
        self.model, self.generator = model, generator
        self.config = model.config
        self.words = model.config.get_text_config()
        self.taken = set(inspect.signature(model.forward).parameters)
        # Without a padding token a classifying decoder takes one row.
        self.rows = 1 if getattr(self.words, "pad_token_id", None) is None else ROWS
        self.length = min(LENGTH, self.positions)

    @property
    def vocabulary(self) -> int:
        sizes = (getattr(self.words, key, None) for key in ("vocab_size", "decoder_vocab_size"))
        found = [size for size in sizes if isinstance(size, int)]
        if not found:
            raise RefusedError(f"{type(self.model).__name__}: its config states no vocab_size")
        return min(found)

    @property
    def positions(self) -> int:
        found = (getattr(self.words, key, None) for key in POSITIONS)
        known = next((size for size in found if isinstance(size, int) and size > 0), TEXT_LENGTH + RESERVED)
        return max(1, known - RESERVED)

    @property
    def image(self) -> int | None:
        """The token that stands for a part of a picture."""
        stated = (getattr(self.config, key, None) for key in ("image_token_id", "image_token_index"))
        return next((token for token in stated if token is not None), None)

    @property
    def unmade(self) -> str:
        """What the model takes beside, and is not made."""
        alone = getattr(self.config, "add_cross_attention", False) and not getattr(
            self.config, "is_encoder_decoder", False
        )
        return ", without an encoder's states for its cross-attention" if alone else ""

    def ids(self, rows: int, length: int) -> torch.Tensor:
        """Words without special tokens, and an end of text in each row, which classifiers look for."""
        special = set(_special(self.config)) | set(_special(self.words))
        known = torch.tensor([token for token in range(self.vocabulary) if token not in special] or [0])
        ids = known[torch.randint(len(known), (rows, length), generator=self.generator)]
        end = getattr(self.words, "eos_token_id", None)
        end = end[0] if isinstance(end, list) and end else end
        if isinstance(end, int) and 0 <= end < self.vocabulary and length > 1:
            ids[:, -1] = end
        return ids

    def tokens(self, others: dict[str, Any]) -> dict[str, Any]:
        ids = self.ids(self.rows, self.length)
        if "pixel_values" in others and self.image is not None:
            count = self._image_tokens(others["pixel_values"])
            ids = torch.cat([ids[:, :1], torch.full((len(ids), count), self.image), ids[:, 1:]], dim=1)
        if type(self.model).__name__.endswith("ForMultipleChoice"):
            ids = ids.reshape(1, *ids.shape)  # the rows are the answers to one question
        types = getattr(self.config, "type_vocab_size", 0) or 0
        if types > 1 and "token_type_ids" in self.taken:
            return {"input_ids": ids, "token_type_ids": torch.randint(types, ids.shape, generator=self.generator)}
        return {"input_ids": ids}

    def _image_tokens(self, pixels: torch.Tensor) -> int:
        """How many tokens one picture becomes."""
        with torch.inference_mode():
            found = self.model.get_image_features(pixel_values=pixels.to(self.model.dtype))
        found = getattr(found, "pooler_output", found)
        return int(found[0].shape[-2])

    def pixels(self) -> dict[str, torch.Tensor]:
        seen = getattr(self.config, "vision_config", self.config)
        size = getattr(seen, "image_size", None)
        if "pixel_values" not in self.taken or size is None:
            return {}
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": self._noise(getattr(seen, "num_channels", 3), height, width)}

    def sounds(self) -> dict[str, torch.Tensor]:
        """Whisper's spectra: two frames become one position."""
        bins, frames = (getattr(self.config, key, None) for key in ("num_mel_bins", "max_source_positions"))
        if "input_features" not in self.taken or bins is None or frames is None:
            return {}
        return {"input_features": self._noise(bins, 2 * frames)}

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn((self.rows, *shape), generator=self.generator, dtype=torch.float64)

    def settled(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments without a cache: it would be one more output."""
        dtype = self.model.dtype
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()}
        return cast | ({"use_cache": False} if "use_cache" in self.taken else {})


def _special(config: Any) -> Iterator[int]:
    """Every token that the config gives a meaning."""
    for key, value in config.to_dict().items():
        if re.fullmatch(r"\w+_token_(id|index)", key):
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))


def _line(error: Exception) -> str:
    """The first line of what went wrong."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
