"""What torch.save wrote comes back byte by byte; what its pickle asks for beyond tensors is refused, and nothing runs."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import struct
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.models import build
from widen_cli import torch_pickle, torch_zip
from widen_cli.convert import prepare
from widen_cli.demo import make_checkpoint
from widen_cli.dtypes import STORED
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.safetensors_file import AGAIN, SafetensorsHeader, StoredTensor
from widen_cli.sources import FileSource, PipeSource
from widen_cli.torch_file import read_torch_file, read_weights
from widen_cli.torch_pickle import RESAVE
from widen_cli.torch_views import StridedSource

LEGACY = {"_use_new_zipfile_serialization": False}
FORMATS = pytest.mark.parametrize("arguments", [{}, LEGACY], ids=["zip", "legacy"])


def save(path: Path, value: object, **arguments: Any) -> FileSource:
    torch.save(value, path / "x.bin", **arguments)
    return opened(path)


def opened(path: Path) -> FileSource:
    return FileSource(path / "x.bin", name="x.bin")


def fault(source: FileSource) -> str:
    with pytest.raises(WidenError) as caught:
        read_torch_file(source)
    source.close()
    (text,) = caught.value.faults
    assert text.startswith("x.bin: ")
    assert text.isprintable()
    return text.removeprefix("x.bin: ")


def read(tensor: StoredTensor) -> bytes:
    return bytes(tensor.source.read(tensor.offset, tensor.nbytes))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(header: SafetensorsHeader, state: dict[str, torch.Tensor]) -> None:
    assert {tensor.name for tensor in header.tensors} == set(state)
    assert len(header.tensors) == len(state)
    for tensor in header.tensors:
        assert tensor.shape == tuple(state[tensor.name].shape)
        assert read(tensor) == raw(state[tensor.name]), tensor.name


@FORMATS
@pytest.mark.parametrize("variant", ["bert_mlm", "gpt2", "llama_tied", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_models(variant: str, dtype: torch.dtype, arguments: dict[str, Any], tmp_path: Path) -> None:
    state = build(variant, dtype).state_dict()
    source = save(tmp_path, state, **arguments)
    header = read_torch_file(source)
    check(header, state)
    assert all(tensor.source is source for tensor in header.tensors)
    assert [tensor.offset for tensor in header.tensors] == sorted(tensor.offset for tensor in header.tensors)
    assert (header.nbytes, header.metadata, header.warnings) == (source.size, {}, ())


def test_tied_tensors_lie_at_one_place(tmp_path: Path) -> None:
    header = read_torch_file(save(tmp_path, build("gpt2").state_dict()))
    places = {tensor.name: tensor.offset for tensor in header.tensors}
    assert places["lm_head.weight"] == places["transformer.wte.weight"]


TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_types_and_protocols(protocol: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    numbers = torch.arange(48, dtype=torch.uint8).remainder(2)
    state = {name: numbers.clone().view(dtype) for name, dtype in TYPES.items()}
    header = read_torch_file(save(tmp_path, state, pickle_protocol=protocol, **arguments))
    assert {tensor.name: tensor.dtype.name for tensor in header.tensors} == {name: name for name in TYPES}
    check(header, state)


@FORMATS
def test_scalars_and_empty_tensors(arguments: dict[str, Any], tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0, 7),
        "one": torch.ones(1, 1, 3),
        "empty": torch.empty(0),
    }
    check(read_torch_file(save(tmp_path, state, **arguments)), state)


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 10, 8)
    return {
        "transposed": torch.randn(30, 20).T,
        "tail": base[4:],
        "slice": base[:, 2:7],
        "steps": base[::2, :, ::3],
        "permuted": base.permute(2, 0, 1),
        "inner": base.permute(0, 2, 1),
        "one": torch.randn(12, 5).T[None],
        "column": base[:, 3:4, 2],
        "expanded": torch.arange(5).expand(3, 5),
        "leading": torch.arange(5).expand(1, 5),
        "halves": torch.randn(9, 7).to(torch.bfloat16).T,
        "bytes": torch.randint(0, 255, (9, 7), dtype=torch.uint8).T,
    }


@FORMATS
def test_views(arguments: dict[str, Any], tmp_path: Path) -> None:
    state = views()
    header = read_torch_file(save(tmp_path, state, **arguments))
    check(header, state)
    direct = {tensor.name for tensor in header.tensors if isinstance(tensor.source, FileSource)}
    assert direct == {"tail", "leading"}


def test_views_in_pieces(tmp_path: Path) -> None:
    """Any range of bytes, as blocks of rows are read; only what an item holds is in memory."""
    state = views()
    drawn = random.Random(1)
    for tensor in read_torch_file(save(tmp_path, state)).tensors:
        whole = raw(state[tensor.name])
        for _ in range(60):
            start, stop = sorted(drawn.choices(range(tensor.nbytes + 1), k=2))
            assert bytes(tensor.source.read(tensor.offset + start, stop - start)) == whole[start:stop]


def test_one_view_is_held_at_a_time(tmp_path: Path) -> None:
    state = {f"{number}": torch.randn(300, 200).T for number in range(4)}
    tensors = read_torch_file(save(tmp_path, state)).tensors
    held = {id(tensor.source._held) for tensor in tensors if isinstance(tensor.source, StridedSource)}
    assert len(held) == 1
    for tensor in tensors:
        read(tensor)
    assert isinstance(tensors[-1].source, StridedSource)
    assert len(tensors[-1].source._held._data) == 300 * 200 * 4
    tensors[0].source.close()
    tensors[1].source.close()


def test_expansion_is_bounded(tmp_path: Path) -> None:
    text = fault(save(tmp_path, {"a": torch.zeros(1).expand(1 << 40)}))
    assert text == "'a' (F32 [1099511627776]) repeats the 4 bytes of its storage; save it after .contiguous()"


class Subclassed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4))
        self.register_buffer("steps", torch.arange(5))


@FORMATS
def test_parameters_and_attributes(arguments: dict[str, Any], tmp_path: Path) -> None:
    marked = torch.randn(3)
    marked.note = "kept by torch"  # pickled through _rebuild_from_type_v2
    parameter = torch.nn.Parameter(torch.randn(2, 2))
    parameter.note = "this one too"
    state = {"p": torch.nn.Parameter(torch.randn(2, 3)), "marked": marked, "buffer": torch.nn.Buffer(torch.ones(2))}
    state |= {"noted": parameter, **dict(Subclassed().named_parameters())}
    check(read_torch_file(save(tmp_path, state, **arguments)), state)


@FORMATS
@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_nested(key: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    model = build("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    saved = {
        "epoch": 3,
        key: model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=1e-3, out=Path("x")),
        "best": np.float64(0.5),
        "device": torch.device("cpu"),
        "sizes": {torch.Size([1, 2]), frozenset([1])},
        "note": b"bytes",
        "rng": np.arange(3),
        "dtype": torch.bfloat16,
    }
    header = read_torch_file(save(tmp_path, saved, **arguments))
    check(header, model.state_dict())
    others = ["epoch", "optimizer", "args", "best", "device", "sizes", "note", "rng", "dtype"]
    assert header.warnings == (
        f"x.bin: the tensors of '{key}' were taken",
        f"x.bin: left out, being no tensors of the model: {', '.join(map(repr, others))}",
    )


def test_one_dict_under_two_names(tmp_path: Path) -> None:
    state = {"a": torch.ones(2)}
    header = read_torch_file(save(tmp_path, {"model": state, "state_dict": state}))
    assert header.warnings == ("x.bin: the tensors of 'model' were taken",)
    check(header, state)


def test_what_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    saved = OrderedDict(a=torch.ones(2), version=3, extra=None, **{f"n{number}": number for number in range(12)})
    saved[5] = "number"
    header = read_torch_file(save(tmp_path, saved))
    assert [tensor.name for tensor in header.tensors] == ["a"]
    (warning,) = header.warnings
    assert warning.startswith("x.bin: left out, being no tensors of the model: 'version', 'extra', 'n0', ")
    assert warning.endswith(", 'n7' and 5 more")


STRUCTURES: dict[str, tuple[Callable[[], object], str]] = {
    "tensor": (lambda: torch.ones(2), "holds one tensor and no dict of tensors; save model.state_dict()"),
    "list": (lambda: [torch.ones(2)], "holds a list and no dict of tensors; save model.state_dict()"),
    "empty": (dict, "holds no dict of tensors, at its top or one level below; save model.state_dict()"),
    "deep": (
        lambda: {"a": {"b": {"c": torch.ones(1)}}},
        "holds no dict of tensors, at its top or one level below; save model.state_dict()",
    ),
    "several": (
        lambda: {"model": {"a": torch.ones(1), "b": torch.ones(1)}, "ema": {"a": torch.ones(1)}, "epoch": 1},
        "holds several dicts of tensors: 'model' (2 tensors), 'ema' (1 tensor); save the one to widen in a file of its "
        "own, as torch.save(torch.load(file)['ema'], other)",
    ),
    "top_too": (
        lambda: {"rng": torch.ones(1), "model": {"a": torch.ones(1)}},
        "holds several dicts of tensors: its top (1 tensor), 'model' (1 tensor); save the one to widen in a file of its "
        "own, as torch.save(torch.load(file)['model'], other)",
    ),
    "number": (lambda: {3: torch.ones(1)}, f"3 cannot be the name of a tensor; {RESAVE}"),
    "tuple": (lambda: {("a", "b"): torch.ones(1)}, f"a tuple cannot be the name of a tensor; {RESAVE}"),
    "metadata": (lambda: {"__metadata__": torch.ones(1)}, f"'__metadata__' cannot be the name of a tensor; {RESAVE}"),
    "surrogate": (lambda: {"a\ud800": torch.ones(1)}, f"cannot be the name of a tensor; {RESAVE}"),
    "sparse": (
        lambda: {"a": torch.eye(2).to_sparse()},
        "'a' has no plain elements (torch._utils._rebuild_sparse_tensor); make it dense and unquantised, and save it again",
    ),
    "meta": (
        lambda: {"a": torch.ones(2, device="meta")},
        "'a' has no plain elements (torch._utils._rebuild_meta_tensor_no_storage); make it dense and unquantised, and "
        "save it again",
    ),
    "conjugate": (
        lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
        "'a' has no plain elements (a tensor with its conjugate or negative bit set); make it dense and unquantised, "
        "and save it again",
    ),
    "complex128": (
        lambda: {"a": torch.ones(2, dtype=torch.complex128)},
        "'a' has the type 'ComplexDouble', which is not known; save it in another one",
    ),
    "module": (
        lambda: torch.nn.Linear(2, 2),
        "its pickle asks for 'torch.nn.modules.linear.Linear', which a file of tensors does not need; nothing was run; "
        + RESAVE,
    ),
}


@FORMATS
@pytest.mark.parametrize(("make", "expected"), STRUCTURES.values(), ids=STRUCTURES)
def test_structures(make: Callable[[], object], expected: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    assert fault(save(tmp_path, make(), **arguments)).endswith(expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert "'a' has no plain elements (torch._utils._rebuild_qtensor)" in fault(save(tmp_path, {"a": tensor}))


# What a pickle can do to a reader that trusts it. Each is tried in both formats; `tmp_path/ran` must not appear.


class Runs:
    """Pickles as a call."""

    def __init__(self, called: Callable[..., object], *arguments: object) -> None:
        self.call = called, arguments

    def __reduce__(self) -> Any:
        return self.call


def zipped(pickled: bytes, storages: dict[str, bytes] | None = None, **others: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **others}.items():
            archive.writestr(f"x/{name}", data)
        for key, data in (storages or {}).items():
            archive.writestr(f"x/data/{key}", data)
    return file.getvalue()


def legacy(pickled: bytes) -> bytes:
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    return b"".join([magic, pickle.dumps(1001, 2), pickle.dumps({"little_endian": True}, 2), pickled, b"\x80\x02]."])


def malicious(path: Path) -> dict[str, bytes]:
    ran = str(path / "ran")
    calls = {
        "system": Runs(os.system, f"touch {ran}"),
        "mkdir": Runs(os.mkdir, ran),
        "eval": Runs(eval, f"open({ran!r}, 'w')"),
        "exec": Runs(exec, f"open({ran!r}, 'w')"),
        "open": Runs(open, ran, "w"),
        "getattr": Runs(getattr, "a", "upper"),
        "import": Runs(__import__, "this"),
        "torch_load": Runs(torch.load, ran),
        "nested": {"a": [{"b": (1, OrderedDict(c=Runs(os.mkdir, ran)))}]},
        "key": {(Runs(os.mkdir, ran), 1): 1},
        "in_parameter": Runs(torch._utils._rebuild_parameter, Runs(os.mkdir, ran), True, OrderedDict()),
    }
    pickles = {
        f"{name}_{protocol}": pickle.dumps(call, protocol) for name, call in calls.items() for protocol in (2, 4)
    }
    target = ran.encode()
    return pickles | {
        "inst": b"(S'" + target + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nV" + target + b"\no.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x01a\x85R.",
        "unimported": b"cantigravity\nfly\n.",
        "ext": b"\x80\x02\x82\x01.",
        "newobj": b"\x80\x02csubprocess\nPopen\n" + b"(X\x02\x00\x00\x00lst\x81.",
        "wrapped": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nmkdir\nctorch\nTensor\n(tNtR.",
        "called_value": b"\x80\x02X\x01\x00\x00\x00a)R.",
        "called_text": b"\x80\x02(X\x02\x00\x00\x00osX\x05\x00\x00\x00mkdirt)R.",
        "state_of_type": b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.",
        "append_to_type": b"\x80\x02cbuiltins\nlist\nK\x01a.",
        "set_item_of_type": b"\x80\x02cbuiltins\nlist\nK\x01K\x02s.",
        "persistent_text": b"Pstorage\n.",
        "persistent_module": b"\x80\x02(X\x06\x00\x00\x00modulecos\nmkdir\ntQ.",
        "persistent_other": b"\x80\x02(X\x07\x00\x00\x00storageK\x01K\x02K\x03K\x04tQ.",
        "persistent_view": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x01K\x05tQ.",
        "storage_called": b"\x80\x02ctorch\nFloatStorage\nK\x05\x85R.",
        "long4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "int_line": b"I" + b"9" * 100_000 + b"\n.",
        "protocol": b"\x80\x09N.",
    }


HUGE = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "unicode": b"\x80\x02X\xff\xff\xff\xff.",
    "unicode8": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "bytes8": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "bytearray8": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.",
    "long1": b"\x80\x02\x8a\xff\x01.",
    "no_memo": b"\x80\x02h\x07.",
    "no_mark": b"\x80\x02t.",
    "no_value": b"\x80\x02\x87.",
    "empty_stack": b"\x80\x02.",
    "no_end": b"\x80\x02N",
    "odd_items": b"\x80\x02}(K\x01u.",
    "deep_key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",  # crashes Python's unpickler
    "deep_value": b"\x80\x02}K\x01" + b"]" * 200_000 + b"a" * 199_999 + b"s.",
    "deep_marks": b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
    "deep_id": b"\x80\x02)" + b"\x85" * 200_000 + b"Q.",
    "deep_set": b"\x80\x04\x8f(" + b")" + b"\x85" * 200_000 + b"\x90.",
    "name": b"c" + b"a" * 100_000 + b"\nb\n.",
    "surrogate_name": b"\x80\x02cos\xff\nb\n.",
    "copied_dict": b"\x80\x02]q\x00("
    + b"NN\x86" * 20_000
    + b"e"
    + b"ccollections\nOrderedDict\nh\x00\x85R" * 20_000
    + b".",
    "copied_arguments": b"\x80\x02("
    + b"N" * 20_000
    + b"tq\x00"
    + b"ctorch._utils\n_rebuild_tensor\nh\x00R" * 20_000
    + b".",
    "copied_sizes": b"\x80\x02("
    + b"K\x01" * 20_000
    + b"tq\x00"
    + (
        b"ctorch._utils\n_rebuild_tensor\n(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x01tQ"
        b"K\x00h\x00h\x00tR" * 20_000
    )
    + b".",
    "storage_name": b"\x80\x04\x8c\x05torchX\x00\x00\x10\x00" + b"a" * (0x100000 - 7) + b"Storage\x93.",
    "same_dict": b"\x80\x02}q\x00(" + b"NN" * 20_000 + b"u}(" + b"Nh\x00" * 20_000 + b"u.",
    "own_item": b"\x80\x02}q\x00K\x01h\x00s.",
}

NAMES = [*malicious(Path("/")), *HUGE]


@pytest.mark.parametrize("wrap", [zipped, legacy])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs(
    name: str, wrap: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (malicious(tmp_path) | HUGE)[name]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "x.bin").write_bytes(wrap(data))
    monkeypatch.setattr(os, "system", None)
    modules = set(sys.modules)
    text = fault(opened(folder))
    if name not in HUGE:
        assert "which a file of tensors does not need; nothing was run; where you trust the file, " in text
    assert len(text) < 600
    assert set(sys.modules) == modules
    assert list(tmp_path.iterdir()) == [folder]


def test_the_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(zipped(pickle.dumps(Runs(os.mkdir, "ran"), 2)))
    assert fault(opened(tmp_path)).startswith(
        "its pickle asks for 'posix.mkdir', which a file of tensors does not need;"
    )


def test_opcodes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "OPCODE_LIMIT", 1000)
    (tmp_path / "x.bin").write_bytes(zipped(b"\x80\x02" + b"N0" * 500 + b"}."))
    assert fault(opened(tmp_path)) == f"its pickle has more than 1000 opcodes; {RESAVE}"


def test_pickle_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widen_cli.torch_file.PICKLE_LIMIT", 100)
    (tmp_path / "x.bin").write_bytes(zipped(b"\x80\x02" + b"N0" * 500 + b"}."))
    assert fault(opened(tmp_path)) == f"a pickle of 1004 bytes is more than the 100 of tensors; {RESAVE}"


def test_entries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "ENTRY_LIMIT", 5)
    assert " is none of PyTorch; " in fault(save(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)}))


# Sizes that do not fit: one tensor of one storage, written by hand.


BYTES = object()


def one_tensor(start: object, shape: object, strides: object, numel: int = 6, key: str = "0") -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if value is BYTES else None

    file = io.BytesIO()
    arguments = BYTES, start, shape, strides, False, OrderedDict()
    Pickler(file, 2).dump({"a": Runs(torch._utils._rebuild_tensor_v2, *arguments)})
    return file.getvalue()


NOT_SIZES = f"its pickle has a tensor whose sizes and strides are no such; {AGAIN}"
ODD_CALL = "its pickle calls 'torch._utils._rebuild_tensor_v2' in an unknown way"
SIZES: dict[str, tuple[bytes, str]] = {
    "start": (one_tensor(1, (2, 3), (3, 1)), "'a' (F32 [2, 3]) reaches to byte 28 of its storage '0', which has 24;"),
    "shape": (one_tensor(0, (3, 3), (3, 1)), "'a' (F32 [3, 3]) reaches to byte 36 of its storage '0', which has 24;"),
    "stride": (one_tensor(0, (2, 3), (4, 1)), "'a' (F32 [2, 3]) reaches to byte 28 of its storage '0', which has 24;"),
    "numel": (one_tensor(0, (7,), (1,), 7), "'a' lies in the storage '0' of 24 bytes, its pickle says 28;"),
    "numel_wrap": (one_tensor(0, (1,), (1,), 2**62), "'a' lies in the storage '0' of 24 bytes, its pickle says 184467"),
    "numel_huge": (one_tensor(0, (1,), (1,), 2**64), "its pickle refers to something outside that is no plain storage"),
    "numel_minus": (one_tensor(0, (1,), (1,), -1), "its pickle refers to something outside that is no plain storage"),
    "minus": (one_tensor(0, (-1,), (1,)), NOT_SIZES),
    "minus_start": (one_tensor(-1, (1,), (1,)), NOT_SIZES),
    "minus_stride": (one_tensor(5, (2,), (-1,)), NOT_SIZES),
    "huge": (one_tensor(0, (2**2000, 0), (1, 1)), NOT_SIZES),
    "big": (one_tensor(0, (2**62,) * 60, (2**62,) * 60), "'a' (F32 [4611686018427387904, 46116860184273"),
    "axes": (one_tensor(0, (1,) * 65, (1,) * 65), NOT_SIZES),
    "lengths": (one_tensor(0, (2, 3), (1,)), NOT_SIZES),
    "text": (one_tensor(0, ("2",), (1,)), NOT_SIZES),
    "bool": (one_tensor(0, (True,), (1,)), NOT_SIZES),
    "none": (one_tensor(0, None, (1,)), ODD_CALL),
    "start_text": (one_tensor("0", (1,), (1,)), ODD_CALL),
    "key": (one_tensor(0, (1,), (1,), key="1"), f"has no entry 'x/data/1', which its pickle names; {AGAIN}"),
    "key_path": (one_tensor(0, (1,), (1,), key="../data.pkl"), "has no entry 'x/data/../data.pkl', which its pickle"),
}


@pytest.mark.parametrize(("pickled", "expected"), SIZES.values(), ids=SIZES)
def test_sizes_that_do_not_fit(pickled: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(zipped(pickled, {"0": bytes(24)}))
    text = fault(opened(tmp_path))
    assert text.startswith(expected)
    assert len(text) < 2000


def test_all_faults_are_told_up_to_ten(tmp_path: Path) -> None:
    source = save(tmp_path, {f"{number:02}": torch.ones(2, dtype=torch.complex128) for number in range(15)})
    with pytest.raises(WidenError) as caught:
        read_torch_file(source)
    assert len(caught.value.faults) == 11
    assert caught.value.faults[10] == "x.bin: ... and 5 more"


def test_a_name_twice(tmp_path: Path) -> None:
    tensor = one_tensor(0, (6,), (1,))
    entry = tensor[tensor.index(b"X\x01\x00\x00\x00a") : -2]
    (tmp_path / "x.bin").write_bytes(zipped(b"\x80\x02}(" + entry + entry + b"u.", {"0": bytes(24)}))
    assert fault(opened(tmp_path)) == f"its dict names 'a' twice; {AGAIN}"


# The zip file itself.


def healthy() -> bytes:
    return zipped(one_tensor(0, (2, 3), (3, 1)), {"0": np.arange(6, dtype="<f4").tobytes()})


def test_a_handmade_file(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(healthy())
    (tensor,) = read_torch_file(opened(tmp_path)).tensors
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) == ("a", STORED["F32"], (2, 3), 24)
    assert read(tensor) == np.arange(6, dtype="<f4").tobytes()


def rewritten(change: Callable[[zipfile.ZipInfo], None]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(healthy())) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            change(info)
            new.writestr(info, data)
    return file.getvalue()


def deflate(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_DEFLATED


def flagged(data: bytes, bit: int) -> bytes:
    begin = data.rindex(b"PK\x01\x02")
    return data[: begin + 8] + bytes([data[begin + 8] | bit]) + data[begin + 9 :]


def with_directory(change: Callable[[bytes], bytes]) -> bytes:
    data = healthy()
    begin = data.index(b"PK\x01\x02")
    return data[:begin] + change(data[begin:])


def two_names() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", one_tensor(0, (2, 3), (3, 1)))
        archive.writestr("x/data/0", bytes(24))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x/data/0", bytes(24))
    return file.getvalue()


def bomb() -> bytes:
    """A storage whose entry lies inside another one's."""
    inner = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 24, 24, 8, 0) + b"x/data/1" + bytes(24)
    first, second = one_tensor(0, (6,), (1,), len(inner) // 4 + 1), one_tensor(0, (6,), (1,), key="1")
    both = b"\x80\x02(" + first[2:-1] + b"}X\x01\x00\x00\x00b" + second[2:-1] + b"s0t."
    data = zipped(both, {"0": inner + bytes(4), "1": bytes(24)})
    entry = data.rindex(b"PK\x01\x02")
    place = struct.pack("<L", data.index(inner))
    return data[: entry + 42] + place + data[entry + 46 :]


ZIPS: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (
        lambda: rewritten(deflate),
        "the entry 'x/byteorder' is compressed (method 8), which torch.save does not do; load it with torch and save it again",
    ),
    "encrypted": (
        lambda: flagged(healthy(), 1),
        "the entry 'x/data/0' is encrypted; unpack it with its password, and save the tensors again",
    ),
    "names": (two_names, f"its zip directory names 'x/data/0' twice; {AGAIN}"),
    "overlap": (bomb, f"the entries 'data/0' and 'data/1' overlap; {AGAIN}"),
    "missing": (
        lambda: zipped(one_tensor(0, (1,), (1,)), {"7": bytes(24)}),
        f"has no entry 'x/data/0', which its pickle names; {AGAIN}",
    ),
    "moved": (
        lambda: with_directory(lambda directory: directory.replace(b"x/data/0", b"x/data/9")),
        f"has no entry 'x/data/0', which its pickle names; {AGAIN}",
    ),
    "renamed": (
        lambda: healthy().replace(b"x/data/0", b"x/data/9", 1),
        f"the entry 'x/data/0' is not where the zip directory says; {AGAIN}",
    ),
    "other_zip": (
        lambda: healthy().replace(b"x/data.pkl", b"x/data.txt"),
        "is a zip file, but none of PyTorch: it has no data.pkl; give the file that torch.save wrote",
    ),
    "packed": (
        lambda: zipped(b"", {}).replace(b"x/data.pkl", b"a.gguf".rjust(10, b"x")),
        "is a zip file with 'xxxxa.gguf' in it; unpack it, and give what it holds",
    ),
    "big": (
        lambda: zipped(one_tensor(0, (1,), (1,)), {"0": bytes(24)}, byteorder=b"big"),
        f"was saved with the byte order 'big', only little is read; {RESAVE}",
    ),
    "script": (
        lambda: zipped(b"}.", None, **{"constants.pkl": b"}."}),
        "is a TorchScript archive, which is a program; save its tensors where you trust it: "
        "torch.save(torch.jit.load(file).state_dict(), ...)",
    ),
    "disks": (
        lambda: with_directory(lambda directory: directory[:-18] + b"\x01\x00" + directory[-16:]),
        f"its zip directory is one of several disks; {AGAIN}",
    ),
    "no_zip64": (
        lambda: with_directory(lambda directory: directory[:-6] + b"\xff\xff\xff\xff" + directory[-2:]),
        f"its zip directory needs a zip64 record, which is not there; {AGAIN}",
    ),
    "count": (
        lambda: with_directory(lambda directory: directory[:-12] + b"\x09\x00" + directory[-10:]),
        f"its zip directory ends before its last entry; {AGAIN}",
    ),
}


