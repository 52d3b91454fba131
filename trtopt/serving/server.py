"""A tritonserver on a model repository: `trtopt serve`.

Requests, batches, HTTP, gRPC and metrics are Triton's own; this finds a server, starts it, says when it is ready, and ends it
so that what it has accepted is answered.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trtopt.core.errors import DeviceError, NoServer, ServerFailed, UsageError
from trtopt.core.files import opened_regular, whole
from trtopt.core.library_output import Shared
from trtopt.core.options import taking
from trtopt.core.temporary import is_scratch, scratch
from trtopt.core.terminal import visible
from trtopt.core.values import parse_seconds
from trtopt.cuda.device import probe
from trtopt.serving.containers import IMAGE, Container, container_for
from trtopt.serving.control import Control, Watch, opener
from trtopt.serving.installation import find_server, how_to_install, place_stub
from trtopt.serving.repository import CONFIG, DeployedModel, deploy_triton, several
from trtopt.serving.request import DeployRequest, ServeRequest
from trtopt.serving.warming import warm_up
from trtopt.trt.plans import plan_header

_FOR_ENGINES = tuple(item.name for item in fields(DeployRequest) if item.name not in ("engines", "repo", "reporter"))
_PORTS = ("http_port", "grpc_port", "metrics_port")
_IN_FLIGHT = re.compile(r"Found (\d+) model versions that have in-flight inferences")
_LAST = 400  # lines of the server's log that an error may quote from
# Seconds for clients to close their connections when models are gone, three of them for what is left to end.
_CLOSING = 6
_SLACK = 10.0  # seconds beyond `drain` before a server that doesn't end is killed
_WATCH = 'while read -r _; do :; done; kill -s TERM -- "-$1"; sleep 10; kill -s KILL -- "-$1"'  # a group of processes
_STACK = 1 << 30  # of each of its threads, at most: only what is used takes memory


@dataclass(frozen=True)
class ServerEnd:
    """How a server ended.

    Attributes:
        stopped: by `Server.stop`; False: by itself.
        status: its exit status; negative: minus the number of the signal that ended it.
        answered: no inference was under way when it ended, whatever tritonserver's own status is.
    """

    stopped: bool
    status: int
    answered: bool

    @property
    def ok(self) -> bool:
        """It was stopped, and has answered everything that it had accepted."""
        return self.stopped and self.answered

    def __str__(self) -> str:
        if self.ok:
            return "stopped; every accepted request was answered"
        how = f"by signal {-self.status}" if self.status < 0 else f"with exit status {self.status}"
        return f"tritonserver ended {'before all requests were answered' if self.stopped else 'by itself'}, {how}"

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "stopped": self.stopped, "status": self.status, "answered": self.answered}


class Server:
    """A tritonserver that is ready: all models are loaded and warm. Closing it, by `close` or `with`, drains it.

    Attributes:
        http, grpc, metrics: addresses, as HOST:PORT.
        repo: its model repository.
        models: what was deployed into it; empty for a repository that was there.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: deque[str],
        unload: Callable[[float], None] | None,
        repo: Path,
        addresses: Sequence[str],
        drain: float,
        models: Sequence[DeployedModel],
    ) -> None:
        self.repo, self.models = repo, tuple(models)
        self.http, self.grpc, self.metrics = addresses
        self._process, self._log, self._unload, self._drain = process, log, unload, drain
        self._stopped = False
        self._closing = contextlib.ExitStack()
        self._deadline: float | None = None

    def stop(self) -> None:
        """Begin to end: nothing new is taken, what was accepted is answered. A second call ends it at once."""
        if self._stopped:
            self._process.kill()
            return
        self._stopped = True
        self._deadline = time.monotonic() + self._drain + _SLACK
        threading.Thread(target=self._end, name="trtopt-drain", daemon=True).start()

    def _end(self) -> None:
        """Unload the models, which answers what they have and refuses the rest, and then end the server.

        SIGTERM alone isn't enough: tritonserver goes on taking requests on open connections, and drops them at the end.
        """
        with contextlib.suppress(OSError, ValueError):
            if self._unload is not None:
                self._unload(time.monotonic() + self._drain)
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> ServerEnd:
        """Wait for its end: after `stop`, or by itself."""
        while (status := self._process.poll()) is None:
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        self._closing.close()
        counts = [match[1] for line in self._log if (match := _IN_FLIGHT.search(line))]
        return ServerEnd(self._stopped, status, status == 0 or counts[-1:] == ["0"])

    def close(self) -> ServerEnd:
        """`stop`, unless it was stopped, and `wait`."""
        if not self._stopped:
            self.stop()
        return self.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@taking(ServeRequest)
