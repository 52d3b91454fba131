"""Session: an engine embedded in a service. One class for one GPU or several, threads, futures and asyncio.

    with trtopt.Session("resnet50.engine") as session:
        logits = session.run({"input": images})["logits"]

A call takes a slot (stream, contexts, buffers; `trtopt.runtime.slot`) for itself, so calls from several threads run side
by side and share the engine's weights.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described, converted
from trtopt.core.errors import Busy, DeviceError, UsageError
from trtopt.core.files import existing_file
from trtopt.core.options import typed
from trtopt.core.values import (
    LayerInfo,
    Profile,
    TensorInfo,
    check_timeout,
    choice,
    chosen_builder,
    parse_size,
    x,
)
from trtopt.cuda.arrays import View, gpu_of, stream_handle, views
from trtopt.cuda.device import after_capture
from trtopt.cuda.tensors import Shape, Tensor, check_array, check_mapping
from trtopt.data.decoding import pixels
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import calls, joined
from trtopt.engine.manifest import WITHOUT_GRAPH, Manifest, embedded_by, load_manifest
from trtopt.runtime import images as images_of
from trtopt.runtime.bound_call import BoundCall, prepare_call
from trtopt.runtime.gpu_engine import GpuEngine, check_for_gpus, open_gpus, ordinals
from trtopt.runtime.images import Prediction
from trtopt.runtime.layout import Source, check_out
from trtopt.runtime.slot import Slot
from trtopt.runtime.slot_pool import CLOSED, SlotPool
from trtopt.runtime.timing import LayerTimes, Timing, profile_slot, time_slot

if TYPE_CHECKING:
    from trtopt.runtime.onnx_slot import OnnxSlot

    AnySlot = Slot | OnnxSlot

_PLAIN = {np.ndarray}
_NAME = "trtopt-session"  # of threads
BACKENDS = ("auto", "tensorrt", "lean", "rtx", "onnxruntime")


@dataclass(frozen=True)
class MemoryReport(Described):
    """Bytes that a session holds: scratch memory, inputs and results (`gpu`, over all slots and GPUs, of which `limit` is
    allowed on each), page-locked memory, the plan file (its weights are on each GPU); and `slots`, calls that fit in side by
    side."""

    gpu: int
    pinned: int
    plan: int
    limit: int | None
    slots: int


@dataclass(frozen=True)
class SessionStats:
    """Counts of what a session's calls did since it was opened, and what it keeps for them; zeros without a GPU.

    `contexts` and CUDA `graphs` are there now; `replays` are calls of `run` that were one replay of a graph; `waits` found
    every slot in use; `evictions` were made for another shape or other addresses: where they grow, open it with more `graphs`.
    """

    contexts: int
    graphs: int
    replays: int
    waits: int
    evictions: int


class Session:
    """A TensorRT engine, ready to run.

    Args:
        engine: a plan file, which must be the one that the manifest beside it describes; for "onnxruntime" also an ONNX file.
        device: the GPU's number; devices: several ("all", or their numbers): a call goes to the one with fewest of them.
        backend: "auto" (the TensorRT here that runs the plan, the full one before the lean runtime), "tensorrt", "lean",
            "rtx"; or "onnxruntime", never taken unless asked for: on the CPU, the graph that `build --save-onnx` kept.
        contexts: calls at the same time on each GPU, at the most. Give one for every thread that calls: those beyond wait.
        queue: calls that `submit` holds at the most; beyond, it waits.
        graphs: shapes that keep a context and CUDA graphs of their own, in each slot; 0: no CUDA graphs.
        memory: the most GPU memory for scratch and buffers on each GPU, such as "2GiB"; None: what there is.
        trust: open also a plan that no manifest describes, such as trtexec's: only from where you would take programs.
        trust_host_code: open also a plan built with `--version-compatible`, which carries a library that runs on the host.
        weights: an ONNX model whose weights the plan takes in place of its own, as `trtopt.refit` does it.
        calib: the calibration table of an INT8 or FP8 engine, for `weights`.
        threads: CPU threads of a call with backend "onnxruntime"; None: one per core.

    Closing it, by `close` or `with`, frees everything and keeps what TensorRT-RTX compiled for the next process. It isn't
    pickled, and doesn't work in a fork of the process that opened it. It has `engine`, `backend`, `manifest`, `inputs` and
    `outputs` (`TensorInfo`), `profiles`, `classes`, `preprocess`, `embedded`, `kinds` of outputs, and `notes`.

    Raises: UsageError, DeviceError (no GPU, driver or memory), EngineMismatch (not for this GPU or TensorRT, or not what its
    manifest describes), EngineError (damaged), NoBackend.
    """

    @typed
    def __init__(
        self,
        engine: str | os.PathLike[str],
        *,
        device: int = 0,
        devices: str | Sequence[int] | None = None,
        backend: str = "auto",
        contexts: int = 16,
        queue: int = 64,
        graphs: int = 16,
        memory: str | int | None = None,
        trust: bool = False,
        trust_host_code: bool = False,
        weights: str | os.PathLike[str] | None = None,
        calib: str | os.PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        choice(backend, BACKENDS, "`backend=`")
        for name, value, least in (("contexts", contexts, 1), ("queue", queue, 1), ("graphs", graphs, 0)):
            if value < least:
                raise UsageError(f"{name} is {value!r}; a number of at least {least} is needed")
        self.engine = existing_file(engine, "the engine")
        if threads is not None and (backend != "onnxruntime" or threads < 1):
            raise UsageError(f"threads is {threads!r}; a number of at least 1 is needed, with backend='onnxruntime'")
        onnx = self.engine.suffix == ".onnx"
        if onnx and backend != "onnxruntime":
            raise UsageError(
                f"{self.engine.name} is an ONNX model, not an engine: build one from it with trtopt build; or, to run the "
                "model itself on the CPU, ask for `backend='onnxruntime'`"
            )
        self.manifest: Manifest | None = None if onnx else load_manifest(self.engine)
        self.notes: list[str] = []
        if calib is not None and weights is None:
            raise UsageError("`calib=` has the scales for other weights: give the model as `weights=`, or drop it")
        if weights is not None and (self.manifest is None or backend == "onnxruntime"):
            why = "a graph has its own" if backend == "onnxruntime" else f"{self.engine.name} has no manifest"
            raise UsageError(f"`weights=` is for engines that trtopt built with `refit=True` or `strip=True`: {why}")
        self._forked = False
        _opened.add(self)
        self._queue, self._places = queue, threading.BoundedSemaphore(queue)
        self._gpus: list[GpuEngine] = []
        self._limit = None if memory is None else parse_size(memory, "memory")
        if self._limit is not None and self._limit < 1:
            raise UsageError(f"memory is {memory!r}; at least 1 byte is needed, or None for what there is")
        if backend == "onnxruntime":
            self._open_onnx(threads)
        else:
            self.backend, self._gpus, self.manifest, self._plan_bytes = open_gpus(
                self.engine,
                self.manifest,
                [device] if devices is None else ordinals(devices),
                backend,
                graphs,
                self._limit,
                trust or trust_host_code,
                trust_host_code,
                weights,
                calib,
            )
            self._use_gpus(self._gpus, contexts)
        # Collected without `close`, perhaps while this thread captures a CUDA graph: contexts and engines, which free GPU
        # memory themselves, must not go there.
        weakref.finalize(self, after_capture, [self._slots, self._gpus].clear)
        self.inputs = self._infos(self._signature.inputs)
        self.outputs = self._infos(self._signature.outputs)
        self.profiles: tuple[Profile, ...] = self._signature.profiles
        preprocessing = self.manifest.preprocess if self.manifest else None
        self.preprocess: Preprocess | None = Preprocess.load(preprocessing) if preprocessing else None
        self.embedded: Embedded | None = embedded_by(self.manifest)
        self.classes: tuple[str, ...] | None = None
        if self.manifest and self.manifest.classes:
            self.classes = tuple(self.manifest.classes)
        self.kinds: dict[str, str] = {}
        self._names = tuple(item.name for item in self.inputs)
        self._opening = threading.RLock()  # a finalizer of the caller's may close it in a thread that has it
        self._workers: ThreadPoolExecutor | None = None
        self._bound: weakref.WeakSet[BoundCall] = weakref.WeakSet()
        self._closing = False

    @classmethod
    def for_model(cls, model: str | os.PathLike[str] | Any, **options: Any) -> Session:
        """A session on an ONNX model's engine, which is taken from the engine store, or built and stored first.

            with trtopt.Session.for_model("resnet50.onnx", int8=True, calib="resnet50.calib.json") as session: ...

        One engine, of the precision that is named: nothing is measured. Processes that ask at once build it once.
        With several `devices` it is the first one's.

        Args:
            model: an ONNX file or model.
            options: of `Session`, but `trust`, `weights` and its `calib` (backend "onnxruntime" runs the graph that TensorRT
                was given on the CPU); and of `trtopt.build`, but `output`: precision, `calib`, `shapes`, `store`, ….

        Raises: as `trtopt.build` without comparing, and as `Session`.
        """
        from trtopt.builder.request import BuildRequest
        from trtopt.core.options import taking
        from trtopt.engine.store import PLAN
        from trtopt.runtime.stored import opened

        backend, devices = options.get("backend", "auto"), options.pop("devices", None)
        if on_gpu := backend != "onnxruntime":
            chosen_builder(backend)
        device = options.get("device", 0)
        of_plan = functools.partial(cls, device=device, devices=devices, backend=backend)
        for name in ("contexts", "queue", "graphs", "memory", "trust_host_code", "threads"):
            if name in options:
                of_plan.keywords[name] = options.pop(name)
        build = {**options, "device": device if devices is None else ordinals(devices)[0]}
        if not on_gpu:
            build.pop("backend")

        @taking(BuildRequest, writes=False)
        def for_model(request: BuildRequest) -> Session:
            if on_gpu:  # said before the build
                check_for_gpus("an engine", "its graph")
            return opened(request, of_plan, with_graph=not on_gpu)

        return for_model(model, **{"output": PLAN, **build})

    def _open_onnx(self, threads: int | None) -> None:
        self.backend, self._plan_bytes = "onnxruntime", self.engine.stat().st_size
        graph = self.engine
        if graph.suffix != ".onnx":
            if self.manifest is None or self.manifest.graph_file is None:
                raise UsageError(
                    f"`backend='onnxruntime'` runs the graph that was kept beside {graph.name}; there is none in its folder: "
                    "build with `save_onnx=`, or give an ONNX file"
                )
            self.manifest.check_plan(self.engine)
            graph = existing_file(graph.parent / self.manifest.graph_file, "the graph kept at the build", WITHOUT_GRAPH)
        from trtopt.runtime.onnx_slot import OnnxSlot  # loads onnx, which a service on a GPU doesn't need

        slot = OnnxSlot(graph, self.manifest, threads)
        self._signature = slot.signature
        instead = "open several sessions: ONNX Runtime runs one call of each at a time"
        self._slots: SlotPool[AnySlot] = SlotPool([lambda: slot], 1, instead)

    def _use_gpus(self, gpus: list[GpuEngine], contexts: int) -> None:
        self.notes += [note for gpu in gpus for note in gpu.notes]
        self._signature = gpus[0].signature
        if not gpus[0].shares:
            contexts = 1
            self.notes.append(
                "one call at a time on each GPU: this engine's contexts can't share a profile (TensorRT 8.6, built "
                "without PROFILE_SHARING_0806); trtopt build makes engines that share"
            )
        instead = "open the session with more `contexts=`"
        self._slots = SlotPool([functools.partial(Slot, gpu) for gpu in gpus], contexts, instead)
        self._slots.give(self._slots.take())  # the first slot is made now: what can't work fails here

    # Running -------------------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Any] | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Infer once. Safe from any number of threads.

        Args:
            inputs: input name → NumPy array, torch or CuPy tensor, or anything with DLPack or `__cuda_array_interface__`, of
                the input's dtype, in a shape inside one of `profiles`. In GPU memory it must be contiguous and isn't copied.
            out: output name → array to write that result into, instead of a new one.
            stream: a CUDA stream of the caller's (a handle, or a torch or CuPy stream) to run on. If all inputs and results
                are in GPU memory this returns at once, and they are in the order of that stream: leave the inputs alone.
            timeout: seconds to wait for a free context; None: as long as it takes.

        Returns:
            One array for each output: in GPU memory if any input is (torch tensors for torch, CuPy arrays for CuPy, else a
            `DeviceArray`), otherwise in host memory. A result whose shape depends on the data is always in host memory.

        Raises: UsageError (also for a name, dtype or shape that the engine doesn't take), Busy (no context came free within
            `timeout`), EngineError (TensorRT couldn't run it), DeviceError (CUDA failed, this is closed, or was forked).
        """
        if self._forked:
            self._alive()
        try:
            values = [inputs[name] for name in self._names]
        except (KeyError, IndexError, TypeError):
            self._signature.check_names(inputs)
            raise
        if len(values) != len(inputs):
            self._signature.check_names(inputs)
        if out is not None and type(out) is not dict:
            check_mapping("out", out)
        handle = None if stream is None else stream_handle(stream)
        plain = stream is None and out is None and {*map(type, values)} == _PLAIN
        slot = self._slots.take(None if plain or len(self._gpus) < 2 else self._nearby(values, out), timeout)
        try:
            if plain:
                shapes = self._accept(values)
                return slot.run(values, shapes)
            target = slot.stream_ptr if handle is None else handle
            arrays = views(values, target, self._names)
            shapes = self._accept(arrays)
            results = dict(zip(out, views(out.values(), target, [*out], write=True))) if out else None
            if results and out:
                check_out(self._signature, results, out)
            outputs = slot.run(arrays, shapes, results, handle, values[0] if values else None)
        finally:
            self._slots.give(slot)
        if out:
            outputs.update(out)
        return outputs

    def bind(
        self,
        inputs: Mapping[str, Any],
        *,
        out: Mapping[str, Any] | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> BoundCall:
        """Prepare inference on arrays that stay where they are; calling the result runs it, at the cost of a graph replay.

        Args:
            inputs: what they hold at a call is what it runs on. What other streams than the default one write into them must be
                there before a call, unless it is written in the order of `stream`.
            out: as for `run`; else arrays are made, once.
            stream, timeout: as for `run`.

        Raises: as `run`; UsageError also where an output's shape depends on the data.
        """
        self._alive()
        if not self._gpus:
            outputs = self.run(inputs, out=out, stream=stream, timeout=timeout)
            again = functools.partial(self.run, inputs, out=outputs)
            bound_call = BoundCall(again, outputs, "ONNX Runtime runs it", inputs, lambda: None)
            self._bound.add(bound_call)
            return bound_call
        out = {} if out is None else out
        self._signature.check_names(inputs)
        check_mapping("out", out)
        handle = None if stream is None else stream_handle(stream)
        values = [inputs[name] for name in self._names]
        slot = self._slots.take(self._nearby(values, out) if len(self._gpus) > 1 else None, timeout)
        try:
            assert isinstance(slot, Slot)
            target = slot.stream_ptr if handle is None else handle
            arrays = views(values, target, self._names)
            shapes = self._accept(arrays)
            results = dict(zip(out, views(out.values(), target, [*out], write=True)))
            check_out(self._signature, results, out)
            with slot.device.current():
                call, outputs, note, references = prepare_call(
                    slot, arrays, shapes, results, handle, values[0] if values else None
                )
        except BaseException:
            self._slots.give(slot)
            raise
        release, held = functools.partial(self._slots.drop, slot), (self, references, values, out)
        bound_call = BoundCall(call, {**outputs, **out}, note, held, release)
        with self._opening:
            if not self._closing:
                self._bound.add(bound_call)
                return bound_call
        bound_call.close()  # `close` has looked for bound calls already, and waits for this one's slot
        raise DeviceError(CLOSED)

    def _nearby(self, values: Sequence[Any], out: Mapping[str, Any] | None) -> int | None:
        """Return the number of the GPU where a call's arrays are, among the session's; None, any, if they are on the host."""
        found = (number for array in (*values, *(out or {}).values()) if (number := gpu_of(array)) is not None)
        if (ordinal := next(found, None)) is None:
            return None
        ordinals = [gpu.device.info.ordinal for gpu in self._gpus]
        if ordinal not in ordinals:
            raise UsageError(f"an input lies on GPU {ordinal}, which this session doesn't use")
        return ordinals.index(ordinal)

    def _accept(self, arrays: Sequence[Source]) -> tuple[Shape, ...]:
        """Check types. (Ranks and shapes a slot checks that doesn't know them.)"""
        for tensor, array in zip(self._signature.inputs, arrays):
            if array.dtype != tensor.dtype:
                check_array(tensor, array)
        return tuple([array.shape for array in arrays])

    def submit(self, inputs: Mapping[str, Any], *, timeout: float | None = None) -> Future[dict[str, Any]]:
        """`run` in the background: returns a future at once, unless `queue` calls are waiting or running already.

        Then it waits for one to end, at most `timeout` seconds, and raises Busy: a service that is asked for more than it can
        do slows its callers down instead of filling its memory. Leave the inputs alone until the future is done.
        """
        self._alive()
        check_timeout(timeout)
        places = self._places
        if not places.acquire(timeout=None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise Busy(
                f"nothing came free in {timeout:.3g} s: all {self._queue} are in use; call less often, or open the "
                "session with a longer `queue=`"
            )
        try:
            future = self._start(inputs)
        except BaseException:
            places.release()
            raise
        future.add_done_callback(lambda _: places.release())
        return future

    async def run_async(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """`run` for asyncio: never blocks the event loop. (How many wait at most is the tasks' matter.)"""
        self._alive()
        return await asyncio.wrap_future(self._start(inputs))

    def _start(self, inputs: Mapping[str, Any]) -> Future[dict[str, Any]]:
        with self._opening:
            if self._closing:
                raise DeviceError(CLOSED)
            if self._workers is None:
                self._workers = ThreadPoolExecutor(self._slots.most, thread_name_prefix=_NAME)
            return self._workers.submit(self.run, inputs)

    def run_images(
        self, images: Iterable[str | os.PathLike[str] | bytes | NDArray[np.uint8]], *, top: int = 5
    ) -> list[list[Prediction]] | dict[str, Any]:
        """Decode, preprocess as at calibration (the manifest knows how) and run; batches fit the profiles.

        Args:
            images: files, encoded images in memory, or uint8 arrays height × width × 3 in RGB; also one array of several.
            top: how many of the best classes to give for each image.

        Returns:
            For an engine with one output of images × classes: for each image its best classes (softmax scores). Otherwise the
            outputs as arrays, the images along the first axis.

        Raises: as `run`; UsageError where the engine takes no images, DataError for one that can't be decoded, before any runs.
        """
        return images_of.run_images(self, images, top)

    def preparing(self, given: Any) -> Preprocess:
        """Return preprocessing by other rules, before its size is known: a preset, a TOML file, or a mapping of what to change.
        UsageError where that changes what the engine does itself."""
        if self.embedded is None:
            return Preprocess.load(given, self.preprocess)
        return self.embedded.leaving(Preprocess.load(given, self.embedded.preprocess))

    def taken(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Inputs of the model, as this engine takes them: FP16 where it was built without FP32 inputs, and pixels where its
        preprocessing is embedded; DataError where they weren't made of pixels."""
        arrays = dict(inputs) if self.embedded is None else self.embedded.to_pixels(inputs)
        types = {item.name: item.dtype for item in self._signature.inputs}
        return {name: np.asarray(item).astype(types.get(name, item.dtype), copy=False) for name, item in arrays.items()}

    def prepare(self, image: str | os.PathLike[str] | bytes | NDArray[np.uint8]) -> NDArray[Any]:
        """Return an image as a sample of the input, without its batch axis: decoded and preprocessed as `run_images` does
        it."""
        return images_of.preparation(self)(pixels(image, 0))

    def run_batches(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """`run` on any number of samples in host memory, in batches as large as the engine takes: cut and joined on the axis
        where each input and output has them (`batch_axis`). Inputs that don't count samples are the same in all batches."""
        self._signature.check_names(inputs)
        arrays: dict[str, NDArray[Any]] = {}
        for name, array in zip(self._names, views([inputs[name] for name in self._names], 0, self._names)):
            if isinstance(array, View):
                raise UsageError(f"input {name!r} lies in GPU memory; batches are cut in host memory: call run")
            arrays[name] = array
        parts = calls(arrays, self.inputs, self.outputs, self.profiles)
        return joined([call.cut(self.run(call.feed), self.outputs) for call in parts], self.outputs)

    def _infos(self, tensors: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
        """Describe tensors as the engine has them; where samples lie the manifest knows."""
        entries = () if self.manifest is None else (*self.manifest.inputs, *self.manifest.outputs)
        axes = {item["name"]: item.get("batch_axis", 0) for item in entries}
        return tuple(replace(item.info, batch_axis=axes.get(item.name, item.batch_axis)) for item in tensors)

    # What it holds -------------------------------------------------------------------------------------------------

    @typed
    def pinned(self, name: str, shape: Sequence[int]) -> NDArray[Any]:
        """An array for input `name` in page-locked memory: write into it and give it to `run`, which then copies nothing."""
        self._alive()
        if self._closing:
            raise DeviceError(CLOSED)
        tensor = next((item for item in self._signature.inputs if item.name == name), None)
        if tensor is None:
            raise UsageError(f"there is no input {name!r}; the engine takes {', '.join(map(repr, self._names))}")
        sizes = tuple(map(int, shape))
        if len(sizes) != len(tensor.shape) or any(size not in (-1, there) for size, there in zip(tensor.shape, sizes)):
            raise UsageError(f"input {name!r} takes shape {x(tensor.shape)}, not {x(sizes)}")
        if min(sizes, default=0) < 0:
            raise UsageError(f"shape {x(sizes)} of input {name!r} has a negative size")
        if not self._gpus:
            return np.empty(sizes, tensor.dtype)
        return self._gpus[0].memory.pinned(tensor.nbytes(sizes)).array(tensor.dtype, sizes)

    def memory(self) -> MemoryReport:
        """Return what this holds now."""
        return MemoryReport(
            gpu=sum(gpu.memory.gpu_bytes for gpu in self._gpus),
            pinned=sum(gpu.memory.pinned_bytes for gpu in self._gpus),
            plan=self._plan_bytes,
            limit=self._limit,
            slots=len(self._slots.all()),
        )

    def stats(self) -> SessionStats:
        """Return what its calls did so far; after `close`, only `waits`. From any thread, also while calls run."""
        slots = [slot for slot in self._slots.all() if isinstance(slot, Slot)]
        return SessionStats(
            contexts=sum(slot.contexts.contexts for slot in slots),
            graphs=sum(slot.contexts.graphs for slot in slots),
            replays=sum(slot.replays for slot in slots),
            waits=self._slots.waits,
            evictions=sum(slot.contexts.evictions for slot in slots),
        )

    def time(self, inputs: Mapping[str, Any], iterations: int = 100, warmup: int = 10) -> Timing:
        """Measure inference on `inputs`, which are copied to the GPU once.

        Raises: as `run`; UsageError without a GPU.
        """
        arrays = self._to_measure(inputs, iterations, warmup)
        slot = self._slots.take()
        try:
            assert isinstance(slot, Slot)
            with slot.device.current():
                return time_slot(slot, arrays, self._accept(arrays), iterations, warmup)
        finally:
            self._slots.give(slot)

    @typed
    def profile(self, inputs: Mapping[str, Any], iterations: int = 50, warmup: int = 10) -> LayerTimes:
        """Measure each layer on `inputs`, in an execution context of its own, by TensorRT's profiler.

        Raises: as `run`; UsageError without a GPU, and for an engine that lets one context use its profile.
        """
        arrays = self._to_measure(inputs, iterations, warmup)
        if not self._gpus[0].shares:
            raise UsageError(
                "this engine lets one context use its profile, so none can be profiled: build it with trtopt"
            )
        layer_infos = converted(list(self.manifest.layers), tuple[LayerInfo, ...]) if self.manifest else ()
        slot = Slot(self._gpus[0])
        try:
            with slot.device.current():
                return profile_slot(slot, arrays, self._accept(arrays), layer_infos, iterations, warmup)
        finally:
            slot.close()

    def _to_measure(self, inputs: Mapping[str, Any], iterations: int, warmup: int) -> list[NDArray[Any]]:
        if not (isinstance(iterations, int) and isinstance(warmup, int)) or iterations < 1 or warmup < 0:
            raise UsageError(f"iterations is {iterations!r} and warmup {warmup!r}; at least 1 and 0 are needed")
        self._alive()
        if not self._gpus:
            raise UsageError("times of an engine need a GPU; this session runs in ONNX Runtime")
        self._signature.check_names(inputs)
        return [np.asarray(inputs[name]) for name in self._names]

    def close(self, finish: bool = True) -> None:
        """Free everything. Calls that run are waited for; those that wait, in `run` or in the queue, run too with `finish`,
        else they are cancelled. A second call does nothing."""
        with self._opening:
            if self._closing:
                return
            self._closing = True
            bound_calls = tuple(self._bound)
        if self._forked:
            return
        if self._workers is not None:
            inside = threading.current_thread().name.startswith(_NAME)  # in a future's callback
            self._workers.shutdown(wait=not inside, cancel_futures=not finish)
        for bound_call in bound_calls:
            bound_call.close()
        del bound_calls
        slots = self._slots.close(finish)
        while slots:
            slots.pop().close()
        for gpu in self._gpus:  # only these have the engine now, so that it goes while its GPU is current
            self.notes += gpu.close()

    def __repr__(self) -> str:
        if not hasattr(self, "_closing"):  # its engine couldn't be opened
            return object.__repr__(self)
        takes, gives = (
            ", ".join(f"{item.name} {item.dtype} {item.dims}" for item in items)
            for items in (self.inputs, self.outputs)
        )
        state = "closed" if self._closing else self.backend
        return f"<trtopt.Session {self.engine.name} ({state}): {takes or 'nothing'} → {gives}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a session can't be pickled or copied: open one in the process that runs it, such as in the initializer of a pool"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finish=kind is None)

    def _alive(self) -> None:
        if self._forked:
            what = "CUDA doesn't survive that" if self._gpus else "ONNX Runtime's threads aren't in the child"
            raise DeviceError(
                f"this session was opened before the process forked, and {what}: open it in the child, or start workers "
                "with multiprocessing's 'spawn'"
            )


_opened: weakref.WeakSet[Session] = weakref.WeakSet()


def _tell_child() -> None:
    """Mark sessions at the fork, so that calls needn't ask where they are: that takes a system call."""
    for session in tuple(_opened):
        session._forked = True
        for bound_call in tuple(getattr(session, "_bound", ())):  # a thread that isn't here may have its lock
            bound_call._call, bound_call._lock = session._alive, threading.Lock()


os.register_at_fork(after_in_child=_tell_child)
