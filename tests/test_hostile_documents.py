"""Tables, caches, manifests, recipes, preprocessing, job lists and state folders with anything in any place: a clear error, or
none where the place doesn't matter; no internal error, nothing that steers a terminal, nothing written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_values import TERMINAL, changed, mutants, toml_file
from world import Outcome, World, samples

from trtopt import workflow as stages
from trtopt.autotune.selection import Candidate, Comparison, stored_comparison
from trtopt.builder.request import BuildRequest
from trtopt.calibration.calibrator import calibrate, data_notes
from trtopt.calibration.quality import refuse
from trtopt.calibration.table import Table
from trtopt.core.errors import CalibrationError, EngineError, TrtoptError, UsageError
from trtopt.core.options import options
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.engine.manifest import Manifest, load_manifest
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.timing import Times
from trtopt.graph.io import load_model
from trtopt.jobs.joblist import load_jobs
from trtopt.jobs.runner import show_jobs
from trtopt.jobs.state import read_state
from trtopt.recipes.loader import load_recipe
from trtopt.runtime.session import Session


def tame(found: Outcome) -> None:
    """Check all that every command owes, whatever it read."""
    assert found.status in (0, 1, 2), found
    assert "Traceback" not in found.err
    for text in (found.out, found.err):
        assert text.replace("\n", "").isprintable(), ascii(text)
    assert not any(line.startswith("error: forged") for line in (found.out + found.err).splitlines()), found


def survived(count: int, document: Any, use: Callable[[Any], object]) -> None:
    """`use` takes each mutant, or raises an error of trtopt's; some of them it must refuse."""
    refused = sum(refuses(use, mutant, said) for said, mutant in mutants(document, count))
    assert count // 8 < refused < count


def refuses(use: Callable[[Any], object], mutant: Any, said: str) -> bool:
    try:
        use(mutant)
    except TrtoptError:
        return True
    except Exception as error:
        raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
    return False


# Manifests -----------------------------------------------------------------------------------------------------------


def comparison() -> Comparison:
    times = (Times({"x": "1x3x32x32"}, 1.0, 0.9, 1.1, True),)
    output = {"kind": "classes", "nonfinite": 0, "integers": False, "channels": None, "snr_db": 40.0, "agreement": 0.99}
    accuracy = {"samples": 4, "snr_db": 40.0, "outputs": {"y": output}}
    candidates = (Candidate("int8", "1 of 1", 1.0, times, accuracy), Candidate("fp16", "", 1.0, times, accuracy))
    return Comparison("GPU", "real samples", "FP32", candidates, True, Limits(), "int8", "INT8 kept", "k")


@pytest.fixture
def described(world: World) -> dict[str, Any]:
    """A manifest with everything in it, beside a plan that is none: what is asked of it here needs no TensorRT."""
    plan, model = world.output / "m.engine", load_model(world.model)
    shutil.copy(world.model, world.output / "kept.onnx")
    plan.write_bytes(b"ftrt" + bytes(200))
    manifest = Manifest(
        generation={"family": "rtx", "product": "TensorRT-RTX", "version": "1.7.1.116", "gpu": None},
        targets=["sm89"],
        spec={"precision": "int8", "version_compatible": False},
        precision={"int8": 2, "fp16": 0, "fp32": 0, "total": 2},
        precision_summary="2 of 2 convolutions INT8",
        layers=[{"name": "l", "kind": "convolution", "precision": "int8", "nodes": ["conv1"]}],
        kept=[{"node": "pool", "op": "GlobalAveragePool", "precision": "fp16", "reason": "no kernel"}],
        inputs=[dataclasses.asdict(item) for item in model.inputs],
        outputs=[dataclasses.asdict(item) for item in model.outputs],
        profiles=[{"x": "1x3x32x32,2x3x32x32,8x3x32x32"}],
        source={"path": str(world.model), "sha256": model.fingerprint},
        plan={"sha256": hashlib.sha256(plan.read_bytes()).hexdigest(), "bytes": 204},
        key="k",
        seconds=1.0,
        trtopt="0.1.0",
        preprocess=PRESETS["imagenet"].describe(),
        calibration={"method": "auto", "samples": 40, "digest": "d"},
        warnings=["a warning"],
        graph=model.fingerprint,
        graph_file="kept.onnx",
        classes=[f"class {number}" for number in range(16)],
        comparison=comparison().describe(),
        coverage={"int8": 0.9, "fp16": 0.1},
        output_kinds={"y": "classes"},
        compute_capabilities=[89],
    )
    manifest.save(plan)
    content: dict[str, Any] = json.loads((world.output / "m.engine.json").read_bytes())
    return content


