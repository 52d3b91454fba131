"""What a report says of an engine, as numbers: the page and its JSON twin are made of this alone.

The twin's keys are described in docs/report.md. What isn't known is None there, and stands under "unknown" with what gives it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.table import Table
from trtopt.core.documents import Damaged, checked, plain
from trtopt.core.values import x
from trtopt.core.version import __version__
from trtopt.diagnosis.measured import Compared, Compares, Measured, NoiseMade, Spread, TimedLayer
from trtopt.engine.difference import CONVERTING, built_for, differing, facts, precisions
from trtopt.engine.manifest import HEAVY, Manifest, embedded_by
from trtopt.evaluation.outputs import decibels

FORMAT = "trtopt.report/1"
LEVELS = 127  # of INT8, on either side of 0
BINS = 64  # of a histogram in the twin
_ISLAND = 3  # layers, at most
_QUANTIZED = ("int8", "fp8")
_PRECISIONS = ("int8", "fp8", "fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Graph:
    """What of an ONNX graph matters here.

    Attributes:
        ops: node → operator.   macs: node → multiply-accumulates, at the shapes that the first profile is tuned for, and the
            batch that was timed.
    """

    ops: Mapping[str, str]
    macs: Mapping[str, int]


@dataclass(frozen=True)
class Subject:
    """An engine and all that is known of it."""

    engine: Path
    nbytes: int
    maker: str | None
    precision_summary: str
    manifest: Manifest | None
    measured: Measured
    table: Table | None = None
    graph: Graph | None = None
    notes: tuple[str, ...] = ()


def contents(subject: Subject, other: Subject | None = None) -> dict[str, Any]:
    """A report as plain JSON; equal for equal input.

    Args:
        other: the engine that it is held against.
    """
    manifest, measurements = subject.manifest, subject.measured
    layers = _layers(subject)
    accuracy = _accuracy(subject)
    return {
        "format": FORMAT,
        "engine": subject.engine.name,
        "verdict": {
            "summary": subject.precision_summary,
            "asked": None if manifest is None else manifest.spec["precision"],
            "for": None if manifest is None else built_for(manifest),
            **_choice(subject),
            "accuracy": accuracy,
            "missed": list(measurements.missed),
            "speed": _speed(subject),
            "compared": None if manifest is None or not manifest.comparison else str(manifest.comparison["why"]),
        },
        "stages": _stages(subject),
        "precision": _precision(subject, layers),
        "layers": layers,
        "kept": [] if manifest is None else [plain(dict(item)) for item in manifest.kept],
        "times": _times(subject),
        "sensitivity": _sensitivity(measurements),
        "fusion": _fusion(subject, layers),
        "conversions": _conversions(layers),
        "quantized": _quantized(manifest),
        "calibration": _calibration(subject.table),
        "tuning": None if measurements.tuning is None else plain(measurements.tuning),
        "latency": None if measurements.bench is None else _latency(measurements),
        "memory": _memory(subject),
        "warnings": _warnings(subject, layers),
        "against": None if other is None else _against(subject, other),
        "provenance": _provenance(subject),
        "unknown": _unknown(subject, accuracy),
    }


def _unknown(subject: Subject, accuracy: Sequence[str]) -> list[dict[str, str]]:
    """What can't be said, and the command that gives it."""
    name, manifest, measurements = shlex.quote(subject.engine.name), subject.manifest, subject.measured
    samples = _samples(subject)
    gaps: list[tuple[str, str]] = []

    def measure(what: str, command: str, engine: str = name) -> None:
        """For what a command of trtopt measures; `engine`: which then has a report."""
        file = f"{command.split()[0]}.json"
        command_line = f"trtopt {command} --json > {file}"
        gaps.append((what, f"{command_line}; trtopt report {engine} -o report.html --results {file}"))

    if manifest is None:
        what = "how it was made, and which layers run in which precision"
        gaps.append((what, "trtopt build MODEL.onnx … -o M.engine"))
    elif not manifest.coverage and manifest.trtopt != __version__:  # which told none
        gaps.append(("the shares of the arithmetic", "trtopt build MODEL.onnx … --force -o M.engine"))
    if not _timed(subject):
        measure("how long each layer takes", f"profile {name}")
    if measurements.sensitivity is None:
        what = "what INT8 costs in accuracy, layer by layer"
        measure(what, f"sensitivity MODEL.onnx {samples}")
    if subject.graph is None:
        what = "shares of fused nodes, and nodes that no layer names: neither the graph nor the model is there"
        gaps.append((what, f"trtopt report {name} -o report.html --model MODEL.onnx"))
    if subject.table is None and _quantized(manifest):
        what = "histograms and thresholds: they are in the table that was given as --calib, or that --save-calib wrote"
        gaps.append((what, f"trtopt report {name} -o report.html --calib T.calib.json"))
    if measurements.tuning is None:
        tune = f"tune MODEL.onnx {samples} --min-snr 25 -o tuned.engine"
        measure("accuracy against INT8's share", tune, "tuned.engine")
    if measurements.bench is None:
        measure("latency beside other ways of running it, and memory", f"bench {name} --against onnxruntime")
    if not accuracy:
        measure("how near the results are to FP32's", f"verify MODEL.onnx {name} {samples}")
    return [{"what": what, "command": command} for what, command in gaps]


