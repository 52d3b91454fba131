"""Others' Python code at work: what it raises is told in few words, and it downloads nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from trtopt.core.files import existing_file

_PACKAGES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).resolve().parents[1]) + os.sep}
)


def essence(error: BaseException, lines: int = 3) -> str:
    """The root cause's first lines, without dumps of the graph."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = [line.strip() for line in str(error).splitlines() if line.strip()][:lines]
    return " ".join(first)[:600] or type(error).__name__


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, the outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_installed(path: str) -> bool:
    """Tell whether a file is of Python, of an installed package, or of trtopt: not the user's own."""
    return os.path.realpath(path).startswith(_PACKAGES)


def place(error: BaseException) -> str:
    """Name the place where the user's own code stood, as "FILE, line N: CODE"; empty if only packages had part in it."""
    location = ""
    for link in chain(error):
        if isinstance(link, SyntaxError) and link.filename:
            return f"{_short(link.filename)}, line {link.lineno}: {(link.text or '').strip()}".rstrip(": ")
        for frame in traceback.extract_tb(link.__traceback__):
            real = os.path.realpath(frame.filename)
            if Path(real).is_file() and not is_installed(real):
                location = f"{_short(real)}, line {frame.lineno}: {(frame.line or '').strip()[:100]}".rstrip(": ")
    return location


def _short(path: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


@contextlib.contextmanager
def own_imports() -> Iterator[None]:
    """Give sys.path back as it was, and forget the modules that came from folders which were on it only meanwhile.

    Otherwise another folder's module of the same name couldn't be opened afterwards.
    """
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        folders = {os.path.realpath(folder) for folder in sys.path if folder not in path}
        sys.path[:] = path
        new = set(sys.modules) - modules
        gone: set[str] = set()
        for name in (name for name in new if "." not in name):  # it lies in the folder of its file, or of its package
            module = sys.modules[name]
            places = list(getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""])
            if folders & {str(Path(item).resolve().parent) for item in places if item}:
                gone.add(name)
        for name in new:
            if name.partition(".")[0] in gone:
                del sys.modules[name]


def module_of_file(path: Path) -> ModuleType:
    """The user's own file, whatever installed module has its name; its folder comes first on sys.path, for its siblings."""
    path = existing_file(path, "the file").resolve()
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


class NoDownload(ConnectionError):
    """To the libraries that asked it is a missing network: those that have the file in their cache take it from there."""


@contextlib.contextmanager
def offline() -> Iterator[list[str]]:
    """Refuse to look up other machines for this thread; give the names of those that were asked for."""
    hosts: list[str] = []
    thread: int | None = threading.get_ident()
    lookup = socket.getaddrinfo

    def guarded(host: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            hosts.append(str(host))
            raise NoDownload(f"trtopt downloads nothing: {host} isn't asked")
        return lookup(host, *arguments, **options)

    setattr(socket, "getaddrinfo", guarded)  # noqa: B010  (as an assignment it doesn't type-check)
    try:
        yield hosts
    finally:
        thread = None  # should another thread have kept the guard as the original, it refuses nothing from now on
        socket.getaddrinfo = lookup
