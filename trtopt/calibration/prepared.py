"""A model made ready to be calibrated: the graph that runs, the tensors observed in it, and the table that comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from trtopt.calibration.histogram import BINS
from trtopt.calibration.observe import Observation
from trtopt.calibration.propagation import propagate
from trtopt.calibration.quality import check_preprocessing, half_ranges
from trtopt.calibration.table import Table, choose_all
from trtopt.core.errors import CalibrationError
from trtopt.core.files import sha256_json
from trtopt.core.operators import digest, known
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Override, check_overrides
from trtopt.core.version import __version__
from trtopt.core.words import first_of
from trtopt.data import Batches
from trtopt.data.rebatch import Arrays
from trtopt.graph.fixed_inputs import how_to_decide
from trtopt.graph.half import fp32_typed
from trtopt.graph.io import Model
from trtopt.graph.op_types import CONTROL_FLOW
from trtopt.graph.passes.placement import Points, find_points, gates_of
from trtopt.graph.passes.smooth import smoothed_name
from trtopt.graph.prepare import taken, without_scales
from trtopt.graph.proto import custom_nodes, fingerprint, operators_in
from trtopt.graph.view import is_constant, is_float, to_ir
from trtopt.linting.rules import refuse_damaged
from trtopt.ort.folding import proven
from trtopt.ort.sessions import version as ort_version


@dataclass(frozen=True)
class Prepared:
    """A folded model and the tensors that one pass observes in it.

    Attributes:
        proto: the folded graph, in FP32 types.
        tensors: observed, in graph order.
        groups: of them, those that get one threshold together.
        beside: observed, too, where it can be: the other floating tensors, for builds that give TensorRT scales beside the
            graph (`Scales.beside_graph`).
        name: the model's, for people.
        fingerprint: of the folded graph.
    """

    proto: ModelProto = field(repr=False)
    tensors: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    name: str
    fingerprint: str
    beside: tuple[str, ...] = ()

    @property
    def identity(self) -> dict[str, str]:
        return {"name": self.name, "fingerprint": self.fingerprint}

    def of(self, proto: ModelProto, points: Points) -> Prepared:
        """Return this with another graph, and what is observed in that."""
        return Prepared(proto, points.activations, points.groups, self.name, fingerprint(proto))

    def pass_key(self, batches: Batches, engine: Mapping[str, str] | None = None) -> str:
        """SHA-256 of all that a pass's histograms depend on, so not of the method; `engine`: what else than ONNX Runtime on the
        CPU runs the model."""
        runs = {"onnxruntime": ort_version("calibration")} if engine is None else {"engine": dict(engine)}
        graph = {"model": self.fingerprint, "tensors": [*self.tensors, *self.beside], "groups": self.groups}
        data = {"data": batches.describe(), "preprocess": batches.preparation}
        operators = digest(operators_in(self.proto))
        return sha256_json({"trtopt": __version__, **runs, "bins": BINS, **graph, **data, "operators": operators})

    def table(
        self,
        seen: Observation,
        batches: Batches,
        method: str,
        *,
        examined: bool = True,
        threads: int | None = None,
        reporter: Reporter = SILENT,
    ) -> Table:
        """Return the table of what a pass over `batches` saw, thresholds chosen by `method`; and where the model is `examined`
        what some samples show of it: unusual pixels, and what comes near FP16's largest number."""
        quality: dict[str, Any] = {"samples": batches.samples, "different": len({*batches.digests})}
        ranges = dict[str, float]()
        if examined:
            quality["preprocessing"] = check_preprocessing(self.proto, seen.probes)
            ranges = half_ranges(self.proto, seen.probes, seen.histograms, threads, reporter)
        with reporter.phase("choosing thresholds"):
            entries = choose_all(seen.histograms, self.groups, method)
        about = self.groups, self.identity, batches.describe(), method, seen.samples
        skipped = tuple(map(asdict, batches.skipped))
        return Table(entries, *about, preprocess=batches.preparation, skipped=skipped, quality=quality, ranges=ranges)

    def chosen_again(self, table: Table, method: str | None) -> Table:
        """Return the part of an earlier table of this model that is needed now, thresholds by another method.

        Args:
            method: None keeps the thresholds, and so does "auto" of a table that holds no histograms.
        """
        lacking = [name for name in self.tensors if name not in table.tensors]
        why = ""
        if table.model["fingerprint"] != self.fingerprint:
            why = f"is of {table.model.get('name', 'another model')}, not of this one, or not of these weights"
        elif lacking:
            why = f"has nothing of {first_of(lacking)}: it was made with other `precision_override=` or `all_tensors=`"
        if why:
            raise CalibrationError(
                f"the calibration table {why}; calibrate on real inputs: `images=DIR`, or `data='F.npz'`"
            )
        smoothed = [name for name in map(smoothed_name, table.smoothed) if name in table.tensors]
        beside = [name for name in self.beside if name in table.tensors]
        names = table.tensors if table.gates else (*self.tensors, *smoothed, *beside)
        kept = {name: table.tensors[name] for name in names}
        needed = replace(table, tensors=kept, groups=self.groups, model=self.identity)
        imported = all(item.histogram is None for item in kept.values())
        return needed if method is None or (imported and method == "auto") else needed.with_method(method)


