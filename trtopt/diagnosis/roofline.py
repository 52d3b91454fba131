"""What each layer does of what the GPU could: operations and bytes of its products, against the GPU's peaks.

The model is Williams, Waterman and Patterson's ("Roofline", 2009): a layer takes at least the longer of the two times that
the GPU's arithmetic needs for its operations, and the memory for its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trtopt.core.documents import converted, read_toml

_PEAKS = Path(__file__).with_name("peaks.toml")
WIDTHS = {"int8": 1, "fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4}  # bytes of an element


@dataclass(frozen=True)
class Peaks:
    """Of one GPU: `operations` a second by precision, `memory`: bytes a second; `name`: of the row of the table."""

    name: str
    operations: Mapping[str, float]
    memory: float


@dataclass(frozen=True)
class Tensors:
    """What nodes read and write, and how large that is.

    Attributes:
        reads, writes: node → tensors.
        elements: tensor → how many, where that is known.
        weights: tensors that don't grow with the batch.
        results: outputs of the graph.
        scale: what the work and all but the weights are to be multiplied by, for the batch that was timed.
    """

    reads: Mapping[str, Sequence[str]]
    writes: Mapping[str, Sequence[str]]
    elements: Mapping[str, int]
    weights: Collection[str]
    results: Collection[str]
    scale: float = 1.0

    def moved(self, nodes: Collection[str]) -> float | None:
        """Elements that nodes which are computed together read and write, each tensor once; None: a size isn't known."""
        inside = set(nodes)
        outputs = {name for node in inside for name in self.writes.get(node, ())}
        inputs = {name for node in inside for name in self.reads.get(node, ())} - outputs
        outside_reads = {name for node, names in self.reads.items() if node not in inside for name in names} | set(
            self.results
        )
        total = 0.0
        for name in inputs | (outputs & outside_reads):
            if name not in self.elements:
                return None
            total += self.elements[name] * (1.0 if name in self.weights else self.scale)
        return total


@cache
def _table() -> tuple[Peaks, ...]:
    """Its operations are in 10¹², its memory in 10⁹ bytes a second."""
    return tuple(converted(row, Peaks) for row in read_toml(_PEAKS)["gpu"])


def peaks_of(gpu: str) -> Peaks | None:
    """The peaks of a GPU by its name, such as "NVIDIA H200 (sm90, 140 GiB)"; None: they aren't known."""
    words = set(_words(gpu.partition("(")[0]))
    fits = [item for item in _table() if words.issuperset(_words(item.name))]
    if not fits:
        return None
    best = max(fits, key=lambda item: len(_words(item.name)))
    operations = {name: value * 1e12 for name, value in best.operations.items()}
    return Peaks(best.name, operations, best.memory * 1e9)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def place(operations: float, nbytes: float, ms: float, precision: str, peaks: Peaks | None) -> dict[str, Any]:
    """A layer under the roofs: what bounds it, and the share of the speed that they allow which it has."""
    row: dict[str, Any] = {"operations": operations, "bytes": nbytes, "bound": None, "share_of_roof": None}
    most = None if peaks is None else peaks.operations.get(precision)
    if peaks is None or most is None:
        return row
    arithmetic, memory = operations / most, nbytes / peaks.memory
    share = max(arithmetic, memory) / (ms / 1e3)
    return row | {"bound": "memory" if memory > arithmetic else "arithmetic", "share_of_roof": float(f"{share:.4g}")}
