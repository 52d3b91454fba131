"""Faults planted into engines, each to be found and placed; random graphs, none of which is to be blamed; and cures.

    python benchmarks/certify_planted.py faults|heal|random FOLDER [--level N] [--part I/N] [--count N] [--seconds S]

faults: networks with acme::planted (benchmarks/custom/planted.cu, which is compiled here) at an early, a middle and a late
    place, one fault an engine; for each the relation and the node that certify names; the bundle's script is run, too.
heal: a fault that only the kernel in FP16 has, and a network that FP16 loses.
random: random graphs (tests/random_graphs.py) as engines in FP32 and FP16.

Each prints a JSON line; on a GPU with a TensorRT that builds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common  # noqa: F401
import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

import trtopt
from trtopt.core.errors import TrtoptError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
FAULTS = {
    1: "reads one channel too far",
    2: "third row from batch 3 on",
    3: "scale off by 2 at the profile's end",
    4: "last row isn't written",
    5: "not deterministic",
    6: "gate or mask left out",
    7: "third row, in FP16 alone",
}
PLACES = ("early", "middle", "late")
SHAPES = "x:1x3x32x32,4x3x32x32,12x3x32x32"
OPERATORS = str(Path(__file__).parent / "custom" / "planted.py")


def network(place: str, fault: int) -> ModelProto:
    """Three blocks with a gate (as of squeeze-and-excite) behind each; the fault is at one place."""
    random, weights, text, width = np.random.default_rng(0), dict[str, Any](), "", 3
    before = "x"
    for number, (name, wide) in enumerate(zip(PLACES, (16, 32, 32)), 1):
        weights[f"w{number}"] = (random.standard_normal((wide, width, 3, 3)) / math.sqrt(9 * width)).astype(np.float32)
        weights[f"v{number}"] = (random.standard_normal((wide, wide)) / math.sqrt(wide)).astype(np.float32)
        text += f"""[conv{number}] a{number} = Conv <pads = [1, 1, 1, 1]> ({before}, w{number})
        [relu{number}] b{number} = Relu (a{number}) [pool{number}] c{number} = GlobalAveragePool (b{number})
        [flat{number}] d{number} = Flatten (c{number}) [fc{number}] e{number} = MatMul (d{number}, v{number})
        [gate{number}] g{number} = Sigmoid (e{number})
        [{name}] p{number} = acme.planted <fault = {fault if name == place else 0}> (b{number}, g{number}) """
        before, width = f"p{number}", wide
    weights["u"] = (random.standard_normal((32, 10)) / 6).astype(np.float32)
    text += f"[mean] m = GlobalAveragePool ({before}) [last] f = Flatten (m) [fc] y = MatMul (f, u)"
    made = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]> net (float[n, 3, 32, 32] x) => (float[n, 10] y) {'
        + text
        + "}"
    )
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


def faults(folder: Path, level: int) -> Iterator[dict[str, Any]]:
    data = {"x": np.random.default_rng(1).standard_normal((16, 3, 32, 32), np.float32)}
    cases = [(fault, PLACES[fault % 3]) for fault in (0, *FAULTS)]
    for at, (fault, place) in enumerate(cases):
        half = fault == 7 or at % 2 == 1
        model, engine = folder / f"planted{fault}{place}.onnx", folder / f"planted{fault}{place}.engine"
        onnx.save(network(place, fault), model)
        options: dict[str, Any] = {"fp16": True} if half else {"tf32": False}
        options |= {"shapes": SHAPES, "optimization_level": level, "compare": False, "operators": OPERATORS}
        start = time.monotonic()
        trtopt.build(model, engine, save_onnx=engine.with_suffix(".kept.onnx"), **options)
        built, report = time.monotonic() - start, folder / f"report{fault}{place}"
        found = trtopt.certify(model, engine, data=data, operators=OPERATORS, bundle=report)
        row = {"fault": FAULTS.get(fault, "none"), "at": place, "precision": "fp16" if half else "fp32"}
        row |= {"found": not found.ok, "by": found.failed[0].name if found.failed else ""}
        row |= {
            "place": found.place.node if found.place else "",
            "vanishes": bool(found.place and found.place.vanishes),
        }
        row |= {"build_s": round(built, 1), "certify_s": found.seconds}
        if found.place is not None:
            row |= shown(report, engine)
        yield row


def shown(report: Path, engine: Path) -> dict[str, Any]:
    """Run a bundle's script: the rows that it finds wrong."""
    manifest = trtopt.load_manifest(engine)
    assert manifest is not None
    kept = Path(os.environ["TRTOPT_CACHE"]) / "plugins"
    libraries = [str(kept / item["library"]) for item in manifest.plugins]
    ran = subprocess.run(
        [sys.executable, "show.py", *libraries], cwd=report, capture_output=True, text=True, timeout=120, check=False
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("batch")]
    wrong = [line for line in lines if float(line.split()[-2]) < 20]
    nodes = len(onnx.load(report / "model.onnx").graph.node)
    return {
        "nodes": nodes,
        "script": f"{len(wrong)} of {len(lines)} rows wrong",
        "said": ran.stderr[-300:] if ran.returncode else "",
    }


