"""The calibration table, `*.calib.json`: amax per tensor, and the histograms from which any method chooses again."""

from __future__ import annotations

import base64
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from trtopt.calibration.histogram import BINS, LOWEST_EXPONENT, Histogram, merged
from trtopt.calibration.thresholds import TableEntry, choose
from trtopt.core.documents import (
    AnyText,
    Count,
    Damaged,
    Duration,
    Name,
    Positive,
    checked,
    converted,
    parsed,
    read_json,
)
from trtopt.core.errors import CalibrationError
from trtopt.core.files import existing_file, sha256_json, write_json
from trtopt.core.options import typed
from trtopt.core.version import __version__
from trtopt.core.words import first_of
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import Skipped
from trtopt.graph.passes.repair import Repair
from trtopt.graph.passes.typed import near_fp16_end

FORMAT = "trtopt.calib/1"
_MOST_WEIGHTS = 1 << 31
_LARGEST = float(np.finfo(np.float32).max)  # of a magnitude: tensors are FP32


@dataclass(frozen=True)
class Table:
    """The scales of one model, measured on one data set.

    Attributes:
        tensors: by name, in graph order.
        groups: tensors that share one threshold, chosen from their counts together.
        model: "name" and "fingerprint" (of the folded graph, so that the table fits before and after `check --fix`).
        data: what the samples were: kind, count, a digest that doesn't depend on their order.
        preprocess: how an image became an input; None for arrays.
        method: as asked for; entries say which was taken.
        samples: how many were read.
        skipped: files left out: "name" and "reason".
        seconds: that the measurement took.
        version: of the trtopt that measured.
        quality: what the samples looked like, and how much more of them would move thresholds; None: nobody looked.
        repairs: node name → how its weights are rounded, where that isn't to the nearest code.
        smoothed: tensor → by what each channel of its last axis is divided (`trtopt.graph.passes.smooth`); its scale stands
            under the name that it has then.
        left_out: node name → why it stays out of INT8, where `tune` decided so.
        gates: products of squeeze-and-excite whose block is in INT8, too (`placement.gates_of`), where `tune` decided so.
        beside: the scales stand beside the graph, without Q/DQ (`Scales.beside_graph`), where `tune` decided so.
        ranges: floating tensor → its largest magnitude on some of the samples, of those that come near FP16's largest number
            (`trtopt.ort.ranges`): what gives or reads them stays in FP32 where the rest of a build is FP16.
    """

    tensors: Mapping[str, TableEntry]
    groups: tuple[tuple[Name, ...], ...]
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    method: Name
    samples: Count
    seconds: Duration = 0.0
    preprocess: Mapping[str, Any] | None = None
    skipped: tuple[Mapping[str, str], ...] = ()
    version: Name = __version__
    quality: Mapping[str, Any] | None = None
    repairs: Mapping[str, Repair] = field(default_factory=dict)
    smoothed: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    left_out: Mapping[Name, Name] = field(default_factory=dict)
    gates: tuple[Name, ...] = ()
    beside: bool = False
    ranges: Mapping[Name, _Magnitude] = field(default_factory=dict)

    @property
    def amax(self) -> dict[str, float]:
        """Tensor name → largest magnitude that INT8 will represent."""
        return {name: entry.amax for name, entry in self.tensors.items()}

    @property
    def beyond_fp16(self) -> dict[str, float]:
        """`ranges`, with those of the tensors that were counted on all samples."""
        counted = {name: item.histogram.absmax for name, item in self.tensors.items() if item.histogram is not None}
        return {**self.ranges, **{name: value for name, value in counted.items() if near_fp16_end(value)}}

    @property
    def digest(self) -> str:
        """SHA-256 of what a build takes from it, and the model it is for: equal for equal results, however long they took."""
        decided = {name: value for name, value in self._decided.items() if name != "ranges"}
        decided |= {name: sorted(decided[name]) for name in ("left_out", "gates") if name in decided}
        decided |= {"beyond_fp16": sorted(beyond)} if (beyond := self.beyond_fp16) else {}
        return sha256_json({"model": self.model.get("fingerprint"), "amax": self.amax, **decided})

    @cached_property  # packing the repairs takes a second where there are many
    def _decided(self) -> dict[str, Any]:
        """The parts that a table has only where there are some, as plain JSON."""
        some = {
            "repairs": {name: _packed_repair(item) for name, item in self.repairs.items()},
            "smoothed": {
                name: {"size": len(item), "factors": _text(item, "<f4")} for name, item in self.smoothed.items()
            },
            "left_out": dict(self.left_out),
            "gates": list(self.gates),
            "beside": self.beside,
            "ranges": dict(self.ranges),
        }
        return {name: value for name, value in some.items() if value}

    @property
    def summary(self) -> dict[str, Any]:
        """Facts for a manifest."""
        return {"method": self.method, "samples": self.samples, "digest": self.digest}

    @typed
    def with_method(self, method: str) -> Table:
        """The same measurement, thresholds chosen by another method. No data is read.

        Raises:
            CalibrationError: an entry has no histogram (an imported table).
            UsageError: no such method.
        """
        histograms = {name: item.histogram for name, item in self.tensors.items() if item.histogram is not None}
        bare = [name for name in self.tensors if name not in histograms]
        if bare:
            raise CalibrationError(
                f"the table has thresholds without histograms ({first_of(bare)}), so "
                f"`method='{method}'` can't choose others: run trtopt calibrate on data, or leave the method out"
            )
        return replace(self, tensors=choose_all(histograms, self.groups, method), method=method)

    def to_json(self) -> dict[str, Any]:
        plain = ("data", "preprocess", "method", "samples", "seconds", "quality")
        tensors = {
            name: {"amax": entry.amax, "method": entry.method}
            | ({} if entry.histogram is None else packed(entry.histogram))
            for name, entry in self.tensors.items()
        }
        own = {name: getattr(self, name) for name in plain}
        own |= {"skipped": [dict(item) for item in self.skipped], "groups": [list(group) for group in self.groups]}
        about = {"format": FORMAT, "trtopt": self.version, "model": dict(self.model)}
        return {**about, **own, **self._decided, "tensors": tensors}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all.

        Raises:
            OutputError: it can't be written.
        """
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str] | Table) -> Table:
        """Read a table; one that has been read is returned as it is.

        Raises:
            UsageError: there is no such file.
            CalibrationError: it isn't a table, is of another format, or is damaged; the message says where.
        """
        if isinstance(path, Table):
            return path
        file = existing_file(path, "the calibration table", _MAKE)
        try:
            content = read_json(file)
            found = content.get("format") if isinstance(content, dict) else None
            if found != FORMAT:
                raise Damaged(f"it has the format {found!r}; {FORMAT!r} is needed")
            return _table(content)
        except Damaged as error:
            raise CalibrationError(f"{file} can't be read as a calibration table: {error}; {_MAKE}") from None


_MAKE = "make one with trtopt calibrate MODEL.onnx --images DIR -o T.calib.json"


def choose_all(
    histograms: Mapping[str, Histogram], groups: Sequence[Sequence[str]], method: str
) -> dict[str, TableEntry]:
    """A threshold for every tensor; the members of a group get one, from their counts together."""
    grouped = {name for group in groups for name in group}
    entries: dict[str, TableEntry] = {}
    for members in (*groups, *((name,) for name in histograms if name not in grouped)):
        try:
            choice = choose(merged(histograms[name] for name in members), method)
        except CalibrationError as error:
            raise CalibrationError(f"the tensor {members[0]!r}: {error}") from None
        entries |= {name: replace(choice, histogram=histograms[name]) for name in members}
    return {name: entries[name] for name in histograms}


def packed(seen: Histogram) -> dict[str, Any]:
    """A histogram with values in it as plain JSON; `unpacked` reads it back."""
    # Counts to the last that isn't 0, little-endian int64, byte planes apart: half the size.
    planes = np.trim_zeros(seen.counts, "b").astype("<i8").view(np.uint8).reshape(-1, 8).T
    return {
        "absmax": seen.absmax,
        "low": seen.low,
        "high": seen.high,
        "count": seen.total,
        "histogram": {"bins": BINS, "exponent": seen.exponent, "counts": _text(planes, "u1")},
    }


def _table(content: dict[str, Any]) -> Table:
    tensors = converted(content.get("tensors"), dict[str, Any], "the table.tensors")
    if not tensors:
        raise Damaged("the table has no tensors")
    bare = {name: value for name, value in content.items() if name not in ("repairs", "smoothed")}
    table = converted({**bare, "tensors": {}, "version": content.get("trtopt")}, Table, "the table")
    checked(table.model, _Model, "the table.model")
    checked(table.skipped, tuple[Skipped, ...], "the table.skipped")
    if table.quality is not None:
        checked(table.quality, _Quality, "the table.quality")
    if table.preprocess is not None:
        parsed(table.preprocess, Preprocess.load, "the table.preprocess")
    if not all(table.groups):
        raise Damaged("the table has a group without tensors")
    if strangers := [name for group in table.groups for name in group if name not in tensors]:
        raise Damaged(f"the table has a group with {strangers[0]!r}, which isn't among its tensors")
    entries: dict[str, TableEntry] = {}
    for name, value in tensors.items():
        where = f"the tensor {name!r}"
        tensor = converted(value, _Tensor, where)
        histogram = None if value.get("histogram") is None else unpacked(value, where)
        entries[name] = TableEntry(tensor["amax"], tensor["method"], histogram)
    repairs = converted(content.get("repairs", {}), dict[str, _Repair], "the table.repairs")
    factors = converted(content.get("smoothed", {}), dict[str, _Factors], "the table.smoothed")
    return replace(
        table,
        tensors=entries,
        repairs={name: _repair(value, name) for name, value in repairs.items()},
        smoothed={name: _factors(value, name) for name, value in factors.items()},
    )


def _text(array: NDArray[Any], dtype: str) -> str:
    """Pack an array: its bytes in this type, zlib, base64."""
    return base64.b64encode(zlib.compress(array.astype(dtype).tobytes())).decode("ascii")


def _array(text: str, dtype: str, most: int, where: str, size: int | None = None) -> NDArray[Any]:
    """Return what `_text` was given; Damaged for more than `most` items, whatever the text claims, another number than `size`,
    or one that isn't finite."""
    try:
        stream, claimed = zlib.decompressobj(), most * np.dtype(dtype).itemsize
        array = np.frombuffer(stream.decompress(base64.b64decode(text, validate=True), claimed), dtype)
        if not stream.eof or array.size != (array.size if size is None else size) or not np.isfinite(array).all():
            raise ValueError(f"{array.size} items, or not finite; {size or f'at most {most}'} are needed")
    except (zlib.error, ValueError) as error:
        raise Damaged(f"{where} ({error})") from None
    return array


