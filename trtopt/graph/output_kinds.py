"""Kinds of outputs, which decide how two results are compared: guessed from the graph, or said by the user.

The guess looks at the type, the shape and the operators that the graph ends in, and at the output's name only where these
leave it open. It is made on the model as it is given, not on the folded one, and steps over what folding, typed casts and
Q/DQ change, so that the folded, the FP16 and the INT8 form of a model end alike.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnx import ModelProto, NodeProto

from trtopt.core.errors import UsageError
from trtopt.core.values import Kind as Kind, TensorInfo, x
from trtopt.graph.proto import Links, attribute, infer_shapes, node_label, node_reads, opset_version, tensor_info
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
_WIDTH = 64
_WIDEST = 4096
_OPEN = 256


def by_shape(outputs: Sequence[TensorInfo]) -> dict[str, Kind]:
    """Output name → kind where there is no graph to look at: integers are tokens, or a ranking by their name, and samples ×
    classes scores of classes."""
    kinds = {}
    for info in outputs:
        scores = info.floating and len(info.shape) == 2 and info.shape[1] != 1
        kinds[info.name] = _whole(info) if _integer(info) else Kind.CLASSES if scores else Kind.OTHER
    return kinds


def _whole(info: TensorInfo, ranks: bool = False) -> Kind:
    """The kind of integers: lists, if these are ranks or called so, have several places."""
    lists = len(info.shape) > 1 and info.shape[-1] != 1 and (ranks or _says(info.name, _RANKING_WORDS))
    return Kind.RANKING if lists else Kind.TOKENS


def guess(proto: ModelProto, outputs: Sequence[TensorInfo]) -> dict[str, Kind]:
    """Output name → kind.

    Integers are tokens; a ranking where they are the best of more in a TopK, or what such index in a table of constants, or by
    their name. Floating outputs go by what they end in, stepping over casts, Q/DQ, reshapes, slices and constant
    factors and biases:

    - samples × N: a softmax or a matrix product with a weight gives classes; a normalization (a layer's, or a division by a
      norm or by a count), a Tanh layer or a pooled one whose width is a multiple of 16 an embedding. The name may say
      "embedding" of the product, and "logits" of the pooled layer. So does a width between 128 and 4096 that is a multiple
      of 64: embeddings have one, and of numbers of classes one in 64. What has the shape of a floating input isn't scores.
    - samples × positions × N: the same, of each position; classes of positions are tokens.
    - samples × channels × height × width: softmax or sigmoid over the channels, or several channels that are enlarged (resized,
      transposed convolution) or have the size of the image that goes in and another number of channels, are a mask. One
      channel without a sigmoid isn't: depths end like that, and are all on one side of 0. Nor are three: they are colours.
      Nor is what a constant multiplies then: that is optical flow, in pixels of another size. "Logits" and the like, where
      no other output is an image, are a mask of any size and number of channels. Open sizes are taken for 256.
    - boxes: a name that says so and an axis of 4; or samples × (4 + classes) × anchors, joined from parts of which one has 4
      channels, or two have 2.

    Args:
        proto: any form of the model; weights may be stored in files. It isn't changed.
        outputs: the network's outputs.
    """
    graph = _Graph(proto)
    return {info.name: graph.kind(info) for info in outputs}


def _integer(info: TensorInfo) -> bool:
    return info.dtype.startswith(("int", "uint", "bool"))


def _says(name: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether a word of `name` ("poolerOutput": pooler, output) begins so."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return any(word.lower().startswith(beginnings) for word in words)


@dataclass(frozen=True)
class _End:
    """The end of a graph: the operator that gives an output its values.

    Attributes:
        op: "softmax", "sigmoid", "linear", "norm" or "pool", whatever operators they are made of; else the operator's name.
        node: the operator; None where the output is an input or a weight.
        perms: what the transpositions behind it do.
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
        self.proto, self.opset = proto, opset_version(proto)
        self.makers = Links(proto.graph).makers
        self.constants = {tensor.name for tensor in proto.graph.initializer}
        for node in proto.graph.node:  # in topological order
            inputs = [name for name in node.input if name]
            if node.op_type == "Constant" or (inputs and self.constants.issuperset(inputs)):
                self.constants.update(node.output)
        self.shapes: dict[str, tuple[int | str, ...]] = {}
        inferred = infer_shapes(proto).graph
        for value in (*inferred.input, *inferred.value_info, *inferred.output):
            self.shapes[value.name] = tensor_info(value).shape
        self.given = [tensor_info(value) for value in proto.graph.input]
        self.images = [value.name for value in proto.graph.input if len(self.shapes[value.name]) == 4]
        self.maps = [value.name for value in proto.graph.output if len(self.shapes.get(value.name, ())) == 4]

    @cached_property
    def sized(self) -> Mapping[str, tuple[int | str, ...]]:
        """Shapes where open sizes are 256; as they are, where that tells none."""
        return {**self.shapes, **shapes_at(self.proto, {}, _OPEN)}

    # Kinds -------------------------------------------------------------------------------------------------------------

    def kind(self, info: TensorInfo) -> Kind:
        if _integer(info):
            return _whole(info, self._ranks(info))
        shape = info.shape or self.shapes.get(info.name, ())
        if not info.floating:
            return Kind.OTHER
        if len(shape) > 3 and all(size == 1 for size in shape[2:]):
            shape = shape[:2]
        end = self.end(info.name)
        if len(shape) in (2, 3) and 4 in shape[1:] and _says(info.name, _BOX_WORDS):
            return Kind.BOXES
        if len(shape) == 2 and shape[1] != 1:
            return self._vector(info.name, shape, end)
        if len(shape) == 3 and shape[2] != 1:
            return self._positions(info.name, shape, end)
        return self._image(info.name, shape, end) if len(shape) == 4 else Kind.OTHER

    def _vector(self, name: str, shape: tuple[int | str, ...], end: _End) -> Kind:
        width = shape[1]
        if end.op == "softmax":
            return Kind.CLASSES
        if end.op in ("norm", "Tanh"):
            return Kind.EMBEDDING
        if end.op == "sigmoid":
            return Kind.OTHER  # of classes that don't exclude each other: the largest says little
        if _says(name, _EMBEDDING_WORDS):
            return Kind.EMBEDDING
        if _says(name, _CLASS_WORDS):
            return Kind.CLASSES
        if end.op == "linear":
            return Kind.EMBEDDING if _embedding_width(width) else self._unless_given(shape, Kind.CLASSES)
        if end.op == "pool":  # a fully convolutional classifier's has any width, feature maps a multiple of 16
            return Kind.CLASSES if isinstance(width, int) and width % 16 else Kind.EMBEDDING
        return Kind.OTHER

    def _positions(self, name: str, shape: tuple[int | str, ...], end: _End) -> Kind:
        if end.op == "Concat" and self._detects(shape, end):
            return Kind.BOXES
        if not end.keeps(-1):
            return Kind.OTHER
        if end.op == "softmax":
            return Kind.TOKENS if self._axis(end) == -1 else Kind.OTHER
        if end.op == "norm" or _says(name, _EMBEDDING_WORDS):
            return Kind.EMBEDDING
        if end.op == "linear":
            if _says(name, _CLASS_WORDS):
                return Kind.TOKENS
            return Kind.EMBEDDING if _embedding_width(shape[-1]) else self._unless_given(shape, Kind.TOKENS)
        return Kind.OTHER

    def _image(self, name: str, shape: tuple[int | str, ...], end: _End) -> Kind:
        channels = shape[1]
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
        if end.op in ("ConvTranspose", "Resize", "Upsample"):
            return Kind.MASK
        size = self.sized.get(name, ())[2:]
        images = [self.sized[image] for image in self.images] if size and -1 not in size else []
        same = any(image[2:] == size and image[1] != channels for image in images)
        return Kind.MASK if end.op == "Conv" and same else Kind.OTHER

    def _ranks(self, info: TensorInfo) -> bool:
        """Return whether these are places of the largest of more, or what stands there in a table of constants."""
        node, name = self.makers.get(info.name), info.name
        while node is not None and node.op_type != "TopK":
            table = node.op_type.startswith("Gather") and node.input[0] in self.constants
            name = str(node.input[1]) if table else self._through(node) or ""
            node = self.makers.get(name)
        if node is None or name not in node.output[1:]:
            return False
        scores, found, given = (self.sized.get(item, ()) for item in (node.input[0], name, info.name))
        last = attribute(node, "axis", -1) in (-1, len(scores) - 1) and found[-1:] == given[-1:]
        return last and scores[-1:] != found[-1:]  # of all of them the order is what counts

    def _unless_given(self, shape: tuple[int | str, ...], kind: Kind) -> Kind:
        """Return what has the shape of a floating input is such a thing again, as of an autoencoder: no scores."""
        return Kind.OTHER if any(info.floating and info.shape == shape for info in self.given) else kind

    def _axis(self, end: _End) -> int:
        """The axis of a softmax: 1 or -1, which is the last; else 0."""
        assert end.node is not None
        if end.node.op_type not in _SOFTMAX:
            return -1  # written out, as attention writes it
        axis: int = attribute(end.node, "axis", -1 if self.opset >= 13 else 1)
        rank = len(self.shapes.get(end.node.input[0], ()) or self.shapes.get(end.node.output[0], ()))
        if rank:
            axis = axis % rank if axis % rank != rank - 1 else -1
        return axis if axis in (1, -1) else 0

    def _detects(self, shape: tuple[int | str, ...], end: _End) -> bool:
        """Return whether four coordinates, or two times two, are among what is joined on the way to the output."""
        if 4 in shape[1:]:
            return True
        nodes, seen = [end.node], set[str]()
        while nodes:
            node = nodes.pop()
            if node is None or node.output[0] in seen or len(seen) > 64:
                continue
            seen.add(node.output[0])
            before = self._through(node)
            if node.op_type == "Concat":
                axis = attribute(node, "axis", 0)
                parts = [self.shapes.get(name, ()) for name in node.input]
                sizes = [part[axis] for part in parts if part and -len(part) <= axis < len(part)]
                if axis != 0 and (4 in sizes or sizes.count(2) == 2):
                    return True
            elif before is None and node.op_type not in _AFFINE:
                continue
            nodes += [self.makers.get(name) for name in ([before] if before else node.input)]
        return False

    # The walk ------------------------------------------------------------------------------------------------------------

    def end(self, name: str) -> _End:
        """Return what gives the output `name` its values."""
        perms: list[tuple[int, ...]] = []
        node, scaled = self.makers.get(name), False
        while node is not None and (op := self._op(node)) == node.op_type:
            before = self._through(node)
            if before is None:
                return _End(op, node, tuple(perms), scaled)
            if node.op_type == "Transpose":
                perms.append(tuple(attribute(node, "perm", ())))
            scaled |= node.op_type in ("Mul", "Div")
            node = self.makers.get(before)
        return _End("" if node is None else self._op(node), node, tuple(perms), scaled)

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
        if op == "Div" and self._made_by(inputs[0]) == "Exp":
            return "softmax"
        fixed = not self.constants.isdisjoint(inputs[:2])
        size = self.shapes.get(node.output[0], ())[2:]
        single = bool(size) and all(item == 1 for item in size)
        if (op in ("Gemm", "MatMul") and fixed) or (op == "Conv" and single):
            return "linear"
        if op in ("Div", "Mul") and not fixed:
            inverse = op == "Mul"
            if any(self._sums(name, inverse) for name in inputs[op == "Div" :]):
                return "norm"
        return "pool" if op == "AveragePool" and single else op

    def _made_by(self, name: str) -> str:
        while (node := self.makers.get(name)) is not None and node.op_type in ("Cast", "Identity"):
            name = node.input[0]
        return "" if node is None else str(node.op_type)

    def _sums(self, name: str, inverse: bool) -> bool:
        """Return whether a value is a sum, mean or norm over an axis, as a normalization divides by, or the inverse of one."""
        inverted, powers = False, False
        for _ in range(_DEPTH):
            node = self.makers.get(name)
            if node is None or node.op_type not in _DIVISOR:
                return node is not None and node.op_type.startswith("Reduce") and (powers or inverted == inverse)
            several = node.op_type == "Max" or node.op_type in _AFFINE
            changing = [item for item in node.input[: None if several else 1] if item not in self.constants]
            if len(changing) != 1:
                return False
            name = changing[0]
            inverted ^= node.op_type == "Reciprocal" or (node.op_type == "Div" and name != node.input[0])
            powers |= node.op_type == "Pow"  # a root of it, or its inverse
        return False


