"""TensorRT 11: always strongly typed (its STRONGLY_TYPED flag is deprecated and left out); no flags, no calibrator."""

from __future__ import annotations

from trtopt.trt.generation import Generation


class TensorRT11(Generation):
    family = "tensorrt11"
