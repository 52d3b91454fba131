from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID251
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset  # noqa: TID251

from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import open_data
from trtopt.data.arrays import ArrayBatches

DIGITS = load_digits().data.astype(np.float32)[:50].reshape(50, 1, 8, 8)
IMAGE = [TensorInfo("image", "float32", ("n", 1, 8, 8))]
TEXT = [TensorInfo("ids", "int64", ("n", "length")), TensorInfo("mask", "int64", ("n", "length"))]
IDS = np.arange(36, dtype=np.int64).reshape(6, 6)
SEQUENCES = np.arange(5 * 6 * 3, dtype=np.float32).reshape(5, 6, 3)  # steps × samples × values
STEPS = [TensorInfo("x", "float32", ("t", "n", 3), 1), TensorInfo("state", "float32", (2, "n", 4), 1)]
STATES = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)


def together(batches: Any, name: str = "image") -> NDArray[Any]:
    return np.concatenate([part[name] for part in batches])


def forms(folder: Path) -> dict[str, Any]:
    """The same fifty digits in every form that is taken."""
    np.savez(folder / "plain.npz", image=DIGITS)
    np.savez_compressed(folder / "packed.npz", image=DIGITS)
    np.savez(folder / "fortran.npz", image=np.asfortranarray(DIGITS))
    np.save(folder / "single.npy", DIGITS)
    (folder / "parts" / "deep").mkdir(parents=True)
    np.savez(folder / "parts" / "1.npz", image=DIGITS[:7])
    np.save(folder / "parts" / "2.npy", DIGITS[7:30])
    np.savez_compressed(folder / "parts" / "deep" / "3.npz", image=DIGITS[30:])
    return {
        **{name: folder / name for name in ("plain.npz", "packed.npz", "fortran.npz", "single.npy", "parts")},
        "str": str(folder / "plain.npz"),
        "array": DIGITS,
        "mapping": {"image": DIGITS},
        "float64": {"image": DIGITS.astype(np.float64)},
        "list": [{"image": DIGITS[:20]}, {"image": DIGITS[20:]}],
        "generator": ({"image": DIGITS[start : start + 9]} for start in range(0, 50, 9)),
    }


def test_a_file_may_hold_one_sample_without_an_axis_that_counts(tmp_path: Path) -> None:
    for number, digit in enumerate(DIGITS[:5]):
        np.save(tmp_path / f"{number} of 5.npy", digit)
    batches = open_data(IMAGE, data=tmp_path, batch=2)
    assert batches.samples == 5 and np.array_equal(together(batches), DIGITS[:5])
    assert batches.digests == open_data(IMAGE, data=DIGITS[:5]).digests
    steps = TensorInfo("x", "float32", (6, "batch", 4), batch_axis=1)
    np.savez_compressed(tmp_path / "steps.npz", x=np.arange(24, dtype=np.float32).reshape(6, 4))
    [batch] = open_data([steps], data=tmp_path / "steps.npz")
    assert batch["x"].shape == (1, 6, 4)
    np.save(tmp_path / "flat.npy", DIGITS[0, 0])
    with pytest.raises(UsageError, match=r"flat\.npy: image has shape 8x8, the model takes nx1x8x8"):
        open_data(IMAGE, data=tmp_path / "flat.npy")


def test_every_form_gives_the_same_samples_on_every_pass(tmp_path: Path) -> None:
    descriptions = set()
    for form, source in forms(tmp_path).items():
        batches = open_data(IMAGE, data=source, batch=8)
        assert batches.samples == 50, form
        for _ in range(2):
            parts = list(batches)
            assert [len(part["image"]) for part in parts] == [8] * 6 + [2], form
            assert together(parts).dtype == np.float32
            assert np.array_equal(together(parts), DIGITS), form
        descriptions.add(str(batches.describe()))
        assert batches.preprocess is None
        assert batches.skipped == ()
    assert len(descriptions) == 1


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(12)), st.integers(1, 15), st.integers(1, 14), st.integers(0, 12))
def test_order_and_cutting_are_nothing_to_the_description_and_the_limit(
    order: list[int], batch: int, limit: int, cut: int
) -> None:
    expected = ArrayBatches(DIGITS[:12], IMAGE, limit=limit)
    shuffled = DIGITS[order]
    parts = [{"image": part} for part in (shuffled[:cut], shuffled[cut:])]
    found = ArrayBatches(parts, IMAGE, limit=limit, batch=batch)
    assert found.describe() == expected.describe()
    assert found.samples == min(limit, 12)
    given_samples = together(found)
    assert {item.tobytes() for item in given_samples} == {item.tobytes() for item in together(expected)}
    positions = [next(i for i in range(12) if np.array_equal(shuffled[i], item)) for item in given_samples]
    assert positions == sorted(positions)


