"""Generated sample data that is damaged, odd or lying (see hostile_data): a correct result, or an error that names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_data
import numpy as np
import pytest
from hostile_data import SAMPLES
from hostile_values import answers
from numpy.typing import NDArray
from world import World, has

from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import ImageBatches, open_data
from trtopt.data.decoding import decode
from trtopt.data.preprocess import Preprocess

INPUT = TensorInfo("x", "float32", ("n", 3, 32, 32))
ARRAYS = dict(hostile_data.arrays())
GOOD = {name: (content, pixels, near) for name, content, pixels, near in hostile_data.good_images()}
BAD = dict(hostile_data.bad_images())
USABLE = {f"{name}.npy" for name in ("version2", "fortran", "big_endian", "double", "longer")}
USABLE |= {f"{name}.npz" for name in ("fortran", "big_endian", "half", "plain", "packed", "prefixed")}
SECONDS = 60  # generous: on an idle machine none takes ten


def loaded(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
    with np.lib.npyio.NpzFile(path) as archive:
        return archive["x"]  # type: ignore[no-any-return]


def numpys(path: Path) -> NDArray[Any] | None:
    """Return what NumPy reads, if it is what the model takes and all of it is finite; None: it can't be, or NumPy can't."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = loaded(path)
            usable = array.dtype.kind == "f" and np.isfinite(array.astype(np.float32)).all()
    except Exception:  # of any kind: that is NumPy's way with damaged files
        return None
    return array.astype(np.float32) if usable else None


def array(path: Path) -> str | None:
    try:
        found = np.concatenate([part["x"] for part in open_data([INPUT], data=path, batch=4)])
    except (DataError, UsageError) as error:
        has(str(error), str(path) if "no samples" not in str(error) else "`data=`")
        assert len(str(error)) < 1000, error
        return "refused"
    expected = numpys(path)
    assert expected is not None
    np.testing.assert_array_equal(found, expected)
    return None


def image(path: Path) -> str | None:
    found = decode(path.read_bytes())
    if isinstance(found, str):
        assert 0 < len(found) < 200 and "\n" not in found
        return "refused"
    assert found.dtype == np.uint8 and found.ndim == 3 and found.size < 1 << 26
    return None


def used(read: Callable[[Path], str | None], contents: dict[str, bytes], files: Path) -> set[str]:
    files.mkdir()
    for name, content in contents.items():
        (files / name).write_bytes(content)
    return {name for name, told in answers(read, files).items() if told == "used"}


def test_arrays_are_what_numpy_reads_or_refused_by_name(tmp_path: Path) -> None:
    found = used(array, ARRAYS, tmp_path / "arrays")
    assert found >= USABLE
    assert len(found) < len(ARRAYS) / 3


@pytest.mark.filterwarnings("error")
def test_images_of_every_kind_are_the_picture_that_people_see(capfd: pytest.CaptureFixture[str]) -> None:
    for name, (content, expected, near) in GOOD.items():
        found = decode(content)
        assert isinstance(found, np.ndarray), f"{name}: {found}"
        assert found.shape == expected.shape, name
        assert np.abs(found.astype(int) - expected).mean() <= near, name
    assert capfd.readouterr().err == ""


def test_damaged_images_are_left_out_with_a_reason_or_have_their_size(tmp_path: Path) -> None:
    files = tmp_path / "images"
    found = used(image, BAD, files)
    assert len(found) < len(BAD) / 2
    assert [name for name in found if name.startswith(("never_", "claims_"))] == []
    (files / "good.png").write_bytes(GOOD["colour.png"][0])
    batches = ImageBatches(files, INPUT, Preprocess(), batch=16, lazy=True)
    assert sum(len(part["x"]) for part in batches) == batches.samples == len(found) + 1
    assert {item.name for item in batches.skipped} == set(BAD) - found