def _samples(subject: Subject) -> str:
    """The options that give samples like those that the engine was calibrated on, or else that its inputs take."""
    manifest, table = subject.manifest, subject.table
    if manifest is None or manifest.preprocess is not None:
        images = True
    elif table is not None and "kind" in table.data:
        images = table.data["kind"] == "images"
    else:  # calibrated without images, or not at all
        shapes = [item["shape"] for item in manifest.inputs]
        images = manifest.calibration is None and len(shapes) == 1 and len(shapes[0]) == 4
    return "--images DIR --preprocess PRESET" if images else "--data F.npz"


# Layers ------------------------------------------------------------------------------------------------------------------


def _layers(subject: Subject) -> list[dict[str, Any]]:
    """The layers in the order that they run in, with times and damage where they are known."""
    manifest_layers = {} if subject.manifest is None else {str(item["name"]): item for item in subject.manifest.layers}
    timed_layers = _timed(subject)
    times = {item["name"]: item["ms"] for item in timed_layers}
    rows: list[Mapping[str, Any]] = [manifest_layers.get(item["name"], item) for item in timed_layers]
    rows += [item for name, item in manifest_layers.items() if name not in times]
    total = sum(times.values())
    layers = []
    for number, item in enumerate(rows, 1):
        ms = times.get(item["name"])
        layers.append(
            {
                "number": number,
                "name": str(item["name"]),
                "kind": str(item["kind"]),
                "precision": str(item["precision"]) if item["precision"] in _PRECISIONS else None,
                "nodes": list(item["nodes"]),
                "follows": list(item.get("follows", ())),
                "ms": ms,
                "share": ms / total if ms is not None and total else None,
                "damage_db": None,
                "converts": None,
            }
        )
    ops = {} if subject.graph is None else subject.graph.ops
    for layer in layers:
        layer["converts"] = _converts(layer, ops)
    _add_damage(layers, subject.measured)
    return layers


def _timed(subject: Subject) -> Sequence[TimedLayer]:
    """The layers of the largest batch profiled; none where the profile is another engine's."""
    profile = subject.measured.profile
    if profile is None or not profile["batches"]:
        return ()
    layers = max(profile["batches"], key=lambda item: item["batch"])["layers"]
    names = {item["name"] for item in subject.manifest.layers} if subject.manifest is not None else set()
    return layers if not names or names & {item["name"] for item in layers} else ()


def _converts(layer: Mapping[str, Any], ops: Mapping[str, str]) -> str | None:
    """ "only": it does nothing but change types or formats; "too": beside other work; None: it doesn't, or it isn't known."""
    inside = [ops.get(node, node.rpartition("/")[2]) in CONVERTING for node in layer["nodes"]]
    if layer["kind"] != "other":
        return None
    if re.search(r"reformat|copynode", layer["name"], re.I) or (inside and all(inside)):
        return "only"
    return "too" if any(inside) else None


def _add_damage(layers: Sequence[dict[str, Any]], measurements: Measured) -> None:
    """The signal-to-noise ratio that is left where nothing but what a layer reads and its weights is quantized."""
    if measurements.sensitivity is None:
        return
    homes = _homes(layers)
    noise: dict[int, float] = {}
    for source in measurements.sensitivity["sources"]:
        power = _power(source, measurements.sensitivity["output"])
        nodes = [node for node in source["nodes"] if node in homes]
        for node in nodes:
            number = homes[node]["number"]
            noise[number] = noise.get(number, 0.0) + power / len(source["nodes"])
    for layer in layers:
        if (power := noise.get(layer["number"], 0.0)) > 0:
            layer["damage_db"] = -10 * math.log10(power)


