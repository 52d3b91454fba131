from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from graphs import model, node
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from skimage import data as photos
from sklearn.datasets import load_digits

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.observe import observe
from trtopt.core.errors import CalibrationError, DataError
from trtopt.core.progress import Phase, Reporter

Array = NDArray[Any]
SEEN = ("x", "hidden", "swapped")


def digits_model(batch: int | str = "batch") -> ModelProto:
    """x (batch, 64) → MatMul → Relu → hidden → rows of two pixels, the batch in the middle → swapped (8, batch, 4)."""
    weights = {
        "w": np.linalg.qr(load_digits().data[:64].astype(np.float64))[0][:, :32].astype(np.float32),
        "shape": np.array([-1, 8, 4], np.int64),
    }
    nodes = [
        node("MatMul", "x w", "product"),
        node("Relu", "product", "hidden"),
        node("Reshape", "hidden shape", "rows"),
        node("Transpose", "rows", "swapped", perm=[1, 0, 2]),
        node("Softmax", "swapped", "y"),
    ]
    return model(nodes, inputs={"x": [batch, 64]}, weights=weights)


@pytest.fixture(scope="module")
def digits() -> Array:
    return np.asarray(load_digits().data[:61] / 16 - 0.5, np.float32)


def cut(values: Array, size: int, name: str = "x") -> list[dict[str, Array]]:
    return [{name: values[start : start + size]} for start in range(0, len(values), size)]


def same(a: Histogram, b: Histogram) -> bool:
    return np.array_equal(a.counts, b.counts) and [a.exponent, a.low, a.high, a.total] == [
        b.exponent, b.low, b.high, b.total
    ]  # fmt: skip


def test_counts_are_those_of_the_tensors(digits: Array) -> None:
    proto = digits_model()
    seen = observe(proto, SEEN, cut(digits, 8), threads=1)
    weights = numpy_helper.to_array(proto.graph.initializer[0])
    hidden = np.maximum(digits @ weights, 0)
    assert seen.samples == 61
    assert seen.histograms["x"].total == digits.size
    assert seen.histograms["hidden"].total == hidden.size
    assert seen.histograms["hidden"].absmax == pytest.approx(hidden.max(), rel=1e-5)
    assert seen.histograms["hidden"].low == 0
    assert seen.histograms["x"].low < 0
    assert same(seen.histograms["hidden"], seen.histograms["swapped"])


def test_batch_size_order_and_threads_change_no_bit(digits: Array) -> None:
    reference = observe(digits_model(), SEEN, cut(digits, 61), threads=1)
    shuffled = np.random.default_rng(0).permutation(digits)
    for values, size, threads in ((digits, 1, 1), (digits, 7, 2), (shuffled, 8, 1), (shuffled, 32, 2)):
        again = observe(digits_model(), SEEN, cut(values, size), threads=threads)
        assert all(same(again.histograms[name], reference.histograms[name]) for name in SEEN), (size, threads)


@pytest.mark.parametrize("fixed", [1, 6, 8, 61, 64])
def test_a_fixed_batch_is_filled_and_its_filling_not_counted(digits: Array, fixed: int) -> None:
    """61 samples leave a rest for each of these sizes but two; `swapped` has the batch in the middle."""
    reference = observe(digits_model(), SEEN, cut(digits, 10), threads=1)
    found = observe(digits_model(fixed), SEEN, cut(digits, 10), threads=2)
    assert found.samples == 61
    assert all(same(found.histograms[name], reference.histograms[name]) for name in SEEN)


def test_images_of_different_sizes_share_a_pass() -> None:
    weights = {"w": np.ones((1, 1, 3, 3), np.float32) / 9}
    proto = model(
        [node("Conv", "x w", "blurred"), node("Relu", "blurred", "y")],
        inputs={"x": ["n", 1, "h", "w_"]},
        weights=weights,
    )
    image = photos.camera().astype(np.float32)[None, None] / 255
    seen = observe(proto, ["blurred"], [{"x": image[..., :64, :80]}, {"x": image[..., 100:132, :32]}], threads=2)
    assert seen.histograms["blurred"].total == 62 * 78 + 30 * 30


def test_an_overflow_names_the_tensor_its_node_and_the_sample(digits: Array) -> None:
    weights = {"big": np.full((64, 4), 3e38, np.float32), "one": np.eye(4, dtype=np.float32)}
    proto = model(
        [node("MatMul", "x big", "wide"), node("MatMul", "wide one", "y")], inputs={"x": ["n", 64]}, weights=weights
    )
    small = np.zeros((5, 64), np.float32)
    small[:, 0] = np.linspace(0.1, 0.5, 5)
    with pytest.raises(CalibrationError, match=r"'wide' \(from MatMul MatMul_wide\) isn't finite for sample 5"):
        observe(proto, ["x", "wide", "y"], cut(np.concatenate([small, digits[:3]]), 4), threads=2)


