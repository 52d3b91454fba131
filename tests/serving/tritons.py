"""A real tritonserver for tests: why there may be none, ports, small networks, and `trtopt serve` as a process."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as helper

from trtopt.serving.installation import find_server

ON_CPU: dict[str, Any] = {"backend": "python", "runtime": "onnxruntime"}


def why_not() -> str:
    """Why no tritonserver can run here; empty if one can."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return f"tritonserver needs glibc 2.35; this is {name} {version}"
    if platform.machine() != "x86_64":
        return f"tritonserver's wheel is for x86-64; this is {platform.machine()}"
    return "" if find_server() else "no tritonserver here; scripts/test installs one"


_given = itertools.count()


def ports() -> dict[str, int]:
    """Three that are free, and below those that the system gives to whoever connects: it might before the server has them.

    Each process takes them from places of its own.
    """
    found: list[int] = []
    while len(found) < 3:
        port = 10_000 + (os.getpid() * 61 + next(_given)) % 22_000
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.append(port)
    return dict(zip(("http_port", "grpc_port", "metrics_port"), found, strict=True))


def waiting(metrics: str, model: str) -> int:
    """Requests that tritonserver has accepted for a model and not yet begun to run."""
    with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    start = f'nv_inference_pending_request_count{{model="{model}"'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(start))


def network(path: Path, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *nodes: Any) -> Path:
    """An ONNX file; tensors by name: NumPy type and shape."""
    made = [
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in tensors.items()
        ]
        for tensors in (inputs, outputs)
    ]
    graph = helper.make_graph(list(nodes), "g", *made)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def png(height: int, width: int, kind: str = "PNG", seed: int = 0) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(content, kind)
    return content.getvalue()


def command(*arguments: str | Path, **places: int) -> list[str]:
    options = [text for name, port in places.items() for text in (f"--{name.replace('_', '-')}", str(port))]
    return [sys.executable, "-m", "trtopt", "serve", *map(str, arguments), "--runtime", "onnxruntime", *options]


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
    deadline = time.monotonic() + 120
    while b"ready: HTTP" not in log.read_bytes():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        time.sleep(0.1)
    return process
