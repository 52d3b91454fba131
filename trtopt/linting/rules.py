"""What may go wrong with a valid model in TensorRT, FP16 or INT8: findings read off the graph.

The rules look at the folded graph, the one that is built, so that what folding repairs isn't reported as a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from trtopt.core.values import TensorInfo, choice
from trtopt.graph.proto import all_nodes, dtype_name, infer_shapes, opset_version, tensor_info, to_array

LEVELS = ("error", "warning", "info")
FP16_MAX = 65504.0
INT32_MAX = 2**31 - 1
OPEN_END = 2**62  # INT64_MAX and its like stand for "to the end" in Slice
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Elu", "Tanh", "Mish")
DATA_DEPENDENT = ("NonZero", "NonMaxSuppression", "Unique", "Compress")
CONTROL_FLOW = ("If", "Loop", "Scan")
RANGE_PRONE = ("Exp", "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceLogSumExp", "CumSum")
NORMALIZING = ("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization")
INT8_ONLY = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear")
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        level: "error" (it won't work), "warning" (it may not), "info".
        code: stable name of the rule, such as "fp16-weight-overflow".
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

    def __post_init__(self) -> None:
        choice(self.level, LEVELS, "level")

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.node} ({self.op})" if self.node and self.op else self.node or self.op
        where = f"{where}: " if where else ""
        return f"{self.level}: {where}{self.message}" + (f"; {self.hint}" if self.hint else "")


def find(proto: ModelProto) -> tuple[Finding, ...]:
    """Findings about a valid, folded model: errors first, then warnings, then the rest."""
    graph = _Graph(proto)
    with np.errstate(all="ignore"):  # weights may be NaN, infinite or beyond FP16
        found = [finding for rule in RULES for finding in rule(graph)]
    return tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level)))


class _Graph:
    """What rules ask of a model."""

    def __init__(self, proto: ModelProto) -> None:
        self.proto = proto
        self.nodes: list[NodeProto] = list(all_nodes(proto.graph))
        self.initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.users: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.inputs = [tensor_info(value) for value in proto.graph.input if value.name not in self.initializers]
        self.unranked = {
            value.name
            for value in proto.graph.input
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
        }
        inferred = infer_shapes(proto).graph
        self.values: dict[str, TensorInfo] = {
            value.name: tensor_info(value) for value in [*inferred.input, *inferred.value_info, *inferred.output]
        }

    def constant(self, name: str) -> NDArray[Any] | None:
        tensor = self.initializers.get(name)
        if tensor is not None:
            return to_array(tensor)
        node = self.producer.get(name)
        if node is not None and node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            return to_array(node.attribute[0].t)
        if node is not None and node.op_type == "DequantizeLinear" and node.input[0] in self.initializers:
            return to_array(self.initializers[node.input[0]])
        return None

    def weight(self, node: NodeProto) -> NDArray[Any] | None:
        return self.constant(node.input[1]) if len(node.input) > 1 else None

    def of(self, *ops: str) -> list[NodeProto]:
        return [node for node in self.nodes if node.op_type in ops and node.domain in STANDARD_DOMAINS]

    def reader(self, tensor: str) -> tuple[str, str]:
        """Name and operator of the first node that reads a tensor."""
        node = next(iter(self.users.get(tensor, [])), None)
        return (node.name or tensor, node.op_type) if node else (tensor, "")


def _several(nodes: list[NodeProto], level: str, code: str, message: str, hint: str) -> Iterator[Finding]:
    """One finding for many nodes alike."""
    if nodes:
        others = (
            f" ({len(nodes)} such nodes: {', '.join(node.name for node in nodes[:6])}{', …' if len(nodes) > 6 else ''})"
        )
        text = message + (others if len(nodes) > 1 else "")
        yield Finding(level, code, nodes[0].name, nodes[0].op_type, text, hint)


def _inputs(graph: _Graph) -> Iterator[Finding]:
    for info in graph.inputs:
        if info.name in graph.unranked:
            yield Finding(
                "error",
                "input-without-rank",
                info.name,
                "",
                "declares no shape; TensorRT needs its number of dimensions",
                "export it with a shape, dynamic dimensions by name",
            )
        dynamic = [f"{info.shape[axis]} (axis {axis})" for axis in info.open_axes]
        if dynamic:
            named = ", ".join(text.replace("-1 ", "unnamed ") for text in dynamic)
            yield Finding(
                "info",
                "dynamic-input",
                info.name,
                "",
                f"dynamic dimensions: {named}",
            )
        if 0 in info.shape:
            yield Finding(
                "warning",
                "empty-input",
                info.name,
                "",
                f"has no elements (shape {'x'.join(map(str, info.shape))}): nothing goes in",
                "export it with the sizes that it gets, or with dynamic dimensions",
            )
    for info in [*graph.inputs, *map(tensor_info, graph.proto.graph.output)]:
        side = "input" if info in graph.inputs else "output"
        if info.dtype in ("string", "sequence", "map", "optional", "sparse_tensor") or info.dtype.startswith("complex"):
            yield Finding(
                "error",
                "unsupported-type",
                info.name,
                "",
                f"the {side} is of type {info.dtype}, which TensorRT hasn't",
                "move that part of the model outside",
            )
        elif info.dtype == "int64":
            yield Finding(
                "info",
                f"int64-{side}",
                info.name,
                "",
                f"the {side} is int64: TensorRT 8.6 makes it int32, later ones keep it",
                "feed what the engine's manifest says",
            )
        elif info.dtype == "float64":
            yield Finding(
                "warning",
                f"double-{side}",
                info.name,
                "",
                f"the {side} is float64, which TensorRT silently makes float32",
                "export the model in float32",
            )
        elif info.dtype in ("uint8", "int16", "uint16", "uint32", "uint64", "int8"):
            yield Finding(
                "warning",
                f"integer-{side}",
                info.name,
                "",
                f"the {side} is {info.dtype}: TensorRT takes it only if it is cast at once, or not at all",
                "give the network float32 or int32 and convert outside",
            )


def _tensors(graph: _Graph) -> Iterator[Finding]:
    doubles = [tensor for tensor in graph.proto.graph.initializer if tensor.data_type == TensorProto.DOUBLE]
    if doubles:
        node, op = graph.reader(doubles[0].name)
        yield Finding(
            "warning",
            "double-weights",
            node,
            op,
            f"{len(doubles)} float64 constants (such as {doubles[0].name}): TensorRT computes them in float32",
            "export the model in float32",
        )
    for tensor in graph.proto.graph.initializer:
        node, op = graph.reader(tensor.name)
        kind = dtype_name(tensor.data_type)
        if kind == "string" or kind.startswith("complex"):
            yield Finding(
                "error", "unsupported-type", node, op, f"the constant {tensor.name} is {kind}, which TensorRT hasn't"
            )
        elif kind in ("int64", "uint64"):
            values = to_array(tensor)
            outside = values[(np.abs(values.astype(np.float64)) > INT32_MAX)]
            if outside.size and not (op == "Slice" and np.all(np.abs(outside.astype(np.float64)) >= OPEN_END)):
                yield Finding(
                    "warning",
                    "int64-constant",
                    node,
                    op,
                    f"the constant {tensor.name} holds {int(outside.flat[0])}, outside int32: TensorRT 8.6 clamps it",
                    "check that the model means it",
                )
        elif kind == "float32":
            yield from _float_tensor(graph, tensor, node, op)


def damaged(proto: ModelProto) -> Iterator[Finding]:
    """Weights that hold NaN or infinity; a single infinity is a bound, such as a Clip's."""
    readers: dict[str, NodeProto] = {}
    for node in all_nodes(proto.graph):
        for name in node.input:
            readers.setdefault(name, node)
    for tensor in proto.graph.initializer:
        if tensor.data_type not in _FLOATS:
            continue
        if not _spoiled(to_array(tensor).astype(np.float32, copy=False)):
            continue
        reader = readers.get(tensor.name)
        name, op = (reader.name or tensor.name, reader.op_type) if reader else (tensor.name, "")
        yield Finding(
            "error" if op in WEIGHTED else "warning",
            "non-finite-weight",
            name,
            op,
            f"{tensor.name} holds NaN or infinity",
            "the weights are damaged: export them again",
        )


