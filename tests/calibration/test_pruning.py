"""2:4 weights: two of four input channels at every place, and by samples a product nearer to what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import decibels, values, written
from half_models import half
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from world import Heard

from trtopt.calibration.pruning import Pruned, prune
from trtopt.core.errors import UsageError
from trtopt.core.values import Override
from trtopt.data import Batches, open_data
from trtopt.graph.io import load_model
from trtopt.graph.prepare import prepare
from trtopt.ort.sessions import open_session

NET = """(float[n,8,12,12] x) => (float[n,10] y) { [a] h = Conv<pads=[1,1,1,1]>(x, w, c) [r] i = Relu(h) [b] j = Conv(i, v)
    [s] k = Relu(j) [g] p = GlobalAveragePool(k) [f] q = Flatten(p) [m] t = MatMul(q, u) [d] y = Gemm<transB=1>(t, z) }"""
SHAPES = {"w": (16, 8, 3, 3), "c": (16,), "v": (32, 16, 1, 1), "u": (32, 16), "z": (10, 16)}
AXES = {"w": 1, "v": 1, "u": 0, "z": 1}  # input channels


def _net() -> ModelProto:
    return written(NET, **{name: values(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())})


def _photos(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Channels that go together."""
    inner = np.random.default_rng(seed).standard_normal((count, 3, 12, 12))
    mix = np.random.default_rng(7).standard_normal((8, 3))
    return np.asarray(np.einsum("oc,nchw->nohw", mix, inner) + 0.5, np.float32)


def _pruned(proto: ModelProto, data: NDArray[np.float32] | None = None, **options: Any) -> Pruned:
    model = load_model(proto)
    batches: Batches | None = None if data is None else open_data(model.inputs, data={"x": data})
    return prune(model, prepare(model).proto, batches, **options)


def _weights(proto: ModelProto) -> dict[str, NDArray[Any]]:
    return {item.name: numpy_helper.to_array(item) for item in proto.graph.initializer}


def _zeros(weight: NDArray[Any], axis: int) -> NDArray[np.intp]:
    """Zeros of each four channels in a row, at each place of the kernel and of each output channel."""
    moved = np.moveaxis(weight, axis, 0)
    return np.asarray((moved.reshape(-1, 4, *moved.shape[1:]) == 0).sum(1))


