"""What calibration costs: trtopt beside plain inference and its peers, same run, same model, same prepared samples.

Every measurement is a process of its own, whose peak memory the system tells; they take turns, and the best of the
rounds counts.

    taskset -c 0,1 env OMP_NUM_THREADS=2 .venv-test/bin/python benchmarks/calibration.py FILE.md [ROUNDS]
    … benchmarks/calibration.py --processes FILE.md [PAIRS]

2 cores, 17 GB free, about 25 minutes; nothing else should run. --processes: `trtopt calibrate` beside a process that only
infers, 4 minutes.
MODELOPT_PYTHON names a Python with nvidia-modelopt[onnx], in an environment of its own, for its dependencies conflict with
trtopt's; without it ModelOpt's rows say so.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported

THREADS = 2
SAMPLES = 128
PEER_ROUNDS = 2
PAIRS = 6
AT_HAND = 2  # GB
MODELS = ("resnet50", "mobilenet_v2")
RECIPE = """
count = 1024
seed = 1
size = 256
scale = [0.35, 1.0]
photos = ["package:skimage/data/astronaut.png", "package:skimage/data/chelsea.png", "package:skimage/data/coffee.png",
    "package:skimage/data/rocket.jpg", "package:skimage/data/motorcycle_left.png",
    "package:sklearn/datasets/images/china.jpg", "package:sklearn/datasets/images/flower.jpg"]
"""

INTRODUCTION = """\
# What calibration costs

{today}, {machine}; `benchmarks/calibration.py FILE`.
Each figure is the best of {rounds} runs (peers: of two), which take turns, each in a process of its own; imports don't count.
Right before each but the peers', which take long, another process uses and frees {at_hand} GB of memory: a virtual machine's
host takes back what lies idle for seconds, and gives it again slowly. Whole processes run last, in pairs, imports and all.

{samples} crops of real photos, decoded and prepared before (arrays in a file), in torchvision's models with random weights;
entropy everywhere. **trtopt**: the whole `calibrate()` from the model's file to the table, folding, opening the data and
looking at its quality included; in brackets the pass over the data and the thresholds alone, its session's start included.
**Plain inference, from the files**: ONNX Runtime opens the model and the samples that trtopt gets, and runs batches of 8 on two
threads; start-up counts on both sides. **Plain inference, runs alone**: on the folded graph, loaded and warm;
only runs count, though all of trtopt's does: batches of 8, or single samples on one thread each, side by side, as trtopt runs
them. **ONNX Runtime's calibrator**: creating it, collecting, computing, on its own preprocessed graph. **ModelOpt**:
`quantize()` from the model's file, the only way to its calibration. Neither peer searches (microsoft/onnxruntime#9597,
NVIDIA/Model-Optimizer#619).

