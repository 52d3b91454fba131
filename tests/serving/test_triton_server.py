"""The Python backend on a real tritonserver, without a GPU: unmodified clients, every answer Session's own."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import values, written
from tritons import ON_CPU, executable, ports, started, why_not

import trtopt
from trtopt.core.errors import NoServer, ServerFailed, UsageError

http = pytest.importorskip("tritonclient.http", reason="tritonclient isn't installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient isn't installed")
from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: E402

needs_server = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
TWO = """
    (float[n, 4] a, int64[n] i) => (float[n, 4] sum, int64[n] row) {
        one = Constant <value_ints: ints = [1]> ()
        table = Constant <value_ints: ints = [0, 1, 2, 3, 4, 5, 6, 7]> ()
        c = Cast <to = 1> (i)
        u = Unsqueeze (c, one)
        sum = Add (a, u)
        row = Gather (table, i)
    }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two types, one with classes, and the executable of a server."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = tmp_path_factory.mktemp("serving")
    ranges = "a:1x4,8x4,32x4;i:1,8,32"
    trtopt.build(written(TWO), folder / "two.engine", target="sm89", shapes=ranges, save_onnx=folder / "two.onnx")
    text = "(float[n,3,32,32] x) => (float[n,10] y) { h = Conv (x, w) y = Flatten (h) }"
    net = written(text, w=values(10, 3, 32, 32, scale=0.02))
    options: dict[str, Any] = {"save_onnx": folder / "photos.onnx", "classes": [f"class {n}" for n in range(10)]}
    trtopt.build(net, folder / "photos.engine", target="sm89", **options)
    executable(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Mapping[str, int]]:
    """The ports of `trtopt serve`; its end by SIGTERM is looked at."""
    repo = folder / "repo"
    trtopt.deploy_triton(folder / "two.engine", repo=repo, **ON_CPU)
    trtopt.deploy_triton(folder / "photos.engine", repo=repo, **ON_CPU)
    places = ports()
    process = started([str(repo), "--server", str(folder / "bin" / "tritonserver")], folder / "log", **places)
    yield places
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "tritonserver ended with exit status 0" in (folder / "log").read_text()


class Client:
    """tritonclient, HTTP or gRPC, by arrays."""

    def __init__(self, module: Any, port: int) -> None:
        self.module, self.client = module, module.InferenceServerClient(f"127.0.0.1:{port}")

    def infer(
        self, name: str, arrays: Mapping[str, Any], *, binary: bool = True, classes: int = 0, **options: Any
    ) -> Any:
        plain = {} if self.module is grpc else {"binary_data": binary}
        inputs = []
        for input_name, array in arrays.items():
            item = self.module.InferInput(input_name, list(array.shape), np_to_triton_dtype(array.dtype))
            item.set_data_from_numpy(array, **plain)
            inputs.append(item)
        wanted = [self.module.InferRequestedOutput("y", class_count=classes)] if classes else None
        return self.client.infer(name, inputs, outputs=wanted, **options)


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Mapping[str, int]) -> Iterator[Client]:
    made = Client(http if request.param == "http" else grpc, server[f"{request.param}_port"])
    yield made
    made.client.close()


A = np.random.default_rng(0).random((3, 4), np.float32)
ROWS = np.array([[1], [5], [2]])  # a number for each sample travels as one of one element


@needs_server
@pytest.mark.parametrize("binary", [True, False])
def test_both_types_come_back_as_session_gives_them(client: Client, folder: Path, binary: bool) -> None:
    answer = client.infer("two", {"a": A, "i": ROWS}, binary=binary)
    with trtopt.Session(folder / "two.engine", backend="onnxruntime") as session:
        wanted = session.run({"a": A, "i": ROWS[:, 0]})
    for name, array in wanted.items():
        found = answer.as_numpy(name)
        assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())


@needs_server
def test_classes_come_out_by_their_names(client: Client, folder: Path) -> None:
    pixels = np.random.default_rng(1).random((2, 3, 32, 32), np.float32)
    with trtopt.Session(folder / "photos.engine", backend="onnxruntime") as session:
        wanted = session.run({"x": pixels})["y"]
    assert client.infer("photos", {"x": pixels}).as_numpy("y").tobytes() == wanted.tobytes()
    best = client.infer("photos", {"x": pixels}, classes=1).as_numpy("y")
    names = [item[0].decode().split(":")[2] for item in best]
    assert names == [f"class {scores.argmax()}" for scores in wanted]


REFUSED: list[tuple[str, Any, dict[str, Any], str, int]] = [
    ("two", {"a": A}, {}, "missing required input(s) ['i']", 400),
    ("absent", {"a": A}, {}, "unknown model: 'absent'", 404),
    ("two", {"a": A, "i": np.full((3, 1), 99)}, {}, "two.onnx", 500),
]
STATUS = {400: "StatusCode.INVALID_ARGUMENT", 404: "StatusCode.NOT_FOUND", 500: "StatusCode.INTERNAL"}


