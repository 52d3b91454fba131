"""Two engines held against each other by their manifests: no GPU, no TensorRT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manifests import made
from world import World

from trtopt.core.errors import EngineMismatch, UsageError
from trtopt.engine.inspection import inspect
from trtopt.engine.manifest import manifest_path

NHWC, LINEAR = "Int8 (NHWC) Channel major format", "Float (Linear) Row major linear format"


def _layer(node: str, precision: str = "int8", *, kind: str = "convolution", **more: Any) -> dict[str, Any]:
    known = {"reads": [NHWC], "writes": [NHWC], "tactic": "t1"}
    return {"name": f"{node}_myl0_1", "kind": kind, "precision": precision, "nodes": [node, "x/Cast"], **known, **more}


def _made(path: Path, layers: list[dict[str, Any]], **changes: Any) -> Path:
    tensors = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["n", 3, 8, 8]}],
        "outputs": [{"name": "y", "dtype": "float16", "shape": ["n", 10]}],
        "profiles": [{"x": "1x3x8x8,2x3x8x8,4x3x8x8"}],
    }
    return made(path, layers=layers, **{**tensors, **changes})


def _difference(this: Path, other: Path) -> Any:
    report = inspect(this, diff=other)
    return report.difference


def test_what_is_alike_is_not_told(tmp_path: Path) -> None:
    this, other = (
        _made(tmp_path / name, [_layer("a")], seconds=s) for name, s in (("a.engine", 1.0), ("b.engine", 9.0))
    )
    found = _difference(this, other)
    assert found.same and (found.facts, found.precision, found.formats, found.tactics, found.notes) == ((),) * 5
    report = inspect(this)
    assert report.difference is None
    assert {**report.memory, "plan": 0} == {"plan": 0, "workspace_limit": 1 << 30, "scratch": None}


def test_each_kind_of_difference(tmp_path: Path) -> None:
    mine = [_layer("a"), _layer("b"), _layer("c"), _layer("d"), _layer("only", kind="other")]
    theirs = [_layer("a", "fp16"), _layer("b", reads=[LINEAR]), _layer("c", tactic="t2"), _layer("e")]
    this = _made(tmp_path / "a.engine", mine)
    changes: dict[str, Any] = {
        "spec": {"precision": "int8", "workspace": None},
        "profiles": [{"x": "1x3x8x8"}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["n", 10]}],
        "generation": {"family": "tensorrt", "product": "TensorRT", "version": "8.6.0", "gpu": "H200"},
        "scratch": 4096,
        "targets": [],
    }
    other = _made(tmp_path / "longer.engine", theirs, **changes)
    found = _difference(this, other)
    facts = {item.what: (item.this, item.other) for item in found.facts}
    sizes = facts.pop("bytes of the plan")
    assert sizes[1] - sizes[0] == len("longer") - len("a")
    assert facts == {
        "asked: workspace": (1 << 30, None),
        "layers": (5, 4),
        "output y": ("float16 nx10", "float32 nx10"),
        "profile 0: x": ("1x3x8x8,2x3x8x8,4x3x8x8", "1x3x8x8"),
        "scratch bytes of a context": (None, 4096),
        "product": ("TensorRT-RTX 1.7.1.116", "TensorRT 8.6.0"),
        "built for": ("sm89", "H200"),
    }
    assert [(item.what, item.this, item.other) for item in found.precision] == [
        ("a", "int8", "fp16"),
        ("d", "int8", None),
        ("e", None, "int8"),
    ]
    assert [(item.what, item.this, item.other) for item in found.formats] == [
        ("b", f"{NHWC} → {NHWC}", f"{LINEAR} → {NHWC}")
    ]
    assert [(item.what, item.this, item.other) for item in found.tactics] == [("c", "t1", "t2")]
    assert not found.same


def test_models_without_a_node_in_common_are_told(tmp_path: Path) -> None:
    this, other = _made(tmp_path / "a.engine", [_layer("n1")]), _made(tmp_path / "b.engine", [_layer("n9", "fp16")])
    found = _difference(this, other)
    assert found.precision == () and "no node with products is in both" in found.notes[0]


def test_each_profile_has_layers_of_its_own(tmp_path: Path) -> None:
    second = _layer("a", tactic="t2", name="a [profile 1]")
    found = _difference(
        _made(tmp_path / "a.engine", [_layer("a"), second]),
        _made(tmp_path / "b.engine", [_layer("a"), {**second, "tactic": "t3"}]),
    )
    assert [(item.what, item.this, item.other) for item in found.tactics] == [("a [profile 1]", "t2", "t3")]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    this = _made(tmp_path / "a.engine", [_layer("a")])
    found = _difference(this, _made(tmp_path / "none.engine", []))
    assert found.precision == () and "the layers of none.engine aren't known" in found.notes[0]


def test_a_manifest_alone_will_do(tmp_path: Path) -> None:
    this = _made(tmp_path / "a.engine", [_layer("a")])
    other = manifest_path(_made(tmp_path / "b.engine", [_layer("a", "fp16")]))
    (tmp_path / "b.engine").unlink()
    found = _difference(this, other)
    assert [item.what for item in found.precision] == ["a"] and "the manifest alone" in found.notes[0]
    alone = inspect(other)
    assert alone.layers[0]["tactic"] == "t1"


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    this, model = _made(tmp_path / "a.engine", []), tmp_path / "m.onnx"
    model.touch()
    for pair in ((this, model), (model, this), (model, None)):
        with pytest.raises(
            UsageError, match=r"m\.onnx is an ONNX model.* trtopt build .*: trtopt check .*, trtopt verify"
        ):
            inspect(pair[0], diff=pair[1])
    with pytest.raises(UsageError, match=r"`layers=True` lists the layers of one engine, and .*: drop it"):
        inspect(this, layers=True, diff=this)
    with pytest.raises(UsageError, match="the other engine"):
        inspect(this, diff=tmp_path / "absent.engine")
    other = _made(tmp_path / "b.engine", [])
    other.write_bytes(b"vtrt" + bytes(300))
    with pytest.raises(EngineMismatch, match=r"b\.engine isn't the plan"):
        inspect(this, diff=other)


def test_the_command_fits_80_columns(tmp_path: Path, world: World) -> None:
    long = "/backbone/stage4/unit_with_a_long_name/branch2/depthwise/convolution_of_seven_by_seven/Conv"
    this = _made(tmp_path / "a.engine", [_layer(long), _layer("b")])
    other = _made(tmp_path / "b.engine", [_layer(long, "fp16"), _layer("b", tactic="t2"), _layer("z")], scratch=1)
    said = world.run("inspect", this, "--diff", other)
    assert said.status == 0 and max(map(len, said.out.splitlines())) <= 80
    assert "Run by (1)" in said.out and "only in b.engine in a layer with products: 1 node (z)" in said.out
    data = json.loads(world.run("inspect", this, "--diff", other, "--json").out)["difference"]
    assert [item["what"] for item in data["precision"]] == [long, "z"]
    listed = world.run("inspect", this, "--layers")
    lines = listed.out.splitlines()[listed.out.splitlines().index("2 b_myl0_1: convolution, INT8") :]
    assert (
        lines[1].startswith("    formats Int8 (NHWC)") and "    tactic t1" in lines and "    nodes b, x/Cast" in lines
    )
    assert "tactic" not in world.run("inspect", this).out
