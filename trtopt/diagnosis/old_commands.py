"""Command lines of trtexec and Polygraphy as trtopt's.

Options as trtexec 8.6 to 11 and Polygraphy 0.49 list them; what 10 and 11 dropped is from NVIDIA's migration pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.core.shapes import parse_profile

IMAGES = ("--images", "DIR", "--preprocess", "PRESET")
_PROGRAMS = ("trtexec", "tensorrt_rtx", "polygraphy")


@dataclass(frozen=True)
class Option:
    """An option of a command, as it was found.

    Attributes:
        what: as it was written, such as "--fp16".
        gone: the first TensorRT whose trtexec is without it, such as 11; 0: all have it.
        instead: trtopt's way, or why there is none.
        lacking: trtopt has nothing for it.
    """

    what: str
    gone: int
    instead: str
    lacking: bool = False


@dataclass
class _Draft:
    """Commands of trtopt that are being written."""

    model: str = ""
    engine: str = ""
    build: list[str] = field(default_factory=list)
    bench: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    output: str = ""
    precisions: set[str] = field(default_factory=set)
    cache: str = ""
    data: str = ""
    profiles: list[dict[str, str]] = field(default_factory=lambda: [{}])  # "min", "opt", "max" → spec
    building: bool = True
    running: bool = True
    inspecting: bool = False
    options: list[Option] = field(default_factory=list)

    def say(self, what: str, instead: str, gone: int = 0, lacking: bool = False) -> None:
        self.options.append(Option(what, gone, instead, lacking))

    def lack(self, what: str, why: str, gone: int = 0) -> None:
        self.say(what, why, gone, True)

    def words(self) -> list[str]:
        """Of `trtopt build`: precision, scales and shapes, then the rest."""
        words = []
        asked = self.precisions
        if "best" in asked:
            words.append("--best")
        elif quantized := asked & {"int8", "fp8"}:
            words.append(f"--{sorted(quantized, reverse=True)[0]}")
            words += ["--bf16"] if "bf16" in asked and "fp16" not in asked else []
        else:
            words += [f"--{name}" for name in ("fp16", "bf16") if name in asked][:1]
        if asked & {"int8", "fp8", "best"}:
            if self.data:
                words += ["--data", self.data]
            if self.cache:
                words += ["--calib", self.cache]
            if not self.data and not ({"int8", "fp8"} & asked and self.cache and "best" not in asked):
                words += IMAGES
        for profile in self.profiles:
            text = self._profile(profile)
            words += ["--shapes", text] if text else []
        return [*words, *self.build]

    def _profile(self, specs: Mapping[str, str]) -> str:
        if not specs:
            return ""
        one = specs.get("opt") or next(iter(specs.values()))
        read = {which: parse_profile(specs.get(which, one)) for which in ("min", "opt", "max")}
        texts = []
        for name in read["opt"]:
            shapes = [read[which].get(name, read["opt"][name]).opt for which in ("min", "opt", "max")]
            dims = ["x".join(map(str, shape)) or "scalar" for shape in shapes]
            texts.append(f"{name}:{dims[0] if len(set(dims)) == 1 else ','.join(dims)}")
        return ";".join(texts)

    def commands(self) -> list[str]:
        engine = self.engine or (_as(self.model, ".engine") if self.model else "MODEL.engine")
        made = []
        if self.model and self.building:
            made.append(["trtopt", "build", self.model, *self.words(), "-o", engine])
        if self.inspecting:
            made.append(["trtopt", "inspect", engine])
        if self.inputs or self.output:
            output = ["-o", self.output] if self.output else []
            inputs = self.inputs or ["X.npy"]
            made.append(["trtopt", "run", engine, *(word for item in inputs for word in ("--input", item)), *output])
        elif self.running:
            made.append(["trtopt", "bench", engine, *self.bench])
        return list(map(shlex.join, made))


def is_command(words: Sequence[str]) -> bool:
    """Whether these are words of a command that is known here."""
    return bool(words) and _program(words)[0] in _PROGRAMS


def translated(words: Sequence[str]) -> tuple[list[str], list[Option]]:
    """trtopt's commands for one of trtexec or polygraphy, and what is to be said of its options.

    Raises:
        UsageError: it is another program's, or can't be read.
    """
    program, arguments = _program(words)
    if program == "polygraphy":
        return _polygraphy(arguments)
    if program in _PROGRAMS:
        return _trtexec(arguments)
    raise UsageError(
        f"`migrate=` {shlex.join(words)!r} is no command of trtexec or polygraphy, and no file: give a script's path, or the "
        "whole command in quotes, such as 'trtexec --onnx=model.onnx --fp16'"
    )


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    """The program's name without its path, and its arguments; variables, sudo and `python -m` before it left out."""
    rest = list(words)
    while rest and (re.fullmatch(r"\w+=.*", rest[0]) or rest[0] in ("sudo", "time", "env", "exec")):
        rest.pop(0)
    if len(rest) > 2 and re.fullmatch(r"python[\d.]*", Path(rest[0]).name) and rest[1] == "-m":
        rest = rest[2:]
    if not rest:
        return "", []
    return Path(rest[0]).name.removesuffix(".exe"), rest[1:]


