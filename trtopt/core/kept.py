"""The rule that no command loses a file of its user's: what a call reads is nothing that it writes.

A request's fields say what is written (`About.writes`). Every other text or path in it that names a file names an input, and so
does what these name in turn: a recipe, a manifest, the places of an ONNX model's external weights. `keeping` compares all of it
before the work starts, and `trtopt.core.files` asks again whenever a file is about to take its name.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.files import CALLS, check_writable, opened_regular
from trtopt.core.words import named

FILE, ENGINE, FOLDER = ("",), ("", ".json", ".results.json"), (os.sep,)  # endings of what is written by a name
EXTENSIONS = frozenset([".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"])
ARRAYS = frozenset([".npy", ".npz"])
_FOLDERS = {"images": EXTENSIONS, "data": ARRAYS, "input": ARRAYS}  # option or key → endings of what is read there
# An entry of a tensor's external data as protobuf has it, and the length of the name that comes then.
_LOCATION = re.compile(rb"\n\x08location\x12([\x01-\x7f]|[\x80-\xff][\x01-\x1f])")


@dataclass(frozen=True)
class Call:
    """Files that one call reads (option → what was given for it, of any kind) and writes (option, what was given for it, and an
    ending of what is written by that name), or reads and adds to."""

    reads: Mapping[str, Any]
    targets: Sequence[tuple[str, str, str]]
    added_to: frozenset[Path] = frozenset()

    def check(self) -> None:
        """Raise UsageError where a target is an input, or is written twice."""
        written: dict[str, str] = {}
        for option, given, ending in self.targets:
            target = given + ending
            self.refuse(Path(target), option)
            if other := written.get(real := os.path.realpath(target)):
                raise _lost(option, Path(target), f"{named(other)} writes, too")
            written[real] = option

    def check_writable(self) -> None:
        """Raise OutputError where a file can't be written; in a folder that the call makes it is seen then."""
        folders = [Path(given) for _, given, ending in self.targets if ending == os.sep]
        for target in (given + ending for _, given, ending in self.targets if ending != os.sep):
            if not any(folder in Path(target).parents for folder in folders):
                check_writable(target)

    def given(self, path: Path) -> bool:
        """Tell if the path is what the user named to be written, and no name that follows from it."""
        return any(path == Path(given) for _, given, _ in self.targets)

    def refuse(self, target: Path, option: str = "") -> None:
        """Raise UsageError where writing `target` would lose an input; without `option`, its name follows from one's.

        An engine's results are read and added to by who measures it: only who names them as something else would lose them.
        """
        if not option and (target.name.endswith(ENGINE[-1]) or target in self.added_to):
            return
        with contextlib.suppress(OSError, ValueError):  # nothing is there
            info, real = target.stat(), Path(os.path.realpath(target))
            files, folders = self._inputs
            samples = (
                (name, target)
                for name, folder, endings in folders
                if real.is_relative_to(folder) and real.suffix.lower() in endings
            )
            if (found := files.get((info.st_dev, info.st_ino)) or next(samples, None)) is not None:
                if not option:
                    within = (name for name, given, _ in self.targets if Path(given) in target.parents)
                    option = next(within, self.targets[0][0] if self.targets else "output")
                raise _lost(option, found[1], f"{named(found[0])} reads")

    @functools.cached_property  # looked for only where a target is there already
    def _inputs(self) -> tuple[dict[tuple[int, int], tuple[str, Path]], list[tuple[str, Path, frozenset[str]]]]:
        """File's identity → option and path; and folders: option, path, endings."""
        files, folders = dict[tuple[int, int], tuple[str, Path]](), list[tuple[str, Path, frozenset[str]]]()
        todo = [(option, option, value, Path()) for option, value in self.reads.items()]
        for option, key, value, folder in todo:  # grows
            if isinstance(value, Mapping):
                todo += [(option, str(name), item, folder) for name, item in value.items()]
            elif isinstance(value, (list, tuple)):
                todo += [(option, key, item, folder) for item in value]
            for path in _paths(value, folder) if isinstance(value, (str, os.PathLike)) else ():
                with contextlib.suppress(OSError, ValueError):  # no name of a file's
                    info = path.stat()
                    if stat.S_ISDIR(info.st_mode) and key in _FOLDERS:
                        folders.append((option, path.resolve(), _FOLDERS[key]))
                    elif stat.S_ISREG(info.st_mode) and (info.st_dev, info.st_ino) not in files:
                        files[info.st_dev, info.st_ino] = option, path
                        todo += [(option, name, item, path.parent) for name, item in named_in(path).items()]
        return files, folders


@contextlib.contextmanager
def keeping(call: Call) -> Iterator[None]:
    """Refuse what a call would lose, now and whenever something is written within, and what can't be written."""
    call.check()
    before = CALLS.set((*CALLS.get(), call))
    try:
        call.check_writable()
        yield
    finally:
        CALLS.reset(before)


def named_in(path: Path) -> Mapping[str, Any]:
    """Return the files that a file names, by keys: a recipe's content, an engine's manifest and what that was made from,
    external weights. A job list's jobs say it themselves."""
    from trtopt.core import documents  # with msgspec, which only a file that is there needs

    found: dict[str, Any] = {"beside": [path.name + ending for ending in ENGINE[1:]]}
    with contextlib.suppress(documents.Damaged, OSError, AttributeError, KeyError, TypeError):
        if path.suffix == ".toml":
            content = documents.read_toml(path)
            return {} if "job" in content else content
        if path.suffix == ".json" and path.stat().st_size < 1 << 24:  # no table
            content = documents.read_json(path)
            return {"graph": content.get("graph_file"), "source": str(Path(content["source"]["path"]).absolute())}
        return found | {"weights": _weights(path)}
    return found


def _paths(value: str | os.PathLike[str], folder: Path) -> Iterator[Path]:
    """Yield what a text may name: a file, NAME=FILE, or FILE.py:NAME and module:NAME."""
    text = os.fspath(value)
    module = text.rpartition(":")[0]
    for name in (text, text.partition("=")[2], module, module and f"{module.replace('.', os.sep)}.py"):
        if name:
            yield folder / name


def _weights(path: Path) -> list[str]:
    """List the places of an ONNX model's external weights, without reading it as such."""
    places = dict[str, None]()
    with (
        opened_regular(path) as file,
        contextlib.suppress(ValueError),  # it is empty
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for found in _LOCATION.finditer(content) if content[:1] == b"\x08" else ():  # an ONNX model's first field
            size = found[1][0] & 0x7F | (found[1][1] << 7 if len(found[1]) > 1 else 0)
            places[os.fsdecode(content[found.end() : found.end() + size])] = None
    return list(places)


def _lost(option: str, file: Path, by: str) -> UsageError:
    return UsageError(f"{named(option)} would overwrite {file}, which {by}: give another name")
