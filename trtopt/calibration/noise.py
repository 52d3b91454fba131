"""The noise that rounding makes at a model's outputs, tensor by tensor and weight by weight.

The graph is cut behind every tensor that is quantized. One pass keeps what floating point gives; then each tensor is rounded
by itself, where its quantized readers read it, and only what comes behind it runs again: the next few segments one by one,
all the rest as one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.core.errors import ModelError
from trtopt.core.values import Precision
from trtopt.core.words import grouped
from trtopt.data.convert import Run, single_runs
from trtopt.data.difference import powers
from trtopt.data.rebatch import Arrays
from trtopt.graph.half import has_half, widen
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.placement import Points, Weight
from trtopt.graph.passes.quantize import FORMATS, insert_qdq, round_scale
from trtopt.graph.passes.repair import Repair, repair_weights
from trtopt.graph.proto import Links, whole_copy
from trtopt.graph.segments import Segment, Slot, divided, joined
from trtopt.graph.view import read_ir, to_ir, to_proto
from trtopt.ort.sessions import open_session, run_session

# A place, its noise, and at other scales: factor → noise.
Measured = tuple[Any, dict[str, float], dict[float, dict[str, float]]]
PURPOSE = "measuring quantization noise"
FACTORS = (0.5, 2.0)  # on a scale, to see whether it is far too wide, or clips
LOUD = 0.05  # of the noise so far: a quieter place's scale isn't tried at others
APART = 50.0  # dB at the least between a model and its folded graph, which round differently
HALF_APART = 25.0  # the same of models in half types
RESTS = 12  # models of the rest of the graph that are opened in turn; each holds the weights of that rest
MOST = 1 << 30  # bytes of the weights of such a rest; the segments of a larger one run one by one


@dataclass
class Sample:
    """The state of one run: tensors that later segments read, the outputs of floating point, and those of the model as it was
    given."""

    of: Run
    values: dict[str, NDArray[Any]]
    expected: dict[str, NDArray[Any]] = field(default_factory=dict)
    given: dict[str, NDArray[Any]] = field(default_factory=dict)


class Parts:
    """A model cut into segments, of which parts run again.

    Each sample runs on one thread by itself, so that sums don't depend on how many there are.

    Args:
        ends: tensors behind which it is cut.
        renamed: what an input of a node is called in its segment, so that it can be given a value of its own.
        aliases: these names → the tensor that they are, as long as nobody gives them another value.
    """

    def __init__(
        self,
        proto: ModelProto,
        ends: Collection[str],
        threads: int,
        renamed: Mapping[Slot, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.proto, self.threads, self.aliases = proto, threads, dict(aliases or {})
        weights = {tensor.name for tensor in proto.graph.initializer}
        outputs = [value.name for value in proto.graph.output]
        self.outputs = [name for name in outputs if name not in weights]
        self.left_out = {name: "it is a constant of the model" for name in outputs if name in weights}
        self.samples: list[Sample] = []
        self.segments = divided(proto, ends, renamed or {})
        self.sessions = [opened(segment.proto) for segment in self.segments]
        last = {name: number for number, segment in enumerate(self.segments) for name in segment.inputs}
        for alias, name in self.aliases.items():
            last[name] = max(last.get(name, -1), last[alias])
        self.dead = grouped((number, name) for name, number in last.items() if name not in self.outputs)
        self.every = math.ceil(len(self.segments) / RESTS)
        self._open_rest(0)

    def _open_rest(self, number: int) -> None:
        """Open all behind the next few segments, of which `number` is the first, as one model."""
        start = (number // self.every + 1) * self.every
        self.rest: tuple[int, Segment, Any] | None = None
        rest = self.segments[start:]
        if rest and sum(tensor.ByteSize() for item in rest for tensor in item.proto.graph.initializer) < MOST:
            segment = joined(rest, self.outputs, self.aliases)
            self.rest = start, segment, opened(segment.proto)

    def read(self, batches: Iterable[Arrays], given: ModelProto) -> None:
        """Run all samples in floating point, and through the model before it was folded, by which wholes are judged."""
        self.samples = [Sample(run, dict(run.feed)) for run in single_runs(network_inputs(self.proto), batches)]
        session = opened(widen(given), optimize=False)

        def run(sample: Sample) -> None:
            sample.expected = self.run(sample.values, 0)
            sample.given = run_session(session, self.outputs, sample.of.feed)

        self.each(run)
        types = {name: self.samples[0].expected[name].dtype for name in self.outputs}
        self.left_out |= {name: f"its type is {dtype}" for name, dtype in types.items() if dtype.kind != "f"}
        if self.left_out.keys() >= set(self.outputs):
            raise ModelError(f"no output is floating, so noise has no measure there: {', '.join(self.left_out)}")
        snr = snr_db(min(self.of_floating().values()))
        if snr < (HALF_APART if has_half(given) else APART):
            raise ModelError(f"the folded graph gives other values than the model ({snr:.1f} dB): report the model")

    def step(self, number: int) -> None:
        """Go on behind a segment: all that was measured so far lies before it."""
        self.each(lambda sample: self._step(sample.values, number, self.segments[number], self.sessions[number]))
        if self.rest is not None and number + 1 >= self.rest[0]:
            self._open_rest(number + 1)

    def of_floating(self) -> dict[str, float]:
        """The noise at each output of floating point itself: how far the graph is from the model as it was given."""
        return self.noise(lambda sample: sample.expected, given=True)

    def of_whole(self, proto: ModelProto, samples: Sequence[Sample] | None = None) -> dict[str, float]:
        """The noise at each output of a model that takes the same samples."""
        session = opened(proto, optimize=False)
        return self.noise(lambda sample: run_session(session, self.outputs, sample.of.feed), samples, given=True)

    def run(self, values: Arrays, first: int, sessions: Mapping[int, Any] | None = None) -> dict[str, NDArray[Any]]:
        """The outputs, from the tensors that are there before the segment `first`; `sessions` stand in for segments."""
        held, others = dict(values), sessions or {}
        last = max(others, default=-1)
        for number in range(first, len(self.segments)):
            if self.rest is not None and number == self.rest[0] and last < number:
                self._step(held, number, *self.rest[1:])
                break
            self._step(held, number, self.segments[number], others.get(number, self.sessions[number]))
        return {name: held[name] for name in self.outputs}

    def _step(self, values: dict[str, NDArray[Any]], number: int, segment: Segment, session: Any) -> None:
        feed = {name: values[name] if name in values else values[self.aliases[name]] for name in segment.inputs}
        values.update(run_session(session, segment.outputs, feed))
        for name in self.dead.get(number, ()):
            values.pop(name, None)

    def noise(
        self, outputs: Callable[[Sample], Arrays], samples: Sequence[Sample] | None = None, *, given: bool = False
    ) -> dict[str, float]:
        """Noise power of what `outputs` gives, over these samples (None: all), as a share of the signal's: floating point's or,
        `given`, the unfolded model's.

        Infinite where values aren't finite that are so in floating point; what isn't finite there doesn't count. ModelError
        where no output is left that has such a measure.
        """
        names = [name for name in self.outputs if name not in self.left_out]

        def each(sample: Sample) -> NDArray[np.float64]:
            results, signal = outputs(sample), sample.given if given else sample.expected
            return np.array([self._powers(name, sample, signal[name], results[name]) for name in names])

        sums = np.nan_to_num(np.sum(self.each(each, samples), axis=0), nan=np.inf, posinf=np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(sums[:, 0] > 0, sums[:, 1] / sums[:, 0], np.where(sums[:, 1] > 0, np.inf, 0.0))
        noise = {name: float(share) for name, share in zip(names, shares) if name not in self.left_out}
        if not noise:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise ModelError(f"noise has no measure at any output: {why}")
        return noise

    def _powers(self, name: str, sample: Sample, expected: NDArray[Any], actual: NDArray[Any]) -> NDArray[np.float64]:
        """Return the signal's power and the noise's."""
        if expected.shape != actual.shape:
            self.left_out[name] = "its shape depends on the values"
            return np.zeros(2)
        return powers(*(sample.of.cut({name: array})[name] for array in (expected, actual)))

    def each(self, work: Callable[[Sample], Any], samples: Sequence[Sample] | None = None) -> list[Any]:
        with ThreadPoolExecutor(self.threads, thread_name_prefix="trtopt-noise") as pool:
            return list(pool.map(work, self.samples if samples is None else samples))


class NoiseLedger(Parts):
    """A model cut behind every tensor that is quantized."""

    def __init__(self, proto: ModelProto, points: Points, amax: Mapping[str, float], threads: int) -> None:
        self.points, self.amax = points, amax
        self.weights, largest = Links(proto.graph).constants, FORMATS[points.precision].largest
        self.scales = {name: round_scale(np.asarray(amax[name] / largest), Precision.FP32) for name in points.reads}
        # A tensor has a second name where it is read quantized; both are the same until it is rounded.
        slots = {slot: f"{name}/quantized" for name, readers in points.reads.items() for slot in readers}
        aliases = {f"{name}/quantized": name for name in points.reads}
        super().__init__(proto, points.activations, threads, slots, aliases)
        made_in = {name: number for number, segment in enumerate(self.segments) for name in segment.outputs}
        self.starts = {name: made_in.get(name, -1) + 1 for name in points.activations}
        node_in = {node.name: number for number, item in enumerate(self.segments) for node in item.proto.graph.node}
        self.holders = [(weight, node_in[weight.node]) for weight in points.weights]

    def places(self) -> Iterator[tuple[int, list[str], list[Weight]]]:
        """Yield each segment's number with the activations and weights that come next, in the order of the graph. Once."""
        for number in range(len(self.segments)):
            names = [name for name, start in self.starts.items() if start == number]
            yield number, names, [weight for weight, holder in self.holders if holder == number]
            self.step(number)

    def measured(self, repairs: Mapping[str, Repair], advance: Callable[[], None]) -> Iterator[Measured]:
        """The noise at each output of each activation (by its name) and weight, in the order of the graph. Once.

        An activation that makes `LOUD` of the noise of all that came before it, at any output, and so each that does of all, is
        also measured with `FACTORS` on its scale, where that is its own.
        """
        sums: dict[str, float] = {}
        shared = {name for group in self.points.groups for name in group}
        for number, names, weights in self.places():
            for name in names:
                noise = self.of_activation(name)
                sums = {output: sums.get(output, 0.0) + power for output, power in noise.items()}
                loud = any(power and power >= LOUD * sums[output] for output, power in noise.items())
                factors = FACTORS if loud and name not in shared else ()
                yield name, noise, {factor: self.of_activation(name, factor=factor) for factor in factors}
                advance()
            for weight in weights:
                noise = self.of_weight(number, weight, repairs.get(weight.node))
                sums = {output: sums.get(output, 0.0) + power for output, power in noise.items()}
                yield weight, noise, {}
                advance()

    def of_activation(
        self, name: str, samples: Sequence[Sample] | None = None, factor: float = 1.0
    ) -> dict[str, float]:
        """The noise at each output where one activation, at `factor` times its scale, is rounded for those that read it
        quantized, which come next."""
        scale = self.scales[name] * np.float32(factor)

        def rounded(sample: Sample) -> dict[str, NDArray[Any]]:
            values = {f"{name}/quantized": _through_int8(sample.values[name], scale)}
            return self.run({**sample.values, **values}, self.starts[name])

        return self.noise(rounded, samples)

    def of_weight(
        self, number: int, weight: Weight, repair: Repair | None, samples: Sequence[Sample] | None = None
    ) -> dict[str, float]:
        """The noise at each output where one weight of the segment that comes next is as INT8 holds it."""
        plain, segment = Repair(np.zeros(self.weights[weight.name].dims, np.int8)), read_ir(self.segments[number].proto)
        repair_weights(segment, replace(self.points, weights=(weight,)), {weight.node: repair or plain})
        sessions = {number: opened(to_proto(segment))}
        return self.noise(lambda sample: self.run(sample.values, number, sessions), samples)

    def quantized(self, repairs: Mapping[str, Repair], *, weights_alone: bool = False) -> ModelProto:
        """The whole Q/DQ graph; or with activations in floating point."""
        model = to_ir(whole_copy(self.proto))
        _, points = repair_weights(model, self.points, repairs)
        points = replace(points, reads={}) if weights_alone else points
        return to_proto(insert_qdq(model, points, self.amax).model)


def snr_db(noise: float) -> float:
    """dB of a noise power that is a share of the signal's; inf where there is none."""
    return math.inf if noise <= 0 else -10 * math.log10(noise)


def opened(proto: ModelProto, *, optimize: bool = True) -> Any:
    return open_session(proto, threads=1, optimize=optimize, memory_pattern=False, purpose=PURPOSE)


def _through_int8(values: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round values as QuantizeLinear and DequantizeLinear do, ties to even, saturating."""
    rounded = values / scale
    np.rint(rounded, out=rounded)
    np.clip(rounded, -128, 127, out=rounded)
    rounded *= scale
    return rounded
