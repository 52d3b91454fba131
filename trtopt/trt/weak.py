"""Weakly typed builds (8.6, 10): precision by builder flags over an FP32-typed graph; TensorRT's own calibrator."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from trtopt.core.errors import CalibrationError, DataError
from trtopt.core.values import BuildSpec, Precision, TensorInfo
from trtopt.core.words import first_of
from trtopt.cuda.device import Device, DeviceBuffer, HostBuffer, Stream
from trtopt.data.convert import converted
from trtopt.data.rebatch import Arrays, rebatched
from trtopt.trt.layers import onnx_nodes

_DATA_TYPES = {Precision.FP32: "FLOAT", Precision.FP16: "HALF", Precision.BF16: "BF16", Precision.INT8: "INT8"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a build that only a weakly typed one heeds.

    Attributes:
        quantized: the graph holds Q/DQ.
        layer_precision: ONNX node name → precision (a typed graph says it itself).
        preferred: likewise, where it can be built; what the layer gives is left to TensorRT.
        calibration: host batches (input name → array, first axis = samples) for `spec.calibrator == "native"`.
        calibration_batch: samples that TensorRT's calibrator gets at a time.
        calibration_cache: a cache that TensorRT's calibrator wrote before; then no data is read.
    """

    quantized: bool
    layer_precision: Mapping[str, Precision] = field(default_factory=dict)
    preferred: Mapping[str, Precision] = field(default_factory=dict)
    calibration: Iterable[Arrays] | None = None
    calibration_batch: int = 8
    calibration_cache: bytes | None = None


def set_precisions(trt: Any, network: Any, config: Any, spec: BuildSpec, options: Options, warnings: list[str]) -> None:
    """Allow the precisions that `spec` names, and pin inputs, outputs and single layers to theirs."""
    by_graph = {Precision.INT8} if options.quantized and not spec.precision.quantized else set()
    for precision in {spec.precision, spec.base, *by_graph} - {Precision.FP32}:
        config.set_flag(getattr(trt.BuilderFlag, precision.name))
    if not spec.io_fp32 and spec.base is not Precision.FP32:
        tensors = [network.get_input(index) for index in range(network.num_inputs)]
        tensors += [network.get_output(index) for index in range(network.num_outputs)]
        for tensor in tensors:
            if tensor.dtype == trt.DataType.FLOAT:  # as all floating ones are
                tensor.dtype = getattr(trt.DataType, _DATA_TYPES[spec.base])
    if options.layer_precision or options.preferred:
        lost_nodes = _set_layer_precision(trt, network, options)
        # With OBEY a layer that can't be pinned fails the build; else TensorRT may choose otherwise.
        obey = not (spec.allow_precision_fallback or options.preferred)
        config.set_flag(getattr(trt.BuilderFlag, f"{'OBEY' if obey else 'PREFER'}_PRECISION_CONSTRAINTS"))
        if lost_nodes:
            warnings.append(f"no layer came from {first_of(lost_nodes)}: the precision asked for there has no effect")


def _set_layer_precision(trt: Any, network: Any, options: Options) -> list[str]:
    """Pin the layers that come from the named ONNX nodes; the names, of those not merely preferred, that no layer has."""
    precisions = {**options.preferred, **options.layer_precision}
    float_types = {trt.DataType.FLOAT, trt.DataType.HALF, getattr(trt.DataType, "BF16", trt.DataType.HALF)}
    missing = set(options.layer_precision)
    for layer in map(network.get_layer, range(network.num_layers)):
        name = next((node for node in (layer.name, *onnx_nodes(layer.metadata or "")) if node in precisions), None)
        if name is None:
            continue
        missing.discard(name)
        outputs = [layer.get_output(number) for number in range(layer.num_outputs)]
        # Constants, shape arithmetic and integer layers have no precision to choose: setting one is a build error.
        if layer.type in (trt.LayerType.CONSTANT, trt.LayerType.SHAPE) or not any(
            tensor is not None and tensor.dtype in float_types and not tensor.is_shape_tensor for tensor in outputs
        ):
            continue
        data_type = getattr(trt.DataType, _DATA_TYPES[precisions[name]])
        layer.precision = data_type
        # An INT8 layer may write floats, and a preferred one what its readers want: their output types stay free.
        if name in options.layer_precision and precisions[name] is not Precision.INT8:
            for number, tensor in enumerate(outputs):
                if tensor.dtype in float_types:
                    layer.set_output_type(number, data_type)
    return sorted(missing)


