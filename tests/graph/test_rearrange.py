"""Graphs rearranged for TensorRT 8.6's INT8 kernels: what they compute, in ONNX Runtime without its own rearrangements."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import decibels, model, node, points_of, values
from hypothesis import assume, given, settings, strategies as st
from numpy.typing import NDArray

from trtopt.graph.passes.placement import Points, Weight
from trtopt.graph.passes.quantize import insert_qdq
from trtopt.graph.passes.rearrange import rearrange
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.sessions import OnnxSession


def block(
    *,
    stride: int = 1,
    channels: int = 64,
    bias: bool = True,
    kernel: int = 1,
    group: int = 1,
    last: bool = False,
    twice: bool = False,
    slow: int = 1,
) -> onnx.ModelProto:
    """x → first → middle → main → + → relu → next, with a convolution `skip` beside; each knob spoils or varies something."""
    names = ("first", "middle", "main", "skip", "next")
    shapes = (
        (32, 32, 1, 1),
        (32, 32, 3, 3),
        (channels, 32, 1, 1),
        (channels, 32 // group, kernel, kernel),
        (32, channels, 1, 1),
    )
    weights = {
        f"w_{name}": values(*shape, seed=seed, scale=0.2) for seed, (name, shape) in enumerate(zip(names, shapes))
    }
    weights |= {f"b_{name}": values(shape[0], seed=9) for name, shape in zip(names, shapes)} if bias else {}

    def conv(name: str, source: str, result: str, **attributes: Any) -> onnx.NodeProto:
        return node("Conv", f"{source} w_{name}{f' b_{name}' if bias else ''}", result, name, **attributes)

    skip = {"strides": [stride * slow] * 2, "group": group, "pads": [kernel // 2] * 4}
    nodes = [
        conv("first", "x", "f"),
        node("Relu", "f", "fr"),
        conv("middle", "fr", "m", pads=[1] * 4, strides=[stride] * 2),
        node("Relu", "m", "a"),
        conv("main", "a", "v", strides=[slow] * 2),
        conv("skip", "x", "s", **skip),
        node("Add", "v s", "y" if last else "sum", "add"),
    ]
    if not last:
        nodes += [node("Relu", "sum", "r"), conv("next", "r", "y")]
    outputs: dict[str, Any] = {"y": None}
    if twice:
        nodes.append(node("Sigmoid", "a", "z"))
        outputs["z"] = None
    if last:
        weights = {name: content for name, content in weights.items() if not name.endswith("next")}
    return model(nodes, inputs={"x": ["n", 32, 12, 12]}, outputs=outputs, weights=weights)


def quantized(proto: onnx.ModelProto, x: NDArray[np.float32], *, skips: bool = True) -> tuple[ir.Model, Points]:
    """With the scales that `x` asks for; without `skips`, no operand of an Add is rounded."""
    points = points_of(proto)
    if not skips:
        adds = {item.name for item in proto.graph.node if item.op_type == "Add"}
        kept = {name: tuple(r for r in readers if r[0] not in adds) for name, readers in points.reads.items()}
        points = replace(points, reads={name: readers for name, readers in kept.items() if readers})
    seen = onnx.ModelProto()
    seen.CopyFrom(proto)
    del seen.graph.output[:]
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in points.activations if name != "x")
    found = {"x": x, **OnnxSession(seen, threads=1)({"x": x})}
    graph = to_ir(proto)
    insert_qdq(graph, points, {name: float(np.abs(found[name]).max()) for name in points.activations})
    return graph, points


def rearranged(
    graph: ir.Model, fixed: Collection[str] = ()
) -> tuple[onnx.ModelProto, onnx.ModelProto | None, dict[str, str]]:
    """The graph before, after (None: nothing changed), and the nodes that are merged into others."""
    plain = to_proto(graph)
    result = rearrange(graph, fixed)
    assert result.model is graph
    merged = {node: other for node, other in result.changes.items() if node != other}
    return plain, to_proto(graph) if result.changed else None, merged


def run(proto: onnx.ModelProto, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return OnnxSession(proto, threads=1, optimize=False)({"x": x})["y"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_and_its_skip_become_one_convolution(stride: int, bias: bool) -> None:
    proto, x = block(stride=stride, bias=bias), values(4, 32, 12, 12, scale=3.0)
    graph, _ = quantized(proto, x)
    plain, made, merged = rearranged(graph)
    assert made is not None and merged == {"skip": "main"}
    onnx.checker.check_model(made, full_check=True)
    names = [item.name for item in made.graph.node]
    assert len(set(names)) == len(names)
    assert not {"add", "skip"} & set(names)
    assert [item.op_type for item in made.graph.node].count("MaxPool") == (stride > 1)
    assert not any("skip" in item.name for item in made.graph.initializer)
    main = next(item for item in made.graph.node if item.name == "main")
    assert main.op_type == "Conv"
    weight = next(item for item in made.graph.initializer if item.name == "main_merged_quantized")
    assert list(weight.dims) == [64, 64, 1, 1]
    exact = to_proto(quantized(proto, x, skips=False)[0])
    assert (
        decibels(run(made, x), run(exact, x)) > 34  # not equal: the weights of the two share scales
    )  # weights of both share their scales, so they aren't the very same
    reference = run(proto, x)
    assert decibels(run(made, x), reference) > decibels(run(plain, x), reference) - 0.5


def test_scales_that_lie_far_apart_are_kept() -> None:
    """The skip reads values a thousand times as large as the block's last convolution."""
    proto = block()
    for item in proto.graph.initializer:
        if item.name in ("w_middle", "b_middle", "w_skip"):
            item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item) / 1000, item.name))
        if item.name == "w_main":
            item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item) * 1000, item.name))
    x = values(4, 32, 12, 12, scale=3.0)
    graph, _ = quantized(proto, x)
    plain, made, merged = rearranged(graph)
    assert made is not None and merged
    reference = run(proto, x)
    assert decibels(run(made, x), reference) > decibels(run(plain, x), reference) - 0.5


