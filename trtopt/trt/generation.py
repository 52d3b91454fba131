"""The work that every TensorRT generation shares, written once: parse, configure, build, read the layers back, load.

It is TensorRT 10 and 11 as it stands; a family (tensorrt8.py, rtx.py) overrides the few hooks that differ.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.core.errors import (
    BackendError,
    BuildFailed,
    DeviceError,
    EngineError,
    InvalidModel,
    ModelError,
    OutputError,
    UnsupportedOperator,
    UnsupportedRequest,
    UsageError,
)
from trtopt.core.files import existing_file, whole, write_bytes
from trtopt.core.locks import alone
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import BuildSpec, Issue, LayerInfo, Precision, TensorInfo
from trtopt.core.version import to_install
from trtopt.core.words import first_of
from trtopt.cuda.device import DeviceInfo, current_gpu
from trtopt.data.rebatch import Arrays
from trtopt.trt import lean_library, parsing, watch, weak
from trtopt.trt.capabilities import Capabilities, read, refusals
from trtopt.trt.layers import LayerReport, from_inspector
from trtopt.trt.loader import Loader
from trtopt.trt.messages import Messages, translate
from trtopt.trt.profiles import may_be_values, validate_profiles, value_count

if TYPE_CHECKING:  # running an engine needs no onnx
    from onnx import ModelProto


@dataclass(frozen=True)
class BuiltPlan:
    """The result of a build.

    Attributes:
        plan: the serialized engine, bytes-like.
        layers: the engine's layers as it reports them; `layers_unknown` says why some or all aren't known.
        warnings: TensorRT's warnings, repeated ones counted.
        seconds: wall-clock time of parsing and building.
        targets: compute capabilities that it was built for (TensorRT-RTX); empty: the GPU of this machine.
        native_cache: the calibration cache that TensorRT's own calibrator wrote.
        scratch: bytes of GPU memory that a context needs for activations; None: not known.
    """

    plan: bytes | memoryview
    layers: tuple[LayerInfo, ...]
    warnings: tuple[str, ...]
    seconds: float
    targets: tuple[int, ...] = ()
    layers_unknown: str = ""
    native_cache: bytes | None = None
    scratch: int | None = None


class _Objects:
    """A build's TensorRT objects, let go in the order they need: the parser doesn't keep its network alive."""

    builder: Any = None
    config: Any = None
    network: Any = None
    parser: Any = None

    def close(self) -> None:
        self.parser = self.network = self.config = self.builder = None


class Generation(Loader):
    """One installed TensorRT that builds.

    Attributes:
        capabilities: what it honours.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.capabilities: Capabilities = self._capabilities(read(module))
        # One build at a time in a process: two would time each other's kernels, and mix their messages.
        self._lock = threading.Lock()
        # Replaced where calibration batches go elsewhere (tests).
        self.calibration_upload: Callable[[int], weak.Upload] = weak.device_upload

    # Hooks

    def _capabilities(self, capabilities: Capabilities) -> Capabilities:
        return capabilities

    def _network_flags(self, typed: bool) -> tuple[str, ...]:
        """Names of the NetworkDefinitionCreationFlag members to create a network with."""
        # Where there are no builder flags for precisions, every network is strongly typed, and this flag deprecated.
        return ("STRONGLY_TYPED",) if typed and self.capabilities.precision_flags else ()

    def _refusals(self, spec: BuildSpec) -> list[str]:
        """Refusals that only this family has."""
        return []

    def _cautions(self, spec: BuildSpec) -> list[str]:
        """Say what the user should know before the build."""
        return []

    def _configure(self, config: Any, spec: BuildSpec) -> None:
        """Settings that only this family has."""

    def targets(self, spec: BuildSpec) -> tuple[int, ...]:
        """Compute capabilities a build with `spec` is for; empty: the GPU of this machine."""
        return ()

    def _found_layers(
        self, plan: memoryview, messages: Messages, ops: Mapping[str, str], in_float: Collection[str]
    ) -> LayerReport:
        try:
            engine = self.load(plan, "the new plan", host_code=True)
            return replace(from_inspector(engine.inspect(), ops, in_float), scratch=engine.scratch_bytes)
        except (EngineError, BackendError, DeviceError) as error:
            return LayerReport(unread=str(error))

    # What callers ask

    def device(self, spec: BuildSpec) -> DeviceInfo | None:
        """The GPU that a build with `spec` is on; None: there is none here.

        Raises:
            DeviceError: there are GPUs, and not that one.
        """
        gpus = self.gpu().devices
        if gpus and spec.device >= len(gpus):
            raise DeviceError(f"`device={spec.device}`: this machine's GPUs are 0 to {len(gpus) - 1}")
        return gpus[spec.device] if gpus else None

    def typed(self, spec: BuildSpec) -> bool:
        """Tell whether a build takes its precisions from the ONNX graph's types; else it wants an FP32-typed graph."""
        return self.capabilities.typed_graph and spec.calibrator != "native"

    def describe(self) -> dict[str, Any]:
        """Describe it as plain JSON values, for `trtopt version` and manifests."""
        gpu = self.gpu()
        can_build = bool(gpu) or self.capabilities.builds_without_gpu
        why_not = "" if can_build else gpu.reason
        capabilities = self.capabilities.describe()
        return {**super().describe(), "can_build": can_build, "why_not": why_not, "capabilities": capabilities}

    def refuse(self, spec: BuildSpec, reporter: Reporter = SILENT) -> None:
        """Say, before any work, what of `spec` can't be honoured here.

        Raises:
            UnsupportedRequest: lists every such option: what was asked, what is there, what to type instead.
            DeviceError: there is no such GPU.
        """
        gpu, device = self.gpu(), self.device(spec)
        capability = device.compute_capability if device else None
        problems = [*refusals(spec, self.capabilities, str(self), capability), *self._refusals(spec)]
        if spec.version_compatible and self.capabilities.version_compatible and not spec.exclude_lean_runtime:
            folder = Path(getattr(self.module, "__file__", None) or "").parent
            # TensorRT asks for it at the end of the build.
            problems += filter(None, [lean_library.problem(self.version, folder)])
        if not gpu and not self.capabilities.builds_without_gpu:
            problems.append(
                f"{self} builds only on a machine with a GPU ({gpu.reason}); "
                f"build there, or use `backend='rtx'` ({to_install('rtx')}), which needs none"
            )
        if problems:
            raise UnsupportedRequest(f"{self} can't do what was asked", problems)
        for caution in self._cautions(spec):
            reporter.warn(caution)

    def unsupported(self, model: Path) -> tuple[Issue, ...]:
        """All in `model` that can't be built, by rules and asked of the installed parser; empty: it takes it all.

        Raises:
            DeviceError: this generation's parser needs a GPU and there is none.
            UsageError: there is no such file.
        """
        light = parsing.light_model(existing_file(model, "the model"))
        ours = self.limits(light)
        with self._parser() as (objects, _):
            theirs = parsing.ask_support(objects.parser, model, parsing.graph_nodes(light))
        if theirs and all(issue.reason == parsing.UNEXPLAINED for issue in theirs):
            # 10.6 counts NonMaxSuppression, NonZero and RoiAlign as unsupported, and parses and builds them.
            with contextlib.suppress(ModelError), self._network(model):
                theirs = ()
        nodes = {issue.node for issue in ours}
        return (*ours, *(issue for issue in theirs if issue.node not in nodes and (issue.node or not ours)))

    def shape_inputs(self, model: Path) -> tuple[tuple[str, int], ...]:
        """Inputs of a model that the parser takes whose values decide shapes, and how many values each has.

        Raises: as `network`.
        """
        from trtopt.graph.proto import tensor_info

        light = parsing.light_model(existing_file(model, "the model"))
        if light is None or not any(may_be_values(tensor_info(value)) for value in light.graph.input):
            return ()

        with self._network(model) as network:
            inputs, names = parsing.network_inputs(network)
            return tuple((info.name, value_count(info)) for info in inputs if info.name in names)

    def limits(self, graph: ModelProto | None) -> tuple[Issue, ...]:
        """List what no build of this generation takes, found without its parser; nothing in a file that onnx can't read."""
        from trtopt.graph import limits

        return () if graph is None else limits.issues(graph, self.capabilities.types, self.capabilities.absent)

    @contextlib.contextmanager
    def _parser(self) -> Iterator[tuple[_Objects, Messages]]:
        """A parser with an empty network, and what TensorRT says meanwhile."""
        if not self.capabilities.builds_without_gpu and not (gpu := self.gpu()):
            raise DeviceError(
                f"asking TensorRT's parser ({self}) needs a GPU: {gpu.reason}; TensorRT-RTX needs none ({to_install('rtx')})"
            )
        objects = _Objects()
        with self._lock, self._collector.collecting() as messages:
            try:
                self._start(objects, typed=self.capabilities.typed_graph, messages=messages)
                yield objects, messages
            finally:
                objects.close()

    @contextlib.contextmanager
    def _network(self, model: Path) -> Iterator[Any]:
        """The network that the parser makes of `model`."""
        nodes = parsing.graph_nodes(parsing.light_model(existing_file(model, "the model")))
        with self._parser() as (objects, messages):
            if problem := parsing.parse(objects.parser, model, nodes, messages, str(model)):
                raise problem
            yield objects.network

    def build(
        self,
        model: Path,
        spec: BuildSpec,
        *,
        quantized: bool,
        layer_precision: Mapping[str, Precision] | None = None,
        preferred: Mapping[str, Precision] | None = None,
        calibration: Iterable[Arrays] | None = None,
        calibration_batch: int = 8,
        calibration_cache: bytes | None = None,
        name: str = "",
        reporter: Reporter = SILENT,
    ) -> BuiltPlan:
        """Parse `model` and build a plan.

        Args:
            model: an ONNX file; typed as `spec` wants where `typed(spec)`, else FP32-typed.
            quantized: the graph holds Q/DQ.
            layer_precision: ONNX node name → precision, for weakly typed builds only (a typed graph says it itself).
            preferred: likewise, where it can be built; what the layer gives is left to TensorRT.
            calibration: host batches (input name → array, first axis = samples) for `spec.calibrator == "native"`.
            calibration_batch: samples that TensorRT's calibrator gets at a time.
            calibration_cache: a cache that TensorRT's calibrator wrote before; then no data is read.
            name: what messages call the model; empty: its path.

        Raises:
            UnsupportedRequest: before any work, what this generation can't honour.
            UsageError: a dynamic input without a profile, or a profile that doesn't fit (every problem at once).
            UnsupportedOperator, InvalidModel: the parser refuses the model.
            BuildFailed: TensorRT gave no plan; its messages are quoted.
            BuildCancelled: Ctrl-C; nothing is left behind.
        """
        model = existing_file(model, "the model")
        self.refuse(spec, reporter)
        weak_options = weak.Options(
            quantized, layer_precision or {}, preferred or {}, calibration, calibration_batch, calibration_cache
        )
        cancel, start = threading.Event(), time.monotonic()
        stoppable = self.capabilities.progress_monitor
        device = self.device(spec)

        def work() -> BuiltPlan:
            # The GPU is current in this thread, which is the build's own.
            with current_gpu(device.ordinal if device else 0):
                return self._build(model, name or str(model), spec, weak_options, messages, monitor)

        refused = None
        with reporter.phase(f"building with {self}") as phase:
            show = None if stoppable else phase.detail
            with self._lock, self._collector.collecting(show, reporter.library) as messages:
                monitor = watch.make_monitor(self.module, phase, cancel) if stoppable else None
                try:
                    plan = watch.run(work, cancel, stoppable)
                except UnsupportedOperator as error:  # raised outside: written out, the build may go on
                    refused = error
                    phase.detail("operators refused")
        if refused is not None:
            raise refused
        return replace(plan, seconds=time.monotonic() - start, warnings=(*plan.warnings, *messages.warnings))

    def refit_plan(
        self,
        plan: bytes,
        model: Path,
        spec: BuildSpec,
        *,
        name: str,
        unchanged: bool = False,
        same_scales: bool = True,
        host_code: bool = False,
    ) -> tuple[memoryview, int]:
        """Return a full plan, with the weights of `model` in place of its own, and how many were given.

        The parser names layers and transforms weights as it did for the build, so they are given as the network has them.

        Args:
            model: an ONNX file of the graph that the plan was built from, apart from its weights.
            name: what messages call the plan.
            unchanged: these are the weights that it was built from: those that the plan has for itself stay.
            same_scales: the scales of activations are, too.
            host_code: as of `load`.

        Raises:
            UnsupportedRequest: the plan isn't refittable, or it and the model don't have the same weights; they are listed.
            BackendError: TensorRT refuses the weights.
            EngineError, EngineMismatch, DeviceError, UsageError: as `load`.
        """
        trt, device, objects = self.module, self.device(spec), _Objects()
        with current_gpu(device.ordinal if device else 0):
            engine = self.load(plan, name, host_code=host_code).engine
            # 10.6 says no of a plan that takes the very weights that it was built from.
            if not (engine.refittable or unchanged):
                raise UnsupportedRequest(f"{name} can't take other weights", ["build it again with `refit=True`"])
            with self._lock, self._collector.collecting() as messages:
                try:
                    self._start(objects, self.typed(spec), messages)
                    nodes = parsing.graph_nodes(parsing.light_model(model))
                    if problem := parsing.parse(objects.parser, model, nodes, messages, str(model)):
                        raise problem
                    weights = dict(parsing.network_weights(trt, objects.network))
                    try:
                        refitter = trt.Refitter(engine, self._collector.logger)
                    except TypeError as error:  # as in `_start`
                        raise translate(
                            messages.errors or (str(error),), f"{self} can't refit {name}", BackendError
                        ) from None
                    asked = list(zip(*refitter.get_all(), strict=True))
                    lacking = [key for key in asked if key not in weights]
                    if not unchanged:
                        # What the plan keeps for itself, perhaps scales of weights, would stay the old one.
                        own = weights.keys() - {*asked}
                        lacking += [key for key in own if parsing.may_change(weights[key], scalars=not same_scales)]
                    given = {key: parsing.as_weights(trt, weights[key]) for key in asked if key in weights}
                    refused = [key for key, values in given.items() if not refitter.set_weights(*key, values)]
                    lacking += zip(*refitter.get_missing(), strict=True) if not (lacking or refused) else ()
                    if problems := [f"{layer} ({role.name.lower()})" for layer, role in (*lacking, *refused)]:
                        listing = first_of(sorted(set(problems)), 5)
                        why = f"it lets {listing} not be replaced, or the model lacks them: build an engine of the new model"
                        raise UnsupportedRequest(f"{self} can't put all weights into {name}", [why])
                    if not refitter.refit_cuda_engine():
                        raise translate(messages.errors, f"{self} can't refit {name}", BackendError)
                    return memoryview(self._serialized(engine, refit=spec.refit)).cast("B"), len(asked)
                finally:
                    refitter = None  # it uses the engine
                    objects.close()

    def _serialized(self, engine: Any, *, refit: bool) -> Any:
        """The plan of an engine with its weights; `refit`: they can be replaced again."""
        if not self.capabilities.strip:  # 8.6 knows one form
            return engine.serialize()
        config, flags = engine.create_serialization_config(), self.module.SerializationFlag
        config.clear_flag(flags.EXCLUDE_WEIGHTS)
        if refit and "INCLUDE_REFIT" in flags.__members__:  # before there was this flag, a plan stayed refittable
            config.set_flag(flags.INCLUDE_REFIT)
        return engine.serialize_with_config(config)

    # The work

    def _start(self, objects: _Objects, typed: bool, messages: Messages) -> None:
        trt = self.module
        self._register_plugins()
        try:
            objects.builder = trt.Builder(self._collector.logger)
        except TypeError as error:  # how pybind11 says that the native side gave nothing: why, only the logger knows
            raise translate(messages.errors or (str(error),), f"{self} doesn't start", BackendError) from None
        flags = (1 << int(getattr(trt.NetworkDefinitionCreationFlag, name)) for name in self._network_flags(typed))
        objects.network = objects.builder.create_network(sum(flags))
        objects.parser = trt.OnnxParser(objects.network, self._collector.logger)

    def _build(
        self, model: Path, name: str, spec: BuildSpec, weak_options: weak.Options, messages: Messages, monitor: Any
    ) -> BuiltPlan:
        objects, warnings, native = _Objects(), list[str](), None
        try:
            light = parsing.light_model(model)
            if issues := self.limits(light):
                raise parsing.refusal(name, issues)
            nodes = parsing.graph_nodes(light)
            self._start(objects, self.typed(spec), messages)
            if problem := parsing.parse(objects.parser, model, nodes, messages, name):
                raise problem
            if objects.network.num_outputs == 0:
                # The parser takes an empty file, and some random ones, for a model without nodes.
                raise InvalidModel(f"{name} has no outputs, so no network; run `trtopt check {name}`")
            self._let_attention_be_decomposed(objects.network)
            inputs, shape_inputs = parsing.network_inputs(objects.network)
            validate_profiles(inputs, spec.profiles, shape_inputs=shape_inputs)
            objects.config = objects.builder.create_builder_config()
            self._configure_common(objects.config, spec, monitor)
            self._configure(objects.config, spec)
            self._add_profiles(objects, spec, inputs, shape_inputs)
            if not self.typed(spec):
                weak.set_precisions(self.module, objects.network, objects.config, spec, weak_options, warnings)
                if spec.calibrator == "native":
                    upload = functools.partial(self.calibration_upload, spec.device)
                    native = weak.NativeCalibration(self.module, inputs, weak_options, upload)
                    native.attach(objects.builder, objects.config)
                elif spec.precision.quantized and not weak_options.quantized:
                    raise UsageError(f"{name} has no Q/DQ and no calibrator was given: nothing would run in INT8")
            if spec.timing_cache is not None:
                _attach_timing_cache(objects.config, spec.timing_cache, warnings)
            plan = objects.builder.build_serialized_network(objects.network, objects.config)
            if native is not None:
                native.finish(plan is not None, warnings)
            if plan is None:
                raise translate(messages.errors, f"{self} can't build {name}", BuildFailed)
            if spec.timing_cache is not None:
                try:
                    _save_timing_cache(objects.config, spec.timing_cache)
                except OutputError as error:  # the engine is what was wanted
                    warnings.append(f"the timing cache isn't kept: {error}")
        finally:
            objects.close()
        view = memoryview(plan).cast("B")
        report = self._found_layers(view, messages, dict(nodes), parsing.float_products(light))
        cache = None if native is None else native.cache
        targets = self.targets(spec)
        return BuiltPlan(
            view,
            report.layers,
            tuple(warnings),
            0.0,
            targets,
            report.unread,
            native_cache=cache,
            scratch=report.scratch,
        )

    def _let_attention_be_decomposed(self, network: Any) -> None:
        """Let TensorRT compute attention by its parts where it has no kernel for the whole; else it fails to build it."""
        if not hasattr(self.module, "IAttention"):
            return
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if layer.type == self.module.LayerType.ATTENTION_INPUT:
                layer.__class__ = self.module.IAttentionInputLayer  # the bindings give the base class
                layer.attention.decomposable = True

    def _configure_common(self, config: Any, spec: BuildSpec, monitor: Any) -> None:
        trt = self.module
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else the engine can't say its precisions
        if monitor is not None:
            config.progress_monitor = monitor
        if spec.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, spec.workspace)
        if spec.optimization_level is not None:
            config.builder_optimization_level = spec.optimization_level
        if spec.hardware_compatibility != "none":
            level = getattr(trt.HardwareCompatibilityLevel, spec.hardware_compatibility.upper())
            config.hardware_compatibility_level = level
        flags = {
            "VERSION_COMPATIBLE": spec.version_compatible,
            "EXCLUDE_LEAN_RUNTIME": spec.exclude_lean_runtime,
            "STRIP_PLAN": spec.strip,
            "REFIT_IDENTICAL": spec.strip and not spec.refit,  # else nothing is stripped
            "REFIT": spec.refit,
            "SPARSE_WEIGHTS": spec.sparsity,
        }
        for name, value in flags.items():
            if value:
                config.set_flag(getattr(trt.BuilderFlag, name))
        if not spec.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)  # on by default

    def _add_profiles(
        self, objects: _Objects, spec: BuildSpec, inputs: tuple[TensorInfo, ...], shape_inputs: frozenset[str]
    ) -> None:
        open_inputs = [info.name for info in inputs if info.open_axes or info.name in shape_inputs]
        if not open_inputs:
            return
        for number, ranges in enumerate(spec.profiles):
            profile = objects.builder.create_optimization_profile()
            for name in open_inputs:
                give = profile.set_shape_input if name in shape_inputs else profile.set_shape
                give(name, ranges[name].min, ranges[name].opt, ranges[name].max)
            if objects.config.add_optimization_profile(profile) < 0:
                listing = "; ".join(f"{name}:{shape}" for name, shape in ranges.items())
                raise UsageError(f"TensorRT refuses profile {number} ({listing}): correct `shapes=`")


