"""What may crash or hang, run as a program of its own by `trtopt.diagnosis.probes`: imports of native libraries, the GPU's
driver, a parser.

    python child.py '["entries", "of", "sys.path"]' module tensorrt

prints {"answer": …} or {"failure": "ImportError: …"} as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtopt.core.files import whole

_NATIVE = re.compile(r"/lib(nvinfer|nvonnxparser|tensorrt|cuda\.|cudart|cudnn|cublas|onnxruntime)[^/]*$")
_RUNTIMES = ("libnvinfer.so", "libtensorrt_rtx.so")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what native libraries print isn't part of the answer
    path, what, *arguments = sys.argv[1:]
    sys.path[:] = json.loads(path)  # as the parent sees packages, without this file's folder
    try:
        reply: dict[str, Any] = {"answer": _PROBES[what](*arguments)}
    except BaseException as error:
        reply = {"failure": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        answers.write(json.dumps(reply, default=str))
        answers.flush()
    os._exit(0)  # libraries that crash when they are unloaded have answered


def _module(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    libraries = _loaded()
    return {
        "version": str(getattr(module, "__version__", "")),
        "file": getattr(module, "__file__", None),
        "libraries": libraries,
        "library_version": next(
            (_inference_version(path) for name, path in libraries.items() if name.startswith(_RUNTIMES)), ""
        ),
    }


def _provider(name: str) -> dict[str, Any]:
    """Whether ONNX Runtime's library for NVIDIA GPUs finds those of CUDA, as a session would load it."""
    ort: Any = importlib.import_module(name)
    folder = Path(ort.__file__).parent / "capi"
    with contextlib.redirect_stdout(sys.stderr):
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()
    for part in ("shared", "cuda"):
        ctypes.CDLL(str(folder / f"libonnxruntime_providers_{part}.so"), ctypes.RTLD_GLOBAL)
    return {"loads": True}


def _gpu() -> dict[str, Any]:
    from trtopt.core.documents import plain
    from trtopt.cuda.device import probe

    return {**plain(probe()), "libraries": _loaded()}


def _check(model: str, backend: str) -> Any:
    import trtopt

    return trtopt.check(model, backend=backend).to_json()


def _loaded() -> dict[str, str]:
    """File name → path of NVIDIA's and ONNX Runtime's libraries in this process."""
    with contextlib.suppress(OSError):
        lines = whole("/proc/self/maps").decode("utf-8", "replace").splitlines()
        paths = sorted({fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6})
        return {Path(path).name: path for path in paths if _NATIVE.search(path)}
    return {}


def _inference_version(path: str) -> str:
    """What a TensorRT library says of itself: up to 8.6 its 8601 is 8.6.1, then 101601 is 10.16.1."""
    with contextlib.suppress(OSError, AttributeError):
        number = int(ctypes.CDLL(path).getInferLibVersion())
        unit = 1000 if number < 10000 else 10000
        return f"{number // unit}.{number % unit // 100}.{number % 100}"
    return ""


_PROBES: dict[str, Callable[..., Any]] = {
    "module": _module,
    "provider": _provider,
    "gpu": _gpu,
    "check": _check,
}

if __name__ == "__main__":
    main()
