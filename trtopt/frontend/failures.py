"""Explain why a module can't be exported, in the user's words, and what to do about it."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from trtopt.core.foreign import chain, place
from trtopt.core.values import x
from trtopt.frontend.samples import Subject

_STATIC = re.compile(r"inferred a static shape of (\d+) for dimension inputs\[(\d+)\]\.shape\[(\d+)\]")
# What is wrong with a module, by what its error says or the name of an operator that it runs; {at}: where.
_SIGNS = {
    r"nms\w*\.default": "{at}it ends in NMS (non-maximum suppression), which gives as many boxes as there are. Export what "
    "comes before NMS, by a module of your own whose forward returns the raw boxes and scores (docs/export.md), and do NMS "
    "after the engine",
    "_pack_padded_sequence": "{at}it packs sequences (pack_padded_sequence), whose steps depend on their lengths' values: "
    "give the padded sequences to the LSTM or GRU, and take each one's result at its own last step, by torch.gather",
    r"aten\._int_mm|aten\._scaled_mm": "it multiplies INT8 or FP8 numbers, as torchao's quantize_ makes modules do, which "
    "torch's exporter can't write: export the float model, as it is before quantize_, and let trtopt build --int8 (or --fp8) "
    "quantize it",
    r"\bquantized(\.|::)|_obs_fq_": "it holds PyTorch's own INT8 operators or their observers (torch.ao), which ONNX "
    "lacks: export the float model, as it is before prepare and convert, and let trtopt build --int8 quantize it",
    "fake_quantize": "{at}it rounds as training for INT8 does (torch.fake_quantize…), for which torch's exporter has no ONNX "
    "form: export the float model without that, and let trtopt build --int8 quantize it",
    "complex-valued input": "{at}it computes with complex numbers, of which torch's exporter knows few operations: write "
    "that part with two real tensors, the real and the imaginary one (a rotation by torch.polar: cosine and sine)",
    r"No ONNX function found for <OpOverload\(op='([\w.]+)'": "{at}it uses PyTorch's {found[1]}, for which torch's exporter "
    "has no ONNX form: write that part with other operators, or leave it out of the exported model",
    "data-dependent|GuardOnDataDependent": "{at}its control flow depends on values: rewrite that part without Python's if, "
    "while, int() or bool() on tensors (torch.where chooses by value), or leave it out of the exported model",
}


def why(error: BaseException, subject: Subject) -> str:
    """Return the class of the failure in our words: what, where in the user's code, what to do."""
    infos, told = subject.infos, " ".join(map(str, [*chain(error), *operators_of(subject)]))
    fixed = [
        f"{infos[int(which)].shape[int(axis)]} of {infos[int(which)].name} is always {size}"
        for size, which, axis in _STATIC.findall(told)
        if int(which) < len(infos) and int(axis) < len(infos[int(which)].shape)
    ]
    signs = ("Constraints violated", "inferred a static shape", "specialized", "ConstraintViolation")
    if fixed or any(sign in told for sign in signs):
        which = "; ".join(dict.fromkeys(fixed)) or "give a size in its place"
        return f": {at(error)}it fixes a dimension that was asked to be dynamic: {which}; give the size in `inputs=`"
    for sign, reason in _SIGNS.items():
        if found := re.search(sign, told):
            return f": {reason.format(at=at(error), found=found)}"
    where = f": {at(error)}".removesuffix(": ")
    tries, sizes = [], subject.sizes | {subject.first: 1}
    for info in infos:
        if info.open_axes:
            fixed_sizes = x([sizes[size] if isinstance(size, str) else size for size in info.shape])
            kind = "" if info.dtype == "float32" else f":{info.dtype}"
            tries.append(f"`inputs='{info.name}:{fixed_sizes}{kind}'`")
    fixed_ones = f"try fixed sizes, {' '.join(tries)}; else " if tries else ""
    return (
        f"{where}: torch's exporter itself fails: {fixed_ones}write that part with other operators, or leave it out of the "
        "exported model"
    )


def at(error: BaseException) -> str:
    where = place(error)
    return f"at {where}: " if where else ""


def input_hint(error: BaseException, subject: Subject) -> str:
    """Return what to do where forward itself fails."""
    told = str(error)
    if "data type 'str'" in told or "'Tensor' object has no attribute" in told:
        return (
            ". forward gets tensors alone: where it takes a dict or an object, export a module around it, whose forward takes "
            "tensors and puts them into one"
        )
    if re.search(r"scalar type|dtype|indices|Half|Double|Long|BFloat16", told):
        typed = "`inputs='NAME:batchx16:int64'` (or :float16)"
        return f". Where a tensor of another type is needed, say so: {typed}{types_hint(subject)}"
    values = (
        "which were made up? `sample=` gives real ones" if subject.made_up else f"which were given ({subject.sampled})?"
    )
    return f". Are the shapes and types of `inputs=` right, and the values, {values}"


def types_hint(subject: Subject, told: str = "") -> str:
    """Return what to do about weights, or a forward, of a type that PyTorch or ONNX Runtime can't run everywhere."""
    found = {item.dtype for item in subject.module.parameters() if item.dtype.is_floating_point}
    odd = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found - {subject.torch.float32}))
    if not odd and "bfloat16" in told:  # beside FP32 weights
        return (
            ". forward itself computes in bfloat16 (torch.autocast, .bfloat16()): leave that out of the exported model; "
            "precision is chosen by trtopt build"
        )
    if not odd:
        return ""
    return (
        f". The module's weights are {odd}: give it in float32, which needs no other inputs, as a function that returns "
        "model.float(); precision is chosen by trtopt build"
    )


def operators_of(subject: Subject) -> list[str]:
    """The names of the operators that the module runs, as far as it runs while it is watched (flex_attention doesn't)."""
    torch: Any = subject.torch
    operators: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(str(function))
            return function(*args, **(kwargs or {}))

    with contextlib.suppress(Exception), Watch():
        subject(subject.batch(subject.batch_sizes[-1]))
    return operators
