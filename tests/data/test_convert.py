"""Arrays in an input's type: kinds and values stay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data.convert import converted, numpy_dtype, single_runs

ONES = np.array([[1.0, 2.0], [3.0, -4.0]])


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("given", ["float16", "float32", "float64", "bfloat16"])
def test_floating_types_become_each_other(given: str, name: str) -> None:
    array = ONES.astype(numpy_dtype(given))
    result = converted(array, name, "x")
    assert result.dtype == numpy_dtype(name)
    np.testing.assert_array_equal(result.astype(np.float64), ONES)
    assert (result is array) == (given == name)


def test_whole_numbers_become_each_other_where_they_stay_the_same() -> None:
    assert converted(np.array([0, 200]), "uint8", "x").dtype == np.uint8
    for values, name in (([300], "uint8"), ([-1], "uint64"), ([2**31], "int32")):
        with pytest.raises(DataError, match=f"x has int64 values that {name} can't hold"):
            converted(np.array(values), name, "x")


@pytest.mark.filterwarnings("error")
def test_values_beyond_a_type_are_refused_and_infinite_ones_stay() -> None:
    with pytest.raises(DataError, match="x has float32 values that float16 can't hold"):
        converted(np.array([1e6], np.float32), "float16", "x")
    strange = converted(np.array([np.inf, np.nan, 1.0]), "float16", "x")
    assert np.isinf(strange[0])
    assert np.isnan(strange[1])


@pytest.mark.parametrize(
    ("given", "name"), [("int64", "float32"), ("float32", "int64"), ("bool", "int8"), ("V4", "float32")]
)
def test_another_kind_is_refused_with_what_to_do(given: str, name: str) -> None:
    said = rf"^the input has dtype .*, the engine takes {name}: convert it with astype first$"
    with pytest.raises(UsageError, match=said):
        converted(np.zeros(2, given), name, "the input", "the engine")


def test_bytes_of_a_type_that_files_have_no_name_for_are_taken_as_that_type() -> None:
    plain = ONES.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(converted(plain.view("V2"), "bfloat16", "x"), plain)


def test_results_are_contiguous() -> None:
    for array in (np.asfortranarray(ONES), ONES[:, ::-1], np.asfortranarray(ONES.astype(np.float32))):
        result = converted(array, "float64", "x")
        assert result.flags.c_contiguous
        np.testing.assert_array_equal(result, array)


def test_a_fixed_batch_of_one_input_is_filled_in_all() -> None:
    inputs = {"x": TensorInfo("x", "float32", ("n", 2)), "y": TensorInfo("y", "float32", (4, 3))}
    runs = list(single_runs(inputs, [{"x": np.ones((6, 2), np.float32), "y": np.ones((6, 3), np.float32)}]))
    assert [(run.feed["x"].shape, run.feed["y"].shape, run.real) for run in runs] == [
        ((4, 2), (4, 3), 4),
        ((4, 2), (4, 3), 2),
    ]
    outputs = {"y": np.arange(4), "all": np.arange(3), "one": np.float32(1)}
    assert [array.shape for array in runs[1].cut(outputs).values()] == [(2,), (3,), ()]
    assert all(runs[0].cut(outputs)[name] is array for name, array in outputs.items())
    for shape, axis in (((2, 2), 0), (("n", 2), 1)):  # of two sizes, or with samples elsewhere: one at a time
        infos = {"x": TensorInfo("x", "float32", (4, 2)), "z": TensorInfo("z", "float32", shape, batch_axis=axis)}
        (run, *_) = single_runs(infos, [dict.fromkeys(infos, np.ones((6, 2), np.float32))])
        assert (run.size, run.real) == (1, 1)


def test_a_type_without_numbers_is_refused() -> None:
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    with pytest.raises(UsageError, match="the model takes string, which is no type of numbers"):
        numpy_dtype("string")
    with pytest.raises(UsageError, match="x has dtype float32, the model takes uint8: give pixels from 0 to 255"):
        converted(np.ones(2, np.float32), "uint8", "x")
    with pytest.raises(UsageError, match="takes uint8: convert it with astype first"):
        converted(np.ones(2, bool), "uint8", "x")
    record = np.zeros(2, [("a", "i2")])
    with pytest.raises(UsageError, match="astype first"):
        converted(record, "bfloat16", "x")
