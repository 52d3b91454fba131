"""TensorRT 10: strongly typed, except with TensorRT's own (deprecated) calibrator, which needs a weak network."""

from __future__ import annotations

from trtopt.trt.generation import Generation


class TensorRT10(Generation):
    family = "tensorrt10"

    def _network_flags(self, typed: bool) -> tuple[str, ...]:
        return ("STRONGLY_TYPED",) if typed else ()