def test_sessions_and_contests_take_any_manifest(world: World, described: dict[str, Any]) -> None:
    path, plan = world.output / "m.engine.json", world.output / "m.engine"

    def use(mutant: Any) -> None:
        path.write_text(json.dumps(mutant))
        if (stored := stored_comparison(plan)) is not None:
            stored.describe()
        load_manifest(plan)
        with Session(plan, backend="onnxruntime") as session:
            session.run({"x": samples(2)})

    use(described)
    assert stored_comparison(plan) == comparison()
    survived(200, described, use)


def test_a_manifest_names_a_graph_beside_its_plan_alone(world: World, described: dict[str, Any]) -> None:
    for place in (str(world.model), "../model.onnx", "a/../kept.onnx"):
        (world.output / "m.engine.json").write_text(json.dumps(described | {"graph_file": place}))
        with pytest.raises(EngineError, match=r"graph_file is .*; a file in the plan's folder or below it is needed"):
            load_manifest(world.output / "m.engine")


def test_what_a_newer_trtopt_adds_is_passed_over(world: World, described: dict[str, Any]) -> None:
    newer = described | {"a field": [1], "generation": described["generation"] | {"new": 1}}
    (world.output / "m.engine.json").write_text(json.dumps(newer))
    found = load_manifest(world.output / "m.engine")
    assert found is not None
    assert dataclasses.replace(found, generation=described["generation"]) == Manifest(**described)


# Tables and caches -----------------------------------------------------------------------------------------------------


def test_tables_of_anything(world: World) -> None:
    path = world.folder / "t.calib.json"
    calibrate(world.model, path, images=world.photos, preprocess={"preset": "imagenet", "size": [32, 32]}, cache=False)
    whole = json.loads(path.read_bytes())
    whole |= {"skipped": [{"name": "a.jpg", "reason": "damaged"}]}

    def use(mutant: Any) -> None:
        path.write_text(json.dumps(mutant))
        table = Table.load(path)
        json.dumps(table.to_json(), allow_nan=False)
        data_notes(table.with_method("entropy"))
        refuse(table.quality or {}, False)
        if table.preprocess is not None:
            Preprocess.load(table.preprocess)

    use(whole)
    survived(100, whole, use)
    tensor = next(iter(whole["tensors"]))
    for place, value in (
        (("samples",), -1),
        (("method",), " "),
        (("model", "fingerprint"), 7),
        (("preprocess", "resize"), "bent"),
        (("skipped", 0, "reason"), ""),
        (("quality", "different"), [7]),
        (("ranges",), {"a": 0}),
        (("left_out",), {"conv1": ""}),
    ):
        path.write_text(json.dumps(changed(whole, place, value)))
        with pytest.raises(CalibrationError, match=rf"t\.calib\.json.*{place[-1]}"):
            Table.load(path)
    changes: tuple[dict[str, Any], ...] = ({"amax": 10**400}, {"low": 1e300}, {"high": 10**400}, {"amax": 1e300})
    histogram = whole["tensors"][tensor]["histogram"]
    changes += ({"histogram": histogram | {"exponent": 5000}}, {"histogram": histogram | {"bins": 10**9}})
    for change in (*({"tensors": {tensor: whole["tensors"][tensor] | item}} for item in changes), {"groups": [1]}):
        path.write_text(json.dumps(whole | change))
        tame(found := world.run("calibrate", world.model, "--calib", path, "-o", world.output / "o.json"))
        assert found.status == 1, change
        assert world.contents() == {}


