"""run(): an engine on arrays or images from files, once, to look at what it gives."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import plain
from trtopt.core.errors import DataError, UsageError
from trtopt.core.files import check_writable, existing_file, made_folder, write_json, writing
from trtopt.core.host import cores
from trtopt.core.options import taking
from trtopt.core.progress import Reporter
from trtopt.core.values import TensorInfo, x
from trtopt.data.arrayfiles import stored_array, stored_arrays
from trtopt.data.batches import Skipped
from trtopt.data.convert import converted
from trtopt.data.decoding import pixels, read_image
from trtopt.data.images import images_in
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import alone, joined
from trtopt.runtime.predictions import Prediction
from trtopt.runtime.request import RunRequest, opening_options
from trtopt.runtime.session import Session
from trtopt.runtime.timing import timed

Array = NDArray[Any]
_TOGETHER = 8  # images run at a time
_LISTS = ("images.json", "predictions.json")  # of the images: in the order of the outputs' rows, or with their classes
_SHOWN = 8  # samples whose best classes are kept for an output of samples × classes


@dataclass(frozen=True)
class OutputSummary:
    """One output. `minimum`, `maximum`: of the finite values, None without any; `not_finite`: NaN and infinite ones."""

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
    """What an engine gave.

    Attributes:
        outputs: a summary of each output; none where images were classified.
        arrays: output name → array; empty where images were classified.
        ranked: best classes of each image, or of the first samples of an output of samples × classes.
        skipped: images that can't be used, with the reason.
        files: what was written.
        milliseconds: host time of each call, images already prepared.
        images: those that were run, in order; empty for arrays.
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
        input: an array or .npy file for an engine with one input; an .npz file or mapping by input name; "NAME=x.npy"; or a
            list of these. More samples than the engine takes at once are run in several calls.
        images: a folder, image files, encoded images in memory, or uint8 arrays (height × width × 3, RGB).
        output: a folder: each output as NAME.npy, best classes of images as predictions.json.
        preprocess: how images become inputs, as for `calibrate`; None: as the manifest says. A mapping without `preset` changes
            what the manifest says.
        top: how many of the best classes to give.
        backend: "auto", "tensorrt", "lean", "rtx" or "onnxruntime" (on the CPU, the graph that `build --save-onnx` kept).
        trust: as for `Session`: load a plan that no manifest describes.
        trust_host_code: as for `Session`: run the machine code that a version-compatible plan carries.
        trusted_keys: as for `Session`: run only an engine that one of these has signed.

    Raises:
        UsageError: not exactly one of `input` and `images`, a folder or file that isn't there, no image in a folder, or
            arrays that the engine doesn't take.
        DataError: a file that can't be read, or not one image that can be used.
        OutputError: the folder can't be written; found before anything is run.
        DeviceError, EngineError, NoBackend: as `Session`.
    """
    if (request.input is None) == (request.images is None):
        raise UsageError("give one of `input=` and `images=`: what the engine is to be run on")
    if request.images is None and request.preprocess is not None:
        raise UsageError("`preprocess=` is for `images=`: arrays in `input=` are used as they are; drop one")
    if request.device and request.backend == "onnxruntime":
        raise UsageError(
            f"`device={request.device}` is a GPU, and `backend='onnxruntime'` runs on the CPU: drop one of them"
        )
    path = existing_file(request.engine, "the engine")
    with _folder(request.output) as folder, Session(path, **opening_options(request)) as session:
        if request.images is not None and request.preprocess is not None:
            session.preprocess = session.preparing(request.preprocess)
        result = (_run_arrays if request.images is None else _run_images)(session, request, folder)
    if request.top != RunRequest.top and not result.ranked:
        request.reporter.warn("`top=` has no effect: no output scores classes")
    return result


# Arrays --------------------------------------------------------------------------------------------------------------


def _run_arrays(session: Session, request: RunRequest, folder: Path | None) -> RunResult:
    raw_arrays = _arrays(request.input, session.inputs)
    infos = {info.name: info for info in session.inputs}
    wrong = [f"unknown {name!r}" for name in raw_arrays if name not in infos]
    wrong += [f"missing {name!r}" for name in infos if name not in raw_arrays]
    if wrong:
        takes = "; ".join(f"{info.name!r} {info.dtype} {x(info.shape)}" for info in session.inputs)
        raise UsageError(f"`input=`: {', '.join(wrong)}; the engine takes {takes}")
    arrays = {name: _converted(raw_arrays[name], info, request.reporter) for name, info in infos.items()}
    files = _files(folder, session)
    parts: list[dict[str, Array]] = []
    milliseconds: list[float] = []
    pieces = _pieces(session, arrays)
    with request.reporter.phase("run", len(pieces)) as phase:
        for piece, size in pieces:
            time, results = timed(functools.partial(session.run, piece))
            milliseconds.append(time)
            if size is not None:
                results = {name: _rows(name, array, size) for name, array in results.items()}
            parts.append(results)
            phase.advance()
    outputs = joined(parts)
    return RunResult(
        session.engine,
        session.backend,
        _kept(outputs, files),
        _ranked(session, outputs, request.top),
        skipped=(),
        files=tuple(files.values()),
        milliseconds=tuple(milliseconds),
        arrays=outputs,
    )


def _arrays(source: Any, inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """Input name → array, from whatever form it was given in.

    Raises:
        UsageError: an input given twice, or without its name where there are several.
        DataError: a file that can't be read.
    """
    if isinstance(source, Mapping):
        return {str(name): _loaded(item) if _is_path(item) else np.asarray(item) for name, item in source.items()}
    if _is_path(source):
        return _from_file(os.fspath(source), inputs)
    if hasattr(source, "__array__"):
        return {_only(inputs, "an array"): np.asarray(source)}
    if not isinstance(source, Iterable):
        raise UsageError(
            f"`input=` holds {type(source).__name__}; an array, a file, a mapping of input names to these, or a list of them "
            "is needed"
        )
    arrays: dict[str, Array] = {}
    for item in source:
        item_arrays = _arrays(item, inputs)
        if twice := sorted(set(item_arrays) & set(arrays)):
            raise UsageError(f"`input=` gives {', '.join(map(repr, twice))} twice; give each input once")
        arrays |= item_arrays
    return arrays


def _is_path(item: Any) -> bool:
    return isinstance(item, (str, os.PathLike))


def _from_file(text: str, inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    name, equals, path = text.partition("=")
    if equals and not Path(text).exists():
        return {name: _loaded(path)}
    if not text.endswith(".npz"):
        return {_only(inputs, text): _loaded(text)}
    arrays = stored_arrays(existing_file(text, "`input=`"))
    return {name: array.whole() for name, array in arrays.items()}


def _loaded(source: str | os.PathLike[str]) -> Array:
    path = existing_file(source, "`input=`")
    if path.suffix != ".npy":
        raise UsageError(f"`input=`: {path} can't be read as arrays: give x.npy, NAME=x.npy or arrays.npz")
    return stored_array(path).whole()


def _only(inputs: Sequence[TensorInfo], what: str) -> str:
    if len(inputs) != 1:
        names = ", ".join(repr(info.name) for info in inputs)
        raise UsageError(
            f"`input=`: {what} fits an engine with one input; this one has {names}: write NAME=x.npy, or give an .npz"
        )
    return inputs[0].name


def _converted(array: Array, info: TensorInfo, reporter: Reporter) -> Array:
    """In the input's type where that keeps its kind: arrays in files have whatever type their program had."""
    result = converted(array, info.dtype, f"`input=`: {info.name!r}", "the engine")
    if result.dtype != array.dtype and not array.dtype.name.startswith("void"):
        reporter.note(f"{info.name}: converted from {array.dtype} to {info.dtype}")
    return result


