"""Engines of one model in several precisions and choices: each is built once, and timed on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtopt.autotune.search import Measured
from trtopt.autotune.selection import EQUAL, Candidate, Comparison
from trtopt.autotune.tuning import Tuning, Work, remembered
from trtopt.builder import construction as engine
from trtopt.builder.asked import spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples
from trtopt.calibration.scales import may_stand_beside
from trtopt.calibration.table import Table
from trtopt.core.errors import BuildCancelled, BuildFailed, DeviceError, PrecisionLost, TrtoptError, UsageError
from trtopt.core.options import without
from trtopt.core.progress import Phase, Reporter
from trtopt.core.values import Override, Precision
from trtopt.core.version import MAKER
from trtopt.cuda.device import Device, DeviceInfo
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.agreement import Runner, verify_all
from trtopt.evaluation.timing import layer_shares, time_in_turns
from trtopt.evaluation.verify import kinds_of, session_runner
from trtopt.graph.io import load_model
from trtopt.graph.passes.placement import gates_of
from trtopt.graph.prepare import holds_scales, prepare
from trtopt.graph.view import to_ir
from trtopt.runtime.session import Session
from trtopt.trt import select

NATIVE_CACHE = "native.cache"  # beside a candidate's plan
CALIBRATION = ("int8", "fp8", "images", "data", "calib", "method", "limit", "batch", "calibrator", "save_cache")


def gpu_for(request: BuildRequest) -> DeviceInfo:
    """Return the GPU to measure engines on; raise where there is none, no two engines of the model can be run, or none are to
    be compared."""
    if not request.compare:
        raise UsageError("`compare=False` was given")
    generation, spec = select(request.backend), spec_of(request)
    gpu, targets = generation.device(spec), generation.targets(spec)
    if gpu is None:
        raise DeviceError(f"there is no GPU here: {generation.gpu().reason}")
    if targets and gpu.compute_capability not in targets:
        names = ", ".join(f"sm{target}" for target in targets)
        raise DeviceError(
            f"the engine is for {names}; the GPU here is {gpu}: add `target='sm{gpu.compute_capability}'`"
        )
    device = Device(gpu.ordinal)
    if request.strip:
        raise UsageError("an engine without its weights (`strip=True`) can't run")
    if holds_scales(load_model(request.model, lazy=True)):
        raise UsageError(
            f"the model already holds Q/DQ, so there is no {spec.base.upper()} form of it: give the float model"
        )
    return device.info


def asked_of_builder(request: BuildRequest, precision: Precision, preprocess: Any, *, within: bool) -> BuildRequest:
    """Return the request for one engine, `within` with the samples that say what of a floating one stays in FP32."""
    if precision.quantized:  # with a table, images and data only judge
        return request if request.calib is None else replace(request, images=None, data=None)
    precisions = (Precision.FP32, precision)
    kept = ("images", "data", "limit", "batch") if within and precision is not Precision.FP32 else ()
    overrides = [text for text in request.precision_override if Override.parse(text).precision in precisions]
    return replace(
        without(request, *(name for name in CALIBRATION if name not in kept)),
        fp16=precision is Precision.FP16,
        bf16=precision is Precision.BF16,
        precision_override=overrides,
        preprocess=preprocess,
        sparsity="off" if request.sparsity == "prune" else request.sparsity,  # the engine that the other one replaces
        reporter=Prefixed(request.reporter, precision),
    )


class Engines:
    """The engines of one request, built when they are first asked for, each in a folder of its own.

    Attributes:
        folder: of them all, once it is set.
        quantized, base: the precisions that the request asks for, and that the rest of such an engine has.
        beside: scales may stand beside the graph, too.
        samples: that judge; None: the request names none.
    """

    folder: Path

    def __init__(self, request: BuildRequest, gpu: DeviceInfo, *, within: bool = True) -> None:
        self.request, self.gpu, self.within = request, gpu, within
        self.quantized, self.base = (spec := spec_of(request)).precision, spec.base
        generation = select(request.backend)
        self.beside = may_stand_beside(spec, generation.capabilities)
        self.key = [MAKER, spec.describe(), generation.family, generation.version, str(gpu)]
        self.model = load_model(request.model)
        sampled = request.images is not None or request.data is not None
        self.samples = real_samples(self.model, request) if sampled else None
        self.kinds = kinds_of(self.model, request)
        self.built: dict[str, BuildResult] = {}  # by precision, and the table's digest

    def build(self, precision: Precision, table: Table | None = None) -> BuildResult:
        """Return the engine in this precision, of this table in place of the request's scales."""
        request = self.request if table is None else replace(self.request, calib=table)
        name = str(precision)
        if precision is self.quantized and isinstance(request.calib, Table):
            name += f" {request.calib.digest}"
        if name not in self.built:
            # Floating engines' inputs are prepared as the table says that a quantized one's are.
            known = next(filter(None, (load_manifest(item.engine) for item in self.built.values())), None)
            preprocess = request.preprocess if known is None else known.model_preprocess
            asked = asked_of_builder(request, precision, preprocess, within=self.within)
            own = self.folder / f"engine-{len(list(self.folder.iterdir()))}"
            own.mkdir(parents=True)
            graph, cache = request.save_onnx and own / "graph.onnx", asked.save_cache and own / NATIVE_CACHE
            output = own / Path(request.output).name
            self.built[name] = engine.construct(replace(asked, output=output, save_onnx=graph, save_cache=cache))
        return self.built[name]

    def times(self, table: Table, work: Work) -> Measured | None:
        """Time the layers in an engine with this table and in a floating one, unless an earlier call did."""
        return remembered([*self.key, table.digest], "times", Measured, lambda: self._times_now(table, work))

    def _times_now(self, table: Table, work: Work) -> Measured | None:
        reporter = self.request.reporter
        reporter.note(f"building in {self.quantized.upper()} and {self.base.upper()}, to time the layers of each")
        try:
            ours = self.build(self.quantized, table)
            pair = (self.build(self.base), ours)
            with reporter.phase("timing the layers"), contextlib.ExitStack() as stack:
                sessions = [stack.enter_context(self._session(item)) for item in pair]
                floating, quantized = layer_shares(sessions, self.samples or (), work)
        except BuildCancelled:
            raise
        except TrtoptError as error:
            reporter.warn(f"the layers' times aren't known, so the share of the arithmetic counts instead: {error}")
            return None
        return Measured(quantized, floating, f"the time of its layers on {self.gpu}, of FP16's")

    def fastest(self, tunings: Sequence[Tuning]) -> Tuning:
        """Return the fastest of these choices and, where that is within the limits, of those with all layers in INT8, or with
        scales beside the graph."""
        choices: dict[str, Tuning] = {}
        other = self.beside and not gates_of(to_ir(prepare(self.model).proto))  # whose scales stand there anyway
        for item in tunings:
            choices.setdefault(item.table.digest, item)
            if not item.whole.missed:
                whole = replace(item.table, left_out={})
                beside = other and not (whole.repairs or whole.smoothed)
                for table in (whole, *[replace(whole, beside=True)] * beside):
                    choices.setdefault(table.digest, replace(item, table=table, chosen=item.whole))
        name = None
        if len(choices) > 1:
            name = remembered([*self.key, *choices], "fastest", str, lambda: self._timed(choices))
        return choices.get(name or "", tunings[0])

    def _timed(self, choices: Mapping[str, Tuning]) -> str | None:
        """Return the choice whose engine is the fastest; None: none of them can be built."""
        engines: dict[str, BuildResult] = {}
        for name, choice in choices.items():
            table = choice.table
            try:
                engines[name] = self.build(self.quantized, table)
            except (BuildFailed, PrecisionLost) as error:
                out = f"{', '.join(table.left_out) or 'nothing'} out of INT8"
                out += ", squeeze-and-excite in it" * bool(table.gates) + ", scales beside the graph" * table.beside
                self.request.reporter.warn(f"the choice with {out} isn't tried, as it can't be built: {error}")
        if len(engines) < 2:
            return next(iter(engines), None)
        if (floating := self.built.get(self.base)) is not None:
            engines[self.base] = floating
        candidates = self.measured(engines).candidates
        others = [item for item in candidates if item.precision == self.base]
        tried = [item for item in candidates if item.precision in choices]
        best, *rest = [item for item in tried if not any(map(item.slower_than, others))] or tried
        for other in rest:  # of equals the first: as the costs say, or as more samples judged
            if other.relative_time(best) < 1 / (1 + EQUAL):
                best = other
        return best.precision

    def measured(
        self,
        results: Mapping[str, BuildResult],
        failures: Mapping[str, str] | None = None,
        reference: tuple[Runner | str, str] | None = None,
    ) -> Comparison:
        """Time engines, by precision or another name, and judge them on the samples where there is a reference.

        Args:
            failures: why there are no others.
            reference: one of the names, or what gives the results to go by; and what it is in words.
        """
        reporter, accuracy, described = self.request.reporter, dict[str, Any](), None
        with contextlib.ExitStack() as stack:
            sessions = {name: stack.enter_context(self._session(result)) for name, result in results.items()}
            with reporter.phase(f"timing {', '.join(sessions).upper()} in turns"):
                times, inputs = time_in_turns(sessions, self.samples or ())
            if reference is not None and self.samples is not None:
                given, described = reference
                runners = {name: session_runner(session) for name, session in sessions.items()}
                run = runners.pop(given) if isinstance(given, str) else given
                against = given.upper() if isinstance(given, str) else "FP32"
                with reporter.phase(f"comparing {', '.join(runners).upper()} with {against}"):
                    agreements = verify_all(run, runners, self.samples, kinds=self.kinds)
                accuracy = {name: agreement.figures() for name, agreement in agreements.items()}
        candidates = []
        for name, result in results.items():
            figures = (round(result.seconds, 3), times[name], accuracy.get(name))
            candidates.append(Candidate(str(name), result.precision_summary, *figures))
        candidates += [Candidate(str(name), failed=why) for name, why in (failures or {}).items()]
        return Comparison(str(self.gpu), inputs, described, tuple(candidates))

    def _session(self, result: BuildResult) -> Session:
        return Session(result.engine, device=self.gpu.ordinal, contexts=1, trust_host_code=True)  # built just now


class Prefixed(Reporter):
    """Another candidate's phases and warnings, under its name; its notes were said for the first one."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter, self._name = reporter, name.upper()

    def warn(self, text: str) -> None:
        self._reporter.warn(f"{self._name}: {text}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        with self._reporter.phase(f"{self._name}: {name}", total) as phase:
            yield phase
