"""The files that a report of a wrong engine needs: the smallest part of its graph that is still wrong, inputs for it, what
they should give, and a script that shows it with TensorRT alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto
from onnx.utils import Extractor

from trtopt.certification.opening import with_tensors
from trtopt.certification.placing import FLOATS, Place, Subject, failing, rows_of
from trtopt.certification.relations import Relation, Runner
from trtopt.core.files import made_folder, write_bytes, writing_together
from trtopt.core.values import Precision, x
from trtopt.core.words import counted
from trtopt.data.rebatch import Arrays, joined
from trtopt.engine.manifest import Manifest, described_spec
from trtopt.graph.io import load_model, save_model
from trtopt.graph.proto import inferred_values, whole_copy

_HOPS = 6  # times that a part is doubled before it is the whole graph
_SCRIPT = '''\
"""{what}

Needs numpy, {module} and cuda-python.{version}{libraries}
"""
import sys

import numpy as np
import {module} as trt
from cuda.bindings import runtime as cuda

logger = trt.Logger(trt.Logger.WARNING)
trt.init_libnvinfer_plugins(logger, "")
for library in sys.argv[1:]:
    trt.get_plugin_registry().load_library(library)
builder = trt.Builder(logger)
network = builder.create_network({flags})
parser, config = trt.OnnxParser(network, logger), builder.create_builder_config()
profile = builder.create_optimization_profile()
assert parser.parse_from_file("model.onnx"), [str(parser.get_error(at)) for at in range(parser.num_errors)]
inputs, expected = dict(np.load("inputs.npz")), dict(np.load("expected.npz"))
size, least = len(next(iter(inputs.values()))), {least}
for name, array in inputs.items():
    profile.set_shape(name, (least, *array.shape[1:]), array.shape, array.shape)
config.add_optimization_profile(profile)
for flag in {settings}:
    config.set_flag(getattr(trt.BuilderFlag, flag))
engine = trt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(network, config))
context = engine.create_execution_context()


def run(feed):
    arrays = {{name: np.ascontiguousarray(array) for name, array in feed.items()}}
    for name, array in arrays.items():
        context.set_input_shape(name, array.shape)
    for name in expected:
        arrays[name] = np.empty(tuple(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name)))
    places = {{name: cuda.cudaMalloc(max(array.nbytes, 1))[1] for name, array in arrays.items()}}
    for name, array in arrays.items():
        cuda.cudaMemcpy(places[name], array.ctypes.data, array.nbytes, cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)
        context.set_tensor_address(name, int(places[name]))
    assert context.execute_async_v3(0)
    for name in expected:
        at, to = arrays[name].ctypes.data, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        cuda.cudaMemcpy(at, places[name], arrays[name].nbytes, to)
    return arrays


for count in sorted({{least, size}}):
    for first in range(0, size - count + 1, count):
        found = run({{name: array[first : first + count] for name, array in inputs.items()}})
        for name, right in expected.items():
            for at, row in enumerate(found[name].astype(np.float64)):
                noise, signal = np.square(row - right[first + at]).sum(), np.square(right[first + at]).sum()
                print(f"batch {{count}}, row {{first + at}}, {{name}}: {{10 * np.log10(signal / max(noise, 1e-30)):.1f}} dB")
'''


def bundle(folder: Path, subject: Subject, found: Place, fault: Relation, manifest: Manifest | None) -> str:
    """Write model.onnx, inputs.npz, expected.npz and show.py, and say what they are."""
    graph, wrong = _with_types(subject.graph), False
    right = graph if subject.right is subject.graph else _with_types(subject.right)
    made = {name for node in right.graph.node for name in node.output}
    known = made | {value.name for value in right.graph.input}
    for part, names in _parts(graph, found):
        outputs = [
            value.name for value in part.graph.output if value.name in made
        ]  # a build may have been told to add some
        if part is not graph and (len(outputs) < len(part.graph.output) or not known >= {*names}):
            continue  # what would be right isn't known
        exact = with_tensors(load_model(part if right is graph else Extractor(right).extract_model(names, outputs)))
        run = with_tensors(load_model(subject.right), names)
        rows = [{**sample, **run(sample)} for sample in subject.samples]
        inputs = [{name: np.asarray(row[name]) for name in names} for row in rows]
        chosen = [inputs[at % len(inputs)] for at in range(fault.batch)]
        by_rows = all(array.ndim and len(array) == 1 for row in inputs for array in row.values())
        if by_rows and (wrong := _wrong(part, exact, subject, fault, inputs)):
            break
    results = map(exact, chosen)
    expected = joined([{name: row[name] for name in outputs} for row in results])
    least = min(subject.candidate.sizes[0], fault.batch)
    types = {item.name: item.dtype for item in load_model(part).inputs}
    made_folder(folder)
    save_model(part, folder / "model.onnx")
    for name, arrays in (("inputs", joined(chosen)), ("expected", expected)):
        given: dict[str, Any] = {key: array.astype(types.get(key, array.dtype)) for key, array in arrays.items()}
        with writing_together(folder / f"{name}.npz") as (partial,), partial.open("wb") as file:
            np.savez(file, **given)
    what = f"{fault.name} fails in {found.node} ({found.op}), batch {fault.batch}."
    script = _SCRIPT.format(what=what, least=least, **_of_engine(manifest))
    write_bytes(folder / "show.py", script.encode())
    which = "the smallest part that is still wrong" if wrong else "the whole graph: no part of it is wrong by itself"
    return f"{folder}: {counted(len(part.graph.node), 'node')}, {which}; show.py shows it"


def _of_engine(manifest: Manifest | None) -> dict[str, object]:
    """Return what the script has of an engine's build."""
    spec = None if manifest is None else described_spec(manifest.spec)
    family = "" if manifest is None else manifest.generation["family"]
    old = family == "tensorrt8"
    kind = "EXPLICIT_BATCH" if old else "STRONGLY_TYPED"
    settings = list[str]()
    if spec is not None and old:
        half = {Precision.FP16: "FP16", Precision.BF16: "BF16"}
        settings = [flag for item, flag in half.items() if spec.base is item]
        settings += ["INT8"] if spec.precision is Precision.INT8 else []
    libraries = "" if manifest is None else ", ".join(str(item["library"]) for item in manifest.plugins)
    return {
        "module": "tensorrt_rtx" if family == "rtx" else "tensorrt",
        "version": "" if manifest is None else " Found with {product} {version}.".format(**manifest.generation),
        "flags": f"1 << int(trt.NetworkDefinitionCreationFlag.{kind})",
        "settings": settings,
        "libraries": f" Arguments: {libraries}." if libraries else "",
    }


