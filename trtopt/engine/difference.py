"""The differences between two engines, as their manifests say it: for `inspect --diff`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import plain
from trtopt.core.values import x
from trtopt.engine.manifest import HEAVY, Manifest
from trtopt.trt.layers import profile_suffix

CONVERTING = ("QuantizeLinear", "DequantizeLinear", "Cast", "CastLike")
_Layers = Iterable[Mapping[str, Any]]


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
        this, other: the engines' files.
        facts: request, model, calibration, tensors, profiles, layers, memory, versions, size.
        precision: nodes that run in another precision, or in a layer with products in one engine only (None in the other).
        formats: nodes of the same precision whose layers read or write other types and formats.
        tactics: nodes of the same precision that other kernels run.
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


def facts(nbytes: int, precision_summary: str, manifest: Manifest | None) -> dict[str, Any]:
    """Return what engines can be compared by, under the names that people read."""
    if manifest is None:
        return {"runs in": precision_summary, "bytes of the plan": nbytes}
    generation = manifest.generation
    calibration = manifest.calibration or {}
    entries: dict[str, Any] = {
        f"asked: {name}": plain(value)
        for name, value in manifest.spec.items()
        if name not in ("profiles", "targets")  # what came of them is told
    }
    entries |= {
        "runs in": precision_summary,
        **{f"multiply-accumulates in {name.upper()}": share for name, share in manifest.coverage.items()},
        "nodes kept in higher precision": sum(item["precision"] not in ("int8", "fp8") for item in manifest.kept),
        "layers": len(manifest.layers),
        "layers with products": sum(layer["kind"] in HEAVY for layer in manifest.layers),
        "model (sha256)": manifest.source["sha256"],
        "calibration": calibration.get("digest"),
        "calibration: method": calibration.get("method"),
        "calibration: samples": calibration.get("samples"),
    }
    for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
        for item in tensors:
            shape = x(item["shape"])
            entries[f"{kind} {item['name']}"] = f"{item['dtype']} {shape}"
    for number, profile in enumerate(manifest.profiles):
        entries |= {f"profile {number}: {name}": shape for name, shape in profile.items()}
    return entries | {
        "preprocessing": plain(manifest.preprocess),
        "preprocessing embedded": plain(manifest.embedded),
        "scratch bytes of a context": manifest.scratch,
        "bytes of the plan": nbytes,
        "product": f"{generation['product']} {generation['version']}",
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


def by_node(layers: _Layers) -> dict[str, Mapping[str, Any]]:
    """Node → the layer with products that it is in; conversions left out. A node of the second profile on has it at its end."""
    layer_of: dict[str, Mapping[str, Any]] = {}
    for layer in layers:
        if layer["kind"] in HEAVY:
            for node in layer["nodes"]:
                if node.rpartition("/")[2] not in CONVERTING:
                    layer_of.setdefault(f"{node}{profile_suffix(layer['name'])}", layer)
    return layer_of


def compare(
    this: Path,
    other: Path,
    entries: tuple[Mapping[str, Any], Mapping[str, Any]],
    layers: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
) -> EngineDifference:
    """Hold two engines against each other.

    Args:
        entries: the `facts` of both.   layers: those of both, as manifests have them.
    """
    notes = [
        f"the layers of {path.name} aren't known: which node runs in what isn't compared"
        for path, each in ((this, layers[0]), (other, layers[1]))
        if not each
    ]
    mine, theirs = ({}, {}) if notes else map(by_node, layers)
    if mine and theirs and not mine.keys() & theirs.keys():
        notes.append("no node with products is in both, as of models by different exporters: layers aren't compared")
        mine, theirs = {}, {}
    alike = [node for node in mine if node in theirs and mine[node]["precision"] == theirs[node]["precision"]]
    return EngineDifference(
        this,
        other,
        differing(*entries),
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
