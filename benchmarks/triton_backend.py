"""Engines behind tritonserver's Python backend, beside a model that computes nothing at the same sizes on the same server.

    PY benchmarks/triton_backend.py [options] ENGINE… INPUTS.npz

The server is the one that `trtopt serve` finds; engines and INPUTS.npz such as benchmarks/embed.py leaves.
INPUTS.npz holds samples of the engines' input as the model takes them (floats); an engine with embedded preprocessing is
sent the pixels that they were made of. Requests are binary tensors over HTTP, as tritonclient sends them, from processes of
their own, each with several connections that wait for an answer and send again. The best class of each answer
is compared with Session's.

    throughput    the model and its identity take turns, --seconds each, in --rounds rounds after one that isn't counted, with
                  --instances of each, for each number of samples a request (--samples); medians of the rounds
    first call    a server with one instance of each is started --restarts times; the first call after it is ready, beside the
                  median of the next ones, each on a connection of its own that has asked whether the model is ready. Models
                  take turns to be called, one at each start; the first start isn't counted

Exit status 1: a request failed, or a class differs from Session's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import tell
from numpy.typing import NDArray

import trtopt
from trtopt.core.progress import reporter

HOST = "127.0.0.1"
TYPES = {"float32": "FP32", "float16": "FP16", "uint8": "UINT8", "int32": "INT32", "int64": "INT64"}
CEILING, FIRST = 0.8, 1.2  # wanted: images/s over the identity's; first call over the median of the next ones
RAMP = 0.5  # seconds at the start that aren't counted
CALLS = 200  # after a first one


class Client:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Length of the answer's JSON, if it says so, and the answer."""
        self._socket.sendall(request)
        status, length, header = self._answers.readline(), 0, 0
        while (line := self._answers.readline().lower()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                length = int(value)
            elif name == b"inference-header-content-length":
                header = int(value)
        content = self._answers.read(length)
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {content[:500].decode(errors='replace')}")
        return header, content

    def classes(self, request: bytes) -> NDArray[Any]:
        """The best class of each sample, by the first output."""
        header, content = self.ask(request)
        output = json.loads(content[:header])["outputs"][0]
        dtype = next(name for name, triton in TYPES.items() if triton == output["datatype"])
        size = output["parameters"]["binary_data_size"]
        scores = np.frombuffer(content[header : header + size], dtype).reshape(output["shape"])
        return scores.reshape(len(scores), -1).argmax(1)


def posted(model: str, name: str, array: NDArray[Any]) -> bytes:
    """A request for inference."""
    tensor = {
        "name": name,
        "datatype": TYPES[array.dtype.name],
        "shape": array.shape,
        "parameters": {"binary_data_size": array.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        f"Host: {HOST}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + array.nbytes}",
    )
    return "\r\n".join((*lines, "", "")).encode() + head + array.tobytes()


def requests(model: str, name: str, arrays: NDArray[Any], samples: int) -> list[tuple[bytes, NDArray[Any]]]:
    """Requests of so many samples each, and which samples."""
    places = [(np.arange(samples) + start) % len(arrays) for start in range(0, min(len(arrays), 16 * samples), samples)]
    return [(posted(model, name, arrays[place]), place) for place in places]


def client_process(pipe: Connection, port: int, connections: int) -> None:
    """Of each job the answers in its time, the wrong ones, and what failed."""
    while (job := pipe.recv()) is not None:
        model, name, path, samples, seconds = job
        with np.load(path) as file:
            sent = requests(model, name, file["arrays"], samples)
            best = None if model.endswith(".identity") else file["classes"]
        begin = time.monotonic() + RAMP
        callers = [Caller(port, sent, best, number, begin, begin + seconds) for number in range(connections)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        failed = [caller.failed for caller in callers if caller.failed]
        pipe.send(
            (samples * sum(caller.answers for caller in callers), sum(caller.wrong for caller in callers), failed)
        )


class Caller(threading.Thread):
    """Sends, waits for the answer, and sends again, on one connection."""

    def __init__(self, port: int, sent: Any, best: Any, number: int, begin: float, end: float) -> None:
        super().__init__(daemon=True)
        self._port, self._sent, self._best, self._number, self._begin, self._end = port, sent, best, number, begin, end
        self.answers, self.wrong, self.failed = 0, 0, ""

    def run(self) -> None:
        place = self._number
        try:
            with closing(Client(self._port)) as client:
                while time.monotonic() < self._end:
                    request, which = self._sent[place % len(self._sent)]
                    found = client.classes(request)
                    self.answers += self._begin <= time.monotonic() < self._end
                    self.wrong += 0 if self._best is None else int((found != self._best[which]).sum())
                    place += 1
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"


class Load:
    """Client processes, each with several connections."""

    def __init__(self, port: int, processes: int, connections: int) -> None:
        context, self._clients = multiprocessing.get_context("spawn"), []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=client_process, args=(theirs, port, connections), daemon=True)
            process.start()
            self._clients.append((process, ours))

    def rate(self, *job: Any) -> tuple[float, int, list[str]]:
        """Images a second, wrong answers, and what failed."""
        for _, pipe in self._clients:
            pipe.send(job)
        answers = [pipe.recv() for _, pipe in self._clients]
        failed = [line for answer in answers for line in answer[2]]
        return sum(answer[0] for answer in answers) / job[-1], sum(answer[1] for answer in answers), failed

    def close(self) -> None:
        for process, pipe in self._clients:
            pipe.send(None)
            process.join(10)


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.rows: list[tuple[str, str, str, str]] = []
        self.figures: dict[str, Any] = {"machine": machine()}
        self.right = True
        self.port = free_port()
        with np.load(given.inputs) as file:
            self.inputs = {name: file[name] for name in file.files}
        self.models = {Path(path).stem: self._model(Path(path)) for path in given.engines}

    def note(self, what: str, measured: str, wanted: str = "", good: bool | None = None) -> None:
        self.rows.append((what, measured, wanted, "" if good is None else "yes" if good else "**no**"))
        print(f"{what}: {measured} {wanted} {self.rows[-1][3]}", file=sys.stderr, flush=True)

    def _model(self, engine: Path) -> tuple[str, Path]:
        """Its input's name, and a file with its samples and the classes that Session gives them."""
        path = self.folder / f"{engine.stem}.npz"
        with trtopt.Session(engine, backend=self.given.runtime) as session:
            [info] = session.inputs
            arrays = session.taken({info.name: self.inputs[info.name].astype(np.float32)})[info.name]
            scores = next(iter(session.run_batches({info.name: arrays}).values()))
        np.savez(path, arrays=arrays, classes=scores.reshape(len(scores), -1).argmax(1))
        return info.name, path

    def repository(self, instances: int) -> Path:
        """With each engine and, beside it, its identity."""
        repo = self.folder / f"repository{instances}"
        trtopt.deploy_triton(
            self.given.engines, repo=repo, backend="python", runtime=self.given.runtime, instances=instances
        )
        for name in self.models:
            twin = f"{name}.identity"
            shutil.copytree(repo / name, repo / twin, ignore=shutil.ignore_patterns("*.engine*", "*.onnx*", "*.plan"))
            shutil.copy(Path(__file__).with_name("identity_model.py"), repo / twin / "1" / "model.py")
            config = repo / twin / "config.pbtxt"
            config.write_text(config.read_text().replace(f'name: "{name}"', f'name: "{twin}"', 1))
        return repo

    def serve(self, repo: Path) -> trtopt.Server:
        ports = {"http_port": self.port, "grpc_port": free_port(), "metrics_port": free_port()}
        return trtopt.serve(repo, server=self.given.server, reporter=reporter(), **ports)

    def throughput(self) -> None:
        given = self.given
        load = Load(self.port, given.processes, given.connections)
        with closing(load), self.serve(self.repository(given.instances)):
            for name, (tensor, path) in self.models.items():
                for samples in given.samples:
                    rates: dict[str, list[float]] = {name: [], f"{name}.identity": []}
                    for number in range(given.rounds + 1):
                        for model in rates if number % 2 else reversed(rates):
                            rate, wrong, failed = load.rate(model, tensor, path, samples, given.seconds)
                            self.right &= not wrong and not failed
                            if wrong or failed:
                                self.note(
                                    f"{model}, {samples} a request", f"{wrong} wrong; {failed[:1]}", "none", False
                                )
                            rates[model] += [rate] if number else []
                    self._compare(name, samples, rates)

    def _compare(self, name: str, samples: int, rates: dict[str, list[float]]) -> None:
        own, identity = (statistics.median(values) for values in rates.values())
        ratio = own / max(identity, 1e-9)
        self.note(
            f"{name}, {samples} a request: images/s, and the identity's",
            f"{own:,.0f} and {identity:,.0f}: {ratio:.2f}×",
            f"≥ {CEILING}×",
            ratio >= CEILING,
        )
        self.figures[f"{name}, {samples} a request"] = {"rates": rates, "ratio": ratio}

    def first_calls(self) -> None:
        repo = self.repository(1)
        models = [name for model in self.models for name in (model, f"{model}.identity")]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for number in range(self.given.restarts + 1):
            model = models[number % len(models)]
            tensor, path = self.models[model.removesuffix(".identity")]
            with np.load(path) as file:
                [(request, _)] = requests(model, tensor, file["arrays"][:1], 1)
            with self.serve(repo):
                times = self._times(model, request)
            found[model] += [times] if number else []
        for model, pairs in found.items():
            if not pairs:
                continue
            said = ", ".join(f"{first * 1e3:.2f}/{later * 1e3:.2f}" for first, later in pairs)
            ratio = statistics.median(first / later for first, later in pairs)
            wanted = () if model.endswith(".identity") else (f"≤ {FIRST}×", ratio <= FIRST)
            self.note(f"{model}: first call/median of the next, ms", f"{said}: median {ratio:.2f}×", *wanted)
            self.figures[f"{model}, first call"] = {"ms": [[1e3 * item for item in pair] for pair in pairs]}

    def _times(self, model: str, request: bytes) -> tuple[float, float]:
        """Seconds of the first call, and the median of those after it."""
        times = []
        for _ in range(CALLS + 1):
            with closing(Client(self.port)) as client:
                client.ask(f"GET /v2/models/{model}/ready HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
                start = time.perf_counter()
                client.ask(request)
                times.append(time.perf_counter() - start)
        return times[0], statistics.median(times[1:])

    def show(self) -> None:
        print(self.figures["machine"])
        tell(("what", "measured", "wanted", "met"), self.rows, self.figures, self.given.json)


def free_port() -> int:
    with socket.socket() as item:
        item.bind((HOST, 0))
        return int(item.getsockname()[1])


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/triton_backend.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("engines", nargs="+", metavar="ENGINE")
    parser.add_argument("inputs", metavar="INPUTS.npz")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--server", default=None, help="a tritonserver; default: what trtopt serve finds")
    parser.add_argument("--instances", default=4, type=int)
    parser.add_argument("--processes", default=4, type=int, help="clients")
    parser.add_argument("--connections", default=48, type=int, help="of each client process")
    parser.add_argument(
        "--samples", default=[1], type=numbers, help="of a request; several numbers: one after the other"
    )
    parser.add_argument("--seconds", default=3.0, type=float)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--restarts", default=12, type=int)
    parser.add_argument("--json", default=None, help="a file for the figures")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(parser.parse_args(), Path(folder))
        stack.callback(bench.show)
        bench.throughput()
        bench.first_calls()
        return 0 if bench.right else 1


if __name__ == "__main__":
    sys.exit(main())
