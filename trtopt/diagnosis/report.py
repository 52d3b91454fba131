"""One page on an engine that opens anywhere: its verdict in a line, pictures, and the tables behind them, folded.

The page is one HTML file without a link to anything. Names come from files of others, so that everything is escaped, and the
page's own policy lets no other script run. Nothing is measured here: the manifest and the results of other commands are read.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from trtopt.builder.request import BuildRequest
from trtopt.core.documents import plain
from trtopt.core.errors import UsageError, require
from trtopt.core.files import whole, write_bytes
from trtopt.core.options import flag_of, options, spoken, taking
from trtopt.core.values import x
from trtopt.core.words import counted, grouped, visible
from trtopt.diagnosis import charts
from trtopt.diagnosis.request import ReportRequest
from trtopt.diagnosis.results import BESIDE, Subject, measured
from trtopt.engine.inspection import inspect
from trtopt.engine.manifest import HEAVY, REASONS, Manifest, as_built, embedded_by
from trtopt.engine.reports import built_for
from trtopt.evaluation.measures import decibels
from trtopt.evaluation.outputs import sentence

FORMAT = "trtopt.report/2"
ROWS, LINES, BARS = 2000, 12, 12  # of a table, of a part of the verdict, of a chart with names
_TEXT, _NODES = 120, 400  # characters of a name, and of the nodes of a layer
_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError)  # by a file that was edited, or is a later trtopt's
_QUANTIZED, _PRECISIONS = ("int8", "fp8"), ("int8", "fp8", "fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Report:
    """The page that `report` wrote, its size, and what it says as plain JSON."""

    page: Path
    nbytes: int
    contents: Mapping[str, Any]

    @property
    def unknown(self) -> Sequence[Mapping[str, str]]:
        """Return what it couldn't say, and the command that gives it."""
        return tuple(self.contents["unknown"])

    def to_json(self) -> dict[str, Any]:
        document = {"format": FORMAT, "page": str(self.page), "bytes": self.nbytes}
        return document | {"verdict": self.contents["verdict"], "unknown": list(self.unknown)}


@taking(ReportRequest)
def report(request: ReportRequest) -> Report:
    """Write a page on an engine: the verdict, what runs in which precision against what was asked, times, accuracy, layers,
    warnings, provenance. Nothing is measured; what isn't known is named, with the command that gives it.

    Equal input gives equal bytes: the page has no time, no path and no random name in it.

    Args:
        engine: a plan file, or its manifest alone (M.engine.json).
        results: of these functions, besides what the commands have written beside the engine (M.engine.results.json).

    Raises:
        UsageError: a file that isn't there, is nothing of the kind, or would be overwritten; a result of another engine.
        EngineError, EngineMismatch: as `inspect`.
        MissingDependency, OutputError: jinja2 isn't installed; the page can't be written.
    """
    ready()
    engine = inspect(request.engine)
    path = engine.engine
    plan = path.with_suffix("") if path.suffix == ".json" else path  # a manifest's, or itself
    if engine.manifest is None:
        raise UsageError(f"{path} has no manifest beside it, which is what a report tells: trtopt inspect {path}")
    try:
        with request.reporter.phase("drawing"):
            contents = plain(_contents(measured(plan, engine, engine.manifest, request.results)))
            page = rendered("page.html", {**contents, "charts": _charts(contents)}).encode()
    except _MISSHAPEN as error:
        if not Path(f"{plan}{BESIDE}").exists():
            raise
        raise UsageError(
            f"{plan}{BESIDE} isn't as trtopt writes it ({error!r}): remove it, and measure again"
        ) from error
    write_bytes(request.output, page)
    return Report(Path(request.output), len(page), contents)


def ready() -> None:
    """Raise MissingDependency now rather than after the long work."""
    require("jinja2", "report", "writing a report")


# What is said ----------------------------------------------------------------------------------------------------------------


