from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch  # noqa: TID251
from compared import compare
from graphs import model, node, typed, values, written
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner, Result
from world import Heard, World, has

import trtopt
from trtopt.cli import app
from trtopt.core.errors import DataError, InvalidModel, ModelError, UsageError
from trtopt.core.values import Precision
from trtopt.data import open_data
from trtopt.evaluation.agreement import Agreement, verify_all
from trtopt.evaluation.verify import verify
from trtopt.graph.half import has_half, widen
from trtopt.graph.io import load_model
from trtopt.graph.output_kinds import Kind
from trtopt.graph.passes.fold import fold
from trtopt.ort.runner import OnnxRunner

Array = NDArray[Any]
TYPES = {
    "float32": (TensorProto.FLOAT, np.dtype(np.float32)),
    "float16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}


class Digits:
    """A logistic regression on scikit-learn's real digits: trained in a second, with true labels to test on."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32)
        model = LogisticRegression(max_iter=200).fit(images[:1200], labels[:1200])
        self.weights, self.bias = model.coef_.T.astype(np.float32), model.intercept_.astype(np.float32)
        self.images, self.labels = images[1200:], [int(label) for label in labels[1200:]]
        self.score = float(model.score(self.images, self.labels))

    def batches(self, size: int = 100) -> list[dict[str, Array]]:
        return [{"x": self.images[start : start + size]} for start in range(0, len(self.images), size)]

    def model(self, dtype: str = "float32", weights: Array | None = None, opset: int = 17) -> onnx.ModelProto:
        """x (N, 64) FP32 → Gemm in `dtype` → logits FP32."""
        kind, numpy_type = TYPES[dtype]
        nodes = [
            node("Cast", "x", "a", "in", to=kind),
            node("Gemm", "a w b", "c", "gemm"),
            node("Cast", "c", "logits", "out", to=TensorProto.FLOAT),
        ]
        weights = {"w": self.weights if weights is None else weights, "b": self.bias}
        weights = {name: array.astype(numpy_type) for name, array in weights.items()}
        ends = {"inputs": {"x": ["n", 64]}, "outputs": {"logits": ["n", 10]}}
        return model(nodes, weights=weights, opset=opset, **ends)


@pytest.fixture(scope="module")
def digits() -> Digits:
    found = Digits()
    assert found.score > 0.9
    return found


def test_samples_are_taken_in_the_forms_that_calibration_takes(digits: Digits, tmp_path: Path) -> None:
    model, images = digits.model(), digits.images.astype(np.float32)
    np.savez(tmp_path / "x.npz", x=images)
    forms: list[Any] = [images, {"x": images}, tmp_path / "x.npz", [(images, np.zeros(len(images)))], iter([images])]
    for form in forms:
        assert verify(model, model, form).samples == len(images)
    wrong: Any = ["x.npz"]
    with pytest.raises(UsageError, match="batch 0 is str"):
        verify(model, model, wrong)
    assert verify(model, model, data=tmp_path / "x.npz", limit=20, batch=7).samples == 20
    twice: dict[str, Any] = {"batches": [], "data": images}
    alone: dict[str, Any] = {"batches": images, "limit": 3}
    for more, why in (({}, "no data"), (twice, "choose one"), (alone, "`limit=` has no effect without")):
        with pytest.raises(UsageError, match=why):
            verify(model, model, **more)
    function: Any = lambda feed: {"logits": feed["x"]}  # noqa: E731
    with pytest.raises(UsageError, match="`reference=` is function; a path or ModelProto is needed"):
        verify(function, model, data=images)
    module: Any = torch.nn.Linear(64, 10)
    with pytest.raises(UsageError, match=r"`reference=` is Linear; .*: trtopt\.export\(module, 'model\.onnx'"):
        verify(module, model, data=images)


def test_figures_are_those_of_the_whole_set_whatever_the_batch(digits: Digits) -> None:
    coarse = np.round(digits.weights * 2) / 2
    logits = digits.images @ digits.weights + digits.bias
    other = digits.images @ coarse + digits.bias
    expected_db = 10 * math.log10(float((logits**2).sum() / ((logits - other) ** 2).sum()))
    for size in (1, 64, 597):
        result = verify(digits.model(), digits.model(weights=coarse), digits.batches(size), digits.labels, threads=1)
        (output,) = result.outputs
        assert output.snr_db == pytest.approx(expected_db, abs=1e-3)
        assert output.max_abs == pytest.approx(float(np.abs(logits - other).max()), rel=1e-4)
        flat = logits.ravel() @ other.ravel() / np.linalg.norm(logits) / np.linalg.norm(other)
        assert output.cosine == pytest.approx(float(flat), rel=1e-5)
        assert output.top1 == float((logits.argmax(1) == other.argmax(1)).mean()) < 1
        assert result.candidate_accuracy is not None and result.reference_accuracy is not None
        assert result.candidate_accuracy.top1 == float((other.argmax(1) == digits.labels).mean())
        assert result.reference_accuracy.top1 == pytest.approx(digits.score) and result.reference_accuracy.top5 > 0.98


@pytest.mark.parametrize(
    ("dtype", "opset", "ulp", "low", "high"), [("float16", 17, 2**-11, 55, 90), ("bfloat16", 22, 2**-8, 38, 60)]
)
def test_half_types_are_rounded_where_the_model_makes_them(
    digits: Digits, tmp_path: Path, dtype: str, opset: int, ulp: float, low: float, high: float
) -> None:
    typed = digits.model(dtype, opset=opset)
    assert has_half(typed)
    assert not has_half(digits.model())
    before = typed.SerializeToString()
    onnx.checker.check_model(widen(typed), full_check=True)
    assert typed.SerializeToString() == before

    def rounded(values: Array) -> Array:
        return values.astype(TYPES[dtype][1]).astype(np.float32)

    exact = rounded(digits.images).astype(np.float64) @ rounded(digits.weights) + rounded(digits.bias)
    result = OnnxRunner(typed, optimize=False, threads=1)({"x": digits.images})["logits"]
    np.testing.assert_array_equal(result, rounded(result))  # the outputs are numbers of that type…
    np.testing.assert_allclose(result, exact, rtol=ulp, atol=1e-5)  # …the nearest, summed in FP32
    onnx.save(typed, tmp_path / "typed.onnx")
    for candidate in (typed, tmp_path / "typed.onnx"):
        assert low < verify(digits.model(), candidate, digits.batches(), threads=1).snr_db < high


def test_overflow_to_infinity_and_nan_show(digits: Digits, tmp_path: Path) -> None:
    old = np.array([[1.0, 2.0], [3.0, 4.0]])
    result = compare({"y": old}, {"y": np.array([[1.0, np.inf], [np.nan, 4.0]])}, [1, 1])
    (output,) = result.outputs
    assert (output.nonfinite, output.snr_db, output.max_abs) == (2, -math.inf, math.inf)
    assert result.candidate_accuracy is not None and result.candidate_accuracy.top1 == 1.0
    plain = json.loads(json.dumps(result.describe(), allow_nan=False))
    assert plain["outputs"]["y"]["snr_db"] == "-inf"
    said = "of y, 2 values are NaN or infinite, where the reference's are finite"
    assert (result.limits, result.missed, result.ok) == (None, (said,), False)
    assert f"\noutside any limit: {said}\nnext: build it with `fp16=True` and these samples" in str(result)
    large = np.full_like(digits.weights, 50000)  # each fits FP16, their sums don't
    files = [tmp_path / "m.onnx", tmp_path / "half.onnx"]
    for path, proto in zip(files, (digits.model(weights=large), digits.model("float16", large))):
        onnx.save(proto, path)
    np.savez(tmp_path / "x.npz", x=digits.images[:100])
    spoiled = CliRunner().invoke(app, ["verify", *map(str, files), "--data", str(tmp_path / "x.npz")])
    assert spoiled.exit_code == 1  # without limits
    assert "outside any limit: of logits, " in spoiled.stdout and "next: build it with --fp16 and" in spoiled.stdout


def test_a_share_that_no_output_has_is_told(digits: Digits) -> None:
    for kind, count in (("other", 1), ("classes", 0)):
        heard = Heard()
        found = verify(
            digits.model(), digits.model(), digits.batches(), threads=1,
            min_agreement=0.9, output_kind=[f"logits={kind}"], reporter=heard,
        )  # fmt: skip
        assert found.ok and len(heard.warnings) == count
        assert all("`min_agreement=` has nothing to judge" in text for text in heard.warnings)


def test_damaged_weights_of_the_reference_are_named(digits: Digits) -> None:
    """The advice was to look at the preprocessing."""
    weights = digits.weights.copy()
    weights[3] = np.nan
    with pytest.raises(InvalidModel, match=r"the reference: .*holds NaN or infinity; the weights are damaged"):
        verify(digits.model(weights=weights), digits.model(), digits.batches(), threads=1)


def test_the_nodes_of_a_graph_are_judged_each_and_take_no_labels(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[nodes,4] x, int64[2,edges] e) => (float[nodes,7] classes)
        <float[4,7] w, int64 zero = {0}> {
        start = Gather <axis = 0> (e, zero)
        near = Gather <axis = 0> (x, start)
        mean = ReduceMean <axes = [0]> (near)
        both = Add (x, mean)
        classes = MatMul (both, w)
    }"""
    old, new = (onnx.parser.parse_model(text) for _ in range(2))
    for proto, weights in ((old, values(4, 7)), (new, values(4, 7) + 0.3 * values(4, 7, seed=1))):
        proto.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), "w"))
    same, folder = [], tmp_path / "graphs"
    folder.mkdir()
    for number in range(5):
        x, e = values(6 + number, 4, seed=number), np.zeros((2, 3), np.int64)
        np.savez(folder / f"{number}.npz", x=x[None], e=e[None])
        before, after = (OnnxRunner(proto, optimize=False)({"x": x, "e": e})["classes"] for proto in (old, new))
        same += list(before.argmax(1) == after.argmax(1))
    found = verify(old, new, data=folder)
    (output,) = found.outputs
    assert (output.agreement, output.parts) == (np.mean(same), len(same)) and 0 < np.mean(same) < 1
    assert f"same class for {np.mean(same):.1%} of 40 rows" in str(found)
    with pytest.raises(UsageError, match=r"classes is classes; .*, or measure by a `metric=`"):
        verify(old, new, data=folder, labels=[0] * 5)


