"""verify --per-layer: planted faults are found at the node that has them, in one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, node, photos, values
from onnx import ModelProto, numpy_helper
from world import World, has

import trtopt
from trtopt.core.errors import BuildFailed, UsageError
from trtopt.core.values import Precision, TensorInfo
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.evaluation import verify as module
from trtopt.evaluation.per_layer import LayerAgreement, verdict
from trtopt.ort.runner import OnnxRunner
from trtopt.trt.generation import Generation

LAYERS = 6


def _net() -> ModelProto:
    """Convolutions with BatchNormalizations behind them."""
    nodes, weights, value = [], {}, "x"
    for number in range(LAYERS):
        channels = 3 if number == 0 else 16
        weights |= {
            f"w{number}": values(16, channels, 3, 3, seed=number, scale=1.5 / np.sqrt(9 * channels)),
            f"s{number}": 1 + 0.3 * values(16, seed=20 + number), f"b{number}": values(16, seed=40 + number, scale=0.1),
            f"m{number}": values(16, seed=60 + number, scale=0.1), f"v{number}": 1 + np.abs(values(16, seed=80 + number)),
        }  # fmt: skip
        nodes += [
            node("Conv", f"{value} w{number}", f"a{number}", f"c{number}", pads=[1, 1, 1, 1]),
            node(
                "BatchNormalization", f"a{number} s{number} b{number} m{number} v{number}", f"n{number}", f"bn{number}"
            ),
            node("Relu", f"n{number}", f"r{number}", f"relu{number}"),
        ]
        value = f"r{number}"
    nodes += [node("GlobalAveragePool", value, "g", "pool"), node("Flatten", "g", "y", "flat")]
    return model(nodes, weights=weights, inputs={"x": ("n", 3, 32, 32)}, outputs={"y": ("n", 16)})


@pytest.fixture(scope="module")
def crops() -> Any:
    whole = photos(256, 3)
    return np.concatenate([whole[:, :, r : r + 32, c : c + 32] for r in range(0, 224, 40) for c in range(0, 224, 64)])


@pytest.fixture(scope="module")
def built(crops: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, its Q/DQ graph, its FP16 graph, and the engines."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = tmp_path_factory.mktemp("layers")
    onnx.save(_net(), folder / "net.onnx")
    common: dict[str, Any] = {"target": "sm89"}
    trtopt.build(
        folder / "net.onnx",
        folder / "int8.engine",
        int8=True,
        data={"x": crops},
        save_onnx=folder / "int8.onnx",
        **common,
    )
    trtopt.build(folder / "net.onnx", folder / "fp16.engine", fp16=True, save_onnx=folder / "fp16.onnx", **common)
    return folder


def _constants(proto: ModelProto) -> dict[str, Any]:
    return {item.name: item for item in proto.graph.initializer}


def _changed(proto: ModelProto, name: str, change: Callable[[Any], Any]) -> None:
    held = _constants(proto)[name]
    held.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(held).copy()), name))


def _reads(proto: ModelProto, label: str, slot: int = 1) -> str:
    """The stored constant behind an input of a node."""
    makers = {name: item for item in proto.graph.node for name in item.output}
    name = next(item for item in proto.graph.node if item.name == label).input[slot]
    while name in makers:
        name = makers[name].input[0]
    return str(name)


def _swapped(array: Any) -> Any:
    return array[[*range(8, 16), *range(8)]]


def _wrong_scale(proto: ModelProto) -> None:
    _changed(proto, "r2_scale_float16", lambda array: array / 30)


def _swapped_channels(proto: ModelProto) -> None:
    _changed(proto, _reads(proto, "c3"), _swapped)


def _broken_fold(proto: ModelProto) -> None:
    """As if the mean had been forgotten when BatchNormalization was folded."""
    _changed(proto, _reads(proto, "c4", 2), lambda array: array * 0 - 1)


def _overflow(proto: ModelProto) -> None:
    _changed(proto, _reads(proto, "c2"), lambda array: array * 0 + 60000)


@pytest.mark.parametrize(
    ("graph", "fault", "said"),
    [
        ("int8", _wrong_scale, "the scale of r2 loses most by itself"),
        ("int8", _swapped_channels, "c3 (Conv) loses most by itself"),
        ("int8", _broken_fold, "c4 (Conv) loses most by itself"),
        ("fp16", _swapped_channels, "c3 (Conv) loses most by itself"),
        ("fp16", _overflow, "c2 (Conv) is the first to give values that aren't finite"),
    ],
)
def test_a_planted_fault_is_found_at_its_node(built: Path, crops: Any, graph: str, fault: Any, said: str) -> None:
    candidate = onnx.load(built / f"{graph}.onnx")
    fault(candidate)
    found = trtopt.verify(_net(), candidate, [{"x": crops}], per_layer=True)
    has(verdict(found.layers), said)
    has(str(found), said)


def test_where_one_layer_alone_differs_the_others_have_nothing_whatever_the_samples_shapes(crops: Any) -> None:
    """Of texts of several lengths it was an internal error."""
    net = _net()
    for value in (*net.graph.input, *net.graph.output):
        for dim in value.type.tensor_type.shape.dim[2:]:
            dim.dim_param = f"open{id(dim)}"
    candidate = ModelProto()
    candidate.CopyFrom(net)
    _swapped_channels(candidate)
    samples = [{"x": crops[:2]}, {"x": crops[2:3, :, :12]}, {"x": crops[3:5, :, :, :10]}]
    found = trtopt.verify(net, candidate, samples, per_layer=True)
    has(verdict(found.layers), "c3 (Conv) loses most by itself", "dB, the others nothing")


def _damped(gamma: float = 1e-6) -> ModelProto:
    """Blocks that add a branch scaled by `gamma`, as ConvNeXt, and what FP16 spoils of it."""
    nodes, weights, value = [], {}, "x"
    for number in range(4):
        channels = 3 if number == 0 else 16
        weights |= {
            f"w{number}": values(16, channels, 3, 3, seed=number, scale=1.5 / np.sqrt(9 * channels)),
            f"v{number}": values(16, 16, 1, 1, seed=30 + number, scale=0.3), f"g{number}": np.float32([gamma]),
        }  # fmt: skip
        nodes += [
            node("Conv", f"{value} w{number}", f"c{number}", f"conv{number}", pads=[1, 1, 1, 1]),
            node("Relu", f"c{number}", f"r{number}", f"relu{number}"),
            node("Conv", f"r{number} v{number}", f"d{number}", f"inner{number}"),
            node("Mul", f"d{number} g{number}", f"m{number}", f"scale{number}"),
            node("Transpose", f"m{number}", f"t{number}", f"turn{number}", perm=[0, 1, 3, 2]),
            node("Add", f"r{number} t{number}", f"a{number}", f"add{number}"),
        ]
        value = f"a{number}"
    nodes += [node("GlobalAveragePool", value, "p", "pool"), node("Flatten", "p", "y", "flat")]
    return model(nodes, weights=weights, inputs={"x": ("n", 3, 32, 32)}, outputs={"y": ("n", 16)})


def _half_branch(proto: ModelProto) -> ModelProto:
    """Round the branches' last tensors as FP16 does it: next to zero nothing is left of them."""
    spoiled = ModelProto()
    spoiled.CopyFrom(proto)
    del spoiled.graph.node[:]
    for item in proto.graph.node:
        spoiled.graph.node.append(item)
        if item.op_type == "Mul":
            name = item.output[0]
            spoiled.graph.node[-1].output[0] = f"{name}_float32"
            down = node("Cast", f"{name}_float32", f"{name}_half", f"{name}/down", to=onnx.TensorProto.FLOAT16)
            spoiled.graph.node.extend([down, node("Cast", f"{name}_half", name, f"{name}/up", to=1)])
    return spoiled


