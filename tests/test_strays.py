"""Files that hold more than their class reads: heads of other tasks, and stored twins of tied weights; right, or told."""

from __future__ import annotations

from pathlib import Path

import families_encoders
import families_older
import models
import pytest
import torch
from safetensors.torch import load_file, save_file

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.writing import run

VARIANTS = models.VARIANTS | {
    name: variant
    for module in (families_encoders, families_older)
    for family in module.FAMILIES
    for name, variant in family.variants.items()
}
EXACT = 1e-11


@pytest.fixture
def loads_strays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class has no place for is no fault here; what it misses still is one."""

    def load(folder: Path, dtype: torch.dtype, model_class: str | None = None) -> models.transformers.PreTrainedModel:
        name = model_class or models.json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
        kind = getattr(models.transformers, name)
        model, info = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        return model.eval()

    monkeypatch.setattr(models, "load", load)


def with_strays(name: str, donor: str | None, folder: Path) -> tuple[models.Variant, Path]:
    """The variant's checkpoint with all tensors of the donor's that it has not, under any prefix."""
    variant, given = VARIANTS[name], folder / "given"
    models.build(variant, torch.float64).save_pretrained(given)
    if donor is not None:
        models.build(VARIANTS[donor], torch.float64).save_pretrained(folder / "donor")
        own, other = (load_file(one / "model.safetensors") for one in (given, folder / "donor"))
        known = tuple(f".{name}" for name in own)
        more = {name: value for name, value in other.items() if name not in own and not name.endswith(known)}
        assert more
        save_file({**own, **more}, given / "model.safetensors", {"format": "pt"})
    return variant, given


def error(variant: models.Variant, given: Path, wide: Path, scaling: str) -> float:
    job = prepare(Options(str(given), str(wide), factor=2, scaling=scaling))
    run(job, lambda nbytes: None)
    before, after = (models.outputs(one, torch.float64, inputs=variant.inputs) for one in (given, wide))
    return models.relative_error(before, after, job.plan.output_scales)


@pytest.mark.parametrize(
    ("name", "donor", "scaling"),
    [
        ("bert_token_classification", "bert_classification", "auto"),
        ("nomic_bert_token_classification", "nomic_bert_classification", "auto"),
        ("deberta_token_classification", "deberta_classification", "auto"),
        ("distilbert_token_classification", "distilbert_classification", "auto"),
        ("distilbert_token_classification", "distilbert_classification", "quiet"),
        ("albert_token_classification", "albert_classification", "quiet"),
        ("electra_token_classification", "electra_choice", "auto"),
        ("bert", "bert_pretraining", "auto"),
        ("bert_qa", "bert_pretraining", "auto"),
        ("gpt2_base", "gpt2_untied", "auto"),
        ("gpt2_classification", "gpt2_untied", "auto"),
        ("llama_base", "llama", "copy"),
        ("llama_classification", "llama", "auto"),
    ],
)
@pytest.mark.usefixtures("loads_strays")
def test_heads_of_other_tasks_change_nothing(name: str, donor: str, scaling: str, tmp_path: Path) -> None:
    variant, given = with_strays(name, donor, tmp_path)
    assert error(variant, given, tmp_path / "wide", scaling) <= EXACT


TWINS = [
    ("bert_mlm", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ("llama_tied", "lm_head.weight", "model.embed_tokens.weight"),
    ("bart", "model.decoder.embed_tokens.weight", "model.shared.weight"),
    ("gpt_neox_tied", "embed_out.weight", "gpt_neox.embed_in.weight"),
]


@pytest.mark.parametrize("differs", [False, True], ids=["equal", "other"])
@pytest.mark.parametrize(("name", "head", "table"), TWINS)
@pytest.mark.usefixtures("loads_strays")
def test_twins_that_differ_are_told(name: str, head: str, table: str, differs: bool, tmp_path: Path) -> None:
    variant, given = with_strays(name, None, tmp_path)
    stored = load_file(given / "model.safetensors")
    assert head not in stored
    twin = stored[table] + 0.1 if differs else stored[table].clone()
    save_file({**stored, head: twin}, given / "model.safetensors", {"format": "pt"})
    if not differs:
        assert error(variant, given, tmp_path / "wide", "auto") <= EXACT
        return
    with pytest.raises(WidenError) as refused:
        error(variant, given, tmp_path / "wide", "auto")
    assert f"the config ties '{head}' to '{table}', but their values differ" in str(refused.value)
    assert not (tmp_path / "wide").exists()
