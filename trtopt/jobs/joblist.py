"""jobs.toml: which models are calibrated on which data by which methods.

    output = "tables"                  # folder of the tables; default "calibrated", beside the file
    # device = "cuda"                  # models run in PyTorch, a worker on each GPU; default "cpu"

    [data.photos]                      # a data set, by a name of your own
    images = "photos"                  # or data = "arrays.npz"
    preprocess = "imagenet"            # a preset, a TOML file or a table
    limit = 512
    # allow_unusual_data = true        # take noise, plain or repeated samples, which are refused otherwise

    [[job]]
    model = ["resnet50.onnx", "zoo/*.onnx"]
    data = "photos"                    # or a list
    method = ["auto", "entropy"]       # default "auto"; all of a list come from one pass
    precision_override = ["head*=fp32"]

Every combination of a `[[job]]`'s lists is a job of its own, named MODEL.DATA.METHOD. Paths are relative to the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, path_in, read_toml
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file
from trtopt.core.values import METHODS, Override, choice
from trtopt.data.preprocess import PRESETS, Preprocess

_TOP = ("output", "device", "data", "job")
DEVICES = ("cpu", "cuda")
_DATA = ("images", "data", "preprocess", "limit", "allow_unusual_data")
_JOB = ("name", "model", "data", "method", "precision_override")


@dataclass(frozen=True)
class DataSet:
    """Samples, by name: `images` or `data`, as `trtopt calibrate` takes them."""

    name: str
    images: Path | None
    data: Path | None
    preprocess: Preprocess | None
    limit: int | None
    allow_unusual_data: bool

    @property
    def source(self) -> Path:
        path = self.images or self.data
        assert path is not None
        return path


@dataclass(frozen=True)
class Job:
    """One table to make."""

    name: str
    model: Path
    data: DataSet
    method: str
    precision_override: tuple[str, ...]
    output: Path
    device: str = "cpu"


def load_jobs(path: str | os.PathLike[str]) -> tuple[Job, ...]:
    """Read a job list.

    Raises:
        UsageError: no such file, not TOML, an unknown key or a value that isn't allowed (the place is named), a data set that
            isn't there, or two jobs with one name.
    """
    file = existing_file(path, "the job list")
    try:
        content = read_toml(file)
    except Damaged as error:
        raise UsageError(f"{file}: {error}") from None
    where, root = str(file), file.parent
    _table(content, where, _TOP)
    folder = _path(content.get("output", "calibrated"), root, f"{where}: output")
    device = choice(_text(content.get("device", "cpu"), f"{where}: device"), DEVICES, f"{where}: device")
    sets = _table(content.get("data", {}), f"{where}: data")
    data = {name: _data_set(name, value, root, f"{where}: [data.{name}]") for name, value in sets.items()}
    entries = content.get("job", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'{where} has no jobs; write [[job]] with model = "M.onnx" and data = "NAME" below it')
    jobs: dict[str, Job] = {}
    for number, entry in enumerate(entries, 1):
        for job in _jobs(entry, data, root, folder, device, f"{where}: [[job]] {number}"):
            if job.name in jobs:
                raise UsageError(
                    f"{where}: [[job]] {number}: a second job would be named {job.name!r} ({jobs[job.name].model} and "
                    f"{job.model}); give one of them a name"
                )
            jobs[job.name] = job
    return tuple(jobs.values())


def _jobs(entry: Any, data: Mapping[str, DataSet], root: Path, folder: Path, device: str, where: str) -> list[Job]:
    _table(entry, where, _JOB)
    models = [path for text in _texts(entry, "model", where) for path in _models(text, root, where)]
    methods = _texts(entry, "method", where) if "method" in entry else ["auto"]
    for method in methods:
        choice(method, METHODS, f"{where}: method")
    overrides = tuple(_texts(entry, "precision_override", where)) if "precision_override" in entry else ()
    try:
        _ = [Override.parse(text) for text in overrides]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    named = entry.get("name")
    if named is not None and not re.fullmatch(r"[\w.+-]+", _text(named, f"{where}: name")):
        raise UsageError(
            f"{where}: name is {named!r}; letters, digits and . _ + - are allowed, as files are named by it"
        )
    if named is not None and len(models) > 1:
        raise UsageError(
            f"{where}: name is for one model; here are {len(models)}: give each its [[job]], or drop the name"
        )
    found = []
    for model in models:
        for chosen in _texts(entry, "data", where):
            if chosen not in data:
                there = ", ".join(data) or "none: write [data.NAME]"
                raise UsageError(f"{where}: data is {chosen!r}; the data sets are {there}")
            for method in methods:
                name = f"{named or model.stem}.{chosen}.{method}"
                table = _path(f"{name}.calib.json", folder, f"{where}: the table's name")
                found.append(Job(name, model, data[chosen], method, overrides, table, device))
    return found


def _models(text: str, root: Path, where: str) -> list[Path]:
    path = _path(text, root, f"{where}: model")
    if not re.search(r"[*?[]", text):
        return [path]  # whether it exists is that job's own affair: one failure never stops the rest
    start = Path(text).anchor or root
    try:
        found = sorted(path for path in Path(start).glob(text.removeprefix(Path(text).anchor)) if path.is_file())
    except (ValueError, OSError, re.error) as error:
        raise UsageError(f"{where}: the model {text!r} isn't a pattern that can be searched for: {error}") from None
    if not found:
        raise UsageError(f"{where}: no file fits the model {text!r}")
    return found


def _data_set(name: str, value: Any, root: Path, where: str) -> DataSet:
    if not re.fullmatch(r"[\w+-]+", name):
        raise UsageError(f"{where}: a data set's name is letters, digits and _ + -, as files are named by it")
    table = _table(value, where, _DATA)
    if ("images" in table) == ("data" in table):
        raise UsageError(f'{where}: needs either images = "FOLDER" or data = "ARRAYS.npz"')
    limit = table.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UsageError(f"{where}: limit is {limit!r}; a whole number from 1 is needed")
    images, data = (_path(table[key], root, f"{where}: {key}") if key in table else None for key in ("images", "data"))
    prepared = table.get("preprocess")
    if images is not None and prepared is None:
        raise UsageError(
            f"{where}: images need preprocess, how pixels become inputs: {', '.join(PRESETS)} or a TOML file"
        )
    if images is None and prepared is not None:
        raise UsageError(f"{where}: preprocess is for images: arrays are used as they are; drop it")
    if isinstance(prepared, str) and prepared not in PRESETS:
        prepared = _path(prepared, root, f"{where}: preprocess")
    try:
        preprocess = None if prepared is None else Preprocess.load(prepared)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    unusual = table.get("allow_unusual_data", False)
    if not isinstance(unusual, bool):
        raise UsageError(f"{where}: allow_unusual_data is {unusual!r}; true or false is needed")
    return DataSet(name, images, data, preprocess, limit, unusual)


def _table(value: Any, where: str, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A table, with no other keys than `keys` if there are any."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {value!r}; a table is needed")
    if keys and (unknown := [key for key in value if key not in keys]):
        raise UsageError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(keys)}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} is {value!r}; a text is needed")
    return value


def _path(value: Any, folder: Path, where: str) -> Path:
    try:
        return path_in(folder, _text(value, where))
    except Damaged as error:
        raise UsageError(f"{where}: {error}") from None


def _texts(entry: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A text, or a list of them without repetitions."""
    if key not in entry:
        raise UsageError(f"{where}: lacks {key}")
    value = entry[key]
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise UsageError(f"{where}: {key} is an empty list")
    return list(dict.fromkeys(_text(item, f"{where}: {key}") for item in listed))
