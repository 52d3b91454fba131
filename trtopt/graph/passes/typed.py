"""FP16 and BF16 in the graph itself: every tensor gets the type it will really have, with casts where types meet.

TensorRT 10's strongly typed mode, 11 and TensorRT-RTX take precision from here and from nowhere else; 8.6 takes the
same decisions (`keep_fp32`) as layer precisions beside its flags.

Only tensors that are FP32 in the model change: what is FP16, BF16 or FP64 there is what its author wanted. Which of a node's
tensors may change, and which go together, is read off ONNX's own operator schemas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.operators import known
from trtopt.core.values import Kept, Override, Precision, overriding
from trtopt.graph.op_types import CONTROL_FLOW, MULTIPLYING, QDQ, RECURRENT, RESHAPING, SELECTING
from trtopt.graph.passes.casts import IR_TYPES, PINNED_SLOTS, Typing, is_fp32, scale_and_shift
from trtopt.graph.passes.result import PassResult
from trtopt.graph.proto import STANDARD
from trtopt.graph.view import Editor, constant, drop_unread, is_constant, is_float, operand, opset_of, read_once, slots

FP16_MAX = 65504.0
MARGIN = 2.0  # how much larger values may be on samples that weren't measured
# Beyond these a constant means "minus infinity" (attention masks), not a quantity: models write -3.4e38, -1e9, -1e12.
SENTINEL = 1e30
MASK = -1e8

_WITH_VARIANCE = ("LayerNormalization", "InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization")
_SQUARES = ("ReduceSumSquare", "ReduceL2", "LpNormalization", "RMSNormalization")
_OVERFLOWS = {
    "Exp": "e^x passes 65504 at x = 11.1",
    "Pow": "powers pass 65504 early (256² does)",
    "ReduceProd": "products pass 65504",
    "ReduceLogSumExp": "sums of exponentials pass 65504",
    **dict.fromkeys(("ReduceSum", "ReduceL1", "ReduceLogSum", "CumSum"), "sums pass 65504"),
    **dict.fromkeys(_SQUARES, "sums of squares pass 65504"),
    **dict.fromkeys(_WITH_VARIANCE, "its variance sums squares, which pass 65504"),
    "BatchNormalization": "not folded into a convolution, and its scale isn't constant or doesn't fit FP16",
}
# Refused in that type by the parser or builder of TensorRT-RTX 1.7, each tried alone.
_WITHOUT = {
    Precision.BF16: {
        "HardSwish", "Mish", "LpNormalization", "GlobalLpPool", "MeanVarianceNormalization", "Shrink", "ConvTranspose", "GRU",
    },
    Precision.FP16: {"Celu", "TensorScatter"},
}  # fmt: skip
_VARIANCE_TAIL = ("ReduceMean", "ReduceSum", "Add", "Max", "Sqrt", "Reciprocal", "Div")
_GUARDED = {"Log": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}  # what zero makes infinite, and in which slot
_STILL_ZERO = (*SELECTING, "Sqrt")  # give zeros of zeros
_LEAST = 2.0**-25  # half of the smallest number that FP16 holds


def typed_opset(base: Precision, quantized: bool) -> int:
    """The first opset whose operators can have the type: Conv and pooling BF16, Q/DQ scales of FP16; 1 where any can."""
    return 22 if base is Precision.BF16 else 19 if quantized and base is not Precision.FP32 else 1


def near_fp16_end(largest: float) -> bool:
    """Return whether a tensor of that magnitude comes nearer than `MARGIN` to FP16's largest number, or goes beyond."""
    return largest * MARGIN > FP16_MAX


def overflowing(model: ir.Model, beyond: Mapping[str, float]) -> dict[str, str]:
    """Node → why it can't run in FP16, of all that give or read a tensor that comes near FP16's end, or goes beyond.

    Args:
        beyond: tensor → the largest magnitude seen, of those that are `near_fp16_end`.
    """
    reasons: dict[str, str] = {}
    inputs = {str(value.name) for value in model.graph.inputs}
    for node in model.graph:
        for verb, tensors in (("gives", node.outputs), ("reads", node.inputs)):
            names = [str(value.name) for value in tensors if value is not None and value.name in beyond]
            if names:
                name = max(names, key=lambda item: beyond[item])
                where = f"the input {name!r}" if name in inputs else repr(name)
                reasons.setdefault(str(node.name), f"{verb} {_compared(beyond[name])}, in {where}")
    return reasons


