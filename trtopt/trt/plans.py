"""Plans: the header that says who made one, and loading one for the runtime."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from trtopt.core.errors import EngineError, EngineMismatch, UnsupportedRequest, UsageError
from trtopt.core.library_output import unwarned
from trtopt.trt.compatibility import PlanOrigin, numbers
from trtopt.trt.messages import Messages

_TAGS = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}
_VERSION_AT = 24  # four bytes: major, minor, patch, build
# A shared library of a CPU's: plans hold the lean runtime as it is. Kernels are ELF files, too; e_machine is x86-64 or aarch64.
_HOST_CODE = re.compile(rb"\x7fELF.{14}[\x3e\xb7]\0", re.DOTALL)
_SIZE_AT = 16  # TensorRT-RTX: the plan's length, eight bytes; not known to hold for TensorRT


def plan_header(plan: bytes | memoryview) -> PlanOrigin | None:
    """Read a plan's header, its first 28 bytes, which say who made it; None when they aren't a plan's as known here."""
    start = bytes(memoryview(plan)[: _VERSION_AT + 4])
    product = _TAGS.get(start[:4])
    if product is None or len(start) < _VERSION_AT + 4:
        return None
    return PlanOrigin(product, ".".join(map(str, start[_VERSION_AT:])))


@dataclass(frozen=True)
class RuntimeSettings:
    """TensorRT-RTX's IRuntimeConfig and IRuntimeCache for an engine and its contexts, let go in the order of the fields."""

    cache: Any
    config: Any
    engine: Any
    runtime: Any
    captures: bool


