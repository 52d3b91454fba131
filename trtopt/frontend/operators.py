"""PyTorch's custom operators (`torch.library`) in the exporter: each becomes a node in the domain of its namespace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from onnx.defs import OpSchema, get_schema

from trtopt.core.errors import ModelError
from trtopt.core.foreign import chain

_MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)', overload='(\w+)'\)>")
# Namespaces of PyTorch's own.
_OWN = ("aten", "prim", "prims", "quantized", "quantized_decomposed", "torchvision", "torchaudio", "higher_order")
# Of an argument in PyTorch's schema → of the attribute.
_KINDS = {"float": "FLOAT", "int": "INT", "bool": "INT", "str": "STRING"}
_KINDS |= {f"List[{kind}]": f"{name}S" for kind, name in _KINDS.items()}


def custom_operator(torch: Any, error: BaseException) -> Any:
    """Return the custom operator that the exporter has no translation for; None: it failed for another reason."""
    found = next((match for link in chain(error) if (match := _MISSING.search(str(link)))), None)
    if found is None or found[1] in _OWN:
        return None
    return getattr(getattr(getattr(torch.ops, found[1]), found[2]), found[3])


def translation(overload: Any) -> Callable[..., Any]:
    """Return what writes a custom operator's node: its tensors as inputs, in order, and its other arguments as attributes.

    Raises:
        ModelError: an argument is of a type that neither can hold.
    """
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
