"""PyTorch → ONNX by the torch.export-based exporter, compared with PyTorch on real inputs before it is written.

What is exported comes from `trtopt.frontend.modules`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto

from trtopt.core.documents import Plain
from trtopt.core.errors import ModelError, UnsupportedOperator, UsageError, require
from trtopt.core.files import check_ending
from trtopt.core.foreign import essence
from trtopt.core.kept import ARRAYS
from trtopt.core.library_output import compiler_folder, quiet, rewriting
from trtopt.core.options import taking
from trtopt.core.values import TensorInfo
from trtopt.data.preprocess import Preprocess
from trtopt.frontend.comparison import ExportComparison, compared
from trtopt.frontend.failures import at, input_hint, types_hint, why
from trtopt.frontend.inputs import stated_inputs
from trtopt.frontend.modules import Source, opened
from trtopt.frontend.request import ExportRequest
from trtopt.frontend.rewrites import custom_operator, traceable, translation
from trtopt.frontend.samples import Subject, samples_for
from trtopt.graph.io import Model, load_model, save_model
from trtopt.graph.passes.expand import written_out
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.opset import at_opset
from trtopt.graph.proto import opset_version
from trtopt.graph.view import rename_values

DEFAULT_OPSET = 17  # every generation's parser reads it
NATIVE_OPSET = 18  # the oldest that torch's exporter writes; older ones are lowered from it
THREADS = 4
INNER = "trtopt"  # what the exported model calls the user's module: its weights' names begin so
_NEWER = "give `opset={}` (TensorRT 8.6 reads 17 and older)"


@dataclasses.dataclass(frozen=True)
class ExportResult(Plain):
    """An export's result.

    Attributes:
        path: the ONNX file.
        source, weights: where the model came from; weights is a path, "random (seed 0)", or "the module's own".
        opset: of the file.
        inputs, outputs: with dynamic dimensions by name.
        verified: False if it wasn't compared (the reason is in `notes`).
        sample: what it was compared on: a path, "arrays", or "synthetic (seed 0)".
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


@taking(ExportRequest)
def export(request: ExportRequest) -> ExportResult:
    """Export a PyTorch model and check that ONNX Runtime computes the same; nothing is downloaded.

    Args:
        source: "torchvision:NAME", "package.module:FACTORY" or "FILE.py:FACTORY" (a class or function that gives the module;
            a module is looked for in the current folder, too), the name or path of a model recipe, or a module.
        opset: of the file; default: 17, which every TensorRT reads; of TensorRT 10, 11 and RTX 20 is the newest.
        weights: a state dict (.pth, loaded with weights_only=True, or .safetensors).
        factory_arg: keyword arguments of the factory (of torchvision's, too); before a recipe's own options.
        inputs: forward's argument, or a new name for each → shape, such as {"input": ("batch", 3, "H", "W")}, a name for each
            dynamic size; or as the command takes it, ["ids:batch,16:int64"]. Default: the recipe's or torchvision's.
        output_names: in the order of forward's results. Default: the keys or fields of what forward returns, else "output".
        sample: real inputs to compare on: .npz, .npy, a folder of images (with `preprocess`), or arrays; else made-up ones.
        preprocess: for images, as for `calibrate`; a mapping without `preset` changes what the recipe says.
        tolerance: largest accepted difference, relative to the largest output.
        verify: False skips the comparison (the result says so).

    Raises:
        UsageError, MissingDependency: a source, name, shape or option that can't be right; a package that isn't there.
        ModelError: the exporter fails (with the essential cause), or the opset can't express the model.
        ExportMismatch, OutputError: PyTorch and ONNX Runtime disagree, or the file can't be written; nothing is.
    """
    _refuse(request)
    reporter = request.reporter
    with contextlib.ExitStack() as stack:
        # In front of torch: a source that can't be right is refused before it is asked for.
        with reporter.phase("load the PyTorch model"):
            source = stack.enter_context(opened(request.source, request.weights, request.factory_arg))
        torch = require("torch", "torch", "export")
        target = request.opset or _opset(source.opset, "the recipe's opset")
        subject = _subject(torch, source, request)
        stack.enter_context(_evaluating(torch, source.module))
        with reporter.phase("run the PyTorch model"):
            names, left_out = _run(subject, source, request.output_names)
        with reporter.phase("export to ONNX"):
            model = _exported(subject, names, target)
        comparisons, said = list[ExportComparison](), list[str]()
        if request.verify:
            with reporter.phase("compare PyTorch with ONNX Runtime") as phase:
                comparisons, said = compared(subject, model, request.tolerance, phase.detail)
        save_model(model.proto, request.output)
    notes = [*source.notes, *left_out, *said]
    for text in notes:
        reporter.warn(text)
    if not request.verify:
        notes.append("not compared with PyTorch, as asked")
    elif subject.made_up:
        notes.append("compared on synthetic inputs: give a sample of real ones to be sure")
    return ExportResult(
        path=Path(request.output),
        source=source.text,
        weights=source.weights,
        opset=model.opset,
        inputs=model.inputs,
        outputs=model.outputs,
        verified=request.verify,
        sample=subject.sampled if request.verify else "none",
        comparisons=tuple(comparisons),
        notes=tuple(dict.fromkeys(notes)),
    )


