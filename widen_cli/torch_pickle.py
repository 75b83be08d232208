"""Reads the pickle of a PyTorch file as data: a short list of opcodes and names, each with an inert stand-in.

Nothing is imported and nothing of the file is called; Python's own unpickler takes no part, since even without any name
its C code can be crashed (a deeply nested key) or made to fill the memory (a high memo number).
Source: https://github.com/python/cpython, Lib/pickletools.py (opcodes); https://github.com/pytorch/pytorch,
torch/_utils.py (what rebuilds a tensor), torch/serialization.py (what stands for a storage).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from widen_cli.errors import WidenError
from widen_cli.safetensors_file import AGAIN, AXES_LIMIT, shown
from widen_cli.sources import PIECE, Source
from widen_cli.torch_names import Global, known_global

# A tensor takes about 30 opcodes and 200 bytes, so these stand for a hundred thousand tensors and end within seconds.
PICKLE_LIMIT = 100_000_000
OPCODE_LIMIT = 3_000_000
GLOBAL_LIMIT = 1000  # bytes of a name
NUMBER_LIMIT = 1 << 63
# What is remembered can be named again and again, so nothing that is copied may be long.
ARGUMENTS_LIMIT = 16
PAIRS_LIMIT = 1_000_000
RESAVE = "where you trust the file, load it with torch and save model.state_dict() alone, best as safetensors"

_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_TEXTS = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"U": 1, b"T": 4}  # bytes of the length; the last two are Python 2's
_BYTES = {b"C": 1, b"B": 4, b"\x8e": 8, b"\x96": 8}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_PUT = {b"q": 1, b"r": 4}
_GET = {b"h": 1, b"j": 4}


class PickledDict(list[tuple[object, object]]):
    """A dict as its pairs: no key is hashed, and none that is repeated is lost."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Other:
    """Something beside the tensors, of which only the name of its kind is kept."""

    kind: str


@dataclass(frozen=True, slots=True)
class OddTensor(Other):
    """A tensor that is no plain range of elements: sparse, quantised, without bytes."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that tensors share: `numel` elements of `dtype`, which is empty where `numel` counts bytes."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as elements of a storage: the first one's number, the sizes, and the steps along them."""

    storage: Storage
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Cursor:
    """The bytes of a source from an offset on, read in pieces; WidenError where more are wanted than are there."""

    def __init__(self, source: Source, offset: int, end: int) -> None:
        self.position = offset
        self._source = source
        self._end = min(end, offset + PICKLE_LIMIT)
        self._held = b""
        self._begin = offset

    def take(self, nbytes: int) -> bytes:
        begin, after = self.position - self._begin, self.position - self._begin + nbytes
        if after > len(self._held):
            if self.position + nbytes > self._end:
                raise WidenError(f"{self._source.name}: its pickle is cut short or damaged; {AGAIN}")
            ahead = min(max(nbytes, PIECE), self._end - self.position)
            self._held, self._begin = bytes(self._source.read(self.position, ahead)), self.position
            begin, after = 0, nbytes
        self.position += nbytes
        return self._held[begin:after]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        got = bytearray()
        while (byte := self.take(1)) != b"\n" and len(got) <= GLOBAL_LIMIT:
            got += byte
        return got.decode("utf-8", "surrogateescape")


