"""scripts/memcheck_report.py: whose compute-sanitizer's findings are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from memcheck_report import owners

END = "========= LEAK SUMMARY: 8 bytes leaked in 1 allocations\n========= ERROR SUMMARY: 1 errors\n"


def block(first: str, *frames: str) -> str:
    return "".join(f"========= {line}\n" for line in (first, *(f"    Host Frame: {frame}" for frame in frames), ""))


def test_memory_of_others_is_told_apart_by_who_allocated_it() -> None:
    log = "========= COMPUTE-SANITIZER\n" + block(
        "Leaked 8 bytes at 0x7", "[0x2] in libnvinfer.so.8", "[0x3] in libpython"
    )
    log += block("Leaked 512 bytes at 0x8", "cudaMalloc", "malloc in memory.cpython-310.so: cupy_backends") + END
    left, bad = owners(log)
    assert (dict(left), bad) == ({"libnvinfer": 1, "cupy": 1}, [])


@pytest.mark.parametrize(
    "found",
    [
        block("Leaked 64 bytes at 0x9", "cudaMalloc in cuda/bindings/cyruntime.so", "in libpython"),
        block("Invalid __global__ read of size 4 bytes", "at kernel in libnvinfer.so.8"),
        block("Program hit cudaErrorInvalidValue (error 1)", "in cuda/bindings/cyruntime.so"),
    ],
)
def test_anything_else_may_be_ours(found: str) -> None:
    left, [bad] = owners("========= COMPUTE-SANITIZER\n" + found + END)
    assert not left
    assert bad.splitlines()[0] in found


def test_a_log_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="didn't end"):
        owners("========= COMPUTE-SANITIZER\n")