def _homes(layers: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Node → the layer that does its arithmetic; else the first that names it."""
    homes: dict[str, dict[str, Any]] = {}
    for layer in sorted(layers, key=lambda item: item["kind"] not in HEAVY):
        for node in layer["nodes"]:
            homes.setdefault(node, layer)
    return homes


def _power(source: NoiseMade, output: str) -> float:
    """The noise of a source at `output`, as a share of the signal's power."""
    snr = float(source["snr_db"].get(output, "inf"))
    return 10 ** (-max(snr, -200.0) / 10) if not math.isnan(snr) else 0.0


def _precision(subject: Subject, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares by precision: of the layers with products, of the multiply-accumulates, of the time."""
    heavy = Counter(layer["precision"] or "unknown" for layer in layers if layer["kind"] in HEAVY)
    total = sum(heavy.values())
    by_time: dict[str, float] = {}
    for layer in layers:
        if layer["share"] is not None:
            key = layer["precision"] or "unknown"
            by_time[key] = by_time.get(key, 0.0) + layer["share"]
    coverage = {} if subject.manifest is None else subject.manifest.coverage
    return {
        "counts": _ordered(heavy),
        "by_count": {name: count / total for name, count in _ordered(heavy).items()} or None,
        "by_macs": _ordered(coverage) or None,
        "by_time": _ordered(by_time) or None,
    }


def _ordered(values: Mapping[str, Any]) -> dict[str, Any]:
    names = [*_PRECISIONS, *sorted(set(values) - set(_PRECISIONS))]
    return {name: values[name] for name in names if values.get(name)}


def _fusion(subject: Subject, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Nodes and layers: which node is where, and what a fused layer's products have of its arithmetic, by the work alone."""
    where: dict[str, list[int]] = {}
    for layer in layers:
        for node in layer["nodes"]:
            where.setdefault(node, []).append(layer["number"])
    heavy = [layer for layer in layers if layer["kind"] in HEAVY]
    graph, fused_layers, nodes_without_layer = subject.graph, [], None
    if graph is not None:
        nodes_without_layer = [node for node in graph.macs if node not in where]
        for layer in heavy:
            work = {node: graph.macs[node] for node in layer["nodes"] if node in graph.macs}
            if len(work) > 1 and (total := sum(work.values())):
                members = [{"node": node, "estimated_share": count / total} for node, count in work.items()]
                fused_layers.append({"layer": layer["number"], "members": members})
    return {
        "nodes": where,
        "heavy_layers": len(heavy),
        "heavy_layers_with_nodes": sum(bool(layer["nodes"]) for layer in heavy),
        "fused": fused_layers,
        "products_without_layer": nodes_without_layer,
    }


def _conversions(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Layers that convert, and islands: a few layers with products in one precision between others in another."""
    only = [layer for layer in layers if layer["converts"] == "only"]
    times = [layer["ms"] for layer in only]
    runs: list[dict[str, Any]] = []
    for layer in layers:
        if layer["kind"] not in HEAVY:
            continue
        if runs and runs[-1]["precision"] == layer["precision"]:
            runs[-1]["layers"].append(layer["number"])
        else:
            runs.append({"precision": layer["precision"], "layers": [layer["number"]]})
    inner = runs[1:-1]
    return {
        "only": [layer["number"] for layer in only],
        "too": [layer["number"] for layer in layers if layer["converts"] == "too"],
        "ms": sum(times) if times and None not in times else None,
        "switches": max(0, len(runs) - 1),
        "islands": [run for run in inner if len(run["layers"]) <= _ISLAND],
    }


def _stages(subject: Subject) -> list[dict[str, Any]] | None:
    """What was done for the engine, and how long it took; None: nothing of it is known."""
    if subject.measured.durations:
        return [{"what": item["what"], "seconds": item["seconds"]} for item in subject.measured.durations]
    if subject.manifest is None:
        return None
    return [{"what": f"building with {subject.manifest.origin}", "seconds": subject.manifest.seconds}]


# What was measured -------------------------------------------------------------------------------------------------------


def _times(subject: Subject) -> dict[str, Any] | None:
    profile = subject.measured.profile
    if profile is None or not _timed(subject):
        return None
    batches = [
        {"batch": item["batch"], "layers_ms": item["total_ms"], "whole_ms": item["gpu"]["median"]}
        for item in profile["batches"]
    ]
    return {"gpu": profile["gpu"], "inputs": profile["inputs"], "batches": batches}


def _sensitivity(measurements: Measured) -> dict[str, Any] | None:
    sensitivity = measurements.sensitivity
    if sensitivity is None:
        return None
    keys = ("samples", "output", "predicted_snr_db", "measured_snr_db", "summary")
    return {name: plain(sensitivity[name]) for name in keys}  # type: ignore[literal-required]


def _latency(measurements: Measured) -> dict[str, Any]:
    assert measurements.bench is not None
    names = ("runner", "batch", "gpu", "host", "run", "throughput", "streams", "note")
    rows = [{name: plain(row[name]) for name in names} for row in measurements.bench["rows"]]  # type: ignore[literal-required]
    return {"gpu": measurements.bench["gpu"], "inputs": measurements.bench["inputs"], "rows": rows}


def _memory(subject: Subject) -> dict[str, Any]:
    session_memory = None if subject.measured.bench is None else subject.measured.bench["memory"]
    workspace = None if subject.manifest is None else subject.manifest.spec.get("workspace")
    return {
        "plan": subject.nbytes,
        "workspace_limit": workspace,
        "scratch": None if subject.manifest is None else subject.manifest.scratch,
        "session": None if session_memory is None else plain(dict(session_memory)),
    }


def _accuracy(subject: Subject) -> list[str]:
    """How near the results are to FP32's, by all that measured it."""
    sentences = []
    measurements = subject.measured
    if measurements.accuracy is not None:
        sentences += _compared(measurements.accuracy)
    if measurements.tuning is not None:
        choice = measurements.tuning["chosen"]
        figure = f", {choice['figure']}" if choice["figure"] else ""
        which = (
            "tuned"
            if _choice(subject)["kept"] in (None, *_QUANTIZED)
            else "the tuned graph, which isn't what was kept,"
        )
        sentences.append(f"{which} on {measurements.tuning['samples']} samples: {decibels(choice['snr_db'])}{figure}")
    if measurements.sensitivity is not None:
        output = measurements.sensitivity["output"]
        whole = measurements.sensitivity["measured_snr_db"].get(output)
        if whole is not None:
            samples = measurements.sensitivity["samples"]
            sentences.append(f"all of it in INT8, before any repair: {output} {decibels(whole)} on {samples} samples")
    kept_candidate = next((item for item in _candidates(subject) if item["kept"]), None)
    if measurements.accuracy is None and kept_candidate is not None and kept_candidate["accuracy"] is not None:
        sentences += _compared(kept_candidate["accuracy"])
    return sentences


def _compares(subject: Subject) -> Compares | None:
    """How the precisions compared, as the manifest says; one that can't be read, as of another version, counts as none."""
    comparison = None if subject.manifest is None else subject.manifest.comparison
    try:
        return None if comparison is None else checked(dict(comparison), Compares)
    except Damaged:
        return None


def _candidates(subject: Subject) -> list[dict[str, Any]]:
    """The precisions that were built and measured."""
    compares = _compares(subject)
    if compares is None:
        return []
    return [{**item, "kept": item["precision"] == compares["kept"]} for item in compares["candidates"]]


def _choice(subject: Subject) -> dict[str, Any]:
    """Of what was the kept precision chosen, and within which limits; None where one alone was asked for."""
    candidates, compares = _candidates(subject), _compares(subject)
    kept_precision = next((item["precision"] for item in candidates if item["kept"]), None)
    if kept_precision is None or compares is None or not compares.get("best"):
        return {"among": None, "limits": None, "kept": kept_precision}
    limits = dict(compares.get("limits") or {})
    return {"among": [item["precision"] for item in candidates], "limits": plain(limits), "kept": kept_precision}


def _compared(comparison: Compared) -> list[str]:
    sentences = []
    for name, output in comparison["outputs"].items():
        figures = [decibels(output["snr_db"])] if not output.get("integers") else []
        if output["agreement"] is not None:
            figures.insert(0, f"{output['agreement']:.1%} the same")
        channels = output.get("channels")
        lowest = channels["lowest"] if channels else None  # None: none of them carries signal
        if channels and lowest in range(len(channels["snr_db"])) and channels["snr_db"][lowest] is not None:
            figures[-1] += f" ({decibels(channels['snr_db'][lowest])} in channel {lowest}, the lowest)"
        sentences.append(f"{name} ({output['kind']}): {', '.join(figures)} on {comparison['samples']} samples")
    old, new = comparison["reference_accuracy"], comparison["candidate_accuracy"]
    if old and new:
        sentences.append(f"top-1 {old['top1']:.1%} → {new['top1']:.1%}")
    return sentences


def _speed(subject: Subject) -> list[str]:
    sentences = []
    measurements = subject.measured
    if measurements.bench is not None:
        for row in measurements.bench["rows"]:
            if row["runner"] == "trtopt" and row["run"] is not None:
                gpu_part = f", {_ms(row['gpu'])} on the GPU" if row["gpu"] else ""
                sentences.append(f"batch {row['batch']}: {_ms(row['run'])} end to end (median){gpu_part}")
    elif measurements.profile is not None and _timed(subject):
        batches = measurements.profile["batches"]
        sentences += [f"batch {item['batch']}: {_ms(item['gpu'])} on the GPU (median)" for item in batches]
    if (run := measurements.run) is not None:
        sentences.append(f"run ({run['backend']}): {run['timing']}")
    for candidate in _candidates(subject):
        for times in candidate["times"]:
            shapes = ", ".join(f"{name} {shape}" for name, shape in times["shapes"].items())
            mark = " (kept)" if candidate["kept"] else ""
            sentences.append(f"{candidate['precision'].upper()}{mark}: {times['gpu_ms']:.4g} ms on the GPU at {shapes}")
    return sentences


def _ms(spread: Spread) -> str:
    return f"{spread['median']:.4g} ms"


# Calibration -------------------------------------------------------------------------------------------------------------


def _calibration(table: Table | None) -> dict[str, Any] | None:
    if table is None:
        return None
    rows = [_tensor(name, entry.amax, entry.method, entry.histogram) for name, entry in table.tensors.items()]
    rows.sort(key=lambda row: (row["snr_db"] is None, row["snr_db"] or 0.0, row["name"]))
    return {"method": table.method, "samples": table.samples, "tensors": rows}


def _quantized(manifest: Manifest | None) -> bool:
    """Whether an engine has, or may have, anything quantized."""
    if manifest is None or manifest.calibration is not None or manifest.spec["precision"] in _QUANTIZED:
        return True
    return any(manifest.precision.get(name) for name in _QUANTIZED)


def _tensor(name: str, amax: float, method: str, histogram: Histogram | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "amax": amax, "method": method}
    if histogram is None or not histogram.absmax:
        return row | {"absmax": None, "clipped": None, "snr_db": None, "edges": None, "counts": None}
    snr, clipped = rounding(histogram, amax)
    bins = int(np.flatnonzero(histogram.counts)[-1]) + 1
    step = max(1, math.ceil(bins / BINS))
    padded_counts = np.zeros(step * math.ceil(bins / step), np.int64)
    padded_counts[:bins] = histogram.counts[:bins]
    counts = padded_counts.reshape(-1, step).sum(1)
    edges = [histogram.width * step * place for place in range(len(counts) + 1)]
    return row | {
        "absmax": histogram.absmax,
        "clipped": clipped,
        "snr_db": snr,
        "edges": edges,
        "counts": [int(count) for count in counts],
    }


def rounding(histogram: Histogram, amax: float) -> tuple[float | None, float]:
    """Signal to noise of a tensor in INT8 by its threshold, in dB, and the share of values beyond it; estimated.

    Within the threshold the error is taken for uniform over a step (its square is step²/12 in the mean), and where a bin is
    wider than a step, no more can be told. Zeros, which lose nothing, are in the first bin with other small values.
    """
    middle = (np.arange(len(histogram.counts)) + 0.5) * histogram.width
    beyond = np.maximum(np.minimum(middle, histogram.absmax) - amax, 0.0)
    signal = float(histogram.counts @ middle**2)
    inside = float(histogram.counts @ (beyond == 0))
    noise = float(histogram.counts @ beyond**2) + inside * (amax / LEVELS) ** 2 / 12
    clipped = 1 - inside / histogram.total
    return (10 * math.log10(signal / noise) if signal and noise else None), clipped


# Warnings ----------------------------------------------------------------------------------------------------------------


def _warnings(subject: Subject, layers: Sequence[Mapping[str, Any]]) -> list[dict[str, str | None]]:
    """What to know before relying on it, each with what to do; None: the text says it, or there is nothing to do."""
    name = shlex.quote(subject.engine.name)
    warnings: list[tuple[str, str | None]] = []
    manifest, measurements = subject.manifest, subject.measured
    if manifest is not None:
        check = f"trtopt verify MODEL.onnx {name} {_samples(subject)} says whether results suffer"
        if any(item["kept"] and item["accuracy"] for item in _candidates(subject)):
            check = "nothing, if the accuracy above will do: it was measured on this engine"
        warnings += [(text, None if "`" in text else check) for text in manifest.warnings]  # ours name an option
        precision = str(manifest.spec["precision"])
        other_layers = [
            layer for layer in layers if layer["kind"] in HEAVY and layer["precision"] not in (precision, None)
        ]
        if precision in _QUANTIZED and other_layers:
            text = f"layers with products that don't run in {precision.upper()}: {len(other_layers)}"
            warnings.append(
                (text, "the reasons stand under “Not in the precision asked for”; trtopt check MODEL.onnx --nodes")
            )
    warnings += [(text, f"measure {name} itself, and leave out --results of others") for text in measurements.strangers]
    if measurements.profile is not None:
        warnings += [(text, None) for text in measurements.profile["notes"]]
        if not _timed(subject):
            text = "no layer that was timed is one of this engine: the times are of another build, and are left out"
            warnings.append((text, f"trtopt profile {name} --json > profile.json"))
    if measurements.bench is not None:
        warnings += [(text, None) for text in measurements.bench["notes"]]
    table = subject.table
    digest = None if manifest is None or manifest.calibration is None else manifest.calibration.get("digest")
    if table is not None and digest and digest != table.digest:
        warnings.append(("the calibration table isn't the one that the engine was built with", "give that one"))
    return [{"text": text, "what_to_do": do} for text, do in dict(warnings).items()]


# Two builds --------------------------------------------------------------------------------------------------------------


def _against(subject: Subject, other: Subject) -> dict[str, Any]:
    """What differs, this engine's value first."""
    differences = [
        differing(*(of(each) for each in (subject, other))) for of in (_facts, lambda each: precisions(_layers(each)))
    ]
    return {
        "engine": other.engine.name,
        "facts": [plain(item) for item in differences[0]],
        "nodes": [{"node": item.what, "this": item.this, "other": item.other} for item in differences[1]],
    }


def _facts(subject: Subject) -> dict[str, Any]:
    """What two builds can be compared by, in words."""
    return facts(subject.nbytes, subject.precision_summary, subject.manifest) | {
        "seconds to build": None if subject.manifest is None else subject.manifest.seconds,
        "accuracy": "; ".join(_accuracy(subject)) or None,
        "speed": "; ".join(_speed(subject)) or None,
    }


def _provenance(subject: Subject) -> dict[str, Any]:
    manifest = subject.manifest
    facts: dict[str, Any] = {"plan": subject.engine.name, "bytes": subject.nbytes, "made by": subject.maker}
    if manifest is None:
        return facts | {"notes": list(subject.notes)}
    preprocessing = embedded_by(manifest)
    return facts | {
        "plan sha256": manifest.plan["sha256"],
        "model": Path(manifest.source["path"]).name if manifest.source["path"] else None,
        "model sha256": manifest.source["sha256"],
        "graph sha256": manifest.graph,
        "key": manifest.key,
        "trtopt": manifest.trtopt,
        "GPU of the build": manifest.generation["gpu"],
        "seconds to build": manifest.seconds,
        "calibration": plain(manifest.calibration),
        "inputs": {item["name"]: f"{item['dtype']} {x(item['shape'])}" for item in manifest.inputs},
        "preprocessing embedded": None if preprocessing is None else preprocessing.sentence,
        "profiles": [dict(profile) for profile in manifest.profiles],
        "asked": plain(dict(manifest.spec)),
    }
