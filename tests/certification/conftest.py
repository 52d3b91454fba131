from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

import trtopt
from trtopt.certification import certificate, healing, opening
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.evaluation import verify

Spoil = Callable[[trtopt.Session, Mapping[str, NDArray[Any]], dict[str, NDArray[Any]]], None]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Engines "run" as their graphs in ONNX Runtime, and functions that are given then spoil what a session makes of inputs;
    engines with tensors as outputs run as what they were built of, and are right."""
    gpu, spoils = Probe((DeviceInfo(0, "Fake GPU", 89, 1 << 30),), (13, 0), ""), list[Spoil]()

    def opened(plan: Path, **options: Any) -> trtopt.Session:
        rebuilt = options.pop("trust", False)
        session = trtopt.Session(plan.with_suffix(".onnx") if rebuilt else plan, backend="onnxruntime", **options)
        real = session.run_batches

        def run_batches(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            results = {name: array.copy() for name, array in real(inputs).items()}
            for spoil in spoils if not rebuilt else ():
                spoil(session, inputs, results)
            return results

        session.run_batches = run_batches  # type: ignore[method-assign]
        return session

    for module in (opening, certificate, verify, healing):
        monkeypatch.setattr(module, "probe", lambda: gpu)
        monkeypatch.setattr(module, "Session", opened, raising=False)
    return spoils.append
