"""trtopt: PyTorch or ONNX to a verified INT8 or FP16 TensorRT engine, the same way on TensorRT 8.6, 10, 11 and RTX.

    trtopt.export("torchvision:resnet50", "resnet50.onnx")
    trtopt.check("resnet50.onnx").ok
    trtopt.build("resnet50.onnx", "resnet50.engine", int8=True, images="photos/", preprocess="imagenet")

Each function is also a command: `trtopt build --help`; `run_jobs` and `show_jobs` are `trtopt jobs run` and `jobs show`,
`deploy_triton` is `trtopt deploy triton`, `list_store` is `trtopt store list` and so on. Beside the functions stand what they
take and give, and their errors, of which `TrtoptError` is the base. Names load when they are first used, so that
`import trtopt` is fast and needs nothing but the base install.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {
    name: module
    for module, names in re.findall(r"^from (\S+) import (\([^)]*\)|.*)$", _STUB, re.M)
    for name in re.findall(r"(\w+) as \1\b", names)
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from trtopt.core.removed import went

        raise AttributeError(went(name) or f"module 'trtopt' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOME[name])
    except ModuleNotFoundError as error:
        from trtopt.core.errors import without_graphs

        explanation = without_graphs(error)
        if explanation is None:
            raise
        raise explanation from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
