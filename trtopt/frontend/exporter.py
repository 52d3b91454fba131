"""PyTorch → ONNX by the torch.export-based exporter, compared with PyTorch on real inputs before it is written.

What is exported comes from `trtopt.frontend.modules`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, defs

from trtopt.calibration.expected import Expected, producer_of, record
from trtopt.core.errors import (
    DataError,
    ExportMismatch,
    MissingDependency,
    ModelError,
    UnsupportedOperator,
    UsageError,
    require,
)
from trtopt.core.files import check_writable
from trtopt.core.foreign import chain, essence, place
from trtopt.core.library_output import compiler_folder, quiet, rewriting
from trtopt.core.options import taking
from trtopt.core.temporary import scratch
from trtopt.core.values import TensorInfo, choice
from trtopt.data import open_data
from trtopt.data.arrayfiles import stored_arrays
from trtopt.data.arrays import usable
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import Arrays, joined
from trtopt.frontend.forward import INNER, Arguments, called, example, leaves
from trtopt.frontend.forward import output_names as named_outputs
from trtopt.frontend.modules import Source, opened
from trtopt.frontend.request import ExportRequest
from trtopt.frontend.rewrites import attention_on_four_axes, without_gaps, without_loops
from trtopt.graph.io import Model, load_model, save_model
from trtopt.graph.naming import rename_values
from trtopt.graph.passes.expand import written_out
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.opset import at_opset
from trtopt.graph.proto import opset_version
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.difference import difference
from trtopt.ort.sessions import OnnxSession
from trtopt.recipes.loader import check_shape, package_file

GENERATION_OPSETS = {"tensorrt8": 17, "tensorrt10": 20, "tensorrt11": 20, "rtx": 20}
DEFAULT_OPSET = 17  # every generation's parser reads it
NATIVE_OPSET = 18  # the oldest that torch's exporter writes; older ones are lowered from it
THREADS = 4
SCALAR = "scalar"  # in place of a shape
SIZES = {"batch": 2, "height": 224, "width": 224, "H": 224, "W": 224, "sequence": 16}  # while exporting; others 8

# What PyTorch's users call types; NumPy's "float" is double.
_TORCH = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "long": "int64",
}

_NEWER = "give `opset={}` (TensorRT 8.6 reads 17 and older)"

SAMPLES = 4
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png")

InputSpec = Mapping[str, TensorInfo | Sequence[int | str]] | Sequence[TensorInfo | str]
Sample = str | os.PathLike[str] | Arrays | NDArray[Any]


@dataclass(frozen=True)
class ExportComparison:
    """PyTorch against ONNX Runtime on the same inputs, at one batch size.

    Attributes:
        sizes: of the other open dimensions, by name, where they aren't those of the sample.
    """

    batch: int
    absolute: float
    relative: float
    output: str
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportResult:
    """What `export` made.

    Attributes:
        path: the ONNX file.
        source, weights: where the model came from; weights is a path, "random (seed 0)", or "the module's own".
        opset: of the file.
        inputs, outputs: with dynamic dimensions by name.
        verified: False if it wasn't compared (the reason is in `notes`).
        sample: what it was compared on: "photos…", a path, or "synthetic (seed 0)".
        comparisons: one per batch size.
        notes: what the user should know.
    """

    path: Path
    source: str
    weights: str
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    verified: bool
    sample: str
    comparisons: tuple[ExportComparison, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


@taking(ExportRequest)
def export(request: ExportRequest) -> ExportResult:
    """Export a PyTorch model and check that ONNX Runtime computes the same.

    Nothing is downloaded. The module is exported in eval mode; its own mode is restored.

    Args:
        source: "torchvision:NAME", "package.module:FACTORY" or "FILE.py:FACTORY" (a class or function that gives the module;
            a module is looked for in the current folder, too), the name or path of a model recipe, or a module.
        opset: of the file; default: the newest that `for_generation` reads, else 17, which all read.
        for_generation: "tensorrt8", "tensorrt10", "tensorrt11" or "rtx".
        weights: a state dict (.pth, loaded with weights_only=True, or .safetensors).
        factory_arg: keyword arguments of the factory (of torchvision's, too); before a recipe's own options.
        inputs: input name → shape (or TensorInfo); names of forward's arguments, in any order, or new names for all of them,
            in forward's order; optional arguments may be left out. A name in place of a size makes that dimension dynamic,
            equal names are equal sizes: {"input": ("batch", 3, "H", "W")}; as the command takes it, ["ids:batch,16:int64"].
            Default: the recipe's, or batch×3×H×W float32 for torchvision with the size its own preprocessing gives.
        dynamic: input name → {axis: dimension name}, on top of `inputs`.
        input_names, output_names: names in the ONNX file, in the order of forward's arguments and results. Default of the
            outputs': the keys or fields of what forward returns, else "output", or "output_0", "output_1", ….
        sample: real inputs to compare on: .npz (one array per input, first axis = samples), .npy, a folder of
            images (with `preprocess`), or arrays. Default: photos of an installed package where the model takes images
            and its preprocessing is known, else seeded synthetic values, which the result says.
        preprocess: for images, as for `calibrate`; a mapping without `preset` changes what the recipe says.
        tolerance: largest accepted difference, relative to the largest output.
        verify: False skips the comparison (the result says so).

    Raises:
        UsageError: a source, name, shape or option that can't be right.
        MissingDependency: torch, onnxscript or another package isn't there.
        ModelError: the exporter fails (with the essential cause), or the opset can't express the model.
        ExportMismatch: PyTorch and ONNX Runtime disagree; nothing is written.
        OutputError: the file can't be written.
    """
    preprocess, reporter = request.preprocess, request.reporter
    check_writable(request.output)
    target = _opset(request.opset, request.for_generation)
    if not request.tolerance >= 0:
        raise UsageError(f"`tolerance=` is {request.tolerance}; a share of the largest output is needed, such as 0.001")
    with contextlib.ExitStack() as stack:
        with reporter.phase("load the PyTorch model"):  # one that can't be right is refused before torch is asked for
            source = stack.enter_context(opened(request.source, request.weights, request.factory_arg))
        torch = require("torch", "torch", "export")
        require("onnxscript", "torch", "export")
        if request.opset is None and request.for_generation is None and source.opset:
            target = source.opset
        infos, keywords = _inputs(source, request.inputs, request.dynamic, request.input_names)
        if preprocess is not None and not _on_images(infos, request.sample):
            what = "the model takes none" if request.sample is None else "arrays in `sample=` are used as they are"
            raise UsageError(f"`preprocess=` is for images, and {what}: drop it")
        if isinstance(preprocess, Mapping):
            preprocess = Preprocess.load(preprocess, Preprocess.load(source.preprocess) if source.preprocess else None)
        arrays, sampled = _samples(infos, request.sample, preprocess or source.preprocess)
        notes: list[str] = []

        def noted(*texts: str) -> None:
            for text in texts:
                notes.append(text)
                reporter.warn(text)

        noted(*source.notes)
        stack.enter_context(_evaluating(torch, source.module))
        subject = _Subject(torch, source.text, called(torch, source.module, keywords), infos, arrays)
        with reporter.phase("run the PyTorch model"):
            values = _first_run(subject, source.module, sampled)
        tensors = [name for name, value in values if isinstance(value, torch.Tensor)]
        for name, value in values:
            if not isinstance(value, torch.Tensor):
                noted(f"the output {name} is {value if value is None else type(value).__name__}, no tensor: left out")
        names = named_outputs(
            tensors,
            source.outputs if request.output_names is None else request.output_names,
            [info.name for info in infos],
            source.text,
        )
        with reporter.phase("export to ONNX"):
            model = _export(subject, names, target)
            _record_training(subject, model)
        comparisons: list[ExportComparison] = []
        if request.verify:
            with reporter.phase("compare PyTorch with ONNX Runtime") as phase:
                path = stack.enter_context(scratch()) / "model.onnx"
                save_model(model.proto, path)
                try:
                    session = OnnxSession(path)
                except ModelError as error:
                    raise ModelError(f"{error}{_types_hint(subject)}") from error
                for size in subject.batch_sizes:
                    batch = subject.batch(size)
                    try:
                        expected = subject.outputs(batch, model)
                    except Exception as error:  # one sample isn't for every model: the axis may hold a graph's nodes
                        if size == subject.batch_sizes[-1]:  # which has run
                            raise
                        noted(
                            f"not compared at batch {size}, where forward fails: {type(error).__name__}: {essence(error, 1)}"
                        )
                        continue
                    gap = difference(expected, session(batch))
                    comparisons.append(ExportComparison(size, gap.absolute, gap.relative, gap.output))
                    phase.detail(f"batch {size}: {gap}")
                    if not gap.within(request.tolerance):
                        _disagree(subject, size, expected, f"{gap}; allowed: relative {request.tolerance:g}", sampled)
                    if not gap.scale:
                        notes.append("every output is zero, so that the comparison says little")
                elsewhere, note = _elsewhere(subject, model, session, comparisons[0].batch, request.tolerance)
                comparisons += elsewhere
                noted(*note)
        else:
            notes.append("not compared with PyTorch, as asked")
        save_model(model.proto, request.output)
    if request.verify and _made_up(sampled):
        notes.append("compared on synthetic inputs: give a sample of real ones to be sure")
    return ExportResult(
        path=Path(request.output),
        source=source.text,
        weights=source.weights,
        opset=model.opset,
        inputs=model.inputs,
        outputs=model.outputs,
        verified=request.verify,
        sample=sampled if request.verify else "none",
        comparisons=tuple(comparisons),
        notes=tuple(dict.fromkeys(notes)),
    )


def parse_input(text: str) -> TensorInfo:
    """Read `NAME:SHAPE[:DTYPE]` such as "input:batchx3x224x224" or "ids:batch,max:int64" (commas for names with an x); of a
    single number, which has no dimensions, "rate:scalar".

    Raises:
        UsageError: it can't be read.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise UsageError(
            f"`inputs=` {text!r} can't be read; write NAME:batchx3x224x224, NAME:batch,sequence:int64 or NAME:scalar"
        )
    pieces = [] if parts[1] == SCALAR else parts[1].split("," if "," in parts[1] else "x")
    shape = check_shape([int(size) if size.isdecimal() else size for size in pieces], f"`inputs='{parts[0]}'`")
    return _info(TensorInfo(parts[0], parts[2] if len(parts) == 3 else "float32", shape))


