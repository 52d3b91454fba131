"""EfficientNet-Lite0 on a GPU: the prepared inputs, one build of each precision, and the table of measurements.

scripts/gpu_inputs writes the folder that TRTOPT_GPU_INPUTS names (the GPU host needs neither torch nor ONNX
Runtime):
model.onnx, calib.npz, calib.json, photos.npz (with labels), reference.npz (the FP32 outputs in ONNX Runtime) and
lite0.cache (calib.json's scales as a TensorRT cache).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from numpy.typing import NDArray

FILES = ("model.onnx", "calib.npz", "calib.json", "photos.npz", "reference.npz", "lite0.cache")
SHAPES = "input:1x3x224x224,32x3x224x224,32x3x224x224"
rows: list[tuple[str, str, str]] = []  # what, value, note


def settings(folder: Path | None = None) -> dict[str, Any]:
    """Arguments of every build: the level of TRTOPT_GPU_LEVEL, and one timing cache, beside the engines that are kept."""
    level, kept = os.environ.get("TRTOPT_GPU_LEVEL"), os.environ.get("TRTOPT_GPU_ENGINES")
    place = folder or (Path(kept) if kept else None)
    cache = {"timing_cache": place / "timing.cache"} if place else {}
    return {"backend": "tensorrt", "optimization_level": int(level) if level else None, **cache}


@dataclass(frozen=True)
class Inputs:
    """Paths of the prepared files, and the arrays that every test reads."""

    model: Path
    calib: Path
    table: Path
    photos: dict[str, NDArray[Any]]
    labels: list[int]
    reference: dict[str, NDArray[Any]]
    cache: Path


class Builds:
    """Builds each engine once per session, all with one timing cache.

    Args:
        native: TensorRT has a calibrator of its own; tests of what needs one are skipped without.
    """

    OPTIONS: ClassVar[dict[str, dict[str, Any]]] = {
        "fp32": {},
        "fp16": {"fp16": True},
        "int8 Q/DQ": {"int8": True},
        "int8 native": {"int8": True, "calibrator": "native"},
    }
    FROM_CACHES: ClassVar[dict[str, dict[str, Any]]] = {
        "int8 native from our cache": {"int8": True, "calibrator": "native"},
        "int8 Q/DQ from TensorRT's cache": {"int8": True},
    }

    def __init__(self, inputs: Inputs, folder: Path, native: bool) -> None:
        self.inputs, self.folder, self.native = inputs, folder, native
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The BuildResult; a failed build fails each test that needs it, and isn't tried again."""
        if not self.native and "calibrator" in (self.OPTIONS | self.FROM_CACHES)[name]:
            pytest.skip("this TensorRT has no calibrator of its own")
        if name not in self._made:
            try:
                self._made[name] = self._build(name)
            except Exception as error:
                self._made[name] = error
                rows.append((f"build {name}", "failed", str(error).splitlines()[0]))
        found = self._made[name]
        if isinstance(found, Exception):
            raise found
        return found

    @property
    def available(self) -> list[str]:
        """Names of `OPTIONS` that can be built here."""
        return [name for name, options in self.OPTIONS.items() if self.native or "calibrator" not in options]

    @property
    def native_cache(self) -> Path:
        """Where the cache is kept that TensorRT's own calibrator wrote."""
        return self.folder / "native.cache"

    def written_cache(self) -> Path:
        """That cache, written if it isn't there yet."""
        assert self["int8 native"]
        return self.native_cache

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of every build."""
        return {**settings(self.folder), "shapes": [SHAPES]}

    def _build(self, name: str) -> Any:
        from trtopt.builder.construction import build

        options = dict((self.OPTIONS | self.FROM_CACHES)[name])
        if name == "int8 Q/DQ":
            options["calib"] = self.inputs.table
        elif name == "int8 native":
            options |= {"data": self.inputs.calib, "save_cache": self.native_cache}
        elif name == "int8 native from our cache":
            options["calib"] = self.inputs.cache
        elif name == "int8 Q/DQ from TensorRT's cache":
            options["calib"] = self.written_cache()
        engine = self.folder / f"{name.replace(' ', '-').replace('/', '').replace(chr(39), '')}.engine"
        result = build(self.inputs.model, engine, **self.common, **options)
        rows.append((f"build {name}", f"{result.seconds:.0f} s", result.precision_summary))
        return result
