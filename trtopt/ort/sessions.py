"""Sessions of ONNX Runtime: made here and nowhere else."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from trtopt.core.errors import ModelError, TrtoptError, require
from trtopt.core.files import whole, write_bytes
from trtopt.core.host import cores
from trtopt.core.library_output import quiet
from trtopt.core.operators import known
from trtopt.core.temporary import scratch
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.integer import INTEGER
from trtopt.graph.passes.opset import at_opset
from trtopt.graph.proto import Links, all_nodes, attribute, in_memory, operators_in, opset_version, refill, whole_copy
from trtopt.ort.references import WITHOUT, SplitSession

THREADS = 4  # at most: comparisons are short, and the machine may be shared
# Bytes: the weights of larger models reach ONNX Runtime in a file, which it maps: no copies, loaded sooner.
INLINE = 8 << 20
BLOCK = 16  # channels that convolutions work on together, or half as many; fewer are filled up with zeros
_NEWEST_IR = re.compile(r"max supported IR version: (\d+)")
_UNREGISTERED = re.compile(r"([\w.]+):(\w+)\(-?\d+\) is not a registered function/op")
_NEWEST_OPSET = re.compile(r"support for domain ai\.onnx is till opset (\d+)")
# On CPUs without VNNI products of uint8 and int8 saturate at 16 bits but for the first, which is one of the optimizations; the
# second keeps Q/DQ from becoming such products.
_EXACT = ("session.x64quantprecision", "session.disable_quant_qdq")
CPU = "CPUExecutionProvider"
GPU = "CUDAExecutionProvider"


def version(purpose: str) -> str:
    """Return the version of the ONNX Runtime that is installed; MissingDependency, by what `purpose` needs it, without one."""
    return str(require("onnxruntime", "ort", purpose).__version__)


def providers(purpose: str) -> tuple[str, ...]:
    """The execution providers that the installed package has."""
    return tuple(require("onnxruntime", "ort", purpose).get_available_providers())


def open_session(
    model: ModelProto | str | os.PathLike[str],
    *,
    outputs: Sequence[str] | None = None,
    threads: int | None = None,
    optimize: bool = True,
    memory_pattern: bool = True,
    unordered: bool = False,
    gpu: bool = False,
    tf32: bool = False,
    purpose: str = "running an ONNX model",
) -> Any:
    """Return an `onnxruntime.InferenceSession`.

    Args:
        outputs: tensors of a model in memory to compute, and nothing that they don't need; None: its own outputs.
        threads: within an operator; None: ONNX Runtime's choice. One also keeps operators from running side by side.
        optimize: False runs the nodes as they stand; where these multiply codes, with what keeps sums of them exact.
        memory_pattern: plan the memory of each shape that comes: faster from the second run on, and larger.
        unordered: `outputs` come by their place, values in any order, for who only counts them: convolutions that work on
            blocks of channels take time to put these back in order.
        gpu: on the first GPU, where the installed package can use one; else on the CPU (`get_providers()[0]` says which).
        tf32: on a GPU, products may round to ten bits: ONNX Runtime's own default, too coarse for a reference.

    Raises:
        MissingDependency: ONNX Runtime isn't installed.
        ModelError: it can't load the model; its message is quoted.
    """
    if isinstance(model, ModelProto) and operators_in(model):
        again = functools.partial(
            open_session, threads=threads, optimize=optimize, memory_pattern=memory_pattern, gpu=gpu, tf32=tf32
        )
        return SplitSession(in_memory(model), outputs, lambda part, given: again(part, outputs=given, purpose=purpose))
    ort = require("onnxruntime", "ort", purpose)
    if not isinstance(model, ModelProto) and os.fsencode(model) != os.fspath(model).encode(errors="replace"):
        raise ModelError(f"ONNX Runtime opens files whose names are UTF-8, which {os.fspath(model)!r} isn't: rename it")
    level = "ORT_ENABLE_ALL" if optimize else "ORT_DISABLE_ALL"
    options = _options(ort, level, threads, memory_pattern)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(scratch()) / "model.onnx"
        providers = _on_gpu(stack, ort, tf32) if gpu and GPU in ort.get_available_providers() else [CPU]
        while True:
            file = _as_file(model, path, outputs)
            try:
                if not optimize and _multiplies_codes(model if isinstance(model, ModelProto) else _parsed(file)):
                    exact = _options(ort, "ORT_ENABLE_EXTENDED", threads, memory_pattern)
                    for name in _EXACT:
                        exact.add_session_config_entry(name, "1")
                    with contextlib.suppress(Exception):  # no kernel for what it makes of it, as where all are int8
                        return ort.InferenceSession(file, exact, providers=providers)
                if unordered and any(node.op_type == "Conv" for node in _parsed(file).graph.node):
                    return _unordered(ort, file, options, providers)
                return ort.InferenceSession(file, options, providers=providers)
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                model = _older(model, error)


def _options(ort: Any, level: str, threads: int | None, memory_pattern: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, too
    if threads is not None:
        options.intra_op_num_threads = threads
    if threads == 1:
        options.inter_op_num_threads = 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.enable_mem_pattern = memory_pattern
    return options


def _multiplies_codes(proto: ModelProto) -> bool:
    nodes = (node for body in (proto.graph, *proto.functions) for node in all_nodes(body))
    return any(node.op_type.startswith(INTEGER) for node in nodes)


def _on_gpu(stack: contextlib.ExitStack, ort: Any, tf32: bool) -> list[Any]:
    """Load CUDA and cuDNN for the session that is opened within `stack`, and return the providers to ask for."""
    stack.enter_context(quiet())  # without a GPU or its libraries it prints that, and goes on without
    if hasattr(ort, "preload_dlls"):  # from 1.21 on: CUDA and cuDNN as packages, not found by itself
        ort.preload_dlls()
    return [(GPU, {"use_tf32": str(int(tf32))}), CPU]


def _as_file(model: ModelProto | str | os.PathLike[str], path: Path, outputs: Sequence[str] | None) -> str:
    """Return the name of a model's file; of one in memory, `path`, where it is written with these outputs."""
    if not isinstance(model, ModelProto):
        return os.fspath(model)
    save_model(model, path, inline_limit=INLINE)
    if outputs is not None:
        light = _parsed(path)
        refill(light.graph.output, [ValueInfoProto(name=name) for name in outputs])
        write_bytes(path, light.SerializeToString())
    return os.fspath(path)


