"""Models that somebody made to stop, kill or fill a machine: small files, seeded, by name."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from graphs import conv_relu, model, node, values
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

import trtopt
from trtopt import trt
from trtopt.ort import comparison

INT64_MIN = -(2**63)
SECRET = b"what nobody gave trtopt to read."

Maker = Callable[[Path], Path | None]
CASES: dict[str, Maker] = {}


def case(make: Callable[..., ModelProto | bytes], name: str = "", *arguments: Any, **options: Any) -> None:
    """A case that is one file."""

    def write(folder: Path) -> None:
        made = make(*arguments, **options)
        content = made if isinstance(made, bytes) else made.SerializeToString()
        (folder / "m.onnx").write_bytes(content)

    name = name or make.__name__
    assert name not in CASES, name
    CASES[name] = write


def files(make: Maker) -> Maker:
    """A case that is a folder: it gives the model's path where that isn't m.onnx."""
    assert make.__name__ not in CASES
    CASES[make.__name__] = make
    return make


def int64(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def small(nodes: list[NodeProto], weights: dict[str, Any] | None = None, **changes: Any) -> ModelProto:
    """A model whose input x is a vector of four."""
    changes.setdefault("inputs", {"x": [4]})
    return model(nodes, weights=weights, **changes)


# --- much from little: results that are larger than their operands ---


def filled(*shape: int, op: str = "ConstantOfShape") -> ModelProto:
    nodes = [node(op, "shape", "big"), node("ReduceMax", "big", "top", keepdims=0), node("Add", "x top", "y")]
    return small(nodes, {"shape": int64(*shape)})


def tiled(count: int) -> ModelProto:
    nodes = [node("Tile", "one counts", "big"), node("ReduceMax", "big", "top", keepdims=0), node("Add", "x top", "y")]
    return small(nodes, {"one": np.ones((1, 1), np.float32), "counts": int64(count, count)})


def expanded(count: int) -> ModelProto:
    nodes = [node("Expand", "one shape", "big"), node("ReduceMax", "big", "top", keepdims=0), node("Add", "x top", "y")]
    return small(nodes, {"one": np.ones(1, np.float32), "shape": int64(count, count)})


def padded(count: int) -> ModelProto:
    nodes = [node("Pad", "one pads", "big"), node("ReduceMax", "big", "top", keepdims=0), node("Add", "x top", "y")]
    return small(nodes, {"one": np.ones((1, 1), np.float32), "pads": int64(0, 0, count, count)})


def ranged(count: int) -> ModelProto:
    nodes = [
        node("Range", "zero count one", "big"),
        node("ReduceMax", "big", "top", keepdims=0),
        node("Cast", "top", "number", to=1),
        node("Add", "x number", "y"),
    ]
    return small(nodes, {"zero": np.int64(0), "one": np.int64(1), "count": np.int64(count)})


def one_hot(count: int) -> ModelProto:
    nodes = [
        node("OneHot", "where depth pair", "big"),
        node("ReduceMax", "big", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    weights = {"where": np.arange(4096), "depth": np.int64(count), "pair": np.array([0, 1], np.float32)}
    return small(nodes, weights)


def resized(count: int, mode: str) -> ModelProto:
    nodes = [
        node("Resize", "one  sizes", "big", mode=mode),
        node("ReduceMax", "big", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    nodes[0].input[:] = ["one", "", "", "sizes"]
    return small(nodes, {"one": np.ones((1, 1, 2, 2), np.float32), "sizes": int64(1, 1, count, count)})


def outer(length: int, op: str) -> ModelProto:
    """Two vectors, or two made ones, whose product or sum is a matrix."""
    attributes = {"equation": "i,j->ij"} if op == "Einsum" else {}
    nodes = [
        node("ConstantOfShape", "rows", "a"),
        node("ConstantOfShape", "columns", "b"),
        node(op, "a b", "big", **attributes),
        node("ReduceMax", "big", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    flat = op == "Einsum"
    return small(
        nodes,
        {"rows": int64(length) if flat else int64(length, 1), "columns": int64(length) if flat else int64(1, length)},
    )


def product(size: int) -> ModelProto:
    """Fewer than 64 MiB each, and 10¹¹ multiplications."""
    nodes = [
        node("ConstantOfShape", "shape", "a", value=helper.make_tensor("v", TensorProto.INT64, [1], [3])),
        node("MatMul", "a a", "b"),
        node("Cast", "b", "c", to=1),
        node("ReduceMax", "c", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    return small(nodes, {"shape": int64(size, size)})


def many_constants(count: int, each: int) -> ModelProto:
    """Each within the limit of one; together they aren't."""
    nodes = [node("ConstantOfShape", "shape", f"c{index}") for index in range(count)]
    nodes += [node("Neg", f"c{index}", f"n{index}") for index in range(count)]
    nodes += [node("Sum", " ".join(f"n{index}" for index in range(count)), "s")]
    nodes += [node("ReduceMax", "s", "top", keepdims=0), node("Add", "x top", "y")]
    return small(nodes, {"shape": int64(each >> 2)})