def serve(request: ServeRequest) -> Server:
    """Serve engines, or a model repository, by a tritonserver on this machine; returns when it is ready and warm.

        with trtopt.serve("m.engine") as server:
            print(server.http)  # 127.0.0.1:8000

    Args:
        engines: plans, or with `runtime="onnxruntime"` ONNX files, as for `deploy_triton`; or a repository's folder.
        repo: a folder to keep the repository in; None: a temporary one.
        name, runtime, from_images, instances, max_delay, trust, trust_host_code, overwrite: as for `deploy_triton`.
        backend: "python", or "tensorrt" on a server that has that backend.
        host: the address to listen on; by default only this machine can connect, and whoever can connect can use the models.
        http_port, grpc_port, metrics_port: ports; the last one gives metrics for Prometheus.
        server: a tritonserver, or the folder that it was installed in; None: `$TRITON_SERVER`, the folder `tritonserver` of
            this Python's environment, the package nvidia-pytriton in it, the first tritonserver in PATH, /opt/tritonserver.
        drain: how long accepted requests may take after `Server.stop`: "30s", or seconds.

    The server's log goes to the standard error stream, line by line.

    Raises:
        NoServer: there is no tritonserver here that can serve this; the message has the `docker run` line.
        ServerFailed: it didn't start: a model didn't load, a port is taken, …; the message has what it said.
        DeviceError: there is no GPU for `runtime`.
        UsageError, EngineError, OutputError: as `deploy_triton`.
    """
    ports = [getattr(request, name) for name in _PORTS]
    for name, port in zip(_PORTS, ports):
        if not 0 < port < 1 << 16 or ports.count(port) > 1:
            raise UsageError(f"`{name}=` is {port}; three different ports from 1 to 65535 are needed")
    drain = parse_seconds(request.drain, "`drain=`")
    if drain < 1:
        raise UsageError(f"`drain=` is {request.drain!r}; at least 1s is needed")
    with contextlib.ExitStack() as stack:
        repo, models = _repository(request, stack)
        backends = _backends(repo)
        command, environment = _command(request, repo, backends, stack)
        _check_ports(request.host, ports)  # what has to change in the request is said first
        if models and request.backend == "python" and request.runtime != "onnxruntime" and not (gpu := probe()).devices:
            raise DeviceError(
                f"no GPU can be used here ({gpu.reason}); `runtime='onnxruntime'` runs the graph that `build --save-onnx` kept"
            )
        control = _control(command[0], environment, request)
        command += control.options if control else []
        server = _start(command, control, environment, request, drain, repo, models, stack)
        server._closing = stack.pop_all()
    return server


# The repository ----------------------------------------------------------------------------------------------------------


def _repository(request: ServeRequest, stack: contextlib.ExitStack) -> tuple[Path, tuple[DeployedModel, ...]]:
    engines = several(request.engines)
    if len(engines) == 1 and Path(engines[0]).is_dir():
        for name in ("repo", *_FOR_ENGINES):
            if getattr(request, name) != getattr(ServeRequest, name):
                raise UsageError(f"`{name}=` is for engines; {engines[0]} is a repository, which says it itself")
        return Path(engines[0]), ()
    deployed = deploy_triton(
        engines,
        repo=stack.enter_context(scratch()) / "repository" if request.repo is None else request.repo,
        reporter=request.reporter,
        **{name: getattr(request, name) for name in _FOR_ENGINES},
    )
    for model in deployed.models:
        for note in model.notes:
            request.reporter.note(f"{model.name}: {note}")
    return deployed.repo, deployed.models


def _backends(repo: Path) -> set[str]:
    """Of the models in a repository; UsageError where it holds none."""
    names: set[str] = set()
    for path in repo.glob(f"*/{CONFIG}"):
        lines = whole(path).decode("utf-8", "replace").splitlines()
        names |= {line.split('"')[1] for line in lines if line.startswith("backend:") and line.count('"') == 2}
        names |= {"tensorrt" for line in lines if line.replace(" ", "") == 'platform:"tensorrt_plan"'}
    if not any(repo.glob("*/[0-9]*/")):
        raise UsageError(
            f"{repo} is no model repository: no folder in it has versions; trtopt deploy triton writes one"
        )
    return names


