"""ONNX as the parser of TensorRT 8.6 reads it: an older opset, and nothing that it passes over.

Some importers of 8.6 don't look at an attribute, or at a missing input, and say nothing: the network then computes something
else, or the process ends. Such a node is written in other words where that is exact and short, and refused by name elsewhere.
Sources: onnx-tensorrt, release/8.6-GA: builtin_op_importers.cpp, onnx2trt_utils.cpp, ConditionalHelpers.cpp; NvInfer.h, 8.6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtopt.core.errors import ModelError, UnsupportedOperator
from trtopt.core.values import Issue, TensorInfo
from trtopt.graph.guard import fault
from trtopt.graph.passes.opset import lower_opset
from trtopt.graph.proto import all_nodes, infer_shapes, node_label, subgraphs, tensor_info, to_array

_INT32_MAX = 2**31 - 1


def readable(proto: ModelProto, max_opset: int | None) -> ModelProto:
    """The same model as a generation's parser reads it (`Capabilities.max_opset`; None: as it is).

    Raises:
        UnsupportedOperator: an operator, or a way of using one, doesn't exist at that opset, or isn't seen by the parser.
        ModelError: what comes out isn't valid, or computes something else.
    """
    return proto if max_opset is None else _rewritten(lower_opset(proto, max_opset))


def with_float_weights(proto: ModelProto) -> ModelProto:
    """The same model with every INT8 constant behind a DequantizeLinear as floats and a QuantizeLinear, which gives the codes.

    The builder of 8.6 takes stored codes for most convolutions. For a matrix product, or convolutions that it would join since
    they read the same tensor, it stops with an assertion (seen on an H200: docs/results/zoo.md).
    """
    stored = {item.name: item for item in proto.graph.initializer}
    constants = {name for name, item in stored.items() if item.data_type == TensorProto.INT8}
    reads = [node for node in proto.graph.node if node.op_type == "DequantizeLinear" and node.input[1] in stored]
    behind = {node.name for node in reads if node.input[0] in constants}
    if not behind:
        return proto
    made = ModelProto()
    made.CopyFrom(proto)
    writer, nodes, written = _Writer(made), list[NodeProto](), dict[tuple[str, ...], str]()
    for node in made.graph.node:
        if node.name in behind:
            codes, attributes = node.input[0], _attributes(node)
            key = (*node.input, str(attributes))
            if key not in written:
                scale, axis = to_array(stored[node.input[1]]), attributes.get("axis", 1)
                code = to_array(stored[codes]).astype(np.float32)
                if scale.size > 1:
                    scale = scale.reshape([-1 if index == axis % code.ndim else 1 for index in range(code.ndim)])
                floats = writer.hold(f"{codes}_float", code * scale, np.float32)
                written[key] = writer.fresh(f"{codes}_again")
                inputs = [floats, *node.input[1:]]
                nodes.append(
                    writer.node("QuantizeLinear", inputs, written[key], f"{codes}/QuantizeLinear", **attributes)
                )
            node.input[0] = written[key]
        nodes.append(node)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    read = {name for node in all_nodes(made.graph) for name in node.input} | {item.name for item in made.graph.output}
    left = [item for item in made.graph.initializer if item.name in read or item.name not in constants]
    del made.graph.initializer[:]
    made.graph.initializer.extend(left)
    return made


class _Refused(Exception):
    """Why a node can't be given to the parser."""


def _rewritten(proto: ModelProto) -> ModelProto:
    if not any(_rule(node) or "" in node.input for node in all_nodes(proto.graph)):
        return proto
    made = ModelProto()
    made.CopyFrom(proto)
    writer, issues, changed = _Writer(made), list[Issue](), False
    for graph in _graphs(made.graph):
        parts: list[NodeProto] = []
        for node in graph.node:
            while node.input and not node.input[-1]:  # a null that importers read through
                node.input.pop()
                changed = True
            rule, replaced = _rule(node), None
            try:
                replaced = rule(node, writer) if rule else None
            except _Refused as reason:
                issues.append(Issue(node.name or node_label(node), node.op_type, str(reason)))
            changed |= replaced is not None
            parts += [node] if replaced is None else replaced
        del graph.node[:]
        graph.node.extend(parts)
    if issues:
        what = f"TensorRT 8.6 would compute something else for {len(issues)} node(s)"
        raise UnsupportedOperator(what, issues, "build with a later generation, or export these otherwise")
    if not changed:
        return proto
    if problem := fault(proto, made):
        raise ModelError(f"the model can't be written as TensorRT 8.6 reads it ({problem}); please report the model")
    return made


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The bodies before the graph that holds them: a graph's nodes are replaced when it has been given."""
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)
    yield graph


