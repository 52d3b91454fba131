"""Faults that are planted into what computes a model's outputs, each found by its relation; and what is right, never blamed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from numpy.typing import NDArray
from onnx import ModelProto
from random_graphs import RandomGraph, Skip
from typer.testing import CliRunner
from world import Heard

import trtopt
from trtopt.builder.instrumented import build_with_outputs
from trtopt.certification import certificate as certificates, opening
from trtopt.certification.relations import Candidate, Samples, closeness, relations
from trtopt.cli import app
from trtopt.core.errors import EngineMismatch, UsageError
from trtopt.core.values import TensorInfo
from trtopt.engine.manifest import Manifest, kept_graph, load_manifest
from trtopt.evaluation.timing import Times
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner

Arrays = Mapping[str, NDArray[Any]]
Runner = Callable[[Arrays], dict[str, NDArray[Any]]]
ONE = "a batch is its samples one by one"


def net() -> ModelProto:
    return written(
        """(float[n, 3, 8, 8] x) => (float[n, 16] y, float[n, 16, 8, 8] f) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w) f = Relu (c) y = ReduceMean <axes = [2, 3], keepdims = 0> (f) }""",
        opset=17,
        w=values(16, 3, 3, 3, scale=0.3),
    )


class Faulty:
    """A model in ONNX Runtime whose results a function then spoils: it gets the batch, the results and the call's number."""

    def __init__(self, spoil: Callable[[Arrays, dict[str, NDArray[Any]], int], None]) -> None:
        self.run, self.spoil, self.calls = OnnxRunner(net(), optimize=False), spoil, 0

    def __call__(self, batch: Arrays) -> dict[str, NDArray[Any]]:
        results = {name: array.copy() for name, array in self.run(batch).items()}
        self.calls += 1
        self.spoil(batch, results, self.calls)
        return results


