"""A function of the user's own that says how good results are: found by its name, and called.

It takes {output: array of all samples}, the labels if it has a second argument, and the float model's outputs if one is called
`reference`. Where samples differ in shape, as texts of several lengths do, an output is a list with an array for each sample.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trtopt.core.errors import TrtoptError, UsageError
from trtopt.core.files import existing_file, whole
from trtopt.core.foreign import own_imports
from trtopt.core.library_output import importing
from trtopt.data.rebatch import Arrays
from trtopt.frontend.factories import named

REFERENCE = "reference"  # an argument of the function


class Metric:
    """A function, or the one that "module:function" names, or "path/to/FILE.py:function"; with the classes of the samples.

    Attributes:
        name: as messages have it.
        takes_labels: it has an argument for them.
    """

    def __init__(self, given: Any, labels: Sequence[int] | None) -> None:
        self.name = given if isinstance(given, str) else getattr(given, "__qualname__", str(given))
        self.labels = labels
        self._function: Callable[..., float] = given if callable(given) else _imported(given)
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):  # in C, without a signature
            parameters = []
        own = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        needed = {item.name for item in own if item.default is item.empty}
        self._takes_reference = any(item.name == REFERENCE for item in parameters)
        self.takes_labels = len(needed - {REFERENCE}) > 1
        if labels is None and self.takes_labels:
            raise UsageError(f"`metric='{self.name}'` takes labels as well: add `labels='FILE'`")

    def __call__(self, results: Sequence[Arrays], reference: Sequence[Arrays]) -> float:
        """Return what it gives for results of all samples, in batches, and for those of the float model."""
        outputs = _of_all(results)
        labels = [np.array(self.labels)] if self.takes_labels else []
        keywords = {REFERENCE: _of_all(reference)} if self._takes_reference else {}
        try:
            return float(self._function(outputs, *labels, **keywords))
        except (Exception, SystemExit) as error:  # the user's own function may raise anything
            shapes = ", ".join(
                f"{name} {f'list of {len(item)}' if isinstance(item, list) else item.shape}"
                for name, item in outputs.items()
            )
            raise UsageError(
                f"`metric='{self.name}'` failed on {{{shapes}}}: {type(error).__name__}: {error}"
            ) from error


def _imported(text: str) -> Callable[..., float]:
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


def labels_of(labels: Any) -> tuple[int, ...] | None:
    """Return classes of samples: numbers, or those in a file; None of None."""
    if labels is None:
        return None
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


def _of_all(arrays: Sequence[Arrays]) -> dict[str, Any]:
    """Return the outputs of all samples: arrays, or lists with one for each sample where these differ in shape."""
    outputs: dict[str, Any] = {}
    for name in arrays[0]:
        parts = [np.atleast_1d(item[name]) for item in arrays]
        alike = len({part.shape[1:] for part in parts}) == 1
        outputs[name] = np.concatenate(parts) if alike else [sample for part in parts for sample in part]
    return outputs