# TOML ------------------------------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "description": "a net",
    "source": "model.onnx",
    "arguments": ["a", 1],
    "options": {"a": 1},
    "weights": "model.onnx",
    "requires": "nothing",
    "outputs": ["y"],
    "opset": 17,
    "preprocess": "imagenet",
    "calibration": "imagenet-crops",
    "labelled": "photos/*.jpg",
    "classes": "imagenet",
    "inputs": {"x": {"shape": ["batch", 3, 32, 32], "dtype": "float32", "range": "1x3x32x32,2x3x32x32,8x3x32x32"}},
}
BEYOND = [
    b"a = " + b"[" * 5000 + b"]" * 5000,
    b"a = " + b"{a=" * 5000 + b"1" + b"}" * 5000,
    b"a = " + b"9" * 5000,
    b"\xff\xfe",
    b"#" * (2 << 20),
    TERMINAL.encode(),
]


def test_recipes_of_anything(world: World) -> None:
    path = world.folder / "r.toml"

    def use(mutant: dict[str, Any]) -> None:
        path.write_bytes(toml_file(mutant))
        load_recipe(path).labelled_files()

    use(RECIPE)
    survived(150, RECIPE, use)
    for place, value in (
        (("source",), " "),
        (("weights",), 7),
        (("opset",), 0),
        (("precision",), "int7"),
        (("min_agreement",), 1.5),
        (("inputs", "x", "shape"), [0]),
        (("inputs", "x", "dtype"), "real"),
        (("inputs", "x", "range"), "1x3,2"),
    ):
        with pytest.raises(UsageError, match=rf"r\.toml .*{place[-1]}"):
            use(changed(RECIPE, place, value))
    for content in BEYOND:
        path.write_bytes(content)
        tame(found := world.run("pipeline", path, "-o", world.output / "p"))
        assert found.status == 2
    path.write_bytes(toml_file(RECIPE | {TERMINAL: 1}))
    tame(found := world.run("pipeline", path, "-o", world.output / "p"))
    assert "\\x1b]0;PWNED" in found.err
    assert world.contents() == {}
    for reference in ("package:__main__/x", f"package:{'x' * 5000}/x", "package:numpy//etc/passwd", "package:numpy/\0"):
        with pytest.raises(TrtoptError):
            path.write_bytes(toml_file(RECIPE | {"weights": reference}))
            load_recipe(path)


def test_preprocessing_of_anything(world: World) -> None:
    path, image = world.folder / "p.toml", np.zeros((40, 60, 3), np.uint8)
    whole = PRESETS["yolo"].describe() | {
        "preset": "yolo",
        "size": [32, 32],
        "dtype": "float32",
        "std": [1.0, 2.0, 3.0],
    }

    def use(mutant: dict[str, Any]) -> None:
        path.write_bytes(toml_file(mutant))
        with np.errstate(all="ignore"):
            Preprocess.load(path)(image)

    use(whole)
    survived(120, whole, use)


