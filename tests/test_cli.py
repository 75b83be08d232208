"""The command as a person or a script meets it: exit codes, streams, signals, files (the rows of shared/cli.tsv)."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import VARIANTS, save
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from small_llama import CONFIG, TYPES, llama

import widen_cli
from widen_cli.maps import map_names

COMMAND = [sys.executable, "-m", "widen_cli"]
ROOT = Path(widen_cli.__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with in.safetensors and config.json, which widens without any rounding."""
    save_file(llama(), tmp_path / "in.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory."""
    path = tmp_path / "model"
    path.mkdir()
    save_file(llama(), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    return path


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM", "LC_ALL")}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


def start(cwd: Path, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Starts the command in a folder; `env` adds to the environment."""
    env = environment(**options.pop("env", {}))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, env=env, **{**pipes, **options})


def finish(process: subprocess.Popen[Any]) -> subprocess.CompletedProcess[Any]:
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def widen(cwd: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Runs the command to its end."""
    return finish(start(cwd, *arguments, **options))


def shell(cwd: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a bash script in which `widen` is the command."""
    command = " ".join(COMMAND)
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; widen() {{ {command} "$@"; }}; {script}'],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state(folder: Path) -> dict[str, tuple[str, float]]:
    """The content and time of every file below a folder, links followed."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (digest(path), path.stat().st_mtime) for path in found}


def content(folder: Path) -> dict[str, str]:
    return {name: sha for name, (sha, _) in state(folder).items()}


@pytest.fixture
def wide(folder: Path) -> bytes:
    """The bytes that widening in.safetensors gives."""
    assert widen(folder, "in.safetensors", "reference.safetensors").returncode == 0
    data = (folder / "reference.safetensors").read_bytes()
    for made in ("reference.safetensors", "reference.config.json"):
        (folder / made).unlink()
    return data


# Help and usage.


def test_help(tmp_path: Path) -> None:
    done = widen(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: widen-ckpt ")
    codes = done.stdout.partition("Exit codes:")[2].splitlines()
    assert [line.split()[0] for line in codes if line.strip()] == ["0", "1", "2", "3", "4", "130"]


@pytest.mark.parametrize("reader", ["head -1", "true"])
def test_help_into_a_pipe_that_closes(tmp_path: Path, reader: str) -> None:
    done = shell(tmp_path, f"widen convert --help | {reader}; echo ${{PIPESTATUS[0]}} >&2")
    assert "Traceback" not in done.stderr
    assert done.stderr.split()[-1] in ("0", "141")
    assert "Exception ignored" not in done.stderr


def test_no_arguments(tmp_path: Path) -> None:
    done = widen(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: widen-ckpt ")
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--frobnicate", "in.safetensors", "out.safetensors"],
        ["in.safetensors", "out.safetensors", "--frobnicate"],
        ["in.safetensors"],
        ["convert"],
        ["in.safetensors", "out.safetensors", "--factor", "1"],
        ["in.safetensors", "out.safetensors", "--factor", "two"],
        ["in.safetensors", "out.safetensors", "--scaling", "best"],
        ["in.safetensors", "out.safetensors", "--dtype", "I8"],
        ["in.safetensors", "-", "--json"],
        ["in.safetensors", "out.safetensors", "--grow", ""],
        ["in.safetensors", "out.safetensors", "--grow", "hidden"],
        ["in.safetensors", "out.safetensors", "--grow", "hidden=2,hidden=3"],
        ["in.safetensors", "out.safetensors", "--set", "nothing"],
        ["in.safetensors", "out.safetensors", "--set", "vocab_size=16", "--set", "=3"],
        ["in.safetensors", "out.safetensors", "--max-shard-size", "5XB"],
        ["missing.safetensors", "out.safetensors", "--max-shard-size", ""],
    ],
)
def test_wrong_usage(folder: Path, arguments: list[str]) -> None:
    """Also where the text of an option cannot be read, and whatever else is wrong; a dry run is no excuse."""
    before = state(folder)
    for dry in [], ["--dry-run"]:
        if dry and arguments in (["in.safetensors"], ["in.safetensors", "-", "--json"]):
            continue  # of these two only the real run is wrong
        done = widen(folder, *arguments, *dry)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("Usage: widen-ckpt convert ")
        assert len(done.stderr.splitlines()) <= 4
    assert state(folder) == before


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        (
            "--grow",
            "",
            "--grow : '' says of no axis what it grows to; write for example hidden=2x, ",
        ),
        ("--set", "nothing", "--set nothing: expected key=value, such as --set num_attention_heads=12"),
        ("--max-shard-size", "5XB", "--max-shard-size '5XB': is no size; write for example 5GB, "),
    ],
)
def test_wrong_usage_says_what_was_expected(folder: Path, option: str, text: str, message: str) -> None:
    done = widen(folder, "in.safetensors", "out.safetensors", option, text)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"Error: {message}")


def test_glob_slip(tmp_path: Path) -> None:
    """An unquoted pattern names three parts, and the last of them would be taken for the output."""
    for part in (1, 2, 3):
        save_file(llama(), tmp_path / f"part-0000{part}-of-00003.safetensors")
    before = state(tmp_path)
    done = shell(tmp_path, "widen part-0000*-of-00003.safetensors out.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("widen convrt in.safetensors out.safetensors", 2, "neither a command nor a file: convrt (did you mean 'convert'?)"),
        ("widen verfy in.safetensors out.safetensors", 2, "neither a command nor a file: verfy (did you mean 'verify'?)"),
        (
            "widen --factor 1.5 in.safetensors out.safetensors", 2,
            "Invalid value for '--factor': '1.5' is no whole number from 2 to 65536; --grow says by how much single axes grow",
        ),
        (
            "widen --dry-run --grow hidden=1 in.safetensors", 0,
            "warning: nothing grows: every factor asked for is 1, so this only writes the model again",
        ),
        (
            "widen --base in.safetensors in.safetensors out.safetensors", 1,
            "in.safetensors: is a model, not a LoRA adapter (it has 'lm_head.weight'); leave --base out",
        ),
    ],
)  # fmt: skip
def test_slips(folder: Path, line: str, code: int, told: str) -> None:
    done = shell(folder, line)
    assert done.returncode == code
    assert told in [text.removeprefix("Error: ") for text in done.stderr.splitlines()]
    assert not (folder / "out.safetensors").exists()


