"""The manifest beside a plan: what was asked, what the engine really runs, and what it was made from.

A plan file is a plain TensorRT plan; `model.engine.json` beside `model.engine` says the rest. A plan without one still
loads; a plan that doesn't match its manifest doesn't.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, defstruct

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
    COMPUTED,
    BuildSpec,
    Kept,
    Kind,
    LayerInfo,
    Override,
    Precision,
    Profile,
    ShapeRange,
    TensorInfo,
    parse_targets,
)
from trtopt.core.words import first_of, grouped
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.trt.compatibility import PlanOrigin

FORMAT = "trtopt.engine/1"
HEAVY = {"convolution": "convolutions", "deconvolution": "deconvolutions", "matmul": "matrix products"}
# Behind the counts of a precision summary.
REASONS = re.compile(r"; (?=\d+ (?:nodes? kept in higher precision|more reasons? in the manifest))")
WITHOUT_GRAPH = "take it along where the engine is copied or moved to, or build again with `save_onnx=`"


def manifest_path(engine: str | os.PathLike[str]) -> Path:
    path = Path(engine)
    return path.with_name(f"{path.name}.json")


def precision_summary(
    layers: Sequence[LayerInfo], kept: Sequence[Kept], unknown: str = "", weights: str = ""
) -> tuple[dict[str, int], str]:
    """Summarize what an engine computes in: how many layers in which precision, and a line that says it.

    Layers are those that do the arithmetic (convolutions, deconvolutions, matrix products), as the engine itself reports them.

    Args:
        unknown: why some or all of the layers aren't known.
        weights: how many are INT4 or 2:4 sparse, in words.
    """
    heavy = [layer for layer in layers if layer.kind in HEAVY]
    found = Counter(str(layer.precision) for layer in heavy)
    counts = {name: found[name] for name in ("int8", "fp16", "fp32")}
    counts |= {name: found[name] for name in ("bf16", "fp8") if found[name]}
    counts["total"] = len(heavy)
    if not layers and unknown:
        return counts, f"the engine's layers can't be read: {unknown}"
    parts = [weights] if weights else []
    for kind, plural in HEAVY.items():
        each = Counter(str(layer.precision).upper() for layer in heavy if layer.kind == kind).most_common()
        total = sum(count for _, count in each)
        named = [f"{count} of {total} {plural} {name}" for name, count in each[:1]]
        named += [f"{count} of {total} {name}" for name, count in each[1:]]
        parts += [", ".join(named)] if named else []
    if not heavy:
        parts.append("no convolution or matrix product in this engine")
        kept = ()
    reasons = grouped((item.reason, item.node) for item in kept if not item.precision.quantized)
    for reason, nodes in sorted(reasons.items(), key=lambda entry: -len(entry[1]))[:3]:
        some = f"{len(nodes)} nodes kept in higher precision ({nodes[0]}, …)"
        parts.append(f"{some if len(nodes) > 1 else f'1 node kept in higher precision ({nodes[0]})'}: {reason}")
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
    heavy = ((layer, layer.precision) for layer in layers if layer.kind in HEAVY)
    seen = grouped((node, runs) for layer, runs in heavy if runs for node in layer.nodes if node in asked)
    return {node: found[0] for node, found in seen.items() if asked[node] not in found}


# The kinds of values that stand in a manifest, each with what it may be.
_Precision = Annotated[str, one_of(COMPUTED)]
_Counted = Annotated[str, one_of([*COMPUTED, "total"])]
_Version = Annotated[str, spelled("a version such as 10.16.1", r"\d+(\.\w+)*([.+-]\w+)*")]
_Capability = Annotated[int, Meta(ge=10, le=999)]
_Shapes = Mapping[Name, str]  # input → MIN,OPT,MAX
_Size = Annotated[int, Meta(ge=-1)] | Name  # of a dimension


def _mapping(optional: Mapping[str, Any] | None = None, **needed: Any) -> type[Struct]:
    """Return the type of a mapping with these keys, `optional` or not; it may have more."""
    left_out = [(name, kind, None) for name, kind in (optional or {}).items()]
    return defstruct("_Mapping", [*needed.items(), *left_out])


_TENSOR: Any = _mapping({"batch_axis": Count | None}, name=Name, dtype=TypeName, shape=Sequence[_Size])
_PARTS: dict[str, Any] = {  # of a manifest, which stay plain mappings
    "generation": _mapping(family=Name, product=Name, version=_Version, gpu=Name | None),
    "layers": list[LayerInfo],
    "kept": list[Kept],
    "inputs": list[_TENSOR],
    "outputs": list[_TENSOR],
    "source": _mapping(path=Name | None, sha256=Digest),
    "plan": _mapping(sha256=Digest, bytes=Positive),
    "embedded": _mapping(input=Name, preprocess=Mapping[str, Any]),
    "calibration": _mapping({"digest": AnyText}, method=Name, samples=Count),
    "comparison": _mapping(why=Name, gpu=Name),
    "output_kinds": dict[Name, Kind],
    "plugins": list[_mapping(library=Name, sha256=Digest, creators=list[Name])],  # type: ignore[misc]
    "certificate": _mapping(ok=bool, ran=Name, samples=Positive, date=Name, worst_db=Mapping[Name, Any]),
    "safety": _mapping(base=_Precision, samples=Count, in_fp32=Mapping[Name, Name]),
}


@dataclass(frozen=True)
class Manifest:
    """All that is known about a plan; every field is plain JSON.

    A manifest with a value of another kind than is written here is refused by that value's place. Passed over are names that
    aren't known here, as a newer trtopt may write them, and a comparison that can't be read: engines are measured again.

    Attributes:
        generation: family, product and version that built it, the GPU it was built on or None.
        targets: compute capabilities it is for ("sm89"); compute_capabilities: as numbers, the GPU's where there are none;
            empty: not known.
        spec: the request (`BuildSpec.describe()`).
        precision, precision_summary: counts of layers, and the line that says them; layers: they themselves.
        kept: nodes that stay in a higher precision, and why; coverage: precision → share of the multiply-accumulates in it.
        inputs, outputs: of the engine; profiles: input name → "min,opt,max", one entry a profile.
        preprocess: how an image becomes the engine's input; embedded: what the engine does of it itself, if anything.
        source: the ONNX model (path, sha256 of its content); calibration: the table's own summary.
        graph, graph_file: content hash of the graph that TensorRT was given, and its file below the plan's folder, if kept.
        classes: names that the outputs score, in order; output_kinds: output name → what it holds ("classes", …).
        comparison: how fast and accurate the precisions are (`Comparison.describe()`); safety: what samples say of FP16.
        scratch: bytes of GPU memory that a context needs for activations; None: not known.
        certificate: what `certify` found of it on a GPU, at last.
        plugins: the user's libraries that the plan needs: name, sha256, and the plugins of it that are used.
        structure: of a plan that takes other weights, what of the graph they must leave as it is.
        plan: sha256 and bytes of the plan file.
        key: what a rebuild compares to know that nothing changed.
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
    plugins: Sequence[Mapping[str, Any]] = ()
    certificate: Mapping[str, Any] | None = None
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
        return _ranges(self.profiles)

    @property
    def origin(self) -> PlanOrigin:
        """Origin of the plan, which says what runs it."""
        compatible = bool(self.spec.get("version_compatible"))
        carries = compatible and not self.spec.get("exclude_lean_runtime")
        return PlanOrigin(str(self.generation["product"]), str(self.generation["version"]), compatible, carries)

    def check_graph(self, graph: str | os.PathLike[str], fingerprint: str) -> None:
        """Raise EngineMismatch if a graph of this content isn't the one that the engine was built from."""
        if fingerprint != self.graph:
            raise EngineMismatch(
                f"{os.fspath(graph)} has content {fingerprint[:16]}…; the engine was built from {str(self.graph)[:16]}…: build "
                "it again with `save_onnx=`"
            )

    def check_plugins(self, engine: str | os.PathLike[str], given: Iterable[Path]) -> tuple[Path, ...]:
        """Return the plugin libraries that the plan needs; EngineMismatch for one that isn't `given`, or is another."""
        there = {path: sha256_file(path) for path in given} if self.plugins else {}
        for item in self.plugins:
            if item["sha256"] in there.values():
                continue
            name, digest = item["library"], str(item["sha256"])
            other = next((path for path in there if path.name == name), None)
            uses = f"{engine} uses {first_of(item['creators'])} of the plugin library {name} (sha256 {digest[:16]}…)"
            if other is not None:
                raise EngineMismatch(
                    f"{uses}; {other} has {there[other][:16]}…: give the one it was built with, or build it again"
                )
            raise EngineMismatch(f"{uses}, which isn't given: `plugins={[name]!r}`, or $TRTOPT_PLUGINS")
        needed = {item["sha256"] for item in self.plugins}
        return tuple(path for path, digest in there.items() if digest in needed)

    def check_certificate(self, engine: str | os.PathLike[str]) -> None:
        """Raise EngineMismatch unless `certify` has found the engine right."""
        if self.certificate is None or not self.certificate["ok"]:
            found = "it wasn't tried" if self.certificate is None else f"{self.certificate['date']} it wasn't right"
            raise EngineMismatch(f"{engine} isn't certified: {found}; run trtopt certify MODEL.onnx {engine}")

    def check_plan(self, engine: str | os.PathLike[str], digest: str | None = None) -> None:
        """Raise EngineMismatch if the plan isn't the one this manifest was written for, by the `digest` of the bytes that are
        used, which the file may no longer hold; None: of the file, where nothing else is read of it."""
        digest = sha256_file(engine) if digest is None else digest
        if digest != self.plan["sha256"]:
            raise EngineMismatch(
                f"{engine} isn't the plan its manifest describes: sha256 {digest[:16]}…, the manifest says "
                f"{str(self.plan['sha256'])[:16]}…; build it again, or delete {manifest_path(engine)} to use it alone"
            )


