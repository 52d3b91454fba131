"""Networks with a custom operator on this machine's GPU, beside the same in standard operators.

    python benchmarks/custom.py FOLDER [--level N]

FOLDER is what benchmarks/custom_inputs.py wrote. The plugins are compiled here, of `trtopt init operator`'s kernel, of
benchmarks/custom/deform.cu and of what Triton made of benchmarks/custom/normgelu.py. Each network is built in FP16 and INT8,
both ways, run on its 64 inputs, held against PyTorch's results, and timed in turns at batch 1 and 32. At batch 1 a call of
Session with the plugin is timed in turns with a bare loop of a CUDA graph, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import statistics
from pathlib import Path
from typing import Any

import common  # noqa: F401
import numpy as np
from runtime_loops import Bare, in_rounds

import trtopt
from trtopt.core.errors import TrtoptError
from trtopt.data.difference import in_db, powers
from trtopt.runtime.session import Session
from trtopt.runtime.timing import in_turns

SHAPES = "x:1x3x128x128,32x3x128x128,32x3x128x128"
BATCHES = (1, 32)
ROUNDS = 9


def engines(folder: Path, name: str, level: int) -> dict[str, Path]:
    """Build each way; what can't be built is said and left out."""
    operators = Path(__file__).parent / "custom" / "deform.py" if name == "deform" else folder / f"{name}_operator.py"
    if not operators.is_file():  # swish
        trtopt.init("operator", name="acme::swish", output=operators)
    made = {}
    for kind in ("", ".standard"):
        for precision in ("fp16", "int8"):
            engine = folder / f"{name}{kind}.{precision}.engine"
            options: dict[str, Any] = {} if kind else {"operators": str(operators)}
            if precision == "int8":
                options |= {"data": folder / f"{name}.npz", "compare": False}
            try:
                result = trtopt.build(
                    folder / f"{name}{kind}.onnx",
                    engine,
                    shapes=SHAPES,
                    optimization_level=level,
                    **{precision: True},
                    **options,
                )
            except TrtoptError as error:
                print(f"{engine.name}: {error}", flush=True)
                continue
            print(f"{engine.name}: {result.seconds:.1f} s, {result.precision_summary}", flush=True)
            made[f"{'standard' if kind else 'custom'} {precision.upper()}"] = engine
    return made


def measure(folder: Path, name: str, made: dict[str, Path]) -> None:
    samples = np.load(folder / f"{name}.npz")["x"]
    wanted = np.load(folder / f"{name}.expected.npz")["output"]
    with contextlib.ExitStack() as stack:
        sessions = {way: stack.enter_context(Session(path, contexts=1)) for way, path in made.items()}
        decibels = {}
        for way, session in sessions.items():
            found = np.concatenate([next(iter(session.run({"x": part}).values())) for part in np.split(samples, 2)])
            decibels[way] = float(in_db(*powers(wanted, found)))
        times: dict[str, list[float]] = {}
        for batch in BATCHES:
            inputs = {"x": samples[:batch]}
            trials = {
                way: functools.partial(lambda session, given: session.time(given, 40, 3).gpu.median, session, inputs)
                for way, session in sessions.items()
            }
            for way, medians in in_turns(trials, ROUNDS, rounds=ROUNDS).items():
                times.setdefault(way, []).append(statistics.median(medians))
    for way in made:
        print(f"| {name} | {way} | {', '.join(f'{ms:.4f}' for ms in times[way])} | {decibels[way]:.1f} |", flush=True)


def calls(folder: Path, name: str, path: Path) -> None:
    """Time a call with a pinned and with an ordinary array, each over the bare loop's."""
    array = np.load(folder / f"{name}.npz")["x"][:1]
    cuda, trt = importlib.import_module("cuda.bindings.runtime"), importlib.import_module("tensorrt")
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    with Session(path, contexts=1) as session:
        pinned = session.pinned("x", array.shape)
        pinned[...] = array
        bare = Bare(cuda, runtime.deserialize_cuda_engine(path.read_bytes()), [array.shape])
        bare.places[array.shape][...] = array
        ways = {
            "bare": bare.call(array.shape),
            "pinned": lambda: session.run({"x": pinned}),
            "bare, copying": bare.copying(array.shape, array),
            "ordinary": lambda: session.run({"x": array}),
        }
        took = in_rounds(ways, rounds=30, calls=40, warmup=100)
        bare.close()
    ratios = took["pinned"] / took["bare"], took["ordinary"] / took["bare, copying"]
    print(
        f"{path.name}: Session over the bare loop {ratios[0]:.3f} pinned, {ratios[1]:.3f} ordinary; {took['bare']:.1f} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", type=int, default=2)
    given = parser.parse_args()
    made = {name: engines(given.folder, name, given.level) for name in ("swish", "deform", "normgelu")}
    print("| network | way | ms at batch 1, 32 | dB to PyTorch |\n|---|---|---|---|")
    for name, paths in made.items():
        measure(given.folder, name, paths)
    for name, paths in made.items():
        if path := paths.get("custom FP16"):
            calls(given.folder, name, path)


if __name__ == "__main__":
    main()
