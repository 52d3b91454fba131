"""Charts of a report as SVG within the page: by matplotlib, equal bytes for equal numbers, in the colours of its theme."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Concatenate, ParamSpec

from trtopt.core.errors import require
from trtopt.core.library_output import unwarned

P = ParamSpec("P")
EXTRA = "report"
# What matplotlib draws in, and the variable of the page's style sheet that takes its place: one drawing for every theme.
_COLOURS = {
    "#010101": "ink",
    "#020202": "faint",
    "#030303": "accent",
    "#040404": "line",
    "#100101": "int8",
    "#100202": "fp8",
    "#100303": "fp16",
    "#100404": "bf16",
    "#100505": "fp32",
    "#100606": "unknown",
}
_DRAWN = {name: colour for colour, name in _COLOURS.items()}
_STYLE = {
    "svg.fonttype": "none",  # text stays text: to be read aloud, searched, and in the page's own font
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 11.0,
    "text.color": _DRAWN["ink"],
    "axes.labelcolor": _DRAWN["ink"],
    "axes.edgecolor": _DRAWN["line"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _DRAWN["faint"],
    "grid.linewidth": 0.5,
    "xtick.color": _DRAWN["line"],
    "ytick.color": _DRAWN["line"],
    "xtick.labelcolor": _DRAWN["ink"],
    "ytick.labelcolor": _DRAWN["ink"],
    "legend.frameon": False,
    "figure.facecolor": "none",
}
_CORNERS = (  # of a dot: points to a number's place, and which of its ends is there
    ((4, 3), "left", "bottom"),
    ((4, -3), "left", "top"),
    ((-4, 3), "right", "bottom"),
    ((-4, -3), "right", "top"),
)
_ALONE = threading.Lock()  # matplotlib's settings are the whole process's
_NOT_STYLE = ("backend", "interactive", "toolbar", "timezone", "savefig.directory")


def drawn(
    name: str, title: str, plot: Callable[Concatenate[Any, P], None], *numbers: P.args, **options: P.kwargs
) -> str:
    """One chart.

    Args:
        name: of the chart within its page: what its parts are called by.
        title: what it shows, for those who don't see it.
        plot: draws `numbers` on matplotlib's axes; the figure has 5 by 3.1 inches, of 72 units each, unless it says otherwise.

    Raises:
        MissingDependency: matplotlib isn't installed.
    """
    matplotlib = require("matplotlib", EXTRA, "drawing a report")
    figures = require("matplotlib.figure", EXTRA, "drawing a report")
    buffer = io.StringIO()
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith(_NOT_STYLE)}
    # matplotlib changes the filters of warnings for moments: within `unwarned` these changes can't meet ours.
    with _ALONE, unwarned(), matplotlib.rc_context({**defaults, **_STYLE, "svg.hashsalt": name}):
        figure = figures.Figure(figsize=(5.0, 3.1), layout="constrained")
        plot(figure.add_subplot(), *numbers, **options)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same in every chart, and nothing refers to them
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"<style.*?</style>|font-family: [^;]*; ", "", text, flags=re.S)  # the page has both
    text = re.sub(r"\n\s*", "\n", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()


def colour(precision: str | None) -> str:
    return _DRAWN.get(precision or "unknown", _DRAWN["unknown"])


def shares(axes: Any, rows: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each row, divided by precision; each row's values add up to 1."""
    axes.figure.set_size_inches(5.0, 1.3 + 0.4 * len(rows))
    seen: set[str] = set()
    for place, parts in enumerate(rows.values()):
        start = 0.0
        for precision, share in parts.items():
            label = None if precision in seen else precision.upper()
            axes.barh(place, 100 * share, left=100 * start, color=colour(precision), height=0.6, label=label)
            start += share
            seen.add(precision)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=max(1, min(4, len(seen))))