class _Writer:
    """Makes nodes, and constants in the outermost graph, which every body sees; says what is known of values."""

    def __init__(self, proto: ModelProto) -> None:
        self.proto, self.graph = proto, proto.graph
        self.taken = {name for node in all_nodes(proto.graph) for name in (node.name, *node.output)}
        self.taken |= {item.name for item in (*proto.graph.initializer, *proto.graph.input)}
        self.constants = {item.name: item for item in proto.graph.initializer}

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        inferred = infer_shapes(self.proto).graph
        values = (*inferred.input, *inferred.value_info, *inferred.output)
        return {value.name: tensor_info(value) for value in values if value.type.HasField("tensor_type")}

    def shape(self, name: str) -> tuple[int | str, ...]:
        """Empty where it isn't known."""
        return (
            tuple(self.constants[name].dims) if name in self.constants else getattr(self.infos.get(name), "shape", ())
        )

    def constant(self, name: str) -> NDArray[Any] | None:
        found = self.constants.get(name)
        return None if found is None else numpy_helper.to_array(found)

    def fresh(self, name: str) -> str:
        unique, number = name, 0
        while unique in self.taken:
            number += 1
            unique = f"{name}_{number}"
        self.taken.add(unique)
        return unique

    def hold(self, name: str, content: Any, dtype: Any = np.int64) -> str:
        tensor = numpy_helper.from_array(np.asarray(content, dtype), self.fresh(name))
        self.graph.initializer.append(tensor)
        return tensor.name

    def node(self, op: str, inputs: Sequence[str], output: str, name: str, **attributes: Any) -> NodeProto:
        return helper.make_node(op, inputs, [output], self.fresh(name), **attributes)


Rule = Callable[[NodeProto, _Writer], "list[NodeProto] | None"]


def _rule(node: NodeProto) -> Rule | None:
    return _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def _attributes(node: NodeProto) -> Mapping[str, Any]:
    return {item.name: helper.get_attribute_value(item) for item in node.attribute if not item.ref_attr_name}


def _input(node: NodeProto, index: int) -> str:
    return node.input[index] if len(node.input) > index else ""


def _fill(node: NodeProto, **defaults: Any) -> list[NodeProto] | None:
    """The node with ONNX's own defaults written out, where the parser has others."""
    missing = {name: value for name, value in defaults.items() if name not in _attributes(node)}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in missing.items())
    return [node] if missing else None


