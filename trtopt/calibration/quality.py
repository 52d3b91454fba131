"""Questions to the samples: are they copies, or pixels that nobody normalised? Too few, constant and infinite ones are refused
where they show (`calibrator.check_enough`, `observe`).

Each sample leaves a small record, so memory doesn't grow with what a sample holds, and records of shards join to what one pass
would have given, in any order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.calibration.noise import run_session
from trtopt.calibration.table import Table
from trtopt.core.errors import DataError, TrtoptError
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays
from trtopt.graph.inputs import network_inputs
from trtopt.ort.ranges import FP16_NORMAL
from trtopt.ort.sessions import open_session

SMALLEST = 24  # pixels: smaller arrays of three channels may be no image
PROBES = 4  # samples kept for the look into the model, beside the one that goes furthest
RAW = 16.0  # larger magnitudes, none negative: pixels as they are in a file
RAW_SPREAD = 10.0  # after the first convolution of a folded model, where trained networks have some 1
INSIST = "insist with `allow_unusual_data=True`"


class Sample(NamedTuple):
    """A record of one sample: a digest of its content, and the largest magnitude of its floating inputs."""

    digest: str
    absmax: float


class Survey:
    """Records of the samples that passed, and some samples for a look into the model.

    Attributes:
        ranged: those: of the lowest digests, and the one that goes furthest; with a first axis of 1, the same in any order.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._probes: dict[Sample, dict[str, NDArray[Any]]] = {}

    def watch(self, batches: Iterable[Arrays]) -> Iterator[Arrays]:
        """Yield the same batches, looked at as they are read."""
        for batch in batches:
            for index in range(min((len(array) for array in batch.values() if np.ndim(array)), default=0)):
                self.add({key: np.asarray(array[index]) for key, array in batch.items()})
            yield batch

    def add(self, feed: Arrays) -> None:
        """Look at one sample: input name → array without the sample axis."""
        flats = [np.asarray(array, np.float32).reshape(-1) for array in feed.values() if array.dtype.kind == "f"]
        ends = [float(end) for flat in flats if flat.size for end in (flat.min(), flat.max())]
        absmax = max(map(abs, ends), default=0.0)
        # Cheap: two of one digest are the same for all that depends on it here.
        sample = Sample(f"{checksum(feed):08x} {absmax!r}", absmax)
        self.samples.append(sample)
        if not all(map(math.isfinite, ends)) or sample in self._probes:  # NaN shows in both
            return
        kept = sorted((*self._probes, sample))[:PROBES]
        kept.append(max((*self._probes, sample), key=lambda item: (item.absmax, item.digest)))
        if sample in kept:
            self._probes[sample] = {name: np.array(array[None]) for name, array in feed.items()}
        self._probes = {item: self._probes[item] for item in dict.fromkeys(kept)}

    @property
    def ranged(self) -> list[dict[str, NDArray[Any]]]:
        return list(self._probes.values())


def facts(survey: Survey) -> dict[str, Any]:
    """Summarize a survey in plain JSON; the same for any order of the samples."""
    return {"samples": len(survey.samples), "different": len({item.digest for item in survey.samples})}


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
        "normalised; check `preprocess=`, or the arrays in `data=`",
    }


def refuse(quality: Mapping[str, Any], allowed: bool, insist: str = INSIST) -> None:
    """Raise DataError for copies of one sample, unless the user insists.

    Args:
        insist: how the user would.
    """
    if quality and not allowed and quality["samples"] > 1 and quality["different"] == 1:
        raise DataError(
            f"all {quality['samples']} samples are the same one: scales would fit that sample alone; give different real "
            f"inputs; if this is what the network will see, {insist}"
        )


def fp16_underflow_warning(table: Table) -> str:
    """Warn where tensors hold nothing that FP16 can hold with all its digits, zeros aside; empty where none does.

    INT8 by itself stands that, since scales are FP32: what a build leaves in FP16 between its quantized layers doesn't.
    """
    largest = {
        name: entry.amax if entry.histogram is None else entry.histogram.absmax for name, entry in table.tensors.items()
    }
    small = {name: value for name, value in largest.items() if 0 < value < FP16_NORMAL}
    if not small:
        return ""
    least = min(small, key=lambda name: small[name])
    return (
        f"{len(small)} of {len(table.tensors)} tensors hold only values below {FP16_NORMAL:.2g}, FP16's smallest normal number "
        f"(the largest of {least!r} is {small[least]:.2g}), and FP16 loses them: with weights that aren't trained that is "
        "usual, so export the trained ones; else build with `bf16=True` beside `int8=True` (not on TensorRT 8.6)"
    )


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
