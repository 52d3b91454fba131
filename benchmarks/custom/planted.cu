// The kernel of acme::planted, with faults on demand: what wrong kernels of engines do.
#include "operator.h"

// 1: reads one channel too far. 2: the third row is wrong from batch 3 on. 3: a scale is off by 2 at the profile's end (12).
// 4: the last row isn't written. 5: it isn't deterministic. 6: the gate is left out. 7: 2, in FP16 alone.
template <typename T>
__global__ void kernel(T const* x, T const* gate, T* y, int64_t count, int64_t batch, int64_t channels, int64_t plane, int fault)
{
    int64_t const row = channels * plane;
    for (int64_t place = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; place < count; place += int64_t{gridDim.x} * blockDim.x)
    {
        int64_t const sample = place / row;
        bool const last = place % row >= row - plane && sample + 1 < batch; // channel of a sample that has a next one
        int64_t const from = fault == 1 && last ? place + plane : place;
        float value = static_cast<float>(x[from]);
        if (fault != 6)
            value *= static_cast<float>(gate[place / plane]);
        bool const third = fault == 2 || (fault == 7 && sizeof(T) == 2);
        if (third && batch >= 3 && sample == 2)
            value *= 1.5f;
        if (fault == 3 && batch == 12)
            value *= 2.0f;
        if (fault == 4 && batch > 1 && sample == batch - 1)
            continue;
        if (fault == 5 && (clock64() >> 4) % 16 == 0)
            value *= 1.25f;
        y[place] = static_cast<T>(value);
    }
}

template <typename T>
static cudaError_t launch(trtopt::Call const& call)
{
    trtopt::Tensor const& x = call.inputs[0];
    int64_t const count = x.size(), batch = x.shape.d[0], channels = x.shape.d[1];
    if (count == 0)
        return cudaSuccess;
    int64_t const plane = count / (batch * channels), blocks = (count + 255) / 256;
    kernel<T><<<static_cast<int>(blocks < 65535 ? blocks : 65535), 256, 0, call.stream>>>(x.as<T const>(),
        call.inputs[1].as<T const>(), call.outputs[0].as<T>(), count, batch, channels, plane,
        static_cast<int>(call.attributes.number("fault")));
    return cudaGetLastError();
}

static void shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out, trtopt::Attributes const&, trtopt::Sizes&)
{
    out[0] = in[0];
}

static cudaError_t run(trtopt::Call const& call)
{
    return call.inputs[0].type == trtopt::DataType::kHALF ? launch<__half>(call) : launch<float>(call);
}
