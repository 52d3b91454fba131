// The kernel of acme::deform; what it computes stands in deform.py.
#include "operator.h"

static constexpr int kMOST = 8; // levels

struct Levels // height, width and first position of each
{
    int count, points;
    int height[kMOST], width[kMOST], first[kMOST];
};

// A thread gives one channel of one head of one query: neighbours read neighbouring channels of the same places.
template <typename T>
__global__ void kernel(T const* value, float const* places, T const* weights, T* result, int64_t count, int64_t positions,
    int64_t queries, int heads, int channels, Levels levels)
{
    for (int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; index < count; index += int64_t{gridDim.x} * blockDim.x)
    {
        int64_t const sample = index / channels; // batch × queries × heads
        int64_t const row = sample / heads / queries, stride = int64_t{heads} * channels;
        T const* grid = value + row * positions * stride + sample % heads * channels + index % channels;
        float sum = 0.0f;
        for (int level = 0; level < levels.count; ++level)
        {
            int const height = levels.height[level], width = levels.width[level];
            for (int point = 0; point < levels.points; ++point)
            {
                int64_t const place = (sample * levels.count + level) * levels.points + point;
                float const x = places[2 * place] * width - 0.5f, y = places[2 * place + 1] * height - 0.5f;
                if (!(x > -1.0f && y > -1.0f && x < width && y < height))
                    continue;
                int const left = static_cast<int>(floorf(x)), top = static_cast<int>(floorf(y));
                float const right = x - left, down = y - top;
                float found = 0.0f;
                for (int corner = 0; corner < 4; ++corner)
                {
                    int const column = left + (corner & 1), line = top + (corner >> 1);
                    if (column < 0 || line < 0 || column >= width || line >= height)
                        continue;
                    float const share = (corner & 1 ? right : 1.0f - right) * (corner >> 1 ? down : 1.0f - down);
                    int64_t const position = levels.first[level] + int64_t{line} * width + column;
                    found += share * static_cast<float>(grid[position * stride]);
                }
                sum += found * static_cast<float>(weights[place]);
            }
        }
        result[index] = static_cast<T>(sum);
    }
}

template <typename T>
static cudaError_t launch(trtopt::Call const& call)
{
    trtopt::Tensor const &value = call.inputs[0], &places = call.inputs[1], &result = call.outputs[0];
    auto const& sizes = call.attributes.list("sizes");
    Levels levels{static_cast<int>(places.shape.d[3]), static_cast<int>(places.shape.d[4]), {}, {}, {}};
    if (levels.count > kMOST || sizes.size() != 2u * levels.count)
        return cudaErrorInvalidValue;
    for (int level = 0, first = 0; level < levels.count; ++level)
    {
        levels.height[level] = static_cast<int>(sizes[2 * level]);
        levels.width[level] = static_cast<int>(sizes[2 * level + 1]);
        levels.first[level] = first;
        first += levels.height[level] * levels.width[level];
    }
    int64_t const count = result.size(), blocks = (count + 255) / 256;
    if (count == 0)
        return cudaSuccess;
    kernel<T><<<static_cast<int>(blocks < 65535 ? blocks : 65535), 256, 0, call.stream>>>(value.as<T const>(),
        places.as<float const>(), call.inputs[2].as<T const>(), result.as<T>(), count, value.shape.d[1], places.shape.d[1],
        static_cast<int>(value.shape.d[2]), static_cast<int>(value.shape.d[3]), levels);
    return cudaGetLastError();
}

static void shapes(
    nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out, trtopt::Attributes const&, trtopt::Sizes& sizes)
{
    out[0].nbDims = 3;
    out[0].d[0] = in[1].d[0];
    out[0].d[1] = in[1].d[1];
    out[0].d[2] = sizes.times(in[0].d[2], in[0].d[3]);
}

static cudaError_t run(trtopt::Call const& call)
{
    return call.inputs[0].type == trtopt::DataType::kHALF ? launch<__half>(call) : launch<float>(call);
}
