"""Repositories of the Python backend on a real tritonserver, without a GPU: unmodified clients, every answer Session's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as helper
import pytest
from tritons import ON_CPU, command, network, png, ports, started, waiting, why_not

import trtopt
from trtopt.core.errors import NoServer, ServerFailed, UsageError
from trtopt.core.values import TensorInfo
from trtopt.recipes.loader import known_recipes, load_recipe
from trtopt.serving.installation import VARIABLE

http = pytest.importorskip("tritonclient.http", reason="tritonclient isn't installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient isn't installed")
from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: E402

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


TYPES = ("float32", "float16", "float64", "int8", "int32", "int64", "uint8", "bool")


def networks(folder: Path) -> dict[str, Path]:
    """Small ones: a network for each type, several inputs, scalars, a fixed batch, one that fails for some values."""
    node = helper.make_node
    made = {
        dtype: network(
            folder / f"{dtype}.onnx", {"x": (dtype, ["n", 3])}, {"y": (dtype, ["n", 3])}, node("Identity", ["x"], ["y"])
        )
        for dtype in TYPES
    }
    made["two"] = _two(folder / "two.onnx")
    made["scalar"] = network(
        folder / "scalar.onnx",
        {"x": ("float32", ["n", 4])},
        {"y": ("float32", [])},
        node("ReduceSum", ["x"], ["y"], keepdims=0),
    )
    made["fixed"] = network(
        folder / "fixed.onnx", {"x": ("float32", [2, 4])}, {"y": ("float32", [2, 4])}, node("Neg", ["x"], ["y"])
    )
    made["picky"] = _picky(folder / "picky.onnx")
    made["odd_names.v2"] = network(
        folder / "odd names.v2.onnx",
        {"in put:0/é": ("float32", ["n", 4]), '"q"\\': ("float32", [])},
        {"product of both": ("float32", ["n", 4]), "sum": ("float32", [])},
        node("Mul", ["in put:0/é", '"q"\\'], ["product of both"]),
        node("ReduceSum", ["product of both"], ["sum"], keepdims=0),
    )
    made["mixed"] = network(
        folder / "mixed.onnx",
        {"ids": ("int64", ["n", "length"]), "h": ("float16", ["n", "length", 8])},
        {"sums": ("float16", ["n", "length", 8]), "where": ("int64", [2, "found"])},
        node("Constant", [], ["last"], value_ints=[-1]),
        node("Cast", ["ids"], ["half"], to=10),
        node("Unsqueeze", ["half", "last"], ["column"]),
        node("Add", ["h", "column"], ["sums"]),
        node("NonZero", ["ids"], ["where"]),
    )
    return made


def _two(path: Path) -> Path:
    node = helper.make_node
    return network(
        path,
        {"a": ("float32", ["n", 4]), "i": ("int64", ["n"])},
        {"sum": ("float32", ["n", 4]), "twice": ("int64", ["n"])},
        node("Constant", [], ["one"], value_ints=[1]),
        node("Cast", ["i"], ["c"], to=1),
        node("Unsqueeze", ["c", "one"], ["u"]),
        node("Add", ["a", "u"], ["sum"]),
        node("Add", ["i", "i"], ["twice"]),
    )


def _picky(path: Path) -> Path:
    """Takes rows of a table: an index beyond it is an error of the runtime."""
    table = onnx.numpy_helper.from_array(np.arange(8, dtype=np.float32), "table")
    network(
        path,
        {"i": ("int64", ["n", 1])},
        {"y": ("float32", ["n", 1])},
        helper.make_node("Gather", ["table", "i"], ["y"]),
    )
    model = onnx.load(path)
    model.graph.initializer.append(table)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def files(folder: Path, lite0: Path) -> dict[str, Path]:
    return {**networks(folder), "photos": lite0 / "int8.engine"}


@pytest.fixture(scope="module")
def server(folder: Path, files: Mapping[str, Path]) -> Iterator[Any]:
    for name, path in files.items():
        trtopt.deploy_triton(path, repo=folder / "repo", name=name, from_images=name == "photos", **ON_CPU)
    with trtopt.serve(folder / "repo", **ports()) as running:
        yield running


class Client:
    """tritonclient, HTTP or gRPC, by arrays."""

    def __init__(self, module: Any, url: str) -> None:
        self.module, self.client = module, module.InferenceServerClient(url)

    def infer(
        self,
        model: str,
        arrays: Mapping[str, Any],
        *,
        binary: bool = True,
        outputs: Mapping[str, int] | None = None,
        **options: Any,
    ) -> Any:
        plain = {} if self.module is grpc else {"binary_data": binary}
        inputs = []
        for name, array in arrays.items():
            item = self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            item.set_data_from_numpy(array, **plain)
            inputs.append(item)
        wanted = [
            self.module.InferRequestedOutput(name, class_count=count, **plain)
            for name, count in (outputs or {}).items()
        ]
        return self.client.infer(model, inputs, outputs=wanted or None, **options)


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Any) -> Iterator[Client]:
    module = http if request.param == "http" else grpc
    made = Client(module, getattr(server, request.param))
    yield made
    made.client.close()


def _wanted(path: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    with trtopt.Session(path, backend="onnxruntime") as session:
        return session.run(arrays)


def _equal(answer: Any, wanted: Mapping[str, Any]) -> None:
    for name, array in wanted.items():
        found = answer.as_numpy(name)
        assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())
        assert found.size == array.size


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_comes_back_as_session_gives_it(client: Client, files: Mapping[str, Path], dtype: str) -> None:
    x = (np.random.default_rng(0).random((5, 3)) * 100).astype(dtype)
    _equal(client.infer(dtype, {"x": x}), _wanted(files[dtype], {"x": x}))


@pytest.mark.parametrize("dtype", sorted({*TYPES} - {"float16"}))  # JSON has no float16
def test_json_tensors_give_the_same(server: Any, files: Mapping[str, Path], dtype: str) -> None:
    x = (np.random.default_rng(1).random((2, 3)) * 100).astype(dtype)
    answer = Client(http, server.http).infer(dtype, {"x": x}, binary=False, outputs={"y": 0})
    if dtype == "float64":  # tritonserver reads their last digit inexactly
        np.testing.assert_array_max_ulp(answer.as_numpy("y"), x, 2)
    else:
        _equal(answer, _wanted(files[dtype], {"x": x}))


def test_several_inputs_and_numbers_of_each_sample(client: Client, files: Mapping[str, Path]) -> None:
    arrays = {"a": np.random.default_rng(0).random((3, 4), np.float32), "i": np.array([1, -2, 3])}
    wanted = _wanted(files["two"], arrays)
    answer = client.infer("two", {**arrays, "i": arrays["i"][:, None]})  # as one of one element
    _equal(answer, wanted)
    assert answer.as_numpy("twice").shape == (3, 1)
    only = client.infer("two", {**arrays, "i": arrays["i"][:, None]}, outputs={"twice": 0})
    assert only.as_numpy("sum") is None


def test_scalars_and_fixed_batches(client: Client, files: Mapping[str, Path]) -> None:
    x = np.random.default_rng(0).random((2, 4), np.float32)
    for model in ("scalar", "fixed"):
        _equal(client.infer(model, {"x": x}), _wanted(files[model], {"x": x}))


def test_odd_names_and_inputs_without_dimensions(client: Client, files: Mapping[str, Path]) -> None:
    x, q = np.random.default_rng(0).random((3, 4), np.float32), np.float32(2)
    wanted = _wanted(files["odd_names.v2"], {"in put:0/é": x, '"q"\\': q.reshape(())})
    _equal(client.infer("odd_names.v2", {"in put:0/é": x, '"q"\\': q.reshape(1)}), wanted)


@pytest.mark.parametrize("most", [1, 9])  # nothing but zeros: a result without elements
def test_several_types_open_sizes_and_empty_results(client: Client, files: Mapping[str, Path], most: int) -> None:
    random = np.random.default_rng(0)
    arrays = {"ids": random.integers(0, most, (2, 5)), "h": random.random((2, 5, 8)).astype(np.float16)}
    answer = client.infer("mixed", arrays)
    _equal(answer, _wanted(files["mixed"], arrays))
    assert answer.as_numpy("where").shape == (2, np.count_nonzero(arrays["ids"]))


def test_images_in_and_classes_out(client: Client, files: Mapping[str, Path]) -> None:
    image = png(300, 200)
    with trtopt.Session(files["photos"], backend="onnxruntime") as session:
        wanted = session.run({"input": session.prepare(image)[None]})
        [best] = session.run_images([image], top=3)
    row = np.frombuffer(image, np.uint8)[None]
    _equal(client.infer("photos", {"image": row}), wanted)
    [classes] = client.infer("photos", {"image": row}, outputs={"logits": 3}).as_numpy("logits")
    assert [text.decode().split(":", 2)[1:] for text in classes] == [[str(item.index), item.name] for item in best]


def test_images_of_one_request_are_rows_filled_up_with_zeros(client: Client) -> None:
    images = [png(30, 20, "JPEG", 1), png(64, 48, "PNG", 2)]
    rows = np.zeros((2, max(map(len, images))), np.uint8)
    for row, image in zip(rows, images, strict=True):
        row[: len(image)] = np.frombuffer(image, np.uint8)
    together = client.infer("photos", {"image": rows}).as_numpy("logits")
    apart = [
        client.infer("photos", {"image": np.frombuffer(image, np.uint8)[None]}).as_numpy("logits")[0]
        for image in images
    ]
    assert together.argmax(1).tolist() == [scores.argmax() for scores in apart]


X = np.zeros((1, 3), np.float32)
REFUSED: list[tuple[str, Any, dict[str, Any], str, int]] = [
    ("float32", {"x": X.astype(np.float64)}, {}, "expects 'FP32'", 400),
    ("photos", {"image": np.zeros((1, 100), np.float32)}, {}, "expects 'UINT8'", 400),
    ("float32", {"z": X}, {}, "unexpected inference input 'z'", 400),
    ("float32", {"x": X, "z": X}, {}, "expected 1 inputs but got 2", 400),
    ("two", {"a": np.zeros((1, 4), np.float32)}, {}, "missing required input(s) ['i']", 400),
    ("float32", {"x": X[0]}, {}, "unexpected shape for input 'x'", 400),
    ("float32", {"x": X[:, :2]}, {}, "Expected [-1,3], got [1,2]", 400),
    ("float32", {"x": np.zeros((33, 3), np.float32)}, {}, "batch-size must be <= 32", 400),
    ("float32", {"x": X[:0]}, {}, "byte size mismatch", 400),
    ("fixed", {"x": np.zeros((3, 4), np.float32)}, {}, "Expected [2,4], got [3,4]", 400),
    (
        "two",
        {"a": np.zeros((2, 4), np.float32), "i": np.zeros((1, 1), np.int64)},
        {},
        "does not match other inputs",
        400,
    ),
    ("float32", {"x": X}, {"outputs": {"nothing": 0}}, "unexpected inference output 'nothing'", 400),
    ("absent", {"x": X}, {}, "unknown model: 'absent'", 404),
    ("float32", {"x": X}, {"model_version": "7"}, "version 7 is not found", 404),
    ("photos", {"image": np.zeros((1, 100), np.uint8)}, {}, "isn't an image that can be decoded", 400),
    ("photos", {"image": np.zeros((1, 0), np.uint8)}, {}, "the file is empty", 400),
    ("photos", {"image": np.frombuffer(png(60, 40), np.uint8)[None, :500]}, {}, "cut off before its end", 400),
    ("picky", {"i": np.full((1, 1), 99)}, {}, "picky.onnx", 500),
]
STATUS = {400: "StatusCode.INVALID_ARGUMENT", 404: "StatusCode.NOT_FOUND", 500: "StatusCode.INTERNAL"}


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_wrong_is_refused_and_said(client: Client, number: int) -> None:
    model, arrays, options, said, status = REFUSED[number]
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, arrays, **options)
    assert said in str(raised.value.message())
    assert raised.value.status() == (str(status) if client.module is http else STATUS[status])


def test_one_bad_request_of_a_batch_is_nobody_elses_fault(server: Any) -> None:
    answers: dict[int, Any] = {}

    def ask(index: int) -> None:
        own = Client(http, server.http)
        try:
            answers[index] = own.infer("picky", {"i": np.full((1, 1), index)}).as_numpy("y").item()
        except InferenceServerException as error:
            answers[index] = error.status()

    threads = [threading.Thread(target=ask, args=(index,)) for index in (0, 1, 2, 3, 99, 4, 5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {**{index: float(index) for index in range(7)}, 99: "500"}


def test_requests_that_come_together_run_as_batches(server: Any) -> None:
    def statistics() -> tuple[int, int]:
        [found] = http.InferenceServerClient(server.http).get_inference_statistics("photos")["model_stats"]
        return found["inference_count"], found["execution_count"]

    def ask(image: Any) -> None:
        Client(http, server.http).infer("photos", {"image": image[None]})

    before, large, small = statistics(), *(np.frombuffer(png(side, side), np.uint8) for side in (2500, 40))
    with ThreadPoolExecutor(25) as pool:
        calls = [pool.submit(ask, large)]
        calls += [pool.submit(ask, small) for _ in range(24)]
        while waiting(server.metrics, "photos") < 2:  # two that wait run together
            assert not all(call.done() for call in calls)
        for call in calls:
            call.result()
    end = time.monotonic() + 20
    while (after := statistics())[0] - before[0] < 25 and time.monotonic() < end:
        time.sleep(0.05)  # Triton counts a batch after it has answered
    assert after[0] - before[0] == 25
    assert after[1] - before[1] < 25


def test_it_listens_on_this_machine_alone_and_counts(server: Any) -> None:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
        assert b"nv_inference_request_success" in answer.read()
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = {place for _, place, _, state, *_ in lines if state == "0A"}
    for address in (server.http, server.grpc, server.metrics):
        port = f"{int(address.rpartition(':')[2]):04X}"
        hosts = {place.partition(":")[0] for place in listening if place.endswith(f":{port}")}
        assert hosts
        assert all(host.endswith("0100007F") for host in hosts)  # 127.0.0.1, also as an IPv6 address


# Models of the recipes ---------------------------------------------------------------------------------------------------


def _samples(info: TensorInfo, sizes: Mapping[str, int]) -> Any:
    shape = [2, *(size if isinstance(size, int) and size > 0 else sizes["rest"] for size in info.shape[1:])]
    random = np.random.default_rng(0)
    return random.integers(0, 2, shape) if info.dtype == "int64" else random.random(shape, np.float32)


@pytest.fixture(scope="module")
def recipes(folder: Path, exported: Callable[[str], Path]) -> Iterator[tuple[Any, dict[str, Path]]]:
    """All recipes' models in one repository, and a server on it."""
    models = {name: load_recipe(name).onnx or exported(name) for name in known_recipes()}
    for name, model in models.items():
        trtopt.deploy_triton(model, repo=folder / "recipes", name=name, **ON_CPU)
    with trtopt.serve(folder / "recipes", **ports()) as running:
        yield running, models


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_is_served_as_session_runs_it(recipes: tuple[Any, dict[str, Path]], name: str) -> None:
    running, models = recipes
    with trtopt.Session(models[name], backend="onnxruntime") as session:
        arrays = {info.name: _samples(info, {"rest": 64}) for info in session.inputs}
        wanted = session.run(arrays)
    for made in (Client(http, running.http), Client(grpc, running.grpc)):
        _equal(made.infer(name, arrays), wanted)


