"""The sources of quantization noise: for each tensor and each weight, what quantizing it alone does to the outputs.

`trtopt.calibration.noise` measures it. Noise of different places hardly correlates, so that the powers add up to what the whole
Q/DQ graph loses; that is measured too, to check them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtopt.autotune.request import SensitivityRequest
from trtopt.calibration.calibrator import calibrated_for
from trtopt.calibration.importing import kept_out
from trtopt.calibration.noise import Measured, NoiseLedger, snr_db
from trtopt.calibration.prepared import prepare
from trtopt.calibration.table import Table
from trtopt.core.documents import plain
from trtopt.core.host import cores
from trtopt.core.options import taking
from trtopt.core.values import Override, Precision
from trtopt.core.words import first_of
from trtopt.data import open_data, samples_of
from trtopt.graph.io import load_model
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import find_points
from trtopt.graph.passes.quantize import FORMATS, check_scales
from trtopt.graph.passes.smooth import smoothed
from trtopt.graph.passes.typed import overflowing
from trtopt.graph.prepare import taken
from trtopt.graph.proto import tensor_size
from trtopt.graph.view import to_ir, to_proto
from trtopt.graph.work import macs, sizes_in

MOST = 2 / 3  # of the noise: what makes as much decides what helps
BETTER = 0.5  # of a scale's noise: where another makes less, it is wrong


@dataclass(frozen=True)
class NoiseSource:
    """One quantized tensor or weight, and what it alone does.

    Attributes:
        kind: "activation", or "weight".
        name: of the tensor.
        nodes: that read it quantized.
        noise: output → its noise power as a share of the signal's, at that output.
        macs: share of the model's multiply-accumulates that these nodes do; 0 of all where the sizes of some aren't known.
        nbytes: of a weight, in FP32; 0 for an activation.
        scale: of an activation that makes a twentieth of the noise or more and has a scale of its own: "clips" where twice the
            scale makes less than half of its noise at the output that the ranking goes by, "too wide" where half the scale
            does, else "right"; "": not tried.
    """

    kind: str
    name: str
    nodes: tuple[str, ...]
    noise: Mapping[str, float]
    macs: float
    nbytes: int = 0
    scale: str = ""

    @property
    def what(self) -> str:
        return f"weights of {self.nodes[0]}" if self.kind == "weight" else self.name


@dataclass(frozen=True)
class Sensitivity:
    """The noise at a model's outputs by each place where it is quantized, the worst first.

    Attributes:
        output: the one that the ranking goes by: the one with most noise.
        predicted, measured: output → the sum of the sources' noise; the noise of the whole Q/DQ graph.
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
        """Return the share of the summed noise at `output`."""
        whole = self.predicted[self.output]
        return source.noise[self.output] / whole if whole else 0.0

    @property
    def weights(self) -> float:
        """The share of the summed noise that the weights make."""
        return sum(self.share(source) for source in self.sources if source.kind == "weight")

    @property
    def summary(self) -> str:
        """Rank the sources of the noise in words, and suggest what helps."""
        if not self.predicted[self.output]:
            return "quantizing it changes nothing on these samples"
        worst = self.sources[0]
        parts = f"weights make {self.weights:.0%} of the noise, activations {1 - self.weights:.0%}"
        first = f"{worst.what} {'make' if worst.kind == 'weight' else 'makes'} {self.share(worst):.0%}"
        wrong = [source for source in self.sources if source.scale in _WRONG]
        scales = ", ".join(f"the scale of {source.what} {_WRONG[source.scale]}" for source in wrong[:2])
        scales += f", and {len(wrong) - 2} more" * (len(wrong) > 2)
        if self.weights >= MOST:
            advice = (
                "calibration isn't to blame: other samples or another method won't help much; `repair=True` of calibrate, or "
                "tune, may"
            )
        elif sum(map(self.share, wrong)) >= (1 - self.weights) / 2:
            advice = f"{scales}: other samples or another method may help"
        else:
            right = [source for source in self.sources if source.scale == "right"]
            enough = sum(map(self.share, [*right, *wrong])) >= (1 - self.weights) / 2
            few = "neither half nor twice the scale does better" if enough else "many places make a little of it each"
            rest = f"{scales}; for the rest " if scales else ""
            advice = f"{rest}{few}: `repair=True` of calibrate, or tune, may help"
        return f"{parts}; {first} alone; {advice}"

    def to_json(self) -> dict[str, Any]:
        rows = [{**vars(item), "snr_db": _decibels(item.noise), "share": self.share(item)} for item in self.sources]
        for row in rows:
            del row["noise"]
        known = {name: getattr(self, name) for name in ("model", "samples", "output", "summary")}
        decibels = {f"{name}_snr_db": _decibels(getattr(self, name)) for name in ("predicted", "measured")}
        return {**known, **decibels, "weights_share": self.weights, "sources": rows, "left_out": dict(self.left_out)}


