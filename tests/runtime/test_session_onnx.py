"""Session with backend="onnxruntime": a service developed without a GPU, on the graph that the build kept."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from PIL import Image

from trtopt.core.errors import Busy, DataError, DeviceError, EngineMismatch, UsageError
from trtopt.core.values import TensorInfo
from trtopt.cuda.device import Probe
from trtopt.data.decoding import decode
from trtopt.data.preprocess import Preprocess
from trtopt.recipes.loader import load_recipe
from trtopt.runtime.images import Prediction
from trtopt.runtime.session import Session

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

PHOTOS = {22: "bald eagle", 251: "Dalmatian", 559: "folding chair", 741: "prayer rug", 949: "strawberry"}


def _photos() -> dict[int, Path]:
    files = {int(path.stem.rpartition("_")[2]): path for path in load_recipe("efficientnet-lite0").labelled_files()}
    return {label: files[label] for label in PHOTOS}


@pytest.fixture(scope="module")
def batch() -> NDArray[np.float32]:
    """The photos as the network takes them."""
    prepare = Preprocess.load("efficientnet-lite").fitted(TensorInfo("input", "float32", (-1, 3, 224, 224)))
    return np.stack([prepare(decode(path.read_bytes())) for path in _photos().values()]).astype(np.float32)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["fp16", "int8"])
def session(request: pytest.FixtureRequest, lite0: Path) -> Any:
    with Session(lite0 / f"{request.param}.engine", backend="onnxruntime") as opened:
        yield opened


def test_it_describes_itself_as_the_engine_does(session: Session) -> None:
    assert session.backend == "onnxruntime"
    assert [(item.name, item.dtype, item.shape) for item in session.inputs] == [("input", "float32", (-1, 3, 224, 224))]
    assert [(item.name, item.dtype) for item in session.outputs] == [("logits", "float32")]
    assert session.profiles[0]["input"].max == (32, 3, 224, 224)
    assert session.classes is not None
    assert session.memory().gpu == 0


def test_arrays_in_arrays_out(session: Session, batch: NDArray[np.float32]) -> None:
    found = session.run({"input": batch})
    assert set(found) == {"logits"}
    assert type(found["logits"]) is np.ndarray
    assert found["logits"].shape == (5, 1000)
    assert list(found["logits"].argmax(1)) == list(PHOTOS)
    one = session.run({"input": batch[3:4]})["logits"]
    np.testing.assert_allclose(one, found["logits"][3:4], rtol=0, atol=1e-3)


def test_the_onnx_file_gives_the_same(session: Session, batch: NDArray[np.float32]) -> None:
    with Session(session.engine.with_suffix(".onnx"), backend="onnxruntime") as direct:
        assert direct.profiles == ()
        np.testing.assert_array_equal(
            direct.run({"input": batch[:2]})["logits"], session.run({"input": batch[:2]})["logits"]
        )
        with pytest.raises(UsageError, match="no manifest says how"):
            direct.run_images([_photos()[22]])


def test_a_bound_call_reads_what_its_arrays_hold(session: Session, batch: NDArray[np.float32]) -> None:
    held = batch[:1].copy()
    with session.bind({"input": held}) as bound:
        for image in batch[:2]:
            held[0] = image
            np.testing.assert_array_equal(bound()["logits"], session.run({"input": held})["logits"])


def test_torch_tensors_in_torch_tensors_out(session: Session, batch: NDArray[np.float32]) -> None:
    torch = pytest.importorskip("torch")
    expected = session.run({"input": batch[:2]})["logits"]
    found = session.run({"input": torch.from_numpy(batch[:2])})["logits"]
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), expected)
    channels_last = torch.from_numpy(batch[:2]).to(memory_format=torch.channels_last)
    np.testing.assert_array_equal(session.run({"input": channels_last})["logits"].numpy(), expected)
    out = torch.zeros(2, 1000)
    assert session.run({"input": batch[:2]}, out={"logits": out})["logits"] is out
    np.testing.assert_array_equal(out.numpy(), expected)


def test_results_go_into_the_callers_arrays(session: Session, batch: NDArray[np.float32]) -> None:
    expected = session.run({"input": batch[:2]})["logits"]
    out = np.full((2, 2000), np.nan, np.float32)[:, ::2]  # not contiguous
    assert session.run({"input": batch[:2]}, out={"logits": out})["logits"] is out
    np.testing.assert_array_equal(out, expected)
    larger = np.zeros((4, 1000), np.float32)
    with pytest.raises(UsageError, match=r"out\['logits'\] has shape 4x1000; .* 1x1000"):
        session.run({"input": batch[:1]}, out={"logits": larger})
    assert not larger.any()  # a single row isn't repeated into it
    with pytest.raises(UsageError, match="out has 'scores'; the engine gives 'logits'"):
        session.run({"input": batch[:1]}, out={"scores": larger})
    with pytest.raises(UsageError, match="float64"):
        session.run({"input": batch[:1]}, out={"logits": np.zeros((1, 1000))})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "missing 'input'; the engine takes 'input'"),
        ({"image": np.zeros((1, 3, 224, 224), np.float32)}, "unknown 'image', missing 'input'"),
        ({"input": np.zeros((1, 3, 224, 224))}, "'input' is float64; the engine takes float32"),
        ({"input": np.zeros((3, 224, 224), np.float32)}, "rank 3; the engine takes rank 4"),
        ({"input": np.zeros((1, 3, 200, 224), np.float32)}, "1x3x200x224 are outside the engine's shapes"),
        ({"input": np.zeros((33, 3, 224, 224), np.float32)}, "1x3x224x224 to 32x3x224x224"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_here(session: Session, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        session.run(inputs)


def test_what_needs_a_gpu_says_so(session: Session, batch: NDArray[np.float32]) -> None:
    with pytest.raises(UsageError, match="need a GPU"):
        session.time({"input": batch[:1]})
    with pytest.raises(UsageError, match="runs on the CPU"):
        session.run({"input": batch[:1]}, stream=7)


def test_photos_get_their_names(session: Session) -> None:
    photos = _photos()
    found = session.run_images(
        [str(photos[22]), photos[251], photos[559].read_bytes(), decode(photos[741].read_bytes())], top=3
    )  # type: ignore[list-item]
    assert isinstance(found, list)
    assert [(best[0].index, best[0].name) for best in found] == list(PHOTOS.items())[:4]
    for best in found:
        assert len(best) == 3
        assert all(isinstance(item, Prediction) for item in best)
        assert 1 >= best[0].score >= best[1].score >= best[2].score > 0
    with pytest.raises(DataError, match="image 1: isn't an image"):
        session.run_images([photos[22], b"no image"])
    with pytest.raises(UsageError, match="top is 0"):
        session.run_images([photos[22]], top=0)


def test_threads_futures_and_asyncio_at_once(lite0: Path, batch: NDArray[np.float32]) -> None:
    with Session(lite0 / "fp16.engine", backend="onnxruntime", queue=3) as session:
        expected = [session.run({"input": batch[i : i + 1]})["logits"] for i in range(5)]

        def caller(start: int) -> int:
            right = 0
            for step in range(3):
                i = (start + step) % 5
                got = session.run({"input": batch[i : i + 1]})["logits"]
                right += bool(np.array_equal(got, expected[i]))
            return right

        async def served() -> list[dict[str, Any]]:
            return await asyncio.gather(*(session.run_async({"input": batch[i : i + 1]}) for i in range(5)))

        with ThreadPoolExecutor(4) as pool:
            counts = [pool.submit(caller, start) for start in range(4)]
            futures = [session.submit({"input": batch[i : i + 1]}) for i in range(5)]  # more than the queue: it waits
            results = asyncio.run(served())
            assert [count.result(60) for count in counts] == [3] * 4
        for i in range(5):
            np.testing.assert_array_equal(futures[i].result(60)["logits"], expected[i])
            np.testing.assert_array_equal(results[i]["logits"], expected[i])
        with pytest.raises(UsageError, match="unknown 'x'"):
            session.submit({"x": batch}).result(60)


class _Held:
    """Makes the session's runner wait, so that a queue fills up surely."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from trtopt.runtime.onnx_slot import OnnxSlot

        self.begun, self.go = threading.Event(), threading.Event()
        real = OnnxSlot.run

        def run(slot: Any, *arguments: Any) -> Any:
            self.begun.set()
            assert self.go.wait(60)
            return real(slot, *arguments)

        monkeypatch.setattr(OnnxSlot, "run", run)