def refuse_quantized(model: Model) -> None:
    """Raise CalibrationError for a model that holds scales already."""
    if why := taken(model).refused:
        raise CalibrationError(f"the model can't be calibrated: {why}")
    if without_scales(model):
        raise CalibrationError(
            "the model already holds Q/DQ nodes with scales of their own: build it as it is, if TensorRT takes them (trtopt "
            "check says so), or give the FP32 model"
        )


def prepare(
    model: Model,
    overrides: Sequence[Override] = (),
    *,
    all_tensors: bool = False,
    samples: Iterable[Arrays] = (),
    reporter: Reporter = SILENT,
) -> Prepared:
    """Fold the model and find what is observed in it.

    Args:
        all_tensors: also in squeeze-and-excite, and all other floating ones; these anyway where there is any of it.
        samples: real ones, which the folded graph is held against the model on.
    """
    refuse_quantized(model)
    folded = proven(model, samples=samples, reporter=reporter)
    proto, _ = fp32_typed(folded.proto)
    refuse_damaged(folded.proto, str(model.path or "the model"))
    check_overrides(overrides, proto.graph.node)
    graph = to_ir(proto)
    found = gates_of(graph)
    points = find_points(graph, overrides=overrides, gates=found if all_tensors else ())
    unknown = (node for node in custom_nodes(proto) if known(node.domain, node.op_type) is None)
    foreign = sorted({f"{node.op_type} of {node.domain}" for node in unknown})
    plugin = (
        f"nothing here knows {first_of(foreign)}: name what computes it, `operators=['OPS.py']`, and its plugin for "
        "TensorRT, `plugins=['LIB.so']` (docs/custom-operators.md)"
    )
    if not points.activations:
        reasons = [f"{item.node} ({item.op}): {item.reason}" for item in points.kept[:3]]
        if any(node.op_type in CONTROL_FLOW for node in proto.graph.node):
            advice = how_to_decide(proto)
            reasons.append("what is inside control flow isn't quantized" + f": {advice}" * bool(advice))
        why = "; ".join(reasons) or "it has no Conv, ConvTranspose, Gemm or MatMul"
        instead = f"besides, {plugin}" if foreign else "build it with `fp16=True`"  # without a plugin that refuses, too
        raise CalibrationError(f"there is nothing to quantize in the model: {why}; {instead}")
    if foreign:
        reporter.warn(f"what comes after {first_of(foreign)} may be missing in the table: {plugin}")
    name = model.path.name if model.path else model.proto.graph.name
    others = floating(graph) if found or all_tensors else ()
    scaled = propagate(graph, dict.fromkeys(points.activations, 1.0), points.groups) if others else {}
    beside = tuple(item for item in others if item not in scaled)
    return Prepared(proto, points.activations, points.groups, name, folded.fingerprint, beside)


def floating(model: ir.Model) -> tuple[str, ...]:
    """Return every floating tensor that isn't constant, in graph order."""
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    return tuple(str(value.name) for value in values if is_float(value) and not is_constant(value) and value.name)
