"""A TensorRT calibration cache of an older version, made a table for a model: no data is read.

A cache names the tensors of the network that the ONNX parser of its time made. The names are mapped in this order:

1. exact: the folded graph, which builds quantize, has a tensor of that name. Folding keeps names with their values: of a
   fused Conv + BatchNormalization the BatchNormalization's, so the pre-activation never stands for something else.
2. propagated: through operators that keep the scale; `propagation` says which, and why that is exact.
3. folding: the same through what folding removed (Identity, Dropout, Cast).
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from trtopt.calibration.prepared import Prepared
from trtopt.calibration.propagation import propagate
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import TextCache
from trtopt.calibration.thresholds import TableEntry
from trtopt.core.documents import plain
from trtopt.core.errors import CalibrationError
from trtopt.core.values import Override, Precision
from trtopt.core.words import first_of
from trtopt.data.preprocess import Preprocess
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.view import to_ir

MISSING = ("error", "float")
NO_SCALE = "the imported calibration cache has no scale for what it reads"
_ROWS = {  # a field of `Coverage` → its name in tables
    "exact": "by the same name",
    "folding": "through folding",
    "propagated": "propagated",
    "missing": "missing",
    "unquantized": "nodes left in floating point",
    "strange": "entries of no tensor here",
}


@dataclass(frozen=True)
class Coverage:
    """The origin of each scale that INT8 needs, by tensor.

    Attributes:
        header: the cache's first line.
        entries: scales in it, constants left out.
        exact, folding, propagated: see this module.
        missing: needed, but the cache doesn't say; only with missing="float".
        unquantized: nodes that stay in floating point for it.
        strange: entries that fit no tensor of the model.
        foreign: why the cache seems to be another model's; empty where it doesn't.
    """

    header: str
    entries: int
    exact: tuple[str, ...] = ()
    folding: tuple[str, ...] = ()
    propagated: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    foreign: str = ""

    @property
    def needed(self) -> int:
        return sum(map(len, (self.exact, self.folding, self.propagated, self.missing)))

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of a table: what, how many, the first names."""
        parts = {what: getattr(self, field) for field, what in _ROWS.items()}
        rows = [(what, str(len(names)), first_of(names)) for what, names in parts.items() if names or what == "missing"]
        return [("tensors that INT8 needs", str(self.needed), ""), *rows]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on a cache that was taken."""
        notes = []
        if self.foreign:
            notes.append(f"{self.foreign}: scales of another model cost accuracy, so look whether it is this model's")
        if self.unquantized:
            left = f"{len(self.unquantized)} nodes stay in floating point, because the cache has no scale for what they read"
            notes.append(f"{left}: {first_of(self.unquantized)}")
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        return {"needed": self.needed, **plain(self)}


def import_table(
    cache: TextCache,
    original: ModelProto,
    prepared: Prepared,
    *,
    overrides: Sequence[Override] = (),
    missing: str = "error",
    preprocess: Any = None,
) -> tuple[Table, Coverage]:
    """The table that `cache` gives for a model, which was `original` before it was `prepared`; `missing` and `preprocess` as in
    `CalibrateRequest`."""
    folded, graph = prepared.proto, to_ir(prepared.proto)
    theirs, ours = _names(original), _names(folded)
    exact = {name: amax for name, amax in cache.amax.items() if name in theirs or name in ours}
    placed = {name: amax for name, amax in propagate(to_ir(original), exact).items() if name in ours}
    unscaled: dict[str, None] = {}
    while True:
        points = find_points(graph, overrides=(*overrides, *kept_out(unscaled)))
        scales = propagate(graph, placed, points.groups)
        readers = {node: None for name in points.activations if name not in scales for node, _ in points.reads[name]}
        if missing == "error" or readers.keys() <= unscaled.keys():
            break
        unscaled |= readers
    kept = propagate(graph, {name: amax for name, amax in exact.items() if name in ours}, points.groups)
    how = dict.fromkeys(filter(scales.__contains__, points.activations), "folding")
    how |= {name: "exact" if name in exact else "propagated" for name in how if name in kept}
    strange = tuple(name for name in cache.amax if name not in exact)
    coverage = Coverage(
        header=cache.header,
        entries=len(cache.amax),
        **{way: tuple(name for name in how if how[name] == way) for way in ("exact", "folding", "propagated")},
        missing=tuple(name for name in prepared.tensors if name not in scales),
        unquantized=tuple(unscaled),
        strange=strange,
        foreign=_foreign(cache, strange),
    )
    if len(how) < len(points.activations):
        raise CalibrationError(_lacking(coverage, points, cache))
    if not points.activations:
        raise CalibrationError(
            f"the cache gives no INT8 layer at all: {first_of(coverage.missing)} have no scale; was it made for another model?"
        )
    amax = {name: scales[name] for name in points.activations}
    for group in points.groups:
        amax |= dict.fromkeys(group, max(amax[name] for name in group))
    data = {"kind": "cache", "count": 0, "digest": cache.digest, "header": cache.header, "unquantized": list(unscaled)}
    table = Table(
        {name: TableEntry(value, how[name]) for name, value in amax.items()},
        points.groups,
        prepared.identity,
        data,
        method=f"imported from {cache.header}",
        samples=0,
        preprocess=None if preprocess is None else Preprocess.load(preprocess).describe(),
    )
    return table, coverage


def without_scales(table: Table) -> tuple[str, ...]:
    """Nodes that an imported table leaves in floating point."""
    return tuple(map(str, table.data.get("unquantized", ())))


def kept_out(nodes: Iterable[str], base: Precision = Precision.FP16) -> list[Override]:
    """Return overrides that keep nodes out of INT8."""
    patterns = [(node, glob.escape(node)) for node in nodes]
    # With its first letter in brackets a pattern is a node's name alone, should an operator have it, too.
    return [Override(f"[{node[0]}]{text[1:]}" if node[:1].isalpha() else text, base) for node, text in patterns]


def _names(proto: ModelProto) -> set[str]:
    return {value.name for value in proto.graph.input} | {name for node in proto.graph.node for name in node.output}


def _foreign(cache: TextCache, strange: Sequence[str]) -> str:
    """Names such as `relu_1` or `123` are in many models: that some fit, even all that are needed, proves nothing."""
    if 4 * len(strange) <= len(cache.amax):
        return ""
    return (
        f"the cache seems to be of another model: {len(strange)} of the {len(cache.amax)} tensors that it names aren't in "
        f"this one ({first_of(strange)})"
    )


def _lacking(coverage: Coverage, points: Points, cache: TextCache) -> str:
    names, strange = coverage.missing, coverage.strange
    readers = list(dict.fromkeys(node for name in names for node, _ in points.reads.get(name, ())))
    text = (
        f"the cache ({coverage.header}) has no scale for {len(names)} of the {coverage.needed} tensors that INT8 needs: "
        f"{first_of(names)} (read by {first_of(readers)})"
    )
    if unusable := [name for name in names if name in cache.unusable]:
        text += f"; it has 0, infinity, NaN or less than a number for {first_of(unusable)}, which is no scale"
    if strange:
        few = f"{len(strange)} entries fit no tensor of this model ({first_of(strange)})"
        text += f"; {coverage.foreign or few}"
    return (
        f"{text}. Calibrate on real inputs instead (`images=DIR` and `preprocess=PRESET`, or `data='F.npz'`), leave what reads "
        "these tensors in floating point (trtopt calibrate MODEL --import-cache CACHE --missing float -o T.calib.json), or "
        f"name it: `precision_override=['{glob.escape(readers[0]) if readers else 'NODE'}=fp16']`"
    )