# Starting and ending -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_accepted_requests_end(tmp_path: Path, number: int) -> None:
    path = network(
        tmp_path / "slow.onnx",
        {"x": ("float32", ["n", 400, 400])},
        {"y": ("float32", ["n", 400, 400])},
        *(helper.make_node("MatMul", [f"t{index}" if index else "x", "x"], [f"t{index + 1}"]) for index in range(30)),
        helper.make_node("Identity", ["t30"], ["y"]),
    )
    places = ports()
    process = started(command(path, **places), tmp_path / "log")
    answers: list[Any] = []

    def ask() -> None:
        client = http.InferenceServerClient(f"127.0.0.1:{places['http_port']}", network_timeout=120)
        item = http.InferInput("x", [20, 400, 400], "FP32")
        item.set_data_from_numpy(np.zeros((20, 400, 400), np.float32))
        try:
            answers.append(client.infer("slow", [item]).as_numpy("y").shape)
        except InferenceServerException as error:  # it came after the signal
            answers.append(f"{error.status()} {error.message()}")

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    while not waiting(f"127.0.0.1:{places['metrics_port']}", "slow"):  # at least one is accepted
        assert any(thread.is_alive() for thread in asking)
    os.kill(process.pid, number)
    for thread in asking:
        thread.join()
    out, _ = process.communicate(timeout=60)
    assert len(answers) == 3 and (20, 400, 400) in answers
    assert {*answers} <= {(20, 400, 400), "404 Request for unknown model: 'slow' has no available versions"}
    assert (process.returncode, out) == (0, b"stopped; every accepted request was answered\n")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", places["http_port"])).close()


