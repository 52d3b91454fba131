"""Modules that other toolkits have quantized. ModelOpt's are stand-ins with its names and attributes; 0.47 was tried."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch  # noqa: TID251
from torch import nn  # noqa: TID251

import trtopt
from trtopt.core.errors import ModelError
from trtopt.graph.passes.quantize import is_quantized


class TensorQuantizer(nn.Module):
    """Rounds as ModelOpt's does, looking at its amax's value, which torch's exporter can't follow."""

    def __init__(self, amax: Any = None, axis: int | None = None, num_bits: Any = 8, is_enabled: bool = True) -> None:
        super().__init__()
        self.axis, self.num_bits, self.is_enabled = axis, num_bits, is_enabled
        self.amax: Any
        self.register_buffer("amax", None if amax is None else torch.as_tensor(amax, dtype=torch.float32))

    def forward(self, values: Any) -> Any:
        if not self.is_enabled or self.amax is None:
            return values
        if self.amax.min() < 0:
            raise ValueError("negative")
        return torch.clamp(torch.round(values * (127 / self.amax)), -128, 127) / (127 / self.amax)


class QuantConv2d(nn.Conv2d):
    def __init__(self, **changes: Any) -> None:
        super().__init__(3, 8, 3)
        torch.nn.init.normal_(self.weight, std=0.2, generator=torch.Generator().manual_seed(0))
        self.input_quantizer = TensorQuantizer(**{"amax": 3.0, **changes})
        self.weight_quantizer = TensorQuantizer(self.weight.detach().abs().amax((1, 2, 3), keepdim=True), axis=0)
        self.output_quantizer = TensorQuantizer(is_enabled=False)

    def forward(self, values: Any) -> Any:
        weight = self.weight_quantizer(self.weight)
        return self.output_quantizer(self._conv_forward(self.input_quantizer(values), weight, self.bias))


def exported(module: nn.Module, folder: Path) -> onnx.ModelProto:
    wanted = ["x:batchx3x16x16"]
    trtopt.export(module.eval(), folder / "m.onnx", inputs=wanted, tolerance=0.05)  # a tie moves a code
    return onnx.load(folder / "m.onnx")


def test_modelopts_quantizers_become_pairs(tmp_path: Path, rtx: None) -> None:
    module = nn.Sequential(QuantConv2d(), nn.ReLU())
    proto = exported(module, tmp_path)
    assert Counter(node.op_type for node in proto.graph.node) == {
        "QuantizeLinear": 2, "DequantizeLinear": 2, "Conv": 1, "Relu": 1,
    }  # fmt: skip
    assert is_quantized(proto)
    content = {item.name: onnx.numpy_helper.to_array(item) for item in proto.graph.initializer}
    scales = [content[node.input[1]] for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert sorted(scale.size for scale in scales) == [1, 8]
    assert any(np.allclose(scale, 3 / 127) for scale in scales)
    result = trtopt.build(tmp_path / "m.onnx", tmp_path / "m.engine", int8=True, target="sm89")
    assert "1 of 1 convolutions INT8" in result.precision_summary
    assert "forward" not in vars(module[0].input_quantizer)  # the module is the user's again


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bits": (4, 3)}, "with num_bits=(4, 3), an amax from 3 on"),
        ({"amax": None}, "no amax, as it was never calibrated"),
        ({"amax": 0.0}, "an amax from 0 on"),
    ],
)
def test_what_no_pair_says_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        exported(nn.Sequential(QuantConv2d(**changes)), tmp_path)
    for words in ("0.input_quantizer is a TensorQuantizer of NVIDIA ModelOpt", said, "as it is before mtq.quantize"):
        assert words in str(caught.value)


class Functions(nn.Module):
    """As pytorch-quantization's quantizers export, and torch.ao's."""

    def forward(self, values: Any) -> Any:
        return torch.fake_quantize_per_tensor_affine(values, 0.1, 0, -128, 127)


def test_torchs_functions_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rounds as training for INT8 does.*export the float model"):
        exported(Functions(), tmp_path)
