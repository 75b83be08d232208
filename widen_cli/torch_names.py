"""The names that the pickle of a PyTorch file may ask for, and what stands for each; nothing here is the thing itself.

Source: https://github.com/pytorch/pytorch, torch/_weights_only_unpickler.py (what a checkpoint needs), torch/_utils.py (what
rebuilds a tensor), torch/storage.py (typed storages).
"""

from __future__ import annotations

from dataclasses import dataclass

# What torch calls its types, by the class of a typed storage and by the name in torch.
_STORAGE_TYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "",
    # No tensor of these can be carried; their names are told.
    **{f"{name}Storage": name for name in ("ComplexDouble", "QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}
_TORCH_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "uint64": "U64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
# Without a name here a pickle is refused. `value` is what lies beside tensors and is left out: nothing is kept of it.
_ROLES = {
    "collections.OrderedDict": "dict",
    "collections.defaultdict": "dict",
    "torch._utils._rebuild_tensor": "tensor",
    "torch._utils._rebuild_tensor_v2": "tensor",
    "torch._utils._rebuild_tensor_v3": "tensor",
    "torch._utils._rebuild_parameter": "parameter",
    "torch._utils._rebuild_parameter_with_state": "parameter",
    "torch._tensor._rebuild_from_type_v2": "wrapped",
    **{
        f"torch._utils._rebuild_{kind}": "odd"
        for kind in ("sparse_tensor", "nested_tensor", "qtensor", "meta_tensor_no_storage", "wrapper_subclass")
    },
    **dict.fromkeys(("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"), "type"),
    **dict.fromkeys(
        (
            "_codecs.encode",
            "argparse.Namespace",
            "collections.Counter",
            "numpy.core.multiarray._reconstruct",
            "numpy.core.multiarray.scalar",
            "numpy._core.multiarray._reconstruct",
            "numpy._core.multiarray.scalar",
            "numpy.dtype",
            "numpy.ndarray",
            "pathlib.PosixPath",
            "torch.Size",
            "torch.device",
            "torch.per_channel_affine",
            "torch.per_tensor_affine",
            "torch.serialization._get_layout",
        ),
        "value",
    ),
    **{
        f"{module}.{name}": "value"
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "complex", "bytearray", "list", "int", "float")
    },
}


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle asks for; `role` is what becomes of it, `dtype` the element type it stands for."""

    path: str
    role: str
    dtype: str = ""


def known_global(module: str, name: str) -> Global | None:
    """What stands for `module.name`, None where a file of tensors has no need of it."""
    path = f"{module}.{name}"
    if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGE_TYPES:
        return Global(path, "storage", _STORAGE_TYPES[name])
    if module == "torch" and name in _TORCH_TYPES:
        return Global(path, "dtype", _TORCH_TYPES[name])
    return Global(path, _ROLES[path]) if path in _ROLES else None
