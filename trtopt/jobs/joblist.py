"""jobs.toml: which models are calibrated on which data by which methods, and which engines are built of them.

    output = "tables"                  # folder of the tables; default "calibrated", beside the file
    # device = "cuda"                  # models run on GPUs, a worker on each; default "cpu"

    [data.photos]                      # a data set, by a name of your own
    images = "photos"                  # or data = "arrays.npz"
    preprocess = "imagenet"            # a preset, a TOML file or a table
    limit = 512
    # allow_unusual_data = true        # take copies of one sample, which are refused otherwise

    [[job]]
    model = ["resnet50.onnx", "zoo/*.onnx"]
    data = "photos"                    # or a list
    method = ["auto", "entropy"]       # default "auto"; all of a list come from one pass
    precision_override = ["head*=fp32"]

    [[job]]
    kind = "build"                     # engines; default "calibrate"
    model = "zoo/*.onnx"
    precision = ["fp16", "int8"]       # `PRECISIONS`
    data = "photos"                    # for the precisions that need any: the list's own table of it, or the samples
    target = ["sm89", "sm120"]         # an engine for each; "sm89,sm120" is one for both
    # resource = ["accelerator_type:H200"]  # with Ray: an engine from each kind of node
    backend = "rtx"                    # and any other option of `BuildRequest`

Every combination of a `[[job]]`'s lists is a job of its own, named MODEL.DATA.METHOD, or MODEL.PRECISION.TARGET.RESOURCE as far
as these are given. Paths are relative to the file.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from trtopt.autotune.building import GOAL
from trtopt.autotune.tuning import budget_of
from trtopt.builder.asked import spec_of
from trtopt.builder.request import BuildRequest
from trtopt.core.documents import Damaged, read_toml
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file
from trtopt.core.kept import Call
from trtopt.core.options import fitting, idle, keyed, options, without
from trtopt.core.values import METHODS, Override, choice, parse_targets
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.evaluation.limits import Limits
from trtopt.jobs.request import JobsRequest
from trtopt.recipes.classnames import load_classes

_TOP = ("output", "engines", "device", "data", "job")
KINDS = ("calibrate", "build")
# Each the options of a build that it stands for.
PRECISIONS = {
    "fp32": (),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "int8": ("int8",),
    "fp8": ("fp8",),
    "int8+bf16": ("int8", "bf16"),
    "fp8+bf16": ("fp8", "bf16"),
}
_FLAGS = ("fp16", "bf16", "int8", "fp8")
_BY_DATA = ("images", "preprocess", "limit")
DEVICES = ("cpu", "cuda")
_DATA = ("images", "data", "preprocess", "limit", "allow_unusual_data")
_JOB = ("kind", "name", "model", "data", "method", "precision_override")
_BUILD = ("kind", "name", "model", "precision", "data", "resource", "target")  # beside the options of a build
# Options of a build, and where a list says these.
_ELSEWHERE = {name: f' is said by precision = "{name}"' for name in _FLAGS} | {
    "device": ": a run uses each GPU; those that it may use are named in CUDA_VISIBLE_DEVICES",
    "output": ": engines are named by their jobs, in the folder that the list's engines says",
}


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


@dataclass(frozen=True)
class BuildJob:
    """One engine to make.

    Attributes:
        request: what is asked for; its `calib` may be the table of `calibration`.
        precision: a key of `PRECISIONS`, or "best".
        data: what it is calibrated or judged on.
        calibration: the job of this list whose table it needs.
        resource: of the Ray node that builds it; "": any node.
    """

    name: str
    request: BuildRequest
    precision: str
    data: DataSet | None
    calibration: Job | None
    resource: str

    @property
    def model(self) -> Path:
        return Path(os.fspath(self.request.model))

    @property
    def output(self) -> Path:
        return Path(self.request.output)

    @property
    def targets(self) -> str:
        return ",".join(f"sm{target}" for target in parse_targets(self.request.target)) if self.request.target else ""


def load_jobs(path: str | os.PathLike[str]) -> tuple[Job | BuildJob, ...]:
    """Read a job list. A calibration that only a build asks for stands before it.

    Raises:
        UsageError: no such file, not TOML, an unknown key or a value that isn't allowed (the place is named), a data set that
            isn't there or that no job names, options that don't go together or have no effect, or two jobs with one name.
    """
    file = existing_file(path, "the job list")
    where = str(file)
    with _saying(where):
        content = read_toml(file)
    reader = _Reader(_table(content, where, _TOP), where, file.parent)
    entries = content.get("job", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'{where} has no jobs; write [[job]] with model = "M.onnx" and data = "NAME" below it')
    building: list[tuple[int, dict[str, Any]]] = []
    for number, entry in enumerate(entries, 1):
        at = f"{where}: [[job]] {number}"
        if choice(_text(_table(entry, at).get("kind", "calibrate"), f"{at}: kind"), KINDS, f"{at}: kind") == "build":
            building.append((number, entry))
        else:
            reader.add_calibrations(entry, number, at)
    for number, entry in building:  # when it is known which tables there will be
        reader.add_builds(entry, number, f"{where}: [[job]] {number}")
    _refuse_idle(content, reader.jobs.values(), where)
    try:
        _call(file, content, reader.jobs.values()).check()
    except UsageError as error:
        raise UsageError(f"{where}: {in_list(str(error))}") from None
    return tuple(sorted(reader.jobs.values(), key=lambda job: reader.order[job.name]))


class _Reader:
    """Makes jobs of a list's entries.

    Attributes:
        jobs: by name, in the order in which they were made.
        order: the number of the entry that each comes from.
    """

    def __init__(self, content: Mapping[str, Any], where: str, root: Path) -> None:
        self.where, self.root = where, root
        self.folder = _path(content.get("output", "calibrated"), root, f"{where}: output")
        self.engines = _path(content.get("engines", "engines"), root, f"{where}: engines")
        self.device = choice(_text(content.get("device", "cpu"), f"{where}: device"), DEVICES, f"{where}: device")
        sets = _table(content.get("data", {}), f"{where}: data")
        self.data = {name: _data_set(name, value, root, f"{where}: [data.{name}]") for name, value in sets.items()}
        self.jobs: dict[str, Job | BuildJob] = {}
        self.order: dict[str, int] = {}

    def add(self, job: Job | BuildJob, number: int) -> None:
        if (other := self.jobs.get(job.name)) is not None:
            raise UsageError(
                f"{self.where}: [[job]] {number}: a second job would be named {job.name!r} ({other.model} and {job.model}); "
                "give one of them a name"
            )
        self.jobs[job.name], self.order[job.name] = job, number

    def add_calibrations(self, entry: Mapping[str, Any], number: int, where: str) -> None:
        if (own := next((name for name in entry if name in _DATA and name not in _JOB), None)) is not None:
            raise UsageError(
                f'{where}: {own} belongs into a data set: write [data.NAME] with {own} = … below it, and data = "NAME" here'
            )
        if build_options := [name for name in entry if name not in _JOB and name in (*_BUILD, *options(BuildRequest))]:
            raise UsageError(f'{where}: {build_options[0]} is said of engines: add kind = "build"')
        _table(entry, where, _JOB)
        base_name, models = self._models(entry, where)
        methods = _texts(entry, "method", where) if "method" in entry else ["auto"]
        for method in methods:
            choice(method, METHODS, f"{where}: method")
        overrides = tuple(_texts(entry, "precision_override", where)) if "precision_override" in entry else ()
        with _saying(where):
            _ = [Override.parse(text) for text in overrides]
        for model, name, method in product(models, _texts(entry, "data", where), methods):
            self.add(
                self._calibration(base_name or model.stem, model, self._known(name, where), method, overrides), number
            )

    def _calibration(
        self, base_name: str, model: Path, data: DataSet, method: str, overrides: tuple[str, ...] = ()
    ) -> Job:
        name = f"{base_name}.{data.name}.{method}"
        table = _path(f"{name}.calib.json", self.folder, f"{self.where}: the table's name")
        return Job(name, model, data, method, overrides, table, self.device)

    def _known(self, name: str, where: str) -> DataSet:
        if name not in self.data:
            there = ", ".join(self.data) or "none: write [data.NAME]"
            raise UsageError(f"{where}: data is {name!r}; the data sets are {there}")
        return self.data[name]

    def _models(self, entry: Mapping[str, Any], where: str) -> tuple[str | None, list[Path]]:
        """Return what names the jobs instead of their models, if anything, and the models."""
        texts = _texts(entry, "model", where)
        models = list(dict.fromkeys(path for text in texts for path in _models(text, self.root, where)))
        name = entry.get("name")
        if name is not None and not re.fullmatch(r"[\w.+-]+", _text(name, f"{where}: name")):
            raise UsageError(
                f"{where}: name is {name!r}; letters, digits and . _ + - are allowed, as files are named by it"
            )
        if name is not None and len(models) > 1:
            raise UsageError(
                f"{where}: name is for one model; here are {len(models)}: give each its [[job]], or drop the name"
            )
        return name, models

    def add_builds(self, entry: Mapping[str, Any], number: int, where: str) -> None:
        defaults = _options(entry, self.root, where)
        base_name, models = self._models(entry, where)
        best = defaults.get("best", False)
        if not best and "precision" not in entry:
            raise UsageError(
                f"{where}: lacks precision, one or several of {', '.join(PRECISIONS)}; or write best = true"
            )
        precisions = _texts(entry, "precision", where) if "precision" in entry else ["best"]
        for precision in precisions if "precision" in entry else ():
            choice(precision, tuple(PRECISIONS), f"{where}: precision")
        targets = _texts(entry, "target", where) if "target" in entry else [""]
        resources = _texts(entry, "resource", where) if "resource" in entry else [""]
        source = self._known(_text(entry["data"], f"{where}: data"), where) if "data" in entry else None
        if source is not None and (twice := [name for name in _BY_DATA if name in defaults]):
            raise UsageError(f"{where}: {twice[0]} belongs into [data.{source.name}]")
        builds, unused = [], dict.fromkeys(defaults, "")
        for model, precision, target, resource in product(models, precisions, targets, resources):
            with _saying(where):
                compiled = "-".join(f"sm{item}" for item in parse_targets(target)) if target else ""
            kind = re.sub(r"[^\w.+-]", "_", resource.rpartition(":")[2])
            name = ".".join(filter(None, [base_name or model.stem, precision, compiled, kind]))
            arguments = {**defaults, **dict.fromkeys(PRECISIONS.get(precision, ()), True)}
            arguments |= {"target": target} if target else {}
            quantized = best or precision.partition("+")[0] in ("int8", "fp8")
            own = defaults.get("calibrator", "trtopt") == "trtopt"
            calibration = None
            if quantized and own and source is not None and "calib" not in defaults:
                calibration = self._table_of(base_name, model, source, defaults.get("method", "auto"))
                arguments["calib"] = calibration.output
            criteria = best or not own or any(item in defaults for item in GOAL)
            if source is not None and (criteria if quantized else precision != "fp32"):
                arguments |= {item: getattr(source, item) for item in ("images", "data", "preprocess", "limit")}
            output = _path(f"{name}.engine", self.engines, f"{where}: the engine's name")
            try:
                request = fitting(BuildRequest(model, output, **arguments))
                without_effect = idle(request)  # in this precision; it may have one in the list's others
                unused = {name: why for name in unused if (why := without_effect.get(name))}
                request = without(request, *without_effect)
                spec_of(request)
                Limits.of(request.min_agreement, request.min_snr)
                budget_of(request.budget)
            except UsageError as error:
                raise UsageError(f"{where}: {in_list(str(error))}") from None
            builds.append(BuildJob(name, request, precision, source, calibration, resource))
        for problem in unused.values():
            raise UsageError(f"{where}: {in_list(problem)}")
        needs_data = any(job.calibration or job.request.images or job.request.data is not None for job in builds)
        if source is not None and not needs_data:
            raise UsageError(f"{where}: none of these engines needs data: drop it")
        for build in builds:
            if build.calibration is not None and self.jobs.get(build.calibration.name) != build.calibration:
                self.add(build.calibration, number)
            self.add(build, number)

    def _table_of(self, base_name: str | None, model: Path, data: DataSet, method: str) -> Job:
        """Return the list's own job that makes the table, or a new one."""
        for base in filter(None, (base_name, model.stem)):
            job = self.jobs.get(f"{base}.{data.name}.{method}")
            if isinstance(job, Job) and job.model == model:
                return job
        return self._calibration(base_name or model.stem, model, data, method)


