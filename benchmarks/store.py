"""What the kept timing cache saves a second build, and what the engine store costs a session. One table.

    PY benchmarks/store.py [options] FIRST.onnx [SECOND.onnx…]

FP16 engines, each built once, one after the other in this process, for batches from 1 to --batch; without a SECOND, for the
store only:

    FIRST       with an empty timing cache
    SECOND      with a copy of that one, which FIRST has filled; of several models one after the other
    SECOND      with an empty one: last, when the process is warmest
    store       `Session.for_model` of the first SECOND, or of FIRST, which builds and stores it; then `for_model` again and
                `Session` of the stored plan in turns, --rounds times each, opened and closed: the median of the differences
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import tell

from trtopt.builder.construction import build
from trtopt.core.progress import StreamReporter
from trtopt.graph.io import load_model
from trtopt.runtime.session import Session

HALF, COST = 0.5, 5.0  # wanted: of the seconds; milliseconds


def opened(make: Callable[[], Session]) -> tuple[float, Path]:
    """Milliseconds until there is a session, and its plan."""
    start = time.perf_counter()
    session = make()
    took = 1e3 * (time.perf_counter() - start)
    with session:
        return took, session.engine


def shapes(model: Path, batch: int) -> list[str]:
    """One profile, for its inputs' other sizes as the model has them."""
    found = []
    for info in load_model(model, lazy=True).inputs:
        sizes = ["x".join(map(str, (count, *info.shape[1:]))) for count in (1, batch, batch)]
        found.append(f"{info.name}:{','.join(sizes)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/store.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=Path, metavar="FIRST.onnx")
    parser.add_argument("second", type=Path, nargs="*", metavar="SECOND.onnx")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--level", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--target", default=None, help="without a GPU, for TensorRT-RTX: smNN")
    parser.add_argument("--runtime", default="auto", help="of the sessions")
    parser.add_argument("--json", default=None, help="a file for the figures")
    given = parser.parse_args()
    options: dict[str, Any] = {"fp16": True, "optimization_level": given.level}
    options |= {"target": given.target} if given.target else {}
    rows: list[tuple[str, str, str, str]] = []
    figures: dict[str, Any] = {"python": platform.python_version()}

    def note(what: str, measured: str, wanted: str = "", good: bool | None = None) -> None:
        rows.append((what, measured, wanted, "" if good is None else "yes" if good else "**no**"))
        print(f"{what}: {measured}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def timings(cache: Path) -> Path | None:
            return None if given.target else cache  # TensorRT-RTX has none

        def seconds(model: Path, cache: Path, said: str) -> float:
            result = build(
                model,
                folder / f"{cache.name}.engine",
                timing_cache=timings(cache),
                shapes=shapes(model, given.batch),
                reporter=StreamReporter(),
                **options,
            )
            note(f"{model.stem}, {said} timing cache", f"{result.seconds:.1f} s", result.precision_summary)
            return result.seconds

        kept = folder / "kept"
        if given.second:
            figures[given.first.stem] = seconds(given.first, kept, "empty")
        after, alone = {}, {}
        for model in given.second:
            copy = folder / f"{model.stem}.kept"
            if kept.exists():
                shutil.copy(kept, copy)
            after[model] = seconds(model, copy, f"{given.first.stem}'s")
        for model in given.second:
            alone[model] = seconds(model, folder / f"{model.stem}.empty", "empty")
            ratio = after[model] / max(alone[model], 1e-9)
            note(f"{model.stem}, {given.first.stem}'s over empty", f"{ratio:.2f}×", f"≤ {HALF}×", ratio <= HALF)
            figures[model.stem] = {"after_s": after[model], "alone_s": alone[model], "ratio": ratio}

        model = (given.second or [given.first])[0]
        asked = {
            "shapes": shapes(model, given.batch),
            "timing_cache": timings(folder / f"{model.stem}.empty"),
            **options,
        }

        def stored() -> Session:
            return Session.for_model(model, backend=given.runtime, store=folder / "store", **asked)

        took, plan = opened(stored)
        note(f"for_model of {model.stem}, built", f"{took:.0f} ms")
        pairs = []
        for number in range(given.rounds + 1):
            hit, _ = opened(stored)
            itself, _ = opened(lambda: Session(plan, backend=given.runtime))
            pairs += [(hit, itself)] if number else []
        cost = statistics.median(hit - itself for hit, itself in pairs)
        hit, itself = (statistics.median(times) for times in zip(*pairs))
        note("for_model of a stored engine; Session of its plan", f"{hit:.1f} ms; {itself:.1f} ms")
        note("what the store costs", f"{cost:+.2f} ms", f"≤ {COST:.0f} ms", cost <= COST)
        figures |= {"hit_ms": hit, "session_ms": itself, "cost_ms": cost, "pairs_ms": pairs}
    tell(("what", "measured", "wanted, or precision", "met"), rows, figures, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
