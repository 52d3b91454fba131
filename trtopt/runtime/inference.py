"""run(): an engine on arrays or images from files, once, to look at what it gives."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import plain
from trtopt.core.errors import DataError, UsageError
from trtopt.core.files import check_writable, existing_file, filled_folder, write_json, writing_together
from trtopt.core.host import cores
from trtopt.core.options import taking
from trtopt.core.progress import Reporter
from trtopt.core.values import TensorInfo
from trtopt.data.arrayfiles import stored_array, stored_arrays
from trtopt.data.arrays import only
from trtopt.data.convert import converted
from trtopt.data.decoding import decode, pixels
from trtopt.data.images import images_in
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import Call, Skipped, calls, joined, samples_first
from trtopt.recipes.loader import check_classes, load_classes
from trtopt.runtime.images import Prediction, best, listed, preparation, scores_classes, stacked
from trtopt.runtime.request import RunRequest, opening_options
from trtopt.runtime.session import Session
from trtopt.runtime.timing import timed

Array = NDArray[Any]
_TOGETHER = 8  # images run at a time
_LISTS = ("images.json", "predictions.json")  # of the images: in the order of the outputs' rows, or with their classes
_NAMED = "NAME=x.npy, or an .npz"
_SHOWN = 8  # samples whose best classes are kept for an output of samples × classes


@dataclass(frozen=True)
class OutputSummary:
    """One output; `minimum`, `maximum` of its finite values, None without any; and how many are NaN or infinite."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float | None
    maximum: float | None
    not_finite: int
    file: str | None


