"""Engines that aren't right, and what makes them so: by their graphs, and as on a GPU with graphs in the plans' place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from numpy.typing import NDArray
from onnx import ModelProto
from typer.testing import CliRunner
from world import Heard

import trtopt
from trtopt.certification import certificate as certificates, healing
from trtopt.cli import app
from trtopt.core.errors import AccuracyLost, UsageError
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.timing import Times

RTX: dict[str, Any] = {"fp16": True, "backend": "rtx", "target": "sm89", "shapes": "x:1x3x8x8,4x3x8x8,9x3x8x8"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lost() -> ModelProto:
    """A mean over squares that FP16 can't hold."""
    return written(
        """(float[n, 3, 8, 8] x) => (float[n, 10] y) {
        [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w) [large] c = Mul (a, k) [square] d = Mul (c, c)
        [mean] e = GlobalAveragePool (d) [root] f = Sqrt (e) [flat] g = Flatten (f) [fc] y = MatMul (g, u) }""",
        w=values(16, 3, 3, 3, scale=0.3),
        k=np.array(400, np.float32),
        u=values(16, 10, scale=1e-3),
    )


def plain() -> ModelProto:
    return written(
        """(float[n, 3, 8, 8] x) => (float[n, 16, 8, 8] y) {
        [conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w) [relu1] b = Relu (a) [norm] c = LayerNormalization (b, s)
        [conv2] d = Conv <pads = [1, 1, 1, 1]> (c, v) [relu2] y = Relu (d) }""",
        opset=17,
        w=values(16, 3, 3, 3, scale=0.3),
        s=np.ones(8, np.float32),
        v=values(16, 16, 3, 3, seed=1, scale=0.1),
    )


def test_what_fp16_loses_is_healed_by_nodes_in_fp32(tmp_path: Path, cache: Path) -> None:
    heard = Heard()
    onnx.save(lost(), tmp_path / "net.onnx")
    engine, kept = tmp_path / "net.engine", tmp_path / "kept.onnx"
    result = trtopt.build(tmp_path / "net.onnx", engine, heal=True, save_onnx=kept, reporter=heard, **RTX)
    assert result.ok and result.certificate is not None and result.engine == engine and result.onnx == kept
    assert result.healing is not None and [trial.right for trial in result.healing] == [False, False, True]
    assert "first at e of mean (GlobalAveragePool)" in str(result.healing[0])
    assert result.healing[-1].cure == "`precision_override=['mean=fp32', 'root=fp32']`"
    assert any(text.startswith("healed by `precision_override=") for text in heard.notes)
    manifest = load_manifest(engine)
    assert manifest is not None and manifest.spec["overrides"] == ["mean=fp32", "root=fp32"]
    assert trtopt.certify(tmp_path / "net.onnx", engine).ok, "what was written is what was tried"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cache", "kept.onnx", "net.engine", "net.engine.json", "net.onnx")
    }
    assert len(list((cache / "cures").iterdir())) == 1, "what healed is known for the next"


def test_a_right_engine_is_left_as_it_is(tmp_path: Path) -> None:
    result = trtopt.build(plain(), tmp_path / "net.engine", heal=True, **RTX)
    assert result.ok and result.healing is not None and [trial.cure for trial in result.healing] == [""]
    assert load_manifest(tmp_path / "net.engine") is not None and result.onnx is None
    with pytest.raises(UsageError, match="`heal=` compares engines or writes files"):
        trtopt.Session.for_model(plain(), heal=True, backend="onnxruntime")


def test_what_nothing_heals_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = certificates.closeness
    monkeypatch.setattr(certificates, "closeness", lambda *given: real(*given) - 1000)
    onnx.save(lost(), tmp_path / "net.onnx")
    (tmp_path / "net.engine").write_bytes(b"an older one")
    with pytest.raises(
        AccuracyLost, match=r"is right. Nothing was written; tried: as asked: not right: the model as given"
    ):
        trtopt.build(tmp_path / "net.onnx", tmp_path / "net.engine", heal=True, **RTX)
    assert (tmp_path / "net.engine").read_bytes() == b"an older one"
    arguments = ["build", str(tmp_path / "net.onnx"), "-o", str(tmp_path / "new.engine"), "--fp16", "--target", "sm89"]
    shown = CliRunner().invoke(app, [*arguments, "--heal", "--shapes", RTX["shapes"]])
    assert shown.exit_code != 0 and isinstance(shown.exception, AccuracyLost)
    assert not (tmp_path / "new.engine").exists()


@pytest.fixture
def wrong_unless(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: Any) -> Any:
    """Engines give a wrong sixth row of nine unless they were built with an option that `heals`; each option has its time."""
    heals, times = list[str](), dict[str, float]()

    def spoil(session: trtopt.Session, inputs: Mapping[str, NDArray[Any]], results: dict[str, NDArray[Any]]) -> None:
        spec = {} if session.manifest is None else session.manifest.spec
        default = {"mark_output": [], "write_out": [], "optimization_level": None, "tf32": True}
        right = any(spec.get(name, value) != value for name, value in default.items() if name in heals)
        right |= "shapes" in heals and len(spec.get("profiles", ())) > 1
        if not right and len(inputs["x"]) == 9:
            results["y"][5] += 1

    def timed(sessions: Mapping[str, Any], samples: Any) -> Any:
        found = {cure: next((ms for name, ms in times.items() if name in cure), 1.0) for cure in sessions}
        return {cure: (Times({"x": "4x3x8x8"}, ms),) for cure, ms in found.items()}, "samples"

    as_on_a_gpu(spoil)
    monkeypatch.setattr(healing, "time_in_turns", timed)
    return heals.extend, times


