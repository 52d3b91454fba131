"""A TensorRT calibration cache of an older version, made a table for a model: no data is read.

A cache names the tensors of the network that the ONNX parser of its time made. The names are mapped in this order:

1. exact: the folded graph, which builds quantize, has a tensor of that name. Folding keeps names with their values: of a
   fused Conv + BatchNormalization the BatchNormalization's, so the pre-activation never stands for something else.
2. parser's numbering: `(Unnamed Layer* 7) [Convolution]_output` is what layer 7 gives, as the installed parser numbers the
   layers of this model. Trusted only as far as every numbered name of the cache, constants too, has the kind of layer that
   stands at its number.
3. folding: the cache names a tensor that folding removed and whose values another one holds (Identity, Dropout, Cast,
   duplicates).
4. propagated: through operators that keep the scale; `propagation` says which, and why that is exact.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from trtopt.calibration.prepared import prepare
from trtopt.calibration.propagation import Known, propagate
from trtopt.calibration.table import Table, TableEntry
from trtopt.calibration.text_cache import TextCache, read_cache
from trtopt.core.errors import CalibrationError, TrtoptError, UsageError
from trtopt.core.options import named
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.temporary import scratch
from trtopt.core.values import Override, Precision
from trtopt.core.version import to_install
from trtopt.data.preprocess import Preprocess
from trtopt.graph.io import Model, save_model
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.proto import fingerprint
from trtopt.graph.view import to_ir

if TYPE_CHECKING:
    from trtopt.trt import NetworkLayer

MISSING = ("error", "float")
NO_SCALE = "the imported calibration cache has no scale for what it reads"
_UNNAMED = re.compile(r"\(Unnamed Layer\* (\d+)\) \[(.+)\]_output(?: \((\d+)\))?")
_MOVING = frozenset(("SHUFFLE", "SQUEEZE", "UNSQUEEZE", "IDENTITY"))
# Kinds that parsers of different versions use for one operator.
_ALIASES = {
    "squeeze": "shuffle",
    "unsqueeze": "shuffle",
    "reduce": "pooling",
    "fullyconnected": "matrixmultiply",
    "padding": "slice",
    "normalization": "scale",
}

_ROWS = {  # a field of `Coverage` → its name in tables
    "exact": "by the same name",
    "numbering": "by the parser's numbering",
    "folding": "through folding",
    "propagated": "propagated",
    "missing": "missing",
    "unquantized": "nodes left in floating point",
    "spare": "entries not needed",
    "strange": "entries of no tensor here",
    "unusable": "entries unusable",
}

Networks = Callable[[], "Iterator[Sequence[NetworkLayer]]"]
"""The parsed networks that a cache may be numbered by, likeliest first; raises TrtoptError where nothing can parse."""


@dataclass(frozen=True)
class Coverage:
    """How the tensors that INT8 needs got their scales, by name.

    Attributes:
        header: the cache's first line.   entries: scales in it, constants left out.
        exact, numbering, folding, propagated: see this module.
        missing: needed, but the cache doesn't say; only with missing="float".
        unquantized: nodes that stay in floating point for it.
        spare: entries for tensors of the model that INT8 doesn't need.
        strange: entries that fit no tensor of the model.
        unusable: entries whose scale is infinite, NaN, negative or beyond all sense.
        foreign: why the cache seems to be another model's; empty where it doesn't.
        note: why numbered names couldn't be used; empty where there are none, or all were.
    """

    header: str
    entries: int
    exact: tuple[str, ...] = ()
    numbering: tuple[str, ...] = ()
    folding: tuple[str, ...] = ()
    propagated: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    foreign: str = ""
    note: str = ""

    @property
    def needed(self) -> int:
        return sum(map(len, (self.exact, self.numbering, self.folding, self.propagated, self.missing)))

    def rows(self) -> list[tuple[str, str, str]]:
        """What, how many, the first names: for a table."""
        parts = {what: getattr(self, field) for field, what in _ROWS.items()}
        rows = [(what, str(len(names)), _some(names)) for what, names in parts.items() if names or what == "missing"]
        return [("tensors that INT8 needs", str(self.needed), ""), *rows]

    def to_json(self) -> dict[str, Any]:
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {"header": self.header, "entries": self.entries, "needed": self.needed} | plain


def import_table(
    cache: TextCache,
    original: ModelProto,
    folded: ModelProto,
    *,
    overrides: Sequence[Override] = (),
    missing: str = "error",
    networks: Networks | None = None,
) -> tuple[Table, Coverage]:
    """The table that `cache` gives for a model.

    Args:
        original: the model as it was given; its names are looked for too.
        folded: what `fold` made of it.
        missing: "error", or "float": nodes that read a tensor without a scale stay out of INT8.
        networks: where numbered names are looked up; None: what the installed TensorRT's parser makes of both graphs.

    Raises:
        CalibrationError: needed tensors have no scale (named, with what to do), or nothing is left to quantize.
    """
    given, graph = to_ir(original), to_ir(folded)
    theirs, ours = _names(original), _names(folded)
    exact = {name: Known(amax, (name,)) for name, amax in cache.amax.items() if name in theirs or name in ours}
    ends = {value.name for value in (*folded.graph.input, *folded.graph.output)}
    numbered, note = _numbered(cache, theirs | ours, ends, networks or (lambda: _parsed(original, folded)))
    known = propagate(given, numbered | exact)
    known = {name: item for name, item in known.items() if name in ours}
    left: dict[str, None] = {}
    while True:
        points = find_points(graph, overrides=(*overrides, *kept_out(left)))
        found = propagate(graph, known, points.groups)
        lacking = [name for name in points.activations if name not in found]
        readers = [node for name in lacking for node, _ in points.reads[name] if node not in left]
        if not lacking or missing == "error" or not readers:
            break
        left.update(dict.fromkeys(readers))
    how = {name: _how(name, item, exact, numbered, ours) for name, item in found.items()}
    by = {key: tuple(name for name in points.activations if how.get(name) == key) for key in HOW}
    taken = {source for name in points.activations if name in found for source in found[name].sources}
    spare = [name for name in cache.amax if name not in taken]
    anywhere = exact.keys() | {source for item in numbered.values() for source in item.sources}
    strange = tuple(name for name in spare if name not in anywhere)
    without = find_points(graph, overrides=overrides).activations if left else ()
    coverage = Coverage(
        header=cache.header,
        entries=len(cache.amax),
        **by,
        missing=tuple(name for name in without if name not in found) if left else tuple(lacking),
        unquantized=tuple(left),
        spare=tuple(name for name in spare if name in anywhere),
        strange=strange,
        unusable=cache.unusable,
        foreign=_foreign(cache, strange),
        note=note,
    )
    if lacking:
        raise CalibrationError(_lacking(cache, coverage, points))
    if not points.activations:
        why = f"{_some(coverage.missing)} have no scale" if left else "the model has nothing to quantize"
        raise CalibrationError(f"the cache gives no INT8 layer at all: {why}; was it made for another model?")
    table = Table(
        tensors=_entries(points, found, how),
        groups=points.groups,
        model={"name": folded.graph.name, "fingerprint": fingerprint(folded)},
        data={"kind": "cache", "count": 0, "digest": cache.digest, "header": cache.header, "unquantized": list(left)},
        method=f"imported from {cache.header}",
        samples=0,
    )
    return table, coverage


HOW = ("exact", "numbering", "folding", "propagated")


def without_scales(table: Table) -> tuple[str, ...]:
    """Nodes that an imported table leaves in floating point."""
    return tuple(map(str, table.data.get("unquantized", ())))


def kept_out(nodes: Iterable[str], base: Precision = Precision.FP16) -> list[Override]:
    """What keeps nodes out of INT8 when the placement is decided."""
    return [Override(_only(node), base) for node in nodes]


def _only(node: str) -> str:
    """A pattern for the node of that name, and not for the operator, should it have an operator's name."""
    pattern = glob.escape(node)
    return f"[{node[0]}]{pattern[1:]}" if node[:1].isalpha() else pattern


