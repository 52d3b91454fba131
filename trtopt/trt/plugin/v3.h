// The plugin for TensorRT 10, 11 and RTX.
#include "common.h"

namespace trtopt
{
class Plugin : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime
{
public:
    Attributes attributes;
    std::vector<PluginField> written;
    PluginFieldCollection collection{};

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override
    {
        if (type == PluginCapabilityType::kBUILD)
            return static_cast<IPluginV3OneBuild*>(this);
        if (type == PluginCapabilityType::kRUNTIME)
            return static_cast<IPluginV3OneRuntime*>(this);
        return static_cast<IPluginV3OneCore*>(this);
    }
    IPluginV3* clone() noexcept override
    {
        auto* made = new Plugin;
        made->attributes = attributes;
        return made;
    }
    AsciiChar const* getPluginName() const noexcept override { return kNAME; }
    AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
    int32_t getNbOutputs() const noexcept override { return kOUTPUTS; }
    int32_t configurePlugin(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override
    {
        return 0;
    }
    bool supportsFormatCombination(
        int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t outputs) noexcept override
    {
        DataType types[kINPUTS + kOUTPUTS];
        for (int32_t index = 0; index <= position; ++index)
            types[index] = tensors[index].desc.type;
        return inputs == kINPUTS && outputs == kOUTPUTS && supported(position, types, tensors[position].desc.format);
    }
    int32_t getOutputDataTypes(
        DataType* outputs, int32_t count, DataType const* inputs, int32_t given) const noexcept override
    {
        for (int32_t index = 0; given == kINPUTS && index < count; ++index)
            outputs[index] = output_type(index, inputs);
        return given == kINPUTS ? 0 : 1;
    }
    int32_t getOutputShapes(DimsExprs const* inputs, int32_t given, DimsExprs const*, int32_t, DimsExprs* outputs,
        int32_t, IExprBuilder& builder) noexcept override
    {
        Sizes sizes{builder};
        if (given != kINPUTS)
            return 1;
        shapes(inputs, outputs, attributes, sizes);
        return 0;
    }
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override
    {
        return 0;
    }
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
    int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
        void* const* outputs, void*, cudaStream_t stream) noexcept override
    {
        return launch(attributes, in, out, inputs, outputs, stream);
    }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override
    {
        written.clear();
        for (size_t place = 0; place < attributes.names.size(); ++place)
        {
            auto const& values = attributes.values[place];
            written.emplace_back(attributes.names[place].c_str(), values.data(), PluginFieldType::kFLOAT64,
                static_cast<int32_t>(values.size()));
        }
        collection = {static_cast<int32_t>(written.size()), written.data()};
        return &collection;
    }
};

class Creator : public Listed<IPluginCreatorV3One>
{
public:
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const* given, TensorRTPhase) noexcept override
    {
        auto* made = new Plugin;
        made->attributes = defaults();
        read(made->attributes, given);
        return made;
    }
};
} // namespace trtopt

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    static trtopt::Creator creator;
    static nvinfer1::IPluginCreatorInterface* const all[]{&creator};
    count = 1;
    return all;
}
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