@needs_server
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_wrong_is_refused_and_said(client: Client, number: int) -> None:
    name, arrays, options, said, status = REFUSED[number]
    with pytest.raises(InferenceServerException) as raised:
        client.infer(name, arrays, **options)
    assert said in str(raised.value.message())
    assert raised.value.status() == (str(status) if client.module is http else STATUS[status])


@needs_server
def test_one_bad_request_of_a_batch_is_nobody_elses_fault(server: Mapping[str, int]) -> None:
    answers: dict[int, Any] = {}

    def ask(index: int) -> None:
        own = Client(http, server["http_port"])
        try:
            answers[index] = own.infer("two", {"a": A[:1], "i": np.full((1, 1), index)}).as_numpy("row").item()
        except InferenceServerException as error:
            answers[index] = error.status()
        own.client.close()  # its server waits for open connections

    def count() -> int:
        with http.InferenceServerClient(f"127.0.0.1:{server['http_port']}") as asking:
            [found] = asking.get_inference_statistics("two")["model_stats"]
        return int(found["execution_count"])

    before, threads = count(), [threading.Thread(target=ask, args=(index,)) for index in (*range(8), *[99] * 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {**{index: index for index in range(8)}, 99: "500"}
    assert count() - before < 48  # some ran as batches


@needs_server
def test_it_listens_on_this_machine_alone(server: Mapping[str, int]) -> None:
    files = [Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text()]
    places = [line.split()[1:4] for text in files for line in text.splitlines()[1:]]
    listening = {local for local, _, state in places if state == "0A"}
    for port in server.values():
        hosts = {place.partition(":")[0] for place in listening if place.endswith(f":{port:04X}")}
        assert hosts and all(host.endswith("0100007F") for host in hosts)  # 127.0.0.1, also as an IPv6 address


# Starting and ending: with a script in the place of tritonserver ---------------------------------------------------------

PLAYED = """#!{python}
import http.server, signal, sys
options = dict(word.split("=") for word in sys.argv[1:])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: sys.exit(number))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(options["--http-port"])), Ready).serve_forever()
"""


@pytest.fixture
def played(tmp_path: Path) -> dict[str, Any]:
    """Options of `serve` for a small repository on a server that is ready at once and ends with a signal's number."""
    import sys

    script = tmp_path / "tritonserver"
    script.write_text(PLAYED.format(python=sys.executable))
    script.chmod(0o755)
    (tmp_path / "repo" / "two" / "1").mkdir(parents=True)
    return {"repo": tmp_path / "repo", "server": script, **ports()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_and_the_exit_status_are_passed_on(tmp_path: Path, played: dict[str, Any], number: int) -> None:
    repo, script = (str(played.pop(name)) for name in ("repo", "server"))
    process = started([repo, "--server", script], tmp_path / "log", **played)
    process.send_signal(number)
    assert process.wait(30) == number


def test_the_end_of_with_ends_the_server(played: dict[str, Any]) -> None:
    with trtopt.serve(**played) as server:
        socket.create_connection(("127.0.0.1", played["http_port"])).close()
    assert server.wait().status == signal.SIGTERM
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", played["http_port"]))


def test_a_server_that_ends_before_it_is_ready_is_told(played: dict[str, Any]) -> None:
    played["server"].write_text("#!/bin/sh\nexit 7")
    with pytest.raises(ServerFailed, match="ended with exit status 7 before it was ready"):
        trtopt.serve(**played)


def test_a_port_that_is_taken_is_told(played: dict[str, Any]) -> None:
    said = pytest.raises(ServerFailed, match=r"can't listen on 127\.0\.0\.1:\d+: .*give another `http_port=`")
    with socket.create_server(("127.0.0.1", played["http_port"])), said:
        trtopt.serve(**played)


def test_without_a_server_the_line_for_docker_is_the_answer(
    tmp_path: Path, played: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    del played["server"]
    with pytest.raises(NoServer, match="there is no tritonserver in PATH") as raised:
        trtopt.serve(**played)
    line = next(line for line in raised.value.lines if line.strip().startswith("docker run"))
    assert f"-p 127.0.0.1:{played['grpc_port']}:8001" in line and f" -v {tmp_path}/repo:/models:ro" in line
    assert raised.value.exit_code == 3 and "`server=`" in str(raised.value)


@pytest.mark.parametrize("name", ["", "m.engine"])
def test_what_is_no_repository_is_told_how_to_make_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.engine").touch()
    with pytest.raises(UsageError, match=r"no model repository.*trtopt deploy triton M\.engine --repo models"):
        trtopt.serve(tmp_path / name)
