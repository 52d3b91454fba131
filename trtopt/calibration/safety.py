"""Nodes that have to stay in FP32 where the rest is FP16 or BF16, measured on real samples.

One pass in floating point finds what comes near FP16's largest number (`graph.passes.typed.overflowing`). The typed graph, with
that in FP32, is then held against floating point at the outputs. Only where it misses a limit in dB, nodes are ranked by what
each alone in the reduced type does to the outputs: blocks of nodes whose noise is too little to matter aren't looked into. The
fewest of the first that bring the typed graph within the limit stay in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from trtopt.calibration.noise import Parts, snr_db
from trtopt.core.documents import Described
from trtopt.core.errors import ModelError, UsageError
from trtopt.core.host import cores
from trtopt.core.progress import SILENT, Phase, Reporter
from trtopt.core.values import BuildSpec, Precision
from trtopt.core.words import counted
from trtopt.data import Batches
from trtopt.data.convert import single_runs
from trtopt.graph.half import widen
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.typed import overflowing, to_typed, typed_opset
from trtopt.graph.proto import in_memory
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.ranges import beyond_fp16, measure_ranges

LIMITS = {Precision.FP16: 30.0, Precision.BF16: 20.0}  # dB at the outputs, unless the user says another
JUDGES = 8  # samples that the outputs are compared on
RANKING = 2  # of them, those that blocks of nodes are ranked on
MINOR = 1 / 16  # of the noise that the limit allows: a block that makes less isn't looked into


@dataclass(frozen=True)
class Safety(Described):
    """The verdict of samples on a model in FP16 or BF16.

    Attributes:
        base: the type.
        samples: whose ranges were measured.
        judged: of them, those that the outputs were compared on; 0: they couldn't be (`unjudged`).
        limit_db: that the outputs had to keep.
        plain_db: the worst output's, with what the rules for operators keep in FP32; None: not known.
        safe_db: the same with `in_fp32` in FP32 too; fp32_db: with everything in FP32.
        in_fp32: node → why it stays in FP32, with the value seen.
        unjudged: why the outputs weren't compared, or what they miss wasn't looked for.
    """

    base: Precision
    samples: int
    judged: int = 0
    limit_db: float = 0.0
    plain_db: float | None = None
    safe_db: float | None = None
    in_fp32: Mapping[str, str] = field(default_factory=dict)
    unjudged: str = ""
    fp32_db: float | None = None

    @property
    def missed(self) -> bool:
        """The outputs aren't within the limit, or nobody knows."""
        return self.safe_db is None or self.safe_db < self.limit_db

    def __str__(self) -> str:
        kept = f"{counted(len(self.in_fp32), 'node')} kept in FP32 by what they hold" * bool(self.in_fp32)
        said = f"{self.base.upper()} on {self.samples} samples: {kept or 'nothing more to keep in FP32'}"
        if self.safe_db is None or self.plain_db is None:
            return f"{said}; the outputs weren't compared: {self.unjudged}"
        before = f" (without that {decibels(self.plain_db)})" if self.in_fp32 else ""
        missed = f", less than the {self.limit_db:g} asked for" if self.safe_db < self.limit_db else ""
        missed += f"; why isn't known: {self.unjudged}" if self.unjudged else ""
        return f"{said}; {decibels(self.safe_db)} at the outputs{before}{missed}"


def decibels(value: float) -> str:
    if math.isinf(value):
        return "no difference" if value > 0 else "not finite"
    return f"{round(value, 1) + 0.0:.1f} dB"


def find_unsafe(
    folded: ModelProto,
    spec: BuildSpec,
    batches: Batches,
    *,
    given: ModelProto,
    limit_db: float | None = None,
    threads: int | None = None,
    reporter: Reporter = SILENT,
) -> Safety:
    """Measure which nodes of a folded model have to stay in FP32 when the rest runs in `spec.base`: FP16 or BF16.

    Where ONNX Runtime can't run the model, or what it gives has no measure, `unjudged` says why.
    The result doesn't depend on the batch size nor on the number of threads.

    Args:
        given: the model before it was folded, whose outputs judge.
        batches: real samples; all of them for the ranges, the first `JUDGES` for the outputs.
        limit_db: dB at the worst output that the typed graph must keep; None: `LIMITS`.
    """
    base, threads = spec.base, threads or cores()
    limit = LIMITS[base] if limit_db is None else limit_db
    if not math.isfinite(limit):
        raise UsageError(f"`min_snr=` is {limit}; a number of dB is needed, such as {LIMITS[base]:g}")
    proto = to_proto(to_ir_at(in_memory(folded), typed_opset(base, quantized=False)))
    found = Safety(base, batches.samples, limit_db=limit)
    try:
        with reporter.phase("measuring ranges"):
            feeds = (run.feed for run in single_runs(network_inputs(proto), batches))
            ranges = measure_ranges(proto, feeds, threads=threads)
        beyond = beyond_fp16(ranges) if base is Precision.FP16 else {}
        found = replace(found, in_fp32=overflowing(to_ir(proto), beyond))
        with reporter.phase(f"comparing {base.upper()} with FP32"):
            search = _Search(proto, spec, limit, threads)
            search.read(batches.part(0, JUDGES), given)
            fp32 = snr_db(_worst(search.parts.of_floating()))
            plain, safe = search.judged({}), search.judged(found.in_fp32)
            found = replace(found, judged=len(search.parts.samples), fp32_db=fp32, plain_db=plain, safe_db=safe)
        if found.missed:
            with reporter.phase(f"looking for what {base.upper()} spoils", None) as phase:
                in_fp32 = search.found(found.in_fp32, phase)
                found = replace(found, in_fp32=in_fp32, safe_db=search.judged(in_fp32))
    except ModelError as error:
        found = replace(found, unjudged=str(error))
    return found