def _wrong(part: ModelProto, exact: Runner, subject: Subject, fault: Relation, rows: Sequence[Arrays]) -> bool:
    """Tell if a part of the graph is wrong by itself, on rows of its inputs; `exact` gives what is right."""
    model, batch = load_model(part), fault.batch
    sizes = tuple(sorted({subject.candidate.sizes[0], batch}))
    shapes = {
        info.name: ",".join(x((size, *rows[0][info.name].shape[1:])) for size in (sizes[0], batch, batch))
        for info in model.inputs
        if info.open_axes
    }
    outputs = rows_of(info.name for info in model.outputs)
    with subject.opened(part, (), shapes) as run:
        looked = replace(subject.candidate, run=run, sizes=sizes, outputs=outputs, ways={}, of_pixels=False)
        return bool(failing(fault, looked, exact, rows))


def _with_types(proto: ModelProto) -> ModelProto:
    """Return a copy with all weights, and the types that parts of it need of their inputs and outputs."""
    whole, values = whole_copy(proto), inferred_values(proto)
    held = (*whole.graph.input, *whole.graph.output, *whole.graph.initializer)
    for name in (item.name for item in held):
        values.pop(name, None)
    del whole.graph.value_info[:]
    whole.graph.value_info.extend(values.values())
    return whole


def _parts(graph: ModelProto, found: Place) -> Iterator[tuple[ModelProto, list[str]]]:
    """Yield parts of a graph around a place, larger and larger, and the names of their inputs; at last the whole."""
    nodes, weights = graph.graph.node, {item.name for item in graph.graph.initializer}
    values = inferred_values(graph)
    floats = {name for name, value in values.items() if value.type.tensor_type.elem_type in FLOATS}
    made = {name: at for at, node in enumerate(nodes) for name in node.output}
    own, inside = {value.name for value in graph.graph.output}, {made[found.tensor]}
    extractor = Extractor(graph)
    for hops in range(_HOPS + 1):
        for _ in range(2 ** (hops - 2) if hops > 1 else hops):  # twice as many nodes around it as before
            near = {name for at in inside for name in (*nodes[at].input, *nodes[at].output)} - weights
            inside |= {at for at, node in enumerate(nodes) if near & {*node.input, *node.output}}
        while hidden := {made[name] for name in _read(nodes, inside) - floats if name in made}:
            inside |= hidden  # shapes and indices are computed within
        if len(inside) == len(nodes):
            break
        computed = {name for at in inside for name in nodes[at].output}
        ends = computed - {name for at in inside for name in nodes[at].input} | computed & own
        if not found.vanishes:
            ends.add(found.tensor)
        names = sorted(name for name in _read(nodes, inside) - weights if name)
        yield extractor.extract_model(names, sorted(ends & floats)), names
    yield graph, [value.name for value in graph.graph.input if value.name not in weights]


def _read(nodes: Sequence[NodeProto], inside: Collection[int]) -> set[str]:
    """Return what nodes read of others."""
    computed = {name for at in inside for name in nodes[at].output}
    return {name for at in inside for name in nodes[at].input} - computed
