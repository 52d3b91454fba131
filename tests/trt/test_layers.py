"""Layer reports of every generation, read."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from trtopt.core.errors import EngineError
from trtopt.core.values import LayerInfo, Precision
from trtopt.trt.layers import LayerReport, from_dump, from_inspector, onnx_nodes, profile_suffix, sparse_kernels

# As TensorRT-RTX 1.7.1 writes them; strides shortened, one name made hard.
DUMP = """Layers:
Name: __mye419_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata: 
Name: a, LayerType: b, [odd] conv_myl0_2, LayerType: correlation, Inputs: [ { Name: x, Dimensions: [-1,4,32,32], Datatype: Int8, Format: (NHWC) Channel major format }], Constants: [ { Name: w, Dimensions: [32,4,3,3], Datatype: Int8, Format: x }, { Name: s, Dimensions: [1,32,1,1], Datatype: Float, Format: y }], Outputs: [ { Name: o, Dimensions: [-1,32,32,32], Datatype: Float, Format: z }], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: [ONNX Layer: a, LayerType: b, [odd] conv][ONNX Layer: relu]
Name: __myl_FcAddSilu_myl0_15, LayerType: runtime_fusion, Inputs: [ { Name: i, Dimensions: [1,197,768], Datatype: Half, Format: x }], Constants: [ { Name: w, Dimensions: [1,768,3072], Datatype: Half, Format: x }], Outputs: [ { Name: o, Dimensions: [1], Datatype: Half, Format: x }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: mm]
Name: __myl_CorrMulAdd_myl0_3, LayerType: runtime_fusion, Inputs: [ { Name: i, Dimensions: [1], Datatype: BFloat16, Format: x }], Constants: [], Outputs: [ { Name: o, Dimensions: [1], Datatype: Float, Format: x }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: depthwise]
Name: up_myl0_9, LayerType: deconv, Inputs: [ { Name: i, Dimensions: [1], Datatype: Float, Format: x }], Constants: [], Outputs: [ { Name: o, Dimensions: [1], Datatype: Float, Format: x }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: up]
Name: fc_myl0_6, LayerType: gemm, Inputs: [ { Name: i, Dimensions: [-1,32], Datatype: FP8, Format: x }], Constants: [], Outputs: [ { Name: o, Dimensions: [1], Datatype: Half, Format: x }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: fc][ONNX Layer: dq]
Name: __myl_MulCastReluMean_myl0_5, LayerType: kgen, Inputs: [ { Name: i, Dimensions: [1], Datatype: Int64, Format: x }, { Name: j, Dimensions: [1], Datatype: Half, Format: x }], Constants: [], Outputs: [ { Name: o, Dimensions: [1], Datatype: Int8, Format: x }], TacticName: t, StreamId: 0, Metadata: 

I/O Tensors:
 Name: x, IOMode: Input, DataType: Float, Dimensions: [-1,3,32,32]
"""  # noqa: E501, W291


def test_dump() -> None:
    assert from_dump(DUMP).unread == ""
    assert from_dump(DUMP).layers == (
        LayerInfo(
            "a, LayerType: b, [odd] conv_myl0_2",
            "convolution",
            Precision.INT8,
            ("a, LayerType: b, [odd] conv", "relu"),
            ("Int8 (NHWC) Channel major format",),
            ("Float z",),
            "__myelin_CASK_STUB",
        ),
        LayerInfo("__myl_FcAddSilu_myl0_15", "matmul", Precision.FP16, ("mm",), ("Half x",), ("Half x",), "t"),
        LayerInfo(
            "__myl_CorrMulAdd_myl0_3", "convolution", Precision.BF16, ("depthwise",), ("BFloat16 x",), ("Float x",), "t"
        ),
        LayerInfo("up_myl0_9", "deconvolution", Precision.FP32, ("up",), ("Float x",), ("Float x",), "t"),
        LayerInfo("fc_myl0_6", "matmul", Precision.FP8, ("fc", "dq"), ("FP8 x",), ("Half x",), "t"),
        LayerInfo("__myl_MulCastReluMean_myl0_5", "other", Precision.FP16, (), ("Int64 x", "Half x"), ("Int8 x",), "t"),
    )


def dumped(
    kind: str, reads: str, writes: str = "", *, name: str = "c", nodes: Sequence[str] = (), weights: str = ""
) -> str:
    """A line of TensorRT-RTX for a layer that reads, holds and writes one tensor of these types."""
    lists = [f"[ {{ Name: t, {item} }}]" if item else "[]" for item in (reads, weights, writes)]
    metadata = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    text = f"Name: {name}, LayerType: {kind}, Inputs: {lists[0]}, Constants: {lists[1]}, Outputs: {lists[2]}"
    return f"Layers:\n{text}, TacticName: , StreamId: 0, Metadata: {metadata}\n"


def test_keys_that_only_some_lines_have() -> None:
    """Engines of several streams say which event a layer waits for, TensorRT-RTX 1.7.1."""
    signal = dumped("signal", "").replace("StreamId: 0, ", "StreamId: 0, EventId: 1, ")
    conv = DUMP.splitlines()[2].replace("StreamId: 0, ", "StreamId: 1, EventId: 7, New: [x], ")
    assert from_dump(f"{signal}{conv}\n") == LayerReport(from_dump(DUMP).layers[:1])


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ({"q/Cast": "Cast", "mm": "MatMul"}, Precision.FP16),  # FP32 is what it reads and casts
        ({"mm": "MatMul", "y/Cast": "Cast"}, Precision.FP32),  # it computes in FP32 and casts what it gives
        ({"mm": "MatMul"}, Precision.FP32),
    ],
)
def test_casts_that_were_fused_into_a_layer(order: dict[str, str], found: Precision) -> None:
    ends = "Datatype: Float, Format: x", "Datatype: Half, Format: x"
    text = dumped("kgen", *ends, name="_gemv_mha_v1_myl0_1", nodes=list(order))
    (layer,) = from_dump(text, order).layers
    assert (layer.kind, layer.precision) == ("matmul", found)


@pytest.mark.parametrize("written", ["Half", "FP8", "Int8"])
def test_attention_that_hands_on_its_caches_in_fp32_computes_in_what_it_casts_them_to(written: str) -> None:
    """As a decoder's step whose caches are inputs and outputs in FP32, also where what follows is quantized."""
    reads, writes = (f"Datatype: Float }}, {{ Name: y, Datatype: {kind}" for kind in ("Half", written))
    line = dumped("kgen", reads, writes, name="_gemv_mha_v1", nodes="cm")
    (layer,) = from_dump(line, {"c": "Cast", "m": "MatMul"}).layers
    assert layer.precision is Precision.FP16


