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
from trtopt.graph.op_types import RECURRENT, STATES
from trtopt.graph.proto import LARGE, STANDARD, Links, attribute, refill, skeleton, tensor_info, to_array, whole_copy
from trtopt.graph.work import GUESSES, shapes_at

SAMPLES = 3  # the other batch that shapes are inferred at: a size that few models have anywhere
_ROUNDS = 500  # nodes that are opened
_HELD = "its initial states are constants for a batch of 1"


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
        if value.name in batched:
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    alone = all(info.open_axes in ((), (0,)) for info in infos.values())
    traces = [_Trace(light, guess, alone) for guess in ((1,) if alone else GUESSES)]
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
            misfits = ((n, why) for n, node in enumerate(self.nodes) if (why := self._misfit(node)))
            place, reason = next(misfits, (len(self.nodes) - 1, ""))
            certain |= bool(reason) and not issues
            reason = reason or self._undeclared(names)
            # Where nothing contradicts several samples any more, what has a 1 in their place is opened all the same.
            held = ((node, *item) for node in self.nodes[: place + 1] if (item := self._held(node)) is not None)
            due = (item for item in held if reason or (issues and item[3]))
            node, why, axis, _ = next(due, (self.nodes[place], reason, None, False))
            if not why:
                return issues, certain, True
            issues.append(Issue(node.name, node.op_type, why))
            if axis is None or not self._open(node, axis):
                break
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
        return _HELD if self._states(node) else ""

    def _undeclared(self, names: set[int | str]) -> str:
        """Return which output declares the inputs' batch by its name, and doesn't follow it; empty: none."""
        for info in map(tensor_info, self.light.graph.output):
            shapes = self.one.get(info.name, ()), self.several.get(info.name, ())
            for declared, one, several in zip(info.shape, *shapes):
                if isinstance(declared, str) and declared in names and one == several == 1:
                    return f"the output {info.name} is {x(shapes[1])} at a batch of {SAMPLES}, and declares {info.dims}"
        return ""

    def _states(self, node: NodeProto) -> list[str]:
        """Return a recurrent node's inputs that are constant states of one sample."""
        data = self.several.get(node.input[0]) if node.op_type in RECURRENT else None
        if not data or len(data) != 3 or attribute(node, "layout", 0) or data[1] == 1:
            return []
        held = [name for name in node.input[STATES] if name in self.constants]
        return [name for name in held if list(self.constants[name].dims)[1:2] == [1]]

    def _axis(self, name: str) -> int | None:
        """Return the one axis of a tensor that grows with the samples."""
        one, several = self.one.get(name, ()), self.several.get(name, ())
        grown = [axis for axis, (a, b) in enumerate(zip(one, several)) if a != b]
        single = len(one) == len(several) and len(grown) == 1
        return grown[0] if single and several[grown[0]] == SAMPLES * one[grown[0]] else None

    def _held(self, node: NodeProto) -> tuple[str, int, bool] | None:
        """Return what a node holds that is for one sample, the axis of its result that is to grow, and whether a 1 is there."""
        if self._states(node):
            return _HELD, 0, False
        if node.op_type != "Reshape" or node.domain not in STANDARD or node.input[1] not in self.constants:
            return None
        data, shape = (self.one.get(name) for name in (node.input[0], node.output[0]))
        result, axis = self.several.get(node.output[0]), self._axis(node.input[0])
        if data is None or shape is None or result is None or axis is None:
            return None
        outside = math.prod(data[:axis])
        starts = [place for place in range(len(shape)) if math.prod(shape[:place]) == outside]
        place = next((place for place in starts if shape[place] == 1), next(iter(starts), None))
        if place is None or (place and shape[place] != 1 and place == len(shape) - 1):
            return None  # samples that lie inside of what they are merged with
        if result == tuple(size * (SAMPLES if axis == place else 1) for axis, size in enumerate(shape)):
            return None
        numbers = [int(number) for number in to_array(self.constants[node.input[1]]).ravel()]
        return f"its shape {x(numbers)} is for a batch of 1", place, numbers[place] == 1

    def _open(self, node: NodeProto, axis: int) -> bool:
        """Write the node for any batch; False: it can't be."""
        if states := self._states(node):  # zeros are what it has without them
            node.input[:] = ["" if name in states else name for name in node.input]
            return not any(to_array(self.constants[name]).any() for name in states)
        data, shape = self.one[node.input[0]], self.one[node.output[0]]
        target = [int(number) for number in to_array(self.constants[node.input[1]])]
        free = [place for place, size in enumerate(target) if size == -1 and place != axis]
        kept = not attribute(node, "allowzero", 0) and self._axis(node.input[0]) == axis and data[axis] == shape[axis]
        if free and not kept:
            target[free[0]] = shape[free[0]]
        target[axis] = 0 if free and kept else -1
        weights = self.light.graph.initializer
        node.input[1] = f"{node.output[0]}/any batch {len(weights)}"
        weights.append(numpy_helper.from_array(np.asarray(target, np.int64), node.input[1]))
        return self.alone or kept or not free
