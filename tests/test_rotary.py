"""Heads grow under rotary positions in safetensors: which config keys are raised or made longer, and what is refused.

That every family keeps its function is seen by test_families; here it is seen for each scaling of the frequencies and for
each place at which a base may stand, and guards take away one part of each way at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import families_encoders
import families_llama
import families_older
import models
import pytest
import torch
from families import note
from models import LLAMA, Variant
from safetensors.torch import load_file
from test_gguf_rotary import edited, filled, run_with, unscaled

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.map_file import map_text
from widen_cli.options import Options
from widen_cli.writing import run

EXACT = 1e-11  # relative to the largest output
CLEAR = 1e-3

Config = dict[str, Any]
Edit = Callable[[Config], None]


# Checkpoints: those of the families, and LLaMAs with scaled frequencies.

_FAMILIES = {
    family.name: family
    for family in (*families_encoders.FAMILIES, *families_llama.FAMILIES, *families_older.FAMILIES)
    if family.heads
}
# Heads and a base for which YaRN's ramp begins and ends between pairs.
_HEADS = {**LLAMA, "hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20}
_SHORT, _LONG = [1.0 + 0.1 * pair for pair in range(10)], [1.5 + 0.4 * pair for pair in range(10)]
_LONGROPE = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}
SCALED: dict[str, Config] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-between": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    # The inputs have 64 positions.
    "longrope-short": {**_LONGROPE, "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope-long": {**_LONGROPE, "factor": 4.0, "original_max_position_embeddings": 32},
}


def scaled(name: str) -> Variant:
    return Variant("LlamaForCausalLM", {**_HEADS, "rope_parameters": {"rope_theta": 100.0, **SCALED[name]}})


_DEEPSEEK = families_llama._DEEPSEEK
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
OWN: dict[str, Variant] = {
    **{f"llama-{name}": scaled(name) for name in SCALED},
    "llama-plain": Variant("LlamaForCausalLM", LLAMA),
    "deepseek-yarn": Variant(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "qk_rope_head_dim": 12, "rope_parameters": {"rope_theta": 100.0, **_YARN}},
        small=families_llama._SMALL,
    ),
    "minicpm3-longrope": Variant(
        "MiniCPM3ForCausalLM",
        {
            **families_llama._MINICPM3,
            "rope_parameters": {
                **_LONGROPE, "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.5], "long_factor": [1.2, 3.0],
            },
        },
        small=families_llama._SMALL,
    ),
}  # fmt: skip


def variant_of(name: str) -> Variant:
    if name in OWN or name in models.VARIANTS:
        return OWN.get(name) or models.VARIANTS[name]
    return next(family.variants[name] for family in _FAMILIES.values() if name in family.variants)


def rewritten(folder: Path, edit: Edit) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


def config_of(folder: Path) -> Config:
    found: Config = json.loads((folder / "config.json").read_text())
    return found


Narrow = Callable[..., Path]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    """A checkpoint by the variant's name, its config edited."""
    root = tmp_path_factory.mktemp("rotary")

    @cache
    def made(name: str, edit: Edit | None = None) -> Path:
        folder = models.save(variant_of(name), root / f"{name}-{edit.__name__ if edit else 'as-saved'}", torch.float64)
        return rewritten(folder, edit) if edit else folder

    return made


def planned(source: Path, target: Path, grow: str, **options: Any) -> Job:
    return prepare(Options(str(source), str(target), grow=models.by_factors(grow), **options))


def widen(source: Path, target: Path, grow: str, **options: Any) -> Job:
    return run(planned(source, target, grow, **options), lambda nbytes: None).job


@cache
def outputs(folder: Path, name: str) -> models.Outputs:
    return models.outputs(folder, torch.float64, inputs=variant_of(name).inputs)


def error(name: str, source: Path, target: Path, job: Job) -> float:
    wide = models.outputs(target, torch.float64, inputs=variant_of(name).inputs)
    scale = float(job.plan.scales[str(job.plan.output)])
    return models.relative_error(outputs(source, name), wide, {"last_hidden_state": scale})