def lost() -> ModelProto:
    """A mean over values that FP16 can't hold, between convolutions."""
    random = np.random.default_rng(0)
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 3, 32, 32] x) => (float[n, 10] y) {
        [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w) [large] c = Mul (a, k) [square] d = Mul (c, c)
        [mean] e = GlobalAveragePool (d) [root] f = Sqrt (e) [flat] g = Flatten (f) [fc] y = MatMul (g, u) }"""
    )
    weights = {
        "w": random.standard_normal((16, 3, 3, 3)) * 0.3,
        "k": np.array(400.0),
        "u": random.standard_normal((16, 10)) / 1000,
    }
    made.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    return made


def heal(folder: Path, level: int) -> Iterator[dict[str, Any]]:
    for name, model in (("third row, in FP16 alone", network("middle", 7)), ("lost in FP16", lost())):
        path = folder / f"heal{len(name)}.onnx"
        onnx.save(model, path)
        options: dict[str, Any] = {"operators": OPERATORS} if name.startswith("third") else {}
        try:
            result = trtopt.build(
                path,
                path.with_suffix(".engine"),
                fp16=True,
                heal=True,
                shapes=SHAPES,
                optimization_level=level,
                compare=False,
                **options,
            )
            row = {
                "right": result.ok,
                "trials": [str(trial) for trial in result.healing or ()],
                "s": round(result.seconds, 1),
            }
        except TrtoptError as error:
            row = {"right": False, "said": str(error)}
        yield {"network": name, **row}


def random(folder: Path, level: int, seeds: range, end: float) -> Iterator[dict[str, Any]]:
    from random_graphs import RandomGraph, Skip

    for seed in seeds:
        if time.monotonic() > end:
            return
        try:
            graph = RandomGraph(seed, may_be_open=False)
        except Skip:
            continue
        path = folder / f"random{seed}.onnx"
        onnx.save(graph.proto, path)
        np.savez(folder / f"random{seed}.npz", **graph.feed)
        for precision, options in (("fp32", {"tf32": False}), ("fp16", {"fp16": True})):
            row: dict[str, Any] = {"seed": seed, "precision": precision}
            engine = path.with_suffix(f".{precision}.engine")
            try:
                trtopt.build(
                    path,
                    engine,
                    optimization_level=level,
                    compare=False,
                    save_onnx=engine.with_suffix(".onnx"),
                    **options,
                )
                found = trtopt.certify(path, engine, limit=4)
                row |= {"ok": found.ok, "trials": len(found.relations), "s": found.seconds}
                row |= {"lowest": min((item.worst_db for item in found.relations), default=math.inf)}
                row |= {"said": "" if found.ok else str(found)}
            except TrtoptError as error:
                row |= {"ok": None, "said": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
            yield row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("faults", "heal", "random"))
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--level", type=int, default=1)
    arguments.add_argument("--part", default="0/1")
    arguments.add_argument("--count", type=int, default=300)
    arguments.add_argument("--seconds", type=float, default=math.inf)
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, given.part.split("/"))
    ways = {
        "faults": lambda: faults(given.folder, given.level),
        "heal": lambda: heal(given.folder, given.level),
        "random": lambda: random(
            given.folder, given.level, range(part, given.count, parts), time.monotonic() + given.seconds
        ),
    }
    for row in ways[given.what]():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
