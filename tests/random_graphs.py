"""Random valid graphs of what folding rewrites: broadcasts on every axis, second readers, sizes that coincide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

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
        self.shapes: dict[str, Shape] = {}
        self.size = int(self.rng.integers(2, 7))  # many axes have it
        self.feed: dict[str, NDArray[Any]] = {}
        for number in range(self.draw(1, 2)):
            rank = int(self.rng.choice([2, 3, 4, 4, 4, 5]))
            shape = tuple(self.size if self.chance(0.55) else self.draw(1, 6) for _ in range(rank))
            self.feed[f"x{number}"] = self.values(shape)
            self.shapes[f"x{number}"] = shape
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
        if self.chance(0.15):
            self.nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
            return str(tensor.name)
        self.weights.append(tensor)
        return str(tensor.name)

    def add(self, op: str, inputs: Sequence[str], shape: Sequence[int], outputs: int = 1, **attributes: Any) -> str:
        names = [f"t{len(self.nodes)}_{number}" for number in range(outputs)]
        attributes = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op, inputs, names, name=f"{op}{len(self.nodes)}", **attributes))
        shape = tuple(int(size) for size in shape)
        if any(size < 1 for size in shape) or np.prod(shape) > 4000 or len(shape) > 6:
            raise Skip
        self.shapes[names[0]], self.last = shape, names[0]
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
        batch, channels, *sizes = self.shapes[x]
        transposed = self.chance(0.35)
        group = self.one([1, 1, 1, channels, *(n for n in (2, 3) if channels % n == 0)])
        out = group * self.draw(1, 3) if self.chance(0.5) or self.size % group else self.size
        kernel = [self.draw(1, min(3, size)) for size in sizes]
        pads = [self.draw(0, kernel[axis % len(sizes)] - 1) for axis in range(2 * len(sizes))]
        attributes: dict[str, Any] = {"group": group, "kernel_shape": kernel if self.chance(0.7) else None}
        strides = [self.draw(1, 2) for _ in sizes] if self.chance(0.3) else [1] * len(sizes)
        wide = [self.draw(1, 2) if self.chance(0.2) and not transposed else 1 for _ in sizes]
        attributes["dilations"] = wide if max(wide) > 1 else None
        attributes["strides"] = strides if max(strides) > 1 or self.chance(0.3) else None
        auto = str(self.one(["SAME_UPPER", "SAME_LOWER", "VALID"])) if self.chance(0.2) else ""
        attributes |= {"auto_pad": auto} if auto else {"pads": pads} if self.chance(0.7) else {}
        total = [pads[axis] + pads[axis + len(sizes)] if "pads" in attributes else 0 for axis in range(len(sizes))]
        if transposed:
            if auto.startswith("SAME"):
                raise Skip
            result = [(size - 1) * s - p + k for size, s, p, k in zip(sizes, strides, total, kernel)]
        elif auto.startswith("SAME"):
            result = [-(-size // s) for size, s in zip(sizes, strides)]
        else:
            spans = [(k - 1) * d + 1 for k, d in zip(kernel, wide)]
            result = [(size + p - k) // s + 1 for size, p, k, s in zip(sizes, total, spans, strides)]
        form = (channels, out // group, *kernel) if transposed else (out, channels // group, *kernel)
        inputs = [x, self.held(self.values(form), 1 if transposed else 0)]
        if self.chance(0.5):
            inputs.append("" if self.chance(0.1) else self.weight(self.values((out,)) * self.chance(0.8)))
        self.add("ConvTranspose" if transposed else "Conv", inputs, [batch, out, *result], **attributes)

    def held(self, array: NDArray[np.float32], axis: int) -> str:
        """A weight, at times as its codes behind DequantizeLinear."""
        if self.opset < 13 or not self.chance(0.12):
            return self.weight(array)
        channels = self.chance(0.5)
        scale = np.full(array.shape[axis] if channels else (), 2 / 127, np.float32)
        inputs = [self.weight(np.round(array / (2 / 127)), np.int8), self.weight(scale)]
        if self.chance(0.5):
            inputs.append(self.weight(np.zeros(scale.shape), np.int8))
        return self.add("DequantizeLinear", inputs, array.shape, axis=axis if channels else None)

    def normalization(self) -> None:
        x = self.source((2, 3, 4, 5))
        channels = self.shapes[x][1]
        inputs = [self.weight(self.values((channels,))), self.weight(self.values((channels,)))]
        inputs += [self.weight(self.values((channels,))), self.weight(self.values((channels,), 0.5, 2))]
        self.add("BatchNormalization", [x, *inputs], self.shapes[x], epsilon=self.one([None, 1e-3]))

    def gemm(self) -> None:
        x = self.source((2,))
        rows, columns = self.shapes[x]
        wide, transposed, turned = self.one([self.size, self.draw(1, 5)]), self.chance(0.5), self.chance(0.2)
        if turned:
            rows, columns = columns, rows
        inputs = [x, self.weight(self.values((wide, columns) if transposed else (columns, wide)))]
        if self.chance(0.7) or self.opset < 11:
            forms = [(wide,), (1, wide), (), (1,), (rows, 1), (rows, wide)]
            inputs.append(self.weight(self.values(self.one(forms)) * np.float32(self.chance(0.9))))
        scales = {"alpha": self.one([None, 0.5]), "beta": self.one([None, None, 2.0])}
        turns = {"transA": 1 if turned else None, "transB": 1 if transposed else None}
        self.add("Gemm", inputs, (rows, wide), **scales, **turns)

    def product(self) -> None:
        x = self.source((2, 3, 4))
        *rows, columns = self.shapes[x]
        wide = self.one([self.size, self.draw(1, 5)])
        if self.chance(0.2):  # the constant on the left
            self.add("MatMul", [self.weight(self.values((wide, rows[-1]))), x], (*rows[:-1], wide, columns))
            return
        out = self.add("MatMul", [x, self.weight(self.values((columns, wide)))], (*rows, wide))
        if self.chance(0.6):
            self.arithmetic(out, ("Add", "Add", "Mul"))

    def arithmetic(self, x: str = "", operators: Sequence[str] = ("Mul", "Mul", "Add", "Add", "Sub", "Div")) -> None:
        """With a constant of one of the shapes that broadcast, on any axis, or to a larger result."""
        x = x or self.source()
        shape = self.shapes[x]
        kind = self.draw(0, 5)
        if kind == 0:
            form: Shape = self.one([(), (1,), (1,) * len(shape)])
        elif kind == 1:
            form = shape[self.draw(0, len(shape) - 1) :]
        elif kind == 2 and len(shape) > 1:
            form = (shape[1], *[1] * (len(shape) - 2))  # a channel
            form = (1, *form) if self.chance(0.5) else form
        elif kind == 3:
            form = tuple(self.draw(2, 3) if size == 1 and self.chance(0.3) else 1 for size in shape)
            form = (self.draw(1, 2), *form) if self.chance(0.2) else form
        else:
            axis = self.draw(0, len(shape) - 1)
            form = tuple(size if place == axis or self.chance(0.2) else 1 for place, size in enumerate(shape))
        op = self.one(operators)
        array = self.values(form, 0.5, 2) if op == "Div" or self.chance(0.5) else self.values(form)
        if self.chance(0.15):
            array = np.full(form, op in ("Mul", "Div"), np.float32)  # neutral
        inputs = [x, self.weight(array)]
        if self.chance(0.35) and op != "Div":
            inputs.reverse()
        self.add(op, inputs, np.broadcast_shapes(shape, form))

    def pair(self) -> None:
        """Two values of the graph."""
        x, y = self.source(), self.one(list(self.shapes))
        try:
            shape = np.broadcast_shapes(self.shapes[x], self.shapes[y])
        except ValueError:
            raise Skip from None
        self.add(self.one(["Add", "Mul", "Sub"]), [x, y], shape)

    def pad(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        mode = self.one(["constant", "constant", "constant", "reflect", "edge"])
        amounts = [self.draw(0, 2) * (axis % len(shape) > 1 or self.chance(0.1)) for axis in range(2 * len(shape))]
        if self.chance(0.15):
            amounts = [0] * len(amounts)
        if mode == "constant" and self.chance(0.1):
            amounts[-1] = -1
        if mode == "reflect":
            amounts = [min(amount, shape[axis % len(shape)] - 1) for axis, amount in enumerate(amounts)]
        value = float(self.chance(0.15))
        result = [size + amounts[axis] + amounts[axis + len(shape)] for axis, size in enumerate(shape)]
        if self.opset < 11:
            self.add("Pad", [x], result, pads=amounts, mode=mode, value=value)
            return
        inputs = [x, self.weight(amounts, np.int64)]
        if self.opset >= 18 and self.chance(0.2):  # the last axes, named
            axes = [axis - len(shape) for axis in range(min(2, len(shape) - 1), len(shape))] or [0]
            amounts = [amounts[axis] for axis in axes] + [
                amounts[axis + len(shape) if axis < 0 else axis] for axis in axes
            ]
            half = len(axes)
            result = list(shape)
            for place, axis in enumerate(axes):
                result[axis] += amounts[place] + amounts[place + half]
            inputs = [x, self.weight(amounts, np.int64), "", self.weight(axes, np.int64)]
        elif value or self.chance(0.3):
            inputs.append(self.weight(value) if value or self.chance(0.7) else "")
        self.add("Pad", inputs, result, mode=mode if mode != "constant" or self.chance(0.5) else None)

    def cut(self) -> None:
        x = self.source()
        shape = list(self.shapes[x])
        axes = sorted({self.draw(0, len(shape) - 1) for _ in range(self.draw(1, 2))})
        starts = [self.draw(0, shape[axis] - 1) for axis in axes]
        ends = [self.draw(start + 1, shape[axis]) for start, axis in zip(starts, axes)]
        if self.chance(0.2):
            starts, ends = [0] * len(axes), [2**31 - 1 if self.chance(0.5) else shape[axis] for axis in axes]
        steps = [self.draw(1, 2) if self.opset > 9 and self.chance(0.2) else 1 for _ in axes]
        for axis, start, end, step in zip(axes, starts, ends, steps):
            shape[axis] = len(range(self.shapes[x][axis])[start:end:step])
        if self.chance(0.3):
            starts = [start - self.shapes[x][axis] for start, axis in zip(starts, axes)]
        if self.opset < 10:
            self.add("Slice", [x], shape, starts=starts, ends=ends, axes=axes)
            return
        named = [axis - len(shape) if self.chance(0.3) else axis for axis in axes]
        inputs = [x, *(self.weight(item, np.int64) for item in (starts, ends, named))]
        if max(steps) > 1 or self.chance(0.4):
            inputs.append(self.weight(steps, np.int64))
        self.add("Slice", inputs, shape)

    def transpose(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        perm = [int(axis) for axis in self.rng.permutation(len(shape))]
        perm = list(range(len(shape))) if self.chance(0.1) else perm
        if self.chance(0.15):
            self.add("Transpose", [x], shape[::-1])
        else:
            self.add("Transpose", [x], [shape[axis] for axis in perm], perm=perm)

    def reshape(self) -> None:
        x = self.source()
        shape, kind = list(self.shapes[x]), self.draw(0, 5)
        count = int(np.prod(shape))
        if kind == 0:
            target = [count]
        elif kind == 1 and len(shape) > 1:
            axis = self.draw(0, len(shape) - 2)
            target = [*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]]
        elif kind == 2:
            axis = self.draw(0, len(shape) - 1)
            divisor = self.one([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0])
            target = [*shape[:axis], divisor, shape[axis] // divisor, *shape[axis + 1 :]]
        elif kind == 3:
            target = [int(size) for size in self.rng.permutation(shape)]
        elif kind == 4:
            axis = self.draw(0, len(shape))
            self.add("Flatten", [x], [int(np.prod(shape[:axis])), int(np.prod(shape[axis:]))], axis=axis)
            return
        else:
            target = shape
        asked = list(target)
        for axis in range(min(len(asked), len(shape))):
            if asked[axis] == shape[axis] and self.chance(0.2):
                asked[axis] = 0
        if self.chance(0.4):
            asked[self.draw(0, len(asked) - 1)] = -1
        if self.chance(0.15) and self.opset >= 13:  # sizes taken from a shape
            made = self.add("Shape", [x], [len(shape)])
            picked = [self.add("Gather", [made, self.weight(axis, np.int64)], []) for axis in range(len(shape))]
            first = self.weight([0], np.int64)
            parts = [self.add("Unsqueeze", [name, first], [1]) for name in picked]
            whole = self.add("Concat", parts, [len(shape)], axis=0)
            for name in (made, *picked, *parts, whole):
                del self.shapes[name]
            self.add("Reshape", [x, whole], shape)
            return
        self.add("Reshape", [x, self.weight(asked, np.int64)], target)

    def squeeze(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        if self.chance(0.6):
            count = self.draw(1, 2)
            places = sorted(int(axis) for axis in self.rng.choice(len(shape) + count, count, replace=False))
            result = list(shape)
            for axis in places:
                result.insert(axis, 1)
            op, axes = (
                "Unsqueeze",
                [axis - len(result) if self.opset > 10 and self.chance(0.3) else axis for axis in places],
            )
        else:
            ones = [axis for axis, size in enumerate(shape) if size == 1]
            if not ones:
                raise Skip
            op, axes = "Squeeze", [int(self.one(ones))]
            result = [size for axis, size in enumerate(shape) if axis not in axes]
        if self.opset < 13:
            self.add(op, [x], result, axes=axes)
        else:
            self.add(op, [x, self.weight(axes, np.int64)], result)

    def reduce(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        op = self.one(["ReduceSum", "ReduceSum", "ReduceMean", "ReduceMax"])
        axes = sorted({self.draw(0, len(shape) - 1) for _ in range(self.draw(1, 2))})
        keep = self.chance(0.5)
        result = [1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes]
        as_input = self.opset >= (13 if op == "ReduceSum" else 18)
        inputs = [x, self.weight(axes, np.int64)] if as_input else [x]
        out = self.add(op, inputs, result, keepdims=int(keep), axes=None if as_input else axes)
        if not keep and self.chance(0.5):
            result = [1 if axis in axes else size for axis, size in enumerate(shape)]
            if self.opset < 13:
                self.add("Unsqueeze", [out], result, axes=axes)
            else:
                self.add("Unsqueeze", [out, self.weight(axes, np.int64)], result)

    def elementwise(self) -> None:
        x = self.source()
        op = self.one(["Relu", "Relu", "LeakyRelu", "Sigmoid", "Abs", "Neg", "Identity", "Dropout", "Softmax", "Floor"])
        attributes = {"axis": self.draw(0, len(self.shapes[x]) - 1)} if op == "Softmax" and len(self.shapes[x]) else {}
        self.add(op, [x], self.shapes[x], **attributes)

    def clip(self) -> None:
        x = self.source()
        low, high = sorted(float(value) for value in self.values((2,)))
        if self.chance(0.15) and self.opset >= 12:
            op = self.one(["Min", "Max"])
            self.add(op, [x, self.weight(low)], self.shapes[x])
        elif self.opset < 11:
            self.add("Clip", [x], self.shapes[x], min=low, max=high if self.chance(0.8) else None)
        else:
            ends = [self.weight(low) if self.chance(0.8) else "", self.weight(high)]
            self.add("Clip", [x, *ends[: self.draw(1, 2)]], self.shapes[x])

    def cast(self) -> None:
        x = self.source()
        half = self.add("Cast", [x], self.shapes[x], to=self.one([TensorProto.FLOAT, TensorProto.DOUBLE]))
        kind = self.nodes[-1].attribute[0].i
        if kind != TensorProto.FLOAT:
            del self.shapes[half]
            self.add("Cast", [half], self.shapes[x], to=TensorProto.FLOAT)

    def join(self) -> None:
        x = self.source()
        shape = list(self.shapes[x])
        axis = self.draw(0, len(shape) - 1)
        others = [
            name
            for name, other in self.shapes.items()
            if len(other) == len(shape) and all(a == b or i == axis for i, (a, b) in enumerate(zip(shape, other)))
        ]
        parts = [x, *(self.one(others) for _ in range(self.draw(0, 2)))]
        if self.chance(0.3):
            parts.insert(self.draw(0, 1), self.weight(self.values([*shape[:axis], 1, *shape[axis + 1 :]])))
        shape[axis] = sum(self.shapes[name][axis] if name in self.shapes else 1 for name in parts)
        self.add("Concat", parts, shape, axis=axis)

    def split(self) -> None:
        x = self.source()
        shape = list(self.shapes[x])
        axis = self.draw(0, len(shape) - 1)
        if shape[axis] < 2:
            raise Skip
        first = self.draw(1, shape[axis] - 1)
        sizes = [first, shape[axis] - first]
        shape[axis] = first
        if self.opset < 13:
            self.add("Split", [x], shape, 2, axis=axis, split=sizes)
        else:
            self.add("Split", [x, self.weight(sizes, np.int64)], shape, 2, axis=axis)
        second = self.nodes[-1].output[1]
        shape[axis] = sizes[1]
        self.shapes[second] = tuple(shape)

    def expand(self) -> None:
        x = self.source()
        shape = [self.draw(1, 3) if size == 1 else self.one([1, size]) for size in self.shapes[x]]
        shape = [self.draw(1, 2), *shape] if self.chance(0.2) else shape
        self.add("Expand", [x, self.weight(shape, np.int64)], np.broadcast_shapes(tuple(shape), self.shapes[x]))

    def gather(self) -> None:
        x = self.source()
        shape = self.shapes[x]
        axis = self.draw(0, len(shape) - 1)
        form: Shape = self.one([(), (2,), (1,)])
        indices = self.rng.integers(-shape[axis] if self.opset > 10 else 0, shape[axis], form)
        self.add("Gather", [x, self.weight(indices, np.int64)], [*shape[:axis], *form, *shape[axis + 1 :]], axis=axis)

    def pool(self) -> None:
        x = self.source((3, 4, 5))
        batch, channels, *sizes = self.shapes[x]
        if self.chance(0.4):
            self.add("GlobalAveragePool", [x], [batch, channels, *[1] * len(sizes)])
            return
        kernel = [self.draw(1, min(2, size)) for size in sizes]
        pads = [self.draw(0, kernel[axis % len(sizes)] - 1) for axis in range(2 * len(sizes))]
        result = [size + pads[axis] + pads[axis + len(sizes)] - kernel[axis] + 1 for axis, size in enumerate(sizes)]
        self.add(self.one(["MaxPool", "AveragePool"]), [x], [batch, channels, *result], kernel_shape=kernel, pads=pads)

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
        codes = self.add("QuantizeLinear", [x, scale, zero], shape, axis=axis if form else None)
        del self.shapes[codes]
        self.add("DequantizeLinear", [codes, scale, zero], shape, axis=axis if form else None)

    def branch(self) -> None:
        """An If by a constant or by the input, whose bodies read, or give, what is around them."""
        if self.opset < 11:
            raise Skip
        x = self.source()
        if self.chance(0.3):
            condition = self.weight(self.chance(0.5), np.bool_)
        else:
            total = self.add("ReduceMax", [next(iter(self.feed))], [], keepdims=0)
            condition = self.add("Greater", [total, self.weight(self.one([-9.0, 9.0]))], [])
            del self.shapes[total], self.shapes[condition]
        bodies = []
        for name in ("then", "else"):
            result = f"{name}{len(self.nodes)}"
            op = self.one(["Identity", "Relu", "Neg"])
            bodies.append(
                helper.make_graph(
                    [helper.make_node(op, [x], [result])],
                    name,
                    [],
                    [helper.make_tensor_value_info(result, TensorProto.FLOAT, self.shapes[x])],
                )
            )
        self.add("If", [condition], self.shapes[x], then_branch=bodies[0], else_branch=bodies[1])

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
        ends = [name for name in made if name not in read]
        inner = [name for name in made if name in read and self.chance(0.15)]
        names = [*ends, *inner] or [self.last]
        batch = self.chance(0.4) and self.may_be_open  # one size that isn't said
        infos = [
            helper.make_tensor_value_info(
                name, TensorProto.FLOAT, [f"n{name}", *array.shape[1:]] if batch else array.shape
            )
            for name, array in self.feed.items()
        ]
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None if batch else self.shapes[name])
            for name in names
        ]
        graph = helper.make_graph(self.nodes, "random", infos, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


KINDS: list[Callable[[RandomGraph], None]] = [
    *[RandomGraph.scaled] * 4,
    *[RandomGraph.chain, RandomGraph.arithmetic, RandomGraph.padded_convolution, RandomGraph.reshaped_gemm] * 2,
    RandomGraph.convolution,
    RandomGraph.normalization,
    RandomGraph.gemm,
    RandomGraph.product,
    RandomGraph.pair,
    RandomGraph.pad,
    RandomGraph.cut,
    RandomGraph.transpose,
    RandomGraph.reshape,
    RandomGraph.squeeze,
    RandomGraph.reduce,
    RandomGraph.elementwise,
    RandomGraph.clip,
    RandomGraph.cast,
    RandomGraph.join,
    RandomGraph.split,
    RandomGraph.expand,
    RandomGraph.gather,
    RandomGraph.pool,
    RandomGraph.quantize,
    RandomGraph.branch,
]
