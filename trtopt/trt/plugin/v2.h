// The plugin for TensorRT 8.6.
#include "common.h"

namespace trtopt
{
class Plugin : public IPluginV2DynamicExt
{
public:
    Attributes attributes = defaults();
    std::string space;

    IPluginV2DynamicExt* clone() const noexcept override { return new Plugin(*this); }
    DimsExprs getOutputDimensions(
        int32_t index, DimsExprs const* inputs, int32_t, IExprBuilder& builder) noexcept override
    {
        DimsExprs outputs[kOUTPUTS]{};
        Sizes sizes{builder};
        shapes(inputs, outputs, attributes, sizes);
        return outputs[index];
    }
    bool supportsFormatCombination(
        int32_t position, PluginTensorDesc const* tensors, int32_t inputs, int32_t outputs) noexcept override
    {
        DataType types[kINPUTS + kOUTPUTS];
        for (int32_t index = 0; index <= position; ++index)
            types[index] = tensors[index].type;
        return inputs == kINPUTS && outputs == kOUTPUTS && supported(position, types, tensors[position].format);
    }
    void configurePlugin(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override
    {
    }
    size_t getWorkspaceSize(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) const noexcept override
    {
        return 0;
    }
    int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
        void* const* outputs, void*, cudaStream_t stream) noexcept override
    {
        return launch(attributes, in, out, inputs, outputs, stream);
    }
    DataType getOutputDataType(int32_t index, DataType const* inputs, int32_t) const noexcept override
    {
        return output_type(index, inputs);
    }
    AsciiChar const* getPluginType() const noexcept override { return kNAME; }
    AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    int32_t getNbOutputs() const noexcept override { return kOUTPUTS; }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    size_t getSerializationSize() const noexcept override
    {
        size_t count = 0;
        for (auto const& values : attributes.values)
            count += 1 + values.size();
        return count * sizeof(double);
    }
    void serialize(void* buffer) const noexcept override // each list behind its length
    {
        auto* place = static_cast<char*>(buffer);
        for (auto const& values : attributes.values)
        {
            double const length = static_cast<double>(values.size());
            std::memcpy(place, &length, sizeof length);
            std::memcpy(place + sizeof length, values.data(), values.size() * sizeof length);
            place += (1 + values.size()) * sizeof length;
        }
    }
    void destroy() noexcept override { delete this; }
    void setPluginNamespace(AsciiChar const* name) noexcept override { space = name; }
    AsciiChar const* getPluginNamespace() const noexcept override { return space.c_str(); }
};

class Creator : public Listed<IPluginCreator>
{
public:
    IPluginV2* createPlugin(AsciiChar const*, PluginFieldCollection const* given) noexcept override
    {
        auto* made = new Plugin;
        read(made->attributes, given);
        return made;
    }
    IPluginV2* deserializePlugin(AsciiChar const*, void const* data, size_t length) noexcept override
    {
        auto* made = new Plugin;
        std::vector<double> numbers(length / sizeof(double));
        std::memcpy(numbers.data(), data, numbers.size() * sizeof(double));
        size_t place = 0;
        for (auto& values : made->attributes.values)
        {
            size_t const count = place < numbers.size() ? static_cast<size_t>(numbers[place]) : 0;
            if (place >= numbers.size() || count >= numbers.size() - place)
                break; // damaged
            values.assign(numbers.begin() + place + 1, numbers.begin() + place + 1 + count);
            place += 1 + count;
        }
        return made;
    }
    void setPluginNamespace(AsciiChar const*) noexcept override {}
};
} // namespace trtopt

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count)
{
    static trtopt::Creator creator;
    static nvinfer1::IPluginCreator* const all[]{&creator};
    count = 1;
    return all;
}
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
