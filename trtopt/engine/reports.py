"""The reports of `inspect`: on an engine, and on the differences between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtopt.core.documents import plain
from trtopt.engine.manifest import Manifest


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