def _compared(largest: float) -> str:
    if largest > FP16_MAX:
        return f"{largest:,.0f} > {FP16_MAX:,.0f}, FP16's largest number"
    return f"{largest:,.0f} > {FP16_MAX / MARGIN:,.0f}, half of FP16's largest number, with a margin for other samples"


def typed_already(model: ir.Model) -> Precision | None:
    """FP16 or BF16 where most convolutions and matrix products compute in it: the model's author has chosen its types."""
    counts = Counter(node.outputs[0].dtype for node in model.graph if node.op_type in MULTIPLYING)
    halves = (Precision.FP16, Precision.BF16)
    return next((base for base in halves if 2 * counts[IR_TYPES[base]] >= sum(counts.values()) > 0), None)


def keep_fp32(
    model: ir.Model, base: Precision, overrides: Sequence[Override] = (), measured: Mapping[str, str] | None = None
) -> tuple[Kept, ...]:
    """Nodes that must not run in `base`: what would overflow, what computes shapes, what the user named.

    For weakly typed builds, which choose among the types that TensorRT has for a layer: what ONNX says of them doesn't count.

    Args:
        measured: node → why samples say that it must stay in FP32.
    """
    return tuple(_kept(model, base, overrides, measured or {}, typed=False).values())


def to_typed(
    model: ir.Model,
    base: Precision,
    *,
    io_fp32: bool = True,
    overrides: Sequence[Override] = (),
    measured: Mapping[str, str] | None = None,
) -> PassResult:
    """Make the FP32 tensors of a graph `base`, with FP32 kept where `keep_fp32` says, and where ONNX or TensorRT has no other.

    A model that is typed already keeps its types; only the scales of Q/DQ pairs become `base`.

    Args:
        model: an FP32 graph, with or without Q/DQ pairs (their scales become `base` too, as strongly typed builds need), at
            opset `typed_opset` or newer.
        base: FP16 or BF16; FP32 leaves the graph as it is.
        io_fp32: leave the network's inputs and outputs FP32, with casts inside.
        measured: as for `keep_fp32`.

    Returns:
        what changed are the nodes of the main graph that compute in the reduced type.
    """
    if base is Precision.FP32:
        return PassResult(model)
    if not opset_of(model):
        model.opset_imports[""] = 17  # for its casts: what every generation reads
    kept = _kept(model, base, overrides, measured or {}, typed=True)
    typing = Typing(model, base, io_fp32, kept)
    typing.apply()
    return PassResult(model, typing.reduced, tuple(kept.values()))


