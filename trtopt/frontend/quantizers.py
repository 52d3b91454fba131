"""Modules that other toolkits have quantized: NVIDIA ModelOpt's and torch.ao's fake quantizers as Q/DQ, the rest named.

Both round to INT8 and back in floating point, by rules of their own that torch's exporter can't follow: ModelOpt's looks at its
scales' values, torch.ao's goes on observing. With fixed scales they are what a QuantizeLinear and a DequantizeLinear give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from trtopt.core.errors import ModelError

_VERSION = 13  # of ONNX's operators: with scales along an axis
_FLOAT = "export the float model, as it is before {}, and let trtopt build --int8 quantize it"


@contextlib.contextmanager
def as_qdq(torch: Any, module: Any, text: str) -> Iterator[None]:
    """Fake quantizers in Q/DQ's form while a module is traced.

    Args:
        text: what messages call the module.

    Raises:
        ModelError: it holds one that no Q/DQ pair of TensorRT's is equal to.
    """
    patched = []
    try:
        for name, item in module.named_modules():
            forward = _forward(torch, item, f"{text}: {name.split('.', 1)[-1]}")
            if forward is not None:
                patched.append(item)
                item.forward = forward
        yield
    finally:
        for item in patched:
            del item.forward


def _forward(torch: Any, item: Any, what: str) -> Callable[[Any], Any] | None:
    package = type(item).__module__
    if type(item).__name__ == "TensorQuantizer" and hasattr(item, "num_bits"):  # of whichever release of ModelOpt
        return _of_modelopt(torch, item, what)
    if package.startswith("torch.ao.") and hasattr(item, "fake_quant_enabled"):
        return _of_torch(torch, item, what)
    if package.startswith("torchao.quantization.qat") and "FakeQuantizer" in type(item).__name__:
        raise ModelError(
            f"{what} is torchao's {type(item).__name__}, whose scales are computed anew of what it reads, as no Q/DQ "
            f"pair's are: {_FLOAT.format('quantize_')}"
        )
    return None


def _of_modelopt(torch: Any, item: Any, what: str) -> Callable[[Any], Any] | None:
    """Attributes as ModelOpt 0.47 has them."""
    if not getattr(item, "is_enabled", True):
        return lambda values: values
    amax: Any = getattr(item, "amax", None)
    axis, bits = getattr(item, "axis", None), item.num_bits
    problem = ""
    if bits != 8 or getattr(item, "block_sizes", None):
        problem = f"quantizes to {'blocks of ' * bool(getattr(item, 'block_sizes', None))}num_bits={bits}"
    elif amax is None:
        problem = "has no amax: it was never calibrated, or computes its scale anew each time"
    elif getattr(item, "pre_quant_scale", None) is not None or getattr(item, "unsigned", False):
        problem = "scales what it reads before, or gives unsigned numbers"
    elif axis is not None and not isinstance(axis, int) and len(axis) != 1:
        problem = f"has scales along the axes {axis}"
    elif not bool((amax > 0).all()):
        problem = f"has an amax of {float(amax.min()):g}, which is no scale"
    if problem:
        raise ModelError(
            f"{what} is a TensorQuantizer of NVIDIA ModelOpt that {problem}; export writes Q/DQ of signed INT8 with fixed "
            f"scales, a tensor's or an axis': {_FLOAT.format('mtq.quantize')}, or quantize it with mtq.INT8_DEFAULT_CFG"
        )
    assert amax is not None
    single = amax.numel() == 1
    place = None if single or axis is None else axis if isinstance(axis, int) else axis[0]
    return _rounding(torch, amax / 127, None if single else place)


def _of_torch(torch: Any, item: Any, what: str) -> Callable[[Any], Any] | None:
    if not int(item.fake_quant_enabled[0]):
        return lambda values: values
    observer, zero = item.activation_post_process, item.zero_point
    if bool(zero.any()) or int(observer.quant_min) not in (-128, -127) or int(observer.quant_max) != 127:
        raise ModelError(
            f"{what} is torch.ao's {type(item).__name__} of {int(observer.quant_min)} to {int(observer.quant_max)} with the "
            f"zero point {int(zero.flatten()[0])}; TensorRT takes signed INT8 around zero alone: prepare activations, too, "
            "with qscheme=torch.per_tensor_symmetric, dtype=torch.qint8, quant_min=-128, quant_max=127, or "
            f"{_FLOAT.format('prepare')}"
        )
    return _rounding(torch, item.scale, int(item.ch_axis) if item.scale.numel() > 1 else None)


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