def _refuse(request: ExportRequest) -> None:
    """Raise UsageError for what can't be right, whatever the model."""
    engines = (".engine", ".plan", ".trt")
    check_ending(request.output, engines, "an ONNX model", "an engine", ".onnx", "; trtopt build makes the engine")
    _opset(request.opset, "`opset=`")
    if not request.tolerance >= 0:
        raise UsageError(f"`tolerance=` is {request.tolerance}; a share of the largest output is needed, such as 0.001")
    if request.output_names is not None and not (request.output_names and all(request.output_names)):
        raise UsageError(f"`output_names=` is {list(request.output_names)}: give names, or leave it out")


def _opset(opset: int | None, what: str) -> int:
    if opset is not None and not 16 <= opset <= 23:
        raise UsageError(f"{what} is {opset}; allowed: 16 to 23 ({DEFAULT_OPSET} is read by every TensorRT)")
    return opset or DEFAULT_OPSET


# In PyTorch --------------------------------------------------------------------------------------------------------------


def _subject(torch: Any, source: Source, request: ExportRequest) -> Subject:
    """Return the module as a function of its inputs in order, with samples for them."""
    require("onnxscript", "torch", "export")
    infos, keywords = stated_inputs(source, request.inputs)
    preprocess, sample = request.preprocess, request.sample
    images = isinstance(sample, (str, os.PathLike)) and Path(sample).suffix not in ARRAYS
    if preprocess is not None and not images:
        what = "`sample=` gives none" if sample is None else "arrays in `sample=` are used as they are"
        raise UsageError(f"`preprocess=` is for images, and {what}: drop it")
    if isinstance(preprocess, Mapping):
        preprocess = Preprocess.load(preprocess, Preprocess.load(source.preprocess) if source.preprocess else None)
    arrays, sampled = samples_for(infos, sample, preprocess or source.preprocess, source.ranges)
    return Subject(torch, source.text, called(torch, source.module, keywords), infos, arrays, sampled)


