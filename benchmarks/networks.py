"""`trtopt tune` on this machine's GPU beside FP16, INT8 everywhere, TensorRT's calibrator and ModelOpt's placement.

    python benchmarks/networks.py FOLDER NAME... [--level N] [--jobs N] [--seconds S]

FOLDER holds NAME.onnx, NAME.calib.json (trtopt calibrate --all-tensors), NAME.modelopt.onnx (what ModelOpt wrote; optional) and
samples.npz, as benchmarks/networks_inputs.py writes them.
First, --jobs networks at a time (builds of TensorRT 8.6 side by side on one GPU take longer than one after another), what needs
no timing is built and stored; then, by itself, each network is tuned, to a limit in dB that INT8 everywhere meets (--min-snr),
and the engines, of one profile that is tuned for batch 32, are timed in turns at batch 1, 8 and 32. With several GPUs: a
process for each, of some of the networks (CUDA_VISIBLE_DEVICES).
--seconds ends the first part, and a network whose engines aren't all there is left out of the second one. Rows are kept as
FOLDER/NAME.tuned.json, engines beside them, and neither is made twice; the last thing printed is the table of all rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # noqa: F401
import numpy as np

import trtopt
from trtopt.autotune.candidates import Engines, gpu_for
from trtopt.builder.asked import spec_of
from trtopt.builder.request import BuildRequest
from trtopt.calibration.prepared import prepare
from trtopt.calibration.table import Table
from trtopt.core.errors import TrtoptError
from trtopt.core.values import Precision
from trtopt.data.difference import in_db, powers
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.session import Session
from trtopt.runtime.timing import in_turns

WAYS = ("fp16", "int8", "tuned", "native", "modelopt")
HEADERS = (
    "network",
    "INT8 everywhere, dB",
    "kept",
    "left out",
    "batch",
    "FP16, ms",
    "INT8",
    "tuned",
    "native",
    "ModelOpt",
)
BATCHES = (1, 8, 32)
ROUNDS = 9


class Network:
    def __init__(self, given: argparse.Namespace, name: str) -> None:
        self.folder, self.name, self.given = Path(given.folder), name, given
        self.model = self.folder / f"{name}.onnx"
        info = load_model(self.model, lazy=True).inputs[0]
        self.input = info.name
        self.data: dict[str, Any] = {"data": self.folder / "samples.npz", "limit": given.samples}
        smallest, largest = ("x".join(map(str, (batch, *info.shape[1:]))) for batch in (1, 32))
        self.options: dict[str, Any] = {
            "shapes": f"{info.name}:{smallest},{largest},{largest}",
            "optimization_level": given.level,
            "store": "local",
        }

    def engine(self, way: str) -> Path:
        return self.folder / f"{self.name}.{way}.engine"

    def built(self) -> bool:
        return all(self.engine(way).is_file() for way in ("fp16", "int8"))

    def build(self) -> str:
        """What `tune` builds before it measures, into the store, and the others'."""
        started = time.monotonic()
        model = load_model(self.model)
        request = BuildRequest(model=self.model, output=self.engine("tuned"), int8=True, **self.data, **self.options)
        table = Table.load(self.folder / f"{self.name}.calib.json")
        table = replace(
            prepare(model, spec_of(request).overrides, all_tensors=True).chosen_again(table, None), left_out={}
        )  # as `tune` does
        folder = self.folder / f"{self.name}.built"
        folder.mkdir(exist_ok=True)
        engines = Engines(request, gpu_for(request))
        engines.folder = folder
        results = {"int8": engines.build(Precision.INT8, table), "fp16": engines.build(Precision.FP16)}
        for way, result in results.items():
            for suffix in ("", ".json"):
                os.replace(f"{result.engine}{suffix}", f"{self.engine(way)}{suffix}")
        said = [f"{way} {result.seconds:.0f} s" for way, result in results.items()]
        written = self.folder / f"{self.name}.modelopt.onnx"
        others: dict[str, tuple[Path, dict[str, Any]]] = {
            "native": (self.model, {"calibrator": "native", **self.data}),
            "modelopt": (written, {}),
        }
        for way, (path, own) in others.items():
            options: dict[str, Any] = {"int8": True, "compare": False, "allow_precision_fallback": True}
            try:
                result = trtopt.build(path, self.engine(way), **options, **own, **self.options)
                said.append(f"{way} {result.seconds:.0f} s ({result.precision_summary})")
            except TrtoptError as error:  # no calibrator of its own, no file of ModelOpt's, or it can't be built
                said.append(f"{way}: {error}")
        return f"{self.name}: {', '.join(said)}; {time.monotonic() - started:.0f} s in all"

    def measure(self) -> dict[str, Any]:
        result = trtopt.tune(
            self.model,
            self.engine("tuned"),
            calib=self.folder / f"{self.name}.calib.json",
            min_snr=self.given.min_snr,
            min_agreement=0.0,  # random weights: the first two classes are next to equal
            **self.data,
            **self.options,
        )
        assert result.tuning is not None
        comparison = result.comparison or {}
        with np.load(self.folder / "samples.npz") as arrays:
            samples = arrays[self.input]
        reference, times, decibels = OnnxRunner(self.model, optimize=False), dict[str, list[float]](), {}
        wanted = reference({self.input: samples})
        with contextlib.ExitStack() as stack:
            engines = {way: self.engine(way) for way in WAYS if self.engine(way).is_file()}
            sessions = {way: stack.enter_context(Session(path, contexts=1)) for way, path in engines.items()}
            for way, session in sessions.items():
                found = session.run({self.input: samples})
                decibels[way] = min(float(in_db(*powers(wanted[name], np.asarray(found[name])))) for name in wanted)
            for batch in BATCHES:
                inputs = {self.input: samples[:batch]}
                trials = {way: functools.partial(gpu_ms, session, inputs) for way, session in sessions.items()}
                for way, medians in in_turns(trials, ROUNDS, rounds=ROUNDS).items():
                    times.setdefault(way, []).append(statistics.median(medians))
        return {
            "network": self.name,
            "level": self.given.level,
            "int8_db": result.tuning.whole.snr_db,
            "left_out": len(result.tuning.left_out),
            "gates": len(result.tuning.table.gates),
            "tuned_db": result.tuning.chosen.snr_db,
            "engine_db": {item["precision"]: item["accuracy"] for item in comparison.get("candidates", ())},
            "share": result.tuning.chosen.share,
            "kept": comparison.get("kept"),
            "why": comparison.get("why"),
            "precision": result.precision_summary,
            "db": decibels,
            "ms": times,
        }