@dataclass(frozen=True)
class LoadedEngine:
    """A deserialized engine with what keeps it alive, and what the runtime needs to drive it.

    Attributes:
        module: the TensorRT module, for its enums (TensorIOMode, …) and base classes (IOutputAllocator, …).
        engine: ICudaEngine.
        runtime: IRuntime; must outlive the engine.
        settings: TensorRT-RTX's runtime configuration and cache; None elsewhere.
        collecting: gathers TensorRT's messages while it is entered.
        made: the version of TensorRT that made the plan; empty: not known, or TensorRT-RTX, which runs its very own only. A
            later runtime hands calls on to the runtime that the plan carries; what that doesn't know gives 0 (the size of
            scratch memory) or ends the process (lean 10.16 with plans of 8.6, on an H200).

    Contexts must be let go before this.
    """

    module: Any
    engine: Any
    runtime: Any
    settings: RuntimeSettings | None = None
    collecting: Callable[[], AbstractContextManager[Messages]] = field(
        default=lambda: nullcontext(Messages()), repr=False, compare=False
    )
    made: tuple[int, ...] = ()

    @functools.cached_property
    def scratch_bytes(self) -> int:
        """Device memory that one context needs for activations, in bytes, whatever its profile and shapes."""
        newer = self._answers((10, 1)) and _has(self.engine, "device_memory_size_v2")
        if newer or not _has(self.engine, "device_memory_size"):
            return int(self.engine.device_memory_size_v2)
        # Where warnings are errors, the bindings of 10 leave one set, for which Python raises SystemError.
        with unwarned:
            return int(self.engine.device_memory_size)

    def _answers(self, since: tuple[int, ...]) -> bool:
        """Tell whether a call that came with that version of TensorRT may be made of this plan."""
        return not self.made or self.made >= since

    @property
    def captures_itself(self) -> bool:
        """Tell whether TensorRT-RTX captures CUDA graphs on its own, so that its caller must not."""
        return self.settings is not None and self.settings.captures

    def context(self, scratch: int, nbytes: int) -> Any:
        """A new IExecutionContext with the caller's memory for activations: at device address `scratch`, a multiple of 256,
        which must outlive it and serve no other at the same time, `nbytes` long, at the least `scratch_bytes`. EngineError
        where TensorRT gives none."""
        if nbytes < self.scratch_bytes:  # 8.6 isn't told the length, and would write past the end
            raise EngineError(f"an execution context needs {self.scratch_bytes} bytes of scratch memory, not {nbytes}")
        with self.collecting() as messages:
            if self.settings is not None:
                context = self.engine.create_execution_context(self.settings.config)
            elif self._answers((10, 0)) and hasattr(self.module, "ExecutionContextAllocationStrategy"):
                context = self.engine.create_execution_context(
                    self.module.ExecutionContextAllocationStrategy.USER_MANAGED
                )
            else:
                with unwarned:
                    context = self.engine.create_execution_context_without_device_memory()
            if context is None:
                why = "; ".join(" ".join(text.split()) for text in messages.errors[:6]) or "it gave no message"
                raise EngineError(f"TensorRT gives no execution context for this engine: {why}")
            if self._answers((10, 1)) and _has(context, "set_device_memory"):
                context.set_device_memory(scratch, nbytes)
            else:
                context.device_memory = scratch
        return context

    def aliases(self, source: str, result: str) -> bool:
        """Tell whether that output is that input, written in place (caches of keys and values; TensorRT 10.15 and later)."""
        has_aliases = self._answers((10, 15)) and _has(self.engine, "get_aliased_input_tensor")
        return has_aliases and bool(self.engine.get_aliased_input_tensor(result) == source)

    @staticmethod
    def shares_profiles(context: Any) -> bool:
        """Tell whether a further context, just made, can use a profile that an earlier one uses.

        8.6 gives a second context no profile, unless the engine was built with PreviewFeature.PROFILE_SHARING_0806;
        setting profile 0 on such a context ends the process (seen on an H200).
        """
        return int(context.active_optimization_profile) >= 0

    def output_allocator(
        self, reallocate: Callable[[str, int, int], int], notify: Callable[[str, tuple[int, ...]], None]
    ) -> Any:
        """An IOutputAllocator for `context.set_output_allocator`; keep it as long as the context.

        TensorRT calls it during enqueue, on the enqueuing thread: `reallocate` of (name, nbytes, alignment) gives a device
        address, never 0, not even for 0 bytes; `notify` gets (name, shape). What they raise is kept: TensorRT sees a failed
        allocation, and `check()`, to be called after every enqueue, raises it.

        Raises:
            EngineMismatch: the plan carries a runtime before 10, which calls what a later runtime's allocators don't have: seen
                on an H100, lean 10.16 ends the process.
        """
        if not self._answers((10, 0)) and numbers(str(self.module.__version__)) >= (10,):
            earlier = ".".join(map(str, self.made[:3]))
            raise EngineMismatch(
                f"the shape of an output depends on the data, and TensorRT {self.module.__version__} can't give such an output "
                f"of a plan made by TensorRT {earlier}: run it on that (or its lean runtime), or build it with a later one"
            )
        base: Any = self.module.IOutputAllocator

        class Allocator(base):  # type: ignore[misc]
            _raised: BaseException | None = None

            def _kept(self, call: Callable[..., Any], *values: Any) -> Any:
                try:
                    return call(*values)
                except BaseException as error:  # through C++ it would end the process
                    self._raised = self._raised or error

            def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
                return self._kept(lambda: int(reallocate(tensor_name, int(size), int(alignment)))) or 0

            # From TensorRT 10 on; the caller's stream is the one that the session enqueues on, so it needs no other care.
            def reallocate_output_async(
                self, tensor_name: str, memory: Any, size: int, alignment: int, stream: Any
            ) -> int:
                return self.reallocate_output(tensor_name, memory, size, alignment)

            def notify_shape(self, tensor_name: str, shape: Any) -> None:
                self._kept(lambda: notify(tensor_name, tuple(map(int, shape))))

            def check(self) -> None:
                error, self._raised = self._raised, None
                if error is not None:
                    raise error

        return Allocator()

    def profiler(self, note: Callable[[str, float], None]) -> Any:
        """An IProfiler for `context.profiler`, which tells `note` each layer's name and milliseconds; keep it as long as the
        context."""
        base: Any = self.module.IProfiler

        class Profiler(base):  # type: ignore[misc]
            def report_layer_time(self, layer_name: str, ms: float) -> None:
                note(str(layer_name), float(ms))

        return Profiler()

    def runtime_cache(self) -> bytes | None:
        """The kernels that TensorRT-RTX compiled so far, for `Loader.load(runtime_cache=)`; None elsewhere."""
        cache = None if self.settings is None else self.settings.cache.serialize()
        return None if cache is None else bytes(memoryview(cache))

    def inspect(self) -> str:
        """The inspector's JSON text, as TensorRT writes it (it holds raw control characters).

        Raises:
            UnsupportedRequest: the lean runtime has no inspector.
        """
        if not hasattr(self.module, "EngineInspector"):
            raise UnsupportedRequest("the lean runtime has no inspector of layers; the full TensorRT has")
        # 10.6 says nothing at all beside a context at the first of several profiles where the others have layers of Myelin.
        last = int(self.engine.num_optimization_profiles) - 1
        return next(filter(None, map(self._inspected, dict.fromkeys((0, last, None)))), "")

    def _inspected(self, profile: int | None) -> str:
        inspector = self.engine.create_engine_inspector()
        # Without a context at given shapes, the types in a dynamic engine are "N/A due to dynamic shapes" (seen on 8.6).
        context = None if profile is None else self.engine.create_execution_context()
        # Beside other contexts it may have no profile (see shares_profiles): then no shape may be set.
        if context is not None and self.shares_profiles(context):
            if profile:
                context.set_optimization_profile_async(profile, 0)
            for index in range(self.engine.num_io_tensors):
                name = self.engine.get_tensor_name(index)
                is_input = self.engine.get_tensor_mode(name) == self.module.TensorIOMode.INPUT
                if is_input and -1 in tuple(self.engine.get_tensor_shape(name)):
                    context.set_input_shape(name, self.engine.get_tensor_profile_shape(name, profile)[1])
            inspector.execution_context = context
        return str(inspector.get_engine_information(self.module.LayerInformationFormat.JSON))


