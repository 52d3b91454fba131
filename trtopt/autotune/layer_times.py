"""The times of a model's layers in INT8 and in floating point, by engines that are built and profiled on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtopt.autotune.candidates import build_candidate, floating
from trtopt.autotune.costs import Measured
from trtopt.autotune.selection import EQUAL, measured
from trtopt.autotune.tuning import Tuning, Work, remembered
from trtopt.builder.asked import spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples
from trtopt.calibration.table import Table
from trtopt.core.errors import BuildCancelled, BuildFailed, PrecisionLost, TrtoptError
from trtopt.core.values import Precision
from trtopt.core.version import __version__
from trtopt.cuda.device import DeviceInfo
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.timing import layer_shares
from trtopt.graph.io import load_model
from trtopt.runtime.session import Session
from trtopt.trt import select


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
        return remembered([*self.key, table.digest], "times", Measured, lambda: self._times_now(table, work))

    def _times_now(self, table: Table, work: Work) -> Measured | None:
        reporter = self.request.reporter
        reporter.note(f"building in {self.quantized.upper()} and {self.base.upper()}, to time the layers of each")
        try:
            ours = self._quantized(table)
            other = self._floating(ours)
            with reporter.phase("timing the layers"), contextlib.ExitStack() as stack:
                sessions = [
                    stack.enter_context(
                        Session(
                            item.engine, device=self.gpu.ordinal, contexts=1, trust_host_code=True
                        )  # built just now
                    )
                    for item in (other, ours)
                ]
                floating, quantized = layer_shares(sessions, self.samples, work)
        except BuildCancelled:
            raise
        except TrtoptError as error:
            reporter.warn(f"the layers' times aren't known, so the share of the arithmetic counts instead: {error}")
            return None
        return Measured(quantized, floating, f"the time of its layers on {self.gpu}, of FP16's")

    def fastest(self, tuning: Tuning) -> Tuning:
        """Return the choice, or a faster one within the limits: with squeeze-and-excite in INT8, or all layers."""
        choices: dict[str, Tuning] = {}
        for item in filter(None, (tuning, tuning.with_gates)):
            choices.setdefault(item.table.digest, item)
            if item.left_out and not item.whole.missed:
                table = replace(item.table, left_out={})
                choices.setdefault(table.digest, replace(item, table=table, chosen=item.whole))
        first, name = next(iter(choices)), None
        if len(choices) > 1:
            name = remembered([*self.key, *choices], "fastest", str, lambda: self._timed(choices))
        best = choices.get(name or first, choices[first])
        if (result := self._built.get(best.table.digest)) is not None:
            self.results[self.quantized] = result
        return replace(best, with_gates=None)

    def _timed(self, choices: Mapping[str, Tuning]) -> str | None:
        """Return the choice whose engine is the fastest; None: none of them can be built."""
        engines: dict[str, BuildResult] = {}
        for name, choice in choices.items():
            table = choice.table
            try:
                engines[name] = self._quantized(table)
            except (BuildFailed, PrecisionLost) as error:
                out = f"{', '.join(table.left_out) or 'nothing'} out of INT8"
                out += ", squeeze-and-excite in it" * bool(table.gates)
                self.request.reporter.warn(f"the choice with {out} isn't tried, as it can't be built: {error}")
        if len(engines) < 2:
            return next(iter(engines), None)
        if self.base in self.results:
            engines[self.base] = self.results[self.base]
        candidates = measured(self.gpu, engines, {}, self.samples, self.request.reporter).candidates
        floating = [item for item in candidates if item.precision == self.base]
        tried = [item for item in candidates if item.precision in choices]
        steady = [item for item in tried if not any(map(item.slower_than, floating))]
        best, *others = steady or tried
        for other in others:  # of equals the first: as the costs say, or as more samples judged
            if other.relative_time(best) < 1 / (1 + EQUAL):
                best = other
        return best.precision

    def _quantized(self, table: Table) -> BuildResult:
        if table.digest not in self._built:
            request = replace(self.request, calib=table, images=None, data=None)
            folder = self.folder / f"engine-{len(self._built)}"
            self._built[table.digest] = build_candidate(request, self.quantized, folder)
        return self._built[table.digest]

    def _floating(self, quantized: BuildResult) -> BuildResult:
        if self.base not in self.results:
            manifest = load_manifest(quantized.engine)
            preprocess = manifest.model_preprocess if manifest else self.request.preprocess
            request = floating(self.request, self.base, preprocess, within=True)
            self.results[self.base] = build_candidate(request, self.base, self.folder)
        return self.results[self.base]
