"""Two models run on the same made-up inputs, in a process of their own.

ONNX Runtime ends its process at an integer divided by zero, may loop for as long as a model says, and takes the memory that it
asks for. Starting the process costs half a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from trtopt.core.documents import converted
from trtopt.core.errors import ModelError, require
from trtopt.core.files import whole
from trtopt.core.host import import_path
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
    *,
    opened: bool = False,
) -> str:
    """Empty, or how the outputs differ, at the first two sizes at which `before` runs.

    Args:
        trials: sizes of dynamic dimensions, as `synthetic_inputs` takes them.
        tolerance, bounded: see `Difference.within`.
        opened: `before` takes one sample, on the first axis of its inputs, and `after` any number: at the first of the sizes,
            `after` is given two at once, and `before` each of them.

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
            "opened": opened,
        }
        (folder / "request.json").write_text(json.dumps(request))
        try:
            status = subprocess.run(
                [sys.executable, "-m", "trtopt.ort.comparison", os.fspath(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **import_path(), "ORT_DISABLE_TELEMETRY": "1"},
                start_new_session=True,  # Ctrl-C in a terminal is the caller's own to handle, who then ends this
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ModelError(f"ONNX Runtime took more than {seconds} s for it") from None
        if status:
            crash = f"crashed with {signal.Signals(-status).name}, or" if status < 0 else ""
            how = crash or f"failed with status {status}, perhaps because it"
            raise ModelError(f"ONNX Runtime {how} took more than {most >> 20} MiB")
        answer: dict[str, str] = json.loads(whole(folder / "answer.json"))
    if "problem" in answer:
        raise ModelError(answer["problem"])
    return answer["gap"]


def _answer(folder: Path) -> None:
    """The process's own work: read `request.json`, write `answer.json`."""
    tempfile.tempdir = str(folder)
    request = json.loads(whole(folder / "request.json"))
    limits = {
        resource.RLIMIT_DATA: request["bytes"],
        resource.RLIMIT_CPU: THREADS * request["seconds"],  # where nobody is left to end it
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
    inputs = [converted(info, TensorInfo) for info in request["inputs"]]
    answer: dict[str, str] = {}
    try:
        bounded = frozenset(request["bounded"])
        answer["gap"] = gap(folder, inputs, request["trials"], request["tolerance"], bounded, opened=request["opened"])
    except ModelError as error:
        answer["problem"] = str(error)
    except MemoryError:
        answer["problem"] = f"running it takes more than {request['bytes'] >> 20} MiB"
    (folder / "answer.json").write_text(json.dumps(answer))


def gap(
    folder: Path,
    inputs: Sequence[TensorInfo],
    trials: Sequence[Mapping[str, int]],
    tolerance: float,
    bounded: frozenset[str],
    *,
    opened: bool = False,
) -> str:
    """What `compare` says of `before.onnx` and `after.onnx` in a folder, run in this process."""
    before = OnnxSession(folder / "before.onnx")
    try:
        after = OnnxSession(folder / "after.onnx")
    except ModelError as error:
        return _refused(error)
    batched = {info.name for info in inputs if 0 in info.open_axes}
    needed, ran = 1 if opened else 2, 0
    problem = ModelError("there is no size to try")
    for sizes in trials:
        try:
            samples = [synthetic_inputs(inputs, sizes)]
            samples += [{name: np.flip(array).copy() for name, array in samples[0].items()}] if opened else []
            expected = [before(sample) for sample in samples]
        except ModelError as error:
            problem = error
            if ran:
                break
            continue
        try:
            actual = after(
                {
                    name: np.concatenate([sample[name] for sample in samples]) if name in batched else array
                    for name, array in samples[0].items()
                }
            )
        except ModelError as error:
            return _refused(error)
        far = difference(_joined(expected, actual), actual)
        if not far.within(tolerance, bounded=bounded):
            if not sizes and any(_contradicts(expected[0][name], shape) for name, shape in before.declared.items()):
                # Values of an input are sizes then, and made-up ones aren't those that the model is for.
                problem = ModelError("made-up inputs give results of other shapes than the model declares")
                continue
            return str(far)
        ran += 1
        if ran == needed:
            return ""
    if not ran:
        raise problem
    return ""


def _joined(samples: Sequence[Mapping[str, Any]], actual: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of samples, put together along the axis that is longer in the outputs of all at once."""
    joined = dict(samples[0])
    for name, array in joined.items() if len(samples) > 1 else ():
        shape = getattr(actual[name], "shape", ())
        longer = [axis for axis, (one, both) in enumerate(zip(getattr(array, "shape", ()), shape)) if one != both]
        if longer:
            joined[name] = np.concatenate([sample[name] for sample in samples], longer[0])
    return joined


def _contradicts(result: object, declared: Sequence[int | str | None]) -> bool:
    """Whether an array isn't of the shape that the model declares."""
    shape = getattr(result, "shape", None)
    if shape is None:
        return False
    return len(shape) != len(declared) or any(isinstance(b, int) and a != b for a, b in zip(shape, declared))


def _refused(error: ModelError) -> str:
    """What `after` does that `before` doesn't; for want of memory both may fail, or either."""
    if "bad_alloc" in str(error) or "Failed to allocate" in str(error):
        raise error
    return str(error)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
