"""Replace, while a model is traced, what torch's exporter has no form for, or one that TensorRT can't take; and give PyTorch's
custom operators (`torch.library`) one: each becomes a node in the domain of its namespace."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from onnx.defs import OpSchema, get_schema

from trtopt.core.errors import ModelError
from trtopt.core.foreign import chain

_VERSION = 13  # of Q/DQ's operators in ONNX: with scales along an axis
_MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)', overload='(\w+)'\)>")
# Namespaces of PyTorch's own.
_OWN = ("aten", "prim", "prims", "quantized", "quantized_decomposed", "torchvision", "torchaudio", "higher_order")
# Of an argument in PyTorch's schema → of the attribute.
_KINDS = {"float": "FLOAT", "int": "INT", "bool": "INT", "str": "STRING"}
_KINDS |= {f"List[{kind}]": f"{name}S" for kind, name in _KINDS.items()}


@contextlib.contextmanager
def traceable(torch: Any, module: Any, text: str) -> Iterator[None]:
    """Replace functions that the exporter has no form for, or one that TensorRT lacks, while the context is entered; and give
    NVIDIA ModelOpt's fake quantizers in the module Q/DQ's form.

    They look at their scales' values, which torch's exporter can't follow; ModelError: one that no Q/DQ pair of TensorRT's is
    equal to.
    """
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.nn.functional, "scaled_dot_product_attention", _attention),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", _said_to_be_causal),
        (torch, "rsub", _subtraction),
        (torch.Tensor, "__rsub__", _subtraction),
    ]
    for place in (torch, torch.Tensor):
        replaced += [(place, "chunk", _chunk), (place, "split", _split)]
    with contextlib.ExitStack() as stack:
        for name, item in module.named_modules():
            forward = _quantizing(torch, item, f"{text}: {name.split('.', 1)[-1]}")
            if forward is not None:
                item.forward = forward
                stack.callback(delattr, item, "forward")
        for place, name, function in replaced:
            if original := getattr(place, name, None):
                stack.callback(setattr, place, name, original)
                setattr(place, name, _given(torch, original, function))
        yield


def _given(torch: Any, original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, which may become a method, that is also given torch and what it replaces."""
    return lambda *args, **options: function(torch, original, *args, **options)


def _attention(
    torch: Any, original: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
) -> Any:
    """Attention over windows (five axes) or without heads (three) as that of samples × heads, all that the exporter knows."""
    if query.dim() == key.dim() == value.dim() == 4 or query.dim() < 3:
        return original(query, key, value, attn_mask, *args, **options)
    heads = 1 if query.dim() == 3 else 2  # the axes, from the last but two on, that stay
    before = torch.broadcast_shapes(*(item.shape[: -1 - heads] for item in (query, key, value)))

    def flat(item: Any) -> Any:
        item = item.expand(*before, *item.shape[-1 - heads :]).flatten(0, len(before) - 1)
        return item.unsqueeze(1) if heads == 1 else item

    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = flat(attn_mask if attn_mask.dim() > heads + 1 else attn_mask.unsqueeze(0))
    result = original(flat(query), flat(key), flat(value), attn_mask, *args, **options)
    return (result.squeeze(1) if heads == 1 else result).unflatten(0, before)


