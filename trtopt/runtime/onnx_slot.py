"""The stand-in for a slot where there is no GPU: the same graph in ONNX Runtime, behind the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.core.errors import DataError, DeviceError, EngineError, UsageError
from trtopt.core.values import ShapeRange
from trtopt.cuda.arrays import View, like_host
from trtopt.cuda.tensors import Signature, Tensor, check_array
from trtopt.data.convert import numpy_dtype
from trtopt.engine.manifest import Manifest
from trtopt.graph.io import load_model
from trtopt.graph.passes.quantize import is_quantized
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.layout import PLAIN, Wanted, check_shape
from trtopt.runtime.slot_pool import CLOSED


class OnnxSlot:
    """Runs an ONNX file on the CPU. One with Q/DQ runs node by node as it is written: ONNX Runtime's fused INT8 kernels
    saturate where a CPU lacks VNNI.

    The manifest's profiles bound the shapes here, too. EngineMismatch where the file isn't the graph that the engine was built
    from.
    """

    def __init__(self, model: Path, manifest: Manifest | None, threads: int | None) -> None:
        graph = load_model(model)
        if manifest is not None:
            manifest.check_graph(model, graph.fingerprint)
        ranges = () if manifest is None else manifest.ranges
        inputs, outputs = (
            tuple(Tensor(item.name, numpy_dtype(item.dtype), item.sizes, batch_axis=item.batch_axis) for item in items)
            for items in (graph.inputs, graph.outputs)
        )
        # As the engine itself would give them: fixed inputs, which the manifest leaves out, with their shape.
        fixed = {item.name: ShapeRange(*[item.shape] * 3) for item in inputs}
        self.signature = Signature(inputs, outputs, tuple({**fixed, **given} for given in ranges))
        self._runner: OnnxRunner | None = OnnxRunner(graph, optimize=not is_quantized(graph.proto), threads=threads)

    stream_ptr = 0  # there is none

    def run(self, arrays: Sequence[Any], wanted: Wanted = PLAIN) -> dict[str, Any]:
        """Infer once as `Slot.run` does, on arrays in host memory."""
        out, example = wanted.out, wanted.example
        if wanted.stream is not None or any(isinstance(array, View) for array in (*arrays, *out.values())):
            raise UsageError("`backend='onnxruntime'` runs on the CPU: give arrays in host memory, and no stream")
        if self._runner is None:
            raise DeviceError(CLOSED)
        for tensor, array in zip(self.signature.inputs, arrays):
            check_array(tensor, array)
        self.signature.profile([array.shape for array in arrays])
        try:
            outputs = self._runner({item.name: array for item, array in zip(self.signature.inputs, arrays)})
        except DataError as error:
            raise EngineError(str(error)) from error
        results: dict[str, Any] = {
            item.name: outputs[item.name].astype(item.dtype, copy=False) for item in self.signature.outputs
        }
        for name, array in out.items():  # NumPy would repeat a smaller result
            check_shape(self.signature.results[name], array, results[name].shape)
        for name, array in out.items():
            np.copyto(np.asarray(array), results[name])
            results[name] = array
        if example is None:
            return results
        return {name: array if name in out else like_host(example, array) for name, array in results.items()}

    def close(self) -> None:
        self._runner = None
