"""ReLU6 centred, so that INT8's codes below zero are used: Clip(x, 0, 6) = Clip(x - 3, -3, 3) + 3.

    python scripts/centre_relu6.py MODEL.onnx CENTRED.onnx

The -3 goes into the bias of the convolution in front, the +3 into the biases of those behind: only where these don't pad, since
what they pad with would be 3 instead of 0. The results are the same but for rounding; half as large a scale fits the tensor. It
isn't in trtopt, because nobody knows whether TensorRT 8.6 fuses a Clip(-3, 3) with the convolution in front, as it does ReLU6.
To find out, on a GPU, with model.onnx and calib.npz of scripts/gpu_inputs:

    python scripts/centre_relu6.py model.onnx centred.onnx
    for name in model centred; do
        trtopt calibrate $name.onnx --data calib.npz --repair -o $name.calib.json
        trtopt build $name.onnx --int8 --calib $name.calib.json -o $name.engine
        trtopt engine $name.engine --json | grep -ci clip
        trtopt bench $name.engine
    done

Where the Clips are kernels of their own, centred.engine has more layers, and is slower.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir

from trtopt.core.errors import TrtoptError
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.view import Editor, attribute, constant, operand, read_once, to_ir, to_proto

LOW, HIGH = 0.0, 6.0
BIAS = 2


def centre(model: ir.Model) -> list[str]:
    """Centre what can be; the names of these Clips."""
    editor, middle, changed = Editor(model), (LOW + HIGH) / 2, []
    for node in list(model.graph):
        if node.op_type != "Clip" or [_number(node, slot) for slot in (1, 2)] != [LOW, HIGH]:
            continue
        source, value = node.inputs[0], node.outputs[0]
        front = source.producer() if source is not None and read_once(source) else None
        readers = [use.node for use in value.uses() if use.idx == 0 and _sums(use.node)]
        behind = readers and len(readers) == len(value.uses()) and not value.is_graph_output()
        if front is None or front.op_type != "Conv" or not _has_constants(front) or not behind:
            continue
        for slot, bound in ((1, LOW - middle), (2, HIGH - middle)):
            node.replace_input_with(slot, editor.constant(f"{node.name}_bound", bound, np.float32))
        weight = constant(front.inputs[1])
        assert weight is not None
        _add(editor, front, np.full(len(weight), -middle))
        for reader in readers:
            weight = constant(reader.inputs[1])
            assert weight is not None
            _add(editor, reader, middle * weight.astype(np.float64).reshape(len(weight), -1).sum(1))
        changed.append(str(node.name))
    return changed


def _number(node: ir.Node, slot: int) -> float | None:
    held = constant(operand(node, slot))
    return None if held is None or held.size != 1 else float(held.reshape(-1)[0])


def _has_constants(node: ir.Node) -> bool:
    return constant(node.inputs[1]) is not None and (
        operand(node, BIAS) is None or constant(node.inputs[BIAS]) is not None
    )


def _sums(node: ir.Node) -> bool:
    """Whether what is added to the node's whole input comes out as the same number everywhere."""
    padded = any(attribute(node, "pads", [0])) or attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    return node.op_type == "Conv" and not padded and _has_constants(node)


def _add(editor: Editor, node: ir.Node, offset: np.ndarray) -> None:
    held = constant(operand(node, BIAS))
    node.resize_inputs(BIAS + 1)
    node.replace_input_with(
        BIAS, editor.constant(f"{node.name}_bias_centred", offset if held is None else held + offset, np.float32)
    )


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python scripts/centre_relu6.py MODEL.onnx CENTRED.onnx")
    try:
        model = to_ir(fold(load_model(sys.argv[1]).proto)[0])
        changed = centre(model)
        if changed:
            save_model(to_proto(model), sys.argv[2])
    except TrtoptError as error:
        raise SystemExit(f"error: {error}") from None
    if not changed:
        raise SystemExit("no ReLU6 stands between a convolution and others that don't pad: nothing was written")
    print(f"{len(changed)} ReLU6 centred: {sys.argv[2]}")


if __name__ == "__main__":
    main()