def _run(subject: Subject, source: Source, wished: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Run the user's forward, whose faults show here, before the exporter hides them; return its outputs' names, and notes."""
    batch = subject.batch(subject.batch_sizes[-1])
    results: list[Any] = []
    hook = source.module.register_forward_hook(lambda _, __, result: results.append(result))
    try:
        subject(batch)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{info.name} {info.dtype} {list(batch[info.name].shape)}" for info in subject.infos)
        raise ModelError(
            f"{subject.text}: forward fails on {given}, {at(error)}{type(error).__name__}: {essence(error)}"
            f"{input_hint(error, subject)}"
        ) from error
    finally:
        hook.remove()
    values = list(leaves(results[-1]))
    tensors = [name for name, value in values if isinstance(value, subject.torch.Tensor)]
    if not tensors:
        raise ModelError(f"{subject.text}: forward returns {type(results[-1]).__name__}, which holds no tensor")
    notes = [
        f"the output {name} is {value if value is None else type(value).__name__}, no tensor: left out"
        for name, value in values
        if not isinstance(value, subject.torch.Tensor)
    ]
    inputs = [info.name for info in subject.infos]
    return output_names(tensors, source.outputs if wished is None else wished, inputs, subject.text), notes


def called(torch: Any, module: Any, keywords: tuple[str, ...]) -> Any:
    """A module around `module` that takes tensors by position only, the last ones as `keywords`, and gives a flat tuple.

    torch's exporter gets it instead: dataclasses, None and other values among the outputs, keyword-only arguments, and
    submodules named as attributes of its own graph ("meta") are all beyond it.
    """

    class Called(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            setattr(self, INNER, module)
            self.training = False

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            split = len(tensors) - len(keywords)
            result = module(*tensors[:split], **dict(zip(keywords, tensors[split:])))
            return tuple(value for _, value in leaves(result) if isinstance(value, torch.Tensor))

    return Called()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in a result, depth first, with names made of its keys, fields and places."""
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = list(zip(value._fields, value))
    elif isinstance(value, (list, tuple)):
        parts, name = [(str(place), item) for place, item in enumerate(value)], name or "output"
    else:
        yield name or "output", value
        return
    for key, item in parts:
        yield from leaves(item, f"{name}_{key}" if name else key)


def output_names(found: Sequence[str], wished: Sequence[str], inputs: Sequence[str], text: str) -> list[str]:
    """The file's names of its outputs: as wished, else as they are called in what forward returns."""
    if wished:
        if len({*wished, *inputs}) != len(found) + len(inputs) or len(wished) != len(found):
            raise UsageError(
                f"`output_names=` is {', '.join(wished)}; {text} gives {len(found)} output{'s' * (len(found) != 1)} "
                f"({', '.join(found)}), and each needs a name that neither another nor an input ({', '.join(inputs)}) has"
            )
        return list(wished)
    names: list[str] = []
    for name in found:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        fresh = (plain if number == 1 else f"{plain}_{number}" for number in range(1, len(found) + 3))
        names.append(next(item for item in fresh if item not in names and item not in inputs))
    return names


# In ONNX -----------------------------------------------------------------------------------------------------------------


def _exported(subject: Subject, names: Sequence[str], target: int) -> Model:
    """Export a module to an opset, its inputs and outputs named and open as they were asked for."""
    proto = _traced(subject, names, max(target, NATIVE_OPSET))
    try:
        model = load_model(proto)
    except ModelError as error:
        if newer := re.search(r"No Op registered for (\w+) with domain_version", str(error)):
            raise ModelError(
                f"{subject.text} uses {newer[1]}, which ONNX has from a newer opset on than {target}: {_NEWER.format(20)}; "
                "`trtopt check` then says whether TensorRT has it"
            ) from error
        raise ModelError(f"{subject.text} can't be exported: {error}{types_hint(subject, str(error))}") from error
    asked, made = ([info.name for info in infos] for infos in (subject.infos, model.inputs))
    if made != asked:
        raise ModelError(f"the exported model has the inputs {made}; wanted {asked}: an argument is unused")
    for info, held in zip(subject.infos, model.inputs):
        fixed = [name for name, size in zip(info.shape, held.shape) if isinstance(name, str) and isinstance(size, int)]
        if fixed:
            raise ModelError(
                f"the model fixes the dimension(s) {', '.join(fixed)} of {info.name} (exported as {list(held.shape)}); "
                "export with sizes in their place"
            )
    if model.opset <= target:
        return model
    try:
        return load_model(at_opset(model.proto, target, _NEWER.format(model.opset)))
    except ModelError:
        return load_model(_lowered(fold(model.proto)[0], target))  # folding turns computed axes into constants


def _traced(subject: Subject, names: Sequence[str], opset: int) -> ModelProto:
    """Return what torch's exporter writes of a module."""
    torch, infos = subject.torch, subject.infos
    # A traced size of 1 would be taken for a constant, so a dynamic batch is traced with two samples.
    size = subject.first if isinstance(subject.first, int) else max(2, subject.sizes[subject.first])
    shapes = tuple({axis: info.shape[axis] for axis in info.open_axes} or None for info in infos)
    # Names that nothing else has: torch's exporter doesn't see that a wished one is another value's.
    asked = {f"{INNER}_input_{place}": info.name for place, info in enumerate(infos)}
    given = {f"{INNER}_output_{place}": name for place, name in enumerate(names)}
    try:
        with traceable(torch, subject.module, subject.text), rewriting, compiler_folder, quiet(), torch.no_grad():
            export_again = functools.partial(
                torch.onnx.export,
                subject.module,
                subject.tensors(subject.batch(size)),
                input_names=list(asked),
                output_names=list(given),
                dynamic_shapes=(shapes,) if any(shapes) else None,
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
            program = _with_custom(torch, export_again)
            rename_values(program.model, {**asked, **given}, f"{INNER}.")
            proto: ModelProto = program.model_proto
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{subject.text} can't be exported{why(error, subject)} (torch: {essence(error, 1)})"
        ) from error
    return proto


def _with_custom(torch: Any, export_again: Callable[..., Any]) -> Any:
    """Export with a node for each custom operator, which the exporter names one after another."""
    table = dict[Any, Any]()
    while True:
        try:
            return export_again(custom_translation_table=table)
        except Exception as error:  # noqa: PERF203  (one more operator each time)
            found = custom_operator(torch, error)
            if found is None or found in table:
                raise
            table[found] = translation(found)


def _lowered(proto: ModelProto, target: int) -> ModelProto:
    """Return the model at an older opset; operators that it lacks are written out where ONNX defines them by others."""
    try:
        return at_opset(proto, target, _NEWER.format(opset_version(proto)))
    except UnsupportedOperator as error:
        parts = written_out(proto, error.issues)
        if parts is None:
            reasons = " ".join(issue.reason for issue in error.issues)
            newest = max(opset_version(proto), *map(int, re.findall(r"came with opset (\d+)", reasons)), 0)
            raise UnsupportedOperator(error.problem, error.issues, _NEWER.format(newest), error.words) from error
    return _lowered(parts, target)


@contextlib.contextmanager
def _evaluating(torch: Any, module: Any) -> Iterator[None]:
    """Eval mode for the time of the export, every submodule's own mode afterwards; and a bounded number of threads, since
    PyTorch's default is one per core, whatever the container allows.

    Without the fused attention that torch.nn.TransformerEncoderLayer takes in eval mode, which gives zeros for padding.
    """
    fused, threads = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        stack.callback(torch.set_num_threads, threads)
        for item in module.modules():
            stack.callback(setattr, item, "training", item.training)
        with contextlib.suppress(NotImplementedError):  # torch.export's own modules keep the mode of their making
            module.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_num_threads(min(threads, THREADS))
        yield
