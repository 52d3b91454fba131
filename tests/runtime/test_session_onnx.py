"""A service developed without a GPU: the graph that the build kept in ONNX Runtime; images, and processes that are forked."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch  # noqa: TID251
from graphs import conv_relu, written
from PIL import Image
from world import PHOTO, World, crops, has, net, samples

from trtopt.builder.construction import build
from trtopt.core.errors import DataError, DeviceError, EngineError, EngineMismatch, UsageError
from trtopt.runtime.images import best
from trtopt.runtime.inference import run
from trtopt.runtime.onnx_slot import OnnxSlot
from trtopt.runtime.session import Session

ORT = ("--backend", "onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one net: named.engine with names of its classes, bare.engine without preprocessing."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    made = tmp_path_factory.mktemp("images")
    onnx.save(net(), made / "net.onnx")
    (made / "classes.txt").write_text("".join(f"name {number}\n" for number in range(16)))
    common: dict[str, Any] = {"fp16": True, "target": "sm89", "shapes": ["x:1x3x32x32,2x3x32x32,4x3x32x32"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTOPT_CACHE", str(made / "cache"))
        build(
            made / "net.onnx",
            made / "named.engine",
            preprocess="imagenet",
            classes=made / "classes.txt",
            save_onnx=made / "named.onnx",
            **common,
        )
        build(made / "net.onnx", made / "bare.engine", save_onnx=made / "bare.onnx", **common)
    return made


@pytest.fixture
def session(folder: Path) -> Any:
    with Session(folder / "named.engine", backend="onnxruntime") as opened:
        yield opened


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def test_classes_come_with_names_and_without(session: Session, folder: Path) -> None:
    [best] = session.run_images([PHOTO], top=3)
    assert [item.name for item in best] == [f"name {item.index}" for item in best]
    assert sorted((item.score for item in best), reverse=True) == [item.score for item in best]
    assert len(session.run_images([PHOTO], top=np.int64(99))[0]) == 16  # type: ignore[arg-type]
    manifest = json.loads((folder / "named.engine.json").read_text())
    session.classes = None
    assert str(session.run_images([PHOTO], top=1)[0][0]).startswith(f"class {best[0].index} ")
    session.classes = tuple(manifest["classes"][:5])  # of another model: no name is better than a wrong one
    assert session.run_images([PHOTO], top=1)[0][0].name is None


def test_only_classes_are_ranked(folder: Path, tmp_path: Path) -> None:
    """As the manifest says; without it, or with one from before there were kinds, whatever may be scores."""

    def given(**described: Any) -> Any:
        manifest = json.loads((folder / "named.engine.json").read_text()) | described
        (tmp_path / "e.engine.json").write_text(json.dumps(manifest))
        (tmp_path / "named.onnx").write_bytes((folder / "named.onnx").read_bytes())
        (tmp_path / "e.engine").write_bytes((folder / "named.engine").read_bytes())
        with Session(tmp_path / "e.engine", backend="onnxruntime") as opened:
            return opened.run_images([PHOTO]), run(tmp_path / "e.engine", images=[PHOTO], backend="onnxruntime").ranked

    for kinds in ({"y": "classes"}, None, {}):
        [best], [ranked] = given(output_kinds=kinds)
        assert best == list(ranked.predictions)
    for kind in ("embedding", "other"):
        outputs, nothing = given(output_kinds={"y": kind})
        assert outputs["y"].shape == (1, 16)
        assert nothing == ()


def test_any_number_of_images(session: Session) -> None:
    nine = crops(9)
    one_by_one = [session.run_images([image])[0][0].index for image in nine]
    for one in (nine[0], _encoded(Image.fromarray(nine[0]))):  # a list isn't needed for one
        assert [best[0].index for best in session.run_images(one)] == one_by_one[:1]
    for given in (nine, tuple(nine), iter(nine), np.stack(nine)):
        assert [best[0].index for best in session.run_images(given)] == one_by_one


def test_a_broken_file_among_good_ones_is_named(session: Session, tmp_path: Path) -> None:
    good = _encoded(Image.fromarray(PHOTO), "JPEG")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(good[:3000])
    with pytest.raises(DataError, match=r"cut.jpg: a JPEG cut off"):
        session.run_images([good, cut, PHOTO])
    for bad, why in ((b"", "the file is empty"), (b"no image", "isn't an image")):
        with pytest.raises(DataError, match=f"^image 1: {why}"):
            session.run_images([good, bad, PHOTO])
    assert len(session.run_images([good])) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("photo.jpg", "the image photo.jpg doesn't exist"),
        (PHOTO[:, :, 0], r"image 0 is uint8 \(512, 512\); uint8 height x width x 3"),
        (None, "images is NoneType; a list"),
        ([], "there are no images"),
        (np.zeros((0, 8, 8, 3), np.uint8), "there are no images"),
        ([3], "image 0 is int; a path, an encoded image as bytes, or a uint8 array"),
        ([PHOTO, Image.fromarray(PHOTO)], r"image 1 is Image; a path.*np.asarray\(image.convert\('RGB'\)\)"),
        ([io.BytesIO(b"x")], r"image 0 is .*its bytes, image.read\(\)"),
        ([None], "image 0 is .*is needed$"),
        ([torch.zeros(4, 4, 3, dtype=torch.uint8)], r"image 0 is Tensor; .*: give image.numpy\(\)"),
        ([PHOTO[:, :, 0]], r"image 0 is uint8 \(512, 512\); uint8 height x width x 3"),
        ([PHOTO.astype(np.float32)], "image 0 is float32"),
        (["no.jpg"], "the image no.jpg doesn't exist"),
    ],
)
def test_what_is_no_list_of_images_is_told(session: Session, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        session.run_images(given)
    for top in (0, "3"):
        with pytest.raises(UsageError, match="top is"):
            session.run_images([PHOTO], top=top)  # type: ignore[arg-type]


def test_without_preprocessing_the_way_out_is_told(folder: Path) -> None:
    with Session(folder / "bare.engine", backend="onnxruntime") as session:
        with pytest.raises(
            UsageError, match="its manifest has no preprocessing; build it with `preprocess=`, or give arrays"
        ):
            session.run_images([PHOTO])
        assert session.run({"x": samples(2)})["y"].shape == (2, 16)


def test_scores_that_are_none_are_an_error(session: Session) -> None:
    """FP16 that overflows gives NaN; a best class of those would be a lie, and NaN is no JSON."""
    masked = np.array([1.0, -np.inf, 2.0])
    assert [item.index for item in best(session, masked)] == [2, 0, 1]
    for bad in (np.nan, np.inf):
        with pytest.raises(EngineError, match="1 of 3 scores as NaN or infinity"):
            best(session, np.array([1.0, bad, 2.0]))


# Arrays ----------------------------------------------------------------------------------------------------------


def test_it_is_as_the_engine_and_as_its_graph_alone(session: Session) -> None:
    assert (session.backend, session.memory().gpu) == ("onnxruntime", 0)
    assert session.profiles[0]["x"].max == (4, 3, 32, 32)
    held = samples(2)
    with (
        Session(session.engine.with_suffix(".onnx"), backend="onnxruntime") as direct,
        session.bind({"x": held}) as step,
    ):
        assert direct.profiles == ()
        for count in range(3):
            held[:] = samples(4)[count : count + 2]
            np.testing.assert_array_equal(direct.run({"x": held})["y"], session.run({"x": held})["y"])
            np.testing.assert_array_equal(step()["y"], session.run({"x": held})["y"])
        with pytest.raises(UsageError, match="no manifest says how"):
            direct.run_images([PHOTO])
    with pytest.raises(UsageError, match="need a GPU"):
        session.time({"x": held})
    with pytest.raises(UsageError, match="runs on the CPU"):
        session.run({"x": held}, stream=7)


def test_results_go_into_the_callers_arrays_and_come_as_tensors(session: Session) -> None:
    given = samples(2)
    expected = session.run({"x": given})["y"]
    for layout in (torch.contiguous_format, torch.channels_last):
        found = session.run({"x": torch.from_numpy(given).to(memory_format=layout)})["y"]
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(found.numpy(), expected)
    for out in (torch.zeros(2, 16), np.full((2, 32), np.nan, np.float32)[:, ::2]):  # not contiguous
        assert session.run({"x": given}, out={"y": out})["y"] is out
        np.testing.assert_array_equal(np.asarray(out), expected)
    larger = np.zeros((4, 16), np.float32)
    for wrong, message in (
        ({"y": larger}, r"out\['y'\] has shape 4x16; .* 1x16"),
        ({"scores": larger}, "out has 'scores'; the engine gives 'y'"),
        ({"y": np.zeros((1, 16))}, "float64"),
    ):
        with pytest.raises(UsageError, match=message):
            session.run({"x": given[:1]}, out=wrong)
    assert not larger.any()  # a single row isn't repeated into it


@pytest.mark.parametrize("finish", [True, False])
def test_close_finishes_or_cancels_what_waits(folder: Path, monkeypatch: pytest.MonkeyPatch, finish: bool) -> None:
    begun, go, real, one = threading.Event(), threading.Event(), OnnxSlot.run, {"x": samples(1)}

    def run(slot: Any, *arguments: Any) -> Any:  # waits, so that a queue fills up surely
        begun.set()
        assert go.wait(60)
        return real(slot, *arguments)

    monkeypatch.setattr(OnnxSlot, "run", run)
    session = Session(folder / "named.engine", backend="onnxruntime")
    running, waiting = session.submit(one), session.submit(one)
    assert begun.wait(60)
    threading.Timer(0.2, go.set).start()
    session.close(finish=finish)
    assert running.result(0)["y"].shape == (1, 16)  # close waited for it
    assert waiting.cancelled() is not finish
    session.close()
    for call in (session.run, session.submit, lambda inputs: asyncio.run(session.run_async(inputs))):
        with pytest.raises(DeviceError, match="closed"):
            call(one)


def test_an_engine_without_its_graph_is_told_what_to_do(folder: Path, tmp_path: Path) -> None:
    engine = tmp_path / "moved.engine"
    shutil.copy(folder / "named.engine", engine)
    with pytest.raises(UsageError, match="`save_onnx=`, or give an ONNX file"):
        Session(engine, backend="onnxruntime")
    shutil.copy(folder / "named.engine.json", f"{engine}.json")
    with pytest.raises(UsageError, match=r"named.onnx doesn't exist; take it along .*`save_onnx=`"):
        Session(engine, backend="onnxruntime")
    onnx.save(conv_relu(), tmp_path / "named.onnx")
    with pytest.raises(EngineMismatch, match=r"the engine was built from .*`save_onnx=`"):
        Session(engine, backend="onnxruntime")
    engine.write_bytes(b"another")
    with pytest.raises(EngineMismatch, match=r"sha256 \w{16}…, the manifest says \w{16}…"):
        Session(engine, backend="onnxruntime")


def test_without_inputs_there_is_one_batch(tmp_path: Path) -> None:
    onnx.save(written("() => (float[1] y) { y = Constant<value_floats = [1.0]>() }"), tmp_path / "m.onnx")
    with Session(tmp_path / "m.onnx", backend="onnxruntime") as session:
        assert session.run_batches({})["y"] == 1


# Processes -------------------------------------------------------------------------------------------------------


def test_after_a_fork_what_is_true_is_said(session: Session) -> None:
    """Really forked: ONNX Runtime would wait for ever for threads that the child hasn't got."""
    inputs = {"x": samples(2)}
    step = session.bind(inputs)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        said = []
        for call in (lambda: session.run(inputs), step):
            with pytest.raises(DeviceError) as refused:
                call()
            said.append(str(refused.value))
        session.close()
        there.send(said)

    process = context.Process(target=child)
    process.start()
    assert here.poll(30), "the child hangs"
    first, second = here.recv()
    process.join(30)
    has(first, "before the process forked", "open", "'spawn'", "ONNX Runtime's threads")
    has(second, "before the process forked", "open", "'spawn'")
    assert session.run(inputs)["y"].shape == (2, 16)


