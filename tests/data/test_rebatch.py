"""Samples in batches: same samples, same order, whatever the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtopt.core.errors import DataError, EngineError, UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.data.rebatch import (
    calls,
    chunks,
    counting,
    filled,
    joined,
    laid_out,
    rebatched,
    samples_first,
    samples_in,
    share,
)

SAMPLES = np.arange(22, dtype=np.float32).reshape(11, 2)


def batch(start: int, stop: int) -> dict[str, np.ndarray]:
    return {"x": SAMPLES[start:stop], "number": np.arange(start, stop)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 11, 20])
@pytest.mark.parametrize("given", [1, 3, 5, 11])
def test_samples_keep_their_order_at_every_size(size: int, given: int) -> None:
    batches = list(rebatched((batch(at, min(at + given, 11)) for at in range(0, 11, given)), size))
    assert [len(item["x"]) for item in batches[:-1]] == [size] * (len(batches) - 1)
    whole = joined(batches)
    np.testing.assert_array_equal(whole["x"], SAMPLES)
    np.testing.assert_array_equal(whole["number"], np.arange(11))


def test_samples_of_another_size_begin_another_batch() -> None:
    wide = {"x": np.ones((3, 5), np.float32)}
    sizes = [item["x"].shape for item in rebatched([{"x": SAMPLES[:3]}, wide, {"x": SAMPLES[:1]}], 2)]
    assert sizes == [(2, 2), (1, 2), (2, 5), (1, 5), (1, 2)]


def test_nothing_is_copied_where_nothing_is_put_together() -> None:
    (one, two) = rebatched([batch(0, 6)], 3)
    assert np.shares_memory(one["x"], SAMPLES)
    assert np.shares_memory(two["x"], SAMPLES)
    assert joined([one])["x"] is one["x"]
    assert filled(one, 3)["x"] is one["x"]


def test_chunks_say_how_many_samples_are_real() -> None:
    found = list(chunks(batch(0, 11), 4, 4))
    assert [(len(chunk["x"]), real) for chunk, real in found] == [(4, 4), (4, 4), (4, 3)]
    np.testing.assert_array_equal(found[-1][0]["number"], [8, 9, 10, 10])
    assert [len(chunk["x"]) for chunk, _ in chunks(batch(0, 11), 4)] == [4, 4, 3]


def test_what_does_not_count_samples_is_refused() -> None:
    assert samples_in(batch(2, 9)) == 7
    assert samples_in(batch(2, 2)) == 0
    assert samples_in({"a": SAMPLES[:0]}) == samples_in({}) == 0
    with pytest.raises(DataError, match=r"^f: the inputs have different numbers of samples: {'a': 3, 'b': 2}"):
        samples_in({"a": SAMPLES[:3], "b": SAMPLES[:2]}, "f: ")
    with pytest.raises(DataError, match="the data for 'b' is one number"):
        samples_in({"a": SAMPLES, "b": np.float32(1)})


# Calls ------------------------------------------------------------------------------------------------------------------


def info(name: str, *shape: int | str, axis: int | None = 0) -> TensorInfo:
    return TensorInfo(name, "float32", shape, axis)


X, Y, K = info("x", "n", 2), info("y", "n", 2), info("k", axis=None)


def test_a_single_number_is_the_same_for_all_or_one_for_each() -> None:
    profile = {"x": ShapeRange((1, 2), (4, 2), (4, 2))}
    same = calls({"x": SAMPLES, "k": np.float32(3)}, [X, K], [Y], [profile])  # type: ignore[dict-item]
    assert [(call.size, call.real, call.feed["k"].ndim) for call in same] == [(4, 4, 0), (4, 4, 0), (3, 3, 0)]
    each = calls({"x": SAMPLES, "k": np.arange(11)}, [X, K], [Y], [profile])
    assert [(call.feed["x"].shape, float(call.feed["k"])) for call in each] == [((1, 2), n) for n in range(11)]
    assert len(calls({"x": SAMPLES, "k": np.arange(11)}, [X, K], [Y], [profile], limit=3)) == 3


def test_arrays_that_are_one_sample_as_a_whole_are_one_call() -> None:
    infos = [info("x", "p", 2, axis=None), info("z", "p", 2, axis=None)]
    (call,) = calls({"x": SAMPLES, "z": SAMPLES}, infos, [info("y", "p", axis=None)], [])
    assert (call.size, call.feed["x"] is SAMPLES) == (0, True)
    assert call.cut({"y": SAMPLES}, [info("y", "p", axis=0)])["y"] is SAMPLES
    several = calls({"x": SAMPLES[None], "z": SAMPLES[None]}, infos, [info("y", "p", axis=None)], [])
    assert [(call.size, call.real, call.feed["x"].shape) for call in several] == [(1, 1, (11, 2))]


@pytest.mark.parametrize(
    ("arrays", "profiles"),
    [
        ({"x": SAMPLES[:, 0], "z": SAMPLES}, []),  # of another rank
        ({"x": SAMPLES, "z": SAMPLES[:3]}, []),  # unlike
        ({"x": SAMPLES[:0], "z": SAMPLES[:0]}, []),
        ({"x": SAMPLES, "z": SAMPLES}, [{name: ShapeRange((1, 3), (4, 3), (4, 3)) for name in "xz"}]),
        (
            {"x": SAMPLES, "z": SAMPLES},
            [{n: ShapeRange((low, 2), (low, 2), (low, 2)) for n, low in (("x", 1), ("z", 2))}],
        ),
    ],
)
def test_what_does_not_fit_is_left_to_the_engine_to_refuse(arrays: Any, profiles: Any) -> None:
    (call,) = calls(arrays, [X, info("z", "n", 2)], [Y], profiles)
    assert call.size == 0
    assert call.feed == arrays or all(call.feed[name] is array for name, array in arrays.items())


def test_the_batch_of_a_profile_is_what_all_inputs_take() -> None:
    profile = {"x": ShapeRange((1, 2), (8, 2), (8, 2)), "z": ShapeRange((2, 2), (3, 2), (3, 2))}
    found = calls({"x": SAMPLES, "z": SAMPLES}, [X, info("z", "n", 2)], [Y], [profile])
    assert [(call.size, call.real) for call in found] == [(3, 3), (3, 3), (3, 3), (2, 2)]
    np.testing.assert_array_equal(np.concatenate([call.feed["x"] for call in found]), SAMPLES)
    fixed = calls({"x": SAMPLES}, [info("x", 4, 2)], [info("y", 4)], [])
    assert [(call.size, call.real, len(call.feed["x"])) for call in fixed] == [(4, 4, 4), (4, 4, 4), (4, 3, 4)]


def test_samples_on_another_axis_are_cut_there() -> None:
    h = info("h", 3, "n", axis=1)
    profile = {"x": ShapeRange((4, 2), (4, 2), (4, 2)), "h": ShapeRange((3, 4), (3, 4), (3, 4))}
    states = np.arange(33).reshape(3, 11)
    found = calls({"x": SAMPLES, "h": states}, [X, h], [h], [profile])
    assert [(call.size, call.real, call.feed["h"].shape) for call in found] == [(4, real, (3, 4)) for real in (4, 4, 3)]
    parts = [call.cut({"h": call.feed["h"], "x": call.feed["x"]}, [h, X]) for call in found]
    np.testing.assert_array_equal(joined(parts, [h, X])["h"], states)
    np.testing.assert_array_equal(joined(parts, [h, X])["x"], SAMPLES)


def test_samples_come_back_from_the_axes_that_they_are_laid_on() -> None:
    infos = [X, info("h", 3, "n", axis=1), info("s", 2, axis=None)]
    samples = {"x": SAMPLES, "h": np.arange(33).reshape(11, 3), "s": SAMPLES[None, 0], "more": SAMPLES}
    laid = laid_out(samples, infos)
    assert {name: array.shape for name, array in laid.items()} == {
        "x": (11, 2),
        "h": (3, 11),
        "s": (2,),
        "more": (11, 2),
    }
    back = samples_first(laid, infos)
    assert {*back} == {*samples}
    for name, array in samples.items():
        np.testing.assert_array_equal(back[name], array)
    np.testing.assert_array_equal(joined([{"more": SAMPLES[:2]}, {"more": SAMPLES[2:]}], infos)["more"], SAMPLES)


def test_a_profile_takes_exactly_its_least_batch() -> None:
    profiles = [{"x": ShapeRange((low, 2), (low, 2), (high, 2))} for low, high in ((3, 3), (4, 8))]
    found = calls({"x": SAMPLES}, [X], [Y], profiles)
    assert [(call.size, call.real) for call in found] == [(8, 8), (3, 3)]
    assert [call.size for call in calls({"x": SAMPLES[:4]}, [X], [Y], profiles)] == [4]


def test_an_output_of_no_samples_needs_one_full_call() -> None:
    odd, profile = info("m", axis=None), [{"x": ShapeRange((4, 2), (4, 2), (4, 2))}]
    assert len(calls({"x": SAMPLES[:4]}, [X], [Y, odd], profile)) == 1
    for count, more in ((3, False), (5, False), (4, True)):
        with pytest.raises(UsageError, match=r"output 'm' scalar counts samples.* give 4 samples"):
            calls({"x": SAMPLES[:count]}, [X], [Y, odd], profile, more=more)
    one = [{"x": ShapeRange((1, 2), (1, 2), (1, 2))}]
    parts = [
        call.cut({"m": np.float32(call.feed["x"][0, 0])}, [odd]) for call in calls({"x": SAMPLES}, [X], [odd], one)
    ]
    np.testing.assert_array_equal(joined(parts, [odd])["m"], SAMPLES[:, 0])


def test_a_share_is_the_same_number_of_rows_for_each_sample() -> None:
    rows = np.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(share(rows, info("y", 2, "r", axis=1), 4, 1, 3), rows[:, 3:9])
    assert share(rows, info("y", 2, "r", axis=1), 4, 0, 4) is rows
    for size, axis, array in ((5, 1, rows), (4, 1, rows[0]), (4, 0, rows[:0])):
        with pytest.raises(EngineError, match=rf"'y' has shape .* for a batch of {size}: axis {axis} isn't the batch"):
            share(array, info("y", axis=axis), size, 0, 1)


def test_arrays_that_one_cannot_hold_are_refused() -> None:
    with pytest.raises(DataError, match="y has shapes 2x2, 3x2, which one array can't hold"):
        joined([{"y": SAMPLES[:2]}, {"y": SAMPLES[:3]}], [info("y", axis=None)])
    with pytest.raises(DataError, match="y has shapes 2x2, 2x1, "):
        joined([{"y": SAMPLES[:2]}, {"y": SAMPLES[:2, :1]}])
    wide = joined([{"y": SAMPLES[:2]}, {"y": SAMPLES[:2, :1]}], [info("y", 2, "n", axis=1)])["y"]
    assert wide.shape == (2, 3)


def test_inputs_that_count_samples() -> None:
    assert counting([X, info("h", 2, "n", axis=1), info("s", 3), K]) == {"x": 0, "h": 1}
    assert counting([info("x", 4, 2), info("z", 4)]) == {"x": 0, "z": 0}
    assert counting([info("x", 4, 2), info("z", 3)]) == {}
    assert counting([info("x", "n", axis=None)]) == {}