def _names(proto: ModelProto) -> set[str]:
    return {value.name for value in proto.graph.input} | {name for node in proto.graph.node for name in node.output}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _unusable(coverage: Coverage) -> str:
    names = coverage.unusable
    which = f"{len(names)} entry of the cache is" if len(names) == 1 else f"{len(names)} entries of the cache are"
    return f"{which} no scale (infinite, NaN, negative, cut off or out of range): {_some(names)}"


def _foreign(cache: TextCache, strange: Sequence[str]) -> str:
    """Names such as `relu_1` or `123` are in many models: that some fit, even all that are needed, proves nothing."""
    named = [name for name in cache.amax if not _UNNAMED.fullmatch(name)]
    unknown = [name for name in strange if not _UNNAMED.fullmatch(name)]
    if 4 * len(unknown) <= len(named):
        return ""
    return (
        f"the cache seems to be of another model: {len(unknown)} of the {len(named)} tensors that it names aren't in this one "
        f"({_some(unknown)})"
    )


def _how(name: str, item: Known, exact: Mapping[str, Known], numbered: Mapping[str, Known], ours: set[str]) -> str:
    if name in exact:
        return "exact"
    if name in numbered:
        return "numbering"
    outside = any(source not in ours and not _UNNAMED.fullmatch(source) for source in item.sources)
    return "folding" if outside else "propagated"