def _contents(subject: Subject) -> dict[str, Any]:
    manifest, layers = subject.manifest, _layers(subject)
    accuracy, speed, compared = _accuracy(subject), _speed(subject), subject.candidates
    best = compared if compared.get("best") else None
    summary = subject.engine.precision_summary
    first = [REASONS.split(summary)[0], *accuracy[:1], *subject.missed[:1], *speed[:1]]
    return {
        "engine": subject.plan.name,
        "verdict": {
            "line": "; ".join(filter(None, first)),
            "summary": summary,
            "asked": manifest.spec["precision"],
            "for": built_for(manifest),
            "among": [item["precision"] for item in best["candidates"]] if best is not None else None,
            "limits": best.get("limits") if best is not None else None,
            "kept": compared["kept"],
            "accuracy": accuracy,
            "missed": list(subject.missed),
            "speed": speed,
            "compared": str(manifest.comparison["why"]) if manifest.comparison else None,
        },
        "precision": _precision(manifest, layers),
        "layers": layers,
        "order": [(name, len([*run])) for name, run in groupby(layer["precision"] or "unknown" for layer in layers)],
        "kept": [dict(item) for item in manifest.kept],
        "times": subject.profile if _timed(subject) else None,
        "sensitivity": subject.sensitivity,
        "worst": charts.worst_samples(subject.accuracy)[:BARS],
        "tuning": subject.tuning,
        "latency": subject.bench,
        "warnings": _warnings(subject, layers),
        "provenance": _provenance(subject),
        "unknown": _unknown(subject, accuracy),
    }


def _unknown(subject: Subject, accuracy: Sequence[str]) -> list[dict[str, str]]:
    """List what can't be said, each with the command that gives it."""
    name, samples = shlex.quote(subject.plan.name), _samples(subject.manifest)
    tuned = "tuned.engine"
    gaps = [  # what it is, what says it here, the command that measures it, and the engine whose report finds that
        ("how long each layer takes", _timed(subject), f"profile {name}", name),
        ("what INT8 costs in accuracy, layer by layer", subject.sensitivity, f"sensitivity MODEL.onnx {samples}", name),
        ("accuracy against INT8's share", subject.tuning, f"tune MODEL.onnx {samples} --min-snr 25 -o {tuned}", tuned),
        ("latency beside other ways of running it", subject.bench, f"bench {name} --against onnxruntime", name),
        ("how near the results are to FP32's", accuracy, f"verify MODEL.onnx {name} {samples}", name),
    ]
    return [
        {"what": what, "command": f"trtopt {command}; trtopt report {engine} -o report.html"}
        for what, known, command, engine in gaps
        if not known
    ]


def _samples(manifest: Manifest) -> str:
    """The options that give samples like those that the engine takes."""
    return "--data F.npz" if manifest.preprocess is None else "--images DIR --preprocess PRESET"


# Layers ----------------------------------------------------------------------------------------------------------------------


def _layers(subject: Subject) -> list[dict[str, Any]]:
    """The layers in the order that they run in, with times and damage where they are known."""
    by_name = {str(item["name"]): item for item in subject.manifest.layers}
    times = {item["name"]: item["ms"] for item in _timed(subject)}
    rows = [by_name.get(item["name"], item) for item in _timed(subject)]
    rows += [item for name, item in by_name.items() if name not in times]
    total = sum(times.values())
    layers = []
    for number, item in enumerate(rows, 1):
        ms = times.get(item["name"])
        share = ms / total if ms is not None and total else None
        precision = str(item["precision"]) if item["precision"] in _PRECISIONS else None
        layer = {"number": number, "name": str(item["name"]), "kind": str(item["kind"]), "precision": precision}
        layers.append({**layer, "nodes": [*item["nodes"]], "ms": ms, "share": share, "damage_db": None})
    _add_damage(layers, subject.sensitivity)
    return layers


def _timed(subject: Subject) -> Sequence[Any]:
    """The layers of the largest batch profiled; none where the profile is another engine's."""
    profile = subject.profile
    if profile is None or not profile["batches"]:
        return ()
    layers = max(profile["batches"], key=lambda item: item["batch"])["layers"]
    names = {item["name"] for item in subject.manifest.layers}
    return layers if not names or names & {item["name"] for item in layers} else ()


def _add_damage(layers: Sequence[dict[str, Any]], sensitivity: Any) -> None:
    """Note the signal-to-noise ratio that is left where nothing but what a layer reads and its weights is quantized."""
    homes: dict[str, dict[str, Any]] = {}  # node → the layer that does its arithmetic; else the first that names it
    for layer in sorted(layers, key=lambda item: item["kind"] not in HEAVY):
        for node in layer["nodes"]:
            homes.setdefault(node, layer)
    noise = defaultdict[int, float](float)
    for source in sensitivity["sources"] if sensitivity is not None else ():
        snr = float(source["snr_db"].get(sensitivity["output"], "inf"))
        power = 0.0 if math.isnan(snr) else 10 ** (-max(snr, -200.0) / 10)
        for node in source["nodes"]:
            if node in homes:
                noise[homes[node]["number"]] += power / len(source["nodes"])
    for layer in layers:
        if (power := noise[layer["number"]]) > 0:
            layer["damage_db"] = -10 * math.log10(power)


