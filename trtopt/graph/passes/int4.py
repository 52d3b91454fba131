"""Weights of matrix products as INT4 codes, a scale for each block of inputs; what they multiply stays FP16 or BF16.

The codes stand in the graph as stored INT4, K × N, behind a DequantizeLinear with `block_size` on axis 0, which TensorRT keeps
in its plan, four bits a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.values import Kept, Precision
from trtopt.graph.passes.casts import IR_TYPES
from trtopt.graph.passes.quantize import FORMATS, quantize_weight, round_scale, weight_scales
from trtopt.graph.passes.result import Line, PassResult, chain
from trtopt.graph.passes.typed import FP16_MAX
from trtopt.graph.view import Editor, attribute, constant, drop_unread, is_constant, operand

FORM = FORMATS[Precision.INT4]


class Coded(NamedTuple):
    """A weight in INT4.

    Attributes:
        codes: K × N, int8: −8…7.
        scale: K / block × N, float32.
    """

    codes: NDArray[np.int8]
    scale: NDArray[np.float32]

    @property
    def block(self) -> int:
        return len(self.codes) // len(self.scale)

    def floats(self) -> NDArray[np.float32]:
        """Return what the codes stand for."""
        return self.codes.astype(np.float32) * np.repeat(self.scale, self.block, axis=0)


def multiplies_weights(node: ir.Node) -> bool:
    """Return whether it is a matrix product with a constant."""
    return node.op_type in ("MatMul", "Gemm") and any(map(is_constant, node.inputs[:2]))


def matrix(node: ir.Node) -> NDArray[np.float32]:
    """The weight of a product that isn't `unsuited`, K × N."""
    content = np.asarray(constant(node.inputs[1]), np.float32)
    return content.T if attribute(node, "transB", 0) else content


def unsuited(node: ir.Node) -> str:
    """Say why the weights of a matrix product stay floating; empty: they needn't."""
    weight, content = node.inputs[1], constant(node.inputs[1])
    if weight is None or content is None:
        return "its weights stand on the left: INT4 takes those on the right"
    if content.ndim != 2 or weight.dtype not in IR_TYPES.values():
        return (
            f"its weights have {content.ndim} axes and are {content.dtype}: INT4 takes two axes of FP32, FP16 or BF16"
        )
    inputs = content.shape[1 if attribute(node, "transB", 0) else 0]
    if not inputs or inputs % FORM.blocks[-1]:
        return f"it has {inputs} inputs, no multiple of {FORM.blocks[-1]}, the fewest that have one INT4 scale"
    if content.size in FORM.blocks:
        return (
            f"it has one output of {inputs} inputs, so one INT4 scale, which TensorRT-RTX 1.7 doesn't take for blocks"
        )
    largest = np.abs(content).max(initial=0)
    return "" if largest <= FP16_MAX else f"its weights reach {largest:.3g}; FP16 ends at 65504"


def nearest(weight: NDArray[np.float32], base: Precision, clip: float = 1.0) -> Coded:
    """The codes nearest to a K × N weight, with scales that `base` holds.

    Args:
        clip: share of a block's largest magnitude that the largest code stands for.
    """
    block = next(size for size in FORM.blocks if len(weight) % size == 0)
    rows = weight.reshape(-1, block, weight.shape[1]).transpose(0, 2, 1).reshape(-1, block)
    scale = round_scale(weight_scales(rows, 0, Precision.INT4) * np.float32(clip), base)
    codes = quantize_weight(rows, scale, 0, Precision.INT4).astype(np.int8)
    shaped = codes.reshape(len(weight) // block, -1, block).transpose(0, 2, 1).reshape(weight.shape)
    return Coded(shaped, scale.reshape(len(weight) // block, -1))


def int4_weights(
    model: ir.Model, base: Precision, left_out: Mapping[str, str], coded: Mapping[str, Coded]
) -> PassResult:
    """Put the constant weights of MatMul and Gemm in INT4, at opset 21 or newer.

    Args:
        base: what the scales will be held in, of weights in FP32.
        left_out: nodes that keep theirs, with the reason.
        coded: node → codes that samples have chosen; the others get the nearest.

    Returns:
        what changed are the products with INT4 weights; kept, all others that multiply with constants.
    """
    editor, made = Editor(model), dict[tuple[Any, ...], ir.Value]()
    changes, kept = list[str](), list[Kept]()
    types = {dtype: precision for precision, dtype in IR_TYPES.items()}
    for node in list(filter(multiplies_weights, model.graph)):
        name, weight = str(node.name), node.inputs[1]
        if reason := left_out.get(name) or unsuited(node):
            kept.append(Kept(name, node.op_type, base, reason))
            continue
        assert weight is not None and weight.dtype is not None  # else it is unsuited
        found, own = coded.get(name), types[weight.dtype]
        key = weight, attribute(node, "transB", 0), id(found)
        if key not in made:
            found = found or nearest(matrix(node), base if own is Precision.FP32 else own)
            made[key] = _dequantized(editor, weight, found)
        node.replace_input_with(1, made[key])
        if node.op_type == "Gemm":
            _as_matmul(node, editor)
        changes.append(name)
    drop_unread(model.graph)
    return PassResult(model, changes, tuple(kept))


def _as_matmul(node: ir.Node, editor: Editor) -> None:
    """Write a Gemm as MatMul and Add: of one with INT4 weights TensorRT 10.6 ends the process ("LLVM ERROR: out of memory")."""
    value, weight, bias = node.inputs[0], node.inputs[1], operand(node, 2)
    line, steps = Line(editor, node, weight.dtype), [("MatMul", weight)]

    def factor(key: str) -> ir.Value | None:
        number = attribute(node, key, 1.0)
        return None if number == 1 else editor.constant(f"{node.name}/{key}", number, weight.dtype.numpy())

    if attribute(node, "transA", 0):
        value = line("Transpose", value, perm=[1, 0])
    if (alpha := factor("alpha")) is not None:
        steps.append(("Mul", alpha))
    if bias is not None:
        beta = factor("beta")
        steps.append(("Add", bias if beta is None else line("Mul", bias, beta)))
    node.graph.insert_before(node, line.nodes)
    chain(node, editor, value, *steps)


def _dequantized(editor: Editor, weight: ir.Value, coded: Coded) -> ir.Value:
    codes = editor.constant(f"{weight.name}_int4", coded.codes.astype(ml_dtypes.int4))
    scale = editor.constant(f"{weight.name}_scale", coded.scale, weight.dtype.numpy())
    output = f"{weight.name}_dequantized", weight.dtype, codes.shape
    node = editor.node("DequantizeLinear", [codes, scale], *output, axis=0, block_size=coded.block)
    editor.graph.insert_before(editor.graph[0], [node])
    return node.outputs[0]
