from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from test_quality import noise
from world import World, has, net, samples

from trtopt.calibration.calibrator import CalibrateResult, calibrate
from trtopt.calibration.convergence import MORE, movement
from trtopt.calibration.histogram import Histogram
from trtopt.calibration.observe import BLOCKS, observe
from trtopt.calibration.table import Table, choose_all
from trtopt.core.errors import DataError


def measured(data: NDArray[Any], **options: Any) -> CalibrateResult:
    return calibrate(net(), data=data.astype(np.float32), threads=1, cache=False, **options)


def noisy(count: int) -> NDArray[np.float32]:
    images = np.stack([noise("normal", 32, seed) for seed in range(count)])
    return images.transpose(0, 3, 1, 2).astype(np.float32) / 255


def test_noise_is_refused_and_can_be_insisted_on() -> None:
    with pytest.raises(DataError) as refused:
        measured(noisy(12))
    has(str(refused.value), "random noise", "sample", "neighbouring pixels", "`allow_unusual_data=True`")
    assert "build" not in str(refused.value)  # which may not be what was asked for
    result = measured(noisy(12), allow_unusual_data=True)
    assert any("random noise is among the samples (12:" in note for note in result.notes)


def test_noise_is_refused_before_the_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    from trtopt.data import ArrayBatches

    whole = ArrayBatches.__iter__

    def counting(self: ArrayBatches) -> Any:
        for batch in whole(self):
            read.append(len(batch["x"]))
            yield batch

    monkeypatch.setattr(ArrayBatches, "__iter__", counting)
    with pytest.raises(DataError, match="at least 24 of the 40 samples are random noise"):
        measured(noisy(40), batch=4)
    assert sum(read) == 24  # the first batch after half of 40


def test_some_noise_is_told_and_not_refused() -> None:
    result = measured(np.concatenate([samples(30), noisy(3)]))
    (note,) = (note for note in result.notes if "random noise" in note)
    assert "(3: " in note
    assert all(f"sample {number}" in note for number in (30, 31, 32))


def test_plain_and_equal_samples_are_refused_by_what_was_seen() -> None:
    plain = np.full((10, 3, 32, 32), 0.25)
    with pytest.raises(DataError, match=r"'x' is 0.25 everywhere"):
        measured(plain)
    same = np.repeat(samples(1), 10, 0)
    with pytest.raises(DataError, match="all 10 samples are the same one"):
        measured(same)
    assert any("9 of the 10 samples are copies" in note for note in measured(same, allow_unusual_data=True).notes)


