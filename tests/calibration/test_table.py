from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skimage import data, filters

from trtopt.calibration.histogram import Histogram, merged
from trtopt.calibration.table import Table, _text, choose_all
from trtopt.calibration.thresholds import TableEntry, choose
from trtopt.core.errors import CalibrationError, OutputError, UsageError
from trtopt.core.values import METHODS
from trtopt.graph.passes.repair import Repair


def counted(values: Any) -> Histogram:
    histogram = Histogram()
    histogram.add(np.asarray(values, np.float32))
    return histogram


@pytest.fixture(scope="module")
def histograms() -> dict[str, Histogram]:
    grey = data.camera() / 255
    edges = filters.sobel(grey)
    return {"image": counted(grey), "edges": counted(edges * 20), "corners: 1": counted(filters.laplace(grey))}


@pytest.fixture
def table(histograms: dict[str, Histogram]) -> Table:
    groups = (("image", "edges"),)
    return Table(
        tensors=choose_all(histograms, groups, "auto"),
        groups=groups,
        model={"name": "net.onnx", "fingerprint": "ab" * 32},
        data={"kind": "images", "count": 3, "digest": "cd"},
        method="auto",
        samples=3,
        seconds=1.25,
        preprocess={"size": [512, 512]},
        skipped=({"name": "a.jpg", "reason": "the file is empty"},),
        repairs={
            "conv": Repair(np.int8([[0, 1, -1], [1, 0, 0]]), np.float32([0.5, -1])),
            "plain": Repair(np.int8([1])),
        },
        smoothed={"h": np.float32([1, 2.5, 4])},
    )


