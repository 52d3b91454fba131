"""Hazards of a valid model in TensorRT, FP16 or INT8: findings read off the graph.

The rules look at the folded graph, the one that is built, so that what folding repairs isn't reported as a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from trtopt.core.documents import Plain
from trtopt.core.errors import InvalidModel
from trtopt.core.operators import known
from trtopt.core.shapes import shapes_option
from trtopt.core.values import Issue, Profile, TensorInfo, x
from trtopt.core.words import first_of, grouped
from trtopt.graph.fixed_inputs import how_to_decide
from trtopt.graph.op_types import CONTROL_FLOW, MOVING, WEIGHTED
from trtopt.graph.passes.casts import MASKING
from trtopt.graph.passes.typed import MASK, SENTINEL
from trtopt.graph.proto import STANDARD, Links, all_graphs, opset_version, tensor_info, to_array
from trtopt.graph.traced_batch import TracedBatch
from trtopt.trt.capabilities import Capabilities

LEVELS = ("error", "warning", "info")
_NOT_THERE = ("string", "sequence", "map", "optional", "sparse_tensor", "int16", "uint16", "uint32", "uint64")
_FAINT = 2.0**-14  # FP16's least number with all its digits


@dataclass(frozen=True)
class Finding(Plain):
    """One thing that is wrong, or worth knowing.

    Attributes:
        level: "error" (it won't work), "warning" (it may not), "info".
        code: stable name of the rule, such as "fp16-mask-constant".
        node: the ONNX node, or the tensor where there is no node; the first one where `message` counts several.
        op: the node's operator, or "".
        hint: what to do.
    """

    level: str
    code: str
    node: str
    op: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {Issue(self.node, self.op, self.message)}" + (f"; {self.hint}" if self.hint else "")


def find(proto: ModelProto) -> tuple[Finding, ...]:
    """Findings about a valid, folded model."""
    graph = _Graph(proto)
    with np.errstate(all="ignore"):  # weights may be NaN, infinite or beyond FP16
        return (*_ends(graph), *_operators(graph), *_damaged(graph), *_masks(graph), *_faint(graph))


class _Graph(Links):
    """A model as rules ask of it."""

    def __init__(self, proto: ModelProto) -> None:
        super().__init__(proto.graph)
        self.proto = proto
        self.inputs = [value for value in proto.graph.input if value.name not in self.constants]

    def of(self, *ops: str) -> list[NodeProto]:
        return [node for node in self.nodes if node.op_type in ops and node.domain in STANDARD]

    def read_by(self, tensor: str) -> list[tuple[str, str]]:
        """Name and operator of the nodes that read a tensor; its own name where none does."""
        readers = [(node.name or tensor, node.op_type) for node in self.readers.get(tensor, ())]
        return list(dict.fromkeys(readers)) or [(tensor, "")]

    def tensors(self, *types: int) -> Iterator[tuple[TensorProto, NDArray[Any]]]:
        """The constants of these types, with what they hold."""
        for tensor in self.proto.graph.initializer:
            if tensor.data_type in types:
                yield tensor, to_array(tensor)


def _several(nodes: Sequence[NodeProto], level: str, code: str, message: str, hint: str) -> Iterator[Finding]:
    """One finding for many nodes alike."""
    if nodes:
        message += _such([node.name for node in nodes])
        yield Finding(level, code, nodes[0].name, nodes[0].op_type, message, hint)


def _such(nodes: Sequence[str]) -> str:
    """Return how many nodes a finding on the first of them stands for; empty for one."""
    return f" ({len(nodes)} such nodes: {first_of(nodes, 6)})" if len(nodes) > 1 else ""


def alike(issues: Iterable[Issue], differing: str) -> Iterator[tuple[Issue, str]]:
    """Yield the first issue of each operator and reason, which may differ by a pattern, and how many nodes it stands for."""
    groups = grouped(((issue.op, re.sub(differing, "", issue.reason)), issue) for issue in issues)
    return ((group[0], _such([issue.node for issue in group])) for group in groups.values())


def _ends(graph: _Graph) -> Iterator[Finding]:
    for side, values in (("input", graph.inputs), ("output", graph.proto.graph.output)):
        for info in map(tensor_info, values):
            kind = info.dtype
            if kind in _NOT_THERE or kind.startswith("complex"):
                text = f"the {side} is of type {kind}, which TensorRT hasn't"
                yield Finding("error", "unsupported-type", info.name, "", text, "move that part of the model outside")
            elif kind == "float64":
                text = f"the {side} is float64, which TensorRT silently makes float32"
                yield Finding("warning", f"double-{side}", info.name, "", text, "export the model in float32")


def refuse_damaged(proto: ModelProto, name: str) -> None:
    """Raise InvalidModel where weights hold NaN or infinity; a single infinity is a bound, such as a Clip's."""
    for finding in _damaged(_Graph(proto)):
        if finding.level == "error":
            raise InvalidModel(f"{name}: {str(finding).removeprefix('error: ')}")


def _damaged(graph: _Graph) -> Iterator[Finding]:
    for tensor, values in graph.tensors(TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        floats = values.astype(np.float32, copy=False)
        if not np.isfinite(floats).all() and (floats.size > 1 or np.isnan(floats).any()):
            node, op = graph.read_by(tensor.name)[0]
            if op not in WEIGHTED and not (np.isnan(values) | (values == np.inf)).any():
                text = f"{tensor.name} holds -inf, as a table of masks does: where all of a softmax is masked, NaN comes of it"
                hint = "check that the model means it; -65504 in its place does the same without NaN"
                yield Finding("warning", "mask-weight", node, op, text, hint)
            else:
                level, text = "error" if op in WEIGHTED else "warning", f"{tensor.name} holds NaN or infinity"
                hint = "the weights are damaged, or beyond FP16's 65,504: export them again, in FP32"
                yield Finding(level, "non-finite-weight", node, op, text, hint)


def _masks(graph: _Graph, readers: int | None = 1, *, typed: bool = False) -> Iterator[Finding]:
    """Return finite constants that stand for infinity, as masks do, for each of their first readers.

    A build in FP16 holds these at its end, and keeps what reads other large constants in FP32. `typed`: without those that are
    only added or chosen, of which graphs with types hold so little that sums of three are finite (`passes.casts`).
    """
    masks = {}
    for tensor, values in graph.tensors(TensorProto.FLOAT):
        far = values[np.isfinite(values) & ((values < MASK) | (values > SENTINEL))]
        if far.size:
            masks[tensor.name] = far
    harmless = _masking_once(graph, [name for name, far in masks.items() if far.max() < 0])
    for name, far in masks.items():
        found = graph.read_by(name)
        added = {op for _, op in found} <= MASKING
        if name in harmless or (typed and added):
            continue
        for node, op in found[:readers]:
            if op not in ("Clip", "Min", "Max"):  # a bound that is infinite still bounds nothing
                text = f"{name} holds a mask of {far.flat[int(np.abs(far).argmax())]:.4g}, beyond FP16's ±65504: "
                text += f"sums with it are infinite{' in TensorRT 8.6' * added}, and infinity − infinity is NaN"
                hint = f"`precision_override=['{node}=fp32']`, or use -16384 as the mask"
                yield Finding("warning", "fp16-mask-constant", node, op, text, hint)


def _masking_once(graph: _Graph, masks: Sequence[str]) -> set[str]:
    """Return those of which a softmax alone is made, after one addition at most: held at FP16's end they mask as in FP32.

    The sum of two would be infinite, and a softmax of nothing but such sums NaN.
    """
    reached = {name: {name} for name in masks}  # tensor → the masks in it
    added, harmful = set[str](), set[str]()
    for node in graph.nodes:
        operands = [name for name in node.input if name in reached and node.op_type != "Softmax"]
        held = set[str]().union(*(reached[name] for name in operands))
        if node.op_type == "Add" and len(operands) == 1 and operands[0] not in added:
            added.update(node.output)
        elif node.op_type in (*MOVING, "Max", "Min", "Where"):
            added.update(node.output if not added.isdisjoint(operands) else ())
        else:
            harmful |= held
        reached |= dict.fromkeys(node.output, held) if operands else {}
    given = [value.name for body in all_graphs(graph.proto.graph) for value in body.output]
    return set(masks) - harmful.union(*(reached.get(name, ()) for name in given))


def fp16_hazards(proto: ModelProto, *, typed: bool) -> tuple[Finding, ...]:
    """The constants of a folded model that FP16 doesn't hold, for each node that reads one; `typed`: its build is."""
    graph = _Graph(proto)
    return (*_masks(graph, None, typed=typed), *_faint(graph))


def _faint(graph: _Graph) -> Iterator[Finding]:
    """Return products whose weights FP16 holds with few of their digits, or as zeros."""
    for tensor, values in graph.tensors(TensorProto.FLOAT):
        most = float(max(values.max(initial=0), -values.min(initial=0))) if values.ndim > 1 else 0.0
        for node, op in graph.read_by(tensor.name) if 0 < most < _FAINT else ():
            if op in WEIGHTED:
                text = f"{tensor.name} holds {most:.3g} at most: below 6.1e-05 FP16 loses digits, below 6e-08 all"
                hint = f"`precision_override=['{node}=fp32']`, or scale what is around it"
                yield Finding("warning", "fp16-faint-weights", node, op, text, hint)


def _operators(graph: _Graph) -> Iterator[Finding]:
    custom = [node for node in graph.nodes if node.domain not in STANDARD]
    for domain, op in dict.fromkeys((node.domain, node.op_type) for node in custom):
        nodes = [node for node in custom if (node.domain, node.op_type) == (domain, op)]
        reference = known(domain, op)
        text = f"{op} of {domain} isn't a standard operator: TensorRT needs a plugin"
        text += "; its reference is known" if reference else ", and calibrating and comparing its reference"
        hint = (
            "name them, `plugins=['LIB.so']`, `operators=['OPS.py']` (docs/custom-operators.md), or export without it"
        )
        yield from _several(nodes, "info" if reference else "warning", "custom-operator", text, hint)
    for op in ("NonZero", "NonMaxSuppression", "Unique", "Compress"):
        text = "the shape of its result depends on values, not on shapes"
        hint = "move it outside the engine where you can; TensorRT-RTX has no runner for it"
        yield from _several(graph.of(op), "warning", "data-dependent-shape", text, hint)
    if flow := graph.of(*CONTROL_FLOW):
        sides = "condition fixed, or both sides computed and torch.where between them"
        steps = "steps written out in Python, as torch.export does with a number of them that is fixed"
        decide = how_to_decide(graph.proto) or f"export with the {sides if graph.of('If') else steps}"
        hint = f"{decide}; reduced precision doesn't reach into it"
        yield from _several(flow, "warning", "control-flow", "control flow that folding couldn't decide", hint)


def one_sample(held: TracedBatch, inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Return what holds a batch of 1 in a model whose inputs leave theirs open; an error unless `profiles` ask for no other."""
    if held.length is not None:
        text = f"{held.length.reason}: the trace holds the sizes that it was made at"
        decide = "trtopt check MODEL `set='NAME:SHAPE'` `fix='OUT.onnx'`"
        hint = f"set these ({decide}), or export it again, by trtopt export"
        yield Finding("warning", "length-held", held.length.node, held.length.op, text, hint)
    batched = [info.name for info in inputs if 0 in info.open_axes]
    asked = [ranges.max[:1] for profile in profiles for name, ranges in profile.items() if name in batched]
    alone = [info for info in inputs if info.open_axes]
    shapes = "`shapes=` with a batch of 1 alone"
    if all(info.open_axes == (0,) for info in alone):
        shapes = shapes_option({info.name: x((1, *info.shape[1:])) for info in alone})
    hint = f"export it with the batch taken from the input's shape, or build it for one sample: {shapes}"
    if held.dynamic_model is not None:
        hint = f"trtopt check MODEL `fix='OUT.onnx'` writes it for any batch; or build it for one sample: {shapes}"
    for first, others in alike(held.issues, r"[\dx-]+"):
        level = "info" if asked and {*asked} == {(1,)} else "error" if held.certain else "warning"
        text = f"{first.reason}{others}, though the inputs leave theirs open"
        yield Finding(level, "batch-of-one", first.node, first.op, text, hint)


def opset_findings(proto: ModelProto, can: Capabilities, generation: str) -> Iterator[Finding]:
    """Compare the opset with the newest that a generation's parser reads well."""
    opset, limit = opset_version(proto), can.max_opset
    if limit is not None and opset > limit:
        text = f"opset {opset}; {generation} reads {limit} and older well"
        hint = f"export with `opset={limit}`, or `fix=`, which lowers it"
        yield Finding("warning", "opset-too-new", "", "", text, hint)
