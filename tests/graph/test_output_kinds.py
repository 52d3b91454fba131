"""What outputs hold: the guess on small graphs in every form that a build gives them, on real models, and what users say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, node, points_of, quantized, rapidocr, typed, values, written
from onnx import ModelProto

from trtopt.core.errors import UsageError
from trtopt.core.values import Precision, TensorInfo
from trtopt.graph.io import load_model
from trtopt.graph.output_kinds import Kind, guess, parse, resolve, stated
from trtopt.graph.passes.fold import fold
from trtopt.recipes.loader import package_file

WEIGHTS = {
    "w": values(32, 10),
    "wide": values(32, 128, seed=1),
    "one": values(32, 1, seed=2),
    "b": values(10, seed=3),
    "gamma": values(32, seed=4),
    "beta": values(32, seed=5),
    "c": values(16, 3, 3, 3, seed=6),
    "c1": values(1, 16, 1, 1, seed=7),
    "c21": values(21, 16, 1, 1, seed=8),
    "c8": values(8, 16, 1, 1, seed=9),
    "up": values(16, 21, 2, 2, seed=10),
    "up3": values(16, 3, 2, 2, seed=13),
    "vocabulary": values(32, 100, seed=12),
    "var": np.ones(10, np.float32),
    "last": np.array([-1]),
    "axis1": np.array([1]),
    "first": np.array(0),
    "eps": np.float32(1e-5),
    "two": np.float32(2),
    "half": np.float32(0.5),
    "as8": np.array([0, 8, -1]),
    "as21": np.array([0, 21, -1]),
    "four4": np.array([4, 4]),
    "two2": np.array([2, 2, 4]),
    "nothing": np.zeros(0, np.float32),
    "twice": np.array([1, 1, 2, 2], np.float32),
}
VECTORS: dict[str, Sequence[int | str]] = {"x": ["n", 32]}
WORDS: dict[str, Sequence[int | str]] = {"x": ["n", "l", 32], "m": ["n", "l", 1]}
IMAGES: dict[str, Sequence[int | str]] = {"x": ["n", 3, "h", "w"]}
FIXED: dict[str, Sequence[int | str]] = {"x": ["n", 3, 16, 16]}

# A layer's normalization written out, from h to d.
_NORM = (
    "mean = ReduceMean <axes = [-1]> (h) centred = Sub (h, mean) square = Mul (centred, centred) "
    "variance = ReduceMean <axes = [-1]> (square) safe = Add (variance, eps) deviation = Sqrt (safe) "
    "d = Div (centred, deviation)"
)
_RMS = (
    "square = Mul (h, h) mean = ReduceMean <axes = [-1]> (square) safe = Add (mean, eps) size = Sqrt (safe) "
    "inverse = Reciprocal (size) d = Mul (h, inverse) y = Mul (d, gamma)"
)
_POOL = (
    "masked = Mul (h, m) sum = ReduceSum <keepdims = 0> (masked, axis1) "
    "count = ReduceSum <keepdims = 0> (m, axis1) some = Clip (count, eps) y = Div (sum, some)"
)
_CONV = "h = Conv <pads = [1, 1, 1, 1]> (x, c)"
# A detector's: 8 and 21 channels of 256 anchors.
_HEAD = (
    f"{_CONV} near = Conv (h, c8) n8 = Reshape (near, as8) far = Conv (h, c21) f21 = Reshape (far, as21) "
    "scores = Sigmoid (f21)"
)


def _in(width: int | str, *more: int | str) -> dict[str, Sequence[int | str]]:
    return {"y": ["n", width, *more]}


Case = tuple[str, dict[str, Sequence[int | str]], dict[str, Sequence[int | str]], str]
CASES: dict[str, Case] = {
    # samples × N
    "product": ("y = Gemm (x, w, b)", VECTORS, _in(10), "classes"),
    "product, as large again as the input": (
        "h = Gemm (x, w, b) mean = ReduceMean <axes = [-1]> (x) y = Mul (h, mean)",
        VECTORS, _in(10), "other",
    ),
    "product and normalization of the batch": (
        "h = Gemm (x, w, b) y = BatchNormalization (h, b, b, b, var)",
        VECTORS, _in(10), "classes",
    ),
    "softmax": ("h = Gemm (x, wide) y = Softmax (h)", VECTORS, _in(128), "classes"),
    "softmax written out": (
        "h = Gemm (x, w, b) e = Exp (h) s = ReduceSum (e, last) y = Div (e, s)",
        VECTORS, _in(10), "classes",
    ),
    "sigmoid": ("h = Gemm (x, w, b) y = Sigmoid (h)", VECTORS, _in(10), "other"),
    "one value": ("y = Gemm (x, one)", VECTORS, _in(1), "other"),
    "product of an embedding's width": ("y = Gemm (x, wide)", VECTORS, _in(128), "embedding"),
    "product of two inputs": ("t = Transpose <perm = [1, 0]> (x) y = MatMul (x, t)", {"x": [4, 32]}, {"y": [4, 4]}, "other"),
    "unit length": ("h = Gemm (x, w, b) y = LpNormalization <axis = 1, p = 2> (h)", VECTORS, _in(10), "embedding"),
    "unit length written out": (
        ("h = Gemm (x, w, b) l = ReduceL2 <axes = [1]> (h) s = Clip (l, eps) as = Shape (h) e = Expand (s, as) "
        "y = Div (h, e)"),
        VECTORS, _in(10), "embedding",
    ),
    "Tanh": ("h = Gemm (x, w, b) y = Tanh (h)", VECTORS, _in(10), "embedding"),
    "pooled image": (f"{_CONV} r = Relu (h) p = GlobalAveragePool (r) y = Flatten (p)", IMAGES, _in(16), "embedding"),
    "convolution of a pooled image": (
        f"{_CONV} p = GlobalAveragePool (h) q = Conv (p, c21) y = Flatten (q)",
        IMAGES, _in(21), "classes",
    ),
    "pooled scores": (
        "h = Conv <pads = [0, 0, 0, 0]> (x, c21) p = GlobalAveragePool (h) y = Flatten (p)",
        {"x": ["n", 16, 8, 8]}, _in(21), "classes",
    ),
    "mean of words": (f"h = Identity (x) {_POOL}", WORDS, _in(32), "embedding"),
    "first word": (
        "h = LayerNormalization (x, gamma, beta) y = Gather <axis = 1> (h, first)",
        {"x": WORDS["x"]}, _in(32), "embedding",
    ),
    "layer": (f"h = Identity (x) {_NORM} y = Mul (d, gamma)", VECTORS, _in(32), "embedding"),
    # samples × positions × N
    "product of positions": ("y = MatMul (x, vocabulary)", {"x": WORDS["x"]}, _in("l", 100), "tokens"),
    "projected positions": ("y = MatMul (x, wide)", {"x": WORDS["x"]}, _in("l", 128), "embedding"),
    "positions by their root mean square": (f"h = Identity (x) {_RMS}", {"x": WORDS["x"]}, _in("l", 32), "embedding"),
    "turned positions": (
        "h = MatMul (x, vocabulary) y = Transpose <perm = [0, 2, 1]> (h)",
        {"x": WORDS["x"]}, _in(100, "l"), "other",
    ),
    # Boxes
    "coordinates and scores": (
        f"{_HEAD} xywh, rest = Split <axis = 1> (n8, four4) y = Concat <axis = 1> (xywh, scores)",
        FIXED, _in(25, 256), "boxes",
    ),
    "coordinates in two parts, anchors of two sizes": (
        (f"{_HEAD} xy, wh, rest = Split <axis = 1> (n8, two2) pixels = Mul (xy, two) "
        "small = Concat <axis = 1> (pixels, wh, scores) large = Mul (small, half) all = Concat <axis = 2> (small, large) "
        "y = Transpose <perm = [0, 2, 1]> (all)"),
        FIXED, _in(512, 25), "boxes",
    ),
    "joined features": (f"{_HEAD} y = Concat <axis = 1> (n8, scores)", FIXED, _in(29, 256), "other"),
    # samples × channels × height × width
    "enlarged classes": (f"{_CONV} k = Conv (h, c21) y = Resize (k, nothing, twice)", IMAGES, _in(21, "a", "b"), "mask"),
    "enlarged by a transposed convolution": (
        f"{_CONV} y = ConvTranspose <strides = [2, 2]> (h, up)",
        IMAGES, _in(21, "a", "b"), "mask",
    ),
    "optical flow, in pixels of the larger size": (
        f"{_CONV} k = Conv (h, c21) e = Resize (k, nothing, twice) y = Mul (e, two)",
        IMAGES, _in(21, "a", "b"), "other",
    ),
    "an image": (f"{_CONV} y = ConvTranspose <strides = [2, 2]> (h, up3)", IMAGES, _in(3, "a", "b"), "other"),
    "three classes": (
        f"{_CONV} k = ConvTranspose <strides = [2, 2]> (h, up3) y = Softmax <axis = 1> (k)",
        IMAGES, _in(3, "a", "b"), "mask",
    ),
    "depths": (f"{_CONV} k = Conv (h, c1) y = Resize (k, nothing, twice)", IMAGES, _in(1, "a", "b"), "other"),
    "softmax of channels": (f"{_CONV} k = Conv (h, c21) y = Softmax <axis = 1> (k)", IMAGES, _in(21, "h", "w"), "mask"),
    "classes of a fixed image's size": (f"{_CONV} y = Conv (h, c21)", FIXED, _in(21, 16, 16), "mask"),
    "features of another size": ("y = Conv <strides = [2, 2]> (x, c)", IMAGES, _in(16, "a", "b"), "other"),
    "channels last": (
        f"{_CONV} k = Conv (h, c21) y = Transpose <perm = [0, 2, 3, 1]> (k)",
        IMAGES, _in("h", "w", 21), "other",
    ),
}  # fmt: skip


def _model(case: Case) -> ModelProto:
    text, inputs, outputs, _ = case
    nodes = onnx.parser.parse_graph(f"g () => () {{ {text} }}").node
    read = {name for item in nodes for name in item.input}
    weights = {name: value for name, value in WEIGHTS.items() if name in read}
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _kind(proto: ModelProto) -> str:
    loaded = load_model(proto)
    return str(guess(loaded.proto, loaded.outputs)["y"])


def _forms(proto: ModelProto) -> tuple[ModelProto, ...]:
    """What is made of a model: folded, FP16, BF16 with its outputs, and INT8."""
    folded, _ = fold(proto)
    points = points_of(folded)
    rounded = quantized(folded, points, dict.fromkeys(points.activations, 1.0), base=Precision.FP16)
    narrow = typed(folded, Precision.FP16), typed(folded, Precision.BF16, io_fp32=False)
    return folded, *narrow, typed(rounded, Precision.FP16)


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_the_graph_says_what_an_output_holds_in_every_form(name: str) -> None:
    proto, expected = _model(CASES[name]), CASES[name][3]
    assert {_kind(form) for form in (proto, *_forms(proto))} == {expected}


@pytest.mark.parametrize(
    ("output", "end", "shape", "expected"),
    [
        ("sentence_embedding", "Gemm (x, w, b)", "n,10", "embedding"),
        ("pooler_output", "Relu (x)", "n,32", "embedding"),
        ("remembered", "Gemm (x, w, b)", "n,10", "classes"),
        ("logits", "Gemm (x, wide)", "n,128", "classes"),
        ("class_scores", "ReduceMean <axes = [1], keepdims = 0> (x3)", "n,32", "classes"),
        ("logits", "Tanh (x)", "n,32", "embedding"),  # the graph says more than a name
        ("features", "Relu (x3)", "n,l,32", "embedding"),
        ("logits", "MatMul (x3, wide)", "n,l,128", "tokens"),
        ("pred_boxes", "Sigmoid (boxes4)", "n,100,4", "boxes"),
        ("inbox", "Sigmoid (boxes4)", "n,100,4", "other"),
        ("pred_masks", "Relu (x4)", "n,1,h,w", "mask"),
    ],
)
def test_a_name_decides_what_the_graph_leaves_open(output: str, end: str, shape: str, expected: str) -> None:
    inputs = "(float[n,32] x, float[n,l,32] x3, float[n,100,4] boxes4, float[n,1,h,w] x4)"
    weights = {name: WEIGHTS[name] for name in ("w", "b", "wide")}
    loaded = load_model(written(f"{inputs} => (float[{shape}] {output}) {{ {output} = {end} }}", **weights))
    assert guess(loaded.proto, loaded.outputs) == {output: Kind(expected)}


_SEGMENTATION = """(float[n,1,%s] x) => (float[n,%d,%s] %s) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w)
    small = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (a)
    large = Resize (small, , s)
    both = Concat <axis = 1> (a, large)
    %s = Conv (both, v)
}"""


@pytest.mark.parametrize("size", ["height,width", "64,64"])
@pytest.mark.parametrize(
    ("channels", "name", "expected"),
    [
        (5, "y", "mask"),
        (3, "y", "other"),  # colours
        (3, "logits", "mask"),
        (1, "logits", "mask"),
    ],
)
def test_segmentation_may_have_open_sizes_and_any_number_of_classes(
    size: str, channels: int, name: str, expected: str
) -> None:
    """What comes out is 4·(height//4) high, which isn't called height."""
    given = size.replace("height", "out_h").replace("width", "out_w")
    weights = {"w": values(4, 1, 3, 3), "v": values(channels, 8, 1, 1), "s": np.array([1, 1, 4, 4], np.float32)}
    proto = written(_SEGMENTATION % (size, channels, given, name, name), 18, **weights)
    for form in (proto, fold(proto)[0]):
        assert guess(form, load_model(form).outputs) == {name: Kind(expected)}


def test_logits_of_several_maps_are_a_detectors() -> None:
    text = (
        "(float[n,16,h,w] x) => (float[n,8,a,b] logits_small%s) { logits_small = Conv <strides = [2, 2]> (x, c8) %s }"
    )
    two = load_model(written(text % (", float[n,21,c,d] y", "y = Conv (x, c21)"), c8=WEIGHTS["c8"], c21=WEIGHTS["c21"]))
    assert guess(two.proto, two.outputs)["logits_small"] == Kind.OTHER
    one = load_model(written(text % ("", ""), c8=WEIGHTS["c8"]))
    assert guess(one.proto, one.outputs) == {"logits_small": Kind.MASK}


_FOUND = "(float[n,32] x) => (int64[n,k] y) { scores = MatMul (x, w) %s }"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("best, y = TopK (scores, ten)", "ranking"),
        (
            "best, i = TopK (scores, ten) j = Cast <to = 6> (i) m = Cast <to = 7> (j) y = Gather (ids, m)",
            "ranking",
        ),
        ("best, i = TopK (scores, ten) y = Add (i, offset)", "ranking"),
        ("best, y = TopK (scores, all)", "tokens"),  # sorted: the order is what counts
        ("best, y = TopK (scores, one)", "tokens"),
        ("t = Transpose <perm = [1, 0]> (scores) best, y = TopK <axis = 0> (t, ten)", "tokens"),
        ("best, i = TopK (scores, ten) a = ArgMax (x) y = GatherElements <axis = 1> (a, i)", "tokens"),
        ("y = ArgMax (scores)", "tokens"),
    ],
)
def test_the_best_of_more_are_a_ranking(ends: str, expected: str) -> None:
    arrays = {"ids": np.arange(100)[::-1].copy(), "w": values(32, 100)}
    proto = written(_FOUND % ends, ten=[10], all=[100], one=[1], offset=5, **arrays)
    for form in (proto, fold(proto)[0], typed(fold(proto)[0], Precision.FP16)):
        assert _kind(form) == expected