# The command line ------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_commands_say_what_to_type(world: World, folder: Path) -> None:
    """In a process that sees no GPU, wherever this runs."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRTOPT_CACHE": str(world.folder / "cache")}
    for arguments, words in (
        (("run", "named.engine", "--images", str(world.photos)), ("running named.engine", "never taken by itself")),
        (("bench", "named.engine"), ("measuring named.engine", "trtopt run named.engine …")),
        (("bench", "named.engine", *ORT), ("measuring named.engine", "runs on the CPU")),
    ):
        found = subprocess.run(
            [sys.executable, "-m", "trtopt", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode == 1
        assert found.stdout == ""
        assert found.stderr.count("\n") == 1, found.stderr
        has(found.stderr, "error: ", "needs an NVIDIA GPU", "--backend onnxruntime", *words)
    message = world.refused("run", folder / "named.onnx", "--images", world.photos)
    has(message, "named.onnx is an ONNX model, not an engine", "trtopt build", "--backend onnxruntime")


def test_a_classifier_that_gives_nan_ranks_nothing(world: World) -> None:
    model = net()
    weights = next(item for item in model.graph.initializer if item.name == "w2")
    weights.CopyFrom(onnx.numpy_helper.from_array(np.full((16, 16, 3, 3), np.nan, np.float32), "w2"))
    onnx.save(model, world.folder / "nan.onnx")
    found = world.run("run", world.folder / "nan.onnx", *ORT, "--input", world.arrays, "--json")
    assert found.status == 0, found.err
    result = json.loads(found.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["ranked"] == []
    assert result["outputs"][0]["not_finite"] == 40 * 16
