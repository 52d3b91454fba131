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
from typing import Any


def _homes() -> dict[str, str]:
    """Public name → the module that has it, as the stub says it to type checkers."""
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        imports = stub.read().split("from trtopt.")[1:]
    homes = {}
    for text in imports:
        module, _, names = text.partition(" import ")
        homes |= {name.replace(",", " ").split()[0]: module for name in names.split(" as ")[1:]}
    return homes


_HOME = _homes()
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trtopt' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"trtopt.{_HOME[name]}")
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