@pytest.mark.parametrize(("make", "expected"), ZIPS.values(), ids=ZIPS)
def test_zips(make: Callable[[], bytes], expected: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(make())
    assert fault(opened(tmp_path)) == expected


def test_zip64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of a file above 4 GB, in a small one."""
    state = {"a": torch.randn(100, 10), "b": torch.arange(7)}
    save(tmp_path, state).close()
    with zipfile.ZipFile(tmp_path / "x.bin") as old:
        entries = {name: old.read(name) for name in old.namelist()}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as new:
        for name, data in entries.items():
            new.writestr(name, data)
    data = (tmp_path / "x.bin").read_bytes()
    # As a writer does that has more than 65535 entries, or a directory behind 4 GB.
    data = data[:-14] + b"\xff" * 12 + data[-2:]
    (tmp_path / "x.bin").write_bytes(data)
    check(read_torch_file(opened(tmp_path)), state)
    (tmp_path / "x.bin").write_bytes(data.replace(b"PK\x06\x06", b"PK\x06\x00"))
    assert fault(opened(tmp_path)) == f"its zip directory needs a zip64 record, which is not there; {AGAIN}"


def test_above_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file that torch itself maps: the offsets need zip64."""
    large = torch.empty(1 << 32, dtype=torch.uint8)
    state = {"large": large, "small": torch.randn(5, 3)}
    with torch.serialization.skip_data():
        source = save(tmp_path, state)
    header = read_torch_file(source)
    assert {tensor.name: (tensor.shape, tensor.nbytes) for tensor in header.tensors} == {
        "large": ((1 << 32,), 1 << 32),
        "small": ((5, 3), 60),
    }
    assert header.tensors[1].offset > 1 << 32
    source.close()


@FORMATS
def test_cut_anywhere(arguments: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.randn(2, 3), "b": torch.randn(3, 2).T}, **arguments).close()
    data = (tmp_path / "x.bin").read_bytes()
    for length in range(600, len(data), 7) if not arguments else range(30, len(data)):
        (tmp_path / "x.bin").write_bytes(data[:length])
        text = fault(opened(tmp_path))
        assert "truncated" in text or "cut short" in text
        with pytest.raises(WidenError, match=r"^x\.bin: "):
            read_weights(opened(tmp_path))