def many_outputs(count: int, each: int) -> ModelProto:
    """All of them are needed at the end."""
    nodes = [
        node("ConstantOfShape", "shape", f"y{index}", value=helper.make_tensor("v", 1, [1], [float(index)]))
        for index in range(count)
    ]
    made = small([*nodes, node("Relu", "x", "y")], {"shape": int64(each >> 2)}, outputs={"y": [4]})
    made.graph.output.extend(helper.make_tensor_value_info(f"y{index}", 1, [each >> 2]) for index in range(count))
    return made


def doubled(count: int, data_type: int = TensorProto.INT64) -> ModelProto:
    """A constant of one element, concatenated with itself again and again."""
    nodes = [node("Concat", f"c{index} c{index}", f"c{index + 1}", axis=0) for index in range(count)]
    nodes += [
        node("Cast", f"c{count}", "f", to=1),
        node("ReduceMax", "f", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    return small(nodes, {"c0": np.ones(1, helper.tensor_dtype_to_np_dtype(data_type))})


def doubled_shape(count: int) -> ModelProto:
    """The same with the input's own shape, which no constant holds."""
    nodes = [node("Shape", "x", "c0")]
    nodes += [node("Concat", f"c{index} c{index}", f"c{index + 1}", axis=0) for index in range(count)]
    nodes += [
        node("Cast", f"c{count}", "f", to=1),
        node("ReduceMax", "f", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    return small(nodes, inputs={"x": ["n"]})


def doubled_gather(count: int) -> ModelProto:
    """Doubled by Gather and Slice besides: other ways that propagate values."""
    nodes = [node("Shape", "x", "c0")]
    for index in range(count):
        nodes += [
            node("Unsqueeze", f"c{index} zero", f"u{index}"),
            node("Squeeze", f"u{index} zero", f"s{index}"),
            node("Add", f"s{index} s{index}", f"a{index}"),
            node("Concat", f"a{index} a{index}", f"c{index + 1}", axis=0),
        ]
    nodes += [
        node("Cast", f"c{count}", "f", to=1),
        node("ReduceMax", "f", "top", keepdims=0),
        node("Add", "x top", "y"),
    ]
    return small(nodes, {"zero": int64(0)}, inputs={"x": ["n"]})


def power_shape(count: int) -> ModelProto:
    """A size that is computed: 2 multiplied by itself, then as a shape."""
    nodes = [node("Mul", f"m{index} two", f"m{index + 1}") for index in range(count)]
    nodes += [node("ConstantOfShape", f"m{count}", "big"), node("ReduceMax", "big", "top", keepdims=0)]
    return small([*nodes, node("Add", "x top", "y")], {"m0": int64(2), "two": int64(2)})


def data_dependent(factor: int) -> ModelProto:
    """How much memory it takes is said by the input's values: 0 or 1 of `factor`."""
    nodes = [
        node("Cast", "x", "i", to=7),
        node("Mul", "i factor", "shape"),
        node("ConstantOfShape", "shape", "big"),
        node("ReduceSum", "big", "y", keepdims=0),
    ]
    return small(nodes, {"factor": int64(factor)}, inputs={"x": [2]}, dtype=TensorProto.INT32)


def nonzero_grid(length: int) -> ModelProto:
    """Sizes that no inference knows, then an outer sum."""
    nodes = [
        node("NonZero", "x", "z"),
        node("Transpose", "z", "t", perm=[1, 0]),
        node("Add", "z t", "grid"),
        node("Cast", "grid", "f", to=1),
        node("ReduceMax", "f", "y", keepdims=0),
    ]
    return small(nodes, inputs={"x": [length]})


def string_repeat(count: int) -> ModelProto:
    made = small([node("Expand", "s shape", "y")], {"shape": int64(count)}, outputs={"y": [count]})
    made.graph.initializer.append(helper.make_tensor("s", TensorProto.STRING, [1], [b"a" * 100]))
    made.graph.output[0].type.tensor_type.elem_type = TensorProto.STRING
    return made


def string_doubling(count: int) -> ModelProto:
    nodes = [node("StringConcat", f"s{index} s{index}", f"s{index + 1}") for index in range(count)]
    made = small([*nodes, node("Relu", "x", "y")], opset=20, outputs={"y": [4]})
    made.graph.initializer.append(helper.make_tensor("s0", TensorProto.STRING, [1], [b"a"]))
    made.graph.output.append(helper.make_tensor_value_info(f"s{count}", TensorProto.STRING, [1]))
    return made


def string_pattern() -> ModelProto:
    """A search that takes forever where it is done by backtracking."""
    made = small([node("RegexFullMatch", "s", "m", pattern="(a|a|aa)+$"), node("Relu", "x", "y")], opset=20)
    made.graph.initializer.append(helper.make_tensor("s", TensorProto.STRING, [1], [b"a" * 60 + b"!"]))
    made.graph.output.append(helper.make_tensor_value_info("m", TensorProto.BOOL, [1]))
    return made


def split_sequence(length: int) -> ModelProto:
    nodes = [
        node("Expand", "x shape", "long"),
        node("SplitToSequence", "long one", "pieces", axis=0),
        node("SequenceAt", "pieces zero", "y"),
    ]
    return small(nodes, {"shape": int64(length), "one": np.int64(1), "zero": np.int64(0)}, inputs={"x": [1]})


def random_large(op: str) -> ModelProto:
    nodes = [node(op, "", "big", shape=[40000, 40000]), node("ReduceMax", "big", "top", keepdims=0)]
    del nodes[0].input[:]
    return small([*nodes, node("Add", "x top", "y")])


# --- long, deep and nested ---


def chain(count: int, op: str = "Neg") -> ModelProto:
    names = ["x", *(f"t{index}" for index in range(count - 1)), "y"]
    return small([node(op, f"{before}", after) for before, after in pairwise(names)], outputs={"y": [4]})


def unsorted_chain(count: int) -> ModelProto:
    made = chain(count)
    nodes = list(made.graph.node)[::-1]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def wide(count: int) -> ModelProto:
    """Many nodes side by side, then one that reads them all."""
    nodes = [node("Neg", "x", f"t{index}") for index in range(count)]
    return small([*nodes, node("Sum", " ".join(f"t{index}" for index in range(count)), "y")])


def ladder(count: int) -> ModelProto:
    """x + x, and again: as an expression it is 2ⁿ long."""
    names = ["x", *(f"t{index}" for index in range(count - 1)), "y"]
    return small([node("Add", f"{before} {before}", after) for before, after in pairwise(names)])


def shape_ladder(count: int) -> ModelProto:
    """The same on dimensions, whose expressions shape inference keeps."""
    nodes = [node("Shape", "x", "d0")]
    nodes += [node("Mul", f"d{index} d{index}", f"d{index + 1}") for index in range(count)]
    nodes += [node("Min", f"d{count} four", "e"), node("Expand", "x e", "y")]
    return small(nodes, {"four": int64(1)}, inputs={"x": ["n"]})


def same_names(count: int) -> ModelProto:
    made = chain(count)
    for item in made.graph.node:
        item.name = "same"
    return made


def mixed_chain(count: int) -> ModelProto:
    """Operators that the libraries have rules for."""
    ops = (
        "Relu",
        "Neg",
        "Cast",
        "Identity",
        "Transpose",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Add",
        "Mul",
        "Clip",
        "Abs",
    )
    random, nodes, last = np.random.default_rng(7), [], "x"
    for index in range(count):
        op, new = str(random.choice(ops)), f"t{index}" if index < count - 1 else "y"
        extra = {"Reshape": " s", "Add": " c", "Mul": " c"}.get(op, "")
        if op in ("Unsqueeze", "Squeeze"):
            op, extra = "Abs", ""
        attributes: dict[str, Any] = {"Cast": {"to": 1}, "Transpose": {"perm": [0, 1]}}.get(op, {})
        nodes.append(node(op, f"{last}{extra}", new, **attributes))
        last = new
    return small(nodes, {"s": int64(2, 2), "c": values(2, 2)}, inputs={"x": [2, 2]}, outputs={"y": [2, 2]})


def conv_chain(count: int) -> ModelProto:
    nodes, last = [], "x"
    for index in range(count):
        new = f"t{index}" if index < count - 1 else "y"
        nodes += [node("Conv", f"{last} w", f"h{index}"), node("Relu", f"h{index}", new)]
        last = new
    return small(nodes, {"w": values(2, 2, 1, 1)}, inputs={"x": ["n", 2, 4, 4]})


def constant_chain(count: int) -> ModelProto:
    """All of it folds, one node after the other."""
    nodes = [node("Add", f"c{index} one", f"c{index + 1}") for index in range(count)]
    return small([*nodes, node("Add", f"x c{count}", "y")], {"c0": values(4), "one": values(4, seed=1)})


def many_weights(count: int) -> ModelProto:
    nodes = [node("Sum", "x " + " ".join(f"w{index}" for index in range(count)), "y")]
    return small(nodes, {f"w{index}": values(4, seed=index) for index in range(count)})


def function(name: str, *calls: str, op: str = "") -> onnx.FunctionProto:
    nodes, last = [], "a"
    for index, call in enumerate(calls):
        nodes.append(helper.make_node(call, [last], [f"t{index}"], domain="own"))
        last = f"t{index}"
    nodes.append(helper.make_node(op or "Neg", [last, last] if op == "Concat" else [last], ["b"]))
    if op == "Concat":
        nodes[-1].attribute.append(helper.make_attribute("axis", 0))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, imports)


def with_functions(functions: list[onnx.FunctionProto], first: str = "f0") -> ModelProto:
    made = small([helper.make_node(first, ["x"], ["y"], "call", domain="own")])
    made.opset_import.append(helper.make_opsetid("own", 1))
    made.functions.extend(functions)
    return made


def function_tree(depth: int, branches: int = 2) -> ModelProto:
    """Each calls the next twice."""
    return with_functions(
        [function(f"f{index}", *[f"f{index + 1}"] * branches) for index in range(depth)] + [function(f"f{depth}")]
    )


def function_chain(depth: int) -> ModelProto:
    return with_functions([function(f"f{index}", f"f{index + 1}") for index in range(depth)] + [function(f"f{depth}")])


def function_cycle(length: int) -> ModelProto:
    return with_functions([function(f"f{index}", f"f{(index + 1) % length}") for index in range(length)])


def function_doubling(depth: int) -> ModelProto:
    """Concat within functions."""
    made = with_functions(
        [function(f"f{index}", f"f{index + 1}", op="Concat") for index in range(depth)]
        + [function(f"f{depth}", op="Concat")]
    )
    del made.graph.node[:]
    made.graph.node.extend(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("f0", ["s"], ["l"], "call", domain="own"),
            helper.make_node("Cast", ["l"], ["y"], to=1),
        ]
    )
    return made


def branch(depth: int, read: str) -> onnx.GraphProto:
    """If within If."""
    name = f"b{depth}"
    if not depth:
        inside = [helper.make_node("Neg", [read], [name])]
    else:
        inside = [
            helper.make_node(
                "If", ["c"], [name], then_branch=branch(depth - 1, read), else_branch=_plain(f"e{depth}", read)
            )
        ]
    return helper.make_graph(inside, name, [], [helper.make_tensor_value_info(name, 1, None)])


def _plain(name: str, read: str) -> onnx.GraphProto:
    return helper.make_graph(
        [helper.make_node("Neg", [read], [name])], name, [], [helper.make_tensor_value_info(name, 1, None)]
    )


def nested(depth: int) -> ModelProto:
    made = small([])
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    chosen = helper.make_node("If", ["c"], ["y"], "if", then_branch=branch(depth, "x"), else_branch=_plain("e", "x"))
    made.graph.node.append(chosen)
    return made


def loop(count: int, op: str = "Neg") -> ModelProto:
    """As many rounds as it likes."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            node(op, "s s", "t", axis=0) if op == "Concat" else node(op, "s", "t"),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", 7, []),
            helper.make_tensor_value_info("go", 9, []),
            helper.make_tensor_value_info("s", 1, None),
        ],
        [helper.make_tensor_value_info("on", 9, []), helper.make_tensor_value_info("t", 1, None)],
    )
    nodes = [helper.make_node("Loop", ["count", "yes", "x"], ["y"], "loop", body=body)]
    return small(nodes, {"count": np.int64(count), "yes": np.bool_(True)})


def looping_function(count: int) -> ModelProto:
    inside = loop(count).graph
    body = [
        helper.make_node("Constant", [], ["count"], value=inside.initializer[0]),
        helper.make_node("Constant", [], ["yes"], value=inside.initializer[1]),
        inside.node[0],
    ]
    made = helper.make_function("own", "f0", ["x"], ["y"], body, [helper.make_opsetid("", 17)])
    return with_functions([made])


def scan(length: int) -> ModelProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"])],
        "body",
        [helper.make_tensor_value_info("s", 1, []), helper.make_tensor_value_info("e", 1, [])],
        [helper.make_tensor_value_info("t", 1, [])],
    )
    nodes = [helper.make_node("Scan", ["zero", "x"], ["y"], "scan", body=body, num_scan_inputs=1)]
    return small(nodes, {"zero": np.float32(0)}, inputs={"x": [length]})


# --- arithmetic that ends a process ---


def integer(op: str, a: int, b: int, *, constant: bool, bits: int = 64) -> ModelProto:
    kind = np.dtype(f"int{bits}")
    numbers = {"a": np.full(4, a, kind), "b": np.full(4, b, kind)}
    nodes = [node(op, "a b", "d"), node("Cast", "d", "f", to=1), node("Add", "x f", "y")]
    if not constant:  # something of the input, so that nothing folds
        nodes = [
            node("Cast", "x", "i", to=7 if bits == 64 else 6),
            node("Mul", "i none", "z"),
            node("Add", "z a", "e"),
            node("Add", "z b", "g"),
            node(op, "e g", "d"),
            node("Cast", "d", "y", to=1),
        ]
        numbers["none"] = np.zeros(4, kind)
    return small(nodes, numbers)


def far_index(op: str, index: int) -> ModelProto:
    attributes: dict[str, Any] = {"axis": 0} if op.startswith("Gather") and op != "GatherND" else {}
    where = np.array([[index]] if op == "GatherND" else [index], np.int64)
    return small([node(op, "x where", "y", **attributes)], {"where": where})


def odd_attribute(op: str, inputs: str, shape: list[int], weights: dict[str, Any], **attributes: Any) -> ModelProto:
    return small([node(op, inputs, "y", **attributes)], weights, inputs={"x": shape})


# --- text ---


def renamed(text: bytes, where: str) -> bytes:
    """A model with bytes of another length of text in it, put where a placeholder stood."""
    made, placeholder = conv_relu(), "Q" * len(text)
    if where == "node":
        made.graph.node[0].name = placeholder
    elif where == "tensor":
        made.graph.node[0].output[0] = made.graph.node[1].input[0] = placeholder
    elif where == "input":
        made.graph.input[0].name = made.graph.node[0].input[0] = placeholder
    elif where == "output":
        made.graph.output[0].name = made.graph.node[1].output[0] = placeholder
    elif where == "operator":
        made.graph.node[1].op_type = placeholder
    elif where == "domain":
        made.graph.node[1].domain = placeholder
        made.opset_import.append(helper.make_opsetid(placeholder, 1))
    elif where == "dimension":
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = placeholder
    elif where == "graph":
        made.graph.name = placeholder
    elif where == "metadata":
        made.metadata_props.add(key=placeholder, value=placeholder)
    elif where == "producer":
        made.producer_name = placeholder
    elif where == "doc":
        made.graph.node[0].doc_string = placeholder
    elif where == "attribute":
        made.graph.node[0].attribute.add(name=placeholder, i=1, type=AttributeProto.INT)
    elif where == "text":
        made.graph.node[0].attribute.add(name="auto_pad", s=placeholder.encode(), type=AttributeProto.STRING)
    else:
        made.graph.initializer[0].name = made.graph.node[0].input[1] = placeholder
    return made.SerializeToString().replace(placeholder.encode(), text)


# --- weights that aren't what they say ---


def weight(data_type: int, dims: list[int], **content: Any) -> ModelProto:
    made = small([node("Cast", "w", "c", to=1), node("ReduceMax", "c", "top", keepdims=0), node("Add", "x top", "y")])
    made.graph.initializer.append(TensorProto(name="w", data_type=data_type, dims=dims, **content))
    return made


def constant(data_type: int, dims: list[int], **content: Any) -> ModelProto:
    tensor = TensorProto(name="w", data_type=data_type, dims=dims, **content)
    made = [node("Constant", "", "w"), node("Cast", "w", "c", to=1), node("ReduceMax", "c", "top", keepdims=0)]
    del made[0].input[:]
    made[0].attribute.append(helper.make_attribute("value", tensor))
    return small([*made, node("Add", "x top", "y")])


def sparse(dims: list[int], indices: list[int]) -> ModelProto:
    made = small([node("ReduceMax", "w", "top", keepdims=0), node("Add", "x top", "y")])
    held = made.graph.sparse_initializer.add()
    held.values.CopyFrom(helper.make_tensor("w", 1, [len(indices)], [1.0] * len(indices)))
    held.indices.CopyFrom(helper.make_tensor("i", 7, [len(indices)], indices))
    held.dims[:] = dims
    return made


def spoiled(value: float) -> ModelProto:
    return conv_relu(weights={"w": np.full((4, 3, 3, 3), value, np.float32)})


# --- inputs ---


def sized(*shape: int | str) -> ModelProto:
    return small([node("Neg", "x", "y")], inputs={"x": shape})


def typed_input(kind: str) -> ModelProto:
    made = small([node("Neg", "x", "y")])
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    types = {
        "sequence": helper.make_sequence_type_proto(tensor),
        "optional": helper.make_optional_type_proto(tensor),
        "sequence_of_sequences": helper.make_sequence_type_proto(helper.make_sequence_type_proto(tensor)),
        "string": helper.make_tensor_type_proto(TensorProto.STRING, [4]),
        "map": helper.make_map_type_proto(TensorProto.INT64, tensor),
        "sparse": helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [2]),
        "complex": helper.make_tensor_type_proto(TensorProto.COMPLEX64, [4]),
        "float8": helper.make_tensor_type_proto(TensorProto.FLOAT8E4M3FN, [4]),
        "int4": helper.make_tensor_type_proto(TensorProto.INT4, [4]),
    }
    if kind in types:
        made.graph.input.append(ValueInfoProto(name="extra", type=types[kind]))
    elif kind == "unknown":
        made.graph.input.append(ValueInfoProto(name="extra"))
    elif kind == "number":
        made.graph.input[0].type.tensor_type.elem_type = 77
    return made


def many_ends(count: int) -> ModelProto:
    made = small([node("Neg", f"x{index}", f"y{index}") for index in range(count)])
    del made.graph.input[:], made.graph.output[:]
    for index in range(count):
        made.graph.input.append(helper.make_tensor_value_info(f"x{index}", 1, [1]))
        made.graph.output.append(helper.make_tensor_value_info(f"y{index}", 1, [1]))
    return made


def dims_by_nodes(op: str, count: int) -> ModelProto:
    wanted = int64(*range(count)) if op == "Unsqueeze" else int64(*[1] * (count - 1), 4)
    return small([node(op, "x s", "t"), node("Neg", "t", "y")], {"s": wanted})


# --- damaged files ---


def damaged(seed: int) -> bytes:
    """Bytes of a small model changed at random."""
    random = np.random.default_rng(seed)
    content = bytearray(conv_relu().SerializeToString())
    for _ in range(int(random.integers(1, 6))):
        content[int(random.integers(0, len(content)))] = int(random.integers(0, 256))
    return bytes(content)


def misfit(seed: int) -> ModelProto:
    """Numbers of the messages themselves changed at random: types, sizes, attributes."""
    random = np.random.default_rng(seed)
    made = conv_relu()
    numbers = (0, 1, -1, 2**31, 2**62, INT64_MIN, 77)

    def number() -> int:
        return int(numbers[int(random.integers(0, len(numbers)))])

    what = seed % 6
    if what == 0:
        made.graph.initializer[0].dims[int(random.integers(0, 4))] = number()
    elif what == 1:
        made.graph.input[0].type.tensor_type.shape.dim[int(random.integers(0, 4))].dim_value = number()
    elif what == 2:
        made.graph.node[0].attribute[0].ints[int(random.integers(0, 4))] = number()
    elif what == 3:
        made.graph.node[0].attribute.append(helper.make_attribute("strides", [number(), number()]))
    elif what == 4:
        made.graph.node[0].attribute.append(helper.make_attribute("group", number()))
    else:
        made.graph.node[0].attribute.append(helper.make_attribute("dilations", [number(), number()]))
    return made


# --- several files ---


def _external(folder: Path, location: str, **entries: Any) -> Path:
    made = conv_relu()
    weight = made.graph.initializer[0]
    content, weight.data_location = weight.raw_data, TensorProto.EXTERNAL
    weight.ClearField("raw_data")
    for key, value in {"location": location, "length": len(content), **entries}.items():
        weight.external_data.add(key=key, value=str(value))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "m.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def _secret(folder: Path) -> Path:
    """Outside the model's folder."""
    outside = folder / "outside"
    outside.mkdir()
    (outside / "w.bin").write_bytes(SECRET * 64)
    return outside / "w.bin"


@files
def external_link(folder: Path) -> Path:
    path = _external(folder / "model", "w.bin")
    (path.parent / "w.bin").symlink_to(_secret(folder))
    return path


@files
def external_folder_link(folder: Path) -> Path:
    path = _external(folder / "model", "sub/w.bin")
    (path.parent / "sub").symlink_to(_secret(folder).parent)
    return path


@files
def external_link_cycle(folder: Path) -> Path:
    path = _external(folder / "model", "w.bin")
    (path.parent / "w.bin").symlink_to("w.bin")
    return path


@files
def external_device(folder: Path) -> Path:
    return _external(folder, "/dev/zero")


@files
def external_device_link(folder: Path) -> Path:
    path = _external(folder / "model", "w.bin")
    (path.parent / "w.bin").symlink_to("/dev/zero")
    return path


@files
def external_fifo(folder: Path) -> Path:
    path = _external(folder / "model", "w.bin")
    os.mkfifo(path.parent / "w.bin")
    return path


@files
def external_up(folder: Path) -> Path:
    _secret(folder)
    return _external(folder / "model", "../outside/w.bin")


@files
def external_long(folder: Path) -> Path:
    return _external(folder, "w" * 5000)


@files
def external_null(folder: Path) -> Path:
    return _external(folder, "w\0.bin")


@files
def external_itself(folder: Path) -> Path:
    return _external(folder, "m.onnx", offset=0)


@files
def external_numbers(folder: Path) -> Path:
    (folder / "w.bin").write_bytes(bytes(5000))
    return _external(folder, "w.bin", offset="9" * 5000)


@files
def external_beyond(folder: Path) -> Path:
    (folder / "w.bin").write_bytes(bytes(500))
    return _external(folder, "w.bin", offset=2**62)


@files
def external_folder(folder: Path) -> Path:
    (folder / "w.bin").mkdir()
    return _external(folder, "w.bin")


@files
def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "f.onnx")
    return folder / "f.onnx"


@files
def device(folder: Path) -> Path:
    return Path("/dev/zero")


@files
def link_cycle(folder: Path) -> Path:
    (folder / "l.onnx").symlink_to("l.onnx")
    return folder / "l.onnx"


def _all() -> None:
    case(filled, "fill_3gb", 28000, 28000)
    case(filled, "fill_100mb", 5000, 5000)
    case(filled, "fill_2e62", 2**62)
    case(filled, "fill_product_overflows", 2**40, 2**40, 2**40)
    case(filled, "fill_negative", -5)
    case(tiled, "tile", 28000)
    case(expanded, "expand", 28000)
    case(padded, "pad", 28000)
    case(ranged, "range", 10**9)
    case(one_hot, "one_hot", 200_000)
    case(resized, "resize_nearest", 20_000, "nearest")
    case(resized, "resize_slowly", 2_000, "linear")
    for op in ("MatMul", "Add", "Einsum", "Equal"):
        if op != "Equal":
            case(outer, f"outer_{op}", 28000, op)
    case(product, "product", 2000)
    case(many_constants, "many_constants", 16, 60 << 20)
    case(many_outputs, "many_outputs", 16, 60 << 20)
    case(doubled, "doubled", 34)
    case(doubled_shape, "doubled_shape", 34)
    case(doubled_gather, "doubled_gather", 34)
    case(power_shape, "power_shape", 33)
    case(power_shape, "power_shape_overflow", 70)
    case(data_dependent, "data_dependent", 2**20)
    case(nonzero_grid, "nonzero_grid", 16_000)
    case(string_repeat, "string_repeat", 2**30)
    case(string_doubling, "string_doubling", 34)
    case(string_pattern)
    case(split_sequence, "split_sequence", 10**9)
    case(random_large, "random_large", "RandomNormal")
    case(chain, "chain", 2000)
    case(unsorted_chain, "unsorted_chain", 300)
    case(wide, "wide", 300)
    case(ladder, "ladder", 300)
    case(shape_ladder, "shape_ladder", 60)
    case(same_names, "same_names", 300)
    case(mixed_chain, "mixed_chain", 500)
    case(conv_chain, "conv_chain", 100)
    case(constant_chain, "constant_chain", 500)
    case(many_weights, "many_weights", 200)
    case(function_tree, "function_tree", 27)
    case(function_tree, "function_tree_wide", 4, 100)
    case(function_chain, "function_chain", 60)
    case(function_chain, "function_chain_deep", 20_000)
    case(function_cycle, "function_cycle_1", 1)
    case(function_cycle, "function_cycle_3", 3)
    case(function_doubling, "function_doubling", 34)
    case(nested, "nested", 8)
    case(nested, "nested_deep", 29)
    case(loop, "loop_forever", 2**62)
    case(loop, "loop_doubling", 2**62, "Concat")
    case(looping_function, "loop_in_function", 2**62)
    case(scan, "scan", 15_000)
    for bits in (32, 64):
        least = -(2 ** (bits - 1))
        for op, a, b in (("Div", least, -1), ("Div", 1, 0), ("Mod", least, -1), ("Mod", 1, 0)):
            for fixed in (True, False):
                name = f"{op}_{bits}_{'minus_one' if b else 'zero'}_{'constant' if fixed else 'run'}".lower()
                case(integer, name, op, a, b, constant=fixed, bits=bits)
    for op in ("Gather", "GatherElements", "GatherND"):
        case(far_index, f"far_index_{op}", op, 2**62)
    case(lambda: odd_attribute("MaxPool", "x", [1, 1, 4, 4], {}, kernel_shape=[2, 2], strides=[0, 0]), "pool_stride_0")
    case(lambda: odd_attribute("MaxPool", "x", [1, 1, 4, 4], {}, kernel_shape=[2**31, 2**31]), "pool_kernel_2e31")
    case(
        lambda: odd_attribute("AveragePool", "x", [1, 1, 4, 4], {}, kernel_shape=[2, 2], pads=[2**40] * 4),
        "pool_pads_2e40",
    )
    case(lambda: odd_attribute("Split", "x", [4], {}, axis=2**40), "split_axis_2e40")
    case(lambda: odd_attribute("DepthToSpace", "x", [1, 4, 2, 2], {}, blocksize=0), "blocksize_0")
    case(lambda: odd_attribute("Transpose", "x", [2, 2], {}, perm=[5, -7]), "perm_outside")
    case(lambda: odd_attribute("Flatten", "x", [2, 2], {}, axis=-(2**40)), "flatten_axis")
    case(lambda: odd_attribute("Einsum", "x", [2, 2], {}, equation="…→" * 200), "einsum_equation")
    case(lambda: odd_attribute("Conv", "x w", [1, 1, 4, 4], {"w": values(1, 1, 3, 3)}, group=0), "conv_group_0")
    case(
        lambda: odd_attribute(
            "Slice", "x a b c d", [4], {"a": int64(INT64_MIN), "b": int64(2**63 - 1), "c": int64(0), "d": int64(0)}
        ),
        "slice_step_0",
    )
    case(lambda: odd_attribute("Reshape", "x s", [4], {"s": int64(2**31, 2**33)}), "reshape_overflow")
    case(lambda: odd_attribute("TopK", "x k", [4], {"k": int64(2**62)}), "topk_2e62")
    for where in (
        "node", "tensor", "input", "output", "operator", "domain", "dimension", "graph", "metadata",
        "producer", "doc", "attribute", "text", "weight",
    ):  # fmt: skip
        case(renamed, f"not_utf8_{where}", b"caf\xe9\xff", where)
    case(renamed, "surrogate_node", b"a\xed\xa0\x80b", "node")
    case(renamed, "surrogate_tensor", b"a\xed\xa0\x80b", "tensor")
    case(renamed, "zero_byte_tensor", b"a\0b", "tensor")
    case(renamed, "zero_byte_input", b"a\0b", "input")
    case(renamed, "escape_input", b"\x1b]0;PWNED\x07", "input")
    case(renamed, "path_input", b"../../../x", "input")
    case(renamed, "long_input", b"n" * 300_000, "input")
    case(renamed, "long_node", b"n" * 300_000, "node")
    case(renamed, "braces_node", b"{0!r:>9999999}%s", "node")
    large = [200, 200]
    case(weight, "weight_without_data", 1, large)
    case(weight, "weight_wrong_field", 1, large, int64_data=[1] * 40000)
    case(weight, "weight_short_field", 1, large, float_data=[1.0] * 39999)
    case(weight, "weight_long_field", 1, large, float_data=[1.0] * 40001)
    case(weight, "weight_float_data", 1, large, float_data=[1.0] * 40000)
    case(weight, "weight_both", 1, large, float_data=[1.0] * 40000, raw_data=bytes(160000))
    case(weight, "weight_half_field", 10, large, int32_data=[1] * 40000)
    case(weight, "weight_half_range", 10, large, int32_data=[-1] * 40000)
    case(weight, "weight_int4_short", 22, [400, 400], int32_data=[1] * 3)
    case(weight, "weight_bool_numbers", 9, [300, 300], int32_data=[5] * 90000)
    case(weight, "weight_undefined", 0, [4], raw_data=bytes(16))
    case(weight, "weight_type_77", 77, large, raw_data=bytes(160000))
    case(weight, "weight_string", 8, [2], string_data=[b"a", b"\xff"])
    case(weight, "weight_strings_short", 8, large, string_data=[b"a"])
    case(weight, "weight_huge_dims", 1, [2**40, 2**40])
    case(weight, "weight_zero_and_huge", 1, [0, 2**62, 2**62])
    case(weight, "weight_negative_dims", 1, [-2, -2], raw_data=bytes(16))
    case(weight, "weight_1000_dims", 1, [1] * 1000, raw_data=bytes(4))
    case(weight, "weight_1000_dims_int64", 7, [1] * 1000, raw_data=bytes(8))
    case(constant, "constant_without_data", 1, large)
    case(constant, "constant_short_field", 1, large, float_data=[1.0] * 5)
    case(constant, "constant_1000_dims", 1, [1] * 1000, raw_data=bytes(4))
    case(constant, "constant_huge_dims", 1, [2**40, 2**40])
    case(sparse, "sparse_huge", [2**20, 2**20], [0, 1])
    case(sparse, "sparse_index", [4, 4], [0, 99])
    case(spoiled, "weights_nan", np.nan)
    case(spoiled, "weights_inf", np.inf)
    case(spoiled, "weights_1e38", 1e38)
    case(sized, "input_0", 0, 4)
    case(sized, "input_2e31", 2**31)
    case(sized, "input_2e62", 2**62, 2**62)
    case(sized, "input_16gb", 1, 3, 2**15, 2**15 + 2**14)
    case(sized, "input_1000_dims", *[1] * 1000)
    case(sized, "input_40_dynamic", *[f"d{index}" for index in range(40)])
    case(sized, "input_negative", -7, 4)
    for kind in (
        "sequence", "optional", "sequence_of_sequences", "string", "map", "sparse", "complex", "float8", "int4",
        "unknown", "number",
    ):  # fmt: skip
        case(typed_input, f"input_{kind}", kind)
    case(many_ends, "many_ends", 100)
    case(dims_by_nodes, "reshape_1000_dims", "Reshape", 1000)
    case(dims_by_nodes, "unsqueeze_1000_dims", "Unsqueeze", 1000)
    for seed in range(12):
        case(damaged, f"damaged_{seed}", seed)
    for seed in range(24):
        case(misfit, f"misfit_{seed}", seed)


_all()


def write(name: str, folder: Path) -> Path:
    """Make a case in an empty folder; the model's path."""
    return CASES[name](folder) or folder / "m.onnx"


# --- running them: python hostile_models.py FOLDER COMMAND CASE… tells of each on a line of JSON ---

CPU, SECONDS = 30, 180  # of work; in all, as a busy machine gives little


def _preload() -> None:
    """What every fork would import."""
    for name in (
        "onnxscript.optimizer",
        "onnxruntime",
        "trtopt.builder.construction",
    ):
        importlib.import_module(name)
    importlib.import_module("onnx.reference")
    trt.installed()
    comparison.SECONDS, comparison.BYTES = 3, 1 << 29  # in the cases, what takes more never ends
    gc.collect()
    gc.freeze()  # or each fork copies all of it


def _run(name: str, command: str, folder: Path) -> dict[str, Any]:
    """One case in a fork: how it ended, after how long, with how much memory, and what it left."""
    for part in ("in", "out", "tmp"):
        (folder / part).mkdir(parents=True)
    model = write(name, folder / "in")
    started = time.monotonic()
    child = os.fork()
    if not child:
        _child(model, command, folder)
    status = 0
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() - started > SECONDS:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    status, usage = ended[1:]
    return {
        "name": name,
        "status": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
        "cpu": usage.ru_utime + usage.ru_stime,
        "mib": usage.ru_maxrss >> 10,
        "said": (folder / "said").read_text(errors="replace")[-2000:],
        "left": sorted(str(path.relative_to(folder)) for part in ("out", "tmp") for path in (folder / part).rglob("*")),
    }


def _child(model: Path, command: str, folder: Path) -> None:
    """The command, with the exit status that the command line gives."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
    said = os.open(folder / "said", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ |= {"TMPDIR": str(folder / "tmp"), "TRTOPT_CACHE": str(folder / "cache")}
    tempfile.tempdir = None
    status = 70
    try:
        if command == "build":
            trtopt.build(model, folder / "out" / "m.engine", fp16=True, backend="rtx", target="sm89")
            status = 0
        else:
            report = trtopt.check(model, fix=folder / "out" / "clean.onnx" if command == "fix" else None)
            print(report)
            status = 0 if report.ok else 1
    except trtopt.TrtoptError as error:
        print(error)
        status = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _preload()
    for case_name in sys.argv[3:]:
        found = _run(case_name, sys.argv[2], Path(sys.argv[1]) / sys.argv[2] / case_name)
        print(json.dumps(found), flush=True)
