"""Find a batch of 1 that a trace left in constants, as `x.view(1, -1)` does, though the inputs' batch is open; and open it.

Shapes are inferred at one sample and at several. Where they contradict each other at several, the model is for one sample, and
a node before that holds the 1: the shape of a Reshape, or initial states. A Reshape keeps its elements' order: the place
of the samples in its result follows from how many elements lie outside them: there the 1 may be opened. Whether that was meant
throughout only results tell: `ort.comparison` compares two samples with each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from trtopt.core.values import Issue, x
from trtopt.graph.inputs import declare_outputs, network_inputs, network_outputs
from trtopt.graph.op_types import RECURRENT
from trtopt.graph.proto import (
    LARGE,
    STANDARD,
    Links,
    attribute,
    refill,
    skeleton,
    tensor_info,
    to_array,
    unique,
    whole_copy,
)
from trtopt.graph.work import shapes_at

SAMPLES = 3  # the other batch that shapes are inferred at: a size that few models have anywhere
_GUESSES = (224, 64, 16)  # of what else is open: the size with which most shapes are known
_ROUNDS = 500  # nodes that are opened
_STATES = (5, 6)  # of a recurrent node's inputs


@dataclass(frozen=True)
class TracedBatch:
    """Places where a model holds a batch of 1.

    Attributes:
        issues: the nodes that do, or that don't fit because of others; empty: shapes go with any batch, as far as is known.
        certain: nothing but a batch of 1 can run; else only an output says that it has the inputs' batch, and hasn't.
        dynamic_model: the model with these nodes for any batch; None: not all can be.
        length: the first node that holds a length of the trace instead, so that nothing is known of the batch.
    """

    issues: tuple[Issue, ...] = ()
    certain: bool = False
    dynamic_model: ModelProto | None = None
    length: Issue | None = None


def find_traced_batch(proto: ModelProto) -> TracedBatch:
    """Find where a valid model holds a batch of 1 whose inputs leave theirs open, on the first axis.

    Ask of the model as it came, too: folding takes a Transpose of a size of 1 for a Reshape.
    """
    infos = network_inputs(proto)
    batched = [name for name, info in infos.items() if info.batch_axis == 0 and 0 in info.open_axes]
    if not batched or not any(node.op_type in ("Reshape", "Resize", "Concat", *RECURRENT) for node in proto.graph.node):
        return TracedBatch()
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
        return TracedBatch(length=traces[0].unfit())
    trace = max(sound or traces, key=lambda item: len(item.one))
    issues, certain, opened = trace.opened({infos[name].shape[0] for name in batched})
    if not opened or not issues:
        return TracedBatch(tuple(dict.fromkeys(issues)), certain)
    whole = whole_copy(proto)
    refill(whole.graph.node, light.graph.node)
    there = {tensor.name for tensor in proto.graph.initializer}
    whole.graph.initializer.extend(item for item in light.graph.initializer if item.name not in there)
    whole.ir_version = max(whole.ir_version, 4)  # since when initializers needn't be inputs
    declare_outputs(whole, network_outputs(whole, network_inputs(whole)))
    return TracedBatch(tuple(issues), certain, whole)


class _Trace:
    """Shapes of a light model at one sample and at several, and what is changed in it.

    Args:
        guess: the size of what else is open.
        alone: nothing else is.
    """

    def __init__(self, light: ModelProto, guess: int, alone: bool) -> None:
        self.light, self.guess, self.alone, self.nodes = light, guess, alone, light.graph.node
        self.one = shapes_at(light, {"batch": 1}, guess)

    def unfit(self) -> Issue | None:
        """Return a Reshape that makes another number of elements of one sample than it gets."""
        for node in self.nodes:
            data, result = (self.one.get(name) for name in (next(iter(node.input), ""), node.output[0]))
            if node.op_type == "Reshape" and data and result and math.prod(data) != math.prod(result):
                reason = f"with {self.guess} for the open sizes it makes {x(result)} of {x(data)}"
                return Issue(node.name, node.op_type, reason)
        return None

    def opened(self, names: set[int | str]) -> tuple[list[Issue], bool, bool]:
        """Open one node after the other: those that were or couldn't be, whether that is certain, and whether all could.

        Args:
            names: what the inputs' batch is called.
        """
        issues, certain = list[Issue](), False
        for _ in range(_ROUNDS):
            self.several = shapes_at(self.light, {"batch": SAMPLES}, self.guess)
            self.constants = Links(self.light.graph).constants
            place, reason = next(
                ((n, why) for n, node in enumerate(self.nodes) if (why := self._misfit(node))), (None, "")
            )
            certain = certain or (place is not None and not issues)
            reason = reason or self._undeclared(names)
            if not reason and not issues:
                return issues, certain, True
            last = len(self.nodes) if place is None else place + 1
            held = ((node, *item) for node in self.nodes[:last] if (item := self._held(node)) is not None)
            found = next((item for item in held if reason or self._is_one(item[0], item[2])), None)
            if found is None and not reason:
                return issues, certain, True
            if found is None or not self._open(found[0], found[2]):
                node = self.nodes[last - 1] if found is None else found[0]
                issues.append(Issue(node.name, node.op_type, reason if found is None else found[1]))
                return issues, certain, False
            issues.append(Issue(found[0].name, found[0].op_type, found[1]))
        return issues, certain, False

    def _misfit(self, node: NodeProto) -> str:
        """Return what is wrong with a node at several samples, though not at one; empty: nothing is."""
        if node.domain not in STANDARD or not node.input or not node.output:
            return ""
        data, weight = (self.several.get(name) for name in (*node.input, "")[:2])
        result, alone = self.several.get(node.output[0]), self.one.get(node.input[0])
        if node.output[0] in self.one and result is None and all(name in self.several for name in node.input if name):
            return f"its inputs don't fit together at a batch of {SAMPLES}, only at 1"
        if node.op_type in ("Reshape", "Resize") and data and result:
            sizes = [math.prod(shape) if node.op_type == "Reshape" else shape[0] for shape in (data, result)]
            return f"at a batch of {SAMPLES} it makes {x(result)} of {x(data)}" if sizes[0] != sizes[1] else ""
        if node.op_type in ("Gemm", "Conv") and data and weight and alone:
            axis, other = (0 if attribute(node, "transA", 0) else 1), (1 if attribute(node, "transB", 0) else 0)
            needed = weight[1] * attribute(node, "group", 1) if node.op_type == "Conv" else weight[other]
            if data[axis] != needed == alone[axis]:  # else it is wrong at any batch
                return f"at a batch of {SAMPLES} its input is {x(data)}, and its weights are {x(weight)}"
        if node.op_type in RECURRENT and data and self._states(node):
            return f"its initial states are for a batch of 1, and its input at a batch of {SAMPLES} is {x(data)}"
        return ""

    def _undeclared(self, names: set[int | str]) -> str:
        """Return which output declares the inputs' batch by its name, and doesn't follow it; empty: none."""
        for info in map(tensor_info, self.light.graph.output):
            shapes = self.one.get(info.name, ()), self.several.get(info.name, ())
            for declared, one, several in zip(info.shape, *shapes):
                if isinstance(declared, str) and declared in names and one == several == 1:
                    return f"the output {info.name} is {x(shapes[1])} at a batch of {SAMPLES}, and declares {info.dims}"
        return ""

    def _states(self, node: NodeProto) -> list[int]:
        """Return a recurrent node's inputs that are constant states of one sample."""
        data = self.several.get(node.input[0])
        if not data or len(data) != 3 or attribute(node, "layout", 0) or data[1] == 1:
            return []
        held = [slot for slot in _STATES if len(node.input) > slot and node.input[slot] in self.constants]
        return [slot for slot in held if list(self.constants[node.input[slot]].dims)[1:2] == [1]]

    def _axis(self, name: str) -> int | None:
        """Return the one axis of a tensor that grows with the samples."""
        one, several = self.one.get(name, ()), self.several.get(name, ())
        grown = [axis for axis, (a, b) in enumerate(zip(one, several)) if a != b]
        single = len(one) == len(several) and len(grown) == 1
        return grown[0] if single and several[grown[0]] == SAMPLES * one[grown[0]] else None

    def _held(self, node: NodeProto) -> tuple[str, int] | None:
        """Return what a node holds that is for a batch of 1, and the axis of its result that is to grow."""
        if node.op_type in RECURRENT and self._states(node):
            return "its initial states are constants for a batch of 1", 0
        if node.op_type != "Reshape" or node.domain not in STANDARD or node.input[1] not in self.constants:
            return None
        data, shape, result = (
            self.one.get(node.input[0]),
            *(it.get(node.output[0]) for it in (self.one, self.several)),
        )
        axis = self._axis(node.input[0])
        if data is None or shape is None or result is None or axis is None:
            return None
        outside = math.prod(data[:axis])
        starts = [place for place in range(len(shape)) if math.prod(shape[:place]) == outside]
        place = next((place for place in starts if shape[place] == 1), next(iter(starts), None))
        if place is None or (place and shape[place] != 1 and place == len(shape) - 1):
            return None  # samples that lie inside of what they are merged with
        if result == tuple(size * (SAMPLES if axis == place else 1) for axis, size in enumerate(shape)):
            return None
        numbers = x([int(number) for number in to_array(self.constants[node.input[1]]).ravel()])
        return f"its shape {numbers} is for a batch of 1", place

    def _is_one(self, node: NodeProto, axis: int) -> bool:
        """Return whether a Reshape's target has a 1 where the samples are."""
        return node.op_type == "Reshape" and int(to_array(self.constants[node.input[1]])[axis]) == 1

    def _open(self, node: NodeProto, axis: int) -> bool:
        """Write the node for any batch; False: it can't be."""
        if node.op_type in RECURRENT:
            slots = self._states(node)
            if any(to_array(self.constants[node.input[slot]]).any() for slot in slots):
                return False
            for slot in slots:  # zeros are what it has without them
                node.input[slot] = ""
            return True
        data, shape = self.one[node.input[0]], self.one[node.output[0]]
        target = [int(number) for number in to_array(self.constants[node.input[1]])]
        free = [place for place, size in enumerate(target) if size == -1 and place != axis]
        if not free:
            target[axis] = -1
        elif not attribute(node, "allowzero", 0) and self._axis(node.input[0]) == axis and data[axis] == shape[axis]:
            target[axis] = 0
        elif self.alone:
            target[free[0]], target[axis] = shape[free[0]], -1
        else:
            return False
        name = unique(f"{node.output[0]}_any_batch", {item.name for item in self.light.graph.initializer})
        self.light.graph.initializer.append(numpy_helper.from_array(np.asarray(target, np.int64), name))
        node.input[1] = name
        return True