# The server ----------------------------------------------------------------------------------------------------------


def _command(
    request: ServeRequest, repo: Path, backends: set[str], stack: contextlib.ExitStack
) -> tuple[list[str], dict[str, str]]:
    """What starts the server, and its environment."""
    installation = find_server(request.server)
    absent = sorted(name for name in backends if installation and not (installation.backends / name).is_dir())
    if installation is None or absent:
        lacks = (
            f"{installation.executable} has no {absent[0]} backend"
            if installation
            else "no tritonserver was found here"
        )
        raise NoServer(f"{lacks}; in NVIDIA's container", [_docker(request, repo, backends)], _advice(backends, absent))
    environment, folder = dict(os.environ), installation.backends
    if installation.stubs is not None:
        folder = stack.enter_context(scratch()) / "backends"
        place_stub(installation, folder, environment)
    command = [
        str(installation.executable),
        f"--model-repository={_place(repo, stack)}",
        f"--backend-directory={folder}",
        f"--http-address={request.host}",
        f"--grpc-address={request.host}",
        f"--metrics-address={request.host}",
        f"--http-port={request.http_port}",
        f"--grpc-port={request.grpc_port}",
        f"--metrics-port={request.metrics_port}",
        f"--exit-timeout-secs={_CLOSING}",
        "--backend-config=python,shm-default-byte-size=4194304",  # grows where a model needs more
    ]
    if not Path("/dev/nvidiactl").exists():
        command.append("--allow-gpu-metrics=false")
    return command, environment


def _place(repo: Path, stack: contextlib.ExitStack) -> Path:
    """A repository's folder, or a link to it: the Python backend decodes paths as ASCII."""
    folder = repo.resolve()
    if str(folder).isascii():
        return folder
    link = stack.enter_context(scratch()) / "repository"
    link.symlink_to(folder)
    return link


def _control(executable: str, environment: dict[str, str], request: ServeRequest) -> Control | None:
    """None for a server that can't keep that API from others (before 24.01): it is ended by SIGTERM alone."""
    done = subprocess.run([executable, "--help"], env=environment, capture_output=True, check=False)
    if b"--http-restricted-api" not in done.stdout + done.stderr:
        return None
    return Control(f"{_here(request.host)}:{request.http_port}")


def _here(host: str) -> str:
    """The address by which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _docker(request: ServeRequest, repo: Path, backends: set[str]) -> str:
    """The line that serves a repository in NVIDIA's container."""
    container: Container | None = None
    if "tensorrt" in backends:
        for plan in repo.glob("*/[0-9]*/model.plan"):
            with opened_regular(plan) as file:
                container, _ = container_for(plan_header(file.read(64)))
    image = container.image if container else f"{IMAGE}:YY.MM-py3"
    inside = (8000, 8001, 8002)
    ports = [
        f"-p {request.host}:{outer}:{inner}"
        for outer, inner in zip((getattr(request, name) for name in _PORTS), inside)
    ]
    where = Path("REPO") if is_scratch(repo) else repo.resolve()
    volume = shlex.quote(f"{where}:/models:ro")
    return f"docker run --rm --gpus all {' '.join(ports)} -v {volume} {image} tritonserver --model-repository=/models"


def _advice(backends: set[str], absent: Sequence[str]) -> str:
    """What stands for what in the line for docker, and what to do instead."""
    container = "YY.MM is a release of the container, REPO what trtopt deploy triton wrote" + (
        "; the Python backend needs one in whose Python trtopt is installed" if "python" in backends else ""
    )
    instead = (
        "Or give `backend='python'`"
        if "tensorrt" in absent
        else f"Or install a server for this Python: {how_to_install()}"
    )
    return f"{container}. {instead}"


def _home() -> Path | None:
    """The folder that trtopt lies in; None where it is installed.

    The Python backend heeds no PYTHONPATH, and imports from the folder that the server was started in before all others.
    """
    home = Path(__file__).resolve().parents[2]
    return None if str(home) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else home


