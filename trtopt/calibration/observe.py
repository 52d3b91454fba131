"""One pass of inference in ONNX Runtime that counts the tensors asked for and keeps none of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtopt.calibration.histogram import Histogram
from trtopt.errors import CalibrationError, DataError, ModelError, require
from trtopt.graph.io import save_model
from trtopt.graph.proto import infer_shapes
from trtopt.progress import SILENT, Reporter


def observe(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    batches: Iterable[Mapping[str, NDArray[Any]]],
    *,
    samples: int | None = None,
    threads: int | None = None,
    reporter: Reporter = SILENT,
) -> tuple[dict[str, Histogram], int]:
    """Histograms of the named tensors over all batches, and the number of samples seen.

    Memory holds one batch of the observed tensors, whatever the number of samples.

    Args:
        tensors: names of network inputs or of any node's outputs.
        batches: input name → array, first axis = samples.
        samples: how many to expect, for the progress display.
        threads: for ONNX Runtime; None: one per core.

    Raises:
        CalibrationError: a tensor isn't in the model, holds NaN or infinite values, or never changes.
        DataError: no samples.
    """
    producers = {output: node for node in model.graph.node for output in node.output}
    inputs = {value.name for value in model.graph.input}
    unknown = [name for name in tensors if name not in producers and name not in inputs]
    if unknown:
        raise CalibrationError(f"the model has no tensor {', '.join(unknown[:5])}")
    histograms = {name: Histogram() for name in tensors}
    computed = [name for name in tensors if name in producers]
    seen = 0
    with tempfile.TemporaryDirectory(prefix="trtopt-") as folder:
        session = _Session(model, computed, Path(folder), threads)
        with reporter.phase("calibrate", samples) as phase:
            for batch in batches:
                for feed, real in session.feeds(batch):
                    results = session.run(feed)
                    for name in tensors:
                        values = results.pop(name) if name in results else feed[name]
                        whole = values.ndim > 0 and len(values) == session.fed
                        _count(histograms[name], name, values[:real] if whole else values, producers)
                        del values  # before the next one is computed on
                    seen += real
                    phase.advance(real)
    if not seen:
        raise DataError("there are no samples to calibrate on")
    for name, histogram in histograms.items():
        if histogram.minimum == histogram.maximum:
            raise CalibrationError(
                f"{_where(name, producers)} is {histogram.maximum:g} for every value of all {seen} samples: it has no range "
                "to quantize. Is the data real and the preprocessing the model's own?"
            )
    return histograms, seen


def _count(histogram: Histogram, name: str, values: NDArray[Any], producers: Mapping[str, onnx.NodeProto]) -> None:
    try:
        histogram.add(values)
    except FloatingPointError as error:
        raise CalibrationError(
            f"{_where(name, producers)} isn't finite: {error}. Check the inputs and their preprocessing"
        ) from None


def _where(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    node = producers.get(name)
    return f"the input {name}" if node is None else f"the tensor {name} (output of {node.op_type} {node.name})"


class _Session:
    """ONNX Runtime with the observed tensors as outputs."""

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[str], folder: Path, threads: int | None) -> None:
        ort = require("onnxruntime", "ort", "calibration")
        shown = onnx.ModelProto()
        shown.CopyFrom(model)
        types = {value.name: value for value in infer_shapes(model).graph.value_info}
        types |= {value.name: value for value in model.graph.output}
        del shown.graph.output[:]
        for name in tensors:
            # An output's type is required; its shape isn't, and a symbolic one may be wrong after clean-ups.
            kind = types[name].type.tensor_type.elem_type if name in types else onnx.TensorProto.FLOAT
            shown.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
        if not tensors:  # only inputs are observed: ONNX Runtime still wants an output
            shown.graph.output.extend(model.graph.output)
        path = folder / "observed.onnx"
        save_model(shown, path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or os.cpu_count() or 1
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False  # an arena keeps the largest batch's memory for ever
        options.log_severity_level = 3
        # Extended fusions stay; the blocked layout (ALL) is left out: its last, padded block may round differently.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no exception type of its own that is public
            raise ModelError(f"ONNX Runtime can't load the model for calibration: {str(error)[:500]}") from error
        self._names = list(tensors)
        first = self._session.get_inputs()[0] if self._session.get_inputs() else None
        size = first.shape[0] if first is not None and first.shape else None
        self._static = size if isinstance(size, int) and size > 0 else None
        self.fed = 0

    def feeds(self, batch: Mapping[str, NDArray[Any]]) -> Iterable[tuple[dict[str, NDArray[Any]], int]]:
        """`batch` cut to what the model takes, with the number of real samples in each piece."""
        count = len(next(iter(batch.values())))
        step = self._static or count
        for start in range(0, count, step):
            feed = {name: values[start : start + step] for name, values in batch.items()}
            real = min(step, count - start)
            if real < step:  # a static batch: repeat the last sample, and don't count what it gives
                feed = {
                    name: np.concatenate([values, np.repeat(values[-1:], step - real, 0)])
                    for name, values in feed.items()
                }
            self.fed = step
            yield feed, real

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        try:
            results = self._session.run(self._names or None, dict(feed))
        except Exception as error:
            raise ModelError(f"ONNX Runtime can't run the model on the calibration data: {str(error)[:500]}") from error
        return dict(zip(self._names, results))
