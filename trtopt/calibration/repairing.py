"""Weights rounded otherwise than to the nearest code: tried one by one, and kept where it helps.

Half of the samples give the covariances that the rounding goes by, the other half judge: at the network's outputs, each weight
alone, and all together in the real Q/DQ graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from trtopt.calibration.noise import PURPOSE, NoiseLedger, Sample, snr_db
from trtopt.calibration.prepared import Prepared
from trtopt.calibration.quality import checksum
from trtopt.calibration.rounding import Moments, moments, rounded, unsupported
from trtopt.calibration.table import Table
from trtopt.core.documents import plain
from trtopt.core.progress import SILENT, Phase, Reporter
from trtopt.core.values import Override, Precision
from trtopt.core.words import first_of, grouped
from trtopt.data import Batches
from trtopt.data.convert import single_runs
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import Points, Weight, find_points
from trtopt.graph.passes.quantize import FORMATS
from trtopt.graph.passes.repair import BIAS, Repair
from trtopt.graph.passes.smooth import factors_for, smoothable, smoothed
from trtopt.graph.proto import in_memory, to_array
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.sessions import open_session, run_session

SAMPLES = 24  # in all
WORTH_SMOOTHING = 0.3  # of the noise, at least, that activations make which can be smoothed
STRENGTHS = (0.7, 0.85)  # of smoothing, that are tried
WORSE = 1.12  # 0.5 dB: less than that, on so few samples, may be chance


@dataclass(frozen=True)
class NoiseByPlace:
    """The noise that each place makes alone, as a share of the signal's power at the output where that is most.

    Attributes:
        activations: by tensor.
        weights: by the node that multiplies with them, as it is repaired.
    """

    activations: Mapping[str, float]
    weights: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.activations.values()) + sum(self.weights.values())


@dataclass(frozen=True)
class Repairs:
    """The weights that were changed.

    Attributes:
        nodes: name → what is changed.
        tried: how many weights were rounded.
        left: node name → why its weights weren't.
        before, after: noise at the worst output, in the Q/DQ graph, on the samples that judge.
        output: that one.
        samples: that judged.
        noise: what is left of it, place by place.
    """

    nodes: Mapping[str, Repair]
    tried: int
    left: Mapping[str, str]
    before: float
    after: float
    output: str
    samples: int
    noise: NoiseByPlace

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "kept": list(self.nodes),
            "tried": self.tried,
            "left": dict(self.left),
            "output": self.output,
            "samples": self.samples,
            "snr_db": [plain(snr_db(self.before)), plain(snr_db(self.after))],
        }

    def __str__(self) -> str:
        old, new = snr_db(self.before), snr_db(self.after)
        count = f"{len(self.nodes)} of {self.tried + len(self.left)} weights rounded otherwise than to the nearest code"
        reasons = grouped((why, node) for node, why in self.left.items())
        note = "".join(f"; not tried: {first_of(nodes)} ({why})" for why, nodes in reasons.items())
        return f"{count}: {self.output} {old:.1f} → {new:.1f} dB on {self.samples} samples held apart{note}"


@dataclass(frozen=True)
class Repairer:
    """The samples that repairs go by, and the model whose outputs judge them.

    Attributes:
        given: the model before it was folded.
        samples: at least two.
    """

    given: ModelProto
    samples: Batches
    overrides: Sequence[Override]
    threads: int
    reporter: Reporter = SILENT

    def repaired(
        self, table: Table, prepared: Prepared, measure: Callable[[Prepared], Table] | None
    ) -> tuple[Table, Repairs]:
        """Return the table with what lowers the noise most, of rounding alone and of channels that are smoothed before it.

        Args:
            measure: gives the scales of a smoothed graph; None: nothing is smoothed.
        """
        proto = to_proto(to_ir_at(in_memory(prepared.proto), FORMATS[Precision.INT8].opset))
        table, model = replace(table, repairs={}, smoothed={}, left_out={}), to_ir(proto)
        points = find_points(model, overrides=self.overrides)
        repairs = self._find(proto, points, table.amax)
        assert repairs is not None
        best, before = (table, repairs), repairs.before
        candidates = smoothable(model, points)
        adds = 3 * sum(len(item.matrices) for item in candidates.values() if item.adds) >= len(points.weights)
        if not adds:  # a node more each, for networks only that matrix products do the most of, as transformers
            candidates = {name: item for name, item in candidates.items() if not item.adds}
        share = sum(repairs.noise.activations.get(name, 0.0) for name in candidates) / (repairs.noise.total or 1.0)
        if measure is not None and share >= WORTH_SMOOTHING:
            largest = _channels(proto, {name: item.axis for name, item in candidates.items()}, self.samples)
            # What is worse isn't worth the time of repairing it; of transformers that can't be said before.
            most = math.inf if adds else before / WORSE
            for strength in STRENGTHS:
                factors = {name: factors_for(largest[name], readers, strength) for name, readers in candidates.items()}
                other = smoothed(proto, factors)
                points = find_points(to_ir(other), overrides=self.overrides)
                tensors = {**table.tensors, **measure(prepared.of(other, points)).tensors}
                tried = replace(table, tensors=tensors, smoothed=factors)
                what = f"rounding weights, channels smoothed (strength {strength:g})"
                found = self._find(other, points, tried.amax, what=what, most=most)
                if found is not None and found.after < best[1].after:
                    best = tried, replace(found, before=before)
        table, repairs = best
        return replace(table, repairs=repairs.nodes), repairs

    def _find(
        self,
        proto: ModelProto,
        points: Points,
        amax: Mapping[str, float],
        *,
        what: str = "rounding weights",
        most: float = math.inf,
    ) -> Repairs | None:
        """Round weights on the samples; None where the graph as it is makes more noise than `most`.

        Args:
            proto: folded, weights in memory, at an opset that Q/DQ has.
            what: the phase is called.
        """
        ledger = NoiseLedger(proto, points, amax, self.threads)
        ledger.read(self.samples, self.given)
        samples = sorted(ledger.samples, key=lambda sample: checksum(sample.of.feed))  # the same halves in any order
        fit, judge = samples[::2], samples[1::2] or samples
        before = ledger.of_whole(ledger.quantized({}), judge)
        if max(before.values()) > most:
            return None
        with self.reporter.phase(what, len(points.weights)) as phase:
            repairs, left, noise = _round_each(ledger, fit, judge, phase)
        nearest, chosen = (ledger.of_whole(ledger.quantized(item, weights_alone=True), judge) for item in ({}, repairs))
        if max(chosen.values()) >= max(nearest.values()):
            repairs = {}
        after = ledger.of_whole(ledger.quantized(repairs), judge)
        output = max(after, key=lambda name: before[name])
        if max(after.values()) > WORSE * max(before.values()):
            repairs, after = {}, before
        return Repairs(
            nodes=repairs,
            tried=len(points.weights) - len(left),
            left=left,
            before=before[output],
            after=after[output],
            output=output,
            samples=sum(sample.of.real for sample in judge),
            noise=noise,
        )


def _round_each(
    ledger: NoiseLedger, fit: Sequence[Sample], judge: Sequence[Sample], phase: Phase
) -> tuple[dict[str, Repair], dict[str, str], NoiseByPlace]:
    """Round each weight by the samples of `fit`, and keep what makes less noise alone on those that judge; why others weren't
    tried, and the noise of each place."""
    nodes = {node.name: node for node in ledger.proto.graph.node}
    repairs, left = dict[str, Repair](), dict[str, str]()
    of_weights, of_activations = dict[str, float](), dict[str, float]()
    for number, names, weights in ledger.places():
        of_activations |= {name: max(ledger.of_activation(name, judge).values()) for name in names}
        for weight in weights:
            node, content = nodes[weight.node], np.asarray(to_array(ledger.weights[weight.name]), np.float32)
            of_weights[weight.node] = max(ledger.of_weight(number, weight, None, judge).values())
            if why := unsupported(node, weight.slot, content.ndim):
                left[weight.node] = why
            else:
                seen: Any = tuple(map(sum, zip(*ledger.each(partial(_moments, node, content.shape), fit))))
                repair = rounded(node, content, weight.axis, seen, _corrects(node, ledger, weight))
                noise = max(ledger.of_weight(number, weight, repair, judge).values())
                if noise < of_weights[weight.node]:
                    repairs[weight.node], of_weights[weight.node] = repair, noise
            phase.advance()
    return repairs, left, NoiseByPlace(of_activations, of_weights)


def _channels(proto: ModelProto, axes: Mapping[str, int], batches: Batches) -> dict[str, NDArray[np.float32]]:
    """The largest magnitude of each channel of these tensors, which lie on the axis that is given for each."""
    names = list(axes)
    session = open_session(proto, outputs=names, threads=1, memory_pattern=False, purpose=PURPOSE)
    largest: dict[str, NDArray[np.float32]] = {}
    for run in single_runs(network_inputs(proto), batches):
        for name, array in run_session(session, names, run.feed).items():
            peaks = np.abs(np.moveaxis(array, axes[name], -1)).reshape(-1, array.shape[axes[name]]).max(0)
            largest[name] = np.maximum(largest[name], peaks) if name in largest else peaks
    return largest


def _moments(node: NodeProto, shape: Sequence[int], sample: Sample) -> Moments:
    return moments(node, shape, sample.values[node.input[0]])


def _corrects(node: NodeProto, ledger: NoiseLedger, weight: Weight) -> bool:
    """True where the node has a bias for each output channel, or can be given one."""
    if node.op_type == "MatMul":
        return False
    if len(node.input) <= BIAS or not node.input[BIAS]:
        return True
    held = ledger.weights.get(node.input[BIAS])
    channels = ledger.weights[weight.name].dims[weight.axis or 0]
    return held is not None and tuple(held.dims) == (channels,)
