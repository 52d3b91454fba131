"""Files: whole or absent. Atomic writes, digests, JSON."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import io
import json
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from trtopt.core.errors import OutputError, UsageError
from trtopt.core.temporary import ADVICE, folder_in, is_scratch

WHOLE = 256 << 20  # bytes of a file that is read at once; models and plans may have more


# In progress, each within that before it (`trtopt.core.kept.Call`).
CALLS: ContextVar[tuple[Any, ...]] = ContextVar("calls", default=())


@contextlib.contextmanager
def writing_together(*paths: str | os.PathLike[str]) -> Iterator[tuple[Path, ...]]:
    """Give temporary paths; on success each becomes one of `paths`, and all are on the disk before the first takes its name. On
    any error they are removed.

    A link that the user named is followed: what it points at is written. A file that is there gives the new one its mode.
    UsageError where a call in progress reads one of `paths`, OutputError where one can't be written."""
    targets = [_target(path) for path in paths]
    partials: list[Path] = []
    try:
        with contextlib.ExitStack() as stack:
            # Not by their own names: who looks for files of some kind must not find what a killed run left.
            partials += [stack.enter_context(folder_beside(target)) / "partial" for target in targets]
            modes = list[int]()
            for partial, target in zip(partials, targets):
                partial.touch(0o666, exist_ok=False)  # the system takes the umask off
                modes.append(0o777 & (target if target.exists() else partial).stat().st_mode)
            yield tuple(partials)
            for partial, mode in zip(partials, modes):
                partial.chmod(mode)
                if not is_scratch(partial):
                    sync(partial)
            for partial, target in zip(partials, targets):
                partial.replace(target)
    except OSError as error:
        failed = [target for partial, target in zip(partials, targets) if str(partial) == error.filename]
        raise _output_error((failed or targets)[0], error) from error


@contextlib.contextmanager
def folder_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder from which files can be renamed to `path`; OutputError where it can't be made."""
    target = _target(path)
    with contextlib.ExitStack() as stack:
        try:
            # Long names must leave room for more.
            folder = stack.enter_context(folder_in(target.parent, f".{target.name[:40]}."))
        except OSError as error:
            raise _output_error(target, error) from error
        yield folder


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fail now rather than after the long work: UsageError where `path` is an input, which would be lost; OutputError where it
    isn't a file, its folder is missing, or it isn't writable."""
    with folder_beside(path):
        pass


def check_ending(
    path: str | os.PathLike[str], others: Sequence[str], what: str, other: str, ending: str, more: str = ""
) -> None:
    """Raise UsageError for a name that ends as `other` kinds of files do (`others`) where `what`, with another `ending`, is
    written: it would be taken for one, or replace one. `more` ends the message."""
    name = Path(os.fspath(path))
    if name.suffix.lower() in others:
        raise UsageError(
            f"`output=` {name} is the name of {other}, and {what} is written: give {name.with_suffix(ending)}{more}"
        )


def write_bytes(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    with writing_together(path) as (partial,):
        partial.write_bytes(content)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A JSON value as files here hold it."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


class Unreadable(UsageError, OSError):
    """A file that can't be read (number, why, path): an error of the system's for who expects one, else the user's."""

    def __str__(self) -> str:
        return f"{self.filename} can't be read: {self.strerror}"


def opened_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file opened for reading; Unreadable for what would be waited for or read without end, such as a FIFO or a device."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115  (the caller closes it)
    except IsADirectoryError as error:
        raise Unreadable(errno.EISDIR, "it is a folder", path) from error
    if not stat.S_ISREG(mode := os.fstat(file.fileno()).st_mode):
        file.close()
        raise Unreadable(errno.EINVAL, f"it is {_kind(mode)}", path)
    return file


