from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import points_of, quantized
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper
from onnx.parser import parse_model
from PIL import Image
from sklearn.datasets import load_digits
from world import Heard, crops, net

from trtopt.calibration import calibrator as module
from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import write_cache
from trtopt.core.errors import CalibrationError, DataError, OutputError, UsageError
from trtopt.data import open_data
from trtopt.data.samples import write_crops
from trtopt.evaluation.agreement import Agreement
from trtopt.evaluation.verify import verify
from trtopt.frontend.exporter import export
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import Points
from trtopt.ort.runner import OnnxRunner
from trtopt.recipes.loader import load_recipe

PRESET = "efficientnet-lite"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRTOPT_CACHE", str(folder))
    return folder


# --- EfficientNet-Lite0 with its real weights on real photos ---


@dataclass
class Lite0:
    path: Path
    folded: ModelProto
    points: Points
    table: Table

    def agreement(self, method: str) -> Agreement:
        photos = load_recipe("efficientnet-lite0").labelled_files()
        assert len(photos) == 20
        made = quantized(self.folded, self.points, self.table.with_method(method).amax)
        data = open_data(load_model(self.path).inputs, images=photos, preprocess=PRESET, batch=5, threads=2)
        return verify(self.folded, made, data, threads=2)


@pytest.fixture(scope="module")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lite0]:
    folder = tmp_path_factory.mktemp("lite0")
    path = folder / "lite0.onnx"
    export("efficientnet-lite0", path, verify=False)
    assert len(write_crops("imagenet-crops", folder / "crops")) == 64
    folded, _ = fold(load_model(path).proto)
    result = calibrate(path, images=folder / "crops", preprocess=PRESET, threads=2, cache=False)
    yield Lite0(path, folded, points_of(folded), result.table)


def test_entropy_does_what_tensorrts_own_does(lite0: Lite0) -> None:
    """TensorRT 8.6's EntropyCalibration2: 14.2 dB, 19 of 20 classes. Below 12.7 dB something is wrong; so is 16 and more."""
    found = lite0.agreement("entropy")
    assert 12.7 <= found.snr_db <= 16
    assert found.top1 is not None
    assert found.top1 >= 0.85


def test_auto_keeps_every_class_and_loses_nothing_to_minmax(lite0: Lite0) -> None:
    """ModelOpt on this model: 18.5 dB."""
    found = lite0.agreement("auto")
    assert found.snr_db >= 18.4
    assert found.top1 == 1.0
    assert found.snr_db >= lite0.agreement("minmax").snr_db
    assert len({entry.method for entry in lite0.table.tensors.values()}) > 1


# --- a small network on pieces of a photo ---


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for number, crop in enumerate(crops(12)):
        Image.fromarray(crop).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


def test_the_table_is_the_same_for_any_batch_and_order(photos: list[Path], tmp_path: Path) -> None:
    files = photos[:12]
    tables = []
    for listed, batch, threads in ((files, 8, 2), (files[::-1], 1, 1), (files[5:] + files[:5], 32, 2)):
        result = calibrate(net(), images=listed, preprocess=PRESET, batch=batch, threads=threads, cache=False)
        content = result.table.to_json()
        del content["seconds"]
        tables.append(content)
    assert tables[0] == tables[1] == tables[2]