def test_a_dead_layer_and_a_constant_input_are_refused_by_name(digits: Array) -> None:
    proto = model(
        [node("MatMul", "x w", "p"), node("Relu", "p", "dead"), node("MatMul", "dead v", "y")],
        inputs={"x": ["n", 64]},
        weights={"w": -np.ones((64, 4), np.float32), "v": np.eye(4, dtype=np.float32)},
    )
    with pytest.raises(
        CalibrationError,
        match=r"'dead' \(from Relu Relu_dead\) was 0 everywhere in 9 samples.*`precision_override=\['MatMul_y=fp32'\]`",
    ):
        observe(proto, ["x", "dead"], cut(np.abs(digits[:9]), 4), threads=1)
    scaled = [node("Mul", "x two", "a"), node("Neg", "a", "y")]
    proto = model(scaled, inputs={"x": ["n", 4]}, weights={"two": np.array(2, np.float32)})
    flat = [{"x": np.full((40, 4), 0.25, np.float32)}]
    with pytest.raises(
        CalibrationError,
        match=r"'x' \(a network input\) was 0.25 everywhere in 40 samples, and so were 2.*\['Mul_a=fp32', 'Neg_y=fp32'\]",
    ):
        observe(proto, ["x", "a", "y"], flat, threads=1)


def test_data_that_does_not_fit_is_refused(digits: Array) -> None:
    with pytest.raises(DataError, match="no samples"):
        observe(digits_model(), SEEN, [], threads=1)
    with pytest.raises(CalibrationError, match=r"ONNX Runtime can't run the model on x \(1, 63\)"):
        observe(digits_model(), SEEN, cut(digits[:, :63], 8), threads=1)
    wide = model([node("Relu", "x", "y")], inputs={"x": ["n", 4]}, dtype=TensorProto.BFLOAT16)
    with pytest.raises(CalibrationError, match=r"the input x is bfloat16.*float32 inputs"):
        observe(wide, ["y"], [{"x": np.ones((2, 4), np.float32)}])


def test_inputs_go_together_and_must_agree_in_number(digits: Array) -> None:
    proto = model([node("Sub", "a b", "d"), node("Relu", "d", "y")], inputs={"a": ["n", 64], "b": ["n", 64]})
    pair = [{"a": digits, "b": digits[::-1]}]
    assert observe(proto, ["d"], pair, threads=2).histograms["d"].high == (digits - digits[::-1]).max()
    with pytest.raises(DataError, match=r"different numbers of samples: {'a': 61, 'b': 60}"):
        observe(proto, ["d"], [{"a": digits, "b": digits[:-1]}], threads=1)


def test_an_operator_that_onnxruntime_lacks_is_quoted(digits: Array) -> None:
    proto = model([node("Relu", "x", "r"), node("Frobnicate", "r", "y", domain="acme")], inputs={"x": ["n", 64]})
    proto.opset_import.append(helper.make_opsetid("acme", 1))
    with pytest.raises(CalibrationError, match=r"can't load the model 'test'.*Frobnicate"):
        observe(proto, ["r", "y"], cut(digits, 8), threads=1)


def test_data_is_read_a_few_samples_ahead_and_stops_at_an_interrupt(digits: Array) -> None:
    class Watch(Reporter):
        seen: Phase | None = None

        @contextlib.contextmanager
        def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
            with super().phase(name, total) as self.seen:
                yield self.seen

    watch, ahead = Watch(), []

    def endless() -> Iterator[dict[str, Array]]:
        for given in range(300):
            ahead.append(given - (watch.seen.done if watch.seen else 0))
            yield {"x": digits[given % 61][None]}
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        observe(digits_model(), SEEN, endless(), threads=2, reporter=watch)
    assert max(ahead) <= 5
    assert watch.seen is not None and watch.seen.done >= 295
    assert threading.active_count() == before


def test_half_precision_models_are_observed() -> None:
    proto = model([node("Relu", "x", "r"), node("Neg", "r", "y")], inputs={"x": ["n", 64]}, dtype=TensorProto.FLOAT16)
    seen = observe(proto, ["r"], [{"x": (load_digits().data[:3] / 16 - 0.5).astype(np.float16)}], threads=1)
    assert (seen.histograms["r"].low, seen.histograms["r"].high) == (0, 0.5)