def _spoiled(values: NDArray[Any]) -> bool:
    return not np.isfinite(values).all() and (values.size > 1 or bool(np.isnan(values).any()))


def _damaged(graph: _Graph) -> Iterator[Finding]:
    yield from damaged(graph.proto)


def _float_tensor(graph: _Graph, tensor: TensorProto, node: str, op: str) -> Iterator[Finding]:
    values = to_array(tensor)
    size = np.abs(values)
    if not size.size or _spoiled(values):
        return
    largest = float(size.max())
    if largest > FP16_MAX:
        yield from _beyond_fp16(tensor.name, values, node, op)
        return
    # Judged by the energy lost, not by the count: tiny values among large ones (a pruned channel's) don't matter.
    lost = values.astype(np.float64) - np.clip(values, -FP16_MAX, FP16_MAX).astype(np.float16)
    norm = float(np.linalg.norm(values.astype(np.float64)))
    share = float(np.linalg.norm(lost)) / norm if norm else 0.0
    if share > 0.01 and op in WEIGHTED and size.size > 1:
        yield Finding(
            "warning",
            "fp16-weight-underflow",
            node,
            op,
            f"the values of {tensor.name} are too small for FP16 (largest {largest:.2g}): {share:.0%} of them is lost",
            f"`precision_override=['{node}=fp32']`, or `bf16=True`",
        )