def _as(name: str, suffix: str) -> str:
    """A file's name with another suffix."""
    path = Path(name)
    return str(path.with_suffix(suffix)) if path.name else f"OUT{suffix}"


# trtexec -----------------------------------------------------------------------------------------------------------------

_Handler = Callable[[_Draft, str, str], None]  # what the option is called, its value


def _precision(name: str) -> _Handler:
    def handle(draft: _Draft, what: str, value: str) -> None:
        draft.precisions.add(name)
        instead = f"trtopt build --{name}"
        if name in ("int8", "fp8", "best"):
            instead += ", with scales from --images, --data or --calib"
        draft.say(what, instead, gone=11)

    return handle


def _switch(*words: str) -> _Handler:
    return lambda draft, what, value: draft.build.extend(words)


def _valued(flag: str) -> _Handler:
    return lambda draft, what, value: draft.build.extend([flag, value])


def _timed(flag: str) -> _Handler:
    return lambda draft, what, value: draft.bench.extend([flag, value])


def _nothing(why: str, gone: int = 0) -> _Handler:
    return lambda draft, what, value: draft.say(what, why, gone)


def _lacks(why: str, gone: int = 0) -> _Handler:
    return lambda draft, what, value: draft.lack(what, why, gone)


def _shaped(which: str) -> _Handler:
    def handle(draft: _Draft, what: str, value: str) -> None:
        draft.profiles[-1][which] = value.replace("'", "")

    return handle


def _shapes(draft: _Draft, what: str, value: str) -> None:
    """What an inference runs at; of a build without a range, the range, too."""
    for ranges in parse_profile(value.replace("'", "")).values():
        if ranges.opt and "--batch" not in draft.bench:
            draft.bench += ["--batch", str(ranges.opt[0])]
    if not draft.profiles[-1]:
        draft.profiles[-1]["opt"] = value.replace("'", "")


def _new_profile(draft: _Draft, what: str, value: str) -> None:
    if draft.profiles[-1]:
        draft.profiles.append({})


def _pool(draft: _Draft, what: str, value: str) -> None:
    for part in value.split(","):
        pool, _, size = part.partition(":")
        found = re.fullmatch(r"([\d.]+)([BKMG]?)(?:iB)?", size)
        if pool == "workspace" and found:
            draft.build += ["--workspace", found[1] + {"B": "", "K": "KiB", "G": "GiB"}.get(found[2], "MiB")]
        else:
            draft.lack(f"{what}={part}", "trtopt sets no memory pool but the workspace; it has no DLA")


def _workspace(draft: _Draft, what: str, value: str) -> None:
    draft.build += ["--workspace", f"{value}MiB"]
    draft.say(what, f"trtopt build --workspace {value}MiB", gone=10)


def _layer_precisions(draft: _Draft, what: str, value: str) -> None:
    for part in filter(None, value.split(",")):
        node, _, precision = part.rpartition(":")
        precision = {"float32": "fp32", "float16": "fp16"}.get(precision, precision)
        if precision in ("fp32", "fp16", "bf16", "int8", "fp8"):
            draft.build += ["--precision-override", f"{node}={precision}"]
        else:
            draft.lack(f"{what}={part}", f"trtopt builds no layer in {precision}")
    instead = "trtopt build --precision-override NODE=PRECISION; trtopt check MODEL.onnx --nodes lists the names"
    draft.say(what, instead, gone=11)


def _sparsity(draft: _Draft, what: str, value: str) -> None:
    if value == "enable":
        draft.build.append("--sparsity")
    elif value == "force":
        draft.lack(f"{what}=force", "trtopt doesn't overwrite weights; --sparsity uses those that are 2:4 sparse")


