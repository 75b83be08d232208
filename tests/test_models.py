"""Proof of the test support: exact widenings compare equal to float noise, and broken ones do not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import pytest
import reference
import torch
from safetensors.numpy import load_file, save_file

NOISE_64 = 1e-12
NOISE_32 = 1e-5
CLEAR = 1e-3

# Every axis grows by a factor of its own where the family lets it.
LLAMA_GROWTHS = [
    {"hidden": 2, "intermediate": 3, "heads": 2, "kv_heads": 2},
    {"hidden": 3, "intermediate": 2, "heads": 2, "kv_heads": 1},
    {"hidden": 3, "intermediate": 1, "heads": 3, "kv_heads": 1},
]
HEADS_FOLLOW_HIDDEN = [
    {"hidden": 2, "intermediate": 3, "heads": 2, "head_dim": 1},
    {"hidden": 3, "intermediate": 2, "heads": 1, "head_dim": 3},
    {"hidden": 4, "intermediate": 1, "heads": 2, "head_dim": 2},
]
SHARED_EPS = {"bert_mlm", "bert_mlm_untied", "bert_pretraining"}
REFERENCED = [name for name in models.VARIANTS if re.match("llama|gpt2|bert", name)]

Break = Callable[[reference.Arrays, reference.Config], None]


def growths(variant: str) -> list[dict[str, int]]:
    return LLAMA_GROWTHS if variant.startswith("llama") else HEADS_FOLLOW_HIDDEN


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant saved in float64, made once."""
    root = tmp_path_factory.mktemp("narrow")

    def folder(variant: str) -> Path:
        if not (root / variant).exists():
            models.save(variant, root / variant, torch.float64)
        return root / variant

    return folder


def widened(source: Path, target: Path, growth: dict[str, int], mode: str, broken: Break | None = None) -> Path:
    tensors, config = reference.widen(*reference.read(source), growth, mode)
    if broken:
        broken(tensors, config)
    return reference.write(target, {name: np.ascontiguousarray(array) for name, array in tensors.items()}, config)


def stream_scale(growth: dict[str, int], mode: str) -> float:
    return growth["hidden"] ** -0.5 if mode == "orthogonal" else 1.0


