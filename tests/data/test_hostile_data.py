"""Generated sample data that is damaged, odd or lying (see hostile_data): a correct result, or an error that names the file."""

from __future__ import annotations

import os
import warnings
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
from trtopt.data import ImageBatches, arrayfiles, open_data
from trtopt.data.decoding import decode
from trtopt.data.preprocess import Preprocess

INPUT = TensorInfo("x", "float32", ("n", 3, 32, 32))
ARRAYS = dict(hostile_data.arrays())
GOOD = {name: (content, pixels, near) for name, content, pixels, near in hostile_data.good_images()}
BAD = dict(hostile_data.bad_images())
USABLE = {f"{name}.npy" for name in ("version2", "fortran", "big_endian", "double", "longer")}
USABLE |= {f"{name}.npz" for name in ("fortran", "big_endian", "half", "plain", "packed", "prefixed")}


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
    return {name for name, told in answers(read, list(files.iterdir())).items() if told == "used"}


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
    batches = ImageBatches(files, INPUT, Preprocess(), batch=16)
    assert sum(len(part["x"]) for part in batches) == batches.samples == len(found) + 1
    assert {item.name for item in batches.skipped} == set(BAD) - found


def test_calibrate_and_run_by_command_line(world: World) -> None:
    table = world.output / "t.json"
    for name in ("directory_behind.npz", "damaged_0_packed.npz", "zip.npy", "nan.npz", "header_7.npy", "objects.npy"):
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
        batches = ImageBatches([path, world.folder / "zero.png", world.photos / "0.jpg"], INPUT, Preprocess())
        assert batches.samples == 1
        assert [item.reason for item in batches.skipped] == [
            f"can't be read: it is a {kind}" for kind in ("pipe", "device")
        ]


def test_a_large_file_is_no_photo(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(GOOD["colour.png"][0])
    with (tmp_path / "sparse.bmp").open("wb") as file:
        file.write(GOOD["colour.bmp"][0])
        file.truncate(1 << 40)
    batches = ImageBatches(tmp_path, INPUT, Preprocess())
    assert {item.name: item.reason for item in batches.skipped} == {"sparse.bmp": "can't be read: over 256 MiB"}
    assert decode(BAD["claims_12000.png"]) == f"claims 12000x12000 pixels; 1 to {1 << 27} are read"


def test_compressed_arrays_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that is a part of the real one, so that it takes no minutes."""
    monkeypatch.setattr(arrayfiles, "_WHOLE", 1 << 24)
    np.savez_compressed(tmp_path / "large.npz", x=np.zeros((2, 1 << 22), np.float32))
    with pytest.raises(
        DataError, match=r"large\.npz .*33554560 bytes; up to 16777216 are read compressed: use np\.savez"
    ):
        open_data([TensorInfo("x", "float32", ("n", "c"))], data=tmp_path / "large.npz")


def test_a_cache_that_cannot_be_kept_costs_nothing_but_a_warning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder / "file").write_text("in the way")
    monkeypatch.setenv("TRTOPT_CACHE", str(world.folder / "file" / "cache"))
    done = world.run("calibrate", world.model, "--data", world.arrays, "-o", world.output / "t.json")
    assert done.status == 0, done
    has(done.err, "this pass can't be kept for later calls", "set TRTOPT_CACHE to another")