def _beyond_fp16(name: str, values: NDArray[Any], node: str, op: str) -> Iterator[Finding]:
    """A constant whose largest value FP16 doesn't hold."""
    if op in ("Clip", "Min", "Max"):
        return  # a bound beyond FP16 becomes infinity, which still bounds nothing
    mask = op in ("Add", "Sub", "Where", "Mul", "Concat", "Expand", "") and float(values.min()) <= -FP16_MAX
    code, what = ("fp16-mask-constant", "a mask") if mask else ("fp16-weight-overflow", "a value")
    yield Finding(
        "warning",
        code,
        node,
        op,
        f"{name} holds {what} of {float(values.flat[int(np.abs(values).argmax())]):.4g}, beyond FP16's ±65504: "
        "it becomes infinity there, and infinity − infinity is NaN",
        f"`precision_override=['{node}=fp32']`" + (", or use -65504 as the mask" if mask else ""),
    )


def fp16_hazards(proto: ModelProto) -> tuple[Finding, ...]:
    """The constants of a folded model that FP16 doesn't hold, for each node that reads one."""
    readers: dict[str, dict[tuple[str, str], None]] = {}
    for node in all_nodes(proto.graph):
        for name in node.input:
            readers.setdefault(name, {})[node.name or name, node.op_type] = None
    found: list[Finding] = []
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name in readers:
            values = to_array(tensor)
            if max(values.max(initial=0), -values.min(initial=0)) > FP16_MAX:
                for node_name, op in readers[tensor.name]:
                    found += _beyond_fp16(tensor.name, values, node_name, op)
    return tuple(found)


def _operators(graph: _Graph) -> Iterator[Finding]:
    custom: dict[tuple[str, str], list[NodeProto]] = {}
    for node in graph.nodes:
        if node.domain not in STANDARD_DOMAINS:
            custom.setdefault((node.domain, node.op_type), []).append(node)
    for (domain, op), nodes in custom.items():
        yield from _several(
            nodes,
            "warning",
            "custom-operator",
            f"{op} of {domain} isn't a standard operator: TensorRT needs a plugin",
            "export without it, or provide the plugin",
        )
    for op in DATA_DEPENDENT:
        yield from _several(
            graph.of(op),
            "warning",
            "data-dependent-shape",
            "the shape of its result depends on values, not on shapes",
            "move it outside the engine where you can; TensorRT-RTX has no runner for it",
        )
    yield from _several(
        graph.of(*CONTROL_FLOW),
        "warning",
        "control-flow",
        "control flow that folding couldn't decide",
        "export with the condition fixed; reduced precision doesn't reach into it",
    )
    yield from _several(
        graph.of(*INT8_ONLY),
        "error",
        "integer-operator",
        "TensorRT has no integer operators: it wants Q/DQ pairs",
        "build from the float model with `int8=True`, or quantize in the Q/DQ format",
    )


def _overflow(graph: _Graph) -> Iterator[Finding]:
    hint = "a reduced-precision build keeps it FP32 (`precision_override=` decides otherwise)"
    for op in RANGE_PRONE:
        yield from _several(graph.of(op), "info", "fp16-range", "its result can exceed FP16's range", hint)
    squares = [
        node
        for node in graph.of("Pow", "Mul")
        if ((node.op_type == "Mul" and len(set(node.input)) == 1) or node.op_type == "Pow")
        and any(user.op_type in ("ReduceMean", "ReduceSum") for user in graph.users.get(node.output[0], []))
    ]
    yield from _several(
        squares,
        "warning",
        "fp16-variance",
        "a variance spelled out (square, then mean) overflows FP16 above 255",
        hint + "; LayerNormalization (opset 17) is the safe form",
    )
    yield from _several(
        graph.of(*NORMALIZING), "info", "fp16-normalization", "sums squares inside, which FP16 can't hold", hint
    )


def _structure(graph: _Graph) -> Iterator[Finding]:
    after_conv = {node.output[0] for node in graph.of("Conv", "ConvTranspose")}
    yield from _several(
        [node for node in graph.of("BatchNormalization") if node.input[0] in after_conv],
        "warning",
        "batchnorm-not-folded",
        "follows a convolution but can't be folded into it (weights not constant, or the "
        "convolution's result is used elsewhere too)",
        "it stays a layer of its own, in floating point",
    )
    for node in graph.of("Pad"):
        if any(user.op_type == "Conv" for user in graph.users.get(node.output[0], [])):
            why = "its amounts aren't constant" if graph.weight(node) is None else "only zeros in height and width fold"
            yield Finding(
                "warning",
                "pad-before-conv",
                node.name,
                "Pad",
                f"can't be folded into the convolution after it ({why})",
                "it is a copy of its own; use the convolution's padding where you can",
            )