_WRONG = {"clips": "clips", "too wide": "is too wide"}


def _decibels(noise: Mapping[str, float]) -> dict[str, Any]:
    return {name: plain(snr_db(value)) for name, value in noise.items()}


@taking(SensitivityRequest)
def sensitivity(request: SensitivityRequest) -> Sensitivity:
    """Measure what quantizing each tensor and each weight to INT8 does to a model's outputs, in ONNX Runtime on the CPU.

    The result doesn't depend on the number of threads or on how samples are batched.

    Args:
        model: an FP32 ONNX file or model. It is folded first, as `build` folds it.
        calib: scales of activations, from `calibrate`; None: measured on all of the images or data.
        samples: that noise is measured on, chosen by content. Their number decides how long it takes: half a pass over them
            for each tensor and weight, and two more for a tensor that makes much, whose scale is tried at half and twice.

    Raises:
        UsageError, DataError: arguments or data that can't be right.
        CalibrationError: as `calibrate`; or the table is of another model.
        ModelError: the model can't be run in parts, or none of its outputs is floating and of the same shape each time.
        MissingDependency: ONNX Runtime isn't installed.
    """
    reporter = request.reporter
    overrides = tuple(map(Override.parse, request.precision_override))
    model = load_model(request.model)
    limit = min(request.samples, request.limit or request.samples)
    batches = open_data(model.inputs, **{**samples_of(request), "limit": limit})
    if request.calib is None:
        table = calibrated_for(request, model).table
    else:
        table = Table.load(request.calib)
        table = table.with_method(request.method) if request.method not in ("auto", table.method) else table
    ready = prepare(model, overrides, samples=batches, reporter=reporter)
    if table.model["fingerprint"] != ready.fingerprint:
        reporter.warn("the calibration table was made for another model, or for other weights: calibrate this one")
    folded = smoothed(to_proto(to_ir_at(ready.proto, FORMATS[Precision.INT8].opset)), table.smoothed)
    ir_model = to_ir(folded)
    in_fp32 = overflowing(ir_model, table.beyond_fp16)  # by what they hold, in a build
    points = find_points(ir_model, overrides=(*overrides, *kept_out({**in_fp32, **table.left_out})), gates=table.gates)
    beyond = [f"{node} ({in_fp32[node]})" for node in find_points(ir_model).quantized if node in in_fp32]
    if beyond:
        reporter.note(f"left out, as a build keeps them in FP32: {first_of(beyond)}")
    check_scales(points, table.amax)
    ledger = NoiseLedger(folded, points, table.amax, request.threads or cores())
    whole = ledger.quantized(table.repairs)
    ledger.read(batches, taken(model).proto)
    sizes = sizes_in(ledger.proto, {name: array.shape for name, array in ledger.samples[0].of.feed.items()})
    work = macs(ledger.proto, sizes)
    with reporter.phase("measuring noise", len(points.activations) + len(points.weights)) as phase:
        noise = list(ledger.measured(table.repairs, phase.advance))
    whole_noise = ledger.of_whole(whole)
    return _result(ready.name, ledger, noise, whole_noise, work)


def _result(
    model: str, ledger: NoiseLedger, noise: Sequence[Measured], whole_noise: dict[str, float], counts: Mapping[str, int]
) -> Sensitivity:
    points = ledger.points
    if any(weight.node not in counts for weight in points.weights):
        counts = {}
    total = sum(counts.values()) or 1
    output = max(whole_noise, key=lambda name: whole_noise[name])
    readers = {name: tuple(dict.fromkeys(node for node, _ in slots)) for name, slots in points.reads.items()}
    sizes = {tensor.name: tensor_size(tensor) for tensor in ledger.proto.graph.initializer}
    sources = []
    for place, noise_here, others in noise:
        kind, name = ("activation", place) if isinstance(place, str) else ("weight", place.name)
        nodes = readers[place] if isinstance(place, str) else (place.node,)
        share = sum(counts.get(node, 0) for node in nodes) / total
        measurable = {item: noise_here[item] for item in whole_noise}
        scale = _judged(noise_here[output], {factor: other[output] for factor, other in others.items()})
        nbytes = sizes.get(name, 0) if kind == "weight" else 0
        sources.append(NoiseSource(kind, name, nodes, measurable, share, nbytes, scale))
    sources.sort(key=lambda source: -source.noise[output])
    predicted = {name: sum(source.noise[name] for source in sources) for name in whole_noise}
    count = sum(sample.of.real for sample in ledger.samples)
    return Sensitivity(model, count, output, tuple(sources), predicted, whole_noise, dict(ledger.left_out))


def _judged(noise: float, others: Mapping[float, float]) -> str:
    """`NoiseSource.scale`, by the noise that the scale makes, and others: factor on it → noise."""
    if not others:
        return ""
    factor = min(others, key=lambda factor: others[factor])
    if others[factor] >= BETTER * noise:
        return "right"
    return "clips" if factor > 1 else "too wide"
