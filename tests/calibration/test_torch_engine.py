"""The engine for GPUs, run on the CPU: the same code, whatever device PyTorch is given."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.histogram import Histogram
from trtopt.calibration.observe import observe
from trtopt.calibration.thresholds import choose
from trtopt.calibration.torch_engine import TOGETHER, TorchEngine, engine_identity
from trtopt.core.errors import CalibrationError, DeviceError, UsageError

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "onnx2pytorch")), reason="needs onnx2pytorch"
)
engine = partial(TorchEngine, device="cpu")
SEEN = ("x", "first", "pooled", "y")


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> None:
    torch = pytest.importorskip("torch")

    torch.set_num_threads(2)


def network(batch: int | str = "batch", weight: float = 1.0) -> ModelProto:
    """x (batch, 1, 8, 8) → Conv → Relu → first → global mean → pooled → Gemm → y."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((16, 1, 3, 3)).astype(np.float32) * np.float32(weight),
        "v": random.standard_normal((16, 10)).astype(np.float32),
        "axes": np.array([2, 3], np.int64),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["first"], "relu"),
        helper.make_node("ReduceMean", ["first", "axes"], ["pooled"], "mean", keepdims=0),
        helper.make_node("Gemm", ["pooled", "v"], ["y"], "gemm"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.fixture(scope="module")
def digits() -> NDArray[np.float32]:
    return np.asarray(load_digits().images[:77, None] / 16, np.float32)


def cut(values: NDArray[Any], size: int) -> list[dict[str, NDArray[Any]]]:
    return [{"x": values[start : start + size]} for start in range(0, len(values), size)]


def same(a: Histogram, b: Histogram) -> bool:
    return np.array_equal(a.counts, b.counts) and [a.exponent, a.low, a.high, a.total] == [
        b.exponent, b.low, b.high, b.total
    ]  # fmt: skip


@pytest.mark.parametrize("batch", ["batch", 1, 6])
def test_it_sees_what_onnxruntime_sees(digits: NDArray[np.float32], batch: int | str) -> None:
    reference = observe(network(), SEEN, cut(digits, 8), threads=1)
    found = observe(network(batch), SEEN, cut(digits, 8), engine=engine)
    assert found.samples == reference.samples == 77
    assert same(found.histograms["x"], reference.histograms["x"])
    for name in SEEN:
        one, other = found.histograms[name], reference.histograms[name]
        assert one.total == other.total
        assert one.absmax == pytest.approx(other.absmax, rel=1e-5)
        assert one.exponent == other.exponent
        assert np.abs(np.cumsum(one.counts) - np.cumsum(other.counts)).max() <= 0.01 * one.total
        for method in ("mse", "minmax", "percentile"):
            assert choose(one, method).amax == pytest.approx(choose(other, method).amax, rel=2e-3)


def test_however_the_samples_are_read_the_same_runs_see_them(digits: NDArray[np.float32]) -> None:
    reference = observe(network(), SEEN, cut(digits, 77), engine=engine)
    for size in (1, 8, 50):
        found = observe(network(), SEEN, cut(digits, size), engine=engine)
        assert all(same(found.histograms[name], reference.histograms[name]) for name in SEEN)


def test_every_run_holds_as_many_samples(digits: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch) -> None:
    """77 = 2 × 32 + 8 + 4 + 1, the last three repeated; and one sample that is checked."""
    sizes: list[int] = []
    original = TorchEngine._run

    def watched(self: TorchEngine, feed: Any) -> list[Any]:
        sizes.append(len(feed["x"]))
        return original(self, feed)

    monkeypatch.setattr(TorchEngine, "_run", watched)
    found = observe(network(), ["first"], cut(digits, 10), engine=engine)
    assert sizes == [1, *[TOGETHER] * 5]
    assert found.histograms["first"].total == 77 * 16 * 64


def test_images_of_different_sizes_share_a_pass() -> None:
    proto = network()
    for axis, name in ((2, "h"), (3, "w_")):
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    image = load_digits().images[0].astype(np.float32)[None, None] / 16
    batches = [{"x": image}, {"x": np.concatenate([image, image], 2)}, {"x": image * 2}]
    found = observe(proto, ["first"], batches, engine=engine)
    assert found.samples == 3
    assert found.histograms["first"].total == 16 * 64 * 4


def test_a_conversion_that_computes_something_else_is_refused(
    digits: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TorchEngine._run
    monkeypatch.setattr(TorchEngine, "_run", lambda self, feed: [item * 1.01 for item in original(self, feed)])
    with pytest.raises(CalibrationError, match=r"'first' differs by .* between PyTorch \(cpu, .* `device='cpu'`"):
        observe(network(), SEEN, cut(digits, 8), engine=engine)


def test_an_operator_that_the_converter_lacks_is_quoted(digits: NDArray[np.float32]) -> None:
    proto = network()
    proto.graph.node[-1].op_type = "Frobnicate"
    with pytest.raises(CalibrationError, match=r"onnx2pytorch can't convert .*Frobnicate.*`device='cpu'`"):
        observe(proto, SEEN, cut(digits, 8), engine=engine)


def test_an_overflow_names_the_tensor_and_the_sample(digits: NDArray[np.float32]) -> None:
    values = np.concatenate([digits[:40], np.full((1, 1, 8, 8), 3e38, np.float32)])
    with pytest.raises(CalibrationError, match=r"'first' \(from Relu relu\) isn't finite for sample \d+"):
        observe(network(weight=100), ["first"], cut(values, 8), engine=engine)


def test_zeros_and_views_count_as_on_the_cpu() -> None:
    counting = TorchEngine(network(), [], "cpu")
    for values in (np.zeros((3, 4), np.float32), np.float32([[1.5, -0.0], [-7, 1e-45]]).T, np.zeros(0, np.float32)):
        found, expected = Histogram(), Histogram()
        counting.add(found, values)
        expected.add(values)
        assert same(found, expected)


def test_settings_of_the_caller_come_back(digits: NDArray[np.float32]) -> None:
    torch = pytest.importorskip("torch")

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        observe(network(), SEEN, cut(digits[:9], 8), engine=engine)
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32 == before[1]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]


def test_the_key_of_a_pass_tells_engines_apart() -> None:
    found = engine_identity("cpu")
    assert found["device"] == "cpu"
    assert found["torch"]


def test_devices_that_are_not_there_are_refused(digits: NDArray[np.float32]) -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(UsageError, match="`device=` is 'tpu'; allowed: cpu, cuda"):
        calibrate(network(), data={"x": digits}, device="tpu", cache=False)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="PyTorch can't use the device 'cuda'"):
        calibrate(network(), data={"x": digits}, device="cuda", threads=1, cache=False)
