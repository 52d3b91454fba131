"""Where quantization noise comes from: for each tensor and each weight, what quantizing it alone does to the outputs.

The graph is cut behind every tensor that INT8 quantizes. One pass keeps what floating point gives; then each tensor is rounded
by itself, where its quantized readers read it, and only what comes behind it runs again. Noise of different places hardly
correlates, so that the powers add up to what the whole Q/DQ graph loses; that is measured too, to check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.autotune.request import SensitivityRequest
from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.prepared import refuse_quantized
from trtopt.calibration.table import Table
from trtopt.core.documents import plain
from trtopt.core.errors import ModelError, UsageError
from trtopt.core.host import cores
from trtopt.core.options import taking
from trtopt.core.values import Override, Precision, check_overrides
from trtopt.data import Batches, open_data
from trtopt.data.convert import converted
from trtopt.data.rebatch import chunks
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import Points, Weight, find_points
from trtopt.graph.passes.quantize import LARGEST, OPSET, insert_qdq, quantize_weight, round_scale, weight_scales
from trtopt.graph.proto import tensor_info, tensor_size, to_array, whole_copy
from trtopt.graph.segments import Segment, Slot, divided
from trtopt.graph.view import to_ir, to_proto
from trtopt.graph.work import macs
from trtopt.ort.sessions import open_session

Arrays = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]
MOST = 2 / 3  # of the noise: what makes as much decides what helps
_PURPOSE = "measuring sensitivity"


@dataclass(frozen=True)
class NoiseSource:
    """One quantized tensor or weight, and what it alone does.

    Attributes:
        kind: "activation", or "weight".
        name: of the tensor.
        nodes: that read it quantized.
        noise: output → its noise power as a share of the signal's, at that output.
        macs: share of the model's multiply-accumulates that these nodes do.
        nbytes: of a weight, in FP32; 0 for an activation.
    """

    kind: str
    name: str
    nodes: tuple[str, ...]
    noise: Mapping[str, float]
    macs: float
    nbytes: int = 0

    @property
    def what(self) -> str:
        return f"weights of {self.nodes[0]}" if self.kind == "weight" else self.name


@dataclass(frozen=True)
class Sensitivity:
    """What each place where a model is quantized does to its outputs.

    Attributes:
        model: its name.
        samples: that it was measured on.
        output: the one that the ranking goes by: the one with most noise.
        sources: of the noise, the worst first.
        predicted: output → the sum of the sources' noise.
        measured: output → the noise of the whole Q/DQ graph.
        left_out: outputs in which noise has no measure, and why.
    """

    model: str
    samples: int
    output: str
    sources: tuple[NoiseSource, ...]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def share(self, source: NoiseSource) -> float:
        """Of the summed noise at `output`."""
        whole = self.predicted[self.output]
        return source.noise[self.output] / whole if whole else 0.0

    @property
    def weights(self) -> float:
        """The share of the summed noise that the weights make."""
        return sum(self.share(source) for source in self.sources if source.kind == "weight")

    @property
    def summary(self) -> str:
        """Who makes the noise, and what follows from that."""
        if not self.predicted[self.output]:
            return "quantizing it changes nothing on these samples"
        worst = self.sources[0]
        parts = f"weights make {self.weights:.0%} of the noise, activations {1 - self.weights:.0%}"
        first = f"{worst.what} {'make' if worst.kind == 'weight' else 'makes'} {self.share(worst):.0%}"
        if self.weights >= MOST:
            advice = "calibration isn't to blame: other samples or another method won't help much"
        elif self.weights <= 1 - MOST:
            advice = "scales of activations decide: more samples or another method may help"
        else:
            advice = "both matter"
        return f"{parts}; {first} alone; {advice}"

    def to_json(self) -> dict[str, Any]:
        rows = [
            {**asdict(source), "noise": None, "snr_db": _decibels(source.noise), "share": self.share(source)}
            for source in self.sources
        ]
        for row in rows:
            del row["noise"]
        return {
            "model": self.model,
            "samples": self.samples,
            "output": self.output,
            "predicted_snr_db": _decibels(self.predicted),
            "measured_snr_db": _decibels(self.measured),
            "weights_share": self.weights,
            "summary": self.summary,
            "sources": rows,
            "left_out": dict(self.left_out),
        }


def snr_db(noise: float) -> float:
    """dB of a noise power that is a share of the signal's; inf where there is none."""
    return math.inf if noise <= 0 else -10 * math.log10(noise)