@pytest.mark.parametrize(
    ("name", "dtype", "flipped", "left"),
    [
        ("attention_mask", np.int64, False, False),
        ("attention_mask", np.int64, False, True),
        ("src_key_padding_mask", np.bool_, True, False),  # PyTorch's have True where there is nothing
        ("mask", np.bool_, True, False),
        ("token_type_ids", np.int64, False, False),  # no mask, so that nothing is left out
    ],
)
def test_padding_is_found_by_the_mask(name: str, dtype: Any, flipped: bool, left: bool) -> None:
    lengths = np.array([2, 8, 5, 1, 6])[:, None]
    real = np.arange(8)[::-1] < lengths if left else np.arange(8) < lengths
    old, scores = values(5, 8, 11), values(5, 8, 11, seed=1)
    new = np.where(real[..., None], old + 0.5 * scores, -old)

    def judged(mask: Array) -> tuple[Any, Any]:
        runs = (lambda _, array=array: {"y": array, "pooled": array[:, 0]} for array in (old, new))
        batch = {"ids": values(5, 8), name: mask}
        found = verify_all(next(runs), {"it": next(runs)}, [batch], kinds={"y": Kind.TOKENS})["it"]
        return found.outputs[0], str(found)

    states, said = judged((real != flipped).astype(dtype))
    if name == "token_type_ids":
        assert states.unpadded is None and states.parts == 40
        return
    assert states.agreement == (old[real].argmax(1) == new[real].argmax(1)).mean() and states.unpadded == real.mean()
    assert f"of the {100 * real.mean():.3g}% that aren't padding" in said
    for mask in (np.full((5, 8), 2), np.zeros((5, 8)), np.zeros((5, 9), np.int64), np.eye(5, 8, 1, np.int64)):
        assert judged(mask)[0].unpadded is None  # of other values, type or length, or hiding places to be guessed


