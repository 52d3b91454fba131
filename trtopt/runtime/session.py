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
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import Busy, DeviceError, UsageError
from trtopt.core.options import typed
from trtopt.core.values import check_timeout
from trtopt.cuda.arrays import host_views, stream_handle, views
from trtopt.cuda.tensors import check_mapping
from trtopt.data.decoding import pixels
from trtopt.data.rebatch import calls, joined
from trtopt.runtime.bound_call import BoundCall, prepare_call
from trtopt.runtime.images import Prediction, preparation, ranked, samples_of, stacked
from trtopt.runtime.layout import Source, Wanted, check_out
from trtopt.runtime.open_engine import AnySlot, OpenEngine
from trtopt.runtime.request import OpeningOptions
from trtopt.runtime.slot import Slot
from trtopt.runtime.slot_pool import CLOSED
from trtopt.runtime.timing import LayerTimes, Timing, profile_engine, time_engine

Image: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[np.uint8]"
_PLAIN = {np.ndarray}
_NAME = "trtopt-session"  # of threads


class Session(OpenEngine, AbstractContextManager["Session"]):
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
        plugins: libraries with the TensorRT plugins that the engine needs, as its manifest says; also $TRTOPT_PLUGINS.
        operators: Python files with references of custom operators, for backend "onnxruntime".
        require: "certified": open it only if `trtopt certify` has found it right; None: any.

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
        plugins: Sequence[str] | str = (),
        operators: Sequence[str] | str = (),
        require: str | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "engine")}
        self._open(engine, OpeningOptions(**options))
        self._queue, self._places = queue, threading.BoundedSemaphore(queue)
        self._opening = threading.RLock()  # a finalizer of the caller's may close it in a thread that has it
        self._workers: ThreadPoolExecutor | None = None
        self._bound: weakref.WeakSet[BoundCall] = weakref.WeakSet()
        _opened.add(self)

    @classmethod
    def for_model(cls, model: str | os.PathLike[str] | Any, **options: Any) -> Session:
        """A session on an ONNX model's engine, which is taken from the engine store, or built and stored first.

            with trtopt.Session.for_model("resnet50.onnx", int8=True, calib="resnet50.calib.json") as session: ...

        One engine, of the precision that is named: nothing is measured. Processes that ask at once build it once.
        With several `devices` it is the first one's.

        Args:
            model: an ONNX file or model.
            options: of `Session`, but `trust`, `require`, `weights` and its `calib` (backend "onnxruntime" runs the graph that
                TensorRT was given on the CPU); and of `trtopt.build`, but `output`: precision, `calib`, `shapes`, `store`, ….

        Raises: as `trtopt.build` without comparing, and as `Session`.
        """
        from trtopt.runtime.stored import open_for_model

        return open_for_model(cls, model, options)

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
        plain = stream is None and out is None and {*map(type, values)} == _PLAIN
        slot = self._slots.take(None if plain or len(self._gpus) < 2 else self._nearby(values, out), timeout)
        try:
            if plain:
                return slot.run(values)
            outputs = slot.run(*self._views(slot, values, out, stream))
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
        values = [inputs[name] for name in self._names]
        slot = self._slots.take(self._nearby(values, out) if len(self._gpus) > 1 else None, timeout)
        try:
            assert isinstance(slot, Slot)
            given = self._views(slot, values, out, stream)
            with slot.device.current():
                call, outputs, note, references = prepare_call(slot, *given)
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

    def _views(
        self, slot: AnySlot, values: Sequence[Any], out: Mapping[str, Any] | None, stream: Any
    ) -> tuple[list[Source], Wanted]:
        """Return where inputs lie and where results go, all checked."""
        handle = None if stream is None else stream_handle(stream)
        target = slot.stream_ptr if handle is None else handle
        arrays = views(values, target, self._names)
        wanted = Wanted(stream=handle, example=values[0] if values else None)
        if out:
            wanted.out = dict(zip(out, views(out.values(), target, [*out], write=True)))
            check_out(self._signature, wanted.out, out)
        return arrays, wanted

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
            self._check_open()
            if self._workers is None:
                self._workers = ThreadPoolExecutor(self._slots.most, thread_name_prefix=_NAME)
            return self._workers.submit(self.run, inputs)

    def run_images(self, images: Image | Iterable[Image], *, top: int = 5) -> list[list[Prediction]] | dict[str, Any]:
        """Decode, preprocess as at calibration (the manifest knows how) and run; batches fit the profiles.

        Args:
            images: one or several files, encoded images in memory, or uint8 arrays height × width × 3 in RGB.
            top: how many of the best classes to give for each image.

        Returns:
            For an engine with one output of images × classes: for each image its best classes (softmax scores). Otherwise the
            outputs as arrays, the images along the first axis.

        Raises: as `run`; UsageError where the engine takes no images, DataError for one that can't be decoded, before any runs.
        """
        samples = samples_of(self, images, top)
        return ranked(self, self.run_batches(stacked(self, samples)), len(samples), top)

    def prepare(self, image: Image) -> NDArray[Any]:
        """Return an image as a sample of the input, without its batch axis: decoded and preprocessed as `run_images` does
        it."""
        return preparation(self)(pixels(image, 0))

    def run_batches(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """`run` on any number of samples in host memory, in batches as large as the engine takes: cut and joined on the axis
        where each input and output has them (`batch_axis`). Inputs that don't count samples are the same in all batches."""
        self._signature.check_names(inputs)
        values = [inputs[name] for name in self._names]
        arrays = host_views(values, self._names, "batches are cut in host memory: call run")
        parts = calls(dict(zip(self._names, arrays)), self.inputs, self.outputs, self.profiles)
        return joined([call.cut(self.run(call.feed), self.outputs) for call in parts], self.outputs)

    def time(self, inputs: Mapping[str, Any], iterations: int = 100, warmup: int = 10) -> Timing:
        """Measure inference on `inputs`, which are copied to the GPU once.

        Raises: as `run`; UsageError without a GPU.
        """
        return time_engine(self, inputs, iterations, warmup)

    @typed
    def profile(self, inputs: Mapping[str, Any], iterations: int = 50, warmup: int = 10) -> LayerTimes:
        """Measure each layer on `inputs`, in an execution context of its own, by TensorRT's profiler.

        Raises: as `run`; UsageError without a GPU, and for an engine that lets one context use its profile.
        """
        return profile_engine(self, inputs, iterations, warmup)

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
        self._free(finish)

    def __repr__(self) -> str:
        if not hasattr(self, "_bound"):  # its engine couldn't be opened
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

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finish=kind is None)


_opened: weakref.WeakSet[Session] = weakref.WeakSet()


def _tell_child() -> None:
    """Mark sessions at the fork, so that calls needn't ask where they are: that takes a system call."""
    for session in tuple(_opened):
        session._forked = True
        for bound_call in tuple(session._bound):  # a thread that isn't here may have its lock
            bound_call._call, bound_call._lock = session._alive, threading.Lock()


os.register_at_fork(after_in_child=_tell_child)
