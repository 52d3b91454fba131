"""Requests from strangers to a real tritonserver: refused in so many words, the service stays up, its memory bounded.

One `trtopt serve` for the whole module; after each request it must be ready and answer a good one.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx.helper as helper
import pytest
from graphs import model as graph, node, values
from hostile_data import PHOTO, bad_images, large_png, saved
from PIL import Image
from tritons import ON_CPU, command, network, ports, started, why_not

import trtopt
from trtopt.data.decoding import decode

grpc = pytest.importorskip("grpc", reason="tritonclient[grpc] isn't installed")
protocol = pytest.importorskip("tritonclient.grpc", reason="tritonclient isn't installed")

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

MIB = 1 << 20
SLACK = 400 * MIB  # beyond what the server has when it is ready; the corpus' bombs claim gigabytes


class Service(NamedTuple):
    pid: int
    http: int
    grpc: int
    log: Path

    def processes(self) -> list[int]:
        found = [self.pid]
        for parent in found:
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found

    def resident(self) -> int:
        """Bytes of the command, tritonserver and its models' processes."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.processes()]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def send(self, request: bytes, port: int = 0) -> bytes:
        """What comes back until the answer is whole, the connection closes, or nothing more comes."""
        found = b""
        with socket.create_connection(("127.0.0.1", port or self.http), timeout=60) as connection:
            try:
                connection.sendall(request)
                while more := connection.recv(1 << 16):
                    found += more
                    head, whole, body = found.partition(b"\r\n\r\n")
                    sizes = [
                        line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length")
                    ]
                    if whole and sizes and len(body) >= int(sizes[0]):
                        break
            except ConnectionError:
                pass
        return found

    def fine(self) -> bool:
        ready = self.send(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        return ready.startswith(b"HTTP/1.1 200") and self.send(infer(GOOD)).startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = tmp_path_factory.mktemp("hostile")
    tensors = {"x": ("float32", ["n", 3])}, {"y": ("float32", ["n", 3])}
    network(folder / "three.onnx", *tensors, helper.make_node("Identity", ["x"], ["y"]))
    tensors = {"x": ("float32", ["n", "k"])}, {"y": ("float32", ["n", "k"])}
    network(folder / "open.onnx", *tensors, helper.make_node("Identity", ["x"], ["y"]))
    network(
        folder / "whole.onnx",
        {"i": ("int64", [2, 2])},
        {"y": ("int64", [2, 2])},
        helper.make_node("Identity", ["i"], ["y"]),
    )
    trtopt.build(
        graph(
            [node("Conv", "x w", "h"), node("Flatten", "h", "y")],
            inputs={"x": ["n", 3, 32, 32]}, outputs={"y": ["n", 10]}, weights={"w": values(10, 3, 32, 32, scale=0.02)},
        ),
        folder / "photos.engine", target="sm89", save_onnx=folder / "photos.onnx", preprocess="efficientnet-lite",
    )  # fmt: skip
    for name in ("three.onnx", "open.onnx", "whole.onnx", "photos.engine"):
        trtopt.deploy_triton(folder / name, repo=folder / "repö", from_images=name == "photos.engine", **ON_CPU)
    places = ports()
    words = command(folder / "repö", **places)  # its Python reads paths as ASCII
    words.remove("--runtime"), words.remove("onnxruntime")
    process = started(words, folder / "log")
    try:
        yield Service(process.pid, places["http_port"], places["grpc_port"], folder / "log")
    finally:
        process.terminate()
        assert process.wait(60) == 0


def infer(body: bytes, *headers: str, model: str = "three", length: int | str | None = None) -> bytes:
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", *headers]
    lines += [] if length == "" else [f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def asked(**changes: Any) -> bytes:
    """The JSON of a request for `three`; a change to None leaves a field out."""
    fields = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3], **changes}
    return json.dumps({"inputs": [{key: value for key, value in fields.items() if value is not None}]}).encode()


def binary(content: bytes, size: Any, *, model: str = "three", **changes: Any) -> bytes:
    head = asked(data=None, parameters={"binary_data_size": size}, **changes)
    return infer(head + content, f"Inference-Header-Content-Length: {len(head)}", model=model)