def _formats(draft: _Draft, what: str, value: str) -> None:
    types = {part.partition(":")[0] for part in value.split(",")}
    layouts = {layout for part in value.split(",") for layout in part.partition(":")[2].split("+")}
    if layouts - {"chw", ""}:
        draft.lack(f"{what}={value}", "trtopt keeps inputs and outputs in the model's own layout")
    elif types == {"fp16"}:
        draft.build += ["--no-fp32-io"] if "--no-fp32-io" not in draft.build else []
    elif types - {"fp32", "int32", "int64", "bool"}:
        draft.lack(f"{what}={value}", "inputs and outputs are FP32 or, with --no-fp32-io, of the graph's own types")


def _hardware(draft: _Draft, what: str, value: str) -> None:
    level = {"ampere+": "ampere_plus", "sameComputeCapability": "same_compute_capability", "none": "none"}.get(value)
    if level is None:
        draft.lack(f"{what}={value}", "--hardware-compatibility takes none, ampere_plus, same_compute_capability")
    else:
        draft.build += ["--hardware-compatibility", level]


def _calibration_cache(draft: _Draft, what: str, value: str) -> None:
    draft.cache = value
    draft.say(what, f"trtopt build --calib {value}: the cache as it is, on every generation", gone=11)


def _loaded_inputs(draft: _Draft, what: str, value: str) -> None:
    for part in filter(None, value.split(",")):
        name, _, file = part.replace("'", "").rpartition(":")
        draft.inputs.append(f"{name}={_as(file, '.npy')}")
    why = "trtopt run --input NAME=FILE.npy; trtexec's raw files become .npy by numpy.fromfile(…).reshape(…) and numpy.save"
    draft.say(what, why)


def _output(draft: _Draft, what: str, value: str) -> None:
    draft.output = _as(value, "")


def _device(draft: _Draft, what: str, value: str) -> None:
    draft.build += ["--device", value]
    draft.bench += ["--device", value]


def _only_built(draft: _Draft, what: str, value: str) -> None:
    draft.running = False
    draft.say(what, "nothing: trtopt build only builds", gone=10)


def _version_only(draft: _Draft, what: str, value: str) -> None:
    draft.running, draft.inspecting = False, True


def _set(name: str, value: object = None) -> _Handler:
    return lambda draft, what, given: setattr(draft, name, given if value is None else value)