def _opset(opset: int | None, generation: str | None) -> int:
    if generation is not None:
        choice(generation, GENERATION_OPSETS, "`for_generation=`")
    if opset is None:
        return GENERATION_OPSETS[generation] if generation else DEFAULT_OPSET
    if not 16 <= opset <= 23:
        raise UsageError(f"`opset=` is {opset}; allowed: 16 to 23 ({DEFAULT_OPSET} is read by every TensorRT)")
    if generation is not None and opset > (newest := GENERATION_OPSETS[generation]):
        raise UsageError(f"`opset=` is {opset}; {generation} reads {newest} and older: leave `opset=` out")
    return opset


def _inputs(
    source: Source,
    inputs: InputSpec | None,
    dynamic: Mapping[str, Mapping[int, str]] | None,
    names: Sequence[str] | None,
) -> tuple[tuple[TensorInfo, ...], tuple[str, ...]]:
    """The inputs as the file has them, in the order in which forward gets them, and the last ones' arguments, by name."""
    takes = Arguments(source.module)
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Mapping):
        infos = [_stated(name, shape) for name, shape in inputs.items()]
    else:
        infos = [parse_input(item) if isinstance(item, str) else _stated("", item) for item in inputs or source.inputs]
    if not infos:
        typed = " ".join(f"`inputs='{name}:{example(name)}'`" for name in takes.needed or takes.named[:1] or ["input"])
        raise UsageError(
            f"{source.text}: its inputs' shapes aren't known; forward takes: {takes}. Give them, such as {typed}"
        )
    infos, keywords = takes.order(infos, source.text)
    former = [info.name for info in infos]
    if names is not None:
        if len(names) != len(infos) or len(set(names)) < len(names):
            raise UsageError(
                f"input names {', '.join(names)}: {len(infos)} different ones are needed, for {', '.join(former)}"
            )
        infos = [replace(info, name=name) for info, name in zip(infos, names)]
    for name, axes in (dynamic or {}).items():
        index = next((index for index, info in enumerate(infos) if name in (info.name, former[index])), None)
        if index is None:
            raise UsageError(f"dynamic names the input {name!r}; there are: {', '.join(info.name for info in infos)}")
        shape = list(infos[index].shape)
        for axis, dimension in axes.items():
            if not -len(shape) <= axis < len(shape):
                raise UsageError(f"dynamic: the input {name!r} has {len(shape)} dimensions, no axis {axis}")
            shape[axis] = dimension
        infos[index] = replace(infos[index], shape=tuple(shape))
    return tuple(map(_info, infos)), keywords


