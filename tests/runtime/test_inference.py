"""trtopt run: arrays and photos through an engine's graph without a GPU, what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import written
from numpy.typing import NDArray
from PIL import Image
from world import Heard, World, has

import trtopt
from trtopt.core.errors import DataError, OutputError, UsageError
from trtopt.core.values import ShapeRange
from trtopt.data.preprocess import Preprocess
from trtopt.runtime.inference import run
from trtopt.runtime.session import Session

ORT = ("--backend", "onnxruntime")
AtMost = Callable[..., None]


@pytest.fixture
def at_most(monkeypatch: pytest.MonkeyPatch) -> AtMost:
    """Profiles for the sessions that are opened then: of each the smallest and the largest shape of every input."""
    opened = Session.__init__

    def given(*profiles: dict[str, Any]) -> None:
        def init(session: Session, *values: Any, **options: Any) -> None:
            opened(session, *values, **options)
            session.profiles = tuple(
                {name: ShapeRange(low, high, high) for name, (low, high) in profile.items()} for profile in profiles
            )

        monkeypatch.setattr(Session, "__init__", init)

    return given


def _written(path: Path, text: str) -> Path:
    onnx.save(written(text, 18), path)
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """a (n×3 float32), b (n×3 int64) → "/sum" = a + b + 1, total (a scalar)."""
    model = _written(
        tmp_path / "two.onnx",
        "(float[n,3] a, int64[n,3] b) => (float[n,3] sum, float total) <float[3] ones = {1, 1, 1}> "
        "{ c = Cast<to = 1>(b) d = Add(a, c) sum = Add(d, ones) total = ReduceSum<keepdims = 0>(sum) }",
    )
    proto = onnx.load(model)
    proto.graph.output[0].name = proto.graph.node[2].output[0] = proto.graph.node[3].input[0] = "/sum"
    onnx.save(proto, model)
    return model


A: NDArray[np.float32] = np.arange(6, dtype=np.float32).reshape(2, 3)
B: NDArray[np.int64] = np.full((2, 3), 10)


def test_arrays_by_name_are_run_and_written(world: World, two: Path) -> None:
    np.save(world.folder / "a.npy", A)
    np.save(world.folder / "b.npy", B)
    named = [f"{name}={world.folder / name}.npy" for name in "ab"]
    found = world.run("run", two, "--input", named[0], "--input", named[1], "-o", world.output / "results", *ORT)
    assert found.status == 0, found
    has(found.out, "/sum: float32 2x3, 11 to 16", "total: float32 scalar, 81 to 81", "1 call: the first", " ms")
    np.testing.assert_array_equal(np.load(world.output / "results/_sum.npy"), A + 11)
    assert np.load(world.output / "results/total.npy") == 81
    assert set(world.contents()) == {"results", "results/_sum.npy", "results/total.npy"}
    np.savez(world.folder / "both.npz", a=A, b=B)
    packed = world.run("run", two, "--input", world.folder / "both.npz", *ORT, "--json")
    assert packed.status == 0, packed
    result = json.loads(packed.out)
    assert [(item["name"], item["shape"], item["file"]) for item in result["outputs"]] == [
        ("/sum", [2, 3], None),
        ("total", [], None),
    ]
    assert result["backend"] == "onnxruntime"
    assert len(result["milliseconds"]) == 1
    assert world.run("run", two, "--input", *named, *ORT).status == 0  # several after one option


def test_the_api_takes_arrays_and_gives_them(two: Path) -> None:
    found = run(two, input={"a": A, "b": B}, backend="onnxruntime")
    np.testing.assert_array_equal(found.arrays["/sum"], A + 11)
    assert found.ok
    assert found.ranked == ()  # two outputs and no names: nothing says that these are classes
    assert isinstance(found, trtopt.RunResult)
    heard = Heard()
    run(two, input={"a": A, "b": B}, backend="onnxruntime", top=3, reporter=heard)
    assert heard.warnings == ["`top=` has no effect: no output scores classes"]
    with pytest.raises(UsageError, match="`device=1` is a GPU, and `backend='onnxruntime'` runs on the CPU"):
        run(two, input={"a": A, "b": B}, backend="onnxruntime", device=1)
    odd = run(two, input={"a": np.where(A == 3, np.nan, A), "b": B.astype(np.int32)}, backend="onnxruntime")
    assert [(item.not_finite, item.minimum, item.maximum) for item in odd.outputs] == [(1, 11, 16), (1, None, None)]


def test_types_are_converted_within_their_kind_and_said(world: World, two: Path) -> None:
    np.savez(world.folder / "wide.npz", a=A.astype(np.float64), b=B.astype(np.int32))
    found = world.run("run", two, "--input", world.folder / "wide.npz", *ORT)
    assert found.status == 0, found
    has(found.err, "a: converted from float64 to float32", "b: converted from int32 to int64")
    for arrays, said in (
        ({"a": A.astype(np.float64) * 1e300, "b": B}, "'a' has float64 values that float32 can't hold"),
        ({"a": A, "b": B + 0.5}, "'b' has dtype float64, the engine takes int64"),
    ):
        np.savez(world.folder / "wrong.npz", **arrays)
        has(world.refused("run", two, "--input", world.folder / "wrong.npz", "-o", world.output / "new", *ORT), said)
        assert not (world.output / "new").exists()


def test_bfloat16_goes_through_files(world: World) -> None:
    model = _written(world.folder / "half.onnx", "(bfloat16[n,3] x) => (bfloat16[n,3] y) { y = Identity(x) }")
    np.save(world.folder / "x.npy", (A / 3).astype(ml_dtypes.bfloat16))
    found = world.run("run", model, "--input", world.folder / "x.npy", "-o", world.output, *ORT)
    assert found.status == 0, found
    has(found.out, "y: bfloat16 2x3")
    np.testing.assert_array_equal(
        np.load(world.output / "y.npy"), (A / 3).astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_wrong_arrays_are_refused(world: World, two: Path) -> None:
    np.save(world.folder / "a.npy", A)
    np.savez(world.folder / "c.npz", a=A, c=B)
    (world.folder / "cut.npy").write_bytes((world.folder / "a.npy").read_bytes()[:90])
    (world.folder / "cut.npz").write_bytes(b"PK\x03\x04")
    folder = world.folder
    has(world.refused("run", two, "--input", folder / "a.npy", *ORT), "has a, b", "NAME=x.npy", ".npz")
    has(world.refused("run", two, "--input", f"a={folder}/a.npy", *ORT), "missing 'b'", "the engine takes 'a', 'b'")
    has(world.refused("run", two, "--input", folder / "c.npz", *ORT), "unknown 'c', missing 'b'")
    twice = ["--input", f"a={folder}/a.npy"] * 2
    has(world.refused("run", two, *twice, *ORT), "gives 'a' twice")
    has(world.refused("run", two, "--input", f"a={folder}/cut.npy", *ORT), "cut.npy can't be read as .npy")
    has(world.refused("run", two, "--input", folder / "cut.npz", *ORT), "cut.npz can't be read as .npz")
    has(world.refused("run", two, "--input", folder / "none.npy", *ORT), "none.npy")
    has(world.refused("run", two, *ORT), "one of --data and --images")
    has(world.refused("run", two, "--input", "x.npy", "--images", "y.jpg", *ORT), "one of --data and --images")
    has(world.refused("run", two, "--input", f"a={folder}/a.npy", "--top", 0, *ORT), "--top is 0")
    (folder / "file").write_text("")
    has(world.refused("run", two, "--input", f"a={folder}/a.npy", "-o", folder / "file", *ORT), "can't make the folder")
    has(world.refused("run", two, "--images", world.photos, *ORT), "can't take images: it has 2 inputs", "--data")


# Where samples lie ------------------------------------------------------------------------------------------------------


def _values(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("batch", "most", "count", "calls"),
    [("n", 4, 9, 3), ("n", 9, 9, 1), ("1", 1, 3, 3), ("4", 4, 6, 2), ("4", 4, 2, 1)],
)
def test_each_output_is_cut_and_joined_where_its_samples_lie(
    tmp_path: Path, at_most: AtMost, batch: str, most: int, count: int, calls: int
) -> None:
    """More of this is in tests/data/test_rebatch.py."""
    nodes = "y = Neg(x) z = Transpose<perm = [2, 0, 1]>(x) s = Constant<value_ints = [-1, 5]>() w = Reshape(x, s)"
    model = _written(tmp_path / "m.onnx", f"(float[{batch},3,5] x) => (float y, float z, float w) {{ {nodes} }}")
    proto = onnx.load(model)
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    onnx.save(proto, model)
    if batch == "n":
        at_most({"x": [(1, 3, 5), (most, 3, 5)]})
    given = _values(count, 3, 5)
    found = run(model, data=given, backend="onnxruntime")
    assert len(found.milliseconds) == calls
    with Session(model, backend="onnxruntime") as session:
        again = session.run_batches({"x": given})
    for arrays in (found.arrays, again):
        np.testing.assert_array_equal(arrays["y"], -given)
        np.testing.assert_array_equal(arrays["z"], given.transpose(2, 0, 1))
        np.testing.assert_array_equal(arrays["w"], given.reshape(-1, 5))


SHARED = "(float[n,3] x) => (float[n,3] y, float m) { y = Neg(x) m = ReduceMean<keepdims = 0>(x) }"


@pytest.mark.parametrize(
    "text",
    [
        SHARED,
        "(float[n,3] x) => (float[r,3] y, float[n,3] z) { z = Neg(x) y = Concat<axis = 0>(x, z) }",
        "(float[n,3] x) => (float[n,n] y) { t = Transpose<perm = [1, 0]>(x) y = MatMul(x, t) }",
        "(float[n,3,2] x) => (float[r,2] y) <int64[2] s = {-1,2}> { t = Transpose<perm=[1,0,2]>(x) y = Reshape(t, s) }",
        "(float[n,3] x) => (int64[2,k] y) { y = NonZero(x) }",
    ],
    ids=["mean", "two after each other", "of each pair", "rows of all", "found ones"],
)
def test_what_cannot_be_cut_is_refused_before_anything_runs(tmp_path: Path, at_most: AtMost, text: str) -> None:
    model = _written(tmp_path / "m.onnx", text)
    rest = (3, 2) if "n,3,2" in text else (3,)
    at_most({"x": [(1, *rest), (4, *rest)]})
    ran: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", lambda *_: ran.append(1))
        with pytest.raises(
            UsageError, match=r"no axis of output '[ym]' .* counts samples.*: give 4 samples.*`limit=4`"
        ):
            run(model, data=_values(5, *rest), backend="onnxruntime", output=tmp_path / "out")
    assert not ran and not list(tmp_path.glob("out/*"))
    whole, wanted = run(model, data=_values(5, *rest), limit=4, backend="onnxruntime"), _values(5, *rest)[:4]
    for name, array in zip(whole.arrays, onnxruntime.InferenceSession(model).run(None, {"x": wanted})):
        np.testing.assert_array_equal(whole.arrays[name], array, strict=True)
    at_most({"x": [(8, *rest), (8, *rest)]})
    with pytest.raises(UsageError, match="give 8 samples"):  # which a batch that is filled up would change
        run(model, data=wanted, backend="onnxruntime")


GRAPH = (
    "(float[nodes,3] x, int64[2,edges] e) => (float[nodes,3] y) <int64[1] a = {0}, int64[1] b = {1}> "
    "{ s = Gather<axis = 0>(e, a) f = Squeeze(s, a) g = Gather<axis = 0>(x, f) y0 = ReduceSum<keepdims = 1>(g, a) "
    "y = Add(x, y0) }"
)


def test_a_graph_is_one_sample_with_a_result_for_each_node(tmp_path: Path) -> None:
    model = _written(tmp_path / "m.onnx", GRAPH)
    nodes, edges = _values(7, 3), np.array([[0, 1, 6, 2, 2], [1, 2, 3, 4, 5]])
    wanted = nodes + nodes[edges[0]].sum(0)
    one = run(model, data={"x": nodes, "e": edges}, backend="onnxruntime")
    np.testing.assert_allclose(one.arrays["y"], wanted, rtol=1e-5)
    several = {"x": np.stack([nodes, nodes + 1]), "e": np.stack([edges, edges])}
    two = run(model, data=several, backend="onnxruntime")
    assert two.arrays["y"].shape == (2, 7, 3)
    assert len(two.milliseconds) == 2
    np.testing.assert_allclose(two.arrays["y"][0], wanted, rtol=1e-5)
    (tmp_path / "graphs").mkdir()
    for number, extra in enumerate((0, 1, 2)):
        np.savez(tmp_path / f"graphs/{number}.npz", x=np.concatenate([nodes, _values(extra, 3)]), e=edges)
    with pytest.raises(DataError, match="x has shapes 1x7x3, 1x8x3, 1x9x3, which one array can't hold"):
        run(model, data=tmp_path / "graphs", backend="onnxruntime")
    first = run(model, data=tmp_path / "graphs", limit=1, backend="onnxruntime")
    np.testing.assert_allclose(first.arrays["y"], wanted, rtol=1e-5)


@pytest.mark.parametrize("given", [3.5, object(), [object()], b"ab", [None]])
def test_what_is_no_array_is_refused_by_name(two: Path, given: object) -> None:
    with pytest.raises(UsageError, match=r"`data=` holds \w+; an array, a file, a mapping of input names"):
        run(two, input=given, backend="onnxruntime")


def test_a_name_before_an_npz_is_refused(two: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 3), np.float32))
    with pytest.raises(UsageError, match=r"an \.npz has the names of its arrays itself: give `data='.*a\.npz'`"):
        run(two, data=f"x={tmp_path / 'a.npz'}", backend="onnxruntime")


# Images -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """A model of images (n×3×4×4), by its nodes and outputs, with a preprocessing as an engine's manifest names it."""
    opened = Session.__init__

    def init(session: Session, *values: Any, **options: Any) -> None:
        opened(session, *values, **options)
        session.preprocess = Preprocess.load({"scale": 0.1})

    monkeypatch.setattr(Session, "__init__", init)

    def made(batch: str, outputs: str, nodes: str) -> Path:
        return _written(tmp_path / "m.onnx", f"(float[{batch},3,4,4] x) => ({outputs}) {{ {nodes} }}")

    return made  # type: ignore[return-value]


