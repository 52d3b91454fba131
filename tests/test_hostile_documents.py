"""Tables, recipes, job lists and records of pipelines with anything in any place: a clear error, or none where the place
doesn't matter; no internal error, nothing that steers a terminal, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_values import TERMINAL, answers, changed, mutants, toml_file
from world import World

from trtopt import workflow as stages
from trtopt.builder.request import BuildRequest
from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.quality import data_notes
from trtopt.calibration.table import Table
from trtopt.core.errors import UsageError
from trtopt.core.options import options
from trtopt.data.preprocess import Preprocess
from trtopt.jobs.joblist import load_jobs
from trtopt.recipes.loader import load_recipe

RECIPE: dict[str, Any] = {
    "description": "a net",
    "source": "torchvision:resnet18",
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
JOB: dict[str, Any] = {
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
}
JOBS: dict[str, Any] = {
    "output": "tables",
    "device": "cpu",
    "data": {
        "photos": {"images": "photos", "preprocess": {"preset": "imagenet", "size": [32, 32]}, "limit": 4},
        "arrays": {"data": "data.npz", "allow_unusual_data": True},
    },
    "job": [{"model": ["mod*.onnx"], "data": ["photos"], "method": ["auto"], "precision_override": ["a=fp32"]}, JOB],
}
RESULT: dict[str, Any] = {"samples": 4, "snr_db": 30.0, "top1_agreement": 1.0, "outputs": {}}
RESULT |= {key: {"top1": 0.5, "top5": 0.9} for key in ("reference_accuracy", "candidate_accuracy")}
DEEP = b"a = " + b"[" * 5000 + b"]" * 5000
BEYOND = [DEEP, b"a = " + b"9" * 5000, b"\xff\xfe", b"#" * (2 << 20), TERMINAL.encode()]


# Readers ------------------------------------------------------------------------------------------------------------------


def table(path: Path) -> None:
    found = Table.load(path)
    json.dumps(found.to_json(), allow_nan=False)
    data_notes(found.with_method("entropy"))
    if found.preprocess is not None:
        Preprocess.load(found.preprocess)


def recipe(path: Path) -> None:
    load_recipe(path).labelled_files()


def jobs(path: Path) -> None:
    for job in load_jobs(path):
        job.output.is_file()
        job.model.is_file()


def ledger(path: Path) -> None:
    """Read a pipeline's record; what can't be read is done again."""
    path.replace(path.with_name("pipeline.json"))
    found = stages._Ledger(path.parent).run("verify", {"a": 1}, [], lambda: RESULT, stages.Compared)
    assert float(found["snr_db"]) + found["samples"]
    assert found["reference_accuracy"] is None or found["reference_accuracy"]["top1"] + 1


READERS = {
    table: ".calib.json",
    recipe: ".toml",
    jobs: ".toml",
    ledger: ".json",
}


@pytest.fixture
def documents(world: World) -> dict[str, Any]:
    """One of each kind, with everything in it."""
    path = world.folder / "t.calib.json"
    calibrate(world.model, path, images=world.photos, preprocess={"preset": "imagenet", "size": [32, 32]}, cache=False)
    whole = json.loads(path.read_bytes()) | {"skipped": [{"name": "a.jpg", "reason": "damaged"}]}
    for work in (lambda: RESULT, lambda: pytest.fail("it ran again")):
        done = stages._Ledger(world.folder).run("verify", {"a": 1}, [], work, stages.Compared)
        assert done == RESULT
    found = {"table": whole, "recipe": RECIPE, "jobs": JOBS}
    return found | {"ledger": json.loads((world.folder / "pipeline.json").read_bytes())}


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_documents_of_anything(world: World, documents: dict[str, Any], read: Callable[[Path], None]) -> None:
    document = documents[read.__name__]
    before = set(world.folder.iterdir())
    for number, content in enumerate((document, *mutants(document, 120))):
        written = toml_file(content) if READERS[read] == ".toml" else json.dumps(content).encode()
        (world.folder / f"{number:03}{READERS[read]}").write_bytes(written)
    made = [path for path in sorted(world.folder.iterdir()) if path not in before]
    found = answers(read, made)
    assert found[made[0].name] == "used"
    refused = sum(told != "used" for told in found.values())
    assert refused < len(made) and (read is ledger or refused >= len(made) / 8)
    assert read is not ledger or not refused


def test_a_job_lists_options_are_those_of_builds(world: World) -> None:
    path = world.folder / "jobs.toml"
    small = {name: said.least - 1 for name, (_, said) in options(BuildRequest).items() if said.least is not None}
    assert small
    wrong = {"min_agreement": 7, "min_snr": "x", "workspace": -1, "device": -1, "classes": 7}
    for name, value in {**small, **wrong, "preprocess": [], "save_onnx": ""}.items():
        path.write_bytes(toml_file(changed(JOBS, ("job", 1, name), value)))
        with pytest.raises(UsageError, match=rf"jobs\.toml: \[\[job\]\] 2: .*{name}"):
            load_jobs(path)


@pytest.mark.parametrize("content", [*BEYOND, toml_file(RECIPE | {TERMINAL: 1})])
def test_what_no_parser_takes_steers_no_terminal(world: World, content: bytes) -> None:
    path = world.folder / "r.toml"
    path.write_bytes(content)
    found = world.run("pipeline", path, "-o", world.output / "p")
    assert found.status == 2 and "Traceback" not in found.err
    for text in (found.out, found.err):
        assert text.replace("\n", "").isprintable(), ascii(text)
    assert not any(line.startswith("error: forged") for line in (found.out + found.err).splitlines()), found
    assert world.contents() == {}
