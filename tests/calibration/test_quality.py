from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from world import World, has, net, samples

from trtopt.calibration.calibrator import CalibrateResult, calibrate
from trtopt.calibration.quality import Probes, check_preprocessing
from trtopt.calibration.table import Table
from trtopt.core.errors import DataError
from trtopt.graph.passes.fold import fold


def measured(data: NDArray[Any], **options: Any) -> CalibrateResult:
    return calibrate(net(), data=data.astype(np.float32), threads=1, cache=False, **options)


def test_ranges_are_measured_on_the_sample_that_goes_furthest() -> None:
    images = samples(40)
    images[33] = images[33] * np.float32(3)
    forth, back, joined = Probes(), Probes(), Probes()
    for number in range(40):
        forth.add({"x": images[number]})
        back.add({"x": images[39 - number]})
    for start in (20, 0):  # of shards
        shard = Probes()
        assert (
            sum(
                len(batch["x"])
                for batch in shard.watch([{"x": images[start : start + 7]}, {"x": images[start + 7 : start + 20]}])
            )
            == 20
        )
        assert len([*joined.watch(shard.feeds)]) == 5
    for probes in (forth, back, joined):
        assert len(probes.feeds) == 5
        assert any(np.array_equal(feed["x"][0], images[33]) for feed in probes.feeds)
        assert all(np.array_equal(one["x"], other["x"]) for one, other in zip(forth.feeds, probes.feeds))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_values_beyond_all_sense_are_left_to_those_who_count(value: float) -> None:
    image = samples(1)[0]
    image[1, 5, 5] = value
    probes = Probes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probes.add({"more": np.ones(3, np.float32), "x": image})
    assert bool(probes.feeds) == bool(np.isfinite(value))


def test_copies_are_refused_or_told() -> None:
    same = np.repeat(samples(1), 10, 0)
    with pytest.raises(DataError, match=r"all 10 samples are the same one.*`allow_unusual_data=True`"):
        measured(same)
    assert any("9 of the 10 samples are copies" in note for note in measured(same, allow_unusual_data=True).notes)
    assert any("1 of the 41 samples" in note for note in measured(np.concatenate([samples(40), samples(1)])).notes)


def test_the_facts_live_in_the_table_and_in_kept_passes(world: World) -> None:
    np.savez(world.arrays, x=np.repeat(samples(1), 10, 0))
    where = world.output / "t.calib.json"
    arguments = ("calibrate", world.model, "--data", world.arrays, "-o", where)
    has(world.refused(*arguments), "are the same one")
    done = world.run(*arguments, "--allow-unusual-data", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["quality"]["different"] == 1
    assert Table.load(where).quality == found["quality"]
    where.unlink()
    has(world.refused(*arguments), "are the same one")  # from the pass that was kept, too


_LAYERS = {
    "folded": "y = Conv (x, weight)",
    "with a BatchNormalization": "a = Conv (x, weight) y = BatchNormalization (a, large, zero, zero, wide)",
    "that normalises by itself": "a = Div (x, most) y = Conv (a, weight)",
    "without convolution": "y = Relu (x)",
}


@pytest.mark.parametrize("layers", _LAYERS)
@pytest.mark.parametrize("batch", ["n", "3"])
def test_pixels_as_they_are_in_a_file_are_told(layers: str, batch: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (float[{batch}, 3, h, w] x) => (float[{batch}, 8, i, j] y)
        <float most = {{255}}> {{ {_LAYERS[layers]} }}"""
    )
    values = {"weight": np.random.default_rng(0).standard_normal((8, 3, 3, 3)) / 4}
    values |= {"zero": np.zeros(8), "wide": np.full(8, 16.0), "large": np.full(8, 4.0)}
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    folded, _ = fold(model)
    expected = "0..255" if layers in ("folded", "with a BatchNormalization") else ""
    for factor, text in ((255, expected), (1, "")):
        found = check_preprocessing(folded, [{"x": sample[None] * np.float32(factor)} for sample in samples(8)])
        assert text in found.get("warning", "") and bool(text) == ("warning" in found)
    for small in (np.ones((1, 4, 32, 32), "f4"), np.ones((1, 3, 20, 20), "f4"), np.ones((1, 3, 32, 32), np.int64)):
        assert check_preprocessing(folded, [{"x": small * 255}]) == {}