def test_one_of_several_inputs_is_damaged(folder: Path, model: Path, wide: bytes) -> None:
    shutil.copy(folder / "in.safetensors", folder / "first.safetensors")
    (folder / "second.safetensors").write_bytes((folder / "in.safetensors").read_bytes()[:-1])
    names = ("first.safetensors", "second.safetensors", "model/")
    done = widen(folder, *names, "--into", "wide")
    assert (done.returncode, done.stdout) == (4, "")
    said = done.stderr.splitlines()
    assert said[1].startswith("second.safetensors: truncated: 1 bytes missing")
    assert said[-1] == "1 of 3 inputs failed: second.safetensors"
    assert (folder / "wide/first.safetensors").read_bytes() == wide
    assert sorted(os.listdir(folder / "wide")) == ["first.config.json", "first.safetensors", "model"]
    assert {*os.listdir(folder / "wide/model")} == {*os.listdir(model)}
    assert widen(folder, *names[::2], "--into", "both").returncode == 0
    assert widen(folder, names[1], "--into", "none").returncode == 1
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    "arguments", [("-", "in.safetensors"), ("in.safetensors", "./in.safetensors"), ("in.safetensors", "--json")]
)
def test_what_does_not_go_with_several_inputs(folder: Path, arguments: tuple[str, ...]) -> None:
    before = state(folder)
    assert widen(folder, *arguments, "--into", "wide").returncode == 2
    assert state(folder) == before


@pytest.mark.parametrize("spelling", ["fp16", "half", "float16"])
def test_types_as_people_call_them(folder: Path, spelling: str) -> None:
    for name, type in (("one", "F16"), ("other", spelling)):
        assert widen(folder, "in.safetensors", f"{name}.safetensors", "--dtype", type).returncode == 0
    assert (folder / "one.safetensors").read_bytes() == (folder / "other.safetensors").read_bytes()


def test_version(tmp_path: Path) -> None:
    done = widen(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"widen-ckpt, version {widen_cli.__version__}\n", "")


def test_maps_are_listed(tmp_path: Path) -> None:
    done = widen(tmp_path, "maps")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == map_names()
    assert all(len(line.split()) > 1 for line in done.stdout.splitlines())


def test_a_map_is_printed(tmp_path: Path) -> None:
    done = widen(tmp_path, "maps", "llama")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "configs" / "llama.yaml").read_text()


def test_an_unknown_map(tmp_path: Path) -> None:
    done = widen(tmp_path, "maps", "lama")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "map 'lama': there is no such map (did you mean 'llama'?); `widen-ckpt maps` lists them\n"


# What comes out where.


def test_a_plain_run(folder: Path) -> None:
    done = widen(folder, "in.safetensors", "out.safetensors")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        "out.safetensors: llama, hidden x2, intermediate x2, heads x2, kv_heads x2, copy; "
        "function-exact and bit-exact; none of 760 stored values was rounded\n"
    )
    assert load_file(folder / "out.safetensors")["model.norm.weight"].shape == (16,)
    with safe_open(folder / "out.safetensors", "np") as opened:
        metadata = opened.metadata()
    assert metadata.keys() == {"format", "widen_ckpt"}
    assert metadata["format"] == "pt"
    assert json.loads(metadata["widen_ckpt"])["said"] == {"factor": 2, "scaling": "copy"}
    changed = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert json.loads((folder / "out.config.json").read_text()) == CONFIG | changed
    assert json.loads((folder / "config.json").read_text()) == CONFIG


def test_convert_is_the_default_command(folder: Path, wide: bytes) -> None:
    assert widen(folder, "convert", "in.safetensors", "out.safetensors").returncode == 0
    assert (folder / "out.safetensors").read_bytes() == wide


def test_rounding_is_said(folder: Path) -> None:
    save_file(llama("F32"), folder / "in.safetensors")
    done = widen(folder, "in.safetensors", "out.safetensors")
    assert done.returncode == 0
    summary = done.stderr.splitlines()[-1]
    assert summary.startswith("out.safetensors: llama, ")
    assert "; function-exact; " in summary
    assert " of 760 stored values were rounded, in " in summary


@pytest.mark.parametrize("flag", ["-q", "--quiet", "-qq"])
def test_quiet(folder: Path, flag: str) -> None:
    done = widen(folder, flag, "in.safetensors", "out.safetensors")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_quiet_keeps_rounding_until_it_is_said_twice(folder: Path) -> None:
    save_file(llama("F32"), folder / "in.safetensors")
    once = widen(folder, "-q", "in.safetensors", "once.safetensors")
    (warning,) = once.stderr.splitlines()
    assert warning.startswith("warning: once.safetensors: ")
    assert "stored values were rounded" in warning
    twice = widen(folder, "-qq", "in.safetensors", "twice.safetensors")
    assert (once.returncode, twice.returncode, once.stdout, twice.stdout, twice.stderr) == (0, 0, "", "", "")


def test_quiet_does_not_hide_a_refusal(folder: Path) -> None:
    done = widen(folder, "-qq", "in.safetensors", "in.safetensors", "--force")
    assert done.returncode == 1
    assert done.stderr.startswith("in.safetensors: ")


