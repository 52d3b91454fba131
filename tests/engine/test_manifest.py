"""The precision summary, lost precision, and a manifest that doesn't fit its plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from graphs import written
from manifests import made

import trtopt
from trtopt.cli.inspection import engine_lines
from trtopt.core.errors import EngineError, EngineMismatch, UsageError
from trtopt.core.values import Kept, LayerInfo, Precision
from trtopt.engine.inspection import inspect
from trtopt.engine.manifest import (
    arithmetic,
    load_manifest,
    lost_precision,
    manifest_path,
    precision_summary,
)

INT8, FP16, FP32 = Precision.INT8, Precision.FP16, Precision.FP32


def _layer(kind: str, precision: Precision, *nodes: str) -> LayerInfo:
    return LayerInfo("+".join(nodes) or kind, kind, precision, nodes)


def test_the_summary_counts_what_does_the_arithmetic_and_names_the_exceptions() -> None:
    layers = [_layer("convolution", INT8)] * 3 + [_layer("matmul", FP16), _layer("other", FP32)]
    counts, summary = precision_summary(layers, [Kept("fc", "Gemm", FP16, "one row")])
    assert counts == {"int8": 3, "fp16": 1, "fp32": 0, "total": 4}
    assert (
        summary
        == "3 of 3 convolutions INT8; 1 of 1 matrix products FP16; 1 node kept in higher precision (fc): one row"
    )


def test_mixed_kinds_and_many_reasons_stay_one_line() -> None:
    layers = [_layer("convolution", INT8), _layer("convolution", FP16), _layer("deconvolution", FP16)]
    kept = [Kept(f"n{index}", "Conv", FP16, f"reason {index}") for index in range(5)]
    _, summary = precision_summary(layers, kept)
    assert summary.startswith(
        "1 of 2 convolutions INT8, 1 of 2 FP16; 1 of 1 deconvolutions FP16; 1 node kept in higher precision (n0): reason 0"
    )
    assert summary.endswith("2 more reasons in the manifest")
    assert precision_summary(layers, kept[:4])[1].endswith("; 1 more reason in the manifest")


def test_layers_that_can_not_be_read_are_said_to_be_unknown() -> None:
    counts, summary = precision_summary((), (), "no GPU")
    assert "can't be read: no GPU" in summary
    assert counts == {"int8": 0, "fp16": 0, "fp32": 0, "total": 0}


def test_a_node_is_lost_only_if_none_of_its_layers_has_the_precision() -> None:
    layers = [
        _layer("convolution", INT8, "a"),
        _layer("convolution", FP16, "b", "c"),
        _layer("convolution", INT8, "c"),
        _layer("other", FP32, "d"),
    ]
    assert lost_precision(layers, dict.fromkeys("abcde", INT8)) == {"b": FP16}


def test_a_plan_that_is_not_the_manifests_is_refused_with_both_digests(tmp_path: Path) -> None:
    engine = made(tmp_path / "net.engine", plan={"sha256": "a" * 64, "bytes": 1})
    with pytest.raises(EngineMismatch, match=r"sha256 [0-9a-f]{16}….*aaaaaaaaaaaaaaaa…"):
        inspect(engine)


def test_a_table_in_an_engines_place_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "net.calib.json"
    path.write_text('{"format": "trtopt.calib/1"}')
    with pytest.raises(EngineError, match=r"is a calibration table, .*`calib='.*net\.calib\.json'`"):
        inspect(path)


def test_a_manifest_of_another_format_or_damaged_is_said_to_be_so(tmp_path: Path) -> None:
    engine = tmp_path / "net.engine"
    engine.write_bytes(b"vtrt" + bytes(200))
    path = manifest_path(engine)
    assert load_manifest(engine) is None
    for content, said in (("{", "can't be read"), ('{"format": "other/9"}', "other/9"), ("[]", "format None")):
        path.write_text(content)
        with pytest.raises(EngineError, match=said):
            load_manifest(engine)
    path.write_text(json.dumps({"format": "trtopt.engine/1"}))
    with pytest.raises(EngineError, match="incomplete"):
        load_manifest(engine)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello", "its header isn't one"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "Git LFS.*: git lfs pull$",
        ),
    ],
)
def test_files_that_are_no_plans_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.engine").write_bytes(content)
    with pytest.raises(EngineError, match=f"isn't a TensorRT plan: .*{said}"):
        inspect(tmp_path / "m.engine")
    with pytest.raises(UsageError, match="doesn't exist"):
        inspect(tmp_path / "absent.engine")


def test_the_command_for_ultralytics_files_works(tmp_path: Path) -> None:
    (tmp_path / "m.engine").write_bytes((2).to_bytes(4, "little") + b"{}vtrt")
    with pytest.raises(EngineError, match="Ultralytics") as caught:
        inspect(tmp_path / "m.engine")
    subprocess.run(str(caught.value).partition(" before it: ")[2], shell=True, check=True)
    assert (tmp_path / "m.plan.engine").read_bytes() == b"vtrt"


def test_a_plan_that_nobody_vouches_for_is_described_without_loading_it(tmp_path: Path) -> None:
    plan = bytearray(b"ftrt" + bytes(200))
    plan[24:28] = bytes([8, 6, 1, 6])
    (tmp_path / "net.engine").write_bytes(plan)
    report = inspect(tmp_path / "net.engine")
    assert report.maker == "TensorRT 8.6.1.6" and not report.layers
    assert "no manifest" in report.notes[0] and "its layers aren't read" in report.notes[0]


def test_where_the_arithmetic_runs_is_said_where_it_differs() -> None:
    assert arithmetic({"fp16": 0.0434, "int8": 0.9566}) == "of the arithmetic, 95.7% INT8, 4.3% FP16"
    assert arithmetic({"fp16": 0.0005, "int8": 0.9995}) == "of the arithmetic, 99.9% INT8, 0.1% FP16"
    assert arithmetic({"fp16": 0.0003, "int8": 0.9997}) == "of the arithmetic, 99.97% INT8, 0.03% FP16"
    assert arithmetic({"fp16": 0.000002, "int8": 0.999998}) == "of the arithmetic, 99.9998% INT8, 0.0002% FP16"
    thirds = arithmetic(dict.fromkeys(("int8", "fp16", "fp32"), 1 / 3))
    assert thirds == "of the arithmetic, 33.4% INT8, 33.3% FP16, 33.3% FP32"  # which is 100
    assert arithmetic({"int8": 1.0}) == ""
    assert arithmetic({}) == ""


def test_inspect_says_types_as_the_plan_has_them(tmp_path: Path, rtx: None) -> None:
    proto = written(
        "(float[n, 8] x, int64[n, 8] at) => (float[n, 8] y) { a = GatherElements <axis = 1> (x, at) y = Relu (a) }"
    )
    trtopt.build(proto, tmp_path / "m.engine", fp16=True, fp32_io=False, target="sm89")
    lines = [line.strip() for line in engine_lines(inspect(tmp_path / "m.engine"))]
    assert [line for line in lines if "put " in line] == [
        "input x: float16 nx8", "input at: int64 nx8", "output y: float16 nx8, other",
    ]  # fmt: skip
