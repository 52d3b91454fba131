"""The layers of a built engine, as TensorRT itself reports them, and the precision each one computes in.

Two sources: the `Layers:` message that TensorRT-RTX writes during a build at DETAILED verbosity (no GPU needed), and
the engine inspector's JSON (8.6, 10, 11; needs the engine deserialized).

A layer computes in the type of its first input: an INT8 convolution reads INT8 activations, whatever it writes. But one may
dequantize what it reads and multiply in floating point, which the graph tells. Layers that touch no floating or quantized
tensor (shape arithmetic) are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtopt.core.errors import EngineError
from trtopt.core.values import LayerInfo, Precision

# A line of the dump: `Name: …, LayerType: …, Inputs: […], …`, keys that some lines have ("EventId", where an engine has
# several streams) and others don't. Names may hold any character, so the type is known by the key that follows it.
_HEAD = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>\S*?)(?=, [A-Z]\w*: |$)")
_KEY = re.compile(r", (Inputs|Constants|Outputs|TacticName|StreamId|EventId|Metadata): ?")
_TENSOR = re.compile(r"\{ Name: (.*?)(?:, Dimensions: \S*)?(?:, Datatype: (\w+))?(?:, Format: ([^{}]*?))? \}")
_TENSORS = {"Inputs": "Inputs", "Outputs": "Outputs", "Weights": "Constants"}  # the inspector's word → the dump's
# A name ends before the next one, or before what TensorRT adds to it: "__gemm_from_conv1x1".
_METADATA = re.compile(r"\[ONNX Layer: (.*?)\](?=(?:__\w+)?(?:\[ONNX Layer: |\s*$|\x1e))")
_TYPES = {str(item): item for item in (Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8)}
_TYPES |= {"float": Precision.FP32, "half": Precision.FP16, "bfloat16": Precision.BF16, "e4m3": Precision.FP8}
_TYPE_WORD = re.compile(rf"\b({'|'.join(_TYPES)})\b", re.I)
# Fused kernels carry their operators, each cut to four letters: __myl_CorrMulAdd_myl0_3, __myl_FcAddSilu_myl0_7.
_FUSED = re.compile(r"^__myl_((?:[A-Z][a-z0-9]*)+)")
_FUSED_KINDS = {
    "convolution": {"Corr", "Conv"},
    "deconvolution": {"Deco", "Dcon"},
    "matmul": {"Fc", "Gemm", "Bmm", "Matm"},
}
_KINDS = (  # of the layer's type, the first that matches
    (r"reformat|noop", "other"),
    (r"deconv", "deconvolution"),
    (r"conv|correlation", "convolution"),
    (r"gemm|gemv|matrixmultiply|matrix_multiply|fullyconnected|mha|\bfc\b", "matmul"),
)
_PROFILE = re.compile(r" \[profile [1-9]\d*\]$")
REGION = "ForeignNode"  # in the name of a layer that hides others: 8.6's, of most of a transformer
HEAVY_OPS = {"Conv": "convolution", "ConvTranspose": "deconvolution"}
HEAVY_OPS |= dict.fromkeys(("Gemm", "MatMul", "Einsum"), "matmul")
"""The kind of layer (`LayerInfo.kind`) that an operator with products becomes."""


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    """Names of the ONNX nodes in a layer's metadata: `[ONNX Layer: a][ONNX Layer: b]`."""
    return tuple(dict.fromkeys(_METADATA.findall(metadata.replace("\x1f", "\x1e"))))


def profile_suffix(name: str) -> str:
    """ " [profile 1]" of a layer that an engine has again for its second profile; empty for the first one's."""
    return (_PROFILE.search(name) or [""])[0]


def sparse_kernels(layers: Sequence[LayerInfo]) -> str:
    """Say how many layers with products run sparse kernels, as the names of these tell; TensorRT-RTX makes kernels later."""
    heavy = [layer for layer in layers if layer.kind != "other"]
    named = [layer.tactic for layer in heavy if re.search(r"^(?!0x|__my)\w+$", layer.tactic)]
    if not named:
        return "which kernels are sparse isn't known"
    return f"sparse kernels in {sum('sparse' in name for name in named)} of {len(heavy)} layers"