@FORMATS
def test_damage_anywhere(arguments: dict[str, Any], tmp_path: Path) -> None:
    """A changed byte is refused or read as what it now says; there is no other error and no read outside the file."""
    save(tmp_path, {"a": torch.randn(2, 3), "b": torch.randn(4, 3).T, "c": 1}, **arguments).close()
    data = (tmp_path / "x.bin").read_bytes()
    drawn = random.Random(5)
    outcomes: set[str] = set()
    for _ in range(700):
        damaged = bytearray(data)
        for _ in range(drawn.choice((1, 1, 2, 5))):
            damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
        (tmp_path / "x.bin").write_bytes(damaged)
        source = opened(tmp_path)
        try:
            for tensor in read_weights(source).tensors:
                assert len(read(tensor)) == tensor.nbytes
            told = "x.bin: read"
        except WidenError as error:
            told = str(error)
        source.close()
        assert all(line.startswith("x.bin: ") and line.isprintable() for line in told.split("\n"))
        outcomes.add(told)
    assert "x.bin: read" in outcomes
    assert len(outcomes) > 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.bin")
    assert fault(opened(tmp_path)).startswith("is a TorchScript archive, which is a program; ")


def test_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.bin", "w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"))
    assert fault(opened(tmp_path)) == f"is a tar file as torch before 0.2 wrote it, which is not opened; {RESAVE}"