def _entries(points: Points, found: Mapping[str, Known], how: Mapping[str, str]) -> dict[str, TableEntry]:
    amax = {name: found[name].amax for name in points.activations}
    for group in points.groups:
        amax.update(dict.fromkeys(group, max(amax[name] for name in group)))
    return {name: TableEntry(value, how[name]) for name, value in amax.items()}


def _lacking(cache: TextCache, coverage: Coverage, points: Points) -> str:
    names = coverage.missing
    readers = list(dict.fromkeys(node for name in names for node, _ in points.reads.get(name, ())))
    said = f"the cache ({cache.header}) has no scale for {len(names)} of the {coverage.needed} tensors that INT8 needs"
    text = f"{said}: {_some(names)} (read by {_some(readers)})"
    if coverage.unusable:
        text += f"; {_unusable(coverage)}"
    if coverage.foreign:
        text += f"; {coverage.foreign}"
    elif coverage.strange:
        text += f"; {len(coverage.strange)} entries fit no tensor of this model ({_some(coverage.strange)})"
    if coverage.note:
        text += f"; {coverage.note}"
    node = glob.escape(readers[0]) if readers else "NODE"
    return (
        f"{text}. Calibrate on real inputs instead (`images=DIR` and `preprocess=PRESET`, or `data='F.npz'`), leave "
        f"what reads these tensors in floating point with `missing='float'`, or name it: `precision_override=['{node}=fp16']`"
    )


# The parser's numbering


def _numbered(cache: TextCache, names: set[str], ends: set[str], networks: Networks) -> tuple[dict[str, Known], str]:
    """Tensors of the model that numbered entries stand for, and why the others couldn't be placed."""
    entries = sorted(
        (int(match[1]), _kind(match[2]), int(match[3] or 0), name)
        for name in (*cache.amax, *cache.constants)
        if (match := _UNNAMED.fullmatch(name))
    )
    usable = [entry for entry in entries if entry[3] in cache.amax]
    if not usable:
        return {}, ""
    # Parsing ONNX names what nodes give, so numbers are left to the layers inside a node; a network made by other means
    # numbers everything but its inputs and outputs.
    by_parser = any(name in names and name not in ends for name in cache.amax)
    best: dict[str, Known] = {}
    reached = -1
    try:
        for layers in networks():
            placed, count = _placed(entries, layers, names, cache, by_parser)
            if count > reached:
                best, reached = placed, count
            if reached == len(entries):
                break
    except TrtoptError as error:
        if reached < 0:
            return {}, f"{len(usable)} numbered names (such as {usable[0][3]!r}) can't be looked up: {error}"
    if reached < 0:
        return {}, (
            f"{len(usable)} numbered names (such as {usable[0][3]!r}) can't be looked up: no TensorRT that is installed here "
            f"can parse the model; TensorRT-RTX's parser needs no GPU: {to_install('rtx')}"
        )
    if reached < len(entries):
        number, kind, _, name = entries[reached]
        return (
            best,
            f"from {name!r} on, the installed parser numbers this model's layers otherwise (no {kind} at {number})",
        )
    return best, ""


