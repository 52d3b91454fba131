"""What an engine that takes pixels gives, beside the same one that takes floats. One table, and FOLDER/embed.json.

    PYTHONPATH=. PY benchmarks/embed.py FOLDER [--precisions int8,fp16] [--threads 1,4,8] [--batch 32]
        [--seconds 1] [--rounds 5] [--preprocess efficientnet-lite] [--level N] [--backend auto] [--target smNN]

FOLDER holds model.onnx, calib.json, calib.npz and photos.npz (scripts/gpu_inputs writes them); the arrays are floats, of which
the pixels are found again exactly. Every call takes ordinary arrays, several in turn, and gives arrays of its own. The ways
take turns, --seconds each, in --rounds rounds after one that isn't counted; images a second are medians of the rounds:

    floats      Session.run on float32, samples x 3 x height x width
    pixels      Session.run on uint8, samples x height x width x 3, of the engine that does the rest itself
    prepared    floats, and before each call what makes them of the pixels (`Preprocess.of_pixels`)

Exit status 1: an image has another class in the one engine than in the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from batcher import Way
from common import tell
from numpy.typing import NDArray

from trtopt.builder.construction import build
from trtopt.core.progress import StreamReporter
from trtopt.data.embedded import Embedded
from trtopt.graph.io import load_model
from trtopt.runtime.session import Session

WANTED = 1.8  # times the images a second of floats, at the best number of threads of each
TURNS = 4  # batches that each caller takes in turn


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, Path(given.folder)
        [info] = load_model(self.folder / "model.onnx").inputs
        self.name, self.size = info.name, tuple(map(int, info.shape[1:]))
        arrays = [np.load(self.folder / name)[self.name] for name in ("photos.npz", "calib.npz")]
        self.floats: NDArray[np.float32] = np.concatenate(arrays).astype(np.float32)
        self.rows: list[tuple[str, str, str, str]] = []
        self.figures: dict[str, Any] = {}
        self.same = True

    def note(self, what: str, measured: str, wanted: str = "", good: bool | None = None) -> None:
        self.rows.append((what, measured, wanted, "" if good is None else "yes" if good else "**no**"))
        print(f"{what}: {measured} {wanted} {self.rows[-1][3]}", file=sys.stderr, flush=True)

    def built(self, precision: str, embedded: bool) -> Path:
        given = self.given
        sizes = ["x".join(map(str, (count, *self.size))) for count in (1, given.batch, given.batch)]
        name = f"{precision}.{'pixels' if embedded else 'floats'}"
        target = self.folder / "engines" / f"{name}.engine"
        target.parent.mkdir(exist_ok=True)
        options: dict[str, Any] = {precision: True} if precision != "fp32" else {}
        if precision == "int8":
            options["calib"] = self.folder / "calib.json"
        result = build(
            self.folder / "model.onnx",
            target,
            shapes=[f"{self.name}:{','.join(sizes)}"],
            preprocess=given.preprocess,
            embed_preprocess=embedded,
            optimization_level=given.level,
            timing_cache=None if given.target else target.parent / "timing.cache",
            target=given.target or (),
            save_onnx=target.with_suffix(".onnx"),
            reporter=StreamReporter(),
            **options,
        )
        how = "built before" if result.cached else f"built in {result.seconds:.0f} s"
        self.note(f"engine {name}", result.precision_summary, how)
        return result.engine

    def measure(self, precision: str) -> None:
        paths = {embedded: self.built(precision, embedded) for embedded in (False, True)}
        given, figures = self.given, self.figures.setdefault(precision, {})
        with (
            Session(paths[False], backend=given.backend) as floats,
            Session(paths[True], backend=given.backend) as pixels,
        ):
            embedded = pixels.embedded
            assert embedded is not None
            images = embedded.to_pixels({self.name: self.floats})[self.name]
            self.classes(precision, floats, pixels, images)
            if given.backend != "onnxruntime":
                for count in (1, given.batch):
                    pair = self.floats[:count], images[:count]
                    times = [
                        session.time({self.name: np.ascontiguousarray(array)}, 200, 20).gpu.median
                        for session, array in zip((floats, pixels), pair)
                    ]
                    self.note(
                        f"{precision}, GPU time at batch {count}",
                        "{:.4f} and {:.4f} ms".format(*times),
                        "floats, pixels",
                    )
                    figures[f"gpu_ms_batch_{count}"] = times
            best = {"floats": 0.0, "pixels": 0.0, "prepared": 0.0}
            for threads in given.threads:
                rates = self.rates(floats, pixels, embedded, images, threads)
                figures[f"images_per_s_{threads}_threads"] = rates
                best = {name: max(rate, rates[name]) for name, rate in best.items()}
                said = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
                ratio = rates["pixels"] / rates["floats"]
                self.note(f"{precision}, images/s of {threads} threads", said, f"pixels {ratio:.2f}× floats")
        ratio = best["pixels"] / best["floats"]
        figures["ratio"] = ratio
        self.note(f"{precision}, best of pixels over best of floats", f"{ratio:.2f}×", f"≥ {WANTED}", ratio >= WANTED)
        self.note(f"{precision}, best of pixels over best of prepared", f"{best['pixels'] / best['prepared']:.2f}×")

    def classes(self, precision: str, floats: Session, pixels: Session, images: NDArray[np.uint8]) -> None:
        """Whether both give each image the same class, and how far their scores are apart."""
        [one], [two] = (
            list(session.run_batches({self.name: array}).values())
            for session, array in ((floats, self.floats), (pixels, images))
        )
        alike = int((one.argmax(1) == two.argmax(1)).sum())
        noise = np.square(one.astype(np.float64) - two).sum() / np.square(one.astype(np.float64)).sum()
        self.same &= alike == len(one)
        apart = f"{-10 * np.log10(max(noise, 1e-30)):.1f} dB"
        self.note(f"{precision}, same class", f"{alike} of {len(one)} images, {apart}", "all", alike == len(one))
        self.figures[precision] |= {"same_class": alike, "images": len(one), "snr_db": apart}

    def rates(
        self, floats: Session, pixels: Session, embedded: Embedded, images: NDArray[np.uint8], threads: int
    ) -> dict[str, float]:
        """Images a second of each way."""
        batch = self.given.batch

        def batches(array: NDArray[Any]) -> list[list[NDArray[Any]]]:
            """For each caller some of its own."""
            return [
                [array[(np.arange(batch) + batch * turn + caller) % len(array)] for turn in range(TURNS)]
                for caller in range(threads)
            ]

        def calling(run: Callable[[NDArray[Any]], object], array: NDArray[Any]) -> Callable[[int], object]:
            own, turns = batches(array), [0] * threads

            def call(number: int) -> object:
                turns[number] += 1
                return run(own[number][turns[number] % TURNS])

            return call

        runs = {
            "floats": calling(lambda array: floats.run({self.name: array}), self.floats),
            "pixels": calling(lambda array: pixels.run({self.name: array}), images),
            "prepared": calling(lambda array: floats.run(embedded.from_pixels({self.name: array})), images),
        }
        ways = [Way(name, threads, batch, call) for name, call in runs.items()]
        for number in range(self.given.rounds + 1):
            for way in ways if number % 2 else ways[::-1]:
                way.measure(self.given.seconds, number > 0)
        return {way.what: way.rate for way in ways}

    def show(self) -> None:
        tell(("what", "measured", "wanted", "met"), self.rows, self.figures, self.folder / "embed.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/embed.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--precisions", default="int8,fp16", type=lambda text: text.split(","))
    parser.add_argument("--threads", default=[1, 4, 8], type=lambda text: [int(item) for item in text.split(",")])
    parser.add_argument("--batch", default=32, type=int)
    parser.add_argument("--seconds", default=1.0, type=float)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--preprocess", default="efficientnet-lite")
    parser.add_argument("--level", default=None, type=int)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--target", default=None)
    bench = Bench(parser.parse_args())
    try:
        for precision in bench.given.precisions:
            bench.measure(precision)
    finally:
        bench.show()
    return 0 if bench.same else 1


if __name__ == "__main__":
    sys.exit(main())
