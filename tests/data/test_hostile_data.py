"""Generated sample data that is damaged, odd or lying (see hostile_data): a correct result, or an error that names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import hostile_data
import numpy as np
import onnx
import pytest
from hostile_data import SAMPLES
from numpy.typing import NDArray
from world import World, has

from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import DataError, TrtoptError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import ImageBatches, open_data
from trtopt.data.arrayfiles import stored_arrays
from trtopt.data.decoding import decode
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.runtime.inference import run

INPUT = TensorInfo("x", "float32", ("n", 3, 32, 32))
ARRAYS = dict(hostile_data.arrays())
GOOD = {name: (content, pixels, near) for name, content, pixels, near in hostile_data.good_images()}
BAD = dict(hostile_data.bad_images())
USABLE = {  # whatever else is refused, these aren't
    *("version1.npy", "version2.npy", "version3.npy", "fortran.npy", "fortran.npz", "big_endian.npy", "big_endian.npz"),
    *(
        "double.npy",
        "half.npz",
        "claims_less.npy",
        "longer.npy",
        "plain.npz",
        "packed.npz",
        "comment.npz",
        "prefixed.npz",
    ),
}
MEMORY = 2 << 30  # bytes that a process may hold at most
SECONDS = 60  # generous: on an idle machine none takes ten


def loaded(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
    with np.lib.npyio.NpzFile(path) as archive:
        return archive["x"]  # type: ignore[no-any-return]


def numpys(path: Path) -> NDArray[Any] | None:
    """What NumPy reads, if it is what the model takes and all of it is finite; None: it can't be, or NumPy can't."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = loaded(path)
            usable = array.dtype.kind == "f" and np.isfinite(array.astype(np.float32)).all()
    except Exception:  # of any kind: that is NumPy's way with damaged files
        return None
    return array.astype(np.float32) if usable else None


def test_the_corpus_is_large_and_always_the_same() -> None:
    assert dict(hostile_data.arrays()) == ARRAYS
    assert dict(hostile_data.bad_images()) == BAD
    assert len(ARRAYS) > 170
    assert len(GOOD) > 60
    assert len(BAD) > 170


@pytest.mark.parametrize("lazy", [False, True])
def test_arrays_are_what_numpy_reads_or_refused_by_name(
    lazy: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    used = set()
    for name, content in ARRAYS.items():
        path = tmp_path / name
        path.write_bytes(content)
        try:
            found = np.concatenate([part["x"] for part in open_data([INPUT], data=path, batch=4, lazy=lazy)])
        except (DataError, UsageError) as error:
            has(str(error), str(path) if "no samples" not in str(error) else "`data=`")
            assert len(str(error)) < 1000, error
        else:
            expected = numpys(path)
            assert expected is not None, name
            np.testing.assert_array_equal(found, expected, err_msg=name)
            used.add(name)
    assert used >= USABLE
    assert len(used) < len(ARRAYS) / 3
    assert capfd.readouterr().err == ""
    assert {item.name for item in tmp_path.iterdir()} == set(ARRAYS)


def test_unpacked_arrays_are_the_same_or_refused_by_name(tmp_path: Path) -> None:
    for name, content in ARRAYS.items():
        path, folder = tmp_path / name, tmp_path / f"{name}.unpacked"
        if path.suffix == ".npz":
            path.write_bytes(content)
            try:
                found = np.concatenate([part["x"] for part in open_data([INPUT], data=path, unpack=folder)])
            except (DataError, UsageError) as error:
                has(str(error), str(path) if "no samples" not in str(error) else "`data=`")
            else:
                np.testing.assert_array_equal(found, numpys(path), err_msg=name)
            assert not folder.exists() or [str(item.relative_to(folder)) for item in folder.rglob("*.*")] == ["0/0.npy"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/fd is Linux's")
def test_an_archive_that_is_refused_is_closed_at_once(tmp_path: Path) -> None:
    refused = 0
    for name, content in ARRAYS.items():
        path = tmp_path / name
        path.write_bytes(content)
        if path.suffix == ".npz":
            try:
                stored_arrays(path)
            except DataError:  # its traceback keeps what was opened alive
                links = [item.resolve() for item in Path("/proc/self/fd").iterdir()]
                assert path.resolve() not in links, name
                refused += 1
    assert refused > 20


def test_run_reads_arrays_as_numpy_does_or_refuses_them_by_name(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    value = onnx.helper.make_tensor_value_info("x", 1, ["n", 3, 32, 32])
    result = onnx.helper.make_tensor_value_info("y", 1, ["n", 3, 32, 32])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "net", [value], [result])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), model)
    ran = 0
    for name, content in list(ARRAYS.items())[::2]:
        path = tmp_path / name
        path.write_bytes(content)
        try:
            found = run(model, input=path, backend="onnxruntime").arrays["y"]
        except TrtoptError as error:  # of what fits the file and not the engine it names the input
            assert isinstance(error, (DataError, UsageError)), name
            assert str(path) in str(error) or "'x'" in str(error) or "`input=" in str(error), error
        else:
            np.testing.assert_array_equal(found, loaded(path).astype(np.float32), err_msg=name)
            ran += 1
    assert ran > 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", GOOD)
