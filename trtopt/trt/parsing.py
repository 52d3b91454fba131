"""ONNX → TensorRT network: every node that the parser refuses, by name, and the network's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtopt.core.errors import InvalidModel, UnsupportedOperator
from trtopt.core.files import whole
from trtopt.core.values import Issue, TensorInfo
from trtopt.core.words import counted
from trtopt.cuda.tensors import DTYPES
from trtopt.trt.layers import HEAVY_OPS
from trtopt.trt.messages import Messages, in_words, tidy

if TYPE_CHECKING:  # running an engine needs no onnx
    from onnx import ModelProto


def light_model(model: Path) -> ModelProto:
    """A model without the weights that are stored beside it."""
    import onnx

    return onnx.load(str(model), load_external_data=False)


def graph_nodes(light: ModelProto) -> tuple[tuple[str, str], ...]:
    """(name, operator) of every node of the main graph, in file order."""
    # An unnamed node is known by what it gives.
    return tuple((node.name or (node.output[0] if node.output else ""), node.op_type) for node in light.graph.node)


def float_products(light: ModelProto) -> frozenset[str]:
    """Convolutions and matrix products that multiply an operand which isn't quantized, in a graph that quantizes others.

    A layer of theirs may read INT8, where what follows dequantizes and multiplies in one kernel: that isn't INT8 arithmetic.
    """
    from trtopt.graph.op_types import SCALE_PRESERVING

    nodes = light.graph.node
    if not any(node.op_type == "DequantizeLinear" for node in nodes):
        return frozenset()
    quantized_tensors = set[str]()
    for node in nodes:  # in an order in which they can run
        operands = node.input if node.op_type == "Concat" else ()
        if node.op_type in ("Cast", "Relu") or node.op_type in SCALE_PRESERVING:  # TensorRT may dequantize behind them
            operands = node.input[:1]
        if node.op_type == "DequantizeLinear" or (operands and quantized_tensors.issuperset(operands)):
            quantized_tensors.update(node.output)
    named_nodes = zip(graph_nodes(light), nodes)
    return frozenset(
        name for (name, op), node in named_nodes if op in HEAVY_OPS and not quantized_tensors.issuperset(node.input[:2])
    )


def parser_issues(parser: Any, nodes: Sequence[tuple[str, str]]) -> list[Issue]:
    """The parser's errors, each with its node."""
    issues = []
    for error in map(parser.get_error, range(parser.num_errors)):
        number = error.node()
        name, op = nodes[number] if 0 <= number < len(nodes) else ("", "")
        if hasattr(error, "node_name"):  # 8.6 has only the index; later ones also reach into local functions
            name, op = error.node_name() or name, error.node_operator() or op
        if not op:  # an importer that gives up without its node: "importScatterElements"
            importer = str(error.func()).removeprefix("import")
            name, op = next((node for node in nodes if node[1] == importer), ("", ""))
        issues.append(Issue(name, op, _reason(error.desc(), op)))
    return list(dict.fromkeys(issues))


UNEXPLAINED = "TensorRT's parser doesn't support it in this place"
_WITHOUT_GPU = "catchCudaError"  # said besides, of every error on a host without a GPU
_UNKNOWN = ("Plugin not found", "No importer registered", "creator was not found", "found in plugin registry",
            "found in the plugin registry")  # fmt: skip


def _reason(description: str, op: str) -> str:
    lines = str(description).splitlines()
    description = "\n".join([line for line in lines if _WITHOUT_GPU not in line] or lines)
    text = tidy(description)
    if text in ("", "false"):
        return f"TensorRT's parser has no {op}" if op else "TensorRT's parser refuses the model without a reason"
    if any(sign in text for sign in _UNKNOWN):
        return f"TensorRT has neither an operator nor a plugin named {op or 'that'}"
    return in_words(description) or text


def ask_support(parser: Any, model: Path, nodes: Sequence[tuple[str, str]]) -> tuple[Issue, ...]:
    """Every node the parser can't take: those in no supported subgraph, joined with the parser's own reasons."""
    content, path = whole(model, None), str(model)
    if hasattr(parser, "supports_model_v2"):
        good = parser.supports_model_v2(content, path)
        groups = [parser.get_subgraph_nodes(index) for index in range(parser.num_subgraphs)]
    else:
        try:
            good, collection = parser.supports_model(content, path)
        except RuntimeError as error:
            _let_pass(error)
            return (Issue("", "", UNEXPLAINED),)
        groups = [subgraph for subgraph, _ in collection]
    issues = parser_issues(parser, nodes)
    if good:
        return ()
    # A subgraph's own flag says whether it is the whole model; what is unsupported is in no subgraph at all.
    supported_indices = {int(index) for group in groups for index in group}
    explained_nodes = {issue.node for issue in issues}
    for index, (name, op) in enumerate(nodes):
        if index not in supported_indices and name not in explained_nodes:
            issues.append(Issue(name, op, UNEXPLAINED))
    named_issues = [issue for issue in issues if issue.node]
    return tuple(named_issues or issues) or (Issue("", "", "TensorRT's parser refuses the model without a reason"),)