def _shape(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """`start` and `end` (opset 15) aren't read, the whole shape comes out: cut it afterwards."""
    given = _attributes(node)
    if not given:
        return None
    output, whole = node.output[0], writer.fresh(f"{node.output[0]}_whole")
    bounds = {"start": given.get("start", 0), "end": given.get("end", _INT32_MAX), "axis": 0}
    inputs = [writer.hold(f"{output}_{name}", [value]) for name, value in bounds.items()]
    first = helper.make_node("Shape", list(node.input), [whole], node.name)
    return [first, writer.node("Slice", [whole, *inputs], output, f"{node.name}_part")]


def _gather(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """A negative index along an axis of dynamic size is undefined: count from the end by the size."""
    index, shape = writer.constant(node.input[1]), writer.shape(node.input[0])
    axis = _attributes(node).get("axis", 0)
    if index is None or not (index < 0).any() or (shape and isinstance(shape[axis], int)):
        return None
    x, output = node.input[0], node.output[0]
    sizes, size, back, indices = (writer.fresh(f"{output}_{part}") for part in ("sizes", "size", "back", "indices"))
    if axis < 0 and not shape:
        raise _Refused("its negative indices along an axis of dynamic size are undefined there")
    axis %= max(1, len(shape)) if axis < 0 else axis + 1
    where = writer.hold(f"{output}_axis", axis)
    negative = writer.hold(f"{output}_negative", index < 0)
    given = writer.hold(f"{output}_given", index)
    node.input[1] = indices
    return [
        writer.node("Shape", [x], sizes, f"{node.name}_sizes"),
        writer.node("Gather", [sizes, where], size, f"{node.name}_size"),
        writer.node("Mul", [negative, size], back, f"{node.name}_back"),
        writer.node("Add", [given, back], indices, f"{node.name}_indices"),
        node,
    ]


def _slice(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """Steps without axes end the process."""
    if len(node.input) < 5 or node.input[3]:
        return None
    starts = writer.constant(node.input[1])
    count = next(iter(writer.shape(node.input[1])), "") if starts is None else len(starts)
    if not isinstance(count, int):
        raise _Refused("it has steps without axes, for a number of starts that isn't known")
    node.input[3] = writer.hold(f"{node.output[0]}_axes", range(count))
    return [node]


def _constant(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """`value_int` and `value_ints` become zero, or nothing."""
    given = _attributes(node)
    content = given.get("value_int", given.get("value_ints"))
    if content is None:
        return None
    del node.attribute[:]
    tensor = numpy_helper.from_array(np.asarray(content, np.int64))
    node.attribute.append(helper.make_attribute("value", tensor))
    return [node]


def _trilu(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """What is cut away is multiplied by 0, which makes NaN of a mask's infinities; and `upper` is 0 unless it is given."""
    x, output = node.input[0], node.output[0]
    dtype = getattr(writer.infos.get(x), "dtype", "")
    if dtype not in ("float32", "float16", "bool"):
        return _fill(node, upper=1)
    size, ones, cut, keep = (writer.fresh(f"{output}_{part}") for part in ("size", "ones", "cut", "keep"))
    one = numpy_helper.from_array(np.ones(1, np.float32))
    upper = _attributes(node).get("upper", 1)
    if dtype == "bool":
        last = helper.make_node("And", [keep, x], [output], node.name)
    else:
        zero = writer.hold(f"{output}_zero", 0, dtype)
        last = helper.make_node("Where", [keep, x, zero], [output], node.name)
    return [
        writer.node("Shape", [x], size, f"{node.name}_size"),
        writer.node("ConstantOfShape", [size], ones, f"{node.name}_ones", value=one),
        writer.node("Trilu", [ones, *node.input[1:]], cut, f"{node.name}_cut", upper=upper),
        writer.node("Cast", [cut], keep, f"{node.name}_keep", to=TensorProto.BOOL),
        last,
    ]


def _suppress(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """Without a threshold of scores, those of 0 and less are dropped."""
    if _input(node, 4):
        return None
    while len(node.input) < 4:
        node.input.append("")
    del node.input[4:]
    node.input.append(writer.hold(f"{node.output[0]}_all", [np.finfo(np.float32).min], np.float32))
    return [node]


def _normalize(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """It has no LayerNormalization without a bias."""
    scale = writer.constant(node.input[1])
    if _input(node, 2) or scale is None:
        return None
    del node.input[2:]
    node.input.append(writer.hold(f"{node.output[0]}_bias", np.zeros_like(scale), scale.dtype))
    return [node]


def _quantize(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """A missing axis means 0 there; unsigned codes are clamped as signed ones; a missing zero point ends the parser."""
    scale = writer.constant(node.input[1])
    zero = writer.constants.get(_input(node, 2))
    unsigned = zero.data_type == TensorProto.UINT8 if zero is not None else node.op_type == "QuantizeLinear"
    if unsigned:
        raise _Refused("it quantizes to uint8, of which TensorRT has none: quantize symmetrically to int8")
    changed = None
    if scale is not None and scale.size > 1:
        changed = _fill(node, axis=1)
    if not _input(node, 2) and scale is not None:
        node.input.append(writer.hold(f"{node.output[0]}_zero_point", np.zeros(scale.shape), np.int8))
        changed = [node]
    return changed


def _if(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """Several outputs come in any order: one If for each."""
    used = [index for index, name in enumerate(node.output) if name]
    if len(used) < 2:
        return None
    parts = []
    for index in used:
        part = NodeProto.FromString(node.SerializeToString())
        part.name = node.name if index == used[0] else writer.fresh(f"{node.name}_{index}")
        for outputs in (part.output, *(body.output for body in subgraphs(part))):
            del outputs[index + 1 :], outputs[:index]
        parts.append(part)
    return parts


def _loop(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """What a loop collects has the length of its limit, or 1024 without one, however often it runs."""
    carried = max(0, len(node.input) - 2)
    if not any(node.output[carried:]):
        return None
    (body,) = subgraphs(node)
    limit = writer.constant(_input(node, 0))
    if not _input(node, 0) or (limit is not None and int(limit.ravel()[0]) >= _INT32_MAX):
        raise _Refused("it collects values without a limit of rounds")
    made = {name: item for item in body.node for name in item.output}
    condition = body.output[0].name
    while condition in made and made[condition].op_type in ("Identity", "Cast"):
        condition = made[condition].input[0]
    constant = condition in made and made[condition].op_type == "Constant"
    if not (constant or condition == body.input[1].name or condition in {item.name for item in body.initializer}):
        raise _Refused("it collects values and may end before its limit of rounds")
    return None


def _transposed(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """An odd padding for a given output shape gets its larger half at the end; with `auto_pad` that shape isn't read."""
    given = _attributes(node)
    wanted = given.get("output_shape")
    if not wanted:
        return None
    kernel, size = writer.shape(node.input[1])[2:], writer.shape(node.input[0])[2:]
    if not size or not all(isinstance(number, int) for number in (*kernel, *size)):
        raise _Refused("it gives its output's shape for an input of dynamic size; give it pads instead")
    rank = len(size)
    ones = [1] * rank
    strides, dilations = given.get("strides", ones), given.get("dilations", ones)
    extra, upper = given.get("output_padding", [0] * rank), given.get("auto_pad", b"NOTSET") == b"SAME_UPPER"
    begins, ends, missing = [], [], []
    for axis in range(rank):
        reach = strides[axis] * (int(size[axis]) - 1) + extra[axis] + (int(kernel[axis]) - 1) * dilations[axis] + 1
        total = reach - wanted[-rank:][axis]
        small, large = max(0, total) // 2, max(0, total) - max(0, total) // 2
        begins.append(small if upper else large)
        ends.append(large if upper else small)
        missing.append(extra[axis] + max(0, -total))
    kept = [item for item in node.attribute if item.name not in ("output_shape", "auto_pad", "pads", "output_padding")]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.append(helper.make_attribute("pads", [*begins, *ends]))
    if any(missing):
        node.attribute.append(helper.make_attribute("output_padding", missing))
    return [node]


def _reduce_sum(node: NodeProto, writer: _Writer) -> list[NodeProto] | None:
    """`noop_with_empty_axes` isn't read."""
    axes = writer.constant(_input(node, 1))
    if not _attributes(node).get("noop_with_empty_axes") or (_input(node, 1) and (axes is None or axes.size)):
        return None
    return [helper.make_node("Identity", [node.input[0]], [node.output[0]], node.name)]


def _reduction(node: NodeProto, writer: _Writer) -> None:
    found = _attributes(node).get("reduction", b"none").decode()
    if found != "none":
        raise _Refused(f"its reduction {found!r} isn't read: values would be replaced")


def _layout(node: NodeProto, writer: _Writer) -> None:
    if _attributes(node).get("layout"):
        raise _Refused("its layout 1 (batch first) isn't read; export it with layout 0")


_RULES: Mapping[str, Rule] = {
    "Constant": _constant,
    "ConvTranspose": _transposed,
    "DequantizeLinear": _quantize,
    "GRU": _layout,
    "Gather": _gather,
    "If": _if,
    "LSTM": _layout,
    "LayerNormalization": _normalize,
    "Loop": _loop,
    "NonMaxSuppression": _suppress,
    "QuantizeLinear": _quantize,
    "RNN": _layout,
    "ReduceSum": _reduce_sum,
    "RoiAlign": lambda node, writer: _fill(node, sampling_ratio=0),
    "ScatterElements": _reduction,
    "ScatterND": _reduction,
    "Selu": lambda node, writer: _fill(node, alpha=1.6732632423543772, gamma=1.0507009873554805),
    "Shape": _shape,
    "Slice": _slice,
    "Trilu": _trilu,
}
