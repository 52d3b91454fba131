"""Measure an engine as a whole, beside what else can run its model (`bench`), and layer by layer (`profile`).

print(trtopt.profile("resnet50.engine", batch=(32,)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from trtopt.core.documents import plain
from trtopt.core.errors import DeviceError, UsageError, require
from trtopt.core.files import existing_file
from trtopt.core.options import taking
from trtopt.core.values import choice
from trtopt.cuda.device import probe
from trtopt.diagnosis.request import ProfileRequest
from trtopt.evaluation.benchmark import BenchReport, aligned, inputs_for, measure
from trtopt.evaluation.request import BenchRequest
from trtopt.runtime.request import opening_options
from trtopt.runtime.session import BACKENDS, Session
from trtopt.runtime.timing import LayerTime, LayerTimes


@taking(BenchRequest)
def bench(request: BenchRequest) -> BenchReport:
    """Measure an engine, and what else can run the model, on the same inputs.

    Args:
        engine: a plan file.
        against: of "torch", "onnxruntime"; all are opened before anything is measured.
        batch: samples at a time; empty: what each profile is tuned for.
        streams: threads that call at the same time, for the throughput.
        iterations, warmup: calls of each kind; fewer where one way of running would take more than ten seconds.
        data, images, preprocess: real inputs, as for `calibrate`; without, synthetic ones, which say how fast it is and
            nothing else. Without `preprocess`, images are prepared as the manifest says;
            a mapping without `preset` changes that.
        model: the ONNX model for ONNX Runtime; default: the one that the manifest names.
        source: where PyTorch's module comes from, as for `export`.
        trust, trust_host_code: as for `Session`.
        report: where to write a page on the engine, of this and its manifest (see `trtopt.report`).

    Raises:
        UsageError: arguments that can't be right, or a batch outside the engine's shapes.
        MissingDependency: something in `against` isn't installed.
        DeviceError: no GPU, or PyTorch can't use it.
        OutputError: the page can't be written.
        ModelError: a baseline can't load the model. One that can't run it has a row that says so.
    """
    if request.report is not None:
        require("onnx_ir", "onnx", "a page on the engine")
        from trtopt.diagnosis import report as reports  # engines are measured without onnx, too

        reports.ready()
    result = measure(request)
    if request.report is not None:
        reports.report(request.engine, request.report, results=[result], reporter=request.reporter)
        request.reporter.note(f"{request.report} says what is known of the engine")
    return result


# Layers -----------------------------------------------------------------------------------------------------------------

_COLUMNS = ("batch", "ms", "share", "precision", "kind", "layer")


@dataclass(frozen=True)
class EngineProfile:
    """The times that `profile` found.

    Attributes:
        gpu: its name; inputs: where they came from.
        batches: batch size → its layers, in the order that they run in.
    """

    engine: Path
    gpu: str
    inputs: str
    batches: Mapping[int, LayerTimes]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            **plain(self),
            "batches": [
                {"batch": size, "total_ms": item.total_ms, **plain(item)} for size, item in self.batches.items()
            ],
        }

    def table(self, top: int = 0) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows, as text: of each batch the layers that take longest first, `top` of them; 0: all."""
        rows: list[tuple[str, ...]] = []
        for size, times in self.batches.items():
            slowest = sorted(times.layers, key=lambda layer: -layer.ms)
            for layer in slowest[: top or None]:
                share = f"{layer.ms / (times.total_ms or 1):.1%}"
                precision = layer.precision.upper() if layer.precision else "-"
                rows.append((str(size), f"{layer.ms:.4f}", share, precision, layer.kind, called(layer)))
        return _COLUMNS, rows

    def remarks(self, top: int = 0) -> list[str]:
        lines = []
        for size, times in self.batches.items():
            by = _by_precision(times)
            parts = ", ".join(f"{name} {ms / (times.total_ms or 1):.0%}" for name, ms in by.items())
            lines.append(
                f"batch {size}: {len(times.layers)} layers take {times.total_ms:.4f} ms one by one ({parts}); the whole "
                f"inference takes {times.gpu.median:.4f} ms"
            )
            if top and len(times.layers) > top:
                rest = sum(sorted(layer.ms for layer in times.layers)[:-top])
                lines.append(
                    f"batch {size}: {len(times.layers) - top} more layers take {rest:.4f} ms (`top=0` lists them)"
                )
        lines.append(f"{self.gpu}; inputs: {self.inputs}")
        return lines + [f"note: {text}" for text in self.notes]

    def __str__(self) -> str:
        return "\n".join([*aligned(*self.table()), *self.remarks()])


def called(layer: LayerTime, length: int = 60) -> str:
    """The ONNX nodes of a layer, or its own name where TensorRT doesn't tell them; at most `length` characters."""
    name = " + ".join(layer.nodes) or layer.name
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _by_precision(times: LayerTimes) -> dict[str, float]:
    milliseconds: dict[str, float] = {}
    for layer in times.layers:
        name = layer.precision.upper() if layer.precision else "not known"
        milliseconds[name] = milliseconds.get(name, 0.0) + layer.ms
    return dict(sorted(milliseconds.items(), key=lambda item: -item[1]))


@taking(ProfileRequest)
def profile(request: ProfileRequest) -> EngineProfile:
    """Time each layer of an engine on this machine's GPU, by TensorRT's own profiler.

    With a profiler layers run one by one, so that they add up to more than the whole inference, which is measured beside them.

    Args:
        engine: a plan file; what its manifest says of the layers stands beside their times.
        batch: samples at a time; empty: what each optimization profile is tuned for.
        iterations, warmup: inferences that are timed (each layer's median counts), and those before.
        data, images, preprocess: real inputs, as for `bench`; without, synthetic ones, which take as long in most networks.
        top: layers of each batch that the command prints; 0: all.
        trust, trust_host_code: as for `Session`.

    Raises:
        UsageError: arguments that can't be right, or a batch outside the engine's shapes.
        DeviceError: there is no GPU.
        EngineError, EngineMismatch, NoBackend, MissingDependency: as `Session`.
    """
    choice(request.backend, BACKENDS, "`backend=`")
    if len(set(request.batch)) != len(request.batch):
        raise UsageError("`batch=` names a size twice")
    path = existing_file(request.engine, "the engine")
    if path.suffix == ".onnx":
        raise UsageError(
            f"{path} is an ONNX model; layers are those of an engine: trtopt build {quote(str(path))} … makes one"
        )
    if request.backend == "onnxruntime" or not (gpus := probe()):
        why = "`backend='onnxruntime'` runs on the CPU" if request.backend == "onnxruntime" else gpus.reason
        raise DeviceError(
            f"timing the layers of {path.name} needs an NVIDIA GPU: {why}; without one, "
            f"trtopt inspect {quote(str(path))} --layers tells each one's precision, formats and kernel"
        )
    with Session(path, contexts=1, **opening_options(request)) as session:
        inputs, origin = inputs_for(session, request)
        batches: dict[int, LayerTimes] = {}
        for size, arrays in inputs.items():
            with request.reporter.phase(f"timing layers, batch {size}"):
                batches[size] = session.profile(arrays, request.iterations, request.warmup)
        notes = list(session.notes)
        if session.manifest is None:
            notes.append("without a manifest, neither precisions nor nodes of the layers are known")
    gpu = next((str(item) for item in gpus.devices if item.ordinal == request.device), "")
    return EngineProfile(path, gpu, origin, batches, tuple(notes))
