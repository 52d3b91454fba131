"""Every error that trtopt raises on purpose.

A message says what happened, the value seen, the value allowed, and what to type next. It names options as the API does,
between backticks (`trtopt.core.options`); the command line shows them as flags.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from trtopt.core.library_output import loader_path, unreported
from trtopt.core.version import to_install
from trtopt.core.words import NAMED, grouped, spoken


class TrtoptError(Exception):
    """Base of every error trtopt raises on purpose; the CLI prints `for_cli` and exits with `exit_code`."""

    exit_code = 1

    @property
    def lines(self) -> list[str]:
        """The text by lines: a line break in a name isn't one."""
        return [str(self)]

    @property
    def options(self) -> dict[str, str]:
        """The options that the message names, each with the first value there, as Python writes it, or ""."""
        return dict(reversed(NAMED.findall(str(self))))

    def for_cli(self, flags: Mapping[str, str]) -> list[str]:
        """The lines with a command's `flags` for the options that they name (`trtopt.core.options`)."""
        return [spoken(line, flags) for line in self.lines]


class UsageError(TrtoptError):
    """An argument or option value that can't be right."""

    exit_code = 2


class MissingDependency(TrtoptError):
    """An optional package isn't installed; the message has the command that installs it."""


class OutputError(TrtoptError):
    """A file can't be written. `advice` ends the message, after a comma; who knows more about the output gives another."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"{problem}, {advice}" if advice else problem)
        self.problem, self.advice = problem, advice


class ModelError(TrtoptError):
    """Something about the PyTorch or ONNX model."""


class InvalidModel(ModelError):
    """No valid ONNX model: missing, truncated, cyclic, dangling, of a wrong opset."""


class _Listing(Exception):
    """`problem`, then `parts` line by line, then `advice`."""

    def __init__(self, problem: str, parts: Sequence[str] = (), advice: str = "") -> None:
        self._lines = [f"{problem}:" if parts else problem, *(f"  {part}" for part in parts), *filter(None, [advice])]
        super().__init__("\n".join(self._lines))
        self.problem, self.parts, self.advice = problem, tuple(parts), advice

    @property
    def lines(self) -> list[str]:
        return self._lines


_ALIKE = 6  # nodes of an operator that one message lists


def _some(nodes: Sequence[str]) -> str:
    nodes = [*filter(None, nodes)]  # an issue may be at none
    more = len(nodes) - _ALIKE
    return ", ".join(nodes) if more < 2 else f"{', '.join(nodes[:_ALIKE])} and {more} more"


class UnsupportedOperator(_Listing, ModelError):
    """The parser refuses nodes: `problem`, then `issues` line by line (`trtopt.core.values.Issue`), then `advice`.

    `words` are the issues in other words. Nodes that the same is said of share a line. Of many of one operator the first are
    shown, and how many more there are.
    """

    def __init__(self, problem: str, issues: Sequence[Any] = (), advice: str = "", words: Sequence[str] = ()) -> None:
        self.issues, self.words = tuple(issues), tuple(words or map(str, issues))
        pairs = zip(self.issues, self.words)
        said = grouped(((issue.op or issue, text.removeprefix(issue.node)), issue.node) for issue, text in pairs)
        alike = grouped((operator, _some(nodes) + text) for (operator, text), nodes in said.items())
        shown: list[str] = []
        for operator, texts in alike.items():
            more = len(texts) - _ALIKE
            shown += texts if more < 2 else [*texts[:_ALIKE], f"and {more} more of {operator}"]
        super().__init__(problem, shown, advice)

    def retold(self, word: Callable[[Any], str], advice: str = "") -> UnsupportedOperator:
        """Return the error with its issues in the words that `word` gives them, and an advice, where it has none yet."""
        return UnsupportedOperator(self.problem, self.issues, self.advice or advice, list(map(word, self.issues)))


class ExportMismatch(ModelError):
    """PyTorch and ONNX disagree on the same input."""


class DataError(TrtoptError):
    """Images or arrays: missing, corrupt, of a wrong shape, with NaN, too few."""


class CalibrationError(TrtoptError):
    """A tensor or table that can't give a scale."""


class BackendError(TrtoptError):
    """Something about TensorRT."""


class NoBackend(BackendError):
    """No TensorRT generation is installed."""


class UnsupportedRequest(_Listing, BackendError):
    """This generation can't honour options: `problem`, then `parts` line by line."""


class BuildFailed(BackendError):
    """The builder gave no plan; its own messages are in this one."""


class BuildCancelled(BackendError):
    """Ctrl-C."""

    exit_code = 130


class PrecisionLost(BackendError):
    """The engine doesn't hold the precision that was asked for."""


class AccuracyLost(BackendError):
    """No precision stays within the accuracy limit."""


class EngineError(TrtoptError):
    """A plan or its manifest."""


class EngineMismatch(EngineError):
    """Made by another generation or version, for another GPU, or changed since."""


class DeviceError(TrtoptError):
    """CUDA: no GPU, no driver, or a call that failed."""


class Busy(DeviceError):
    """No room for a call within its time: a session's contexts or queue are taken."""


class ServerFailed(_Listing, TrtoptError):
    """A server for models didn't start, or a model in it didn't load; `parts` is what it said."""


class NoServer(_Listing, MissingDependency):
    """No server here can serve a repository; `parts` has the line that serves it in a container."""

    exit_code = 3


class WorkerDied(TrtoptError):
    """A process of a job list ended in the middle of a task."""


_NEEDED = {
    **dict.fromkeys(("export", "init", "pipeline"), ("torch", "ort")),
    **dict.fromkeys(("build", "calibrate", "check", "refit", "sensitivity", "tune", "verify"), ("ort",)),
}  # command → all extras that it needs, but a TensorRT
_ON_GRAPHS = ("onnx", "onnx_ir", "onnxscript", "google")  # the extra `onnx`; google: its protobuf


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency where it is used; MissingDependency, with what installs it, where that fails.

    Args:
        extra: the trtopt extra that installs it, such as "ort".
        purpose: what it is needed for, as a noun phrase ("calibration").
    """
    try:
        with unreported(), loader_path:  # ONNX Runtime itself, and what imports it
            return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and error.name == top
        what = "is not installed" if absent else f"is installed but fails to import ({error})"
        install = _install(_NEEDED.get(purpose, (extra,)))
        raise MissingDependency(f"{purpose} needs {top}, which {what}: {install}") from error


def without_graphs(error: Exception, command: str = "") -> MissingDependency | None:
    """Return what to say where code on ONNX graphs was imported without the extra `onnx`; None: it is another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in _ON_GRAPHS:
        return None
    install = _install(_NEEDED.get(command, ("onnx",)))
    return MissingDependency(f"this works on ONNX graphs and needs {error.name}, which isn't installed: {install}")


def _install(extras: tuple[str, ...]) -> str:
    return f"{to_install(*extras)} (trtopt's extra{'s' * (len(extras) > 1)} {' and '.join(extras)})"
