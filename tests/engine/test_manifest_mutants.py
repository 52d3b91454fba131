"""A real manifest with one value of another kind, in each place: it is refused by name, or passed over by a rule; and what is
built over it is whole again. (`test_hostile_documents.py` has values that are of the right kind and still hostile.)"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda
from fake_session import adding_engine
from hostile_values import changed
from world import net, samples

from trtopt.autotune.building import build
from trtopt.autotune.selection import Candidate, Comparison, stored_comparison
from trtopt.calibration.calibrator import calibrate
from trtopt.core import files
from trtopt.core.errors import EngineError, EngineMismatch
from trtopt.core.files import sha256_file
from trtopt.cuda.device import Device, DeviceInfo, Probe
from trtopt.data.preprocess import Preprocess
from trtopt.engine.inspection import inspect
from trtopt.engine.manifest import load_manifest, manifest_path
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.timing import Times
from trtopt.runtime.session import Session
from trtopt.trt.compatibility import unread
from trtopt.trt.plans import LoadedEngine

Place = tuple[Any, ...]
KINDS: tuple[Any, ...] = (None, True, 7, 0.5, "text", [], {})
# The kinds that a place takes besides the one that is there.
OPTIONAL = {
    "scratch",
    *("preprocess", "calibration", "graph", "graph_file", "classes", "comparison", "output_kinds"),
    *("generation.gpu", "source.path", "spec.workspace", "spec.optimization_level", "spec.timing_cache"),
    "spec.max_aux_streams",
}
ALSO: dict[str, tuple[type, ...]] = {
    "seconds": (int, float),
    "coverage.*": (int, float),
    "inputs[*].shape[*]": (int, str),
    "outputs[*].shape[*]": (int, str),
    "spec.workspace": (int, str),  # it is null here
    "spec.optimization_level": (int,),
    "spec.max_aux_streams": (int,),
    "spec.timing_cache": (str,),
    "generation.gpu": (str,),
}


@dataclasses.dataclass(frozen=True)
class Built:
    """An engine with everything in its manifest, and how to build it again."""

    engine: Path
    content: dict[str, Any]
    options: dict[str, Any]

    def write(self, content: Any) -> None:
        manifest_path(self.engine).write_text(json.dumps(content))

    def again(self, how: Callable[..., Any] = build) -> Any:
        return how(output=self.engine, **self.options)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTOPT_CACHE", str(folder / "cache"))
        onnx.save(net(), folder / "m.onnx")
        calibrate(folder / "m.onnx", folder / "m.calib.json", data=samples(8), cache=False, threads=1)
        options: dict[str, Any] = {
            "model": folder / "m.onnx", "int8": True, "calib": folder / "m.calib.json",
            "precision_override": ("conv2=fp16",), "shapes": "x:1x3x32x32,2x3x32x32,4x3x32x32", "target": "sm89",
            "backend": "rtx", "save_onnx": folder / "kept.onnx", "classes": [f"class {number}" for number in range(16)],
            "output_kind": {"y": "classes"},
        }  # fmt: skip
        found = Built(folder / "m.engine", {}, options)
        found.again()
        content = json.loads(manifest_path(found.engine).read_bytes())
        times = (Times({"x": "1x3x32x32"}, 1.0),)
        candidates = (Candidate("int8", "1 of 1", 1.0, times, None), Candidate("fp16", "", 1.0, times, None))
        compared = Comparison("GPU", "real samples", None, candidates, True, Limits(), "int8", "INT8 kept", "k")
        prepared = {"size": [32, 32], "mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0]}
        content |= {"preprocess": Preprocess.load(prepared).describe(), "warnings": ["a warning"], "scratch": 4096}
        content["comparison"] = compared.describe()
        content["kept"] = content["kept"] or [{"node": "n", "op": "Conv", "precision": "fp16", "reason": "r"}]
        content = json.loads(json.dumps(content))
        yield dataclasses.replace(found, content=content)


def places(document: Any, path: Place = ()) -> Iterator[Place]:
    """Of every value, itself aside; of a list's items, the first and the last."""
    items: list[tuple[Any, Any]] = list(document.items()) if isinstance(document, dict) else []
    if isinstance(document, list):
        numbered = list(enumerate(document))
        items = numbered[:1] + numbered[1:][-1:]
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def named(path: Place, item: str = "") -> str:
    """As messages name a place; `item` stands for every number of a list."""
    return "".join(f"[{item or key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def mutants(content: dict[str, Any]) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    """Every place with every value of another kind than belongs there."""
    for path in places(content):
        value: Any = content
        for key in path:
            value = value[key]
        where = named(path, "*")
        known = (type(value), *ALSO.get("coverage.*" if where.startswith("coverage.") else where, ()))
        for other in KINDS:
            if type(other) not in known and not (other is None and where in OPTIONAL):
                yield path, other, changed(content, path, other)


def passed_over(path: Place, value: Any) -> bool:
    """The rule of `Manifest`: what is within a comparison, `why` and `gpu` aside; and a layer's precision may be unknown."""
    if value is None and path[0] == "layers" and path[-1] == "precision":
        return True
    return path[0] == "comparison" and len(path) > 1 and path[1] not in ("why", "gpu")


def test_a_value_of_another_kind_is_refused_by_name(built: Built) -> None:
    built.write(built.content)
    assert load_manifest(built.engine) is not None
    count = 0
    for path, value, mutant in mutants(built.content):
        built.write(mutant)
        count += 1
        said, where = f"{named(path)} = {value!r}", named(path)
        try:
            load_manifest(built.engine)
        except EngineError as error:
            assert not passed_over(path, value), said
            if path[0] in ("preprocess", "spec") and len(path) > 1:  # in the words of whoever reads it
                assert str(path[1]) in str(error), f"{said}: {error}"
                where = path[0]
            within = named((*path[:-1], "…")).replace(".…", "[…]")  # msgspec doesn't tell the key of a mapping
            told = where in str(error) or within in str(error)
            assert told and "build the engine again" in str(error), f"{said}: {error}"
        else:
            if path[0] == "preprocess" and len(path) > 1:  # some keys take several kinds
                assert isinstance(Preprocess.load(mutant["preprocess"]), Preprocess)
            else:
                assert passed_over(path, value), f"{said} opens"
                found = stored_comparison(built.engine)
                assert found is None or found.why == built.content["comparison"]["why"]
    assert count >= 161


def open_on_fake(patch: pytest.MonkeyPatch, cuda: FakeCuda, built: Built, loads: list[str]) -> None:
    """Sessions on a fake GPU, whose TensorRT-RTX is the one that built the engine; `loads` gets digests of what it loads."""
    info, made = DeviceInfo(0, "Fake GPU", 89, 1 << 30), built.content["generation"]

    def load(plan: bytes, name: str, **_: Any) -> LoadedEngine:
        loads.append(hashlib.sha256(plan).hexdigest())
        return LoadedEngine(SimpleNamespace(IOutputAllocator=object), adding_engine(cuda), None)

    generation = SimpleNamespace(family=made["family"], product=made["product"], version=made["version"], load=load)
    generation.unread = lambda plan: unread(plan, made["version"])
    patch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe((info,), (12, 4)))
    patch.setattr("trtopt.runtime.gpu_engine.Device", lambda ordinal: Device(functions=cuda, info=info))
    patch.setattr("trtopt.runtime.gpu_engine.plan_loader", lambda *_: generation)


