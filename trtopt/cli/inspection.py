"""Lines of `trtopt inspect` on an engine, and of how two engines differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from trtopt.cli.application import print_table
from trtopt.core.values import x
from trtopt.core.words import counted, first_of

MOST_SHOWN = 20  # of what differs, in each table


def difference_lines(difference: Any) -> Iterator[str]:
    names = [difference.this.name, difference.other.name]
    if names[0] == names[1]:
        names = [str(difference.this), str(difference.other)]
    common_nodes = [item for item in difference.precision if None not in (item.this, item.other)]
    parts = (
        ("What differs", "", difference.facts),
        ("Runs in", "node", common_nodes),
        ("Reads and writes", "node", difference.formats),
        ("Run by", "node", difference.tactics),
    )
    for title, first, rows in parts:
        if rows:
            shown_rows = rows[:MOST_SHOWN] if first else rows
            cells = [(item.what, _cell(item.this), _cell(item.other)) for item in shown_rows]
            print_table(f"{title} ({len(rows)})", (first, *names), cells, width=80)
            if len(rows) > len(shown_rows):
                print(f"{len(rows) - len(shown_rows)} more: --json has all")
    for name, lacks in zip(names, ("other", "this")):
        if nodes := [item.what for item in difference.precision if getattr(item, lacks) is None]:
            yield f"only in {name} in a layer with products: {counted(len(nodes), 'node')} ({first_of(nodes)})"
    if difference.same:
        yield "nothing differs of what is compared"
    for note in difference.notes:
        yield f"note: {note}"


def _cell(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def layer_lines(layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from trtopt.engine.reports import formats

    for number, layer in enumerate(layers, 1):
        precision = layer["precision"]
        yield f"{number} {layer['name']}: {layer['kind']}, {precision.upper() if precision else 'precision not known'}"
        more = {"formats": formats(layer), "tactic": layer.get("tactic"), "nodes": ", ".join(layer["nodes"])}
        for what, text in more.items():
            yield from wrap(f"{what} {text}", 80, initial_indent="    ", subsequent_indent="      ") if text else ()


def engine_lines(report: Any) -> Iterator[str]:
    from trtopt.engine.manifest import REASONS, arithmetic, as_built, embedded_by
    from trtopt.engine.reports import built_for

    yield f"{report.engine}: {report.maker}, {report.nbytes / 2**20:.1f} MiB"
    yield f"runs on {report.runs_on}"
    yield from (f"  {part}" for part in REASONS.split(report.precision_summary))
    if (manifest := report.manifest) is not None:
        if line := arithmetic(manifest.coverage):
            yield f"  {line}"
        asked = manifest.spec["precision"] + (" with INT4 weights" if manifest.spec.get("int4") else "")
        yield f"  for {built_for(manifest) or '?'}; asked for {asked}; built in {manifest.seconds:.1f} s"
        for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
            for info in as_built(tensors, manifest):
                holds = (manifest.output_kinds or {}).get(info.name) if kind == "output" else None
                yield f"  {kind} {info.name}: {info.dtype} {x(info.shape)}{f', {holds}' if holds else ''}"
        if (preprocessing := embedded_by(manifest)) is not None:
            yield f"  preprocessing embedded: {preprocessing.sentence}"
        for number, profile in enumerate(manifest.profiles):
            yield f"  profile {number}: {'; '.join(f'{name}:{shape}' for name, shape in profile.items())}"
        if manifest.calibration:
            samples = manifest.calibration["samples"]
            yield f"  calibrated: {manifest.calibration['method']}{f', {samples} samples' if samples else ''}"
        if manifest.comparison:
            yield f"  {manifest.comparison['why']} on {manifest.comparison['gpu']}"
    held = {"plan": "plan", "workspace_limit": "workspace at most", "scratch": "scratch of a context"}
    if parts := [f"{what} {memory_size(report.memory[key])}" for key, what in held.items() if report.memory.get(key)]:
        yield f"  memory: {', '.join(parts)}"
    for note in report.notes:
        yield f"  note: {note}"


def memory_size(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / 2**30:.1f} GiB"