class PickleReader:
    """Reads one pickle from `offset` of a source, at most up to `end`.

    `position` is where it ended, `storages` are those it names, by key. Raises WidenError for every opcode and name that
    a file of tensors does not need, and for a damaged or oversized pickle.
    """

    def __init__(self, source: Source, offset: int, end: int) -> None:
        self.name = source.name
        self.storages: dict[str, Storage] = {}
        self._cursor = _Cursor(source, offset, end)
        self._stack: list[object] = []
        self._below: list[list[object]] = []
        self._memo: dict[int, object] = {}
        self._copied = 0

    @property
    def position(self) -> int:
        return self._cursor.position

    def load(self) -> object:
        """The value that the pickle describes, of lists, tuples, numbers, texts and this module's classes."""
        try:
            for _ in range(OPCODE_LIMIT):
                code = self._cursor.take(1)
                if code == b".":
                    return self._stack.pop()
                self._step(code)
        except (IndexError, KeyError):
            raise WidenError(f"{self.name}: its pickle is damaged at byte {self.position}; {AGAIN}") from None
        raise WidenError(f"{self.name}: its pickle has more than {OPCODE_LIMIT} opcodes; {RESAVE}")

    def _step(self, code: bytes) -> None:
        take, stack = self._cursor, self._stack
        if code in _TEXTS:
            stack.append(take.take(take.number(_TEXTS[code])).decode("utf-8", "surrogateescape"))
        elif code in _PUT:
            self._memo[take.number(_PUT[code])] = stack[-1]
        elif code in _GET:
            stack.append(self._memo[take.number(_GET[code])])
        elif code in _NUMBERS:
            layout = struct.Struct(_NUMBERS[code])
            stack.append(layout.unpack(take.take(layout.size))[0])
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _TUPLES:
            stack[-_TUPLES[code] :] = [tuple(stack[-_TUPLES[code] + index] for index in range(_TUPLES[code]))]
        elif code in _BYTES:
            stack.append(take.take(take.number(_BYTES[code])))
        elif code in _STEPS:
            _STEPS[code](self)
        else:
            raise self._refusal(f"has the opcode {shown(code.decode('latin-1'))}")

    def _refusal(self, text: str) -> WidenError:
        return WidenError(
            f"{self.name}: its pickle {text}, which a file of tensors does not need; nothing was run; {RESAVE}"
        )

    def _proto(self) -> None:
        version = self._cursor.number(1)
        if version > 5:
            raise self._refusal(f"has the protocol {version}")

    def _frame(self) -> None:
        self._cursor.take(8)

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._cursor.take(self._cursor.number(1)), "little", signed=True))

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _pop(self) -> None:
        self._stack.pop()

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _marked(self) -> list[object]:
        """What was put down since the last mark."""
        marked, self._stack = self._stack, self._below.pop()
        return marked

    def _tuple(self) -> None:
        marked = self._marked()
        self._stack.append(tuple(marked))

    def _list(self) -> None:
        self._stack.append([])

    def _dict(self) -> None:
        self._stack.append(PickledDict())

    def _set(self) -> None:
        self._stack.append(Other("set"))

    def _frozen_set(self) -> None:
        self._marked()
        self._set()

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target += items
        elif not isinstance(target, Other):
            raise self._refusal("appends to what is no list")

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._marked())

    def _update(self, items: list[object]) -> None:
        target = self._stack[-1]
        if isinstance(target, PickledDict) and len(items) % 2 == 0:
            target += zip(items[::2], items[1::2], strict=True)
        elif not isinstance(target, Other):
            raise self._refusal("sets items of what is no dict")

    def _global(self) -> None:
        module = self._cursor.line()
        self._stack.append(self._named(module, self._cursor.line()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._refusal("has a name that is no text")
        self._stack.append(self._named(module, name))

    def _named(self, module: str, name: str) -> Global:
        found = known_global(module, name)
        if found is None:
            raise self._refusal(f"asks for {shown(f'{module}.{name}')}")
        return found

    def _persistent(self) -> None:
        match self._arguments():
            case ("storage", Global(role="storage", dtype=dtype), str(key), _, int(numel), *rest) if (
                rest in ([], [None]) and 0 <= numel < NUMBER_LIMIT
            ):
                storage = Storage(key, dtype, numel)
                self.storages.setdefault(key, storage)
                self._stack.append(storage)
            case _:
                raise self._refusal("refers to something outside that is no plain storage")

    def _reduce(self) -> None:
        arguments, called = self._arguments(), self._stack.pop()
        self._stack.append(self._call(called, arguments))

    def _arguments(self) -> tuple[object, ...]:
        arguments = self._stack.pop()
        if not isinstance(arguments, tuple) or len(arguments) > ARGUMENTS_LIMIT:
            raise self._refusal("has something else than a few arguments")
        return arguments

    def _new_object_ex(self) -> None:
        self._stack.pop()
        self._reduce()

    def _build(self) -> None:
        """State for an object, which can only be left out: attributes of a dict or of an Other."""
        self._stack.pop()
        if not isinstance(self._stack[-1], PickledDict | Other | PickledTensor):
            raise self._refusal("sets the state of a type")

    def _call(self, called: object, arguments: tuple[object, ...]) -> object:
        """What the call of a known name stands for."""
        match called, arguments:
            case Global(role="value", path=path), _:
                return Other(path)
            case Global(role="odd", path=path), _:
                return OddTensor(path)
            case Global(role="dict"), (list(pairs),):
                return self._ordered_dict(pairs)
            case Global(role="dict"), () | (Global(),):
                return PickledDict()
            case Global(role="tensor"), (Storage() as storage, int(start), tuple(shape), tuple(strides), *rest):
                return self._tensor(storage, start, shape, strides, rest)
            case Global(role="parameter"), (PickledTensor() | OddTensor() as data, *_):
                return data
            case Global(role="wrapped"), (
                Global(role="tensor" | "parameter") as inner,
                Global(role="type"),
                tuple(inside),
                *_,
            ):
                self._stack.append(inside)
                return self._call(inner, self._arguments())
            case Global(path=path), _:
                raise self._refusal(f"calls {shown(path)} in an unknown way")
            case _:
                raise self._refusal("calls what is no name")

    def _ordered_dict(self, pairs: list[object]) -> PickledDict:
        """An OrderedDict as Python 2 wrote it."""
        self._copied += len(pairs)
        if self._copied > PAIRS_LIMIT:
            raise self._refusal(f"makes dicts of more than {PAIRS_LIMIT} pairs")
        return PickledDict((pair[0], pair[1]) for pair in pairs if isinstance(pair, list | tuple))

    def _tensor(
        self, storage: Storage, start: int, shape: tuple[object, ...], strides: tuple[object, ...], rest: list[object]
    ) -> PickledTensor | OddTensor:
        sizes, steps = _sizes(shape), _sizes(strides)
        if sizes is None or steps is None or len(sizes) != len(steps) or not 0 <= start < NUMBER_LIMIT:
            raise WidenError(f"{self.name}: its pickle has a tensor whose sizes and strides are no such; {AGAIN}")
        # requires_grad, hooks, then the type of an untyped storage's tensor, and bits that say "conjugated" or "negated".
        dtype = next((value.dtype for value in rest[2:] if isinstance(value, Global)), storage.dtype)
        if any(isinstance(value, PickledDict) and value for value in rest[2:]):
            return OddTensor("a tensor with its conjugate or negative bit set")
        return PickledTensor(storage, dtype, start, sizes, steps)


def _sizes(numbers: tuple[object, ...]) -> tuple[int, ...] | None:
    """The sizes of up to 64 axes, None where they are more or something else."""
    if len(numbers) > AXES_LIMIT:
        return None
    sizes = tuple(number for number in numbers if type(number) is int and 0 <= number < NUMBER_LIMIT)
    return sizes if len(sizes) == len(numbers) else None


_STEPS: dict[bytes, Callable[[PickleReader], None]] = {
    b"\x80": PickleReader._proto,
    b"\x95": PickleReader._frame,
    b"\x8a": PickleReader._long,
    b"\x94": PickleReader._memoize,
    b"0": PickleReader._pop,
    b"(": PickleReader._mark,
    b"t": PickleReader._tuple,
    b"]": PickleReader._list,
    b"}": PickleReader._dict,
    b"\x8f": PickleReader._set,
    b"\x90": PickleReader._appends,
    b"\x91": PickleReader._frozen_set,
    b"a": PickleReader._append,
    b"e": PickleReader._appends,
    b"s": PickleReader._set_item,
    b"u": PickleReader._set_items,
    b"c": PickleReader._global,
    b"\x93": PickleReader._stack_global,
    b"Q": PickleReader._persistent,
    b"R": PickleReader._reduce,
    b"\x81": PickleReader._reduce,  # NEWOBJ: what the class would be called with
    b"\x92": PickleReader._new_object_ex,
    b"b": PickleReader._build,
}
