"""Other weights in engines of EfficientNet-Lite0: the bits of a full plan, a fresh build's results, and the seconds of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lite0 import Builds, Inputs, rows
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

import trtopt
from trtopt.core.errors import UnsupportedRequest, UsageError
from trtopt.cuda.device import Device
from trtopt.runtime.session import Session

LEAST = 40.0  # dB between a refitted engine and a fresh build of the same model, which may take other kernels
KINDS: dict[str, dict[str, Any]] = {"fp16": {"fp16": True}, "int8 Q/DQ": {"int8": True}}


@pytest.fixture(scope="module")
def tuned(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with each large weight a little different, as after some training."""
    model, rng = onnx.load(inputs.model), np.random.default_rng(5)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) in (2, 4):
            values = numpy_helper.to_array(tensor)
            noisy = values * (1 + 0.1 * rng.standard_normal(values.shape))
            tensor.CopyFrom(numpy_helper.from_array(noisy.astype(np.float32), tensor.name))
    path = tmp_path_factory.mktemp("tuned") / "tuned.onnx"
    onnx.save(model, path)
    return path


def _build(builds: Builds, inputs: Inputs, model: Path, output: Path, kind: str, **options: Any) -> Any:
    calib = {"calib": inputs.table} if "int8" in KINDS[kind] else {}
    return trtopt.build(model, output, **builds.common, **KINDS[kind], **calib, **options, compare=False)


def _refit_options(inputs: Inputs, kind: str) -> dict[str, Any]:
    return {"calib": inputs.table} if "int8" in KINDS[kind] else {}


def _logits(inputs: Inputs, engine: Path, **options: Any) -> NDArray[Any]:
    with Session(engine, **options) as session:
        return np.asarray(session.run({"input": inputs.photos["input"][:16]})["logits"])


def _decibels(reference: NDArray[Any], other: NDArray[Any]) -> float:
    noise = float(np.square(reference - other).mean())
    return float("inf") if noise == 0 else float(10 * np.log10(np.square(reference).mean() / noise))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refitted_engine_is_what_a_build_of_the_model_is(
    generation: Any, gpu: Device, builds: Builds, inputs: Inputs, tuned: Path, tmp_path: Path, kind: str
) -> None:
    if "refit" not in generation.capabilities.options:
        pytest.skip(f"{generation} can't refit")
    options = _refit_options(inputs, kind)
    built = _build(builds, inputs, inputs.model, tmp_path / "old.engine", kind, refit=True)
    old = _logits(inputs, built.engine)
    same = trtopt.refit(built.engine, inputs.model, tmp_path / "same.engine", **options)
    np.testing.assert_array_equal(_logits(inputs, same.engine), old)

    try:
        refitted = trtopt.refit(built.engine, tuned, tmp_path / "new.engine", **options)
    except UnsupportedRequest as error:  # 10.6 has no weight behind QuantizeLinear replaced
        assert "int8" in kind
        rows.append((f"refit {kind}", "refused", str(error)))
        return
    fresh = _build(builds, inputs, tuned, tmp_path / "fresh.engine", kind, refit=True)
    new, wanted = _logits(inputs, refitted.engine), _logits(inputs, fresh.engine)
    alike, apart = _decibels(wanted, new), _decibels(old, new)
    note = f"build {fresh.seconds:.1f} s; {refitted.weights} weights; {alike:.1f} dB to it, {apart:.1f} dB to the old"
    rows.append((f"refit {kind}", f"{refitted.seconds:.1f} s", note))
    assert alike >= LEAST
    assert apart < alike - 10
    np.testing.assert_array_equal(_logits(inputs, built.engine, weights=tuned, **options), new)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stripped_plan_with_its_weights_gives_the_bits_of_the_full_one(
    generation: Any, gpu: Device, builds: Builds, inputs: Inputs, tmp_path: Path, kind: str
) -> None:
    if "strip" not in generation.capabilities.options:
        pytest.skip(f"{generation} can't strip")
    options = _refit_options(inputs, kind)
    stripped = _build(builds, inputs, inputs.model, tmp_path / "stripped.engine", kind, strip=True)
    full = _build(builds, inputs, inputs.model, tmp_path / "full.engine", kind)
    with pytest.raises(UsageError, match="`weights=`"):
        Session(stripped.engine)
    result = trtopt.refit(stripped.engine, inputs.model, tmp_path / "refitted.engine", **options)
    sizes = [engine.stat().st_size / (1 << 20) for engine in (stripped.engine, result.engine)]
    note = f"build {stripped.seconds:.1f} s; {sizes[0]:.1f} MiB, {sizes[1]:.1f} MiB with its weights"
    rows.append((f"weights into the stripped {kind}", f"{result.seconds:.1f} s", note))
    wanted = _logits(inputs, full.engine)
    np.testing.assert_array_equal(_logits(inputs, stripped.engine, weights=inputs.model, **options), wanted)
    np.testing.assert_array_equal(_logits(inputs, result.engine), wanted)
