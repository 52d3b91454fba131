"""Constant folding and clean-up: the graph that inference would optimise, before anything is calibrated or quantized.

onnxscript folds constants and shape arithmetic with ONNX's reference evaluator, so that the result doesn't depend on
ONNX Runtime being there. What rewrites the graph is ours (`tidy`, `absorb`): libraries' rules for it look at fewer
broadcasts, attributes and second readers than there are. Both are repeated until nothing changes, which also makes
folding idempotent. What that costs is mostly copying weights, which few models need: heavy ones are folded without
first (docs/results/calibration-rules.md).

Kept as they are: what TensorRT fuses itself (Conv → activation, GELU, LayerNormalization, attention) and Q/DQ pairs.

The result isn't believed: it is validated (`guard`), and the caller compares it. Where it won't do, nothing is folded:
check, calibrate and build go on with the same graph.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx import ModelProto, TensorProto
from onnx_ir.passes import common

from trtopt.core.errors import ModelError
from trtopt.core.library_output import quiet, rewriting
from trtopt.core.progress import SILENT, Phase, Reporter
from trtopt.graph.budget import NOT_FOLDED, TOTAL, Budget
from trtopt.graph.guard import fault
from trtopt.graph.inputs import record_batch_axes
from trtopt.graph.lazy_weights import set_external
from trtopt.graph.op_types import SELECTING
from trtopt.graph.passes.absorb import absorb
from trtopt.graph.passes.opset import split_by_lengths
from trtopt.graph.passes.result import Line, Refused
from trtopt.graph.passes.tidy import tidy
from trtopt.graph.proto import (
    LARGE,
    STANDARD,
    all_nodes,
    all_tensors,
    fingerprint,
    forget_inner_shapes,
    forget_output_shapes,
    opset_version,
    put_back,
    refill,
    skeleton,
    tensor_size,
    unique,
    whole_copy,
)
from trtopt.graph.view import (
    Editor,
    attribute,
    constant,
    infer_into,
    inline_functions,
    is_constant,
    operand,
    opset_of,
    read_ir,
    read_once,
    to_proto,
)

ROUNDS = 48  # most models settle in two or three, chains of reshapes in one a link
# Bytes of weights that are worth leaving out at first and, where they can't be, the time to find their forgotten copies.
HEAVY = 32 << 20
APART = 1 << 20  # bytes: what is left out at the second try, after `LARGE`; smaller weights are looked into more often
_PIXELS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)  # what TensorRT casts uint8 to and from
_INVERSE = {"LessOrEqual": "Greater", "GreaterOrEqual": "Less"}
_NOWHERE = "weights that were left out"  # a file's name, which nothing reads


@dataclass(frozen=True)
class FoldReport:
    """Changes that folding made.

    Attributes:
        before, after: number of nodes by operator.
        problem: why the graph isn't folded, or not wholly; empty: it is.
    """

    before: dict[str, int]
    after: dict[str, int]
    problem: str = ""

    @property
    def removed(self) -> dict[str, int]:
        """Nodes that went, by operator, most first."""
        return dict((Counter(self.before) - Counter(self.after)).most_common())

    @property
    def added(self) -> dict[str, int]:
        """Nodes that others became, likewise."""
        return dict((Counter(self.after) - Counter(self.before)).most_common())

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def warning(self) -> str:
        """Return what to tell the user where there is a problem."""
        return f"the graph isn't folded as far as it could be: {self.problem}"

    def to_json(self) -> dict[str, Any]:
        changed = {"removed": self.removed, "added": self.added}
        return {"before": self.before, "after": self.after, **changed, "problem": self.problem}

    def __str__(self) -> str:
        before, after = sum(self.before.values()), sum(self.after.values())
        parts = {"removed": self.removed, "added": self.added}
        told = [f"{what}: {', '.join(f'{n} {op}' for op, n in part.items())}" for what, part in parts.items() if part]
        return f"{before} nodes → {after} ({'; '.join(told) or 'nothing to fold'})"


def fold(proto: ModelProto, *, reporter: Reporter = SILENT) -> tuple[ModelProto, FoldReport]:
    """Fold constants, BatchNormalization and Pad into Conv, and drop what does nothing.

    Input and output names, their dimension names, and the model's own metadata stay; where samples aren't on the inputs' first
    axes, that is added to it. Nodes keep their names where they live on (a fused Conv keeps the Conv's), and every node ends
    up with a unique one. The result is deterministic, the same in every process, and folding it again gives the same bytes.
    Where a library fails on the model, or changes it, less is folded, down to nothing, and the report says why.

    Args:
        proto: a valid model (see `load_model`); it isn't changed.

    Raises:
        ModelError: not even a copy of it can be made.
    """
    problem = ""
    if opset_version(proto):  # else it has operators of other domains alone, of which nothing is known
        with reporter.phase("fold constants", None) as phase:
            try:
                folded = _settled(proto, phase)
                if not (problem := fault(proto, folded)):
                    return _reported(folded, proto, "")
            except ModelError as error:
                problem = str(error)
    return unfolded(proto, problem)


def unfolded(proto: ModelProto, problem: str) -> tuple[ModelProto, FoldReport]:
    """Return what `fold` gives where nothing can be folded, because of `problem`."""
    return _reported(_restored(whole_copy(proto), proto), proto, problem)


def _reported(result: ModelProto, proto: ModelProto, problem: str) -> tuple[ModelProto, FoldReport]:
    record_batch_axes(result, proto)
    return result, FoldReport(_count(proto), _count(result), problem)


def _constant_bytes(proto: ModelProto) -> int:
    return sum(tensor_size(tensor) for tensor in all_tensors(proto.graph) if tensor.data_type != TensorProto.STRING)


def _settled(proto: ModelProto, phase: Phase) -> ModelProto:
    """`proto` after as many rounds as change it. ModelError: it doesn't settle, or the library fails on it."""
    most = max(TOTAL, 2 * _constant_bytes(proto))
    heavy = sum(map(tensor_size, proto.graph.initializer)) > HEAVY
    for apart in (LARGE, APART) if heavy else ():
        if (light := _lightly(proto, most, apart, proto)) is not None:
            return light
    current = _undeclared(whole_copy(proto))  # onnx-ir renames tensors in the messages it was made from
    mark = "" if heavy else fingerprint(_restored(whole_copy(current), proto))
    for number in range(ROUNDS):
        current = _round(current, most, proto)
        if heavy:
            gc.collect()  # the library's graphs are cycles with all weights in them
        before, mark = mark, fingerprint(current)
        if mark == before:
            return current
        if heavy and (light := _lightly(current, most, APART, proto)) is not None:
            return light
        phase.detail(f"round {number + 2}")
    raise ModelError(f"folding doesn't settle: the graph still changes after {ROUNDS} rounds")


def _round(current: ModelProto, most: int, original: ModelProto) -> ModelProto:
    with rewriting, quiet():
        return _restored(_evaluate(current, most), original)


def _undeclared(proto: ModelProto) -> ModelProto:
    forget_inner_shapes(proto)
    forget_output_shapes(proto)
    return proto


def _lightly(proto: ModelProto, most: int, apart: int, original: ModelProto) -> ModelProto | None:
    """`proto` folded without weights over `apart` bytes, which only follow their names: copying them takes longest of all.

    None: that needs to know what is in them, drops one, or leaves something that may be computed from them.
    """
    light, large = _undeclared(skeleton(proto, apart, external=_NOWHERE)), list[tuple[str | int, ...]]()
    for tensor in light.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            set_external(tensor, location=f"{_NOWHERE}: {tensor.name}")  # none is another's copy
            large.append((tensor.name, *tensor.dims))
    now = _content(_restored(whole_copy(light), original))
    try:
        for _ in range(ROUNDS):
            light = _round(light, most, original)
            before, now = now, _content(light)
            constants = {tensor.name for tensor in light.graph.initializer}
            computed = (node for node in light.graph.node if node.op_type not in NOT_FOLDED)
            if any(node.input and constants.issuperset(node.input) for node in computed):
                return None
            if now == before:
                break
        else:
            return None
    except (ModelError, OSError):  # it looked into a weight
        return None
    left = [tensor for tensor in light.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    if sorted((tensor.name, *tensor.dims) for tensor in left) != sorted(large):  # was one taken for another's copy?
        return None
    put_back(light, proto)
    return light


def _content(proto: ModelProto) -> bytes:
    """Return a light model's content whatever the order of its nodes: the library sorts them, and it settles at once."""
    ordered = whole_copy(proto)
    ordered.graph.node.sort(key=lambda node: node.SerializeToString(deterministic=True))
    return bytes(ordered.SerializeToString(deterministic=True))


def _count(proto: ModelProto) -> dict[str, int]:
    return dict(sorted(Counter(node.op_type for node in all_nodes(proto.graph)).items()))


def _evaluate(proto: ModelProto, most: int) -> ModelProto:
    """Fold constants, to `most` bytes in all, with ONNX's reference evaluator; remove identities, duplicates, dead nodes."""
    from onnxscript import optimizer

    model = read_ir(proto)
    common.RemoveInitializersFromInputsPass()(model)  # old exporters' weights are inputs, too, which no constants are
    if model.functions:
        with _library("onnx-ir"):
            inline_functions(model)
        proto = ir.to_proto(model)
    _refuse(model)
    infer_into(model, proto)
    _compare_strictly(model)
    lift = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    budget = Budget(most - _constant_bytes(proto), dict(model.opset_imports))
    for _ in range(ROUNDS):
        with _library("onnxscript"):
            folded = optimizer.fold_constants(
                model,
                onnx_shape_inference=True,
                should_fold=budget,
                output_size_limit=sys.maxsize,  # the budget judges
            )
            lift(model)
        _split_as_written(model)
        with _library("onnx-ir"):
            common.CommonSubexpressionEliminationPass()(model)
            common.DeduplicateInitializersPass()(model)
            common.RemoveUnusedNodesPass()(model)
        if not folded.modified:
            break
    _cast_pixels(model)
    tidy(model)
    absorb(model)
    return to_proto(model)


@contextlib.contextmanager
def _library(name: str) -> Iterator[None]:
    """Return what a library raises, which may be anything, as a ModelError: our own faults aren't to be taken for its."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _refuse(model: ir.Model) -> None:
    """Raise ModelError for what the library doesn't come to an end with, or fails on."""
    for node in model.graph.all_nodes():
        reason = ""
        if node.op_type == "FlexAttention":
            reason = "has bodies that don't see the graph around them, where their constants would go"
        elif node.op_type == "BatchNormalization" and attribute(node, "training_mode", 0):
            reason = "has training_mode=1, so that it computes the statistics of its batch, which TensorRT doesn't: export the "
            reason += "model after .eval()"
        elif node.op_type == "CastLike" and not attribute(node, "saturate", 1):
            reason = "doesn't saturate, which folding makes a Cast that does: write the Cast"
        elif node.op_type.startswith("Optional") and node.domain in STANDARD:
            reason = "works on optional values, which TensorRT hasn't"
        if reason:
            raise ModelError(f"{node.name or node.op_type} ({node.op_type}) {reason}")


def _split_as_written(model: ir.Model) -> None:
    """Parts of a list by lengths: onnxscript writes `num_outputs`, which is opset 18's, and lengths as 13's input."""
    opset, editor = opset_of(model), Editor(model)
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Split" and not node.domain]:
        if opset < 18:
            with contextlib.suppress(Refused):
                split_by_lengths(node, editor)
        if opset < 13 and (lengths := constant(operand(node, 1))) is not None:
            node.resize_inputs(1)
            node.attributes["split"] = ir.AttrInt64s("split", lengths.tolist())


def _compare_strictly(model: ir.Model) -> None:
    """Compare integers without "or equal": they aren't greater, or not less. TensorRT-RTX 1.7.1's builder ends the process (a
    segmentation fault) at a decoder's step that puts keys and values where `places == position` and attends where
    `places <= position`. Floats stay: NaN is neither."""
    editor = Editor(model)
    for node in [node for node in model.graph.all_nodes() if node.op_type in _INVERSE and not node.domain]:
        if all(value is not None and value.dtype is not None and value.dtype.is_integer() for value in node.inputs):
            line = Line(editor, node)
            result = line("Not", line(_INVERSE[node.op_type], *node.inputs))
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, [result])


def _cast_pixels(model: ir.Model) -> None:
    """Cast uint8 inputs before what only moves their values, and to uint8 outputs behind it: TensorRT moves no uint8, and
    nothing but a Cast may read such an input."""
    for node in list(model.graph):
        while (moved := _cast_beside(node)) is not None:
            node = moved
    for source in model.graph.inputs:
        sizes_of = [use.node for use in source.uses() if use.node.op_type in ("Shape", "Size")]
        others = [use.node for use in source.uses() if use.node not in sizes_of]
        if source.dtype is not ir.DataType.UINT8 or not sizes_of or [node.op_type for node in others] != ["Cast"]:
            continue
        (cast,) = others
        if cast.graph is model.graph and attribute(cast, "to") in _PIXELS:
            model.graph.remove(cast)
            model.graph.insert_before(model.graph[0], cast)
            for node in sizes_of:
                node.replace_input_with(0, cast.outputs[0])


def _cast_beside(node: ir.Node) -> ir.Node | None:
    """Let a Cast and a node that moves uint8 in front of it, or behind, change places; the first of the two, now."""
    between = node.inputs[0] if node.inputs else None
    before = None if between is None else between.producer()
    if between is None or before is None or (before.domain, node.domain, between.dtype) != ("", "", ir.DataType.UINT8):
        return None
    source, (cast, mover) = before.inputs[0], (node, before) if node.op_type == "Cast" else (before, node)
    kind = None if source is None else attribute(cast, "to") if cast is node else source.dtype
    if cast.op_type != "Cast" or mover.op_type not in SELECTING or kind not in _PIXELS:
        return None
    if is_constant(source) or not read_once(between) or len(node.outputs) > 1:
        return None
    first = ir.Node("", node.op_type, [source, *node.inputs[1:]], node.attributes.values(), name=node.name)
    last = ir.Node("", before.op_type, [None, *before.inputs[1:]], before.attributes.values(), name=before.name)
    last.replace_input_with(0, value := first.outputs[0])
    value.dtype, value.shape = ir.DataType(kind), (source if cast is node else node.outputs[0]).shape
    ir.convenience.replace_nodes_and_values(node.graph, node, [before, node], [first, last], node.outputs, last.outputs)
    return first


def _restored(proto: ModelProto, original: ModelProto) -> ModelProto:
    """Restore what the library loses or varies (the model's own fields, inputs, outputs, node names), and drop debris."""
    graph = proto.graph
    # Initializers that aren't inputs too came with version 4.
    proto.ir_version, proto.model_version = max(original.ir_version, 4), original.model_version
    proto.producer_name, proto.producer_version = original.producer_name, original.producer_version
    proto.domain, proto.doc_string = original.domain, original.doc_string
    graph.name, graph.doc_string = original.graph.name or "graph", original.graph.doc_string
    used = {node.domain for node in all_nodes(graph)}
    refill(proto.metadata_props, original.metadata_props)
    refill(proto.opset_import, [item for item in original.opset_import if item.domain in {"", *used}])
    initializers = {tensor.name for tensor in original.graph.initializer}
    refill(graph.input, [value for value in original.graph.input if value.name not in initializers])
    refill(graph.output, original.graph.output)
    forget_inner_shapes(proto)
    del graph.metadata_props[:]
    graph.initializer.sort(key=lambda item: item.name)  # in place: a message's memory grows with what is put in anew
    for item in (*graph.initializer, *all_nodes(graph)):
        item.ClearField("metadata_props")  # the exporter's stack traces: paths of one machine
        item.ClearField("doc_string")
    _name_nodes(proto, original)
    return proto


def _name_nodes(proto: ModelProto, original: ModelProto) -> None:
    """Give every node its name in the original graph, or one made from its output; all different."""
    producer = {name: node for node in all_nodes(original.graph) for name in node.output}
    known, taken = {node.name for node in producer.values()}, set[str]()
    for node in all_nodes(proto.graph):
        output = next(iter(node.output), "")
        if output in producer and producer[output].op_type == node.op_type:
            node.name = producer[output].name  # a branch that was decided, or inlined, has another
        elif node.name.startswith("node_") and node.name not in known:  # counted by onnx-ir, otherwise each time
            node.name = ""
        node.name = unique(node.name or f"{node.op_type}_{output}", taken)