_IMPLICIT = "there is no implicit batch any more: trtopt build --shapes NAME:MIN,OPT,MAX"
_CONVERT = "convert the model to ONNX first; from PyTorch: trtopt export my_model.py:Net -o MODEL.onnx"
_DLA = "trtopt builds for GPUs only"
_PLUGINS = "trtopt loads no plugins; trtopt check MODEL.onnx names the operators that need one"
_MEASURED = "trtopt bench measures GPU time, host time and throughput, each by itself"
_LAYERS = "trtopt profile ENGINE times each layer (--csv, --trace)"
_TRTEXEC: dict[str, _Handler] = {
    "onnx": _set("model"),
    "saveEngine": _set("engine"),
    "loadEngine": _set("engine"),
    "fp16": _precision("fp16"),
    "bf16": _precision("bf16"),
    "int8": _precision("int8"),
    "fp8": _precision("fp8"),
    "best": _precision("best"),
    "int4": _lacks("trtopt has no INT4", 11),
    "stronglyTyped": _nothing("nothing: from TensorRT 10 on trtopt always builds so", 11),
    "calib": _calibration_cache,
    "calibProfile": _nothing("nothing: calibration runs on the graph, before there are profiles", 11),
    "noTF32": _switch("--no-tf32"),
    "minShapes": _shaped("min"),
    "optShapes": _shaped("opt"),
    "maxShapes": _shaped("max"),
    "shapes": _shapes,
    "profile": _new_profile,
    "workspace": _workspace,
    "memPoolSize": _pool,
    "precisionConstraints": _nothing("nothing: overrides are always kept, or the build fails", 11),
    "layerPrecisions": _layer_precisions,
    "layerOutputTypes": _lacks("trtopt sets a node's precision, not its outputs'", 11),
    "layerDeviceTypes": _lacks(_DLA),
    "inputIOFormats": _formats,
    "outputIOFormats": _formats,
    "directIO": _lacks("trtopt leaves reformats at inputs and outputs to TensorRT"),
    "refit": _switch("--refit"),
    "stripWeights": _switch("--strip"),
    "stripAllWeights": _switch("--strip"),
    "weightless": _switch("--strip"),
    "versionCompatible": _switch("--version-compatible"),
    "vc": _switch("--version-compatible"),
    "excludeLeanRuntime": _switch("--exclude-lean-runtime"),
    "sparsity": _sparsity,
    "timingCacheFile": _valued("--timing-cache"),
    "noBuilderCache": _switch("--timing-cache", "none"),
    "builderOptimizationLevel": _valued("--optimization-level"),
    "hardwareCompatibilityLevel": _hardware,
    "device": _device,
    "buildOnly": _only_built,
    "skipInference": _set("running", False),
    "getPlanVersionOnly": _version_only,
    "dumpLayerInfo": _set("inspecting", True),
    "exportLayerInfo": _nothing("nothing: layers stand in MODEL.engine.json"),
    "dumpOptimizationProfile": _set("inspecting", True),
    "iterations": _timed("--iterations"),
    "infStreams": _timed("--streams"),
    "streams": _timed("--streams"),
    "warmUp": _lacks("trtopt bench --warmup counts calls, not milliseconds; 20 unless given"),
    "duration": _lacks("trtopt bench makes --iterations calls, and doesn't stop by time"),
    "loadInputs": _loaded_inputs,
    "exportOutput": _output,
    "dumpOutput": _output,
    "dumpRawBindingsToFile": _output,
    "useCudaGraph": _nothing("nothing: sessions replay CUDA graphs by themselves"),
    "useSpinWait": _nothing(_MEASURED),
    "noDataTransfers": _nothing(_MEASURED),
    "exposeDMA": _nothing(_MEASURED),
    "separateProfileRun": _nothing(_MEASURED),
    "threads": _nothing("nothing: trtopt bench --streams N has a thread for each"),
    "avgRuns": _nothing(_MEASURED),
    "percentile": _nothing("nothing: trtopt bench prints percentiles"),
    "exportTimes": _nothing("trtopt bench --json > TIMES.json"),
    "dumpProfile": _nothing(_LAYERS),
    "exportProfile": _nothing(_LAYERS),
    "profilingVerbosity": _nothing("nothing: the layers are read at every build"),
    "nvtxMode": _nothing("nothing: the layers are read at every build", 10),
    "verbose": _nothing("trtopt -v build …"),
    "explicitBatch": _nothing("nothing: the batch is always explicit", 10),
    "heuristic": _nothing("trtopt build --optimization-level N", 10),
    "minTiming": _nothing("nothing: trtopt leaves it to TensorRT", 10),
    "avgTiming": _nothing("nothing: trtopt leaves it to TensorRT"),
    "batch": _lacks(_IMPLICIT, 10),
    "maxBatch": _lacks(_IMPLICIT, 10),
    **dict.fromkeys(("deploy", "model", "output", "uff", "uffInput", "uffNHWC"), _lacks(_CONVERT, 10)),
    **dict.fromkeys(
        ("useDLACore", "allowGPUFallback", "buildDLAStandalone", "safe", "consistency", "std", "restricted"), _lacks(_DLA)
    ),
    **dict.fromkeys(
        ("plugins", "staticPlugins", "dynamicPlugins", "setPluginsToSerialize", "ignoreParsedPluginLibs"), _lacks(_PLUGINS)
    ),
}  # fmt: skip

TRTEXEC_OPTIONS = tuple(_TRTEXEC)


def _trtexec(arguments: Sequence[str]) -> tuple[list[str], list[Option]]:
    draft = _Draft()
    for argument in arguments:
        name, _, value = argument.lstrip("-").partition("=")
        handler = _TRTEXEC.get(name)
        if not argument.startswith("-"):
            draft.lack(argument, "it is no option of trtexec: values follow a '='")
        elif handler is None:
            draft.lack(argument.partition("=")[0], "trtopt has nothing for it")
        else:
            handler(draft, f"--{name}", value)
    if not draft.model and not draft.engine:
        draft.lack("trtexec", "it names neither --onnx nor --loadEngine")
    return draft.commands() if draft.model or draft.engine else [], draft.options


# Polygraphy --------------------------------------------------------------------------------------------------------------