def _stated(name: str, shape: Any) -> TensorInfo:
    """An input from Python."""
    if isinstance(shape, TensorInfo):
        return shape
    if not name or isinstance(shape, str) or hasattr(shape, "dtype") or not isinstance(shape, Sequence):
        example_ = {"x": ("batch", 16), "rate": ()}
        raise UsageError(
            f"`inputs=` holds {type(shape).__name__}{' for ' * bool(name)}{name}; a mapping of names to shapes is needed, such "
            f"as {example_}; tensors to compare on go to `sample=`"
        )
    return TensorInfo(name, "float32", tuple(shape))


def described_inputs(source: Source, inputs: InputSpec) -> tuple[TensorInfo, ...]:
    """Inputs as they are given, checked against forward's arguments."""
    return _inputs(source, inputs, None, None)[0]


def _info(info: TensorInfo) -> TensorInfo:
    check_shape(info.shape, f"input {info.name}")
    axis = info.batch_axis if info.shape else None
    info = replace(info, dtype=_TORCH.get(info.dtype, info.dtype), batch_axis=axis)
    try:
        known = np.dtype(info.dtype) is not None and info.numeric
    except TypeError:
        known = False
    if not known:
        raise UsageError(f"input {info.name}: the dtype is {info.dtype!r}; write such as float32 or int64")
    return info


