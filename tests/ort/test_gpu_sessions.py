"""Which sessions ask for ONNX Runtime's GPU provider: seen by stand-ins that note what is asked for, and run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from graphs import conv_relu, values
from world import net, samples

from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.observe import observe
from trtopt.core.errors import DeviceError
from trtopt.evaluation.baselines import OnnxRuntime
from trtopt.evaluation.verify import verify
from trtopt.graph.io import save_model
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import CPU, GPU, OnnxSession, open_session

BATCH = {"x": values(2, 3, 8, 8)}
EXACT, AS_IT_COMES = [(GPU, {"use_tf32": "0"}), CPU], [(GPU, {"use_tf32": "1"}), CPU]


class Package:
    """onnxruntime-gpu, as far as opening sessions goes.

    Attributes:
        asked: the providers of each session, in order.
        gpu: whether there is a GPU that it can use; without one it prints that and takes the CPU.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.gpu, self.preloaded = True, 0
        real, package = onnxruntime.InferenceSession, self

        class InferenceSession:
            def __init__(self, model: str, options: Any, providers: list[Any]) -> None:
                package.asked.append(providers)
                self.got = [GPU, CPU] if package.gpu and providers != [CPU] else [CPU]
                if providers != [CPU] and not package.gpu:
                    print("EP Error: no CUDA-capable device is detected")
                self.session = real(model, options, providers=[CPU])

            def get_providers(self) -> list[str]:
                return self.got

            def __getattr__(self, name: str) -> Any:
                return getattr(self.session, name)

        monkeypatch.setattr(onnxruntime, "InferenceSession", InferenceSession)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [GPU, CPU])
        monkeypatch.setattr(onnxruntime, "preload_dlls", self.preload, raising=False)

    def preload(self) -> None:
        self.preloaded += 1
        print("Failed to load libcublasLt.so.13" if not self.gpu else "loaded")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    return Package(monkeypatch)


def test_the_reference_runs_on_the_gpu_in_fp32_and_the_candidate_on_the_cpu(package: Package) -> None:
    result = verify(conv_relu(), conv_relu(), [BATCH])
    assert result.snr_db > 100
    assert package.asked == [EXACT, [CPU]]


def test_a_benchmark_takes_the_gpu_as_onnx_runtime_sets_it_up(package: Package, tmp_path: Path) -> None:
    save_model(conv_relu(), tmp_path / "m.onnx")
    baseline = OnnxRuntime(tmp_path / "m.onnx")
    assert package.asked == [AS_IT_COMES] and "(CUDA)" in baseline.name


def test_nothing_else_asks_for_the_gpu(package: Package) -> None:
    OnnxSession(conv_relu())(BATCH)
    OnnxRunner(conv_relu(), optimize=False)(BATCH)
    observe(conv_relu(), ["x", "y"], [BATCH])  # histograms must be the same with either package
    assert package.asked == [[CPU]] * 3 and not package.preloaded


def test_calibration_asks_for_it_in_fp32_and_refuses_to_go_on_without(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path))
    data: dict[str, Any] = {"data": samples(8), "threads": 1, "method": "minmax"}
    on_gpu = calibrate(net(), device="cuda", **data)
    assert EXACT in package.asked and not on_gpu.cached
    on_cpu = calibrate(net(), **data)
    assert on_cpu.table.amax == on_gpu.table.amax and not on_cpu.cached  # passes have keys of their own
    package.gpu = False
    with pytest.raises(DeviceError, match=r"`device='cuda'`: .* finds no GPU"):
        calibrate(net(), device="cuda", **data)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(DeviceError, match=r"needs an ONNX Runtime with CUDAExecutionProvider.*onnxruntime-gpu"):
        calibrate("absent.onnx", device="cuda", data="absent.npz")


def test_cuda_is_loaded_before_the_session(package: Package) -> None:
    assert OnnxRunner(conv_relu(), optimize=True, gpu=True).on_gpu
    assert package.preloaded == 1
    package.gpu = False
    runner = OnnxRunner(conv_relu(), optimize=True, gpu=True)
    assert not runner.on_gpu and runner(BATCH)["y"].shape == (2, 4, 8, 8)


def test_a_package_without_gpus_or_an_old_one_works_as_ever(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(onnxruntime, "preload_dlls", raising=False)
    assert OnnxRunner(conv_relu(), optimize=True, gpu=True).on_gpu  # before 1.21
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    session = open_session(conv_relu(), gpu=True)
    assert package.asked[1:] == [[CPU]] and session.get_providers() == [CPU]
    assert np.array_equal(session.run(None, BATCH)[0], open_session(conv_relu()).run(None, BATCH)[0])