def _run(proto: ModelProto, data: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(open_session(proto, threads=1).run(None, {"x": data})[0], np.float32)


def test_every_weight_is_two_of_four_along_its_inputs_and_samples_lose_less() -> None:
    proto, fresh = _net(), _photos(32, seed=1)
    wanted, lost = _run(proto, fresh), list[float]()
    for data in (None, _photos(48)):
        pruned = _pruned(proto, data)
        assert str(pruned) == "2:4: 4 of 4 weights pruned"
        found = {weight.shape: weight for weight in _weights(pruned.model.proto).values()}
        for name, axis in AXES.items():
            assert (_zeros(found[SHAPES[name]], axis) == 2).all(), name
        lost.append(decibels(_run(pruned.model.proto, fresh), wanted))
        assert (pruned.snr_db is None) == (data is None)
        if pruned.snr_db is not None:
            assert pruned.judged == 6 and abs(pruned.snr_db(pruned.model.proto) - lost[-1]) < 3
    assert lost[1] > lost[0] + 6, lost


def test_by_magnitude_the_two_largest_stay_as_they_are() -> None:
    proto = written("(float[n,8] x) => (float[n,6] y) { [m] y = MatMul(x, w) }", w=values(8, 6))
    given, found = values(8, 6), _weights(_pruned(proto).model.proto)["w"]
    for column in range(6):
        for first in (0, 4):
            four = slice(first, first + 4)
            largest = np.sort(np.argsort(-np.abs(given[four, column]))[:2])
            assert (np.flatnonzero(found[four, column]) == largest).all()
            assert (found[four, column][largest] == given[four, column][largest]).all()


@settings(max_examples=20, deadline=None)
@given(kernel=st.integers(1, 3), seed=st.integers(0, 99), dead=st.booleans())
def test_what_is_two_of_four_already_stays(kernel: int, seed: int, dead: bool) -> None:
    weight = values(8, 8, kernel, kernel, seed=seed)
    weight.reshape(8, 2, 4, -1)[:, :, [0, 3]] = 0
    proto = written("(float[n,8,6,6] x) => (float[n,8,h,v] y) { [c] y = Conv(x, w) }", w=weight)
    data = values(9, 8, 6, 6, seed=seed + 1)
    data[:, :4] *= not dead
    for given_data in (None, data):
        found = _weights(_pruned(proto, given_data).model.proto)["w"]
        np.testing.assert_allclose(found, weight, atol=1e-5)


def test_weights_that_are_elsewhere_are_named_with_their_place() -> None:
    """A product of two activations has none."""
    text = """(float[8,8] x) => (float[8,8] y) { [left] a = MatMul(w, x) d = DequantizeLinear(c, s, z)
        t = Transpose<perm = [1, 0]>(d) [coded] b = MatMul(a, t) [float] e = MatMul(b, v) [none] y = MatMul(e, e) }"""
    held = {"w": values(8, 8), "c": np.ones((8, 8), np.int8), "s": np.float32(0.1), "z": np.int8(0)}
    dense = _pruned(written(text, v=values(8, 8, seed=1), **held)).dense
    assert dense.keys() == {"left", "coded"}
    assert "on the left" in dense["left"] and "quantized already" in dense["coded"]
    alone = written("(float[8,8] x) => (float[8,8] y) { [left] y = MatMul(w, x) }", w=values(8, 8))
    with pytest.raises(UsageError, match="no weight to prune: left: its weights stand on the left"):
        _pruned(alone)
    with pytest.raises(UsageError, match="no Conv, MatMul or Gemm has one"):
        _pruned(written("(float[8,8] x) => (float[8,8] y) { y = MatMul(x, x) }"))


def test_what_is_not_suited_stays_dense_and_says_why() -> None:
    text = """(float[n,6,8,8] x) => (float[n,8,h,v] y, float[n,8,h,v] z) { [six] a = Conv(x, p) [deep] b = Conv<group=8>(a, q)
        [one] c = Conv(b, s) [two] y = Conv(c, s) [kept] d = Conv(b, t) [fine] z = Conv(d, u) }"""
    shapes = {"p": (8, 6, 1, 1), "q": (8, 1, 1, 1)} | dict.fromkeys("stu", (8, 8, 1, 1))
    proto = written(text, **{name: values(*shape) + seed for seed, (name, shape) in enumerate(shapes.items())})
    heard = Heard()
    before, pruned = _weights(proto), _pruned(proto, overrides=[Override.parse("kept=fp32")], reporter=heard)
    assert str(pruned) == "2:4: 1 of 6 weights pruned"
    assert pruned.dense == {
        "six": "it has 6 input channels, no multiple of 4",
        "deep": "its channels are in groups",
        "one": "several nodes read its weights",
        "two": "several nodes read its weights",
        "kept": "`precision_override=` keeps it in FP32",
    }
    assert "one, two: several nodes read its weights" in heard.notes[0]
    after = _weights(pruned.model.proto)
    assert all((after[name] == before[name]).all() for name in "pqst") and (_zeros(after["u"], 1) == 2).all()


def test_the_result_depends_neither_on_the_order_of_samples_nor_changes_the_model() -> None:
    proto, data = _net(), _photos(24)
    given_bytes = proto.SerializeToString()
    one, other = (_pruned(proto, item).model for item in (data, data[::-1].copy()))
    assert one.fingerprint != load_model(proto).fingerprint and proto.SerializeToString() == given_bytes
    for name, weight in _weights(one.proto).items():
        np.testing.assert_allclose(weight, _weights(other.proto)[name], atol=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_few_samples_and_weights_in_half_types_do(count: int) -> None:
    pruned = _pruned(half(_net()), _photos(count))
    assert pruned.count == 4
    weights = [item for item in _weights(pruned.model.proto).values() if item.ndim > 1]
    assert {item.dtype.name for item in weights} == {"float16"}
    assert pruned.snr_db is not None and np.isfinite(pruned.snr_db(pruned.model.proto))


def test_a_layer_makes_up_for_those_before_it() -> None:
    """Through six layers, whose losses would add up."""
    body = " ".join(f"a{n} = Conv(r{n - 1}, w{n}) r{n} = Relu(a{n})" for n in range(1, 6))
    text = f"(float[n,32,6,6] x) => (float[n,8,6,6] y) {{ r0 = Relu(x) {body} y = Conv(r5, w6) }}"
    weights = {f"w{n}": values(8 if n == 6 else 32, 32, 1, 1, seed=n, scale=0.25) for n in range(1, 7)}
    mix = np.random.default_rng(7).standard_normal((32, 12))
    inner = np.random.default_rng(8).standard_normal((96, 12, 6, 6))
    data = np.asarray(np.einsum("oc,nchw->nohw", mix, inner), np.float32)
    pruned = _pruned(written(text, **weights), data[:64])
    lost = decibels(_run(pruned.model.proto, data[64:]), _run(written(text, **weights), data[64:]))
    assert lost > 12, lost  # 10.7 where each answers for itself
