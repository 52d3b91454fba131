"""The scales of a quantized build, from a table, data to calibrate on, the model, or TensorRT's calibrator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtopt.calibration.calibrator import calibrated_for
from trtopt.calibration.prepared import floating
from trtopt.calibration.propagation import propagate
from trtopt.calibration.quality import check_samples
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import cache_of, is_cache, read_cache
from trtopt.core.errors import UnsupportedRequest, UsageError
from trtopt.core.files import whole
from trtopt.core.options import named
from trtopt.core.values import BuildSpec, Precision
from trtopt.core.words import first_of
from trtopt.data import Batches, open_data, samples_of
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import alone
from trtopt.graph.half import has_half
from trtopt.graph.io import Model
from trtopt.graph.passes.placement import gates_of
from trtopt.graph.prepare import prepare
from trtopt.graph.view import to_ir
from trtopt.trt.capabilities import Capabilities


def may_stand_beside(spec: BuildSpec, can: Capabilities) -> bool:
    """Return whether this build can have its scales beside the graph, where TensorRT's own calibrator reads them."""
    asked = spec.precision is Precision.INT8 and spec.base is Precision.FP16 and spec.calibrator == "trtopt"
    other = spec.refit or spec.strip or spec.embed_preprocess or can.gates_in_int8
    return asked and not other and can.native_calibrator


