"""How long the layers of a model take in INT8 and in floating point, by engines that are built and profiled on a GPU."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from trtopt.autotune.candidates import build_candidate, floating_within
from trtopt.autotune.costs import Measured
from trtopt.autotune.selection import EQUAL, at_opt, measured
from trtopt.autotune.tuning import Tuning, Work, kept_file
from trtopt.builder.asked import spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.kernels import REGION
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples
from trtopt.calibration.table import Table
from trtopt.core.documents import Damaged, converted, plain, read_json
from trtopt.core.errors import BuildCancelled, BuildFailed, PrecisionLost, TrtoptError, UsageError
from trtopt.core.files import write_json
from trtopt.core.progress import SILENT
from trtopt.core.values import Override, Precision
from trtopt.core.version import __version__
from trtopt.cuda.device import DeviceInfo
from trtopt.data.rebatch import Arrays
from trtopt.diagnosis.results import Profiled
from trtopt.engine.manifest import load_manifest
from trtopt.graph.io import load_model
from trtopt.runtime.profiling import LayerTime, LayerTimes
from trtopt.runtime.session import Session
from trtopt.runtime.timing import Spread
from trtopt.trt import select

Content = TypeVar("Content")


@dataclass(frozen=True)
class _Fastest:
    """Which choice's engine was the fastest."""

    name: str


class Engines:
    """The engines of a search on a GPU: INT8 everywhere, floating point, and what was chosen.

    Attributes:
        results: those of them that `_Best` needs.
    """

    def __init__(self, request: BuildRequest, gpu: DeviceInfo, folder: Path) -> None:
        self.request, self.gpu, self.folder = request, gpu, folder
        spec = spec_of(request)
        self.quantized, self.base = spec.precision, spec.base
        generation = select(request.backend)
        self.key = [__version__, spec.describe(), generation.family, generation.version, str(gpu)]
        self.results: dict[Precision, BuildResult] = {}
        self._built: dict[str, BuildResult] = {}  # by the table's digest
        self.samples = real_samples(load_model(request.model), request)

    def times(self, table: Table, work: Work) -> Measured | None:
        """Of the layers, in an engine with this table and in a floating one; as an earlier call measured them."""
        file, reporter = kept_file([*self.key, table.digest], "times", SILENT), self.request.reporter
        if file is not None and (earlier := _stored(file, Measured)) is not None:
            return earlier
        others = " and FP8" if self.request.fp8 else ""
        reporter.note(
            f"building in {self.quantized.upper()} and {self.base.upper()}{others}, to time the layers of each"
        )
        try:
            ours, other = self.both(table)
            eighth = self._eighth(table)
            with reporter.phase("timing the layers"):
                times = layer_times(self.gpu, ours.engine, other.engine, self.samples, work, eighth)
        except BuildCancelled:
            raise
        except TrtoptError as error:
            reporter.warn(f"the layers' times aren't known, so costs are estimated: {error}")
            return None
        if file is not None:
            write_json(file, plain(times))
        return times

    def fastest(self, tuning: Tuning) -> Tuning:
        """The choice, or another within the limits where that is faster: a rival, or one with all layers in INT8."""
        choices: dict[str, Tuning] = {}
        for item in (tuning, *tuning.rivals):
            choices.setdefault(item.table.digest, item)
            if item.left_out and not item.whole.missed:
                table = replace(item.table, left_out={})
                choices.setdefault(table.digest, replace(item, table=table, chosen=item.whole))
        best = choices[self._name_of_fastest(choices)]
        if (result := self._built.get(best.table.digest)) is not None:
            self.results[self.quantized] = result
        return replace(best, rivals=())

    def _name_of_fastest(self, choices: Mapping[str, Tuning]) -> str:
        """As an earlier call measured it, or measured now; the first where there is no other, or none that can be built."""
        first = next(iter(choices))
        if len(choices) == 1:
            return first
        what = "traded" if self.request.trade_profiles else "fastest"
        file = kept_file([*self.key, *choices], what, SILENT)
        fastest = None if file is None else _stored(file, _Fastest)
        if fastest is None and (fastest := self._timed(choices)) is not None and file is not None:
            write_json(file, plain(fastest))
        return first if fastest is None or fastest.name not in choices else fastest.name

    def _timed(self, choices: Mapping[str, Tuning]) -> _Fastest | None:
        """None: none of them can be built."""
        results = {name: self._tried(choice.table) for name, choice in choices.items()}
        engines = {name: result for name, result in results.items() if result is not None}
        if len(engines) < 2:
            return next(map(_Fastest, engines), None)
        if self.base in self.results:
            engines[self.base] = self.results[self.base]
        candidates = measured(self.gpu, engines, {}, self.samples, self.request.reporter).candidates
        floating = [item for item in candidates if item.precision == self.base and not self.request.trade_profiles]
        tried = [item for item in candidates if item.precision in choices]
        steady = [item for item in tried if not any(map(item.slower_than, floating))]
        best, *others = steady or tried
        for other in others:  # of equals the first: as the costs say, or as more samples judged
            if other.relative_time(best) < 1 / (1 + EQUAL):
                best = other
        return _Fastest(best.precision)

    def _tried(self, table: Table) -> BuildResult | None:
        try:
            return self._quantized(table)
        except (BuildFailed, PrecisionLost) as error:
            out = f"{', '.join(table.left_out) or 'nothing'} out of INT8{', squeeze-and-excite in it' * bool(table.gates)}"
            self.request.reporter.warn(f"the choice with {out} isn't tried, as it can't be built: {error}")
            return None

    def both(self, table: Table) -> tuple[BuildResult, BuildResult]:
        """The engine with this table, and the floating one; neither is built twice."""
        quantized = self._quantized(table)
        return quantized, self._floating(quantized)

    def _quantized(self, table: Table) -> BuildResult:
        if table.digest not in self._built:
            request = replace(self.request, calib=table, images=None, data=None)
            folder = self.folder / f"engine-{len(self._built)}"
            self._built[table.digest] = build_candidate(request, self.quantized, folder)
        return self._built[table.digest]

    def _eighth(self, table: Table) -> Path | None:
        """An engine in FP8, where that is a choice and can be built."""
        if not self.request.fp8:
            return None
        bare_table = replace(table, repairs={}, smoothed={}, left_out={}, in_fp8=())
        overrides = [text for text in self.request.precision_override if not Override.parse(text).precision.quantized]
        request = replace(
            self.request, int8=False, calib=bare_table, images=None, data=None, precision_override=overrides
        )
        try:
            return build_candidate(request, Precision.FP8, self.folder).engine
        except (BuildFailed, PrecisionLost) as error:
            self.request.reporter.warn(f"no layer is tried in FP8, as it can't be built in that: {error}")
            return None

    def _floating(self, quantized: BuildResult) -> BuildResult:
        if self.base not in self.results:
            manifest = load_manifest(quantized.engine)
            request = floating_within(
                self.request, self.base, manifest.model_preprocess if manifest else self.request.preprocess
            )
            self.results[self.base] = build_candidate(request, self.base, self.folder)
        return self.results[self.base]