def _pieces(session: Session, arrays: Mapping[str, Array]) -> list[tuple[dict[str, Array], int | None]]:
    """What each call gets, with the rows of its results that count; None: it is one call as it stands."""
    counts = {len(array) if array.ndim else 0 for array in arrays.values()}
    ranges = [profile[name] for profile in session.profiles for name in arrays]
    whole: list[tuple[dict[str, Array], int | None]] = [(dict(arrays), None)]
    if alone(session.inputs) or len(counts) != 1 or counts == {0} or not all(item.max for item in ranges):
        return whole
    pieces = list(session.batches(arrays))
    return list(pieces) if len(pieces) > 1 or pieces[0][1] != len(next(iter(pieces[0][0].values()))) else whole


def _rows(name: str, array: Array, size: int) -> Array:
    if not array.ndim or len(array) < size:
        raise UsageError(
            f"output {name!r} has shape {x(array.shape)}, which isn't one row for each sample: give no more samples at a "
            "time than the engine takes"
        )
    return array[:size]


# Images --------------------------------------------------------------------------------------------------------------


def _run_images(session: Session, request: RunRequest, folder: Path | None) -> RunResult:
    items, reporter = _listed(request.images), request.reporter
    files = _files(folder, session)
    if folder is not None:
        for name in _LISTS:
            check_writable(folder / name)
    rankings: list[Ranked] = []
    parts: list[dict[str, Array]] = []
    names: list[str] = []
    skipped_images: list[Skipped] = []
    milliseconds: list[float] = []
    together = max([_TOGETHER, *(item.min[0] for profile in session.profiles for item in profile.values() if item.min)])
    prepare = session.preparation()
    with reporter.phase("run", len(items)) as phase, ThreadPoolExecutor(min(4, cores())) as pool:
        for start in range(0, len(items), together):
            chunk = items[start : start + together]
            samples: list[Array] = []
            numbers = range(start, start + len(chunk))
            images = pool.map(functools.partial(_prepared, prepare), chunk, numbers)
            for number, item, image in zip(numbers, chunk, images):
                name = os.fspath(item) if _is_path(item) else f"image {number}"
                if isinstance(image, str):
                    skipped_images.append(Skipped(name, image))
                else:
                    samples.append(image)
                    names.append(name)
            if samples:
                time, results = timed(functools.partial(session.run_prepared, samples, top=request.top))
                milliseconds.append(time)
                if isinstance(results, dict):
                    parts.append(results)
                else:
                    rankings += [Ranked(name, tuple(best)) for name, best in zip(names[len(rankings) :], results)]
            phase.advance(len(chunk))
    if not names:
        some = "; ".join(f"{item.name}: {item.reason}" for item in skipped_images[:3])
        raise DataError(f"none of the {len(items)} images can be used ({some})")
    outputs = joined(parts) if parts else {}
    written_files = list(files.values()) if parts else []
    summaries = _kept(outputs, files)
    if folder is not None:
        written_files.append(folder / _LISTS[0 if parts else 1])
        write_json(written_files[-1], names if parts else [asdict(item) for item in rankings])
    return RunResult(
        session.engine,
        session.backend,
        summaries,
        tuple(rankings) or _ranked(session, outputs, request.top),
        tuple(skipped_images),
        tuple(written_files),
        tuple(milliseconds),
        tuple(names),
        outputs,
    )


