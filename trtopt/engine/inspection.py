"""The content of an engine file and what it runs, by its manifest, its header and, where there is a GPU, the engine."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from trtopt.core import native
from trtopt.core.documents import Plain
from trtopt.core.errors import EngineError, UsageError
from trtopt.core.files import existing_file, whole
from trtopt.core.options import taking
from trtopt.core.version import __version__, package_version
from trtopt.cuda.device import probe
from trtopt.engine.manifest import Manifest, load_manifest, read_manifest
from trtopt.engine.reports import EngineReport, compare
from trtopt.engine.request import InspectRequest, VersionRequest
from trtopt.trt import loaders
from trtopt.trt.compatibility import runs_on
from trtopt.trt.plans import check_maker, plan_origin
from trtopt.trt.plugins import Creator

_LIBRARIES = (
    *("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "opencv-python-headless"),
    *("torch", "torchvision", "cuda-bindings"),
)


@taking(InspectRequest)
def inspect(request: InspectRequest) -> EngineReport:
    """Say what an engine file is.

    `diff` says what differs from another engine or manifest; no GPU is needed. Of a plan that no manifest describes the report
    holds what its first bytes say.

    Raises:
        UsageError: there is no such file, it is an ONNX model, or `diff` and `layers` are given together.
        EngineError: it isn't a TensorRT plan, or is damaged, or its manifest can't be read.
        EngineMismatch: the plan isn't the one its manifest describes.
    """
    path = existing_file(request.engine, "the engine")
    if request.diff is None:
        return _engine(path)
    if request.layers:
        raise UsageError("`layers=True` lists the layers of one engine, and `diff=` compares two: drop it")
    paths = path, existing_file(request.diff, "the other engine")
    this, other = (_engine(each) for each in paths)
    notes = [f"{each.engine}: {note}" for each in (this, other) for note in each.notes]
    difference = compare(this, other)
    return replace(this, difference=replace(difference, notes=(*notes, *difference.notes)))


def _engine(path: Path) -> EngineReport:
    if path.suffix == ".onnx":
        instead = f"trtopt check {path} tells of a model, trtopt verify compares what models give"
        raise UsageError(f"{path} is an ONNX model, and an engine is needed, as trtopt build {path} makes: {instead}")
    if path.suffix == ".json":
        alone = read_manifest(path)
        return _described(path, int(alone.plan["bytes"]), "", alone, "the manifest alone: no plan was looked at")
    manifest, plan = load_manifest(path), whole(path, None)
    origin = plan_origin(plan)
    maker = str(origin) if origin else ""
    if manifest is not None:
        manifest.check_plan(path, hashlib.sha256(plan).hexdigest())
        return _described(path, len(plan), maker, manifest)
    if origin is None:
        raise EngineError(f"{path} isn't a TensorRT plan: {_instead(path, plan)}")
    check_maker(plan, origin.product, origin.version, str(path))  # cut off?
    notes = ["no manifest beside the plan: how it was made isn't known, and its layers aren't read"]
    if not origin.compatible and origin.product == "TensorRT":
        notes.append("whether it is version-compatible isn't known: it doesn't carry the lean runtime")
    memory = {"plan": len(plan)}
    return EngineReport(
        path, len(plan), maker, runs_on(origin), None, {}, "layers not read", memory=memory, notes=tuple(notes)
    )


def _instead(path: Path, start: bytes) -> str:
    """Say what a file is that has neither a plan's header nor a manifest."""
    length, name = int.from_bytes(start[:4], "little"), quote(str(path))
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return "it is a pointer of Git LFS, and the file itself wasn't downloaded: git lfs pull"
    if start[4:5] == b"{" and 0 < length < 1 << 20:
        target = quote(str(path.with_suffix(".plan.engine")))
        return f"{length} bytes of Ultralytics' JSON come before it: tail -c +{length + 5} {name} > {target}"
    return "its header isn't one, and there is no manifest beside it (an ONNX model's name ends in .onnx)"


def _described(path: Path, nbytes: int, maker: str, manifest: Manifest, *notes: str) -> EngineReport:
    """Return what a manifest says."""
    origin, layers = manifest.origin, (manifest.precision, manifest.precision_summary, manifest.layers)
    memory = {"plan": nbytes, "workspace_limit": manifest.spec.get("workspace"), "scratch": manifest.scratch}
    return EngineReport(path, nbytes, maker or str(origin), runs_on(origin), manifest, *layers, memory, notes)


@dataclass(frozen=True)
class VersionReport(Plain):
    """Versions of trtopt and of what it can use here.

    Attributes:
        plugins: TensorRT → those in its registry; None: they weren't asked for.
        extension: its C extension is built; without it calibration counts more slowly and threads share a GPU worse.
    """

    trtopt: str
    python: str
    platform: str
    gpu: str
    generations: Sequence[Mapping[str, Any]]
    libraries: Mapping[str, str | None]
    extension: bool
    plugins: Mapping[str, Sequence[Creator]] | None = None


@taking(VersionRequest, writes=False)
def version(request: VersionRequest) -> VersionReport:
    """Say what is installed: trtopt, the TensorRT generations, the GPU, and the libraries that matter.

    Args:
        plugins: also what each TensorRT has in its plugin registry, with the user's own of $TRTOPT_PLUGINS.

    Raises:
        UsageError: such a library can't be loaded.
    """
    gpu, found = probe(), loaders()
    return VersionReport(
        trtopt=__version__,
        python=sys.version.split()[0],
        platform=platform.platform(),
        gpu=", ".join(map(str, gpu.devices)) or f"none ({gpu.reason})",
        generations=[generation.describe() for generation in found],
        plugins={str(item): item.creators() for item in found} if request.plugins else None,
        libraries={name: package_version(name) for name in _LIBRARIES},
        extension=native.run is not None,
    )
