"""Our thresholds against those of TensorRT's own calibrator on the same inputs, tensor by tensor, as Markdown.

    python benchmarks/compare_native.py NATIVE.cache T.calib.json [--method entropy] [-o TABLE.md]

NATIVE.cache is what `trtopt build --int8 --calibrator native --data F --save-cache NATIVE.cache` kept; T.calib.json is
`trtopt calibrate MODEL --data F -o T.calib.json`'s, whose histograms give any method. Ratio: our amax over TensorRT's.
Outliers, outside 0.8 to 1.25, come with what both thresholds cut off of the values that were seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import TextCache, read_cache

OUTLIER = 1.25


@dataclass(frozen=True)
class Comparison:
    """Tensors that both know, ours / theirs, in graph order.

    Attributes:
        absent: tensors of ours that the cache lacks.
    """

    header: str
    method: str
    ratios: Mapping[str, float]
    ours: Mapping[str, float]
    theirs: Mapping[str, float]
    seen: Mapping[str, Histogram]
    absent: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    def quantile(self, share: float) -> float:
        return float(np.quantile(list(self.ratios.values()), share))

    @property
    def outliers(self) -> list[str]:
        """Furthest from 1 first."""
        far = (name for name, ratio in self.ratios.items() if not 1 / OUTLIER <= ratio <= OUTLIER)
        return sorted(far, key=lambda name: -abs(float(np.log(self.ratios[name]))))

    def markdown(self) -> str:
        lines = [
            f"{self.method} against {self.header}: {len(self.ratios)} tensors, amax over TensorRT's: "
            f"p10 {self.quantile(0.1):.3f}, median {self.quantile(0.5):.3f}, p90 {self.quantile(0.9):.3f}; "
            f"{len(self.outliers)} outside {1 / OUTLIER} to {OUTLIER}"
            + (f"; not in the cache: {', '.join(self.absent)}" if self.absent else ""),
        ]
        if self.outliers:
            lines += [
                "",
                "| tensor | ours / TensorRT's | ours | TensorRT's | largest seen | cut off by ours | by TensorRT's | remark |",
                "|---|---|---|---|---|---|---|---|",
            ]
        for name in self.outliers:
            ours, theirs, seen = self.ours[name], self.theirs[name], self.seen[name]
            lines.append(
                f"| {name.replace('|', chr(92) + '|')} | {self.ratios[name]:.3f} | {ours:.4g} | {theirs:.4g} | "
                f"{seen.absmax:.4g} | {beyond(seen, ours):.2%} | {beyond(seen, theirs):.2%} | {self.remark(name)} |"
            )
        return "\n".join(lines) + "\n"

    def remark(self, name: str) -> str:
        """What the numbers themselves say of an outlier."""
        said = []
        if any(name in group for group in self.groups):
            said.append("shares one scale with others (Concat)")
        if self.theirs[name] > self.seen[name].absmax * 1.01:
            said.append("TensorRT's is above all that was seen: not the same inputs?")
        zeros = int(self.seen[name].counts[0]) / self.seen[name].total
        if zeros > 0.5:
            said.append(f"{zeros:.0%} of the values in the bin at zero")
        if self.ours[name] >= self.seen[name].absmax:
            said.append("ours cuts nothing off")
        return "; ".join(said)


def beyond(seen: Histogram, amax: float) -> float:
    """Share of the values larger than `amax`, to the width of a bin."""
    if amax * (1 + 1e-6) >= seen.absmax:  # a cache holds float32
        return 0.0
    return float(seen.counts[int(np.ceil(amax / seen.width)) :].sum() / seen.total)


def compare(cache: TextCache, table: Table, method: str = "entropy") -> Comparison:
    """Compare tensor by tensor, by name.

    Raises:
        CalibrationError: the table has no histograms.
    """
    table = table.with_method(method)
    ours = table.amax
    both = {name: value for name, value in ours.items() if name in cache.amax}
    if not both:
        raise SystemExit("the cache and the table have no tensor in common: are they of the same model?")
    seen = {name: entry.histogram for name, entry in table.tensors.items() if entry.histogram is not None}
    return Comparison(
        header=cache.header,
        method=method,
        ratios={name: value / cache.amax[name] for name, value in both.items()},
        ours=both,
        theirs={name: cache.amax[name] for name in both},
        seen=seen,
        absent=tuple(name for name in ours if name not in cache.amax),
        groups=table.groups,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--method", default="entropy")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    text = compare(read_cache(given.cache), Table.load(given.table), given.method).markdown()
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