def test_a_function_of_ones_own_judges_the_candidate(digits: Digits, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("m.onnx", "coarse.onnx")]
    onnx.save(digits.model(), files[0])
    onnx.save(digits.model(weights=np.round(digits.weights * 2) / 2), files[1])
    np.savez(tmp_path / "x.npz", x=digits.images)
    (tmp_path / "labels.txt").write_text("\n".join(map(str, digits.labels)))
    (tmp_path / "score_of_verify.py").write_text(
        "def right(outputs, labels):\n    return (outputs['logits'].argmax(1) == labels).mean()\n"
        "def same(outputs, reference):\n    return (outputs['logits'].argmax(1) == reference['logits'].argmax(1)).mean()\n"
    )

    def said(function: str, *more: str) -> Result:
        typed = ["verify", *files, "--data", str(tmp_path / "x.npz"), "--threads", "1", *more]
        return CliRunner().invoke(app, [*typed, "--metric", f"{tmp_path}/score_of_verify.py:{function}"])

    top1 = verify(*files, data=digits.images, labels=digits.labels).candidate_accuracy
    assert top1 is not None
    measured = said("right", "--labels", str(tmp_path / "labels.txt"), "--json")
    metric = json.loads(measured.stdout)["metric"]
    assert (metric["reference"], metric["candidate"], metric["least"]) == (digits.score, top1.top1, None)
    assert measured.exit_code == 0
    kept = said("same", "--min", "0.5", "--min-snr", "3")
    assert kept.exit_code == 0
    assert kept.stdout.splitlines()[-1].startswith("within the limits: at least 95.0% of the classes the same, 3 dB; ")
    missed = said("same", "--min", "1")
    assert missed.exit_code == 1 and "score_of_verify.py:same: 1 → 0.9" in missed.stdout
    assert "outside the limit: " in missed.stdout and "at least 1 is asked for\n" in missed.stdout
    assert "within the limits" not in missed.stdout
    assert "takes labels as well: add `labels='FILE'`" in str(said("right").exception)
    both = verify(*files, data=digits.images, metric=lambda outputs, **_: 0.1, min=0.2)
    assert both.missed[0].endswith("at least 0.2 is asked for; the reference itself gives 0.1")