# Scaled frequencies.


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((f"llama-{name}", "theta") for name in SCALED),
        *((f"llama-{name}", "spread") for name in SCALED if "yarn" not in name),
        *((f"llama-{name}", "frequencies") for name in SCALED if "longrope" in name),
        ("deepseek-yarn", "theta"),
        ("minicpm3-longrope", "theta"),
        ("minicpm3-longrope", "frequencies"),
        ("phi3_longrope", "theta"),
        ("phi3_longrope", "spread"),
        ("phi3_longrope", "frequencies"),
    ],
)
def test_scaled_frequencies(narrow: Narrow, tmp_path: Path, name: str, way: str) -> None:
    grow = "hidden=3,head_dim=3" if name == "phi3_longrope" else "head_dim=3"
    job = widen(narrow(name), tmp_path / "wide", grow, rope=way)
    assert error(name, narrow(name), tmp_path / "wide", job) <= EXACT


@pytest.mark.parametrize("way", ["theta", "spread", "frequencies"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_the_first_families(narrow: Narrow, tmp_path: Path, name: str, way: str) -> None:
    job = widen(narrow(name), tmp_path / "wide", "hidden=2,head_dim=2", rope=way)
    found = error(name, narrow(name), tmp_path / "wide", job)
    note(name, name, f"rope {way}", "hidden=2,head_dim=2", "float64", found)
    assert found <= EXACT


def test_lists_grow_as_pairs_do(narrow: Narrow, tmp_path: Path) -> None:
    """A pair of zeros may have any number; repeated pairs have the old one's, divided by how much faster they would turn."""
    name = "llama-longrope-long"
    found = {}
    for way in ("theta", "spread", "frequencies"):
        widen(narrow(name), tmp_path / way, "head_dim=2", rope=way)
        found[way] = config_of(tmp_path / way)["rope_parameters"]
    assert found["theta"]["long_factor"] == _LONG + _LONG
    assert found["spread"]["short_factor"] == [number for number in _SHORT for _ in range(2)]
    assert found["frequencies"]["long_factor"][::2] == _LONG
    assert found["frequencies"]["long_factor"][1::2] == pytest.approx([100 ** (-2 / 40) * number for number in _LONG])
    assert {way: one["rope_theta"] for way, one in found.items()} == {
        "theta": 1e4,
        "spread": 100.0,
        "frequencies": 100.0,
    }


# Where the base stands.


def without_rope(config: Config) -> None:
    """As where only the class says what the base is."""
    config.pop("rope_parameters", None)
    if isinstance(inner := config.get("text_config"), dict):
        without_rope(inner)


def without_base(config: Config) -> None:
    del config["rope_parameters"]["rope_theta"]


# What the key is called and what its absence means, by the class's code.
ABSENT: dict[str, tuple[str, dict[str, float]]] = {
    "llama-plain": ("head_dim=2", {"rope_theta": 1e4}),
    "mixtral": ("head_dim=2", {"rope_theta": 1e6}),
    "cohere": ("head_dim=2", {"rope_theta": 5e5}),
    "cohere2": ("head_dim=2", {"rope_theta": 1e4}),
    "smollm3": ("head_dim=2", {"rope_theta": 2e6}),
    "gpt_oss": ("head_dim=2", {"rope_theta": 1.5e5}),
    "gemma3_text": ("head_dim=2", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    "modernbert": ("hidden=2,head_dim=2", {"global_rope_theta": 1.6e5, "local_rope_theta": 1e4}),
    "nomic_bert": ("head_dim=2", {"rope_theta": 1e3}),
    "deepseek_v2": ("head_dim=2", {"rope_theta": 1e4}),
    "phi": ("head_dim=2", {"rope_theta": 1e4}),
    "gpt_neox": ("hidden=2,head_dim=2", {"rotary_emb_base": 1e4}),
    "stablelm": ("hidden=2,head_dim=2", {"rope_theta": 1e4}),
    "nemotron": ("head_dim=2", {"rope_theta": 1e4}),
    "glm": ("head_dim=2", {"rope_theta": 1e4}),
    "persimmon": ("hidden=2,head_dim=2", {"rope_theta": 1e4}),
    "falcon_7b": ("hidden=2,head_dim=2", {"rope_theta": 1e4}),
    "llava": ("head_dim=2", {"text_config.rope_theta": 1e4}),
}


def at(config: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("name", ABSENT)
def test_a_base_that_the_class_alone_knows_is_written(narrow: Narrow, tmp_path: Path, name: str) -> None:
    """A fraction that the class alone knows is not."""
    grow, keys = ABSENT[name]
    # Of heads of 12 the class's own fraction takes 3 values, which is odd.
    source = narrow(name, without_base if name == "gpt_neox" else without_rope)
    job = widen(source, tmp_path / "wide", grow, rope="theta")
    config = config_of(tmp_path / "wide")
    assert {key: at(config, key) for key in keys} == {key: base**2 for key, base in keys.items()}
    assert set(config) - set(config_of(source)) <= {*keys, "head_dim"}
    assert error(name, source, tmp_path / "wide", job) <= EXACT


def as_published(config: Config) -> None:
    """The keys of transformers 4."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        keys = (
            ("rope_theta", "rope_local_base_freq")
            if "gemma3" in config["model_type"]
            else ("global_rope_theta", "local_rope_theta")
        )
        config |= dict(zip(keys, (300.0, 700.0), strict=True))
        return
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if rope else None


def gemma3_as_published(config: Config) -> None:
    as_published(config)
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}


def neox_as_published(config: Config) -> None:
    """Beside rotary_emb_base some hold a rope_theta too."""
    as_published(config)
    config["rotary_emb_base"] = config["rope_theta"] = 300.0
    config["rotary_pct"] = config.pop("partial_rotary_factor")


def phi3_as_published(config: Config) -> None:
    as_published(config)
    config["rope_scaling"]["type"] = "su"


PUBLISHED: list[tuple[str, Edit, str, dict[str, Any]]] = [
    ("llama-default", as_published, "head_dim=3", {"rope_theta": 1e6}),
    ("llama-linear", as_published, "head_dim=3", {"rope_theta": 1e6}),
    ("llama-yarn", as_published, "head_dim=3", {"rope_theta": 1e6}),
    ("llama-longrope-long", as_published, "head_dim=3", {"rope_theta": 1e6, "rope_scaling.long_factor": _LONG * 3}),
    ("phi3_longrope", phi3_as_published, "hidden=2,head_dim=2", {"rope_theta": 2.5e5}),
    ("gemma3_text", gemma3_as_published, "head_dim=3", {"rope_theta": 2.7e7, "rope_local_base_freq": 3.43e8}),
    ("modernbert", as_published, "hidden=2,head_dim=2", {"global_rope_theta": 9e4, "local_rope_theta": 4.9e5}),
    ("gpt_neox", neox_as_published, "hidden=2,head_dim=2", {"rotary_emb_base": 9e4, "rope_theta": 9e4, "rotary_pct": 0.5}),
    ("glm", as_published, "head_dim=2", {"rope_theta": 1e8, "partial_rotary_factor": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "grow", "keys"), PUBLISHED)
def test_a_base_is_raised_where_it_stands(
    narrow: Narrow, tmp_path: Path, name: str, edit: Edit, grow: str, keys: Config
) -> None:
    source = narrow(name, edit)
    job = widen(source, tmp_path / "wide", grow, rope="theta")
    config = config_of(tmp_path / "wide")
    assert {key: at(config, key) for key in keys} == keys
    assert "rope_parameters" not in config
    assert error(name, source, tmp_path / "wide", job) <= EXACT


# Far positions.


@pytest.mark.parametrize("way", ["theta", "spread"])
def test_a_cache_at_far_positions(tmp_path: Path, way: str) -> None:
    """300 tokens at once, then one by one behind them."""
    far = Variant(
        "LlamaForCausalLM",
        {**_HEADS, "max_position_embeddings": 512, "rope_parameters": SCALED["default"] | {"rope_theta": 1e4}},
    )
    source, target = models.save(far, tmp_path / "narrow", torch.float64), tmp_path / "wide"
    widen(source, target, "hidden=2,heads=2,kv_heads=2,head_dim=3", rope=way)
    tokens = torch.randint(1, models.VOCAB, (1, 312), generator=torch.Generator().manual_seed(4))
    found = []
    with models.Float64Throughout(), torch.inference_mode():
        for folder in (source, target):
            model = models.load(folder, torch.float64)
            first = model(tokens[:, :300], use_cache=True)
            past, logits = first.past_key_values, [first.logits[:, -1]]
            for place in range(300, 312):
                step = model(tokens[:, place : place + 1], past_key_values=past, use_cache=True)
                past = step.past_key_values
                logits.append(step.logits[:, -1])
            found.append(torch.stack(logits))
    before, after = found
    assert float((after - before).abs().max() / before.abs().max()) <= EXACT


# Guards: each way without one of its parts.

ONE_EACH = ["llama-plain", "llama-yarn", "qwen3", "gemma3_text", "gpt_neox", "phi_qk_norm", "glm", "deepseek_v3", "gptj"]  # fmt: skip


def growth(name: str) -> str:
    tied = name in ("gpt_neox", "phi_qk_norm", "gptj", "codegen", "modernbert")
    return "hidden=2,head_dim=2" if tied else "head_dim=2"


def way_of(name: str) -> str:
    return "spread" if name in ("gptj", "codegen") else "theta"


FLAT = "rope_parameters.rope_theta"
BASES = [
    *((name, FLAT) for name in ONE_EACH if name not in ("gptj", "gemma3_text")),
    *(
        (name, f"rope_parameters.{kind}_attention.rope_theta")
        for name in ("gemma3_text", "modernbert")
        for kind in ("full", "sliding")
    ),
]


@pytest.mark.parametrize(("name", "key"), BASES)
def test_the_old_base_shows(narrow: Narrow, tmp_path: Path, name: str, key: str) -> None:
    *path, last = key.split(".")

    def back(config: Config) -> None:
        at(config, ".".join(path))[last] = at(config_of(narrow(name)), key)

    job = widen(narrow(name), tmp_path / "wide", growth(name), rope="theta")
    assert error(name, narrow(name), rewritten(tmp_path / "wide", back), job) > CLEAR


LEFT_OUT = {"pairs that are not zero": filled, "an attention not scaled": unscaled(2)}


@pytest.mark.parametrize(
    ("name", "part"),
    # Gemma 3 has a scale of its own, so its q.k takes no factor.
    [
        (name, part)
        for name in ONE_EACH
        for part in LEFT_OUT
        if (name, part) != ("gemma3_text", "an attention not scaled")
    ],
)
def test_a_part_left_out_shows(narrow: Narrow, tmp_path: Path, name: str, part: str) -> None:
    """Pairs of k repeated as q's are; or q.k divided by the root of a head size for which it was not multiplied."""
    job = planned(narrow(name), tmp_path / "wide", growth(name), rope=way_of(name), scaling="copy")
    tensors = tuple(
        replace(plan, growth=tuple(edited(node, LEFT_OUT[part]) for node in plan.growth or ()))
        for plan in job.plan.tensors
    )
    assert tensors != job.plan.tensors
    run_with(job, tensors)
    assert error(name, narrow(name), tmp_path / "wide", job) > CLEAR


SWAPPED = {
    "llama-plain": "llama",
    "phi3_partial": "phi3",
    "deepseek_v3_halves": "deepseek_v3",
    **{
        name: name
        for name in ("gpt_neox", "glm", "cohere", "gptj", "codegen", "deepseek_v3", "deepseek_v2", "minicpm3")
    },
}


def swapped(text: str) -> str:
    """A map in which halves are neighbours, and neighbours halves."""
    if "extends: deepseek_v3" in text:
        found = re.search(r"rope_interleave: (true|false)", text)
        assert found is not None
        return text.replace(found[0], f"rope_interleave: {'false' if found[1] == 'true' else 'true'}")
    return re.sub(
        r"\bpair ((?:query|key)\w*)|\b((?:query|key)\w*) pair\b",
        lambda hit: f"{hit[1]} pair" if hit[1] else f"pair {hit[2]}",
        text,
    )


@pytest.mark.parametrize("name", SWAPPED)
def test_the_other_order_of_pairs_shows(narrow: Narrow, tmp_path: Path, name: str) -> None:
    text, changed = map_text(SWAPPED[name]), swapped(map_text(SWAPPED[name]))
    assert changed != text
    (tmp_path / "mine.yaml").write_text(changed)
    job = widen(narrow(name), tmp_path / "wide", growth(name), rope=way_of(name), map=str(tmp_path / "mine.yaml"))
    assert error(name, narrow(name), tmp_path / "wide", job) > CLEAR


@pytest.mark.parametrize("name", ["llama-yarn", "llama-yarn-between"])
def test_yarn_is_rightly_refused(narrow: Narrow, tmp_path: Path, name: str) -> None:
    """A map that lets `spread` through makes another function where the ramp's ends are rounded to pairs."""
    (tmp_path / "mine.yaml").write_text(
        map_text("llama").replace('"llama3", "longrope"]', '"llama3", "longrope", "yarn"]')
    )
    job = widen(narrow(name), tmp_path / "wide", "head_dim=3", rope="spread", map=str(tmp_path / "mine.yaml"))
    found = error(name, narrow(name), tmp_path / "wide", job)
    assert found <= EXACT if name == "llama-yarn-between" else found > CLEAR


def test_dynamic_is_rightly_refused(tmp_path: Path) -> None:
    """Beyond its trained length the base moves by another power."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    variant = Variant("LlamaForCausalLM", {**_HEADS, "max_position_embeddings": 32, "rope_parameters": dynamic}, _sixty)
    source = models.save(variant, tmp_path / "narrow", torch.float64)
    (tmp_path / "mine.yaml").write_text(map_text("llama").replace('"longrope"] or', '"longrope", "dynamic"] or'))
    widen(source, tmp_path / "wide", "head_dim=3", rope="theta", map=str(tmp_path / "mine.yaml"))
    before, after = (models.outputs(tmp_path / one, torch.float64, inputs=_sixty) for one in ("narrow", "wide"))
    assert models.relative_error(before, after) > CLEAR


def _sixty(config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, models.VOCAB, (2, 60), generator=torch.Generator().manual_seed(8))}


# Refusals.


def refusal(source: Path, target: Path, grow: str, **options: Any) -> list[str]:
    with pytest.raises(WidenError) as caught:
        planned(source, target, grow, **options)
    assert not target.exists()
    return [fault.replace(str(source), "in") for fault in caught.value.faults]


def dynamic(config: Config) -> None:
    as_published(config)
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}


def unheard_of(config: Config) -> None:
    config["rope_parameters"]["rope_type"] = "spiral"


def yarn_beyond(config: Config) -> None:
    """With so small a base the ramp would end behind the last pair, where transformers cuts it off by the head size."""
    config["rope_parameters"] |= {"rope_theta": 10.0, "original_max_position_embeddings": 4096}


def stale(config: Config) -> None:
    """A size of heads that DeepSeek-V3 goes by and the library of others sets anew."""
    config["head_dim"] = 3


def two_fifths(config: Config) -> None:
    """Of 6 values 0.4 is 2, of 12 it is 4, of 18 it is 7."""
    config["rope_parameters"]["partial_rotary_factor"] = 0.4


def a_quarter(config: Config) -> None:
    """Of 12 values it is 3, an odd number."""
    config["rope_parameters"]["partial_rotary_factor"] = 0.25


def short_list(config: Config) -> None:
    config["rope_parameters"]["long_factor"].pop()


def no_base(config: Config) -> None:
    config["rope_parameters"]["rope_theta"] = "large"


def cannot(why: str) -> str:
    return f"--grow head_dim=2: 'head_dim' cannot grow exactly: {why}; grow heads instead"


def needs(sizes: str, family: str, formula: str) -> str:
    return f"in: the wide model would have {sizes}, and '{family}' needs {formula}; choose other factors with --grow"


def not_exact(way: str, others: str, why: str = "with this model's frequency scaling") -> str:
    return f"--rope {way}: is not exact {why}; {others}"


RAMP = "YaRN's ramp ends beyond the last pair, at a place that depends on the head size"
NTK = "the base of dynamic NTK scaling depends on the head size and on the length of the text"
LARGE = "is too large for a float32; grow heads instead, or take --rope spread"
KEYS = "in/config.json: rope_parameters."
TEN = "is no list of 10 numbers, one for each rotary pair of a head"
FRACTION = "0 <= head_dim * partial_rotary_factor - rotated < 1"
TIED = "hidden == heads * head_dim; give factors that keep both sides equal, or leave one out, so that it follows"
BOTH = "which both hold 'rotated'; the model's library reads one of them: let both say what it is"
PARTS = "query_dim == head_dim + rotated"
REFUSED: list[tuple[str, Edit | None, str, str | None, str]] = [
    ("llama-plain", dynamic, "head_dim=2", None, cannot(NTK)),
    ("llama-plain", dynamic, "head_dim=2", "theta", not_exact("theta", "none is")),
    ("llama-yarn", yarn_beyond, "head_dim=2", None, cannot(RAMP)),
    ("llama-plain", unheard_of, "head_dim=2", None, cannot("no way to do it is known to be exact, since rope_type is 'spiral'")),
    ("llama-yarn", None, "head_dim=2", "spread", not_exact("spread", "these are: theta")),
    ("llama-yarn", None, "head_dim=2", "frequencies", not_exact("frequencies", "these are: theta")),
    ("gptj", None, "hidden=2,head_dim=2", "theta", not_exact("theta", "these are: spread", "for 'gptj'")),
    ("phi3", two_fifths, "head_dim=3", None, needs("head_dim 18, rotated 6", "phi3", FRACTION)),
    ("gpt_neox", a_quarter, "hidden=2,head_dim=2", None, needs("rotary 4, rotated 6", "gpt_neox", "2 * rotary <= rotated + 1")),
    ("phi3_longrope", None, "hidden=1,head_dim=2", None, f"--grow hidden=1,head_dim=2: 'phi3' needs {TIED}"),
    ("deepseek_v3", stale, "head_dim=2", None, f"in: in/config.json: qk_rope_head_dim is 4 and head_dim is 3, {BOTH}"),
    ("deepseek_v3", None, "rotated=2", None, needs("head_dim 6, query_dim 10, rotated 8", "deepseek_v3", PARTS)),
    ("llama-longrope-long", short_list, "head_dim=2", None, f"{KEYS}long_factor {TEN}"),
    ("llama-plain", no_base, "head_dim=2", "theta", f"{KEYS}rope_theta is 'large', where a positive number is needed"),
    ("llama-plain", None, "head_dim=10", "theta", f"{KEYS}rope_theta 10000.0 to the power of 10 {LARGE}"),
    ("llama-yarn", None, "head_dim=20", None, f"{KEYS}rope_theta 100.0 to the power of 20 {LARGE.partition(', or')[0]}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "grow", "way", "text"), REFUSED)
def test_what_cannot_be_exact_is_refused(
    narrow: Narrow, tmp_path: Path, name: str, edit: Edit | None, grow: str, way: str | None, text: str
) -> None:
    assert refusal(narrow(name, edit), tmp_path / "wide", grow, rope=way) == [text]


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3"])
def test_a_key_that_the_library_does_not_read_may_be_stale(narrow: Narrow, tmp_path: Path, name: str) -> None:
    source = narrow(name, stale)
    job = widen(source, tmp_path / "wide", "head_dim=2")
    assert [config_of(tmp_path / "wide")[key] for key in ("qk_rope_head_dim", "head_dim")] == [8, 6]
    assert error(name, source, tmp_path / "wide", job) <= EXACT


# Where a base is small, YaRN's ramp ends behind the last pair and is cut off there, by the head size.
CUT_OFF: list[tuple[str, tuple[str, ...], Config, str]] = [
    ("llama-plain", ("rope_parameters",), {"original_max_position_embeddings": 300}, "head_dim=2"),
    ("llama-plain", ("rope_parameters",), {}, "head_dim=2"),  # the config's max_position_embeddings then
    ("gemma3_text", ("rope_parameters", "full_attention"), {"original_max_position_embeddings": 300}, "head_dim=2"),
    ("gemma3_text", ("rope_parameters", "sliding_attention"), {"original_max_position_embeddings": 300}, "head_dim=2"),
    ("modernbert", ("rope_parameters", "full_attention"), {"original_max_position_embeddings": 300}, "hidden=2,head_dim=2"),
    ("modernbert", ("rope_parameters", "sliding_attention"), {}, "hidden=2,head_dim=2"),
    ("modernbert", ("rope_scaling",), {"original_max_position_embeddings": 300}, "hidden=2,head_dim=2"),
    ("llava", ("text_config", "rope_parameters"), {"original_max_position_embeddings": 300}, "head_dim=2"),
    ("one-pair", ("rope_parameters",), {"original_max_position_embeddings": 4096}, "head_dim=2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at", "more", "grow"), CUT_OFF)
def test_yarn_that_is_cut_off_is_rightly_refused(
    tmp_path: Path, name: str, at: tuple[str, ...], more: Config, grow: str
) -> None:
    one_pair = Variant("LlamaForCausalLM", {**LLAMA, "head_dim": 2})
    variant = one_pair if name == "one-pair" else variant_of(name)
    source = models.save(variant, tmp_path / "narrow", torch.float64)

    def yarn(config: Config) -> None:
        *path, last = at
        inner = config
        for key in path:
            inner = inner[key]
        if last == "rope_scaling":
            del config["rope_parameters"]
        inner[last] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 4.0, **more}
        config["max_position_embeddings"] = config.get("max_position_embeddings", 64) if more else 300

    rewritten(source, yarn)
    (text,) = refusal(source, tmp_path / "wide", grow)
    assert f"'head_dim' cannot grow exactly: {RAMP}" in text
    family = {"llama-plain": "llama", "one-pair": "llama"}.get(name, name)
    unguarded = re.sub(r"    theta: (>-\n.*\n.*\n|.*\n)", "    theta: true\n", map_text(family))
    inherited = "" if "    theta: true\n" in unguarded else "\nrope: {methods: {theta: true}}\n"
    (tmp_path / "mine.yaml").write_text(unguarded + inherited)
    job = widen(source, tmp_path / "wide", grow, map=str(tmp_path / "mine.yaml"), rope="theta")
    before, after = (models.outputs(tmp_path / one, torch.float64, inputs=variant.inputs) for one in ("narrow", "wide"))
    scale = float(job.plan.scales[str(job.plan.output)])
    assert models.relative_error(before, after, {"last_hidden_state": scale}) > CLEAR


def test_a_head_of_one_value_has_no_pair(tmp_path: Path) -> None:
    """transformers makes two values of it; a part of -1 values is none that could be written."""
    one = Variant(
        "Phi3ForCausalLM", {**LLAMA, "hidden_size": 6, "num_key_value_heads": 6, "bos_token_id": 1, "eos_token_id": 2}
    )
    source = models.save(one, tmp_path / "narrow", torch.float64)
    what = "in: in/config.json: passed would be -1 (head_dim - 2 * rotary); no part is smaller than 0"
    assert refusal(source, tmp_path / "wide", "hidden=2,heads=2,kv_heads=2") == [what]


@pytest.mark.parametrize("grow", ["heads=2,kv_heads=2", "hidden=3,intermediate=2"])
def test_a_head_of_which_nothing_is_rotated(tmp_path: Path, grow: str) -> None:
    """Half of one value is no pair."""
    described = _FAMILIES["glm"].variants["glm"]
    variant = replace(described, config={**described.config, "head_dim": 1})
    source = models.save(variant, tmp_path / "narrow", torch.float64)
    widen(source, tmp_path / "wide", grow)
    before, after = (models.outputs(tmp_path / one, torch.float64) for one in ("narrow", "wide"))
    assert models.relative_error(before, after) <= EXACT


def test_clipped_queries_take_no_factor(tmp_path: Path) -> None:
    clipped = _FAMILIES["olmo"].variants["olmo_clipped"]
    source = models.save(clipped, tmp_path / "narrow", torch.float64)
    (text,) = refusal(source, tmp_path / "wide", "head_dim=2")
    assert text.startswith("in: no scaling keeps the function of this checkpoint, because ")
    assert "acts on query: its scale is 1" in text


def test_without_a_config_the_scaling_has_to_be_said(narrow: Narrow, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    file = tmp_path / "alone" / "model.safetensors"
    file.write_bytes((narrow("llama-plain") / "model.safetensors").read_bytes())
    told = ("num_attention_heads=6", "num_key_value_heads=3")
    unknown = "no way to do it is known to be exact, since rope_type is not known (--set rope_type=... tells it)"
    assert refusal(file, tmp_path / "wide.safetensors", "head_dim=2", settings=told) == [cannot(unknown)]
    told = (*told, "rope_type=default")
    job = planned(file, tmp_path / "wide.safetensors", "head_dim=2", settings=told)
    assert [warning for warning in job.plan.warnings if "head_dim = 12" in warning]
    (text,) = refusal(file, tmp_path / "wide.safetensors", "head_dim=2", settings=told, rope="theta")
    assert text.endswith("rope_theta is not known, and --rope theta raises it; tell it with --set rope_theta=...")


@pytest.mark.parametrize(
    ("name", "told", "larger", "key"),
    [
        ("phi", ("num_attention_heads=6", "num_key_value_heads=3"), "head_dim=2", "partial_rotary_factor"),
        ("phi3", ("num_attention_heads=6", "num_key_value_heads=3"), "head_dim=2", "partial_rotary_factor"),
        ("gpt_neox", ("num_attention_heads=3",), "hidden=2,head_dim=2", "rotary_pct"),
        ("gptj", ("n_head=3",), "hidden=2,head_dim=2", "rotary_dim"),
    ],
)
def test_a_head_that_does_not_grow_is_not_taken_apart(
    narrow: Narrow, tmp_path: Path, name: str, told: tuple[str, ...], larger: str, key: str
) -> None:
    """Without a config nothing tells which part of it is rotated; where it grows, that has to be said."""
    source, grow = narrow(name), "hidden=3,intermediate=2,heads=3"
    widen(source, tmp_path / "wide", grow, scaling="copy")
    (tmp_path / "alone").mkdir()
    file = tmp_path / "alone" / "model.safetensors"
    file.write_bytes((source / "model.safetensors").read_bytes())
    (tmp_path / "mine.yaml").write_text(map_text(name))
    options = {"map": str(tmp_path / "mine.yaml"), "scaling": "copy"}
    widen(file, tmp_path / "wide.safetensors", grow, settings=told, **options)
    one, other = (load_file(path) for path in (tmp_path / "wide.safetensors", tmp_path / "wide" / "model.safetensors"))
    assert list(one) == list(other)
    assert all(torch.equal(one[tensor], other[tensor]) for tensor in one)
    told = told if name == "gptj" else (*told, "rope_type=default")
    (text,) = refusal(file, tmp_path / "none.safetensors", larger, settings=told, **options)
    assert text.startswith("in: the tensors alone do not tell rotary, passed (")
    assert text.endswith(f"give --config, or --set {key}=N")
