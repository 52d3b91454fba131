"""report: one page on an engine; by manifests and results that are made up, and by what commands give."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import manifests
import numpy as np
import pytest
from test_profiling_command import LAYERS, PlayedSession
from typer.testing import CliRunner
from world import Heard

import trtopt
from trtopt import cli
from trtopt.core.errors import EngineError, MissingDependency, OutputError, UsageError
from trtopt.core.values import Precision
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.diagnosis.profiling import EngineProfile
from trtopt.diagnosis.results import keep
from trtopt.evaluation.outputs import OutputAgreement
from trtopt.graph.output_kinds import Kind
from trtopt.runtime.timing import LayerTime, LayerTimes, Spread

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m\"'&$\\frac{1}{2}$"
INNER = [  # of a manifest
    {"name": "reformat", "kind": "other", "precision": "fp16", "nodes": []},
    {"name": "conv1 + relu1", "kind": "convolution", "precision": "int8", "nodes": ["conv1", "relu1"]},
    {"name": "mid", "kind": "convolution", "precision": "fp16", "nodes": ["mid"]},
    {"name": "both", "kind": "matmul", "precision": "int8", "nodes": ["q", "k", "x/QuantizeLinear"]},
    {"name": "casts", "kind": "other", "precision": "fp16", "nodes": ["y/Cast"]},
]


def made(path: Path, layers: Any = INNER, **changes: Any) -> Path:
    """An engine's file with a manifest."""
    values: dict[str, Any] = {
        "generation": {
            "family": "tensorrt10",
            "product": "TensorRT",
            "version": "10.16",
            "gpu": "Played GPU (sm90, 1 GiB)",
        },
        "targets": [],
        "precision": {"int8": 2, "fp16": 1, "fp32": 0, "total": 3},
        "precision_summary": "1 of 2 convolutions INT8, 1 of 2 FP16; 1 of 1 matrix products INT8",
        "kept": [{"node": "mid", "op": "Conv", "precision": "fp16", "reason": "tuned: it makes 40% of the noise"}],
        "profiles": [{"x": "1x3,8x3,32x3"}],
        "calibration": {"method": "entropy", "samples": 8, "digest": "another"},
        "warnings": ["workspace was too small for a tactic: `workspace='4GiB'`"],
        "coverage": {"int8": 0.75, "fp16": 0.25},
    }
    return manifests.made(path, layers=layers, **{**values, **changes})


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return made(tmp_path / "m.engine")


def spread(ms: float) -> dict[str, float]:
    return {"median": ms, "p90": 1.1 * ms, "p99": 1.5 * ms, "minimum": 0.9 * ms}


def profiled() -> dict[str, Any]:
    """As `trtopt profile --json` has it."""
    times = [0.05, 0.3, 0.2, 0.4, 0.05]
    layers = tuple(
        LayerTime(item["name"], ms, ms, ms, item["kind"], Precision(item["precision"]), tuple(item["nodes"]))
        for item, ms in zip(INNER, times)
    )
    runs = {1: LayerTimes({"x": "1x3"}, layers[:1], Spread(0.1, 0.1, 0.1, 0.1), 5)}
    runs[8] = LayerTimes({"x": "8x3"}, layers, Spread(0.8, 0.9, 1.0, 0.7), 5)
    return EngineProfile(Path("elsewhere/m.engine"), "Played GPU", "synthetic", runs, notes=("a note",)).to_json()


