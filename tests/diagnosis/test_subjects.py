"""Plans and models held against a host: what is wrong is found before anything is deserialized."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from seeding import commands, diagnose

import trtopt
from trtopt.core.errors import UsageError
from trtopt.diagnosis import report as reports, subjects
from trtopt.diagnosis.host import Host, examine
from trtopt.diagnosis.probes import Answer
from trtopt.engine.manifest import Manifest


def plan(product: str = "ftrt", version: tuple[int, ...] = (10, 16, 1, 11), targets: int = 0, size: int = 256) -> bytes:
    header = (
        product.encode() + bytes(12) + struct.pack("<Q", size) + bytes(version) + bytes(4) + struct.pack("<Q", targets)
    )
    return header.ljust(size, b"\0")


RTX = {"product": "vtrt", "version": (1, 7, 1, 116)}


@pytest.fixture(scope="module")
def here() -> Host:
    return examine()


@pytest.fixture
def on(here: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let doctor see a host with these GPUs (compute capabilities) and versions of TensorRT."""

    def see(*gpus: int, **versions: str) -> None:
        devices = [{"name": f"GPU of sm{sm}", "compute_capability": sm, "memory": 16 << 30} for sm in gpus]
        answers = {"gpu": Answer({"devices": devices, "driver": [13, 0], "reason": ""})}
        answers |= {module: Answer({"version": version}) for module, version in versions.items()}
        host = dataclasses.replace(here, answers=answers)
        monkeypatch.setattr(reports, "examine", lambda output: host)
        monkeypatch.setattr(reports, "findings", lambda host: ())

    return see


def found(path: Path) -> dict[str, str]:
    return {item.code: item.command for item in trtopt.doctor(path).findings}


def alone(path: Path) -> dict[str, str]:
    """What is said of a plan that no manifest describes."""
    return {"plan-without-manifest": f"trtopt run {path} --trust --input X.npy"}


