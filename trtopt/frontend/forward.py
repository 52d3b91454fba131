"""Call a module's forward and name what it returns: inputs by argument name or in order, outputs flat and named."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo

INNER = "trtopt"  # what the exported model calls the user's module: its weights' names begin so


class Arguments:
    """forward's arguments as its signature has them: `ordered` by position, all `names`, those `required`; `free`: it takes any
    number by position (*args), so that names say nothing."""

    def __init__(self, module: Any) -> None:
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # built-in
            parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        single = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        self.ordered = [item.name for item in single if item.kind != item.KEYWORD_ONLY]
        self.names = [item.name for item in single]
        self.required = [item.name for item in single if item.default is item.empty]
        self.free = any(item.kind == item.VAR_POSITIONAL for item in parameters)
        self._optional = {item.name for item in single} - set(self.required)

    def __str__(self) -> str:
        arguments = [f"{name} (optional)" if name in self._optional else name for name in self.names]
        return ", ".join([*arguments, *(["*args"] if self.free else [])]) or "nothing"

    def order(self, infos: Sequence[TensorInfo], text: str) -> tuple[list[TensorInfo], tuple[str, ...]]:
        """The inputs in the order in which they are handed over, and the arguments of the last ones, which go by name.

        Names that are forward's own count as such, in any order; if none is, they are taken in order, as new names.

        Raises:
            UsageError: a name is wrong, one too many, or missing.
        """
        names = [info.name for info in infos]
        wrong = [name for name in names if name not in self.names]
        problem = ""
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"the input {twice[0]!r} is given twice"
        elif wrong and len(wrong) < len(names) and not self.free:
            problem = f"forward has no argument {wrong[0]!r}"
        elif wrong and len(names) > len(self.ordered) and not self.free:
            problem = f"{len(names)} inputs are given ({', '.join(names)})"
        if problem:
            raise UsageError(f"{text}: {problem}; forward takes: {self}")
        if wrong:
            feeds, keywords = set(self.ordered[: len(names)]), tuple[str, ...]()
        else:
            infos = sorted(infos, key=lambda info: self.names.index(info.name))
            feeds, first = set(names), 0
            while first < min(len(infos), len(self.ordered)) and infos[first].name == self.ordered[first]:
                first += 1
            keywords = tuple(info.name for info in infos[first:])
        absent = [name for name in self.required if name not in feeds]
        if absent:
            typed = " ".join(f"`inputs='{name}:{example(name)}'`" for name in absent)
            raise UsageError(
                f"{text}: forward needs {', '.join(absent)}, too; it takes: {self}. Add its shape, such as {typed}"
            )
        return list(infos), keywords


def example(name: str) -> str:
    """A shape to begin with, by what the argument's name says."""
    if re.search(r"ids|mask|token", name):
        return "batchxsequence:int64"
    return "batchx3x224x224" if re.search(r"^(x|input|im(a?ge?)?s?|pixels|photo|frame|image)", name) else "batchx8"


def called(torch: Any, module: Any, keywords: tuple[str, ...]) -> Any:
    """A module around `module` that takes tensors by position only, the last ones as `keywords`, and gives a flat tuple.

    torch's exporter gets it instead: dataclasses, None and other values among the outputs, keyword-only arguments, and
    submodules named as attributes of its own graph ("meta") are all beyond it.
    """

    class Called(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            setattr(self, INNER, module)
            self.training = False

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            split = len(tensors) - len(keywords)
            result = module(*tensors[:split], **dict(zip(keywords, tensors[split:])))
            return tuple(value for _, value in leaves(result) if isinstance(value, torch.Tensor))

    return Called()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in a result, depth first, with names made of its keys, fields and places."""
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = list(zip(value._fields, value))
    elif isinstance(value, (list, tuple)):
        parts, name = [(str(place), item) for place, item in enumerate(value)], name or "output"
    else:
        yield name or "output", value
        return
    for key, item in parts:
        yield from leaves(item, f"{name}_{key}" if name else key)


def output_names(found: Sequence[str], wished: Sequence[str], inputs: Sequence[str], text: str) -> list[str]:
    """The file's names of its outputs: as wished, else as they are called in what forward returns.

    Raises:
        UsageError: another number is wished than there is, one twice, or an input's.
    """
    if wished:
        if len({*wished, *inputs}) != len(found) + len(inputs) or len(wished) != len(found):
            raise UsageError(
                f"`output_names=` is {', '.join(wished)}; {text} gives {len(found)} output{'s' * (len(found) != 1)} "
                f"({', '.join(found)}), and each needs a name that neither another nor an input ({', '.join(inputs)}) has"
            )
        return list(wished)
    names: list[str] = []
    for name in found:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        fresh = (plain if number == 1 else f"{plain}_{number}" for number in range(1, len(found) + 3))
        names.append(next(item for item in fresh if item not in names and item not in inputs))
    return names
