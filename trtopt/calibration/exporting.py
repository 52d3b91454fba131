"""A table written as a calibration cache for TensorRT 8.6 and 10, whose own calibrator then reads no data.

TensorRT looks scales up by tensor name, for every floating tensor of the network that it is given, not only for those that a
Q/DQ placement needs: layers beside a tensor without one fall back to floating point. So what the table doesn't hold is
carried over where that is exact (see `propagation`) and else measured in a second pass. Names are those of the folded graph,
which `build --calibrator native` gives TensorRT, and those of the original that hold the same values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from trtopt.calibration.observe import observe
from trtopt.calibration.propagation import propagate
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import write_cache
from trtopt.calibration.thresholds import choose
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.words import first_of
from trtopt.data import Batches
from trtopt.graph.view import is_constant, is_float, to_ir


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


def floating(proto: ModelProto) -> tuple[str, ...]:
    """Every floating tensor that isn't constant, in graph order."""
    graph = to_ir(proto).graph
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    return tuple(str(value.name) for value in values if is_float(value) and not is_constant(value) and value.name)


def export(
    path: str | os.PathLike[str],
    original: ModelProto,
    folded: ModelProto,
    table: Table,
    *,
    batches: Batches | None = None,
    amax: Mapping[str, float] | None = None,
    threads: int | None = None,
    reporter: Reporter = SILENT,
) -> ExportedCache:
    """Write `path`.

    Args:
        table: for `folded`; its scales are written as they are.
        batches: the samples that it was measured on, for the tensors that it lacks.
        amax: further scales that are known, such as an imported cache's.

    Raises:
        CalibrationError: a tensor isn't finite on these samples.
        OutputError: the file can't be written.
    """
    names = floating(folded)
    scales = {**(amax or {}), **table.amax}
    propagated = propagate(to_ir(folded), scales, table.groups)
    rest = [name for name in names if name not in propagated]
    if batches is not None and rest:
        observation = observe(
            folded, rest, batches, total=batches.samples, threads=threads, shard=True, reporter=reporter
        )
        propagated |= {
            name: choose(histogram, table.method).amax
            for name, histogram in observation.histograms.items()
            if histogram.absmax > 0  # nothing but zeros fits every scale, and gives none
        }
    entries = {name: propagated[name] for name in names if name in propagated}
    propagated = propagate(to_ir(original), propagated)
    others = {name: propagated[name] for name in floating(original) if name in propagated and name not in entries}
    write_cache(entries | others, path)
    lacking = tuple(name for name in names if name not in entries)
    if lacking:
        reporter.warn(
            f"the exported cache has no scale for {len(lacking)} of the {len(names)} floating tensors ({first_of(lacking)}): "
            "TensorRT will run layers beside them in floating point; calibrate on data to have them all"
        )
    return ExportedCache(Path(path), len(entries), len(others), lacking)
