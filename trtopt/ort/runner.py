"""Running an ONNX model as it is written, to measure it."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.core.errors import DataError, ModelError
from trtopt.data.convert import converted
from trtopt.data.rebatch import Arrays, Call, alone, chunks, joined
from trtopt.graph.half import has_half, widen
from trtopt.graph.inputs import network_inputs, network_outputs
from trtopt.graph.io import Model, load_model
from trtopt.graph.proto import in_memory, operators_in
from trtopt.ort.sessions import OnnxSession

# ONNX Runtime's name of an input type → NumPy's. FP16 and BF16 never appear: such models are widened first.
_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(bool)": "bool"}
_DTYPES |= {f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


class OnnxRunner:
    """Maps input arrays to output arrays by name, through ONNX Runtime.

    FP16 and BF16 models are widened (`widen`): ONNX Runtime's CPU has no BF16 kernels, and runs FP16 chains in FP32
    without the rounding between the nodes, so that an overflow wouldn't show.

    Args:
        optimize: False runs the nodes as they stand. Q/DQ models need that: ONNX Runtime otherwise fuses them into
            INT8 kernels whose intermediate sums saturate on CPUs without VNNI.
        threads: threads within an operator; None: one per core.
        gpu: on the first GPU, where the installed ONNX Runtime can use one; else on the CPU; `on_gpu` says which it became.

    Raises: as `load_model` and `open_session`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelProto | Model,
        *,
        optimize: bool,
        threads: int | None = None,
        gpu: bool = False,
    ) -> None:
        if isinstance(model, ModelProto):
            proto, path, as_it_is = model, None, False
        else:  # load_model says what is wrong with a file by name, which ONNX Runtime often doesn't
            loaded = load_model(cast("Any", model))
            proto, path = loaded.proto, loaded.path
            as_it_is = not loaded.mended and not has_half(proto) and not operators_in(proto)
        self._what = str(path or f"the model {proto.graph.name!r}")
        ready = path if path is not None and as_it_is else widen(in_memory(proto))
        self._session = OnnxSession(ready, threads=threads, optimize=optimize, gpu=gpu)
        taken = network_inputs(proto)
        # Inputs whose first axis has a fixed size, and the batch that this is, if it is one for all of these.
        self._fixed = {name: info.sizes[0] for name, info in taken.items() if info.shape and info.sizes[0] > 0}
        one = len({*self._fixed.values()}) == 1 and not alone(taken.values())
        self._batch = next(iter(self._fixed.values())) if one else None
        self._given = network_outputs(proto, taken) if one else ()
        self.on_gpu = self._session.on_gpu
        self._types = {name: _DTYPES.get(kind) for name, kind in self._session.inputs.items()}
        self.inputs, self.outputs = tuple(self._types), self._session.outputs

    def __call__(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Run once. Arrays are converted to the inputs' types within their kind, such as float16 to float32; DataError or
        UsageError where an input is missing, or its kind or shape doesn't fit."""
        absent = [name for name in self.inputs if name not in inputs]
        if absent:
            raise DataError(f"{self._what} needs {', '.join(absent)}; the data has {', '.join(inputs)}")
        feed: dict[str, NDArray[Any]] = {}
        for name, dtype in self._types.items():
            array = np.asarray(inputs[name])
            feed[name] = converted(array, dtype, f"the input {name!r}", self._what) if dtype else array
        size = self._batch
        fits = all(feed[name].shape[:1] == (size,) for name in self._fixed)  # others may begin otherwise
        try:
            return self._session(feed) if size is None or fits else self._in_chunks(feed, size)
        except ModelError as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feed.items())
            raise DataError(f"{self._what} can't be run on {shapes}: {error}") from error

    def _in_chunks(self, feed: Arrays, size: int) -> dict[str, NDArray[Any]]:
        """Run a model of a fixed batch on any number of samples: the last chunk is filled up, and what that gives dropped."""
        parts = (
            Call(chunk, size, real).cut(self._session(chunk), self._given) for chunk, real in chunks(feed, size, size)
        )
        return joined(parts, self._given)