def test_a_table_survives_its_file_to_the_bit(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "t.calib.json"
    table.save(path)
    loaded = Table.load(path)
    assert loaded.to_json() == table.to_json()
    assert loaded.digest == table.digest
    assert loaded.repairs == table.repairs and loaded.smoothed["h"].tolist() == [1, 2.5, 4]
    for method in METHODS:
        assert loaded.with_method(method).amax == table.with_method(method).amax
    content = json.loads(path.read_bytes())
    assert content["format"] == "trtopt.calib/1"
    assert set(content["tensors"]["image"]) >= {"amax", "method", "absmax", "count", "histogram"}


def test_a_group_has_one_threshold_from_its_counts_together(table: Table, histograms: dict[str, Histogram]) -> None:
    both = merged([histograms["image"], histograms["edges"]])
    for method in METHODS:
        amax = table.with_method(method).amax
        assert amax["image"] == amax["edges"] == choose(both, method).amax
    assert choose(histograms["image"], "minmax").amax != choose(histograms["edges"], "minmax").amax
    assert table.tensors["image"].histogram is histograms["image"]


def test_counted_tensors_near_fp16s_end_join_those_of_some_samples(table: Table) -> None:
    entries = {name: TableEntry(1.0, "minmax", counted([value])) for name, value in (("far", 40_000), ("near", 3))}
    assert replace(table, tensors=entries, ranges={"seen": 5e4}).beyond_fp16 == {"seen": 5e4, "far": 40_000.0}


def test_zeros_are_refused_by_name() -> None:
    with pytest.raises(CalibrationError, match="'dead': only zeros"):
        choose_all({"dead": counted([0, 0])}, (), "auto")


def test_thresholds_without_histograms_can_be_kept_but_not_chosen_again(tmp_path: Path, table: Table) -> None:
    bare = Table({"a": TableEntry(1.5, "imported")}, (), {"name": "", "fingerprint": ""}, {}, "imported", 0)
    bare.save(tmp_path / "t.json")
    assert Table.load(tmp_path / "t.json").amax == {"a": 1.5}
    with pytest.raises(CalibrationError, match="without histograms"):
        bare.with_method("mse")


def test_an_unwritable_place_leaves_nothing(table: Table, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="absent doesn't exist, create it with mkdir -p"):
        table.save(tmp_path / "absent" / "t.calib.json")
    (tmp_path / "t.calib.json").write_text("old")
    damaged = Table(table.tensors, (), table.model, {"count": math.nan}, "auto", 3)
    with pytest.raises(ValueError, match="JSON"):
        damaged.save(tmp_path / "t.calib.json")
    assert [item.read_text() for item in tmp_path.iterdir()] == ["old"]


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = json.loads(path.read_bytes())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def within(key: str, name: str, change: dict[str, Any]) -> Callable[[Path], None]:
    return edited(lambda content: content[key][name].update(change))


def in_image(key: str, value: Any) -> Callable[[Path], None]:
    return edited(lambda content: content["tensors"]["image"].update({key: value}))


def in_histogram(key: str, value: Any) -> Callable[[Path], None]:
    return edited(lambda content: content["tensors"]["image"]["histogram"].update({key: value}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "not JSON"),
        (lambda path: path.write_bytes(os.urandom(100)), "not JSON"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not JSON"),
        (lambda path: path.write_text("[]"), "the format None; 'trtopt.calib/1' is needed"),
        (edited(lambda content: content.update(format="trtopt.calib/9")), "the format 'trtopt.calib/9'"),
        (edited(lambda content: content.pop("tensors")), "the table.tensors is NoneType; a mapping is needed"),
        (edited(lambda content: content.update(tensors={})), "has no tensors"),
        (
            edited(lambda content: content.update(samples="many")),
            "the table.samples is 'many'; a whole number is needed",
        ),
        (edited(lambda content: content.update(groups=[["image", "other"]])), "a group with 'other'"),
        (edited(lambda content: content.update(groups=[[]])), "a group without tensors"),
        (edited(lambda content: content["model"].pop("fingerprint")), "the table.model lacks 'fingerprint'"),
        (edited(lambda content: content.update(quality={"different": 3})), "the table.quality lacks 'samples'"),
        (
            edited(lambda content: content.update(preprocess={"resize": "zoom"})),
            "the table.preprocess: preprocessing: resize",
        ),
        (edited(lambda content: content["tensors"].update(image=3)), "the tensor 'image' is 3; a mapping is needed"),
        (in_image("amax", 0), "'image'.amax is 0; a number above 0.0"),
        (in_image("amax", -2.5), "'image'.amax is -2.5"),
        (in_image("amax", math.inf), "the number inf"),
        (in_image("amax", True), "the tensor 'image'.amax is True; a number is needed"),
        (in_image("count", 7), "the counts add up to"),
        (in_image("high", 1e9), "'image' has a damaged histogram"),
        (in_histogram("bins", 100), "'image'.histogram.bins is 100; a whole number of at least 16384 is needed"),
        (in_histogram("counts", "AAAA"), "'image' has a damaged histogram"),
        (in_histogram("counts", "not base64"), "'image' has a damaged histogram"),
        (in_histogram("counts", _text(np.uint8([1, 2, 3]), "u1")), "'image' has a damaged histogram (3 bytes)"),
        (in_histogram("exponent", -50), "'image' has a damaged histogram"),
        *(
            (within("repairs", "conv", change), "repair")
            for change in (
                *({"shape": item} for item in ([2, 2], [-1], "4", [], [1 << 20, 1 << 20])),
                *({"offsets": item} for item in ("!", "AAAA")),
                *({"bias": item} for item in (3, "AAAA", _text(np.float32([np.inf, 1]), "<f4"))),
            )
        ),
        *((within("smoothed", "h", {"size": item}), "smooth") for item in (0, 2, 4, "3", 1 << 40)),
        (within("smoothed", "h", {"factors": _text(np.float32([1, 0, 1]), "<f4")}), "3 positive numbers"),
        (within("smoothed", "h", {"factors": _text(np.float32([1]), "<f4")}), "3 are needed"),
        (within("smoothed", "h", {"factors": "!"}), "the smoothing of 'h' is damaged"),
    ],
)
def test_a_bad_file_is_refused_and_says_why(
    damage: Callable[[Path], None], message: str, table: Table, tmp_path: Path
) -> None:
    path = tmp_path / "t.calib.json"
    table.save(path)
    damage(path)
    with pytest.raises(CalibrationError) as caught:
        Table.load(path)
    assert message in str(caught.value)
    assert "t.calib.json" in str(caught.value)
    assert "trtopt calibrate" in str(caught.value)


def test_an_absent_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="doesn't exist"):
        Table.load(tmp_path / "t.calib.json")
