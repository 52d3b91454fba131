"""Layer reports of every generation, read."""

from __future__ import annotations

import json

import pytest

from trtopt.errors import EngineError
from trtopt.spec import LayerInfo, Precision
from trtopt.trt.layers import from_dump, from_inspector, onnx_nodes

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
    assert from_dump(DUMP) == (
        LayerInfo(
            "a, LayerType: b, [odd] conv_myl0_2",
            "convolution",
            Precision.INT8,
            ("a, LayerType: b, [odd] conv", "relu"),
        ),
        LayerInfo("__myl_FcAddSilu_myl0_15", "matmul", Precision.FP16, ("mm",)),
        LayerInfo("__myl_CorrMulAdd_myl0_3", "convolution", Precision.BF16, ("depthwise",)),
        LayerInfo("up_myl0_9", "deconvolution", Precision.FP32, ("up",)),
        LayerInfo("fc_myl0_6", "matmul", Precision.FP8, ("fc", "dq")),
        LayerInfo("__myl_MulCastReluMean_myl0_5", "other", Precision.FP16, ()),
    )


def test_a_line_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(EngineError, match="can't read a line"):
        from_dump("Layers:\nName: conv, Kind: correlation, In: []\n")


def _report(*layers: dict[str, object]) -> str:
    return json.dumps({"Layers": layers, "Bindings": ["x"]}).replace("\\u001e", "\x1e")


def test_inspector_of_86() -> None:
    int8 = "Thirty-two wide channel vectorized row major Int8 format"
    text = _report(
        {
            "Name": "conv1.weight + QuantizeLinear_7 + Conv_9 + Relu_10",
            "LayerType": "CaskConvolution",
            "ParameterType": "Convolution",
            "Inputs": [{"Name": "x", "Format/Datatype": int8}],
            "Outputs": [{"Name": "y", "Format/Datatype": "Row major linear FP32"}],
        },
        {
            "Name": "Gemm_20",
            "LayerType": "CaskGemmConvolution",
            "ParameterType": "Convolution",
            "Inputs": [{"Name": "x", "Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}],
            "Outputs": [],
            "Metadata": "[ONNX Layer: Gemm_20]\x1e[ONNX Layer: Relu_21]",
        },
        {
            "Name": "Reformatting CopyNode for Input Tensor 0 to Conv_9 + Relu_10",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "x", "Format/Datatype": "Row major linear FP32"}],
            "Outputs": [{"Name": "y", "Format/Datatype": int8}],
        },
        {
            "Name": "PWN(Sigmoid_3, Mul_4)",
            "LayerType": "PointWiseV2",
            "Inputs": [{"Name": "x", "Format/Datatype": "Two wide channel vectorized row major FP16 format"}],
            "Outputs": [],
        },
        {
            "Name": "Deconv_5",
            "LayerType": "CaskDeconvolutionV2",
            "ParameterType": "Deconvolution",
            "Inputs": [{"Name": "x", "Format/Datatype": "Row major linear FP32"}],
            "Outputs": [],
        },
        {"Name": "shape", "LayerType": "ShapeHostToDevice", "Inputs": [{"Format/Datatype": "Row major Int32"}]},
    )
    assert "\x1e" in text  # raw control characters, as TensorRT writes them
    ops = {"Conv_9": "Conv", "Relu_10": "Relu", "Gemm_20": "Gemm", "Relu_21": "Relu", "Sigmoid_3": "Sigmoid"}
    ops |= {"Mul_4": "Mul", "QuantizeLinear_7": "QuantizeLinear", "Deconv_5": "ConvTranspose"}
    assert [(layer.kind, str(layer.precision), layer.nodes) for layer in from_inspector(text, ops)] == [
        ("convolution", "int8", ("QuantizeLinear_7", "Conv_9", "Relu_10")),
        ("matmul", "fp16", ("Gemm_20", "Relu_21")),  # run as a convolution, but a Gemm in the model
        ("other", "fp32", ()),
        ("other", "fp16", ("Sigmoid_3", "Mul_4")),
        ("deconvolution", "fp32", ("Deconv_5",)),
    ]


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
    assert [(layer.kind, str(layer.precision)) for layer in from_inspector(text)] == [
        ("convolution", "int8"),
        ("matmul", "fp8"),
    ]


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
