"""PyTorch's and ONNX Runtime's times for ResNet-50, as a file that benchmarks/runtime.py compares with.

    python benchmarks/pytorch.py torch.json [resnet50.onnx]

ResNet-50 of torchvision with random weights, FP16 channels-last, batch 1 and 32: replayed from a CUDA graph, and the same
of what torch.compile makes; milliseconds on the GPU between events, medians. Needs torch and torchvision with CUDA;
ONNX Runtime where it is installed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported

BATCHES = (1, 32)
ITERATIONS = 200
MODES = ("max-autotune-no-cudagraphs", "reduce-overhead")


def replayed(torch: Any, module: Any, images: Any) -> float:
    """Median milliseconds of a CUDA graph of module(images)."""
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(10):
            module(images)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            module(images)
        return timed(torch, graph.replay, stream)


def timed(torch: Any, call: Any, stream: Any) -> float:
    for _ in range(30):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ITERATIONS + 1)]
    events[0].record(stream)
    for event in events[1:]:
        call()
        event.record(stream)
    stream.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(events))


def compiled(torch: Any, module: Any, images: Any) -> dict[str, Any]:
    """The first mode that works; what the others said. reduce-overhead captures graphs itself, so it is timed as it is."""
    found: dict[str, Any] = {}
    for mode in MODES:
        torch._dynamo.reset()
        try:
            made = torch.compile(module, mode=mode)
            if mode == "reduce-overhead":
                with torch.inference_mode():
                    for _ in range(10):
                        made(images)
                    torch.cuda.synchronize()
                    found["compile_ms"] = timed(torch, lambda: made(images), torch.cuda.current_stream())  # noqa: B023
            else:
                found["compile_ms"] = replayed(torch, made, images)
            return {**found, "compile": mode}
        except Exception as error:
            found[f"{mode} failed"] = str(error).strip().splitlines()[-1][:200]
    return found


def onnxruntime_time(model: Path, batch: int, torch: Any) -> dict[str, Any]:
    """End to end, NumPy in and out, in the best provider there is."""
    try:
        ort = importlib.import_module("onnxruntime")
    except ImportError as error:
        return {"ort": f"not installed ({error})"}
    there = ort.get_available_providers()
    wanted = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in there]
    session = ort.InferenceSession(str(model), providers=wanted)
    feed = {session.get_inputs()[0].name: torch.randn(batch, 3, 224, 224).numpy()}
    session.run(None, feed)
    times: list[float] = []
    end = time.perf_counter() + 10
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 100):
        start = time.perf_counter()
        session.run(None, feed)
        times.append((time.perf_counter() - start) * 1e3)
    return {
        "ort": f"onnxruntime {ort.__version__}, {session.get_providers()[0]} of {', '.join(there)}",
        "ort_ms": statistics.median(times),
    }


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: benchmarks/pytorch.py torch.json [resnet50.onnx]")
    torch = importlib.import_module("torch")
    models = importlib.import_module("torchvision.models")
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no GPU")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    module = models.resnet50(weights=None).eval().cuda().half().to(memory_format=torch.channels_last)
    report: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "resnet50": {}}
    for batch in BATCHES:
        images = torch.randn(batch, 3, 224, 224, device="cuda").half().to(memory_format=torch.channels_last)
        row: dict[str, Any] = {"graph_ms": replayed(torch, module, images), **compiled(torch, module, images)}
        if len(sys.argv) == 3:
            row.update(onnxruntime_time(Path(sys.argv[2]), batch, torch))
        report["resnet50"][str(batch)] = row
        Path(sys.argv[1]).write_text(
            json.dumps(report, indent=1) + "\n", encoding="utf-8"
        )  # each batch: it may be stopped
        print(f"batch {batch}: {row}", flush=True)


if __name__ == "__main__":
    main()