"""


def make_inputs(folder: Path) -> None:
    """Photo crops as files and as arrays, the models, and their folded graphs."""
    from trtopt.data import open_data
    from trtopt.data.samples import write_crops
    from trtopt.frontend.exporter import export
    from trtopt.graph.io import load_model, save_model
    from trtopt.graph.passes.fold import fold

    (folder / "crops.toml").write_text(RECIPE)
    crops = write_crops(folder / "crops.toml", folder / "crops")
    for name in MODELS:
        export(f"torchvision:{name}", folder / f"{name}.onnx", verify=False)
        model = load_model(folder / f"{name}.onnx")
        save_model(fold(model.proto)[0], folder / f"{name}.folded.onnx")
    batches = open_data(model.inputs, images=list(crops[:SAMPLES]), preprocess="imagenet", threads=THREADS)
    key = model.inputs[0].name
    np.savez(folder / "samples.npz", **{key: np.concatenate([batch[key] for batch in batches])})


def memory_at_hand() -> None:
    """Let the machine have memory to give; in another process, so that it doesn't count as this one's."""
    subprocess.run([sys.executable, "-c", f"b'x' * ({AT_HAND} << 30)"], check=True)


def plain(folder: Path, model: str, batch: int) -> dict[str, Any]:
    """ONNX Runtime on the folded graph; `batch` 0: single samples, one thread each, side by side."""
    from concurrent.futures import ThreadPoolExecutor

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS if batch else 1
    options.log_severity_level = 3
    path = str(folder / f"{model}.folded.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ((key, samples),) = np.load(folder / "samples.npz").items()
    size = batch or 1
    memory_at_hand()
    session.run(None, {key: samples[:size]})
    start = time.perf_counter()
    if batch:
        for index in range(0, len(samples), size):
            session.run(None, {key: samples[index : index + size]})
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda index: session.run(None, {key: samples[index : index + 1]}), range(len(samples))):
                pass
    return {"seconds": time.perf_counter() - start}


def plain_from_files(folder: Path, model: str) -> dict[str, Any]:
    """What `ours` starts from, opened and run in batches of 8: ONNX Runtime optimizes the model itself."""
    import onnxruntime

    memory_at_hand()
    start = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(folder / f"{model}.onnx"), options, providers=["CPUExecutionProvider"])
    ((key, samples),) = np.load(folder / "samples.npz").items()
    for index in range(0, len(samples), 8):
        session.run(None, {key: samples[index : index + 8]})
    return {"seconds": time.perf_counter() - start}


def ours(folder: Path, model: str, source: str, count: int) -> dict[str, Any]:
    """calibrate() with entropy, from arrays or from images; then all five methods from the same pass."""
    from trtopt.calibration.calibrator import calibrate
    from trtopt.core import native
    from trtopt.core.values import METHODS

    for name in ("cv2", "onnxruntime", "onnxscript.optimizer"):
        importlib.import_module(name)
    given: dict[str, Any] = {"data": folder / "samples.npz"}
    if source == "images":
        given = {
            "images": [folder / "crops" / f"crop_{number:03}.png" for number in range(count)],
            "preprocess": "imagenet",
        }
    memory_at_hand()
    start = time.perf_counter()
    result = calibrate(folder / f"{model}.onnx", method="entropy", cache=False, threads=THREADS, **given)
    seconds = time.perf_counter() - start
    assert result.samples == count
    start = time.perf_counter()
    for method in METHODS:
        if method != "entropy":
            result.table.with_method(method)
    return {
        "seconds": seconds,
        "pass": result.table.seconds,
        "others": time.perf_counter() - start,
        "digest": result.table.digest,
        "version": f"{importlib.metadata.version('trtopt')}, counting {'in NumPy' if native.count is None else 'in C'}",
    }


def onnxruntime_own(folder: Path, model: str) -> dict[str, Any]:
    """ONNX Runtime's entropy calibrator on its own preprocessed graph: collecting and computing, nothing else counted."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationMethod, create_calibrator, shape_inference
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    ((key, samples),) = np.load(folder / "samples.npz").items()

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches: Iterator[dict[str, Any]] = iter(
                [{key: samples[index : index + 8]} for index in range(0, len(samples), 8)]
            )

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    with tempfile.TemporaryDirectory() as scratch:
        cleaned = Path(scratch) / "cleaned.onnx"
        shape_inference.quant_pre_process(str(folder / f"{model}.onnx"), str(cleaned), skip_symbolic_shape=True)
        augmented = str(Path(scratch) / "augmented.onnx")
        start = time.perf_counter()
        calibrator = create_calibrator(
            str(cleaned), augmented_model_path=augmented, calibrate_method=CalibrationMethod.Entropy
        )
        calibrator.collect_data(Reader())
        calibrator.compute_data()
        return {"seconds": time.perf_counter() - start, "version": onnxruntime.__version__}


