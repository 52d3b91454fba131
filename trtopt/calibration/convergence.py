"""How much further thresholds would move with more samples, from what they do when only some of the samples are taken.

Samples are dealt into blocks by their content, so that the answer doesn't depend on their order. Thresholds of half the
blocks are compared with those of all. An average over n samples has a variance of c/n: from n/2 to n it moves by √(c/n), from
n to n + m by √(c m / n (n + m)), which is √(m / (n + m)) of that. A maximum grows with the logarithm of n, by
log2((n + m) / n) of what it grew in the last doubling. Thresholds are something between; their geometric mean is forecast.
docs/results/calibration-rules.md compares forecasts with what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.calibration.histogram import Histogram, merged
from trtopt.calibration.observe import BLOCKS
from trtopt.calibration.table import TableEntry
from trtopt.calibration.thresholds import SEARCHING, choose
from trtopt.core.errors import CalibrationError

MORE = 200  # samples: the step that the answer is given for
HALVES = ((0, 1), (2, 3))  # of the blocks
SEARCHED = 24  # thresholds that take a search (milliseconds) asked for again, at most


def movement(
    blocks: Sequence[Mapping[str, Histogram]],
    entries: Mapping[str, TableEntry],
    groups: Sequence[Sequence[str]],
    samples: int,
) -> dict[str, Any] | None:
    """What `MORE` samples on top of `samples` would do to thresholds.

    Each tensor is asked with the method that was taken for it.

    Args:
        blocks: histograms by tensor of disjoint parts of the samples, about equally many in each (`Observation.blocks`).
        entries: the thresholds, chosen from all of them.
        groups: tensors that share a threshold.

    Returns:
        Plain JSON: "more" samples; "mean" and "most", the expected relative change of thresholds; "tensor", which moves
        most of those asked. None where there are too few samples to say: half of them leave a tensor without a threshold.
    """
    if len(blocks) != BLOCKS or samples < 2 * BLOCKS or not entries:
        return None
    shared = {name: tuple(group) for group in groups for name in group}
    sets: dict[tuple[str, ...], float] = {}
    moved: dict[str, float] = {}
    slow = [name for name, entry in entries.items() if entry.method in SEARCHING]
    sample = set(entries).difference(slow) | set(slow[:: -(-len(slow) // SEARCHED) or 1])
    for name, entry in entries.items():
        if name not in sample:
            continue
        members = shared.get(name, (name,))
        if members not in sets:
            try:
                halves = [merged(blocks[index][member] for index in half for member in members) for half in HALVES]
                sets[members] = float(
                    np.mean([abs(choose(item, entry.method).amax / entry.amax - 1) for item in halves])
                )
            except (CalibrationError, KeyError):
                return None
        moved[name] = sets[members]
    factor = math.sqrt(math.sqrt(MORE / (samples + MORE)) * math.log2(1 + MORE / samples))
    most = max(moved, key=lambda name: moved[name])
    mean = float(np.mean(list(moved.values())))
    return {"more": MORE, "mean": round(mean * factor, 5), "most": round(moved[most] * factor, 5), "tensor": most}
