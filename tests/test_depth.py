"""--depth: more layers under the same function, or others by hand, on files; run by transformers in float64 and by llama.cpp."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import families_encoders
import families_llama
import families_older
import families_wrappers
import gguf_families
import models
import numpy as np
import peft
import pytest
import torch
from click.testing import CliRunner
from llama_cpp import log_probabilities
from sweeping import interrupted_after
from test_gguf_lossless import PROMPTS as SPOKEN
from test_gguf_lossless import cut

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.options import Options
from widen_cli.rebuild import depth
from widen_cli.rebuild.layers_wished import parse_depth
from widen_cli.verification import verify
from widen_cli.writing import run

FAMILIES = (
    *families_encoders.FAMILIES,
    *families_llama.FAMILIES,
    *families_older.FAMILIES,
    *families_wrappers.FAMILIES,
)
VARIANTS = models.VARIANTS | {name: variant for family in FAMILIES for name, variant in family.variants.items()}
PROMPTS = [[5, 9, 17, 33, 70, 21, 8, 55, 13], [3]]
Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Save:
    root = tmp_path_factory.mktemp("narrow")

    @cache
    def saved(variant: str) -> Path:
        models.build(VARIANTS[variant], torch.float64).save_pretrained(root / variant, max_shard_size="40KB")
        return root / variant

    return saved


def deepen(source: Path, target: Path, *wishes: str, **options: Any) -> Job:
    job = prepare(Options(str(source), str(target), depth=wishes, **options))
    run(job, lambda nbytes: None)
    return job


def error(variant: str, source: Path, job: Job, target: Path) -> float:
    inputs, plan = VARIANTS[variant].inputs, job.plan
    one, other = (models.outputs(path, torch.float64, inputs=inputs) for path in (source, target))
    scale = float(plan.scales[plan.output]) if plan.output in plan.scales else 1.0
    return models.relative_error(one, other, {name: scale for name in other if name.endswith("last_hidden_state")})


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("variant", "wishes", "factor"),
    [
        ("llama_biases", ("2x",), None),
        ("qwen3_sliding", ("+3",), 2),
        ("gemma3_text", ("2x",), 2),
        ("gpt2", ("5",), 2),
        ("gpt_neox", ("+1@0",), None),
        ("olmo2", ("2x",), 2),
        ("mixtral", ("+1",), 2),
        ("phi", ("2x",), None),
        ("modernbert", ("2x",), None),
        ("deepseek_v3", ("2x",), None),
        ("minicpm3", ("+1",), 2),
        ("gpt_neo", ("+1@0",), None),
        ("t5", ("encoder:+1", "decoder:2x"), 2),
        ("whisper", ("decoder:+2@end",), None),
        ("jamba", ("+2@end",), None),
        ("llava_qwen2", ("+1@0",), 2),
        ("bert2gpt2", ("decoder:+1@0",), None),
    ],
)
def test_the_function_is_kept(
    variant: str, wishes: tuple[str, ...], factor: int | None, narrow: Save, tmp_path: Path
) -> None:
    source, target = narrow(variant), tmp_path / "deep"
    job = deepen(source, target, *wishes, factor=factor)
    assert error(variant, source, job, target) <= 1e-12
    assert not verify(Options(str(source), str(target)), lambda nbytes: None).differences


def test_a_block_that_writes_the_stream_shows(narrow: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = depth.silenced
    monkeypatch.setattr(depth, "silenced", lambda *given: {name for name in found(*given) if "down_proj" not in name})
    job = deepen(narrow("llama_biases"), tmp_path / "deep", "2x")
    assert error("llama_biases", narrow("llama_biases"), job, tmp_path / "deep") > 1e-3


def test_what_is_written(narrow: Save, tmp_path: Path) -> None:
    deepen(narrow("qwen3_sliding"), tmp_path / "deep", "+2@0", max_shard_size="50KB")
    assert config(tmp_path / "deep")["num_hidden_layers"] == 4
    assert config(tmp_path / "deep")["layer_types"] == [*["full_attention"] * 3, "sliding_attention"]
    with torch.no_grad():
        old, new = (
            models.load(folder, torch.float64).state_dict() for folder in (narrow("qwen3_sliding"), tmp_path / "deep")
        )
    for number, source in enumerate((0, 0, 0, 1)):
        for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj", "input_layernorm"):
            stored = old[f"model.layers.{source}.{name}.weight"]
            silent = number in (1, 2) and name in ("self_attn.o_proj", "mlp.down_proj")
            assert torch.equal(new[f"model.layers.{number}.{name}.weight"], stored * (0 if silent else 1))


def test_a_rule_gives_way_to_the_list(narrow: Save, tmp_path: Path) -> None:
    """A layer that moves off its place in a pattern stays what it was."""
    source = edited(narrow("gemma3_text"), tmp_path / "narrow", "layer_types")
    job = deepen(source, tmp_path / "deep", "+1@0")
    written = config(tmp_path / "deep")
    assert written["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert error("gemma3_text", source, job, tmp_path / "deep") == 0
    ruled = edited(tmp_path / "deep", tmp_path / "ruled", "layer_types")
    assert error("gemma3_text", source, job, ruled) > 1e-3


def edited(source: Path, target: Path, *dropped: str, **values: Any) -> Path:
    """A copy of a folder with some keys of its config left out, and others in it."""
    shutil.copytree(source, target)
    kept = {key: value for key, value in config(source).items() if key not in dropped}
    (target / "config.json").write_text(json.dumps(kept | values))
    return target


def test_names_of_layers_in_the_config_follow(narrow: Save, tmp_path: Path) -> None:
    kept = ["lm_head", "model.layers.0.mlp", "model.layers.1.self_attn.q_proj", "layers.10", "model.layers.*.self_attn"]
    quantised = {"quant_method": "fp8", "weight_block_size": [4, 4], "modules_to_not_convert": kept}
    source = edited(narrow("llama_biases"), tmp_path / "narrow", quantization_config=quantised)
    deepen(source, tmp_path / "deep", "+1@0")
    assert config(tmp_path / "deep")["quantization_config"]["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp",
        "model.layers.1.mlp",
        "model.layers.2.self_attn.q_proj",
        "layers.11",
        "model.layers.*.self_attn",
    ]


def test_a_list_that_no_map_knows_is_told(tmp_path: Path) -> None:
    base = VARIANTS["llama"]
    variant = replace(base, config={**base.config, "num_hidden_layers": 3})
    models.build(variant).save_pretrained(tmp_path / "saved")
    source = edited(tmp_path / "saved", tmp_path / "narrow", eos_token_id=[1, 2, 3], other={"skips": [0, 1, 0]})
    job = prepare(Options(str(source), str(tmp_path / "deep"), depth=("+1",)))
    assert job.warnings == (
        "'other.skips' holds as many values as there were layers, and no map says that it goes by them; "
        "it is left as it is: correct it if it does",
    )


def test_text_is_generated_with_a_cache(narrow: Save, tmp_path: Path) -> None:
    deepen(narrow("gemma3_text"), tmp_path / "deep", "2x")
    prompt = torch.tensor([PROMPTS[0]])
    said = [
        models.load(folder, torch.float64).generate(prompt, max_new_tokens=6, do_sample=False)
        for folder in (narrow("gemma3_text"), tmp_path / "deep")
    ]
    assert torch.equal(*said)


def by_hand(folder: Path, order: list[int]) -> models.Outputs:
    """The outputs of a model whose list of layers was laid anew in memory."""
    with models.Float64Throughout():
        model = models.load(folder, torch.float64)
        model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in order])
        model.config.num_hidden_layers = len(order)
        model.config.layer_types = [model.config.layer_types[layer] for layer in order]
        with torch.inference_mode():
            return {"logits": model(**models.fixed_inputs(model.config), use_cache=False).logits.numpy()}


@pytest.mark.parametrize(
    ("wish", "order"),
    [("0-1,0-1", [0, 1, 0, 1]), ("1,0", [1, 0]), ("drop:0", [1])],
    ids=["stacked", "swapped", "dropped"],
)
def test_copies_and_gaps_are_what_they_say(wish: str, order: list[int], narrow: Save, tmp_path: Path) -> None:
    source = narrow("gemma3_text")
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(source), str(tmp_path / "deep"), depth=(wish,)))
    assert str(refused.value) == (
        f"--depth {wish}: copies of layers, and missing ones, change the function; --allow-approximate takes that, "
        "and 2x, +N or a larger total keep it"
    )
    job = deepen(source, tmp_path / "deep", wish, allow_approximate=True)
    assert job.plan.approximate == f"--depth {wish}"
    found = models.outputs(tmp_path / "deep", torch.float64)
    assert models.relative_error(by_hand(source, order), {"logits": found["logits"]}) <= 1e-15
    assert not verify(Options(str(source), str(tmp_path / "deep")), lambda nbytes: None).differences


def test_a_pipe_gives_the_bytes_of_a_file(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "narrow")
    file = tmp_path / "narrow" / "model.safetensors"
    config_of = ["--config", str(tmp_path / "narrow" / "config.json")]
    runner = CliRunner()
    for wish in (("--depth", "2x", "--factor", "2"), ("--depth", "drop:1", "--allow-approximate")):
        given = [*config_of, *wish]
        assert (
            runner.invoke(cli, ["convert", str(file), str(tmp_path / "a.safetensors"), *given, "--force"]).exit_code
            == 0
        )
        piped = runner.invoke(
            cli, ["convert", "-", str(tmp_path / "b.safetensors"), *given, "--force"], file.read_bytes()
        )
        assert piped.exit_code == 0, piped.output
        assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert "layers 2 -> 1, copy; approximate, by --depth drop:1" in piped.stderr.replace("orthogonal", "copy")


SCALED = (
    "--depth 2x: layer 1 would be layer 2, which is of another kind: scale_attn_by_inverse_layer_idx divides the attention of "
    "each layer by its number; +N@end moves no layer"
)
POST_LN = (
    "--depth 2x: no layer of 'bert' passes the stream on as it is: its norms stand behind the sums, and a LayerNorm of what "
    "another has given is not that again; copies of layers, such as --depth 0-1,0-1, change the function and need --allow-approximate"
)


@pytest.mark.parametrize(
    ("variant", "wish", "text"),
    [
        ("bert", "2x", POST_LN),
        ("t5", "2x", "has 2 stacks of layers, transformer.encoder.block and transformer.decoder.block; name one, as in --depth decoder:2x"),
        ("t5", "decodr:2x", "'decodr' is in the name of no stack of layers"),
        ("bart", "decoder:2x", "no layer of 'bart' passes the stream on as it is: its norms stand behind the sums"),
        ("opt_350m", "+1", "no layer of 'opt' passes the stream on as it is: its norms stand behind the sums"),
        ("bert2gpt2", "encoder:+1", "no layer of 'encoder-decoder' passes the stream on as it is: its norms stand behind the sums"),
        ("gpt2_layer_scaled", "2x", SCALED),
        ("albert", "2x", "its layers are one group of weights that is passed num_hidden_layers times; more of it is another function"),
        ("jamba", "+3", "which is of another kind: attn_layer_period and attn_layer_offset say which have attention"),
        ("llama_biases", "2", "the model has as many already; give a larger total, or drop:1 and the like"),
        ("llama_biases", "+1@7", "there is no layer 7 to put others behind; the last one is 1"),
        ("llama_biases", "0-2", "there is no layer 2; they are numbered 0 to 1, and 0-2 includes both ends"),
        ("llama_biases", "drop:0-1", "no layer would be left of 2; name fewer"),
    ],
)  # fmt: skip
def test_what_is_refused(variant: str, wish: str, text: str, narrow: Save, tmp_path: Path) -> None:
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(narrow(variant)), str(tmp_path / "deep"), depth=(wish,), allow_approximate=True))
    assert text in str(refused.value)


def test_a_decoder_within_another_model_keeps_its_numbers(narrow: Save, tmp_path: Path) -> None:
    decoder = {**config(narrow("bert2gpt2"))["decoder"], "scale_attn_by_inverse_layer_idx": True}
    source = edited(narrow("bert2gpt2"), tmp_path / "narrow", decoder=decoder)
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(source), str(tmp_path / "deep"), depth=("decoder:2x",)))
    assert str(refused.value) == SCALED.replace("--depth 2x", "--depth decoder:2x")


BASE = (
    "--depth 2x: an adapter's layers are those of its base; a deeper base takes one that is trained on it, "
    "or merge the adapter into its base first"
)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"base": "{llama}"}, BASE),
    ],
    ids=["base"],
)
def test_what_takes_a_run_of_its_own(asked: dict[str, Any], text: str, narrow: Save, tmp_path: Path) -> None:
    models.save("llama", tmp_path / "narrow")
    source = tmp_path / "narrow"
    if "base" in asked:
        asked, source = {"base": str(source)}, tmp_path / "adapter"
        adapted = peft.get_peft_model(
            models.load(tmp_path / "narrow", torch.float32), peft.LoraConfig(target_modules=["q_proj"])
        )
        adapted.save_pretrained(source)
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(source), str(tmp_path / "deep"), depth=("2x",), **asked))
    assert str(refused.value) == text


@pytest.mark.parametrize("text", ["", "x", "1x", "+0", "0", "-3", "3-", "drop:", ":2x", "+2@", "2x,3", "a b:2x"])
def test_wishes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(WidenError, match="--depth"):
        parse_depth((text,))


def test_identity_layers_are_spread_as_llama_pro_does() -> None:
    (wish,) = parse_depth(("+2",))
    assert [(slot.source, slot.passes) for slot in wish.slots(4)] == [
        (0, False), (1, False), (1, True), (2, False), (3, False), (3, True),
    ]  # fmt: skip


def test_an_interrupted_run_goes_on_with_the_same_layers_only(narrow: Save, tmp_path: Path) -> None:
    deepen(narrow("llama_biases"), tmp_path / "whole", "2x", max_shard_size="20KB")
    options = Options(
        str(narrow("llama_biases")), str(tmp_path / "deep"), depth=("2x",), max_shard_size="20KB", threads=1
    )
    with pytest.raises(KeyboardInterrupt):
        run(prepare(options), interrupted_after(100_000))
    with pytest.raises(WidenError) as refused:
        prepare(replace(options, resume=True, depth=("+2@end",)))
    assert "was made with other options: --depth 2x --max-shard-size 20KB, where this run has --depth +2@end" in str(
        refused.value
    )
    report = run(prepare(replace(options, resume=True)), lambda nbytes: None)
    assert report.notes[0].startswith("resumed: ")
    whole, deep = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "deep"))
    assert whole == deep


def test_the_width_stays_and_a_recipe_says_it(narrow: Save, tmp_path: Path) -> None:
    source = str(narrow("t5"))
    asked = ["--depth", "encoder:+1", "--depth", "decoder:2x"]
    shown = CliRunner().invoke(cli, ["convert", source, "--dry-run", *asked])
    assert shown.stdout.startswith("map t5: layers 2 -> 3, layers 3 -> 6\n"), shown.stdout
    assert shown.stderr == ""
    printed = CliRunner().invoke(cli, ["convert", source, "--dry-run", "--as-recipe", *asked]).stdout
    assert printed == "depth:\n- encoder:+1\n- decoder:2x\n"
    (tmp_path / "deep.yaml").write_text(printed)
    again = CliRunner().invoke(cli, ["convert", source, "--dry-run", "--recipe", str(tmp_path / "deep.yaml")])
    assert again.stdout == shown.stdout


def test_another_model_is_compared_with_the_layers_asked_for(narrow: Save, tmp_path: Path) -> None:
    source, like = str(narrow("llama_biases")), tmp_path / "like"
    deepen(narrow("llama_biases"), like, "2x", factor=2)
    for wishes, told in (((), 1), (("2x",), 0)):
        job = prepare(Options(source, str(tmp_path / "deep"), depth=wishes, like=str(like)))
        assert sum("layers" in warning for warning in job.warnings) == told, job.warnings


@pytest.mark.parametrize(
    ("name", "wish", "factor"),
    [("qwen3", "+1", 2), ("gemma3", "+1@end", None), ("olmo2", "2x", None), ("deepseek2", "2x", None)],
)
def test_gguf_in_llama_cpp(name: str, wish: str, factor: int | None, tmp_path: Path) -> None:
    source = gguf_families.write(name, tmp_path / "narrow.gguf")
    deepen(source, tmp_path / "deep.gguf", wish, factor=factor)
    one, other = (log_probabilities(path, PROMPTS) for path in (source, tmp_path / "deep.gguf"))
    assert np.abs(one - other).max() <= 2e-4
    assert not verify(Options(str(source), str(tmp_path / "deep.gguf")), lambda nbytes: None).differences


def test_quantised_blocks_in_llama_cpp(tmp_path: Path) -> None:
    source = cut(tmp_path / "narrow.gguf", False, {})
    deepen(source, tmp_path / "deep.gguf", "2x")
    one, other = (log_probabilities(path, SPOKEN) for path in (source, tmp_path / "deep.gguf"))
    assert np.abs(one - other).max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "wish", "text"),
    [
        ("gemma2", "2x", "which is of another kind: every second has no window in llama.cpp; +N@end moves no layer"),
        ("gemma2-27b", "+1@end", "is of another kind: llama.cpp scales the attention of 46 layers otherwise"),
        ("bert", "2x", "no layer of 'bert' passes the stream on as it is"),
    ],
)  # fmt: skip
def test_gguf_that_is_refused(name: str, wish: str, text: str, tmp_path: Path) -> None:
    source = gguf_families.write(name, tmp_path / "narrow.gguf")
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(source), str(tmp_path / "deep.gguf"), depth=(wish,)))
    assert text in str(refused.value)