def _kept(
    model: ir.Model, base: Precision, overrides: Sequence[Override], measured: Mapping[str, str], *, typed: bool
) -> dict[str, Kept]:
    """Return the nodes that stay in FP32, by name, each with the first reason found."""
    kept, own, from_shape = dict[str, Kept](), typed_already(model), _shape_arithmetic(model.graph)

    def keep(node: ir.Node, reason: str) -> None:
        kept.setdefault(str(node.name), Kept(str(node.name), node.op_type, Precision.FP32, reason))

    asked = {node: overriding(overrides, node.name or "", node.op_type) for node in model.graph}
    for node, precision in asked.items():
        if precision is Precision.FP32:
            keep(node, "`precision_override=` asks for fp32")
        elif node.op_type in CONTROL_FLOW:
            keep(node, "control flow: its body stays as it is")
        elif not any(map(is_fp32, node.outputs)):
            continue
        elif own is not None and node.op_type not in QDQ:
            keep(node, f"FP32 in the model, which is {str(own).upper()} already: its types are its author's")
        elif (typed or node.domain not in STANDARD) and (reason := _untyped(node, base, model.opset_imports)):
            keep(node, reason)
        elif node in from_shape:
            keep(node, "computes shapes, which FP16 holds exactly only up to 2048")
        elif node.op_type in _WITHOUT.get(base, ()):
            keep(node, f"TensorRT has no {str(base).upper()} {node.op_type}")
        elif precision is not None:
            continue
        elif reason := measured.get(str(node.name), ""):
            keep(node, reason)
        elif base is not Precision.FP16:
            continue
        elif node.op_type == "BatchNormalization" and scale_and_shift(node) is not None:
            continue  # one multiplication and addition per channel, whose factors fit
        elif node.op_type in _OVERFLOWS and not _clipped(node):
            keep(node, _OVERFLOWS[node.op_type])
        elif node.op_type == "Mul" and node.inputs[0] is node.inputs[1]:
            keep(node, "squares pass 65504 early (256² does)")
        elif (largest := _largest_constant(node)) > FP16_MAX:
            keep(node, f"holds a constant of magnitude {largest:.3g}; FP16 ends at 65504")
    if base is Precision.FP16:
        squares = [node for node in asked if node.op_type in ("Pow", "Mul") and str(node.name) in kept]
        unsafe = [node for node in squares if kept[str(node.name)].reason != measured.get(str(node.name))]
        for node in _behind_squares(unsafe, asked):
            keep(node, "follows a square (variance or norm); its input may pass 65504")
        for node, reason in _guards(asked):
            keep(node, reason)
    for node in model.graph if typed else ():
        if node.op_type in RECURRENT and node.name in kept:
            for mover in _feeding(node):
                keep(mover, f"moves what {node.name} reads, which stays in FP32")
    return kept


def _clipped(node: ir.Node) -> bool:
    """Return whether it is the Exp of what a Clip keeps where FP16 holds e^x, with all its digits."""
    clip = node.inputs[0] and node.inputs[0].producer()
    least, most = (constant(operand(clip, slot)) if clip and clip.op_type == "Clip" else None for slot in (1, 2))
    return node.op_type == "Exp" and least is not None and most is not None and least.min() >= -9 and most.max() <= 11


def _feeding(node: ir.Node) -> Iterator[ir.Node]:
    """Return what only moves a node's inputs: TensorRT's recurrent layers can't read through a cast in front of it."""
    for value in node.inputs:
        while value is not None and read_once(value) and (mover := value.producer()) is not None:
            if mover.op_type not in (*RESHAPING, "Transpose"):
                break
            yield mover
            value = mover.inputs[0]


def _untyped(node: ir.Node, base: Precision, opsets: Mapping[str, int]) -> str:
    """Return why the node's FP32 results can't be of type `base`, or an empty string."""
    types = slots(node, opsets.get(node.domain, 1))
    custom = known(node.domain, node.op_type) if node.domain not in STANDARD else None
    if types is None or (node.domain not in STANDARD and custom is None):
        return f"{node.op_type} of {node.domain} isn't one of ONNX's own operators: which types it takes isn't known"
    if custom is not None and str(base) not in custom.types:
        return f"the operator {custom.name} takes {', '.join(custom.types)}"
    if any(value is not None and not isinstance(value.type, (ir.TensorType, type(None))) for value in node.inputs):
        return "works on sequences, which TensorRT hasn't"
    unknown = [value.name for value in node.inputs if value is not None and value.dtype is None]
    if unknown:
        return f"the type of {unknown[0]} isn't known"
    if node.op_type in ("Cast", "CastLike", "Constant", "ConstantOfShape", "Einsum"):
        return ""  # ONNX has Einsum in FP16 only; TensorRT runs it in BF16 as well
    operand_types = {kind for value, kind in zip(node.inputs, types.inputs) if value is not None}
    for value, kind in zip(node.outputs, types.outputs):
        if is_fp32(value) and not types.takes(kind, IR_TYPES[base]):
            return f"ONNX gives {node.op_type} no {str(base).upper()} type here"
        if is_fp32(value) and kind not in operand_types and node.op_type != "DequantizeLinear":
            return f"the type of what {node.op_type} gives doesn't follow its inputs"
    return ""