def test_calibrate_and_run_by_command_line(world: World) -> None:
    table = world.output / "t.json"
    for name in ("directory_behind.npz", "damaged_0_packed.npz", "zip.npy", "nan.npz", "header_8.npy", "objects.npy"):
        path = world.folder / name
        path.write_bytes(ARRAYS[name])
        has(world.refused("calibrate", world.model, "--data", path, "-o", table), name)
        if name != "nan.npz":
            has(world.refused("run", world.model, "--input", path, "--backend", "onnxruntime"), name)
    expected = calibrate(world.model, data=SAMPLES, cache=False).table.amax
    for name in ("fortran.npz", "big_endian.npy", "packed.npz"):
        path = world.folder / name
        path.write_bytes(ARRAYS[name])
        assert calibrate(world.model, data=path, cache=False).table.amax == expected, name
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
    if name == "photo.png":
        (world.folder / "zero.png").symlink_to("/dev/zero")
        batches = ImageBatches(
            [path, world.folder / "zero.png", world.photos / "0.jpg"], INPUT, Preprocess(), lazy=True
        )
        assert batches.samples == 1
        assert [item.reason for item in batches.skipped] == ["can't be read: it is no regular file"] * 2


def child(code: str, *arguments: object, memory: int) -> Any:
    """Return what a process of its own prints as JSON at its end; its memory at most `memory` bytes, with what was loaded."""
    code += "\nfrom trtopt.core.host import peak_memory\nprint(json.dumps([found, peak_memory()]))\n"
    command = [sys.executable, "-c", "import json, sys\nfrom pathlib import Path\n" + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done
    assert done.stderr == ""
    found, peak = json.loads(done.stdout.splitlines()[-1])
    assert peak < memory, f"{peak >> 20} MiB"
    return found


RUN_IMAGES = """
from trtopt.data import ImageBatches, decoding
from trtopt.data.preprocess import Preprocess
from trtopt.core.values import TensorInfo
decoding._PIXELS = 1 << 26
decoding._make_rooms()
batches = ImageBatches(sys.argv[1], TensorInfo("x", "float32", ("n", 3, 32, 32)), Preprocess(), threads=4, lazy=True)
found = [sum(len(part["x"]) for part in batches), {item.name: item.reason for item in batches.skipped}]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
def test_large_images_share_bounded_memory(tmp_path: Path) -> None:
    """With half of the real limit, so that it takes less time."""
    for number in range(2):  # each takes more than half of what is allowed
        (tmp_path / f"{number}.png").write_bytes(hostile_data.large_png(8100 + number))
    (tmp_path / "bomb.png").write_bytes(hostile_data.large_png(32_000))
    with (tmp_path / "sparse.bmp").open("wb") as file:
        file.write(GOOD["colour.bmp"][0])
        file.truncate(1 << 40)
    used, skipped = child(RUN_IMAGES, tmp_path, memory=1200 << 20)
    assert used == 2
    assert skipped == {
        "bomb.png": "claims more pixels than the 67108864 that are read",
        "sparse.bmp": f"has {1 << 40} bytes; up to {1 << 28} are read",
    }


RUN_ARRAYS = """
from trtopt.data import arrayfiles, open_data
from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import TensorInfo
arrayfiles._WHOLE = 1 << 24
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

    def bomb(name: str, shape: tuple[int, int]) -> None:
        head = hostile_data.header(hostile_data.described(shape), b"")
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("x.npy", head + bytes(4 * shape[0] * shape[1]))

    bomb("many.npz", (1 << 20 | 1, 2))
    bomb("large.npz", (2, 1 << 22))
    bomb("long.npz", (64, 1 << 16))
    found = child(RUN_ARRAYS, tmp_path, memory=240 << 20)
    assert found["long.npz"] == [64, 0.0]
    has(found["many.npz"], "1048577 samples; up to 1048576 are read")
    has(found["large.npz"], "large.npz", "33554432 bytes; up to 16777216 are read", "use np.savez")


def test_a_cache_that_cannot_be_kept_costs_nothing_but_a_warning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder / "file").write_text("in the way")
    monkeypatch.setenv("TRTOPT_CACHE", str(world.folder / "file" / "cache"))
    done = world.run("calibrate", world.model, "--data", world.arrays, "-o", world.output / "t.json")
    assert done.status == 0, done
    has(done.err, "this pass can't be kept for later calls", "set TRTOPT_CACHE to another")