def test_job_lists_of_anything(world: World) -> None:
    path = world.folder / "jobs.toml"
    whole = {
        "output": "tables",
        "device": "cpu",
        "data": {
            "photos": {"images": "photos", "preprocess": {"preset": "imagenet", "size": [32, 32]}, "limit": 4},
            "arrays": {"data": "data.npz", "allow_unusual_data": True},
        },
        "job": [
            {"model": ["mod*.onnx"], "data": ["photos"], "method": ["auto"], "precision_override": ["a=fp32"]},
            {"name": "n", "model": "model.onnx", "data": "arrays", "method": "minmax"},
            {
                "kind": "build",
                "model": "model.onnx",
                "precision": ["fp16", "int8"],
                "data": "arrays",
                "target": ["sm89", "sm80,sm120"],
                "resource": "accelerator_type:H200",
                "shapes": "x:1x3x32x32,2x3x32x32,4x3x32x32",
                "workspace": "1GiB",
                "min_snr": 20.0,
                "output_kind": {"y": "embedding"},
            },
        ],
    }
    small = {name: said.least - 1 for name, (_, said) in options(BuildRequest).items() if said.least is not None}
    assert small
    wrong = {
        "min_agreement": 7,
        "budget": "soon",
        "min_snr": "x",
        "optimization_level": 9,
        "workspace": -1,
        "device": -1,
    }
    for name, value in {**small, **wrong, "preprocess": [], "classes": 7, "report": ""}.items():
        path.write_bytes(toml_file(changed(whole, ("job", 2, name), value)))
        with pytest.raises(UsageError, match=rf"jobs\.toml: \[\[job\]\] 3: .*{name}"):
            load_jobs(path)

    def use(mutant: dict[str, Any]) -> None:
        path.write_bytes(toml_file(mutant))
        for job in load_jobs(path):
            job.output.is_file()
            job.model.is_file()

    use(whole)
    survived(150, whole, use)


def test_a_pipelines_ledger_of_anything(tmp_path: Path) -> None:
    accuracy = {"top1": 0.5, "top5": 0.9}
    result = {"samples": 4, "snr_db": 30.0, "top1_agreement": 1.0}
    result |= {"reference_accuracy": accuracy, "candidate_accuracy": accuracy, "outputs": {}}
    ledger = stages._Ledger(tmp_path)
    assert ledger.run("verify", {"a": 1}, [], lambda: result, stages.Compared) == result
    again = stages._Ledger(tmp_path).run("verify", {"a": 1}, [], lambda: pytest.fail("it ran again"), stages.Compared)
    assert again == result
    path = tmp_path / "pipeline.json"

    def use(mutant: Any) -> None:
        path.write_text(json.dumps(mutant))
        found = stages._Ledger(tmp_path).run("verify", {"a": 1}, [], lambda: result, stages.Compared)
        assert float(found["snr_db"]) + found["samples"]
        assert found["reference_accuracy"] is None or found["reference_accuracy"]["top1"] + 1

    assert not any(refuses(use, mutant, said) for said, mutant in mutants(json.loads(path.read_bytes()), 60))


# State files -------------------------------------------------------------------------------------------------------------


def test_states_of_anything(world: World) -> None:
    path = world.output / "jobs.state"
    record: dict[str, Any] = {"state": "failed", "key": "k", "error": {"type": "ModelError", "message": "m"}}
    record |= {"notes": ["n"], "seconds": 1.5, "samples": 8, "tensors": {"minmax": 3}, "targets": ["sm89"]}
    whole = {"format": "trtopt.jobs/1", "jobs": {"model.d.auto": record}}
    path.write_text(json.dumps(changed(whole, ("jobs", "model.d.auto", "error", "message"), TERMINAL)))
    tame(world.run("jobs", "show", path))

    def use(mutant: Any) -> None:
        path.write_text(json.dumps(mutant))
        found = show_jobs(path)
        json.dumps(found.to_json(), allow_nan=False)
        assert found.summary
        assert all(map(str, found.jobs))

    assert sum(refuses(use, mutant, said) for said, mutant in mutants(whole, 120, seed=17)) < 60  # no state file at all
    for place, value in ((("samples",), -1), (("state",), "well"), (("notes", 0), 7)):
        path.write_text(json.dumps({**whole, "jobs": {"model.d.auto": changed(record, place, value)}}))
        assert read_state(path) == {}, f"{place} = {value!r}"  # and so it is done again
