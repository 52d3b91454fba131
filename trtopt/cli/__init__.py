"""The command line: parse, call, print."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import traceback
from typing import NoReturn

import trtopt.cli.commands  # noqa: F401  (adds them)
from trtopt.cli.application import FLAGS, app
from trtopt.core import stopping
from trtopt.core.errors import BuildCancelled, OutputError, TrtoptError, without_graphs
from trtopt.core.library_output import TELEMETRY_OFF, wanted
from trtopt.core.native_output import keep_apart, lines
from trtopt.core.removed import went
from trtopt.core.words import counted, visible

# Options and commands that others have, and what to type instead.
_ELSEWHERE = {
    "--input": "arrays are given as --data F.npz",
    "--tolerance": "verify's limits are --min-snr DB and --min-agreement SHARE",
    "--precision": "the precision is an option by itself: --fp16, --bf16, --int8 or --fp8",
    "--fp32": "FP32 is what trtopt build gives without a precision",
    **dict.fromkeys(("-m", "--model"), "the model is given without one: trtopt build MODEL.onnx"),
    **dict.fromkeys(("-o", "--output"), "trtopt check writes the cleaned model with --fix FILE"),
    "quantize": "trtopt build MODEL.onnx --int8 --images DIR --preprocess PRESET -o MODEL.engine quantizes",
    **dict.fromkeys(("convert", "compile"), "trtopt export makes ONNX from PyTorch, trtopt build an engine from ONNX"),
    **dict.fromkeys(("optimize", "simplify"), "trtopt check MODEL.onnx --fix CLEAN.onnx simplifies a model"),
    "benchmark": "trtopt bench ENGINE times an engine",
    **dict.fromkeys(
        ("compare", "evaluate"), "trtopt verify MODEL.onnx ENGINE --data F.npz compares an engine with its model"
    ),
    **dict.fromkeys(("infer", "predict"), "trtopt run ENGINE --images DIR runs an engine"),
}

# What doesn't take several words, as people type them.
_ONE_VALUE = {
    "--images": "one folder, no list such as a shell makes of *",
    "--data": "one file or folder, no list such as a shell makes of *",
    "--migrate": "one command, in quotes",
    "--shapes": "the shapes of several inputs in one text, 'a:1x3;b:1x4' in quotes, or the option again",
}


def main() -> NoReturn:
    """Run a command; an error is one clear message on stderr and a non-zero exit status, never a traceback."""
    keep_apart()
    os.environ.setdefault(TELEMETRY_OFF, "1")  # for the user's own modules, too
    try:
        try:
            status = app(prog_name="trtopt", standalone_mode=False)
            sys.stdout.flush()
        except BrokenPipeError:  # its reader has seen enough, as click takes it within a command
            status = 1
        except Exception as error:
            status = _failure(error)
        except KeyboardInterrupt:
            status = 130
        status = stopping.status() or status
        if status == 130 or stopping.status():
            print("stopped", file=sys.stderr)
        _tell_of_native_lines(bool(status))
        sys.exit(status if isinstance(status, int) else 0)
    finally:
        if _lost_output():  # said before; what is still in the buffers isn't to be tried once more at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lost_output() -> OSError | None:
    """Return why standard output takes nothing more; None: it does."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def _tell_of_native_lines(failed: bool) -> None:
    """Tell what native libraries printed: their internals, which may still explain a failure."""
    native = lines() if failed or wanted() else []
    if native and not wanted():
        native = [f"{counted(len(native), 'line')} that libraries printed: trtopt -v shows them"]
    for line in native:
        print(f"native: {line}", file=sys.stderr)


def _instead(word: str) -> str:
    """Return what to type for an option or a command that isn't there; empty: nothing is known."""
    if not word.startswith("--") or word in _ELSEWHERE or went(word):
        return _ELSEWHERE.get(word, "")
    from trtopt.diagnosis.migration import OPTIONS

    typed = [text for text in sys.argv[2:] if text.startswith("--")]
    own = [text for text in typed if text.split("=")[0] == word]
    if word.removeprefix("--") not in OPTIONS or not own:
        return ""
    whole = any(text.startswith(("--onnx=", "--loadEngine=")) for text in typed)
    line = shlex.quote(" ".join(["trtexec", *(typed if whole else ["--onnx=MODEL.onnx", *own])]))
    return f"it is trtexec's; trtopt doctor --migrate {line} says what to type"


def _failure(error: Exception) -> int:
    if wanted():
        traceback.print_exc()
    if stopping.status() and not isinstance(error, BuildCancelled):
        return 1  # what became of the interruption
    if isinstance(error, OSError) and (lost := _lost_output()):
        error = OutputError(f"can't write to standard output: {lost.strerror or lost}")
    error = without_graphs(error, "".join(sys.argv[1:2])) or error
    if isinstance(error, TrtoptError):
        kind, status, texts = type(error).__name__, error.exit_code, error.for_cli(FLAGS)
    elif type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]  # `trtopt` alone: the help
        return 2
    elif hasattr(error, "format_message"):  # click's own, which typer carries under another name from 0.20 on
        command = getattr(getattr(error, "ctx", None), "command_path", "trtopt")
        kind, status, message = "UsageError", 2, error.format_message().rstrip(".?")
        word = getattr(error, "option_name", None) or next(iter(re.findall(r"^No such command '(.*?)'", message)), "")
        instead = _instead(word)
        problem = went(word) or (f"{message.partition(' (Possible ')[0]}: {instead}" if instead else message)
        for flag, _, behind in zip(sys.argv, sys.argv[1:], sys.argv[2:]):
            if "unexpected extra argument" in problem and flag in _ONE_VALUE and not behind.startswith("-"):
                problem = f"{flag} takes {_ONE_VALUE[flag]}"
        if "unexpected extra argument" in problem and command == "trtopt doctor":
            problem = went("subject")
        texts = [f"{problem}; try '{command} -h'"]
    elif isinstance(error, MemoryError):
        kind, status = "MemoryError", 1
        texts = ["there isn't enough memory: free some, or raise the limit (ulimit -v, a container's)"]
    else:
        kind, status = "InternalError", 70
        texts = [f"internal error, please report it: {type(error).__name__}: {error} (trtopt -v shows where)"]
    print("error:", "\n".join(map(visible, texts)), file=sys.stderr)
    if "--json" in sys.argv:
        with contextlib.suppress(OSError):
            about = {"type": kind, "message": "\n".join(texts), "options": getattr(error, "options", {})}
            print(json.dumps({"error": about}))
    return status