_SEVERAL = {  # options of several values
    "--trt-min-shapes": "min", "--trt-opt-shapes": "opt", "--trt-max-shapes": "max", "--input-shapes": "", "--inputs": "",
    "--pool-limit": "", "--memory-pool-limit": "", "--layer-precisions": "", "--plugins": "", "--atol": "", "--rtol": "",
    "--trt-outputs": "", "--onnx-outputs": "", "--load-inputs": "", "--load-input-data": "", "--tactic-sources": "",
    "--preview-features": "", "--check-error-stat": "", "--outputs": "",
}  # fmt: skip
_POLYGRAPHY_FLAGS = {
    "--sparse-weights": ["--sparsity"],
    "--refittable": ["--refit"],
    "--strip-plan": ["--strip"],
    "--version-compatible": ["--version-compatible"],
    "--exclude-lean-runtime": ["--exclude-lean-runtime"],
}
_POLYGRAPHY_VALUES = {
    "--builder-optimization-level": "--optimization-level",
    "--load-timing-cache": "--timing-cache",
    "--save-timing-cache": "--timing-cache",
    "--timing-cache": "--timing-cache",
}
_UNHEARD = ("--trt", "--onnxrt", "--tf32", "--model-type", "--convert-to", "--input-shapes", "--inputs", "--validate")
_POLYGRAPHY_NOTHING = {
    "--precision-constraints": "nothing: overrides are always kept, or the build fails",
    "--strongly-typed": "nothing: from TensorRT 10 on trtopt always builds so",
}


def _polygraphy(arguments: Sequence[str]) -> tuple[list[str], list[Option]]:
    tool, *rest = list(arguments) or [""]
    positional, options = _parsed(rest)
    if tool in ("surgeon", "inspect", "debug", "check", "data"):
        part, *positional = positional or [""]
        return _polygraphy_tool(tool, part, positional, dict(options))
    if tool not in ("convert", "run"):
        raise UsageError(
            f"`migrate=` polygraphy {tool or 'alone'}: convert, run, surgeon, inspect, debug, check are known"
        )
    draft = _Draft(model=positional[0] if positional else "MODEL.onnx", running=False)
    if tool == "run" and Path(draft.model).suffix in (".engine", ".plan", ".trt"):
        draft.model, draft.engine = "", draft.model
    elif Path(draft.model).suffix != ".onnx":
        draft.lack(draft.model, "trtopt builds from ONNX; from PyTorch: trtopt export my_model.py:Net -o MODEL.onnx")
    for name, values in options:
        _polygraphy_option(draft, name, values)
    given = {name for name, _ in options}
    if "--tf32" not in given and draft.model:
        draft.build.append("--no-tf32")
        draft.say("polygraphy", "it leaves TF32 off unless told, so --no-tf32; trtopt by itself uses it, and is faster")
    commands = draft.commands()
    if tool == "run":
        engine = draft.engine or _as(draft.model, ".engine")
        if {"--trt", "--onnxrt"} <= given:
            data = ("--data", draft.data) if draft.data else IMAGES
            words = ["trtopt", "verify", draft.model or "MODEL.onnx", engine, *data, "--min-snr", "20"]
            commands.append(shlex.join(words))
            draft.say(
                "polygraphy", "it fails where outputs differ; verify does with a limit alone, such as --min-snr 20 (dB)"
            )
        elif "--onnxrt" in given:
            commands = [shlex.join(["trtopt", "check", draft.model])]
        else:
            commands.append(shlex.join(["trtopt", "bench", engine]))
    return commands, draft.options


def _polygraphy_option(draft: _Draft, name: str, values: Sequence[str]) -> None:
    value = values[0] if values else ""
    if name in ("--fp16", "--bf16", "--int8", "--fp8"):
        _precision(name[2:])(draft, name, "")
    elif name == "--fp-to-fp16":
        draft.precisions.add("fp16")
        draft.build += ["--save-onnx", draft.engine or "OUT.onnx"]
        draft.engine = ""
        draft.say(name, "trtopt build --fp16 --save-onnx OUT.onnx: the graph in FP16, with what overflows left in FP32")
    elif name in ("-o", "--output", "--save-engine"):
        if "--save-onnx" in draft.build:
            draft.build[draft.build.index("--save-onnx") + 1] = value
        else:
            draft.engine = value
    elif which := _SEVERAL.get(name):  # again: another profile
        if which in draft.profiles[-1] and which == "min":
            draft.profiles.append({})
        place = next((profile for profile in draft.profiles if which not in profile), draft.profiles[-1])
        place[which] = ",".join(map(_shape_text, values))
    elif name in ("--pool-limit", "--memory-pool-limit"):
        for item in values:
            pool, _, size = item.partition(":")
            unit = {"K": "KiB", "M": "MiB", "G": "GiB"}.get(size[-1:], "")
            _pool_of_polygraphy(draft, name, pool, (size[:-1] if unit else size) + unit)
    elif name == "--workspace":
        draft.build += ["--workspace", value]
    elif name == "--calibration-cache":
        _calibration_cache(draft, name, value)
    elif name in ("--data-loader-script", "--load-inputs", "--load-input-data"):
        draft.data = "ARRAYS.npz"
        draft.say(name, "--data ARRAYS.npz: an array for each input, whose first axis are the samples (numpy.savez)")
    elif name == "--layer-precisions":
        _layer_precisions(draft, name, ",".join(values))
    elif name == "--hardware-compatibility-level":
        draft.build += ["--hardware-compatibility", value.lower()]
    elif flags := _POLYGRAPHY_FLAGS.get(name):
        draft.build += flags
    elif flag := _POLYGRAPHY_VALUES.get(name):
        draft.build += [] if flag in draft.build else [flag, value]
    elif name in _POLYGRAPHY_NOTHING:
        draft.say(name, _POLYGRAPHY_NOTHING[name], 11)
    elif name in ("--atol", "--rtol", "--check-error-stat"):
        draft.say(
            name, "trtopt verify --min-snr DB or --min-agreement SHARE: each output by its kind, not by tolerances"
        )
    elif name in ("-v", "-vv", "-vvv", "--verbose"):
        draft.say(name, "trtopt -v build …")
    elif name == "--plugins":
        draft.lack(name, _PLUGINS)
    elif name not in _UNHEARD:
        draft.lack(name, "trtopt has nothing for it")


