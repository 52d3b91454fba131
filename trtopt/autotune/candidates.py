"""The engines that a request compares: their requests, builds and measurements, and where they lie meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtopt.autotune.selection import Comparison, Entrant, judge, time_in_turns
from trtopt.builder import construction as engine
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache
from trtopt.core.errors import DeviceError, TrtoptError, UsageError
from trtopt.core.options import without
from trtopt.core.progress import Phase, Reporter
from trtopt.core.shapes import parse_profiles
from trtopt.core.values import BuildSpec, Override, Precision, parse_targets
from trtopt.cuda.device import Device, DeviceInfo, probe
from trtopt.data import Batches, open_data
from trtopt.data.preprocess import Preprocess
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.verify import Runner
from trtopt.graph.io import Model
from trtopt.graph.output_kinds import Kind
from trtopt.graph.passes.quantize import is_quantized
from trtopt.runtime.session import Session
from trtopt.trt import select

SAMPLES = 64  # that judge the accuracy, unless --limit says another number
NATIVE_CACHE = "native.cache"  # beside a candidate's plan
_CALIBRATION = ("int8", "fp8", "images", "data", "calib", "method", "limit", "batch", "calibrator", "save_cache")


def precisions(request: BuildRequest) -> tuple[Precision, Precision]:
    """The quantized one, and the one that it is compared with."""
    quantized = Precision.FP8 if request.fp8 and not request.int8 else Precision.INT8
    return quantized, Precision.BF16 if request.bf16 else Precision.FP16


def gpu_for(request: BuildRequest) -> DeviceInfo:
    """The GPU that the engines are measured on.

    Raises:
        DeviceError: there is none, CUDA can't use it, or the engines are for others.
        MissingDependency: cuda-bindings isn't installed.
    """
    found = probe()
    if not found:
        raise DeviceError(f"there is no GPU here: {found.reason}")
    here = found.devices[0]
    quantized, base = precisions(request)
    spec = BuildSpec(precision=quantized, remainder=base, targets=parse_targets(request.target))
    targets = select(request.backend).targets(spec)
    if targets and here.compute_capability not in targets:
        said = ", ".join(f"sm{target}" for target in targets)
        raise DeviceError(
            f"the engine is for {said}; the GPU here is {here}: add `target='sm{here.compute_capability}'`"
        )
    return Device(here.ordinal).info


def check_measurable(request: BuildRequest, model: Model, base: Precision) -> None:
    """Raise UsageError unless engines of both precisions can be made of the model and run."""
    if request.strip:
        raise UsageError("an engine without its weights (`strip=True`) can't run")
    if is_quantized(model.proto):
        raise UsageError(
            f"the model already holds Q/DQ, so there is no {base.upper()} form of it: give the float model"
        )


def real_samples(model: Model, request: BuildRequest, default: int | None = SAMPLES) -> Batches:
    """The real samples of a request, at most `default` unless it says how many."""
    images, preprocess, calib = request.images, request.preprocess, request.calib
    if images is not None and preprocess is None and calib is not None:
        table = calib if isinstance(calib, Table) else None if is_cache(calib) else Table.load(calib)
        preprocess = table.preprocess if table else None
    if images is not None and preprocess is not None:
        preprocess = Preprocess.load(preprocess).at_opt(model.inputs, parse_profiles(request.shapes))
    return open_data(
        model.inputs,
        images=images,
        data=request.data,
        preprocess=preprocess if images is not None or calib is None else None,
        limit=default if request.limit is None else request.limit,
        batch=request.batch,
    )


def floating(request: BuildRequest, precision: Precision, preprocess: Any) -> BuildRequest:
    """The request for the same engine without quantization."""
    allowed = (Precision.FP32, precision)
    return replace(
        without(request, *_CALIBRATION),
        fp16=precision is Precision.FP16,
        bf16=precision is Precision.BF16,
        precision_override=[text for text in request.precision_override if Override.parse(text).precision in allowed],
        preprocess=preprocess,
        reporter=_Prefixed(request.reporter, precision),
    )


def build_candidate(request: BuildRequest, precision: Precision, folder: Path) -> BuildResult:
    """One engine, with all that belongs to it, in a folder of its own."""
    own = folder / str(precision)
    own.mkdir(parents=True)
    return engine.construct(
        replace(
            request,
            output=own / Path(request.output).name,
            save_onnx=own / "graph.onnx" if request.save_onnx else None,
            save_cache=own / NATIVE_CACHE if request.save_cache else None,
        )
    )


def measured(
    gpu: DeviceInfo,
    made: Mapping[Precision, BuildResult],
    failed: Mapping[Precision, str],
    samples: Batches | None,
    reporter: Reporter,
    *,
    reference: Runner | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Comparison:
    """Time the engines that could be made, and judge them against `reference`, where there is one, by the outputs' `kinds`."""
    names = ", ".join(item.upper() for item in made)
    with contextlib.ExitStack() as stack:
        sessions = {
            str(item): stack.enter_context(Session(result.engine, contexts=1, trust_host_code=True))  # built just now
            for item, result in made.items()
        }
        with reporter.phase(f"timing {names} in turns"):
            times, inputs = time_in_turns(sessions, samples or ())
        accuracy: Mapping[str, Any] = {}
        if reference is not None and samples is not None:
            with reporter.phase(f"comparing {names} with FP32"):
                accuracy = judge(reference, sessions, samples, kinds)
    entrants = [
        Entrant(str(item), result.truth, round(result.seconds, 3), times[str(item)], accuracy.get(str(item)))
        for item, result in made.items()
    ]
    entrants += [Entrant(str(item), failed=why) for item, why in failed.items()]
    return Comparison(str(gpu), inputs, None, tuple(entrants))


def stored_comparison(output: Path) -> Comparison | None:
    """The comparison in the manifest at `output`."""
    try:
        manifest = load_manifest(output)
    except TrtoptError:
        return None  # no engine, or an unreadable manifest: build again
    return Comparison.load(manifest.comparison) if manifest and manifest.comparison else None


class _Prefixed(Reporter):
    """Another candidate's phases and warnings, under its name; its notes were said for the first one."""

    def __init__(self, reporter: Reporter, precision: Precision) -> None:
        self._reporter, self._name = reporter, precision.upper()

    def warn(self, text: str) -> None:
        self._reporter.warn(f"{self._name}: {text}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        with self._reporter.phase(f"{self._name}: {name}", total) as phase:
            yield phase
