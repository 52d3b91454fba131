"""The state folder: what is done, so that a run that was stopped, even killed, goes on where it was.

    jobs/NAME.json             one job: state, error, result, and the key of all that it depended on
    shards/DATA.json           how a data set is cut into shards
    shards/PASS/SHARD.json     the histograms of one shard of one pass, named by the content of its samples
    scratch.*/                 folded models and decoded images of the current run; removed when it ends, or the next starts
    lock                       held by the run at work; the system lets go of it when that process ends, however it ends. What
                               it says marks the folder as a state: another that isn't empty is refused

Every file is written whole or not at all, and there are no links: with them a stranger's folder could lead elsewhere. A
result is taken up again by the content it was made from, never by a name or a place in a list, so a job list may be
reordered and files renamed. At the end of a run shards are removed that no job of its list, and no unfinished one that was
left out of it, comes from any more.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypedDict

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.observe import Observation
from trtopt.calibration.quality import THUMB_BYTES, Sample
from trtopt.calibration.table import packed, unpacked
from trtopt.core.documents import Damaged, checked, converted, read_json
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import opened_regular, write_json
from trtopt.core.temporary import folder_in
from trtopt.jobs.results import JobResult

_JOB_FORMAT, _SHARD_FORMAT, _LAYOUT_FORMAT = "trtopt.job/1", "trtopt.shard/1", "trtopt.shards/1"

_MARK = b"process "  # begins the lock
_OWN = re.compile("[0-9a-f]{32}")  # names of passes' folders and of shards

_BYTES = ("thumb", "tokens")  # of a sample
_NUMBERS = ("mean", "std", "absmax")  # of a sample; written as text, as they may be infinite, which JSON can't say


class _Failure(TypedDict):
    type: str
    message: str


# Of a job's file, what `JobResult` doesn't say.
_Besides = TypedDict("_Besides", {"key": str, "pass": str, "sha256": str, "error": _Failure | None}, total=False)


def state_beside(jobs: str | os.PathLike[str]) -> Path:
    """Where a list's state is, unless it is told otherwise."""
    return Path(jobs).with_suffix(".state")


class State:
    """A state folder at work; made by `State.locked`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, folder

    @classmethod
    @contextlib.contextmanager
    def locked(cls, folder: Path) -> Iterator[State]:
        """The folder, made if absent, for this process alone.

        Raises:
            UsageError: another run is at work on it, it holds something else than files and folders, or is none of a run's.
            OutputError: it can't be made or written.
        """
        state = cls(folder)
        check_folder(folder)
        mine = False
        with contextlib.ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if not _is_state(folder):
                    raise UsageError(
                        f"{folder} is neither empty nor the state folder of a job list, in which runs remove files: give "
                        f"another with `state=`, such as `state={str(folder / 'state')!r}`"
                    )
                # Unbuffered: what a full disk doesn't take would be tried again when it is closed.
                descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
                lock = stack.enter_context(open(descriptor, "r+b", buffering=0))
                if not _lock(lock, patience=0.3):  # it may only be `at_work` that looks
                    lock.seek(0)
                    holder = lock.read().decode(errors="replace").strip() or "unknown process"
                    raise UsageError(
                        f"another run is at work on {folder} ({holder}): wait for it, end it, or give another folder with "
                        "`state=`"
                    )
                mine = lock.seek(0, os.SEEK_END) == 0
                lock.seek(0)
                lock.write(f"{_MARK.decode()}{os.getpid()} on {socket.gethostname()}\n".encode())
                lock.truncate()
                for part in ("jobs", "shards"):
                    (folder / part).mkdir(exist_ok=True)
                state.scratch = stack.enter_context(folder_in(folder, "scratch."))
            except OSError as error:
                if mine:  # made now, and of no use
                    shutil.rmtree(folder, ignore_errors=True)
                raise OutputError(
                    f"can't use the state folder {folder}: {error.strerror}; give another with `state=`"
                ) from error
            yield state

    def at_work(self) -> bool:
        """Whether a run holds the folder now; True, too, where that can't be asked."""
        try:
            with (self.folder / "lock").open("r+b") as lock:
                return not _lock(lock)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def job(self, name: str) -> dict[str, Any]:
        """What is recorded of a job; {} for nothing that can be read."""
        return _record(self.folder / "jobs" / f"{name}.json")

    def jobs(self) -> list[dict[str, Any]]:
        """Every record, by name."""
        return [record for path in sorted((self.folder / "jobs").glob("*.json")) if (record := _record(path))]

    def record(self, name: str, content: Mapping[str, Any]) -> None:
        self._write(Path("jobs", f"{name}.json"), {"format": _JOB_FORMAT, "name": name, **content})

    def shard_size(self, data_key: str) -> int | None:
        """Samples in a shard of this data set, as an earlier run cut it: on another machine, too, its shards are used."""
        size = _read(self.folder / "shards" / f"{data_key[:32]}.json", _LAYOUT_FORMAT).get("samples")
        return size if isinstance(size, int) and size > 0 else None

    def keep_shard_size(self, data_key: str, size: int) -> None:
        self._write(Path("shards", f"{data_key[:32]}.json"), {"format": _LAYOUT_FORMAT, "samples": size})

    def _write(self, name: Path, content: Mapping[str, Any]) -> None:
        try:
            write_json(self.folder / name, content)
        except OutputError as error:  # its advice is a command's that has an output
            raise OutputError(error.problem, "make room, or give another folder with `state=`") from error

    def _shard(self, pass_key: str, shard: str) -> Path:
        return self.folder / "shards" / pass_key[:32] / f"{shard[:32]}.json"

    def save_shard(self, pass_key: str, shard: str, content: Mapping[str, Any]) -> None:
        path = self._shard(pass_key, shard)
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"format": _SHARD_FORMAT, "pass": pass_key, "shard": shard, **content})

    def prune(self, jobs: Mapping[str, str], complete: Mapping[str, Collection[str]]) -> int:
        """Remove shards of models, data and versions that are no more; none where it isn't known what a job comes from.

        Those of finished jobs stay: another method, or a table that was lost, needs no new pass. So do those of jobs that
        aren't finished and were left out of the list.

        Args:
            jobs: pass of each calibration of the list; "" if it isn't known.
            complete: passes that were finished, with their shards: others of theirs, cut otherwise, are removed too.

        Returns:
            Files removed. What can't be removed stays.
        """
        unfinished = [
            item
            for item in self.jobs()
            if item["name"] not in jobs and item.get("state") != "done" and item.get("kind") != "build"
        ]
        waiting = [str(item.get("pass", "")) for item in unfinished]
        if not all([*jobs.values(), *waiting]):
            return 0
        shards = {key[:32]: {f"{name[:32]}.json" for name in complete.get(key, ())} for key in jobs.values()}
        shards |= {key[:32]: set[str]() for key in waiting}  # empty: all of it
        removed = 0
        for folder in (self.folder / "shards").iterdir():
            names = shards.get(folder.name)
            if not _OWN.fullmatch(folder.name) or not folder.is_dir() or names == set():
                continue
            for file in list(folder.iterdir()):
                if _OWN.fullmatch(file.stem) and (names is None or file.name not in names):
                    with contextlib.suppress(OSError):
                        file.unlink()
                        removed += 1
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if nothing is left
        return removed

    def shard(self, pass_key: str, shard: str) -> tuple[Observation, list[Sample], float] | None:
        """A finished shard: what was observed, how its samples looked, its seconds; None if not there or damaged."""
        document = _read(self._shard(pass_key, shard), _SHARD_FORMAT)
        if (document.get("pass"), document.get("shard")) != (pass_key, shard):
            return None
        observation = unpacked_observation(document)
        try:
            samples = [_sample(item) for item in converted(document.get("looks"), list[dict[str, Any]], "looks")]
            seconds = converted(document.get("seconds"), float, "seconds")
        except (Damaged, KeyError, TypeError, ValueError):
            return None
        if not observation or observation.samples != len(samples):
            return None
        return observation, samples, seconds


