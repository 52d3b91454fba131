from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from skimage import data, filters
from sklearn.datasets import load_digits

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.thresholds import (
    AUTO_TIE,
    CANDIDATES,
    ENTROPY_BINS,
    FINDERS,
    LEVELS,
    choose,
    divergences,
    entropy_bins,
    quantization_error,
)
from trtopt.core.errors import CalibrationError, UsageError
from trtopt.core.values import METHODS

FIXED = METHODS[1:]


def counted(values: NDArray[np.floating]) -> Histogram:
    histogram = Histogram()
    histogram.add(values)
    return histogram


def requantized(values: NDArray[np.floating], amax: float) -> NDArray[np.float64]:
    scale = amax / 127
    return np.clip(np.rint(values.astype(np.float64) / scale), -127, 127) * scale


def literal_divergences(counts: NDArray[np.float64]) -> list[float]:
    """The pseudo-code of the GTC 2017 slides, bin by bin."""
    found = []
    for kept in range(LEVELS, counts.size + 1):
        p = counts[:kept].copy()
        p[-1] += counts[kept:].sum()
        q = np.zeros(kept)
        levels: list[list[int]] = [[] for _ in range(LEVELS)]
        for index in range(kept):
            levels[index * LEVELS // kept].append(index)
        for level in levels:
            filled = [index for index in level if counts[index] > 0]
            for index in filled:
                q[index] = counts[level].sum() / len(filled)
        if q.sum() == 0:
            found.append(math.inf)
            continue
        p, q = p / p.sum(), q / q.sum()
        terms = [0.0 if a == 0 else math.inf if b == 0 else a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist())]
        found.append(math.fsum(terms))
    return found


@functools.cache
def real_values() -> dict[str, NDArray[np.float32]]:
    """Values like activations, from real photos: signed responses, rectified ones, clipped ones, 8-bit pixels."""
    grey = data.camera().astype(np.float32) / 255
    edges = filters.sobel_h(grey).astype(np.float32)
    return {
        "edges": edges,
        "relu": np.maximum(edges, 0),
        "relu6": np.clip(edges * 40, 0, 6),
        "pixels": (data.chelsea().astype(np.float32) - 127) / 128,
        "digits": load_digits().data.astype(np.float32),
        "laplace": filters.laplace(grey).astype(np.float32),
    }


@pytest.fixture(scope="module")
def real() -> dict[str, NDArray[np.float32]]:
    return real_values()


@pytest.mark.parametrize(
    ("name", "thresholds", "auto"),
    [
        ("edges", (0.43179, 0.6416094, 0.6422119), "percentile"),
        ("relu", (0.43179, 0.6459506, 0.59021), "mse"),
        ("relu6", (6.0014648, 5.9990962, 6.0), "minmax"),  # TensorRT 8.6 reports 6.0015
        ("pixels", (0.9381695, 0.9921875, 0.9921875), "minmax"),
        ("laplace", (0.7108073, 1.1622642, 1.0354004), "mse"),
    ],
)
def test_thresholds_stay_what_they_were(name: str, thresholds: tuple[float, ...], auto: str) -> None:
    """A table that is made again is the same one."""
    histogram = counted(real_values()[name])
    found = [choose(histogram, method).amax for method in ("entropy", "mse", "percentile")]
    assert found == pytest.approx(thresholds, rel=1e-6)
    assert choose(histogram, "auto").method == auto


@settings(max_examples=25, deadline=None)
@given(
    arrays(np.int64, 200, elements=st.integers(0, 50)).map(lambda item: item * (item > 12)),
    st.integers(0, 10_000),
)
def test_closed_form_equals_the_literal_search(counts: NDArray[np.int64], spike: int) -> None:
    h = counts.astype(np.float64)
    h[3] += spike
    h[-1] += 1
    literal, found = np.array(literal_divergences(h)), divergences(h)
    assert np.array_equal(np.isinf(found), np.isinf(literal))
    finite = np.isfinite(literal)
    assert np.abs(found[finite] - literal[finite]).max() < 1e-11


def test_the_spike_of_zeros_does_not_make_entropy_clip(real: dict[str, NDArray[np.float32]]) -> None:
    rectified = counted(real["relu"])
    zeros = rectified.counts[0] / rectified.total
    assert zeros > 0.4
    limited = choose(rectified, "entropy").amax
    spared = Histogram(rectified.counts.copy(), rectified.exponent, rectified.low, rectified.high, rectified.total)
    spared.counts[0] = 0  # the same tensor without its zeros
    assert limited == pytest.approx(choose(spared, "entropy").amax, rel=0.02)
    literal = divergences(entropy_bins(rectified))
    unlimited = (int(literal.argmin()) + LEVELS + 0.5) * rectified.absmax / ENTROPY_BINS
    assert unlimited < 0.5 * limited


