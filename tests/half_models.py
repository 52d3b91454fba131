"""Models that FP16 or BF16 spoils where no rule for operators sees it, with data that shows it; and FP16 forms of models."""

from __future__ import annotations

from typing import Any

import numpy as np
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.core.values import Precision
from trtopt.graph.passes.typed import to_typed
from trtopt.graph.view import to_ir, to_proto

Arrays = dict[str, NDArray[Any]]


def overflowing() -> tuple[ModelProto, Arrays]:
    """`up` and `relu` give up to 576,664, which `down` reads."""
    nodes = [
        node("MatMul", "x a", "h", "up"), node("Relu", "h", "r", "relu"), node("MatMul", "r b", "d", "down"),
        node("Relu", "d", "e", "last"), node("MatMul", "e c", "y", "head"),
    ]  # fmt: skip
    weights = {"a": values(32, 64, scale=300), "b": values(64, 16, seed=1, scale=1e-4), "c": values(16, 16, seed=1)}
    return _net(nodes, weights), {"x": values(40, 32, seed=5, scale=100)}


def underflowing() -> tuple[ModelProto, Arrays]:
    """`shrink`, which folding puts into `up`, and `relu` give 5.8e-07 at most, for FP16 a digit; `grow` multiplies it back."""
    nodes = [
        node("MatMul", "x a", "h", "up"), node("Mul", "h tiny", "t", "shrink"), node("Relu", "t", "r", "relu"),
        node("Mul", "r big", "q", "grow"), node("MatMul", "q b", "d", "down"), node("Relu", "d", "y", "last"),
    ]  # fmt: skip
    scalars = {"tiny": np.array(1e-7, np.float32), "big": np.array(6e4, np.float32)}
    weights = {"a": values(32, 64, scale=0.3), "b": values(64, 16, seed=1), **scalars}
    return _net(nodes, weights), {"x": values(40, 32, seed=5)}


def cancelling() -> tuple[ModelProto, Arrays]:
    """`shift` adds 300 and `back` subtracts it: of eight bits little is left."""
    nodes = [
        node("Add", "x big", "s", "shift"), node("Relu", "s", "r", "relu"), node("Sub", "r big", "t", "back"),
        node("MatMul", "t a", "h", "product"), node("Relu", "h", "y", "last"),
    ]  # fmt: skip
    weights = {"a": values(32, 16, scale=0.3), "big": np.array(300, np.float32)}
    return _net(nodes, weights), {"x": values(40, 32, seed=5)}


def half(proto: ModelProto, **options: Any) -> ModelProto:
    """As its exporter would have typed it: FP16 from input to output."""
    return to_proto(to_typed(to_ir(proto), Precision.FP16, io_fp32=False, **options).model)


def _net(nodes: list[Any], weights: dict[str, NDArray[Any]]) -> ModelProto:
    return model(nodes, weights=weights, inputs={"x": ("n", 32)}, outputs={"y": ("n", 16)})
