"""report(): one page on an engine that opens anywhere: what it runs in, how fast, how near to FP32, and what isn't known.

The page is one HTML file without a link to anything: its charts are SVG, its script sorts and filters a table. Names come from
files of others, so that everything is escaped, and the page's own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.builder.request import BuildRequest
from trtopt.calibration.table import Table
from trtopt.core.documents import plain
from trtopt.core.errors import TrtoptError, UsageError, require
from trtopt.core.files import existing_file, json_bytes, whole, writing_together
from trtopt.core.options import flag_of, options, spoken, taking
from trtopt.core.terminal import visible
from trtopt.core.values import ShapeRange
from trtopt.diagnosis import charts
from trtopt.diagnosis.contents import FORMAT, Graph, Subject, contents
from trtopt.diagnosis.measured import Measured, measurements
from trtopt.diagnosis.request import ReportRequest
from trtopt.engine.inspection import EngineReport, inspect
from trtopt.engine.manifest import REASONS, Manifest, kept_graph
from trtopt.graph.io import load_model
from trtopt.graph.proto import all_nodes
from trtopt.graph.work import macs, sizes_in

ROWS = 2000  # of a table or a chart on the page; the twin has all
LINES, BARS = 12, 40  # of each part of the verdict, and of a chart with names
WORST = 12  # histograms that are drawn
_TEXT = 120  # characters of a name
_NODES = 400  # characters of the nodes of a layer
_PURPOSE = "writing a report"


@dataclass(frozen=True)
class Report:
    """What `report` wrote.

    Attributes:
        page, json_twin: the files; nbytes: of the page.
        contents: what both say, as plain JSON (docs/report.md).
    """

    page: Path
    json_twin: Path | None
    nbytes: int
    contents: Mapping[str, Any]

    @property
    def unknown(self) -> Sequence[Mapping[str, str]]:
        """What it couldn't say, and the command that gives it."""
        return tuple(self.contents["unknown"])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "page": str(self.page),
            "json_twin": None if self.json_twin is None else str(self.json_twin),
            "bytes": self.nbytes,
            "verdict": self.contents["verdict"],
            "unknown": list(self.unknown),
        }


@taking(ReportRequest)
def report(request: ReportRequest) -> Report:
    """Write a page on an engine: what runs in which precision against what was asked, times, accuracy, layers, calibration,
    warnings, provenance. Nothing is measured; what isn't known is named, with the command that gives it.

    Equal input gives equal bytes: the page has no time, no path and no random name in it.

    Args:
        engine: a plan file, or its manifest alone (M.engine.json), where most of what is said stands.
        output: the page, one HTML file.
        results: what commands measured: files with their JSON, such mappings, or results of `profile`, `sensitivity`, `bench`,
            `verify`, `build`, `tune` and `pipeline`. They are known by their content; those that name another engine
            are taken for `against` if it has that name.
        calib: the calibration table (a file or a `Table`), for histograms and thresholds.
        model: the ONNX model, for shares of fused nodes by their arithmetic; default: the graph that was kept at the build,
            else the model that the manifest names, where it is still there unchanged.
        against: another engine, of which the differences are shown.
        json_twin: where to write the same numbers as JSON; docs/report.md has the keys.

    Raises:
        UsageError: a file that isn't there, that is nothing of the kind, or that would be overwritten.
        EngineError, EngineMismatch: as `inspect`.
        CalibrationError, InvalidModel: of `calib` and `model`.
        MissingDependency: matplotlib or jinja2 isn't installed.
        OutputError: a file can't be written; nothing is left behind.
    """
    ready()
    paths = [existing_file(path, "the engine") for path in (request.engine, request.against) if path is not None]
    targets = [Path(request.output), *([] if request.json_twin is None else [Path(request.json_twin)])]
    ours, theirs = measurements(request.results, *(_plan(path) for path in paths), *([None] if len(paths) == 1 else []))
    table = Table.load(request.calib) if isinstance(request.calib, (str, os.PathLike)) else request.calib
    with request.reporter.phase("reading"):
        subject = _subject(paths[0], ours, table, request.model)
        other = _subject(paths[1], theirs, None, None) if len(paths) > 1 else None
        document = plain(contents(subject, other))
    with request.reporter.phase("drawing"):
        page = html(document).encode()
    with writing_together(*targets) as partials:
        for partial, content in zip(partials, (page, json_bytes(document) if request.json_twin is not None else b"")):
            partial.write_bytes(content)
    twin = None if request.json_twin is None else Path(request.json_twin)
    return Report(Path(request.output), twin, len(page), document)