def error(source: Path, target: Path, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> float:
    return models.relative_error(models.outputs(source, dtype), models.outputs(target, dtype), scale)


@pytest.mark.parametrize("mode", ["copy", "orthogonal"])
@pytest.mark.parametrize("variant", REFERENCED)
def test_reference_is_exact(variant: str, mode: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    errors = []
    for number, growth in enumerate(growths(variant)):
        wide = widened(narrow(variant), tmp_path / str(number), growth, mode)
        errors.append(error(narrow(variant), wide, stream_scale(growth, mode)))
    print(f"{variant} {mode}: {' '.join(f'{found:.1e}' for found in errors)}")
    if mode == "orthogonal" and variant in SHARED_EPS:
        assert min(errors) > CLEAR, "one eps cannot serve the stream and the head of a masked model"
    else:
        assert max(errors) < NOISE_64


@pytest.mark.parametrize("variant", ["llama_tied", "gpt2", "bert_classification"])
def test_reference_in_float32(variant: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    wide = widened(narrow(variant), tmp_path / "wide", growths(variant)[0], "orthogonal")
    found = error(narrow(variant), wide, dtype=torch.float32)
    print(f"{variant} float32: {found:.1e}")
    assert 1e-9 < found < NOISE_32


def eps_kept(key: str, squared_scale: float) -> Break:
    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        config[key] /= squared_scale

    return break_it


def multiplied(pattern: str, factor: float) -> Break:
    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        found = [name for name in tensors if re.search(pattern, name)]
        assert found, pattern
        for name in found:
            tensors[name] *= factor

    return break_it


def heads_tiled(heads: int, copies: int) -> Break:
    """[h1,h1,h2,h2] becomes [h1,h2,h1,h2] in the query rows and, consistently, in the columns that read them."""
    order = np.arange(heads * copies).reshape(heads, copies).T.reshape(-1)

    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        for name in tensors:
            if "q_proj.weight" in name:
                rows = tensors[name].reshape(heads * copies, -1, tensors[name].shape[1])
                tensors[name] = rows[order].reshape(tensors[name].shape)
            if "o_proj.weight" in name:
                columns = tensors[name].reshape(tensors[name].shape[0], heads * copies, -1)
                tensors[name] = columns[:, order].reshape(tensors[name].shape)

    return break_it


INTO_STREAM = r"(down_proj|mlp\.c_proj|\d\.output\.dense)\.bias$"
ONE_HEAD_FACTOR = {"hidden": 2, "intermediate": 3, "heads": 2, "kv_heads": 1}
BROKEN = {
    "eps of LLaMA kept": ("llama", "orthogonal", LLAMA_GROWTHS[0], eps_kept("rms_norm_eps", 1 / 2)),
    "eps of GPT-2 kept": ("gpt2", "orthogonal", HEADS_FOLLOW_HIDDEN[0], eps_kept("layer_norm_epsilon", 1 / 2)),
    "eps of BERT kept": ("bert", "orthogonal", HEADS_FOLLOW_HIDDEN[0], eps_kept("layer_norm_eps", 1 / 2)),
    "query heads tiled, 6 over 3": ("llama", "copy", ONE_HEAD_FACTOR, heads_tiled(6, 2)),
    "query heads tiled, 6 over 2": ("llama_gqa", "copy", ONE_HEAD_FACTOR, heads_tiled(6, 2)),
    "FFN bias 1/2, LLaMA": ("llama_biases", "orthogonal", LLAMA_GROWTHS[0], multiplied(INTO_STREAM, 0.5**0.5)),
    "FFN bias 1/2, GPT-2": ("gpt2", "orthogonal", HEADS_FOLLOW_HIDDEN[0], multiplied(INTO_STREAM, 0.5**0.5)),
    "FFN bias 1/2, BERT": ("bert", "orthogonal", HEADS_FOLLOW_HIDDEN[0], multiplied(INTO_STREAM, 0.5**0.5)),
    "tie forgotten, LLaMA": ("llama_tied", "copy", LLAMA_GROWTHS[0], multiplied(r"model\.norm\.weight", 2)),
    "tie forgotten, GPT-2": ("gpt2", "copy", HEADS_FOLLOW_HIDDEN[0], multiplied(r"ln_f\.", 2)),
    "tie forgotten, BERT": ("bert_mlm", "copy", HEADS_FOLLOW_HIDDEN[0], multiplied(r"transform\.LayerNorm\.", 2)),
    "beta of the tied norm forgotten": ("gpt2", "copy", HEADS_FOLLOW_HIDDEN[0], multiplied(r"ln_f\.bias", 2)),
    "value scaled by the heads' r": ("llama", "copy", ONE_HEAD_FACTOR, multiplied(r"v_proj", 2**-0.5)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_carry_shows(name: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    variant, mode, growth, broken = BROKEN[name]
    scale = stream_scale(growth, mode)
    right = error(narrow(variant), widened(narrow(variant), tmp_path / "right", growth, mode), scale)
    wrong = error(narrow(variant), widened(narrow(variant), tmp_path / "wrong", growth, mode, broken), scale)
    print(f"{name}: {wrong:.1e} against {right:.1e}")
    assert right < NOISE_64
    assert wrong > CLEAR


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_every_stored_value_matters(variant: str, narrow: Callable[[str], Path]) -> None:
    """No stored value is 0 or 1, and each single one moves the outputs."""
    effects = effect_of_every_value(narrow(variant))
    tensors, _ = reference.read(narrow(variant))
    assert tensors.keys() <= effects.keys()
    for name, array in tensors.items():
        assert not np.isin(array, (0, 1)).any(), name
        assert array.std() > 1e-2, name
        unseen = {tuple(index) for index in np.argwhere(effects[name] < 1e-11).tolist()}
        assert unseen == without_effect(variant, name, array.shape), name


def effect_of_every_value(folder: Path) -> reference.Arrays:
    """|value * gradient| of a random sum of all outputs, for every stored value."""
    with models.Float64Throughout():
        model = models.load(folder, torch.float64)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # its row would get no gradient
        found = model(**models.fixed_inputs(model.config))
        weighted = [
            (value * torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).sum()
            for value in found.values()
            if isinstance(value, torch.Tensor)
        ]
        sum(weighted).backward()
    return {
        name: np.zeros(parameter.shape)
        if parameter.grad is None
        else (parameter * parameter.grad).abs().detach().numpy()
        for name, parameter in model.named_parameters()
    }


def without_effect(variant: str, name: str, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The values no comparison of outputs can see: faults there show only against the reference's tensors.

    A key bias without rotary positions adds the same q.b to all scores of a query, and the softmax removes it. The
    causal classifiers read the last real token, which attends to no padding. An untied masked model of transformers 5
    reads `decoder.bias` and not its twin.
    """
    everything = set(np.ndindex(shape))
    if name.endswith("attention.self.key.bias") or (variant, name) == ("bert_mlm_untied", "cls.predictions.bias"):
        return everything
    if name.endswith("c_attn.bias"):
        return {(position,) for (position,) in everything if 1 <= position // (shape[0] // 3) < 2}
    if variant in ("gpt2_classification", "llama_classification") and re.search(r"(wte|embed_tokens)\.weight$", name):
        return {index for index in everything if index[0] == 0}
    return set()


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_eps_shows(variant: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    tensors, config = reference.read(narrow(variant))
    key = next(key for key in config if key.endswith(("norm_eps", "norm_epsilon")))
    other = reference.write(tmp_path, tensors, config | {key: 1.1 * config[key]})
    assert error(narrow(variant), other) > CLEAR


def test_build_is_deterministic() -> None:
    first, same, other = (models.build("qwen2", torch.float32, seed) for seed in (3, 3, 4))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_save_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    models.save("llama_tied", tmp_path, dtype, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert models.load(tmp_path, torch.float32).get_parameter("model.norm.weight").dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert all(np.isfinite(value).all() for value in models.outputs(tmp_path).values())


def test_a_weight_not_in_the_file_is_an_error(tmp_path: Path) -> None:
    file = models.save("llama", tmp_path) / "model.safetensors"
    whole = load_file(file)
    without = {name: array for name, array in whole.items() if name != "model.norm.weight"}
    save_file(without, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="missing_keys"):
        models.outputs(tmp_path)
    save_file(whole | {"model.extra.weight": whole["model.norm.weight"]}, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="unexpected_keys"):
        models.outputs(tmp_path)
    save_file(whole | {"model.norm.weight": np.ones(7, np.float32)}, file, metadata={"format": "pt"})
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)mismatch"):
        models.outputs(tmp_path)


def test_float64_throughout_removes_the_float32_islands(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    """A widening by 1/sqrt 2 changes every rounding, so it shows in which precision the two models compute."""
    wide = widened(narrow("llama"), tmp_path, LLAMA_GROWTHS[0], "orthogonal")
    # Left padding makes transformers' own float64 LLaMA return NaN (softmax in float32 of float64's lowest number).
    islands, wide_islands = (
        {"logits": models.outputs(folder, torch.float64, throughout=False)["logits"][:2]}
        for folder in (narrow("llama"), wide)
    )
    with_islands = models.relative_error(islands, wide_islands)
    without = error(narrow("llama"), wide)
    print(f"with float32 islands {with_islands:.1e}, without {without:.1e}")
    assert 1e-8 < with_islands < 1e-5
    assert without < 1e-13


def test_relative_error_folds_and_sees_spread() -> None:
    hidden = np.array([[1.0, -4.0, 2.0]])
    doubled = np.repeat(hidden, 2, axis=-1)
    narrow = {"last_hidden_state": hidden}
    assert models.relative_error(narrow, {"last_hidden_state": doubled / math.sqrt(2)}, 2**-0.5) < 1e-15
    unscaled = models.relative_error(narrow, {"last_hidden_state": doubled / math.sqrt(2)})
    assert unscaled == pytest.approx(1 - 2**-0.5)
    spread = {"last_hidden_state": doubled + np.array([0.1, -0.1] * 3)}
    assert models.relative_error(narrow, spread) == pytest.approx(0.1 / 4)
    assert models.relative_error({"pooler_output": hidden}, {"pooler_output": doubled}, 0.5) == 0
    assert math.isnan(models.relative_error({"logits": hidden}, {"logits": hidden * np.nan}))
    with pytest.raises(AssertionError, match="no widening"):
        models.relative_error({"logits": hidden}, {"logits": np.ones((1, 7))})
    with pytest.raises(AssertionError, match="outputs differ"):
        models.relative_error({"logits": hidden}, narrow)
