"""Classes of ONNX operators by what they do: one registry for all rooms."""

from __future__ import annotations

RECURRENT = ("LSTM", "GRU", "RNN")
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
ELEMENTWISE = frozenset({  # each result follows from the elements at its place alone, or elements are moved: none are mixed
    "Abs", "Add", "And", "BatchNormalization", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Constant", "ConstantOfShape",
    "Cos", "DequantizeLinear", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "OneHot", "Or", "PRelu", "Pow", "QuantizeLinear", "Range",
    "Reciprocal", "Relu", "Reshape", "Round", "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Softplus", "Softsign", "Sqrt",
    "Squeeze", "Sub", "Sum", "Swish", "Tanh", "ThresholdedRelu", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
EVALUATED_BY_NUMPY = frozenset({  # ONNX's reference evaluator gives them to NumPy whole; others it loops over in Python
    "Abs", "Acos", "Add", "And", "ArgMax", "ArgMin", "Asin", "Atan", "BatchNormalization", "BitShift", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat",
    "ConstantOfShape", "Cos", "Cosh", "CumSum", "DepthToSpace", "Div", "Elu", "Equal", "Exp", "Expand", "EyeLike",
    "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual", "Hardmax", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "Max", "Mean", "Min", "Mod", "Mul", "Neg",
    "NonZero", "Not", "OneHot", "Or", "PRelu", "Pad", "Pow", "Range", "Reciprocal", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Relu", "Reshape", "Round", "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Slice",
    "Softmax", "SpaceToDepth", "Sqrt", "Squeeze", "Sub", "Sum", "Tan", "Tanh", "Tile", "Transpose", "Trilu",
    "Unsqueeze", "Where", "Xor",
})  # fmt: skip