def load_manifest(engine: str | os.PathLike[str]) -> Manifest | None:
    """Return the manifest beside a plan, None where there is none; UsageError: no such plan. Raises as `read_manifest`."""
    path = manifest_path(existing_file(engine, "the engine"))
    return read_manifest(path) if path.is_file() else None


def read_manifest(path: Path) -> Manifest:
    """A manifest's file by itself; EngineError where it can't be read, or is of a format this version doesn't know."""
    again = "build the engine again"
    try:
        content = read_json(path)
    except Damaged as error:
        raise EngineError(f"{path} can't be read ({error}); {again}, or delete it to use the plan alone") from error
    said = content.get("format") if isinstance(content, dict) else None
    if isinstance(said, str) and said.startswith("trtopt.calib/"):
        line = f"trtopt build MODEL.onnx `int8=True` `calib={str(path)!r}`"
        raise EngineError(f"{path} is a calibration table, which an engine is built with: {line}")
    if said != FORMAT:
        raise EngineError(f"{path} has format {said!r}, this trtopt reads {FORMAT!r}; {again}")
    try:
        return manifest_of(content)
    except Damaged as error:
        why = f"{path} is damaged or incomplete: {error}"
        raise EngineError(f"{why}; {again}, or delete it to use the plan alone") from error


