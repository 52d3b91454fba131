"""Calibration on a GPU: the graph runs in PyTorch, and values are counted where they are; only counts come back.

onnx2pytorch makes the PyTorch module (of eight models it takes all; onnx2torch, not released since 2024, three). It is trusted
as far as it is checked: the first sample also runs in ONNX Runtime, and every observed tensor must agree. Convolutions and
matrix products are FP32, not TF32, with cuDNN's deterministic kernels; runs always hold the same number of samples, because
kernels are chosen by it. Values may still differ from a CPU's in their last bits, and tables with them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto

from trtopt.calibration.counting import BINS, LOWEST_EXPONENT
from trtopt.calibration.histogram import Histogram
from trtopt.calibration.observe import Engine, Feed, open_session
from trtopt.core.errors import CalibrationError, DeviceError, require
from trtopt.core.library_output import Shared, quiet
from trtopt.graph.proto import refill, whole_copy

TOGETHER = 32  # samples in one run
# Of a tensor's largest magnitude: FP32 kernels differ by 1e-6 to 1e-4, a wrong conversion by 1e-2 or more.
AGREEMENT = 1e-3
# Partial histograms: additions to the same bin, such as that of a ReLU's zeros, wait for each other.
_LANES = 256


class TorchEngine(Engine):
    """PyTorch on a device.

    Args:
        device: as PyTorch names it: "cuda", "cuda:1", or "cpu".

    Raises:
        MissingDependency: PyTorch or onnx2pytorch isn't installed.
        DeviceError: PyTorch can't use the device.
        CalibrationError: onnx2pytorch can't convert the model; what it lacks is quoted.
    """

    name = "PyTorch"
    together = TOGETHER
    workers: int | None = 1  # the device is kept busy by one; a second would only wait for it

    def __init__(self, proto: ModelProto, outputs: Sequence[str], device: str = "cuda") -> None:
        torch, converter = _libraries()
        self._torch, self.device = torch, _usable(torch, device)
        self.outputs = list(outputs)
        self._proto, self._checked = proto, False
        weights = {tensor.name for tensor in proto.graph.initializer}
        self._inputs = [value.name for value in proto.graph.input if value.name not in weights]
        if not outputs:
            return
        model = whole_copy(proto)
        refill(model.graph.output, [ValueInfoProto(name=name) for name in outputs])
        try:
            with quiet():
                module = converter.ConvertModel(model, experimental=True)
        except Exception as error:  # whatever a converter stumbles over
            raise CalibrationError(
                f"onnx2pytorch can't convert the model {proto.graph.name!r} ({type(error).__name__}: {error}): "
                "calibrate it with `device='cpu'`"
            ) from error
        self._module = module.eval().to(self.device)

    def run(self, feed: Feed) -> list[Any]:
        """The outputs, on the device."""
        if not self._checked:
            self._check(feed)
            self._checked = True
        return self._run(feed)

    def _run(self, feed: Feed) -> list[Any]:
        torch = self._torch
        with torch.inference_mode(), _exact, quiet():
            arrays = [torch.from_numpy(np.array(feed[name])).to(self.device) for name in self._inputs]
            results = self._module(*arrays)
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def add(self, histogram: Histogram, values: Any) -> None:
        """Count a tensor, or an array, into a histogram. Raises FloatingPointError if it isn't finite."""
        torch = self._torch
        with torch.inference_mode():
            tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values)).to(self.device)
            histogram.merge(self._counted(tensor.reshape(-1).to(torch.float32)))

    def _counted(self, flat: Any) -> Histogram:
        torch, size = self._torch, flat.numel()
        if not size:
            return Histogram()
        low, high = (float(value) + 0.0 for value in torch.stack(torch.aminmax(flat)).tolist())  # NaN if any value is
        if not (math.isfinite(low) and math.isfinite(high)):
            nans, infinities = int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())
            raise FloatingPointError(f"{nans} NaN and {infinities} infinite of {size} values")
        exponent = max(math.frexp(max(high, -low))[1], LOWEST_EXPONENT)
        bins = (flat.abs() * (BINS / math.ldexp(1.0, exponent))).to(torch.int32)  # exact: the scale is a power of two
        whole = size // _LANES * _LANES
        lanes = torch.arange(_LANES, dtype=torch.int32, device=self.device) * BINS
        counts = torch.bincount((bins[:whole].view(-1, _LANES) + lanes).view(-1), minlength=_LANES * BINS)
        counts = counts.view(_LANES, BINS).sum(0) + torch.bincount(bins[whole:], minlength=BINS)
        return Histogram(counts.cpu().numpy(), exponent if low or high else None, low, high, size)

    def _check(self, feed: Feed) -> None:
        """Run one sample (a fixed batch: all) in ONNX Runtime too."""
        fixed = any(
            value.type.tensor_type.shape.dim[0].dim_value for value in self._proto.graph.input if value.name in feed
        )
        few = feed if fixed else {name: array[:1] for name, array in feed.items()}
        expected = open_session(self._proto, self.outputs).run(self.outputs, few)
        for name, right, tensor in zip(self.outputs, expected, self._run(few)):
            actual = tensor.float().cpu().numpy()
            scale = float(np.abs(right).max(initial=0.0))
            if actual.shape != right.shape:
                far = f"has the shape {actual.shape} in place of {right.shape}"
            elif not (gap := float(np.abs(actual - right).max(initial=0.0))) <= AGREEMENT * scale:
                far = f"differs by {gap:.3g} where its largest magnitude is {scale:.3g}"
            else:
                continue
            raise CalibrationError(
                f"the tensor {name!r} {far} between PyTorch ({self.device}, through onnx2pytorch) and ONNX Runtime, so the "
                "conversion can't be trusted: calibrate with `device='cpu'`"
            )


def engine_identity(device: str) -> dict[str, str]:
    """What values from this engine depend on besides the model and the data, for cache keys."""
    torch, converter = _libraries()
    usable = _usable(torch, device)
    name = torch.cuda.get_device_name(usable) if usable.type == "cuda" else "cpu"
    return {
        "torch": str(torch.__version__),
        "onnx2pytorch": str(getattr(converter, "__version__", "")),
        "device": str(name),
        "together": str(TOGETHER),
    }


def gpu_names() -> tuple[str, ...]:
    """Of the GPUs that PyTorch sees, by number."""
    torch, _ = _libraries()
    return tuple(str(torch.cuda.get_device_name(number)) for number in range(torch.cuda.device_count()))


def _libraries() -> tuple[Any, Any]:
    torch, converter = (
        require(name, "torch-calibration", "calibrating in PyTorch") for name in ("torch", "onnx2pytorch")
    )
    return torch, converter


def _usable(torch: Any, device: str) -> Any:
    try:
        target = torch.device(device)
        torch.zeros(1, device=target)
    except Exception as error:  # RuntimeError, AssertionError, and CUDA's own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DeviceError(f"PyTorch can't use the device {device!r}: {reason}") from error
    return target


@contextlib.contextmanager
def _exact_kernels() -> Iterator[None]:
    """FP32 as FP32, and the same kernels each time; the caller's settings come back."""
    torch, _ = _libraries()
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = before


_exact = Shared(_exact_kernels)
