"""An open engine: what is known of it, the slots that run it, and the memory that it holds."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described
from trtopt.core.errors import DeviceError, EngineMismatch, UsageError
from trtopt.core.files import existing_file
from trtopt.core.options import typed
from trtopt.core.values import Profile, TensorInfo, x
from trtopt.cuda.arrays import gpu_of
from trtopt.cuda.device import after_capture
from trtopt.cuda.tensors import Tensor
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.engine.manifest import WITHOUT_GRAPH, Manifest, embedded_by, load_manifest
from trtopt.runtime.gpu_engine import GpuEngine, open_gpus
from trtopt.runtime.request import OpeningOptions
from trtopt.runtime.slot import Slot
from trtopt.runtime.slot_pool import CLOSED, SlotPool

if TYPE_CHECKING:
    from trtopt.runtime.onnx_slot import OnnxSlot

AnySlot: TypeAlias = "Slot | OnnxSlot"


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


class OpenEngine:
    """An engine on GPUs, or its graph in ONNX Runtime, until it is closed. `Session` describes its options and attributes."""

    def _open(self, engine: str | os.PathLike[str], options: OpeningOptions) -> None:
        self._forked = self._closing = False
        self.engine, self.backend = existing_file(engine, "the engine"), options.backend
        onnx, on_cpu = self.engine.suffix == ".onnx", self.backend == "onnxruntime"
        if onnx and not on_cpu:
            raise UsageError(
                f"{self.engine.name} is an ONNX model, not an engine: build one from it with trtopt build; or, to run the "
                "model itself on the CPU, ask for `backend='onnxruntime'`"
            )
        self.manifest: Manifest | None = None if onnx else load_manifest(self.engine)
        if options.require is not None:
            if self.manifest is None:
                raise EngineMismatch(f"{self.engine} isn't certified: it has no manifest, which would say so")
            self.manifest.check_certificate(self.engine)
        if options.weights is not None and (self.manifest is None or on_cpu):
            why = "a graph has its own" if on_cpu else f"{self.engine.name} has no manifest"
            raise UsageError(f"`weights=` is for engines that trtopt built with `refit=True` or `strip=True`: {why}")
        self.notes: list[str] = []
        self._limit, self._gpus = options.limit, list[GpuEngine]()
        (self._open_onnx if on_cpu else self._open_gpus)(options)
        # Collected without `close`, perhaps while this thread captures a CUDA graph: contexts and engines, which free GPU
        # memory themselves, must not go there.
        weakref.finalize(self, after_capture, [self._slots, self._gpus].clear)
        self.inputs = self._infos(self._signature.inputs)
        self.outputs = self._infos(self._signature.outputs)
        self._names = tuple(item.name for item in self.inputs)
        self.profiles: tuple[Profile, ...] = self._signature.profiles
        preprocessing = self.manifest.preprocess if self.manifest else None
        self.preprocess: Preprocess | None = Preprocess.load(preprocessing) if preprocessing else None
        self.embedded: Embedded | None = embedded_by(self.manifest)
        names = self.manifest.classes if self.manifest else None
        self.classes: tuple[str, ...] | None = tuple(names) if names else None
        self.kinds: dict[str, str] = {}

    def _open_onnx(self, options: OpeningOptions) -> None:
        self._plan_bytes, graph = self.engine.stat().st_size, self.engine
        if graph.suffix != ".onnx":
            if self.manifest is None or self.manifest.graph_file is None:
                raise UsageError(
                    f"`backend='onnxruntime'` runs the graph that was kept beside {graph.name}; there is none in its folder: "
                    "build with `save_onnx=`, or give an ONNX file"
                )
            self.manifest.check_plan(self.engine)
            graph = existing_file(graph.parent / self.manifest.graph_file, "the graph kept at the build", WITHOUT_GRAPH)
        from trtopt.runtime.onnx_slot import OnnxSlot  # loads onnx, which a service on a GPU doesn't need

        slot = OnnxSlot(graph, self.manifest, options.threads)
        self._signature = slot.signature
        instead = "open several sessions: ONNX Runtime runs one call of each at a time"
        self._slots: SlotPool[AnySlot] = SlotPool([lambda: slot], 1, instead)

    def _open_gpus(self, options: OpeningOptions) -> None:
        self.backend, self._gpus, self.manifest, self._plan_bytes = open_gpus(self.engine, self.manifest, options)
        self.notes += [note for gpu in self._gpus for note in gpu.notes]
        self._signature, contexts = self._gpus[0].signature, options.contexts
        if not self._gpus[0].shares:
            contexts = 1
            self.notes.append(
                "one call at a time on each GPU: this engine's contexts can't share a profile (TensorRT 8.6, built "
                "without PROFILE_SHARING_0806); trtopt build makes engines that share"
            )
        instead = "open the session with more `contexts=`"
        self._slots = SlotPool([functools.partial(Slot, gpu) for gpu in self._gpus], contexts, instead)
        self._slots.give(self._slots.take())  # the first slot is made now: what can't work fails here

    def _infos(self, tensors: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
        """Describe tensors as the engine has them; where samples lie the manifest knows."""
        entries = () if self.manifest is None else (*self.manifest.inputs, *self.manifest.outputs)
        axes = {item["name"]: item.get("batch_axis", 0) for item in entries}
        return tuple(
            TensorInfo(item.name, item.dtype.name, item.shape, axes.get(item.name, item.batch_axis)) for item in tensors
        )

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

    @typed
    def pinned(self, name: str, shape: Sequence[int]) -> NDArray[Any]:
        """An array for input `name` in page-locked memory: write into it and give it to `run`, which then copies nothing."""
        self._check_open()
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
        contexts = [context for slot in slots for context in slot.contexts.all()]
        return SessionStats(
            contexts=len(contexts),
            graphs=sum(replay is not None for context in contexts for replay in list(context.graphs.values())),
            replays=sum(slot.replays for slot in slots),
            waits=self._slots.waits,
            evictions=sum(slot.contexts.evictions for slot in slots),
        )

    def _nearby(self, values: Sequence[Any], out: Mapping[str, Any] | None) -> int | None:
        """Return the number of the GPU where a call's arrays are, among the engine's; None, any, if they are on the host."""
        found = (number for array in (*values, *(out or {}).values()) if (number := gpu_of(array)) is not None)
        if (ordinal := next(found, None)) is None:
            return None
        ordinals = [gpu.device.info.ordinal for gpu in self._gpus]
        if ordinal not in ordinals:
            raise UsageError(f"an input lies on GPU {ordinal}, which this session doesn't use")
        return ordinals.index(ordinal)

    def _alive(self) -> None:
        if self._forked:
            what = "CUDA doesn't survive that" if self._gpus else "ONNX Runtime's threads aren't in the child"
            raise DeviceError(
                f"this session was opened before the process forked, and {what}: open it in the child, or start workers "
                "with multiprocessing's 'spawn'"
            )

    def _check_open(self) -> None:
        self._alive()
        if self._closing:
            raise DeviceError(CLOSED)

    def _free(self, finish: bool) -> None:
        """Wait for the slots and free them, then the engine on each GPU."""
        slots = self._slots.close(finish)
        while slots:
            slots.pop().close()
        for gpu in self._gpus:  # only these have the engine now, so that it goes while its GPU is current
            self.notes += gpu.close()