def _precision(manifest: Manifest, layers: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, float]]:
    """Shares by precision: of the layers with products, of their multiply-accumulates, of the time."""
    counts: Counter[str] = Counter(layer["precision"] or "unknown" for layer in layers if layer["kind"] in HEAVY)
    times = defaultdict[str, float](float)
    for layer in layers:
        times[layer["precision"] or "unknown"] += layer["share"] or 0.0
    shares = {
        "time": times,
        "arithmetic": manifest.coverage,
        "layers with products": {name: count / counts.total() for name, count in counts.items()},
    }
    return {
        what: {name: parts[name] for name in (*_PRECISIONS, "unknown") if parts.get(name)}
        for what, parts in shares.items()
        if any(parts.values())
    }


# What was measured -----------------------------------------------------------------------------------------------------------


def _accuracy(subject: Subject) -> list[str]:
    """Tell how near this engine's results are to FP32's, by all that measured it."""
    kept, said = subject.candidates["kept"], list[str]()
    judged = [item["accuracy"] for item in subject.candidates["candidates"] if item["precision"] == kept]
    for accuracy in filter(None, judged if subject.accuracy is None else [subject.accuracy]):
        said += [sentence(name, output, accuracy["samples"]) for name, output in accuracy["outputs"].items()]
        if (old := accuracy["reference_accuracy"]) and (new := accuracy["candidate_accuracy"]):
            said.append(f"top-1 {old['top1']:.1%} → {new['top1']:.1%}")
    if subject.tuning is not None and kept in (None, *_QUANTIZED):
        choice = subject.tuning["chosen"]
        figure = f", {choice['figure']}" if choice["figure"] else ""
        said.append(f"tuned on {subject.tuning['samples']} samples: {decibels(choice['snr_db'])}{figure}")
    return said


def _speed(subject: Subject) -> list[str]:
    sentences = list[str]()
    if subject.bench is not None:
        for row in subject.bench["rows"]:
            if row["runner"] == "trtopt" and row["run"] is not None:
                gpu = f", {row['gpu']['median']:.4g} ms on the GPU" if row["gpu"] else ""
                sentences.append(f"batch {row['batch']}: {row['run']['median']:.4g} ms end to end (median){gpu}")
    elif subject.profile is not None and _timed(subject):
        for item in subject.profile["batches"]:
            sentences.append(f"batch {item['batch']}: {item['gpu']['median']:.4g} ms on the GPU (median)")
    if subject.run is not None:
        sentences.append(f"run ({subject.run['backend']}): {subject.run['timing']}")
    kept = subject.candidates["kept"]
    for candidate in sorted(subject.candidates["candidates"], key=lambda item: item["precision"] != kept):
        name = candidate["precision"].upper() + " (kept)" * (candidate["precision"] == kept)
        for times in candidate["times"]:
            shapes = ", ".join(" ".join(pair) for pair in times["shapes"].items())
            sentences.append(f"{name}: {times['gpu_ms']:.4g} ms on the GPU at {shapes}")
    return sentences


def _warnings(subject: Subject, layers: Sequence[Mapping[str, Any]]) -> list[dict[str, str | None]]:
    """List what to know before relying on it, each with what to do; None: the text says it, or there is nothing to do."""
    name, warnings = shlex.quote(subject.plan.name), list[tuple[str, str | None]]()
    manifest = subject.manifest
    check = f"trtopt verify MODEL.onnx {name} {_samples(manifest)} says whether results suffer"
    warnings += [(text, None if "`" in text else check) for text in manifest.warnings]  # ours name an option
    precision = str(manifest.spec["precision"])
    others = [layer for layer in layers if layer["kind"] in HEAVY and layer["precision"] not in (precision, None)]
    if precision in _QUANTIZED and others:
        text = f"layers with products that don't run in {precision.upper()}: {len(others)}"
        do = "the reasons stand under “Not in the precision asked for”; trtopt check MODEL.onnx --nodes"
        warnings.append((text, do))
    if subject.profile is not None and not _timed(subject):
        text = "no layer that was timed is one of this engine: the times are of another build, and are left out"
        warnings.append((text, f"trtopt profile {name}"))
    for result in filter(None, (subject.profile, subject.bench)):
        warnings += [(text, None) for text in result["notes"]]
    return [{"text": text, "what_to_do": do} for text, do in dict(warnings).items()]


