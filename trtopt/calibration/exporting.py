"""A table written as a calibration cache for TensorRT 8.6 and 10, whose own calibrator then reads no data.

TensorRT looks scales up by tensor name, for every floating tensor of the network that it is given, not only for those that a
Q/DQ placement needs: layers beside a tensor without one fall back to floating point. So what the table doesn't hold is
carried over where that is exact (see `propagation`) and else measured in a second pass. Names are those of the folded graph,
which `build --calibrator native` gives TensorRT, and those of the original that hold the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from trtopt.calibration.observe import observe
from trtopt.calibration.prepared import floating
from trtopt.calibration.propagation import propagate
from trtopt.calibration.request import CalibrateRequest
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import write_cache
from trtopt.calibration.thresholds import choose
from trtopt.core.words import first_of
from trtopt.data import Batches
from trtopt.graph.view import to_ir


@dataclass(frozen=True)
class ExportedCache:
    """A cache that was written.

    Attributes:
        tensors: entries for the folded graph; others: further names of the original model.
        lacking: floating tensors of the folded graph without an entry.
    """

    path: Path
    tensors: int
    others: int
    lacking: tuple[str, ...]


def export(
    request: CalibrateRequest, original: ModelProto, folded: ModelProto, table: Table, batches: Batches | None
) -> ExportedCache:
    """Write `request.export_cache`.

    Args:
        table: for `folded`; its scales are written as they are.
        batches: the samples that it was measured on, for the tensors that it lacks; None: these have no scale.
    """
    assert request.export_cache is not None
    graph, reporter = to_ir(folded), request.reporter
    names, scales = floating(graph), propagate(graph, table.amax, table.groups)
    rest = [name for name in names if name not in scales]
    if batches is not None and rest:
        seen = observe(
            folded, rest, batches, total=batches.samples, threads=request.threads, shard=True, reporter=reporter
        )
        counted = {name: item for name, item in seen.histograms.items() if item.absmax > 0}  # zeros give no scale
        scales |= {name: choose(item, table.method).amax for name, item in counted.items()}
    entries = {name: scales[name] for name in names if name in scales}
    scales = propagate(to_ir(original), scales)
    others = {name: scales[name] for name in floating(to_ir(original)) if name in scales and name not in entries}
    path = write_cache(entries | others, request.export_cache)
    if lacking := tuple(name for name in names if name not in entries):
        reporter.warn(
            f"the exported cache has no scale for {len(lacking)} of the {len(names)} floating tensors ({first_of(lacking)}): "
            "TensorRT will run layers beside them in floating point; calibrate on data to have them all"
        )
    return ExportedCache(path, len(entries), len(others), lacking)