def _listed(images: Any) -> list[Any]:
    """Single images, folders opened."""
    one = _is_path(images) or isinstance(images, bytes) or (isinstance(images, np.ndarray) and images.ndim != 4)
    images = [images] if one else list(images)
    items: list[Any] = []
    for item in images:
        if _is_path(item) and Path(item).is_dir():
            items += images_in(Path(item))
        elif len(images) == 1 and _is_path(item) and not Path(item).exists():
            raise UsageError(f"`images='{item}'` doesn't exist")
        else:
            items.append(item)
    if not items:
        raise UsageError("`images=` gives no image")
    return items


def _prepared(prepare: Preprocess, item: Any, number: int) -> Array | str:
    """An image as the engine takes it, or why it can't be."""
    if isinstance(item, (bytes, bytearray, memoryview)):
        return read_image(bytes(item), prepare)
    return read_image(item, prepare) if _is_path(item) else pixels(item, number, prepare)


# Results -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(output: str | os.PathLike[str] | None) -> Iterator[Path | None]:
    """The folder, made if absent; if anything fails before something is in it, it is absent again."""
    if output is None:
        yield None
        return
    there = Path(output).exists()
    folder = made_folder(output)
    try:
        yield folder
    except BaseException:
        if not there:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        raise


def _files(folder: Path | None, session: Session) -> dict[str, Path]:
    """Where each output goes, checked before anything is run. Names may hold slashes, which paths can't."""
    files: dict[str, Path] = {}
    if folder is None:
        return files
    for name in (item.name for item in session.outputs):
        stem = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "output"
        while folder / f"{stem}.npy" in files.values():
            stem += "_"
        files[name] = folder / f"{stem}.npy"
        check_writable(files[name])
    return files


def _kept(outputs: Mapping[str, Array], files: Mapping[str, Path]) -> tuple[OutputSummary, ...]:
    """Write outputs to their files, if they have any, and sum them up."""
    summaries = []
    for name, array in outputs.items():
        if name in files:
            # .npy has no names for BF16 and FP8: those are written as float32, which holds them exactly
            npy_array = array if array.dtype.kind != "V" and array.dtype.isbuiltin == 1 else array.astype(np.float32)
            with writing(files[name]) as partial, partial.open("wb") as file:
                np.save(file, npy_array)
        values = array if array.dtype.kind in "iub" else array.astype(np.float64)
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        file_name = str(files[name]) if name in files else None
        shape = tuple(map(int, array.shape))
        summaries.append(OutputSummary(name, array.dtype.name, shape, low, high, array.size - finite.size, file_name))
    return tuple(summaries)


def _ranked(session: Session, outputs: Mapping[str, Array], top: int) -> tuple[Ranked, ...]:
    """The best classes of the first samples, by the output that scores classes (by its kind in the manifest, where there is
    one): the one that fits the names, or the only one."""
    scores = [
        item
        for name, item in outputs.items()
        if session.scores_classes(name, item) and item.shape[1] > 1
        if not session.classes or item.shape[1] == len(session.classes)
    ]
    if len(scores) != 1 or not (session.classes or len(outputs) == 1) or not (scores[0] < np.inf).all():
        return ()  # of NaN none is the best; the output's summary counts them
    best = (session.best(row, top) for row in scores[0][:_SHOWN])
    return tuple(Ranked(f"sample {number}", tuple(row)) for number, row in enumerate(best))