def _call(file: Path, content: Mapping[str, Any], jobs: Collection[Job | BuildJob]) -> Call:
    """Collect what all jobs read and write together."""
    tables = (*content.get("data", {}).values(), *content["job"])
    texts = [text for table in tables for name in ("preprocess", "classes") if isinstance(text := table.get(name), str)]
    reads: dict[str, list[Any]] = {"jobs": [file, *(file.parent / text for text in texts)]}
    targets: list[tuple[str, str, str]] = []
    made = {job.output for job in jobs if isinstance(job, Job)}
    for job in jobs:
        if isinstance(job, Job):
            samples = {"images": job.data.images, "data": job.data.data}
            call = Call({"model": job.model, **samples}, [("output", str(job.output), "")])
        else:  # a table of the list's own is written before it is read
            call = Call.of(without(job.request, "calib") if job.request.calib in made else job.request)
        for name, value in call.reads.items():
            reads.setdefault(name, []).append(value)
        targets += [item for item in call.targets if item[0] != "timing_cache" or item not in targets]  # updated by all
    return Call(reads, targets)


def _refuse_idle(content: Mapping[str, Any], jobs: Collection[Job | BuildJob], where: str) -> None:
    """Raise UsageError for what the list says and no job of it uses."""
    used = {job.data.name for job in jobs if job.data is not None}
    tables, engines = (any(isinstance(job, kind) for job in jobs) for kind in (Job, BuildJob))
    for name, said, has, need in (
        *((f"[data.{name}]", True, name in used, "a job that names it") for name in content.get("data", {})),
        ("output", "output" in content, tables, "a job that calibrates"),
        ("device", "device" in content, tables, "a job that calibrates"),
        ("engines", "engines" in content, engines, 'a job of kind = "build"'),
    ):
        if said and not has:
            raise UsageError(f"{where}: {name} has no effect without {need}: add one, or drop it")


