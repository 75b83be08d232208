"""--optimizer and --new-parameters: grown moments are those that the wide model itself would have gathered, run by transformers.

Both models see the same batches under a learning rate of 0, so that their moments are sums of true gradients at fixed weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import families_encoders
import families_hybrids
import families_llama
import families_newer
import models
import optimizer_here
import pytest
import torch
from click.testing import CliRunner, Result
from gradient_checks import checked
from safetensors.torch import load_file
from test_readme import shell
from transformers.trainer_pt_utils import get_parameter_names

from widen_cli.cli import cli
from widen_cli.moments import attach
from widen_cli.plan import gradients

VARIANTS = models.VARIANTS | {
    name: variant
    for module in (families_llama, families_newer, families_hybrids)
    for family in module.FAMILIES
    for name, variant in family.variants.items()
}
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
Moments = dict[str, dict[str, torch.Tensor]]
Save = Callable[[str], Path]


def groups_of(model: Any) -> list[dict[str, Any]]:
    """A Trainer's groups, with the names beside them."""
    decay = set(get_parameter_names(model, [torch.nn.LayerNorm], NO_DECAY))
    pairs = list(model.named_parameters())
    return [
        {"params": [p for n, p in pairs if n in decay], "weight_decay": 0.1},
        {"params": [p for n, p in pairs if n not in decay], "weight_decay": 0.0},
    ]


def names_of(model: Any) -> list[str]:
    names = {id(p): n for n, p in model.named_parameters()}
    return [names[id(p)] for group in groups_of(model) for p in group["params"]]