def _factors(found: _Factors, name: str) -> NDArray[np.float32]:
    where, size = f"the smoothing of {name!r}", found["size"]
    factors = _array(found["factors"], "<f4", size, f"{where} is damaged", size)
    if not (factors > 0).all():
        raise Damaged(f"{where} isn't {size} positive numbers")
    return factors.astype(np.float32)


def _packed_repair(repair: Repair) -> dict[str, Any]:
    bias = None if repair.bias is None else _text(repair.bias, "<f4")
    return {"shape": list(repair.offsets.shape), "offsets": _text(repair.offsets, "i1"), "bias": bias}


def _repair(found: _Repair, name: str) -> Repair:
    where, shape = f"the repair of {name!r} is damaged", tuple(found["shape"])
    size = math.prod(shape)
    if not shape or size > _MOST_WEIGHTS:
        raise Damaged(f"{where} (shape {shape})")
    offsets = _array(found["offsets"], "i1", size, where, size)
    bias = None if found["bias"] is None else _array(found["bias"], "<f4", max(shape), where).astype(np.float32)
    return Repair(offsets.reshape(shape), bias)


def unpacked(value: Any, where: str) -> Histogram:
    """The histogram that `packed` wrote."""
    found = converted(value, _Seen, where)
    content, counts = found["histogram"], np.zeros(BINS, np.int64)
    planes = _array(content["counts"], "u1", 8 * BINS, f"{where} has a damaged histogram")
    if planes.size % 8:
        raise Damaged(f"{where} has a damaged histogram ({planes.size} bytes)")
    some = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").reshape(-1)
    counts[: some.size] = some
    total, low, high, exponent = found["count"], float(found["low"]), float(found["high"]), content["exponent"]
    added, largest = int(some.sum(dtype=np.float64)), max(high, -low)  # exact below 2**53, which nobody counts to
    needed = max(math.frexp(largest)[1], LOWEST_EXPONENT) if largest else None
    right = 0 < total < 2**53 and added == total and some.min(initial=0) >= 0
    if not right or not -_LARGEST <= low <= high <= _LARGEST or exponent != needed:
        said = f"the counts add up to {added}, not {total}; values from {low} to {high}, exponent {exponent}"
        raise Damaged(f"{where} has a damaged histogram ({said})")
    return Histogram(counts, exponent, low, high, total)


# What is needed of the plain JSON in a table ---------------------------------------------------------------------------

_Magnitude = Annotated[float, Meta(gt=0, le=_LARGEST)]  # finite in FP32
_Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]


class _Bins(TypedDict):
    bins: Annotated[int, Meta(ge=BINS, le=BINS)]
    exponent: Annotated[int, Meta(ge=-149, le=128)] | None  # of FP32
    counts: AnyText  # as is decoded, with the rest of a histogram, in `unpacked`


class _Seen(TypedDict):
    low: _Finite
    high: _Finite
    count: Positive
    histogram: _Bins


class _Tensor(TypedDict):
    amax: _Magnitude
    method: Name


class _Model(TypedDict):
    fingerprint: AnyText  # only compared


class _Repair(TypedDict):
    shape: tuple[Positive, ...]
    offsets: AnyText
    bias: AnyText | None


class _Factors(TypedDict):
    size: Annotated[int, Meta(ge=1, le=_MOST_WEIGHTS)]
    factors: AnyText


class _Quality(TypedDict):
    """Counts of samples, with what `quality.check_preprocessing` gives."""

    samples: Count
    different: Count
    preprocessing: dict[str, str]