def parse(parser: Any, model: Path, light: ModelProto, messages: Messages, name: str) -> None:
    """Fill the parser's network with `model`, which messages call `name`.

    Raises:
        UnsupportedOperator, InvalidModel: all that the parser says against it.
    """
    try:
        parsed = parser.parse_from_file(str(model))
    except RuntimeError as error:
        _let_pass(error)
        parsed = True
    if parsed and not parser.num_errors:
        return
    issues = parser_issues(parser, graph_nodes(light))
    del parser  # a traceback would keep it alive, longer than its network
    if any(issue.op for issue in issues):
        raise refusal(name, issues)
    reasons = "; ".join(dict.fromkeys([*map(str, issues), *map(tidy, messages.errors)])) or "no reason given"
    raise InvalidModel(f"TensorRT's parser can't read {name}: {reasons}; run `trtopt check {name}`")


def _let_pass(error: RuntimeError) -> None:
    """Raise an error of the parser's, but for that of 8.6 behind a complete network with RoiAlign: it wants to name the library
    that version-compatible plans take with them, which the wheels haven't."""
    if "libnvinfer_vc_plugin" not in str(error):
        raise error


def refusal(name: str, issues: Sequence[Issue]) -> UnsupportedOperator:
    """The error that says what of a model is refused."""
    count = len({issue.node for issue in issues if issue.node}) or len(issues)
    return UnsupportedOperator(f"TensorRT can't take {counted(count, 'part')} of {name}", issues)


def network_inputs(network: Any) -> tuple[tuple[TensorInfo, ...], frozenset[str]]:
    """The network's inputs, dynamic dimensions by name where they have one, and the names of its shape inputs."""
    inputs, shape_inputs = [], set()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        sizes = enumerate(tuple(tensor.shape))
        shape = tuple(size if size >= 0 else (tensor.get_dimension_name(axis) or -1) for axis, size in sizes)
        inputs.append(TensorInfo(tensor.name, DTYPES.get(tensor.dtype.name, "unknown"), shape))
        if tensor.is_shape_tensor:
            shape_inputs.add(tensor.name)
    return tuple(inputs), frozenset(shape_inputs)


# Layers that hold weights: type → class, and role → attribute.
_WEIGHTS = {
    "CONVOLUTION": ("IConvolutionLayer", {"KERNEL": "kernel", "BIAS": "bias"}),
    "DECONVOLUTION": ("IDeconvolutionLayer", {"KERNEL": "kernel", "BIAS": "bias"}),
    "FULLY_CONNECTED": ("IFullyConnectedLayer", {"KERNEL": "kernel", "BIAS": "bias"}),
    "SCALE": ("IScaleLayer", {"SCALE": "scale", "SHIFT": "shift"}),
    "CONSTANT": ("IConstantLayer", {"CONSTANT": "weights"}),
}


def network_weights(module: Any, network: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield the weights of a network: (layer, role), and the values (an array, or Weights of a type that NumPy lacks)."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        name, attributes = _WEIGHTS.get(layer.type.name, ("", {}))
        if name:
            layer.__class__ = getattr(module, name)  # the bindings give the base class
        for role, attribute in attributes.items():
            values = getattr(layer, attribute)
            if values is not None and values.size:
                yield (layer.name, getattr(module.WeightsRole, role)), values


def as_weights(values: Any) -> Any:
    """Return what a refitter takes of an array: all of its memory, as 10.6 gives FP16 weights as arrays of stride 0 (seen)."""
    if not isinstance(values, np.ndarray):
        return values
    return np.lib.stride_tricks.as_strided(values, (values.size,), (values.itemsize,))


def may_change(values: Any, *, scalars: bool) -> bool:
    """Tell if weights are numbers that training changes, and not shapes, axes or masks; `scalars`: a single one is, too."""
    whole = isinstance(values, np.ndarray) and values.dtype.kind in "iub" and values.dtype not in (np.int8, np.uint8)
    return not whole and (scalars or values.size > 1)
