"""tiers: real builds by TensorRT-RTX; the timed path on a GPU that is played."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from world import World, has

import trtopt
from trtopt.autotune import tiers as module
from trtopt.autotune.tiers import TIERS, Tier
from trtopt.core.errors import BuildFailed, EngineError
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.engine.manifest import load_manifest
from trtopt.runtime.timing import Spread

pytestmark = pytest.mark.usefixtures("rtx")


def _run(world: World, **options: Any) -> Any:
    return trtopt.tiers(world.model, world.output, data=world.arrays, target="sm89", **options)


def test_every_format_is_built_from_one_calibration_and_judged(world: World) -> None:
    found = _run(world, limits=(20, "99%"))
    rows = {row.name: row for row in found.rows}
    assert list(rows) == [*TIERS, "int8-20db", "int8-99pct"]
    assert found.ok
    manifest = load_manifest(world.output / "int8.engine")
    assert manifest is not None
    assert manifest.calibration
    assert manifest.calibration["digest"] == trtopt.Table.load(world.output / "model.calib.json").digest
    assert rows["fp32"].snr_db == np.inf
    assert rows["fp32"].snr_db > rows["fp16"].snr_db > rows["int8"].snr_db > 10
    assert "2 of 2 convolutions INT8" in rows["int8"].precision_summary
    assert all(row.plan == (world.output / f"{row.name}.engine").stat().st_size for row in found.rows)
    assert "NVIDIA" in found.not_timed
    assert [row.times for row in found.rows] == [()] * len(rows)
    assert rows["fp32"].best
    saved = json.loads((world.output / "tiers.json").read_text())
    assert saved["rows"][0]["command"] == rows["fp32"].command
    page = (world.output / "tiers.html").read_text()
    has(page, "<svg", "int8-20db", "fp32★", "trtopt build", "--min-agreement 0.99")
    times = {path: path.stat().st_mtime_ns for path in world.output.glob("*.engine")}
    assert _run(world, limits=(20, "99%")).ok
    assert times == {path: path.stat().st_mtime_ns for path in world.output.glob("*.engine")}  # all up to date


def test_a_row_is_built_by_the_command_that_it_prints(world: World) -> None:
    done = world.run(
        *("tiers", world.model, "--data", world.arrays, "--target", "sm89", "--only", "fp16,int8", "--limits", "20"),
        *("--shapes", "x:1x3x32x32,4x3x32x32,8x3x32x32", "-o", world.output),
    )
    assert done.status == 0, done.err
    has(done.out, "fp16", "int8", "convolutions INT8", "dB")
    keys = {path: _key(path) for path in world.output.glob("*.engine")}
    assert len(keys) == 3
    lines = {line.partition(": ")[0]: line for line in done.out.splitlines() if ": trtopt " in line}
    for path in keys:
        words = shlex.split(lines[path.stem].partition(": trtopt ")[2])
        path.unlink()
        path.with_name(f"{path.name}.json").unlink()
        assert world.run(*words).status == 0
    assert {path: _key(path) for path in world.output.glob("*.engine")} == keys


def _key(path: Path) -> str:
    manifest = load_manifest(path)
    assert manifest is not None
    return manifest.key


def test_a_small_transformer_has_rows_by_its_kind(world: World, tmp_path: Path) -> None:
    text = """(float[n, 8, 16] x) => (float[n, 8, 16] h) {
        [q] a = MatMul (x, wq) [k] b = MatMul (x, wk) [t] bt = Transpose <perm = [0, 2, 1]> (b) [s] c = MatMul (a, bt)
        [soft] p = Softmax <axis = -1> (c) [v] v0 = MatMul (x, wv) [o] d = MatMul (p, v0) [add] h = Add (d, x) }"""
    weights = {name: values(16, 16, seed=seed, scale=0.3) for seed, name in enumerate(("wq", "wk", "wv"))}
    onnx.save(written(text, **weights), world.model)
    np.savez(world.arrays, x=values(40, 8, 16, seed=9))
    found = _run(world, only=("fp16", "fp8", "int8"), output_kind=["h=embedding"])
    columns, rows = found.table()
    assert found.ok
    assert all("cosine" in row[columns.index("by kind")] for row in rows)
    assert all("matrix products" in row[columns.index("runs")] for row in rows)


def test_a_tier_that_fails_is_a_row_with_its_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    build = module.build

    def failing(model: Any, output: Path, **options: Any) -> Any:
        if options.get("fp16"):
            raise BuildFailed("no tactic for `fp16=True`")
        return build(model, output, **options)

    monkeypatch.setattr(module, "build", failing)
    done = world.run(
        *("tiers", world.model, "--data", world.arrays, "--target", "sm89", "--only", "fp16,fp32", "-o", world.output)
    )
    assert done.status == 1
    has(done.out, "no engine: no tactic for --fp16", "convolutions FP32")
    monkeypatch.setattr(module, "build", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _run(world, only=("fp16",))


def test_without_scales_the_others_are_built(world: World) -> None:
    constant = """(float[n, 3, 32, 32] x) => (float[n, 4, 32, 32] y) {
        [zero] z = Mul (x, none) [conv] y = Conv (z, w) }"""
    onnx.save(written(constant, none=np.zeros((), np.float32), w=values(4, 3, 1, 1)), world.model)
    found = _run(world, only=("fp32", "int8"))
    assert [bool(row.failed) for row in found.rows] == [False, True]
    assert not found.ok


def test_of_a_quantized_model_there_are_no_tiers(world: World) -> None:
    text = """(float[n, 8] x) => (float[n, 8] y) { c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z)
        y = MatMul(d, w) }"""
    onnx.save(written(text, s=np.float32(0.1), z=np.int8(0), w=values(8, 8)), world.model)
    done = world.run("tiers", world.model, "--data", world.arrays, "--target", "sm89", "-o", world.output)
    has(done.err, "holds Q/DQ already", "give that, or build this one: trtopt build", "-o OUT.engine")
    assert done.status == 2 and "drop" not in done.err


def test_what_the_target_lacks_is_left_out_and_what_is_wrong_for_all_refused(world: World) -> None:
    found = trtopt.tiers(world.model, world.output, data=world.arrays, target="sm80", only=())
    assert [row.name for row in found.rows] == ["fp32", "fp16", "bf16", "int8", "int4"]
    has(found.left_out["fp8"], "sm89")
    given = ("tiers", world.model, "--target", "sm89", "-o", world.folder / "other")
    has(world.refused(*given), "real samples", "--images DIR")
    has(world.refused(*given, "--data", world.arrays, "--only", "fp17"), "--only is 'fp17'", "int8")
    has(world.refused(*given, "--data", world.arrays, "--limits", "low"), "--limits has 'low'", "99%")
    has(world.refused(*given, "--data", world.arrays, "--shapes", "z:1x3"), "no input 'z'")
    assert not (world.folder / "other").exists()


def test_on_a_gpu_times_decide(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ms = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.01, "int8": 1.0, "int4": 3.0}
    snr = {"fp32": np.inf, "fp16": 40.0, "bf16": 25.0, "int8": 15.0, "int4": 20.0}
    verify, info = module.verify, DeviceInfo(0, "Played GPU", 89, 1 << 30)

    def bench(engine: Path, **options: Any) -> Any:
        assert options["batch"] == (1, 8)
        if engine.stem == "fp8":
            raise EngineError("it doesn't fit")
        spread = Spread.of([ms[engine.stem]] * 3)
        rows = [trtopt.BenchRow("trtopt", size, gpu=spread, run=spread, throughput=1e3) for size in (1, 8)]
        return SimpleNamespace(rows=tuple(rows))

    def judged(model: Any, engine: Path, **options: Any) -> Any:
        figures = verify(model, model, **options).figures() | {"snr_db": snr.get(engine.stem, 3.0)}
        return SimpleNamespace(figures=lambda: figures)

    monkeypatch.setattr(module, "probe", lambda: Probe((info,), (13, 0)))
    monkeypatch.setattr(module, "bench", bench)
    monkeypatch.setattr(module, "verify", judged)
    found = _run(world, batches=(1, 8))
    rows = {row.name: row for row in found.rows}
    assert {name for name, row in rows.items() if row.best} == {"fp32", "fp16", "int8"}
    has(rows["fp8"].notes, "not timed: it doesn't fit")
    assert found.ok
    assert not found.not_timed
    assert not any("--save-onnx" in row.command for row in found.rows)  # the engines themselves run
    columns, cells = found.table()
    assert columns[2:5] == ("ms @1", "ms @8", "samples/s")
    assert cells[1][2:5] == ("2", "2", "1000")
    has((world.output / "tiers.html").read_text(), "GPU ms @8", "int8★")


def test_costs_that_are_next_to_equal_count_as_equal() -> None:
    def accuracy(snr: float) -> dict[str, Any]:
        return {"snr_db": snr, "samples": 1, "outputs": {}}

    one = Tier("a", "", plan=1000, accuracy=accuracy(20.0))
    assert one.beats(replace(one, plan=999, accuracy=accuracy(10.0)))
    assert not one.beats(replace(one, plan=900, accuracy=accuracy(10.0)))
    assert not one.beats(replace(one, plan=1001))
    assert one.beats(replace(one, plan=1100))
