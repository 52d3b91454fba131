"""Placement rules, on graphs small enough to read and on real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, node, nodes as graph_nodes, points_of, rapidocr, values, written
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtopt.core.values import Override, Precision
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import Points, gates_of
from trtopt.graph.view import to_ir


class Net:
    """Writes a network in ONNX's text; every weight is seeded and constant."""

    def __init__(self, shape: tuple[int | str, ...] = ("batch", 32, 8, 8)) -> None:
        self.shape, self.nodes, self.weights = shape, list[onnx.NodeProto](), list[TensorProto]()
        self.random = np.random.default_rng(3)

    def write(self, text: str, **held: Any) -> Net:
        """Add nodes; constants, and shapes of the weights of convolutions, where they aren't 32 × 32 × 1 × 1."""
        held_arrays = {name: content for name, content in held.items() if isinstance(content, np.ndarray)}
        self.weights += [numpy_helper.from_array(content, name) for name, content in held_arrays.items()]
        for item in onnx.parser.parse_graph(f"g () => () {{ {text} }}").node:
            (out,) = item.output
            item.name = f"{out}_node"
            if item.op_type == "Conv":
                weight = self.random.normal(size=held.get(out, (32, 32, 1, 1))).astype(np.float32)
                self.weights.append(numpy_helper.from_array(weight, f"{out}_w"))
                item.input.append(f"{out}_w")
            self.nodes.append(item)
        return self

    def model(self, *outputs: str) -> ModelProto:
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        start = [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)]
        graph = helper.make_graph(self.nodes, "net", start, results, self.weights)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
        onnx.checker.check_model(proto, full_check=True)
        return proto


def _reasons(points: Points) -> dict[str, str]:
    return {item.node: item.reason for item in points.kept}


def test_twins_of_one_network_are_placed_alike() -> None:
    first = {"left1_w": values(32, 3, 3, 3), "left2_w": values(32, 32, 1, 1), "depth_w": values(32, 1, 3, 3)}
    nodes = [
        *(node("Conv", f"{side} left1_w", f"{side}1", f"{side}_first") for side in ("left", "right")),
        *(node("Conv", f"{side}1 left2_w", f"{side}2", f"{side}_second") for side in ("left", "right")),
        node("Conv", "depth depth_w", "depth1", "depth_first"),
        node("Sum", "left2 right2 depth1", "y"),
    ]
    shapes = {"left": ("n", 3, 8, 8), "right": ("n", 3, 8, 8), "depth": ("n", 1, 8, 8)}
    points = points_of(model(nodes, inputs=shapes, outputs={"y": ("n", 32, 6, 6)}, weights=first))
    assert set(points.quantized) == {"left_first", "right_first", "left_second", "right_second"}
    assert "1 → 32 channels" in _reasons(points)["depth_first"]


def test_a_layer_reads_its_input_quantized_after_the_activation() -> None:
    net = Net().write("c1 = Conv (x) r1 = Relu (c1) c2 = Conv (r1)")
    points = points_of(net.model("c2"))
    assert points.reads == {"x": (("c1_node", 0),), "r1": (("c2_node", 0),)}
    assert [(weight.node, weight.axis) for weight in points.weights] == [("c1_node", 0), ("c2_node", 0)]
    assert points.kept == ()


def test_only_the_skip_of_a_residual_is_quantized() -> None:
    net = Net().write(
        "c0 = Conv (x) skip = Relu (c0) c1 = Conv (skip) sum = Add (c1, skip) r = Relu (sum) c2 = Conv (r)"
    )
    points = points_of(net.model("c2"))
    assert points.reads["skip"] == (("c1_node", 0), ("sum_node", 1))
    assert "c1" not in points.reads
    assert "sum" not in points.reads  # it is read after its ReLU


def test_of_two_convolutions_that_are_added_the_shorter_branch_is_the_skip() -> None:
    net = Net().write(
        "start = Relu (x) a1 = Conv (start) a2 = Conv (a1) short = Conv (start) sum = Add (short, a2) last = Conv (sum)"
    )
    points = points_of(net.model("last"))
    assert points.reads["short"] == (("sum_node", 0),)
    assert "a2" not in points.reads