def test_integers_may_be_called_a_ranking() -> None:
    shapes = {
        "top_neighbors": ("n", 10),
        "retrieved": ("n", 4, 10),
        "rank": ("n", 1),
        "neighbors": ("n",),
        "ids": ("n", 10),
    }
    kinds = guess(ModelProto(), [TensorInfo(name, "int32", shape) for name, shape in shapes.items()])
    assert [*kinds.values()] == ["ranking", "ranking", "tokens", "tokens", "tokens"]


@pytest.mark.parametrize("shape", [["n", 32], ["n", 24, 32]])
def test_what_has_the_shape_of_an_input_is_no_scores(shape: list[int | str]) -> None:
    weights = {"down": np.ones((32, 8), np.float32), "up": np.ones((8, 32), np.float32)}
    nodes = [node("MatMul", "x down", "h"), node("MatMul", "h up", "y")]
    assert _kind(model(nodes, inputs={"x": shape}, outputs={"y": shape}, weights=weights)) == "other"
    scores = model(nodes[:1], inputs={"x": shape}, outputs={"h": [*shape[:-1], 8]}, weights={"down": weights["down"]})
    assert guess(scores, load_model(scores).outputs)["h"] == (Kind.CLASSES if len(shape) == 2 else Kind.TOKENS)


