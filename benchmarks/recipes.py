"""Measured results of the model recipes: what `trtopt pipeline` gave, each row with its command.

    python benchmarks/recipes.py run FOLDER NAME... [--precision int8 --precision fp16] [--target sm89] [--backend tensorrt]
    python benchmarks/recipes.py table [--check]

`run` runs the pipelines into FOLDER and keeps a row of each in docs/results/recipes.json, in place of an earlier one of the
same recipe, precision, product and GPU; `table` writes docs/results/recipes.md and the short table of models/README.md from
these rows. No row is written by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from trtopt.engine.manifest import Manifest, load_manifest
from trtopt.recipes.loader import known_recipes

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "results" / "recipes.json"
PAGE, README = ROOT / "docs" / "results" / "recipes.md", ROOT / "models" / "README.md"
BEGIN, END = "<!-- rows: benchmarks/recipes.py table -->", "<!-- end of rows -->"
COLUMNS = (
    "recipe",
    "layers with products",
    "arithmetic",
    "layers with ONNX nodes",
    "kept",
    "MB",
    "agrees with FP32",
    "GPU time",
    "command",
)
AGREEMENT = ("samples", "snr_db", "top1_agreement", "reference_accuracy", "candidate_accuracy")
BOTH = "efficientnet-lite0"  # has real weights and labelled photos
MOST = 3  # reasons to keep nodes that are told


def measured(folder: Path, name: str, precision: str, options: list[str]) -> dict[str, Any]:
    """Run a recipe and return its row."""
    command = ["trtopt", "pipeline", name, "-o", str(Path("out", name)), "--precision", precision, *options]
    said = typed(folder, command)
    manifest = load_manifest(folder / said["files"]["engine"])
    assert manifest is not None
    sizes = said["sizes"]["ONNX"], said["sizes"]["engine"]
    times = said["timing"] and {"8": said["timing"]["gpu"]["median"]}
    return {
        **facts(name, precision, [command], manifest, sizes),
        "agreement": said["agreement"] and {name: said["agreement"][name] for name in AGREEMENT},
        "compared_on": said["compared_on"],
        "timing": times,
        "not_run": said["not_run"],
    }


def typed(folder: Path, command: list[str], seconds: float | None = None) -> dict[str, Any]:
    """What a command prints with --json, run in `folder`. Raises CalledProcessError and TimeoutExpired."""
    arguments = [sys.executable, "-m", *command, "--json"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        arguments,
        cwd=folder,
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=seconds,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def facts(
    name: str, precision: str, commands: list[list[str]], manifest: Manifest, sizes: tuple[int, int]
) -> dict[str, Any]:
    """What a row says of an engine by its manifest; `sizes`: bytes of the FP32 model and of the engine."""
    reasons: dict[str, int] = {}
    for item in manifest.kept:
        reasons[item["reason"]] = reasons.get(item["reason"], 0) + 1
    made = manifest.generation
    return {
        "recipe": name,
        "precision": precision,
        "command": "; ".join(map(shlex.join, commands)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "product": f"{made['product']} {made['version']}",
        "gpu": made["gpu"],
        "host": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "targets": list(manifest.targets),
        "layers": [part for part in manifest.precision_summary.split("; ") if " of " in part and "kept in" not in part],
        "coverage": dict(manifest.coverage),
        "placed": [sum(bool(item["nodes"] or item.get("follows")) for item in manifest.layers), len(manifest.layers)],
        "kept": reasons,
        "model_bytes": sizes[0],
        "engine_bytes": sizes[1],
    }


# The table ---------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return rows


def key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["recipe"], row["precision"], row["product"], str(row["gpu"])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, those of a product, GPU and day under one line."""
    text = []
    for group in sorted({_where(row) for row in rows}):
        text += [f"{group}:", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        text += [_line(row) for row in sorted(rows, key=key) if _where(row) == group] + [""]
    return "\n".join(text)


def _where(row: dict[str, Any]) -> str:
    place = row["gpu"] or f"no GPU; for {', '.join(row['targets'])}"
    return f"{row['product']}, {place}, {row['date']}, {row['host']}"


def _line(row: dict[str, Any]) -> str:
    shares = ", ".join(
        f"{share:.1%} {name.upper()}" for name, share in sorted(row["coverage"].items(), key=lambda i: -i[1])
    )
    kept = sorted(row["kept"].items(), key=lambda item: (-item[1], item[0]))
    told = "; ".join(
        f"{count}: {reason.partition('; to do it')[0]}" for reason, count in kept[:MOST]
    ) + f"; {len(kept) - MOST} more reason{'s' * (len(kept) > MOST + 1)}" * (len(kept) > MOST)
    time = _times(row) or "not run"
    if layers := row.get("profiled"):
        time += f" ({layers['layers']} layers one by one {layers['layers_ms']:.4g}, {_apart(layers)})"
    sizes = f"{row['model_bytes'] / 1e6:.1f} → {row['engine_bytes'] / 1e6:.1f}"
    cells = (
        f"`{row['recipe']}`",
        "; ".join(row["layers"]),
        shares or "not known",
        f"{row['placed'][0]} of {row['placed'][1]}",
        told or "none",
        sizes,
        _agreement(row),
        time,
        f"`{row['command']}`",
    )
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def short_table(rows: list[dict[str, Any]]) -> str:
    """Return a row for each recipe in INT8, and for `BOTH` in FP16, too, as measured on a GPU where it was."""
    text = ["", "| model | precision | agreement with FP32 | ms on a GPU | command |", "|---|---|---|---|---|"]
    pairs = [(BOTH, "int8"), (BOTH, "fp16"), *((name, "int8") for name in known_recipes() if name != BOTH)]
    for name, precision in pairs:
        found = [row for row in rows if (row["recipe"], row["precision"]) == (name, precision)]
        row = max(found, key=lambda row: (bool(row["timing"]), row["agreement"] is not None))
        cells = (
            f"`{name}`",
            precision.upper(),
            _agreement(row),
            f"{_times(row)} ({row['gpu'].partition(' (')[0]}, {row['product']})" if row["timing"] else "not run",
            f"`trtopt pipeline {name} -o out/{name} --precision {precision}`",
        )
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n\n"


def _agreement(row: dict[str, Any]) -> str:
    agreement = row["agreement"]
    if agreement is None:
        return "not measured"
    same = "" if agreement["top1_agreement"] is None else f"same class {agreement['top1_agreement']:.0%}, "
    return f"{same}{float(agreement['snr_db']):.1f} dB on {agreement['samples']} {row['compared_on']}"


def _times(row: dict[str, Any]) -> str:
    return "; ".join(f"{ms:.4g} ms at batch {size}" for size, ms in (row["timing"] or {}).items())


def _apart(layers: dict[str, Any]) -> str:
    """How far the layers' sum is from the whole inference that was timed beside it."""
    return f"{layers['layers_ms'] / layers['whole_ms'] - 1:+.0%}"


def page(content: str, text: str) -> str:
    """Return the page with `text` between its marks."""
    before, _, rest = content.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    run = parts.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("names", nargs="+")
    run.add_argument("--precision", action="append")
    run.add_argument("--target")
    run.add_argument("--backend")
    parts.add_parser("table").add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.what == "run":
        given.folder.mkdir(parents=True, exist_ok=True)
        options = [
            word
            for name in ("target", "backend")
            if getattr(given, name)
            for word in (f"--{name}", getattr(given, name))
        ]
        for name in given.names:
            for precision in given.precision or ("int8", "fp16"):
                row = measured(given.folder, name, precision, options)
                kept = {key(item): item for item in [*read(ROWS), row]}
                rows = sorted(kept.values(), key=key)
                lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
                ROWS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
                print(_line(row))
        return
    for path, made in ((PAGE, table), (README, short_table)):
        content = path.read_text(encoding="utf-8")
        new = page(content, made(read(ROWS)))
        if given.check and content != new:
            sys.exit(f"{path} isn't what {ROWS} says: python benchmarks/recipes.py table")
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