def _int8(graph: _Graph) -> Iterator[Finding]:
    between, dynamic, narrow, zero, spread = [], [], [], [], []
    for node in graph.of("QuantizeLinear"):
        source = graph.producer.get(node.input[0])
        if source is None or source.op_type not in ("Conv", "ConvTranspose"):
            continue
        pairs = [name for dequantize in graph.users.get(node.output[0], []) for name in dequantize.output]
        if any(user.op_type in ACTIVATIONS for name in pairs for user in graph.users.get(name, [])):
            between.append(node)
    first = next(iter(graph.of("Conv")), None)
    for node in graph.of("Conv", "ConvTranspose", "Gemm"):
        weight = graph.weight(node)
        if weight is None:
            maker = graph.producer.get(node.input[1])
            if maker is None or maker.op_type not in ("DequantizeLinear", "Constant"):
                dynamic.append(node)
            continue
        if node.op_type == "Conv" and node is not first and weight.ndim > 2:
            group = next((int(item.i) for item in node.attribute if item.name == "group"), 1)
            if group == 1 and min(weight.shape[:2]) < 4:
                narrow.append(node)
        if node.op_type == "Conv" and weight.dtype.kind == "f" and weight.size:
            amax = np.abs(weight.astype(np.float32)).reshape(len(weight), -1).max(axis=1)
            if not amax.all():
                zero.append(node)
            if (amax > 0).any() and float(amax.max()) > 1000 * float(np.median(amax[amax > 0])):
                spread.append(node)
    yield from _several(
        between,
        "warning",
        "qdq-before-activation",
        "quantizes a convolution's result before its activation: it breaks the fusion and costs accuracy",
        "quantize after the activation, as trtopt build --int8 does from the float model",
    )
    yield from _several(
        dynamic, "info", "int8-dynamic-weights", "its weights aren't constant, so it stays in floating point", ""
    )
    yield from _several(
        narrow, "info", "int8-few-channels", "has fewer than 4 channels on one side, where INT8 doesn't pay", ""
    )
    yield from _several(
        zero,
        "info",
        "int8-zero-channel",
        "some output channels have all-zero weights: they compute only their bias",
        "prune them to save time; their scale is set so that nothing divides by zero",
    )
    yield from _several(
        spread,
        "warning",
        "int8-channel-spread",
        "one output channel's weights are over 1000 times the typical channel's, so "
        "that one scale for the activations after it serves the others badly",
        "compare `method='mse'` and minmax, or `precision_override=` the node to fp16",
    )


def _zero_points(graph: _Graph) -> Iterator[Finding]:
    """Quantized models of other tools: what TensorRT refuses in them."""
    asymmetric, biases = [], []
    for node in graph.of("QuantizeLinear", "DequantizeLinear"):
        zero_point = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if zero_point is not None and np.any(np.asarray(zero_point).astype(np.float32)):
            asymmetric.append(node)
        tensor = graph.initializers.get(node.input[0])
        if node.op_type == "DequantizeLinear" and tensor is not None and tensor.data_type == TensorProto.INT32:
            biases.append(node)
    yield from _several(
        asymmetric,
        "error",
        "qdq-zero-point",
        "its zero point isn't 0; TensorRT quantizes symmetrically only",
        "build from the float model with `int8=True`, or quantize with symmetric activations and weights",
    )
    yield from _several(
        biases,
        "error",
        "qdq-int32-bias",
        "dequantizes an INT32 bias, which TensorRT refuses",
        "build from the float model with `int8=True`, or quantize without biases",
    )


def opset_findings(proto: ModelProto, limit: int | None, generation: str) -> Iterator[Finding]:
    """Against the newest opset that a generation's parser reads well (None: not limited, or none installed)."""
    opset = opset_version(proto)
    if limit is not None and opset > limit:
        yield Finding(
            "warning",
            "opset-too-new",
            "",
            "",
            f"opset {opset}; {generation} reads {limit} and older well",
            f"export with `opset={limit}`, or `fix=`, which lowers it",
        )
    elif limit is None and opset > 17:
        yield Finding("info", "opset-newer-than-8.6", "", "", f"opset {opset}; TensorRT 8.6 reads 17 and older", "")


RULES: tuple[Callable[[_Graph], Iterator[Finding]], ...] = (
    _inputs,
    _operators,
    _damaged,
    _tensors,
    _overflow,
    _structure,
    _int8,
    _zero_points,
)
