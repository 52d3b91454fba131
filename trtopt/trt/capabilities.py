"""What a TensorRT generation can do, read off its own module: elsewhere code asks "can it?", never "which version?"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trtopt.core.values import HARDWARE_LEVELS, BuildSpec, Precision

_TYPES = {"UINT8": "uint8", "BF16": "bfloat16", "FP8": "float8_e4m3fn", "INT4": "int4", "FP4": "float4_e2m1fn"}


@dataclass(frozen=True)
class Capabilities:
    """What this generation honours.

    Attributes:
        typed_graph: precision comes from the ONNX graph's own types (strongly typed builds).
        precision_flags: precision comes from builder flags over an FP32-typed graph.
        native_calibrator: TensorRT's own IInt8EntropyCalibrator2 exists.
        layer_precision: one layer's precision can be set after parsing.
        precisions: what `BuildSpec.precision` and `remainder` may be.
        compute_targets: compute capabilities that a build can name; None: it builds for the GPU that is present.
        builds_without_gpu: parsing and building need no GPU.
        layers_without_gpu: the built engine's layers can be read without one.
        timing_cache, strip, refit, version_compatible, sparsity, tf32, optimization_level: the option has an effect.
        hardware_levels: what `hardware_compatibility` may be.
        progress_monitor: builds report their phases and stop when asked.
        parser_names_nodes: parser errors carry the node's name and operator (else only its index).
        max_opset: newest ONNX opset that its parser reads well; None: not known to be limited.
        float_only: operator → why it runs in floating point even between Q/DQ.
        types: of tensors, as NumPy and ml_dtypes name them; float64 becomes float32, and int64 int32 where there is none.
        absent: operator → why nothing runs it, though the parser takes it.
        grouped: why a grouped convolution whose result isn't quantized doesn't run in INT8; empty: it does.
        stored_codes: it takes weights that are stored as INT8 codes, and not only as floats with Q/DQ behind them.
    """

    typed_graph: bool
    precision_flags: bool
    native_calibrator: bool
    layer_precision: bool
    precisions: frozenset[Precision]
    compute_targets: frozenset[int] | None
    builds_without_gpu: bool
    layers_without_gpu: bool
    timing_cache: bool
    hardware_levels: frozenset[str]
    strip: bool
    refit: bool
    version_compatible: bool
    sparsity: bool
    tf32: bool
    optimization_level: bool
    progress_monitor: bool
    parser_names_nodes: bool
    max_opset: int | None
    float_only: Mapping[str, str] = field(default_factory=dict)
    types: frozenset[str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict)
    grouped: str = ""
    stored_codes: bool = True

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = asdict(self)
        plain["precisions"] = sorted(map(str, self.precisions))
        plain["hardware_levels"] = sorted(self.hardware_levels)
        plain["types"] = sorted(self.types)
        if self.compute_targets is not None:
            plain["compute_targets"] = [f"sm{target}" for target in sorted(self.compute_targets)]
        return plain


def read(trt: Any) -> Capabilities:
    """Ask the module's own members, so that stand-ins and future minor versions answer for themselves."""
    flags, config, types = trt.BuilderFlag, trt.IBuilderConfig, trt.DataType
    typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    precision_flags = hasattr(flags, "FP16") and hasattr(flags, "INT8")
    precisions = {Precision.FP32, Precision.FP16, Precision.INT8}
    if hasattr(types, "BF16"):
        precisions.add(Precision.BF16)
    if typed and hasattr(types, "FP8"):  # 8.6 has the type and a flag, but its ONNX parser has no FP8
        precisions.add(Precision.FP8)
    targets = None
    if hasattr(config, "set_compute_capability"):
        named = (re.fullmatch(r"SM(\d+)", name) for name in dir(trt.ComputeCapability))
        targets = frozenset(int(match[1]) for match in named if match)
    return Capabilities(
        typed_graph=typed,
        precision_flags=precision_flags,
        native_calibrator=hasattr(trt, "IInt8EntropyCalibrator2") and hasattr(config, "int8_calibrator"),
        layer_precision=hasattr(trt.ILayer, "precision"),
        precisions=frozenset(precisions),
        compute_targets=targets,
        builds_without_gpu=False,
        layers_without_gpu=False,
        timing_cache=hasattr(config, "set_timing_cache"),
        hardware_levels=frozenset(
            level for level in HARDWARE_LEVELS if hasattr(trt.HardwareCompatibilityLevel, level.upper())
        ),
        strip=hasattr(flags, "STRIP_PLAN"),
        refit=hasattr(flags, "REFIT"),
        version_compatible=hasattr(flags, "VERSION_COMPATIBLE"),
        sparsity=hasattr(flags, "SPARSE_WEIGHTS"),
        tf32=hasattr(flags, "TF32"),
        optimization_level=hasattr(config, "builder_optimization_level"),
        progress_monitor=hasattr(trt, "IProgressMonitor") and hasattr(config, "progress_monitor"),
        parser_names_nodes=hasattr(trt.ParserError, "node_name"),
        max_opset=None,
        types=frozenset(
            {"float32", "float64", "float16", "int8", "int32", "int64", "bool"}
            | {name for member, name in _TYPES.items() if hasattr(types, member) and (typed or member != "FP8")}
        ),
    )


