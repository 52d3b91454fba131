"""A model and what was made of it run on the same inputs: real samples in this process, made-up ones in one of their own.

On inputs that it wasn't made for, ONNX Runtime ends its process at an integer divided by zero, may loop for as long as a model
says, and takes the memory that it asks for. Starting the process costs half a second.
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
from trtopt.core.values import Profile, TensorInfo
from trtopt.data.difference import difference
from trtopt.data.rebatch import Arrays
from trtopt.graph.guard import cheap, drawn
from trtopt.graph.half import fp32_typed, has_half
from trtopt.graph.io import save_model
from trtopt.graph.op_types import QDQ
from trtopt.graph.proto import all_nodes, tensor_size
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.sessions import INLINE, THREADS, OnnxSession

# What a small model may use; heavy ones get more by their weights, which nobody can claim without having them.
BYTES, BYTES_PER_BYTE = 3 << 29, 4
SECONDS, SECONDS_PER_BYTE = 20, 0.5e-6
TOLERANCE = 1e-3  # of an output's largest value: folding rounds differently, it doesn't compute something else
COARSE = 0.05  # where tensors are rounded to eight bits or to a half type: the next code is another value
TRIED_SIZES = (64, 224, 320, 48, 16, 8)  # of dynamic dimensions that aren't the batch, until the model runs
_ENDING = ("Div", "Mod")  # of integers by zero


def compare(
    before: ModelProto,
    after: ModelProto,
    inputs: Sequence[TensorInfo],
    *,
    profiles: Sequence[Profile] = (),
    samples: Sequence[Arrays] = (),
    opened: bool = False,
) -> str:
    """Empty, or how the outputs differ: on the samples, or at the first two sizes of made-up inputs at which `before` runs.

    Both run without optimizations, and in FP32 where they are of a half type, whose rounding any rewrite moves.

    Args:
        profiles: sizes of dynamic dimensions to try; without any they are guessed.
        samples: real inputs as `before` takes them, which other work of this process runs as well.
        opened: `before` takes one sample, on the first axis of its inputs, and `after` any number: at the first of the sizes,
            `after` is given two at once, and `before` each of them.

    Raises:
        ModelError: `before` couldn't be run, or took more memory or time than it may; or it draws random numbers.
        MissingDependency: ONNX Runtime isn't installed.
    """
    require("onnxruntime", "ort", "comparing the models")
    if drawn(before):
        raise ModelError("it draws random numbers")
    operators = {node.op_type for node in all_nodes(before.graph)}
    tolerance = TOLERANCE if operators.isdisjoint(QDQ) and not has_half(before) else COARSE
    before, after = (fp32_typed(proto)[0] for proto in (before, after))
    bounded = [name for node in after.graph.node if node.op_type in ("Sigmoid", "Softmax") for name in node.output]
    compared: dict[str, Any] = {"trials": samples or sizes_to_try(inputs, profiles), "opened": opened}
    compared |= {"tolerance": tolerance, "bounded": bounded}
    if samples or (cheap(before) and not before.functions and operators.isdisjoint(_ENDING)):
        return gap(before, after, inputs, real=bool(samples), **compared)
    weights = sum(map(tensor_size, before.graph.initializer))
    most, seconds = BYTES + BYTES_PER_BYTE * weights, SECONDS + int(SECONDS_PER_BYTE * weights)
    with scratch() as folder:
        save_model(before, folder / "before.onnx", inline_limit=INLINE)
        save_model(after, folder / "after.onnx", inline_limit=INLINE)
        request = {"inputs": [asdict(info) for info in inputs], "bytes": most, "seconds": seconds, "how": compared}
        (folder / "request.json").write_text(json.dumps(request))
        try:
            status = subprocess.run(
                [sys.executable, "-m", "trtopt.ort.comparison", os.fspath(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # NumPy's OpenBLAS takes 40 MB for each core of the host, which the limit would count.
                env={**os.environ, **import_path(), "ORT_DISABLE_TELEMETRY": "1", "OPENBLAS_NUM_THREADS": "1"},
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
        answer["gap"] = gap(folder / "before.onnx", folder / "after.onnx", inputs, **request["how"])
    except ModelError as error:
        answer["problem"] = str(error)
    except MemoryError:
        answer["problem"] = f"running it takes more than {request['bytes'] >> 20} MiB"
    (folder / "answer.json").write_text(json.dumps(answer))


def gap(
    before: ModelProto | Path,
    after: ModelProto | Path,
    inputs: Sequence[TensorInfo],
    trials: Sequence[Mapping[str, Any]],
    tolerance: float,
    bounded: Collection[str],
    *,
    real: bool = False,
    opened: bool = False,
) -> str:
    """Compare in this process; see `compare`.

    Args:
        trials: sizes of dynamic dimensions, as `synthetic_inputs` takes them; or, `real`, inputs.
        tolerance, bounded: see `Difference.within`.
    """
    first = OnnxSession(before, optimize=False)
    try:
        second = OnnxSession(after, optimize=False)
    except ModelError as error:
        return _refused(error)
    batched = {info.name for info in inputs if 0 in info.open_axes}
    needed, ran = 1 if opened else 2, 0
    problem = ModelError("there is no size to try")
    for trial in trials:
        try:
            samples = [trial if real else synthetic_inputs(inputs, trial)]
            samples += [{name: np.flip(array).copy() for name, array in samples[0].items()}] if opened else []
            expected = [first(sample) for sample in samples]
        except ModelError as error:
            problem = error
            if ran:
                break
            continue
        try:
            actual = second(
                {
                    name: np.concatenate([sample[name] for sample in samples]) if name in batched else array
                    for name, array in samples[0].items()
                }
            )
        except ModelError as error:
            return _refused(error)
        far = difference(_joined(expected, actual), actual)
        if not far.within(tolerance, bounded=frozenset(bounded)):
            shapes = first.declared.items()
            if not real and not trial and any(_contradicts(expected[0][name], shape) for name, shape in shapes):
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


def sizes_to_try(inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> list[dict[str, int]]:
    """Sizes of the dynamic dimensions: the profiles' own, at small batches, then guesses; {} alone where none is open."""
    places = [(info.name, axis, info.shape[axis]) for info in inputs for axis in info.open_axes]
    keys = [(name, axis, size if isinstance(size, str) else f"{name}:{axis}") for name, axis, size in places]
    found: list[dict[str, int]] = []
    for profile in profiles:
        for which in ("min", "opt"):
            shapes = {name: getattr(ranges, which) for name, ranges in profile.items()}
            known = {key: (axis, shapes[name][axis]) for name, axis, key in keys if axis < len(shapes.get(name, ()))}
            found.append({key: size if axis or which == "min" else min(2, size) for key, (axis, size) in known.items()})
    for guess in TRIED_SIZES:
        for batch in (1, 2):
            sizes: dict[str, int] = {}
            for _, axis, key in keys:
                sizes[key] = batch if axis == 0 else sizes.get(key, guess)
            found.append(sizes)
    return [sizes for number, sizes in enumerate(found) if sizes not in found[:number]]


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
    """Return whether an array isn't of the shape that the model declares."""
    shape = getattr(result, "shape", None)
    if shape is None:
        return False
    return len(shape) != len(declared) or any(isinstance(b, int) and a != b for a, b in zip(shape, declared))


def _refused(error: ModelError) -> str:
    """Return what `after` does that `before` doesn't; for want of memory both may fail, or either."""
    if "bad_alloc" in str(error) or "Failed to allocate" in str(error):
        raise error
    return str(error)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
