"""INT4 codes chosen by what is multiplied with them, so that a product keeps its values instead of each weight its own.

For each block the scale is that of a small grid with the least error (clipping, as in Lin et al., "AWQ: Activation-aware Weight
Quantization for LLM Compression and Acceleration", arXiv 2306.00978). Then the codes are rounded one input after the other
(`compensation`), the most moved first. A channel that is better off with the nearest codes keeps these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.calibration.compensation import compensated, second_moments
from trtopt.calibration.rounding import Floats, Moments, moments, unsupported
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Precision
from trtopt.core.words import grouped
from trtopt.data import Batches
from trtopt.data.convert import single_runs
from trtopt.graph.half import widen
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.int4 import FORM, Coded, matrix, multiplies_weights, nearest, unsuited
from trtopt.graph.proto import in_memory
from trtopt.graph.view import attribute, to_ir
from trtopt.ort.sessions import open_session, run_session

PURPOSE = "rounding INT4 weights"
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)  # of a block's largest magnitude
_BYTES = 1 << 30  # of moments that are gathered in one pass over the samples


_Readers = Sequence[ir.Node]  # that multiply with one weight


def find_codes(
    folded: ModelProto, batches: Batches, base: Precision, *, reporter: Reporter = SILENT
) -> dict[str, Coded]:
    """Return the INT4 codes of each MatMul and Gemm that can have them, by node; a weight that several read has one.

    Args:
        base: the type that holds the scales.
        batches: real samples, which run one by one.
    """
    proto = widen(in_memory(folded))
    found, weights = dict[str, Coded](), list(_weights(to_ir(folded), proto))
    with reporter.phase(PURPOSE, len(weights)) as phase:
        for part in _parts(weights):
            seen = _gathered(proto, part, batches)
            for nodes in part:
                squares, sums, count = (sum(items) for items in zip(*(seen[name] for name in _multiplied(nodes))))
                coded = rounded(matrix(nodes[0]), second_moments((squares, sums, count)), base)
                found |= {str(node.name): coded for node in nodes}
                phase.advance()
    return found


def _multiplied(nodes: _Readers) -> list[str]:
    return [str(node.inputs[0].name) for node in nodes if node.inputs[0] is not None]


def _weights(model: ir.Model, proto: ModelProto) -> Iterator[_Readers]:
    """Yield the weights whose inputs can be looked at; those of other nodes get the nearest codes."""
    protos = {node.name: node for node in proto.graph.node}
    computed = {name for node in proto.graph.node for name in node.output} | network_inputs(proto).keys()
    suited = (node for node in filter(multiplies_weights, model.graph) if not unsuited(node))
    for nodes in grouped(((node.inputs[1], attribute(node, "transB", 0)), node) for node in suited).values():
        strange = any(unsupported(protos[str(node.name)], 1, 2) for node in nodes)
        if not strange and computed.issuperset(_multiplied(nodes)):
            yield nodes


def _parts(weights: Sequence[_Readers]) -> Iterator[list[_Readers]]:
    """Yield runs of weights whose moments fit into memory together."""
    part, sizes = list[_Readers](), dict[str, int]()
    for nodes in weights:
        own = dict.fromkeys(_multiplied(nodes), 8 * len(matrix(nodes[0])) ** 2)
        sizes |= own
        if part and sum(sizes.values()) > _BYTES:
            yield part
            part, sizes = [], own
        part.append(nodes)
    if part:
        yield part


def _gathered(proto: ModelProto, part: Sequence[_Readers], batches: Batches) -> dict[str, Moments]:
    """Sum the moments of what the weights multiply, over all samples."""
    protos, inputs = {node.name: node for node in proto.graph.node}, network_inputs(proto)
    readers = {name: protos[str(node.name)] for nodes in part for name, node in zip(_multiplied(nodes), nodes)}
    names = [name for name in readers if name not in inputs]
    session = open_session(proto, outputs=names, threads=1, memory_pattern=False, purpose=PURPOSE) if names else None
    total: dict[str, Moments] = {}
    for run in single_runs(inputs, batches):
        values = run.feed if session is None else {**run.feed, **run_session(session, names, run.feed)}
        for name, reader in readers.items():
            new = moments(reader, (), values[name])
            squares, sums, count = total.get(name, (0.0, 0.0, 0))
            total[name] = squares + new[0], sums + new[1], count + new[2]
    return total


def channel_errors(coded: Coded, weight: NDArray[np.float32], second: Floats) -> Floats:
    """The mean squared error of each of N outputs."""
    error = np.asarray(coded.floats(), np.float64) - weight
    return np.asarray(((second @ error) * error).sum(0))


def rounded(weight: NDArray[np.float32], second: Floats, base: Precision) -> Coded:
    """Codes and scales of a K × N weight whose products lose least; no output channel loses more than with the nearest codes.

    Args:
        second: K × K, of what is multiplied.
    """
    plain = nearest(weight, base)
    if not np.isfinite(second).all():
        return plain
    clipped = _clipped(weight, second, base, plain)
    candidates = [plain, clipped, *(_compensated(weight, second, item) for item in (plain, clipped))]
    best = np.argmin([channel_errors(item, weight, second) for item in candidates], axis=0)
    columns = np.arange(weight.shape[1])
    codes, scales = (np.stack([item[part] for item in candidates]) for part in (0, 1))
    return Coded(codes[best, :, columns].T, scales[best, :, columns].T)


def _clipped(weight: NDArray[np.float32], second: Floats, base: Precision, plain: Coded) -> Coded:
    """The nearest codes, each block with the clip of least error within it."""
    block = plain.block
    blocks = range(0, len(weight), block)
    near = np.stack([second[first : first + block, first : first + block] for first in blocks])
    least = np.full(plain.scale.shape, np.inf)
    codes, scale = plain.codes.copy(), plain.scale.copy()
    for clip in CLIPS:
        tried = nearest(weight, base, clip)
        error = (np.asarray(tried.floats(), np.float64) - weight).reshape(len(near), block, -1)
        losses = (np.matmul(near, error) * error).sum(1)
        better = losses < least
        least = np.where(better, losses, least)
        scale = np.where(better, tried.scale, scale)
        codes = np.where(np.repeat(better, block, axis=0), tried.codes, codes)
    return Coded(codes, scale)


def _compensated(weight: NDArray[np.float32], second: Floats, start: Coded) -> Coded:
    """GPTQ's codes for the scales of `start`, those of the most moved inputs first."""
    order = np.argsort(-np.diag(second), kind="stable")
    steps = np.repeat(start.scale, start.block, axis=0).astype(np.float64)
    ordered = steps[order]

    def kept(row: int, left: Floats, _: Floats) -> Floats:
        return np.asarray(np.clip(np.rint(left[row] / ordered[row]), FORM.least, FORM.largest) * ordered[row])

    made = compensated(weight, second, order, kept)
    return start if made is None else Coded(np.rint(made / steps).astype(np.int8), start.scale)