def _said_to_be_causal(torch: Any, original: Any, mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Without torch.nn.Transformer's look at its mask's values, which can't be traced: another mask is applied as it is."""
    return is_causal is True


def _slices(values: Any, size: Any, count: int, dim: int) -> Any:
    """Parts of an open axis (a batch doubled for guidance, two images in one), which the exporter makes a sequence."""
    ends = [*(size * place for place in range(1, count)), values.shape[dim]]
    return tuple(values.narrow(dim, size * place, end - size * place) for place, end in enumerate(ends))


def _chunk(torch: Any, original: Any, input: Any, chunks: int, dim: int = 0) -> Any:
    if isinstance(length := input.shape[dim], torch.SymInt):
        return _slices(input, (length + chunks - 1) // chunks, chunks, dim)
    return original(input, chunks, dim)


def _split(torch: Any, original: Any, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    size, length = split_size_or_sections, tensor.shape[dim]
    if isinstance(size, torch.SymInt) and isinstance(length, torch.SymInt):
        return _slices(tensor, size, -(-length.node.hint // size.node.hint), dim)
    return original(tensor, size, dim)


def _subtraction(torch: Any, original: Any, input: Any, other: Any, **options: Any) -> Any:
    """`1.0 - mask` of an integer mask, whose type the exporter doesn't promote."""
    whole = not (input.is_floating_point() or input.is_complex() or input.dtype == torch.bool)
    if isinstance(other, float) and whole:
        input = input.to(torch.get_default_dtype())
    return original(input, other, **options)


def _quantizing(torch: Any, item: Any, what: str) -> Callable[[Any], Any] | None:
    """Return the quantizer's forward as Q/DQ; its attributes are as ModelOpt 0.47 has them."""
    if type(item).__name__ != "TensorQuantizer" or not hasattr(item, "num_bits"):  # of whichever release of ModelOpt
        return None
    if not getattr(item, "is_enabled", True):
        return lambda values: values
    amax, axis, bits = getattr(item, "amax", None), getattr(item, "axis", None), item.num_bits
    axes = [axis] if isinstance(axis, int) else [*(axis or ())]
    unusual = [name for name in ("block_sizes", "unsigned") if getattr(item, name, None)]
    unusual += ["pre_quant_scale"] * (getattr(item, "pre_quant_scale", None) is not None)
    if bits != 8 or unusual or len(axes) > 1 or amax is None or not bool((amax > 0).all()):
        least = "no amax, as it was never calibrated" if amax is None else f"an amax from {float(amax.min()):g} on"
        raise ModelError(
            f"{what} is a TensorQuantizer of NVIDIA ModelOpt with {', '.join([f'num_bits={bits}', *unusual, least])}; export "
            f"writes Q/DQ of signed INT8 with fixed scales above 0, a tensor's or an axis': quantize it with "
            "mtq.INT8_DEFAULT_CFG, or export the float model, as it is before mtq.quantize, and let trtopt build --int8 do it"
        )
    return _rounding(torch, amax / 127, axes[0] if axes and amax.numel() > 1 else None)


def _rounding(torch: Any, scale: Any, axis: int | None) -> Callable[[Any], Any]:
    """To INT8 and back, by ONNX's own operators. Of scales for -127 to 127, -128 is what lies below them all."""
    scale = scale.detach().float()
    scale = scale.max() if axis is None else scale.flatten()
    zeros = torch.zeros(scale.shape, dtype=torch.int8)

    def forward(values: Any) -> Any:
        options: dict[str, Any] = {"shape": values.shape, "version": _VERSION}
        options["attrs"] = {} if axis is None else {"axis": axis % values.dim()}
        codes = torch.onnx.ops.symbolic("QuantizeLinear", (values, scale, zeros), dtype=torch.int8, **options)
        return torch.onnx.ops.symbolic("DequantizeLinear", (codes, scale, zeros), dtype=values.dtype, **options)

    return forward


# Custom operators -------------------------------------------------------------------------------------------------------


def custom_operator(torch: Any, error: BaseException) -> Any:
    """Return the custom operator that the exporter has no translation for; None: it failed for another reason."""
    found = next((match for link in chain(error) if (match := _MISSING.search(str(link)))), None)
    if found is None or found[1] in _OWN:
        return None
    return getattr(getattr(getattr(torch.ops, found[1]), found[2]), found[3])


def translation(overload: Any) -> Callable[..., Any]:
    """Return what writes a custom operator's node: its tensors as inputs, in order, and its other arguments as attributes."""
    from onnxscript.values import Op, Opset

    schema = overload._schema
    (domain, name), arguments = schema.name.split("::"), schema.arguments
    tensors = [item.name for item in arguments if str(item.type) in ("Tensor", "Optional[Tensor]")]
    types = {item.name: re.sub(r"^Optional\[(.*)]$", r"\1", str(item.type)) for item in arguments}
    kinds = {name: _KINDS.get(text, "") for name, text in types.items() if name not in tensors}
    if wrong := next((item for item in arguments if kinds.get(item.name) == ""), None):
        raise ModelError(
            f"the custom operator {schema.name} takes {wrong.name} of type {wrong.type}: a node takes tensors, and numbers, "
            "texts and lists of these as attributes"
        )
    any_type, given = get_schema("Identity", 13).inputs[0].types, len(schema.returns)
    formal, optional = OpSchema.FormalParameter, OpSchema.FormalParameterOption.Optional
    written = OpSchema(
        name,
        domain,
        1,
        inputs=[formal(each, f"T{place}", param_option=optional) for place, each in enumerate(tensors)],
        outputs=[formal(f"output{place}", f"R{place}") for place in range(given)],
        type_constraints=[
            (f"{letter}{place}", sorted(any_type), "")
            for letter, count in (("T", len(tensors)), ("R", given))
            for place in range(count)
        ],
        attributes=[
            OpSchema.Attribute(each, getattr(OpSchema.AttrType, kind), "", required=False)
            for each, kind in kinds.items()
        ],
    )
    op = Op(Opset(domain, 1), name, written)

    def write(*values: Any, **named: Any) -> Any:
        bound = dict(zip((item.name for item in arguments), values)) | named
        attributes = {each: bound[each] for each in kinds if bound.get(each) is not None}
        for each, value in attributes.items():
            if not isinstance(value, (int, float, str, list, tuple)):
                raise ModelError(
                    f"{each} of the custom operator {schema.name} is computed in the model, which no attribute can be"
                )
        return op(*(bound.get(each) for each in tensors), **attributes)

    return write