def _has(thing: Any, name: str) -> bool:
    """Tell whether TensorRT's class of `thing` has the name; properties aren't read."""
    return hasattr(type(thing), name)


def check_maker(plan: bytes | memoryview, product: str, version: str, name: str) -> PlanOrigin | None:
    """Refuse what can't be a plan, or is the other product's; the errors are those of `Loader.load`."""
    size = memoryview(plan).nbytes
    if size < 64:
        raise EngineError(f"{name} isn't a TensorRT plan: it has {size} bytes")
    header = plan_header(plan)
    if header is not None and header.product != product:
        other = "rtx" if header.product == "TensorRT-RTX" else "tensorrt"
        raise EngineMismatch(
            f"{name} was made by {header}, this is {product} {version}: use `backend='{other}'`, or build it again"
        )
    nbytes = int.from_bytes(bytes(memoryview(plan)[_SIZE_AT:_VERSION_AT]), "little")
    if header is not None and header.product == "TensorRT-RTX" and size != nbytes:
        raise EngineError(f"{name} is damaged: it has {size} bytes, its header says {nbytes}; build or copy it again")
    return header


def unrecorded(name: str) -> UsageError:
    """Refusal of a plan without a manifest that nobody vouches for."""
    return UsageError(
        f"{name} has no manifest ({name}.json), which says which plan it is, and a plan is a program for the GPU. If you know "
        "where it comes from: `trust=True`"
    )


def host_code_refused(name: str) -> UsageError:
    """Refusal of a plan that may not run the code that it carries."""
    return UsageError(
        f"{name} is version-compatible: it carries TensorRT's lean runtime, machine code that runs on this host with your "
        "rights. Only if you trust who made it: `trust_host_code=True`"
    )


def plan_origin(plan: bytes | memoryview) -> PlanOrigin | None:
    """Read how a plan was made, as far as it says so itself: one without the lean runtime may be version-compatible, too."""
    header = plan_header(plan)
    if header is None:
        return None
    carries = header.product == "TensorRT" and carries_host_code(plan)
    return replace(header, compatible=carries, carries=carries)


def carries_host_code(plan: bytes | memoryview) -> bool:
    """Tell whether a plan holds a library for the host, as version-compatible ones do."""
    return _HOST_CODE.search(plan) is not None