@pytest.mark.parametrize(
    ("works", "ms", "kept"),
    [
        (["mark_output", "shapes"], {"shapes": 0.5, "mark_output": 0.7}, "`shapes="),
        (["mark_output", "shapes"], {"shapes": 0.9, "mark_output": 0.7}, "`mark_output=['"),
        (["optimization_level"], {}, "`optimization_level=2`"),
        (["tf32"], {}, "`tf32=False`"),
    ],
)
def test_the_fastest_engine_that_is_right_is_kept(
    works: list[str], ms: dict[str, float], kept: str, wrong_unless: Any, tmp_path: Path
) -> None:
    heal, times = wrong_unless
    heal(works)
    times |= ms
    options = {**RTX, "fp16": False}
    result = trtopt.build(plain(), tmp_path / "net.engine", heal=True, **options)
    assert result.ok and result.healing is not None
    right = [trial for trial in result.healing if trial.right]
    best = min(right, key=lambda trial: trial.gpu_ms)
    assert best.cure.startswith(kept) and {name for name in works if any(name in trial.cure for trial in right)} == {
        *works
    }
    assert result.healing[0].gpu_ms == 1.0, "what it costs is told beside the wrong engine's time"
    manifest = load_manifest(tmp_path / "net.engine")
    assert manifest is not None and manifest.certificate is not None and manifest.certificate["ok"]
    again = trtopt.build(plain(), tmp_path / "again.engine", heal=True, **options)
    assert again.healing is not None and again.healing[1].right, "the next build begins with what healed the last one"
    assert len(again.healing) == 2 < len(result.healing)


def test_two_faults_are_healed_one_after_the_other(tmp_path: Path) -> None:
    proto = written(
        """(float[n, 3, 8, 8] x) => (float[n, 10] y) {
        [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w) [large] c = Mul (a, k) [square] d = Mul (c, c)
        [mean] e = GlobalAveragePool (d) [root] f = Sqrt (e) [less] g = Div (f, k) [scaled] h = Mul (a, g)
        [bounded] i = Tanh (h) [large2] j = Mul (i, k) [square2] l = Mul (j, j) [mean2] m = GlobalAveragePool (l)
        [root2] o = Sqrt (m) [flat] q = Flatten (o) [fc] y = MatMul (q, u) }""",
        w=values(16, 3, 3, 3, scale=0.3),
        k=np.array(400, np.float32),
        u=values(16, 10, scale=1e-3),
    )
    result = trtopt.build(proto, tmp_path / "net.engine", heal=True, **RTX)
    assert result.ok and result.healing is not None
    assert all(name in result.healing[-1].cure for name in ("mean=fp32", "mean2=fp32")), result.healing


def test_marked_outputs_and_operators_in_parts_are_options_of_a_build(tmp_path: Path) -> None:
    kept, build = tmp_path / "kept.onnx", functools.partial(trtopt.build, plain(), tmp_path / "net.engine", **RTX)
    build(mark_output="c", write_out=["LayerNormalization"], save_onnx=kept)
    graph = onnx.load(kept).graph
    assert [value.name for value in graph.output] == ["y", "c"]
    assert "LayerNormalization" not in {node.op_type for node in graph.node}
    manifest = load_manifest(tmp_path / "net.engine")
    assert manifest is not None and [item["name"] for item in manifest.outputs] == ["y", "c"]
    with trtopt.Session(tmp_path / "net.engine", backend="onnxruntime") as session:
        assert {*session.run({"x": values(4, 3, 8, 8)})} == {"y", "c"}
    assert not build(save_onnx=kept).cached, "another engine"
    with pytest.raises(
        UsageError, match=r"`mark_output=\['cc'\]` is no tensor of the graph that TensorRT gets; near: c, "
    ):
        build(mark_output=["cc"])
    with pytest.raises(UsageError, match=r"`write_out=\['Softmax'\]`: the model has none, or ONNX doesn't define it"):
        build(write_out=["Softmax"])


def test_parts_of_every_operator_are_told_apart() -> None:
    from trtopt.builder.execute import _in_parts

    proto = written(
        """(float[n, 3, 8] x) => (float[n, 3, 8] y) {
        [norm] a = LayerNormalization (x, s) [gelu] y = Gelu (a) }""",
        opset=20,
        s=np.ones(8, np.float32),
    )
    made, apart = _in_parts(proto, ["LayerNormalization", "Gelu"])
    assert {node.name for node in made.graph.node} == {*apart}
    assert _in_parts(proto, []) == (proto, {})
