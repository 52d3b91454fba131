"""Questions to the samples: too few, copies, pixels that nobody normalised? `observe` refuses constant and infinite ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.table import Table
from trtopt.core.errors import DataError, ModelError, TrtoptError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import TensorInfo
from trtopt.data import Batches, ImageBatches
from trtopt.data.arrays import where_counted
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays, alone
from trtopt.graph.bounds import bounds
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.typed import near_fp16_end
from trtopt.ort.ranges import beyond_fp16, measure_ranges
from trtopt.ort.sessions import open_session, run_session

LEAST = 2  # samples: a scale from one is that sample's own
FEW = 32  # samples: below, thresholds still move visibly with each one
SMALLEST = 24  # pixels: smaller arrays of three channels may be no image
PROBES = 4  # samples kept for the look into the model, beside the one that goes furthest
RAW = 16.0  # larger magnitudes, none negative: pixels as they are in a file
RAW_SPREAD = 10.0  # after the first convolution of a folded model, where trained networks have some 1
INSIST = "insist with `allow_unusual_data=True`"


def check_samples(batches: Batches, inputs: Sequence[TensorInfo] = (), insist: str | None = INSIST) -> None:
    """Raise DataError where there are too few samples to calibrate on at all, or all are copies of one.

    Args:
        insist: how a user would insist on copies; None: this one does.
    """
    if batches.samples < LEAST:
        shapes = "".join(f"; {info.name} is {'x'.join(map(str, info.shape))}" for info in inputs[:4])
        more = f" ({where_counted(inputs)}{'' if alone(inputs) else shapes})"
        if isinstance(batches, ImageBatches):
            more = "".join(f"; left out: {item.name} {item.reason}" for item in batches.skipped[:3])
        raise DataError(
            f"there is only {batches.samples} sample to calibrate on; at least {LEAST} are needed, and {FEW} to some hundred "
            f"that look like what the network will see give good scales{more}"
        )
    if insist is not None and len({*batches.digests}) == 1:
        raise DataError(
            f"all {batches.samples} samples are the same one: scales would fit that sample alone; give different real "
            f"inputs; if this is what the network will see, {insist}"
        )


class Probes:
    """Samples for a look into the model: those of the lowest digests and the one that goes furthest, in any order."""

    def __init__(self) -> None:
        # by a digest of the content, and the largest magnitude of floating inputs
        self._kept: dict[tuple[str, float], dict[str, NDArray[Any]]] = {}

    def watch(self, batches: Iterable[Arrays]) -> Iterator[Arrays]:
        """Yield the same batches, looked at as they are read."""
        for batch in batches:
            for index in range(min((len(array) for array in batch.values() if np.ndim(array)), default=0)):
                self.add({key: np.asarray(array[index]) for key, array in batch.items()})
            yield batch

    def add(self, feed: Arrays) -> None:
        """Look at one sample: input name → array without the sample axis."""
        floats = [np.asarray(array, np.float32) for array in feed.values() if array.dtype.kind == "f"]
        peaks = [float(np.abs(array).max(initial=0.0)) for array in floats]  # NaN where one value is
        sample = f"{checksum(feed):08x} {max(peaks, default=0.0)!r}", max(peaks, default=0.0)
        if not all(map(math.isfinite, peaks)) or sample in self._kept:
            return
        kept = sorted((*self._kept, sample))[:PROBES]
        kept.append(max((*self._kept, sample), key=lambda item: item[::-1]))
        if sample in kept:
            self._kept[sample] = {name: np.array(array[None]) for name, array in feed.items()}
        self._kept = {item: self._kept[item] for item in dict.fromkeys(kept)}

    @property
    def feeds(self) -> list[dict[str, NDArray[Any]]]:
        """Those samples, with a first axis of 1."""
        return list(self._kept.values())


def check_preprocessing(proto: ModelProto, samples: Sequence[Arrays]) -> dict[str, Any]:
    """Look for pixels that arrive as 0 to 255 where the model wants them normalised, by what its first convolution gives.

    Args:
        proto: folded, so that no BatchNormalization follows that convolution.
        samples: input name → array with a first axis of 1.

    Returns:
        Plain JSON: "warning" where they arrive so; else nothing.
    """
    tensor = next((str(node.output[0]) for node in proto.graph.node if node.op_type == "Conv"), None)
    images = [array for sample in samples for array in sample.values() if _is_image(array)]
    low = min((float(item.min()) for item in images), default=0.0)
    high = max((float(item.max()) for item in images), default=0.0)
    if tensor is None or low < 0 or high <= RAW:
        return {}
    try:
        session = open_session(proto, outputs=[tensor], threads=1, memory_pattern=False, purpose="calibration")
        runs = single_runs(network_inputs(proto), samples)
        seen = [run_session(session, [tensor], run.feed)[tensor] for run in runs]
    except TrtoptError:  # its first layers can't be run alone
        return {}
    channels = np.concatenate([np.moveaxis(item, 1, 0).reshape(item.shape[1], -1) for item in seen], 1)
    spread = float(np.median(channels.std(1, dtype=np.float64)))
    if spread <= RAW_SPREAD:
        return {}
    return {
        "warning": f"inputs are {low:.3g} to {high:.3g}, and after the model's first convolution values spread by "
        f"{spread:.3g}, where trained networks have about 1: pixels seem to arrive as 0..255 where the model wants them "
        "normalised; check `preprocess=`, or the arrays in `data=`"
    }


def half_ranges(
    proto: ModelProto,
    probes: Sequence[Arrays],
    counted: Mapping[str, Histogram],
    threads: int | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, float]:
    """Find what comes near FP16's largest number in these samples; nothing where the model can't be run.

    Args:
        counted: histograms of all samples: what can't come near by these needn't be run.
    """
    feeds = (run.feed for run in single_runs(network_inputs(proto), probes))
    within = bounds(proto, {name: item.absmax for name, item in counted.items()})
    small = {name for name, largest in within.items() if not near_fp16_end(largest)}
    try:
        return beyond_fp16(measure_ranges(proto, feeds, threads=threads, but=small))
    except ModelError as error:
        reporter.note(f"what comes near FP16's largest number is only known of the tensors that were counted: {error}")
        return {}


def data_notes(table: Table) -> tuple[str, ...]:
    """Say what the user should know about the samples that a table was made from."""
    notes = []
    if table.samples < FEW:
        notes.append(
            f"calibrated on only {table.samples} samples: thresholds still move with so few; give at least {FEW}, "
            "better some hundred, that look like what the network will see"
        )
    if table.skipped:
        some = "; ".join(f"{item['name']}: {item['reason']}" for item in table.skipped[:3])
        more = "; …" if len(table.skipped) > 3 else ""
        notes.append(f"{len(table.skipped)} files can't be used and were left out ({some}{more})")
    if (quality := table.quality) is not None:
        if copies := quality["samples"] - quality["different"]:
            notes.append(f"{copies} of the {quality['samples']} samples are copies of others: they add nothing new")
        if warning := quality["preprocessing"].get("warning"):
            notes.append(warning)
    return tuple(notes)


def _is_image(array: NDArray[Any]) -> bool:
    """Return whether a sample looks like an image: 1 or 3 channels, first or last."""
    if array.ndim != 4 or array.dtype.kind not in "fu":
        return False
    sizes = array.shape[2:] if array.shape[1] in (1, 3) else array.shape[1:3] if array.shape[3] in (1, 3) else (0,)
    return bool(min(sizes) >= SMALLEST)


def checksum(feed: Arrays) -> int:
    """CRC-32 of all the content, by name."""
    value = 0
    for name in sorted(feed):
        value = zlib.crc32(np.ascontiguousarray(feed[name]).reshape(-1).view(np.uint8).data, value)
    return value
