"""Kernels that an H200 launched with TensorRT 8.6.0 for a vision transformer of two blocks, seen through CUPTI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtopt.builder import kernels
from trtopt.builder.kernels import multiplies_in, with_hidden
from trtopt.core.errors import EngineError
from trtopt.core.values import LayerInfo, Precision
from trtopt.runtime import kernel_run

CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_interleaved_indexed_i8f32_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_nchw"
DEPTHWISE = "sm50_xmma_convolution_depthwiseHMMA_FP16NHWCx8_TR_TS_STRIDEH_STRIDEW_execute_kernel_trt"
LIGHT = (
    "_ZN15genericReformat16copyPackedKernelIfaLb1ELb0ENS_19IdentityCoordMapperILi4EEELi4EEEvjjPKvNS_6ArrayN",
    "__myl_bb0_13_CasResTraConCasAddCasMeaSubMulMeaAddSqrDivMulMulAddMulMinMaxRouCas",
    "mha1",
    "__myl_bb0_11_CasMulMinMaxRouCasResTraRes",
)
INT8 = (
    "sm80_xmma_gemm_i8f32_i8i32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32_execute_kernel_trt",
    "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32_fused30",
)
FP16 = (
    "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16_execute_kernel_trt",
    "sm50_xmma_cublas_gemvx_f16f16_f32_f32_nn_n_int32_unit_n_launch_param64x2x1_strided_unit_stride_execute_kernel_trt",
)
FP32 = (
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x64_stage3_warpsize2x1x2_tensor16x8x8_execute_kernel_trt",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel_trt",
)
HIDDEN = {f"node_{number}": "matmul" for number in range(4)}
LAYERS = (
    LayerInfo("conv_proj", "convolution", Precision.INT8, ("conv_proj",)),
    LayerInfo("{ForeignNode[weight...node_3]}", "other", Precision.FP16),
)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            (CONVOLUTION, *INT8, "turing_int8_i8816gemm_int8_128x128_ldg16_relu", "ampere_igemm_int8_64x64"),
            Precision.INT8,
        ),
        (
            (*FP16, DEPTHWISE, "ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn", "volta_h884gemm_64x64_nn"),
            Precision.FP16,
        ),
        ((*FP32, "ampere_sgemm_128x64_nn", "ampere_s1688gemm_tf32_64x64_nn"), Precision.FP32),
        (("ampere_bf16_s16816gemm_bf16_64x64_tn",), Precision.BF16),
        (LIGHT, None),
    ],
)
def test_a_kernels_name_says_what_it_multiplies_in(names: tuple[str, ...], wanted: Precision | None) -> None:
    assert [multiplies_in(name) for name in names] == [wanted] * len(names)


def test_a_name_that_says_no_type_is_a_doubt() -> None:
    for name in ("some_gemm_kernel", "__myl_bb0_1_DotAddMul"):
        with pytest.raises(EngineError, match=name):
            multiplies_in(name)


def test_nodes_in_a_region_are_known_by_their_kernels() -> None:
    run = (CONVOLUTION, *LIGHT, *INT8, *INT8)
    found = with_hidden(LAYERS, HIDDEN, 2, Precision.INT8, [run])
    assert found[:2] == LAYERS
    assert [(layer.nodes, layer.kind, layer.precision) for layer in found[2:]] == [
        ((name,), "matmul", Precision.INT8) for name in HIDDEN
    ]
    # Merged products are fewer kernels; nothing runs in another precision.
    assert len(with_hidden(LAYERS, HIDDEN, 2, Precision.INT8, [run[:-1]])) == len(found)
    # Attention's own products in FP16.
    assert len(with_hidden(LAYERS, HIDDEN, 2, Precision.INT8, [(*run, *FP16)])) == len(found)


def test_each_profile_is_counted_by_itself() -> None:
    run = (CONVOLUTION, *LIGHT, *INT8, *INT8)
    second = tuple(LayerInfo(f"{layer.name} [profile 1]", layer.kind, layer.precision) for layer in LAYERS)
    found = with_hidden((*LAYERS, *second), HIDDEN, 0, Precision.INT8, [run, run])
    assert sum(layer.name.endswith("[profile 1]") for layer in found) == 2 + len(HIDDEN)
    with pytest.raises(EngineError):
        with_hidden((*LAYERS, *second), HIDDEN, 0, Precision.INT8, [run, (CONVOLUTION, *FP16, *INT8)])


@pytest.mark.parametrize(
    "run",
    [
        (CONVOLUTION, *INT8, *INT8, *FP16, *FP32),  # more in floating point than attention has
        (CONVOLUTION, *INT8, *FP16),  # one of them may be a node that was asked for
        (CONVOLUTION, *FP16, *FP16),
        (CONVOLUTION, *LIGHT),  # nothing at all
    ],
)
def test_a_doubt_is_told_with_its_figures(run: tuple[str, ...]) -> None:
    with pytest.raises(EngineError, match=r"4 nodes there should run in INT8"):
        with_hidden(LAYERS, HIDDEN, 2, Precision.INT8, [run])


def test_without_cupti_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"shapes": []}))
    monkeypatch.setattr(kernel_run, "libraries", lambda: ["libnothing.so"])
    assert "pip install nvidia-cuda-cupti" in kernel_run.run(tmp_path)["problem"]


def test_what_the_process_cannot_do_is_told() -> None:
    with pytest.raises(EngineError) as caught:
        kernels.launched(b"no plan", [{"x": [1, 3, 8, 8]}])
    assert str(caught.value)
