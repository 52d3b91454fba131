"""What the runtime session costs, beside bare loops, Polygraphy and PyTorch; and whether it stands stress. One table.

    PY benchmarks/runtime.py FOLDER [--parts latency,lite0,resnet,stress,scaling,leak] [--calls N] [--level N]

FOLDER holds model.onnx, calib.json and photos.npz (scripts/gpu_inputs writes them), and, for ResNet-50, resnet50.onnx,
resnet50.calib.json and torch.json (benchmarks/pytorch.py, by a Python that has PyTorch
for CUDA). Engines and the timing cache are kept in FOLDER/engines, so parts
can be run one after another. Needs TensorRT, cuda-bindings and NumPy; CuPy and Polygraphy for their rows.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401  trtopt of this checkout
import numpy as np
from numpy.typing import NDArray
from runtime_loops import Bare, in_rounds, pipelined
from runtime_stress import Load, Outcome, references, watchdog

from trtopt.builder.construction import build
from trtopt.core.errors import DeviceError
from trtopt.core.progress import StreamReporter
from trtopt.cuda.clocks import clocks
from trtopt.cuda.device import Device, probe
from trtopt.runtime.session import Session
from trtopt.runtime.stretch import AVAILABLE

PARTS = ("latency", "lite0", "resnet", "stress", "scaling", "leak")
ONE = (1, 3, 224, 224)
SHAPES = "input:1x3x224x224,1x3x224x224,8x3x224x224"
LANES = (1, 2, 3, 4, 8)
FLAT = 2 << 20  # bytes: a page of the driver's own
PATIENCE = 150.0  # seconds, for every step of the stress test
rows: list[tuple[str, str, str, str]] = []  # what, measured, wanted, whether


def note(what: str, measured: str, wanted: str = "", good: bool | None = None) -> None:
    rows.append((what, measured, wanted, "" if good is None else "yes" if good else "**no**"))
    print(f"{what}: {measured} {wanted} {rows[-1][3]}", file=sys.stderr, flush=True)


def at_least(what: str, value: float, least: float) -> None:
    note(what, f"{value:.3f}×", f"≥ {least}", value >= least)


def at_most(what: str, value: float, most: float) -> None:
    note(what, f"{value:.3f}×", f"≤ {most}", value <= most)


def show() -> None:
    print("| what | measured | wanted | met |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


class Bench:
    def __init__(self, folder: Path, level: int | None, calls: int) -> None:
        self.folder, self.level, self.calls = folder, level, calls
        self.closing: list[Callable[[], object]] = []
        self.cuda = importlib.import_module("cuda.bindings.runtime")
        self.trt = importlib.import_module("tensorrt")
        self.logger = self.trt.Logger(self.trt.Logger.ERROR)
        with np.load(folder / "photos.npz") as photos:
            self.photos: NDArray[np.float32] = photos["input"].astype(np.float32)

    def built(self, model: str, name: str, shapes: str, **options: Any) -> Path:
        target = self.folder / "engines" / f"{name}.engine"
        target.parent.mkdir(exist_ok=True)
        result = build(
            self.folder / model,
            target,
            shapes=[shapes],
            timing_cache=target.parent / "timing.cache",
            optimization_level=self.level,
            reporter=StreamReporter(),
            **options,
        )
        how = "built before" if result.cached else f"built in {result.seconds:.0f} s"
        note(f"engine {name}", result.precision_summary, how)
        return result.engine

    def bare_engine(self, path: Path) -> Any:
        runtime = self.trt.Runtime(self.logger)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        self._kept = [*getattr(self, "_kept", []), runtime]  # it must outlive its engines
        return engine

    def batch(self, size: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.photos[np.arange(size) % len(self.photos)])

    @property
    def single(self) -> Path:
        return self.built("model.onnx", "lite0.single", SHAPES, fp16=True)

    # One image ---------------------------------------------------------------------------------------------------------

    def latency(self) -> None:
        path = self.single
        array = self.batch(1)
        bare = Bare(self.cuda, self.bare_engine(path), [ONE])
        with Session(path) as session:
            (name,), (output,) = [item.name for item in session.inputs], [item.name for item in session.outputs]
            pinned = session.pinned(name, ONE)
            pinned[...] = array
            bare.places[ONE][...] = array
            ways: dict[str, Callable[[], object]] = {
                "a": bare.call(ONE),
                "b": lambda: session.run({name: pinned}),
                "c": lambda: session.run({name: array}),
                "c'": bare.copying(ONE, array),
                "e": bare.replay(ONE),
                "b bound": session.bind({name: pinned}),
            }
            said = {
                "a": "bare loop: pinned copy, graph replay, pinned copy, synchronize",
                "b": "session.run, NumPy array from session.pinned",
                "c": "session.run, ordinary NumPy array",
                "c'": "bare loop with a copy into pinned memory and one of the result",
                "d": "Polygraphy TrtRunner.infer, same plan",
                "e": "bare graph replay + synchronize",
                "f": "session.run, CuPy in and out",
                "f out": "session.run, CuPy in, out= CuPy",
                "f bound": "session.bind, CuPy in and out",
                "b bound": "session.bind, NumPy array from session.pinned",
                "g": "session.run, an object with DLPack alone",
            }
            expected = ways["c'"]()
            apart = float(np.abs(session.run({name: array})[output] - expected).max())  # type: ignore[operator]
            note("session against the bare loop, one image", f"largest difference {apart:.3g}", "0", apart == 0)
            self._with_polygraphy(ways, path, name, array)
            self._with_cupy(ways, session, name, output, array, expected)
            found = in_rounds(ways, rounds=30, calls=40, warmup=100)
            gpu = session.time({name: array}, 400, 50)
            note("GPU alone, one image (events)", f"{gpu.gpu.median * 1e3:.1f} µs", gpu.note)
            for key, microseconds in found.items():
                note(f"({key}) {said[key]}", f"{microseconds:.1f} µs")
            at_most("b / a", found["b"] / found["a"], 1.05)
            note("c / a", f"{found['c'] / found['a']:.3f}×")
            at_most("c / c'", found["c"] / found["c'"], 1.05)
            if "d" in found:
                at_least("d / b", found["d"] / found["b"], 3.0)
                note("d / c", f"{found['d'] / found['c']:.3f}×")
            for key in ("f", "f out"):
                if key in found:
                    at_most(f"{key} / e", found[key] / found["e"], 1.08)
            if "f bound" in found:
                at_most("f bound / e", found["f bound"] / found["e"], 1.03)
            self._load(session, name, array)
        bare.close()
        while self.closing:
            self.closing.pop()()

    def _load(self, session: Any, name: str, array: NDArray[Any]) -> None:
        note("clocks under this load", str(clocks(0, lambda: session.run({name: array}))))

    def _with_polygraphy(self, ways: dict[str, Any], path: Path, name: str, array: NDArray[Any]) -> None:
        try:
            trt = importlib.import_module("polygraphy.backend.trt")
            runner = trt.TrtRunner(trt.EngineFromBytes(path.read_bytes()))
            runner.activate()
            runner.infer({name: array})
        except Exception as error:  # whatever it is, the row says it
            note("(d) Polygraphy", f"can't run here: {type(error).__name__}: {str(error)[:150]}")
            return
        self.closing.append(runner.deactivate)
        ways["d"] = lambda: runner.infer({name: array})

    def _with_cupy(
        self, ways: dict[str, Any], session: Any, name: str, output: str, array: NDArray[Any], expected: Any
    ) -> None:
        try:
            cupy = importlib.import_module("cupy")
            given = cupy.asarray(array)
            target = cupy.empty(expected.shape, cupy.float32)
            cupy.cuda.Device().synchronize()
        except Exception as error:
            note("(f), (g) CuPy", f"can't run here: {type(error).__name__}: {str(error)[:150]}")
            return

        class OnlyDlpack:
            def __dlpack_device__(self) -> Any:
                return given.__dlpack_device__()

            def __dlpack__(self, **options: Any) -> Any:
                return given.__dlpack__(**options)

        plain = OnlyDlpack()
        ways["f"] = lambda: session.run({name: given})
        ways["f out"] = lambda: session.run({name: given}, out={output: target})
        ways["g"] = lambda: session.run({name: plain})
        ways["f out"]()
        ways["f bound"] = session.bind({name: given})
        results = {
            "f bound": cupy.asnumpy(ways["f bound"]()[output]),
            "f": cupy.asnumpy(ways["f"]()[output]),
            "f out": cupy.asnumpy(target),
        }
        results["g"] = ways["g"]()[output].numpy()
        same = all(np.array_equal(result, expected) for result in results.values())
        note("CuPy, out= and DLPack give what the bare loop gives", "yes" if same else "no", "exactly", same)

    # Batches -----------------------------------------------------------------------------------------------------------

    def gpu_median(self, path: Path, size: int) -> float:
        with Session(path) as session:
            timing = session.time({session.inputs[0].name: self.batch(size)}, 300, 50)
            spread = timing.gpu
            note(f"{path.stem}, batch {size}", f"GPU {spread.median:.4f} ms (p99 {spread.p99:.4f})", timing.note)
            return spread.median

    def lite0(self) -> None:
        shapes = "input:1x3x224x224,32x3x224x224,32x3x224x224"
        plain = self.gpu_median(self.built("model.onnx", "lite0.fp16", shapes, fp16=True), 32)
        table = self.folder / "calib.json"
        small = self.gpu_median(self.built("model.onnx", "lite0.int8", shapes, int8=True, calib=table), 32)
        at_least("EfficientNet-Lite0, batch 32: FP16 / INT8", plain / small, 1.6)

    def resnet(self) -> None:
        model, table, torch = (self.folder / name for name in ("resnet50.onnx", "resnet50.calib.json", "torch.json"))
        lacking = [path.name for path in (model, table, torch) if not path.is_file()]
        if lacking:
            note("ResNet-50", f"not measured: {', '.join(lacking)} missing in {self.folder.name}")
            return
        peers = json.loads(torch.read_text(encoding="utf-8"))
        note("PyTorch measured before, in the same session", f"torch {peers['torch']} on {peers['gpu']}")
        wide = "input:1x3x224x224,32x3x224x224,32x3x224x224"
        narrow = "input:1x3x224x224,1x3x224x224,8x3x224x224"
        ours = [
            ("FP16", 32, self.gpu_median(self.built(model.name, "resnet50.fp16", wide, fp16=True), 32), 2.1),
            (
                "INT8",
                32,
                self.gpu_median(self.built(model.name, "resnet50.int8", wide, int8=True, calib=table), 32),
                3.2,
            ),
            ("FP16", 1, self.gpu_median(self.built(model.name, "resnet50.single", narrow, fp16=True), 1), 1.6),
        ]
        for precision, size, milliseconds, least in ours:
            row = peers["resnet50"][str(size)]
            what = f"ResNet-50 {precision}, batch {size}"
            at_least(
                f"{what}: PyTorch FP16 CUDA graph ({row['graph_ms']:.3f} ms) / ours",
                row["graph_ms"] / milliseconds,
                least,
            )
            if "compile_ms" in row:
                times = row["compile_ms"] / milliseconds
                note(f"{what}: torch.compile {row['compile']} ({row['compile_ms']:.3f} ms) / ours", f"{times:.3f}×")
            else:
                note(f"{what}: torch.compile", f"didn't run: {json.dumps(row)[:200]}")
            if "ort_ms" in row:
                note(
                    f"{what}: {row['ort']}, end to end ({row['ort_ms']:.2f} ms) / ours",
                    f"{row['ort_ms'] / milliseconds:.1f}×",
                )

    # Stress ------------------------------------------------------------------------------------------------------------

    def stress(self) -> None:
        path = self.single
        with Session(path) as session:
            (name,), (output,) = [item.name for item in session.inputs], [item.name for item in session.outputs]
            with watchdog(PATIENCE, "references", show):
                mix = references(lambda array: session.run({name: array})[output], self.photos, 8, 4)
            load = Load(session, name, output, mix, DeviceError)
            with watchdog(PATIENCE, "warm-up", show):
                load.warm(8)
            device = Device(0)
            gc.collect()
            before, held = device("cudaMemGetInfo")[0], session.memory()
            with watchdog(PATIENCE, "8 threads", show):
                found = load.threads(8, self.calls)
            gc.collect()
            after = device("cudaMemGetInfo")[0]
            said = f"{found.calls} calls, {found.wrong} not exactly the reference (worst {found.worst:.2g})"
            note(f"8 threads × {self.calls} calls, batch 1 to 8", said, "all exact", found.right)
            note("their throughput", f"{found.rate:.0f} calls/s")
            self._errors(found)
            note("GPU memory free, before and after", f"{before} and {after} bytes", "flat", before - after <= FLAT)
            grown = session.memory().gpu - held.gpu
            note("memory that the session holds", f"{session.memory().gpu} bytes, {grown:+d}", "flat", grown <= 0)
        with watchdog(PATIENCE, "pipelined loop", show):
            best, slots = self._pipelined(path, mix)
        at_least(
            f"8 threads against the best pipelined loop ({best:.0f} calls/s, {slots} slots)", found.rate / best, 0.95
        )
        self._abuse(path, name, output, mix)

    def leak(self) -> None:
        """100,000 calls of every kind: what the process and the GPU hold afterwards, against after the first 10,000."""
        path, arrays = self.single, [self.batch(size) for size in (1, 2, 3, 8)]
        with Session(path) as session, watchdog(2 * PATIENCE, "100,000 calls", show):
            (name,) = [item.name for item in session.inputs]
            pinned = session.pinned(name, ONE)
            pinned[...] = arrays[0]
            calls: list[Callable[[], object]] = [
                *(lambda array=array: session.run({name: array}) for array in arrays),  # type: ignore[misc]
                lambda: session.run({name: pinned}),
                lambda: session.submit({name: arrays[0]}).result(),
            ]
            calls += self._on_gpu(session, name, arrays[0])
            device = Device(0)
            seen: list[tuple[int, int, int]] = []
            for count in (10_000, 90_000):
                for index in range(count):
                    calls[index % len(calls)]()
                device.synchronize()
                gc.collect()
                seen.append((device("cudaMemGetInfo")[0], _resident(), session.memory().gpu))
            (free, resident, held), (free_after, resident_after, held_after) = seen
            note(
                f"{len(calls)} kinds of calls, after 10,000 and 100,000: GPU memory free",
                f"{free} and {free_after} bytes",
            )
            note("GPU memory taken in between", f"{free - free_after} bytes", "flat", free - free_after <= FLAT)
            note("held by the session", f"{held} and {held_after} bytes", "flat", held == held_after)
            grown = resident_after - resident
            note("resident memory of the process, grown by", f"{grown >> 10} KiB", "< 8 MiB", grown < 8 << 20)

    def _on_gpu(self, session: Any, name: str, array: NDArray[Any]) -> list[Callable[[], object]]:
        try:
            cupy = importlib.import_module("cupy")
            given, stream = cupy.asarray(array), cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Device().synchronize()
        except Exception as error:
            note("calls with CuPy", f"can't run here: {type(error).__name__}: {str(error)[:150]}")
            return []
        return [lambda: session.run({name: given}), lambda: session.run({name: given}, stream=stream)]

    def _errors(self, found: Outcome) -> None:
        for text in sorted(set(found.errors))[:3]:
            note("an error", text[:300], "none", False)

    def _pipelined(self, path: Path, mix: Any) -> tuple[float, int]:
        engine = self.bare_engine(path)
        shapes = sorted({array.shape for array, _ in mix})
        order = [mix[index] for index in np.random.default_rng(0).permutation(len(mix))]
        made: list[Bare] = []
        best = (0.0, 0)
        for count in LANES:
            made += [Bare(self.cuda, engine, shapes) for _ in range(count - len(made))]
            pipelined(made, order, 500)
            rate, wrong = pipelined(made, order, min(8000, 8 * self.calls))
            note(f"pipelined loop, one thread, {count} slots", f"{rate:.0f} calls/s", f"{wrong} wrong", wrong == 0)
            best = max(best, (rate, count))
        for slot in made:
            slot.close()
        return best

    def _abuse(self, path: Path, name: str, output: str, mix: Any) -> None:
        calls = max(100, self.calls // 10)
        with Session(path) as session, watchdog(PATIENCE, "wrong inputs", show):
            load = Load(session, name, output, mix, DeviceError)
            found = load.threads(8, calls, wrong_every=20)
            said = f"{found.refused} refused, {found.accepted} taken, {found.wrong} of {found.calls} others wrong"
            note("wrong inputs in between", said, "none taken", found.right and found.refused > 0)
            self._errors(found)
            found = load.threads(8, 200)
            said = f"{found.calls} calls, {found.wrong} wrong, {session.memory().slots} slots"
            note("after that", said, "1600, none", found.right and found.calls == 1600)
            self._errors(found)
        for finish in (False, True):
            with watchdog(PATIENCE, f"close(finish={finish})", show):
                load = Load(Session(path), name, output, mix, DeviceError)
                found, took = load.close_during(8, finish)
                said = f"{took * 1e3:.0f} ms; {found.calls} calls before, {found.wrong} wrong, {found.ended} of 8 threads told"
                note(f"close(finish={finish}) during calls", said, "8 told", found.right and found.ended == 8)
                self._errors(found)

    def scaling(self) -> None:
        """The stress test's calls on one GPU and on all: in one process, whose threads share Python's GIL, and in one each."""
        gpus, path, calls = len(probe().devices), self.single, max(100, self.calls // 4)
        with Session(path) as session, watchdog(PATIENCE, "references", show):
            (name,), (output,) = [item.name for item in session.inputs], [item.name for item in session.outputs]
            mix = references(lambda array: session.run({name: array})[output], self.photos, 8, 4)
        for pinned in (False, True):
            what = "arrays from session.pinned" if pinned else "ordinary arrays"
            rates: dict[tuple[int, int], float] = {}  # GPUs and threads for each → calls a second
            for count, each in itertools.product(sorted({1, gpus}), (8, 12, 16)):
                devices: Any = [0] if count == 1 else "all"
                with Session(path, devices=devices) as session, watchdog(PATIENCE, f"devices={devices}", show):
                    load = Load(session, name, output, _pinned(session, name, mix) if pinned else mix, DeviceError)
                    load.warm(each * count)
                    found = load.threads(each * count, calls, together=True)
                note(
                    f"{what}, devices={devices}, {each * count} threads",
                    f"{found.rate:.0f} calls/s",
                    "right",
                    found.right,
                )
                self._errors(found)
                rates[count, each] = found.rate
            if gpus > 1:
                ratio = f"{what}: {gpus} GPUs against one, one process"
                best = [max(rates[count, each] for each in (8, 12, 16)) for count in (1, gpus)]
                at_least(f"{ratio}, 8 threads for each", rates[gpus, 8] / rates[1, 8], 0.95 * gpus)
                at_least(f"{ratio}, each with as many as it is fastest with", best[1] / best[0], 0.95 * gpus)
            apart = []
            for count in sorted({1, gpus}):
                with watchdog(PATIENCE, f"{count} processes", show):
                    apart.append(_processes(count, path, name, output, mix, calls, pinned))
                note(f"{what}, {count} processes of 8 threads, a GPU each", f"{apart[-1]:.0f} calls/s")
            if gpus > 1:
                at_least(f"{what}: {gpus} GPUs against one, a process each", apart[-1] / apart[0], 0.95 * gpus)


def _pinned(session: Any, name: str, mix: Any) -> Any:
    made = [(session.pinned(name, array.shape), expected) for array, expected in mix]
    for (target, _), (array, _) in zip(made, mix):
        target[...] = array
    return made


def _processes(count: int, path: Path, name: str, output: str, mix: Any, calls: int, pinned: bool) -> float:
    """Calls a second of `count` processes together, each with 8 threads on a GPU of its own."""
    spawn = multiprocessing.get_context("spawn")
    gate, results = spawn.Barrier(count), spawn.SimpleQueue()
    workers = [
        spawn.Process(
            target=_process, args=(number, path, name, output, mix, calls, pinned, gate, results), daemon=True
        )
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    rates = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    if not all(rates):
        raise SystemExit("a process got wrong results or an error")
    return float(sum(rates))


def _process(
    number: int, path: Path, name: str, output: str, mix: Any, calls: int, pinned: bool, gate: Any, results: Any
) -> None:
    with Session(path, device=number) as session:
        load = Load(session, name, output, _pinned(session, name, mix) if pinned else mix, DeviceError)
        load.warm(8)
        gate.wait()
        found = load.threads(8, calls, together=True)
        results.put(found.rate if found.right else 0.0)


def _resident() -> int:
    """Bytes of memory that this process has."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure trtopt's session on this GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--calls", type=int, default=10_000, help="of each of the 8 threads")
    parser.add_argument("--level", type=int, help="builder optimization level; default: TensorRT's")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts {given.parts}: known are {','.join(PARTS)}")
    found = probe()
    if not found:
        raise SystemExit(f"no GPU: {found.reason}")
    busy = clocks(0).utilization
    note("GPU", ", ".join(map(str, found.devices)), f"driver's CUDA {'.'.join(map(str, found.driver or ()))}")
    note("its load before", "not known" if busy is None else f"{busy} %")
    bench = Bench(given.folder, given.level, given.calls)
    built = "built" if AVAILABLE else "not built"
    python = sys.version.split()[0]
    note("software", f"TensorRT {bench.trt.__version__}, Python {python}, NumPy {np.__version__}, C extension {built}")
    try:
        for part in parts:
            start = time.perf_counter()
            getattr(bench, part)()
            note(f"part {part}", f"{time.perf_counter() - start:.0f} s")
    finally:
        show()
    return int(any(row[3] == "**no**" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
