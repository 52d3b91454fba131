"""Files: whole or absent. Atomic writes, digests, JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trtopt.errors import OutputError, UsageError


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it to `path` on success, remove it on any error.

    Raises:
        OutputError: the folder doesn't exist or isn't writable, or the disk is full.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise _output_error(target, error) from error
    partial = Path(name)
    try:
        yield partial
        if partial.stat().st_mode & 0o777 == 0o600:  # mkstemp's own mode: give the user's usual one instead
            partial.chmod(0o666 & ~_umask())
        partial.replace(target)
    except OSError as error:
        raise _output_error(target, error) from error
    finally:
        partial.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str], *others: Any) -> None:
    """Fail now rather than after the long work: `path` can be created or replaced, and is none of `others`.

    Args:
        others: files that the command reads or writes besides; what isn't a path is passed over.

    Raises:
        UsageError: it is one of `others`, which it would destroy.
        OutputError: it is a folder, its folder is missing, or it isn't writable.
    """
    target = Path(path)
    for other in others:
        if isinstance(other, (str, os.PathLike)) and os.path.realpath(other) == os.path.realpath(target):
            raise UsageError(f"{target} would overwrite a file that is read or written besides: give another name")
    try:
        if target.is_dir():
            raise OutputError(f"can't write {target}: it is a folder; give a file name")
        if not target.parent.is_dir():
            raise OutputError(
                f"can't write {target}: the folder {target.parent} doesn't exist; mkdir -p {target.parent}"
            )
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    except OSError as error:
        raise _output_error(target, error) from error
    os.close(handle)
    os.unlink(name)


def write_bytes(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    with writing(path) as partial:
        partial.write_bytes(content)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A JSON value as files here hold it."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def opened_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file opened for reading; OSError for what would be waited for or read without end, such as a FIFO or a device."""
    wait_not = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | wait_not))  # noqa: SIM115  (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content, read in blocks; OSError for what isn't a regular file."""
    with opened_regular(path) as file:
        return sha256_stream(file)


def sha256_stream(file: BinaryIO) -> str:
    """Hexadecimal SHA-256 of what is left to read in an open file."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON value, independent of key order: the key of every cache here."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def cache_folder(*parts: str) -> Path:
    """A folder under $TRTOPT_CACHE (else $XDG_CACHE_HOME/trtopt, else ~/.cache/trtopt), made if absent.

    Raises:
        OutputError: it can't be made.
    """
    root = os.environ.get("TRTOPT_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtopt"
    return made_folder(base.joinpath(*parts), "the cache folder", "set TRTOPT_CACHE to another")


def made_folder(
    path: str | os.PathLike[str], what: str = "the folder", advice: str = "give another -o/--output"
) -> Path:
    """A folder, made if absent, with those above it.

    Raises:
        OutputError: it can't be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"can't make {what} {folder}: {error.strerror}", advice) from error
    return folder


def existing_file(path: str | os.PathLike[str], what: str) -> Path:
    """`path` as a Path, or a UsageError that says what was looked for."""
    found = Path(path)
    try:
        there = found.exists()
    except OSError as error:  # such as a name too long
        raise UsageError(f"{what} {found} can't be read: {error.strerror}") from error
    if not there:
        raise UsageError(f"{what} {found} doesn't exist")
    if not found.is_file():
        kind = "a folder" if found.is_dir() else "a device, FIFO or socket"
        raise UsageError(f"{what} {found} is {kind}; a file is needed")
    return found


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _output_error(target: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    return OutputError(f"can't write {target}: {reason}; nothing was left behind", "give another -o/--output")
