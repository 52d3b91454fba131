// Shared by the plugins for TensorRT 8.6 (v2.h) and for 10, 11 and RTX (v3.h), which come behind the operator's own file.
// description.h, which trtopt writes, has kNAME, kINPUTS, kOUTPUTS, kTYPES, kFP32_INPUTS, kOUTPUT_TYPES and kATTRIBUTES.
#pragma once

namespace trtopt
{
using namespace nvinfer1;

inline bool floating(DataType type)
{
#if NV_TENSORRT_MAJOR >= 9 || defined(TRTOPT_HAS_BF16)
    if (type == DataType::kBF16)
        return true;
#endif
    return type == DataType::kFLOAT || type == DataType::kHALF;
}

inline bool whole(DataType type)
{
    int32_t const number = static_cast<int32_t>(type); // INT32, BOOL, UINT8; INT64, which 8.6 hasn't
    return number == 3 || number == 4 || number == 5 || number == 8;
}

inline Attributes defaults()
{
    Attributes made;
    for (auto const& item : kATTRIBUTES)
    {
        made.names.push_back(item.name);
        made.values.push_back(item.value);
    }
    return made;
}

// Take over what the parser read of a node, or what a plan holds.
inline void read(Attributes& attributes, PluginFieldCollection const* fields)
{
    for (int32_t number = 0; number < fields->nbFields; ++number)
    {
        PluginField const& field = fields->fields[number];
        for (size_t place = 0; place < attributes.names.size(); ++place)
        {
            if (attributes.names[place] != field.name)
                continue;
            auto& values = attributes.values[place];
            values.clear();
            for (int32_t index = 0; index < field.length; ++index)
            {
                if (field.type == PluginFieldType::kFLOAT32)
                    values.push_back(static_cast<float const*>(field.data)[index]);
                else if (field.type == PluginFieldType::kFLOAT64)
                    values.push_back(static_cast<double const*>(field.data)[index]);
                else if (field.type == PluginFieldType::kINT32)
                    values.push_back(static_cast<int32_t const*>(field.data)[index]);
            }
        }
    }
}

inline std::vector<PluginField> fields()
{
    std::vector<PluginField> made;
    for (auto const& item : kATTRIBUTES)
        made.emplace_back(item.name, nullptr, item.integer ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32, 1);
    return made;
}

// What a creator of either interface says of itself.
template <typename Base>
class Listed : public Base
{
public:
    std::vector<PluginField> held = fields();
    PluginFieldCollection collection{static_cast<int32_t>(held.size()), held.data()};

    AsciiChar const* getPluginName() const noexcept override { return kNAME; }
    AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
    PluginFieldCollection const* getFieldNames() noexcept override { return &collection; }
};

// A tensor's type as TensorRT offers it, `types` those of all before it and its own: floats are all of one type.
inline bool supported(int32_t position, DataType const* types, TensorFormat format)
{
    if (format != TensorFormat::kLINEAR)
        return false;
    DataType const own = types[position];
    if (position < kINPUTS && kFP32_INPUTS[position])
        return own == DataType::kFLOAT;
    if (position >= kINPUTS && kOUTPUT_TYPES[position - kINPUTS] >= 0)
        return own == static_cast<DataType>(kOUTPUT_TYPES[position - kINPUTS]);
    if (!floating(own)) // integers and truths as they come; not the INT8 of a tensor that TensorRT itself quantizes
        return position < kINPUTS && whole(own);
    for (int32_t other = 0; other < position; ++other)
    {
        bool const fixed = other < kINPUTS ? kFP32_INPUTS[other] : kOUTPUT_TYPES[other - kINPUTS] >= 0;
        if (!fixed && floating(types[other]))
            return types[other] == own;
    }
    for (int32_t const allowed : kTYPES)
        if (own == static_cast<DataType>(allowed))
            return true;
    return false;
}

inline DataType output_type(int32_t index, DataType const* inputs)
{
    if (kOUTPUT_TYPES[index] >= 0)
        return static_cast<DataType>(kOUTPUT_TYPES[index]);
    for (int32_t input = 0; input < kINPUTS; ++input)
        if (!kFP32_INPUTS[input] && floating(inputs[input]))
            return inputs[input];
    return inputs[0];
}

inline int32_t launch(Attributes const& attributes, PluginTensorDesc const* in, PluginTensorDesc const* out,
    void const* const* inputs, void* const* outputs, cudaStream_t stream)
{
    Tensor given[kINPUTS + 1], made[kOUTPUTS];
    for (int32_t index = 0; index < kINPUTS; ++index)
        given[index] = {const_cast<void*>(inputs[index]), in[index].dims, in[index].type};
    for (int32_t index = 0; index < kOUTPUTS; ++index)
        made[index] = {outputs[index], out[index].dims, out[index].type};
    return static_cast<int32_t>(run({given, made, attributes, stream}));
}
} // namespace trtopt
