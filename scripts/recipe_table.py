"""The table of measured results in trtopt/recipes/models/README.md: what `trtopt pipeline` gave, each row with its command.

    python scripts/recipe_table.py run FOLDER NAME... [--precision int8 --precision fp16] [--target sm89] [--backend tensorrt]
    python scripts/recipe_table.py table [--check]

`run` runs the pipelines into FOLDER and keeps a row of each in docs/results/recipes.json, in place of an earlier one of the
same recipe, precision, product and GPU; `table` writes the table from these rows. No row is written by hand.
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

from trtopt.engine.manifest import load_manifest

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "results" / "recipes.json"
PAGE = ROOT / "trtopt" / "recipes" / "models" / "README.md"
BEGIN, END = "<!-- rows: scripts/recipe_table.py table -->", "<!-- end of rows -->"
COLUMNS = ("recipe", "layers with products", "arithmetic", "kept", "MB", "agrees with FP32", "GPU time", "command")
AGREEMENT = ("samples", "snr_db", "top1_agreement", "reference_accuracy", "candidate_accuracy")
MOST = 3  # reasons to keep nodes that are told


def measured(folder: Path, name: str, precision: str, options: list[str]) -> dict[str, Any]:
    """Run a recipe and give its row."""
    command = ["trtopt", "pipeline", name, "-o", str(Path("out", name)), "--precision", precision, *options]
    typed = [sys.executable, "-m", *command, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(typed, cwd=folder, stdout=subprocess.PIPE, check=True, env=environment)
    said = json.loads(done.stdout)
    manifest = load_manifest(folder / said["files"]["engine"])
    assert manifest is not None
    reasons: dict[str, int] = {}
    for item in manifest.kept:
        reasons[item["reason"]] = reasons.get(item["reason"], 0) + 1
    made = manifest.generation
    return {
        "recipe": name,
        "precision": precision,
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "product": f"{made['product']} {made['version']}",
        "gpu": made["gpu"],
        "host": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "targets": list(manifest.targets),
        "layers": [part for part in manifest.precision_summary.split("; ") if " of " in part and "kept in" not in part],
        "coverage": dict(manifest.coverage),
        "kept": reasons,
        "model_bytes": said["sizes"]["ONNX"],
        "engine_bytes": said["sizes"]["engine"],
        "agreement": said["agreement"] and {name: said["agreement"][name] for name in AGREEMENT},
        "compared_on": said["compared_on"],
        "timing": said["timing"],
        "not_run": said["not_run"],
    }


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
    ) + f"; {len(kept) - MOST} more reasons" * (len(kept) > MOST)
    agreement, said = row["agreement"], "not measured"
    if agreement is not None:
        same = "" if agreement["top1_agreement"] is None else f"same class {agreement['top1_agreement']:.0%}, "
        said = f"{same}{float(agreement['snr_db']):.1f} dB on {agreement['samples']} {row['compared_on']}"
    time = "not run" if row["timing"] is None else f"{row['timing']['gpu']['median']:.4g} ms"
    sizes = f"{row['model_bytes'] / 1e6:.1f} → {row['engine_bytes'] / 1e6:.1f}"
    cells = (
        f"`{row['recipe']}`",
        "; ".join(row["layers"]),
        shares or "not known",
        told or "none",
        sizes,
        said,
        time,
        f"`{row['command']}`",
    )
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def page(content: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table of these rows."""
    before, _, rest = content.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(rows)}{END}{after}"


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
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else []
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
                rows = sorted([*(other for other in rows if key(other) != key(row)), row], key=key)
                ROWS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                print(_line(row))
        return
    content = PAGE.read_text(encoding="utf-8")
    if given.check:
        sys.exit(
            0
            if content == page(content, rows)
            else f"{PAGE} isn't what {ROWS} says: python scripts/recipe_table.py table"
        )
    PAGE.write_text(page(content, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
