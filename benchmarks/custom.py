"""Networks with a custom operator on this machine's GPU, beside the same in standard operators.

    python benchmarks/custom.py FOLDER [--level N]

FOLDER is what benchmarks/custom_inputs.py wrote. The plugins are compiled here, of `trtopt init operator`'s kernel, of
benchmarks/custom/deform.cu and of what Triton made of benchmarks/custom/normgelu.py. Each network is built in FP16 and INT8,
both ways, run on its 64 inputs, held against PyTorch's results, and timed in turns at batch 1 and 32.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from pathlib import Path
from typing import Any

import common  # noqa: F401
import numpy as np

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", type=int, default=2)
    given = parser.parse_args()
    made = {name: engines(given.folder, name, given.level) for name in ("swish", "deform", "normgelu")}
    print("| network | way | ms at batch 1, 32 | dB to PyTorch |\n|---|---|---|---|")
    for name, paths in made.items():
        measure(given.folder, name, paths)


if __name__ == "__main__":
    main()