def on_terminal(
    cwd: Path, *arguments: str, stdout: bool = False, env: Mapping[str, str] | None = None, stdin: Any = None
) -> tuple[int, str]:
    """The exit code and what a terminal shows that is the run's stderr (and stdout, if `stdout`)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, env=environment(**(env or {})), stdin=stdin or subprocess.DEVNULL,
        stdout=theirs if stdout else subprocess.PIPE, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    ready = select.poll()
    ready.register(ours, select.POLLIN)
    with suppress(OSError):
        while ready.poll(30_000) and (data := os.read(ours, 4096)):
            shown += data
    os.close(ours)
    return process.wait(30), shown.decode()


@pytest.mark.parametrize("env", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}])
def test_no_colour_on_a_terminal_that_wants_none(folder: Path, env: dict[str, str]) -> None:
    code, shown = on_terminal(folder, "in.safetensors", "out.safetensors", env=env)
    assert code == 0
    assert "\x1b" not in shown
    assert "function-exact and bit-exact" in shown


def test_no_bar_on_a_dumb_terminal(folder: Path) -> None:
    _, shown = on_terminal(folder, "in.safetensors", "out.safetensors", env={"TERM": "dumb"})
    assert len(shown.replace("\r\n", "\n").splitlines()) == 1
    assert "\r" not in shown.replace("\r\n", "\n")


def test_no_control_characters_without_a_terminal(folder: Path) -> None:
    for arguments in (["--help"], ["in.safetensors", "out.safetensors"], ["in.safetensors", "out.safetensors"]):
        done = widen(folder, *arguments, env={"TERM": "xterm-256color"})
        assert not {"\x1b", "\r"} & set(done.stdout + done.stderr)


def test_json(folder: Path) -> None:
    done = widen(folder, "in.safetensors", "out.safetensors", "--json", "--grow", "hidden=2x,intermediate=3x,heads=2x")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert [tensor["source"] for tensor in found["tensors"]] == list(load_file(folder / "in.safetensors"))
    assert {tensor["source"]: tuple(tensor["new_shape"]) for tensor in found["tensors"]} == {
        name: array.shape for name, array in load_file(folder / "out.safetensors").items()
    }
    assert found["bytes"] == (folder / "out.safetensors").stat().st_size
    assert sum(counted["values"] for counted in found["values"].values()) == 760
    assert found["factors"]["intermediate"] == 3
    assert len(done.stderr.splitlines()) == 1


def test_json_of_a_dry_run(folder: Path) -> None:
    done = widen(folder, "in.safetensors", "-", "--json", "--dry-run")
    found = json.loads(done.stdout)
    assert (done.returncode, found["architecture"], len(found["tensors"])) == (0, "llama", 12)
    assert "values" not in found


# Pipes.


def test_standard_output(folder: Path, wide: bytes) -> None:
    done = widen(folder, "in.safetensors", "-", text=False)
    assert (done.returncode, done.stdout) == (0, wide)
    warning, summary = done.stderr.decode().splitlines()
    assert warning == (
        "warning: in.safetensors: the new config is not written; whatever loads the result needs hidden_size = 16, "
        "intermediate_size = 24, num_attention_heads = 4, num_key_value_heads = 2; --config-out FILE writes it"
    )
    assert summary.startswith("standard output: llama, ")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "in.safetensors"]


def test_the_config_of_a_pipe_goes_where_it_is_told(folder: Path) -> None:
    done = widen(folder, "in.safetensors", "-", "--config-out", "new.json", text=False)
    assert done.returncode == 0
    assert json.loads((folder / "new.json").read_text())["hidden_size"] == 16
    (summary,) = done.stderr.decode().splitlines()
    assert summary.startswith("standard output: llama, ")


def test_a_config_that_goes_nowhere_is_told_in_pipes_of_names_too(folder: Path, wide: bytes) -> None:
    done = shell(folder, "mkfifo p; cat p > o & widen in.safetensors p; wait")
    assert "warning: in.safetensors: the new config is not written; " in done.stderr
    assert (folder / "o").read_bytes() == wide
    assert "warning" not in widen(folder, "-qq", "in.safetensors", "-", text=False).stderr.decode()


@pytest.mark.parametrize(
    ("script", "word"),
    [("widen - out.safetensors <&-", "standard input: is closed"), ("widen in.safetensors - >&-", "closed")],
    ids=["stdin", "stdout"],
)
def test_a_closed_stream_is_told_in_one_line(folder: Path, script: str, word: str) -> None:
    before = state(folder)
    done = shell(folder, script)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert word in line
    assert state(folder) == before


def test_closed_streams_that_are_not_needed(folder: Path, wide: bytes) -> None:
    """A cron job may have none of them; what is opened must not slip into the place of a standard stream."""
    done = shell(folder, "widen in.safetensors out.safetensors <&- >&-")
    (line,) = done.stderr.splitlines()
    assert line.startswith("out.safetensors: llama, ")
    again = shell(folder, "widen in.safetensors again.safetensors <&- >&- 2>&-")
    assert (done.returncode, again.returncode, again.stderr) == (0, 0, "")
    assert (folder / "out.safetensors").read_bytes() == (folder / "again.safetensors").read_bytes() == wide


def test_a_mistyped_input_is_all_there_is_to_say(folder: Path, model: Path) -> None:
    """Whether the output fits depends on what the input is."""
    refused = widen(folder, "modle", "model")
    assert (refused.returncode, refused.stderr) == (1, "modle: no such file (did you mean 'model'?)\n")


def test_a_model_that_turns_nothing_has_no_rotary_way(folder: Path) -> None:
    save(VARIANTS["gpt2"], folder / "gpt2")
    refused = widen(folder, "gpt2", "out", "--grow", "head_dim=2", "--rope", "theta")
    assert (refused.returncode, refused.stderr) == (
        1,
        "--rope theta: 'gpt2' has no rotary positions; leave --rope out\n",
    )


def test_what_the_demo_leaves_follows_the_umask(folder: Path) -> None:
    made = subprocess.run([*COMMAND, "demo", "demo"], cwd=folder, capture_output=True, umask=0o027, timeout=60)
    assert made.returncode == 0
    assert {stat.S_IMODE(file.stat().st_mode) for file in (folder / "demo").rglob("*.*")} == {0o640}


@pytest.fixture
def tied(folder: Path) -> Path:
    """The folder with a config that ties the stored head to an embedding of other values."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("out", ["out.safetensors", "out/"])