def _parsed(path: str | Path) -> ModelProto:
    """Read a model without the weights that lie in files of their own."""
    light = ModelProto()
    light.ParseFromString(whole(path, None))
    return light


def _unordered(ort: Any, file: str, options: Any, providers: Sequence[Any]) -> Any:
    """A session of the graph that ONNX Runtime makes of a model, without the nodes that only put its outputs in order."""
    optimized = Path(file).with_name("made.onnx")
    options.optimized_model_filepath = os.fspath(optimized)
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{optimized.name}.data"
    )
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    session = ort.InferenceSession(file, options, providers=providers)
    light = _parsed(optimized)
    graph = light.graph
    readers = Links(graph).readers
    last = {node.output[0]: index for index, node in enumerate(graph.node) if node.op_type == "ReorderOutput"}
    ordered = [
        value
        for value in graph.output
        if value.name in last and attribute(graph.node[last[value.name]], "channels", 1) % BLOCK == 0
    ]
    if not ordered:
        return session
    unread = [last[value.name] for value in ordered if value.name not in readers]
    for value in ordered:
        value.CopyFrom(ValueInfoProto(name=graph.node[last[value.name]].input[0]))
    for index in sorted(unread, reverse=True):
        del graph.node[index]
    write_bytes(optimized, light.SerializeToString())
    del session  # with its weights
    options.optimized_model_filepath = ""
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(os.fspath(optimized), options, providers=providers)


def _older(model: ModelProto | str | os.PathLike[str], error: Exception) -> ModelProto:
    """Return the model at the IR version or opset that ONNX Runtime's refusal names as its newest; ModelError where that isn't
    why, it is there already (a model-local function has versions of its own), or the older opset can't express it."""
    opset = _NEWEST_OPSET.search(str(error))
    newest = opset or _NEWEST_IR.search(str(error))
    proto = model if isinstance(model, ModelProto) else load_model(model).proto if newest else ModelProto()
    if newest is None or (opset_version(proto) if opset else proto.ir_version) <= int(newest[1]):
        twice = ": trtopt check MODEL --fix OUT.onnx gives each a name of its own" * ("same node name" in str(error))
        custom = _UNREGISTERED.search(str(error))
        absent = f"; {WITHOUT.format(f'{custom[1]}::{custom[2]}')}" if custom else ""
        if custom and known(custom[1], custom[2]) is not None:
            absent = "; references aren't called in the bodies of If, Loop and Scan: take the control flow out"
        named = f" {model.graph.name!r}" if isinstance(model, ModelProto) else ""
        raise ModelError(f"ONNX Runtime can't load the model{named}: {error}{twice}{absent}") from error
    if opset:
        try:
            return at_opset(proto, int(newest[1]))
        except ModelError as refused:
            raise ModelError(f"ONNX Runtime reads opset {newest[1]} and older: {refused}") from refused
    older = whole_copy(proto)
    older.ir_version = int(newest[1])
    return older


def run_session(session: Any, outputs: Sequence[str] | None, feed: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return these outputs, or all, by name, of what of `feed` the session takes, in FP32 where it does and the arrays are of a
    half type (`graph.half.widen`); ModelError where it can't be run."""
    names = [item.name for item in session.get_outputs()] if outputs is None else outputs
    types = {item.name: item.type for item in session.get_inputs()}
    taken = {name: array for name, array in feed.items() if name in types}
    floats = {name: np.float32 if types[name] == "tensor(float)" else None for name in taken}
    return _results(session, names, {name: np.asarray(array, floats[name]) for name, array in taken.items()})


def _results(session: Any, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    try:
        return dict(zip(names, session.run(names, feed)))
    except TrtoptError:  # of a reference
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise ModelError(f"ONNX Runtime can't run the model: {error}") from error


class OnnxSession:
    """A model in ONNX Runtime.

    Args:
        threads: within an operator, at most; None: one per core. The others are those of `open_session`, as are its errors.

    Attributes:
        provider: what it runs on; on_gpu: whether that is a GPU.
        inputs: name → ONNX Runtime's name of the type.
        declared: the outputs' shapes as the model declares them.
    """

    def __init__(
        self,
        model: ModelProto | str | os.PathLike[str],
        *,
        threads: int | None = THREADS,
        optimize: bool = True,
        gpu: bool = False,
        tf32: bool = False,
    ) -> None:
        most = cores()
        self._session = open_session(model, threads=min(threads or most, most), optimize=optimize, gpu=gpu, tf32=tf32)
        self.provider = str(self._session.get_providers()[0])
        self.on_gpu = self.provider == GPU
        self.inputs = {item.name: str(item.type) for item in self._session.get_inputs()}
        self.declared = {item.name: item.shape for item in self._session.get_outputs()}
        self.outputs = tuple(self.declared)

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return _results(self._session, self.outputs, inputs)
