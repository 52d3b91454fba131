"""Weights left in the model's file: the same model, and a word where the file isn't what it was."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from graphs import model, node, values
from hypothesis import given, settings, strategies as st
from onnx import ModelProto, TensorProto, numpy_helper

from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import InvalidModel
from trtopt.graph.io import load_model, save_model
from trtopt.graph.lazy_weights import is_lazy, parse_light
from trtopt.graph.passes.fold import fold
from trtopt.graph.proto import LARGE, fingerprint, in_memory, to_array

ROWS = 512  # of the MatMul's weight: 1 MB


def network() -> ModelProto:
    """Two matrix products, their weights 1 and 0.5 MB, and a small one between."""
    weights = {"w": values(ROWS, 512), "b": values(512, seed=1), "w2": values(512, 256, seed=2)}
    nodes = [node("MatMul", "x w", "m"), node("Add", "m b", "a"), node("MatMul", "a w2", "y")]
    return model(nodes, inputs={"x": ["batch", ROWS]}, outputs={"y": ["batch", 256]}, weights=weights)


def lazy_names(proto: ModelProto) -> list[str]:
    return [tensor.name for tensor in proto.graph.initializer if is_lazy(tensor)]


@pytest.fixture(params=["inside", "beside"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    target = tmp_path / "net.onnx"
    save_model(network(), target, inline_limit=0 if request.param == "beside" else 1 << 30)
    if request.param == "beside":
        assert (tmp_path / "net.onnx.data").stat().st_size > 1 << 20
    return target


def test_a_lazy_model_is_the_same_model(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    eager, lazy = load_model(path.name), load_model(path.name, lazy=True)
    monkeypatch.chdir("/")
    assert lazy_names(lazy.proto) == ["w", "w2"] and lazy_names(eager.proto) == []
    assert lazy.proto.ByteSize() < LARGE
    assert (lazy.inputs, lazy.outputs, lazy.opset) == (eager.inputs, eager.outputs, eager.opset)
    assert lazy.fingerprint == eager.fingerprint == fingerprint(in_memory(lazy.proto))
    assert in_memory(lazy.proto) == eager.proto
    for one, other in zip(lazy.proto.graph.initializer, eager.proto.graph.initializer):
        np.testing.assert_array_equal(to_array(one), to_array(other))
    for limit in (0, 1 << 30):
        save_model(lazy.proto, tmp_path / "again.onnx", inline_limit=limit)
        assert load_model(tmp_path / "again.onnx").proto == eager.proto


def test_it_may_be_written_over_its_own_file(path: Path) -> None:
    before = load_model(path).proto
    save_model(load_model(path, lazy=True).proto, path)
    assert load_model(path).proto == before


def test_folding_gives_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, report = fold(load_model(path).proto)
    whole, same = fold(load_model(path, lazy=True).proto)  # too light to be worth leaving weights out
    assert whole == eager and same == report
    monkeypatch.setattr("trtopt.graph.passes.fold.HEAVY", 0)
    light, again = fold(load_model(path, lazy=True).proto)
    assert lazy_names(light) == ["w", "w2"]
    assert in_memory(light) == eager and again == report


def test_calibrating_gives_the_same(path: Path) -> None:
    data = np.random.default_rng(1).normal(size=(8, ROWS)).astype(np.float32)
    by_path = calibrate(path, data=data, cache=False, threads=1)
    by_model = calibrate(onnx.load(path), data=data, cache=False, threads=1)
    assert by_path.table.amax == by_model.table.amax
    assert by_path.table.model["fingerprint"] == by_model.table.model["fingerprint"]


@pytest.mark.parametrize("change", ["shorter", "touched", "gone"])
def test_a_file_that_changed_is_never_read(path: Path, change: str) -> None:
    lazy = load_model(path, lazy=True)
    file = path.with_name("net.onnx.data") if path.with_name("net.onnx.data").exists() else path
    if change == "shorter":
        os.truncate(file, file.stat().st_size - 10)
    elif change == "touched":
        os.utime(file, (1, 1))
    else:
        file.unlink()
    with pytest.raises(InvalidModel, match=rf"{file.name} was changed or moved while the model in it was being used"):
        fingerprint(lazy.proto)
    with pytest.raises(InvalidModel, match=rf"{file.name} was changed or moved"):
        save_model(lazy.proto, path.with_name("other.onnx"), inline_limit=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["raw", "typed"]),
            st.sampled_from(["float32", "float16", "int8", "int64", "bool"]),
            st.integers(0, 200),
        ),
        max_size=6,
    ),
    st.integers(0, 400),
)
def test_any_message_parses_to_the_same(tensors: list[tuple[str, str, int]], limit: int) -> None:
    proto = model([node("Identity", "x", "y")])
    proto.metadata_props.add(key="k" * 200, value="v" * 300)
    for index, (form, kind, size) in enumerate(tensors):
        array = (np.arange(size) % 2).astype(kind)
        made = numpy_helper.from_array(array, f"t{index}")
        if form == "typed" and kind in ("float32", "int64"):
            made.ClearField("raw_data")
            (made.float_data if kind == "float32" else made.int64_data).extend(array.tolist())
        made.doc_string = "d" * (index * 50)
        proto.graph.initializer.append(made)
    content = proto.SerializeToString()
    light, places = parse_light(io.BytesIO(content), len(content), limit)
    large = [index for index, item in enumerate(proto.graph.initializer) if len(item.raw_data) > limit]
    assert len(places) == len(large)
    for index, (offset, length) in zip(large, places):
        assert light.graph.initializer[index].raw_data == b""
        light.graph.initializer[index].raw_data = content[offset : offset + length]
    assert light == proto


def test_unusual_messages_are_read_all_the_same(tmp_path: Path) -> None:
    proto = network()
    content, path = proto.SerializeToString(), tmp_path / "net.onnx"
    path.write_bytes(content + ModelProto(graph=onnx.GraphProto(doc_string="more of it")).SerializeToString())
    merged = load_model(path, lazy=True).proto  # as protobuf merges the two
    assert merged.graph.doc_string == "more of it" and in_memory(merged).graph.initializer == proto.graph.initializer
    for cut in range(1, 100, 7):
        with pytest.raises((DecodeError, IndexError, ValueError)):
            parse_light(io.BytesIO(content[:-cut]), len(content) - cut, LARGE)
    with pytest.raises(ValueError, match="wire type 3"):  # a group
        parse_light(io.BytesIO(b"\x0b\x0c" + content), len(content) + 2, LARGE)
    tensor = proto.graph.initializer[0]
    other = TensorProto(raw_data=bytes(len(tensor.raw_data)))  # of two contents the last one counts
    for last in (tensor, other):
        first = other if last is tensor else tensor
        message = first.SerializeToString() + last.SerializeToString()
        rest = ModelProto.FromString(content)
        del rest.graph.initializer[0]
        graph = rest.graph.SerializeToString() + b"\x2a" + encoded(len(message)) + message
        rest.ClearField("graph")
        path.write_bytes(rest.SerializeToString() + b"\x3a" + encoded(len(graph)) + graph)
        weights = {item.name: item for item in in_memory(load_model(path, lazy=True).proto).graph.initializer}
        assert weights["w"].raw_data == last.raw_data


def encoded(value: int) -> bytes:
    """A number as protobuf writes it."""
    return bytes([value & 0x7F | 0x80]) + encoded(value >> 7) if value > 0x7F else bytes([value])


def test_a_weight_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    proto = network()
    proto.graph.initializer[0].dims[0] = 100
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModel, match=r"the weight 'w' of shape \[100, 512\], float32, needs 204800 bytes"):
        load_model(tmp_path / "net.onnx", lazy=True)


def test_a_reference_of_the_models_own_is_never_taken_for_one(tmp_path: Path) -> None:
    """Or a model could have any file of the machine read."""
    (tmp_path / "secret").write_bytes(b"s" * (512 * 512 * 4))
    proto = network()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=str(tmp_path / "secret"))
    for size in (0, 1 << 20):  # small files are parsed whole
        proto.doc_string = "d" * size
        (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(InvalidModel, match="bad external data reference"):
            load_model(tmp_path / "net.onnx", lazy=True)
    with pytest.raises(InvalidModel, match="stored outside the model"):
        load_model(proto, lazy=True)