SENSITIVITY = {
    "model": "net",
    "samples": 4,
    "output": "logits",
    "predicted_snr_db": {"logits": 16.0},
    "measured_snr_db": {"logits": 16.5},
    "weights_share": 0.5,
    "summary": "weights make 50%",
    "sources": [
        {"kind": "weight", "name": "w", "nodes": ["conv1"], "snr_db": {"logits": 20.0}, "share": 0.5, "macs": 0.5},
        {"kind": "activation", "name": "x", "nodes": ["q", "k"], "snr_db": {"logits": 30.0}, "share": 0.1, "macs": 0.5},
        {"kind": "activation", "name": "y", "nodes": ["conv1", "mid"], "snr_db": {"logits": "inf"}, "share": 0.0},
    ],
}
BENCH = {
    "engine": "m.engine",
    "gpu": "Played GPU",
    "inputs": "synthetic",
    "rows": [
        {"runner": name, "batch": 8, "gpu": gpu, "run": run, "throughput": 12345.6, "note": ""}
        for name, gpu, run in (
            ("trtopt", spread(0.8), spread(1.0)),
            ("onnxruntime", None, spread(50.0)),
            ("torch", None, None),
        )
    ],
    "memory": {"gpu": 1 << 21, "pinned": 5, "plan": 8, "limit": None, "slots": 2},
    "notes": ["the GPU is shared: somebody"],
}
CHOICE = {"left_out": 0, "share": 1.0, "snr_db": 16.0, "figure": "same class for 95%", "missed": ["logits: 16 dB"]}
TUNING = {
    "samples": 24,
    "before": CHOICE,
    "whole": CHOICE | {"snr_db": "inf"},
    "chosen": CHOICE | {"share": 0.9, "snr_db": 26.0, "left_out": 1, "missed": []},
    "front": [CHOICE, CHOICE | {"share": 0.9, "snr_db": 26.0}],
    "tried": 3,
    "cost": "arithmetic",
    "seconds": 2.0,
    "left_out": {"mid": "tuned"},
}
BUILD = {"engine": "m.engine", "precision_summary": "", "tuning": TUNING}
SAID = "logits (classes): same class for 97.0% of 64 samples, 26.0 dB, largest difference 2"


def accuracy(snr: float, same: float, **changes: Any) -> dict[str, Any]:
    output = OutputAgreement("logits", Kind.CLASSES, snr, 2.0, 0.9, 0, same, 64, rows=64).describe() | changes
    figures = dict.fromkeys(("reference_accuracy", "candidate_accuracy"))
    return {"samples": 64, "snr_db": snr, "top1_agreement": same, "outputs": {"logits": output}, **figures}


WORST = {"worst": [{"name": HOSTILE, "snr_db": "-inf", "agreement": 0.0, "near_zero": False}]}
VERIFY = accuracy(26.0, 0.97, samples=WORST) | {
    "reference_accuracy": {"top1": 0.9},
    "candidate_accuracy": {"top1": 0.85},
}


def refused() -> dict[str, Any]:
    """What of a manifest is otherwise where `tune` refused its INT8 engine on the GPU and delivered FP16."""
    times = [{"shapes": {"x": "8x3"}, "gpu_ms": ms} for ms in (0.6, 0.8)]
    candidates = [
        {"precision": "int8", "times": times[:1], "accuracy": accuracy(-1.9, 0.0)},
        {"precision": "fp16", "times": times[1:], "accuracy": accuracy(43.5, 1.0)},
    ]
    limits = {"min_agreement": 0.95, "min_snr": 28.1}
    kept = {"best": True, "limits": limits, "kept": "fp16", "why": "FP16 kept: -1.9 dB"}
    comparison = {"candidates": candidates, "gpu": "Played GPU", "inputs": "real samples", **kept}
    return {
        "spec": {"precision": "fp16", "workspace": None},
        "precision": {"int8": 0, "fp16": 3, "fp32": 0, "total": 3},
        "calibration": None,
        "comparison": comparison,
        "scratch": 3 << 20,
        "warnings": ["something TensorRT says"],
    }


def measured(engine: Path, **results: Any) -> Path:
    """Put results beside the engine, as commands do; return it."""
    digest = json.loads(Path(f"{engine}.json").read_bytes())["plan"]["sha256"]
    entries = {name: {"date": "", "options": {}, "result": result} for name, result in results.items()}
    document = {"format": "trtopt.results/1", "engine": engine.name, "sha256": digest, "results": entries}
    Path(f"{engine}.results.json").write_text(json.dumps(document))
    return engine


