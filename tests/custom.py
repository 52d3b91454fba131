"""A model with custom operators, their references, and a plugin as a Python module, for tests."""

from __future__ import annotations

import numpy as np
from graphs import values, written
from onnx import ModelProto

OPERATORS = """
import numpy as np
import trtopt


@trtopt.operator("acme::Swishy", shapes=lambda x, beta, **_: [x], types=("fp32", "fp16"))
def swishy(x, beta, *, scale=1.0):
    return scale * x / (1 + np.exp(-beta * x))
"""
PLUGIN = """
from types import SimpleNamespace

import tensorrt

fields = [SimpleNamespace(name="scale")]
creator = SimpleNamespace(name="Swishy", plugin_version="1", plugin_namespace="", field_names=fields)
tensorrt.get_plugin_registry().register_creator(creator, "")
"""


def custom_net(attributes: str = "scale = 2.0", op: str = "Swishy") -> ModelProto:
    """Return x (n, 3, 16, 16) → Conv → Swishy → Conv → Swishy → Swishy, + → y; and z, what the second Conv gives."""
    text = f"""(float[n, 3, 16, 16] x) => (float[n, 16, 16, 16] y, float[n, 16, 16, 16] z) {{
        [conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w1) [swish1] b = acme.{op} <{attributes}> (a, beta)
        [conv2] c = Conv (b, w2) [swish2] d = acme.{op} (c, beta) [swish3] e = acme.{op} (d, beta)
        [relu] z = Relu (c) [add] y = Add (e, a) }}"""
    scale = np.float32(0.2)
    weights = {"w1": values(16, 3, 3, 3) * scale, "w2": values(16, 16, 1, 1, seed=1) * scale}
    net = written(text, beta=values(1, 16, 1, 1, seed=2), **weights)
    net.opset_import.add(domain="acme", version=1)
    return net


def detector() -> ModelProto:
    """Return x (n, 3, 16, 16) → two convolutions → boxes and scores → EfficientNMS_TRT."""
    limits = (
        "score_threshold = 0.4, iou_threshold = 0.5, max_output_boxes = 10, background_class = -1, score_activation = 0"
    )
    net = written(
        f"""(float[n,3,16,16] x) => (int32[n,1] count, float[n,10,4] boxes, float[n,10] scores, int32[n,10] classes) {{
        a = Conv <pads = [1,1,1,1]> (x, w1) r = Relu (a) h = Conv <strides = [2,2]> (r, w2) t = Transpose <perm = [0,2,3,1]> (h)
        l = Reshape (t, form) c, s = Split <axis = 2> (l, parts) p = Sigmoid (s)
        [nms] count, boxes, scores, classes = TRT.EfficientNMS_TRT <{limits},
        box_coding = 1> (c, p) }}""",
        w1=values(16, 3, 3, 3, scale=0.2),
        w2=values(7, 16, 2, 2, seed=1, scale=0.2),
        form=np.array([0, -1, 7]),
        parts=np.array([4, 3]),
    )
    net.opset_import.add(domain="TRT", version=1)
    return net
