"""A real tritonserver for tests, from NVIDIA's wheel nvidia-pytriton as docs/serving.md sets it up."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ON_CPU: dict[str, Any] = {"backend": "python", "runtime": "onnxruntime"}
ROOT = Path(__file__).resolve().parent.parent
_WHEEL = Path(sys.prefix) / "tritonserver"
_PORTS = itertools.count()


def why_not() -> str:
    """Say why no tritonserver can run here; empty if one can."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return f"tritonserver needs glibc 2.35; this is {name} {version}"
    return "" if _WHEEL.is_dir() else "no tritonserver here; scripts/test installs one"


def executable(folder: Path) -> Path:
    """Set the wheel's server up in a folder: its backends with the Python backend for this Python, and its libraries."""
    wheel = _WHEEL / "pytriton" / "tritonserver"
    shutil.copytree(wheel / "backends", folder / "backends")
    stub = wheel / "python_backend_stubs" / ".".join(map(str, sys.version_info[:2])) / "triton_python_backend_stub"
    shutil.copy(stub, folder / "backends" / "python")
    libraries = f"{_WHEEL / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    script = folder / "bin" / "tritonserver"
    script.parent.mkdir()
    # The Python backend heeds no PYTHONPATH, and imports from the folder that the server was started in.
    lines = ["#!/bin/sh", f"cd '{ROOT}'", f"LD_LIBRARY_PATH='{libraries}' exec '{wheel}/bin/tritonserver' \"$@\""]
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    return script


def ports() -> dict[str, int]:
    """Find three that are free, and below those that the system gives to whoever connects."""
    found: list[int] = []
    while len(found) < 3:
        port = 10_000 + (os.getpid() * 61 + next(_PORTS)) % 22_000
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.append(port)
    return dict(zip(("http_port", "grpc_port", "metrics_port"), found, strict=True))


def started(words: list[str], log: Path, **places: int) -> subprocess.Popen[bytes]:
    """Start `trtopt serve`, and wait for the line that says that it is ready."""
    words += [text for name, port in places.items() for text in (f"--{name.replace('_', '-')}", str(port))]
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "trtopt", "serve", *words], stdout=file, stderr=file)
    deadline = time.monotonic() + 120
    while b"ready: HTTP" not in log.read_bytes():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        time.sleep(0.1)
    return process