def refusals(spec: BuildSpec, can: Capabilities, name: str, compute_capability: int | None) -> list[str]:
    """Every option of `spec` that a generation with these capabilities can't honour, with what to type instead.

    Args:
        name: how to call the generation in the text, such as "TensorRT 8.6.0".
        compute_capability: of the GPU that will build, where there is one.
    """
    there = ", ".join(str(item) for item in Precision if item in can.precisions)
    wanted = {spec.precision, spec.base, *(override.precision for override in spec.overrides)}
    listing = ", ".join(f"sm{cc}" for cc in sorted(can.compute_targets or ()))
    hardware = "drop it" if can.compute_targets is None else "name the GPUs with `target=` instead"
    rows: list[tuple[bool, bool, str, str, str]] = []  # asked for, honoured, the option, why not, what to do instead
    for precision in sorted(wanted - can.precisions, key=str):
        option = f"`precision_override=['…={precision}']`"
        if precision in (spec.precision, spec.base):
            option = f"`{precision}=True`" if precision is spec.precision else f"`remainder='{precision}'`"
        rows.append((True, False, option, f"has {there}", "choose one of these, or install a newer TensorRT"))
    native = "drop it: trtopt's calibrator gives the scales"
    here = "builds for the GPU of this machine only"
    rows += [
        (
            spec.calibrator == "native",
            can.native_calibrator,
            "`calibrator='native'`",
            "has no calibrator of its own",
            native,
        ),
        (bool(spec.targets), can.compute_targets is not None, "`target=`", here, "drop it, or use `backend='rtx'`"),
    ]
    if can.compute_targets is not None:
        for target in spec.targets:
            known = target in can.compute_targets
            rows.append((True, known, f"`target='sm{target}'`", f"has {listing}", "choose of these"))
    level, levels = spec.hardware_compatibility, ", ".join(sorted(can.hardware_levels))
    upgrade, refit = "drop it and rebuild after an upgrade", "use `refit=True` alone, or drop it"
    versions, tuned = "makes no version-compatible plans", spec.optimization_level is not None
    rows += [
        (
            level != "none",
            level in can.hardware_levels,
            f"`hardware_compatibility='{level}'`",
            f"has {levels}",
            hardware,
        ),
        (spec.timing_cache is not None, can.timing_cache, "`timing_cache=`", "has no timing cache", "drop it"),
        (spec.strip, can.strip, "`strip=True`", "can't strip weights from a plan", refit),
        (spec.refit, can.refit, "`refit=True`", "can't refit here", "drop it"),
        (spec.version_compatible, can.version_compatible, "`version_compatible=True`", versions, upgrade),
        (spec.sparsity, can.sparsity, "`sparsity=True`", "has no sparse kernels to choose", "drop it"),
        (not spec.tf32, can.tf32, "`tf32=False`", "has no TF32 switch", "drop it"),
        (tuned, can.optimization_level, "`optimization_level=`", "has no optimization levels", "drop it"),
    ]
    found = [f"{option}: {name} {why}; {instead}" for asked, honoured, option, why, instead in rows if asked > honoured]
    if compute_capability is not None and can.compute_targets is None:
        gpu = f"this GPU is sm{compute_capability}"
        if Precision.FP8 in wanted and compute_capability < 89:
            found.append(f"fp8: {gpu}, FP8 needs sm89 or later; use `int8=True`")
        if Precision.BF16 in wanted and compute_capability < 80:
            found.append(f"bf16: {gpu}, BF16 needs sm80 or later; use fp16")
    return found
