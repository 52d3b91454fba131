"""The reports of `inspect`: on an engine, and on the differences between two, as their manifests say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtopt.core.documents import plain
from trtopt.core.values import x
from trtopt.engine.manifest import HEAVY, Manifest, as_built
from trtopt.trt.layers import profile_suffix

CONVERTING = ("QuantizeLinear", "DequantizeLinear", "Cast", "CastLike")


@dataclass(frozen=True)
class Differing:
    """One thing that two engines don't have alike.

    Attributes:
        what: its name; of a node, the ONNX node's.
        this, other: the values, plain JSON; None: there is none, or it isn't known.
    """

    what: str
    this: Any
    other: Any


@dataclass(frozen=True)
class EngineDifference:
    """The differences between two engines, the first one's value first.

    Nodes are those in layers with products (convolutions, deconvolutions, matrix products). Where the two engines have no such
    node in common, layers aren't compared.

    Attributes:
        facts: request, model, calibration, tensors, profiles, layers, memory, versions, size.
        precision: nodes that run in another precision, or in a layer with products in one engine only (None in the other).
        formats, tactics: nodes of the same precision whose layers read or write other formats, or that other kernels run.
        notes: what couldn't be compared, and why.
    """

    this: Path
    other: Path
    facts: tuple[Differing, ...]
    precision: tuple[Differing, ...]
    formats: tuple[Differing, ...]
    tactics: tuple[Differing, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Nothing that is known differs."""
        return not (self.facts or self.precision or self.formats or self.tactics)


@dataclass(frozen=True)
class EngineReport:
    """The result of `inspect` for an engine.

    Attributes:
        maker: product and version from the plan's own header, or its manifest.
        runs_on: which versions of TensorRT run it, full or lean.
        manifest: the manifest beside the plan; None where there is none.
        precision, precision_summary: counts of the layers that do the arithmetic, and the line that says it.
        layers: plain JSON, as `Manifest.layers`: name, kind, precision, nodes and, where known, reads, writes and tactic.
        memory: bytes: of the "plan"; the "workspace_limit" of the build; the "scratch" of a context. None: not known, or
            TensorRT's default.
        notes: what couldn't be found out, and why.
        difference: from the engine given as `diff`; None where there was none.
    """

    engine: Path
    nbytes: int
    maker: str
    runs_on: str
    manifest: Manifest | None
    precision: Mapping[str, int]
    precision_summary: str
    layers: Sequence[Mapping[str, Any]] = ()
    memory: Mapping[str, int | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    difference: EngineDifference | None = None

    def to_json(self) -> dict[str, Any]:
        return {"bytes" if name == "nbytes" else name: value for name, value in plain(self).items()}


def facts(report: EngineReport) -> dict[str, Any]:
    """Return what engines can be compared by, under the names that people read."""
    manifest, entries = report.manifest, {"runs in": report.precision_summary, "bytes of the plan": report.nbytes}
    if manifest is None:
        return entries
    spec = {name: value for name, value in manifest.spec.items() if name not in ("profiles", "targets")}  # see below
    entries |= {f"asked: {name}": plain(value) for name, value in spec.items()}
    entries |= {f"multiply-accumulates in {name.upper()}": share for name, share in manifest.coverage.items()}
    for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
        entries |= {f"{kind} {item.name}": f"{item.dtype} {x(item.shape)}" for item in as_built(tensors, manifest)}
    for number, profile in enumerate(manifest.profiles):
        entries |= {f"profile {number}: {name}": shape for name, shape in profile.items()}
    calibration = manifest.calibration or {}
    return entries | {
        "nodes kept in higher precision": sum(item["precision"] not in ("int8", "fp8") for item in manifest.kept),
        "layers": len(manifest.layers),
        "layers with products": sum(layer["kind"] in HEAVY for layer in manifest.layers),
        "model (sha256)": manifest.source["sha256"],
        "calibration": calibration.get("digest"),
        "calibration: method": calibration.get("method"),
        "calibration: samples": calibration.get("samples"),
        "preprocessing": plain(manifest.preprocess),
        "preprocessing embedded": plain(manifest.embedded),
        "scratch bytes of a context": manifest.scratch,
        "product": str(manifest.origin),
        "built for": built_for(manifest),
        "trtopt": manifest.trtopt,
    }


def built_for(manifest: Manifest) -> str | None:
    """Compute capabilities that it was built for, or the GPU that it was built on."""
    return ", ".join(manifest.targets) or manifest.generation["gpu"] or None


def differing(this: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Differing, ...]:
    """Entries that aren't the same in both; one that is in only one of them is None in the other."""
    names = dict.fromkeys((*this, *other))
    return tuple(
        Differing(name, this.get(name), other.get(name)) for name in names if this.get(name) != other.get(name)
    )


def by_node(layers: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Node → the layer with products that it is in; conversions left out. A node of the second profile on has it at its end."""
    layer_of: dict[str, Mapping[str, Any]] = {}
    for layer in layers:
        if layer["kind"] in HEAVY:
            for node in layer["nodes"]:
                if node.rpartition("/")[2] not in CONVERTING:
                    layer_of.setdefault(f"{node}{profile_suffix(layer['name'])}", layer)
    return layer_of


def compare(this: EngineReport, other: EngineReport) -> EngineDifference:
    both = this, other
    notes = [
        f"the layers of {each.engine.name} aren't known: which node runs in what isn't compared"
        for each in both
        if not each.layers
    ]
    mine, theirs = ({}, {}) if notes else (by_node(each.layers) for each in both)
    if mine and theirs and not mine.keys() & theirs.keys():
        notes.append("no node with products is in both, as of models by different exporters: layers aren't compared")
        mine, theirs = {}, {}
    alike = [node for node in mine if node in theirs and mine[node]["precision"] == theirs[node]["precision"]]
    return EngineDifference(
        this.engine,
        other.engine,
        differing(*map(facts, both)),
        differing(*({node: str(layer["precision"]) for node, layer in each.items()} for each in (mine, theirs))),
        differing(*({node: formats(each[node]) for node in alike} for each in (mine, theirs))),
        differing(*({node: each[node].get("tactic") or None for node in alike} for each in (mine, theirs))),
        tuple(notes),
    )


def formats(layer: Mapping[str, Any]) -> str | None:
    """Return the formats read → written by a layer; None: not known."""
    if not layer.get("reads") and not layer.get("writes"):
        return None
    return " → ".join(", ".join(dict.fromkeys(layer.get(key) or ("?",))) for key in ("reads", "writes"))
