"""config.pbtxt: what Triton is told of a model, as protobuf's text format.

The message is `inference.ModelConfig` of triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.serving.interface import Batching, Interface
from trtopt.serving.request import DeployRequest

# NumPy's and ml_dtypes' names → Triton's; it has none for FP8 and complex numbers.
TYPES = {
    "bool": "TYPE_BOOL",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    **{f"{sign}int{bits}": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
LABELS = "labels.txt"
_Message = Mapping[str, Any]


class Word(str):
    """The name of an enum's value, which stands without quotes."""


def model_config(
    name: str,
    interface: Interface,
    batching: Batching,
    request: DeployRequest,
    delay: float,
    labelled: Sequence[str],
    parameters: Mapping[str, str],
) -> _Message:
    """Return the configuration of a model, for Triton's TensorRT backend or its Python backend and `triton_model.py`.

    Args:
        delay: seconds that a request waits for others.
        labelled: outputs that score the classes of `LABELS`.
        parameters: of the Python backend.
    """
    config: dict[str, Any] = {"name": name, "backend": request.backend, "max_batch_size": batching.most}
    config |= {"input": [_tensor(info, batching) for info in interface.inputs]}
    config |= {"output": [_tensor(info, batching) for info in interface.outputs]}
    for entry in config["output"]:
        entry |= {"label_filename": LABELS} if entry["name"] in labelled else {}
    if batching.most:
        ranges = [item for profile in interface.profiles for item in profile.values()]
        ends = {size for item in ranges for size in (item.opt[0], item.max[0])}
        config["dynamic_batching"] = {
            "preferred_batch_size": sorted(size for size in ends if 1 < size <= batching.most),
            "max_queue_delay_microseconds": round(delay * 1e6),
        }
    on_gpu = request.runtime != "onnxruntime"
    group: dict[str, Any] = {"count": request.instances, "kind": Word("KIND_GPU" if on_gpu else "KIND_CPU")}
    if request.backend == "python":
        _refuse(interface, lambda info: info.dtype == "bfloat16", "bfloat16, which NumPy doesn't have", "tensorrt")
        listed = [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()]
        count = 3 if on_gpu else 1  # a session captures a CUDA graph for what comes again
        warmup = _warmup(interface, batching, count)
        return {**config, "instance_group": [group], "parameters": listed, "model_warmup": warmup}
    _refuse(interface, lambda info: not info.shape, "a scalar, which its TensorRT backend doesn't support", "python")
    graphs = []
    for _, batch, shapes in _samples(interface, batching, ("opt", "max")):
        entries = [{"key": key, "value": {"dim": list(shape)}} for key, shape in shapes.items()]
        graphs.append({"batch_size": batch, "input": entries})
    if len(interface.profiles) > 1:  # each instance takes the one that fits a batch best
        group["profile"] = [str(number) for number in range(len(interface.profiles))]
    return {
        **config,
        "platform": "tensorrt_plan",
        "default_model_filename": "model.plan",
        "instance_group": [group],
        "optimization": {"cuda": {"graphs": True, "graph_spec": graphs}},
        "model_warmup": _warmup(interface, batching, 1),
    }


def _refuse(interface: Interface, bad: Callable[[TensorInfo], bool], why: str, other: str) -> None:
    if wrong := [info.name for info in (*interface.inputs, *interface.outputs) if bad(info)]:
        raise UsageError(f"{wrong[0]!r} is {why}: give `backend='{other}'`")


def _tensor(info: TensorInfo, batching: Batching) -> dict[str, Any]:
    if info.dtype not in TYPES:
        raise UsageError(f"{info.name!r} is {info.dtype}; Triton takes {', '.join(TYPES)}")
    dims = list(info.sizes[1 if batching.most else 0 :])
    entry: dict[str, Any] = {"name": info.name, "data_type": Word(TYPES[info.dtype]), "dims": dims}
    if not dims:  # Triton has no tensors without dimensions: they travel as one of one element
        entry["dims"] = [1]
        if batching.most:  # and refuses to take it away where there is no batch
            entry["reshape"] = {"shape": []}
    return entry


def _samples(
    interface: Interface, batching: Batching, places: Sequence[str] = ("min", "opt", "max")
) -> Iterator[tuple[str, int, dict[str, tuple[int, ...]]]]:
    """Place, batch and shapes (without it) of what the profiles were tuned for, each once."""
    combinations: list[Any] = []
    for number, profile in enumerate(interface.profiles):
        for place in places:
            whole = {name: getattr(item, place) for name, item in profile.items()}
            batch = next(iter(whole.values()))[0] if batching.most and whole else 0
            shapes = {name: shape[1:] for name, shape in whole.items()} if batching.most else whole
            if whole not in combinations and batch <= batching.most:
                combinations.append(whole)
                yield f"{place} of profile {number}", batch, shapes


def _warmup(interface: Interface, batching: Batching, count: int) -> list[_Message]:
    """Zeros in the shapes of each profile, so that no request meets a cold engine."""
    samples: list[_Message] = []
    for name, batch, shapes in _samples(interface, batching):
        entries = []
        for info in interface.inputs:
            value = {"data_type": Word(TYPES[info.dtype]), "dims": list(shapes[info.name]) or [1], "zero_data": True}
            entries.append({"key": info.name, "value": value})
        samples.append({"name": name, "batch_size": batch, "inputs": entries, "count": count})
    return samples


# Text ----------------------------------------------------------------------------------------------------------------


def text(message: _Message) -> str:
    """A message in protobuf's text format. Empty lists aren't written, but within a reshape, where they mean a scalar."""
    return "".join(f"{line}\n" for line in _lines(message))


def _lines(message: _Message) -> Iterator[str]:
    for name, value in message.items():
        listed = isinstance(value, (list, tuple))
        items = value if listed else [value]
        if items and isinstance(items[0], Mapping):
            for item in items:
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(item))
                yield "}"
        elif not listed:
            yield f"{name}: {_scalar(value)}"
        elif value or name == "shape":
            yield f"{name}: [{', '.join(map(_scalar, value))}]"


def _scalar(value: Any) -> str:
    # JSON's escapes are protobuf's, too.
    return value if isinstance(value, Word) else json.dumps(value, ensure_ascii=False)