def _attach_timing_cache(config: Any, path: Path, warn: list[str]) -> None:
    """Give `config` the cache in `path`, or an empty one (with a warning) where it can't be used."""
    for content in (_read_timing_cache(path), b""):
        cache = _timing_cache(config, content)
        if cache is not None and config.set_timing_cache(cache, False):
            return
        if content:
            warn.append(f"the timing cache {path} is another TensorRT's or another GPU's: it is ignored and replaced")


def _save_timing_cache(config: Any, path: Path) -> None:
    """Write the cache back, together with what another build wrote there meanwhile."""
    if (cache := config.get_timing_cache()) is None:
        return
    with alone(path.with_name(f".{path.name}.lock")):  # else of two that end at once one's timings are lost
        if (content := _read_timing_cache(path)) and (other := _timing_cache(config, content)) is not None:
            cache.combine(other, False)  # a cache of another GPU is refused here and replaced
        write_bytes(path, memoryview(cache.serialize()).cast("B"))


def _timing_cache(config: Any, content: bytes) -> Any:
    try:
        return config.create_timing_cache(content)
    except (TypeError, RuntimeError):  # how pybind11 says that the native side gave nothing
        return None


def _read_timing_cache(path: Path) -> bytes:
    try:
        return whole(path, None)
    except FileNotFoundError:
        return b""
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"can't read the timing cache {path}: {reason}; give another `timing_cache=`") from error