def test_a_full_queue_is_told(lite0: Path, batch: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch) -> None:
    held, one = _Held(monkeypatch), {"input": batch[:1]}
    with Session(lite0 / "fp16.engine", backend="onnxruntime", queue=2) as session:
        futures = [session.submit(one), session.submit(one)]
        with pytest.raises(Busy, match="all 2 are in use"):
            session.submit(one, timeout=0.05)
        assert held.begun.wait(60)
        with pytest.raises(Busy):
            session.run(one, timeout=0.05)
        held.go.set()
        futures.append(session.submit(one))
        assert all(future.result(60)["logits"].shape == (1, 1000) for future in futures)


@pytest.mark.parametrize("finish", [True, False])
def test_close_finishes_or_cancels_what_waits(
    lite0: Path, batch: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch, finish: bool
) -> None:
    held, one = _Held(monkeypatch), {"input": batch[:1]}
    session = Session(lite0 / "fp16.engine", backend="onnxruntime")
    running, waiting = session.submit(one), session.submit(one)
    assert held.begun.wait(60)
    threading.Timer(0.2, held.go.set).start()
    session.close(finish=finish)
    assert running.result(0)["logits"].shape == (1, 1000)  # close waited for it
    assert waiting.cancelled() is not finish
    session.close()
    for call in (session.run, session.submit):
        with pytest.raises(DeviceError, match="closed"):
            call(one)
    with pytest.raises(DeviceError, match="closed"):
        asyncio.run(session.run_async(one))


