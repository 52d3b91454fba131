"""One engine: planned, executed and written, or taken from the store.

plan = plan_build(request)  # all refusals
plan = with_scales(plan)  # calibrate
manifest = built(plan)  # execute: lower, build, judge, with at most one repair; write
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from trtopt.builder.execute import execute
from trtopt.builder.plan import BuildPlan, plan_build, with_scales
from trtopt.builder.refit import structure
from trtopt.builder.request import BuildRequest
from trtopt.calibration.table import Table
from trtopt.core.documents import Damaged, converted, plain
from trtopt.core.errors import OutputError, TrtoptError
from trtopt.core.files import json_bytes, sha256_file, sha256_json, write_bytes, writing_together
from trtopt.core.options import taking
from trtopt.core.temporary import scratch
from trtopt.core.values import Kept, TensorInfo
from trtopt.core.version import __version__
from trtopt.engine.manifest import Manifest, beside, load_manifest, manifest_path, precision_summary
from trtopt.engine.store import GRAPH, PLAN, Entry, Store, named_store
from trtopt.graph.io import load_model, save_model
from trtopt.graph.prepare import taken
from trtopt.graph.proto import custom_nodes, fingerprint, tensor_info

MEASURED = "by what the samples show"


@dataclass(frozen=True)
class BuildResult:
    """The result of `build`.

    Attributes:
        precision: counts of the layers that do the arithmetic, as the engine reports them; precision_summary: in a line.
        coverage: precision → share of the multiply-accumulates of convolutions and matrix products that run in it.
        targets: compute capabilities it is for ("sm89"); empty: the GPU it was built on.
        cached: the engine was up to date, or in the store, and wasn't built again.
        kept: nodes that stay in a higher precision than asked for, with the reason.
        onnx: the graph that TensorRT was given, where it was asked for.
        table: the calibration it was quantized with.
        comparison: how it compares with FP16 on this GPU (`Comparison.describe()`); None for a build that isn't quantized, and
            where nothing could be measured: `not_measured` says why.
        tuning: what was chosen for the limit that was given (`trtopt.Tuning`); None: there was none.
        certificate: what `certify` found (`Certificate.describe()`); None: it wasn't asked for.
        healing: a `Trial` of each build that `heal=True` made: as asked and, where that wasn't right, with cures.
        safety: what the samples say of the model in FP16 or BF16 (`Safety.describe()`); None: there were none.
    """

    engine: Path
    manifest: Path
    precision: Mapping[str, int]
    precision_summary: str
    seconds: float
    cached: bool
    targets: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    warnings: tuple[str, ...] = ()
    onnx: Path | None = None
    table: Table | None = None
    comparison: Mapping[str, Any] | None = None
    not_measured: str = ""
    coverage: Mapping[str, float] = field(default_factory=dict)
    tuning: Any = None
    safety: Mapping[str, Any] | None = None
    certificate: Mapping[str, Any] | None = None
    healing: Sequence[Any] | None = None

    @property
    def ok(self) -> bool:
        """Return whether the engine is right, as far as that was asked for."""
        return self.certificate is None or bool(self.certificate["ok"])

    def to_json(self) -> dict[str, Any]:
        description = plain(replace(self, table=None, tuning=None, seconds=round(self.seconds, 3)))
        del description["table"]
        tuning = None if self.tuning is None else self.tuning.to_json()
        return {**description, "calibration": self.table and self.table.summary, "tuning": tuning}


def construct(request: BuildRequest) -> BuildResult:
    """Build one TensorRT engine: `output` (a plain plan) and `output`.json (its manifest).

    This is `trtopt.build` without measuring anything; arguments and errors are described there.
    """
    start, where, reporter = time.monotonic(), named_store(request.store), request.reporter
    plan = with_scales(plan_build(request))
    if not request.force and (manifest := up_to_date(plan)):
        reporter.note(f"{plan.output} is up to date")
        return _result(plan, update_metadata(plan, manifest), time.monotonic() - start, cached=True)
    if where is not None and request.save_cache:
        reporter.note("`save_cache=` needs TensorRT's own calibration, so the store isn't asked")
        where = None
    manifest, cached = (built(plan), False) if where is None else _get_or_build(plan, Store(where))
    return _result(plan, manifest, time.monotonic() - start, cached=cached)


build = taking(BuildRequest)(construct)  # by keywords


def stored_engine(request: BuildRequest, store: Store) -> Entry:
    """Return the engine in the store, built if it isn't there; `output` stays unwritten. Raises as `trtopt.build`."""
    return _stored(with_scales(plan_build(request)), store)[0]


