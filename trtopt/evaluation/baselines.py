"""Baselines that an engine is timed against: PyTorch, ONNX Runtime. Each takes and gives NumPy arrays.

Opening one either works or raises, so that nothing is measured before everything asked for is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DeviceError, ModelError, UsageError, require
from trtopt.core.foreign import essence
from trtopt.data.rebatch import Arrays
from trtopt.evaluation.request import BenchRequest
from trtopt.frontend.modules import open_source
from trtopt.runtime.session import Session
from trtopt.runtime.timing import Spread

BASELINES = ("torch", "onnxruntime")
_WARM = 3


class OnnxRuntime:
    """The source model in ONNX Runtime, on a GPU where the installed package has one.

    Attributes:
        name: how it runs; note: what the reader should know of it.
    """

    def __init__(self, model: Path) -> None:
        from trtopt.ort.sessions import OnnxSession, providers, version  # loads onnx, which engines alone don't need

        purpose = "measuring against ONNX Runtime"
        there = ", ".join(providers(purpose))
        self._session = OnnxSession(model, threads=None, gpu=True, tf32=True)
        provider = self._session.provider
        self.name = f"onnxruntime {version(purpose)} ({provider.removesuffix('ExecutionProvider')})"
        self.note = f"{model.name} as it is, not the engine's precision; it got {provider} of {there}"

    def prepare(self, inputs: Arrays) -> None:
        """Do what is done once for a shape: compiling, capturing."""
        if set(self._session.inputs) != set(inputs):
            raise UsageError(
                f"the ONNX model takes {', '.join(sorted(self._session.inputs))}, the engine {', '.join(sorted(inputs))}: give "
                "`model=`, the one that the engine was built from"
            )
        self.run(inputs)

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        return self._session(inputs)

    def close(self) -> None:
        del self._session


class Torch:
    """A PyTorch module in FP16, channels-last: replayed from a CUDA graph, or as torch.compile makes it.

    Inputs and results cross between pinned host memory and the GPU on the stream that computes, as a careful service does it.
    """

    def __init__(self, source: str | None, session: Session, *, compiled: bool, ordinal: int) -> None:
        torch = self._torch = require("torch", "torch", "measuring against PyTorch")
        if not torch.cuda.is_available():
            raise DeviceError(
                f"torch {torch.__version__} finds no GPU to measure on (built for CUDA {torch.version.cuda}): install a CUDA "
                "build that the driver runs, or leave torch out of `against=`"
            )
        if source is None:
            raise UsageError(
                "`against=['torch']` needs the PyTorch module that the engine came from: give `source=` "
                "torchvision:NAME, package.module:factory or a recipe"
            )
        origin = open_source(source, None)
        self._device = torch.device("cuda", ordinal)
        module = origin.module.eval().to(self._device, torch.float16).to(memory_format=torch.channels_last)
        self._compiled = compiled
        self._module = torch.compile(module, mode="max-autotune-no-cudagraphs") if compiled else module
        how = "torch.compile (max-autotune) + CUDA graph" if compiled else "CUDA graph"
        self.name = f"torch {torch.__version__} ({how})"
        self.note = f"{origin.text}, weights {origin.weights}; FP16, channels-last"
        self._outputs = [item.name for item in session.outputs]
        self._stream = torch.cuda.Stream(self._device)
        self._graph: Any = None

    def prepare(self, inputs: Arrays) -> None:
        torch = self._torch
        self._graph = None  # before the buffers that it refers to
        self._staging = [torch.from_numpy(np.ascontiguousarray(array)).pin_memory() for array in inputs.values()]
        self._inputs = [item.to(self._device) for item in self._staging]

        def infer() -> list[Any]:
            arguments = [
                item.to(torch.float16, memory_format=torch.channels_last if item.dim() == 4 else torch.preserve_format)
                if item.is_floating_point()
                else item
                for item in self._inputs
            ]
            result = self._module(*arguments)
            values = result.values() if isinstance(result, Mapping) else result
            return [item.float() for item in (values if not isinstance(values, torch.Tensor) else [values])]

        try:
            with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for _ in range(_WARM):
                    infer()
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._stream):
                    self._results = infer()
        except Exception as error:  # a compiler is missing, an operator can't be captured, out of memory
            what = "torch.compile" if self._compiled else "a CUDA graph"
            raise ModelError(f"PyTorch can't run this model under {what}: {essence(error)}") from error
        self._graph = graph
        self._back = [torch.empty(item.shape, dtype=item.dtype, pin_memory=True) for item in self._results]

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            for staging, argument, array in zip(self._staging, self._inputs, inputs.values()):
                staging.numpy()[...] = array
                argument.copy_(staging, non_blocking=True)
            self._graph.replay()
            for back, result in zip(self._back, self._results):
                back.copy_(result, non_blocking=True)
            self._stream.synchronize()
        return {name: back.numpy().copy() for name, back in zip(self._outputs, self._back)}

    def gpu(self, iterations: int) -> Spread:
        """GPU time of the inference alone, for the shapes prepared last."""
        torch = self._torch
        times: list[float] = []
        with torch.cuda.stream(self._stream):
            while len(times) < iterations:
                count = min(64, iterations - len(times))
                events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
                events[0].record()
                for event in events[1:]:
                    self._graph.replay()
                    event.record()
                self._stream.synchronize()
                times += [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
        return Spread.of(times)

    def close(self) -> None:
        self._graph = self._module = None
        self._staging, self._inputs, self._results, self._back = [], [], [], []
        self._torch.cuda.empty_cache()


Baseline = OnnxRuntime | Torch


def open_baselines(request: BenchRequest, session: Session, model: Callable[[], Path]) -> Iterator[Baseline]:
    """Open those that `against` names one after the other; each is the caller's to close. `model` finds the engine's source."""
    for name in request.against:
        if name == "onnxruntime":
            yield OnnxRuntime(model())
        else:
            for compiled in (False, True):
                yield Torch(request.source, session, compiled=compiled, ordinal=request.device)