@dataclass(frozen=True)
class Scales:
    """The calibration of one build: its request, and the preprocessing, which a plan may have sized."""

    request: Any
    preprocess: Any

    def check(self, spec: BuildSpec, model_quantized: bool) -> None:
        """Refuse sources that don't go together, before any work.

        Raises:
            UsageError: none or several are given, or the build needs none.
        """
        sources = [name for name in ("images", "data", "calib") if getattr(self.request, name) is not None]
        native, problem = spec.calibrator == "native", ""
        unread = "the model already holds Q/DQ, whose scales are used as they are: drop {}"
        if not spec.precision.quantized:
            measures = spec.base is not Precision.FP32 and not model_quantized and "calib" not in sources
            if len(sources) > 1:
                problem = f"{named(sources[0])} and {named(sources[1])} are both given: give one of them"
            elif sources and model_quantized and "calib" not in sources:
                problem = unread.format(named(sources[0]))
            elif sources and not measures:
                problem = (
                    f"{named(sources[0])} calibrates, but the build is {spec.precision}: add `int8=True`, or drop it"
                )
        elif model_quantized:
            if extra := [*sources, *["method"] * (self.request.method != "auto"), *["calibrator"] * native]:
                problem = unread.format(named(extra[0]))
        elif len(sources) != 1:
            situation = f"{' and '.join(map(named, sources))} are given" if sources else "no data was given"
            problem = (
                f"`{spec.precision}=True` needs scales measured on real inputs, and {situation}: give one of `images=DIR`, "
                "`data='F.npz'` or `calib='T.calib.json'` (random data is never used)"
            )
        elif native and self.request.method != "auto":
            problem = "`calibrator='native'` chooses scales by TensorRT's own method: drop it, or `method=`"
        elif native and self.request.calib is not None and not is_cache(self.request.calib):
            problem = (
                "`calibrator='native'` measures its own scales: give `images=` or `data=`, or as `calib=` a TensorRT cache "
                "such as trtopt calibrate --export-cache writes"
            )
        if problem:
            raise UsageError(problem)

    def table(self, model: Model, spec: BuildSpec, model_quantized: bool) -> Table | None:
        """The table to quantize with; None where the build needs none."""
        if not spec.precision.quantized or model_quantized or spec.calibrator == "native":
            return None
        request = self.request
        if request.calib is None or is_cache(request.calib):
            limit = request.limit if request.calib is None else None
            changes = {"preprocess": self.preprocess, "import_cache": request.calib, "limit": limit}
            table = calibrated_for(request, model, **changes).table
        else:
            table = Table.load(request.calib)
            check_preparation(self.preprocess, table)
            if request.method not in ("auto", table.method):
                table = table.with_method(request.method)
        # FP8 keeps its three mantissa bits at every magnitude: clipping outliers costs accuracy there and gains none.
        if spec.precision is not Precision.FP8 or request.method != "auto":
            return table
        if any(entry.histogram is not None for entry in table.tensors.values()):
            return table.with_method("minmax")
        request.reporter.warn("the imported thresholds were chosen for INT8: what lies beyond them saturates in FP8")
        return table

    def beside_graph(self, model: Model, spec: BuildSpec, can: Capabilities, table: Table) -> bytes | None:
        """Return the table as a cache for TensorRT's own calibrator, where INT8 needs the scales beside the graph; else None.

        TensorRT 10.6 runs what surrounds squeeze-and-excite in INT8 with such scales alone: with Q/DQ in the graph it is slower
        than FP16, or isn't built (docs/results/tensorrt-10.md); for others `tune` measures it. A table that says more than
        scales goes into the graph.
        """
        if not may_stand_beside(spec, can) or table.left_out or table.repairs or table.smoothed:
            return None
        folded = prepare(model).proto
        graph = to_ir(folded)
        if has_half(folded) or not (table.beside or gates_of(graph)):
            return None
        known, names = propagate(graph, table.amax, table.groups), floating(graph)
        if lacking := [name for name in names if name not in known]:
            self.request.reporter.warn(
                f"the table lacks {len(lacking)} tensors ({first_of(lacking)}), so that its scales can't stand beside the "
                "graph: calibrate the model again with `all_tensors=True` for an INT8 engine that may be faster"
            )
            return None
        return cache_of({name: known[name] for name in names})

    def native(self, model: Model, spec: BuildSpec) -> tuple[Batches | None, bytes | None]:
        """The batches for TensorRT's own calibrator, where it is asked for; or the cache that it is given instead."""
        if spec.calibrator != "native":
            return None, None
        if self.request.calib is not None:
            read_cache(self.request.calib)  # TensorRT says little about a cache that it can't read
            return None, whole(self.request.calib)
        if alone(model.inputs):
            raise UnsupportedRequest(
                "`calibrator='native'` puts samples together on the first axis of each input, where this model's aren't: leave "
                "it out, so that trtopt calibrates"
            )
        source = {**samples_of(self.request), "preprocess": self.preprocess}
        batches = open_data(model.inputs, **source, batch=self.native_batch(model, spec))
        check_samples(batches, insist=None)
        return batches, None

    def native_batch(self, model: Model, spec: BuildSpec) -> int:
        """Samples that TensorRT's calibrator takes at a time: the model's own batch where it is fixed, else one in the profile.

        Of a profile of one size TensorRT 10.6 reads that many samples, whatever the calibration profile says.
        """
        first = next(iter(model.inputs), None)
        size = first.shape[0] if first is not None and first.shape else None
        if isinstance(size, int) and size > 0:
            return size
        sizes = spec.profiles[0].get(first.name) if first is not None and spec.profiles else None
        batch: int = self.request.batch
        return min(max(batch, sizes.min[0]), sizes.max[0]) if sizes is not None and sizes.min else batch

    def preprocessing(self, table: Table | None, native: Batches | None) -> Mapping[str, Any] | None:
        """Describe how an image becomes the network's input, for the manifest."""
        if table is not None and table.preprocess is not None:
            return table.preprocess
        if native is not None and native.preprocess is not None:
            return native.preparation
        return None if self.preprocess is None else Preprocess.load(self.preprocess).describe()


def check_preparation(preprocess: Any, table: Table) -> None:
    """Raise UsageError for a preprocessing that the table's samples weren't prepared by; their size may be another."""
    if preprocess is None or table.preprocess is None:
        return
    if other := Preprocess.load(table.preprocess).unlike(Preprocess.load(preprocess)):
        raise UsageError(
            f"`preprocess=` says another {other} than the calibration was made with: drop it, or calibrate again"
        )