def _stored(plan: BuildPlan, store: Store) -> tuple[Entry, bool]:
    """Return the entry of a build, and whether it was there: of those that ask at once one builds."""
    request, digest = plan.request, sha256_json(plan.store_parts)
    if not request.force and (entry := store.find(digest)):
        return entry, True
    with store.building(digest, request.reporter), scratch() as folder:
        if not request.force and (entry := store.find(digest)):
            return entry, True
        inside = replace(request, output=folder / PLAN, save_onnx=folder / GRAPH if request.save_onnx else None)
        built(replace(plan, request=inside))
        return store.add(plan.store_parts, folder.iterdir(), request.reporter), False


def _get_or_build(plan: BuildPlan, store: Store) -> tuple[Manifest, bool]:
    """Write the engine to `output`; return its manifest and whether it came from the store."""
    reporter = plan.request.reporter
    for _ in range(2):
        try:
            entry, cached = _stored(plan, store)
        except OutputError as error:  # such as a folder that others write, and that we may read
            reporter.warn(f"the engine will not be in the store: {error.problem}")
            break
        try:
            return copy_entry(plan, store, entry), cached
        except Damaged as error:
            reporter.warn(f"the store's engine {entry.digest[:12]} is damaged and is built again: {error}")
            with contextlib.suppress(OutputError):
                store.remove(entry.digest)
    return built(plan), False


def _result(plan: BuildPlan, manifest: Manifest, seconds: float, *, cached: bool) -> BuildResult:
    same = {name: getattr(manifest, name) for name in ("precision", "precision_summary", "coverage", "safety")}
    return BuildResult(
        engine=plan.output,
        manifest=manifest_path(plan.output),
        **same,
        seconds=seconds,
        cached=cached,
        targets=tuple(manifest.targets),
        kept=converted(list(manifest.kept), tuple[Kept, ...]),
        warnings=tuple(manifest.warnings),
        onnx=Path(plan.request.save_onnx) if plan.request.save_onnx else None,
        table=plan.table,
    )


def built(plan: BuildPlan) -> Manifest:
    """Build, and write the plan, the manifest that vouches for it, and the graph if it is to be kept: all, or none."""
    start = time.monotonic()
    spec, lowered, engine, report, safety = execute(plan)
    seconds = round(time.monotonic() - start, 3)
    unsafe = {} if safety is None else safety.in_fp32
    graph, cache = plan.request.save_onnx, plan.request.save_cache
    kept_nodes = [replace(item, reason=MEASURED) if item.node in unsafe else item for item in lowered.kept]
    counts, summary = precision_summary(engine.layers, kept_nodes, engine.unread or report.hidden, lowered.weights)
    generation, device = plan.generation, plan.generation.device(plan.spec)
    embedded, (inputs, profiles) = plan.embedded, plan.engine_interface()
    own = {info.name for info in plan.model.outputs}
    marked = [tensor_info(value) for value in lowered.proto.graph.output if value.name not in own]
    manifest = Manifest(
        generation={name: getattr(generation, name) for name in ("family", "product", "version")}
        | {"gpu": str(device) if device else None},
        targets=[f"sm{target}" for target in engine.targets],
        spec=spec.describe(),
        precision=counts,
        precision_summary=summary,
        coverage={str(item): round(share, 6) for item, share in report.coverage.items()},
        layers=plain(engine.layers),
        kept=plain(lowered.kept),
        inputs=list(map(_tensor, inputs)),
        outputs=list(map(_tensor, (*plan.model.outputs, *marked))),
        profiles=replace(plan.spec, profiles=profiles).describe()["profiles"],
        source={"path": str(plan.model.path) if plan.model.path else None, "sha256": plan.model.fingerprint},
        plan={"sha256": hashlib.sha256(engine.plan).hexdigest(), "bytes": memoryview(engine.plan).nbytes},
        key=plan.key,
        seconds=seconds,
        trtopt=__version__,
        preprocess=plan.preprocessing if embedded is None else embedded.outside.describe(),
        embedded=None if embedded is None else embedded.describe(),
        calibration=plan.table.summary if plan.table else None,
        warnings=[*([str(given)] if (given := taken(plan.model)).changes else []), *engine.warnings],
        graph=fingerprint(lowered.proto) if graph else None,
        classes=plan.classes,
        output_kinds=plan.kinds(plan.classes),
        safety=None if safety is None else safety.describe(),
        scratch=engine.scratch,
        structure=structure(lowered.proto) if plan.spec.strip or plan.spec.refit else None,
        plugins=_plugins(plan, lowered.proto),
        compute_capabilities=list(engine.targets) or ([device.compute_capability] if device else []),
    )
    with writing_engine(plan.request, manifest, lowered.proto) as partial:
        partial.write_bytes(engine.plan)
        if cache and engine.native_cache is not None:
            write_bytes(cache, engine.native_cache)
    return manifest


