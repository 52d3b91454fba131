"""A user's own module: found by its name or file, made by its class or factory, its faults told by file and line."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trtopt.core.errors import MissingDependency, ModelError, TrtoptError, UsageError, require
from trtopt.core.foreign import essence, module_of_file, offline, place
from trtopt.core.library_output import quiet
from trtopt.core.words import first_of

SEED = 0
_ENDINGS = {"true": "True", "false": "False", "null": "None", "none": "None"}


def parse_argument(text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`: the value as Python writes it, else as text. UsageError where there is no NAME, or the value looks
    like another language's True, False or None."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(
            f"`factory_arg=` {text!r} can't be read; write NAME=VALUE, such as num_classes=10 or weights=None"
        )
    if value in _ENDINGS:
        raise UsageError(
            f"`factory_arg=` {text!r}: write {name}={_ENDINGS[value]}, or {name}='\"{value}\"' for the text"
        )
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return name, ast.literal_eval(value)
    return name, value


def make(text: str, arguments: Sequence[Any], options: Mapping[str, Any], folder: Path | None = None) -> Any:
    """The torch.nn.Module of "package.module:FACTORY" or "FILE.py:FACTORY", which lies in `folder` (default: the current one);
    use it inside `own_imports`. ModelError where the user's code failed."""
    torch = require("torch", "torch", "export")
    with making(torch, text, lambda error: _told(text, error)):
        model = named(text, folder)
        if not isinstance(model, torch.nn.Module):
            _check_call(model, text, arguments, options)
            with quiet():
                model = model(*arguments, **options)
        elif arguments or options:
            raise UsageError(f"{text} is a ready {type(model).__name__}: it takes no factory arguments")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{text} gave a value of type {type(model).__name__}; a torch.nn.Module is needed: name a class or function that "
            "gives the model alone"
        )
    return model


def named(text: str, folder: Path | None = None) -> Any:
    """Return what "package.module:NAME" or "FILE.py:NAME" names, FILE.py in a folder; use it inside `own_imports`. UsageError
    where there is no such module, file or name; a module of the user's own may raise anything."""
    module_name, _, attribute = text.rpartition(":")
    if not module_name or not attribute:
        raise UsageError(f"{text}: write package.module:NAME or FILE.py:NAME")
    is_file = module_name.endswith(".py")
    with quiet():
        module = module_of_file(Path(folder or "", module_name)) if is_file else _module(module_name)
    return _attribute(module, attribute, text)


@contextlib.contextmanager
def making(torch: Any, text: str, told: Callable[[BaseException], TrtoptError]) -> Iterator[None]:
    """Run others' code that makes a module: seeded, without the network; `told` puts its errors in our words."""
    with torch.random.fork_rng(devices=[]), offline() as hosts:
        torch.manual_seed(SEED)
        try:
            yield
        except TrtoptError:
            raise
        except (Exception, SystemExit) as error:
            if not hosts:
                raise told(error) from error
            raise ModelError(
                f"{text} tried to download from {hosts[0]}, and trtopt downloads nothing: make the model without its "
                "published weights (`factory_arg={'weights': None}`, or pretrained=False, as the factory calls it) and give "
                "them as a file: `weights=FILE`"
            ) from error


def _module(name: str) -> ModuleType:
    """A module by name; the current folder is looked through last, so that nothing there hides what is installed."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        hint = f"; write {name}.py" if Path(f"{name}.py").is_file() else ""  # a path without its ending
        raise UsageError(
            f"the module {error.name} isn't installed, and the current folder has no {error.name.split('.')[0]}.py{hint}. For "
            "a file elsewhere: path/to/FILE.py:NAME; a package is installed with pip"
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name!r} is no module's name; write package.module:NAME or path/to/FILE.py:NAME") from error


def _attribute(module: ModuleType, attribute: str, text: str) -> Any:
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        origin, beside = getattr(module, "__file__", None), Path(f"{module.__name__}.py")
        close = difflib.get_close_matches(attribute, [name for name, value in vars(module).items() if callable(value)])
        hint = f"; close: {first_of(close)}" if close else ""
        if beside.is_file() and not (origin and beside.samefile(origin)):
            hint = f"; for the file in the current folder write {beside}:{attribute}"
        raise UsageError(f"{text}: {module.__name__} ({origin or 'built in'}) has no {attribute!r}{hint}") from error


def _check_call(factory: Any, text: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise UsageError for what can't be called so: a wrong name is no fault of the user's code."""
    if not callable(factory):
        raise UsageError(
            f"{text} is of type {type(factory).__name__}; a torch.nn.Module, or a class or function that gives one, is needed"
        )
    with contextlib.suppress(ValueError):  # built-in: it has no signature
        signature = inspect.signature(factory)
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            takes = ", ".join(str(item).partition(":")[0].partition("=")[0] for item in signature.parameters.values())
            unknown = next((name for name in options if name not in signature.parameters), None)
            raise UsageError(
                f"{text}: {f'it has no argument {unknown!r}' if unknown else error}; it takes {takes or 'none'}. Give "
                "arguments as `factory_arg={'NAME': 'VALUE'}`; where one is no number or text, such as a configuration, name "
                "a function of your file that makes the model: FILE.py:FACTORY"
            ) from error


def _told(text: str, error: BaseException) -> TrtoptError:
    where = place(error) or text
    if isinstance(error, SystemExit):
        return ModelError(
            f"{where}: the file ends the program while it is imported: put what a script does under "
            "if __name__ == '__main__':"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return MissingDependency(
            f"{where}: it needs {error.name}, which isn't installed beside trtopt ({sys.executable})"
        )
    if isinstance(error, ImportError) and "relative import" in str(error):
        return UsageError(f"{where}: {error}; type PACKAGE.MODULE:FACTORY in the folder that holds the package")
    return ModelError(f"{text} failed at {where}: {type(error).__name__}: {essence(error)}")