def gpu_ms(session: Session, inputs: dict[str, Any]) -> float:
    return session.time(inputs, 40, 3).gpu.median


def build_one(given: argparse.Namespace, name: str) -> str:
    try:
        network = Network(given, name)
        return f"{name}: there" if network.built() else network.build()
    except Exception as error:  # another network may do
        return f"{name}: {type(error).__name__}: {error}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEADERS)} |", "|" + "---|" * len(HEADERS)]
    gains: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    for row in rows:
        for index, batch in enumerate(BATCHES):
            first = (
                (row["network"], f"{row['int8_db']:.1f}", row["kept"], str(row["left_out"])) if not index else ("",) * 4
            )
            ms = {way: each[index] for way, each in row["ms"].items()}
            for way in gains.keys() & ms.keys():
                gains[way].append(ms["fp16"] / ms[way])
            lines.append(
                f"| {' | '.join([*first, str(batch), *(f'{ms[way]:.4f}' if way in ms else '' for way in WAYS)])} |"
            )
    native = [
        row["ms"]["tuned"][index] / row["ms"]["native"][index]
        for row in rows
        if "native" in row["ms"]
        for index in range(len(BATCHES))
    ]
    said = [
        f"{way} {statistics.geometric_mean(each):.3f} (least {min(each):.3f}, {len(each)} times)"
        for way, each in gains.items()
        if each
    ]
    lines += ["", f"FP16's time over that of: {'; '.join(said)}"]
    if native:
        lines.append(f"tuned over native: {statistics.geometric_mean(native):.3f} (most {max(native):.3f})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--min-snr", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=32)
    given = parser.parse_args()
    started = time.monotonic()
    pool = ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn"))
    waiting = [pool.submit(build_one, given, name) for name in given.names]
    for future in waiting:
        future.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else print(done.result(), flush=True)
        )
    concurrent.futures.wait(waiting, None if given.seconds == math.inf else given.seconds)
    for process in list(pool._processes.values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    for name in given.names:
        network = Network(given, name)
        row = network.folder / f"{name}.tuned.json"
        if row.is_file():
            continue
        if not network.built():
            print(f"{name}: left out, since its engines weren't done", flush=True)
            continue
        begun = time.monotonic()
        try:
            found = network.measure()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        row.write_text(json.dumps(found, indent=1))
        print(f"{name}: {found['kept']}, {found['why']} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(table([json.loads(path.read_text()) for path in sorted(Path(given.folder).glob("*.tuned.json"))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