def _placed(
    entries: Sequence[tuple[int, str, int, str]],
    layers: Sequence[NetworkLayer],
    names: set[str],
    cache: TextCache,
    by_parser: bool,
) -> tuple[dict[str, Known], int]:
    placed: dict[str, Known] = {}
    for count, (number, kind, slot, name) in enumerate(entries):
        layer = layers[number] if number < len(layers) else None
        if layer is None or _kind(layer.kind) != kind or slot >= len(layer.outputs):
            return placed, count
        tensor = layer.outputs[slot]
        if tensor in names and by_parser:
            return placed, count  # it would have been named: this is another layer
        if tensor not in names and layer.kind in _MOVING and layer.inputs:
            tensor = layer.inputs[0]
        if tensor in names and name in cache.amax:
            placed.setdefault(tensor, Known(cache.amax[name], (name,)))
    return placed, len(entries)


def _kind(text: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    return "plugin" if plain.startswith("plugin") else _ALIASES.get(plain, plain)


def _parsed(*models: ModelProto) -> Iterator[Sequence[NetworkLayer]]:
    from trtopt.trt import installed

    problem: TrtoptError | None = None
    parsed = False
    for generation in installed():
        for proto in models:
            with scratch() as folder:
                path = folder / "model.onnx"
                save_model(proto, path)
                try:
                    layers = generation.network(path)
                except TrtoptError as error:
                    problem = type(error)(str(error).replace(str(path), "the model"))
                    continue
            parsed = True
            yield layers
        if parsed:
            return
    if problem is not None:
        raise problem


def refuse_measuring(source: str = "`import_cache=`", **given: Any) -> None:
    """Raise UsageError for what only measuring needs, beside an import.

    Args:
        source: the option that scales come from.
        given: option → its value, None where it wasn't given.
    """
    extra = [named(name) for name, value in given.items() if value is not None]
    if extra:
        raise UsageError(
            f"{source} takes what was measured before, without data: drop {', '.join(extra)}, or drop {source} to measure anew"
        )


def load_import(
    path: str | os.PathLike[str],
    model: Model,
    *,
    overrides: Sequence[Override] = (),
    missing: str = "error",
    preprocess: Any = None,
    reporter: Reporter = SILENT,
) -> tuple[Table, Coverage, TextCache, ModelProto]:
    """`import_table` from files: the table, what covers it, the cache and the folded graph.

    Args:
        preprocess: how an image becomes the input, where it is known; it is kept with the table.

    Raises:
        UsageError: there is no such file.
        CalibrationError: see `read_cache` and `import_table`, or the model already holds Q/DQ.
    """
    cache = read_cache(path)
    prepared = prepare(model, overrides, reporter=reporter)
    with reporter.phase(f"importing {Path(path).name}"):
        table, coverage = import_table(cache, model.proto, prepared.proto, overrides=overrides, missing=missing)
    described = None if preprocess is None else Preprocess.load(preprocess).describe()
    table = replace(table, model=prepared.identity, preprocess=described)
    if coverage.note and coverage.missing:
        reporter.warn(coverage.note)
    if coverage.unusable:
        reporter.warn(_unusable(coverage))
    if coverage.foreign:
        reporter.warn(f"{coverage.foreign}: scales of another model cost accuracy, so look whether it is this model's")
    if coverage.unquantized:
        reporter.warn(
            f"{len(coverage.unquantized)} nodes stay in floating point, because the cache has no scale for what they read: "
            f"{_some(coverage.unquantized)}"
        )
    return table, coverage, cache, prepared.proto
