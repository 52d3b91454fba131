"""Native calls that differ from those of TensorRT 10 and 11: of 8.6 and TensorRT-RTX.

Measured on 8.6: FP16-typed graphs run slower than FP32-typed ones with the FP16 flag, and FP16 Q/DQ scales don't parse;
so the graph stays FP32-typed (Q/DQ included) and flags allow the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trtopt.core.errors import UnsupportedRequest
from trtopt.core.options import named
from trtopt.core.progress import Reporter
from trtopt.core.values import BuildSpec, Precision
from trtopt.trt.capabilities import LEAST, precisions
from trtopt.trt.generation import Generation
from trtopt.trt.layers import LayerReport, from_dump
from trtopt.trt.messages import Messages
from trtopt.trt.plans import RuntimeSettings

DEFAULT_TARGETS = (80, 86, 89, 120)
"""Ampere, Ada and Blackwell. Not sm75: one Turing target turns INT8 convolutions into float ones for every target."""

_TURING = "with sm75 among the targets TensorRT-RTX runs INT8 convolutions in floating point on every target"


class TensorRT8(Generation):
    """TensorRT 8.6: weakly typed."""

    def _network_flags(self, typed: bool) -> tuple[str, ...]:
        return ("EXPLICIT_BATCH",)  # leaving it out is deprecated, and the ONNX parser needs it

    def _configure(self, config: Any, spec: BuildSpec) -> None:
        super()._configure(config, spec)
        # Else an engine's second context can't use the profile of the first; later generations always share.
        config.set_preview_feature(self.module.PreviewFeature.PROFILE_SHARING_0806, True)


class TensorRTRTX(Generation):
    """TensorRT-RTX: strongly typed; builds without a GPU for named compute capabilities, finishes kernels on the GPU."""

    product = "TensorRT-RTX"

    def targets(self, spec: BuildSpec) -> tuple[int, ...]:
        if spec.targets:
            return spec.targets
        least = max(LEAST.get(precision, 0) for precision in precisions(spec))
        return tuple(target for target in DEFAULT_TARGETS if target >= least)

    def _refusals(self, spec: BuildSpec, reporter: Reporter) -> list[str]:
        problems = []
        if 75 in spec.targets and spec.precision is Precision.INT8:
            if spec.allow_precision_fallback:
                reporter.warn(f"`target='sm75'`: {_TURING}")
            else:
                problems.append(f"`target='sm75'`: {_TURING}; drop sm75, or add `allow_precision_fallback=True`")
        options = " and ".join(named(name, True) for name in ("strip", "refit") if getattr(spec, name))
        if options and not self.gpu():
            needed = "TensorRT-RTX needs a GPU for it at build time; drop it, or build where there is one"
            problems.append(f"{options}: {needed}")
        return problems

    def _configure(self, config: Any, spec: BuildSpec) -> None:
        super()._configure(config, spec)
        # Left unset it builds for a wider set, and takes models that the named targets refuse: always name them.
        targets = self.targets(spec)
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            if not config.set_compute_capability(getattr(self.module.ComputeCapability, f"SM{target}"), index):
                listing = ",".join(f"sm{cc}" for cc in targets)
                raise UnsupportedRequest(f"`target='{listing}'`: {self} refuses sm{target} in this list")

    def _runtime_settings(
        self, engine: Any, runtime: Any, runtime_cache: bytes | None, capture: bool
    ) -> RuntimeSettings:
        # Contexts' scratch memory is the caller's.
        module = self.module
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(module.ExecutionContextAllocationStrategy.USER_MANAGED)
        if capture:
            config.cuda_graph_strategy = module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        # TensorRT-RTX checks what is in it against the current CUDA context, its version and the GPU; what doesn't fit is
        # refused, and costs only the time of compiling the kernels again.
        cache = config.create_runtime_cache()
        if runtime_cache:
            cache.deserialize(runtime_cache)
        config.set_runtime_cache(cache)
        return RuntimeSettings(cache, config, engine, runtime, capture)

    def _found_layers(
        self, plan: memoryview, messages: Messages, ops: Mapping[str, str], in_float: Collection[str]
    ) -> LayerReport:
        if not messages.layers:
            return LayerReport(unread=f"{self} wrote no layer report during the build")
        reports = [from_dump(dump, ops, in_float) for dump in messages.layers]
        layers = tuple(layer for report in reports for layer in report.layers)
        return LayerReport(layers, "; ".join(report.unread for report in reports if report.unread))


FAMILIES: dict[str, type[Generation]] = {"tensorrt8": TensorRT8, "rtx": TensorRTRTX}
"""By family; `Generation` itself is the others'."""