def test_nobody_else_unloads_models(server: Any) -> None:
    with pytest.raises(InferenceServerException, match="restricted") as raised:
        http.InferenceServerClient(server.http).unload_model("float32")
    assert raised.value.status() == "403"
    with pytest.raises(InferenceServerException, match="restricted"):
        grpc.InferenceServerClient(server.grpc).unload_model("float32")
    assert http.InferenceServerClient(server.http).is_model_ready("float32")


def test_clients_that_go_on_are_refused_and_none_is_dropped(tmp_path: Path, files: Mapping[str, Path]) -> None:
    places = ports()
    process = started(command(files["float32"], **places), tmp_path / "log")
    said: list[str] = []
    connected = threading.Barrier(9)

    def ask() -> None:
        client = Client(http, f"127.0.0.1:{places['http_port']}")
        client.infer("float32", {"x": np.zeros((1, 3), np.float32)})
        connected.wait()
        while True:
            try:
                client.infer("float32", {"x": np.zeros((1, 3), np.float32)})
            except InferenceServerException as error:  # noqa: PERF203  (the last one)
                said.append(f"{error.status()} {error.message()}")
                return

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    connected.wait()
    process.terminate()
    for thread in asking:
        thread.join()
    assert process.wait(60) == 0
    assert said == ["404 Request for unknown model: 'float32' has no available versions"] * 8