def test_the_first_of_those_that_lose_alike_is_not_said_to_lose_most() -> None:
    felt = (("a", 37.3), ("b", 37.2), ("c", 40.0))
    layers = [LayerAgreement(f"{name}0", name, "Conv", 30.0, 30.0, db, 0) for name, db in felt]
    assert verdict(layers).startswith("a (Conv) is the first of 2 that lose most by themselves: 37.3 dB")


def test_what_the_nodes_behind_do_not_feel_is_not_blamed(crops: Any) -> None:
    """A branch of 1e-8 is all lost in FP16 and nothing to the sum: not a fault, and it doesn't hide one."""
    reference = _damped(1e-8)
    found = trtopt.verify(reference, _half_branch(reference), [{"x": crops}], per_layer=True)
    branch = next(item for item in found.layers if item.tensor == "m1")
    assert branch.own_snr_db < 5 < 40 < branch.felt_snr_db
    assert "loses most" not in verdict(found.layers) or "no layer is off by itself" in verdict(found.layers)
    for place in ("w1", "w2"):
        faulty = _half_branch(reference)
        uneven = np.float32(np.where(np.arange(16) % 2, 1.6, 1.0)).reshape(16, 1, 1, 1)
        _changed(faulty, place, lambda array, uneven=uneven: array * uneven)  # type: ignore[misc]
        said = verdict(trtopt.verify(reference, faulty, [{"x": crops}], per_layer=True).layers)
        assert said.startswith(f"conv{place[1]} (Conv) ") and "lose" in said
        assert "no layer is off" not in said


