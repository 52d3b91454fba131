"""Fixtures of the GPU tests: each skips with the reason where its part is missing; the table is printed last.

With TRTOPT_GPU_LEAN=8 (or 10) they run on that lean runtime: the tests of Session that need no builder in their process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_runtime import LEAN, build
from lite0 import FILES, Builds, Inputs, rows

import trtopt.builder.construction
from trtopt.cuda.device import Device, probe
from trtopt.runtime.session import Session

collect_ignore = ["test_gpu_lean.py"]
if LEAN:
    collect_ignore = [
        f"test_gpu_{name}.py" for name in ("best", "cache", "encoder", "layers", "operators", "quantized")
    ]  # they build
    for module in ("tensorrt", "tensorrt_rtx", "tensorrt_lean" if LEAN == "10" else "tensorrt_lean_bindings"):
        sys.modules[module] = None  # type: ignore[assignment]
    trtopt.builder.construction.build = build
    Session.__init__.__kwdefaults__["trust_host_code"] = True  # the plans were built just now


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not rows:
        return
    lines = ["| what | measured | note |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    if report := os.environ.get("TRTOPT_GPU_REPORT"):
        with Path(report).open("a", encoding="utf-8") as file:  # gpu_check may ask for several runs
            file.write("\n".join(lines) + "\n\n")
        return
    terminalreporter.section("GPU")
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Device]:
    found = probe()
    if not found:
        pytest.skip(f"no GPU: {found.reason}")
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings isn't installed: pip install 'trtopt[gpu]'")
    device = Device()
    if not any(row[0] == "GPU" for row in rows):
        rows.append(("GPU", str(device.info), f"driver's CUDA {'.'.join(map(str, found.driver or ()))}"))
    yield device


@pytest.fixture(scope="session")
def generation(gpu: Device) -> Any:
    from trtopt.core.errors import NoBackend
    from trtopt.trt import plan_loader, select

    try:
        chosen = plan_loader("lean", None) if LEAN else select("tensorrt")
    except NoBackend as error:
        pytest.skip(str(error))
    rows.append((chosen.product, chosen.version, chosen.family))
    return chosen


@pytest.fixture(scope="session")
def inputs() -> Inputs:
    folder = os.environ.get("TRTOPT_GPU_INPUTS")
    if not folder:
        pytest.skip("TRTOPT_GPU_INPUTS names no folder; scripts/gpu_inputs FOLDER writes one")
    paths = [Path(folder) / name for name in FILES]
    missing = [path.name for path in paths if not path.is_file()]
    assert not missing, f"{folder} lacks {', '.join(missing)}: write it again with scripts/gpu_inputs"
    with np.load(paths[3]) as photos, np.load(paths[4]) as reference:
        arrays = {name: photos[name] for name in photos.files}
        labels = [int(label) for label in arrays.pop("labels")]
        outputs = {name: reference[name] for name in reference.files}
        return Inputs(paths[0], paths[1], paths[2], arrays, labels, outputs, paths[5])


@pytest.fixture(scope="session")
def builds(generation: Any, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    folder = os.environ.get("TRTOPT_GPU_ENGINES")
    native = bool(LEAN) or generation.capabilities.native_calibrator  # 8.6 builds for a lean runtime
    return Builds(inputs, Path(folder) if folder else tmp_path_factory.mktemp("engines"), native)