def _pool_of_polygraphy(draft: _Draft, what: str, pool: str, size: str) -> None:
    if pool == "workspace":
        draft.build += ["--workspace", size]
    else:
        draft.lack(f"{what} {pool}", "trtopt sets no memory pool but the workspace; it has no DLA")


def _polygraphy_tool(
    tool: str, part: str, positional: list[str], options: Mapping[str, list[str]]
) -> tuple[list[str], list[Option]]:
    model = positional[0] if positional else "MODEL.onnx"
    output = next((options[name][0] for name in ("-o", "--output") if options.get(name)), "OUT.onnx")
    commands: dict[tuple[str, str], list[str]] = {
        ("surgeon", "sanitize"): ["check", model, "--fix", output],
        ("inspect", "model"): ["inspect", model],
        ("inspect", "capability"): ["check", model],
        ("check", "lint"): ["check", model],
        ("debug", "precision"): ["tune", model, *IMAGES, "--min-snr", "20", "-o", "MODEL.engine"],
    }
    words = commands.get((tool, part))
    if words is None:
        return [], [Option(f"polygraphy {tool} {part}".rstrip(), 0, "trtopt has nothing for it", True)]
    said = []
    if tool == "debug":
        said.append(
            Option("polygraphy debug precision", 0, "tune finds what must stay out of INT8, by the noise it makes")
        )
    return [shlex.join(["trtopt", *words])], said


def _parsed(words: Iterable[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Positional arguments, and options with their values, as Polygraphy takes them: after a space or a '='."""
    positional: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for word in words:
        last, values = options[-1] if options else ("", [])
        if re.match(r"-{1,2}[a-zA-Z]", word):
            name, equals, value = word.partition("=")
            options.append((name, [value] if equals else []))
        elif last in _SEVERAL or (last in _ONE and not values):
            values.append(word)
        else:
            positional.append(word)
    return positional, options


_ONE = {
    *_POLYGRAPHY_VALUES, "-o", "--output", "--save-engine", "--workspace", "--calibration-cache", "--data-loader-script",
    "--hardware-compatibility-level", "--precision-constraints", "--model-type", "--convert-to", "--iterations", "--seed",
    "--val-range", "--int-min", "--int-max", "--float-min", "--float-max", "--calibration-base-class", "--quantile",
    "--save-outputs", "--save-results", "--load-outputs", "--load-results", "--save-inputs", "--fail-fast", "--mode", "--show",
    "--trt-config-script", "--trt-network-func-name", "--warm-up", "--max-aux-streams", "--profiling-verbosity", "--providers",
    "--execution-providers", "--opset", "--save-tactics", "--load-tactics", "--tactic-replay", "--engine-capability",
}  # fmt: skip


def _shape_text(text: str) -> str:
    """ "input:[1,3,224,224]", or "input,1x3x224x224" as older versions have it, as "input:1x3x224x224"."""
    name, _, dims = text.rpartition(":") if ":" in text else text.rpartition(",")
    sizes = re.findall(r"\d+", dims)
    return f"{name.strip(chr(39))}:{'x'.join(sizes) or 'scalar'}"
