"""A function of the user's own that says how good results are: found by its name, and called.

It takes {output: array of all samples}, the labels if it has a second argument, and the float model's outputs if one is called
`reference`. Where samples differ in shape, as texts of several lengths do, an output is a list with an array for each sample.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.core.errors import TrtoptError, UsageError
from trtopt.core.files import existing_file, whole
from trtopt.core.library_output import importing
from trtopt.data.rebatch import Arrays
from trtopt.frontend.factories import named, own_imports

REFERENCE = "reference"  # an argument of the function
Metric = Callable[..., float]
Outputs = Mapping[str, Any]


def called(metric: Any) -> str:
    """Return the name of what a request gives as `metric`; "" of None."""
    return metric if isinstance(metric, str) else getattr(metric, "__qualname__", str(metric or ""))


def metric_of(given: Any, labels: Sequence[int] | None) -> Metric:
    """Return a function, or the one that "module:function" names, or "path/to/FILE.py:function"."""
    function: Metric = given if callable(given) else _imported(given)
    if labels is None and takes_labels(function):
        raise UsageError(f"`metric='{called(given)}'` takes labels as well: add `labels='FILE'`")
    return function


def _imported(text: str) -> Metric:
    """Import a function; the current folder's modules count, too."""
    try:
        with importing, own_imports():
            function = named(text)
    except (Exception, SystemExit) as error:  # a module of the user's own may raise anything
        why = str(error) if isinstance(error, TrtoptError) else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            why = "it ends the program while it is imported: put what a script does under if __name__ == '__main__':"
        raise UsageError(f"`metric='{text}'` can't be imported: {why}") from error
    if not callable(function):
        raise UsageError(f"`metric='{text}'` isn't a function; write module:function")
    return function  # type: ignore[no-any-return]


def labels_of(labels: Any) -> tuple[int, ...]:
    """Return classes of samples: numbers, or a file of them."""
    if not isinstance(labels, (str, os.PathLike)):
        try:
            return tuple(map(operator.index, labels))
        except TypeError as error:
            raise UsageError(
                f"`labels=` takes the number of a class for each sample, or a file of them: {error}"
            ) from error
    path = existing_file(labels, "the labels")
    words = whole(path).decode("utf-8-sig", "replace").split()
    if wrong := next((word for word in words if not word.isdecimal()), None):
        raise UsageError(f"{path} holds {wrong!r}; one class number a line is needed, in the order of the samples")
    return tuple(map(int, words))


def _arguments(metric: Metric) -> set[str]:
    """Return the names of those that it needs, and `REFERENCE` wherever it takes that."""
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):  # in C, without a signature
        return set()
    return {item.name for item in parameters if item.default is item.empty or item.name == REFERENCE}


def takes_labels(metric: Metric) -> bool:
    """Return whether it has an argument for them."""
    return len(_arguments(metric) - {REFERENCE}) > 1


def scored(metric: Metric, name: str, outputs: Outputs, reference: Outputs, labels: Sequence[int] | None) -> float:
    """Call the function called `name` on these outputs."""
    arguments: list[Any] = [outputs]
    keywords = {REFERENCE: reference} if REFERENCE in _arguments(metric) else {}
    if takes_labels(metric):
        arguments.append(np.array(labels))
    try:
        return float(metric(*arguments, **keywords))
    except (Exception, SystemExit) as error:  # the user's own function may raise anything
        shapes = ", ".join(
            f"{name} {f'list of {len(item)}' if isinstance(item, list) else item.shape}"
            for name, item in arguments[0].items()
        )
        raise UsageError(f"`metric='{name}'` failed on {{{shapes}}}: {type(error).__name__}: {error}") from error


def of_all(arrays: Sequence[Arrays]) -> dict[str, Any]:
    """Return the outputs of all samples: arrays, or lists with one for each sample where these differ in shape."""
    outputs: dict[str, Any] = {}
    for name in arrays[0]:
        parts = [np.atleast_1d(item[name]) for item in arrays]
        alike = len({part.shape[1:] for part in parts}) == 1
        outputs[name] = np.concatenate(parts) if alike else [sample for part in parts for sample in part]
    return outputs