def _samples(
    infos: tuple[TensorInfo, ...], sample: Sample | None, preprocess: Any
) -> tuple[dict[str, NDArray[Any]], str]:
    """Inputs to trace and compare with, and what they are."""
    if sample is None:
        photos = _photos(infos, preprocess)
        if photos is not None:
            said = f"as {preprocess}" if isinstance(preprocess, str) else "as asked for"
            return photos, f"{len(next(iter(photos.values())))} photos of scikit-image, preprocessed {said}"
        return synthetic_inputs(infos, _sizes(infos)), "synthetic (seed 0)"
    if isinstance(sample, (Mapping, np.ndarray)):
        arrays = sample if isinstance(sample, Mapping) else {infos[0].name: sample}
        for info in infos:
            if info.name not in arrays:
                raise DataError(f"the sample has no input {info.name!r}; it has: {', '.join(arrays)}")
        said = "arrays" if isinstance(sample, Mapping) else "an array"
        found = {info.name: usable(arrays[info.name], info, "the sample") for info in infos}
        return {info.name: found[info.name] if info.shape else np.asarray(found[info.name][0]) for info in infos}, said
    path = Path(sample)
    if not path.exists():
        raise UsageError(f"the sample {path} doesn't exist; give .npz, .npy, an image or a folder of images")
    if path.suffix == ".npz" and len({info.shape[:1] for info in infos}) > 1:  # not all begin with the samples
        found = {name: array[:] if array.ndim else array.whole() for name, array in stored_arrays(path).items()}
        whole, _ = _samples(infos, found, preprocess)
        return whole, str(path)
    if path.suffix in (".npz", ".npy"):
        batches = open_data(infos, data=path, limit=SAMPLES)
    else:
        images = [path] if path.is_file() else path
        batches = open_data(_sized(infos), images=images, preprocess=preprocess, limit=SAMPLES)
    return joined(batches), os.fspath(sample)


def _on_images(infos: Sequence[TensorInfo], sample: Sample | None) -> bool:
    """Whether it is compared on images: where there is no sample, on photos if the model takes an image."""
    if sample is None:
        return len(infos) == 1 and len(infos[0].shape) == 4
    return not isinstance(sample, (Mapping, np.ndarray)) and Path(sample).suffix not in (".npz", ".npy")


def _photos(infos: tuple[TensorInfo, ...], preprocess: Any) -> dict[str, NDArray[Any]] | None:
    """Real photos of an installed package, where the model takes one image and its preprocessing is known."""
    if preprocess is None or not _on_images(infos, None):
        return None
    try:
        files = [package_file(f"package:skimage/data/{name}") for name in PHOTOS]
        return joined(open_data(_sized(infos), images=files, preprocess=preprocess))
    except MissingDependency:
        return None