def in_list(text: str) -> str:
    """A message with the options of calibrations and builds as a list has them."""
    return re.sub(rf"\b({'|'.join(_FLAGS)}) = true", r'precision = "\1"', keyed(text, options(JobsRequest)))


def _options(entry: Mapping[str, Any], root: Path, where: str) -> dict[str, Any]:
    """Return what an entry says of its builds, by the names of `BuildRequest`, each of the kind that this takes."""
    there, values = options(BuildRequest), dict[str, Any]()
    names = list(dict.fromkeys([*_BUILD, *(name for name in there if name not in ("model", "reporter", *_ELSEWHERE))]))
    for name, value in entry.items():
        if name in _ELSEWHERE:
            raise UsageError(f"{where}: {name}{_ELSEWHERE[name]}")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise UsageError(f"{where}: unknown key {name}; {hint}")
        at = f"{where}: {name}"
        if name == "preprocess":
            values[name] = _preprocess(_kind(value, (str, dict), "a text or a table", at), root, at)
        elif name == "classes":
            classes = _kind(value, (str, list), "a text or a list", at)
            if isinstance(classes, str) and not classes.startswith(("imagenet", "package:")):
                classes = _path(classes, root, at)
            with _saying(at):
                values[name] = load_classes(classes)
        elif name not in _BUILD:  # `fitting` looks at the others' types
            values[name] = _path(value, root, at) if there[name][1].typed is Path else value
    if "method" in values:
        choice(values["method"], METHODS, f"{where}: method")
    return values