def _decibels(noise: Mapping[str, float]) -> dict[str, Any]:
    return {name: plain(snr_db(value)) for name, value in noise.items()}


@taking(SensitivityRequest)
def sensitivity(request: SensitivityRequest) -> Sensitivity:
    """Measure what quantizing each tensor and each weight to INT8 does to a model's outputs, in ONNX Runtime on the CPU.

    The result doesn't depend on the number of threads or on how samples are batched.

    Args:
        model: an FP32 ONNX file or model. It is folded first, as `build` folds it.
        images, data: real inputs; see `calibrate`.
        calib: scales of activations, from `calibrate`; None: measured on all of the images or data.
        preprocess, method, precision_override: as for `calibrate`.
        samples: that noise is measured on, chosen by content. Their number decides how long it takes: half a pass over them
            for each tensor and weight.
        threads: samples run at the same time; None: one per core.
        top: how many rows the command prints; not used here.

    Raises:
        UsageError, DataError: arguments or data that can't be right.
        CalibrationError: as `calibrate`; or the table is of another model.
        ModelError: the model can't be run in parts, or none of its outputs is floating.
        MissingDependency: ONNX Runtime isn't installed.
    """
    reporter = request.reporter
    for name in ("samples", "threads"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UsageError(f"`{name}=` is {value}; at least 1 is needed")
    overrides = tuple(map(Override.parse, request.precision_override))
    model = load_model(request.model)
    refuse_quantized(model)
    source: dict[str, Any] = {"images": request.images, "data": request.data, "preprocess": request.preprocess}
    batches = open_data(model.inputs, **source, limit=request.samples)
    if request.calib is None:
        table = calibrate(
            model.path or model.proto,
            **source,
            method=request.method,
            precision_override=request.precision_override,
            threads=request.threads,
            reporter=reporter,
        ).table
    else:
        table = request.calib if isinstance(request.calib, Table) else Table.load(request.calib)
        table = table.with_method(request.method) if request.method not in ("auto", table.method) else table
    folded, report = fold(model.proto, reporter=reporter)
    folded = to_proto(to_ir_at(folded, OPSET[Precision.INT8]))
    if table.model["fingerprint"] != report.fingerprint:
        reporter.warn("the calibration table was made for another model, or for other weights: calibrate this one")
    check_overrides(overrides, folded.graph.node)
    points = find_points(to_ir(folded), overrides=overrides)
    amax = {name: entry.amax for name, entry in table.tensors.items()}
    whole = insert_qdq(to_ir(whole_copy(folded)), points, amax).model  # refuses a table of another model
    ledger = _Ledger(folded, points, amax, request.threads or cores())
    ledger.read(batches)
    with reporter.phase("measuring noise", len(points.activations) + len(points.weights)) as phase:
        noise = dict(ledger.measured(phase.advance))
    measured = ledger.of_whole(to_proto(whole))
    return _result(model.path.name if model.path else model.proto.graph.name, ledger, noise, measured)


@dataclass
class _Sample:
    """What is known of one run: tensors that later segments read, and the outputs of floating point.

    Attributes:
        real: samples of a fixed batch that aren't filled in.
    """

    feed: Arrays
    real: int
    values: dict[str, NDArray[Any]]
    expected: dict[str, NDArray[Any]] = field(default_factory=dict)


class _Ledger:
    """Runs the parts of a model. Each sample runs on one thread by itself, so that sums don't depend on how many there are."""

    def __init__(self, proto: ModelProto, points: Points, amax: Mapping[str, float], threads: int) -> None:
        self.proto, self.points, self.threads = proto, points, threads
        self.scales = {
            name: round_scale(np.asarray(amax[name] / LARGEST[points.precision]), Precision.FP32)
            for name in points.reads
        }
        self.outputs = [value.name for value in proto.graph.output]
        self.left_out: dict[str, str] = {}
        self.samples: list[_Sample] = []
        # A tensor has a second name where it is read quantized; both are the same until it is rounded.
        self.aliases = {f"{name}/quantized": name for name in points.reads}
        slots: dict[Slot, str] = {
            slot: f"{name}/quantized" for name, readers in points.reads.items() for slot in readers
        }
        self.segments = divided(proto, points.activations, slots)
        self.sessions = [_opened(segment.proto) for segment in self.segments]
        made_in = {name: number for number, segment in enumerate(self.segments) for name in segment.outputs}
        self.starts = {name: made_in.get(name, -1) + 1 for name in points.activations}
        node_in = {node.name: number for number, item in enumerate(self.segments) for node in item.proto.graph.node}
        self.holders = [(weight, node_in[weight.node]) for weight in points.weights]
        last = {name: number for number, segment in enumerate(self.segments) for name in segment.inputs}
        for alias, name in self.aliases.items():
            last[name] = max(last.get(name, -1), last[alias])
        self.dead: list[list[str]] = [[] for _ in self.segments]
        for name, number in last.items():
            if name not in self.outputs:
                self.dead[number].append(name)

    def read(self, batches: Batches) -> None:
        """Run all samples in floating point."""
        inputs = {info.name: info for info in map(tensor_info, self.proto.graph.input)}
        fixed = {info.shape[0] for info in inputs.values() if info.shape}
        size = next((size for size in fixed if isinstance(size, int) and size > 0), None) if len(fixed) == 1 else None
        for batch in batches:
            arrays = {name: converted(batch[name], info.dtype, f"the input {name!r}") for name, info in inputs.items()}
            self.samples += [_Sample(feed, real, dict(feed)) for feed, real in chunks(arrays, size or 1, size or 1)]

        def run(sample: _Sample) -> None:
            sample.expected = self.run(sample.values, 0)

        self._each(run)
        for name in self.outputs:
            found = self.samples[0].expected[name]
            if found.dtype.kind != "f":
                self.left_out[name] = f"its type is {found.dtype}"
        if len(self.left_out) == len(self.outputs):
            raise ModelError(f"no output is floating, so noise has no measure there: {', '.join(self.left_out)}")

    def measured(self, advance: Callable[[], None]) -> Iterator[tuple[Any, dict[str, float]]]:
        """The noise at each output of each activation (by its name) and weight, in the order of the graph."""
        for number, segment in enumerate(self.segments):
            for name in (name for name, start in self.starts.items() if start == number):
                yield name, self._noise(partial(self._with_activation, name))
                advance()
            for weight in (weight for weight, holder in self.holders if holder == number):
                session = _opened(self._with_rounded(segment, weight))
                yield weight, self._noise(partial(self._with_weight, number, session))
                advance()
            self._each(partial(self._step_on, number))

    def of_whole(self, proto: ModelProto) -> dict[str, float]:
        """The noise at each output of a model that takes the same samples."""
        session = open_session(proto, threads=1, optimize=False, memory_pattern=False, purpose=_PURPOSE)
        return self._noise(lambda sample: dict(zip(self.outputs, session.run(self.outputs, dict(sample.feed)))))

    def run(self, values: Arrays, first: int, session: Any = None) -> dict[str, NDArray[Any]]:
        """The outputs, from the tensors that are there before the segment `first`; `session` stands in for that one."""
        held = dict(values)
        for number in range(first, len(self.segments)):
            self._step(held, number, session if session is not None and number == first else self.sessions[number])
        return {name: held[name] for name in self.outputs}

    def _step(self, values: dict[str, NDArray[Any]], number: int, session: Any) -> None:
        segment = self.segments[number]
        feed = {name: values[name] if name in values else values[self.aliases[name]] for name in segment.inputs}
        values.update(zip(segment.outputs, session.run(segment.outputs, feed)))
        for name in self.dead[number]:
            values.pop(name, None)

    def _step_on(self, number: int, sample: _Sample) -> None:
        self._step(sample.values, number, self.sessions[number])

    def _with_activation(self, name: str, sample: _Sample) -> dict[str, NDArray[Any]]:
        """The outputs where one activation is rounded for those that read it quantized."""
        rounded = {f"{name}/quantized": _through_int8(sample.values[name], self.scales[name])}
        return self.run({**sample.values, **rounded}, self.starts[name])

    def _with_weight(self, number: int, session: Any, sample: _Sample) -> dict[str, NDArray[Any]]:
        return self.run(sample.values, number, session)

    def _with_rounded(self, segment: Segment, weight: Weight) -> ModelProto:
        tensor = next(tensor for tensor in self.proto.graph.initializer if tensor.name == weight.name)
        content = np.asarray(to_array(tensor), np.float32)
        precision = self.points.precision
        scale = round_scale(weight_scales(content, weight.axis, precision), Precision.FP32)
        shape = [1] * content.ndim
        if weight.axis is not None:
            shape[weight.axis] = -1
        codes = quantize_weight(content, scale, weight.axis, precision)
        return segment.with_weight((weight.node, weight.slot), codes.astype(np.float32) * scale.reshape(shape))

    def _noise(self, outputs: Callable[[_Sample], Mapping[str, NDArray[Any]]]) -> dict[str, float]:
        """Noise power of what `outputs` gives, over all samples, as a share of the signal's."""
        names = [name for name in self.outputs if name not in self.left_out]

        def powers(sample: _Sample) -> Floats:
            found = outputs(sample)
            return np.array([self._powers(name, sample, found[name]) for name in names])

        sums = np.sum(self._each(powers), axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(sums[:, 0] > 0, sums[:, 1] / sums[:, 0], np.where(sums[:, 1] > 0, np.inf, 0.0))
        return dict(zip(names, map(float, shares)))

    def _powers(self, name: str, sample: _Sample, found: NDArray[Any]) -> tuple[float, float]:
        """Of the signal and of the noise."""
        expected = sample.expected[name]
        if expected.shape != found.shape:
            self.left_out[name] = "its shape depends on the values"
            return 0.0, 0.0
        if expected.ndim and len(expected) == len(
            next(iter(sample.feed.values()))
        ):  # else it isn't samples x something
            expected, found = expected[: sample.real], found[: sample.real]
        signal = expected.astype(np.float64)
        return float((signal**2).sum()), float(((found - signal) ** 2).sum())

    def _each(self, work: Callable[[_Sample], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.threads, thread_name_prefix="trtopt-sensitivity") as pool:
            return list(pool.map(work, self.samples))


def _opened(proto: ModelProto) -> Any:
    return open_session(proto, threads=1, memory_pattern=False, purpose=_PURPOSE)


def _through_int8(values: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """What QuantizeLinear and DequantizeLinear make of values, rounding ties to even and saturating."""
    rounded = values / scale
    np.rint(rounded, out=rounded)
    np.clip(rounded, -128, 127, out=rounded)
    rounded *= scale
    return rounded


def _result(
    model: str, ledger: _Ledger, noise: Mapping[Any, Mapping[str, float]], measured: dict[str, float]
) -> Sensitivity:
    points, counts = ledger.points, macs(ledger.proto)
    total = sum(counts.values()) or 1
    left_out = ledger.left_out
    readers = {name: tuple(dict.fromkeys(node for node, _ in slots)) for name, slots in points.reads.items()}
    sizes = {tensor.name: tensor_size(tensor) for tensor in ledger.proto.graph.initializer}
    sources = []
    for place, found in noise.items():
        nodes = readers[place] if isinstance(place, str) else (place.node,)
        share = sum(counts.get(node, 0) for node in nodes) / total
        kept = {name: value for name, value in found.items() if name not in left_out}
        if isinstance(place, str):
            sources.append(NoiseSource("activation", place, nodes, kept, share))
        else:
            sources.append(NoiseSource("weight", place.name, nodes, kept, share, sizes.get(place.name, 0)))
    measured = {name: value for name, value in measured.items() if name not in left_out}
    if not measured:
        raise ModelError(
            "noise has no measure at any output: " + "; ".join(f"{key} {why}" for key, why in left_out.items())
        )
    output = max(measured, key=lambda name: measured[name])
    sources.sort(key=lambda source: -source.noise[output])
    predicted = {name: sum(source.noise[name] for source in sources) for name in measured}
    count = sum(sample.real for sample in ledger.samples)
    return Sensitivity(model, count, output, tuple(sources), predicted, measured, dict(left_out))