def test_tied_weights_that_differ_are_refused_also_in_a_pipe(tied: Path, out: str) -> None:
    """There it is known only at the end, and nothing may be left then."""
    before = state(tied)
    told = (
        "the config ties 'lm_head.weight' to 'model.embed_tokens.weight', but their values differ, and loaders disagree on "
        "which counts; remove 'lm_head.weight', or say --set tie_word_embeddings=false\n"
    )
    piped = shell(tied, f"cat in.safetensors | widen --config config.json - {out}")
    assert (piped.returncode, piped.stdout, piped.stderr) == (1, "", f"standard input: {told}")
    direct = widen(tied, "in.safetensors", out)
    assert (direct.returncode, direct.stderr) == (1, f"in.safetensors: {told}")
    assert state(tied) == before
    assert {path.name for path in tied.iterdir()} == set(before)


def test_tied_weights_that_are_equal_pass_through_a_pipe(tied: Path) -> None:
    tensors = llama()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tied / "in.safetensors")
    assert widen(tied, "in.safetensors", "out.safetensors").returncode == 0
    piped = shell(tied, "cat in.safetensors | widen --config config.json - piped.safetensors")
    assert piped.returncode == 0
    assert (tied / "piped.safetensors").read_bytes() == (tied / "out.safetensors").read_bytes()


def test_tied_weights_in_two_shards_pass_through_a_pipe(tied: Path) -> None:
    """The copies are compared over the whole run and not file by file."""
    tensors = llama()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tied / "x.safetensors")
    piped = shell(tied, "cat x.safetensors | widen --config config.json --max-shard-size 1 - piped/")
    assert piped.returncode == 0, piped.stderr
    assert len(list((tied / "piped").glob("model-*.safetensors"))) > 2


def test_a_terminal_is_no_place_for_a_model(folder: Path) -> None:
    code, shown = on_terminal(folder, "in.safetensors", "-", stdout=True)
    assert code == 1
    assert "terminal" in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_device_of_standard_output(folder: Path, wide: bytes, name: str) -> None:
    before = os.readlink("/dev/stdout")
    done = shell(folder, f"widen in.safetensors {name} > o")
    assert done.returncode == 0
    assert (folder / "o").read_bytes() == wide
    assert os.readlink("/dev/stdout") == before


@pytest.mark.parametrize("out", ["out.safetensors", "-"])
def test_standard_input(folder: Path, wide: bytes, out: str) -> None:
    done = shell(folder, f"cat in.safetensors | widen --config config.json - {out} > o")
    assert done.returncode == 0
    assert (folder / ("o" if out == "-" else out)).read_bytes() == wide


def test_standard_input_that_ends_early(folder: Path) -> None:
    before = state(folder)
    done = shell(folder, "head -c 1500 in.safetensors | widen --config config.json - out.safetensors")
    assert (done.returncode, done.stdout) == (1, "")
    missing = (folder / "in.safetensors").stat().st_size - 1500
    assert done.stderr == f"standard input: truncated: {missing} bytes missing; download or copy it again\n"
    assert state(folder) == before


def test_a_reader_that_goes_away(folder: Path) -> None:
    large = {"model.embed_tokens.weight": (200_000, 8), "lm_head.weight": (200_000, 8)}
    save_file(
        llama() | {name: np.zeros(shape, TYPES["BF16"]) for name, shape in large.items()}, folder / "in.safetensors"
    )
    done = shell(
        folder, "widen --set vocab_size=200000 in.safetensors - | head -c 100 >/dev/null; exit ${PIPESTATUS[0]}"
    )
    assert done.returncode == 141
    assert "Traceback" not in done.stderr


def test_a_fifo_for_output(folder: Path, wide: bytes) -> None:
    done = shell(folder, "mkfifo p; cat p > o & widen in.safetensors p; code=$?; wait; exit $code")
    assert done.returncode == 0
    assert (folder / "o").read_bytes() == wide
    assert (folder / "p").is_fifo()


# Outputs that are there already.


def test_an_existing_output_needs_force(folder: Path, wide: bytes) -> None:
    out = folder / "out.safetensors"
    out.write_bytes(b"old")
    done = widen(folder, "in.safetensors", "out.safetensors")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("out.safetensors: ")
    assert "--force" in done.stderr
    assert out.read_bytes() == b"old"
    assert not (folder / "out.config.json").exists()
    assert widen(folder, "in.safetensors", "out.safetensors", "--force").returncode == 0
    assert out.read_bytes() == wide


def test_an_existing_config_needs_force_too(folder: Path) -> None:
    (folder / "out.config.json").write_text("old")
    done = widen(folder, "in.safetensors", "out.safetensors")
    assert done.returncode == 1
    assert done.stderr.startswith("out.config.json: ")
    assert not (folder / "out.safetensors").exists()


@pytest.mark.parametrize("kind", ["same", "hard link", "link", "config", "config link"])
def test_the_input_is_never_the_output(folder: Path, kind: str) -> None:
    names = {"same": "in.safetensors", "config": "config.json"}
    out = folder / names.get(kind, "out.safetensors")
    if kind == "hard link":
        out.hardlink_to(folder / "in.safetensors")
    elif "link" in kind:
        out.symlink_to("in.safetensors" if kind == "link" else "config.json")
    before = state(folder)
    done = widen(folder, "in.safetensors", out.name, "--force")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{out.name}: is the input ")
    assert state(folder) == before


def test_a_directory_is_never_its_own_output(model: Path) -> None:
    before = state(model)
    for out in ("model", "model/", f"../{model.parent.name}/model"):
        done = widen(model.parent, "model", out, "--force")
        assert done.returncode == 1
        assert state(model) == before


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("in.safetensors", "in.safetensors: is the input in.safetensors "),
        ("config.json", "config.json: is the input config.json "),
        ("hard", "hard: is the input in.safetensors "),
        ("link", "link: is the input config.json "),
        ("out.safetensors", "--config-out out.safetensors: is where the weights go"),
        ("./out.safetensors", "--config-out ./out.safetensors: is where the weights go"),
        ("to out", "--config-out to out: is where the weights go"),
    ],
)
def test_the_config_hits_no_input_and_not_the_weights(folder: Path, target: str, told: str) -> None:
    (folder / "hard").hardlink_to(folder / "in.safetensors")
    (folder / "link").symlink_to("config.json")
    (folder / "to out").symlink_to("out.safetensors")
    before = state(folder)
    done = widen(folder, "in.safetensors", "out.safetensors", "--force", "--config-out", target)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(told)
    assert state(folder) == before