@contextlib.contextmanager
def writing_engine(request: BuildRequest, manifest: Manifest, graph: onnx.ModelProto | None) -> Iterator[Path]:
    """Yield where to write the plan of `request.output`. It, its manifest and its graph, if that is to be kept, are on the disk
    when the first of them takes its name: a full disk leaves what was there before."""
    output, place = Path(request.output), request.save_onnx
    manifest = replace(manifest, graph_file=beside(output, place) if place else None)
    if place and manifest.graph_file is None:
        request.reporter.warn(
            f"{os.fspath(place)} isn't in the folder of {output} or below it, so the manifest doesn't name it: "
            "`backend='onnxruntime'` won't find it"
        )
    with writing_together(output, manifest_path(output)) as (plan, partial_manifest):
        yield plan
        partial_manifest.write_bytes(json_bytes(asdict(manifest)))
        if place and graph is not None:
            save_model(graph, place)


def up_to_date(plan: BuildPlan) -> Manifest | None:
    """The manifest of the engine at `output`, if a build now would make the same one."""
    cache, graph = plan.request.save_cache, plan.request.save_onnx
    if not plan.output.is_file() or (cache and not Path(cache).is_file()):
        return None
    with contextlib.suppress(TrtoptError):  # unreadable: build again
        manifest = load_manifest(plan.output)
        if manifest is None or manifest.key != plan.key or sha256_file(plan.output) != manifest.plan["sha256"]:
            return None
        graph_kept = not graph or (Path(graph).is_file() and load_model(graph).fingerprint == manifest.graph)
        return manifest if graph_kept else None
    return None


def update_metadata(plan: BuildPlan, manifest: Manifest) -> Manifest:
    """Return the manifest with the class names given now, if any, and the kinds of outputs: no plan depends on them."""
    classes = manifest.classes if plan.classes is None else list(plan.classes)
    new_manifest = replace(manifest, classes=classes, output_kinds=plan.kinds(classes))
    if new_manifest != manifest:
        kinds = ", ".join(f"{name}={kind}" for name, kind in (new_manifest.output_kinds or {}).items())
        path = new_manifest.save(plan.output)
        plan.request.reporter.note(f"{path} has {len(classes or ())} class names now, and kinds of outputs: {kinds}")
    return new_manifest


def copy_entry(plan: BuildPlan, store: Store, entry: Entry) -> Manifest:
    """Copy an entry to `output`, with what this request says of it; Damaged if the entry is."""
    source = plan.model.path
    try:
        entry.check(*(name for name in entry.files if name != PLAN))
        entry_manifest = load_manifest(entry.plan)
    except TrtoptError as error:
        raise Damaged(str(error)) from None
    if entry_manifest is None:
        raise Damaged("it has no manifest")
    manifest = replace(
        entry_manifest,
        source={**entry_manifest.source, "path": str(source) if source else None},
        classes=plan.classes,
        output_kinds=plan.kinds(plan.classes),
    )
    graph = load_model(entry.folder / GRAPH).proto if plan.request.save_onnx else None
    with writing_engine(plan.request, manifest, graph) as partial:
        entry.copy(PLAN, partial)
    plan.request.reporter.note(f"{plan.output} is the engine {entry.digest[:12]} of {store}")
    return manifest


def _plugins(plan: BuildPlan, graph: onnx.ModelProto) -> list[dict[str, Any]]:
    """Describe the user's libraries that a graph's plan needs; those of which it isn't known, too."""
    used = {node.op_type for node in custom_nodes(graph)}
    return [
        {"library": item.path.name, "sha256": item.sha256, "creators": names}
        for item in plan.generation.libraries
        if (names := sorted({name for name, *_ in item.creators} & used)) or (used and not item.creators)
    ]


def _tensor(info: TensorInfo) -> dict[str, Any]:
    """Describe a tensor for the manifest: where samples lie stands there if they don't lie first."""
    return {name: value for name, value in plain(info).items() if (name, value) != ("batch_axis", 0)}
