// What an operator's kernel file includes. It defines the two functions at the end; trtopt writes the plugin around them.
#pragma once
#include <NvInfer.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace trtopt
{
using nvinfer1::DataType;

// A tensor in GPU memory, row after row.
struct Tensor
{
    void* data;
    nvinfer1::Dims shape;
    DataType type;

    int64_t size() const
    {
        int64_t count = 1;
        for (int axis = 0; axis < shape.nbDims; ++axis)
            count *= shape.d[axis];
        return count;
    }

    template <typename T>
    T* as() const { return static_cast<T*>(data); }
};

// A node's attributes, numbers and lists of them, as doubles, which hold each of them exactly.
struct Attributes
{
    std::vector<std::string> names;
    std::vector<std::vector<double>> values;

    std::vector<double> const& list(char const* name) const
    {
        for (size_t place = 0; place < names.size(); ++place)
            if (names[place] == name)
                return values[place];
        static std::vector<double> const none{0.0};
        return none;
    }

    double number(char const* name) const { return list(name).empty() ? 0.0 : list(name)[0]; }
};

// One call: inputs and outputs, of one type where they are floating, and the stream that everything has to run on.
struct Call
{
    Tensor const* inputs;
    Tensor const* outputs;
    Attributes const& attributes;
    cudaStream_t stream;
};

// Sizes that are known when shapes are: sizes.times(in[0].d[1], sizes.of(2)).
struct Sizes
{
    using Size = nvinfer1::IDimensionExpr const*;
    nvinfer1::IExprBuilder& builder;

    Size of(int32_t size) { return builder.constant(size); }
    Size times(Size a, Size b) { return builder.operation(nvinfer1::DimensionOperation::kPROD, *a, *b); }
    Size plus(Size a, Size b) { return builder.operation(nvinfer1::DimensionOperation::kSUM, *a, *b); }
    Size minus(Size a, Size b) { return builder.operation(nvinfer1::DimensionOperation::kSUB, *a, *b); }
    Size over(Size a, Size b) { return builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *a, *b); }
};
} // namespace trtopt

// Give the outputs' shapes for those of the inputs.
static void shapes(
    nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out, trtopt::Attributes const& attributes, trtopt::Sizes& sizes);
// Launch the kernel; return cudaGetLastError().
static cudaError_t run(trtopt::Call const& call);
