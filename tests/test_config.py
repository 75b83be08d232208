"""config.json is read as people write it, changed key by key, and written in the style it came in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from widen_cli.config import ModelConfig, parse_settings, read_config, read_json
from widen_cli.errors import WidenError


def written(tmp_path: Path, data: bytes | str) -> Path:
    path = tmp_path / "config.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def fault(path: Path) -> str:
    with pytest.raises(WidenError) as caught:
        read_config(path)
    (text,) = caught.value.faults
    return text.replace(str(path), "config.json")


def test_a_plain_config(tmp_path: Path) -> None:
    path = written(tmp_path, '{"hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}}')
    config = read_config(path)
    assert config.values == {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}}
    assert (config.name, config.present) == (str(path), True)


@pytest.mark.parametrize(
    ("data", "values"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'\r\n{"a":\t1}\r\n', {"a": 1}),
        ('{"é": "\u6a21"}'.encode(), {"é": "模"}),
        (b'{"a": "\\ud83d"}', {"a": "\ud83d"}),
        (b'{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
    ],
)
def test_odd_but_readable(tmp_path: Path, data: bytes, values: dict[str, Any]) -> None:
    assert read_config(written(tmp_path, data)).values == values


def test_infinity_and_nan_are_read_and_written(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, '{"a": Infinity, "b": [-Infinity, NaN]}'))
    assert config.values["a"] == math.inf
    again = json.loads(config.to_bytes())
    assert again["a"] == math.inf
    assert again["b"][0] == -math.inf
    assert math.isnan(again["b"][1])
    assert b'"a": Infinity' in config.to_bytes()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("[1, 2]", "config.json: a model config is a JSON object, this is a list"),
        ('"text"', "config.json: a model config is a JSON object, this is a str"),
        ("null", "config.json: a model config is a JSON object, this is a NoneType"),
        (
            '{"a": 1,\n "b": }',
            "config.json:2:7: not valid JSON (Expecting value), so not a model config; fetch the file again",
        ),
        (
            '{"a": 1,}',
            "config.json:1:9: not valid JSON (Expecting property name enclosed in double quotes), so not a model config; "
            "fetch the file again",
        ),
        ("", "config.json:1:1: not valid JSON (Expecting value), so not a model config; fetch the file again"),
        ("<html>", "config.json:1:1: not valid JSON (Expecting value), so not a model config; fetch the file again"),
        ('{"a": 1} {"b": 2}', "config.json:1:10: not valid JSON (Extra data), so not a model config; fetch the file again"),
        (b"\xff\xfe{\x00", "config.json: not UTF-8 text, so not a model config; fetch the file again"),
        ("[" * 100_000, "config.json: nested too deeply to be a model config"),
    ],
)  # fmt: skip
def test_what_is_no_config(tmp_path: Path, data: bytes | str, expected: str) -> None:
    assert fault(written(tmp_path, data)) == expected


def test_endless_digits_are_no_config(tmp_path: Path) -> None:
    """Python refuses to make a number of more than 4300 digits."""
    assert fault(written(tmp_path, '{"a": ' + "9" * 5000 + "}")).startswith("config.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert fault(tmp_path / "config.json") == "config.json: cannot read it: No such file or directory"
    assert fault(tmp_path) == "config.json: cannot read it: Is a directory"


def test_a_name_is_shown_safely(tmp_path: Path) -> None:
    path = tmp_path / "e\x1b[31m\u00e9.json"
    with pytest.raises(WidenError, match=r"e\\x1b\[31m\\xe9\.json: cannot read it"):
        read_json(path, "anything")


def test_json_may_be_anything(tmp_path: Path) -> None:
    assert read_json(written(tmp_path, "[1]"), "a sidecar config") == [1]
    with pytest.raises(WidenError, match="so not a sidecar config"):
        read_json(written(tmp_path, "[1"), "a sidecar config")


NESTED = {"model_type": "x", "text_config": {"hidden_size": 8, "rope": {"theta": 1.0}}, "list": [1], "null": None}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "x"),
        ("text_config.hidden_size", 8),
        ("text_config.rope.theta", 1.0),
        ("text_config", NESTED["text_config"]),
        ("null", None),
        ("absent", "default"),
        ("text_config.absent", "default"),
        ("model_type.absent", "default"),
        ("list.0", "default"),
        ("null.absent", "default"),
    ],
)
def test_dotted_keys(key: str, value: Any) -> None:
    config = ModelConfig(NESTED, "c")
    assert config.get(key, "default") == value
    assert (key in config) == (value != "default")


def test_values_are_set_in_their_place() -> None:
    config = ModelConfig(NESTED, "c", present=False)
    changed = config.with_values({"text_config.hidden_size": 16, "model_type": "y", "new": 1, "deep.new": 2})
    assert list(changed.values) == ["model_type", "text_config", "list", "null", "new", "deep"]
    assert changed.values["text_config"] == {"hidden_size": 16, "rope": {"theta": 1.0}}
    assert (changed.values["model_type"], changed.values["deep"]) == ("y", {"new": 2})
    assert (changed.name, changed.present) == ("c", False)
    assert config.values == NESTED
    assert NESTED["text_config"]["hidden_size"] == 8, "the original is left alone"


@pytest.mark.parametrize("key", ["null.inner", "list.inner", "model_type.inner"])
def test_a_key_inside_what_is_no_object_is_refused(key: str) -> None:
    with pytest.raises(WidenError, match=key.split(".")[0]):
        ModelConfig(NESTED, "c").with_values({key: 1})


def test_the_file_keeps_order_and_letters() -> None:
    values = {"z": 1, "a": [1, 2], "é": "模型", "null": None, "t": True, "f": 1e-05}
    assert ModelConfig(values, "c").to_bytes().decode() == (
        '{\n  "z": 1,\n  "a": [\n    1,\n    2\n  ],\n  "é": "模型",\n  "null": null,\n  "t": true,\n  "f": 1e-05\n}\n'
    )


def test_half_of_a_surrogate_pair_is_written_so_that_it_reads_back() -> None:
    values = {"lone": "\ud800", "é": "模"}
    assert json.loads(ModelConfig(values, "c").to_bytes().decode("utf-8")) == values


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("heads=12", {"heads": 12}),
        ("eps=1e-5", {"eps": 1e-5}),
        ("tie=false", {"tie": False}),
        ("name=llama", {"name": "llama"}),
        ('name="12"', {"name": "12"}),
        ("a.b=[1, 2]", {"a.b": [1, 2]}),
        ("inner=null", {"inner": None}),
        ("text=a=b", {"text": "a=b"}),
        ("empty=", {"empty": ""}),
    ],
)
def test_settings(setting: str, values: dict[str, Any]) -> None:
    assert parse_settings((setting,)) == values


def test_the_last_of_two_settings_counts() -> None:
    assert parse_settings(("a=1", "b=2", "a=3")) == {"a": 3, "b": 2}


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000])
def test_settings_that_no_reader_takes(text: str) -> None:
    with pytest.raises(WidenError, match=r"^--set a: "):
        parse_settings((f"a={text}",))


@pytest.mark.parametrize("setting", ["heads", "=12", "", "=", "heads:12"])
def test_settings_that_cannot_be_read(setting: str) -> None:
    with pytest.raises(WidenError) as caught:
        parse_settings((setting,))
    assert caught.value.faults == (f"--set {setting}: expected key=value, such as --set num_attention_heads=12",)