def chunked(body: bytes, size: int) -> bytes:
    parts = (body[start : start + size] for start in range(0, len(body), size))
    whole = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return infer(whole, "Transfer-Encoding: chunked", length="")


GOOD = asked()
GET = "GET /v2/health/ready HTTP/1.1\r\n"
CHUNKED = "Transfer-Encoding: chunked"
HEADER = "Inference-Header-Content-Length"
CLOSED, REFUSED, UNKNOWN, BAD = "", "400", "404", "500"  # 500: how tritonserver answers JSON that isn't a request

# name → request, status (CLOSED: no answer, the connection closes), words of the answer
HOSTILE: dict[str, tuple[bytes, str, str]] = {
    # Lines and headers
    "no_request": (b"\x00\xff\x01 no request\r\n\r\n", CLOSED, ""),
    "unknown_method": (b"FOO /v2 HTTP/1.1\r\n\r\n", "405", "Not Allowed"),
    "another_method": (b"GET /v2/models/three/infer HTTP/1.1\r\nHost: x\r\n\r\n", "405", "Not Allowed"),
    "tls": (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(190), CLOSED, ""),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", CLOSED, ""),
    "long_line": (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n", CLOSED, ""),
    "long_header": (f"{GET}X: {'a' * 1_000_000}\r\n\r\n".encode(), CLOSED, ""),
    "no_colon": (f"{GET}no colon\r\n\r\n".encode(), CLOSED, ""),
    "many_headers": ((GET + "X: a\r\n" * 50_000 + "\r\n").encode(), "200", ""),
    # Lengths
    "length_negative": (infer(GOOD, length=-1), CLOSED, ""),
    "length_no_number": (infer(GOOD, length="abc"), CLOSED, ""),
    "length_overflow": (infer(GOOD, length=2**70), CLOSED, ""),
    "length_too_short": (infer(GOOD, length=10), BAD, "failed to parse the request JSON"),
    "length_none": (infer(GOOD, length=""), REFUSED, "Expected 12, got 0"),
    "lengths_two": (infer(GOOD, "Content-Length: 5"), BAD, "failed to parse the request JSON"),
    "header_negative": (infer(GOOD, f"{HEADER}: -1"), REFUSED, "should be in range"),
    "header_huge": (infer(GOOD, f"{HEADER}: {10**20}"), REFUSED, "should be in range"),
    "header_beyond": (infer(GOOD, f"{HEADER}: {len(GOOD) + 1}"), REFUSED, "should be in range"),
    "header_no_number": (infer(GOOD, f"{HEADER}: abc"), REFUSED, "Expected 12, got"),
    "header_within": (infer(GOOD, f"{HEADER}: 5"), BAD, "failed to parse the request JSON"),
    # Chunks
    "chunks": (chunked(GOOD, 7), "200", ""),
    "chunk_negative": (infer(b"-5\r\nabc\r\n0\r\n\r\n", CHUNKED, length=""), CLOSED, ""),
    "chunk_no_number": (infer(b"zz\r\nabc\r\n0\r\n\r\n", CHUNKED, length=""), CLOSED, ""),
    # JSON
    "nothing": (infer(b""), REFUSED, "Expected 12, got 0"),
    "no_inputs": (infer(b"{}"), BAD, "'inputs'"),
    "null": (infer(b"null"), BAD, "'inputs'"),
    "cut": (infer(GOOD[:-3]), BAD, "failed to parse"),
    "utf16": (infer(GOOD.decode().encode("utf-16")), BAD, "failed to parse"),
    "deep": (infer(b"[" * 1000 + b"]" * 1000), BAD, "'inputs'"),
    "deep_beyond_a_stack_of_8_mib": (infer(b'{"a":' * 400_000), BAD, "failed to parse"),
    "number_beyond_double": (infer(GOOD.replace(b"[1, 2", b"[1e999, 2")), BAD, "Number too big"),
    "number_of_digits": (infer(GOOD.replace(b"[1, 2", b"[" + b"9" * 300_000 + b", 2")), BAD, "Number too big"),
    "integer_beyond": (
        infer(asked(name="i", datatype="INT64", shape=[2, 2], data=[2**63, 0, 0, 0]), model="whole"), BAD, "integer",
    ),
    "integer_float": (
        infer(asked(name="i", datatype="INT64", shape=[2, 2], data=[1.5, 0, 0, 0]), model="whole"), BAD, "integer",
    ),
    "nan": (infer(GOOD.replace(b"[1, 2", b"[NaN, 2")), "200", "NaN"),
    "text_for_numbers": (infer(asked(data=["a", 2, 3])), BAD, "'data'"),
    "less_data": (infer(asked(data=[1, 2])), BAD, "true shape of 'data'"),
    "more_data": (infer(asked(data=[1, 2, 3] + [4] * 10_000)), BAD, "true shape of 'data'"),
    "no_data": (infer(asked(data=None)), REFUSED, "no field is set"),
    "an_input_twice": (infer(GOOD.replace(b"[{", b"[" + GOOD[12:-2] + b", {")), REFUSED, "already exists"),
    "many_outputs": (
        infer(GOOD[:-1] + b', "outputs": [' + b'{"name": "z"}, ' * 30_000 + b'{"name": "z"}]}'), REFUSED, "output 'z'",
    ),
    # Tensors
    "size_beyond": (binary(bytes(12), 1200), REFUSED, "expecting 1188 additional bytes"),
    "size_less": (binary(bytes(12), 8), REFUSED, "unexpected additional input data"),
    "size_negative": (binary(bytes(12), -12), BAD, "'binary_data_size'"),
    "size_2_63": (binary(bytes(12), 2**63), REFUSED, "additional bytes"),
    "size_2_64": (binary(bytes(12), 2**64), BAD, "'binary_data_size'"),
    "size_text": (binary(bytes(12), "12"), BAD, "'binary_data_size'"),
    "tensor_cut": (binary(bytes(7), 12), REFUSED, "expecting 5 additional bytes"),
    "tensor_longer": (binary(bytes(120), 12), REFUSED, "unexpected additional input data"),
    "shape_negative": (binary(bytes(12), 12, shape=[-1, 3]), BAD, "'shape'"),
    "shape_batch_beyond_32_bits": (binary(bytes(12), 12, shape=[2**40, 3]), REFUSED, "rank 1; the engine takes rank 2"),
    "shape_beyond_64_bits": (binary(bytes(12), 12, shape=[2**64, 3]), BAD, "'shape'"),
    "shape_huge": (binary(b"", 0, shape=[1, 2**40], model="open"), REFUSED, "byte size mismatch"),
    "shape_float": (binary(bytes(12), 12, shape=[1.5, 3]), BAD, "'shape'"),
    "shape_nested": (binary(bytes(12), 12, shape=[[1], 3]), BAD, "'shape'"),
    "shape_none": (binary(bytes(12), 12, shape=None), BAD, "'shape'"),
    "shape_of_many": (binary(bytes(12), 12, shape=[1] * 100_000), REFUSED, "unexpected shape"),
    "type_wrong": (binary(bytes(24), 24, datatype="FP64"), REFUSED, "'FP64', but model 'three' expects 'FP32'"),
    "type_unknown": (binary(bytes(12), 12, datatype="FP33"), REFUSED, "expects 'FP32'"),
    "type_number": (binary(bytes(12), 12, datatype=7), BAD, "'datatype'"),
    "type_bytes": (binary(bytes(12), 12, datatype="BYTES"), REFUSED, "expects 'FP32'"),
    "empty_tensor": (binary(b"", 0, shape=[1, 0], model="open"), "200", '"shape":[1,0]'),
    # Names
    **{
        f"model_{number}": (infer(GOOD, model=name), UNKNOWN, "ot ")
        for number, name in enumerate(
            ("../three", "%2e%2e%2fthree", "%2e%2e/%2e%2e/etc/passwd", "..%5cthree", "three%00", "%", "%zz", "", "<script>")
        )
    },
    "version_up": (infer(GOOD, model="three/versions/.."), UNKNOWN, "Not Found"),
    "version_huge": (infer(GOOD, model=f"three/versions/{10**20}"), REFUSED, "version should be an integral value"),
    # Compression
    "gzip": (infer(gzip.compress(GOOD), "Content-Encoding: gzip"), "200", ""),
    "gzip_cut": (infer(gzip.compress(GOOD)[:-12], "Content-Encoding: gzip"), BAD, "failed to parse"),
    "gzip_garbage": (infer(b"garbage", "Content-Encoding: gzip"), REFUSED, "got 0"),
    "gzip_of_64_mib": (infer(gzip.compress(bytes(64 * MIB), 9), "Content-Encoding: gzip"), BAD, "document is empty"),
    "unknown_encoding": (infer(GOOD, "Content-Encoding: br"), "501", "Unsupported compression"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bound(service: Service) -> int:
    return service.resident() + SLACK


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_request_is_refused_and_the_next_one_answered(service: Service, bound: int, name: str) -> None:
    request, status, words = HOSTILE[name]
    answer = service.send(request)
    if status == CLOSED:
        assert answer == b""
    else:
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:300]
        assert words in answer.decode(errors="replace")
    assert service.fine()
    assert service.resident() < bound


def _image(content: bytes) -> bytes:
    size = len(content)
    return binary(content, size, model="photos", name="image", datatype="UINT8", shape=[1, size])


def _images() -> Iterator[tuple[str, bytes]]:
    photo = Image.fromarray(PHOTO)
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "cmyk.jpg", saved("JPEG", photo.convert("CMYK"))
    yield "turned.jpg", saved("JPEG", photo, exif=exif)
    yield "one_pixel.png", saved("PNG", photo.crop((0, 0, 1, 1)))
    yield "animated.gif", saved("GIF", photo, save_all=True, append_images=[photo.rotate(90)])
    yield "wide.png", saved("PNG", Image.fromarray(np.arange(96 * 128, dtype=np.uint16).reshape(96, 128)))
    yield "20000.png", large_png(20_000)
    yield "html", b"<html>"
    yield from ((name, content) for name, content in bad_images() if content)


def test_images_are_answered_or_refused_as_the_decoder_says(service: Service, bound: int) -> None:
    wrong = []
    for name, content in _images():
        found = decode(content)
        status, words = ("400", found) if isinstance(found, str) else ("200", '"y"')
        answer = service.send(_image(content))
        if not answer.startswith(f"HTTP/1.1 {status} ".encode()) or words not in json_text(answer):
            wrong.append((name, status, words, answer[:300]))
    assert not wrong
    assert service.fine()
    assert service.resident() < bound


def json_text(answer: bytes) -> str:
    """The error that an answer holds, else its body."""
    body = answer.partition(b"\r\n\r\n")[2]
    found = json.loads(body)
    return str(found.get("error", body.decode()))


GRPC: dict[str, tuple[Mapping[str, Any], str, str]] = {
    "good": ({}, "OK", ""),
    "negative": ({"shape": (-1, 3)}, "INVALID_ARGUMENT", "byte size mismatch"),
    "both_negative": ({"shape": (-1, -3)}, "INVALID_ARGUMENT", "unexpected shape"),
    "negative_in_open": ({"model": "open", "shape": (1, -3)}, "INVALID_ARGUMENT", "byte size mismatch"),
    "no_shape": ({"shape": ()}, "INVALID_ARGUMENT", "no shape"),
    "huge_batch": ({"shape": (2**40, 3)}, "INVALID_ARGUMENT", "rank 1; the engine takes rank 2"),
    "cut": ({"raw": (bytes(7),)}, "INVALID_ARGUMENT", "Expected 12, got 7"),
    "nothing": ({"raw": ()}, "INVALID_ARGUMENT", "unable to find data"),
    "oversized": ({"shape": (1, 8 << 20), "raw": (bytes(32 << 20),)}, "INVALID_ARGUMENT", "unexpected shape"),
    "no_type": ({"datatype": ""}, "INVALID_ARGUMENT", "expects 'FP32'"),
    "bytes": ({"datatype": "BYTES", "raw": (b"\xff\xff\xff\x7f" + bytes(8),)}, "INVALID_ARGUMENT", "expects 'FP32'"),
    "model_up": ({"model": "../three"}, "NOT_FOUND", "unknown model"),
    "version_up": ({"version": "../1"}, "INVALID_ARGUMENT", "integral value"),
    "empty_tensor": ({"model": "open", "shape": (1, 0), "raw": (b"",)}, "OK", ""),
}


@pytest.fixture(scope="module")
def stub(service: Service) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc}", [("grpc.max_send_message_length", -1)]) as channel:
        yield protocol.service_pb2_grpc.GRPCInferenceServiceStub(channel)


def _told(call: Any, request: Any) -> tuple[str, str]:
    try:
        call(request, timeout=30)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


@pytest.mark.parametrize("name", GRPC)
def test_a_bad_message_is_refused_and_the_next_one_answered(service: Service, bound: int, stub: Any, name: str) -> None:
    given, status, words = GRPC[name]
    request = protocol.service_pb2.ModelInferRequest(
        model_name=given.get("model", "three"), model_version=given.get("version", "")
    )
    request.inputs.add(name="x", datatype=given.get("datatype", "FP32"), shape=given.get("shape", (1, 3)))
    request.raw_input_contents.extend(given.get("raw", (bytes(12),)))
    code, said = _told(stub.ModelInfer, request)
    assert (code, words in said) == (status, True), said
    assert service.fine()
    assert service.resident() < bound


def test_what_is_no_grpc_is_closed(service: Service) -> None:
    for content in (
        bytes(range(256)) * 20,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(5000),
    ):
        with socket.create_connection(("127.0.0.1", service.grpc), timeout=30) as connection:
            connection.sendall(content)
        assert service.fine()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/repository/models/three/unload", {}),
        ("/v2/repository/index", {}),
        ("/v2/systemsharedmemory/region/a/register", {"key": "/x", "byte_size": 10}),
        ("/v2/logging", {"log_verbose_level": 9}),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ],
)
def test_what_reaches_beyond_requests_is_for_serve_alone(service: Service, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    answer = service.send(head + content)
    assert answer.startswith(b"HTTP/1.1 403 ") and b"restricted" in answer


def test_nor_by_grpc(stub: Any) -> None:
    messages = protocol.service_pb2
    for call, request in (
        (stub.SystemSharedMemoryRegister, messages.SystemSharedMemoryRegisterRequest(name="a", key="/x", byte_size=10)),
        (stub.CudaSharedMemoryStatus, messages.CudaSharedMemoryStatusRequest()),
        (stub.LogSettings, messages.LogSettingsRequest()),
        (stub.TraceSetting, messages.TraceSettingRequest()),
        (stub.RepositoryModelUnload, messages.RepositoryModelUnloadRequest(model_name="three")),
    ):
        code, said = _told(call, request)
        assert code == "UNAVAILABLE" and "restricted" in said


def test_chunks_for_more_than_a_stack_of_8_mib(service: Service) -> None:
    """Each takes 16 bytes of tritonserver's stack, and about a kilobyte that is kept: hence after all that count memory."""
    assert service.send(chunked(GOOD + b" " * 550_000, 1)).startswith(b"HTTP/1.1 200 ")
    assert service.fine()


def test_a_model_whose_process_dies_is_loaded_again(service: Service) -> None:
    """Of a shape whose bytes, counted in 64 bits, are 16: Triton lets it pass, and its Python backend ends."""
    for model, last in (("open", binary(bytes(16), 16, shape=[1, 2**62 + 4], model="open")), ("three", None)):
        before = service.processes()
        if last is not None:
            assert service.send(last).startswith(b"HTTP/1.1 500 ")
        else:
            [process] = [pid for pid in before if f"/{model}/1/model.py" in Path(f"/proc/{pid}/cmdline").read_text()]
            os.kill(process, 9)
        good = binary(bytes(12), 12, model=model)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not service.send(good).startswith(b"HTTP/1.1 200 "):
            time.sleep(0.1)
        assert service.fine()
        assert f"a process of model '{model}' ended; loading it again" in service.log.read_text()
