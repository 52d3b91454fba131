"""trtopt serve beside a plain FastAPI handler, under the same clients in the same run.

Each client sends an encoded photo (or, with --arrays, what it is as an array), waits for its classes, and sends the next. The
servers take turns. Then trtopt's is sent SIGTERM in the middle of a run, and started again as soon as it has ended: what it had
accepted must be answered, and what it refuses (no connection, no model any more) is sent again. scripts/bench_serve starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tritonclient.http.aio as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

import trtopt
from trtopt.core.files import write_bytes
from trtopt.data.samples import write_crops

RECIPE, PRESET = "efficientnet-lite0", "efficientnet-lite"
Send = Callable[[bytes], Coroutine[Any, Any, list[int]]]


@dataclass
class Load:
    """What clients saw.

    Attributes:
        cpu: seconds of all cores that the server's processes took; 0: not measured.
        lost: requests that were sent and got neither an answer nor a refusal.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def tail(self) -> float:
        return float(np.percentile(self.latencies, 99))

    @property
    def cost(self) -> float:
        return self.cpu / len(self.latencies)

    def row(self, name: str) -> str:
        times = f"{np.median(self.latencies) * 1e3:.0f} / {self.tail * 1e3:.0f}"
        cost = f"{self.cost * 1e3:.1f}" if self.cpu else ""
        counts = (len(self.latencies), self.refused, len(self.lost), self.wrong)
        return f"| {' | '.join([name, f'{self.rate:.1f}', times, cost, *map(str, counts)])} |"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


class Service:
    """A server in a process of its own, ready when `until` says so."""

    def __init__(self, command: list[str], log: Path, ready: str, said: bytes = b"") -> None:
        self._file = log.open("ab")
        begin = self._file.tell()
        self.process = subprocess.Popen(command, stdout=self._file, stderr=self._file)
        deadline = time.monotonic() + 300
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} isn't ready:\n{log.read_text(errors='replace')[-3000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=5):
                if said in log.read_bytes()[begin:]:
                    return
            time.sleep(0.1)

    def cpu(self) -> float:
        """Seconds that it and all processes below it have taken so far."""
        ticks, waiting = 0, [self.process.pid]
        while waiting:
            folder = Path(f"/proc/{waiting.pop()}")
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        self._file.close()
        return status


@contextlib.asynccontextmanager
async def triton_client(port: int, clients: int, arrays: bool) -> AsyncIterator[Send]:
    client = triton.InferenceServerClient(f"127.0.0.1:{port}", conn_limit=clients, conn_timeout=300)

    async def send(body: bytes) -> list[int]:
        if arrays:
            tensor = triton.InferInput("input", [1, 3, 224, 224], "FP32")
            tensor.set_data_from_numpy(np.frombuffer(body, np.float32).reshape(1, 3, 224, 224))
        else:
            tensor = triton.InferInput("image", [1, len(body)], "UINT8")
            tensor.set_data_from_numpy(np.frombuffer(body, np.uint8)[None])
        answer = await client.infer("lite0", [tensor])
        return [int(index) for index in np.argsort(-answer.as_numpy("logits")[0])[:5]]

    try:
        yield send
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def http_client(port: int, clients: int, arrays: bool) -> AsyncIterator[Send]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:

        async def send(body: bytes) -> list[int]:
            async with session.post(f"http://127.0.0.1:{port}/{'arrays' if arrays else 'photos'}", data=body) as answer:
                answer.raise_for_status()
                return list(await answer.json())

        yield send


async def drive(
    send: Send, photos: list[tuple[bytes, int]], seconds: float, clients: int, middle: Callable[[], Any] | None = None
) -> Load:
    """So many clients for so long; `middle` runs in a thread at half time."""
    load, start = Load(), time.monotonic()
    end = start + seconds

    async def client(number: int) -> None:
        place = number
        told = False  # that the server ends: from then on it takes nothing, though connections stay open
        while time.monotonic() < end:
            body, best = photos[place % len(photos)]
            began = time.monotonic()
            while True:
                try:
                    classes = await send(body)
                except (aiohttp.ClientConnectorError, ConnectionRefusedError):  # noqa: PERF203  (sent again)
                    load.refused += 1
                    await asyncio.sleep(0.05)
                except (aiohttp.ClientError, InferenceServerException, OSError) as error:
                    said = f"{type(error).__name__}: {error}"
                    told = told or "no available versions" in said
                    if told:
                        load.refused += 1
                        await asyncio.sleep(0.5)  # as who is told to come back later
                    else:
                        load.lost.append(said)
                        break
                else:
                    told = False
                    load.latencies.append(time.monotonic() - began)
                    load.wrong += classes[0] != best
                    break
            place += clients

    async def halfway() -> None:
        if middle is not None:
            await asyncio.sleep(seconds / 2)
            await asyncio.to_thread(middle)

    await asyncio.gather(halfway(), *(client(number) for number in range(clients)))
    load.seconds = time.monotonic() - start
    return load


