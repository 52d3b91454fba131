"""Contexts, output allocators and runtime caches of every generation, against stand-ins with its names only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from standins import SCRATCH, Simulation, plan_without_layers

from trtopt.core.errors import EngineError
from trtopt.trt.families import TensorRTRTX
from trtopt.trt.generation import Generation
from trtopt.trt.plans import LoadedEngine

RTX = "rtx-1.7.1"
ALL = ("8.6.0", "10.16.1", "11.4.0", RTX)
Open = Callable[[str], tuple[Simulation, Generation]]


@pytest.fixture
def opened(stand_in: Open, with_gpu: Callable[[int | None], None]) -> Open:
    """The stand-in of a version and its generation; names missed while it was chosen are forgotten."""

    def open_(version: str) -> tuple[Simulation, Generation]:
        if version != RTX:
            sim, generation = stand_in(version)
        else:
            with_gpu(90)
            sim = Simulation(RTX)
            generation = TensorRTRTX(sim.module, "rtx")
        sim.missed.clear()
        return sim, generation

    return open_


@pytest.mark.parametrize("version", ALL)
def test_the_scratch_memory_is_the_callers(version: str, opened: Open) -> None:
    sim, generation = opened(version)
    loaded = generation.load(plan_without_layers(sim))
    assert loaded.scratch_bytes == SCRATCH + (version != "8.6.0")
    size = loaded.scratch_bytes + 256
    context = loaded.context(0x7F00_0000, size)
    if version == "8.6.0":
        assert (context.device_memory, context._how) == (0x7F00_0000, "without")
    else:
        assert context._memory == (0x7F00_0000, size)
        assert version == RTX or context._how is sim.module.ExecutionContextAllocationStrategy.USER_MANAGED
    if version == RTX:
        assert loaded.settings is not None and context._how is loaded.settings.config
        assert context._how._strategy is sim.module.ExecutionContextAllocationStrategy.USER_MANAGED
        assert context._how.cuda_graph_strategy is sim.module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        assert context._how._cache is loaded.settings.cache
    assert loaded.captures_itself is (version == RTX)
    assert not generation.load(plan_without_layers(sim), capture=False).captures_itself
    assert not sim.missed


@pytest.mark.parametrize("version", ALL)
def test_no_context_is_an_error_in_tensorrts_words(version: str, opened: Open) -> None:
    sim, generation = opened(version)
    loaded = generation.load(plan_without_layers(sim))
    least = loaded.scratch_bytes
    with pytest.raises(EngineError, match=f"needs {least} bytes of scratch memory, not {least - 1}"):
        loaded.context(4096, least - 1)
    assert sim.contexts == []
    sim.no_context = "Error Code 2: OutOfMemory\n(Requested size was 7 bytes.)"
    with pytest.raises(EngineError, match=r"no execution context.*OutOfMemory \(Requested size was 7 bytes\.\)"):
        loaded.context(4096, least)
    assert not sim.missed


@pytest.mark.parametrize("shared", [True, False])
def test_a_second_context_says_whether_it_shares_the_profile(shared: bool, opened: Open) -> None:
    sim, generation = opened("8.6.0")
    loaded = generation.load(plan_without_layers(sim))
    sim.shared = shared
    first, second = (loaded.context(4096, SCRATCH) for _ in range(2))
    assert loaded.shares_profiles(first)
    assert loaded.shares_profiles(second) is shared
    # The inspector's context comes third: it may set no shape where it has no profile.
    assert "Layers" in loaded.inspect()
    assert hasattr(sim.contexts[-1], "_shape") is shared


@pytest.mark.parametrize("version", ALL)
def test_output_allocator_gives_the_callers_memory(version: str, opened: Open) -> None:
    sim, generation = opened(version)
    shapes: dict[str, tuple[int, ...]] = {}
    asked: list[tuple[str, int, int]] = []

    def reallocate(name: str, nbytes: int, alignment: int) -> int:
        asked.append((name, nbytes, alignment))
        return 0x1000 * len(asked)

    allocator: Any = generation.load(plan_without_layers(sim)).output_allocator(reallocate, shapes.__setitem__)
    assert isinstance(allocator, sim.module.IOutputAllocator)
    assert allocator.reallocate_output("boxes", None, 400, 256) == 0x1000
    assert allocator.reallocate_output_async("boxes", 0x1000, 800, 256, 7) == 0x2000
    allocator.notify_shape("boxes", [25, 4])
    allocator.check()
    assert asked == [("boxes", 400, 256), ("boxes", 800, 256)] and shapes == {"boxes": (25, 4)}
    assert not sim.missed


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_callback_never_raises_into_tensorrt(kind: type[BaseException], opened: Open) -> None:
    sim, generation = opened("10.16.1")

    def fail(*arguments: Any) -> Any:
        raise kind(*arguments[:1])

    allocator: Any = generation.load(plan_without_layers(sim)).output_allocator(fail, fail)
    assert allocator.reallocate_output_async("first", None, 4, 256, 0) == 0
    allocator.notify_shape("second", (1,))
    with pytest.raises(kind, match="first"):
        allocator.check()
    allocator.check()  # once


def test_the_real_base_class_takes_the_allocator() -> None:
    module, shapes = pytest.importorskip("tensorrt_rtx"), dict[str, tuple[int, ...]]()
    loaded = LoadedEngine(module, None, None)
    allocator: Any = loaded.output_allocator(lambda name, nbytes, alignment: nbytes + alignment, shapes.__setitem__)
    assert allocator.reallocate_output_async("y", None, 1024, 256, 0) == 1280
    allocator.notify_shape("y", module.Dims([3, 5]))
    assert shapes == {"y": (3, 5)}


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, b"kernels"), (b"kernels of before", b"kernels of before"), (b"of another GPU", b"kernels")],
)
def test_rtx_keeps_its_kernels(given: bytes | None, kept: bytes, opened: Open) -> None:
    sim, generation = opened(RTX)
    loaded = generation.load(plan_without_layers(sim), "a.engine", runtime_cache=given)
    assert loaded.runtime_cache() == kept
    assert not sim.missed
