"""Every format of `trtopt tiers` beside ModelOpt's engines of the same model and samples.

    python scripts/bench_tiers.py FOLDER NAME... [--level N] [--limits DB,DB] [--target sm89] [--rows ROW,ROW | --time]

FOLDER has NAME.pack of each (scripts/bench_tiers_inputs.py). Needs a GPU and TensorRT beside trtopt; with TensorRT-RTX and
--target it goes without a GPU, and without times. Builds every tier and ModelOpt's files, judges them on samples that nothing
was calibrated on, times all in turns, and keeps NAME.tiers.json and NAME.tiers.md up to date after each step. Engines that are
there aren't built again. --rows builds some alone (fp16, modelopt-int8, …), so that several processes can build at once; --time
then times and judges all of these, when the GPU has nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import statistics
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trtopt
from trtopt.autotune.tiers import TIERS
from trtopt.core.progress import StreamReporter
from trtopt.cuda.device import probe
from trtopt.evaluation.measures import measure
from trtopt.runtime.timing import in_turns

IMAGE, TOKENS, BATCHES = "input:{}x3x224x224", "{0}:{{}}x64", (1, 8, 32)
CACHES = [f"{kind}_{layer}" for layer in range(4) for kind in ("key", "value")]
PARTS = {"past": 24, "cross": 1500}  # caches → their length
STEP = ["tokens:{}x1", *(f"{part}_{name}:{{}}x6x{size}x64" for part, size in PARTS.items() for name in CACHES)]
FIELDS = ("input_ids", "attention_mask", "token_type_ids")
NETWORKS: Mapping[str, tuple[str, tuple[int, ...]]] = {  # name → inputs of so many samples, batches
    "vit_b": (IMAGE, BATCHES),
    "minilm": (";".join(map(TOKENS.format, FIELDS)), BATCHES),
    "lite0": (IMAGE, BATCHES),
    "whisper_encoder": ("mel:{}x80x3000", (1, 8)),
    "whisper_step": (";".join(STEP), (1, 8)),
}
RANDOM = ("vit_b", "whisper_encoder", "whisper_step")  # weights, of which speed alone is of interest
MODES = ("int8", "fp8", "int4")  # ModelOpt's
MARK = b"sha256:"  # in place of a weight's bytes
ROUNDS, ITERATIONS = 7, 20
SAME_DB = 0.5


def drawn(seed: int, std: float, shape: list[int]) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(std)


def halved(floats: NDArray[np.float32]) -> bytes:
    """Return floats in FP16 as ModelOpt writes them: what is nearer to zero than its least number becomes that."""
    halves = floats.astype(np.float16)
    halves[(np.abs(floats) < np.float32(2**-24)) & (floats != 0)] = np.float16(2**-24)
    return halves.tobytes()


def unpack(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}.pack") as packed:
        weights = json.loads(packed.read("weights.json"))

        @functools.cache
        def content(key: str) -> bytes:
            if key in weights["halves"]:
                return halved(np.frombuffer(content(weights["halves"][key]), np.float32))
            if key not in weights["seeds"]:
                return packed.read(f"blobs/{key}")
            made = drawn(*weights["seeds"][key]).tobytes()
            if hashlib.sha256(made).hexdigest() != key:
                print(
                    f"{name}: NumPy {np.__version__} draws other numbers: ModelOpt's INT4 is of other weights",
                    flush=True,
                )
            return made

        for member in packed.namelist():
            if member.endswith(".npz"):
                (folder / member).write_bytes(packed.read(member))
            elif member.endswith(".onnx"):
                proto = onnx.load_from_string(packed.read(member))
                for tensor in proto.graph.initializer:
                    if tensor.raw_data.startswith(MARK):
                        tensor.raw_data = content(tensor.raw_data.removeprefix(MARK).decode())
                onnx.save(proto, folder / member)


class Bench:
    """What is known of one network's engines, kept in two files."""

    def __init__(self, folder: Path, name: str, given: argparse.Namespace) -> None:
        self.folder, self.name = folder, name
        shapes, self.batches = NETWORKS[name]
        least, most = ([text.format(size) for text in shapes.split(";")] for size in (1, self.batches[-1]))
        ends = [text.partition(":")[2] for text in most]
        self.options: dict[str, Any] = {
            "shapes": [f"{low},{high},{high}" for low, high in zip(least, ends, strict=True)]
        }
        self.options |= {"target": given.target} if given.target else {"optimization_level": given.level}
        self.engines = dict[str, Path]()
        self.facts: dict[str, Any] = {"network": name, "level": given.level, "rows": {}}
        self.facts["versions"] = {each["family"]: each.get("version") for each in trtopt.version().generations}
        self.facts["gpu"] = [str(device) for device in probe().devices] or given.target
        self.limits = tuple(given.limits.split(",")) if given.limits else ()

    def step(self, what: str, work: Callable[[], None]) -> None:
        """Do one step; a fault in it ends it alone."""
        started = time.monotonic()
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.facts.setdefault("failed", {})[what] = f"{type(error).__name__}: {error}"
        self.facts.setdefault("seconds", {})[what] = round(time.monotonic() - started, 1)
        (self.folder / f"{self.name}.tiers.json").write_text(json.dumps(self.facts, indent=1, default=str) + "\n")
        (self.folder / f"{self.name}.tiers.md").write_text("\n".join(self.lines()) + "\n")
        print(f"--- {self.name}, {what}: {self.facts['seconds'][what]} s", flush=True)

    def row(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.facts["rows"].setdefault(name, {})
        return found

    def tiers(self) -> None:
        """Build as users do: calibrated and judged on the same samples."""
        folder = self.folder / f"{self.name}.tiers"
        found = trtopt.tiers(
            self.folder / f"{self.name}.onnx",
            folder,
            data=self.folder / f"{self.name}.npz",
            batches=self.batches[1:2] if probe() else (),
            only=[name for name in TIERS if name != "int4"] if self.name in RANDOM else (),
            limits=self.limits,
            reporter=StreamReporter(),
            **self.options,
        )
        for row in found.rows:
            self.row(row.name).update(runs=row.precision_summary, build_s=row.seconds, plan=row.plan, failed=row.failed)
            self.row(row.name).update(tiers_db=row.snr_db, tiers_ms=row.ms, notes=row.notes)
            if not row.failed:
                self.engines[row.name] = folder / f"{row.name}.engine"
        self.facts["left_out"] = found.left_out

    def alone(self, names: list[str]) -> None:
        for name in names:
            mode = name.removeprefix("modelopt-")
            if mode != name:
                self.modelopt(mode)
            else:
                data = {"data": self.folder / f"{self.name}.npz"} if name in ("fp8", "int8") else {}
                self.build(name, self.folder / f"{self.name}.onnx", compare=False, **data, **TIERS[name])
            (self.folder / f"{self.name}.{name}.row.json").write_text(json.dumps(self.row(name), default=str))

    def built(self) -> None:
        for name in [*TIERS, *(f"modelopt-{mode}" for mode in MODES)]:
            kept, engine = (self.folder / f"{self.name}.{name}.{kind}" for kind in ("row.json", "engine"))
            if kept.is_file():
                self.row(name).update(json.loads(kept.read_text()))
                self.engines |= {name: engine} if engine.is_file() else {}

    def int4(self) -> None:
        """Build it of the nearest codes: those by samples take minutes on a CPU, and engines with either are as fast."""
        self.build("int4", self.folder / f"{self.name}.onnx", int4=True)

    def modelopt(self, mode: str) -> None:
        given = self.folder / f"{self.name}.modelopt-{mode}.onnx"
        if given.is_file():
            # Of INT4 it leaves the rest in FP32, whatever it is asked for.
            self.build(f"modelopt-{mode}", given, allow_precision_fallback=True, fp16=mode == "int4")
        else:
            self.row(f"modelopt-{mode}")["failed"] = "ModelOpt wrote no such model"

    def build(self, name: str, model: Path, **own: Any) -> None:
        kept: dict[str, Any] = {} if probe() else {"save_onnx": self.folder / f"{self.name}.{name}.built.onnx"}
        engine = self.folder / f"{self.name}.{name}.engine"
        try:
            built = trtopt.build(model, engine, **own, **kept, **self.options)
        except trtopt.TrtoptError as error:
            self.row(name)["failed"] = " ".join(str(error).split())
            return
        self.row(name).update(runs=built.precision_summary, build_s=built.seconds, plan=engine.stat().st_size)
        self.engines[name] = engine

    def judge(self, name: str) -> None:
        data = self.folder / f"{self.name}.judge.npz"
        figures = trtopt.verify(self.folder / f"{self.name}.onnx", self.engines[name], data=data).figures()
        output = next(iter(figures["outputs"].values()))
        self.row(name).update(db=figures["snr_db"], by_kind=measure(output, figures["samples"]))

    def time(self) -> None:
        with np.load(self.folder / f"{self.name}.judge.npz") as arrays, contextlib.ExitStack() as stack:
            sessions = dict[str, trtopt.Session]()
            for name, path in self.engines.items():
                try:
                    sessions[name] = stack.enter_context(trtopt.Session(path))
                except trtopt.TrtoptError as error:  # noqa: PERF203  (the others are timed)
                    self.row(name)["not_timed"] = str(error)
            for batch in self.batches:
                inputs = {key: np.resize(arrays[key], (batch, *arrays[key].shape[1:])) for key in arrays.files}
                self.step(f"time @{batch}", functools.partial(self.times, sessions, batch, inputs))
            for name, session in sessions.items():  # of the largest batch
                self.step(f"layers of {name}", functools.partial(self.layers, name, session, inputs))

    def times(self, sessions: Mapping[str, trtopt.Session], batch: int, inputs: Mapping[str, Any]) -> None:
        ways = {name: functools.partial(gpu_ms, session, inputs) for name, session in sessions.items()}
        for name, medians in in_turns(ways, ROUNDS, rounds=ROUNDS).items():
            self.row(name).setdefault("ms", {})[str(batch)] = statistics.median(medians)

    def layers(self, name: str, session: trtopt.Session, inputs: Mapping[str, Any]) -> None:
        layers = session.profile(inputs, 10, 2).layers
        self.row(name)["layers"] = [(item.name, item.ms, item.kind, str(item.precision)) for item in layers]

    def lines(self) -> list[str]:
        """Return the table, each comparison that is asked for, and what the time of quantized engines goes into."""
        rows, sizes = self.facts["rows"], [str(size) for size in self.batches]
        columns = ("engine", *(f"ms @{size}" for size in sizes), "dB", "by kind", "plan MiB", "build s", "runs")
        lines = [
            f"## {self.name}",
            "",
            f"{self.facts['gpu']}, {self.facts['versions']}, level {self.facts['level']}",
            "",
        ]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for name, row in rows.items():
            ms = [f"{row['ms'][size]:.4f}" if size in row.get("ms", {}) else "" for size in sizes]
            db = f"{float(row['db'] or 'inf'):.1f}" if "db" in row else ""
            sized = (f"{row.get('plan', 0) / 2**20:.1f}", f"{row.get('build_s', 0):.1f}")
            runs = f"no engine: {row['failed']}" if row.get("failed") else row.get("runs", "")
            lines.append(f"| {' | '.join([name, *ms, db, row.get('by_kind', ''), *sized, runs])} |")
        timed = {name: row for name, row in rows.items() if row.get("ms", {}).keys() >= set(sizes)}
        for name, other in timed.items():
            ours = {key: row for key, row in timed.items() if "modelopt" not in key and as_near(row, other)}
            for size in sizes if "modelopt" in name else ():
                best = min(ours, key=lambda key: ours[key]["ms"][size], default="")
                ratio = f"{other['ms'][size] / ours[best]['ms'][size]:.3f} times as fast" if best else "none as near"
                lines.append(f"- {name} @{size}: ours of at least its dB - {SAME_DB} is {best}, {ratio}")
        for name in sorted(timed.keys() - {"fp32", "fp16"}) if "fp16" in timed else ():
            speed = [f"{timed['fp16']['ms'][size] / timed[name]['ms'][size]:.3f} @{size}" for size in sizes]
            lines.append(f"- {name}: FP16's time over its: {', '.join(speed)}")
        return [*lines, "", *(line for name, row in timed.items() if "layers" in row for line in spent(name, row))]


def gpu_ms(session: trtopt.Session, inputs: Mapping[str, Any]) -> float:
    return session.time(inputs, ITERATIONS, 2).gpu.median


def as_near(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    db, least = (float(item.get("db") or "inf") for item in (row, other))
    return db >= least - SAME_DB


def spent(name: str, row: Mapping[str, Any]) -> list[str]:
    """Say what the time of an engine goes into: by kind and precision, and its longest layers."""
    total, sums = sum(item[1] for item in row["layers"]), dict[str, list[float]]()
    for _, ms, kind, precision in row["layers"]:
        sums.setdefault(f"{kind} {precision}", []).append(ms)
    said = [
        f"{what} {sum(each):.3f} ({len(each)})" for what, each in sorted(sums.items(), key=lambda item: -sum(item[1]))
    ]
    longest = sorted(row["layers"], key=lambda item: -item[1])[:6]
    return [f"- {name}, layers one by one, {total:.3f} ms: {', '.join(said)}",
            *(f"  - {ms:.3f} {kind} {precision}: `{layer[:150]}`" for layer, ms, kind, precision in longest)]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=NETWORKS)
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--limits", default="")
    parser.add_argument("--target", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--time", action="store_true")
    given = parser.parse_args()
    failed = False
    for name in given.names:
        bench = Bench(given.folder, name, given)
        if not (given.folder / f"{name}.onnx").is_file():
            bench.step("unpack", functools.partial(unpack, given.folder, name))
        if given.rows:
            bench.alone(given.rows.split(","))
            continue
        if given.time:
            bench.built()
        else:
            bench.step("tiers", bench.tiers)
            if name in RANDOM:
                bench.step("int4", bench.int4)
            for mode in MODES:
                bench.step(f"modelopt-{mode}", functools.partial(bench.modelopt, mode))
        if probe():
            bench.step("time", bench.time)
        for engine in bench.engines:
            bench.step(f"judge {engine}", functools.partial(bench.judge, engine))
        print((given.folder / f"{name}.tiers.md").read_text(), flush=True)
        failed |= "failed" in bench.facts
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
