"""Find what a TensorRT can't take whatever its parser says, read off the graph before the parser is asked.

Its parser answers types that it hasn't with an assertion of its own source, without the tensor's name; other uses pass it and
fail after minutes in the builder. The rules are those of TensorRT-RTX 1.7, each seen there (docs/results/zoo.md).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, defs

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
    inferred_values,
    tensor_info,
    to_array,
)

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
    **dict.fromkeys(QDQ, "build from the float model with `int8=True`, or quantize with constant scales"),
}
_NARROW = {"float8_e4m3fn", "int4", "float4_e2m1fn"}
_SIZED = {"ConstantOfShape", "Expand", "Pad", "Range", "Reshape", "Resize", "Slice", "Tile", "Upsample"}  # by values
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
    graphs = [*all_graphs(proto.graph)]
    weights = {tensor.name: dtype_name(tensor.data_type) for graph in graphs for tensor in graph.initializer}
    ends = {value.name for graph in graphs for value in (*graph.input, *graph.output)}
    kinds = {name: tensor_info(value).dtype for name, value in inferred_values(proto).items()} | weights
    problems, constants = [*_ends(graphs[0], weights.keys(), kinds, {*types, UNKNOWN})], Links(proto.graph).constants
    own = {(function.domain, function.name) for function in proto.functions}
    for node in all_nodes(proto.graph):
        read = [(f"reads the constant {name!r} of", name) for name in node.input if name in weights]
        given = [(f"gives {name!r} in", name) for name in node.output if name not in ends]
        for text, name in (*read, *given):
            if (kind := kinds.get(name, UNKNOWN)) not in {*types, UNKNOWN}:
                way_out = _LIST if kind == "sequence" else OUTSIDE
                text = f"{text} type {kind}, which TensorRT hasn't; {way_out}"
                problems.append(Issue(node.name, node.op_type, text))
        if node.domain in STANDARD:
            if node.op_type in absent:
                problems.append(Issue(node.name, node.op_type, absent[node.op_type]))
            if text := _misuse(node, constants, kinds):
                problems.append(Issue(node.name, node.op_type, text))
        elif defs.has(node.op_type) and (node.domain, node.op_type) not in own:
            text = f"is {node.domain}'s, and TensorRT's parser, which looks at the name alone, takes it for ONNX's own operator"
            problems.append(Issue(node.name, node.op_type, f"{text}: give the operator another name"))
    return tuple(dict.fromkeys(problems))


def _ends(graph: GraphProto, weights: Set[str], kinds: Mapping[str, str], types: Set[str]) -> Iterator[Issue]:
    """Inputs and outputs that TensorRT hasn't."""
    inputs = [value.name for value in graph.input if value.name not in weights]
    outputs = [value.name for value in graph.output]
    for name in (name for name in outputs if name in inputs):
        text = "the output is an input, too, and TensorRT's have different names"
        yield Issue(name, "", f"{text}: leave it out, or give it a name of its own by an Identity")
    for side, names in (("input", inputs), ("output", outputs)):
        for name in names:
            if kinds[name] not in types and name not in weights:
                yield Issue(name, "", f"the {side} is of type {kinds[name]}, which TensorRT hasn't; {OUTSIDE}")


def _misuse(node: NodeProto, constants: Mapping[str, TensorProto], kinds: Mapping[str, str]) -> str:
    """Say which zero point, scale, Cast or TopK TensorRT doesn't take; empty: none."""
    if node.op_type in QDQ:
        zero = node.input[2] if len(node.input) > 2 else ""
        if zero and zero not in constants and not kinds.get(zero, "").startswith("float"):
            return f"its zero point {zero!r} isn't constant, which TensorRT needs; quantize with constant parameters"
        held = constants.get(node.input[1])
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        scale = to_array(held).astype(np.float32) if held is not None and held.data_type in floats else np.ones(1)
        if len(bad := np.flatnonzero(~((scale > 0) & np.isfinite(scale)))):
            where = f" in channel {bad[0]}{' and others' * (len(bad) > 1)}" if scale.size > 1 else ""
            text = f"its scale {node.input[1]!r}, of {node.input[0]!r}, is {scale.reshape(-1)[bad[0]]:g}{where}"
            return f"{text}; TensorRT takes positive, finite ones only"
    elif node.op_type == "Cast" and (narrow := _NARROW & {kinds.get(node.input[0]), kinds.get(node.output[0])}):
        text = "TensorRT makes by QuantizeLinear and reads by DequantizeLinear alone"
        return f"casts values of {min(narrow)}, which {text}: write that in its place, with a scale of 1"
    elif node.op_type == "TopK":
        k = constants.get(node.input[1]) if len(node.input) > 1 else None
        most = int(to_array(k).max(initial=0)) if k is not None else attribute(node, "k", 0)
        if most > MOST_OF_TOPK:
            return f"takes the best {most}, and TensorRT's at most {MOST_OF_TOPK}: export the model with a smaller k"
    return ""


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
    plugins = sorted({node.op_type for node in refused if node.op_type.endswith("_TRT")})  # as TensorRT calls its own
    gpu = "TensorRT itself, on a GPU (`backend='tensorrt'`), has {} as a plugin, if that version does; TensorRT-RTX has none"
    ways += map(gpu.format, plugins)
    if any(domain != "." and not domain.startswith(("ai.onnx.", "com.microsoft.")) for domain in domains) and not ways:
        ways.append(
            "name the library that has it, `plugins=['LIB.so']`, and what computes it elsewhere, `operators=['OPS.py']` "
            "(docs/custom-operators.md); or write it with ONNX's own operators"
        )
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