def tritonserver_of(process: Any) -> int:
    """The process of a `trtopt serve`."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    [server] = [child for child in children if b"tritonserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return int(server)


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, files: Mapping[str, Path]) -> None:
    process = started(command(files["float32"], **ports()), tmp_path / "log")
    group = tritonserver_of(process)  # it leads the processes of its models
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while str(group) in groups():
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.1)


def groups() -> set[str]:
    """Those that the living processes are in."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, group = place.read_text().rpartition(")")[2].split()[:3]
            found |= {group} - {group if state == "Z" else ""}
    return found


def test_a_server_that_ends_by_itself_is_told(tmp_path: Path, files: Mapping[str, Path]) -> None:
    process = started([*command(files["float32"], **ports()), "--json"], tmp_path / "log")
    os.kill(tritonserver_of(process), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(out) == {"ok": False, "stopped": False, "status": -9, "answered": False}


def test_a_model_that_does_not_load_is_named(tmp_path: Path, files: Mapping[str, Path]) -> None:
    [model] = trtopt.deploy_triton(files["float32"], repo=tmp_path, name="m", **ON_CPU).models
    (model.path / "1" / "float32.onnx").write_bytes(b"damaged")
    with pytest.raises(ServerFailed, match="failed to load 'm' version 1"):
        trtopt.serve(tmp_path, **ports())


def test_a_port_that_is_taken_is_told(tmp_path: Path, server: Any) -> None:
    used = {**ports(), "http_port": int(server.http.rpartition(":")[2])}
    with pytest.raises(ServerFailed, match=r"can't listen on 127\.0\.0\.1:\d+: .*give another `http_port=`"):
        trtopt.serve(server.repo, **used)
    with urllib.request.urlopen(f"http://{server.http}/v2/health/ready") as answer:
        assert answer.status == 200


def test_without_a_server_the_line_for_docker_is_the_answer(
    tmp_path: Path, files: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("trtopt.serving.server.find_server", lambda given: None)
    with pytest.raises(NoServer) as raised:
        trtopt.serve(files["float32"], repo=tmp_path / "repo", http_port=9000, **ON_CPU)
    line = next(line for line in raised.value.lines if line.strip().startswith("docker run"))
    assert f"-p 127.0.0.1:9000:8000 -p 127.0.0.1:8001:8001 -p 127.0.0.1:8002:8002 -v {tmp_path}/repo:/models:ro" in line
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"http_port": 8001}, "three different ports"),
        ({"grpc_port": 70000}, "`grpc_port=` is 70000"),
        ({"drain": "0s"}, "at least 1s"),
        ({"server": "nowhere"}, "there is no tritonserver in nowhere"),
    ],
)
def test_options_that_can_not_be_right(server: Any, options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trtopt.serve(server.repo, **options)


@pytest.mark.parametrize("name", [None, "plain"])
def test_names_that_its_python_can_not_open(tmp_path: Path, files: Mapping[str, Path], name: str | None) -> None:
    path = tmp_path / "größe.onnx"
    path.write_bytes(files["float32"].read_bytes())
    with pytest.raises(UsageError, match=r"'größe(\.onnx)?': only ASCII"):
        trtopt.deploy_triton(path, repo=tmp_path / "repo", name=name, **ON_CPU)
    assert not (tmp_path / "repo").exists()


def test_a_folder_without_models_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model repository"):
        trtopt.serve(tmp_path)