def everything(engine: Path) -> dict[str, Any]:
    """A report with all that can be known; equal calls write equal bytes."""
    measured(engine, profile=profiled(), sensitivity=SENSITIVITY, bench=BENCH, tune=BUILD, verify=VERIFY)
    return dict(trtopt.report(engine, engine.with_suffix(".html")).contents)


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def parsed(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


# What is said ---------------------------------------------------------------------------------------------------------------


def test_all_that_is_known_is_said(engine: Path) -> None:
    said = everything(engine)
    assert said["unknown"] == []
    verdict = said["verdict"]
    assert verdict["asked"] == "int8" and verdict["for"] == "Played GPU (sm90, 1 GiB)"
    assert verdict["accuracy"][:2] == [SAID, "top-1 90.0% → 85.0%"]
    assert verdict["speed"] == ["batch 8: 1 ms end to end (median), 0.8 ms on the GPU"]
    ran = "1 of 2 convolutions INT8, 1 of 2 FP16; 1 of 1 matrix products INT8"
    assert verdict["line"] == f"{ran}; {SAID}; {verdict['speed'][0]}"
    assert said["precision"]["layers with products"] == pytest.approx({"int8": 2 / 3, "fp16": 1 / 3})
    assert said["precision"]["arithmetic"] == {"int8": 0.75, "fp16": 0.25}
    assert said["precision"]["time"] == pytest.approx({"int8": 0.7, "fp16": 0.3})
    assert said["worst"] == [{"sample": HOSTILE, "output": "logits", "said": "another answer, -inf dB", "length": 0.0}]
    assert said["provenance"]["model"] == "net.onnx"
    damage = {layer["name"]: layer["damage_db"] for layer in said["layers"]}
    assert damage["conv1 + relu1"] == pytest.approx(20.0) and damage["both"] == pytest.approx(30.0)
    assert damage["mid"] is None and damage["reformat"] is None  # no noise, or nothing known


def test_what_an_engine_does_of_the_preprocessing_is_said(tmp_path: Path) -> None:
    pixels = Preprocess.load({"size": [4, 4], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]})
    embedded = Embedded("image", pixels)
    tensor = {"name": "image", "dtype": "uint8", "shape": ["n", 4, 4, 3]}
    rows = [{"image": "1x4x4x3,8x4x4x3,32x4x4x3"}]
    path = made(tmp_path / "m.engine", inputs=[tensor], profiles=rows, embedded=embedded.describe())
    told = everything(path)["provenance"]
    assert told["inputs"] == {"image": "uint8 nx4x4x3"}
    assert told["preprocessing embedded"] == f"image takes pixels (0 to 255), of which the engine makes {embedded}"


def test_what_is_not_known_is_no_heading(engine: Path) -> None:
    found = trtopt.report(engine, engine.with_suffix(".html"))
    commands = {entry["command"].split()[1]: entry["command"] for entry in found.unknown}
    assert commands.keys() == {"profile", "sensitivity", "tune", "bench", "verify"}
    assert " --data F.npz" in commands["sensitivity"] and " --data F.npz" in commands["verify"]
    images = trtopt.report(made(engine, preprocess={"preset": "imagenet"}), engine.with_suffix(".html"))
    assert sum(" --images DIR --preprocess PRESET" in item["command"] for item in images.unknown) == 3
    assert all(layer["ms"] is layer["damage_db"] is None for layer in found.contents["layers"])
    shown = parsed(found.page)
    text = "".join(shown.text)
    assert "What else could be known (5)" in text and text.count("not known") == 0
    pictures = [item["aria-label"] for item in shown.named("div") if item.get("role") == "img"]
    assert "Precisions in the order of execution" in pictures and not shown.named("svg")
    assert not [word for word in ("Latency", "worst samples", "lose most", "Choices") if word in text]


def test_where_fp16_was_delivered_for_what_was_tuned(tmp_path: Path) -> None:
    engine = made(tmp_path / "m.engine", **refused())
    written = trtopt.report(measured(engine, build=BUILD), tmp_path / "r.html")
    verdict, shown = written.contents["verdict"], "".join(parsed(written.page).text)
    assert verdict["among"] == ["int8", "fp16"] and verdict["kept"] == "fp16"
    assert "the fastest of INT8 and FP16 within its limits (min_agreement: 0.95; min_snr: 28.1)" in shown
    said = "logits (classes): same class for 100.0% of 64 samples, 43.5 dB, largest difference 2"
    assert verdict["accuracy"] == [said]
    assert verdict["line"].endswith(f"{said}; FP16 (kept): 0.8 ms on the GPU at x 8x3")
    assert "The chosen one isn't this engine: FP16 kept: -1.9 dB." in shown
    engine = made(engine, comparison=refused()["comparison"] | {"kept": "int8", "why": "INT8 kept"})
    written = trtopt.report(measured(engine, build=BUILD), tmp_path / "r.html")
    assert written.contents["verdict"]["accuracy"][-1].startswith("tuned on 24 samples: 26.0 dB")
    assert "isn't this engine" not in "".join(parsed(written.page).text)


