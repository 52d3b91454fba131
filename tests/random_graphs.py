"""Random valid graphs of what folding rewrites: broadcasts on every axis, second readers, sizes that coincide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, defs, helper, numpy_helper, shape_inference

OPSETS = (9, 11, 12, 13, 15, 17, 18, 19, 21, 23)
ROUNDED = {"QuantizeLinear", "DequantizeLinear", "Floor"}  # a rounding more or less moves what they give by a step

Shape = tuple[int, ...]


class Skip(Exception):
    """The operator drawn doesn't fit what there is."""


class RandomGraph:
    """One graph, by its seed: `proto`, and `feed` with what it runs on.

    Args:
        may_be_open: its first sizes may be left open, though it fits no others than `feed`'s.
    """

    def __init__(self, seed: int, *, may_be_open: bool = True) -> None:
        self.may_be_open = may_be_open
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.choice(OPSETS))
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.shapes: dict[str, Shape] = {}  # of what is float32
        self.types: dict[str, TypeProto] = {}
        self.constants: dict[str, TensorProto] = {}
        self.size = int(self.rng.integers(2, 7))  # many axes have it
        self.feed: dict[str, NDArray[Any]] = {}
        for number in range(self.draw(1, 2)):
            rank = int(self.rng.choice([2, 3, 4, 4, 4, 5]))
            shape = tuple(self.size if self.chance(0.55) else self.draw(1, 6) for _ in range(rank))
            self.feed[f"x{number}"] = self.values(shape)
            self.know(f"x{number}", TensorProto.FLOAT, shape)
        if self.chance(0.3):  # something that folds away
            shape = tuple(self.size if self.chance(0.7) else self.draw(1, 4) for _ in range(self.draw(2, 4)))
            self.shapes[self.weight(self.values(shape))] = shape
        self.last = str(self.one(list(self.shapes)) if self.chance(0.2) else "x0")
        for _ in range(self.draw(2, 8)):
            self.grow()
        self.proto = self.model()

    # Draws

    def draw(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self, items: Sequence[Any]) -> Any:
        return items[self.draw(0, len(items) - 1)]

    def values(self, shape: Sequence[int], low: float = -2, high: float = 2) -> NDArray[np.float32]:
        return self.rng.uniform(low, high, tuple(shape)).astype(np.float32)

    def weight(self, array: Any, dtype: Any = np.float32) -> str:
        """A constant: mostly an initializer, at times a node."""
        tensor = numpy_helper.from_array(np.asarray(array, dtype), f"w{len(self.weights) + len(self.nodes)}")
        self.constants[tensor.name] = tensor
        self.types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        if self.chance(0.15):
            self.nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
        else:
            self.weights.append(tensor)
        return str(tensor.name)

    def know(self, name: str, dtype: int, shape: Shape) -> None:
        self.types[name] = helper.make_tensor_type_proto(dtype, shape)
        if dtype == TensorProto.FLOAT:
            self.shapes[name] = shape

    def add(
        self, op: str, inputs: Sequence[str], outputs: int = 1, shape: Shape | None = None, **attributes: Any
    ) -> str:
        """Add a node; its shape is ONNX's, unless it is given."""
        names = [f"t{len(self.nodes)}_{number}" for number in range(outputs)]
        attributes = {name: value for name, value in attributes.items() if value is not None}
        node = helper.make_node(op, inputs, names, name=f"{op}{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        if shape is not None:
            self.know(names[0], TensorProto.FLOAT, shape)
        else:
            try:
                schema, opsets = defs.get_schema(op, self.opset), [helper.make_opsetid("", self.opset)]
                found = shape_inference.infer_node_outputs(
                    schema, node, self.types, self.constants, opset_imports=opsets
                )
            except (shape_inference.InferenceError, RuntimeError):
                raise Skip from None
            for name in names:
                tensor = found[name].tensor_type
                self.know(name, tensor.elem_type, tuple(axis.dim_value for axis in tensor.shape.dim))
        sizes = [axis.dim_value for axis in self.types[names[0]].tensor_type.shape.dim]
        if any(size < 1 for size in sizes) or np.prod(sizes) > 4000 or len(sizes) > 6:
            raise Skip
        self.last = names[0]
        return names[0]

    def source(self, ranks: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> str:
        """What to go on from: mostly the end of the chain, at times what something else reads too."""
        fitting = [name for name, shape in self.shapes.items() if len(shape) in ranks]
        if not fitting:
            raise Skip
        return self.last if self.last in fitting and self.chance(0.85) else str(self.one(fitting))

    def grow(self) -> None:
        """Add what was drawn; what doesn't fit leaves nothing behind."""
        for _ in range(20):
            before = len(self.nodes), len(self.weights), dict(self.shapes), self.last
            try:
                self.one(KINDS)(self)
                return
            except Skip:
                del self.nodes[before[0] :], self.weights[before[1] :]
                self.shapes, self.last = before[2], before[3]

    # Operators

    def convolution(self) -> None:
        x = self.source((3, 4, 5))
        _, channels, *sizes = self.shapes[x]
        transposed = self.chance(0.35)
        group = self.one([1, 1, 1, channels, *(n for n in (2, 3) if channels % n == 0)])
        out = group * self.draw(1, 3) if self.chance(0.5) or self.size % group else self.size
        kernel = [self.draw(1, min(3, size)) for size in sizes]
        form = (channels, out // group, *kernel) if transposed else (out, channels // group, *kernel)
        inputs = [x, self.held(self.values(form), 1 if transposed else 0)]
        if self.chance(0.5):
            inputs.append("" if self.chance(0.1) else self.weight(self.values((out,)) * self.chance(0.8)))
        padding: dict[str, Any] = {"pads": [self.draw(0, size - 1) for size in kernel * 2]} if self.chance(0.7) else {}
        if self.chance(0.2) and not transposed:
            padding = {"auto_pad": self.one(["SAME_UPPER", "SAME_LOWER", "VALID"])}
        self.add(
            "ConvTranspose" if transposed else "Conv",
            inputs,
            group=group,
            kernel_shape=kernel if self.chance(0.7) else None,
            strides=[self.draw(1, 2) for _ in sizes] if self.chance(0.3) else None,
            dilations=[self.draw(1, 2) for _ in sizes] if self.chance(0.2) and not transposed else None,
            **padding,
        )

    def held(self, array: NDArray[np.float32], axis: int) -> str:
        """A weight, at times as its codes behind DequantizeLinear."""
        if self.opset < 13 or not self.chance(0.12):
            return self.weight(array)
        channels = self.chance(0.5)
        scale = np.full(array.shape[axis] if channels else (), 2 / 127, np.float32)
        inputs = [self.weight(np.round(array / (2 / 127)), np.int8), self.weight(scale)]
        if self.chance(0.5):
            inputs.append(self.weight(np.zeros(scale.shape), np.int8))
        return self.add("DequantizeLinear", inputs, axis=axis if channels else None)

    def normalization(self) -> None:
        x = self.source((2, 3, 4, 5))
        channels = (self.shapes[x][1],)
        inputs = [self.weight(self.values(channels, low, 2)) for low in (-2, -2, -2, 0.5)]
        self.add("BatchNormalization", [x, *inputs], epsilon=self.one([None, 1e-3]))

    def gemm(self) -> None:
        x = self.source((2,))
        wide, transposed, turned = self.one([self.size, self.draw(1, 5)]), self.chance(0.5), self.chance(0.2)
        rows, columns = self.shapes[x][:: -1 if turned else 1]
        inputs = [x, self.weight(self.values((wide, columns) if transposed else (columns, wide)))]
        if self.chance(0.7) or self.opset < 11:
            form = self.one([(wide,), (1, wide), (), (1,), (rows, 1), (rows, wide)])
            inputs.append(self.weight(self.values(form) * np.float32(self.chance(0.9))))
        scales = {"alpha": self.one([None, 0.5]), "beta": self.one([None, None, 2.0])}
        self.add("Gemm", inputs, **scales, transA=1 if turned else None, transB=1 if transposed else None)

    def product(self) -> None:
        x = self.source((2, 3, 4))
        *rows, columns = self.shapes[x]
        wide = self.one([self.size, self.draw(1, 5)])
        if self.chance(0.2):  # the constant on the left
            self.add("MatMul", [self.weight(self.values((wide, rows[-1]))), x])
            return
        out = self.add("MatMul", [x, self.weight(self.values((columns, wide)))])
        if self.chance(0.6):
            self.arithmetic(out, ("Add", "Add", "Mul"))

    def arithmetic(self, x: str = "", operators: Sequence[str] = ("Mul", "Mul", "Add", "Add", "Sub", "Div")) -> None:
        """With a constant of one of the shapes that broadcast, on any axis, or to a larger result."""
        x = x or self.source()
        shape, op = self.shapes[x], self.one(operators)
        axis = self.draw(0, len(shape) - 1) if shape else 0
        larger = tuple(self.draw(2, 3) if size == 1 and self.chance(0.3) else 1 for size in shape)
        channel = (*shape[1:2], *[1] * (len(shape) - 2))
        some = tuple(size if place == axis or self.chance(0.2) else 1 for place, size in enumerate(shape))
        forms = [(), (1,), (1,) * len(shape), channel, (1, *channel), larger, (self.draw(1, 2), *larger)]
        form: Shape = self.one([self.one(forms), shape[axis:], some])
        array = self.values(form, 0.5, 2) if op == "Div" or self.chance(0.5) else self.values(form)
        if self.chance(0.15):
            array = np.full(form, op in ("Mul", "Div"), np.float32)  # neutral
        inputs = [x, self.weight(array)]
        self.add(op, inputs[::-1] if self.chance(0.35) and op != "Div" else inputs)

    def pair(self) -> None:
        """Two values of the graph."""
        x, y = self.source(), self.one(list(self.shapes))
        self.add(self.one(["Add", "Mul", "Sub"]), [x, y])

    def pad(self) -> None:
        x = self.source()
        rank, half = len(self.shapes[x]), 0
        mode = self.one(["constant", "constant", "constant", "reflect", "edge"])
        axes = [-2, -1][-rank:] if self.opset >= 18 and self.chance(0.2) else []  # the last axes, named
        half = len(axes) or rank
        amounts = [self.draw(0, 2) * (axis % half > 1 or self.chance(0.3)) for axis in range(2 * half)]
        if self.chance(0.15):
            amounts = [0] * len(amounts)
        if mode == "constant" and self.chance(0.1):
            amounts[-1] = -1
        if mode == "reflect":
            sizes = self.shapes[x][-half:]
            amounts = [min(amount, sizes[axis % half] - 1) for axis, amount in enumerate(amounts)]
        value = float(self.chance(0.15))
        if self.opset < 11:
            self.add("Pad", [x], pads=amounts, mode=mode, value=value)
            return
        inputs = [x, self.weight(amounts, np.int64)]
        if value or axes or self.chance(0.3):
            inputs.append(self.weight(value) if value else "")
        if axes:
            inputs.append(self.weight(axes, np.int64))
        self.add("Pad", inputs, mode=mode if mode != "constant" or self.chance(0.5) else None)

    def cut(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        axes = sorted({self.draw(0, len(shape) - 1) for _ in range(self.draw(1, 2))})
        starts = [self.draw(0, shape[axis] - 1) for axis in axes]
        ends = [self.draw(start + 1, shape[axis]) for start, axis in zip(starts, axes)]
        if self.chance(0.2):
            starts, ends = [0] * len(axes), [2**31 - 1 if self.chance(0.5) else shape[axis] for axis in axes]
        if self.chance(0.3):
            starts = [start - shape[axis] for start, axis in zip(starts, axes)]
        if self.opset < 10:
            self.add("Slice", [x], starts=starts, ends=ends, axes=axes)
            return
        given = [starts, ends, [axis - len(shape) if self.chance(0.3) else axis for axis in axes]]
        if self.chance(0.4):
            given.append([self.draw(1, 2) if self.chance(0.2) else 1 for _ in axes])  # steps
        self.add("Slice", [x, *(self.weight(item, np.int64) for item in given)])

    def transpose(self) -> None:
        x = self.source()
        perm = [int(axis) for axis in self.rng.permutation(len(self.shapes[x]))]
        perm = sorted(perm) if self.chance(0.1) else perm
        self.add("Transpose", [x], perm=None if self.chance(0.15) else perm)

    def reshape(self) -> None:
        x = self.source()
        shape, kind = list(self.shapes[x]), self.draw(0, 5)
        axis = self.draw(0, len(shape) - 1)
        target = shape
        if kind == 0:
            target = [int(np.prod(shape))]
        elif kind == 1:
            target = [*shape[:axis], int(np.prod(shape[axis : axis + 2])), *shape[axis + 2 :]]
        elif kind == 2:
            divisor = self.one([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0])
            target = [*shape[:axis], divisor, shape[axis] // divisor, *shape[axis + 1 :]]
        elif kind == 3:
            target = [int(size) for size in self.rng.permutation(shape)]
        elif kind == 4:
            self.add("Flatten", [x], axis=axis)
            return
        if self.chance(0.15) and self.opset >= 13:  # sizes taken from a shape
            made = self.add("Shape", [x])
            picked = [self.add("Gather", [made, self.weight(axis, np.int64)]) for axis in range(len(shape))]
            first = self.weight([0], np.int64)
            whole = self.add("Concat", [self.add("Unsqueeze", [name, first]) for name in picked], axis=0)
            self.add("Reshape", [x, whole], shape=self.shapes[x])
            return
        asked = [
            0 if (size,) == (*shape[at : at + 1],) and self.chance(0.2) else size for at, size in enumerate(target)
        ]
        if self.chance(0.4):
            asked[self.draw(0, len(asked) - 1)] = -1
        self.add("Reshape", [x, self.weight(asked, np.int64)])

    def squeeze(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        if self.chance(0.6):
            op, count = "Unsqueeze", self.draw(1, 2)
            rank = len(shape) + count
            places = sorted(int(axis) for axis in self.rng.choice(rank, count, replace=False))
            axes = [axis - rank if self.opset > 10 and self.chance(0.3) else axis for axis in places]
        else:
            ones = [axis for axis, size in enumerate(shape) if size == 1]
            if not ones:
                raise Skip
            op, axes = "Squeeze", [int(self.one(ones))]
        self.with_axes(op, x, axes)

    def with_axes(self, op: str, x: str, axes: list[int]) -> None:
        """Squeeze or Unsqueeze, whose axes are an input since opset 13."""
        if self.opset < 13:
            self.add(op, [x], axes=axes)
        else:
            self.add(op, [x, self.weight(axes, np.int64)])

    def reduce(self) -> None:
        x = self.source()
        op = self.one(["ReduceSum", "ReduceSum", "ReduceMean", "ReduceMax"])
        axes = sorted({self.draw(0, len(self.shapes[x]) - 1) for _ in range(self.draw(1, 2))})
        keep = self.chance(0.5)
        as_input = self.opset >= (13 if op == "ReduceSum" else 18)
        inputs = [x, self.weight(axes, np.int64)] if as_input else [x]
        out = self.add(op, inputs, keepdims=int(keep), axes=None if as_input else axes)
        if not keep and self.chance(0.5):
            self.with_axes("Unsqueeze", out, axes)

    def elementwise(self) -> None:
        x = self.source()
        op = self.one(["Relu", "Relu", "LeakyRelu", "Sigmoid", "Abs", "Neg", "Identity", "Dropout", "Softmax", "Floor"])
        attributes = {"axis": self.draw(0, len(self.shapes[x]) - 1)} if op == "Softmax" and len(self.shapes[x]) else {}
        self.add(op, [x], **attributes)

    def clip(self) -> None:
        x = self.source()
        low, high = sorted(float(value) for value in self.values((2,)))
        if self.chance(0.15) and self.opset >= 12:
            op = self.one(["Min", "Max"])
            self.add(op, [x, self.weight(low)])
        elif self.opset < 11:
            self.add("Clip", [x], min=low, max=high if self.chance(0.8) else None)
        else:
            ends = [self.weight(low) if self.chance(0.8) else "", self.weight(high)]
            self.add("Clip", [x, *ends[: self.draw(1, 2)]])

    def cast(self) -> None:
        x = self.source()
        wide = self.one([TensorProto.FLOAT, TensorProto.DOUBLE])
        made = self.add("Cast", [x], to=wide)
        if wide != TensorProto.FLOAT:
            self.add("Cast", [made], to=TensorProto.FLOAT)

    def join(self) -> None:
        x = self.source()
        shape = list(self.shapes[x])
        axis = self.draw(0, len(shape) - 1)
        parts = [x, *(str(self.one(list(self.shapes))) for _ in range(self.draw(0, 2)))]  # that don't fit: another draw
        if self.chance(0.3):
            parts.insert(self.draw(0, 1), self.weight(self.values([*shape[:axis], 1, *shape[axis + 1 :]])))
        self.add("Concat", parts, axis=axis)

    def split(self) -> None:
        x = self.source()
        shape = list(self.shapes[x])
        axis = self.draw(0, len(shape) - 1)
        if shape[axis] < 2:
            raise Skip
        first = self.draw(1, shape[axis] - 1)
        sizes = [first, shape[axis] - first]
        if self.opset < 13:
            self.add("Split", [x], 2, axis=axis, split=sizes)
        else:
            self.add("Split", [x, self.weight(sizes, np.int64)], 2, axis=axis)

    def expand(self) -> None:
        x = self.source()
        shape = [self.draw(1, 3) if size == 1 else self.one([1, size]) for size in self.shapes[x]]
        shape = [self.draw(1, 2), *shape] if self.chance(0.2) else shape
        self.add("Expand", [x, self.weight(shape, np.int64)])

    def gather(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        axis = self.draw(0, len(shape) - 1)
        form: Shape = self.one([(), (2,), (1,)])
        indices = self.rng.integers(-shape[axis] if self.opset > 10 else 0, shape[axis], form)
        self.add("Gather", [x, self.weight(indices, np.int64)], axis=axis)

    def pool(self) -> None:
        x = self.source((3, 4, 5))
        kernel = [self.draw(1, min(2, size)) for size in self.shapes[x][2:]]
        pads = [self.draw(0, size - 1) for size in kernel * 2]
        if self.chance(0.4):
            self.add("GlobalAveragePool", [x])
        else:
            self.add(self.one(["MaxPool", "AveragePool"]), [x], kernel_shape=kernel, pads=pads)

    def quantize(self) -> None:
        if self.opset < 13:
            raise Skip
        x = self.source()
        shape, axis = self.shapes[x], 0
        form: Shape = ()
        if shape and self.chance(0.3):
            axis = self.draw(0, len(shape) - 1)
            form = (shape[axis],)
        scale, zero = self.weight(self.values(form, 0.02, 0.1)), self.weight(np.zeros(form), np.int8)
        codes = self.add("QuantizeLinear", [x, scale, zero], axis=axis if form else None)
        self.add("DequantizeLinear", [codes, scale, zero], axis=axis if form else None)

    def branch(self) -> None:
        """An If by a constant or by the input, whose bodies read, or give, what is around them."""
        if self.opset < 11:
            raise Skip
        x = self.source()
        if self.chance(0.3):
            condition = self.weight(self.chance(0.5), np.bool_)
        else:
            total = self.add("ReduceMax", [next(iter(self.feed))], keepdims=0)
            condition = self.add("Greater", [total, self.weight(self.one([-9.0, 9.0]))])
        bodies = {}
        for name in ("then_branch", "else_branch"):
            result = helper.make_tensor_value_info(f"{name}{len(self.nodes)}", TensorProto.FLOAT, self.shapes[x])
            op = helper.make_node(self.one(["Identity", "Relu", "Neg"]), [x], [result.name])
            bodies[name] = helper.make_graph([op], name, [], [result])
        self.add("If", [condition], shape=self.shapes[x], **bodies)

    def padded_convolution(self) -> None:
        self.pad()
        self.convolution()

    def scaled(self) -> None:
        """What is a scale per channel, or only looks like one."""
        self.one([RandomGraph.convolution, RandomGraph.convolution, RandomGraph.gemm])(self)
        for _ in range(self.draw(1, 2)):
            if self.chance(0.3) and len(self.shapes[self.last]) > 1:
                self.normalization()
            else:
                self.arithmetic(self.last)

    def reshaped_gemm(self) -> None:
        self.gemm()
        self.reshape()
        self.arithmetic(self.last, ("Mul", "Add"))

    def chain(self) -> None:
        kind = self.one(
            [RandomGraph.transpose, RandomGraph.reshape, RandomGraph.squeeze, RandomGraph.cut, RandomGraph.clip]
        )
        for _ in range(self.draw(2, 3)):
            self.one([kind, kind, RandomGraph.transpose])(self)

    def model(self) -> ModelProto:
        read = {name for node in self.nodes for name in node.input}
        made = [name for name in self.shapes if any(name in node.output for node in self.nodes)]
        names = [name for name in made if name not in read or self.chance(0.15)] or [self.last]
        batch = self.chance(0.4) and self.may_be_open  # one size that isn't said
        shapes = {name: [f"n{name}", *array.shape[1:]] if batch else array.shape for name, array in self.feed.items()}
        ends = {name: None if batch else self.shapes[name] for name in names}
        infos, outputs = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items()]
            for values in (shapes, ends)
        )
        graph = helper.make_graph(self.nodes, "random", infos, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


_USUAL = (
    "scaled scaled scaled scaled chain chain arithmetic arithmetic padded_convolution padded_convolution reshaped_gemm"
)
_OTHERS = "reshaped_gemm convolution normalization gemm product pair pad cut transpose reshape squeeze reduce elementwise clip"
_LAST = "cast join split expand gather pool quantize branch"
KINDS: list[Callable[[RandomGraph], None]] = [
    getattr(RandomGraph, name) for name in f"{_USUAL} {_OTHERS} {_LAST}".split()
]
