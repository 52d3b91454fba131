"""Command lines of trtexec as trtopt's. What TensorRT 10 and 11 dropped is from NVIDIA's migration pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.diagnosis import trtexec
from trtopt.diagnosis.drafts import Option

_PROGRAMS = ("trtexec", "tensorrt_rtx", "polygraphy")


def is_command(words: Sequence[str]) -> bool:
    """Whether these are words of a command that is known here."""
    return bool(words) and _program(words)[0] in _PROGRAMS


def translated(words: Sequence[str]) -> tuple[list[str], list[Option]]:
    """trtopt's commands for one of trtexec, and what is to be said of its options.

    Raises:
        UsageError: it is another program's, or can't be read.
    """
    program, arguments = _program(words)
    if program == "polygraphy":
        raise UsageError(
            f"`migrate=` {shlex.join(words)!r} is Polygraphy's: docs/manual/from-polygraphy.md has its beside trtopt's "
            "(trtopt build MODEL.onnx, trtopt verify MODEL.onnx M.engine, trtopt check MODEL.onnx)"
        )
    if program in _PROGRAMS:
        return trtexec.translated(arguments)
    raise UsageError(
        f"`migrate=` {shlex.join(words)!r} is no command of trtexec, and no file: give a script's path, or the "
        "whole command in quotes, such as 'trtexec --onnx=model.onnx --fp16'"
    )


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    """The program's name without its path, and its arguments; variables, sudo and `python -m` before it left out."""
    rest = list(words)
    while rest and (re.fullmatch(r"\w+=.*", rest[0]) or rest[0] in ("sudo", "time", "env", "exec")):
        rest.pop(0)
    if len(rest) > 2 and re.fullmatch(r"python[\d.]*", Path(rest[0]).name) and rest[1] == "-m":
        rest = rest[2:]
    if not rest:
        return "", []
    return Path(rest[0]).name.removesuffix(".exe"), rest[1:]
