"""The abilities of a TensorRT generation, read off its own module: elsewhere code asks "can it?", never "which version?"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trtopt.core.options import named
from trtopt.core.values import HARDWARE_LEVELS, SETTINGS, BuildSpec, Precision

_TYPES = {"UINT8": "uint8", "BF16": "bfloat16", "FP8": "float8_e4m3fn", "INT4": "int4", "FP4": "float4_e2m1fn"}

LEAST = {Precision.FP8: 89, Precision.BF16: 80, Precision.INT4: 80}
"""Compute capability that the arithmetic needs."""
_MEMBERS = {  # capability → what of the module shows it
    "typed_graph": ("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"),
    "layer_precision": ("ILayer", "precision"),
    "precision_flags": ("BuilderFlag", "INT8"),
    "native_calibrator": ("IBuilderConfig", "int8_calibrator"),
    "progress_monitor": ("IBuilderConfig", "progress_monitor"),
}
_OPTIONAL = {name: item for name, item in SETTINGS.items() if item.lacking}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The options that a generation honours.

    Attributes:
        typed_graph: precision comes from the ONNX graph's own types; precision_flags: from builder flags over FP32 types.
        native_calibrator: TensorRT's own IInt8EntropyCalibrator2 exists.
        layer_precision: one layer's precision can be set after parsing.
        precisions: what `BuildSpec.precision` and `remainder` may be, and INT4 where weights may be that; hardware_levels: what
            `hardware_compatibility` may.
        compute_targets: compute capabilities that a build can name; None: it builds for the GPU that is present.
        builds_without_gpu: parsing and building need no GPU.
        options: those that not every TensorRT has and this one has, such as "refit" (`values.Setting`).
        progress_monitor: builds report their phases and stop when asked.
        max_opset: newest ONNX opset that its parser reads well; None: not known to be limited.
        float_only: precision, or "int8 at level 0" for that optimization level → operator → why it runs in floating point
            even between Q/DQ; "grouped Conv" is an operator of its own.
        types: of tensors, as NumPy and ml_dtypes name them; float64 becomes float32, and int64 int32 where there is none.
        absent: operator → why nothing runs it, though the parser takes it.
        quantized_between: operator → why it runs quantized only where its result is quantized, too.
        gates_in_int8: squeeze-and-excite may be faster as a whole in INT8, so that `tune` tries it.
        mixes_channels: why what stands behind a convolution in INT8 has to be computed in FP32; empty: it hasn't.
        least_scale: least product of two scales that a matrix product in INT8 may have.
        int4_level: optimization level of builds with INT4 weights that ask for none; None: TensorRT's own.
        stored_codes: it takes weights as stored codes; without, as floats with Q/DQ behind them (`passes.old_parser`).
    """

    typed_graph: bool
    precision_flags: bool
    native_calibrator: bool
    layer_precision: bool
    precisions: frozenset[Precision]
    compute_targets: frozenset[int] | None
    builds_without_gpu: bool = False
    options: frozenset[str]
    hardware_levels: frozenset[str]
    progress_monitor: bool
    max_opset: int | None = None
    float_only: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    types: frozenset[str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict)
    quantized_between: Mapping[str, str] = field(default_factory=dict)
    gates_in_int8: bool = False
    mixes_channels: str = ""
    least_scale: float = 0.0
    int4_level: int | None = None
    stored_codes: bool = False

    def floating(self, precision: Precision, level: int | None = None) -> dict[str, str]:
        """Return operator → why it isn't quantized, at an optimization level."""
        return {**self.float_only.get(str(precision), {}), **self.float_only.get(f"{precision} at level {level}", {})}

    def describe(self) -> dict[str, Any]:
        """Return them as plain JSON values."""
        plain: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        del plain["options"]
        plain |= {name: name in self.options for name in _OPTIONAL}
        if self.compute_targets is not None:
            plain["compute_targets"] = [f"sm{target}" for target in sorted(self.compute_targets)]
        return plain


