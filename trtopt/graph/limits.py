"""Find what a TensorRT can't take whatever its parser says, read off the graph before the parser is asked.

Its parser answers types that it hasn't with an assertion of its own source, without the tensor's name; other uses pass it and
fail after minutes in the builder. The rules are those of TensorRT-RTX 1.7, each seen there (docs/results/zoo.md).
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trtopt.core.options import named
from trtopt.core.values import Issue
from trtopt.graph.cut import ends_before
from trtopt.graph.fixed_inputs import how_to_decide, with_file
from trtopt.graph.op_types import QDQ
from trtopt.graph.proto import (
    PLUGIN_DOMAIN,
    STANDARD,
    UNKNOWN,
    Links,
    all_graphs,
    all_nodes,
    attribute,
    dtype_name,
    infer_shapes,
    tensor_info,
    to_array,
)

# Types that hold quantized numbers: TensorRT makes them by QuantizeLinear and lets nothing but DequantizeLinear compute.
_QUANTIZED_ONLY = frozenset(("float8_e4m3fn", "int4", "float4_e2m1fn"))
_MOVING = ("Concat", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape")
# A Clip's bounds become its own numbers; the parser refuses integer arithmetic itself.
_OWN_REFUSALS = {
    "Constant", "Clip", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear",
}  # fmt: skip
MOST_NUMBERS = 1 << 32  # of a tensor of fixed sizes; the builder would fill the machine's memory before it gives up
MOST_OF_TOPK = 3840  # in every TensorRT; its builder says so, after minutes
_OWNERS = {  # domain → what to do about its operators
    "ai.onnx.ml": "no TensorRT has operators of ai.onnx.ml (scalers, linear models, trees, texts): run that part outside the "
    "engine, in ONNX Runtime, and convert the network alone, or write a scaling into its PyTorch module",
    "com.microsoft": "com.microsoft's operators are ONNX Runtime's own: where its optimizer or quantizer wrote them, give the "
    "model from before",
}
_EVAL = "it is in training mode: export the model after .eval()"
_DO_OTHERWISE = {  # operators by what models compute the same by
    "NonZero": "where it comes of a boolean mask as an index (x[mask], x[mask] = y), compute all of x and choose by "
    "torch.where or a product with the mask; TensorRT itself, on a GPU (`backend='tensorrt'`), has the operator",
    "NonMaxSuppression": "do NMS on the engine's outputs (docs/export.md); TensorRT itself, on a GPU (`backend='tensorrt'`), "
    "has the operator",
    "DFT": "multiply by a constant matrix of cosines and sines (torch.matmul), or do it outside the engine",
    "RoiAlign": "TensorRT itself, on a GPU (`backend='tensorrt'`), has the operator",
    "ImageScaler": "ONNX has dropped it: convert the model for images scaled before, or write Mul and Add in its place",
    **dict.fromkeys(("Dropout", "BatchNormalization"), _EVAL),
    **dict.fromkeys(
        QDQ,
        "build from the float model with `int8=True`, or quantize with symmetric int8 activations and weights (ONNX Runtime: "
        "ActivationSymmetric, WeightSymmetric, QuantType.QInt8)",
    ),
}
_SIZED = {"ConstantOfShape", "Expand", "Pad", "Range", "Reshape", "Resize", "Slice", "Tile", "Upsample"}  # by values
_PLUGINS = {  # plugins of TensorRT's own → the first release without; RTX has none
    **dict.fromkeys(("BatchedNMS_TRT", "BatchedNMSDynamic_TRT", "EfficientNMS_ONNX_TRT"), "11"),
    **dict.fromkeys(
        ("EfficientNMS_TRT", "ROIAlign_TRT", "PyramidROIAlign_TRT", "MultiscaleDeformableAttnPlugin_TRT"), ""
    ),
}
_LIST = (
    "a list whose length or places aren't known before: export the model with one tensor there (torch.stack, torch.cat)"
)
OUTSIDE = "convert it outside the network, or export the model with float32, int32 or int64 there"


def issues(proto: ModelProto, types: Collection[str], absent: Mapping[str, str]) -> tuple[Issue, ...]:
    """Everything in a folded graph that can't be built.

    Args:
        types: tensor types that this TensorRT has, as NumPy and ml_dtypes name them.
        absent: operator → why it has no implementation, though the parser takes it.
    """
    rules = _Limits(proto, {*types, UNKNOWN})
    problems = [*rules.ends()]
    for node in all_nodes(proto.graph):
        problems += rules.types_of(node)
        if node.domain in STANDARD:
            if node.op_type in absent:
                problems.append(Issue(node.name, node.op_type, absent[node.op_type]))
            problems += rules.quantized(node)
    return tuple(dict.fromkeys(problems))


def instead(
    proto: ModelProto, operators: Collection[str], model: ModelProto, path: str | os.PathLike[str] | None
) -> str:
    """Return what to do where operators are refused: by their owner, by what computes the same, by where to end before them.

    Args:
        proto: the graph in which they were refused.
        model, path: as the user gave it.
    """
    refused = [node for node in all_nodes(proto.graph) if node.op_type in operators]
    domains = {f"{node.domain}." for node in refused}
    own = {node.op_type for node in refused if node.domain in (*STANDARD, PLUGIN_DOMAIN)}
    ways = [what for owner, what in _OWNERS.items() if any(domain.startswith(f"{owner}.") for domain in domains)]
    ways += dict.fromkeys(what for operator, what in _DO_OTHERWISE.items() if operator in own)
    for name in sorted({node.op_type for node in refused} & _PLUGINS.keys()):
        until = f" before {_PLUGINS[name]}" * bool(_PLUGINS[name])
        ways.append(
            f"TensorRT itself{until}, on a GPU (`backend='tensorrt'`), has {name} as a plugin; TensorRT-RTX has none"
        )
    if any(domain != "." and not domain.startswith(("ai.onnx.", "com.microsoft.")) for domain in domains) and not ways:
        ways.append("trtopt loads no plugins: write it with ONNX's own operators, or run that part outside the engine")
    if path is not None and own <= _SIZED and (decide := how_to_decide(model, own)):
        return with_file(decide, path)
    if own <= {"Dropout", "BatchNormalization", *QDQ} and own and ways:
        return "; ".join(ways)
    if line := ending_before(model, operators, path):
        ways.insert(0, f"end the model before it: {line}")
    return "; ".join(ways)


def ending_before(model: ModelProto, operators: Collection[str], path: str | os.PathLike[str] | None) -> str:
    """Return what to type to end a model's file before operators; empty: there is no file, or no such place."""
    if path is None or not (ends := ends_before(model, operators)):
        return ""
    made = str(Path(path).with_suffix(".cut.onnx"))
    return f"trtopt check {shlex.quote(os.fspath(path))} {named('outputs', ','.join(ends))} {named('fix', made)}"