def test_images_of_every_kind_are_the_picture_that_people_see(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    content, expected, near = GOOD[name]
    found = decode(content)
    assert isinstance(found, np.ndarray), found
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() <= near
    for preprocess in (
        *PRESETS.values(),
        Preprocess(antialias=False),
        Preprocess(resize="letterbox", interpolation="area"),
    ):
        made = preprocess.fitted(INPUT)(found)
        assert made.shape == (3, 32, 32)
        assert np.isfinite(made).all()
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("error")
def test_damaged_images_are_left_out_with_a_reason_or_have_their_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sure = 0
    for name, content in BAD.items():
        (tmp_path / name).write_bytes(content)
        found = decode(content)
        if isinstance(found, str):
            assert 0 < len(found) < 200
            assert "\n" not in found
            sure += 1
        else:
            assert found.dtype == np.uint8
            assert found.ndim == 3
            assert found.size < 1 << 26, name
    assert sure > 90
    for name in BAD:
        if name.startswith(("claims_", "cut_2.", "no_", "empty", "lines", "scans", "short", "bad_", "two_")):
            assert isinstance(decode(BAD[name]), str), name
    (tmp_path / "good.png").write_bytes(GOOD["colour.png"][0])
    batches = ImageBatches(tmp_path, INPUT, Preprocess(), batch=16, lazy=True)
    assert sum(len(part["x"]) for part in batches) == batches.samples == len(BAD) + 1 - sure
    assert {item.name for item in batches.skipped} <= set(BAD)
    said = capfd.readouterr().err  # the decoders' own words
    assert said == ""


def test_calibrate_and_run_by_command_line(world: World) -> None:
    table = world.output / "t.json"
    for name in (
        "directory_behind.npz",
        "flipped_packed_3.npz",
        "cut_128.npy",
        "nan.npz",
        "header_deep.npy",
        "objects.npy",
    ):
        path = world.folder / name
        path.write_bytes(ARRAYS[name])
        has(world.refused("calibrate", world.model, "--data", path, "-o", table), name)
        if name != "nan.npz":
            has(world.refused("run", world.model, "--input", path, "--backend", "onnxruntime"), name)
    expected = calibrate(world.model, data=SAMPLES, allow_unusual_data=True, cache=False).table.amax
    for name in ("fortran.npz", "big_endian.npy", "packed.npz"):
        path = world.folder / name
        path.write_bytes(ARRAYS[name])
        assert calibrate(world.model, data=path, allow_unusual_data=True, cache=False).table.amax == expected, name
        np.testing.assert_array_equal(
            run(world.model, input=path, backend="onnxruntime").arrays["y"],
            run(world.model, input=SAMPLES, backend="onnxruntime").arrays["y"],
        )
    for name, content in BAD.items():
        (world.photos / name).write_bytes(content)
    done = world.run("calibrate", world.model, "--images", world.photos, "--preprocess", "imagenet", "-o", table)
    assert done.status in (0, 1), done
    has(done.err, "left out" if not done.status else "error:")
    assert "libpng" not in done.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("name", ["x.npy", "x.npz", "folder", "photo.png"])
def test_what_is_no_file_is_refused_and_not_waited_for(name: str, world: World) -> None:
    path = world.folder / name
    if name == "folder":
        path.mkdir()
        np.save(path / "a.npy", SAMPLES)
        os.mkfifo(path / "b.npy")
        place = path / "b.npy"
    else:
        os.mkfifo(path)
        place = path
    if name != "photo.png":
        has(world.refused("calibrate", world.model, "--data", path, "-o", world.output / "t.json"), str(place))
    if name != "folder":
        has(world.refused("run", world.model, "--input", path, "--backend", "onnxruntime"), str(path))
    else:
        jobs = world.folder / "jobs.toml"
        jobs.write_text(
            f'[data.d]\ndata = "{path}"\n[[job]]\nmodel = "{world.model}"\ndata = "d"\noutput = "{world.output / "t.json"}"\n'
        )
        found = world.run("jobs", "run", jobs, "--state", world.folder / "state")
        assert found.status not in (0, 70), found
    if name == "photo.png":
        (world.folder / "zero.png").symlink_to("/dev/zero")
        batches = ImageBatches(
            [path, world.folder / "zero.png", world.photos / "0.jpg"], INPUT, Preprocess(), lazy=True
        )
        assert batches.samples == 1
        assert [item.reason for item in batches.skipped] == ["can't be read: it is no regular file"] * 2


def child(code: str, *arguments: object, memory: int = MEMORY) -> Any:
    """What a process of its own prints as JSON at its end; its memory at most `memory` bytes, with what was loaded."""
    code += "\nfrom trtopt.core.host import peak_memory\nprint(json.dumps([found, peak_memory()]))\n"
    command = [sys.executable, "-c", "import json, sys\nfrom pathlib import Path\n" + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done
    assert done.stderr == ""
    found, peak = json.loads(done.stdout.splitlines()[-1])
    assert peak < memory, f"{peak >> 20} MiB"
    return found


RUN_IMAGES = """
from trtopt.data import ImageBatches
from trtopt.data.preprocess import Preprocess
from trtopt.core.values import TensorInfo
batches = ImageBatches(sys.argv[1], TensorInfo("x", "float32", ("n", 3, 32, 32)), Preprocess(), threads=4, lazy=True)
found = [sum(len(part["x"]) for part in batches), {item.name: item.reason for item in batches.skipped}]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
def test_large_images_share_bounded_memory(tmp_path: Path) -> None:
    for number in range(2):  # each takes more than half of what is allowed
        (tmp_path / f"{number}.png").write_bytes(hostile_data.large_png(11_500 + number))
    (tmp_path / "bomb.png").write_bytes(hostile_data.large_png(32_000))
    with (tmp_path / "sparse.bmp").open("wb") as file:
        file.write(GOOD["colour.bmp"][0])
        file.truncate(1 << 40)
    used, skipped = child(RUN_IMAGES, tmp_path)
    assert used == 2
    assert skipped == {
        "bomb.png": "claims 32000x32000 pixels; 1 to 134217728 are read",
        "sparse.bmp": f"has {1 << 40} bytes; up to {1 << 28} are read",
    }


RUN_ARRAYS = """
from trtopt.data import arrayfiles, open_data
from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import TensorInfo
arrayfiles._SAMPLE, arrayfiles._WHOLE = 1 << 23, 1 << 24
found = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        batches = open_data([TensorInfo("x", "float32", ("n", "c"))], data=path)
        found[path.name] = batches.samples, sum(float(part["x"].sum()) for part in batches)
    except (DataError, UsageError) as error:
        found[path.name] = str(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
def test_compressed_arrays_do_not_fill_the_memory(tmp_path: Path) -> None:
    """With limits that are a part of the real ones, so that it takes no minutes."""

    def bomb(name: str, shape: tuple[int, int], fortran: bool = False) -> None:
        head = hostile_data.header(hostile_data.described(shape, fortran=fortran), b"")
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("x.npy", head + bytes(4 * shape[0] * shape[1]))

    bomb("many.npz", (1 << 20 | 1, 2))
    bomb("fortran.npz", (9, 1 << 19), fortran=True)
    bomb("large.npz", (2, 1 << 22))
    bomb("long.npz", (64, 1 << 20))
    found = child(RUN_ARRAYS, tmp_path, memory=240 << 20)
    assert found["long.npz"] == [64, 0.0]
    has(found["many.npz"], "1048577 samples; up to 1048576 are read")
    has(found["fortran.npz"], "fortran.npz", "18874368 bytes; up to 16777216 are read", "np.ascontiguousarray")
    has(found["large.npz"], "large.npz", "samples have 16777216 bytes each; up to 8388608", "use np.savez")


TRUNCATED = """
import os
import numpy as np
from trtopt.data import open_data
from trtopt.core.errors import DataError
from trtopt.core.values import TensorInfo
info, found = [TensorInfo("x", "float32", ("n", 64))], []
for name in sys.argv[1:]:
    values = np.random.default_rng(0).standard_normal((4096, 64), np.float32)
    np.save(name, values) if name.endswith(".npy") else np.savez(name, x=values)
    batches = open_data(info, data=name)
    parts = iter(batches)
    next(parts)
    os.truncate(name, 5000)
    try:
        found.append(sum(1 for _ in parts))
    except DataError as error:
        found.append(str(error))
"""


def test_a_file_cut_off_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    paths = [tmp_path / "x.npy", tmp_path / "x.npz"]
    for path, message in zip(paths, child(TRUNCATED, *paths), strict=True):
        has(message, f"{path} can't be read", "changed meanwhile")


def test_a_cache_that_cannot_be_kept_costs_nothing_but_a_warning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder / "file").write_text("in the way")
    monkeypatch.setenv("TRTOPT_CACHE", str(world.folder / "file" / "cache"))
    done = world.run("calibrate", world.model, "--data", world.arrays, "-o", world.output / "t.json")
    assert done.status == 0, done
    has(done.err, "this pass can't be kept for later calls", "set TRTOPT_CACHE to another")
