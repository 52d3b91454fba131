"""INT8 builds of models on this machine's GPU, two profiles (batch 1; 32), beside FP16: one table row a model.

    python benchmarks/zoo_gpu.py FOLDER NAME... [--level N] [--no-compare]

FOLDER holds NAME.onnx and NAME.calib.json for each (trtopt export, trtopt calibrate). Each row is kept as FOLDER/NAME.row.json
when it is done; the last thing printed is the table of all rows there. After --no-compare a second run only adds the times:
the INT8 engines are there. $CUDA_VISIBLE_DEVICES chooses the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common  # noqa: F401

import trtopt
from trtopt.core.progress import Reporter
from trtopt.graph.io import load_model

COLUMNS = (
    "model",
    "INT8 build, s",
    "FP16 build, s",
    "batch 1: INT8 / FP16, ms",
    "batch 32: INT8 / FP16, ms",
    "INT8's share",
    "left in FP32",
    "what it runs",
)


class _Said(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


def row(folder: Path, name: str, level: int | None, compare: bool = True) -> dict[str, Any]:
    said, started = _Said(), time.monotonic()
    model = folder / f"{name}.onnx"
    info = load_model(model).inputs[0]
    shapes = [f"{info.name}:{'x'.join(map(str, (batch, *info.shape[1:])))}" for batch in (1, 32)]
    found: dict[str, Any] = {"name": name, "level": level}
    try:
        result = trtopt.build(
            model,
            folder / f"{name}.int8.engine",
            int8=True,
            calib=folder / f"{name}.calib.json",
            shapes=shapes,
            optimization_level=level,
            compare=compare,
            reporter=said,
        )
    except trtopt.TrtoptError as error:
        return found | {"error": f"{type(error).__name__}: {error}", "said": said.lines}
    manifest = trtopt.load_manifest(result.engine)
    assert manifest is not None
    kept_fp32 = {item["node"] for item in manifest.kept if item["precision"] == "fp32"}
    heavy = [item for item in manifest.layers if item["kind"] != "other" and item["precision"] == "fp32"]
    return found | {
        "precision_summary": result.precision_summary,
        "coverage": dict(result.coverage),
        "seconds": round(manifest.seconds, 1),
        "total": round(time.monotonic() - started, 1),
        "fp32": [item["name"] for item in heavy if not kept_fp32 & set(item["nodes"])],
        "others_fp32": sum(item["precision"] == "fp32" for item in manifest.layers) - len(heavy),
        "layers": len(manifest.layers),
        "comparison": dict(result.comparison) if result.comparison else None,
        "not_measured": result.not_measured,
        "said": said.lines,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for item in rows:
        if "error" in item:
            lines.append(f"| {item['name']} | {item['error'][:300]} |" + " |" * (len(COLUMNS) - 2))
            continue
        candidates = {one["precision"]: one for one in (item["comparison"] or {}).get("candidates", ())}
        times = [
            " / ".join(f"{candidates[which]['times'][index]['gpu_ms']:.4f}" for which in ("int8", "fp16"))
            if {"int8", "fp16"} <= candidates.keys()
            else item["not_measured"]
            for index in range(2)
        ]
        fp16 = f"{candidates['fp16']['seconds']:.0f}" if "fp16" in candidates else ""
        cells = [
            item["name"], f"{item['seconds']:.0f}", fp16, *times, f"{item['coverage'].get('int8', 0):.1%}",
            ", ".join(item["fp32"]) or "nothing", item["precision_summary"].split("; ")[0],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--level", type=int)
    parser.add_argument("--no-compare", action="store_true", help="INT8 alone, without FP16 and times")
    given = parser.parse_args()
    for name in given.names:
        found = row(given.folder, name, given.level, not given.no_compare)
        (given.folder / f"{name}.row.json").write_text(json.dumps(found, indent=1))
        print(name, found.get("total"), found.get("precision_summary", found.get("error")), flush=True)
    print(table([json.loads(path.read_text()) for path in sorted(given.folder.glob("*.row.json"))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
