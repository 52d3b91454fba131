"""The generations of TensorRT, a row each: what can't be read off their modules. Native calls that differ in more than their
name are methods in families.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

MODULES = {"tensorrt": ("tensorrt",), "lean": ("tensorrt_lean", "tensorrt_lean_bindings"), "rtx": ("tensorrt_rtx",)}
"""Python's names of what a backend is; the lean runtime's metapackage comes before its bindings alone."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A generation.

    Attributes:
        first: the first version, as far as trtopt takes it; (): any.
        before: the family whose version-compatible plans it runs, too.
        extras: backend → the extra that installs it.
        gpus: from a version on, the compute capabilities that it is for.
        lacks: options that have no effect although their members are there.
        known: fields of `Capabilities` that no member of the module shows.
        renamed: "Class.member" as code here calls it → this generation's name of the same.
    """

    first: tuple[int, ...]
    before: str = ""
    extras: Mapping[str, str]
    gpus: Mapping[tuple[int, ...], Sequence[int]]
    lacks: Set[str] = frozenset()
    known: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def gpus_of(self, version: tuple[int, ...]) -> Sequence[int]:
        return [gpus for since, gpus in self.gpus.items() if version >= since][-1]


_FP8 = {  # seen on 10.6, H100 (docs/results/tensorrt-10.md)
    "ConvTranspose": "TensorRT has no transposed convolution in FP8",
    "grouped Conv": "TensorRT makes a grouped convolution in FP8 one convolution for each group",
}
_SINCE_10 = {
    "float_only": {"fp8": _FP8},
    # "No supported formats", at any kernel, stride and level.
    "quantized_between": {
        "ConvTranspose": "TensorRT builds a transposed convolution in INT8 only where its result is quantized right behind it, "
        "or behind a Relu or Clip (seen on 10.6)"
    },
}
_NONE_IN_RTX = "TensorRT-RTX runs transposed convolutions in floating point even between Q/DQ"
_AT_0 = dict.fromkeys(  # docs/results/certify.md
    ("MatMul", "Gemm"),
    "at optimization level 0 TensorRT 10.6 brings an INT8 product's sums through FP16, where large ones become infinite",
)
LATER = 1000  # compute capabilities that there may be

GENERATIONS: dict[str, Facts] = {
    "tensorrt8": Facts(
        first=(8, 6),
        extras={"tensorrt": "trt8", "lean": "lean8"},
        gpus={(8, 6): range(50, 91)},
        known={
            "max_opset": 17,  # much of 18 and later does not parse
            "gates_in_int8": True,  # measured on H100s (docs/results/accuracy.md)
            # Measured on an H200 (docs/results/zoo.md): it has no other kernel, but dequantizes the weights at each inference
            # and convolves in FP16 or, in a profile of batch 1, in FP32.
            "quantized_between": {
                "grouped Conv": "TensorRT 8.6 runs a grouped convolution in INT8 only where its result is quantized right "
                "behind it, or behind a Relu or Clip"
            },
        },
    ),
    "tensorrt10": Facts(
        first=(10,),
        before="tensorrt8",
        extras={"tensorrt": "trt10", "lean": "lean"},
        gpus={(10,): range(70, 91), (10, 5): range(75, 91), (10, 8): range(75, LATER)},
        known={
            **_SINCE_10,
            "float_only": {"int8 at level 0": _AT_0, "fp8": _FP8},  # docs/results/certify.md, as what follows
            "least_scale": 2.0**-20,  # 1.07e-7 and less gave zero, 1.2e-6 and more are right
            "mixes_channels": "TensorRT 10.6 mixes up the channels that a convolution in INT8 writes behind it as FP16",
            "int4_level": 1,  # at 2 to 4 most products with a bias end the process: "LLVM ERROR: out of memory"
        },
    ),
    "tensorrt11": Facts(
        first=(11,),
        before="tensorrt10",
        extras={"tensorrt": "trt11", "lean": "lean11"},
        gpus={(11,): range(75, LATER)},
        known=_SINCE_10,
    ),
    "rtx": Facts(
        first=(),
        extras={"rtx": "rtx"},
        gpus={(): (75, 80, 86, 89, 120, 121)},
        lacks={"timing_cache", "version_compatible"},  # functions that do nothing; no lean runtime to carry
        known={
            "builds_without_gpu": True,
            "hardware_levels": frozenset({"none"}),  # "setHardwareCompatibilityLevel() is unsupported in TensorRT-RTX"
            "stored_codes": True,
            "float_only": {
                "int8": {"ConvTranspose": _NONE_IN_RTX},
                "fp8": {
                    "ConvTranspose": _NONE_IN_RTX,
                    "grouped Conv": "FP8's three bits lose what a grouped convolution gives, whose few products don't average",
                },
            },
            "absent": {
                "NonMaxSuppression": "TensorRT-RTX has no implementation of it; export the model without it and select the "
                "boxes outside the engine"
            },
        },
    ),
}
"""By family, the older before the newer."""


def rows(backend: str) -> dict[str, Facts]:
    """Return the generations that a backend may be, by family, the oldest first."""
    return {family: facts for family, facts in GENERATIONS.items() if backend in facts.extras}


def family_of(backend: str, version: tuple[int, ...]) -> str:
    """Return the family of a version of a backend; "": none that is known here."""
    for family, facts in rows(backend).items():
        if facts.first[:1] in ((), version[:1]) and facts.first <= version:
            return family
    return ""


def extras(backend: str) -> list[str]:
    """Return the extras that install a backend, the newest generation's first."""
    return [facts.extras[backend] for facts in reversed(rows(backend).values())]