def test_a_build_over_one_that_is_refused_builds_again(built: Built) -> None:
    built.write(built.content)
    assert built.again().cached
    plan = built.engine.read_bytes()
    for path, value in ((("spec", "version_compatible"), "no"), (("layers",), {}), (("plan", "bytes"), None)):
        built.write(changed(built.content, path, value))
        assert not built.again().cached
        made = load_manifest(built.engine)
        assert made is not None and made.plan["sha256"] == sha256_file(built.engine)
        assert made.compute_capabilities == [89]
    built.engine.write_bytes(plan)  # these bytes are what other tests' manifests describe; a later build's may differ


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("inputs", 0, "batch_axis"), 4, r"inputs\[0\]\.batch_axis is 4; an axis of its shape is needed"),
        (("embedded",), {"input": "y", "preprocess": {}}, r"embedded\.input is 'y'; inputs has x"),
        (("seconds",), float("nan"), "seconds is the number nan"),
        (("layers", 0, "name"), 2**70, r"layers\[0\]\.name is a whole number that doesn't fit in 64 bits"),
        (("generation", "version"), float("inf"), r"generation\.version is the number inf"),
        (
            ("graph_file",),
            "../m.onnx",
            r"graph_file is '\.\./m\.onnx'; a file in the plan's folder or below it is needed",
        ),
        (("inputs", 0), {"name": "x", "dtype": "float32"}, r"inputs\[0\] lacks 'shape'"),
        (("inputs", 0, "shape", 0), -2, r"inputs\[0\]\.shape\[0\] is -2"),
        (("coverage",), {"int8": 1.5}, r"coverage\[…\]: a number of at most 1\.0 is needed"),
        (("coverage",), {"int7": 0.5}, "a name in coverage: fp32 or fp16"),
        (("spec", "optimization_level"), 9, "spec: `optimization_level=` is 9"),
        (("spec", "max_aux_streams"), -1, "spec: `max_aux_streams=` is -1"),
        (("spec", "overrides"), ["a=b"], r"spec\.overrides: .*PATTERN=fp32"),
        (("spec", "sparsity"), "some", "spec: `sparsity=` is 'some'"),
        (("targets",), ["sm"], "targets: .*isn't a compute capability"),
        (("profiles",), [{"x": "3x1,1x1,2x1"}], "profiles: .*min ≤ opt ≤ max"),
        (("plan", "sha256"), "0" * 63, r"plan\.sha256 is '0+.*; 64 hexadecimal digits is needed"),
        (("embedded",), {"input": "x", "preprocess": {"resize": "bent"}}, r"embedded\.preprocess: .*resize is 'bent'"),
    ],
)
def test_values_that_no_field_may_have_are_refused_by_name(built: Built, path: Place, value: Any, said: str) -> None:
    built.write(changed(built.content, path, value))
    with pytest.raises(EngineError, match=said):
        load_manifest(built.engine)


def test_what_is_loaded_is_what_was_hashed(
    built: Built, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that is replaced between two readings: it may only be read once."""
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    engine = Path(shutil.copy(built.engine, tmp_path / "m.engine"))
    digest = hashlib.sha256(engine.read_bytes()).hexdigest()
    content = built.content | {"plan": built.content["plan"] | {"sha256": digest}}
    manifest_path(engine).write_text(json.dumps(content))
    whole, reads, loads = files.whole, list[Path](), list[str]()

    def replaced(path: Path, limit: int | None) -> bytes:
        found = whole(path, limit)
        if path == engine:
            reads.append(path)
            path.write_bytes(bytes(reversed(found)))
        return found

    open_on_fake(monkeypatch, cuda, built, loads)
    monkeypatch.setattr("trtopt.runtime.gpu_engine.whole", replaced)
    with Session(engine):
        assert (len(reads), loads) == (1, [digest])
    with pytest.raises(EngineMismatch, match="isn't the plan its manifest describes"):
        Session(engine)
    assert loads == [digest]
    assert inspect(engine).nbytes == len(np.fromfile(engine, np.uint8))