def with_manifest(path: Path, **changes: Any) -> None:
    manifest = Manifest(
        generation={"family": "tensorrt10", "product": "TensorRT", "version": "10.16.1.11", "gpu": None},
        targets=[],
        spec={"precision": "int8"},
        precision={},
        precision_summary="no convolution",
        layers=[],
        kept=[],
        inputs=[],
        outputs=[],
        profiles=[{"x": "1x3,8x3,32x3"}],
        source={"path": "net.onnx", "sha256": "0" * 64},
        plan={"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size},
        key="",
        seconds=1.0,
        trtopt="0",
        calibration={"method": "entropy", "samples": 8},
        compute_capabilities=[89],
    )
    dataclasses.replace(manifest, **changes).save(path)


def test_a_plan_that_fits(tmp_path: Path, on: Callable[..., None]) -> None:
    on(89, tensorrt="10.16.1.11", tensorrt_rtx="1.7.1.116")
    path = tmp_path / "m.engine"
    path.write_bytes(plan())
    assert found(path) == alone(path)
    with_manifest(path)
    assert found(path) == {}
    assert trtopt.doctor(path).facts["built for"] == "sm89"
    path = tmp_path / "r.engine"
    path.write_bytes(plan(**RTX, targets=0b001000))
    assert found(path) == alone(path)
    assert trtopt.doctor(path).facts["built for"] == "sm89"


def test_a_plan_of_another_version(tmp_path: Path, on: Callable[..., None]) -> None:
    on(89, tensorrt="10.16.1.11", tensorrt_rtx="1.7.1.116")
    path = tmp_path / "m.engine"
    path.write_bytes(plan(version=(8, 6, 1, 6)))
    assert found(path) == {**alone(path), "plan-of-other-version": "pip install 'tensorrt==8.6.1.*'"}
    with_manifest(path)
    rebuild = "trtopt build net.onnx --int8 --calib TABLE.calib.json --shapes x:1x3,8x3,32x3 -o "
    assert found(path) == {"plan-of-other-version": f"{rebuild}{path}"}
    with_manifest(path, spec={"precision": "int8", "version_compatible": True})
    assert set(found(path)) == {"plan-of-older-version"}
    assert trtopt.doctor(path).ok
    on(89, tensorrt="11.4.0.106")  # 8 → 11 isn't crossed
    assert set(found(path)) == {"plan-of-other-version"}
    (tmp_path / "m.engine.json").unlink()
    path.write_bytes(plan(version=(8, 6, 1, 6)))
    [finding, _] = trtopt.doctor(path).findings
    assert finding.consequence.endswith("runs on TensorRT 8.6.1.6, unless built to be version-compatible")
    path.write_bytes(plan(version=(8, 6, 1, 6)) + b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\x3e\0" + bytes(64))
    [finding, _] = trtopt.doctor(path).findings  # it carries the lean runtime: so it was
    assert "later 8.x and 10.x (not 11)" in finding.consequence and "unless" not in finding.consequence
    path.write_bytes(plan(product="vtrt", version=(1, 5, 0, 1), targets=0b001000))
    on(89, tensorrt="10.16.1.11", tensorrt_rtx="1.7.1.116")
    assert found(path) == {**alone(path), "plan-of-other-version": "pip install 'tensorrt-rtx==1.5.0.*'"}


def test_a_plan_whose_runtime_isnt_here(tmp_path: Path, on: Callable[..., None]) -> None:
    on(tensorrt_rtx="1.7.1.116")
    path = tmp_path / "m.engine"
    path.write_bytes(plan())
    assert found(path) == {**alone(path), "plan-without-runtime": "pip install 'tensorrt==10.16.1.*'"}


def test_a_plan_of_another_gpu(tmp_path: Path, on: Callable[..., None]) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(plan())
    with_manifest(path)
    on(90, tensorrt="10.16.1.11")
    assert found(path)["plan-of-other-gpu"].startswith("trtopt build net.onnx")
    on(89, 90, tensorrt="10.16.1.11")
    [only] = [item for item in trtopt.doctor(path).findings if item.code == "plan-of-other-gpu"]
    assert only.level == "warning"
    with_manifest(path, spec={"precision": "int8", "hardware_compatibility": "ampere_plus"})
    assert found(path) == {}
    path = tmp_path / "r.engine"
    path.write_bytes(plan(**RTX, targets=0b011000))
    on(86, tensorrt_rtx="1.7.1.116")
    assert found(path)["plan-of-other-gpu"] == f"trtopt build --target sm86 MODEL.onnx -o {path}"


def test_files_that_are_no_plans(tmp_path: Path, on: Callable[..., None], here: Host) -> None:
    on(tensorrt_rtx="1.7.1.116")
    path = tmp_path / "m.engine"
    metadata = json.dumps({"description": "Ultralytics YOLO11n model"}).encode()
    path.write_bytes(len(metadata).to_bytes(4, "little") + metadata + plan(**RTX))
    copy = tmp_path / "m.plan.engine"
    command = found(path)["ultralytics-prefix"]
    assert command == f"tail -c +{len(metadata) + 5} {path} > {copy}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert found(path)["lfs-pointer"] == "git lfs install && git lfs pull --include m.engine"
    onnx.save(model(), path)
    assert found(path)["model-not-plan"].startswith(f"trtopt build {path}")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert found(path)["weights-not-plan"] == f"trtopt export my_model.py:Net --weights {path} -o MODEL.onnx"
    path.write_bytes(b"")
    assert set(found(path)) == {"no-plan"}
    for start, what in (
        (b"", "empty (0 bytes), no TensorRT plan"),
        (b"\x89PNG\r\n", "a PNG image"),
        (b"%PDF-1", "a PDF"),
    ):
        path.write_bytes(start)
        [finding] = [item for item in trtopt.doctor(path).findings if item.code == "no-plan"]
        assert f"{path} is {what}" in finding.fact
    path.write_bytes(b"anything else")
    assert set(found(path)) == {"no-plan"}
    path.write_bytes(plan(**RTX)[:200])
    assert "plan-damaged" in found(path)
    with pytest.raises(UsageError, match="doesn't exist"):
        trtopt.doctor(tmp_path / "absent.engine")


def test_the_command_for_ultralytics_files_works(tmp_path: Path, on: Callable[..., None]) -> None:
    import subprocess

    on(tensorrt_rtx="1.7.1.116")
    path, inside = tmp_path / "m.engine", plan(**RTX)
    path.write_bytes((2).to_bytes(4, "little") + b"{}" + inside)
    subprocess.run(found(path)["ultralytics-prefix"], shell=True, check=True)
    assert (tmp_path / "m.plan.engine").read_bytes() == inside


def test_a_manifest_of_another_plan_or_damaged(tmp_path: Path, on: Callable[..., None]) -> None:
    on(89, tensorrt="10.16.1.11")
    path = tmp_path / "m.engine"
    path.write_bytes(plan())
    with_manifest(path, plan={"sha256": "0" * 64, "bytes": 1})
    assert found(path)["plan-not-of-manifest"].endswith(f"-o {path}")
    (tmp_path / "m.engine.json").write_text("{")
    assert set(found(path)) == {"manifest-damaged"}


def model(op: str = "Relu") -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node(op, ["y"], ["z"], "last")]
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xz")
    graph = helper.make_graph(nodes, "net", [x], [z], [weight])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="onnx.test"
    )


def test_a_model_with_check(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    report = diagnose(path)
    assert report["ok"], report["findings"]
    assert report["facts"]["opset"] == "17; inputs x (n, 8)"
    assert report["facts"]["check (rtx)"].startswith("TensorRT-RTX 1.")
    onnx.save(model("Det"), path)
    [fault] = [item for item in diagnose(path)["findings"] if item["code"] == "model-error"]
    assert "last" in fault["fact"]
    assert fault["command"] == f"trtopt check {path} --backend rtx"


def test_a_model_whose_weights_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "m.data").unlink()
    report = diagnose(path)
    assert commands(report)["model-error"].startswith(f"trtopt check {path}")
    assert "m.data" in report["findings"][0]["fact"]


def test_a_parser_that_crashes(tmp_path: Path, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    on(tensorrt_rtx="1.7.1.116")
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    died = Answer(failure="the process ended with SIGSEGV", signal="SIGSEGV")
    monkeypatch.setattr(subjects, "ask", lambda probes, patience: dict.fromkeys(probes, died))
    [fault] = trtopt.doctor(path).findings
    assert (fault.code, fault.command) == ("check-failed", f"trtopt -v check {path} --backend rtx")
