"""The process of `trtopt.builder.kernels`: runs an engine and notes the kernels that it launches, through CUPTI's callbacks.

    python -m trtopt.runtime.kernel_run FOLDER

reads request.json and run.engine there and writes answer.json. CUPTI's interface is that of its documentation ("Callback API"):
a driver call that launches a kernel is announced with the kernel's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.core.errors import TrtoptError
from trtopt.core.files import whole
from trtopt.data.convert import numpy_dtype

_DRIVER_API, _ENTER = 1, 0
_TOOLKIT = ("extras/CUPTI/lib64/libcupti.so*", "lib64/libcupti.so*", "targets/*/lib/libcupti.so*")


class _Call(ctypes.Structure):
    """The beginning of CUpti_CallbackData."""

    _fields_ = [
        ("site", ctypes.c_int),
        ("function", ctypes.c_char_p),
        ("parameters", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
    ]


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Call))


def libraries() -> list[str]:
    """Where CUPTI may be: where the loader looks, in NVIDIA's packages, in CUDA's toolkit."""
    folders = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    homes = [*folders, "/usr/local/cuda", *sorted(Path("/usr/local").glob("cuda-*"))]
    patterns = [(place, "nvidia/*/lib/libcupti.so*") for place in sys.path]
    patterns += [(str(home), pattern) for home in homes if home for pattern in _TOOLKIT]
    paths = [str(path) for place, pattern in patterns for path in sorted(Path(place).glob(pattern))]
    return ["libcupti.so", "libcupti.so.13", "libcupti.so.12", *paths]


_kept: list[Any] = []  # CUPTI calls it until the process ends


def subscribe(names: list[str]) -> None:
    """From here on `names` gets the name of each kernel that is launched.

    Raises:
        OSError: there is no CUPTI, or it can't be used.
    """

    def note(_: Any, domain: int, function: int, call: Any) -> None:
        if call.contents.site == _ENTER and call.contents.kernel:
            names.append(call.contents.kernel.decode(errors="replace"))

    callback = _Callback(note)

    problem = "CUPTI isn't here: pip install nvidia-cuda-cupti-cu12, or install CUDA's toolkit"
    for name in libraries():
        try:
            library = ctypes.CDLL(name)
            subscriber = ctypes.c_void_p()
            code = library.cuptiSubscribe(ctypes.byref(subscriber), callback, None)
            code = code or library.cuptiEnableDomain(1, subscriber, _DRIVER_API)
        except (OSError, AttributeError):
            continue
        if not code:
            _kept.append(callback)
            return
        problem = f"CUPTI ({name}) can't be used: its status is {code}"
    raise OSError(problem)


def run(folder: Path) -> dict[str, Any]:
    """The answer: "kernels", or the "problem"."""
    names: list[str] = []
    request = json.loads(whole(folder / "request.json"))
    try:
        subscribe(names)
        from trtopt.runtime.session import Session

        kernels = []
        # The plan was built just now, by the process that asks.
        engine, device = folder / "run.engine", request["device"]
        with Session(engine, device=device, backend="tensorrt", graphs=0, trust_host_code=True) as session:
            types = {tensor.name: numpy_dtype(tensor.dtype) for tensor in session.inputs}
            for shapes in request["shapes"]:
                arrays = {name: np.ones(shape, types[name]) for name, shape in shapes.items()}
                names.clear()
                session.run(arrays)
                kernels.append(list(names))
    except (TrtoptError, OSError, KeyError) as error:
        return {"problem": str(error)}
    return {"kernels": kernels}


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "answer.json").write_text(json.dumps(run(folder)))
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(0)  # CUPTI's callback must not meet an interpreter that is being taken down


if __name__ == "__main__":
    main()
