"""Time an engine layer by layer.

print(trtopt.profile("resnet50.engine", batch=(32,)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import plain
from trtopt.core.options import taking
from trtopt.diagnosis.request import ProfileRequest
from trtopt.evaluation.benchmark import aligned, engine_to_time, gpu_name, inputs_by_size
from trtopt.evaluation.timing import MADE_UP
from trtopt.runtime.request import opening_options
from trtopt.runtime.session import Session
from trtopt.runtime.timing import LayerTimes

_COLUMNS = ("batch", "ms", "share", "precision", "kind", "layer")
_NAME = 60  # characters of a layer's


@dataclass(frozen=True)
class EngineProfile:
    """The times that `profile` found.

    Attributes:
        gpu: its name; inputs: what they are.
        batches: batch size → its layers, in the order that they run in.
    """

    engine: Path
    gpu: str
    inputs: str
    batches: Mapping[int, LayerTimes]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        batches = [{"batch": size, "total_ms": item.total_ms, **plain(item)} for size, item in self.batches.items()]
        return {**plain(self), "batches": batches}

    def table(self, top: int = 0) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows, as text: of each batch the layers that take longest first, `top` of them; 0: all."""
        rows: list[tuple[str, ...]] = []
        for size, times in self.batches.items():
            slowest = sorted(times.layers, key=lambda layer: -layer.ms)
            for layer in slowest[: top or None]:
                share = f"{layer.ms / (times.total_ms or 1):.1%}"
                precision = layer.precision.upper() if layer.precision else "-"
                name = " + ".join(layer.nodes) or layer.name  # its own where TensorRT doesn't tell them
                name = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
                rows.append((str(size), f"{layer.ms:.4f}", share, precision, layer.kind, name))
        return _COLUMNS, rows

    def remarks(self, top: int = 0) -> list[str]:
        lines = []
        for size, times in self.batches.items():
            by = dict[str, float]()
            for layer in times.layers:
                name = layer.precision.upper() if layer.precision else "not known"
                by[name] = by.get(name, 0.0) + layer.ms
            most = sorted(by.items(), key=lambda item: -item[1])
            parts = ", ".join(f"{name} {ms / (times.total_ms or 1):.0%}" for name, ms in most)
            lines.append(
                f"batch {size}: {len(times.layers)} layers take {times.total_ms:.4f} ms one by one ({parts}); the whole "
                f"inference takes {times.gpu.median:.4f} ms"
            )
            if top and len(times.layers) > top:
                rest = sum(sorted(layer.ms for layer in times.layers)[:-top])
                more = f"{len(times.layers) - top} more layers take {rest:.4f} ms"
                lines.append(f"batch {size}: {more} (`top=0` lists them)")
        lines.append(f"{self.gpu}; inputs: {self.inputs}")
        return lines + [f"note: {text}" for text in self.notes]

    def __str__(self) -> str:
        return "\n".join([*aligned(*self.table()), *self.remarks()])


@taking(ProfileRequest)
def profile(request: ProfileRequest) -> EngineProfile:
    """Time each layer of an engine on this machine's GPU, by TensorRT's own profiler.

    With a profiler layers run one by one, so that they add up to more than the whole inference, which is measured beside them.

    Args:
        engine: a plan file; what its manifest says of the layers stands beside their times.
        batch: as for `bench`; the inputs are made up.
        iterations, warmup: inferences that are timed (each layer's median counts), and those before.

    Raises:
        UsageError: arguments that can't be right, or a batch outside the engine's shapes.
        DeviceError: there is no GPU.
        EngineError, EngineMismatch, NoBackend, MissingDependency: as `Session`.
    """
    instead = "Without one, trtopt inspect {} --layers tells each layer's precision, formats and kernel"
    path = engine_to_time(request, "timing the layers of", instead)
    with Session(path, contexts=1, **opening_options(request)) as session:
        batches: dict[int, LayerTimes] = {}
        for size, arrays in inputs_by_size(session, request.batch).items():
            with request.reporter.phase(f"timing layers, batch {size}"):
                batches[size] = session.profile(arrays, request.iterations, request.warmup)
        notes = list(session.notes)
        if session.manifest is None:
            notes.append("without a manifest, neither precisions nor nodes of the layers are known")
    return EngineProfile(path, gpu_name(request.device), MADE_UP, batches, tuple(notes))