def trained(folder: Path, batches: int = 3, **how: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A folder's model in float64 throughout and the optimizer after some batches at a learning rate of 0."""
    with models.Float64Throughout():
        model = models.load(folder, torch.float64)
        model.config._experts_implementation = "eager"
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.0, **how)
        inputs = models.fixed_inputs(model.config)
        labels = inputs["input_ids"] if "Causal" in type(model).__name__ or "LMHead" in type(model).__name__ else None
        for number in range(batches):
            ids = inputs["input_ids"].roll(number, 0)
            target = ids if labels is not None else torch.tensor([number % 5, 1, 2])
            loss = model(**{**inputs, "input_ids": ids, "labels": target}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, optimizer


def by_name(model: Any, state: dict[str, Any]) -> Moments:
    names = names_of(model)
    return {names[number]: entry for number, entry in state["state"].items()}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child process does is done in this one, which has the libraries loaded; a Trainer's test starts a real one."""
    monkeypatch.setattr(attach, "answer_of", optimizer_here.answer)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Save:
    root = tmp_path_factory.mktemp("narrow")

    @cache
    def saved(variant: str) -> Path:
        folder = root / variant
        models.build(VARIANTS[variant], torch.float64).save_pretrained(folder)
        _, optimizer = trained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        return folder

    return saved


def widen(*words: str) -> Result:
    return CliRunner().invoke(cli, ["convert", *words])


def largest_error(grown: Moments, own: Moments) -> float:
    """The largest difference over the largest value, of all kept moments."""
    errors = [0.0]
    for key in next(iter(own.values())).keys() - {"step"}:
        # Some gradients are zero but for roundings, such as those of keys' biases, which a softmax does not see.
        floor = 1e-5 * max(entry[key].abs().max().item() for entry in own.values())
        for name, entry in grown.items():
            scale = max(own[name][key].abs().max().item(), floor)
            errors.append((entry[key] - own[name][key]).abs().max().item() / scale)
    return max(errors)


def unknown_left_out(own: Moments, grown: Moments) -> Moments:
    """The wide model's own moments with zeros where the grown ones have them, of which nothing is known: the others have to be right."""
    return {
        name: {
            key: value.where(grown[name][key] != 0, 0.0) if name in grown and key != "step" else value
            for key, value in entry.items()
        }
        for name, entry in own.items()
    }


# Variant, growth, scaling, and the parameters whose moments begin anew.
CASES = [
    ("llama_mha", "--factor=2", "orthogonal", ()),
    ("llama_mha", "--factor=2", "quiet", ()),
    ("llama_mha", "--grow=hidden=2x,intermediate=3x,heads=2x,kv_heads=2x", "sum", ()),
    ("llama", "--factor=2", "copy", ("k_proj", "v_proj")),
    ("llama_tied", "--grow=hidden=3x,intermediate=2x,heads=2x", "copy", ()),
    ("llama_mha", "--grow=hidden=4/3,intermediate=3/2", "orthogonal", None),
    ("gpt2", "--factor=2", "orthogonal", ()),
    ("gpt2", "--factor=2", "copy", ()),
    ("bert_classification", "--factor=2", "orthogonal", ()),
    ("bert_classification", "--grow=hidden=2x,heads=2x,intermediate=3x", "copy", ()),
    ("qwen3", "--factor=2", "copy", ("k_proj", "v_proj")),
    ("qwen3", "--grow=hidden=2x,head_dim=2x", "copy", ("q_proj", "k_proj")),
    ("llama_mha", "--grow=hidden=2x,head_dim=2x", "quiet", None),
    ("gemma3_text", "--factor=2", "copy", ("k_proj", "v_proj")),
    ("gemma3n_text", "--grow=intermediate=+4@1,intermediate=2x@0,intermediate=3/2x@3", "copy", ()),
    ("llama_mha", "--depth=2x --grow=hidden=2x", "copy", None),
    ("llama_mha", "--factor=2 --split=even", "copy", ()),
    ("llama_mha", "--experts=4 --grow=hidden=2x", "quiet", ("experts", "gate")),
    ("qwen3", "--experts=6 --slices=2 --depth=+1", "copy", None),
    # Experts that are one parameter in memory and many tensors in the file; routers of other names.
    ("mixtral", "--grow=hidden=2x,intermediate=3x", "copy", ()),
    ("qwen2_moe", "--factor=2", "quiet", ("k_proj", "v_proj")),
    ("olmoe", "--grow=hidden=2x,intermediate=2x", "orthogonal", ("k_norm", "k_proj", "v_proj")),
    ("phimoe", "--grow=hidden=2x,intermediate=3/2", "copy", None),
    ("qwen3_moe_mixed", "--depth=2x --grow=hidden=2x", "copy", None),
    ("granitemoehybrid", "--factor=2", "copy", ("k_proj", "v_proj")),  # an infinity in its config
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("variant", "growth", "scaling", "anew"), CASES)
def test_moments_are_those_of_the_wide_model(
    variant: str, growth: str, scaling: str, anew: tuple[str, ...] | None, narrow: Save, tmp_path: Path
) -> None:
    if variant not in VARIANTS:
        variant = next(name for name in VARIANTS if name.startswith("gemma3"))
    wide = tmp_path / "wide"
    done = widen(str(narrow(variant)), str(wide), *growth.split(), "--scaling", scaling, "--optimizer", "keep")
    assert done.exit_code == 0, done.output
    model, optimizer = trained(wide)
    own = by_name(model, optimizer.state_dict())
    grown = by_name(model, torch.load(wide / "optimizer.pt", weights_only=True))
    missing = {name for name in own if name not in grown}
    if anew is not None:
        assert {name.split(".")[-2] for name in missing} == {*anew}, done.output
    if "nothing is known" in done.output:
        own = unknown_left_out(own, grown)
    if "--depth" in growth:
        # New layers alone begin anew.
        anew_in = {"1", "3"} if "--experts" not in growth else {"0", "1", "2"}
        assert {name.split(".")[2] for name in missing} == anew_in
    assert largest_error(grown, own) < 1e-10
    assert all(entry["step"] == 3 for entry in grown.values())


@pytest.mark.usefixtures("here")
def test_the_largest_squares_of_amsgrad(tmp_path: Path) -> None:
    source, wide = tmp_path / "narrow", tmp_path / "wide"
    models.build("llama_mha", torch.float64).save_pretrained(source)
    torch.save(trained(source, amsgrad=True)[1].state_dict(), source / "optimizer.pt")
    done = widen(str(source), str(wide), "--factor=2", "--scaling=copy", "--optimizer=keep")
    assert done.exit_code == 0, done.output
    model, optimizer = trained(wide, amsgrad=True)
    grown = by_name(model, torch.load(wide / "optimizer.pt", weights_only=True))
    assert all({*entry} == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} for entry in grown.values())
    assert largest_error(grown, by_name(model, optimizer.state_dict())) < 1e-10


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("variant", ["llama_mha", "mixtral"])
def test_a_wrong_factor_shows(narrow: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    right = gradients.GradientBuilder.leaf_scale
    monkeypatch.setattr(
        gradients.GradientBuilder,
        "leaf_scale",
        lambda self, path, role: right(self, path, role) ** (-1 if role == "out" else 1),
    )
    assert (
        widen(str(narrow(variant)), str(tmp_path / "v"), "--factor=2", "--scaling=copy", "--optimizer=keep").exit_code
        == 0
    )
    model, optimizer = trained(tmp_path / "v")
    grown = by_name(model, torch.load(tmp_path / "v" / "optimizer.pt", weights_only=True))
    assert largest_error(grown, by_name(model, optimizer.state_dict())) > 0.1


@pytest.mark.usefixtures("here")
def test_new_parameters_are_marked_and_reset(narrow: Save, tmp_path: Path) -> None:
    mask, words = tmp_path / "new.safetensors", ("--factor=2", "--scaling=copy")
    done = widen(
        str(narrow("llama_mha")), str(tmp_path / "w"), *words, "--optimizer=reset-new", f"--new-parameters={mask}"
    )
    assert done.exit_code == 0, done.output
    assert "of the moments of new entries they begin at zero" in done.output
    new = load_file(mask)
    wide, old = load_file(tmp_path / "w" / "model.safetensors"), load_file(narrow("llama_mha") / "model.safetensors")
    assert {name: flags.shape for name, flags in new.items()} == {name: tensor.shape for name, tensor in wide.items()}
    assert all((~new[name]).sum() == tensor.numel() for name, tensor in old.items())
    model = models.load(tmp_path / "w", torch.float64)
    for name, entry in by_name(model, torch.load(tmp_path / "w" / "optimizer.pt", weights_only=True)).items():
        assert not entry["exp_avg"][new[name]].any()
        assert entry["exp_avg_sq"][~new[name]].any()


@pytest.mark.usefixtures("here")
def test_what_cannot_be_grown_is_refused(narrow: Save, tmp_path: Path) -> None:
    folder = tmp_path / "n"
    models.build("llama_mha", torch.float64).save_pretrained(folder)
    out = str(tmp_path / "w")
    assert "optimizer.pt: is not there" in widen(str(folder), out, "--optimizer=keep").output
    unequal = widen(str(folder), out, "--optimizer=keep", "--split=uneven")
    assert "--optimizer keep: does not go together with --split uneven; widen in a run of its own" in unequal.output
    (folder / "optimizer.pt").touch()
    other = widen(str(folder), out, "--optimizer=keep", "--depth=drop:0", "--allow-approximate")
    assert "the result computes another function (--depth drop:0), whose gradients do not follow" in other.output
    model = models.load(folder, torch.float64)
    for optimizer, told in (
        (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "only Adam's and AdamW's are grown"),
        (torch.optim.AdamW(list(model.parameters())[1:], lr=0.1), "are no order of LlamaForCausalLM's that is known"),
    ):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        done = widen(str(folder), out, "--optimizer=keep")
        assert done.exit_code == 1
        assert told in done.output
    assert not Path(out).exists()


def test_a_mask_never_goes_where_something_else_is(tmp_path: Path) -> None:
    folder, out = tmp_path / "n", tmp_path / "w"
    models.build("llama_mha", torch.float64).save_pretrained(folder)
    file = folder / "model.safetensors"
    for source, target, mask, told in (
        (folder, out, out, "is where the weights go"),
        (folder, out, out / "new.safetensors", "would be taken for weights in the model's folder"),
        (folder, out, folder / "new.safetensors", "would be taken for weights in the model's folder"),
        (file, tmp_path / "w.safetensors", tmp_path / "w.safetensors", "is where the weights go"),
        (file, tmp_path / "w.safetensors", tmp_path / "w.config.json", "is where the config goes"),
    ):
        done = widen(str(source), str(target), f"--new-parameters={mask}", "--force")
        assert (done.exit_code, done.stderr) == (1, f"--new-parameters {mask}: {told}; choose another place\n")
    assert [path.name for path in tmp_path.iterdir()] == ["n"]
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("module", "family", "variant"),
    [
        (families_encoders, "electra-unprojected", "electra_unprojected"),
        (families_encoders, "deberta-v2", "deberta"),
        (families_encoders, "bart", "bart"),
        (families_llama, "mixtral", "mixtral"),
        (families_hybrids, "granitemoehybrid", "granitemoehybrid_dense"),
    ],
)
def test_gradients_are_what_the_plan_says(module: Any, family: str, variant: str, tmp_path: Path) -> None:
    """Post-norm stacks read by first copies alone, whose embeddings no rule names as the stream; experts;
    steps of a scan, of which no rule says who reads them."""
    described = next(each for each in module.FAMILIES if each.name == family).variants[variant]
    found = checked(described, "factor=2", "quiet", tmp_path, {})
    assert found.known > 10
    assert found.error < 1e-9, found.tensor