def test_broadcast_additions_are_left_alone() -> None:
    net = Net().write("c1 = Conv (x) pooled = GlobalAveragePool (x) sum = Add (c1, pooled)")
    points = points_of(net.model("sum"))
    assert all(node != "sum_node" for readers in points.reads.values() for node, _ in readers)


@pytest.mark.parametrize("left_out", ["deep_node", "short_node", "middle_node"])
def test_leaving_a_convolution_out_quantizes_no_other_tensor(left_out: str) -> None:
    net = Net().write(
        "start = Relu (x) short = Conv (start) middle = Conv (start) active = Relu (middle) "
        "deep = Conv (active) sum = Add (short, deep)"
    )
    proto = net.model("sum")
    all_in, some_out = points_of(proto), points_of(proto, overrides=[Override(left_out, Precision.FP16)])
    assert set(all_in.activations) == {"start", "active", "short"}
    assert set(some_out.activations) <= set(all_in.activations)
    assert ("short" in some_out.activations) is (left_out != "deep_node")


def test_inputs_of_a_concat_share_one_scale_with_its_output() -> None:
    net = Net().write(
        "start = Relu (x) a = Conv (start) b = Conv (start) joined = Concat <axis = 1> (a, b) "
        "pooled = MaxPool <kernel_shape = [2, 2]> (joined) last = Conv (pooled)",
        last=(32, 64, 1, 1),
    )
    points = points_of(net.model("last"))
    assert points.groups == (("a", "b", "pooled"),)
    assert points.reads["a"] == (("joined_node", 0),)
    assert points.reads["b"] == (("joined_node", 1),)


@pytest.mark.parametrize(
    ("movers", "quantized"),
    [
        ("", False),
        ("out = Transpose <perm = [0, 2, 3, 1]> (joined)", False),
        ("more = Concat <axis = 1> (joined, x) out = Flatten (more)", False),
        ("out = Relu (joined)", True),
    ],
    ids=["itself", "transposed", "joined again", "computed with"],
)
def test_what_is_only_handed_out_is_not_rounded(movers: str, quantized: bool) -> None:
    """A context that is fed back, or a cache: a copy of what came in, beside what a quantized layer reads."""
    net = Net().write(
        "old = Relu (x) joined = Concat <axis = 1> (old, x) "
        f"pooled = MaxPool <kernel_shape = [2, 2]> (joined) last = Conv (pooled) {movers}",
        last=(32, 64, 1, 1),
    )
    points = points_of(net.model("last", "out" if movers else "joined"))
    assert ("old" in points.reads) is ("x" in points.reads) is quantized
    assert points.quantized == ("last_node",) and "pooled" in points.reads


def test_a_part_of_a_concat_that_no_input_changes_needs_no_scale_of_the_others() -> None:
    """A class token beside patches: only the patches come to the convolution, and the token would be lost in their scale."""
    net = Net().write(
        "sizes = Shape (x) batch = Slice (sizes, zero, one) form = Concat <axis = 0> (batch, rest) t = Expand (token, form) "
        "patches = Relu (x) joined = Concat <axis = 2> (t, patches) behind = Slice (joined, one, nine, two) "
        "last = Conv (behind)",
        rest=np.array([32, 1, 8]), token=np.full((1, 32, 1, 8), 0.01, np.float32),
        **{name: np.array([index]) for name, index in (("zero", 0), ("one", 1), ("two", 2), ("nine", 9))},
    )  # fmt: skip
    points = points_of(net.model("last", "joined"))
    assert set(points.reads) == {"behind"} and not points.groups


def test_average_pooling_reads_int8_unless_someone_needs_the_tensor_in_floating_point() -> None:
    net = Net().write("c1 = Conv (x) r1 = Relu (c1) pooled = GlobalAveragePool (r1)")
    assert points_of(net.model("pooled")).reads["r1"] == (("pooled_node", 0),)
    assert "r1" not in points_of(net.write("scaled = Mul (r1, pooled)").model("scaled")).reads  # squeeze-and-excite