def test_weights_and_config_do_not_go_down_one_pipe(folder: Path) -> None:
    done = widen(folder, "in.safetensors", "-", "--config-out", "-", text=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"--config-out -: is where the weights go" in done.stderr


def test_a_config_of_a_folder_hits_no_file_of_it(model: Path) -> None:
    before = state(model)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        done = widen(model.parent, "model", "out", "--force", "--config-out", f"model/{name}")
        assert done.returncode == 1
        assert done.stderr.startswith(f"model/{name}: is the input model")
    assert state(model) == before
    assert not (model.parent / "out").exists()


def test_a_config_goes_through_a_fifo(folder: Path) -> None:
    done = shell(folder, "mkfifo p; cat p > c & widen in.safetensors out.safetensors --force --config-out p; wait")
    assert done.stderr.startswith("out.safetensors: llama, ")
    assert (folder / "p").is_fifo()
    assert json.loads((folder / "c").read_text())["hidden_size"] == 16
    assert not (folder / "out.config.json").exists()


def null_device(path: Path) -> bool:
    """Makes a device that swallows everything, where that is allowed and such a device can be opened."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.close(os.open(path, os.O_WRONLY))
    except PermissionError:
        return False
    return True


def check_devices(folder: Path) -> None:
    """With --force too a device is written to and stays, never /dev/null itself in a test."""
    null_device(folder / "null")
    for arguments in (["null", "--config-out", "c.json"], ["out.safetensors", "--config-out", "null"], ["null"]):
        assert widen(folder, "in.safetensors", *arguments, "--force").returncode == 0
        assert (folder / "null").is_char_device()
    assert widen(folder, "in.safetensors", "null/", "--force").returncode == 1
    assert (folder / "null").is_char_device()
    assert json.loads((folder / "c.json").read_text())["hidden_size"] == 16


# Where no device can be made nothing is collected, so that there are no skipped tests.
test_a_device_stays_a_device: Callable[..., None] | None = None
with tempfile.TemporaryDirectory() as trial:
    if null_device(Path(trial, "null")):
        test_a_device_stays_a_device = check_devices


def test_an_output_inside_the_input_does_not_nest(model: Path) -> None:
    before = state(model)
    assert widen(model.parent, "model", "model/wide").returncode == 0
    once = content(model / "wide")
    assert sorted(once) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert widen(model.parent, "model", "model/wide", "--force").returncode == 0
    assert content(model / "wide") == once
    assert {name: found for name, found in state(model).items() if not name.startswith("wide/")} == before


def test_a_full_folder_needs_force(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    before = state(out)
    done = widen(model.parent, "model", "out")
    assert done.returncode == 1
    assert "--force" in done.stderr
    assert state(out) == before
    assert widen(model.parent, "model", "out", "--force").returncode == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "notes.txt",
        "tokenizer.json",
    ]
    assert (out / "notes.txt").read_text() == "mine"


def test_a_file_does_not_replace_a_folder(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    before = state(folder)
    for force in ([], ["--force"]):
        done = widen(folder, "in.safetensors", "out", *force)
        assert done.returncode == 1
        assert done.stderr.startswith("out: ")
        assert state(folder) == before


def test_a_slash_makes_a_folder(folder: Path, wide: bytes) -> None:
    assert widen(folder, "in.safetensors", "out/").returncode == 0
    assert (folder / "out" / "model.safetensors").read_bytes() == wide
    assert json.loads((folder / "out" / "config.json").read_text())["hidden_size"] == 16
    assert not (folder / "out.config.json").exists()


@pytest.mark.parametrize("out", ["nowhere/out.safetensors", "nowhere/out/"])
def test_a_folder_that_is_not_there(folder: Path, out: str) -> None:
    done = widen(folder, "in.safetensors", out)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere" in done.stderr
    assert not (folder / "nowhere").exists()


def test_a_link_stays_a_link(folder: Path, wide: bytes) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "real").write_bytes(b"old")
    (folder / "out.safetensors").symlink_to("elsewhere/real")
    assert widen(folder, "in.safetensors", "out.safetensors", "--force").returncode == 0
    assert (folder / "out.safetensors").readlink() == Path("elsewhere/real")
    assert (folder / "elsewhere" / "real").read_bytes() == wide


def test_a_link_into_a_cache_is_refused(folder: Path) -> None:
    blobs = folder / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123abcd").write_bytes(b"shared by all snapshots")
    (folder / "out.safetensors").symlink_to("models--a--b/blobs/0123abcd")
    done = widen(folder, "in.safetensors", "out.safetensors", "--force")
    assert done.returncode == 1
    assert done.stderr.startswith("out.safetensors: ")
    assert (blobs / "0123abcd").read_bytes() == b"shared by all snapshots"


def _only_small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


def test_a_limit_on_file_size(folder: Path) -> None:
    out = folder / "out.safetensors"
    out.write_bytes(b"old")
    before = state(folder)
    done = widen(folder, "in.safetensors", "out.safetensors", "--force", preexec_fn=_only_small_files)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    needed = int(next(word for word in done.stderr.split() if word.isdigit()))
    assert needed > 1024
    assert state(folder) == before


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_mode_of_a_new_file_is_the_usual_one(folder: Path, umask: int, mode: int) -> None:
    assert widen(folder, "in.safetensors", "out.safetensors", umask=umask).returncode == 0
    for name in ("out.safetensors", "out.config.json"):
        assert (folder / name).stat().st_mode & 0o777 == mode
    assert widen(folder, "in.safetensors", "out/", umask=umask).returncode == 0
    assert {(folder / "out" / name).stat().st_mode & 0o777 for name in ("model.safetensors", "config.json")} == {mode}


def test_the_mode_of_a_replaced_file_stays(folder: Path) -> None:
    out = folder / "out.safetensors"
    out.write_bytes(b"old")
    out.chmod(0o640)
    assert widen(folder, "in.safetensors", "out.safetensors", "--force", umask=0o022).returncode == 0
    assert out.stat().st_mode & 0o777 == 0o640


# Signals. A run that reads a pipe which has stopped flowing is in the middle of its work for as long as wanted.


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What starts the tests, such as nohup or a shell's background job, may have its children ignore signals."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.fixture
def stalled(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts runs that have opened their output and wait for the rest of their input."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, cwd: Path = folder, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*COMMAND, *arguments], cwd=cwd, env=environment(**(env or {})),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdin is not None
        process.stdin.write((folder / "in.safetensors").read_bytes()[:-100])
        process.stdin.flush()
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("out", ["out.safetensors", "out/"])
def test_a_signal_in_the_middle(
    folder: Path, stalled: Callable[..., subprocess.Popen[bytes]], number: int, code: int, out: str
) -> None:
    if not out.endswith("/"):
        (folder / out).write_bytes(b"old")
    before = state(folder)
    process = stalled("--config", "config.json", "--force", "-", out)
    wait_for(lambda: len(list(folder.iterdir())) > len(before))
    process.send_signal(number)
    since = time.monotonic()
    assert process.wait(10) == code
    # Two seconds on a machine of its own; on a busy one in the time that a few of the shortest runs take there.
    taken, begin = time.monotonic() - since, time.monotonic()
    assert taken < 2 or (widen(folder, "--version").returncode == 0 and taken < 4 * (time.monotonic() - begin))
    assert process.stderr is not None
    assert "Traceback" not in (shown := process.stderr.read().decode())
    assert len(shown.splitlines()) == 1
    assert state(folder) == before
    assert {path.name for path in folder.iterdir()} == set(before)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_at_any_moment(folder: Path, number: int, code: int) -> None:
    """Old and complete are both right; a mixture and leftovers are not. A signal before Python listens counts as well."""
    size = {"model.embed_tokens.weight": (400_000, 8), "lm_head.weight": (400_000, 8)}
    save_file(
        llama() | {name: np.ones(shape, TYPES["BF16"]) for name, shape in size.items()}, folder / "in.safetensors"
    )
    arguments = ["--set", "vocab_size=400000", "in.safetensors", "out.safetensors", "--force"]
    assert widen(folder, *arguments).returncode == 0
    complete = content(folder)
    (folder / "out.safetensors").write_bytes(b"old")
    old = content(folder)
    for delay in (0.05, 0.3, 0.4, 0.5, 0.6, 0.8):
        process = subprocess.Popen(
            [*COMMAND, *arguments], cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        time.sleep(delay)
        process.send_signal(number)
        shown = process.communicate(timeout=10)[1].decode()
        assert content(folder) in (old, complete)
        if "Traceback" in shown and not re.search(r"__main__\.py., line \d+, in main", shown):
            continue  # a signal that met Python before it came to the tool's first function
        assert process.returncode in (0, code, -number), shown
        assert "Traceback" not in shown
        assert content(folder) in (old, complete)
        if process.returncode == 0:
            assert content(folder) == complete


def test_a_run_under_nohup_goes_on(folder: Path, stalled: Callable[..., subprocess.Popen[bytes]], wide: bytes) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does before it starts a command
    try:
        process = stalled("--config", "config.json", "-", "out.safetensors")
    finally:
        signal.signal(signal.SIGHUP, old)
    before = {"in.safetensors", "config.json"}
    wait_for(lambda: {path.name for path in folder.iterdir()} > before)
    process.send_signal(signal.SIGHUP)
    process.communicate((folder / "in.safetensors").read_bytes()[-100:], timeout=20)
    assert process.returncode == 0
    assert (folder / "out.safetensors").read_bytes() == wide


def test_of_two_runs_at_once_one_wins(
    folder: Path, stalled: Callable[..., subprocess.Popen[bytes]], wide: bytes
) -> None:
    """Both have found OUT free when they began; without --force the second may not replace what the first has written."""
    before = {path.name for path in folder.iterdir()}
    both = [stalled("--config", "config.json", "-", "out.safetensors") for _ in range(2)]
    wait_for(lambda: len([path for path in folder.iterdir() if path.name.startswith(".out.safetensors.")]) == 2)
    rest = (folder / "in.safetensors").read_bytes()[-100:]
    shown = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write(rest)
        process.stdin.close()
        process.stdin = None
    for process in both:
        shown.append(process.communicate(timeout=20)[1].decode())
    assert sorted(process.returncode for process in both) == [0, 1]
    (loser,) = (text for text, process in zip(shown, both, strict=True) if process.returncode == 1)
    # What belongs to the main name is put in place before it.
    assert loser in [f"out.{end}: exists; use --force to replace it\n" for end in ("config.json", "safetensors")]
    assert (folder / "out.safetensors").read_bytes() == wide
    assert json.loads((folder / "out.config.json").read_text())["hidden_size"] == 16
    assert {path.name for path in folder.iterdir()} == before | {"out.safetensors", "out.config.json"}


# Dry runs, inputs, repeats.


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    before = state(folder)
    done = widen(folder, "in.safetensors", "out.safetensors", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert state(folder) == before
    assert widen(folder, "in.safetensors", "out.safetensors").returncode == 0
    nbytes = (folder / "out.safetensors").stat().st_size
    assert done.stdout.splitlines()[-1] == f"{nbytes} bytes in 1 file"


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.safetensors", "out.safetensors"],
        ["in.safetensors", "out.safetensors", "--grow", "hiden=2"],
        ["in.safetensors", "out.safetensors", "--grow", "heads=2x,kv_heads=3x"],
        ["in.safetensors", "out.safetensors", "--set", "hidden_size=12"],
        ["in.safetensors", "out.safetensors", "--set", "num_atention_heads=2"],
        ["in.safetensors", "out.safetensors", "--set", "rms_norm_eps.x=1"],
        ["in.safetensors", "out.safetensors", "--map", "lama"],
        ["in.safetensors", "out.safetensors", "--map", "config.json"],
        ["in.safetensors", "out.safetensors", "--map", "none.yaml"],
        ["in.safetensors", "out.safetensors", "--config", "in.safetensors"],
        ["in.safetensors", "out.safetensors", "--config", "none.json"],
        ["in.safetensors", "out.safetensors", "--strip-prefix", "x."],
        ["config.json", "out.safetensors"],
        ["empty", "out"],
    ],
)
def test_refusals_are_the_same_dry_and_optimised(folder: Path, arguments: list[str]) -> None:
    """--dry-run finds every fault of the input and the request, and `python -O` removes no check."""
    (folder / "empty").mkdir()
    before = state(folder)
    both = start(folder, *arguments), start(folder, *arguments, "--dry-run", env={"PYTHONOPTIMIZE": "1"})
    real, other = map(finish, both)
    assert (real.returncode, real.stdout) == (1, "")
    assert "Traceback" not in real.stderr
    assert 1 <= len(real.stderr.splitlines()) <= 20
    assert (other.returncode, other.stdout, other.stderr) == (1, "", real.stderr)
    assert state(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["in.safetensors"],
        ["config.json", "--force"],
        ["nowhere/out.safetensors"],
        ["nowhere/out/"],
        ["there.safetensors"],
        ["empty"],
        ["out.safetensors", "--config-out", "nowhere/c.json"],
        ["out.safetensors", "--config-out", "out.safetensors"],
        ["out.safetensors", "--config-out", "in.safetensors", "--force"],
    ],
)
def test_what_speaks_against_the_output_alone_does_not_stop_a_dry_run(folder: Path, arguments: list[str]) -> None:
    """The plan is printed, with the real run's refusal as warnings."""
    (folder / "empty").mkdir()
    (folder / "there.safetensors").write_bytes(b"old")
    before = state(folder)
    plain = widen(folder, "in.safetensors", "out.safetensors", "--dry-run")
    both = start(folder, "in.safetensors", *arguments), start(folder, "in.safetensors", *arguments, "--dry-run")
    real, dry = map(finish, both)
    assert (real.returncode, real.stdout) == (1, "")
    assert real.stderr
    assert dry.stderr == "".join(f"warning: {line}\n" for line in real.stderr.splitlines())
    assert (dry.returncode, dry.stdout) == (0, plain.stdout)
    assert state(folder) == before


def test_a_limit_on_file_size_does_not_stop_a_dry_run(folder: Path) -> None:
    done = widen(folder, "in.safetensors", "out.safetensors", "--dry-run", preexec_fn=_only_small_files)
    assert done.returncode == 0
    assert widen(folder, "in.safetensors", "out.safetensors").returncode == 0
    size = (folder / "out.safetensors").stat().st_size
    assert done.stderr.startswith(f"warning: {folder}: a file of {size} bytes needed, the limit is 1024; ")
    assert done.stdout.endswith(f"\n{size} bytes in 1 file\n")


def test_a_fault_of_the_input_stops_a_dry_run_whatever_the_output_is(folder: Path) -> None:
    save_file(llama() | {"strange.weight": np.ones((3, 3), np.float32)}, folder / "in.safetensors")
    (folder / "out.safetensors").write_bytes(b"old")
    done = widen(folder, "in.safetensors", "out.safetensors", "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("in.safetensors: unknown tensor 'strange.weight' ")


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_dry_run_needs_no_output(folder: Path, model: Path, extra: list[str]) -> None:
    before = state(folder)
    plain = widen(folder, "in.safetensors", "out.safetensors", "--dry-run", *extra)
    for given in ("in.safetensors", "model", "model/"):
        done = widen(folder, given, "--dry-run", *extra)
        assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")
    assert state(folder) == before


def test_a_dry_run_of_a_pipe_needs_no_output(folder: Path) -> None:
    """Nobody spoke of an output or its config, so there is nothing to warn of, at a terminal either."""
    plain = widen(folder, "in.safetensors", "out.safetensors", "--dry-run").stdout
    done = shell(folder, "cat in.safetensors | widen --config config.json - --dry-run")
    assert (done.returncode, done.stdout, done.stderr) == (0, plain, "")
    with (folder / "in.safetensors").open("rb") as given:
        code, shown = on_terminal(folder, "--config", "config.json", "-", "--dry-run", stdout=True, stdin=given)
    assert (code, shown.replace("\r\n", "\n")) == (0, plain)


@pytest.mark.parametrize("layers", [10**6, 10**12, 10**30])
def test_a_config_that_promises_endless_layers_is_answered_at_once(folder: Path, layers: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    since = time.monotonic()
    done = widen(folder, "in.safetensors", "out.safetensors")
    assert time.monotonic() - since < 5
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("in.safetensors: tensor 'model.layers.1.input_layernorm.weight' is missing; ")
    assert len(done.stderr.splitlines()) <= 20


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("num_atention_heads=2", " (did you mean 'num_attention_heads'?)"), ("zzz=1", "")],
)
def test_a_setting_that_nothing_reads_is_refused(folder: Path, setting: str, hint: str) -> None:
    key = setting.partition("=")[0]
    done = widen(folder, "in.safetensors", "out.safetensors", "--set", setting)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"--set {key}: 'llama' has no such config key{hint}; it reads ")
    assert "num_attention_heads" in done.stderr
    assert not (folder / "out.safetensors").exists()