def test_the_report_lives_in_the_table_and_in_kept_passes(world: World) -> None:
    np.savez(world.arrays, x=noisy(12))
    where = world.output / "t.calib.json"
    arguments = ("calibrate", world.model, "--data", world.arrays, "-o", where)
    has(world.refused(*arguments), "random noise")
    done = world.run(*arguments, "--allow-unusual-data", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["quality"]["random"]["count"] == 12
    assert Table.load(where).quality == found["quality"]
    where.unlink()
    has(world.refused(*arguments), "random noise")  # from the pass that was kept, too


def test_outliers_copies_and_monotony_are_told() -> None:
    varied = samples(40)
    raw = varied.copy()
    raw[7] *= 255
    (note,) = (note for note in measured(raw).notes if "far outside" in note)
    assert "sample 7" in note
    assert not [note for note in measured(varied).notes if "far outside" in note or "same" in note]
    dull = np.concatenate([varied[:4], np.repeat(varied[4:5], 20, 0)])
    assert any("`method='minmax'`" in note for note in measured(dull, method="percentile").notes)
    assert not any("`method='minmax'`" in note for note in measured(dull, method="minmax").notes)


def test_entropy_is_told_where_it_costs() -> None:
    random = np.random.default_rng(0)
    spiky = samples(40)
    spiky[:, :, ::4, ::4] *= 12  # few, large and regular: an entropy search cuts them off
    spiky += random.uniform(0, 1e-3, spiky.shape)
    result = measured(spiky, method="entropy")
    assert any("entropy search costs accuracy" in note and "`method='auto'`" in note for note in result.notes)
    assert not any("entropy search" in note for note in measured(spiky).notes)
    assert not any("entropy search" in note for note in measured(samples(40), method="entropy").notes)


def blocks_of(data: NDArray[Any]) -> tuple[Any, ...]:
    return observe(net(), ["x", "b", "d"], [{"x": data.astype(np.float32)}], threads=1).blocks


def test_blocks_follow_content_and_add_up() -> None:
    data = samples(40).astype(np.float32)
    seen = observe(net(), ["x", "b"], [{"x": data}], threads=2)
    again = observe(net(), ["x", "b"], [{"x": data[::-1][start : start + 3]} for start in range(0, 40, 3)], threads=1)
    assert len(seen.blocks) == BLOCKS
    for one, other in zip(seen.blocks, again.blocks):
        for name in ("x", "b"):
            assert np.array_equal(one[name].counts, other[name].counts)
            assert (one[name].low, one[name].high) == (other[name].low, other[name].high)
    assert sum(block["b"].total for block in seen.blocks) == seen.histograms["b"].total


def test_more_samples_are_forecast_to_move_less_the_more_there_are() -> None:
    forecast = []
    for count in (16, 40):
        result = measured(samples(count))
        assert result.table.quality is not None
        moves = result.table.quality["convergence"]
        assert (moves["more"], moves["method"]) == (MORE, "auto")
        assert moves["tensor"] in result.table.tensors
        forecast.append(moves["mean"])
    assert 0 < forecast[1] < forecast[0]


def test_the_command_line_says_how_far_more_samples_would_move_thresholds(world: World) -> None:
    arguments = ("calibrate", world.model, "--data", world.arrays, "-o", world.output / "t.calib.json")
    outcome = world.run(*arguments)
    said = "another 200 samples like these would move thresholds by about"
    assert (outcome.out + outcome.err).count(said) == 1  # as a fact, or as a warning: not both


def test_too_few_samples_to_say_are_not_spoken_of() -> None:
    result = measured(samples(4))
    assert result.table.quality is not None
    assert result.table.quality["convergence"] is None
    assert not any("another" in note for note in result.notes)


def of(values: NDArray[np.float64]) -> Histogram:
    histogram = Histogram()
    histogram.add(values)
    return histogram


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["minmax", "mse", "percentile", "entropy", "auto"]))
def test_equal_blocks_move_nothing_and_different_ones_do(seed: int, method: str) -> None:
    values = np.random.default_rng(seed).standard_normal(4000)
    equal = [{"t": of(values)} for _ in range(BLOCKS)]
    entries = choose_all({"t": of(np.tile(values, BLOCKS))}, (), method)
    moves = movement(equal, entries, (), 100)
    assert moves is not None
    assert moves["mean"] <= 1e-3
    unequal = [{"t": of(values * scale)} for scale in (1, 1, 3, 3)]
    entries = choose_all({"t": of(np.concatenate([values, values, values * 3, values * 3]))}, (), method)
    moves = movement(unequal, entries, (), 100)
    assert moves is not None
    assert moves["mean"] > 0.05
    assert movement(unequal[:3], entries, (), 100) is None


def test_groups_move_together() -> None:
    random = np.random.default_rng(1)
    blocks = [
        {name: of(random.standard_normal(500) * scale) for name, scale in (("small", 1), ("large", 9))}
        for _ in range(BLOCKS)
    ]
    whole = {name: of(np.zeros(0)) for name in ("small", "large")}
    for block in blocks:
        for name, histogram in block.items():
            whole[name].merge(histogram)
    groups = (("small", "large"),)
    moves = movement(blocks, choose_all(whole, groups, "minmax"), groups, 100)
    assert moves is not None
    assert moves["mean"] == pytest.approx(moves["most"], abs=1e-5)


def test_a_table_without_a_report_still_loads(tmp_path: Path) -> None:
    result = measured(samples(8))
    result.table.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    del content["quality"]
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert Table.load(tmp_path / "t.json").quality is None
