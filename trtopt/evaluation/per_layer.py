"""Two graphs tensor by tensor: where a candidate's results leave the reference's, and whose fault it is.

Both graphs run with every tensor that they have by the same name as an output. The candidate also runs in pieces: each node is
given the reference's tensors instead of what came before, so that its error is its own and none is inherited. Tensors behind
Q/DQ pairs are held against those before, which tells the error of a scale from that of the weights behind it.

An error that is large beside its own tensor may be nothing to the nodes behind it, as in a branch that is scaled to nearly
nothing and added to another. So the nodes also run on tensors that have their own errors, twice, one behind the other, and
a layer is blamed for no more than what those that read it, and those behind these, make of its error.

An engine can't run in pieces. There it is the reference that does: each of its nodes is given the engine's tensors, and what it
makes of them is what the engine should have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from trtopt.core.documents import Described
from trtopt.core.errors import UsageError
from trtopt.data.convert import single_runs
from trtopt.data.difference import in_db, powers
from trtopt.data.rebatch import Arrays
from trtopt.evaluation.measures import decibels
from trtopt.graph.half import has_half, widen
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.embed import embedded_in
from trtopt.graph.proto import forget_inner_shapes, inferred_values, refill, whole_copy
from trtopt.ort.sessions import open_session, run_session

SAMPLES = 8
GOOD = 20.0  # dB: an error of a tenth of the signal
ALIKE = 0.5  # dB
APART = 10.0  # dB: ten times the noise of any other layer
HOPS = 2  # nodes behind a layer that are asked what they make of its error
HARMLESS = 40.0  # dB: an error of a hundredth, which none has to be blamed for
_BEHIND = "_dequantized"  # what trtopt calls a tensor behind its Q/DQ pair
_STAND_IN = "/given"
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
Array = NDArray[Any]


@dataclass(frozen=True)
class LayerAgreement(Described):
    """One tensor that both graphs have.

    Attributes:
        tensor: its name in the candidate.
        node, op: who makes it there.
        snr_db: against the reference's, with all that came before.
        own_snr_db: the node's own error alone: where it is given the reference's tensors; of an engine, where the reference's
            node is given the engine's.
        felt_snr_db: that, or what the next two nodes behind it make of such errors, where that is nearer to the reference.
        nonfinite: values that are NaN or infinite by the node's own fault, where the reference's aren't.
    """

    tensor: str
    node: str
    op: str
    snr_db: float
    own_snr_db: float
    felt_snr_db: float
    nonfinite: int

    @property
    def what(self) -> str:
        if self.tensor.endswith(_BEHIND):
            return f"the scale of {self.tensor.removesuffix(_BEHIND)}"
        return f"{self.node} ({self.op})"


def culprit(layers: Sequence[LayerAgreement]) -> LayerAgreement:
    """Return the first that gives values that aren't finite, or else the one that loses most by itself."""
    if (broken := next((item for item in layers if item.nonfinite), None)) is not None:
        return broken
    least = min(item.felt_snr_db for item in layers)
    # What goes into the same node behind them is felt alike there: the first of them is to blame.
    return next(item for item in layers if item.felt_snr_db <= least + ALIKE)


def verdict(layers: Sequence[LayerAgreement]) -> str:
    """Say where it breaks, in a sentence."""
    worst = culprit(layers)
    if worst.nonfinite:
        return f"{worst.what} is the first to give values that aren't finite ({worst.nonfinite} of them), by itself"
    if worst.felt_snr_db == np.inf:
        return "no tensor differs" if worst.own_snr_db == np.inf else "what differs isn't felt behind it"
    rest = sorted(item.felt_snr_db for item in layers if item is not worst)
    sentence = f"{worst.what} loses most by itself: {decibels(worst.felt_snr_db)}"
    if rest and rest[0] < worst.felt_snr_db:
        alike = sum(item <= worst.felt_snr_db + ALIKE for item in rest)
        sentence = (
            f"{worst.what} is the first of {alike + 1} that lose most by themselves: {decibels(worst.felt_snr_db)}"
        )
    elif rest:
        sentence += f", the next {decibels(rest[0])}" if rest[0] < math.inf else ", the others nothing"
    stands_out = bool(rest) and worst.felt_snr_db < min(rest[0] - APART, HARMLESS)
    if worst.felt_snr_db >= GOOD and not stands_out:
        return f"{sentence}; no layer is off by itself: what is lost adds up, or is in the samples and the float model"
    return sentence


