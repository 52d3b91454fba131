"""The times of a model's layers in INT8 and in floating point, by engines that are built and profiled on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from trtopt.autotune.candidates import build_candidate, floating_within
from trtopt.autotune.costs import Measured
from trtopt.autotune.selection import EQUAL, measured
from trtopt.autotune.tuning import Tuning, Work, kept_file
from trtopt.builder.asked import spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples
from trtopt.calibration.table import Table
from trtopt.core.documents import Damaged, converted, plain, read_json
from trtopt.core.errors import BuildCancelled, BuildFailed, PrecisionLost, TrtoptError
from trtopt.core.files import write_json
from trtopt.core.progress import SILENT
from trtopt.core.values import Precision
from trtopt.core.version import __version__
from trtopt.cuda.device import DeviceInfo
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.timing import layer_shares
from trtopt.graph.io import load_model
from trtopt.runtime.session import Session
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
        """Time the layers in an engine with this table and in a floating one, unless an earlier call did."""
        file, reporter = kept_file([*self.key, table.digest], "times", SILENT), self.request.reporter
        if file is not None and (earlier := _stored(file, Measured)) is not None:
            return earlier
        reporter.note(f"building in {self.quantized.upper()} and {self.base.upper()}, to time the layers of each")
        try:
            ours, other = self.both(table)
            with reporter.phase("timing the layers"):
                times = self._profiled(other.engine, ours.engine, work)
        except BuildCancelled:
            raise
        except TrtoptError as error:
            reporter.warn(f"the layers' times aren't known, so the share of the arithmetic counts instead: {error}")
            return None
        if file is not None:
            write_json(file, plain(times))
        return times

    def _profiled(self, floating: Path, quantized: Path, work: Work) -> Measured:
        with contextlib.ExitStack() as stack:
            sessions = [
                stack.enter_context(
                    Session(path, device=self.gpu.ordinal, contexts=1, trust_host_code=True)
                )  # built just now
                for path in (floating, quantized)
            ]
            shares = layer_shares(sessions, self.samples, work)
        return Measured(shares[1], shares[0], f"the time of its layers on {self.gpu}, of FP16's")

    def fastest(self, tuning: Tuning) -> Tuning:
        """Return the choice, or a faster one within the limits: with squeeze-and-excite in INT8, or all layers."""
        choices: dict[str, Tuning] = {}
        for item in filter(None, (tuning, tuning.with_gates)):
            choices.setdefault(item.table.digest, item)
            if item.left_out and not item.whole.missed:
                table = replace(item.table, left_out={})
                choices.setdefault(table.digest, replace(item, table=table, chosen=item.whole))
        best = choices[self._name_of_fastest(choices)]
        if (result := self._built.get(best.table.digest)) is not None:
            self.results[self.quantized] = result
        return replace(best, with_gates=None)

    def _name_of_fastest(self, choices: Mapping[str, Tuning]) -> str:
        """Measure it, unless an earlier call did; the first where there is no other, or none that can be built."""
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

    def _floating(self, quantized: BuildResult) -> BuildResult:
        if self.base not in self.results:
            manifest = load_manifest(quantized.engine)
            request = floating_within(
                self.request, self.base, manifest.model_preprocess if manifest else self.request.preprocess
            )
            self.results[self.base] = build_candidate(request, self.base, self.folder)
        return self.results[self.base]


def _stored(path: Path, kind: type[Content]) -> Content | None:
    """Read what an earlier call measured."""
    try:
        return converted(read_json(path), kind) if path.is_file() else None
    except (Damaged, OSError):
        return None
