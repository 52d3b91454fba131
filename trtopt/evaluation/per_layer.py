"""Two graphs tensor by tensor: where a candidate's results leave the reference's, and whose fault it is.

Both graphs run with every tensor that they have by the same name as an output. The candidate also runs cut apart: each node is
given the reference's tensors instead of what came before, so that its error is its own and none is inherited. Tensors behind
Q/DQ pairs are held against those before, which tells the error of a scale from that of the weights behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from trtopt.core.documents import plain
from trtopt.core.errors import DataError, UsageError
from trtopt.data.rebatch import chunks
from trtopt.evaluation.outputs import decibels
from trtopt.graph.half import has_half, widen
from trtopt.graph.passes.embed import embedded_in
from trtopt.graph.proto import infer_shapes, tensor_info, whole_copy
from trtopt.ort.sessions import as_taken, open_session

SAMPLES = 8
GOOD = 20.0  # dB: an error of a tenth of the signal
_BEHIND = "_dequantized"  # what trtopt calls a tensor behind its Q/DQ pair
_GIVEN = "/given"
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class LayerAgreement:
    """One tensor that both graphs have.

    Attributes:
        tensor: its name in the candidate.
        node, op: who makes it there.
        snr_db: against the reference's, with all that came before.
        own_snr_db: the same where the node is given the reference's tensors: its own error alone.
        nonfinite: values of the candidate, given the reference's, that are NaN or infinite where the reference's aren't.
    """

    tensor: str
    node: str
    op: str
    snr_db: float
    own_snr_db: float
    nonfinite: int

    @property
    def what(self) -> str:
        if self.tensor.endswith(_BEHIND):
            return f"the scale of {self.tensor.removesuffix(_BEHIND)}"
        return f"{self.node} ({self.op})"

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dict(plain(self))


def verdict(layers: Sequence[LayerAgreement]) -> str:
    """Where it breaks, in a sentence."""
    broken = next((item for item in layers if item.nonfinite), None)
    if broken is not None:
        return f"{broken.what} is the first to give values that aren't finite ({broken.nonfinite} of them), by itself"
    worst = min(layers, key=lambda item: item.own_snr_db)
    if worst.own_snr_db == np.inf:
        return "no tensor differs"
    rest = sorted(item.own_snr_db for item in layers if item is not worst)
    alone = f"{worst.what} loses most by itself: {decibels(worst.own_snr_db)}"
    alone += f", the next {decibels(rest[0])}" if rest else ""
    if worst.own_snr_db >= GOOD:
        return f"{alone}; no layer is off by itself: what is lost adds up, or is in the samples and the float model"
    return alone


def compare_layers(reference: ModelProto, candidate: ModelProto, batch: Arrays) -> tuple[LayerAgreement, ...]:
    """In the candidate's order.

    Args:
        batch: input name → array, the first axis counting samples; of the reference.

    Raises:
        UsageError: the graphs have no floating tensor by the same name.
        DataError, ModelError: ONNX Runtime can't run them.
    """
    makers = {name: node for node in candidate.graph.node for name in node.output if name}
    old, new = (widen(item) if has_half(item) else whole_copy(item) for item in (reference, candidate))
    kinds, own = _kinds(old), _kinds(new)
    pairs = {}
    for name in makers:
        other = name if name in kinds else name.removesuffix(_BEHIND)
        if kinds.get(other) in _FLOATS and own.get(name) in _FLOATS:
            pairs[name] = other
    if not pairs:
        raise UsageError(
            "the two graphs have no tensor by the same name, so layers can't be compared: was one made of the other?"
        )
    inputs = [item.name for item in old.graph.input if item.name in batch]
    wanted = list(dict.fromkeys(pairs.values()))
    exact = open_session(
        old, outputs=[name for name in wanted if name not in inputs], optimize=False, purpose="comparing layers"
    )
    whole = open_session(new, outputs=list(pairs), optimize=False, purpose="comparing layers")
    apart = open_session(_cut(new, pairs, kinds), outputs=list(pairs), optimize=False, purpose="comparing layers")
    embedded = embedded_in(candidate)
    sums = {name: np.zeros(3) for name in pairs}
    nonfinite = dict.fromkeys(pairs, 0)
    first = {info.shape[0] for item in old.graph.input if item.name in inputs and (info := tensor_info(item)).shape}
    size = next((item for item in first if isinstance(item, int) and item > 0), 1)
    for chunk, _ in chunks({name: batch[name] for name in inputs}, size, size):
        kept = dict(_run(exact, chunk)) | chunk
        given = {f"{name}{_GIVEN}": kept[other] for name, other in pairs.items()}
        mine = chunk if embedded is None else embedded.to_pixels(chunk)
        found = _run(whole, mine), _run(apart, {**mine, **given})
        for name, other in pairs.items():
            signal = np.asarray(kept[other], np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                noise = [np.square(np.asarray(item[name], np.float64) - signal).sum() for item in found]
            sums[name] += [np.square(signal).sum(), *noise]
            nonfinite[name] += int(np.isfinite(signal).sum() - np.isfinite(found[1][name]).sum())
    return tuple(
        LayerAgreement(
            name, makers[name].name, makers[name].op_type, *_ratios(sums[name]), nonfinite=max(0, nonfinite[name])
        )
        for name in pairs
    )


def _ratios(sums: NDArray[np.float64]) -> tuple[float, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = 10 * np.log10(sums[0] / sums[1:])
    ratios = np.where(sums[1:] == 0, np.inf, np.where(np.isnan(ratios), -np.inf, ratios))
    return float(ratios[0]), float(ratios[1])


def _kinds(proto: ModelProto) -> dict[str, int]:
    """Tensor → its type, as far as ONNX's inference knows it."""
    graph = infer_shapes(proto).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: value.type.tensor_type.elem_type for value in values if value.type.HasField("tensor_type")}


def _cut(candidate: ModelProto, pairs: Mapping[str, str], kinds: Mapping[str, int]) -> ModelProto:
    """Where nodes read a tensor of both graphs, they read an input that stands for it."""
    read = set()
    cut = ModelProto()
    cut.CopyFrom(candidate)
    for node in cut.graph.node:
        for index, name in enumerate(node.input):
            if name in pairs:
                node.input[index] = f"{name}{_GIVEN}"
                read.add(name)
    for name in sorted(read):
        cut.graph.input.append(helper.make_tensor_value_info(f"{name}{_GIVEN}", kinds[pairs[name]], None))
    del cut.graph.value_info[:]
    del cut.graph.output[:]
    cut.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in pairs)
    return cut


def _run(session: Any, feed: Arrays) -> dict[str, NDArray[Any]]:
    names = [item.name for item in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, as_taken(session, feed))))
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise DataError(f"ONNX Runtime can't run the models on these samples: {error}") from error