def test_integers_are_tokens_and_what_is_unknown_is_other() -> None:
    proto = written(
        "(float[n,32] x) => (float[n,32] again, int64[] index, bool[] mask, float[] scalar, float[4,4] weight) "
        "{ index = ArgMax <axis = 1> (x) mask = Greater (x, x) again = Identity (x) weight = Identity (w0) "
        "scalar = ReduceSum <keepdims = 0> (x) }",
        w0=values(4, 4),
    )  # fmt: skip
    loaded = load_model(proto)
    found = {name: str(kind) for name, kind in guess(loaded.proto, loaded.outputs).items()}
    assert found == {"index": "tokens", "mask": "tokens", "again": "other", "weight": "other", "scalar": "other"}


def test_a_shape_that_the_model_does_not_give_is_inferred() -> None:
    proto = model([node("Gemm", "x w b", "y")], inputs=VECTORS, weights={name: WEIGHTS[name] for name in "wb"})
    assert guess(proto, [TensorInfo("y", "float32")]) == {"y": Kind.CLASSES}


@pytest.mark.parametrize(("part", "expected"), [("det", "mask"), ("rec", "tokens"), ("cls", "classes")])
def test_of_text_recognition(part: str, expected: str) -> None:
    original = load_model(rapidocr(part))
    (output,) = original.outputs
    for proto in (original.proto, *_forms(original.proto)):
        assert guess(proto, load_model(proto).outputs) == {output.name: Kind(expected)}
    lazy = load_model(rapidocr(part), lazy=True)
    assert guess(lazy.proto, lazy.outputs) == {output.name: Kind(expected)}