def test_average_pooling_behind_a_residual_reads_int8_too() -> None:
    net = Net().write(
        "start = Relu (x) a1 = Conv (start) sum = Add (start, a1) end = Relu (sum) "
        "pooled = ReduceMean <axes = [2, 3]> (end)"
    )
    assert points_of(net.model("pooled")).reads["end"] == (("pooled_node", 0),)
    unquantized = Net().write("sum = Add (x, x) pooled = ReduceMean <axes = [2, 3]> (sum)")
    assert points_of(unquantized.model("pooled")).reads == {}


def test_what_does_not_pay_is_kept_with_its_reason() -> None:
    net = Net().write(
        "first = Conv (x) narrow = Conv (first) "
        "depthwise = Conv <group = 32, pads = [1, 1, 1, 1]> (narrow) "
        "pooled = GlobalAveragePool (depthwise) squeeze = Conv (pooled) y = Add (depthwise, squeeze)",
        first=(8, 32, 1, 1),
        narrow=(32, 8, 1, 1),
        depthwise=(32, 1, 3, 3),
    )
    points = points_of(net.model("y"))
    assert set(points.quantized) == {"first_node", "depthwise_node"}
    reasons = _reasons(points)
    assert "8 → 32 channels" in reasons["narrow_node"]
    assert "1×1" in reasons["squeeze_node"]
    assert all(item.precision is Precision.FP16 for item in points.kept)


@pytest.mark.parametrize(("trans", "shape", "axis"), [(0, (32, 16), 1), (1, (16, 32), 0)])
def test_gemm_weights_are_quantized_per_output_channel(trans: int, shape: tuple[int, int], axis: int) -> None:
    net = Net(("batch", 32)).write(f"y = Gemm <transB = {trans}> (x, w)", w=values(*shape))
    assert [weight.axis for weight in points_of(net.model("y")).weights] == [axis]


def test_matrix_products_too_small_or_of_one_row_are_kept() -> None:
    for rows, columns, reason in ((1, 32, "one row"), ("batch", 8, "N=8")):
        net = Net((rows, 32)).write("y = MatMul (x, w)", w=values(32, columns))
        assert reason in _reasons(points_of(net.model("y")))["y_node"]
    forced = [Override("y_node", Precision.INT8)]
    assert points_of(net.model("y"), overrides=forced).quantized == ("y_node",)


def test_attention_products_quantize_both_operands_or_none() -> None:
    net = Net(("batch", 4, 32, 32)).write("t = Transpose <perm = [0, 1, 3, 2]> (x) scores = MatMul (x, t)")
    model = net.model("scores")
    assert points_of(model).reads == {}
    assert "attention" in _reasons(points_of(model))["scores_node"]
    forced = points_of(model, overrides=[Override("scores_node", Precision.INT8)])
    assert forced.reads == {"x": (("scores_node", 0),), "t": (("scores_node", 1),)}


def test_overrides_take_nodes_out_by_name_or_operator_and_the_last_one_wins() -> None:
    net = Net().write("c1 = Conv (x) c2 = Conv (c1)")
    model = net.model("c2")
    out = points_of(model, overrides=[Override("c1_*", Precision.FP32)])
    assert out.quantized == ("c2_node",)
    assert [(item.node, item.precision) for item in out.kept] == [("c1_node", Precision.FP32)]
    assert points_of(model, overrides=[Override("Conv", Precision.FP16)]).quantized == ()
    back = [Override("Conv", Precision.FP16), Override("c2_node", Precision.INT8)]
    assert points_of(model, overrides=back).quantized == ("c2_node",)


def test_what_the_target_cannot_run_is_kept_for_its_reason() -> None:
    model = Net().write("up = ConvTranspose <strides = [2, 2]> (x, w)", w=values(32, 32, 2, 2)).model("up")
    (weight,) = points_of(model).weights
    assert weight.axis == 1
    assert _reasons(points_of(model, excluded={"ConvTranspose": "planned in float"})) == {"up_node": "planned in float"}