def _behind_squares(squares: Sequence[ir.Node], asked: Mapping[ir.Node, Precision | None]) -> Iterator[ir.Node]:
    """A square is only safe if what follows it (mean, + epsilon, square root, division) stays FP32 as well."""
    chain = set(squares)
    for node, precision in asked.items():
        after = any(item in chain and item.op_type != "Div" for item in node.predecessors())
        if after and precision is None and node.op_type in _VARIANCE_TAIL:
            chain.add(node)
            yield node


def _guards(asked: Mapping[ir.Node, Precision | None]) -> Iterator[tuple[ir.Node, str]]:
    """`x + 1e-8` or `max(x, 1e-10)` before a logarithm or a division: in FP16 the constant is zero, and guards nothing."""
    for node in asked:
        if (lost := _lost_guard(node)) is not None:
            moved, readers = _guarded(node)
            for item in [*moved, *readers] if readers else ():
                if asked.get(item) is None:
                    yield item, f"{lost[1].max():.2g} keeps values from zero, and is zero in FP16"


def _guarded(guard: ir.Node) -> tuple[list[ir.Node], list[ir.Node]]:
    """Return a guard with what moves its result, and what zero would make infinite there."""
    moved, readers = [guard], list[ir.Node]()
    for item in moved:  # which grows
        uses = list(item.outputs[0].uses())
        readers += [use.node for use in uses if _GUARDED.get(use.node.op_type) == use.idx]
        after = dict.fromkeys(use.node for use in uses if use.idx == 0 and use.node.op_type in _STILL_ZERO)
        moved += [mover for mover in after if mover not in moved]
    return moved, list(dict.fromkeys(readers))


def raise_guards(model: ir.Model) -> PassResult:
    """Raise what divisors are at least, as in PyTorch's normalize, to what FP16 holds, for weakly typed builds.

    Within its regions 8.6 doesn't keep to `keep_fp32`, and swin_v2 was NaN. A summand, as in LayerNormalization, stays: it
    changes all values.
    """
    editor, changes = Editor(model), list[str]()
    for node in model.graph:
        lost = None if node.op_type == "Add" else _lost_guard(node)
        if lost is not None and {item.op_type for item in _guarded(node)[1]} == {"Div"}:
            slot, content = lost
            least = np.full(content.shape, 2 * _LEAST, content.dtype)
            node.replace_input_with(slot, editor.constant(f"{node.name}/least", least))
            changes.append(str(node.name))
    drop_unread(model.graph)
    return PassResult(model, changes)


def _lost_guard(node: ir.Node) -> tuple[int, NDArray[Any]] | None:
    """Return the slot of the constant by which a node's results stay above zero, and it, where FP16 rounds it to zero."""
    slots = {"Add": (0, 1), "Max": range(len(node.inputs)), "Clip": (1,)}.get(node.op_type, ())
    for slot in slots:
        content = constant(operand(node, slot))
        if content is not None and content.size and content.min() > 0 and content.max() <= _LEAST:
            return slot, content
    return None


def _shape_arithmetic(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that compute with sizes in floating point: casts of what comes from Shape, and what is made of those."""
    integers: set[ir.Value] = set()
    floats: set[ir.Node] = set()
    for node in graph:
        varying = [value for value in node.inputs if value is not None and not is_constant(value)]
        of_sizes = varying and all(value in integers or value.producer() in floats for value in varying)
        if of_sizes or node.op_type in ("Shape", "Size"):
            if not any(map(is_float, node.outputs)):
                integers.update(node.outputs)
            elif node.op_type == "Cast" or any(map(is_float, varying)):
                floats.add(node)
    return floats


def _largest_constant(node: ir.Node) -> float:
    largest = 0.0
    for slot, value in enumerate(node.inputs):
        pinned = slot in PINNED_SLOTS.get(node.op_type, ())
        content = constant(value) if is_float(value) and not pinned else None
        if content is None or not content.size:
            continue
        numbers = content.astype(np.float32, copy=False)
        if not max(numbers.max(), -numbers.min()) <= FP16_MAX:  # so large, or not a number: without what isn't meant
            counted = np.isfinite(numbers) & (numbers > MASK) & (numbers < SENTINEL)
            largest = max(largest, float(np.abs(numbers[counted]).max(initial=0.0)))
    return largest
