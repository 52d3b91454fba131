"""The table of measured results in trtopt/recipes/models/README.md: what `trtopt pipeline` gave, each row with its command.

    python scripts/recipe_table.py run FOLDER NAME... [--precision int8 --precision fp16] [--target sm89] [--backend tensorrt]
    python scripts/recipe_table.py pack FOLDER NAME...
    python scripts/recipe_table.py gpu FOLDER ROWS.json NAME[=PRECISION]... [--level 1] [--jobs 2]
                                           [--until SECONDS] [--longest SECONDS]
    python scripts/recipe_table.py add ROWS.json...
    python scripts/recipe_table.py table [--check]

`run` runs the pipelines into FOLDER and keeps a row of each in docs/results/recipes.json, in place of an earlier one of the
same recipe, precision, product and GPU; `table` writes the table from these rows. No row is written by hand.

For a machine with a GPU and no PyTorch: `pack` writes FOLDER/NAME.tar.xz of what a pipeline left in FOLDER/out/NAME (model,
scales, manifest, and some samples as arrays where weights are real); unpacked into another FOLDER there, `gpu` builds engines
of it, holds them against FP32, measures them one by one when all are built, and writes ROWS.json; `add` keeps these rows.
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
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.core.values import ShapeRange
from trtopt.data import open_data
from trtopt.data.rebatch import joined
from trtopt.engine.manifest import Manifest, load_manifest, read_manifest
from trtopt.graph.io import load_model
from trtopt.recipes.loader import load_recipe

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "results" / "recipes.json"
PAGE = ROOT / "trtopt" / "recipes" / "models" / "README.md"
BEGIN, END = "<!-- rows: scripts/recipe_table.py table -->", "<!-- end of rows -->"
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
MOST = 3  # reasons to keep nodes that are told
COMPARED = 20  # samples that travel to another machine


def measured(folder: Path, name: str, precision: str, options: list[str]) -> dict[str, Any]:
    """Run a recipe and give its row."""
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


# On a machine with a GPU and no PyTorch ----------------------------------------------------------------------------------


def pack(folder: Path, name: str) -> Path:
    """What `gpu` needs of the pipeline of a recipe in `folder`, in one file."""
    place, recipe = folder / "out" / name, load_recipe(name)
    files = [place / f"{name}.onnx", place / f"{name}.calib.json", _manifest_file(place)]
    if recipe.weights is not None or recipe.onnx is not None or recipe.data is not None:  # else they are random
        photos = recipe.labelled_files()
        preprocess = recipe.preprocess
        where: dict[str, Any] = {"images": list(photos), "preprocess": preprocess} if photos else {"data": recipe.data}
        if not photos and recipe.data is None:
            where = {"images": place / "calibration", "preprocess": preprocess}
        samples = joined(open_data(load_model(files[0]).inputs, **where, batch=4, limit=COMPARED))
        np.savez_compressed(place / f"{name}.npz", **samples)  # type: ignore[arg-type]
        files.append(place / f"{name}.npz")
    packed = folder / f"{name}.tar.xz"
    with tarfile.open(packed, "w:xz") as archive:
        for file in files:
            archive.add(file, arcname=str(Path("out", name, file.name)))
    return packed


def _manifest_file(place: Path) -> Path:
    """The manifest of the pipeline's engine: it says the shapes."""
    return next(iter(sorted(place.glob(f"{place.name}.*.engine.json"))))