def ready() -> None:
    """Raise MissingDependency now rather than after the long work."""
    for module in ("jinja2", "matplotlib"):
        require(module, charts.EXTRA, _PURPOSE)


def _subject(path: Path, results: Measured, table: Table | None, model: str | os.PathLike[str] | None) -> Subject:
    engine = inspect(path)
    if not isinstance(engine, EngineReport):
        raise UsageError(f"{path} is an ONNX model; a report is on an engine: trtopt build {path} … makes one")
    manifest, graph = engine.manifest, None
    place = Path(model) if model is not None else kept_graph(_plan(path)) or _source(manifest)
    if place is not None:
        try:
            graph = _graph(place, manifest, _batch(results))
        except TrtoptError:
            if model is not None:
                raise  # else it isn't what the user named, and without it the shares aren't known
    return Subject(
        _plan(path),
        engine.nbytes,
        engine.maker,
        engine.precision_summary,
        manifest,
        results,
        table,
        graph,
        engine.notes,
    )


def _plan(path: Path) -> Path:
    """The plan that a manifest is of; what isn't a manifest is a plan itself."""
    return path.with_suffix("") if path.suffix == ".json" else path


def _batch(results: Measured) -> int | None:
    """The batch whose layers' times the page has."""
    return max((item["batch"] for item in results.profile["batches"]), default=None) if results.profile else None


def _source(manifest: Manifest | None) -> Path | None:
    """The model that the engine was built from, if it is still there as it was."""
    path = None if manifest is None else manifest.source["path"]
    if manifest is None or not path or not Path(path).is_file():
        return None
    try:
        return Path(path) if load_model(path, lazy=True).fingerprint == manifest.source["sha256"] else None
    except TrtoptError:
        return None


def _graph(path: Path, manifest: Manifest | None, batch: int | None) -> Graph:
    """Operators and work, at the shapes that the first profile is tuned for; `batch`: of them instead."""
    proto = load_model(path, lazy=True).proto
    profile = manifest.profiles[0] if manifest is not None and manifest.profiles else {}
    shapes = {name: ShapeRange.parse(text).opt for name, text in profile.items()}
    if batch is not None:
        shapes = {name: (batch, *shape[1:]) for name, shape in shapes.items()}
    sizes = sizes_in(proto, shapes)
    return Graph({node.name: node.op_type for node in all_nodes(proto.graph)}, macs(proto, sizes))


# The page ----------------------------------------------------------------------------------------------------------------


def html(document: Mapping[str, Any]) -> str:
    """The page of a report's contents."""
    jinja2 = require("jinja2", charts.EXTRA, _PURPOSE)
    markup = require("markupsafe", charts.EXTRA, _PURPOSE).Markup
    source = whole(Path(__file__).with_name("page.html")).decode()
    script = re.search(r"<script>(.*?)</script>", source, re.S)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # Markup stays as it is
    )
    flags = {name: flag_of(item) for name, (item, _) in options(BuildRequest).items()}  # what a manifest's texts name
    environment.filters |= {
        "short": _short,
        "over": lambda count, most: max(0, count - most),
        "number": _number,
        "percent": lambda value: "–" if value is None else f"{100 * value:.1f}",
        "fact": _fact,
        "limits": _limits,
        "spoken": lambda text: spoken(text, flags),
        "counts": lambda summary: REASONS.split(summary)[0],
        "reasons": lambda summary: "; ".join(REASONS.split(summary)[1:]),
        "grouped": _grouped,
        "nodes": _nodes,
        "bytes": lambda value: f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value:,} bytes",
    }
    drawings = {name: markup(svg) for name, svg in _drawings(document).items()}
    times = {layer["number"]: layer["ms"] for layer in document["layers"]}
    page = environment.from_string(source).render(
        document, charts=drawings, digest=digest, rows=ROWS, lines=LINES, milliseconds=times
    )
    return str(page) + "\n"


