"""Where a team's engines lie: any file system that fsspec knows, such as S3, Google Cloud Storage or a mounted folder.

An entry is `URL/DIGEST/`. Its files carry the digest of their content in their names, and `key.json`, which names them, is
written last. So who reads meanwhile sees a whole entry or none, and two that write at once don't mix theirs.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, parsed_json
from trtopt.core.errors import MissingDependency, TrtoptError, UsageError, require

KEY = "key.json"
_LARGEST_KEY = 1 << 20  # bytes


class RemoteFailed(TrtoptError):
    """The file system behind a URL doesn't do what is needed; the message has its own words."""


class Remote:
    """Entries behind a URL.

    Raises:
        MissingDependency: fsspec, or what it needs for this kind of URL, isn't installed.
        UsageError: it isn't a URL that fsspec knows.
        RemoteFailed: it can't be opened.
    """

    def __init__(self, url: str) -> None:
        fsspec = require("fsspec", "store", f"the store {url}")
        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise MissingDependency(f"the store {url} needs another package: {error}") from error
        except ValueError as error:
            raise UsageError(f"`store='{url}'` isn't a URL that fsspec knows: {error}") from error
        except Exception as error:  # each kind of file system has its own
            raise RemoteFailed(f"can't open the store {url}: {_words(error)}") from error

    def pull(self, digest: str, folder: Path) -> bool:
        """Copy an entry into `folder`, its `key.json` last; False where there is none. Nothing of it is checked here.

        Raises:
            RemoteFailed: it couldn't be read whole.
        """
        place = f"{self._root}/{digest}"
        try:
            try:
                content = self._files.cat_file(f"{place}/{KEY}", start=0, end=_LARGEST_KEY)
            except FileNotFoundError:
                return False
            for name, about in _named(content).items():
                self._files.get_file(f"{place}/{_there(name, about)}", str(folder / name))
            (folder / KEY).write_bytes(content)
            return True
        except Exception as error:
            raise RemoteFailed(f"can't read {self.url}/{digest}: {_words(error)}") from error

    def push(self, digest: str, folder: Path) -> None:
        """Copy the entry in `folder` there, `key.json` last.

        Raises:
            RemoteFailed: it couldn't be written.
        """
        place = f"{self._root}/{digest}"
        try:
            content = (folder / KEY).read_bytes()
            with contextlib.suppress(FileExistsError, NotImplementedError):  # buckets have no folders
                self._files.makedirs(place, exist_ok=True)
            for name, about in _named(content).items():
                self._files.put_file(str(folder / name), f"{place}/{_there(name, about)}")
            if _renames(self._files):  # where it would be seen half written
                partial = f"{place}/{os.getpid()}.{threading.get_ident()}.partial"
                self._files.pipe_file(partial, content)
                self._files.mv(partial, f"{place}/{KEY}")
            else:
                self._files.pipe_file(f"{place}/{KEY}", content)
        except Exception as error:
            raise RemoteFailed(f"can't write {self.url}/{digest}: {_words(error)}") from error


def _named(content: bytes) -> Mapping[str, Mapping[str, Any]]:
    """File name → sha256 and bytes, of a `key.json` that somebody else may have written.

    Raises:
        Damaged: it isn't one, or names files elsewhere.
    """
    document = parsed_json(content)
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict):
        raise Damaged(f"{KEY} names no files")
    for name, about in files.items():
        digest = about.get("sha256") if isinstance(about, dict) else None
        if (
            name == KEY
            or not re.fullmatch(r"[\w+-][\w.+-]{0,99}", name)
            or not re.fullmatch(r"[0-9a-f]{64}", str(digest))
        ):
            raise Damaged(f"{KEY} names the file {name!r}, which is none of an entry")
    return files


def _there(name: str, about: Mapping[str, Any]) -> str:
    return f"{about['sha256'][:16]}.{name}"


def _renames(files: Any) -> bool:
    """Whether these are files of a kernel, where renaming is whole and writing isn't; a bucket's objects come whole."""
    protocol = files.protocol
    return "file" in ([protocol] if isinstance(protocol, str) else protocol)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