def test_fp8_quantizes_per_tensor_and_only_around_its_layers() -> None:
    net = Net().write("c0 = Conv (x) skip = Relu (c0) c1 = Conv (skip) sum = Add (c1, skip)")
    points = points_of(net.model("sum"), Precision.FP8)
    assert points.reads == {"x": (("c0_node", 0),), "skip": (("c1_node", 0),)}
    assert [weight.axis for weight in points.weights] == [None, None]


def test_a_real_detector_loses_no_convolution_without_a_reason() -> None:
    folded, _ = fold(load_model(rapidocr("det")).proto)
    points = points_of(folded)
    heavy = {node.name for node in folded.graph.node if node.op_type in ("Conv", "ConvTranspose")}
    assert len(heavy) == 64
    assert set(points.quantized) | {item.node for item in points.kept} == heavy
    assert all(item.reason for item in points.kept)
    outputs = {value.name for value in folded.graph.output}
    assert outputs.isdisjoint(points.reads)


def test_resnet50_has_one_quantized_branch_at_each_residual(exported: Callable[[str], Path]) -> None:
    folded, _ = fold(load_model(exported("torchvision:resnet50")).proto)
    points = points_of(folded)
    adds = [node.name for node in folded.graph.node if node.op_type == "Add"]
    read = [node for readers in points.reads.values() for node, _ in readers if node in adds]
    assert len(adds) == 16
    assert sorted(read) == sorted(adds)
    assert len(points.quantized) == 54
    assert points.kept == ()


def test_lite0_is_int8_throughout_and_its_ten_skips_are_quantized(exported: Callable[[str], Path]) -> None:
    folded, _ = fold(load_model(exported("efficientnet-lite0")).proto)
    points = points_of(folded)
    kinds = {node.name: node.op_type for node in folded.graph.node}
    assert sorted(kinds[name] for name in points.quantized) == ["Conv"] * 49 + ["Gemm"]
    assert points.kept == ()
    adds = [name for name, kind in kinds.items() if kind == "Add"]
    readers = [name for pairs in points.reads.values() for name, _ in pairs]
    assert len(adds) == 9
    assert sorted(name for name in readers if name in adds) == sorted(adds)
    producers = {name: node.op_type for node in folded.graph.node for name in node.output}
    # After each ReLU6, and on what the projections give (they have no activation); never between Conv and Clip.
    between = {node.input[0] for node in folded.graph.node if node.op_type == "Clip"}
    assert between.isdisjoint(points.reads)
    assert {producers[name] for name in points.reads if name in producers} <= {
        "Clip", "Conv", "Add", "Flatten", "GlobalAveragePool", "Reshape"
    }  # fmt: skip
    assert {value.name for value in folded.graph.output}.isdisjoint(points.reads)


def test_operands_that_cannot_be_quantized_say_so_even_when_forced() -> None:
    text = "left = MatMul (w, x) turned = Gemm <transA = 1> (x, w) varying = Gemm (x, left)"
    net = Net((32, 32)).write(text, w=values(32, 32))
    points = points_of(net.model("left", "turned", "varying"), overrides=[Override("*", Precision.INT8)])
    reasons = _reasons(points)
    assert points.reads == {}
    assert "left operand is constant" in reasons["left_node"]
    assert "transA" in reasons["turned_node"]
    assert "run time" in reasons["varying_node"]


def test_what_depends_on_shapes_alone_is_not_quantized() -> None:
    """An LSTM that is written as a loop begins with a state of zeros: a scale of it can't be measured."""
    text = "f = Shape (x) state = Expand (zero, f) first = MatMul (state, w) second = MatMul (x, w) y = Add (first, second)"
    net = Net(("n", 32)).write(text, w=values(32, 32), zero=np.zeros((1, 1), np.float32))
    points = points_of(net.model("y"))
    assert points.quantized == ("second_node",)
    assert _reasons(points)["first_node"] == "its left operand is the same for every input"


def test_a_recurrent_layer_is_said_to_stay_out() -> None:
    net = Net((5, "n", 32)).write("y = GRU <hidden_size = 32> (x, w, w)", w=values(1, 96, 32))
    assert _reasons(points_of(net.model("y"))) == {"y_node": "GRU is never quantized"}