PIXELS = np.random.default_rng(1).integers(0, 256, (11, 4, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize(("batch", "calls"), [("n", 2), ("1", 11), ("4", 3)])
def test_a_call_on_images_is_timed_as_a_call(pictures: Any, tmp_path: Path, batch: str, calls: int) -> None:
    nodes = "t = Transpose<perm = [2, 0, 1, 3]>(x) s = Constant<value_ints = [4, -1, 12]>() y = Reshape(t, s)"
    model = pictures(batch, f"float[4,{batch},12] y", nodes)
    found = run(model, images=PIXELS, backend="onnxruntime", output=tmp_path / "out")
    assert len(found.milliseconds) == calls
    assert found.arrays["y"].shape == (4, 11, 12)
    with Session(model, backend="onnxruntime") as session:
        prepared = np.stack([session.prepare(image) for image in PIXELS])
    np.testing.assert_array_equal(found.arrays["y"], prepared.transpose(2, 0, 1, 3).reshape(4, 11, 12))
    np.testing.assert_array_equal(np.load(tmp_path / "out/y.npy"), found.arrays["y"])
    assert json.loads((tmp_path / "out/images.json").read_bytes()) == [f"image {n}" for n in range(11)]
    assert [item.shape for item in found.outputs] == [(4, 11, 12)]
    few = run(model, images=PIXELS, limit=3, backend="onnxruntime")
    np.testing.assert_array_equal(few.arrays["y"], found.arrays["y"][:, :3])


def test_one_image_comes_without_a_list(pictures: Any, tmp_path: Path) -> None:
    model = pictures("n", "float[n,3,4,4] y", "y = Neg(x)")
    Image.fromarray(PIXELS[0]).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    for image in (PIXELS[0], tmp_path / "a.png", content, bytearray(content), memoryview(content)):
        assert run(model, images=image, backend="onnxruntime").arrays["y"].shape == (1, 3, 4, 4)
    with pytest.raises(UsageError, match="images is int; a list of images, or one, is needed"):
        run(model, images=3, backend="onnxruntime")


def test_images_come_by_as_many_as_the_least_batch_asks_for(pictures: Any, at_most: AtMost) -> None:
    model = pictures("n", "float[n,3,4,4] y", "y = Neg(x)")
    at_most({"x": ((16, 3, 4, 4), (32, 3, 4, 4))})
    found = run(model, images=np.concatenate([PIXELS, PIXELS[:5]]), backend="onnxruntime")
    assert len(found.milliseconds) == 1 and found.arrays["y"].shape == (16, 3, 4, 4)


def test_outputs_whose_names_give_one_file_are_kept_apart(tmp_path: Path) -> None:
    model = _written(tmp_path / "m.onnx", "(float[n,3] x) => (float[n,3] y, float[n,3] z) { y = Neg(x) z = Abs(x) }")
    proto = onnx.load(model)
    for value, node, name in zip(proto.graph.output, proto.graph.node, ("a/y", "a:y")):
        value.name = node.output[0] = name
    onnx.save(proto, model)
    run(model, data={"x": -A}, backend="onnxruntime", output=tmp_path / "out")
    np.testing.assert_array_equal(np.load(tmp_path / "out/a_y.npy"), A)
    np.testing.assert_array_equal(np.load(tmp_path / "out/a_y_.npy"), A)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a_y.npy", "a_y_.npy"]


def classifier(pictures: Any) -> Path:
    nodes = "a = Constant<value_ints = [2, 3]>() y = ReduceMean<keepdims = 0>(x, a)"
    return pictures("n", "float[n,3] y", nodes)  # type: ignore[no-any-return]


def test_classes_of_images_are_written_beside_their_scores(pictures: Any, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    model, options = classifier(pictures), {"backend": "onnxruntime", "classes": tmp_path / "names.txt"}
    found = run(model, images=[*PIXELS, b"no"], top=1, output=tmp_path / "out", **options)
    assert [(item.sample, len(item.predictions)) for item in found.ranked] == [(f"image {n}", 1) for n in range(11)]
    assert [item.predictions[0].index for item in found.ranked] == found.arrays["y"].argmax(-1).tolist()
    assert {item.predictions[0].name for item in found.ranked} <= {"red", "green", "blue"}
    assert not found.ok and [item.name for item in found.skipped] == ["image 11"]
    written = json.loads((tmp_path / "out/predictions.json").read_bytes())
    assert [item["sample"] for item in written] == list(found.images) == [f"image {n}" for n in range(11)]
    assert sorted(map(Path, map(str, found.files))) == [tmp_path / "out/predictions.json", tmp_path / "out/y.npy"]
    other = run(model, images=PIXELS, output=tmp_path / "out", output_kind=["y=embedding"], **options)
    assert other.ranked == ()
    assert (tmp_path / "out/images.json").exists()
    with pytest.raises(UsageError, match=r"`classes=` gives 2 names; output 'y' has 3"):
        run(model, images=PIXELS, backend="onnxruntime", classes=["a", "b"])
    with pytest.raises(UsageError, match="there is no output 'z'"):
        run(model, images=PIXELS, backend="onnxruntime", output_kind={"z": "other"})


def test_what_the_table_shows_of_samples_and_of_photos(world: World, pictures: Any) -> None:
    (world.folder / "names.txt").write_text("red\ngreen\nblue\n")
    command, folder = (
        ("run", classifier(pictures), *ORT, "--classes", world.folder / "names.txt"),
        world.folder / "mine",
    )
    for count, said in ((11, True), (8, False)):
        np.save(world.folder / "x.npy", np.zeros((count, 3, 4, 4), np.float32))
        shown = world.run(*command, "--data", world.folder / "x.npy").out
        assert ("3 more samples: -o DIR writes" in shown) == ("more samples" in shown) == said
    folder.mkdir()
    for name, colour in (("17", "red"), ("4", "blue")):
        Image.new("RGB", (8, 8), colour).save(folder / f"{name}.png")
    good = world.run(*command, "--images", folder, "-o", world.output)
    assert good.status == 0, good
    has(good.out, "red", "blue", "onnxruntime, 1 call", "predictions.json")
    written = json.loads((world.output / "predictions.json").read_bytes())
    assert [item["predictions"][0]["name"] for item in written] == ["red", "blue"]  # 17.png, 4.png: by name
    assert set(world.contents()) == {"y.npy", "predictions.json"}
    (folder / "bad.jpg").write_bytes(b"not an image")
    mixed = world.run(*command, "--images", folder, world.folder / "absent.png", "--top", 1)
    assert mixed.status == 1
    has(mixed.out, "red", "blue", "not run: ", "bad.jpg: isn't an image", "absent.png: can't be read")
    as_json = world.run(*command, "--images", folder, "--json")
    assert as_json.status == 1
    assert [len(json.loads(as_json.out)[part]) for part in ("ranked", "skipped")] == [2, 1]


def test_no_usable_image_is_an_error(pictures: Any, tmp_path: Path) -> None:
    model = classifier(pictures)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"none of the 2 images can be used \(image 0: isn't an image"):
        run(model, images=[b"no", tmp_path / "absent.jpg"], backend="onnxruntime")
    with pytest.raises(UsageError, match="there is no image in"):
        run(model, images=tmp_path / "empty", backend="onnxruntime")
    with pytest.raises(UsageError, match="gives no image"):
        run(model, images=[], backend="onnxruntime")


@pytest.mark.parametrize("name", ["images.json", "predictions.json"])
def test_lists_that_cannot_be_written_are_found_before_the_run(pictures: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", lambda *_: pytest.fail("it was run"))
        with pytest.raises(OutputError, match=name):
            run(classifier(pictures), images=PIXELS, backend="onnxruntime", output=tmp_path / "out")


def test_images_of_what_gives_one_result_for_all_are_refused_and_beside_other_data(pictures: Any) -> None:
    model = pictures("n", "float m", "m = ReduceMean<keepdims = 0>(x)")
    with pytest.raises(UsageError, match=r"no axis of output 'm' scalar counts samples.*`limit=8`"):
        run(model, images=PIXELS, backend="onnxruntime")
    assert run(model, images=PIXELS, backend="onnxruntime", limit=8).arrays["m"].shape == ()
    with pytest.raises(UsageError, match="one of `data=` and `images=`"):
        run(model, images=PIXELS, data=np.zeros(1), backend="onnxruntime")
    with pytest.raises(UsageError, match="`preprocess=` is for `images=`"):
        run(model, data=np.zeros(1), preprocess="imagenet", backend="onnxruntime")


# Forms of data ------------------------------------------------------------------------------------------------------------


def test_data_comes_as_for_calibration_and_input_is_its_other_name(world: World, two: Path) -> None:
    folder = world.folder / "data"
    folder.mkdir()
    for number in range(3):
        np.savez(folder / f"{number}.npz", a=A + number, b=B)
    (folder / "notes.txt").write_text("no arrays")
    wanted = np.concatenate([A + number + 11 for number in range(3)])
    for option in ("--data", "--input"):
        found = world.run("run", two, option, folder, "-o", world.output / option, *ORT)
        assert found.status == 0, found
        np.testing.assert_array_equal(np.load(world.output / option / "_sum.npy"), wanted)
        several = world.run("run", two, option, *(folder / f"{n}.npz" for n in range(3)), *ORT)
        assert several.out.splitlines()[0] == found.out.splitlines()[0]
    for data in (folder, {"a": A, "b": B}, [{"a": A, "b": B}] * 2, [{"a": A}, {"b": folder.parent / "b.npy"}]):
        np.save(folder.parent / "b.npy", B)
        result = run(two, data=data, limit=1, backend="onnxruntime")
        np.testing.assert_array_equal(result.arrays["/sum"], (A + 11)[:1])
    (world.folder / "empty").mkdir()
    has(world.refused("run", two, "--data", world.folder / "empty", *ORT), "no .npz or .npy file", "--images")
    has(world.refused("run", two, "--data", folder, "--input", folder, *ORT), "one of --data and --images")
    has(world.refused("run", two, "--data", folder, "--limit", 0, *ORT), "--limit is 0")


def test_one_sample_may_come_without_the_axis_of_samples(tmp_path: Path) -> None:
    model = _written(tmp_path / "m.onnx", "(float[n,3,5] x) => (float[n,3,5] y) { y = Neg(x) }")
    np.testing.assert_array_equal(
        run(model, data=_values(3, 5), backend="onnxruntime").arrays["y"], -_values(3, 5)[None]
    )
    for given, message in (
        (np.float32(1), r"input 'x' has shape scalar, rank 0; the engine takes rank 3, -1x3x5"),
        (_values(1, 1, 3, 5), r"input 'x' has shape 1x1x3x5, rank 4; the engine takes rank 3"),
        (_values(2, 4, 5), r"input 'x' has shape 2x4x5; -1x3x5 is needed"),
    ):
        with pytest.raises(UsageError, match=message):
            run(model, data=given, backend="onnxruntime")
