"""acme::normgelu, LayerNormalization over the last axis and GELU in one kernel, whose source is Triton's language.

    python benchmarks/custom/normgelu.py FOLDER [--capability 90]

compiles it ahead of time, for which no GPU is needed, and writes FOLDER/normgelu.cu, which holds the kernels for FP16 and FP32
and launches them, and FOLDER/normgelu_operator.py, which trtopt takes as `operators=`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BLOCK = 1024  # values of a row, at most

OPERATOR = '''"""acme::normgelu, by the kernel in normgelu.cu."""

import math

import numpy as np

import trtopt

_erf = np.vectorize(math.erf, otypes=[np.float32])


@trtopt.operator("acme::normgelu", shapes=lambda x, *_, **__: [x], types=("fp32", "fp16"), kernel="normgelu.cu")
def normgelu(x, scale, bias, *, eps=1e-5):
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias
    return 0.5 * normal * (1 + _erf(normal * np.float32(math.sqrt(0.5))))
'''
SOURCE = """// Written by normgelu.py: acme::normgelu as Triton {version} compiled it for compute capability {capability}.
#include "operator.h"

alignas(16) static unsigned char const kFP16[] = {{{fp16}}};
alignas(16) static unsigned char const kFP32[] = {{{fp32}}};

static cudaKernel_t loaded(unsigned char const* code)
{{
    cudaLibrary_t library{{}};
    cudaKernel_t kernel{{}};
    if (cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0) == cudaSuccess)
        cudaLibraryGetKernel(&kernel, library, "{name}");
    return kernel;
}}

static void shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out, trtopt::Attributes const&, trtopt::Sizes&)
{{
    out[0] = in[0];
}}

static cudaError_t run(trtopt::Call const& call)
{{
    static cudaKernel_t const half = loaded(kFP16), single = loaded(kFP32);
    trtopt::Tensor const& x = call.inputs[0];
    cudaKernel_t const kernel = x.type == trtopt::DataType::kHALF ? half : single;
    int width = static_cast<int>(x.shape.d[x.shape.nbDims - 1]);
    int64_t rows = width ? x.size() / width : 0;
    if (rows == 0)
        return cudaSuccess;
    if (kernel == nullptr || width > {block})
        return cudaErrorInvalidValue;
    float eps = static_cast<float>(call.attributes.number("eps"));
    void* nothing = nullptr; // scratch memory of Triton's, of which this needs none
    void* arguments[]{{const_cast<void**>(&x.data), const_cast<void**>(&call.inputs[1].data),
        const_cast<void**>(&call.inputs[2].data), const_cast<void**>(&call.outputs[0].data), &rows, &width, &eps, &nothing,
        &nothing}};
    return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(rows)), dim3({threads}), arguments, {shared}, call.stream);
}}
"""


@triton.jit
def _normgelu(x, scale, bias, y, rows, width, eps, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < width
    value = tl.load(x + row * width + place, inside, 0.0).to(tl.float32)
    away = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    normal = away * tl.rsqrt(tl.sum(away * away, 0) / width + eps)
    factor, summand = tl.load(scale + place, inside, 0.0), tl.load(bias + place, inside, 0.0)
    value = normal * factor.to(tl.float32) + summand.to(tl.float32)
    value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(y + row * width + place, value.to(y.dtype.element_ty), inside)


def compiled(kind: str, capability: int) -> Any:
    tensors = dict.fromkeys(("x", "scale", "bias", "y"), f"*{kind}")
    signature = {**tensors, "rows": "i64", "width": "i32", "eps": "fp32", "SIZE": "constexpr"}
    source = ASTSource(fn=_normgelu, signature=signature, constexprs={"SIZE": BLOCK})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


def write(folder: Path, capability: int) -> Path:
    """Write the kernel and the operator's file; return the latter."""
    made = {kind: compiled(kind, capability) for kind in ("fp16", "fp32")}
    metadata = made["fp16"].metadata
    codes = {kind: ",".join(map(str, kernel.asm["cubin"])) for kind, kernel in made.items()}
    text = SOURCE.format(
        version=triton.__version__,
        capability=capability,
        name=metadata.name,
        block=BLOCK,
        threads=32 * metadata.num_warps,
        shared=max(kernel.metadata.shared for kernel in made.values()),
        **codes,
    )
    (folder / "normgelu.cu").write_text(text)
    operator = folder / "normgelu_operator.py"
    operator.write_text(OPERATOR)
    return operator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capability", type=int, default=90)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(write(given.folder, given.capability))


if __name__ == "__main__":
    main()
