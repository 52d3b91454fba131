"""Which weights are better rounded otherwise than to the nearest code: tried one by one, and kept where it helps.

Half of the samples give the covariances that the rounding goes by, the other half judge: at the network's outputs, each weight
alone, and all together in the real Q/DQ graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from trtopt.calibration.noise import NoiseLedger, Sample, snr_db
from trtopt.calibration.quality import checksum
from trtopt.calibration.rounding import Moments, moments, rounded, unsupported
from trtopt.core.documents import plain
from trtopt.core.progress import SILENT, Reporter
from trtopt.data import Batches
from trtopt.graph.passes.placement import Points, Weight
from trtopt.graph.passes.repair import BIAS, Repair
from trtopt.graph.proto import to_array

SAMPLES = 24  # in all


@dataclass(frozen=True)
class Repairs:
    """What was found.

    Attributes:
        nodes: name → what is changed.
        tried: how many weights were rounded.
        left: node name → why its weights weren't.
        before, after: noise at the worst output, in the Q/DQ graph, on the samples that judge.
        output: that one.
        samples: that judged.
    """

    nodes: Mapping[str, Repair]
    tried: int
    left: Mapping[str, str]
    before: float
    after: float
    output: str
    samples: int

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
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
        return f"{count}: {self.output} {old:.1f} → {new:.1f} dB on {self.samples} samples held apart"


def find_repairs(
    proto: ModelProto,
    points: Points,
    amax: Mapping[str, float],
    batches: Batches,
    *,
    threads: int,
    reporter: Reporter = SILENT,
) -> Repairs:
    """Round weights on real samples.

    Args:
        proto: folded, weights in memory, at an opset that Q/DQ has.
        batches: at least two samples.

    Raises: as `NoiseLedger`.
    """
    ledger = NoiseLedger(proto, points, amax, threads)
    ledger.read(batches)
    samples = sorted(ledger.samples, key=lambda sample: checksum(sample.feed))  # the same halves in any order
    fit, judge = samples[::2], samples[1::2] or samples
    nodes = {node.name: node for node in proto.graph.node}
    found: dict[str, Repair] = {}
    left: dict[str, str] = {}
    with reporter.phase("rounding weights", len(points.weights)) as phase:
        for number, segment in enumerate(ledger.segments):
            for weight in (weight for weight, holder in ledger.holders if holder == number):
                node, content = nodes[weight.node], np.asarray(to_array(ledger.weights[weight.name]), np.float32)
                if why := unsupported(node, weight.slot, content):
                    left[weight.node] = why
                else:
                    seen: Moments = reduce(_added, ledger.each(partial(_moments, node, content), fit))
                    repair = rounded(node, content, weight.axis, seen, _corrects(node, ledger, weight))
                    noise = [
                        ledger.of_weight(number, ledger.with_weight(segment, weight, item), judge)
                        for item in (None, repair)
                    ]
                    if max(noise[1].values()) < max(noise[0].values()):
                        found[weight.node] = repair
                phase.advance()
            ledger.step(number)
    before, after = (ledger.of_whole(ledger.quantized(item), judge) for item in ({}, found))
    output = max(before, key=lambda name: before[name])
    if max(after.values()) >= max(before.values()):
        found, after = {}, before
    held_apart = sum(sample.real for sample in judge)
    return Repairs(found, len(points.weights) - len(left), left, before[output], after[output], output, held_apart)


def _moments(node: NodeProto, content: Any, sample: Sample) -> Moments:
    return moments(node, content, np.asarray(sample.values[node.input[0]], np.float32))


def _added(one: Moments, other: Moments) -> Moments:
    one.add(other)
    return one


def _corrects(node: NodeProto, ledger: NoiseLedger, weight: Weight) -> bool:
    """Whether the node has a bias for each output channel, or can be given one."""
    if node.op_type == "MatMul":
        return False
    if len(node.input) <= BIAS or not node.input[BIAS]:
        return True
    held = ledger.weights.get(node.input[BIAS])
    channels = ledger.weights[weight.name].dims[weight.axis or 0]
    return held is not None and tuple(held.dims) == (channels,)
