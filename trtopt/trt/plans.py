"""Plans: the header that says who made one, and loading one for the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtopt.errors import EngineError, EngineMismatch
from trtopt.trt.messages import Messages, translate

_TAGS = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}
_VERSION_AT = 24  # four bytes: major, minor, patch, build
_SIZE_AT = 16  # TensorRT-RTX: the plan's length, eight bytes; not known to hold for TensorRT


@dataclass(frozen=True)
class PlanHeader:
    """Who made a plan: "TensorRT" or "TensorRT-RTX", and its version ("10.16.1.11")."""

    product: str
    version: str

    def __str__(self) -> str:
        return f"{self.product} {self.version}"


def plan_header(plan: bytes | memoryview) -> PlanHeader | None:
    """Read a plan's first 28 bytes; None when they aren't a plan's as known here."""
    start = bytes(memoryview(plan)[: _VERSION_AT + 4])
    product = _TAGS.get(start[:4])
    if product is None or len(start) < _VERSION_AT + 4:
        return None
    version = start[_VERSION_AT:]
    return PlanHeader(product, ".".join(str(number) for number in version))


@dataclass(frozen=True)
class LoadedEngine:
    """A deserialized engine with what keeps it alive, and what the runtime needs to drive it.

    Attributes:
        module: the TensorRT module, for its enums (TensorIOMode, …) and base classes (IOutputAllocator, …).
        engine: ICudaEngine.   runtime: IRuntime; must outlive the engine.
        messages: TensorRT's messages while loading.
    """

    module: Any
    engine: Any
    runtime: Any
    messages: Messages

    def inspect(self) -> str:
        """The inspector's JSON text, as TensorRT writes it (it holds raw control characters)."""
        inspector = self.engine.create_engine_inspector()
        # Without a context at given shapes, the types in a dynamic engine are "N/A due to dynamic shapes" (seen on 8.6).
        context = self.engine.create_execution_context()
        if context is not None:
            for index in range(self.engine.num_io_tensors):
                name = self.engine.get_tensor_name(index)
                given = self.engine.get_tensor_mode(name) == self.module.TensorIOMode.INPUT
                if given and -1 in tuple(self.engine.get_tensor_shape(name)):
                    context.set_input_shape(name, self.engine.get_tensor_profile_shape(name, 0)[1])
            inspector.execution_context = context
        return str(inspector.get_engine_information(self.module.LayerInformationFormat.JSON))


def check_maker(plan: bytes | memoryview, product: str, version: str, name: str) -> PlanHeader | None:
    """Refuse what can't be a plan, or is the other product's.

    Raises:
        EngineMismatch: TensorRT-RTX's plan given to TensorRT, or the reverse.
        EngineError: empty, too short for a plan, or (TensorRT-RTX) cut.
    """
    size = memoryview(plan).nbytes
    if size < 64:
        raise EngineError(f"{name} isn't a TensorRT plan: it has {size} bytes")
    header = plan_header(plan)
    if header is not None and header.product != product:
        other = "rtx" if header.product == "TensorRT-RTX" else "tensorrt"
        raise EngineMismatch(
            f"{name} was made by {header}, this is {product} {version}: use --backend {other}, or build it again"
        )
    if header is not None and header.product == "TensorRT-RTX":
        whole = int.from_bytes(bytes(memoryview(plan)[_SIZE_AT : _SIZE_AT + 8]), "little")
        if size != whole:
            raise EngineError(
                f"{name} is damaged: it has {size} bytes, its header says {whole}; build or copy it again"
            )
    return header


def deserialize(
    runtime: Any, plan: bytes | memoryview, header: PlanHeader | None, version: str, name: str, messages: Messages
) -> Any:
    """ICudaEngine from `plan`.

    Raises:
        EngineMismatch: another version made it (both named), or it is for another GPU.
        EngineError: damaged, or TensorRT refuses it.
    """
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is not None:
        return engine
    if header is None:
        said = "; ".join(messages.errors[:3]) or "TensorRT gave no message"
        raise EngineError(f"{name} isn't a TensorRT plan, or is damaged ({said})")
    if header.version.split(".")[:3] != version.split(".")[:3]:
        raise EngineMismatch(
            f"{name} was made by {header}, this is {header.product} {version}: build it again, or install that version"
        )
    raise translate(messages.errors, f"{name} can't be loaded", EngineError)