def test_what_is_outside_the_limits_is_said(engine: Path, tmp_path: Path) -> None:
    missed = "logits: 14.2 dB, at least 20 is asked for"
    checked = accuracy(14.2, 1.0) | {"missed": [missed]}
    for command, result in (
        ("verify", checked),
        ("pipeline", {"agreement": checked, "build": BUILD, "missed": [missed]}),
    ):
        written = trtopt.report(measured(engine, **{command: result}), tmp_path / "r.html")
        assert written.contents["verdict"]["missed"] == [missed]
        assert f"Outside the limit: {missed}" in "".join(parsed(written.page).text)


def test_nodes_kept_for_the_same_reason_are_one_row_with_options_as_flags(tmp_path: Path) -> None:
    reason = "both are activations; to do it all the same: `precision_override=['NAME=int8']`"
    kept = [{"node": f"n{number}", "op": "MatMul", "precision": "fp16", "reason": reason} for number in range(40)]
    kept.append({"node": "norm", "op": "ReduceMean", "precision": "fp32", "reason": "sums"})
    summary = f"1 of 9 convolutions INT8; 40 nodes kept in higher precision (n0, …): {reason}"
    written = trtopt.report(made(tmp_path / "m.engine", kept=kept, precision_summary=summary), tmp_path / "r.html")
    shown = "".join(parsed(written.page).text)
    assert "n0 (MatMul), n1 (MatMul)" in shown and shown.count("both are activations") == 1
    assert "--precision-override NAME=int8" in shown and "precision_override=" not in shown
    assert written.contents["verdict"]["line"] == "1 of 9 convolutions INT8"  # reasons stand below


def test_a_manifest_alone_is_told_by_its_engines_name(engine: Path, tmp_path: Path) -> None:
    measured(engine, profile=profiled()).unlink()
    written = trtopt.report(f"{engine}.json", tmp_path / "r.html")
    assert written.contents["engine"] == "m.engine" and written.contents["times"] is not None
    assert all("m.engine.json" not in item["command"] for item in written.unknown)


def test_warnings_say_what_does_not_fit(engine: Path) -> None:
    stranger = profiled()
    for layer in stranger["batches"][1]["layers"]:
        layer["name"] += " of another"
    del stranger["batches"][0]
    measured(engine, profile=stranger, bench=BENCH)
    said = trtopt.report(engine, engine.with_suffix(".html")).contents
    texts = [item["text"] for item in said["warnings"]]
    assert texts[0].startswith("workspace was too small")
    expected = [
        "layers with products that don't run in INT8: 1",
        "no layer that was timed is one of this engine",
        "the GPU is shared: somebody",
    ]
    for text in expected:
        assert any(text in each for each in texts), text
    assert said["times"] is None and len(said["layers"]) == len(INNER)


# The page --------------------------------------------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes(engine: Path, tmp_path: Path) -> None:
    everything(engine)
    first = engine.with_suffix(".html").read_bytes()
    (tmp_path / "sub").mkdir()
    again = made(tmp_path / "sub" / "m.engine")
    everything(again)
    assert again.with_suffix(".html").read_bytes() == first
    assert str(tmp_path).encode() not in first and b"somewhere" not in first


def test_names_can_not_become_more_than_text(tmp_path: Path) -> None:
    layers = [{**item, "name": item["name"] + HOSTILE, "nodes": [HOSTILE, *item["nodes"]]} for item in INNER]
    kept = [{"node": HOSTILE, "op": HOSTILE, "precision": "fp16", "reason": HOSTILE}]
    text = {"warnings": [HOSTILE], "precision_summary": HOSTILE, "kept": kept, "key": HOSTILE}
    engine = made(tmp_path / "<script>.engine", layers, **text)
    rows = [{**row, "runner": "\ud800 nul\0", "note": HOSTILE} for row in BENCH["rows"]]  # type: ignore[attr-defined]
    measured(
        engine,
        profile=profiled(),
        sensitivity=SENSITIVITY,
        bench={**BENCH, "rows": rows, "gpu": HOSTILE},
        verify=VERIFY,
    )
    trtopt.report(engine, tmp_path / "h.html")
    shown = parsed(tmp_path / "h.html")
    assert len(shown.named("script")) == 1
    assert not [name for _, attributes in shown.tags for name in attributes if name.startswith("on")]
    content = (tmp_path / "h.html").read_text(encoding="utf-8")
    assert "\x1b" not in content and "\u202e" not in content and "alert(1)" in content


