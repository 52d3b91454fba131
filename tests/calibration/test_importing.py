"""Old TensorRT caches made tables: names, numbering, propagation, what is missing, and engines built without data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from graphs import points_of
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.parser import parse_model
from typer.testing import CliRunner

import trtopt
from trtopt import cli
from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.importing import import_table, kept_out, without_scales
from trtopt.calibration.observe import observe
from trtopt.calibration.prepared import floating, prepare
from trtopt.calibration.text_cache import read_cache, write_cache
from trtopt.core.errors import CalibrationError, UsageError
from trtopt.core.progress import StreamReporter
from trtopt.core.values import Precision
from trtopt.data import open_data
from trtopt.engine.manifest import load_manifest
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import Points
from trtopt.graph.view import to_ir
from trtopt.recipes.loader import package_file

DETECTOR = "package:rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx"
LETTERBOX = {"preset": "imagenet", "resize": "letterbox", "size": [320, 320]}


class Case:
    """A model as given, folded, and the largest magnitude of every floating tensor of the model as given."""

    def __init__(self, model: Path, crops: Path, preprocess: Any) -> None:
        self.path, self.given = model, load_model(model)
        self.folded, _ = fold(self.given.proto)
        self.points: Points = points_of(self.folded)
        images = sorted(crops.glob("*.*g"))[:4]
        data = open_data(self.given.inputs, images=images, preprocess=preprocess, batch=2, threads=2)
        self.batches = list(data)
        names = floating(to_ir(self.given.proto))
        seen = observe(self.given.proto, names, self.batches, threads=2, shard=True)
        self.amax = {name: item.absmax for name, item in seen.histograms.items() if item.absmax > 0}

    def cache(self, folder: Path, amax: Mapping[str, float] | None = None, header: str = "") -> Path:
        path = write_cache(self.amax if amax is None else amax, folder / "old.cache")
        if header:
            path.write_text(path.read_text().replace("TRT-8600-EntropyCalibration2", header))
        return path


@pytest.fixture(scope="module")
def lite0(exported: Callable[[str], Path], crops: Path) -> Case:
    return Case(exported("efficientnet-lite0"), crops, "efficientnet-lite")


@pytest.fixture(scope="module")
def detector(crops: Path) -> Case:
    """With BatchNormalizations, and a Concat of Resizes whose inputs share one scale."""
    case = Case(package_file(DETECTOR), crops, LETTERBOX)
    assert case.points.groups
    assert any(node.op_type == "BatchNormalization" for node in case.given.proto.graph.node)
    return case


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "kept"))


# Names


def test_folding_keeps_names_with_their_values(lite0: Case, detector: Case) -> None:
    """The ground of importing: of a fused convolution and BatchNormalization the name of the latter lives on."""
    for case in (lite0, detector):
        names = [name for name in floating(to_ir(case.folded)) if name not in {item.name for item in case.given.inputs}]
        assert set(names) <= {name for node in case.given.proto.graph.node for name in node.output}
        before, after = (_run(model, names, case.batches[0]) for model in (case.given.proto, case.folded))
        for name, one, other in zip(names, before, after):
            np.testing.assert_allclose(other, one, rtol=1e-2, atol=1e-6 + 2e-4 * float(np.abs(one).max()), err_msg=name)


def _run(proto: ModelProto, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    every = ModelProto()
    every.CopyFrom(proto)
    del every.graph.output[:]
    every.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(every.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[NDArray[Any]] = session.run(list(names), {name: value[:1] for name, value in feed.items()})
    return outputs


@pytest.mark.parametrize("header", ["TRT-7103-EntropyCalibration2", "TRT-8600-MinMaxCalibration"])
def test_a_cache_of_every_tensor_covers_what_is_needed(detector: Case, tmp_path: Path, header: str) -> None:
    result = calibrate(detector.path, tmp_path / "t.json", import_cache=detector.cache(tmp_path, header=header))
    assert result.coverage is not None
    assert result.coverage.exact == detector.points.activations
    assert result.coverage.missing == result.coverage.strange == ()
    (group,) = detector.points.groups
    shared = max(detector.amax[name] for name in group)
    for name, amax in result.table.amax.items():
        assert amax == pytest.approx(shared if name in group else detector.amax[name], rel=1e-6), name
    assert result.table.method == f"imported from {header}"
    assert trtopt.Table.load(tmp_path / "t.json").digest == result.table.digest


def test_scale_preserving_operators_stand_in_for_each_other(detector: Case, tmp_path: Path) -> None:
    resized = {name for node in detector.folded.graph.node if node.op_type == "Resize" for name in node.output}
    needed = resized & set(detector.points.activations)
    assert len(needed) >= 3
    without = {name: amax for name, amax in detector.amax.items() if name not in resized}
    result = calibrate(detector.path, import_cache=detector.cache(tmp_path, without))
    assert result.coverage is not None
    assert set(result.coverage.propagated) == needed
    full = calibrate(detector.path, import_cache=detector.cache(tmp_path))
    assert result.table.amax == full.table.amax


def _small() -> ModelProto:
    """Conv → Dropout → two equal Relus → Identity → Conv: folding leaves Conv → Relu → Conv."""
    model = parse_model(
        """<ir_version: 8, opset_import: ["": 17]> small (float[1, 16, 16, 16] x) => (float[1, 16, 14, 14] y) {
            [conv1] c = Conv <pads = [1, 1, 1, 1]> (x, w)
            [drop] d = Dropout (c)
            [relu1] r = Relu (d)
            [relu2] twin = Relu (d)
            [same] i = Identity (r)
            [conv2] e = Conv (i, w)
            [conv3] f = Conv (twin, w)
            [add] y = Add (e, f)
        }"""
    )
    weight = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def test_names_that_folding_removed_still_count(tmp_path: Path) -> None:
    given = _small()
    prepared = prepare(load_model(given))
    names = {name for node in prepared.proto.graph.node for name in node.output}
    needed = prepared.tensors
    assert "i" not in names
    cache = read_cache(write_cache({"x": 1.0, "i": 2.5, "f": 9.0, "e": 9.0}, tmp_path / "c"))
    table, coverage = import_table(cache, given, prepared)
    (relu,) = (name for name in needed if name in ("r", "twin", "i"))
    assert coverage.folding == (relu,)
    assert table.amax[relu] == pytest.approx(2.5, rel=1e-6)


# What is missing


def test_missing_tensors_are_named_with_what_to_type(lite0: Case, tmp_path: Path) -> None:
    gone = lite0.points.activations[5]
    ((reader, _), *_) = lite0.points.reads[gone]
    few = {name: amax for name, amax in lite0.amax.items() if name != gone} | {"foreign": 1.0}
    with pytest.raises(CalibrationError) as caught:
        calibrate(lite0.path, tmp_path / "t.json", import_cache=lite0.cache(tmp_path, few))
    for part in (
        f"1 of the {len(lite0.points.activations)} tensors",
        gone,
        reader,
        "--missing float",
        "foreign",
        "`images=",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "t.json").exists()
    # And what it says to type works.
    result = calibrate(lite0.path, import_cache=lite0.cache(tmp_path, few), precision_override=[f"{reader}=fp16"])
    assert result.coverage is not None
    assert gone not in result.table.tensors


def test_layers_without_scales_stay_in_floating_point(lite0: Case, tmp_path: Path, rtx: None) -> None:
    gone = lite0.points.activations[5]
    readers = {node for node, _ in lite0.points.reads[gone]}
    cache = lite0.cache(tmp_path, {name: amax for name, amax in lite0.amax.items() if name != gone})
    result = calibrate(lite0.path, tmp_path / "t.json", import_cache=cache, missing="float")
    assert result.coverage is not None
    assert result.coverage.missing == (gone,)
    assert set(result.coverage.unquantized) == readers
    built = trtopt.build(lite0.path, tmp_path / "e.engine", int8=True, calib=tmp_path / "t.json", target="sm89")
    heavy = readers & {node.name for node in lite0.folded.graph.node if node.op_type in ("Conv", "Gemm")}
    assert built.precision["int8"] == 50 - len(heavy)
    assert {item.node for item in built.kept} >= heavy
    assert all("imported calibration cache" in item.reason for item in built.kept if item.node in heavy)


def test_a_cache_of_another_model_is_refused(lite0: Case, tmp_path: Path) -> None:
    foreign = write_cache({"a": 1.0, "b": 2.0}, tmp_path / "foreign.cache")
    with pytest.raises(CalibrationError, match="another model: 2 of the 2 tensors that it names"):
        calibrate(lite0.path, import_cache=foreign)
    with pytest.raises(CalibrationError, match="no INT8 layer at all"):
        calibrate(lite0.path, import_cache=foreign, missing="float")


def test_a_cache_that_names_much_else_is_told_even_if_it_covers_all(
    lite0: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names such as `relu_1` fit many models: a deeper one of the same make has all that are needed."""
    more = {f"deeper_{number}": 1.0 for number in range(len(lite0.amax))}
    result = calibrate(lite0.path, import_cache=lite0.cache(tmp_path, lite0.amax | more), reporter=StreamReporter())
    assert result.coverage is not None and not result.coverage.missing
    assert f"{len(more)} of the {2 * len(more)} tensors that it names aren't in this one" in capsys.readouterr().err
    assert "seems to be of another model" in result.to_json()["coverage"]["foreign"]
    own = calibrate(lite0.path, import_cache=lite0.cache(tmp_path))
    assert own.coverage is not None and not own.coverage.foreign


