"""Session with backend="onnxruntime": a service developed without a GPU, on the graph that the build kept."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from trtopt.core.errors import DataError, DeviceError, EngineMismatch, UsageError
from trtopt.core.values import TensorInfo
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