def test_reading_finds_the_member_where_it_is(tmp_path: Path) -> None:
    """The local header of a member may be longer than the central directory says (alignment, extra fields)."""
    np.save(tmp_path / "image.npy", DIGITS)
    info = zipfile.ZipInfo("image.npy")
    info.extra = b"\x99\x99\x05\x00hello"
    with zipfile.ZipFile(tmp_path / "extra.npz", "w") as archive:
        archive.writestr(info, (tmp_path / "image.npy").read_bytes())
    assert np.array_equal(together(ArrayBatches(tmp_path / "extra.npz", IMAGE)), DIGITS)


def test_several_inputs_stay_together(tmp_path: Path) -> None:
    np.savez(tmp_path / "text.npz", mask=IDS % 2, ids=IDS)
    parts = list(open_data(TEXT, data=tmp_path / "text.npz", batch=4))
    assert [set(part) for part in parts] == [{"ids", "mask"}] * 2
    assert np.array_equal(together(parts, "ids"), IDS)
    assert np.array_equal(together(parts, "mask"), IDS % 2)
    # One input alone doesn't tell samples apart.
    same_ids = {"ids": np.zeros((2, 3), np.int64), "mask": np.array([[0, 0, 1], [0, 1, 1]])}
    other = same_ids | {"mask": np.array([[0, 0, 1], [1, 1, 1]])}
    assert ArrayBatches(same_ids, TEXT).describe() != ArrayBatches(other, TEXT).describe()