@pytest.mark.parametrize(("in_float", "found"), [(set(), Precision.INT8), ({"fc"}, Precision.FP16)])
def test_a_layer_that_dequantizes_before_it_multiplies(in_float: set[str], found: Precision) -> None:
    half, ops = "Datatype: Half", {"fc": "Gemm", "x_dequantized": "DequantizeLinear"}
    text = dumped(
        "runtime_fusion", "Datatype: Int8", half, name="__myl_CastMulFc_myl0_8", nodes=list(ops), weights=half
    )
    (layer,) = from_dump(text, ops, in_float).layers
    assert (layer.kind, layer.precision) == ("matmul", found)
    ends = {"Inputs": [{"Name": "x", "Datatype": "Int8"}], "Outputs": [{"Name": "y", "Datatype": "Half"}]}
    entry = {"Name": "fc", "LayerType": "gemm", **ends, "Metadata": "[ONNX Layer: fc]"}
    (layer,) = from_inspector(json.dumps({"Layers": [entry]}), ops, in_float).layers
    assert layer.precision == found


def test_a_line_that_cannot_be_read_takes_no_other_with_it() -> None:
    report = from_dump(DUMP + "Name: conv, Kind: correlation, In: []\n")
    assert report.layers == from_dump(DUMP).layers
    assert report.unread.startswith("1 of 8 lines") and "Kind: correlation" in report.unread


def test_a_convolution_without_types_is_unread() -> None:
    assert "LayerType: correlation" in from_dump(dumped("correlation", "Kind: x")).unread
    assert from_dump(dumped("correlation", "Datatype: Int32, Format: y")) == LayerReport()


def _report(*layers: dict[str, object]) -> str:
    return json.dumps({"Layers": layers, "Bindings": ["x"]}).replace("\\u001e", "\x1e")


def _entry(name: str, kind: str, reads: str, writes: str = "", **more: str) -> dict[str, object]:
    """A layer as 8.6's inspector tells of it."""
    ends = ([{"Name": "t", "Format/Datatype": item}] if item else [] for item in (reads, writes))
    return {"Name": name, "LayerType": kind, **dict(zip(("Inputs", "Outputs"), ends)), **more}


