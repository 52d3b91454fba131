"""What only the lean runtime can show: `TRTOPT_GPU_LEAN="8 10" scripts/gpu_check INPUTS` runs it, and Session's tests on it.

This process has the lean runtime alone; the full TensorRT 8.6, in one of its own (full_runtime.py), builds what runs here.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from full_runtime import LEAN, ask, build
from lite0 import Builds, Inputs, rows, settings
from onnx import TensorProto, helper, numpy_helper

import trtopt
from trtopt.core.errors import EngineMismatch, TrtoptError, UsageError
from trtopt.cuda.device import Device
from trtopt.runtime.session import Session
from trtopt.trt.plans import plan_header

NEXT = {"8": False, "10": True}  # the runtime is a later one than the plans'


@pytest.fixture(scope="module")
def small(generation: Any, gpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One convolution, which builds in seconds."""
    path = tmp_path_factory.mktemp("lean") / "small.onnx"
    weights = np.random.default_rng(0).normal(size=(16, 8, 3, 3)).astype(np.float32)
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size, 32, 32])
        for name, size in (("x", 8), ("y", 16))
    )
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1])
    graph = helper.make_graph([node], "small", [x], [y], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


OPTIONS: dict[str, Any] = {
    **settings(),
    "shapes": ["x:1x8x32x32,4x8x32x32,8x8x32x32"],
    "optimization_level": 0,
}


def test_only_the_lean_runtime_is_here(generation: Any, builds: Builds) -> None:
    assert generation.family == f"lean{LEAN}"
    with Session(builds["fp16"].engine) as session:
        assert session.backend == f"lean{LEAN}"
    assert not any(name.split(".")[0] == "tensorrt" and module for name, module in sys.modules.items())
    with pytest.raises(UsageError, match="has no builder"):
        trtopt.build(builds.inputs.model, builds.folder / "none.engine", backend="lean")


def test_plans_that_carry_the_library_need_trust(builds: Builds) -> None:
    engine = builds["fp16"].engine
    rows.append(("header of a version-compatible plan", str(plan_header(engine.read_bytes()[:64])), ""))
    with pytest.raises(UsageError, match="trust_host_code"):
        Session(engine, trust_host_code=False)


def test_plans_without_it_run_on_the_very_version(small: Path) -> None:
    engine = small.with_suffix(".bare.engine")
    build(small, engine, exclude_lean_runtime=True, **OPTIONS)
    if NEXT[LEAN]:
        with pytest.raises(EngineMismatch, match="exclude_lean_runtime"):
            Session(engine)
        return
    inputs = np.ones((2, 8, 32, 32), np.float32)
    with Session(engine, trust_host_code=False) as session:
        assert session.run({"x": inputs})["y"].shape == (2, 16, 32, 32)


def test_plain_plans_are_refused(small: Path, tmp_path: Path) -> None:
    engine = small.with_suffix(".plain.engine")
    build(small, engine, version_compatible=False, **OPTIONS)
    with pytest.raises(EngineMismatch, match="version_compatible=True"):
        Session(engine)
    alone = tmp_path / "alone.engine"  # whose manifest doesn't say how it was built
    shutil.copyfile(engine, alone)
    try:
        with Session(alone) as session:
            session.run({"x": np.ones((1, 8, 32, 32), np.float32)})
        rows.append(("a plain plan without its manifest", "runs", "the table in trt/compatibility.py says it doesn't"))
    except TrtoptError as error:
        rows.append(("a plain plan without its manifest", "refused", str(error).replace("|", "/")))


def test_the_library_to_embed_comes_from_the_wheel(small: Path) -> None:
    """Nothing on the loader's path leads to it, as for users of pip."""
    engine = small.with_suffix(".wheel.engine")
    options = {"version_compatible": True, **OPTIONS}
    told = ask("build", model=small, output=engine, options=options, library_path=False)
    rows.append(
        ("a build with the library from the wheel", f"{told['seconds']:.0f} s", f"{engine.stat().st_size >> 20} MiB")
    )
    with Session(engine) as session:
        assert session.run({"x": np.ones((1, 8, 32, 32), np.float32)})["y"].shape == (1, 16, 32, 32)


def test_without_the_library_no_build_is_begun(small: Path) -> None:
    engine, started = small.with_suffix(".none.engine"), time.monotonic()
    lean = ("tensorrt_lean", "tensorrt_lean_libs", "tensorrt_lean_bindings")
    with pytest.raises(AssertionError, match=r"(?s)UnsupportedRequest: .*pip install tensorrt_lean==8\.6\.0"):
        options = {"version_compatible": True, **OPTIONS}
        ask("build", model=small, output=engine, options=options, without=lean, library_path=False)
    rows.append(("refused without the library", f"{time.monotonic() - started:.1f} s", "with the start of a process"))


@pytest.mark.parametrize("name", ["fp16", "int8 Q/DQ"])
def test_results_are_the_full_runtimes(builds: Builds, inputs: Inputs, gpu: Device, tmp_path: Path, name: str) -> None:
    """Of the same plan; benchmarks/lean.py measures them beside each other."""
    photos, engine = inputs.photos["input"], builds[name].engine
    batches = {str(batch): np.concatenate([photos] * -(-batch // len(photos)))[:batch] for batch in (1, 8, 32)}
    np.savez(tmp_path / "given.npz", **batches)  # type: ignore[arg-type]
    assert ask("run", engine=engine, inputs=tmp_path / "given.npz") == {"backend": "tensorrt8"}
    with np.load(tmp_path / "given.results.npz") as full, Session(engine) as session:
        for batch, images in batches.items():
            found, expected = session.run({"input": images})["logits"], full[batch]
            np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
            apart = np.abs(found - expected).max()
            rows.append(
                (f"lean, {name}, batch {batch}", "same bits" if apart == 0 else f"at most {apart:.2g} apart", "")
            )
