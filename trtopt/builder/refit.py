"""Other weights in an engine built with `refit=True` or `strip=True`: `trtopt.refit`, and what `Session(weights=)` does.

The model goes through the very steps of the build, with the options that the engine's manifest has: folded, quantized, lowered.
Only then are its weights put in, so they are what a build of the same model would have given TensorRT.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from trtopt.builder.lowering import lower
from trtopt.builder.plan import BuildPlan, plan_build, with_scales
from trtopt.builder.request import BuildRequest, RefitRequest
from trtopt.core.documents import plain
from trtopt.core.errors import DeviceError, EngineMismatch, UnsupportedRequest, UsageError
from trtopt.core.files import check_ending, existing_file, json_bytes, whole, writing_together
from trtopt.core.options import taking
from trtopt.core.temporary import scratch
from trtopt.core.values import parse_targets
from trtopt.core.version import __version__
from trtopt.engine.manifest import Manifest, described_spec, load_manifest, manifest_path
from trtopt.graph.io import load_model, save_model
from trtopt.graph.prepare import holds_scales
from trtopt.graph.proto import all_nodes, dtype_name, tensor_chunks
from trtopt.ort.folding import proven
from trtopt.trt import select
from trtopt.trt.plans import host_code_refused
from trtopt.trt.refitting import refit_plan

_WHOLE = {"INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "BOOL", "STRING"}  # types of shapes, axes and masks
_ROUNDING = ("QuantizeLinear", "DequantizeLinear")
_SIZING = ("Resize", "Upsample")  # whose numbers are no weights


@dataclass(frozen=True)
class RefitResult:
    """The result of `refit`.

    Attributes:
        weights: how many weights of the engine were given.
        seconds: wall-clock time of all of it; `built_seconds`: of the build of the engine that was refitted.
    """

    engine: Path
    manifest: Path
    weights: int
    seconds: float
    built_seconds: float

    def to_json(self) -> dict[str, Any]:
        return dict(plain(replace(self, seconds=round(self.seconds, 3))))


@taking(RefitRequest)
def refit(request: RefitRequest) -> RefitResult:
    """Put a model's weights into an engine, in seconds instead of a build.

        trtopt.refit("net.engine", "tuned.onnx", "tuned.engine")

    What is written is a full plan and its manifest; it can be refitted again where the engine was built with `refit=True`. One
    that was built with `strip=True` alone takes the weights that it was built from, and no others. `calib` is the table with
    the scales of an INT8 or FP8 engine; with another than at the build the scales are replaced, too.

    Raises:
        UsageError: no such file, no manifest, or `calib` is missing.
        UnsupportedRequest: the engine takes no other weights, or not all of these.
        EngineMismatch: the model's graph isn't the engine's, or the engine is another TensorRT's.
        DeviceError: there is no GPU.
        EngineError, ModelError, CalibrationError, OutputError: as `trtopt.build` and `Session`.
    """
    start = time.monotonic()
    check_ending(request.output, (".onnx",), "an engine", "an ONNX model", ".engine")
    engine, output = existing_file(request.engine, "the engine"), Path(request.output)
    if (manifest := load_manifest(engine)) is None:
        raise UsageError(
            f"{engine} has no manifest ({manifest_path(engine)}), which says how its weights were made: refit an engine of "
            "trtopt build with `refit=True`"
        )
    plan, new, weights = refitted_plan(whole(engine, None), manifest, request)
    seconds = time.monotonic() - start
    with writing_together(output, manifest_path(output)) as (partial, partial_manifest):
        partial.write_bytes(plan)
        partial_manifest.write_bytes(json_bytes(asdict(replace(new, seconds=round(seconds, 3)))))
    return RefitResult(output, manifest_path(output), weights, seconds, manifest.seconds)


def refitted_plan(plan: bytes, manifest: Manifest, request: RefitRequest) -> tuple[memoryview, Manifest, int]:
    """Return the plan `request.engine`, which the manifest describes, with the weights of its model; the manifest for that, and
    how many weights were given. Raises as `refit`."""
    engine, reporter = Path(request.engine), request.reporter
    spec, family = manifest.spec, manifest.generation["family"]
    if not (spec.get("strip") or spec.get("refit")) or manifest.structure is None:
        raise UnsupportedRequest(
            f"{engine} can't take other weights", ["it wasn't built for that: build it again with `refit=True`"]
        )
    generation = select("rtx" if family == "rtx" else "tensorrt")
    if not (gpu := generation.gpu()):
        raise DeviceError(f"refitting {engine} needs an NVIDIA GPU: {gpu.reason}; run it where the engine runs")
    if generation.family != family or generation.unread(manifest.origin):
        raise EngineMismatch(f"{engine} was built by {manifest.origin}, here is {generation}: refit it where that is")
    if manifest.origin.carries and not request.trust_host_code:
        raise host_code_refused(engine.name)
    manifest.check_plan(engine, hashlib.sha256(plan).hexdigest())
    build = _planned(manifest, request)
    with reporter.phase("preparing the weights"):
        graph = _lowered(build, manifest)
    name = str(os.fspath(request.model))
    if difference := _difference(manifest.structure, structure(graph)):
        raise EngineMismatch(
            f"the graph of {name} isn't the one that {engine} was built from: {difference}; build an engine of it"
        )
    same_scales = (build.table and build.table.digest) == (manifest.calibration or {}).get("digest")
    same = same_scales and build.model.fingerprint == manifest.source["sha256"]
    if not spec.get("refit") and not same:
        content = f"content {str(manifest.source['sha256'])[:16]}…; this is {build.model.fingerprint[:16]}…"
        why = (
            f"built with `strip=True` alone it takes only those of {manifest.source['path']} ({content}), with the same "
            "`calib=`: build it with `refit=True` too"
        )
        raise UnsupportedRequest(f"{engine} can't take the weights of {name}", [why])
    with scratch() as folder, reporter.phase(f"refitting with {generation}"):
        save_model(graph, path := folder / "model.onnx")
        new_plan, count = refit_plan(
            generation,
            plan,
            path,
            build.spec,
            name=engine.name,
            unchanged=same,
            same_scales=same_scales,
            host_code=request.trust_host_code,
        )
    # These were of the old weights.
    unseen = replace(manifest, graph=None, graph_file=None, comparison=None, certificate=None)
    new = replace(
        unseen,
        spec={**spec, "strip": False},
        source={"path": str(build.model.path), "sha256": build.model.fingerprint},
        plan={"sha256": hashlib.sha256(new_plan).hexdigest(), "bytes": memoryview(new_plan).nbytes},
        calibration=manifest.calibration if same_scales or build.table is None else build.table.summary,
        structure=manifest.structure if spec.get("refit") else None,
        key="",  # a build of that model makes the engine anew
        trtopt=__version__,
    )
    return new_plan, new, count


def structure(graph: ModelProto) -> list[str]:
    """List what of a lowered graph refitting can't change: inputs, nodes, names and shapes of weights, and other values."""
    nodes = list(all_nodes(graph.graph))
    scales = {name for node in nodes if node.op_type in _ROUNDING for name in node.input[1:]}
    sizing = {name for node in nodes if node.op_type in _SIZING for name in node.input[1:]}
    lines = [
        f"input {item.name} {_digest(item.type.SerializeToString(deterministic=True))}" for item in graph.graph.input
    ]
    for node in graph.graph.node:
        bare = type(node)()
        bare.CopyFrom(node)
        bare.ClearField("doc_string")
        bare.ClearField("metadata_props")
        lines.append(f"node {node.name} ({node.op_type}) {_digest(bare.SerializeToString(deterministic=True))}")
    for tensor in graph.graph.initializer:
        lone = math.prod(tensor.dims) <= 1 and tensor.name not in scales
        fixed = lone or tensor.name in sizing or TensorProto.DataType.Name(tensor.data_type) in _WHOLE
        shape = "x".join(map(str, tensor.dims)) or "scalar"
        value = f" = {_digest(*tensor_chunks(tensor))}" if fixed else ""
        lines.append(
            f"{'constant' if fixed else 'weight'} {tensor.name}: {dtype_name(tensor.data_type)} {shape}{value}"
        )
    return lines