def _start(
    command: Sequence[str],
    control: Control | None,
    environment: dict[str, str],
    request: ServeRequest,
    drain: float,
    repo: Path,
    models: Sequence[DeployedModel],
    stack: contextlib.ExitStack,
) -> Server:
    folder = _home() or stack.enter_context(scratch())
    try:
        with _deep_stacks:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is for us: models must not end before their server
            )
    except OSError as error:
        raise ServerFailed(f"can't start {command[0]}: {error.strerror or error}") from error
    addresses = [f"{request.host}:{getattr(request, name)}" for name in _PORTS]
    stack.enter_context(_watched(process))
    stack.callback(_end_group, process)
    last: deque[str] = deque(maxlen=_LAST)
    reader = threading.Thread(target=_copy_log, args=(process, last), name="trtopt-tritonserver", daemon=True)
    reader.start()
    stack.callback(reader.join, 5.0)
    _wait_until_ready(process, request, last, reader)
    warm_up(f"{_here(request.host)}:{request.http_port}", repo)
    unload = None
    if control is not None:
        watch = Watch(process, control)
        stack.callback(watch.end)
        unload = watch.unload
    return Server(process, last, unload, repo, addresses, drain, models)


@contextlib.contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """See to it that the server ends where this process is killed meanwhile, which closes the watching shell's input.

    The system's own way (PR_SET_PDEATHSIG) asks for the thread that started it to live on.
    """
    words = ["/bin/sh", "-c", _WATCH, "sh", str(process.pid)]
    shell = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        shell.kill()
        shell.communicate()


@contextlib.contextmanager
def _deepened_stacks() -> Iterator[None]:
    """Room on the stacks of what is started meanwhile.

    Release 24.10 parses JSON, and gathers a request's chunks, on a thread's stack: the usual one overflows, and that ends it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    size = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
    enough = soft >= size and soft != resource.RLIM_INFINITY  # without a limit, threads get 2 MiB
    if enough or _room_is_counted():
        yield
        return
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


_deep_stacks = Shared(_deepened_stacks)  # servers may be started at the same time


def _room_is_counted() -> bool:
    """Whether what nothing was written to counts in a limit of the system's or the process's: then such threads don't start."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    try:
        return whole("/proc/sys/vm/overcommit_memory").decode().strip() == "2"
    except OSError:
        return False


def _copy_log(process: subprocess.Popen[bytes], last: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            text = line.decode(errors="backslashreplace").rstrip()
            last.append(text)
            print(visible(text), file=sys.stderr, flush=True)


def _wait_until_ready(
    process: subprocess.Popen[bytes], request: ServeRequest, last: deque[str], reader: threading.Thread
) -> None:
    """Until every model is loaded and warm, which is when Triton says that it is ready."""
    address = f"http://{_here(request.host)}:{request.http_port}/v2/health/ready"
    client = opener()
    with request.reporter.phase("starting tritonserver"):
        while True:
            if (status := process.poll()) is not None:
                reader.join(5.0)
                raise ServerFailed(f"tritonserver ended with exit status {status} before it was ready", _faults(last))
            with contextlib.suppress(urllib.error.URLError, OSError), client.open(address, timeout=2) as answer:
                # Another server may have the port; ours then fails to take it, and ends. The metrics' is its last.
                if answer.status == 200 and any("Started Metrics Service" in line for line in tuple(last)):
                    return
            time.sleep(0.05)


def _check_ports(host: str, ports: Sequence[int]) -> None:
    """Raise ServerFailed where one is taken, before models are loaded for nothing."""
    for name, port in zip(_PORTS, ports):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, to start again at once
            try:
                trial.bind((host, port))
            except OSError as error:
                raise ServerFailed(
                    f"can't listen on {host}:{port}: {error.strerror or error}; give another `{name}=`"
                ) from error


def _faults(last: deque[str]) -> tuple[str, ...]:
    """What the log says of the reason: its errors, or its last lines."""
    lines = tuple(last)
    errors = [line for line in lines if line[:1] == "E" and line[1:5].isdigit()] or [
        line for line in lines if "error" in line.lower()
    ]
    return tuple(dict.fromkeys(line[:400] for line in (errors or lines)[-6:]))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left: the server, where it wasn't stopped, and models of one that was killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