@pytest.mark.parametrize("name", ["add", "main", "skip"])
def test_what_must_stay_stays(name: str) -> None:
    proto = block()
    graph, _ = quantized(proto, values(2, 32, 12, 12))
    _, made, merged = rearranged(graph, [name])
    assert made is None
    assert merged == {}


@pytest.mark.parametrize(
    "spoilt",
    [{"kernel": 3}, {"group": 2}, {"last": True}, {"twice": True}, {"slow": 2}],
    ids=lambda spoilt: next(iter(spoilt)),
)
def test_other_blocks_stay(spoilt: dict[str, Any]) -> None:
    proto = block(**spoilt)
    graph, points = quantized(proto, values(2, 32, 12, 12))
    assert {"main", "skip"} <= set(points.quantized)
    assert not rearrange(graph).changed


def test_channels_that_would_have_to_be_copied_stay() -> None:
    proto = block()
    for item in proto.graph.initializer:  # `middle` gives 40 channels, `main` reads them
        if item.name in ("w_middle", "b_middle", "w_main"):
            content = onnx.numpy_helper.to_array(item)
            axis = 1 if item.name == "w_main" else 0
            item.CopyFrom(
                onnx.numpy_helper.from_array(
                    np.repeat(content, 2, axis)[(slice(None),) * axis + (slice(40),)], item.name
                )
            )
    graph, _ = quantized(proto, values(2, 32, 12, 12))
    assert not rearrange(graph).changed


# The first convolution -----------------------------------------------------------------------------------------------------


def stem(size: int | str, *, channels: int = 3, activation: str = "Relu") -> onnx.ModelProto:
    weights = {
        "w": values(16, channels, 7, 7, scale=0.1),
        "b": values(16, seed=1),
        "v": values(16, 16, 3, 3, seed=2),
        "low": np.float32(0),
        "high": np.float32(6),
    }
    nodes = [
        node("Conv", "x w b", "c", "conv", strides=[2, 2], pads=[3] * 4),
        node(activation, "c low high" if activation == "Clip" else "c", "r", "activation"),
        node("MaxPool", "r", "p", "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("Conv", "p v", "y", "next"),
    ]
    if activation != "Clip":
        del weights["low"], weights["high"]
    return model(nodes, inputs={"x": ["n", channels, size, size]}, weights=weights)


@pytest.mark.parametrize("activation", ["Relu", "Clip"])
def test_the_first_convolution_and_its_pooling_stay_apart_and_give_the_same(activation: str) -> None:
    proto, x = stem(32, activation=activation), values(3, 3, 32, 32)
    graph, _ = quantized(proto, x)
    plain, made, merged = rearranged(graph)
    assert made is not None and merged == {}
    onnx.checker.check_model(made, full_check=True)
    pool = next(item for item in made.graph.node if item.name == "pool")
    assert list(next(item for item in pool.attribute if item.name == "pads").ints) == [1, 1, 0, 0]
    assert pool.input[0] == "r_dequantized"
    np.testing.assert_array_equal(run(made, x), run(plain, x))


@pytest.mark.parametrize(
    ("proto", "why"),
    [
        (stem(34), "17 rows: the last window reaches the padding"),
        (stem("size"), "nobody knows which padding is reached"),
        (stem(32, channels=8), "TensorRT has no such kernel"),
    ],
    ids=["reached", "dynamic", "channels"],
)
def test_other_poolings_stay(proto: onnx.ModelProto, why: str) -> None:
    size = proto.graph.input[0].type.tensor_type.shape.dim
    x = values(2, size[1].dim_value, size[2].dim_value or 32, size[3].dim_value or 32)
    graph, points = quantized(proto, x)
    assert points.quantized[:1] == (("conv",) if size[1].dim_value == 3 else points.quantized[:1])
    assert not rearrange(graph).changed, why


def test_a_pooling_that_must_stay_stays() -> None:
    proto, x = stem(32), values(2, 3, 32, 32)
    graph, _ = quantized(proto, x)
    assert not rearrange(graph, ["pool"]).changed


@settings(deadline=None, max_examples=60)
@given(
    st.integers(3, 14),
    st.integers(3, 14),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_padding_that_no_window_reaches_changes_nothing(
    height: int, width: int, window: int, stride: int, pads: list[int]
) -> None:
    assume(max(pads) < window <= min(height, width))
    weights = {"w": values(4, 3, 1, 1), "v": values(4, 4, 1, 1)}
    nodes = [
        node("Conv", "x w", "r", "conv"),
        node("MaxPool", "r", "p", "pool", kernel_shape=[window] * 2, strides=[stride] * 2, pads=pads),
        node("Conv", "p v", "y", "next"),
    ]
    proto, x = model(nodes, inputs={"x": ["n", 3, height, width]}, weights=weights), values(2, 3, height, width)
    weighted = (Weight("conv", 1, "w", 0), Weight("next", 1, "v", 0))
    points = Points({"x": (("conv", 0),), "p": (("next", 0),)}, weighted)
    graph = to_ir(proto)
    insert_qdq(graph, points, {"x": 4.0, "p": 4.0})
    plain, made, _ = rearranged(graph)
    if made is not None:
        np.testing.assert_array_equal(run(made, x), run(plain, x))
        kept = next(list(a.ints) for n in made.graph.node if n.name == "pool" for a in n.attribute if a.name == "pads")
        assert kept[:2] == pads[:2]
        assert sum(kept) < sum(pads)