def test_bad_images_are_left_out_and_counted(photos: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for file in photos[:3]:
        shutil.copy(file, folder)
    (folder / "text.jpg").write_text("not an image")
    reporter = Heard()
    result = calibrate(net(), images=folder, preprocess=PRESET, threads=2, reporter=reporter)
    assert (result.samples, [item.name for item in result.skipped]) == (3, ["text.jpg"])
    assert [item["name"] for item in result.to_json()["skipped"]] == ["text.jpg"]
    assert any("text.jpg" in item for item in reporter.warnings)
    assert any("only 3 samples" in item for item in reporter.warnings)
    assert result.notes == tuple(reporter.warnings)


# --- a small classifier of real digits ---


def digits_model(seed: int = 0) -> ModelProto:
    """Conv → Relu → Conv → Relu → Concat of both → Conv."""
    random = np.random.default_rng(seed)
    model = parse_model(
        """<ir_version: 8, opset_import: ["": 17]> digits (float[batch, 1, 8, 8] x) => (float[batch, 16, 8, 8] y) {
            [conv_a] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
            [relu_first] first = Relu (a)
            [conv_b] b = Conv <pads = [1, 1, 1, 1]> (first, w2)
            [relu_second] second = Relu (b)
            [concat] both = Concat <axis = 1> (first, second)
            [conv_y] y = Conv <pads = [1, 1, 1, 1]> (both, w3)
        }"""
    )
    shapes = {"w1": (16, 1, 3, 3), "w2": (16, 16, 3, 3), "w3": (16, 32, 3, 3)}
    for (name, shape), scale in zip(shapes.items(), (3, 3, 16)):
        array = (random.standard_normal(shape) / scale).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.fixture(scope="module")
def digits() -> NDArray[np.float32]:
    return np.asarray(load_digits().images[:, None] / 16, np.float32)


def test_the_result_tells_what_was_measured(digits: NDArray[np.float32], tmp_path: Path) -> None:
    output = tmp_path / "t.calib.json"
    result = calibrate(digits_model(), output, data={"x": digits}, method="mse", limit=100, threads=1)
    told = result.to_json()
    assert told["samples"] == result.samples == 100
    assert (told["method"], told["cached"], told["skipped"], told["notes"]) == ("mse", False, [], [])
    assert told["table"] == str(output) == str(result.path)
    assert set(told["tensors"]) == {"x", "first", "second", "both"}
    assert all(entry["method"] == "mse" and entry["amax"] > 0 for entry in told["tensors"].values())
    assert Table.load(output).to_json() == result.table.to_json()
    assert result.table.data["kind"] == "arrays"
    assert result.table.preprocess is None


def test_inputs_of_a_concat_share_their_scale(digits: NDArray[np.float32]) -> None:
    table = calibrate(digits_model(), data={"x": digits[:64]}, threads=1).table
    assert [set(group) for group in table.groups] == [{"first", "second", "both"}]
    assert table.amax["first"] == table.amax["second"] == table.amax["both"]
    histograms = [table.tensors[name].histogram for name in ("first", "second")]
    assert histograms[0] is not None
    assert histograms[1] is not None
    assert histograms[0].absmax != histograms[1].absmax


def test_a_second_method_reads_no_data(
    digits: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    first = calibrate(digits_model(), data={"x": digits[:64]}, method="minmax", threads=1)
    assert not first.cached

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the data was read again")

    monkeypatch.setattr(module, "observe", refuse)
    again = calibrate(digits_model(), data={"x": digits[:64]}, method="entropy", batch=3, threads=2)
    assert again.cached
    assert again.table.method == "entropy"
    assert again.table.amax == first.table.with_method("entropy").amax
    shuffled = calibrate(digits_model(), data={"x": digits[:64][::-1]}, method="minmax", threads=1)
    assert shuffled.table.digest == first.table.digest
    for other in (
        lambda: calibrate(digits_model(1), data={"x": digits[:64]}, threads=1),
        lambda: calibrate(digits_model(), data={"x": digits[:65]}, threads=1),
        lambda: calibrate(digits_model(), data={"x": digits[:64]}, threads=1, precision_override=["conv_y=fp32"]),
        lambda: calibrate(digits_model(), data={"x": digits[:64]}, threads=1, cache=False),
    ):
        with pytest.raises(AssertionError, match="read again"):
            other()
    assert len(list(own_cache.rglob("*.calib.json"))) == 1


def test_another_method_comes_from_a_saved_table_without_data(digits: NDArray[np.float32], tmp_path: Path) -> None:
    calibrate(
        digits_model(), tmp_path / "first.calib.json", data={"x": digits[:64]}, method="minmax", threads=1, cache=False
    )
    for method in ("entropy", "mse"):
        again = calibrate(
            digits_model(), tmp_path / f"{method}.calib.json", calib=tmp_path / "first.calib.json", method=method
        )
        direct = calibrate(digits_model(), data={"x": digits[:64]}, method=method, threads=1, cache=False)
        assert Table.load(tmp_path / f"{method}.calib.json").to_json() == again.table.to_json()
        assert (again.table.amax, again.table.method) == (direct.table.amax, method)
        assert again.samples == direct.samples and again.cached


def test_a_saved_table_serves_its_own_model_only(digits: NDArray[np.float32], tmp_path: Path) -> None:
    first = calibrate(
        digits_model(), data={"x": digits[:64]}, threads=1, cache=False, precision_override=["conv_y=fp32"]
    ).table
    assert set(first.tensors) == {"x", "first"}  # what conv_y alone reads isn't measured
    with pytest.raises(CalibrationError, match="not of these weights"):
        calibrate(digits_model(1), calib=first)
    with pytest.raises(CalibrationError, match="`precision_override="):
        calibrate(digits_model(), calib=first)
    with pytest.raises(UsageError, match="drop `data=`"):
        calibrate(digits_model(), calib=first, data={"x": digits[:64]})
    with pytest.raises(UsageError, match="drop `calib=`"):
        calibrate(digits_model(), calib=first, import_cache=write_cache({"x": 1.0}, tmp_path / "old.cache"))
    with pytest.raises(UsageError, match="give it as `import_cache="):
        calibrate(digits_model(), calib=tmp_path / "old.cache")


def test_a_damaged_cache_is_measured_again(digits: NDArray[np.float32], own_cache: Path) -> None:
    first = calibrate(digits_model(), data={"x": digits[:64]}, threads=1)
    (kept,) = own_cache.rglob("*.calib.json")
    kept.write_bytes(kept.read_bytes()[:500])
    reporter = Heard()
    again = calibrate(digits_model(), data={"x": digits[:64]}, threads=1, reporter=reporter)
    assert not again.cached
    assert any("read again" in item for item in reporter.notes)
    assert again.table.digest == first.table.digest
    assert calibrate(digits_model(), data={"x": digits[:64]}, threads=1).cached


def test_a_quantized_model_and_one_without_layers_are_refused(digits: NDArray[np.float32]) -> None:
    folded, _ = fold(digits_model())
    points = points_of(folded)
    made = quantized(folded, points, dict.fromkeys(points.activations, 1.0))
    with pytest.raises(CalibrationError, match="already holds Q/DQ"):
        calibrate(made, data={"x": digits}, threads=1)
    dynamic = digits_model()
    dynamic.graph.node.insert(
        0, helper.make_node("DynamicQuantizeLSTM", ["x"], ["states"], "steps", domain="com.microsoft")
    )
    dynamic.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(CalibrationError, match=r"quantized already.*DynamicQuantizeLSTM.*give the float model"):
        calibrate(dynamic, data={"x": digits}, threads=1)
    with pytest.raises(CalibrationError, match=r"nothing to quantize.*`precision_override=` asks for fp32"):
        calibrate(digits_model(), data={"x": digits}, threads=1, precision_override=["Conv=fp32"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "max"}, "`method=` is 'max'; allowed"),
        ({"threads": 0}, "`threads=` is 0"),
        ({"batch": 0}, "`batch=` is 0"),
        ({"precision_override": ["conv"]}, "`precision_override=` 'conv'"),
        ({"data": None}, "`threads=` has no effect without `images="),
    ],
)
def test_bad_arguments_are_refused(digits: NDArray[np.float32], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        calibrate(digits_model(), **{"data": {"x": digits}, "threads": 1} | arguments)
    assert message in str(caught.value)


def test_bad_data_and_places_leave_nothing(
    digits: NDArray[np.float32], tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "t.calib.json"
    spoiled = digits[:64].copy()
    spoiled[3, 0, 2, 2] = np.nan
    with pytest.raises(DataError, match="sample 3"):
        calibrate(digits_model(), output, data={"x": spoiled}, threads=1)
    with pytest.raises(DataError, match="no samples"):
        calibrate(digits_model(), output, data={"x": digits[:0]}, threads=1)
    with pytest.raises(CalibrationError, match=r"'x'.* was 0.5 everywhere"):
        calibrate(
            digits_model(), output, data={"x": np.full_like(digits[:64], 0.5)}, threads=1, allow_unusual_data=True
        )
    with pytest.raises(OutputError, match="doesn't exist"):
        calibrate(digits_model(), tmp_path / "absent" / "t.calib.json", data={"x": digits}, threads=1)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(digits_model(), output, data={"x": digits}, threads=1)
    assert not output.exists()
    assert not list(own_cache.rglob("*.json"))
    assert not list(tmp_path.glob(".*"))


def _steps_first(folder: Path, batch: int | str) -> Path:
    """An LSTM on steps × samples × values, and a layer of weights behind it."""
    model = parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> steps
        (float[{"T" if batch == "N" else 9}, {batch}, 16] x, float[1, {batch}, 32] h0) => (float[T, N, 32] y, float[1, N, 32] h)
        <int64[1] one = {{1}}> {{
            [lstm] s, h = LSTM <hidden_size = 32> (x, w, r, , , h0)
            [squeeze] q = Squeeze (s, one)
            [head] y = MatMul (q, m)
        }}"""
    )
    rng = np.random.default_rng(3)
    for name, shape in {"w": (1, 128, 16), "r": (1, 128, 32), "m": (32, 32)}.items():
        array = rng.standard_normal(shape).astype(np.float32) / 4
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    save_model(model, folder / f"steps{batch}.onnx")
    return folder / f"steps{batch}.onnx"


@pytest.mark.parametrize("batch", ["N", 3])
def test_steps_of_a_recurrent_layer_are_no_samples(tmp_path: Path, batch: int | str) -> None:
    """Its state is carried through all steps of each sample: what is counted is what one run of the whole gives."""
    path, rng = _steps_first(tmp_path, batch), np.random.default_rng(4)
    x = rng.standard_normal((9, 12, 16)).astype(np.float32).cumsum(0)
    h0 = rng.standard_normal((1, 12, 32)).astype(np.float32)
    runner = OnnxRunner(_cut_at(path, "q"), optimize=True)
    if batch == "N":
        given, samples, largest = {"x": x, "h0": h0}, 12, np.abs(runner({"x": x, "h0": h0})["q"]).max()
    else:  # three sequences are one sample
        parts = [{"x": x[:, at : at + 3], "h0": h0[:, at : at + 3]} for at in range(0, 12, 3)]
        given, samples = {name: np.stack([part[name] for part in parts]) for name in ("x", "h0")}, 4
        largest = max(np.abs(runner(part)["q"]).max() for part in parts)
    heard = Heard()
    found = calibrate(path, data=given, cache=False, repair=True, reporter=heard).table
    assert found.samples == samples
    assert found.tensors["q"].histogram is not None
    assert found.tensors["q"].histogram.absmax == pytest.approx(largest, rel=1e-5)
    said = {"N": "samples are counted on axis 1 of x (T, N, 16), axis 1 of h0 (1, N, 32); 12 are read"}
    assert said.get(str(batch), "is one sample as a whole") in " ".join(heard.notes)
    agreement = verify(path, path, given)
    assert (agreement.samples, agreement.snr_db > 100) == (samples, True)
    assert {output.name: output.rows for output in agreement.outputs} == {"y": samples, "h": samples}


def _cut_at(path: Path, name: str) -> ModelProto:
    proto = load_model(path).proto
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_empty_tensor_value_info(name))
    return proto


def test_a_table_says_what_may_be_missing_behind_a_plugin() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1])]
    nodes.append(helper.make_node("MyOp", ["c"], ["y"], "mine", domain="com.acme"))
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32), "w")
    ends = [helper.make_tensor_value_info("x", 1, ["n", 16, 8, 8])], [helper.make_tensor_value_info("y", 1, None)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.acme", 1)]
    proto = helper.make_model(helper.make_graph(nodes, "g", *ends, [weight]), opset_imports=opsets, ir_version=8)
    reporter = Heard()
    data = {"x": np.random.default_rng(1).standard_normal((40, 16, 8, 8)).astype(np.float32)}
    assert [*calibrate(proto, data=data, cache=False, reporter=reporter).table.tensors] == ["x"]
    assert any("what comes after MyOp of com.acme may be missing" in item for item in reporter.warnings)
