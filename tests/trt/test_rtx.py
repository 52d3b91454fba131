"""TensorRT-RTX for real: it parses and builds on any machine, without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper
from world import Heard, unnumbered

from trtopt.core.errors import (
    BuildCancelled,
    BuildFailed,
    DeviceError,
    EngineError,
    UnsupportedOperator,
    UnsupportedRequest,
    UsageError,
)
from trtopt.core.progress import Phase, Reporter
from trtopt.core.values import BuildSpec, LayerInfo, Precision, ShapeRange
from trtopt.trt import select
from trtopt.trt.families import DEFAULT_TARGETS
from trtopt.trt.generation import Generation
from trtopt.trt.plans import plan_header

X = {"x": ShapeRange((1, 3, 32, 32), (4, 3, 32, 32), (8, 3, 32, 32))}


@pytest.fixture
def rtx(with_gpu: Callable[[int | None], None]) -> Generation:
    with_gpu(None)  # the same on a machine that has one
    return select("rtx")


def heavy(layers: tuple[LayerInfo, ...]) -> list[tuple[str, str, str]]:
    return [(layer.kind, str(layer.precision), layer.nodes[0]) for layer in layers if layer.kind != "other"]


def test_targets_are_always_named(rtx: Generation, tmp_path: Path) -> None:
    said = json.loads(json.dumps(rtx.describe()))
    assert said["family"] == "rtx" and said["can_build"] is True
    assert said["capabilities"]["compute_targets"] == ["sm75", "sm80", "sm86", "sm89", "sm120", "sm121"]
    assert rtx.targets(BuildSpec()) == DEFAULT_TARGETS == (80, 86, 89, 120)
    assert rtx.targets(BuildSpec(precision=Precision.FP8)) == (89, 120)
    assert rtx.targets(BuildSpec(precision=Precision.INT8, remainder=Precision.BF16)) == DEFAULT_TARGETS
    model = nets.conv_net(tmp_path / "m.onnx")
    masks = {}
    for targets in ((), (86,), (89, 120), (120, 89)):
        built = rtx.build(model, BuildSpec(profiles=(X,), targets=targets), quantized=False)
        masks[targets] = int.from_bytes(built.plan[0x20:0x28], "little")
    # one bit for each: sm80=2, sm86=4, sm89=8, sm120=16
    assert masks == {(): 2 + 4 + 8 + 16, (86,): 4, (89, 120): 24, (120, 89): 24}


def test_sm75_takes_int8_from_every_target(rtx: Generation, tmp_path: Path) -> None:
    model = nets.conv_net(tmp_path / "m.onnx", base="fp16", quantized="int8")
    spec = BuildSpec(precision=Precision.INT8, profiles=(X,), targets=(75, 89))
    with pytest.raises(
        UnsupportedRequest, match=r"sm75.*floating point on every target.*`allow_precision_fallback=True`"
    ):
        rtx.build(model, spec, quantized=True)
    heard = Heard()
    allowed = BuildSpec(precision=Precision.INT8, profiles=(X,), targets=(75, 89), allow_precision_fallback=True)
    built = rtx.build(model, allowed, quantized=True, reporter=heard)
    assert [row[:2] for row in heavy(built.layers)[:2]] == [("convolution", "fp16")] * 2
    assert len(heard.warnings) == 1 and "sm75" in heard.warnings[0]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (BuildSpec(targets=(90,)), r"`target='sm90'`: TensorRT-RTX .* has sm75, sm80, sm86, sm89, sm120, sm121"),
        (BuildSpec(precision=Precision.FP8, targets=(80, 86, 89)), r"`target='sm80,sm86'`: fp8 needs sm89"),
        (BuildSpec(precision=Precision.BF16, targets=(75,)), r"`target='sm75'`: bf16 needs sm80"),
        (BuildSpec(precision=Precision.INT8, calibrator="native"), r"`calibrator='native'`"),
        (BuildSpec(timing_cache=Path("t.cache")), r"`timing_cache=`"),
        (BuildSpec(hardware_compatibility="ampere_plus"), r"`hardware_compatibility='ampere_plus'`.*`target=`"),
        (BuildSpec(version_compatible=True), r"`version_compatible=True`"),
        (BuildSpec(strip=True), r"`strip=True`: TensorRT-RTX needs a GPU"),
        (BuildSpec(refit=True), r"`refit=True`: TensorRT-RTX needs a GPU"),
    ],
)
def test_refusals_before_the_build(spec: BuildSpec, said: str, rtx: Generation, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedRequest, match=said):
        rtx.build(nets.conv_net(tmp_path / "m.onnx"), spec, quantized=False)


def test_options_it_honours_change_the_build(rtx: Generation, tmp_path: Path) -> None:
    model = nets.conv_net(tmp_path / "m.onnx")
    large = {"x": ShapeRange((8, 3, 32, 32), (16, 3, 32, 32), (16, 3, 32, 32))}
    others = {"optimization_level": 5, "max_aux_streams": 0, "workspace": 1 << 30}
    spec = BuildSpec(profiles=(X, large), sparsity="keep", tf32=False, **others)
    assert rtx.build(model, spec, quantized=False).layers
    with pytest.raises(BuildFailed, match="`workspace=`"):
        rtx.build(model, BuildSpec(profiles=(X,), workspace=4), quantized=False)


def test_nodes_that_it_lacks_are_named_before_or_by_the_build(rtx: Generation, tmp_path: Path) -> None:
    issues = rtx.unsupported(model := nets.bad_nodes(tmp_path / "bad.onnx"))
    assert [(issue.node, issue.op) for issue in issues] == [("custom_node", "Frobnicate"), ("det_node", "Det")]
    assert "plugin" in issues[0].reason and "no Det" in issues[1].reason
    with pytest.raises(UnsupportedOperator, match=r"custom_node \(Frobnicate\)(.|\n)*det_node \(Det\)"):
        rtx.build(model, BuildSpec(), quantized=False)
    with pytest.raises(UnsupportedOperator, match="nms_node"):  # it parses, and has no implementation
        rtx.build(nets.unbuildable_net(tmp_path / "nms.onnx"), BuildSpec(), quantized=False)
    with pytest.raises(UnsupportedRequest, match=r"sm75 \(node fc\).*`fp16=True`"):
        rtx.build(nets.conv_net(tmp_path / "m.onnx"), BuildSpec(profiles=(X,), targets=(75,)), quantized=False)


def test_shape_inputs_take_values(rtx: Generation, tmp_path: Path) -> None:
    model = nets.shape_input_net(tmp_path / "shape.onnx")
    data = ShapeRange((1, 16), (4, 16), (8, 16))
    good = {"data": data, "sizes": ShapeRange((2, 8), (8, 8), (16, 8))}
    assert rtx.build(model, BuildSpec(profiles=(good,)), quantized=False).layers
    with pytest.raises(UsageError, match="sizes is a shape input of 2 values, 1 were given"):
        rtx.build(model, BuildSpec(profiles=({"data": data, "sizes": ShapeRange((2,), (2,), (2,))},)), quantized=False)
    with pytest.raises(UsageError, match=r"values of the shape input sizes .* are missing"):
        rtx.build(model, BuildSpec(profiles=({"data": data},)), quantized=False)


def test_ctrl_c_stops_the_build_and_the_next_one_works(rtx: Generation, tmp_path: Path, monkeypatch: Any) -> None:
    model = nets.conv_net(tmp_path / "m.onnx")
    stopped_at: list[str] = []

    class Interrupting(Phase, Reporter):
        def phase(self, name: str, total: int | None = None) -> Any:
            return contextlib.nullcontext(self)

        def detail(self, text: str) -> None:
            super().detail(text)
            if text and not stopped_at:
                stopped_at.append(text)
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.3)  # TensorRT waits here while the main thread takes the signal

    with pytest.raises(BuildCancelled, match="nothing was written") as caught:
        rtx.build(model, BuildSpec(profiles=(X,)), quantized=False, reporter=Interrupting("build"))
    assert "background" not in str(caught.value), "the build was left behind, not stopped"
    assert stopped_at and stopped_at[0].startswith("Building engine")
    assert not [thread for thread in threading.enumerate() if thread.name == "trtopt-build"]
    assert rtx.build(model, BuildSpec(profiles=(X,)), quantized=False).layers


def test_builds_are_repeatable_and_threads_wait_for_each_other(rtx: Generation, tmp_path: Path, capfd: Any) -> None:
    models = [nets.conv_net(tmp_path / "a.onnx"), nets.conv_net(tmp_path / "b.onnx", base="fp16", quantized="int8")]
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        precision = (Precision.FP32, Precision.INT8)[index % 2]
        spec = BuildSpec(precision=precision, profiles=(X,), targets=(89,))
        results[index] = rtx.build(models[index % 2], spec, quantized=bool(index % 2))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 4
    for index in (0, 1):
        assert unnumbered(results[index].plan) == unnumbered(results[index + 2].plan)
        assert results[index].layers == results[index + 2].layers  # no other build's messages among them
    assert capfd.readouterr() == ("", "")
    kinds = {"conv1": "convolution", "conv2": "convolution", "fc": "matmul"}
    for index, precision in enumerate(("fp32", "int8")):
        assert heavy(results[index].layers) == [(kind, precision, name) for name, kind in kinds.items()]


def test_loading_needs_a_gpu_and_a_plan(rtx: Generation, tmp_path: Path) -> None:
    built = rtx.build(nets.conv_net(tmp_path / "m.onnx", batch=2), BuildSpec(), quantized=False)
    plan, header = built.plan, plan_header(built.plan)
    assert header is not None and (header.product, header.version) == ("TensorRT-RTX", rtx.version)
    assert built.layers and not built.unread and built.seconds > 0
    with pytest.raises(DeviceError, match=r"m\.engine needs a GPU"):
        rtx.load(plan, "m.engine")
    with pytest.raises(EngineError, match=r"m\.engine isn't a TensorRT plan: it has 10 bytes"):
        rtx.load(plan[:10], "m.engine")
    with pytest.raises(EngineError, match=rf"damaged: it has 10000 bytes, its header says {len(plan)}"):
        rtx.load(plan[:10_000], "m.engine")


def test_a_real_model_loses_no_layer(rtx: Generation, tmp_path: Path) -> None:
    """PP-OCRv4's detector as shipped: 62 convolutions and 2 transposed ones, dynamic height and width."""
    package = importlib.util.find_spec("rapidocr_onnxruntime")
    assert package is not None and package.submodule_search_locations, "rapidocr-onnxruntime isn't installed"
    model = Path(package.submodule_search_locations[0]) / "models" / "ch_PP-OCRv4_det_infer.onnx"
    assert model.is_file()
    assert rtx.unsupported(model) == ()
    sizes = {"x": ShapeRange((1, 3, 64, 64), (1, 3, 320, 320), (1, 3, 640, 640))}
    built = rtx.build(model, BuildSpec(profiles=(sizes,), targets=(89,)), quantized=False)
    kinds = Counter(layer.kind for layer in built.layers)
    assert (kinds["convolution"], kinds["deconvolution"]) == (62, 2)
    convolutions = {node.name for node in onnx.load(model).graph.node if node.op_type == "Conv"}
    named = {name for layer in built.layers if layer.kind == "convolution" for name in layer.nodes}
    assert convolutions <= named


