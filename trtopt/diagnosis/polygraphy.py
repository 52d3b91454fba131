"""Command lines of Polygraphy as trtopt's: its options as 0.49 lists them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.diagnosis.drafts import (
    IMAGES,
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


def _fp16_graph(draft: Draft, what: str, value: str) -> None:
    draft.precisions.add("fp16")
    draft.build += ["--save-onnx", draft.engine or "OUT.onnx"]
    draft.engine = ""
    draft.say(what, "trtopt build --fp16 --save-onnx OUT.onnx: the graph in FP16, with what overflows left in FP32")


def _output(draft: Draft, what: str, value: str) -> None:
    if "--save-onnx" in draft.build:
        draft.build[draft.build.index("--save-onnx") + 1] = value
    else:
        draft.engine = value


def _range(which: str) -> Handler:
    def handle(draft: Draft, what: str, value: str) -> None:
        if which in draft.profiles[-1] and which == "min":  # again: another profile
            draft.profiles.append({})
        place = next((profile for profile in draft.profiles if which not in profile), draft.profiles[-1])
        place[which] = value

    return handle


def _pools(draft: Draft, what: str, value: str) -> None:
    for item in filter(None, value.split(",")):
        pool, _, size = item.partition(":")
        if pool != "workspace":
            draft.lack(f"{what} {pool}", "trtopt sets no memory pool but the workspace; it has no DLA")
            continue
        unit = {"K": "KiB", "M": "MiB", "G": "GiB"}.get(size[-1:], "")
        draft.build += ["--workspace", (size[:-1] if unit else size) + unit]


def _data(draft: Draft, what: str, value: str) -> None:
    draft.data = "ARRAYS.npz"
    draft.say(what, "--data ARRAYS.npz: an array for each input, whose first axis are the samples (numpy.savez)")


def _first(flag: str) -> Handler:
    """Several options have one counterpart."""
    return lambda draft, what, value: draft.build.extend([] if flag in draft.build else [flag, value])


_TOLERANCES = "trtopt verify --min-snr DB or --min-agreement SHARE: each output by its kind, not by tolerances"
_FED = ("--input-shapes", "--inputs")
_SHAPES = {"--trt-min-shapes": "min", "--trt-opt-shapes": "opt", "--trt-max-shapes": "max"}
_OPTIONS: dict[str, Handler] = {
    **{f"--{name}": precision(name) for name in ("fp16", "bf16", "int8", "fp8")},
    "--fp-to-fp16": _fp16_graph,
    **dict.fromkeys(("-o", "--output", "--save-engine"), _output),
    **{name: _range(which) for name, which in _SHAPES.items()},
    **dict.fromkeys(("--pool-limit", "--memory-pool-limit"), _pools),
    "--workspace": valued("--workspace"),
    "--calibration-cache": calibration_cache,
    **dict.fromkeys(("--data-loader-script", "--load-inputs", "--load-input-data"), _data),
    "--layer-precisions": layer_precisions,
    **dict.fromkeys(
        ("--precision-constraints", "--obey-precision-constraints", "--strict-types"),
        nothing("nothing: overrides are always kept, or the build fails", 11),
    ),
    "--strongly-typed": nothing("nothing: from TensorRT 10 on trtopt always builds so", 11),
    "--hardware-compatibility-level": lambda draft, what, value: (
        draft.build.extend(["--hardware-compatibility", value.lower()])
    ),
    "--sparse-weights": switch("--sparsity"),
    "--refittable": switch("--refit"),
    "--strip-plan": switch("--strip"),
    "--version-compatible": switch("--version-compatible"),
    "--exclude-lean-runtime": switch("--exclude-lean-runtime"),
    "--builder-optimization-level": _first("--optimization-level"),
    **dict.fromkeys(("--load-timing-cache", "--save-timing-cache", "--timing-cache"), _first("--timing-cache")),
    **dict.fromkeys(("--atol", "--rtol", "--check-error-stat"), nothing(_TOLERANCES)),
    **dict.fromkeys(("-v", "-vv", "-vvv", "--verbose"), nothing("trtopt -v build …")),
    "--plugins": lacks(PLUGINS),
    **dict.fromkeys(
        ("--trt", "--onnxrt", "--tf32", "--model-type", "--convert-to", "--input-shapes", "--inputs", "--validate"), switch()
    ),
}  # fmt: skip
# How many values options have.
_SEVERAL = {
    *_SHAPES, "--input-shapes", "--inputs", "--pool-limit", "--memory-pool-limit", "--layer-precisions", "--plugins", "--atol",
    "--rtol", "--trt-outputs", "--onnx-outputs", "--load-inputs", "--load-input-data", "--tactic-sources", "--preview-features",
    "--check-error-stat", "--outputs",
}  # fmt: skip
_ONE = {
    "--builder-optimization-level", "--load-timing-cache", "--save-timing-cache", "--timing-cache",
    "-o", "--output", "--save-engine", "--workspace", "--calibration-cache", "--data-loader-script",
    "--hardware-compatibility-level", "--precision-constraints", "--model-type", "--convert-to", "--iterations", "--seed",
    "--val-range", "--int-min", "--int-max", "--float-min", "--float-max", "--calibration-base-class", "--quantile",
    "--save-outputs", "--save-results", "--load-outputs", "--load-results", "--save-inputs", "--fail-fast", "--mode", "--show",
    "--trt-config-script", "--trt-network-func-name", "--warm-up", "--max-aux-streams", "--profiling-verbosity", "--providers",
    "--execution-providers", "--opset", "--save-tactics", "--load-tactics", "--tactic-replay", "--engine-capability",
}  # fmt: skip


def translated(arguments: Sequence[str]) -> tuple[list[str], list[Option]]:
    """trtopt's commands for these arguments, and what is to be said of them.

    Raises:
        UsageError: a tool of Polygraphy's that isn't known here.
    """
    tool, *rest = list(arguments) or [""]
    positional, options = _parsed(rest)
    if tool in ("surgeon", "inspect", "debug", "check", "data"):
        part, *positional = positional or [""]
        return _tool(tool, part, positional, dict(options))
    if tool not in ("convert", "run"):
        raise UsageError(
            f"`migrate=` polygraphy {tool or 'alone'}: convert, run, surgeon, inspect, debug, check are known"
        )
    draft = Draft(model=positional[0] if positional else "MODEL.onnx", running=False)
    if tool == "run" and Path(draft.model).suffix in (".engine", ".plan", ".trt"):
        draft.model, draft.engine = "", draft.model
    elif Path(draft.model).suffix != ".onnx":
        draft.lack(draft.model, "trtopt builds from ONNX; from PyTorch: trtopt export my_model.py:Net -o MODEL.onnx")
    for name, values in options:
        value = ",".join(map(_shape_text, values) if name in _SHAPES else values)
        if name in _OPTIONS:
            _OPTIONS[name](draft, name, value)
        else:
            draft.lack(name, UNKNOWN)
    shapes = [text for name, values in options if name in _FED for text in map(_shape_text, values)]
    if shapes and not any(draft.profiles):  # what is fed is then the only profile, too
        draft.profiles = [{"opt": ",".join(shapes)}]
    option_names = {name for name, _ in options}
    if "--tf32" not in option_names and draft.model:
        draft.build.append("--no-tf32")
        draft.say("polygraphy", "it leaves TF32 off unless told, so --no-tf32; trtopt by itself uses it, and is faster")
    commands = draft.commands()
    if tool == "run":
        engine = draft.engine or with_suffix(draft.model, ".engine")
        if {"--trt", "--onnxrt"} <= option_names:
            data = ("--data", draft.data) if draft.data else IMAGES
            words = ["trtopt", "verify", draft.model or "MODEL.onnx", engine, *data, "--min-snr", "20"]
            commands.append(shlex.join(words))
            draft.say(
                "polygraphy", "it fails where outputs differ; verify does with a limit alone, such as --min-snr 20 (dB)"
            )
        elif "--onnxrt" in option_names:
            commands = [shlex.join(["trtopt", "check", draft.model])]
        else:
            commands.append(shlex.join(["trtopt", "bench", engine]))
    return commands, draft.options


def _tool(
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
        return [], [Option(f"polygraphy {tool} {part}".rstrip(), 0, UNKNOWN, True)]
    remarks = []
    if tool == "debug":
        remarks.append(
            Option("polygraphy debug precision", 0, "tune finds what must stay out of INT8, by the noise it makes")
        )
    return [shlex.join(["trtopt", *words])], remarks


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


def _shape_text(text: str) -> str:
    """ "input:[1,3,224,224]", or "input,1x3x224x224" as older versions have it, as "input:1x3x224x224"."""
    name, _, dims = text.rpartition(":") if ":" in text else text.rpartition(",")
    sizes = re.findall(r"\d+", dims)
    return f"{name.strip(chr(39))}:{'x'.join(sizes) or 'scalar'}"