def test_a_node_with_the_name_of_an_operator_takes_no_others_along(tmp_path: Path) -> None:
    given = _small()
    given.graph.node[5].name = "Conv"
    prepared = prepare(load_model(given))
    cache = read_cache(write_cache({"x": 1.0}, tmp_path / "c"))
    table, coverage = import_table(cache, given, prepared, missing="float")
    assert "Conv" in coverage.unquantized
    assert set(table.amax) == {"x"}  # conv1 stays
    assert all("*" not in item.pattern for item in kept_out(without_scales(table), Precision.FP16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": "photos", "limit": 3}, "drop `images=`, `limit=`"),
        ({"method": "mse"}, "drop `method=`"),
        ({"missing": "fp16"}, "`missing=` is 'fp16'; allowed: error, float"),
    ],
)
def test_what_does_not_go_together_is_refused(
    lite0: Case, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate(lite0.path, import_cache=lite0.cache(tmp_path), **options)


# Engines without data


@pytest.mark.parametrize("as_table", [True, False])
def test_lite0_builds_from_an_old_cache_alone(lite0: Case, tmp_path: Path, as_table: bool, rtx: None) -> None:
    calib = lite0.cache(tmp_path, header="TRT-7103-EntropyCalibration2")
    if as_table:
        calibrate(lite0.path, tmp_path / "t.json", import_cache=calib, preprocess="efficientnet-lite")
        calib = tmp_path / "t.json"
    result = trtopt.build(lite0.path, tmp_path / "e.engine", int8=True, calib=calib, target="sm89")
    assert result.precision_summary == "49 of 49 convolutions INT8; 1 of 1 matrix products INT8"
    manifest = load_manifest(result.engine)
    assert manifest is not None
    assert manifest.calibration is not None
    assert manifest.calibration["method"] == "imported from TRT-7103-EntropyCalibration2"
    assert (manifest.preprocess is not None) == as_table
    assert trtopt.build(lite0.path, result.engine, int8=True, calib=calib, target="sm89").cached


# The command line


def test_the_command_prints_the_coverage(lite0: Case, tmp_path: Path) -> None:
    arguments = ["calibrate", str(lite0.path), "--import-cache", str(lite0.cache(tmp_path)), "-o", str(tmp_path / "t")]
    said = CliRunner().invoke(cli.app, arguments)
    assert said.exit_code == 0, said.output
    assert "TRT-8600-EntropyCalibration2" in said.output
    assert "51 tensors (51 exact)" in said.output
    found = CliRunner().invoke(cli.app, [*arguments, "--json"])
    coverage = json.loads(found.stdout)["coverage"]
    assert len(coverage["exact"]) == coverage["needed"] == 51
    assert coverage["missing"] == []
    assert coverage["entries"] > 51