def test_a_layer_that_stands_out_is_off_though_it_has_20_db(built: Path, crops: Any) -> None:
    candidate = onnx.load(built / "fp16.onnx")
    _changed(candidate, _reads(candidate, "c3"), lambda array: array * np.float16(1.05))
    said = verdict(trtopt.verify(_net(), candidate, [{"x": crops}], per_layer=True).layers)
    has(said, "c3 (Conv) loses most by itself: 2")
    assert "no layer is off" not in said


def test_a_layer_is_named_not_what_changes_its_results_type(crops: Any) -> None:
    reference = model(
        [node("Flatten", "x", "f", "flat"), node("Gemm", "f w", "y", "last", transB=1)],
        weights={"w": values(10, 3 * 32 * 32, seed=1, scale=0.02)},
        inputs={"x": ("n", 3, 32, 32)},
        outputs={"y": ("n", 10)},
    )
    faulty = ModelProto()
    faulty.CopyFrom(reference)
    faulty.graph.node[1].output[0] = "y_half"
    faulty.graph.node.append(node("Cast", "y_half", "y", "y/Cast", to=1))
    _changed(faulty, "w", lambda array: array[::-1])
    has(verdict(trtopt.verify(reference, faulty, [{"x": crops}], per_layer=True).layers), "last (Gemm) loses most")


def test_a_healthy_graph_and_a_wrong_input_are_told_from_quantization(built: Path, crops: Any) -> None:
    """Pixels that weren't normalised: the graphs agree, so the fault is before them."""
    for pixels in (crops, crops * 128 + 127):
        found = trtopt.verify(_net(), built / "fp16.onnx", [{"x": pixels}], per_layer=True)
        has(verdict(found.layers), "no layer is off by itself", "the samples and the float model")


def test_without_common_tensors_it_says_so(crops: Any) -> None:
    ends = "g (float[n,3,32,32] x) => (float[n,3,32,32] y)"
    other, changed = (
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {ends} {{ {nodes} }}')
        for nodes in ("y = Relu(x)", "z = Abs(x) y = Neg(z)")
    )
    assert {item.tensor for item in trtopt.verify(other, changed, [{"x": crops}], per_layer=True).layers} == {"y"}
    with pytest.raises(UsageError, match="give ONNX models"):
        trtopt.verify(other, lambda feed: {"y": feed["x"]}, [{"x": crops}], per_layer=True)


# Engines -----------------------------------------------------------------------------------------------------------------


def test_an_engine_stands_for_the_graph_it_was_built_from_where_no_gpu_is(
    built: Path, crops: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "probe", lambda: Probe(reason="no driver"))
    np.savez(world.folder / "crops.npz", x=crops)
    given = ("verify", built / "net.onnx", built / "int8.engine", "--data", world.folder / "crops.npz")
    said = world.run(*given, "--per-layer", "--min-snr", "10")
    assert said.status == 0, said
    has(said.out, f"ran {built / 'int8.onnx'}, the graph that {built / 'int8.engine'} was built from", "no driver")
    has(said.out, "What loses most by itself", "with all before it")
    told = world.run(*given, "--json")
    assert "was built from" in json.loads(told.out)["ran"]
    direct = trtopt.verify(built / "net.onnx", built / "int8.onnx", [{"x": crops}])
    assert json.loads(told.out)["snr_db"] == pytest.approx(direct.snr_db, rel=1e-6)


