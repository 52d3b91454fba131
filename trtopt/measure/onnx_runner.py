"""Running an ONNX model on the CPU as it is written, to measure it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtopt.errors import DataError, ModelError, require
from trtopt.files import existing_file
from trtopt.graph.io import save_model
from trtopt.graph.proto import infer_shapes

_BF16 = TensorProto.BFLOAT16
_INLINE = 1 << 30  # bytes; larger models go to ONNX Runtime as a file

# ONNX Runtime's name of an input type → NumPy's. Bfloat16 never appears: such models are widened first.
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(int16)": "int16",
    "tensor(uint16)": "uint16",
    "tensor(int32)": "int32",
    "tensor(uint32)": "uint32",
    "tensor(int64)": "int64",
    "tensor(uint64)": "uint64",
    "tensor(bool)": "bool",
}


class OnnxRunner:
    """Maps input arrays to output arrays by name, through ONNX Runtime's CPU provider.

    FP16 nodes compute in FP32 with rounding to FP16 between them; so do BF16 nodes, through `widen_bfloat16`: ONNX
    Runtime's CPU has no BF16 kernels.

    Args:
        model: a file or a model in memory.
        optimize: False runs the nodes as they stand. Q/DQ models need that: ONNX Runtime otherwise fuses them into
            INT8 kernels whose intermediate sums saturate on CPUs without VNNI.
        threads: threads within an operator; None: ONNX Runtime's default, one per core.

    Raises:
        ModelError: ONNX Runtime can't run it; its message is quoted.
        UsageError: the file doesn't exist.
        MissingDependency: ONNX Runtime isn't installed.
    """

    def __init__(
        self, model: str | os.PathLike[str] | ModelProto, *, optimize: bool, threads: int | None = None
    ) -> None:
        ort = require("onnxruntime", "ort", "comparing ONNX models")
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        with tempfile.TemporaryDirectory(prefix="trtopt-") as folder:
            source = _source(model, Path(folder))
            try:
                self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                raise ModelError(f"ONNX Runtime can't run {_name(model)}: {error}") from error
        self._what = _name(model)
        self._types = {item.name: _DTYPES.get(item.type) for item in self._session.get_inputs()}
        self.inputs = tuple(self._types)
        self.outputs = tuple(item.name for item in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run once. Arrays are converted to the inputs' types within their kind, such as float32 to float16.

        Raises:
            DataError: an input is missing, or its kind or shape doesn't fit.
        """
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise DataError(f"{self._what} needs {', '.join(missing)}; the data has {', '.join(inputs)}")
        feed: dict[str, NDArray[Any]] = {}
        for name, dtype in self._types.items():
            array = np.asarray(inputs[name])
            if dtype is not None and array.dtype != dtype:
                widening = array.dtype.name == "bfloat16"  # of NumPy's kind V: not castable by its rules
                if not widening and not np.can_cast(array.dtype, dtype, "same_kind"):
                    raise DataError(f"input {name!r} of {self._what} is {dtype}; the data has {array.dtype}")
                array = array.astype(dtype)
            feed[name] = array
        try:
            return dict(zip(self.outputs, self._session.run(list(self.outputs), feed)))
        except Exception as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feed.items())
            raise DataError(f"{self._what} can't be run on {shapes}: {error}") from error


def _name(model: str | os.PathLike[str] | ModelProto) -> str:
    return f"the model {model.graph.name!r}" if isinstance(model, ModelProto) else str(model)


def _source(model: str | os.PathLike[str] | ModelProto, folder: Path) -> str | bytes:
    """What to open a session with; may write to `folder`, which must live until the session is open."""
    if not isinstance(model, ModelProto):
        path = existing_file(model, "the model")
        try:
            light = onnx.load(path, load_external_data=False)
        except Exception:  # not protobuf: ONNX Runtime's own message says so
            return str(path)
        if not has_bfloat16(light):
            return str(path)
        model = onnx.load(path)
    if has_bfloat16(model):
        model = widen_bfloat16(model)
    if model.ByteSize() < _INLINE:
        return bytes(model.SerializeToString())
    save_model(model, folder / "model.onnx")
    return str(folder / "model.onnx")


def has_bfloat16(proto: ModelProto) -> bool:
    graph = proto.graph
    return (
        any(tensor.data_type == _BF16 for tensor in graph.initializer)
        or any(value.type.tensor_type.elem_type == _BF16 for value in (*graph.input, *graph.output))
        or any(_casts_to_bf16(node) for node in graph.node)
    )


def _casts_to_bf16(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and any(item.name == "to" and item.i == _BF16 for item in node.attribute)


def widen_bfloat16(proto: ModelProto) -> ModelProto:
    """The same arithmetic in FP32: every BF16 tensor is held in FP32, rounded to BF16 where the model makes it.

    As Tensor Cores do: products and sums in FP32, results rounded. Gives a new model.

    Raises:
        ModelError: BF16 inside control flow, whose types can't be followed here.
    """
    widened = ModelProto()
    widened.CopyFrom(proto)
    graph = widened.graph
    types = {value.name: value.type.tensor_type.elem_type for value in infer_shapes(proto).graph.value_info}
    types |= {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for tensor in graph.initializer:
        if tensor.data_type == _BF16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == _BF16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if any(item.HasField("g") or item.graphs for item in node.attribute):
            raise ModelError(f"BF16 model with control flow ({node.op_type} {node.name!r}) can't be run on the CPU")
        reads = any(types.get(name) == _BF16 for name in node.input)
        cast = _casts_to_bf16(node)
        nodes.append(node)
        for index, name in enumerate(node.output):
            rounded = cast or types.get(name) == _BF16 or (name not in types and reads)
            if not name or not rounded:
                continue
            types[name] = _BF16
            exact, short = f"{name}/exact", f"{name}/bfloat16"
            if cast:  # it gives BF16 itself
                node.output[index] = short
            else:
                node.output[index] = exact
                nodes.append(helper.make_node("Cast", [exact], [short], to=_BF16))
            nodes.append(helper.make_node("Cast", [short], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return widened