def test_double_precision_is_not_quantized() -> None:
    points = points_of(written("(double[n,32] x) => (double[n,32] y) { [fc] y = MatMul (x, w) }", w=np.ones((32, 32))))
    assert points.quantized == () and "float64" in _reasons(points)["fc"]


def test_an_output_that_is_read_inside_stays_whole_outside() -> None:
    net = Net().write("c1 = Conv (x) c2 = Conv (c1)")
    points = points_of(net.model("c1", "c2"))
    assert points.reads == {"x": (("c1_node", 0),), "c1": (("c2_node", 0),)}


def test_the_mean_over_height_and_width_pools_and_other_means_do_not() -> None:
    for axes, pools in (([2, 3], True), ([-1, -2], True), ([3], False), ([1, 2, 3], False)):
        net = Net().write(f"c1 = Conv (x) r1 = Relu (c1) mean = ReduceMean <axes = {axes}> (r1)")
        assert ("r1" in points_of(net.model("mean")).reads) is pools, axes


def test_all_that_reads_what_a_concat_joins_reads_it_quantized_where_no_value_changes() -> None:
    """Inception's pooling beside convolutions, and the chain of pooling whose results one Concat joins."""
    pool = "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
    net = Net().write(
        f"a = Conv (x) b = Conv (x) joined = Concat <axis = 1> (a, b) p1 = {pool} (joined) p2 = {pool} (p1) "
        "beside = Conv (joined) all = Concat <axis = 1> (beside, p1, p2) last = Conv (all)",
        beside=(32, 64, 1, 1),
        last=(32, 160, 1, 1),
    )
    points = points_of(net.model("last"))
    assert set(points.reads["joined"]) == {("p1_node", 0), ("beside_node", 0)}
    assert set(points.reads["p1"]) == {("p2_node", 0), ("all_node", 1)}
    (group,) = points.groups
    assert {"joined", "p1", "p2"} <= set(group), "one scale, so that pooling and quantizing can change places"
    floating = points_of(net.model("last", "p2"))  # somebody needs the values as they are
    assert ("p2_node", 0) not in floating.reads["p1"]
    kept = points_of(net.model("last"), overrides=[Override.parse("p1_node=fp32")])
    assert kept.reads["joined"] == (("beside_node", 0),)


def darknet_block(activation: str) -> Net:
    """Two blocks whose sums have an activation on both sides, as CSPDarknet's."""

    def active(source: str, out: str) -> str:
        if activation == "SiLU":
            return f"{out}_gate = Sigmoid ({source}) {out} = Mul ({source}, {out}_gate)"
        return f"{out} = {activation} ({source})"

    text, before = f"first = Conv (x) {active('first', 'start')}", "start"
    for name in ("one", "two"):
        text += f" {name}_conv = Conv ({before}) {active(f'{name}_conv', name)} {name}_sum = Add ({before}, {name})"
        before = f"{name}_sum"
    return Net().write(f"{text} last = Conv ({before})")


@pytest.mark.parametrize("activation", ["SiLU", "Relu", "LeakyRelu", "HardSwish"])
def test_a_sum_of_activations_reads_both_quantized(activation: str) -> None:
    points = points_of(darknet_block(activation).model("last"))
    assert {name: slots for name, slots in points.reads.items() if any("sum" in node for node, _ in slots)} == {
        "start": (("one_conv_node", 0), ("one_sum_node", 0)),
        "one": (("one_sum_node", 1),),
        "one_sum": (("two_conv_node", 0), ("two_sum_node", 0)),
        "two": (("two_sum_node", 1),),
    }


