"""The door to TensorRT: the only place that imports tensorrt or tensorrt_rtx.

    generation = select("auto")          # or "tensorrt", "rtx"
    generation.refuse(spec)              # before any work
    built = generation.build(path, spec, quantized=True)

Four generations stand behind one interface. What differs is read off the module or in two small files; elsewhere code asks
`generation.capabilities`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from trtopt.core.errors import NoBackend
from trtopt.core.values import BACKENDS, choice
from trtopt.core.version import to_install
from trtopt.cuda.device import probe
from trtopt.trt.capabilities import Capabilities
from trtopt.trt.generation import BuiltPlan, Generation
from trtopt.trt.layers import HEAVY_OPS
from trtopt.trt.parsing import NetworkLayer, refusal
from trtopt.trt.plans import LoadedEngine, PlanHeader, host_code_refused, plan_header
from trtopt.trt.profiles import profile_problems, validate_profiles
from trtopt.trt.rtx import DEFAULT_TARGETS, TensorRTRTX
from trtopt.trt.tensorrt8 import TensorRT8

__all__ = [
    "DEFAULT_TARGETS",
    "HEAVY_OPS",
    "BuiltPlan",
    "Capabilities",
    "Generation",
    "LoadedEngine",
    "NetworkLayer",
    "PlanHeader",
    "host_code_refused",
    "installed",
    "plan_header",
    "profile_problems",
    "refusal",
    "select",
    "validate_profiles",
]

_FAMILIES: dict[int, type[Generation]] = {8: TensorRT8, 10: Generation, 11: Generation}
_made: dict[ModuleType, Generation] = {}


def installed() -> tuple[Generation, ...]:
    """Every TensorRT that imports here, TensorRT before TensorRT-RTX. Importing runs none of their native set-up."""
    return tuple(found for name in ("tensorrt", "tensorrt_rtx") if isinstance(found := _look(name), Generation))


def select(backend: str = "auto") -> Generation:
    """The generation to use.

    "auto" takes TensorRT where there is a GPU for it, else TensorRT-RTX; `alternatives` of the result names the rest.

    Args:
        backend: "auto", "tensorrt" or "rtx".

    Raises:
        NoBackend: what was asked for isn't installed; says how to install it.
        UsageError: another word.
    """
    choice(backend, BACKENDS, "`backend=`")
    tensorrt, rtx = _look("tensorrt"), _look("tensorrt_rtx")
    if backend != "auto":
        generation = rtx if backend == "rtx" else tensorrt
        if isinstance(generation, Generation):
            return generation
        raise NoBackend(f"`backend='{backend}'`: {generation}: {_to_install(backend)}")
    gpu = probe()
    if isinstance(tensorrt, Generation) and gpu:
        tensorrt.alternatives = f"`backend='rtx'` takes {rtx}" if isinstance(rtx, Generation) else ""
        return tensorrt
    if isinstance(rtx, Generation):
        here = isinstance(tensorrt, Generation)
        rtx.alternatives = f"{tensorrt} is installed too but needs a GPU: {gpu.reason}" if here else ""
        return rtx
    if isinstance(tensorrt, Generation):
        raise NoBackend(
            f"{tensorrt} is installed but there is no GPU for it ({gpu.reason}); "
            f"to build without one: {_to_install('rtx')}"
        )
    raise NoBackend(
        f"no TensorRT can be used: {tensorrt}; {rtx}. Install TensorRT-RTX, which builds without a GPU: "
        f"{_to_install('rtx')}; or, on a machine with a GPU, TensorRT: {_to_install('tensorrt')}"
    )


def _to_install(backend: str) -> str:
    return to_install("rtx") if backend == "rtx" else " or ".join(map(to_install, ("trt11", "trt10", "trt8")))


def _look(name: str) -> Generation | str:
    """The generation of an importable module, or why there is none."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} isn't installed" if error.name == name else f"{name} is installed but fails to import ({error})"
    except Exception as error:  # its loader raises whatever a missing or foreign native library leads to
        return f"{name} is installed but fails to import ({type(error).__name__}: {error})"
    if module not in _made:
        family: type[Generation] | None = TensorRTRTX
        if name == "tensorrt":
            major, minor = ([int(part) for part in str(module.__version__).split(".")[:2]] + [0])[:2]
            family = _FAMILIES.get(major) if (major, minor) >= (8, 6) else None
        if family is None:
            return f"tensorrt {module.__version__} isn't supported (8.6, 10 and 11 are)"
        _made[module] = family(module)
    return _made[module]
