"""Which outputs follow a choice among computed values, so that of two nearly equal ones a rounding may take the other."""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from trtopt.graph.proto import infer_shapes, node_label, node_reads, tensor_info

_CHOSEN = {"ArgMax": 0, "ArgMin": 0, "TopK": 1, "NonMaxSuppression": 0}  # operator → its output that holds positions
_VALUELESS = ("Shape", "Size")


def choices(proto: ModelProto) -> dict[str, str]:
    """Output → the last node before it ("ArgMax NAME") that chooses among floating values; outputs without one are left out.

    The largest values themselves, as TopK gives them, hardly change when two of them change places: they follow none.
    """
    if _CHOSEN.keys().isdisjoint(node.op_type for node in proto.graph.node):
        return {}
    inferred = infer_shapes(proto).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    floating = {value.name for value in values if tensor_info(value).floating}
    followed: dict[str, NodeProto] = {}
    for node in proto.graph.node:  # in topological order
        if node.op_type in _VALUELESS:
            continue
        before = next((followed[name] for name in node_reads(node) if name in followed), None)
        outputs = dict.fromkeys(node.output, before)
        if node.op_type in _CHOSEN and node.input[0] in floating:
            outputs[node.output[_CHOSEN[node.op_type]]] = node
        followed.update({name: source for name, source in outputs.items() if source is not None})
    return {value.name: node_label(followed[value.name]) for value in proto.graph.output if value.name in followed}