def _sized(infos: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    """With the sizes that dynamic dimensions have while exporting, the batch apart: images are resized to them."""
    sizes = _sizes(infos)
    return tuple(
        replace(info, shape=(info.shape[0], *(sizes.get(str(size), size) for size in info.shape[1:]))) for info in infos
    )


def _sizes(infos: Sequence[TensorInfo]) -> dict[str, int]:
    """What each dynamic dimension is while exporting. All differ from 1 and, where they can, from each other."""
    names = [size for info in infos for size in info.shape if isinstance(size, str)]
    return {name: SIZES.get(name, 8) for name in names}


@dataclass(frozen=True)
class _Subject:
    """A module that takes the inputs in their order (`called`), and samples to run it on."""

    torch: Any
    text: str
    module: Any
    infos: tuple[TensorInfo, ...]
    arrays: Arrays

    @property
    def first(self) -> int | str:
        """The first dimension of the first input that has any."""
        return next((info.shape[0] for info in self.infos if info.shape), 1)

    @property
    def samples(self) -> int:
        """How many samples the inputs have that count them: an edge list of 2 × edges beside nodes doesn't."""
        return min(
            (
                self.arrays[info.name].shape[axis]
                for info in self.infos
                for axis, name in enumerate(info.shape)
                if name == self.first
            ),
            default=1,
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Two batch sizes where the first dimension is dynamic and there are samples for it."""
        return (self.first,) if isinstance(self.first, int) else tuple(dict.fromkeys((1, self.samples)))

    def batch(self, size: int) -> dict[str, NDArray[Any]]:
        """The first `size` samples, repeated if there are fewer; inputs without the batch stay whole.

        A state may have the batch behind its layers; a size that is fixed counts as the batch on the first axis alone.
        """
        batch, first = dict(self.arrays), self.first
        for info in self.infos:
            for axis, name in enumerate(info.shape):
                if name == first and (axis == 0 or isinstance(name, str)):
                    array = batch[info.name]
                    batch[info.name] = array.take(np.arange(size) % array.shape[axis], axis)
        return batch

    def tensors(self, batch: Arrays) -> tuple[Any, ...]:
        first = next(self.module.parameters(), None)
        device = "cpu" if first is None else first.device
        return tuple(self._tensor(batch[info.name]).to(device) for info in self.infos)

    def _tensor(self, array: NDArray[Any]) -> Any:
        if array.dtype == "bfloat16":  # which NumPy has not, and torch doesn't take from it
            return self.torch.from_numpy(array.astype(np.float32)).bfloat16()
        return self.torch.from_numpy(array.copy())

    def __call__(self, batch: Arrays) -> tuple[Any, ...]:
        with self.torch.no_grad(), quiet():
            result: tuple[Any, ...] = self.module(*self.tensors(batch))
        return result

    def outputs(self, batch: Arrays, model: Model) -> dict[str, NDArray[Any]]:
        """PyTorch's outputs under the ONNX file's names."""
        outputs = self(batch)
        if len(outputs) != len(model.outputs):
            raise ModelError(f"PyTorch gives {len(outputs)} outputs, the exported model {len(model.outputs)}")
        return {info.name: value.detach().cpu().numpy() for info, value in zip(model.outputs, outputs)}


def _elsewhere(
    subject: _Subject, model: Model, session: OnnxSession, samples: int, tolerance: float
) -> tuple[list[ExportComparison], list[str]]:
    """The comparison at other sizes of what is open beside the batch, the first that PyTorch takes; or why there is none.

    A trace may hold the sizes that it was made at, and give other results, or none, at any other. It may also hold what an
    `if` on sizes came to, such as whether to fill up to a multiple: so a neighbouring size is compared, too. Where that alone
    differs, the model is good for others, and that is said.
    """
    infos, batch = subject.infos, subject.first
    traced = {
        size: subject.arrays[info.name].shape[axis]
        for info in infos
        for axis, size in enumerate(info.shape)
        if isinstance(size, str) and size != batch
    }
    at = _listed(traced)
    tried: list[str] = []
    found: list[ExportComparison] = []
    doubled, halved, neighbour = (
        {name: max(1, change(size)) for name, size in traced.items()} for change in _OTHER_SIZES
    )
    for sizes in (doubled, halved, neighbour) if traced else ():
        if sizes == traced or (found and sizes is not neighbour):
            continue
        tried.append(_listed(sizes))
        made = {}
        for info in infos:
            array = subject.batch(samples)[info.name]
            for axis, name in enumerate(info.shape):
                if name in sizes:
                    array = array.take(np.arange(sizes[str(name)]) % array.shape[axis], axis)
            made[info.name] = np.ascontiguousarray(array)
        try:
            expected = subject.outputs(made, model)
        except Exception:  # whatever a model raises at a size that it doesn't take
            continue
        try:
            gap = difference(expected, session(made))
            problem = "" if gap.within(tolerance) else f"they disagree there: {gap}"
        except ModelError:
            problem = "ONNX Runtime can't run it there"
        if problem and found:
            note = (
                f"the ONNX model is right with {at} and {_listed(found[0].sizes)}, but not at every size: PyTorch runs it with "
                f"{tried[-1]}, and {problem}. Where forward decides by sizes (an if, padding to a multiple), the trace holds "
                "what it did: do that before the model, or write it without if; else keep to such multiples"
            )
            return found, [note]
        if problem:
            raise ExportMismatch(
                f"{subject.text}: it was traced with {at}, and its ONNX model is right there alone: PyTorch runs it with "
                f"{tried[-1]}, but {problem}. Nothing was written; give sizes instead of names in `inputs=`"
            )
        found.append(ExportComparison(samples, gap.absolute, gap.relative, gap.output, sizes))
    if tried and not found:
        return [], [f"compared at one size alone: PyTorch doesn't take {' or '.join(tried)}"]
    return found, []


_OTHER_SIZES: tuple[Callable[[int], int], ...] = (lambda size: size * 2, lambda size: size // 2, lambda size: size + 1)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _first_run(subject: _Subject, user: Any, sampled: str) -> list[tuple[str, Any]]:
    """What the user's forward returns, by name; its faults show here, before the exporter hides them."""
    batch = subject.batch(subject.batch_sizes[-1])
    results: list[Any] = []
    hook = user.register_forward_hook(lambda _, __, result: results.append(result))
    try:
        subject(batch)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{info.name} {info.dtype} {list(batch[info.name].shape)}" for info in subject.infos)
        raise ModelError(
            f"{subject.text}: forward fails on {given}, {_at(error)}{type(error).__name__}: {essence(error)}"
            f"{_input_hint(error, subject, sampled)}"
        ) from error
    finally:
        hook.remove()
    values = list(leaves(results[-1]))
    if not any(isinstance(value, subject.torch.Tensor) for _, value in values):
        raise ModelError(f"{subject.text}: forward returns {type(results[-1]).__name__}, which holds no tensor")
    return values


def _operators(subject: _Subject) -> list[str]:
    """The names of the operators that the module runs, as far as it runs while it is watched (flex_attention doesn't)."""
    torch: Any = subject.torch
    operators: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(str(function))
            return function(*args, **(kwargs or {}))

    with contextlib.suppress(Exception), Watch():
        subject(subject.batch(subject.batch_sizes[-1]))
    return operators


@contextlib.contextmanager
def _rewritten(torch: Any) -> Iterator[None]:
    with without_loops(torch), attention_on_four_axes(torch), without_gaps(torch):
        yield


def _export(subject: _Subject, names: Sequence[str], target: int) -> Model:
    torch, infos, first = subject.torch, subject.infos, subject.first
    # A traced size of 1 would be taken for a constant, so a dynamic batch is traced with two samples.
    size = first if isinstance(first, int) else max(2, subject.samples)
    shapes = tuple(
        {axis: name for axis, name in enumerate(info.shape) if isinstance(name, str)} or None for info in infos
    )
    # Names that nothing else has: torch's exporter doesn't see that a wished one is another value's.
    asked = {f"{INNER}_input_{place}": info.name for place, info in enumerate(infos)}
    given = {f"{INNER}_output_{place}": name for place, name in enumerate(names)}
    try:
        with rewriting, compiler_folder, quiet(), torch.no_grad(), _rewritten(torch):
            program = torch.onnx.export(
                subject.module,
                subject.tensors(subject.batch(size)),
                input_names=list(asked),
                output_names=list(given),
                dynamic_shapes=(shapes,) if any(shapes) else None,
                opset_version=max(target, NATIVE_OPSET),
                dynamo=True,
                verbose=False,
            )
            rename_values(program.model, {**asked, **given}, f"{INNER}.")
            proto = program.model_proto
    except Exception as error:
        raise ModelError(
            f"{subject.text} can't be exported{_why(error, infos, _operators(subject))} (torch: {essence(error, 1)})"
        ) from error
    try:
        model = load_model(proto)
    except ModelError as error:
        if (newer := _unknown_operator(str(error))) is None:
            hint = _types_hint(subject) or _autocast_hint(str(error))
            raise ModelError(f"{subject.text} can't be exported: {error}{hint}") from error
        raise ModelError(
            f"{subject.text} uses {newer[0]}, which ONNX has from opset {newer[1]} on; this export writes {target}: "
            f"{_NEWER.format(max(newer[1], 20))}; `trtopt check` then says whether TensorRT has it"
        ) from error
    exported = [info.name for info in model.inputs]
    if exported != [info.name for info in infos]:
        raise ModelError(
            f"the exported model has the inputs {exported}; wanted {[i.name for i in infos]}: an argument is unused"
        )
    for info, made in zip(infos, model.inputs):
        fixed = [name for name, size in zip(info.shape, made.shape) if isinstance(name, str) and isinstance(size, int)]
        if fixed:
            raise ModelError(
                f"the model fixes the dimension(s) {', '.join(fixed)} of {info.name} (exported as {list(made.shape)}); "
                "export with sizes in their place"
            )
    if model.opset > target:
        try:
            model = load_model(at_opset(model.proto, target, _NEWER.format(model.opset)))
        except ModelError:
            model = load_model(_lowered(fold(model.proto)[0], target))  # folding turns computed axes into constants
    return model


def _lowered(proto: ModelProto, target: int) -> ModelProto:
    """At an older opset; operators that it lacks are written out where ONNX defines them by others."""
    try:
        return at_opset(proto, target, _NEWER.format(opset_version(proto)))
    except UnsupportedOperator as error:
        parts = written_out(proto, error.issues)
        if parts is None:
            reasons = " ".join(issue.reason for issue in error.issues)
            newest = max(opset_version(proto), *map(int, re.findall(r"came with opset (\d+)", reasons)), 0)
            raise UnsupportedOperator(error.problem, error.issues, _NEWER.format(newest), error.parts) from error
    return _lowered(parts, target)


def _record_training(subject: _Subject, model: Model) -> None:
    """Keep what the first BatchNorm knows of its input: the export folds it away, and calibration compares with it."""
    seen: list[tuple[Any, Any]] = []
    kind = subject.torch.nn.BatchNorm2d
    norms = [item for item in subject.module.modules() if isinstance(item, kind) and item.track_running_stats]
    hooks = [item.register_forward_hook(lambda norm, _, output: seen.append((norm, output))) for item in norms]
    try:
        if norms:
            batch = subject.batch(subject.batch_sizes[-1])  # which has run
            subject(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        return
    norm, output = seen[0]
    trained = norm.num_batches_tracked is None or bool(norm.running_mean.any()) or bool((norm.running_var != 1).any())
    if not trained or norm.weight is None:
        return
    tensor = producer_of(model.proto, batch, output.float().cpu().numpy())
    if tensor is not None:
        deviation = norm.weight.abs() * (norm.running_var / (norm.running_var + norm.eps)).sqrt()
        mean, std = (item.detach().double().cpu().numpy() for item in (norm.bias, deviation))
        record(model.proto, Expected(tensor, mean, std, "BatchNorm2d, recorded by trtopt export"))


def _disagree(subject: _Subject, size: int, expected: Arrays, gap: str, sampled: str) -> NoReturn:
    """Say that the exported model computes something else, and whether PyTorch itself does, the second time."""
    held = {name: buffer.clone() for name, buffer in subject.module.named_buffers()}
    again = dict(zip(expected, subject(subject.batch(size))))
    changed = [name for name, value in again.items() if not np.array_equal(value.cpu().numpy(), expected[name], True)]
    moved = [
        name.removeprefix(f"{INNER}.")
        for name, buffer in subject.module.named_buffers()
        if name not in held or not np.array_equal(buffer.cpu().numpy(), held[name].cpu().numpy(), True)
    ]
    if changed and moved:
        raise ExportMismatch(
            f"{subject.text}: PyTorch itself gives another {changed[0]} for the same inputs the second time: forward changes "
            f"the module's {', '.join(moved[:4])}, and a graph keeps nothing from one run to the next. Nothing was written. "
            "Leave that out of forward, or make it an input and an output of forward, so that the caller keeps it"
        )
    if changed:
        raise ExportMismatch(
            f"{subject.text}: PyTorch itself gives another {changed[0]} for the same inputs the second time: it computes "
            "something random, which a fixed graph can't repeat. Nothing was written. torch.nn.functional.dropout(…) is on "
            "unless it is given training=self.training (torch.nn.Dropout is off by itself); random numbers belong outside, as "
            f"an input. If it is meant so: `verify=False` ({gap})"
        )
    masks = [info.name for info in subject.infos if not info.floating]
    if masks and _made_up(sampled):
        hint = (
            f"{', '.join(masks)} {'was' if len(masks) == 1 else 'were'} made up of both 0 and 1: of what a mask leaves nothing "
            "of, PyTorch and ONNX make each something else; give real ones by `sample=`"
        )
    else:
        hint = "If the model computes in lower precision than FP32, give a larger `tolerance=`"
    raise ExportMismatch(
        f"{subject.text}: PyTorch and ONNX Runtime disagree on {sampled} at batch {size}: {gap}. Nothing was written. {hint}"
    )


def _unknown_operator(told: str) -> tuple[str, int] | None:
    """The operator that the checker doesn't know at the model's opset, and the first opset that has it."""
    found = re.search(r"No Op registered for (\w+) with domain_version", told)
    versions = [
        schema.since_version
        for schema in defs.get_all_schemas_with_history()
        if found and schema.name == found[1] and not schema.domain
    ]
    return (found[1], min(versions)) if found and versions else None


_LACKING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_STATIC = re.compile(r"inferred a static shape of (\d+) for dimension inputs\[(\d+)\]\.shape\[(\d+)\]")


def _why(error: BaseException, infos: Sequence[TensorInfo], operators: Sequence[str]) -> str:
    """The class of the failure in our words: what, where in the user's code, what to do."""
    told = "".join(str(item) for item in chain(error))
    fixed = [
        f"{infos[int(which)].shape[int(axis)]} of {infos[int(which)].name} is always {size}"
        for size, which, axis in _STATIC.findall(told)
        if int(which) < len(infos) and int(axis) < len(infos[int(which)].shape)
    ]
    fixed = list(dict.fromkeys(fixed))
    if fixed:
        listed = (
            ". Where forward goes through that input as through a list of tensors, export a module around it, whose forward "
            "takes them one by one"
        )
        return (
            f": it fixes a dimension that was asked to be dynamic: {'; '.join(fixed)}; give the size in `inputs=`"
            f"{listed if any('unbind' in name for name in operators) else ''}"
        )
    signs = ("Constraints violated", "inferred a static shape", "specialized", "ConstraintViolation")
    if any(sign in told for sign in signs):
        return f": {_at(error)}it fixes a dimension that was asked to be dynamic: give a size in its place in `inputs=`"
    if any("nms" in name for name in operators):
        return (
            f": {_at(error)}it ends in NMS (non-maximum suppression), which gives as many boxes as there are. Export what "
            "comes before NMS, by a module of your own whose forward returns the raw boxes and scores (docs/export.md), and do "
            "NMS after the engine"
        )
    if any("_pack_padded_sequence" in name for name in operators):
        return (
            f": {_at(error)}it packs sequences (pack_padded_sequence), whose steps depend on their lengths' values: give the "
            "padded sequences to the LSTM or GRU, and take each one's result at its own last step, by torch.gather"
        )
    if "quantized." in told or "_obs_fq_" in told or "quantized::" in told:
        return (
            ": it holds PyTorch's own INT8 operators or their observers (torch.ao), which ONNX lacks: export the float model, "
            "as it is before prepare and convert, and let trtopt build --int8 quantize it"
        )
    if "is not supported for tensor subclasses" in told:
        return (
            f": {_at(error)}it leaves PyTorch there, for NumPy or another library, which no graph holds: write that part with "
            "PyTorch's operators, or leave it out of the exported model"
        )
    if "complex-valued input" in told:
        return (
            f": {_at(error)}it computes with complex numbers, of which torch's exporter knows few operations: write that part "
            "with two real tensors, the real and the imaginary one (a rotation by torch.polar: cosine and sine)"
        )
    if lacking := _LACKING.search(told):
        return (
            f": {_at(error)}it uses PyTorch's {lacking[1]}, for which torch's exporter has no ONNX form: write that part with "
            "other operators, or leave it out of the exported model"
        )
    if "data-dependent" in told or "GuardOnDataDependent" in told:
        return (
            f": {_at(error)}its control flow depends on values: rewrite that part without Python's if, while, int() or bool() "
            "on tensors (torch.where chooses by value), or leave it out of the exported model"
        )
    where = f": {found}" if (found := _at(error).removesuffix(": ")) else ""
    tries = []
    for info in infos:
        if any(isinstance(size, str) for size in info.shape):
            batch, *rest = (_sizes(infos).get(str(size), size) for size in info.shape)
            fixed_sizes = "x".join(map(str, (1 if isinstance(info.shape[0], str) else batch, *rest)))
            kind = "" if info.dtype == "float32" else f":{info.dtype}"
            tries.append(f"`inputs='{info.name}:{fixed_sizes}{kind}'`")
    if not tries:
        return where
    return (
        f"{where}: torch's exporter itself fails. It knows more of a model without open sizes: try them fixed, such as "
        f"{' '.join(tries)}"
    )


def _at(error: BaseException) -> str:
    where = place(error)
    return f"at {where}: " if where else ""


def _input_hint(error: BaseException, subject: _Subject, sampled: str) -> str:
    """What to do where forward itself fails.

    Args:
        sampled: what it ran on, as `ExportResult.sample` says it.
    """
    told, made_up = str(error), _made_up(sampled)
    if "data type 'str'" in told or "'Tensor' object has no attribute" in told:
        return (
            ". forward gets tensors alone: where it takes a dict or an object, export a module around it, whose forward takes "
            "tensors and puts them into one"
        )
    if re.search(r"scalar type|dtype|indices|Half|Double|Long|BFloat16", told):
        return (
            ". Where a tensor of another type is needed, say so: `inputs='NAME:batchx16:int64'` (or :float16)"
            f"{_types_hint(subject)}"
        )
    if "index out of range" in told and made_up:
        return ". Integer inputs were made up of 0 and 1: give real ones by `sample=`, or other shapes by `inputs=`"
    if made_up:
        return ". Are the shapes and types of `inputs=` right, and the values, which were made up? `sample=` gives real ones"
    return (
        f". Are the shapes and types of `inputs=` right, and does forward take the values that were given ({sampled})?"
    )


def _made_up(sampled: str) -> bool:
    return sampled.startswith("synthetic")


def _types_hint(subject: _Subject) -> str:
    """What to do about a module whose weights have a type that PyTorch or ONNX Runtime can't run everywhere."""
    found = {item.dtype for item in subject.module.parameters() if item.dtype.is_floating_point}
    odd = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found - {subject.torch.float32}))
    if not odd:
        return ""
    return (
        f". The module's weights are {odd}: give it in float32, which needs no other inputs, as a function that returns "
        "model.float(); precision is chosen by trtopt build"
    )


def _autocast_hint(told: str) -> str:
    """What to do where FP32 weights meet BF16 values, which older opsets' operators don't take."""
    if "bfloat16" not in told:
        return ""
    return (
        ". forward itself computes in bfloat16 (torch.autocast, .bfloat16()): leave that out of the exported model; precision "
        "is chosen by trtopt build"
    )


@contextlib.contextmanager
def _evaluating(torch: Any, module: Any) -> Iterator[None]:
    """Eval mode for the time of the export, every submodule's own mode afterwards; and a bounded number of threads, since
    PyTorch's default is one per core, whatever the container allows.

    Without the fused attention that torch.nn.TransformerEncoderLayer takes in eval mode: its exporter has no operator for it.
    And without torch.nn.Transformer's look at its mask's values, whether it is the causal one, which can't be traced: a mask
    that isn't known to be is applied as it is.
    """
    modes = [(item, item.training) for item in module.modules()]
    layers, looks = torch.nn.modules.transformer, "_detect_is_causal_mask"
    looking = getattr(layers, looks, None)
    fused, threads = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    with contextlib.suppress(NotImplementedError):  # torch.export's own modules have the mode that they were made in
        module.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_num_threads(min(threads, THREADS))
    if looking is not None:
        setattr(layers, looks, lambda mask, is_causal=None, size=None: is_causal is True)
    try:
        yield
    finally:
        if looking is not None:
            setattr(layers, looks, looking)
        torch.set_num_threads(threads)
        torch.backends.mha.set_fastpath_enabled(fused)
        for item, mode in modes:
            item.training = mode