def test_the_state_of_other_weights_goes_with_them(tmp_path: Path) -> None:
    models.build("llama_mha", torch.float32).save_pretrained(tmp_path / "n")
    for words in ([], ["--force"]):
        assert widen(str(tmp_path / "n"), str(tmp_path / "w"), *words).exit_code == 0
        assert not (tmp_path / "w" / "optimizer.pt").exists()
        (tmp_path / "w" / "optimizer.pt").touch()
        (tmp_path / "w" / "notes.txt").touch()


def test_a_trainer_goes_on(tmp_path: Path) -> None:
    import transformers

    def trainer(folder: Path, steps: int) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3,
            report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        rows = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(16)]
        return transformers.Trainer(model, arguments, train_dataset=rows)

    models.build(replace(models.VARIANTS["llama_mha"]), torch.float32).save_pretrained(tmp_path / "n")
    trainer(tmp_path / "n", 2).train()
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "run" / "checkpoint-500")
    # The commands of docs/growth.md, as they stand there.
    text = Path(__file__).parents[1].joinpath("docs", "growth.md").read_text(encoding="utf-8")
    commands = re.findall(r"```sh\n(.*?)```", text[text.index("## Optimizer state") :], flags=re.DOTALL)[0]
    done = shell(commands, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "anew" / "checkpoint-500" / "optimizer.pt").exists()
    assert (tmp_path / "new.safetensors").exists()
    wide = tmp_path / "wide" / "checkpoint-500"
    going = trainer(wide, 4)
    going.train(resume_from_checkpoint=str(wide))
    assert going.state.global_step == 4
    assert {float(entry["step"]) for entry in going.optimizer.state_dict()["state"].values()} == {4.0}
