"""What a TensorRT can't take whatever its parser says, read off the graph before the parser is asked.

Its parser answers types that it hasn't with an assertion of its own source, without the tensor's name; other uses pass it and
fail after minutes in the builder. The rules are those of TensorRT-RTX 1.7, each seen there (docs/results/zoo.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from onnx import ModelProto, NodeProto, TensorProto

from trtopt.core.values import Issue
from trtopt.graph.proto import (
    STANDARD,
    Links,
    all_graphs,
    all_nodes,
    dtype_name,
    infer_shapes,
    tensor_info,
    tensor_size,
)

# Types that hold quantized numbers: TensorRT makes them by QuantizeLinear and lets nothing but DequantizeLinear compute.
_QUANTIZED_ONLY = frozenset(("float8_e4m3fn", "int4", "float4_e2m1fn"))
_MOVING = ("Concat", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape")
# A Clip's bounds become its own numbers; the parser refuses integer arithmetic itself.
_OWN_REFUSALS = {
    "Constant", "Clip", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear",
}  # fmt: skip
UNKNOWN = "undefined"  # what `dtype_name` calls a type that nobody has said
CONSTANT = 1 << 29  # bytes of all that are computed: folding leaves none in a model that means it
_OWNERS = {  # domain → what to do about its operators
    "ai.onnx.ml": "no TensorRT has trees, support vectors, encoders or texts of ai.onnx.ml: run that part outside the engine, "
    "in ONNX Runtime",
    "com.microsoft": "com.microsoft's operators are ONNX Runtime's own: where its optimizer or quantizer wrote them, give the "
    "model from before",
}
_SIZES_BY_VALUES = {  # operators whose results are as large as values say: what models compute the same by
    "NonZero": "where it comes of a boolean mask as an index (x[mask], x[mask] = y), compute all of x and choose by "
    "torch.where or a product with the mask; TensorRT itself, on a GPU (`backend='tensorrt'`), has the operator",
    "NonMaxSuppression": "export what comes before NMS, and do it on the engine's outputs (docs/export.md); TensorRT itself, "
    "on a GPU (`backend='tensorrt'`), has the operator",
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
    return tuple(dict.fromkeys([*problems, *rules.computed()]))


def instead(proto: ModelProto, operators: Collection[str]) -> str:
    """What to do where these operators are refused, by whose they are; of ONNX's own, where there is a way to do without."""
    refused = [node for node in all_nodes(proto.graph) if node.op_type in operators]
    domains = {f"{node.domain}." for node in refused}
    own = {node.op_type for node in refused if node.domain in STANDARD}
    return "; ".join(
        [what for owner, what in _OWNERS.items() if any(domain.startswith(f"{owner}.") for domain in domains)]
        + [what for operator, what in _SIZES_BY_VALUES.items() if operator in own]
    )


class _Limits:
    def __init__(self, proto: ModelProto, types: Collection[str]) -> None:
        self.types, self.graph = types, infer_shapes(proto).graph
        self.weights = {tensor.name for graph in all_graphs(proto.graph) for tensor in graph.initializer}
        self.constants = Links(proto.graph).constants
        self.kinds, self.declared = dict[str, str](), set[str]()
        for graph in all_graphs(self.graph):
            self.declared.update(value.name for value in (*graph.input, *graph.output))
            values = (*graph.input, *graph.value_info, *graph.output)
            self.kinds |= {value.name: tensor_info(value).dtype for value in values}
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

    def quantized(self, node: NodeProto) -> Iterator[Issue]:
        """Quantized types where TensorRT doesn't take them, and zero points that aren't constant."""
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = node.input[2] if len(node.input) > 2 else ""
            if zero and zero not in self.constants and not self.kinds.get(zero, "").startswith("float"):
                text = f"its zero point {zero!r} isn't constant, which TensorRT needs"
                yield Issue(node.name, node.op_type, f"{text}; quantize with constant parameters")
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

    def computed(self) -> Iterator[Issue]:
        """What folding left because of its size, TensorRT would compute while it builds."""
        sizes, known, total = dict[str, int](), {*self.weights}, 0
        for value in (*self.graph.value_info, *self.graph.output):
            tensor = value.type.tensor_type
            dims = [dim.dim_value for dim in tensor.shape.dim]
            sizes[value.name] = tensor_size(TensorProto(data_type=tensor.elem_type or TensorProto.FLOAT, dims=dims))
        for node in self.graph.node:
            if node.input and known.issuperset(filter(None, node.input)):
                known.update(node.output)
                total += sum(sizes.get(name, 0) for name in node.output)
                if total > CONSTANT:
                    text = f"with it, constants that are computed take {total >> 20} MiB; allowed: {CONSTANT >> 20}"
                    yield Issue(node.name, node.op_type, f"{text}: make them smaller, or inputs")
                    return