@pytest.mark.parametrize(
    ("reference", "candidate", "labels", "kind", "message"),
    [
        ({"a": np.ones((2, 3))}, {"b": np.ones((2, 3))}, None, UsageError, "outputs a; the candidate b"),
        ({"a": np.ones((2, 3))}, {"a": np.ones((2, 4))}, None, UsageError, r"\(2, 3\) in the reference, \(2, 4\)"),
        ({"a": np.ones((2, 3))}, {"a": np.ones((2, 3))}, [1], UsageError, "1 labels were given"),
        ({"a": np.ones((2, 3))}, {"a": np.ones((2, 3))}, [1, 2, 0], UsageError, "3 labels were given for 2 samples"),
        ({"a": np.ones((2, 3))}, {"a": np.ones((2, 3))}, [1, 3], UsageError, "labels 1 to 3: .* classes 0 to 2"),
        ({"a": np.full((2, 3), np.nan)}, {"a": np.ones((2, 3))}, None, DataError, "6 values that aren't finite"),
        ({"a": np.ones((2, 3, 4))}, {"a": np.ones((2, 3, 4))}, [0, 1], UsageError, "no output is samples × classes"),
    ],
)
def test_what_can_not_be_compared_is_refused(
    reference: Any, candidate: Any, labels: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        compare(reference, candidate, labels)


def test_wrong_data_and_models_are_named(digits: Digits, tmp_path: Path) -> None:
    model = digits.model()
    with pytest.raises(DataError, match="no samples"):
        verify(model, model, [], threads=1)
    with pytest.raises(DataError, match="needs x; the data has image"):
        verify(model, model, [{"image": digits.images}], threads=1)
    with pytest.raises(UsageError, match="'x' has dtype complex128, the model 'test' takes float32"):
        verify(model, model, [{"x": digits.images.astype(np.complex128)}], threads=1)
    with pytest.raises(DataError, match=r"can't be run on x \(2, 65\)"):
        verify(model, model, [{"x": np.zeros((2, 65), np.float32)}], threads=1)
    (tmp_path / "noise.onnx").write_bytes(b"\x07not a model" * 20)
    with pytest.raises(ModelError, match=r"noise\.onnx.*isn't an ONNX model"):
        verify(tmp_path / "noise.onnx", model, digits.batches(), threads=1)
    with pytest.raises(UsageError, match="doesn't exist"):
        verify(tmp_path / "absent.onnx", model, digits.batches(), threads=1)


def test_a_model_of_a_fixed_batch_runs_on_any_number_of_samples(digits: Digits) -> None:
    fixed = digits.model()
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    for count in (3, 30, 32):
        assert verify(digits.model(), fixed, [{"x": digits.images[:count]}], threads=1).snr_db > 100


# Kinds -------------------------------------------------------------------------------------------------------------------


def test_the_reference_s_graph_says_what_its_outputs_hold(digits: Digits) -> None:
    coarse = digits.model(weights=np.round(digits.weights * 2) / 2)
    (output,) = verify(digits.model(), coarse, digits.batches(), threads=1).outputs
    assert output.kind is Kind.CLASSES
    said = verify(digits.model(), coarse, digits.batches(), threads=1, output_kind=["logits=embedding"])
    (turned,) = said.outputs
    assert said.top1 is None
    assert turned.snr_db == output.snr_db
    assert turned.cosine_min is not None
    assert 0.8 < turned.cosine_min < (turned.cosine_mean or 0) < 1
    assert said.describe()["outputs"]["logits"]["top1_agreement"] is None
    names = [f"digit {number}" for number in range(10)]
    assert verify(digits.model(), coarse, digits.batches(), threads=1, classes=names).outputs[0].kind is Kind.CLASSES
    runner = OnnxRunner(coarse, optimize=False, threads=1)
    assert verify(digits.model(), runner, digits.batches(), threads=1).outputs == (output,)  # a function
    with pytest.raises(UsageError, match="there is no output 'logit'; there is logits; did you mean logits=other"):
        verify(digits.model(), coarse, digits.batches(), output_kind={"logit": "other"}, threads=1)


def test_what_is_judged_is_in_the_result(digits: Digits) -> None:
    coarse = digits.model(weights=np.round(digits.weights * 2) / 2)

    def judged(**limits: float) -> Agreement:
        return verify(digits.model(), coarse, digits.batches(), threads=1, **limits)  # type: ignore[arg-type]

    measured = judged()
    assert measured.ok and measured.missed == () and "limits" not in measured.describe()
    assert 10 < measured.snr_db < 20 and measured.top1 is not None and 0.9 < measured.top1 < 0.99
    assert judged(min_agreement=0.9, min_snr=10).ok
    strict = judged(min_agreement=0.99)
    said = f"logits: same class for {measured.top1:.1%} of 597 samples, at least 99.0% is asked for"
    assert strict.missed == (said,) and str(strict).endswith(f"\noutside the limit: {said}")
    plain = strict.describe()
    assert (plain["ok"], plain["missed"], plain["limits"]) == (False, [said], {"min_agreement": 0.99, "min_snr": None})


# The command -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def coarse(world: World) -> Path:
    """The world's model with weights in steps of 1/16."""
    proto = onnx.load(world.model)
    for tensor in proto.graph.initializer:
        rounded = np.round(numpy_helper.to_array(tensor) * 16) / 16
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    onnx.save(proto, world.output / "coarse.onnx")
    return world.output / "coarse.onnx"


def test_the_command_names_the_worst_samples_by_their_files(world: World, coarse: Path) -> None:
    found = world.run("verify", world.model, coarse, "--data", world.arrays, "--batch", 7)
    assert found.status == 0, found.err
    first, second = found.out.splitlines()
    has(first, "y (embedding): cosine 0.9", "in the mean", "at the lowest", "dB, largest difference 0.")
    has(second, "per sample: cosine 0.9", "in the median; worst: data.npz[")
    images = ("--images", world.photos, "--preprocess", "imagenet")
    (world.photos / "0.jpg").write_bytes(b"no picture")  # doesn't count
    found = world.run("verify", world.model, coarse, *images, "--output-kind", "y=classes", "--json")
    assert found.status == 0, found.err
    output = json.loads(found.out)["outputs"]["y"]
    assert (output["kind"], output["rows"]) == ("classes", 3)
    batches = open_data(load_model(world.model).inputs, images=world.photos, preprocess="imagenet")
    old, new = (OnnxRunner(path, optimize=False)(next(iter(batches)))["y"] for path in (world.model, coarse))
    errors = 10 * np.log10((old**2).sum(1) / ((old - new) ** 2).sum(1))
    changed = old.argmax(1) != new.argmax(1)
    places = sorted(np.lexsort([errors, ~changed]), key=lambda place: place != errors.argmin())
    order = [f"{number + 1}.jpg" for number in places]
    assert [item["name"] for item in output["samples"]["worst"]] == order
    found = world.run("verify", world.model, coarse, *images, "--output-kind", "y=classes", "--per-layer")
    assert order[0] in found.out and "worst: sample" not in found.out


def test_the_command_fails_where_a_limit_is_missed(world: World, coarse: Path) -> None:
    request = ("verify", world.model, coarse, "--data", world.arrays)
    assert world.run(*request, "--min-snr", 10).status == 0
    found = world.run(*request, "--min-snr", 60)
    assert found.status == 1
    (said,) = [line for line in found.out.splitlines() if line.startswith("outside the limit: ")]
    has(said, "y: ", " dB, at least 60 is asked for")
    has(world.refused(*request, "--output-kind", "y=mask"), "samples × height × width", "say y=other")


def test_an_engine_is_told_from_a_broken_model(world: World, rtx: None) -> None:
    engine, graph = world.folder / "m.engine", world.folder / "graphs" / "m.onnx"
    graph.parent.mkdir()
    request = ("verify", world.model, engine, "--data", world.arrays)
    trtopt.build(world.model, engine, fp16=True, target="sm89")
    said = world.refused(*request)
    has(said, "m.engine is a TensorRT engine, and its graph is needed here, where it can't run")
    kept = engine.with_suffix(".kept.onnx")  # m.onnx may be the model
    has(said, f"--save-onnx {kept} -o {engine}", "then the same again")
    trtopt.build(world.model, engine, fp16=True, target="sm89", save_onnx=graph)
    judged = world.run(*request, "--min-snr", 40)
    assert judged.status == 0
    has(judged.out, f"ran {graph}, the graph that {engine} was built from")
    either = [world.run("verify", *pair, *request[3:], "--json").out for pair in (request[1:3], request[2:0:-1])]
    told = json.loads(either[0])
    assert either[0] == either[1] and told["engine"] == str(engine)
    assert told["engine_sha256"] == hashlib.sha256(engine.read_bytes()).hexdigest()
    two = world.refused("verify", engine, engine, "--data", world.arrays)
    has(two, "both are TensorRT engines", f"trtopt verify {graph} {engine} …")
    graph.unlink()
    has(world.refused(*request), "build keeps it with --save-onnx: trtopt build")
    (world.folder / "m.engine.json").write_text("{")
    has(world.refused(*request), "m.engine.json can't be read (not JSON", "build the engine again")


def test_tensors_that_an_engine_was_told_to_give_besides_are_not_compared(tmp_path: Path, rtx: None) -> None:
    proto = written("(float[n, 8] x) => (float[n, 8] y) { a = MatMul (x, w) y = Relu (a) }", w=values(8, 8))
    kept = tmp_path / "graph.onnx"
    trtopt.build(proto, tmp_path / "m.engine", fp16=True, target="sm89", save_onnx=kept, mark_output=["a"])
    found = trtopt.verify(proto, tmp_path / "m.engine", {"x": values(4, 8)})
    assert [item.name for item in found.outputs] == ["y"] and found.snr_db > 40


def test_a_graph_with_control_flow_is_judged() -> None:
    """A body stays in FP32 between casts, and the nodes around it round as TensorRT's do."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3,8,8] x) => (float[n,4,8,8] y) <float zero = {0}> {
        seen = Conv(x, w)
        mean = ReduceMean <keepdims = 0> (seen)
        positive = Greater(mean, zero)
        chosen = If (positive) <then_branch = a () => (float[n,4,8,8] p) { p = Relu(seen) },
                                else_branch = b () => (float[n,4,8,8] q) { q = Sigmoid(seen) }>
        y = Conv(chosen, v)
    }"""
    proto = onnx.parser.parse_model(text)
    weights = {"w": values(4, 3, 1, 1), "v": values(4, 4, 1, 1, seed=1)}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    proto, _ = fold(proto)  # gives every node a name
    half = typed(proto, Precision.FP16)
    assert has_half(half)
    samples = np.concatenate([values(8, 3, 8, 8), -values(8, 3, 8, 8)])
    found = verify(proto, half, data=samples)
    assert 50 < found.snr_db < 90
    assert verify(proto, half, data=samples, per_layer=True).layers
