"""Try check, FP16 and INT8 builds (TensorRT-RTX, sm89, no GPU) on models that no test names.

    scripts/zoo                          all of them; writes zoo-out/zoo.json and prints a table
    scripts/zoo resnet18 silero          those whose names start so
    scripts/zoo --sample 3 --seed abc    three short ones that need no download, chosen by the seed

Each model runs in a process of its own. Inputs are made up: they give every tensor a scale, which is what coverage needs, and
say nothing of accuracy. Exit status 1 if a model is neither built with known precision nor refused by a part's name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from zoo_models import LONG, ZOO, Entry

TIMEOUT = 1800.0  # seconds for one model
SAMPLES = 8  # made-up ones, to calibrate
BATCH = (1, 4, 8)
OTHER = 64  # the size of a dynamic dimension that nothing is said of
LOCAL = ("torchvision", "transformers", "own", "onnx")  # groups that need no package of zoo.lock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("zoo-out"))
    parser.add_argument("--packages", type=Path, help="where zoo.lock is installed; default: FOLDER/packages")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", default="")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    packages = given.packages or given.folder / "packages"
    if given.one:
        entry = next(item for item in ZOO if item.name == given.one)
        print(json.dumps(tried(entry, given.folder, packages)))
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    entries = [item for item in ZOO if not given.names or any(item.name.startswith(name) for name in given.names)]
    if given.sample:
        entries = sample(entries, given.sample, given.seed)
    if any(entry.group == "packages" for entry in entries):
        install(packages)
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda entry: in_a_process(entry, given.folder, packages), entries))
    (given.folder / "zoo.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))
    bad = [row["name"] for row in rows if not all(fine(row, kind) for kind in ("fp16", "int8"))]
    print(
        f"\n{len(rows)} models; {len(bad)} neither built with known precision nor refused by name: {', '.join(bad) or 'none'}"
    )
    return 1 if bad else 0


def sample(entries: list[Entry], count: int, seed: str) -> list[Entry]:
    """`count` short models of different groups where there are enough, the same for equal seeds; nothing needs a download."""
    local = [entry for entry in entries if entry.group in LOCAL and entry.name not in LONG]
    random.Random(hashlib.sha256(seed.encode()).hexdigest()).shuffle(local)
    chosen: list[Entry] = []
    while local and len(chosen) < count:
        groups = {entry.group for entry in chosen[len(chosen) // len(LOCAL) * len(LOCAL) :]}
        entry = next((item for item in local if item.group not in groups), local[0])
        local.remove(entry)
        chosen.append(entry)
    return chosen


def install(folder: Path) -> None:
    lock = Path(__file__).parent.parent / "zoo.lock"
    if not (folder / ".installed").is_file() or (folder / ".installed").read_text() != lock.read_text():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--upgrade"]
        subprocess.run([*command, "--target", str(folder), "-r", str(lock)], check=True)
        (folder / ".installed").write_text(lock.read_text())


def in_a_process(entry: Entry, folder: Path, packages: Path) -> dict[str, Any]:
    """The row of one model; what ends its process is part of the row."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--one", entry.name, "--folder", str(folder), "--packages", str(packages)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        said = f"its process ended with status {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        row, said = None, f"not done in {TIMEOUT:.0f} s"
    if row is None:
        broken = {"state": "broken", "text": said}
        row = {"name": entry.name, "group": entry.group, "check": [], "fp16": broken, "int8": broken}
    row["seconds"] = round(time.monotonic() - started, 1)
    print(
        f"{entry.name}: {row['fp16']['state']}, {row['int8']['state']} ({row['seconds']:.0f} s)",
        file=sys.stderr,
        flush=True,
    )
    return row


def tried(entry: Entry, folder: Path, packages: Path) -> dict[str, Any]:
    """check, FP16 and INT8 of one model."""
    import trtopt
    from trtopt.graph.io import load_model
    from trtopt.graph.passes.quantize import is_quantized

    row: dict[str, Any] = {"name": entry.name, "group": entry.group}
    try:
        path = entry.file(folder, packages)
    except trtopt.TrtoptError as error:
        broken = {"state": "not exported", "text": str(error)}
        return row | {"check": [], "fp16": broken, "int8": broken}
    model = load_model(path)
    names = parts_of(model.proto)
    shapes = profile(entry, model.inputs)
    options = {
        "backend": "rtx",
        "target": "sm89",
        "shapes": [shapes] if shapes else [],
        "compare": False,
        "force": True,
    }
    report = trtopt.check(path, backend="rtx", target="sm89")
    row |= {"opset": model.opset, "producer": model.proto.producer_name, "nodes": len(model.proto.graph.node)}
    row["check"] = [str(item) for item in report.findings if item.level == "error"]
    row["fp16"] = outcome(
        lambda: trtopt.build(path, folder / f"{safe(entry.name)}.fp16.engine", fp16=True, **options), names
    )

    def int8() -> Any:
        more: dict[str, Any] = {}
        if not is_quantized(model.proto):
            data = made_up(entry, model.inputs)
            table = folder / f"{safe(entry.name)}.calib.json"
            trtopt.calibrate(path, table, data=data, allow_unusual_data=True, method="minmax", cache=False)
            more["calib"] = table
        return trtopt.build(path, folder / f"{safe(entry.name)}.int8.engine", int8=True, **more, **options)

    row["int8"] = outcome(int8, names)
    for engine in folder.glob(f"{safe(entry.name)}.*.engine*"):
        engine.unlink()
    return row