STEP = """
<ir_version: 8, opset_import: ["" : 17]>
step (float[batch,1,192] qkv, int64[batch,1] position, float[batch,4,32,16] k, float[batch,4,32,16] v)
     => (float[batch,4,1,16] y)
<int64[3] thirds = {64, 64, 64}, int64[4] heads = {-1, 4, 1, 16}, int64[4] column = {-1, 1, 32, 1},
 int64[4] row = {-1, 1, 1, 32}, float hidden = {-10000.0}, float four = {4.0}>
{
    here = Equal(places, position)
    until = LessOrEqual(places, position)
    write = Reshape(here, column)
    seen = Reshape(until, row)
    unseen = Not(seen)
    q0, k0, v0 = Split<axis = -1>(qkv, thirds)
    q1 = Reshape(q0, heads)
    k1 = Reshape(k0, heads)
    v1 = Reshape(v0, heads)
    keys = Where(write, k1, k)
    values = Where(write, v1, v)
    turned = Transpose<perm = [0, 1, 3, 2]>(keys)
    products = MatMul(q1, turned)
    scaled = Div(products, four)
    masked = Where(unseen, hidden, scaled)
    shares = Softmax<axis = -1>(masked)
    y = MatMul(shares, values)
}
"""


@pytest.mark.usefixtures("rtx")
def test_a_decoders_step_with_a_static_cache_builds(tmp_path: Path) -> None:
    """TensorRT-RTX 1.7.1 ends the process, hence one of its own, where it meets the step as it is."""
    proto = onnx.parser.parse_model(STEP)
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(32).reshape(1, 32), "places"))
    onnx.save(proto, tmp_path / "step.onnx")
    command = [sys.executable, "-m", "trtopt", "build", "step.onnx", "--target", "sm89", "-o", "step.engine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "step.engine").exists()) == (0, True), done.stderr
