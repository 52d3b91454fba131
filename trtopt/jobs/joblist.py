"""Read jobs.toml, which docs/jobs.md describes: the models × data sets × methods to calibrate, and the engines to build."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from trtopt.autotune.building import GOAL
from trtopt.builder.asked import spec_of
from trtopt.builder.request import BuildRequest
from trtopt.core.documents import Damaged, Name, Positive, converted, one_of, read_toml, spelled
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file
from trtopt.core.kept import Call
from trtopt.core.options import call_of, fitting, idle, keyed, options, typed_as, without
from trtopt.core.values import METHODS, Override, choice, parse_targets
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.evaluation.limits import Limits
from trtopt.jobs.request import JobsRequest
from trtopt.recipes.loader import check_keys, load_classes

KINDS = ("calibrate", "build")
# Each the options of a build that it stands for.
PRECISIONS: dict[str, tuple[str, ...]] = {"fp32": ()}
PRECISIONS |= {name: tuple(name.split("+")) for name in ("fp16", "bf16", "int8", "fp8", "int8+bf16", "fp8+bf16")}
_FLAGS = ("fp16", "bf16", "int8", "fp8")
_SAMPLES = ("images", "data", "preprocess", "limit")
_CODE = ("plugins", "operators")  # of the whole list
# Options of a build that a list says otherwise: by a precision, a data set, the jobs' names, the GPUs that a run may use.
_ELSEWHERE = ("model", "output", "reporter", "device", "target", *_FLAGS, *_SAMPLES, *_CODE)
_OPTIONS = {name: entry for name, entry in options(BuildRequest).items() if name not in _ELSEWHERE}
# Options that name a file or folder, each with what else it may say; of a metric, a module's function.
_WORDS = {
    "classes": "|imagenet|package:.*",
    "metric": r"(?!.*\.py:).*",
    "store": "|local|none|~.*|.*://.*",
    "timing_cache": "|none",
}

_Texts = str | list[str]  # without constraints, which msgspec mixes up where types are joined; `_several` looks at them
_named = spelled("letters, digits and . _ + -, as files are named by it,", r"[\w.+-]+")


@dataclass(frozen=True)
class DataSet:
    """Samples, by name: `images` or `data`, as `trtopt calibrate` takes them.

    Attributes:
        preprocess: as the list has it; once that is read, a `Preprocess`, or None for arrays.
    """

    name: Annotated[str, spelled("letters, digits and _ + -, as files are named by it,", r"[\w+-]+")]
    images: Path | None = None
    data: Path | None = None
    preprocess: Any = None
    limit: Positive | None = None
    allow_unusual_data: bool = False


@dataclass(frozen=True)
class _List:
    """The file."""

    output: Name = "calibrated"
    engines: Name = "engines"
    device: Annotated[str, one_of(("cpu", "cuda"))] = "cpu"
    plugins: tuple[Name, ...] = ()
    operators: tuple[Name, ...] = ()
    data: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    job: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class _Calibrations:
    """A `[[job]]` of tables."""

    model: _Texts
    data: _Texts
    kind: str = "calibrate"
    name: Annotated[str, _named] | None = None
    method: _Texts = "auto"
    precision_override: _Texts | None = None


@dataclass(frozen=True)
class _Builds:
    """A `[[job]]` of engines, without the options of a build."""

    model: _Texts
    kind: str = "build"
    name: Annotated[str, _named] | None = None
    precision: _Texts | None = None
    data: Name | None = None
    target: _Texts | None = None
    resource: _Texts | None = None


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
    operators: tuple[str, ...] = ()


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


def load_jobs(path: str | os.PathLike[str]) -> tuple[Job | BuildJob, ...]:
    """Read a job list. A calibration that only a build asks for stands before it.

    Raises:
        UsageError: no such file, not TOML, an unknown key or a value that isn't allowed (the place is named), a data set that
            isn't there, options that don't go together or have no effect, or two jobs with one name.
    """
    file = existing_file(path, "the job list")
    with _saying(str(file)):
        reader = _Reader(file)
        for kind in KINDS:  # builds when it is known which tables there will be
            for number, entry in enumerate(reader.listed.job, 1):
                with _saying(f"[[job]] {number}"):
                    if choice(str(entry.get("kind", KINDS[0])), KINDS, "kind") == kind:
                        reader.add(entry, number)
        reader.call().check()
    return tuple(sorted(reader.jobs.values(), key=lambda job: reader.order[job.name]))


class _Reader:
    """Makes jobs of a list's entries.

    Attributes:
        jobs: by name, in the order in which they were made.
        order: the number of the entry that each comes from.
    """

    def __init__(self, file: Path) -> None:
        self.content = read_toml(file)
        check_keys(self.content, _names(_List))
        self.listed = converted(self.content, _List)
        if not self.listed.job:
            raise UsageError('it has no jobs; write [[job]] with model = "M.onnx" and data = "NAME" below it')
        self.file, self.root = file, file.parent
        self.data = {name: self._data_set(name, table) for name, table in self.listed.data.items()}
        self.jobs: dict[str, Job | BuildJob] = {}
        self.order: dict[str, int] = {}

    def add(self, entry: Mapping[str, Any], number: int) -> None:
        for job in list((self._builds if entry.get("kind") == "build" else self._calibrations)(entry)):
            if (other := self.jobs.get(job.name)) == job:  # a table that several builds need
                continue
            if other is not None:
                raise UsageError(
                    f"a second job would be named {job.name!r} ({other.model} and {job.model}); give one of them a name"
                )
            self.jobs[job.name], self.order[job.name] = job, number

    def _calibrations(self, entry: Mapping[str, Any]) -> Iterator[Job]:
        try:
            check_keys(entry, _names(_Calibrations))
        except Damaged as error:
            raise UsageError(
                f'{error}; what samples are stands in [data.NAME], and engines are made where kind = "build"'
            ) from None
        given = converted(entry, _Calibrations)
        overrides = tuple(_several(given, "precision_override", []))
        _ = [Override.parse(text) for text in overrides]
        for method in (methods := _several(given, "method")):
            choice(method, METHODS, "method")
        sets = map(self._known, _several(given, "data"))
        for model, data, method in product(self._models(given), sets, methods):
            yield self._calibration(given.name or model.stem, model, data, method, overrides)

    def _calibration(
        self, base_name: str, model: Path, data: DataSet, method: str, overrides: tuple[str, ...] = ()
    ) -> Job:
        name = f"{base_name}.{data.name}.{method}"
        table = self.root / self.listed.output / f"{name}.calib.json"
        return Job(name, model, data, method, overrides, table, self.listed.device, self._code("operators"))

    def _code(self, name: str) -> tuple[str, ...]:
        """Return the files of the list's plugins or operators."""
        return tuple(str(self.root / text) for text in getattr(self.listed, name))

    def _known(self, name: str) -> DataSet:
        if name not in self.data:
            there = ", ".join(self.data) or "none: write [data.NAME]"
            raise UsageError(f"data is {name!r}; the data sets are {there}")
        return self.data[name]

    def _models(self, given: _Calibrations | _Builds) -> list[Path]:
        models = list(dict.fromkeys(path for text in _several(given, "model") for path in _found(text, self.root)))
        if given.name is not None and len(models) > 1:
            raise UsageError(f"name is for one model; here are {len(models)}: give each its [[job]], or drop the name")
        return models

    def _data_set(self, name: str, table: Mapping[str, Any]) -> DataSet:
        with _saying(f"[data.{name}]"):
            check_keys(table, _names(DataSet) - {"name"})
            made = converted({**table, "name": name}, DataSet)
            if (made.images is None) == (made.data is None):
                raise UsageError('needs either images = "FOLDER" or data = "ARRAYS.npz"')
            paths: dict[str, Any] = {
                key: self.root / path for key in ("images", "data") if (path := getattr(made, key))
            }
            given = made.preprocess
            if made.images is not None and given is None:
                raise UsageError(
                    f"images need preprocess, how pixels become inputs: {', '.join(PRESETS)} or a TOML file"
                )
            if made.images is None and given is not None:
                raise UsageError("preprocess is for images: arrays are used as they are; drop it")
            if isinstance(given, str) and given not in PRESETS:
                given = self.root / given
            return replace(made, **paths, preprocess=None if given is None else Preprocess.load(given))

    def _builds(self, entry: Mapping[str, Any]) -> Iterator[Job | BuildJob]:
        check_keys(entry, _names(_Builds) | set(_OPTIONS))
        given = converted(entry, _Builds)
        defaults = {name: self._option(name, value) for name, value in entry.items() if name in _OPTIONS}
        if given.precision is None and not defaults.get("best", False):
            raise UsageError(f"lacks precision, one or several of {', '.join(PRECISIONS)}; or write best = true")
        data = None if given.data is None else self._known(given.data)
        precisions = _several(given, "precision", ["best"])
        for precision in precisions if given.precision is not None else ():
            choice(precision, PRECISIONS, "precision")
        targets, resources = (_several(given, name, [""]) for name in ("target", "resource"))
        builds, unused = list[BuildJob](), dict.fromkeys(defaults, "")
        for variant in product(self._models(given), precisions, targets, resources):
            job = self._build(given.name, data, defaults, *variant)
            without_effect = idle(job.request)  # in this precision; it may have one in the list's others
            unused = {name: why for name in unused if (why := without_effect.get(name))}
            job = replace(job, request=without(job.request, *without_effect))
            spec_of(job.request)
            builds.append(job)
        for problem in unused.values():
            raise UsageError(problem)
        for job in builds:
            if job.calibration is not None:
                yield job.calibration
            yield job

    def _build(
        self, base_name: str | None, data: DataSet | None, defaults: Mapping[str, Any], *variant: Any
    ) -> BuildJob:
        model, precision, target, resource = variant
        compiled = "-".join(f"sm{item}" for item in parse_targets(target)) if target else ""
        node = re.sub(r"[^\w.+-]", "_", resource.rpartition(":")[2])
        name = ".".join(filter(None, [base_name or model.stem, precision, compiled, node]))
        arguments = {**defaults, **dict.fromkeys(PRECISIONS.get(precision, ()), True)}
        arguments |= {"target": target} if target else {}
        best = defaults.get("best", False)
        quantized = best or precision.startswith(("int8", "fp8"))
        own = defaults.get("calibrator", "trtopt") == "trtopt"
        calibration = None
        if quantized and own and data is not None and "calib" not in defaults:
            calibration = self._table_of(base_name, model, data, defaults.get("method", "auto"))
            arguments["calib"] = calibration.output
        criteria = best or not own or any(item in defaults for item in GOAL)
        if data is not None and (criteria if quantized else precision != "fp32"):
            arguments |= {item: getattr(data, item) for item in _SAMPLES}
        output = self.root / self.listed.engines / f"{name}.engine"
        arguments |= {item: self._code(item) for item in _CODE}
        request = fitting(BuildRequest(model, output, **arguments))
        choice(request.method, METHODS, "method")
        Limits.of(request.min_agreement, request.min_snr)
        return BuildJob(name, request, precision, data, calibration, resource)

    def _option(self, name: str, value: Any) -> Any:
        """Return an option's value, paths from where the list is; `fitting` looks at the types."""
        is_path = name in _WORDS or typed_as(*_OPTIONS[name]) is Path
        if isinstance(value, str) and is_path and not re.fullmatch(_WORDS.get(name, ""), value):
            value = str(self.root / value) if name == "metric" else self.root / value
        return load_classes(value) if name == "classes" and isinstance(value, (str, Path, list)) else value

    def _table_of(self, base_name: str | None, model: Path, data: DataSet, method: str) -> Job:
        """Return the list's own job that makes the table, or a new one."""
        for base in filter(None, (base_name, model.stem)):
            job = self.jobs.get(f"{base}.{data.name}.{method}")
            if isinstance(job, Job) and job.model == model:
                return job
        return self._calibration(base_name or model.stem, model, data, method)

    def call(self) -> Call:
        """Collect what all jobs read and write together."""
        tables = (*self.listed.data.values(), *self.listed.job)
        said = [table.get(key) for table in tables for key in ("preprocess", "classes")]
        reads: dict[str, list[Any]] = {"jobs": [self.file, *(self.root / it for it in said if isinstance(it, str))]}
        targets: list[tuple[str, str, str]] = []
        made = {job.output for job in self.jobs.values() if isinstance(job, Job)}
        for job in self.jobs.values():
            if isinstance(job, Job):
                samples = {"images": job.data.images, "data": job.data.data}
                call = Call({"model": job.model, **samples}, [("output", str(job.output), "")])
            else:  # a table of the list's own is written before it is read
                call = call_of(without(job.request, "calib") if job.request.calib in made else job.request)
            for name, value in call.reads.items():
                reads.setdefault(name, []).append(value)
            targets += [item for item in call.targets if item[0] != "timing_cache" or item not in targets]  # of all
        return Call(reads, targets)


