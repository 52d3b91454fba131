"""Run the network once over the data and keep a histogram of every tensor asked for.

Each sample is run alone, on one thread; several samples run side by side. So a sample's values, and with them the
histograms, are the same whatever the batch size, order, sharding or number of threads by construction, not by the grace of
ONNX Runtime's kernels: it promises nothing there. Memory never holds more than one sample's tensors a thread, and no tensor
needs to say which of its axes is the batch (in ViT it is the second). It is also faster (docs/results/calibration-rules.md).
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto
from onnx.parser import parse_model

from trtopt.calibration.histogram import Histogram, merged
from trtopt.calibration.quality import Probes
from trtopt.core.errors import CalibrationError, DataError, DeviceError, ModelError, TrtoptError
from trtopt.core.host import cores, in_order
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import TensorInfo
from trtopt.core.version import to_install
from trtopt.cuda.device import probe
from trtopt.data.rebatch import Arrays, alone, filled, laid_out, rebatched, samples_in
from trtopt.graph.inputs import network_inputs
from trtopt.graph.proto import node_label
from trtopt.ort.sessions import GPU, OnnxSession, open_session, providers, version

# Arrays, the number of the first new sample in them, how many there are, and how many times over.
Run = tuple[dict[str, NDArray[Any]], int, int, int]
GPU_RUNS = 4  # at the same time, unless told otherwise: each holds its tensors in the GPU's memory
NAMED = 8  # nodes that a message lists; with more, the data is at fault


@dataclass(frozen=True)
class Observation:
    """A histogram per tensor, of so many samples, with some of these for a look into the model (`quality.Probes`)."""

    histograms: Mapping[str, Histogram]
    samples: int
    probes: Sequence[Arrays] = ()


def observe(
    proto: ModelProto,
    tensors: Sequence[str],
    batches: Iterable[Arrays],
    *,
    beside: Sequence[str] = (),
    threads: int | None = None,
    shard: bool = False,
    device: str = "cpu",
    reporter: Reporter = SILENT,
) -> Observation:
    """Count `tensors` over all samples of `batches`, in one pass; CalibrationError where one isn't finite, or is constant.

    Args:
        proto: FP32 graph. A fixed batch size is filled across the batches given.
        tensors: network inputs or node outputs, of floating type.
        batches: input name → array, first axis = samples; read once, a few samples ahead.
        beside: tensors that are counted, too, where they are finite and not constant.
        threads: samples run at the same time; None: one per core. The result doesn't depend on it.
        device: "cpu", or "cuda": ONNX Runtime runs the graph on the first GPU, in FP32. Values are counted on the CPU.
        shard: these are only some of the samples, so a tensor may be constant in them: ask `combined` about all.
    """
    inputs = network_inputs(proto)
    if halves := [name for name, info in inputs.items() if info.dtype == "bfloat16"]:
        raise CalibrationError(
            f"the input {halves[0]} is bfloat16, which ONNX Runtime takes from no array: export the model with float32 inputs"
        )
    samples, probes, workers = 0, Probes(), threads or (cores() if device == "cpu" else min(cores(), GPU_RUNS))
    runner = _GraphRunner(proto, (*tensors, *beside), device, workers, beside)
    with reporter.phase("calibrating", getattr(batches, "samples", None)) as phase:
        # In order, so the first bad sample is the one reported.
        for fresh in in_order(runner, _feeds(probes.watch(batches), inputs), workers, 2 * workers, "observe"):
            phase.advance(fresh)
            samples += fresh
    if not samples:
        raise DataError("there are no samples to calibrate on: give images or arrays of real inputs")
    observation = Observation(runner.result(), samples, probes.feeds)
    return observation if shard else _varied(observation, proto, beside)


def combined(proto: ModelProto, shards: Sequence[Observation], beside: Sequence[str] = ()) -> Observation:
    """Join shards to what one pass over all their samples would have seen, to the bit."""
    parts, probes = [item.histograms for item in shards], Probes()
    names = [name for name in parts[0] if all(name in part for part in parts)]
    whole = {name: merged(part[name] for part in parts) for name in names}
    for _ in probes.watch(feed for item in shards for feed in item.probes):  # of which it keeps as many again
        pass
    return _varied(Observation(whole, sum(item.samples for item in shards), probes.feeds), proto, beside)


class _GraphRunner:
    """Runs one feed and counts its tensors. Calls may overlap; each borrows a set of histograms."""

    def __init__(
        self, proto: ModelProto, tensors: Sequence[str], device: str, workers: int, beside: Sequence[str]
    ) -> None:
        self.proto, self.beside, self.not_finite = proto, beside, set[str]()
        inputs = network_inputs(proto)
        self.fed, self.computed = ([name for name in tensors if (name in inputs) is fed] for fed in (True, False))
        # One thread: samples run side by side instead, without partial sums that depend on threads. Without plans of the
        # memory it takes less of it and no longer (docs/results/calibration-rules.md).
        gpu, asked = device != "cpu", {"outputs": self.computed, "purpose": "calibration"}
        how: dict[str, Any] = {**asked, "threads": 1, "memory_pattern": False, "unordered": not gpu, "gpu": gpu}
        try:
            self.session = open_session(proto, **how) if self.computed else None
        except ModelError as error:
            raise CalibrationError(str(error)) from error
        self.sets: queue.SimpleQueue[dict[str, Histogram]] = queue.SimpleQueue()
        for _ in range(workers):
            self.sets.put({name: Histogram() for name in tensors})

    def __call__(self, run: Run) -> int:
        """Return how many samples it counted."""
        feed, sample, fresh, copies = run
        try:
            outputs = [] if self.session is None else list(self.session.run(None, feed))
        except TrtoptError:  # of a reference
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feed.items())
            raise CalibrationError(f"ONNX Runtime can't run the model on {shapes}: {error}") from error
        histograms = self.sets.get()
        try:
            for name in self.fed:
                self._count(histograms, name, feed[name], copies, sample)
            outputs.reverse()
            for name in self.computed:
                self._count(histograms, name, outputs.pop(), copies, sample)  # freed as soon as it is counted
        finally:
            self.sets.put(histograms)
        return fresh

    def _count(self, histograms: Mapping[str, Histogram], name: str, values: Any, copies: int, sample: int) -> None:
        try:
            own = histograms[name] if copies == 1 else Histogram()
            own.add(values)
            if copies > 1:  # a tensor that mixes samples, or holds none, isn't so many equal parts: it counts as it is
                histograms[name].merge(own.divided(copies) or own)
        except FloatingPointError as error:
            if name in self.beside:
                self.not_finite.add(name)
                return
            raise CalibrationError(
                f"the tensor {name!r} ({_source(self.proto, name)}) isn't finite for sample {sample} (from 0): {error}; "
                "check the preprocessing and the weights, or keep that node out with "
                "`precision_override=['NODE=fp32']`"
            ) from None

    def result(self) -> dict[str, Histogram]:
        parts = [self.sets.get() for _ in range(self.sets.qsize())]
        return {name: merged(part[name] for part in parts) for name in parts[0] if name not in self.not_finite}


def _source(proto: ModelProto, tensor: str) -> str:
    """Say where a tensor comes from, for messages."""
    return next((f"from {node_label(node)}" for node in proto.graph.node if tensor in node.output), "a network input")


def require_gpu_provider() -> dict[str, str]:
    """Return all that values from ONNX Runtime on the first GPU depend on besides model and data, for cache keys."""
    if GPU not in (found := providers("calibration")):
        raise DeviceError(
            f"`device='cuda'` needs an ONNX Runtime with {GPU}; the one installed has {', '.join(found)}: "
            f"{to_install('ort-gpu')}, after pip uninstall onnxruntime, or leave `device=` out"
        )
    tiny = parse_model('<ir_version: 8, opset_import: ["": 13]> g (float[1] x) => (float[1] y) { y = Identity(x) }')
    if not OnnxSession(tiny, gpu=True).on_gpu:
        raise DeviceError(
            f"`device='cuda'`: ONNX Runtime's {GPU} finds no GPU that it can use: trtopt doctor says what the driver sees; or "
            "leave `device=` out"
        )
    gpus = probe().devices
    return {"onnxruntime": version("calibration"), "device": gpus[0].name if gpus else "cuda"}


def _feeds(batches: Iterable[Arrays], inputs: Mapping[str, TensorInfo]) -> Iterator[Run]:
    """Yield what to run.

    A fixed batch size is filled with samples as they come; those left over are run in numbers that divide it, each repeated to
    fill it, so that their counts can be divided exactly.
    """
    infos = tuple(inputs.values())
    sizes = [1] if alone(infos) else sorted({item.sizes[0] for item in infos if item.shape and item.sizes[0] > 0})
    if len(sizes) > 1:
        raise CalibrationError(f"the inputs have different fixed batch sizes {sizes}; one is needed")
    size = sizes[0] if sizes else 1
    first = 0
    for batch in rebatched(({name: batch[name] for name in inputs} for batch in batches), size):
        count, start = samples_in(batch), 0
        while start < count:
            fresh = max(divisor for divisor in range(1, count - start + 1) if size % divisor == 0)
            some = {name: array[start : start + fresh] for name, array in batch.items()}
            yield laid_out(filled(some, size), infos), first + start, fresh, size // fresh
            start += fresh
        first += count


def _varied(observation: Observation, proto: ModelProto, beside: Sequence[str]) -> Observation:
    """Leave constant tensors of `beside` out; refuse others."""
    counted = observation.histograms
    bad = {name: item for name, item in counted.items() if item.constant and name not in beside}
    if not bad:
        return replace(observation, histograms={name: item for name, item in counted.items() if not item.constant})
    name, histogram = next(iter(bad.items()))
    what = f"was {histogram.low:g} everywhere" if histogram.total else "held no values"
    more = f", and so were {len(bad) - 1} others" if len(bad) > 1 else ""
    readers = sorted({f"{node.name}=fp32" for node in proto.graph.node if not bad.keys().isdisjoint(node.input)})
    raise CalibrationError(
        f"the tensor {name!r} ({_source(proto, name)}) {what} in {observation.samples} samples{more}, which gives no scale: "
        "calibrate on real, varied inputs, or keep what reads it out with "
        f"`precision_override={readers if len(readers) <= NAMED else ['NODE=fp32']}`"
    )
