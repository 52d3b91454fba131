"""build() and Session.for_model() by way of the engine store, on the real TensorRT-RTX, by one process and by several."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import written
from world import Heard

import trtopt
from trtopt.builder.construction import BuildResult, build
from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import DeviceError, EngineError, OutputError, UsageError
from trtopt.cuda.device import Probe
from trtopt.engine.manifest import manifest_path, read_manifest
from trtopt.engine.store import PLAN, Store
from trtopt.graph.io import load_model
from trtopt.runtime.session import Session

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

TARGET = "sm89"
WORKER = Path(__file__).with_name("store_worker.py")
AT = np.zeros((1, 3, 16, 16), np.float32)


def _net(path: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    text = """(float[batch,3,16,16] x) => (float[batch,16] y) {
        [conv1] c1 = Conv<pads=[1,1,1,1]>(x, w1) [relu1] r1 = Relu(c1) [pool] p = GlobalAveragePool(r1)
        [flatten] f = Flatten(p) [fc] y = Gemm<transB=1>(f, w2) }"""
    weights = (random.normal(size=shape).astype(np.float32) / 5 for shape in ((32, 3, 3, 3), (16, 32)))
    onnx.save(written(text, **dict(zip(("w1", "w2"), weights))), path)
    os.utime(path, (1000, 1000))  # long settled
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _net(tmp_path / "net.onnx", 1)


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("TRTOPT_STORE", raising=False)
    return str(tmp_path / "store")


def _build(model: Path, output: Path, where: str | None, **options: Any) -> BuildResult:
    return build(model, output, target=TARGET, store=where, **options)


def _damage(path: Path) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _faults(where: str) -> list[str]:
    store = Store(where)
    return [fault for folder in store.folders() if (fault := store.fault(folder.name))]


def test_another_build_is_a_copy(model: Path, tmp_path: Path, where: str) -> None:
    first = _build(model, tmp_path / "a.engine", where)
    shutil.copy(model, tmp_path / "copy.onnx")
    second = _build(tmp_path / "copy.onnx", tmp_path / "b.engine", where, classes=["c"] * 16)
    assert (first.cached, second.cached) == (False, True)
    assert (tmp_path / "a.engine").read_bytes() == (tmp_path / "b.engine").read_bytes()
    manifest = read_manifest(manifest_path(tmp_path / "b.engine"))
    assert manifest.source["path"] == str(tmp_path / "copy.onnx")
    assert manifest.classes == ["c"] * 16
    assert dict(second.precision) == dict(first.precision)
    (tmp_path / "b.engine").write_bytes(b"mine")  # the output is nobody's but the user's
    assert _faults(where) == []
    assert _build(model, tmp_path / "a.engine", where).cached
    assert not _build(model, tmp_path / "c.engine", where, fp16=True).cached


def test_without_a_store_nothing_is_kept(
    model: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build(model, tmp_path / "a.engine", None)
    assert not (tmp_path / "cache" / "store").exists()
    monkeypatch.setenv("TRTOPT_STORE", where)
    assert not _build(model, tmp_path / "b.engine", None).cached
    assert _build(model, tmp_path / "c.engine", None).cached
    assert not _build(model, tmp_path / "d.engine", "none").cached


def test_the_kept_graph_comes_along(model: Path, tmp_path: Path, where: str) -> None:
    _build(model, tmp_path / "a.engine", where)
    (tmp_path / "sub").mkdir()
    made = _build(model, tmp_path / "b.engine", where, save_onnx=tmp_path / "sub" / "b.onnx")
    assert not made.cached  # that entry has no graph
    taken = _build(model, tmp_path / "c.engine", where, save_onnx=tmp_path / "c.onnx")
    assert taken.cached
    manifest = read_manifest(manifest_path(tmp_path / "c.engine"))
    assert manifest.graph_file == "c.onnx"
    assert load_model(tmp_path / "c.onnx").fingerprint == load_model(tmp_path / "sub" / "b.onnx").fingerprint
    with Session(tmp_path / "c.engine", backend="onnxruntime") as session:
        assert session.run({"x": AT})["y"].shape == (1, 16)


def test_scales_are_part_of_the_key(model: Path, tmp_path: Path, where: str) -> None:
    ramp = np.linspace(-1, 1, 12 * 3 * 256, dtype=np.float32).reshape(12, 3, 16, 16)
    tables = [calibrate(model, data={"x": ramp * factor}).table for factor in (1, 2)]
    _build(model, tmp_path / "a.engine", where, int8=True, calib=tables[0])
    assert _build(model, tmp_path / "b.engine", where, int8=True, calib=tables[0]).cached
    assert not _build(model, tmp_path / "c.engine", where, int8=True, calib=tables[1]).cached


def test_of_a_store_that_may_only_be_read_engines_are_taken_and_the_rest_is_built(
    model: Path, tmp_path: Path, where: str
) -> None:
    _build(model, tmp_path / "a.engine", where)
    shutil.rmtree(Path(where, "locks"))
    Path(where, "locks").touch()  # nobody can lock in it; permissions wouldn't keep root from it
    assert _build(model, tmp_path / "b.engine", where).cached
    assert _faults(where) == []
    heard = Heard()
    assert not _build(model, tmp_path / "c.engine", where, fp16=True, reporter=heard).cached
    assert any("will not be in the store: can't make the store's locks" in warning for warning in heard.warnings)
    assert (tmp_path / "c.engine").is_file()
    with pytest.raises(OutputError, match=r"locks.*give another `store=`"):
        _open(model, where, bf16=True)


def test_the_key_lacks_how_tensorrt_is_named_and_force_replaces(model: Path, tmp_path: Path, where: str) -> None:
    _build(model, tmp_path / "a.engine", where, backend="rtx", timing_cache="none")
    assert _build(model, tmp_path / "b.engine", where).cached
    assert _build(model, tmp_path / "a.engine", "none", timing_cache="none").cached  # up to date, that is
    assert not _build(model, tmp_path / "b.engine", where, force=True).cached
    assert len(Store(where).folders()) == 1
    assert _build(model, tmp_path / "c.engine", where).cached


# Sessions on models --------------------------------------------------------------------------------------------------------


def _open(model: Path, where: str, **options: Any) -> Session:
    return Session.for_model(model, target=TARGET, backend="onnxruntime", store=where, **options)


def test_a_session_has_its_engine_built_once(model: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _open(model, where) as session:
        expected = session.run({"x": AT + 1})["y"]
        assert len(trtopt.prune_store(store=where, max_size=0).removed) == 1  # the session goes on without it
        assert np.array_equal(session.run({"x": AT + 1})["y"], expected)
    with _open(model, where) as session:
        assert np.array_equal(session.run({"x": AT + 1})["y"], expected)

    def fail(*given: Any) -> Any:
        raise AssertionError("the model was read")

    with monkeypatch.context() as patched:
        patched.setattr("trtopt.builder.plan.load_model", fail)
        with _open(model, where) as session:  # known by the file's times
            assert np.array_equal(session.run({"x": AT + 1})["y"], expected)
        with pytest.raises(AssertionError, match="was read"):
            _open(model, where, fp16=True)
        _net(model, 2)
        with pytest.raises(AssertionError, match="was read"):
            _open(model, where)
    with _open(model, where) as session:
        assert not np.array_equal(session.run({"x": AT + 1})["y"], expected)


@pytest.mark.parametrize("name", [PLAN, f"{PLAN}.json", "model.onnx", "key.json"])
def test_a_damaged_engine_is_never_opened_and_built_again(model: Path, tmp_path: Path, where: str, name: str) -> None:
    _build(model, tmp_path / "a.engine", where)
    with _open(model, where) as session:
        expected = session.run({"x": AT + 1})["y"]
    for folder in Store(where).folders():
        if (folder / name).exists():
            _damage(folder / name)
    with _open(model, where) as session:
        assert np.array_equal(session.run({"x": AT + 1})["y"], expected)
    again = _build(model, tmp_path / "b.engine", where, reporter=(heard := Heard()))
    assert again.cached is (name == "model.onnx")  # which a build that keeps no graph has not
    assert name not in (PLAN, f"{PLAN}.json") or any("damaged and is built again" in text for text in heard.warnings)
    assert _faults(where) == []
    read_manifest(manifest_path(tmp_path / "b.engine")).check_plan(tmp_path / "b.engine")
    assert _build(model, tmp_path / "c.engine", where).cached


def test_weights_in_another_file_are_looked_at(tmp_path: Path, where: str) -> None:
    results = []
    for seed in (1, 2):
        proto = onnx.load(_net(tmp_path / "seed.onnx", seed))
        (tmp_path / "m.data").unlink(missing_ok=True)
        onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        for name in ("m.onnx", "m.data"):
            os.utime(tmp_path / name, (1000, 1000))  # the model's file is the same, and old
        with _open(tmp_path / "m.onnx", where) as session:
            results.append(session.run({"x": AT + 1})["y"])
    assert not np.array_equal(*results)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"best": True}, "best"),
        ({"int8": True, "min_snr": 20.0}, "trtopt.tune"),
        ({"output": "x.engine"}, "output"),
        ({"save_onnx": "x.onnx"}, "save_onnx"),
        ({"store": "none"}, "store='none'"),
    ],
)
def test_what_needs_more_than_one_engine_is_refused(
    model: Path, where: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Session.for_model(model, target=TARGET, backend="onnxruntime", **{"store": where, **options})
    with pytest.raises(TypeError, match="did you mean 'fp16'"):
        Session.for_model(model, fp61=True, store=where)


def test_that_there_is_no_gpu_is_told_before_the_build(
    model: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe(reason="no driver"))
    with pytest.raises(DeviceError, match=r"running an engine needs an NVIDIA GPU: no driver.*`backend='onnxruntime'`"):
        Session.for_model(model, target=TARGET, store=where)
    assert not Store(where).folders()


def test_what_is_wrong_with_a_whole_engine_is_told(model: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise EngineError("not for this GPU")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "_open_onnx", refuse)
        with pytest.raises(EngineError, match="not for this GPU"):
            _open(model, where)
    assert len(Store(where).folders()) == 1


# Several processes ---------------------------------------------------------------------------------------------------------


def _start(mode: str, where: str, out: Path, models: list[Path]) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), mode, where, str(out), *map(str, models)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # its errors are ours, which pytest shows


def test_processes_that_ask_at_once_build_each_engine_once(tmp_path: Path, where: str, pytestconfig: Any) -> None:
    models = [_net(tmp_path / f"net{seed}.onnx", seed) for seed in range(2)]
    count = 3 if pytestconfig.getoption("--kills") < 20 else 16
    workers = [_start("once", where, tmp_path / f"out{number}", models) for number in range(count)]
    told = [worker.communicate(timeout=300)[0].split() for worker in workers]
    assert {worker.returncode for worker in workers} == {0}
    assert Counter(name for words in told for name in words[1:]) == {path.name: 1 for path in models}
    plans = {(tmp_path / f"out{number}" / "net0.engine").read_bytes() for number in range(count)}
    assert len(plans) == 1


def test_a_kill_leaves_whole_engines_or_none(tmp_path: Path, where: str, pytestconfig: Any) -> None:
    kills, rng, seen = 4 * pytestconfig.getoption("--kills"), random.Random(7), 0
    models = [_net(tmp_path / f"net{seed}.onnx", seed) for seed in range(3)]
    for number in range((kills + 1) // 2):
        workers = [_start("ever", where, tmp_path / f"out{number}.{half}", models) for half in range(2)]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.8 if seen else 8))  # until a slow machine has built something, kills come later
        for worker in workers:
            assert worker.poll() is None, worker.communicate()[0]
            worker.kill()
            assert worker.communicate()[0] == ""
            time.sleep(rng.uniform(0, 0.1))
        assert _faults(where) == []
        seen += len(Store(where).folders())
        shutil.rmtree(tmp_path / f"out{number}.0")
        shutil.rmtree(tmp_path / f"out{number}.1")
    assert seen
    result = _build(models[0], tmp_path / "last.engine", where)
    assert json.loads(json.dumps(result.to_json()))["engine"]