def whole(path: str | os.PathLike[str], limit: int | None = WHOLE) -> bytes:
    """A file's content; Unreadable for what isn't a regular file, or has more than `limit` bytes (None: any number)."""
    with opened_regular(path) as file:
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise Unreadable(errno.EFBIG, f"over {limit >> 20} MiB", path)
        return file.read()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content, read in blocks; OSError for what isn't a regular file."""
    digest = hashlib.sha256()
    with opened_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON value, independent of key order: the key of every cache here."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def cache_path() -> Path:
    """$TRTOPT_CACHE, else $XDG_CACHE_HOME/trtopt, else ~/.cache/trtopt."""
    root = os.environ.get("TRTOPT_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtopt"


def cache_folder(*parts: str) -> Path:
    """A folder under `cache_path()`, made if absent; OutputError where it can't be."""
    return made_folder(cache_path().joinpath(*parts), "the cache folder", "set TRTOPT_CACHE to another")


def made_folder(path: str | os.PathLike[str], what: str = "the folder", advice: str = "give another `output=`") -> Path:
    """A folder, made if absent, with those above it; OutputError where it can't be."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputError(f"can't make {what} {folder}: a file, pipe or device has that name", advice) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"can't make {what} {folder}: {_reason(error)}", advice) from error
    return folder


@contextlib.contextmanager
def filled_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder as of `made_folder`, which is taken away again if it was made for what is done within, and that fails and
    leaves nothing in it."""
    new, folder = not Path(path).exists(), made_folder(path)
    try:
        yield folder
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()
        raise


def existing_file(path: str | os.PathLike[str], what: str, advice: str = "") -> Path:
    """`path` as a Path, or a UsageError that says what was looked for, and `advice` where nothing is there."""
    try:
        file = Path(path)
        with opened_regular(file) as content:
            content.read(1)
    except TypeError:
        raise UsageError(f"{what} is {type(path).__name__}; a path is needed") from None
    except (FileNotFoundError, NotADirectoryError):
        with contextlib.suppress(OSError):
            for near in difflib.get_close_matches(file.name, [item.name for item in file.parent.iterdir()], 1, 0.8):
                advice = f"did you mean {file.with_name(near)}?"
        raise UsageError(f"{what} {file} doesn't exist{advice and '; '}{advice}") from None
    except (OSError, ValueError) as error:  # not the caller's to read, a damaged disk; a name too long, or with a NUL
        raise UsageError(f"{what} {path} can't be read: {_reason(error)}") from error
    return file


def _kind(mode: int) -> str:
    kinds = {"d": "a folder", "c": "a device", "b": "a device", "p": "a pipe", "s": "a socket"}
    return kinds.get(stat.filemode(mode)[0], "no regular file")


def _target(path: str | os.PathLike[str]) -> Path:
    """The file to write: where `path` is a link that the user named, what it points at; another is replaced by the file."""
    target, calls = Path(path), CALLS.get()
    for call in calls:
        call.refuse(target)
    try:
        if target.is_symlink() and (not calls or calls[0].given(target)):
            target = Path(os.path.realpath(target))
        mode = None
        with contextlib.suppress(FileNotFoundError):
            mode = target.stat().st_mode
        if mode is not None and not stat.S_ISREG(mode):
            raise OutputError(f"can't write {target}: it is {_kind(mode)}", "give a file name")
        if mode is None and os.fspath(path).endswith(os.sep):
            raise OutputError(f"can't write {os.fspath(path)}: that is the name of a folder", "give a file name")
        if mode is None and not target.parent.is_dir():
            problem = f"can't write {target}: the folder {target.parent} doesn't exist"
            raise OutputError(problem, f"create it with mkdir -p {shlex.quote(str(target.parent))}")
    except (OSError, ValueError) as error:
        raise _output_error(target, error) from error
    return target


def sync(path: Path) -> None:
    """Have its content on the disk before it takes a name: losing power must not leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _output_error(target: Path, error: OSError | ValueError) -> OutputError:
    advice = ADVICE if is_scratch(target) else "give another `output=`"
    return OutputError(f"can't write {target}: {_reason(error)}; nothing was left behind", advice)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