def test_the_page_loads_nothing_and_can_be_read_by_all(engine: Path) -> None:
    everything(engine)
    content, shown = engine.with_suffix(".html").read_text(encoding="utf-8"), parsed(engine.with_suffix(".html"))
    for tag, attributes in shown.tags:
        for name in ("src", "href", "xlink:href", "action"):
            target = attributes.get(name) or "#"
            assert target.startswith("#") or (tag == "link" and target == "data:,"), (tag, target)
    assert "@import" not in content and "url(" not in content
    [script] = re.findall(r"<script>(.*?)</script>", content, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [item["content"] for item in shown.named("meta") if "http-equiv" in item]
    assert policy is not None and f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    assert content.startswith("<!DOCTYPE html>\n") and shown.named("html") == [{"lang": "en"}]
    assert all(item.get("role") == "img" and item.get("aria-label") for item in shown.named("svg"))
    assert len(shown.named("svg")) == 2  # damage, front
    tags = [tag for tag, _ in shown.tags]
    assert tags.index("svg") < tags.index("details") < tags.index("table")  # pictures lead, and tables are folded
    assert len(shown.named("table")) == len(shown.named("caption")) == 5 and ">12,346<" in content
    assert all("scope" in item for item in shown.named("th")) and not re.search(r"<th[^>]*></th>", content)


def test_many_layers_and_rows_stay_small(tmp_path: Path) -> None:
    layers = [
        {"name": f"__myl_MulAddReshTran_myl0_{number}", "kind": "matmul", "precision": "int8", "ms": 0.01 * (number + 1),
         "nodes": [f"/model/encoder/layers.{number}/attention/part_{part}/Mul" for part in range(6)]}
        for number in range(1000)
    ]  # fmt: skip
    engine = made(tmp_path / "big.engine", layers)
    found = profiled()
    found["batches"] = [{**found["batches"][1], "layers": layers}]
    rows = [{**BENCH["rows"][0], "batch": batch} for batch in range(1, 20_001)]  # type: ignore[index]
    measured(engine, profile=found, sensitivity=SENSITIVITY, bench={**BENCH, "rows": rows})
    written = trtopt.report(engine, tmp_path / "big.html")
    shown = parsed(written.page)
    assert written.nbytes < 2e6 and len(shown.named("tr")) > 3000
    assert "18000 more rows are left out" in "".join(shown.text)


# Requests --------------------------------------------------------------------------------------------------------------------


def test_the_command(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    measured(engine, profile=profiled(), verify=VERIFY)
    typed = ["report", "m.engine", "-o", "r.html"]
    run = CliRunner().invoke(cli.app, typed)
    assert run.exit_code == 0, run.output
    assert "r.html: 0." in run.output and "not known: latency" in run.output
    run = CliRunner().invoke(cli.app, [*typed, "--json"])
    assert json.loads(run.stdout)["verdict"]["accuracy"]
    monkeypatch.chdir(tmp_path.parent)
    run = CliRunner().invoke(cli.app, ["report", str(Path(tmp_path.name) / "m.engine"), "-o", "r.html"])
    assert (
        f"trtopt bench {tmp_path.name}/m.engine --against onnxruntime; trtopt report {tmp_path.name}/m.engine"
        in run.output
    )  # can be pasted where it was typed


def test_results_beside_the_engine_are_known_and_no_others(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured of another engine stood in the verdict of this one."""
    monkeypatch.setattr("trtopt.diagnosis.results.engine_file", Path)  # these are no real plans
    beside, heard = Path(f"{engine}.results.json"), Heard()

    def said() -> dict[str, Any]:
        return dict(trtopt.report(engine, tmp_path / "r.html").contents)

    def left(command: str, document: dict[str, Any], of: Path = engine) -> dict[str, str]:
        return keep(SimpleNamespace(engine=of), command, document, {"limit": 3, "data": None}, heard)

    digest = hashlib.sha256(engine.read_bytes()).hexdigest()
    assert left("verify", VERIFY) == {"engine_sha256": digest}
    left("bench", BENCH)
    left("run", {"engine": "m", "backend": "rtx", "milliseconds": [9.0, 2.0], "timing": "2 calls", "ranked": [1]})
    held = json.loads(beside.read_bytes())
    assert set(held["results"]) == {"verify", "bench", "run"} and held["results"]["verify"]["options"] == {"limit": "3"}
    assert "ranked" not in held["results"]["run"]["result"]
    verdict = said()["verdict"]
    assert (
        verdict["accuracy"][0].startswith("logits (classes): same class for 97.0%")
        and "run (rtx): 2 calls" in verdict["speed"]
    )
    engine.write_bytes(engine.read_bytes() + b" ")  # built again
    made_anew = json.loads(Path(f"{engine}.json").read_bytes())
    made_anew["plan"] = {"sha256": hashlib.sha256(engine.read_bytes()).hexdigest(), "bytes": engine.stat().st_size}
    Path(f"{engine}.json").write_text(json.dumps(made_anew))
    assert said()["verdict"]["accuracy"] == said()["verdict"]["speed"] == []
    left("bench", BENCH)
    assert set(json.loads(beside.read_bytes())["results"]) == {"bench"} and not heard.notes
    beside.write_text('{"mine": 1}')
    left("bench", BENCH)
    assert beside.read_text() == '{"mine": 1}' and "a file that isn't trtopt's has that name" in heard.notes[-1]
    assert said()["latency"] is None
    beside.unlink()
    monkeypatch.setattr("trtopt.diagnosis.results.write_json", Mock(side_effect=OutputError("the disk is full", "")))
    left("bench", BENCH)
    assert "report won't know of this: the disk is full" in heard.notes[-1]


def test_what_profile_gives_can_be_given(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = PlayedSession(engine).profile({"x": np.zeros((4, 3))}, 5, 0)
    found = EngineProfile(engine, "Played GPU", "synthetic", {4: times})
    layers = trtopt.report(engine, engine.with_suffix(".html"), results=[found]).contents["layers"]
    assert [layer["name"] for layer in layers[:3]] == [layer.name for layer in LAYERS]
    assert len(layers) == 3 + 3  # and those of the manifest that weren't timed


def test_results_that_are_none_or_anothers(engine: Path, tmp_path: Path) -> None:
    times = PlayedSession(engine).profile({"x": np.zeros((4, 3))}, 5, 0)
    stranger = EngineProfile(Path("stranger.engine"), "Played GPU", "synthetic", {4: times})
    for result, said in ((stranger, "not EngineProfile of stranger.engine"), ({}, "m.engine, not dict")):
        with pytest.raises(UsageError, match=said):
            trtopt.report(engine, tmp_path / "r.html", results=[result])
    noteless = [{name: value for name, value in row.items() if name != "note"} for row in BENCH["rows"]]  # type: ignore[attr-defined]
    for damage in ({"rows": [{"runner": 1}]}, {**BENCH, "rows": 3}, {**BENCH, "rows": noteless}):
        with pytest.raises(UsageError, match=r"m\.engine\.results\.json.* isn't as trtopt writes it .*: remove it"):
            trtopt.report(measured(engine, bench=damage), tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_requests_that_can_not_be_right(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="doesn't exist"):
        trtopt.report(tmp_path / "none.engine", tmp_path / "r.html")
    with pytest.raises(UsageError, match="overwrite"):
        trtopt.report(engine, engine)
    with pytest.raises(OutputError):
        trtopt.report(engine, tmp_path / "nowhere" / "r.html")
    (tmp_path / "p.engine").write_bytes(b"ftrt" + bytes(200))
    with pytest.raises(UsageError, match=r"has no manifest beside it.*: trtopt inspect "):
        trtopt.report(tmp_path / "p.engine", tmp_path / "r.html")
    with pytest.raises(EngineError):  # neither a plan nor a manifest
        (tmp_path / "x.engine").write_bytes(b"x")
        trtopt.report(tmp_path / "x.engine", tmp_path / "r.html")


def test_what_draws_it_is_asked_for_first(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingDependency, match="writing a report needs jinja2"):
        trtopt.report(engine, engine.with_suffix(".html"))
