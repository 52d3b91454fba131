"""Charts of a report as SVG within the page, in the colours of its style sheet; bars are the page's own HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from trtopt.evaluation.measures import decibels

_Place = Callable[[float, float], tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 440, 280, 56, 12, 42, 14


def scatter(
    title: str, points: Sequence[tuple[str, float, float, str]], across: str, up: str, *, fewer_up: bool = False
) -> str:
    """Draw dots: (what it is, x, y, precision); of the first few a label is written where there is room.

    Args:
        across, up: what the axes are.
        fewer_up: less stands higher.
    """
    low, high = (min(point[1] for point in points), max(point[1] for point in points))
    least, most = (min(point[2] for point in points), max(point[2] for point in points))
    low, high, least, most = *_apart(low, high), *_apart(least, most)

    def place(x: float, y: float) -> tuple[float, float]:
        rise = (y - least) / (most - least)
        down = rise if fewer_up else 1 - rise
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + (x - low) / (high - low) * width, _TOP + down * height

    parts = [*_axes(low, high, least, most, place, across, up)]
    written: list[tuple[float, float]] = []
    for what, x, y, precision in points:
        left, top = place(x, y)
        inside = f"<title>{escape(what)}</title>"
        parts.append(f'<circle class="p-{precision}" cx="{left:.1f}" cy="{top:.1f}" r="4">{inside}</circle>')
        taken = any(abs(left - at) < 60 and abs(top - down) < 14 for at, down in written)
        if len(written) < 8 and not taken:
            written.append((left, top))
            at, anchor = (left - 7, "end") if left > _WIDTH - 80 else (left + 7, "start")
            label = escape(what.split(" ")[0])
            parts.append(f'<text x="{at:.1f}" y="{top + 4:.1f}" text-anchor="{anchor}">{label}</text>')
    return _svg(title, _WIDTH, _HEIGHT, parts)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis, a little further than the values, and never the same."""
    room = (high - low) * 0.06 or abs(low) * 0.1 or 1.0
    return low - room, high + room


def _axes(low: float, high: float, least: float, most: float, place: _Place, across: str, up: str) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    for tick in _ticks(low, high):
        left, _ = place(tick, least)
        yield f'<text class="tick" x="{left:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'
    for tick in _ticks(least, most):
        _, top = place(low, tick)
        yield f'<path class="grid" d="M{_LEFT} {top:.1f}H{right}"/>'
        yield f'<text class="tick" x="{_LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<text class="tick" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text class="tick" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'


def _ticks(low: float, high: float) -> Iterator[float]:
    """Three to eight round numbers between two."""
    unit = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(unit * factor for factor in (5, 2, 1) if (high - low) / (unit * factor) >= 3 or factor == 1)
    number = math.ceil(low / step)
    while number * step <= high:
        yield round(number * step, 12)
        number += 1


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}">\n{inside}\n</svg>'


def worst_samples(accuracy: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The samples whose results are furthest from FP32's, as `verify` named them, with a bar's length."""
    rows = list[dict[str, Any]]()
    for output, told in accuracy["outputs"].items() if accuracy is not None else ():
        for item in (told.get("samples") or {"worst": ()})["worst"]:
            snr, same = float(item["snr_db"]), item["agreement"]
            said = [] if same is None else [f"{same:.1%} the same"]
            said = ["another answer"] if same == 0 else ["the same answer"] if same == 1 else said
            length = same if same is not None else min(max(snr, 0.0), 60.0) / 60
            rows.append(
                {"sample": item["name"], "output": output, "said": ", ".join([*said, decibels(snr)]), "length": length}
            )
    return rows