def _digest(*parts: bytes | memoryview) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def _difference(engine: Sequence[str], model: Sequence[str]) -> str:
    """Say the first thing in which two structures differ; empty: in nothing."""
    texts = [
        f"only {whose} has {next(line for line in mine if line not in {*theirs})}"
        for whose, mine, theirs in (("the engine's", engine, model), ("the model's", model, engine))
        if not {*mine} <= {*theirs}
    ]
    return "; ".join(texts) or ("" if list(engine) == list(model) else "the same nodes stand in another order")


def _planned(manifest: Manifest, request: RefitRequest) -> BuildPlan:
    """Plan the build that the engine's manifest tells of, for another model."""
    spec, engine = described_spec(manifest.spec), request.engine
    if spec.precision.quantized:
        if spec.calibrator == "native":
            why = "its scales stand beside its graph, where no weights can be put in: build it anew of the new model"
            raise UnsupportedRequest(f"{engine} can't take other weights", [why])
        if request.calib is None and not holds_scales(load_model(request.model)):
            raise UsageError(
                f"{engine} is {spec.precision.upper()}, and its scales aren't in its manifest: give the table that it was "
                "built with as `calib='T.calib.json'`, or one calibrated on the new model"
            )
    backend = "rtx" if manifest.generation["family"] == "rtx" else "tensorrt"
    spec = replace(spec, targets=parse_targets(manifest.targets), device=request.device, backend=backend)
    asked = BuildRequest(
        request.model,
        engine,
        calib=request.calib,
        preprocess=None if manifest.embedded is None else manifest.embedded["preprocess"],
        precision_override=[f"{item.pattern}={item.precision}" for item in spec.overrides],
        backend=backend,
        reporter=request.reporter,
    )
    return with_scales(plan_build(asked, spec))


def _lowered(build: BuildPlan, manifest: Manifest) -> ModelProto:
    """The graph that TensorRT would be given, with what the build found of its nodes: it isn't measured again."""
    folded = proven(build.model, profiles=build.spec.profiles, reporter=build.request.reporter)
    measured: Mapping[str, str] = (manifest.safety or {}).get("in_fp32", {})
    # In INT8 or FP8, what the build kept out of it.
    left_out = {item["node"]: item["reason"] for item in manifest.kept} if build.spec.precision.quantized else {}
    return lower(
        folded.proto,
        build.spec,
        build.generation,
        build.table,
        unquantized=left_out,
        embedded=build.embedded,
        measured=measured,
    ).proto
