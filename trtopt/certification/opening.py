"""The opening of what is certified: an engine on a GPU and the other ways to its results, its graph, an ONNX model or a
function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto

from trtopt.builder.instrumented import build_with_outputs
from trtopt.certification.relations import Candidate, Runner
from trtopt.certification.request import CertifyRequest
from trtopt.core.errors import UsageError
from trtopt.core.temporary import scratch
from trtopt.core.values import TensorInfo
from trtopt.cuda.device import probe
from trtopt.data.rebatch import Arrays, counting, laid_out, samples_first
from trtopt.engine.manifest import Manifest
from trtopt.evaluation.verify import by_samples, engine_file, graph_of
from trtopt.graph.half import widen
from trtopt.graph.io import Model, load_model
from trtopt.graph.proto import all_nodes, in_memory
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import open_session, run_session
from trtopt.runtime.session import Session

OTHER, BESIDE, REBUILT = "another context, without CUDA graphs", "beside another call", "another build"
_SIZES = (1, 3, 8)  # of a graph's batches, where no profile says them
_BY_SCORE = ("NonMaxSuppression", "TopK", "EfficientNMS_TRT", "Unique", "NonZero")  # what orders or chooses by values


def open_candidate(
    stack: contextlib.ExitStack, request: CertifyRequest, model: Model, manifest: Manifest | None, sample: Arrays
) -> tuple[Candidate, str, list[str]]:
    """Open what is certified; return it, what its results come from, and what of it isn't tried."""
    given: Any = request.engine
    engine, gpu, ways, left_out = engine_file(given), probe(), dict[str, Any](), list[str]()
    profiles: Sequence[Mapping[str, Any]] = ()
    if engine is not None and gpu:
        main = stack.enter_context(Session(engine, contexts=2))
        run, ran, profiles = engine_runner(main), f"{engine} on {gpu.devices[0]}", main.profiles
        other = engine_runner(stack.enter_context(Session(engine, contexts=1, graphs=0)))
        ways = {OTHER: other, BESIDE: _beside(stack, run)}
        if request.rebuild:
            graph = load_model(graph_of(engine, "to build it again")).proto
            ways[REBUILT] = stack.enter_context(built_with(request, manifest, graph))
    elif callable(given):
        run, ran = batched(given, model), "the function"
    else:
        path = given if engine is None else graph_of(engine, f"here, where it can't run ({gpu.reason})")
        run = batched(OnnxRunner(path, optimize=False, threads=request.threads), model)
        ran, profiles = "the graph in ONNX Runtime", () if manifest is None else manifest.ranges
        if engine is not None:
            ran = f"{path}, the graph of {engine}, in ONNX Runtime: {gpu.reason}"
            left_out.append("the engine itself: it was the graph")
            left_out += ["another build of it: that runs on a GPU alone"] * request.rebuild
    sizes = _sizes(model.inputs, profiles, sample, request.batch)
    sides = {size for info in model.inputs for size in info.shape}
    outputs = [
        info if info.batch_axis is None else replace(info, batch_axis=0)  # as `batched` gives them
        for info in model.outputs
        if info.batch_axis is not None or sides.issuperset(info.shape[axis] for axis in info.open_axes)
    ]
    names = {info.name for info in outputs}
    left_out += [
        f"{info.name} {info.dims}: its size depends on values" for info in model.outputs if info.name not in names
    ]
    of_pixels = engine is not None and bool(gpu) and main.embedded is not None
    candidate = Candidate(run, sizes, outputs, ways, unordered=_unordered(model), of_pixels=of_pixels)
    return candidate, ran, left_out


def batched(run: Runner, model: Model | Session) -> Runner:
    """Return `run`, which takes samples where this model has them, with samples first in all that it takes and gives: a batch
    in one call, but one at a time where an input is one sample as a whole."""
    if any(info.batch_axis is None for info in model.inputs):
        return by_samples(run, model)
    counted = [info for info in model.outputs if info.batch_axis is not None]
    return lambda batch: samples_first(run(laid_out(batch, model.inputs)), counted)


def engine_runner(session: Session) -> Runner:
    return batched(lambda batch: session.run_batches(session.taken(batch)), session)


def _sizes(
    inputs: Sequence[TensorInfo], profiles: Sequence[Mapping[str, Any]], sample: Arrays, asked: Sequence[int]
) -> tuple[int, ...]:
    """Return batches to try, ascending: those asked for, or each profile's least, most used and largest and two between."""
    axes = counting(inputs)
    if not axes or any(info.batch_axis is None for info in inputs):
        return (1,)
    fixed = {info.sizes[axes[info.name]] for info in inputs if info.name in axes}
    if -1 not in fixed:
        return (min(fixed),)
    found, ranges = set(map(int, asked)), list[tuple[int, int]]()
    for profile in profiles:
        bounds = [(profile[name], axis, sample[name].shape[1:]) for name, axis in axes.items() if name in profile]
        if bounds and all(item.holds((*to[:at], item.min[at], *to[at:])) for item, at, to in bounds):
            first, at, _ = bounds[0]
            low, tuned, high = (max(sizes[at], 1) for sizes in (first.min, first.opt, first.max))
            ranges.append((low, high))
            found |= set() if asked else {low, tuned, high, low + (high - low) // 3, low + 2 * (high - low) // 3}
    if odd := [size for size in sorted(found) if ranges and not any(low <= size <= high for low, high in ranges)]:
        taken = " or ".join(f"{low} to {high}" for low, high in ranges)
        raise UsageError(f"`batch={odd}`: the engine takes {taken} samples of this shape at a time")
    return tuple(sorted(found or _SIZES))


def _beside(stack: contextlib.ExitStack, run: Any) -> Any:
    """Return a function that runs a batch while another one runs."""
    pool = stack.enter_context(ThreadPoolExecutor(1))

    def beside(batch: Arrays) -> Arrays:
        other = pool.submit(run, {name: np.ascontiguousarray(array[::-1]) for name, array in batch.items()})
        results: Arrays = run(batch)
        other.result()
        return results

    return beside


def _unordered(model: Model) -> frozenset[str]:
    """Return the outputs that come, by whatever way, from operators that order or choose by values."""
    reached = set[str]()
    for node in all_nodes(model.proto.graph):  # in an order in which they can run
        if node.op_type in _BY_SCORE or reached.intersection(node.input):
            reached.update(node.output)
    return frozenset(info.name for info in model.outputs if info.name in reached)


def with_tensors(model: Model, tensors: Sequence[str] = ()) -> Runner:
    """Open a graph in ONNX Runtime, with tensors besides its outputs."""
    names = list(dict.fromkeys([*(info.name for info in model.outputs), *tensors]))
    purpose = "looking for the place of a fault"
    session = open_session(widen(in_memory(model.proto)), outputs=names, optimize=False, purpose=purpose)
    return batched(lambda feed: run_session(session, None, feed), model)


@contextlib.contextmanager
def built_with(
    request: CertifyRequest,
    manifest: Manifest | None,
    graph: ModelProto,
    tensors: Sequence[str] = (),
    shapes: Mapping[str, str] | None = None,
) -> Iterator[Runner]:
    """Build an engine's graph again, with tensors besides its outputs; or a part of it, with other shapes."""
    assert manifest is not None  # it names the graph
    if shapes is not None:
        manifest = replace(manifest, profiles=[shapes] if shapes else [])
    with scratch() as folder:
        plan = build_with_outputs(manifest, graph, tensors, folder, reporter=request.reporter)
        with Session(plan, contexts=1, trust=True) as session:  # built just now
            yield engine_runner(session)
