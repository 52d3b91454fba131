"""What an engine file is and what it runs, from its manifest, its header and, where there is a GPU, the engine itself."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core import native
from trtopt.core.documents import plain
from trtopt.core.errors import EngineError, EngineMismatch, NoBackend, TrtoptError
from trtopt.core.files import existing_file
from trtopt.core.values import TensorInfo
from trtopt.core.version import __version__, package_version
from trtopt.cuda.device import probe
from trtopt.engine.manifest import Manifest, load_manifest, precision_summary
from trtopt.trt import loaders, plan_loader, plan_origin, runs_on
from trtopt.trt.layers import from_inspector

_LIBRARIES = (
    *("numpy", "onnx", "onnxslim", "onnxruntime", "onnxruntime-gpu", "opencv-python-headless"),
    *("torch", "torchvision", "cuda-bindings"),
)


class _Report:
    def to_json(self) -> dict[str, Any]:
        return {"bytes" if name == "nbytes" else name: value for name, value in plain(self).items()}


@dataclass(frozen=True)
class EngineReport(_Report):
    """What `inspect` found.

    Attributes:
        maker: product and version from the plan's own header; None where it doesn't say.
        runs_on: which versions of TensorRT run it, full or lean.
        manifest: the manifest beside the plan; None where there is none.
        precision, precision_summary: counts of the layers that do the arithmetic, and the line that says it.
        notes: what couldn't be found out, and why.
    """

    engine: Path
    nbytes: int
    maker: str | None
    runs_on: str
    manifest: Manifest | None
    precision: Mapping[str, int]
    precision_summary: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelReport(_Report):
    """What `inspect` found in an ONNX file.

    Attributes:
        nbytes: of the file itself.
        weights: bytes of the weights, in the file or outside it.
        parameters: how many numbers its weights hold.
        operators: operator → how many nodes, the commonest first, subgraphs counted.
        output_kinds: output → what it seems to hold.
        quantized: it holds Q/DQ.
    """

    model: Path
    nbytes: int
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    output_kinds: Mapping[str, str]
    operators: Mapping[str, int]
    parameters: int
    weights: int
    quantized: bool


def inspect(engine: str | os.PathLike[str]) -> EngineReport | ModelReport:
    """Say what an engine file is, or an ONNX file.

    Raises:
        UsageError: there is no such file.
        InvalidModel: its name ends in .onnx, and it isn't a valid model.
        EngineError: it isn't a TensorRT plan, or is damaged, or its manifest can't be read.
        EngineMismatch: the plan isn't the one its manifest describes; or there is none, and the TensorRT that made the plan
            isn't installed.
    """
    path = existing_file(engine, "the engine")
    if path.suffix == ".onnx":
        return _model(path)
    manifest, plan = load_manifest(path), path.read_bytes()
    made = plan_origin(plan)
    maker = str(made) if made else None
    if manifest is not None:
        manifest.check_plan(path, hashlib.sha256(plan).hexdigest())
        maker, where = maker or str(manifest.origin), runs_on(manifest.origin)
        return EngineReport(path, len(plan), maker, where, manifest, manifest.precision, manifest.precision_summary)
    if made is None:
        raise EngineError(
            f"{path} isn't a TensorRT plan: its header isn't one, and there is no manifest beside it (an ONNX model's name "
            "ends in .onnx)"
        )
    notes = ["no manifest beside the plan: how it was made isn't known"]
    counts, summary = dict[str, int](), "layers not read"
    try:
        report = from_inspector(plan_loader("auto", made).load(plan, str(path)).inspect())
        counts, summary = precision_summary(report.layers, (), report.unread)
    except EngineError:  # damaged, or another's
        raise
    except NoBackend as error:  # its maker isn't here; what is can't read it
        raise EngineMismatch(
            f"{path} was made by {made}, which isn't here to read it ({error}), and there is no manifest beside it: "
            "install that generation, or build the engine again"
        ) from error
    except TrtoptError as error:
        notes.append(f"its layers can't be read here: {error}")
    if not made.compatible and made.product == "TensorRT":
        notes.append("whether it is version-compatible isn't known: it doesn't carry the lean runtime")
    return EngineReport(path, len(plan), maker, runs_on(made), None, counts, summary, tuple(notes))


def _model(path: Path) -> ModelReport:
    from trtopt.graph.io import load_model  # here, so that a host that only runs engines needs no onnx
    from trtopt.graph.output_kinds import resolve
    from trtopt.graph.passes.quantize import is_quantized
    from trtopt.graph.proto import all_nodes, tensor_size

    model = load_model(path, lazy=True)
    nodes, weights = list(all_nodes(model.proto.graph)), model.proto.graph.initializer
    return ModelReport(
        model=path,
        nbytes=path.stat().st_size,
        opset=model.opset,
        inputs=model.inputs,
        outputs=model.outputs,
        output_kinds={name: str(kind) for name, kind in resolve(model.proto, model.outputs).items()},
        operators=dict(Counter(node.op_type for node in nodes).most_common()),
        parameters=sum(math.prod(item.dims) for item in weights),
        weights=sum(map(tensor_size, weights)),
        quantized=is_quantized(model.proto),
    )


@dataclass(frozen=True)
class VersionReport(_Report):
    """Versions of trtopt and of what it can use here.

    Attributes:
        extension: its C extension is built; without it calibration counts more slowly and threads share a GPU worse.
    """

    trtopt: str
    python: str
    platform: str
    gpu: str
    generations: Sequence[Mapping[str, Any]]
    libraries: Mapping[str, str | None]
    extension: bool


def version() -> VersionReport:
    """What is installed: trtopt, the TensorRT generations, the GPU, and the libraries that matter."""
    gpu = probe()
    return VersionReport(
        trtopt=__version__,
        python=sys.version.split()[0],
        platform=platform.platform(),
        gpu=", ".join(map(str, gpu.devices)) or f"none ({gpu.reason})",
        generations=[generation.describe() for generation in loaders()],
        libraries={name: package_version(name) for name in _LIBRARIES},
        extension=native.run is not None,
    )