def manifest_of(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest that a document holds; Damaged where it isn't one."""
    for name, kind in _PARTS.items():
        if content.get(name) is not None:
            checked(content[name], kind, name)
    manifest = converted(content, Manifest)
    _check_values(manifest)
    return manifest


def _check_values(manifest: Manifest) -> None:
    """Raise Damaged for a value of the right type that can't be read."""
    embedded = manifest.embedded or {"preprocess": None}
    described_spec(manifest.spec)
    parsed(manifest.targets, parse_targets, "targets")
    parsed(manifest.profiles, _ranges, "profiles")
    for where, preprocess in (("preprocess", manifest.preprocess), ("embedded.preprocess", embedded["preprocess"])):
        if preprocess is not None:
            parsed(preprocess, Preprocess.load, where)
    names = [item["name"] for item in manifest.inputs]
    if manifest.embedded is not None and (takes := manifest.embedded["input"]) not in names:
        raise Damaged(f"embedded.input is {takes!r}; inputs has {', '.join(names) or 'none'}")
    for where, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        for number, tensor in enumerate(tensors):
            if (axis := tensor.get("batch_axis") or 0) >= max(1, len(tensor["shape"])):
                raise Damaged(f"{where}[{number}].batch_axis is {axis}; an axis of its shape is needed")
    if (graph := manifest.graph_file) is not None and _elsewhere(graph):
        raise Damaged(f"graph_file is {graph!r}; a file in the plan's folder or below it is needed")


def _ranges(profiles: Sequence[Mapping[str, str]]) -> tuple[Profile, ...]:
    return tuple({name: ShapeRange.parse(text) for name, text in item.items()} for item in profiles)


def as_built(tensors: Iterable[Mapping[str, Any]], manifest: Manifest) -> tuple[TensorInfo, ...]:
    """Return inputs or outputs of a manifest, which has the model's types, in the types that the plan has them in."""
    spec = described_spec(manifest.spec)
    types = {"float64": "float32"} | ({"int64": "int32"} if manifest.generation["family"] == "tensorrt8" else {})
    if not spec.io_fp32:
        half = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}.get(spec.base, "float32")
        types |= dict.fromkeys(("float64", "float32"), half)
    infos = [TensorInfo(**tensor) for tensor in tensors]
    return tuple(replace(item, dtype=types.get(item.dtype, item.dtype), shape=tuple(item.shape)) for item in infos)


def described_spec(described: Mapping[str, Any]) -> BuildSpec:
    """Return the specification that `BuildSpec.describe` has written down; Damaged where it can't be read."""
    if "precision" not in described:
        raise Damaged("spec lacks 'precision'")
    texts: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "overrides": (list[str], lambda texts: tuple(map(Override.parse, texts))),
        "profiles": (list[dict[Name, str]], _ranges),
        "targets": (list[str], parse_targets),
    }
    read = {
        name: parsed(converted(described[name], kind, f"spec.{name}"), parse, f"spec.{name}")
        for name, (kind, parse) in texts.items()
        if name in described
    }
    others = {name: value for name, value in described.items() if name not in texts}
    spec = parsed(others, partial(converted, kind=BuildSpec), "spec")
    return parsed(read, lambda found: replace(spec, **found), "spec")


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