def test_inspector_of_86() -> None:
    int8, fp32 = "Thirty-two wide channel vectorized row major Int8 format", "Row major linear FP32"
    wide, two = "Channel major FP16 format where channel % 8 == 0", "Two wide channel vectorized row major FP16 format"
    tactic = "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8"
    said = {"ParameterType": "Convolution", "TacticName": tactic, "TacticValue": "0x9cd5cdc35441c505"}
    gemm = {"ParameterType": "Convolution", "TacticValue": "0x0000000000020318"}
    gemm["Metadata"] = "[ONNX Layer: Gemm_20]\x1e[ONNX Layer: Relu_21]"
    text = _report(
        _entry("conv1.weight + QuantizeLinear_7 + Conv_9 + Relu_10", "CaskConvolution", int8, fp32, **said),
        _entry("Gemm_20", "CaskGemmConvolution", wide, **gemm),
        _entry("Reformatting CopyNode for Input Tensor 0 to Conv_9 + Relu_10", "Reformat", fp32, int8),
        _entry("PWN(Sigmoid_3, Mul_4)", "PointWiseV2", two),
        _entry("Deconv_5", "CaskDeconvolutionV2", fp32, ParameterType="Deconvolution"),
        {"Name": "shape", "LayerType": "ShapeHostToDevice", "Inputs": [{"Format/Datatype": "Row major Int32"}]},
    )
    assert "\x1e" in text  # raw control characters, as TensorRT writes them
    ops = {"Conv_9": "Conv", "Relu_10": "Relu", "Gemm_20": "Gemm", "Relu_21": "Relu", "Sigmoid_3": "Sigmoid"}
    ops |= {"Mul_4": "Mul", "QuantizeLinear_7": "QuantizeLinear", "Deconv_5": "ConvTranspose"}
    assert [(layer.kind, str(layer.precision), layer.nodes) for layer in from_inspector(text, ops).layers] == [
        ("convolution", "int8", ("QuantizeLinear_7", "Conv_9", "Relu_10")),
        ("matmul", "fp16", ("Gemm_20", "Relu_21")),  # run as a convolution, but a Gemm in the model
        ("other", "fp32", ()),
        ("other", "fp16", ("Sigmoid_3", "Mul_4")),
        ("deconvolution", "fp32", ("Deconv_5",)),
    ]
    first, second, *_ = from_inspector(text, ops).layers
    assert (first.reads, first.writes) == ((int8,), (fp32,))
    assert (first.tactic, second.tactic) == (tactic, "0x0000000000020318")


def test_inspector_of_10_and_later() -> None:
    text = _report(
        {
            "Name": "conv1_myl0_2",
            "LayerType": "CaskConvActPool",
            "Inputs": [{"Name": "x", "Datatype": "Int8", "Format": "Thirty-two wide channel vectorized row major"}],
            "Metadata": "[ONNX Layer: conv1]\x1e[ONNX Layer: relu1]",
        },
        {"Name": "fc_myl0_3", "LayerType": "gemm", "Inputs": [{"Name": "x", "Datatype": "FP8", "Format": "Row major"}]},
    )
    layers = from_inspector(text).layers
    assert [(layer.kind, str(layer.precision)) for layer in layers] == [("convolution", "int8"), ("matmul", "fp8")]
    assert layers[0].reads == ("Int8 Thirty-two wide channel vectorized row major",)


def test_an_entry_of_the_inspector_that_cannot_be_read() -> None:
    conv = {"Name": "c", "LayerType": "CaskConvolution", "Inputs": [{"Name": "x", "Datatype": "Int8"}]}
    report = from_inspector(json.dumps({"Layers": [conv, "conv2"]}))
    assert [layer.name for layer in report.layers] == ["c"] and report.unread.startswith("1 of 2 layers")


def test_inspector_without_detail_or_sense() -> None:
    with pytest.raises(EngineError, match="verbosity"):
        from_inspector('{"Layers": ["conv1", "fc"]}')
    with pytest.raises(EngineError, match="isn't JSON"):
        from_inspector("Layer(CaskConvolution): conv1")


@pytest.mark.parametrize("between", ["", "\x1e", "\x1f"])
def test_metadata_names_with_brackets(between: str) -> None:
    names = ("/layer.0/conv[1]", "a]b", "plain")
    assert onnx_nodes(between.join(f"[ONNX Layer: {name}]" for name in names)) == names
    assert onnx_nodes("") == ()


def test_layers_of_later_profiles_have_an_ending() -> None:
    assert [profile_suffix(name) for name in ("a", "a [profile 0]", "a [profile 12]")] == ["", "", " [profile 12]"]


@pytest.mark.parametrize(
    ("tactics", "said"),
    [
        (["sm80_xmma_fprop_sparse_conv_f16f16", "sm80_xmma_gemm_f16f16", ""], "sparse kernels in 1 of 3 layers"),
        (["sm80_xmma_gemm_f16f16", "sm90_xmma_gemm_f16f16"], "sparse kernels in 0 of 2 layers"),
        (["__myelin_CASK_STUB", "__myl_FcAdd_0x33", "0x9cd5cdc35441c505", ""], "which kernels are sparse isn't known"),
        ([], "which kernels are sparse isn't known"),
    ],
)
def test_sparse_kernels_are_known_by_their_names(tactics: Sequence[str], said: str) -> None:
    layers = [LayerInfo("a", "matmul", Precision.FP16, tactic=tactic) for tactic in tactics]
    other = LayerInfo("b", "other", Precision.FP16, tactic="sparse_reformat")
    assert sparse_kernels([*layers, other]) == said


def test_a_region_stays_whose_types_8_6_does_not_tell() -> None:
    """Where shapes are dynamic it says no type, and a region holds no weights by which it could be known."""
    tensor = {"Name": "x", "Format/Datatype": "N/A due to dynamic shapes"}
    region = {"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin", "Inputs": [tensor], "Outputs": [tensor]}
    (layer,) = from_inspector(json.dumps({"Layers": [region, {**region, "Name": "shape"}]}), {"a": "MatMul"}).layers
    assert (layer.name, layer.kind, layer.precision, layer.nodes) == (region["Name"], "other", None, ())