class NativeCalibration:
    """TensorRT's IInt8EntropyCalibrator2 fed from host batches; `cache` is what it wrote, after the build.

    Errors while reading batches are kept and raised by `finish`: an exception must not cross TensorRT's C++ frames.
    """

    def __init__(self, trt: Any, inputs: Sequence[TensorInfo], options: Options, device: int) -> None:
        self.cache = self._initial_cache = _headed(options.calibration_cache, trt.__version__)
        self.error: BaseException | None = None
        self.samples, self.left_over = 0, 0
        self._upload = functools.cache(lambda: device_upload(device))
        self._inputs, self._batch = tuple(inputs), options.calibration_batch
        self._source: Iterator[dict[str, NDArray[Any]]] = iter(())
        self._shapes: dict[str, tuple[int, ...]] = {}
        if options.calibration_cache is None and options.calibration is not None:
            source = rebatched(options.calibration, self._batch)
            first = next(source, {})
            if (count := len(next(iter(first.values()), ()))) < self._batch:
                why = f"native calibration got {count} samples, fewer than one batch of {self._batch}"
                raise DataError(f"{why}: give more, or a smaller `batch=`")
            self._shapes = {name: array.shape for name, array in first.items()}
            self._source = itertools.chain([first], source)
        self._calibrator = self._make(trt)

    def attach(self, builder: Any, config: Any) -> None:
        """Give `config` the calibrator, and the data's own shape to calibrate at, which by default is the first profile's opt
        shape, whatever it is given."""
        config.int8_calibrator = self._calibrator
        dynamic = [info.name for info in self._inputs if info.open_axes]
        if dynamic and self._shapes:
            profile = builder.create_optimization_profile()
            for name in dynamic:
                profile.set_shape(name, self._shapes[name], self._shapes[name], self._shapes[name])
            config.set_calibration_profile(profile)

    def _make(self, trt: Any) -> Any:
        outer = self

        class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
            def get_batch_size(self) -> int:
                return outer._batch

            def get_batch(self, names: list[str], *_: Any) -> list[int] | None:
                try:
                    return outer._next(names)
                except BaseException as error:
                    outer.error = error
                    return None

            def read_calibration_cache(self, *_: Any) -> bytes | None:
                return outer._initial_cache

            def write_calibration_cache(self, cache: Any, *_: Any) -> None:
                outer.cache = bytes(cache)

        return Calibrator()

    def _next(self, names: list[str]) -> list[int] | None:
        arrays = next(self._source, None)
        if arrays is None:
            return None
        if any(arrays[name].shape[1:] != shape[1:] for name, shape in self._shapes.items()):
            raise DataError("native calibration takes samples of one size only, and these have several: give one size")
        count = len(next(iter(arrays.values())))
        if count < self._batch:  # TensorRT calibrates with one batch size only
            self.left_over = count
            return None
        upload = self._upload()
        types = {info.name: info.dtype for info in self._inputs}
        pointers = [upload(name, converted(arrays[name], types[name], f"the input {name!r}")) for name in names]
        self.samples += count
        return pointers

    def finish(self, built: bool, warnings: list[str]) -> None:
        """Raise what went wrong while TensorRT was calibrating; warn of samples that were left out."""
        if self.error is not None:
            raise self.error
        if built and self._initial_cache is None and self.samples == 0:
            raise CalibrationError("TensorRT asked for no calibration data: is there a quantizable layer in the model?")
        if self.left_over:
            warnings.append(
                f"native calibration left out the last {self.left_over} samples: they don't fill a batch of {self._batch}"
            )


def _headed(cache: bytes | None, version: str) -> bytes | None:
    """A cache with the header of this TensorRT, which passes over one of another version and then lacks all scales."""
    if cache is None:
        return None
    major, minor, patch = map(int, version.split(".")[:3])
    number = major * 10000 + minor * 100 + patch if major >= 10 else major * 1000 + minor * 100 + patch
    return re.sub(rb"^(\xef\xbb\xbf)?TRT-\d+-", f"TRT-{number}-".encode(), cache)


def device_upload(ordinal: int) -> Callable[[str, NDArray[Any]], int]:
    """Return what copies one input's batch to a GPU and gives the address; the buffer stays until that input's next batch."""
    device = Device(ordinal)
    stream = Stream(device)
    buffers: dict[str, tuple[Any, Any]] = {}

    def upload(name: str, array: NDArray[Any]) -> int:
        if name not in buffers:  # batches are of one size
            buffers[name] = (DeviceBuffer(device, array.nbytes), HostBuffer(device, array.nbytes))
        target, host = buffers[name]
        host.array(array.dtype, array.shape)[...] = array
        stream.to_device(target, host, array.nbytes)
        stream.synchronize()
        return int(target.handle)

    return upload
