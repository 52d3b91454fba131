"""Charts of a report: where things stand in them. The page draws them, in the colours of its style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtopt.evaluation.measures import decibels

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 426, 12, 238  # of the axes; the page's `scatter` draws them there


def scatter(points: Sequence[tuple[str, float, float, str]], *, fewer_up: bool = False) -> dict[str, Any]:
    """Place dots: (what it is, x, y, precision); of the first few a label is written where there is room. Nothing of none.

    Args:
        fewer_up: less stands higher.
    """
    if not points:
        return {}
    left_of, columns = _axis([point[1] for point in points], _LEFT, _RIGHT)
    top_of, rows = _axis([point[2] for point in points], *((_TOP, _BOTTOM) if fewer_up else (_BOTTOM, _TOP)))
    dots, written = list[dict[str, Any]](), list[tuple[float, float]]()
    for what, x, y, precision in points:
        left, top = left_of(x), top_of(y)
        labelled = len(written) < 8 and not any(abs(left - at) < 60 and abs(top - down) < 14 for at, down in written)
        written += [(left, top)] * labelled
        label = what.split(" ")[0] if labelled else ""
        dots.append({"what": what, "label": label, "left": left, "top": top, "precision": precision})
    return {"dots": dots, "columns": columns, "rows": rows}


def _axis(
    values: Sequence[float], begin: float, end: float
) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Return where a value stands on an axis, and its ticks: three to eight round numbers, each with its place.

    The axis goes a little further than the values, and from one number to another.
    """
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(low) * 0.1 or 1.0
    low, high = low - room, high + room
    unit = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(unit * factor for factor in (5, 2, 1) if (high - low) / (unit * factor) >= 3 or factor == 1)

    def place(value: float) -> float:
        return begin + (value - low) / (high - low) * (end - begin)

    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return place, [(place(number * step), round(number * step, 12)) for number in numbers]


def worst_samples(accuracy: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The samples whose results are furthest from FP32's, as `verify` named them, with a bar's length."""
    rows = list[dict[str, Any]]()
    for output, told in accuracy["outputs"].items() if accuracy is not None else ():
        for item in (told.get("samples") or {"worst": ()})["worst"]:
            snr, same = float(item["snr_db"]), item["agreement"]
            said = [] if same is None else [f"{same:.1%} the same"]
            said = ["another answer"] if same == 0 else ["the same answer"] if same == 1 else said
            length = same if same is not None else min(max(snr, 0.0), 60.0) / 60
            words = ", ".join([*said, decibels(snr)])
            rows.append({"sample": item["name"], "output": output, "said": words, "length": length})
    return rows