@pytest.mark.parametrize(
    ("outputs", "override", "left"),
    [
        (["last", "two_sum"], None, []),  # needed in floating point, and so is what the second sum reads
        (["last"], "last_node=fp16", []),
        (["last"], "two_conv_node=fp16", []),
        (["last"], "one_conv_node=fp16", ["two_sum"]),
        (["last"], "one_sum_node=fp16", ["two_sum"]),
        (["last"], None, ["one_sum", "two_sum"]),
    ],
)
def test_a_sum_that_somebody_needs_in_floating_point_stays_there(
    outputs: list[str], override: str | None, left: list[str]
) -> None:
    model, overrides = darknet_block("Relu").model(*outputs), [Override.parse(override)] if override else []
    points = points_of(model, overrides=overrides)
    readers = {node for slots in points.reads.values() for node, _ in slots}
    assert [name for name in ("one_sum", "two_sum") if f"{name}_node" in readers] == left
    assert points.reads.keys() <= points_of(darknet_block("Relu").model("last")).reads.keys(), "no scale is lacking"


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_a_nearest_resize_reads_the_scale_of_the_concat_behind_it(mode: str) -> None:
    """A neck: what is resized has a quantized reader of its own."""
    net = Net().write(
        "small = Conv <strides = [2, 2]> (x) source = Relu (small) wide = Conv (x) beside = Conv (source) "
        f'up = Resize <mode = "{mode}"> (source, , scales) joined = Concat <axis = 1> (up, wide) last = Conv (joined)',
        last=(32, 64, 1, 1), scales=np.array([1, 1, 2, 2], np.float32),
    )  # fmt: skip
    points = points_of(net.model("last", "beside"))
    (group,) = points.groups
    if mode == "nearest":
        assert points.reads["source"] == (("beside_node", 0), ("up_node", 0))
        assert set(group) == {"joined", "source", "up", "wide"}
    else:
        assert points.reads["source"] == (("beside_node", 0),)
        assert set(group) == {"joined", "up", "wide"}
    assert ("up_node", 0) not in points_of(net.model("last", "beside", "up")).reads["source"]


def dense_block() -> Net:
    return Net().write(
        "start = Conv (x) deep = Conv (x) joined = Concat <axis = 1> (start, deep) "
        "start_norm = BatchNormalization (start, o, o, o, o) start_in = Relu (start_norm) start_out = Conv (start_in) "
        "joined_norm = BatchNormalization (joined, p, p, p, p) joined_in = Relu (joined_norm) joined_out = Conv (joined_in)",
        joined_out=(32, 64, 1, 1), o=np.ones(32, np.float32), p=np.ones(64, np.float32),
    )  # fmt: skip


def test_the_normalization_behind_a_concat_reads_int8_in_front_of_a_quantized_layer() -> None:
    model = dense_block().model("start_out", "joined_out")
    points = points_of(model)
    assert points.groups == (("deep", "joined", "start"),)
    assert points.reads["joined"] == (("joined_norm_node", 0),)
    assert ("start_norm_node", 0) in points.reads["start"], "else it is needed in floating point, too"
    for name in ("joined_norm", "joined_out"):  # kept out, or in front of a floating layer
        assert not points_of(model, overrides=[Override.parse(f"{name}_node=fp16")]).groups


def test_nested_concats_share_one_scale() -> None:
    net = Net().write(
        "a = Conv (x) b = Conv (x) c = Conv (x) inner = Concat <axis = 1> (a, b) "
        "outer = Concat <axis = 1> (inner, c) last = Conv (outer)",
        last=(32, 96, 1, 1),
    )
    (group,) = points_of(net.model("last")).groups
    assert set(group) == {"a", "b", "c", "inner", "outer"}