def outcome(work: Any, names: set[str]) -> dict[str, Any]:
    """What a build gave: "built", "unknown" (its precision isn't), "refused" (by name), "unnamed" or "internal"."""
    import trtopt

    try:
        result = work()
    except trtopt.TrtoptError as error:
        text = " ".join(str(error).split())
        named = any(name in text for name in names)
        return {"state": "refused" if named else "unnamed", "error": type(error).__name__, "text": text[:600]}
    except Exception as error:
        return {"state": "internal", "error": type(error).__name__, "text": str(error)[:600]}
    reasons = Counter(item.reason for item in result.kept)
    known = "can't be read" not in result.precision_summary
    return {
        "state": "built" if known else "unknown",
        "text": counts(result.precision_summary) if known else result.precision_summary,
        "precision_summary": result.precision_summary,
        "coverage": dict(result.coverage),
        "kept": dict(reasons.most_common(5)),
        "seconds": round(result.seconds, 1),
    }


def counts(summary: str) -> str:
    """Of the line that says what an engine runs: the counts, without what was kept and why."""
    parts = [part for part in summary.split("; ") if re.match(r"\d+ of \d+ ", part)]
    return "; ".join(parts) or summary.split("; ")[0]


def parts_of(proto: Any) -> set[str]:
    """Names of nodes, tensors and inputs: one of them makes a reason a reason "by name"."""
    graph = proto.graph
    names = {value.name for value in (*graph.input, *graph.output)} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        names |= {node.name, *node.output, node.op_type}
    return {name for name in names if len(name) > 1}


def dynamic(entry: Entry, info: Any) -> list[int | None]:
    """An input's sizes at the optimum; None: the batch."""
    sizes: list[int | None] = []
    for axis, size in enumerate(info.shape):
        if isinstance(size, int) and size > 0:
            sizes.append(size)
        elif (said := entry.sizes.get(f"{info.name}:{axis}", entry.sizes.get(str(size)))) is not None:
            sizes.append(said)
        elif axis == 0 or str(size).startswith(("batch", "N")):
            sizes.append(None)
        else:
            sizes.append(OTHER)
    return sizes


def profile(entry: Entry, inputs: Any) -> str:
    """One profile in the command line's words; empty where nothing is dynamic."""
    parts = []
    for info in inputs:
        if any(not isinstance(size, int) or size < 0 for size in info.shape):
            sizes = dynamic(entry, info)
            ranges = ["x".join(str(batch if size is None else size) for size in sizes) for batch in BATCH]
            parts.append(f"{info.name}:{','.join(ranges)}")
    return ";".join(parts)


def made_up(entry: Entry, inputs: Any) -> dict[str, Any]:
    import numpy as np

    generator, arrays = np.random.default_rng(0), {}
    for info in inputs:
        sizes = [SAMPLES if size is None else size for size in dynamic(entry, info)]
        if info.shape and info.shape[0] == 1:
            sizes[0] = SAMPLES
        if info.dtype.startswith("float") and len(sizes) < 2:  # a number for each sample is often a size or a time
            arrays[info.name] = generator.uniform(0.1, 1, sizes).astype(info.dtype)
        elif info.dtype.startswith("float"):
            arrays[info.name] = generator.standard_normal(sizes).astype(info.dtype)
        else:
            arrays[info.name] = generator.integers(0, 2, sizes).astype(info.dtype)
    return arrays


def safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def fine(row: dict[str, Any], kind: str) -> bool:
    return row[kind]["state"] in ("built", "refused")


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | group | FP16 | INT8 | INT8's share of the arithmetic | s |", "|---|---|---|---|---|---|"]
    for row in rows:
        share = row["int8"].get("coverage", {}).get("int8")
        said = "" if row["int8"]["state"] != "built" else f"{share or 0:.1%}"
        cells = [
            row["name"],
            row["group"],
            *(cell(row[kind]) for kind in ("fp16", "int8")),
            said,
            f"{row['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(result: dict[str, Any]) -> str:
    text = result["text"] if result["state"] == "built" else f"{result['state']}: {result['text'][:160]}"
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
