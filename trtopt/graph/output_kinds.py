"""Kinds of outputs, which decide how two results are compared: guessed from the graph, or said by the user.

The guess looks at the type, the shape and the operators that the graph ends in, and at the output's name only where these
leave it open. It is made on the model as it is given, not on the folded one, and steps over what folding, typed casts and
Q/DQ change, so that the folded, the FP16 and the INT8 form of a model end alike.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnx import ModelProto, NodeProto

from trtopt.core.errors import UsageError
from trtopt.core.values import Kind as Kind, TensorInfo, x
from trtopt.graph.proto import Links, attribute, inferred_values, opset_version, tensor_info
from trtopt.graph.work import shapes_at

Given = Mapping[str, str] | Sequence[str]
"""Kinds as users say them: {"NAME": "embedding"} or ["NAME=embedding"]."""


# What is said ------------------------------------------------------------------------------------------------------------


def parse(given: Given) -> dict[str, Kind]:
    """Read `NAME=KIND`.

    Raises:
        UsageError: it can't be read, the kind isn't one, or an output is named twice.
    """
    kinds: dict[str, Kind] = {}
    texts = [given] if isinstance(given, str) else given
    for name, kind in given.items() if isinstance(given, Mapping) else (text.rpartition("=")[::2] for text in texts):
        if not name:
            raise UsageError(f"`output_kind=` {kind!r} can't be read; write NAME=KIND, KIND one of {', '.join(Kind)}")
        if str(kind) not in list(Kind):
            raise UsageError(
                f"`output_kind=['{name}={kind}']`: {str(kind)!r} isn't a kind; allowed: {', '.join(Kind)}"
                + _meant(f"{name}=", str(kind), Kind)
            )
        if name in kinds:
            raise UsageError(f"`output_kind=` names the output {name!r} twice; give it one kind")
        kinds[name] = Kind(str(kind))
    return kinds


def _meant(before: str, word: str, names: Iterable[str], after: str = "") -> str:
    close = difflib.get_close_matches(word, map(str, names), 1, 0.5)
    return f"; did you mean {before}{close[0]}{after}?" if close else ""


def stated(given: Given, outputs: Sequence[TensorInfo]) -> dict[str, Kind]:
    """Output name → kind, as the user says.

    Raises:
        UsageError: as `parse`; or a name that is no output, or a kind that an output's shape doesn't allow.
    """
    kinds, infos = parse(given), {info.name: info for info in outputs}
    for name, kind in kinds.items():
        if name not in infos:
            raise UsageError(
                f"`output_kind=['{name}={kind}']`: there is no output {name!r}; there is {', '.join(infos)}"
                + _meant("", name, infos, f"={kind}")
            )
        output = infos[name]
        fits = len(output.shape) > kind.axes.count("×") or ("integers" in kind.axes and not output.floating)
        if output.shape and not fits:
            raise UsageError(
                f"`output_kind=['{name}={kind}']`: output {name!r} is {output.dtype} {x(output.shape)}; {kind} needs "
                f"{kind.axes}: say {name}={Kind.OTHER}"
            )
    return kinds


def resolve(
    proto: ModelProto, outputs: Sequence[TensorInfo], given: Given = (), classes: Sequence[str] | None = None
) -> dict[str, Kind]:
    """Output name → kind: as the user says; classes, where there are as many names of classes as scores; else the guess.

    Args:
        proto: the model as it was given, for the guess; outputs: its outputs.
        given: see `stated`.
        classes: names of the classes, which their user has for some output.

    Raises:
        UsageError: see `stated`.
    """
    kinds = guess(proto, outputs)
    for info in outputs:
        if classes and info.floating and len(info.shape) == 2 and info.shape[1] == len(classes):
            kinds[info.name] = Kind.CLASSES
    return {**kinds, **stated(given, outputs)}


# The guess ---------------------------------------------------------------------------------------------------------------

# Words of a name, by how they begin.
_EMBEDDING_WORDS = ("emb", "pool", "feat", "sentence")
_CLASS_WORDS = ("logit", "prob", "class", "score")
_BOX_WORDS = ("box", "bbox")
_MASK_WORDS = ("mask", "seg")
_RANKING_WORDS = ("topk", "rank", "neighb", "nearest", "retriev", "recommend")

_SOFTMAX = ("Softmax", "LogSoftmax")
_ENDS = {  # operator → what `_End` calls it
    **dict.fromkeys(_SOFTMAX, "softmax"),
    **dict.fromkeys(("Sigmoid", "HardSigmoid"), "sigmoid"),
    **dict.fromkeys(("LpNormalization", "LayerNormalization", "RMSNormalization"), "norm"),
    **dict.fromkeys(("SimplifiedLayerNormalization", "SkipLayerNormalization"), "norm"),
    "SkipSimplifiedLayerNormalization": "norm",
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax", "ReduceSum"), "pool"),
}
# Operators that give the values of their first input in another place, type or scale.
_CARRIERS = (
    *("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout"),
    *("QuantizeLinear", "DequantizeLinear", "Slice", "Split", "Gather", "GatherND", "BatchNormalization"),
)
_AFFINE = ("Add", "Sub", "Mul", "Div")
# What lies between a sum over an axis and the division by it.
_DIVISOR = (
    *("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Expand", "QuantizeLinear", "DequantizeLinear"),
    *("Sqrt", "Pow", "Reciprocal", "Clip", "Max", "Abs", "Add", "Mul", "Div"),
)
_COLOURS = 3
_DEPTH = 16  # steps that a divisor is followed for
_PARTS = 64  # nodes that boxes are looked for in
_WIDTH = 64
_WIDEST = 4096
_OPEN = 256


def guess(proto: ModelProto, outputs: Sequence[TensorInfo]) -> dict[str, Kind]:
    """Output name → kind.

    Integers are tokens; a ranking where they are the best of more in a TopK, or what such index in a table of constants, or by
    their name. Floating outputs go by what they end in, stepping over casts, Q/DQ, reshapes, slices and constant
    factors and biases:

    - samples × N: a softmax or a product with a weight gives classes; a normalization, a Tanh layer or a pooled one whose
      width is a multiple of 16 an embedding. So does a product by its name, or of a width between 128 and 4096 that is a
      multiple of 64. What has the shape of a floating input isn't scores.
    - samples × positions × N: the same, of each position; classes of positions are tokens.
    - samples × channels × height × width: softmax or sigmoid over the channels, or several channels that are enlarged or as
      large as the image that goes in, are a mask; three aren't (colours), nor is what a constant multiplies then (optical
      flow). What the name calls a mask is one, or logits, where no other output is an image. Open sizes are taken for 256.
    - boxes: a name that says so and an axis of 4; or samples × (4 + classes) × anchors, joined from parts of which one has 4
      channels, or two have 2.

    Args:
        proto: any form of the model; weights may be stored in files. It isn't changed.
        outputs: the network's outputs.
    """
    graph = _Graph(proto)
    return {info.name: graph.kind(info) for info in outputs}


def _says(name: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether a word of `name` ("poolerOutput": pooler, output) begins so."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return any(word.lower().startswith(beginnings) for word in words)


class _End(NamedTuple):
    """The end of a graph: the operator that gives an output its values.

    Attributes:
        op: "softmax", "sigmoid", "linear", "norm" or "pool", whatever operators they are made of; else the operator's name.
        node: the operator; None where the output is an input or a weight.
        perms: orders of axes of the transpositions behind it.
        scaled: whether a constant factor stands behind it.
    """

    op: str
    node: NodeProto | None
    perms: tuple[tuple[int, ...], ...]
    scaled: bool

    def keeps(self, axis: int) -> bool:
        """Return whether no transposition moves this axis; -1: the last one."""
        return all(perm and perm[axis] == axis % len(perm) for perm in self.perms)


class _Graph:
    def __init__(self, proto: ModelProto) -> None:
        self.opset, self.makers = opset_version(proto), Links(proto.graph).makers
        self.constants = {tensor.name for tensor in proto.graph.initializer}
        for node in proto.graph.node:  # in topological order
            inputs = [name for name in node.input if name]
            if node.op_type == "Constant" or (inputs and self.constants.issuperset(inputs)):
                self.constants.update(node.output)
        infos = {name: tensor_info(value) for name, value in inferred_values(proto).items()}
        self.shapes: dict[str, Sequence[int | str]] = {name: info.shape for name, info in infos.items()}
        self.sized = {**self.shapes, **shapes_at(proto, {}, _OPEN)}  # as they are, where that tells none
        self.given = [tensor_info(value) for value in proto.graph.input]
        self.maps = [value.name for value in proto.graph.output if len(self.shapes.get(value.name, ())) == 4]

    # Kinds -------------------------------------------------------------------------------------------------------------

    def kind(self, info: TensorInfo) -> Kind:
        if info.numeric and not info.floating:
            several = len(info.shape) > 1 and info.shape[-1] != 1
            listed = several and (_says(info.name, _RANKING_WORDS) or self._ranks(info.name))
            return Kind.RANKING if listed else Kind.TOKENS
        shape = info.shape or self.shapes.get(info.name, ())
        if len(shape) > 3 and all(size == 1 for size in shape[2:]):
            shape = shape[:2]
        if not info.floating or len(shape) not in (2, 3, 4):
            return Kind.OTHER
        end = self.end(info.name)
        if len(shape) == 4:
            return self._image(info.name, shape[1], end)
        if (4 in shape[1:] and _says(info.name, _BOX_WORDS)) or (len(shape) == 3 and self._detects(shape, end)):
            return Kind.BOXES
        return Kind.OTHER if shape[-1] == 1 else self._scores(info.name, shape, end)

    def _scores(self, name: str, shape: Sequence[int | str], end: _End) -> Kind:
        """Samples × N, or samples × positions × N."""
        width, single = shape[-1], len(shape) == 2
        scores = Kind.CLASSES if single else Kind.TOKENS
        if not single and not end.keeps(-1):
            return Kind.OTHER
        if end.op == "softmax":
            return scores if single or self._axis(end) == -1 else Kind.OTHER
        if end.op == "norm" or (single and end.op == "Tanh"):
            return Kind.EMBEDDING
        if single and end.op == "sigmoid":
            return Kind.OTHER  # of classes that don't exclude each other: the largest says little
        if _says(name, _EMBEDDING_WORDS):
            return Kind.EMBEDDING
        if _says(name, _CLASS_WORDS) and (single or end.op == "linear"):
            return scores
        if end.op == "linear":
            again = any(info.floating and info.shape == shape for info in self.given)  # as of an autoencoder: no scores
            wide = isinstance(width, int) and 2 * _WIDTH <= width <= _WIDEST and width % _WIDTH == 0
            return Kind.EMBEDDING if wide else Kind.OTHER if again else scores
        if single and end.op == "pool":
            # A fully convolutional classifier's has any width, feature maps a multiple of 16.
            return Kind.CLASSES if isinstance(width, int) and width % 16 else Kind.EMBEDDING
        return Kind.OTHER

    def _image(self, name: str, channels: int | str, end: _End) -> Kind:
        if not end.keeps(1):
            return Kind.OTHER
        if end.op == "softmax":
            return Kind.MASK if channels != 1 and self._axis(end) == 1 else Kind.OTHER
        if end.op == "sigmoid" or _says(name, _MASK_WORDS):
            return Kind.MASK
        if _says(name, _CLASS_WORDS) and self.maps == [name]:  # a detector's heads are several
            return Kind.MASK
        if not isinstance(channels, int) or channels in (1, _COLOURS) or end.scaled:
            return Kind.OTHER
        size, images = self.sized.get(name, ())[2:], [self.sized[info.name] for info in self.given]
        same = any(len(image) == 4 and image[2:] == size and image[1] != channels for image in images)
        enlarged = end.op in ("ConvTranspose", "Resize", "Upsample")
        return Kind.MASK if enlarged or (end.op == "Conv" and same and -1 not in size) else Kind.OTHER

    def _ranks(self, name: str) -> bool:
        """Return whether these are places of the largest of more, or what stands there in a table of constants."""
        result = name
        while (node := self.makers.get(name)) is not None and node.op_type != "TopK":
            table = node.op_type.startswith("Gather") and node.input[0] in self.constants
            name = str(node.input[1]) if table else self._through(node) or ""
        if node is None or name not in node.output[1:]:
            return False
        scores, found, given = (self.sized.get(item, ()) for item in (node.input[0], name, result))
        last = attribute(node, "axis", -1) in (-1, len(scores) - 1) and found[-1:] == given[-1:]
        return last and scores[-1:] != found[-1:]  # of all of them the order is what counts

    def _axis(self, end: _End) -> int:
        """The axis of a softmax; -1: the last one, as of one that is written out."""
        if end.node is None or end.node.op_type not in _SOFTMAX:
            return -1
        axis: int = attribute(end.node, "axis", -1 if self.opset >= 13 else 1)
        rank = len(self.shapes.get(end.node.input[0], ()) or self.shapes.get(end.node.output[0], ()))
        return -1 if axis + 1 == rank else axis + rank * (axis < -1)

    def _detects(self, shape: Sequence[int | str], end: _End) -> bool:
        """Return whether four coordinates, or two times two, are among what is joined on the way to the output."""
        if end.op != "Concat" or 4 in shape[1:]:
            return end.op == "Concat"
        nodes, seen = [end.node], set[str]()
        while nodes and len(seen) < _PARTS:
            if (node := nodes.pop()) is None or node.output[0] in seen:
                continue
            seen.add(node.output[0])
            if node.op_type == "Concat":
                axis = attribute(node, "axis", 0)
                sizes = [size for name in node.input for size in self.shapes.get(name, ())[axis:][:1]]
                if axis != 0 and (4 in sizes or sizes.count(2) == 2):
                    return True
            if before := self._through(node):
                nodes.append(self.makers.get(before))
            elif node.op_type in ("Concat", *_AFFINE):
                nodes += map(self.makers.get, node.input)
        return False

    # The walk ------------------------------------------------------------------------------------------------------------

    def end(self, name: str) -> _End:
        """Return what gives the output `name` its values."""
        perms, node, scaled = list[tuple[int, ...]](), self.makers.get(name), False
        while node is not None:
            op, before = self._op(node), self._through(node)
            if before is None or op != node.op_type:
                return _End(op, node, tuple(perms), scaled)
            if op == "Transpose":
                perms.append(tuple(attribute(node, "perm", ())))
            scaled |= op in ("Mul", "Div")
            node = self.makers.get(before)
        return _End("", None, tuple(perms), scaled)

    def _through(self, node: NodeProto) -> str | None:
        """The input whose values the node hands on; None: it makes its own."""
        fixed = [name in self.constants for name in node.input]
        if node.op_type in _CARRIERS:
            return None if fixed[0] else str(node.input[0])
        if node.op_type not in _AFFINE or sum(fixed) != 1 or (node.op_type == "Div" and fixed[0]):
            return None
        return str(node.input[fixed.index(False)])

    def _op(self, node: NodeProto) -> str:
        """Return what a node does, in the words of `_End`."""
        op, inputs = node.op_type, [name for name in node.input if name]
        if op in _ENDS:
            return _ENDS[op]
        fixed = not self.constants.isdisjoint(inputs[:2])
        single = {*self.shapes.get(node.output[0], ())[2:]} == {1}
        if (op in ("Gemm", "MatMul") and fixed) or (op == "Conv" and single):
            return "linear"
        if op == "Div" and not fixed:
            maker = self.makers.get(inputs[0])
            while maker is not None and maker.op_type in ("Cast", "Identity"):
                maker = self.makers.get(maker.input[0])
            if maker is not None and maker.op_type == "Exp":
                return "softmax"
        if op in ("Div", "Mul") and not fixed and any(self._sums(name, op == "Mul") for name in inputs[op == "Div" :]):
            return "norm"
        return "pool" if op == "AveragePool" and single else op

    def _sums(self, name: str, inverse: bool) -> bool:
        """Return whether a value is a sum, mean or norm over an axis, as a normalization divides by, or the inverse of one."""
        inverted = False
        for _ in range(_DEPTH):
            node = self.makers.get(name)
            if node is None or node.op_type not in _DIVISOR:
                return node is not None and node.op_type.startswith("Reduce") and inverted >= inverse
            several = node.op_type == "Max" or node.op_type in _AFFINE
            changing = [item for item in node.input[: None if several else 1] if item not in self.constants]
            if len(changing) != 1:
                return False
            name = changing[0]
            inverted |= node.op_type in ("Reciprocal", "Div", "Pow")  # a root, or its inverse
        return False
