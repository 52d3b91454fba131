"""config.pbtxt: what Triton is told of a model, as protobuf's text format.

The message is `inference.ModelConfig` of triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.serving.interface import Batching, Interface

# NumPy's and ml_dtypes' names → Triton's; it has none for FP8 and complex numbers.
TYPES = {
    "bool": "TYPE_BOOL",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    **{f"{sign}int{bits}": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
IMAGE = "image"  # the input of a model that takes encoded images, and the file in its folder `warmup`
LABELS = "labels.txt"
_Message = Mapping[str, Any]


class Word(str):
    """The name of an enum's value, which stands without quotes."""


def tensorrt_config(
    name: str, interface: Interface, batching: Batching, labelled: Sequence[str], instances: int, delay: float
) -> _Message:
    """For Triton's TensorRT backend: each instance has all profiles, and takes the one that fits a batch best.

    Args:
        labelled: outputs that score the classes of `LABELS`.
        delay: seconds that a request waits for others.
    """
    for info in (*interface.inputs, *interface.outputs):
        if not info.shape:
            raise UsageError(
                f"{info.name!r} is a scalar, which Triton's TensorRT backend doesn't support: give `backend='python'`"
            )
    tuned = list(_samples(interface, batching, ("opt", "max")))
    graphs = {
        "graph_spec": [
            {
                "batch_size": batch,
                "input": [{"key": key, "value": {"dim": list(shape)}} for key, shape in shapes.items()],
            }
            for _, batch, shapes in tuned
        ]
    }
    group: dict[str, Any] = {"count": instances, "kind": Word("KIND_GPU")}
    if len(interface.profiles) > 1:
        group["profile"] = [str(number) for number in range(len(interface.profiles))]
    return {
        **_common(name, "tensorrt", interface.inputs, interface, batching, labelled),
        "platform": "tensorrt_plan",
        "default_model_filename": "model.plan",
        **_batches(interface, batching, delay),
        "instance_group": [group],
        "optimization": {"cuda": {"graphs": True, **(graphs if tuned else {})}},
        "model_warmup": _warmup(interface.inputs, interface, batching, 1),
    }


def python_config(
    name: str,
    interface: Interface,
    batching: Batching,
    labelled: Sequence[str],
    instances: int,
    delay: float,
    *,
    parameters: Mapping[str, str],
    on_gpu: bool,
    image_bytes: int | None,
) -> _Message:
    """For Triton's Python backend and `triton_model.py`.

    Args:
        image_bytes: of the image to warm up with, where the model takes encoded images instead of the engine's input.
    """
    inputs = interface.inputs if image_bytes is None else (TensorInfo(IMAGE, "uint8", ("batch", -1)),)
    for info in (*inputs, *interface.outputs):
        if info.dtype == "bfloat16":
            raise UsageError(
                f"{info.name!r} is bfloat16, which NumPy doesn't have: Triton's Python backend can't carry it; build the "
                "engine without `fp32_io=False`, or give `backend='tensorrt'`"
            )
    count = 3 if on_gpu else 1  # a session captures a CUDA graph for what comes again
    return {
        **_common(name, "python", inputs, interface, batching, labelled),
        **_batches(interface, batching, delay),
        "instance_group": [{"count": instances, "kind": Word("KIND_GPU" if on_gpu else "KIND_CPU")}],
        "parameters": [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()],
        "model_warmup": _warmup(inputs, interface, batching, count, image_bytes),
    }


def _common(
    name: str,
    backend: str,
    inputs: Sequence[TensorInfo],
    interface: Interface,
    batching: Batching,
    labelled: Sequence[str],
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for info in inputs:
        entry = _tensor(info, batching)
        if info.name == IMAGE and info not in interface.inputs:
            entry["allow_ragged_batch"] = True  # images of different sizes may go together
        entries.append(entry)
    outputs = [
        {**_tensor(info, batching), **({"label_filename": LABELS} if info.name in labelled else {})}
        for info in interface.outputs
    ]
    return {
        "name": name,
        "backend": backend,
        "max_batch_size": batching.most,
        "input": entries,
        "output": outputs,
    }


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


def _batches(interface: Interface, batching: Batching, delay: float) -> dict[str, Any]:
    if not batching.most:
        return {}
    sizes = {item.opt[0] for profile in interface.profiles for item in profile.values()}
    sizes |= {item.max[0] for profile in interface.profiles for item in profile.values()}
    preferred = sorted(size for size in sizes if 1 < size <= batching.most)
    return {
        "dynamic_batching": {
            "preferred_batch_size": preferred,
            "max_queue_delay_microseconds": round(delay * 1e6),
        }
    }


def _samples(
    interface: Interface, batching: Batching, places: Sequence[str] = ("min", "opt", "max")
) -> Iterator[tuple[str, int, dict[str, tuple[int, ...]]]]:
    """Place, batch and shapes (without it) of what the profiles were tuned for, each once."""
    combinations: list[Any] = []
    for number, profile in enumerate(interface.profiles):
        for place in places if interface.bounded else places[:1]:
            whole = {name: getattr(item, place) for name, item in profile.items()}
            batch = next(iter(whole.values()))[0] if batching.most and whole else 0
            shapes = {name: shape[1:] for name, shape in whole.items()} if batching.most else whole
            if whole not in combinations and batch <= batching.most:
                combinations.append(whole)
                yield f"{place} of profile {number}", batch, shapes


def _warmup(
    inputs: Sequence[TensorInfo], interface: Interface, batching: Batching, count: int, image_bytes: int | None = None
) -> list[_Message]:
    """Zeros, or an image, in the shapes of each profile, so that no request meets a cold engine."""
    samples: list[_Message] = []
    for name, batch, shapes in _samples(interface, batching):
        entries: list[_Message] = []
        for info in inputs:
            entry: dict[str, Any] = {"data_type": Word(TYPES[info.dtype])}
            if image_bytes is None:
                entry |= {"dims": list(shapes[info.name]) or [1], "zero_data": True}
            else:
                entry |= {"dims": [image_bytes], "input_data_file": IMAGE}
            entries.append({"key": info.name, "value": entry})
        samples.append({"name": name, "batch_size": batch, "inputs": entries, "count": count})
    return samples


# Text ----------------------------------------------------------------------------------------------------------------


def text(message: _Message) -> str:
    """A message in protobuf's text format. Empty lists aren't written, but within a reshape, where they mean a scalar."""
    return "".join(f"{line}\n" for line in _lines(message))


def _lines(message: _Message) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, Mapping):
            yield from _block(name, value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            for item in value:
                yield from _block(name, item)
        elif isinstance(value, (list, tuple)):
            if value or name == "shape":
                yield f"{name}: [{', '.join(map(_scalar, value))}]"
        else:
            yield f"{name}: {_scalar(value)}"


def _block(name: str, message: _Message) -> Iterator[str]:
    yield f"{name} {{"
    yield from (f"  {line}" for line in _lines(message))
    yield "}"


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char >= " " else f"\\{ord(char):03o}" for char in escaped) + '"'
    return str(value)
