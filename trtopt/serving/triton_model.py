"""A model of Triton's Python backend: trtopt's Session behind Triton's batcher.

Written by `trtopt deploy triton --backend python`; the folder beside it has the engine. Nothing here is specific to one model:
config.pbtxt names the engine and the runtime.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as backend

import trtopt

# Tensors go in and out by DLPack: through `as_numpy` and `Tensor(name, array)`, servers such as release 24.10 lose the bytes
# where NumPy is 2 or newer. They also rename the capsule as NumPy's destructor doesn't expect, which then complains at each
# call; who takes a capsule frees what is in it, so it needs no destructor.
_set_destructor = ctypes.pythonapi.PyCapsule_SetDestructor
_set_destructor.argtypes = [ctypes.py_object, ctypes.c_void_p]
_CALLERS = (trtopt.UsageError, trtopt.DataError)  # the request is at fault


class TritonPythonModel:
    """The class that Triton's Python backend loads: one process and one of these for each instance."""

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: item["string_value"] for name, item in config["parameters"].items()}
        instances: int = sum(group["count"] for group in config["instance_group"])
        cores = max(1, len(os.sched_getaffinity(0)) // instances)  # of each, which run side by side
        folder = Path(__file__).parent
        files: dict[str, Any] = {
            what: [str(folder / name) for name in parameters.get(what, "").split(os.pathsep) if name]
            for what in ("plugins", "operators")
        }
        self._session = trtopt.Session(
            folder / parameters["engine"],
            **files,
            backend=parameters["runtime"],
            device=int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0,
            trust_host_code=parameters.get("trust_host_code") == "true",
            threads=cores if parameters["runtime"] == "onnxruntime" else None,
        )
        self._batches = config["max_batch_size"] > 0

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request. What is wrong with one is no other one's fault."""
        responses: dict[int, Any] = {}
        groups: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
        for place, request in enumerate(requests):
            try:
                arrays = self._inputs(request)
            except Exception as error:  # noqa: PERF203  (each has its own)
                responses[place] = _refused(error)
            else:
                key = tuple(array.shape[1:] for array in arrays.values()) if self._batches else place
                groups.setdefault(key, []).append((place, arrays))
        for group in groups.values():
            responses.update(self._answers(group, requests))
        return [responses[place] for place in range(len(requests))]

    def finalize(self) -> None:
        self._session.close()

    def _inputs(self, request: Any) -> dict[str, Any]:
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        arrays = {info: np.from_dlpack(tensors[info.name]) for info in self._session.inputs}
        return {info.name: array if info.shape else array.reshape(()) for info, array in arrays.items()}

    def _answers(self, group: Sequence[tuple[int, dict[str, Any]]], requests: Sequence[Any]) -> dict[int, Any]:
        """Responses to requests whose samples fit into one batch, by the requests' places."""
        try:
            inputs = {name: [arrays[name] for _, arrays in group] for name in group[0][1]}
            batch = {name: np.concatenate(each) if len(each) > 1 else each[0] for name, each in inputs.items()}
            whole = self._session.run(batch)
            results = [whole]
            if len(group) > 1:
                ends = np.cumsum([len(next(iter(item.values()))) for _, item in group])[:-1]
                parts = {name: np.split(array, ends) for name, array in whole.items()}
                results = [{name: arrays[index] for name, arrays in parts.items()} for index in range(len(group))]
        except Exception as error:
            if len(group) == 1:
                return {group[0][0]: _refused(error)}
            alone = [self._answers([item], requests) for item in group]
            return {place: response for answer in alone for place, response in answer.items()}
        return {place: _response(result, requests[place]) for (place, _), result in zip(group, results)}


def _response(results: Mapping[str, Any], request: Any) -> Any:
    names = set(request.requested_output_names())
    return backend.InferenceResponse([_tensor(name, array) for name, array in results.items() if name in names])


def _tensor(name: str, array: Any) -> Any:
    whole = np.ascontiguousarray(array)  # which also gives what has no dimensions one
    if not whole.size:  # no bytes to lose, and by DLPack Triton refuses the whole batch ("not contiguous")
        return backend.Tensor(name, whole)
    if not whole.flags.writeable:  # NumPy hands out no such arrays by DLPack
        whole = whole.copy()
    capsule = whole.__dlpack__()
    _set_destructor(capsule, None)
    return backend.Tensor.from_dlpack(name, capsule)


def _refused(error: Exception) -> Any:
    kind = backend.TritonError.INVALID_ARG if isinstance(error, _CALLERS) else backend.TritonError.INTERNAL
    text = str(error) if isinstance(error, trtopt.TrtoptError) else f"{type(error).__name__}: {error}"
    return backend.InferenceResponse(error=backend.TritonError(text, kind))