def test_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x80\x02}q\x00.")
    assert fault(opened(tmp_path)).startswith(
        "is no PyTorch file: it begins neither as a zip file nor as a pickle of torch;"
    )
    with pytest.raises(WidenError, match=r"x\.bin: is a pickle, which is not opened; convert it to safetensors"):
        read_weights(opened(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(WidenError, match=r"x\.bin: the file is empty \(0 bytes\)"):
        read_weights(opened(tmp_path))


def test_the_content_counts_and_not_the_name(tmp_path: Path) -> None:
    state = {"a": torch.randn(2, 3)}
    safetensors.torch.save_file(state, tmp_path / "x.bin")
    assert [read(tensor) for tensor in read_weights(opened(tmp_path)).tensors] == [raw(state["a"])]
    torch.save(state, tmp_path / "x.safetensors")
    source = FileSource(tmp_path / "x.safetensors")
    assert [read(tensor) for tensor in read_weights(source).tensors] == [raw(state["a"])]


def test_a_pipe_is_refused() -> None:
    with pytest.raises(
        WidenError, match="x: a PyTorch file cannot be read from a pipe; save it to a file and name that"
    ):
        read_torch_file(PipeSource(io.BytesIO(healthy()), "x"))
    with pytest.raises(WidenError, match="x: is a PyTorch zip file"):
        read_weights(PipeSource(io.BytesIO(healthy()), "x"))


def test_legacy_of_another_byte_order(tmp_path: Path) -> None:
    data = save_legacy(tmp_path).replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89")
    (tmp_path / "x.bin").write_bytes(data)
    assert fault(opened(tmp_path)) == f"was saved with the byte order 'big', only little is read; {RESAVE}"


def save_legacy(path: Path) -> bytes:
    save(path, {"a": torch.randn(2)}, **LEGACY).close()
    return (path / "x.bin").read_bytes()


def test_legacy_without_its_list(tmp_path: Path) -> None:
    data = save_legacy(tmp_path)
    end = data.rindex(b"\x80\x02]")
    (tmp_path / "x.bin").write_bytes(data[:end] + b"\x80\x02].")
    assert "does not list the storage '" in fault(opened(tmp_path))
    (tmp_path / "x.bin").write_bytes(data[:end] + b"\x80\x02]X\x01\x00\x00\x00?a." + bytes(64))
    assert fault(opened(tmp_path)) == f"lists a storage that its pickle does not name, or twice; {AGAIN}"


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod."])
def test_a_compiled_model_without_a_config_is_told_its_prefix(prefix: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    tensors = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    path = tmp_path / "compiled.pt"
    torch.save({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, path)
    given = Options(str(path), str(tmp_path / "out.safetensors"))
    with pytest.raises(WidenError) as refused:
        prepare(given)
    assert refused.value.faults == (
        f"{path}: every tensor name starts with '{prefix}', and without it the names fit the map 'llama': give --strip-prefix {prefix}",
    )
    sizes = ("num_attention_heads=6", "num_key_value_heads=3")
    prepare(replace(given, strip_prefix=prefix, settings=sizes)).checkpoint.close()