def _kind(value: Any, kinds: Sequence[type], what: str, where: str) -> Any:
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        raise UsageError(f"{where} is {value!r}; {what} is needed")
    return value


def _models(text: str, root: Path, where: str) -> list[Path]:
    path = _path(text, root, f"{where}: model")
    if not re.search(r"[*?[]", text):
        return [path]  # whether it exists is that job's own affair: one failure never stops the rest
    start = Path(text).anchor or root
    try:
        # A link that leads nowhere is a job of its own, too, which says so.
        paths = sorted(path for path in Path(start).glob(text.removeprefix(Path(text).anchor)) if not path.is_dir())
    except (ValueError, OSError, re.error) as error:
        raise UsageError(f"{where}: the model {text!r} isn't a pattern that can be searched for: {error}") from None
    if not paths:
        raise UsageError(f"{where}: no file fits the model {text!r}")
    return paths


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
    preprocess = None if prepared is None else _preprocess(prepared, root, f"{where}: preprocess")
    unusual = _kind(table.get("allow_unusual_data", False), (bool,), "true or false", f"{where}: allow_unusual_data")
    return DataSet(name, images, data, preprocess, limit, unusual)


def _preprocess(value: Any, root: Path, where: str) -> Preprocess:
    """A preset's, a file's, or what a table says."""
    if isinstance(value, str) and value not in PRESETS:
        value = _path(value, root, where)
    with _saying(where):
        return Preprocess.load(value)


@contextlib.contextmanager
def _saying(where: str) -> Iterator[None]:
    """Say of what is wrong where in the list it stands."""
    try:
        yield
    except (Damaged, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None


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
    return folder / _text(value, where)


def _texts(entry: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A text, or a list of them without repetitions."""
    if key not in entry:
        raise UsageError(f"{where}: lacks {key}")
    value = entry[key]
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise UsageError(f"{where}: {key} is an empty list")
    return list(dict.fromkeys(_text(item, f"{where}: {key}") for item in listed))