def packed_looks(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """As plain JSON."""
    return [
        asdict(item)
        | {name: repr(getattr(item, name)) for name in _NUMBERS}
        | {name: base64.b64encode(getattr(item, name)).decode() for name in _BYTES}
        for item in samples
    ]


def packed_observation(observation: Observation) -> dict[str, Any]:
    """As plain JSON, histograms compressed as in a table."""
    return {
        "samples": observation.samples,
        "blocks": [
            {name: packed(item) if item.total else None for name, item in block.items()} for block in observation.blocks
        ],
    }


def unpacked_observation(content: Mapping[str, Any]) -> Observation | None:
    """What `packed_observation` wrote; None if it is damaged."""
    try:
        samples = converted(content.get("samples"), int, "samples")
        blocks = converted(content.get("blocks"), list[dict[str, Any]], "blocks")
        parts = tuple(
            {name: unpacked(item, name) if item else Histogram() for name, item in block.items()} for block in blocks
        )
    except Damaged:
        return None
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        return None
    return Observation(parts, samples)


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = read_json(path)
    except Damaged:
        return {}  # absent or damaged: it is done again
    return content if isinstance(content, dict) and content.get("format") == kind else {}


def _record(path: Path) -> dict[str, Any]:
    content = _read(path, _JOB_FORMAT)
    try:
        JobResult.recorded(content)
        checked(content, _Besides)
    except Damaged:
        return {}
    return content


def _sample(look: Mapping[str, Any]) -> Sample:
    """What `packed_looks` wrote; Damaged, KeyError, TypeError or ValueError where it isn't that."""
    numbers = {name: float(look[name]) for name in _NUMBERS}
    content = {name: base64.b64decode(look[name], validate=True) for name in _BYTES}
    if len(content["thumb"]) not in (0, THUMB_BYTES) or len(content["tokens"]) % 8:
        raise ValueError("a thumbnail or tokens of another size")
    return converted({**look, **numbers, **content}, Sample)


def _is_state(folder: Path) -> bool:
    """Whether a folder is one of a run's, or may become one."""
    if {item.name for item in folder.iterdir()} <= {"lock"}:
        return True
    with contextlib.suppress(OSError), opened_regular(folder / "lock") as lock:
        return lock.read(len(_MARK)) == _MARK
    return False


def check_folder(folder: Path) -> None:
    """Refuse a state folder with links, devices or pipes in it: runs write and remove files there.

    Raises:
        UsageError: the first such thing.
    """
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            with contextlib.suppress(FileNotFoundError):  # a run at work may have removed it
                mode = path.lstat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise UsageError(
                        f"{path} is neither a file nor a folder, which is all that a state folder holds: remove it, or give "
                        "another folder with `state=`"
                    )


def _lock(file: IO[bytes], patience: float = 0.0) -> bool:
    """Take the lock that ends with this process; False if another holds it, after so many seconds still."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 20)  # beyond the text, which others may read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if patience <= 0:
            return False
        time.sleep(0.1)
        return _lock(file, patience - 0.1)
    return True