def strip(axes: Any, runs: Sequence[tuple[str, int, int]]) -> None:
    """Precisions in the order of execution: (precision, first layer from 0, how many)."""
    axes.figure.set_size_inches(5.0, 1.5)
    for precision in dict.fromkeys(run[0] for run in runs):
        spans = [(start, count) for other, start, count in runs if other == precision]
        axes.broken_barh(spans, (0, 1), color=colour(precision), label=precision.upper(), linewidth=0)
    axes.set_xlim(0, max(start + count for _, start, count in runs))
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_xlabel("layers in the order that they run in")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def damage(axes: Any, points: Sequence[tuple[int, float, float, str]]) -> None:
    """(number of the layer, milliseconds, dB, precision): fewer dB, which are worse, stand higher."""
    for precision in dict.fromkeys(point[3] for point in points):
        group = [point for point in points if point[3] == precision]
        places = [point[1] for point in group], [point[2] for point in group]
        axes.scatter(*places, s=18, color=colour(precision), label=precision.upper(), linewidths=0)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.1)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("dB left if only it is quantized")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    worst = sorted(points, key=lambda point: point[2])[:4]
    slowest = sorted(points, key=lambda point: -point[1])[:3]
    _number(axes, points, list(dict.fromkeys((*worst, *slowest))))


def _number(axes: Any, points: Sequence[Any], labelled_points: Sequence[Any]) -> None:
    """Write the numbers of `labelled_points` beside their dots, the first ones first: at that corner where a number covers the
    fewest dots and none that is written already. One that has no such corner isn't written: the table has it."""
    axes.figure.draw_without_rendering()  # the limits and the layout don't change from here on
    dots = axes.transData.transform([point[1:3] for point in points])
    label_boxes: list[Any] = []
    for number, ms, snr, _ in labelled_points:
        texts = [
            axes.annotate(f"#{number}", (ms, snr), place, textcoords="offset points", fontsize=9, ha=side, va=end)
            for place, side, end in _CORNERS
        ]
        boxes = [text.get_window_extent().padded(1) for text in texts]
        free_corners = [index for index, box in enumerate(boxes) if not box.count_overlaps(label_boxes)]
        best = min(free_corners, key=lambda index: boxes[index].count_contains(dots), default=None)
        label_boxes += [] if best is None else [boxes[best]]
        for index, text in enumerate(texts):
            if index != best:
                text.remove()


def histogram(axes: Any, edges: Sequence[float], counts: Sequence[int], threshold: float) -> None:
    """Magnitudes of a tensor, and the largest that is represented."""
    axes.figure.set_size_inches(3.2, 1.9)
    axes.stairs(counts, edges, fill=True, color=_DRAWN["int8"])
    axes.axvline(threshold, color=_DRAWN["accent"], linewidth=1.5)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: "")
    axes.set_ylabel("count, log")
    axes.set_xlim(0, max(edges[-1], threshold) * 1.02)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("magnitude")


def front(axes: Any, choices: Sequence[tuple[float, float]], marked: Sequence[tuple[str, float, float]]) -> None:
    """Choices of `tune`: (share in INT8, dB), and named ones beside them."""
    line = sorted(choices)
    axes.plot(
        [100 * share for share, _ in line], [snr for _, snr in line], "-o", color=_DRAWN["int8"], markersize=4,
        linewidth=1, label="best of what was tried",
    )  # fmt: skip
    for number, (label, share, snr) in enumerate(marked):
        mark = "sD^"[number % 3]
        axes.plot([100 * share], [snr], mark, color=_DRAWN["accent"], markersize=7, label=label, fillstyle="none")
    axes.set_xlabel("% of the arithmetic in 8 bits")
    axes.set_ylabel("dB")
    axes.legend(loc="best")


def latencies(axes: Any, rows: Sequence[tuple[str, float, float, float]]) -> None:
    """(label, p50, p90, p99) in milliseconds."""
    axes.figure.set_size_inches(5.0, 1.4 + 0.35 * len(rows))
    places = range(len(rows))
    axes.hlines(places, [row[1] for row in rows], [row[3] for row in rows], color=_DRAWN["line"], linewidth=1)
    for mark, index, label in (("o", 1, "p50"), ("D", 2, "p90"), ("|", 3, "p99")):
        values = [row[index] for row in rows]
        axes.plot(values, places, mark, color=_DRAWN["int8"], markersize=8 if mark == "|" else 5, label=label)
    axes.set_yticks(places, [row[0] for row in rows])
    axes.invert_yaxis()
    low, high = min(row[1] for row in rows), max(row[3] for row in rows)
    if low > 0 and high / low > 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds, end to end")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