def _short(text: Any, length: int = _TEXT) -> str:
    text = str(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _number(value: Any) -> str:
    """A figure in four digits, those in front of the point all; "–" where there is none."""
    if value is None:
        return "–"
    return f"{float(value):,.0f}" if 1000 <= abs(float(value)) < 1e9 else f"{float(value):.4g}"


def _fact(value: Any) -> str:
    """A value of a table of facts as text."""
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_fact(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(_fact, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _grouped(nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Nodes that aren't in the precision asked for, by why not; the commonest reason first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in nodes:
        groups.setdefault((str(item["precision"]), str(item["reason"])), []).append(item)
    return [
        {
            "nodes": [str(item["node"]) for item in items],
            "ops": list(dict.fromkeys(str(item["op"]) for item in items)),
            "precision": precision,
            "reason": reason,
        }
        for (precision, reason), items in sorted(groups.items(), key=lambda pair: -len(pair[1]))
    ]


def _limits(limits: Mapping[str, Any]) -> str:
    """Those that were given, in brackets."""
    agreement, snr = limits.get("min_agreement"), limits.get("min_snr")
    texts = [f"{agreement:.1%} the same"] if agreement else []
    texts += [f"{snr:g} dB"] if isinstance(snr, (int, float)) and snr > 0 else []
    return f" ({', '.join(texts)})" if texts else ""


def _nodes(names: Sequence[str]) -> str:
    """The nodes of a layer in a line: conversions, which TensorRT or trtopt put there, are counted alone."""
    own = [name for name in names if not name.endswith(("/QuantizeLinear", "/DequantizeLinear", "/Cast"))]
    shown_names: list[str] = []
    for name in own:
        if shown_names and sum(map(len, shown_names)) + len(name) > _NODES:
            break
        shown_names.append(_short(name))
    rest = [f"{len(own) - len(shown_names)} more" if len(own) > len(shown_names) else ""]
    count = len(names) - len(own)
    rest.append(f"{count} conversion{'s' * (count > 1)}" if count else "")
    return ", ".join(filter(None, [*shown_names, *rest]))


def _drawings(document: Mapping[str, Any]) -> dict[str, str]:
    """The charts for which there are numbers."""
    drawings: dict[str, str] = {}
    precision = document["precision"]
    rows = {"layers": precision["by_count"], "arithmetic": precision["by_macs"], "time": precision["by_time"]}
    if rows := {name: parts for name, parts in rows.items() if parts}:
        drawings["precision"] = charts.drawn("precision", "Share of each precision", charts.shares, rows)
    layers = document["layers"]
    if layers:
        drawings["order"] = charts.drawn(
            "order", "Precisions in the order of execution", charts.strip, _runs(layers)[:ROWS]
        )
    points = [
        (layer["number"], layer["ms"], layer["damage_db"], layer["precision"] or "unknown")
        for layer in layers
        if layer["ms"] is not None and layer["damage_db"] is not None
    ]
    if points:
        points = sorted(points, key=lambda point: point[2])[:ROWS]  # most damage first
        drawings["damage"] = charts.drawn("damage", "Milliseconds and decibels of each layer", charts.damage, points)
    if document["calibration"] is not None:
        tensors = [item for item in document["calibration"]["tensors"] if item["counts"]][:WORST]
        for number, item in enumerate(tensors):
            title = f"Histogram of {visible(_short(item['name']))}"
            drawings[f"histogram{number}"] = charts.drawn(
                f"histogram{number}", title, charts.histogram, item["edges"], item["counts"], item["amax"]
            )
    if (tuning := document["tuning"]) is not None:
        drawings |= _front(tuning)
    if (latency := document["latency"]) is not None:
        bars = [
            (_label(row), row["run"]["median"], row["run"]["p90"], row["run"]["p99"])
            for row in latency["rows"]
            if row["run"]
        ]
        if bars:
            drawings["latency"] = charts.drawn("latency", "Latencies: p50, p90 and p99", charts.latencies, bars[:BARS])
    return drawings


def _label(row: Mapping[str, Any]) -> str:
    """In letters that matplotlib's own font has."""
    return f"{visible(row['runner'][:24]).encode('ascii', 'replace').decode()}, {row['batch']}"


def _front(tuning: Mapping[str, Any]) -> dict[str, str]:
    def point(choice: Mapping[str, Any]) -> tuple[float, float] | None:
        snr = float(choice["snr_db"])
        return (choice["share"], snr) if abs(snr) < 1000 else None  # what isn't finite has no place

    choices = [place for item in tuning["front"][:ROWS] if (place := point(item))]
    names = {"before": "INT8, nearest codes", "whole": "with repairs", "chosen": "chosen"}
    marks = [(label, *place) for key, label in names.items() if (place := point(tuning[key]))]
    if not (choices or marks):
        return {}
    return {"front": charts.drawn("front", "Accuracy against the share in 8 bits", charts.front, choices, marks)}


def _runs(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    runs: list[tuple[str, int, int]] = []
    for place, layer in enumerate(layers):
        precision = layer["precision"] or "unknown"
        if runs and runs[-1][0] == precision:
            runs[-1] = (precision, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((precision, place, 1))
    return runs
