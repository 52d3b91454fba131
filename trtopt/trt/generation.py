"""The work that every TensorRT generation shares, written once: parse, configure, build, read the layers back, load.

It is TensorRT 10 and 11 as it stands; a family (families.py) overrides the few hooks that differ.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trtopt.core.errors import (
    BackendError,
    BuildFailed,
    DeviceError,
    EngineError,
    ModelError,
    OutputError,
    UnsupportedOperator,
    UnsupportedRequest,
    UsageError,
)
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import SETTINGS, BuildSpec, Issue
from trtopt.core.version import to_install
from trtopt.cuda.device import DeviceInfo, current_gpu
from trtopt.cuda.driver import Driver
from trtopt.trt import kernels, lean_library, parsing, plugins, timing_cache, watch, weak
from trtopt.trt.capabilities import Capabilities, read, refusals
from trtopt.trt.layers import LayerReport, from_inspector
from trtopt.trt.loader import Loader
from trtopt.trt.messages import Messages, translate
from trtopt.trt.profiles import may_be_values, validate_profiles, value_count

if TYPE_CHECKING:  # running an engine needs no onnx
    from onnx import ModelProto


@dataclass(frozen=True, kw_only=True)
class BuiltPlan(LayerReport):
    """The result of a build, with the engine's layers.

    Attributes:
        warnings: TensorRT's warnings, repeated ones counted.
        seconds: of parsing and building.
        targets: compute capabilities that it was built for (TensorRT-RTX); empty: the GPU of this machine.
        native_cache: the calibration cache that TensorRT's own calibrator wrote.
    """

    plan: bytes | memoryview
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    targets: tuple[int, ...] = ()
    native_cache: bytes | None = None


class Generation(Loader):
    """One installed TensorRT that builds.

    Attributes:
        capabilities: what it honours, as its module shows, and as is `known` of its generation.
    """

    lean = False

    def __init__(self, module: Any, family: str) -> None:
        super().__init__(module, family)
        shown, facts = read(module), self.facts
        self.capabilities: Capabilities = replace(shown, options=shown.options - facts.lacks, **facts.known)
        # One build at a time in a process: two would time each other's kernels, and mix their messages.
        self._lock = threading.Lock()
        self._builders = dict[int | None, Any]()  # that wait, by the current context
        atexit.register(self._builders.clear)  # before TensorRT's own end

    # Hooks

    def _network_flags(self, typed: bool) -> tuple[str, ...]:
        """Names of the NetworkDefinitionCreationFlag members to create a network with."""
        # Where there are no builder flags for precisions, every network is strongly typed, and this flag deprecated.
        return ("STRONGLY_TYPED",) if typed and self.capabilities.precision_flags else ()

    def _refusals(self, spec: BuildSpec, reporter: Reporter) -> list[str]:
        """Refusals that only this family has; the reporter hears what the user should know before the build."""
        return []

    def _configure(self, config: Any, spec: BuildSpec) -> None:
        """Give a new config what `spec` asks for, apart from profiles and precisions."""
        trt = self.module
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else the engine can't say its precisions
        if spec.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, spec.workspace)
        if spec.hardware_compatibility != "none":
            level = getattr(trt.HardwareCompatibilityLevel, spec.hardware_compatibility.upper())
            config.hardware_compatibility_level = level
        if spec.strip and not spec.refit:
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)  # else nothing is stripped
        for name, item in SETTINGS.items():
            value = getattr(spec, name)
            if value == getattr(BuildSpec, name):
                continue
            if item.flag:
                change = config.set_flag if value else config.clear_flag
                change(getattr(trt.BuilderFlag, item.flag))
            elif item.attribute:
                setattr(config, item.attribute, value)

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
        """The GPU that a build with `spec` is on; None: there is none here. DeviceError where there are others."""
        gpus = self.gpu().devices
        if gpus and spec.device >= len(gpus):
            raise DeviceError(f"`device={spec.device}`: this machine's GPUs are 0 to {len(gpus) - 1}")
        return gpus[spec.device] if gpus else None

    def typed(self, spec: BuildSpec) -> bool:
        """Tell whether a build takes its precisions from the ONNX graph's types; else it wants an FP32-typed graph."""
        return self.capabilities.typed_graph and spec.calibrator != "native"

    def describe(self) -> dict[str, Any]:
        gpu, capabilities = self.gpu(), self.capabilities.describe()
        can_build = bool(gpu) or self.capabilities.builds_without_gpu
        why_not = "" if can_build else gpu.reason
        return {**super().describe(), "can_build": can_build, "why_not": why_not, "capabilities": capabilities}

    def refuse(self, spec: BuildSpec, reporter: Reporter = SILENT) -> None:
        """Raise UnsupportedRequest, before any work, for all of `spec` that can't be honoured here: what was asked, what is
        there, what to type instead; DeviceError where there is no such GPU."""
        gpu, device = self.gpu(), self.device(spec)
        capability = device.compute_capability if device else None
        problems = [*refusals(spec, self.capabilities, str(self), capability), *self._refusals(spec, reporter)]
        can = self.capabilities.options
        if spec.version_compatible and "version_compatible" in can and not spec.exclude_lean_runtime:
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

    def unsupported(self, model: Path) -> tuple[Issue, ...]:
        """All in `model` that can't be built, by rules and asked of the installed parser; empty: it takes it all. DeviceError
        where the parser needs a GPU and there is none."""
        light = parsing.light_model(model)
        from trtopt.graph.proto import custom_nodes

        ours = self.limits(light)
        if custom_nodes(light):
            here = self.creators({node.op_type for node in custom_nodes(light)})
            ours += tuple(plugins.problems(light, here, gpu=bool(self.gpu())))
        with self._parser() as (objects, _):
            theirs = parsing.ask_support(objects.parser, model, parsing.graph_nodes(light))
        if theirs and all(issue.reason == parsing.UNEXPLAINED for issue in theirs):
            # 10.6 counts NonMaxSuppression, NonZero and RoiAlign as unsupported, and parses and builds them.
            with contextlib.suppress(ModelError), self.parsed(model):
                theirs = ()
        nodes = {issue.node for issue in ours}
        return (*ours, *(issue for issue in theirs if issue.node not in nodes and (issue.node or not ours)))

    def compile_operators(self, graph: ModelProto, spec: BuildSpec, reporter: Reporter = SILENT) -> None:
        """Make the plugins of custom operators that have a kernel, for the GPU here; errors as `kernels.library`."""
        from trtopt.graph.proto import operators_in

        if (device := self.device(spec)) is not None:
            capability, rtx = device.compute_capability, self.family == "rtx"
            kernels.provide(operators_in(graph), self.version, capability, reporter, rtx=rtx)

    def shape_inputs(self, model: Path) -> tuple[tuple[str, int], ...]:
        """Inputs of a model that the parser takes whose values decide shapes, and how many values each has."""
        from trtopt.graph.proto import tensor_info

        light = parsing.light_model(model)
        if not any(may_be_values(tensor_info(value)) for value in light.graph.input):
            return ()

        with self.parsed(model) as (objects, _):
            inputs, names = parsing.network_inputs(objects.network)
            return tuple((info.name, value_count(info)) for info in inputs if info.name in names)

    def limits(self, graph: ModelProto) -> tuple[Issue, ...]:
        """List what no build of this generation takes, found without its parser."""
        from trtopt.graph import limits

        return limits.issues(graph, self.capabilities.types, self.capabilities.absent)

    @contextlib.contextmanager
    def _parser(self, typed: bool = True) -> Iterator[tuple[SimpleNamespace, Messages]]:
        """A parser with an empty network, `typed` where it can be, and what TensorRT says meanwhile; for one at a time."""
        if not self.capabilities.builds_without_gpu and not (gpu := self.gpu()):
            raise DeviceError(
                f"asking TensorRT's parser ({self}) needs a GPU: {gpu.reason}; TensorRT-RTX needs none ({to_install('rtx')})"
            )
        typed = typed and self.capabilities.typed_graph
        with self._lock, self._collector.collecting() as messages, self._started(typed, messages) as objects:
            yield objects, messages

    @contextlib.contextmanager
    def parsed(self, model: Path, *, typed: bool = True) -> Iterator[tuple[SimpleNamespace, Messages]]:
        """`_parser` with the network that it makes of `model`."""
        with self._parser(typed) as (objects, messages):
            parsing.parse(objects.parser, model, parsing.light_model(model), messages, str(model))
            yield objects, messages

    @contextlib.contextmanager
    def _started(self, typed: bool, messages: Messages) -> Iterator[SimpleNamespace]:
        """A builder, an empty network and its parser, let go in their order: a parser doesn't keep its network alive.

        Where nothing fails the builder waits for the next one on its GPU: making one takes seconds.
        """
        driver = Driver.load()
        gpu = None if driver is None else driver.current()
        objects = SimpleNamespace(parser=None, network=None, config=None, builder=self._builders.pop(gpu, None))
        try:
            self._register_plugins()
            objects.builder = objects.builder or self.native(self.module.Builder, messages)
            creation = self.module.NetworkDefinitionCreationFlag
            flags = (1 << int(getattr(creation, name)) for name in self._network_flags(typed))
            objects.network = objects.builder.create_network(sum(flags))
            objects.network.name = "trtopt"  # else it has a number in the plan: of how many the builder has made
            objects.parser = self.module.OnnxParser(objects.network, self._collector.logger)
            yield objects
            self._builders[gpu] = objects.builder
        finally:
            objects.parser = objects.network = objects.config = objects.builder = None

    def build(
        self, model: Path, spec: BuildSpec, *, name: str = "", reporter: Reporter = SILENT, **more: Any
    ) -> BuiltPlan:
        """Parse `model`, a valid graph that is typed as `spec` wants where `typed(spec)`, else FP32-typed, and build a plan.

        Args:
            name: what messages call the model; empty: its path.
            more: the fields of `weak.Options`.

        Raises:
            UnsupportedRequest: before any work, what this generation can't honour.
            UsageError: a dynamic input without a profile, or a profile that doesn't fit (every problem at once).
            UnsupportedOperator, InvalidModel, BuildFailed: TensorRT refuses the model; its messages are quoted.
            BuildCancelled: Ctrl-C; nothing is left behind.
        """
        options = weak.Options(**more)
        self.refuse(spec, reporter)
        cancel, start = threading.Event(), time.monotonic()
        stoppable, device = self.capabilities.progress_monitor, self.device(spec)

        def work() -> BuiltPlan:
            # The GPU is current in this thread, which is the build's own.
            with current_gpu(device.ordinal if device else 0):
                return self._build(model, name or str(model), spec, options, messages, monitor)

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

    # The work

    def _build(
        self, model: Path, name: str, spec: BuildSpec, options: weak.Options, messages: Messages, monitor: Any
    ) -> BuiltPlan:
        warnings, native = list[str](), None
        light = parsing.light_model(model)
        with self._started(self.typed(spec), messages) as objects:
            parsing.parse(objects.parser, model, light, messages, name)
            _let_attention_be_decomposed(self.module, objects.network)
            inputs, shape_inputs = parsing.network_inputs(objects.network)
            validate_profiles(inputs, spec.profiles, shape_inputs=shape_inputs)
            objects.config = objects.builder.create_builder_config()
            self._configure(objects.config, spec)
            if monitor is not None:
                objects.config.progress_monitor = monitor
            _add_profiles(objects, spec, [info.name for info in inputs if info.open_axes], shape_inputs)
            if not self.typed(spec):
                weak.set_precisions(self.module, objects.network, objects.config, spec, options, warnings)
                if spec.calibrator == "native":
                    native = weak.NativeCalibration(self.module, inputs, options, spec.device)
                    native.attach(objects.builder, objects.config)
                elif spec.precision.quantized and not options.quantized:
                    raise UsageError(f"{name} has no Q/DQ and no calibrator was given: nothing would run in INT8")
            if spec.timing_cache is not None:
                timing_cache.attach(objects.config, spec.timing_cache, warnings)
            plan = objects.builder.build_serialized_network(objects.network, objects.config)
            if native is not None:
                native.finish(plan is not None, warnings)
            if plan is None:
                raise translate(messages.errors, f"{self} can't build {name}", BuildFailed)
            if spec.timing_cache is not None:
                try:
                    timing_cache.save(objects.config, spec.timing_cache)
                except OutputError as error:  # the engine is what was wanted
                    warnings.append(f"the timing cache isn't kept: {error}")
        view = memoryview(plan).cast("B")
        nodes = dict(parsing.graph_nodes(light))
        report = self._found_layers(view, messages, nodes, parsing.float_products(light))
        cache, targets = None if native is None else native.cache, self.targets(spec)
        return BuiltPlan(**vars(report), plan=view, warnings=tuple(warnings), targets=targets, native_cache=cache)


def _let_attention_be_decomposed(trt: Any, network: Any) -> None:
    """Let TensorRT compute attention by its parts where it has no kernel for the whole; else it fails to build it."""
    for index in range(network.num_layers) if hasattr(trt, "IAttention") else ():
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings give the base class
            layer.attention.decomposable = True


def _add_profiles(objects: SimpleNamespace, spec: BuildSpec, dynamic: list[str], shape_inputs: frozenset[str]) -> None:
    names = dict.fromkeys([*dynamic, *shape_inputs])
    for number, ranges in enumerate(spec.profiles if names else ()):
        profile = objects.builder.create_optimization_profile()
        for name in names:
            give = profile.set_shape_input if name in shape_inputs else profile.set_shape
            give(name, ranges[name].min, ranges[name].opt, ranges[name].max)
        if objects.config.add_optimization_profile(profile) < 0:
            listing = "; ".join(f"{name}:{shape}" for name, shape in ranges.items())
            raise UsageError(f"TensorRT refuses profile {number} ({listing}): correct `shapes=`")
