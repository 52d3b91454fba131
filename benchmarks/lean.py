"""The lean runtimes beside the full one, on the same plans. One table.

    PY benchmarks/lean.py [options] ENGINE… INPUTS.npz

The plans are opened with trust, for they carry a library:
version-compatible ones of TensorRT 8.6 (`TRTOPT_GPU_LEAN="8 10" scripts/gpu_check` makes and keeps some);
INPUTS.npz holds samples of their input. Each runtime has a process of its own in which no other one can be imported; they take
turns, in --rounds rounds after one that isn't counted, each with --calls calls:

    call     `Session.run` on ordinary arrays, a replay of a CUDA graph with its copies: median of the calls' times
    GPU      `Session.time`: a CUDA graph by CUDA events, without copies: median

and of both the median of the rounds; a lean runtime's is compared with the full one's round by round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import tell

LATER = 1.03  # wanted: a lean runtime's latency over the full one's
MODULES = {"full": "tensorrt", "lean8": "tensorrt_lean", "lean10": "tensorrt_lean_bindings"}


def runtime(pipe: Connection, name: str, engines: list[str]) -> None:
    """One of the processes: what it is asked for, until it is told None."""
    for module in {*MODULES.values(), "tensorrt_rtx"} - {MODULES.get(name)}:
        sys.modules[module] = None  # type: ignore[assignment]
    from trtopt.runtime.session import Session

    backend = {"full": "tensorrt"}.get(name, "lean" if name in MODULES else name.rstrip("0123456789"))
    try:
        sessions = {
            engine: Session(engine, backend=backend, trust_host_code=backend != "onnxruntime") for engine in engines
        }
        pipe.send(sessions[engines[0]].backend)
        while (job := pipe.recv()) is not None:
            engine, inputs, calls = job
            pipe.send(measured(sessions[engine], inputs, calls, backend != "onnxruntime"))
        for session in sessions.values():
            session.close()
    except Exception as error:
        pipe.send(error)


def measured(session: Any, inputs: dict[str, Any], calls: int, on_gpu: bool) -> dict[str, Any]:
    given = session.taken(inputs)
    times = []
    for number in range(calls + min(calls, 50)):
        start = time.perf_counter()
        results = session.run(given)
        times += [time.perf_counter() - start] if number >= min(calls, 50) else []
    found = {"call": 1e3 * statistics.median(times), "results": results}
    return {**found, "GPU": session.time(given, calls, 50).gpu.median} if on_gpu else found


def answer(pipe: Connection, name: str) -> Any:
    told = pipe.recv()
    if isinstance(told, Exception):
        raise SystemExit(f"lean: {name}: {type(told).__name__}: {told}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/lean.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engines", nargs="+", metavar="ENGINE")
    parser.add_argument("inputs", metavar="INPUTS.npz")
    parser.add_argument(
        "--runtimes",
        default=list(MODULES),
        type=lambda text: text.split(","),
        help="the first is what others are compared with; onnxruntime1,onnxruntime2: without a GPU",
    )
    parser.add_argument("--batches", default=[1, 8, 32], type=lambda text: [int(item) for item in text.split(",")])
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--calls", default=300, type=int)
    parser.add_argument("--json", default=None, help="a file for the figures")
    given = parser.parse_args()
    with np.load(given.inputs) as file:
        samples = {name: file[name] for name in file.files if file[name].ndim > 1}
    context, pipes, processes = multiprocessing.get_context("spawn"), {}, []
    for name in given.runtimes:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=runtime, args=(theirs, name, given.engines), daemon=True))
        processes[-1].start()
        pipes[name] = ours
    families = {name: answer(pipe, name) for name, pipe in pipes.items()}
    first = given.runtimes[0]
    rows, figures = [], {"runtimes": families}
    for engine in given.engines:
        for batch in given.batches:
            inputs = {
                name: np.concatenate([array] * -(-batch // len(array)))[:batch] for name, array in samples.items()
            }
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in pipes}
            for number in range(given.rounds + 1):
                for name in pipes if number % 2 else reversed(pipes):
                    pipes[name].send((engine, inputs, given.calls))
                    told = answer(pipes[name], name)
                    rounds[name] += [told] if number else []
            what = f"{Path(engine).stem}, batch {batch}"
            for kind in ("call", "GPU"):
                if kind not in rounds[first][0]:
                    continue
                times = {name: [item[kind] for item in told] for name, told in rounds.items()}
                figures[f"{what}, {kind}"] = times
                said = [f"{first} {statistics.median(times[first]):.4f} ms"]
                worst = 0.0
                for name in given.runtimes[1:]:
                    ratio = statistics.median(own / full for own, full in zip(times[name], times[first]))
                    worst = max(worst, ratio)
                    said.append(f"{name} {statistics.median(times[name]):.4f} ms ({ratio - 1:+.1%})")
                rows.append(
                    (f"{what}, {kind}", "; ".join(said), f"≤ {LATER - 1:+.0%}", "yes" if worst <= LATER else "**no**")
                )
                print(*rows[-1], file=sys.stderr, flush=True)
            for name in given.runtimes[1:]:
                pairs = [(rounds[name][0]["results"][key], value) for key, value in rounds[first][0]["results"].items()]
                apart = max(float(np.abs(own - full).max()) for own, full in pairs)
                same = all(np.array_equal(own, full) for own, full in pairs)
                figures[f"{what}, {name}, largest difference"] = apart
                rows.append(
                    (f"{what}, results of {name}", "same bits" if same else f"largest difference {apart:.3g}", "", "")
                )
    for pipe, process in zip(pipes.values(), processes):
        pipe.send(None)
        process.join(30)
    print(", ".join(f"{name}: {family}" for name, family in families.items()))
    tell(("what", "measured", "wanted", "met"), rows, figures, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