def test_it_never_engages_by_itself(lite0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe(reason="no NVIDIA driver is installed"))
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*backend='onnxruntime'"):
        Session(lite0 / "fp16.engine")


def test_an_engine_without_its_graph_is_told_what_to_do(lite0: Path, tmp_path: Path) -> None:
    engine = tmp_path / "moved.engine"
    shutil.copy(lite0 / "fp16.engine", engine)
    with pytest.raises(UsageError, match="`save_onnx=`, or give an ONNX file"):
        Session(engine, backend="onnxruntime")
    shutil.copy(lite0 / "fp16.engine.json", f"{engine}.json")
    with pytest.raises(UsageError, match=r"fp16.onnx doesn't exist; take it along .*`save_onnx=`"):
        Session(engine, backend="onnxruntime")
    shutil.copy(lite0 / "int8.onnx", tmp_path / "fp16.onnx")
    with pytest.raises(EngineMismatch, match=r"the engine was built from .*`save_onnx=`"):
        Session(engine, backend="onnxruntime")


def _of(path: Path, *nodes: onnx.NodeProto, **shapes: Sequence[int | str]) -> Path:
    """A model of such nodes: the last shape is its output's."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", tensors[:-1], tensors[-1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_inputs_that_disagree_in_a_size_are_told_which(tmp_path: Path) -> None:
    path = _of(
        tmp_path / "m.onnx", helper.make_node("Mul", ["a", "b"], ["y"]), a=["n", "k"], b=["n", "k"], y=["n", "k"]
    )
    a, b = np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)
    with Session(path, backend="onnxruntime") as session:
        for out in (None, {"y": np.zeros((2, 3), np.float32)}):
            with pytest.raises(UsageError, match=r"'k' is 3 in input 'a' and 4 in 'b'; m.onnx can't be run on that"):
                session.run({"a": a, "b": b}, out=out)
        assert session.run({"a": a, "b": a[:1]})["y"].shape == (
            2,
            3,
        )  # the model can do that all the same


def test_without_inputs_there_is_one_batch(tmp_path: Path) -> None:
    path = _of(tmp_path / "m.onnx", helper.make_node("Constant", [], ["y"], value_floats=[1.0]), y=[1])
    with Session(path, backend="onnxruntime") as session:
        assert session.run_batches({})["y"] == 1


def test_a_call_that_an_exception_cut_off_keeps_nobody_out(
    lite0: Path, batch: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C, or a worker's timeout that throws into its thread, may strike before the slot is given back."""
    with Session(lite0 / "fp16.engine", backend="onnxruntime") as session:
        monkeypatch.setattr(session._slots, "give", lambda slot: None)
        session.run({"input": batch[:1]})
        monkeypatch.undo()
        assert session.run({"input": batch[:1]}, timeout=5)["logits"].shape == (1, 1000)


@pytest.mark.parametrize(
    ("image", "instead"),
    [
        (Image.new("RGB", (4, 4)), r"np.asarray\(image.convert\('RGB'\)\)"),
        (io.BytesIO(b"x"), r"its bytes, image.read\(\)"),
        (None, "is needed$"),
    ],
)
def test_images_of_other_kinds_are_told_how_to_be_given(session: Session, image: Any, instead: str) -> None:
    with pytest.raises(UsageError, match=f"image 0 is .*{instead}"):
        session.run_images([image])


def test_a_tensor_of_pixels_is_told_how_to_be_given(session: Session) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"image 0 is Tensor; .*: give image.numpy\(\)"):
        session.run_images([torch.zeros(4, 4, 3, dtype=torch.uint8)])


def test_a_number_of_numpys_says_how_many_classes(session: Session) -> None:
    [best] = session.run_images([np.zeros((9, 9, 3), np.uint8)], top=np.int64(2))  # type: ignore[arg-type]
    assert len(best) == 2