class _Limits:
    def __init__(self, proto: ModelProto, types: Collection[str]) -> None:
        self.types, self.graph = types, infer_shapes(proto).graph
        self.weights = {tensor.name for graph in all_graphs(proto.graph) for tensor in graph.initializer}
        self.constants = Links(proto.graph).constants
        self.kinds, self.declared, self.counts = dict[str, str](), set[str](), dict[str, int]()
        for graph in all_graphs(self.graph):
            self.declared.update(value.name for value in (*graph.input, *graph.output))
            values = (*graph.input, *graph.value_info, *graph.output)
            self.kinds |= {value.name: tensor_info(value).dtype for value in values}
            shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
            self.counts |= {name: math.prod(shape) for name, shape in shapes.items()}  # open sizes are 0 here
            self.kinds |= {tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer}

    def ends(self) -> Iterator[Issue]:
        inputs = [value.name for value in self.graph.input if value.name not in self.weights]
        outputs = [value.name for value in self.graph.output]
        for name in outputs:
            if name in inputs:
                text = "the output is an input, too, and TensorRT's have different names"
                yield Issue(name, "", f"{text}: leave it out, or give it a name of its own by an Identity")
        for side, names in (("input", inputs), ("output", outputs)):
            for name in names:
                if self.kinds[name] not in self.types and name not in self.weights:
                    text = f"the {side} is of type {self.kinds[name]}, which TensorRT hasn't"
                    yield Issue(name, "", f"{text}; {OUTSIDE}")

    def types_of(self, node: NodeProto) -> Iterator[Issue]:
        """Constants that it reads and results of types that this TensorRT hasn't."""
        constants = [(f"reads the constant {name!r} of", name) for name in node.input if name in self.weights]
        results = [(f"gives {name!r} in", name) for name in node.output if name not in self.declared]
        for text, name in (*constants, *results):
            if (kind := self.kinds.get(name, UNKNOWN)) not in self.types:
                way_out = _LIST if kind == "sequence" else OUTSIDE
                yield Issue(node.name, node.op_type, f"{text} type {kind}, which TensorRT hasn't; {way_out}")
        for name in node.output:
            if (count := self.counts.get(name, 0)) > MOST_NUMBERS:
                text = f"gives {count:,} numbers in {name!r}; up to {MOST_NUMBERS:,} are built: make the sizes smaller"
                yield Issue(node.name, node.op_type, text)

    def quantized(self, node: NodeProto) -> Iterator[Issue]:
        """Quantized types where TensorRT doesn't take them, and zero points that aren't constant."""
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = node.input[2] if len(node.input) > 2 else ""
            if zero and zero not in self.constants and not self.kinds.get(zero, "").startswith("float"):
                text = f"its zero point {zero!r} isn't constant, which TensorRT needs"
                yield Issue(node.name, node.op_type, f"{text}; quantize with constant parameters")
            yield from self._scale(node)
        elif node.op_type == "TopK":
            k = self.constants.get(node.input[1]) if len(node.input) > 1 else None
            most = int(to_array(k).max(initial=0)) if k is not None else attribute(node, "k", 0)
            if most > MOST_OF_TOPK:
                why = f"takes the best {most}, and TensorRT's at most {MOST_OF_TOPK}: export the model with a smaller k"
                yield Issue(node.name, "TopK", why)
        elif node.op_type not in (*_MOVING, *_OWN_REFUSALS):
            instead = (
                "TensorRT has it for quantized values only: use QuantizeLinear and DequantizeLinear, or another type"
            )
            for side, names in (("reads", node.input), ("gives", node.output)):
                for name in names:
                    kind = self.kinds.get(name, "")
                    if kind in _QUANTIZED_ONLY or (kind == "int8" and side == "reads" and name in self.constants):
                        what = "the int8 constant " if kind == "int8" else ""
                        yield Issue(node.name, node.op_type, f"{side} {what}{name!r} in type {kind}; {instead}")
                        return

    def _scale(self, node: NodeProto) -> Iterator[Issue]:
        held = self.constants.get(node.input[1])
        if held is None or held.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            return
        scale = to_array(held).astype(np.float32)
        if len(bad := np.flatnonzero(~((scale > 0) & np.isfinite(scale)))):
            where = f" in channel {bad[0]}{' and others' * (len(bad) > 1)}" if scale.size > 1 else ""
            text = f"its scale {node.input[1]!r}, of {node.input[0]!r}, is {scale.reshape(-1)[bad[0]]:g}{where}"
            yield Issue(node.name, node.op_type, f"{text}; TensorRT takes positive, finite ones only")