@dataclass(frozen=True)
class LayerReport:
    """The layers of an engine, as it reports them.

    Attributes:
        layers: those that touch a floating or quantized tensor.
        unread: why some or all of the report can't be read; empty: everything was.
        scratch: bytes of GPU memory that a context needs for activations; None: the engine wasn't loaded.
    """

    layers: tuple[LayerInfo, ...] = ()
    unread: str = ""
    scratch: int | None = None


def from_dump(text: str, ops: Mapping[str, str] = {}, in_float: Collection[str] = ()) -> LayerReport:
    """Read TensorRT-RTX's `Layers:` message; a line that can't be read takes no other with it.

    Args:
        ops: ONNX node name → operator, in the graph's order: tells a matrix product that runs as a 1×1 convolution from a
            convolution, and whether casts were fused into a layer.
        in_float: nodes that can't compute quantized (`parsing.float_products`).
    """
    lines = [line for line in text.splitlines() if line.startswith("Name: ")]
    layers, unread = list[LayerInfo](), []
    for line in lines:
        entry = _fields(line)
        layer = _layer(entry, ops, in_float)
        if layer is None:
            typed = any(tensor["Datatype"] for name in _TENSORS for tensor in entry.get(name, ()))  # as integers are
            if not entry or (not typed and _kind(entry["LayerType"], entry["Name"], "", (), ops) != "other"):
                unread.append(line)
            continue
        if layer.precision is Precision.FP32 and _casts_first(layer.nodes, ops):
            # Networks are strongly typed: it computes in what it casts to; caches of attention are handed on in FP32.
            floating = (_precision([tensor], quantized=False) for tensor in (*entry["Outputs"], *entry["Inputs"]))
            reduced = (kind for kind in floating if kind not in (None, Precision.FP32))
            layer = replace(layer, precision=next(reduced, None) or Precision.FP32)
        layers.append(layer)
    what = f"{len(unread)} of {len(lines)} lines of TensorRT's layer report can't be read, such as {unread[:1]!r:.200}"
    return LayerReport(tuple(layers), what if unread else "")


def _casts_first(nodes: Sequence[str], ops: Mapping[str, str]) -> bool:
    """Tell whether a layer casts what it reads before it multiplies; `ops` is in the order of the graph."""
    inside = set(nodes)
    kinds = [op for name, op in ops.items() if name in inside and (op == "Cast" or op in HEAVY_OPS)]
    return len(kinds) > 1 and kinds[0] == "Cast"


def _fields(line: str) -> dict[str, Any]:
    """A line of the dump as the inspector says it of a layer; empty: it names no layer type."""
    head = _HEAD.match(line)
    if head is None:
        return {}
    fields, key, start = dict[str, str](), "", head.end()
    for mark in _KEY.finditer(line, head.end()):
        fields.setdefault(key, line[start : mark.start()])
        key, start = mark[1], mark.end()
        if key == "Metadata":  # the last one; names of nodes may hold anything
            break
    fields.setdefault(key, line[start:])
    entry: dict[str, Any] = {"Name": head["name"], "LayerType": head["type"], "Metadata": fields.get("Metadata", "")}
    entry["TacticName"] = fields.get("TacticName", "").strip()
    for name, said in _TENSORS.items():
        found = _TENSOR.findall(fields.get(said, ""))
        entry[name] = [dict(zip(("Name", "Datatype", "Format"), tensor)) for tensor in found]
    return entry


def from_inspector(text: str, ops: Mapping[str, str] = {}, in_float: Collection[str] = ()) -> LayerReport:
    """Read the engine inspector's JSON (it holds raw control characters, hence `strict=False`), as `from_dump`; EngineError
    where it isn't JSON, or was made without DETAILED verbosity and so names no types."""
    try:
        content = json.loads(text, strict=False)
    except ValueError as error:
        raise EngineError(f"the engine inspector's report isn't JSON ({error})") from error
    entries = content.get("Layers", []) if isinstance(content, dict) else []
    if entries and all(isinstance(entry, str) for entry in entries):
        raise EngineError("the engine was built without detailed profiling verbosity: it reports names but no types")
    layers = [_layer(entry, ops, in_float) for entry in entries if isinstance(entry, dict)]
    unread = [entry for entry in entries if not isinstance(entry, dict)]
    what = f"{len(unread)} of {len(entries)} layers of the inspector's report can't be read, such as {unread[:1]!r}"
    return LayerReport(tuple(layer for layer in layers if layer is not None), what if unread else "")


