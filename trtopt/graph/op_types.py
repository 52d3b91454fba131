"""Classes of ONNX operators by what they do: one registry for all rooms."""

from __future__ import annotations

RECURRENT = ("LSTM", "GRU", "RNN")
STATES = slice(5, 7)  # of a recurrent node's inputs: states × samples × values; the first is steps × samples × values
CONTROL_FLOW = ("If", "Loop", "Scan")
QDQ = ("QuantizeLinear", "DequantizeLinear")
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # layers that INT8 and FP8 are for
MULTIPLYING = (*WEIGHTED, "Einsum", *RECURRENT)  # whose multiply-accumulates are counted as work

# Operators that hand on values of their first input.
RESHAPING = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")  # the same values in the same order
REORDERING = (*RESHAPING, "Transpose", "Identity")  # the same values, of any type
SELECTING = (*REORDERING, "Slice", "Split", "Gather", "GatherND", "Expand")  # some of them, some several times
SCALE_PRESERVING = frozenset(  # its output fits the quantization scale of its input
    (*REORDERING, "MaxPool", "Slice", "Split", "Pad", "Resize", "DepthToSpace", "SpaceToDepth")
)
MOVING = SCALE_PRESERVING | {"Cast", "Concat", "Dropout", "Expand", "Gather", "GatherElements", "GatherND", "Tile"}
# Exactly as large values.
SAME_RANGE = frozenset((*REORDERING, "Dropout", "DepthToSpace", "SpaceToDepth", "Cast", "Expand"))

FUSED_ACTIVATIONS = ("Relu", "Clip", "HardSwish", "LeakyRelu")  # TensorRT makes them part of a quantized convolution
SIGMOIDS = ("Sigmoid", "HardSigmoid")
POOLING = ("GlobalAveragePool", "AveragePool", "ReduceMean")
COMPARING = ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or")
RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
_PLACE_BY_PLACE = frozenset({
    "Abs", "Add", "And", "BatchNormalization", "Cast", "CastLike", "Ceil", "Clip", "ConstantOfShape", "Cos", "Div", "Elu",
    "Equal", "Exp", "Expand", "Flatten", "Floor", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "OneHot", "Or", "PRelu", "Pow", "Range",
    "Reciprocal", "Relu", "Reshape", "Round", "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Sqrt", "Squeeze", "Sub",
    "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
ELEMENTWISE = _PLACE_BY_PLACE | {  # each result follows from elements at one place: none are mixed
    "Celu", "Constant", "DequantizeLinear", "Dropout", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Mish", "QuantizeLinear",
    "Softplus", "Softsign", "Swish", "ThresholdedRelu",
}  # fmt: skip
EVALUATED_BY_NUMPY = _PLACE_BY_PLACE | {  # whole, by ONNX's reference evaluator; it loops over others
    "Acos", "ArgMax", "ArgMin", "Asin", "Atan", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Compress",
    "Concat", "Cosh", "CumSum", "DepthToSpace", "EyeLike", "Gather", "Hardmax", "LogSoftmax", "NonZero", "Pad", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Sinh", "Slice", "Softmax", "SpaceToDepth", "Tan",
}  # fmt: skip
