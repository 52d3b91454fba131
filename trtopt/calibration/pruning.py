"""Weights made 2:4 sparse in one shot, as TensorRT's sparse kernels take them: of four input channels in a row two count.

With samples by SparseGPT (Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot",
arXiv 2301.00774): of four weights the two go that lose least, and what is lost is brought to the inputs that follow. Layers
are pruned in the order of the graph, each so that it gives of what it reads then what it gave of what it read before. Without
samples the two largest of four stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trtopt.calibration.compensation import compensated, damped, second_moments
from trtopt.calibration.noise import Parts, Sample, opened, snr_db
from trtopt.calibration.quality import checksum
from trtopt.calibration.rounding import Floats, Moments, moments, unsupported
from trtopt.core.errors import UsageError
from trtopt.core.host import cores
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Override, Precision, overriding
from trtopt.core.words import first_of, grouped
from trtopt.data import Batches
from trtopt.graph.half import widen
from trtopt.graph.io import Model
from trtopt.graph.op_types import QDQ
from trtopt.graph.prepare import taken
from trtopt.graph.proto import Links, attribute, opset_version, to_array, whole_copy

JUDGE = 8  # every such sample says what was lost, and isn't pruned by
_Made = tuple[NodeProto, NDArray[np.float32]]  # a node, and what becomes of its weight


@dataclass(frozen=True)
class Pruned:
    """A model, folded, with 2:4 weights.

    Attributes:
        model: with the path of the one that was given.
        count: of weights that are 2:4; dense: node → why its weights aren't.
        snr_db: gives a graph's dB at the worst output, against the model as given; None: there were no samples.
        judged: on how many samples.
    """

    model: Model
    count: int
    dense: Mapping[str, str]
    snr_db: Callable[[ModelProto], float] | None = None
    judged: int = 0

    def __str__(self) -> str:
        return f"2:4: {self.count} of {self.count + len(self.dense)} weights pruned"


def prune(
    given: Model,
    folded: ModelProto,
    batches: Batches | None = None,
    *,
    overrides: Sequence[Override] = (),
    reporter: Reporter = SILENT,
) -> Pruned:
    """Make the constant weights of Conv, MatMul and Gemm 2:4 along their input channels; say what stays dense.

    Args:
        given: the model before it was folded, whose outputs judge.
        batches: real samples, which run one by one; None: by magnitude.
        overrides: what they keep in FP32 stays dense.

    Raises:
        UsageError: there is nothing to prune. ModelError: no output has dB.
    """
    proto = whole_copy(folded)
    weights, links = {item.name: item for item in proto.graph.initializer}, Links(proto.graph)
    chosen, dense = dict[str, NodeProto](), dict[str, str]()
    for node in (node for node in proto.graph.node if node.op_type in ("Conv", "MatMul", "Gemm")):
        held = weights.get(node.input[1])
        in_fp32 = held is not None and overriding(overrides, node.name, node.op_type) is Precision.FP32
        if why := "`precision_override=` keeps it in FP32" if in_fp32 else _unsuited(node, held, links):
            dense[node.name] = why
        elif held is not None:
            chosen[node.name] = node
    reasons = grouped((why, node) for node, why in dense.items())
    said = "; ".join(f"{first_of(nodes)}: {why}" for why, nodes in reasons.items())
    if not chosen:
        raise UsageError(
            f"`sparsity='prune'` finds no weight to prune: {said or 'no Conv, MatMul or Gemm has one'}; drop it"
        )
    if said:
        reporter.note(f"weights that stay dense: {said}")
    pruned = Pruned(replace(given, proto=proto, opset=opset_version(proto)), len(chosen), dense)
    if batches is None:
        reporter.warn("pruned by magnitude, what that loses isn't known: `images=` or `data=` say it, and prune better")
        contents = (to_array(weights[node.input[1]]) for node in chosen.values())
        made: Iterator[_Made] = ((node, _two_of_four(node, item)) for node, item in zip(chosen.values(), contents))
    else:
        run = widen(whole_copy(proto))
        tensors = [node.input[0] for node in run.graph.node if node.name in chosen]
        before, after = (Parts(run, tensors, cores()) for _ in range(2))
        for parts in (before, after):
            parts.read(batches, taken(given).proto)
        # In an order that is the same for any of the samples'.
        places = sorted(range(len(after.samples)), key=lambda place: checksum(after.samples[place].of.feed))
        fit = [place for number, place in enumerate(places) if number % JUDGE] or places
        judge = [after.samples[place] for place in places[::JUDGE]]
        pruned = replace(pruned, snr_db=partial(_snr_db, after, judge), judged=sum(sample.of.real for sample in judge))
        made = _by_samples(before, after, chosen, fit)
    with reporter.phase("pruning weights", len(chosen)) as phase:
        for node, content in made:
            held = weights[node.input[1]]
            held.CopyFrom(numpy_helper.from_array(content.astype(to_array(held).dtype), held.name))
            phase.advance()
    return pruned


def _snr_db(parts: Parts, judge: Sequence[Sample], graph: ModelProto) -> float:
    return snr_db(max(parts.of_whole(widen(graph), judge).values()))


def _unsuited(node: NodeProto, held: TensorProto | None, links: Links) -> str:
    """Say why the weights of a node stay dense; empty: they needn't, or there are none."""
    if held is None and node.op_type != "Conv" and node.input[0] in links.constants:
        return "its weights stand on the left, and those on the right alone are pruned"
    if held is None:
        name = node.input[1]
        while (maker := links.makers.get(name)) is not None and maker.op_type in (*QDQ, "Transpose"):
            name = maker.input[0]
        return "its weights are quantized already: give the float model" if name in links.constants else ""
    weight, readers = to_array(held), len(links.readers[held.name])
    if readers > 1 or weight.dtype.name not in ("float32", "float16", "bfloat16"):
        return "several nodes read its weights" if readers > 1 else f"its weights are {weight.dtype.name}"
    if attribute(node, "group", 1) > 1:
        return "its channels are in groups"
    if why := unsupported(node, 1, weight.ndim):
        return why
    inputs = weight.shape[int(_outputs_first(node))]
    return f"it has {inputs} input channels, no multiple of 4" if inputs % 4 else ""