def _third_row(batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
    if len(batch["x"]) >= 3:
        results["y"][2] *= 1.5


def _next_row(batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
    """A kernel that reads one row too far."""
    results["f"][:-1, :, -1] = results["f"][1:, :, 0]


def _largest(batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
    """A scale that is off by 2 at a profile's end."""
    if len(batch["x"]) == 8:
        results["y"] *= 2


def _drifting(batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
    results["y"] += np.float32(1e-3 * np.random.default_rng(call).standard_normal())


def _one_sample(batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
    """Wrong values of a kind that few samples have: above 2.5."""
    results["y"][batch["x"].max((1, 2, 3)) > 3.3] += 1


class _Stale:
    """The last row of a batch keeps what an earlier call wrote there."""

    def __init__(self) -> None:
        self.kept: dict[int, NDArray[Any]] = {}

    def __call__(self, batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
        size = len(batch["x"])
        now = results["y"][-1].copy()
        if size > 1 and size in self.kept:
            results["y"][-1] = self.kept[size]
        self.kept[size] = now


@pytest.mark.parametrize(
    ("spoil", "relation", "output"),
    [
        (_third_row, ONE, "y"),
        (_third_row, "equal rows", "y"),
        (_next_row, ONE, "f"),
        (_next_row, "rows in another order", "f"),
        (_largest, ONE, "y"),
        (_drifting, "again, behind other values", "y"),
        (_one_sample, certificates.MODEL, "y"),
        (_Stale(), "again, behind other values", "y"),
    ],
)
def test_a_planted_fault_is_found(spoil: Any, relation: str, output: str) -> None:
    data = {"x": values(12, 3, 8, 8, seed=3)}
    found = trtopt.certify(net(), Faulty(spoil), data=data, batch=[1, 3, 8])
    assert not found.ok and found.failed[0].output == output
    assert relation in {item.name for item in found.failed}
    assert {item.output for item in found.failed} == {output}, "the other output is right"


def test_what_is_right_holds_to_the_bit() -> None:
    found = trtopt.certify(net(), Faulty(lambda *_: None), data={"x": values(12, 3, 8, 8)}, batch=[1, 3, 8])
    assert found.ok and not found.left_out
    assert {item.name for item in found.relations} == {
        certificates.MODEL,
        ONE,
        "rows in another order",
        "equal rows",
        "again, behind other values",
        "again, behind another batch",
    }
    assert all(item.worst_db == np.inf for item in found.relations)


def test_last_bits_of_its_own_arithmetic_are_no_fault() -> None:
    """As of an engine in FP16 that has another kernel, another order of sums, for another batch."""

    def halved(batch: Arrays, results: dict[str, NDArray[Any]], call: int) -> None:
        random = np.random.default_rng(len(batch["x"]))
        for array in results.values():
            array *= 1 + 2e-4 * random.standard_normal(array.shape[1:]).astype(np.float32)

    found = trtopt.certify(net(), Faulty(halved), data={"x": values(12, 3, 8, 8)}, batch=[1, 3, 8], min_snr=50)
    assert found.ok, str(found)
    assert min(item.worst_db for item in found.relations) < 80


@pytest.mark.parametrize("seed", range(60))
def test_random_networks_are_never_blamed(seed: int) -> None:
    try:
        graph = RandomGraph(seed, may_be_open=False)
    except Skip:
        pytest.skip("nothing was drawn")
    found = trtopt.certify(graph.proto, graph.proto, limit=4)
    assert found.ok, str(found)


def test_rows_that_the_network_mixes_are_told_and_not_demanded() -> None:
    flat = {name: np.full(4, value, np.float32) for name, value in (("s", 1), ("t", 0), ("u", 0), ("v", 1))}
    mixing = written(
        """(float[n, 4] x) => (float[n, 4] y, float[n, 4] z) {
        y, a, c = BatchNormalization <training_mode = 1> (x, s, t, u, v) z = Relu (x) }""",
        opset=17,
        **flat,
    )
    found = trtopt.certify(mixing, mixing, data={"x": values(6, 4)}, batch=[1, 4])
    assert found.ok and "rows of y: in the model itself they depend on others, or on their place" in found.left_out
    assert {item.output for item in found.relations if item.name == ONE} == {"z"}


def test_outputs_in_the_order_of_scores_may_change_places() -> None:
    ranked = written(
        "(float[n, 64] x) => (float[n, 64] v, int64[n, 64] i) { v, i = TopK (x, k) }", k=np.array([64], np.int64)
    )
    run = OnnxRunner(ranked, optimize=False)

    def other(batch: Arrays) -> Arrays:
        results = {name: array.copy() for name, array in run(batch).items()}
        if len(batch["x"]) > 1:
            results["i"][:, [3, 4]] = results["i"][:, [4, 3]]
        return results

    assert trtopt.certify(ranked, other, data={"x": values(6, 64)}, batch=[1, 4]).ok


@pytest.mark.parametrize("tied", [True, False])
def test_among_equal_scores_any_may_come_first(tied: bool) -> None:
    chosen = written(
        "(float[n, 64] x) => (float[n, 8] v, int64[n, 8] i, float[n, 64] y) { v, i = TopK (x, k) y = Relu (x) }",
        k=np.array([8], np.int64),
    )
    run, calls, x = OnnxRunner(chosen, optimize=False), iter(range(10**6)), values(6, 64)

    def other(batch: Arrays) -> Arrays:
        return {**run(batch), "i": run(batch)["i"] + next(calls)}

    found = trtopt.certify(chosen, other, data={"x": np.round(4 * x) if tied else x}, batch=[1, 4])
    assert found.ok is tied and {item.output for item in found.relations} >= {"v", "y"}
    assert found.left_out == (("i: some scores are equal, and which of them comes first is open",) if tied else ())


@pytest.mark.parametrize("factor", [1e-38, np.nan])
def test_what_holds_nothing_certifies_nothing(factor: float) -> None:
    """transformers' MobileViT with random weights gives 1e-39, in engines zero: equal to the bit, whatever is wrong."""
    made = written(
        "(float[n, 8] x) => (float[n, 8] y, float[n, 8] z) { h = Mul (x, f) y = Mul (h, f) z = Relu (x) }",
        f=np.float32(factor),
    )
    found = trtopt.certify(made, made, data={"x": values(4, 8)}, batch=[1, 4])
    assert found.ok and {item.output for item in found.relations} == {"z"}
    assert found.left_out == ("y: nothing but zeros and NaN for all samples",)

    def loud(batch: Arrays) -> Arrays:
        return {"y": batch["x"], "z": np.maximum(batch["x"], 0)}

    assert not trtopt.certify(made, loud, data={"x": values(4, 8)}, batch=[1, 4]).ok
    with pytest.raises(UsageError, match="can be compared: y: nothing but zeros"):
        trtopt.certify(
            written("(float[n, 8] x) => (float[n, 8] y) { y = Mul (x, f) }", f=np.float32(0)),
            lambda batch: {"y": 0 * batch["x"]},
            data={"x": values(4, 8)},
        )


@pytest.mark.parametrize(("most", "right"), [(np.inf, False), (60.0, True)])
def test_a_batch_may_run_in_kernels_of_another_type(most: float, right: bool) -> None:
    """As of an engine in FP16 whose least batch runs in FP32: exact by itself, at 65 dB among others."""
    run, arrays = OnnxRunner(net(), optimize=False), [{"x": row[None]} for row in values(8, 3, 8, 8)]

    def half(batch: Arrays) -> Arrays:
        types = (np.float32,) if len(batch["x"]) == 1 else (np.float16, np.float32)
        return {name: functools.reduce(np.ndarray.astype, types, array) for name, array in run(batch).items()}

    candidate = Candidate(half, (1, 4), [TensorInfo("y", "float32", ("n", 16), 0)], most=most)
    alone = [run(sample) for sample in arrays]
    found = [*relations(candidate, Samples(arrays, ["a"] * 8, alone), alone)]
    assert all(item.holds for item in found) is right
    assert 60 < min(item.worst_db for item in found) < 90


def test_a_network_without_anything_to_compare_is_refused() -> None:
    net = written("(float[k, 4] x) => (int64[2, m] y) { y = NonZero (x) }")
    with pytest.raises(UsageError, match=r"no output of .* can be compared: y .*its size depends on values"):
        trtopt.certify(net, net, data={"x": values(6, 4)})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified")
    onnx.save(net(), folder / "net.onnx")
    np.savez(folder / "data.npz", x=values(40, 3, 8, 8))
    shapes = "x:1x3x8x8,4x3x8x8,9x3x8x8"
    options: dict[str, Any] = {"int8": True, "data": folder / "data.npz", "target": "sm89", "backend": "rtx"}
    trtopt.build(folder / "net.onnx", folder / "net.engine", shapes=shapes, save_onnx=folder / "kept.onnx", **options)
    return folder / "net.engine"


@pytest.fixture
def manifest(engine: Path) -> Iterator[Manifest]:
    """The engine's, which is written again behind the test."""
    found = load_manifest(engine)
    assert found is not None and found.certificate is None
    yield found
    found.save(engine)


def test_without_a_gpu_the_graph_is_tried_and_that_is_said(engine: Path) -> None:
    found = trtopt.certify(engine.with_suffix(".onnx"), engine, data=engine.with_name("data.npz"), rebuild=True)
    assert found.ok and "kept.onnx, the graph of" in found.ran
    assert {"the engine itself: it was the graph", "another build of it: that runs on a GPU alone"} == {*found.left_out}
    assert sorted({item.batch for item in found.relations if item.name == ONE}) == [1, 3, 4, 6, 9]
    (own,) = {item.limit_db for item in found.relations if item.name == certificates.MODEL}
    assert own == 6 and not found.on_gpu and str(found).splitlines()[0].count("all holds") == 1
    with pytest.raises(UsageError, match=r"`batch=\[0?64\]`: the engine takes 1 to 9 samples of this shape at a time"):
        trtopt.certify(engine.with_suffix(".onnx"), engine, batch=[4, 64])
    heard = Heard()
    other = written("(float[n, 3, 8, 8] x) => (float[n, 3, 8, 8] y, float[n, 3, 8, 8] f) { y = Relu (x) f = Neg (x) }")
    assert not trtopt.certify(other, engine, reporter=heard).ok
    assert any("wasn't built from this model, by content: from " in text for text in heard.warnings)
    manifest = load_manifest(engine)
    assert manifest is not None and manifest.certificate is None, "it isn't the engine that was tried"
    with pytest.raises(EngineMismatch, match=r"isn't certified: it wasn't tried; run trtopt certify MODEL.onnx"):
        trtopt.Session(engine, backend="onnxruntime", require="certified")
    with pytest.raises(EngineMismatch, match="isn't certified"):
        trtopt.deploy_triton(engine, repo=engine.with_name("repo"), require="certified")
    assert not engine.with_name("repo").exists()


def test_another_models_outputs_are_missed(engine: Path) -> None:
    other = written("(float[n, 3, 8, 8] x) => (float[n, 3, 8, 8] z) { z = Relu (x) }")
    with pytest.raises(UsageError, match="the model gives z, what is certified only y, f: is it this model's"):
        trtopt.certify(other, engine)


def test_the_verdict_in_a_manifest_is_asked_for(engine: Path, manifest: Manifest) -> None:
    found = trtopt.certify(engine.with_suffix(".onnx"), engine)
    for ok in (True, False):
        said = certificates._summary(found) | {"ok": ok}
        certificates.replace(manifest, certificate=said).save(engine)
        if ok:
            with trtopt.Session(engine, backend="onnxruntime", require="certified") as session:
                assert session.manifest is not None and session.manifest.certificate is not None
        else:
            with pytest.raises(EngineMismatch, match="wasn't right"):
                trtopt.Session(engine, backend="onnxruntime", require="certified")


def test_the_command_says_it_and_has_an_exit_status(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "net.onnx")
    wrong = net()
    wrong.graph.initializer[0].raw_data = (values(16, 3, 3, 3, seed=9) * np.float32(0.3)).tobytes()
    wrong.graph.initializer[0].ClearField("float_data")
    onnx.save(wrong, tmp_path / "wrong.onnx")
    good = CliRunner().invoke(app, ["certify", str(tmp_path / "net.onnx"), str(tmp_path / "net.onnx"), "--limit", "4"])
    assert good.exit_code == 0 and "holds: equal rows, to the bit" in good.stdout
    bad = CliRunner().invoke(
        app, ["certify", str(tmp_path / "net.onnx"), str(tmp_path / "wrong.onnx"), "--limit", "4", "--json"]
    )
    document = json.loads(bad.stdout)
    assert bad.exit_code == 1 and not document["ok"] and document["failed"][0]["name"] == certificates.MODEL


def test_a_build_certifies_what_it_made(engine: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"fp16": True, "target": "sm89", "backend": "rtx", "certify": True}
    with pytest.raises(UsageError, match=r"`certify=True` runs the engine, and .*: add `save_onnx="):
        trtopt.build(engine.with_suffix(".onnx"), tmp_path / "a.engine", **options)
    assert not any(tmp_path.iterdir())
    options |= {"save_onnx": tmp_path / "kept.onnx", "data": engine.with_name("data.npz")}
    heard = Heard()
    result = trtopt.build(engine.with_suffix(".onnx"), tmp_path / "a.engine", reporter=heard, **options)
    assert not any("by content" in text for text in heard.warnings)
    assert result.ok and result.certificate is not None and result.certificate["ok"]
    assert result.certificate["samples"] == 32 and result.to_json()["certificate"]["relations"]
    again = trtopt.build(engine.with_suffix(".onnx"), tmp_path / "a.engine", **options)
    assert again.cached and again.certificate is not None
    with pytest.raises(UsageError, match="`certify=` compares engines or writes files"):
        trtopt.Session.for_model(engine.with_suffix(".onnx"), certify=True, backend="onnxruntime")


def test_a_build_that_is_not_right_says_so(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = certificates.closeness

    def wrong(candidate: Any, name: str, *rows: Any) -> NDArray[Any]:
        return real(candidate, name, *rows) - 1000 if name == "y" else real(candidate, name, *rows)

    monkeypatch.setattr(certificates, "closeness", wrong)
    arguments = [
        "build",
        str(engine.with_suffix(".onnx")),
        "-o",
        str(tmp_path / "a.engine"),
        "--fp16",
        "--target",
        "sm89",
    ]
    shown = CliRunner().invoke(app, [*arguments, "--certify", "--save-onnx", str(tmp_path / "kept.onnx")])
    assert shown.exit_code == 1 and "a.engine isn't right: the model as given: -" in shown.stderr
    assert "  NOT RIGHT in " in shown.stdout and "the graph of" in shown.stdout
    assert (tmp_path / "a.engine").exists(), "it is written, and what doesn't hold is told"


def encoder(op: str) -> ModelProto:
    """Return the mean of each sequence's embeddings, `op`ed over all positions or over those that count, and the embeddings."""
    weights = "Cast <to = 1> (mask)" if op == "masked" else "ConstantOfShape <value = float[1] {1}> (s)"
    shape = "" if op == "masked" else "s = Shape (mask)"
    return written(
        f"""(int64[n, 8] ids, int64[n, 8] attention_mask) => (float[n, 4] y, float[n, 8, 4] states) {{
        states = Gather (table, ids) mask = Identity (attention_mask) {shape} m = {weights}
        u = Unsqueeze (m, last) p = Mul (states, u) y = ReduceSum <keepdims = 0> (p, one) }}""",
        opset=17,
        table=values(20, 4),
        last=np.array([2]),
        one=np.array([1]),
    )


def test_a_mask_that_is_not_kept_to_is_found() -> None:
    random = np.random.default_rng(0)
    mask = (np.arange(8) < random.integers(3, 8, (10, 1))).astype(np.int64)
    data = {"ids": random.integers(1, 20, (10, 8)), "attention_mask": mask}
    right = trtopt.certify(encoder("masked"), encoder("masked"), data=data, batch=[1, 4])
    assert right.ok, str(right)
    assert {item.output for item in right.relations if item.name == "what masks hide"} == {"y", "states"}
    wrong = trtopt.certify(encoder("masked"), encoder("all"), data=data, batch=[1, 4], min_snr=-100)
    assert {(item.name, item.output) for item in wrong.failed} == {("what masks hide", "y")}
    open_to_all = trtopt.certify(encoder("all"), encoder("all"), data=data, batch=[1, 4])
    assert open_to_all.ok, "the model itself reads what its mask hides"


def test_an_engine_that_runs_is_certified_in_its_manifest(
    engine: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: Any
) -> None:
    times = {"": (Times({"x": "4x3x8x8"}, 0.25),)}
    monkeypatch.setattr(certificates, "time_in_turns", lambda *_: (times, "samples"))
    data, kept = engine.with_name("data.npz"), tmp_path / "new.results"
    found = trtopt.certify(engine.with_suffix(".onnx"), engine, data=data, save=kept)
    assert found.ok and found.on_gpu and not found.left_out and "on Fake GPU" in found.ran
    names = {item.name for item in found.relations}
    assert {opening.OTHER, opening.BESIDE} <= names and str(found).splitlines()[0].count("certified;")
    (own,) = {item.limit_db for item in found.relations if (item.name, item.output) == (certificates.MODEL, "f")}
    (reached,) = {item.worst_db for item in found.relations if (item.name, item.output) == (certificates.MODEL, "f")}
    assert own == pytest.approx(reached - 10), "as near as its graph, less what INT8 may add"
    after = load_manifest(engine)
    assert after is not None and after.certificate is not None and after.certificate["ok"]
    assert after == certificates.replace(manifest, certificate=after.certificate)
    trtopt.deploy_triton(engine, repo=tmp_path / "repo", require="certified", backend="python")
    assert (tmp_path / "repo").is_dir()
    assert trtopt.upgrade([kept, kept]).rows[0][5] == "0.25"
    wrong = onnx.load(engine.with_suffix(".onnx"))
    wrong.graph.initializer[0].raw_data = onnx.numpy_helper.to_array(wrong.graph.initializer[0])[::-1].tobytes()
    wrong.graph.initializer[0].ClearField("float_data")
    assert not trtopt.certify(wrong, engine, data=data, locate=False).ok
    refused = load_manifest(engine)
    assert refused is not None and refused.certificate is not None and not refused.certificate["ok"]


def test_what_an_arithmetic_adds_depends_on_what_stands_in_the_graph(engine: Path, manifest: Manifest) -> None:
    graph = load_model(kept_graph(engine) or "").proto
    assert certificates._noise_of(manifest, graph).apart == 10
    plain = certificates.replace(manifest, spec={**manifest.spec, "precision": "fp32", "remainder": "fp32"})
    assert certificates._noise_of(plain, None).unknown == 80
    assert certificates._noise_of(plain, graph).unknown == 6, "the model's own Q/DQ"
    half = certificates.replace(manifest, spec={**manifest.spec, "precision": "fp16", "remainder": "fp16"})
    typed = certificates._with_chosen_types(load_model(net()), half)
    assert certificates._noise_of(half, typed.proto).apart == 25
    assert certificates._with_chosen_types(typed, half) is typed
    quantized = load_model(graph)
    assert certificates._with_chosen_types(quantized, half) is quantized, "what its layers write isn't known"


def test_a_graph_whose_types_tensorrt_chose_tells_what_fp16_does_to_it(
    engine: Path, manifest: Manifest, as_on_a_gpu: Any
) -> None:
    """8.6 is given FP32 and a flag; the sine of a large number is lost in FP16, but not where that node is kept in FP32."""
    text = "(float[n, 8] x) => (float[n, 8] y) { [s] s = Mul (x, a) [w] y = Sin (s) }"
    proto = written(text, a=np.float32(600))
    graph, spec = load_model(proto), {**manifest.spec, "precision": "fp16", "remainder": "fp16"}
    limits = []
    for nodes in ((), ("s", "w")):
        kept = [{"node": name, "op": "Mul", "precision": "fp32", "reason": "samples say so"} for name in nodes]
        own = certificates._with_chosen_types(graph, certificates.replace(manifest, spec=spec, kept=kept))
        samples = [{"x": values(1, 8, seed=seed)} for seed in range(4)]
        wanted = [OnnxRunner(proto, optimize=False)(sample) for sample in samples]
        candidate = Candidate(OnnxRunner(own, optimize=False), (1,), graph.outputs)
        request = certificates.CertifyRequest(graph, None)
        given = certificates.Samples(samples, [""] * 4, wanted)
        noise = certificates._noise_of(certificates.replace(manifest, spec=spec), own.proto)
        limits.append(certificates._least(request, candidate, own, given, noise)["y"].min())
    assert limits == [6, 35]


def test_what_last_bits_come_to_and_what_the_graph_itself_loses_is_asked_of_no_engine() -> None:
    """Sines of large numbers make last bits of their input large; a graph of other values is far off without TensorRT."""
    text = "(float[n, 8] x) => (float[n, 8] calm, float[n, 8] wild) {{ s = Mul (x, a) wild = Sin (s) calm = Mul (x, {b}) }}"
    right, other = (written(text.format(b=b), a=np.float32(3e4), b=np.float32(2), c=np.float32(-2)) for b in "bc")
    outputs = [TensorInfo(name, "float32", ("n", 8), 0) for name in ("calm", "wild")]
    sample, heard = {"x": values(1, 8)}, Heard()
    candidate = Candidate(OnnxRunner(right, optimize=False), (1,), outputs, most=110)
    given = Samples([sample], ["0"], [candidate.alone(candidate.run, sample)])
    request, noise = certificates.CertifyRequest(right, right, reporter=heard), certificates._Noise(110, 30, 80)

    def least(graph: ModelProto) -> dict[str, float]:
        found = certificates._least(request, candidate, load_model(graph), given, noise)
        return {name: float(rows.min()) for name, rows in found.items()}

    assert least(right) == {"calm": 80, "wild": pytest.approx(25, abs=15)} and not heard.warnings
    assert least(other)["calm"] == 6 and "calm: the engine's own graph gives -6.0 dB" in " ".join(heard.warnings)


def test_numbers_that_gpus_flush_are_zero() -> None:
    """As of a network that dies out: a GPU gives zeros."""
    faint = np.full((1, 4), 1e-41, np.float32)
    candidate = Candidate(lambda batch: batch, (1,), [TensorInfo("y", "float32", ("n", 4), 0)])
    assert closeness(candidate, "y", [{"y": faint}], [{"y": np.zeros_like(faint)}]) == [np.inf]
    assert closeness(candidate, "y", [{"y": faint + 1e-30}], [{"y": faint}])[0] == 0


def test_a_part_without_scales_is_built_without_them(manifest: Manifest, tmp_path: Path) -> None:
    """As of an INT8 engine's smallest part, between DequantizeLinear and QuantizeLinear."""
    part = written("(float[n, 3, 8, 8] x) => (float[n, 3, 8, 8] y) { y = Relu (x) }")
    assert build_with_outputs(manifest, part, (), tmp_path).is_file()
    native = certificates.replace(manifest, spec={**manifest.spec, "calibrator": "native"})
    with pytest.raises(UsageError, match="scales stand beside its graph"):
        build_with_outputs(native, part, (), tmp_path)


@pytest.mark.usefixtures("manifest")
def test_another_build_is_compared_and_a_fault_that_it_has_not_is_told(
    engine: Path, as_on_a_gpu: Callable[[Any], None]
) -> None:
    model, data = engine.with_suffix(".onnx"), engine.with_name("data.npz")
    right = trtopt.certify(model, engine, data=data, rebuild=True, locate=True)
    assert right.ok and right.place is None
    assert opening.REBUILT in {item.name for item in right.relations}

    def spoil(session: trtopt.Session, inputs: Arrays, results: dict[str, NDArray[Any]]) -> None:
        if len(inputs["x"]) == 9:
            results["y"][5] += 1

    as_on_a_gpu(spoil)
    wrong = trtopt.certify(model, engine, data=data, rebuild=True, locate=True)
    assert {item.output for item in wrong.failed} == {"y"} and {item.batch for item in wrong.failed} == {9}
    assert {ONE, opening.REBUILT} <= {item.name for item in wrong.failed}
    assert wrong.place is not None and wrong.place.vanishes, "engines with tensors as outputs are right"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_wrong_values_of_an_engine_are_placed_by_its_tensors(engine: Path, manifest: Manifest) -> None:
    other = net()
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values(16, 3, 3, 3, seed=9, scale=0.3), "w"))
    found = trtopt.certify(other, engine, data=engine.with_name("data.npz"), locate=True)
    assert not found.ok and found.place is not None and found.place.op == "Conv" and not found.place.vanishes
    assert "the model as given fails first at" in str(found)
    certificates.replace(manifest, spec={**manifest.spec, "calibrator": "native"}).save(engine)
    beside = trtopt.certify(other, engine, data=engine.with_name("data.npz"), locate=True)
    assert not beside.ok and beside.place is None, "it isn't looked for, and the verdict stays"