def modelopt_own(folder: Path, model: str) -> dict[str, Any]:
    """ModelOpt's entropy quantization, without its import; it offers no calibration by itself."""
    python = os.environ.get("MODELOPT_PYTHON")
    if not python:
        raise RuntimeError("MODELOPT_PYTHON names no Python with nvidia-modelopt")
    with tempfile.TemporaryDirectory() as scratch:
        worker = Path(__file__).with_name("modelopt_quantize.py")
        arguments = [folder / f"{model}.onnx", folder / "samples.npz", "entropy", Path(scratch) / "quantized.onnx"]
        done = subprocess.run([python, str(worker), *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    version, seconds = done.stdout.split()[-2:]
    return {"seconds": float(seconds), "version": version}


INFER = """
import sys
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[3])
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
((key, samples),) = np.load(sys.argv[2]).items()
for index in range(0, len(samples), 8):
    session.run(None, {key: samples[index : index + 8]})
"""


def process(folder: Path, model: str, what: str) -> dict[str, Any]:
    """A whole process, imports and all: one that only infers the samples in batches of 8, or `trtopt calibrate`.

    Returns:
        its seconds, those of processors in it ("cpu"), and the machine's load over the minute before.
    """
    onnx, samples = str(folder / f"{model}.onnx"), str(folder / "samples.npz")
    command = [sys.executable, "-c", INFER, onnx, samples, str(THREADS)]
    if what == "calibrate":
        options = ["--method", "entropy", "--no-cache", "--threads", str(THREADS)]
        table = str(folder / "process.calib.json")
        command = [sys.executable, "-m", "trtopt", "calibrate", onnx, "--data", samples, *options, "-o", table]
    load, start = os.getloadavg()[0], time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "load": load}


WORKERS = {
    "plain": plain,
    "files": plain_from_files,
    "ours": ours,
    "onnxruntime": onnxruntime_own,
    "modelopt": modelopt_own,
    "process": process,
}


@dataclass
class Best:
    """The fastest of several runs of one measurement, and the smallest peak memory of them."""

    seconds: float = float("inf")
    megabytes: float = float("inf")
    found: dict[str, Any] | None = None
    failure: str = ""

    def take(self, found: dict[str, Any]) -> None:
        self.megabytes = min(self.megabytes, found["megabytes"])
        if found["seconds"] < self.seconds:
            self.seconds, self.found = found["seconds"], found


def run(folder: Path, name: str, *arguments: Any) -> dict[str, Any]:
    """One measurement in a process of its own. Peak memory: of it, or of the child that it waits for."""
    command = [sys.executable, __file__, "--worker", str(folder), name, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _peak_memory() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def work(folder: Path, name: str, arguments: list[Any]) -> None:
    found = WORKERS[name](folder, *arguments)
    # Of itself not by getrusage: that would count what the process that started it held at that moment.
    peak = (
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        if name in ("modelopt", "process")
        else _peak_memory()
    )
    print(json.dumps(found | {"megabytes": peak / (1 << 20)}))


def measure(folder: Path, rounds: int) -> dict[tuple[Any, ...], Best]:
    own: list[tuple[Any, ...]] = []
    for model in MODELS:
        own += [("files", model), ("plain", model, 8), ("plain", model, 0), ("ours", model, "arrays", SAMPLES)]
    own += [("ours", "resnet50", "images", count) for count in (32, 128, 1024)]
    peers = [(name, model) for model in MODELS for name in ("onnxruntime", "modelopt")]
    best: dict[tuple[Any, ...], Best] = defaultdict(Best)
    for number in range(rounds):
        for job in own + (peers if number < PEER_ROUNDS else []):
            print(f"round {number + 1} of {rounds}: {' '.join(map(str, job))}", file=sys.stderr, flush=True)
            try:
                best[job].take(run(folder, *job))
            except RuntimeError as error:
                if job not in peers:
                    raise  # a peer that can't run must not hide the others
                best[job].failure = str(error)
    return best


def pairs(folder: Path, count: int) -> list[str]:
    """Both whole processes, as Markdown: one right after the other, whose ratio holds where the machine's pace varies."""
    lines = [
        "## Whole processes: resnet50, imports included",
        "",
        "| pair | load | only infers: seconds (CPU) | `trtopt calibrate`: seconds (CPU) | wall | CPU |",
        "|---|---|---|---|---|---|",
    ]
    ratios, peaks = list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(1, count + 1):
        print(f"pair {number} of {count}", file=sys.stderr, flush=True)
        infers, calibrates = (run(folder, "process", "resnet50", what) for what in ("infer", "calibrate"))
        ratios.append((calibrates["seconds"] / infers["seconds"], calibrates["cpu"] / infers["cpu"]))
        peaks.append((infers["megabytes"], calibrates["megabytes"]))
        seconds = [f"{item['seconds']:.2f} ({item['cpu']:.2f})" for item in (infers, calibrates)]
        lines.append(
            f"| {number} | {infers['load']:.1f} | {seconds[0]} | {seconds[1]} | {ratios[-1][0]:.2f} × | {ratios[-1][1]:.2f} × |"
        )
    wall, cpu = (statistics.median(item) for item in zip(*ratios))
    bare, peak = map(min, zip(*peaks))
    medians = f"Median: {wall:.2f} × of the wall's seconds, {cpu:.2f} × of the processors'."
    return [*lines, "", f"{medians} Peak memory: {peak:.0f} MB against {bare:.0f}.", ""]


def table(best: dict[tuple[Any, ...], Best], processes: list[str], rounds: int) -> str:
    lines = INTRODUCTION.format(
        today=datetime.date.today().isoformat(),
        machine=_machine(),
        rounds=rounds,
        samples=SAMPLES,
        at_hand=AT_HAND,
    ).splitlines()
    for model in MODELS:
        mine = best["ours", model, "arrays", SAMPLES]
        assert mine.found is not None
        whole = mine.seconds
        lines += [
            f"## {model}",
            "",
            "| | seconds | trtopt is | peak MB |",
            "|---|---|---|---|",
            f"| trtopt {mine.found['version']} | {whole:.2f} ({mine.found['pass']:.2f}) | | {mine.megabytes:.0f} |",
            _floor("plain inference, from the files", mine, best["files", model]),
            _floor("plain inference, runs alone, batches of 8", mine, best["plain", model, 8]),
            _floor("plain inference, runs alone, side by side", mine, best["plain", model, 0]),
        ]
        for name, title in (("onnxruntime", "ONNX Runtime's calibrator"), ("modelopt", "ModelOpt")):
            peer = best[name, model]
            if peer.found is None:
                lines.append(f"| {title} | not measured here: {peer.failure} | | |")
            else:
                faster = f"{peer.seconds / whole:.1f} × ({peer.seconds / mine.found['pass']:.1f} ×) as fast"
                lines.append(
                    f"| {title} {peer.found['version']} | {peer.seconds:.1f} | {faster} | {peer.megabytes:.0f} |"
                )
        lines += [
            "",
            f"All five methods from the one pass: {(whole + mine.found['others']) / whole:.2f} × entropy alone.",
            "",
        ]
    lines += [
        *processes,
        "## From image files: resnet50, decoding included",
        "",
        "| images | seconds | peak MB |",
        "|---|---|---|",
    ]
    for count in (32, 128, 1024):
        one = best["ours", "resnet50", "images", count]
        lines.append(f"| {count} | {one.seconds:.2f} | {one.megabytes:.0f} |")
    same = {best["ours", "resnet50", kind, SAMPLES].found["digest"] for kind in ("arrays", "images")}  # type: ignore[index]
    lines += [
        "",
        f"The table from files {'equals' if len(same) == 1 else 'DIFFERS FROM'} the one from arrays, to the bit.",
    ]
    return "\n".join(lines) + "\n"


def _floor(title: str, mine: Best, floor: Best) -> str:
    assert mine.found is not None
    ratios = f"{mine.seconds / floor.seconds:.2f} × ({mine.found['pass'] / floor.seconds:.2f} ×) its time"
    return f"| {title} | {floor.seconds:.2f} | {ratios} | {floor.megabytes:.0f} |"


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    found = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in found if line.startswith("model name")] or [platform.machine()]
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("onnxruntime", "onnx", "numpy", "torch"))
    return f"{names[0]}, {THREADS} cores, Python {platform.python_version()}, {', '.join(versions)}"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
        return
    if sys.argv[1:2] == ["--make"]:
        make_inputs(Path(sys.argv[2]))
        return
    alone = sys.argv[1:2] == ["--processes"]
    given = sys.argv[2:] if alone else sys.argv[1:]
    if not 1 <= len(given) <= 2:
        raise SystemExit("usage: benchmarks/calibration.py [--processes] FILE.md [ROUNDS]")
    rounds = int(given[1]) if len(given) == 2 else PAIRS if alone else 5
    with tempfile.TemporaryDirectory(prefix="trtopt-bench-") as scratch:
        folder = Path(scratch)
        subprocess.run([sys.executable, __file__, "--make", scratch], check=True)
        if alone:
            text = "\n".join([f"{datetime.date.today().isoformat()}, {_machine()}", "", *pairs(folder, rounds)])
        else:
            text = table(measure(folder, rounds), pairs(folder, PAIRS), rounds)
    Path(given[0]).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
