"""Two models run on the same made-up inputs, in a process of their own.

ONNX Runtime ends its process at an integer divided by zero, may loop for as long as a model says, and takes the memory that it
asks for. Starting the process costs half a second; `one_process` keeps it for the models that follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnx import ModelProto

from trtopt.core.errors import ModelError, require
from trtopt.core.temporary import scratch
from trtopt.core.values import TensorInfo
from trtopt.graph.io import save_model
from trtopt.graph.proto import tensor_size
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.difference import difference
from trtopt.ort.sessions import INLINE, THREADS, OnnxSession

# What a small model may use; heavy ones get more by their weights, which nobody can claim without having them.
BYTES, BYTES_PER_BYTE = 3 << 29, 4
SECONDS, SECONDS_PER_BYTE = 20, 0.5e-6


def compare(
    before: ModelProto,
    after: ModelProto,
    inputs: Sequence[TensorInfo],
    trials: Sequence[Mapping[str, int]],
    tolerance: float,
    bounded: Collection[str],
) -> str:
    """Empty, or how the outputs differ, at the first two sizes at which `before` runs.

    Args:
        trials: sizes of dynamic dimensions, as `synthetic_inputs` takes them.
        tolerance, bounded: see `Difference.within`.

    Raises:
        ModelError: `before` couldn't be run, or took more memory or time than it may.
        MissingDependency: ONNX Runtime isn't installed.
    """
    require("onnxruntime", "ort", "comparing the models")
    weights = sum(map(tensor_size, before.graph.initializer))
    most, seconds = BYTES + BYTES_PER_BYTE * weights, SECONDS + int(SECONDS_PER_BYTE * weights)
    with scratch() as folder:
        save_model(before, folder / "before.onnx", inline_limit=INLINE)
        save_model(after, folder / "after.onnx", inline_limit=INLINE)
        request = {
            "inputs": [asdict(info) for info in inputs],
            "trials": [dict(sizes) for sizes in trials],
            "tolerance": tolerance,
            "bounded": list(bounded),
            "bytes": most,
            "seconds": seconds,
        }
        (folder / "request.json").write_text(json.dumps(request))
        with contextlib.ExitStack() as stack:
            process = _shared.get() or stack.enter_context(_Process())
            status = process.ask(folder, seconds)
        if status is None:
            raise ModelError(f"ONNX Runtime took more than {seconds} s for it")
        if status:
            raise ModelError(_epitaph(status, most))
        found: dict[str, str] = json.loads((folder / "answer.json").read_text())
    if "problem" in found:
        raise ModelError(found["problem"])
    return found["gap"]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """What this thread compares in this context, one process compares, which stays until it ends or one ends it."""
    with _Process() as process:
        token = _shared.set(process)
        try:
            yield
        finally:
            _shared.reset(token)


class _Process:
    """Compares, one pair of models after another; started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._ended(self._process)

    def ask(self, folder: Path, seconds: float) -> int | None:
        """0: the answer is in the folder; None: it took too long; else the status with which the process ended."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(os.fsencode(folder) + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], seconds)[0]:
            process.kill()
            self._ended(process)
            return None
        return 0 if process.stdout.read(1) else self._ended(process) or 1

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "trtopt.ort.comparison"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ORT_DISABLE_TELEMETRY": "1"},
            start_new_session=True,  # Ctrl-C in a terminal is the caller's own to handle, who then ends this
        )

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        self._process = None
        with process:  # closes its streams
            return process.wait()


_shared: ContextVar[_Process | None] = ContextVar("_shared", default=None)


def _epitaph(status: int, most: int) -> str:
    if status < 0:
        return f"ONNX Runtime crashed with {signal.Signals(-status).name}, or took more than {most >> 20} MiB"
    return f"ONNX Runtime failed with status {status}, perhaps because it took more than {most >> 20} MiB"


def _serve() -> None:
    """The process's own work, until its standard input ends: reads folders, and says when each has its answer."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    for line in sys.stdin.buffer:
        _answer(Path(os.fsdecode(line.rstrip(b"\n"))))
        os.write(answers, b".")


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _answer(folder: Path) -> None:
    """Read `request.json`, write `answer.json`."""
    tempfile.tempdir = str(folder)
    request = json.loads((folder / "request.json").read_text())
    _limit(resource.RLIMIT_DATA, request["bytes"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    _limit(resource.RLIMIT_CPU, spent + THREADS * request["seconds"])  # where nobody is left to end it
    _limit(resource.RLIMIT_CORE, 0)
    inputs = [TensorInfo(info["name"], info["dtype"], tuple(info["shape"])) for info in request["inputs"]]
    answer: dict[str, str] = {}
    try:
        answer["gap"] = _gap(folder, inputs, request["trials"], request["tolerance"], frozenset(request["bounded"]))
    except ModelError as error:
        answer["problem"] = str(error)
    except MemoryError:
        answer["problem"] = f"running it takes more than {request['bytes'] >> 20} MiB"
    (folder / "answer.json").write_text(json.dumps(answer))


def _gap(
    folder: Path,
    inputs: Sequence[TensorInfo],
    trials: Sequence[Mapping[str, int]],
    tolerance: float,
    bounded: frozenset[str],
) -> str:
    before = OnnxSession(folder / "before.onnx")
    try:
        after = OnnxSession(folder / "after.onnx")
    except ModelError as error:
        return _refused(error)
    ran = False
    problem: ModelError | None = None
    for sizes in trials:
        arrays: dict[str, Any]
        try:
            arrays = synthetic_inputs(inputs, sizes)
            expected = before(arrays)
        except ModelError as error:
            problem = error
            if ran:
                break
            continue
        try:
            gap = difference(expected, after(arrays))
        except ModelError as error:
            return _refused(error)
        if not gap.within(tolerance, bounded=bounded):
            return str(gap)
        if ran:
            return ""
        ran = True
    if not ran and problem is not None:
        raise problem
    return ""


def _refused(error: ModelError) -> str:
    """What `after` does that `before` doesn't; for want of memory both may fail, or either."""
    if "bad_alloc" in str(error) or "Failed to allocate" in str(error):
        raise error
    return str(error)


if __name__ == "__main__":
    _serve()