def test_a_setting_that_map_or_config_knows_is_taken(folder: Path) -> None:
    """A key of the config that the map has no use for may be set too; it is written."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"pad_token_id": 0}))
    settings = ["--set", "pad_token_id=3", "--set", "hidden_act=relu", "--set", "head_dim=4"]
    assert widen(folder, "in.safetensors", "out.safetensors", *settings).returncode == 0
    written = json.loads((folder / "out.config.json").read_text())
    assert (written["pad_token_id"], written["hidden_act"]) == (3, "relu")


def test_inputs_are_left_alone(folder: Path, model: Path) -> None:
    """Also where they are links, and where the run fails."""
    blobs = folder / "blobs"
    blobs.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        shutil.move(model / name, blobs / name)
        (model / name).symlink_to(f"../blobs/{name}")
    outputs = ("out.safetensors", "out.config.json", "out")
    before = state(folder)
    assert widen(folder, "in.safetensors", "out.safetensors").returncode == 0
    assert widen(folder, "model", "out").returncode == 0
    assert widen(folder, "model", "other", "--grow", "heads=2x,kv_heads=3x").returncode == 1
    after = {name: found for name, found in state(folder).items() if name.split("/")[0] not in outputs}
    assert after == before
    assert (model / "model.safetensors").is_symlink()
    assert not any(path.is_symlink() for path in (folder / "out").iterdir())


def test_two_runs_are_alike(model: Path) -> None:
    for out, seed in (("one", "1"), ("two", "2")):
        done = widen(model.parent, "model", out, "--max-shard-size", "1KB", env={"PYTHONHASHSEED": seed})
        assert done.returncode == 0
    one, two = content(model.parent / "one"), content(model.parent / "two")
    assert one == two
    assert len([name for name in one if name.endswith(".safetensors")]) > 2


@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_give_the_same_bytes(folder: Path, wide: bytes, threads: str) -> None:
    assert widen(folder, "in.safetensors", "out.safetensors", "--threads", threads).returncode == 0
    assert (folder / "out.safetensors").read_bytes() == wide


def test_all_faults_come_first_and_together(model: Path) -> None:
    tensors = llama()
    shards = {f"model-0000{number}-of-00003.safetensors": list(tensors)[number - 1 :: 3] for number in (1, 2, 3)}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    first = next(iter(shards))
    weight_map["strange.weight"] = first
    save_file(
        {**{name: tensors[name] for name in shards[first]}, "strange.weight": np.ones((3, 3), np.float32)},
        model / first,
    )
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    done = widen(model.parent, "model", "out")
    assert (done.returncode, done.stdout) == (1, "")
    for word in (*list(shards)[1:], "strange.weight"):
        assert word in done.stderr
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (None, [], "no config.json"),
        ("{", [], "config.json:1:2: not valid JSON"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', [], "packed by gptq"),
        ('{"model_type": "lama"}', [], "has no map"),
        (json.dumps(CONFIG), ["--map", "lama"], "map 'lama'"),
        (json.dumps(CONFIG), ["--set", "num_atention_heads=2"], "--set num_atention_heads"),
        (json.dumps(CONFIG), ["--strip-prefix", "_orig_mod."], "model.safetensors"),
    ],
    ids=["no config", "broken config", "quantised", "unknown family", "unknown map", "unknown setting", "prefix"],
)
def test_a_damaged_shard_is_told_beside_the_other_faults(
    model: Path, config: str | None, options: list[str], told: str
) -> None:
    os.truncate(model / "model.safetensors", 900)
    (model / "config.json").unlink()
    if config is not None:
        (model / "config.json").write_text(config)
    done = widen(model.parent, "model", "out", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr
    assert "model/model.safetensors: the header claims " in done.stderr
    assert not (model.parent / "out").exists()


def test_output_and_input_faults_come_together(folder: Path) -> None:
    save_file(llama() | {"strange.weight": np.ones((3, 3), np.float32)}, folder / "in.safetensors")
    (folder / "out.safetensors").write_bytes(b"old")
    done = widen(folder, "in.safetensors", "out.safetensors")
    assert done.returncode == 1
    assert "--force" in done.stderr
    assert "strange.weight" in done.stderr


# Names, folders, environment.


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_names_that_are_no_ascii(tmp_path: Path, locale: str) -> None:
    env = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    save_file(llama() | {"modèle.poids": np.ones((2,), np.float32)}, tmp_path / "é模.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"name": "模"}))
    done = widen(tmp_path, "é模.safetensors", "ö.safetensors", env=env)
    assert done.returncode == 1
    assert done.stderr.isascii()
    assert "mod\\xe8le.poids" in done.stderr
    assert done.stderr.startswith("\\")
    save_file(llama(), tmp_path / "é模.safetensors")
    done = widen(tmp_path, "é模.safetensors", "ö.safetensors", env=env)
    assert done.returncode == 0
    assert done.stderr.isascii()
    assert json.loads((tmp_path / "ö.config.json").read_text())["name"] == "模"


def test_a_name_that_is_no_text(folder: Path) -> None:
    """A file name of any bytes, as Linux allows."""
    strange = os.fsdecode(b"\xff\xfe.safetensors")
    (folder / "in.safetensors").rename(folder / strange)
    done = widen(folder, strange, "out.safetensors")
    assert done.returncode == 0
    done = widen(folder, strange, strange, "--force")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_paths_are_relative_to_where_the_run_is(model: Path) -> None:
    here, there = model.parent / "here", model.parent / "there"
    here.mkdir()
    there.mkdir()
    assert widen(here, "../model/", "../there/out/").returncode == 0
    assert widen(model.parent, "model", "direct").returncode == 0
    assert content(there / "out") == content(model.parent / "direct")
    assert list(here.iterdir()) == []


def test_the_temporary_file_lies_beside_the_output(
    folder: Path, stalled: Callable[..., subprocess.Popen[bytes]]
) -> None:
    there, spare = folder / "there", folder / "spare"
    there.mkdir()
    spare.mkdir()
    stalled("--config", "config.json", "-", "there/out.safetensors", env={"TMPDIR": str(spare)})
    wait_for(lambda: list(there.iterdir()))
    assert all(path.name.startswith(".out.") for path in there.iterdir())
    assert list(spare.iterdir()) == []
    assert not (there / "out.safetensors").exists()