class _Engine:
    """Plays a session: the graph beside a plan built with outputs, else the model, 1 % off. `fault` is the GPU's own."""

    fault: Any = None
    built: list[Any]
    outputs = ()

    def __init__(self, path: Path, contexts: int, trust: bool = False) -> None:
        assert contexts == 1
        graph = path.with_name("outputs.onnx") if path.name == "outputs.engine" else path.with_name("net.onnx")
        proto = onnx.load(graph)
        if path.name == "outputs.engine":
            assert path.stat().st_size
            _Engine.built.append(proto)
            if _Engine.fault is not None:
                _Engine.fault(proto)
        self.run = OnnxRunner(proto, optimize=False)
        self.profiles: tuple[Any, ...] = ()
        self.inputs = (TensorInfo("x", "float32", ("n", 3, 32, 32)),)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def taken(self, feed: Any) -> Any:
        return feed

    def run_batches(self, feed: Any) -> Any:
        return {name: array * np.float32(1.01) for name, array in self.run(feed).items()}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> type[_Engine]:
    monkeypatch.setattr(module, "Session", _Engine)
    monkeypatch.setattr(module, "probe", lambda: Probe((DeviceInfo(0, "Played GPU", 89, 1 << 30),), (13, 0)))
    monkeypatch.setattr(_Engine, "fault", None)
    monkeypatch.setattr(_Engine, "built", [], raising=False)
    return _Engine


def test_on_a_gpu_the_engine_itself_runs(built: Path, crops: Any, played: type[_Engine]) -> None:
    found = trtopt.verify(built / "net.onnx", built / "int8.engine", [{"x": crops}])
    assert found.snr_db == pytest.approx(40, abs=0.1) and not played.built
    has(found.ran, "int8.engine on Played GPU (sm89")


@pytest.mark.parametrize(("kind", "precision"), [("int8", Precision.INT8), ("fp16", Precision.FP16)])
def test_on_a_gpu_the_tensors_are_the_engines_own(
    built: Path, crops: Any, played: type[_Engine], monkeypatch: pytest.MonkeyPatch, kind: str, precision: Precision
) -> None:
    """The build is real; the GPU that runs it is played, and computes one layer wrongly, which the kept graph doesn't."""
    layers: list[Any] = []
    real = Generation.build

    def seen(self: Any, *given: Any, **named: Any) -> Any:
        plan = real(self, *given, **named)
        layers.extend(plan.layers)
        return plan

    monkeypatch.setattr(Generation, "build", seen)
    monkeypatch.setattr(played, "fault", lambda proto: _swapped_channels(proto))
    found = trtopt.verify(built / "net.onnx", built / f"{kind}.engine", [{"x": crops}], per_layer=True)
    has(
        str(found),
        "c3 (Conv) loses most by itself",
        f"another build of {built / f'{kind}.onnx'}, with these as outputs",
    )
    by_name = {item.tensor: item for item in found.layers}
    assert by_name["n3"].own_snr_db < 5
    assert by_name["n4"].own_snr_db > 20 > by_name["n4"].snr_db + 10  # its error is inherited
    assert by_name["n2"].snr_db > 20
    assert not any(name.endswith("_dequantized") for name in by_name)
    (given,) = played.built
    assert {item.name for item in given.graph.output} == set(by_name) and set(by_name) >= {"n0", "r0", "n5", "y"}
    heavy = [layer.precision for layer in layers if layer.kind == "convolution"]
    assert heavy == [precision] * LAYERS  # as the engine has it


def test_a_healthy_engine_has_no_layer_that_is_off_and_infinity_is_the_first_ones_fault_alone(
    built: Path, crops: Any, played: type[_Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trtopt.verify(built / "net.onnx", built / "int8.engine", [{"x": crops}], per_layer=True)
    graph = trtopt.verify(built / "net.onnx", built / "int8.onnx", [{"x": crops}], per_layer=True)
    same = {item.tensor: item for item in graph.layers}
    for item in found.layers:  # the played GPU computes what the graph says
        assert item.snr_db == pytest.approx(same[item.tensor].snr_db, abs=0.1)
        assert item.own_snr_db > 20 and item.nonfinite == 0
    has(verdict(found.layers), "no layer is off by itself")
    monkeypatch.setattr(played, "fault", _overflow)
    found = trtopt.verify(built / "net.onnx", built / "fp16.engine", [{"x": crops}], per_layer=True)
    has(verdict(found.layers), "c2 (Conv) is the first to give values that aren't finite")
    behind = [item for item in found.layers if item.node in ("c4", "c5")]
    assert behind and not any(item.nonfinite for item in behind)


def test_a_build_that_fails_names_the_graph_instead(
    built: Path, crops: Any, played: type[_Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise BuildFailed("no kernel")

    monkeypatch.setattr(Generation, "build", fails)
    with pytest.raises(BuildFailed, match="compare the tensors of its graph instead"):
        trtopt.verify(built / "net.onnx", built / "int8.engine", [{"x": crops}], per_layer=True)