@dataclass(frozen=True)
class Ranked:
    """The best classes of one sample: an image by its path, or "sample N"."""

    sample: str
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class RunResult:
    """The outputs of an engine: a summary of each, and `arrays` by name, samples where each has them (`Session.outputs`).

    `ranked` are best classes of each image, or of the first samples of an output of samples × classes; `skipped` images can't
    be used; `files` were written; `milliseconds` is host time of each call of the engine; `images` are those that were run.
    """

    engine: Path
    backend: str
    outputs: tuple[OutputSummary, ...]
    ranked: tuple[Ranked, ...]
    skipped: tuple[Skipped, ...]
    files: tuple[Path, ...]
    milliseconds: tuple[float, ...]
    images: tuple[str, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        """Everything that was given was run."""
        return not self.skipped

    @property
    def timing(self) -> str:
        """The times in a sentence."""
        first, *later_times = self.milliseconds
        text = f"{len(self.milliseconds)} call{'s' if later_times else ''}: the first, with warming up, {first:.2f} ms"
        return f"{text}, then {statistics.median(later_times):.2f} ms in the median" if later_times else text

    def to_json(self) -> dict[str, Any]:
        milliseconds = tuple(round(value, 4) for value in self.milliseconds)
        document = plain(replace(self, milliseconds=milliseconds, arrays={}))
        del document["arrays"]
        return {**document, "timing": self.timing}


@taking(RunRequest)
def run(request: RunRequest) -> RunResult:
    """Run an engine on arrays or images. For a service, `Session` stays open between calls.

    Args:
        engine: a plan, or with backend "onnxruntime" an ONNX file.
        data: an array or .npy file for an engine with one input; an .npz file or mapping by input name; "NAME=x.npy"; a folder
            of files; or a list of these. More samples than the engine takes at once are run in several calls.
        images: a folder, image files, encoded images in memory, or uint8 arrays (height × width × 3, RGB).
        output: a folder: each output as NAME.npy, and of images their best classes as predictions.json, or their names as
            images.json.
        preprocess: how images become inputs; None, and keys that a mapping leaves out: as the manifest says.
        input, limit, classes, output_kind, top, backend, device, trust, trust_host_code, reporter: see `RunRequest`.

    Raises:
        UsageError: not exactly one of `data` and `images`, a folder or file that isn't there, no image in a folder, or
            arrays that the engine doesn't take.
        DataError: a file that can't be read, or not one image that can be used.
        OutputError: the folder can't be written; found before anything is run.
        DeviceError, EngineError, NoBackend: as `Session`.
    """
    if (request.data is not None) + (request.input is not None) + (request.images is not None) != 1:
        raise UsageError(
            "give one of `data=` and `images=`: what the engine is to be run on (`input=` is another name of `data=`)"
        )
    if request.images is None and request.preprocess is not None:
        raise UsageError("`preprocess=` is for `images=`: arrays in `data=` are used as they are; drop one")
    if request.device and request.backend == "onnxruntime":
        raise UsageError(
            f"`device={request.device}` is a GPU, and `backend='onnxruntime'` runs on the CPU: drop one of them"
        )
    path = existing_file(request.engine, "the engine")
    place = contextlib.nullcontext() if request.output is None else filled_folder(request.output)
    with place as folder, Session(path, **opening_options(request)) as session:
        _prepare(session, request)
        files = _files(folder, session, request.images is not None)
        ran = _Run(session, request.reporter)
        (ran.arrays if request.images is None else ran.images)(request)
        outputs = joined(ran.parts, session.outputs)
        ranked = _ranked(session, outputs, request.top, ran.names)
        summaries, written = _kept(outputs, files), list(files.values())
        if folder is not None and ran.names:
            written.append(folder / _LISTS[bool(ranked)])
            write_json(written[-1], [asdict(item) for item in ranked] or ran.names)
    if request.top != RunRequest.top and not ranked:
        request.reporter.warn("`top=` has no effect: no output scores classes")
    seen = tuple(ran.skipped), tuple(written), tuple(ran.milliseconds), tuple(ran.names)
    return RunResult(session.engine, session.backend, summaries, ranked, *seen, outputs)


def _prepare(session: Session, request: RunRequest) -> None:
    """Let what the request says of images and outputs stand for what the manifest says."""
    if request.preprocess is not None:
        session.preprocess = session.preparing(request.preprocess)
    if request.classes is not None:
        session.classes = load_classes(request.classes)
        check_classes(session.classes, session.outputs)
    if request.output_kind:
        from trtopt.graph.output_kinds import stated  # loads onnx, which an engine doesn't need

        session.kinds |= {name: str(kind) for name, kind in stated(request.output_kind, session.outputs).items()}


class _Run:
    """Calls of an engine: what their samples gave, how long each took, and the images that were run or left out."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self._session, self._reporter = session, reporter
        self.parts: list[dict[str, Array]] = []
        self.milliseconds: list[float] = []
        self.names: list[str] = []
        self.skipped: list[Skipped] = []

    def _call(self, call: Call) -> None:
        time, outputs = timed(functools.partial(self._session.run, call.feed))
        self.milliseconds.append(time)
        self.parts.append(call.cut(outputs, self._session.outputs))

    def arrays(self, request: RunRequest) -> None:
        session = self._session
        parts = _parts(request.input if request.data is None else request.data, session.inputs, request.limit)
        for part in parts:
            session._signature.check_names(part)
            for info in session.inputs:
                part[info.name] = _fitting(part[info.name], info, f"`data=`: {info.name!r}", self._reporter)
        whole = _together(parts, session.inputs)
        each = calls(whole, session.inputs, session.outputs, session.profiles, limit=request.limit)
        with self._reporter.phase("run", len(each)) as phase:
            for call in each:
                self._call(call)
                phase.advance()

    def images(self, request: RunRequest) -> None:
        session, items = self._session, _listed(request.images)[: request.limit]
        least = [item.min[0] for profile in session.profiles for item in profile.values() if item.min]
        together, prepare = max([_TOGETHER, *least]), functools.partial(_prepared, preparation(session))
        with self._reporter.phase("run", len(items)) as phase, ThreadPoolExecutor(min(4, cores())) as pool:
            for start in range(0, len(items), together):
                chunk, samples = items[start : start + together], list[Array]()
                for number, image in enumerate(pool.map(prepare, chunk, range(start, start + len(chunk))), start):
                    name = os.fspath(items[number]) if _is_path(items[number]) else f"image {number}"
                    if isinstance(image, str):
                        self.skipped.append(Skipped(name, image))
                    else:
                        samples.append(image)
                        self.names.append(name)
                batch, more = stacked(session, samples) if samples else {}, len(items) > len(chunk)
                for call in calls(batch, session.inputs, session.outputs, session.profiles, more=more) if batch else ():
                    self._call(call)
                phase.advance(len(chunk))
        if not self.names:
            some = "; ".join(f"{item.name}: {item.reason}" for item in self.skipped[:3])
            raise DataError(f"none of the {len(items)} images can be used ({some})")


# Arrays --------------------------------------------------------------------------------------------------------------


def _parts(source: Any, inputs: Sequence[TensorInfo], limit: int | None) -> list[dict[str, Array]]:
    """Read arrays by input name, from whatever form they were given in; several, where each has all inputs."""
    read = _read(source, inputs, limit)
    if len(read) > 1 and all(part.keys() == {info.name for info in inputs} for part in read):
        return read
    arrays: dict[str, Array] = {}
    for part in read:
        if twice := sorted(set(part) & set(arrays)):
            raise UsageError(f"`data=` gives {', '.join(map(repr, twice))} twice; give each input once")
        arrays |= part
    return [arrays]


def _read(item: Any, inputs: Sequence[TensorInfo], limit: int | None) -> list[dict[str, Array]]:
    if isinstance(item, Mapping):
        return [{str(key): _loaded(held) if _is_path(held) else np.asarray(held) for key, held in item.items()}]
    if hasattr(item, "__array__"):
        return [{only(inputs, "an array", _NAMED).name: np.asarray(item)}]
    if not _is_path(item):
        if isinstance(item, Iterable):
            return [part for each in item for part in _read(each, inputs, limit)]
        raise UsageError(
            f"`data=` holds {type(item).__name__}; an array, a file, a mapping of input names to these, or a list of them is "
            "needed"
        )
    text = os.fspath(item)
    name, equals, path = text.partition("=")
    if equals and not Path(text).exists():
        if path.endswith(".npz"):
            raise UsageError(f"`data='{text}'`: an .npz has the names of its arrays itself: give `data='{path}'`")
        return [{name: _loaded(path)}]
    if Path(text).is_dir():
        files = sorted(file for file in Path(text).rglob("*") if file.suffix in (".npz", ".npy") and file.is_file())
        if not files:
            raise UsageError(f"`data=`: there is no .npz or .npy file in {text}; for its images give `images='{text}'`")
        return [part for file in files[:limit] for part in _read(file, inputs, limit)]
    if not text.endswith(".npz"):
        return [{only(inputs, text, _NAMED).name: _loaded(text)}]
    return [{name: np.array(array[...]) for name, array in stored_arrays(existing_file(text, "`data=`")).items()}]


def _is_path(item: Any) -> bool:
    return isinstance(item, (str, os.PathLike))


def _loaded(source: str | os.PathLike[str]) -> Array:
    path = existing_file(source, "`data=`")
    if path.suffix != ".npy":
        raise UsageError(f"`data=`: {path} can't be read as arrays: give x.npy, NAME=x.npy, arrays.npz or a folder")
    return np.array(stored_array(path))


def _fitting(array: Array, info: TensorInfo, what: str, reporter: Reporter) -> Array:
    """Return an array in the input's type where that keeps its kind (those in files have whatever type their program had), and
    one sample, which data sets give without the axis that counts samples, with it."""
    if info.batch_axis is not None and 0 < array.ndim == len(info.shape) - 1:
        array = np.expand_dims(array, info.batch_axis)
    result = converted(array, info.dtype, what, "the engine")
    if result.dtype != array.dtype and not array.dtype.name.startswith("void"):
        reporter.note(f"{info.name}: converted from {array.dtype} to {info.dtype}")
    return result


def _together(parts: Sequence[dict[str, Array]], inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """The samples of all files, in order."""
    if len(parts) == 1:
        return parts[0]
    whole = {info.name: len(info.shape) for info in inputs if info.batch_axis is None}
    counted = (
        {name: array[None] if array.ndim == whole.get(name) else array for name, array in part.items()}
        for part in parts
    )
    return joined(counted, [replace(info, batch_axis=info.batch_axis or 0) for info in inputs])


# Images --------------------------------------------------------------------------------------------------------------


def _listed(images: Any) -> list[Any]:
    """Single images, folders opened."""
    given, items = list(listed(images)), list[Any]()
    for item in given:
        if _is_path(item) and Path(item).is_dir():
            items += images_in(Path(item))
        elif len(given) == 1 and _is_path(item) and not Path(item).exists():
            raise UsageError(f"`images='{item}'` doesn't exist")
        else:
            items.append(item)
    if not items:
        raise UsageError("`images=` gives no image")
    return items


def _prepared(prepare: Preprocess, item: Any, number: int) -> Array | str:
    """An image as the engine takes it, or why it can't be."""
    given = bytes(item) if isinstance(item, (bytearray, memoryview)) else item
    image = decode(given) if isinstance(given, bytes) or _is_path(given) else pixels(given, number)
    return image if isinstance(image, str) else prepare(image)


# Results -------------------------------------------------------------------------------------------------------------


def _files(folder: Path | None, session: Session, images: bool) -> dict[str, Path]:
    """Choose where each output goes, checked before anything is run. Names may hold slashes, which paths can't."""
    files: dict[str, Path] = {}
    if folder is None:
        return files
    for name in (item.name for item in session.outputs):
        stem = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "output"
        while folder / f"{stem}.npy" in files.values():
            stem += "_"
        files[name] = folder / f"{stem}.npy"
    for path in (*files.values(), *(folder / name for name in _LISTS if images)):
        check_writable(path)
    return files


def _kept(outputs: Mapping[str, Array], files: Mapping[str, Path]) -> tuple[OutputSummary, ...]:
    """Write outputs to their files, if they have any, and sum them up."""
    summaries = []
    for name, array in outputs.items():
        if name in files:
            # .npy has no names for BF16 and FP8: those are written as float32, which holds them exactly
            npy_array = array if array.dtype.kind != "V" and array.dtype.isbuiltin == 1 else array.astype(np.float32)
            with writing_together(files[name]) as (partial,), partial.open("wb") as file:
                np.save(file, npy_array)
        values = array if array.dtype.kind in "iub" else array.astype(np.float64)
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        file_name = str(files[name]) if name in files else None
        odd = array.size - finite.size
        summaries.append(OutputSummary(name, array.dtype.name, array.shape, low, high, odd, file_name))
    return tuple(summaries)


def _ranked(session: Session, outputs: Mapping[str, Array], top: int, images: Sequence[str]) -> tuple[Ranked, ...]:
    """The best classes of the images, or of the first samples, by the output that scores classes (see `scores_classes`): the
    one that fits the names, or the only one."""
    scores = [
        item
        for name, item in samples_first(outputs, session.outputs).items()
        if scores_classes(session, name, item) and item.shape[1] > 1
        if not session.classes or item.shape[1] == len(session.classes)
    ]
    if len(scores) != 1 or not (session.classes or len(outputs) == 1):
        return ()
    if not images and not (scores[0] < np.inf).all():
        return ()  # of NaN none is the best; the output's summary counts them
    names = images or [f"sample {number}" for number in range(min(_SHOWN, len(scores[0])))]
    return tuple(Ranked(name, tuple(best(session, row, top))) for name, row in zip(names, scores[0]))