def test_of_classifiers(exported: Callable[[str], Path]) -> None:
    zoo = package_file("package:onnx/backend/test/data/light/light_densenet121.onnx").parent
    found = {path.stem: load_model(path) for path in sorted(zoo.glob("*.onnx"))}
    assert len(found) >= 8
    found["lite0"] = load_model(exported("efficientnet-lite0"))
    kinds = {name: [*guess(item.proto, item.outputs).values()] for name, item in found.items()}
    assert kinds == {name: [Kind.CLASSES] for name in found}


# What users say ----------------------------------------------------------------------------------------------------------

OUTPUTS = (TensorInfo("logits", "float32", ("n", 10)), TensorInfo("ids", "int64", ("n",)), TensorInfo("a=b", "float32"))


def test_kinds_are_read_from_text_and_mappings() -> None:
    assert parse(["a=b=mask", "x=other"]) == parse({"a=b": "mask", "x": Kind.OTHER}) == {"a=b": "mask", "x": "other"}
    assert parse("x=boxes") == {"x": Kind.BOXES}
    assert parse(()) == {}
    assert stated(["ids=tokens", "a=b=mask"], OUTPUTS) == {"ids": Kind.TOKENS, "a=b": Kind.MASK}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["logits"],
            ("'logits' can't be read", "NAME=KIND", "classes, embedding, boxes, mask, tokens, ranking, other"),
        ),
        (["=classes"], ("can't be read",)),
        (["logits=embeding"], ("'embeding' isn't a kind", "allowed: classes, embedding", "mean logits=embedding?")),
        (["logits="], ("'' isn't a kind",)),
        ({"logits": "xyz"}, ("'xyz' isn't a kind", "tokens, ranking, other")),
        (["logit=classes"], ("no output 'logit'", "there is logits, ids, a=b", "did you mean logits=classes?")),
        (["logits=classes", "logits=other"], ("'logits' twice",)),
        (["logits=mask"], ("float32 nx10", "samples × height × width", "say logits=other")),
        (["ids=embedding"], ("int64 n;", "samples × width")),
    ],
)
def test_kinds_that_can_not_be_are_refused(given: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        stated(given, OUTPUTS)
    assert all(word in str(caught.value) for word in ("`output_kind=", *words)), str(caught.value)


def test_users_decide_before_names_of_classes_and_these_before_the_guess() -> None:
    loaded = load_model(_model(CASES["pooled image"]))
    names = [f"bird {number}" for number in range(16)]

    def kind(**said: Any) -> str:
        return str(resolve(loaded.proto, loaded.outputs, **said)["y"])

    assert kind() == "embedding"
    assert kind(classes=names) == "classes"
    assert kind(classes=names[1:]) == "embedding"
    assert kind(classes=names, given=["y=other"]) == "other"
