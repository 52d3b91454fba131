"""Preprocessing inside an engine gives on the GPU what it gives outside: every order of channels and layout, FP32 and FP16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lite0 import settings
from onnx import TensorProto, helper

from trtopt.builder.construction import build
from trtopt.cuda.device import Device
from trtopt.data.preprocess import Preprocess
from trtopt.runtime.session import Session

SIDE = 40


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(("channels", "layout"), [("rgb", "nchw"), ("bgr", "nchw"), ("gray", "nchw"), ("bgr", "nhwc")])
def test_the_values_are_those_outside(
    channels: str, layout: str, fp16: bool, generation: Any, gpu: Device, tmp_path: Path
) -> None:
    preprocess = Preprocess(channels=channels, layout=layout, scale=1 / 255, mean=(0.45,), std=(0.225,))
    if channels != "gray":
        preprocess = Preprocess(
            channels=channels, layout=layout, scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
        )
    count = preprocess.count
    shape = ["n", count, SIDE, SIDE] if layout == "nchw" else ["n", SIDE, SIDE, count]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"], "neg")], "negative", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    sizes = ["x".join(map(str, (batch, *shape[1:]))) for batch in (1, 4, 4)]
    result = build(
        tmp_path / "m.onnx",
        tmp_path / "m.engine",
        fp16=fp16,
        embed_preprocess=True,
        preprocess=preprocess,
        shapes=[f"x:{','.join(sizes)}"],
        **settings(),
    )
    pixels = np.random.default_rng(0).integers(0, 256, (4, SIDE, SIDE, count), dtype=np.uint8)
    with Session(result.engine) as session:
        assert session.embedded is not None
        assert [(item.dtype, item.shape) for item in session.inputs] == [("uint8", (-1, SIDE, SIDE, count))]
        expected = -session.embedded.from_pixels({"x": pixels})["x"]
        for batch in (4, 4, 4, 1):  # enqueued, captured, replayed
            [found] = session.run({"x": pixels[:batch]}).values()
            np.testing.assert_allclose(found, expected[:batch], atol=4e-3 if fp16 else 1e-5)
        given = session.taken({"x": -expected})["x"]
        assert np.array_equal(given, pixels)
