"""The manifest beside a plan: what was asked, what the engine really runs, and what it was made from.

A plan file is a plain TensorRT plan; `model.engine.json` beside `model.engine` says the rest. A plan without one still
loads; a plan that doesn't match its manifest doesn't.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from trtopt.core.documents import (
    AnyText,
    Count,
    Damaged,
    Digest,
    Duration,
    Name,
    Positive,
    Share,
    TypeName,
    checked,
    converted,
    one_of,
    parsed,
    read_json,
    spelled,
)
from trtopt.core.errors import EngineError, EngineMismatch, TrtoptError
from trtopt.core.files import existing_file, sha256_file, write_json
from trtopt.core.values import (
    BACKENDS,
    CALIBRATORS,
    HARDWARE_LEVELS,
    Kept,
    Kind,
    LayerInfo,
    Override,
    Precision,
    Profile,
    ShapeRange,
    parse_targets,
)
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.trt.compatibility import PlanOrigin

FORMAT = "trtopt.engine/1"
HEAVY = {"convolution": "convolutions", "deconvolution": "deconvolutions", "matmul": "matrix products"}
REASONS = re.compile(
    r"; (?=\d+ (?:nodes? kept in higher precision|more reasons? in the manifest))"
)  # behind the counts of a precision summary
WITHOUT_GRAPH = "take it along where the engine is copied or moved to, or build again with `save_onnx=`"


def manifest_path(engine: str | os.PathLike[str]) -> Path:
    path = Path(engine)
    return path.with_name(f"{path.name}.json")


def precision_summary(
    layers: Sequence[LayerInfo], kept: Sequence[Kept], unknown: str = ""
) -> tuple[dict[str, int], str]:
    """Summarize what an engine computes in: how many layers in which precision, and a line that says it.

    Layers are those that do the arithmetic (convolutions, deconvolutions, matrix products), as the engine itself reports them.

    Args:
        unknown: why some or all of the layers aren't known.
    """
    heavy = [layer for layer in layers if layer.kind in HEAVY]
    found = Counter(str(layer.precision) for layer in heavy)
    counts = {name: found[name] for name in ("int8", "fp16", "fp32")}
    counts |= {name: found[name] for name in ("bf16", "fp8") if found[name]}
    counts["total"] = len(heavy)
    if not layers and unknown:
        return counts, f"the engine's layers can't be read: {unknown}"
    parts = []
    for kind, plural in HEAVY.items():
        each = Counter(layer.precision.upper() for layer in heavy if layer.kind == kind).most_common()
        total = sum(count for _, count in each)
        named = [
            f"{count} of {total} {'' if index else f'{plural} '}{name}" for index, (name, count) in enumerate(each)
        ]
        if named:
            parts.append(", ".join(named))
    if not heavy:
        parts.append("no convolution or matrix product in this engine")
        kept = ()
    reasons: dict[str, list[str]] = {}
    for item in (item for item in kept if not item.precision.quantized):
        reasons.setdefault(item.reason, []).append(item.node)
    for reason, nodes in sorted(reasons.items(), key=lambda entry: -len(entry[1]))[:3]:
        several = len(nodes) > 1
        parts.append(
            f"{len(nodes)} node{'s' * several} kept in higher precision ({nodes[0]}{', …' * several}): {reason}"
        )
    if (more := len(reasons) - 3) > 0:
        parts.append(f"{more} more reason{'s' * (more > 1)} in the manifest")
    return counts, "; ".join([*parts, *filter(None, [unknown])])


def arithmetic(coverage: Mapping[str, float]) -> str:
    """A line on where the multiply-accumulates run; empty where all of them run in one precision, or nothing is known."""
    shares = sorted(coverage.items(), key=lambda item: -item[1])
    if len(shares) < 2:
        return ""
    digits = next((digits for digits in (1, 2) if round(shares[-1][1], digits + 2)), 4)
    others = [round(100 * share, digits) for _, share in shares[1:]]
    percents = zip((100 - sum(others), *others), shares)
    return "of the arithmetic, " + ", ".join(f"{part:.{digits}f}% {name.upper()}" for part, (name, _) in percents)


def lost_precision(layers: Iterable[LayerInfo], asked: Mapping[str, Precision]) -> dict[str, Precision]:
    """Nodes (name → precision they run in) whose layers don't compute in the precision asked for.

    A node that no layer names was fused away or renamed; it counts as neither found nor lost.
    """
    seen: dict[str, list[Precision]] = {}
    for layer in layers:
        if layer.kind in HEAVY:
            for node in layer.nodes:
                if node in asked:
                    seen.setdefault(node, []).append(layer.precision)
    return {node: found[0] for node, found in seen.items() if asked[node] not in found}


# The kinds of values that stand in a manifest, each with what it may be.
_Precision = Annotated[str, one_of([str(item) for item in Precision])]
_Counted = Annotated[str, one_of([*map(str, Precision), "total"])]
_Version = Annotated[str, spelled("a version such as 10.16.1", r"\d+(\.\w+)*([.+-]\w+)*")]
_Capability = Annotated[int, Meta(ge=10, le=999)]
_Shapes = Mapping[Name, str]  # input → MIN,OPT,MAX
_Size = Annotated[int, Meta(ge=-1)] | Name  # of a dimension


class _Maker(TypedDict):
    family: Name
    product: Name
    version: _Version
    gpu: Name | None


class _Computing(TypedDict):
    precision: _Precision


class _Asked(_Computing, total=False):
    """`BuildSpec.describe()`."""

    remainder: _Precision
    io_fp32: bool
    embed_preprocess: bool
    overrides: Sequence[str]
    profiles: Sequence[_Shapes]
    targets: Sequence[str]
    backend: Annotated[str, one_of(BACKENDS)]
    calibrator: Annotated[str, one_of(CALIBRATORS)]
    workspace: Positive | None
    optimization_level: Annotated[int, Meta(ge=0, le=5)] | None
    timing_cache: Name | None
    hardware_compatibility: Annotated[str, one_of(HARDWARE_LEVELS)]
    version_compatible: bool
    exclude_lean_runtime: bool
    strip: bool
    refit: bool
    sparsity: bool
    tf32: bool
    allow_precision_fallback: bool


class _Kept(_Computing):
    """`Kept`."""

    node: Name
    op: AnyText
    reason: Name


class _Kernel(TypedDict, total=False):
    reads: Sequence[AnyText]
    writes: Sequence[AnyText]
    tactic: AnyText


class _Layer(_Computing, _Kernel):
    """`LayerInfo`."""

    name: Name
    kind: Annotated[str, one_of([*HEAVY, "other"])]
    nodes: Sequence[Name]


class _Batched(TypedDict, total=False):
    batch_axis: Count | None


class _Tensor(_Batched):
    """`TensorInfo`."""

    name: Name
    dtype: TypeName
    shape: Sequence[_Size]


class _Source(TypedDict):
    path: Name | None
    sha256: Digest


class _Plan(TypedDict):
    sha256: Digest
    bytes: Positive


@dataclass(frozen=True)
class _Calibration:
    method: Name
    samples: Count
    digest: AnyText = ""


class _Embedded(TypedDict):
    input: Name
    preprocess: Mapping[str, Any]


class _Safety(TypedDict):
    base: _Precision
    samples: Count
    in_fp32: Mapping[Name, Name]


class _Compared(TypedDict):
    why: Name
    gpu: Name


_PARTS: dict[str, Any] = {  # of a manifest, which stay plain mappings
    "generation": _Maker,
    "spec": _Asked,
    "layers": list[_Layer],
    "kept": list[_Kept],
    "inputs": list[_Tensor],
    "outputs": list[_Tensor],
    "source": _Source,
    "plan": _Plan,
    "embedded": _Embedded,
    "calibration": _Calibration,
    "comparison": _Compared,
    "output_kinds": dict[Name, Kind],
    "safety": _Safety,
}


@dataclass(frozen=True)
class Manifest:
    """All that is known about a plan; every field is plain JSON.

    A manifest with a value of another kind than is written here, or one that isn't allowed, is refused by that
    value's place. Two things are passed over: names that aren't known here, as a newer trtopt may write them; and what is
    within `comparison`, `why` and `gpu` aside: one that can't be read counts as none, so that the engines are measured again.

    Attributes:
        generation: family, product and version that built it, the GPU it was built on or None.
        targets: compute capabilities it is for ("sm89"); empty: the GPU it was built on.
        compute_capabilities: the same as numbers (89), the GPU's it was built on where there are no targets; empty: not known.
        spec: the request (`BuildSpec.describe()`).
        precision, precision_summary: counts of layers, and the line that says them; layers: they themselves.
        kept: nodes that stay in a higher precision, or are in FP8 beside INT8, and why.
        inputs, outputs: of the engine: name, dtype and shape (-1 or the dimension's name where dynamic).
        profiles: input name → "min,opt,max", one entry a profile.
        preprocess: how an image becomes the engine's input; None where unknown.
        embedded: what the engine does of the preprocessing itself (`Embedded.describe()`): the input that takes pixels, to
            which `preprocess` then brings an image, and how an image becomes the model's own input; None: nothing.
        source: the ONNX model (path, sha256 of its content); calibration: the table's own summary, None without one.
        graph: content hash of the graph that TensorRT was given, where it was kept (`save_onnx`).
        graph_file: that graph's file, in the plan's folder or below it; None where it was kept elsewhere.
        classes: names of the classes that the outputs score, in order; None where not given.
        output_kinds: output name → what it holds ("classes", "embedding", …); None: written before there were kinds.
        comparison: how fast and how accurate the precisions are, and which was kept (`Comparison.describe()`); None where
            they weren't measured.
        coverage: precision → share of the multiply-accumulates that run in it.
        safety: what samples say of the model in FP16 or BF16 (`Safety.describe()`); None: it was built without.
        scratch: bytes of GPU memory that a context needs for activations; None: not known, as where no GPU was at the build.
        structure: of a plan that takes other weights, what of the graph that TensorRT was given they must leave as it is; else
            None.
        plan: sha256 and bytes of the plan file.  key: what a rebuild compares to know that nothing changed.
    """

    generation: Mapping[str, Any]
    targets: Sequence[str]
    spec: Mapping[str, Any]
    precision: Mapping[_Counted, Count]
    precision_summary: Name
    layers: Sequence[Mapping[str, Any]]
    kept: Sequence[Mapping[str, Any]]
    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    profiles: Sequence[_Shapes]
    source: Mapping[str, Any]
    plan: Mapping[str, Any]
    key: AnyText  # only compared: another one means that a build makes the engine again
    seconds: Duration
    trtopt: Name
    preprocess: Mapping[str, Any] | None = None
    embedded: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    warnings: Sequence[Name] = ()
    graph: Digest | None = None
    graph_file: Name | None = None
    classes: Annotated[Sequence[Name], Meta(min_length=1)] | None = None
    comparison: Mapping[str, Any] | None = None
    coverage: Mapping[_Precision, Share] = field(default_factory=dict)
    output_kinds: Mapping[str, str] | None = None
    compute_capabilities: Sequence[_Capability] = ()
    safety: Mapping[str, Any] | None = None
    scratch: Count | None = None
    structure: Annotated[Sequence[Name], Meta(min_length=1)] | None = None
    format: AnyText = field(default=FORMAT)

    def save(self, engine: str | os.PathLike[str]) -> Path:
        path = manifest_path(engine)
        write_json(path, asdict(self))
        return path

    @property
    def model_preprocess(self) -> Mapping[str, Any] | None:
        """Preprocessing for the model's own input; None where unknown."""
        return self.preprocess if self.embedded is None else self.embedded["preprocess"]

    @property
    def ranges(self) -> tuple[Profile, ...]:
        """The shapes that each profile allows, of the inputs that aren't fixed."""
        return tuple({name: ShapeRange.parse(text) for name, text in item.items()} for item in self.profiles)

    @property
    def origin(self) -> PlanOrigin:
        """Origin of the plan, which says what runs it."""
        compatible = bool(self.spec.get("version_compatible"))
        carries = compatible and not self.spec.get("exclude_lean_runtime")
        return PlanOrigin(str(self.generation["product"]), str(self.generation["version"]), compatible, carries)

    @property
    def built_for(self) -> tuple[int, ...]:
        """Compute capabilities that it was built for, such as (89, 120); empty: not known."""
        return tuple(self.compute_capabilities) or parse_targets(self.targets)

    def check_graph(self, graph: str | os.PathLike[str], fingerprint: str) -> None:
        """Raise EngineMismatch if a graph of this content isn't the one that the engine was built from."""
        if fingerprint != self.graph:
            raise EngineMismatch(
                f"{os.fspath(graph)} has content {fingerprint[:16]}…; the engine was built from {str(self.graph)[:16]}…: build "
                "it again with `save_onnx=`"
            )

    def check_plan(self, engine: str | os.PathLike[str], digest: str | None = None) -> None:
        """Raise EngineMismatch if the plan isn't the one this manifest was written for.

        Args:
            digest: hexadecimal SHA-256 of the bytes that are used, which the file may no longer hold; None: of the file, where
                nothing else is read of it.
        """
        digest = sha256_file(engine) if digest is None else digest
        if digest != self.plan["sha256"]:
            raise EngineMismatch(
                f"{engine} isn't the plan its manifest describes: sha256 {digest[:16]}…, the manifest says "
                f"{str(self.plan['sha256'])[:16]}…; build it again, or delete {manifest_path(engine)} to use it alone"
            )


def load_manifest(engine: str | os.PathLike[str]) -> Manifest | None:
    """The manifest beside a plan, or None where there is none.

    Raises:
        UsageError: the plan itself doesn't exist.
        EngineError: the manifest can't be read, or is of a format this version doesn't know.
    """
    path = manifest_path(existing_file(engine, "the engine"))
    return read_manifest(path) if path.is_file() else None


def read_manifest(path: Path) -> Manifest:
    """A manifest's file by itself, as `load_manifest` reads it.

    Raises:
        EngineError: it can't be read, or is of a format this version doesn't know.
    """
    again = "build the engine again"
    try:
        content = read_json(path)
    except Damaged as error:
        raise EngineError(f"{path} can't be read ({error}); {again}, or delete it to use the plan alone") from error
    said = content.get("format") if isinstance(content, dict) else None
    if isinstance(said, str) and said.startswith("trtopt.calib/"):
        raise EngineError(
            f"{path} is a calibration table, which an engine is built with: trtopt build MODEL.onnx `int8=True` "
            f"`calib={str(path)!r}`"
        )
    if said != FORMAT:
        raise EngineError(f"{path} has format {said!r}, this trtopt reads {FORMAT!r}; {again}")
    try:
        for name, kind in _PARTS.items():
            if content.get(name) is not None:
                checked(content[name], kind, name)
        manifest = converted(content, Manifest)
        _check_values(manifest)
    except Damaged as error:
        raise EngineError(
            f"{path} is damaged or incomplete: {error}; {again}, or delete it to use the plan alone"
        ) from error
    return manifest


def _check_values(manifest: Manifest) -> None:
    """Raise Damaged for a value of the right type that can't be read."""
    for where, targets in (("targets", manifest.targets), ("spec.targets", manifest.spec.get("targets", ()))):
        parsed(targets, parse_targets, where)
    for text in manifest.spec.get("overrides", ()):
        parsed(text, Override.parse, "spec.overrides")
    for where, profiles in (("profiles", manifest.profiles), ("spec.profiles", manifest.spec.get("profiles", ()))):
        for number, profile in enumerate(profiles):
            for name, text in profile.items():
                parsed(text, ShapeRange.parse, f"{where}[{number}].{name}")
    if manifest.preprocess is not None:
        parsed(manifest.preprocess, Preprocess.load, "preprocess")
    if manifest.embedded is not None:
        parsed(manifest.embedded["preprocess"], Preprocess.load, "embedded.preprocess")
        names = [item["name"] for item in manifest.inputs]
        if (takes := manifest.embedded["input"]) not in names:
            raise Damaged(f"embedded.input is {takes!r}; inputs has {', '.join(names) or 'none'}")
    for where, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        for number, tensor in enumerate(tensors):
            if (axis := tensor.get("batch_axis") or 0) >= max(1, len(tensor["shape"])):
                raise Damaged(f"{where}[{number}].batch_axis is {axis}; an axis of its shape is needed")
    if (graph := manifest.graph_file) is not None and _elsewhere(graph):
        raise Damaged(f"graph_file is {graph!r}; a file in the plan's folder or below it is needed")


def embedded_by(manifest: Manifest | None) -> Embedded | None:
    """Return the part of the preprocessing that the engine does itself, as its manifest says."""
    return None if manifest is None or manifest.embedded is None else Embedded.load(manifest.embedded)


def beside(engine: Path, graph: str | os.PathLike[str]) -> str | None:
    """`graph` as the manifest of `engine` names it; None for one that isn't in the plan's folder or below it."""
    place = os.path.relpath(graph, engine.parent)
    return None if _elsewhere(place) else place


def _elsewhere(place: str) -> bool:
    path = Path(place)
    return bool(path.anchor) or ".." in path.parts


def kept_graph(engine: Path) -> Path | None:
    """The graph that was kept at an engine's build, where it still lies."""
    try:
        manifest = load_manifest(engine)
    except TrtoptError:
        return None
    graph = None if manifest is None or manifest.graph_file is None else engine.parent / manifest.graph_file
    return Path(os.path.normpath(graph)) if graph is not None and graph.is_file() else None