def in_list(text: str) -> str:
    """Return a message with the options of calibrations and builds as a list has them."""
    return re.sub(rf"\b({'|'.join(_FLAGS)}) = true", r'precision = "\1"', keyed(text, options(JobsRequest)))


def _found(text: str, root: Path) -> list[Path]:
    """Return the model's path, or those that fit a pattern."""
    path = root / text
    if not re.search(r"[*?[]", text):
        return [path]  # whether it exists is that job's own affair: one failure never stops the rest
    start = Path(text).anchor or root
    try:
        # A link that leads nowhere is a job of its own, too, which says so.
        paths = sorted(path for path in Path(start).glob(text.removeprefix(Path(text).anchor)) if not path.is_dir())
    except (ValueError, OSError, re.error) as error:
        raise UsageError(f"the model {text!r} isn't a pattern that can be searched for: {error}") from None
    if not paths:
        raise UsageError(f"no file fits the model {text!r}")
    return paths


@contextlib.contextmanager
def _saying(where: str) -> Iterator[None]:
    """Say of what is wrong where in the list it stands."""
    try:
        yield
    except (Damaged, UsageError) as error:
        raise UsageError(f"{where}: {in_list(str(error))}") from None


def _several(given: _Calibrations | _Builds, name: str, default: Sequence[str] = ()) -> list[str]:
    """Return the texts that an entry has under a name, without repetitions."""
    value = getattr(given, name)
    listed = [value] if isinstance(value, str) else default if value is None else value
    if value is not None and not (listed and all(text.strip() for text in listed)):
        raise UsageError(f"{name} is {value!r}; a text is needed, or a list of them")
    return list(dict.fromkeys(listed))


def _names(kind: type[Any]) -> set[str]:
    return {item.name for item in fields(kind)}