@pytest.mark.parametrize("block", [1 << 22, 3 * DIGITS[0].nbytes])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_named(value: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.data.arrays._BLOCK", block)
    broken = DIGITS.copy()
    broken[37, 0, 2, 2] = value
    with pytest.raises(DataError, match=r"image holds NaN or infinite values, first in sample 37$"):
        ArrayBatches(broken, IMAGE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "holds no samples"),
        ({"image": DIGITS, "more": DIGITS}, r"has more, which is no input; the model's inputs are image"),
        ({"image": DIGITS[:, 0]}, r"image has shape 50x8x8, the model takes nx1x8x8"),
        ({"image": np.zeros((5, 8, 8, 1), "f")}, r"must be 1; its channels come last: give x\.transpose\(0, 3, 1, 2\)"),
        ({"image": np.float32(1)}, r"shape scalar"),
        ({"image": DIGITS.astype(str)}, r"the model takes float32"),
        ([[[1.0]]], r"batch 0 is list of list; an array for each input \(image\)"),
        (["a.npz"], r"batch 0 is str; an array for each input"),
        ({"image": [[1.0, 2.0], [1.0]]}, r"image is no array \(.*give samples of one size"),
        (3, r"data is int; a path, an array, a mapping"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(source: Any, message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        ArrayBatches(source, IMAGE)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (TEXT, {"data": {"ids": IDS, "mask": IDS[:5]}}, "different numbers of samples: {'ids': 6, 'mask': 5}"),
        (TEXT, {"data": IDS}, "one input; this one has ids, mask: give an .npz"),
        (TEXT, {"data": "."}, "no .npz or .npy file in .: in Python np.savez('samples.npz', ids=array, mask=array)"),
        (TEXT, {"data": "a.csv"}, "np.savez('samples.npz', ids=array, mask=array)"),
        (STEPS, {"data": {"x": SEQUENCES, "state": STATES.transpose(1, 0, 2)}}, "6x2x4, the model takes 2xnx4"),
        (STEPS, {"data": {"x": SEQUENCES, "state": STATES[:, :5]}}, "samples: {'x': 6, 'state': 5}"),
        (STEPS, {"images": ".", "preprocess": "imagenet"}, "a model whose inputs count samples on their first axis"),
    ],
)
def test_what_does_not_fit_several_inputs_is_refused(
    inputs: list[TensorInfo], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("1,2")
    with pytest.raises((UsageError, DataError), match=re.escape(message)):
        open_data(inputs, **options)


def test_an_input_without_axes_cannot_count_samples() -> None:
    inputs = [*IMAGE, TensorInfo("level", "float32", ())]
    with pytest.raises(UsageError, match=r"input level is a single number.*constant of the model"):
        ArrayBatches({"image": DIGITS, "level": np.float32(1)}, inputs)


@pytest.mark.parametrize("level", [0.5, np.float32(0.5), np.full(6, 0.5, np.float32)])
@pytest.mark.parametrize("file", [False, True])
def test_a_single_number_is_one_for_each_sample_or_for_all(level: Any, file: bool, tmp_path: Path) -> None:
    inputs = [*IMAGE, TensorInfo("level", "float32", (), batch_axis=None)]
    np.savez(tmp_path / "s.npz", image=DIGITS[:6], level=np.asarray(level, np.float32))
    found = ArrayBatches(tmp_path / "s.npz" if file else {"image": DIGITS[:6], "level": level}, inputs, batch=4)
    batches = list(found)
    assert found.samples == 6 and [len(batch["level"]) for batch in batches] == [4, 2]
    assert all((batch["level"] == np.float32(0.5)).all() for batch in batches)


@pytest.mark.parametrize("name", ["plain.npz", "packed.npz"])
def test_one_changed_bit_is_noticed_and_the_description_follows_the_content(name: str, tmp_path: Path) -> None:
    """np.load would notice as well: the archive keeps a checksum."""
    path: Path = forms(tmp_path)[name]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} can't be read as .npz"):
        ArrayBatches(path, IMAGE)
    changed = DIGITS.copy()
    changed[31, 0, 4, 4] += 1
    assert ArrayBatches(changed, IMAGE).describe() != ArrayBatches(DIGITS, IMAGE).describe()


@pytest.mark.parametrize("limit", [None, 31])
def test_parts_are_the_samples_in_order_and_travel(tmp_path: Path, limit: int | None) -> None:
    forms(tmp_path)
    whole = ArrayBatches(tmp_path / "parts", IMAGE, limit=limit, batch=4)
    bounds = [(0, 9), (9, 10), (10, whole.samples)]
    parts = [pickle.loads(pickle.dumps(whole.part(*bound))) for bound in bounds]
    assert [part.samples for part in parts] == [9, 1, whole.samples - 10]
    assert np.array_equal(np.concatenate([together(part) for part in parts]), together(whole))
    assert parts[0].describe() == ArrayBatches(together(whole)[:9], IMAGE).describe()


def test_samples_are_named_by_file_and_place(tmp_path: Path) -> None:
    sources = forms(tmp_path)
    names = {form: open_data(IMAGE, data=source, batch=8).names for form, source in sources.items() if form != "parts"}
    assert names["plain.npz"] == names["str"] == tuple(f"plain.npz[{index}]" for index in range(50))
    assert names["single.npy"][49] == "single.npy[49]"
    assert names["array"][3] == "array[3]"
    assert names["mapping"][3] == "arrays[3]"
    assert names["list"][20] == "batch 1[0]"
    parts = open_data(IMAGE, data=sources["parts"], batch=8)
    assert [parts.names[index] for index in (0, 7, 30)] == ["1.npz[0]", "2.npy[0]", str(Path("deep", "3.npz[0]"))]
    few = open_data(IMAGE, data=DIGITS, limit=5, batch=2)
    assert all(
        np.array_equal(sample, DIGITS[int(name.removeprefix("array[").rstrip("]"))])
        for name, sample in zip(few.names, together(few), strict=True)
    )


class Pairs:
    """A data set like PyTorch's: samples without the axis that counts them, by index, each with its label."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        if index >= 50:
            raise AssertionError("data sets of PyTorch don't end by themselves")
        return torch.from_numpy(DIGITS[index]), index


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(DIGITS),
        lambda: torch.from_numpy(DIGITS).requires_grad_(),
        lambda: [DIGITS[:20], DIGITS[20:]],
        lambda: list(DIGITS),
        lambda: (DIGITS[start : start + 9] for start in range(0, 50, 9)),
        lambda: Pairs(),
        lambda: DataLoader(TensorDataset(torch.from_numpy(DIGITS), torch.zeros(50)), batch_size=8),
        lambda: DataLoader(Pairs(), batch_size=8),
    ],
)
def test_what_people_train_with_is_taken_as_it_is(make: Any) -> None:
    batches = open_data(IMAGE, data=make())
    assert batches.samples == 50
    assert np.array_equal(together(batches), DIGITS)
    assert batches.describe() == open_data(IMAGE, data=DIGITS).describe()


def test_inputs_of_a_tuple_in_order_and_half_types() -> None:
    ids, mask = torch.from_numpy(IDS), torch.ones(6, 6, dtype=torch.int64)
    [batch] = open_data(TEXT, data=[(ids, mask, torch.zeros(6))])
    assert np.array_equal(batch["ids"], IDS) and batch["mask"].all()
    with pytest.raises(UsageError, match=r"batch 0 is list of Tensor; an array for each input \(ids, mask\)"):
        open_data(TEXT, data=[[ids]])
    [half] = open_data(IMAGE, data={"image": torch.from_numpy(DIGITS[:8]).bfloat16()})
    assert half["image"].dtype == np.float32 and np.array_equal(half["image"], DIGITS[:8])


def test_an_iterator_is_read_as_far_as_the_limit() -> None:
    def endless() -> Any:
        while True:
            yield DIGITS[:5]

    assert open_data(IMAGE, data=endless(), limit=7).samples == 7


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {"x": ("n", 5), "state": (2, "n", 4)},
            r"state is \(2, n, 4\) beside x \(n, 5\): export it with that axis called batch in all.*state:2,batch,4",
        ),
        (
            {"x": (-1, 4), "b": (1, 4), "w": (4, 3)},
            r"the model's w is \(4, 3\) beside b \(1, 4\): export it with w as a constant.*`set='w=NUMBERS'`",
        ),
        ({"x": (-1, 4), "w": (4, 3)}, r"{'x': 6, 'w': 4}; .* w is \(4, 3\) .*export it with w as a constant"),
    ],
)
def test_inputs_that_do_not_all_begin_with_the_samples_say_what_to_do(shapes: dict[str, Any], said: str) -> None:
    inputs = [TensorInfo(name, "float32", shape) for name, shape in shapes.items()]
    sizes = {"n": 6, "entries": 3, -1: 6}
    arrays = {name: np.ones([sizes.get(size, size) for size in shape], np.float32) for name, shape in shapes.items()}
    with pytest.raises((DataError, UsageError), match=said):
        open_data(inputs, data=arrays)


def test_a_file_of_a_folder_may_hold_one_calls_arrays(tmp_path: Path) -> None:
    inputs = [TensorInfo("crops", "float32", (1, 5), None), TensorInfo("gallery", "float32", ("entries", 4), None)]
    for number in range(3):
        gallery = np.ones((number + 1, 4), np.float32)
        np.savez(tmp_path / f"{number}.npz", crops=np.ones((1, 5), np.float32), gallery=gallery)
    assert open_data(inputs, data=tmp_path).samples == 3


def test_samples_are_taken_from_the_axis_where_the_model_has_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", x=SEQUENCES, state=STATES)
    np.savez_compressed(tmp_path / "packed.npz", x=SEQUENCES, state=np.asfortranarray(STATES))
    pairs = [(SEQUENCES[:, :4], STATES[:, :4]), (SEQUENCES[:, 4], STATES[:, 4]), (SEQUENCES[:, 5:], STATES[:, 5:])]
    forms: dict[str, Any] = {name: tmp_path / name for name in ("plain.npz", "packed.npz")}
    digests = set()
    for form, source in {**forms, "mapping": {"x": SEQUENCES, "state": STATES}, "tuples": pairs}.items():
        batches = open_data(STEPS, data=source, batch=4)
        digests.add(batches.describe()["digest"])
        assert batches.samples == 6, form
        for _ in range(2):
            assert np.array_equal(together(batches, "x"), SEQUENCES.transpose(1, 0, 2)), form
            assert np.array_equal(together(batches, "state"), STATES.transpose(1, 0, 2)), form
    assert len(digests) == 1
    part = open_data(STEPS, data={"x": SEQUENCES, "state": STATES}, limit=2)
    assert part.samples == 2


def test_where_an_array_is_one_sample_several_lie_in_files_or_along_an_axis_before_it(tmp_path: Path) -> None:
    whole = [TensorInfo("x", "float32", ("t", 1, 3), None), TensorInfo("rate", "int64", (), None)]
    single = {"x": SEQUENCES[:, :1], "rate": np.int64(8)}
    several = {"x": SEQUENCES[None, :, :1].repeat(4, 0), "rate": np.arange(4)}
    assert [part["x"].shape for part in open_data(whole, data=single)] == [(1, 5, 1, 3)]
    assert [part["rate"].tolist() for part in open_data(whole, data=several)] == [[0, 1, 2, 3]]
    for steps in (5, 3, 3):
        np.savez(tmp_path / f"{len(list(tmp_path.iterdir()))}.npz", x=SEQUENCES[:steps, :1], rate=np.int64(8))
    batches = open_data(whole, data=tmp_path)
    assert batches.samples == 3
    assert [part["x"].shape for part in batches] == [(1, 5, 1, 3), (2, 3, 1, 3)]
    with pytest.raises(UsageError, match=re.escape("x has shape 5x2x3, the model takes tx1x3: dimension 1 must be 1")):
        open_data(whole, data={"x": SEQUENCES[:, :2], "rate": np.int64(8)})