def _layer(entry: Mapping[str, Any], ops: Mapping[str, str], in_float: Collection[str]) -> LayerInfo | None:
    """A layer as the inspector has it; None: it touches no floating or quantized tensor."""
    name = str(entry.get("Name", ""))
    given, made = (
        [tensor for tensor in entry.get(key) or () if isinstance(tensor, dict)] for key in ("Inputs", "Outputs")
    )
    held = entry.get("Weights") or []  # 8.6's one mapping, the dump's list of constants
    if isinstance(held, dict):
        held = [{"Datatype": held.get("Type")}]
    precision = _precision(given) or _precision(made) or _precision(held)
    if precision is None and REGION not in name:  # whose types 8.6 doesn't tell where shapes are dynamic
        return None
    nodes = _entry_nodes(entry, name, ops)
    products = [node for node in nodes if ops.get(node) in HEAVY_OPS]
    if precision is not None and precision.quantized and products and all(node in in_float for node in products):
        precision = _precision([*made, *held], quantized=False) or precision
    kind = _kind(str(entry.get("LayerType", "")), name, str(entry.get("ParameterType", "")), nodes, ops)
    tactic = str(entry.get("TacticName") or entry.get("TacticValue") or "")
    return LayerInfo(name, kind, precision, nodes, _formats(given), _formats(made), tactic)


def _formats(tensors: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    words = ([tensor.get("Format/Datatype"), tensor.get("Datatype"), tensor.get("Format")] for tensor in tensors)
    return tuple(filter(None, (str(said[0] or " ".join(map(str, filter(None, said[1:])))) for said in words)))


def _precision(tensors: Sequence[Mapping[str, Any]], quantized: bool = True) -> Precision | None:
    """The first floating type among tensors, or, where `quantized`, floating or quantized one.

    8.6 says "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"; later ones have a "Datatype" of its
    own, and a "Format" in words.
    """
    for tensor in tensors:
        text = tensor.get("Datatype") or tensor.get("Format/Datatype") or tensor.get("Format") or ""
        for word in _TYPE_WORD.findall(str(text)):
            if quantized or not _TYPES[word.lower()].quantized:
                return _TYPES[word.lower()]
    return None


def _entry_nodes(entry: Mapping[str, Any], name: str, ops: Mapping[str, str]) -> tuple[str, ...]:
    if nodes := onnx_nodes(str(entry.get("Metadata") or "")):
        return nodes
    if name.startswith("Reformatting CopyNode"):
        return ()
    # "layer1.conv.weight + QuantizeLinear_3 + Conv_4 + PWN(Sigmoid_5, Mul_6)"
    parts = []
    for piece in name.split(" + "):
        while match := re.fullmatch(r"\s*(?:PWN|fusion\w*)\((.*)\)\s*", piece):
            piece = match[1]
        parts += [part.strip() for part in piece.split(", ")]
    return tuple(dict.fromkeys(part for part in parts if part in ops))


def _kind(layer_type: str, name: str, parameters: str, nodes: tuple[str, ...], ops: Mapping[str, str]) -> str:
    text = f"{layer_type} {parameters}".lower() + " mha" * ("_mha" in name)
    # 8.6 runs a Gemm as a 1×1 convolution: where the nodes agree on one heavy operator, they decide.
    heavy = {HEAVY_OPS[op] for node in nodes if (op := ops.get(node, "")) in HEAVY_OPS}
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, text)), "")
    if not kind and (match := _FUSED.match(name)):
        words = re.findall(r"[A-Z][a-z0-9]*", match[1])
        kind = next((kind for kind, abbreviations in _FUSED_KINDS.items() if abbreviations.intersection(words)), "")
    if kind in ("", "other"):
        return "other"
    return heavy.pop() if len(heavy) == 1 else kind
