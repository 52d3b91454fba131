"""A batch of 1 that a trace left in constants, as `x.view(1, -1)` does, though the inputs' batch is open.

Shapes are inferred at one sample and at several. Where they contradict each other at several, the model is for one sample, and
what holds the 1 is named: shapes of Reshape and Resize, initial states, constants that are joined with samples. A Reshape keeps
its elements' order, so that the place of the samples in its result follows from how many elements lie outside them: there the
1 may be opened. Whether that was meant throughout only results tell: `ort.comparison` compares two samples with each of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from trtopt.core.values import Issue, x
from trtopt.graph.inputs import declare_outputs, network_inputs, network_outputs
from trtopt.graph.proto import (
    LARGE,
    RECURRENT,
    STANDARD,
    Links,
    attribute,
    opset_version,
    refill,
    skeleton,
    tensor_info,
    to_array,
    unique,
    whole_copy,
)
from trtopt.graph.work import shapes_at

SAMPLES = 3  # the other batch that shapes are inferred at: a size that few models have anywhere
_GUESSES = (224, 64, 320, 48, 16, 8)  # of what else is open: the size with which most shapes are known
_ROUNDS = 500  # nodes that are opened
_STATES = (5, 6)  # of a recurrent node's inputs
_EXPAND = 8  # the opset that it came with


@dataclass(frozen=True)
class HeldBatch:
    """Where a model holds a batch of 1.

    Attributes:
        issues: the nodes that do, or that don't fit because of others; empty: shapes go with any batch, as far as is known.
        certain: nothing but a batch of 1 can run; else only an output says that it has the inputs' batch, and hasn't.
        opened: the model with these nodes for any batch; None: not all can be.
        length: the first node that holds a length of the trace instead, so that nothing is known of the batch.
    """

    issues: tuple[Issue, ...] = ()
    certain: bool = False
    opened: ModelProto | None = None
    length: Issue | None = None


def held_batch(proto: ModelProto) -> HeldBatch:
    """Where a valid model holds a batch of 1 whose inputs leave theirs open, on the first axis.

    Ask of the model as it came, too: folding takes a Transpose of a size of 1 for a Reshape.
    """
    infos = network_inputs(proto)
    batched = [name for name, info in infos.items() if info.batch_axis == 0 and 0 in info.open_axes]
    if not batched or not any(node.op_type in ("Reshape", "Resize", "Concat", *RECURRENT) for node in proto.graph.node):
        return HeldBatch()
    light = skeleton(proto, LARGE)
    for value in light.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim if value.name in infos else ()):
            if axis == 0 and value.name in batched:
                dim.dim_param = "batch"
            elif axis in infos[value.name].open_axes:
                dim.dim_param = dim.dim_param or f"{value.name}.{axis}"
    alone = all(info.open_axes in ((), (0,)) for info in infos.values())
    traces = [_Trace(light, guess, alone) for guess in ((1,) if alone else _GUESSES)]
    sound = [item for item in traces if item.unfit() is None]
    if not alone and not sound:  # else one sample alone doesn't fit, whatever its number
        return HeldBatch(length=traces[0].unfit())
    trace = max(sound or traces, key=lambda item: len(item.one))
    return trace.opened(proto, {infos[name].shape[0] for name in batched})


def _multiply(node: NodeProto, data: Sequence[int], weight: Sequence[int]) -> bool:
    """Whether a Gemm or Conv can multiply these shapes."""
    if node.op_type == "Conv":
        return bool(data[1] == weight[1] * attribute(node, "group", 1))
    return data[0 if attribute(node, "transA", 0) else 1] == weight[1 if attribute(node, "transB", 0) else 0]


class _Trace:
    """A light model's shapes at one sample and at several, and what is changed in it."""

    def __init__(self, light: ModelProto, guess: int, alone: bool) -> None:
        self.light, self.guess, self.alone = light, guess, alone
        self.nodes = light.graph.node
        self.one = self._shapes(1)
        self.declared = [tensor_info(value) for value in light.graph.output]

    def _shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return shapes_at(self.light, {"batch": batch}, self.guess)

    def unfit(self) -> Issue | None:
        """A Reshape that makes another number of elements of one sample than it gets."""
        for node in self.nodes:
            if node.op_type != "Reshape" or node.domain not in STANDARD:
                continue
            data, result = self.one.get(node.input[0]), self.one.get(node.output[0])
            if data and result and math.prod(data) != math.prod(result):
                reason = f"with {self.guess} for the open sizes it makes {x(result)} of {x(data)}"
                return Issue(node.name, node.op_type, reason)
        return None

    def opened(self, proto: ModelProto, names: set[int | str]) -> HeldBatch:
        """`names`: what the inputs' batch is called."""
        issues, certain = list[Issue](), False
        for _ in range(_ROUNDS):
            self.several = self._shapes(SAMPLES)
            self.constants = Links(self.light.graph).constants
            inner = self._inner()
            place, what = next(self._misfits(), (None, ""))
            certain = certain or (place is not None and not issues)
            fits = place is None and not (what := self._undeclared(names))
            if fits and not issues:
                break
            last = len(self.nodes) if place is None else place + 1
            held = (item for node in self.nodes[:last] if (item := self._held(node, inner)) is not None)
            found = next((item for item in held if not fits or self._is_one(*item)), None)
            if fits and found is None:
                break
            if found is None or not self._open(*found):
                node = self.nodes[-1 if place is None else place] if found is None else found[0]
                reason = what if found is None else found[1]
                issues.append(Issue(node.name, node.op_type, reason))
                return HeldBatch(tuple(dict.fromkeys(issues)), certain)
            issues.append(Issue(found[0].name, found[0].op_type, found[1]))
        if not issues:
            return HeldBatch()
        whole = whole_copy(proto)
        refill(whole.graph.node, self.nodes)
        there = {tensor.name for tensor in proto.graph.initializer}
        whole.graph.initializer.extend(item for item in self.light.graph.initializer if item.name not in there)
        whole.ir_version = max(whole.ir_version, 4)  # since when initializers needn't be inputs
        declare_outputs(whole, network_outputs(whole, network_inputs(whole)))
        return HeldBatch(tuple(issues), certain, whole)

    def _misfits(self) -> Iterator[tuple[int, str]]:
        """Nodes that don't go together with several samples, though with one; what is wrong with each."""
        for index, node in enumerate(self.nodes):
            if node.domain not in STANDARD or not node.input or not node.output:
                continue
            data, weight = (self.several.get(name) for name in (*node.input, "")[:2])
            result, number = self.several.get(node.output[0]), f"a batch of {SAMPLES}"
            if (
                node.output[0] in self.one
                and result is None
                and all(name in self.several for name in node.input if name)
            ):
                yield index, f"its inputs don't fit together at {number}, only at 1"
            elif node.op_type in ("Reshape", "Resize") and data and result:
                measure = math.prod if node.op_type == "Reshape" else operator.itemgetter(0)
                if measure(data) != measure(result):
                    yield index, f"at {number} it makes {x(result)} of {x(data)}"
            elif node.op_type in ("Gemm", "Conv") and data and weight and not _multiply(node, data, weight):
                alone = self.one.get(node.input[0])
                if alone and _multiply(node, alone, weight):  # else it is wrong at any batch
                    yield index, f"at {number} its input is {x(data)}, and its weights are {x(weight)}"
            elif node.op_type in RECURRENT and data and self._states(node):
                yield index, f"its initial states are for a batch of 1, and its input at {number} is {x(data)}"

    def _undeclared(self, names: set[int | str]) -> str:
        """An output that declares the inputs' batch by its name, and doesn't follow it."""
        for info in self.declared:
            shapes = self.one.get(info.name, ()), self.several.get(info.name, ())
            for declared, one, several in zip(info.shape, *shapes):
                if isinstance(declared, str) and declared in names and one == several == 1:
                    return f"the output {info.name} is {x(shapes[1])} at a batch of {SAMPLES}, and declares {info.dims}"
        return ""

    def _is_one(self, node: NodeProto, _: str, axis: int) -> bool:
        """Whether a Reshape's target has a 1 where the samples are."""
        return node.op_type == "Reshape" and int(to_array(self.constants[node.input[1]])[axis]) == 1

    def _states(self, node: NodeProto) -> list[int]:
        """A recurrent node's inputs that are constant states of one sample."""
        data = self.several.get(node.input[0])
        if not data or len(data) != 3 or attribute(node, "layout", 0) or data[1] == 1:
            return []
        held = [slot for slot in _STATES if len(node.input) > slot and node.input[slot] in self.constants]
        return [slot for slot in held if list(self.constants[node.input[slot]].dims)[1:2] == [1]]

    def _single(self, node: NodeProto) -> list[int]:
        """A Concat's inputs that are constants for one sample, where others grow with the samples."""
        if attribute(node, "axis", 1) == 0 or not any(self._axis(name) == 0 for name in node.input):
            return []
        held = [slot for slot, name in enumerate(node.input) if name in self.constants]
        return [slot for slot in held if self.constants[node.input[slot]].dims[0] == 1]

    def _axis(self, name: str) -> int | None:
        """The one axis of a tensor that grows with the samples."""
        one, several = self.one.get(name), self.several.get(name)
        if one is None or several is None or len(one) != len(several):
            return None
        grown = [axis for axis, (a, b) in enumerate(zip(one, several)) if a != b]
        return grown[0] if len(grown) == 1 and several[grown[0]] == SAMPLES * one[grown[0]] else None

    def _inner(self) -> set[str]:
        """Tensors in whose growing axis the samples lie inside of what they were merged with, as of steps × samples."""
        inner = set[str]()
        for node in self.nodes:
            for name in filter(None, node.output):
                axis = self._axis(name)
                if axis is None or self.one[name][axis] == 1:
                    continue
                if node.op_type == "Reshape":
                    grown = self._grown(node, inner)
                    if grown is not None and grown[1] and grown[0] == axis:
                        inner.add(name)
                elif any(
                    item in inner
                    and (own := self._axis(item)) is not None
                    and self.one[item][own] == self.one[name][axis]
                    for item in node.input
                ):
                    inner.add(name)
        return inner

    def _grown(self, node: NodeProto, inner: set[str]) -> tuple[int, bool] | None:
        """Which axis of a Reshape's result is to grow, and whether the samples lie inside of it."""
        source, shape = self.one.get(node.input[0]), self.one.get(node.output[0])
        axis = self._axis(node.input[0])
        if source is None or shape is None or axis is None:
            return None
        outside = math.prod(source[: axis + (node.input[0] in inner)])
        before = [math.prod(shape[:place]) for place in range(len(shape) + 1)]
        starts = [place for place in range(len(shape)) if before[place] == outside]
        if ones := [place for place in starts if shape[place] == 1]:
            return ones[0], False
        if starts and (starts[0] != len(shape) - 1 or not starts[0]):
            return starts[0], False
        ends = [place for place in range(len(shape)) if before[place + 1] == outside]
        return (ends[-1], True) if ends else None

    def _held(self, node: NodeProto, inner: set[str]) -> tuple[NodeProto, str, int] | None:
        """What a node holds that is for a batch of 1, and the axis where."""
        if node.op_type in RECURRENT and self._states(node):
            return node, "its initial states are constants for a batch of 1", 0
        if node.op_type == "Concat" and self._single(node):
            return node, "it joins a constant for a batch of 1 with samples", 0
        if node.op_type not in ("Reshape", "Resize") or node.domain not in STANDARD or len(node.input) < 2:
            return None
        target = self.constants.get(node.input[-1])
        source, shape, result = (
            self.one.get(node.input[0]),
            self.one.get(node.output[0]),
            self.several.get(node.output[0]),
        )
        if target is None or source is None or shape is None or result is None:
            return None
        numbers = x([int(number) for number in to_array(target).ravel()])
        if node.op_type == "Resize":
            wrong = len(node.input) > 3 and self._axis(node.input[0]) == 0 and result == shape
            return (node, f"its sizes {numbers} are for a batch of 1", 0) if wrong else None
        grown = self._grown(node, inner)
        if grown is None or result == tuple(
            size * (SAMPLES if place == grown[0] else 1) for place, size in enumerate(shape)
        ):
            return None
        return node, f"its shape {numbers} is for a batch of 1", grown[0]

    def _open(self, node: NodeProto, _: str, axis: int) -> bool:
        """Write the node for any batch; whether that can be."""
        if node.op_type in RECURRENT:
            slots = self._states(node)
            if any(to_array(self.constants[node.input[slot]]).any() for slot in slots):
                return False
            for slot in slots:  # zeros are what it has without them
                node.input[slot] = ""
            return True
        if node.op_type == "Concat":
            return self._repeat(node)
        source, shape = self.one[node.input[0]], self.one[node.output[0]]
        if node.op_type == "Resize":
            return self._open_sizes(node, source, shape)
        target = [int(number) for number in to_array(self.constants[node.input[1]])]
        free = [place for place, size in enumerate(target) if size == -1 and place != axis]
        copies = not attribute(node, "allowzero", 0)
        if not free:
            target[axis] = -1
        elif copies and axis < len(source) and self._axis(node.input[0]) == axis and source[axis] == shape[axis]:
            target[axis] = 0
        elif self.alone:
            target[free[0]], target[axis] = shape[free[0]], -1
        else:
            return False
        node.input[1] = self._constant(node, "any_batch", np.asarray(target, np.int64))
        return True

    def _repeat(self, node: NodeProto) -> bool:
        """A Concat whose constants come once for each sample."""
        samples = next(name for name in node.input if self._axis(name) == 0)
        first, count = self._constant(node, "first", np.zeros(1, np.int64)), f"{node.output[0]}_samples"
        made = [
            helper.make_node("Shape", [samples], [f"{count}_shape"], name=f"{node.name}/Shape"),
            helper.make_node("Gather", [f"{count}_shape", first], [count], name=f"{node.name}/Gather"),
        ]
        for slot in self._single(node):
            sizes = np.asarray([*self.constants[node.input[slot]].dims][1:], np.int64)
            rest, shape = self._constant(node, "sizes", sizes), f"{count}_{slot}_shape"
            made.append(helper.make_node("Concat", [count, rest], [shape], name=f"{node.name}/{slot}/Concat", axis=0))
            repeated, label = f"{count}_{slot}", f"{node.name}/{slot}/Expand"
            made.append(helper.make_node("Expand", [node.input[slot], shape], [repeated], name=label))
            node.input[slot] = repeated
        nodes = [item for other in self.nodes for item in ((*made, other) if other is node else (other,))]
        refill(self.nodes, [NodeProto.FromString(item.SerializeToString()) for item in nodes])
        return opset_version(self.light) >= _EXPAND

    def _open_sizes(self, node: NodeProto, source: Sequence[int], shape: Sequence[int]) -> bool:
        """A Resize by factors, where they are whole numbers."""
        factors = [size // other for size, other in zip(shape, source)]
        exact = all(size == other * factor for size, other, factor in zip(shape, source, factors))
        if (
            not exact
            or not self.alone
            or any(item.name in ("axes", "keep_aspect_ratio_policy") for item in node.attribute)
        ):
            return False
        node.input[2] = self._constant(node, "factors", np.asarray(factors, np.float32))
        del node.input[3:]
        return True

    def _constant(self, node: NodeProto, what: str, content: NDArray[Any]) -> str:
        name = unique(f"{node.output[0]}_{what}", {item.name for item in self.light.graph.initializer})
        self.light.graph.initializer.append(numpy_helper.from_array(content, name))
        return name