def read(trt: Any) -> Capabilities:
    """Ask the module's own members, so that stand-ins and future minor versions answer for themselves."""
    types = trt.DataType
    shown: dict[str, Any] = {name: hasattr(getattr(trt, owner), member) for name, (owner, member) in _MEMBERS.items()}
    # 8.6 has the type FP8 and a flag, but its ONNX parser has none.
    more = [name for name in _TYPES if hasattr(types, name) and (shown["typed_graph"] or name != "FP8")]
    precisions = {Precision.FP32, Precision.FP16, Precision.INT8}
    precisions |= {precision for precision in (Precision.BF16, Precision.FP8, Precision.INT4) if precision.name in more}
    targets = None
    if hasattr(trt.IBuilderConfig, "set_compute_capability"):
        matches = (re.fullmatch(r"SM(\d+)", name) for name in dir(trt.ComputeCapability))
        targets = frozenset(int(match[1]) for match in matches if match)
    return Capabilities(
        **shown,
        options=frozenset(name for name, item in _OPTIONAL.items() if item.known(trt)),
        precisions=frozenset(precisions),
        compute_targets=targets,
        hardware_levels=frozenset(
            level for level in HARDWARE_LEVELS if hasattr(trt.HardwareCompatibilityLevel, level.upper())
        ),
        types=frozenset(
            {"float32", "float64", "float16", "int8", "int32", "int64", "bool", *(_TYPES[name] for name in more)}
        ),
    )


def refusals(spec: BuildSpec, can: Capabilities, name: str, compute_capability: int | None) -> list[str]:
    """Every option of `spec` that a generation with these capabilities can't honour, with what to type instead.

    Args:
        name: how to call the generation in the text, such as "TensorRT 8.6.0".
        compute_capability: of the GPU that will build, where there is one.
    """
    problems: list[tuple[str, str, str]] = []
    asked = precisions(spec)
    there = ", ".join(str(item) for item in Precision if item in can.precisions)
    for precision in sorted(asked - can.precisions, key=str):
        option = f"`precision_override=['…={precision}']`"
        if precision in (spec.precision, Precision.INT4):
            option = f"`{precision}=True`"
        elif precision is spec.base:
            option = f"`remainder='{precision}'`"
        problems.append((option, f"has {there}", "choose one of these, or install a newer TensorRT"))
    if spec.calibrator == "native" and not can.native_calibrator:
        instead = "drop it: trtopt's calibrator gives the scales"
        problems.append(("`calibrator='native'`", "has no calibrator of its own", instead))
    if spec.targets and can.compute_targets is None:
        instead = "drop it, or use `backend='rtx'`"
        problems.append(("`target=`", "builds for the GPU of this machine only", instead))
    elif can.compute_targets is not None:
        listing = ", ".join(f"sm{cc}" for cc in sorted(can.compute_targets))
        strange = [target for target in spec.targets if target not in can.compute_targets]
        problems += [(f"`target='sm{target}'`", f"has {listing}", "choose of these") for target in strange]
    level = spec.hardware_compatibility
    if level not in ("none", *can.hardware_levels):
        instead = "drop it" if can.compute_targets is None else "name the GPUs with `target=` instead"
        problems.append(
            (f"`hardware_compatibility='{level}'`", f"has {', '.join(sorted(can.hardware_levels))}", instead)
        )
    for option, item in _OPTIONAL.items():
        value = getattr(spec, option)
        if value != getattr(BuildSpec, option) and option not in can.options:
            problems.append((named(option, None if isinstance(value, Path) else value), item.lacking, item.instead))
    texts = [f"{option}: {name} {why}; {instead}" for option, why, instead in problems]
    here = () if compute_capability is None or can.compute_targets is not None else (compute_capability,)
    needs = {f"{precision}": least for precision, least in LEAST.items() if precision in asked}
    needs |= {"`sparsity='prune'`": 80} if spec.sparsity == "prune" else {}
    for what, least in needs.items():
        if low := ",".join(f"sm{cc}" for cc in (*spec.targets, *here) if cc < least):
            where = f"`target='{low}'`" if spec.targets else f"this GPU is {low}"
            texts.append(f"{where}: {what} needs sm{least} or later; drop it or use `fp16=True`")
    return texts


def precisions(spec: BuildSpec) -> set[Precision]:
    """All that a build is asked for."""
    weights = {Precision.INT4} if spec.int4 else set()
    return {spec.precision, spec.base, *weights, *(override.precision for override in spec.overrides)}