def grouped(*behind: onnx.NodeProto, group: int = 32) -> onnx.ModelProto:
    """A grouped convolution, what stands behind it, and a convolution that reads its result."""
    nodes = [node("Conv", "x w0", "a", "first"), node("Conv", "a w1", "b", "grouped", group=group, pads=[1, 1, 1, 1])]
    nodes += [*behind, node("Conv", "r w2", "y", "last")]
    weights = {"w0": values(32, 32, 1, 1), "w1": values(32, 32 // group, 3, 3), "w2": values(32, 32, 1, 1)}
    return model(nodes, inputs={"x": ["n", 32, 8, 8]}, weights=weights)


@pytest.mark.parametrize(
    ("behind", "quantized"),
    [
        ([node("Identity", "b", "r")], False),  # folding would take it away
        ([node("Relu", "b", "r")], True),
        ([node("Clip", "b low high", "r")], True),
        ([node("Sigmoid", "b", "s"), node("Mul", "b s", "r")], False),
        ([node("Relu", "b", "h"), node("GlobalAveragePool", "h", "p"), node("Mul", "h p", "r")], False),
    ],
    ids=["identity", "relu", "clip", "silu", "squeeze-and-excite"],
)
def test_grouped_convolutions_whose_result_is_not_quantized(behind: list[onnx.NodeProto], quantized: bool) -> None:
    proto = grouped(*behind)
    for name, bound in (("low", 0.0), ("high", 6.0)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(bound), name))
    assert "grouped" in points_of(proto).quantized
    points = points_of(proto, between={"grouped Conv": "no such kernel"})
    assert ("grouped" in points.quantized) == quantized and {"first", "last"} <= set(points.quantized)
    reasons = {item.node: item.reason for item in points.kept}
    assert reasons.get("grouped") == (None if quantized else "no such kernel")
    forced = points_of(
        proto, between={"grouped Conv": "no such kernel"}, overrides=[Override("grouped", Precision.INT8)]
    )
    assert "grouped" in forced.quantized


@pytest.mark.parametrize("out", ["grouped", "first"])
def test_nothing_is_quantized_right_behind_a_floating_grouped_convolution(out: str) -> None:
    proto = grouped(node("Relu", "b", "r"))
    left_out = {"overrides": [Override(out, Precision.FP16)]}
    assert "last" in points_of(proto, **left_out).quantized
    points = points_of(proto, between={"grouped Conv": "no such kernel"}, **left_out)
    if out == "first":  # the grouped one still runs in INT8
        assert {"grouped", "last"} <= set(points.quantized)
        return
    assert points.quantized == ("first",) and set(points.reads) == {"x"}
    assert "convolution in floating point that is grouped" in {item.node: item.reason for item in points.kept}["last"]


@pytest.mark.parametrize(("activation", "quantized"), [("Clip", False), ("Relu", True)])
def test_nothing_is_quantized_right_behind_a_floating_convolution_and_a_clip(activation: str, quantized: bool) -> None:
    proto = grouped(node(activation, "b", "r"), group=1)
    left_out = {"overrides": [Override("grouped", Precision.FP16)]}
    assert "last" in points_of(proto, **left_out).quantized
    assert ("last" in points_of(proto, between={"grouped Conv": "no such kernel"}, **left_out).quantized) == quantized
    assert {"grouped", "last"} <= set(points_of(proto, between={"grouped Conv": "no such kernel"}).quantized)


def test_a_skip_is_not_quantized_right_behind_a_floating_grouped_convolution() -> None:
    nodes = graph_nodes(
        "[grouped] a = Conv <group = 32, pads = [1, 1, 1, 1]> (x, w0) [branch] b = Conv (x, w1) "
        "[add] s = Add (b, a) [last] y = Conv (s, w2)"
    )
    weights = {"w0": values(32, 1, 3, 3), "w1": values(32, 32, 1, 1), "w2": values(32, 32, 1, 1)}
    proto = model(nodes, inputs={"x": ["n", 32, 8, 8]}, weights=weights)
    left_out = {"overrides": [Override("grouped", Precision.FP16)]}
    assert set(points_of(proto, **left_out).reads) == {"x", "a", "s"}
    assert set(points_of(proto, between={"grouped Conv": "no such kernel"}, **left_out).reads) == {"x", "s"}


def test_a_dense_convolution_may_give_floats() -> None:
    proto = grouped(node("Sigmoid", "b", "s"), node("Mul", "b s", "r"), group=1)
    assert "grouped" in points_of(proto, between={"grouped Conv": "no such kernel"}).quantized


@pytest.mark.parametrize(
    ("behind", "quantized"),
    [
        ("r = Relu (b) y = Conv (r, w2)", True),
        ("y = Sigmoid (b)", False),
        ("s = Add (b, x) y = Conv (s, w2)", False),
        ("j = Concat <axis = 1> (b, x) y = Conv (j, w3)", True),
        (
            "r = Relu (b) [next] y = ConvTranspose (r, w1)",
            False,
        ),  # nor is the next one quantized, which gives the output
    ],
)
def test_transposed_convolutions_whose_result_is_not_quantized(behind: str, quantized: bool) -> None:
    weights = {"w1": values(32, 32, 1, 1), "w2": values(32, 32, 1, 1), "w3": values(32, 64, 1, 1)}
    used = {name: weight for name, weight in weights.items() if name == "w1" or name in behind}
    proto = model(graph_nodes(f"[up] b = ConvTranspose (x, w1) {behind}"), inputs={"x": ["n", 32, 8, 8]}, weights=used)
    points = points_of(proto, between={"ConvTranspose": "no such kernel"})
    assert ("up" in points.quantized) == quantized and "next" not in points.quantized
    assert "up" in points_of(proto).quantized


def gated(activation: str = "silu", sigmoid: str = "Sigmoid", mean: str = "GlobalAveragePool") -> ModelProto:
    """A grouped convolution and its activation, squeeze-and-excite of that, and a convolution of the product."""
    active = "gs = Sigmoid (g) a = Mul (g, gs)" if activation == "silu" else f"a = {activation} (g)"
    pool = "ReduceMean <axes = [2, 3]>" if mean == "ReduceMean" else mean
    net = Net().write(
        f"g = Conv <group = 32, pads = [1, 1, 1, 1]> (x) {active} m = {pool} (a) q = Conv (m) qs = Sigmoid (q) "
        f"r = Mul (qs, q) e = Conv (r) k = {sigmoid} (e) p = Mul (k, a) y = Conv (p)",
        g=(32, 1, 3, 3), q=(8, 32, 1, 1), e=(32, 8, 1, 1),
    )  # fmt: skip
    return net.model("y")


@pytest.mark.parametrize("mean", ["GlobalAveragePool", "ReduceMean"])
@pytest.mark.parametrize(
    ("activation", "sigmoid"), [("silu", "Sigmoid"), ("Relu", "HardSigmoid"), ("HardSwish", "Sigmoid")]
)
def test_squeeze_and_excite_is_quantized_whole_where_that_is_asked_for(
    activation: str, sigmoid: str, mean: str
) -> None:
    proto = gated(activation, sigmoid, mean)
    assert gates_of(to_ir(proto)) == ("p_node",)
    plain = points_of(proto)
    assert set(plain.reads) == {"x", "p"} and {"q_node", "e_node"} == {item.node for item in plain.kept}
    whole = points_of(proto, gates=["p_node"])
    assert set(whole.reads) == {"x", "a", "m", "r", "k", "p"} and not whole.kept
    assert set(whole.reads["a"]) == {("m_node", 0), ("p_node", 1)} and set(whole.reads["k"]) == {("p_node", 0)}
    assert "g_node" not in points_of(proto, between={"grouped Conv": "no such kernel"}).quantized
    assert "g_node" in points_of(proto, between={"grouped Conv": "no such kernel"}, gates=["p_node"]).quantized


@pytest.mark.parametrize(
    "block",
    [
        "m = GlobalAveragePool (x) q = Conv (m) k = Sigmoid (q)",  # another tensor's mean
        "m = GlobalAveragePool (a) k = Sigmoid (m)",  # no convolution
        "q = Conv (a) k = Sigmoid (q)",  # no mean
    ],
)
def test_what_only_looks_like_squeeze_and_excite_is_none(block: str) -> None:
    assert gates_of(to_ir(Net().write(f"a = Relu (x) {block} p = Mul (a, k) y = Conv (p)").model("y"))) == ()


def test_a_product_of_values_of_unknown_type_says_so() -> None:
    """What an operator of another domain makes has no type that ONNX knows."""
    nodes = [helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml"), node("MatMul", "s w", "y", "product")]
    net = model(nodes, weights={"w": values(32, 32)}, inputs={"x": ("n", 32)}, outputs={"y": ("n", 32)})
    net.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    (kept,) = points_of(net).kept
    assert (kept.node, kept.op) == ("product", "MatMul") and "type of what it reads isn't known" in kept.reason
