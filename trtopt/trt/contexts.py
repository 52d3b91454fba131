"""What execution contexts need from TensorRT: outputs of unknown size, and TensorRT-RTX's own runtime settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class OutputAllocator(Protocol):
    """TensorRT's IOutputAllocator with what its callbacks couldn't raise."""

    def check(self) -> None:
        """Raise the first exception of a callback since the last check, if there was one."""


def output_allocator(
    module: Any, reallocate: Callable[[str, int, int], int], notify: Callable[[str, tuple[int, ...]], None]
) -> OutputAllocator:
    """An instance of a subclass of `module.IOutputAllocator`; see LoadedEngine.output_allocator."""

    class Allocator(module.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)  # pybind11 refuses an instance whose base wasn't initialized by name
            self._raised: BaseException | None = None

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            try:
                return int(reallocate(tensor_name, int(size), int(alignment)))
            except BaseException as error:  # through C++ it would end the process
                self._raised = self._raised or error
                return 0

        # From TensorRT 10 on; the caller's stream is the one that the session enqueues on, so it needs no other care.
        def reallocate_output_async(self, tensor_name: str, memory: Any, size: int, alignment: int, stream: Any) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            try:
                notify(tensor_name, tuple(int(length) for length in shape))
            except BaseException as error:
                self._raised = self._raised or error

        def check(self) -> None:
            error, self._raised = self._raised, None
            if error is not None:
                raise error

    made: OutputAllocator = Allocator()
    return made


@dataclass(frozen=True)
class RuntimeSettings:
    """TensorRT-RTX's IRuntimeConfig and IRuntimeCache for an engine, the same ones for all of its contexts.

    The order of the fields is the order in which they are let go: what needs the engine goes before it.
    """

    cache: Any
    config: Any
    engine: Any
    runtime: Any
    captures: bool
    notes: tuple[str, ...]