def _embedding_width(width: int | str) -> bool:
    return isinstance(width, int) and 2 * _WIDTH <= width <= _WIDEST and width % _WIDTH == 0


# Choices ---------------------------------------------------------------------------------------------------------------------

_CHOSEN = {"ArgMax": 0, "ArgMin": 0, "TopK": 1, "NonMaxSuppression": 0}  # operator → its output that holds positions


def index_outputs(proto: ModelProto) -> dict[str, str]:
    """Map each output to the last node before it ("ArgMax NAME") that chooses among floating values, if there is one.

    Of two nearly equal values a rounding may take the other.
    The largest values themselves, as TopK gives them, hardly change when two of them change places: they follow none.
    """
    if _CHOSEN.keys().isdisjoint(node.op_type for node in proto.graph.node):
        return {}
    inferred = infer_shapes(proto).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    floating = {value.name for value in values if tensor_info(value).floating}
    followed: dict[str, NodeProto] = {}
    for node in proto.graph.node:  # in topological order
        if node.op_type in ("Shape", "Size"):
            continue
        before = next((followed[name] for name in node_reads(node) if name in followed), None)
        outputs = dict.fromkeys(node.output, before)
        if node.op_type in _CHOSEN and node.input[0] in floating:
            outputs[node.output[_CHOSEN[node.op_type]]] = node
        followed.update({name: source for name, source in outputs.items() if source is not None})
    return {value.name: node_label(followed[value.name]) for value in proto.graph.output if value.name in followed}
