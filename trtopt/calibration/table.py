"""The calibration table, `*.calib.json`: amax per tensor, and the histograms that any other method needs."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trtopt.about import __version__
from trtopt.calibration.histogram import BINS, Histogram
from trtopt.calibration.thresholds import choose
from trtopt.errors import CalibrationError
from trtopt.files import existing_file, sha256_json, write_json

FORMAT = "trtopt.calib/1"


@dataclass(frozen=True)
class Entry:
    """One tensor: its threshold, the method that gave it, and what was seen."""

    amax: float
    method: str
    histogram: Histogram


@dataclass(frozen=True)
class Table:
    """Measured scales of one model on one data set.

    Attributes:
        tensors: in graph order.
        groups: tensors that share one threshold.
        model: name and fingerprint of the folded graph.
        data: description of the samples (kind, count, content digest); preprocess: how they were prepared.
        method: as asked; each entry says which was taken.
        skipped: files left out, with the reason.
    """

    tensors: Mapping[str, Entry]
    groups: tuple[tuple[str, ...], ...]
    model: Mapping[str, str]
    data: Mapping[str, Any]
    method: str
    samples: int
    seconds: float
    preprocess: Mapping[str, Any] | None = None
    skipped: tuple[Mapping[str, str], ...] = ()

    @property
    def amax(self) -> dict[str, float]:
        return {name: entry.amax for name, entry in self.tensors.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the scales alone: equal for equal results, however long they took."""
        return sha256_json({"amax": self.amax, "model": self.model["fingerprint"]})

    def with_method(self, method: str) -> Table:
        """The same measurement with thresholds chosen by another method; no data is read."""
        return replace(
            self,
            tensors=choose_all({n: e.histogram for n, e in self.tensors.items()}, self.groups, method),
            method=method,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole, or raise OutputError."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "trtopt": __version__,
            "model": dict(self.model),
            "data": dict(self.data),
            "preprocess": self.preprocess,
            "method": self.method,
            "samples": self.samples,
            "skipped": list(self.skipped),
            "seconds": self.seconds,
            "groups": [list(group) for group in self.groups],
            "tensors": {name: _plain(entry) for name, entry in self.tensors.items()},
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """Read a table.

        Raises:
            UsageError: no such file.
            CalibrationError: not a table, of another format, or damaged.
        """
        file = existing_file(path, "the calibration table")
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"{file} isn't a calibration table ({error}); make one with trtopt calibrate"
            ) from None
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise CalibrationError(f"{file} has format {found!r}; this trtopt reads {FORMAT!r}: calibrate again")
        try:
            tensors = {str(name): _entry(value) for name, value in content["tensors"].items()}
            table = cls(
                tensors=tensors,
                groups=tuple(tuple(map(str, group)) for group in content["groups"]),
                model=content["model"],
                data=content["data"],
                method=content["method"],
                samples=content["samples"],
                seconds=content["seconds"],
                preprocess=content["preprocess"],
                skipped=tuple(content["skipped"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise CalibrationError(f"{file} is damaged ({type(error).__name__}: {error}); calibrate again") from None
        bad = [name for name, entry in tensors.items() if not 0 < entry.amax < float("inf")]
        if bad:
            raise CalibrationError(f"{file}: amax of {', '.join(bad[:5])} isn't positive and finite; calibrate again")
        return table


def choose_all(
    histograms: Mapping[str, Histogram], groups: tuple[tuple[str, ...], ...], method: str
) -> dict[str, Entry]:
    """A threshold for each tensor, one for all members of a group from their counts together.

    Raises:
        CalibrationError: a tensor with nothing but zeros, by name.
    """
    together: dict[str, Histogram] = {}
    for group in groups:
        joint = Histogram()
        for name in group:
            joint.merge(histograms[name])
        together.update(dict.fromkeys(group, joint))
    entries = {}
    for name, histogram in histograms.items():
        try:
            choice = choose(together.get(name, histogram), method)
        except CalibrationError as error:
            raise CalibrationError(f"the tensor {name}: {error}") from None
        entries[name] = Entry(choice.amax, choice.method, histogram)
    return entries


def _plain(entry: Entry) -> dict[str, Any]:
    seen = entry.histogram
    used = int(np.flatnonzero(seen.counts)[-1]) + 1 if seen.counts.any() else 0
    packed = zlib.compress(seen.counts[:used].astype("<i8").tobytes(), 6)
    return {
        "amax": entry.amax,
        "method": entry.method,
        "absmax": seen.absmax,
        "minimum": seen.minimum,
        "maximum": seen.maximum,
        "count": seen.total,
        "histogram": {"bins": BINS, "exponent": seen.exponent, "counts": base64.b64encode(packed).decode("ascii")},
    }


def _entry(value: Mapping[str, Any]) -> Entry:
    packed = value["histogram"]
    if packed["bins"] != BINS:
        raise ValueError(f"{packed['bins']} bins, {BINS} expected")
    some = np.frombuffer(zlib.decompress(base64.b64decode(packed["counts"], validate=True)), "<i8")
    if some.size > BINS or int(some.sum()) != value["count"]:
        raise ValueError("the counts don't add up")
    counts = np.zeros(BINS, np.int64)
    counts[: some.size] = some
    seen = Histogram(counts, packed["exponent"], value["absmax"], value["minimum"], value["maximum"], value["count"])
    return Entry(float(value["amax"]), str(value["method"]), seen)