def test_entropy_bins_are_those_of_a_two_pass_histogram(real: dict[str, NDArray[np.float32]]) -> None:
    for name, values in real.items():
        histogram = counted(values)
        found = entropy_bins(histogram)
        expected, _ = np.histogram(np.abs(values.astype(np.float64)), ENTROPY_BINS, (0, histogram.absmax))
        assert found.size == ENTROPY_BINS
        assert found.sum() == pytest.approx(values.size)
        # Both are counts of the same values; a value is at most one of the finer bins away from its place.
        gap = np.abs(np.cumsum(found) - np.cumsum(expected))
        assert (gap <= np.maximum(expected, np.roll(expected, -1)) + 1e-6).all(), name


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["edges", "relu", "pixels", "digits", "laplace"]),
    st.floats(0.05, 1.2),
)
def test_expected_error_is_the_real_one(name: str, share: float) -> None:
    values = real_values()[name]
    histogram = counted(values)
    amax = share * histogram.absmax
    true = np.square(values - requantized(values, amax)).mean()
    (found,) = quantization_error(histogram, np.array([amax]))
    # The distance to the nearest code changes no faster than the value, and a value is spread over one bin at most.
    assert abs(math.sqrt(found) - math.sqrt(true)) <= histogram.width


def test_mse_beats_every_threshold_of_a_fine_grid(real: dict[str, NDArray[np.float32]]) -> None:
    for name, values in real.items():
        histogram = counted(values)
        found = choose(histogram, "mse").amax
        grid = np.append(np.linspace(1 / 256, 1, 800) * histogram.absmax, found)
        errors = quantization_error(histogram, grid)
        assert errors[-1] <= errors.min() * 1.01, name


def test_percentile_keeps_its_share(real: dict[str, NDArray[np.float32]]) -> None:
    for values in real.values():
        histogram = counted(values)
        amax = choose(histogram, "percentile").amax
        magnitudes = np.abs(values)
        assert (magnitudes <= amax).mean() >= 0.9999
        assert amax <= histogram.absmax
        assert (magnitudes < amax - histogram.width).mean() < 0.9999


def test_auto_takes_one_of_four_and_each_method_has_a_name() -> None:
    assert CANDIDATES == ("minmax", "percentile", "mse", "entropy")  # another would change what everybody gets
    assert {"auto", *FINDERS} == {*METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_thresholds_follow_the_scale_and_ignore_the_sign(real: dict[str, NDArray[np.float32]], method: str) -> None:
    for values in real.values():
        base = choose(counted(values), method)
        assert choose(counted(values * np.float32(2**-7)), method).amax * 2**7 == base.amax
        assert choose(counted(-values), method) == base


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, st.integers(1, 400), elements=st.floats(-1e6, 1e6, width=32)))
def test_every_method_gives_a_usable_threshold(values: NDArray[np.float32]) -> None:
    histogram = counted(values)
    if histogram.absmax == 0:
        with pytest.raises(CalibrationError, match="zeros"):
            choose(histogram, "mse")
        return
    for method in METHODS:
        found = choose(histogram, method)
        assert 0 < found.amax <= histogram.absmax * (1 + 0.5 / ENTROPY_BINS)
        assert found.method in FIXED
    assert choose(histogram, "minmax").amax == histogram.absmax


def test_auto_is_nearly_the_best_and_clips_least(real: dict[str, NDArray[np.float32]]) -> None:
    taken = set()
    for values in real.values():
        histogram = counted(values)
        each = {method: choose(histogram, method).amax for method in FIXED}
        errors = dict(zip(each, quantization_error(histogram, np.array(list(each.values())))))
        found = choose(histogram, "auto")
        assert found.amax == each[found.method]
        assert errors[found.method] <= min(errors.values()) * (1 + AUTO_TIE)
        good = [name for name in FIXED if errors[name] <= min(errors.values()) * (1 + AUTO_TIE)]
        assert min(found.amax, histogram.absmax) == max(min(each[name], histogram.absmax) for name in good)
        taken.add(found.method)
    assert len(taken) > 1, taken  # else these data tell nothing about the choice


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(UsageError, match=r"'max'; allowed: auto, entropy"):
        choose(counted(np.ones(2, np.float32)), "max")
