"""A small project for a custom operator: its function in Python, its CUDA kernel, and a test that compares them."""

from __future__ import annotations

import keyword
import os
from pathlib import Path

from onnx import defs

from trtopt.core.errors import UsageError
from trtopt.core.files import whole, write_bytes
from trtopt.trt.kernels import ADAPTERS

# The others are named for the first one.
_TEMPLATES = {"operator.py.in": "{}.py", "operator.cu.in": "{}.cu", "test_operator.py.in": "test_{}.py"}


def write_project(name: str, output: Path | None, *, force: bool) -> tuple[Path, str]:
    """Write the Python file `output` (default: OPERATOR.py), its kernel and its test beside it; return it and its content.

    Raises:
        UsageError: the name can't be an operator's, or a file is there already.
    """
    domain, _, op = name.rpartition("::")
    if not op.isidentifier() or keyword.iskeyword(op) or not domain.replace(".", "_").isidentifier():
        raise UsageError(f"the operator's name is {name!r}; write domain::Operator, such as acme::Swishy")
    if defs.has(op):
        raise UsageError(
            f"{op} is an operator of ONNX's own, which TensorRT's parser takes {name} for: give it another name"
        )
    first = Path(f"{op}.py") if output is None else output
    if first.suffix != ".py":
        raise UsageError(
            f"`output={os.fspath(first)!r}`: the function's file has to end in .py; its kernel and test are beside it"
        )
    files = {first.with_name(pattern.format(first.stem)): template for template, pattern in _TEMPLATES.items()}
    if there := next((path for path in files if path.exists() and not force), None):
        raise UsageError(f"{there} is there already: give another `output=`, or `force=True`")
    texts = dict[Path, str]()
    for path, template in files.items():
        text = whole(ADAPTERS / "project" / template).decode()
        for mark, word in (("@NAME@", name), ("@DOMAIN@", domain), ("@OP@", op), ("@FILE@", first.stem)):
            text = text.replace(mark, word)
        texts[path] = text
        write_bytes(path, text.encode())
    return first, next(iter(texts.values()))