def _stored(path: Path, kind: type[Content]) -> Content | None:
    """What an earlier call measured."""
    try:
        return converted(read_json(path), kind) if path.is_file() else None
    except (Damaged, OSError):
        return None


def layer_times(
    gpu: DeviceInfo,
    quantized: Path,
    floating: Path,
    samples: Iterable[Arrays],
    work: Mapping[str, int],
    fp8: Path | None = None,
) -> Measured:
    """Profile engines of one model, with the same profiles, at the opt shapes of each.

    Args:
        work: node → multiply-accumulates, by which the nodes of a fused layer share its time.
        fp8: an engine in FP8, where that is to be known, too.
    """
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(Session(engine, device=gpu.ordinal, contexts=1, trust_host_code=True))  # built just now
            for engine in (floating, quantized, fp8)
            if engine is not None
        ]
        runs = []
        for profile in sessions[0].profiles or ({},):
            inputs, _ = at_opt(sessions[0].inputs, profile, map(sessions[0].taken, samples))
            runs.append([session.profile(session.taken(inputs)) for session in sessions])
    totals = [run[0].total_ms for run in runs]
    shares = []
    for times in zip(*runs):
        each = [{node: ms / total for node, ms in by_node(item, work).items()} for item, total in zip(times, totals)]
        shares.append({node: statistics.fmean(item[node] for item in each) for node in each[0]})
    return Measured(
        quantized=shares[1],
        floating=shares[0],
        shortest=[_shortest(run[0]) / total for run, total in zip(runs, totals)],
        described=f"the time of its layers on {gpu}, of FP16's",
        fp8=shares[2] if fp8 is not None else {},
    )


def by_node(times: LayerTimes, work: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of each node with products. The nodes of a layer share its time by their work, and those that no layer
    names share that of the layers with products, or whole regions, that name none."""
    milliseconds = dict.fromkeys(work, 0.0)
    hidden_ms = 0.0
    named_nodes: set[str] = set()
    for layer in times.layers:
        nodes = [node for node in layer.nodes if work.get(node)]
        named_nodes |= set(nodes)
        if nodes:
            total = sum(work[node] for node in nodes)
            for node in nodes:
                milliseconds[node] += layer.ms * work[node] / total
        elif layer.kind != "other" or REGION in layer.name:
            hidden_ms += layer.ms
    unnamed_nodes = {node: work[node] for node in work if node not in named_nodes}
    for node, count in unnamed_nodes.items():
        milliseconds[node] += hidden_ms * count / sum(unnamed_nodes.values())
    return milliseconds


def profiled_by_node(profile: Profiled, work: Mapping[str, int]) -> tuple[dict[str, float], str]:
    """`by_node` of the largest batch that `profile` timed, and in words what was timed.

    Raises:
        UsageError: none of its layers has one of these nodes.
    """
    largest = max(profile["batches"], key=lambda item: item["batch"], default=None)
    layers = [] if largest is None else largest["layers"]
    if largest is None or not any(node in work for layer in layers for node in layer["nodes"]):
        raise UsageError(
            f"the profile of {profile['engine']} names none of the model's layers: it is of another model, or of an engine "
            "whose manifest was lost, so that the nodes of its layers aren't known"
        )
    times = tuple(
        LayerTime(layer["name"], layer["ms"], layer["ms"], layer["ms"], layer["kind"], None, tuple(layer["nodes"]))
        for layer in layers
    )
    description = f"{Path(profile['engine']).name} at batch {largest['batch']} on {profile['gpu']}"
    return by_node(LayerTimes({}, times, Spread(**largest["gpu"]), 1), work), description


def _shortest(times: LayerTimes) -> float:
    """Milliseconds of the shortest layer with products: of the others some launch nothing."""
    return min((layer.ms for layer in times.layers if layer.kind != "other"), default=0.0)
