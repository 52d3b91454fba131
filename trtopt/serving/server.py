"""A tritonserver on a model repository: `trtopt serve`. Requests, batches, HTTP, gRPC and metrics are Triton's own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtopt.core.documents import Plain
from trtopt.core.errors import NoServer, ServerFailed, UsageError
from trtopt.core.options import taking
from trtopt.serving.request import ServeRequest

_PORTS = ("http", "grpc", "metrics")


@dataclass(frozen=True)
class ServerEnd(Plain):
    """The exit status of a server; negative: minus the number of the signal that ended it."""

    status: int

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def exit_status(self) -> int:
        """The status as shells have it."""
        return self.status if self.status >= 0 else 128 - self.status


class Server:
    """A tritonserver that is ready: all models are loaded and warm. The end of `with` ends it.

    Attributes:
        http, grpc, metrics: addresses, as HOST:PORT.
    """

    def __init__(self, process: subprocess.Popen[bytes], addresses: Sequence[str]) -> None:
        self.http, self.grpc, self.metrics = addresses
        self.send_signal = process.send_signal  # SIGTERM and SIGINT let requests end that were accepted
        self._process = process

    def wait(self) -> ServerEnd:
        """Wait until it has ended."""
        return ServerEnd(self._process.wait())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGTERM)
        self.wait()


@taking(ServeRequest)
def serve(request: ServeRequest) -> Server:
    """Serve a model repository by the tritonserver of this machine; return when it is ready.

        with trtopt.serve("models") as server:
            print(server.http)  # 127.0.0.1:8000

    Args:
        repo: the repository's folder, as `deploy_triton` writes it.
        host: the address to listen on; by default only this machine can connect, and whoever can connect can use the models.
        http_port, grpc_port, metrics_port: ports; the last one gives metrics for Prometheus.
        server: the executable; None: the first tritonserver in PATH. Its log goes to the standard error stream.

    Raises:
        NoServer: there is no tritonserver here; the message has the `docker run` line.
        ServerFailed: it ended before it was ready, or a port is taken.
        UsageError: the folder is no repository.
    """
    repo = Path(request.repo)
    if not any(repo.glob("*/[0-9]*/")):
        raise UsageError(f"{repo} is no model repository: trtopt deploy triton M.engine --repo models writes one")
    addresses = [_address(request.host, name, getattr(request, f"{name}_port")) for name in _PORTS]
    if (executable := shutil.which(request.server or "tritonserver")) is None:
        ports = " ".join(f"-p {address}:{8000 + number}" for number, address in enumerate(addresses))
        volume = shlex.quote(f"{repo.resolve()}:/models:ro")
        image = "nvcr.io/nvidia/tritonserver:YY.MM-py3 tritonserver --model-repository=/models"
        raise NoServer(
            f"there is no tritonserver {'in PATH' if request.server is None else f'at {request.server}'}; in NVIDIA's "
            "container",
            [f"docker run --rm --gpus all {ports} -v {volume} {image}"],
            "YY.MM is a release of the container; the Python backend needs one in whose Python trtopt is installed. Or "
            "name the executable: `server=`",
        )
    process = _started(Path(executable).resolve(), repo, addresses)
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows of this machine's ports
        with request.reporter.phase("starting tritonserver"):
            while (status := process.poll()) is None:  # ready: every model is loaded and warm
                with contextlib.suppress(OSError), opener.open(f"http://{addresses[0]}/v2/health/ready", timeout=2):
                    break
                time.sleep(0.05)
            else:
                raise ServerFailed(f"tritonserver ended with exit status {status} before it was ready: see its log")
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(10)
        process.kill()  # where ten seconds aren't enough
        process.wait()
        raise
    return Server(process, addresses)


def _address(host: str, name: str, port: int) -> str:
    """Return HOST:PORT. ServerFailed where it is taken: told before models are loaded for nothing."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, to start again at once
        try:
            trial.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ServerFailed(f"can't listen on {host}:{port}: {error}; give another `{name}_port=`") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _started(executable: Path, repo: Path, addresses: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [str(executable), f"--model-repository={repo.resolve()}"]
    for name, (host, _, port) in zip(_PORTS, (address.rpartition(":") for address in addresses)):
        command += [f"--{name}-address={host.strip('[]')}", f"--{name}-port={port}"]
    if libraries := sorted(path for plan in repo.glob("*/*/model.plan") for path in plan.resolve().parent.glob("*.so")):
        command.append(f"--backend-config=tensorrt,plugins={';'.join(map(str, libraries))}")
    if (backends := executable.parent.parent / "backends").is_dir():
        command.append(f"--backend-directory={backends}")
    if not Path("/dev/nvidiactl").exists():
        command.append("--allow-gpu-metrics=false")
    # The Python backend runs the first python3 in PATH: models see what is installed here.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:  # in a session of its own: a terminal's Ctrl-C would end the models before their server
        return subprocess.Popen(
            command, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
    except OSError as error:
        raise ServerFailed(f"can't start {executable}: {error.strerror or error}") from error
