"""The door to TensorRT: the only place that imports tensorrt, tensorrt_rtx or tensorrt_lean.

    generation = select("auto")          # or "tensorrt", "rtx"
    generation.refuse(spec)              # before any work
    result = generation.build(path, spec, quantized=True)
    engine = plan_loader("auto", plan_origin(result.plan)).load(result.plan)  # also "lean", which builds nothing

Four generations stand behind one interface. What differs is read off the module, a row of the table (facts.py) or a method
(families.py); elsewhere code asks `generation.capabilities`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from trtopt.core.errors import NoBackend
from trtopt.core.values import choice, chosen_builder
from trtopt.core.version import to_install
from trtopt.cuda.device import probe
from trtopt.trt.compatibility import PlanOrigin, numbers
from trtopt.trt.facts import MODULES, extras, family_of, rows
from trtopt.trt.families import FAMILIES
from trtopt.trt.generation import Generation
from trtopt.trt.loader import Loader

_KINDS = {"auto": (False, True), "tensorrt": (False,), "lean": (True,), "rtx": ()}  # backend → is it a lean runtime?
_made: dict[ModuleType, Loader] = {}


def loaders() -> tuple[Loader, ...]:
    """Every TensorRT that imports here, importing runs none of their native set-up: those that build, TensorRT before
    TensorRT-RTX, and then the lean runtimes."""
    found: dict[str, Loader] = {}  # a metapackage and its bindings are one
    for item in (*_look("tensorrt"), *_look("rtx"), *_look("lean")):
        if isinstance(item, Loader):
            found.setdefault(str(item), item)
    return tuple(found.values())


def plan_loader(backend: str, origin: PlanOrigin | None) -> Loader:
    """Return what loads a plan of this origin (None: not known): of those that are here the first that runs it, the full
    TensorRT before the lean runtime. `backend` is "auto", "tensorrt", "lean" or "rtx". Raises as `select`."""
    choice(backend, _KINDS, "`backend=`")
    if backend == "rtx" or (origin is not None and origin.product == "TensorRT-RTX" and backend == "auto"):
        return select("rtx")
    candidates = [item for item in loaders() if item.product == "TensorRT" and item.lean in _KINDS[backend]]
    if not candidates:
        if backend != "lean":
            return select(backend if origin is None else "tensorrt")
        raise NoBackend(f"`backend='lean'`: {'; '.join(map(str, _look('lean')))}: {_to_install('lean')}")
    return next((item for item in candidates if origin is None or not item.unread(origin)), candidates[0])


def select(backend: str = "auto") -> Generation:
    """The generation to use: "tensorrt", "rtx", or "auto": TensorRT where there is a GPU for it, else TensorRT-RTX.

    Raises:
        NoBackend: what was asked for isn't installed; says how to install it.
        UsageError: another word.
    """
    chosen_builder(backend)
    [tensorrt], [rtx] = _look("tensorrt"), _look("rtx")
    if backend != "auto":
        generation = rtx if backend == "rtx" else tensorrt
        if isinstance(generation, Generation):
            return generation
        raise NoBackend(f"`backend='{backend}'`: {generation}: {_to_install(backend)}")
    gpu = probe()
    for generation in (tensorrt, rtx) if gpu else (rtx,):
        if isinstance(generation, Generation):
            return generation
    if isinstance(tensorrt, Generation):
        without = f"to build without one: {_to_install('rtx')}"
        raise NoBackend(f"{tensorrt} is installed but there is no GPU for it ({gpu.reason}); {without}")
    lean = "".join(f"; {item} is, which runs engines and builds none" for item in loaders())
    raise NoBackend(
        f"no TensorRT can be used: {tensorrt}; {rtx}{lean}. Install TensorRT-RTX, which builds without a GPU: "
        f"{_to_install('rtx')}; or, on a machine with a GPU, TensorRT: {_to_install('tensorrt')}"
    )


def _to_install(backend: str) -> str:
    return " or ".join(map(to_install, extras(backend)))


def _look(backend: str) -> list[Loader | str]:
    """Return what each module of a backend is to us, or why it is nothing."""
    return [_imported(name, backend) for name in MODULES[backend]]


def _imported(name: str, backend: str) -> Loader | str:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} isn't installed" if error.name == name else f"{name} is installed but fails to import ({error})"
    except Exception as error:  # its loader raises whatever a missing or foreign native library leads to
        return f"{name} is installed but fails to import ({type(error).__name__}: {error})"
    if module not in _made:
        family = family_of(backend, numbers(str(module.__version__)))
        if not family:
            known = (".".join(map(str, facts.first)) for facts in rows(backend).values())
            return f"{name} {module.__version__} isn't supported ({', '.join(known)} are)"
        kind: type[Loader] = Loader if backend == "lean" else FAMILIES.get(family, Generation)
        _made[module] = kind(module, family)
    return _made[module]