def prepared(folder: Path) -> tuple[Path, Path, list[tuple[bytes, Any, int]]]:
    """Engine, graph, and photos with what they are as arrays, and their best class as Session finds it."""
    model, engine, graph = folder / "model.onnx", folder / "lite0.engine", folder / "graph.onnx"
    trtopt.export(RECIPE, model, verify=False)
    trtopt.build(model, engine, target="sm89", preprocess=PRESET, classes="imagenet", save_onnx=graph)
    write_crops("imagenet-crops", folder / "photos")
    photos = []
    with trtopt.Session(engine, backend="onnxruntime") as session:
        for path in sorted((folder / "photos").iterdir())[:32]:
            content = io.BytesIO()
            Image.open(path).convert("RGB").save(content, "JPEG", quality=95)
            [[best]] = session.run_images([content.getvalue()], top=1)
            photos.append((content.getvalue(), session.prepare(content.getvalue()), best.index))
    return engine, graph, photos


def measure(folder: Path, seconds: float, clients: int, instances: int, arrays: bool) -> Iterator[str]:
    engine, graph, photos = prepared(folder)
    http, grpc, metrics, plain = free_ports(4)
    options = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics), "--name", "lite0"]
    serve = [
        sys.executable,
        "-m",
        "trtopt",
        "serve",
        str(engine),
        "--runtime",
        "onnxruntime",
        *([] if arrays else ["--from-images"]),
        "--instances",
        str(instances),
        *options,
    ]
    ours = [serve, folder / "trtopt.log", f"http://127.0.0.1:{http}/v2/health/ready", b"ready: HTTP"]
    script = Path(__file__).with_name("fastapi_server.py")
    theirs = [
        [sys.executable, str(script), str(graph), PRESET, str(plain)],
        folder / "fastapi.log",
        f"http://127.0.0.1:{plain}/ready",
    ]
    bodies = {
        "trtopt serve": [(array.tobytes() if arrays else photo, best) for photo, array, best in photos],
        "FastAPI": [(json.dumps(array.tolist()).encode() if arrays else photo, best) for photo, array, best in photos],
    }
    statuses: list[int] = []

    def run(name: str, client: Any, middle: Callable[[], Any] | None = None) -> Load:
        async def opened() -> Load:
            async with client as send:
                return await drive(send, bodies[name], seconds, clients, middle)

        return asyncio.run(opened())

    rounds: dict[str, list[Load]] = {"trtopt serve": [], "FastAPI": []}
    for _ in range(2):
        for name, command, client in (
            ("trtopt serve", ours, triton_client(http, clients, arrays)),
            ("FastAPI", theirs, http_client(plain, clients, arrays)),
        ):
            service = Service(*command)
            before = service.cpu()
            rounds[name].append(run(name, client))
            rounds[name][-1].cpu = service.cpu() - before
            status = service.stop()
            statuses += [status] if command is ours else []
    started = [Service(*ours)]

    def restart() -> None:
        statuses.append(started[-1].stop())
        started.append(Service(*ours))

    restarted = run("trtopt serve", triton_client(http, clients, arrays), restart)
    statuses.append(started[-1].stop())

    yield f"{clients} clients for {seconds:.0f} s each, {machine()}"
    for name, sent in bodies.items():
        kind = ("binary array" if name == "trtopt serve" else "JSON") if arrays else "JPEG"
        yield f"{name}: {kind}, {len(sent[0][0]) // 1024} KB a request"
    yield ""
    yield "| server | images/s | p50 / p99, ms | CPU ms an image | answered | refused, sent again | lost | wrong |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, loads in rounds.items():
        for number, load in enumerate(loads, 1):
            yield load.row(f"{name}, round {number}")
    yield restarted.row("trtopt serve, SIGTERM and restart in the middle")
    yield ""
    pairs = list(zip(rounds["trtopt serve"], rounds["FastAPI"]))
    for what, ratios in (
        ("images/s", [own.rate / other.rate for own, other in pairs]),
        ("p99", [own.tail / other.tail for own, other in pairs]),
        ("images for each second of CPU", [other.cost / own.cost for own, other in pairs]),
    ):
        yield f"{what}, trtopt serve ({instances} instances) / FastAPI: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    yield f"exit statuses of trtopt serve: {', '.join(map(str, statuses))}"
    for reason in sorted(set(restarted.lost))[:5]:
        yield f"lost: {reason}"


def machine() -> str:
    names = ("onnxruntime", "fastapi", "uvicorn", "tritonclient", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, load {load:.1f} at the end, Python {platform.python_version()}, {versions}; "
        f"{datetime.date.today()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--instances", type=int, default=os.cpu_count(), help="of trtopt's; default: one per core")
    parser.add_argument(
        "--arrays", action="store_true", help="arrays instead of photos: binary to trtopt's, JSON to FastAPI's"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for line in measure(Path(folder), given.seconds, given.clients, given.instances, given.arrays):
            print(line, flush=True)
            lines.append(line)
    if given.output:
        write_bytes(given.output, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
