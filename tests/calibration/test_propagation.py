"""Every rule that calls itself exact: quantizing before the operator and behind it gives the same numbers."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from trtopt.calibration.propagation import propagate
from trtopt.graph.view import to_ir

Array = NDArray[np.float32]
SHAPE = (1, 4, 6, 6)


def graph(*nodes: NodeProto, **weights: Any) -> ModelProto:
    held = {name: np.asarray(value) for name, value in weights.items()}
    return graphs.model(nodes, inputs={"x": SHAPE}, weights=held)


def n(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> NodeProto:
    return graphs.node(op, inputs, outputs, **attributes)


def f(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def found(model: ModelProto, *groups: tuple[str, ...], **amax: float) -> dict[str, float]:
    return {name: value for name, value in propagate(to_ir(model), amax, groups).items() if name not in amax}


# The operator's input is x, its output y.
ONE_TO_ONE: dict[str, ModelProto] = {
    "Reshape": graph(n("Reshape", "x s"), s=np.array([4, 36])),
    "Flatten": graph(n("Flatten", "x")),
    "Squeeze": graph(n("Squeeze", "x s"), s=np.array([0])),
    "Unsqueeze": graph(n("Unsqueeze", "x s"), s=np.array([0])),
    "Transpose": graph(n("Transpose", "x", perm=[0, 2, 3, 1])),
    "Identity": graph(n("Identity", "x")),
    "Dropout": graph(n("Dropout", "x")),
    "DepthToSpace": graph(n("DepthToSpace", "x", blocksize=2)),
    "SpaceToDepth": graph(n("SpaceToDepth", "x", blocksize=2)),
    "Resize": graph(n("Resize", "x r s", mode="nearest"), r=f(), s=f(1, 1, 2, 2)),
    "Pad": graph(n("Pad", "x p"), p=np.array([0, 0, 1, 1, 0, 0, 1, 1])),
    "reflecting Pad": graph(n("Pad", "x p", mode="reflect"), p=np.array([0, 0, 1, 1, 0, 0, 1, 1])),
}
SELECTIONS: dict[str, ModelProto] = {
    "MaxPool": graph(n("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2])),
    "Slice": graph(n("Slice", "x a b c"), a=np.array([1]), b=np.array([3]), c=np.array([1])),
    "shrinking Resize": graph(n("Resize", "x r s", mode="nearest"), r=f(), s=f(1, 1, 0.5, 0.5)),
    "cropping Pad": graph(n("Pad", "x p"), p=np.array([0, 0, -1, -1, 0, 0, -1, -1])),
}
BACKWARD: dict[str, ModelProto] = {
    "Relu": graph(n("Relu", "x")),
    "Clip": graph(n("Clip", "x a b"), a=f(0)[0], b=f(6)[0]),
    "symmetric Clip": graph(n("Clip", "x a b"), a=f(-3)[0], b=f(3)[0]),
}


def quantized(values: Array, amax: float) -> Array:
    scale = np.float32(amax / 127)
    return np.clip(np.round(values / scale), -127, 127).astype(np.float32) * scale


def run(model: ModelProto, **feeds: Array) -> dict[str, Array]:
    names = [name for node in model.graph.node for name in node.output]
    every = ModelProto()
    every.CopyFrom(model)
    del every.graph.output[:]
    every.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(every.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, feeds)))


def sample() -> Array:
    return (np.random.default_rng(3).standard_normal(SHAPE) * 2).astype(np.float32)


@pytest.mark.parametrize("name", [*ONE_TO_ONE, *SELECTIONS])
def test_values_that_only_move_keep_their_scale_both_ways(name: str) -> None:
    model = {**ONE_TO_ONE, **SELECTIONS}[name]
    assert found(model, x=2.5)["y"] == 2.5
    assert found(model, y=2.5)["x"] == 2.5
    x = sample()
    before, behind = run(model, x=quantized(x, 2.5))["y"], quantized(run(model, x=x)["y"], 2.5)
    np.testing.assert_array_equal(before, behind)


@pytest.mark.parametrize("name", [*ONE_TO_ONE, *SELECTIONS, *BACKWARD])
def test_a_selection_says_nothing_of_an_input_that_others_read(name: str) -> None:
    model = ModelProto()
    model.CopyFrom({**ONE_TO_ONE, **SELECTIONS, **BACKWARD}[name])
    model.graph.node.append(n("Sigmoid", "x", "z"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert found(model, y=2.5) == ({"x": 2.5} if name in ONE_TO_ONE else {})


@pytest.mark.parametrize("name", BACKWARD)
def test_what_an_activation_cuts_off_needs_no_codes(name: str) -> None:
    model, x = BACKWARD[name], sample() * 4
    assert found(model, x=2.5) == {}  # what they drop counts in x
    for amax in (1.0, 2.5, 6.0015):
        assert found(model, y=amax) == {"x": amax}
        saturated = run(model, x=np.clip(x, -amax, amax))["y"]
        np.testing.assert_array_equal(saturated, np.clip(run(model, x=x)["y"], -amax, amax))


def test_what_computes_hands_nothing_on() -> None:
    for model in (
        graph(n("AveragePool", "x", kernel_shape=[2, 2])),
        graph(n("Add", "x x")),
        graph(n("Sigmoid", "x")),
        graph(n("Resize", "x r s", mode="linear"), r=f(), s=f(1, 1, 2, 2)),
        graph(n("Resize", "x r s", coordinate_transformation_mode="tf_crop_and_resize"), r=f(), s=f(1, 1, 2, 2)),
        graph(n("Pad", "x p v"), p=np.array([0, 0, 1, 1, 0, 0, 1, 1]), v=f(9)[0]),
        graph(n("Cast", "x", "i", to=TensorProto.INT32), n("Cast", "i", to=TensorProto.FLOAT)),
    ):
        assert found(model, x=2.5) == {}
    for low, high in ((1, 6), (-3, 0), (np.nan, 6)):
        assert found(graph(n("Clip", "x a b"), a=f(low)[0], b=f(high)[0]), y=2.5) == {}
    old = graph(n("Clip", "x", min=-1.0, max=6.0), n("Pad", "y", "z", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=1.0))
    assert found(old, z=2.5) == {} and found(old, y=2.5) == {"x": 2.5}  # as in opset 6
    assert found(graph(n("Add", "x x")), y=2.5) == {}


def test_concat_and_split_take_the_largest() -> None:
    concat = graph(n("Relu", "x", "a"), n("Sigmoid", "x", "b"), n("Concat", "a b c", axis=1), c=np.full(SHAPE, 4, "f4"))
    assert found(concat, a=2.5) == {}
    assert found(concat, a=2.5, b=1.0)["y"] == 4  # the constant's
    assert found(concat, a=7.5, b=1.0)["y"] == 7.5
    assert "a" not in found(concat, y=7.5)
    assert "b" not in found(concat, ("a", "y"), ("b",), y=7.5)
    assert "c" not in found(concat, ("c", "y"), y=7.5)  # a constant has its own
    shared = found(concat, ("a", "b", "y"), y=7.5)
    assert (shared["a"], shared["b"]) == (7.5, 7.5)
    split = graph(n("Split", "x", "y z", axis=1))
    assert found(split, x=2.5) == {"y": 2.5, "z": 2.5}
    assert found(split, y=2.5) == {}
    assert found(split, y=2.5, z=3.5) == {"x": 3.5}


def test_scales_travel_far() -> None:
    chain = graph(
        n("Conv", "x w", "c"),
        n("Relu", "c", "r"),
        n("MaxPool", "r", "m", kernel_shape=[2, 2]),
        n("Reshape", "m s", "y"),
        w=np.ones((4, 4, 1, 1), np.float32),
        s=np.array([-1]),
    )
    assert found(chain, y=2.5) == dict.fromkeys("crm", 2.5)
