"""A model of Triton's Python backend that computes nothing, for benchmarks/triton_backend.py.

Of each sample it gives the first numbers back, as many as config.pbtxt says, on the way that tensors take in
trtopt/serving/triton_model.py.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as backend

_set_destructor = ctypes.pythonapi.PyCapsule_SetDestructor
_set_destructor.argtypes = [ctypes.py_object, ctypes.c_void_p]


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._input = config["input"][0]["name"]
        self._outputs = [
            (item["name"], backend.triton_string_to_numpy(item["data_type"]), item["dims"]) for item in config["output"]
        ]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        responses = []
        for request in requests:
            given = np.from_dlpack(backend.get_input_tensor_by_name(request, self._input))
            samples = given.reshape(len(given), -1)
            tensors = []
            for name, dtype, dims in self._outputs:
                values = samples[:, : math.prod(dims)].astype(dtype).reshape(-1, *dims)
                capsule = values.__dlpack__()
                _set_destructor(capsule, None)
                tensors.append(backend.Tensor.from_dlpack(name, capsule))
            responses.append(backend.InferenceResponse(tensors))
        return responses
