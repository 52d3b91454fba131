"""Engines of networks that are reported to be computed wrong, and of others, built and certified: a table.

    python benchmarks/certify.py FOLDER [NAME...] [--level N] [--precisions fp32,fp16,int8] [--seconds S] [--jobs N]

FOLDER holds NAME.onnx and NAME.npz, as benchmarks/certify_inputs.py writes them. Each engine has one profile for batches of 1
to 12, tuned for 8, and keeps its graph. Without a GPU engines are TensorRT-RTX's (sm89) and their graphs are tried. Rows are
kept as FOLDER/NAME.PRECISION.certified.json and aren't made twice; after S seconds no further one is begun. N jobs are
processes of two cores each, in turns on the GPUs that there are, with timing caches of their own; each row may take 300 s, and
the largest models come last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common  # noqa: F401

import trtopt
from trtopt.core.errors import TrtoptError
from trtopt.cuda.device import probe
from trtopt.graph.io import load_model

BATCHES = (1, 8, 12)
OPTIONS: dict[str, dict[str, Any]] = {"fp32": {"tf32": False}, "fp16": {"fp16": True}, "int8": {"int8": True}}


def certified(folder: Path, name: str, precision: str, level: int | None) -> dict[str, Any]:
    """Build and certify one engine: a row."""
    model, engine = folder / f"{name}.onnx", folder / f"{name}.{precision}.engine"
    profile = ";".join(
        f"{info.name}:{','.join('x'.join(map(str, (size, *info.shape[1:]))) for size in BATCHES)}"
        for info in load_model(model, lazy=True).inputs
    )
    options: dict[str, Any] = {"shapes": profile, "save_onnx": engine.with_suffix(".onnx"), "compare": False}
    options |= {"optimization_level": level} if probe() else {"backend": "rtx", "target": "sm89"}
    if precision == "int8":
        options["data"] = folder / f"{name}.npz"
    row: dict[str, Any] = {"network": name, "precision": precision, "level": level}
    try:
        built = trtopt.build(model, engine, **OPTIONS[precision], **options)
        row |= {"build_s": round(built.seconds, 1), "runs": built.precision_summary}
        found = trtopt.certify(model, engine, data=folder / f"{name}.npz", locate=True)
    except TrtoptError as error:
        return row | {"ok": None, "said": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    between = [item for item in found.relations if item.name != "the model as given"]
    lowest = {
        "model": min((item.worst_db for item in found.relations if item not in between), default=math.inf),
        "itself": min((item.worst_db for item in between), default=math.inf),
    }
    row |= {"ok": found.ok, "trials": len(found.relations), "s": found.seconds, **lowest, "ran": found.ran}
    return row | {"left_out": list(found.left_out), "said": "" if found.ok else str(found)}


def table(rows: list[dict[str, Any]]) -> str:
    def shown(value: Any) -> str:
        return (
            "-"
            if value is None
            else "to the bit"
            if value == math.inf
            else f"{value:.1f}"
            if isinstance(value, float)
            else str(value)
        )

    lines = [
        "| network | precision | level | right | dB to the model | dB to itself | trials | certify s | build s |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        right = {True: "yes", False: "**NO**", None: "not built"}[row["ok"]]
        cells = (row.get(key) for key in ("model", "itself", "trials", "s", "build_s"))
        own = f"{row['network']} | {row['precision']} | {shown(row.get('level'))}"
        lines.append(f"| {own} | {right} | {' | '.join(map(shown, cells))} |")
    lines += ["", *(f"{row['network']} {row['precision']}: {row['said']}" for row in rows if row["said"])]
    return "\n".join(lines)


def in_processes(tasks: list[tuple[str, str]], given: argparse.Namespace) -> None:
    """Make the rows of (name, precision) pairs, each in a process."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(probe().devices))))).split(",")
    places: queue.Queue[int] = queue.Queue()
    for place in range(given.jobs):
        places.put(place)
    cores, level, end = sorted(os.sched_getaffinity(0)), given.level, time.monotonic() + given.seconds

    def make(name: str, precision: str) -> None:
        if time.monotonic() > end or (given.folder / f"{name}.{precision}.certified.json").is_file():
            return
        place = places.get()
        own = {cores[(2 * place + at) % len(cores)] for at in range(2)}
        cache = {"TRTOPT_CACHE": str(given.folder / f"cache.{name}.{precision}")}
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]}
        line = [sys.executable, __file__, str(given.folder), name, "--precisions", precision]
        try:
            subprocess.run(
                line + ([] if level is None else ["--level", str(level)]),
                env=os.environ | cache | gpu,
                preexec_fn=lambda: os.sched_setaffinity(0, own),
                stdout=subprocess.DEVNULL,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{name} {precision}: not done in 300 s", flush=True)
        finally:
            places.put(place)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda task: make(*task), tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--level", type=int)
    parser.add_argument("--precisions", default=",".join(OPTIONS))
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    names = given.names or sorted(path.stem for path in given.folder.glob("*.npz"))
    rows, end = list[dict[str, Any]](), time.monotonic() + given.seconds
    if given.jobs > 1:
        by_size = sorted(names, key=lambda name: (given.folder / f"{name}.onnx").stat().st_size)
        in_processes([(name, kind) for name in by_size for kind in given.precisions.split(",")], given)
        end = 0.0
    for name in names:
        for precision in given.precisions.split(","):
            kept = given.folder / f"{name}.{precision}.certified.json"
            if not kept.is_file() and time.monotonic() < end:
                kept.write_text(json.dumps(certified(given.folder, name, precision, given.level)))
                print(kept.read_text()[:200], flush=True)
            rows += [json.loads(kept.read_text())] if kept.is_file() else []
    print(table(rows))


if __name__ == "__main__":
    main()