def compare_layers(
    reference: ModelProto,
    candidate: ModelProto,
    batches: Sequence[Arrays],
    engine: Callable[[Arrays], Arrays] | None = None,
    size: int = 1,
) -> tuple[LayerAgreement, ...]:
    """Compare the tensors of both graphs, in the candidate's order.

    Args:
        batches: input name → array, the first axis counting samples; of the reference. Samples of one shape in each.
        engine: of the candidate: gives `tensors_of_engine`, from inputs of the reference.
        size: samples that it takes at a time.

    Raises:
        UsageError: the graphs have no floating tensor by the same name.
        DataError, ModelError: ONNX Runtime can't run them.
    """
    old, new = map(_fp32, (reference, candidate))
    kinds, cut = _kinds(old), new if engine is None else old
    pairs = {name: other for name, other in _pairs(kinds, new).items() if engine is None or name == other}
    exact, pieces = _opened(old, dict.fromkeys(pairs.values())), _opened(_cut(cut, pairs, kinds), pairs)
    run = engine or partial(run_session, _opened(new, pairs), None)
    preprocessing = None if engine else embedded_in(candidate)
    # Of each tensor the powers of signal and noise: with all that came before, of the node alone, and of what becomes of errors
    # one node and two before it.
    sums = {name: np.zeros((2 + HOPS, 2)) for name in pairs}
    nonfinite = dict.fromkeys(pairs, 0)  # by the node's own fault
    for chunk in (part.feed for part in single_runs(network_inputs(old), batches, size)):
        tensors = run_session(exact, None, chunk) | chunk
        inputs = chunk if preprocessing is None else preprocessing.to_pixels(chunk)
        results = run(inputs)
        before = results if engine else {name: tensors[other] for name, other in pairs.items()}
        own = _given(pieces, inputs, before)
        felt = [own]
        for _ in range(HOPS):  # what the nodes make of tensors that have errors, and of what comes of that
            felt.append(_given(pieces, inputs, felt[-1]))
        for name, other in pairs.items():
            expected, found = (own[name], results[name]) if engine else (tensors[other], own[name])
            sums[name] += [
                powers(tensors[other], results[name]),
                powers(expected, found),
                *(powers(own[name], arrays[name]) for arrays in felt[1:]),
            ]
            nonfinite[name] += int((np.isfinite(expected) & ~np.isfinite(np.asarray(found, np.float64))).sum())
    makers = {name: node for node in candidate.graph.node for name in node.output}
    readers = _readers(cut, pairs)
    agreements = []
    for name in pairs:
        node = makers[name]
        while node.op_type == "Cast" and node.input[0] in makers and node.input[0] not in pairs:
            node = makers[node.input[0]]  # the layer, not what only changes the type of its result
        whole, own_db = map(float, in_db(*sums[name].T)[:2])
        felt_db, behind = own_db, {name}
        for hop in range(HOPS):
            behind = {other for one in behind for other in readers[one]}
            felt_db = max(felt_db, min((float(in_db(*sums[other][2 + hop])) for other in behind), default=-math.inf))
        agreements.append(LayerAgreement(name, node.name, node.op_type, whole, own_db, felt_db, nonfinite[name]))
    return tuple(agreements)


def tensors_of_engine(reference: ModelProto, graph: ModelProto) -> tuple[str, ...]:
    """Return what of an engine's graph can be an output and compared: the tensors of its layers, not those behind Q/DQ pairs.

    Raises:
        UsageError: there are none.
    """
    return tuple(name for name, other in _pairs(_kinds(_fp32(reference)), _fp32(graph)).items() if name == other)


def _given(pieces: Any, inputs: Arrays, tensors: Arrays) -> Arrays:
    """Return what each node of a graph in pieces makes of these tensors."""
    return run_session(pieces, None, {**inputs, **{f"{name}{_STAND_IN}": array for name, array in tensors.items()}})


def _readers(proto: ModelProto, pairs: Iterable[str]) -> dict[str, list[str]]:
    """Map each of these tensors to those among them that are made of it, with none of them between; outputs have none."""
    pairs, made_of = set(pairs), dict[str, set[str]]()
    readers: dict[str, list[str]] = {name: [] for name in pairs}
    for node in proto.graph.node:
        sources = {item for name in node.input for item in ({name} if name in pairs else made_of.get(name, ()))}
        made_of |= dict.fromkeys(node.output, sources)
        for name in pairs.intersection(node.output):
            for source in sources:
                readers[source].append(name)
    ends = {value.name for value in proto.graph.output}
    return {name: [] if name in ends else names for name, names in readers.items()}


def _fp32(proto: ModelProto) -> ModelProto:
    return widen(proto) if has_half(proto) else whole_copy(proto)


def _pairs(kinds: Mapping[str, int], new: ModelProto) -> dict[str, str]:
    """Floating tensor of the candidate → the reference's, whose types are `kinds`."""
    own, pairs = _kinds(new), dict[str, str]()
    for name in (name for node in new.graph.node for name in node.output if name):
        other = name if name in kinds else name.removesuffix(_BEHIND)
        if kinds.get(other) in _FLOATS and own.get(name) in _FLOATS:
            pairs[name] = other
    if not pairs:
        raise UsageError(
            "the two graphs have no tensor by the same name, so layers can't be compared: was one made of the other?"
        )
    return pairs


def _opened(proto: ModelProto, names: Iterable[str]) -> Any:
    inputs = {item.name for item in proto.graph.input}
    outputs = [name for name in names if name not in inputs]
    return open_session(proto, outputs=outputs, optimize=False, purpose="comparing layers")


def _kinds(proto: ModelProto) -> dict[str, int]:
    """Tensor → its type, as far as ONNX's inference knows it."""
    return {name: value.type.tensor_type.elem_type for name, value in inferred_values(proto).items()}


def _cut(candidate: ModelProto, pairs: Mapping[str, str], kinds: Mapping[str, int]) -> ModelProto:
    """Return a graph whose nodes read inputs that stand for the tensors of both graphs."""
    model = whole_copy(candidate)
    for node in model.graph.node:
        node.input[:] = [f"{name}{_STAND_IN}" if name in pairs else name for name in node.input]
    read = {name for node in candidate.graph.node for name in node.input}
    for name in sorted(read & pairs.keys()):
        model.graph.input.append(helper.make_tensor_value_info(f"{name}{_STAND_IN}", kinds[pairs[name]], None))
    forget_inner_shapes(model)
    model.graph.value_info.extend(model.graph.output)  # their types, which may be said nowhere else
    refill(model.graph.output, [helper.make_empty_tensor_value_info(name) for name in pairs])
    return model