def engine_of(
    folder: Path, name: str, precision: str, level: int, longest: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Build an engine of what was packed, and hold it against FP32; the command, and what a row says of it."""
    place = Path("out", name)
    model, engine = place / f"{name}.onnx", place / f"{name}.{precision}.gpu.engine"
    shapes = [f"{key}:{text}" for key, text in _shapes(folder / place).items()]
    options = [word for text in shapes for word in ("--shapes", text)]
    scales = ["--calib", str(place / f"{name}.calib.json"), "--no-compare"] if precision == "int8" else []
    command = ["trtopt", "build", str(model), f"--{precision}", *scales, *options, "--optimization-level", str(level)]
    command += ["-o", str(engine)]
    typed(folder, command, longest)
    manifest = load_manifest(folder / engine)
    assert manifest is not None
    row = facts(name, precision, [command], manifest, tuple((folder / f).stat().st_size for f in (model, engine)))  # type: ignore[arg-type]
    row |= {"agreement": None, "compared_on": "", "timing": None, "not_run": "", "build_seconds": manifest.seconds}
    samples = place / f"{name}.npz"
    if (folder / samples).is_file():
        try:
            said = typed(folder, ["trtopt", "verify", str(model), str(engine), "--data", str(samples)], longest)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{engine}: not compared: {error}", file=sys.stderr)  # the engine is there, and can be timed
        else:
            row["agreement"] = {key: said.get(key) for key in AGREEMENT}
            row["compared_on"] = "samples"
    return command, row


def _shapes(place: Path) -> dict[str, str]:
    return dict(read_manifest(_manifest_file(place)).profiles[0])


def times(folder: Path, name: str, command: list[str], row: dict[str, Any]) -> None:
    """Measure a row's engine: its smallest and its largest batch, and the layers of that."""
    engine = command[-1]
    first = ShapeRange.parse(next(iter(_shapes(folder / "out" / name).values())))
    sizes = sorted({first.min[0], first.max[0]})
    bench = ["trtopt", "bench", engine, "--batch", ",".join(map(str, sizes))]
    profile = ["trtopt", "profile", engine, "--batch", str(sizes[-1])]
    try:
        for number, one in enumerate((bench, profile)):
            said = typed(folder, one)
            (folder / f"{engine}.{one[1]}.json").write_text(json.dumps(said), encoding="utf-8")
            if number == 0:
                row["timing"] = {str(item["batch"]): item["gpu"]["median"] for item in said["rows"] if item["gpu"]}
                row["notes"] = said["notes"]
            else:
                [layers] = said["batches"]
                row["profiled"] = {"layers": len(layers["layers"]), "layers_ms": layers["total_ms"]}
                row["profiled"]["whole_ms"] = layers["gpu"]["median"]
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        row["not_run"] = f"{shlex.join(one)}: {error}"
    row["command"] = "; ".join(map(shlex.join, (command, bench)))


def gpu(
    folder: Path,
    written: Path,
    wanted: list[tuple[str, str]],
    level: int,
    jobs: int,
    until: float | None,
    longest: float | None,
) -> bool:
    """Rows of engines built here, `jobs` at a time; none is begun after `until` seconds, or takes longer than `longest`. Says
    whether all could be made."""
    began, built, missing = time.monotonic(), dict[tuple[str, str], tuple[list[str], dict[str, Any]]](), list[str]()

    def build(name: str, precision: str) -> None:
        if until is not None and time.monotonic() - began > until:
            missing.append(f"{name} {precision}: {until:g} s were over")
            return
        try:
            built[name, precision] = engine_of(folder, name, precision, level, longest)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            missing.append(f"{name} {precision}: {error}")
        else:
            print(f"{time.monotonic() - began:.0f} s: built {name} {precision}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda pair: build(*pair), wanted))
    for pair in wanted:
        if pair in built:
            times(folder, pair[0], *built[pair])
            write(written, [row for _, row in built.values()])  # what is measured stays, whatever comes
            print(f"{time.monotonic() - began:.0f} s: {_line(built[pair][1])}", flush=True)
    for text in missing:
        print(f"no row: {text}", flush=True)
    return not missing and all(row["timing"] for _, row in built.values())


# The table ---------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def merged(rows: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with others in place of earlier ones of the same key."""
    return sorted({key(row): row for row in [*rows, *more]}.values(), key=key)


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
    agreement, said = row["agreement"], "not measured"
    if agreement is not None:
        same = "" if agreement["top1_agreement"] is None else f"same class {agreement['top1_agreement']:.0%}, "
        said = f"{same}{float(agreement['snr_db']):.1f} dB on {agreement['samples']} {row['compared_on']}"
    time = "; ".join(f"{ms:.4g} ms at batch {size}" for size, ms in (row["timing"] or {}).items()) or "not run"
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
        said,
        time,
        f"`{row['command']}`",
    )
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def _apart(layers: dict[str, Any]) -> str:
    """How far the layers' sum is from the whole inference that was timed beside it."""
    return f"{layers['layers_ms'] / layers['whole_ms'] - 1:+.0%}"


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
    packing = parts.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("names", nargs="+")
    there = parts.add_parser("gpu")
    there.add_argument("folder", type=Path)
    there.add_argument("rows", type=Path)
    there.add_argument("names", nargs="+")
    there.add_argument("--level", type=int, default=1)
    there.add_argument("--jobs", type=int, default=2)
    there.add_argument("--until", type=float)
    there.add_argument("--longest", type=float)
    parts.add_parser("add").add_argument("files", type=Path, nargs="+")
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
                write(ROWS, merged(read(ROWS), [row]))
                print(_line(row))
    elif given.what == "pack":
        for name in given.names:
            packed = pack(given.folder, name)
            print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")
    elif given.what == "gpu":
        pairs = [(name, precision or "int8") for name, _, precision in (text.partition("=") for text in given.names)]
        sys.exit(0 if gpu(given.folder, given.rows, pairs, given.level, given.jobs, given.until, given.longest) else 1)
    elif given.what == "add":
        write(ROWS, merged(read(ROWS), [row for path in given.files for row in read(path)]))
    else:
        content = PAGE.read_text(encoding="utf-8")
        made = page(content, read(ROWS))
        if given.check:
            sys.exit(0 if content == made else f"{PAGE} isn't what {ROWS} says: python scripts/recipe_table.py table")
        PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
