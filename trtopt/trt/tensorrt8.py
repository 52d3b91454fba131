"""TensorRT 8.6: weakly typed.

Measured there: FP16-typed graphs run slower than FP32-typed ones with the FP16 flag, and FP16 Q/DQ scales don't parse;
so the graph stays FP32-typed (Q/DQ included) and flags allow the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtopt.core.values import BuildSpec
from trtopt.trt.capabilities import Capabilities
from trtopt.trt.generation import Generation


class TensorRT8(Generation):
    family = "tensorrt8"

    def _capabilities(self, capabilities: Capabilities) -> Capabilities:
        return replace(
            capabilities,
            max_opset=17,  # much of 18 and later does not parse
            gates_in_int8=True,  # measured on H100s (docs/results/accuracy.md)
            # Measured on an H200 (docs/results/zoo.md): it has no other kernel, but dequantizes the weights at each inference
            # and convolves in FP16 or, in a profile of batch 1, in FP32.
            conv_borders="TensorRT 8.6 runs a grouped convolution in INT8 only where its result is quantized right behind it, "
            "or behind a Relu or Clip",
        )

    def _network_flags(self, typed: bool) -> tuple[str, ...]:
        return ("EXPLICIT_BATCH",)  # leaving it out is deprecated, and the ONNX parser needs it

    def _configure(self, config: Any, spec: BuildSpec) -> None:
        # Else an engine's second context can't use the profile of the first; later generations always share.
        config.set_preview_feature(self.module.PreviewFeature.PROFILE_SHARING_0806, True)
