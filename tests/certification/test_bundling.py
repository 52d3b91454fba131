"""The smallest part of a graph that is still wrong, written with its inputs and a script for TensorRT alone."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from numpy.typing import NDArray
from test_placing import _always, _neighbour, _third, net

import trtopt
from trtopt.certification import bundling, opening
from trtopt.certification.placing import Place, Subject
from trtopt.certification.relations import Candidate, Relation
from trtopt.core import operators
from trtopt.core.errors import UsageError
from trtopt.engine.manifest import load_manifest
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner

Arrays = Mapping[str, NDArray[Any]]
ONE = "a batch is its samples one by one"


@pytest.mark.usefixtures("no_operators")
@pytest.mark.parametrize(("fault", "batch"), [(_third, 4), (_neighbour, 4), (_always, 1)])
def test_a_wrong_node_is_cut_out_with_its_inputs(fault: Any, batch: int, tmp_path: Path) -> None:
    operators.operator("acme::Right", shapes=lambda x: [x])(lambda x: 2 * x)
    operators.operator("acme::Wrong", shapes=lambda x: [x])(fault)
    data = {"x": values(10, 3, 8, 8)}
    found = trtopt.certify(net("Right"), net("Wrong"), data=data, batch=[1, 4], bundle=tmp_path / "report")
    assert not found.ok and found.place is not None and found.place.node == "middle"
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        *("model.onnx", "inputs.npz", "expected.npz", "show.py")
    }
    part = onnx.load(tmp_path / "report" / "model.onnx")
    assert [node.op_type for node in part.graph.node] == ["Wrong"]
    inputs, expected = (np.load(tmp_path / "report" / f"{name}.npz") for name in ("inputs", "expected"))
    assert {name: inputs[name].shape for name in inputs} == {"b": (batch, 16, 8, 8)}
    assert np.array_equal(expected["c"], 2 * inputs["b"]), "what the model as given makes of it"
    ast.parse((tmp_path / "report" / "show.py").read_text())
    right = trtopt.certify(net("Right"), net("Right"), data=data, batch=[1, 4], bundle=tmp_path / "none")
    assert right.ok and not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="a function has none"):
        trtopt.certify(net("Right"), lambda batch: {}, data=data, bundle=tmp_path / "none")


def test_a_part_grows_until_it_is_wrong(tmp_path: Path) -> None:
    """A fault that only d beside f shows: the part has both, what shapes are computed of, and no more of the graph; large
    weights are its own."""
    proto = written(
        """(float[n, 200] x) => (float[n, 200] y) {
        [n1] a = Relu (x) [n2] b = Sigmoid (a) [n3] c = Tanh (b) [n4] s = Shape (c) [n5] d = Reshape (c, s)
        [n6] e = MatMul (d, w) [n7] f = Abs (e) [n8] g = Sqrt (f) [n9] h = Exp (g) [n10] i = Cos (h) [n11] y = Sin (i) }""",
        opset=17,
        w=values(200, 200),
    )
    model, parts = load_model(proto), list[list[str]]()

    def opened(part: onnx.ModelProto, *_: Any) -> contextlib.nullcontext[Any]:
        names, run = [node.name for node in part.graph.node], opening.with_tensors(load_model(part))
        parts.append(names)

        def fused(batch: Arrays) -> Arrays:
            results = {name: np.array(array) for name, array in run(batch).items()}
            if {"n5", "n7"} <= {*names} and len(next(iter(batch.values()))) >= 3:
                for array in results.values():
                    array[2] += 1
            return results

        return contextlib.nullcontext(fused)

    samples = [{"x": array[None]} for array in values(6, 200)]
    candidate = Candidate(OnnxRunner(model, optimize=False), (1, 4), model.outputs)
    fault, at = Relation(ONE, "y", 4, 3.0, 100.0, "sample 2"), Place(ONE, 4, "e", "n6", "MatMul", 3.0, 100.0, False, 1)
    subject = Subject(proto, proto, candidate, opened, samples)
    said = bundling.bundle(tmp_path, subject, at, fault, None)
    part = onnx.load(tmp_path / "model.onnx")
    assert parts == [["n6"], ["n4", "n5", "n6", "n7"]] and [node.name for node in part.graph.node] == parts[-1]
    assert "the smallest part that is still wrong" in said and [value.name for value in part.graph.input] == ["c"]
    right = bundling.replace(
        subject, opened=lambda part, *_: contextlib.nullcontext(opening.with_tensors(load_model(part)))
    )
    said = bundling.bundle(tmp_path / "whole", right, at, fault, None)
    assert f"{len(proto.graph.node)} nodes, the whole graph: no part of it is wrong by itself" in said


def test_without_a_gpu_what_is_right_is_the_model_not_the_graph_that_is_tried(tmp_path: Path) -> None:
    text = "(float[n, 256] x) => (float[n, 256] y) { [one] a = MatMul (x, w) [two] b = Relu (a) [three] y = MatMul (b, v) }"
    weights = {name: values(256, 256, seed=seed, scale=0.1) for seed, name in enumerate("wv")}
    proto, data = written(text, **weights), {"x": values(8, 256)}
    options: dict[str, Any] = {"backend": "rtx", "target": "sm89", "save_onnx": tmp_path / "graph.onnx"}
    trtopt.build(proto, tmp_path / "net.engine", fp16=True, sparsity="prune", **options)
    found = trtopt.certify(proto, tmp_path / "net.engine", data=data, min_snr=40, bundle=tmp_path / "report")
    assert [item.name for item in found.failed] == ["the model as given"]
    inputs, expected = (np.load(tmp_path / "report" / f"{name}.npz") for name in ("inputs", "expected"))
    assert [*inputs] == ["b"], "the last product alone"
    assert np.allclose(expected["y"], inputs["b"] @ weights["v"], atol=1e-3)


@pytest.mark.parametrize(
    ("version", "precision", "flags"),
    [("8.6.0", "int8", ["FP16", "INT8"]), ("8.6.0", "fp32", []), ("10.6.0", "int8", [])],
)
def test_the_script_builds_as_the_engine_was_built(
    version: str, precision: str, flags: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"backend": "rtx", "target": "sm89"}
    proto = written("(float[2, 8] x) => (float[2, 8] y) { y = Relu (x) }")
    trtopt.build(proto, tmp_path / "net.engine", **options)
    manifest = load_manifest(tmp_path / "net.engine")
    assert manifest is not None
    assert bundling._of_engine(manifest)["module"] == "tensorrt_rtx"
    spec, family = {**manifest.spec, "precision": precision}, f"tensorrt{version.partition('.')[0]}"
    found = bundling._of_engine(
        bundling.replace(
            manifest,
            spec=spec,
            generation={**manifest.generation, "family": family, "product": "TensorRT", "version": version},
            plugins=[{"library": "mine.so", "sha256": "0" * 64, "creators": []}],
        )
    )
    assert found["settings"] == flags and found["libraries"] == " Arguments: mine.so."
    assert str(found["flags"]).endswith("EXPLICIT_BATCH)" if version[0] == "8" else "STRONGLY_TYPED)")
    assert found["version"] == f" Found with TensorRT {version}." and found["module"] == "tensorrt"
