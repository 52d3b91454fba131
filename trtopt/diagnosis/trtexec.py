"""Command lines of trtexec as trtopt's: its options as 8.6 to 11 list them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trtopt.core.shapes import parse_profile
from trtopt.diagnosis.drafts import (
    PLUGINS,
    UNKNOWN,
    Draft,
    Handler,
    Option,
    calibration_cache,
    lacks,
    layer_precisions,
    nothing,
    precision,
    switch,
    valued,
    with_suffix,
)


def _timed(flag: str) -> Handler:
    return lambda draft, what, value: draft.bench.extend([flag, value])


def _shaped(which: str) -> Handler:
    return lambda draft, what, value: draft.profiles[-1].update({which: value.replace("'", "")})


def _shapes(draft: Draft, what: str, value: str) -> None:
    """What an inference runs at; of a build without a range, the range, too."""
    for ranges in parse_profile(value.replace("'", "")).values():
        if ranges.opt and "--batch" not in draft.bench:
            draft.bench += ["--batch", str(ranges.opt[0])]
    if not draft.profiles[-1]:
        draft.profiles[-1]["opt"] = value.replace("'", "")


def _new_profile(draft: Draft, what: str, value: str) -> None:
    if draft.profiles[-1]:
        draft.profiles.append({})


def _pool(draft: Draft, what: str, value: str) -> None:
    for part in value.split(","):
        pool, _, size = part.partition(":")
        match = re.fullmatch(r"([\d.]+)([BKMG]?)(?:iB)?", size)
        if pool == "workspace" and match:
            draft.build += ["--workspace", match[1] + {"B": "", "K": "KiB", "G": "GiB"}.get(match[2], "MiB")]
        else:
            draft.lack(f"{what}={part}", "trtopt sets no memory pool but the workspace; it has no DLA")


def _workspace(draft: Draft, what: str, value: str) -> None:
    draft.build += ["--workspace", f"{value}MiB"]
    draft.say(what, f"trtopt build --workspace {value}MiB", gone=10)


def _sparsity(draft: Draft, what: str, value: str) -> None:
    if value == "enable":
        draft.build.append("--sparsity")
    elif value == "force":
        draft.lack(f"{what}=force", "trtopt doesn't overwrite weights; --sparsity uses those that are 2:4 sparse")


def _formats(draft: Draft, what: str, value: str) -> None:
    types = {part.partition(":")[0] for part in value.split(",")}
    layouts = {layout for part in value.split(",") for layout in part.partition(":")[2].split("+")}
    if layouts - {"chw", ""}:
        draft.lack(f"{what}={value}", "trtopt keeps inputs and outputs in the model's own layout")
    elif types == {"fp16"}:
        draft.build += ["--no-fp32-io"] if "--no-fp32-io" not in draft.build else []
    elif types - {"fp32", "int32", "int64", "bool"}:
        draft.lack(f"{what}={value}", "inputs and outputs are FP32 or, with --no-fp32-io, of the graph's own types")


def _hardware(draft: Draft, what: str, value: str) -> None:
    level = {"ampere+": "ampere_plus", "sameComputeCapability": "same_compute_capability", "none": "none"}.get(value)
    if level is None:
        draft.lack(f"{what}={value}", "--hardware-compatibility takes none, ampere_plus, same_compute_capability")
    else:
        draft.build += ["--hardware-compatibility", level]


def _loaded_inputs(draft: Draft, what: str, value: str) -> None:
    for part in filter(None, value.split(",")):
        name, _, file = part.replace("'", "").rpartition(":")
        draft.inputs.append(f"{name}={with_suffix(file, '.npy')}")
    why = "trtopt run --input NAME=FILE.npy; trtexec's raw files become .npy by numpy.fromfile(…).reshape(…) and numpy.save"
    draft.say(what, why)


def _output(draft: Draft, what: str, value: str) -> None:
    draft.output = with_suffix(value, "")


def _device(draft: Draft, what: str, value: str) -> None:
    draft.build += ["--device", value]
    draft.bench += ["--device", value]


def _only_built(draft: Draft, what: str, value: str) -> None:
    draft.running = False
    draft.say(what, "nothing: trtopt build only builds", gone=10)


def _version_only(draft: Draft, what: str, value: str) -> None:
    draft.running, draft.inspecting = False, True


def _set(name: str, value: object = None) -> Handler:
    return lambda draft, what, text: setattr(draft, name, text if value is None else value)


_IMPLICIT = "there is no implicit batch any more: trtopt build --shapes NAME:MIN,OPT,MAX"
_CONVERT = "convert the model to ONNX first; from PyTorch: trtopt export my_model.py:Net -o MODEL.onnx"
_DLA = "trtopt builds for GPUs only"
_MEASURED = "trtopt bench measures GPU time, host time and throughput, each by itself"
_LAYERS = "trtopt profile ENGINE times each layer (--csv, --trace)"
_OPTIONS: dict[str, Handler] = {
    "onnx": _set("model"),
    "saveEngine": _set("engine"),
    "loadEngine": _set("engine"),
    "fp16": precision("fp16"),
    "bf16": precision("bf16"),
    "int8": precision("int8"),
    "fp8": precision("fp8"),
    "best": precision("best"),
    "int4": lacks("trtopt has no INT4", 11),
    "stronglyTyped": nothing("nothing: from TensorRT 10 on trtopt always builds so", 11),
    "calib": calibration_cache,
    "calibProfile": nothing("nothing: calibration runs on the graph, before there are profiles", 11),
    "noTF32": switch("--no-tf32"),
    "minShapes": _shaped("min"),
    "optShapes": _shaped("opt"),
    "maxShapes": _shaped("max"),
    "shapes": _shapes,
    "profile": _new_profile,
    "workspace": _workspace,
    "memPoolSize": _pool,
    "precisionConstraints": nothing("nothing: overrides are always kept, or the build fails", 11),
    "layerPrecisions": layer_precisions,
    "layerOutputTypes": lacks("trtopt sets a node's precision, not its outputs'", 11),
    "layerDeviceTypes": lacks(_DLA),
    "inputIOFormats": _formats,
    "outputIOFormats": _formats,
    "directIO": lacks("trtopt leaves reformats at inputs and outputs to TensorRT"),
    "refit": switch("--refit"),
    "stripWeights": switch("--strip"),
    "stripAllWeights": switch("--strip"),
    "weightless": switch("--strip"),
    "versionCompatible": switch("--version-compatible"),
    "vc": switch("--version-compatible"),
    "excludeLeanRuntime": switch("--exclude-lean-runtime"),
    "sparsity": _sparsity,
    "timingCacheFile": valued("--timing-cache"),
    "noBuilderCache": switch("--timing-cache", "none"),
    "builderOptimizationLevel": valued("--optimization-level"),
    "hardwareCompatibilityLevel": _hardware,
    "device": _device,
    "buildOnly": _only_built,
    "skipInference": _set("running", False),
    "getPlanVersionOnly": _version_only,
    "dumpLayerInfo": _set("inspecting", True),
    "exportLayerInfo": nothing("nothing: layers stand in MODEL.engine.json"),
    "dumpOptimizationProfile": _set("inspecting", True),
    "iterations": _timed("--iterations"),
    "infStreams": _timed("--streams"),
    "streams": _timed("--streams"),
    "warmUp": lacks("trtopt bench --warmup counts calls, not milliseconds; 20 unless given"),
    "duration": lacks("trtopt bench makes --iterations calls, and doesn't stop by time"),
    "loadInputs": _loaded_inputs,
    "exportOutput": _output,
    "dumpOutput": _output,
    "dumpRawBindingsToFile": _output,
    "useCudaGraph": nothing("nothing: sessions replay CUDA graphs by themselves"),
    "useSpinWait": nothing(_MEASURED),
    "noDataTransfers": nothing(_MEASURED),
    "exposeDMA": nothing(_MEASURED),
    "separateProfileRun": nothing(_MEASURED),
    "threads": nothing("nothing: trtopt bench --streams N has a thread for each"),
    "avgRuns": nothing(_MEASURED),
    "percentile": nothing("nothing: trtopt bench prints percentiles"),
    "exportTimes": nothing("trtopt bench --json > TIMES.json"),
    "dumpProfile": nothing(_LAYERS),
    "exportProfile": nothing(_LAYERS),
    "profilingVerbosity": nothing("nothing: the layers are read at every build"),
    "nvtxMode": nothing("nothing: the layers are read at every build", 10),
    "verbose": nothing("trtopt -v build …"),
    "explicitBatch": nothing("nothing: the batch is always explicit", 10),
    "heuristic": nothing("trtopt build --optimization-level N", 10),
    "minTiming": nothing("nothing: trtopt leaves it to TensorRT", 10),
    "avgTiming": nothing("nothing: trtopt leaves it to TensorRT"),
    "batch": lacks(_IMPLICIT, 10),
    "maxBatch": lacks(_IMPLICIT, 10),
    **dict.fromkeys(("deploy", "model", "output", "uff", "uffInput", "uffNHWC"), lacks(_CONVERT, 10)),
    **dict.fromkeys(
        ("useDLACore", "allowGPUFallback", "buildDLAStandalone", "safe", "consistency", "std", "restricted"), lacks(_DLA)
    ),
    **dict.fromkeys(
        ("plugins", "staticPlugins", "dynamicPlugins", "setPluginsToSerialize", "ignoreParsedPluginLibs"), lacks(PLUGINS)
    ),
}  # fmt: skip

OPTIONS = tuple(_OPTIONS)


def translated(arguments: Sequence[str]) -> tuple[list[str], list[Option]]:
    """trtopt's commands for these arguments, and what is to be said of them."""
    draft = Draft()
    for argument in arguments:
        name, _, value = argument.lstrip("-").partition("=")
        handler = _OPTIONS.get(name)
        if not argument.startswith("-"):
            draft.lack(argument, "it is no option of trtexec: values follow a '='")
        elif handler is None:
            draft.lack(argument.partition("=")[0], UNKNOWN)
        else:
            handler(draft, f"--{name}", value)
    if not draft.model and not draft.engine:
        draft.lack("trtexec", "it names neither --onnx nor --loadEngine")
    return draft.commands() if draft.model or draft.engine else [], draft.options
