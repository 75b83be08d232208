"""The state of an optimizer as `torch.save(optimizer.state_dict(), ...)` writes it, read without running its pickle.

Source: https://github.com/pytorch/pytorch, torch/optim/optimizer.py (`state_dict`), torch/optim/adam.py (what Adam keeps);
https://github.com/huggingface/transformers, trainer.py (`optimizer.pt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from widen_cli.errors import WidenError
from widen_cli.safetensors_file import AGAIN, StoredTensor, shown
from widen_cli.sources import FileSource
from widen_cli.torch_file import PickledFile, read_values
from widen_cli.torch_pickle import PickledDict, PickledTensor

# What is kept of gradients, and in which power of them; `step` is a count.
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
STEP = "step"
ADAM = "only Adam's and AdamW's are grown (exp_avg, exp_avg_sq); leave --optimizer out to begin with a new one"


@dataclass(frozen=True)
class ParameterGroup:
    """The numbers of a group's parameters, and their names where the optimizer was given these."""

    numbers: tuple[int, ...]
    names: tuple[str, ...] | None


@dataclass(frozen=True)
class OptimizerState:
    """The moments of every parameter that has some, by its number and what they are called; and the groups."""

    path: Path
    source: FileSource
    moments: Mapping[int, Mapping[str, StoredTensor]]
    groups: tuple[ParameterGroup, ...]

    @property
    def name(self) -> str:
        return self.source.name

    def close(self) -> None:
        self.source.close()


def open_optimizer(path: Path) -> OptimizerState:
    """The checked state in a file. Raises WidenError where it is none of Adam, or does not hold together."""
    source = FileSource(path)
    try:
        return _read(path, source)
    except BaseException:
        source.close()
        raise


def _read(path: Path, source: FileSource) -> OptimizerState:
    file = read_values(source)
    root = _table(file.value, source.name, "its top")
    if not {"state", "param_groups"} <= root.keys():
        raise WidenError(
            f"{source.name}: is no optimizer's state: it has no 'state' and 'param_groups'; save optimizer.state_dict()"
        )
    groups = tuple(_groups(root["param_groups"], source.name))
    numbers = [number for group in groups for number in group.numbers]
    if len({*numbers}) != len(numbers):
        raise WidenError(f"{source.name}: its groups name a parameter twice; {AGAIN}")
    moments = dict(_moments(file, root["state"], source.name))
    if strange := [number for number in moments if number not in {*numbers}]:
        raise WidenError(
            f"{source.name}: holds the state of parameter {strange[0]}, which is in none of its groups; {AGAIN}"
        )
    if not moments:
        raise WidenError(f"{source.name}: holds no moments of any parameter; leave --optimizer out")
    return OptimizerState(path, source, moments, groups)


def _table(value: object, name: str, what: str) -> dict[object, object]:
    if not isinstance(value, PickledDict) or not all(isinstance(key, str | int) for key, _ in value):
        raise WidenError(f"{name}: {what} is no dict of an optimizer's state; save optimizer.state_dict()")
    return dict(value)


def _groups(value: object, name: str) -> Iterator[ParameterGroup]:
    for group in value if isinstance(value, list) else [None]:
        table = _table(group, name, "a group of parameters")
        numbers, names = table.get("params"), table.get("param_names")
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise WidenError(f"{name}: a group of parameters has no list of their numbers; {AGAIN}")
        if names is not None and not (
            isinstance(names, list) and len(names) == len(numbers) and all(isinstance(each, str) for each in names)
        ):
            raise WidenError(f"{name}: a group's param_names are no list of as many names as parameters; {AGAIN}")
        if table.get("decoupled_weight_decay") is False and table.get("weight_decay"):
            raise WidenError(
                f"{name}: its weight decay ({shown(table['weight_decay'])}) was added to the gradients (Adam, not AdamW), so that "
                "its moments are no moments of gradients; leave --optimizer out to begin with a new one"
            )
        yield ParameterGroup(tuple(numbers), None if names is None else tuple(names))


def _moments(file: PickledFile, value: object, name: str) -> Iterator[tuple[int, dict[str, StoredTensor]]]:
    for number, entry in _table(value, name, "its 'state'").items():
        table = _table(entry, name, f"the state of parameter {shown(number)}")
        if type(number) is not int:
            raise WidenError(f"{name}: its state is by {shown(number)} and not by numbers; save optimizer.state_dict()")
        strange = [key for key in table if key not in POWERS and key != STEP]
        if strange or not {"exp_avg", "exp_avg_sq"} <= table.keys():
            held = ", ".join(map(shown, table))
            raise WidenError(f"{name}: keeps {held or 'nothing'} of a parameter; {ADAM}")
        tensors = {str(key): value for key, value in table.items() if key != STEP}
        if odd := [key for key, tensor in tensors.items() if not isinstance(tensor, PickledTensor)]:
            raise WidenError(f"{name}: {shown(odd[0])} of parameter {number} is no plain tensor; {AGAIN}")
        pairs = [(f"{number}.{key}", tensor) for key, tensor in tensors.items() if isinstance(tensor, PickledTensor)]
        stored = {tensor.name.partition(".")[2]: tensor for tensor in file.stored(pairs)}
        if len({tensor.shape for tensor in stored.values()}) > 1 or any(
            tensor.dtype.kind != "float" for tensor in stored.values()
        ):
            raise WidenError(f"{name}: the moments of parameter {number} are not of one shape, or no numbers; {AGAIN}")
        yield number, stored