# Consecutive nodes, and their noise at the worst output as a share of the signal's.
_Block = tuple[tuple[str, ...], float]


class _Search:
    """Sets of nodes in FP32, tried on the typed graph."""

    def __init__(self, proto: ModelProto, spec: BuildSpec, limit: float, threads: int) -> None:
        self.proto, self.spec, self.limit = proto, spec, limit
        self.parts, self.tried = Parts(proto, (), threads), dict[frozenset[str], float]()

    def read(self, batches: Batches, given: ModelProto) -> None:
        """Run the samples in floating point."""
        parts = self.parts
        parts.read(batches, given)
        for name in parts.outputs:
            arrays = [sample.given[name] for sample in parts.samples]
            if not any(np.any(array[np.isfinite(array)]) for array in arrays):
                parts.left_out[name] = "it is zero, or not finite, in FP32"
        if parts.left_out.keys() >= set(parts.outputs):
            raise ModelError("; ".join(f"{name}: {why}" for name, why in parts.left_out.items()))

    def judged(self, measured: Mapping[str, str]) -> float:
        """dB at the worst output of the typed graph."""
        key = frozenset(measured)
        if key not in self.tried:
            self.tried[key] = snr_db(_worst(self.parts.of_whole(self._typed(measured)[1])))
        return self.tried[key]

    def found(self, measured: Mapping[str, str], phase: Phase) -> dict[str, str]:
        """Nodes to keep in FP32: those that are known, and the fewest of the others that bring the outputs within the limit."""
        blocks = sorted(self._ranked(measured, phase), key=lambda item: -item[1])

        def kept(count: int) -> dict[str, str]:
            return {**measured, **{node: self._reason(block) for block in blocks[:count] for node in block[0]}}

        def within(count: int) -> bool:
            snr = self.judged(kept(count))
            phase.detail(f"{sum(len(nodes) for nodes, _ in blocks[:count])} nodes in FP32: {decibels(snr)}")
            return snr >= self.limit

        if not within(len(blocks)):
            return dict(measured)  # what is lost is lost at the network's own inputs and outputs
        return kept(fewest(len(blocks), within))

    def _ranked(self, measured: Mapping[str, str], phase: Phase) -> Iterator[_Block]:
        """The nodes in blocks of consecutive ones, with what each block alone in the reduced type does to the outputs."""
        reduced, _ = self._typed(measured)
        nodes = [node.name for node in self.proto.graph.node if node.name in reduced]
        few, budget = self.parts.samples[:RANKING], 10 ** (-self.limit / 10) * MINOR

        def blocks(first: int, end: int) -> Iterator[_Block]:
            block = nodes[first:end]
            others = {node.name: "elsewhere" for node in self.proto.graph.node if node.name not in block}
            noise = _worst(self.parts.of_whole(self._typed(others, overrides=(), io_fp32=True)[1], few))
            phase.detail(f"{end} of {len(nodes)} nodes looked at")
            if end - first > 1 and not noise < budget:
                middle = (first + end) // 2
                yield from blocks(first, middle)
                yield from blocks(middle, end)
            else:
                yield tuple(block), noise

        yield from blocks(0, len(nodes))

    def _typed(self, measured: Mapping[str, str], **others: Any) -> tuple[Collection[str], ModelProto]:
        """The nodes that compute in the reduced type, and the graph, as ONNX Runtime runs it."""
        options = {"overrides": self.spec.overrides, "io_fp32": self.spec.io_fp32, "measured": measured, **others}
        result = to_typed(to_ir(in_memory(self.proto)), self.spec.base, **options)
        return result.changes, widen(to_proto(result.model))

    def _reason(self, block: _Block) -> str:
        nodes, noise = block
        what = "it alone" if len(nodes) == 1 else f"it and {len(nodes) - 1} beside it"
        result = f"brings the outputs to {decibels(snr_db(noise))}"
        return f"in {self.spec.base.upper()} {what} {result if noise != math.inf else 'makes them infinite or NaN'}"


def fewest(count: int, within: Callable[[int], bool], *, first: int = 1, step: int = 2) -> int:
    """Return how many of the first of a ranking it takes, by a binary search; `count` where no fewer do.

    Args:
        within: says whether so many do.
        first: how many to try first; step: by how many more or fewer to go on, doubled each time.
    """
    low, high, middle = 0, count, min(first, count - 1)  # `low` don't do; `high` do, if anything does
    while high - low > 1:
        if low or high < count:
            middle = (low + high) // 2
            middle = min(middle, low + step) if high == count else middle
            middle = max(middle, high - step) if low == 0 else middle
            step *= 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


def _worst(noise: Mapping[str, float]) -> float:
    return max(noise.values(), default=0.0)
