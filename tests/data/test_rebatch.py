"""Samples in batches: same samples, same order, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest

from trtopt.core.errors import DataError
from trtopt.data.rebatch import chunks, filled, joined, rebatched, samples_in

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


def test_a_batch_is_filled_from_its_first_sample_on() -> None:
    np.testing.assert_array_equal(filled(batch(0, 3), 7)["number"], [0, 1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(filled(batch(0, 3), 2)["number"], [0, 1])


def test_what_does_not_count_samples_is_refused() -> None:
    assert samples_in(batch(2, 9)) == 7
    with pytest.raises(DataError, match=r"^f: the inputs have different numbers of samples: {'a': 3, 'b': 2}"):
        samples_in({"a": SAMPLES[:3], "b": SAMPLES[:2]}, "f: ")
    with pytest.raises(DataError, match="the data for 'b' is one number"):
        samples_in({"a": SAMPLES, "b": np.float32(1)})