def _provenance(subject: Subject) -> dict[str, Any]:
    manifest = subject.manifest
    preprocessing = embedded_by(manifest)
    return {
        "plan": subject.plan.name,
        "bytes": subject.engine.nbytes,
        "made by": subject.engine.maker,
        "plan sha256": manifest.plan["sha256"],
        "model": Path(manifest.source["path"]).name if manifest.source["path"] else None,
        "model sha256": manifest.source["sha256"],
        "trtopt": manifest.trtopt,
        "GPU of the build": manifest.generation["gpu"],
        "seconds to build": manifest.seconds,
        "scratch memory of a context": manifest.scratch,
        "calibration": manifest.calibration,
        "inputs": {item.name: f"{item.dtype} {x(item.shape)}" for item in as_built(manifest.inputs, manifest)},
        "preprocessing embedded": None if preprocessing is None else preprocessing.sentence,
        "profiles": [dict(profile) for profile in manifest.profiles],
        **{f"option: {name}": value for name, value in manifest.spec.items()},
    }


# The page --------------------------------------------------------------------------------------------------------------------


def rendered(name: str, contents: Mapping[str, Any]) -> str:
    """Make a page by one of the templates that lie here."""
    jinja2 = require("jinja2", "report", "writing a report")
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda template: whole(folder / template).decode()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # Markup stays as it is
    )
    flags = {name: flag_of(item) for name, (item, _) in options(BuildRequest).items()}  # what a manifest's texts name
    environment.filters |= {
        "short": _short,
        "number": _number,
        "percent": lambda value: "–" if value is None else f"{100 * value:.1f}",
        "fact": _fact,
        "spoken": lambda text: spoken(text, flags),
        "grouped": _grouped,
        "nodes": _nodes,
    }
    limits = {"rows": ROWS, "lines": LINES, "bars": BARS}
    try:
        return str(environment.get_template(name).render(contents, **limits)) + "\n"
    except jinja2.UndefinedError as error:
        raise KeyError(str(error)) from error


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


def _grouped(nodes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Nodes that aren't in the precision asked for, by it and the reason why not; the commonest first."""
    groups = grouped(((item["precision"], item["reason"]), f"{item['node']} ({item['op']})") for item in nodes)
    return sorted(groups.items(), key=lambda pair: -len(pair[1]))


def _nodes(names: Sequence[str]) -> str:
    """The nodes of a layer in a line: conversions, which TensorRT or trtopt put there, are counted alone."""
    own = [name for name in names if not name.endswith(("/QuantizeLinear", "/DequantizeLinear", "/Cast"))]
    shown: list[str] = []
    for name in own:
        if shown and sum(map(len, shown)) + len(name) > _NODES:
            break
        shown.append(_short(name))
    rest = [f"{len(own) - len(shown)} more" if len(own) > len(shown) else ""]
    rest.append(counted(count, "conversion") if (count := len(names) - len(own)) else "")
    return ", ".join(filter(None, [*shown, *rest]))


def _charts(contents: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the charts; one for which there are no numbers is empty."""
    damage = [layer for layer in contents["layers"] if layer["ms"] is not None and layer["damage_db"] is not None]
    tuning, points, dots = contents["tuning"], [], []
    for layer in sorted(damage, key=lambda layer: layer["damage_db"])[:ROWS]:  # most damage first
        what = f"#{layer['number']} {_short(layer['name'])}"
        points.append((what, layer["ms"], layer["damage_db"], layer["precision"] or "unknown"))
    if tuning is not None:
        choices = [("chosen", tuning["chosen"]), ("before", tuning["before"]), ("repaired", tuning["whole"])]
        for label, item in [*choices, *(("tried", item) for item in tuning["front"][:ROWS])]:
            share, snr = 100 * item["share"], float(item["snr_db"])
            if abs(snr) < 1000:  # what isn't finite has no place
                what = f"{label} {share:.1f} % {snr:.1f} dB"
                dots.append((what, share, snr, "fp16" if label == "chosen" else "int8"))
    return {"damage": charts.scatter(points, fewer_up=True), "front": charts.scatter(dots)}
