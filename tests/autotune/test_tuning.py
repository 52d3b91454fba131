"""tune: the choice keeps the limit in the real Q/DQ graph, costs hardly more than the best one, and is the same again."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import decibels, model, node, photos, values
from onnx import ModelProto, TensorProto, helper, numpy_helper
from world import Heard, World, has

import trtopt
from trtopt.autotune.goal import AccuracyEvaluator, Goal, TunedChoice
from trtopt.autotune.search import Choices
from trtopt.builder.asked import spec_of
from trtopt.builder.lowering import lower
from trtopt.builder.request import BuildRequest
from trtopt.calibration.repairing import NoiseByPlace
from trtopt.calibration.table import Table
from trtopt.core.errors import AccuracyLost, UsageError
from trtopt.core.progress import SILENT
from trtopt.core.values import Precision
from trtopt.data import open_data
from trtopt.evaluation.limits import Limits
from trtopt.graph.io import load_model
from trtopt.graph.output_kinds import Kind
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import Points
from trtopt.ort.runner import OnnxRunner
from trtopt.trt import select

pytestmark = pytest.mark.usefixtures("rtx")


def _net(layers: int = 4, bad: tuple[int, ...] = (1,), batch: int | str = "n") -> ModelProto:
    """Convolutions one behind the other, and a linear layer. What the bad ones read has a channel far over the others, and
    they multiply it with little: no scale fits it, rounding can't help, and through a Clip channels can't be scaled alike."""
    nodes, weights, value = [], {"low": np.float32(0), "high": np.float32(1e4)}, "x"
    for number in range(layers):
        channels = 3 if number == 0 else 16
        weight = values(16, channels, 3, 3, seed=number, scale=1.5 / np.sqrt(9 * channels))
        bias = values(16, seed=40 + number, scale=0.1)
        if number in bad:
            weight[:, 2] /= 200
        if number + 1 in bad:
            weight[2], bias[2] = 200 * weight[2], 200 * bias[2]
        weights |= {f"w{number}": weight, f"b{number}": bias}
        nodes += [
            node("Conv", f"{value} w{number} b{number}", f"a{number}", f"c{number}", pads=[1, 1, 1, 1]),
            node("Clip", f"a{number} low high", f"r{number}", f"relu{number}"),
        ]
        value = f"r{number}"
    nodes += [
        node("GlobalAveragePool", value, "g", "pool"),
        node("Flatten", "g", "f", "flat"),
        node("Gemm", "f w b", "y", "fc", transB=1),
    ]
    weights |= {"w": values(40, 16, seed=80), "b": values(40, seed=81)}
    return model(nodes, weights=weights, inputs={"x": (batch, 3, 16, 16)}, outputs={"y": (batch, 40)})


@pytest.fixture(scope="module")
def crops() -> Any:
    whole = photos(256, 3)
    return np.concatenate([whole[:, :, r : r + 16, c : c + 16] for r in range(0, 240, 24) for c in range(0, 240, 48)])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))


def _tuned(net: ModelProto | Path, crops: Any, folder: Path, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    given: dict[str, Any] = {"data": {"x": crops[:80]}, "target": "sm89", "output_kind": ["y=other"], **options}
    return trtopt.tune(net, folder / "m.engine", **given)


def _graph(net: ModelProto, table: Table, left_out: Any) -> ModelProto:
    spec = spec_of(BuildRequest(net, "", int8=True))
    chosen = replace(table, left_out=dict.fromkeys(left_out, "tried"))
    return lower(fold(net)[0], spec, select("rtx"), chosen).proto


def _snr(graph: ModelProto, net: ModelProto, arrays: Any) -> float:
    found = OnnxRunner(graph, optimize=False)({"x": arrays})["y"]
    return decibels(found, OnnxRunner(net, optimize=True)({"x": arrays})["y"])


def test_the_layer_that_loses_most_stays_out_and_says_why(crops: Any, tmp_path: Path) -> None:
    net, heard = _net(), Heard()
    alone = trtopt.calibrate(net, data={"x": crops[:80]}, repair=True)
    limit = round(_snr(_graph(net, alone.table, ()), net, crops[:80])) + 8
    result = _tuned(net, crops, tmp_path, min_snr=limit, reporter=heard, save_onnx=tmp_path / "g.onnx")
    assert list(result.tuning.left_out) == ["c1"]
    assert result.tuning.before.snr_db < limit < result.tuning.chosen.snr_db
    assert result.precision["fp16"] == 1 and result.precision["int8"] == 4
    kept = {item.node: item.reason for item in result.kept}
    has(kept["c1"], "tuned: in INT8 it makes", "of the noise", "of the arithmetic")
    graph = _graph(net, result.tuning.table, result.tuning.left_out)
    assert _snr(graph, net, crops[80:]) > limit - 1  # samples that nobody saw
    assert 0.5 < result.tuning.chosen.share < 1
    shares = [item.share for item in result.tuning.front]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1
    has("\n".join(heard.notes), "1 layer out of INT8", "choices in")


def test_without_need_nothing_stays_out(crops: Any, tmp_path: Path) -> None:
    heard = Heard()
    result = _tuned(_net(bad=()), crops, tmp_path, min_snr=12, min_agreement=0.99, reporter=heard)
    assert any("`min_agreement=` has nothing to judge" in text for text in heard.warnings)
    assert not result.tuning.left_out and result.tuning.tried == 1
    assert result.tuning.chosen.share == 1
    table = result.tuning.table  # nor is anything repaired
    assert not table.repairs and not table.smoothed
    assert table.digest == trtopt.calibrate(_net(bad=()), data={"x": crops[:80]}).table.digest


@pytest.mark.parametrize("base", ["fp16", "bf16"])
def test_what_holds_more_than_fp16_counts_as_fp32_in_every_choice(crops: Any, tmp_path: Path, base: str) -> None:
    """It was counted as INT8: the share said 99.9 % where the engine had 27 %."""
    net = _net(bad=())
    weights = {item.name: item for item in net.graph.initializer}
    for name, factor in {"w1": 1e6, "b1": 1e6, "w2": 1e-6, "high": 1e6}.items():
        weights[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights[name]) * np.float32(factor), name))
    result = _tuned(net, crops, tmp_path, min_snr=12, bf16=base == "bf16")
    in_fp32 = {item.node for item in result.kept if item.precision is Precision.FP32}
    assert in_fp32 >= {"c1", "c2"} if base == "fp16" else not in_fp32
    assert result.tuning.chosen.share == pytest.approx(result.coverage.get("int8"), abs=0.005)
    assert (result.tuning.chosen.share < 0.6) == (base == "fp16")


def test_each_layer_that_stays_out_has_to(crops: Any, tmp_path: Path) -> None:
    net = _net(layers=4, bad=(1, 3))
    limit = _tuned(net, crops, tmp_path, min_snr=1).tuning.chosen.snr_db + 15
    tuning = _tuned(net, crops, tmp_path, min_snr=limit).tuning
    assert "c1" in tuning.left_out
    for name in tuning.left_out:  # those on the limit's edge may go either way: it holds with a standard error
        others = [other for other in tuning.left_out if other != name]
        assert _snr(_graph(net, tuning.table, others), net, crops[:80]) < limit + 1


def test_few_choices_are_tried(crops: Any, tmp_path: Path) -> None:
    net = _net(layers=9, bad=(1, 3, 5))
    tuning = _tuned(net, crops, tmp_path, min_snr=31).tuning
    assert {"c1", "c3"} <= set(tuning.left_out) <= {"c1", "c3", "c5"} and tuning.tried < 10
    with pytest.raises(AccuracyLost, match="without INT8"):
        _tuned(net, crops, tmp_path, min_snr=66)
    assert len(list((tmp_path / "cache" / "tuning").glob("*.choice"))) < 20


def test_a_choice_is_the_same_for_any_threads_and_holds_with_its_standard_error(crops: Any) -> None:
    net = _net()
    table = trtopt.calibrate(net, data={"x": crops[:80]}).table
    graph = _graph(net, table, ("c1",))
    snr = _snr(graph, net, crops[:80])
    batches = open_data(load_model(net).inputs, data={"x": crops[:80]})

    def judged(min_snr: float, threads: int) -> TunedChoice:
        goal = Goal(Limits(0.0, min_snr))
        return AccuracyEvaluator(fold(net)[0], batches, goal, {"y": Kind.OTHER}, threads)(graph)

    chosen = judged(snr - 2, 2)
    assert chosen == judged(snr - 2, 1) and not chosen.missed
    assert chosen.snr_db == pytest.approx(snr, abs=0.01)
    has(judged(snr - 0.01, 2).missed[0], "hold on these samples, but not with a standard error of")
    has(judged(snr + 0.01, 2).missed[0], f"at least {snr + 0.01:g} is asked for")


def test_the_saved_table_gives_the_same_graph_and_build_the_same_engine(crops: Any, tmp_path: Path) -> None:
    path, kept = tmp_path / "net.onnx", tmp_path / "t.calib.json"
    onnx.save(_net(), path)
    common = {"data": {"x": crops[:80]}, "target": "sm89", "output_kind": ["y=other"], "min_snr": 28}
    graphs = [tmp_path / f"g{number}.onnx" for number in range(3)]
    tuned = trtopt.tune(path, tmp_path / "a.engine", save_onnx=graphs[0], save_calib=kept, **common)
    assert tuned.tuning.left_out
    trtopt.build(path, tmp_path / "b.engine", int8=True, save_onnx=graphs[1], **common)
    trtopt.build(path, tmp_path / "c.engine", int8=True, calib=kept, target="sm89", save_onnx=graphs[2])
    assert graphs[0].read_bytes() == graphs[1].read_bytes() == graphs[2].read_bytes()
    stored = Table.load(kept)
    assert stored.left_out == tuned.tuning.left_out and stored.digest == tuned.tuning.table.digest
    plain = trtopt.calibrate(path, data={"x": crops[:80]}).table
    again = trtopt.build(path, tmp_path / "c.engine", int8=True, calib=plain, target="sm89")
    assert not again.cached  # another choice is another engine


def test_neither_batches_nor_their_order_change_it(crops: Any, tmp_path: Path) -> None:
    first = _tuned(_net(), crops, tmp_path / "a", min_snr=28)
    again = _tuned(_net(), crops, tmp_path / "b", min_snr=28, data={"x": crops[:80][::-1].copy()}, batch=3)
    assert again.tuning.table.digest == first.tuning.table.digest
    fixed = _tuned(_net(batch=4), crops, tmp_path / "c", min_snr=28, data={"x": crops[:78]})
    assert fixed.tuning.left_out and fixed.tuning.chosen.snr_db > 28  # the last batch is filled up


def test_a_second_call_runs_nothing_again_but_for_a_damaged_cache(
    crops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, heard, ran = _tuned(_net(), crops, tmp_path, min_snr=28), Heard(), []
    with monkeypatch.context() as patch:
        patch.setattr(AccuracyEvaluator, "__call__", lambda *_: ran.append(1))
        again = _tuned(_net(), crops, tmp_path, min_snr=28, reporter=heard)
    assert not ran and again.cached
    assert again.tuning.chosen == first.tuning.chosen and again.tuning.left_out == first.tuning.left_out
    has("\n".join(heard.notes), "repaired on the same samples before")
    for path in (tmp_path / "cache" / "tuning").iterdir():
        path.write_text("{")
    again = _tuned(_net(), crops, tmp_path, min_snr=28, reporter=heard, force=True)
    assert again.tuning.table.digest == first.tuning.table.digest
    has("\n".join(heard.notes), "can't be used")


# Other limits ------------------------------------------------------------------------------------------------------------


def worst_case(outputs: dict[str, Any]) -> float:
    return -float(np.abs(outputs["y"]).max())


def test_a_metric_of_ones_own(crops: Any, tmp_path: Path) -> None:
    net = _net()
    reference = OnnxRunner(net, optimize=True)({"x": crops[:80]})["y"]
    seen = []

    def close(outputs: dict[str, Any], labels: Any) -> float:
        seen.append((outputs["y"].shape, len(labels)))
        return decibels(outputs["y"], reference) if (outputs["y"] != reference).any() else 200.0

    result = _tuned(net, crops, tmp_path, metric=close, min=28, labels=[0] * 80)
    assert list(result.tuning.left_out) == ["c1"]
    assert set(seen) == {((80, 40), 80)}
    has(result.tuning.chosen.figure, "close")


def test_a_metric_may_lie_in_the_current_folder(crops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_score_of_tuning.py").write_text("def mean(outputs):\n    return float(outputs['y'].mean() * 0 + 1)\n")
    path = list(sys.path)
    result = _tuned(_net(), crops, tmp_path / "out", metric="my_score_of_tuning:mean", min=0.5)
    assert not result.tuning.left_out and sys.path == path
    has(result.tuning.chosen.figure, "my_score_of_tuning:mean 1")
    monkeypatch.chdir(tmp_path.parent)
    result = _tuned(_net(), crops, tmp_path / "out", metric=f"{tmp_path}/my_score_of_tuning.py:mean", min=0.5)
    has(result.tuning.chosen.figure, "my_score_of_tuning.py:mean 1")


@pytest.mark.parametrize(("count", "batch", "said"), [(1, "n", "1 sample judges"), (8, "n", "8 samples"), (80, 40, "")])
def test_few_samples_are_told(crops: Any, tmp_path: Path, count: int, batch: Any, said: str) -> None:
    heard, net = Heard(), _net(batch=batch)  # of a fixed batch a run holds several
    table = trtopt.calibrate(net, data={"x": crops[:80]}).table
    _tuned(net, crops, tmp_path, data={"x": crops[:count]}, calib=table, min_snr=5, reporter=heard)
    told = [text for text in heard.warnings if "give at least 32" in text]
    assert [f"only {said}" in text for text in told] == [True] * bool(said)


def test_it_says_all_that_was_repaired_and_which_output_a_figure_is_of(crops: Any, tmp_path: Path) -> None:
    """Where channels made the difference it said that no weight was repaired."""
    net = _net(bad=())
    net.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, ["n", 16]))
    tuning = _tuned(net, crops, tmp_path, min_snr=12, output_kind=["y=classes", "f=embedding"]).tuning
    has(str(tuning), "nothing repaired", "; 1 choice in", "y: same class for", "; f: cosine")
    table = replace(tuning.table, smoothed={"a": 1, "b": 2})
    has(str(replace(tuning, table=table)), "2 activations with channels scaled alike:")


LABELLED: dict[str, Any] = {"metric": lambda outputs, labels: 1.0, "min": 1}


def _reader() -> ModelProto:
    """Scores of 16 characters at each column, as a recogniser of text lines gives them: `_net` up to its pooling."""
    net = _net()
    del net.graph.node[-3:], net.graph.output[:], net.graph.initializer[-2:]
    last = net.graph.node[-1].output[0]
    rows = node("ReduceMean", last, "m", "rows", axes=[2], keepdims=0)
    net.graph.node.extend([rows, node("Transpose", "m", "y", "turned", perm=[0, 2, 1])])
    net.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "width", 16]))
    net.graph.input[0].type.tensor_type.shape.dim[3].dim_param = "columns"
    return net


def test_a_metric_of_samples_of_several_widths_beside_what_fp32_gives(crops: Any, tmp_path: Path) -> None:
    net, seen = _reader(), []
    folder = tmp_path / "lines"
    folder.mkdir()
    for number in range(48):
        np.save(folder / f"{number:02}.npy", crops[number : number + 1, :, :, : 16 - number % 3])

    def same_text(outputs: dict[str, Any], reference: dict[str, Any]) -> float:
        pairs = list(zip(outputs["y"], reference["y"]))
        seen.append([one.shape for one, _ in pairs])
        return float(np.mean([np.array_equal(one.argmax(-1), other.argmax(-1)) for one, other in pairs]))

    shapes = "x:1x3x16x14,8x3x16x16,8x3x16x16"
    options = {"metric": same_text, "min": 0.9, "data": folder, "shapes": shapes, "output_kind": ["y=tokens"]}
    result = _tuned(net, crops, tmp_path, **options)
    figures = [float(item.figure.split()[-1]) for item in (result.tuning.before, result.tuning.chosen)]
    assert figures[0] < 0.9 <= figures[1] and result.tuning.left_out
    assert all(len(shapes) == 48 and set(shapes) == {(16, 16), (15, 16), (14, 16)} for shapes in seen)

    def wrong(outputs: dict[str, Any]) -> float:
        return float(outputs["y"].mean())

    with pytest.raises(UsageError, match=re.escape("failed on {y list of 48}: AttributeError")):
        _tuned(net, crops, tmp_path, **{**options, "metric": wrong})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is no limit to tune to"),
        ({"min_snr": float("nan")}, "`min_snr=` is nan"),
        ({"labels": [1, 2]}, "`labels=` are for a `metric=` that takes them"),
        ({"labels": [1, 2], "metric": lambda outputs: 1.0, "min": 1}, "`labels=` are for a `metric=` that takes them"),
        ({"best": True, "min_snr": 20}, "`best=True` is `build`'s"),
        ({"labels": ["cat", "dog"], **LABELLED}, "takes the number of a class for each sample"),
        ({"labels": [1.5, 2.0], **LABELLED}, "takes the number of a class for each sample"),
        ({"labels": [1, 2], **LABELLED}, "2 labels were given for 80 samples: give one for each, in their order"),
        (
            {"labels": [1] * 80, "limit": 9, **LABELLED},
            "give one for each, in their order; `limit=` takes samples by their content: drop it",
        ),
        ({"metric": "json:loads"}, "go together"),
        ({"metric": "nowhere:at_all", "min": 1}, "can't be imported"),
        ({"metric": "json", "min": 1}, "write package.module:NAME"),
        ({"metric": "os:getcwd", "min": 1}, "failed on {y (80, 40)}: TypeError"),
        ({"metric": lambda outputs, labels: 1.0, "min": 1}, "takes labels as well"),
        ({"min_snr": 20, "calib": "old.cache"}, "is a TensorRT cache"),
        ({"min_snr": 20, "data": None}, "judged on real samples"),
        ({"min_snr": 20, "precision_override": ["nothing=fp32"]}, "matches no node"),
    ],
)
def test_requests_that_can_not_be_right(
    crops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.cache").write_text("TRT-8600-EntropyCalibration2\nx: 3c010a14\n")
    with pytest.raises(UsageError, match=re.escape(said)):
        _tuned(_net(), crops, tmp_path / "out", **options)
    assert not list((tmp_path / "out").iterdir())


def test_only_int8_is_tuned(crops: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add `int8=True`"):
        trtopt.build(_net(), tmp_path / "m.engine", fp16=True, min_agreement=0.9, data={"x": crops})
    with pytest.raises(UsageError, match="calibrator='native'"):
        trtopt.build(_net(), tmp_path / "m.engine", int8=True, calibrator="native", min_snr=20, data={"x": crops})


def test_limits_out_of_reach_are_told_apart(crops: Any, tmp_path: Path) -> None:
    with pytest.raises(AccuracyLost, match=r"worst_case gives -.* for the float model itself, at least 5 is asked for"):
        _tuned(_net(), crops, tmp_path, metric=worst_case, min=5)
    with pytest.raises(AccuracyLost, match=r"only without INT8.*the best choice tried.*`fp16=True`"):
        _tuned(_net(), crops, tmp_path, min_snr=66)
    with pytest.raises(AccuracyLost, match=r"not even without INT8.*at least 90 is asked for"):
        _tuned(_net(), crops, tmp_path, min_snr=90)  # FP16 itself has less
    assert not (tmp_path / "m.engine").exists()


def test_without_known_arithmetic_the_best_choice_is_told_all_the_same() -> None:
    def evaluated(out: Sequence[str]) -> TunedChoice:
        return TunedChoice(5.0, "", ("7 dB",)) if len(out) < 2 else TunedChoice(99.0, "", ())

    def points(out: Sequence[str]) -> Points:
        return Points({}, quantized=tuple(name for name in ("a", "b") if name not in out))

    operators, unknown = {"a": "Conv", "b": "Conv"}, dict[str, int]()
    choices = Choices(evaluated, points, operators, NoiseByPlace({}, {}), unknown, None, (), SILENT)
    with pytest.raises(AccuracyLost, match=r"only without INT8 .*5\.0 dB with 0% of the arithmetic in INT8, 7 dB"):
        choices.chosen()


def test_what_it_says_is_what_verify_finds_in_the_saved_graph(crops: Any, tmp_path: Path) -> None:
    net, graph = _net(), tmp_path / "g.onnx"
    result = _tuned(net, crops, tmp_path, min_snr=28, limit=80, save_onnx=graph)
    found = trtopt.verify(net, graph, [{"x": crops[:80]}], min_snr=28)
    assert found.ok and found.snr_db == pytest.approx(result.tuning.chosen.snr_db, abs=0.01)


def test_without_a_floating_output_and_with_open_sizes_it_is_refused_before_any_work(
    crops: Any, tmp_path: Path
) -> None:
    net = _net()
    net.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "h"
    with pytest.raises(UsageError, match=r"`shapes="):
        _tuned(net, crops, tmp_path / "out", min_snr=20)
    assert not (tmp_path / "cache").exists()
    net = _net()
    net.graph.node.append(helper.make_node("ArgMax", ["y"], ["k"], "top", axis=1))
    del net.graph.output[:]
    net.graph.output.append(helper.make_tensor_value_info("k", TensorProto.INT64, ["n", 1]))
    with pytest.raises(UsageError, match=r"no output is floating \(k is int64\)"):
        _tuned(net, crops, tmp_path / "out", min_agreement=0.9, output_kind=())
    onnx.save(net, tmp_path / "net.onnx")
    with pytest.raises(UsageError, match=r"\(trtopt check \S*net.onnx `outputs='y'` `fix='\S*net.cut.onnx'`\)"):
        _tuned(tmp_path / "net.onnx", crops, tmp_path / "out", min_agreement=0.9, output_kind=())


def test_what_the_user_forces_stays(crops: Any, tmp_path: Path) -> None:
    with pytest.raises(AccuracyLost, match="but what `precision_override=` puts there"):
        _tuned(_net(), crops, tmp_path, min_snr=28, precision_override=["c1=int8"])
    result = _tuned(_net(), crops, tmp_path, min_snr=8, precision_override=["c1=int8", "c0=fp32"])
    kept = {item.node: item for item in result.kept}
    assert kept["c0"].precision is Precision.FP32 and "c1" not in kept
    assert "c0" not in result.tuning.left_out


def test_the_command_prints_the_front(world: World, crops: Any) -> None:
    onnx.save(_net(), world.folder / "net.onnx")
    np.savez(world.folder / "crops.npz", x=crops[:80])
    given = ("--data", world.folder / "crops.npz", "--target", "sm89", "--output-kind", "y=other")
    said = world.run("tune", world.folder / "net.onnx", *given, "--min-snr", "28", "-o", world.folder / "m.engine")
    assert said.status == 0, said
    has(said.out, "arithmetic in INT8", "layers out", "within the limits", "convolutions INT8")
    found = world.run(
        "tune", world.folder / "net.onnx", *given, "--min-snr", "28", "-o", world.folder / "m.engine", "--json"
    )
    has(re.sub(r"\s+", " ", said.out), " no ", " yes ")
    document = json.loads(found.out)
    assert document["cached"] and list(document["tuning"]["left_out"]) == ["c1"]
    assert document["tuning"]["front"] and document["tuning"]["digest"] == document["calibration"]["digest"]
    lost = world.run("tune", world.folder / "net.onnx", *given, "-o", world.folder / "m.engine")
    assert lost.status != 0
    has(lost.err, "--min-snr 25", "--metric module:function")
