"""The door on a real TensorRT with a GPU, without pytest: PYTHONPATH=. python tests/trt/gpu_smoke.py [FOLDER]

Builds the small network of nets.py in every precision that the installed TensorRT honours, reads the layers back, and
tries what can go wrong. Prints one line for each step; exits with 1 if any fails.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nets
import numpy as np

from trtopt.core.errors import EngineError, UnsupportedOperator, UnsupportedRequest, UsageError
from trtopt.core.values import BuildSpec, Precision, ShapeRange
from trtopt.trt import select
from trtopt.trt.generation import BuiltPlan, Generation
from trtopt.trt.plans import plan_header

X = {"x": ShapeRange((1, 3, 32, 32), (4, 3, 32, 32), (8, 3, 32, 32))}
BASE = BuildSpec(profiles=(X,), optimization_level=1)


def batches(count: int) -> Iterator[dict[str, Any]]:
    """Smooth ramps of different slope: the net is untrained, so its scales, not its answers, are looked at."""
    ramp = np.linspace(-1, 1, 3 * 32 * 32, dtype=np.float32).reshape(1, 3, 32, 32)
    return ({"x": ramp * (1 + index / count)} for index in range(count))


def raises(kind: type[Exception], work: Callable[[], Any]) -> str:
    try:
        work()
    except kind as error:
        return f"{kind.__name__}: {str(error)[:160]}"
    raise AssertionError(f"{kind.__name__} was not raised")


def expect(built: BuiltPlan, precision: Precision | None) -> str:
    """Every convolution in `precision`; None where flags only allow one, and TensorRT may find another faster."""
    found = {layer.nodes: str(layer.precision) for layer in built.layers if layer.kind == "convolution"}
    assert not built.layers_unknown, built.layers_unknown
    assert len(found) == 2, [(layer.name, layer.kind) for layer in built.layers]
    assert precision is None or set(found.values()) == {str(precision)}, found
    kinds = [(layer.kind, str(layer.precision)) for layer in built.layers if layer.kind != "other"]
    return f"{kinds} in {built.seconds:.1f} s; {plan_header(built.plan)}; warnings {list(built.warnings)}"


def steps(generation: Generation, folder: Path) -> dict[str, Callable[[], Any]]:
    typed = generation.capabilities.typed_graph
    plain = nets.conv_net(folder / "fp32.onnx", opset=17)
    half = nets.conv_net(folder / "fp16.onnx", base="fp16", opset=17) if typed else plain
    base = "fp16" if typed else "fp32"
    int8 = nets.conv_net(folder / "int8.onnx", base=base, quantized="int8", opset=19 if typed else 17)
    wanted = replace(BASE, precision=Precision.INT8)
    native = replace(wanted, calibrator="native")
    cache = folder / "timing.cache"
    kept: dict[str, BuiltPlan] = {}

    def calibrate() -> str:
        kept["native"] = generation.build(plain, native, quantized=False, calibration=batches(19), calibration_batch=8)
        text = (kept["native"].native_cache or b"").decode()
        assert "EntropyCalibration2" in text and "\nx: " in text, text
        assert any("last 3 samples" in warning for warning in kept["native"].warnings), kept["native"].warnings
        return expect(kept["native"], None) + "\n" + text

    def again() -> str:
        built = generation.build(plain, native, quantized=False, calibration_cache=kept["native"].native_cache)
        return expect(built, None)

    def timed() -> str:
        spec = replace(BASE, timing_cache=cache)
        first = generation.build(plain, spec, quantized=False)
        size = cache.stat().st_size
        second = generation.build(plain, spec, quantized=False)
        cache.write_bytes(b"not a cache" * 9)
        third = generation.build(plain, spec, quantized=False)
        said = [warning for warning in third.warnings if "timing cache" in warning]  # 8.6 takes anything, silently
        return f"{size} bytes; {first.seconds:.1f} s, then {second.seconds:.1f} s, foreign {third.seconds:.1f} s {said}"

    def pinned() -> str:
        spec = replace(BASE, precision=Precision.FP16)
        built = generation.build(plain, spec, quantized=False, layer_precision={"conv2": Precision.FP32})
        found = {layer.nodes: str(layer.precision) for layer in built.layers if layer.kind == "convolution"}
        assert [kind for nodes, kind in found.items() if "conv2" in nodes] == ["fp32"], found
        return str(found)

    def flags() -> str:
        spec = replace(BASE, refit=True, sparsity=True, tf32=False, workspace=256 << 20)
        spec = replace(spec, hardware_compatibility="ampere_plus") if generation.family != "rtx" else spec
        return expect(generation.build(plain, spec, quantized=False), Precision.FP32)

    def loads() -> str:
        plan = bytes(generation.build(plain, BASE, quantized=False).plan)
        assert generation.load(plan).engine.num_io_tensors == 2
        return raises(EngineError, lambda: generation.load(plan[: len(plan) // 2]))

    bad = nets.bad_nodes(folder / "bad.onnx")
    work: dict[str, Callable[[], Any]] = {
        "fp32": lambda: expect(generation.build(plain, BASE, quantized=False), Precision.FP32),
        "fp16": lambda: expect(
            generation.build(half, replace(BASE, precision=Precision.FP16), quantized=False),
            Precision.FP16 if typed else None,
        ),
        "int8": lambda: expect(generation.build(int8, wanted, quantized=True), Precision.INT8),
        "flags": flags,
        "loads": loads,
        "unsupported": lambda: [str(issue) for issue in generation.unsupported(bad)],
        "bad nodes": lambda: raises(UnsupportedOperator, lambda: generation.build(bad, BuildSpec(), quantized=False)),
        "no profile": lambda: raises(UsageError, lambda: generation.build(plain, BuildSpec(), quantized=False)),
    }
    if generation.capabilities.native_calibrator:
        work |= {"native": calibrate, "native from its cache": again}
    if generation.capabilities.timing_cache:
        work["timing cache"] = timed
    if not typed:
        work["pinned layer"] = pinned
        work["refused"] = lambda: raises(
            UnsupportedRequest,
            lambda: generation.refuse(BuildSpec(precision=Precision.BF16, targets=(89,), strip=True)),
        )
    return work


def main(folder: Path) -> int:
    generation = select("auto")
    print(generation.describe())
    done = [attempt(name, work) for name, work in steps(generation, folder).items()]
    return 0 if all(done) else 1


def attempt(name: str, work: Callable[[], Any]) -> bool:
    try:
        print(f"ok    {name}: {work()}", flush=True)
    except Exception:
        print(f"FAIL  {name}:\n{traceback.format_exc()}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())))