def _outputs_first(node: NodeProto) -> bool:
    return node.op_type == "Conv" or bool(attribute(node, "transB", 0))


def _by_samples(before: Parts, after: Parts, chosen: Mapping[str, NodeProto], fit: Sequence[int]) -> Iterator[_Made]:
    """Yield what becomes of each weight, in the order of the graph; what comes behind it in `after` sees it so."""
    for number, segment in enumerate(after.segments):
        held = {item.name: item for item in segment.proto.graph.initializer}
        within = [node for node in segment.proto.graph.node if node.name in chosen]
        for node in within:
            weight, axis = to_array(held[node.input[1]]), 1 if node.op_type == "Conv" else -1
            # Of both as if they were channels of one, which also gives what goes together between them.
            both = (weight.shape[0], 2 * weight.shape[1], *weight.shape[2:])
            total: Moments = np.zeros(()), np.zeros(()), 0
            for place in fit:
                read = [parts.samples[place].values[node.input[0]] for parts in (before, after)]
                new = moments(node, both, np.concatenate(read, axis))
                total = total[0] + new[0], total[1] + new[1], total[2] + new[2]
            content = _two_of_four(node, weight, total)
            held[node.input[1]].CopyFrom(numpy_helper.from_array(content, node.input[1]))
            yield chosen[node.name], content
        if within:
            after.sessions[number] = opened(segment.proto)
        before.step(number)
        after.step(number)


def _two_of_four(node: NodeProto, weight: NDArray[np.generic], seen: Moments | None = None) -> NDArray[np.float32]:
    """The weight of a node, 2:4 along its input channels at each place of the kernel.

    Args:
        seen: moments of what the node reads before anything is pruned and, as further channels, when it is its turn.
    """
    rows = np.asarray(weight, np.float64).reshape(len(weight), -1)
    rows = rows.T if _outputs_first(node) else rows
    size, mask = len(rows), np.ones((4, rows.shape[1]), bool)
    order = np.arange(size).reshape(-1, int(np.prod(weight.shape[2:]))).T.reshape(-1)  # channels of one place in a row
    second = np.eye(size)

    def kept(row: int, left: Floats, pivots: Floats) -> Floats:
        if row % 4 == 0:
            losses = np.abs(left[row : row + 4] / pivots[row : row + 4, None])
            mask[:] = np.argsort(np.argsort(-losses, axis=0, kind="stable"), axis=0) < 2
        return np.asarray(left[row] * mask[row % 4])

    if seen is not None and np.isfinite(seen[0]).all():
        squares, sums, count = seen
        second = second_moments((squares[:, size:, size:], sums[:, size:], count))
        moved = (squares[0, :size, size:] - squares[0, size:, size:]) / count
        rows = rows + np.linalg.solve(damped(second), moved.T @ rows)
    made = compensated(rows, second, order, kept)
    if made is None:
        return _two_of_four(node, weight)
    return np.ascontiguousarray(made.T if _outputs_first(node) else made, np.float32).reshape(weight.shape)
